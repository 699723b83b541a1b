"""Top-k block selection per token, shared by the heads of a group, in one pass over the compressed keys.

    P[h, i, j]  = exp(scale q_h[i] . k_cmp[j] - lse_cmp[h, i])        entry j visible to token i: j d + l - 1 <= i
    score[i, b] = sum_j overlap(j, b) / l  sum_h P[h, i, j]           h over the G heads of a key/value head
    indices[i]  = forced blocks, then the highest scores, ties to the lower block; k in all, ascending

(equations 8 to 12 of arXiv 2502.11089, eq. 9 read as overlap in tokens). Scores and probabilities stay on chip.

Work tiles: a work tile is `Tiling.tokens` consecutive tokens with the G query heads of one key/value head. Its mainloop
iterates over the compressed keys, KEY_TILE per step; in a step, its tokens are processed in subtiles of 8 or 16. CTAs
are persistent: each processes one work tile after another.

Warps: half of them multiply (MMA warps), half load and select (select warps).
- The MMA warps compute S^T = K Q^T. Keys are operand A: a warp keeps those of a step in registers while the queries of
  all heads and subtiles stream through as operand B. Probabilities are summed over the heads in registers, in the order
  of the heads. Only the sums go to shared memory, with 0 for masked entries, so that not even a NaN of theirs reaches a
  score.
- The select warps pool the sums of a subtile to block scores and merge those that beat a token's k-th best into its
  list (select/topk.py) while the MMA warps compute the next subtile. They also load, with cp.async.

MMA: WGMMA on Hopper, mma.sync elsewhere.

Packed documents: entries and blocks count from a document's start. Rows after its end select nothing.

Near ties: scores are fp32 sums in a fixed order, bitwise reproducible. Their relative error is at most

    2^-23 ((D/8 + 4) A + 4 |lse| + G + 8),      A and |lse| the largest scale |q| |k_cmp| and |lse| of the token's heads

(products summed in D/16 steps, base-2 units, exponential, sums over heads and entries), so selected blocks can differ
from the exact ones only if scores differ by less than twice that.

Floor: 2 D FLOPs and one exponential per visible (query, entry). 64K tokens, 64 heads of 128, d = 16: 2.2 TFLOP, 2.7 ms
at 800 TFLOP/s (WGMMA; 3.7 ms with mma.sync at 600), and concurrently 8.6e9 exponentials, 2.3 ms at 16 per cycle and
SM. Every work tile reads its keys again, from L2: 4.3 GB there with 32 tokens. Only the indices are written. With few
heads per group selection costs as much as the products: two thirds of all instructions with 4 heads.

Limits: D 64 or 128; G at most MAX_GROUP; d divides l and l'; l'/d + l/d - 1 <= KEY_TILE; causal; k as shared memory
allows.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers
from torch import Tensor

from cute_kernels.limits import MAX_TOKEN_GROUP
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.mma_sync import smem_tiles
from cute_kernels.mma.warp import LANES, LOG2_E
from cute_kernels.mma.wgmma import WARPGROUP_THREADS, allocate_tiles, issue_mma, swizzled_tiles
from cute_kernels.pool.documents import DOCUMENT, ENTRY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.runtime.device import has_warpgroups, multiprocessors, vectorizable
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_stats
from cute_kernels.select.token_tiling import KEY_TILE, MMA_WARPS, choose_tiling, score_layout
from cute_kernels.select.topk import NUM_VISIBLE, Blocks, TopKList

SELECT_WARPS = 8
MMA_THREADS = MMA_WARPS * LANES
SELECT_THREADS = SELECT_WARPS * LANES
THREADS = MMA_THREADS + SELECT_THREADS
MMA_WARPGROUPS = MMA_THREADS // WARPGROUP_THREADS
MMA_REGISTERS, SELECT_REGISTERS = 200, 56
"""Registers per thread, after setmaxregister."""

WGMMA_M = 64
"""Entries that a warpgroup multiplies with one instruction."""

MAX_WGMMA_N = 64
"""Maximum number of queries that it multiplies them with."""

MAX_GROUP = MAX_TOKEN_GROUP
DIMS = (64, 128)


class NamedBarrier(enum.IntEnum):
    """Hardware barriers, between MMA warps and select warps; 0 is reserved for sync_threads.

    Barriers that MMA warps wait for exist once per MMA warpgroup (+ warpgroup): warpgroups do not wait for each other.
    """

    # Select warps wait, once a step: the keys are in registers, sK may be overwritten
    KeysEmpty = 1
    # Select warps wait, once a subtile of a step: sScore has the subtile's scores, its queries have been read
    ScoresFull = 2
    # MMA warps wait, once a step: sK has the step's keys, sQ the first subtile's queries
    KeysFull = 3
    # MMA warps wait, once a subtile of a step: sScore has been pooled, sRow of the subtile is written
    ScoresEmpty = 5
    # MMA warps wait, once a step: sQ has all subtiles' queries (not used with one subtile)
    QueriesFull = 7


def overlap_weights(blocks: Blocks) -> list[float]:
    """overlap / l of the entries that overlap a block, in order; the same for every block."""
    length, stride, size = blocks.length, blocks.stride, blocks.size
    starts = range(stride - length, size, stride)
    return [(min(start + length, size) - max(start, 0)) / length for start in starts]


class Problem(NamedTuple):
    """Arguments of the kernel that determine the coordinates of work tiles."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mBounds: cute.Tensor | None
    mTiles: cute.Tensor | None
    num_tokens: Int32
    """Number of tokens of the sequence; not read with documents."""
    first_token: Int32
    """Token index of mQ's first row; not read with documents."""
    document_tile: Int32
    """T of the documents."""


class WorkTile(NamedTuple):
    """Consecutive tokens of a sequence or document, with the query heads of one key/value head."""

    batch: Int32
    kv_head: Int32
    first_row: Int32
    """Index in mQ."""
    first_token: Int32
    """Index of that row in its sequence or document."""
    num_rows: Int32
    """Number of rows that are tokens; not positive if there are none."""
    num_tokens: Int32
    """Number of tokens of the sequence or document."""
    num_entries: Int32
    """Number of its compressed entries."""
    first_entry: Int32
    """Index of its first entry in mK."""
    num_steps: Int32
    """Number of mainloop steps, at least one."""


class TokenTopK:
    """Persistent kernel: scores, pooling and top-k selection.

    Args:
        dim: D.
        dtype: dtype of queries and keys.
        group: G.
        blocks: selection parameters.
        keys: visibility of entries.
        use_wgmma: multiply with WGMMA (sm_90a only) instead of mma.sync.
    """

    def __init__(self, dim: int, dtype: Any, group: int, blocks: Blocks, keys: Keys, use_wgmma: bool = False) -> None:
        self.dim, self.dtype, self.group, self.blocks, self.keys = dim, dtype, group, blocks, keys
        self.use_wgmma = use_wgmma
        tiling = choose_tiling(dim, group, blocks.count, blocks.size // blocks.stride)
        if tiling is None:
            raise ValueError(f"no tiling for D={dim}, G={group}, {blocks}")
        self.tiling = tiling
        self.topk = TopKList(blocks, keys, tile=1)
        self.weights = overlap_weights(blocks)
        self.ratio = blocks.size // blocks.stride
        self.entries_before = len(self.weights) - self.ratio  # entries that overlap a block but start before it
        self.blocks_per_step = blocks.per_step(KEY_TILE)
        self.score_chunks = -(-self.blocks_per_step // LANES)
        self.heads_per_mma = 1
        if use_wgmma:
            fits = (h for h in range(1, group + 1) if group % h == 0 and h * tiling.subtile <= MAX_WGMMA_N)
            self.heads_per_mma = max(fits)
        self.mma_n = self.heads_per_mma * tiling.subtile

    @staticmethod
    @compiled_once
    def compile(dtype: torch.dtype, dim: int, group: int, blocks: Blocks, packed: bool, use_wgmma: bool) -> Kernel:
        bounds, tiles = fake_tables() if packed else (None, None)
        return compile_kernel(
            TokenTopK(dim, CUTE_DTYPES[dtype], group, blocks, Keys(blocks.length, blocks.stride), use_wgmma),
            fake(dtype, None, None, None, dim),
            fake(dtype, None, None, None, dim),
            *fake_stats(1),
            fake(torch.int32, None, None, None, blocks.count, aligned=False),
            bounds,
            tiles,
            Float32(0.0),
            *[Int32(0)] * 4,
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mK: cute.Tensor,  # [B, entries, H_kv, D]
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mIndices: cute.Tensor,  # int32 [B, H_kv, N, k]
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        scale: Float32,  # softmax_scale * log2(e)
        num_tokens: Int32,  # tokens of the sequence; not read with mBounds
        first_token: Int32,  # token index of mQ's first row
        document_tile: Int32,  # T of the documents
        max_ctas: Int32,  # CTAs that run at the same time
        stream: Any,
    ):
        entry_warps, token_warps = self.tiling.entry_warps, self.tiling.token_warps
        if const_expr(self.use_wgmma):
            tiled_mma = hopper_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (MMA_WARPGROUPS, 1, 1),
                (WGMMA_M, self.mma_n),
                warpgroup.OperandSource.RMEM,
            )
        else:
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            tiled_mma = cute.make_tiled_mma(
                op, (entry_warps, token_warps, 1), permutation_mnk=(16 * entry_warps, 8 * token_warps, 32)
            )
        self.kernel(
            mQ,
            mK,
            mLse,
            mIndices,
            mBounds,
            mTiles,
            scale,
            num_tokens,
            first_token,
            document_tile,
            tiled_mma,
        ).launch(
            grid=[cutlass.min(self.num_work_tiles(mQ, mK), max_ctas), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mLse: cute.Tensor,
        mIndices: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        scale: Float32,
        num_tokens: Int32,
        first_token: Int32,
        document_tile: Int32,
        tiled_mma: cute.TiledMma,
    ):
        smem = SmemAllocator()
        rows, slots = const_expr(self.tiling.tokens), const_expr(self.topk.num_slots)
        num_query_tiles = const_expr(rows * self.group // self.mma_n)
        # sQ: [heads per MMA * tokens of a subtile, D, (subtile, MMA)]
        if const_expr(self.use_wgmma):
            tiles = swizzled_tiles(self.dtype, self.dim, num_query_tiles, self.mma_n)
            sQ = allocate_tiles(smem, self.dtype, tiles)
        else:
            sQ = smem.allocate_tensor(self.dtype, smem_tiles(self.mma_n, self.dim, num_query_tiles), 1024)
        key_tile = cute.select(smem_tiles(KEY_TILE, self.dim, 1), mode=[0, 1])
        sK = smem.allocate_tensor(self.dtype, key_tile, 128)  # [KEY_TILE, D]
        columns, stride = score_layout(self.ratio)
        scores = cute.make_layout((self.tiling.subtile, self.ratio, columns), stride=(stride, columns, 1))
        sScore = smem.allocate_tensor(Float32, scores, 16)  # [tokens of a subtile, l'/d, blocks]
        # [tokens of the work tile, G]: -lse in base 2
        sLse = smem.allocate_tensor(Float32, cute.make_layout((rows, self.group), stride=(1, rows)), 16)
        # Lists of the tokens: [tokens, slots] each
        sValues = smem.allocate_tensor(Float32, cute.make_layout((rows, slots), stride=(slots, 1)), 16)
        sIndices = smem.allocate_tensor(Int32, cute.make_layout((rows, slots), stride=(slots, 1)), 16)
        # [tokens, 4], see select/topk.py
        sRow = smem.allocate_tensor(Int32, cute.make_layout((rows, 4), stride=(4, 1)), 16)

        problem = Problem(mQ, mK, mBounds, mTiles, num_tokens, first_token, document_tile)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < MMA_WARPS:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            if const_expr(self.use_wgmma):
                self.mma_wgmma(tiled_mma, sQ, sK, sLse, sScore, sRow, scale, problem)
            else:
                self.mma_sync(tiled_mma, sQ, sK, sLse, sScore, sRow, scale, problem)
        else:
            cute.arch.setmaxregister_decrease(SELECT_REGISTERS)
            self.load_and_select(mLse, mIndices, sQ, sK, sLse, sScore, sValues, sIndices, sRow, problem)

    # ---------------------------------------------------------------- work tiles

    def num_work_tiles(self, mQ: cute.Tensor, mK: cute.Tensor) -> Int32:
        return cute.ceil_div(mQ.shape[1], self.tiling.tokens) * mK.shape[2] * mK.shape[0]

    @cute.jit
    def tile_idx(self, work_idx: Int32) -> Int32:
        """Index of the CTA's `work_idx`-th work tile, counted from the last work tile back.

        Later tokens see more entries, so the longest work tiles come first. The order of the CTAs alternates, so that
        none of them always gets the longer tile.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return work_idx * ctas + (cta if work_idx % 2 == 0 else ctas - 1 - cta)

    @cute.jit
    def get_work_tile(self, work_idx: Int32, problem: Problem) -> WorkTile:
        mQ, mK, mBounds, mTiles, num_tokens, first_token, document_tile = problem
        tile_idx = self.num_work_tiles(mQ, mK) - 1 - self.tile_idx(work_idx)
        kv_heads, num_entries, first_entry = mK.shape[2], mK.shape[1], Int32(0)
        kv_head, batch = tile_idx % kv_heads, tile_idx // kv_heads % mK.shape[0]
        first_row = tile_idx // kv_heads // mK.shape[0] * self.tiling.tokens
        first_token += first_row
        num_rows = cutlass.min(mQ.shape[1] - first_row, self.tiling.tokens)
        if const_expr(mTiles is not None):
            # Rows are aligned (pool/documents.py) and T is a multiple of Tiling.tokens: they are of one document
            document = cutlass.max(mTiles[DOCUMENT, first_row // document_tile], 0)  # -1: after all documents
            first_token = first_row - mBounds[ROW, document]
            num_tokens, first_entry = mBounds[LENGTH, document], mBounds[ENTRY, document]
            num_entries = self.keys.visible(num_tokens - 1, num_entries)
        num_rows = cutlass.min(num_rows, num_tokens - first_token)
        num_visible = self.keys.visible(first_token + num_rows - 1, num_entries)  # last token: sees the most
        num_steps = cutlass.max(cute.ceil_div(self.blocks.scored(num_visible), self.blocks_per_step), 1)
        return WorkTile(
            batch, kv_head, first_row, first_token, num_rows, num_tokens, num_entries, first_entry, num_steps
        )

    @cute.jit
    def next_work_idx(self, work_idx: Int32, problem: Problem) -> Int32:
        """First work index of the CTA, from `work_idx` on, whose tile has tokens; -1 if there is none."""
        num_work_tiles = self.num_work_tiles(problem.mQ, problem.mK)
        if const_expr(problem.mTiles is not None):
            searching = self.tile_idx(work_idx) < num_work_tiles
            while searching:
                searching = self.get_work_tile(work_idx, problem).num_rows <= 0
                if searching:
                    work_idx += 1
                    searching = self.tile_idx(work_idx) < num_work_tiles
        return work_idx if self.tile_idx(work_idx) < num_work_tiles else Int32(-1)

    # ---------------------------------------------------------------- select warps

    @cute.jit
    def load_and_select(
        self,
        mLse: cute.Tensor,
        mIndices: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sValues: cute.Tensor,
        sIndices: cute.Tensor,
        sRow: cute.Tensor,
        problem: Problem,
    ):
        """Process all work tiles of the CTA in the select warps. Each warp selects for every eighth token."""
        mQ, mK, mBounds = problem[:3]
        select_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - MMA_WARPS
        num_subtiles = const_expr(self.tiling.num_subtiles)
        rows_per_warp = const_expr(self.tiling.subtile // SELECT_WARPS)
        # (chunk) of each row
        rScore = [cute.make_rmem_tensor(self.score_chunks, Float32) for _ in range(rows_per_warp)]

        # Prologue: load and start the first work tile
        work_idx = self.next_work_idx(Int32(0), problem)
        work_tile = self.get_work_tile(cutlass.max(work_idx, 0), problem)
        if work_idx >= 0:
            self.load_keys(mK, sK, Int32(0), work_tile)
            for subtile in cutlass.range(num_subtiles, unroll=1):
                self.load_queries(mQ, mLse, sQ, sLse, subtile, work_tile)
                self.init_rows(sValues, sIndices, sRow, subtile, mBounds, work_tile)
            cute.arch.cp_async_commit_group()
            self.release_step()
            self.release(NamedBarrier.ScoresEmpty)

        while work_idx >= 0:
            next_idx = self.next_work_idx(work_idx + 1, problem)
            next_tile = self.get_work_tile(cutlass.max(next_idx, 0), problem)
            for step in cutlass.range(work_tile.num_steps, unroll=1):
                last_step = step + 1 == work_tile.num_steps
                load_next_tile = last_step & (next_idx >= 0)
                first_block = step * self.blocks_per_step

                # Load the keys of the next step, or the first ones of the next work tile
                cute.arch.barrier(barrier_id=NamedBarrier.KeysEmpty, number_of_threads=THREADS)
                if load_next_tile:
                    self.load_keys(mK, sK, Int32(0), next_tile)
                elif not last_step:
                    self.load_keys(mK, sK, step + 1, work_tile)
                cute.arch.cp_async_commit_group()

                for subtile in cutlass.range(num_subtiles, unroll=1):
                    # Pool the scores of entries to scores of blocks, in registers
                    cute.arch.barrier(barrier_id=NamedBarrier.ScoresFull, number_of_threads=THREADS)
                    for i in range_constexpr(rows_per_warp):
                        self.pool(sScore[i * SELECT_WARPS + select_warp, None, None], rScore[i])

                    # Load the next work tile's queries over this subtile's, which are no longer read
                    if load_next_tile:
                        self.load_queries(mQ, mLse, sQ, sLse, subtile, next_tile)
                        cute.arch.cp_async_commit_group()

                    # Release as much as possible before merging, which can take long. sRow masks the next scores; if
                    # they belong to the next work tile and there is one subtile, it is written only below
                    release_scores = (not last_step) | (subtile + 1 < num_subtiles)
                    if const_expr(num_subtiles > 1):
                        release_scores = release_scores | load_next_tile
                    if release_scores:
                        self.release(NamedBarrier.ScoresEmpty)
                    if (subtile == 0) & (not last_step):
                        self.release_step()

                    # Merge into the lists
                    for i in range_constexpr(rows_per_warp):
                        row = subtile * self.tiling.subtile + i * SELECT_WARPS + select_warp
                        if row < work_tile.num_rows:
                            self.merge(rScore[i], sValues[row, None], sIndices[row, None], sRow[row, None], first_block)

                    # Release the next work tile's first step, whose loads completed during the merge
                    if load_next_tile:
                        if subtile == 0:
                            self.wait_for_loads()
                            self.release(NamedBarrier.KeysFull)
                        if const_expr(num_subtiles > 1):
                            if subtile + 1 == num_subtiles:
                                self.wait_for_loads()
                                self.release(NamedBarrier.QueriesFull)

                    # Epilogue: store the indices, start the next work tile's lists
                    if last_step:
                        gIndices = mIndices[work_tile.batch, work_tile.kv_head, None, None]  # [N, k]
                        self.store_indices(sIndices, gIndices, subtile, work_tile)
                    if load_next_tile:
                        self.init_rows(sValues, sIndices, sRow, subtile, mBounds, next_tile)
                        if const_expr(num_subtiles == 1):
                            self.release(NamedBarrier.ScoresEmpty)
            work_idx, work_tile = next_idx, next_tile

    @cute.jit
    def release(self, barrier: cutlass.Constexpr[int]):
        """Arrive at the barrier of each MMA warpgroup; called by the select warps."""
        for i in range_constexpr(MMA_WARPGROUPS):
            cute.arch.barrier_arrive(barrier_id=barrier + i, number_of_threads=SELECT_THREADS + WARPGROUP_THREADS)

    @cute.jit
    def release_step(self):
        """Wait for the loads, then release the keys and the queries of all subtiles."""
        self.wait_for_loads()
        self.release(NamedBarrier.KeysFull)
        if const_expr(self.tiling.num_subtiles > 1):
            self.release(NamedBarrier.QueriesFull)

    # Select warps: loads

    @cute.jit
    def load_queries(
        self,
        mQ: cute.Tensor,
        mLse: cute.Tensor,
        sQ: cute.Tensor,
        sLse: cute.Tensor,
        subtile: Int32,
        work_tile: WorkTile,
    ):
        """Load the queries of one subtile, and -lse in base 2."""
        thread, _, _ = cute.arch.thread_idx()
        thread -= MMA_THREADS
        vectors, rows = const_expr(self.dim // VECTOR), const_expr(self.tiling.subtile)
        heads_at_once = const_expr(SELECT_THREADS // vectors // rows)
        vector, row_and_head = thread % vectors, thread // vectors
        token = row_and_head % rows
        row = subtile * rows + token
        if row < work_tile.num_rows:
            gQ = cute.domain_offset((0, 0, work_tile.kv_head * self.group, 0), mQ)
            gQ = gQ[work_tile.batch, work_tile.first_row + row, None, None]  # [H - first head, D]
            for i in range_constexpr(-(-self.group // heads_at_once)):
                # With one head at a time `head` is a Python int, so that addresses differ by constants
                head = i if const_expr(heads_at_once == 1) else i * heads_at_once + row_and_head // rows
                if head < self.group:
                    # sQ from the head's product and its rows there on: [tokens of a subtile ..., D, (subtile, MMA)]
                    sHead = cute.domain_offset((head % self.heads_per_mma * rows, 0, head // self.heads_per_mma), sQ)
                    self.copy_vector(
                        gQ[head, None], sHead[token, None, subtile * (self.group // self.heads_per_mma)], vector
                    )
        for i in cutlass.range(thread, rows * self.group, SELECT_THREADS):
            row, head = subtile * rows + i % rows, i // rows
            sLse[row, head] = Float32(0.0)
            if row < work_tile.num_rows:
                lse = mLse[work_tile.batch, work_tile.kv_head * self.group + head, work_tile.first_row + row]
                sLse[row, head] = -LOG2_E * lse

    @cute.jit
    def load_keys(self, mK: cute.Tensor, sK: cute.Tensor, step: Int32, work_tile: WorkTile):
        """Load the keys of one step. Rows without an entry get the nearest entry; their scores are masked."""
        thread, _, _ = cute.arch.thread_idx()
        thread -= MMA_THREADS
        vectors = const_expr(self.dim // VECTOR)
        rows_at_once = const_expr(SELECT_THREADS // vectors)
        vector, first_row = thread % vectors, thread // vectors
        num_entries = work_tile.num_entries
        first = step * self.blocks_per_step * self.ratio - self.entries_before
        # [entries, D]
        gK = cute.domain_offset((0, work_tile.first_entry, 0, 0), mK)[work_tile.batch, None, work_tile.kv_head, None]
        if (first >= 0) & (first + KEY_TILE <= num_entries):
            gStep = cute.domain_offset((first + first_row, 0), gK)  # [entries - first, D]
            for row in range_constexpr(0, KEY_TILE, rows_at_once):
                self.copy_vector(gStep[row, None], cute.domain_offset((row, 0), sK)[first_row, None], vector)
        elif num_entries > 0:
            for row in range_constexpr(0, KEY_TILE, rows_at_once):
                entry = cutlass.min(cutlass.max(first + first_row + row, 0), num_entries - 1)
                self.copy_vector(gK[entry, None], cute.domain_offset((row, 0), sK)[first_row, None], vector)

    @cute.jit
    def copy_vector(self, gRow: cute.Tensor, sRow: cute.Tensor, vector: Int32):
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(copy, *(cute.local_tile(row, (VECTOR,), (vector,)) for row in (gRow, sRow)))

    @cute.jit
    def wait_for_loads(self):
        """Wait until all loads of this thread have arrived, and make them visible to WGMMA."""
        cute.arch.cp_async_wait_group(0)
        if const_expr(self.use_wgmma):
            cute.arch.fence_view_async_shared()

    # Select warps: lists

    @cute.jit
    def init_rows(
        self,
        sValues: cute.Tensor,
        sIndices: cute.Tensor,
        sRow: cute.Tensor,
        subtile: Int32,
        mBounds: cute.Tensor | None,
        work_tile: WorkTile,
    ):
        """Write the visible range of this warp's tokens of a subtile, and start their lists with the forced blocks."""
        num_tokens, num_entries = work_tile.num_tokens, work_tile.num_entries
        select_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - MMA_WARPS
        cute.arch.sync_warp()
        for i in range_constexpr(self.tiling.subtile // SELECT_WARPS):
            row = subtile * self.tiling.subtile + i * SELECT_WARPS + select_warp
            if cute.arch.lane_idx() == 0:
                token = work_tile.first_token + row
                self.topk.init_row(sRow[row, None], token, num_tokens, num_entries, mBounds is not None)
            cute.arch.sync_warp()
            self.topk.init_list(sValues[row, None], sIndices[row, None], sRow[row, None])

    @cute.jit
    def pool(self, sScore: cute.Tensor, rScore: cute.Tensor):
        """Pool one token's scores of entries to scores of blocks, LANES blocks at a time."""
        for chunk in range_constexpr(self.score_chunks):
            column = cutlass.min(chunk * LANES + cute.arch.lane_idx(), self.blocks_per_step - 1)
            score = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                entry_score = sScore[i % self.ratio, column + i // self.ratio]
                score = cute.math.fma(entry_score, Float32(self.weights[i]), score)
            rScore[chunk] = score

    @cute.jit
    def merge(
        self, rScore: cute.Tensor, sValues: cute.Tensor, sIndices: cute.Tensor, sRow: cute.Tensor, first_block: Int32
    ):
        """Merge one token's block scores of a step into its list."""
        threshold = sValues[self.blocks.count - 1]
        for chunk in range_constexpr(self.score_chunks):
            offset = chunk * LANES + cute.arch.lane_idx()
            score, block = rScore[chunk], first_block + offset
            is_scored = (self.blocks.first_entry(block) < sRow[NUM_VISIBLE]) & (offset < self.blocks_per_step)
            not_forced = self.topk.not_forced(sRow, block)
            candidates = cute.arch.vote_ballot_sync(is_scored & not_forced & (score > threshold))
            if candidates != 0:
                threshold = self.topk.merge(sValues, sIndices, score, block, candidates)

    @cute.jit
    def store_indices(self, sIndices: cute.Tensor, gIndices: cute.Tensor, subtile: Int32, work_tile: WorkTile):
        """Write the selected blocks of this warp's tokens of a subtile."""
        select_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - MMA_WARPS
        for i in range_constexpr(self.tiling.subtile // SELECT_WARPS):
            row = subtile * self.tiling.subtile + i * SELECT_WARPS + select_warp
            if row < work_tile.num_rows:
                self.topk.store_indices(sIndices[row, None], gIndices[work_tile.first_row + row, None])

    # ---------------------------------------------------------------- MMA warps

    @cute.jit
    def mma_sync(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sRow: cute.Tensor,
        scale: Float32,
        problem: Problem,
    ):
        """All work tiles of the CTA, with mma.sync.

        A warp multiplies for the next head, including that of the next subtile, before it sums the current head's
        probabilities.
        """
        thread, _, _ = cute.arch.thread_idx()
        num_subtiles = const_expr(self.tiling.num_subtiles)
        thr_mma = tiled_mma.get_slice(thread)
        tSrK = thr_mma.make_fragment_A(thr_mma.partition_shape_A((KEY_TILE, self.dim)))  # [KEY_TILE, D]
        # one head: [subtile, D]
        tSrQ = thr_mma.make_fragment_B(thr_mma.partition_shape_B((self.tiling.subtile, self.dim)))
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_q = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        tSsK, tSrK_copy = copy_k.partition_S(sK), copy_k.retile(tSrK)
        operands = (tiled_mma, copy_q, copy_q.partition_S(sQ), copy_q.retile(tSrQ), tSrQ, tSrK)
        acc_shape = thr_mma.partition_shape_C((KEY_TILE, self.tiling.subtile))
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((KEY_TILE, self.tiling.subtile)))
        # fp32 [KEY_TILE, subtile]
        acc, next_acc, total = (cute.make_rmem_tensor(acc_shape, Float32) for _ in range(3))

        work_idx = self.next_work_idx(Int32(0), problem)
        while work_idx >= 0:
            num_steps = self.get_work_tile(work_idx, problem).num_steps
            for step in cutlass.range(num_steps, unroll=1):
                # Keys to registers: operand A  [KEY_TILE, D]
                self.acquire(NamedBarrier.KeysFull)
                cute.copy(copy_k, tSsK, tSrK_copy)
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.KeysEmpty, number_of_threads=THREADS)

                self.mma_head(*operands, Int32(0), acc)
                for subtile in cutlass.range(num_subtiles, unroll=1):
                    # MMA [KEY_TILE, subtile] and softmax of pairs of heads, so that `acc` and `next_acc` swap roles
                    first_head = subtile * self.group
                    head_lse = cute.domain_offset((subtile * self.tiling.subtile, 0), sLse)  # [tokens - first, G]
                    total.fill(0.0)
                    for pair in cutlass.range((self.group - 1) // 2, unroll=1):
                        self.mma_head(*operands, first_head + 2 * pair + 1, next_acc)
                        self.softmax(acc, total, self.load_lse(coordinates, head_lse[None, 2 * pair]), scale)
                        self.mma_head(*operands, first_head + 2 * pair + 2, acc)
                        self.softmax(next_acc, total, self.load_lse(coordinates, head_lse[None, 2 * pair + 1]), scale)
                    if const_expr(self.group % 2 == 0):
                        self.mma_head(*operands, first_head + self.group - 1, next_acc)
                        self.softmax(acc, total, self.load_lse(coordinates, head_lse[None, self.group - 2]), scale)
                    else:
                        for i in range_constexpr(cute.size(acc)):
                            next_acc[i] = acc[i]

                    # Last head, after the next subtile's first product is issued
                    if subtile + 1 < num_subtiles:
                        if const_expr(num_subtiles > 1):
                            if subtile == 0:
                                self.acquire(NamedBarrier.QueriesFull)
                        self.mma_head(*operands, first_head + self.group, acc)
                    self.softmax(next_acc, total, self.load_lse(coordinates, head_lse[None, self.group - 1]), scale)

                    # Epilogue
                    self.store_scores((total,), sScore, (coordinates,), sRow, step, subtile)
            work_idx = self.next_work_idx(work_idx + 1, problem)

    @cute.jit
    def mma_wgmma(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sRow: cute.Tensor,
        scale: Float32,
        problem: Problem,
    ):
        """All work tiles of the CTA, with WGMMA: 64 entries x up to 64 queries, 16 tokens of several heads.

        A warpgroup has two products in flight, and sums one half of its keys while the other half is multiplied.
        """
        thread, _, _ = cute.arch.thread_idx()
        num_subtiles = const_expr(self.tiling.num_subtiles)
        mmas_per_subtile = const_expr(self.group // self.heads_per_mma)
        thr_mma = tiled_mma.get_slice(thread)
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        tSsK = copy_k.partition_S(sK)
        half_tile = MMA_WARPGROUPS * WGMMA_M
        halves = range(KEY_TILE // half_tile)
        # [half_tile, D] of each half
        tSrK = [thr_mma.make_fragment_A(thr_mma.partition_shape_A((half_tile, self.dim))) for _ in halves]
        tSrQ = thr_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sQ))  # [mma_n, D, (subtile, MMA)]
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((KEY_TILE, self.mma_n)))
        # fp32 [half_tile, mma_n] of each half
        acc = [cute.make_rmem_tensor(thr_mma.partition_shape_C((half_tile, self.mma_n)), Float32) for _ in halves]
        # fp32 [half_tile, subtile] of each half: sums over the heads
        total = [cute.make_rmem_tensor(cute.size(acc[half]) // self.heads_per_mma, Float32) for half in halves]
        first_head = cute.make_layout(cute.size(total[0]))
        coordinates = [cute.composition(coordinates[None, half, 0], first_head) for half in halves]

        work_idx = self.next_work_idx(Int32(0), problem)
        while work_idx >= 0:
            num_steps = self.get_work_tile(work_idx, problem).num_steps
            for step in cutlass.range(num_steps, unroll=1):
                # Keys to registers
                self.acquire(NamedBarrier.KeysFull)
                for half in range_constexpr(2):
                    cute.copy(copy_k, tSsK[None, half, None], copy_k.retile(tSrK[half])[None, 0, None])
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.KeysEmpty, number_of_threads=THREADS)

                issue_mma(tiled_mma, acc[0], tSrK[0], tSrQ[None, None, None, 0], False)
                for subtile in range_constexpr(num_subtiles):
                    # MMA and softmax, alternating between the halves of the keys
                    for half in range_constexpr(2):
                        total[half].fill(0.0)
                    for i in range_constexpr(mmas_per_subtile):
                        # [tokens - first, G - first head]
                        mma_lse = cute.domain_offset((subtile * self.tiling.subtile, i * self.heads_per_mma), sLse)
                        at = subtile * mmas_per_subtile + i
                        issue_mma(tiled_mma, acc[1], tSrK[1], tSrQ[None, None, None, at], False)
                        lse = [self.load_lse(coordinates[0], mma_lse[None, head]) for head in range(self.heads_per_mma)]
                        warpgroup.wait_group(1)
                        self.softmax_heads(acc[0], total[0], lse, scale)
                        if const_expr(at + 1 < num_subtiles * mmas_per_subtile):
                            if const_expr(at + 1 == mmas_per_subtile):
                                self.acquire(NamedBarrier.QueriesFull)
                            issue_mma(tiled_mma, acc[0], tSrK[0], tSrQ[None, None, None, at + 1], False)
                            warpgroup.wait_group(1)
                        else:
                            warpgroup.wait_group(0)
                        self.softmax_heads(acc[1], total[1], lse, scale)

                    # Epilogue
                    self.store_scores((*total,), sScore, (*coordinates,), sRow, step, Int32(subtile))
            work_idx = self.next_work_idx(work_idx + 1, problem)

    @cute.jit
    def acquire(self, barrier: cutlass.Constexpr[int]):
        """Wait at this warpgroup's barrier; called by the MMA warps."""
        warpgroup_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        cute.arch.barrier(barrier_id=barrier + warpgroup_idx, number_of_threads=SELECT_THREADS + WARPGROUP_THREADS)

    @cute.jit
    def mma_head(
        self,
        tiled_mma: cute.TiledMma,
        copy_q: Any,
        tSsQ: cute.Tensor,
        tSrQ_copy: cute.Tensor,
        tSrQ: cute.Tensor,
        tSrK: cute.Tensor,
        head: Int32,
        acc: cute.Tensor,
    ):
        """acc = K Q^T for one head of one subtile, `head` counted over all subtiles."""
        acc.fill(0.0)
        cute.copy(copy_q, tSsQ[None, 0, None, head], tSrQ_copy[None, 0, None])
        for c in range_constexpr(self.dim // 16):
            cute.gemm(tiled_mma, acc, tSrK[None, None, c], tSrQ[None, None, c], acc)

    @cute.jit
    def load_lse(self, coordinates: cute.Tensor, sLse: cute.Tensor) -> cute.Tensor:
        """One head's lse, in registers, for each of a thread's accumulator values."""
        lse = cute.make_rmem_tensor(cute.size(coordinates), Float32)
        for i in range_constexpr(cute.size(lse)):
            lse[i] = sLse[coordinates[i][1]]
        return lse

    @cute.jit
    def softmax(self, acc: cute.Tensor, total: cute.Tensor, lse: cute.Tensor, scale: Float32):
        """total += 2^(scale acc + lse), with -lse as stored by `load_queries`. The lse is known: no running max."""
        for i in range_constexpr(cute.size(total)):
            total[i] += cute.math.exp2(cute.math.fma(acc[i], scale, lse[i]), fastmath=True)

    @cute.jit
    def softmax_heads(self, acc: cute.Tensor, total: cute.Tensor, lse: list[cute.Tensor], scale: Float32):
        """`softmax` for the heads of one WGMMA, whose values are consecutive in `acc`."""
        values_per_head = cute.size(total)
        for head in range_constexpr(self.heads_per_mma):
            layout = cute.make_layout(values_per_head)
            head_acc = cute.make_tensor(acc.iterator + head * values_per_head, layout)
            self.softmax(head_acc, total, lse[head], scale)

    @cute.jit
    def store_scores(
        self,
        totals: tuple[cute.Tensor, ...],
        sScore: cute.Tensor,
        coordinates: tuple[cute.Tensor, ...],
        sRow: cute.Tensor,
        step: Int32,
        subtile: Int32,
    ):
        """Write a subtile's sums over the heads, 0 for invisible entries, for the select warps."""
        first_entry = step * self.blocks_per_step * self.ratio - self.entries_before
        first_row = subtile * self.tiling.subtile
        self.acquire(NamedBarrier.ScoresEmpty)
        num_visible = [sRow[first_row + coordinates[0][i][1], NUM_VISIBLE] for i in range(cute.size(totals[0]))]
        for k in range_constexpr(len(totals)):
            for i in range_constexpr(cute.size(totals[k])):
                entry, row = coordinates[k][i]
                visible = (first_entry + entry >= 0) & (first_entry + entry < num_visible[i])
                score = totals[k][i] if visible else Float32(0.0)
                sScore[row, entry % self.ratio, entry // self.ratio] = score
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.ScoresFull, number_of_threads=THREADS)


def token_topk(
    q: Tensor, k_cmp: Tensor, lse_cmp: Tensor, config: Any, *, start: int = 0, documents: Documents | None = None
) -> Tensor:
    """Select blocks for each token (steps 3 and 4 of docs/semantics.md in token mode).

    Args:
        q: `[B,N,H,D]`, bf16 or fp16, queries of consecutive tokens; with documents their aligned rows.
        k_cmp: `[B,entries,H_kv,D]` in q's dtype; with documents aligned entries.
        lse_cmp: fp32 `[B,H,N]`, natural log, of attention to the visible entries; -inf without any.
        config: an nsa.NSAConfig; only block sizes, selection and softmax_scale are read.
        start: token index of q's first row.
        documents: layout of packed rows and entries, instead of `start`; T a multiple of the tokens per work tile.

    Returns:
        int32 `[B,H_kv,N,k]`, ascending, padded with -1; with documents -1 in rows without a token.

    Raises:
        TypeError, ValueError: for unsupported arguments; names the argument, the expectation and the value.
    """
    blocks = Blocks.of(config)
    _check(q, k_cmp, lse_cmp, config, blocks, documents, start)
    batch, rows, heads, dim = q.shape
    shape = (batch, k_cmp.shape[2], rows, blocks.count)
    bounds, tiles, tile = None, None, 0
    if documents is None:
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
    else:
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        bounds, tiles, tile = documents.bounds, documents.tiles, documents.tile
    if indices.numel() > 0:
        how = q.dtype, dim, heads // k_cmp.shape[2], blocks, documents is not None, has_warpgroups(q.device)
        run = TokenTopK.compile(*how).run
        lse_cmp = lse_cmp if lse_cmp.stride(-1) == 1 else lse_cmp.contiguous()
        scale = config.scale(dim) * LOG2_E
        max_ctas = multiprocessors(q.device)
        tensors = vectorizable(q), vectorizable(k_cmp), lse_cmp, indices
        run(*tensors, bounds, tiles, scale, start + rows, start, tile, max_ctas)
    return indices


def _check(
    q: Tensor, k_cmp: Tensor, lse_cmp: Tensor, config: Any, blocks: Blocks, documents: Documents | None, start: int
) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"q must be bfloat16 or float16, got {q.dtype}")
    for name, tensor, dtype in (("k_cmp", k_cmp, q.dtype), ("lse_cmp", lse_cmp, torch.float32)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if q.dim() != 4 or q.shape[3] not in DIMS:
        raise ValueError(f"q must be [B, N, H, D] with D in {DIMS}, got {list(q.shape)}")
    batch, rows, heads, dim = q.shape
    if k_cmp.dim() != 4 or (k_cmp.shape[0], k_cmp.shape[3]) != (batch, dim):
        raise ValueError(f"k_cmp must be [{batch}, entries, H_kv, {dim}], got {list(k_cmp.shape)}")
    kv_heads = k_cmp.shape[2]
    if kv_heads == 0 or heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        raise ValueError(f"q must have 1 to {MAX_GROUP} heads for each of k_cmp's {kv_heads}, got {heads}")
    if lse_cmp.shape != (batch, heads, rows):
        raise ValueError(f"lse_cmp must be {[batch, heads, rows]}, got {list(lse_cmp.shape)}")
    if not config.causal:
        raise ValueError("config must have causal=True, got causal=False")
    length, stride, size = blocks.length, blocks.stride, blocks.size
    if length % stride or size % stride:
        raise ValueError(
            f"config must have a compress_stride that divides compress_block_size and select_block_size, got {stride}, "
            f"{length} and {size}"
        )
    if len(overlap_weights(blocks)) > KEY_TILE:
        raise ValueError(
            f"config must have l'/d + l/d - 1 <= {KEY_TILE}, got compress_block_size={length}, "
            f"compress_stride={stride}, select_block_size={size}"
        )
    tiling = choose_tiling(dim, heads // kv_heads, blocks.count, size // stride)
    if tiling is None:
        raise ValueError(
            f"config must have num_selected_blocks that fit in shared memory, got {blocks.count} with D={dim} and "
            f"{heads // kv_heads} heads a group"
        )
    if documents is not None and (batch != 1 or start != 0 or documents.tile % tiling.tokens):
        raise ValueError(
            f"documents need B=1, start=0 and a tile that is a multiple of {tiling.tokens}, got {batch}, {start} and "
            f"{documents.tile}"
        )
