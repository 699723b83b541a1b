"""Top-k block selection per query tile, in one pass over the compressed keys.

    s[t, j]     = mean of the tile's queries . k_cmp[j]              entry j visible to the tile's last token
    score[t, b] = sum_j overlap(j, b) s[t, j] / sum_j overlap(j, b)  over those j
    indices[t]  = forced blocks, then the highest scores, ties to the lower block; k in all, ascending

softmax_scale > 0 does not change the order and is omitted. Scores stay on chip.

A row is a (tile, query head) pair; a CTA holds TILE_M rows of one key/value head and iterates over the compressed keys,
64 or 128 (`tile_n`) per step, double buffered with cp.async. In a step every warp computes S = Q K^T for its part of
the keys and writes it to shared memory. Then each warp pools the scores of its rows to blocks and merges those that
beat a row's k-th best into its sorted list (select/topk.py). If there are few rows, CTAs share the keys of a tile
(parts.py).

The mean queries are fp32, split into three 16-bit terms: three mma.sync products give fp32-accurate scores of the
16-bit keys.

The same kernel selects blocks of compressed entries for the compressed branch. A block's score is then the plain mean
over its entries, and blocks with entries that become visible inside the tile are forced.

Packed documents: the rows of a CTA belong to one document. Entries, tiles and blocks count from its start.

Floor: three products of tiles x entries x D per head, halved by causality. 1M tokens, 8 heads of 128, l = 64: 0.2
TFLOP, 0.35 ms at 600 TFLOP/s. Only the indices are written.

Limits: D a multiple of 16, at most 128; at most 128 entries overlap one block; up to 1024 blocks per tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.warp import LANES, lowest_bit
from cute_kernels.pool.documents import ENTRY, LENGTH, START, TILE, Documents, document_at, fake_tables
from cute_kernels.runtime.device import multiprocessors
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.parts import compile_merge, empty_list, merge_parts, store_list
from cute_kernels.select.topk import NUM_VISIBLE, Blocks, TopKList

TILE_M = 16
"""Rows per CTA."""

WARPS = 4
ROWS_PER_WARP = TILE_M // WARPS
"""Rows whose lists a warp keeps."""

QUERY_TERMS = 3
"""Number of 16-bit terms of an fp32 query."""


class TermScales(NamedTuple):
    """Powers of two between the terms of an fp32 query: x first = high + middle / later + low / later^2."""

    first: float = 1.0
    later: float = 1.0

    @classmethod
    def of(cls, dtype: Any) -> TermScales:
        """Scales for a dtype. fp16: sums over up to 256 heads stay below 65504, queries from 2^-15 on keep 24 bits."""
        return cls(2.0**-8, 2.0**11) if dtype is cutlass.Float16 else cls()


STAGES = 2
"""Buffers of keys."""

CTAS_PER_SM = 4
"""CTAs per SM over all parts: as many as fit in shared memory with D = 128."""

MIN_PART_ENTRIES, FEW_PARTS = 256, 8
"""Minimum entries per part, for up to FEW_PARTS parts: a part starts with an empty list, which nearly all blocks of
its first steps enter."""

MIN_LONG_PART_ENTRIES, MAX_PARTS = 1024, 16
"""Minimum entries per part, and maximum parts, beyond FEW_PARTS: one warp merges the lists of a row, comparing each
block with all of them."""


class TileTopK:
    """One CTA per TILE_M rows: scores, pooling and top-k selection.

    Args:
        dim: D.
        dtype: dtype of the keys.
        blocks: selection parameters.
        keys: visibility of entries.
        tile: T, tokens per query tile.
    """

    def __init__(self, dim: int, dtype: Any, blocks: Blocks, keys: Keys, tile: int) -> None:
        self.dim, self.dtype, self.blocks, self.keys = dim, dtype, blocks, keys
        self.scales = TermScales.of(dtype)
        self.topk = TopKList(blocks, keys, tile)
        self.tile_n = 64 if blocks.per_step(64) > 0 else 128
        self.blocks_per_step = blocks.per_step(self.tile_n)

    @staticmethod
    @compiled_once
    def compile(dtype: torch.dtype, dim: int, blocks: Blocks, keys: Keys, tile: int, packed: bool) -> Kernel:
        return compile_kernel(
            TileTopK(dim, CUTE_DTYPES[dtype], blocks, keys, tile),
            fake(torch.float32, None, None, None, dim),
            fake(dtype, None, None, None, dim),
            fake(torch.int32, None, None, None, blocks.count, aligned=False),
            fake(torch.float32, None, None, None, None, aligned=False),
            fake_tables()[0] if packed else None,
            Int32(0),
            Int32(0),
            Int32(0),
        )

    def _smem_layout(self, rows: int, copies: int) -> Any:
        columns = next(c for c in (64, 32, 16) if self.dim % c == 0)
        bits = {64: 3, 32: 2, 16: 1}[columns]
        atom = cute.make_composed_layout(
            cute.make_swizzle(bits, 3, 3), 0, cute.make_ordered_layout((8, columns), order=(1, 0))
        )
        return cute.tile_to_shape(atom, (rows, self.dim, copies), (0, 1, 2))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # mean queries, fp32 [B, tiles, S, D]
        mK: cute.Tensor,  # [B, entries, H_kv, D]
        mIndices: cute.Tensor,  # int32 [B, S, tiles parts, k]: selected blocks if there is one part, otherwise lists
        mValues: cute.Tensor,  # fp32, scores of the lists; any tensor if there is one part
        mBounds: cute.Tensor | None,  # Documents.bounds, with one part
        parts: Int32,
        num_tokens: Int32,  # N; not read with mBounds
        first_tile: Int32,  # index of mQ's first tile in the sequence
        stream: Any,
    ):
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, (1, WARPS, 1), permutation_mnk=(TILE_M, 16 * WARPS, 16))
        group = mQ.shape[2] // mK.shape[2]
        num_row_tiles = cute.ceil_div(mQ.shape[1] * group, TILE_M)
        if const_expr(mBounds is not None):
            num_row_tiles = mQ.shape[1] * group // TILE_M + mBounds.shape[1] - 1
        self.kernel(
            mQ,
            mK,
            mIndices,
            mValues,
            mBounds,
            parts,
            num_tokens,
            first_tile,
            group,
            tiled_mma,
        ).launch(
            grid=[num_row_tiles, mK.shape[2], mK.shape[0] * parts],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mIndices: cute.Tensor,
        mValues: cute.Tensor,
        mBounds: cute.Tensor | None,
        parts: Int32,
        num_tokens: Int32,
        first_tile: Int32,
        group: Int32,
        tiled_mma: cute.TiledMma,
    ):
        # Coordinates of the CTA's rows
        thread, _, _ = cute.arch.thread_idx()
        row_tile, kv_head, batch = cute.arch.block_idx()
        part, batch = batch % parts, batch // parts
        num_row_tiles, _, _ = cute.arch.grid_dim()
        row_tile = num_row_tiles - 1 - row_tile  # longest first
        first_row, num_rows, num_entries = row_tile * TILE_M, mQ.shape[1] * group, mK.shape[1]
        if const_expr(mBounds is not None):
            # Document i's CTAs start at first_tile[i] * G // TILE_M + i: as many as it needs or more, without rows
            mFirst = mBounds[TILE, None]
            document = document_at(mFirst, row_tile, group, TILE_M, 1)
            tiles_before = mFirst[document]
            first_row = (row_tile - tiles_before * group // TILE_M - document) * TILE_M
            num_rows = (mFirst[document + 1] - tiles_before) * group
            num_tokens, first_tile = mBounds[LENGTH, document], mBounds[START, document] // self.topk.tile
            num_entries = self.keys.visible(num_tokens - 1, num_entries)
            mQ = cute.domain_offset((0, tiles_before, 0, 0), mQ)
            mK = cute.domain_offset((0, mBounds[ENTRY, document], 0, 0), mK)
            mIndices = cute.domain_offset((0, 0, tiles_before, 0), mIndices)

        # Shared memory
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, self._smem_layout(TILE_M, QUERY_TERMS), 128)  # [TILE_M, D, terms]
        sK = smem.allocate_tensor(self.dtype, self._smem_layout(self.tile_n, STAGES), 128)  # [tile_n, D, stages]
        score_stride = self.tile_n + 4  # padded against bank conflicts
        # [TILE_M, tile_n]
        sScore = smem.allocate_tensor(Float32, cute.make_layout((TILE_M, self.tile_n), stride=(score_stride, 1)), 16)
        slots = const_expr(self.topk.num_slots)
        # Lists of the rows: [TILE_M, slots] each
        sValues = smem.allocate_tensor(Float32, cute.make_layout((TILE_M, slots), stride=(slots, 1)), 16)
        sIndices = smem.allocate_tensor(Int32, cute.make_layout((TILE_M, slots), stride=(slots, 1)), 16)
        sThreshold = smem.allocate_tensor(Float32, cute.make_layout(TILE_M), 16)  # [TILE_M]
        # [TILE_M, 4], see select/topk.py
        sRow = smem.allocate_tensor(Int32, cute.make_layout((TILE_M, 4), stride=(4, 1)), 16)

        # Prologue: queries, rows and lists
        self.load_queries(mQ, sQ, batch, kv_head, first_row, num_rows, group)
        if thread < TILE_M:
            row = first_row + thread
            tile = first_tile + row // group
            threshold = self.topk.init_row(sRow[thread, None], tile, num_tokens, num_entries, mBounds is not None)
            sThreshold[thread] = threshold if row < num_rows else Float32.inf
        cute.arch.sync_threads()  # queries, rows and thresholds are written

        last_row = cutlass.min(first_row + TILE_M, num_rows) - 1  # sees the most entries
        end_step = Int32(0)
        if const_expr(mBounds is None) or first_row < num_rows:
            num_visible = sRow[last_row - first_row, NUM_VISIBLE]
            end_step = cute.ceil_div(self.blocks.scored(num_visible), self.blocks_per_step)
        part_steps = cute.ceil_div(end_step, parts)
        first_step = part * part_steps
        end_step = cutlass.min(end_step, first_step + part_steps)

        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_row = warp_index * ROWS_PER_WARP  # first row whose list this warp keeps
        for i in range_constexpr(ROWS_PER_WARP):
            row = warp_row + i
            self.topk.init_list(sValues[row, None], sIndices[row, None], sRow[row, None])
            if part > 0:
                empty_list(self.topk, sValues[row, None], sIndices[row, None])

        # Operands and accumulator
        thr_mma = tiled_mma.get_slice(thread)
        tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ[None, None, 0]))  # one term: [TILE_M, D]
        tSrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0]))  # [tile_n, D]
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_q = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_k = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        tSsQ = copy_q.partition_S(sQ)
        tSsK = copy_k.partition_S(sK)
        tSrQ_copy = copy_q.retile(tSrQ)
        tSrK_copy = copy_k.retile(tSrK)
        # fp32 [TILE_M, tile_n]
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, self.tile_n)), Float32)
        # One per term, the same one unless terms have scales: fp16 has a small exponent range (TermScales)
        accs = [acc] * QUERY_TERMS
        if const_expr(self.scales.later != 1.0):
            accs = [acc, *(cute.make_rmem_tensor_like(acc) for _ in range(QUERY_TERMS - 1))]
        tSsScore = thr_mma.partition_C(sScore)  # as acc

        # Mainloop
        if first_step < end_step:
            self.load_keys(mK, sK, num_entries, batch, kv_head, first_step, first_step % STAGES)
        cute.arch.cp_async_commit_group()
        for step in cutlass.range(first_step, end_step, unroll=1):
            # Load: the next keys
            cute.arch.cp_async_wait_group(0)
            # All copies of this step's keys have landed, and the last step's scores are read: its stage may be filled
            # and the scores overwritten
            cute.arch.sync_threads()
            stage = step % STAGES
            if step + 1 < end_step:
                self.load_keys(mK, sK, num_entries, batch, kv_head, step + 1, (step + 1) % STAGES)
            cute.arch.cp_async_commit_group()

            # MMA: S = Q K^T  [TILE_M, tile_n], the smallest term of the queries first
            acc.fill(0.0)
            if const_expr(self.scales.later != 1.0):
                for term in range_constexpr(1, QUERY_TERMS):
                    accs[term].fill(0.0)
            for c in range_constexpr(self.dim // 16):
                cute.copy(copy_k, tSsK[None, None, c, stage], tSrK_copy[None, None, c])
                for term in range_constexpr(QUERY_TERMS - 1, -1, -1):
                    cute.copy(copy_q, tSsQ[None, None, c, term], tSrQ_copy[None, None, c])
                    cute.gemm(tiled_mma, accs[term], tSrQ[None, None, c], tSrK[None, None, c], accs[term])
            if const_expr(self.scales.later != 1.0):
                for term in range_constexpr(QUERY_TERMS - 1, 0, -1):
                    larger = accs[term - 1]
                    larger.store(larger.load() + accs[term].load() * (1 / self.scales.later))
            cute.autovec_copy(acc, tSsScore)
            cute.arch.sync_threads()  # the scores are written

            # Select: find the rows that have a candidate (in most steps none), then merge one by one
            first_block = step * self.blocks_per_step
            pending = Int32(0)
            for i in range_constexpr(ROWS_PER_WARP):
                row = warp_row + i
                above = self.beats_threshold(sScore[row, None], sThreshold[row], sRow[row, NUM_VISIBLE], first_block)
                if cute.arch.vote_any_sync(above):
                    pending = pending | (1 << i)
            while pending != 0:
                row = warp_row + lowest_bit(pending)
                pending = pending & (pending - 1)
                threshold = self.merge(
                    sScore[row, None],
                    sValues[row, None],
                    sIndices[row, None],
                    sThreshold[row],
                    sRow[row, None],
                    first_block,
                )
                cute.arch.sync_warp()  # all lanes have read the old threshold
                sThreshold[row] = threshold

        # Epilogue: store the lists
        for i in cutlass.range(ROWS_PER_WARP, unroll=1):
            row = first_row + warp_row + i
            if row < num_rows:
                head, tile = kv_head * group + row % group, row // group
                gIndices = mIndices[batch, head, tile * parts + part, None]  # int32 [k]
                if parts == 1:
                    self.topk.store_indices(sIndices[warp_row + i, None], gIndices)
                else:
                    gValues = mValues[batch, head, tile * parts + part, None]  # fp32 [k]
                    store_list(self.topk, sValues[warp_row + i, None], sIndices[warp_row + i, None], gValues, gIndices)

    # Loads

    @cute.jit
    def load_queries(
        self,
        mQ: cute.Tensor,
        sQ: cute.Tensor,
        batch: Int32,
        kv_head: Int32,
        first_row: Int32,
        num_rows: Int32,
        group: Int32,
    ):
        """Load mean queries as high, middle and low terms: 16 bits each hold the 24 bits of an fp32 mantissa."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = self.dim // VECTOR
        rX = cute.make_rmem_tensor(VECTOR, Float32)
        for item in cutlass.range(thread, TILE_M * vectors, WARPS * LANES):
            row, vector = item // vectors, item % vectors
            rX.fill(0.0)
            if first_row + row < num_rows:
                tile, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
                cute.autovec_copy(cute.local_tile(mQ[batch, tile, head, None], (VECTOR,), (vector,)), rX)
            rX.store(rX.load() * self.scales.first)
            for term in range_constexpr(QUERY_TERMS):
                rTerm = cute.make_rmem_tensor(VECTOR, self.dtype)
                rTerm.store(rX.load().to(self.dtype))
                rX.store((rX.load() - rTerm.load().to(Float32)) * self.scales.later)
                cute.autovec_copy(rTerm, cute.local_tile(sQ[row, None, term], (VECTOR,), (vector,)))

    @cute.jit
    def load_keys(
        self,
        mK: cute.Tensor,
        sK: cute.Tensor,
        num_entries: Int32,
        batch: Int32,
        kv_head: Int32,
        step: Int32,
        stage: Int32,
    ):
        """Start copying the keys of one step; rows without an entry keep their contents."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = self.dim // VECTOR
        first = self.blocks.first_entry(step * self.blocks_per_step)
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        for i in range_constexpr(self.tile_n * vectors // (WARPS * LANES)):
            item = thread + i * WARPS * LANES
            row, vector = item // vectors, item % vectors
            if first + row < num_entries:
                cute.copy(
                    copy,
                    cute.local_tile(mK[batch, first + row, kv_head, None], (VECTOR,), (vector,)),
                    cute.local_tile(sK[row, None, stage], (VECTOR,), (vector,)),
                )

    # Scores of blocks

    @cute.jit
    def beats_threshold(
        self, sScores: cute.Tensor, threshold: Float32, num_visible: Int32, first_block: Int32
    ) -> cutlass.Boolean:
        """True if this lane's block may enter the row's list, forced or not."""
        above = cutlass.Boolean(False)
        for chunk in range_constexpr(-(-self.blocks_per_step // LANES)):
            offset = chunk * LANES + cute.arch.lane_idx()
            score = self.block_score(sScores, first_block + offset, first_block, num_visible)
            above = above | ((score > threshold) & (offset < self.blocks_per_step))
        return above

    @cute.jit
    def merge(
        self,
        sScores: cute.Tensor,  # [tile_n], scores of this row
        sValues: cute.Tensor,
        sIndices: cute.Tensor,
        threshold: Float32,
        sRow: cute.Tensor,
        first_block: Int32,
    ) -> Float32:
        """Merge the step's blocks that beat the threshold into the row's list. Returns the new threshold."""
        for chunk in range_constexpr(-(-self.blocks_per_step // LANES)):
            offset = chunk * LANES + cute.arch.lane_idx()
            block = first_block + offset
            score = self.block_score(sScores, block, first_block, sRow[NUM_VISIBLE])
            is_scored = self.topk.not_forced(sRow, block) & (offset < self.blocks_per_step)
            candidates = cute.arch.vote_ballot_sync(is_scored & (score > threshold))
            if candidates != 0:
                threshold = self.topk.merge(sValues, sIndices, score, block, candidates)
        return threshold

    @cute.jit
    def block_score(self, sScores: cute.Tensor, block: Int32, first_block: Int32, num_visible: Int32) -> Float32:
        """Score of this lane's block, -inf if it has no visible entry. Consecutive lanes have consecutive blocks."""
        score = Float32(-Float32.inf)
        if const_expr(self.blocks.plain):
            if block < num_visible:
                score = sScores[cutlass.min(block - first_block, self.tile_n - 1)]
        elif const_expr(self.blocks.overlapping < LANES):
            total, weight = self.weighted_sum(sScores, block, first_block, num_visible, Int32(0), 1)
            if weight > 0:
                score = total / Float32(weight)
        else:  # long blocks: all lanes together sum one block at a time
            lane = cute.arch.lane_idx()
            for offset in range_constexpr(self.blocks_per_step):
                total, weight = self.weighted_sum(sScores, first_block + offset, first_block, num_visible, lane, LANES)
                total = cute.arch.warp_reduction_sum(total)
                weight = cute.arch.warp_reduction_sum(weight)
                if (block == first_block + offset) & (weight > 0):
                    score = total / Float32(weight)
        return score

    @cute.jit
    def weighted_sum(
        self, sScores: cute.Tensor, block: Int32, first_block: Int32, num_visible: Int32, start: Int32, stride: int
    ) -> tuple[Float32, Int32]:
        """Sums of overlap * score and of overlap over the visible entries start, start + stride, ... of the block."""
        spec = self.blocks
        first_entry = self.blocks.first_entry(first_block)
        stop = cutlass.min(((block + 1) * spec.size - 1) // spec.stride + 1, num_visible)
        stop = cutlass.min(stop, first_entry + self.tile_n)  # lanes without a block in this step
        total, weight = Float32(0.0), Int32(0)
        for entry in cutlass.range(self.blocks.first_entry(block) + start, stop, stride):
            begin, end = entry * spec.stride, entry * spec.stride + spec.length
            overlap = cutlass.min(end, (block + 1) * spec.size) - cutlass.max(begin, block * spec.size)
            total += sScores[entry - first_entry] * Float32(overlap)
            weight += overlap
        return total, weight


def num_parts(ctas: int, entries: int, most: int) -> int:
    """Number of parts of the entries, from measurements.

    Args:
        ctas: CTAs per part.
        entries: number of entries that the last row sees.
        most: maximum CTAs over all parts.
    """
    few, many = min(entries // MIN_PART_ENTRIES, FEW_PARTS), min(entries // MIN_LONG_PART_ENTRIES, MAX_PARTS)
    return max(1, min(most // ctas, max(few, many)))


def tile_topk(
    mean_q: Tensor,
    k_cmp: Tensor,
    blocks: Blocks,
    *,
    keys: Keys,
    tile: int,
    tokens: int,
    start: int = 0,
    documents: Documents | None = None,
    parts: int | None = None,
) -> Tensor:
    """Select blocks for each query tile (steps 3 and 4 of docs/semantics.md in tile mode).

    Args:
        mean_q: fp32 `[B,tiles,S,D]`, mean queries of consecutive tiles; S a multiple of H_kv.
        k_cmp: `[B,entries,H_kv,D]`, bf16 or fp16.
        blocks: selection parameters.
        keys: visibility of entries.
        tile, tokens, start: T, N and the token index of the first tile.
        documents: layout of packed tiles and aligned entries, instead of `tokens` and `start`.
        parts: number of parts of the entries, without `documents`; None: chosen by sizes and device (num_parts).

    Returns:
        int32 `[B,S,tiles,blocks.count]`, ascending, padded with -1.
    """
    batch, tiles, heads, dim = mean_q.shape
    packed, kv_heads = documents is not None, k_cmp.shape[2]
    ctas = batch * kv_heads * -(-tiles * (heads // kv_heads) // TILE_M)  # per part
    if packed or ctas * blocks.count == 0:
        parts = 1
    elif parts is None:
        seen = min(tokens, start + tiles * tile) if keys.causal else tokens
        parts = num_parts(ctas, seen // keys.stride, CTAS_PER_SM * multiprocessors(mean_q.device))
    shape = batch, heads, tiles * parts, blocks.count
    lists = torch.empty(shape, dtype=torch.int32, device=mean_q.device)
    if packed:
        lists.fill_(-1)  # stays in unused tiles
    if ctas * blocks.count == 0:
        return lists
    values = mean_q  # one part writes no scores
    if parts > 1:
        values = torch.empty(shape, dtype=torch.float32, device=mean_q.device)
    bounds = None if documents is None else documents.bounds
    run = TileTopK.compile(k_cmp.dtype, dim, blocks, keys, tile, packed).run
    run(mean_q, k_cmp, lists, values, bounds, parts, tokens, start // tile)
    if parts > 1:
        return merge_parts(*(x.unflatten(2, (tiles, parts)) for x in (values, lists)))
    if not packed:
        compile_merge(blocks.count)
    return lists
