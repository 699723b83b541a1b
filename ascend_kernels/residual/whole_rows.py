"""Attention residual for rows that are one tile, in Triton, for Ascend NPUs and NVIDIA GPUs.

Definition (reference.py is the same in PyTorch). A token has one row x_i of D features in each of L blocks.

    rstd_i = 1 / sqrt(mean(x_i^2) + eps)     score_i = rstd_i * sum(w * x_i), w = w_query * w_norm
    alpha  = softmax of score over i         out = sum_i alpha_i * x_i

    dp_i = sum(do * x_i)    delta = sum_i alpha_i * dp_i    ds_i = alpha_i * (dp_i - delta)    f_i = ds_i * rstd_i
    dx_i = alpha_i * do + f_i * w - f_i * rstd_i * score_i / D * x_i
    t    = sum over tokens and i of f_i * x_i        dw_query = w_norm * t        dw_norm = w_query * t

Kernels. A program strides over tokens and takes ROWS rows of a token at a time, whole rows of at most BLOCK_D features:
one loop over all rows of all its tokens, so that a GPU loads STAGES - 1 tiles ahead whatever L is. `forward` keeps a
running softmax and the corresponding output, as flash attention does over keys, so each row is read once. `backward`
needs delta before it can write a gradient: it reads the rows of a token twice, or once if all of them are one tile. It
keeps a partial sum of t in registers, and `weights` adds partial sums in a fixed order: no atomics, and bitwise
repeatable on one device with one number of programs. Everything is fp32 from load to store. Longer rows use the kernels
of tiled.py.

Forward keeps 2 L fp32 numbers per token for backward: rstd, and the scores, from which backward computes alpha again. A
running softmax has no alpha before its last row, and dx needs the scores too.

Floor, in elements of the blocks' dtype, with V all blocks and T tokens. Forward reads V, T L D, and writes out, T D.
Backward reads V and do and writes dV, T (2 L + 1) D. The rest is small: fp32, 2 L per token, and D per program. Forward
takes 6 T L D FLOP and backward 9 T L D: memory is the limit.

Traffic. Forward reads V once (residual/tiling.py says up to which D). Backward reads do once, and V once if a token is
one tile. Otherwise it reads a token again right after the first time: from the L2 of a GPU as long as the tokens in
flight fit exists (docs/attention_residual.md says up to which L), from global memory on an NPU.

Layout. Blocks are one tensor `[L,B,N,D]` or a list of tensors `[B,N,D]` (rows.py). Scores and rstd are `[T,L]` fp32,
partial sums of t `[programs,D]` fp32; out and dV are contiguous.

Limits: fp16, bf16 or fp32; L <= 64, T L <= 2^30; features contiguous, others are copied. On NPUs rows are padded to a
multiple of 16 features, by a copy where D is not one. Launchers are in launchers.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_kernels.residual.rows import (
    load_scores,
    load_softmax_statistics,
    load_tile,
    load_weight,
    product_of_largest,
    row_products,
    row_squares_and_products,
    softmax_statistics,
    token_offset,
)

SIZES = ("num_tokens", "num_blocks", "tokens_per_batch", "num_partials")
"""Run-time values that Triton must not specialise; strides, D and norm_dim may be, for their alignment."""


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
    p_out,
    p_scores,
    p_rstd,
    num_tokens,
    num_blocks,
    tokens_per_batch,
    dim,
    norm_dim,
    inverse_dim,
    eps,
    block_stride,
    batch_stride,
    token_stride,
    p_1,
    p_2,
    p_3,
    p_4,
    p_5,
    p_6,
    p_7,
    p_8,
    p_9,
    p_10,
    p_11,
    p_12,
    p_13,
    p_14,
    p_15,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:
    """out, scores and rstd.

    ONE_TILE: a token has no more than ROWS rows, and one plain softmax. Otherwise the softmax runs over its tiles.
    """
    o_dim = tl.arange(0, BLOCK_D)
    b_w = load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)
    num_steps = 1 if ONE_TILE else tl.cdiv(num_blocks, ROWS)
    program_tokens = tl.cdiv(num_tokens - tl.program_id(0), tl.num_programs(0))
    i_token = tl.program_id(0)
    i_step = 0
    b_max = float("-inf")
    b_sum = 0.0
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    for _ in tl.range(0, program_tokens * num_steps, num_stages=STAGES):
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride, FLAT)
        b_x = load_tile(
            i_step, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
            p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
            ROWS, ADDRESS, VECTOR, BRANCHES,
        )  # fmt: skip
        b_x = b_x.to(tl.float32)
        o_row = i_step * ROWS + tl.arange(0, ROWS)
        exists = o_row < num_blocks
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        b_squares, b_products = row_squares_and_products(b_x, b_w[None, :], BRANCHES)
        b_rstd = tl.rsqrt(b_squares * inverse_dim + eps)
        b_score = b_products * b_rstd
        tl.store(p_scores + i_scores + o_row, b_score, mask=exists)
        tl.store(p_rstd + i_scores + o_row, b_rstd, mask=exists)
        b_score = tl.where(exists, b_score, float("-inf"))
        p_row = p_out + tl.cast(i_token, tl.int64) * dim
        if ONE_TILE:
            b_largest = tl.max(b_score, 0)
            b_p = tl.exp(b_score - b_largest)
            b_total = tl.sum(b_p, 0)
            b_mixed = tl.sum((b_p * (1.0 / b_total))[:, None] * b_x, 0)
            tl.store(p_row + o_dim, b_mixed.to(p_out.dtype.element_ty), mask=o_dim < dim)
            i_token += tl.num_programs(0)
        else:
            b_largest = tl.maximum(b_max, tl.max(b_score, 0))
            b_scale = tl.exp(b_max - b_largest)
            b_p = tl.exp(b_score - b_largest)
            b_max = b_largest
            b_sum = b_sum * b_scale + tl.sum(b_p, 0)
            b_out = b_out * b_scale + tl.sum(b_p[:, None] * b_x, 0)
            if i_step == num_steps - 1:
                tl.store(p_row + o_dim, (b_out * (1.0 / b_sum)).to(p_out.dtype.element_ty), mask=o_dim < dim)
                b_max = float("-inf")
                b_sum = 0.0
                b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
            i_token += tl.where(i_step == num_steps - 1, tl.num_programs(0), 0)
            i_step = tl.where(i_step == num_steps - 1, 0, i_step + 1)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
    p_do,
    p_scores,
    p_rstd,
    p_dblocks,
    p_partials,
    num_tokens,
    num_blocks,
    tokens_per_batch,
    dim,
    norm_dim,
    inverse_dim,
    do_batch_stride,
    do_token_stride,
    dblock_stride,
    block_stride,
    batch_stride,
    token_stride,
    p_1,
    p_2,
    p_3,
    p_4,
    p_5,
    p_6,
    p_7,
    p_8,
    p_9,
    p_10,
    p_11,
    p_12,
    p_13,
    p_14,
    p_15,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:
    """dV, and this program's partial sum of t.

    ONE_TILE: a token has no more than ROWS rows. Otherwise its tiles are read twice, for delta and for gradients.
    """
    o_dim = tl.arange(0, BLOCK_D)
    b_w = load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)
    num_steps = 1 if ONE_TILE else tl.cdiv(num_blocks, ROWS)
    num_iterations = 1 if ONE_TILE else 2 * num_steps
    program_tokens = tl.cdiv(num_tokens - tl.program_id(0), tl.num_programs(0))
    i_token = tl.program_id(0)
    i_iteration = 0
    b_t = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_do = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_largest = 0.0
    b_inverse = 0.0
    # c is dp of the row with the largest score so far. Rows are often similar: dp - delta is then far smaller than dp,
    # and dp - c is exact. So delta is summed less c, and dp - delta computed as (dp - c) - (delta - c).
    b_top = float("-inf")
    b_c = 0.0
    b_seen = 0.0  # sum of alpha over the rows so far
    b_delta = 0.0  # delta - c: sum of alpha * (dp - c)
    for _ in tl.range(0, program_tokens * num_iterations, num_stages=STAGES):
        i_step = 0 if ONE_TILE else tl.where(i_iteration < num_steps, i_iteration, i_iteration - num_steps)
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride, FLAT)
        b_x = load_tile(
            i_step, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
            p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
            ROWS, ADDRESS, VECTOR, BRANCHES,
        )  # fmt: skip
        b_x = b_x.to(tl.float32)
        o_row = i_step * ROWS + tl.arange(0, ROWS)
        exists = o_row < num_blocks
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        if ONE_TILE or i_iteration == 0:
            p_do_row = p_do + token_offset(i_token, tokens_per_batch, do_batch_stride, do_token_stride, FLAT)
            b_do = tl.load(p_do_row + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
            b_top = float("-inf")
            b_c = 0.0
            b_seen = 0.0
            b_delta = 0.0
        b_dp = row_products(b_x, b_do[None, :], BRANCHES)  # before the scores: fewer live registers, 7 % faster
        b_score = load_scores(p_scores, i_scores, o_row, num_blocks)
        b_rstd = tl.load(p_rstd + i_scores + o_row, mask=exists, other=0.0)
        if ONE_TILE:
            b_largest, b_inverse = softmax_statistics(b_score)
            b_dp -= product_of_largest(b_dp, b_score, b_largest)  # c; after alpha it would spill 70 registers
        elif i_iteration == 0:
            b_largest, b_inverse = load_softmax_statistics(p_scores, i_scores, num_blocks)
        b_alpha = tl.exp(b_score - b_largest) * b_inverse
        if ONE_TILE:
            b_delta = tl.sum(b_alpha * b_dp, 0)
        elif i_iteration < num_steps:
            b_tile_top = tl.max(b_score, 0)
            b_new_c = tl.where(b_tile_top > b_top, product_of_largest(b_dp, b_score, b_tile_top), b_c)
            b_delta += b_seen * (b_c - b_new_c) + tl.sum(b_alpha * (b_dp - b_new_c), 0)
            b_seen += tl.sum(b_alpha, 0)
            b_top = tl.maximum(b_top, b_tile_top)
            b_c = b_new_c
        if ONE_TILE or i_iteration >= num_steps:
            b_score = tl.where(exists, b_score, 0.0)
            b_f = b_alpha * (b_dp - b_c - b_delta) * b_rstd
            b_dx = b_alpha[:, None] * b_do[None, :] + b_f[:, None] * b_w[None, :]
            b_dx -= (b_f * b_rstd * b_score * inverse_dim)[:, None] * b_x
            b_t += tl.sum(b_f[:, None] * b_x, 0)
            p_rows = p_dblocks + o_row.to(tl.int64) * dblock_stride + tl.cast(i_token, tl.int64) * dim
            mask = exists[:, None] & (o_dim < dim)[None, :]
            tl.store(p_rows[:, None] + o_dim[None, :], b_dx.to(p_dblocks.dtype.element_ty), mask=mask)
        if ONE_TILE:
            i_token += tl.num_programs(0)
        else:
            i_token += tl.where(i_iteration == num_iterations - 1, tl.num_programs(0), 0)
            i_iteration = tl.where(i_iteration == num_iterations - 1, 0, i_iteration + 1)
    tl.store(p_partials + tl.cast(tl.program_id(0), tl.int64) * dim + o_dim, b_t, mask=o_dim < dim)


@triton.jit(do_not_specialize=SIZES)
def weights_kernel(
    p_partials,
    p_w_query,
    p_w_norm,
    p_dw_query,
    p_dw_norm,
    num_partials,
    dim,
    norm_dim,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """dw_query and dw_norm of BLOCK_D features, from the programs' partial sums of t, in their order."""
    o_p = tl.arange(0, BLOCK_P)
    for i_dim in range(tl.program_id(0) * BLOCK_D, dim, tl.num_programs(0) * BLOCK_D):
        o_dim = i_dim + tl.arange(0, BLOCK_D)
        b_t = tl.zeros([BLOCK_D], dtype=tl.float32)
        for i_partial in range(0, num_partials, BLOCK_P):
            o_partial = i_partial + o_p
            mask = (o_partial < num_partials)[:, None] & (o_dim < dim)[None, :]
            b_t += tl.sum(tl.load(p_partials + o_partial[:, None] * dim + o_dim[None, :], mask=mask, other=0.0), 0)
        b_query = tl.load(p_w_query + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
        b_norm = tl.load(p_w_norm + o_dim, mask=o_dim < norm_dim, other=1.0).to(tl.float32)
        tl.store(p_dw_query + o_dim, (b_t * b_norm).to(p_dw_query.dtype.element_ty), mask=o_dim < dim)
        tl.store(p_dw_norm + o_dim, (b_t * b_query).to(p_dw_norm.dtype.element_ty), mask=o_dim < norm_dim)
