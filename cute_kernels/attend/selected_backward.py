"""Backward of attention to selected blocks on Hopper, in two kernels: no atomics, no dQ accumulator, deterministic.

    S_ij = scale q_i . k_j            P_ij = exp(S_ij - lse_i), 0 where i does not see j (query_to_kv.Keys)
    dP_ij = dO_i . v_j                dS_ij = P_ij (dP_ij - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

A gate g_i is applied by shifting its row's lse by -log(g_i): P is then g_i times the softmax. P = 0 if lse is not
finite. Sums are fp32. P and dS are rounded to 16 bits before they are multiplied, results once.

Blocks consist of tokens, or of compressed entries (`num_cmp_selected_blocks`).

SelectedDQ          a CTA owns 128 query rows of a head and iterates over the blocks that their query tile selected.
SelectedDKV         a CTA owns 64 or 128 keys of a KV block and a work tile of the query tiles that selected it, 64 rows
                    at a time. With 128 keys, if l' is a multiple of that, each consumer has half of the keys; with 64
                    the two alternate between rows and add their sums at the end.
CombineSelectedDKV  sums the partials of a block that was split, in order.

The first two are built on backward_tiles.py: roles of warps, shared memory, loads.

lists/selected_worklist.py lists which (head, tile) selected each block. A block that many tiles selected (all may
select block 0) is split into work tiles; each writes an fp32 partial of dK and dV to global memory.

Sizes of grids, lists and memory follow from shapes (`worklist_sizes`).

Floor: 3 products in SelectedDQ and 4 in SelectedDKV of N k l' D 2 H FLOPs each. 128K tokens, 8 heads of 128, k=16,
l'=64: 1.92 TFLOP, 3.2 ms at 600 TFLOP/s. For every 64 rows and a CTA's keys Q and dO, or K and V, are read again,
mostly from HBM when blocks are selected at random: 4.3 and 8.6 GB, 3.1 ms at 4.2 TB/s, concurrently.

Limits: sm_90a (WGMMA); D = D_v 64 or 128; l' a multiple of 64, T of 128; B*H*tiles*k < 2^31; 64-bit offsets; dO finite
in every row, even if its lse is not; TMA: rows 16-byte aligned.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr, pipeline, range_constexpr
from torch import Tensor

from cute_kernels.attend import combine_splits
from cute_kernels.attend.backward_tiles import (
    CTA_ROWS,
    STAGES,
    BackwardDKV,
    BackwardDQ,
    Inputs,
    Mmas,
    SharedDKV,
    SharedDQ,
    Stats,
    TmaTensors,
    WorkTile,
    token_of,
)
from cute_kernels.attend.combine_splits import add_partials, chunk_start
from cute_kernels.lists.query_to_kv import BlockLists, Keys, fake_lists
from cute_kernels.lists.selected_worklist import block_coordinates, fake_query_tiles, fake_table, selected_worklist
from cute_kernels.lists.worklist import BLOCK, COUNT, FIRST, SPLITS, WorklistSizes, num_work_tiles
from cute_kernels.mma.warp import LANES
from cute_kernels.mma.warp_specialized import (
    CONSUMERS,
    THREADS,
    WARPGROUP_WARPS,
    Consumer,
    consumer_state,
    producer_state,
)
from cute_kernels.mma.wgmma import (
    TILE,
    WARPGROUP_THREADS,
    acc_coordinates,
    load_row_stats,
    producer_acquire,
    store_acc_for_tma,
    tma_store,
)
from cute_kernels.pool.documents import fake_rows
from cute_kernels.runtime.jit import (
    CUTE_DTYPES,
    FLOATS,
    Kernel,
    compile_kernel,
    compiled_once,
    fake,
    fake_heads,
    fake_stats,
)

CTA_KEYS = CONSUMERS * TILE
"""Keys per CTA of SelectedDKV if l' is a multiple of them."""

MIN_QUERY_TILES = 32
"""Minimum query tiles per work tile of a split block."""

WORKSPACE_BYTES = 512 << 20
"""Memory budget for the partials of split blocks."""


class ListedKeyTiles(NamedTuple):
    """Key tiles that a query tile selected (BlockLists): first those that need a mask, then the full ones."""

    masked: Int32
    """Number of tiles that need a mask."""
    full: Int32
    gMask: cute.Tensor  # int32 [K], of which the first `masked` are read
    gFull: cute.Tensor  # int32 [K], of which the first `full` are read

    def num_tiles(self) -> Int32:
        return self.masked + self.full

    @cute.jit
    def tile(self, i: Int32) -> Int32:
        index = Int32(0)
        if i < self.masked:
            index = self.gMask[i]
        else:
            index = self.gFull[i - self.masked]
        return index


class ListedQueryTiles(NamedTuple):
    """Query tiles of a work tile, of all heads of the group."""

    mQueryTiles: cute.Tensor  # SelectedWorklist
    first: Int32
    num: Int32


class RowsToLoad(NamedTuple):
    """ListedQueryTiles as the producer iterates over them."""

    gQueryTiles: cute.Tensor  # int32, those of the work tile first: head within the group times `tiles`, plus the tile
    num: Int32
    tiles: Int32
    """Number of query tiles of a head."""


class TokensOfRows(NamedTuple):
    """Maps rows to token indices, in the keys' numbering."""

    first: Int32 | None
    """Token index of row 0 (None = 0)."""
    mShifts: cute.Tensor | None
    """int32 [query tiles]: added to the token indices of each tile's rows."""
    tile: int
    """Rows per query tile."""

    @cute.jit
    def token(self, row: Int32) -> Int32:
        token = token_of(row, self.first)
        if const_expr(self.mShifts is not None):
            token += self.mShifts[row // self.tile]
        return token


class Seen(NamedTuple):
    """Visibility of keys to rows."""

    tokens: TokensOfRows
    num_keys: Int32
    """Number of keys in the sequence."""


class SplitTile(NamedTuple):
    """Coordinates of a CTA of SelectedDKV in the worklist, and where it writes if its block is split."""

    index: Int32
    """Index in the worklist."""
    block_cta: Int32
    """Index among the CTAs of the block."""
    num_split: Int32
    """Number of work tiles of split blocks, which come first."""
    mPartials: cute.Tensor  # fp32 [work tiles of split blocks, key tiles of a block, 2, TILE, D]: dK and dV


class KeyTile(NamedTuple):
    """Tile of keys to be masked."""

    keys: Keys
    first: Int32
    num_keys: Int32
    """Number of keys in the sequence."""

    @cute.jit
    def seen(self, token: Int32, key: Int32) -> Boolean:
        """True if a token sees a key of the tile."""
        seen = self.first + key < self.num_keys
        if const_expr(self.keys.causal):
            seen = seen & (self.keys.last_token(self.first + key) <= token)
        return seen


class MaskOfKeys(NamedTuple):
    """Mask of a key tile."""

    needed: Boolean
    own_token: Int32
    """Token index of the warpgroup's first row."""
    tile: KeyTile

    @cute.jit
    def apply(self, P: cute.Tensor, tScS: cute.Tensor):
        if self.needed:
            for n, r, c in acc_coordinates(P):
                row, key = tScS[(c, r, n), 0, 0]
                seen = self.tile.seen(self.own_token + row, key)
                P[(c, r, n), 0, 0] = P[(c, r, n), 0, 0] if seen else Float32(0.0)


class MaskOfRows(NamedTuple):
    """Mask of a row tile; its first row is read while its scores are being computed."""

    sRow: cute.Tensor  # int32 (STAGES)
    stage: Int32
    num_rows: Int32
    tokens: TokensOfRows
    tile: KeyTile
    """Key tile of the warpgroup."""

    @cute.jit
    def apply(self, P: cute.Tensor, tScS: cute.Tensor):
        first_row, first_key = self.sRow[self.stage], self.tile.first
        needed = (first_row + TILE > self.num_rows) | (first_key + TILE > self.tile.num_keys)
        own_token = self.tokens.token(first_row)
        if const_expr(self.tile.keys.causal):
            needed = needed | (self.tile.keys.last_token(first_key + TILE - 1) > own_token)
        if needed:
            for n, r, c in acc_coordinates(P):
                key, row = tScS[(c, r, n), 0, 0]
                seen = (first_row + row < self.num_rows) & self.tile.seen(own_token + row, key)
                P[(c, r, n), 0, 0] = P[(c, r, n), 0, 0] if seen else Float32(0.0)


class SelectedDQ(BackwardDQ):
    """dQ of the selected branch. Roles and pipelines: BackwardDQ.

    Args: dim: head dim. dtype: 16-bit type. keys: visibility of keys. tile: rows per query tile.
    """

    def __init__(self, dim: int, dtype: Any, keys: Keys, tile: int) -> None:
        super().__init__(dim, dtype)
        self.keys, self.tile = keys, tile

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, keys: Keys, tile: int, continues: bool, packed: bool) -> Kernel:
        return compile_kernel(
            SelectedDQ(dim, CUTE_DTYPES[dtype], keys, tile),
            *fake_heads(dtype, dim, dim, dim, dim),
            *fake_stats(2),
            *fake_lists(),
            fake(dtype, None, None, None, dim),
            Float32(0.0),
            Int32(0) if continues else None,
            fake_rows() if packed else None,
        )

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
        first_token: Int32 | None,  # token index of row 0 (None = 0)
        mShifts: cute.Tensor | None,  # int32 [query tiles]: added to token indices
        stream: Any,
    ):
        self.kernel(
            self.tma_tensors(mQ, mdO, mK, mV, mdQ),
            (mLse, mDelta),
            (mMaskCount, mMaskIndex, mFullCount, mFullIndex),
            mQ.shape[1],
            mK.shape[1],
            mQ.shape[2] // mK.shape[2],
            scale,
            first_token,
            mShifts,
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
        stats: Stats,
        lists: tuple[cute.Tensor, ...],  # BlockLists
        num_rows: Int32,
        num_keys: Int32,
        group: Int32,
        scale: Float32,
        first_token: Int32 | None,
        mShifts: cute.Tensor | None,
        mma: Mmas,
    ):
        work, warp = WorkTile(*cute.arch.block_idx()), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        query_tile = work.tile * CTA_ROWS // self.tile

        mMaskCount, mMaskIndex, mFullCount, mFullIndex = lists
        shared = self.allocate()
        key_tiles = ListedKeyTiles(
            mMaskCount[work.batch, work.head, query_tile],
            mFullCount[work.batch, work.head, query_tile],
            mMaskIndex[work.batch, work.head, query_tile, None],
            mFullIndex[work.batch, work.head, query_tile, None],
        )
        inputs = Inputs(tma, (stats,), num_rows, group, scale, mma)
        seen = Seen(TokensOfRows(first_token, mShifts, self.tile), num_keys)
        self.run_roles(warp, inputs, shared, work, key_tiles, seen)

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDQ,
        work: WorkTile,
        key_tiles: ListedKeyTiles,
        seen: Seen,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, Any]:
        keys_ready = shared.keys_ready
        first_row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        own_token = seen.tokens.token(first_row)
        dQ = self.accumulator(inputs.mma)  # fp32 [TILE rows, D]
        op = self.partition(inputs, shared, work, consumer)
        state = consumer_state(STAGES)
        for i in cutlass.range(key_tiles.num_tiles(), unroll=1):
            masked, first_key = i < key_tiles.masked, Int32(0)
            if masked:
                first_key = key_tiles.gMask[i] * TILE
            keys_ready.consumer_wait(state)
            mask = MaskOfKeys(masked, own_token, KeyTile(self.keys, first_key, seen.num_keys))
            self.add_key_tile(dQ, op, state.index, mask, inputs)
            keys_ready.consumer_release(state)
            state.advance()
        return dQ, state


class SelectedDKV(BackwardDKV):
    """dK and dV of the selected branch. Roles and pipelines: BackwardDKV.

    With one key tile the consumers alternate between stages and exchange their sums at the end. With two, each consumer
    has its own key tile and both read every stage.

    Args: dim: head dim. dtype: 16-bit type. keys: visibility of keys. size: keys per block. tile: rows per query tile.
    """

    def __init__(self, dim: int, dtype: Any, keys: Keys, size: int, tile: int) -> None:
        super().__init__(dim, dtype, key_tiles=1 if size % CTA_KEYS else CONSUMERS, branches=1, listed=True)
        self.keys, self.tile = keys, tile
        self.block_ctas = size // TILE // self.key_tiles
        """CTAs per block, consecutive along its keys."""
        self.turns = CONSUMERS // self.key_tiles
        """Number of consumers that alternate between stages."""
        self.steps = tile // TILE
        """Row tiles per query tile."""

    @staticmethod
    @compiled_once
    def compile(
        dim: int, dtype: torch.dtype, keys: Keys, size: int, tile: int, continues: bool, packed: bool
    ) -> Kernel:
        return compile_kernel(
            SelectedDKV(dim, CUTE_DTYPES[dtype], keys, size, tile),
            *fake_heads(dtype, dim, dim, dim, dim),
            *fake_stats(2),
            fake_table(),
            fake_query_tiles(),
            fake_table(),
            *fake_heads(dtype, dim, dim),
            _fake_partials(dim, size),
            Float32(0.0),
            Int32(0) if continues else None,
            fake_rows() if packed else None,
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N_k, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mCumCounts: cute.Tensor,  # SelectedWorklist
        mQueryTiles: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mdK: cute.Tensor,  # [B, N_k, H_kv, D]
        mdV: cute.Tensor,
        mPartials: cute.Tensor,  # fp32 [work tiles of split blocks, key tiles of a block, 2, TILE, D]: dK and dV
        scale: Float32,
        first_token: Int32 | None,  # token index of row 0 (None = 0)
        mShifts: cute.Tensor | None,  # int32 [query tiles]: added to token indices
        stream: Any,
    ):
        self.kernel(
            self.tma_tensors(mQ, mdO, mK, mV, mdK, mdV),
            (mLse, mDelta),
            mCumCounts,
            mQueryTiles,
            mWorkTiles,
            mPartials,
            mQ.shape[1],
            mK.shape[1],
            mK.shape[2],
            mQ.shape[2] // mK.shape[2],
            scale,
            first_token,
            mShifts,
            self.mmas(),
        ).launch(
            grid=[mWorkTiles.shape[1] * self.block_ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        stats: Stats,
        mCumCounts: cute.Tensor,
        mQueryTiles: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mPartials: cute.Tensor,
        num_rows: Int32,
        num_keys: Int32,
        kv_heads: Int32,
        group: Int32,
        scale: Float32,
        first_token: Int32 | None,
        mShifts: cute.Tensor | None,
        mma: Mmas,
    ):
        work_index, _, _ = cute.arch.block_idx()
        worklist_index, block_cta = work_index // self.block_ctas, work_index % self.block_ctas
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        num_split_tiles, num_tiles = num_work_tiles(mCumCounts)
        listed_block, first, query_tiles = Int32(0), Int32(0), Int32(0)
        if worklist_index < num_tiles:
            listed_block = mWorkTiles[BLOCK, worklist_index]
            first, query_tiles = mWorkTiles[FIRST, worklist_index], mWorkTiles[COUNT, worklist_index]
        batch, kv_head, block = block_coordinates(listed_block, kv_heads, stats[0])
        work = WorkTile(block * self.block_ctas + block_cta, kv_head, batch)

        if (worklist_index < num_tiles) & (work.tile * self.key_tiles * TILE < num_keys):
            self.run_roles(
                warp,
                Inputs(tma, (stats,), num_rows, group, scale, mma),
                work,
                ListedQueryTiles(mQueryTiles, first, query_tiles),
                Seen(TokensOfRows(first_token, mShifts, self.tile), num_keys),
                SplitTile(worklist_index, block_cta, num_split_tiles, mPartials),
            )

    def rows_to_load(self, inputs: Inputs, row_tiles: ListedQueryTiles) -> RowsToLoad:
        gQueryTiles = cute.domain_offset((row_tiles.first,), row_tiles.mQueryTiles)
        return RowsToLoad(gQueryTiles, row_tiles.num, cute.ceil_div(inputs.num_rows, self.tile))

    @cute.jit
    def load(self, inputs: Inputs, shared: SharedDKV, work: WorkTile, rows: RowsToLoad):
        """Producer warp 0: load K and V once, then Q and dO of every query tile, one row tile at a time."""
        state = producer_state(STAGES)
        load_rows, load_keys = self.tma_loads(inputs.tma, shared)
        keys_ready, rows_ready, group, tiles = shared.keys_ready, shared.rows_ready, inputs.group, rows.tiles
        barrier = producer_acquire(keys_ready, producer_state(1))
        for i in range_constexpr(self.key_tiles):
            load_keys((work.tile * self.key_tiles + i, work.head, work.batch), i, barrier)
        for i in cutlass.range(rows.num, unroll=1):
            head_and_tile = rows.gQueryTiles[i]
            head, tile = work.head * group + head_and_tile // tiles, head_and_tile % tiles
            for step in cutlass.range(self.steps, unroll=1):
                row_tile = tile * self.steps + step
                load_rows((row_tile, head, work.batch), state.index, producer_acquire(rows_ready, state))
                state.advance()

    @cute.jit
    def load_stats(self, inputs: Inputs, shared: SharedDKV, work: WorkTile, rows: RowsToLoad):
        """Producer warps 1 and 2: load lse and delta of every row, and the first row of every stage.

        Statistics of two row tiles are loaded together, before the stage of the first one is empty.
        """
        thread, _, _ = cute.arch.thread_idx()
        sLse, sDelta, rows_ready = shared.sLse, shared.sDelta, shared.rows_ready
        ((mLse, mDelta),), group, tiles = inputs.branches, inputs.group, rows.tiles
        state = producer_state(STAGES)
        row = thread - LANES  # within a row tile
        rLse, rDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)  # fp32 (row tile)
        for i in cutlass.range(rows.num, unroll=1):
            head_and_tile = rows.gQueryTiles[i]
            head, tile = work.head * group + head_and_tile // tiles, head_and_tile % tiles
            for step in cutlass.range(0, self.steps, 2, unroll=1):
                first_row = tile * self.tile + step * TILE
                for j in range_constexpr(2):
                    rLse[j], rDelta[j] = load_row_stats(
                        mLse[work.batch, head, None],
                        mDelta[work.batch, head, None],
                        first_row + j * TILE + row,
                        inputs.num_rows,
                    )
                for j in range_constexpr(2):
                    stage = state.index
                    rows_ready.sync_object_empty.wait(stage, state.phase)
                    sLse[row, 0, stage] = rLse[j]
                    sDelta[row, 0, stage] = rDelta[j]
                    if row == 0:
                        shared.sRow[stage] = first_row + j * TILE
                    cute.arch.mbarrier_arrive(rows_ready.producer_get_barrier(state))
                    state.advance()

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        row_tiles: ListedQueryTiles,
        seen: Seen,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        rows_ready = shared.rows_ready
        own_tile = self.own_key_tile(consumer)
        first_key = (work.tile * self.key_tiles + own_tile) * TILE
        op = self.partition(inputs.mma, shared, own_tile, consumer)
        dK, dV = self.accumulators(inputs.mma)  # fp32 [TILE keys, D]
        shared.keys_ready.consumer_wait(consumer_state(1))
        first_stage = consumer.warpgroup if const_expr(self.turns > 1) else Int32(0)
        state = pipeline.PipelineState(STAGES, Int32(0), first_stage, Int32(0))
        key_tile = KeyTile(self.keys, first_key, seen.num_keys)
        for _ in cutlass.range(row_tiles.num * (self.steps // self.turns), unroll=1):
            rows_ready.consumer_wait(state)
            mask = MaskOfRows(shared.sRow, state.index, inputs.num_rows, seen.tokens, key_tile)
            self.add_row_tile(dK, dV, op, state.index, mask, inputs)
            rows_ready.consumer_release(state)
            for _ in range_constexpr(self.turns):
                state.advance()
        return dK, dV

    def own_key_tile(self, consumer: Consumer) -> Any:
        """Index of a consumer's key tile within its CTA."""
        return consumer.warpgroup if self.key_tiles > 1 else 0

    @cute.jit
    def exchange(self, dK: cute.Tensor, dV: cute.Tensor, sQ: cute.Tensor, consumer: Consumer):
        """Add the sums of both consumers: afterwards the first has all of dV, the second all of dK.

        They are exchanged through the stages of Q and dO.
        """
        # Both consumers have read the last stage
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP_THREADS)
        values = const_expr(TILE * self.dim // WARPGROUP_THREADS)
        exchanged = cute.make_layout(
            (4, values // 4, WARPGROUP_THREADS, 2),
            stride=(1, 4 * WARPGROUP_THREADS, 4, values * WARPGROUP_THREADS),
        )
        # fp32 (4, values / 4, thread, 2): dK of the first consumer and dV of the second
        sSum = cute.make_tensor(cute.recast_ptr(sQ.iterator, dtype=Float32), exchanged)
        other = cute.make_rmem_tensor((4, values // 4), Float32)  # fp32, one of the other consumer's sums
        if consumer.warpgroup == 0:
            cute.autovec_copy(cute.make_tensor(dK.iterator, other.layout), sSum[None, None, consumer.thread, 0])
        else:
            cute.autovec_copy(cute.make_tensor(dV.iterator, other.layout), sSum[None, None, consumer.thread, 1])
        # Both have written the sums that they exchange
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP_THREADS)
        if consumer.warpgroup == 0:
            cute.autovec_copy(sSum[None, None, consumer.thread, 1], other)
            dV.store(dV.load() + cute.make_tensor(other.iterator, dV.layout).load())
        else:
            cute.autovec_copy(sSum[None, None, consumer.thread, 0], other)
            dK.store(dK.load() + cute.make_tensor(other.iterator, dK.layout).load())

    @cute.jit
    def epilogue(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        target: SplitTile,
        consumer: Consumer,
    ):
        if const_expr(self.turns > 1):
            self.exchange(dK, dV, shared.sQ, consumer)
        if target.index < target.num_split:
            self.store_partials(dK, dV, inputs.mma, target, consumer)
        else:
            self.store_block(dK, dV, inputs, shared, work, consumer)

    @cute.jit
    def store_partials(self, dK: cute.Tensor, dV: cute.Tensor, mma: Mmas, target: SplitTile, consumer: Consumer):
        """Store the fp32 partial of a work tile of a split block to global memory, unscaled."""
        thr_dkv = mma.gradients.get_slice(consumer.thread)
        key_tile = target.block_cta * self.key_tiles + self.own_key_tile(consumer)
        if (consumer.warpgroup == 0) | (self.key_tiles > 1):
            cute.autovec_copy(dV, thr_dkv.partition_C(target.mPartials[target.index, key_tile, 1, None, None]))
        if (consumer.warpgroup == 1) | (self.key_tiles > 1):
            cute.autovec_copy(dK, thr_dkv.partition_C(target.mPartials[target.index, key_tile, 0, None, None]))

    @cute.jit
    def store_block(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        consumer: Consumer,
    ):
        """Round dV and dK of a whole block into the shared memory of V and K, then store them by TMA."""
        tma_dk, tma_dv = inputs.tma.gradients
        sK, sV, mma_dkv = shared.sK, shared.sV, inputs.mma.gradients
        own_tile, barrier = self.own_key_tile(consumer), 2 + consumer.warpgroup
        place = work.tile * self.key_tiles + own_tile, work.head, work.batch
        if const_expr(self.turns == 1):  # all warps of the consumer have read its keys
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
        # Named barrier 2 or 3, in store_acc_for_tma: the consumer has written a result for TMA
        if (consumer.warpgroup == 0) | (self.key_tiles > 1):
            store_acc_for_tma(mma_dkv, dV, sV[None, None, own_tile], consumer.thread, barrier)
            if consumer.warp % WARPGROUP_WARPS == 0:
                tma_store(place, own_tile, (tma_dv, sV))
        if (consumer.warpgroup == 1) | (self.key_tiles > 1):
            dK.store(dK.load() * inputs.scale)
            store_acc_for_tma(mma_dkv, dK, sK[None, None, own_tile], consumer.thread, barrier)
            if consumer.warp % WARPGROUP_WARPS == 0:
                tma_store(place, own_tile, (tma_dk, sK))


class CombineSelectedDKV:
    """Sum the partials of a block that was split. Each split's CTA sums a chunk of the block's elements.

    Args: dim: head dim. size: keys per block.
    """

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.block_tiles = dim, size // TILE

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, size: int) -> Kernel:
        tables = [fake_table() for _ in range(3)]
        outputs = fake_heads(dtype, dim, dim)
        return compile_kernel(CombineSelectedDKV(dim, size), *tables, _fake_partials(dim, size), *outputs, Float32(0.0))

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # SelectedWorklist
        mCumCounts: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mPartials: cute.Tensor,  # fp32 [work tiles of split blocks, key tiles of a block, 2, TILE, D]: dK and dV
        mdK: cute.Tensor,  # [B, N_k, H_kv, D]
        mdV: cute.Tensor,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(mCounts, mCumCounts, mWorkTiles, mPartials, mdK, mdV, scale).launch(
            grid=[mPartials.shape[0], 1, 1], block=[combine_splits.THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCounts: cute.Tensor,
        mCumCounts: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mPartials: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        worklist_index, _, _ = cute.arch.block_idx()
        num_split_tiles, _ = num_work_tiles(mCumCounts)
        if worklist_index < num_split_tiles:
            listed_block = mWorkTiles[BLOCK, worklist_index]
            splits = mCounts[SPLITS, listed_block]
            first = mCumCounts[SPLITS, listed_block] - splits
            num_keys, kv_heads = mdK.shape[1], mdK.shape[2]
            batch, kv_head, block = block_coordinates(listed_block, kv_heads, mdK)
            width = const_expr(FLOATS)
            vectors = const_expr(self.block_tiles * 2 * TILE * self.dim // width)
            rSum = cute.make_rmem_tensor(width, Float32)  # fp32 [FLOATS], one vector of a key
            rOut = cute.make_rmem_tensor(width, mdK.element_type)  # 16 bits [FLOATS]
            chunk = worklist_index - first
            stop = chunk_start(chunk + 1, splits, vectors)
            start = chunk_start(chunk, splits, vectors) + thread
            for vector in cutlass.range(start, stop, combine_splits.THREADS, unroll=1):
                column, row = vector % (self.dim // width), vector // (self.dim // width)
                key_tile, which, key = row // (2 * TILE), row // TILE % 2, row % TILE
                token = block * (self.block_tiles * TILE) + key_tile * TILE + key
                if token < num_keys:  # key tiles past the last key have no partials
                    rSum.fill(0.0)
                    partial_row = partial(self.partial_row, mPartials, first, key_tile, which, key)
                    add_partials(rSum, partial_row, column, splits)
                    if which == 0:
                        rOut.store((rSum.load() * scale).to(mdK.element_type))
                        gOut = cute.local_tile(mdK[batch, token, kv_head, None], (width,), (column,))
                        cute.autovec_copy(rOut, gOut)
                    else:
                        rOut.store(rSum.load().to(mdK.element_type))
                        gOut = cute.local_tile(mdV[batch, token, kv_head, None], (width,), (column,))
                        cute.autovec_copy(rOut, gOut)

    def partial_row(
        self, mPartials: cute.Tensor, first: Int32, key_tile: Int32, which: Int32, key: Int32, start: Int32, i: int
    ) -> cute.Tensor:
        """Row of dK or dV in the partial of split start + i, for the block whose first split is work tile `first`."""
        return mPartials[first + start + i, key_tile, which, key, None]


def _fake_partials(dim: int, size: int) -> Any:
    return fake(torch.float32, None, size // TILE, 2, TILE, dim)


def worklist_sizes(query_tiles: int, most: int, blocks: int, partial_bytes: int) -> WorklistSizes:
    """Bound the worklist.

    It has at most B*H*tiles*k query tiles. That number divided by the minimum per work tile bounds the work tiles of
    split blocks, and every other block has one. 4M tokens, 8 heads, 2 key/value heads, k=16: 2.1 million query tiles,
    8192 work tiles of at least 256 query tiles with partials of 64 KiB each (WORKSPACE_BYTES), 17 MB of lists.

    Args:
        query_tiles: selected query tiles of all blocks.
        most: maximum query tiles of one block.
        blocks: number of blocks.
        partial_bytes: bytes per partial.
    """
    return WorklistSizes.bound(
        query_tiles, most, blocks, max(MIN_QUERY_TILES, -(-query_tiles * partial_bytes // WORKSPACE_BYTES))
    )


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
    keys: Keys,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    first_token: int = 0,
    shifts: Tensor | None = None,
) -> None:
    """Gradients of attention to selected KV blocks. Bitwise reproducible.

    Args:
        q, do: `[B,N,H,D]`, bf16 or fp16, rows aligned (device.vectorizable); every row of `do` must be finite.
        k, v: `[B,N_k,H_kv,D]`, dtype and alignment as q.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Shifted by -log(g) if a gate g weights the row. Not
            finite if the row has no keys.
        delta: fp32 `[B,H,N]`, last dimension contiguous: sum(do * o), with o before gating. Not read where lse is not
            finite.
        lists: from query_to_kv.chosen_lists, with `width` TILE: query tiles of T = `lists.rows` rows.
        bits: int32 `[B,S,ceil(N_k/size),words]`, the same selection in the layout of selected_worklist. S is H_kv or H.
        size: l', keys of a block, a multiple of TILE.
        keys: visibility of keys.
        scale: softmax scale.
        into: dq, dk and dv, like q, k and v, outputs; zero for rows without keys and keys without rows.
        first_token: token index of row 0, if the rows continue a sequence.
        shifts: Documents.key_shifts if the rows continue documents; Documents.shifts for entries.

    Raises:
        ValueError: if `lists.width` is not TILE, or l' is not a multiple of TILE.
    """
    if lists.width != TILE or size % TILE:
        raise ValueError(f"lists.width must be {TILE} and size a multiple of {TILE}, got {lists.width} and {size}")
    if q.numel() == 0 or k.numel() == 0:
        for x in into:
            x.zero_()
        return
    dq, dk, dv = into
    given = q, k, v, do, lse, delta, lists
    how: dict[str, Any] = {"keys": keys, "scale": scale, "first_token": first_token, "shifts": shifts}
    selected_dq(*given, **how, dq=dq)
    selected_dkv(*given, bits, size=size, **how, dk=dk, dv=dv)


def selected_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    *,
    keys: Keys,
    scale: float,
    first_token: int = 0,
    shifts: Tensor | None = None,
    dq: Tensor,
) -> None:
    """dQ of `selected_backward`, for at least one row and one key."""
    run = SelectedDQ.compile(q.shape[-1], q.dtype, keys, lists.rows, first_token > 0, shifts is not None).run
    run(q, do, k, v, lse, delta, *lists.tensors, dq, scale, first_token or None, shifts)


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
    keys: Keys,
    scale: float,
    first_token: int = 0,
    shifts: Tensor | None = None,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """dK and dV of `selected_backward`, for at least one row and one key."""
    batch, rows, heads, dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    tile, group, block_tiles = lists.rows, heads // kv_heads, size // TILE
    tiles, blocks = -(-rows // tile), batch * kv_heads * -(-num_keys // size)
    selected = -(-lists.mask_index.shape[3] // block_tiles)  # lists have room for every block that a tile selected
    partial_shape = block_tiles, 2, TILE, dim
    sizes = worklist_sizes(batch * heads * tiles * selected, group * tiles, blocks, 4 * math.prod(partial_shape))
    worklist = selected_worklist(bits, kv_heads=kv_heads, group=group, tiles=tiles, sizes=sizes)
    partials = torch.empty((max(sizes.split_tiles, 1), *partial_shape), dtype=torch.float32, device=q.device)
    run = SelectedDKV.compile(dim, q.dtype, keys, size, tile, first_token > 0, shifts is not None).run
    run(q, do, k, v, lse, delta, *worklist[1:], dk, dv, partials, scale, first_token or None, shifts)
    if sizes.split_tiles > 0:
        counts, cum_counts, _, work_tiles = worklist
        CombineSelectedDKV.compile(dim, q.dtype, size).run(counts, cum_counts, work_tiles, partials, dk, dv, scale)
