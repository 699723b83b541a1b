"""The best blocks of each token from the scores of all blocks (token_blocks.py), for each key/value head by a warp.

All scores of a row are there at once, so nothing but the winners is compared with the list: a lane has 32 scores of a
piece of PIECE blocks in registers and the highest one of each GROUP of them. The highest of the warp goes into the
list (best_blocks.py says which blocks, and in which order) and out of the scores, and so on while it beats the list's
last place: k times for the first piece, rarely for later ones. Scores are compared as the integers that their bits are,
in which order numbers from 0 on have too; what is forced, not scored or not a number is -1.

Floor: every score is read once. 64K tokens, 4 key/value heads, l' = 64: 0.54 GB, 0.13 ms at 4.2 TB/s. About 75
instructions for each of k blocks, and 250 for the rest of a row: 0.4 G in all, 0.7 ms where a multiprocessor issues 2.5
a cycle. Seen once on an H200: 0.60 ms.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.best_blocks import LIMIT, BestBlocks, Blocks
from cute_kernels.block_lists import Keys
from cute_kernels.documents import DOCUMENT, LENGTH, ROW, fake_tables
from cute_kernels.jit import Kernel, compile_kernel, compiled_once, fake
from cute_kernels.warp import LANES

WARPS = 4
GROUP = 8
"""Scores of a lane of which the highest is kept."""
GROUPS = 4
PIECE = GROUPS * GROUP * LANES

NOTHING = -1
"""Stands for the score of what cannot be chosen, and of a place that is not taken."""
INFINITE = 0x7F800000
"""+inf, as bits: a forced block's score."""


class BestOfScores:
    """Args: what to choose, when a token sees an entry."""

    def __init__(self, blocks: Blocks, keys: Keys) -> None:
        self.blocks, self.keys, self.best = blocks, keys, BestBlocks(blocks, keys, tile=1)
        self.slots = self.best.slots

    @cute.jit
    def __call__(
        self,
        mScores: cute.Tensor,  # int32 [B, H_kv, T, blocks]: bits of fp32 from 0 on
        mIndices: cute.Tensor,  # int32 [B, H_kv, T, k]
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        entries: Int32,
        tokens: Int32,  # of the sequence; with mBounds not read
        first_token: Int32,  # number of the first row
        tile: Int32,  # T of the documents
        stream: Any,
    ):
        self.kernel(mScores, mIndices, mBounds, mTiles, entries, tokens, first_token, tile).launch(
            grid=[cute.ceil_div(mScores.shape[2], WARPS), mScores.shape[1], mScores.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mScores: cute.Tensor,
        mIndices: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        entries: Int32,
        tokens: Int32,
        first_token: Int32,
        tile: Int32,
    ):
        cta, head, batch = cute.arch.block_idx()
        row = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if row < mScores.shape[2]:
            token = first_token + row
            if const_expr(mTiles is not None):
                document = cutlass.max(mTiles[DOCUMENT, token // tile], 0)
                token -= mBounds[ROW, document]
                tokens = mBounds[LENGTH, document]
                entries = self.keys.visible(tokens - 1, entries)
            if token < tokens:
                rRow = cute.make_rmem_tensor(4, Int32)
                self.best.begin_row(rRow, token, tokens, entries, mBounds is not None)
                rBest, rIndex = cute.make_rmem_tensor(self.slots, Int32), cute.make_rmem_tensor(self.slots, Int32)
                self._begin(rBest, rIndex, rRow)
                if self._last(rBest) < INFINITE:
                    self._choose(mScores[batch, head, row, None], rBest, rIndex, rRow)
                self.best.write_places(rIndex, mIndices[batch, head, row, None])

    @cute.jit
    def _begin(self, rBest: cute.Tensor, rIndex: cute.Tensor, rRow: cute.Tensor):
        """The forced blocks alone."""
        for slot in range_constexpr(self.slots):
            rIndex[slot] = self.best.forced_block(rRow, slot * LANES + cute.arch.lane_idx())
            rBest[slot] = Int32(INFINITE) if rIndex[slot] >= 0 else Int32(NOTHING)

    @cute.jit
    def _last(self, rBest: cute.Tensor) -> Int32:
        """The score of the last place."""
        last = self.blocks.count - 1
        return cute.arch.shuffle_sync(rBest[last // LANES], last % LANES)

    @cute.jit
    def _choose(self, gScores: cute.Tensor, rBest: cute.Tensor, rIndex: cute.Tensor, rRow: cute.Tensor):
        lane = cute.arch.lane_idx()
        scored = self.blocks.scored(rRow[LIMIT])
        rScore, rTop = cute.make_rmem_tensor((GROUP, GROUPS), Int32), cute.make_rmem_tensor(GROUPS, Int32)
        for piece in cutlass.range(0, scored, PIECE, unroll=1):
            for g in range_constexpr(GROUPS):
                rTop[g] = Int32(NOTHING)
                first = piece + g * GROUP * LANES
                if first < scored:
                    for i in range_constexpr(GROUP):
                        block = first + i * LANES + lane
                        score = Int32(NOTHING)
                        if block < scored:
                            score = gScores[block]
                        chooses = self.best.is_free(rRow, block) & (score < INFINITE)
                        rScore[i, g] = score if chooses else Int32(NOTHING)
                        rTop[g] = cutlass.max(rTop[g], rScore[i, g])
            top = self._top(rTop)
            while top > self._last(rBest):
                self._insert(rBest, rIndex, top, self._take(rScore, rTop, top, piece))
                top = self._top(rTop)

    @cute.jit
    def _top(self, rTop: cute.Tensor) -> Int32:
        """The highest score of the warp."""
        top = rTop[0]
        for g in range_constexpr(1, GROUPS):
            top = cutlass.max(top, rTop[g])
        return cute.arch.warp_redux_sync(top, "max")

    @cute.jit
    def _take(self, rScore: cute.Tensor, rTop: cute.Tensor, top: Int32, piece: Int32) -> Int32:
        """Take out the first block with that score, and return it. Groups follow each other in blocks, as lanes do."""
        lane = cute.arch.lane_idx()
        taken = Int32(NOTHING)
        for g in range_constexpr(GROUPS):
            if taken < 0:
                if cute.arch.vote_any_sync(rTop[g] == top):
                    first = piece + g * GROUP * LANES + lane
                    mine = Int32(INFINITE)
                    for i in range_constexpr(GROUP - 1, -1, -1):
                        mine = first + i * LANES if rScore[i, g] == top else mine
                    taken = cute.arch.warp_redux_sync(mine, "min")
                    rTop[g] = Int32(NOTHING)
                    for i in range_constexpr(GROUP):
                        rScore[i, g] = rScore[i, g] if first + i * LANES != taken else Int32(NOTHING)
                        rTop[g] = cutlass.max(rTop[g], rScore[i, g])
        return taken

    @cute.jit
    def _insert(self, rBest: cute.Tensor, rIndex: cute.Tensor, score: Int32, block: Int32):
        """Behind what is as high; what is lower moves back by a place."""
        lane = cute.arch.lane_idx()
        place = Int32(0)
        for slot in range_constexpr(self.slots):
            place += cute.arch.popc(cute.arch.vote_ballot_sync(rBest[slot] >= score))
        for slot in range_constexpr(self.slots - 1, -1, -1):
            mine = slot * LANES + lane
            for rX, new in ((rBest, score), (rIndex, block)):
                before = cute.arch.shuffle_sync(rX[slot], cutlass.max(lane - 1, 0))
                if const_expr(slot > 0):
                    carried = cute.arch.shuffle_sync(rX[slot - 1], LANES - 1)
                    before = carried if lane == 0 else before
                moved = before if mine > place else rX[slot]
                rX[slot] = new if mine == place else moved


@compiled_once
def _best(blocks: Blocks, packed: bool) -> Kernel:
    bounds, tiles = fake_tables() if packed else (None, None)
    return compile_kernel(
        BestOfScores(blocks, Keys(blocks.length, blocks.stride)),
        fake(torch.int32, None, None, None, None, aligned=False),
        fake(torch.int32, None, None, None, blocks.count, aligned=False),
        bounds,
        tiles,
        *[Int32(0)] * 4,
    )
