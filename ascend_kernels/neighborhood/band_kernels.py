"""Kernels of neighborhood attention by its band, in Triton, for Ascend NPUs and NVIDIA GPUs.

The band is the probabilities `[B,H,N,K]` in fp32; it is saved for backward, and `[N,N]` is never stored. Definition,
residue classes and windows are those of neighborhood/flash.py: row t of a class of S rows sees the rows start(t) ...
start(t) + K - 1 that exist, and slot s of row t is key start(t) + s. Launchers are in band.py.

    s = scale * q k^T     p = softmax over the slots               scores_kernel: q, k -> p
    o = p v                                                        rows_kernel: p, v -> o
    dp = do v^T           ds = p * (dp - sum(p * dp))              ds_kernel: do, v, p -> ds
    dq = scale * ds k                                              rows_kernel: ds, k -> dq
    dk = scale * ds^T q   dv = p^T do                              columns_kernel: ds, q -> dk and p, do -> dv
                                                                   gradients_kernel: p, ds, q, k, do -> dq, dk, dv

Writing a band. BLOCK_M consecutive rows share one contiguous window of keys, so one product of BLOCK_M rows and BLOCK_N
= 2 BLOCK_M keys holds BLOCK_M slots of each of them. Slot s of all rows is a diagonal of that product, which a masked
sum extracts; the `[BLOCK_M, BLOCK_M]` tile of the band is stored whole. A window with more slots needs more tiles, and
a first pass for the sums of its softmax: computing products twice is cheaper than storing scores.

Reading a band. In a segment of rows with start(t) = slope * t + first, the entry (t, u) of row t and key u is at

    t * row_stride + u - start(t)  =  t * (row_stride - slope) + u - first

That is a dense matrix with another row stride, keys contiguous: a tile of it is one block copy, by rows or (`tl.trans`
on the way to the cube) by columns, and no slot is gathered. All (t, u) of a segment are within the band of its class;
those outside the window of t belong to neighboring rows and are masked on chip. Rows of a tile overlap in memory if
row_stride - slope < BLOCK_N: bishengir's library then copies row by row (read in its source, not seen on a device).
There are at most three segments:

    rows 0 ... left - 1            slope 0, first 0         shift only: rows with the window of row 0
    rows left ... S - right - 1    slope 1, first -left     all rows, unless shift
    rows S - right ... S - 1       slope 0, first S - K     shift only: rows with the window of row S - 1

and with shift and fewer rows than K one: slope 0, first 0. A tile of rows walks over the segments that its rows are in;
a tile of keys over those with windows that hold one of its keys. Gradients of keys are gathered from queries, in a
fixed order, and over the query heads of their key head, so no two programs add to one address and results are bitwise
repeatable.

Operands of products are in the inputs' dtype, sums in fp32; p and ds are fp32 in memory and between products. The scale
is applied once, to sums. Work tiles are those of neighborhood/flash.py, of BLOCK_D features each.

Floor, per batch element. Forward reads q, k, v and writes o, 2 N (H + H_kv) D elements, writes a band of 4 N K H bytes
and reads it, and takes 4 N K H D FLOP. Backward reads do, q, k, v and writes dq, dk, dv, (3 H + 4 H_kv) N D elements,
reads p and writes and reads ds, 12 N K H bytes, and takes 8 N K H D FLOP. Each kernel documents its cost above that.

Limits: D <= 256, N and K <= 2^29, fp16, bf16 or fp32, features contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_kernels.neighborhood.windows import SIZES, class_base, load_rows, store_rows, window_start, work_tile

# Shared by the kernels


@triton.jit
def _segment(i_segment, num_rows, left, right, shift):
    """First and end row, slope and first key of a segment. Segment 0 has slope 1; shift puts 1 before, 2 after it."""
    window = left + right + 1
    shifted = shift != 0
    short = window > num_rows
    first_sloped = tl.where(shifted, tl.where(short, num_rows, left), 0)
    end_sloped = tl.where(shifted, tl.where(short, num_rows, num_rows - right), num_rows)
    first_row = tl.where(i_segment == 0, first_sloped, tl.where(i_segment == 1, 0, end_sloped))
    end_row = tl.where(i_segment == 0, end_sloped, tl.where(i_segment == 1, first_sloped, num_rows))
    first_key = tl.where(i_segment == 0, -left, tl.where(i_segment == 1, 0, num_rows - window))
    return first_row, end_row, tl.where(i_segment == 0, 1, 0), first_key


@triton.jit
def _load_dense(p_band_class, o_rows, o_keys, first_row, end_row, end_key, slope, first, window, row_stride):
    """The band of a segment as a dense `[rows, keys]` tile: one block copy, zeros outside windows and limits."""
    p_tile = p_band_class + o_rows.to(tl.int64)[:, None] * (row_stride - slope) + (o_keys - first)[None, :]
    rows = (o_rows >= first_row) & (o_rows < end_row)
    b_tile = tl.load(p_tile, mask=rows[:, None] & (o_keys < end_key)[None, :], other=0.0)
    o_slot = (o_keys - first)[None, :] - (slope * o_rows)[:, None]
    return tl.where((o_slot >= 0) & (o_slot < window), b_tile, 0.0)


@triton.jit
def _band_times_rows(
    p_band_class,
    p_x_class,
    i_row,
    o_dim,
    num_rows,
    dim,
    left,
    right,
    shift,
    band_row_stride,
    x_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sum over the keys of BLOCK_M rows' windows of band * x, `[BLOCK_M, BLOCK_D]`."""
    window = left + right + 1
    o_rows = i_row + tl.arange(0, BLOCK_M)
    b_sum = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for i_segment in range(0, 1 + 2 * shift):
        first_row, end_row, slope, first = _segment(i_segment, num_rows, left, right, shift)
        first_row, end_row = tl.maximum(first_row, i_row), tl.minimum(end_row, i_row + BLOCK_M)
        first_key = tl.maximum(slope * first_row + first, 0)
        end_key = tl.minimum(slope * (end_row - 1) + first + window, num_rows)
        end_key = tl.where(first_row < end_row, end_key, first_key)
        for i_key in range(first_key, end_key, BLOCK_N):
            o_keys = i_key + tl.arange(0, BLOCK_N)
            b_band = _load_dense(
                p_band_class,
                o_rows,
                o_keys,
                first_row,
                end_row,
                end_key,
                slope,
                first,
                window,
                band_row_stride,
            )
            b_x = load_rows(p_x_class, o_keys, o_dim, x_row_stride, end_key, dim, UPCAST)
            b_sum += tl.dot(b_band.to(b_x.dtype), b_x, input_precision="ieee")
    return b_sum


@triton.jit
def _band_times_columns(
    p_band_class,
    p_x_class,
    i_key,
    o_dim,
    num_rows,
    dim,
    group_size,
    left,
    right,
    shift,
    band_head_stride,
    band_row_stride,
    x_head_stride,
    x_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sum over the rows whose windows hold a key, and the group's heads, of band * x, `[BLOCK_M, BLOCK_D]`."""
    window = left + right + 1
    o_keys = i_key + tl.arange(0, BLOCK_M)
    end_tile = tl.minimum(i_key + BLOCK_M, num_rows)
    b_sum = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for i_segment in range(0, 1 + 2 * shift):
        first_row, end_row, slope, first = _segment(i_segment, num_rows, left, right, shift)
        sloped = slope != 0
        first_key = tl.where(sloped, 0, first)
        end_key = tl.where(sloped, num_rows, tl.minimum(first + window, num_rows))
        first_row = tl.where(sloped, tl.maximum(first_row, i_key - right), first_row)
        end_row = tl.where(sloped, tl.minimum(end_row, end_tile + left), end_row)
        end_row = tl.where((i_key < end_key) & (end_tile > first_key), end_row, first_row)
        for i_group_head in range(0, group_size):
            wide_group_head = tl.cast(i_group_head, tl.int64)
            for i_row in range(first_row, end_row, BLOCK_N):
                o_rows = i_row + tl.arange(0, BLOCK_N)
                b_band = _load_dense(
                    p_band_class + wide_group_head * band_head_stride,
                    o_rows,
                    o_keys,
                    first_row,
                    end_row,
                    end_key,
                    slope,
                    first,
                    window,
                    band_row_stride,
                )
                b_x = load_rows(
                    p_x_class + wide_group_head * x_head_stride, o_rows, o_dim, x_row_stride, end_row, dim, UPCAST
                )
                b_sum += tl.dot(tl.trans(b_band.to(b_x.dtype)), b_x, input_precision="ieee")
    return b_sum


@triton.jit
def _band_of_products(
    p_a_class,
    p_b_class,
    i_row,
    i_slot,
    num_rows,
    dim,
    left,
    right,
    shift,
    a_row_stride,
    b_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """a b^T of BLOCK_M rows of a, from i_row, at BLOCK_M slots, from i_slot; 0 where a slot has no key."""
    o_rows = i_row + tl.arange(0, BLOCK_M)
    o_keys = tl.maximum(window_start(i_row, num_rows, left, right, shift) + i_slot, 0) + tl.arange(0, BLOCK_N)
    b_products = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_dim in range(0, dim, BLOCK_D):
        o_dim = i_dim + tl.arange(0, BLOCK_D)
        b_a = load_rows(p_a_class, o_rows, o_dim, a_row_stride, num_rows, dim, UPCAST)
        b_b = load_rows(p_b_class, o_keys, o_dim, b_row_stride, num_rows, dim, UPCAST)
        b_products += tl.dot(b_a, tl.trans(b_b), input_precision="ieee")
    o_slot = o_keys[None, :] - window_start(o_rows, num_rows, left, right, shift)[:, None] - i_slot
    o_column = tl.arange(0, BLOCK_M)
    b_band = tl.zeros([BLOCK_M, BLOCK_M], dtype=tl.float32)
    for i_column in range(0, tl.minimum(left + right + 1 - i_slot, BLOCK_M)):
        b_column = tl.sum(tl.where(o_slot == i_column, b_products, 0.0), 1)
        b_band = tl.where((o_column == i_column)[None, :], b_column[:, None], b_band)
    return b_band


@triton.jit
def _band_base(p_band, i_batch, i_head, i_class, num_heads, num_tokens, window):
    """Pointer to the first row of a class of a head in a band `[B,H,N,K]`."""
    return p_band + ((i_batch * num_heads + i_head) * num_tokens + i_class) * window


# Kernels


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    p_q,
    p_k,
    p_band,
    scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    dim,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Band of softmax(scale * q k^T), BLOCK_M rows per work tile.

    Floor: reads q, k, writes 4 N K H bytes, 2 N K H D FLOP. Whole tiles take 4 N K H D, twice that when a window has
    more than BLOCK_M slots, and read 2 ceil(K / BLOCK_M) rows of k per row of q; a slot costs the vector unit BLOCK_N
    + BLOCK_M selects and sums.
    """
    window = left + right + 1
    o_column = tl.arange(0, BLOCK_M)
    wide_dilation = tl.cast(dilation, tl.int64)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, BLOCK_M
        )
        p_q_class = class_base(p_q, i_batch, i_head, i_class, q_batch_stride, q_token_stride, q_head_stride)
        p_k_class = class_base(
            p_k, i_batch, i_head // group_size, i_class, k_batch_stride, k_token_stride, k_head_stride
        )
        p_band_class = _band_base(p_band, i_batch, i_head, i_class, num_heads, num_tokens, window)
        o_rows = i_row + tl.arange(0, BLOCK_M)
        o_start = window_start(o_rows, num_rows, left, right, shift)
        b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        # One tile of slots takes one pass; more take one for the sums of the softmax, then one that stores
        first_pass = tl.where(window > BLOCK_M, 0, 1)
        for i_pass in range(first_pass, 2):
            for i_slot in range(0, window, BLOCK_M):
                b_s = _band_of_products(
                    p_q_class,
                    p_k_class,
                    i_row,
                    i_slot,
                    num_rows,
                    dim,
                    left,
                    right,
                    shift,
                    wide_dilation * q_token_stride,
                    wide_dilation * k_token_stride,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    UPCAST,
                )
                o_slot = i_slot + o_column
                o_keys = o_start[:, None] + o_slot[None, :]
                exists = (o_keys >= 0) & (o_keys < num_rows) & (o_slot < window)[None, :]
                b_s = tl.where(exists, b_s * scale, float("-inf"))
                if i_pass == first_pass:
                    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
                    b_finite_max = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
                    b_sum = b_sum * tl.exp(b_max - b_finite_max) + tl.sum(tl.exp(b_s - b_finite_max[:, None]), 1)
                    b_max = b_new_max
                if i_pass == 1:
                    b_finite_max = tl.where(b_max == float("-inf"), 0.0, b_max)  # rows past the end of the class
                    b_p = tl.exp(b_s - b_finite_max[:, None]) / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
                    p_tile = p_band_class + o_rows.to(tl.int64)[:, None] * (wide_dilation * window) + o_slot[None, :]
                    tl.store(p_tile, b_p, mask=(o_rows < num_rows)[:, None] & (o_slot < window)[None, :])


@triton.jit(do_not_specialize=SIZES)
def ds_kernel(
    p_do,
    p_v,
    p_band,
    p_ds,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    dim,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Band of ds = p * (dp - sum(p * dp)), dp = do v^T, BLOCK_M rows per work tile.

    Floor: reads do, v and 4 N K H bytes, writes as many, 2 N K H D FLOP; above that as scores_kernel.
    """
    window = left + right + 1
    o_column = tl.arange(0, BLOCK_M)
    wide_dilation = tl.cast(dilation, tl.int64)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, BLOCK_M
        )
        p_do_class = class_base(p_do, i_batch, i_head, i_class, do_batch_stride, do_token_stride, do_head_stride)
        p_v_class = class_base(
            p_v, i_batch, i_head // group_size, i_class, v_batch_stride, v_token_stride, v_head_stride
        )
        p_band_class = _band_base(p_band, i_batch, i_head, i_class, num_heads, num_tokens, window)
        p_ds_class = _band_base(p_ds, i_batch, i_head, i_class, num_heads, num_tokens, window)
        o_rows = i_row + tl.arange(0, BLOCK_M)
        o_band = o_rows.to(tl.int64)[:, None] * (wide_dilation * window)
        b_delta = tl.zeros([BLOCK_M], dtype=tl.float32)
        first_pass = tl.where(window > BLOCK_M, 0, 1)
        for i_pass in range(first_pass, 2):
            for i_slot in range(0, window, BLOCK_M):
                b_dp = _band_of_products(
                    p_do_class,
                    p_v_class,
                    i_row,
                    i_slot,
                    num_rows,
                    dim,
                    left,
                    right,
                    shift,
                    wide_dilation * do_token_stride,
                    wide_dilation * v_token_stride,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    UPCAST,
                )
                o_slot = i_slot + o_column
                mask = (o_rows < num_rows)[:, None] & (o_slot < window)[None, :]
                b_p = tl.load(p_band_class + o_band + o_slot[None, :], mask=mask, other=0.0)
                if i_pass == first_pass:
                    b_delta += tl.sum(b_p * b_dp, 1)
                if i_pass == 1:
                    tl.store(p_ds_class + o_band + o_slot[None, :], b_p * (b_dp - b_delta[:, None]), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    p_band,
    p_x,
    p_y,
    scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    dim,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    y_batch_stride,
    y_token_stride,
    y_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """y = scale * band x: o of p and v, dq of ds and k. BLOCK_M rows and BLOCK_D features per work tile.

    Floor: reads x and 4 N K H bytes, writes y, 2 N K H D FLOP. Whole tiles take 2 N W H D, with W the BLOCK_M + K - 1
    keys of a tile rounded up to BLOCK_N; the band's 4 N W H bytes are read once per BLOCK_D features, and for C = 1
    they are in 4 N K H bytes of memory.
    """
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work // num_dim_tiles, num_heads, dilation, num_tokens, rows_per_class, BLOCK_M
        )
        o_dim = i_work % num_dim_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
        b_y = _band_times_rows(
            _band_base(p_band, i_batch, i_head, i_class, num_heads, num_tokens, left + right + 1),
            class_base(p_x, i_batch, i_head // group_size, i_class, x_batch_stride, x_token_stride, x_head_stride),
            i_row,
            o_dim,
            num_rows,
            dim,
            left,
            right,
            shift,
            wide_dilation * (left + right + 1),
            wide_dilation * x_token_stride,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            UPCAST,
        )
        p_y_class = class_base(p_y, i_batch, i_head, i_class, y_batch_stride, y_token_stride, y_head_stride)
        o_rows = i_row + tl.arange(0, BLOCK_M)
        store_rows(p_y_class, b_y * scale, o_rows, o_dim, wide_dilation * y_token_stride, num_rows, dim)


@triton.jit(do_not_specialize=SIZES)
def columns_kernel(
    p_band,
    p_x,
    p_y,
    scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    dim,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    y_batch_stride,
    y_token_stride,
    y_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """y = scale * band^T x summed over the group: dk of ds and q, dv of p and do. num_heads is H_kv here.

    BLOCK_M keys and BLOCK_D features per work tile. Floor and FLOP: as rows_kernel, with x of H heads, y of H_kv.
    """
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_kv_head, i_class, i_key, num_rows = work_tile(
            i_work // num_dim_tiles, num_heads, dilation, num_tokens, rows_per_class, BLOCK_M
        )
        i_head = i_kv_head * group_size
        window = left + right + 1
        o_dim = i_work % num_dim_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
        b_y = _band_times_columns(
            _band_base(p_band, i_batch, i_head, i_class, num_heads * group_size, num_tokens, window),
            class_base(p_x, i_batch, i_head, i_class, x_batch_stride, x_token_stride, x_head_stride),
            i_key,
            o_dim,
            num_rows,
            dim,
            group_size,
            left,
            right,
            shift,
            tl.cast(num_tokens, tl.int64) * window,
            wide_dilation * window,
            x_head_stride,
            wide_dilation * x_token_stride,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            UPCAST,
        )
        p_y_class = class_base(p_y, i_batch, i_kv_head, i_class, y_batch_stride, y_token_stride, y_head_stride)
        o_keys = i_key + tl.arange(0, BLOCK_M)
        store_rows(p_y_class, b_y * scale, o_keys, o_dim, wide_dilation * y_token_stride, num_rows, dim)


@triton.jit(do_not_specialize=("num_batches", *SIZES))
def gradients_kernel(
    p_p,
    p_ds,
    p_q,
    p_k,
    p_do,
    p_dq,
    p_dk,
    p_dv,
    scale,
    num_batches,
    num_tokens,
    num_heads,
    group_size,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    dim,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    dq_batch_stride,
    dq_token_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    dv_batch_stride,
    dv_token_stride,
    dv_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """dq, dk and dv of BLOCK_M rows and BLOCK_D features: one launch, so tiles of ds are still cached when read again.

    The grid is (tiles and features, classes of key heads, batch), strided over in each. num_heads is H_kv here.
    Floor: reads q, k, do and 8 N K H bytes, writes dq, dk, dv, 6 N K H D FLOP; above that as rows_kernel, three times.
    """
    window = left + right + 1
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    wide_dilation = tl.cast(dilation, tl.int64)
    band_row_stride = wide_dilation * window
    band_head_stride = tl.cast(num_tokens, tl.int64) * window
    for i_outer in range(tl.program_id(2), num_batches, tl.num_programs(2)):
        i_batch = tl.cast(i_outer, tl.int64)
        for i_middle in range(tl.program_id(1), num_heads * wide_dilation, tl.num_programs(1)):
            i_kv_head = tl.cast(i_middle % num_heads, tl.int64)
            i_class = tl.cast(i_middle // num_heads, tl.int64)
            i_first_head = i_kv_head * group_size
            num_rows = tl.cast((num_tokens - i_class + dilation - 1) // dilation, tl.int32)
            p_p_class = _band_base(p_p, i_batch, i_first_head, i_class, num_heads * group_size, num_tokens, window)
            p_ds_class = _band_base(p_ds, i_batch, i_first_head, i_class, num_heads * group_size, num_tokens, window)
            p_q_class = class_base(p_q, i_batch, i_first_head, i_class, q_batch_stride, q_token_stride, q_head_stride)
            p_k_class = class_base(p_k, i_batch, i_kv_head, i_class, k_batch_stride, k_token_stride, k_head_stride)
            p_do_class = class_base(
                p_do, i_batch, i_first_head, i_class, do_batch_stride, do_token_stride, do_head_stride
            )
            p_dk_class = class_base(p_dk, i_batch, i_kv_head, i_class, dk_batch_stride, dk_token_stride, dk_head_stride)
            p_dv_class = class_base(p_dv, i_batch, i_kv_head, i_class, dv_batch_stride, dv_token_stride, dv_head_stride)
            for i_work in range(tl.program_id(0), tl.cdiv(rows_per_class, BLOCK_M) * num_dim_tiles, tl.num_programs(0)):
                i_row = i_work // num_dim_tiles * BLOCK_M
                o_rows = i_row + tl.arange(0, BLOCK_M)
                o_dim = i_work % num_dim_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
                b_dv = _band_times_columns(
                    p_p_class,
                    p_do_class,
                    i_row,
                    o_dim,
                    num_rows,
                    dim,
                    group_size,
                    left,
                    right,
                    shift,
                    band_head_stride,
                    band_row_stride,
                    do_head_stride,
                    wide_dilation * do_token_stride,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    UPCAST,
                )
                store_rows(p_dv_class, b_dv, o_rows, o_dim, wide_dilation * dv_token_stride, num_rows, dim)
                b_dk = _band_times_columns(
                    p_ds_class,
                    p_q_class,
                    i_row,
                    o_dim,
                    num_rows,
                    dim,
                    group_size,
                    left,
                    right,
                    shift,
                    band_head_stride,
                    band_row_stride,
                    q_head_stride,
                    wide_dilation * q_token_stride,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    UPCAST,
                )
                store_rows(p_dk_class, b_dk * scale, o_rows, o_dim, wide_dilation * dk_token_stride, num_rows, dim)
                for i_group_head in range(0, group_size):
                    wide_group_head = tl.cast(i_group_head, tl.int64)
                    b_dq = _band_times_rows(
                        p_ds_class + wide_group_head * band_head_stride,
                        p_k_class,
                        i_row,
                        o_dim,
                        num_rows,
                        dim,
                        left,
                        right,
                        shift,
                        band_row_stride,
                        wide_dilation * k_token_stride,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_D,
                        UPCAST,
                    )
                    p_dq_class = class_base(
                        p_dq,
                        i_batch,
                        i_first_head + i_group_head,
                        i_class,
                        dq_batch_stride,
                        dq_token_stride,
                        dq_head_stride,
                    )
                    store_rows(p_dq_class, b_dq * scale, o_rows, o_dim, wide_dilation * dq_token_stride, num_rows, dim)


@triton.jit(do_not_specialize=SIZES)
def expand_kernel(
    p_band,
    p_dense,
    num_work,
    num_tokens,
    num_heads,
    dilation,
    rows_per_class,
    left,
    right,
    shift,
    key_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Write the band into a dense matrix `[B,H,N,N]` of zeros; key_stride is dilation, which Triton specialises for 1.

    Floor: 4 N K H bytes read, as many written. Whole tiles write 4 N W H, with W as in rows_kernel.
    """
    window = left + right + 1
    wide_dilation = tl.cast(dilation, tl.int64)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_class, i_row, num_rows = work_tile(
            i_work, num_heads, dilation, num_tokens, rows_per_class, BLOCK_M
        )
        p_band_class = _band_base(p_band, i_batch, i_head, i_class, num_heads, num_tokens, window)
        p_dense_class = _band_base(p_dense, i_batch, i_head, i_class, num_heads, num_tokens, num_tokens) + i_class
        o_rows = i_row + tl.arange(0, BLOCK_M)
        for i_segment in range(0, 1 + 2 * shift):
            first_row, end_row, slope, first = _segment(i_segment, num_rows, left, right, shift)
            first_row, end_row = tl.maximum(first_row, i_row), tl.minimum(end_row, i_row + BLOCK_M)
            first_key = tl.maximum(slope * first_row + first, 0)
            end_key = tl.minimum(slope * (end_row - 1) + first + window, num_rows)
            end_key = tl.where(first_row < end_row, end_key, first_key)
            for i_key in range(first_key, end_key, BLOCK_N):
                o_keys = i_key + tl.arange(0, BLOCK_N)
                b_dense = _load_dense(
                    p_band_class,
                    o_rows,
                    o_keys,
                    first_row,
                    end_row,
                    end_key,
                    slope,
                    first,
                    window,
                    wide_dilation * window,
                )
                p_tile = p_dense_class + o_rows.to(tl.int64)[:, None] * (wide_dilation * num_tokens)
                rows = (o_rows >= first_row) & (o_rows < end_row)
                tl.store(
                    p_tile + o_keys.to(tl.int64)[None, :] * key_stride,
                    b_dense,
                    mask=rows[:, None] & (o_keys < end_key)[None, :],
                )
