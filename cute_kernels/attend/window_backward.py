"""Backward of the window on Hopper, in two kernels, with the selected blocks that are inside it: no atomics.

    S_ij = scale q_i . k_j      i - left <= j <= i      local selected blocks: also j >= (i // l' - local + 1) l'
    P_ij = exp(S_ij - lse_i) + [j local] exp(S_ij - local_lse_i)
    dS_ij = exp(S_ij - lse_i) (dP_ij - delta_i) + [j local] exp(S_ij - local_lse_i) (dP_ij - local_delta_i)
    dP_ij = dO_i . v_j      dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

In token mode a token always selects the `local` blocks of l' keys that end with its own, and its window sees them too.
If both branches have the same keys and values, and the same dO, then S and dP are the same in both. For these blocks
the selected branch costs a second exponential here instead of products of its own (LocalSelected). lse and delta are as
in selected_backward.py: lse may be shifted by a gate; P = 0 if it is not finite.

WindowDQ      a CTA owns 128 query rows of a head and iterates over their keys, 64 at a time.
WindowDKV     a CTA owns 128 keys of a key/value head and iterates over the rows that see them, of all heads of the
              group, 64 at a time.

Both are built on backward_tiles.py: roles of warps, shared memory, loads. Each consumer has 64 of the rows or keys, and
skips tiles that none of them attends to. Results are rounded once.

Floor: 3 products in WindowDQ and 4 in WindowDKV of H N w 2 D FLOPs each, w = left + 1; whole tiles need (w + 128) / w
times as many. 64K tokens, 64 heads of 128, w = 512: 3.9 TFLOP, 6.4 ms at 600 TFLOP/s; with whole tiles 4.8 TFLOP, 8 ms.

Limits: sm_90a (WGMMA); D = D_v 64 or 128; causal, keys up to the last row; local selected blocks: l' a multiple of 64,
local l' <= w; dO finite in every row; TMA: rows 16-byte aligned; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from cute_kernels.attend.backward_tiles import (
    CTA_ROWS,
    STAGES,
    STATS_BRANCHES,
    STATS_WARPS,
    BackwardDKV,
    BackwardDQ,
    KeyTileRange,
    SharedDKV,
    SharedDQ,
    Stats,
    TmaTile,
    WorkTile,
    token_of,
)
from cute_kernels.mma.mma_sync import accumulator
from cute_kernels.mma.warp import probability
from cute_kernels.mma.warp_specialized import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP_WARPS,
    Consumer,
    consumer_of,
    consumer_state,
)
from cute_kernels.mma.wgmma import (
    TILE,
    acc_as_operand_a,
    acc_coordinates,
    broadcast_over_columns,
    broadcast_over_rows,
    issue_mma,
    score_gradients,
    scores_to_probabilities,
    store_acc_for_tma,
    tma_store,
)
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads


class WindowMask(NamedTuple):
    """Sliding-window mask, and the part of it that is also selected."""

    left: Int32
    """Number of keys before its own that a row sees."""
    size: Int32
    """l', keys per local selected block."""
    local: Int32
    """Number of local selected blocks per row."""

    @cute.jit
    def mask(self, score: Float32, distance: Int32) -> Float32:
        """-inf unless the row, `distance` tokens after the key, sees it."""
        return score if (distance >= 0) & (distance <= self.left) else -Float32.inf

    def needs_mask(self, first_token: Int32, first_key: Int32) -> Any:
        """True if the tile of rows straddles an edge of the window within the tile of keys."""
        return (first_key == first_token) | (first_key < first_token + TILE - 1 - self.left)


@cute.jit
def _both_branches(score: Float32, dp: Float32, scale: Float32, lse: Any, delta: Any) -> tuple[Float32, Float32]:
    """P and dS of a pair seen by both window and selected branch. Args: lse (base 2) and delta of each branch."""
    window, selected = probability(score, scale, lse[0]), probability(score, scale, lse[1])
    return window + selected, cute.math.fma(window, dp - delta[0], selected * (dp - delta[1]))


class WindowDQ(BackwardDQ):
    """dQ of the window and of local selected blocks. Roles and pipelines: BackwardDQ.

    Args: dim: head dim. dtype: 16-bit type. has_local: there are local selected blocks.
    """

    def __init__(self, dim: int, dtype: Any, has_local: bool) -> None:
        super().__init__(dim, dtype)
        self.has_local = has_local

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, has_local: bool, continues: bool) -> Kernel:
        return compile_kernel(
            WindowDQ(dim, CUTE_DTYPES[dtype], has_local),
            *fake_heads(dtype, dim, dim, dim, dim),
            *_fake_stats(has_local),
            fake(dtype, None, None, None, dim),
            *[Int32(0)] * 3,
            Float32(0.0),
            Int32(0) if continues else None,
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mLocalLse: cute.Tensor | None,  # LocalSelected
        mLocalDelta: cute.Tensor | None,
        mdQ: cute.Tensor,  # [B, N, H, D]
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        first_token: Int32 | None,  # token index of row 0, a multiple of TILE (None = 0)
        stream: Any,
    ):
        self.kernel(
            *self.tma_copies((mQ, mdO, mK, mV), (mdQ,)),
            mLse,
            mDelta,
            mLocalLse,
            mLocalDelta,
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            left,
            size,
            local,
            scale,
            first_token,
            *self.operands(),
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], CTA_ROWS), mQ.shape[2], mQ.shape[0]],
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
        mLocalLse: cute.Tensor | None,
        mLocalDelta: cute.Tensor | None,
        num_rows: Int32,
        group: Int32,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        first_token: Int32 | None,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work = WorkTile(*cute.arch.block_idx())
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        key_tiles = self.key_tiles(work, num_rows, left, first_token)
        shared = self.allocate(row_layout, key_layout)

        if warp_index < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load(
                    ((tma_q, shared.sQ, mQ), (tma_do, shared.sdO, mdO)),
                    ((tma_k, shared.sK, mK), (tma_v, shared.sV, mV)),
                    shared,
                    work,
                    group,
                    key_tiles,
                )
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = consumer_of(thread, warp_index)
            branches = ((mLse, mDelta), (mLocalLse, mLocalDelta))[: 1 + self.has_local]
            window = WindowMask(left, size, local)
            dQ, _ = self.mma(
                shared, branches, key_tiles, window, num_rows, scale, first_token, mma_s, mma_dq, work, consumer
            )
            self.epilogue(mma_dq, dQ, tma_dq, mdQ, shared.sQ, scale, work, consumer)

    def key_tiles(self, work: WorkTile, num_rows: Int32, left: Int32, first_token: Int32 | None) -> KeyTileRange:
        """Key tiles that some row of the CTA sees."""
        first_tile = cutlass.max(token_of(work.tile * CTA_ROWS, first_token) - left, 0) // TILE
        stop_row = cutlass.min(work.tile * CTA_ROWS + CTA_ROWS, num_rows + TILE - 1)
        return KeyTileRange(first_tile, token_of(stop_row, first_token) // TILE - first_tile)

    @cute.jit
    def mma(
        self,
        shared: SharedDQ,
        branches: tuple[Stats, ...],
        key_tiles: KeyTileRange,
        window: WindowMask,
        num_rows: Int32,
        scale: Float32,
        first_token: Int32 | None,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
        work: WorkTile,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, Any]:
        """Consumer mainloop over the key tiles of the CTA.

        Returns:
            Unscaled dQ of the warpgroup's rows; the state of keys_ready.
        """
        keys_ready = shared.keys_ready
        first_row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        own_token = token_of(first_row, first_token)  # token index of the first row
        first_local = (own_token // window.size - window.local + 1) * window.size  # may be negative
        dQ = self.accumulator(mma_dq)  # fp32 [TILE rows, D]
        op = self.partition(mma_s, mma_dq, shared, branches, num_rows, work, consumer)

        state = consumer_state(STAGES)
        for i in cutlass.range(key_tiles.num_tiles(), unroll=1):
            S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))  # fp32 [TILE rows, TILE keys]
            first_key, stage = key_tiles.tile(i) * TILE, state.index
            keys_ready.consumer_wait(state)
            if (first_key <= own_token) & (first_key + TILE > own_token - window.left):
                # S = Q K^T, dP = dO V^T
                issue_mma(mma_s, S, op.tSrQ, op.tSrK[None, None, None, stage], False)
                issue_mma(mma_s, dP, op.tdPrdO, op.tdPrV[None, None, None, stage], False)
                warpgroup.wait_group(1)
                if window.needs_mask(own_token, first_key):
                    for n, r, c in acc_coordinates(S):
                        row, key = op.tScS[(c, r, n), 0, 0]
                        S[(c, r, n), 0, 0] = window.mask(S[(c, r, n), 0, 0], own_token + row - (first_key + key))
                local = Int32(0)
                if const_expr(self.has_local):
                    local = Int32(1) if first_key >= first_local else Int32(0)
                # S becomes P, then dS
                if local == 0:
                    scores_to_probabilities(S, scale, broadcast_over_columns(op.rLse[None, 0]))
                    warpgroup.wait_group(0)
                    score_gradients(S, S, dP, broadcast_over_columns(op.rDelta[None, 0]))
                else:
                    warpgroup.wait_group(0)
                    for n, r, c in acc_coordinates(S):
                        _, S[(c, r, n), 0, 0] = _both_branches(
                            S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0], scale, op.rLse[r, None], op.rDelta[r, None]
                        )
                # dQ += dS K  [TILE rows, D]
                issue_mma(mma_dq, dQ, acc_as_operand_a(mma_dq, S), op.tdQrK[None, None, None, stage], True)
                warpgroup.wait_group(0)
            keys_ready.consumer_release(state)
            state.advance()
        return dQ, state


class WindowDKV(BackwardDKV):
    """dK and dV of the window and of local selected blocks. Roles and pipelines: BackwardDKV; both consumers read every
    stage.

    Args: dim: head dim. dtype: 16-bit type. has_local: there are local selected blocks.
    """

    def __init__(self, dim: int, dtype: Any, has_local: bool) -> None:
        super().__init__(dim, dtype, key_tiles=CONSUMERS, branches=STATS_BRANCHES)
        self.has_local = has_local

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, has_local: bool, continues: bool) -> Kernel:
        return compile_kernel(
            WindowDKV(dim, CUTE_DTYPES[dtype], has_local),
            *fake_heads(dtype, dim, dim, dim, dim),
            *_fake_stats(has_local),
            *fake_heads(dtype, dim, dim),
            *[Int32(0)] * 3,
            Float32(0.0),
            Int32(0) if continues else None,
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mLocalLse: cute.Tensor | None,  # LocalSelected
        mLocalDelta: cute.Tensor | None,
        mdK: cute.Tensor,  # [B, N, H_kv, D]
        mdV: cute.Tensor,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        first_token: Int32 | None,  # token index of row 0, a multiple of TILE (None = 0)
        stream: Any,
    ):
        self.kernel(
            *self.tma_copies((mQ, mdO, mK, mV), (mdK, mdV)),
            mLse,
            mDelta,
            mLocalLse,
            mLocalDelta,
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            left,
            size,
            local,
            scale,
            first_token,
            *self.operands(),
        ).launch(
            grid=[cute.ceil_div(mK.shape[1], CTA_ROWS), mK.shape[2], mK.shape[0]],
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
        mLocalLse: cute.Tensor | None,
        mLocalDelta: cute.Tensor | None,
        num_rows: Int32,
        group: Int32,
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        first_token: Int32 | None,
        mma_s: cute.TiledMma,
        mma_dkv: cute.TiledMma,
        key_layout: cute.ComposedLayout,
        row_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work = WorkTile(*cute.arch.block_idx())
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_tile = work.tile * CONSUMERS
        stop_tile = (
            cutlass.min(work.tile * CTA_ROWS + CTA_ROWS - 1 + left, token_of(num_rows, first_token) - 1) // TILE + 1
        )
        if const_expr(first_token is not None):  # tiles of rows are counted from row 0
            skipped = first_token // TILE  # type: ignore[operator]
            first_tile, stop_tile = cutlass.max(first_tile - skipped, 0), stop_tile - skipped
        shared = self.allocate(SmemAllocator(), key_layout, row_layout)
        keys_ready, rows_ready = self.pipelines()

        if warp_index < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load_group(
                    ((tma_q, shared.sQ, mQ), (tma_do, shared.sdO, mdO)),
                    ((tma_k, shared.sK, mK), (tma_v, shared.sV, mV)),
                    keys_ready,
                    rows_ready,
                    first_tile,
                    stop_tile,
                    group,
                    work,
                )
            elif warp_index <= STATS_WARPS:
                branches = ((mLse, mDelta), (mLocalLse, mLocalDelta))[: 1 + self.has_local]
                self.load_group_stats(branches, shared, rows_ready, first_tile, stop_tile, group, num_rows, work)
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = consumer_of(thread, warp_index)
            window = WindowMask(left, size, local)
            dK, dV = self.mma(
                shared,
                keys_ready,
                rows_ready,
                first_tile,
                stop_tile,
                group,
                window,
                scale,
                first_token,
                mma_s,
                mma_dkv,
                work,
                consumer,
            )
            self.epilogue(dK, dV, (tma_dk, shared.sK, mdK), (tma_dv, shared.sV, mdV), scale, mma_dkv, work, consumer)

    @cute.jit
    def mma(
        self,
        shared: SharedDKV,
        keys_ready: Any,
        rows_ready: Any,
        first_tile: Int32,
        stop_tile: Int32,
        group: Int32,
        window: WindowMask,
        scale: Float32,
        first_token: Int32 | None,
        mma_s: cute.TiledMma,
        mma_dkv: cute.TiledMma,
        work: WorkTile,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Consumer mainloop over the row tiles. Returns the unscaled dK of the warpgroup's keys, and dV."""
        first_key = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        op = self.partition(mma_s, mma_dkv, shared, consumer.warpgroup, consumer)
        dK, dV = self.accumulators(mma_dkv)  # fp32 [TILE keys, D]
        keys_ready.consumer_wait(consumer_state(1))
        state = consumer_state(STAGES)
        stop_local = (first_key // window.size + window.local) * window.size  # end of the rows they are local to
        for _ in cutlass.range(group, unroll=1):
            for tile in cutlass.range(first_tile, stop_tile, unroll=1):
                # fp32 [TILE keys, TILE rows]
                S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))
                own_token, stage = token_of(tile * TILE, first_token), state.index  # token index of the first row
                rows_ready.consumer_wait(state)
                if (own_token >= first_key) & (own_token - window.left < first_key + TILE):
                    # S^T = K Q^T, dP^T = V dO^T
                    issue_mma(mma_s, S, op.tSrK, op.tSrQ[None, None, None, stage], False)
                    issue_mma(mma_s, dP, op.tdPrV, op.tdPrdO[None, None, None, stage], False)
                    warpgroup.wait_group(1)
                    if window.needs_mask(own_token, first_key):
                        for n, r, c in acc_coordinates(S):
                            key, row = op.tScS[(c, r, n), 0, 0]
                            S[(c, r, n), 0, 0] = window.mask(S[(c, r, n), 0, 0], own_token + row - (first_key + key))
                    local = Int32(0)
                    if const_expr(self.has_local):
                        local = Int32(1) if own_token < stop_local else Int32(0)
                    # S becomes P, dP becomes dS
                    if local == 0:
                        rLse = broadcast_over_rows(op.tSsLse[0][(None, 0, None), 0, 0, stage])  # (c, r, n)
                        scores_to_probabilities(S, scale, rLse)
                        rDelta = broadcast_over_rows(op.tSsDelta[0][(None, 0, None), 0, 0, stage])  # (c, r, n)
                        warpgroup.wait_group(0)
                        score_gradients(dP, S, dP, rDelta)
                    else:
                        warpgroup.wait_group(0)
                        for n, r, c in acc_coordinates(S):
                            lse, delta = (
                                [x[b][(c, 0, n), 0, 0, stage] for b in range(STATS_BRANCHES)]
                                for x in (op.tSsLse, op.tSsDelta)
                            )
                            S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0] = _both_branches(
                                S[(c, r, n), 0, 0], dP[(c, r, n), 0, 0], scale, lse, delta
                            )
                    # dV += P^T dO, dK += dS^T Q  [TILE keys, D]
                    issue_mma(mma_dkv, dV, acc_as_operand_a(mma_dkv, S), op.tdVrdO[None, None, None, stage], True)
                    issue_mma(mma_dkv, dK, acc_as_operand_a(mma_dkv, dP), op.tdKrQ[None, None, None, stage], True)
                    warpgroup.wait_group(0)
                rows_ready.consumer_release(state)
                state.advance()
        return dK, dV

    @cute.jit
    def epilogue(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        tma_dk: TmaTile,
        tma_dv: TmaTile,
        scale: Float32,
        mma_dkv: cute.TiledMma,
        work: WorkTile,
        consumer: Consumer,
    ):
        """Round dK and dV into the shared memory of K and V, read only by this warpgroup, then store them by TMA."""
        _, sK, _ = tma_dk
        _, sV, _ = tma_dv
        group = consumer.warpgroup
        dK.store(dK.load() * scale)
        # Named barrier 1 or 2, in store_acc_for_tma: the consumer has written its dK, then its dV, for TMA
        store_acc_for_tma(mma_dkv, dK, sK[None, None, group], consumer.thread, 1 + group)
        store_acc_for_tma(mma_dkv, dV, sV[None, None, group], consumer.thread, 1 + group)
        if consumer.warp % WARPGROUP_WARPS == 0:
            tma_store((work.tile * CONSUMERS + group, work.head, work.batch), group, tma_dk, tma_dv)


class LocalSelected(NamedTuple):
    """The selected branch on its local blocks, which window_backward differentiates together with the window.

    Row i sees keys (i // l' - local + 1) l' <= j <= i of this branch, with the statistics of the whole branch. Keys,
    values and dO must be those of the window.
    """

    lse: Tensor
    """fp32 `[B,H,N]`, like the window's."""
    delta: Tensor
    """fp32 `[B,H,N]`, like the window's."""
    size: int
    """l', keys per block, a multiple of TILE."""
    local: int
    """Number of blocks, including the row's own."""


def _fake_stats(has_local: bool) -> list[Any]:
    """lse and delta of the window, and of local selected blocks."""
    return [fake(torch.float32, None, None, None, aligned=False) if b < 2 or has_local else None for b in range(4)]


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
    into: tuple[Tensor | None, Tensor, Tensor],
    first_token: int = 0,
    local_selected: LocalSelected | None = None,
) -> None:
    """Gradients of attention of each token to itself and the `left` tokens before it. Bitwise reproducible.

    Args:
        q, do: `[B,N,H,D]`, bf16 or fp16, rows aligned (device.vectorizable); every row of `do` must be finite.
        k, v: `[B,N_k,H_kv,D]`, dtype and alignment as q; no token after the last row.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Shifted by -log(g) if a gate g weights the row.
            Rows whose lse is not finite contribute nothing.
        delta: fp32 `[B,H,N]`, last dimension contiguous: sum(do * o), with o before gating. Not read where lse is not
            finite.
        left: at least 0; the window has left + 1 tokens.
        scale: softmax scale.
        into: dq, dk and dv, like q, k and v, outputs; dq may be None if window_dq_combine.py computes it.
        first_token: token index of row 0, a multiple of TILE, if the rows continue a sequence: N_k - N.
        local_selected: add the gradients of the selected branch on its local blocks, which must be inside the window.

    Raises:
        ValueError: if local blocks are not multiples of TILE keys or exceed the window, or if first_token is not a
            multiple of TILE or not N_k - N.
    """
    local = local_selected
    if first_token % TILE or first_token != k.shape[1] - q.shape[1]:
        raise ValueError(f"first_token must be N_k - N and a multiple of {TILE}, got {first_token} and {[*k.shape]}")
    if local is not None and (local.size % TILE or not 0 < min(local.local * local.size, k.shape[1]) <= left + 1):
        raise ValueError(
            f"local blocks must be multiples of {TILE} keys and lie in the window, got {local[2:]}, {left=}"
        )
    dq, dk, dv = into
    if q.numel() == 0:
        for x in into:
            if x is not None:
                x.zero_()
        return
    stats = lse, delta, *((None, None) if local is None else local[:2])
    sizes = left, *((TILE, 0) if local is None else local[2:]), scale, first_token or None
    variant = q.shape[-1], q.dtype, local is not None, first_token > 0
    if dq is not None:
        WindowDQ.compile(*variant).run(q, do, k, v, *stats, dq, *sizes)
    WindowDKV.compile(*variant).run(q, do, k, v, *stats, dk, dv, *sizes)
