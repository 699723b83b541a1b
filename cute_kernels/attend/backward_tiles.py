"""Base classes of attention backward on Hopper, split by output; used by selected_, window_ and compressed_backward.

    S = scale Q K^T      P = exp(S - lse)      dP = dO V^T      dS = P (dP - delta)
    dQ = scale dS K      dK = scale dS^T Q     dV = P^T dO

BackwardDQ    a CTA owns 128 query rows of a head, 64 per consumer warpgroup, and streams tiles of 64 keys. Q and dO
              stay in registers as A operands of S and dP. dS becomes the A operand of dQ without leaving registers.
BackwardDKV   a CTA owns tiles of 64 keys of a key/value head and streams tiles of 64 query rows. Its products are
              transposed, S^T = K Q^T and dP^T = V dO^T, so P^T and dS^T are A operands in registers here too.

Both compute S and dP: 7 products instead of the 5 of a fused backward, but no dQ accumulator and no atomics.

Both are warp specialized. Warpgroup 0 is the producer: warp 0 issues TMA, and in BackwardDKV warps 1 and 2 write the
statistics of the query rows. Warpgroups 1 and 2 are the consumers: they issue WGMMA and write the results. TMA fills
rows and keys past the end with zeros.

A subclass defines the kernel: which tiles are streamed, what is masked, and how dK and dV are written.
`add_key_tile` and `add_row_tile` are the products of a tile for one branch of attention; window_backward.py has those
for two.

Limits: sm_90a (WGMMA); D = D_v 64 or 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.mma.mma_sync import accumulator
from cute_kernels.mma.warp import LANES
from cute_kernels.mma.warp_specialized import CONSUMERS, WARPGROUP_WARPS, Consumer, consumer_state, producer_state
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    SHARED,
    TILE,
    K,
    acc_as_operand_a,
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
from cute_kernels.runtime.dsl import SmemAllocator

CTA_ROWS = CONSUMERS * TILE
"""Query rows per CTA of BackwardDQ."""

STAGES = 4
"""Number of streamed tiles in flight."""

STATS_WARPS = TILE // LANES
"""Number of producer warps, from warp 1 on, that write statistics of query rows: one thread per row of a tile."""

STATS_BRANCHES = 2
"""Maximum number of attention branches that share S and dP, each with its own lse and delta."""

Stats = tuple[cute.Tensor | None, cute.Tensor | None]
"""lse and delta of a branch, fp32 [B, H, N]."""

TmaTile = tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]
"""Copy atom, tiles in shared memory and coordinates, the arguments of `wgmma.tma_loads`."""


class WorkTile(NamedTuple):
    """Coordinates of a CTA's rows or keys."""

    tile: Int32
    head: Int32
    """Query head in BackwardDQ, key/value head in BackwardDKV."""
    batch: Int32


@cute.jit
def token_of(row: Int32, first_token: Int32 | None) -> Int32:
    """Token index of a row, in the keys' numbering. Args: first_token: that of row 0 (None = 0, with N = N_k)."""
    token = row
    if const_expr(first_token is not None):
        token += first_token
    return token


def score_coordinates(mma_s: cute.TiledMma, consumer: Consumer) -> cute.Tensor:
    """((c, r, n), 0, 0): coordinates of a thread's elements of a tile of S, (row, key), or of S^T, (key, row)."""
    return mma_s.get_slice(consumer.thread).partition_C(cute.make_identity_tensor((TILE, TILE)))


class _Backward:
    """Args: dim: head dim. dtype: 16-bit type."""

    def __init__(self, dim: int, dtype: Any) -> None:
        self.dim, self.dtype = dim, dtype
        self.tile_bytes = TILE * dim * dtype.width // 8

    def tma_copies(self, inputs: tuple[cute.Tensor, ...], outputs: tuple[cute.Tensor, ...]) -> list[Any]:
        """Copy atom and coordinates of each tensor [B, N, H, D], in order."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = make_tma_copies(load, self.dtype, self.dim, *inputs)
        return copies + make_tma_copies(store, self.dtype, self.dim, *outputs)


class KeyTiles(Protocol):
    """Key tiles that a CTA of BackwardDQ iterates over."""

    def num_tiles(self) -> Int32:
        """Number of tiles."""

    def tile(self, i: Int32) -> Int32:
        """Coordinate of the i-th tile."""


class KeyTileRange(NamedTuple):
    """Consecutive key tiles."""

    first: Int32
    num: Int32

    def num_tiles(self) -> Int32:
        return self.num

    def tile(self, i: Int32) -> Int32:
        return self.first + i


class Mask(Protocol):
    """Mask of a tile of scores."""

    def apply(self, P: cute.Tensor, tScS: cute.Tensor) -> None:
        """Set P = 0 where a row does not see a key. Args: tScS: score_coordinates of S or of S^T."""


class SharedDQ(NamedTuple):
    """Shared memory and pipelines of BackwardDQ."""

    sQ: cute.Tensor  # (TILE, D, CONSUMERS)
    sdO: cute.Tensor  # (TILE, D, CONSUMERS)
    sK: cute.Tensor  # (TILE, D, STAGES)
    sV: cute.Tensor  # (TILE, D, STAGES)
    rows_ready: Any
    keys_ready: Any


class OperandsDQ(NamedTuple):
    """Operands of a consumer of BackwardDQ; the last mode of a streamed operand is the stage."""

    tScS: cute.Tensor
    """`score_coordinates`: (row, key)."""
    tSrQ: cute.Tensor  # registers, [TILE rows, D]
    tdPrdO: cute.Tensor  # registers, [TILE rows, D]
    tSrK: cute.Tensor  # [TILE keys, D, STAGES]
    tdPrV: cute.Tensor  # [TILE keys, D, STAGES]
    tdQrK: cute.Tensor  # [D, TILE keys, STAGES]
    rLse: cute.Tensor
    """fp32 (r, branch), in base 2. +inf for rows without an lse, so that P = exp2(-inf) = 0."""
    rDelta: cute.Tensor  # fp32 (r, branch)


class BackwardDQ(_Backward):
    """dQ of 128 query rows of a head. Q and dO stay resident, K and V are streamed. Pipelines: `allocate`."""

    def operands(self) -> tuple[Any, ...]:
        """Tiled MMAs of S and dP and of dQ; shared memory layouts of rows and of keys."""
        return (
            warpgroup_mma(self.dtype, TILE, REGISTERS, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, CONSUMERS),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        )

    def allocate(self, row_layout: cute.ComposedLayout, key_layout: cute.ComposedLayout) -> SharedDQ:
        smem = SmemAllocator()
        # (TILE, D, CONSUMERS) of Q and dO, (TILE, D, STAGES) of K and V
        sQ, sdO, sK, sV = (
            allocate_tiles(smem, self.dtype, layout) for layout in (row_layout, row_layout, key_layout, key_layout)
        )
        consumer_warps = CONSUMERS * WARPGROUP_WARPS
        # Full once TMA has written Q and dO of the CTA; filled once
        rows_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        # Full once TMA has written a tile of K and of V, which both consumers read; empty once their 8 warps have
        # awaited dS K
        keys_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes)
        return SharedDQ(sQ, sdO, sK, sV, rows_ready, keys_ready)

    @cute.jit
    def load(
        self,
        rows: tuple[TmaTile, TmaTile],  # Q and dO
        keys: tuple[TmaTile, TmaTile],  # K and V
        shared: SharedDQ,
        work: WorkTile,
        group: Int32,
        key_tiles: KeyTiles,
    ) -> Any:
        """Producer warp 0: load Q and dO once, then K and V of every key tile. Returns the state of keys_ready."""
        _, _, _, _, rows_ready, keys_ready = shared
        load_rows, load_keys = tma_loads(*rows), tma_loads(*keys)
        barrier = producer_acquire(rows_ready, producer_state(1))
        for i in range_constexpr(CONSUMERS):
            load_rows((work.tile * CONSUMERS + i, work.head, work.batch), i, barrier)
        state = producer_state(STAGES)
        kv_head = work.head // group
        for i in cutlass.range(key_tiles.num_tiles(), unroll=1):
            load_keys((key_tiles.tile(i), kv_head, work.batch), state.index, producer_acquire(keys_ready, state))
            state.advance()
        return state

    @cute.jit
    def partition(
        self,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
        shared: SharedDQ,
        branches: tuple[Stats, ...],
        num_rows: Int32,
        work: WorkTile,
        consumer: Consumer,
    ) -> OperandsDQ:
        """Load the statistics of the warpgroup's rows, then wait for its Q and dO."""
        _, _, sK, sV, rows_ready, _ = shared
        first_row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        tScS = score_coordinates(mma_s, consumer)
        tSrK, tdPrV = smem_operand_b(mma_s, sK), smem_operand_b(mma_s, sV)  # [TILE keys, D, STAGES]
        tdQrK = smem_operand_b(mma_dq, transpose_view(sK))  # [D, TILE keys, STAGES]
        rLse, rDelta = (cute.make_rmem_tensor((2, STATS_BRANCHES), Float32) for _ in range(2))  # fp32 (r, branch)
        for r in range_constexpr(2):
            row = first_row + tScS[(0, r, 0), 0, 0][0]
            for b in range_constexpr(len(branches)):
                lse, delta = branches[b]
                rLse[r, b], rDelta[r, b] = load_row_stats(
                    lse[work.batch, work.head, None], delta[work.batch, work.head, None], row, num_rows
                )
        rows_ready.consumer_wait(consumer_state(1))
        # [TILE rows, D], in registers
        tSrQ, tdPrdO = (load_operand_a(mma_s, x[None, None, consumer.warpgroup]) for x in (shared.sQ, shared.sdO))
        return OperandsDQ(tScS, tSrQ, tdPrdO, tSrK, tdPrV, tdQrK, rLse, rDelta)

    def accumulator(self, mma_dq: cute.TiledMma) -> cute.Tensor:
        """Zero-initialized dQ."""
        dQ = accumulator(mma_dq, (TILE, self.dim))  # fp32 [TILE rows, D]
        dQ.fill(0.0)
        return dQ

    @cute.jit
    def add_key_tile(
        self,
        dQ: cute.Tensor,
        op: OperandsDQ,
        stage: Int32,
        mask: Mask,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
    ):
        """dQ += dS K of a key tile, for one branch."""
        S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))  # fp32 [TILE rows, TILE keys]
        # S = Q K^T, dP = dO V^T
        issue_mma(mma_s, S, op.tSrQ, op.tSrK[None, None, None, stage], False)
        issue_mma(mma_s, dP, op.tdPrdO, op.tdPrV[None, None, None, stage], False)
        # S becomes P while dP is being computed
        warpgroup.wait_group(1)
        scores_to_probabilities(S, scale, broadcast_over_columns(op.rLse[None, 0]))
        mask.apply(S, op.tScS)
        # P becomes dS; dQ += dS K  [TILE rows, D]
        warpgroup.wait_group(0)
        score_gradients(S, S, dP, broadcast_over_columns(op.rDelta[None, 0]))
        issue_mma(mma_dq, dQ, acc_as_operand_a(mma_dq, S), op.tdQrK[None, None, None, stage], True)
        warpgroup.wait_group(0)

    @cute.jit
    def epilogue(
        self,
        mma_dq: cute.TiledMma,
        dQ: cute.Tensor,
        tma_dq: cute.CopyAtom,
        mdQ: cute.Tensor,
        sQ: cute.Tensor,
        scale: Float32,
        work: WorkTile,
        consumer: Consumer,
    ):
        """Scale and round dQ, write it to this warpgroup's part of Q's shared memory, and store it by TMA."""
        dQ.store(dQ.load() * scale)
        # Named barrier 1 or 2: the consumer has written its rows of dQ for TMA
        store_acc_for_tma(mma_dq, dQ, sQ[None, None, consumer.warpgroup], consumer.thread, 1 + consumer.warpgroup)
        if consumer.warp % WARPGROUP_WARPS == 0:
            row_tile = work.tile * CONSUMERS + consumer.warpgroup
            tma_store((row_tile, work.head, work.batch), consumer.warpgroup, (tma_dq, sQ, mdQ))


class SharedDKV(NamedTuple):
    """Shared memory of BackwardDKV."""

    sK: cute.Tensor  # (TILE, D, key tiles)
    sV: cute.Tensor  # (TILE, D, key tiles)
    sQ: cute.Tensor  # (TILE, D, STAGES)
    sdO: cute.Tensor  # (TILE, D, STAGES)
    sLse: cute.Tensor  # fp32 (TILE, branches, STAGES), in base 2
    sDelta: cute.Tensor  # fp32 (TILE, branches, STAGES)


class OperandsDKV(NamedTuple):
    """Operands of a consumer of BackwardDKV; the last mode of a streamed operand is the stage."""

    tScS: cute.Tensor
    """`score_coordinates`: (key, row)."""
    tSrK: cute.Tensor  # [TILE keys, D]
    tdPrV: cute.Tensor  # [TILE keys, D]
    tSrQ: cute.Tensor  # [TILE rows, D, STAGES]
    tdPrdO: cute.Tensor  # [TILE rows, D, STAGES]
    tdKrQ: cute.Tensor  # [D, TILE rows, STAGES]
    tdVrdO: cute.Tensor  # [D, TILE rows, STAGES]
    tSsLse: list[cute.Tensor]
    """Per branch, ((c, r, n), 0, 0, stage): a row's lse for every key."""
    tSsDelta: list[cute.Tensor]


class BackwardDKV(_Backward):
    """dK and dV of the keys of a CTA. K and V stay resident; Q, dO and the statistics of their rows are streamed.

    Args:
        dim: head dim.
        dtype: 16-bit type.
        key_tiles: if CONSUMERS, each consumer has a key tile of its own and reads every stage; if 1, both share the
            key tile, take stages in turn, and add their sums at the end.
        branches: number of branches whose statistics are kept.
    """

    def __init__(self, dim: int, dtype: Any, *, key_tiles: int, branches: int) -> None:
        super().__init__(dim, dtype)
        self.key_tiles, self.branches = key_tiles, branches

    def operands(self) -> tuple[Any, ...]:
        """Tiled MMAs of S and dP and of dK and dV; shared memory layouts of keys and of rows."""
        return (
            warpgroup_mma(self.dtype, TILE, SHARED, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
            swizzled_tiles(self.dtype, self.dim, self.key_tiles),
            swizzled_tiles(self.dtype, self.dim, STAGES),
        )

    def allocate(self, smem: Any, key_layout: cute.ComposedLayout, row_layout: cute.ComposedLayout) -> SharedDKV:
        # (TILE, D, key tiles) of K and V, (TILE, D, STAGES) of Q and dO
        tiles = [
            allocate_tiles(smem, self.dtype, layout) for layout in (key_layout, key_layout, row_layout, row_layout)
        ]
        stats = cute.make_layout((TILE, self.branches, STAGES))
        return SharedDKV(*tiles, *[smem.allocate_tensor(Float32, stats, 16) for _ in range(2)])

    def pipelines(self) -> tuple[Any, Any]:
        """keys_ready and rows_ready."""
        keys_bytes, rows_bytes = 2 * self.key_tiles * self.tile_bytes, 2 * self.tile_bytes
        # Full once TMA has written K and V of the CTA; filled once
        keys_ready = tma_pipeline(1, CONSUMERS * WARPGROUP_WARPS, keys_bytes, defer_sync=True)
        # Full once TMA has written a tile of Q and of dO and the 64 threads of the statistics' warps have arrived.
        # Empty once the warps that read the stage, both consumers' or those whose turn it is, have awaited dS^T Q
        rows_ready = tma_pipeline(STAGES, self.key_tiles * WARPGROUP_WARPS, rows_bytes, writers=TILE)
        return keys_ready, rows_ready

    @cute.jit
    def load_group(
        self,
        rows: tuple[TmaTile, TmaTile],  # Q and dO
        keys: tuple[TmaTile, TmaTile],  # K and V
        keys_ready: Any,
        rows_ready: Any,
        first_tile: Int32,
        stop_tile: Int32,
        group: Int32,
        work: WorkTile,
    ):
        """Producer warp 0: load K and V once, then Q and dO of a range of row tiles, for each head of the group."""
        state = producer_state(STAGES)
        load_rows, load_keys = tma_loads(*rows), tma_loads(*keys)
        barrier = producer_acquire(keys_ready, producer_state(1))
        for i in range_constexpr(self.key_tiles):
            load_keys((work.tile * self.key_tiles + i, work.head, work.batch), i, barrier)
        for head in cutlass.range(work.head * group, (work.head + 1) * group, unroll=1):
            for tile in cutlass.range(first_tile, stop_tile, unroll=1):
                load_rows((tile, head, work.batch), state.index, producer_acquire(rows_ready, state))
                state.advance()

    @cute.jit
    def load_group_stats(
        self,
        branches: tuple[Stats, ...],
        shared: SharedDKV,
        rows_ready: Any,
        first_tile: Int32,
        stop_tile: Int32,
        group: Int32,
        num_rows: Int32,
        work: WorkTile,
    ):
        """Producer warps 1 and 2: load lse and delta of the same rows, for each branch."""
        thread, _, _ = cute.arch.thread_idx()
        sLse, sDelta = shared.sLse, shared.sDelta
        state = producer_state(STAGES)
        row = thread - LANES  # within a row tile
        # fp32 (branch)
        rLse, rDelta = cute.make_rmem_tensor(STATS_BRANCHES, Float32), cute.make_rmem_tensor(STATS_BRANCHES, Float32)
        for head in cutlass.range(work.head * group, (work.head + 1) * group, unroll=1):
            for tile in cutlass.range(first_tile, stop_tile, unroll=1):
                for b in range_constexpr(len(branches)):
                    lse, delta = branches[b]
                    rLse[b], rDelta[b] = load_row_stats(
                        lse[work.batch, head, None], delta[work.batch, head, None], tile * TILE + row, num_rows
                    )
                stage = state.index
                rows_ready.sync_object_empty.wait(stage, state.phase)
                for b in range_constexpr(len(branches)):
                    sLse[row, b, stage], sDelta[row, b, stage] = rLse[b], rDelta[b]
                cute.arch.mbarrier_arrive(rows_ready.producer_get_barrier(state))
                state.advance()

    def partition(
        self, mma_s: cute.TiledMma, mma_dkv: cute.TiledMma, shared: SharedDKV, key_tile: Any, consumer: Consumer
    ) -> OperandsDKV:
        """Partition operands. Args: key_tile: index of the consumer's key tile in shared memory."""
        sK, sV, sQ, sdO, sLse, sDelta = shared
        thr_s = mma_s.get_slice(consumer.thread)
        tScS = score_coordinates(mma_s, consumer)
        tSrK, tdPrV = (smem_operand_a(mma_s, tiles)[None, None, None, key_tile] for tiles in (sK, sV))  # [TILE keys, D]
        tSrQ, tdPrdO = (smem_operand_b(mma_s, tiles) for tiles in (sQ, sdO))  # [TILE rows, D, STAGES]
        # [D, TILE rows, STAGES]
        tdKrQ, tdVrdO = (smem_operand_b(mma_dkv, transpose_view(tiles)) for tiles in (sQ, sdO))
        # (TILE keys, TILE rows, STAGES): the same value for every key
        every_key = cute.make_layout((TILE, TILE, STAGES), stride=(0, 1, self.branches * TILE))
        tSsLse, tSsDelta = (
            [thr_s.partition_C(cute.make_tensor(x.iterator + b * TILE, every_key)) for b in range(self.branches)]
            for x in (sLse, sDelta)
        )
        return OperandsDKV(tScS, tSrK, tdPrV, tSrQ, tdPrdO, tdKrQ, tdVrdO, tSsLse, tSsDelta)

    def accumulators(self, mma_dkv: cute.TiledMma) -> tuple[cute.Tensor, cute.Tensor]:
        """Zero-initialized dK and dV."""
        # fp32 [TILE keys, D]
        dK, dV = accumulator(mma_dkv, (TILE, self.dim)), accumulator(mma_dkv, (TILE, self.dim))
        dK.fill(0.0)
        dV.fill(0.0)
        return dK, dV

    @cute.jit
    def add_row_tile(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        op: OperandsDKV,
        stage: Int32,
        mask: Mask,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dkv: cute.TiledMma,
    ):
        """dV += P^T dO and dK += dS^T Q of a row tile, for one branch."""
        S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))  # fp32 [TILE keys, TILE rows]
        # S^T = K Q^T, dP^T = V dO^T
        issue_mma(mma_s, S, op.tSrK, op.tSrQ[None, None, None, stage], False)
        issue_mma(mma_s, dP, op.tdPrV, op.tdPrdO[None, None, None, stage], False)
        # S becomes P while dP is being computed
        rLse = broadcast_over_rows(op.tSsLse[0][(None, 0, None), 0, 0, stage])  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        scores_to_probabilities(S, scale, rLse)
        mask.apply(S, op.tScS)
        # dV += P^T dO; P becomes dS; dK += dS^T Q  [TILE keys, D]
        issue_mma(mma_dkv, dV, acc_as_operand_a(mma_dkv, S), op.tdVrdO[None, None, None, stage], True)
        rDelta = broadcast_over_rows(op.tSsDelta[0][(None, 0, None), 0, 0, stage])  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        score_gradients(S, S, dP, rDelta)
        issue_mma(mma_dkv, dK, acc_as_operand_a(mma_dkv, S), op.tdKrQ[None, None, None, stage], True)
        warpgroup.wait_group(0)
