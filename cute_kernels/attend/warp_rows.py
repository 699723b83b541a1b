"""Rows that each warp gathers, against all keys of its CTA at once: the part of attention per token where keys stay.

A CTA has some blocks of keys and values in shared memory, and rows, tokens x G heads of a key/value head. A warp
gathers its rows by cp.async, the next ones while it works on these, and needs no other warp's. All keys of a row are
there at once: one softmax, then o in 16 bits and lse to the row's place. On Hopper (`warpgroups`) a warp takes 16 rows
at a time, and the four warps of a warpgroup multiply theirs together (WGMMA), q and P from registers; elsewhere each
multiplies by itself (mma.sync), 32 rows, or 16 where there are more than 64 keys.

V's columns lie in another order in shared memory (load_for_quads), so each lane of a product has 16 bytes of a row of o
one behind the other and writes them as they are (write_quads).

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; up to 256 keys; vectors of q, and of o, of a CTA are
less than 2^31 apart.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attend.combine import BATCH, CombineInputs, Row, finish_row, gates_of_quads, load_blocks
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
    vector_strides,
)
from cute_kernels.mma.warp import LANES, LOG2_E, divide
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
    transpose_view,
    warpgroup_mma,
)
from cute_kernels.pool.documents import LENGTH, TILE, TOKEN, document_at
from cute_kernels.runtime.jit import VECTOR

COLUMNS = 32
"""Of o that a warp has in registers at a time, with mma.sync."""

SHARED_PERCENT = 100
"""Of a multiprocessor's memory for shared memory; without it the compiler asks a GPU."""

LOG_2 = math.log(2)


@cute.jit
def block_bounds(
    block: Int32, size: cutlass.Constexpr[int], num_keys: Int32, mBounds: cute.Tensor | None
) -> tuple[Int32, Int32]:
    """First key of a block, and the first one behind its document."""
    first, end = block * size, num_keys
    if const_expr(mBounds is not None):
        document = document_at(mBounds[TILE, None], block, 1, 1, 0)
        start = mBounds[TOKEN, document]
        first, end = start + (block - mBounds[TILE, document]) * size, start + mBounds[LENGTH, document]
    return first, end


def heads_of(mX: cute.Tensor, group: int) -> cute.Tensor:
    """[B, N, H, D] as [B, N, H_kv, G, D]."""
    batches, tokens, heads, dim = mX.layout.shape
    of_batch, of_token, of_head, of_dim = mX.layout.stride
    layout = cute.make_layout(
        (batches, tokens, heads // group, group, dim), stride=(of_batch, of_token, of_head * group, of_head, of_dim)
    )
    return cute.make_tensor(mX.iterator, layout)


class CtaContext(NamedTuple):
    """What a thread has of its CTA."""

    thread: Int32
    item: Int32
    kv_head: Int32
    batch: Int32
    lane: Int32
    warp_index: Int32
    sK: cute.Tensor
    sV: cute.Tensor
    sRows: cute.Tensor
    """Those that its warp multiplies together with others."""
    sMine: cute.Tensor
    """Those of its warp."""
    mma_s: cute.TiledMma
    """How S is multiplied, as `mma_o` o."""
    mma_o: cute.TiledMma


class WarpRows:
    """Args:
    dim, v_dim, dtype: of k and v, 16 bits.
    group: G.
    slots: places of a token.
    size: l', tokens of a block.
    blocks: that a CTA has.
    warps: of a CTA.
    warpgroups: whether to use WGMMA.
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
        self.rows = 32 if self.keys == 64 and not warpgroups else 16
        self.together = WARPGROUP_THREADS // LANES if warpgroups else 1  # warps that multiply together
        self.columns = v_dim if warpgroups else COLUMNS

    def _operands(self) -> tuple[Any, ...]:
        """How S and o are multiplied, and how rows, keys and values lie in shared memory."""
        return (
            self._mma(self.keys, K),
            self._mma(self.v_dim, MN),
            swizzled_tiles(self.dtype, self.dim, self.warps // self.together, self.rows * self.together),
            swizzled_tiles(self.dtype, self.dim, 1, self.keys),
            swizzled_tiles(self.dtype, self.v_dim, 1, self.keys),
        )

    def _mma(self, columns: int, right: Any) -> cute.TiledMma:
        if self.warpgroups:
            return warpgroup_mma(self.dtype, columns, REGISTERS, K, right)
        return make_warp_mma(self.dtype, 1)

    @cute.jit
    def _begin(self, mma_s: cute.TiledMma, mma_o: cute.TiledMma, *layouts: cute.ComposedLayout) -> CtaContext:
        """Args: of `_operands`."""
        row_layout, key_layout, value_layout = layouts
        thread, _, _ = cute.arch.thread_idx()
        item, kv_head, batch = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        my_group = warp_index // self.together
        smem = cutlass.memory.SmemAllocator()
        sK = allocate_tiles(smem, self.dtype, key_layout)
        sV = allocate_tiles(smem, self.dtype, value_layout)
        sQ = allocate_tiles(smem, self.dtype, row_layout)
        sRows = sQ[None, None, my_group]
        sMine = cute.local_tile(sRows, (self.rows, self.dim), (warp_index % self.together, 0))
        return CtaContext(thread, item, kv_head, batch, lane, warp_index, sK, sV, sRows, sMine, mma_s, mma_o)

    @cute.jit
    def _attend(
        self,
        mine: CtaContext,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        gPlaces: cute.Tensor | None,  # int32: of each token of the CTA, T's token * slots + slot; None: 0, 1, 2 ...
        mO: cute.Tensor,  # [B, H_kv, places, G, D_v]
        mLse: cute.Tensor,  # fp32 [B, H_kv, places, G]
        first_keys: tuple[Int32, ...],  # of each block, ascending
        end: Int32,  # keys from here on are not read
        num_rows: Int32,  # tokens x G
        first_token: Int32,  # the number of T's first token, counted as keys are
        scale: Float32,
        rest: CombineInputs | None = None,  # with gPlaces None: what makes out of o, which is written in its place
    ):
        """o and lse of all rows.

        A row sees what is not behind its token. So between two blocks other keys may lie only if all tokens see the
        blocks before these.
        """
        thread, _, kv_head, batch, lane, warp_index, sK, sV, sRows, sMine, mma_s, mma_o = mine
        gQ = mQ[batch, None, kv_head, None, None]
        gO, gLse = mO[batch, kv_head, None, None, None], mLse[batch, kv_head, None, None]
        q_strides, o_strides = vector_strides(gQ), vector_strides(gO)
        first_key = first_keys[-1] - (self.keys - self.size)  # as if nothing lay between the blocks
        row, step = warp_index * self.rows, const_expr(self.warps * self.rows)
        place, next_place = Int32(0), Int32(0)
        if num_rows > 0:
            place, next_place = self._place(gPlaces, row, num_rows), self._place(gPlaces, row + step, num_rows)
            self._load(load_block, mK[batch, None, kv_head, None], sK, first_keys, end, thread)
            if row < num_rows:
                gather_rows(as_vectors(gQ), sMine, self._query(q_strides, place, row, num_rows))
            cute.arch.cp_async_commit_group()
            self._load(load_permuted, mV[batch, None, kv_head, None], sV, first_keys, end, thread)
            cute.arch.cp_async_wait_group(0)
            if const_expr(self.warpgroups):
                cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        while row - warp_index % self.together * self.rows < num_rows:  # the first row of those multiplied together
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            next_row = row + step
            later_place = self._place(gPlaces, next_row + step, num_rows)
            acc = accumulator(make_warp_mma(self.dtype, 1), (self.rows, self.keys))
            if const_expr(self.warpgroups):
                rK = smem_operand_b(mma_s, sK)[None, None, None, 0]
                # The warp has read its rows then
                issue_mma(mma_s, as_warpgroup_acc(acc), load_operand_a(mma_s, sRows), rK, False)
            else:
                acc.fill(0.0)
                gemm_smem(mma_s, lane, acc, sMine, sK[None, None, 0], 0)
            gates, blocks = None, None
            if const_expr(rest is not None):
                gates, blocks = self._start_rest(rest, sMine, place, row, num_rows)
            cute.arch.sync_warp()
            if next_row < num_rows:
                gather_rows(as_vectors(gQ), sMine, self._query(q_strides, next_place, next_row, num_rows))
            cute.arch.cp_async_commit_group()
            if const_expr(self.warpgroups):
                warpgroup.wait_group(0)

            token, _ = divide(place, self.slots)
            seen = first_token + token - first_key  # the last key that a row sees
            S = acc_mn_view(acc)
            self._hide(S, seen)
            lse = self._softmax(S, scale)
            if const_expr(rest is None):
                self._write_lse(gLse, lse, place, row, num_rows)

            my_row = row + lane % self.rows
            _, head = divide(my_row, self.group)
            to = place * o_strides[0] + head * o_strides[1] if my_row < num_rows else Int32(-1)
            rP = acc_as_operand_a(acc, self.dtype)
            for part in range_constexpr(self.v_dim // self.columns):
                acc_o = accumulator(make_warp_mma(self.dtype, 1), (self.rows, self.columns))
                if const_expr(self.warpgroups):
                    rV = smem_operand_b(mma_o, transpose_view(sV))[None, None, None, 0]
                    issue_mma(mma_o, as_warpgroup_acc(acc_o), rP, rV, False)
                    warpgroup.wait_group(0)
                else:
                    acc_o.fill(0.0)
                    sColumns = transpose_view(sV)[None, None, 0]
                    gemm_registers(mma_o, lane, acc_o, rP, sColumns, part * (COLUMNS // MMA_K), True)
                rO = cute.make_rmem_tensor_like(acc_o, self.dtype)
                rO.store(acc_o.load().to(self.dtype))
                if const_expr(rest is not None):
                    vector = const_expr(part * (self.columns // VECTOR))
                    of_all = self._finish(acc_mn_view(rO), lse, gates, blocks, rest, place, row, num_rows, vector)
                    if const_expr(part == 0):
                        self._write_lse(gLse, of_all, place, row, num_rows)
                piece = cute.domain_offset((0, part * (self.columns // VECTOR)), as_vectors(gO))
                store_permuted_rows(acc_mn_view(rO), piece, to)
            row, place, next_place = next_row, next_place, later_place

    @cute.jit
    def _load(
        self,
        load: cutlass.Constexpr[Any],  # load_block or load_for_quads
        gX: cute.Tensor,
        sX: cute.Tensor,
        first_keys: tuple[Int32, ...],
        end: Int32,
        thread: Int32,
    ):
        """All blocks, by all threads."""
        for i in range_constexpr(self.blocks):
            sBlock = sX[None, None, 0]
            if const_expr(self.blocks > 1):
                sBlock = cute.local_tile(sBlock, (self.size, cute.size(sX, mode=[1])), (i, 0))
            load(gX, sBlock, first_keys[i], end, thread, self.warps * LANES)

    @cute.jit
    def _write_lse(self, gLse: cute.Tensor, lse: Float32, place: Int32, first_row: Int32, num_rows: Int32):
        """Args: lse: as of `_softmax`. place: as of `_place`."""
        lane = cute.arch.lane_idx()
        number = lane % QUAD * 8 + lane // QUAD  # of the row whose lse this lane has
        slot = cute.arch.shuffle_sync(place, number)
        if (number < self.rows) & (first_row + number < num_rows):
            _, head = divide(first_row + number, self.group)
            gLse[slot, head] = lse

    # A lane for each row of a warp

    @cute.jit
    def _place(self, gPlaces: cute.Tensor | None, first_row: Int32, num_rows: Int32) -> Int32:
        """The row's place, that of the last one behind the end."""
        row = cutlass.min(first_row + cute.arch.lane_idx() % self.rows, num_rows - 1)
        token, _ = divide(row, self.group)
        return token if const_expr(gPlaces is None) else gPlaces[token]

    @cute.jit
    def _query(self, strides: tuple[Int32, Int32], place: Int32, first_row: Int32, num_rows: Int32) -> Int32:
        """The first vector of the row's query."""
        row = cutlass.min(first_row + cute.arch.lane_idx() % self.rows, num_rows - 1)
        token, _ = divide(place, self.slots)
        _, head = divide(row, self.group)
        return token * strides[0] + head * strides[1]

    # A quad for each row of an accumulator

    @cute.jit
    def _hide(self, S: cute.Tensor, seen: Int32):
        """What is behind the last key that each row sees becomes -inf."""
        least = cute.arch.shuffle_sync(seen, 0)  # tokens ascend: if the first one sees all keys, all see them
        if const_expr(self.blocks > 1):
            if least < self.keys - self.size:
                self._mask(S, seen, 0)
            elif least < self.keys - 1:
                self._mask(S, seen, self.keys - self.size)
        else:
            if least < self.keys - 1:
                self._mask(S, seen, 0)

    @cute.jit
    def _mask(self, S: cute.Tensor, seen: Int32, first: cutlass.Constexpr[int]):
        """Args: `first`: keys before it are seen by all rows."""
        lane = cute.arch.lane_idx()
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                last = cute.arch.shuffle_sync(seen, m * MMA_K + r * 8 + lane // QUAD)
                mask_after(S[None, r, m, None], last, first)

    @cute.jit
    def _softmax(self, S: cute.Tensor, scale: Float32) -> Float32:
        """S becomes P. Returns lse of row 16 m + 8 r + i in lane 4 i + 2 m + r."""
        lane = cute.arch.lane_idx()
        my_top, my_total = Float32(0.0), Float32(0.0)
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                rRow = S[None, r, m, None]
                top = row_max(rRow)
                top = Float32(0.0) if top == -Float32.inf else top * (scale * LOG2_E)
                total = exp2_and_sum(rRow, scale * LOG2_E, top, Float32(0.0))
                total = cute.arch.warp_reduction_sum(total, threads_in_group=QUAD)
                share = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
                scale_row(rRow, share)
                if lane % QUAD == 2 * m + r:
                    my_top, my_total = top, total
        return (my_top + cute.math.log2(my_total, fastmath=True)) * LOG_2

    # Likewise, what is added to a row

    @cute.jit
    def _row(self, place: Int32, first_row: Int32, num_rows: Int32, number: Int32) -> Row:
        """Of a quad, by its number in the warp."""
        _, head = divide(first_row + number, self.group)
        return Row(cute.arch.shuffle_sync(place, number), head, first_row + number < num_rows)

    @cute.jit
    def _start_rest(self, rest: CombineInputs, sMine: cute.Tensor, place: Int32, first_row: Int32, num_rows: Int32):
        """(., r, m): gates, while the rows are in shared memory, and the blocks of the first slots."""
        gates = cute.make_rmem_tensor((3, 2, self.rows // MMA_K), Float32)
        blocks = cute.make_rmem_tensor((BATCH // QUAD, 2, self.rows // MMA_K), Int32)
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                number = m * MMA_K + r * 8 + cute.arch.lane_idx() // QUAD
                row = self._row(place, first_row, num_rows, number)
                blocks[None, r, m].store(load_blocks(rest, row, Int32(0)).load())
                gates[None, r, m].store(gates_of_quads(rest, row, sMine[number, None]).load())
        return gates, blocks

    @cute.jit
    def _finish(
        self,
        rO: cute.Tensor,  # rounded, as of `acc_mn_view`
        lse: Float32,
        gates: cute.Tensor,  # of `_start_rest`
        blocks: cute.Tensor,
        rest: CombineInputs,
        place: Int32,
        first_row: Int32,
        num_rows: Int32,
        first_vector: cutlass.Constexpr[int],
    ) -> Float32:
        """rO becomes out. Returns the lse of o, in the same lane."""
        lane, of_all = cute.arch.lane_idx(), lse
        for m in range_constexpr(self.rows // MMA_K):
            for r in range_constexpr(2):
                row = self._row(place, first_row, num_rows, m * MMA_K + r * 8 + lane // QUAD)
                held = cute.arch.shuffle_sync(lse, lane - lane % QUAD + 2 * m + r)
                total = finish_row(
                    rO[None, r, m, None], held, gates[None, r, m], rest, row, first_vector, blocks[None, r, m]
                )
                if lane % QUAD == 2 * m + r:
                    of_all = total
        return of_all
