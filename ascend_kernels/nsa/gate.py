"""The gated sum of the three branches: out = g_cmp o_cmp + g_slc o_slc + g_win o_win, and its backward.

Gates are projected, g = sigmoid(w q) with w `[H,3,D]`, given, or 1/3 each. Rows past the last document get 0.

    delta_b = dg_b = sum(do * o_b)        dlogit_b = dg_b g_b (1 - g_b)        dw_b = sum over rows of dlogit_b q
    dq = dq_cmp + dq_slc + dq_win + sum over b of dlogit_b w_b

Floor: forward, three outputs and, for projected gates, q read, out written; backward, do besides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.attention import LOG2_E, load_tile, store_statistics
from ascend_kernels.nsa.layout import Pack, rows_in_documents, strided
from ascend_kernels.nsa.tiling import block_of, gpu_options

ROWS = 32
"""Rows of a tile."""
CHUNK = 512
"""Rows of a program of the backward."""


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def load_gates(
    p_q, q_row, q_head, p_weight, p_gates, gate_row, gate_head, i_head, o_row, o_d, end, dim,
    GATES: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Weights of the three branches in rows of one head, `[M]` each, and q `[M,D]` fp32 of projected ones."""
    b_q = 0.0
    if GATES == "projected":
        b_q = load_tile(p_q + i_head * q_head, o_row, q_row, o_d, end, dim, WHOLE).to(tl.float32)
        b_w_cmp, b_w_slc, b_w_win = load_weights(p_weight, i_head, o_d, dim)
        b_cmp = sigmoid(tl.sum(b_q * b_w_cmp[None, :], 1))
        b_slc = sigmoid(tl.sum(b_q * b_w_slc[None, :], 1))
        b_win = sigmoid(tl.sum(b_q * b_w_win[None, :], 1))
    elif GATES == "given":
        p_own, exists = p_gates + o_row * gate_row + i_head * gate_head, o_row < end
        b_cmp = tl.load(p_own, mask=exists, other=0.0).to(tl.float32)
        b_slc = tl.load(p_own + 1, mask=exists, other=0.0).to(tl.float32)
        b_win = tl.load(p_own + 2, mask=exists, other=0.0).to(tl.float32)
    else:
        b_cmp = tl.full([BLOCK_M], 1.0 / 3.0, dtype=tl.float32)
        b_slc, b_win = b_cmp, b_cmp
    return b_cmp, b_slc, b_win, b_q


@triton.jit
def load_weights(p_weight, i_head, o_d, dim):
    """Gate projections of one head, fp32 `[D]` each."""
    p_w = p_weight + i_head * 3 * dim + o_d
    b_cmp = tl.load(p_w, mask=o_d < dim, other=0.0).to(tl.float32)
    b_slc = tl.load(p_w + dim, mask=o_d < dim, other=0.0).to(tl.float32)
    b_win = tl.load(p_w + 2 * dim, mask=o_d < dim, other=0.0).to(tl.float32)
    return b_cmp, b_slc, b_win


@triton.jit
def weighted(b_gate, p_o, o_row, row_stride, o_dv, end, dim_v, WHOLE: tl.constexpr):
    """Rows of o, fp32 `[M,D_v]`, times their gates."""
    return b_gate[:, None] * load_tile(p_o, o_row, row_stride, o_dv, end, dim_v, WHOLE).to(tl.float32)


@triton.jit(do_not_specialize=("num_docs", "num_rows", "num_heads"))
def forward_kernel(
    p_q, q_row, q_head, p_weight, p_gates, gate_row, gate_head, p_cmp, p_slc, p_win, p_out, p_kept,
    p_docs, num_docs, num_rows, num_heads, dim, dim_v,
    GATES: tl.constexpr, KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one head per program. KEEP: also write the gates, fp32 `[rows,H,3]`."""
    o_m, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    num_work = tl.cdiv(num_rows, BLOCK_M) * num_heads
    end = rows_in_documents(p_docs, num_docs)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_head = (i_work % num_heads).to(tl.int64)
        o_row = (i_work // num_heads * BLOCK_M + o_m).to(tl.int64)
        b_cmp, b_slc, b_win, _ = load_gates(
            p_q, q_row, q_head, p_weight, p_gates, gate_row, gate_head, i_head, o_row, o_d, end, dim,
            GATES, BLOCK_M, WHOLE,
        )  # fmt: skip
        if KEEP:
            p_own, exists = p_kept + (o_row * num_heads + i_head) * 3, o_row < end
            tl.store(p_own, tl.where(exists, b_cmp, 0.0), mask=o_row < num_rows)
            tl.store(p_own + 1, tl.where(exists, b_slc, 0.0), mask=o_row < num_rows)
            tl.store(p_own + 2, tl.where(exists, b_win, 0.0), mask=o_row < num_rows)
        stride = num_heads * dim_v
        b_o = weighted(b_cmp, p_cmp + i_head * dim_v, o_row, stride, o_dv, end, dim_v, WHOLE)  # [M,D_v]
        b_o += weighted(b_slc, p_slc + i_head * dim_v, o_row, stride, o_dv, end, dim_v, WHOLE)
        b_o += weighted(b_win, p_win + i_head * dim_v, o_row, stride, o_dv, end, dim_v, WHOLE)
        p_rows = p_out + o_row[:, None] * stride + i_head * dim_v + o_dv[None, :]
        tl.store(p_rows, b_o.to(p_out.dtype.element_ty), mask=(o_row < num_rows)[:, None] & (o_dv < dim_v)[None, :])


@triton.jit
def dots(b_do, p_o, o_row, row_stride, o_dv, end, dim_v, WHOLE: tl.constexpr):
    """Dot products of do `[M,D_v]` with rows of o."""
    return tl.sum(b_do * load_tile(p_o, o_row, row_stride, o_dv, end, dim_v, WHOLE).to(tl.float32), 1)


@triton.jit(do_not_specialize=("num_docs", "num_rows", "num_heads", "stats_row", "stats_head"))
def backward_kernel(
    p_q, q_row, q_head, p_weight, p_gates, gate_row, gate_head, p_cmp, p_slc, p_win, o_head, p_do, do_row, do_head,
    p_lse_cmp, p_lse_slc, p_lse_win, p_stats_cmp, p_stats_slc, p_stats_win, stats_row, stats_head,
    p_dlogits, p_dgates, p_dweight, p_docs, num_docs, num_rows, num_heads, o_row_stride, dim, dim_v,
    GATES: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head per program: the branches' statistics, and the gradients of gates.

    Those of projected gates are dlogits fp32 `[3,H,rows]`, and partial sums of dw, fp32 `[row chunks,H,3,D]`.

    Args:
        stats_row, stats_head: strides of p_stats_slc, in vectors of four; the others are contiguous, `[H,rows,4]`.
    """
    o_m, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i_head, i_chunk = (tl.program_id(0) % num_heads).to(tl.int64), tl.program_id(0) // num_heads
    end = rows_in_documents(p_docs, num_docs)
    b_dw_cmp = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dw_slc = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dw_win = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i_row in range(i_chunk * ROWS, tl.minimum(i_chunk * ROWS + ROWS, num_rows), BLOCK_M):
        o_row = (i_row + o_m).to(tl.int64)
        b_cmp, b_slc, b_win, b_q = load_gates(
            p_q, q_row, q_head, p_weight, p_gates, gate_row, gate_head, i_head, o_row, o_d, end, dim,
            GATES, BLOCK_M, WHOLE,
        )  # fmt: skip
        b_do = load_tile(p_do + i_head * do_head, o_row, do_row, o_dv, end, dim_v, WHOLE).to(tl.float32)  # [M,D_v]
        i_o = i_head * o_head
        b_delta_cmp = dots(b_do, p_cmp + i_o, o_row, o_row_stride, o_dv, end, dim_v, WHOLE)
        b_delta_slc = dots(b_do, p_slc + i_o, o_row, o_row_stride, o_dv, end, dim_v, WHOLE)
        b_delta_win = dots(b_do, p_win + i_o, o_row, o_row_stride, o_dv, end, dim_v, WHOLE)
        mask, i_at = o_row < num_rows, i_head * num_rows + o_row
        b_lse_cmp = tl.load(p_lse_cmp + i_at, mask=mask, other=0.0)
        b_lse_slc = tl.load(p_lse_slc + i_at, mask=mask, other=0.0)
        b_lse_win = tl.load(p_lse_win + i_at, mask=mask, other=0.0)
        p_own_slc = p_stats_slc + (i_head * stats_head + o_row * stats_row) * 4
        store_statistics(p_stats_cmp + i_at * 4, b_lse_cmp, b_delta_cmp, b_cmp, mask)
        store_statistics(p_own_slc, b_lse_slc, b_delta_slc, b_slc, mask)
        store_statistics(p_stats_win + i_at * 4, b_lse_win, b_delta_win, b_win, mask)
        if GATES == "projected":
            b_dcmp = b_delta_cmp * b_cmp * (1.0 - b_cmp)
            b_dslc = b_delta_slc * b_slc * (1.0 - b_slc)
            b_dwin = b_delta_win * b_win * (1.0 - b_win)
            tl.store(p_dlogits + i_at, b_dcmp, mask=mask)
            tl.store(p_dlogits + i_at + num_heads * num_rows, b_dslc, mask=mask)
            tl.store(p_dlogits + i_at + 2 * num_heads * num_rows, b_dwin, mask=mask)
            b_dw_cmp += tl.sum(b_dcmp[:, None] * b_q, 0)
            b_dw_slc += tl.sum(b_dslc[:, None] * b_q, 0)
            b_dw_win += tl.sum(b_dwin[:, None] * b_q, 0)
        elif GATES == "given":
            p_own = p_dgates + (o_row * num_heads + i_head) * 3
            tl.store(p_own, b_delta_cmp.to(p_dgates.dtype.element_ty), mask=mask)
            tl.store(p_own + 1, b_delta_slc.to(p_dgates.dtype.element_ty), mask=mask)
            tl.store(p_own + 2, b_delta_win.to(p_dgates.dtype.element_ty), mask=mask)
    if GATES == "projected":
        p_dw = p_dweight + (tl.cast(i_chunk, tl.int64) * num_heads + i_head) * 3 * dim + o_d
        tl.store(p_dw, b_dw_cmp, mask=o_d < dim)
        tl.store(p_dw + dim, b_dw_slc, mask=o_d < dim)
        tl.store(p_dw + 2 * dim, b_dw_win, mask=o_d < dim)


@triton.jit(do_not_specialize=("num_docs", "num_rows", "num_heads"))
def dq_kernel(
    p_cmp, p_slc, p_win, p_dlogits, p_weight, p_dq, dq_row, dq_head, p_docs, num_docs, num_rows, num_heads, dim,
    PROJECTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M rows of one head per program; 0 in rows past the last document."""
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    i_head, i_tile = (tl.program_id(0) % num_heads).to(tl.int64), tl.program_id(0) // num_heads
    o_row = (i_tile * BLOCK_M + o_m).to(tl.int64)
    end, stride = rows_in_documents(p_docs, num_docs), num_heads * dim
    b_dq = load_tile(p_cmp + i_head * dim, o_row, stride, o_d, end, dim, WHOLE).to(tl.float32)  # [M,D]
    b_dq += load_tile(p_slc + i_head * dim, o_row, stride, o_d, end, dim, WHOLE).to(tl.float32)
    b_dq += load_tile(p_win + i_head * dim, o_row, stride, o_d, end, dim, WHOLE).to(tl.float32)
    if PROJECTED:
        b_w_cmp, b_w_slc, b_w_win = load_weights(p_weight, i_head, o_d, dim)
        p_own, branch = p_dlogits + i_head * num_rows + o_row, num_heads * num_rows
        b_dq += tl.load(p_own, mask=o_row < end, other=0.0)[:, None] * b_w_cmp[None, :]
        b_dq += tl.load(p_own + branch, mask=o_row < end, other=0.0)[:, None] * b_w_slc[None, :]
        b_dq += tl.load(p_own + 2 * branch, mask=o_row < end, other=0.0)[:, None] * b_w_win[None, :]
    p_rows = p_dq + o_row[:, None] * dq_row + i_head * dq_head + o_d[None, :]
    tl.store(p_rows, b_dq.to(p_dq.dtype.element_ty), mask=(o_row < num_rows)[:, None] & (o_d < dim)[None, :])


def forward(
    q: Tensor, weight: Tensor | None, gates: Tensor | None, branches: tuple[Tensor, ...], pack: Pack, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """out `[rows,H,D_v]`, and gates that were not given, fp32 `[rows,H,3]`, if `keep`.

    Args:
        q: `[rows,H,D]`. weight: `[H,3,D]` of projected gates. gates: `[rows,H,3]`, given.
        branches: o_cmp, o_slc, o_win, contiguous.
    """
    rows, heads, dim = q.shape
    out = torch.empty_like(branches[0])
    kept = torch.empty((rows, heads, 3), dtype=torch.float32, device=q.device) if keep and gates is None else None
    if rows > 0:
        dim_v = out.shape[2]
        launch(
            forward_kernel,
            (-(-rows // ROWS) * heads,),
            {
                **strided("q", q), **_given(q, weight, gates),
                "p_cmp": branches[0], "p_slc": branches[1], "p_win": branches[2], "p_out": out,
                "p_kept": out if kept is None else kept, "p_docs": pack.docs, "num_docs": pack.num_docs,
                "num_rows": rows, "num_heads": heads,
                "dim": dim, "dim_v": dim_v,
            },
            {
                "GATES": kind_of(weight, gates), "KEEP": kept is not None, "BLOCK_M": ROWS, "BLOCK_D": block_of(dim),
                "BLOCK_DV": block_of(dim_v), "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
            },
            **gpu_options(num_warps=4),
        )  # fmt: skip
    return out, kept


def kind_of(weight: Tensor | None, gates: Tensor | None) -> str:
    """Where gates come from."""
    return "projected" if weight is not None else "given" if gates is not None else "equal"


def _given(q: Tensor, weight: Tensor | None, gates: Tensor | None) -> dict[str, Any]:
    """Arguments for weights and gates; q in place of those that are not read."""
    own = (q, 0, 0) if gates is None else (gates, gates.stride(0), gates.stride(1))
    given = dict(zip(("p_gates", "gate_row", "gate_head"), own, strict=True))
    return {"p_weight": q if weight is None else weight, **given}


class Gradients(NamedTuple):
    """Statistics of rows for the branches' backward (attention.py), and gradients of the gates."""

    statistics: tuple[Tensor, Tensor, Tensor]
    """fp32 `[H,rows,4]` of the compressed, selected and window branch."""
    dlogits: Tensor | None
    dgates: Tensor | None
    dweight: Tensor | None
    """fp32 `[H,3,D]`."""


def backward(
    q: Tensor, weight: Tensor | None, gates: Tensor | None, branches: tuple[Tensor, ...], lses: tuple[Tensor, ...],
    do: Tensor, pack: Pack,
) -> Gradients:  # fmt: skip
    """Gradients of gates, and what the other gradients need.

    Args:
        lses: lse_cmp, lse_slc, lse_win, natural, fp32 `[H,rows]`, contiguous.
        do: gradient of out, `[rows,H,D_v]`. The rest: as `forward`'s.
    """
    rows, heads, dim = q.shape
    dim_v, device = do.shape[2], q.device
    cmp, slc, win = (torch.empty((heads, rows, 4), dtype=torch.float32, device=device) for _ in range(3))
    if pack.tile == 1:  # the selected branch reads the heads of a token together
        slc = slc.view(rows, heads, 4).transpose(0, 1)
    chunks = -(-rows // CHUNK)
    dlogits = torch.empty((3, heads, rows), dtype=torch.float32, device=device) if weight is not None else None
    dgates = torch.empty((rows, heads, 3), dtype=gates.dtype, device=device) if gates is not None else None
    parts = torch.empty((chunks, heads, 3, dim), dtype=torch.float32, device=device) if weight is not None else None
    if rows > 0:
        launch(
            backward_kernel,
            (chunks * heads,),
            {
                **strided("q", q), **_given(q, weight, gates), "p_cmp": branches[0], "p_slc": branches[1],
                "p_win": branches[2], "o_head": branches[0].stride(1), **strided("do", do), "p_lse_cmp": lses[0],
                "p_lse_slc": lses[1], "p_lse_win": lses[2], "p_stats_cmp": cmp, "p_stats_slc": slc,
                "p_stats_win": win, "stats_row": slc.stride(1) // 4, "stats_head": slc.stride(0) // 4,
                "p_dlogits": cmp if dlogits is None else dlogits, "p_dgates": cmp if dgates is None else dgates,
                "p_dweight": cmp if parts is None else parts, "p_docs": pack.docs,
                "num_docs": pack.num_docs, "num_rows": rows, "num_heads": heads,
                "o_row_stride": branches[0].stride(0), "dim": dim, "dim_v": dim_v,
            },
            {
                "GATES": kind_of(weight, gates), "ROWS": CHUNK, "BLOCK_M": ROWS, "BLOCK_D": block_of(dim),
                "BLOCK_DV": block_of(dim_v), "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
            },
            num_warps=4,
            enable_fp_fusion=False,  # a lane would round its own product of a sum over lanes differently,
        )  # fmt: skip
    return Gradients((cmp, slc, win), dlogits, dgates, None if parts is None else parts.sum(0))


def sum_dq(parts: tuple[Tensor, ...], dlogits: Tensor | None, weight: Tensor | None, dq: Tensor, pack: Pack) -> None:
    """Sum of the branches' dq, contiguous, and of the gates', into dq `[rows,H,D]`."""
    rows, heads, dim = dq.shape
    if rows == 0:
        return
    projected = weight is not None
    launch(
        dq_kernel,
        (-(-rows // ROWS) * heads,),
        {
            "p_cmp": parts[0], "p_slc": parts[1], "p_win": parts[2], "p_dlogits": dlogits if projected else dq,
            "p_weight": weight if projected else dq, **strided("dq", dq), "p_docs": pack.docs,
            "num_docs": pack.num_docs, "num_rows": rows, "num_heads": heads, "dim": dim,
        },
        {"PROJECTED": projected, "BLOCK_M": ROWS, "BLOCK_D": block_of(dim), "WHOLE": block_of(dim) == dim},
        **gpu_options(num_warps=4),
    )  # fmt: skip
