"""Gated sum of the three branches in one pass (NSA, equation 5).

    out[i] = sum_b g_b[i] * o_b[i],   g_b[i] = sigmoid(q[i] . w[b])   or given, or 1/3 each

Branches are compressed, selected, window, in this order. Each row (token and head) has a group of lanes, each holding a
16-byte vector. Sums are fp32 and rounded once.

In token mode, kernels that end with o_slc in registers apply the gate there, bitwise equal: CombineAndGate and
ForcedCombineAndGate use `Gating`, `row_gates` and `weighted_sum` from here, WindowCombine repeats their arithmetic on
another register layout.

Projected gates are saved for backward: fp32, 1 % of the bytes.

Packed documents (B = 1): the o's are in the aligned rows of pool/documents.py; tokens after the last document get 0.

Floor: q and three o's are read and out is written once (without the projection q is not read): 1.34 GB at 128K
tokens, 8 heads of 128, bf16: 0.32 ms at 4.2 TB/s.

Limits: head dims multiples of 8, at most 256; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.mma.warp import LOG2_E
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_heads

THREADS = 128

BRANCHES = 3
"""Number of branches: compressed, selected, window."""


def lanes_per_row(*vectors: int) -> int:
    """Lanes per row: a power of two with at least one lane for each of its vectors."""
    return 1 << (max(vectors) - 1).bit_length()


class Gating(NamedTuple):
    """Tensors that a kernel needs, besides q, to gate o_slc in its epilogue."""

    o_cmp: Tensor
    """`[B,T,H,D_v]`, like o_win and out."""
    o_win: Tensor | None
    """None for a kernel that attends to the window itself."""
    out: Tensor
    gate_proj_weight: Tensor | None
    """`[H,3,D]`: weights that project q to gate logits."""
    gates: Tensor | None
    """`[B,T,H,3]`. Without the weight: given gates (None: 1/3 each). With it: fp32, output (None: discard)."""
    o_slc: Tensor | None = None
    """Like out: output for the selected branch's o; None: discard."""

    def narrow(self, batches: slice, rows: slice, heads: slice) -> Gating:
        """Restrict to some batches, rows and heads."""
        weight = None if self.gate_proj_weight is None else self.gate_proj_weight[heads]
        o_cmp, out = (x[batches, rows, heads] for x in (self.o_cmp, self.out))
        rest = (None if x is None else x[batches, rows, heads] for x in (self.o_win, self.gates, self.o_slc))
        o_win, gates, o_slc = rest
        return Gating(o_cmp, o_win, out, weight, gates, o_slc)

    @property
    def variant(self) -> tuple[torch.dtype | None, torch.dtype | None, bool]:
        """Compile key: dtypes of weight and gates; whether o_slc is written."""
        w_dtype, g_dtype = (None if x is None else x.dtype for x in (self.gate_proj_weight, self.gates))
        return w_dtype, g_dtype, self.o_slc is not None

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """Kernel arguments besides q and out, in the order of `fake_gating`."""
        return self.gate_proj_weight, self.gates, self.o_cmp, self.o_win, self.o_slc


def fake_gating(
    dim: int, dtype: torch.dtype, w_dtype: torch.dtype | None, g_dtype: torch.dtype | None, keeps: bool
) -> tuple[Any, ...]:
    """`Gating.arguments` to compile with. Args: dim, dtype: of the rows. The rest is `Gating.variant`."""
    weight = None if w_dtype is None else fake(w_dtype, None, 3, dim)
    gates = None if g_dtype is None else fake(g_dtype, None, None, None, 3, aligned=False)
    o_cmp, o_win, o_slc = fake_heads(dtype, dim, dim, dim)
    return weight, gates, o_cmp, o_win, o_slc if keeps else None


@cute.jit
def partial_dot(rX: cute.Tensor, rY: cute.Tensor) -> Float32:
    """A lane's share of x . y: the dot product of its vectors."""
    dot = Float32(0.0)
    for i in range_constexpr(VECTOR):
        dot = cute.math.fma(rX[i].to(Float32), rY[i].to(Float32), dot)
    return dot


@cute.jit
def gate_of_logit(logit: Float32) -> Float32:
    """sigmoid(logit)."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(-logit * LOG2_E, fastmath=True))


@cute.jit
def row_gates(
    rQ: cute.Tensor, rW: cute.Tensor | None, gG: cute.Tensor | None, exists: Boolean, lanes: cutlass.Constexpr[int]
) -> cute.Tensor:
    """The three gates of a row, in each of its `lanes`. All lanes of a warp must call this.

    Args:
        rQ, rW: a lane's vector of q, and of its head's three weights, `[VECTOR,3]`, to project the gates.
        gG: without rW, the row's given gates, read if the row `exists`; None: 1/3 each.
    """
    rG = cute.make_rmem_tensor(BRANCHES, Float32)
    rG.fill(1.0 / BRANCHES)
    if const_expr(rW is not None):
        for b in range_constexpr(BRANCHES):
            dot = partial_dot(rQ, rW[None, b])
            rG[b] = gate_of_logit(cute.arch.warp_reduction_sum(dot, threads_in_group=lanes))
    elif const_expr(gG is not None):
        if exists:
            for b in range_constexpr(BRANCHES):
                rG[b] = gG[b].to(Float32)
    return rG


@cute.jit
def weighted_sum(rO: cute.Tensor, rG: cute.Tensor) -> cute.Tensor:
    """A lane's vector of out from those of the branches, `[VECTOR,3]`, and three gates."""
    # Explicit fma: left to the compiler, bits would differ between kernels and their variants
    rOut = cute.make_rmem_tensor(VECTOR, rO.element_type)
    for i in range_constexpr(VECTOR):
        value = rO[i, 0].to(Float32) * rG[0]
        for b in range_constexpr(1, BRANCHES):
            value = cute.math.fma(rO[i, b].to(Float32), rG[b], value)
        rOut[i] = value.to(rO.element_type)
    return rOut


class GatedSum:
    """out of one row, by a group of lanes.

    Args: dim, v_dim: head dims of q and of the outputs.
    """

    def __init__(self, dim: int, v_dim: int) -> None:
        self.vectors, self.v_vectors = dim // VECTOR, v_dim // VECTOR
        self.lanes = lanes_per_row(self.vectors, self.v_vectors)
        self.rows = THREADS // self.lanes

    @staticmethod
    @compiled_once
    def compile(
        dim: int, v_dim: int, dtype: torch.dtype, w_dtype: torch.dtype | None, g_dtype: torch.dtype | None, packed: bool
    ) -> Kernel:
        q = fake(dtype, None, None, None, dim) if w_dtype is not None else None
        w = fake(w_dtype, None, 3, dim) if w_dtype is not None else None
        gates = fake(g_dtype, None, None, None, 3, aligned=False) if g_dtype is not None else None
        rows = fake(torch.int32, None, aligned=False) if packed else None
        outputs = fake_heads(dtype, v_dim, v_dim, v_dim, v_dim)
        return compile_kernel(GatedSum(dim, v_dim), q, w, gates, rows, *outputs)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # [B, N, H, D], with mW
        mW: cute.Tensor | None,  # [H, 3, D]
        mG: cute.Tensor | None,  # [B, N, H, 3]: output with mW, input without
        mRows: cute.Tensor | None,  # Documents.rows
        mCmp: cute.Tensor,  # [B, N, H, D_v], with mRows aligned rows
        mSlc: cute.Tensor,  # [B, N, H, D_v], like mCmp
        mWin: cute.Tensor,  # [B, N, H, D_v], like mCmp
        mOut: cute.Tensor,  # [B, N, H, D_v]
        stream: Any,
    ):
        tiles = mOut.shape[0] * cute.ceil_div(mOut.shape[1], self.rows)
        self.kernel(mQ, mW, mG, mRows, mCmp, mSlc, mWin, mOut).launch(
            grid=[tiles * mOut.shape[2], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mCmp: cute.Tensor,
        mSlc: cute.Tensor,
        mWin: cute.Tensor,
        mOut: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work_index, _, _ = cute.arch.block_idx()
        _, tokens, heads, _ = mOut.shape
        head, tile = work_index % heads, work_index // heads
        tiles = cute.ceil_div(tokens, self.rows)
        batch = tile // tiles
        lane = thread % self.lanes
        token = tile % tiles * self.rows + thread // self.lanes
        in_q, in_v = lane < self.vectors, lane < self.v_vectors
        # Load: the row of the outputs, and the weights of the head
        row, exists = token, token < tokens
        if const_expr(mRows is not None):
            if token < tokens:
                row = mRows[token]
            exists = (token < tokens) & (row >= 0)

        rW = None
        if const_expr(mW is not None):
            rW = cute.make_rmem_tensor((VECTOR, BRANCHES), mW.element_type)
            rW.fill(0.0)
            if in_q:
                for b in range_constexpr(BRANCHES):
                    cute.autovec_copy(cute.local_tile(mW[head, b, None], (VECTOR,), (lane,)), rW[None, b])

        branches = (mCmp, mSlc, mWin)
        rQ = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rO = cute.make_rmem_tensor((VECTOR, BRANCHES), mOut.element_type)
        rQ.fill(0.0)
        if const_expr(mRows is not None):
            rO.fill(0.0)
        if exists:
            if const_expr(mW is not None):
                if in_q:
                    cute.autovec_copy(cute.local_tile(mQ[batch, token, head, None], (VECTOR,), (lane,)), rQ)
            if in_v:
                for b in range_constexpr(BRANCHES):
                    cute.autovec_copy(
                        cute.local_tile(branches[b][batch, row, head, None], (VECTOR,), (lane,)), rO[None, b]
                    )

        # Gate
        gG = None if const_expr(mG is None) else mG[batch, token, head, None]  # [3]
        rG = row_gates(rQ, rW, gG, exists, self.lanes)  # fp32 (BRANCHES)
        if const_expr(mW is not None):
            if (token < tokens) & (lane == 0):
                for b in range_constexpr(BRANCHES):
                    gG[b] = rG[b]
        if (token < tokens) & in_v:
            cute.autovec_copy(weighted_sum(rO, rG), cute.local_tile(mOut[batch, token, head, None], (VECTOR,), (lane,)))


def gated_sum(
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    out: Tensor,
    *,
    q: Tensor,
    gate_proj_weight: Tensor | None = None,
    gates: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor | None:
    """Sum the branches, weighted by their gates, into `out` (NSA, equation 5).

    Args:
        o_cmp, o_slc, o_win, out: `[B,N,H,D_v]`, bf16 or fp16.
        q: `[B,N,H,D]`, read only with `gate_proj_weight` `[H,3,D]`.
        gates: `[B,N,H,3]`, used unchanged; without gates and weight 1/3 each.
        rows: int32 `[N]`, the row in the o's of each token, -1 if none (out is 0). B must be 1.

    Returns:
        Gates: given, or projected (fp32), or None.
    """
    if gate_proj_weight is not None:
        gates = torch.empty((*q.shape[:-1], 3), dtype=torch.float32, device=q.device)
    if out.numel() > 0:
        run = GatedSum.compile(
            q.shape[-1],
            out.shape[-1],
            out.dtype,
            None if gate_proj_weight is None else gate_proj_weight.dtype,
            None if gates is None else gates.dtype,
            rows is not None,
        ).run
        run(None if gate_proj_weight is None else q, gate_proj_weight, gates, rows, o_cmp, o_slc, o_win, out)
    return gates
