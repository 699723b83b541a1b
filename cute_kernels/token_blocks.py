"""The best blocks of each token, shared by the heads of its group, in one pass over the compressed keys.

    p[h, i, j]      = exp(scale q_h[i] . k_cmp[j] - lse_cmp[h, i])        entry j visible to token i: j d + l-1 <= i
    score[i, b]     = sum_j overlap(j, b) / l  sum_h p[h, i, j]           h over the G heads of a key/value head
    indices[i]      = forced blocks, then the highest scores, the lower index first among equals; ascending

(equations 8 to 12 of arXiv 2502.11089, eq. 9 read as overlap in tokens). A CTA holds the queries of some tokens and G
heads in shared memory and walks over the compressed keys, ENTRIES at a time. S^T = K Q^T, because that puts what is
used over and over on the left: a warp keeps its keys in registers while all heads of all tokens pass by. The
probabilities of the heads add up in registers, in the order of the heads; only their sums, of 8 or 16 tokens (a part),
go to shared memory. From there each warp pools the scores of one token to blocks and merges what beats the token's
k-th best into its list (best_blocks.py), while the products of the next part or step are under way. Masked entries
become 0 after the sum, so what they hold reaches nothing. Once all warps have their keys, the next ones are fetched.

On Hopper the products are those of WGMMA: a warpgroup multiplies 64 entries with up to 64 queries of 16 tokens, several
heads at once. It has one product at a time, for four warpgroups take turns by themselves: some wait for the tensor
cores while others take exponentials. Elsewhere mma.sync, a head at a time.

Packed documents: tokens and entries lie aligned (documents.py), T a multiple of `tokens`, so that a CTA has tokens of
one document; entries and blocks count from its beginning. Rows behind a document's end choose nothing.

Near ties: scores are fp32 sums in a fixed order, the same bits in every run. They are off by at most a fraction

    2^-23 ((D/8 + 4) A + 4 |lse| + G + 8),      A and |lse| the largest scale |q| |k_cmp| and |lse| of the token's heads

(products summed in D/16 steps, units of log 2, exponential, sums), so a chosen set may differ from the exact one only
where scores differ by less than twice that.

Floor: 2 D FLOPs and one exponential for each visible (query, entry). 64K tokens, 64 heads of 128, d = 16: 2.2 TFLOP,
2.7 ms at 800 TFLOP/s (WGMMA; mma.sync 3.7 ms at 600), and 8.6e9 exponentials, 2.3 ms at 16 a cycle and SM, at the same
time. With few heads a group the lists cost as much: two thirds of the instructions with 4. Keys are read again by every
CTA, from L2: 4.3 GB there with 32 tokens. Only the indices are written. Seen once on an H200: 5.6 to 5.8 ms, where 3.5
were expected, and 5.4 ms for 32 heads over 8, where 3 were.

Limits: D 64 or 128; G at most MAX_GROUP; d divides l and l'; l'/d + l/d - 1 <= ENTRIES; causal; shared memory for k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers
from torch import Tensor

from cute_kernels.best_blocks import LIMIT, BestBlocks, Blocks
from cute_kernels.block_lists import Keys
from cute_kernels.device import has_warpgroups, vectorizable
from cute_kernels.documents import DOCUMENT, ENTRY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.support import MAX_TOKEN_ENTRIES, MAX_TOKEN_GROUP
from cute_kernels.warp import LANES, LOG2_E

WARPS = 16
THREADS = WARPS * LANES

ENTRIES = MAX_TOKEN_ENTRIES
"""Compressed keys of a step."""

COLUMNS = 64
"""The most queries that a warpgroup multiplies at once."""

MAX_GROUP = MAX_TOKEN_GROUP
DIMS = (64, 128)
SMEM_BYTES = 227 << 10
"""What a CTA can have on Hopper and on Blackwell."""


class Tiling(NamedTuple):
    """How a CTA is cut."""

    tokens: int
    """Of a CTA."""
    token_warps: int
    """Warps next to each other along the tokens, 8 each; the others stand along the entries."""

    @property
    def entry_warps(self) -> int:
        return WARPS // self.token_warps

    @property
    def rows(self) -> int:
        """Tokens that are multiplied, and chosen for, at once."""
        return 8 * self.token_warps


TILINGS = (Tiling(64, 2), Tiling(32, 2), Tiling(16, 2), Tiling(8, 1))


class Products(NamedTuple):
    """What a thread multiplies, and where its numbers lie."""

    mma: cute.TiledMma
    copies: Any
    """From shared memory: (copy, from, to) of its keys, and likewise of queries where WGMMA does not read them."""
    keys: cute.Tensor
    """In registers, [., ., D / 16]."""
    queries: cute.Tensor
    """[., ., D / 16], in registers; of WGMMA [., ., D / 16, sets of heads]."""
    acc: cute.Tensor
    coordinates: cute.Tensor
    """(entry of the step, row of the part) of each number of a head."""


def smem_bytes(tiling: Tiling, dim: int, group: int, blocks: Blocks) -> int:
    """Shared memory of a CTA."""
    scores = tiling.rows * score_layout(blocks)[1] * 4
    places = -(-blocks.count // LANES) * LANES
    per_token = group * (2 * dim + 4) + places * 8 + 4 * 4
    return tiling.tokens * per_token + ENTRIES * dim * 2 + scores + 1024  # alignment


def choose_tiling(dim: int, group: int, blocks: Blocks) -> Tiling | None:
    """As many tokens as fit: keys are read once for them."""
    fitting = (tiling for tiling in TILINGS if smem_bytes(tiling, dim, group, blocks) <= SMEM_BYTES)
    return next(fitting, None)


def score_layout(blocks: Blocks) -> tuple[int, int]:
    """Strides of a row of scores: between the entries of a block, and between rows; chosen against bank conflicts.

    Entry r b + i of r = l'/d lies at column b of row i, so that lanes that pool consecutive blocks read consecutive
    numbers. Lanes of a warp write 8 entries of 4 pairs of tokens at once.
    """
    ratio = blocks.size // blocks.stride
    columns = -(-ENTRIES // ratio)
    columns += (max(1, 8 // ratio) - columns) % 8
    return columns, ratio * columns + (4 - ratio * columns) % 16


def overlap_weights(blocks: Blocks) -> list[float]:
    """overlap / l of the entries that overlap a block, from the first one on; the same for every block."""
    length, stride, size = blocks.length, blocks.stride, blocks.size
    starts = range(stride - length, size, stride)
    return [(min(start + length, size) - max(start, 0)) / length for start in starts]


class TokenBlocks:
    """Args: G, what to choose, when a token sees an entry, and whether to multiply with WGMMA (sm_90a only)."""

    def __init__(self, dim: int, dtype: Any, group: int, blocks: Blocks, keys: Keys, warpgroups: bool = False) -> None:
        self.dim, self.dtype, self.group, self.blocks, self.keys = dim, dtype, group, blocks, keys
        self.warpgroups = warpgroups
        tiling = choose_tiling(dim, group, blocks)
        if tiling is None:
            raise ValueError(f"no tiling for D={dim}, G={group}, {blocks}")
        self.tiling = tiling
        self.best = BestBlocks(blocks, keys, tile=1)
        self.weights = overlap_weights(blocks)
        self.ratio = blocks.size // blocks.stride
        self.before = len(self.weights) - self.ratio  # entries that begin in front of the block that they overlap
        self.per_step = blocks.per_step(ENTRIES)
        self.chunks = -(-self.per_step // LANES)
        self.heads = 1
        """Whose products are computed at once."""
        if warpgroups:
            self.heads = max(h for h in range(1, group + 1) if group % h == 0 and h * tiling.rows <= COLUMNS)
        self.columns, self.sets = self.heads * tiling.rows, group // self.heads

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
        mIndices: cute.Tensor,  # int32 [B, H_kv, N, k]
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        scale: Float32,
        tokens: Int32,  # of the sequence; with mBounds not read
        first_token: Int32,  # number of mQ's first row
        tile: Int32,  # T of the documents
        stream: Any,
    ):
        entry_warps, token_warps = self.tiling.entry_warps, self.tiling.token_warps
        if const_expr(self.warpgroups):
            tiled_mma = hopper_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (WARPS // 4, 1, 1),
                (ENTRIES // (WARPS // 4), self.columns),
                warpgroup.OperandSource.RMEM,
            )
        else:
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            tiled_mma = cute.make_tiled_mma(
                op, (entry_warps, token_warps, 1), permutation_mnk=(16 * entry_warps, 8 * token_warps, 32)
            )
        columns, stride = score_layout(self.blocks)
        self.kernel(
            mQ,
            mK,
            mLse,
            mIndices,
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
            self._smem_layout(ENTRIES, self.dim),
            cute.make_layout((self.tiling.rows, self.ratio, columns), stride=(stride, columns, 1)),
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
        mIndices: cute.Tensor,
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
            document = cutlass.max(mTiles[DOCUMENT, first_row // tile], 0)  # unused tiles lie behind all documents
            first_token = first_row - mBounds[ROW, document]
            tokens = mBounds[LENGTH, document]
            entries = self.keys.visible(tokens - 1, entries)
            mK = cute.domain_offset((0, mBounds[ENTRY, document], 0, 0), mK)
        num_rows = cutlass.min(num_rows, tokens - first_token)  # may be negative
        mQ = cute.domain_offset((0, first_row, 0, 0), mQ)
        mLse = cute.domain_offset((0, 0, first_row), mLse)
        mIndices = cute.domain_offset((0, 0, first_row, 0), mIndices)

        smem = cutlass.memory.SmemAllocator()
        rows, places = const_expr(self.tiling.tokens), const_expr(self.best.places)
        if const_expr(self.warpgroups):
            sQ = smem.allocate_tensor(self.dtype, layout_q.outer, 1024, swizzle=layout_q.inner)
        else:
            sQ = smem.allocate_tensor(self.dtype, layout_q, 1024)
        sK = smem.allocate_tensor(self.dtype, layout_k, 128)
        sScore = smem.allocate_tensor(Float32, layout_score, 16)
        sLse = smem.allocate_tensor(Float32, cute.make_layout((rows, self.group), stride=(1, rows)), 16)
        sBest = smem.allocate_tensor(Float32, cute.make_layout((rows, places), stride=(places, 1)), 16)
        sIndex = smem.allocate_tensor(Int32, cute.make_layout((rows, places), stride=(places, 1)), 16)
        sRow = smem.allocate_tensor(Int32, cute.make_layout((rows, 4), stride=(4, 1)), 16)

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
            self.best.begin_row(sRow[thread, None], first_token + thread, tokens, entries, mBounds is not None)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        if const_expr(self.warpgroups):
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        parts = const_expr(rows // self.tiling.rows)
        for part in range_constexpr(parts):
            row = part * self.tiling.rows + warp_index  # the warp keeps the lists of these
            if warp_index < self.tiling.rows:
                self.best.begin_list(sBest[row, None], sIndex[row, None], sRow[row, None])

        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        if const_expr(self.warpgroups):
            products = self._by_warpgroups(tiled_mma, load, sQ, sK)
        else:
            products = self._by_warps(tiled_mma, load, sQ, sK)
        rScore = cute.make_rmem_tensor(self.chunks, Float32)
        self._begin_step(products)
        for step in cutlass.range(steps, unroll=1):
            if step + 1 < steps:
                cute.arch.sync_threads()  # all warps have their keys
                self._load_keys(mK, sK, entries, batch, kv_head, step + 1, thread, THREADS)
            cute.arch.cp_async_commit_group()
            for part in range_constexpr(parts):
                total = self._sum_of_heads(products, part, sLse, scale)
                if const_expr(part + 1 < parts):
                    self._start(products, Int32((part + 1) * self.sets))
                else:
                    cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()  # the scores of the part before have been pooled, and all keys are there
                self._store_scores(total, sScore, products.coordinates, sRow, step, part)
                cute.arch.sync_threads()
                self._pool(sScore[warp_index % self.tiling.rows, None, None], rScore)
                if const_expr(part + 1 == parts):
                    self._begin_step(products)  # after the last one of no use, and no harm
                row = part * self.tiling.rows + warp_index
                if (warp_index < self.tiling.rows) & (row < num_rows):
                    self._merge(rScore, sBest[row, None], sIndex[row, None], sRow[row, None], step * self.per_step)
        if const_expr(self.warpgroups):
            warpgroup.wait_group(0)
        for part in range_constexpr(parts):
            row = part * self.tiling.rows + warp_index
            if (warp_index < self.tiling.rows) & (row < num_rows):
                self.best.write_list(sIndex[row, None], mIndices[batch, kv_head, row, None])

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
        for i in range_constexpr(ENTRIES * vectors // threads):
            row = i * (threads // vectors) + place
            if (first + row >= 0) & (first + row < entries):
                cute.copy(
                    copy,
                    cute.local_tile(mK[batch, first + row, kv_head, None], (VECTOR,), (vector,)),
                    cute.local_tile(sK[row, None], (VECTOR,), (vector,)),
                )

    # Products

    @cute.jit
    def _by_warps(self, tiled_mma: cute.TiledMma, load: cute.CopyAtom, sQ: cute.Tensor, sK: cute.Tensor) -> Products:
        thread, _, _ = cute.arch.thread_idx()
        thr_mma = tiled_mma.get_slice(thread)
        keys = thr_mma.make_fragment_A(thr_mma.partition_shape_A((ENTRIES, self.dim)))
        queries = thr_mma.make_fragment_B(thr_mma.partition_shape_B((self.tiling.rows, self.dim)))
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_q = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        copies = (
            (copy_k, copy_k.partition_S(sK), copy_k.retile(keys)),
            (copy_q, copy_q.partition_S(sQ), copy_q.retile(queries)),
        )
        shape = ENTRIES, self.tiling.rows
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C(shape), Float32)
        return Products(tiled_mma, copies, keys, queries, acc, thr_mma.partition_C(cute.make_identity_tensor(shape)))

    @cute.jit
    def _by_warpgroups(
        self, tiled_mma: cute.TiledMma, load: cute.CopyAtom, sQ: cute.Tensor, sK: cute.Tensor
    ) -> Products:
        thread, _, _ = cute.arch.thread_idx()
        thr_mma = tiled_mma.get_slice(thread)
        keys = thr_mma.make_fragment_A(thr_mma.partition_shape_A((ENTRIES, self.dim)))
        queries = thr_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sQ))
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copies = ((copy_k, copy_k.partition_S(sK), copy_k.retile(keys)),)
        shape = ENTRIES, self.columns
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C(shape), Float32)
        coordinates = thr_mma.partition_C(cute.make_identity_tensor(shape))
        first_head = cute.make_layout(cute.size(acc) // self.heads)
        return Products(tiled_mma, copies, keys, queries, acc, cute.composition(coordinates, first_head))

    @cute.jit
    def _begin_step(self, products: Products):
        """Read the keys, and start the first product."""
        cute.copy(*products.copies[0])
        self._start(products, Int32(0))

    @cute.jit
    def _start(self, products: Products, at: Int32):
        """acc = keys . queries of a set of heads; sets follow each other through all parts."""
        mma, copies, keys, queries, acc, _ = products
        if const_expr(self.warpgroups):
            warpgroup.fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, False)
            for c in range_constexpr(self.dim // 16):
                cute.gemm(atom, acc, keys[None, None, c], queries[None, None, c, at], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
        else:
            copy, sQ, rQ = copies[1]
            acc.fill(0.0)
            cute.copy(copy, sQ[None, 0, None, at], rQ[None, 0, None])
            for c in range_constexpr(self.dim // 16):
                cute.gemm(mma, acc, keys[None, None, c], queries[None, None, c], acc)

    # Probabilities

    @cute.jit
    def _sum_of_heads(
        self, products: Products, part: cutlass.Constexpr[int], sLse: cute.Tensor, scale: Float32
    ) -> cute.Tensor:
        """The sums of a part's probabilities over the heads. Its first product has been started."""
        total = cute.make_rmem_tensor(cute.size(products.coordinates), Float32)
        total.fill(0.0)
        sLse = cute.domain_offset((part * self.tiling.rows, 0), sLse)
        first = part * self.sets
        for i in range_constexpr(self.sets - 1):
            self._add_set(products, total, sLse, i * self.heads, scale)
            self._start(products, Int32(first + i + 1))
        self._add_set(products, total, sLse, (self.sets - 1) * self.heads, scale)
        return total

    @cute.jit
    def _add_set(self, products: Products, total: cute.Tensor, sLse: cute.Tensor, first_head: Int32, scale: Float32):
        """total += exp(scale acc - lse) of each head of a set, for `scale` and -lse in units of log 2."""
        acc, coordinates, count = products.acc, products.coordinates, cute.size(total)
        if const_expr(self.warpgroups):
            warpgroup.wait_group(0)
        for head in range_constexpr(self.heads):
            for i in range_constexpr(count):
                lse = sLse[coordinates[i][1], first_head + head]
                product = cute.math.fma(acc[head * count + i], scale, lse)
                total[i] += cute.math.exp2(product, fastmath=True)

    # Scores of blocks

    @cute.jit
    def _store_scores(
        self,
        total: cute.Tensor,
        sScore: cute.Tensor,
        coordinates: cute.Tensor,
        sRow: cute.Tensor,
        step: Int32,
        part: cutlass.Constexpr[int],
    ):
        """Sums over the heads, 0 where an entry is not visible."""
        first_entry = step * self.per_step * self.ratio - self.before
        first_row = part * self.tiling.rows
        limits = [sRow[first_row + coordinates[i][1], LIMIT] for i in range(cute.size(total))]
        for i in range_constexpr(cute.size(total)):
            entry, row = coordinates[i]
            visible = (first_entry + entry >= 0) & (first_entry + entry < limits[i])
            score = total[i] if visible else Float32(0.0)
            sScore[row, entry % self.ratio, entry // self.ratio] = score

    @cute.jit
    def _pool(self, sScore: cute.Tensor, rScore: cute.Tensor):
        """One token's scores of entries to those of blocks, LANES blocks at a time."""
        for chunk in range_constexpr(self.chunks):
            column = cutlass.min(chunk * LANES + cute.arch.lane_idx(), self.per_step - 1)
            score = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                probability = sScore[i % self.ratio, column + i // self.ratio]
                score = cute.math.fma(probability, Float32(self.weights[i]), score)
            rScore[chunk] = score

    @cute.jit
    def _merge(
        self, rScore: cute.Tensor, sBest: cute.Tensor, sIndex: cute.Tensor, sRow: cute.Tensor, first_block: Int32
    ):
        """Merge one token's blocks into its list."""
        threshold = sBest[self.blocks.count - 1]
        for chunk in range_constexpr(self.chunks):
            offset = chunk * LANES + cute.arch.lane_idx()
            score, block = rScore[chunk], first_block + offset
            scored = (self.blocks.first_entry(block) < sRow[LIMIT]) & (offset < self.per_step)
            free = self.best.is_free(sRow, block)
            candidates = cute.arch.vote_ballot_sync(scored & free & (score > threshold))
            if candidates != 0:
                threshold = self.best.merge(sBest, sIndex, score, block, candidates)


@compiled_once
def _compiled(dtype: torch.dtype, dim: int, group: int, blocks: Blocks, packed: bool, warpgroups: bool) -> Kernel:
    bounds, tiles = fake_tables() if packed else (None, None)
    return compile_kernel(
        TokenBlocks(dim, CUTE_DTYPES[dtype], group, blocks, Keys(blocks.length, blocks.stride), warpgroups),
        fake(dtype, None, None, None, dim),
        fake(dtype, None, None, None, dim),
        fake(torch.float32, None, None, None, aligned=False),
        fake(torch.int32, None, None, None, blocks.count, aligned=False),
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
        documents: what the rows and entries of a pack are, instead of `start`; T a multiple of the tokens of a CTA.

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
    shape = (batch, k_cmp.shape[2], rows, blocks.count)
    bounds, tiles, tile = None, None, 0
    if documents is None:
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
    else:
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        bounds, tiles, tile = documents.bounds, documents.tiles, documents.tile
    if indices.numel() > 0:
        hopper = has_warpgroups(q.device)
        run = _compiled(q.dtype, dim, heads // k_cmp.shape[2], blocks, documents is not None, hopper).run
        lse_cmp = lse_cmp if lse_cmp.stride(-1) == 1 else lse_cmp.contiguous()
        scale = config.scale(dim) * LOG2_E
        run(vectorizable(q), vectorizable(k_cmp), lse_cmp, indices, bounds, tiles, scale, start + rows, start, tile)
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
    if len(overlap_weights(blocks)) > ENTRIES:
        raise ValueError(
            f"config must have l'/d + l/d - 1 <= {ENTRIES}, got compress_block_size={length}, "
            f"compress_stride={stride}, select_block_size={size}"
        )
    tiling = choose_tiling(dim, heads // kv_heads, blocks)
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
