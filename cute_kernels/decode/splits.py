"""Work distribution over sequences of different lengths: tiles of all sequences in one range, cut into equal parts.

    rows r = (sequence, head)      tiles of r: ceil(visible entries / entries per tile)
    CTA c has tiles  c per_cta ... (c + 1) per_cta - 1  of all rows' tiles, concatenated

so a batch of one long sequence and many short ones keeps every CTA busy. A CTA that crosses from one row to the next
writes a partial for each. CTA c's partial of row r has index c + r: indices are unique, and those of a row are
consecutive. Lengths are read on the device, by each CTA.
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
    """Tiles of a sequence and head."""

    batch: Int32
    head: Int32
    first: Int32
    """Index of its first tile among all rows' tiles."""
    tiles: Int32


class Partials(NamedTuple):
    """Index range of a row's partials."""

    first: Int32
    count: Int32


class Cut(NamedTuple):
    """Partition of the tiles of a sequence."""

    per_cta: Int32
    """Tiles per CTA."""
    first: Int32
    """Index of the sequence's first tile among all rows' tiles."""
    tiles: Int32
    """Number of tiles of each of its heads."""
    first_row: Int32
    """Row of its head 0."""


class Splits:
    """Args: keys: visibility of entries. tile: entries per tile."""

    def __init__(self, keys: Keys, tile: int) -> None:
        self.keys, self.tile = keys, tile

    @cute.jit
    def entries(self, tokens: Int32) -> Int32:
        """Number of entries of a sequence."""
        return self.keys.visible(tokens - 1, Int32(NO_END))

    @cute.jit
    def tiles(self, tokens: Int32) -> Int32:
        return (self.entries(tokens) + self.tile - 1) // self.tile

    @cute.jit
    def cut(self, lengths: Lengths, batch: Int32, heads: Int32, ctas: Int32) -> Cut:
        """Partition of the tiles of sequence `batch`; called by a whole warp."""
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
        """Row that contains a tile; called by a whole warp. `tiles` is 0 if there is no such tile."""
        lane = cute.arch.lane_idx()
        sequences = lengths.mNew.shape[0]
        row = Row(Int32(0), Int32(0), Int32(0), Int32(0))
        seen = Int32(0)
        for start in cutlass.range(0, sequences, LANES, unroll=1):
            tiles = Int32(0)
            if start + lane < sequences:
                tiles = self.tiles(lengths.tokens(start + lane))
            end = seen + prefix_sum(tiles * heads)
            past = cute.arch.vote_ballot_sync(end > tile)  # lanes whose sequence ends after the tile
            if (row.tiles == 0) & (past != 0):
                source = lowest_bit(past)
                of_row = cute.arch.shuffle_sync(tiles, source)
                first = cute.arch.shuffle_sync(end, source) - of_row * heads
                head = (tile - first) // of_row
                row = Row(start + source, head, first + head * of_row, of_row)
            seen = cute.arch.shuffle_sync(end, LANES - 1)
        return row

    @cute.jit
    def partials(self, cut: Cut, head: Int32) -> Partials:
        """Partials of the row of a sequence's head."""
        first = cut.first + head * cut.tiles
        first_cta = first // cut.per_cta
        count = Int32(0) if cut.tiles == 0 else (first + cut.tiles - 1) // cut.per_cta - first_cta + 1
        return Partials(first_cta + cut.first_row + head, count)
