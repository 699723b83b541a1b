"""FlashAttention-4's kernels, compiled from its classes for the forms of calls that NSA makes.

    forward                            the forward's mainloop
    preprocess, backward, round_sums   the backward: do . o, log2 of lse and zeros for dq; the mainloop; sums rounded
    count_tiles                        tables of tiles for more than FEW_DOCUMENTS packed documents

Tiles and stages are those that FA4's interface takes for these forms, which tests/cute/test_fa4_kernels.py holds
machine code against, but where a comment says otherwise. FA4 is imported where a kernel is compiled: importing it takes
longer than loading a kernel from disk.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils
import torch
from cutlass import Float32, Int32
from torch import Tensor

from cute_kernels.fa4.masks import Mask, MaskMod
from cute_kernels.fa4.rules import NARROW, ONE_TILE, WINDOW_TILE
from cute_kernels.runtime import disk_cache
from cute_kernels.runtime.compiling import COMPILING
from cute_kernels.runtime.device import compute_capability, multiprocessors
from cute_kernels.runtime.jit import CUTE_DTYPES, compile_kernel, compiled_once, fake

FEW_DOCUMENTS = 256
"""With more documents, kernels look their tiles up in tables (`count_tiles`)."""

Pattern = tuple[bool, ...]
"""True for each dimension of a tensor that repeats one element. Such strides of 0 are compiled in."""


@dataclass(frozen=True)
class Form:
    """Properties of a call that are compiled in. The repr is the same in every process."""

    arch: int
    """90, 100, ..."""
    dtype: torch.dtype
    group: int
    """Query heads of a key/value head."""
    dim: int
    v_dim: int
    causal: bool
    local: bool
    """True for a window."""
    packed: bool
    """True for packed documents, with cu_seqlens and seqused."""
    many: bool
    """True for more than FEW_DOCUMENTS documents."""
    tile: tuple[int, int] | None
    """Rows and keys of listed tiles."""
    mask_mod: MaskMod | None
    num_scalars: int
    """Number of scalars of the mask_mod."""
    aux_ranks: tuple[int, ...]
    """Number of dimensions of each tensor of the mask_mod."""
    expanded: tuple[Pattern, ...]
    """Patterns of q, k, v and, in backward, do."""
    lists_expanded: tuple[Pattern, ...]
    """Patterns of the block lists."""

    @classmethod
    def of(cls, mask: Mask, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Form:
        """The form of a call. `more`: do, in backward."""
        major, minor = compute_capability(q.device.index or 0)
        lists, documents = mask.lists, mask.documents
        return cls(
            arch=10 * major + minor,
            dtype=q.dtype,
            group=q.shape[-2] // k.shape[-2],
            dim=q.shape[-1],
            v_dim=v.shape[-1],
            causal=mask.causal,
            local=mask.window != (None, None),
            packed=documents is not None,
            many=documents is not None and len(documents.seqused_q) > FEW_DOCUMENTS,
            tile=None if lists is None else (lists.rows, lists.width),
            mask_mod=mask.mask_mod,
            num_scalars=len(mask.scalars),
            aux_ranks=tuple(x.dim() for x in mask.tensors or ()),
            expanded=tuple(map(_pattern, (q, k, v, *more))),
            lists_expanded=() if lists is None else tuple(map(_pattern, lists.tensors)),
        )

    @property
    def batched(self) -> int:
        """Dimensions of q, k and v."""
        return 3 if self.packed else 4

    @property
    def is_blackwell(self) -> bool:
        return self.arch // 10 == 10

    @property
    def narrow(self) -> bool:
        return self.tile is not None and self.tile[1] == NARROW

    @property
    def cute_dtype(self) -> Any:
        return CUTE_DTYPES[self.dtype]

    def window(self) -> tuple[Any, Any]:
        return (1, 1) if self.local else (None, None)

    def bounds(self) -> list[Any]:
        """cu_seqlens and seqused, each of queries and of keys."""
        return [_tensor(torch.int32, (False,), align=4) if self.packed else None for _ in range(4)]

    def table(self) -> Any:
        return _tensor(torch.int32, (False,), align=4) if self.many else None

    def aux(self) -> Any:
        from flash_attn.cute.utils import AuxData

        tensors = [_tensor(torch.int32, (False,) * rank, align=None) for rank in self.aux_ranks]
        return AuxData(tensors or None, tuple(Int32(0) for _ in range(self.num_scalars)) or None)

    def sparse(self) -> Any:
        if self.tile is None:
            return None
        from flash_attn.cute.block_sparsity import BlockSparseTensors

        return BlockSparseTensors(*(_tensor(torch.int32, pattern, align=4) for pattern in self.lists_expanded))

    def without_mask(self) -> Form:
        """The form without heads, mask and expanded tensors, for the kernels around the mainloop."""
        plain: dict[str, Any] = dict.fromkeys(("expanded", "lists_expanded", "aux_ranks"), ())
        plain |= {"group": 1, "causal": False, "local": False, "tile": None, "mask_mod": None, "num_scalars": 0}
        return replace(self, **plain)

    def make_mask_mod(self) -> Any:
        return None if self.mask_mod is None else self.mask_mod.make(*self.mask_mod.constants)


def _pattern(x: Tensor) -> Pattern:
    strides = x.stride()
    return tuple(stride == 0 for stride in strides) if 0 in strides else (False,) * len(strides)


def _tensor(dtype: torch.dtype, expanded: Pattern, align: int | None = 16) -> Any:
    """A tensor to compile with, of any sizes and strides; the last dimension is contiguous.

    Args:
        align: bytes, which the first element's address is a multiple of; None: of the element's size.
    """
    sizes = tuple(cute.sym_int() for _ in expanded)
    strides = (*(0 if repeated else cute.sym_int64() for repeated in expanded[:-1]), 1)
    align = dtype.itemsize if align is None else align
    return cute.runtime.make_fake_tensor(CUTE_DTYPES[dtype], sizes, stride=strides, assumed_align=align)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without FA4's own: of deprecations, and of masks that read nothing. Kernels are compiled under a lock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Forward


class Shape(NamedTuple):
    """Properties of the number of rows that are compiled into the forward for sm_100."""

    stages: int
    """Tiles of ONE_TILE rows that a CTA holds."""
    one_tile: bool
    """True if one CTA holds all rows of a head."""
    sms: int
    """Multiprocessors, which persistent kernels have a CTA for."""

    @classmethod
    def of(cls, form: Form, q: Tensor, packs: bool) -> Shape | None:
        if not form.is_blackwell:
            return None
        rows = q.shape[-3] * (form.group if packs else 1)
        stages = 2 if rows > ONE_TILE else 1
        return cls(stages, rows <= stages * ONE_TILE, multiprocessors(q.device))


def forward_tile(form: Form, window_tiles: bool) -> tuple[int, int]:
    """tile_m and tile_n. Args: see `forward`."""
    rows, keys = ONE_TILE, ONE_TILE
    if not form.is_blackwell and form.dim == 64 and (form.tile is None or form.tile[0] % 192 == 0):
        rows = 192
    elif not form.is_blackwell and window_tiles and form.dim == form.v_dim == 128:
        rows, keys = WINDOW_TILE
    return rows, NARROW if form.narrow else keys


@compiled_once
@_without_warnings()
def forward(form: Form, lse: bool, packs: bool, window_tiles: bool, shape: Shape | None) -> Any:
    """The forward.

    Args:
        lse: write log-sum-exp too.
        packs: a tile holds the query heads of a key/value head.
        window_tiles: take WINDOW_TILE where its comment says so, in place of FA4's tiles.
    """
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    mask_mod = form.make_mask_mod()
    masked = mask_mod is not None
    causal, local = form.causal and not masked, form.local and not masked
    rows, keys = forward_tile(form, window_tiles)
    common: dict[str, Any] = {
        "is_causal": causal,
        "is_local": local,
        "pack_gqa": packs,
        "score_mod": None,
        "mask_mod": mask_mod,
        "has_aux_tensors": bool(form.aux_ranks),
        "paged_kv_non_tma": False,
    }
    kernel: Any
    if shape is None:
        kernel = FlashAttentionForwardSm90(
            form.cute_dtype,
            form.dim,
            form.v_dim,
            form.group,
            tile_m=rows,
            tile_n=keys,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            intra_wg_overlap=True,
            mma_pv_is_rs=True,
            q_subtile_factor=1 if form.tile is None else form.tile[0] // rows,
            **common,
        )
        before: tuple[Any, ...] = ()
        after: tuple[Any, ...] = (form.table(), None)
        sms = 1
    else:
        dense = not (causal or local or form.packed or form.tile)
        pairs = dense and form.dim == form.v_dim == 128 and not shape.one_tile and not (packs and rows % form.group)
        kernel = FlashAttentionForwardSm100(
            form.dim,
            form.v_dim,
            qhead_per_kvhead=form.group,
            is_split_kv=False,
            m_block_size=rows,
            n_block_size=keys,
            q_stage=shape.stages,
            is_static_persistent=not form.packed and (not (causal or local) or shape.one_tile),
            is_varlen_q=form.packed,
            q_subtile_factor=1 if form.tile is None else form.tile[0] // (shape.stages * rows),
            kv_subtile_factor=1,
            use_2cta_instrs=pairs,
            use_clc_scheduler=False,
            seqlen_k_per_split=None,
            has_tile_count_semaphore=False,
            use_s_ping_pong=shape.stages == 1
            and keys == ONE_TILE
            and form.dim == form.v_dim
            and not masked
            and form.tile is None,
            **common,
        )
        # No factors of fp8; no splits, semaphores or virtual batches; the last is the number of rows
        before, after, sms = (None,), (*[None] * 4, form.table(), None, None, 1), shape.sms
    no_head = form.batched - 1
    tensors = [_tensor(form.dtype, pattern) for pattern in form.expanded]
    o = _tensor(form.dtype, (False,) * form.batched)
    sums = _tensor(torch.float32, (False,) * no_head, align=4) if lse else None
    options = *form.bounds(), None, *form.window(), None, *before, form.sparse(), form.aux(), *after
    with _multiprocessors(sms):
        return compile_kernel(kernel, *tensors, o, sums, 1.0, *options)


# Backward, with D = D_v


class Tiles(NamedTuple):
    """Tiles of the backward's mainloop."""

    rows: int
    keys: int
    """Keys of one CTA."""
    ctas: int
    """Number of CTAs that work on neighboring keys as a pair (2), or 1."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of sm_90's class."""

    @classmethod
    def of(cls, form: Form) -> Tiles:
        if form.is_blackwell:
            even = form.tile is None or form.tile[1] // ONE_TILE % 2 == 0
            return cls(ONE_TILE, ONE_TILE, 2 if form.dim >= 128 and even else 1)
        if form.narrow:  # FA4 has tiles of so few keys for the widest heads only
            layout = {"AtomLayoutMSdP": 2, "AtomLayoutNdKV": 1, "AtomLayoutMdQ": 2}
            options = {"Q_stage": 2, "dO_stage": 1, "PdS_stage": 1, "SdP_swapAB": False, "dQ_swapAB": False, **layout}
            return cls(128, NARROW, 1, tuple(options.items()))
        rows = 128
        if form.dim == 128:
            even = form.tile is None or form.tile[0] % 80 == 0
            rows = 80 if even and not (form.causal or form.local) else 64
        layout = {"AtomLayoutMSdP": 1, "AtomLayoutNdKV": 2, "AtomLayoutMdQ": 2 if form.dim == 64 else 1}
        options = {"Q_stage": 2, "dO_stage": 2, "PdS_stage": 2, "SdP_swapAB": True, "dQ_swapAB": rows % 64 != 0}
        return cls(rows, ONE_TILE, 1, tuple({**options, **layout}.items()))

    def padded(self, rows: int, keys: int, documents: int) -> tuple[int, int]:
        """Rows and keys of fp32 sums: whole tiles, of which each document may begin one."""
        sizes = (rows, self.rows), (keys, self.ctas * self.keys)
        rows, keys = (-(-(n + documents * size) // size) * size for n, size in sizes)
        return rows, keys


@compiled_once
@_without_warnings()
def preprocess(form: Form, rows: int) -> Any:
    """do . o, lse in base 2, and zeros for dq. Args: form: `without_mask`. rows: of the mainloop's tile."""
    from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess

    batch, width = (None,) * (form.batched - 3), form.dim
    kernel = FlashAttentionBackwardPreprocess(
        form.cute_dtype,
        width,
        form.v_dim,
        rows,
        use_padded_offsets=True,
        nheads_major=False,
        pack_gqa=False,
        qhead_per_kvhead=1,
        nheads_kv=1,
        hdim_multiple_of=32,
    )
    o, do = (fake(form.dtype, *batch, None, None, None) for _ in range(2))
    delta, lse, log2_lse, dq = (fake(torch.float32, *batch, None, None, aligned=x != 1) for x in range(4))
    first, used = form.bounds()[::2]
    options = first, used, None, None, None, Float32(1.0), form.table(), None
    return compile_kernel(kernel, o, do, delta, lse, log2_lse, dq, *options)


@compiled_once
@_without_warnings()
def backward(form: Form, deterministic: bool) -> Any:
    """dq in fp32; dk and dv, in fp32 where query heads share them.

    Args:
        deterministic: add up in a fixed order.
    """
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100

    tiles, mask_mod = Tiles.of(form), form.make_mask_mod()
    common: dict[str, Any] = {
        "deterministic": deterministic,
        "tile_m": tiles.rows,
        "tile_n": tiles.keys,
        "score_mod": None,
        "score_mod_bwd": None,
        "mask_mod": mask_mod,
        "has_aux_tensors": bool(form.aux_ranks),
        "q_subtile_factor": 2 if form.tile is None else form.tile[0] // tiles.rows,
    }
    kernel: Any
    if form.is_blackwell:
        kernel = FlashAttentionBackwardSm100(
            form.dim,
            form.v_dim,
            is_causal=form.causal,
            is_local=form.local,
            qhead_per_kvhead=form.group,
            cluster_size=tiles.ctas,
            use_2cta_instrs=tiles.ctas == 2,
            spt=deterministic and (form.causal or form.local),
            kv_subtile_factor=1 if form.tile is None else form.tile[1] // tiles.keys,
            **common,
        )
    else:
        kernel = FlashAttentionBackwardSm90(
            form.cute_dtype,
            form.dim,
            form.v_dim,
            form.group,
            form.causal,
            is_local=form.local,
            dKV_swapAB=False,
            num_threads=384,
            V_in_regs=False,
            dQ_single_wg=False,
            **dict(tiles.options),
            **common,
        )
    no_head = (False,) * (form.batched - 1)
    q, k, v, do = (_tensor(form.dtype, pattern) for pattern in form.expanded)
    log2_lse, delta, dq = (_tensor(torch.float32, no_head) for _ in range(3))
    sums = (torch.float32, no_head) if form.group > 1 else (form.dtype, (False,) * form.batched)
    dk, dv = (_tensor(*sums) for _ in range(2))
    semaphores = [None, None, None]
    if deterministic:
        counts = (tiles.ctas, 2, 2) if form.group > 1 else (tiles.ctas,)
        semaphores[: len(counts)] = map(_semaphores, counts)
    options = *form.bounds(), *form.window(), *semaphores, form.aux(), form.sparse(), form.table()
    return compile_kernel(kernel, q, k, v, do, log2_lse, delta, dq, dk, dv, 1.0, *options)


def _semaphores(count: int) -> Any:
    """int32 `[B,heads,tiles,count]`, contiguous."""
    sizes = *(cute.sym_int() for _ in range(3)), count
    return cute.runtime.make_fake_compact_tensor(Int32, sizes, stride_order=(3, 2, 1, 0), assumed_align=4)


@compiled_once
@_without_warnings()
def round_sums(form: Form, tiles: Tiles, of_keys: bool) -> Any:
    """fp32 sums rounded to the gradient's dtype: dq's, or dk's and dv's. Args: form: `without_mask`."""
    from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100

    pairs, more = tiles.ctas == 2, dict(tiles.options)
    orders = (None, None)
    if form.is_blackwell:
        orders = FlashAttentionBackwardSm100.accum_tile_orders(pairs, tiles.keys)
    kernel = FlashAttentionBackwardPostprocess(
        form.cute_dtype,
        form.dim,
        form.arch,
        tiles.keys if of_keys else tiles.rows,
        128 if form.is_blackwell else 256,
        more.get("AtomLayoutNdKV" if of_keys else "AtomLayoutMdQ", 1),
        not of_keys and more.get("dQ_swapAB", False),
        use_2cta_instrs=pairs and not of_keys,
        cluster_size=tiles.ctas if of_keys else 1,
        hdim_multiple_of=32,
        accum_order=orders[of_keys],
    )
    batch = (None,) * (form.batched - 3)
    sums, out = fake(torch.float32, *batch, None, None), fake(form.dtype, *batch, None, None, None)
    first, used = form.bounds()[::2]
    return compile_kernel(kernel, sums, out, Float32(0.0), first, used, None, form.table())


# What both take


def check_import() -> None:
    """Raise what importing FA4 raises. It is known to be importable if it was with the packages installed now."""
    where = disk_cache.folder()
    key = "" if where is None else disk_cache.key_of("import flash_attn.cute", all=disk_cache.installed())
    if where is None or disk_cache.noted(where, key) is None:
        with COMPILING, _without_warnings():
            importlib.import_module("flash_attn.cute.interface")
        if where is not None:
            disk_cache.note(where, key, "")


@compiled_once
@_without_warnings()
def count_tiles(rows: int) -> Any:
    """Tiles of `rows` rows before each of many documents, int32 `[documents + 1]`, from seqused."""
    from flash_attn.cute.cu_blocks_kernel import CuSeqlensToBlocksKernel

    kernel = CuSeqlensToBlocksKernel(tile=rows, seqlen_q_multiplier=1)
    counts, first, used = (_tensor(torch.int32, (False,), align=4) for _ in range(3))
    return compile_kernel(kernel, counts, None, first, used, None, None)


@contextmanager
def _multiprocessors(count: int) -> Iterator[None]:
    """FA4's persistent kernels ask the driver for the multiprocessors; here they are told, also without a GPU."""

    class HardwareInfo:
        def get_device_multiprocessor_count(self) -> int:
            return count

    real = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = HardwareInfo
    try:
        yield
    finally:
        cutlass.utils.HardwareInfo = real
