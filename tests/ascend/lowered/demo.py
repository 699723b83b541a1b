"""Three small ops that the harness is tried on: rows with block copies, a bf16 `tl.dot`, a grid-stride reduction.

Each is written as an op of the package is: a kernel, a planner, a launcher that goes through `ascend_kernels.launch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch

VECTOR_CORES = 40
UB_BYTES = 192 * 1024


@dataclass(frozen=True)
class RowPlan:
    """Tile of a kernel over rows, its grid, and what the tile keeps alive in each memory."""

    rows: int
    columns: int
    grid: tuple[int, ...]

    @property
    def live_bytes(self) -> dict[str, int]:
        """Four fp32 tiles: the input, its exponentials, the quotient, a mask."""
        return {"UB": 4 * 4 * self.rows * self.columns}


def plan_rows(rows: int, columns: int) -> RowPlan:
    """Tiles of at most 8 rows that fit half of the UB; a grid of at most the vector cores."""
    width = triton.next_power_of_2(columns)
    height = 8
    while height > 1 and 4 * 4 * height * width > UB_BYTES // 2:
        height //= 2
    return RowPlan(height, width, (min(triton.cdiv(rows, height), VECTOR_CORES),))


@triton.jit
def softmax_kernel(p_x, p_out, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_column = tl.arange(0, COLUMNS)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * x_stride + o_column[None, :], mask=mask, other=-float("inf")).to(
            tl.float32
        )
        b_exp = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_exp / tl.sum(b_exp, 1)[:, None]
        p_tile = p_out + o_row[:, None] * out_stride + o_column[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


def softmax(x: Tensor, *, kernel: Any = softmax_kernel, plan: RowPlan | None = None, **changed: Any) -> Tensor:
    """Softmax over the last dim of `[rows, columns]`; kernel, plan and arguments can be exchanged for broken ones."""
    rows, columns = x.shape
    plan = plan or plan_rows(rows, columns)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = {
        "p_x": x,
        "p_out": out,
        "rows": rows,
        "columns": columns,
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
    }
    launch(kernel, plan.grid, {**arguments, **changed}, {"ROWS": plan.rows, "COLUMNS": plan.columns}, num_warps=4)
    return out


@triton.jit
def matmul_kernel(p_a, p_b, p_out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    o_m = tl.program_id(0) * M + tl.arange(0, M)
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    b_out = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        o_k = start + tl.arange(0, K)
        b_a = tl.load(p_a + o_m[:, None] * k + o_k[None, :], mask=(o_m < m)[:, None] & (o_k < k)[None, :], other=0.0)
        b_b = tl.load(p_b + o_k[:, None] * n + o_n[None, :], mask=(o_k < k)[:, None] & (o_n < n)[None, :], other=0.0)
        b_out += tl.dot(b_a, b_b)
    p_tile = p_out + o_m[:, None] * n + o_n[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=(o_m < m)[:, None] & (o_n < n)[None, :])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`[m, k] @ [k, n]`, contiguous."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, 32), triton.cdiv(n, 32))
    arguments = {"p_a": a, "p_b": b, "p_out": out, "m": m, "n": n, "k": k}
    launch(matmul_kernel, grid, arguments, {"M": 32, "N": 32, "K": 16}, num_warps=4)
    return out


@triton.jit
def partial_sums_kernel(p_x, p_partial, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_column = tl.arange(0, COLUMNS)
    b_sum = tl.zeros((COLUMNS,), dtype=tl.float32)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * columns + o_column[None, :], mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_x, 0)
    tl.store(p_partial + tl.program_id(0) * columns + o_column, b_sum, mask=o_column < columns)


def column_sums(x: Tensor) -> Tensor:
    """Sum over the rows of contiguous `[rows, columns]`, fp32: partial sums of each program, then their sum."""
    rows, columns = x.shape
    plan = plan_rows(rows, columns)
    partial = torch.empty(plan.grid[0], columns, dtype=torch.float32, device=x.device)
    out = torch.empty(1, columns, dtype=torch.float32, device=x.device)
    constants = {"ROWS": plan.rows, "COLUMNS": plan.columns}
    sizes = {"rows": rows, "columns": columns}
    launch(partial_sums_kernel, plan.grid, {"p_x": x, "p_partial": partial, **sizes}, constants)
    sizes = {"rows": plan.grid[0], "columns": columns}
    launch(partial_sums_kernel, (1,), {"p_x": partial, "p_partial": out, **sizes}, constants)
    return out[0]
