"""The best blocks of each token, shared by the heads of its group, in one pass over the compressed keys.

    p[h, i, j]      = exp(scale q_h[i] . k_cmp[j] - lse_cmp[h, i])        entry j visible to token i: j d + l-1 <= i
    score[i, b]     = sum_j overlap(j, b) / l  sum_h p[h, i, j]           h over the G heads of a key/value head
    indices[i]      = forced blocks, then the highest scores, the lower index first among equals; ascending

(equations 8 to 12 of arXiv 2502.11089, eq. 9 read as overlap in tokens). A CTA holds the queries of some tokens and G
heads in shared memory and walks over the compressed keys, ENTRIES at a time; then it goes on to other tokens, its next
turn. Half of its warps multiply: S^T = K Q^T, because it puts what is used over and over on the left: a warp keeps its
keys in registers while all heads of all tokens pass by. The probabilities of the heads add up in registers, in the
order of the heads; only their sums, of 8 or 16 tokens, go to shared memory. There the other half of the warps pools
them to block scores and merges what beats a token's k-th best into its list (select/topk.py), while the first half
multiplies for the next tokens. Masked entries become 0 after the sum, so what they hold reaches nothing.

The warps of the lists also load. The next keys come as soon as those that multiply have theirs in registers; in a
turn's last step these are the first ones of the next turn, and its queries take the place of those whose scores are
written. What the multiplying half waits for is given to it before blocks are merged, which takes long at times.

On Hopper the products are those of WGMMA, of 64 entries with up to 64 queries of 16 tokens, several heads at once; a
warpgroup has two in flight and adds up one while the next is computed. Elsewhere mma.sync, a head at a time, and the
next head's products under way while the probabilities of one add up.

Packed documents: tokens and entries lie aligned (documents.py), T a multiple of `tokens`, so that a turn has tokens of
one document; entries and blocks count from its beginning. Rows behind a document's end choose nothing, and turns that
have no others are skipped.

Near ties: scores are fp32 sums in a fixed order, the same bits in every run. They are off by at most a fraction

    2^-23 ((D/8 + 4) A + 4 |lse| + G + 8),      A and |lse| the largest scale |q| |k_cmp| and |lse| of the token's heads

(products summed in D/16 steps, units of log 2, exponential, sums), so a chosen set may differ from the exact one only
where scores differ by less than twice that.

Floor: 2 D FLOPs and one exponential for each visible (query, entry). 64K tokens, 64 heads of 128, d = 16: 2.2 TFLOP,
2.7 ms at 800 TFLOP/s (WGMMA; mma.sync 3.7 ms at 600), and 8.6e9 exponentials, 2.3 ms at 16 a cycle and SM, at the same
time. With few heads a group the lists cost as much: two thirds of the instructions with 4. Keys are read again in every
turn, from L2: 4.3 GB there with 32 tokens. Only the indices are written. Seen on three H200s: 5.1 to 5.3 ms, where 3.5
were expected; 5.4 ms once for 32 heads over 8, where 3 were.

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

from cute_kernels.limits import MAX_TOKEN_ENTRIES, MAX_TOKEN_GROUP
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.mma_sync import smem_tiles
from cute_kernels.mma.warp import LANES, LOG2_E
from cute_kernels.mma.wgmma import allocate_tiles, issue_mma, swizzled_tiles
from cute_kernels.pool.documents import DOCUMENT, ENTRY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.runtime.device import has_warpgroups, multiprocessors, vectorizable
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.topk import LIMIT, BestBlocks, Blocks

WARPS = 8
"""That multiply; as many more load, and keep the lists."""

HALF = WARPS * LANES
THREADS = 2 * HALF
MATH_REGISTERS, LIST_REGISTERS = 200, 56
KEYS_READ, SCORES_READY, KEYS_READY, SCORES_READ, QUERIES_READY = 1, 2, 3, 5, 7
"""Barriers: in the first two all that multiply arrive, and who keeps the lists waits; in the others the other way
around, and one for each four warps, which then need not wait for each other. Once in a step, KEYS_READY stands for the
keys and the queries of the first part, QUERIES_READY for those of the other parts where there are any."""

FOUR_WARPS = 4 * LANES

ENTRIES = MAX_TOKEN_ENTRIES
"""Compressed keys of a step."""

UNIT, COLUMNS = 64, 64
"""Entries, and the most queries, that a warpgroup multiplies at once."""

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
        self.columns = self.heads * tiling.rows

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
        ctas: Int32,  # that run at the same time
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
                (2, 1, 1),
                (UNIT, self.columns),
                warpgroup.OperandSource.RMEM,
            )
        else:
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            tiled_mma = cute.make_tiled_mma(
                op, (entry_warps, token_warps, 1), permutation_mnk=(16 * entry_warps, 8 * token_warps, 32)
            )
        count = self.tiling.tokens * self.group // self.columns
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
            swizzled_tiles(self.dtype, self.dim, count, self.columns)
            if const_expr(self.warpgroups)
            else smem_tiles(self.dtype, self.columns, self.dim, count),
            cute.select(smem_tiles(self.dtype, ENTRIES, self.dim, 1), mode=[0, 1]),
            cute.make_layout((self.tiling.rows, self.ratio, columns), stride=(stride, columns, 1)),
        ).launch(
            grid=[cutlass.min(self._items(mQ, mK), ctas), 1, 1],
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
        smem = cutlass.memory.SmemAllocator()
        rows, places = const_expr(self.tiling.tokens), const_expr(self.best.places)
        if const_expr(self.warpgroups):
            sQ = allocate_tiles(smem, self.dtype, layout_q)
        else:
            sQ = smem.allocate_tensor(self.dtype, layout_q, 1024)
        sK = smem.allocate_tensor(self.dtype, layout_k, 128)
        sScore = smem.allocate_tensor(Float32, layout_score, 16)
        sLse = smem.allocate_tensor(Float32, cute.make_layout((rows, self.group), stride=(1, rows)), 16)
        sBest = smem.allocate_tensor(Float32, cute.make_layout((rows, places), stride=(places, 1)), 16)
        sIndex = smem.allocate_tensor(Int32, cute.make_layout((rows, places), stride=(places, 1)), 16)
        sRow = smem.allocate_tensor(Int32, cute.make_layout((rows, 4), stride=(4, 1)), 16)

        task = mQ, mK, mBounds, mTiles, tokens, first_token, tile
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPS:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            if const_expr(self.warpgroups):
                self._score_by_warpgroups(tiled_mma, sQ, sK, sLse, sScore, sRow, scale, *task)
            else:
                self._score(tiled_mma, sQ, sK, sLse, sScore, sRow, scale, *task)
        else:
            cute.arch.setmaxregister_decrease(LIST_REGISTERS)
            self._keep_lists(mLse, mIndices, sQ, sK, sLse, sScore, sBest, sIndex, sRow, *task)

    # Items: the tokens of a tile and the heads of a group. A CTA has one after the other, each in a turn

    def _items(self, mQ: cute.Tensor, mK: cute.Tensor) -> Int32:
        return cute.ceil_div(mQ.shape[1], self.tiling.tokens) * mK.shape[2] * mK.shape[0]

    @cute.jit
    def _place(self, turn: Int32) -> Int32:
        """A turn's place in the order of items, the last tokens first.

        Back and forth, so that no CTA always has the longer ones of a sequence.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)

    @cute.jit
    def _item(
        self,
        turn: Int32,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        tokens: Int32,
        first_token: Int32,
        tile: Int32,
    ) -> tuple[Int32, ...]:
        """What a turn is about.

        Returns:
            Sequence, key/value head, first row, that row's token, and how many rows are tokens, none if not positive;
            of the document the tokens, the entries, and the first entry; steps, at least one.
        """
        item = self._items(mQ, mK) - 1 - self._place(turn)
        kv_heads, entries, first_entry = mK.shape[2], mK.shape[1], Int32(0)
        kv_head, batch = item % kv_heads, item // kv_heads % mK.shape[0]
        first_row = item // kv_heads // mK.shape[0] * self.tiling.tokens
        first_token += first_row
        num_rows = cutlass.min(mQ.shape[1] - first_row, self.tiling.tokens)
        if const_expr(mTiles is not None):
            document = cutlass.max(mTiles[DOCUMENT, first_row // tile], 0)  # unused tiles lie behind all documents
            first_token = first_row - mBounds[ROW, document]
            tokens, first_entry = mBounds[LENGTH, document], mBounds[ENTRY, document]
            entries = self.keys.visible(tokens - 1, entries)
        num_rows = cutlass.min(num_rows, tokens - first_token)
        visible = self.keys.visible(first_token + num_rows - 1, entries)  # of the last token, which sees the most
        steps = cutlass.max(cute.ceil_div(self.blocks.scored(visible), self.per_step), 1)
        return batch, kv_head, first_row, first_token, num_rows, tokens, entries, first_entry, steps

    @cute.jit
    def _seek(self, turn: Int32, *task: Any) -> Int32:
        """The first turn from `turn` on that has tokens; -1 if none has."""
        mQ, mK, _, mTiles, *_ = task
        items = self._items(mQ, mK)
        if const_expr(mTiles is not None):
            searching = self._place(turn) < items
            while searching:
                searching = self._item(turn, *task)[4] <= 0
                if searching:
                    turn += 1
                    searching = self._place(turn) < items
        return turn if self._place(turn) < items else Int32(-1)

    # Lists

    @cute.jit
    def _keep_lists(
        self,
        mLse: cute.Tensor,
        mIndices: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sBest: cute.Tensor,
        sIndex: cute.Tensor,
        sRow: cute.Tensor,
        *task: Any,
    ):
        """Load what is multiplied, one step or turn ahead, and keep the lists. Each warp has every eighth token."""
        mQ, mK, mBounds = task[:3]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS
        parts, each = const_expr(self.tiling.tokens // self.tiling.rows), const_expr(self.tiling.rows // WARPS)
        rScore = [cute.make_rmem_tensor(self.chunks, Float32) for _ in range(each)]
        turn = self._seek(Int32(0), *task)
        item = self._item(cutlass.max(turn, 0), *task)
        if turn >= 0:
            self._load_keys(mK, sK, Int32(0), *item)
            for part in cutlass.range(parts, unroll=1):
                self._load_queries(mQ, mLse, sQ, sLse, part, *item)
                self._begin_rows(sBest, sIndex, sRow, part, mBounds, *item)
            cute.arch.cp_async_commit_group()
            self._allow_step()
            self._allow(SCORES_READ)
        while turn >= 0:
            batch, kv_head, first_row, _, num_rows, _, _, _, steps = item
            following = self._seek(turn + 1, *task)
            following_item = self._item(cutlass.max(following, 0), *task)
            for step in cutlass.range(steps, unroll=1):
                last_step = step + 1 == steps
                changes = last_step & (following >= 0)
                first_block = step * self.per_step
                cute.arch.barrier(barrier_id=KEYS_READ, number_of_threads=THREADS)
                if changes:
                    self._load_keys(mK, sK, Int32(0), *following_item)
                elif not last_step:
                    self._load_keys(mK, sK, step + 1, *item)
                cute.arch.cp_async_commit_group()
                for part in cutlass.range(parts, unroll=1):
                    cute.arch.barrier(barrier_id=SCORES_READY, number_of_threads=THREADS)
                    for i in range_constexpr(each):
                        self._pool(sScore[i * WARPS + warp_index, None, None], rScore[i])
                    if changes:  # nobody needs this part's queries any more
                        self._load_queries(mQ, mLse, sQ, sLse, part, *following_item)
                        cute.arch.cp_async_commit_group()
                    # What the other half waits for comes before merging wherever it can. What the next turn's rows see
                    # must be there before their scores: with one part it is not yet
                    free = (not last_step) | (part + 1 < parts)
                    if const_expr(parts > 1):
                        free = free | changes
                    if free:
                        self._allow(SCORES_READ)
                    if (part == 0) & (not last_step):
                        self._allow_step()
                    for i in range_constexpr(each):
                        row = part * self.tiling.rows + i * WARPS + warp_index
                        if row < num_rows:
                            self._merge(rScore[i], sBest[row, None], sIndex[row, None], sRow[row, None], first_block)
                    if changes:  # its queries had the time of merging to arrive
                        if part == 0:
                            self._copies_arrive()
                            self._allow(KEYS_READY)
                        if const_expr(parts > 1):
                            if part + 1 == parts:
                                self._copies_arrive()
                                self._allow(QUERIES_READY)
                    if last_step:
                        self._write_rows(sIndex, mIndices[batch, kv_head, None, None], first_row, num_rows, part)
                    if changes:
                        self._begin_rows(sBest, sIndex, sRow, part, mBounds, *following_item)
                        if const_expr(parts == 1):
                            self._allow(SCORES_READ)
            turn, item = following, following_item

    @cute.jit
    def _begin_rows(
        self,
        sBest: cute.Tensor,
        sIndex: cute.Tensor,
        sRow: cute.Tensor,
        part: Int32,
        mBounds: cute.Tensor | None,
        *item: Int32,
    ):
        """What this warp's tokens of a part see and must choose."""
        _, _, _, first_token, _, tokens, entries, _, _ = item
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS
        cute.arch.sync_warp()
        for i in range_constexpr(self.tiling.rows // WARPS):
            row = part * self.tiling.rows + i * WARPS + warp_index
            if cute.arch.lane_idx() == 0:
                self.best.begin_row(sRow[row, None], first_token + row, tokens, entries, mBounds is not None)
            cute.arch.sync_warp()
            self.best.begin_list(sBest[row, None], sIndex[row, None], sRow[row, None])

    @cute.jit
    def _write_rows(self, sIndex: cute.Tensor, gIndices: cute.Tensor, first_row: Int32, num_rows: Int32, part: Int32):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS
        for i in range_constexpr(self.tiling.rows // WARPS):
            row = part * self.tiling.rows + i * WARPS + warp_index
            if row < num_rows:
                self.best.write_list(sIndex[row, None], gIndices[first_row + row, None])

    # Loading

    @cute.jit
    def _load_queries(
        self, mQ: cute.Tensor, mLse: cute.Tensor, sQ: cute.Tensor, sLse: cute.Tensor, part: Int32, *item: Int32
    ):
        """One part's, and -lse in units of log 2."""
        batch, kv_head, first_row, _, num_rows, _, _, _, _ = item
        thread, _, _ = cute.arch.thread_idx()
        thread -= HALF
        vectors, rows = const_expr(self.dim // VECTOR), const_expr(self.tiling.rows)
        at_once = const_expr(HALF // vectors // rows)  # heads
        vector, place = thread % vectors, thread // vectors
        token = place % rows
        row = part * rows + token
        if row < num_rows:
            gQ = cute.domain_offset((0, 0, kv_head * self.group, 0), mQ)[batch, first_row + row, None, None]
            for i in range_constexpr(-(-self.group // at_once)):
                # With one at once a number of Python, so that addresses are constants apart
                head = i if const_expr(at_once == 1) else i * at_once + place // rows
                if head < self.group:
                    sHead = cute.domain_offset((head % self.heads * rows, 0, head // self.heads), sQ)
                    self._copy(gQ[head, None], sHead[token, None, part * (self.group // self.heads)], vector)
        for i in cutlass.range(thread, rows * self.group, HALF):
            row, head = part * rows + i % rows, i // rows
            sLse[row, head] = Float32(0.0)
            if row < num_rows:
                sLse[row, head] = -LOG2_E * mLse[batch, kv_head * self.group + head, first_row + row]

    @cute.jit
    def _load_keys(self, mK: cute.Tensor, sK: cute.Tensor, step: Int32, *item: Int32):
        batch, kv_head, _, _, _, _, entries, first_entry, _ = item
        thread, _, _ = cute.arch.thread_idx()
        thread -= HALF
        vectors = const_expr(self.dim // VECTOR)
        vector, place = thread % vectors, thread // vectors
        first = step * self.per_step * self.ratio - self.before
        gK = cute.domain_offset((0, first_entry, 0, 0), mK)[batch, None, kv_head, None]
        if (first >= 0) & (first + ENTRIES <= entries):
            gPlace = cute.domain_offset((first + place, 0), gK)
            for row in range_constexpr(0, ENTRIES, HALF // vectors):
                self._copy(gPlace[row, None], cute.domain_offset((row, 0), sK)[place, None], vector)
        elif entries > 0:  # the nearest ones instead of those that do not exist, which nobody sees
            for row in range_constexpr(0, ENTRIES, HALF // vectors):
                entry = cutlass.min(cutlass.max(first + place + row, 0), entries - 1)
                self._copy(gK[entry, None], cute.domain_offset((row, 0), sK)[place, None], vector)

    @cute.jit
    def _copy(self, gRow: cute.Tensor, sRow: cute.Tensor, vector: Int32):
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(copy, *(cute.local_tile(row, (VECTOR,), (vector,)) for row in (gRow, sRow)))

    @cute.jit
    def _copies_arrive(self):
        """All that are under way; seen by WGMMA too."""
        cute.arch.cp_async_wait_group(0)
        if const_expr(self.warpgroups):
            cute.arch.fence_view_async_shared()

    # Probabilities

    @cute.jit
    def _score(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sRow: cute.Tensor,
        scale: Float32,
        *task: Any,
    ):
        """All turns. A warp multiplies for the next head of a step, be it another part's, while it adds up one."""
        thread, _, _ = cute.arch.thread_idx()
        parts = const_expr(self.tiling.tokens // self.tiling.rows)
        thr_mma = tiled_mma.get_slice(thread)
        tSrK = thr_mma.make_fragment_A(thr_mma.partition_shape_A((ENTRIES, self.dim)))
        tSrQ = thr_mma.make_fragment_B(thr_mma.partition_shape_B((self.tiling.rows, self.dim)))
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        copy_q = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread)
        tSsK, tSrK_copy = copy_k.partition_S(sK), copy_k.retile(tSrK)
        multiply = (tiled_mma, copy_q, copy_q.partition_S(sQ), copy_q.retile(tSrQ), tSrQ, tSrK)
        acc_shape = thr_mma.partition_shape_C((ENTRIES, self.tiling.rows))
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((ENTRIES, self.tiling.rows)))
        acc, next_acc, total = (cute.make_rmem_tensor(acc_shape, Float32) for _ in range(3))

        turn = self._seek(Int32(0), *task)
        while turn >= 0:
            steps = self._item(turn, *task)[-1]
            for step in cutlass.range(steps, unroll=1):
                self._wait_for(KEYS_READY)
                cute.copy(copy_k, tSsK, tSrK_copy)
                cute.arch.barrier_arrive(barrier_id=KEYS_READ, number_of_threads=THREADS)
                self._multiply(*multiply, Int32(0), acc)
                for part in cutlass.range(parts, unroll=1):
                    first_head = part * self.group
                    head_lse = cute.domain_offset((part * self.tiling.rows, 0), sLse)
                    total.fill(0.0)
                    for pair in cutlass.range((self.group - 1) // 2, unroll=1):
                        self._multiply(*multiply, first_head + 2 * pair + 1, next_acc)
                        self._add_probabilities(acc, total, self._lse(coordinates, head_lse[None, 2 * pair]), scale)
                        self._multiply(*multiply, first_head + 2 * pair + 2, acc)
                        self._add_probabilities(
                            next_acc, total, self._lse(coordinates, head_lse[None, 2 * pair + 1]), scale
                        )
                    if const_expr(self.group % 2 == 0):
                        self._multiply(*multiply, first_head + self.group - 1, next_acc)
                        self._add_probabilities(
                            acc, total, self._lse(coordinates, head_lse[None, self.group - 2]), scale
                        )
                    else:
                        for i in range_constexpr(cute.size(acc)):
                            next_acc[i] = acc[i]
                    if part + 1 < parts:
                        if const_expr(parts > 1):
                            if part == 0:
                                self._wait_for(QUERIES_READY)
                        self._multiply(*multiply, first_head + self.group, acc)
                    self._add_probabilities(
                        next_acc, total, self._lse(coordinates, head_lse[None, self.group - 1]), scale
                    )
                    self._store_scores((total,), sScore, (coordinates,), sRow, step, part)
            turn = self._seek(turn + 1, *task)

    @cute.jit
    def _allow(self, barrier: cutlass.Constexpr[int]):
        """By who keeps the lists."""
        for i in range_constexpr(HALF // FOUR_WARPS):
            cute.arch.barrier_arrive(barrier_id=barrier + i, number_of_threads=HALF + FOUR_WARPS)

    @cute.jit
    def _allow_step(self):
        """Keys, and the queries of all parts, once they are there."""
        self._copies_arrive()
        self._allow(KEYS_READY)
        if const_expr(self.tiling.tokens > self.tiling.rows):
            self._allow(QUERIES_READY)

    @cute.jit
    def _wait_for(self, barrier: cutlass.Constexpr[int]):
        """By who multiplies."""
        four_warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        cute.arch.barrier(barrier_id=barrier + four_warps, number_of_threads=HALF + FOUR_WARPS)

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
    def _lse(self, coordinates: cute.Tensor, sLse: cute.Tensor) -> cute.Tensor:
        """Of one head, in registers, for each product of a thread."""
        lse = cute.make_rmem_tensor(cute.size(coordinates), Float32)
        for i in range_constexpr(cute.size(lse)):
            lse[i] = sLse[coordinates[i][1]]
        return lse

    @cute.jit
    def _add_probabilities(self, acc: cute.Tensor, total: cute.Tensor, lse: cute.Tensor, scale: Float32):
        """total += exp(scale acc - lse), for `scale` and `lse` = -lse in units of log 2."""
        for i in range_constexpr(cute.size(total)):
            total[i] += cute.math.exp2(cute.math.fma(acc[i], scale, lse[i]), fastmath=True)

    @cute.jit
    def _score_by_warpgroups(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sLse: cute.Tensor,
        sScore: cute.Tensor,
        sRow: cute.Tensor,
        scale: Float32,
        *task: Any,
    ):
        """The same with WGMMA. A warpgroup multiplies one half of its keys while it adds up the other half."""
        thread, _, _ = cute.arch.thread_idx()
        rows = const_expr(self.tiling.rows)
        parts, sets = const_expr(self.tiling.tokens // rows), const_expr(self.group // self.heads)
        thr_mma = tiled_mma.get_slice(thread)
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_k = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread)
        tSsK = copy_k.partition_S(sK)
        halves = range(ENTRIES // 2 // UNIT)
        tSrK = [thr_mma.make_fragment_A(thr_mma.partition_shape_A((2 * UNIT, self.dim))) for _ in halves]
        tSrQ = thr_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sQ))
        coordinates = thr_mma.partition_C(cute.make_identity_tensor((ENTRIES, self.columns)))
        acc = [cute.make_rmem_tensor(thr_mma.partition_shape_C((2 * UNIT, self.columns)), Float32) for _ in halves]
        total = [cute.make_rmem_tensor(cute.size(acc[half]) // self.heads, Float32) for half in halves]
        first_head = cute.make_layout(cute.size(total[0]))
        coordinates = [cute.composition(coordinates[None, half, 0], first_head) for half in halves]

        turn = self._seek(Int32(0), *task)
        while turn >= 0:
            steps = self._item(turn, *task)[-1]
            for step in cutlass.range(steps, unroll=1):
                self._wait_for(KEYS_READY)
                for half in range_constexpr(2):
                    cute.copy(copy_k, tSsK[None, half, None], copy_k.retile(tSrK[half])[None, 0, None])
                cute.arch.barrier_arrive(barrier_id=KEYS_READ, number_of_threads=THREADS)
                issue_mma(tiled_mma, acc[0], tSrK[0], tSrQ[None, None, None, 0], False)
                for part in range_constexpr(parts):
                    for half in range_constexpr(2):
                        total[half].fill(0.0)
                    for i in range_constexpr(sets):
                        set_lse = cute.domain_offset((part * rows, i * self.heads), sLse)
                        at = part * sets + i
                        issue_mma(tiled_mma, acc[1], tSrK[1], tSrQ[None, None, None, at], False)
                        lse = [self._lse(coordinates[0], set_lse[None, head]) for head in range(self.heads)]
                        warpgroup.wait_group(1)
                        self._add_heads(acc[0], total[0], lse, scale)
                        if const_expr(at + 1 < parts * sets):
                            if const_expr(at + 1 == sets):
                                self._wait_for(QUERIES_READY)
                            issue_mma(tiled_mma, acc[0], tSrK[0], tSrQ[None, None, None, at + 1], False)
                            warpgroup.wait_group(1)
                        else:
                            warpgroup.wait_group(0)
                        self._add_heads(acc[1], total[1], lse, scale)
                    self._store_scores((*total,), sScore, (*coordinates,), sRow, step, Int32(part))
            turn = self._seek(turn + 1, *task)

    @cute.jit
    def _add_heads(self, acc: cute.Tensor, total: cute.Tensor, lse: list[cute.Tensor], scale: Float32):
        """_add_probabilities for several heads, whose queries follow each other in `acc`."""
        count = cute.size(total)
        for head in range_constexpr(self.heads):
            of_head = cute.make_tensor(acc.iterator + head * count, cute.make_layout(count))
            self._add_probabilities(of_head, total, lse[head], scale)

    @cute.jit
    def _store_scores(
        self,
        totals: tuple[cute.Tensor, ...],
        sScore: cute.Tensor,
        coordinates: tuple[cute.Tensor, ...],
        sRow: cute.Tensor,
        step: Int32,
        part: Int32,
    ):
        """Sums over the heads, 0 where an entry is not visible; for the warps that keep the lists."""
        first_entry = step * self.per_step * self.ratio - self.before
        first_row = part * self.tiling.rows
        self._wait_for(SCORES_READ)
        limits = [sRow[first_row + coordinates[0][i][1], LIMIT] for i in range(cute.size(totals[0]))]
        for k in range_constexpr(len(totals)):
            for i in range_constexpr(cute.size(totals[k])):
                entry, row = coordinates[k][i]
                visible = (first_entry + entry >= 0) & (first_entry + entry < limits[i])
                score = totals[k][i] if visible else Float32(0.0)
                sScore[row, entry % self.ratio, entry // self.ratio] = score
        cute.arch.barrier_arrive(barrier_id=SCORES_READY, number_of_threads=THREADS)

    # Scores of blocks

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
        *[Int32(0)] * 4,
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
        numbers = start + rows, start, tile, multiprocessors(q.device)
        run(vectorizable(q), vectorizable(k_cmp), lse_cmp, indices, bounds, tiles, scale, *numbers)
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
