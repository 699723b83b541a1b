"""Lists of key blocks for block-sparse attention, from selections and from causality.

    chosen_lists    blocks that each tile of query rows selected
    prefix_lists    all blocks of compressed entries that each tile sees

For each tile of query rows, two lists of blocks of `width` keys, ascending: `full` blocks are visible to every row of
the tile, `mask` blocks need a mask. Keys are tokens (token j is visible to row i iff j <= i) or compressed entries
(entry j is visible iff j*d + l-1 <= i); tokens are entries with l = d = 1.

Packed documents (causal): rows, selected blocks and visibility count from a document's first token, listed blocks from
the start of the aligned buffers of pool/documents.py, where a document starts with a new tile and a new block of keys.

Kernels here use one thread per tile: bytes and time are negligible (a few microseconds at any length).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from torch import Tensor

from cute_kernels.pool.documents import DOCUMENT, ENTRY, KEY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake

THREADS = 128


@dataclass(frozen=True)
class BlockLists:
    """Blocks of keys for each tile of query rows, in the format of FlashAttention-4's block sparsity.

    For its backward, lists/kv_to_query.py lists tiles of query rows for each block of keys in the same format.
    """

    mask_count: Tensor
    """int32 `[B,H,M]` for M tiles of query rows."""
    mask_index: Tensor
    """int32 `[B,H,M,K]`; only the first `count` of K entries are read."""
    full_count: Tensor
    full_index: Tensor
    rows: int
    """Query rows per tile."""
    width: int
    """Keys per block."""
    bits: Tensor | None = None
    """For backward's lists whose blocks are wider than selected ones: `kv_to_query.tile_bits`, for a mask_mod."""
    bit_keys: int = 0
    """Keys per selected block, if there are bits."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.mask_count, self.mask_index, self.full_count, self.full_index


@dataclass(frozen=True)
class Keys:
    """Visibility of keys to a query row: those whose last token is not after the row; all without causality."""

    length: int = 1
    stride: int = 1
    causal: bool = True

    @cute.jit
    def visible(self, row: Int32, keys: Int32) -> Int32:
        """Number of the first `keys` keys that the row sees."""
        count = keys
        if const_expr(self.causal):
            count = Int32(0) if row + 1 < self.length else cutlass.min(keys, (row + 1 - self.length) // self.stride + 1)
        return count

    def last_token(self, key: Any) -> Any:
        """First row that sees a key, with causality."""
        return key if self.length == self.stride == 1 else key * self.stride + (self.length - 1)


class ChosenLists:
    """Lists of the blocks selected by each tile.

    Args:
        keys: visibility of keys.
        size: keys per selected block.
        width: keys per listed block, which divides `size`.
        rows: query rows per tile; with documents T.
        entries: keys are compressed entries, not tokens.
    """

    def __init__(self, keys: Keys, size: int, width: int, rows: int, *, entries: bool) -> None:
        self.keys, self.width, self.rows, self.entries = keys, width, rows, entries
        self.parts = size // width  # listed blocks per selected block

    @staticmethod
    @compiled_once
    def compile(keys: Keys, size: int, width: int, rows: int, *, entries: bool, packed: bool) -> Kernel:
        indices = fake(torch.int32, None, None, None, None, aligned=False)
        return compile_kernel(
            ChosenLists(keys, size, width, rows, entries=entries),
            indices,
            *fake_lists(),
            *(fake_tables() if packed else (None, None)),
            *[Int32(0)] * 3,
        )

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,  # int32 [B, S, tiles, k]
        mMaskCount: cute.Tensor,  # [B, H, tiles]
        mMaskIndex: cute.Tensor,  # [B, H, tiles, K]
        mFullCount: cute.Tensor,  # [B, H, tiles]
        mFullIndex: cute.Tensor,  # [B, H, tiles, K]
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        num_keys: Int32,
        rows_from: Int32,  # first query row
        rows_to: Int32,  # exclusive end of the query rows
        stream: Any,
    ):
        self.kernel(
            mIndices,
            mMaskCount,
            mMaskIndex,
            mFullCount,
            mFullIndex,
            mBounds,
            mTiles,
            num_keys,
            rows_from,
            rows_to,
        ).launch(grid=[cute.ceil_div(cute.size(mMaskCount), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mIndices: cute.Tensor,
        mMaskCount: cute.Tensor,
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        num_keys: Int32,
        rows_from: Int32,
        rows_to: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        batches, heads, tiles = mMaskCount.shape
        item = group * THREADS + thread
        tile, head, batch = item % tiles, item // tiles % heads, item // tiles // heads
        if batch < batches:
            select_head = head // (heads // mIndices.shape[1])
            first_row, base = rows_from + tile * self.rows, Int32(0)
            if const_expr(mTiles is not None):
                document = cutlass.max(mTiles[DOCUMENT, tile], 0)  # nothing is selected for unused tiles
                first_row -= mBounds[ROW, document]
                rows_to = mBounds[LENGTH, document]
                base = mBounds[ENTRY if self.entries else KEY, document]
            last_row = cutlass.min(first_row + self.rows, rows_to) - 1
            seen_by_all = self.keys.visible(first_row, num_keys)
            seen = self.keys.visible(last_row, num_keys)
            listed_before = base // self.width
            # [K] each
            mask_index, full_index = mMaskIndex[batch, head, tile, None], mFullIndex[batch, head, tile, None]
            masks, fulls = Int32(0), Int32(0)
            for i in cutlass.range(mIndices.shape[3] * self.parts):
                chosen = mIndices[batch, select_head, tile, i // self.parts]
                block = chosen * self.parts + i % self.parts
                if (chosen >= 0) & (block * self.width < seen):
                    if (block + 1) * self.width <= seen_by_all:
                        full_index[fulls] = listed_before + block
                        fulls += 1
                    else:
                        mask_index[masks] = listed_before + block
                        masks += 1
            mMaskCount[batch, head, tile] = masks
            mFullCount[batch, head, tile] = fulls


class PrefixLists:
    """Lists of all visible blocks of entries.

    `full` blocks are 0, 1, 2, ... for every tile, so one row of them is enough; documents have their own numbers.

    Args:
        rows: query rows per listed tile.
        tile: with documents T, a multiple of `rows`.
    """

    def __init__(self, keys: Keys, width: int, rows: int, tile: int | None) -> None:
        self.keys, self.width, self.rows, self.tile = keys, width, rows, tile

    @staticmethod
    @compiled_once
    def compile(keys: Keys, width: int, rows: int, tile: int | None) -> Kernel:
        return compile_kernel(
            PrefixLists(keys, width, rows, tile),
            *fake_lists(),
            *((None, None) if tile is None else fake_tables()),
            *[Int32(0)] * 3,
        )

    @cute.jit
    def __call__(
        self,
        mMaskCount: cute.Tensor,  # [B, H, M], the same memory for all B and H
        mMaskIndex: cute.Tensor,  # [B, H, M, K], the same memory for all B and H
        mFullCount: cute.Tensor,  # [B, H, M]
        mFullIndex: cute.Tensor,  # [B, H, M, blocks], without documents the same for all M
        mBounds: cute.Tensor | None,  # Documents.bounds
        mTiles: cute.Tensor | None,  # Documents.tiles
        num_keys: Int32,
        rows_from: Int32,
        rows_to: Int32,
        stream: Any,
    ):
        threads = mMaskCount.shape[2]
        if const_expr(mTiles is None):
            threads = cutlass.max(threads, mFullIndex.shape[3])
        self.kernel(
            mMaskCount, mMaskIndex, mFullCount, mFullIndex, mBounds, mTiles, num_keys, rows_from, rows_to
        ).launch(grid=[cute.ceil_div(threads, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mMaskCount: cute.Tensor,
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        num_keys: Int32,
        rows_from: Int32,
        rows_to: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        item = group * THREADS + thread
        if const_expr(mTiles is None) and item < mFullIndex.shape[3]:
            mFullIndex[0, 0, 0, item] = item
        if item < mMaskCount.shape[2]:
            row, before = rows_from + item * self.rows, Int32(0)
            if const_expr(mTiles is not None):
                document = mTiles[DOCUMENT, row // self.tile]
                rows_to = Int32(0)
                if document >= 0:
                    row -= mBounds[ROW, document]
                    rows_to = mBounds[LENGTH, document]
                    before = mBounds[ENTRY, document] // self.width
            fulls = self.keys.visible(row, num_keys) // self.width
            last_row = cutlass.min(row + self.rows, rows_to) - 1
            blocks = cute.ceil_div(self.keys.visible(last_row, num_keys), self.width)
            if const_expr(mTiles is not None):
                if row >= rows_to:  # unused, or past the document's end
                    fulls, blocks = Int32(0), Int32(0)
                for i in cutlass.range(fulls):
                    mFullIndex[0, 0, item, i] = before + i
            mFullCount[0, 0, item] = fulls
            mMaskCount[0, 0, item] = blocks - fulls
            for i in cutlass.range(blocks - fulls):
                mMaskIndex[0, 0, item, i] = before + fulls + i


def fake_lists() -> list[Any]:
    """BlockLists.tensors to compile with."""
    return [fake(torch.int32, *[None] * dims, aligned=False) for dims in (3, 4, 3, 4)]


def chosen_lists(
    indices: Tensor,
    heads: int,
    keys: Keys,
    *,
    size: int,
    width: int,
    rows: int,
    num_keys: int,
    rows_from: int,
    rows_to: int,
    entries: bool,
    documents: Documents | None = None,
) -> BlockLists:
    """Lists of selected blocks.

    Args:
        indices: int32 `[B,S,tiles,k]`, ascending, padded with -1, for the tiles of query rows `rows_from` ...
            `rows_to` - 1.
        heads: query heads H, a multiple of S.
        size, width: keys per selected and per listed block; `width` divides `size`.
        rows: query rows per tile.
        entries: the blocks consist of compressed entries, not of tokens.
        documents: layout; `num_keys`, `rows_from` and `rows_to` then refer to the aligned buffers.
    """
    if size % width:
        raise ValueError(f"listed blocks must divide chosen ones, got {width} and {size} keys")
    batch, _, tiles, count = indices.shape
    places = max(1, min(count * (size // width), -(-num_keys // width)))
    counts = ((batch, heads, tiles), (heads * tiles, tiles, 1), batch * heads * tiles)
    listed = ((batch, heads, tiles, places), (heads * tiles * places, tiles * places, places, 1), counts[2] * places)
    mask_count, full_count, mask_index, full_index = int32_tensors(indices.device, counts, counts, listed, listed)
    if mask_count.numel() > 0:
        run = ChosenLists.compile(keys, size, width, rows, entries=entries, packed=documents is not None).run
        tables: tuple[Any, Any] = (None, None) if documents is None else (documents.bounds, documents.tiles)
        run(indices, mask_count, mask_index, full_count, full_index, *tables, num_keys, rows_from, rows_to)
    return BlockLists(mask_count, mask_index, full_count, full_index, rows, width)


def prefix_lists(
    batch: int,
    heads: int,
    keys: Keys,
    *,
    width: int,
    rows: int,
    num_keys: int,
    rows_from: int,
    rows_to: int,
    device: torch.device,
    documents: Documents | None = None,
) -> BlockLists:
    """Lists of all entries that query rows `rows_from` ... `rows_to` - 1 see, stored once for all batches and heads.

    Args:
        keys: visibility of entries.
        width, rows: entries per listed block, query rows per tile.
        documents: layout; rows are then aligned ones, and `num_keys` is the most entries of one document.
    """
    tiles = -(-(rows_to - rows_from) // rows)
    blocks = -(-num_keys // width)
    masks = min(blocks, -(-rows // keys.stride // width) + 2)
    counts = ((batch, heads, tiles), (0, 0, 1), tiles)
    mask = ((batch, heads, tiles, masks), (0, 0, masks, 1), tiles * masks)
    full = ((batch, heads, tiles, blocks), (0, 0, 0, 1), blocks)  # 0, 1, 2, ... serve every tile
    if documents is not None:
        full = (full[0], (0, 0, blocks, 1), tiles * blocks)
    mask_count, full_count, mask_index, full_index = int32_tensors(device, counts, counts, mask, full)
    if mask_count.numel() > 0 and blocks > 0:
        tables: tuple[Any, Any] = (None, None) if documents is None else (documents.bounds, documents.tiles)
        run = PrefixLists.compile(keys, width, rows, None if documents is None else documents.tile).run
        run(mask_count, mask_index, full_count, full_index, *tables, num_keys, rows_from, rows_to)
    return BlockLists(mask_count, mask_index, full_count, full_index, rows, width)


def int32_tensors(device: torch.device, *layouts: tuple[tuple[int, ...], tuple[int, ...], int]) -> list[Tensor]:
    """int32 tensors (sizes, strides, elements) in one allocation, which takes the host half the time of four."""
    whole = torch.empty(sum(count for _, _, count in layouts), dtype=torch.int32, device=device)
    tensors, start = [], 0
    for sizes, strides, count in layouts:
        tensors.append(whole.as_strided(sizes, strides, start))
        start += count
    return tensors
