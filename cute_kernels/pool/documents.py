"""Packed documents of unknown lengths, laid out for kernels that work on whole tiles and blocks.

    document i      tokens cu_seqlens[i] ... cu_seqlens[i+1]-1, n of them
    tiles           ceil(n / T), numbered document after document
    aligned rows    tile t holds rows t*T ... t*T+T-1; rows behind a document's last token are zero
    entries         max(0, (n-l)//d + 1), starting at a multiple of ENTRY_ALIGNMENT; absent ones are zero

All sizes follow from T, the number of tokens and the number of documents, so nothing waits for the device: there may
be unused tiles and entries at the end. One CTA adds up the lengths, then q, k and v are copied. The zeros keep NaN and
inf of one document out of the next one's sums, where attention weighs invisible values with 0. A window whose tiles of
keys do not end with a tile of rows gets keys and values in blocks of their own (`Documents.realign_kv`).

Floor: every row is read once, every aligned row written once. 128K tokens, 8 + 2 + 2 heads of 128, bf16: 0.8 GB,
0.19 ms at 4.2 TB/s.

Limits: at least one document; fewer than 2^31 aligned rows, and aligned entries times d; T a multiple of COPIED_ROWS;
head dims multiples of 8; 64-bit offsets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.limits import MAX_LIST_WIDTH
from cute_kernels.mma.warp import LANES, prefix_sum
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

ENTRY_ALIGNMENT = MAX_LIST_WIDTH
"""So that no block of entries in a list holds entries of two documents."""

TOKEN, TILE, ROW, ENTRY, PUBLIC_ENTRY, LENGTH = range(6)
"""Rows of Documents.bounds: the first of each that belongs to a document, and its number of tokens."""

DOCUMENT, SHIFT = range(2)
"""Rows of Documents.tiles."""

SCAN_THREADS = LANES * LANES
COPY_THREADS = 128
COPIED_ROWS = 16
"""Rows that one CTA copies."""
BATCH = 4
"""Loads of a thread in flight together."""


class Varlen(NamedTuple):
    """Documents in the rows of one sequence, as FlashAttention-4's interface takes them.

    Its kernels read whole tiles of keys, also past a document's last one.
    """

    cu_seqlens_q: Tensor
    """First row of each document in q, and the end of all, int32 `[docs+1]`."""
    cu_seqlens_k: Tensor
    """The same of k and v; the same tensor where all tiles end with a document."""
    seqused: Tensor
    """Rows and keys of each document, int32 `[docs]`."""


@dataclass(frozen=True)
class Documents:
    """Where documents lie in aligned rows and entries, whose numbers do not depend on cu_seqlens' values."""

    tile: int
    """T, rows of a tile."""
    stride: int
    """d."""
    bounds: Tensor
    """int32 `[6,B+1]`: first token, tile, aligned row, aligned entry and entry without gaps (in the last column the end
    of all), and number of tokens."""
    tiles: Tensor
    """int32 `[2,tiles]`: a tile's document (-1: unused), and aligned entry * d - aligned row of its beginning."""
    rows: Tensor
    """int32 `[T]`: the aligned row of a token, -1 behind the last document."""
    num_entries: int
    """Length of buffers with aligned entries."""
    most_entries: int
    """That one document, or all without gaps, can have."""
    cu_seqlens: Tensor
    """int32 `[B+1]`, as given."""

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]

    @property
    def shifts(self) -> Tensor:
        """Of each tile: what to add to an aligned row where it is compared with d times an aligned entry, `[tiles]`."""
        return self.tiles[SHIFT]

    @property
    def varlen(self) -> Varlen:
        """Where attention finds the documents in aligned rows."""
        return Varlen(self.bounds[ROW], self.bounds[ROW], self.bounds[LENGTH, :-1])

    def realign_kv(self, size: int, k: Tensor, v: Tensor) -> tuple[Varlen, Tensor, Tensor]:
        """Aligned keys and values again, so that blocks of `size` of them, too, hold no two documents.

        Args:
            k, v: aligned rows `[1,tiles*T,heads,D]`.

        Returns:
            Where attention finds the documents in aligned rows and in these keys; k and v.
        """
        if self.tile % size == 0:
            return self.varlen, k, v
        blocks = sizes(len(self.rows), len(self.cu_seqlens) - 1, size, self.stride)[0]
        bounds, tiles = self.bounds_of_blocks(size), self.tiles.new_empty((2, blocks))
        new_k, new_v = replace(self, tile=size, bounds=bounds, tiles=tiles).align(k, v)
        return self.varlen._replace(cu_seqlens_k=bounds[ROW]), new_k, new_v

    def bounds_of_blocks(self, size: int) -> Tensor:
        """`bounds` whose tiles are blocks of `size` tokens, for kernels that read aligned rows as the tokens."""
        bounds = bounds_of(self.cu_seqlens, tile=size, length=size, stride=size)
        bounds[TOKEN] = self.bounds[ROW]
        return bounds

    def align(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned rows `[1,tiles*T,heads,D]` of k and v `[1,T,heads,D]`."""
        aligned_k, aligned_v = _align_rows(self, k, v)
        return aligned_k, aligned_v

    def align_one(self, x: Tensor) -> Tensor:
        """Aligned rows of one tensor `[1,T,heads,D]`."""
        return _align_rows(self, x)[0]

    def to_tokens(self, aligned: Tensor, dim: int, fill: float) -> Tensor:
        """Aligned rows, along `dim`, in the tokens' order; `fill` behind the last document."""
        return self.fill_tail(aligned.index_select(dim, self.rows.clamp(min=0)), dim, fill)

    def fill_tail(self, packed: Tensor, dim: int, fill: float) -> Tensor:
        """The tensor with `fill` behind the last document."""
        behind = (self.rows < 0).view(-1, *[1] * (packed.dim() - dim - 1))
        return packed.masked_fill(behind, fill)

    def compact_entries(self, entries: Tensor) -> Tensor:
        """Aligned entries `[num_entries,...]` document after document, then zeros: `[most_entries,...]`."""
        places = torch.arange(self.most_entries, dtype=torch.int32, device=entries.device)
        first = self.bounds[PUBLIC_ENTRY]
        document = torch.searchsorted(first[1:], places, right=True)  # B for unused places
        used = document < self.bounds.shape[1] - 1
        return _gather(entries, self.bounds[ENTRY][document] + places - first[document], used)

    def align_entries(self, entries: Tensor) -> Tensor:
        """Entries document after document `[at least all,...]` as aligned ones `[num_entries,...]`, zeros between."""
        places = torch.arange(self.num_entries, dtype=torch.int32, device=entries.device)
        aligned, packed = self.bounds[ENTRY], self.bounds[PUBLIC_ENTRY]
        document = torch.searchsorted(aligned[1:], places, right=True).clamp(max=self.bounds.shape[1] - 2)
        before = places - aligned[document]
        return _gather(entries, packed[document] + before, before < packed[document + 1] - packed[document])


def _gather(entries: Tensor, places: Tensor, used: Tensor) -> Tensor:
    """The entries at these places, zeros where none is used."""
    if entries.shape[0] == 0:
        return entries.new_zeros((len(places), *entries.shape[1:]))
    picked = entries.index_select(0, torch.where(used, places, 0))
    return picked.masked_fill(~used.view(-1, *[1] * (entries.dim() - 1)), 0)


@cute.jit
def document_at(mFirst: cute.Tensor, index: Int32, scale: Int32, size: Int32, gap: Int32) -> Int32:
    """The last document i with mFirst[i]*scale // size + i*gap <= index."""
    low, high = Int32(0), Int32(mFirst.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if mFirst[middle] * scale // size + middle * gap <= index:
            low = middle
        else:
            high = middle
    return low


class DocumentBounds:
    """Documents.bounds: prefix sums of tiles and entries over documents, by one CTA."""

    def __init__(self, tile: int, length: int, stride: int) -> None:
        self.tile, self.length, self.stride = tile, length, stride

    @cute.jit
    def __call__(self, mCuSeqlens: cute.Tensor, mBounds: cute.Tensor, stream: Any):
        self.kernel(mCuSeqlens, mBounds).launch(grid=[1, 1, 1], block=[SCAN_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mCuSeqlens: cute.Tensor, mBounds: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // LANES, thread % LANES
        counted = (TILE, ENTRY, PUBLIC_ENTRY)
        smem = cutlass.memory.SmemAllocator()
        sTotal = smem.allocate_tensor(Int32, cute.make_layout((LANES, len(counted)), stride=(1, LANES)), 16)
        rCount = cute.make_rmem_tensor(len(counted), Int32)
        rSum = cute.make_rmem_tensor(len(counted), Int32)
        rBefore = cute.make_rmem_tensor(len(counted), Int32)
        rBefore.fill(0)
        docs = mCuSeqlens.shape[0] - 1
        for start in cutlass.range(0, docs + 1, SCAN_THREADS):
            document, tokens = start + thread, Int32(0)
            if document < docs:
                tokens = mCuSeqlens[document + 1] - mCuSeqlens[document]
            entries = Int32(0) if tokens < self.length else (tokens - self.length) // self.stride + 1
            rCount[0] = cute.ceil_div(tokens, self.tile)
            rCount[1] = cute.ceil_div(entries, ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT
            rCount[2] = entries
            for i in range_constexpr(len(counted)):
                rSum[i] = prefix_sum(rCount[i])
                if lane == LANES - 1:
                    sTotal[warp, i] = rSum[i]
            cute.arch.sync_threads()
            for i in range_constexpr(len(counted)):
                totals = prefix_sum(sTotal[lane, i])
                before = cute.arch.shuffle_sync(totals, cutlass.max(warp - 1, 0))
                before = Int32(0) if warp == 0 else before
                rSum[i] += rBefore[i] + before - rCount[i]
                rBefore[i] += cute.arch.shuffle_sync(totals, LANES - 1)
                if document <= docs:
                    mBounds[counted[i], document] = rSum[i]
            if document <= docs:
                mBounds[TOKEN, document] = mCuSeqlens[document]
                mBounds[ROW, document] = rSum[0] * self.tile
                mBounds[LENGTH, document] = tokens
            cute.arch.sync_threads()


class AlignRows:
    """Copies rows to where their document begins with a tile; with q it also fills in Documents.tiles and .rows.

    A CTA copies COPIED_ROWS rows of one tensor.
    """

    def __init__(self, tile: int, stride: int) -> None:
        self.tile, self.stride = tile, stride

    @cute.jit
    def __call__(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor,
        mRows: cute.Tensor,
        mK: cute.Tensor,  # [1, T, heads, D]
        mAlignedK: cute.Tensor,  # [1, tiles * T, heads, D]
        mV: cute.Tensor | None,
        mAlignedV: cute.Tensor | None,
        mQ: cute.Tensor | None,
        mAlignedQ: cute.Tensor | None,
        stream: Any,
    ):
        self.kernel(mBounds, mTiles, mRows, mK, mAlignedK, mV, mAlignedV, mQ, mAlignedQ).launch(
            grid=[
                mAlignedK.shape[1] // COPIED_ROWS,
                1 if const_expr(mV is None) else 2 if const_expr(mQ is None) else 3,
                1,
            ],
            block=[COPY_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor,
        mRows: cute.Tensor,
        mK: cute.Tensor,
        mAlignedK: cute.Tensor,
        mV: cute.Tensor | None,
        mAlignedV: cute.Tensor | None,
        mQ: cute.Tensor | None,
        mAlignedQ: cute.Tensor | None,
    ):
        group, which, _ = cute.arch.block_idx()
        first_row = group * COPIED_ROWS
        document = document_at(mBounds[TILE, None], first_row // self.tile, 1, 1, 0)
        before = first_row - mBounds[ROW, document]  # of the document
        first_token = mBounds[TOKEN, document] + before
        count = cutlass.min(mBounds[LENGTH, document] - before, COPIED_ROWS)  # <= 0: no rows of a document
        if which == 0:
            self.copy(mK, mAlignedK, first_row, first_token, count)
        if const_expr(mV is not None):
            if which == 1:
                self.copy(mV, mAlignedV, first_row, first_token, count)
        if const_expr(mQ is not None):
            if which == 2:
                self.copy(mQ, mAlignedQ, first_row, first_token, count)
                self.record(mBounds, mTiles, mRows, first_row, first_token, count, document)

    @cute.jit
    def copy(self, mX: cute.Tensor, mAligned: cute.Tensor, first_row: Int32, first_token: Int32, count: Int32):
        thread, _, _ = cute.arch.thread_idx()
        _, _, heads, dim = mX.shape
        vectors = dim // VECTOR
        items = COPIED_ROWS * heads * vectors
        rX = cute.make_rmem_tensor((VECTOR, BATCH), mX.element_type)
        for start in cutlass.range(thread, items, COPY_THREADS * BATCH):
            for i in range_constexpr(BATCH):
                item = start + i * COPY_THREADS
                row, head, vector = item // vectors // heads, item // vectors % heads, item % vectors
                rX[None, i].fill(0.0)
                if row < count:
                    gX = cute.local_tile(mX[0, first_token + row, head, None], (VECTOR,), (vector,))
                    cute.autovec_copy(gX, rX[None, i])
            for i in range_constexpr(BATCH):
                item = start + i * COPY_THREADS
                row, head, vector = item // vectors // heads, item // vectors % heads, item % vectors
                if row < COPIED_ROWS:
                    gAligned = cute.local_tile(mAligned[0, first_row + row, head, None], (VECTOR,), (vector,))
                    cute.autovec_copy(rX[None, i], gAligned)

    @cute.jit
    def record(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor,
        mRows: cute.Tensor,
        first_row: Int32,
        first_token: Int32,
        count: Int32,
        document: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        end = mBounds[TOKEN, mBounds.shape[1] - 1]
        row = first_row + thread
        if thread < COPIED_ROWS:
            if thread < count:
                mRows[first_token + thread] = row
            if (row >= end) & (row < mRows.shape[0]):  # there are at least as many rows as tokens
                mRows[row] = Int32(-1)
        if (thread == 0) & (first_row % self.tile == 0):
            tile = first_row // self.tile
            mTiles[DOCUMENT, tile] = document if count > 0 else Int32(-1)
            mTiles[SHIFT, tile] = mBounds[ENTRY, document] * self.stride - mBounds[ROW, document]


def fake_tables() -> tuple[Any, Any]:
    """Documents.bounds and Documents.tiles to compile with."""
    return fake(torch.int32, 6, None, aligned=False), fake(torch.int32, 2, None, aligned=False)


@compiled_once
def _bounds(tile: int, length: int, stride: int) -> Kernel:
    return compile_kernel(
        DocumentBounds(tile, length, stride), fake(torch.int32, None, aligned=False), fake_tables()[0]
    )


@compiled_once
def _align(tile: int, stride: int, dtype: torch.dtype, dim: int, v_dim: int | None, with_q: bool) -> Kernel:
    rows = fake(torch.int32, None, aligned=False)
    pairs = [None if size is None else fake(dtype, None, None, None, size) for size in (dim, dim, v_dim, v_dim)]
    queries = [fake(dtype, None, None, None, dim) if with_q else None for _ in range(2)]
    return compile_kernel(AlignRows(tile, stride), *fake_tables(), rows, *pairs, *queries)


def sizes(tokens: int, docs: int, tile: int, stride: int) -> tuple[int, int]:
    """Tiles and aligned entries, enough for any lengths of the documents."""
    entries = tokens // stride + docs * (ENTRY_ALIGNMENT - 1)
    return (tokens + docs * (tile - 1)) // tile, -(-entries // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT


def _align_rows(documents: Documents, k: Tensor, v: Tensor | None = None, q: Tensor | None = None) -> list[Tensor]:
    """Aligned rows of k, v and q; with q, `documents.tiles` and `.rows` are filled in."""
    tile, num_tiles = documents.tile, documents.num_tiles
    tensors = [x for x in (k, v, q) if x is not None]
    aligned = [torch.empty((1, num_tiles * tile, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in tensors]
    if num_tiles > 0:
        v_dim = None if v is None else v.shape[-1]
        run = _align(tile, documents.stride, k.dtype, k.shape[-1], v_dim, q is not None).run
        pairs = [x for pair in zip(tensors, aligned, strict=True) for x in pair] + [None] * 4
        run(documents.bounds, documents.tiles, documents.rows, *pairs[:6])
    return aligned


def bounds_of(cu_seqlens: Tensor, *, tile: int, length: int, stride: int) -> Tensor:
    """Documents.bounds alone, for kernels that read tokens where they lie. Args: as of `lay_out`."""
    bounds = torch.empty((6, cu_seqlens.shape[0]), dtype=torch.int32, device=cu_seqlens.device)
    _bounds(tile, length, stride).run(cu_seqlens.contiguous(), bounds)
    return bounds


def lay_out(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, tile: int, length: int, stride: int
) -> tuple[Documents, tuple[Tensor, Tensor, Tensor]]:
    """The layout of documents, and aligned rows `[1,tiles*T,heads,D]` of q, k and v.

    Args:
        q, k, v: `[1,T,heads,D]`, bf16 or fp16, rows aligned (device.vectorizable).
        cu_seqlens: int32 `[B+1]`, B >= 1.
        tile: tokens of a query tile.
        length, stride: of compressed blocks, l and d.
    """
    tokens = q.shape[1]
    num_tiles, num_entries = sizes(tokens, cu_seqlens.shape[0] - 1, tile, stride)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=q.device)

    bounds = bounds_of(cu_seqlens, tile=tile, length=length, stride=stride)
    tables = bounds, empty(2, num_tiles), empty(tokens)
    documents = Documents(tile, stride, *tables, num_entries, tokens // stride, cu_seqlens)
    aligned_k, aligned_v, aligned_q = _align_rows(documents, k, v, q)
    return documents, (aligned_q, aligned_k, aligned_v)
