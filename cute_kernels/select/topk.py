"""Sorted top-k lists of blocks in shared memory; scores are merged into them chunk by chunk.

A row is a query tile or token that selects blocks. One warp keeps its list of `count` slots sorted by score: the forced
blocks first, with score +inf, then the highest scores; ties are ordered by block, lower first. Empty slots hold score
-inf and block -1. Scores arrive in ascending order of their blocks, in chunks of 32, one per lane. Candidates are the
scores that beat the list's last slot. If scores are in random order, k + k ln(blocks / k) are expected to become
candidates: nearly all scores of the first chunks, few of the later ones. The result does not depend on how the scores
are cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.warp import LANES, divide, lowest_bit

NUM_VISIBLE, INIT_END, LOCAL_BEGIN, LOCAL_END = range(4)
"""Columns of `sRow`: number of entries that a row sees; blocks 0 ... INIT_END-1 and LOCAL_BEGIN ... LOCAL_END-1 are
forced."""

CANDIDATES_PER_ITERATION = 2
"""Candidates compared per iteration of `_merge_by_rank`, so that the latencies of their shuffles overlap."""

SORT_THRESHOLD = 8
"""Number of candidates from which the bitonic network, of 20 exchanges, is faster than comparing each with all."""


@dataclass(frozen=True)
class Blocks:
    """Selection parameters: scored and forced blocks. Sizes in tokens, or in entries with length = stride = 1.

    Args:
        length, stride: l and d of the compressed blocks (entries) whose scores are pooled.
        size: l' of the blocks to select.
        count: number of blocks to select, k.
        init, local: number of forced blocks at the start of the sequence and at the row.
        newest: force the blocks with an entry that becomes visible inside the query tile, instead of `init`, `local`.
    """

    length: int
    stride: int
    size: int
    count: int
    init: int = 0
    local: int = 0
    newest: bool = False

    @staticmethod
    def of(config: Any) -> Blocks:
        """Selection parameters of an nsa.NSAConfig."""
        return Blocks(
            config.compress_block_size,
            config.stride,
            config.select_size,
            config.num_selected_blocks,
            init=config.num_init_blocks,
            local=config.num_local_blocks,
        )

    @property
    def overlapping(self) -> int:
        """Maximum number of entries that overlap one block."""
        return -(-(self.size + self.length - 1) // self.stride)

    @property
    def plain(self) -> bool:
        """True if each entry is one block."""
        return self.length == self.stride == self.size

    def per_step(self, entries: int) -> int:
        """Number of whole blocks covered by `entries` consecutive entries, wherever the first block starts."""
        if self.plain:
            return entries
        if self.size % self.stride == 0:
            return (entries - (self.length - 1) // self.stride) // (self.size // self.stride)
        return (entries * self.stride - self.length - self.stride + 2) // self.size

    @cute.jit
    def scored(self, visible: Int32) -> Int32:
        """Number of blocks, from block 0 on, that overlap one of the first `visible` entries."""
        return Int32(0) if visible == 0 else ((visible - 1) * self.stride + self.length - 1) // self.size + 1

    @cute.jit
    def first_entry(self, block: Int32) -> Int32:
        """Index of the first entry that overlaps a block."""
        before = block * self.size - self.length + 1
        return Int32(0) if before <= 0 else (before + self.stride - 1) // self.stride


class TopKList:
    """The lists of a CTA's rows.

    Args:
        blocks: selection parameters.
        keys: visibility of entries.
        tile: T, tokens per row; 1 if each token selects.

    A list is stored as sValues (fp32 scores) and sIndices (int32 blocks), both [num_slots]; sRow is int32 [4].
    """

    def __init__(self, blocks: Blocks, keys: Keys, tile: int) -> None:
        self.blocks, self.keys, self.tile = blocks, keys, tile
        self.slots_per_lane = -(-blocks.count // LANES)
        self.num_slots = self.slots_per_lane * LANES

    # Rows: visible and forced ranges

    @cute.jit
    def init_row(
        self, sRow: cute.Tensor, tile: Int32, tokens: Int32, entries: Int32, packed: cutlass.Constexpr[bool]
    ) -> Float32:
        """Write sRow. Returns the score that a block has to beat, +inf if forced blocks fill all slots."""
        init_end, local_begin, local_end = self._forced(tile, tokens, entries, packed)
        sRow[NUM_VISIBLE] = self.keys.visible(self._last_token(tile, tokens), entries)
        sRow[INIT_END] = init_end
        sRow[LOCAL_BEGIN] = local_begin
        sRow[LOCAL_END] = local_end
        return Float32.inf if init_end + local_end - local_begin >= self.blocks.count else -Float32.inf

    @cute.jit
    def _last_token(self, tile: Int32, tokens: Int32) -> Int32:
        return cutlass.min((tile + 1) * self.tile, tokens) - 1

    @cute.jit
    def _forced(
        self, tile: Int32, tokens: Int32, entries: Int32, packed: cutlass.Constexpr[bool]
    ) -> tuple[Int32, Int32, Int32]:
        """(a, b, c), a <= b <= c: blocks 0 ... a-1 and b ... c-1 are forced."""
        spec = self.blocks
        init_end, local_begin, local_end = Int32(0), Int32(0), Int32(0)
        last_token = self._last_token(tile, tokens)
        if const_expr(spec.newest):
            old = self.keys.visible(tile * self.tile - 1, entries)
            new = self.keys.visible(last_token, entries)
            if old < new:
                local_begin, local_end = old // spec.size, (new - 1) // spec.size + 1
            if const_expr(packed):  # all blocks of a document with at most `count`
                blocks = cute.ceil_div(entries, spec.size)
                if blocks <= spec.count:
                    init_end, local_begin, local_end = blocks, blocks, blocks
        elif const_expr(spec.init + spec.local > 0):
            last = last_token // spec.size
            num_blocks = last + 1
            local_begin, local_end = last - spec.local + 1, last + 1
            if const_expr(not self.keys.causal):  # centered on the tile
                num_blocks = (tokens - 1) // spec.size + 1
                twice_begin = tile * self.tile // spec.size + last + 1 - spec.local
                local_begin = (twice_begin + 2 * spec.local) // 2 - spec.local  # floor, for negative numbers too
                local_end = local_begin + spec.local
            init_end = cutlass.min(Int32(spec.init), num_blocks)
            local_end = cutlass.max(cutlass.min(local_end, num_blocks), init_end)
            local_begin = cutlass.min(cutlass.max(local_begin, init_end), local_end)
        return init_end, local_begin, local_end

    @cute.jit
    def not_forced(self, sRow: cute.Tensor, block: Int32) -> cutlass.Boolean:
        """True if a block is selected by its score alone."""
        return (block >= sRow[INIT_END]) & ((block < sRow[LOCAL_BEGIN]) | (block >= sRow[LOCAL_END]))

    # Lists, each by one warp: slot s is register s // 32 of lane s % 32

    @cute.jit
    def init_list(self, sValues: cute.Tensor, sIndices: cute.Tensor, sRow: cute.Tensor):
        """Write the forced blocks, then empty slots."""
        init_end, local_begin, local_end = sRow[INIT_END], sRow[LOCAL_BEGIN], sRow[LOCAL_END]
        for i in range_constexpr(self.slots_per_lane):
            slot = i * LANES + cute.arch.lane_idx()
            block = slot if slot < init_end else local_begin + slot - init_end
            is_forced = slot < init_end + local_end - local_begin
            sValues[slot] = Float32.inf if is_forced else -Float32.inf
            sIndices[slot] = block if is_forced else Int32(-1)

    @cute.jit
    def merge(
        self, sValues: cute.Tensor, sIndices: cute.Tensor, score: Float32, block: Int32, candidates: Int32
    ) -> Float32:
        """Merge the candidates of a chunk into the list.

        Args:
            score, block: this lane's. Blocks ascend with the lanes and follow all blocks merged before.
            candidates: bitmask of the lanes whose score beats the last slot.

        Returns:
            The new score of the last slot.
        """
        if const_expr(self.slots_per_lane > 1):
            self._merge_by_rank(sValues, sIndices, score, block, candidates)
        else:
            if cute.arch.popc(candidates) < SORT_THRESHOLD:
                self._merge_by_rank(sValues, sIndices, score, block, candidates)
            else:
                self._merge_by_sorting(sValues, sIndices, score, block, candidates)
        cute.arch.sync_warp()
        return sValues[self.blocks.count - 1]

    @cute.jit
    def merge_lists(
        self,
        sValues: cute.Tensor,  # fp32 [lists, count or more]
        sIndices: cute.Tensor,
        lists: Int32,
        thread: Int32,
        threads: cutlass.Constexpr[int],
        mValues: cute.Tensor | None,  # fp32 [count], output
        mIndices: cute.Tensor,
    ):
        """Merge sorted lists into one, using the given number of threads. Each list has later blocks than those before
        it.

        A block's slot is its position in its own list plus the number of better blocks in each other list, found by
        binary search.
        """
        bits = const_expr(self.blocks.count.bit_length())
        for item in cutlass.range(thread, lists * self.blocks.count, threads, unroll=1):
            own, place = divide(item, self.blocks.count)
            value, slot = sValues[own, place], place
            for other in cutlass.range(lists, unroll=4):
                better = Int32(0)
                for i in range_constexpr(bits):
                    probe = better + (1 << bits - 1 - i)
                    if probe <= self.blocks.count:
                        listed = sValues[other, probe - 1]
                        if (listed > value) | ((listed == value) & (other < own)):
                            better = probe
                slot += better if other != own else Int32(0)
            if slot < self.blocks.count:
                mIndices[slot] = sIndices[own, place]
                if const_expr(mValues is not None):
                    mValues[slot] = value

    @cute.jit
    def merge_best(
        self, value: Float32, index: Int32, other_value: Float32, other_index: Int32
    ) -> tuple[Float32, Int32]:
        """Best LANES of two sorted lists of one slot per lane, sorted. Of equal scores the lower block is better."""
        last = LANES - 1
        other_value, other_index = (cute.arch.shuffle_sync_bfly(x, last) for x in (other_value, other_index))
        if (other_value > value) | ((other_value == value) & (other_index < index)):
            value, index = other_value, other_index
        for step in range_constexpr(5):
            value, index = self._compare_exchange(value, index, 16 >> step, cutlass.Boolean(True))
        return value, index

    @cute.jit
    def _merge_by_rank(
        self, sValues: cute.Tensor, sIndices: cute.Tensor, score: Float32, block: Int32, candidates: Int32
    ):
        """Broadcast the candidates one at a time; each lane counts those that beat its slots and its own block.

        A candidate goes to slot = number of listed scores >= its own + number of candidates of the chunk that are
        better, or equal and earlier. A listed block moves back by the number of candidates that beat it.
        """
        lane, count = cute.arch.lane_idx(), self.blocks.count
        # (i): slot i * LANES + lane; rSlot: where it goes
        rValue = cute.make_rmem_tensor(self.slots_per_lane, Float32)
        rIndex = cute.make_rmem_tensor(self.slots_per_lane, Int32)
        rSlot = cute.make_rmem_tensor(self.slots_per_lane, Int32)
        for i in range_constexpr(self.slots_per_lane):
            rSlot[i] = i * LANES + lane
            rValue[i] = sValues[rSlot[i]]
            rIndex[i] = sIndices[rSlot[i]]
        listed_before = Int32(0)  # listed scores >= this lane's
        candidates_before = Int32(0)  # better candidates, and equal ones of lower lanes
        remaining = candidates
        while remaining != 0:
            for _ in range_constexpr(CANDIDATES_PER_ITERATION):
                exists = remaining != 0
                source = lowest_bit(remaining) % LANES
                remaining = remaining & (remaining - 1)
                other = cute.arch.shuffle_sync(score, source)
                other = other if exists else -Float32.inf  # beats no slot
                at_least = Int32(0)
                for i in range_constexpr(self.slots_per_lane):
                    rSlot[i] += Int32(1) if other > rValue[i] else Int32(0)
                    at_least += cute.arch.popc(cute.arch.vote_ballot_sync(rValue[i] >= other))
                listed_before = at_least if exists & (source == lane) else listed_before
                candidates_before += Int32(1) if (other > score) | ((other == score) & (source < lane)) else Int32(0)
        cute.arch.sync_warp()
        for i in range_constexpr(self.slots_per_lane):
            if rSlot[i] < count:
                sValues[rSlot[i]] = rValue[i]
                sIndices[rSlot[i]] = rIndex[i]
        if ((candidates >> lane) & 1 != 0) & (listed_before + candidates_before < count):
            sValues[listed_before + candidates_before] = score
            sIndices[listed_before + candidates_before] = block

    @cute.jit
    def _merge_by_sorting(
        self, sValues: cute.Tensor, sIndices: cute.Tensor, score: Float32, block: Int32, candidates: Int32
    ):
        """Sort the candidates, worst first; keep the better of each lane's slot and candidate; sort these.

        The better of the i-th best slot and the i-th worst candidate, for all i, are the best of both in bitonic order.
        With many candidates and one slot per lane, this network is cheaper than counting.
        """
        lane = cute.arch.lane_idx()
        is_candidate = (candidates >> lane) & 1 != 0
        score = score if is_candidate else -Float32.inf
        block = block if is_candidate else Int32(-1)
        for level in range_constexpr(1, 6):
            for step in range_constexpr(level):
                best_first = (lane >> level) & 1 == 1  # in every other run of the level; in none of the last level
                score, block = self._compare_exchange(score, block, 1 << level - 1 - step, best_first)
        value, index = sValues[lane], sIndices[lane]
        if value < score:  # on a tie the listed block stays: it is lower
            value, index = score, block
        for step in range_constexpr(5):
            value, index = self._compare_exchange(value, index, 16 >> step, cutlass.Boolean(True))
        cute.arch.sync_warp()
        if lane < self.blocks.count:
            sValues[lane] = value
            sIndices[lane] = index

    @cute.jit
    def _compare_exchange(
        self, score: Float32, block: Int32, distance: cutlass.Constexpr[int], best_first: cutlass.Boolean
    ) -> tuple[Float32, Int32]:
        """Order pairs of lanes `distance` apart by score, then by block."""
        other = cute.arch.shuffle_sync_bfly(score, distance)
        other_block = cute.arch.shuffle_sync_bfly(block, distance)
        is_first = cute.arch.lane_idx() & distance == 0
        other_is_better = (other > score) | ((other == score) & (other_block < block))
        swap = other_is_better == (is_first == best_first)
        return other if swap else score, other_block if swap else block

    @cute.jit
    def store_indices(self, sIndices: cute.Tensor, gIndices: cute.Tensor):
        """Write the selected blocks in ascending order, then -1: a block's position is the number of lower blocks."""
        lane = cute.arch.lane_idx()
        count = self.blocks.count
        rIndex = cute.make_rmem_tensor(self.slots_per_lane, Int32)
        num_selected = Int32(0)
        for i in range_constexpr(self.slots_per_lane):
            slot = i * LANES + lane
            rIndex[i] = sIndices[slot] if slot < count else Int32(-1)
            num_selected += cute.arch.popc(cute.arch.vote_ballot_sync(rIndex[i] >= 0))
        for i in range_constexpr(self.slots_per_lane):
            rank = Int32(0)
            for j in range_constexpr(self.slots_per_lane):
                for source in cutlass.range(LANES, unroll=4):
                    index = cute.arch.shuffle_sync(rIndex[j], source)
                    rank += Int32(1) if (index >= 0) & (index < rIndex[i]) else Int32(0)
            slot = i * LANES + lane
            if rIndex[i] >= 0:
                gIndices[rank] = rIndex[i]
            if (slot >= num_selected) & (slot < count):
                gIndices[slot] = Int32(-1)
