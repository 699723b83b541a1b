"""Block lists shared by several CTAs: each processes a part of the keys, and the lists of all parts are merged.

One CTA per tile of rows leaves SMs idle if there are few rows: a chunk of a prompt, a rank's part of a sequence, a step
of decoding. Then the keys of a tile are divided among as many CTAs as there is room for, which write the sorted lists
(topk.py) of the rows to memory. MergeParts merges them in the order of the keys, so that the selected blocks are those
of a single list. Forced blocks are only in the list of the first part.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.lists.worklist import fake_slots
from cute_kernels.mma.warp import LANES
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.topk import Blocks, TopKList

WARPS = 8
"""Rows per CTA of MergeParts."""


@cute.jit
def empty_list(topk: cutlass.Constexpr[TopKList], sValues: cute.Tensor, sIndices: cute.Tensor):
    """Write an empty list, using one warp."""
    for chunk in range_constexpr(topk.slots_per_lane):
        slot = chunk * LANES + cute.arch.lane_idx()
        sValues[slot], sIndices[slot] = -Float32.inf, Int32(-1)


@cute.jit
def store_list(
    topk: cutlass.Constexpr[TopKList],
    sValues: cute.Tensor,
    sIndices: cute.Tensor,
    gValues: cute.Tensor,  # [k]
    gIndices: cute.Tensor,
):
    """Write a list without sorting, using one warp."""
    for chunk in range_constexpr(topk.slots_per_lane):
        slot = chunk * LANES + cute.arch.lane_idx()
        if slot < topk.blocks.count:
            gValues[slot] = sValues[slot]
            gIndices[slot] = sIndices[slot]


class MergeParts:
    """Merge the lists of all parts of a row into its selected blocks. One warp per row. Args: count: k."""

    def __init__(self, count: int) -> None:
        self.topk = TopKList(Blocks(1, 1, 1, count), Keys(), tile=1)

    @staticmethod
    @compiled_once
    def compile(count: int) -> Kernel:
        return compile_kernel(MergeParts(count), *fake_parts(), fake_slots())

    @cute.jit
    def __call__(
        self,
        mValues: cute.Tensor,  # fp32 [B, H, T, parts, k]
        mParts: cute.Tensor,  # int32 [B, H, T, parts, k]
        mIndices: cute.Tensor,  # int32 [B, H, T, k]
        stream: Any,
    ):
        batches, heads, tokens, _ = mIndices.shape
        self.kernel(mValues, mParts, mIndices).launch(
            grid=[cute.ceil_div(heads * tokens, WARPS), batches, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mValues: cute.Tensor, mParts: cute.Tensor, mIndices: cute.Tensor):
        cta, batch, _ = cute.arch.block_idx()
        _, heads, tokens, _ = mIndices.shape
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = cta * WARPS + warp_index
        smem = SmemAllocator()
        slots = const_expr(self.topk.num_slots)
        lists = cute.make_layout((WARPS, slots), stride=(slots, 1))
        sIndices = smem.allocate_tensor(Int32, lists, 16)[warp_index, None]  # the row's: [slots]
        if row < heads * tokens:
            head, token = row // tokens, row % tokens
            gValues, gParts = (x[batch, head, token, None, None] for x in (mValues, mParts))  # [parts, k]
            self.topk.merge_lists(gValues, gParts, mValues.shape[3], cute.arch.lane_idx(), LANES, None, sIndices)
            cute.arch.sync_warp()
            self.topk.store_indices(sIndices, mIndices[batch, head, token, None])


def fake_parts() -> tuple[Any, Any]:
    """Arguments to compile with: values and blocks of lists in parts."""
    values, lists = (fake(dtype, *[None] * 5, aligned=False) for dtype in (torch.float32, torch.int32))
    return values, lists


def merge_parts(values: Tensor, lists: Tensor) -> Tensor:
    """Merge lists into selected blocks, int32 `[B,H,T,k]`, ascending, padded with -1.

    Args: values, lists: fp32 scores and int32 blocks, sorted, `[B,H,T,parts,k]`.
    """
    *rows, _, count = lists.shape
    indices = lists.new_empty((*rows, count))
    MergeParts.compile(count).run(values, lists, indices)
    return indices


def compile_merge(count: int) -> None:
    """Precompile the merge so that later multi-part calls don't stall."""
    MergeParts.compile(count).compile_ahead()
