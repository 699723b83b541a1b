"""Worklist of KV-outer attention: the query rows that selected a KV block, cut into work tiles of one CTA each.

Token mode selects per token: `indices` `[B,H_kv,T,n]` holds in n slots the KV blocks that a token attends to. KV-outer
kernels need the inverse: for each KV block the tokens that selected it. Such a token, with its G query heads (packed as
in pack_gqa), is a *query row* of the block. It is listed as `slot_idx = token * n + slot`, which is also the index of
its partial: `o_partial[b, h, slot_idx]`.

    l' = 2, n = 2                        blocks   0               1       2
                slots    slot_idx
    token 0     0  -      0  1       query_rows | 0  2  4  6  8 | 5  7 | 9 |      tokens ascend within a block
    token 1     0  -      2  3
    token 2     0  1      4  5       counts     ROWS    5 2 1   SPLITS  2 0 0   WHOLE  0 1 1
    token 3     0  1      6  7       cum_counts         5 7 8           2 2 2          0 1 2
    token 4     0  2      8  9
                                     work_tiles BLOCK   0 0 1 2         of these blocks,
                                                FIRST   0 3 5 7         from here on in query_rows,
                                                COUNT   3 2 2 1         so many query rows

A block that many tokens selected (all of them select block 0) is split into work tiles of at least
`WorklistSizes.min_rows` (above: 2) and less than twice as many query rows. The tiles of split blocks come first, since
they are the longest; blocks that are not split have one tile each, empty if nothing selected them.

MarkRows       one thread per slot: the block of the slot, and bit t of that block's bitmap
CountRows      one warp per block: the number of bits before each word of its bitmap, and `counts`
               (`cum_counts` is a cumulative sum by torch)
ListRows       one thread per slot: the bits before its own give its position in `query_rows`
CutWorkTiles   one warp per block: its work tiles

Bits are set by atomic "or", whose order does not matter, and every position follows from counts: the worklist is
bitwise reproducible.

A slot has no block if it holds -1, a block that starts after its token, or a forced block that the caller attends to
elsewhere (attend/forced.py). Packed documents (B = 1): selected blocks count from a document's first token, those of
the worklist over all documents, each of which starts with a new one.

Sizes of tables and grids follow from shapes alone. Bytes: T n entries are read three times and written twice, and the
bitmaps, one bit per block and token, five times. T = 16K, n = 16, 4 heads, 1024 blocks: 60 MB, mostly in L2.

`worklist_chunks` iterates over the tokens, and over batches and heads, in chunks: as many at a time as keep the
partials and bitmaps of a chunk below a limit.

Limits: the blocks of a token are distinct; T n < 2^31 and tokens < 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from torch import Tensor

from cute_kernels.lists.kv_to_query import WORD
from cute_kernels.mma.warp import LANES, prefix_sum
from cute_kernels.pool.documents import KEY, LENGTH, TOKEN, PackedBlocks, document_at, fake_rows, fake_tables
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake

THREADS = 256
WARPS = 4

BITMAP_BYTES = 512 << 20
"""Maximum size of a chunk's bitmaps and their counts."""

CHUNK_ALIGNMENT = 256
"""Number of tokens per chunk is a multiple of this, except for the last chunk."""

ROWS, SPLITS, WHOLE = range(3)
"""Rows of `counts`, per block: number of query rows; number of work tiles if split, else 0; 1 if not split, else 0."""

BLOCK, FIRST, COUNT = range(3)
"""Rows of `work_tiles`, per work tile: block; index of its first query row in the list; number of query rows."""


class WorklistSizes(NamedTuple):
    """Sizes of tables and of memory for partial sums, from shapes alone."""

    rows: int
    """Maximum number of query rows over all blocks."""
    min_rows: int
    """Minimum query rows per work tile of a split block."""
    split_tiles: int
    """Maximum number of work tiles of split blocks."""
    tiles: int
    """Maximum number of work tiles."""

    @classmethod
    def bound(cls, rows: int, max_block_rows: int, blocks: int, min_rows: int) -> WorklistSizes:
        """Args:
        rows, max_block_rows: number of query rows of all blocks, and maximum of one.
        blocks: number of blocks.
        min_rows: minimum query rows per work tile of a split block.
        """
        split_tiles = rows // min_rows if max_block_rows >= 2 * min_rows else 0
        return cls(rows, min_rows, split_tiles, blocks + split_tiles)


class Worklist(NamedTuple):
    """Worklist of a chunk: tokens `first_token` ..., some batches and key/value heads."""

    slot_blocks: Tensor
    """int32 `[B,H_kv,T,n]`: KV block of each slot, -1 if none."""
    query_rows: Tensor
    """int32 `[B,H_kv,T n]`: slot_idx = token * n + slot of each query row, block by block."""
    work_tiles: Tensor
    """int32 `[B,H_kv,3,tiles]`: BLOCK, FIRST and COUNT."""
    counts: Tensor
    """int32 `[B,H_kv,3,blocks]`: ROWS, SPLITS and WHOLE."""
    cum_counts: Tensor
    """int32 `[B,H_kv,3,blocks]`: inclusive cumulative sums of `counts` over the blocks."""
    sizes: WorklistSizes
    first_token: int

    def tokens(self, first_token: int = 0) -> slice:
        """Slice of the chunk's tokens, counted from `first_token`."""
        start = self.first_token - first_token
        return slice(start, start + self.slot_blocks.shape[2])

    def narrow(self, batches: slice, heads: slice) -> Worklist:
        """Restrict to some of its batches and key/value heads."""
        tables = (table[batches, heads] for table in self[:5])
        slot_blocks, query_rows, work_tiles, counts, cum_counts = tables
        return Worklist(slot_blocks, query_rows, work_tiles, counts, cum_counts, self.sizes, self.first_token)


# ---------------------------------------------------------------- shared with other kernels


@cute.jit
def selected_block(
    chosen: Int32,
    position: Int32,
    end: Int32,
    size: cutlass.Constexpr[int],
    mBounds: cute.Tensor | None,
    init: cutlass.Constexpr[int] = 0,
    local: cutlass.Constexpr[int] = 0,
) -> Int32:
    """KV block that a slot selects, counted over all documents; -1 if none.

    Args:
        chosen: content of the slot.
        position: of its token, -1 if none.
        end: number of tokens of the sequence; not read with mBounds.
        mBounds: PackedBlocks.bounds.
        init, local: forced blocks to leave out: the first of a document, and those that end with the token's own.
    """
    before = Int32(0)
    if const_expr(mBounds is not None):
        document = document_at(mBounds[TOKEN, None], position, 1, 1, 0)
        position -= mBounds[TOKEN, document]
        before, end = mBounds[KEY, document] // size, mBounds[LENGTH, document]
    is_selected = (chosen >= init) & (chosen <= position // size - local) & (position < end)
    return before + chosen if is_selected else Int32(-1)


@cute.jit
def position_of(row: Int32, mPositions: cute.Tensor | None) -> Int32:
    """Index of a query row's token among the keys. Args: `mPositions`, for packed documents."""
    return row if const_expr(mPositions is None) else mPositions[row]


@cute.jit
def write_counts(mCounts: cute.Tensor, block: Int32, rows: Int32, min_rows: Int32):
    """Write the column of a block in `counts`, using one thread."""
    splits = rows // min_rows
    mCounts[ROWS, block] = rows
    mCounts[SPLITS, block] = splits if splits > 1 else Int32(0)
    mCounts[WHOLE, block] = Int32(0) if splits > 1 else Int32(1)


@cute.jit
def write_work_tiles(mCounts: cute.Tensor, mCumCounts: cute.Tensor, mWorkTiles: cute.Tensor, block: Int32):
    """Write the work tiles of a block, using one warp.

    Args:
        mCounts, mCumCounts: int32 [3, blocks]: ROWS, SPLITS and WHOLE, and their cumulative sums.
        mWorkTiles: int32 [3, tiles], those of split blocks first.
    """
    lane = cute.arch.lane_idx()
    rows, tiles = mCounts[ROWS, block], mCounts[SPLITS, block]
    first, first_tile = mCumCounts[ROWS, block] - rows, mCumCounts[SPLITS, block] - tiles
    if tiles == 0:
        tiles, first_tile = Int32(1), mCumCounts[SPLITS, mCounts.shape[1] - 1] + mCumCounts[WHOLE, block] - 1
    length, longer = rows // tiles, rows % tiles  # the first ones have one more row
    for i in cutlass.range(lane, tiles, LANES, unroll=1):
        mWorkTiles[BLOCK, first_tile + i] = block
        mWorkTiles[FIRST, first_tile + i] = first + i * length + cutlass.min(i, longer)
        mWorkTiles[COUNT, first_tile + i] = length + (Int32(1) if i < longer else Int32(0))


@cute.jit
def num_work_tiles(mCumCounts: cute.Tensor) -> tuple[Int32, Int32]:
    """Number of work tiles of split blocks, and of all blocks; later work tiles are uninitialized.

    Args:
        mCumCounts: int32 [3, blocks].
    """
    last = mCumCounts.shape[1] - 1
    split = mCumCounts[SPLITS, last]
    return split, split + mCumCounts[WHOLE, last]


# ---------------------------------------------------------------- kernels


class MarkRows:
    """Args: size: l', tokens per block. init, local: forced blocks to leave out (`selected_block`)."""

    def __init__(self, size: int, init: int, local: int) -> None:
        self.size, self.init, self.local = size, init, local

    @staticmethod
    @compiled_once
    def compile(size: int, packed: bool, init: int = 0, local: int = 0) -> Kernel:
        tables = [fake_slots() for _ in range(3)]
        return compile_kernel(MarkRows(size, init, local), *tables, *fake_packed(packed), Int32(0))

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,  # int32 [B, H_kv, T, n]
        mSlotBlocks: cute.Tensor,  # int32 [B, H_kv, T, n]
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words], zeros
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds and .positions
        mPositions: cute.Tensor | None,
        first_token: Int32,
        stream: Any,
    ):
        self.kernel(mIndices, mSlotBlocks, mBits, mBounds, mPositions, first_token).launch(
            grid=[cute.ceil_div(mIndices.shape[2] * mIndices.shape[3], THREADS), mIndices.shape[1], mIndices.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mIndices: cute.Tensor,
        mSlotBlocks: cute.Tensor,
        mBits: cute.Tensor,
        mBounds: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        first_token: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, head, batch = cute.arch.block_idx()
        tokens, slots = mIndices.shape[2:]
        slot_idx = cta * THREADS + thread
        token, slot = slot_idx // slots, slot_idx % slots
        if token < tokens:
            chosen, end = mIndices[batch, head, token, slot], first_token + tokens
            position = position_of(first_token + token, mPositions)
            block = selected_block(chosen, position, end, self.size, mBounds, self.init, self.local)
            if block >= 0:
                word = cute.domain_offset((batch, head, block, token // WORD), mBits)
                cute.arch.atomic_or(word.iterator, Int32(1) << token % WORD, sem="relaxed")
            mSlotBlocks[batch, head, token, slot] = block


class CountRows:
    """One warp per block."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        return compile_kernel(CountRows(), fake_slots(), fake_slots(), fake_tiles(), Int32(0))

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words]
        mBefore: cute.Tensor,  # int32 [B, H_kv, blocks, words]: bits of earlier words
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        min_rows: Int32,  # WorklistSizes.min_rows
        stream: Any,
    ):
        self.kernel(mBits, mBefore, mCounts, min_rows).launch(
            grid=[cute.ceil_div(mBits.shape[2], WARPS), mBits.shape[1], mBits.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mBits: cute.Tensor, mBefore: cute.Tensor, mCounts: cute.Tensor, min_rows: Int32):
        cta, head, batch = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        block = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        words = mBits.shape[3]
        if block < mBits.shape[2]:
            rows = Int32(0)
            for start in cutlass.range(0, words, LANES, unroll=2):
                word, count = start + lane, Int32(0)
                if word < words:
                    count = cute.arch.popc(mBits[batch, head, block, word])
                sums = prefix_sum(count)
                if word < words:
                    mBefore[batch, head, block, word] = rows + sums - count
                rows += cute.arch.shuffle_sync(sums, LANES - 1)
            if lane == 0:
                write_counts(mCounts[batch, head, None, None], block, rows, min_rows)


class ListRows:
    """One thread per slot."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        tables = [fake_slots() for _ in range(3)]
        return compile_kernel(ListRows(), *tables, fake_tiles(), fake_tiles(), fake_query_rows())

    @cute.jit
    def __call__(
        self,
        mSlotBlocks: cute.Tensor,  # int32 [B, H_kv, T, n]
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words]
        mBefore: cute.Tensor,  # int32 [B, H_kv, blocks, words]
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mCumCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mQueryRows: cute.Tensor,  # int32 [B, H_kv, T n]
        stream: Any,
    ):
        self.kernel(mSlotBlocks, mBits, mBefore, mCounts, mCumCounts, mQueryRows).launch(
            grid=[cute.ceil_div(mQueryRows.shape[2], THREADS), mQueryRows.shape[1], mQueryRows.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mSlotBlocks: cute.Tensor,
        mBits: cute.Tensor,
        mBefore: cute.Tensor,
        mCounts: cute.Tensor,
        mCumCounts: cute.Tensor,
        mQueryRows: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, head, batch = cute.arch.block_idx()
        slot_idx = cta * THREADS + thread
        if slot_idx < mQueryRows.shape[2]:
            token, slot = slot_idx // mSlotBlocks.shape[3], slot_idx % mSlotBlocks.shape[3]
            block = mSlotBlocks[batch, head, token, slot]
            if block >= 0:
                word = token // WORD
                lower = mBits[batch, head, block, word] & ((Int32(1) << token % WORD) - 1)
                first = mCumCounts[batch, head, ROWS, block] - mCounts[batch, head, ROWS, block]
                row = first + mBefore[batch, head, block, word] + cute.arch.popc(lower)
                mQueryRows[batch, head, row] = slot_idx


class CutWorkTiles:
    """One warp per block."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        return compile_kernel(CutWorkTiles(), *[fake_tiles() for _ in range(3)])

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mCumCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mWorkTiles: cute.Tensor,  # int32 [B, H_kv, 3, tiles]
        stream: Any,
    ):
        self.kernel(mCounts, mCumCounts, mWorkTiles).launch(
            grid=[cute.ceil_div(mCounts.shape[3], WARPS), mCounts.shape[1], mCounts.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mCounts: cute.Tensor, mCumCounts: cute.Tensor, mWorkTiles: cute.Tensor):
        cta, head, batch = cute.arch.block_idx()
        block = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if block < mCounts.shape[3]:
            write_work_tiles(
                mCounts[batch, head, None, None],
                mCumCounts[batch, head, None, None],
                mWorkTiles[batch, head, None, None],
                block,
            )


# ---------------------------------------------------------------- compile


def fake_slots() -> Any:
    """`indices`, Worklist.slot_blocks, or another int32 table of four dimensions, to compile with."""
    return fake(torch.int32, None, None, None, None, aligned=False)


def fake_tiles() -> Any:
    """Worklist.work_tiles, .counts or .cum_counts to compile with."""
    return fake(torch.int32, None, None, 3, None, aligned=False)


def fake_query_rows() -> Any:
    """Worklist.query_rows to compile with."""
    return fake(torch.int32, None, None, None, aligned=False)


def fake_packed(packed: bool) -> tuple[Any, Any]:
    """PackedBlocks.bounds and .positions to compile with, or None for both."""
    return (fake_tables()[0], fake_rows()) if packed else (None, None)


# ---------------------------------------------------------------- launch


def build_worklist(
    indices: Tensor,
    *,
    size: int,
    blocks: int,
    min_rows: int,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
    init: int = 0,
    local: int = 0,
) -> Worklist:
    """List the query rows of each KV block, and cut the lists into work tiles.

    Args:
        indices: int32 `[B,H_kv,T,n]`, not empty, of tokens `first_token` ...; padded with -1.
        size: l', tokens per block.
        blocks: maximum number of blocks that tokens up to the last one can select.
        min_rows: minimum query rows per work tile of a split block.
        packed: describes documents; `first_token` then counts rows.
        init, local: forced blocks to leave out: the first of a document, and those that end with a token's own.
    """
    batch, heads, tokens, slots = indices.shape
    sizes = WorklistSizes.bound(tokens * slots, tokens, blocks, min_rows)

    def table(*shape: int) -> Tensor:
        return torch.empty((batch, heads, *shape), dtype=torch.int32, device=indices.device)

    bits = torch.zeros((batch, heads, blocks, -(-tokens // WORD)), dtype=torch.int32, device=indices.device)
    slot_blocks, before = torch.empty_like(indices), torch.empty_like(bits)
    counts, cum_counts = table(3, blocks), table(3, blocks)
    query_rows, work_tiles = table(sizes.rows), table(3, sizes.tiles)
    tables = packed_tables(packed)
    MarkRows.compile(size, packed is not None, init, local).run(indices, slot_blocks, bits, *tables, first_token)
    CountRows.compile().run(bits, before, counts, min_rows)
    torch.cumsum(counts, 3, out=cum_counts)
    ListRows.compile().run(slot_blocks, bits, before, counts, cum_counts, query_rows)
    CutWorkTiles.compile().run(counts, cum_counts, work_tiles)
    return Worklist(slot_blocks, query_rows, work_tiles, counts, cum_counts, sizes, first_token)


def packed_tables(packed: PackedBlocks | None) -> tuple[Tensor | None, Tensor | None]:
    """PackedBlocks.bounds and .positions, as passed to kernels."""
    return (None, None) if packed is None else (packed.bounds, packed.positions)


def worklist_chunks(
    indices: Tensor,
    *,
    size: int,
    min_rows: int,
    token_bytes: int,
    max_bytes: int,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
    init: int = 0,
    local: int = 0,
) -> Iterator[tuple[Worklist, slice, slice]]:
    """Iterate over worklists of some tokens, batches and key/value heads at a time, tokens ascending.

    Args:
        indices, size, min_rows, first_token, packed, init, local: see `build_worklist`; for all tokens.
        token_bytes: bytes of partials per token of one batch and key/value head.
        max_bytes: limit for a chunk's partials; exceeded only if CHUNK_ALIGNMENT tokens of one head need more.

    Yields:
        Worklist of a chunk, and its range of batches and of key/value heads.
    """
    batch, heads, tokens, _ = indices.shape
    if indices.stride(3) != 1:
        indices = indices.clone(memory_format=torch.contiguous_format)
    blocks = -(-(first_token + tokens) // size) if packed is None else packed.num_blocks
    per_token = 2 * blocks // 8 + 1  # bytes of bitmaps and their counts
    step = min(max_bytes // token_bytes, BITMAP_BYTES // per_token) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    step = max(step, CHUNK_ALIGNMENT)
    chunks = max(-(-tokens // step), 1)  # with about the same number of tokens each
    step = -(-tokens // (chunks * CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        begun = blocks if packed is not None else -(-(first_token + stop) // size)
        max_pairs = BITMAP_BYTES // (per_token * (stop - start))
        for batches, kv_heads in _pair_chunks(slice(0, batch), slice(0, heads), max_pairs):
            worklist = build_worklist(
                indices[batches, kv_heads, start:stop],
                size=size,
                blocks=begun,
                min_rows=min_rows,
                first_token=first_token + start,
                packed=packed,
                init=init,
                local=local,
            )
            for b, h in _pair_chunks(batches, kv_heads, max_bytes // (token_bytes * (stop - start))):
                inner = slice(b.start - batches.start, b.stop - batches.start)
                yield worklist.narrow(inner, slice(h.start - kv_heads.start, h.stop - kv_heads.start)), b, h


def _pair_chunks(batches: slice, heads: slice, max_pairs: int) -> Iterator[tuple[slice, slice]]:
    """Batches and heads in chunks of at most `max_pairs` pairs, but at least one."""
    num_heads = heads.stop - heads.start
    step = max(1, max_pairs // num_heads)
    for b in range(batches.start, batches.stop, step):
        for h in range(heads.start, heads.stop, max(1, min(max_pairs, num_heads))):
            yield slice(b, min(b + step, batches.stop)), slice(h, min(h + max(1, max_pairs), heads.stop))
