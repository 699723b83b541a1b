"""Backward of attention to selected blocks on Hopper, in two kernels: no atomics, no dQ accumulator, deterministic.

    S_ij = scale q_i . k_j            P_ij = exp(S_ij - lse_i), 0 where i does not see j
    dP_ij = dO_i . v_j                dS_ij = P_ij (dP_ij - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

lse may be shifted (by the logarithm of a gate): P is what it makes it. Where lse is not finite, P = 0. Sums in fp32; P
and dS are rounded to 16 bits before they are multiplied, results once.

SelectedDQ    one CTA: 128 rows of a head, which walk over the blocks that their tile chose. Q and dO stay in registers
              as the left operands of S and dP; dS becomes the left operand of dQ without leaving registers.
SelectedDKV   one CTA: 64 keys of a key/value head, visited by each (head, tile) that chose them, 64 rows at a time.
              Transposed: S^T = K Q^T and dP^T = V dO^T, so P^T and dS^T are left operands in registers here too. Two
              warpgroups take turns with the rows and add their sums at the end.

In both one warp loads by TMA, which fills rows and keys behind the end with zeros, and two warpgroups multiply.

Visits of SelectedDKV: each block's list of (head, tile), one behind the other, is made from bits by CountVisits, a
cumulative sum and ListVisits. A block that many tiles chose (all may choose block 0) is cut into segments of at least
`Sizes.length` and less than twice as many visits; their sums go to fp32 memory and AddSegments adds them in order. The
segments of cut blocks come first: they are the longest. Then blocks ascend: causality gives the first ones most visits.

Sizes of grids, lists and memory follow from shapes: there are at most B*H*tiles*k visits, so many divided by the length
segments of cut blocks, and one segment for each other block. 4M tokens, 8 heads, 2 key/value heads, k=16: 2.1 million
visits, 8192 segments of at least 256 visits with 64 KiB each (WORKSPACE), 17 MB of lists.

Floor: 3 products here and 4 there of N k l' D 2 H FLOPs each. 128K tokens, 8 heads of 128, k=16, l'=64: 1.92 TFLOP,
3.2 ms at 600 TFLOP/s. Each visit of 64 rows to 64 keys reads Q and dO or K and V again, mostly from HBM when blocks are
chosen at random: 4.3 and 8.6 GB there, 3.1 ms at 4.2 TB/s, at the same time.

Limits: sm_90a (WGMMA); D = D_v 64 or 128; l' a multiple of 64, T of 128; B*H*tiles*k < 2^31; 64-bit offsets; dO finite
in all rows, also where lse is not; TMA: rows start at multiples of 16 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from torch import Tensor

from cute_kernels.lists.query_to_kv import WORD, BlockLists, fake_lists
from cute_kernels.lists.worklist import (
    BLOCK,
    COUNT,
    CUT,
    FIRST,
    VISITS,
    Sizes,
    used_segments,
    write_counts,
    write_segments,
)
from cute_kernels.mma.mma_sync import accumulator
from cute_kernels.mma.warp import LANES, lowest_bit, prefix_sum
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    SHARED,
    TILE,
    WARPGROUP_THREADS,
    K,
    acc_as_operand_a,
    acc_coordinates,
    allocate_tiles,
    broadcast_over_columns,
    broadcast_over_rows,
    issue_mma,
    load_operand_a,
    load_row_stats,
    make_tma_copies,
    producer_acquire,
    score_gradients,
    scores_to_probabilities,
    smem_operand_a,
    smem_operand_b,
    store_acc_for_tma,
    swizzled_tiles,
    tma_loads,
    tma_pipeline,
    tma_store,
    transpose_view,
    warpgroup_mma,
)
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake

CONSUMERS = 2
"""Warpgroups that multiply; one more loads."""

THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS
LOAD_REGISTERS, MATH_REGISTERS = 24, 240
STAGES = 4
WARPS = 4
"""Of a CTA that makes lists."""

ADD_THREADS = 256
SUMMED = 4
"""fp32 numbers of one vector."""
BATCH = 4
"""Vectors that a thread loads together."""

SEGMENT = 32
"""The fewest visits of a segment of a cut block."""

WORKSPACE = 512 << 20
"""Bytes for the sums of segments."""


def _of_item(item: Int32, kv_heads: Int32, mX: cute.Tensor) -> tuple[Int32, Int32, Int32]:
    """Batch, key/value head and block of keys of an item of the lists. Args: mX: [B, ...]."""
    return item // kv_heads % mX.shape[0], item % kv_heads, item // kv_heads // mX.shape[0]


class CountVisits:
    """How many (head of the group, query tile) visit each block of keys of a key/value head. A warp for each block."""

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, S, chosen blocks, words], see selected_backward
        mCounts: cute.Tensor,  # int32 [3, blocks], blocks ascending and for each all batches and key/value heads
        kv_heads: Int32,
        group: Int32,  # query heads of a key/value head
        segment: Int32,  # the fewest visits of a segment
        stream: Any,
    ):
        self.kernel(mBits, mCounts, kv_heads, group, segment).launch(
            grid=[cute.ceil_div(mCounts.shape[1], WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mBits: cute.Tensor, mCounts: cute.Tensor, kv_heads: Int32, group: Int32, segment: Int32):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        item = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if item < mCounts.shape[1]:
            batch, kv_head, block = _of_item(item, kv_heads, mBits)
            select_heads = mBits.shape[1] // kv_heads
            count = Int32(0)
            for i in cutlass.range(select_heads, unroll=1):
                for word in cutlass.range(lane, mBits.shape[3], LANES, unroll=4):
                    count += cute.arch.popc(mBits[batch, kv_head * select_heads + i, block, word])
            visits = cute.arch.warp_reduction_sum(count) * (group // select_heads)
            if lane == 0:
                write_counts(mCounts, item, visits, segment)


class ListVisits:
    """Which (head of the group, query tile) visit a block, in a fixed order, and its segments. A warp for each."""

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,  # int32 [B, S, chosen blocks, words]
        mCounts: cute.Tensor,  # int32 [3, blocks]
        mSums: cute.Tensor,  # the same, with those of all blocks before added
        mVisits: cute.Tensor,  # int32 [visits]: head of the group * tiles + tile
        mSegments: cute.Tensor,  # int32 [3, segments], those of cut blocks first
        kv_heads: Int32,
        group: Int32,
        tiles: Int32,
        stream: Any,
    ):
        self.kernel(mBits, mCounts, mSums, mVisits, mSegments, kv_heads, group, tiles).launch(
            grid=[cute.ceil_div(mCounts.shape[1], WARPS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBits: cute.Tensor,
        mCounts: cute.Tensor,
        mSums: cute.Tensor,
        mVisits: cute.Tensor,
        mSegments: cute.Tensor,
        kv_heads: Int32,
        group: Int32,
        tiles: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        item = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        blocks = mCounts.shape[1]
        if item < blocks:
            batch, kv_head, block = _of_item(item, kv_heads, mBits)
            select_heads, words = mBits.shape[1] // kv_heads, mBits.shape[3]
            shared = group // select_heads  # heads with the same choice
            visits = mCounts[VISITS, item]
            first = mSums[VISITS, item] - visits
            gVisits = cute.domain_offset((first,), mVisits)
            place = Int32(0)
            for i in cutlass.range(select_heads, unroll=1):
                for start in cutlass.range(0, words, LANES, unroll=1):
                    chosen = Int32(0)
                    if start + lane < words:
                        chosen = mBits[batch, kv_head * select_heads + i, block, start + lane]
                    count = cute.arch.popc(chosen)
                    sums = prefix_sum(count)
                    mine = place + sums - count
                    while chosen != 0:
                        tile = (start + lane) * WORD + lowest_bit(chosen)
                        for j in cutlass.range(shared, unroll=1):
                            gVisits[mine * shared + j] = (i * shared + j) * tiles + tile
                        chosen = chosen & (chosen - 1)
                        mine += 1
                    place += cute.arch.shuffle_sync(sums, LANES - 1)
            write_segments(mCounts, mSums, mSegments, item)


class SelectedDQ:
    """Args: head dim, 16-bit type, whether row i sees only keys j <= i, rows of a query tile."""

    def __init__(self, dim: int, dtype: Any, causal: bool, tile: int) -> None:
        self.dim, self.dtype, self.causal, self.tile = dim, dtype, causal, tile
        self.tile_bytes = TILE * dim * dtype.width // 8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N_k, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mMaskCount: cute.Tensor,  # BlockLists
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        mdQ: cute.Tensor,  # [B, N, H, D]
        scale: Float32,
        stream: Any,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        self.kernel(
            *make_tma_copies(load, self.dtype, self.dim, mQ, mdO, mK, mV),
            *make_tma_copies(store, self.dtype, self.dim, mdQ),
            mLse,
            mDelta,
            mMaskCount,
            mMaskIndex,
            mFullCount,
            mFullIndex,
            mQ.shape[1],
            mK.shape[1],
            mQ.shape[2] // mK.shape[2],
            scale,
            warpgroup_mma(self.dtype, TILE, REGISTERS, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, CONSUMERS),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], CONSUMERS * TILE), mQ.shape[2], mQ.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (N, D, H, B), coordinates for TMA
        tma_do: cute.CopyAtom,
        mdO: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_dq: cute.CopyAtom,
        mdQ: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor,
        mMaskCount: cute.Tensor,
        mMaskIndex: cute.Tensor,
        mFullCount: cute.Tensor,
        mFullIndex: cute.Tensor,
        num_rows: Int32,
        num_keys: Int32,
        group: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rows, head, batch = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = rows * (CONSUMERS * TILE) // self.tile

        smem = cutlass.memory.SmemAllocator()
        sQ = allocate_tiles(smem, self.dtype, row_layout)
        sdO = allocate_tiles(smem, self.dtype, row_layout)
        sK = allocate_tiles(smem, self.dtype, key_layout)
        sV = allocate_tiles(smem, self.dtype, key_layout)
        consumer_warps = CONSUMERS * WARPGROUP_THREADS // LANES
        rows_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        keys_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes)
        masks, fulls = mMaskCount[batch, head, tile], mFullCount[batch, head, tile]
        gMask, gFull = mMaskIndex[batch, head, tile, None], mFullIndex[batch, head, tile, None]

        if warp_index < WARPGROUP_THREADS // LANES:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_index == 0:
                load_rows = tma_loads((tma_q, sQ, mQ), (tma_do, sdO, mdO))
                load_keys = tma_loads((tma_k, sK, mK), (tma_v, sV, mV))
                barrier = producer_acquire(
                    rows_ready, pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
                )
                for i in range_constexpr(CONSUMERS):
                    load_rows((rows * CONSUMERS + i, head, batch), i, barrier)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
                kv_head = head // group
                for i in cutlass.range(masks + fulls, unroll=1):
                    block = Int32(0)
                    if i < masks:
                        block = gMask[i]
                    else:
                        block = gFull[i - masks]
                    load_keys((block, kv_head, batch), state.index, producer_acquire(keys_ready, state))
                    state.advance()
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            my_group = warp_index // (WARPGROUP_THREADS // LANES) - 1
            my_thread = thread % WARPGROUP_THREADS
            first_row = (rows * CONSUMERS + my_group) * TILE
            tScS = mma_s.get_slice(my_thread).partition_C(cute.make_identity_tensor((TILE, TILE)))
            tSrK, tdPrV, tdQrK = (
                smem_operand_b(mma_s, sK),
                smem_operand_b(mma_s, sV),
                smem_operand_b(mma_dq, transpose_view(sK)),
            )
            dQ = accumulator(mma_dq, (TILE, self.dim))
            dQ.fill(0.0)

            # Of the two rows of this thread; P = exp2(-inf) = 0 where there is no lse
            rLse, rDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for r in range_constexpr(2):
                rLse[r], rDelta[r] = load_row_stats(
                    mLse[batch, head, None], mDelta[batch, head, None], first_row + tScS[(0, r, 0), 0, 0][0], num_rows
                )

            ready = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            rows_ready.consumer_wait(ready)
            tSrQ, tdPrdO = (load_operand_a(mma_s, rows[None, None, my_group]) for rows in (sQ, sdO))

            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            for i in cutlass.range(masks + fulls, unroll=1):
                S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))
                masked = i < masks
                first_key = Int32(0)
                if masked:
                    first_key = gMask[i] * TILE
                keys_ready.consumer_wait(state)
                stage = state.index
                issue_mma(mma_s, S, tSrQ, tSrK[None, None, None, stage], False)
                issue_mma(mma_s, dP, tdPrdO, tdPrV[None, None, None, stage], False)
                warpgroup.wait_group(1)
                scores_to_probabilities(S, scale, broadcast_over_columns(rLse))
                if masked:
                    for n, r, c in acc_coordinates(S):
                        row, key = tScS[(c, r, n), 0, 0]
                        seen = first_key + key < num_keys
                        if const_expr(self.causal):
                            seen = seen & (first_key + key <= first_row + row)
                        S[(c, r, n), 0, 0] = S[(c, r, n), 0, 0] if seen else Float32(0.0)
                warpgroup.wait_group(0)
                score_gradients(S, S, dP, broadcast_over_columns(rDelta))
                issue_mma(mma_dq, dQ, acc_as_operand_a(mma_dq, S), tdQrK[None, None, None, stage], True)
                warpgroup.wait_group(0)
                keys_ready.consumer_release(state)
                state.advance()

            # dQ takes Q's place
            dQ.store(dQ.load() * scale)
            store_acc_for_tma(mma_dq, dQ, sQ[None, None, my_group], my_thread, 1 + my_group)
            if warp_index % (WARPGROUP_THREADS // LANES) == 0:
                tma_store((rows * CONSUMERS + my_group, head, batch), my_group, (tma_dq, sQ, mdQ))


class SelectedDKV:
    """Args: head dim, 16-bit type, whether row i sees only keys j <= i, keys of a block, rows of a query tile."""

    def __init__(self, dim: int, dtype: Any, causal: bool, size: int, tile: int) -> None:
        self.dim, self.dtype, self.causal, self.size, self.tile = dim, dtype, causal, size, tile
        self.units = size // TILE
        self.tile_bytes = TILE * dim * dtype.width // 8
        self.steps = tile // TILE  # of a visit

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N_k, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mSums: cute.Tensor,  # int32 [3, blocks], as ListVisits takes it
        mVisits: cute.Tensor,  # int32 [visits], as ListVisits makes it
        mSegments: cute.Tensor,  # int32 [3, segments], likewise
        mdK: cute.Tensor,  # [B, N_k, H_kv, D]
        mdV: cute.Tensor,
        mParts: cute.Tensor,  # fp32 [segments of cut blocks, units of a block, 2, TILE, D]
        scale: Float32,
        stream: Any,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        self.kernel(
            *make_tma_copies(load, self.dtype, self.dim, mQ, mdO, mK, mV),
            *make_tma_copies(store, self.dtype, self.dim, mdK, mdV),
            mLse,
            mDelta,
            mSums,
            mVisits,
            mSegments,
            mParts,
            mQ.shape[1],
            mK.shape[1],
            mK.shape[2],
            mQ.shape[2] // mK.shape[2],
            scale,
            warpgroup_mma(self.dtype, TILE, SHARED, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, 1),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        ).launch(
            grid=[mSegments.shape[1] * self.units, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (N, D, H, B), coordinates for TMA
        tma_do: cute.CopyAtom,
        mdO: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_dk: cute.CopyAtom,
        mdK: cute.Tensor,
        tma_dv: cute.CopyAtom,
        mdV: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor,
        mSums: cute.Tensor,
        mVisits: cute.Tensor,
        mSegments: cute.Tensor,
        mParts: cute.Tensor,
        num_rows: Int32,
        num_keys: Int32,
        kv_heads: Int32,
        group: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dkv: cute.TiledMma,
        key_layout: cute.ComposedLayout,
        row_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        segment, unit = item // self.units, item % self.units
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cut_segments, segments = used_segments(mSums)
        block, first, visits = Int32(0), Int32(0), Int32(0)
        if segment < segments:
            block, first, visits = mSegments[BLOCK, segment], mSegments[FIRST, segment], mSegments[COUNT, segment]
        batch, kv_head, keys = _of_item(block, kv_heads, mLse)
        place = keys * self.units + unit

        smem = cutlass.memory.SmemAllocator()
        sK = allocate_tiles(smem, self.dtype, key_layout)
        sV = allocate_tiles(smem, self.dtype, key_layout)
        sQ = allocate_tiles(smem, self.dtype, row_layout)
        sdO = allocate_tiles(smem, self.dtype, row_layout)
        sLse = smem.allocate_tensor(Float32, cute.make_layout((TILE, STAGES)), 16)
        sDelta = smem.allocate_tensor(Float32, cute.make_layout((TILE, STAGES)), 16)
        sRow = smem.allocate_tensor(Int32, cute.make_layout(STAGES), 16)

        if (segment < segments) & (place * TILE < num_keys):
            keys_ready = tma_pipeline(1, CONSUMERS * WARPGROUP_THREADS // LANES, 2 * self.tile_bytes, defer_sync=True)
            # A stage is full when TMA and TILE threads have written, and empty when one warpgroup has read it
            rows_ready = tma_pipeline(STAGES, WARPGROUP_THREADS // LANES, 2 * self.tile_bytes, writers=TILE)
            if warp_index < WARPGROUP_THREADS // LANES:
                cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
                gVisits = cute.domain_offset((first,), mVisits)
                tiles = cute.ceil_div(num_rows, self.tile)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
                if warp_index == 0:
                    load_rows = tma_loads((tma_q, sQ, mQ), (tma_do, sdO, mdO))
                    load_keys = tma_loads((tma_k, sK, mK), (tma_v, sV, mV))
                    start = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
                    load_keys((place, kv_head, batch), 0, producer_acquire(keys_ready, start))
                    for i in cutlass.range(visits, unroll=1):
                        visit = gVisits[i]
                        head, tile = kv_head * group + visit // tiles, visit % tiles
                        for step in cutlass.range(self.steps, unroll=1):
                            rows = tile * self.steps + step
                            load_rows((rows, head, batch), state.index, producer_acquire(rows_ready, state))
                            state.advance()
                elif warp_index <= TILE // LANES:
                    row = thread - LANES  # of a tile in shared memory
                    rLse, rDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
                    for i in cutlass.range(visits, unroll=1):
                        visit = gVisits[i]
                        head, tile = kv_head * group + visit // tiles, visit % tiles
                        for step in cutlass.range(0, self.steps, 2, unroll=1):
                            first_row = tile * self.tile + step * TILE
                            for j in range_constexpr(2):
                                rLse[j], rDelta[j] = load_row_stats(
                                    mLse[batch, head, None],
                                    mDelta[batch, head, None],
                                    first_row + j * TILE + row,
                                    num_rows,
                                )
                            for j in range_constexpr(2):
                                stage = state.index
                                rows_ready.sync_object_empty.wait(stage, state.phase)
                                sLse[row, stage] = rLse[j]
                                sDelta[row, stage] = rDelta[j]
                                if row == 0:
                                    sRow[stage] = first_row + j * TILE
                                cute.arch.mbarrier_arrive(rows_ready.producer_get_barrier(state))
                                state.advance()
            else:
                cute.arch.setmaxregister_increase(MATH_REGISTERS)
                my_group = warp_index // (WARPGROUP_THREADS // LANES) - 1
                my_thread = thread % WARPGROUP_THREADS
                first_key = place * TILE
                thr_s, thr_dkv = mma_s.get_slice(my_thread), mma_dkv.get_slice(my_thread)
                tScS = thr_s.partition_C(cute.make_identity_tensor((TILE, TILE)))  # (key, row)
                tSrK, tdPrV = (smem_operand_a(mma_s, tiles)[None, None, None, 0] for tiles in (sK, sV))
                tSrQ, tdPrdO = smem_operand_b(mma_s, sQ), smem_operand_b(mma_s, sdO)
                tdKrQ, tdVrdO = (
                    smem_operand_b(mma_dkv, transpose_view(sQ)),
                    smem_operand_b(mma_dkv, transpose_view(sdO)),
                )
                dK, dV = accumulator(mma_dkv, (TILE, self.dim)), accumulator(mma_dkv, (TILE, self.dim))
                dK.fill(0.0)
                dV.fill(0.0)
                # ((c, r, n), 0, 0, stage): every key has the rows' numbers
                every_key = cute.make_layout((TILE, TILE, STAGES), stride=(0, 1, TILE))
                tSsLse = thr_s.partition_C(cute.make_tensor(sLse.iterator, every_key))
                tSsDelta = thr_s.partition_C(cute.make_tensor(sDelta.iterator, every_key))

                keys_ready.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
                state = pipeline.PipelineState(STAGES, Int32(0), my_group, Int32(0))
                for _ in cutlass.range(visits * (self.steps // CONSUMERS), unroll=1):
                    S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))
                    rows_ready.consumer_wait(state)
                    stage = state.index
                    issue_mma(mma_s, S, tSrK, tSrQ[None, None, None, stage], False)
                    issue_mma(mma_s, dP, tdPrV, tdPrdO[None, None, None, stage], False)
                    first_row = sRow[stage]
                    rLse = broadcast_over_rows(tSsLse[(None, 0, None), 0, 0, stage])
                    warpgroup.wait_group(1)
                    scores_to_probabilities(S, scale, rLse)
                    masked = (first_row + TILE > num_rows) | (first_key + TILE > num_keys)
                    if const_expr(self.causal):
                        masked = masked | (first_key + TILE - 1 > first_row)
                    if masked:
                        for n, r, c in acc_coordinates(S):
                            key, row = tScS[(c, r, n), 0, 0]
                            seen = (first_row + row < num_rows) & (first_key + key < num_keys)
                            if const_expr(self.causal):
                                seen = seen & (first_key + key <= first_row + row)
                            S[(c, r, n), 0, 0] = S[(c, r, n), 0, 0] if seen else Float32(0.0)
                    issue_mma(mma_dkv, dV, acc_as_operand_a(mma_dkv, S), tdVrdO[None, None, None, stage], True)
                    rDelta = broadcast_over_rows(tSsDelta[(None, 0, None), 0, 0, stage])
                    warpgroup.wait_group(1)
                    score_gradients(S, S, dP, rDelta)
                    issue_mma(mma_dkv, dK, acc_as_operand_a(mma_dkv, S), tdKrQ[None, None, None, stage], True)
                    warpgroup.wait_group(0)
                    rows_ready.consumer_release(state)
                    for _ in range_constexpr(CONSUMERS):
                        state.advance()

                # Stages are free: the first warpgroup takes all of dV, the second one all of dK
                cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP_THREADS)
                values = const_expr(TILE * self.dim // WARPGROUP_THREADS)
                exchanged = cute.make_layout(
                    (4, values // 4, WARPGROUP_THREADS, 2),
                    stride=(1, 4 * WARPGROUP_THREADS, 4, values * WARPGROUP_THREADS),
                )
                sSum = cute.make_tensor(cute.recast_ptr(sQ.iterator, dtype=Float32), exchanged)
                other = cute.make_rmem_tensor((4, values // 4), Float32)
                if my_group == 0:
                    cute.autovec_copy(cute.make_tensor(dK.iterator, other.layout), sSum[None, None, my_thread, 0])
                else:
                    cute.autovec_copy(cute.make_tensor(dV.iterator, other.layout), sSum[None, None, my_thread, 1])
                cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP_THREADS)
                if my_group == 0:
                    cute.autovec_copy(sSum[None, None, my_thread, 1], other)
                    dV.store(dV.load() + cute.make_tensor(other.iterator, dV.layout).load())
                else:
                    cute.autovec_copy(sSum[None, None, my_thread, 0], other)
                    dK.store(dK.load() + cute.make_tensor(other.iterator, dK.layout).load())

                if segment < cut_segments:
                    if my_group == 0:
                        cute.autovec_copy(dV, thr_dkv.partition_C(mParts[segment, unit, 1, None, None]))
                    else:
                        cute.autovec_copy(dK, thr_dkv.partition_C(mParts[segment, unit, 0, None, None]))
                elif my_group == 0:
                    store_acc_for_tma(mma_dkv, dV, sV[None, None, 0], my_thread, 2)
                    if warp_index % (WARPGROUP_THREADS // LANES) == 0:
                        tma_store((place, kv_head, batch), 0, (tma_dv, sV, mdV))
                else:
                    dK.store(dK.load() * scale)
                    store_acc_for_tma(mma_dkv, dK, sK[None, None, 0], my_thread, 3)
                    if warp_index % (WARPGROUP_THREADS // LANES) == 0:
                        tma_store((place, kv_head, batch), 0, (tma_dk, sK, mdK))


class AddSegments:
    """Adds the sums of the segments of cut blocks, in order. A CTA for each segment: its share of the block's numbers.

    Args: head dim, keys of a chosen block.
    """

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.units = dim, size // TILE

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # int32 [3, blocks]
        mSums: cute.Tensor,
        mSegments: cute.Tensor,  # int32 [3, segments]
        mParts: cute.Tensor,  # fp32 [segments of cut blocks, units of a block, 2, TILE, D]
        mdK: cute.Tensor,  # [B, N_k, H_kv, D]
        mdV: cute.Tensor,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(mCounts, mSums, mSegments, mParts, mdK, mdV, scale).launch(
            grid=[mParts.shape[0], 1, 1], block=[ADD_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCounts: cute.Tensor,
        mSums: cute.Tensor,
        mSegments: cute.Tensor,
        mParts: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        segment, _, _ = cute.arch.block_idx()
        cut_segments, _ = used_segments(mSums)
        if segment < cut_segments:
            item = mSegments[BLOCK, segment]
            segments = mCounts[CUT, item]
            first = mSums[CUT, item] - segments
            num_keys, kv_heads = mdK.shape[1], mdK.shape[2]
            batch, kv_head, block = _of_item(item, kv_heads, mdK)
            vectors = const_expr(self.units * 2 * TILE * self.dim // SUMMED)
            rSum = cute.make_rmem_tensor(SUMMED, Float32)
            rPart = cute.make_rmem_tensor((SUMMED, BATCH), Float32)
            rOut = cute.make_rmem_tensor(SUMMED, mdK.element_type)
            share = segment - first
            end = (share + 1) * vectors // segments
            for vector in cutlass.range(share * vectors // segments + thread, end, ADD_THREADS, unroll=1):
                column, row = vector % (self.dim // SUMMED), vector // (self.dim // SUMMED)
                unit, which, key = row // (2 * TILE), row // TILE % 2, row % TILE
                token = block * (self.units * TILE) + unit * TILE + key
                if token < num_keys:  # units behind the last key have no sums
                    rSum.fill(0.0)
                    for start in cutlass.range(0, segments, BATCH, unroll=1):
                        for i in range_constexpr(BATCH):
                            rPart[None, i].fill(0.0)
                            if start + i < segments:
                                gPart = mParts[first + start + i, unit, which, key, None]
                                cute.autovec_copy(cute.local_tile(gPart, (SUMMED,), (column,)), rPart[None, i])
                        for i in range_constexpr(BATCH):
                            rSum.store(rSum.load() + rPart[None, i].load())
                    if which == 0:
                        rOut.store((rSum.load() * scale).to(mdK.element_type))
                        gOut = cute.local_tile(mdK[batch, token, kv_head, None], (SUMMED,), (column,))
                        cute.autovec_copy(rOut, gOut)
                    else:
                        rOut.store(rSum.load().to(mdK.element_type))
                        gOut = cute.local_tile(mdV[batch, token, kv_head, None], (SUMMED,), (column,))
                        cute.autovec_copy(rOut, gOut)


@compiled_once
def _dq(dim: int, dtype: torch.dtype, causal: bool, tile: int) -> Kernel:
    rows = [fake(dtype, None, None, None, dim) for _ in range(4)]
    statistics = [fake(torch.float32, None, None, None, aligned=False) for _ in range(2)]
    return compile_kernel(
        SelectedDQ(dim, CUTE_DTYPES[dtype], causal, tile),
        *rows,
        *statistics,
        *fake_lists(),
        fake(dtype, None, None, None, dim),
        Float32(0.0),
    )


@compiled_once
def _dkv(dim: int, dtype: torch.dtype, causal: bool, size: int, tile: int) -> Kernel:
    rows = [fake(dtype, None, None, None, dim) for _ in range(4)]
    statistics = [fake(torch.float32, None, None, None, aligned=False) for _ in range(2)]
    return compile_kernel(
        SelectedDKV(dim, CUTE_DTYPES[dtype], causal, size, tile),
        *rows,
        *statistics,
        _fake_table(),
        fake(torch.int32, None, aligned=False),
        _fake_table(),
        *[fake(dtype, None, None, None, dim) for _ in range(2)],
        _fake_parts(dim, size),
        Float32(0.0),
    )


@compiled_once
def _count() -> Kernel:
    return compile_kernel(CountVisits(), _fake_bits(), _fake_table(), *[Int32(0)] * 3)


@compiled_once
def _list() -> Kernel:
    visits = fake(torch.int32, None, aligned=False)
    tables = [_fake_table() for _ in range(3)]
    return compile_kernel(ListVisits(), _fake_bits(), *tables[:2], visits, tables[2], *[Int32(0)] * 3)


@compiled_once
def _add(dim: int, dtype: torch.dtype, size: int) -> Kernel:
    tables = [_fake_table() for _ in range(3)]
    outputs = [fake(dtype, None, None, None, dim) for _ in range(2)]
    return compile_kernel(AddSegments(dim, size), *tables, _fake_parts(dim, size), *outputs, Float32(0.0))


def _fake_bits() -> Any:
    return fake(torch.int32, None, None, None, None, aligned=False)


def _fake_table() -> Any:
    return fake(torch.int32, 3, None, aligned=False)


def _fake_parts(dim: int, size: int) -> Any:
    return fake(torch.float32, None, size // TILE, 2, TILE, dim)


def sizes_of(visits: int, most: int, blocks: int, part_bytes: int) -> Sizes:
    """Args: visits of all blocks and at most of one; blocks; bytes of a segment's sums."""
    return Sizes.of(visits, most, blocks, max(SEGMENT, -(-visits * part_bytes // WORKSPACE)))


def selected_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    bits: Tensor,
    *,
    size: int,
    causal: bool,
    scale: float,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention to chosen blocks of keys.

    Args:
        q, do: `[B,N,H,D]`, bf16 or fp16, rows aligned (device.vectorizable); all of `do` must be finite.
        k, v: `[B,N_k,H_kv,D]`, likewise.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Not finite: the row has no keys.
        delta: fp32 `[B,H,N]`, likewise: what dP is reduced by, sum(do * o) without a gate. Ignored where lse is not
            finite.
        lists: from block_lists.chosen_lists, with `width` TILE and entries False: tiles of T = `lists.rows` rows.
        bits: int32 `[B,S,ceil(N_k/size),words]`: bit t % 32 of word t // 32 says whether tile t chose the block. S is
            H_kv or H. Words behind the last tile are 0.
        size: l', keys of a chosen block, a multiple of TILE.
        causal: row i sees keys j <= i only (documents: of the aligned buffers).
        scale: what q . k is multiplied by.
        dq, dk, dv: where to write, like q, k and v, rows aligned; None: new tensors.

    Returns:
        dq, dk, dv. Rows without keys and keys without rows have zeros.
    """
    dq, dk, dv = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        for x, out in ((q, dq), (k, dk), (v, dv))
    )
    if lists.width != TILE or size % TILE:
        raise ValueError(f"needs lists of {TILE} keys and whole units, got {lists.width} and {size}")
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    given = q, k, v, do, lse, delta, lists
    selected_dq(*given, causal=causal, scale=scale, dq=dq)
    selected_dkv(*given, bits, size=size, causal=causal, scale=scale, dk=dk, dv=dv)
    return dq, dk, dv


def selected_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    *,
    causal: bool,
    scale: float,
    dq: Tensor,
) -> None:
    """The queries' half of `selected_backward`, for at least one row and one key."""
    run = _dq(q.shape[-1], q.dtype, causal, lists.rows).run
    run(q, do, k, v, lse, delta, *lists.tensors, dq, scale)


def selected_dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    bits: Tensor,
    *,
    size: int,
    causal: bool,
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """The keys' half of `selected_backward`, for at least one row and one key."""
    batch, rows, heads, dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    tile, group, units = lists.rows, heads // kv_heads, size // TILE
    tiles, blocks, part = -(-rows // tile), batch * kv_heads * -(-num_keys // size), (units, 2, TILE, dim)
    chosen = -(-lists.mask_index.shape[3] // units)  # lists have room for every block that a tile chose
    sizes = sizes_of(batch * heads * tiles * chosen, group * tiles, blocks, 4 * math.prod(part))

    def table(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=q.device)

    counts, visits, segments = table(3, blocks), table(sizes.visits), table(3, sizes.segments)
    _count().run(bits, counts, kv_heads, group, sizes.length)
    sums = counts.cumsum(1, dtype=torch.int32)
    _list().run(bits, counts, sums, visits, segments, kv_heads, group, tiles)
    parts = torch.empty((max(sizes.cut, 1), *part), dtype=torch.float32, device=q.device)
    run = _dkv(dim, q.dtype, causal, size, tile).run
    run(q, do, k, v, lse, delta, sums, visits, segments, dk, dv, parts, scale)
    if sizes.cut > 0:
        _add(dim, q.dtype, size).run(counts, sums, segments, parts, dk, dv, scale)
