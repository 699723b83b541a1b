"""Backward of the window on Hopper, in two kernels, with the selected blocks that lie inside it: no atomics.

    S_ij = scale q_i . k_j      i - left <= j <= i      near: also j >= (i // l' - local + 1) l'
    P_ij = exp(S_ij - lse_i) + near exp(S_ij - near_lse_i)
    dS_ij = exp(S_ij - lse_i) (dP_ij - delta_i) + near exp(S_ij - near_lse_i) (dP_ij - near_delta_i)
    dP_ij = dO_i . v_j      dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

A token always selects the `local` blocks of l' keys that end with its own, and its window sees them too. Where both
branches have the same keys and values and weigh the same dO, their S and dP are the same numbers, so here a second
exponential is all that the selected branch costs there. lse and delta are those of selected_backward.py: lse may be
shifted, P = 0 where it is not finite.

WindowDQ      one CTA: 128 rows of a head, which walk over their keys, 64 at a time. Q and dO stay in registers.
WindowDKV     one CTA: 128 keys of a key/value head, and the rows of all heads of the group that see them, 64 at a time.
              Transposed: S^T = K Q^T and dP^T = V dO^T, so P^T and dS^T are left operands in registers.

In both one warp loads by TMA, which fills rows and keys behind the end with zeros, and two warpgroups multiply; each
has 64 of the rows or keys, and passes over what these do not see. Results are rounded once.

Floor: 3 products here and 4 there of H N w 2 D FLOPs each, w = left + 1, for which (w + 128) / w as many are done. 64K
tokens, 64 heads of 128, w = 512: 3.9 TFLOP, 6.4 ms at 600 TFLOP/s; done are 4.8, 8 ms.

Limits: sm_90a (WGMMA); D = D_v 64 or 128; causal, as many keys as rows; near: l' a multiple of 64, local l' <= w; dO
finite in all rows; TMA: rows start at multiples of 16 bytes; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from torch import Tensor

from cute_kernels.attend.selected_backward import CONSUMERS, LOAD_REGISTERS, MATH_REGISTERS, STAGES, THREADS
from cute_kernels.mma.mma_sync import accumulator
from cute_kernels.mma.warp import LANES, probability
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

ROWS = CONSUMERS * TILE
"""Rows, or keys, of a CTA."""


@cute.jit
def _seen(score: Float32, before: Int32, left: Int32) -> Float32:
    """-inf unless the row, `before` places behind the key, sees it."""
    return score if (before >= 0) & (before <= left) else -Float32.inf


@cute.jit
def _both(score: Float32, dp: Float32, scale: Float32, lse: Any, delta: Any) -> tuple[Float32, Float32]:
    """P and dS of a pair that both branches see, of which each has an `lse`, in base 2, and a `delta`."""
    window, near = probability(score, scale, lse[0]), probability(score, scale, lse[1])
    return window + near, cute.math.fma(window, dp - delta[0], near * (dp - delta[1]))


class WindowDQ:
    """Args: head dim, 16-bit type, whether selected blocks are near."""

    def __init__(self, dim: int, dtype: Any, near: bool) -> None:
        self.dim, self.dtype, self.near = dim, dtype, near
        self.tile_bytes = TILE * dim * dtype.width // 8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mNearLse: cute.Tensor | None,
        mNearDelta: cute.Tensor | None,
        mdQ: cute.Tensor,  # [B, N, H, D]
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        stream: Any,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        self.kernel(
            *make_tma_copies(load, self.dtype, self.dim, mQ, mdO, mK, mV),
            *make_tma_copies(store, self.dtype, self.dim, mdQ),
            mLse,
            mDelta,
            mNearLse,
            mNearDelta,
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            left,
            size,
            local,
            scale,
            warpgroup_mma(self.dtype, TILE, REGISTERS, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, CONSUMERS),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], ROWS), mQ.shape[2], mQ.shape[0]],
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
        mNearLse: cute.Tensor | None,
        mNearDelta: cute.Tensor | None,
        num_rows: Int32,
        group: Int32,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rows, head, batch = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_block = cutlass.max(rows * ROWS - left, 0) // TILE
        blocks = cutlass.min(rows * ROWS + ROWS, num_rows + TILE - 1) // TILE - first_block

        smem = cutlass.memory.SmemAllocator()
        sQ = allocate_tiles(smem, self.dtype, row_layout)
        sdO = allocate_tiles(smem, self.dtype, row_layout)
        sK = allocate_tiles(smem, self.dtype, key_layout)
        sV = allocate_tiles(smem, self.dtype, key_layout)
        consumer_warps = CONSUMERS * WARPGROUP_THREADS // LANES
        rows_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        keys_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes)

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
                for i in cutlass.range(blocks, unroll=1):
                    load_keys((first_block + i, kv_head, batch), state.index, producer_acquire(keys_ready, state))
                    state.advance()
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            my_group = warp_index // (WARPGROUP_THREADS // LANES) - 1
            my_thread = thread % WARPGROUP_THREADS
            first_row = (rows * CONSUMERS + my_group) * TILE
            first_near = (first_row // size - local + 1) * size  # may be below 0
            tScS = mma_s.get_slice(my_thread).partition_C(cute.make_identity_tensor((TILE, TILE)))
            tSrK, tdPrV, tdQrK = (
                smem_operand_b(mma_s, sK),
                smem_operand_b(mma_s, sV),
                smem_operand_b(mma_dq, transpose_view(sK)),
            )
            dQ = accumulator(mma_dq, (TILE, self.dim))
            dQ.fill(0.0)

            # Of the two rows of this thread, and of two branches; P = exp2(-inf) = 0 where there is no lse
            rLse, rDelta = cute.make_rmem_tensor((2, 2), Float32), cute.make_rmem_tensor((2, 2), Float32)
            branches = ((mLse, mDelta), (mNearLse, mNearDelta))
            for r in range_constexpr(2):
                row = first_row + tScS[(0, r, 0), 0, 0][0]
                for b in range_constexpr(1 + self.near):
                    lse, delta = branches[b]
                    rLse[r, b], rDelta[r, b] = load_row_stats(
                        lse[batch, head, None], delta[batch, head, None], row, num_rows
                    )

            ready = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            rows_ready.consumer_wait(ready)
            tSrQ, tdPrdO = (load_operand_a(mma_s, rows[None, None, my_group]) for rows in (sQ, sdO))

            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            for i in cutlass.range(blocks, unroll=1):
                S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))
                first_key, stage = (first_block + i) * TILE, state.index
                keys_ready.consumer_wait(state)
                if (first_key <= first_row) & (first_key + TILE > first_row - left):
                    issue_mma(mma_s, S, tSrQ, tSrK[None, None, None, stage], False)
                    issue_mma(mma_s, dP, tdPrdO, tdPrV[None, None, None, stage], False)
                    warpgroup.wait_group(1)
                    if (first_key == first_row) | (first_key < first_row + TILE - 1 - left):
                        for n, r, c in acc_coordinates(S):
                            row, key = tScS[(c, r, n), 0, 0]
                            S[(c, r, n), 0, 0] = _seen(S[(c, r, n), 0, 0], first_row + row - (first_key + key), left)
                    near = Int32(0)
                    if const_expr(self.near):
                        near = Int32(1) if first_key >= first_near else Int32(0)
                    if near == 0:
                        scores_to_probabilities(S, scale, broadcast_over_columns(rLse[None, 0]))
                        warpgroup.wait_group(0)
                        score_gradients(S, S, dP, broadcast_over_columns(rDelta[None, 0]))
                    else:
                        warpgroup.wait_group(0)
                        for n, r, c in acc_coordinates(S):
                            _, S[(c, r, n), 0, 0] = _both(
                                S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0], scale, rLse[r, None], rDelta[r, None]
                            )
                    issue_mma(mma_dq, dQ, acc_as_operand_a(mma_dq, S), tdQrK[None, None, None, stage], True)
                    warpgroup.wait_group(0)
                keys_ready.consumer_release(state)
                state.advance()

            # dQ takes Q's place
            dQ.store(dQ.load() * scale)
            store_acc_for_tma(mma_dq, dQ, sQ[None, None, my_group], my_thread, 1 + my_group)
            if warp_index % (WARPGROUP_THREADS // LANES) == 0:
                tma_store((rows * CONSUMERS + my_group, head, batch), my_group, (tma_dq, sQ, mdQ))


class WindowDKV:
    """Args: head dim, 16-bit type, whether selected blocks are near."""

    def __init__(self, dim: int, dtype: Any, near: bool) -> None:
        self.dim, self.dtype, self.near = dim, dtype, near
        self.tile_bytes = TILE * dim * dtype.width // 8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mNearLse: cute.Tensor | None,
        mNearDelta: cute.Tensor | None,
        mdK: cute.Tensor,  # [B, N, H_kv, D]
        mdV: cute.Tensor,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        stream: Any,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        self.kernel(
            *make_tma_copies(load, self.dtype, self.dim, mQ, mdO, mK, mV),
            *make_tma_copies(store, self.dtype, self.dim, mdK, mdV),
            mLse,
            mDelta,
            mNearLse,
            mNearDelta,
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            left,
            size,
            local,
            scale,
            warpgroup_mma(self.dtype, TILE, SHARED, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, CONSUMERS),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        ).launch(
            grid=[cute.ceil_div(mK.shape[1], ROWS), mK.shape[2], mK.shape[0]],
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
        mNearLse: cute.Tensor | None,
        mNearDelta: cute.Tensor | None,
        num_rows: Int32,
        group: Int32,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dkv: cute.TiledMma,
        key_layout: cute.ComposedLayout,
        row_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        keys, kv_head, batch = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        branches = ((mLse, mDelta), (mNearLse, mNearDelta))
        # Tiles of rows that see the keys, the same of each head
        first_tile = keys * CONSUMERS
        last_tile = cutlass.min(keys * ROWS + ROWS - 1 + left, num_rows - 1) // TILE + 1

        smem = cutlass.memory.SmemAllocator()
        sK = allocate_tiles(smem, self.dtype, key_layout)
        sV = allocate_tiles(smem, self.dtype, key_layout)
        sQ = allocate_tiles(smem, self.dtype, row_layout)
        sdO = allocate_tiles(smem, self.dtype, row_layout)
        # Of each row, for both branches
        statistics = cute.make_layout((TILE, 2, STAGES))
        sLse, sDelta = (smem.allocate_tensor(Float32, statistics, 16) for _ in range(2))
        consumer_warps = CONSUMERS * WARPGROUP_THREADS // LANES
        keys_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        # A stage is full when TMA and TILE threads have written
        rows_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes, writers=TILE)
        if warp_index < WARPGROUP_THREADS // LANES:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            if warp_index == 0:
                load_rows = tma_loads((tma_q, sQ, mQ), (tma_do, sdO, mdO))
                load_keys = tma_loads((tma_k, sK, mK), (tma_v, sV, mV))
                barrier = producer_acquire(
                    keys_ready, pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
                )
                for i in range_constexpr(CONSUMERS):
                    load_keys((keys * CONSUMERS + i, kv_head, batch), i, barrier)
                for head in cutlass.range(kv_head * group, (kv_head + 1) * group, unroll=1):
                    for tile in cutlass.range(first_tile, last_tile, unroll=1):
                        load_rows((tile, head, batch), state.index, producer_acquire(rows_ready, state))
                        state.advance()
            elif warp_index <= TILE // LANES:
                row = thread - LANES  # of a tile
                rLse, rDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
                for head in cutlass.range(kv_head * group, (kv_head + 1) * group, unroll=1):
                    for tile in cutlass.range(first_tile, last_tile, unroll=1):
                        for b in range_constexpr(1 + self.near):
                            lse, delta = branches[b]
                            rLse[b], rDelta[b] = load_row_stats(
                                lse[batch, head, None], delta[batch, head, None], tile * TILE + row, num_rows
                            )
                        stage = state.index
                        rows_ready.sync_object_empty.wait(stage, state.phase)
                        for b in range_constexpr(1 + self.near):
                            sLse[row, b, stage], sDelta[row, b, stage] = rLse[b], rDelta[b]
                        cute.arch.mbarrier_arrive(rows_ready.producer_get_barrier(state))
                        state.advance()
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            my_group = warp_index // (WARPGROUP_THREADS // LANES) - 1
            my_thread = thread % WARPGROUP_THREADS
            place = keys * CONSUMERS + my_group
            first_key = place * TILE
            thr_s = mma_s.get_slice(my_thread)
            tScS = thr_s.partition_C(cute.make_identity_tensor((TILE, TILE)))  # (key, row)
            tSrK, tdPrV = (smem_operand_a(mma_s, tiles)[None, None, None, my_group] for tiles in (sK, sV))
            tSrQ, tdPrdO = smem_operand_b(mma_s, sQ), smem_operand_b(mma_s, sdO)
            tdKrQ, tdVrdO = smem_operand_b(mma_dkv, transpose_view(sQ)), smem_operand_b(mma_dkv, transpose_view(sdO))
            dK, dV = accumulator(mma_dkv, (TILE, self.dim)), accumulator(mma_dkv, (TILE, self.dim))
            dK.fill(0.0)
            dV.fill(0.0)

            # ((c, r, n), 0, 0, stage) of each branch: every key has the rows' numbers
            every_key = cute.make_layout((TILE, TILE, STAGES), stride=(0, 1, 2 * TILE))
            tSsLse, tSsDelta = (
                [thr_s.partition_C(cute.make_tensor(x.iterator + b * TILE, every_key)) for b in range(2)]
                for x in (sLse, sDelta)
            )

            keys_ready.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            end_near = (first_key // size + local) * size  # of the rows to which the keys are near
            for _ in cutlass.range(group, unroll=1):
                for tile in cutlass.range(first_tile, last_tile, unroll=1):
                    S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))
                    first_row, stage = tile * TILE, state.index
                    rows_ready.consumer_wait(state)
                    if (first_row >= first_key) & (first_row - left < first_key + TILE):
                        issue_mma(mma_s, S, tSrK, tSrQ[None, None, None, stage], False)
                        issue_mma(mma_s, dP, tdPrV, tdPrdO[None, None, None, stage], False)
                        warpgroup.wait_group(1)
                        if (first_key == first_row) | (first_key < first_row + TILE - 1 - left):
                            for n, r, c in acc_coordinates(S):
                                key, row = tScS[(c, r, n), 0, 0]
                                S[(c, r, n), 0, 0] = _seen(
                                    S[(c, r, n), 0, 0], first_row + row - (first_key + key), left
                                )
                        near = Int32(0)
                        if const_expr(self.near):
                            near = Int32(1) if first_row < end_near else Int32(0)
                        # S becomes P, dP becomes dS
                        if near == 0:
                            rLse = broadcast_over_rows(tSsLse[0][(None, 0, None), 0, 0, stage])
                            scores_to_probabilities(S, scale, rLse)
                            rDelta = broadcast_over_rows(tSsDelta[0][(None, 0, None), 0, 0, stage])
                            warpgroup.wait_group(0)
                            score_gradients(dP, S, dP, rDelta)
                        else:
                            warpgroup.wait_group(0)
                            for n, r, c in acc_coordinates(S):
                                lse, delta = (
                                    [x[b][(c, 0, n), 0, 0, stage] for b in range(2)] for x in (tSsLse, tSsDelta)
                                )
                                S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0] = _both(
                                    S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0], scale, lse, delta
                                )
                        issue_mma(mma_dkv, dV, acc_as_operand_a(mma_dkv, S), tdVrdO[None, None, None, stage], True)
                        issue_mma(mma_dkv, dK, acc_as_operand_a(mma_dkv, dP), tdKrQ[None, None, None, stage], True)
                        warpgroup.wait_group(0)
                    rows_ready.consumer_release(state)
                    state.advance()

            # Each takes the place of its own keys and values, which no one reads any more
            dK.store(dK.load() * scale)
            store_acc_for_tma(mma_dkv, dK, sK[None, None, my_group], my_thread, 1 + my_group)
            store_acc_for_tma(mma_dkv, dV, sV[None, None, my_group], my_thread, 1 + my_group)
            if warp_index % (WARPGROUP_THREADS // LANES) == 0:
                tma_store((place, kv_head, batch), my_group, (tma_dk, sK, mdK), (tma_dv, sV, mdV))


class LocalSelected(NamedTuple):
    """Another branch, with the same keys, that sees a token's own block and those before it, `local` in all."""

    lse: Tensor
    """fp32 `[B,H,N]`, like the window's."""
    delta: Tensor
    """Likewise."""
    size: int
    """l', a multiple of TILE."""
    local: int


@compiled_once
def _dq(dim: int, dtype: torch.dtype, near: bool) -> Kernel:
    rows = [fake(dtype, None, None, None, dim) for _ in range(4)]
    return compile_kernel(
        WindowDQ(dim, CUTE_DTYPES[dtype], near),
        *rows,
        *_fake_statistics(near),
        fake(dtype, None, None, None, dim),
        *[Int32(0)] * 3,
        Float32(0.0),
    )


@compiled_once
def _dkv(dim: int, dtype: torch.dtype, near: bool) -> Kernel:
    rows = [fake(dtype, None, None, None, dim) for _ in range(4)]
    return compile_kernel(
        WindowDKV(dim, CUTE_DTYPES[dtype], near),
        *rows,
        *_fake_statistics(near),
        *[fake(dtype, None, None, None, dim) for _ in range(2)],
        *[Int32(0)] * 3,
        Float32(0.0),
    )


def _fake_statistics(near: bool) -> list[Any]:
    """lse and delta of the window, and of what is near."""
    return [fake(torch.float32, None, None, None, aligned=False) if b < 2 or near else None for b in range(4)]


def window_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    left: int,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    near: LocalSelected | None = None,
) -> None:
    """Gradients of attention of each token to itself and the `left` tokens before it. Bitwise the same each time.

    Args:
        q, do: `[B,N,H,D]`, bf16 or fp16, rows aligned (device.vectorizable); all of `do` must be finite.
        k, v: `[B,N,H_kv,D]`, likewise.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Not finite: the row counts nothing.
        delta: fp32 `[B,H,N]`, likewise: what dP is reduced by, sum(do * o) without a gate.
        scale: what q . k is multiplied by.
        into: dq, dk and dv, like q, k and v, to write.
        near: add the gradients of this branch's attention to keys inside the window.
    """
    if near is not None and (near.size % TILE or not 0 < min(near.local * near.size, q.shape[1]) <= left + 1):
        raise ValueError(f"near blocks must be multiples of {TILE} keys and lie in the window, got {near[2:]}, {left=}")
    dq, dk, dv = into
    if q.numel() == 0:
        return
    statistics = lse, delta, *((None, None) if near is None else near[:2])
    sizes = left, *((TILE, 0) if near is None else near[2:]), scale
    how = q.shape[-1], q.dtype, near is not None
    _dq(*how).run(q, do, k, v, *statistics, dq, *sizes)
    _dkv(*how).run(q, do, k, v, *statistics, dk, dv, *sizes)
