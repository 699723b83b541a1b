"""An op that the harness is tried on, softmax of rows, and its defects, which the harness must catch.

It is written as an op of the package is: a kernel, a planner, a launcher that goes through `ascend_kernels.launch`.
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
def softmax_kernel(
    p_x,
    p_out,
    rows,
    columns,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEFECT: tl.constexpr = "",
):
    o_column = tl.arange(0, COLUMNS)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
        if DEFECT == "a row too many":
            loaded = (o_row <= rows)[:, None] & (o_column < columns)[None, :]
        else:
            loaded = mask
        if DEFECT == "clamped":  # right, but no block can be copied
            inside = tl.minimum(o_row, rows - 1)[:, None] * x_stride + tl.minimum(o_column, columns - 1)[None, :]
            b_x = tl.where(mask, tl.load(p_x + inside).to(tl.float32), -float("inf"))
        else:
            p_row = p_x + o_row[:, None] * x_stride + o_column[None, :]
            b_x = tl.load(p_row, mask=loaded, other=-float("inf")).to(tl.float32)
        b_exp = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_exp / tl.sum(b_exp, 1)[:, None]
        if DEFECT == "a row too early":
            p_tile = p_out + (o_row[:, None] - (columns > 0)) * out_stride + o_column[None, :]
        else:
            p_tile = p_out + o_row[:, None] * out_stride + o_column[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


def softmax(x: Tensor, *, defect: str = "", plan: RowPlan | None = None, **changed: Any) -> Tensor:
    """Softmax over the last dim of `[rows, columns]`; plan and arguments can be exchanged for broken ones."""
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
    constants = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEFECT": defect}
    launch(softmax_kernel, plan.grid, {**arguments, **changed}, constants, num_warps=4)
    return out


@triton.jit
def upcast_matmul(p_a, p_b, p_out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One tile, with operands that leave bf16 before the `tl.dot`."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(p_a + o_m[:, None] * k + o_k[None, :], mask=(o_m < m)[:, None] & (o_k < k)[None, :], other=0.0)
    b_b = tl.load(p_b + o_k[:, None] * n + o_n[None, :], mask=(o_k < k)[:, None] & (o_n < n)[None, :], other=0.0)
    b_out = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32))
    tl.store(p_out + o_m[:, None] * n + o_n[None, :], b_out, mask=(o_m < m)[:, None] & (o_n < n)[None, :])


@triton.jit
def writes_between_rows(p_x, p_out, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Fills `out_stride` columns of all rows but the last, so what lies between the rows too."""
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (o_row < rows - 1)[:, None] & (o_column < out_stride)[None, :]
    p_tile = p_out + o_row[:, None] * out_stride + o_column[None, :]
    tl.store(p_tile, tl.zeros((ROWS, COLUMNS), dtype=p_out.dtype.element_ty), mask=mask)
