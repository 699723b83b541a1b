"""Which tokens visit a block of keys: selections of single tokens, turned around, in segments that are one CTA's work.

    indices  [B,H_kv,T,n]   the blocks that a token chose, in n slots
    places   [B,H_kv,T n]   block after block the visits to it, token * n + slot, tokens ascending
    segments [B,H_kv,3,S]   of each segment: its block, and which places are its

MarkTokens    a thread for each slot: the block that it visits, and bit t of that block's row of bits
CountTokens   a warp for each block: how many bits lie before each word of its row
ListTokens    a thread for each slot: the bits before its own tell its place
CutLists      a warp for each block: its segments

A bit is set by an atomic "or", whose order changes nothing, and every place follows from counts: what comes out is
bitwise the same each time. A block that many tokens chose (all of them choose block 0) is cut into segments of at least
`Sizes.length` and less than twice as many visits. The segments of cut blocks come first: they are the longest.

A slot visits nothing if it holds -1, a block that begins behind its token, or one of the forced blocks where a caller
attends to these otherwise. Packed documents (B = 1): chosen blocks count from a document's first token, listed ones
over all documents, each of which begins with a new one.

Sizes of lists and grids follow from shapes. Bytes: T n entries are read three times and written twice, and the bits of
each block, one for each token, five times. T = 16K, n = 16, 4 heads, 1024 blocks: 60 MB, mostly in L2.

Tokens go in passes, as many at a time as keep what a caller writes for each visit, and the bits, below a limit.

Limits: a token's blocks differ; T n < 2^31 and tokens < 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from torch import Tensor

from cute_kernels.lists.query_to_kv import WORD
from cute_kernels.mma.warp import LANES, prefix_sum
from cute_kernels.pool import documents
from cute_kernels.pool.documents import LENGTH, TILE, TOKEN, document_at
from cute_kernels.runtime.jit import Kernel, compile_kernel, compiled_once, fake

THREADS = 256
WARPS = 4

LIST_BYTES = 512 << 20
"""For the bits of a pass, and their counts."""

ALIGNED_TOKENS = 256
"""A pass over some of the tokens takes a multiple of these."""

VISITS, CUT, WHOLE = range(3)
"""Of each block: visits, segments if it is cut, whether it is not."""

BLOCK, FIRST, COUNT = range(3)
"""Of each segment: its block, and which visits are its."""


class Sizes(NamedTuple):
    """Of lists and of memory for sums, from shapes alone."""

    visits: int
    """The most there can be."""
    length: int
    """The fewest visits of a segment of a cut block."""
    cut: int
    """The most segments of cut blocks."""
    segments: int
    """The most segments."""

    @classmethod
    def of(cls, visits: int, most: int, blocks: int, length: int) -> Sizes:
        """Args: visits of all blocks and at most of one; blocks; the fewest visits of a segment of a cut block."""
        cut = visits // length if most >= 2 * length else 0
        return cls(visits, length, cut, blocks + cut)


@cute.jit
def write_segments(mCounts: cute.Tensor, mSums: cute.Tensor, mSegments: cute.Tensor, item: Int32):
    """The segments of block `item`, by a warp.

    Args:
        mCounts, mSums: int32 [3, blocks]: VISITS, CUT and WHOLE; alone, and with those of all blocks before added.
        mSegments: int32 [3, segments], those of cut blocks first.
    """
    lane = cute.arch.lane_idx()
    visits, segments = mCounts[VISITS, item], mCounts[CUT, item]
    first, first_segment = mSums[VISITS, item] - visits, mSums[CUT, item] - segments
    if segments == 0:
        segments, first_segment = Int32(1), mSums[CUT, mCounts.shape[1] - 1] + mSums[WHOLE, item] - 1
    length, longer = visits // segments, visits % segments  # the first ones have a visit more
    for i in cutlass.range(lane, segments, LANES, unroll=1):
        mSegments[BLOCK, first_segment + i] = item
        mSegments[FIRST, first_segment + i] = first + i * length + cutlass.min(i, longer)
        mSegments[COUNT, first_segment + i] = length + (Int32(1) if i < longer else Int32(0))


@cute.jit
def write_counts(mCounts: cute.Tensor, item: Int32, visits: Int32, length: Int32):
    """What `write_segments` and a cumulative sum read, by one thread."""
    segments = visits // length
    mCounts[VISITS, item] = visits
    mCounts[CUT, item] = segments if segments > 1 else Int32(0)
    mCounts[WHOLE, item] = Int32(0) if segments > 1 else Int32(1)


@cute.jit
def used_segments(mSums: cute.Tensor) -> tuple[Int32, Int32]:
    """How many segments there are of cut blocks, and of all; what lies behind them is not written.

    Args:
        mSums: int32 [3, blocks], as of `write_segments`.
    """
    last = mSums.shape[1] - 1
    cut = mSums[CUT, last]
    return cut, cut + mSums[WHOLE, last]


@cute.jit
def visited_block(
    chosen: Int32,
    position: Int32,
    end: Int32,
    size: cutlass.Constexpr[int],
    mBounds: cute.Tensor | None,
    init: cutlass.Constexpr[int] = 0,
    local: cutlass.Constexpr[int] = 0,
) -> Int32:
    """The block that a slot visits, counted over all documents; -1: nothing.

    Args:
        chosen: what the slot holds. position: of its token. end: tokens of the sequence; not read with mBounds.
        mBounds: Documents.bounds, whose tiles are the blocks.
        init, local: the first blocks of a document, and those that end with the token's own, that are not visited.
    """
    before = Int32(0)
    if const_expr(mBounds is not None):
        document = document_at(mBounds[TOKEN, None], position, 1, 1, 0)
        position -= mBounds[TOKEN, document]
        before, end = mBounds[TILE, document], mBounds[LENGTH, document]
    visits = (chosen >= init) & (chosen <= position // size - local) & (position < end)
    return before + chosen if visits else Int32(-1)


class Visits(NamedTuple):
    """Lists of the tokens `first_token` ... that visit each block."""

    blocks: Tensor
    """int32 `[B,H_kv,T,n]`: what a slot visits, -1: nothing."""
    places: Tensor
    """int32 `[B,H_kv,T n]`, read where segments say."""
    segments: Tensor
    """int32 `[B,H_kv,3,segments]`."""
    counts: Tensor
    """int32 `[B,H_kv,3,blocks]`."""
    sums: Tensor
    """int32 `[B,H_kv,3,blocks]`: counts with those of all blocks before added."""
    sizes: Sizes
    first_token: int

    def rows(self, first_token: int = 0) -> slice:
        """Its tokens, counted from `first_token`."""
        start = self.first_token - first_token
        return slice(start, start + self.blocks.shape[2])

    def part(self, batches: slice, heads: slice) -> Visits:
        """Of some batches and key/value heads."""
        blocks, places, segments, counts, sums = (table[batches, heads] for table in self[:5])
        return Visits(blocks, places, segments, counts, sums, self.sizes, self.first_token)


class MarkTokens:
    """Args: tokens of a block; the first and the last blocks that are not visited (`visited_block`)."""

    def __init__(self, size: int, init: int, local: int) -> None:
        self.size, self.init, self.local = size, init, local

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,  # int32 [B, H_kv, T, n]
        mBlocks: cute.Tensor,  # likewise
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words], zeros
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        stream: Any,
    ):
        self.kernel(mIndices, mBlocks, mBits, mBounds, first_token).launch(
            grid=[cute.ceil_div(mIndices.shape[2] * mIndices.shape[3], THREADS), mIndices.shape[1], mIndices.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mIndices: cute.Tensor,
        mBlocks: cute.Tensor,
        mBits: cute.Tensor,
        mBounds: cute.Tensor | None,
        first_token: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, head, batch = cute.arch.block_idx()
        tokens, slots = mIndices.shape[2:]
        item = group * THREADS + thread
        token, slot = item // slots, item % slots
        if token < tokens:
            chosen, end = mIndices[batch, head, token, slot], first_token + tokens
            position = first_token + token
            visited = visited_block(chosen, position, end, self.size, mBounds, self.init, self.local)
            if visited >= 0:
                word = cute.domain_offset((batch, head, visited, token // WORD), mBits)
                cute.arch.atomic_or(word.iterator, Int32(1) << token % WORD, sem="relaxed")
            mBlocks[batch, head, token, slot] = visited


class CountTokens:
    """A warp for each block."""

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words]
        mBefore: cute.Tensor,  # likewise: bits of the words before
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        length: Int32,  # the fewest visits of a segment of a cut block
        stream: Any,
    ):
        self.kernel(mBits, mBefore, mCounts, length).launch(
            grid=[cute.ceil_div(mBits.shape[2], WARPS), mBits.shape[1], mBits.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mBits: cute.Tensor, mBefore: cute.Tensor, mCounts: cute.Tensor, length: Int32):
        cta, head, batch = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        block = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        words = mBits.shape[3]
        if block < mBits.shape[2]:
            visits = Int32(0)
            for start in cutlass.range(0, words, LANES, unroll=2):
                word, count = start + lane, Int32(0)
                if word < words:
                    count = cute.arch.popc(mBits[batch, head, block, word])
                sums = prefix_sum(count)
                if word < words:
                    mBefore[batch, head, block, word] = visits + sums - count
                visits += cute.arch.shuffle_sync(sums, LANES - 1)
            if lane == 0:
                write_counts(mCounts[batch, head, None, None], block, visits, length)


class ListTokens:
    """A thread for each slot."""

    @cute.jit
    def __call__(
        self,
        mBlocks: cute.Tensor,  # int32 [B, H_kv, T, n]
        mBits: cute.Tensor,  # int32 [B, H_kv, blocks, words]
        mBefore: cute.Tensor,  # likewise
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mSums: cute.Tensor,  # likewise
        mPlaces: cute.Tensor,  # int32 [B, H_kv, T n]
        stream: Any,
    ):
        self.kernel(mBlocks, mBits, mBefore, mCounts, mSums, mPlaces).launch(
            grid=[cute.ceil_div(mPlaces.shape[2], THREADS), mPlaces.shape[1], mPlaces.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mBlocks: cute.Tensor,
        mBits: cute.Tensor,
        mBefore: cute.Tensor,
        mCounts: cute.Tensor,
        mSums: cute.Tensor,
        mPlaces: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, head, batch = cute.arch.block_idx()
        item = group * THREADS + thread
        if item < mPlaces.shape[2]:
            token, slot = item // mBlocks.shape[3], item % mBlocks.shape[3]
            block = mBlocks[batch, head, token, slot]
            if block >= 0:
                word = token // WORD
                lower = mBits[batch, head, block, word] & ((Int32(1) << token % WORD) - 1)
                first = mSums[batch, head, VISITS, block] - mCounts[batch, head, VISITS, block]
                mPlaces[batch, head, first + mBefore[batch, head, block, word] + cute.arch.popc(lower)] = item


class CutLists:
    """A warp for each block."""

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # int32 [B, H_kv, 3, blocks]
        mSums: cute.Tensor,  # likewise
        mSegments: cute.Tensor,  # int32 [B, H_kv, 3, segments]
        stream: Any,
    ):
        self.kernel(mCounts, mSums, mSegments).launch(
            grid=[cute.ceil_div(mCounts.shape[3], WARPS), mCounts.shape[1], mCounts.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mCounts: cute.Tensor, mSums: cute.Tensor, mSegments: cute.Tensor):
        cta, head, batch = cute.arch.block_idx()
        block = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if block < mCounts.shape[3]:
            write_segments(
                mCounts[batch, head, None, None],
                mSums[batch, head, None, None],
                mSegments[batch, head, None, None],
                block,
            )


def fake_table() -> Any:
    """A table of four dimensions to compile with."""
    return fake(torch.int32, None, None, None, None, aligned=False)


def fake_segments() -> Any:
    """Visits.segments, .counts or .sums to compile with."""
    return fake(torch.int32, None, None, 3, None, aligned=False)


def fake_places() -> Any:
    """Visits.places to compile with."""
    return fake(torch.int32, None, None, None, aligned=False)


def fake_bounds() -> Any:
    """Documents.bounds to compile with."""
    return fake(torch.int32, 6, None, aligned=False)


@compiled_once
def _mark(size: int, packed: bool, init: int = 0, local: int = 0) -> Kernel:
    tables = [fake_table() for _ in range(3)]
    return compile_kernel(MarkTokens(size, init, local), *tables, fake_bounds() if packed else None, Int32(0))


@compiled_once
def _count() -> Kernel:
    return compile_kernel(CountTokens(), fake_table(), fake_table(), fake_segments(), Int32(0))


@compiled_once
def _list() -> Kernel:
    tables = [fake_table() for _ in range(3)]
    return compile_kernel(ListTokens(), *tables, fake_segments(), fake_segments(), fake_places())


@compiled_once
def _cut() -> Kernel:
    return compile_kernel(CutLists(), *[fake_segments() for _ in range(3)])


def visits_of(
    indices: Tensor,
    *,
    size: int,
    blocks: int,
    length: int,
    first_token: int = 0,
    bounds: Tensor | None = None,
    init: int = 0,
    local: int = 0,
) -> Visits:
    """Turn the choices of some tokens around.

    Args:
        indices: int32 `[B,H_kv,T,n]`, at least one, of tokens `first_token` ...; padded with -1.
        size: l', tokens of a block.
        blocks: the most that tokens up to the last one can visit.
        length: the fewest visits of a segment of a cut block.
        bounds: Documents.bounds (documents.bounds_of) with tiles of l' tokens.
        init, local: the first blocks of a document, and those that end with a token's own, that it does not visit.
    """
    batch, heads, tokens, slots = indices.shape
    sizes = Sizes.of(tokens * slots, tokens, blocks, length)

    def table(*shape: int) -> Tensor:
        return torch.empty((batch, heads, *shape), dtype=torch.int32, device=indices.device)

    bits = torch.zeros((batch, heads, blocks, -(-tokens // WORD)), dtype=torch.int32, device=indices.device)
    visited, before, counts = torch.empty_like(indices), torch.empty_like(bits), table(3, blocks)
    places, segments = table(sizes.visits), table(3, sizes.segments)
    _mark(size, bounds is not None, init, local).run(indices, visited, bits, bounds, first_token)
    _count().run(bits, before, counts, length)
    sums = counts.cumsum(3, dtype=torch.int32)
    _list().run(visited, bits, before, counts, sums, places)
    _cut().run(counts, sums, segments)
    return Visits(visited, places, segments, counts, sums, sizes, first_token)


def passes(
    indices: Tensor,
    *,
    size: int,
    length: int,
    token_bytes: int,
    most_bytes: int,
    first_token: int = 0,
    bounds: Tensor | None = None,
    init: int = 0,
    local: int = 0,
) -> Iterator[tuple[Visits, slice, slice]]:
    """Lists for some tokens, batches and key/value heads at a time, tokens ascending.

    Args:
        indices, size, length, first_token, bounds, init, local: as of `visits_of`, of all tokens.
        token_bytes: what is written for the visits of a token of one batch and key/value head.
        most_bytes: what may be written in a pass; passed by only where ALIGNED_TOKENS write more.

    Yields:
        The visits, and which batches and key/value heads they are of.
    """
    batch, heads, tokens, _ = indices.shape
    if indices.stride(3) != 1:
        indices = indices.clone(memory_format=torch.contiguous_format)
    if bounds is None:
        blocks = -(-(first_token + tokens) // size)
    else:
        blocks, _ = documents.sizes(tokens, bounds.shape[1] - 1, size, 1)
    per_token = 2 * blocks // 8 + 1  # of bits and their counts
    step = min(most_bytes // token_bytes, LIST_BYTES // per_token) // ALIGNED_TOKENS * ALIGNED_TOKENS
    step = max(step, ALIGNED_TOKENS)
    times = max(-(-tokens // step), 1)  # about as many tokens each
    step = -(-tokens // (times * ALIGNED_TOKENS)) * ALIGNED_TOKENS
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        seen = blocks if bounds is not None else -(-(first_token + stop) // size)
        listed = LIST_BYTES // (per_token * (stop - start))
        for batches, kv_heads in shares(slice(0, batch), slice(0, heads), listed):
            visits = visits_of(
                indices[batches, kv_heads, start:stop],
                size=size,
                blocks=seen,
                length=length,
                first_token=first_token + start,
                bounds=bounds,
                init=init,
                local=local,
            )
            for b, h in shares(batches, kv_heads, most_bytes // (token_bytes * (stop - start))):
                inner = slice(b.start - batches.start, b.stop - batches.start)
                yield visits.part(inner, slice(h.start - kv_heads.start, h.stop - kv_heads.start)), b, h


def shares(batches: slice, heads: slice, most: int) -> Iterator[tuple[slice, slice]]:
    """Batches and heads in groups of at most so many pairs, and at least one."""
    of_heads = heads.stop - heads.start
    step = max(1, most // of_heads)
    for b in range(batches.start, batches.stop, step):
        for h in range(heads.start, heads.stop, max(1, min(most, of_heads))):
            yield slice(b, min(b + step, batches.stop)), slice(h, min(h + max(1, most), heads.stop))
