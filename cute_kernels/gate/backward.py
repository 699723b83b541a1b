"""Backward of gate/forward.py: gradients of the gates, and inputs of each branch's attention backward, in one pass.

    out = sum_b g_b o_b        delta_b = do . o_b
    do_b = g_b do              dg_b = delta_b,   dlogit_b = delta_b g_b (1 - g_b)
    dW[h,b] = sum over rows of dlogit_b * q

No do_b is written for projected gates. Attention's backward weights do by P = exp(S - lse). Given lse_b - log(g_b)
instead of lse_b it computes g_b P, and
    dS_b = g_b P (do . v - delta_b) = P (do_b . v - do_b . o_b),
so a branch reads do itself and a shifted lse. Given gates may be negative and have no logarithm: then do_b is written,
and delta_b is computed from it.

A CTA iterates over a chunk of rows of one head. Each row has a group of lanes, each holding a 16-byte vector. Sums of
dW over the chunk stay in registers, one fp32 partial [3, D] per CTA; partials are summed in a fixed order.

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

from cute_kernels.gate.forward import BRANCHES, THREADS, lanes_per_row, partial_dot
from cute_kernels.gate.partials import sum_partials
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

CHUNK = 256
"""Rows per chunk are a multiple of this."""

MAX_CHUNKS = 2048
"""Maximum number of chunks per head, hence of partials of dW."""


class GateGradients:
    """Gradients of the gates of a chunk of rows of a head.

    Args: dim, v_dim: head dims of q and of the outputs.
    """

    def __init__(self, dim: int, v_dim: int) -> None:
        self.dim, self.vectors, self.v_vectors = dim, dim // VECTOR, v_dim // VECTOR
        self.lanes = lanes_per_row(self.vectors, self.v_vectors)
        self.rows = THREADS // self.lanes

    @staticmethod
    @compiled_once
    def compile(
        dim: int, v_dim: int, dtype: torch.dtype, g_dtype: torch.dtype | None, projected: bool, packed: bool
    ) -> Kernel:
        def gates(gate_dtype: torch.dtype | None) -> Any:
            return None if gate_dtype is None else fake(gate_dtype, None, None, None, 3, aligned=False)

        given = g_dtype is not None and not projected
        return compile_kernel(
            GateGradients(dim, v_dim),
            fake(dtype, None, None, None, dim) if projected else None,
            gates(g_dtype),
            fake(torch.int32, None, aligned=False) if packed else None,
            *fake_heads(dtype, v_dim, v_dim, v_dim, v_dim),
            *fake_stats(3),
            *[fake(torch.float32, 3, None, None, None, aligned=False) for _ in range(2)],
            gates(torch.float32 if projected else g_dtype),
            fake(torch.float32, None, None, 3, dim, aligned=False) if projected else None,
            *(fake_heads(dtype, v_dim, v_dim, v_dim) if given else [None] * 3),
            Int32(0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # [B, N, H, D], if gates were projected
        mG: cute.Tensor | None,  # [B, N, H, 3]; None: 1/3 each
        mRows: cute.Tensor | None,  # Documents.rows
        mDo: cute.Tensor,  # [B, N, H, D_v]
        mCmp: cute.Tensor,  # [B, N, H, D_v], with mRows aligned rows
        mSlc: cute.Tensor,  # [B, N, H, D_v], like mCmp
        mWin: cute.Tensor,  # [B, N, H, D_v], like mCmp
        mLseCmp: cute.Tensor,  # fp32 [B, H, N], with mRows aligned rows
        mLseSlc: cute.Tensor,
        mLseWin: cute.Tensor,
        mShifted: cute.Tensor,  # fp32 [3, B, H, N], with mRows aligned rows
        mDelta: cute.Tensor,  # fp32 [3, B, H, N], with mRows aligned rows
        mDg: cute.Tensor | None,  # [B, N, H, 3]: of the logits with mQ, otherwise of the gates
        mPartial: cute.Tensor | None,  # fp32 [B * chunks, H, 3, D], with mQ
        mDoCmp: cute.Tensor | None,  # like mCmp, if gates were given
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
        head, chunk_index, batch = cute.arch.block_idx()
        end = cutlass.min((chunk_index + 1) * chunk, mDo.shape[1])  # end of the chunk
        lane, lane_group = thread % self.lanes, thread // self.lanes
        in_q, in_v = lane < self.vectors, lane < self.v_vectors
        outputs, lses, weighted = (mCmp, mSlc, mWin), (mLseCmp, mLseSlc, mLseWin), (mDoCmp, mDoSlc, mDoWin)
        element = mDo.element_type

        rQ = cute.make_rmem_tensor(VECTOR, element)
        rDo = cute.make_rmem_tensor(VECTOR, element)
        rO = cute.make_rmem_tensor((VECTOR, BRANCHES), element)
        rG = cute.make_rmem_tensor(BRANCHES, Float32)
        rDelta = cute.make_rmem_tensor(BRANCHES, Float32)
        rSum = cute.make_rmem_tensor((VECTOR, BRANCHES), Float32)  # fp32 (VECTOR, BRANCHES): dW
        rSum.fill(0.0)
        rG.fill(1.0 / BRANCHES)
        for start in cutlass.range(chunk_index * chunk, end, self.rows, unroll=2):
            # Load the row, which is elsewhere in the outputs of packed documents
            token = start + lane_group
            row, exists = token, token < end
            if const_expr(mRows is not None):
                if token < end:
                    row = mRows[token]
                exists = (token < end) & (row >= 0)
            rQ.fill(0.0)
            rDo.fill(0.0)
            rO.fill(0.0)
            if exists & in_v:
                cute.autovec_copy(cute.local_tile(mDo[batch, token, head, None], (VECTOR,), (lane,)), rDo)
                for b in range_constexpr(BRANCHES):
                    gO = cute.local_tile(outputs[b][batch, row, head, None], (VECTOR,), (lane,))
                    cute.autovec_copy(gO, rO[None, b])
            if const_expr(mQ is not None):
                if exists & in_q:
                    cute.autovec_copy(cute.local_tile(mQ[batch, token, head, None], (VECTOR,), (lane,)), rQ)
            if const_expr(mG is not None):
                if exists:
                    for b in range_constexpr(BRANCHES):
                        rG[b] = mG[batch, token, head, b].to(Float32)
            # Gradients of the gates or of their logits
            for b in range_constexpr(BRANCHES):
                rDelta[b] = self._dot(rDo, rO[None, b])
            if const_expr(mQ is not None):
                for b in range_constexpr(BRANCHES):
                    d_logit = rDelta[b] * rG[b] * (1.0 - rG[b])
                    if (token < end) & (lane == 0):
                        mDg[batch, token, head, b] = d_logit
                    for i in range_constexpr(VECTOR):
                        rSum[i, b] = cute.math.fma(d_logit, rQ[i].to(Float32), rSum[i, b])
            elif const_expr(mDg is not None):
                if (token < end) & (lane == 0):
                    for b in range_constexpr(BRANCHES):
                        mDg[batch, token, head, b] = rDelta[b].to(mDg.element_type)
            # Inputs of each branch's attention backward
            if const_expr(mDoCmp is None):
                if exists & (lane == 0):
                    for b in range_constexpr(BRANCHES):
                        mDelta[b, batch, head, row] = rDelta[b]
                        lse = lses[b][batch, head, row]
                        if lse != -Float32.inf:
                            lse -= cute.math.log(rG[b])
                        mShifted[b, batch, head, row] = lse
            else:
                # A row that sees one key has dS = 0, which would not hold if do_b and delta_b were rounded separately
                rWeighted = cute.make_rmem_tensor(VECTOR, element)
                for b in range_constexpr(BRANCHES):
                    for i in range_constexpr(VECTOR):
                        rWeighted[i] = (rDo[i].to(Float32) * rG[b]).to(element)
                    delta = self._dot(rWeighted, rO[None, b])  # from the rounded do_b
                    if exists & in_v:
                        gDo = cute.local_tile(weighted[b][batch, row, head, None], (VECTOR,), (lane,))
                        cute.autovec_copy(rWeighted, gDo)
                    if exists & (lane == 0):
                        mDelta[b, batch, head, row] = delta
                        mShifted[b, batch, head, row] = lses[b][batch, head, row]

        if const_expr(mQ is not None):
            # Epilogue: the sums of all lane groups
            smem = SmemAllocator()
            # fp32 (D, BRANCHES, rows): dW of each lane group
            sSum = smem.allocate_tensor(
                Float32, cute.make_ordered_layout((self.dim, BRANCHES, self.rows), order=(0, 1, 2)), 16
            )
            if in_q:
                for b in range_constexpr(BRANCHES):
                    cute.autovec_copy(rSum[None, b], cute.local_tile(sSum[None, b, lane_group], (VECTOR,), (lane,)))
            cute.arch.sync_threads()
            for i in cutlass.range(thread, BRANCHES * self.dim, THREADS):
                b, column = i // self.dim, i % self.dim
                total = Float32(0.0)
                for group in range_constexpr(self.rows):
                    total += sSum[column, b, group]
                mPartial[batch * chunks + chunk_index, head, b, column] = total

    @cute.jit
    def _dot(self, rX: cute.Tensor, rY: cute.Tensor) -> Float32:
        """x . y of two rows, one vector per lane."""
        return cute.arch.warp_reduction_sum(partial_dot(rX, rY), threads_in_group=self.lanes)


@dataclass(frozen=True)
class GateResults:
    """Gradients of the gates, and inputs of each branch's attention backward."""

    lse: Tensor
    """fp32 `[3,B,H,N]`, shifted by -log(g) if gates were projected. Unused aligned rows: inf."""
    delta: Tensor
    """fp32 `[3,B,H,N]`: do . o, with the weighted do if `do` is not None."""
    do: list[Tensor] | None
    """do of each branch, like its o, weighted by given gates; None if all branches read the same do."""
    logits: Tensor | None
    """fp32 `[B,N,H,3]`, gradients of the logits of projected gates."""
    gates: Tensor | None
    """`[B,N,H,3]`, gradients of given gates."""
    gate_proj_weight: Tensor | None
    """fp32 `[H,3,D]`, gradient of the projection."""


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
    """Compute gradients of the gates, and inputs of each branch's backward, from the gradient of the gated sum.

    Args:
        do: `[B,N,H,D_v]`, bf16 or fp16.
        outputs, lses: per branch, `[B,N,H,D_v]` and fp32 `[B,H,N]`.
        q: `[B,N,H,D]`, read if gates were projected.
        gates: `[B,N,H,3]`, given or projected, as in forward; None: 1/3 each.
        projected: the gates are sigmoids of q . w.
        rows: int32 `[N]`, the row in `outputs` and `lses` of each token, -1 if none. B must be 1.
    """
    batch, tokens, heads, v_dim = do.shape
    dim, aligned = q.shape[-1], outputs[0].shape[1]
    device, given = do.device, gates is not None and not projected

    def new_stats(*shape: int) -> Tensor:
        if rows is None:
            return torch.empty(shape, dtype=torch.float32, device=device)
        return torch.full(shape, torch.inf, dtype=torch.float32, device=device)

    lse, delta = (new_stats(3, batch, heads, aligned) for _ in range(2))
    if rows is not None:
        delta.zero_()
    new_output = torch.empty_like if rows is None else torch.zeros_like
    weighted = [new_output(o) for o in outputs] if given else None
    optional: Sequence[Tensor | None] = weighted or (None, None, None)
    d_gates = None
    if gates is not None:
        d_gates = torch.empty(gates.shape, dtype=torch.float32 if projected else gates.dtype, device=device)
    chunk = CHUNK * max(1, -(-batch * tokens // (CHUNK * MAX_CHUNKS)))
    partial = None
    if projected:
        shape = batch * -(-tokens // chunk), heads, 3, dim
        partial = torch.empty(shape, dtype=torch.float32, device=device)
    if do.numel() > 0:
        g_dtype = None if gates is None else gates.dtype
        run = GateGradients.compile(dim, v_dim, do.dtype, g_dtype, projected, rows is not None).run
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
            *optional,
            chunk,
        )
    return GateResults(
        lse,
        delta,
        weighted,
        d_gates if projected else None,
        None if projected else d_gates,
        None if partial is None else sum_partials(partial),
    )
