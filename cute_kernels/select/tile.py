"""The best blocks of each query tile, in one pass over the compressed keys that keeps every score on chip.

    s[t, j]     = mean of the tile's queries . k_cmp[j]              j visible to the tile's last token
    score[t, b] = sum_j overlap(j, b) s[t, j] / sum_j overlap(j, b)  over those j
    indices[t]  = forced blocks, then the highest scores, the lower index first among equals; ascending

A CTA holds 16 rows (tiles and query heads of one key/value head) and walks over the compressed keys. The mean
queries are fp32; split into three 16-bit parts they keep all 24 bits, so the tensor cores give fp32-accurate logits
of the rounded keys. A step's logits go to shared memory; each warp pools those of its rows to block scores and
merges what beats the row's k-th best into a sorted list (select/topk.py).
softmax_scale > 0 changes no order and is left out.

The same kernel chooses blocks of compressed entries for the compressed branch: there a block's score is the plain
mean over its entries, and blocks holding entries that become visible inside the tile are forced.

Packed documents: a CTA's rows belong to one document i, whose CTAs begin at first_tile[i]*G // 16 + i (at least as many
as it needs, so some have no rows); entries, tiles and blocks count from the document's beginning.

Floor: three products of tiles x entries x D per head, half of them causal: 0.2 TFLOP at 1M tokens, 8 heads of 128,
l = 64: 0.35 ms at 600 TFLOP/s; no tensor larger than the indices is written.

Limits: D a multiple of 16, at most 128; at most 128 entries overlap one block; up to 1024 blocks per tile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.warp import LANES, lowest_bit
from cute_kernels.pool.documents import ENTRY, LENGTH, TILE, Documents, document_at, fake_tables
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.topk import LIMIT, BestBlocks, Blocks

ROWS = 16
WARPS = 4
WARP_ROWS = ROWS // WARPS
PARTS = 3
STAGES = 2


class TopBlocks:
    """Args: what to choose, when a token sees an entry, and T, the tokens of a query tile."""

    def __init__(self, dim: int, dtype: Any, blocks: Blocks, keys: Keys, tile: int) -> None:
        self.dim, self.dtype, self.blocks, self.keys = dim, dtype, blocks, keys
        self.best = BestBlocks(blocks, keys, tile)
        self.entries = 64 if blocks.per_step(64) > 0 else 128
        self.per_step = blocks.per_step(self.entries)

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
        mIndices: cute.Tensor,  # int32 [B, S, tiles, k]
        mBounds: cute.Tensor | None,  # Documents.bounds
        tokens: Int32,  # N; with mBounds not read
        first_tile: Int32,  # number of mQ's first tile
        stream: Any,
    ):
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, (1, WARPS, 1), permutation_mnk=(ROWS, 16 * WARPS, 16))
        group = mQ.shape[2] // mK.shape[2]
        groups_of_rows = cute.ceil_div(mQ.shape[1] * group, ROWS)
        if const_expr(mBounds is not None):
            groups_of_rows = mQ.shape[1] * group // ROWS + mBounds.shape[1] - 1
        self.kernel(
            mQ,
            mK,
            mIndices,
            mBounds,
            tokens,
            first_tile,
            group,
            tiled_mma,
            self._smem_layout(ROWS, PARTS),
            self._smem_layout(self.entries, STAGES),
        ).launch(
            grid=[groups_of_rows, mK.shape[2], mK.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mIndices: cute.Tensor,
        mBounds: cute.Tensor | None,
        tokens: Int32,
        first_tile: Int32,
        group: Int32,
        tiled_mma: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group_of_rows, kv_head, batch = cute.arch.block_idx()
        groups_of_rows, _, _ = cute.arch.grid_dim()
        group_of_rows = groups_of_rows - 1 - group_of_rows  # the longest first
        first_row, num_rows, entries = group_of_rows * ROWS, mQ.shape[1] * group, mK.shape[1]
        if const_expr(mBounds is not None):
            mFirst = mBounds[TILE, None]
            document = document_at(mFirst, group_of_rows, group, ROWS, 1)
            tiles_before = mFirst[document]
            first_row = (group_of_rows - tiles_before * group // ROWS - document) * ROWS
            num_rows = (mFirst[document + 1] - tiles_before) * group
            tokens = mBounds[LENGTH, document]
            entries = self.keys.visible(tokens - 1, entries)
            mQ = cute.domain_offset((0, tiles_before, 0, 0), mQ)
            mK = cute.domain_offset((0, mBounds[ENTRY, document], 0, 0), mK)
            mIndices = cute.domain_offset((0, 0, tiles_before, 0), mIndices)

        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, layout_q, 128)
        sK = smem.allocate_tensor(self.dtype, layout_k, 128)
        sScore = smem.allocate_tensor(Float32, cute.make_layout((ROWS, self.entries), stride=(self.entries + 4, 1)), 16)
        places = const_expr(self.best.places)
        sBest = smem.allocate_tensor(Float32, cute.make_layout((ROWS, places), stride=(places, 1)), 16)
        sIndex = smem.allocate_tensor(Int32, cute.make_layout((ROWS, places), stride=(places, 1)), 16)
        sThreshold = smem.allocate_tensor(Float32, cute.make_layout(ROWS), 16)
        sRow = smem.allocate_tensor(Int32, cute.make_layout((ROWS, 4), stride=(4, 1)), 16)

        self._split_queries(mQ, sQ, batch, kv_head, first_row, num_rows, group)
        if thread < ROWS:
            row = first_row + thread
            tile = first_tile + row // group
            threshold = self.best.begin_row(sRow[thread, None], tile, tokens, entries, mBounds is not None)
            sThreshold[thread] = threshold if row < num_rows else Float32.inf
        cute.arch.sync_threads()

        # The last row sees the most
        last_row = cutlass.min(first_row + ROWS, num_rows) - 1
        steps = Int32(0)
        if const_expr(mBounds is None) or first_row < num_rows:
            steps = cute.ceil_div(self.blocks.scored(sRow[last_row - first_row, LIMIT]), self.per_step)

        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        my_first = warp_index * WARP_ROWS  # rows whose lists this warp keeps
        for i in range_constexpr(WARP_ROWS):
            row = my_first + i
            self.best.begin_list(sBest[row, None], sIndex[row, None], sRow[row, None])

        thr_mma = tiled_mma.get_slice(thread)
        tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ[None, None, 0]))
        tSrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0]))
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_q = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_k = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        tSsQ = copy_q.partition_S(sQ)
        tSsK = copy_k.partition_S(sK)
        tSrQ_copy = copy_q.retile(tSrQ)
        tSrK_copy = copy_k.retile(tSrK)
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((ROWS, self.entries)), Float32)
        tSsScore = thr_mma.partition_C(sScore)

        if steps > 0:
            self._load_keys(mK, sK, entries, batch, kv_head, Int32(0), 0)
        cute.arch.cp_async_commit_group()
        for step in cutlass.range(steps, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            stage = step % STAGES
            if step + 1 < steps:
                self._load_keys(mK, sK, entries, batch, kv_head, step + 1, (step + 1) % STAGES)
            cute.arch.cp_async_commit_group()

            acc.fill(0.0)
            for c in range_constexpr(self.dim // 16):
                cute.copy(copy_k, tSsK[None, None, c, stage], tSrK_copy[None, None, c])
                for part in range_constexpr(PARTS):
                    cute.copy(copy_q, tSsQ[None, None, c, PARTS - 1 - part], tSrQ_copy[None, None, c])
                    cute.gemm(tiled_mma, acc, tSrQ[None, None, c], tSrK[None, None, c], acc)
            cute.autovec_copy(acc, tSsScore)
            cute.arch.sync_threads()

            # Most rows have nothing to insert: find those that may, then do them one by one.
            first_block = step * self.per_step
            pending = Int32(0)
            for i in range_constexpr(WARP_ROWS):
                row = my_first + i
                above = self._above(sScore[row, None], sThreshold[row], sRow[row, LIMIT], first_block)
                if cute.arch.vote_any_sync(above):
                    pending = pending | (1 << i)
            while pending != 0:
                row = my_first + lowest_bit(pending)
                pending = pending & (pending - 1)
                sThreshold[row] = self._insert(
                    sScore[row, None],
                    sBest[row, None],
                    sIndex[row, None],
                    sThreshold[row],
                    sRow[row, None],
                    first_block,
                )

        for i in cutlass.range(WARP_ROWS, unroll=1):
            row = first_row + my_first + i
            if row < num_rows:
                head, tile = kv_head * group + row % group, row // group
                self.best.write_list(sIndex[my_first + i, None], mIndices[batch, head, tile, None])

    # Loading

    @cute.jit
    def _split_queries(
        self,
        mQ: cute.Tensor,
        sQ: cute.Tensor,
        batch: Int32,
        kv_head: Int32,
        first_row: Int32,
        num_rows: Int32,
        group: Int32,
    ):
        """x = high + middle + low: three 16-bit numbers hold the 24 bits of an fp32."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = self.dim // VECTOR
        rX = cute.make_rmem_tensor(VECTOR, Float32)
        for item in cutlass.range(thread, ROWS * vectors, WARPS * LANES):
            row, vector = item // vectors, item % vectors
            rX.fill(0.0)
            if first_row + row < num_rows:
                tile, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
                cute.autovec_copy(cute.local_tile(mQ[batch, tile, head, None], (VECTOR,), (vector,)), rX)
            for part in range_constexpr(PARTS):
                rPart = cute.make_rmem_tensor(VECTOR, self.dtype)
                rPart.store(rX.load().to(self.dtype))
                rX.store(rX.load() - rPart.load().to(Float32))
                cute.autovec_copy(rPart, cute.local_tile(sQ[row, None, part], (VECTOR,), (vector,)))

    @cute.jit
    def _load_keys(
        self,
        mK: cute.Tensor,
        sK: cute.Tensor,
        entries: Int32,
        batch: Int32,
        kv_head: Int32,
        step: Int32,
        stage: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        vectors = self.dim // VECTOR
        first = self.blocks.first_entry(step * self.per_step)
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        for i in range_constexpr(self.entries * vectors // (WARPS * LANES)):
            item = thread + i * WARPS * LANES
            row, vector = item // vectors, item % vectors
            if first + row < entries:
                cute.copy(
                    copy,
                    cute.local_tile(mK[batch, first + row, kv_head, None], (VECTOR,), (vector,)),
                    cute.local_tile(sK[row, None, stage], (VECTOR,), (vector,)),
                )

    # Scores of blocks

    @cute.jit
    def _above(self, sScores: cute.Tensor, threshold: Float32, limit: Int32, first_block: Int32) -> cutlass.Boolean:
        """Whether a block of this lane may enter the list."""
        above = cutlass.Boolean(False)
        for chunk in range_constexpr(-(-self.per_step // LANES)):
            offset = chunk * LANES + cute.arch.lane_idx()
            score = self._block_score(sScores, first_block + offset, first_block, limit)
            above = above | ((score > threshold) & (offset < self.per_step))
        return above

    @cute.jit
    def _insert(
        self,
        sScores: cute.Tensor,  # [entries], of this row
        sBest: cute.Tensor,
        sIndex: cute.Tensor,
        threshold: Float32,
        sRow: cute.Tensor,
        first_block: Int32,
    ) -> Float32:
        """Merge this step's blocks that beat the threshold into the list; return the new threshold."""
        for chunk in range_constexpr(-(-self.per_step // LANES)):
            offset = chunk * LANES + cute.arch.lane_idx()
            block = first_block + offset
            score = self._block_score(sScores, block, first_block, sRow[LIMIT])
            free = self.best.is_free(sRow, block) & (offset < self.per_step)
            candidates = cute.arch.vote_ballot_sync(free & (score > threshold))
            if candidates != 0:
                threshold = self.best.merge(sBest, sIndex, score, block, candidates)
        return threshold

    @cute.jit
    def _block_score(self, sScores: cute.Tensor, block: Int32, first_block: Int32, limit: Int32) -> Float32:
        """Score of `block` in this lane; -inf where no entry counts. Blocks of a step lie in consecutive lanes."""
        score = Float32(-Float32.inf)
        if const_expr(self.blocks.plain):
            if block < limit:
                score = sScores[cutlass.min(block - first_block, self.entries - 1)]
        elif const_expr(self.blocks.overlapping < LANES):
            total, weight = self._weighted_sum(sScores, block, first_block, limit, Int32(0), 1)
            if weight > 0:
                score = total / Float32(weight)
        else:  # long blocks: all lanes add up one block after the other
            lane = cute.arch.lane_idx()
            for offset in range_constexpr(self.per_step):
                total, weight = self._weighted_sum(sScores, first_block + offset, first_block, limit, lane, LANES)
                total = cute.arch.warp_reduction_sum(total)
                weight = cute.arch.warp_reduction_sum(weight)
                if (block == first_block + offset) & (weight > 0):
                    score = total / Float32(weight)
        return score

    @cute.jit
    def _weighted_sum(
        self, sScores: cute.Tensor, block: Int32, first_block: Int32, limit: Int32, start: Int32, every: int
    ) -> tuple[Float32, Int32]:
        """Sums of overlap * score and of overlap over every `every`-th visible entry that overlaps the block."""
        spec = self.blocks
        step_entry = self.blocks.first_entry(first_block)
        stop = cutlass.min(((block + 1) * spec.size - 1) // spec.stride + 1, limit)
        stop = cutlass.min(stop, step_entry + self.entries)  # lanes without a block of this step
        total, weight = Float32(0.0), Int32(0)
        for entry in cutlass.range(self.blocks.first_entry(block) + start, stop, every):
            begin, end = entry * spec.stride, entry * spec.stride + spec.length
            overlap = cutlass.min(end, (block + 1) * spec.size) - cutlass.max(begin, block * spec.size)
            total += sScores[entry - step_entry] * Float32(overlap)
            weight += overlap
        return total, weight


@compiled_once
def _compiled(dtype: torch.dtype, dim: int, blocks: Blocks, keys: Keys, tile: int, packed: bool) -> Kernel:
    return compile_kernel(
        TopBlocks(dim, CUTE_DTYPES[dtype], blocks, keys, tile),
        fake(torch.float32, None, None, None, dim),
        fake(dtype, None, None, None, dim),
        fake(torch.int32, None, None, None, blocks.count, aligned=False),
        fake_tables()[0] if packed else None,
        Int32(0),
        Int32(0),
    )


def top_blocks(
    mean_q: Tensor,
    k_cmp: Tensor,
    blocks: Blocks,
    *,
    keys: Keys,
    tile: int,
    tokens: int,
    start: int = 0,
    documents: Documents | None = None,
) -> Tensor:
    """Choose blocks for each query tile.

    Args:
        mean_q: fp32 `[B,tiles,S,D]`, mean queries of consecutive tiles; S a multiple of H_kv.
        k_cmp: `[B,entries,H_kv,D]`, bf16 or fp16.
        keys: when a token sees an entry.
        tile, tokens, start: T, N and the first token of the first tile.
        documents: what the tiles and (aligned) entries of a pack are, instead of `tokens` and `start`.

    Returns:
        int32 `[B,S,tiles,blocks.count]`, ascending, padded with -1.
    """
    batch, tiles, heads, dim = mean_q.shape
    shape = (batch, heads, tiles, blocks.count)
    if documents is None:
        indices = torch.empty(shape, dtype=torch.int32, device=mean_q.device)
        bounds = None
    else:
        indices = torch.full(shape, -1, dtype=torch.int32, device=mean_q.device)  # unused tiles
        bounds = documents.bounds
    if indices.numel() > 0:
        run = _compiled(k_cmp.dtype, dim, blocks, keys, tile, documents is not None).run
        run(mean_q, k_cmp, indices, bounds, tokens, start // tile)
    return indices
