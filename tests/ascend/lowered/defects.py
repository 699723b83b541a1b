"""Broken copies of `demo.softmax_kernel`, one defect each, that the harness must catch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def one_row_too_many(p_x, p_out, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Off by one: `<=` lets the row behind the last one be read and written."""
    o_column = tl.arange(0, COLUMNS)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        mask = (o_row <= rows)[:, None] & (o_column < columns)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * x_stride + o_column[None, :], mask=mask, other=-float("inf")).to(
            tl.float32
        )
        b_exp = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_exp / tl.sum(b_exp, 1)[:, None]
        p_tile = p_out + o_row[:, None] * out_stride + o_column[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=(o_row < rows)[:, None] & (o_column < columns)[None, :])


@triton.jit
def one_row_too_early(p_x, p_out, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Off by one: the row before the first one is written."""
    o_column = tl.arange(0, COLUMNS)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * x_stride + o_column[None, :], mask=mask, other=-float("inf")).to(
            tl.float32
        )
        b_exp = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_exp / tl.sum(b_exp, 1)[:, None]
        p_tile = p_out + (o_row[:, None] - (columns > 0)) * out_stride + o_column[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def clamped_rows(p_x, p_out, rows, columns, x_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Right results, but rows and columns clamped instead of masked: no block can be copied."""
    o_column = tl.arange(0, COLUMNS)
    for i_tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        inside = tl.minimum(o_row, rows - 1)[:, None] * x_stride + tl.minimum(o_column, columns - 1)[None, :]
        mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
        b_x = tl.where(mask, tl.load(p_x + inside).to(tl.float32), -float("inf"))
        b_exp = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_exp / tl.sum(b_exp, 1)[:, None]
        p_tile = p_out + o_row[:, None] * out_stride + o_column[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


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
