"""The only door to FlashAttention-4 (flash_attn.cute): the three attentions of NSA, each returning (o, lse).

What FA4 4.0.0b36 does with block lists, read from it and checked against it (tests/test_fa4.py):

- `mask` blocks are visited first, then `full` ones, each list from its end. Only the first visited block of each list
  is masked at the end of the keys, so lists ascend, and the block with the end of the keys comes last in its list.
- With native causality, sm_90 masks every block, sm_100 every `mask` block and the first visited `full` one. So blocks
  that cross the diagonal go into `mask` and past ones into `full`. With a mask_mod native causality is off.
- A mask_mod sees every `mask` block and no `full` one.
- Both lists must be given, also when one is empty; a list need not be longer than what is read of it.

q `[B,M,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`; o `[B,M,H,D_v]` in their dtype, lse `[B,H,M]` fp32, natural log;
rows without keys give 0 and -inf.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.device import compute_capability

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

STRATEGY_VARIABLE = "NSA_KERNELS_FA4_STRATEGY"
"""sm_100 there makes a Hopper GPU use Blackwell's tiles, widths and refinement (tests run them that way)."""

MAX_DIM = 128
"""Larger head dims are other kernels in FA4, with other tiles."""


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
        if size % 16 or size > MAX_DIM:
            return f"takes head dims that are multiples of 16, at most {MAX_DIM}, got {name}={size}"
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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over compressed entries: entry j is visible to row i iff j*stride + length-1 <= first_row + i.

    Args:
        lists: blocks of entries for each query tile; None: no causality, everything is visible.
    """
    if lists is None:
        return _attend(q, k, v, scale, out)
    return _attend(q, k, v, scale, out, lists=lists, mask_mod=_ended(length, stride), scalars=(first_row,))


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    size: int,
    causal: bool,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over listed blocks of tokens; the last query row is the last key row.

    Args:
        size: l', read where the listed blocks are wider (`lists.bits`).
    """
    if lists.bits is None:
        return _attend(q, k, v, scale, out, lists=lists, causal=causal)
    group = q.shape[2] // lists.bits.shape[1]
    return _attend(
        q,
        k,
        v,
        scale,
        out,
        lists=lists,
        mask_mod=_chosen(size, lists.rows, group, causal),
        scalars=(k.shape[1] - q.shape[1],),
        tensors=[lists.bits],
    )


def window(
    q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of row i to keys i-left ... i+right, where the last query row is the last key row."""
    return _attend(q, k, v, scale, out, window=(left, right))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    out: Tensor | None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lists: BlockLists | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scalars: tuple[int, ...] = (),
    tensors: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    from cutlass import Int32
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    sparse = None
    if lists is not None:
        sparse = BlockSparseTensorsTorch(
            mask_block_cnt=lists.mask_count,
            mask_block_idx=lists.mask_index,
            full_block_cnt=lists.full_count,
            full_block_idx=lists.full_index,
            block_size=(lists.rows, lists.width),
        )
    o, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=causal,
        window_size_left=window[0],
        window_size_right=window[1],
        mask_mod=mask_mod,
        block_sparse_tensors=sparse,
        return_lse=True,
        out=out,
        aux_tensors=tensors,
        aux_scalars=tuple(map(Int32, scalars)),
    )
    return o, lse


# Masks for blocks that are visible in part. FA4 hashes them with their constants; runtime values come as scalars.


@lru_cache
def _ended(length: int, stride: int) -> Callable[..., Any]:
    """Entry j is visible iff its block has ended."""
    from cutlass import cute

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        return entry * stride + (length - 1) <= row + scalars[0]

    return ended


@lru_cache
def _chosen(size: int, rows: int, group: int, causal: bool) -> Callable[..., Any]:
    """Token j is visible iff its block of `size` was chosen for the tile and, with causality, j is not behind row i."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def chosen(batch, head, row, token, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        block = token[0] // size
        word = tensors[0][batch[0], head[0] // group, row[0] // rows, block // 32]
        inside = utils.scalar_to_ssa((word >> (block % 32)) & 1, cutlass.Int32) == 1
        if cutlass.const_expr(causal):
            inside = inside & (token <= row + scalars[0])
        return inside

    return chosen
