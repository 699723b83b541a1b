"""Attention of each token to its own blocks of keys, exact: keys stay, queries come to them.

    S_ij = scale q_i . k_j        j in the blocks that token i chose, j <= i
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

VisitBlocks   one CTA: keys and values of one block, and a segment of the tokens that chose it (segments.py). The G query
              heads of a key/value head chose together, so the rows of a block are visits x G, gathered by cp.async;
              each warp takes every eighth 32 of them (16 where l' > 64) and meets the others only for the keys. All keys of
              a row are there at once: a softmax, o in 16 bits and lse, written where the token's slot is.
AddSlots      each row's slots added up in their order, weighted by exp(lse_slot - lse).

Traffic does not depend on whether neighbours agree: q is read n times, o written and read n times. Some tokens and
key/value heads at a time keep o of slots below PART_BYTES; of those tokens, q fits in L2 about as well.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 2.2 TFLOP, 3.7 ms at 600 TFLOP/s, and 34 GB for o of slots,
8.2 ms at 4.2 TB/s, at the same time; 17 GB of q, from L2 where it is there.

Packed documents (B = 1): blocks lie between a document's first and last token, and are read where they are.

Limits: mma.sync, sm_90a and sm_100a alike; D and D_v 64 or 128; l' a multiple of 64 up to 256; any G; n T G < 2^31 for
the T tokens of a pass; 64-bit offsets; rows start at multiples of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels import documents
from cute_kernels.documents import LENGTH, TILE, TOKEN, document_at
from cute_kernels.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, fake
from cute_kernels.segments import (
    BLOCK,
    COUNT,
    CUT,
    FIRST,
    WHOLE,
    Visits,
    fake_bounds,
    fake_places,
    fake_segments,
    fake_table,
    visits_of,
)
from cute_kernels.warp import LANES
from cute_kernels.warp_tiles import (
    CHUNK,
    QUAD,
    accumulator,
    gather_rows,
    left_operand,
    load_block,
    multiply,
    multiply_registers,
    numbers,
    tiles,
    transposed,
    warps_mma,
    write_row,
)

WARPS = 8
CTAS = 2
"""Of a multiprocessor, at a time."""

SHARED_PERCENT = 100
"""Of a multiprocessor's memory for shared memory; without it the compiler asks a GPU."""

COLUMNS = 32
"""Of o that a warp has in registers at a time."""

ADD_THREADS = 128
BATCH = 8
"""Loads of a thread in flight together."""

PART_BYTES = 512 << 20
"""For o of slots."""

SEGMENT_ROWS = 2048
"""The fewest rows of a segment of a cut block."""

ALIGNED_TOKENS = 256
"""A pass over some of the tokens takes a multiple of these."""

DIMS = (64, 128)
SIZES = (64, 128, 192, 256)
LOG2_E = math.log2(math.e)


@cute.jit
def block_bounds(
    block: Int32, size: cutlass.Constexpr[int], num_keys: Int32, mBounds: cute.Tensor | None
) -> tuple[Int32, Int32]:
    """First key of a block, and the first one behind its document."""
    first, end = block * size, num_keys
    if const_expr(mBounds is not None):
        document = document_at(mBounds[TILE, None], block, 1, 1, 0)
        start = mBounds[TOKEN, document]
        first, end = start + (block - mBounds[TILE, document]) * size, start + mBounds[LENGTH, document]
    return first, end


@cute.jit
def used_segments(mSums: cute.Tensor) -> tuple[Int32, Int32]:
    """How many segments there are of cut blocks, and of all. Args: [3, blocks] of Visits.sums."""
    last = mSums.shape[1] - 1
    cut = mSums[CUT, last]
    return cut, cut + mSums[WHOLE, last]


def heads_of(mX: cute.Tensor, group: int) -> cute.Tensor:
    """[B, N, H, D] as [B, N, H_kv, G, D]."""
    batches, tokens, heads, dim = mX.layout.shape
    of_batch, of_token, of_head, of_dim = mX.layout.stride
    layout = cute.make_layout(
        (batches, tokens, heads // group, group, dim), stride=(of_batch, of_token, of_head * group, of_head, of_dim)
    )
    return cute.make_tensor(mX.iterator, layout)


class VisitBlocks:
    """Args: dims of k and v; 16-bit type; G; n, slots of a token; l', tokens of a block."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.rows = 32 if size == 64 else 16
        self.ctas = CTAS if size * (dim + v_dim) <= 128 * 128 else 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mPlaces: cute.Tensor,  # Visits.places
        mSegments: cute.Tensor,  # Visits.segments
        mSums: cute.Tensor,  # Visits.sums
        mO: cute.Tensor,  # [B, H_kv, T n, G, D_v]
        mLse: cute.Tensor,  # fp32 [B, H_kv, T n, G]
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            heads_of(mQ, self.group),
            mK,
            mV,
            mPlaces,
            mSegments,
            mSums,
            mO,
            mLse,
            mBounds,
            first_token,
            scale,
            warps_mma(self.dtype, 1),
            tiles(self.dtype, self.rows, self.dim, WARPS),
            tiles(self.dtype, self.size, self.dim, 1),
            tiles(self.dtype, self.size, self.v_dim, 1),
        ).launch(
            grid=[mSegments.shape[3], mK.shape[2], mK.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=SHARED_PERCENT,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, N, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mPlaces: cute.Tensor,
        mSegments: cute.Tensor,
        mSums: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mBounds: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mma: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        segment, kv_head, batch = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        sK = smem.allocate_tensor(self.dtype, key_layout, 1024)[None, None, 0]
        sV = smem.allocate_tensor(self.dtype, value_layout, 1024)[None, None, 0]
        sQ = smem.allocate_tensor(self.dtype, row_layout, 1024)[None, None, warp_index]

        _, used = used_segments(mSums[batch, kv_head, None, None])
        if segment < used:
            gSegment = mSegments[batch, kv_head, None, segment]
            first_key, end = block_bounds(gSegment[BLOCK], self.size, mK.shape[1], mBounds)
            num_rows = gSegment[COUNT] * self.group
            gPlaces = cute.domain_offset((gSegment[FIRST],), mPlaces[batch, kv_head, None])
            gQ = mQ[batch, None, kv_head, None, None]
            if num_rows > 0:
                load_block(mK[batch, None, kv_head, None], sK, first_key, end, thread, WARPS * LANES)
                load_block(mV[batch, None, kv_head, None], sV, first_key, end, thread, WARPS * LANES)
                if warp_index * self.rows < num_rows:
                    self._gather(gQ, gPlaces, sQ, warp_index * self.rows, num_rows, first_token)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
            for row in cutlass.range(warp_index * self.rows, num_rows, WARPS * self.rows, unroll=1):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
                acc = accumulator(mma, (self.rows, self.size))
                acc.fill(0.0)
                multiply(mma, lane, acc, sQ, sK)
                cute.arch.sync_warp()
                if row + WARPS * self.rows < num_rows:
                    self._gather(gQ, gPlaces, sQ, row + WARPS * self.rows, num_rows, first_token)
                cute.arch.cp_async_commit_group()

                # Of the rows of this lane
                count = const_expr(self.rows // CHUNK)
                S = numbers(acc)
                rRow = cute.make_rmem_tensor((2, count), Int32)
                rPlace = cute.make_rmem_tensor((2, count), Int32)
                for m in range_constexpr(count):
                    for r in range_constexpr(2):
                        rRow[r, m] = row + m * CHUNK + r * 8 + lane // QUAD
                        rPlace[r, m] = gPlaces[cutlass.min(rRow[r, m], num_rows - 1) // self.group]
                # Tokens ascend: if the first one sees all keys, all see them
                if first_token + gPlaces[row // self.group] // self.slots < first_key + self.size - 1:
                    for m in range_constexpr(count):
                        for r in range_constexpr(2):
                            seen = first_token + rPlace[r, m] // self.slots - first_key
                            for n in range_constexpr(cute.size(S, mode=[3])):
                                for c in range_constexpr(2):
                                    key = n * 8 + lane % QUAD * 2 + c
                                    S[c, r, m, n] = S[c, r, m, n] if key <= seen else -Float32.inf
                rSum = cute.make_rmem_tensor((2, count), Float32)
                for m in range_constexpr(count):
                    for r in range_constexpr(2):
                        top = -Float32.inf
                        for n in range_constexpr(cute.size(S, mode=[3])):
                            for c in range_constexpr(2):
                                top = cute.arch.fmax(top, S[c, r, m, n])
                        top = cute.arch.warp_reduction_max(top, threads_in_group=QUAD)
                        top = Float32(0.0) if top == -Float32.inf else top * (scale * LOG2_E)
                        total = Float32(0.0)
                        for n in range_constexpr(cute.size(S, mode=[3])):
                            for c in range_constexpr(2):
                                S[c, r, m, n] = cute.math.exp2(
                                    cute.math.fma(S[c, r, m, n], scale * LOG2_E, -top), fastmath=True
                                )
                                total += S[c, r, m, n]
                        rSum[r, m] = cute.arch.warp_reduction_sum(total, threads_in_group=QUAD)
                        if (rRow[r, m] < num_rows) & (lane % QUAD == 0):
                            lse = top / LOG2_E + cute.math.log(rSum[r, m])
                            mLse[batch, kv_head, rPlace[r, m], rRow[r, m] % self.group] = lse

                rP = left_operand(acc, self.dtype)
                for part in range_constexpr(self.v_dim // COLUMNS):
                    sVt = cute.local_tile(transposed(sV), (COLUMNS, self.size), (part, 0))
                    acc_o = accumulator(mma, (self.rows, COLUMNS))
                    acc_o.fill(0.0)
                    multiply_registers(mma, lane, acc_o, rP, sVt, True)
                    O = numbers(acc_o)
                    for m in range_constexpr(count):
                        for r in range_constexpr(2):
                            share = Float32(0.0) if rSum[r, m] == 0.0 else 1.0 / rSum[r, m]
                            for n in range_constexpr(cute.size(O, mode=[3])):
                                for c in range_constexpr(2):
                                    O[c, r, m, n] = O[c, r, m, n] * share
                    rO = cute.make_rmem_tensor(O.layout, self.dtype)
                    rO.store(O.load().to(self.dtype))
                    for m in range_constexpr(count):
                        for r in range_constexpr(2):
                            gO = mO[batch, kv_head, rPlace[r, m], rRow[r, m] % self.group, None]
                            gO = cute.local_tile(gO, (COLUMNS,), (part,))
                            write_row(rO, r, m, gO, rRow[r, m] < num_rows, lane)

    @cute.jit
    def _gather(
        self, gQ: cute.Tensor, gPlaces: cute.Tensor, sQ: cute.Tensor, row: Int32, num_rows: Int32, first_token: Int32
    ):
        gather_rows(
            gQ, gPlaces, sQ, row, num_rows - 1, first_token, self.slots, cute.arch.lane_idx(), LANES
        )


class AddSlots:
    """Adds up what the slots of each row have; slots that visit nothing count nothing.

    Args:
        dim: columns of a row.
        group: G.
        weighted: by the slots' lse's, to one softmax over all their keys.
        units: parts of a slot, one behind the other.
    """

    def __init__(self, dim: int, group: int, *, weighted: bool, units: int) -> None:
        self.vectors, self.group, self.weighted, self.units = dim // VECTOR, group, weighted, units
        self.rows = ADD_THREADS // self.vectors

    @cute.jit
    def __call__(
        self,
        mBlocks: cute.Tensor,  # Visits.blocks
        mParts: cute.Tensor,  # [B, H_kv, T n units, G, dim]
        mPartLse: cute.Tensor | None,  # fp32 [B, H_kv, T n, G], when weighted
        mX: cute.Tensor,  # [B, T, H, dim]
        mLse: cute.Tensor | None,  # fp32 [B, H, T], likewise
        stream: Any,
    ):
        self.kernel(mBlocks, mParts, mPartLse, mX, mLse).launch(
            grid=[cute.ceil_div(mBlocks.shape[2] * self.group, self.rows), mBlocks.shape[1], mBlocks.shape[0]],
            block=[ADD_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, kv_head, batch = cute.arch.block_idx()
        vector, row = thread % self.vectors, cta * self.rows + thread // self.vectors
        token, head = row // self.group, row % self.group
        _, _, tokens, slots = mBlocks.shape
        if token < tokens:
            gBlocks = mBlocks[batch, kv_head, token, None]
            top = -Float32.inf
            if const_expr(self.weighted):
                for slot in cutlass.range(slots, unroll=BATCH):
                    lse = mPartLse[batch, kv_head, token * slots + slot, head]
                    top = cute.arch.fmax(top, lse if gBlocks[slot] >= 0 else -Float32.inf)
                top = Float32(0.0) if top == -Float32.inf else top
            total = Float32(0.0)
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            rPart = cute.make_rmem_tensor((VECTOR, BATCH), mParts.element_type)
            rWeight = cute.make_rmem_tensor(BATCH, Float32)
            parts = slots * self.units
            for start in cutlass.range(0, parts, BATCH, unroll=1):
                for i in range_constexpr(BATCH):
                    part = start + i
                    rPart[None, i].fill(0.0)
                    rWeight[i] = 0.0
                    if part < parts:
                        if gBlocks[part // self.units] >= 0:
                            place = token * parts + part
                            gPart = mParts[batch, kv_head, place, head, None]
                            cute.autovec_copy(cute.local_tile(gPart, (VECTOR,), (vector,)), rPart[None, i])
                            if const_expr(self.weighted):
                                rWeight[i] = mPartLse[batch, kv_head, place, head]
                                rWeight[i] = cute.math.exp2((rWeight[i] - top) * LOG2_E, fastmath=True)
                            else:
                                rWeight[i] = 1.0
                for i in range_constexpr(BATCH):
                    total += rWeight[i]
                    for j in range_constexpr(VECTOR):
                        rSum[j] = cute.math.fma(rWeight[i], rPart[j, i].to(Float32), rSum[j])
            gX = mX[batch, token, kv_head * self.group + head, None]
            if const_expr(self.weighted):
                rSum.store(rSum.load() * (Float32(0.0) if total == 0.0 else 1.0 / total))
                if vector == 0:
                    mLse[batch, kv_head * self.group + head, token] = top + cute.math.log(total)
            rX = cute.make_rmem_tensor(VECTOR, mX.element_type)
            rX.store(rSum.load().to(mX.element_type))
            cute.autovec_copy(rX, cute.local_tile(gX, (VECTOR,), (vector,)))


@lru_cache
def _visit(
    dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool
) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        VisitBlocks(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size),
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim)],
        fake_places(),
        fake_segments(),
        fake_segments(),
        fake(dtype, None, None, None, group, v_dim),
        fake(torch.float32, None, None, None, group, aligned=False),
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@lru_cache
def _add(dim: int, dtype: torch.dtype, group: int, *, weighted: bool, units: int) -> Kernel:
    return compile_kernel(
        AddSlots(dim, group, weighted=weighted, units=units),
        fake_table(),
        fake(dtype, None, None, None, group, dim),
        fake(torch.float32, None, None, None, group, aligned=False) if weighted else None,
        fake(dtype, None, None, None, dim),
        fake(torch.float32, None, None, None, aligned=False) if weighted else None,
    )
