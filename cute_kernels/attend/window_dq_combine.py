"""dq of token mode on Hopper: the window, the selected branch's partials, other branches and gates in one kernel.

    dq_i = dq_win_i + dq_local_i + sum_s dq_s + dq_cmp_i + sum_b dlogit_ib w_b        s over the slots with a partial

WindowDQCombine   WindowDQ (window_backward.py), whose ring of stages continues after the last key tile: each slot used
                  by one of the CTA's tokens delivers the partials of both consumers' rows, then comes dq_cmp. All terms
                  are added to the accumulator in fp32 and rounded once.

The consumers multiply while the producer prefetches partials, so memory and tensor cores are busy at the same time, and
neither dq of the window nor of the selected branch goes through memory.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16 of which 2 are local, w = 512: partials of 14 slots, 15.0 GB, q, do
and dq_cmp, dq, 4.3 GB: 4.6 ms at 4.2 TB/s; concurrently 10 tiles of keys, 2.1 TFLOP, 2.3 ms at 900 TFLOP/s.

Limits: those of WindowDQ; n l' / 64 <= 32; window and selected branch have the same keys, values and dO.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from torch import Tensor

from cute_kernels.attend.backward_tiles import (
    CTA_ROWS,
    STAGES,
    Inputs,
    Mmas,
    SharedDQ,
    Stats,
    TmaTensors,
    WorkTile,
)
from cute_kernels.attend.window_backward import LocalSelected, WindowDQ, WindowMask
from cute_kernels.gate.forward import BRANCHES
from cute_kernels.gate.sums import QueryTerms, fake_query_terms
from cute_kernels.lists.worklist import Worklist, fake_slots
from cute_kernels.mma.mma_sync import QUAD
from cute_kernels.mma.warp import LANES, lowest_bit
from cute_kernels.mma.warp_specialized import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP_WARPS,
    Consumer,
    accumulator_row,
    consumer_of,
)
from cute_kernels.mma.wgmma import (
    TILE,
    WARPGROUP_THREADS,
    TmaTensor,
    acc_coordinates,
    allocate_tiles,
    ldmatrix_copy,
    make_tma_tensors,
    producer_acquire,
    swizzled_tiles,
    tma_loads,
    tma_pipeline,
)
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

SLOTS_FOR_PRODUCER, SLOTS_FOR_CONSUMERS = 3, 4
"""Named barriers, numbered after those of the epilogue: warp 1 has written which slots have partials."""


class SharedRing(NamedTuple):
    """Shared memory of WindowDQCombine in addition to SharedDQ."""

    sRing: cute.Tensor  # (TILE, D, 2 STAGES): K, then V of every stage; partials of consumer 0, then of 1
    sSlots: cute.Tensor  # int32 (CTA_ROWS + 1): bitmask of a row's slots with a partial; last: of all rows


class WindowDQCombine(WindowDQ):
    """Roles and pipelines: BackwardDQ, whose warp 1 meanwhile looks up which slots have partials.

    Args:
        dim, dtype: D = D_v and their 16-bit type.
        group: G.
        slots: n.
        partials_per_slot: number of consecutive partials per slot.
    """

    def __init__(self, dim: int, dtype: Any, group: int, slots: int, *, partials_per_slot: int) -> None:
        super().__init__(dim, dtype, has_local=True)
        self.group, self.slots, self.partials_per_slot = group, slots, partials_per_slot

    @staticmethod
    @compiled_once
    def compile(  # type: ignore[override]
        dim: int,
        dtype: torch.dtype,
        group: int,
        slots: int,
        partials_per_slot: int,
        has_cmp: bool,
        w_dtype: torch.dtype | None,
    ) -> Kernel:
        return compile_kernel(
            WindowDQCombine(dim, CUTE_DTYPES[dtype], group, slots, partials_per_slot=partials_per_slot),
            *fake_heads(dtype, dim, dim, dim, dim),
            *fake_stats(4),
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            *fake_query_terms(dim, dtype, int(has_cmp), 1, w_dtype),
            fake(dtype, None, None, None, dim),
            *[Int32(0)] * 3,
            Float32(0.0),
            Int32(0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, T], of the window
        mDelta: cute.Tensor,
        mLocalLse: cute.Tensor,  # fp32 [B, H, T], of the selected branch
        mLocalDelta: cute.Tensor,
        mSlotBlocks: cute.Tensor,  # Worklist.slot_blocks
        mPartial: cute.Tensor,  # [B, H_kv, T n partials_per_slot, G, D], contiguous
        mCmp: cute.Tensor | None,  # [B, T, H, D]; may be mdQ
        mLogits: cute.Tensor | None,  # fp32 [B, T, H, 3]
        mW: cute.Tensor | None,  # [H, 3, D], with mLogits
        mdQ: cute.Tensor,  # [B, T, H, D]
        left: Int32,
        size: Int32,
        local: Int32,
        scale: Float32,
        first_token: Int32,  # token index of row 0, a multiple of TILE
        stream: Any,
    ):
        terms = [self.partials_of_rows(mPartial), *([] if const_expr(mCmp is None) else [mCmp])]
        self.kernel(
            self.tma_tensors(mQ, mdO, mK, mV, mdQ),
            tuple(make_tma_tensors(cpasync.CopyBulkTensorTileG2SOp(), self.dtype, self.dim, *terms)),
            ((mLse, mDelta), (mLocalLse, mLocalDelta)),
            mSlotBlocks,
            mLogits,
            mW,
            mQ.shape[1],
            mK.shape[2],
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
        terms: tuple[TmaTensor, ...],  # partials, (T, D, (G, n partials_per_slot), B H_kv), and dq_cmp if any
        branches: tuple[Stats, Stats],  # the window, LocalSelected
        mSlotBlocks: cute.Tensor,
        mLogits: cute.Tensor | None,
        mW: cute.Tensor | None,
        num_rows: Int32,
        kv_heads: Int32,
        window: WindowMask,
        scale: Float32,
        first_token: Int32,
        mma: Mmas,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work = WorkTile(*cute.arch.block_idx())
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        inputs = Inputs(tma, branches, num_rows, self.group, scale, mma)
        key_tiles = self.key_tiles(work, num_rows, window.left, first_token)
        shared, ring = self.allocate_ring()

        if warp_index < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                state = self.load(inputs, shared, work, key_tiles)
                self.load_terms(terms, shared, ring, work, kv_heads, state)
            elif warp_index == 1:
                self.find_slots(mSlotBlocks, ring.sSlots, num_rows, work)
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = consumer_of(thread, warp_index)
            dQ, state = self.mma(inputs, shared, work, key_tiles, (window, first_token), consumer)
            dQ.store(dQ.load() * scale)
            self.add_terms(dQ, shared, ring, mma.gradients, const_expr(len(terms) > 1), consumer, state)
            if const_expr(mLogits is not None):
                self.add_logits(dQ, mLogits, mW, num_rows, work, consumer)
            self.epilogue(dQ, inputs._replace(scale=Float32(1.0)), shared.sQ, work, consumer)

    def partials_of_rows(self, mX: cute.Tensor) -> cute.Tensor:
        """View as [B H_kv, T, (G, n partials_per_slot), D]."""
        batches, kv_heads, places, group, dim = mX.layout.shape
        _, kv_stride, place_stride, head_stride, dim_stride = mX.layout.stride
        count = self.slots * self.partials_per_slot
        layout = cute.make_layout(
            (batches * kv_heads, places // count, (group, count), dim),
            stride=(kv_stride, place_stride * count, (head_stride, place_stride), dim_stride),
        )
        return cute.make_tensor(mX.iterator, layout)

    def allocate_ring(self) -> tuple[SharedDQ, SharedRing]:
        smem = SmemAllocator()
        # (TILE, D, CONSUMERS) of Q and dO, (TILE, D, 2 STAGES)
        layouts = [swizzled_tiles(self.dtype, self.dim, count) for count in (CONSUMERS, CONSUMERS, 2 * STAGES)]
        sQ, sdO, sRing = (allocate_tiles(smem, self.dtype, layout) for layout in layouts)
        sSlots = smem.allocate_tensor(Int32, cute.make_layout(CTA_ROWS + 1), 16)
        consumer_warps = CONSUMERS * WARPGROUP_WARPS
        rows_ready = tma_pipeline(1, consumer_warps, 2 * CONSUMERS * self.tile_bytes, defer_sync=True)
        keys_ready = tma_pipeline(STAGES, consumer_warps, 2 * self.tile_bytes)
        sV = cute.domain_offset((0, 0, STAGES), sRing)  # the last STAGES tiles
        return SharedDQ(sQ, sdO, sRing, sV, rows_ready, keys_ready), SharedRing(sRing, sSlots)

    @cute.jit
    def find_slots(self, mSlotBlocks: cute.Tensor, sSlots: cute.Tensor, num_rows: Int32, work: WorkTile):
        """Producer warp 1: find the slots of the CTA's rows that have partials."""
        gSlotBlocks = mSlotBlocks[work.batch, work.head // self.group, None, None]  # int32 [T, n]
        lane, every = cute.arch.lane_idx(), Int32(0)
        for i in cutlass.range(CTA_ROWS // LANES, unroll=1):
            row, slots = work.tile * CTA_ROWS + i * LANES + lane, Int32(0)
            if row < num_rows:
                for slot in range_constexpr(self.slots):
                    slots |= Int32(1 << slot) if gSlotBlocks[row, slot] >= 0 else Int32(0)
            sSlots[i * LANES + lane] = slots
            every |= slots
        of_all = Int32(0)
        for slot in range_constexpr(self.slots):
            of_all |= Int32(1 << slot) if cute.arch.vote_any_sync((every & (1 << slot)) != 0) else Int32(0)
        if lane == 0:
            sSlots[CTA_ROWS] = of_all
        # sSlots is written, for warp 0 and for the consumers
        for barrier, readers in ((SLOTS_FOR_PRODUCER, LANES), (SLOTS_FOR_CONSUMERS, CONSUMERS * WARPGROUP_THREADS)):
            cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=LANES + readers)

    @cute.jit
    def load_terms(
        self,
        terms: tuple[TmaTensor, ...],
        shared: SharedDQ,
        ring: SharedRing,
        work: WorkTile,
        kv_heads: Int32,
        state: Any,
    ):
        """Producer warp 0: load the terms to add to the window's dQ, one tile per consumer."""
        load_partials, kv_head = tma_loads((terms[0], ring.sRing)), work.head // self.group
        cute.arch.barrier(barrier_id=SLOTS_FOR_PRODUCER, number_of_threads=2 * LANES)
        slots = cute.arch.make_warp_uniform(ring.sSlots[CTA_ROWS])
        while slots != 0:
            first = lowest_bit(slots) * self.partials_per_slot
            for part in range_constexpr(self.partials_per_slot):
                barrier = producer_acquire(shared.keys_ready, state)
                for i in range_constexpr(CONSUMERS):
                    of_row = work.head % self.group, first + part
                    place = work.tile * CONSUMERS + i, of_row, work.batch * kv_heads + kv_head
                    load_partials(place, state.index + i * STAGES, barrier)
                state.advance()
            slots &= slots - 1
        if const_expr(len(terms) > 1):
            load_cmp = tma_loads((terms[1], ring.sRing))
            barrier = producer_acquire(shared.keys_ready, state)
            for i in range_constexpr(CONSUMERS):
                load_cmp((work.tile * CONSUMERS + i, work.head, work.batch), state.index + i * STAGES, barrier)

    @cute.jit
    def add_terms(
        self,
        dQ: cute.Tensor,
        shared: SharedDQ,
        ring: SharedRing,
        mma_dq: cute.TiledMma,
        has_cmp: cutlass.Constexpr[bool],
        consumer: Consumer,
        state: Any,
    ):
        """Add the partials of the warpgroup's rows, in the order of the slots, and dq_cmp."""
        keys_ready = shared.keys_ready
        read = ldmatrix_copy(mma_dq, self.dtype, consumer.thread)
        tCsRing = read.partition_S(ring.sRing)  # (., ., ., 2 STAGES)
        rX = cute.make_rmem_tensor_like(dQ, self.dtype)  # 16 bits [TILE rows, D]
        cute.arch.barrier(barrier_id=SLOTS_FOR_CONSUMERS, number_of_threads=LANES + CONSUMERS * WARPGROUP_THREADS)
        slots = cute.arch.make_warp_uniform(ring.sSlots[CTA_ROWS])
        rSlots = cute.make_rmem_tensor(2, Int32)  # int32 (r): bitmasks
        for r in range_constexpr(2):
            rSlots[r] = ring.sSlots[consumer.warpgroup * TILE + accumulator_row(consumer, r)]
        while slots != 0:
            slot = lowest_bit(slots)
            for _ in range_constexpr(self.partials_per_slot):
                keys_ready.consumer_wait(state)
                stage = state.index + consumer.warpgroup * STAGES
                cute.copy(read, tCsRing[None, None, None, stage], read.retile(rX))
                cute.arch.sync_warp()
                keys_ready.consumer_release(state)
                state.advance()
                _add(dQ, rX, rSlots, slot)
            slots &= slots - 1
        if const_expr(has_cmp):
            keys_ready.consumer_wait(state)
            stage = state.index + consumer.warpgroup * STAGES
            cute.copy(read, tCsRing[None, None, None, stage], read.retile(rX))
            dQ.store(dQ.load() + rX.load().to(Float32))

    @cute.jit
    def add_logits(
        self,
        dQ: cute.Tensor,
        mLogits: cute.Tensor,
        mW: cute.Tensor,
        num_rows: Int32,
        work: WorkTile,
        consumer: Consumer,
    ):
        """Add the gradients of the gates' logits, times their weights."""
        rLogits = cute.make_rmem_tensor((2, BRANCHES), Float32)  # fp32 (r, branch)
        rLogits.fill(0.0)
        for r in range_constexpr(2):
            row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE + accumulator_row(consumer, r)
            if row < num_rows:
                for b in range_constexpr(BRANCHES):
                    rLogits[r, b] = mLogits[work.batch, row, work.head, b]
        rW = cute.make_rmem_tensor(2, mW.element_type)  # (c)
        for n in range_constexpr(self.dim // 8):
            for b in range_constexpr(BRANCHES):
                pair = n * QUAD + cute.arch.lane_idx() % QUAD
                cute.autovec_copy(cute.local_tile(mW[work.head, b, None], (2,), (pair,)), rW)
                for r in range_constexpr(2):
                    for c in range_constexpr(2):
                        at = ((c, r, n), 0, 0)
                        dQ[at] = cute.math.fma(rLogits[r, b], rW[c].to(Float32), dQ[at])


@cute.jit
def _add(dQ: cute.Tensor, rX: cute.Tensor, rSlots: cute.Tensor, slot: Int32):
    """Add a partial to the rows that have one; for other rows rX is uninitialized."""
    for n, r, c in acc_coordinates(dQ):
        at = ((c, r, n), 0, 0)
        value = rX[at].to(Float32)
        dQ[at] += value if (rSlots[r] >> slot) & 1 != 0 else Float32(0.0)


class WindowQueries(NamedTuple):
    """Window branch, if dq of its queries is computed together with the selected branch's."""

    lse: Tensor
    """fp32 `[B,H,N]`, like the selected branch's."""
    delta: Tensor
    left: int
    """Number of keys before its own that a token sees."""

    def narrow(self, batches: slice, rows: slice, heads: slice) -> WindowQueries:
        """Restrict to some batches, rows and heads."""
        return WindowQueries(self.lse[batches, heads, rows], self.delta[batches, heads, rows], self.left)


def window_dq_combine(
    worklist: Worklist,
    partial: Tensor,
    dq: Tensor,
    terms: QueryTerms | None,
    *,
    attended: tuple[Tensor, Tensor, Tensor, Tensor],
    window: WindowQueries,
    local_selected: LocalSelected,
    scale: float,
    partials_per_slot: int,
) -> None:
    """Attention backward of the window and local selected blocks, plus the partials and the other terms of dq, into dq.

    Args:
        worklist: lists the blocks that are not local.
        partial: `[B,H_kv,T n partials_per_slot,G,D]`, contiguous, read only for slots that have a block.
        dq: `[B,T,H,D]`, output; may alias one of the terms.
        terms: for these tokens and heads, as are the following arguments; from up to one branch.
        attended: q, do, k and v, in the layout of `window_backward`, as is scale; k and v from the first token on.
    """
    terms = terms or QueryTerms(())
    q, do, k, v = attended
    *_, group, dim = partial.shape
    slots, has_cmp = worklist.slot_blocks.shape[3], len(terms.branches) > 0
    run = WindowDQCombine.compile(dim, q.dtype, group, slots, partials_per_slot, has_cmp, terms.w_dtype).run
    stats = window.lse, window.delta, *local_selected[:2]
    sizes = window.left, *local_selected[2:], scale, worklist.first_token
    run(q, do, k, v, *stats, worklist.slot_blocks, partial, *terms.arguments(1), dq, *sizes)
