"""Neighborhood attention as a banded flash attention, in Triton: for Ascend NPUs and NVIDIA GPUs.

Definition (reference.py is the same in PyTorch). Tokens fall into C = dilation residue classes, and each class of S
rows attends within itself. Below, rows are numbered within a class: row t is token t * C + r, so dilation is only a
larger stride between rows. Row t sees the rows start(t) ... start(t) + K - 1 that are in [0, S), where K = left + right
+ 1 and

    start(t) = t - left                                    truncate, causal (right = 0)
    start(t) = min(max(t - left, 0), max(S - K, 0))        shift

    s = scale * q k^T    p = exp(s - m) / sum, m = max(s)    o = p v
    delta = sum(o * do)    ds = p * (do v^T - delta)    dq = scale * ds k    dk = scale * ds^T q    dv = p^T do

Tiling. start is monotonic, so consecutive rows share one contiguous window of keys: M rows see M + K - 1. `forward` and
`dq` keep a tile of BLOCK_M queries and walk over its window BLOCK_N keys at a time, with an online softmax or with the
saved m and 1 / sum. `dkdv` keeps a tile of keys and walks over the queries that see it: key u is seen by the rows
u - right ... u + left; with shift, a key below K also by all rows before those, and a key from S - K on also by all
rows after them. It does so for every query head of its key head, so no two programs add to one address and results are
bitwise repeatable.

One pass. If K is small compared with BLOCK_N, a tile keeps at most BLOCK_N - K + 1 rows: its window is then one tile,
nothing is rescaled, and on NVIDIA GPUs a program that strides over work tiles loads the next one while it computes.

Every tile is consecutive rows that start inside their class, masked at the end of the class or window and never
clamped: one block copy each, and only rows that a query needs are read. Visibility is decided on row numbers alone.
Sums, softmax and accumulators are fp32; operands of `tl.dot` stay in the inputs' dtype.

Layout. q, k, v, o, do and the gradients are `[B,N,heads,D]` with any strides of batch elements, tokens and heads. m,
1 / sum and delta are fp32 `[B, H, C, ceil(N / C)]`, so that a tile of rows is contiguous in them too. m is in base 2.
m + log(sum) is not stored: its fp32 rounding error grows with the scores, and so would the error of p.

Work tiles. One work tile is a tile of rows of one class of one head. Heads are innermost, then classes, so that
programs that run together read neighboring memory. Programs stride over work tiles. Sizes are run-time values: one
build per dtype and tile shape.

Floor. Per batch element, forward reads q, k, v and writes o, 2 N (H + H_kv) D elements, and takes 4 N K H D FLOP;
whole tiles take 4 N W H D, with W the BLOCK_M + K - 1 keys of a tile rounded up to BLOCK_N. Backward reads q, k, v, o,
do and writes dq, dk, dv, 4 N (H + H_kv) D elements, and takes 10 N K H D FLOP; as two kernels it reads q, k, v, do
twice and takes 14 N K H D. Memory: inputs, outputs, and 8 bytes per row and head kept for backward, 12 during it.

Limits: D <= 256, N <= 2^29, fp16, bf16 or fp32; features contiguous, and on NPUs padded (`layout.readable`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels import device as devices
from ascend_kernels.device import gpu_cores, npu_of
from ascend_kernels.launch import accepted_by, launch
from ascend_kernels.layout import empty_contiguous, readable, without_padding
from ascend_kernels.neighborhood import tiling
from ascend_kernels.neighborhood.windows import (
    SIZES,
    class_base,
    first_row_of_key,
    last_row_of_key,
    load_rows,
    needs_upcast,
    sizes_of,
    store_rows,
    strides_of,
    window_start,
    work_tile,
)

# Kernels

LN_2 = tl.constexpr(math.log(2))


@triton.jit(do_not_specialize=(*SIZES, "rows_per_tile"))
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_max,
    p_inverse,
    log2_scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    rows_per_tile,
    dim,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    o_batch_stride,
    o_token_stride,
    o_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_PASS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WHOLE_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """o, m and 1 / sum of `rows_per_tile` queries per work tile, at most BLOCK_M."""
    if SAME_STRIDES:
        o_batch_stride, o_token_stride, o_head_stride = q_batch_stride, q_token_stride, q_head_stride
        v_batch_stride, v_token_stride, v_head_stride = k_batch_stride, k_token_stride, k_head_stride
    o_m, o_n, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    q_row_stride, o_row_stride = wide_dilation * q_token_stride, wide_dilation * o_token_stride
    k_row_stride, v_row_stride = wide_dilation * k_token_stride, wide_dilation * v_token_stride
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, rows_per_tile
        )
        end_row = tl.minimum(i_row + rows_per_tile, num_rows)
        first_key = tl.maximum(window_start(i_row, num_rows, left, right, shift), 0)
        end_key = tl.minimum(window_start(end_row - 1, num_rows, left, right, shift) + left + right + 1, num_rows)
        i_kv_head = i_head // group_size
        p_q_class = class_base(p_q, i_batch, i_head, i_class, q_batch_stride, q_token_stride, q_head_stride)
        p_k_class = class_base(p_k, i_batch, i_kv_head, i_class, k_batch_stride, k_token_stride, k_head_stride)
        p_v_class = class_base(p_v, i_batch, i_kv_head, i_class, v_batch_stride, v_token_stride, v_head_stride)
        p_o_class = class_base(p_o, i_batch, i_head, i_class, o_batch_stride, o_token_stride, o_head_stride)
        i_class_rows = ((i_batch * num_heads + i_head) * dilation + i_class) * rows_per_class

        o_q = i_row + o_m
        b_q = load_rows(p_q_class, o_q, o_dim, q_row_stride, end_row, dim, UPCAST, WHOLE_D)
        o_first = window_start(o_q, num_rows, left, right, shift)
        o_last = tl.minimum(o_first + left + right, num_rows - 1)
        b_o = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        num_steps = 1 if ONE_PASS else tl.cdiv(end_key - first_key, BLOCK_N)
        for i_step in range(0, num_steps):
            o_k = first_key + i_step * BLOCK_N + o_n
            b_k = load_rows(p_k_class, o_k, o_dim, k_row_stride, end_key, dim, UPCAST, WHOLE_D)
            b_v = load_rows(p_v_class, o_k, o_dim, v_row_stride, end_key, dim, UPCAST, WHOLE_D)
            visible = (o_k[None, :] >= o_first[:, None]) & (o_k[None, :] <= o_last[:, None])
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * log2_scale
            b_s = tl.where(visible, b_s, float("-inf"))
            b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
            b_finite_max = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # rows whose window is still ahead
            b_p = tl.exp2(b_s - b_finite_max[:, None])
            if not ONE_PASS:
                b_keep = tl.exp2(b_max - b_finite_max)
                b_sum, b_o = b_sum * b_keep, b_o * b_keep[:, None]
            b_sum += tl.sum(b_p, 1)
            b_o += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
            b_max = b_new_max

        in_tile = o_q < end_row
        b_sum = tl.where(in_tile, b_sum, 1.0)
        store_rows(p_o_class, b_o / b_sum[:, None], o_q, o_dim, o_row_stride, end_row, dim, WHOLE_D)
        tl.store(p_max + i_class_rows + o_q, b_max, mask=in_tile)
        tl.store(p_inverse + i_class_rows + o_q, 1.0 / b_sum, mask=in_tile)


@triton.jit(do_not_specialize=(*SIZES, "rows_per_tile"))
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_do,
    p_max,
    p_inverse,
    p_delta,
    p_dq,
    log2_scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    rows_per_tile,
    dim,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    o_batch_stride,
    o_token_stride,
    o_head_stride,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    dq_batch_stride,
    dq_token_stride,
    dq_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_PASS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WHOLE_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """dq and delta of `rows_per_tile` queries per work tile, at most BLOCK_M."""
    if SAME_STRIDES:
        o_batch_stride, o_token_stride, o_head_stride = q_batch_stride, q_token_stride, q_head_stride
        do_batch_stride, do_token_stride, do_head_stride = q_batch_stride, q_token_stride, q_head_stride
        dq_batch_stride, dq_token_stride, dq_head_stride = q_batch_stride, q_token_stride, q_head_stride
        v_batch_stride, v_token_stride, v_head_stride = k_batch_stride, k_token_stride, k_head_stride
    o_m, o_n, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    q_row_stride, dq_row_stride = wide_dilation * q_token_stride, wide_dilation * dq_token_stride
    o_row_stride, do_row_stride = wide_dilation * o_token_stride, wide_dilation * do_token_stride
    k_row_stride, v_row_stride = wide_dilation * k_token_stride, wide_dilation * v_token_stride
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, rows_per_tile
        )
        end_row = tl.minimum(i_row + rows_per_tile, num_rows)
        first_key = tl.maximum(window_start(i_row, num_rows, left, right, shift), 0)
        end_key = tl.minimum(window_start(end_row - 1, num_rows, left, right, shift) + left + right + 1, num_rows)
        i_kv_head = i_head // group_size
        p_q_class = class_base(p_q, i_batch, i_head, i_class, q_batch_stride, q_token_stride, q_head_stride)
        p_k_class = class_base(p_k, i_batch, i_kv_head, i_class, k_batch_stride, k_token_stride, k_head_stride)
        p_v_class = class_base(p_v, i_batch, i_kv_head, i_class, v_batch_stride, v_token_stride, v_head_stride)
        p_o_class = class_base(p_o, i_batch, i_head, i_class, o_batch_stride, o_token_stride, o_head_stride)
        p_do_class = class_base(p_do, i_batch, i_head, i_class, do_batch_stride, do_token_stride, do_head_stride)
        p_dq_class = class_base(p_dq, i_batch, i_head, i_class, dq_batch_stride, dq_token_stride, dq_head_stride)
        i_class_rows = ((i_batch * num_heads + i_head) * dilation + i_class) * rows_per_class

        o_q = i_row + o_m
        in_tile = o_q < end_row
        b_o = load_rows(p_o_class, o_q, o_dim, o_row_stride, end_row, dim, UPCAST, WHOLE_D)
        b_do = load_rows(p_do_class, o_q, o_dim, do_row_stride, end_row, dim, UPCAST, WHOLE_D)
        b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        tl.store(p_delta + i_class_rows + o_q, b_delta, mask=in_tile)
        b_q = load_rows(p_q_class, o_q, o_dim, q_row_stride, end_row, dim, UPCAST, WHOLE_D)
        b_max = tl.load(p_max + i_class_rows + o_q, mask=in_tile, other=0.0)
        b_inverse = tl.load(p_inverse + i_class_rows + o_q, mask=in_tile, other=0.0)
        o_first = window_start(o_q, num_rows, left, right, shift)
        o_last = tl.minimum(o_first + left + right, num_rows - 1)
        b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        num_steps = 1 if ONE_PASS else tl.cdiv(end_key - first_key, BLOCK_N)
        for i_step in range(0, num_steps):
            o_k = first_key + i_step * BLOCK_N + o_n
            b_k = load_rows(p_k_class, o_k, o_dim, k_row_stride, end_key, dim, UPCAST, WHOLE_D)
            b_v = load_rows(p_v_class, o_k, o_dim, v_row_stride, end_key, dim, UPCAST, WHOLE_D)
            visible = (o_k[None, :] >= o_first[:, None]) & (o_k[None, :] <= o_last[:, None])
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * log2_scale
            b_p = tl.exp2(tl.where(visible, b_s, float("-inf")) - b_max[:, None]) * b_inverse[:, None]
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dq += tl.dot(b_ds.to(b_k.dtype), b_k, input_precision="ieee")

        b_dq = b_dq * (log2_scale * LN_2)
        store_rows(p_dq_class, b_dq, o_q, o_dim, dq_row_stride, end_row, dim, WHOLE_D)


@triton.jit(do_not_specialize=(*SIZES, "rows_per_tile"))
def dkdv_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_max,
    p_inverse,
    p_delta,
    p_dk,
    p_dv,
    log2_scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    rows_per_tile,
    dim,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    dv_batch_stride,
    dv_token_stride,
    dv_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_PASS: tl.constexpr,
    GROUPED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WHOLE_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """dk and dv of `rows_per_tile` keys per work tile, at most BLOCK_M, summed over the query heads of the group.

    num_heads is H_kv here.
    """
    if SAME_STRIDES:
        do_batch_stride, do_token_stride, do_head_stride = q_batch_stride, q_token_stride, q_head_stride
        v_batch_stride, v_token_stride, v_head_stride = k_batch_stride, k_token_stride, k_head_stride
        dk_batch_stride, dk_token_stride, dk_head_stride = k_batch_stride, k_token_stride, k_head_stride
        dv_batch_stride, dv_token_stride, dv_head_stride = k_batch_stride, k_token_stride, k_head_stride
    o_m, o_n, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    k_row_stride, dk_row_stride = wide_dilation * k_token_stride, wide_dilation * dk_token_stride
    v_row_stride, dv_row_stride = wide_dilation * v_token_stride, wide_dilation * dv_token_stride
    q_row_stride, do_row_stride = wide_dilation * q_token_stride, wide_dilation * do_token_stride
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_kv_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, rows_per_tile
        )
        end_row = tl.minimum(i_row + rows_per_tile, num_rows)
        first_query = tl.maximum(first_row_of_key(i_row, left, right, shift), 0)
        end_query = tl.minimum(last_row_of_key(end_row - 1, num_rows, left, right, shift) + 1, num_rows)
        p_k_class = class_base(p_k, i_batch, i_kv_head, i_class, k_batch_stride, k_token_stride, k_head_stride)
        p_v_class = class_base(p_v, i_batch, i_kv_head, i_class, v_batch_stride, v_token_stride, v_head_stride)
        p_dk_class = class_base(p_dk, i_batch, i_kv_head, i_class, dk_batch_stride, dk_token_stride, dk_head_stride)
        p_dv_class = class_base(p_dv, i_batch, i_kv_head, i_class, dv_batch_stride, dv_token_stride, dv_head_stride)

        o_k = i_row + o_m
        b_k = load_rows(p_k_class, o_k, o_dim, k_row_stride, end_row, dim, UPCAST, WHOLE_D)
        b_v = load_rows(p_v_class, o_k, o_dim, v_row_stride, end_row, dim, UPCAST, WHOLE_D)
        o_first = first_row_of_key(o_k, left, right, shift)
        o_last = tl.where(o_k < end_row, last_row_of_key(o_k, num_rows, left, right, shift), -1)
        b_dk = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        b_dv = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        num_group_heads = group_size if GROUPED else 1
        num_steps = 1 if ONE_PASS else tl.cdiv(end_query - first_query, BLOCK_N)
        for i_group_head in range(0, num_group_heads):
            i_head = i_kv_head * group_size + i_group_head
            p_q_class = class_base(p_q, i_batch, i_head, i_class, q_batch_stride, q_token_stride, q_head_stride)
            p_do_class = class_base(p_do, i_batch, i_head, i_class, do_batch_stride, do_token_stride, do_head_stride)
            i_class_rows = ((i_batch * num_heads * group_size + i_head) * dilation + i_class) * rows_per_class
            for i_step in range(0, num_steps):
                o_q = first_query + i_step * BLOCK_N + o_n
                b_q = load_rows(p_q_class, o_q, o_dim, q_row_stride, end_query, dim, UPCAST, WHOLE_D)
                b_do = load_rows(p_do_class, o_q, o_dim, do_row_stride, end_query, dim, UPCAST, WHOLE_D)
                b_max = tl.load(p_max + i_class_rows + o_q, mask=o_q < end_query, other=0.0)
                b_inverse = tl.load(p_inverse + i_class_rows + o_q, mask=o_q < end_query, other=0.0)
                b_delta = tl.load(p_delta + i_class_rows + o_q, mask=o_q < end_query, other=0.0)
                visible = (o_q[None, :] >= o_first[:, None]) & (o_q[None, :] <= o_last[:, None])
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * log2_scale
                b_p = tl.exp2(tl.where(visible, b_s, float("-inf")) - b_max[None, :]) * b_inverse[None, :]
                b_dv += tl.dot(b_p.to(b_do.dtype), b_do, input_precision="ieee")
                b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
                b_ds = b_p * (b_dp - b_delta[None, :])
                b_dk += tl.dot(b_ds.to(b_q.dtype), b_q, input_precision="ieee")

        b_dk = b_dk * (log2_scale * LN_2)
        store_rows(p_dk_class, b_dk, o_k, o_dim, dk_row_stride, end_row, dim, WHOLE_D)
        store_rows(p_dv_class, b_dv, o_k, o_dim, dv_row_stride, end_row, dim, WHOLE_D)


# Launchers


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Forward of checked inputs.

    Args:
        q: `[B,N,H,D]`. k, v: `[B,N,H_kv,D]`.
        backend: "triton" or "ascend", whose tiles and grid to use.

    Returns:
        out like q, contiguous, and one fp32 tensor for `backward`: m and 1 / sum of all rows.
    """
    sizes = sizes_of(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    dim = q.shape[-1]
    q, k, v = (readable(tensor, backend) for tensor in (q, k, v))
    (out,) = empty_contiguous(q)
    statistics = _empty_per_row(2, q, sizes)
    _launch("forward", backend, sizes, {"q": q, "k": k, "v": v, "o": out}, _pointers(statistics))
    return without_padding(out, dim), statistics


def kept_like(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int, dilation: int, boundary: str, causal: bool, **_: Any
) -> Tensor:
    """An uninitialised tensor like the second result of `forward`."""
    return _empty_per_row(2, q, sizes_of(q, k, kernel_size, dilation, 1.0, boundary, causal))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the inputs and results of `forward`. Bitwise repeatable.

    Args:
        do: gradient of out, `[B,N,H,D]`. The others: as `forward` took and returned them.

    Returns:
        dq, dk, dv, contiguous.
    """
    sizes = sizes_of(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    dim = q.shape[-1]
    do, q, k, v, out = (readable(tensor, backend) for tensor in (do, q, k, v, out))
    dq, dk, dv = empty_contiguous(q, k, v)
    per_row = {**_pointers(statistics), "p_delta": _empty_per_row(1, q, sizes)}
    tensors = {"q": q, "k": k, "v": v, "do": do}
    _launch("dq", backend, sizes, {**tensors, "o": out, "dq": dq}, per_row)
    kv_sizes = {**sizes, "num_heads": k.shape[2]}
    _launch("dkdv", backend, kv_sizes, {**tensors, "dk": dk, "dv": dv}, per_row)
    return without_padding(dq, dim), without_padding(dk, dim), without_padding(dv, dim)


KV_TENSORS = ("k", "v", "dk", "dv")
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}


def _empty_per_row(count: int, q: Tensor, sizes: dict[str, Any]) -> Tensor:
    """Allocate `count` fp32 numbers per row, `[count, rows]`, padded so that each row of it is 16-byte aligned."""
    rows = q.shape[0] * q.shape[2] * sizes["dilation"] * sizes["rows_per_class"]
    return torch.empty((count, -(-rows // 4) * 4), dtype=torch.float32, device=q.device)


def _pointers(statistics: Tensor) -> dict[str, Tensor]:
    return {"p_max": statistics[0], "p_inverse": statistics[1]}


def _same_strides(tensors: dict[str, Tensor]) -> bool:
    """True if all tensors of queries have equal strides, and all tensors of keys."""
    return all(
        tensor.stride() == tensors["k" if name in KV_TENSORS else "q"].stride() for name, tensor in tensors.items()
    )


def _launch(
    kernel_name: str,
    backend: str,
    sizes: dict[str, Any],
    tensors: dict[str, Tensor],
    per_row: dict[str, Tensor],
) -> None:
    """Launch a kernel on tensors `[B,N,heads,D]` and fp32 numbers per row."""
    q = tensors["q"]
    if q.numel() == 0:
        return
    window = sizes["left"] + sizes["right"] + 1
    # With shift or grouped heads, a key is seen by more than window + BLOCK_M - 1 rows
    bounded = kernel_name != "dkdv" or not (sizes["shift"] or sizes["group_size"] > 1)
    dim = q.shape[-1]
    call = (kernel_name, q.dtype, dim, window)
    work = {"sequences": q.shape[0] * sizes["num_heads"] * sizes["dilation"], "rows": sizes["rows_per_class"]}
    on_npu = backend == "ascend"
    if on_npu:
        plan = tiling.ascend_plan(*call, **work, device=npu_of(q.device))
    else:
        cores, memory = gpu_cores(q.device), devices.memory_class(q.device)
        plan = tiling.gpu_plan(*call, **work, cores=cores, memory=memory, bounded=bounded)
    tiles = plan.tiles
    kernel = KERNELS[kernel_name]
    pointers = {f"p_{name}": tensor for name, tensor in tensors.items()} | per_row
    scalars = {
        **{name: size for name, size in sizes.items() if name != "scale"},
        "dim": dim,
        "log2_scale": sizes["scale"] * math.log2(math.e),
        "num_work": tiling.num_work_tiles(tiles, window, **work),
        "rows_per_tile": tiles.rows_per_tile(window),
        **strides_of(tensors),
    }
    constants = {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": tiles.block_d,
        "ONE_PASS": tiles.one_pass,
        # GPUs save registers with separate builds for these; NPUs need few builds
        "WHOLE_D": not on_npu and tiles.block_d == dim,
        "GROUPED": on_npu or sizes["group_size"] > 1,
        "SAME_STRIDES": not on_npu and _same_strides(tensors),
        "UPCAST": needs_upcast(kernel, q.dtype),
    }
    launch(kernel, plan.grid, {**pointers, **scalars}, accepted_by(kernel, constants), **plan.options)
