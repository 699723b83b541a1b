"""Backward of gate/forward.py: what every branch and the gates need, in one pass, without a weighted copy of do.

    out = sum_b g_b o_b        delta_b = do . o_b
    do_b = g_b do              dg_b = delta_b,   d logit_b = delta_b g_b (1 - g_b)
    dW[h,b] = sum over rows of d logit_b * q

Attention's backward weighs do by exp(S - lse). With lse_b - log(g_b) instead, it weighs do by g_b exp(S - lse_b), and
    dS_b = g_b P (do . v - delta_b) = P (do_b . v - do_b . o_b),
so a branch reads do itself and a shifted lse. Gates that were given may be negative: then do_b is written, and delta_b
is that of the rounded do_b: rows that see one key have dS = 0, and two roundings would not cancel.

A CTA walks over `chunk` rows of one head; a row belongs to a group of lanes, one vector of 16 bytes each. Partial sums
of dW stay in registers, one fp32 [3, D] for each CTA, and are added up in a fixed order.

Floor: q, do and three o's are read once: 1.34 GB at 128K tokens, 8 heads of 128, bf16: 0.32 ms at 4.2 TB/s.

Limits: head dims multiples of 8, at most 256; 64-bit offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

THREADS = 128
CHUNK = 256
MOST_CHUNKS = 2048


class GateGradients:
    """Args: dims of q and of the outputs."""

    def __init__(self, dim: int, v_dim: int) -> None:
        self.dim, self.vectors, self.v_vectors = dim, dim // VECTOR, v_dim // VECTOR
        self.lanes = 1 << (max(self.vectors, self.v_vectors) - 1).bit_length()
        self.rows = THREADS // self.lanes

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # [B, N, H, D], where gates were projected
        mG: cute.Tensor | None,  # [B, N, H, 3]; None: 1/3 each
        mRows: cute.Tensor | None,  # Documents.rows
        mDo: cute.Tensor,  # [B, N, H, D_v]
        mCmp: cute.Tensor,  # [B, N, H, D_v], with mRows aligned rows
        mSlc: cute.Tensor,
        mWin: cute.Tensor,
        mLseCmp: cute.Tensor,  # fp32 [B, H, N], likewise
        mLseSlc: cute.Tensor,
        mLseWin: cute.Tensor,
        mShifted: cute.Tensor,  # fp32 [3, B, H, N], likewise
        mDelta: cute.Tensor,  # fp32 [3, B, H, N], likewise
        mDg: cute.Tensor | None,  # [B, N, H, 3]: of the logits with mQ, else of the gates
        mPartial: cute.Tensor | None,  # fp32 [B * chunks, H, 3, D], with mQ
        mDoCmp: cute.Tensor | None,  # like mCmp, where gates were given
        mDoSlc: cute.Tensor | None,
        mDoWin: cute.Tensor | None,
        chunk: Int32,
        stream: Any,
    ):
        chunks = cute.ceil_div(mDo.shape[1], chunk)
        self.kernel(
            mQ,
            mG,
            mRows,
            mDo,
            mCmp,
            mSlc,
            mWin,
            mLseCmp,
            mLseSlc,
            mLseWin,
            mShifted,
            mDelta,
            mDg,
            mPartial,
            mDoCmp,
            mDoSlc,
            mDoWin,
            chunk,
            chunks,
        ).launch(grid=[mDo.shape[2], chunks, mDo.shape[0]], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mG: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mDo: cute.Tensor,
        mCmp: cute.Tensor,
        mSlc: cute.Tensor,
        mWin: cute.Tensor,
        mLseCmp: cute.Tensor,
        mLseSlc: cute.Tensor,
        mLseWin: cute.Tensor,
        mShifted: cute.Tensor,
        mDelta: cute.Tensor,
        mDg: cute.Tensor | None,
        mPartial: cute.Tensor | None,
        mDoCmp: cute.Tensor | None,
        mDoSlc: cute.Tensor | None,
        mDoWin: cute.Tensor | None,
        chunk: Int32,
        chunks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, part, batch = cute.arch.block_idx()
        tokens = cutlass.min((part + 1) * chunk, mDo.shape[1])  # of this CTA: up to here
        lane, slot = thread % self.lanes, thread // self.lanes
        in_q, in_v = lane < self.vectors, lane < self.v_vectors
        outputs, lses, weighted = (mCmp, mSlc, mWin), (mLseCmp, mLseSlc, mLseWin), (mDoCmp, mDoSlc, mDoWin)
        element = mDo.element_type

        rQ = cute.make_rmem_tensor(VECTOR, element)
        rDo = cute.make_rmem_tensor(VECTOR, element)
        rO = cute.make_rmem_tensor((VECTOR, 3), element)
        rG = cute.make_rmem_tensor(3, Float32)
        rDelta = cute.make_rmem_tensor(3, Float32)
        rSum = cute.make_rmem_tensor((VECTOR, 3), Float32)
        rSum.fill(0.0)
        rG.fill(1.0 / 3.0)
        for start in cutlass.range(part * chunk, tokens, self.rows, unroll=2):
            token = start + slot
            row, attended = token, token < tokens
            if const_expr(mRows is not None):
                if token < tokens:
                    row = mRows[token]
                attended = (token < tokens) & (row >= 0)
            rQ.fill(0.0)
            rDo.fill(0.0)
            rO.fill(0.0)
            if attended & in_v:
                cute.autovec_copy(cute.local_tile(mDo[batch, token, head, None], (VECTOR,), (lane,)), rDo)
                for b in range_constexpr(3):
                    gO = cute.local_tile(outputs[b][batch, row, head, None], (VECTOR,), (lane,))
                    cute.autovec_copy(gO, rO[None, b])
            if const_expr(mQ is not None):
                if attended & in_q:
                    cute.autovec_copy(cute.local_tile(mQ[batch, token, head, None], (VECTOR,), (lane,)), rQ)
            if const_expr(mG is not None):
                if attended:
                    for b in range_constexpr(3):
                        rG[b] = mG[batch, token, head, b].to(Float32)
            for b in range_constexpr(3):
                rDelta[b] = self._dot(rDo, rO[None, b])
            if const_expr(mQ is not None):
                for b in range_constexpr(3):
                    d_logit = rDelta[b] * rG[b] * (1.0 - rG[b])
                    if (token < tokens) & (lane == 0):
                        mDg[batch, token, head, b] = d_logit
                    for i in range_constexpr(VECTOR):
                        rSum[i, b] = cute.math.fma(d_logit, rQ[i].to(Float32), rSum[i, b])
            elif const_expr(mDg is not None):
                if (token < tokens) & (lane == 0):
                    for b in range_constexpr(3):
                        mDg[batch, token, head, b] = rDelta[b].to(mDg.element_type)
            if const_expr(mDoCmp is None):
                if attended & (lane == 0):
                    for b in range_constexpr(3):
                        mDelta[b, batch, head, row] = rDelta[b]
                        lse = lses[b][batch, head, row]
                        if lse != -Float32.inf:
                            lse -= cute.math.log(rG[b])
                        mShifted[b, batch, head, row] = lse
            else:
                rWeighted = cute.make_rmem_tensor(VECTOR, element)
                for b in range_constexpr(3):
                    for i in range_constexpr(VECTOR):
                        rWeighted[i] = (rDo[i].to(Float32) * rG[b]).to(element)
                    delta = self._dot(rWeighted, rO[None, b])  # of what attention's backward reads, rounded
                    if attended & in_v:
                        gDo = cute.local_tile(weighted[b][batch, row, head, None], (VECTOR,), (lane,))
                        cute.autovec_copy(rWeighted, gDo)
                    if attended & (lane == 0):
                        mDelta[b, batch, head, row] = delta
                        mShifted[b, batch, head, row] = lses[b][batch, head, row]

        if const_expr(mQ is not None):
            smem = cutlass.memory.SmemAllocator()
            sSum = smem.allocate_tensor(
                Float32, cute.make_ordered_layout((self.dim, 3, self.rows), order=(0, 1, 2)), 16
            )
            if in_q:
                for b in range_constexpr(3):
                    cute.autovec_copy(rSum[None, b], cute.local_tile(sSum[None, b, slot], (VECTOR,), (lane,)))
            cute.arch.sync_threads()
            for item in cutlass.range(thread, 3 * self.dim, THREADS):
                b, column = item // self.dim, item % self.dim
                total = Float32(0.0)
                for i in range_constexpr(self.rows):
                    total += sSum[column, b, i]
                mPartial[batch * chunks + part, head, b, column] = total

    @cute.jit
    def _dot(self, rX: cute.Tensor, rY: cute.Tensor) -> Float32:
        """Of two rows, a vector in each lane."""
        dot = Float32(0.0)
        for i in range_constexpr(VECTOR):
            dot = cute.math.fma(rX[i].to(Float32), rY[i].to(Float32), dot)
        return cute.arch.warp_reduction_sum(dot, threads_in_group=self.lanes)


@dataclass(frozen=True)
class GateResults:
    """What follows from the gates' gradients."""

    lse: Tensor
    """fp32 `[3,B,H,N]`: shifted, so that exp(S - lse) weighs `do`. Unused aligned rows: inf."""
    delta: Tensor
    """fp32 `[3,B,H,N]`: do . o of the `do` that belongs to `lse`."""
    do: list[Tensor] | None
    """Weighted by gates that were given, like the o's; then `lse` is not shifted."""
    logits: Tensor | None
    """fp32 `[B,N,H,3]`, gradients of projected gates' logits."""
    gates: Tensor | None
    """`[B,N,H,3]`, gradients of gates that were given."""
    gate_proj_weight: Tensor | None
    """fp32 `[H,3,D]`, gradient of the projection."""


@compiled_once
def _compiled(
    dim: int, v_dim: int, dtype: torch.dtype, g_dtype: torch.dtype | None, projected: bool, packed: bool
) -> Kernel:
    def values() -> Any:
        return fake(dtype, None, None, None, v_dim)

    def sums() -> Any:
        return fake(torch.float32, None, None, None, aligned=False)

    def per_gate(of: torch.dtype | None) -> Any:
        return None if of is None else fake(of, None, None, None, 3, aligned=False)

    given = g_dtype is not None and not projected
    return compile_kernel(
        GateGradients(dim, v_dim),
        fake(dtype, None, None, None, dim) if projected else None,
        per_gate(g_dtype),
        fake(torch.int32, None, aligned=False) if packed else None,
        *[values() for _ in range(4)],
        *[sums() for _ in range(3)],
        *[fake(torch.float32, 3, None, None, None, aligned=False) for _ in range(2)],
        per_gate(torch.float32 if projected else g_dtype),
        fake(torch.float32, None, None, 3, dim, aligned=False) if projected else None,
        *[values() if given else None for _ in range(3)],
        Int32(0),
    )


def gate_gradients(
    do: Tensor,
    outputs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    q: Tensor,
    gates: Tensor | None,
    projected: bool,
    rows: Tensor | None = None,
) -> GateResults:
    """From the gradient of the gated sum to what the three branches and the gates get.

    Args:
        do: `[B,N,H,D_v]`, bf16 or fp16.
        outputs, lses: of the branches, `[B,N,H,D_v]` and fp32 `[B,H,N]`.
        q: `[B,N,H,D]`, read where gates were projected.
        gates: `[B,N,H,3]`, those that weighed the outputs; None: 1/3 each.
        projected: the gates are sigmoids of q . w.
        rows: int32 `[N]`, where in `outputs` and `lses` the rows of the tokens are, -1: nowhere. B is 1 then.
    """
    batch, tokens, heads, v_dim = do.shape
    dim, aligned = q.shape[-1], outputs[0].shape[1]
    device, given = do.device, gates is not None and not projected

    def sums(*shape: int) -> Tensor:
        if rows is None:
            return torch.empty(shape, dtype=torch.float32, device=device)
        return torch.full(shape, torch.inf, dtype=torch.float32, device=device)

    lse, delta = (sums(3, batch, heads, aligned) for _ in range(2))
    if rows is not None:
        delta.zero_()
    new = torch.empty_like if rows is None else torch.zeros_like
    weighted = [new(o) for o in outputs] if given else None
    into: Sequence[Tensor | None] = weighted or (None, None, None)
    d_gates = None
    if gates is not None:
        d_gates = torch.empty(gates.shape, dtype=torch.float32 if projected else gates.dtype, device=device)
    chunk = CHUNK * max(1, -(-batch * tokens // (CHUNK * MOST_CHUNKS)))
    partial = None
    if projected:
        shape = batch * -(-tokens // chunk), heads, 3, dim
        partial = torch.empty(shape, dtype=torch.float32, device=device)
    if do.numel() > 0:
        g_dtype = None if gates is None else gates.dtype
        run = _compiled(dim, v_dim, do.dtype, g_dtype, projected, rows is not None).run
        run(
            q if projected else None,
            gates,
            rows,
            do,
            *outputs,
            *lses,
            lse,
            delta,
            d_gates,
            partial,
            *into,
            chunk,
        )
    return GateResults(
        lse,
        delta,
        weighted,
        d_gates if projected else None,
        None if projected else d_gates,
        None if partial is None else partial.sum(0),
    )
