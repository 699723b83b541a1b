"""Work of sequences whose lengths differ: tiles of entries of all sequences in one row, cut into equal parts.

    rows r = (sequence, head)      tiles of r: ceil(visible entries / entries of a tile)
    CTA c takes tiles  c per_cta ... (c + 1) per_cta - 1  of all rows' tiles, one behind the other

so a batch of one long sequence and many short ones keeps every CTA busy. A CTA that crosses from one row to the next
writes a partial for each. CTA c's partial of row r has the place c + r: no two have the same, and those of a row follow
each other. Lengths are read on the device, by each CTA.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.decode.pages import Lengths
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.warp import LANES, lowest_bit, prefix_sum

NO_END = (1 << 31) - 1


class Row(NamedTuple):
    """The tiles of a sequence and head."""

    batch: Int32
    head: Int32
    first: Int32
    """Its first tile, of all rows' tiles."""
    tiles: Int32


class Partials(NamedTuple):
    """Places of a row's partials."""

    first: Int32
    count: Int32


class Cut(NamedTuple):
    """Where the tiles of a sequence are cut."""

    per_cta: Int32
    """Tiles that each CTA takes."""
    first: Int32
    """The sequence's first tile, of all rows' tiles."""
    tiles: Int32
    """Of each of its heads."""
    first_row: Int32
    """The row of its head 0."""


class Splits:
    """Args: which entries a token sees; entries of a tile."""

    def __init__(self, keys: Keys, tile: int) -> None:
        self.keys, self.tile = keys, tile

    @cute.jit
    def entries(self, tokens: Int32) -> Int32:
        """That a sequence has."""
        return self.keys.visible(tokens - 1, Int32(NO_END))

    @cute.jit
    def tiles(self, tokens: Int32) -> Int32:
        return (self.entries(tokens) + self.tile - 1) // self.tile

    @cute.jit
    def cut(self, lengths: Lengths, batch: Int32, heads: Int32, ctas: Int32) -> Cut:
        """By a warp."""
        all_tiles, before = Int32(0), Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), lengths.mNew.shape[0], LANES, unroll=4):
            tiles = self.tiles(lengths.tokens(i))
            all_tiles += tiles
            before += tiles if i < batch else Int32(0)
        total, first = (cute.arch.warp_reduction(x, lambda a, b: a + b) * heads for x in (all_tiles, before))
        per_cta = cutlass.max((total + ctas - 1) // ctas, 1)
        return Cut(per_cta, first, self.tiles(lengths.tokens(batch)), batch * heads)

    @cute.jit
    def find(self, lengths: Lengths, tile: Int32, heads: Int32) -> Row:
        """The row that has a tile, by a warp. Its `tiles` are 0 if there is no such tile."""
        lane = cute.arch.lane_idx()
        sequences = lengths.mNew.shape[0]
        row = Row(Int32(0), Int32(0), Int32(0), Int32(0))
        seen = Int32(0)
        for start in cutlass.range(0, sequences, LANES, unroll=1):
            tiles = Int32(0)
            if start + lane < sequences:
                tiles = self.tiles(lengths.tokens(start + lane))
            end = seen + prefix_sum(tiles * heads)
            behind = cute.arch.vote_ballot_sync(end > tile)
            if (row.tiles == 0) & (behind != 0):
                source = lowest_bit(behind)
                of_row = cute.arch.shuffle_sync(tiles, source)
                first = cute.arch.shuffle_sync(end, source) - of_row * heads
                head = (tile - first) // of_row
                row = Row(start + source, head, first + head * of_row, of_row)
            seen = cute.arch.shuffle_sync(end, LANES - 1)
        return row

    @cute.jit
    def partials(self, cut: Cut, head: Int32) -> Partials:
        """Of the row of a sequence's head."""
        first = cut.first + head * cut.tiles
        first_cta = first // cut.per_cta
        count = Int32(0) if cut.tiles == 0 else (first + cut.tiles - 1) // cut.per_cta - first_cta + 1
        return Partials(first_cta + cut.first_row + head, count)
