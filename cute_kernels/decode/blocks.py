"""Attention of each token of a step to its selected blocks and to its window, in parts (tiles.py).

A CTA has the heads of a token that select together, the G of a key/value head or one (tile mode), and some tiles of
KEYS keys of one branch: the first `selected_parts` CTAs have those of the selected blocks, l'/KEYS each, the others the
window's, from its first token on. The selected blocks are the best of the parts written by choose.py, which each CTA
merges.

Partials of parts without tiles have lse -inf.

Floor: (n l' + w) (D + D_v) 2 bytes per token and key/value head, for any length: 3.1 MB with 4 heads of 128, n = 16
and w = 512, 0.75 us at 4.19 TB/s.

Limits: l' a multiple of KEYS; G at most 64 if queries and a pipeline fit in shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from cute_kernels.attend.views import group_heads
from cute_kernels.decode.choose import MAX_LONG_PARTS, fake_parts
from cute_kernels.decode.choose import MAX_PARTS as CHOICE_PARTS
from cute_kernels.decode.pages import Lengths, Paging, fake_lengths, fake_pages, fake_table
from cute_kernels.decode.splits import NO_END
from cute_kernels.decode.tiles import KEYS, Buffers, DecodeTiles, PagedKeys
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.mma.mma_sync import mask_after
from cute_kernels.mma.warp import LANES, divide
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.topk import Blocks, TopKList

MAX_PARTS = 64
"""Maximum number of parts per branch."""
MOST_TILES = 8
"""Maximum number of tiles per part, unless MAX_PARTS requires more."""
START_TILES = 2
"""Startup cost of a CTA in units of tiles: it merges lists and waits for memory before its first tile arrives."""


class Parts(NamedTuple):
    """Partition of a token's tiles."""

    selected: int
    window: int
    tiles: int
    """Maximum tiles per part, of the selected blocks (`tiles`) and of the window (`window_tiles`)."""
    window_tiles: int

    @property
    def both(self) -> int:
        return self.selected + self.window

    @property
    def of_branches(self) -> tuple[slice, slice]:
        """Ranges of parts of the selected blocks, and of the window."""
        return slice(self.selected), slice(self.selected, None)

    @staticmethod
    def of(
        blocks: Blocks,
        window: int,
        max_tokens: int,
        items: int,
        ctas: int,
        part_tiles: int | None = None,
        per_kv_head: int = 1,
    ) -> Parts:
        """Args:
        blocks, window, max_tokens: selection parameters; w; number of tokens of the longest sequence.
        items, ctas: tokens times key/value heads of a step; number of CTAs that run concurrently.
        part_tiles: tiles per part. None: the number for which all parts take the fewest rounds of tiles.
        per_kv_head: groups of heads that select separately; the window's parts then are another launch.
        """
        selected, rest = blocks.count * (blocks.size // KEYS), -(-min(window, max_tokens) // KEYS)

        def cut(selected: int, rest: int, items: int) -> Parts:
            def cut_by(tiles: int) -> Parts:
                per_part = [max(tiles, -(-x // MAX_PARTS)) for x in (selected, rest)]
                return Parts(-(-selected // per_part[0]), -(-rest // per_part[1]), *per_part)

            def rounds(tiles: int) -> int:
                return -(-cut_by(tiles).both * items // ctas) * (tiles + START_TILES)

            return cut_by(part_tiles or min(range(1, MOST_TILES + 1), key=rounds))

        if per_kv_head == 1:
            return cut(selected, rest, items)
        own, shared = cut(selected, 0, items * per_kv_head), cut(0, rest, items)
        return Parts(own.selected, shared.window, own.tiles, shared.window_tiles)


class Work(NamedTuple):
    """Tiles of a CTA."""

    token: Int32
    """Last key that the rows see."""
    first_tile: Int32
    is_window: Boolean
    window_first: Int32
    """First key of the window."""
    sBlock: cute.Tensor
    """int32 [k], selected blocks."""


class AttendBlocks(DecodeTiles):
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    group, per_kv_head: number of heads that select together, and number of such groups per key/value head.
    queries, blocks, window, page_size: N_q; selection parameters; w; tokens per page.
    """

    def __init__(
        self,
        dim: int,
        v_dim: int,
        dtype: Any,
        group: int,
        queries: int,
        blocks: Blocks,
        window: int,
        page_size: int,
        per_kv_head: int = 1,
    ) -> None:
        self.keys = Keys(blocks.length, blocks.stride)
        self.topk = TopKList(blocks, self.keys, tile=1)
        super().__init__(dim, v_dim, dtype, group, Paging(page_size), cta_bytes=self.topk.num_slots * 4)
        self.group, self.queries, self.blocks, self.window = group, queries, blocks, window
        self.per_kv_head = per_kv_head
        self.block_tiles = blocks.size // KEYS

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        group: int,
        queries: int,
        blocks: Blocks,
        window: int,
        page_size: int,
        per_kv_head: int = 1,
    ) -> Kernel:
        kernel = AttendBlocks(*dims, CUTE_DTYPES[dtype], group, queries, blocks, window, page_size, per_kv_head)
        return compile_kernel(
            kernel,
            fake(dtype, None, None, None, dims[0]),
            *[fake_pages(dtype, page_size, dim) for dim in dims],
            fake_table(),
            *fake_lengths(),
            *fake_parts(blocks),
            fake(torch.float32, None, None, None, group, dims[1]),
            fake(torch.float32, None, None, None, group, aligned=False),
            Float32(0.0),
            *[Int32(0)] * 4,
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N_q, H, D]
        mKPages: cute.Tensor,  # [pages, page_size, H_kv, D]
        mVPages: cute.Tensor,  # [pages, page_size, H_kv, D_v]
        mTable: cute.Tensor,  # int32 [B, pages per sequence]
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        mValues: cute.Tensor,  # as written by ChooseBlocks
        mIndices: cute.Tensor,
        mO: cute.Tensor,  # fp32 [B, items, parts, heads, D_v], output; items: (group of heads, token)
        mLse: cute.Tensor,  # fp32 [B, items, parts, heads], in base 2
        scale: Float32,  # softmax_scale * log2(e)
        selected_parts: Int32,
        selected_tiles: Int32,  # tiles per part
        window_tiles: Int32,
        choice_blocks: Int32,  # blocks per part of ChooseBlocks
        stream: Any,
    ):
        batches, items, parts, _ = mLse.shape
        tensors = (
            group_heads(mQ, self.group),
            mKPages,
            mVPages,
            mTable,
            Lengths(mCached, mNew),
            mValues,
            mIndices,
            mO,
            mLse,
        )
        self.kernel(
            *tensors, scale, selected_parts, selected_tiles, window_tiles, choice_blocks, self.layouts()
        ).launch(grid=[items, batches, parts], **self.launch(stream))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, N_q, groups, heads, D]
        mKPages: cute.Tensor,
        mVPages: cute.Tensor,
        mTable: cute.Tensor,
        lengths: Lengths,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        selected_parts: Int32,
        selected_tiles: Int32,
        window_tiles: Int32,
        choice_blocks: Int32,
        layouts: Any,
    ):
        item, batch, part = cute.arch.block_idx()
        part = mLse.shape[2] - 1 - part  # window parts first: they need no choice
        cute.arch.griddepcontrol_launch_dependents()
        smem = SmemAllocator()
        buffers = self.allocate(smem, layouts)
        # [k rounded up to LANES]
        sBlock = smem.allocate_tensor(Int32, cute.make_layout(self.topk.num_slots), 16)
        selector, query = item // self.queries, item % self.queries
        token = lengths.mCached[batch] + query
        if query < lengths.mNew[batch]:
            self.load_queries(
                mQ[batch, None, selector, None, None], buffers.sQ, query * self.group, (query + 1) * self.group
            )
            window_first = cutlass.max(token - self.window + 1, 0)
            is_window = part >= selected_parts
            first, tiles, limit = part * selected_tiles, Int32(0), selected_tiles
            if is_window:
                first, limit = (part - selected_parts) * window_tiles, window_tiles
                tiles = (token - window_first + KEYS) // KEYS
                if window_first + (first + limit) * KEYS > lengths.mCached[batch]:
                    cute.arch.griddepcontrol_wait()  # for keys that the step appends
            else:
                cute.arch.griddepcontrol_wait()  # for the choice
                gParts = (x[batch, item, None, None] for x in (mValues, mIndices))  # [parts, k] each
                tiles = self._merge_parts(*gParts, buffers, sBlock, token, choice_blocks) * self.block_tiles
            tiles = cutlass.max(cutlass.min(tiles - first, limit), 0)
            work = Work(token, first, is_window, window_first, sBlock)
            keys = PagedKeys(mTable[batch, None], mKPages, mVPages, selector // self.per_kv_head)
            of_warp = self.attend(keys, buffers, tiles, scale, work)
            # fp32 [heads, D_v] and [heads]
            gO, gLse = mO[batch, item, part, None, None], mLse[batch, item, part, None]
            self.store_partial(of_warp, buffers, gO, gLse, Int32(self.group))
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def _merge_parts(
        self,
        gValues: cute.Tensor,  # [parts, k]
        gIndices: cute.Tensor,
        buffers: Buffers,
        sBlock: cute.Tensor,
        token: Int32,
        choice_blocks: Int32,
    ) -> Int32:
        """Merge the best blocks of all parts into sBlock, best first. Returns the number of blocks."""
        lane = cute.arch.lane_idx()
        scored = self.blocks.scored(self.keys.visible(token, Int32(NO_END)))
        parts = cutlass.max((scored + choice_blocks - 1) // choice_blocks, 1)  # part 0 has the forced blocks
        if const_expr(self.topk.slots_per_lane == 1):
            self._merge_in_registers(gValues, gIndices, parts, buffers, sBlock)
        else:
            self._merge_by_search(gValues, gIndices, parts, buffers, sBlock)
        cute.arch.sync_threads()
        selected = Int32(0)
        for i in range_constexpr(self.topk.slots_per_lane):
            selected += cute.arch.popc(cute.arch.vote_ballot_sync(sBlock[i * LANES + lane] >= 0))
        return selected

    @cute.jit
    def _merge_by_search(
        self, gValues: cute.Tensor, gIndices: cute.Tensor, parts: Int32, buffers: Buffers, sBlock: cute.Tensor
    ):
        thread, _, _ = cute.arch.thread_idx()
        count = const_expr(self.blocks.count)
        sValues, sIndices = self._lists(MAX_LONG_PARTS, count, buffers)  # [MAX_LONG_PARTS, k] each
        for item in cutlass.range(thread, parts * count, self.threads, unroll=4):
            part, slot = divide(item, self.blocks.count)
            sValues[part, slot], sIndices[part, slot] = gValues[part, slot], gIndices[part, slot]
        if thread < self.topk.num_slots - count:
            sBlock[count + thread] = Int32(-1)
        cute.arch.sync_threads()  # the lists are written
        self.topk.merge_lists(sValues, sIndices, parts, thread, self.threads, None, sBlock)

    def _lists(self, lists: int, slots: int, buffers: Buffers) -> tuple[cute.Tensor, cute.Tensor]:
        """Values and blocks, aliasing keys and values, whose loads have not started yet."""
        layout = cute.make_layout((lists, slots), stride=(slots, 1))
        values = buffers.sO.iterator
        blocks = cute.recast_ptr(values + cute.size(layout), dtype=Int32)
        return cute.make_tensor(values, layout), cute.make_tensor(blocks, layout)

    @cute.jit
    def _merge_in_registers(
        self, gValues: cute.Tensor, gIndices: cute.Tensor, parts: Int32, buffers: Buffers, sBlock: cute.Tensor
    ):
        """Merge lists of one slot per lane: each warp merges some of them, then all warps merge the results."""
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        per_warp = const_expr(CHOICE_PARTS // self.warps)
        size = const_expr(max(per_warp, self.warps))
        # (list): slot `lane` of each list
        rValue, rIndex = cute.make_rmem_tensor(size, Float32), cute.make_rmem_tensor(size, Int32)
        if parts > self.warps:
            self._load_lists(gValues, gIndices, warp_index, self.warps, parts, per_warp, rValue, rIndex)
            self._merge_registers(parts, self.warps, per_warp, rValue, rIndex)
            sValues, sIndices = self._lists(self.warps, LANES, buffers)  # [warps, LANES] each
            sValues[warp_index, lane], sIndices[warp_index, lane] = rValue[0], rIndex[0]
            cute.arch.sync_threads()
            for i in range_constexpr(self.warps):
                rValue[i], rIndex[i] = sValues[i, lane], sIndices[i, lane]
        else:
            self._load_lists(gValues, gIndices, Int32(0), 1, parts, self.warps, rValue, rIndex)
        self._merge_registers(parts, 1, self.warps, rValue, rIndex)
        if warp_index == 0:
            sBlock[lane] = rIndex[0] if lane < self.blocks.count else Int32(-1)

    @cute.jit
    def _load_lists(
        self,
        gValues: cute.Tensor,
        gIndices: cute.Tensor,
        first: Int32,
        apart: cutlass.Constexpr[int],
        parts: Int32,
        count: cutlass.Constexpr[int],
        rValue: cute.Tensor,
        rIndex: cute.Tensor,
    ):
        """Load lists `first`, `first` + `apart`, ... into registers 0 ... `count` - 1; empty past the last."""
        lane = cute.arch.lane_idx()
        for i in range_constexpr(count):
            rValue[i], rIndex[i] = -Float32.inf, Int32(-1)
            part = first + i * apart
            if (part < parts) & (lane < self.blocks.count):
                rValue[i], rIndex[i] = gValues[part, lane], gIndices[part, lane]

    @cute.jit
    def _merge_registers(
        self,
        parts: Int32,
        apart: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int],
        rValue: cute.Tensor,
        rIndex: cute.Tensor,
    ):
        """Merge registers 0 ... `count` - 1 of `_load_lists` into register 0, skipping unneeded levels."""
        for level in range_constexpr(1, count.bit_length()):
            half = const_expr(count >> level)
            if parts > half * apart:
                for i in range_constexpr(half):
                    best = self.topk.merge_best(rValue[i], rIndex[i], rValue[i + half], rIndex[i + half])
                    rValue[i], rIndex[i] = best

    @cute.jit
    def bounds(self, tile: Int32, work: Work) -> tuple[Int32, Int32]:
        at = work.first_tile + tile
        first = work.window_first + at * KEYS
        if not work.is_window:
            first = work.sBlock[at // self.block_tiles] * self.blocks.size + at % self.block_tiles * KEYS
        return first, work.token + 1

    @cute.jit
    def finish_scores(self, S: cute.Tensor, tile: Int32, work: Work):
        """Set scores of keys after the token to -inf."""
        _, key_warp = self.place()
        first, _ = self.bounds(tile, work)
        last = work.token - first - key_warp * self.warp_keys
        if last < self.warp_keys - 1:
            for r in range_constexpr(2):
                mask_after(S[None, r, 0, None], last)
