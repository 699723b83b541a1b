"""Backward of attention of each token to its own blocks of keys (token_selected.py): keys stay, deterministic.

    P_ij = exp(scale q_i . k_j - lse_i), 0 where i does not see j        dS_ij = P_ij (dO_i . v_j - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

lse may be shifted (by the logarithm of a gate): P is what it makes it. Where lse is not finite, P = 0. Sums in fp32; P
and dS are rounded to 16 bits before they are multiplied, a slot's dQ before slots are added up.

VisitGradients  one CTA: 64 keys of a block, and a segment of the tokens that chose it (segments.py), 64 gathered rows
                of q and dO at a time. Of four warps each two share the rows, and the pairs share the columns of all
                five products: keys of S and dP, head dim of dQ, dK and dV. P and dS pass through shared memory; dK and
                dV stay in registers. dQ goes, in 16 bits, to the place of the token's slot.
AddSlots        the slots' dQ added up in their order.
AddParts        the segments' dK and dV of blocks that were cut, in order.

dK and dV of all tokens are fp32 sums, to which passes over tokens add one after the other; nothing is atomic.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 5.5 TFLOP, 9.2 ms at 600 TFLOP/s, and 34 GB for the slots'
dQ, 8.2 ms at 4.2 TB/s, at the same time; 34 GB of q and dO come from L2 where they are there, else 8.2 ms more.

Limits: mma.sync, sm_90a and sm_100a alike; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens of
a pass n T G D l' / 64 < 2^34; a token's q and dO less than 2^15 numbers from the next one's; 64-bit offsets; rows start
at multiples of 16 bytes; what is visited is finite.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.device import vectorized
from cute_kernels.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, fake
from cute_kernels.segments import BLOCK, COUNT, CUT, FIRST, fake_bounds, fake_places, fake_segments, passes
from cute_kernels.token_selected import (
    LOG2_E,
    SHARED_PERCENT,
    add_slots,
    block_bounds,
    check_token_selected,
    heads_of,
    used_segments,
)
from cute_kernels.warp import LANES
from cute_kernels.warp_tiles import (
    ALIGNMENT,
    CHUNK,
    QUAD,
    accumulator,
    as_vectors,
    gather_rows,
    load_block,
    multiply,
    numbers,
    store,
    tiles,
    transposed,
    warps_mma,
    write_rows,
)

UNIT = 64
"""Keys, and gathered rows, that are multiplied at a time."""

PAIR = 2
"""Warps that share rows; there are as many pairs, which share columns."""

THREADS = PAIR * PAIR * LANES
CTAS = 2
STAGES = 2

ADD_THREADS = 256
SUMMED = 4
"""fp32 numbers of one vector."""
BATCH = 4
"""Vectors that a thread loads together."""

PART_BYTES = 1 << 30
"""For dQ of slots."""

SEGMENT_ROWS = 4096
"""The fewest rows of a segment of a cut block."""


class VisitGradients:
    """Args: dims of k and v; 16-bit type; G; n, slots of a token; l', tokens of a block."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.units = size // UNIT

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,  # [B, N, H, D_v]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mPlaces: cute.Tensor,  # Visits.places
        mSegments: cute.Tensor,  # Visits.segments
        mSums: cute.Tensor,  # Visits.sums
        mdQ: cute.Tensor,  # [B, H_kv, T n units, G, D]
        mdK: cute.Tensor,  # fp32 [B, N, H_kv, D]
        mdV: cute.Tensor,  # fp32 [B, N, H_kv, D_v]
        mdKParts: cute.Tensor,  # fp32 [B, H_kv, segments of cut blocks, l', D]
        mdVParts: cute.Tensor,  # fp32 [B, H_kv, segments of cut blocks, l', D_v]
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            heads_of(mQ, self.group),
            heads_of(mdO, self.group),
            mK,
            mV,
            mLse,
            mDelta,
            mPlaces,
            mSegments,
            mSums,
            mdQ,
            mdK,
            mdV,
            mdKParts,
            mdVParts,
            mBounds,
            first_token,
            scale,
            warps_mma(self.dtype, PAIR),
            tiles(self.dtype, UNIT, self.dim, 1 + STAGES),
            tiles(self.dtype, UNIT, self.v_dim, 1 + STAGES),
            tiles(self.dtype, UNIT, UNIT, 2),
        ).launch(
            grid=[mSegments.shape[3] * self.units, mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=CTAS,
            preferred_smem_carveout=SHARED_PERCENT,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, N, H_kv, G, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor,
        mPlaces: cute.Tensor,
        mSegments: cute.Tensor,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mdKParts: cute.Tensor,
        mdVParts: cute.Tensor,
        mBounds: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mma: cute.TiledMma,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
        score_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, kv_head, batch = cute.arch.block_idx()
        segment, unit = item // self.units, item % self.units
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mine, pair, rows_of_pair = thread % (PAIR * LANES), warp_index // PAIR, warp_index % PAIR

        smem = cutlass.memory.SmemAllocator()
        sKQ = smem.allocate_tensor(self.dtype, key_layout, ALIGNMENT)
        sVdO = smem.allocate_tensor(self.dtype, value_layout, ALIGNMENT)
        sScores = smem.allocate_tensor(self.dtype, score_layout, ALIGNMENT)
        sLse = smem.allocate_tensor(Float32, cute.make_layout(UNIT), 16)
        sDelta = smem.allocate_tensor(Float32, cute.make_layout(UNIT), 16)
        sSeen = smem.allocate_tensor(Int32, cute.make_layout(UNIT), 16)
        sK, sV = sKQ[None, None, STAGES], sVdO[None, None, STAGES]
        sP, sdS = sScores[None, None, 0], sScores[None, None, 1]

        cut, used = used_segments(mSums[batch, kv_head, None, None])
        if segment < used:
            gSegment = mSegments[batch, kv_head, None, segment]
            first_key, end = block_bounds(gSegment[BLOCK], self.size, mK.shape[1], mBounds)
            first_key += unit * UNIT
            num_rows = gSegment[COUNT] * self.group
            gPlaces = cute.domain_offset((gSegment[FIRST],), mPlaces[batch, kv_head, None])
            gQ, gdO = mQ[batch, None, kv_head, None, None], mdO[batch, None, kv_head, None, None]
            gLse = cute.domain_offset((kv_head * self.group, 0), mLse[batch, None, None])
            gDelta = cute.domain_offset((kv_head * self.group, 0), mDelta[batch, None, None])
            gdQ = mdQ[batch, kv_head, None, None, None]
            dK, dV = accumulator(mma, (UNIT, self.dim // PAIR)), accumulator(mma, (UNIT, self.v_dim // PAIR))
            dK.fill(0.0)
            dV.fill(0.0)
            number, token = Float32(0.0), Int32(0)
            if num_rows > 0:
                load_block(mK[batch, None, kv_head, None], sK, first_key, end, thread, THREADS)
                load_block(mV[batch, None, kv_head, None], sV, first_key, end, thread, THREADS)
                self._gather(gQ, gdO, gPlaces, sKQ, sVdO, Int32(0), num_rows)
                number, token = self._statistic(gLse, gDelta, gPlaces, Int32(0), num_rows, pair)
            cute.arch.cp_async_commit_group()
            for row in cutlass.range(0, num_rows, UNIT, unroll=1):
                if pair == 0:
                    sLse[mine] = number
                    sSeen[mine] = first_token + token - first_key  # the last key that a row sees
                else:
                    sDelta[mine] = number
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                stage = row // UNIT % STAGES
                if row + UNIT < num_rows:
                    self._gather(gQ, gdO, gPlaces, sKQ, sVdO, row + UNIT, num_rows)
                    number, token = self._statistic(gLse, gDelta, gPlaces, row + UNIT, num_rows, pair)
                cute.arch.cp_async_commit_group()
                sQ, sdO = sKQ[None, None, stage], sVdO[None, None, stage]

                columns = UNIT // PAIR
                acc, acc_dp = accumulator(mma, (UNIT, columns)), accumulator(mma, (UNIT, columns))
                acc.fill(0.0)
                acc_dp.fill(0.0)
                first = pair * (columns // CHUNK)
                multiply(mma, mine, acc, sQ, sK, first)
                multiply(mma, mine, acc_dp, sdO, sV, first)
                S, dP = numbers(acc), numbers(acc_dp)
                # Tokens ascend: if the first one sees all keys, all see them
                masked = sSeen[0] < UNIT - 1
                for m in range_constexpr(cute.size(S, mode=[2])):
                    for r in range_constexpr(2):
                        place = (m * PAIR + rows_of_pair) * CHUNK + r * 8 + lane // QUAD
                        lse, delta = sLse[place], sDelta[place]
                        for n in range_constexpr(cute.size(S, mode=[3])):
                            for c in range_constexpr(2):
                                S[c, r, m, n] = cute.math.exp2(
                                    cute.math.fma(S[c, r, m, n], scale * LOG2_E, -lse), fastmath=True
                                )
                        if masked:
                            seen = sSeen[place]
                            for n in range_constexpr(cute.size(S, mode=[3])):
                                for c in range_constexpr(2):
                                    key = pair * columns + n * 8 + lane % QUAD * 2 + c
                                    S[c, r, m, n] = S[c, r, m, n] if key <= seen else Float32(0.0)
                        for n in range_constexpr(cute.size(S, mode=[3])):
                            for c in range_constexpr(2):
                                dP[c, r, m, n] = S[c, r, m, n] * (dP[c, r, m, n] - delta)
                store(mma, mine, acc, sP, first)
                store(mma, mine, acc_dp, sdS, first)
                cute.arch.sync_threads()

                first = pair * (self.v_dim // PAIR // CHUNK)
                multiply(mma, mine, dV, transposed(sP), transposed(sdO), first, True, True)
                first = pair * (self.dim // PAIR // CHUNK)
                multiply(mma, mine, dK, transposed(sdS), transposed(sQ), first, True, True)
                acc_dq = accumulator(mma, (UNIT, self.dim // PAIR))
                acc_dq.fill(0.0)
                multiply(mma, mine, acc_dq, sdS, transposed(sK), first, False, True)
                rdQ = cute.make_rmem_tensor_like(acc_dq, self.dtype)
                rdQ.store((acc_dq.load() * scale).to(self.dtype))
                to_row = row + (lane // CHUNK * PAIR + rows_of_pair) * CHUNK + lane % CHUNK
                last = cutlass.min(to_row, num_rows - 1)
                slot = gPlaces[last // self.group] * self.units + unit
                to = Int32(cute.crd2idx((slot, last % self.group, 0), gdQ.layout) // VECTOR)
                to = to if to_row < num_rows else Int32(-1)
                piece = cute.domain_offset((0, pair * (self.dim // PAIR // VECTOR)), as_vectors(gdQ))
                write_rows(numbers(rdQ), piece, to)

            keys = cutlass.min(end - first_key, UNIT)
            dK.store(dK.load() * scale)
            if segment < cut:
                of_unit = (unit * UNIT, 0)
                self._write(dK, cute.domain_offset(of_unit, mdKParts[batch, kv_head, segment, None, None]), UNIT, False)
                self._write(dV, cute.domain_offset(of_unit, mdVParts[batch, kv_head, segment, None, None]), UNIT, False)
            elif num_rows > 0:
                self._write(dK, cute.domain_offset((first_key, 0), mdK[batch, None, kv_head, None]), keys, True)
                self._write(dV, cute.domain_offset((first_key, 0), mdV[batch, None, kv_head, None]), keys, True)

    @cute.jit
    def _gather(
        self,
        gQ: cute.Tensor,
        gdO: cute.Tensor,
        gPlaces: cute.Tensor,
        sKQ: cute.Tensor,
        sVdO: cute.Tensor,
        first_row: Int32,
        num_rows: Int32,
    ):
        """Each warp starts copying 16 rows of q and dO; the last row in place of those behind the end."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stage = first_row // UNIT % STAGES
        row = cutlass.min(first_row + warp_index * CHUNK + cute.arch.lane_idx() % CHUNK, num_rows - 1)
        place = (gPlaces[row // self.group] // self.slots, row % self.group, 0)
        sQ = cute.local_tile(sKQ[None, None, stage], (CHUNK, self.dim), (warp_index, 0))
        sdO = cute.local_tile(sVdO[None, None, stage], (CHUNK, self.v_dim), (warp_index, 0))
        gather_rows(as_vectors(gQ), sQ, Int32(cute.crd2idx(place, gQ.layout) // VECTOR))
        gather_rows(as_vectors(gdO), sdO, Int32(cute.crd2idx(place, gdO.layout) // VECTOR))

    @cute.jit
    def _statistic(
        self,
        gLse: cute.Tensor,  # [G, tokens]
        gDelta: cute.Tensor,
        gPlaces: cute.Tensor,
        first_row: Int32,
        num_rows: Int32,
        pair: Int32,
    ) -> tuple[Float32, Int32]:
        """Of one row: lse in base 2, in the other pair delta, inf and 0 where P = 0; and its token."""
        thread, _, _ = cute.arch.thread_idx()
        row = first_row + thread % UNIT
        last = cutlass.min(row, num_rows - 1)
        head, token = last % self.group, gPlaces[last // self.group] // self.slots
        lse, delta = gLse[head, token], gDelta[head, token]
        present = (row < num_rows) & (lse > -Float32.inf) & (lse < Float32.inf)
        number = lse * LOG2_E if present else Float32.inf
        if pair != 0:
            number = delta if present else Float32(0.0)
        return number, token

    @cute.jit
    def _write(self, acc: cute.Tensor, mX: cute.Tensor, keys: Int32, add: cutlass.Constexpr[bool]):
        """Columns of a pair of warps to fp32 [keys, columns], maybe added to what is there."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        X = numbers(acc)
        _, _, rows, pieces = X.shape
        rX, rBefore = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for m in range_constexpr(rows):
            for r in range_constexpr(2):
                key = (m * PAIR + warp_index % PAIR) * CHUNK + r * 8 + lane // QUAD
                if key < keys:
                    for n in range_constexpr(pieces):
                        place = (warp_index // PAIR * pieces + n) * QUAD + lane % QUAD
                        gX = cute.local_tile(mX[key, None], (2,), (place,))
                        for c in range_constexpr(2):
                            rX[c] = X[c, r, m, n]
                        if const_expr(add):
                            cute.autovec_copy(gX, rBefore)
                            rX.store(rX.load() + rBefore.load())
                        cute.autovec_copy(rX, gX)


class AddParts:
    """Adds the sums of the segments of cut blocks, in order. A CTA for each segment: its share of the block's numbers.

    Args: columns of a key, l'.
    """

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.size = dim, size

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # Visits.counts
        mSums: cute.Tensor,  # Visits.sums
        mSegments: cute.Tensor,  # Visits.segments
        mParts: cute.Tensor,  # fp32 [B, H_kv, segments of cut blocks, l', dim]
        mX: cute.Tensor,  # fp32 [B, N, H_kv, dim]
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        stream: Any,
    ):
        self.kernel(mCounts, mSums, mSegments, mParts, mX, mBounds).launch(
            grid=[mParts.shape[2], mParts.shape[1], mParts.shape[0]], block=[ADD_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCounts: cute.Tensor,
        mSums: cute.Tensor,
        mSegments: cute.Tensor,
        mParts: cute.Tensor,
        mX: cute.Tensor,
        mBounds: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        segment, head, batch = cute.arch.block_idx()
        cut, _ = used_segments(mSums[batch, head, None, None])
        if segment < cut:
            block = mSegments[batch, head, BLOCK, segment]
            segments = mCounts[batch, head, CUT, block]
            first = mSums[batch, head, CUT, block] - segments
            first_key, end = block_bounds(block, self.size, mX.shape[1], mBounds)
            vectors = const_expr(self.size * self.dim // SUMMED)
            rSum = cute.make_rmem_tensor(SUMMED, Float32)
            rPart = cute.make_rmem_tensor((SUMMED, BATCH), Float32)
            share = segment - first
            stop = (share + 1) * vectors // segments
            for vector in cutlass.range(share * vectors // segments + thread, stop, ADD_THREADS, unroll=1):
                key, column = vector // (self.dim // SUMMED), vector % (self.dim // SUMMED)
                if first_key + key < end:
                    gX = cute.local_tile(mX[batch, first_key + key, head, None], (SUMMED,), (column,))
                    cute.autovec_copy(gX, rSum)
                    for start in cutlass.range(0, segments, BATCH, unroll=1):
                        for i in range_constexpr(BATCH):
                            rPart[None, i].fill(0.0)
                            if start + i < segments:
                                gPart = mParts[batch, head, first + start + i, key, None]
                                cute.autovec_copy(cute.local_tile(gPart, (SUMMED,), (column,)), rPart[None, i])
                        for i in range_constexpr(BATCH):
                            rSum.store(rSum.load() + rPart[None, i].load())
                    cute.autovec_copy(rSum, gX)


@lru_cache
def _visit(dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        VisitGradients(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size),
        *[fake(dtype, None, None, None, columns) for columns in (dim, v_dim, dim, v_dim)],
        *[fake(torch.float32, None, None, None, aligned=False) for _ in range(2)],
        fake_places(),
        *[fake_segments() for _ in range(2)],
        fake(dtype, None, None, None, group, dim),
        *[fake(torch.float32, None, None, None, columns) for columns in dims],
        *[fake(torch.float32, None, None, None, size, columns) for columns in dims],
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@lru_cache
def _add_parts(dim: int, size: int, packed: bool) -> Kernel:
    return compile_kernel(
        AddParts(dim, size),
        *[fake_segments() for _ in range(3)],
        fake(torch.float32, None, None, None, size, dim),
        fake(torch.float32, None, None, None, dim),
        fake_bounds() if packed else None,
    )


def token_selected_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    size: int,
    scale: float,
    bounds: Tensor | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `token_selected.token_selected_forward`.

    Args:
        q, k, v, indices, size, scale, bounds: as there, all from the first token on.
        do: `[B,N,H,D_v]`, like q; finite.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Not finite: the row counts nothing.
        delta: fp32 `[B,H,N]`, likewise: what dP is reduced by, sum(do * o) without a gate. Ignored where lse is not
            finite.
        into: dq, dk and dv to write, instead of new ones.

    Returns:
        dq, dk, dv. Rows without keys and keys without rows have zeros. Bitwise the same each time.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_selected(q, k, v, indices, size, scale, bounds=bounds)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    if do.shape != (batch, tokens, heads, v_dim) or do.dtype != q.dtype or not vectorized(do):
        expected = f"{q.dtype} {[batch, tokens, heads, v_dim]} with rows at multiples of 16 bytes"
        raise ValueError(f"do must be {expected}, got {do.dtype} {[*do.shape]}, strides {do.stride()}")
    for name, x in (("lse", lse), ("delta", delta)):
        if x.shape != (batch, heads, tokens) or x.dtype != torch.float32 or (x.numel() > 0 and x.stride(2) != 1):
            expected = f"fp32 {[batch, heads, tokens]}, its last dimension contiguous"
            raise ValueError(f"{name} must be {expected}, got {x.dtype} {[*x.shape]}, strides {x.stride()}")
    group, slots, units = heads // kv_heads, indices.shape[3], size // UNIT
    results = into or (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    dq = results[0]
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    if q.numel() == 0 or slots == 0:
        for result in results:
            result.zero_()
        return results
    packed = bounds is not None
    visit = _visit((dim, v_dim), q.dtype, group, slots, size, packed).run
    for visits, batches, of in passes(
        indices,
        size=size,
        length=-(-SEGMENT_ROWS // group),
        token_bytes=slots * units * group * dim * q.element_size(),
        most_bytes=PART_BYTES,
        bounds=bounds,
    ):
        pairs, cut = visits.places.shape[:2], visits.sizes.cut
        parts = torch.empty((*pairs, visits.sizes.visits * units, group, dim), dtype=q.dtype, device=q.device)
        cut_parts = [
            torch.empty((*pairs, max(cut, 1), size, columns), dtype=torch.float32, device=q.device)
            for columns in (dim, v_dim)
        ]
        queries = slice(of.start * group, of.stop * group)
        rows = visits.rows()
        sums = [x[batches, :, of] for x in (dk, dv)]
        visit(
            *[x[batches, rows, queries] for x in (q, do)],
            *[x[batches, :, of] for x in (k, v)],
            *[x[batches, queries, rows] for x in (lse, delta)],
            visits.places,
            visits.segments,
            visits.sums,
            parts,
            *sums,
            *cut_parts,
            bounds,
            visits.first_token,
            scale,
        )
        add_slots(visits, parts, dq[batches, rows, queries], units=units)
        if cut > 0:
            for x, x_parts in zip(sums, cut_parts, strict=True):
                run = _add_parts(x.shape[-1], size, packed).run
                run(visits.counts, visits.sums, visits.segments, x_parts, x, bounds)
    results[1].copy_(dk)
    results[2].copy_(dv)
    return results
