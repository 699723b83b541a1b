"""Compressed attention of a step's queries, split over the entries, and each block's share of the probabilities.

    s[h, j]     = scale log2(e) q_h . k_cmp[j]                      entry j visible to the row's token
    o_partial   = softmax over the entries of a split . v_cmp       with its lse (tiles.py)
    L[h, b, t]  = log2 sum_{j in tile t} overlap(j, b) / l 2^s[h, j]        -inf if there are no such entries

The choice needs one number per row and block, although the rows' lse are known only once all splits are: 2^(L - lse) is
the contribution of the tile's entries to the block's score. A tile holds the entries that start in its whole blocks,
and reaches `reach` blocks further, whose L then come from two tiles.

Tile mode (docs/semantics.md) scores with the mean query m_h of the row's tile so far, and sums logits:

    L[h, b, t]  = sum_{j in tile t} overlap(j, b) s[h, j] / sum_j overlap(j, b)        s of m_h; 0 if there are none

A query row then takes TERMS product rows: the query, and the three 16-bit terms of its fp32 mean (tile_sums.py);
softmax and values of the means are computed and discarded.

Splits: splits.py; rows of a sequence are its key/value heads, and groups of `rows` query rows if there are more. CTAs
iterate over their tiles, one row after the other.

Floor: entries once, (D + D_v) 2 bytes every d tokens, and 4 H / H_kv bytes every l' tokens: 64K tokens, 4 heads of
128, d = 16: 8.4 MB and 0.26 MB, 2.1 us at 4.19 TB/s; 1M: 138 MB, 33 us.

Limits: d divides l and l'; l'/d at most KEYS, l/d at most the entries of a tile; D and D_v 64 or 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.attend.views import group_heads
from cute_kernels.decode.pages import Lengths, Paging, fake_lengths, fake_pages, fake_table
from cute_kernels.decode.splits import Splits
from cute_kernels.decode.tiles import KEYS, DecodeTiles, PagedKeys
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.mma_sync import MMA_K, QUAD, mask_after
from cute_kernels.mma.warp import divide
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, FLOATS, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.tile import QUERY_TERMS, TermScales
from cute_kernels.select.token import overlap_weights
from cute_kernels.select.topk import Blocks

TERMS = 1 + QUERY_TERMS
"""Product rows per query row in tile mode: the query, and the terms of the mean query."""


class ScoreTiles(NamedTuple):
    """Partition of entries and blocks into tiles."""

    blocks: int
    """Number of whole blocks per tile."""
    ratio: int
    """Number of entries that start in a block, l'/d."""
    reach: int
    """Number of later blocks that the tile's entries overlap."""

    @property
    def entries(self) -> int:
        return self.blocks * self.ratio

    @property
    def slots(self) -> int:
        """Number of blocks that a tile scores."""
        return self.blocks + self.reach

    @staticmethod
    def of(blocks: Blocks) -> ScoreTiles:
        ratio = blocks.size // blocks.stride
        return ScoreTiles(KEYS // ratio, ratio, -(-(blocks.length - blocks.stride) // blocks.size))


class Work(NamedTuple):
    """Tiles of a row, processed by one CTA."""

    first_entry: Int32
    """First entry of tile 0."""
    entries: Int32
    """Number of entries of the sequence."""
    token: Int32
    """Token index of the step's first query."""
    first_row: Int32
    num_rows: Int32
    """Number of the CTA's query rows of new tokens: token * G + head, from `first_row` on. May be negative."""
    scale: Float32
    sScore: cute.Tensor
    """fp32 [rows, KEYS]"""
    gScores: cute.Tensor
    """fp32 [tiles, slots, rows], from tile 0 and row `first_row` on."""


class ScoreEntries(DecodeTiles):
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    group, queries, blocks, page_size: G; N_q; selection parameters; tokens per page.
    ctas_per_sm: maximum CTAs per SM.
    terms: product rows per query row: 1, or TERMS in tile mode.
    """

    def __init__(
        self,
        dim: int,
        v_dim: int,
        dtype: Any,
        group: int,
        queries: int,
        blocks: Blocks,
        page_size: int,
        ctas_per_sm: int = 2,
        terms: int = 1,
    ) -> None:
        paging = Paging.of_entries(page_size, blocks.length, blocks.stride)
        rows = group * queries * terms
        super().__init__(dim, v_dim, dtype, rows, paging, row_bytes=4 * (KEYS + 1), ctas_per_sm=ctas_per_sm)
        self.group, self.query_rows, self.terms = group, group * queries, terms
        self.term_scale = TermScales.of(dtype).later
        self.cta_rows = self.rows // self.terms  # query rows per CTA
        self.row_groups = -(-self.query_rows // self.cta_rows)
        self.keys_stay = self.row_groups > 1
        self.keys = Keys(blocks.length, blocks.stride)
        self.tiles, self.weights = ScoreTiles.of(blocks), overlap_weights(blocks)
        self.splits = Splits(self.keys, self.tiles.entries)

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        group: int,
        queries: int,
        blocks: Blocks,
        page_size: int,
        ctas_per_sm: int = 2,
        terms: int = 1,
    ) -> Kernel:
        kernel = ScoreEntries(*dims, CUTE_DTYPES[dtype], group, queries, blocks, page_size, ctas_per_sm, terms)
        slots = page_size // blocks.stride
        return compile_kernel(
            kernel,
            fake(dtype, None, None, None, dims[0]),
            *[fake_pages(dtype, slots, dim) for dim in dims],
            fake_table(),
            *fake_lengths(),
            fake(torch.float32, None, kernel.cta_rows, dims[1]),
            fake(torch.float32, None, kernel.cta_rows, aligned=False),
            fake_scores(group, queries, kernel.tiles),
            Float32(0.0),
            Int32(0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N_q, H terms, D]
        mKEntries: cute.Tensor,  # [pages, page_size / d, H_kv, D]
        mVEntries: cute.Tensor,  # [pages, page_size / d, H_kv, D_v]
        mTable: cute.Tensor,  # int32 [B, pages per sequence]
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        mO: cute.Tensor,  # fp32 [partials, cta_rows, D_v]
        mLse: cute.Tensor,  # fp32 [partials, cta_rows], in base 2
        mScores: cute.Tensor,  # fp32 [B, H_kv, tiles, slots, N_q G]
        scale: Float32,  # softmax_scale * log2(e)
        ctas: Int32,
        stream: Any,
    ):
        queries = group_heads(mQ, self.group * self.terms)
        tensors = queries, mKEntries, mVEntries, mTable, Lengths(mCached, mNew), mO, mLse, mScores
        self.kernel(*tensors, scale, self.layouts()).launch(grid=[ctas, 1, 1], **self.launch(stream))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, N_q, H_kv, G terms, D]
        mKEntries: cute.Tensor,
        mVEntries: cute.Tensor,
        mTable: cute.Tensor,
        lengths: Lengths,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mScores: cute.Tensor,
        scale: Float32,
        layouts: Any,
    ):
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        buffers = self.allocate(smem, layouts)
        # [rows, KEYS], padded against bank conflicts
        sScore = smem.allocate_tensor(Float32, cute.make_layout((self.rows, KEYS), stride=(KEYS + 1, 1)), 16)
        heads = mKEntries.shape[2] * self.row_groups
        per_cta = self.splits.cut(lengths, Int32(0), heads, ctas).per_cta
        tile, end = cta * per_cta, (cta + 1) * per_cta
        row = self.splits.find(lengths, tile, heads)
        while row.tiles > 0:
            batch, kv_head = row.batch, row.head // self.row_groups
            first_row = row.head % self.row_groups * self.cta_rows
            num_rows = cutlass.min(lengths.mNew[batch] * self.group - first_row, self.cta_rows)
            gQ, end_row = mQ[batch, None, kv_head, None, None], first_row + num_rows  # [N_q, G terms, D]
            self.load_queries(gQ, buffers.sQ, first_row * self.terms, end_row * self.terms)
            first_tile = tile - row.first
            num_tiles = cutlass.min(end, row.first + row.tiles) - tile
            work = Work(
                first_tile * self.tiles.entries,
                self.splits.entries(lengths.tokens(batch)),
                lengths.mCached[batch],
                first_row,
                num_rows,
                scale,
                sScore,
                cute.domain_offset((first_tile, 0, first_row), mScores[batch, kv_head, None, None, None]),
            )
            if work.first_entry + num_tiles * self.tiles.entries > self.splits.entries(lengths.mCached[batch]):
                cute.arch.griddepcontrol_wait()  # for entries that the step completes
            keys = PagedKeys(mTable[batch, None], mKEntries, mVEntries, kv_head)
            of_warp = self.attend(keys, buffers, num_tiles, scale, work)
            place = cta + batch * heads + row.head
            self.store_partial(of_warp, buffers, mO[place, None, None], mLse[place, None], num_rows, self.terms)
            tile += num_tiles
            row = self.splits.find(lengths, tile if tile < end else Int32(NO_TILE), heads)
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def bounds(self, tile: Int32, work: Work) -> tuple[Int32, Int32]:
        first = work.first_entry + tile * self.tiles.entries
        return first, cutlass.min(work.entries, first + self.tiles.entries)

    @cute.jit
    def finish_scores(self, S: cute.Tensor, tile: Int32, work: Work):
        """Mask, and write the blocks' L."""
        lane = cute.arch.lane_idx()
        row_warp, key_warp = self.place()
        first, end = self.bounds(tile, work)
        column = key_warp * self.warp_keys
        for r in range_constexpr(2):
            row = row_warp * MMA_K + r * 8 + lane // QUAD
            token = work.token + (work.first_row + row // self.terms) // self.group
            mask_after(S[None, r, 0, None], self.keys.visible(token, end) - 1 - first - column)
            for n in range_constexpr(self.warp_keys // 8):
                for c in range_constexpr(2):
                    at = column + n * 8 + lane % QUAD * 2 + c
                    work.sScore[row, at] = S[c, r, 0, n] * work.scale
        cute.arch.sync_threads()  # the tile's scores are written
        if const_expr(self.terms == 1):
            self._store_scores(tile, work)
        else:
            self._store_sums(tile, work)

    @cute.jit
    def _store_scores(self, tile: Int32, work: Work):
        """Store L of the tile's blocks; the next tile's scores wait for the barrier before its products."""
        thread, _, _ = cute.arch.thread_idx()
        before = const_expr(len(self.weights) - self.tiles.ratio)  # entries that overlap a block but start before it
        rows = const_expr(min(self.query_rows, self.cta_rows))
        for item in cutlass.range(thread, self.tiles.slots * rows, self.threads, unroll=1):
            slot, row = divide(item, rows)
            rScore = cute.make_rmem_tensor(len(self.weights), Float32)  # scores of the entries that overlap the block
            rScore.fill(-Float32.inf)
            top = -Float32.inf
            for i in range_constexpr(len(self.weights)):
                entry = slot * self.tiles.ratio - before + i
                if (entry >= 0) & (entry < self.tiles.entries):
                    rScore[i] = work.sScore[row, entry]
                top = cute.arch.fmax(top, rScore[i])
            base = Float32(0.0) if top == -Float32.inf else top
            total = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                total = cute.math.fma(cute.math.exp2(rScore[i] - base, fastmath=True), self.weights[i], total)
            if row < work.num_rows:
                work.gScores[tile, slot, row] = base + cute.math.log2(total, fastmath=True)

    @cute.jit
    def _store_sums(self, tile: Int32, work: Work):
        """Store L of the tile's blocks in tile mode. Proportions are divided first, so that equal ones tie."""
        thread, _, _ = cute.arch.thread_idx()
        rows, length = const_expr(min(self.query_rows, self.cta_rows)), self.keys.length
        before = const_expr(len(self.weights) - self.tiles.ratio)
        first, _ = self.bounds(tile, work)
        for item in cutlass.range(thread, self.tiles.slots * rows, self.threads, unroll=1):
            slot, row = divide(item, rows)
            visible = self.keys.visible(work.token + (work.first_row + row) // self.group, work.entries)
            own = slot * self.tiles.ratio  # index in the tile of the first entry that starts in the block
            overlap = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                entry = first + own + (i - before)
                if (entry >= 0) & (entry < visible):
                    overlap += round(self.weights[i] * length)
            total = Float32(0.0)
            for i in range_constexpr(len(self.weights)):
                entry = own + (i - before)
                if (entry >= 0) & (entry < self.tiles.entries) & (first + entry < visible):
                    score = Float32(0.0)
                    for term in range_constexpr(TERMS - 1, 0, -1):  # smallest first
                        score = score / self.term_scale + work.sScore[row * TERMS + term, cutlass.max(entry, 0)]
                    total += score * (Float32(round(self.weights[i] * length)) / overlap)
            if row < work.num_rows:
                work.gScores[tile, slot, row] = total


NO_TILE = (1 << 31) - 1


def fake_scores(group: int, queries: int, tiles: ScoreTiles) -> Any:
    """[B, H_kv, tiles, slots, N_q G]; a token's heads are whole vectors if G allows."""
    return fake(torch.float32, None, None, None, tiles.slots, group * queries, aligned=group % FLOATS == 0)
