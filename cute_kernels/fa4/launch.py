"""FlashAttention-4's forward and backward: through its interface once, afterwards straight to the compiled kernels.

    attend          forward
    differentiate   backward

FA4 spends 0.1 ms of Python on every forward and more on every backward. What it compiles depends on `_signature`
alone, so the first call of a signature records which kernels FA4 used, and later calls launch those with the arguments
that FA4 would give them (tests/cute/test_fa4_launch.py compares both). Later processes find them on disk (kept.py), and
do not import FA4 then.

FA4 looks its kernels up, compiles those that are missing and launches them in one function, so every call through its
interface holds COMPILING from beginning to end: first calls, and `_signature`'s exceptions. A thread then waits for
another one's compilation even if FA4 already has its kernels. Beyond that it loses little: Python runs one thread's
0.1 ms at a time anyway. There the tensors' device is made the current one, whose architecture FA4 asks for and of which
alone PyTorch hands tensors to compilers (DLPack); compiled kernels switch to the device of their tensors by themselves.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime.compiling import COMPILING
from cute_kernels.runtime.device import compute_capability, made_current, positional
from cute_kernels.runtime.replay import launch, refuse

if TYPE_CHECKING:
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen
    from cute_kernels.runtime.disk_cache import Entry

NARROW = 64
"""Width of listed blocks for which sm_90's backward and sm_100's forward need other tiles than FA4 chooses."""

FEW_DOCUMENTS = 256
"""For more documents FA4 builds tables of them first."""

ONE_TILE = 128
"""FA4 compiles separate kernels for so few rows or keys that they are one tile; its tiles are this or smaller."""

WINDOW_TILE = (128, 96)
"""tile_m and tile_n of sm_90's forward for windows with pack_gqa and D = D_v = 128: 8 tokens of 16 heads with a window
of 512 meet 6.4 tiles of 96 keys, 614 keys; 128 tokens of one head meet 6 tiles of 128, FA4's choice, 767 keys. Packed
documents have tiles of one head, but the same tiles of keys, so each gets the same bits as alone."""


class MaskMod(NamedTuple):
    """A mask_mod by what makes it: it is made where FA4 compiles, since making one may import FA4."""

    make: Callable[..., Any]
    constants: tuple[Any, ...] = ()
    """Arguments of `make`, which are compiled in."""

    def __repr__(self) -> str:
        """The same in every process: the name of a signature on disk (kept.py) holds it."""
        return f"{self.make.__module__}.{self.make.__qualname__}{self.constants!r}"


class Aux(NamedTuple):
    """What a mask_mod reads: FA4's AuxData, as kernels take it."""

    tensors: list[Tensor] | None
    scalars: tuple[Any, ...] | None


class Mask(NamedTuple):
    """Which keys a row sees."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    lists: BlockLists | None = None
    mask_mod: MaskMod | None = None
    scalars: tuple[int, ...] = ()
    """For the mask_mod."""
    tensors: list[Tensor] | None = None
    """For the mask_mod."""
    documents: Varlen | None = None

    def interface(self) -> dict[str, Any]:
        """As keywords of FA4's interface."""
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        lists, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) = self.lists, self.documents or (None,) * 4
        sparse = None
        if lists is not None:
            sparse = BlockSparseTensorsTorch(*lists.tensors, block_size=(lists.rows, lists.width))
        return {
            "causal": self.causal,
            "window_size_left": self.window[0],
            "window_size_right": self.window[1],
            "mask_mod": None if self.mask_mod is None else self.mask_mod.make(*self.mask_mod.constants),
            "aux_tensors": self.tensors,
            "aux_scalars": self.aux().scalars,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
            "block_sparse_tensors": sparse,
        }

    def bounds(self) -> tuple[Any, ...]:
        """As the kernels take them: cu_seqlens and seqused, of queries and of keys."""
        return (None,) * 4 if self.documents is None else tuple(self.documents)

    def aux(self) -> Aux:
        return Aux(self.tensors, _scalars(self.scalars))

    def sparse(self) -> tuple[Any, ...] | None:
        return None if self.lists is None else (*self.lists.tensors, None, None, None, None)


def packs_gqa(q: Tensor, k: Tensor) -> bool:
    """Whether a tile can hold the query heads of a key/value head (pack_gqa), of fewer tokens then."""
    group = q.shape[-2] // k.shape[-2]
    return group > 1 and ONE_TILE % group == 0


def window_tile_n(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Keys of a window's tile. Tiles end at its multiples, counted from the first key of a sequence."""
    on_hopper = compute_capability(q.device.index or 0)[0] == 9
    narrower = on_hopper and packs_gqa(q, k) and q.shape[-1] == v.shape[-1] == 128
    return WINDOW_TILE[1] if narrower else ONE_TILE


@lru_cache(256)
def _scalars(values: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Runtime numbers as kernels take them."""
    from cutlass import Int32

    return tuple(map(Int32, values)) or None


def _signature(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *more: Any) -> Any:
    """Everything FA4's choice of kernels depends on; None where its own checks are needed.

    FA4's environment variables are taken to stay as they are while the process runs.
    """
    if q.numel() == 0 or k.numel() == 0:
        return None
    if mask.documents is not None and len(mask.documents.seqused_q) > FEW_DOCUMENTS:
        return None
    listed = None
    if mask.lists is not None:
        listed = (mask.lists.rows, mask.lists.width, *map(_broadcast, mask.lists.tensors))
    sizes = (*q.shape[-2:], *v.shape[-2:], *map(_broadcast, (q, k, v)))
    left, right = mask.window
    kinds = (mask.causal, left is None, right is None, mask.documents is None)
    tensors = None if mask.tensors is None else tuple(tuple(min(n, 2) for n in x.stride()) for x in mask.tensors)
    return (q.device, q.dtype, sizes, kinds, listed, mask.mask_mod, tensors, *more)


def _is_blackwell(q: Tensor) -> bool:
    return compute_capability(q.device.index or 0)[0] == 10


def _row_tiles(q: Tensor, k: Tensor, packs: bool) -> int:
    """Tiles of ONE_TILE rows, up to 3: FA4 has a forward for one, for two and for more of them on sm_100."""
    heads = q.shape[-2] // k.shape[-2] if packs else 1
    return min(-(-q.shape[-3] * heads // ONE_TILE), 3)


def _broadcast(x: Tensor) -> Any:
    """Dimensions that repeat one element, which FA4 compiles in."""
    strides = x.stride()
    return 0 in strides and tuple(stride == 0 for stride in strides)


# Recording


class _Recorder:
    """Replaces one of FA4's caches of compiled kernels during a call.

    Notes which kernels the call used, and keeps those that FA4 does not keep itself on disk (kept.py).
    """

    def __init__(self, stage: str, cache: Any, stack: ExitStack) -> None:
        self.stage, self.cache, self.thread = stage, cache, threading.get_ident()
        self.keys: list[Any] = []
        """Of the kernels that the call looked up, each to be used then."""
        self.used: list[Callable[..., None]] = []
        """Empty where nothing is launched."""
        self.entry: Entry | None = None
        """Of the kernel that FA4 is about to compile."""
        self.stack = stack.enter_context(ExitStack())
        """What ends when it is compiled."""

    def __contains__(self, key: Any) -> bool:
        if threading.get_ident() == self.thread:
            self.keys.append(key)
        if key not in self.cache and threading.get_ident() == self.thread:
            from cute_kernels.fa4 import kept
            from cute_kernels.runtime import disk_cache, jit

            self.stack.close()
            self.entry = None
            where = kept.folder(self.cache)
            if where is not None:
                self.entry = self.stack.enter_context(disk_cache.Entry(where, kept.key_of_kernel(self.stage, key)))
                if self.entry.found is not None:
                    self.cache[key] = self.entry.found
                    self.stack.close()
                    return True
            self.stack.enter_context(jit.told_if_slow())
        return key in self.cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel
        if threading.get_ident() == self.thread:
            from cute_kernels.runtime import jit

            jit.COMPILED.append(self.stage)
            if self.entry is not None:
                self.entry.keep(kernel)
            self.entry = None
            self.stack.close()

    def __getitem__(self, key: Any) -> Any:
        kernel = self.cache[key]
        if threading.get_ident() == self.thread:
            self.used.append(positional(kernel))
        return kernel


def _note(call: str, signature: Any, recorders: Sequence[_Recorder], sizes: Sequence[int] = ()) -> None:
    """Note on disk which kernels a call has looked up: one of each of FA4's functions, of the last one all."""
    from cute_kernels.fa4 import kept

    where = kept.folder(recorders[0].cache)
    if where is not None:
        *firsts, last = recorders
        kernels = [(x.stage, x.keys[-1]) for x in firsts] + [(last.stage, key) for key in last.keys]
        kept.note(call, signature, where, kernels, sizes)


@contextmanager
def recording(*functions: Any) -> Iterator[list[_Recorder]]:
    """Kernels that FA4's functions use inside `with`. The caller holds COMPILING: caches and warnings are global."""
    refuse()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # FA4's own deprecations, and that there is no aux data
        recorders = [_Recorder(function.__name__, function.compile_cache, stack) for function in functions]
        for function, recorder in zip(functions, recorders, strict=True):
            function.compile_cache = recorder
        try:
            yield recorders
        finally:
            for function, recorder in zip(functions, recorders, strict=True):
                function.compile_cache = recorder.cache


# Forward


_FORWARD: dict[Any, Callable[..., None]] = {}
"""Compiled kernels by signature."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    lse: bool,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FA4's forward.

    Args:
        into: o, whose rows are aligned, and lse to write instead of new tensors.
    """
    # A caller's o and lse may have any strides, as those of a dilated neighborhood do
    window_tiles = into is None and mask.window != (None, None) and packs_gqa(q, k)
    packs = window_tiles and mask.documents is None
    signature = _signature(q, k, v, mask, lse, window_tiles, _row_tiles(q, k, packs))
    run = _FORWARD.get(signature)
    if run is None:
        with COMPILING:
            run = _kept_forward(signature)
            if run is None:
                return _attend_by_interface(signature, q, k, v, mask, scale, lse, window_tiles, into)
    *batch, rows, heads, _ = q.shape
    options: tuple[Any, ...] = (mask.sparse(), mask.aux(), None, None)  # FA4's scheduler needs no tables
    if _is_blackwell(q):
        options = (None, *options, *[None] * 5, rows)  # no factors of fp8 either
    sums: Tensor | None
    if into is None:
        o = torch.empty((*batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device) if lse else None
    else:
        o, sums = into
    launch(run, q, k, v, o, sums, scale, *mask.bounds(), None, *mask.window, None, *options)
    return o, sums


def _kept_forward(signature: Any) -> Callable[..., None] | None:
    """Found by another thread meanwhile, or on disk."""
    if signature is not None and signature not in _FORWARD:
        from cute_kernels.fa4 import kept

        found = kept.find("forward", signature)
        if found is not None:
            ((_FORWARD[signature],), _) = found
    return _FORWARD.get(signature)


def _attend_by_interface(
    signature: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    lse: bool,
    window_tiles: bool,
    into: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    from flash_attn.cute.interface import _flash_attn_fwd

    # Without detach() FA4 compiles a kernel that writes lse even where nobody asked for it
    qkv = (x.detach() for x in (q, k, v))
    results = {} if into is None else {"out": into[0], "lse": into[1]}
    packs = window_tiles and mask.documents is None
    options = {"softmax_scale": scale, "return_lse": lse, "pack_gqa": packs, **results, **mask.interface()}
    if window_tiles and window_tile_n(q, k, v) == WINDOW_TILE[1]:
        options["tile_mn"] = WINDOW_TILE
    elif mask.lists is not None and mask.lists.width == NARROW and _is_blackwell(q):
        options["tile_mn"] = ONE_TILE, NARROW
    with made_current(q.device), recording(_flash_attn_fwd) as (recorder,):
        o, sums, *_ = _flash_attn_fwd(*qkv, **options)
    if signature is not None and recorder.keys:
        _note("forward", signature, [recorder])
        if recorder.used:
            _FORWARD[signature] = recorder.used[-1]
    return o, sums


# Backward


@dataclass(frozen=True)
class Gradients:
    """What a backward reads, and where it writes dq, dk and dv: shapes of q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Gradients:
        return Gradients(**{name: function(tensor) for name, tensor in vars(self).items()})

    def to_one_dim(self) -> Gradients:
        """With zeros behind the smaller of D and D_v, which change no gradient; the gradients are new tensors."""
        dim = max(self.q.shape[-1], self.v.shape[-1])

        def widen(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, [0, dim - x.shape[-1]]) if x.shape[-1] < dim else x

        values = {name: tensor if name == "lse" else widen(tensor) for name, tensor in vars(self).items()}
        return Gradients(**values)


WriteStatistics = Callable[[Tensor, Tensor], None]
"""Writes lse in base 2 and do . o, fp32 `[B,H,rows]` with the rows padded to whole tiles, in place of preprocess."""


class _Backward(NamedTuple):
    """Compiled kernels: preprocess (do . o, zeros for dq), the mainloop, and postprocess (fp32 sums rounded)."""

    tile_rows: int
    tile_keys: int
    """Of one CTA, or of two that share their tiles."""
    before: Callable[..., None]
    main: Callable[..., None]
    after: list[Callable[..., None]]
    """Of dq; of dk and dv too where query heads share them."""

    def __call__(self, given: Gradients, mask: Mask, scale: float, statistics: WriteStatistics | None) -> None:
        q, k = given.q, given.k
        bounds = first, first_key, seqused, seqused_k = mask.bounds()
        *batch, rows, heads, dim = q.shape
        *_, keys, kv_heads, _ = k.shape
        if first is not None:  # each document may begin a tile
            rows, keys = rows + (len(first) - 1) * self.tile_rows, keys + (len(first) - 1) * self.tile_keys
        rows, keys = -(-rows // self.tile_rows) * self.tile_rows, -(-keys // self.tile_keys) * self.tile_keys
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        delta, log2_lse = torch.empty((2, *batch, heads, rows), **fp32).unbind(0)
        dq = torch.empty((*batch, heads, rows * dim), **fp32)
        dk, dv = given.dk, given.dv
        if len(self.after) > 1:
            dk, dv = torch.zeros((2, *batch, kv_heads, keys * dim), **fp32).unbind(0)
        nothing = (None, None, None)
        if statistics is not None:
            statistics(log2_lse, delta)
            dq.zero_()
        else:
            of_o = given.o, given.do, delta, given.lse, log2_lse, dq, first, seqused
            launch(self.before, *of_o, *nothing, 1.0, None, None)
        options = *bounds, *mask.window, *nothing, mask.aux(), mask.sparse(), None
        launch(self.main, q, k, given.v, given.do, log2_lse, delta, dq, dk, dv, scale, *options)
        of_rows, of_keys = (first, seqused), (first_key, seqused_k)
        rounded = (dq, given.dq, scale, of_rows), (dk, given.dk, scale, of_keys), (dv, given.dv, 1.0, of_keys)
        for kernel, (sums, out, factor, where) in zip(self.after, rounded, strict=False):
            launch(kernel, sums, out, factor, *where, None, None)


_BACKWARD: dict[Any, _Backward] = {}
"""By signature."""


def differentiate(
    given: Gradients,
    mask: Mask,
    *,
    scale: float,
    deterministic: bool = False,
    statistics: WriteStatistics | None = None,
) -> None:
    """FA4's backward. A KV head's dk and dv are added up in fp32 over its query heads, dq over the blocks of keys.

    Args:
        statistics: of the rows, where there are no documents. Not with `deterministic`, which FA4's interface runs.
    """
    gradients = given
    if given.q.shape[-1] != given.v.shape[-1]:  # FA4 wants equal dims where query heads share keys
        gradients = given.to_one_dim()
    few = (min(x.shape[-3], ONE_TILE + 1) for x in (gradients.q, gradients.k))
    signature = None
    if not deterministic:
        signature = _signature(gradients.q, gradients.k, gradients.v, mask, *few, _broadcast(gradients.do))
    run = _BACKWARD.get(signature)
    if run is None:
        with COMPILING:
            run = _kept_backward(signature)
            if run is None:
                _differentiate_by_interface(signature, gradients, mask, scale, deterministic)
                if signature is not None and statistics is not None:
                    # Compiled here, too; once more, for the bits of later calls
                    statistics(*torch.empty((2, *gradients.lse.shape), dtype=torch.float32, device=given.q.device))
                    run = _BACKWARD.get(signature)
    if run is not None:
        run(gradients, mask, scale, statistics)
    if gradients is not given:
        for name in ("dq", "dk", "dv"):
            target, wide = getattr(given, name), getattr(gradients, name)
            if wide is not target:
                target.copy_(wide[..., : target.shape[-1]])


def _kept_backward(signature: Any) -> _Backward | None:
    """Found by another thread meanwhile, or on disk."""
    if signature is not None and signature not in _BACKWARD:
        from cute_kernels.fa4 import kept

        found = kept.find("backward", signature)
        if found is not None:
            (before, main, *after), (rows, keys) = found
            _BACKWARD[signature] = _Backward(rows, keys, before, main, after)
    return _BACKWARD.get(signature)


def _differentiate_by_interface(
    signature: Any, given: Gradients, mask: Mask, scale: float, deterministic: bool
) -> None:
    from flash_attn.cute import interface

    narrow = mask.lists is not None and mask.lists.width == NARROW
    fa4_tiles, tiles, thread = interface._tile_size_bwd_sm90, [], threading.get_ident()

    def choose_tiles(*sizes: Any, **more: Any) -> Any:
        if threading.get_ident() != thread:
            return fa4_tiles(*sizes, **more)
        tiles.append(_narrow_tiles() if narrow else fa4_tiles(*sizes, **more))
        return tiles[-1]

    stages = interface._bwd_preprocess, interface._flash_attn_bwd, interface._bwd_postprocess_convert
    with made_current(given.q.device), recording(*stages) as (before, main, after):
        interface._tile_size_bwd_sm90 = choose_tiles
        try:
            interface._flash_attn_bwd(
                given.q,
                given.k,
                given.v,
                given.o,
                given.do,
                given.lse,
                softmax_scale=scale,
                dq=given.dq,
                dk=given.dk,
                dv=given.dv,
                deterministic=deterministic,
                **mask.interface(),
            )
        finally:
            interface._tile_size_bwd_sm90 = fa4_tiles
    if signature is not None and main.keys:
        rows, keys = (tiles[-1].m_block_size, tiles[-1].n_block_size) if tiles else _tiles_on_blackwell(given, mask)
        _note("backward", signature, [before, main, after], [rows, keys])
        if main.used:
            _BACKWARD[signature] = _Backward(rows, keys, before.used[-1], main.used[-1], after.used)


def _tiles_on_blackwell(given: Gradients, mask: Mask) -> tuple[int, int]:
    """Rows and keys of a tile, as FA4 decides between one CTA and two."""
    from flash_attn.cute.block_sparsity import block_sparse_bwd_supports_2cta
    from flash_attn.cute.utils import _get_disable_2cta_default

    lists = mask.interface()["block_sparse_tensors"]
    pairs = given.q.shape[-1] >= ONE_TILE and not _get_disable_2cta_default()
    return ONE_TILE, 2 * ONE_TILE if pairs and block_sparse_bwd_supports_2cta(lists, ONE_TILE) else ONE_TILE


def _narrow_tiles() -> Any:
    """Tiles of FA4's sm_90 backward for blocks of NARROW keys, which FA4 itself takes only for the widest heads."""
    from flash_attn.cute.interface import BwdConfig

    return BwdConfig(
        m_block_size=128,
        n_block_size=NARROW,
        num_stages_Q=2,
        num_stages_dO=1,
        num_stages_PdS=1,
        SdP_swapAB=False,
        dKV_swapAB=False,
        dQ_swapAB=False,
        AtomLayoutMSdP=2,
        AtomLayoutNdKV=1,
        AtomLayoutMdQ=2,
    )
