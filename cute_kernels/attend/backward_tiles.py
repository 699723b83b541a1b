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

A subclass defines the kernel: which tiles are streamed, what is masked, and how dK and dV are written. `run_roles`
has each warp call the methods of its role.
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

from cute_kernels.mma.mma_sync import accumulator, transpose_view
from cute_kernels.mma.warp import LANES
from cute_kernels.mma.warp_specialized import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    WARPGROUP_WARPS,
    Consumer,
    consumer_of,
    consumer_state,
    producer_state,
)
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    SHARED,
    TILE,
    K,
    TmaTensor,
    acc_as_operand_a,
    allocate_tiles,
    broadcast_over_columns,
    broadcast_over_rows,
    issue_mma,
    load_operand_a,
    load_row_stats,
    make_tma_tensors,
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


class TmaTensors(NamedTuple):
    """Tensors that TMA loads and stores."""

    q: TmaTensor
    do: TmaTensor
    k: TmaTensor
    v: TmaTensor
    gradients: tuple[TmaTensor, ...]
    """dq in BackwardDQ, dk and dv in BackwardDKV; empty if they are stored from registers."""


class Mmas(NamedTuple):
    """Tiled MMAs of a warpgroup."""

    s: cute.TiledMma  # S and dP: [TILE rows, TILE keys], in BackwardDKV transposed
    gradients: cute.TiledMma  # dQ: [TILE rows, D], or dK and dV: [TILE keys, D]


class Inputs(NamedTuple):
    """Arguments that the kernels of all branches have."""

    tma: TmaTensors
    branches: tuple[Stats, ...]
    """Statistics of the attention branches that share S and dP."""
    num_rows: Int32
    group: Int32
    """G, query heads per key/value head."""
    scale: Float32
    mma: Mmas


class _Backward:
    """Args: dim: head dim. dtype: 16-bit type."""

    def __init__(self, dim: int, dtype: Any) -> None:
        self.dim, self.dtype = dim, dtype
        self.tile_bytes = TILE * dim * dtype.width // 8

    def tma_tensors(self, *tensors: cute.Tensor) -> TmaTensors:
        """Args: q, do, k and v, then the gradients that TMA stores, each [B, N, H, D]."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q, do, k, v = make_tma_tensors(load, self.dtype, self.dim, *tensors[:4])
        return TmaTensors(q, do, k, v, tuple(make_tma_tensors(store, self.dtype, self.dim, *tensors[4:])))


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

    def mmas(self) -> Mmas:
        """S = Q K^T and dP = dO V^T; dQ = dS K."""
        return Mmas(
            warpgroup_mma(self.dtype, TILE, REGISTERS, K, K), warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN)
        )

    def allocate(self) -> SharedDQ:
        smem = SmemAllocator()
        rows, keys = (swizzled_tiles(self.dtype, self.dim, count) for count in (CONSUMERS, STAGES))
        # (TILE, D, CONSUMERS) of Q and dO, (TILE, D, STAGES) of K and V
        sQ, sdO, sK, sV = (allocate_tiles(smem, self.dtype, layout) for layout in (rows, rows, keys, keys))
        consumer_warps = CONSUMERS * WARPGROUP_WARPS
        # Full once TMA has written Q and dO of the CTA; filled once
        rows_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        # Full once TMA has written a tile of K and of V, which both consumers read; empty once their 8 warps have
        # awaited dS K
        keys_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes)
        return SharedDQ(sQ, sdO, sK, sV, rows_ready, keys_ready)

    @cute.jit
    def run_roles(self, warp: Int32, inputs: Inputs, shared: SharedDQ, work: WorkTile, key_tiles: KeyTiles, seen: Any):
        """Args: seen: visibility of keys, for the subclass's `mma`."""
        thread, _, _ = cute.arch.thread_idx()
        if warp < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(inputs, shared, work, key_tiles)
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = consumer_of(thread, warp)
            dQ, _ = self.mma(inputs, shared, work, key_tiles, seen, consumer)
            self.epilogue(dQ, inputs, shared.sQ, work, consumer)

    @cute.jit
    def load(self, inputs: Inputs, shared: SharedDQ, work: WorkTile, key_tiles: KeyTiles) -> Any:
        """Producer warp 0: load Q and dO once, then K and V of every key tile. Returns the state of keys_ready."""
        sQ, sdO, sK, sV, rows_ready, keys_ready = shared
        tma = inputs.tma
        load_rows, load_keys = tma_loads((tma.q, sQ), (tma.do, sdO)), tma_loads((tma.k, sK), (tma.v, sV))
        barrier = producer_acquire(rows_ready, producer_state(1))
        for i in range_constexpr(CONSUMERS):
            load_rows((work.tile * CONSUMERS + i, work.head, work.batch), i, barrier)
        state = producer_state(STAGES)
        kv_head = work.head // inputs.group
        for i in cutlass.range(key_tiles.num_tiles(), unroll=1):
            load_keys((key_tiles.tile(i), kv_head, work.batch), state.index, producer_acquire(keys_ready, state))
            state.advance()
        return state

    def mma(
        self, inputs: Inputs, shared: SharedDQ, work: WorkTile, key_tiles: Any, seen: Any, consumer: Consumer
    ) -> tuple[cute.Tensor, Any]:
        """Consumer mainloop over the key tiles. Returns the warpgroup's unscaled dQ, and the state of keys_ready."""
        raise NotImplementedError

    @cute.jit
    def partition(self, inputs: Inputs, shared: SharedDQ, work: WorkTile, consumer: Consumer) -> OperandsDQ:
        """Load the statistics of the warpgroup's rows, then wait for its Q and dO."""
        _, _, sK, sV, rows_ready, _ = shared
        (mma_s, mma_dq), branches = inputs.mma, inputs.branches
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
                    lse[work.batch, work.head, None], delta[work.batch, work.head, None], row, inputs.num_rows
                )
        rows_ready.consumer_wait(consumer_state(1))
        # [TILE rows, D], in registers
        tSrQ, tdPrdO = (load_operand_a(mma_s, x[None, None, consumer.warpgroup]) for x in (shared.sQ, shared.sdO))
        return OperandsDQ(tScS, tSrQ, tdPrdO, tSrK, tdPrV, tdQrK, rLse, rDelta)

    def accumulator(self, mma: Mmas) -> cute.Tensor:
        """Zero-initialized dQ."""
        dQ = accumulator(mma.gradients, (TILE, self.dim))  # fp32 [TILE rows, D]
        dQ.fill(0.0)
        return dQ

    @cute.jit
    def add_key_tile(self, dQ: cute.Tensor, op: OperandsDQ, stage: Int32, mask: Mask, inputs: Inputs):
        """dQ += dS K of a key tile, for one branch."""
        mma_s, mma_dq = inputs.mma
        S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))  # fp32 [TILE rows, TILE keys]
        # S = Q K^T, dP = dO V^T
        issue_mma(mma_s, S, op.tSrQ, op.tSrK[None, None, None, stage], False)
        issue_mma(mma_s, dP, op.tdPrdO, op.tdPrV[None, None, None, stage], False)
        # S becomes P while dP is being computed
        warpgroup.wait_group(1)
        scores_to_probabilities(S, inputs.scale, broadcast_over_columns(op.rLse[None, 0]))
        mask.apply(S, op.tScS)
        # P becomes dS; dQ += dS K  [TILE rows, D]
        warpgroup.wait_group(0)
        score_gradients(S, S, dP, broadcast_over_columns(op.rDelta[None, 0]))
        issue_mma(mma_dq, dQ, acc_as_operand_a(mma_dq, S), op.tdQrK[None, None, None, stage], True)
        warpgroup.wait_group(0)

    @cute.jit
    def epilogue(self, dQ: cute.Tensor, inputs: Inputs, sQ: cute.Tensor, work: WorkTile, consumer: Consumer):
        """Scale and round dQ, write it to this warpgroup's part of Q's shared memory, and store it by TMA."""
        tma_dq, mma_dq = inputs.tma.gradients[0], inputs.mma.gradients
        dQ.store(dQ.load() * inputs.scale)
        # Named barrier 1 or 2: the consumer has written its rows of dQ for TMA
        store_acc_for_tma(mma_dq, dQ, sQ[None, None, consumer.warpgroup], consumer.thread, 1 + consumer.warpgroup)
        if consumer.warp % WARPGROUP_WARPS == 0:
            row_tile = work.tile * CONSUMERS + consumer.warpgroup
            tma_store((row_tile, work.head, work.batch), consumer.warpgroup, (tma_dq, sQ))


class SharedDKV(NamedTuple):
    """Shared memory and pipelines of BackwardDKV."""

    sK: cute.Tensor  # (TILE, D, key tiles)
    sV: cute.Tensor  # (TILE, D, key tiles)
    sQ: cute.Tensor  # (TILE, D, STAGES)
    sdO: cute.Tensor  # (TILE, D, STAGES)
    sLse: cute.Tensor  # fp32 (TILE, branches, STAGES), in base 2
    sDelta: cute.Tensor  # fp32 (TILE, branches, STAGES)
    sRow: cute.Tensor | None  # int32 (STAGES): first row of every stage, if row tiles are listed
    keys_ready: Any
    rows_ready: Any


class RowTileRange(NamedTuple):
    """Consecutive row tiles, for each head of the group."""

    first: Int32
    stop: Int32


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
        listed: row tiles are listed, so `load_stats` also writes where they start.
    """

    def __init__(self, dim: int, dtype: Any, *, key_tiles: int, branches: int, listed: bool = False) -> None:
        super().__init__(dim, dtype)
        self.key_tiles, self.branches, self.listed = key_tiles, branches, listed

    def mmas(self) -> Mmas:
        """S^T = K Q^T and dP^T = V dO^T; dK = dS^T Q and dV = P^T dO."""
        return Mmas(
            warpgroup_mma(self.dtype, TILE, SHARED, K, K), warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN)
        )

    def allocate(self) -> SharedDKV:
        smem = SmemAllocator()
        keys, rows = (swizzled_tiles(self.dtype, self.dim, count) for count in (self.key_tiles, STAGES))
        # (TILE, D, key tiles) of K and V, (TILE, D, STAGES) of Q and dO
        sK, sV, sQ, sdO = (allocate_tiles(smem, self.dtype, layout) for layout in (keys, keys, rows, rows))
        stats = cute.make_layout((TILE, self.branches, STAGES))
        sLse, sDelta = (smem.allocate_tensor(Float32, stats, 16) for _ in range(2))
        sRow = smem.allocate_tensor(Int32, cute.make_layout(STAGES), 16) if self.listed else None
        keys_bytes, rows_bytes = 2 * self.key_tiles * self.tile_bytes, 2 * self.tile_bytes
        # Full once TMA has written K and V of the CTA; filled once
        keys_ready = tma_pipeline(1, CONSUMERS * WARPGROUP_WARPS, keys_bytes, defer_sync=True)
        # Full once TMA has written a tile of Q and of dO and the 64 threads of the statistics' warps have arrived.
        # Empty once the warps that read the stage, both consumers' or those whose turn it is, have awaited dS^T Q
        rows_ready = tma_pipeline(STAGES, self.key_tiles * WARPGROUP_WARPS, rows_bytes, writers=TILE)
        return SharedDKV(sK, sV, sQ, sdO, sLse, sDelta, sRow, keys_ready, rows_ready)

    @cute.jit
    def run_roles(self, warp: Int32, inputs: Inputs, work: WorkTile, row_tiles: Any, seen: Any, target: Any):
        """Args: row_tiles, seen, target: row tiles, visibility of keys and memory for dK and dV of the subclass."""
        thread, _, _ = cute.arch.thread_idx()
        shared = self.allocate()
        if warp < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            rows = self.rows_to_load(inputs, row_tiles)
            if warp == 0:
                self.load(inputs, shared, work, rows)
            elif warp <= STATS_WARPS:
                self.load_stats(inputs, shared, work, rows)
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = consumer_of(thread, warp)
            dK, dV = self.mma(inputs, shared, work, row_tiles, seen, consumer)
            self.epilogue(dK, dV, inputs, shared, work, target, consumer)

    def rows_to_load(self, inputs: Inputs, row_tiles: Any) -> Any:
        """Row tiles as `load` and `load_stats` iterate over them."""
        return row_tiles

    def mma(
        self, inputs: Inputs, shared: SharedDKV, work: WorkTile, row_tiles: Any, seen: Any, consumer: Consumer
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Consumer mainloop over the row tiles. Returns the unscaled dK of the warpgroup's keys, and dV."""
        raise NotImplementedError

    def epilogue(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        target: Any,
        consumer: Consumer,
    ) -> None:
        """Scale dK and store it, and dV."""
        raise NotImplementedError

    @cute.jit
    def load(self, inputs: Inputs, shared: SharedDKV, work: WorkTile, row_tiles: RowTileRange):
        """Producer warp 0: load K and V once, then Q and dO of the row tiles, for each head of the group."""
        state = producer_state(STAGES)
        load_rows, load_keys = self.tma_loads(inputs.tma, shared)
        keys_ready, rows_ready, group = shared.keys_ready, shared.rows_ready, inputs.group
        barrier = producer_acquire(keys_ready, producer_state(1))
        for i in range_constexpr(self.key_tiles):
            load_keys((work.tile * self.key_tiles + i, work.head, work.batch), i, barrier)
        for head in cutlass.range(work.head * group, (work.head + 1) * group, unroll=1):
            for tile in cutlass.range(row_tiles.first, row_tiles.stop, unroll=1):
                load_rows((tile, head, work.batch), state.index, producer_acquire(rows_ready, state))
                state.advance()

    def tma_loads(self, tma: TmaTensors, shared: SharedDKV) -> tuple[Any, Any]:
        """`wgmma.tma_loads` of Q and dO, and of K and V."""
        rows, keys = ((tma.q, shared.sQ), (tma.do, shared.sdO)), ((tma.k, shared.sK), (tma.v, shared.sV))
        return tma_loads(*rows), tma_loads(*keys)

    @cute.jit
    def load_stats(self, inputs: Inputs, shared: SharedDKV, work: WorkTile, row_tiles: RowTileRange):
        """Producer warps 1 and 2: load lse and delta of the same rows, for each branch."""
        thread, _, _ = cute.arch.thread_idx()
        sLse, sDelta, rows_ready, branches = shared.sLse, shared.sDelta, shared.rows_ready, inputs.branches
        state = producer_state(STAGES)
        row = thread - LANES  # within a row tile
        # fp32 (branch)
        rLse, rDelta = cute.make_rmem_tensor(STATS_BRANCHES, Float32), cute.make_rmem_tensor(STATS_BRANCHES, Float32)
        for head in cutlass.range(work.head * inputs.group, (work.head + 1) * inputs.group, unroll=1):
            for tile in cutlass.range(row_tiles.first, row_tiles.stop, unroll=1):
                for b in range_constexpr(len(branches)):
                    lse, delta = branches[b]
                    rLse[b], rDelta[b] = load_row_stats(
                        lse[work.batch, head, None], delta[work.batch, head, None], tile * TILE + row, inputs.num_rows
                    )
                stage = state.index
                rows_ready.sync_object_empty.wait(stage, state.phase)
                for b in range_constexpr(len(branches)):
                    sLse[row, b, stage], sDelta[row, b, stage] = rLse[b], rDelta[b]
                cute.arch.mbarrier_arrive(rows_ready.producer_get_barrier(state))
                state.advance()

    def partition(self, mma: Mmas, shared: SharedDKV, key_tile: Any, consumer: Consumer) -> OperandsDKV:
        """Partition operands. Args: key_tile: index of the consumer's key tile in shared memory."""
        sK, sV, sQ, sdO, sLse, sDelta, *_ = shared
        mma_s, mma_dkv = mma
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

    def accumulators(self, mma: Mmas) -> tuple[cute.Tensor, cute.Tensor]:
        """Zero-initialized dK and dV."""
        dK, dV = (accumulator(mma.gradients, (TILE, self.dim)) for _ in range(2))  # fp32 [TILE keys, D]
        dK.fill(0.0)
        dV.fill(0.0)
        return dK, dV

    @cute.jit
    def add_row_tile(self, dK: cute.Tensor, dV: cute.Tensor, op: OperandsDKV, stage: Int32, mask: Mask, inputs: Inputs):
        """dV += P^T dO and dK += dS^T Q of a row tile, for one branch."""
        mma_s, mma_dkv = inputs.mma
        S, dP = accumulator(mma_s, (TILE, TILE)), accumulator(mma_s, (TILE, TILE))  # fp32 [TILE keys, TILE rows]
        # S^T = K Q^T, dP^T = V dO^T
        issue_mma(mma_s, S, op.tSrK, op.tSrQ[None, None, None, stage], False)
        issue_mma(mma_s, dP, op.tdPrV, op.tdPrdO[None, None, None, stage], False)
        # S becomes P while dP is being computed
        rLse = broadcast_over_rows(op.tSsLse[0][(None, 0, None), 0, 0, stage])  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        scores_to_probabilities(S, inputs.scale, rLse)
        mask.apply(S, op.tScS)
        # dV += P^T dO; P becomes dS; dK += dS^T Q  [TILE keys, D]
        issue_mma(mma_dkv, dV, acc_as_operand_a(mma_dkv, S), op.tdVrdO[None, None, None, stage], True)
        rDelta = broadcast_over_rows(op.tSsDelta[0][(None, 0, None), 0, 0, stage])  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        score_gradients(S, S, dP, rDelta)
        issue_mma(mma_dkv, dK, acc_as_operand_a(mma_dkv, S), op.tdKrQ[None, None, None, stage], True)
        warpgroup.wait_group(0)
