"""Choose blocks for each token of a step from the output of score.py: the best of each part of the blocks.

    lse_h        = log2 sum 2^lse_partial              over the splits of score.py
    score[b]     = sum_h 2^(L[h, b] - lse_h)           h over the heads of a group, in one order for all blocks; L of
                                                       both tiles of a block
    part p       = the k best of its blocks, best first; forced blocks head part 0

In tile mode the heads' L are summed directly, and `heads` is 1, or G with share_heads_in_group.

A CTA has a part of the blocks of a token and the heads that select together; each warp keeps a list of its own
(select/topk.py), which are then merged. blocks.py merges the parts. Parts past the last scored block do nothing.

Near ties: in addition to the errors of a fp32 product (select/token.py), L is rounded, and lse is summed in another
order. The relative error of a score is at most

    2^-23 ((D/8 + 8) A + 8 |lse| + G + l'/d + l/d + 16),      A and |lse| the largest scale |q| |k_cmp| and |lse|

so selected blocks can differ from the exact ones, and from those of the whole call, only if scores differ by less than
twice that. Blocks with the same entries in the same proportions tie exactly.

Floor: L once, 4 G bytes per block: 64K tokens, 4 x 16 heads: 0.26 MB, from L2. Latency: the partials' lse, then the
scores, then one sorting network.

Limits: those of TopKList and score.py; `heads` at most MAX_TOKEN_GROUP.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.decode.pages import Lengths, fake_lengths
from cute_kernels.decode.score import ScoreEntries, fake_scores
from cute_kernels.decode.splits import NO_END, Partials
from cute_kernels.mma.warp import LANES, divide
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, FLOATS, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.parts import empty_list
from cute_kernels.select.topk import INIT_END, LOCAL_BEGIN, LOCAL_END, Blocks, TopKList

WARPS = 16
THREADS = WARPS * LANES
BATCH = 4
"""Number of partials' lse that a thread has in flight."""
PART_UNIT = WARPS * LANES
"""Blocks per part are a multiple of this: each warp has the same number of chunks of blocks."""
MAX_PARTS, MAX_LONG_PARTS = 32, 16
"""Maximum number of lists that blocks.py merges: with one slot per lane, and with more."""
CTAS_PER_SM = 2
"""CTAs per SM beyond which larger parts are faster than more CTAs."""


class ChoiceParts(NamedTuple):
    """Partition of the blocks of a sequence."""

    lists: int
    blocks: int
    """Number of blocks per part."""

    @staticmethod
    def of(blocks: int, count: int, items: int, sms: int) -> ChoiceParts:
        """As many parts as CTAs that run concurrently. Part 0 always exists, for forced blocks.

        Args:
            blocks: number of blocks of the longest sequence.
            count: k.
            items: tokens times groups of heads of a step.
            sms: number of multiprocessors.
        """
        most = min(MAX_PARTS if count <= LANES else MAX_LONG_PARTS, max(1, sms * CTAS_PER_SM // max(1, items)))
        size = PART_UNIT * max(1, -(-blocks // (PART_UNIT * most)))
        return ChoiceParts(max(1, -(-blocks // size)), size)


class ChooseBlocks:
    """Best blocks of each part, best first.

    Args: score: kernel that wrote the scores. blocks: selection parameters. heads: heads that select together, 1 or G.
    """

    def __init__(self, score: ScoreEntries, blocks: Blocks, heads: int) -> None:
        self.blocks, self.score, self.tiles, self.heads = blocks, score, score.tiles, heads
        self.by_tile, self.per_kv_head = score.terms > 1, score.group // heads
        self.missing = 0.0 if self.by_tile else -math.inf  # L if a tile has no entries of a block
        self.queries = score.query_rows // score.group
        self.topk = TopKList(blocks, score.keys, tile=1)
        lanes, starts = heads // FLOATS, LANES // self.tiles.blocks
        rows = heads % FLOATS == 0 and LANES % max(1, lanes) == 0
        if self.tiles.reach > 0:
            rows = rows and self.tiles.reach == 1 and starts * self.tiles.blocks == LANES
        self.lanes = lanes if rows else 0  # adjacent lanes per block, sharing its heads; 0: one block per lane
        self.starts = starts if self.tiles.reach > 0 else 0  # blocks of a chunk that start a tile
        self.head_lanes = min(LANES, THREADS >> (heads - 1).bit_length())  # lanes that sum a head's lse

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        group: int,
        queries: int,
        blocks: Blocks,
        page_size: int,
        terms: int = 1,  # see ScoreEntries
        heads: int | None = None,  # None: G
    ) -> Kernel:
        score = ScoreEntries(*dims, CUTE_DTYPES[dtype], group, queries, blocks, page_size, terms=terms)
        return compile_kernel(
            ChooseBlocks(score, blocks, heads or group),
            *fake_lengths(),
            fake(torch.float32, None, score.cta_rows, aligned=False),
            fake_scores(group, queries, score.tiles),
            *fake_parts(blocks),
            *[Int32(0)] * 2,
        )

    @cute.jit
    def __call__(
        self,
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        mLse: cute.Tensor,  # as written by ScoreEntries
        mScores: cute.Tensor,  # as written by ScoreEntries
        mValues: cute.Tensor,  # fp32 [B, H N_q / heads, parts, k], output
        mIndices: cute.Tensor,  # int32 [B, H N_q / heads, parts, k], output; -1: no block
        ctas: Int32,  # CTAs of ScoreEntries
        part_blocks: Int32,
        stream: Any,
    ):
        batches, items, parts, _ = mIndices.shape
        self.kernel(Lengths(mCached, mNew), mLse, mScores, mValues, mIndices, ctas, part_blocks).launch(
            grid=[parts, items, batches], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        lengths: Lengths,
        mLse: cute.Tensor,
        mScores: cute.Tensor,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        ctas: Int32,
        part_blocks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        part, item, batch = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sRow = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # see select/topk.py
        # sValues, sIndices: a list per warp
        lists = cute.make_layout((WARPS, self.topk.num_slots), stride=(self.topk.num_slots, 1))
        sValues = smem.allocate_tensor(Float32, lists, 16)
        sIndices = smem.allocate_tensor(Int32, lists, 16)
        padded = const_expr(-(-self.heads // FLOATS) * FLOATS)  # the compiler reads whole vectors
        sLse = smem.allocate_tensor(Float32, cute.make_layout(padded), 16)

        selector, query = item // self.queries, item % self.queries
        kv_head, first_head = selector // self.per_kv_head, selector % self.per_kv_head * self.heads
        token = lengths.mCached[batch] + query
        visible = self.score.keys.visible(token, Int32(NO_END))
        scored = self.blocks.scored(visible)
        heads = mScores.shape[1] * self.score.row_groups
        cut = self.score.splits.cut(lengths, batch, heads, ctas)
        cute.arch.griddepcontrol_wait()
        if (query < lengths.mNew[batch]) & ((part == 0) | (part * part_blocks < scored)):
            # Forced blocks and the heads' lse; meanwhile the first scores are in flight
            if thread == 0:
                self.topk.init_row(sRow, token, token + 1, Int32(NO_END), False)
            # [tiles, slots, N_q G - first head]
            gScores = cute.domain_offset(
                (0, 0, query * self.score.group + first_head), mScores[batch, kv_head, None, None, None]
            )
            first = part * part_blocks + warp_index * (part_blocks // WARPS)
            end = cutlass.min(scored, first + part_blocks // WARPS)
            rOwn, rBefore = self._registers()
            self._load(gScores, first, end, cut.tiles, rOwn, rBefore)
            if const_expr(not self.by_tile):
                head = thread // self.head_lanes
                query_row = query * self.score.group + first_head + cutlass.min(head, self.heads - 1)
                group, group_row = divide(query_row, self.score.cta_rows)
                places = self.score.splits.partials(cut, kv_head * self.score.row_groups + group)
                lse = self._lse(mLse[None, group_row], places)
                if (thread % self.head_lanes == 0) & (head < padded):
                    sLse[head] = lse if head < self.heads else Float32(0.0)
            cute.arch.sync_threads()  # the row and the heads' lse are written

            # One list per warp
            sWarpValues, sWarpIndices = sValues[warp_index, None], sIndices[warp_index, None]  # [slots] each
            if (part == 0) & (warp_index == 0):
                self.topk.init_list(sWarpValues, sWarpIndices, sRow)
            else:
                empty_list(self.topk, sWarpValues, sWarpIndices)
            cute.arch.sync_warp()
            if sRow[INIT_END] + sRow[LOCAL_END] - sRow[LOCAL_BEGIN] < self.blocks.count:
                for start in cutlass.range(first, end, LANES, unroll=1):
                    block = start + lane
                    value = self._score(rOwn, rBefore, sLse)
                    self._load(gScores, start + LANES, end, cut.tiles, rOwn, rBefore)
                    value = value if (block < end) & self.topk.not_forced(sRow, block) else -Float32.inf
                    candidates = cute.arch.vote_ballot_sync(value > sWarpValues[self.blocks.count - 1])
                    if candidates != 0:
                        self.topk.merge(sWarpValues, sWarpIndices, value, block, candidates)
            cute.arch.sync_threads()  # the lists of all warps are complete

            # One list
            gList = (x[batch, item, part, None] for x in (mValues, mIndices))  # [k] each
            self.topk.merge_lists(sValues, sIndices, Int32(WARPS), thread, THREADS, *gList)

    @cute.jit
    def _lse(self, gLse: cute.Tensor, places: Partials) -> Float32:
        """lse of a query row over all splits, in base 2, using `head_lanes` lanes."""
        lanes = const_expr(self.head_lanes)
        lane = cute.arch.lane_idx() % lanes
        gLse = cute.domain_offset((places.first,), gLse)  # fp32 [partials - first]
        top, total = -Float32.inf, Float32(0.0)
        rLse = cute.make_rmem_tensor(BATCH, Float32)
        for start in cutlass.range(lane, places.count, lanes * BATCH, unroll=1):
            rLse.fill(-Float32.inf)
            for i in range_constexpr(BATCH):
                if start + i * lanes < places.count:
                    rLse[i] = gLse[start + i * lanes]
            before = top
            for i in range_constexpr(BATCH):
                top = cute.arch.fmax(top, rLse[i])
            base = Float32(0.0) if top == -Float32.inf else top
            total = total * cute.math.exp2(before - base, fastmath=True)
            for i in range_constexpr(BATCH):
                total += cute.math.exp2(rLse[i] - base, fastmath=True)
        of_all = cute.arch.warp_reduction_max(top, threads_in_group=lanes)
        base = Float32(0.0) if of_all == -Float32.inf else of_all
        total = cute.arch.warp_reduction_sum(total * cute.math.exp2(top - base, fastmath=True), threads_in_group=lanes)
        return base + cute.math.log2(total, fastmath=True)

    # Scores of a chunk of LANES blocks. If heads are whole vectors and tiles divide LANES, adjacent lanes hold a
    # block's heads, a vector each: loads are contiguous, and the L that a tile contributes to the next one's blocks is
    # in a few lanes. Otherwise each lane has a block with all of its heads.

    def _registers(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers for L of blocks' own tiles, and of the tiles before: [FLOATS, loads]."""
        if self.lanes == 0:
            loads = -(-self.heads // FLOATS), -(-self.heads // FLOATS)
        else:
            loads = self.lanes, max(1, -(-self.starts * self.lanes // LANES))
        own, before = (
            cute.make_rmem_tensor(cute.make_ordered_layout((FLOATS, n), order=(0, 1)), Float32) for n in loads
        )
        return own, before

    @cute.jit
    def _load(
        self,
        gScores: cute.Tensor,  # [tiles, slots, heads ...]
        start: Int32,
        end: Int32,
        num_tiles: Int32,
        rOwn: cute.Tensor,
        rBefore: cute.Tensor,
    ):
        """Load L of the chunk's heads: of a block's tile, if any, and of the tile before, otherwise `missing`."""
        rOwn.fill(self.missing)
        rBefore.fill(self.missing)
        if const_expr(self.lanes == 0):
            self._load_blocks(gScores, start + cute.arch.lane_idx(), end, num_tiles, rOwn, rBefore)
        else:
            self._load_side_by_side(gScores, start, end, num_tiles, rOwn, rBefore)

    def _score(self, rOwn: cute.Tensor, rBefore: cute.Tensor, sLse: cute.Tensor) -> Float32:
        """Score of the lane's block."""
        if self.lanes == 0:
            return self._sum(rOwn, sLse) + self._sum(rBefore, sLse)
        return self._sum_side_by_side(rOwn, rBefore, sLse)

    @cute.jit
    def _load_blocks(
        self,
        gScores: cute.Tensor,
        block: Int32,
        end: Int32,
        num_tiles: Int32,
        rOwn: cute.Tensor,
        rBefore: cute.Tensor,
    ):
        tile, slot = block // self.tiles.blocks, block % self.tiles.blocks
        if (block < end) & (tile < num_tiles):  # otherwise all of its visible entries start earlier
            self._load_heads(gScores[tile, slot, None], rOwn)
        if const_expr(self.tiles.reach > 0):
            if (block < end) & (slot < self.tiles.reach) & (tile > 0):
                self._load_heads(gScores[tile - 1, self.tiles.blocks + slot, None], rBefore)

    @cute.jit
    def _load_heads(self, gHeads: cute.Tensor, rHeads: cute.Tensor):
        if const_expr(self.heads % FLOATS == 0):
            for i in range_constexpr(self.heads // FLOATS):
                cute.autovec_copy(cute.local_tile(gHeads, (FLOATS,), (i,)), rHeads[None, i])
        else:
            for i in range_constexpr(self.heads):
                rHeads[i] = gHeads[i]

    @cute.jit
    def _sum(self, rHeads: cute.Tensor, sLse: cute.Tensor) -> Float32:
        score = Float32(0.0)
        for head in range_constexpr(self.heads):
            score += self._share(rHeads, sLse, head)
        return score

    @cute.jit
    def _load_side_by_side(
        self,
        gScores: cute.Tensor,
        start: Int32,
        end: Int32,
        num_tiles: Int32,
        rOwn: cute.Tensor,
        rBefore: cute.Tensor,
    ):
        place, piece = cute.arch.lane_idx() // self.lanes, cute.arch.lane_idx() % self.lanes
        at_once = const_expr(LANES // self.lanes)  # blocks per load
        for i in range_constexpr(self.lanes):
            block = start + i * at_once + place
            tile, slot = block // self.tiles.blocks, block % self.tiles.blocks
            if (block < end) & (tile < num_tiles):  # otherwise all of its visible entries start earlier
                cute.autovec_copy(cute.local_tile(gScores[tile, slot, None], (FLOATS,), (piece,)), rOwn[None, i])
        if const_expr(self.starts > 0):
            for i in range_constexpr(cute.size(rBefore, mode=[1])):
                first = i * at_once + place  # index among the blocks that start a tile
                tile = start // self.tiles.blocks + first
                if (first < self.starts) & (tile * self.tiles.blocks < end) & (tile > 0):
                    gBefore = gScores[tile - 1, self.tiles.blocks, None]  # [heads ...]
                    cute.autovec_copy(cute.local_tile(gBefore, (FLOATS,), (piece,)), rBefore[None, i])

    @cute.jit
    def _sum_side_by_side(self, rOwn: cute.Tensor, rBefore: cute.Tensor, sLse: cute.Tensor) -> Float32:
        lane = cute.arch.lane_idx()
        at_once = const_expr(LANES // self.lanes)
        rLse = cute.make_rmem_tensor(FLOATS, Float32)  # lse of the lane's FLOATS heads
        if const_expr(not self.by_tile):
            cute.autovec_copy(cute.local_tile(sLse, (FLOATS,), (lane % self.lanes,)), rLse)
        score = Float32(0.0)
        for i in range_constexpr(self.lanes):
            of_load = cute.arch.shuffle_sync(self._sum_of_lanes(rOwn[None, i], rLse), lane % at_once * self.lanes)
            score = of_load if lane // at_once == i else score
        if const_expr(self.starts > 0):
            first = lane // self.tiles.blocks
            for i in range_constexpr(cute.size(rBefore, mode=[1])):
                source = first % at_once * self.lanes
                of_load = cute.arch.shuffle_sync(self._sum_of_lanes(rBefore[None, i], rLse), source)
                begins = (lane % self.tiles.blocks == 0) & (first // at_once == i)
                score += of_load if begins else Float32(0.0)
        return score

    @cute.jit
    def _sum_of_lanes(self, rHeads: cute.Tensor, rLse: cute.Tensor) -> Float32:
        """Sum over a block's heads, in all lanes that hold them."""
        score = Float32(0.0)
        for i in range_constexpr(FLOATS):
            score += self._share(rHeads, rLse, i)
        return cute.arch.warp_reduction_sum(score, threads_in_group=self.lanes)

    def _share(self, rHeads: cute.Tensor, lse: cute.Tensor, head: int) -> Float32:
        """Contribution of a head to a block's score."""
        return rHeads[head] if self.by_tile else cute.math.exp2(rHeads[head] - lse[head], fastmath=True)


def fake_parts(blocks: Blocks) -> tuple[Any, Any]:
    """[B, H N_q / heads, parts, k], values and blocks."""
    values, indices = (
        fake(dtype, None, None, None, blocks.count, aligned=False) for dtype in (torch.float32, torch.int32)
    )
    return values, indices
