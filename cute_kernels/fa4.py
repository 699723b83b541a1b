"""The only door to FlashAttention-4 (flash_attn.cute): the three attentions of NSA, each returning (o, lse).

What FA4 4.0.0b36 does with block lists, read from it and checked against it (tests/fa4_model.py):

- `mask` blocks are visited first, then `full` ones, each list from its end. Only the first visited block of each list
  is masked at the end of the keys, so lists ascend, and the block with the end of the keys comes last in its list.
- With native causality, sm_90 masks every block, sm_100 every `mask` block and the first visited `full` one. So blocks
  that cross the diagonal go into `mask` and past ones into `full`. With a mask_mod native causality is off.
- A mask_mod sees every `mask` block and no `full` one.
- Both lists must be given, also when one is empty; a list need not be longer than what is read of it.
- With cu_seqlens and seqused, rows that are not used are not written.

Its backward takes tiles of rows for each block of keys instead. What differs from the forward:

- The end of the keys is masked everywhere, native causality in every listed tile, so the order is free.
- sm_100 skips no rows behind the last one: it counts the last rows twice in dk and dv, unless there is a mask_mod.
- Native causality counts from the last row and the last key that are passed; a range of keys needs a mask_mod.

q `[B,M,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`, rows aligned (device.vectorizable); o `[B,M,H,D_v]` in their dtype,
lse `[B,H,M]` fp32, natural log; rows without keys give 0 and -inf.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.device import compute_capability, positional

if TYPE_CHECKING:
    from cute_kernels.block_lists import BlockLists


@dataclass(frozen=True)
class Rules:
    """What block lists must look like on an architecture."""

    rows: int
    """Query tiles are multiples of this."""
    widths: tuple[int, ...]
    """Keys of a listed block, widest first."""

    def width(self, size: int) -> int:
        """The widest list that is exact for blocks of `size` keys, or the narrowest, to be refined."""
        return next((w for w in self.widths if size % w == 0), self.widths[-1])


RULES = {9: Rules(rows=128, widths=(128, 64)), 10: Rules(rows=256, widths=(128,))}
"""By major compute capability."""

WIDEST = max(width for rules in RULES.values() for width in rules.widths)
"""Keys of the widest block in a list."""

STRATEGY_VARIABLE = "NSA_KERNELS_FA4_STRATEGY"
"""sm_100 there makes a Hopper GPU use Blackwell's tiles, widths and refinement (tests run them that way)."""

DIMS = (64, 128)
"""Head dims (D and D_v, also mixed) whose block-sparse forward was checked; FA4 reads out of bounds at D=32, D_v=96."""

NARROW = 64
"""Keys of a listed block for which sm_90's backward needs other tiles than FA4's own."""

FEW_DOCUMENTS = 256
"""For more, FA4 first makes tables of them."""


def rules(device: torch.device) -> Rules | None:
    """What lists must look like on the device; None where FA4 has no block sparsity."""
    major, _ = compute_capability(device.index or 0)
    if major == 9 and os.environ.get(STRATEGY_VARIABLE) == "sm_100":
        major = 10
    return RULES.get(major)


def refusal(dtype: torch.dtype, dim: int, v_dim: int) -> str | None:
    """Why FA4's block-sparse forward cannot take such inputs, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {str(dtype).removeprefix('torch.')}"
    for name, size in (("D", dim), ("D_v", v_dim)):
        if size not in DIMS:
            return f"takes head dims {' and '.join(map(str, DIMS))}, got {name}={size}"
    return None


def compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists | None,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    lse: bool = True,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over compressed entries: entry j is visible to row i iff j*stride + length-1 <= first_row + i.

    Args:
        lists: blocks of entries for each query tile; None: no causality, everything is visible.
        shifts: instead of `first_row`, a number for each of equally many rows, int32 `[tiles]`.
    """
    if lists is None:
        return _attend(q, k, v, scale, lse)
    if shifts is not None:
        mask_mod = _ended_in_tile(length, stride, q.shape[1] // max(shifts.shape[0], 1))
        return _attend(q, k, v, scale, lse, lists=lists, mask_mod=mask_mod, tensors=[shifts])
    return _attend(q, k, v, scale, lse, lists=lists, mask_mod=_ended(length, stride), scalars=(first_row,))


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    causal: bool,
    first_row: int,
    scale: float,
    lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention over listed blocks of tokens: token j is visible to row i if listed and, causal, j <= first_row + i.

    Args:
        first_row: with `causal`, number of keys minus number of queries.
    """
    if lists.bits is None:
        return _attend(q, k, v, scale, lse, lists=lists, causal=causal)
    group = q.shape[2] // lists.bits.shape[1]
    return _attend(
        q,
        k,
        v,
        scale,
        lse,
        lists=lists,
        mask_mod=_chosen(lists.unit, lists.rows, group, causal),
        scalars=(first_row,),
        tensors=[lists.bits],
    )


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    lse: bool = True,
    documents: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of row i to keys i-left ... i+right, where the last query row is the last key row.

    Args:
        documents: in q, k and v (B = 1): first row of each, int32 `[docs+1]`, and number of rows that are used, int32
            `[docs]`. Other rows of o and lse hold anything.
    """
    if documents is None:
        return _attend(q, k, v, scale, lse, window=(left, right))
    rows = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    o, sums = _attend(*rows, scale, lse, window=(left, right), documents=documents)
    return o.unsqueeze(0), None if sums is None else sums.unsqueeze(0)


# Backward. `lse` may be shifted: exp(S - lse) is what weighs the gradients, so lse - log(g) weighs them with g.


def compressed_backward(
    gradients: Gradients,
    lists: BlockLists,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """Backward of `compressed`. `lists`: tiles of rows for each block of entries (transposed_lists.py)."""
    if shifts is not None:
        mask_mod = _ended_in_tile(length, stride, gradients.q.shape[1] // max(shifts.shape[0], 1))
        _differentiate(gradients, scale, lists=lists, mask_mod=mask_mod, tensors=[shifts])
    else:
        _differentiate(gradients, scale, lists=lists, mask_mod=_ended(length, stride), scalars=(first_row,))


def dense_backward(gradients: Gradients, *, causal: bool, scale: float, deterministic: bool = False) -> None:
    """Backward of attention to every entry; causal: where row i of M sees entry j of K iff j <= i + K - M.

    Args:
        deterministic: add up in a fixed order, which FA4 cannot with lists.
    """
    _differentiate(gradients, scale, causal=causal, deterministic=deterministic)


def selected_backward(
    gradients: Gradients,
    lists: BlockLists,
    *,
    causal: bool,
    first_row: int = 0,
    first_key: int = 0,
    scale: float,
) -> None:
    """Backward of `selected`. `lists`: tiles of rows for each block of keys (transposed_lists.py).

    Args:
        first_row, first_key: numbers of the first row (the beginning of a tile) and of the first key.
    """
    if lists.bits is not None:
        group = gradients.q.shape[2] // lists.bits.shape[1]
        mask_mod = _chosen_by_tile(lists.unit, lists.rows, group, causal)
        scalars: tuple[int, ...] = first_row // lists.rows, first_key, first_row - first_key
        _differentiate(gradients, scale, lists=lists, mask_mod=mask_mod, scalars=scalars, tensors=[lists.bits])
    else:
        mask_mod, scalars = (_ended(1, 1), (first_row - first_key,)) if causal else (_anything(), ())
        _differentiate(gradients, scale, lists=lists, mask_mod=mask_mod, scalars=scalars)


def window_backward(
    gradients: Gradients,
    *,
    left: int,
    right: int,
    scale: float,
    documents: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
) -> None:
    """Backward of `window`; with documents, other rows of the gradients hold anything."""
    if documents is None:
        _differentiate(gradients, scale, window=(left, right), deterministic=deterministic)
    else:
        squeezed = gradients.map(lambda x: x.squeeze(0))
        _differentiate(squeezed, scale, window=(left, right), documents=documents)


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


def _differentiate(
    gradients: Gradients,
    scale: float,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lists: BlockLists | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scalars: tuple[int, ...] = (),
    tensors: list[Tensor] | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
) -> None:
    """FA4's backward. A KV head's dk and dv are added up in fp32 over its query heads, dq over the blocks of keys."""
    from flash_attn.cute import interface

    given = gradients
    if given.q.shape[-1] != given.v.shape[-1]:  # FA4 wants equal dims where query heads share keys
        gradients = given.to_one_dim()
    first, used = documents or (None, None)
    tile_size = interface._tile_size_bwd_sm90
    with _RECORDING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if lists is not None and lists.width == NARROW:
            interface._tile_size_bwd_sm90 = _narrow_tiles
        try:
            interface._flash_attn_bwd(
                gradients.q,
                gradients.k,
                gradients.v,
                gradients.o,
                gradients.do,
                gradients.lse,
                softmax_scale=scale,
                causal=causal,
                window_size_left=window[0],
                window_size_right=window[1],
                cu_seqlens_q=first,
                cu_seqlens_k=first,
                seqused_q=used,
                seqused_k=used,
                dq=gradients.dq,
                dk=gradients.dk,
                dv=gradients.dv,
                mask_mod=mask_mod,
                aux_tensors=tensors,
                aux_scalars=_aux(scalars).scalars,
                block_sparse_tensors=_sparse(lists),
                deterministic=deterministic,
            )
        finally:
            interface._tile_size_bwd_sm90 = tile_size
    if gradients is not given:
        for name in ("dq", "dk", "dv"):
            target, wide = getattr(given, name), getattr(gradients, name)
            if wide is not target:
                target.copy_(wide[..., : target.shape[-1]])


def _narrow_tiles(*_: Any, **__: Any) -> Any:
    """Tiles of FA4's sm_90 backward for blocks of NARROW keys, which it offers only for the widest heads itself."""
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


# Forward


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    lse: bool,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lists: BlockLists | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scalars: tuple[int, ...] = (),
    tensors: list[Tensor] | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FA4's forward, directly through the kernel compiled by an earlier call like this one where that is safe.

    FA4 spends about 100 us of Python on every call. On sm_90 what it compiles depends on `_signature` alone, so later
    calls skip that; sm_100 kernels also depend on sizes and cannot be tried here, so they always take FA4's own way.
    """
    signature = _signature(q, k, v, lse, causal, window, lists, mask_mod, tensors, documents)
    first, used = documents or (None, None)
    run = _KERNELS.get(signature)
    if run is None:
        return _through_interface(
            signature,
            (q, k, v),
            lists,
            softmax_scale=scale,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            mask_mod=mask_mod,
            return_lse=lse,
            aux_tensors=tensors,
            aux_scalars=_aux(scalars).scalars,
            cu_seqlens_q=first,
            cu_seqlens_k=first,
            seqused_q=used,
            seqused_k=used,
        )
    *batch, rows, heads, _ = q.shape
    o = torch.empty((*batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    sums = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device) if lse else None
    sparse = None if lists is None else (*lists.tensors, None, None, None, None)
    varlen_and_paging = (first, first, used, used, None)
    aux = _aux(scalars) if tensors is None else _aux(scalars)._replace(tensors=tensors)
    run(q, k, v, o, sums, scale, *varlen_and_paging, *window, None, sparse, aux, None, None)
    return o, sums


_KERNELS: dict[Any, Callable[..., None]] = {}
"""Compiled sm_90 kernels by signature."""


def _signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: bool,
    causal: bool,
    window: tuple[int | None, int | None],
    lists: BlockLists | None,
    mask_mod: Callable[..., Any] | None,
    tensors: list[Tensor] | None,
    documents: tuple[Tensor, Tensor] | None,
) -> Any:
    """Everything FA4's choice of an sm_90 kernel depends on; None where its own checks are needed."""
    major, _ = compute_capability(q.device.index or 0)
    if major != 9 or q.numel() == 0 or k.numel() == 0:
        return None
    if tensors is not None and any(t.dim() > 1 for t in tensors):
        return None
    if documents is not None and documents[1].shape[0] > FEW_DOCUMENTS:
        return None
    listed = None
    if lists is not None:
        listed = (lists.rows, lists.width, lists.mask_count.stride(0) == 0, lists.full_index.stride(2) == 0)
    sizes = (*q.shape[-2:], *v.shape[-2:])
    kinds = (causal, window[0] is None, window[1] is None, documents is None, tensors is None)
    return (q.device, q.dtype, sizes, lse, kinds, listed, mask_mod)


_RECORDING = threading.Lock()


def _through_interface(
    signature: Any, qkv: tuple[Tensor, Tensor, Tensor], lists: BlockLists | None, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    from flash_attn.cute.interface import _flash_attn_fwd

    with _RECORDING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FA4's own deprecations, and that there is no aux data
        recorder = _Recorder(_flash_attn_fwd.compile_cache)
        _flash_attn_fwd.compile_cache = recorder
        try:
            # Without detach() FA4 compiles a kernel that writes lse even where nobody asked for it
            detached = (x.detach() for x in qkv)
            o, lse, *_ = _flash_attn_fwd(*detached, pack_gqa=False, block_sparse_tensors=_sparse(lists), **keywords)
        finally:
            _flash_attn_fwd.compile_cache = recorder.cache
    if signature is not None and recorder.used is not None:
        _KERNELS[signature] = positional(recorder.used)
    return o, lse


def _sparse(lists: BlockLists | None) -> Any:
    """Lists as FA4's interface takes them."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return None if lists is None else BlockSparseTensorsTorch(*lists.tensors, block_size=(lists.rows, lists.width))


class _Recorder:
    """Stands in for FA4's cache of compiled kernels during one call, to learn which one the call used."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.thread = cache, threading.get_ident()
        self.used: Callable[..., None] | None = None

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel

    def __getitem__(self, key: Any) -> Any:
        kernel = self.cache[key]
        if threading.get_ident() == self.thread:
            self.used = kernel
        return kernel


@lru_cache(256)
def _aux(scalars: tuple[int, ...]) -> Any:
    """FA4's AuxData with these runtime numbers."""
    from cutlass import Int32
    from flash_attn.cute.utils import AuxData

    return AuxData(None, tuple(map(Int32, scalars)) or None)


# Masks for blocks that are visible in part. FA4 hashes them with their constants; runtime values come as scalars.


@lru_cache
def _anything() -> Any:
    """Every key is visible."""
    from cutlass import cute

    @cute.jit
    def anything(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        return row >= 0

    return anything


@lru_cache
def _ended(length: int, stride: int) -> Any:
    """Entry j is visible iff its block has ended."""
    from cutlass import cute

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        return entry * stride + (length - 1) <= row + scalars[0]

    return ended


@lru_cache
def _ended_in_tile(length: int, stride: int, rows: int) -> Any:
    """Entry j is visible iff its block has ended, with a shift for each tile of `rows`."""
    from cutlass import Int32, cute
    from flash_attn.cute import utils

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        shift = utils.scalar_to_ssa(tensors[0][row[0] // rows], Int32)
        return entry * stride + (length - 1) <= row + shift

    return ended


@lru_cache
def _chosen_by_tile(unit: int, rows: int, group: int, causal: bool) -> Any:
    """Token j is visible iff the row's tile chose its unit and, with causality, j is not behind row i.

    Scalars: number of the first tile and of the first key, and the first row minus the first key.
    """
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def chosen(batch, head, row, token, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        tile = row[0] // rows + scalars[0]
        word = tensors[0][batch[0], head[0] // group, (token[0] + scalars[1]) // unit, tile // 32]
        inside = utils.scalar_to_ssa((word >> (tile % 32)) & 1, cutlass.Int32) == 1
        if cutlass.const_expr(causal):
            inside = inside & (token <= row + scalars[2])
        return inside

    return chosen


@lru_cache
def _chosen(unit: int, rows: int, group: int, causal: bool) -> Any:
    """Token j is visible iff its unit was chosen for the tile and, with causality, j is not behind row i."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def chosen(batch, head, row, token, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        bit = token[0] // unit
        word = tensors[0][batch[0], head[0] // group, row[0] // rows, bit // 32]
        inside = utils.scalar_to_ssa((word >> (bit % 32)) & 1, cutlass.Int32) == 1
        if cutlass.const_expr(causal):
            inside = inside & (token <= row + scalars[0])
        return inside

    return chosen
