"""Worklist of the split backward (attend/selected_backward.py): the query tiles that selected each KV block.

A work item is a KV block of a key/value head; its query tiles are pairs (head of the group, tile), encoded as
head * tiles + tile. They are stored consecutively, block by block, and built from bitmaps:

CountQueryTiles   one warp per block: its number of query tiles
ListQueryTiles    one warp per block: its query tiles in a fixed order, after those of earlier blocks, and its work
                  tiles

A cumulative sum in between gives the start of each block. A block that many tiles selected (all may select block 0) is
split into work tiles of at least `WorklistSizes.min_rows` and less than twice as many query tiles. The work tiles of
split blocks come first, since they are the longest. Then blocks ascend: causality gives early blocks more query tiles.

Blocks are numbered with the key/value head fastest, then the batch, then the block of the sequence.

Limits: at most 2^31 query tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from cute_kernels.lists.kv_to_query import WORD
from cute_kernels.lists.worklist import ROWS, WorklistSizes, write_counts, write_work_tiles
from cute_kernels.mma.warp import LANES, lowest_bit, prefix_sum
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake

WARPS = 4
"""Warps per CTA."""


def block_coordinates(block: Int32, kv_heads: Int32, mX: cute.Tensor) -> tuple[Int32, Int32, Int32]:
    """Batch, key/value head and block of the sequence. Args: mX: [B, ...]."""
    return block // kv_heads % mX.shape[0], block % kv_heads, block // kv_heads // mX.shape[0]


class CountQueryTiles:
    """Count the (head of the group, query tile) pairs that selected each block. One warp per block."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        return compile_kernel(CountQueryTiles(), _fake_bits(), fake_table(), *[Int32(0)] * 3)

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, S, blocks, words], see selected_worklist
        mCounts: cute.Tensor,  # int32 [3, B * H_kv * blocks]
        kv_heads: Int32,
        group: Int32,  # query heads per key/value head
        min_rows: Int32,  # WorklistSizes.min_rows, in query tiles
        stream: Any,
    ):
        self.kernel(mBits, mCounts, kv_heads, group, min_rows).launch(
            grid=[cute.ceil_div(mCounts.shape[1], WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mBits: cute.Tensor, mCounts: cute.Tensor, kv_heads: Int32, group: Int32, min_rows: Int32):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        work_index = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if work_index < mCounts.shape[1]:
            batch, kv_head, block = block_coordinates(work_index, kv_heads, mBits)
            select_heads = mBits.shape[1] // kv_heads
            count = Int32(0)
            for i in cutlass.range(select_heads, unroll=1):
                for word in cutlass.range(lane, mBits.shape[3], LANES, unroll=4):
                    count += cute.arch.popc(mBits[batch, kv_head * select_heads + i, block, word])
            query_tiles = cute.arch.warp_reduction_sum(count) * (group // select_heads)
            if lane == 0:
                write_counts(mCounts, work_index, query_tiles, min_rows)


class ListQueryTiles:
    """List the (head of the group, query tile) pairs that selected each block, and its work tiles. One warp each."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        tables = [fake_table() for _ in range(3)]
        return compile_kernel(
            ListQueryTiles(), _fake_bits(), *tables[:2], fake_query_tiles(), tables[2], *[Int32(0)] * 3
        )

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, S, blocks, words]
        mCounts: cute.Tensor,  # int32 [3, B * H_kv * blocks]
        mCumCounts: cute.Tensor,  # the same, cumulative
        mQueryTiles: cute.Tensor,  # int32 [query tiles]: head of the group * tiles + tile
        mWorkTiles: cute.Tensor,  # int32 [3, work tiles], those of split blocks first
        kv_heads: Int32,
        group: Int32,
        tiles: Int32,
        stream: Any,
    ):
        self.kernel(mBits, mCounts, mCumCounts, mQueryTiles, mWorkTiles, kv_heads, group, tiles).launch(
            grid=[cute.ceil_div(mCounts.shape[1], WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBits: cute.Tensor,
        mCounts: cute.Tensor,
        mCumCounts: cute.Tensor,
        mQueryTiles: cute.Tensor,
        mWorkTiles: cute.Tensor,
        kv_heads: Int32,
        group: Int32,
        tiles: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        work_index = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        blocks = mCounts.shape[1]
        if work_index < blocks:
            batch, kv_head, block = block_coordinates(work_index, kv_heads, mBits)
            select_heads, words = mBits.shape[1] // kv_heads, mBits.shape[3]
            sharing = group // select_heads  # heads with the same selection
            query_tiles = mCounts[ROWS, work_index]
            first = mCumCounts[ROWS, work_index] - query_tiles
            gQueryTiles = cute.domain_offset((first,), mQueryTiles)  # the block's come first
            before = Int32(0)  # bits of earlier words
            for i in cutlass.range(select_heads, unroll=1):
                for start in cutlass.range(0, words, LANES, unroll=1):
                    selected = Int32(0)
                    if start + lane < words:
                        selected = mBits[batch, kv_head * select_heads + i, block, start + lane]
                    count = cute.arch.popc(selected)
                    sums = prefix_sum(count)
                    index = before + sums - count
                    while selected != 0:
                        tile = (start + lane) * WORD + lowest_bit(selected)
                        for j in cutlass.range(sharing, unroll=1):
                            gQueryTiles[index * sharing + j] = (i * sharing + j) * tiles + tile
                        selected = selected & (selected - 1)
                        index += 1
                    before += cute.arch.shuffle_sync(sums, LANES - 1)
            write_work_tiles(mCounts, mCumCounts, mWorkTiles, work_index)


def fake_table() -> Any:
    """SelectedWorklist.counts, .cum_counts or .work_tiles to compile with."""
    return fake(torch.int32, 3, None, aligned=False)


def fake_query_tiles() -> Any:
    """SelectedWorklist.query_tiles to compile with."""
    return fake(torch.int32, None, aligned=False)


def _fake_bits() -> Any:
    return fake(torch.int32, None, None, None, None, aligned=False)


class SelectedWorklist(NamedTuple):
    """Query tiles of all blocks, and work tiles of the CTAs. Elements past the ends are uninitialized."""

    counts: Tensor
    """int32 `[3,B*H_kv*blocks]`: worklist.ROWS, SPLITS and WHOLE of each block."""
    cum_counts: Tensor
    """int32 `[3,B*H_kv*blocks]`: inclusive cumulative sums of `counts` over the blocks."""
    query_tiles: Tensor
    """int32 `[sizes.rows]`: head of the group * tiles + tile."""
    work_tiles: Tensor
    """int32 `[3,sizes.tiles]`: worklist.BLOCK, FIRST and COUNT of each work tile, those of split blocks first."""


def selected_worklist(bits: Tensor, *, kv_heads: int, group: int, tiles: int, sizes: WorklistSizes) -> SelectedWorklist:
    """List the query tiles that selected each block.

    Args:
        bits: int32 `[B,S,blocks,words]`: bit t % 32 of word t // 32 is set if query tile t selected the block. S is
            H_kv or H; if H_kv, the heads of a group share a row of bits. Words past the last tile are 0.
        group: G, query heads per key/value head.
        tiles: query tiles per head.
        sizes: sizes of the lists; its `min_rows` is the minimum query tiles per work tile of a split block.
    """

    def table(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=bits.device)

    counts, cum_counts = (table(3, bits.shape[0] * kv_heads * bits.shape[2]) for _ in range(2))
    query_tiles, work_tiles = table(sizes.rows), table(3, sizes.tiles)
    CountQueryTiles.compile().run(bits, counts, kv_heads, group, sizes.min_rows)
    torch.cumsum(counts, 1, out=cum_counts)
    ListQueryTiles.compile().run(bits, counts, cum_counts, query_tiles, work_tiles, kv_heads, group, tiles)
    return SelectedWorklist(counts, cum_counts, query_tiles, work_tiles)
