"""The three attentions of NSA through FlashAttention-4, each returning (o, lse), and their backward.

What FA4 4.0.0b36 does with block lists, read in its source and checked against its kernels for sm_90 and sm_100
(tests/support/fa4_model.py):

- The mainloop takes `mask` blocks first, then `full` blocks, each list from its end. Only the first block taken from
  each list is masked at the end of the keys, so lists ascend, and the block with the end of the keys is the last.
- With native causality, sm_90 masks every block; sm_100 masks every `mask` block and the first `full` block taken. So
  blocks that cross the diagonal go into `mask`, and blocks before it into `full`. A mask_mod turns it off.
- A mask_mod is applied to every `mask` block and to no `full` block.
- Both lists must be given, also when one is empty. A list need not be longer than what is read of it.
- With cu_seqlens and seqused, rows that are not used are not written.

Its backward takes, for each block of keys, a list of tiles of rows. What differs from the forward:

- Every block is masked at the end of the keys, and native causality in every listed tile, so the order is free.
- sm_100 does not skip rows behind the last one: without a mask_mod it counts the last rows twice in dk and dv.
- Native causality counts from the last row and the last key that are passed, so a range of keys needs a mask_mod.

q `[B,M,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`, rows aligned (device.vectorizable); o `[B,M,H,D_v]` in their dtype,
lse `[B,H,M]` fp32, natural log; rows without keys give 0 and -inf.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.fa4.launch import NARROW, ONE_TILE, WINDOW_TILE, Mask, MaskMod, attend, differentiate
from cute_kernels.fa4.launch import Gradients as Gradients
from cute_kernels.fa4.launch import WriteStatistics as WriteStatistics
from cute_kernels.fa4.launch import window_tile_n as window_tile_n
from cute_kernels.limits import MAX_LIST_WIDTH
from cute_kernels.runtime.compiling import COMPILING, once
from cute_kernels.runtime.device import compute_capability

if TYPE_CHECKING:
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen


@dataclass(frozen=True)
class Rules:
    """Tile sizes that FA4's block lists must have on an architecture."""

    rows: int
    """Query tiles are multiples of this."""
    widths: tuple[int, ...]
    """Keys of a block that the forward lists, widest first. The narrowest divides every selected block."""
    backward_widths: tuple[int, ...]
    """The same of the backward."""

    def width(self, size: int) -> int:
        """The forward's blocks for selected blocks of `size` keys: the widest that divide it."""
        return next(width for width in self.widths if size % width == 0)

    def backward_width(self, size: int) -> int:
        """The backward's blocks: the widest that divide `size`, else the narrowest, refined by bits."""
        return next((width for width in self.backward_widths if size % width == 0), self.backward_widths[-1])


RULES = {
    9: Rules(rows=128, widths=(MAX_LIST_WIDTH, NARROW), backward_widths=(MAX_LIST_WIDTH, NARROW)),
    10: Rules(rows=256, widths=(MAX_LIST_WIDTH, NARROW), backward_widths=(MAX_LIST_WIDTH,)),
}
"""By major compute capability."""

WINDOW_ALIGNMENT = math.lcm(WINDOW_TILE[1], ONE_TILE)
"""If the keys passed begin at a multiple of this, a window's rows meet the same tiles of keys as without a slice."""

STRATEGY_VARIABLE = "NSA_KERNELS_FA4_STRATEGY"
"""Environment variable: with value sm_100 a Hopper GPU takes Blackwell's tiles and lists, for tests."""

DIMS = (64, 128)
"""Values of D and D_v whose block-sparse forward was checked, also mixed; FA4 reads out of bounds at D=32, D_v=96."""


def rules(device: torch.device) -> Rules | None:
    """The device's rules; None where FA4 has no block sparsity."""
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
        shifts: instead of `first_row` one number for each tile of rows, int32 `[tiles]` (Documents.shifts).
    """
    mask = Mask() if lists is None else _ended_entries(q, lists, length, stride, first_row, shifts)
    return attend(q, k, v, mask, scale=scale, lse=lse)


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    causal: bool,
    scale: float,
    lse: bool = True,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over listed blocks of tokens: row i of M sees token j of N if listed and, causal, j <= i + N - M.

    Args:
        shifts: instead of N - M one number for each tile of rows, int32 `[tiles]` (Documents.key_shifts); causal.
    """
    mask = Mask(causal=causal, lists=lists) if shifts is None else _ended_entries(q, lists, 1, 1, 0, shifts)
    return attend(q, k, v, mask, scale=scale, lse=lse)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    lse: bool = True,
    documents: Varlen | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of row i to keys i-left ... i+right, where the last query row is the last key row.

    Args:
        documents: in q, k and v, with B = 1. Keys are finite to the end of a document's last tile (`window_tile_n`).
            Rows of o and lse that belong to no document hold anything.
        into: without documents, o and lse to write instead of new tensors; rows contiguous, o's aligned like q's.
    """
    if documents is None:
        return attend(q, k, v, Mask(window=(left, right)), scale=scale, lse=lse, into=into)
    rows = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    o, sums = attend(*rows, Mask(window=(left, right), documents=documents), scale=scale, lse=lse)
    return o.unsqueeze(0), None if sums is None else sums.unsqueeze(0)


# Backward. `lse` may be shifted: P = exp(S - lse), so with lse - log(g) gradients are those of g * o.


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
    """Backward of `compressed`. `lists`: tiles of rows for each block of entries (lists/kv_to_query.py)."""
    mask = _ended_entries(gradients.q, lists, length, stride, first_row, shifts)
    differentiate(gradients, mask, scale=scale)


def dense_backward(
    gradients: Gradients,
    *,
    causal: bool,
    scale: float,
    deterministic: bool = False,
    statistics: WriteStatistics | None = None,
) -> None:
    """Backward of attention to every entry; causal: where row i of M sees entry j of K iff j <= i + K - M.

    Args:
        deterministic: add up in a fixed order, which FA4 cannot do with lists.
        statistics: of the rows, in place of what FA4 computes of o, do and lse; `deterministic` calls do without.
    """
    differentiate(gradients, Mask(causal=causal), scale=scale, deterministic=deterministic, statistics=statistics)


def selected_backward(
    gradients: Gradients,
    lists: BlockLists,
    *,
    causal: bool,
    first_row: int = 0,
    first_key: int = 0,
    first_token: int = 0,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """Backward of `selected`. `lists`: tiles of rows for each block of keys (lists/kv_to_query.py).

    Args:
        first_row, first_key: in the sequence; the first row begins a tile.
        first_token: the token that row 0 of the sequence is, where queries continue one.
        shifts: as of `selected`, for all tiles; a range of keys has all rows then.
    """
    if lists.bits is not None:
        group = gradients.q.shape[2] // lists.bits.shape[1]
        mask_mod = MaskMod(_chosen, (lists.bit_keys, lists.rows, group, causal, shifts is not None))
        scalars: tuple[int, ...] = first_row // lists.rows, first_key, first_token + first_row - first_key
        tensors = [lists.bits] if shifts is None else [lists.bits, shifts]
        mask = Mask(lists=lists, mask_mod=mask_mod, scalars=scalars, tensors=tensors)
    elif shifts is not None:
        mask = _ended_entries(gradients.q, lists, 1, 1, 0, shifts - first_key if first_key > 0 else shifts)
    elif causal:
        mask = Mask(lists=lists, mask_mod=MaskMod(_ended, (1, 1)), scalars=(first_token + first_row - first_key,))
    else:
        mask = Mask(lists=lists, mask_mod=MaskMod(_anything))
    differentiate(gradients, mask, scale=scale)


def window_backward(
    gradients: Gradients,
    *,
    left: int,
    right: int,
    scale: float,
    documents: Varlen | None = None,
    deterministic: bool = False,
) -> None:
    """Backward of `window`. With documents, rows of the gradients that belong to none hold anything.

    Args:
        documents: each begins at a multiple of ONE_TILE in k. Keys that no row sees get zeros only where dk and dv
            held them before.
    """
    if documents is None:
        differentiate(gradients, Mask(window=(left, right)), scale=scale, deterministic=deterministic)
    else:
        squeezed = gradients.map(lambda x: x.squeeze(0))
        differentiate(squeezed, Mask(window=(left, right), documents=documents), scale=scale)


def num_compiled() -> int:
    """FA4's kernels that this process has compiled or loaded from disk."""
    from cute_kernels.fa4 import kept

    if f"{kept.PACKAGE}.interface" not in sys.modules:
        return len(kept.LOADED)
    from flash_attn.cute import interface

    with COMPILING:  # launch.py replaces FA4's caches while it records a call
        found = (getattr(function, "compile_cache", None) for function in vars(interface).values())
        caches = {id(cache): cache for cache in found if cache is not None}
        return len(kept.LOADED) + sum(len(cache.cache) for cache in caches.values())


# mask_mods for `mask` blocks. FA4 compiles a kernel for each, and for its constants; runtime values come as scalars.


def _ended_entries(
    q: Tensor, lists: BlockLists, length: int, stride: int, first_row: int, shifts: Tensor | None
) -> Mask:
    """Entries whose block has ended, as `compressed` says."""
    if shifts is None:
        return Mask(lists=lists, mask_mod=MaskMod(_ended, (length, stride)), scalars=(first_row,))
    rows = q.shape[1] // max(shifts.shape[0], 1)
    return Mask(lists=lists, mask_mod=MaskMod(_ended_in_tile, (length, stride, rows)), tensors=[shifts])


@once
def _anything() -> Any:
    """Every key is visible."""
    from cutlass import cute

    @cute.jit
    def anything(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        return row >= 0

    return anything


@once
def _ended(length: int, stride: int) -> Any:
    """Entry j is visible iff its block has ended."""
    from cutlass import cute

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        return entry * stride + (length - 1) <= row + scalars[0]

    return ended


@once
def _ended_in_tile(length: int, stride: int, rows: int) -> Any:
    """Entry j is visible iff its block has ended, with a shift for each tile of `rows`."""
    from cutlass import Int32, cute
    from flash_attn.cute import utils

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        shift = utils.scalar_to_ssa(tensors[0][row[0] // rows], Int32)
        return entry * stride + (length - 1) <= row + shift

    return ended


@once
def _chosen(bit_keys: int, rows: int, group: int, causal: bool, shifted: bool) -> Any:
    """Token j is visible iff the bit of its block is set for the row's tile and, with causality, j <= i.

    Scalars: the first tile, the first key, and the first row minus the first key. With `shifted` a second tensor holds
    what to add to the rows of each tile.
    """
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def chosen(batch, head, row, token, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        tile = row[0] // rows + scalars[0]
        word = tensors[0][batch[0], head[0] // group, (token[0] + scalars[1]) // bit_keys, tile // 32]
        inside = utils.scalar_to_ssa((word >> (tile % 32)) & 1, cutlass.Int32) == 1
        if cutlass.const_expr(shifted):
            inside = inside & (token <= row + utils.scalar_to_ssa(tensors[1][tile] + scalars[2], cutlass.Int32))
        elif cutlass.const_expr(causal):
            inside = inside & (token <= row + scalars[2])
        return inside

    return chosen
