"""Backward of token mode, KV-outer: a CTA keeps keys and gathers the rows that selected them. Deterministic.

    S_ij = scale q_i . k_j            P_ij = exp(S_ij - lse_i), 0 where i does not see j
    dP_ij = dO_i . v_j                dS_ij = P_ij (dP_ij - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

A gate g_i is applied by shifting its row's lse by -log(g_i): P is then g_i times the softmax. P = 0 if lse is not
finite. Sums are fp32. P and dS are rounded to 16 bits before they are multiplied, and so are the partials of dQ.

KVOuterBackward       a CTA owns 64 keys of a KV block and a work tile of the tokens that selected the block
                      (lists/worklist.py). It gathers their rows of Q and dO, G per token as in pack_gqa, 64 at a time.
                      dK and dV stay in registers; dQ goes to a 16-bit partial of the token's slot. By mma.sync.
KVOuterBackwardWGMMA  the same by WGMMA, on Hopper. Products are transposed: P^T and dS^T are A operands in registers.
CombinePartials       (combine.py) sums the partials of dQ in the order of a token's slots; for NSA
                      CombineQueryGradients, with the other terms of dQ.
CombineDKV            sums dK and dV of blocks that were split into work tiles, in order.

Tokens are processed in chunks, which bounds the memory of the partials. Chunks alternate between two side streams
(runtime/streams.py), because building a worklist, combining, and the last CTAs of a chunk leave most SMs idle. Each
stream has its own fp32 dK and dV of all tokens, to which its chunks add one after the other. There are no atomics.

Floor: 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 5.5 TFLOP, 9.2 ms at 600 TFLOP/s (mma.sync), 6.1 ms at 900
(WGMMA). Concurrently, 34 GB of dQ partials are written and read, 8.2 ms at 4.2 TB/s, and 34 GB of Q and dO are
gathered, from L2 when cached, otherwise in another 8.2 ms. Shared memory: for 64 rows mma.sync moves 330 KB in 2,560
cycles, 11.6 ms in all; WGMMA moves 160 KB in 1,280 cycles, as many as its products need.

Limits: sm_90a and sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; n T G D l' / 64 < 2^34 for the T
tokens of a chunk; q and dO of neighboring tokens less than 2^15 elements apart; 64-bit offsets; rows 16-byte aligned;
q, k, v and dO finite in every gathered row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from cute_kernels.attend import combine_splits
from cute_kernels.attend.checks import check_token_attention
from cute_kernels.attend.combine import combine_partials, combine_query_gradients
from cute_kernels.attend.combine_splits import add_partials, chunk_start
from cute_kernels.attend.views import block_bounds, group_heads
from cute_kernels.attend.window_backward import LocalSelected
from cute_kernels.attend.window_dq_combine import WindowQueries, window_dq_combine
from cute_kernels.gate.forward import BRANCHES
from cute_kernels.gate.sums import QueryTerms
from cute_kernels.lists.worklist import (
    BLOCK,
    COUNT,
    FIRST,
    SPLITS,
    fake_packed,
    fake_query_rows,
    fake_tiles,
    num_work_tiles,
    packed_tables,
    position_of,
    worklist_chunks,
)
from cute_kernels.mma import wgmma
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
from cute_kernels.mma.smem import SMEM_CARVEOUT
from cute_kernels.mma.warp import LANES, LOG2_E, probability
from cute_kernels.pool.documents import PackedBlocks
from cute_kernels.runtime.device import has_warpgroups, vectorized
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import (
    CUTE_DTYPES,
    FLOATS,
    VECTOR,
    Kernel,
    compile_kernel,
    compiled_once,
    fake,
    fake_heads,
    fake_stats,
)
from cute_kernels.runtime.streams import STREAMS, SideStreams

TILE = 64
"""Keys of a CTA, and gathered rows of a tile."""

ROW_WARPS = 2
COLUMN_WARPS = 2
"""mma.sync: 2 x 2 warps share the rows and columns of every accumulator."""

THREADS = ROW_WARPS * COLUMN_WARPS * LANES
CTAS_PER_SM = 2

STAGES = 2
"""Tiles of Q and dO in shared memory: one is multiplied while the next one is gathered."""

PARTIAL_BYTES = 512 << 20
"""Size of a chunk's dQ partials; two chunks are live at a time."""

MIN_TILE_ROWS = 4096
"""Minimum rows, G per token, per work tile of a split block."""


class WorkTile(NamedTuple):
    """Coordinates of a CTA."""

    index: Int32
    """Index in the worklist."""
    kv_head: Int32
    batch: Int32
    key_tile: Int32
    """Index of the CTA's TILE keys within the KV block."""


class KeyGradients(NamedTuple):
    """Sums of dK and dV of earlier chunks, and partials of blocks that are split."""

    mdK: cute.Tensor  # fp32 [B, N, H_kv, D]
    mdV: cute.Tensor  # fp32 [B, N, H_kv, D_v]
    mdKPartial: cute.Tensor  # fp32 [B, H_kv, work tiles of split blocks, l', D]
    mdVPartial: cute.Tensor  # fp32 [B, H_kv, work tiles of split blocks, l', D_v]


class Rows(NamedTuple):
    """Gathered rows of a work tile: row i is head i % G of the (i // G)-th token that selected the block."""

    gQueryRows: cute.Tensor  # int32 [tokens of the work tile]: token * n + slot
    gQ: cute.Tensor  # [T, G, D]
    gdO: cute.Tensor  # [T, G, D_v]
    gLse: cute.Tensor  # fp32 [G, T]
    gDelta: cute.Tensor  # fp32 [G, T]
    num_rows: Int32
    first_token: Int32  # token index of the first of T; with mPositions, its row there
    mPositions: cute.Tensor | None


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    sQK: cute.Tensor  # (TILE, D, STAGES + 1): stages of Q, then K
    sdOV: cute.Tensor  # (TILE, D_v, STAGES + 1): stages of dO, then V
    sPdS: cute.Tensor  # (TILE, TILE, 2): P and dS; WGMMA: (TILE, TILE, 1): dS^T
    sLse: cute.Tensor  # fp32 (TILE): per row of the tile being multiplied, in base 2
    sDelta: cute.Tensor  # fp32 (TILE)
    sLastKey: cute.Tensor  # int32 (TILE): last key that the row sees, relative to the CTA's first key
    sdQStart: cute.Tensor  # int32 (TILE): first vector of the row's dQ partial, -1 if the row doesn't exist
    sSlotIdx: cute.Tensor  # int32 (TILE): per row of the tile being gathered

    @property
    def sK(self) -> cute.Tensor:
        return self.sQK[None, None, STAGES]

    @property
    def sV(self) -> cute.Tensor:
        return self.sdOV[None, None, STAGES]


class KVOuterBackward:
    """dQ partials, dK and dV by mma.sync.

    All threads gather (cp.async), multiply and write. The next tile of rows is gathered while one is multiplied; a
    row's slot_idx is read one tile ahead of its gather. lse and delta of the next tile are held in registers. P and dS
    pass through shared memory.

    Args:
        dim, v_dim, dtype: D, D_v and their 16-bit type.
        group: G, query heads per key/value head.
        slots: n, slots per token.
        size: l', tokens per block.
    """

    row_warps = ROW_WARPS
    """Warps that share the rows of an accumulator: each has 16 of every 16 * row_warps rows."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.block_tiles = size // TILE
        """Key tiles per KV block."""

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
    ) -> Kernel:
        dim, v_dim = dims
        kernel = KVOuterBackwardWGMMA if warpgroups else KVOuterBackward
        return compile_kernel(
            kernel(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size),
            *fake_heads(dtype, dim, v_dim, dim, v_dim),
            *fake_stats(2),
            fake_query_rows(),
            *[fake_tiles() for _ in range(2)],
            fake(dtype, None, None, None, group, dim),
            *fake_heads(torch.float32, *dims),
            *[fake(torch.float32, None, None, None, size, columns) for columns in dims],
            *fake_packed(packed),
            Int32(0),
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mdO: cute.Tensor,  # [B, T, H, D_v]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mDelta: cute.Tensor,
        mQueryRows: cute.Tensor,  # Worklist.query_rows
        mWorkTiles: cute.Tensor,  # Worklist.work_tiles
        mCumCounts: cute.Tensor,  # Worklist.cum_counts
        mdQPartial: cute.Tensor,  # [B, H_kv, T n block_tiles, G, D]
        mdK: cute.Tensor,  # KeyGradients
        mdV: cute.Tensor,
        mdKPartial: cute.Tensor,
        mdVPartial: cute.Tensor,
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds and .positions
        mPositions: cute.Tensor | None,
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
            mQueryRows,
            mWorkTiles,
            mCumCounts,
            mdQPartial,
            KeyGradients(mdK, mdV, mdKPartial, mdVPartial),
            mBounds,
            mPositions,
            first_token,
            scale,
        ).launch(
            grid=[mWorkTiles.shape[3] * self.block_tiles, mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
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
        mQueryRows: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mCumCounts: cute.Tensor,
        mdQPartial: cute.Tensor,
        gradients: KeyGradients,
        mBounds: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work_index, kv_head, batch = cute.arch.block_idx()
        work = WorkTile(work_index // self.block_tiles, kv_head, batch, work_index % self.block_tiles)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Row i of a tile has two threads, i and TILE + i, which write its statistics
        tile_row, writer = thread % TILE, warp_index // (TILE // LANES)
        shared = self.allocate()

        split_tiles, work_tiles = num_work_tiles(mCumCounts[batch, kv_head, None, None])
        if work.index < work_tiles:
            gWorkTile = mWorkTiles[batch, kv_head, None, work.index]  # int32 [3]: BLOCK, FIRST, COUNT
            first_key, end = block_bounds(gWorkTile[BLOCK], self.size, mK.shape[1], mBounds)
            first_key += work.key_tile * TILE
            num_rows = gWorkTile[COUNT] * self.group
            rows = Rows(
                cute.domain_offset((gWorkTile[FIRST],), mQueryRows[batch, kv_head, None]),
                mQ[batch, None, kv_head, None, None],
                mdO[batch, None, kv_head, None, None],
                cute.domain_offset((kv_head * self.group, 0), mLse[batch, None, None]),
                cute.domain_offset((kv_head * self.group, 0), mDelta[batch, None, None]),
                num_rows,
                first_token,
                mPositions,
            )
            gdQPartial = mdQPartial[batch, kv_head, None, None, None]  # [T n block_tiles, G, D]
            # fp32 [TILE keys, D] and [TILE keys, D_v]
            dK, dV = self.make_acc_dkv(self.dim), self.make_acc_dkv(self.v_dim)
            dK.fill(0.0)
            dV.fill(0.0)
            if num_rows > 0:
                load_block(mK[batch, None, kv_head, None], shared.sK, first_key, end, thread, THREADS)
                load_block(mV[batch, None, kv_head, None], shared.sV, first_key, end, thread, THREADS)
                self.mainloop(rows, shared, dK, dV, gdQPartial, work, first_key, scale, tile_row, writer)
            self.epilogue(dK, dV, gradients, work, split_tiles, num_rows, first_key, end, scale)

    @cute.jit
    def mainloop(
        self,
        rows: Rows,
        shared: Shared,
        dK: cute.Tensor,
        dV: cute.Tensor,
        gdQPartial: cute.Tensor,  # [T n block_tiles, G, D]
        work: WorkTile,
        first_key: Int32,
        scale: Float32,
        tile_row: Int32,
        writer: Int32,  # 0 or 1: index among the two threads of a row
    ):
        """Gather and multiply all rows of the work tile, which has at least one."""
        num_rows = rows.num_rows

        # Prologue: gather tile 0
        slot_idx = self.load_slot_idx(rows, tile_row)
        if writer == 0:
            shared.sSlotIdx[tile_row] = slot_idx
        cute.arch.sync_threads()  # sSlotIdx of tile 0 is written
        self.gather(rows, shared, 0, Int32(0))
        cute.arch.cp_async_commit_group()
        lse, delta = self.load_stats(rows, slot_idx, tile_row)
        next_slot_idx = self.load_slot_idx(rows, TILE + tile_row)
        cute.arch.sync_threads()  # sSlotIdx of tile 0 is read: that of tile 1 may be written

        for first_row in cutlass.range(0, num_rows, TILE, unroll=1):
            # Statistics of this tile, slots of the next one
            exists = (first_row + tile_row < num_rows) & (lse > -Float32.inf) & (lse < Float32.inf)
            if writer == 0:
                shared.sLse[tile_row] = lse * LOG2_E if exists else Float32.inf
                row = rows.first_token + self.token_of(slot_idx)
                shared.sLastKey[tile_row] = position_of(row, rows.mPositions) - first_key
                shared.sSlotIdx[tile_row] = next_slot_idx
            else:
                shared.sDelta[tile_row] = delta if exists else Float32(0.0)
                row_coord = (slot_idx * self.block_tiles + work.key_tile, self.head_of(first_row + tile_row), 0)
                dq_start = Int32(cute.crd2idx(row_coord, gdQPartial.layout) // VECTOR)
                shared.sdQStart[tile_row] = dq_start if first_row + tile_row < num_rows else Int32(-1)
            cute.arch.cp_async_wait_group(0)
            self.fence_smem()
            # All copies of this tile have landed, its statistics and the next tile's sSlotIdx are written, and the last
            # tile is multiplied: its stage may be filled
            cute.arch.sync_threads()

            # Start S and dP  [TILE rows, TILE keys], then gather the next tile
            stage, next_stage = (Int32(Uint32(first_row) // TILE + i) % STAGES for i in range(2))
            S, dP = self.start_scores(shared, stage)
            if first_row + TILE < num_rows:
                self.gather(rows, shared, next_stage, first_row + TILE)
                slot_idx = next_slot_idx
                lse, delta = self.load_stats(rows, slot_idx, first_row + TILE + tile_row)
                next_slot_idx = self.load_slot_idx(rows, first_row + 2 * TILE + tile_row)
            cute.arch.cp_async_commit_group()
            self.mma(S, dP, dK, dV, shared, stage, as_vectors(gdQPartial), scale)

    # ---------------------------------------------------------------- load

    def token_of(self, slot_idx: Int32) -> Int32:
        return Int32(Uint32(slot_idx) // self.slots)

    def head_of(self, row: Int32) -> Int32:
        """Index of a row's head among the G query heads."""
        return Int32(Uint32(row) % self.group)

    @cute.jit
    def load_slot_idx(self, rows: Rows, row: Int32) -> Int32:
        """The row's token * n + slot. Past the end: that of the last row."""
        return rows.gQueryRows[Int32(Uint32(cutlass.min(row, rows.num_rows - 1)) // self.group)]

    @cute.jit
    def load_stats(self, rows: Rows, slot_idx: Int32, row: Int32) -> tuple[Float32, Float32]:
        """lse and delta of a row. Past the end: those of the last row."""
        head, token = self.head_of(cutlass.min(row, rows.num_rows - 1)), self.token_of(slot_idx)
        return rows.gLse[head, token], rows.gDelta[head, token]

    @cute.jit
    def gather(self, rows: Rows, shared: Shared, stage: Int32, first_row: Int32):
        """Start copying a tile of Q and of dO. Past the end: the last row."""
        for gX, sX in ((rows.gQ, shared.sQK), (rows.gdO, shared.sdOV)):
            sTile = sX[None, None, stage]  # [TILE rows, D or D_v]
            row = lane_row(sTile, THREADS)
            head = self.head_of(cutlass.min(first_row + row, rows.num_rows - 1))
            start = Int32(cute.crd2idx((self.token_of(shared.sSlotIdx[row]), head, 0), gX.layout) // VECTOR)
            gather_tile(as_vectors(gX), sTile, start, THREADS)

    def fence_smem(self) -> None:
        """Call before a barrier: make this thread's writes to shared memory visible to MMA. mma.sync needs no fence."""

    # ---------------------------------------------------------------- mma

    def allocate_tiles(self, smem: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """sQK, sdOV and sPdS of Shared."""
        sizes = (self.dim, STAGES + 1), (self.v_dim, STAGES + 1), (TILE, 2)
        layouts = [smem_tiles(TILE, columns, count) for columns, count in sizes]
        sQK, sdOV, sPdS = (smem.allocate_tensor(self.dtype, layout, SMEM_ALIGNMENT) for layout in layouts)
        return sQK, sdOV, sPdS

    def allocate(self) -> Shared:
        smem = SmemAllocator()
        tiles = self.allocate_tiles(smem)
        types = Float32, Float32, Int32, Int32, Int32
        return Shared(*tiles, *[smem.allocate_tensor(dtype, cute.make_layout(TILE), 16) for dtype in types])

    def make_acc_dkv(self, columns: int) -> cute.Tensor:
        """Allocate registers for dK or dV."""
        # Of two row warps: fp32 [TILE keys, columns / COLUMN_WARPS]
        return accumulator(make_warp_mma(self.dtype, ROW_WARPS), (TILE, columns // COLUMN_WARPS))

    def mn_view(self, acc: cute.Tensor) -> cute.Tensor:
        """View as (c, r, m, n), in the layout of `acc_mn_view`."""
        return acc_mn_view(acc)

    def start_scores(self, shared: Shared, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Accumulators of S and dP, whose products may be in flight. mma.sync: `mma` issues them."""
        # Of two row warps: fp32 [TILE rows, TILE / COLUMN_WARPS keys]
        mma = make_warp_mma(self.dtype, ROW_WARPS)
        return accumulator(mma, (TILE, TILE // COLUMN_WARPS)), accumulator(mma, (TILE, TILE // COLUMN_WARPS))

    @cute.jit
    def mma(
        self,
        acc_s: cute.Tensor,  # from start_scores
        acc_dp: cute.Tensor,
        dK: cute.Tensor,
        dV: cute.Tensor,
        shared: Shared,
        stage: Int32,
        gdQPartial: cute.Tensor,  # as returned by `as_vectors`
        scale: Float32,
    ):
        """All products of a tile of rows: add to dK and dV, write dQ."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma_thread = thread % (ROW_WARPS * LANES)
        column_warp, row_warp = warp_index // ROW_WARPS, warp_index % ROW_WARPS
        mma = make_warp_mma(self.dtype, ROW_WARPS)
        sQ, sdO = shared.sQK[None, None, stage], shared.sdOV[None, None, stage]  # [TILE rows, D], [TILE rows, D_v]
        sK, sV = shared.sK, shared.sV  # [TILE keys, D], [TILE keys, D_v]
        sP, sdS = shared.sPdS[None, None, 0], shared.sPdS[None, None, 1]  # [TILE rows, TILE keys]
        dq_start = self.load_dq_start(shared)

        # S = Q K^T, dP = dO V^T  [TILE rows, TILE keys]
        columns = TILE // COLUMN_WARPS
        acc_s.fill(0.0)
        acc_dp.fill(0.0)
        first = column_warp * (columns // MMA_K)
        gemm_smem(mma, mma_thread, acc_s, sQ, sK, first)
        gemm_smem(mma, mma_thread, acc_dp, sdO, sV, first)

        # S becomes P, dP becomes dS
        S, dP = acc_mn_view(acc_s), acc_mn_view(acc_dp)  # fp32 (c, r, m, n)
        masked = self.is_masked(shared)
        for m in range_constexpr(cute.size(S, mode=[2])):
            for r in range_constexpr(2):
                row = (m * ROW_WARPS + row_warp) * MMA_K + r * 8 + lane // QUAD
                lse, delta = shared.sLse[row], shared.sDelta[row]
                for n in range_constexpr(cute.size(S, mode=[3])):
                    for c in range_constexpr(2):
                        S[c, r, m, n] = probability(S[c, r, m, n], scale, lse)
                if masked:
                    last_key = shared.sLastKey[row]
                    for n in range_constexpr(cute.size(S, mode=[3])):
                        for c in range_constexpr(2):
                            key = column_warp * columns + n * 8 + lane % QUAD * 2 + c
                            S[c, r, m, n] = S[c, r, m, n] if key <= last_key else Float32(0.0)
                for n in range_constexpr(cute.size(S, mode=[3])):
                    for c in range_constexpr(2):
                        dP[c, r, m, n] = S[c, r, m, n] * (dP[c, r, m, n] - delta)
        store_acc(mma, mma_thread, acc_s, sP, first)
        store_acc(mma, mma_thread, acc_dp, sdS, first)
        cute.arch.sync_threads()  # P and dS are written; statistics and sSlotIdx are read and may be overwritten

        # dV += P^T dO, dK += dS^T Q  [TILE keys, D_v or D], dQ = dS K  [TILE rows, D]
        first = column_warp * (self.v_dim // COLUMN_WARPS // MMA_K)
        gemm_smem(mma, mma_thread, dV, transpose_view(sP), transpose_view(sdO), first, True, True)
        first = column_warp * (self.dim // COLUMN_WARPS // MMA_K)
        gemm_smem(mma, mma_thread, dK, transpose_view(sdS), transpose_view(sQ), first, True, True)
        dQ = accumulator(mma, (TILE, self.dim // COLUMN_WARPS))  # of two row warps: fp32 [TILE rows, D / COLUMN_WARPS]
        dQ.fill(0.0)
        gemm_smem(mma, mma_thread, dQ, sdS, transpose_view(sK), first, False, True)
        first_vector = column_warp * (self.dim // COLUMN_WARPS // VECTOR)
        self.store_dq(dQ, cute.domain_offset((0, first_vector), gdQPartial), dq_start, scale)

    def is_masked(self, shared: Shared) -> Any:
        """True unless every row of the tile sees all keys. Tokens ascend: if the first row sees all, every row does."""
        return shared.sLastKey[0] < TILE - 1

    # ---------------------------------------------------------------- store

    @cute.jit
    def load_dq_start(self, shared: Shared) -> Int32:
        """sdQStart: lane i holds that of the warp's i-th accumulator row."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = (lane // MMA_K * self.row_warps + warp_index % self.row_warps) * MMA_K + lane % MMA_K
        return shared.sdQStart[row % TILE]

    @cute.jit
    def store_dq(self, dQ: cute.Tensor, gdQPartial: cute.Tensor, dq_start: Int32, scale: Float32):
        """Scale and round dQ and write its rows. Args: see `store_rows`."""
        rounded = cute.make_rmem_tensor_like(dQ, self.dtype)  # 16 bits, as dQ
        rounded.store((dQ.load() * scale).to(self.dtype))
        store_rows(self.mn_view(rounded), gdQPartial, dq_start)

    @cute.jit
    def epilogue(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        gradients: KeyGradients,
        work: WorkTile,
        split_tiles: Int32,  # work tiles of split blocks, which come first
        num_rows: Int32,
        first_key: Int32,
        end: Int32,
        scale: Float32,
    ):
        """Write dK and dV as partials if the block is split, otherwise add them to the sums of earlier chunks."""
        mdK, mdV, mdKPartial, mdVPartial = gradients
        batch, kv_head = work.batch, work.kv_head
        keys = cutlass.min(end - first_key, TILE)
        dK.store(dK.load() * scale)
        if work.index < split_tiles:
            start = (work.key_tile * TILE, 0)
            # fp32 [l', D] and [l', D_v], from the CTA's keys on
            gdK = cute.domain_offset(start, mdKPartial[batch, kv_head, work.index, None, None])
            self.store_dkv(dK, gdK, TILE, False)
            gdV = cute.domain_offset(start, mdVPartial[batch, kv_head, work.index, None, None])
            self.store_dkv(dV, gdV, TILE, False)
        elif num_rows > 0:
            self.store_dkv(dK, cute.domain_offset((first_key, 0), mdK[batch, None, kv_head, None]), keys, True)
            self.store_dkv(dV, cute.domain_offset((first_key, 0), mdV[batch, None, kv_head, None]), keys, True)

    @cute.jit
    def store_dkv(self, acc: cute.Tensor, gX: cute.Tensor, keys: Int32, add: cutlass.Constexpr[bool]):
        """Write dK or dV to fp32 [keys, columns], or add to its contents."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        X = self.mn_view(acc)  # fp32 (c, r, m, n)
        _, _, row_tiles, column_tiles = X.shape
        rX, rBefore = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for m in range_constexpr(row_tiles):
            for r in range_constexpr(2):
                key = (m * self.row_warps + warp_index % self.row_warps) * MMA_K + r * 8 + lane // QUAD
                if key < keys:
                    for n in range_constexpr(column_tiles):
                        column_pair = (warp_index // self.row_warps * column_tiles + n) * QUAD + lane % QUAD
                        gPair = cute.local_tile(gX[key, None], (2,), (column_pair,))
                        for c in range_constexpr(2):
                            rX[c] = X[c, r, m, n]
                        if const_expr(add):
                            cute.autovec_copy(gPair, rBefore)
                            rX.store(rX.load() + rBefore.load())
                        cute.autovec_copy(rX, gPair)


class KVOuterBackwardWGMMA(KVOuterBackward):
    """dQ partials, dK and dV by a warpgroup's WGMMA (sm_90a). Barriers: KVOuterBackward.

    Products are transposed, S^T = K Q^T and dP^T = V dO^T: P^T and dS^T are A operands of dV and dK in registers. Only
    dS^T passes through shared memory, for dQ. S and dP are issued before the next tile is gathered.
    """

    row_warps = THREADS // LANES

    def allocate_tiles(self, smem: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        sizes = (self.dim, STAGES + 1), (self.v_dim, STAGES + 1), (TILE, 1)
        layouts = [wgmma.swizzled_tiles(self.dtype, columns, count) for columns, count in sizes]
        # (TILE, D, STAGES + 1), (TILE, D_v, STAGES + 1) and (TILE, TILE, 1)
        sQK, sdOV, sPdS = (wgmma.allocate_tiles(smem, self.dtype, layout) for layout in layouts)
        return sQK, sdOV, sPdS

    def make_acc_dkv(self, columns: int) -> cute.Tensor:
        return accumulator(self.make_mma(columns, wgmma.REGISTERS, wgmma.K, wgmma.MN), (TILE, columns))

    def mn_view(self, acc: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, 1, cute.size(acc) // 4)))

    def fence_smem(self) -> None:
        cute.arch.fence_view_async_shared()

    def make_mma(self, columns: int, source: Any, left: Any, right: Any) -> cute.TiledMma:
        """Args: columns of the accumulator; memory of A; major modes of A and B."""
        return wgmma.warpgroup_mma(self.dtype, columns, source, left, right)

    @cute.jit
    def start_scores(self, shared: Shared, stage: Int32):
        """Issue S^T = K Q^T and dP^T = V dO^T, one group each."""
        mma = self.make_mma(TILE, wgmma.SHARED, wgmma.K, wgmma.K)
        S, dP = accumulator(mma, (TILE, TILE)), accumulator(mma, (TILE, TILE))  # fp32 [TILE keys, TILE rows]
        for acc, tiles in ((S, shared.sQK), (dP, shared.sdOV)):
            left = wgmma.smem_operand_a(mma, tiles)[None, None, None, STAGES]  # K or V: [TILE keys, D or D_v]
            right = wgmma.smem_operand_b(mma, tiles)[None, None, None, stage]  # Q or dO: [TILE rows, D or D_v]
            wgmma.issue_mma(mma, acc, left, right, False)
        return S, dP

    @cute.jit
    def mma(
        self,
        S: cute.Tensor,
        dP: cute.Tensor,
        dK: cute.Tensor,
        dV: cute.Tensor,
        shared: Shared,
        stage: Int32,
        gdQPartial: cute.Tensor,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        sQK, sdOV, sdS = shared.sQK, shared.sdOV, shared.sPdS  # sdS: (TILE keys, TILE rows, 1)
        mma_s = self.make_mma(TILE, wgmma.SHARED, wgmma.K, wgmma.K)
        mma_dk = self.make_mma(self.dim, wgmma.REGISTERS, wgmma.K, wgmma.MN)
        mma_dv = self.make_mma(self.v_dim, wgmma.REGISTERS, wgmma.K, wgmma.MN)
        mma_dq = self.make_mma(self.dim, wgmma.SHARED, wgmma.MN, wgmma.MN)
        thr_s = mma_s.get_slice(thread)
        tdKrQ = wgmma.smem_operand_b(mma_dk, transpose_view(sQK))[None, None, None, stage]  # [D, TILE rows]
        tdVrdO = wgmma.smem_operand_b(mma_dv, transpose_view(sdOV))[None, None, None, stage]  # [D_v, TILE rows]
        tdQrdS = wgmma.smem_operand_a(mma_dq, transpose_view(sdS))[None, None, None, 0]  # [TILE rows, TILE keys]
        tdQrK = wgmma.smem_operand_b(mma_dq, transpose_view(sQK))[None, None, None, STAGES]  # [D, TILE keys]
        # (TILE keys, TILE rows): the same value for every key
        every_key = cute.make_layout((TILE, TILE), stride=(0, 1))
        stats = shared.sLse, shared.sDelta, shared.sLastKey
        stats_of_acc = [thr_s.partition_C(cute.make_tensor(x.iterator, every_key)) for x in stats]
        tSsLse, tSsDelta, tSsLastKey = (x[(None, 0, None), 0, 0] for x in stats_of_acc)  # (c, n)
        tScS = thr_s.partition_C(cute.make_identity_tensor((TILE, TILE)))  # (key, row)
        dq_start = self.load_dq_start(shared)
        masked = self.is_masked(shared)

        # S becomes P while dP is being computed; dV += P^T dO  [TILE keys, D_v]
        rLse = wgmma.broadcast_over_rows(tSsLse)  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        wgmma.scores_to_probabilities(S, scale, rLse)
        if masked:
            for n, r, c in wgmma.acc_coordinates(S):
                key, _ = tScS[(c, r, n), 0, 0]
                S[(c, r, n), 0, 0] = S[(c, r, n), 0, 0] if key <= tSsLastKey[c, n] else Float32(0.0)
        wgmma.issue_mma(mma_dv, dV, wgmma.acc_as_operand_a(mma_dv, S), tdVrdO, True)

        # P becomes dS while dV is being computed; dQ = dS K  [TILE rows, D], dK += dS^T Q  [TILE keys, D]
        rDelta = wgmma.broadcast_over_rows(tSsDelta)  # fp32 (c, r, n)
        warpgroup.wait_group(1)
        wgmma.score_gradients(S, S, dP, rDelta)
        rdS = wgmma.acc_as_operand_a(mma_dk, S)  # 16 bits [TILE keys, TILE rows]
        wgmma.stmatrix_tile(mma_s, cute.make_tensor(rdS.iterator, S.layout), sdS[None, None, 0], thread)
        self.fence_smem()
        cute.arch.sync_threads()  # dS^T is written; statistics and sSlotIdx are read and may be overwritten
        dQ = accumulator(mma_dq, (TILE, self.dim))  # fp32 [TILE rows, D]
        wgmma.issue_mma(mma_dq, dQ, tdQrdS, tdQrK, False)
        wgmma.issue_mma(mma_dk, dK, rdS, tdKrQ, True)

        # Write dQ while dK is being computed
        warpgroup.wait_group(1)
        self.store_dq(dQ, gdQPartial, dq_start, scale)
        warpgroup.wait_group(0)


class CombineDKV:
    """Add the fp32 partials of split blocks to dK or dV, in order. Each work tile's CTA sums a chunk of its block.

    Args: dim: columns of a key. size: l'.
    """

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.size = dim, size

    @staticmethod
    @compiled_once
    def compile(dim: int, size: int, packed: bool) -> Kernel:
        return compile_kernel(
            CombineDKV(dim, size),
            *[fake_tiles() for _ in range(3)],
            fake(torch.float32, None, None, None, size, dim),
            fake(torch.float32, None, None, None, dim),
            fake_packed(packed)[0],
        )

    @cute.jit
    def __call__(
        self,
        mCounts: cute.Tensor,  # Worklist.counts
        mCumCounts: cute.Tensor,  # Worklist.cum_counts
        mWorkTiles: cute.Tensor,  # Worklist.work_tiles
        mPartial: cute.Tensor,  # fp32 [B, H_kv, work tiles of split blocks, l', dim]
        mX: cute.Tensor,  # fp32 [B, N, H_kv, dim]
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds
        stream: Any,
    ):
        self.kernel(mCounts, mCumCounts, mWorkTiles, mPartial, mX, mBounds).launch(
            grid=[mPartial.shape[2], mPartial.shape[1], mPartial.shape[0]],
            block=[combine_splits.THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mCounts: cute.Tensor,
        mCumCounts: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mPartial: cute.Tensor,
        mX: cute.Tensor,
        mBounds: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work_tile, head, batch = cute.arch.block_idx()
        split_tiles, _ = num_work_tiles(mCumCounts[batch, head, None, None])
        if work_tile < split_tiles:
            block = mWorkTiles[batch, head, BLOCK, work_tile]
            tiles = mCounts[batch, head, SPLITS, block]
            first_tile = mCumCounts[batch, head, SPLITS, block] - tiles
            first_key, end = block_bounds(block, self.size, mX.shape[1], mBounds)
            width = const_expr(FLOATS)
            vectors = const_expr(self.size * self.dim // width)
            rSum = cute.make_rmem_tensor(width, Float32)  # fp32 [FLOATS], one vector of a key
            chunk = work_tile - first_tile
            stop = chunk_start(chunk + 1, tiles, vectors)
            start = chunk_start(chunk, tiles, vectors) + thread
            for vector in cutlass.range(start, stop, combine_splits.THREADS, unroll=1):
                key, column = vector // (self.dim // width), vector % (self.dim // width)
                if first_key + key < end:
                    gX = cute.local_tile(mX[batch, first_key + key, head, None], (width,), (column,))  # fp32 [FLOATS]
                    cute.autovec_copy(gX, rSum)
                    partial_row = partial(self.partial_row, mPartial, batch, head, first_tile, key)
                    add_partials(rSum, partial_row, column, tiles)
                    cute.autovec_copy(rSum, gX)

    def partial_row(
        self, mPartial: cute.Tensor, batch: Int32, head: Int32, first_tile: Int32, key: Int32, start: Int32, i: int
    ) -> cute.Tensor:
        """Row of a partial, as `add_partials` expects it."""
        return mPartial[batch, head, first_tile + start + i, key, None]


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
    into: tuple[Tensor, Tensor, Tensor],
    first_token: int = 0,
    packed: PackedBlocks | None = None,
    local: int = 0,
    terms: QueryTerms | None = None,
    window: WindowQueries | None = None,
) -> None:
    """Gradients of `kv_outer.kv_outer_forward`. Bitwise reproducible.

    Args:
        q, k, v, indices, size, scale, first_token, packed: as there; k and v hold no token after the last of q.
        do: `[B,T,H,D_v]`, bf16 or fp16 like q; finite.
        lse: fp32 `[B,H,T]`, natural log, last dimension contiguous. Rows whose lse is not finite have no gradients.
        delta: fp32 `[B,H,T]`, last dimension contiguous: sum(do * o), the term subtracted from dP. Not used where lse
            is not finite.
        into: dq, dk and dv, like q, k and v, outputs; zero for rows without keys and keys without rows.
        local: number of selected local blocks, ending with the token's own, to leave out.
        terms: other terms to add to dq, from up to two branches; dq may alias one of them. Needs at least one slot.
        window: also add to dq the gradients of the window and of the local blocks inside it
            (attend/window_dq_combine.py); with terms from up to one branch.

    Raises:
        ValueError: for shapes, dtypes and strides that the kernels do not support; for terms or a window that dq
            cannot hold.
    """
    check_token_attention(q, k, v, indices, size, scale, first_token, packed)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    if do.shape != (batch, tokens, heads, v_dim) or do.dtype != q.dtype or not vectorized(do):
        expected = f"{q.dtype} {[batch, tokens, heads, v_dim]} with rows at multiples of 16 bytes"
        raise ValueError(f"do must be {expected}, got {do.dtype} {[*do.shape]}, strides {do.stride()}")
    for name, x in (("lse", lse), ("delta", delta)):
        if x.shape != (batch, heads, tokens) or x.dtype != torch.float32 or (x.numel() > 0 and x.stride(2) != 1):
            expected = f"fp32 {[batch, heads, tokens]}, its last dimension contiguous"
            raise ValueError(f"{name} must be {expected}, got {x.dtype} {[*x.shape]}, strides {x.stride()}")
    group, slots, block_tiles = heads // kv_heads, indices.shape[3], size // TILE
    _check_terms(slots, size, terms, window)
    if q.numel() == 0 or slots == 0:
        for result in into:
            result.zero_()
        return
    run = KVOuterBackward.compile(
        (dim, v_dim), q.dtype, group, slots, size, packed is not None, has_warpgroups(q.device)
    ).run
    dkv_sums: list[list[Tensor]] = []  # fp32, of each stream
    with SideStreams(q.device) as streams:
        for chunk, (worklist, batches, kv_slice) in enumerate(
            worklist_chunks(
                indices,
                size=size,
                min_rows=-(-MIN_TILE_ROWS // group),
                token_bytes=slots * block_tiles * group * dim * q.element_size(),
                max_bytes=PARTIAL_BYTES,
                first_token=first_token,
                packed=packed,
                local=local,
            )
        ):
            streams.begin()
            if chunk < STREAMS:
                dkv_sums.append([torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)])
            pairs, split_tiles = worklist.query_rows.shape[:2], worklist.sizes.split_tiles
            dq_shape = *pairs, worklist.sizes.rows * block_tiles, group, dim
            dq_partial = torch.empty(dq_shape, dtype=q.dtype, device=q.device)
            dkv_partial = [
                torch.empty((*pairs, max(split_tiles, 1), size, columns), dtype=torch.float32, device=q.device)
                for columns in (dim, v_dim)
            ]
            head_slice = slice(kv_slice.start * group, kv_slice.stop * group)
            tokens_slice = worklist.tokens(first_token)
            dkv = [x[batches, :, kv_slice] for x in dkv_sums[chunk % STREAMS]]
            inputs = [
                *[x[batches, tokens_slice, head_slice] for x in (q, do)],
                *[x[batches, :, kv_slice] for x in (k, v)],
                *[x[batches, head_slice, tokens_slice] for x in (lse, delta)],
            ]
            with streams.run(worklist, dq_partial, dkv_partial, inputs):
                tables = worklist.query_rows, worklist.work_tiles, worklist.cum_counts
                run(
                    *inputs,
                    *tables,
                    dq_partial,
                    *dkv,
                    *dkv_partial,
                    *packed_tables(packed),
                    worklist.first_token,
                    scale,
                )
                if split_tiles > 0:
                    for x, x_partial in zip(dkv, dkv_partial, strict=True):
                        combine = CombineDKV.compile(x.shape[-1], size, packed is not None).run
                        bounds, _ = packed_tables(packed)
                        combine(worklist.counts, worklist.cum_counts, worklist.work_tiles, x_partial, x, bounds)
                rows = batches, tokens_slice, head_slice
                partials = worklist, dq_partial, into[0][rows]
                own_terms = None if terms is None else terms.narrow(*rows)
                if window is not None:
                    window_dq_combine(
                        *partials,
                        own_terms,
                        attended=(inputs[0], inputs[1], inputs[2], inputs[3]),
                        window=window.narrow(*rows),
                        local_selected=LocalSelected(inputs[4], inputs[5], size, local),
                        scale=scale,
                        partials_per_slot=block_tiles,
                    )
                elif own_terms is not None:
                    combine_query_gradients(*partials, own_terms, partials_per_slot=block_tiles)
                else:
                    combine_partials(*partials, partials_per_slot=block_tiles)
            del dq_partial, dkv_partial, inputs, worklist  # the stream holds them as long as it needs them
    for result, *stream_sums in zip(into[1:], *dkv_sums, strict=True):
        if len(stream_sums) > 1:
            torch.add(*stream_sums, out=result)
        else:
            result.copy_(stream_sums[0])


def _check_terms(slots: int, size: int, terms: QueryTerms | None, window: WindowQueries | None) -> None:
    """Raise unless the combine of the partials can add the other terms of dq."""
    if terms is None and window is None:
        return
    most = BRANCHES - 1 if window is None else 1
    branches = 0 if terms is None else len(terms.branches)
    if slots == 0 or branches > most:
        beside = "" if window is None else " beside a window"
        raise ValueError(f"dq cannot hold {branches} other branches{beside} with n = {slots} blocks of {size}")
