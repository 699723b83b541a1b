"""For each block of keys, the tiles of query rows that attend to it: block lists for backward.

    tile_bits               bit t of row b: tile t selected block b. One thread per choice sets one bit.
    transposed_lists        one warp per block of `width` keys reads its row of bits and writes two ascending lists:
                            `full` tiles see every key of the block, `mask` tiles need a mask.
    transposed_prefix_lists the same, from causality alone.

The order of a list depends only on the selection. Every tile may select block 0, so each list has room for all tiles:
memory is `list_bytes`, and the caller processes as many heads and blocks at a time as it can afford.

Floor: the bits are written, read and cleared once. 1M tokens, tiles of 256, blocks of 64, 8 heads: 64 MiB, 0.05 ms.
Packed documents: blocks and tiles are counted in the aligned buffers of pool/documents.py.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from torch import Tensor

from cute_kernels.lists.query_to_kv import THREADS, BlockLists, Keys, fake_lists, int32_tensors
from cute_kernels.mma.warp import LANES, lowest_bit, prefix_sum
from cute_kernels.pool.documents import (
    DOCUMENT,
    ENTRY,
    KEY,
    LENGTH,
    ROW,
    START,
    Documents,
    document_at,
    fake_rows,
    fake_tables,
)
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake

WORD = 32
"""Bits per word."""

WARPS = 4


class TileBits:
    """Set bit t of block b if tile t selected it.

    Args:
        size: keys per selected block.
        entries: keys are compressed entries, not tokens.
    """

    def __init__(self, size: int, *, entries: bool) -> None:
        self.size, self.entries = size, entries

    @staticmethod
    @compiled_once
    def compile(size: int, *, entries: bool, packed: bool) -> Kernel:
        tensors = [fake(torch.int32, None, None, None, None, aligned=False) for _ in range(2)]
        return compile_kernel(TileBits(size, entries=entries), *tensors, *(fake_tables() if packed else (None, None)))

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,  # int32 [B, S, tiles, k]
        mBits: cute.Tensor,  # int32 [B, S, blocks, words], zeros
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        stream: Any,
    ):
        self.kernel(mIndices, mBits, mBounds, mTiles).launch(
            grid=[cute.ceil_div(cute.size(mIndices), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mIndices: cute.Tensor, mBits: cute.Tensor, mBounds: cute.Tensor | None, mTiles: cute.Tensor | None
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        batches, heads, tiles, count = mIndices.shape
        item = group * THREADS + thread
        row = item // count
        tile, head, batch = row % tiles, row // tiles % heads, row // tiles // heads
        if batch < batches:
            block = mIndices[batch, head, tile, item % count]
            if block >= 0:
                if const_expr(mTiles is not None):
                    block += mBounds[ENTRY if self.entries else KEY, mTiles[DOCUMENT, tile]] // self.size
                word = cute.domain_offset((batch, head, block, tile // WORD), mBits)
                cute.arch.atomic_or(word.iterator, Int32(1) << tile % WORD, sem="relaxed")


@cute.jit
def _append(mIndex: cute.Tensor, place: Int32, tiles: Int32, first: Int32) -> Int32:
    """Write first + i for each set bit i of `tiles`, after those of lower lanes; returns the next free position."""
    count = cute.arch.popc(tiles)
    sums = prefix_sum(count)
    own = place + sums - count
    while tiles != 0:
        mIndex[own] = first + lowest_bit(tiles)
        tiles = tiles & (tiles - 1)
        own += 1
    return place + cute.arch.shuffle_sync(sums, LANES - 1)


class TransposedLists:
    """Lists of the tiles that selected a block.

    Args:
        keys: visibility of keys.
        size: keys per selected block.
        width: keys per listed block. If it does not divide `size`, all tiles are in `mask`.
        rows: query rows per tile.
    """

    def __init__(self, keys: Keys, size: int, width: int, rows: int) -> None:
        self.keys, self.size, self.width, self.rows = keys, size, width, rows
        self.exact = size % width == 0

    @staticmethod
    @compiled_once
    def compile(keys: Keys, size: int, width: int, rows: int, *, shifted: bool) -> Kernel:
        bits = fake(torch.int32, None, None, None, None, aligned=False)
        shifts = fake_rows() if shifted else None
        return compile_kernel(TransposedLists(keys, size, width, rows), bits, *fake_lists(), shifts, *[Int32(0)] * 4)

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # [B, S, chosen blocks, words]
        mMaskCount: cute.Tensor,  # [B, H, blocks]
        mMaskIndex: cute.Tensor,  # [B, H, blocks, K]
        mFullCount: cute.Tensor,  # [B, H, blocks]
        mFullIndex: cute.Tensor,  # [B, H, blocks, K], K of its own
        mShifts: cute.Tensor | None,  # int32 [tiles], added to a tile's rows when compared with keys
        num_keys: Int32,
        num_rows: Int32,
        first_block: Int32,
        first_tile: Int32,  # listed as 0
        stream: Any,
    ):
        self.kernel(
            mBits,
            mMaskCount,
            mMaskIndex,
            mFullCount,
            mFullIndex,
            mShifts,
            num_keys,
            num_rows,
            first_block,
            first_tile,
        ).launch(grid=[cute.ceil_div(cute.size(mMaskCount), WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mBits: cute.Tensor,
        mMaskCount: cute.Tensor,
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,  # [B, H, blocks]
        mFullIndex: cute.Tensor,
        mShifts: cute.Tensor | None,
        num_keys: Int32,
        num_rows: Int32,
        first_block: Int32,
        first_tile: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        batches, heads, blocks = mMaskCount.shape
        item = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place, head, batch = item % blocks, item // blocks % heads, item // blocks // heads
        if batch < batches:
            block = first_block + place
            select_head = head // (heads // mBits.shape[1])
            words = mBits.shape[3]
            low = block * self.width // self.size
            high = cutlass.min(((block + 1) * self.width - 1) // self.size + 1, mBits.shape[2])
            masks, fulls = Int32(0), Int32(0)
            for start in cutlass.range(first_tile // WORD, words, LANES, unroll=1):
                index = start + lane
                chosen = Int32(0)
                if index < words:
                    for i in cutlass.range(low, high):
                        chosen = chosen | mBits[batch, select_head, i, index]
                full, mask = self._split(chosen, index, block, mShifts, num_keys, num_rows)
                tile = index * WORD - first_tile
                masks = _append(mMaskIndex[batch, head, place, None], masks, mask, tile)
                fulls = _append(mFullIndex[batch, head, place, None], fulls, full, tile)
            if lane == 0:
                mMaskCount[batch, head, place] = masks
                mFullCount[batch, head, place] = fulls

    @cute.jit
    def _split(
        self,
        tiles: Int32,
        index: Int32,
        block: Int32,
        mShifts: cute.Tensor | None,
        num_keys: Int32,
        num_rows: Int32,
    ) -> tuple[Int32, Int32]:
        """Bits of word `index`: tiles that see all of the block, and tiles that see part of it."""
        full, mask = Int32(0), tiles
        if const_expr(self.keys.causal):
            mask = Int32(0)
            while tiles != 0:
                bit = lowest_bit(tiles)
                tiles = tiles & (tiles - 1)
                tile = index * WORD + bit
                row = tile * self.rows
                last_row = cutlass.min(row + self.rows, num_rows) - 1
                if const_expr(mShifts is not None):
                    row += mShifts[tile]
                    last_row += mShifts[tile]
                end = cutlass.min((block + 1) * self.width, num_keys)
                if block * self.width < self.keys.visible(last_row, num_keys):
                    if const_expr(self.exact) and end <= self.keys.visible(row, num_keys):
                        full = full | (Int32(1) << bit)
                    else:
                        mask = mask | (Int32(1) << bit)
        elif const_expr(self.exact):
            full, mask = tiles, Int32(0)
        return full, mask


class TransposedPrefixLists:
    """Lists of the tiles that see a block of entries.

    Args:
        rows: query rows per listed tile.
    """

    def __init__(self, keys: Keys, width: int, rows: int) -> None:
        self.keys, self.width, self.rows = keys, width, rows

    @staticmethod
    @compiled_once
    def compile(keys: Keys, width: int, rows: int, *, packed: bool) -> Kernel:
        bounds = fake_tables()[0] if packed else None
        return compile_kernel(TransposedPrefixLists(keys, width, rows), *fake_lists(), bounds, *[Int32(0)] * 2)

    @cute.jit
    def __call__(
        self,
        mMaskCount: cute.Tensor,  # [B, H, blocks], the same memory for all B and H
        mMaskIndex: cute.Tensor,  # [B, H, blocks, K], the same memory for all B and H
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        mBounds: cute.Tensor | None,  # Documents.bounds
        num_keys: Int32,
        num_rows: Int32,
        stream: Any,
    ):
        self.kernel(mMaskCount, mMaskIndex, mFullCount, mFullIndex, mBounds, num_keys, num_rows).launch(
            grid=[cute.ceil_div(mMaskCount.shape[2], WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mMaskCount: cute.Tensor,
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        mBounds: cute.Tensor | None,
        num_keys: Int32,
        num_rows: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        block = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if block < mMaskCount.shape[2]:
            first_row, shift = Int32(0), Int32(0)
            if const_expr(mBounds is not None):
                document = document_at(mBounds[ENTRY, None], block * self.width, 1, 1, 0)
                row_of_first_token = mBounds[ROW, document]
                first_row = row_of_first_token + mBounds[START, document]
                shift = mBounds[ENTRY, document] * self.keys.stride - row_of_first_token
                num_rows = row_of_first_token + mBounds[LENGTH, document]
            end = cutlass.min((block + 1) * self.width, num_keys)
            masks, fulls = Int32(0), Int32(0)
            for start in cutlass.range(first_row // self.rows, cute.ceil_div(num_rows, self.rows), LANES, unroll=1):
                row = (start + lane) * self.rows
                last_row = cutlass.min(row + self.rows, num_rows) - 1
                full, mask = Int32(0), Int32(0)
                if row < num_rows:
                    if block * self.width < self.keys.visible(last_row + shift, num_keys):
                        full = Int32(1) if end <= self.keys.visible(row + shift, num_keys) else Int32(0)
                        mask = 1 - full
                masks = _append(mMaskIndex[0, 0, block, None], masks, mask, start + lane)
                fulls = _append(mFullIndex[0, 0, block, None], fulls, full, start + lane)
            if lane == 0:
                mMaskCount[0, 0, block] = masks
                mFullCount[0, 0, block] = fulls


def tile_bits(
    indices: Tensor, *, size: int, num_keys: int, entries: bool, documents: Documents | None = None
) -> Tensor:
    """Bitmaps of the tiles that selected each block.

    Args:
        indices: int32 `[B,S,tiles,k]`, blocks of `size` keys, padded with -1.
        num_keys: number of keys; with documents, of the aligned buffers.
        entries: keys are compressed entries, not tokens.

    Returns:
        int32 `[B,S,blocks,words]`: bit t % 32 of word t // 32 belongs to tile t.
    """
    batch, heads, tiles, _ = indices.shape
    shape = batch, heads, -(-num_keys // size), max(2, -(-tiles // WORD))  # FA4 wants exactly one dimension of stride 1
    bits = torch.zeros(shape, dtype=torch.int32, device=indices.device)
    if indices.numel() > 0:
        tables: tuple[Any, Any] = (None, None) if documents is None else (documents.bounds, documents.tiles)
        TileBits.compile(size, entries=entries, packed=documents is not None).run(indices, bits, *tables)
    return bits


def list_bytes(heads: int, blocks: int, tiles: int) -> int:
    """Memory of the longer of the two lists for this many blocks of keys and tiles of rows."""
    return 4 * heads * blocks * tiles


def transposed_lists(
    bits: Tensor,
    heads: int,
    keys: Keys,
    *,
    size: int,
    width: int,
    rows: int,
    num_keys: int,
    num_rows: int,
    blocks: range,
    first_tile: int = 0,
    first_row: int = 0,
    shifts: Tensor | None = None,
) -> BlockLists:
    """For blocks of keys, the tiles that selected them: in BlockLists's fields M counts blocks of keys, K tiles.

    Args:
        bits: from `tile_bits`, for all keys.
        heads: query heads, a multiple of those of `bits`.
        size, width: keys per selected and per listed block.
        rows: query rows per tile.
        num_keys, num_rows: number of keys and rows; with documents, of the aligned buffers.
        blocks: range of listed blocks.
        first_tile: listed as 0; earlier tiles must not see any of the blocks.
        first_row: token index of row 0.
        shifts: for packed documents: Documents.shifts if keys are entries, otherwise Documents.key_shifts.
    """
    batch, tiles = bits.shape[0], -(-num_rows // rows) - first_tile
    exact = size % width == 0
    # A block is partly visible from the row that sees its first key to the row that sees its last one
    crossing = min(tiles, -(-(width + 1) * keys.stride // rows) + 2) if keys.causal else 1
    mask_count, full_count, mask_index, full_index = _lists(
        bits.device, (batch, heads, len(blocks)), crossing if exact else tiles, tiles if exact else 1
    )
    if mask_count.numel() > 0:
        if first_row > 0:
            shifts = torch.full((tiles + first_tile,), first_row, dtype=torch.int32, device=bits.device)
        run = TransposedLists.compile(keys, size, width, rows, shifted=shifts is not None).run
        run(bits, mask_count, mask_index, full_count, full_index, shifts, num_keys, num_rows, blocks.start, first_tile)
    return BlockLists(
        mask_count, mask_index, full_count, full_index, rows, width, None if exact else bits, 0 if exact else size
    )


def transposed_prefix_lists(
    batch: int,
    heads: int,
    keys: Keys,
    *,
    width: int,
    rows: int,
    num_keys: int,
    num_rows: int,
    device: torch.device,
    first_row: int = 0,
    documents: Documents | None = None,
) -> BlockLists:
    """For blocks of compressed entries, the tiles that see them; one list for all batches and heads.

    Args:
        first_row: token index of row 0.
    """
    tiles, blocks = -(-num_rows // rows), -(-num_keys // width)
    if first_row > 0:
        sizes: dict[str, Any] = {"num_keys": num_keys, "num_rows": num_rows, "first_row": first_row}
        bits = _all_tiles(tiles, blocks, device)
        lists = transposed_lists(bits, 1, keys, size=width, width=width, rows=rows, blocks=range(blocks), **sizes)
        return _for_all_heads(lists.tensors, batch, heads, rows, width)
    crossing = min(tiles, -(-(width + 1) * keys.stride // rows) + 2)
    mask_count, full_count, mask_index, full_index = _lists(device, (1, 1, blocks), crossing, tiles)
    if batch * heads * tiles * blocks > 0:
        bounds = None if documents is None else documents.bounds
        run = TransposedPrefixLists.compile(keys, width, rows, packed=documents is not None).run
        run(mask_count, mask_index, full_count, full_index, bounds, num_keys, num_rows)
    return _for_all_heads((mask_count, mask_index, full_count, full_index), batch, heads, rows, width)


def _all_tiles(tiles: int, blocks: int, device: torch.device) -> Tensor:
    """`tile_bits` of a selection of every block by every tile, `[1,1,blocks,words]`."""
    bits = torch.full((1, 1, blocks, max(2, -(-tiles // WORD))), -1, dtype=torch.int32, device=device)
    bits[..., tiles // WORD :] = 0
    if tiles % WORD:
        bits[..., tiles // WORD] = (1 << tiles % WORD) - 1
    return bits


def _for_all_heads(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], batch: int, heads: int, rows: int, width: int
) -> BlockLists:
    """Share the lists of one head among all heads."""
    mask_count, mask_index, full_count, full_index = (x.expand(batch, heads, *x.shape[2:]) for x in tensors)
    return BlockLists(mask_count, mask_index, full_count, full_index, rows, width)


def _lists(device: torch.device, shape: tuple[int, int, int], masks: int, fulls: int) -> list[Tensor]:
    """Counts and indices of `mask` and `full` lists."""
    batch, heads, blocks = shape
    rows = batch * heads * blocks
    counts = (shape, (heads * blocks, blocks, 1), rows)
    indices = [
        ((*shape, places), (heads * blocks * places, blocks * places, places, 1), rows * places)
        for places in (max(masks, 1), max(fulls, 1))
    ]
    return int32_tensors(device, counts, counts, *indices)
