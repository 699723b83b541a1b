"""The best blocks of each token, shared by the heads of its group: their scores. token_best.py chooses.

    p[h, i, j]      = exp(scale q_h[i] . k_cmp[j] - lse_cmp[h, i])        entry j visible to token i: j d + l-1 <= i
    score[i, b]     = sum_j overlap(j, b) / l  sum_h p[h, i, j]           h over the G heads of a key/value head
    indices[i]      = forced blocks, then the highest scores, the lower index first among equals; ascending

(equations 8 to 12 of arXiv 2502.11089, eq. 9 read as overlap in tokens). A CTA holds the queries of some tokens and G
heads in shared memory and walks over the compressed keys, 192 or 256 in a step. Some of its warps multiply: S^T =
K Q^T, because it puts what is used over and over on the left: a warp keeps its keys in registers while all heads of all
tokens pass by. The probabilities of the heads add up in registers, in the order of the heads; only their sums, of 8 or
16 tokens, go to shared memory. There the other warps pool them to block scores, and write these, while the first ones
multiply for the next tokens. Masked entries become 0 after the sum, so what they hold reaches nothing. The warps that
pool also fetch the next keys: once those that multiply have theirs, their shared memory is free. Scores exist of as
many tokens at a time as SCORE_BYTES hold.

On Hopper the products are those of WGMMA, of 64 entries with up to 64 queries of 16 tokens, several heads at once.
Three warpgroups multiply, and each has a product under way while it adds up the one before: a scheduler needs a third
warp, because one of two often neither multiplies nor computes exponentials, but adds up, stores or waits. Blocks of
more than 192 entries leave it at two warpgroups. One of BY_FMA exponentials is made of FMAs (exponential.py): for 128
dimensions the special function unit is at work as long as the tensor cores, for 64 twice as long. Elsewhere mma.sync, a
head at a time, and the next head's products under way while the probabilities of one add up.

Packed documents: tokens and entries lie aligned (documents.py), T a multiple of ALIGNED_ROWS, so that a CTA has tokens
of one document; entries and blocks count from its beginning. Rows behind a document's end choose nothing.

Near ties: scores are fp32 sums in a fixed order, the same bits in every run. They are off by at most a fraction

    2^-23 ((D/8 + 4) A + 4 |lse| + G + 8),      A and |lse| the largest scale |q| |k_cmp| and |lse| of the token's heads

(products summed in D/16 steps, units of log 2, exponential, sums), so a chosen set may differ from the exact one only
where scores differ by less than twice that.

Floor: 2 D FLOPs and one exponential for each visible (query, entry). 64K tokens, 64 heads of 128, d = 16: 2.2 TFLOP,
2.7 ms at 800 TFLOP/s (WGMMA; mma.sync 3.7 ms at 600), and 8.6e9 exponentials, 2.3 ms at 16 a cycle and SM, at the same
time. Keys are read again by every CTA, from L2: 4.3 GB there with 32 tokens. For l' = 64 and 4 key/value heads 0.54 GB
of scores are written. Seen once on an H200, with two warpgroups: 5.1 ms, the tensor cores and what computes
exponentials both at work less than half of the time. With three 3.5 to 4 ms are expected; not measured yet.

Limits: D 64 or 128; G at most MAX_GROUP; d divides l and l'; l'/d + l/d - 1 <= MAX_TOKEN_ENTRIES; causal; at most
MAX_TOKEN_BLOCKS chosen blocks.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers
from torch import Tensor

from cute_kernels.best_blocks import Blocks
from cute_kernels.block_lists import Keys
from cute_kernels.device import has_warpgroups, vectorizable
from cute_kernels.documents import DOCUMENT, ENTRY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.exponential import exp2_by_fma
from cute_kernels.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.support import MAX_TOKEN_BLOCKS, MAX_TOKEN_ENTRIES, MAX_TOKEN_GROUP
from cute_kernels.token_best import _best
from cute_kernels.warp import LANES, LOG2_E

WARPS = 16
THREADS = WARPS * LANES
FOUR_WARPS = 4 * LANES
REGISTERS = {8: (192, 64), 12: (152, 56)}
"""By the number of warps that multiply: a thread's of those, and of the others."""

KEYS_READ, SCORES_READY, KEYS_READY, SCORES_READ = 1, 2, 3, 6
"""Barriers: all that multiply arrive, and the others wait; the other way around, and one for each four warps, which
then need not wait for each other."""

BY_FMA = 4
"""One of so many exponentials of a warpgroup comes from FMAs."""

UNIT, COLUMNS = 64, 64
"""Entries, and the most queries, that a warpgroup multiplies at once."""

SCORE_BYTES = 256 << 20
"""For the scores that exist at a time, if those of ALIGNED_ROWS tokens do not take more."""
ALIGNED_ROWS = 64
"""Tokens whose scores exist at a time are a multiple of this, as of a CTA's tokens."""

MAX_GROUP = MAX_TOKEN_GROUP
DIMS = (64, 128)
SMEM_BYTES = 227 << 10
"""What a CTA can have on Hopper and on Blackwell."""


class Tiling(NamedTuple):
    """How a CTA is cut."""

    tokens: int
    """Of a CTA."""
    rows: int
    """Tokens that are multiplied, and pooled for, at once."""
    math_warps: int = 8
    """That multiply; the others load keys and pool scores."""
    entries: int = MAX_TOKEN_ENTRIES
    """Compressed keys of a step."""

    @property
    def pool_warps(self) -> int:
        return WARPS - self.math_warps


TILINGS = (Tiling(64, 16), Tiling(32, 16), Tiling(16, 16), Tiling(8, 8))
THREE_WARPGROUPS = {"math_warps": 12, "entries": 3 * UNIT}
"""A third warp to each scheduler, for the times when one of two neither multiplies nor computes exponentials."""


def smem_bytes(tiling: Tiling, dim: int, group: int, blocks: Blocks) -> int:
    """Shared memory of a CTA."""
    scores = tiling.rows * score_layout(blocks, tiling.entries)[1] * 4
    per_token = group * (2 * dim + 4) + 4
    return tiling.tokens * per_token + tiling.entries * dim * 2 + scores + 1024  # alignment


def choose_tiling(dim: int, group: int, blocks: Blocks, warpgroups: bool) -> Tiling:
    """As many tokens as fit: keys are read once for them. The last tiling fits whatever the limits allow."""
    three = warpgroups and len(overlap_weights(blocks)) <= THREE_WARPGROUPS["entries"]
    tilings = [tiling._replace(**THREE_WARPGROUPS) if three else tiling for tiling in TILINGS]
    return next(tiling for tiling in tilings if smem_bytes(tiling, dim, group, blocks) <= SMEM_BYTES)


def score_layout(blocks: Blocks, entries: int) -> tuple[int, int]:
    """Strides of a row of scores: between the entries of a block, and between rows; chosen against bank conflicts.

    Entry r b + i of r = l'/d lies at column b of row i, so that lanes that pool consecutive blocks read consecutive
    numbers. Lanes of a warp write 8 entries of 4 pairs of tokens at once.
    """
    ratio = blocks.size // blocks.stride
    of_eight = max(1, 8 // ratio)  # columns that they begin, times an odd number
    columns = (-(-entries // (ratio * of_eight)) | 1) * of_eight
    return columns, ratio * columns + (4 - ratio * columns) % 16


def overlap_weights(blocks: Blocks) -> list[float]:
    """overlap / l of the entries that overlap a block, from the first one on; the same for every block."""
    length, stride, size = blocks.length, blocks.stride, blocks.size
    starts = range(stride - length, size, stride)
    return [(min(start + length, size) - max(start, 0)) / length for start in starts]


class TokenScores:
    """Args: G, what to score, when a token sees an entry, and whether to multiply with WGMMA (sm_90a only)."""

    def __init__(self, dim: int, dtype: Any, group: int, blocks: Blocks, keys: Keys, warpgroups: bool = False) -> None:
        self.dim, self.dtype, self.group, self.blocks, self.keys = dim, dtype, group, blocks, keys
        self.warpgroups = warpgroups
        tiling = choose_tiling(dim, group, blocks, warpgroups)
        self.tiling = tiling
        self.pool_threads = tiling.pool_warps * LANES
        self.weights = overlap_weights(blocks)
        self.ratio = blocks.size // blocks.stride
        self.before = len(self.weights) - self.ratio  # entries that begin in front of the block that they overlap
        self.per_step = blocks.per_step(tiling.entries)
        self.heads = 1
        """Whose products are computed at once."""
        if warpgroups:
            self.heads = max(h for h in range(1, group + 1) if group % h == 0 and h * tiling.rows <= COLUMNS)
        self.columns = self.heads * tiling.rows

    def _smem_layout(self, *shape: int, warpgroups: bool = False) -> Any:
        """[rows, D] or [rows, D, copies] without bank conflicts; for WGMMA the same with the swizzle of a pointer."""
        if warpgroups:
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        else:
            rows = cute.make_ordered_layout((8, 64), order=(1, 0))
            atom = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, rows)
        return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mK: cute.Tensor,  # [B, entries, H_kv, D]
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mScores: cute.Tensor,  # fp32 [B, H_kv, N, blocks]
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        scale: Float32,
        tokens: Int32,  # of the sequence; with mBounds not read
        first_token: Int32,  # number of mQ's first row
        tile: Int32,  # T of the documents
        stream: Any,
    ):
        math_warps, rows, entries = self.tiling.math_warps, self.tiling.rows, self.tiling.entries
        if const_expr(self.warpgroups):
            tiled_mma = hopper_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (math_warps // 4, 1, 1),
                (UNIT, self.columns),
                warpgroup.OperandSource.RMEM,
            )
        else:
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            token_warps = const_expr(rows // 8)
            entry_warps = const_expr(math_warps // token_warps)
            tiled_mma = cute.make_tiled_mma(
                op, (entry_warps, token_warps, 1), permutation_mnk=(16 * entry_warps, 8 * token_warps, 32)
            )
        columns, stride = score_layout(self.blocks, entries)
        self.kernel(
            mQ,
            mK,
            mLse,
            mScores,
            mBounds,
            mTiles,
            scale,
            tokens,
            first_token,
            tile,
            tiled_mma,
            self._smem_layout(
                self.columns, self.dim, self.tiling.tokens * self.group // self.columns, warpgroups=self.warpgroups
            ),
            self._smem_layout(entries, self.dim),
            cute.make_layout((rows, self.ratio, columns), stride=(stride, columns, 1)),
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], self.tiling.tokens) * mK.shape[2] * mK.shape[0], 1, 1],
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
        mScores: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        scale: Float32,
        tokens: Int32,
        first_token: Int32,
        tile: Int32,
        tiled_mma: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_score: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        items, _, _ = cute.arch.grid_dim()
        item = items - 1 - item  # the longest first
        kv_heads, entries = mK.shape[2], mK.shape[1]
        kv_head, batch = item % kv_heads, item // kv_heads % mK.shape[0]
        first_row = item // kv_heads // mK.shape[0] * self.tiling.tokens
        first_token += first_row
        num_rows = cutlass.min(mQ.shape[1] - first_row, self.tiling.tokens)
        if const_expr(mTiles is not None):
            document = cutlass.max(mTiles[DOCUMENT, first_token // tile], 0)  # unused tiles lie behind all documents
            first_token -= mBounds[ROW, document]
            tokens = mBounds[LENGTH, document]
            entries = self.keys.visible(tokens - 1, entries)
            mK = cute.domain_offset((0, mBounds[ENTRY, document], 0, 0), mK)
        num_rows = cutlass.min(num_rows, tokens - first_token)  # may be negative
        mQ = cute.domain_offset((0, first_row, 0, 0), mQ)
        mLse = cute.domain_offset((0, 0, first_row), mLse)
        mScores = cute.domain_offset((0, 0, first_row, 0), mScores)

        smem = cutlass.memory.SmemAllocator()
        rows = const_expr(self.tiling.tokens)
        if const_expr(self.warpgroups):
            sQ = smem.allocate_tensor(self.dtype, layout_q.outer, 1024, swizzle=layout_q.inner)
        else:
            sQ = smem.allocate_tensor(self.dtype, layout_q, 1024)
        sK = smem.allocate_tensor(self.dtype, layout_k, 128)
        sScore = smem.allocate_tensor(Float32, layout_score, 16)
        sLse = smem.allocate_tensor(Float32, cute.make_layout((rows, self.group), stride=(1, rows)), 16)
        sLimit = smem.allocate_tensor(Int32, cute.make_layout(rows), 16)  # entries that a token sees

        # The last token sees the most
        steps = Int32(0)
        if num_rows > 0:
            visible = self.keys.visible(first_token + num_rows - 1, entries)
            steps = cute.ceil_div(self.blocks.scored(visible), self.per_step)
        if steps > 0:
            self._load_queries(mQ, sQ, batch, kv_head, num_rows)
            self._load_keys(mK, sK, entries, batch, kv_head, Int32(0), thread, THREADS)
        for i in cutlass.range(thread, rows * self.group, THREADS):
            row, head = i % rows, i // rows
            sLse[row, head] = Float32(0.0)
            if row < num_rows:
                sLse[row, head] = -LOG2_E * mLse[batch, kv_head * self.group + head, row]
        if thread < rows:
            sLimit[thread] = self.keys.visible(cutlass.min(first_token + thread, tokens - 1), entries)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        if const_expr(self.warpgroups):
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        parts = const_expr(rows // self.tiling.rows)
        math_registers, pool_registers = REGISTERS[self.tiling.math_warps]

        if warp_index < self.tiling.math_warps:
            cute.arch.setmaxregister_increase(math_registers)
            arguments = tiled_mma, sQ, sK, sLse, sScore, sLimit, steps, scale
            if const_expr(self.warpgroups):
                self._score_by_warpgroups(*arguments)
            else:
                self._score(*arguments)
        else:
            cute.arch.setmaxregister_decrease(pool_registers)
            warp_index -= self.tiling.math_warps
            pool_thread = thread - self.tiling.math_warps * LANES
            for step in cutlass.range(steps, unroll=1):
                if step + 1 < steps:
                    cute.arch.barrier(barrier_id=KEYS_READ, number_of_threads=THREADS)
                    self._load_keys(mK, sK, entries, batch, kv_head, step + 1, pool_thread, self.pool_threads)
                cute.arch.cp_async_commit_group()
                for part in cutlass.range(parts, unroll=1):
                    self._allow(SCORES_READ)
                    if (part + 1 == parts) & (step + 1 < steps):
                        cute.arch.cp_async_wait_group(0)
                        self._allow(KEYS_READY)
                    cute.arch.barrier(barrier_id=SCORES_READY, number_of_threads=THREADS)
                    for i in range_constexpr(self.tiling.rows // self.tiling.pool_warps):
                        row_of_part = i * self.tiling.pool_warps + warp_index
                        row = part * self.tiling.rows + row_of_part
                        if row < num_rows:
                            gScores = mScores[batch, kv_head, row, None]
                            self._pool(sScore[row_of_part, None, None], gScores, step * self.per_step)

    # Loading

    @cute.jit
    def _load_queries(self, mQ: cute.Tensor, sQ: cute.Tensor, batch: Int32, kv_head: Int32, num_rows: Int32):
        thread, _, _ = cute.arch.thread_idx()
        vectors = self.dim // VECTOR
        vector, place = thread % vectors, thread // vectors
        rows = min(self.tiling.tokens, THREADS // vectors)  # at once
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        for first in range_constexpr(0, self.tiling.tokens, rows):
            row = first + place % rows
            part, token = row // self.tiling.rows, row % self.tiling.rows
            if row < num_rows:
                for head in cutlass.range(place // rows, self.group, THREADS // vectors // rows, unroll=4):
                    to = (part * self.group + head) * self.tiling.rows + token
                    cute.copy(
                        copy,
                        cute.local_tile(mQ[batch, row, kv_head * self.group + head, None], (VECTOR,), (vector,)),
                        cute.local_tile(sQ[to % self.columns, None, to // self.columns], (VECTOR,), (vector,)),
                    )

    @cute.jit
    def _load_keys(
        self,
        mK: cute.Tensor,
        sK: cute.Tensor,
        entries: Int32,
        batch: Int32,
        kv_head: Int32,
        step: Int32,
        thread: Int32,
        threads: cutlass.Constexpr[int],
    ):
        vectors = self.dim // VECTOR
        vector, place = thread % vectors, thread // vectors
        first = step * self.per_step * self.ratio - self.before
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        for i in range_constexpr(self.tiling.entries * vectors // threads):
            row = i * (threads // vectors) + place
            if (first + row >= 0) & (first + row < entries):
                cute.copy(
                    copy,
                    cute.local_tile(mK[batch, first + row, kv_head, None], (VECTOR,), (vector,)),
                    cute.local_tile(sK[row, None], (VECTOR,), (vector,)),
                )

    # Probabilities

    @cute.jit
    def _score(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sLimit: cute.Tensor,
        steps: Int32,
        scale: Float32,
    ):
        """All parts of all steps. A warp multiplies for the next head, be it another part's, while it adds up one."""
        thread, _, _ = cute.arch.thread_idx()
        parts = const_expr(self.tiling.tokens // self.tiling.rows)
        thr_mma = tiled_mma.get_slice(thread)
        tSrK = thr_mma.make_fragment_A(thr_mma.partition_shape_A((self.tiling.entries, self.dim)))
        tSrQ = thr_mma.make_fragment_B(thr_mma.partition_shape_B((self.tiling.rows, self.dim)))
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_q = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        tSsK, tSrK_copy = copy_k.partition_S(sK), copy_k.retile(tSrK)
        multiply = (tiled_mma, copy_q, copy_q.partition_S(sQ), copy_q.retile(tSrQ), tSrQ, tSrK)
        acc_shape = thr_mma.partition_shape_C((self.tiling.entries, self.tiling.rows))
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((self.tiling.entries, self.tiling.rows)))
        acc, next_acc, total = (cute.make_rmem_tensor(acc_shape, Float32) for _ in range(3))

        cute.copy(copy_k, tSsK, tSrK_copy)
        self._keys_are_read(Int32(0), steps)
        self._multiply(*multiply, Int32(0), acc)
        for step in cutlass.range(steps, unroll=1):
            for part in cutlass.range(parts, unroll=1):
                first_head = part * self.group
                head_lse = cute.domain_offset((part * self.tiling.rows, 0), sLse)
                total.fill(0.0)
                for pair in cutlass.range((self.group - 1) // 2, unroll=1):
                    self._multiply(*multiply, first_head + 2 * pair + 1, next_acc)
                    self._add_probabilities(acc, total, coordinates, head_lse[None, 2 * pair], scale)
                    self._multiply(*multiply, first_head + 2 * pair + 2, acc)
                    self._add_probabilities(next_acc, total, coordinates, head_lse[None, 2 * pair + 1], scale)
                if const_expr(self.group % 2 == 0):
                    self._multiply(*multiply, first_head + self.group - 1, next_acc)
                    self._add_probabilities(acc, total, coordinates, head_lse[None, self.group - 2], scale)
                else:
                    for i in range_constexpr(cute.size(acc)):
                        next_acc[i] = acc[i]
                following = first_head + self.group
                if part + 1 == parts:
                    following = Int32(0)
                    if step + 1 < steps:
                        self._wait_for(KEYS_READY)
                        cute.copy(copy_k, tSsK, tSrK_copy)
                        self._keys_are_read(step + 1, steps)
                # After the last step this is of no use, and does no harm
                self._multiply(*multiply, following, acc)
                self._add_probabilities(next_acc, total, coordinates, head_lse[None, self.group - 1], scale)
                self._store_scores((total,), sScore, (coordinates,), sLimit, step, part)

    @cute.jit
    def _allow(self, barrier: cutlass.Constexpr[int]):
        """By who pools."""
        for i in range_constexpr(self.tiling.math_warps // 4):
            cute.arch.barrier_arrive(barrier_id=barrier + i, number_of_threads=self.pool_threads + FOUR_WARPS)

    @cute.jit
    def _wait_for(self, barrier: cutlass.Constexpr[int]):
        """By who multiplies."""
        four_warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        cute.arch.barrier(barrier_id=barrier + four_warps, number_of_threads=self.pool_threads + FOUR_WARPS)

    @cute.jit
    def _keys_are_read(self, step: Int32, steps: Int32):
        """Let the next ones come."""
        if step + 1 < steps:
            cute.arch.barrier_arrive(barrier_id=KEYS_READ, number_of_threads=THREADS)

    @cute.jit
    def _multiply(
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
        """acc = keys . queries of one head of one part."""
        acc.fill(0.0)
        cute.copy(copy_q, tSsQ[None, 0, None, head], tSrQ_copy[None, 0, None])
        for c in range_constexpr(self.dim // 16):
            cute.gemm(tiled_mma, acc, tSrK[None, None, c], tSrQ[None, None, c], acc)

    @cute.jit
    def _add_probabilities(
        self,
        acc: cute.Tensor,
        total: cute.Tensor,
        coordinates: cute.Tensor,
        sLse: cute.Tensor,
        scale: Float32,
        by_fma: cutlass.Constexpr[int | None] = None,
    ):
        """total += exp(scale acc - lse), for `scale` and `sLse` = -lse in units of log 2.

        Args:
            by_fma: the first of those, each BY_FMA-th, that are computed by FMAs.
        """
        for i in range_constexpr(cute.size(acc)):
            _, row = coordinates[i]
            exponent = cute.math.fma(acc[i], scale, sLse[row])
            if const_expr(by_fma is not None and i % BY_FMA == by_fma):
                total[i] += exp2_by_fma(exponent)
            else:
                total[i] += cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def _score_by_warpgroups(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sLimit: cute.Tensor,
        steps: Int32,
        scale: Float32,
    ):
        """The same with WGMMA. A warpgroup has one product under way while it adds up the one before."""
        thread, _, _ = cute.arch.thread_idx()
        rows, warpgroups = const_expr(self.tiling.rows), const_expr(self.tiling.math_warps // 4)
        parts, sets = const_expr(self.tiling.tokens // rows), const_expr(self.group // self.heads)
        units = const_expr(self.tiling.entries // (warpgroups * UNIT))  # of keys of a warpgroup
        products = list(itertools.product(range(parts), range(sets), range(units)))
        thr_mma = tiled_mma.get_slice(thread)
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        tSsK = copy_k.partition_S(sK)
        k_shape = thr_mma.partition_shape_A((warpgroups * UNIT, self.dim))
        acc_shape = thr_mma.partition_shape_C((warpgroups * UNIT, self.columns))
        tSrK = [thr_mma.make_fragment_A(k_shape) for _ in range(units)]
        tSrQ = thr_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sQ))
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((self.tiling.entries, self.columns)))
        coordinates = [coordinates[None, unit, 0] for unit in range(units)]  # the first ones are the first head's
        acc = [cute.make_rmem_tensor(acc_shape, Float32) for _ in range(2)]
        total = [cute.make_rmem_tensor(cute.size(acc[0]) // self.heads, Float32) for _ in range(units)]

        for step in cutlass.range(steps, unroll=1):
            if step > 0:
                self._wait_for(KEYS_READY)
            for unit in range_constexpr(units):
                cute.copy(copy_k, tSsK[None, unit, None], copy_k.retile(tSrK[unit])[None, 0, None])
            self._keys_are_read(step, steps)
            self._start(tiled_mma, acc[0], tSrK[0], tSrQ[None, None, None, 0])
            for i in range_constexpr(len(products)):
                part, of_heads, unit = products[i]
                if const_expr(i + 1 < len(products)):
                    next_part, next_heads, next_unit = products[i + 1]
                    queries = tSrQ[None, None, None, next_part * sets + next_heads]
                    self._start(tiled_mma, acc[(i + 1) % 2], tSrK[next_unit], queries)
                    warpgroup.wait_group(1)
                else:
                    warpgroup.wait_group(0)
                if const_expr(of_heads == 0):
                    total[unit].fill(0.0)
                set_lse = cute.domain_offset((part * rows, of_heads * self.heads), sLse)
                self._add_heads(acc[i % 2], total[unit], coordinates[unit], set_lse, scale)
                if const_expr((of_heads + 1, unit + 1) == (sets, units)):
                    self._store_scores((*total,), sScore, (*coordinates,), sLimit, step, Int32(part))

    @cute.jit
    def _start(self, tiled_mma: cute.TiledMma, acc: cute.Tensor, tSrK: cute.Tensor, tSrQ: cute.Tensor):
        """acc = keys . queries of some heads of one part, as one group."""
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for c in range_constexpr(self.dim // 16):
            cute.gemm(atom, acc, tSrK[None, None, c], tSrQ[None, None, c], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _add_heads(
        self, acc: cute.Tensor, total: cute.Tensor, coordinates: cute.Tensor, sLse: cute.Tensor, scale: Float32
    ):
        """_add_probabilities for several heads, whose queries follow each other in `acc`."""
        count = cute.size(total)
        for head in range_constexpr(self.heads):
            of_head = cute.make_tensor(acc.iterator + head * count, cute.make_layout(count))
            self._add_probabilities(of_head, total, coordinates, sLse[None, head], scale, by_fma=head % BY_FMA)

    @cute.jit
    def _store_scores(
        self,
        totals: tuple[cute.Tensor, ...],
        sScore: cute.Tensor,
        coordinates: tuple[cute.Tensor, ...],
        sLimit: cute.Tensor,
        step: Int32,
        part: Int32,
    ):
        """Sums over the heads, 0 where an entry is not visible; for the warps that pool."""
        first_entry = step * self.per_step * self.ratio - self.before
        first_row = part * self.tiling.rows
        limits = [sLimit[first_row + coordinates[0][i][1]] for i in range(cute.size(totals[0]))]
        self._wait_for(SCORES_READ)
        for k in range_constexpr(len(totals)):
            for i in range_constexpr(cute.size(totals[k])):
                entry, row = coordinates[k][i]
                visible = (first_entry + entry >= 0) & (first_entry + entry < limits[i])
                score = totals[k][i] if visible else Float32(0.0)
                sScore[row, entry % self.ratio, entry // self.ratio] = score
        cute.arch.barrier_arrive(barrier_id=SCORES_READY, number_of_threads=THREADS)

    # Scores of blocks

    @cute.jit
    def _pool(self, sScore: cute.Tensor, gScores: cute.Tensor, first_block: Int32):
        """Pool one token's scores to blocks."""
        for chunk in range_constexpr(-(-self.per_step // LANES)):
            offset = chunk * LANES + cute.arch.lane_idx()
            column, block = cutlass.min(offset, self.per_step - 1), first_block + offset
            score = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                probability = sScore[i % self.ratio, column + i // self.ratio]
                score = cute.math.fma(probability, Float32(self.weights[i]), score)
            if (offset < self.per_step) & (block < gScores.shape[0]):
                gScores[block] = score


@compiled_once
def _compiled(dtype: torch.dtype, dim: int, group: int, blocks: Blocks, packed: bool, warpgroups: bool) -> Kernel:
    bounds, tiles = fake_tables() if packed else (None, None)
    return compile_kernel(
        TokenScores(dim, CUTE_DTYPES[dtype], group, blocks, Keys(blocks.length, blocks.stride), warpgroups),
        fake(dtype, None, None, None, dim),
        fake(dtype, None, None, None, dim),
        fake(torch.float32, None, None, None, aligned=False),
        fake(torch.float32, None, None, None, None, aligned=False),
        bounds,
        tiles,
        Float32(0.0),
        *[Int32(0)] * 3,
    )


def token_blocks(
    q: Tensor, k_cmp: Tensor, lse_cmp: Tensor, config: Any, *, start: int = 0, documents: Documents | None = None
) -> Tensor:
    """Choose blocks for each token (steps 3 and 4 of docs/semantics.md in token mode).

    Args:
        q: `[B,N,H,D]`, bf16 or fp16, queries of consecutive tokens; with documents their aligned rows.
        k_cmp: `[B,entries,H_kv,D]` in q's dtype; with documents aligned entries.
        lse_cmp: fp32 `[B,H,N]`, natural log, of attention to the visible entries; -inf where there are none.
        config: with the fields of nsa.config.NSAConfig; only selection, sizes and softmax_scale are read.
        start: position of q's first token.
        documents: what the rows and entries of a pack are, instead of `start`; T a multiple of ALIGNED_ROWS.

    Returns:
        int32 `[B,H_kv,N,k]`, ascending, padded with -1; with documents -1 in rows that are no token's.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    blocks = Blocks(
        config.compress_block_size,
        config.stride,
        config.select_size,
        config.num_selected_blocks,
        init=config.num_init_blocks,
        local=config.num_local_blocks,
    )
    _check(q, k_cmp, lse_cmp, config, blocks, documents, start)
    batch, rows, heads, dim = q.shape
    kv_heads, bounds, tiles, tile = k_cmp.shape[2], None, None, 0
    shape = (batch, kv_heads, rows, blocks.count)
    if documents is None:
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
    else:
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        bounds, tiles, tile = documents.bounds, documents.tiles, documents.tile
    if indices.numel() == 0:
        return indices
    packed = documents is not None
    score = _compiled(q.dtype, dim, heads // kv_heads, blocks, packed, has_warpgroups(q.device)).run
    choose = _best(blocks, packed).run
    q, k_cmp = vectorizable(q), vectorizable(k_cmp)
    lse_cmp = lse_cmp if lse_cmp.stride(-1) == 1 else lse_cmp.contiguous()
    scale, end = config.scale(dim) * LOG2_E, start + rows
    columns = -(-end // blocks.size)
    step = max(SCORE_BYTES // (4 * batch * kv_heads * columns) // ALIGNED_ROWS, 1) * ALIGNED_ROWS
    buffer = torch.empty((batch, kv_heads, min(step, rows), columns), dtype=torch.float32, device=q.device)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        seen = columns if packed else -(-(start + some.stop) // blocks.size)
        scores = buffer[:, :, : some.stop - first, :seen]
        where = end, start + first, tile
        score(q[:, some], k_cmp, lse_cmp[:, :, some], scores, bounds, tiles, scale, *where)
        choose(scores.view(torch.int32), indices[:, :, some], bounds, tiles, k_cmp.shape[1], *where)
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
    if len(overlap_weights(blocks)) > MAX_TOKEN_ENTRIES:
        raise ValueError(
            f"config must have l'/d + l/d - 1 <= {MAX_TOKEN_ENTRIES}, got compress_block_size={length}, "
            f"compress_stride={stride}, select_block_size={size}"
        )
    if blocks.count > MAX_TOKEN_BLOCKS:
        raise ValueError(f"config must have at most {MAX_TOKEN_BLOCKS} num_selected_blocks, got {blocks.count}")
    if documents is not None and (batch != 1 or start != 0 or documents.tile % ALIGNED_ROWS):
        raise ValueError(
            f"documents need B=1, start=0 and a tile that is a multiple of {ALIGNED_ROWS}, got {batch}, {start} and "
            f"{documents.tile}"
        )
