"""Layout of a sequence or pack over ranks: chunks whose bounds are tile boundaries of its documents.

A layout follows from sizes alone, so every rank knows the tokens and compressed entries of all ranks, and all messages.
Ranges are half-open, `(start, stop)`, in tokens of the sequence or pack.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from nsa.config import NSAConfig

Range = tuple[int, int]

LAYOUTS = ("zigzag", "contiguous")


class Piece(NamedTuple):
    """Tokens `start` ... `stop` - 1 of a document, which begins at token `first` of the pack."""

    first: int
    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Layout:
    """The tokens of all ranks.

    Args:
        tokens: N, number of tokens of the sequence or pack, rows after the last document included.
        bounds: start of each document and end of the last: `(0, N)` for a sequence.
        ranks: R.
        kind: "zigzag": 2R chunks, of which rank r holds r and 2R - 1 - r; "contiguous": R chunks, one each.
        tile: chunks begin at multiples of it within their document.
    """

    tokens: int
    bounds: tuple[int, ...]
    ranks: int
    kind: str
    tile: int

    @cached_property
    def cuts(self) -> list[int]:
        """Bounds of the chunks: the last allowed bound up to each even share."""
        count = 2 * self.ranks if self.kind == "zigzag" else self.ranks
        return [self._allowed(self.tokens * chunk // count) for chunk in range(count)] + [self.tokens]

    def _allowed(self, token: int) -> int:
        """Last tile boundary up to a token, in its document."""
        first = self.bounds[bisect_right(self.bounds, token) - 1]
        return first + (token - first) // self.tile * self.tile

    @cached_property
    def ranges(self) -> list[list[Range]]:
        """Nonempty ranges of each rank in the order of its shard; adjacent ranges are merged."""
        chunks = list(pairwise(self.cuts))
        result = []
        for rank in range(self.ranks):
            own = [chunks[rank]] if self.kind == "contiguous" else [chunks[rank], chunks[-1 - rank]]
            result.append(merged(own))
        return result

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each rank."""
        return [_length(own) for own in self.ranges]

    def pieces(self, tokens: Range) -> list[Piece]:
        """Nonempty pieces of documents in a range; rows after the last document are in none."""
        start, stop = tokens
        result = []
        document = max(0, bisect_right(self.bounds, start) - 1)
        while document < len(self.bounds) - 1 and self.bounds[document] < stop:
            first, end = self.bounds[document : document + 2]
            if max(start, first) < min(stop, end):
                result.append(Piece(first, max(start, first) - first, min(stop, end) - first, document))
            document += 1
        return result

    def first_entries(self, config: NSAConfig) -> list[int]:
        """Number of compressed entries before each document, and in total."""
        return _first_entries(self.bounds, config.compress_block_size, config.stride)

    def entries(self, config: NSAConfig) -> list[list[Range]]:
        """Compressed entries of each rank: those whose last token it holds."""
        before = self.first_entries(config)
        result = []
        for own in self.ranges:
            found = []
            for tokens in own:
                for piece in self.pieces(tokens):
                    first, count = before[piece.document], config.num_compressed
                    found.append((first + count(piece.start), first + count(piece.stop)))
            result.append(merged(found))
        return result

    def with_halo(self, before: int, after: int) -> list[list[Range]]:
        """Ranges of each rank, extended by some tokens before and after."""
        return [[(max(0, a - before), min(self.tokens, b + after)) for a, b in own] for own in self.ranges]


@lru_cache(256)
def make_layout(tokens: int, bounds: tuple[int, ...] | None, ranks: int, kind: str, tile: int) -> Layout:
    """The layout of a sequence (bounds None) or of packed documents."""
    return Layout(tokens, (0, tokens) if bounds is None else bounds, ranks, kind, tile)


@lru_cache(64)
def _first_entries(bounds: tuple[int, ...], length: int, stride: int) -> list[int]:
    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    result = [0]
    for start, stop in pairwise(bounds):
        result.append(result[-1] + config.num_compressed(stop - start))
    return result


class Move(NamedTuple):
    """Tokens that one rank sends to another: rows among those that the sender holds, and that the receiver needs."""

    held: Range
    wanted: Range


def moves(held: list[Range], wanted: list[Range]) -> list[Move]:
    """Moves from the rows held to the rows wanted, both consecutive ranges, in the order of the latter."""
    result = []
    row = 0
    for start, stop in wanted:
        own = 0
        for a, b in held:
            first, last = max(a, start), min(b, stop)
            if first < last:
                here, there = own + first - a, row + first - start
                result.append(Move((here, here + last - first), (there, there + last - first)))
            own += b - a
        row += stop - start
    return result


def _length(ranges: list[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def merged(ranges: list[Range]) -> list[Range]:
    """Drop empty ranges and merge adjacent ones."""
    result: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result
