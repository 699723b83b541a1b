"""Addressing, loading and summing of the rows of a token in the kernels of attention residual.

A token has L rows of D features, one in each block. Blocks are read in place, in one of three ways (ADDRESS):

    STACKED     one tensor: its first block, and a stride
    POINTERS    a list of up to MAX_POINTERS tensors: a pointer to each
    TABLE       a longer list: the tensor at the lowest address, and a table of int64 offsets from it, in vectors

VECTOR is the number of elements in 16 bytes, which GPUs load at once, if all tensors are aligned to that; else 1. A
tile is ROWS rows of a token, masked at the last block and at the last feature.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_kernels.residual import tiling

MAX_POINTERS = 16
MAX_BLOCKS = tl.constexpr(tiling.MAX_BLOCKS)
STACKED, POINTERS, TABLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def token_offset(i_token, tokens_per_batch, batch_stride, token_stride, FLAT: tl.constexpr = False):
    """Elements from a block's start to a token's row, int64. FLAT: one stride between all tokens of all batches."""
    if FLAT:
        i_offset = tl.cast(i_token, tl.int64) * token_stride
    else:
        i_batch = tl.cast(i_token // tokens_per_batch, tl.int64)
        i_offset = i_batch * batch_stride + tl.cast(i_token % tokens_per_batch, tl.int64) * token_stride
    return i_offset


@triton.jit
def select_pointer(
    i, p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
):  # fmt: skip
    """The pointer of block i, or pointers of several blocks."""
    p = tl.where(i == 1, p_1, p_0)
    p = tl.where(i == 2, p_2, p)
    p = tl.where(i == 3, p_3, p)
    p = tl.where(i == 4, p_4, p)
    p = tl.where(i == 5, p_5, p)
    p = tl.where(i == 6, p_6, p)
    p = tl.where(i == 7, p_7, p)
    p = tl.where(i == 8, p_8, p)
    p = tl.where(i == 9, p_9, p)
    p = tl.where(i == 10, p_10, p)
    p = tl.where(i == 11, p_11, p)
    p = tl.where(i == 12, p_12, p)
    p = tl.where(i == 13, p_13, p)
    p = tl.where(i == 14, p_14, p)
    p = tl.where(i == 15, p_15, p)
    return p


@triton.jit
def load_by_branches(
    i, o_elements, mask,
    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
):  # fmt: skip
    """Elements of block i, by branches: Triton-Ascend cannot select between pointers."""
    if i == 0:
        b = tl.load(p_0 + o_elements, mask=mask, other=0.0)
    elif i == 1:
        b = tl.load(p_1 + o_elements, mask=mask, other=0.0)
    elif i == 2:
        b = tl.load(p_2 + o_elements, mask=mask, other=0.0)
    elif i == 3:
        b = tl.load(p_3 + o_elements, mask=mask, other=0.0)
    elif i == 4:
        b = tl.load(p_4 + o_elements, mask=mask, other=0.0)
    elif i == 5:
        b = tl.load(p_5 + o_elements, mask=mask, other=0.0)
    elif i == 6:
        b = tl.load(p_6 + o_elements, mask=mask, other=0.0)
    elif i == 7:
        b = tl.load(p_7 + o_elements, mask=mask, other=0.0)
    elif i == 8:
        b = tl.load(p_8 + o_elements, mask=mask, other=0.0)
    elif i == 9:
        b = tl.load(p_9 + o_elements, mask=mask, other=0.0)
    elif i == 10:
        b = tl.load(p_10 + o_elements, mask=mask, other=0.0)
    elif i == 11:
        b = tl.load(p_11 + o_elements, mask=mask, other=0.0)
    elif i == 12:
        b = tl.load(p_12 + o_elements, mask=mask, other=0.0)
    elif i == 13:
        b = tl.load(p_13 + o_elements, mask=mask, other=0.0)
    elif i == 14:
        b = tl.load(p_14 + o_elements, mask=mask, other=0.0)
    else:
        b = tl.load(p_15 + o_elements, mask=mask, other=0.0)
    return b


@triton.jit
def load_tile(
    i_step, num_blocks, i_offset, block_stride, o_dim, end_dim, p_table,
    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
    ROWS: tl.constexpr, ADDRESS: tl.constexpr, VECTOR: tl.constexpr, BRANCHES: tl.constexpr,
):  # fmt: skip
    """Rows i_step * ROWS ... of a token as `[ROWS, BLOCK_D]`, zeros where there is no row, and from end_dim on.

    A single row is addressed by scalars: one block copy on an NPU.
    """
    o_dims = o_dim[None, :]
    mask = o_dims < end_dim
    if ADDRESS == POINTERS and BRANCHES:
        b_tile = load_by_branches(
            i_step, i_offset + o_dims, mask,
            p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
        )  # fmt: skip
    else:
        if ROWS == 1:
            o_row = i_step
            exists = num_blocks > 0
        else:
            o_row = i_step * ROWS + tl.arange(0, ROWS)[:, None]
            exists = o_row < num_blocks
            mask = mask & exists
        if ADDRESS == POINTERS:
            p_rows = select_pointer(
                o_row,
                p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
            )  # fmt: skip
            if ROWS > 1 and VECTOR > 1:
                p_rows = tl.multiple_of(p_rows, [16, 16])
        elif ADDRESS == TABLE:
            p_rows = p_0 + tl.load(p_table + o_row, mask=exists, other=0) * VECTOR
        else:
            p_rows = p_0 + tl.cast(o_row, tl.int64) * block_stride
        b_tile = tl.load(p_rows + i_offset + o_dims, mask=mask, other=0.0)
    return b_tile


@triton.jit
def split_even_odd(b):
    """Features 0, 2, 4 ... and 1, 3, 5 ... of a tile: no instruction on a GPU, the registers stay where they are."""
    return tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))


@triton.jit
def sums_of_quads(b_x, b_y):
    """Sums of products of four neighboring features, which one thread of a GPU holds: one instruction per product.

    `tl.sum(b_x * b_y, 1)` takes five for four.
    """
    b_y = tl.broadcast_to(b_y, b_x.shape)
    b_x0, b_x1 = split_even_odd(b_x)
    b_y0, b_y1 = split_even_odd(b_y)
    b_x00, b_x01 = split_even_odd(b_x0)
    b_y00, b_y01 = split_even_odd(b_y0)
    b_x10, b_x11 = split_even_odd(b_x1)
    b_y10, b_y11 = split_even_odd(b_y1)
    b_sum = tl.fma(b_x01, b_y01, b_x00 * b_y00)
    return tl.fma(b_x11, b_y11, tl.fma(b_x10, b_y10, b_sum))


@triton.jit
def add_pairs(a_0, b_0, a_1, b_1):
    return a_0 + a_1, b_0 + b_1


@triton.jit
def row_squares_and_products(b_x, b_w, ON_NPU: tl.constexpr):
    """Sums over the features of x^2 and of w x; on a GPU in one reduction, so its warps synchronise once."""
    if ON_NPU:
        b_squares = tl.sum(b_x * b_x, 1)
        b_products = tl.sum(b_x * b_w, 1)
    else:
        b_squares, b_products = tl.reduce((sums_of_quads(b_x, b_x), sums_of_quads(b_x, b_w)), 1, add_pairs)
    return b_squares, b_products


@triton.jit
def row_products(b_x, b_w, ON_NPU: tl.constexpr):
    """Sum over the features of w x."""
    if ON_NPU:
        b_products = tl.sum(b_x * b_w, 1)
    else:
        b_products = tl.sum(sums_of_quads(b_x, b_w), 1)
    return b_products


@triton.jit
def load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim):
    """w_query * w_norm in fp32, zeros from dim on; norm_dim is D, or 0 without a w_norm."""
    b_query = tl.load(p_w_query + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
    return b_query * tl.load(p_w_norm + o_dim, mask=o_dim < norm_dim, other=1.0).to(tl.float32)


@triton.jit
def load_scores(p_scores, i_scores, o_row, num_blocks):
    """Scores of a token's rows o_row; -inf past the last block."""
    return tl.load(p_scores + i_scores + o_row, mask=o_row < num_blocks, other=float("-inf"))


@triton.jit
def softmax_statistics(b_score):
    """The largest score of a token, and 1 / sum of exp(score - largest).

    alpha = exp(score - largest) * inverse sums to 1 within a few roundings for scores of any size. With exp(score -
    lse) the error of the sum would grow with lse, which is rounded to fp32.
    """
    b_largest = tl.max(b_score, 0)
    return b_largest, 1.0 / tl.sum(tl.exp(b_score - b_largest), 0)


@triton.jit
def product_of_largest(b_dp, b_score, b_largest):
    """dp of the row whose score is the largest."""
    return tl.max(tl.where(b_score == b_largest, b_dp, float("-inf")), 0)


@triton.jit
def load_softmax_statistics(p_scores, i_scores, num_blocks):
    """`softmax_statistics` of all scores of a token."""
    return softmax_statistics(load_scores(p_scores, i_scores, tl.arange(0, MAX_BLOCKS), num_blocks))


WIDE = tl.constexpr(1 << 40)
"""Constant added to every offset passed to a launch, so that all need 64 bits and share one build."""
OFFSETS = tuple(f"offset_{i}" for i in range(MAX_POINTERS))


@triton.jit(do_not_specialize=("num_offsets", *OFFSETS))
def table_kernel(
    p_table, num_offsets,
    offset_0, offset_1, offset_2, offset_3, offset_4, offset_5, offset_6, offset_7,
    offset_8, offset_9, offset_10, offset_11, offset_12, offset_13, offset_14, offset_15,
):  # fmt: skip
    """Write up to 16 entries of a table. A CUDA graph records a launch's arguments, not the source of a copy."""
    if num_offsets > 0:
        tl.store(p_table, offset_0 - WIDE)
    if num_offsets > 1:
        tl.store(p_table + 1, offset_1 - WIDE)
    if num_offsets > 2:
        tl.store(p_table + 2, offset_2 - WIDE)
    if num_offsets > 3:
        tl.store(p_table + 3, offset_3 - WIDE)
    if num_offsets > 4:
        tl.store(p_table + 4, offset_4 - WIDE)
    if num_offsets > 5:
        tl.store(p_table + 5, offset_5 - WIDE)
    if num_offsets > 6:
        tl.store(p_table + 6, offset_6 - WIDE)
    if num_offsets > 7:
        tl.store(p_table + 7, offset_7 - WIDE)
    if num_offsets > 8:
        tl.store(p_table + 8, offset_8 - WIDE)
    if num_offsets > 9:
        tl.store(p_table + 9, offset_9 - WIDE)
    if num_offsets > 10:
        tl.store(p_table + 10, offset_10 - WIDE)
    if num_offsets > 11:
        tl.store(p_table + 11, offset_11 - WIDE)
    if num_offsets > 12:
        tl.store(p_table + 12, offset_12 - WIDE)
    if num_offsets > 13:
        tl.store(p_table + 13, offset_13 - WIDE)
    if num_offsets > 14:
        tl.store(p_table + 14, offset_14 - WIDE)
    if num_offsets > 15:
        tl.store(p_table + 15, offset_15 - WIDE)
