"""Top-k block selection by the best score of a block's keys, per token and indexer head, in one pass over the keys.

    score[i, h, b] = max_j q[i, h] . k[j]           keys j <= i of block b
    indices[i, h]  = the local blocks, then the highest scores, ties to the lower block; k in all, ascending

(the indexer of MiniMax-M3). Scores stay on chip. A NaN counts as no score, and blocks without a score above -inf are
not selected.

Work tiles: as many consecutive tokens as fill `BlockMaxTopK.rows` rows with the heads that share keys. The mainloop
iterates over the keys, KEY_TILE per step, STAGES steps in shared memory. Each thread holds two rows and a quarter of
the keys of S = Q K^T, so that a block's maximum takes one instruction per score and two shuffles. Each warp keeps the
maxima of its rows for LANES blocks, then merges those that beat a row's k-th best into its list (select/topk.py).

MMA: WGMMA on Hopper, Q in registers, two tiles of 64 rows per warpgroup: one is multiplied while the maxima of the
other are computed. mma.sync elsewhere, and one tile.

If work tiles are too few for all SMs, as in a step of decoding, CTAs share the keys of a tile (parts.py).

Packed documents are read in place, and so are sequences whose starts are known only on the device, treated as
documents. A work tile iterates over the keys of each document that it has tokens of.

Scores are fp32 sums of exact products, bitwise reproducible; their error is at most 2^-23 (D/8 + 4) |q| |k|, so
selected blocks can differ from the exact ones only if scores differ by less than twice that.

Floor: 2 D FLOPs per visible (query, key). 64K tokens, 4 heads of 128: 2.2 TFLOP, 3.3 ms at 660 TFLOP/s (WGMMA), 3.7 ms
at 600 (mma.sync), and concurrently 8.6e9 maxima, 0.6 ms at 64 per cycle and SM. Every work tile reads its keys again,
from L2: 8.6 GB with 64 tokens, 1.6 ms at 5.5 TB/s. From memory q and k once, 84 MB. Only indices are written.

Limits: D 64 or 128; blocks of 64 or 128; k at most 64; at most ROWS heads that share keys; causal; N H < 2^31;
64-bit offsets; rows 16-byte aligned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.lists.worklist import fake_slots
from cute_kernels.mma.mma_sync import (
    QUAD,
    acc_mn_view,
    accumulator,
    as_vectors,
    gather_rows,
    gemm_smem,
    load_block,
    make_warp_mma,
    mask_after,
    row_max,
)
from cute_kernels.mma.warp import LANES
from cute_kernels.mma.wgmma import (
    REGISTERS,
    TILE,
    K,
    allocate_tiles,
    as_warpgroup_acc,
    issue_mma,
    load_operand_a,
    smem_operand_b,
    swizzled_tiles,
    warpgroup_mma,
)
from cute_kernels.pool.documents import LENGTH, QUERY, START, TOKEN, Packed, bounds_of, document_at, fake_tables
from cute_kernels.runtime.device import has_warpgroups, multiprocessors, vectorizable
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake_heads
from cute_kernels.select.parts import empty_list, fake_parts, merge_parts, store_list
from cute_kernels.select.topk import Blocks, TopKList

WARPS = 8
THREADS = WARPS * LANES
WARP_ROWS = 16
ROWS = WARPS * WARP_ROWS
"""Rows per row tile, multiplied by the CTA's warps at a time, 16 rows each."""

KEY_TILE = 128
"""Keys per step."""

STAGES = 3
"""Steps whose keys are in shared memory: one is multiplied while the next two arrive."""

STEPS_PER_TURN = 4
"""Steps for which two row tiles alternate before both are awaited."""

SCORE_STRIDE = LANES + 1
"""Row stride of block scores in shared memory, padded against bank conflicts."""


class Shared(NamedTuple):
    """Shared memory of a CTA. Rows are those of the work tile; each warp has its own."""

    sK: cute.Tensor  # (KEY_TILE, D, STAGES)
    sQ: cute.Tensor  # (TILE, D, tiles); with WGMMA aliases sK until it is in registers
    sValues: cute.Tensor  # fp32 (rows, slots): lists of select/topk.py
    sIndices: cute.Tensor  # int32 (rows, slots)
    sRow: cute.Tensor  # int32 (rows, 4), see select/topk.py
    sFirstKey: cute.Tensor  # int32 (rows): first key of the row's sequence or document; -1: none
    sScore: cute.Tensor  # fp32 (rows, LANES): scores of the last blocks


class Keyspan(NamedTuple):
    """Keys of one sequence or document over which a work tile iterates."""

    first: Int32
    end: Int32
    blocks: Int32
    """Number of blocks that the last token sees."""
    first_step: Int32
    steps: Int32
    """Exclusive end of the steps."""


def num_row_tiles(count: int, warpgroups: bool) -> int:
    """Number of row tiles per work tile: longer lists leave room for one."""
    return 2 if warpgroups and count <= LANES else 1


def top_k_list(size: int, count: int, local: int) -> TopKList:
    """Lists of tokens that select blocks by their keys."""
    return TopKList(Blocks(1, 1, size, count, local=local), Keys(), tile=1)


class BlockMaxTopK:
    """Args:
    dim, dtype: D and its 16-bit type.
    group: number of heads that share keys.
    size: tokens per block.
    count, local: k and number of local blocks.
    warpgroups: use WGMMA.
    """

    def __init__(self, dim: int, dtype: Any, group: int, size: int, count: int, local: int, warpgroups: bool) -> None:
        self.dim, self.dtype, self.group, self.size, self.warpgroups = dim, dtype, group, size, warpgroups
        self.row_tiles = num_row_tiles(count, warpgroups)
        self.rows = self.row_tiles * ROWS
        self.tokens = self.rows // group
        """Tokens per work tile."""
        self.blocks_per_step = KEY_TILE // size
        self.steps_per_turn = STEPS_PER_TURN if self.row_tiles == 2 else 1
        self.steps_per_merge = LANES // self.blocks_per_step
        self.topk = top_k_list(size, count, local)

    @staticmethod
    @compiled_once
    def compile(
        dim: int,
        dtype: torch.dtype,
        group: int,
        size: int,
        count: int,
        local: int,
        packed: bool,
        in_parts: bool,
        warpgroups: bool,
    ) -> Kernel:
        values, indices = fake_parts() if in_parts else (None, fake_slots())
        return compile_kernel(
            BlockMaxTopK(dim, CUTE_DTYPES[dtype], group, size, count, local, warpgroups),
            *fake_heads(dtype, dim, dim),
            indices,
            values,
            fake_tables()[0] if packed else None,
            Int32(0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...; of documents with first_token 0
        mK: cute.Tensor,  # [B, N, H / group, D]
        mIndices: cute.Tensor,  # int32 [B, H, T, k]; in parts [B, H, T, parts, k]
        mValues: cute.Tensor | None,  # fp32 [B, H, T, parts, k]
        mBounds: cute.Tensor | None,  # Documents.bounds
        first_token: Int32,
        stream: Any,
    ):
        parts = Int32(1)
        if const_expr(mValues is not None):
            parts = mValues.shape[3]
        self.kernel(
            mQ,
            mK,
            mIndices,
            mValues,
            mBounds,
            first_token,
            parts,
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], self.tokens), mK.shape[2], mK.shape[0] * parts],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mIndices: cute.Tensor,
        mValues: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        first_token: Int32,
        parts: Int32,
    ):
        cta, kv_head, batch = cute.arch.block_idx()
        part = Int32(0)
        if const_expr(mValues is not None):
            part, batch = batch % parts, batch // parts
        tiles, _, _ = cute.arch.grid_dim()
        first = (tiles - 1 - cta) * self.tokens  # later tokens see more keys
        num_tokens = cutlass.min(mQ.shape[1] - first, self.tokens)
        shared = self.allocate()
        # [T - first, H - first head, D]
        gQ = cute.domain_offset((first, kv_head * self.group, 0), mQ[batch, None, None, None])
        gK = mK[batch, None, kv_head, None]  # [N, D]
        position = first_token + first  # of the first token, numbered like keys, or like a pack's queries

        self.init_rows(shared, position, num_tokens, mBounds, part)
        rQ = self.load_queries(gQ, shared, num_tokens)  # [TILE rows, D] of each row tile
        if const_expr(mBounds is None):
            span = self.keyspan(Int32(0), mK.shape[1], position, num_tokens)
            if const_expr(mValues is not None):
                span = self.part_of(span, part, parts)
            self.mainloop(gK, rQ, shared, span, position)
        else:
            document = document_at(mBounds[QUERY, None], first, 1, 1, 0)
            searching = document < mBounds.shape[1] - 1
            while searching:
                if mBounds[START, document] < mBounds[LENGTH, document]:  # it has queries
                    start, position = mBounds[TOKEN, document], self.key_of(first, document, mBounds)
                    span = self.keyspan(start, start + mBounds[LENGTH, document], position, num_tokens)
                    self.mainloop(gK, rQ, shared, span, position)
                document += 1
                searching = document < mBounds.shape[1] - 1
                if searching:
                    searching = mBounds[QUERY, document] < first + num_tokens
        start = (kv_head * self.group, first, 0)
        if const_expr(mValues is None):
            self.store_rows(shared, cute.domain_offset(start, mIndices[batch, None, None, None]), num_tokens)
        else:
            # fp32 and int32 [H - first head, T - first, k]
            gParts = [cute.domain_offset(start, x[batch, None, None, part, None]) for x in (mValues, mIndices)]
            self.store_parts(shared, *gParts, num_tokens)

    @cute.jit
    def key_of(self, query: Int32, document: Int32, mBounds: cute.Tensor) -> Int32:
        """Key index of a query of the pack, extrapolated if this is not its document."""
        return mBounds[TOKEN, document] + mBounds[START, document] + query - mBounds[QUERY, document]

    @cute.jit
    def keyspan(self, first: Int32, end: Int32, position: Int32, num_tokens: Int32) -> Keyspan:
        """Subset of keys first ... end-1 that the work tile's tokens see."""
        seen = cutlass.max(cutlass.min(end, position + num_tokens) - first, 0)
        return Keyspan(first, end, cute.ceil_div(seen, self.size), Int32(0), cute.ceil_div(seen, KEY_TILE))

    @cute.jit
    def part_of(self, span: Keyspan, part: Int32, parts: Int32) -> Keyspan:
        """Keys of a part: whole merges, equally many in each part except the last ones."""
        merges = cute.ceil_div(span.steps, self.steps_per_merge)
        steps = cute.ceil_div(merges, parts) * self.steps_per_merge
        stop = cutlass.min(span.steps, (part + 1) * steps)
        return Keyspan(span.first, span.end, span.blocks, part * steps, stop)

    @cute.jit
    def allocate(self) -> Shared:
        smem = SmemAllocator()
        q_layout = swizzled_tiles(self.dtype, self.dim, self.rows // TILE)
        sK = allocate_tiles(smem, self.dtype, swizzled_tiles(self.dtype, self.dim, STAGES, KEY_TILE))
        if const_expr(self.warpgroups):
            sQ = cute.make_tensor(sK.iterator, q_layout.outer)  # (TILE, D, tiles)
        else:
            sQ = allocate_tiles(smem, self.dtype, q_layout)  # (TILE, D, tiles)
        rows, slots = const_expr(self.rows), const_expr(self.topk.num_slots)
        return Shared(
            sK,
            sQ,
            smem.allocate_tensor(Float32, cute.make_layout((rows, slots), stride=(slots, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout((rows, slots), stride=(slots, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout((rows, 4), stride=(4, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(rows), 16),
            smem.allocate_tensor(Float32, cute.make_layout((rows, LANES), stride=(SCORE_STRIDE, 1)), 16),
        )

    # ---------------------------------------------------------------- rows

    def first_row(self, row_tile: Any) -> Int32:
        """Index of the first of the warp's 16 rows of a row tile."""
        return row_tile * ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx()) * WARP_ROWS

    @cute.jit
    def init_rows(self, shared: Shared, position: Int32, num_tokens: Int32, mBounds: cute.Tensor | None, part: Int32):
        """Initialize the lists of the warp's rows with the local blocks, which only the first part includes."""
        lane = cute.arch.lane_idx()
        for row_tile in range_constexpr(self.row_tiles):
            first_row = self.first_row(row_tile)
            if lane < WARP_ROWS:
                row = first_row + lane
                token = row // self.group
                key, first_key, end = position + token, Int32(0), position + num_tokens
                if const_expr(mBounds is not None):
                    document = document_at(mBounds[QUERY, None], position + token, 1, 1, 0)
                    key, first_key = self.key_of(position + token, document, mBounds), mBounds[TOKEN, document]
                    end = first_key + mBounds[LENGTH, document]
                in_sequence = key - first_key
                self.topk.init_row(shared.sRow[row, None], in_sequence, end - first_key, end - first_key, False)
                shared.sFirstKey[row] = first_key
                if (token >= num_tokens) | (key >= end):
                    shared.sFirstKey[row] = Int32(-1)
                    shared.sRow[row, None].fill(0)
            cute.arch.sync_warp()
            for i in cutlass.range(WARP_ROWS, unroll=1):
                row = first_row + i
                self.topk.init_list(shared.sValues[row, None], shared.sIndices[row, None], shared.sRow[row, None])
                if part > 0:
                    empty_list(self.topk, shared.sValues[row, None], shared.sIndices[row, None])
        cute.arch.sync_warp()

    @cute.jit
    def load_queries(self, gQ: cute.Tensor, shared: Shared, num_tokens: Int32) -> list[Any]:
        """The warp's queries of each row tile, in registers (WGMMA) or shared memory. Args: gQ: [T, H, D]."""
        last_row, vectors = num_tokens * self.group - 1, as_vectors(gQ)
        for row_tile in range_constexpr(self.row_tiles):
            row = cutlass.min(self.first_row(row_tile) + cute.arch.lane_idx() % WARP_ROWS, last_row)
            start = cute.crd2idx((row // self.group, row % self.group, 0), gQ.layout) // VECTOR
            gather_rows(vectors, self.warp_queries(shared, row_tile), Int32(start))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        rQ: list[Any] = [None] * self.row_tiles
        if const_expr(self.warpgroups):
            mma = self.wgmma()
            rQ = [load_operand_a(mma, self.warpgroup_queries(shared, row_tile)) for row_tile in range(self.row_tiles)]
        cute.arch.sync_threads()  # queries are read: keys may be copied over them
        return rQ

    def warpgroup_queries(self, shared: Shared, row_tile: int) -> cute.Tensor:
        """[TILE, D]."""
        return shared.sQ[None, None, self.first_row(row_tile) // TILE]

    def warp_queries(self, shared: Shared, row_tile: int) -> cute.Tensor:
        """[WARP_ROWS, D]."""
        part = self.first_row(row_tile) % TILE // WARP_ROWS
        return cute.local_tile(self.warpgroup_queries(shared, row_tile), (WARP_ROWS, self.dim), (part, 0))

    @cute.jit
    def store_rows(self, shared: Shared, gIndices: cute.Tensor, num_tokens: Int32):
        """Write the lists of the warp's rows. Args: `gIndices`: [H, T, k]."""
        for i in cutlass.range(self.row_tiles * WARP_ROWS, unroll=1):
            row = self.first_row(i // WARP_ROWS) + i % WARP_ROWS
            token, head = row // self.group, row % self.group
            if token < num_tokens:
                self.topk.store_indices(shared.sIndices[row, None], gIndices[head, token, None])

    @cute.jit
    def store_parts(self, shared: Shared, gValues: cute.Tensor, gIndices: cute.Tensor, num_tokens: Int32):
        """Write the lists of the warp's rows without sorting. Args: gValues, gIndices: [H, T, k]."""
        for i in cutlass.range(self.row_tiles * WARP_ROWS, unroll=1):
            row = self.first_row(i // WARP_ROWS) + i % WARP_ROWS
            token, head = row // self.group, row % self.group
            if token < num_tokens:
                lists = (x[row, None] for x in (shared.sValues, shared.sIndices))
                store_list(self.topk, *lists, gValues[head, token, None], gIndices[head, token, None])

    # ---------------------------------------------------------------- mainloop

    def wgmma(self) -> cute.TiledMma:
        return warpgroup_mma(self.dtype, KEY_TILE, REGISTERS, K, K)

    @cute.jit
    def mainloop(self, gK: cute.Tensor, rQ: list[Any], shared: Shared, span: Keyspan, position: Int32):
        """Score all keys of a sequence or document, and merge its blocks into the lists of its rows."""
        for step in range_constexpr(STAGES - 1):
            self.load_keys(gK, shared, span.first_step + step, span)
        first_turn = span.first_step // self.steps_per_turn  # a part starts with a turn
        for turn in cutlass.range(first_turn, cute.ceil_div(span.steps, self.steps_per_turn), unroll=1):
            first_step = turn * self.steps_per_turn
            if const_expr(self.row_tiles == 2):
                self.score_two_tiles(gK, rQ, shared, span, position, first_step)
            else:
                self.score_one_tile(gK, rQ[0], shared, span, position, first_step)
            steps = first_step + self.steps_per_turn
            if (steps % self.steps_per_merge == 0) | (steps >= span.steps):
                first_block = first_step // self.steps_per_merge * LANES
                cute.arch.sync_warp()
                for i in cutlass.range(self.row_tiles * WARP_ROWS, unroll=1):
                    self.merge(shared, self.first_row(i // WARP_ROWS) + i % WARP_ROWS, first_block, span)
                cute.arch.sync_warp()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the next document's keys may overwrite these

    @cute.jit
    def score_two_tiles(
        self, gK: cute.Tensor, rQ: list[Any], shared: Shared, span: Keyspan, position: Int32, first_step: Int32
    ):
        """Scores of STEPS_PER_TURN steps: compute the maxima of a row tile while the other one is multiplied.

        No product is in flight when it returns: ptxas would serialize WGMMA whose sums must be carried around a loop.
        Steps past the last one read stale keys, and all of their scores are masked.
        """
        # fp32 [WARP_ROWS, KEY_TILE]
        one, other = (accumulator(make_warp_mma(self.dtype, 1), (WARP_ROWS, KEY_TILE)) for _ in range(2))
        for i in range_constexpr(STEPS_PER_TURN):
            step = first_step + i
            self.await_keys()  # in the first step of a turn, the last step's products are finished too
            self.start_mma(one, rQ[0], shared, step, 0)
            if const_expr(i > 0):
                warpgroup.wait_group(1)
                cute.arch.sync_threads()  # the last step's products are finished: its stage may be filled
            self.load_keys(gK, shared, step + STAGES - 1, span)
            if const_expr(i > 0):
                self.reduce(other, shared, step - 1, span, position, 1)
            self.start_mma(other, rQ[1], shared, step, 1)
            warpgroup.wait_group(1)
            self.reduce(one, shared, step, span, position, 0)
        warpgroup.wait_group(0)
        self.reduce(other, shared, first_step + STEPS_PER_TURN - 1, span, position, 1)

    @cute.jit
    def score_one_tile(self, gK: cute.Tensor, rQ: Any, shared: Shared, span: Keyspan, position: Int32, step: Int32):
        """Scores of one step."""
        acc = accumulator(make_warp_mma(self.dtype, 1), (WARP_ROWS, KEY_TILE))  # fp32 [WARP_ROWS, KEY_TILE]
        self.await_keys()  # the last step's products are finished too: its stage may be filled
        self.start_mma(acc, rQ, shared, step, 0)
        self.load_keys(gK, shared, step + STAGES - 1, span)
        if const_expr(self.warpgroups):
            warpgroup.wait_group(0)
        self.reduce(acc, shared, step, span, position, 0)

    @cute.jit
    def load_keys(self, gK: cute.Tensor, shared: Shared, step: Int32, span: Keyspan):
        """Start copying the keys of a step into its stage, using all threads; one group, empty past the last step."""
        thread, _, _ = cute.arch.thread_idx()
        if step < span.steps:
            stage = shared.sK[None, None, step % STAGES]  # [KEY_TILE, D]
            load_block(gK, stage, span.first + step * KEY_TILE, span.end, thread, THREADS)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def await_keys(self):
        """Wait until the next step's keys have arrived, for all threads."""
        cute.arch.cp_async_wait_group(STAGES - 2)
        if const_expr(self.warpgroups):
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

    @cute.jit
    def start_mma(
        self, acc: cute.Tensor, rQ: cute.Tensor | None, shared: Shared, step: Int32, row_tile: cutlass.Constexpr[int]
    ):
        """S of the warp's rows of a row tile; with WGMMA it is complete after `wait_group`."""
        stage = step % STAGES
        if const_expr(self.warpgroups):
            mma = self.wgmma()
            rK = smem_operand_b(mma, shared.sK)[None, None, None, stage]  # [KEY_TILE, D]
            issue_mma(mma, as_warpgroup_acc(acc), rQ, rK, False)
        else:
            acc.fill(0.0)
            mma, lane = make_warp_mma(self.dtype, 1), cute.arch.lane_idx()
            gemm_smem(mma, lane, acc, self.warp_queries(shared, row_tile), shared.sK[None, None, stage], 0)

    @cute.jit
    def reduce(
        self,
        acc: cute.Tensor,
        shared: Shared,
        step: Int32,
        span: Keyspan,
        position: Int32,
        row_tile: cutlass.Constexpr[int],
    ):
        """Write the maxima of a step's blocks as scores of the warp's rows of a row tile."""
        lane, S = cute.arch.lane_idx(), acc_mn_view(acc)  # fp32 (c, r, 0, n)
        first_row, first_key = self.first_row(row_tile), span.first + step * KEY_TILE
        rLastKey = cute.make_rmem_tensor(2, Int32)  # last key that a row sees
        for r in range_constexpr(2):
            rLastKey[r] = position + (first_row + r * 8 + lane // QUAD) // self.group - first_key
        if cute.arch.vote_any_sync(cutlass.min(rLastKey[0], rLastKey[1]) < KEY_TILE - 1):
            for r in range_constexpr(2):
                mask_after(S[None, r, 0, None], rLastKey[r])
        column = step % self.steps_per_merge * self.blocks_per_step
        eighths = const_expr(self.size // 8)
        for r in range_constexpr(2):
            row = first_row + r * 8 + lane // QUAD
            for b in range_constexpr(self.blocks_per_step):
                score = row_max(cute.local_tile(S[None, r, 0, None], (2, eighths), (0, b)))
                if lane % QUAD == 0:
                    shared.sScore[row, column + b] = score

    @cute.jit
    def merge(self, shared: Shared, row: Int32, first_block: Int32, span: Keyspan):
        """Merge the scores of up to LANES blocks into a row's list, if they belong to its document."""
        lane = cute.arch.lane_idx()
        sValues, sRow = shared.sValues[row, None], shared.sRow[row, None]  # fp32 [slots], int32 [4]
        block, score = first_block + lane, shared.sScore[row, lane]
        is_scored = (block < span.blocks) & (shared.sFirstKey[row] == span.first)
        beats = is_scored & self.topk.not_forced(sRow, block) & (score > sValues[self.topk.blocks.count - 1])
        candidates = cute.arch.vote_ballot_sync(beats)
        if candidates != 0:
            self.topk.merge(sValues, shared.sIndices[row, None], score, block, candidates)


def num_parts(ctas: int, keys: int, size: int, most: int) -> int:
    """Number of parts of the keys: at least a merge each, and at most `most` CTAs. Args: `ctas`: work tiles."""
    merges = -(-keys // (LANES * size))
    return max(1, min(most // max(ctas, 1), merges))


def top_blocks_by_max(
    q_idx: Tensor,
    k_idx: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    k: int,
    local: int,
    parts: int | None = None,
) -> Tensor:
    """Selected blocks, int32 `[B,H_i,N_q,k]`, packed `[H_i,T,k]`, for checked arguments.

    Args:
        q_idx, k_idx, cu_seqlens, cu_seqlens_k, block_size, k, local: see nsa.top_blocks_by_max.
        q_start: int32 `[B]`; None if queries are the last tokens.
        parts: number of parts of the keys, for sequences without q_start; None: chosen by sizes and device (num_parts).
    """
    tokens, heads, dim = q_idx.shape[-3:]
    q, keys, packed = vectorizable(q_idx), vectorizable(k_idx), None
    if cu_seqlens is not None:
        packed = Packed(cu_seqlens, cu_seqlens_k, q_start)
        q, keys = q[None], keys[None]
    elif q_start is not None and len(q) > 0:
        packed = Packed.of_sequences(q, keys.shape[1], q_start)
        q, keys = q.flatten(0, 1)[None], keys.flatten(0, 1)[None]
    indices = torch.empty((q.shape[0], heads, q.shape[1], k), dtype=torch.int32, device=q.device)
    if indices.numel() > 0:
        group, hopper = heads // keys.shape[2], has_warpgroups(q.device)
        bounds, first_token = None, keys.shape[1] - q.shape[1]
        if packed is not None:
            sizes = dict.fromkeys(("tile", "step", "length", "stride"), block_size)
            bounds, first_token, parts = bounds_of(packed, **sizes), 0, 1
        elif parts is None:
            ctas = len(q) * keys.shape[2] * -(-tokens // (num_row_tiles(k, hopper) * ROWS // group))
            parts = num_parts(ctas, keys.shape[1], block_size, multiprocessors(q.device))
        how = dim, q.dtype, group, block_size, k, local, packed is not None, parts > 1, hopper
        if parts > 1:
            values, lists = (
                torch.empty((*indices.shape[:3], parts, k), dtype=dtype, device=q.device)
                for dtype in (torch.float32, torch.int32)
            )
            BlockMaxTopK.compile(*how).run(q, keys, lists, values, None, first_token)
            indices = merge_parts(values, lists)
        else:
            BlockMaxTopK.compile(*how).run(q, keys, indices, None, bounds, first_token)
    if cu_seqlens is not None:
        return indices[0]
    return indices if packed is None else indices[0].unflatten(1, (-1, tokens)).transpose(0, 1).contiguous()
