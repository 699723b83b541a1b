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
    BackwardDKV,
    BackwardDQ,
    Inputs,
    KeyTileRange,
    Mmas,
    RowTileRange,
    SharedDKV,
    SharedDQ,
    Stats,
    TmaTensors,
    WorkTile,
    token_of,
)
from cute_kernels.mma.mma_sync import accumulator
from cute_kernels.mma.warp import probability
from cute_kernels.mma.warp_specialized import (
    CONSUMERS,
    THREADS,
    WARPGROUP_WARPS,
    Consumer,
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
            self.tma_tensors(mQ, mdO, mK, mV, mdQ),
            ((mLse, mDelta), (mLocalLse, mLocalDelta)),
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            WindowMask(left, size, local),
            scale,
            first_token,
            self.mmas(),
        ).launch(
            grid=[cute.ceil_div(mQ.shape[1], CTA_ROWS), mQ.shape[2], mQ.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        branches: tuple[Stats, Stats],  # the window, LocalSelected
        num_rows: Int32,
        group: Int32,
        window: WindowMask,
        scale: Float32,
        first_token: Int32 | None,
        mma: Mmas,
    ):
        work, warp = WorkTile(*cute.arch.block_idx()), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        inputs = Inputs(tma, branches[: 1 + self.has_local], num_rows, group, scale, mma)
        key_tiles = self.key_tiles(work, num_rows, window.left, first_token)
        self.run_roles(warp, inputs, self.allocate(), work, key_tiles, (window, first_token))

    def key_tiles(self, work: WorkTile, num_rows: Int32, left: Int32, first_token: Int32 | None) -> KeyTileRange:
        """Key tiles that some row of the CTA sees."""
        first_tile = cutlass.max(token_of(work.tile * CTA_ROWS, first_token) - left, 0) // TILE
        stop_row = cutlass.min(work.tile * CTA_ROWS + CTA_ROWS, num_rows + TILE - 1)
        return KeyTileRange(first_tile, token_of(stop_row, first_token) // TILE - first_tile)

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDQ,
        work: WorkTile,
        key_tiles: KeyTileRange,
        seen: tuple[WindowMask, Int32 | None],
        consumer: Consumer,
    ) -> tuple[cute.Tensor, Any]:
        (window, first_token), keys_ready, scale = seen, shared.keys_ready, inputs.scale
        mma_s, mma_dq = inputs.mma
        first_row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        own_token = token_of(first_row, first_token)  # token index of the first row
        first_local = (own_token // window.size - window.local + 1) * window.size  # may be negative
        dQ = self.accumulator(inputs.mma)  # fp32 [TILE rows, D]
        op = self.partition(inputs, shared, work, consumer)

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
            self.tma_tensors(mQ, mdO, mK, mV, mdK, mdV),
            ((mLse, mDelta), (mLocalLse, mLocalDelta)),
            mQ.shape[1],
            mQ.shape[2] // mK.shape[2],
            WindowMask(left, size, local),
            scale,
            first_token,
            self.mmas(),
        ).launch(
            grid=[cute.ceil_div(mK.shape[1], CTA_ROWS), mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        branches: tuple[Stats, Stats],  # the window, LocalSelected
        num_rows: Int32,
        group: Int32,
        window: WindowMask,
        scale: Float32,
        first_token: Int32 | None,
        mma: Mmas,
    ):
        work, warp = WorkTile(*cute.arch.block_idx()), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_tile = work.tile * CONSUMERS
        stop_token = cutlass.min(work.tile * CTA_ROWS + CTA_ROWS - 1 + window.left, token_of(num_rows, first_token) - 1)
        stop_tile = stop_token // TILE + 1
        if const_expr(first_token is not None):  # tiles of rows are counted from row 0
            skipped = first_token // TILE  # type: ignore[operator]
            first_tile, stop_tile = cutlass.max(first_tile - skipped, 0), stop_tile - skipped
        inputs = Inputs(tma, branches[: 1 + self.has_local], num_rows, group, scale, mma)
        row_tiles = RowTileRange(first_tile, stop_tile)
        self.run_roles(warp, inputs, work, row_tiles, (window, first_token), None)

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        row_tiles: RowTileRange,
        seen: tuple[WindowMask, Int32 | None],
        consumer: Consumer,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        (window, first_token), rows_ready, scale = seen, shared.rows_ready, inputs.scale
        mma_s, mma_dkv = inputs.mma
        first_key = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        op = self.partition(inputs.mma, shared, consumer.warpgroup, consumer)
        dK, dV = self.accumulators(inputs.mma)  # fp32 [TILE keys, D]
        shared.keys_ready.consumer_wait(consumer_state(1))
        state = consumer_state(STAGES)
        stop_local = (first_key // window.size + window.local) * window.size  # end of the rows they are local to
        for _ in cutlass.range(inputs.group, unroll=1):
            for tile in cutlass.range(row_tiles.first, row_tiles.stop, unroll=1):
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
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        target: None,
        consumer: Consumer,
    ):
        """Round dK and dV into the shared memory of K and V, read only by this warpgroup, then store them by TMA."""
        tma_dk, tma_dv = inputs.tma.gradients
        sK, sV, mma_dkv, group = shared.sK, shared.sV, inputs.mma.gradients, consumer.warpgroup
        dK.store(dK.load() * inputs.scale)
        # Named barrier 1 or 2, in store_acc_for_tma: the consumer has written its dK, then its dV, for TMA
        store_acc_for_tma(mma_dkv, dK, sK[None, None, group], consumer.thread, 1 + group)
        store_acc_for_tma(mma_dkv, dV, sV[None, None, group], consumer.thread, 1 + group)
        if consumer.warp % WARPGROUP_WARPS == 0:
            tma_store((work.tile * CONSUMERS + group, work.head, work.batch), group, (tma_dk, sK), (tma_dv, sV))


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
