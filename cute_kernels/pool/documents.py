"""Packed documents of unknown lengths, laid out for kernels that work on whole tiles and blocks.

    document i      n queries, tokens s ... s+n-1 of the s+n that exist; ordinary packs: s = 0
    tiles           those that hold queries, counted from a multiple of S tokens: ceil((s+n - s//S*S) / T), document
                    by document. S = T if tiles select together, 1 in token mode
    aligned rows    tile t holds rows t*T ... t*T+T-1 of queries; rows that belong to no query are zero
    aligned keys    ceil((s+n) / T) tiles of each document; in ordinary packs the same as those of queries
    entries         max(0, (s+n-l)//d + 1), starting at a multiple of ENTRY_ALIGNMENT; absent ones are zero

All sizes follow from T, the number of tokens and the number of documents, so nothing waits for the device; some tiles
and entries at the end may be unused. One CTA sums the lengths, then q, k and v are copied. The zeros keep NaN and inf
of one document out of the next one's sums, where attention multiplies invisible values by 0. A window whose tiles of
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
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

ENTRY_ALIGNMENT = MAX_LIST_WIDTH
"""Alignment of a document's entries, so that no block of entries in a list spans two documents."""

TOKEN, TILE, ROW, ENTRY, PUBLIC_ENTRY, LENGTH, KEY, QUERY, START = range(9)
"""Rows of Documents.bounds, per document: first token in k and v; first tile; aligned row of its first token (before
s, extrapolated); first aligned entry; first entry without gaps; number of tokens, s + n; first aligned key; first
query; and s."""

NUM_BOUNDS = 9

DOCUMENT, SHIFT, KEY_SHIFT = range(3)
"""Rows of Documents.tiles."""

SCAN_THREADS = LANES * LANES
COPY_THREADS = 128
COPIED_ROWS = 16
"""Rows that one CTA copies."""
BATCH = 4
"""Number of loads that a thread has in flight."""


class Packed(NamedTuple):
    """Documents of a pack as given by the caller. int32 on the device."""

    cu_seqlens: Tensor
    """`[B+1]`, cumulative lengths of queries."""
    cu_seqlens_k: Tensor | None = None
    """`[B+1]`, cumulative lengths of keys; None: those of queries."""
    start: Tensor | None = None
    """`[B]`, token index of each document's first query; None: queries end with the keys."""
    counts: Tensor | None = None
    """`[B]`, number of leading queries of each document that exist; None: all."""

    @classmethod
    def of_sequences(cls, q: Tensor, tokens: int, start: Tensor | None = None, counts: Tensor | None = None) -> Packed:
        """View consecutive sequences of one length, q `[B,N_q,...]` and `tokens` keys each, as a pack."""
        indices = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return cls(indices * q.shape[1], indices * tokens, start, counts)

    @property
    def continues(self) -> bool:
        """True if queries may start after the first token of their document."""
        return self.start is not None or self.cu_seqlens_k is not None

    @property
    def num_documents(self) -> int:
        """Number of documents, B."""
        return len(self.cu_seqlens) - 1


class Varlen(NamedTuple):
    """Documents in the rows of one sequence, in the format of FlashAttention-4's interface.

    Its kernels read whole tiles of keys, including those past a document's last key.
    """

    cu_seqlens_q: Tensor
    """First row of each document in q, and the end of all, int32 `[docs+1]`."""
    cu_seqlens_k: Tensor
    """First row of each document in k and v; the same tensor if all tiles end with a document."""
    seqused_q: Tensor
    """Rows of each document, int32 `[docs]`."""
    seqused_k: Tensor
    """Keys of each document; the same tensor if the numbers are equal."""


class PackedBlocks(NamedTuple):
    """Blocks of documents, for kernels that read rows and keys of a pack as one sequence."""

    bounds: Tensor
    """Documents.bounds with these meanings: tiles are blocks that hold queries, aligned keys count all blocks of a
    document from its first token, and TOKEN and ROW are the indices of its first token in the keys and rows that are
    read."""
    positions: Tensor
    """int32 `[rows]`: key index of each query, the last key that it sees; -1 in rows that belong to no query."""
    num_blocks: int
    """Upper bound, for any lengths of the documents."""


@dataclass(frozen=True)
class Documents:
    """Layout of documents in aligned rows, keys and entries, whose sizes do not depend on the values of cu_seqlens."""

    tile: int
    """T, rows per tile."""
    length: int
    """l, tokens per entry."""
    stride: int
    """d, tokens between the starts of consecutive entries."""
    packed: Packed
    bounds: Tensor
    """int32 `[NUM_BOUNDS,B+1]`; the last column holds the ends."""
    tiles: Tensor
    """int32 `[3,tiles]`: document of each tile (-1: unused), aligned entry * d - aligned row at its start, and aligned
    key - aligned row."""
    rows: Tensor
    """int32 `[T_q]`: aligned row of each query, -1 after the last document."""
    key_rows: Tensor
    """int32 `[T_k]`: aligned key of each token, -1 if it belongs to no document; `rows` in ordinary packs."""
    positions: Tensor
    """int32 `[aligned rows]`: aligned key of each query, -1 in rows that belong to no query."""
    num_keys: int
    """Length of buffers with aligned keys."""
    num_entries: int
    """Length of buffers with aligned entries."""
    most_entries: int
    """Maximum number of entries of one document, or of all without gaps."""
    window: Varlen | None = None
    """Layout of the window's rows and keys, if its keys were laid out separately."""

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]

    @property
    def shifts(self) -> Tensor:
        """Per tile, `[tiles]`: added to an aligned row when it is compared with d times an aligned entry."""
        return self.tiles[SHIFT]

    @property
    def key_shifts(self) -> Tensor | None:
        """Per tile: added to an aligned row when it is compared with an aligned key; None: nothing."""
        return self.tiles[KEY_SHIFT] if self.packed.continues else None

    @property
    def varlen(self) -> Varlen:
        """Layout of the documents in aligned rows and keys, for attention."""
        bounds = self.bounds
        if not self.packed.continues:
            return Varlen(bounds[ROW], bounds[ROW], bounds[LENGTH, :-1], bounds[LENGTH, :-1])
        rows = bounds[LENGTH, :-1] - bounds[START, :-1]
        return Varlen(bounds[ROW] + bounds[START], bounds[KEY], rows, bounds[LENGTH, :-1])

    def realign_kv(self, size: int, k: Tensor, v: Tensor) -> tuple[Varlen, Tensor, Tensor]:
        """Realign keys and values so that blocks of `size` of them do not span two documents either.

        Args:
            k, v: aligned keys `[1,num_keys,heads,D]`.

        Returns:
            Layout of the documents in aligned rows and in these keys, for attention; k and v.
        """
        if self.window is not None:
            return self.window, k, v
        if self.tile % size == 0:
            return self.varlen, k, v
        blocks, _ = sizes(len(self.key_rows), self.packed.num_documents, size, self.stride)
        bounds = self.blocks(size).bounds
        new_k, new_v = replace(self, tile=size, bounds=bounds, num_keys=blocks * size).align(k, v)
        return self.varlen._replace(cu_seqlens_k=bounds[KEY]), new_k, new_v

    def blocks(self, size: int) -> PackedBlocks:
        """Blocks of `size` tokens, in aligned rows and keys."""
        bounds = bounds_of(self.packed, tile=size, step=size, length=size, stride=size)
        bounds[TOKEN], bounds[ROW] = self.bounds[KEY], self.bounds[ROW]
        more = self.packed.num_documents if self.tile % size else 0  # last blocks that exceed the last tiles
        return PackedBlocks(bounds, self.positions, self.num_keys // size + more)

    def align(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned keys `[1,num_keys,heads,D]` of k and v `[1,T_k,heads,D]`."""
        aligned_k, aligned_v = _align_rows(self, k, v, None)
        return aligned_k, aligned_v

    def align_queries(self, x: Tensor) -> Tensor:
        """Aligned rows of one tensor `[1,T_q,heads,D]`."""
        return _align_rows(self, None, None, x)[0]

    def to_tokens(self, aligned: Tensor, dim: int, fill: float) -> Tensor:
        """Aligned rows, along `dim`, in the order of the queries; `fill` after the last document."""
        return self.fill_tail(aligned.index_select(dim, self.rows.clamp(min=0)), dim, fill)

    def fill_tail(self, packed: Tensor, dim: int, fill: float) -> Tensor:
        """Replace values after the last document by `fill`."""
        tail = (self.rows < 0).view(-1, *[1] * (packed.dim() - dim - 1))
        return packed.masked_fill(tail, fill)

    @property
    def entry_counts(self) -> Tensor:
        """Number of compressed entries of each document, int32 `[B]`."""
        return ((self.bounds[LENGTH, :-1] - self.length) // self.stride + 1).clamp(min=0)

    def compact_entries(self, entries: Tensor) -> Tensor:
        """Aligned entries `[num_entries,...]` compacted document by document, then zeros: `[most_entries,...]`.

        Entries that belong to keys after a document's last query are zeros, too.
        """
        places = torch.arange(self.most_entries, dtype=torch.int32, device=entries.device)
        first = self.bounds[PUBLIC_ENTRY]
        document = torch.searchsorted(first[1:], places, right=True).clamp(max=self.packed.num_documents - 1)
        before = places - first[document]
        return _gather(entries, self.bounds[ENTRY][document] + before, before < self.entry_counts[document])

    def align_entries(self, entries: Tensor) -> Tensor:
        """Align entries stored document by document, `[at least all,...]`, to `[num_entries,...]`, zeros in between."""
        places = torch.arange(self.num_entries, dtype=torch.int32, device=entries.device)
        aligned, packed = self.bounds[ENTRY], self.bounds[PUBLIC_ENTRY]
        document = torch.searchsorted(aligned[1:], places, right=True).clamp(max=self.packed.num_documents - 1)
        before = places - aligned[document]
        return _gather(entries, packed[document] + before, before < self.entry_counts[document])


def _gather(entries: Tensor, places: Tensor, used: Tensor) -> Tensor:
    """Gather the entries at these positions, zeros where unused."""
    if entries.shape[0] == 0:
        return entries.new_zeros((len(places), *entries.shape[1:]))
    picked = entries.index_select(0, torch.where(used, places, 0))
    return picked.masked_fill(~used.view(-1, *[1] * (entries.dim() - 1)), 0)


@cute.jit
def document_at(mFirst: cute.Tensor, index: Int32, scale: Int32, size: Int32, gap: Int32) -> Int32:
    """Index of the last document i with mFirst[i]*scale // size + i*gap <= index."""
    low, high = Int32(0), Int32(mFirst.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if mFirst[middle] * scale // size + middle * gap <= index:
            low = middle
        else:
            high = middle
    return low


class DocumentBounds:
    """Documents.bounds: prefix sums of tiles, keys and entries over documents, using one CTA.

    Args: tile, step, length, stride: T, S, l and d.
    """

    def __init__(self, tile: int, step: int, length: int, stride: int) -> None:
        self.tile, self.step, self.length, self.stride = tile, step, length, stride

    @staticmethod
    @compiled_once
    def compile(tile: int, step: int, length: int, stride: int, starts: bool, counted: bool) -> Kernel:
        given = [fake_rows() if has else None for has in (True, True, starts, counted)]
        return compile_kernel(DocumentBounds(tile, step, length, stride), *given, fake_tables()[0])

    @cute.jit
    def __call__(
        self,
        mCuSeqlens: cute.Tensor,  # int32 [B + 1], see Packed
        mCuSeqlensK: cute.Tensor,  # int32 [B + 1]
        mStart: cute.Tensor | None,  # int32 [B]
        mCounts: cute.Tensor | None,  # int32 [B]
        mBounds: cute.Tensor,  # int32 [NUM_BOUNDS, B + 1], output
        stream: Any,
    ):
        self.kernel(mCuSeqlens, mCuSeqlensK, mStart, mCounts, mBounds).launch(
            grid=[1, 1, 1], block=[SCAN_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCuSeqlens: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        mStart: cute.Tensor | None,
        mCounts: cute.Tensor | None,
        mBounds: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // LANES, thread % LANES
        counted = (TILE, ENTRY, PUBLIC_ENTRY, KEY)
        smem = SmemAllocator()
        # [LANES, 4]: totals of each warp
        sTotal = smem.allocate_tensor(Int32, cute.make_layout((LANES, len(counted)), stride=(1, LANES)), 16)
        rCount = cute.make_rmem_tensor(len(counted), Int32)  # int32 (counted)
        rSum = cute.make_rmem_tensor(len(counted), Int32)  # int32 (counted)
        rBefore = cute.make_rmem_tensor(len(counted), Int32)  # int32 (counted): sums of earlier rounds
        rBefore.fill(0)
        docs = mCuSeqlens.shape[0] - 1
        for first in cutlass.range(0, docs + 1, SCAN_THREADS):
            document, queries, keys, start = first + thread, Int32(0), Int32(0), Int32(0)
            if document < docs:
                queries = mCuSeqlens[document + 1] - mCuSeqlens[document]
                if const_expr(mCounts is not None):
                    queries = cutlass.min(queries, mCounts[document])
                keys = mCuSeqlensK[document + 1] - mCuSeqlensK[document]
                start = keys - queries
                if const_expr(mStart is not None):
                    start = cutlass.max(cutlass.min(start, mStart[document]), 0)
            tokens = start + queries
            base = start if queries == 0 else start // self.step * self.step  # token index of the first row
            rCount[0] = cute.ceil_div(tokens - base, self.tile)
            rCount[1] = cute.ceil_div(self.num_entries(tokens), ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT
            rCount[2] = self.num_entries(keys)
            rCount[3] = cute.ceil_div(tokens, self.tile) * self.tile
            for i in range_constexpr(len(counted)):
                rSum[i] = prefix_sum(rCount[i])
                if lane == LANES - 1:
                    sTotal[warp, i] = rSum[i]
            cute.arch.sync_threads()  # the totals of all warps are written
            for i in range_constexpr(len(counted)):
                totals = prefix_sum(sTotal[lane, i])
                before = cute.arch.shuffle_sync(totals, cutlass.max(warp - 1, 0))
                before = Int32(0) if warp == 0 else before
                rSum[i] += rBefore[i] + before - rCount[i]
                rBefore[i] += cute.arch.shuffle_sync(totals, LANES - 1)
                if document <= docs:
                    mBounds[counted[i], document] = rSum[i]
            if document <= docs:
                mBounds[TOKEN, document] = mCuSeqlensK[document]
                mBounds[QUERY, document] = mCuSeqlens[document]
                mBounds[ROW, document] = rSum[0] * self.tile - base
                mBounds[LENGTH, document] = tokens
                mBounds[START, document] = start
            cute.arch.sync_threads()  # they are read: the next round may overwrite them

    @cute.jit
    def num_entries(self, tokens: Int32) -> Int32:
        return Int32(0) if tokens < self.length else (tokens - self.length) // self.stride + 1


class CopiedRows(NamedTuple):
    """Source of the COPIED_ROWS rows of a CTA."""

    first_row: Int32
    """Index among the aligned rows, or keys."""
    first: Int32
    """Index of the query or token in that row, extrapolated if there is none."""
    before: Int32
    """Number of rows before the first one that is copied."""
    end: Int32
    """Exclusive end of the copied rows."""


class AlignRows:
    """Copy queries, keys and values so that each document starts with a tile; a CTA copies COPIED_ROWS rows of one
    tensor.

    If outputs are given, it also records Documents.tiles, .rows, .key_rows and .positions.

    Args: tile, stride: T and d of the documents.
    """

    def __init__(self, tile: int, stride: int) -> None:
        self.tile, self.stride = tile, stride

    @staticmethod
    @compiled_once
    def compile(
        tile: int,
        stride: int,
        dtype: torch.dtype,
        dims: tuple[int, int] | None,
        q_dim: int | None,
        records: tuple[bool, bool],
    ) -> Kernel:
        """Args: dims: D and D_v of keys. q_dim: D of queries. records: record at all; record keys separately."""
        record, apart = records
        tables = (fake_tables()[1], fake_rows(), fake_rows() if apart else None, fake_rows()) if record else (None,) * 4
        pairs = [
            fake(dtype, None, None, None, dim) if dim else None
            for dim in (*(dims or (None, None)), q_dim)
            for _ in range(2)
        ]
        return compile_kernel(AlignRows(tile, stride), fake_tables()[0], *tables, *pairs)

    @cute.jit
    def __call__(
        self,
        mBounds: cute.Tensor,  # int32 [NUM_BOUNDS, B + 1]
        mTiles: cute.Tensor | None,  # recorded, with mRows and mPositions
        mRows: cute.Tensor | None,
        mKeyRows: cute.Tensor | None,  # if keys are laid out separately from queries
        mPositions: cute.Tensor | None,
        mK: cute.Tensor | None,  # [1, T_k, heads, D]
        mAlignedK: cute.Tensor | None,  # [1, aligned keys, heads, D]
        mV: cute.Tensor | None,  # [1, T_k, heads, D_v]
        mAlignedV: cute.Tensor | None,  # [1, aligned keys, heads, D_v]
        mQ: cute.Tensor | None,  # [1, T_q, heads, D]
        mAlignedQ: cute.Tensor | None,  # [1, tiles * T, heads, D]
        stream: Any,
    ):
        rows = Int32(0) if const_expr(mK is None) else mAlignedK.shape[1]
        if const_expr(mQ is not None):
            rows = cutlass.max(rows, mAlignedQ.shape[1])
        tensors = (0 if const_expr(mK is None) else 2) + (0 if const_expr(mQ is None) else 1)
        self.kernel(mBounds, mTiles, mRows, mKeyRows, mPositions, mK, mAlignedK, mV, mAlignedV, mQ, mAlignedQ).launch(
            grid=[cute.ceil_div(rows, COPIED_ROWS), tensors, 1], block=[COPY_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mKeyRows: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        mK: cute.Tensor | None,
        mAlignedK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mAlignedV: cute.Tensor | None,
        mQ: cute.Tensor | None,
        mAlignedQ: cute.Tensor | None,
    ):
        group, which, _ = cute.arch.block_idx()
        first_row = group * COPIED_ROWS
        if const_expr(mK is not None):
            if (which == 0) & (first_row < mAlignedK.shape[1]):
                self.align_keys(mBounds, mK, mAlignedK, mKeyRows, first_row)
            if (which == 1) & (first_row < mAlignedV.shape[1]):
                self.align_keys(mBounds, mV, mAlignedV, None, first_row)
        if const_expr(mQ is not None):
            if (which == (0 if const_expr(mK is None) else 2)) & (first_row < mAlignedQ.shape[1]):
                self.align_queries(mBounds, mTiles, mRows, mPositions, mQ, mAlignedQ, first_row)

    @cute.jit
    def align_keys(
        self,
        mBounds: cute.Tensor,
        mX: cute.Tensor,
        mAligned: cute.Tensor,
        mKeyRows: cute.Tensor | None,
        first_row: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        document = document_at(mBounds[KEY, None], first_row, 1, 1, 0)
        token = first_row - mBounds[KEY, document]  # within the document
        first, end = mBounds[TOKEN, document] + token, cutlass.min(mBounds[LENGTH, document] - token, COPIED_ROWS)
        self.copy(mX, mAligned, CopiedRows(first_row, first, Int32(0), end))
        if const_expr(mKeyRows is not None):
            if thread < end:
                mKeyRows[first + thread] = first_row + thread

    @cute.jit
    def align_queries(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        mQ: cute.Tensor,
        mAlignedQ: cute.Tensor,
        first_row: Int32,
    ):
        document = document_at(mBounds[TILE, None], first_row // self.tile, 1, 1, 0)
        token = first_row - mBounds[ROW, document]  # within the document
        query = token - mBounds[START, document]
        end = cutlass.min(mBounds[LENGTH, document] - token, COPIED_ROWS)
        rows = CopiedRows(first_row, mBounds[QUERY, document] + query, -query, end)
        self.copy(mQ, mAlignedQ, rows)
        if const_expr(mTiles is not None):
            self.record(mBounds, mTiles, mRows, mPositions, rows, token, document)

    @cute.jit
    def copy(self, mX: cute.Tensor, mAligned: cute.Tensor, rows: CopiedRows):
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
                if (row >= rows.before) & (row < rows.end):
                    gX = cute.local_tile(mX[0, rows.first + row, head, None], (VECTOR,), (vector,))
                    cute.autovec_copy(gX, rX[None, i])
            for i in range_constexpr(BATCH):
                item = start + i * COPY_THREADS
                row, head, vector = item // vectors // heads, item // vectors % heads, item % vectors
                if row < COPIED_ROWS:
                    gAligned = cute.local_tile(mAligned[0, rows.first_row + row, head, None], (VECTOR,), (vector,))
                    cute.autovec_copy(rX[None, i], gAligned)

    @cute.jit
    def record(
        self,
        mBounds: cute.Tensor,
        mTiles: cute.Tensor,
        mRows: cute.Tensor,
        mPositions: cute.Tensor,
        rows: CopiedRows,
        token: Int32,
        document: Int32,
    ):
        """Args: `token`: index of the first row's token within the document."""
        thread, _, _ = cute.arch.thread_idx()
        end = mBounds[QUERY, mBounds.shape[1] - 1]
        row = rows.first_row + thread
        if thread < COPIED_ROWS:
            is_query = (thread >= rows.before) & (thread < rows.end)
            if is_query:
                mRows[rows.first + thread] = row
            mPositions[row] = mBounds[KEY, document] + token + thread if is_query else Int32(-1)
            if (row >= end) & (row < mRows.shape[0]):  # there are at least as many rows as queries
                mRows[row] = Int32(-1)
        if (thread == 0) & (rows.first_row % self.tile == 0):
            tile = rows.first_row // self.tile
            used = tile < mBounds[TILE, mBounds.shape[1] - 1]
            mTiles[DOCUMENT, tile] = document if used else Int32(-1)
            mTiles[SHIFT, tile] = mBounds[ENTRY, document] * self.stride - mBounds[ROW, document]
            mTiles[KEY_SHIFT, tile] = mBounds[KEY, document] - mBounds[ROW, document]


def fake_tables() -> tuple[Any, Any]:
    """Documents.bounds and Documents.tiles to compile with."""
    return fake(torch.int32, NUM_BOUNDS, None, aligned=False), fake(torch.int32, 3, None, aligned=False)


def fake_rows() -> Any:
    """Documents.rows, .key_rows or .positions to compile with."""
    return fake(torch.int32, None, aligned=False)


def sizes(tokens: int, docs: int, tile: int, stride: int) -> tuple[int, int]:
    """Numbers of tiles and aligned entries, enough for any lengths of the documents."""
    entries = tokens // stride + docs * (ENTRY_ALIGNMENT - 1)
    return (tokens + docs * (tile - 1)) // tile, -(-entries // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT


def query_tiles(queries: int, docs: int, tile: int, step: int, *, continues: bool) -> int:
    """Number of tiles of queries, enough for any lengths and starts of the documents. Args: `step`: S."""
    before = tile - 1 if continues and step > 1 else 0  # rows of the first tile without queries
    return (queries + docs * (tile - 1 + before)) // tile


def _align_rows(
    documents: Documents, k: Tensor | None, v: Tensor | None, q: Tensor | None, *, record: bool = False
) -> list[Tensor]:
    """Align the given tensors: keys, values and rows.

    Args:
        record: also fill in `documents.tiles`, `.rows`, `.positions` and, with k, `.key_rows`; requires q.
    """
    counts = documents.num_keys, documents.num_keys, documents.num_tiles * documents.tile
    aligned = [
        None if x is None else torch.empty((1, count, *x.shape[2:]), dtype=x.dtype, device=x.device)
        for x, count in zip((k, v, q), counts, strict=True)
    ]
    given = next(x for x in (q, k) if x is not None)
    if any(x is not None and x.numel() > 0 for x in aligned):
        tables: tuple[Tensor | None, ...] = (None,) * 4
        apart = documents.packed.continues and k is not None
        if record:
            key_rows = documents.key_rows if apart else None
            tables = documents.tiles, documents.rows, key_rows, documents.positions
        dims = None if k is None or v is None else (k.shape[-1], v.shape[-1])
        q_dim = None if q is None else q.shape[-1]
        pairs = [x for pair in zip((k, v, q), aligned, strict=True) for x in pair]
        run = AlignRows.compile(
            documents.tile, documents.stride, given.dtype, dims, q_dim, (record, record and apart)
        ).run
        run(documents.bounds, *tables, *pairs)
    return [x for x in aligned if x is not None]


def bounds_of(packed: Packed, *, tile: int, step: int, length: int, stride: int) -> Tensor:
    """Documents.bounds alone, for kernels that read tokens in place. Args: see `lay_out`."""
    first = packed.cu_seqlens
    bounds = torch.empty((NUM_BOUNDS, first.shape[0]), dtype=torch.int32, device=first.device)
    keys = first if packed.cu_seqlens_k is None else packed.cu_seqlens_k
    given = [None if x is None else x.contiguous() for x in packed._replace(cu_seqlens_k=keys)]
    DocumentBounds.compile(tile, step, length, stride, packed.start is not None, packed.counts is not None).run(
        *given, bounds
    )
    return bounds


def blocks_in_place(packed: Packed, queries: int, tokens: int, size: int, *, causal: bool = True) -> PackedBlocks:
    """Blocks of documents whose queries, keys and values are read in place.

    Args:
        queries, tokens: T_q and T_k of the pack.
        size: l'.
        causal: if False, every query sees all keys of its document.
    """
    bounds = bounds_of(packed, tile=size, step=size, length=size, stride=size)
    bounds[ROW] = bounds[QUERY] - bounds[START]
    rows = torch.arange(queries, dtype=torch.int32, device=bounds.device)
    document = torch.searchsorted(bounds[QUERY, 1:], rows, right=True)
    if causal:
        positions = (bounds[TOKEN] - bounds[ROW])[document] + rows
    else:
        positions = (bounds[TOKEN] + bounds[LENGTH])[document] - 1
    positions = torch.where(document < packed.num_documents, positions, -1)
    return PackedBlocks(bounds, positions, sizes(tokens, packed.num_documents, size, 1)[0])


def empty_layout(
    packed: Packed, queries: int, tokens: int, *, tile: int, step: int, length: int, stride: int
) -> Documents:
    """Layout of documents before `_align_rows` has recorded it. Args: see `lay_out`; also T_q and T_k."""
    docs, continues, device = packed.num_documents, packed.continues, packed.cu_seqlens.device
    num_tiles = query_tiles(queries, docs, tile, step, continues=continues)
    key_tiles, num_entries = sizes(tokens, docs, tile, stride)

    def table(*shape: int, absent: bool = False) -> Tensor:
        if absent:
            return torch.full(shape, -1, dtype=torch.int32, device=device)
        return torch.empty(shape, dtype=torch.int32, device=device)

    bounds = bounds_of(packed, tile=tile, step=step, length=length, stride=stride)
    rows = table(queries, absent=packed.counts is not None)
    key_rows = table(tokens, absent=True) if continues else rows
    tables = bounds, table(3, num_tiles), rows, key_rows, table(num_tiles * tile)
    return Documents(tile, length, stride, packed, *tables, key_tiles * tile, num_entries, tokens // stride)


def lay_out(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, tile: int, step: int, length: int, stride: int
) -> tuple[Documents, tuple[Tensor, Tensor, Tensor]]:
    """Compute the layout of documents, aligned rows `[1,tiles*T,heads,D]` of q, and aligned keys of k and v.

    Args:
        q, k, v: `[1,T_q,heads,D]`, `[1,T_k,H_kv,...]`, bf16 or fp16, rows aligned (device.vectorizable).
        packed: B >= 1 documents.
        tile: tokens per query tile.
        step: S; tiles start at multiples of it.
        length, stride: l and d of compressed blocks.
    """
    sizes = {"tile": tile, "step": step, "length": length, "stride": stride}
    documents = empty_layout(packed, q.shape[1], k.shape[1], **sizes)
    aligned_k, aligned_v, aligned_q = _align_rows(documents, k, v, q, record=True)
    return documents, (aligned_q, aligned_k, aligned_v)


def lay_out_queries(
    q: Tensor, packed: Packed, tokens: int, *, tile: int, step: int, length: int, stride: int
) -> tuple[Documents, Tensor]:
    """`lay_out` for keys stored elsewhere, up to `tokens` of them; `key_rows` holds no meaningful values."""
    documents = empty_layout(packed, q.shape[1], tokens, tile=tile, step=step, length=length, stride=stride)
    return documents, _align_rows(documents, None, None, q, record=True)[0]
