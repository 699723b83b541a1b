"""Combine the partials of each row into its result, gating it with NSA's other branches in the same pass if asked.

    o = sum_s exp(lse_s - lse) o_s        lse = log sum_s exp(lse_s)        s over the slots of a token with a partial
    dq = sum_s dq_s                       in the backward, unweighted; for NSA with the other terms (gate/sums.py)
    out = g_cmp o_cmp + g_slc o + g_win o_win

KV-outer kernels (kv_outer.py, kv_outer_backward.py) write one partial per slot, `partial[b, h, slot_idx, g]` with
slot_idx = token * n + slot. Each row (token, head) has a group of threads, each holding a 16-byte vector.

CombinePartials        online softmax over the slots in order, SLOT_BATCH of them loaded at a time
CombineAndGate         the same, but o stays in registers, where it is gated with the other branches; it is written
                       only if a backward will read it. Bitwise equal to CombinePartials followed by GatedSum
                       (gate/forward.py)
CombineQueryGradients  dq of all branches and gates: the sum of the partials stays in registers, the other terms are
                       added, and the total is rounded once

All are deterministic: the order of the slots is fixed. combine_rows.py combines rows held in a warp's registers.

Floor: the partials are read once, the result is written once. 64K tokens, 64 heads of D = 128, n = 16: 17 GB, 4.1 ms at
4.2 TB/s. CombineAndGate reads another 3.2 GB, whereas a gate after CombinePartials moves 5.4 GB, 0.5 ms more;
CombineQueryGradients reads another 2.1 GB, whereas QueryGradients (gate/sums.py) after CombinePartials moves 4.3 GB.

Limits: dims multiples of 8 whose vectors divide THREADS and, with `accumulate`, fit in one warp; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.attend.combine_rows import SLOT_BATCH
from cute_kernels.gate.forward import BRANCHES, Gating, fake_gating, row_gates, weighted_sum
from cute_kernels.gate.sums import QueryTerms, add_logit_gradients, add_vector, fake_query_terms
from cute_kernels.lists.worklist import Worklist, fake_slots
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

THREADS = 128


class RowVector(NamedTuple):
    """Coordinates of a thread's vector."""

    batch: Int32
    kv_head: Int32
    head: Int32
    """Index among all query heads."""
    token: Int32
    head_in_group: Int32
    vector: Int32
    is_valid: Boolean
    """True if the token exists."""

    def slice(self, mX: cute.Tensor) -> cute.Tensor:
        """The vector in [B, T, H, dim]."""
        return cute.local_tile(mX[self.batch, self.token, self.head, None], (VECTOR,), (self.vector,))


class CombinePartials:
    """Args:
    dim: columns of a row.
    group: G.
    weighted: combine by the slots' lse into one softmax over all their keys; otherwise a plain sum.
    partials_per_slot: number of consecutive partials per slot.
    accumulate: start from what the rows already hold, weighted by its own lse; not read where that is -inf.
    """

    def __init__(self, dim: int, group: int, *, weighted: bool, partials_per_slot: int, accumulate: bool) -> None:
        self.vectors, self.group = dim // VECTOR, group
        self.weighted, self.partials_per_slot, self.accumulate = weighted, partials_per_slot, accumulate
        self.rows = THREADS // self.vectors

    @staticmethod
    @compiled_once
    def compile(
        dim: int, dtype: torch.dtype, group: int, *, weighted: bool, partials_per_slot: int, accumulate: bool
    ) -> Kernel:
        return compile_kernel(
            CombinePartials(dim, group, weighted=weighted, partials_per_slot=partials_per_slot, accumulate=accumulate),
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            fake(torch.float32, None, None, None, group, aligned=False) if weighted else None,
            fake(dtype, None, None, None, dim),
            fake(torch.float32, None, None, None, aligned=False) if weighted else None,
        )

    @cute.jit
    def __call__(
        self,
        mSlotBlocks: cute.Tensor,  # Worklist.slot_blocks
        mPartial: cute.Tensor,  # [B, H_kv, T n partials_per_slot, G, dim]
        mLsePartial: cute.Tensor | None,  # fp32 [B, H_kv, T n, G], when weighted
        mX: cute.Tensor,  # [B, T, H, dim], the result
        mLse: cute.Tensor | None,  # fp32 [B, H, T], when weighted
        stream: Any,
    ):
        self.kernel(mSlotBlocks, mPartial, mLsePartial, mX, mLse).launch(**self._launch(mSlotBlocks, stream))

    def _launch(self, mSlotBlocks: cute.Tensor, stream: Any) -> dict[str, Any]:
        batches, kv_heads, tokens, _ = mSlotBlocks.shape
        return {
            "grid": [cute.ceil_div(tokens * self.group, self.rows), kv_heads, batches],
            "block": [THREADS, 1, 1],
            "stream": stream,
        }

    @cute.kernel
    def kernel(
        self,
        mSlotBlocks: cute.Tensor,
        mPartial: cute.Tensor,
        mLsePartial: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ):
        at = self._row_vector(mSlotBlocks)
        held_lse = self._load_held_lse(at, mLse)
        if at.is_valid:
            rSum = self._combine(at, held_lse, mSlotBlocks, mPartial, mLsePartial, mX, mLse)
            self._store(rSum, at.slice(mX))

    @cute.jit
    def _row_vector(self, mSlotBlocks: cute.Tensor) -> RowVector:
        thread, _, _ = cute.arch.thread_idx()
        cta, kv_head, batch = cute.arch.block_idx()
        vector, row = thread % self.vectors, cta * self.rows + thread // self.vectors
        token, head_in_group = row // self.group, row % self.group
        is_valid = token < mSlotBlocks.shape[2]
        return RowVector(batch, kv_head, kv_head * self.group + head_in_group, token, head_in_group, vector, is_valid)

    @cute.jit
    def _load_held_lse(self, at: RowVector, mLse: cute.Tensor | None) -> Float32:
        """lse of what the row already holds; all threads of a warp must call this."""
        held_lse = -Float32.inf
        if const_expr(self.accumulate):
            if at.is_valid:
                held_lse = mLse[at.batch, at.head, at.token]
            cute.arch.sync_warp()  # a row's threads (one warp) read it before one of them writes
        return held_lse

    @cute.jit
    def _combine(
        self,
        at: RowVector,
        held_lse: Float32,
        mSlotBlocks: cute.Tensor,
        mPartial: cute.Tensor,
        mLsePartial: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ) -> cute.Tensor:
        """The thread's vector of a valid row, fp32; writes the row's lse."""
        gSlotBlocks = mSlotBlocks[at.batch, at.kv_head, at.token, None]  # int32 [n]
        num_slots = mSlotBlocks.shape[3]
        row_max, row_sum = -Float32.inf, Float32(0.0)
        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        rSum.fill(0.0)
        if const_expr(self.accumulate):
            rHeld = cute.make_rmem_tensor(VECTOR, mX.element_type)
            rHeld.fill(0.0)
            row_max = held_lse
            if held_lse > -Float32.inf:
                cute.autovec_copy(at.slice(mX), rHeld)
                row_sum = Float32(1.0)
            rSum.store(rHeld.load().to(Float32))
        rBlocks = cute.make_rmem_tensor(SLOT_BATCH, Int32)  # int32 (slot)
        rPartial = cute.make_rmem_tensor((VECTOR, SLOT_BATCH), mPartial.element_type)  # 16 bits (VECTOR, slot)
        rWeight = cute.make_rmem_tensor(SLOT_BATCH, Float32)  # fp32 (slot): lse
        num_partials = num_slots * self.partials_per_slot
        for start in cutlass.range(0, num_partials, SLOT_BATCH, unroll=1):
            # Loads depend only on which slots have a partial; all are issued before the first is used
            rBlocks.fill(-1)
            for i in range_constexpr(SLOT_BATCH):
                if start + i < num_partials:
                    rBlocks[i] = gSlotBlocks[(start + i) // self.partials_per_slot]
            rPartial.fill(0.0)
            rWeight.fill(-Float32.inf)
            for i in range_constexpr(SLOT_BATCH):
                if rBlocks[i] >= 0:
                    partial = at.token * num_partials + start + i
                    gPartial = mPartial[at.batch, at.kv_head, partial, at.head_in_group, None]  # 16 bits [dim]
                    cute.autovec_copy(cute.local_tile(gPartial, (VECTOR,), (at.vector,)), rPartial[None, i])
                    rWeight[i] = Float32(0.0)
                    if const_expr(self.weighted):
                        rWeight[i] = mLsePartial[at.batch, at.kv_head, partial, at.head_in_group]
            new_max = row_max
            for i in range_constexpr(SLOT_BATCH):
                new_max = cute.arch.fmax(new_max, rWeight[i])
            base = Float32(0.0) if new_max == -Float32.inf else new_max
            scale = cute.math.exp2((row_max - base) * LOG2_E, fastmath=True)
            row_max, row_sum = new_max, row_sum * scale
            for j in range_constexpr(VECTOR):
                rSum[j] = rSum[j] * scale
            for i in range_constexpr(SLOT_BATCH):
                weight = cute.math.exp2((rWeight[i] - base) * LOG2_E, fastmath=True)
                row_sum += weight
                for j in range_constexpr(VECTOR):
                    rSum[j] = cute.math.fma(weight, rPartial[j, i].to(Float32), rSum[j])
        if const_expr(self.weighted):
            rSum.store(rSum.load() * (Float32(0.0) if row_sum == 0.0 else 1.0 / row_sum))
            if at.vector == 0:
                mLse[at.batch, at.head, at.token] = row_max + cute.math.log(row_sum)
        return rSum

    @cute.jit
    def _store(self, rSum: cute.Tensor, gX: cute.Tensor):
        """Round a vector."""
        rX = cute.make_rmem_tensor(VECTOR, gX.element_type)
        rX.store(rSum.load().to(gX.element_type))
        cute.autovec_copy(rX, gX)


class CombineAndGate(CombinePartials):
    """CombinePartials, weighted, whose o stays in registers and is gated with the other branches there.

    Args: see CombinePartials.
    """

    def __init__(self, dim: int, group: int) -> None:
        super().__init__(dim, group, weighted=True, partials_per_slot=1, accumulate=False)

    @staticmethod
    @compiled_once
    def compile(  # type: ignore[override]
        dim: int, dtype: torch.dtype, group: int, w_dtype: torch.dtype | None, g_dtype: torch.dtype | None, keeps: bool
    ) -> Kernel:
        q, out = fake_heads(dtype, dim, dim)
        return compile_kernel(
            CombineAndGate(dim, group),
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            fake(torch.float32, None, None, None, group, aligned=False),
            out,
            *fake_stats(1),
            None if w_dtype is None else q,
            *fake_gating(dim, dtype, w_dtype, g_dtype, keeps),
        )

    @cute.jit
    def __call__(
        self,
        mSlotBlocks: cute.Tensor,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mOut: cute.Tensor,  # [B, T, H, dim]
        mLse: cute.Tensor,
        mQ: cute.Tensor | None,  # [B, T, H, dim], with mW
        mW: cute.Tensor | None,  # [H, 3, dim]
        mG: cute.Tensor | None,  # [B, T, H, 3]: without mW read, with it written
        mCmp: cute.Tensor,  # [B, T, H, dim]
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,  # [B, T, H, dim], where to write the combined o
        stream: Any,
    ):
        self.kernel(mSlotBlocks, mOPartial, mLsePartial, mOut, mLse, mQ, mW, mG, mCmp, mWin, mSlc).launch(
            **self._launch(mSlotBlocks, stream)
        )

    @cute.kernel
    def kernel(
        self,
        mSlotBlocks: cute.Tensor,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mQ: cute.Tensor | None,
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,
        mCmp: cute.Tensor,
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,
    ):
        at = self._row_vector(mSlotBlocks)
        rQ = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rO = cute.make_rmem_tensor((VECTOR, 3), mOut.element_type)  # 16 bits (VECTOR, branch): cmp, slc, win
        rQ.fill(0.0)
        rW = None
        if const_expr(mW is not None):
            rW = cute.make_rmem_tensor((VECTOR, 3), mW.element_type)  # (VECTOR, branch)
            rW.fill(0.0)
        if at.is_valid:
            rSlc = self._combine(at, -Float32.inf, mSlotBlocks, mOPartial, mLsePartial, mOut, mLse)  # fp32 (VECTOR)
            rO[None, 1].store(rSlc.load().to(mOut.element_type))
            # Prefetched with the partials, these would take 24 more registers: five CTAs per SM instead of seven
            cute.autovec_copy(at.slice(mCmp), rO[None, 0])
            cute.autovec_copy(at.slice(mWin), rO[None, 2])
            if const_expr(mSlc is not None):
                cute.autovec_copy(rO[None, 1], at.slice(mSlc))
            if const_expr(mW is not None):
                cute.autovec_copy(at.slice(mQ), rQ)
                for b in range_constexpr(3):
                    gW = mW[at.head, b, None]
                    cute.autovec_copy(cute.local_tile(gW, (VECTOR,), (at.vector,)), rW[None, b])
        gG = None if const_expr(mG is None) else mG[at.batch, at.token, at.head, None]  # [3]
        rG = row_gates(rQ, rW, gG, at.is_valid, self.vectors)  # fp32 (branch)
        if const_expr(mW is not None and mG is not None):
            if at.is_valid & (at.vector == 0):
                for b in range_constexpr(3):
                    gG[b] = rG[b]
        if at.is_valid:
            cute.autovec_copy(weighted_sum(rO, rG), at.slice(mOut))


class CombineQueryGradients(CombinePartials):
    """CombinePartials of dq, unweighted; the other terms are added to its fp32 sum before rounding.

    Args: see CombinePartials.
    """

    def __init__(self, dim: int, group: int, *, partials_per_slot: int) -> None:
        super().__init__(dim, group, weighted=False, partials_per_slot=partials_per_slot, accumulate=False)

    @staticmethod
    @compiled_once
    def compile(  # type: ignore[override]
        dim: int, dtype: torch.dtype, group: int, partials_per_slot: int, terms: int, w_dtype: torch.dtype | None
    ) -> Kernel:
        return compile_kernel(
            CombineQueryGradients(dim, group, partials_per_slot=partials_per_slot),
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            fake(dtype, None, None, None, dim),
            *fake_query_terms(dim, dtype, terms, BRANCHES - 1, w_dtype),
        )

    @cute.jit
    def __call__(
        self,
        mSlotBlocks: cute.Tensor,
        mPartial: cute.Tensor,
        mDq: cute.Tensor,  # [B, T, H, dim]
        mTerm0: cute.Tensor | None,  # [B, T, H, dim]; may be mDq
        mTerm1: cute.Tensor | None,
        mLogits: cute.Tensor | None,  # fp32 [B, T, H, 3]
        mW: cute.Tensor | None,  # [H, 3, dim], with mLogits
        stream: Any,
    ):
        self.kernel(mSlotBlocks, mPartial, mDq, mTerm0, mTerm1, mLogits, mW).launch(**self._launch(mSlotBlocks, stream))

    @cute.kernel
    def kernel(
        self,
        mSlotBlocks: cute.Tensor,
        mPartial: cute.Tensor,
        mDq: cute.Tensor,
        mTerm0: cute.Tensor | None,
        mTerm1: cute.Tensor | None,
        mLogits: cute.Tensor | None,
        mW: cute.Tensor | None,
    ):
        at = self._row_vector(mSlotBlocks)
        if at.is_valid:
            rSum = self._combine(at, -Float32.inf, mSlotBlocks, mPartial, None, mDq, None)  # fp32 (VECTOR)
            for mTerm in (mTerm0, mTerm1):
                if const_expr(mTerm is not None):
                    add_vector(rSum, mTerm[at.batch, at.token, at.head, None], at.vector)
            if const_expr(mLogits is not None):
                gLogits = mLogits[at.batch, at.token, at.head, None]  # fp32 [3]
                add_logit_gradients(rSum, gLogits, mW[at.head, None, None], at.vector)
            self._store(rSum, at.slice(mDq))


def combine_partials(
    worklist: Worklist,
    partial: Tensor,
    x: Tensor,
    *,
    lse_partial: Tensor | None = None,
    lse: Tensor | None = None,
    partials_per_slot: int = 1,
    accumulate: bool = False,
) -> None:
    """Sum the partials of a worklist's tokens.

    Args:
        partial: `[B,H_kv,T n partials_per_slot,G,dim]`, read only for slots that have a block.
        x: `[B,T,H,dim]`, output.
        lse_partial, lse: fp32 `[B,H_kv,T n,G]` and `[B,H,T]`: weights of the partials, and the combined lse (output).
        accumulate: treat the contents of x and lse as one more slot; x is not read where lse is -inf.
    """
    run = CombinePartials.compile(
        x.shape[3],
        x.dtype,
        partial.shape[3],
        weighted=lse is not None,
        partials_per_slot=partials_per_slot,
        accumulate=accumulate,
    ).run
    run(worklist.slot_blocks, partial, lse_partial, x, lse)


def combine_and_gate(
    worklist: Worklist, o_partial: Tensor, q: Tensor, gating: Gating, *, lse_partial: Tensor, lse: Tensor
) -> None:
    """Combine the partials of a worklist's tokens into o, then gate it with the other branches into `gating.out`.

    Args:
        o_partial, lse_partial, lse: see `combine_partials`; its x is `gating.out` here.
        q: `[B,T,H,D]` with D = D_v, read only with `gating.gate_proj_weight`.
    """
    out = gating.out
    run = CombineAndGate.compile(out.shape[3], out.dtype, o_partial.shape[3], *gating.variant).run
    read_q = None if gating.gate_proj_weight is None else q
    run(worklist.slot_blocks, o_partial, lse_partial, out, lse, read_q, *gating.arguments)


def combine_query_gradients(
    worklist: Worklist, partial: Tensor, dq: Tensor, terms: QueryTerms, *, partials_per_slot: int
) -> None:
    """Add the partials of dq of a worklist's tokens, and the other terms of dq, into dq.

    Args:
        partial, partials_per_slot: see `combine_partials`; its x is dq here.
        dq: `[B,T,H,D]`, output; may alias one of the terms.
        terms: the other terms, for these tokens and heads, from up to two branches.
    """
    group, branches = partial.shape[3], len(terms.branches)
    run = CombineQueryGradients.compile(dq.shape[3], dq.dtype, group, partials_per_slot, branches, terms.w_dtype).run
    run(worklist.slot_blocks, partial, dq, *terms.arguments(BRANCHES - 1))
