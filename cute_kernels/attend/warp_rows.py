"""Attention of query rows gathered by each warp to keys resident in its CTA: base class of the KV-outer kernels.

A CTA holds a few blocks of keys and values in shared memory and attends to them with query rows, tokens x G heads of a
key/value head (pack_gqa). All keys of a row are resident at once, so softmax needs no rescaling. KVOuterForward
(kv_outer.py) has one block, and rows from anywhere; ForcedForward (forced.py) has a few, and the tokens of one block.

    load          once: keys by cp.async; values with columns permuted
    mainloop      per warp, no barrier between warps, self.rows rows at a time:
      gather q    the next rows, by cp.async, while the current ones are processed
      mma_qk      S = Q K^T
      softmax     mask, P = softmax(scale S), lse
      mma_pv      O = P V, self.columns columns at a time
      epilogue    store o in 16 bits, or combine it with partials and gate it first (combine_rows.py)

With WGMMA (`warpgroups`, sm_90a) a warp processes 16 rows at a time, the four warps of a warpgroup issue their products
together, and q and P are register operands. With mma.sync each warp multiplies by itself, 32 rows, or 16 if there are
more than 64 keys.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; up to 256 keys; vectors of q, and of o, of a CTA less
than 2^31 apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attend.combine_rows import (
    SLOT_BATCH,
    CombineInputs,
    Row,
    combine_and_gate_row,
    load_slot_blocks,
    quad_gates,
)
from cute_kernels.lists.worklist import position_of
from cute_kernels.mma.mma_sync import (
    MMA_K,
    QUAD,
    acc_as_operand_a,
    acc_mn_view,
    accumulator,
    as_vectors,
    exp2_and_sum,
    gather_rows,
    gemm_registers,
    gemm_smem,
    load_block,
    load_permuted,
    make_warp_mma,
    mask_after,
    row_max,
    scale_row,
    store_permuted_rows,
    transpose_view,
    vector_strides,
)
from cute_kernels.mma.warp import LANES, LN_2, LOG2_E, divide
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    WARPGROUP_THREADS,
    K,
    allocate_tiles,
    as_warpgroup_acc,
    issue_mma,
    load_operand_a,
    smem_operand_b,
    swizzled_tiles,
    warpgroup_mma,
)
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import VECTOR

COLUMNS = 32
"""Columns of o that a warp accumulates at a time, with mma.sync."""


class CtaContext(NamedTuple):
    """Per-thread constants of a CTA throughout the kernel."""

    thread: Int32
    work_idx: Int32
    """blockIdx.x: index of the work tile or of the block of tokens."""
    kv_head: Int32
    batch: Int32
    lane: Int32
    warp_idx: Int32
    sK: cute.Tensor
    """[keys, D, 1]."""
    sV: cute.Tensor
    """[keys, D_v, 1], columns permuted."""
    sQ_mma: cute.Tensor
    """[rows, D] of all warps that multiply together."""
    sQ: cute.Tensor
    """[self.rows, D]: this warp's part of `sQ_mma`."""
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma


Mmas = tuple[cute.TiledMma, cute.TiledMma]
"""Q K^T and P V."""


class WarpRows:
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    group: G, query heads per key/value head.
    slots: n; rows are identified by slot_idx = token * n + slot, which is the token if n = 1.
    size: l', tokens per block.
    blocks: number of blocks that a CTA holds.
    warps: number of warps of a CTA.
    warpgroups: use WGMMA.
    """

    def __init__(
        self,
        dim: int,
        v_dim: int,
        dtype: Any,
        group: int,
        slots: int,
        size: int,
        blocks: int,
        warps: int,
        warpgroups: bool,
    ) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.blocks, self.warps, self.warpgroups = blocks, warps, warpgroups
        self.keys = blocks * size
        self.rows = 32 if self.keys == 64 and not warpgroups else 16  # rows per warp at a time
        self.mma_warps = WARPGROUP_THREADS // LANES if warpgroups else 1  # warps that multiply together
        self.columns = v_dim if warpgroups else COLUMNS

    # Set up

    def _mmas(self) -> Mmas:
        return self._make_mma(self.keys, K), self._make_mma(self.v_dim, MN)

    def _make_mma(self, columns: int, right: Any) -> cute.TiledMma:
        if self.warpgroups:
            return warpgroup_mma(self.dtype, columns, REGISTERS, K, right)
        return make_warp_mma(self.dtype, 1)

    @cute.jit
    def _set_up(self, mmas: Mmas) -> CtaContext:
        """Allocate shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        work_idx, kv_head, batch = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma_idx = warp_idx // self.mma_warps
        smem = SmemAllocator()
        sizes = (
            (self.dim, 1, self.keys),
            (self.v_dim, 1, self.keys),
            (self.dim, self.warps // self.mma_warps, self.rows * self.mma_warps),
        )
        # (keys, D, 1), (keys, D_v, 1) and (rows of mma_warps, D, warps / mma_warps)
        sK, sV, sQ_all = (allocate_tiles(smem, self.dtype, swizzled_tiles(self.dtype, *size)) for size in sizes)
        sQ_mma = sQ_all[None, None, mma_idx]  # [rows of mma_warps, D]
        sQ = cute.local_tile(sQ_mma, (self.rows, self.dim), (warp_idx % self.mma_warps, 0))  # [self.rows, D]
        return CtaContext(thread, work_idx, kv_head, batch, lane, warp_idx, sK, sV, sQ_mma, sQ, *mmas)

    # Mainloop

    @cute.jit
    def _attend(
        self,
        cta: CtaContext,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        gQueryRows: cute.Tensor | None,  # int32 [tokens]: slot_idx of the CTA's tokens (None: 0, 1, 2 ...)
        mO: cute.Tensor,  # [B, H_kv, slot_idx, G, D_v]
        mLse: cute.Tensor,  # fp32 [B, H_kv, slot_idx, G]
        first_keys: tuple[Int32, ...],  # first key of each block, ascending
        end: Int32,  # exclusive end of the keys
        num_rows: Int32,  # tokens x G
        first_token: Int32,  # index of T's first token, in the keys' numbering
        scale: Float32,
        combine: CombineInputs | None = None,  # with gQueryRows None: write NSA's out instead of o
        mPositions: cute.Tensor | None = None,  # PackedBlocks.positions; first_token then counts rows
    ):
        """o and lse of all rows of the CTA.

        A row sees the keys up to its token. Other keys may come between two blocks only if all tokens of the CTA see
        the blocks before the gap.
        """
        thread, kv_head, lane, warp_idx = cta.thread, cta.kv_head, cta.lane, cta.warp_idx
        sK, sV, sQ_mma, sQ, mma_qk, mma_pv = cta.sK, cta.sV, cta.sQ_mma, cta.sQ, cta.mma_qk, cta.mma_pv
        gQ = mQ[cta.batch, None, kv_head, None, None]  # [T, G, D]
        # [slot_idx, G, D_v] and fp32 [slot_idx, G]
        gO, gLse = mO[cta.batch, kv_head, None, None, None], mLse[cta.batch, kv_head, None, None]
        q_strides, o_strides = vector_strides(gQ), vector_strides(gO)
        first_key = first_keys[-1] - (self.keys - self.size)  # as if the blocks were contiguous
        row, step = warp_idx * self.rows, const_expr(self.warps * self.rows)
        slot_idx, next_slot_idx = Int32(0), Int32(0)

        # Load: keys, the first rows of q, values
        if num_rows > 0:
            slot_idx = self._slot_idx(gQueryRows, row, num_rows)
            next_slot_idx = self._slot_idx(gQueryRows, row + step, num_rows)
            self._load(load_block, mK[cta.batch, None, kv_head, None], sK, first_keys, end, thread)
            if row < num_rows:
                gather_rows(as_vectors(gQ), sQ, self._q_vector(q_strides, slot_idx, row, num_rows))
            cute.arch.cp_async_commit_group()
            # Columns are permuted: each lane of P V holds 16 contiguous bytes of a row of o and stores them directly
            self._load(load_permuted, mV[cta.batch, None, kv_head, None], sV, first_keys, end, thread)
            cute.arch.cp_async_wait_group(0)
            if const_expr(self.warpgroups):
                cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()  # the only barrier: all threads read the keys and values that any has loaded

        while row - warp_idx % self.mma_warps * self.rows < num_rows:  # first of the rows multiplied together
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            next_row = row + step
            later_slot_idx = self._slot_idx(gQueryRows, next_row + step, num_rows)

            # MMA: S = Q K^T. Load: the next rows of q
            acc_s = self._mma_qk(mma_qk, lane, sQ_mma, sQ, sK)  # fp32 [self.rows, self.keys]
            rGates, rBlocks = None, None  # fp32 (3, r, m), int32 (SLOT_BATCH / QUAD, r, m)
            if const_expr(combine is not None):
                rGates, rBlocks = self._load_gates(combine, sQ, slot_idx, row, num_rows)
            cute.arch.sync_warp()
            if next_row < num_rows:
                gather_rows(as_vectors(gQ), sQ, self._q_vector(q_strides, next_slot_idx, next_row, num_rows))
            cute.arch.cp_async_commit_group()
            if const_expr(self.warpgroups):
                warpgroup.wait_group(0)

            # Softmax
            token, _ = divide(slot_idx, self.slots)
            last_key = position_of(first_token + token, mPositions) - first_key  # last key that a row sees
            S = acc_mn_view(acc_s)  # fp32 (c, r, m, n)
            self._mask(S, last_key)
            lse = self._softmax(S, scale)
            if const_expr(combine is None):
                self._store_lse(gLse, lse, slot_idx, row, num_rows)

            # MMA: O = P V. Epilogue
            my_row = row + lane % self.rows
            _, head = divide(my_row, self.group)
            o_vector = slot_idx * o_strides[0] + head * o_strides[1] if my_row < num_rows else Int32(-1)
            rP = acc_as_operand_a(acc_s, self.dtype)  # 16 bits [self.rows, self.keys]
            for chunk in range_constexpr(self.v_dim // self.columns):
                acc_o = self._mma_pv(mma_pv, lane, rP, sV, chunk)  # fp32 [self.rows, self.columns]
                rO = cute.make_rmem_tensor_like(acc_o, self.dtype)  # 16 bits, as acc_o
                rO.store(acc_o.load().to(self.dtype))
                first_vector = const_expr(chunk * (self.columns // VECTOR))
                if const_expr(combine is not None):
                    combined_lse = self._combine_and_gate(
                        acc_mn_view(rO), lse, rGates, rBlocks, combine, slot_idx, row, num_rows, first_vector
                    )
                    if const_expr(chunk == 0):
                        self._store_lse(gLse, combined_lse, slot_idx, row, num_rows)
                store_permuted_rows(acc_mn_view(rO), cute.domain_offset((0, first_vector), as_vectors(gO)), o_vector)
            row, slot_idx, next_slot_idx = next_row, next_slot_idx, later_slot_idx

    @cute.jit
    def _load(
        self,
        load: cutlass.Constexpr[Any],  # load_block or load_permuted
        gX: cute.Tensor,
        sX: cute.Tensor,
        first_keys: tuple[Int32, ...],
        end: Int32,
        thread: Int32,
    ):
        """Load keys or values of all blocks, using all threads."""
        for i in range_constexpr(self.blocks):
            sBlock = sX[None, None, 0]  # [keys, D or D_v]
            if const_expr(self.blocks > 1):
                sBlock = cute.local_tile(sBlock, (self.size, cute.size(sX, mode=[1])), (i, 0))  # [l', D or D_v]
            load(gX, sBlock, first_keys[i], end, thread, self.warps * LANES)

    @cute.jit
    def _mma_qk(
        self, mma: cute.TiledMma, lane: Int32, sQ_mma: cute.Tensor, sQ: cute.Tensor, sK: cute.Tensor
    ) -> cute.Tensor:
        """S of a warp's rows; with WGMMA it is complete after `wait_group`, but q has already been read on return."""
        acc = accumulator(make_warp_mma(self.dtype, 1), (self.rows, self.keys))  # fp32 [self.rows, self.keys]
        if const_expr(self.warpgroups):
            rK = smem_operand_b(mma, sK)[None, None, None, 0]  # [self.keys, D]
            issue_mma(mma, as_warpgroup_acc(acc), load_operand_a(mma, sQ_mma), rK, False)
        else:
            acc.fill(0.0)
            gemm_smem(mma, lane, acc, sQ, sK[None, None, 0], 0)
        return acc

    @cute.jit
    def _mma_pv(
        self, mma: cute.TiledMma, lane: Int32, rP: cute.Tensor, sV: cute.Tensor, chunk: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """One chunk of self.columns columns of o, complete."""
        acc = accumulator(make_warp_mma(self.dtype, 1), (self.rows, self.columns))  # fp32 [self.rows, self.columns]
        if const_expr(self.warpgroups):
            rV = smem_operand_b(mma, transpose_view(sV))[None, None, None, 0]  # [D_v, self.keys]
            issue_mma(mma, as_warpgroup_acc(acc), rP, rV, False)
            warpgroup.wait_group(0)
        else:
            acc.fill(0.0)
            sVt = transpose_view(sV)[None, None, 0]  # [D_v, self.keys]
            gemm_registers(mma, lane, acc, rP, sVt, chunk * (COLUMNS // MMA_K), True)
        return acc

    # Rows, one per lane: lane i has row i of the warp's self.rows

    @cute.jit
    def _slot_idx(self, gQueryRows: cute.Tensor | None, first_row: Int32, num_rows: Int32) -> Int32:
        """slot_idx of the lane's row; past the end, of the last row."""
        row = cutlass.min(first_row + cute.arch.lane_idx() % self.rows, num_rows - 1)
        token, _ = divide(row, self.group)
        return token if const_expr(gQueryRows is None) else gQueryRows[token]

    @cute.jit
    def _q_vector(self, strides: tuple[Int32, Int32], slot_idx: Int32, first_row: Int32, num_rows: Int32) -> Int32:
        """Index of the first vector of the query of the lane's row."""
        row = cutlass.min(first_row + cute.arch.lane_idx() % self.rows, num_rows - 1)
        token, _ = divide(slot_idx, self.slots)
        _, head = divide(row, self.group)
        return token * strides[0] + head * strides[1]

    # Softmax over accumulator rows: rows 16 m + i and 16 m + i + 8 belong to quad i

    @cute.jit
    def _mask(self, S: cute.Tensor, last_key: Int32):
        """Set scores of keys after a row's token to -inf. Args: `last_key`: lane i has the last key that row i sees."""
        first_row_sees = cute.arch.shuffle_sync(last_key, 0)  # tokens ascend: the other rows see at least as much
        if const_expr(self.blocks > 1):  # only the last block is masked; in a document's first CTAs, all are
            if first_row_sees < self.keys - self.size:
                self._mask_from(S, last_key, 0)
            elif first_row_sees < self.keys - 1:
                self._mask_from(S, last_key, self.keys - self.size)
        else:
            if first_row_sees < self.keys - 1:
                self._mask_from(S, last_key, 0)

    @cute.jit
    def _mask_from(self, S: cute.Tensor, last_key: Int32, first: cutlass.Constexpr[int]):
        """Args: `first`: all rows see the keys before it."""
        lane = cute.arch.lane_idx()
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                last = cute.arch.shuffle_sync(last_key, m * MMA_K + r * 8 + lane // QUAD)
                mask_after(S[None, r, m, None], last, first)

    @cute.jit
    def _softmax(self, S: cute.Tensor, scale: Float32) -> Float32:
        """Replace S by P. Returns the lse of row 16 m + 8 r + i in lane 4 i + 2 m + r."""
        lane = cute.arch.lane_idx()
        my_max, my_sum = Float32(0.0), Float32(0.0)
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                rRow = S[None, r, m, None]  # fp32 (c, n)
                top = row_max(rRow)
                top = Float32(0.0) if top == -Float32.inf else top * (scale * LOG2_E)
                total = exp2_and_sum(rRow, scale * LOG2_E, top, Float32(0.0))
                total = cute.arch.warp_reduction_sum(total, threads_in_group=QUAD)
                normalizer = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
                scale_row(rRow, normalizer)
                if lane % QUAD == 2 * m + r:
                    my_max, my_sum = top, total
        return (my_max + cute.math.log2(my_sum, fastmath=True)) * LN_2

    # Epilogue

    @cute.jit
    def _store_lse(self, gLse: cute.Tensor, lse: Float32, slot_idx: Int32, first_row: Int32, num_rows: Int32):
        """Args: `lse`: as returned by `_softmax`. `slot_idx`: as returned by `_slot_idx`."""
        lane = cute.arch.lane_idx()
        i = lane % QUAD * 8 + lane // QUAD  # row whose lse this lane holds
        to = cute.arch.shuffle_sync(slot_idx, i)
        if (i < self.rows) & (first_row + i < num_rows):
            _, head = divide(first_row + i, self.group)
            gLse[to, head] = lse

    @cute.jit
    def _quad_row(self, slot_idx: Int32, first_row: Int32, num_rows: Int32, i: Int32) -> Row:
        """Row i of the warp, for the quad that holds it."""
        _, head = divide(first_row + i, self.group)
        return Row(cute.arch.shuffle_sync(slot_idx, i), head, first_row + i < num_rows)

    @cute.jit
    def _load_gates(self, combine: CombineInputs, sQ: cute.Tensor, slot_idx: Int32, first_row: Int32, num_rows: Int32):
        """(., r, m): load gates, while the rows' queries are in shared memory, and the blocks of their first slots."""
        rGates = cute.make_rmem_tensor((3, 2, self.rows // MMA_K), Float32)
        rBlocks = cute.make_rmem_tensor((SLOT_BATCH // QUAD, 2, self.rows // MMA_K), Int32)
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                i = m * MMA_K + r * 8 + cute.arch.lane_idx() // QUAD
                row = self._quad_row(slot_idx, first_row, num_rows, i)
                rBlocks[None, r, m].store(load_slot_blocks(combine, row, Int32(0)).load())
                rGates[None, r, m].store(quad_gates(combine.gWeight, combine.gGates, row, sQ[i, None]).load())
        return rGates, rBlocks

    @cute.jit
    def _combine_and_gate(
        self,
        rO: cute.Tensor,  # rounded, in the layout of `acc_mn_view`
        lse: Float32,
        rGates: cute.Tensor,  # from `_load_gates`
        rBlocks: cute.Tensor,
        combine: CombineInputs,
        slot_idx: Int32,
        first_row: Int32,
        num_rows: Int32,
        first_vector: cutlass.Constexpr[int],
    ) -> Float32:
        """Replace rO by out. Returns the lse of the selected branch, distributed over lanes like `lse`."""
        lane, combined_lse = cute.arch.lane_idx(), lse
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                row = self._quad_row(slot_idx, first_row, num_rows, m * MMA_K + r * 8 + lane // QUAD)
                own_lse = cute.arch.shuffle_sync(lse, lane - lane % QUAD + 2 * m + r)
                row_lse = combine_and_gate_row(
                    rO[None, r, m, None], own_lse, rGates[None, r, m], combine, row, first_vector, rBlocks[None, r, m]
                )
                if lane % QUAD == 2 * m + r:
                    combined_lse = row_lse
        return combined_lse
