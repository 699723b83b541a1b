"""Backward of attention of each token to its own blocks of keys (attend/kv_outer.py): keys stay, deterministic.

    P_ij = exp(scale q_i . k_j - lse_i), 0 where i does not see j        dS_ij = P_ij (dO_i . v_j - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

lse may be shifted (by the logarithm of a gate): P is what it makes it. Where lse is not finite, P = 0. Sums in fp32; P
and dS are rounded to 16 bits before they are multiplied, a slot's dQ before slots are added up.

KVOuterBackward      one CTA: 64 keys of a block, and a segment of the tokens that chose it (worklist.py), 64 gathered
                    rows of q and dO at a time; dK and dV stay in registers. dQ goes, in 16 bits, to the place of the
                    token's slot. Of four warps each two share the rows, and the pairs share the columns of all five
                    products (mma.sync): keys of S and dP, head dim of dQ, dK and dV. P and dS pass through shared
                    memory.
KVOuterBackwardWGMMA  the same by WGMMA, on Hopper: transposed, so that P and dS are left operands in registers.
CombinePartials            the slots' dQ added up in their order.
AddParts            the segments' dK and dV of blocks that were cut, in order.

dK and dV of all tokens are fp32 sums, one for each stream, to which its passes over tokens add one after the other;
nothing is atomic. Passes take turns on two streams (streams.py), since lists, sums of segments and the last visits
of a pass leave most multiprocessors idle: one behind the other, each pass took 0.11 ms more.

While a tile is multiplied, the next one is gathered: its rows' places are known one tile before, their statistics wait
in registers.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 5.5 TFLOP, 9.2 ms at 600 TFLOP/s (mma.sync), 6.1 ms at 900
(WGMMA), and 34 GB for the slots' dQ, 8.2 ms at 4.2 TB/s, at the same time; 34 GB of q and dO come from L2 where they
are there, else 8.2 ms more. For 64 rows, 1,280 cycles of WGMMA, mma.sync moves 330 KB of shared memory, 2,560 cycles or
11.6 ms in all; WGMMA 160 KB, 1,280 cycles. Seen once on an H200: KVOuterBackward 25.3 ms, KVOuterBackwardWGMMA 18.2,
for which 10 to 13 were predicted: memory traffic and L2 bound it, not products.

Limits: sm_90a and sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens of a pass
n T G D l' / 64 < 2^34; a token's q and dO less than 2^15 numbers from the next one's; 64-bit offsets; rows start at
multiples of 16 bytes; what is visited is finite.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from cute_kernels.attend.checks import check_token_attention
from cute_kernels.attend.combine import combine_partials
from cute_kernels.attend.views import block_bounds, group_heads
from cute_kernels.attend.warp_rows import SMEM_CARVEOUT
from cute_kernels.lists.worklist import (
    BLOCK,
    COUNT,
    FIRST,
    SPLITS,
    fake_bounds,
    fake_query_rows,
    fake_tiles,
    num_work_tiles,
    worklist_chunks,
)
from cute_kernels.mma import wgmma as hopper
from cute_kernels.mma.mma_sync import (
    MMA_K,
    QUAD,
    SMEM_ALIGNMENT,
    acc_mn_view,
    accumulator,
    as_vectors,
    gather_tile,
    gemm_smem,
    lane_row,
    load_block,
    make_warp_mma,
    smem_tiles,
    store_acc,
    store_rows,
    transpose_view,
)
from cute_kernels.mma.warp import LANES, LOG2_E, probability
from cute_kernels.runtime.device import has_warpgroups, vectorized
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.runtime.streams import STREAMS, SideStreams

TILE = 64
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

PARTIAL_BYTES = 512 << 20
"""For dQ of a pass's slots; two passes have theirs at a time."""

MIN_TILE_ROWS = 4096
"""The fewest rows of a segment of a cut block."""


class KVOuterBackward:
    """By warps (mma.sync). Args: dims of k and v; 16-bit type; G; n, slots of a token; l', tokens of a block."""

    row_warps = PAIR
    """Warps that share columns of an accumulator: each has 16 of every 16 `row_warps` rows."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.units = size // TILE

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,  # [B, N, H, D_v]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mPlaces: cute.Tensor,  # Worklist.query_rows
        mSegments: cute.Tensor,  # Worklist.work_tiles
        mSums: cute.Tensor,  # Worklist.cum_counts
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
            group_heads(mQ, self.group),
            group_heads(mdO, self.group),
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
        ).launch(
            grid=[mSegments.shape[3] * self.units, mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=CTAS,
            preferred_smem_carveout=SMEM_CARVEOUT,
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
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, kv_head, batch = cute.arch.block_idx()
        segment, unit = item // self.units, item % self.units
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mine, half = thread % TILE, warp_index // (TILE // LANES)

        smem = cutlass.memory.SmemAllocator()
        sKQ, sVdO, sScores = self._allocate(smem)
        sLse = smem.allocate_tensor(Float32, cute.make_layout(TILE), 16)
        sDelta = smem.allocate_tensor(Float32, cute.make_layout(TILE), 16)
        sSeen = smem.allocate_tensor(Int32, cute.make_layout(TILE), 16)
        sTo = smem.allocate_tensor(Int32, cute.make_layout(TILE), 16)
        sPlace = smem.allocate_tensor(Int32, cute.make_layout(TILE), 16)

        cut, used = num_work_tiles(mSums[batch, kv_head, None, None])
        if segment < used:
            gSegment = mSegments[batch, kv_head, None, segment]
            first_key, end = block_bounds(gSegment[BLOCK], self.size, mK.shape[1], mBounds)
            first_key += unit * TILE
            num_rows = gSegment[COUNT] * self.group
            gPlaces = cute.domain_offset((gSegment[FIRST],), mPlaces[batch, kv_head, None])
            gQ, gdO = mQ[batch, None, kv_head, None, None], mdO[batch, None, kv_head, None, None]
            gLse = cute.domain_offset((kv_head * self.group, 0), mLse[batch, None, None])
            gDelta = cute.domain_offset((kv_head * self.group, 0), mDelta[batch, None, None])
            gdQ = mdQ[batch, kv_head, None, None, None]
            dK, dV = self._sums(self.dim), self._sums(self.v_dim)
            dK.fill(0.0)
            dV.fill(0.0)
            if num_rows > 0:
                load_block(mK[batch, None, kv_head, None], sKQ[None, None, STAGES], first_key, end, thread, THREADS)
                load_block(mV[batch, None, kv_head, None], sVdO[None, None, STAGES], first_key, end, thread, THREADS)
                # Of row `mine`: where its token is in this tile and the next one, and its statistics in this one
                place = self._place(gPlaces, mine, num_rows)
                if half == 0:
                    sPlace[mine] = place
                cute.arch.sync_threads()
                self._gather(gQ, sKQ[None, None, 0], sPlace, Int32(0), num_rows)
                self._gather(gdO, sVdO[None, None, 0], sPlace, Int32(0), num_rows)
                cute.arch.cp_async_commit_group()
                lse, delta = self._statistics(gLse, gDelta, place, mine, num_rows)
                next_place = self._place(gPlaces, TILE + mine, num_rows)
                cute.arch.sync_threads()
                for row in cutlass.range(0, num_rows, TILE, unroll=1):
                    present = (row + mine < num_rows) & (lse > -Float32.inf) & (lse < Float32.inf)
                    if half == 0:
                        sLse[mine] = lse * LOG2_E if present else Float32.inf
                        # The last key that the row sees
                        sSeen[mine] = first_token + self._token(place) - first_key
                        sPlace[mine] = next_place
                    else:
                        sDelta[mine] = delta if present else Float32(0.0)
                        to = (place * self.units + unit, self._head(row + mine), 0)
                        vector = Int32(cute.crd2idx(to, gdQ.layout) // VECTOR)
                        sTo[mine] = vector if row + mine < num_rows else Int32(-1)
                    cute.arch.cp_async_wait_group(0)
                    self._publish()
                    cute.arch.sync_threads()
                    stage, next_stage = (Int32(Uint32(row) // TILE + i) % STAGES for i in range(2))
                    S, dP = self._start(sKQ, sVdO, stage)
                    if row + TILE < num_rows:
                        self._gather(gQ, sKQ[None, None, next_stage], sPlace, row + TILE, num_rows)
                        self._gather(gdO, sVdO[None, None, next_stage], sPlace, row + TILE, num_rows)
                        place = next_place
                        lse, delta = self._statistics(gLse, gDelta, place, row + TILE + mine, num_rows)
                        next_place = self._place(gPlaces, row + 2 * TILE + mine, num_rows)
                    cute.arch.cp_async_commit_group()
                    self._multiply(
                        S, dP, dK, dV, sKQ, sVdO, sScores, stage, sLse, sDelta, sSeen, sTo, as_vectors(gdQ), scale
                    )

            keys = cutlass.min(end - first_key, TILE)
            dK.store(dK.load() * scale)
            if segment < cut:
                of_unit = (unit * TILE, 0)
                self._write(dK, cute.domain_offset(of_unit, mdKParts[batch, kv_head, segment, None, None]), TILE, False)
                self._write(dV, cute.domain_offset(of_unit, mdVParts[batch, kv_head, segment, None, None]), TILE, False)
            elif num_rows > 0:
                self._write(dK, cute.domain_offset((first_key, 0), mdK[batch, None, kv_head, None]), keys, True)
                self._write(dV, cute.domain_offset((first_key, 0), mdV[batch, None, kv_head, None]), keys, True)

    # How products are made

    def _allocate(self, smem: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Stages of rows and behind them keys; the same of dO and values; P and dS."""
        layouts = [
            smem_tiles(self.dtype, TILE, *of) for of in ((self.dim, 1 + STAGES), (self.v_dim, 1 + STAGES), (TILE, 2))
        ]
        sKQ, sVdO, sScores = (smem.allocate_tensor(self.dtype, layout, SMEM_ALIGNMENT) for layout in layouts)
        return sKQ, sVdO, sScores

    def _sums(self, columns: int) -> cute.Tensor:
        return accumulator(make_warp_mma(self.dtype, PAIR), (TILE, columns // PAIR))

    def _numbers(self, acc: cute.Tensor) -> cute.Tensor:
        """As of `warp_tiles.numbers`."""
        return acc_mn_view(acc)

    def _publish(self) -> None:
        """Before a barrier: what this thread wrote to shared memory is for products."""

    def _start(self, sKQ: cute.Tensor, sVdO: cute.Tensor, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers for S and dP; their products may start."""
        mma = make_warp_mma(self.dtype, PAIR)
        return accumulator(mma, (TILE, TILE // PAIR)), accumulator(mma, (TILE, TILE // PAIR))

    @cute.jit
    def _multiply(
        self,
        acc: cute.Tensor,  # of _start
        acc_dp: cute.Tensor,
        dK: cute.Tensor,
        dV: cute.Tensor,
        sKQ: cute.Tensor,
        sVdO: cute.Tensor,
        sScores: cute.Tensor,
        stage: Int32,
        sLse: cute.Tensor,
        sDelta: cute.Tensor,
        sSeen: cute.Tensor,
        sTo: cute.Tensor,
        gdQ: cute.Tensor,  # as of `as_vectors`
        scale: Float32,
    ):
        """All products of a tile of rows: dK and dV grow, dQ is written."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mine, pair, rows_of_pair = thread % (PAIR * LANES), warp_index // PAIR, warp_index % PAIR
        mma = make_warp_mma(self.dtype, PAIR)
        sQ, sdO = sKQ[None, None, stage], sVdO[None, None, stage]
        sK, sV = sKQ[None, None, STAGES], sVdO[None, None, STAGES]
        sP, sdS = sScores[None, None, 0], sScores[None, None, 1]
        to = self._rows_to(sTo)

        columns = TILE // PAIR
        acc.fill(0.0)
        acc_dp.fill(0.0)
        first = pair * (columns // MMA_K)
        gemm_smem(mma, mine, acc, sQ, sK, first)
        gemm_smem(mma, mine, acc_dp, sdO, sV, first)
        S, dP = acc_mn_view(acc), acc_mn_view(acc_dp)
        # Tokens ascend: if the first one sees all keys, all see them
        masked = sSeen[0] < TILE - 1
        for m in range_constexpr(cute.size(S, mode=[2])):
            for r in range_constexpr(2):
                place = (m * PAIR + rows_of_pair) * MMA_K + r * 8 + lane // QUAD
                lse, delta = sLse[place], sDelta[place]
                for n in range_constexpr(cute.size(S, mode=[3])):
                    for c in range_constexpr(2):
                        S[c, r, m, n] = probability(S[c, r, m, n], scale, lse)
                if masked:
                    seen = sSeen[place]
                    for n in range_constexpr(cute.size(S, mode=[3])):
                        for c in range_constexpr(2):
                            key = pair * columns + n * 8 + lane % QUAD * 2 + c
                            S[c, r, m, n] = S[c, r, m, n] if key <= seen else Float32(0.0)
                for n in range_constexpr(cute.size(S, mode=[3])):
                    for c in range_constexpr(2):
                        dP[c, r, m, n] = S[c, r, m, n] * (dP[c, r, m, n] - delta)
        store_acc(mma, mine, acc, sP, first)
        store_acc(mma, mine, acc_dp, sdS, first)
        cute.arch.sync_threads()

        first = pair * (self.v_dim // PAIR // MMA_K)
        gemm_smem(mma, mine, dV, transpose_view(sP), transpose_view(sdO), first, True, True)
        first = pair * (self.dim // PAIR // MMA_K)
        gemm_smem(mma, mine, dK, transpose_view(sdS), transpose_view(sQ), first, True, True)
        dQ = accumulator(mma, (TILE, self.dim // PAIR))
        dQ.fill(0.0)
        gemm_smem(mma, mine, dQ, sdS, transpose_view(sK), first, False, True)
        self._write_rows(dQ, cute.domain_offset((0, pair * (self.dim // PAIR // VECTOR)), gdQ), to, scale)

    # Rows

    @cute.jit
    def _place(self, gPlaces: cute.Tensor, row: Int32, num_rows: Int32) -> Int32:
        """The place of the row's token and slot, of the last row behind the end."""
        return gPlaces[Int32(Uint32(cutlass.min(row, num_rows - 1)) // self.group)]

    def _token(self, place: Int32) -> Int32:
        return Int32(Uint32(place) // self.slots)

    def _head(self, row: Int32) -> Int32:
        return Int32(Uint32(row) % self.group)

    @cute.jit
    def _gather(self, gX: cute.Tensor, sX: cute.Tensor, sPlace: cute.Tensor, first_row: Int32, num_rows: Int32):
        """Start copying a tile of rows, the last one in place of those behind the end."""
        row = lane_row(sX, THREADS)
        head = self._head(cutlass.min(first_row + row, num_rows - 1))
        start = Int32(cute.crd2idx((self._token(sPlace[row]), head, 0), gX.layout) // VECTOR)
        gather_tile(as_vectors(gX), sX, start, THREADS)

    @cute.jit
    def _statistics(
        self,
        gLse: cute.Tensor,  # [G, tokens]
        gDelta: cute.Tensor,
        place: Int32,
        row: Int32,
        num_rows: Int32,
    ) -> tuple[Float32, Float32]:
        """lse and delta of a row at its place, of the last one behind the end."""
        head, token = self._head(cutlass.min(row, num_rows - 1)), self._token(place)
        return gLse[head, token], gDelta[head, token]

    @cute.jit
    def _rows_to(self, sTo: cute.Tensor) -> Int32:
        """In lane i, where row i of a warp's rows of an accumulator goes."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return sTo[((lane // MMA_K * self.row_warps + warp_index % self.row_warps) * MMA_K + lane % MMA_K) % TILE]

    @cute.jit
    def _write_rows(self, acc: cute.Tensor, mX: cute.Tensor, to: Int32, scale: Float32):
        """Rows of dQ, scaled and rounded."""
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        rounded.store((acc.load() * scale).to(self.dtype))
        store_rows(self._numbers(rounded), mX, to)

    @cute.jit
    def _write(self, acc: cute.Tensor, mX: cute.Tensor, keys: Int32, add: cutlass.Constexpr[bool]):
        """dK or dV to fp32 [keys, columns], maybe added to what is there."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        X = self._numbers(acc)
        _, _, rows, pieces = X.shape
        rX, rBefore = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for m in range_constexpr(rows):
            for r in range_constexpr(2):
                key = (m * self.row_warps + warp_index % self.row_warps) * MMA_K + r * 8 + lane // QUAD
                if key < keys:
                    for n in range_constexpr(pieces):
                        place = (warp_index // self.row_warps * pieces + n) * QUAD + lane % QUAD
                        gX = cute.local_tile(mX[key, None], (2,), (place,))
                        for c in range_constexpr(2):
                            rX[c] = X[c, r, m, n]
                        if const_expr(add):
                            cute.autovec_copy(gX, rBefore)
                            rX.store(rX.load() + rBefore.load())
                        cute.autovec_copy(rX, gX)


class KVOuterBackwardWGMMA(KVOuterBackward):
    """By a warpgroup (WGMMA, sm_90a), transposed: S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left operands
    of dV and dK in registers. dS passes through shared memory for dQ only.
    """

    row_warps = THREADS // LANES

    def _allocate(self, smem: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        layouts = [hopper.swizzled_tiles(self.dtype, *of) for of in ((self.dim, 3), (self.v_dim, 3), (TILE, 1))]
        sKQ, sVdO, sScores = (hopper.allocate_tiles(smem, self.dtype, layout) for layout in layouts)
        return sKQ, sVdO, sScores

    def _sums(self, columns: int) -> cute.Tensor:
        return accumulator(self._mma(columns, hopper.REGISTERS, hopper.K, hopper.MN), (TILE, columns))

    def _numbers(self, acc: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, 1, cute.size(acc) // 4)))

    def _publish(self) -> None:
        cute.arch.fence_view_async_shared()

    def _mma(self, columns: int, source: Any, left: Any, right: Any) -> cute.TiledMma:
        return hopper.warpgroup_mma(self.dtype, columns, source, left, right)

    @cute.jit
    def _start(self, sKQ: cute.Tensor, sVdO: cute.Tensor, stage: Int32):
        mma = self._mma(TILE, hopper.SHARED, hopper.K, hopper.K)
        S, dP = accumulator(mma, (TILE, TILE)), accumulator(mma, (TILE, TILE))
        for acc, sX in ((S, sKQ), (dP, sVdO)):
            left = hopper.smem_operand_a(mma, sX)[None, None, None, STAGES]
            right = hopper.smem_operand_b(mma, sX)[None, None, None, stage]
            hopper.issue_mma(mma, acc, left, right, False)
        return S, dP

    @cute.jit
    def _multiply(
        self,
        S: cute.Tensor,
        dP: cute.Tensor,
        dK: cute.Tensor,
        dV: cute.Tensor,
        sKQ: cute.Tensor,
        sVdO: cute.Tensor,
        sScores: cute.Tensor,
        stage: Int32,
        sLse: cute.Tensor,
        sDelta: cute.Tensor,
        sSeen: cute.Tensor,
        sTo: cute.Tensor,
        gdQ: cute.Tensor,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        mma_s = self._mma(TILE, hopper.SHARED, hopper.K, hopper.K)
        mma_dk = self._mma(self.dim, hopper.REGISTERS, hopper.K, hopper.MN)
        mma_dv = self._mma(self.v_dim, hopper.REGISTERS, hopper.K, hopper.MN)
        mma_dq = self._mma(self.dim, hopper.SHARED, hopper.MN, hopper.MN)
        thr_s = mma_s.get_slice(thread)
        dKrQ = hopper.smem_operand_b(mma_dk, hopper.transpose_view(sKQ))[None, None, None, stage]
        dVrdO = hopper.smem_operand_b(mma_dv, hopper.transpose_view(sVdO))[None, None, None, stage]
        dQrdS = hopper.smem_operand_a(mma_dq, hopper.transpose_view(sScores))[None, None, None, 0]
        dQrK = hopper.smem_operand_b(mma_dq, hopper.transpose_view(sKQ))[None, None, None, STAGES]
        every_key = cute.make_layout((TILE, TILE), stride=(0, 1))
        of_rows = [thr_s.partition_C(cute.make_tensor(x.iterator, every_key)) for x in (sLse, sDelta, sSeen)]
        tSsLse, tSsDelta, tSsSeen = (x[(None, 0, None), 0, 0] for x in of_rows)
        tScS = thr_s.partition_C(cute.make_identity_tensor((TILE, TILE)))  # (key, row)
        to = self._rows_to(sTo)
        masked = sSeen[0] < TILE - 1  # tokens ascend

        rLse = hopper.broadcast_over_rows(tSsLse)
        warpgroup.wait_group(1)
        hopper.scores_to_probabilities(S, scale, rLse)
        if masked:
            for n, r, c in hopper.acc_coordinates(S):
                key, _ = tScS[(c, r, n), 0, 0]
                S[(c, r, n), 0, 0] = S[(c, r, n), 0, 0] if key <= tSsSeen[c, n] else Float32(0.0)
        hopper.issue_mma(mma_dv, dV, hopper.acc_as_operand_a(mma_dv, S), dVrdO, True)
        rDelta = hopper.broadcast_over_rows(tSsDelta)
        warpgroup.wait_group(1)
        hopper.score_gradients(S, S, dP, rDelta)
        rdS = hopper.acc_as_operand_a(mma_dk, S)
        hopper.stmatrix_tile(mma_s, cute.make_tensor(rdS.iterator, S.layout), sScores[None, None, 0], thread)
        self._publish()
        cute.arch.sync_threads()
        dQ = accumulator(mma_dq, (TILE, self.dim))
        hopper.issue_mma(mma_dq, dQ, dQrdS, dQrK, False)
        hopper.issue_mma(mma_dk, dK, rdS, dKrQ, True)
        warpgroup.wait_group(1)
        self._write_rows(dQ, gdQ, to, scale)
        warpgroup.wait_group(0)


class AddParts:
    """Adds the sums of the segments of cut blocks, in order. A CTA for each segment: its share of the block's numbers.

    Args: columns of a key, l'.
    """

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.size = dim, size

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # Worklist.counts
        mSums: cute.Tensor,  # Worklist.cum_counts
        mSegments: cute.Tensor,  # Worklist.work_tiles
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
        cut, _ = num_work_tiles(mSums[batch, head, None, None])
        if segment < cut:
            block = mSegments[batch, head, BLOCK, segment]
            segments = mCounts[batch, head, SPLITS, block]
            first = mSums[batch, head, SPLITS, block] - segments
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


@compiled_once
def _visit(
    dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
) -> Kernel:
    dim, v_dim = dims
    kernel = KVOuterBackwardWGMMA if warpgroups else KVOuterBackward
    return compile_kernel(
        kernel(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size),
        *[fake(dtype, None, None, None, columns) for columns in (dim, v_dim, dim, v_dim)],
        *[fake(torch.float32, None, None, None, aligned=False) for _ in range(2)],
        fake_query_rows(),
        *[fake_tiles() for _ in range(2)],
        fake(dtype, None, None, None, group, dim),
        *[fake(torch.float32, None, None, None, columns) for columns in dims],
        *[fake(torch.float32, None, None, None, size, columns) for columns in dims],
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@compiled_once
def _add_parts(dim: int, size: int, packed: bool) -> Kernel:
    return compile_kernel(
        AddParts(dim, size),
        *[fake_tiles() for _ in range(3)],
        fake(torch.float32, None, None, None, size, dim),
        fake(torch.float32, None, None, None, dim),
        fake_bounds() if packed else None,
    )


def kv_outer_backward(
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
    local: int = 0,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `kv_outer.kv_outer_forward`.

    Args:
        q, k, v, indices, size, scale, bounds: as there, all from the first token on.
        do: `[B,N,H,D_v]`, like q; finite.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Not finite: the row counts nothing.
        delta: fp32 `[B,H,N]`, likewise: what dP is reduced by, sum(do * o) without a gate. Ignored where lse is not
            finite.
        local: leave out the block of each token and those before it, so many in all, where they were chosen.
        into: dq, dk and dv to write, instead of new ones.

    Returns:
        dq, dk, dv. Rows without keys and keys without rows have zeros. Bitwise the same each time.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_attention(q, k, v, indices, size, scale, bounds=bounds)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    if do.shape != (batch, tokens, heads, v_dim) or do.dtype != q.dtype or not vectorized(do):
        expected = f"{q.dtype} {[batch, tokens, heads, v_dim]} with rows at multiples of 16 bytes"
        raise ValueError(f"do must be {expected}, got {do.dtype} {[*do.shape]}, strides {do.stride()}")
    for name, x in (("lse", lse), ("delta", delta)):
        if x.shape != (batch, heads, tokens) or x.dtype != torch.float32 or (x.numel() > 0 and x.stride(2) != 1):
            expected = f"fp32 {[batch, heads, tokens]}, its last dimension contiguous"
            raise ValueError(f"{name} must be {expected}, got {x.dtype} {[*x.shape]}, strides {x.stride()}")
    group, slots, units = heads // kv_heads, indices.shape[3], size // TILE
    results = into or (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    dq = results[0]
    sums: list[list[Tensor]] = []
    if q.numel() == 0 or slots == 0:
        for result in results:
            result.zero_()
        return results
    packed = bounds is not None
    visit = _visit((dim, v_dim), q.dtype, group, slots, size, packed, has_warpgroups(q.device)).run
    with SideStreams(q.device) as streams:
        for number, (worklist, batches, of) in enumerate(
            worklist_chunks(
                indices,
                size=size,
                min_rows=-(-MIN_TILE_ROWS // group),
                token_bytes=slots * units * group * dim * q.element_size(),
                max_bytes=PARTIAL_BYTES,
                bounds=bounds,
                local=local,
            )
        ):
            streams.begin()
            if number < STREAMS:
                sums.append([torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)])
            pairs, cut = worklist.query_rows.shape[:2], worklist.sizes.split_tiles
            parts = torch.empty((*pairs, worklist.sizes.rows * units, group, dim), dtype=q.dtype, device=q.device)
            cut_parts = [
                torch.empty((*pairs, max(cut, 1), size, columns), dtype=torch.float32, device=q.device)
                for columns in (dim, v_dim)
            ]
            queries = slice(of.start * group, of.stop * group)
            rows = worklist.tokens()
            mine = [x[batches, :, of] for x in sums[number % STREAMS]]
            given = [
                *[x[batches, rows, queries] for x in (q, do)],
                *[x[batches, :, of] for x in (k, v)],
                *[x[batches, queries, rows] for x in (lse, delta)],
            ]
            with streams.run(worklist, parts, cut_parts, given):
                tables = worklist.query_rows, worklist.work_tiles, worklist.cum_counts
                visit(*given, *tables, parts, *mine, *cut_parts, bounds, worklist.first_token, scale)
                if cut > 0:
                    for x, x_parts in zip(mine, cut_parts, strict=True):
                        run = _add_parts(x.shape[-1], size, packed).run
                        run(worklist.counts, worklist.cum_counts, worklist.work_tiles, x_parts, x, bounds)
                combine_partials(worklist, parts, dq[batches, rows, queries], partials_per_slot=units)
            del parts, cut_parts, given, worklist  # the stream holds them as long as it needs them
    for result, *of_streams in zip(results[1:], *sums, strict=True):
        if len(of_streams) > 1:
            torch.add(*of_streams, out=result)
        else:
            result.copy_(of_streams[0])
    return results
