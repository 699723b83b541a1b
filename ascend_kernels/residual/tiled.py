"""Attention residual for rows longer than one tile, in Triton, for Ascend NPUs and NVIDIA GPUs.

The math of whole_rows.py, in more launches:

    scores       score and rstd of tokens                              reads V
    mix          out, BLOCK_D features per work tile                   reads V
    products     dp and delta of tokens                                reads V and do
    gradients    dV, and partial sums of t, BLOCK_D features each      reads V and do

Floor: as in whole_rows.py, T (L + 1) D elements forward and T (2 L + 1) D backward. Forward reads V twice, backward V
and do twice; everything else is written once and, except for a few fp32 numbers per token, read once. A program of
`gradients` processes one tile of features, and sums its part of t over the tokens that it strides over.

Layout and limits are those of whole_rows.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_kernels.residual.rows import (
    MAX_BLOCKS,
    load_scores,
    load_softmax_statistics,
    load_tile,
    load_weight,
    product_of_largest,
    softmax_statistics,
    token_offset,
)

SIZES = ("num_tokens", "num_blocks", "tokens_per_batch", "num_work")
"""Run-time values that Triton must not specialise; strides, D and norm_dim may be, for their alignment."""


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
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
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
) -> None:
    """Scores and rstd."""
    o_block = tl.arange(0, BLOCK_D)
    for i_token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride)
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        for i_block in range(0, num_blocks):
            b_squares = tl.zeros([1, BLOCK_D], dtype=tl.float32)
            b_products = tl.zeros([1, BLOCK_D], dtype=tl.float32)
            for i_dim in range(0, dim, BLOCK_D):
                o_dim = i_dim + o_block
                b_x = load_tile(
                    i_block, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
                    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
                    1, ADDRESS, VECTOR, BRANCHES,
                )  # fmt: skip
                b_x = b_x.to(tl.float32)
                b_squares += b_x * b_x
                b_products += b_x * load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)[None, :]
            b_rstd = 1.0 / tl.sqrt(tl.sum(b_squares, 1) * inverse_dim + eps)
            b_score = tl.sum(b_products, 1) * b_rstd
            o_row = i_block + tl.arange(0, 1)
            tl.store(p_scores + i_scores + o_row, b_score)
            tl.store(p_rstd + i_scores + o_row, b_rstd)


@triton.jit(do_not_specialize=SIZES)
def mix_kernel(
    p_0,
    p_table,
    p_out,
    p_scores,
    num_work,
    num_blocks,
    tokens_per_batch,
    dim,
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
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
) -> None:
    """out. num_work: tiles of features of all tokens."""
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_token = i_work // num_dim_tiles
        o_dim = i_work % num_dim_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride)
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        b_largest, b_inverse = load_softmax_statistics(p_scores, i_scores, num_blocks)
        b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
        for i_block in range(0, num_blocks):
            b_x = load_tile(
                i_block, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
                p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
                1, ADDRESS, VECTOR, BRANCHES,
            )  # fmt: skip
            b_score = tl.load(p_scores + i_scores + i_block + tl.arange(0, 1))
            b_alpha = tl.exp(b_score - b_largest) * b_inverse
            b_out += tl.sum(b_alpha[:, None] * b_x.to(tl.float32), 0)
        p_row = p_out + tl.cast(i_token, tl.int64) * dim
        tl.store(p_row + o_dim, b_out.to(p_out.dtype.element_ty), mask=o_dim < dim)


@triton.jit(do_not_specialize=SIZES)
def products_kernel(
    p_0,
    p_table,
    p_do,
    p_scores,
    p_dp,
    p_delta,
    num_tokens,
    num_blocks,
    tokens_per_batch,
    dim,
    do_batch_stride,
    do_token_stride,
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
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
) -> None:
    """dp and delta, both less dp of the largest score (whole_rows.py says why).

    A tile of do is read once, together with those of all blocks; their dp are one vector.
    """
    o_block = tl.arange(0, BLOCK_D)
    o_row = tl.arange(0, MAX_BLOCKS)
    for i_token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride)
        p_do_row = p_do + token_offset(i_token, tokens_per_batch, do_batch_stride, do_token_stride)
        b_dp = tl.zeros([MAX_BLOCKS], dtype=tl.float32)
        for i_dim in range(0, dim, BLOCK_D):
            o_dim = i_dim + o_block
            b_do = tl.load(p_do_row + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
            for i_block in range(0, num_blocks):
                b_x = load_tile(
                    i_block, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
                    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
                    1, ADDRESS, VECTOR, BRANCHES,
                )  # fmt: skip
                b_product = tl.sum(tl.sum(b_x.to(tl.float32) * b_do[None, :], 1), 0)
                b_dp += tl.where(o_row == i_block, b_product, 0.0)
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        b_score = load_scores(p_scores, i_scores, o_row, num_blocks)
        b_largest, b_inverse = softmax_statistics(b_score)
        b_alpha = tl.exp(b_score - b_largest) * b_inverse
        b_dp -= product_of_largest(b_dp, b_score, b_largest)
        tl.store(p_dp + i_scores + o_row, b_dp, mask=o_row < num_blocks)
        tl.store(p_delta + i_token, tl.sum(b_alpha * b_dp, 0))


@triton.jit(do_not_specialize=SIZES)
def gradients_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
    p_do,
    p_scores,
    p_rstd,
    p_dp,
    p_delta,
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
    ADDRESS: tl.constexpr,
    VECTOR: tl.constexpr,
    BRANCHES: tl.constexpr,
) -> None:
    """dV, and partial sums of t. The grid is num_dim_tiles times num_splits: each split takes a part of the tokens."""
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    i_split = tl.program_id(0) // num_dim_tiles
    num_splits = tl.num_programs(0) // num_dim_tiles
    o_dim = tl.program_id(0) % num_dim_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    b_w = load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)
    b_t = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i_token in range(i_split, num_tokens, num_splits):
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride)
        p_do_row = p_do + token_offset(i_token, tokens_per_batch, do_batch_stride, do_token_stride)
        i_scores = tl.cast(i_token, tl.int64) * num_blocks
        b_largest, b_inverse = load_softmax_statistics(p_scores, i_scores, num_blocks)
        b_delta = tl.load(p_delta + i_token)
        b_do = tl.load(p_do_row + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
        for i_block in range(0, num_blocks):
            b_x = load_tile(
                i_block, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
                p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
                1, ADDRESS, VECTOR, BRANCHES,
            )  # fmt: skip
            b_x = tl.sum(b_x.to(tl.float32), 0)
            o_row = i_block + tl.arange(0, 1)
            b_score = tl.load(p_scores + i_scores + o_row)
            b_rstd = tl.load(p_rstd + i_scores + o_row)
            b_alpha = tl.exp(b_score - b_largest) * b_inverse
            b_f = b_alpha * (tl.load(p_dp + i_scores + o_row) - b_delta) * b_rstd
            b_h = tl.sum(b_f * b_rstd * b_score, 0) * inverse_dim
            b_dx = tl.sum(b_alpha, 0) * b_do + tl.sum(b_f, 0) * b_w - b_h * b_x
            b_t += tl.sum(b_f, 0) * b_x
            p_row = p_dblocks + tl.cast(i_block, tl.int64) * dblock_stride + tl.cast(i_token, tl.int64) * dim
            tl.store(p_row + o_dim, b_dx.to(p_dblocks.dtype.element_ty), mask=o_dim < dim)
    tl.store(p_partials + tl.cast(i_split, tl.int64) * dim + o_dim, b_t, mask=o_dim < dim)
