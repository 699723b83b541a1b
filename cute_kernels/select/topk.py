"""The best blocks of a row: which are forced, and a list in shared memory that takes in chunk after chunk of scores.

A row is what chooses: a query tile, or one token. Its list has `count` places, sorted: forced blocks first with the
score +inf, then the highest scores, the lower index first among equals; -inf and -1 mark places not taken. Scores come
in the order of their blocks, 32 at a time, one in each lane of the row's warp. Whatever beats the last place goes to

    place = places with at least its score + better candidates of the chunk, and equal ones before it

and an entry of the list moves back by the number of candidates that beat it: no sorting, and the same result for any
cut into chunks. k + k ln(blocks/k) scores get that far, expected, of scores in random order: nearly all of the first
chunks, few of the later ones. Where many of a chunk do, and the list has one place a lane, it is cheaper to sort them
against each other (a bitonic network) and to keep the better of the i-th best place and the i-th worst candidate,
which are the best ones of both, in bitonic order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.warp import LANES, lowest_bit

LIMIT, INIT, LOW, HIGH = range(4)
"""What is kept of a row: entries it sees; blocks 0 ... INIT-1 and LOW ... HIGH-1 are forced."""

TOGETHER = 2
"""Candidates that are compared at once, so that their shuffles do not wait for each other."""

MANY = 8
"""Candidates from which sorting them, 20 exchanges, takes less than comparing each with all."""


@dataclass(frozen=True)
class Blocks:
    """Which blocks are scored, and which must be chosen. Counted in tokens, or in entries (length = stride = 1).

    Args:
        length, stride: of the compressed blocks that are pooled, l and d.
        size: of the blocks to choose, l'.
        count: how many to choose, k.
        init, local: forced blocks at the start and at the tile.
        newest: blocks holding an entry that becomes visible inside the tile are forced instead.
    """

    length: int
    stride: int
    size: int
    count: int
    init: int = 0
    local: int = 0
    newest: bool = False

    @property
    def overlapping(self) -> int:
        """The most entries that overlap one block."""
        return -(-(self.size + self.length - 1) // self.stride)

    @property
    def plain(self) -> bool:
        """Entry and block are the same thing."""
        return self.length == self.stride == self.size

    def per_step(self, entries: int) -> int:
        """Whole blocks covered by that many consecutive entries, wherever the first block begins."""
        if self.plain:
            return entries
        if self.size % self.stride == 0:
            return (entries - (self.length - 1) // self.stride) // (self.size // self.stride)
        return (entries * self.stride - self.length - self.stride + 2) // self.size

    @cute.jit
    def scored(self, visible: Int32) -> Int32:
        """Blocks 0 ... that overlap one of the first `visible` entries."""
        return Int32(0) if visible == 0 else ((visible - 1) * self.stride + self.length - 1) // self.size + 1

    @cute.jit
    def first_entry(self, block: Int32) -> Int32:
        """The first entry that overlaps a block."""
        before = block * self.size - self.length + 1
        return Int32(0) if before <= 0 else (before + self.stride - 1) // self.stride


class BestBlocks:
    """Args: what to choose, when a token sees an entry, and T, the tokens of a row."""

    def __init__(self, blocks: Blocks, keys: Keys, tile: int) -> None:
        self.blocks, self.keys, self.tile = blocks, keys, tile
        self.slots = -(-blocks.count // LANES)
        self.places = self.slots * LANES

    @cute.jit
    def begin_row(
        self, sRow: cute.Tensor, tile: Int32, tokens: Int32, entries: Int32, packed: cutlass.Constexpr[bool]
    ) -> Float32:
        """Note what a row sees and must choose, in [LIMIT ... HIGH]. Returns the score that a block has to beat."""
        init, low, high = self._forced(tile, tokens, entries, packed)
        sRow[LIMIT] = self.keys.visible(self._last_token(tile, tokens), entries)
        sRow[INIT] = init
        sRow[LOW] = low
        sRow[HIGH] = high
        # With as many forced blocks as places nothing else can enter
        return Float32.inf if init + high - low >= self.blocks.count else -Float32.inf

    @cute.jit
    def _last_token(self, tile: Int32, tokens: Int32) -> Int32:
        return cutlass.min((tile + 1) * self.tile, tokens) - 1

    @cute.jit
    def _forced(
        self, tile: Int32, tokens: Int32, entries: Int32, packed: cutlass.Constexpr[bool]
    ) -> tuple[Int32, Int32, Int32]:
        """(a, b, c): blocks 0 ... a-1 and b ... c-1 must be chosen; a <= b <= c."""
        spec = self.blocks
        init, low, high = Int32(0), Int32(0), Int32(0)
        last_token = self._last_token(tile, tokens)
        if const_expr(spec.newest):
            old = self.keys.visible(tile * self.tile - 1, entries)
            new = self.keys.visible(last_token, entries)
            if old < new:
                low, high = old // spec.size, (new - 1) // spec.size + 1
            if const_expr(packed):  # all blocks of a document where they fit (else nobody asks)
                blocks = cute.ceil_div(entries, spec.size)
                if blocks <= spec.count:
                    init, low, high = blocks, blocks, blocks
        elif const_expr(spec.init + spec.local > 0):
            last = last_token // spec.size
            exist = last + 1
            low, high = last - spec.local + 1, last + 1
            if const_expr(not self.keys.causal):  # as many before the tile as behind it
                exist = (tokens - 1) // spec.size + 1
                twice = tile * self.tile // spec.size + last + 1 - spec.local
                low = (twice + 2 * spec.local) // 2 - spec.local  # floor, also below 0
                high = low + spec.local
            init = cutlass.min(Int32(spec.init), exist)
            high = cutlass.max(cutlass.min(high, exist), init)
            low = cutlass.min(cutlass.max(low, init), high)
        return init, low, high

    @cute.jit
    def is_free(self, sRow: cute.Tensor, block: Int32) -> cutlass.Boolean:
        """Whether a block is not forced."""
        return (block >= sRow[INIT]) & ((block < sRow[LOW]) | (block >= sRow[HIGH]))

    # The list of a row: position p lies in slot p // 32 of lane p % 32

    @cute.jit
    def begin_list(self, sBest: cute.Tensor, sIndex: cute.Tensor, sRow: cute.Tensor):
        """The forced blocks alone."""
        init, low, high = sRow[INIT], sRow[LOW], sRow[HIGH]
        for slot in range_constexpr(self.slots):
            place = slot * LANES + cute.arch.lane_idx()
            block = place if place < init else low + place - init
            taken = place < init + high - low
            sBest[place] = Float32.inf if taken else -Float32.inf
            sIndex[place] = block if taken else Int32(-1)

    @cute.jit
    def merge(
        self, sBest: cute.Tensor, sIndex: cute.Tensor, score: Float32, block: Int32, candidates: Int32
    ) -> Float32:
        """Take in the blocks of some lanes.

        Args:
            score, block: of this lane; blocks ascend with the lanes and lie behind all that were scored before.
            candidates: a bit for each lane whose score beats the last place.

        Returns:
            The new score of the last place.
        """
        if const_expr(self.slots > 1):
            self._take_each(sBest, sIndex, score, block, candidates)
        else:
            if cute.arch.popc(candidates) < MANY:
                self._take_each(sBest, sIndex, score, block, candidates)
            else:
                self._take_sorted(sBest, sIndex, score, block, candidates)
        cute.arch.sync_warp()
        return sBest[self.blocks.count - 1]

    @cute.jit
    def _take_each(self, sBest: cute.Tensor, sIndex: cute.Tensor, score: Float32, block: Int32, candidates: Int32):
        """Every lane compares what it has with each candidate."""
        lane, count = cute.arch.lane_idx(), self.blocks.count
        rBest = cute.make_rmem_tensor(self.slots, Float32)
        rIndex = cute.make_rmem_tensor(self.slots, Int32)
        rPlace = cute.make_rmem_tensor(self.slots, Int32)
        for slot in range_constexpr(self.slots):
            rPlace[slot] = slot * LANES + lane
            rBest[slot] = sBest[rPlace[slot]]
            rIndex[slot] = sIndex[rPlace[slot]]
        place = Int32(0)  # of this lane's block: places with at least its score, then better candidates
        better = Int32(0)
        left = candidates
        while left != 0:
            for _ in range_constexpr(TOGETHER):
                exists = left != 0
                source = lowest_bit(left) % LANES
                left = left & (left - 1)
                other = cute.arch.shuffle_sync(score, source)
                other = other if exists else -Float32.inf  # beats nothing
                at_least = Int32(0)
                for slot in range_constexpr(self.slots):
                    rPlace[slot] += Int32(1) if other > rBest[slot] else Int32(0)
                    at_least += cute.arch.popc(cute.arch.vote_ballot_sync(rBest[slot] >= other))
                place = at_least if exists & (source == lane) else place
                better += Int32(1) if (other > score) | ((other == score) & (source < lane)) else Int32(0)
        cute.arch.sync_warp()
        for slot in range_constexpr(self.slots):
            if rPlace[slot] < count:
                sBest[rPlace[slot]] = rBest[slot]
                sIndex[rPlace[slot]] = rIndex[slot]
        if ((candidates >> lane) & 1 != 0) & (place + better < count):
            sBest[place + better] = score
            sIndex[place + better] = block

    @cute.jit
    def _take_sorted(self, sBest: cute.Tensor, sIndex: cute.Tensor, score: Float32, block: Int32, candidates: Int32):
        """Candidates sorted with the worst first, then the better of each lane's place and candidate, then these."""
        lane = cute.arch.lane_idx()
        taken = (candidates >> lane) & 1 != 0
        score = score if taken else -Float32.inf
        block = block if taken else Int32(-1)
        for level in range_constexpr(1, 6):
            for step in range_constexpr(level):
                best_first = (lane >> level) & 1 == 1  # in every other run of the level; in none of the last one
                score, block = self._exchange(score, block, 1 << level - 1 - step, best_first)
        best, index = sBest[lane], sIndex[lane]
        if best < score:  # among equals those of the list, whose blocks come first
            best, index = score, block
        for step in range_constexpr(5):
            best, index = self._exchange(best, index, 16 >> step, cutlass.Boolean(True))
        cute.arch.sync_warp()
        if lane < self.blocks.count:
            sBest[lane] = best
            sIndex[lane] = index

    @cute.jit
    def _exchange(
        self, score: Float32, block: Int32, distance: cutlass.Constexpr[int], best_first: cutlass.Boolean
    ) -> tuple[Float32, Int32]:
        """Order the lanes that lie `distance` apart by score, then block."""
        other = cute.arch.shuffle_sync_bfly(score, distance)
        other_block = cute.arch.shuffle_sync_bfly(block, distance)
        is_first = cute.arch.lane_idx() & distance == 0
        behind = (other > score) | ((other == score) & (other_block < block))
        swap = behind == (is_first == best_first)
        return other if swap else score, other_block if swap else block

    @cute.jit
    def write_list(self, sIndex: cute.Tensor, gIndices: cute.Tensor):
        """The chosen blocks in ascending order, then -1."""
        lane = cute.arch.lane_idx()
        count = self.blocks.count
        rIndex = cute.make_rmem_tensor(self.slots, Int32)
        taken = Int32(0)
        for slot in range_constexpr(self.slots):
            place = slot * LANES + lane
            rIndex[slot] = sIndex[place] if place < count else Int32(-1)
            taken += cute.arch.popc(cute.arch.vote_ballot_sync(rIndex[slot] >= 0))
        for slot in range_constexpr(self.slots):
            rank = Int32(0)
            for other in range_constexpr(self.slots):
                for source in cutlass.range(LANES, unroll=4):
                    index = cute.arch.shuffle_sync(rIndex[other], source)
                    rank += Int32(1) if (index >= 0) & (index < rIndex[slot]) else Int32(0)
            place = slot * LANES + lane
            if rIndex[slot] >= 0:
                gIndices[rank] = rIndex[slot]
            if (place >= taken) & (place < count):
                gIndices[place] = Int32(-1)
