"""Attention to selected blocks, query-outer: a program keeps the rows of one list of blocks and goes through them.

The rows that share a list are the G heads of a token (token mode, and given blocks), or T consecutive rows of one head
(tile mode), of which a program keeps BLOCK_M. No lists by block, no workspace; bits of a row depend on its list alone.
Heads are outermost in the grid, so that the keys of one head stay in the L2 cache.

Floor: 4 D FLOP per row and selected key; per list, the keys and values of its blocks from L2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.attention import LN_2, add_dq, add_keys, finish, last_keys, load_statistics, load_tile
from ascend_kernels.nsa.layout import (
    K_LEN,
    K_ROW,
    Q_LEN,
    Q_ROW,
    START,
    T_ROW,
    Pack,
    field,
    row_field,
    strided,
)
from ascend_kernels.nsa.tiling import Tiles, block_of, selected_tiles

SIZES = (
    "num_work", "num_rows", "num_heads", "group_size", "num_lists", "tile", "size", "slots", "share", "stats_row",
    "stats_head",
)  # fmt: skip


@triton.jit
def unit_rows(i_row, i_head, row_stride, head_stride, group_size, TOKEN: tl.constexpr):
    """Offset of a list's first row, and stride between its rows: heads of a token, or rows of a head."""
    if TOKEN:
        offset, stride = i_row * row_stride + i_head * group_size * head_stride, head_stride
    else:
        offset, stride = i_row * row_stride + i_head * head_stride, row_stride
    return offset, stride


@triton.jit
def rows_of_list(
    p_docs, i_doc, i_row, i_head, o_m, tile, group_size, share, num_lists,
    BLOCK_M: tl.constexpr, TOKEN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Rows of one list, from row i_row of a document on.

    Args:
        TOKEN: i_head is a key/value head, whose G query heads are the rows; else a query head, and `share` query heads
            have the same lists.

    Returns:
        First row and number of rows, key/value head, index of the list, last key that each row sees, and number of keys
        that one of them sees.
    """
    q_len, k_len = field(p_docs, i_doc, Q_LEN), field(p_docs, i_doc, K_LEN)
    i_list = row_field(p_docs, i_doc, T_ROW) + i_row // tile
    if TOKEN:
        i_kv_head, i_list = i_head, i_head * num_lists + i_list
        count, o_own = group_size, 0 * o_m
    else:
        i_kv_head, i_list = i_head // group_size, i_head // share * num_lists + i_list
        count, o_own = tl.minimum(q_len - i_row, (i_row // tile + 1) * tile - i_row), o_m
    first, rows = field(p_docs, i_doc, START) + i_row, 1 if TOKEN else tl.minimum(count, BLOCK_M)
    end_key = first + rows if CAUSAL else k_len
    o_last = last_keys(first + o_own, end_key, CAUSAL)
    return row_field(p_docs, i_doc, Q_ROW) + i_row, count, i_kv_head, i_list, o_last, end_key


@triton.jit
def num_steps(p_list, slots, size, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number of steps of BLOCK_N keys through a list, up to its last block."""
    o_slot = tl.arange(0, SLOTS)
    b_block = tl.load(p_list + o_slot, mask=o_slot < slots, other=-1)
    return tl.max(tl.where(b_block >= 0, o_slot + 1, 0)) * tl.cdiv(size, BLOCK_N)


@triton.jit
def keys_of_step(p_list, i_step, o_n, end_key, size, BLOCK_N: tl.constexpr):
    """Keys of a step, and their end; no key is below it if the slot has no block that a row sees.

    One loop over all steps, not one in each block, so that the loads of a block overlap with the block before.
    """
    steps = tl.cdiv(size, BLOCK_N)
    i_block = tl.load(p_list + i_step // steps)
    seen = (i_block >= 0) & (i_block < tl.cdiv(end_key, size))
    first = tl.where(seen, i_block, 0) * size
    return first + i_step % steps * BLOCK_N + o_n, tl.where(seen, tl.minimum(first + size, end_key), 0)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_index, p_o, p_lse, p_docs, p_tiles,
    log2_scale, num_work, num_rows, num_heads, group_size, num_lists, tile, size, slots, share, dim, dim_v,
    TOKEN: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    num_units = num_heads // group_size if TOKEN else num_heads
    num_tiles = num_work // num_units
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_tile, i_head = i_work % num_tiles, (i_work // num_tiles).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * i_tile)
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * i_tile + 1)
            first_row, count, i_kv_head, i_list, o_last, end_key = rows_of_list(
                p_docs, i_doc, i_row, i_head, o_m, tile, group_size, share, num_lists, BLOCK_M, TOKEN, CAUSAL
            )
            k_first = row_field(p_docs, i_doc, K_ROW)
            p_list = p_index + i_list * slots
            p_k_head = p_k + k_first * k_row + i_kv_head * k_head
            p_v_head = p_v + k_first * v_row + i_kv_head * v_head
            q_offset, q_stride = unit_rows(first_row, i_head, q_row, q_head, group_size, TOKEN)
            b_q = load_tile(p_q + q_offset, o_m, q_stride, o_d, count, dim, WHOLE)  # [M,D]
            b_o = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
            b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            for i_step in range(0, num_steps(p_list, slots, size, SLOTS, BLOCK_N)):
                o_key, end = keys_of_step(p_list, i_step, o_n, end_key, size, BLOCK_N)
                b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                b_v = load_tile(p_v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [M,N]
                seen = (o_key < end)[None, :] & (o_key[None, :] <= o_last[:, None])
                b_s = tl.where(seen, b_s, float("-inf"))
                b_o, b_max, b_sum = add_keys(b_o, b_max, b_sum, b_s, b_v, log2_scale)
            b_o, b_lse = finish(b_o, b_max, b_sum, log2_scale)
            o_offset, o_stride = unit_rows(first_row, i_head, num_heads * dim_v, dim_v, group_size, TOKEN)
            lse_offset, lse_stride = unit_rows(first_row, i_head, 1, num_rows, group_size, TOKEN)
            exists = o_m < count
            p_o_rows = p_o + o_offset + (o_m * o_stride)[:, None] + o_dv[None, :]
            tl.store(p_o_rows, b_o.to(p_o.dtype.element_ty), mask=exists[:, None] & (o_dv < dim_v)[None, :])
            tl.store(p_lse + lse_offset + o_m * lse_stride, b_lse, mask=exists)


def _launch(
    kernel: Any, chosen: Tiles, q: Tensor, k: Tensor, v: Tensor, index: Tensor, pack: Pack, more: dict[str, Any],
    *, size: int, scale: float, causal: bool,
) -> None:  # fmt: skip
    heads, dim = q.shape[1:]
    kv_heads, dim_v = v.shape[1:]
    token = pack.tile == 1
    tiles = pack.rows if token else pack.row_tiles(min(chosen.block_m, pack.tile))
    work = tiles.shape[0] * (kv_heads if token else heads)
    if work == 0:
        return
    arguments = {
        **strided("q", q), **strided("k", k), **strided("v", v), "p_index": index, "p_docs": pack.docs,
        "p_tiles": tiles, "log2_scale": scale * math.log2(math.e), "num_work": work, "num_rows": q.shape[0],
        "num_heads": heads, "group_size": heads // kv_heads, "num_lists": index.shape[1], "tile": pack.tile,
        "size": size, "slots": index.shape[2], "share": heads // index.shape[0], "dim": dim, "dim_v": dim_v, **more,
    }  # fmt: skip
    constants = {
        "TOKEN": token, "CAUSAL": causal, "SLOTS": block_of(index.shape[2], 1), "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n, "BLOCK_D": block_of(dim), "BLOCK_DV": block_of(dim_v),
        "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
    }  # fmt: skip
    launch(kernel, (work,), arguments, constants, **chosen.options)


def statistics_arguments(statistics: Tensor) -> dict[str, Any]:
    """Arguments for statistics `[H,rows,4]`: strides in vectors of four, so that one load fetches a vector."""
    return {"p_stats": statistics, "stats_row": statistics.stride(1) // 4, "stats_head": statistics.stride(0) // 4}


def rows_per_list(q: Tensor, v: Tensor, pack: Pack) -> int:
    """Rows that share a list: the heads of a group in token mode, else those of a tile."""
    return q.shape[1] // v.shape[1] if pack.tile == 1 else pack.tile


def forward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, pack: Pack, *, size: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """o `[rows,H,D_v]` and natural lse fp32 `[H,rows]`.

    Args:
        q: `[rows,H,D]`. k, v: `[keys,H_kv,D]`, `[keys,H_kv,D_v]`.
        index: int32 `[S,tiles,k]`, contiguous; -1 and blocks that a row does not see add nothing.
        size: tokens of a block.
    """
    rows, heads, dim = q.shape
    o = pack.empty((rows, heads, v.shape[2]), q.dtype, 0.0)
    lse = pack.empty((heads, rows), torch.float32, -math.inf)
    chosen = selected_tiles(q.dtype, dim, v.shape[2], rows_per_list(q, v, pack), size, q.device, token=pack.tile == 1)
    how: dict[str, Any] = {"size": size, "scale": scale, "causal": causal}
    _launch(forward_kernel, chosen, q, k, v, index, pack, {"p_o": o, "p_lse": lse}, **how)
    return o, lse


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_do, do_row, do_head, p_dq, dq_row, dq_head,
    p_stats, stats_row, stats_head, p_index, p_docs, p_tiles,
    log2_scale, num_work, num_rows, num_heads, group_size, num_lists, tile, size, slots, share, dim, dim_v,
    TOKEN: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq of the rows of one list per program; arguments as in forward_kernel."""
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    num_units = num_heads // group_size if TOKEN else num_heads
    num_tiles = num_work // num_units
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_tile, i_head = i_work % num_tiles, (i_work // num_tiles).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * i_tile)
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * i_tile + 1)
            first_row, count, i_kv_head, i_list, o_last, end_key = rows_of_list(
                p_docs, i_doc, i_row, i_head, o_m, tile, group_size, share, num_lists, BLOCK_M, TOKEN, CAUSAL
            )
            k_first = row_field(p_docs, i_doc, K_ROW)
            p_list = p_index + i_list * slots
            p_k_head = p_k + k_first * k_row + i_kv_head * k_head
            p_v_head = p_v + k_first * v_row + i_kv_head * v_head
            q_offset, q_stride = unit_rows(first_row, i_head, q_row, q_head, group_size, TOKEN)
            do_offset, do_stride = unit_rows(first_row, i_head, do_row, do_head, group_size, TOKEN)
            i_stats, stats_stride = unit_rows(first_row, i_head, stats_row, stats_head, group_size, TOKEN)
            b_q = load_tile(p_q + q_offset, o_m, q_stride, o_d, count, dim, WHOLE)  # [M,D]
            b_do = load_tile(p_do + do_offset, o_m, do_stride, o_dv, count, dim_v, WHOLE)  # [M,D_v]
            b_lse, b_delta, b_gate = load_statistics(p_stats + (i_stats + o_m * stats_stride) * 4, o_m < count)
            b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            for i_step in range(0, num_steps(p_list, slots, size, SLOTS, BLOCK_N)):
                o_key, end = keys_of_step(p_list, i_step, o_n, end_key, size, BLOCK_N)
                b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                b_v = load_tile(p_v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
                b_seen = (o_key < end)[None, :] & (o_key[None, :] <= o_last[:, None])  # [M,N]
                b_dq = add_dq(b_dq, b_q, b_do, b_lse, b_delta, b_k, b_v, b_seen, log2_scale)
            b_dq *= (b_gate * (log2_scale * LN_2))[:, None]
            dq_offset, dq_stride = unit_rows(first_row, i_head, dq_row, dq_head, group_size, TOKEN)
            p_dq_rows = p_dq + dq_offset + (o_m * dq_stride)[:, None] + o_d[None, :]
            tl.store(p_dq_rows, b_dq.to(p_dq.dtype.element_ty), mask=(o_m < count)[:, None] & (o_d < dim)[None, :])


def dq(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, statistics: Tensor, index: Tensor, out: Tensor, pack: Pack,
    *, size: int, scale: float, causal: bool,
) -> None:  # fmt: skip
    """dq into `out` `[rows,H,D]`. Arguments as in interval_backward.backward, and as in `forward`."""
    rows = rows_per_list(q, v, pack)
    chosen = selected_tiles(q.dtype, q.shape[2], v.shape[2], rows, size, q.device, token=pack.tile == 1, backward=True)
    more = {**strided("do", do), **strided("dq", out), **statistics_arguments(statistics)}
    _launch(dq_kernel, chosen, q, k, v, index, pack, more, size=size, scale=scale, causal=causal)
