"""Backward of interval.py, as two kernels without atomics: dq, and dk with dv.

`dq` keeps BLOCK_M rows and goes through their keys as the forward does. `dkdv` keeps BLOCK_N keys and goes through the
rows that see them, of all G heads of the key/value head:

    key j is seen by the rows j * step + first <= t <= j + left

A few keys that many rows see, such as compressed entries, would occupy few multiprocessors: the heads and the rows of a
tile of keys are then split among programs, whose partial sums in fp32 are added in order.

Floor: dq 6 D, dkdv 8 D FLOP per pair of a row and a key that it sees.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.device import gpu_cores
from ascend_kernels.launch import launch
from ascend_kernels.nsa.attention import LN_2, add_dkdv, add_dq, load_statistics, load_tile
from ascend_kernels.nsa.interval import SIZES, Interval, visible_keys
from ascend_kernels.nsa.layout import (
    E_ROW,
    K_ROW,
    Q_LEN,
    Q_ROW,
    START,
    Pack,
    field,
    row_field,
    strided,
)
from ascend_kernels.nsa.tiling import block_of, dkdv_tiles, dq_tiles


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_do, do_row, do_head, p_dq, dq_row, dq_head,
    p_stats, p_docs, p_tiles,
    log2_scale, num_work, num_rows, num_heads, group_size, first, step, left, dim, dim_v,
    KEY_COLUMN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_tile = (num_work - 1 - i_work) // num_heads
        i_head = ((num_work - 1 - i_work) % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * i_tile)
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * i_tile + 1)
            q_first, q_len = row_field(p_docs, i_doc, Q_ROW), field(p_docs, i_doc, Q_LEN)
            k_first, k_len = row_field(p_docs, i_doc, KEY_COLUMN), field(p_docs, i_doc, KEY_COLUMN + 1)
            start = field(p_docs, i_doc, START)
            p_k_head = p_k + k_first * k_row + (i_head // group_size) * k_head
            p_v_head = p_v + k_first * v_row + (i_head // group_size) * v_head
            o_row = i_row + o_m
            last_token = start + tl.minimum(i_row + BLOCK_M, q_len) - 1
            o_begin, o_end, begin, end = visible_keys(
                start + o_row, start + i_row, last_token, first, step, left, k_len, BLOCK_N
            )

            b_q = load_tile(p_q + q_first * q_row + i_head * q_head, o_row, q_row, o_d, q_len, dim, WHOLE)  # [M,D]
            b_do = load_tile(p_do + q_first * do_row + i_head * do_head, o_row, do_row, o_dv, q_len, dim_v, WHOLE)
            b_lse, b_delta, b_gate = load_statistics(p_stats + (i_head * num_rows + q_first + o_row) * 4, o_row < q_len)
            b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            for i_key in range(begin, end, BLOCK_N):
                o_key = i_key + o_n
                b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                b_v = load_tile(p_v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
                b_seen = (o_key[None, :] >= o_begin[:, None]) & (o_key[None, :] < o_end[:, None])  # [M,N]
                b_dq = add_dq(b_dq, b_q, b_do, b_lse, b_delta, b_k, b_v, b_seen, log2_scale)
            b_dq *= (b_gate * (log2_scale * LN_2))[:, None]
            p_dq_rows = p_dq + (q_first + o_row)[:, None] * dq_row + i_head * dq_head + o_d[None, :]
            mask = (o_row < q_len)[:, None] & (o_d < dim)[None, :]
            tl.store(p_dq_rows, b_dq.to(p_dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*SIZES, "num_keys", "num_kv_heads", "row_splits", "heads_per_split"))
def dkdv_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_do, do_row, do_head,
    p_stats, p_dk, p_dv, p_docs, p_tiles,
    log2_scale, num_work, num_rows, num_keys, num_kv_heads, group_size, row_splits, heads_per_split, first, step, left,
    dim, dim_v,
    KEY_COLUMN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Partial sums fp32 `[splits,keys,H_kv,D]`, unscaled dk and dv, of a split per program."""
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    splits = tl.cdiv(group_size, heads_per_split) * row_splits
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_split, i_rest = (i_work % splits).to(tl.int64), i_work // splits
        i_kv_head, i_tile = (i_rest % num_kv_heads).to(tl.int64), i_rest // num_kv_heads
        i_doc = tl.load(p_tiles + 2 * i_tile)
        if i_doc >= 0:
            i_key = tl.load(p_tiles + 2 * i_tile + 1)
            q_first, q_len = row_field(p_docs, i_doc, Q_ROW), field(p_docs, i_doc, Q_LEN)
            k_first, k_len = row_field(p_docs, i_doc, KEY_COLUMN), field(p_docs, i_doc, KEY_COLUMN + 1)
            start = field(p_docs, i_doc, START)
            o_key = i_key + o_n
            o_from, o_until = o_key * step + first, o_key + left
            last_key = tl.minimum(i_key + BLOCK_N, k_len) - 1
            # Rows that see a key, and this split's share of them
            begin = tl.maximum(i_key * step + first - start, 0) // BLOCK_M * BLOCK_M
            end = tl.maximum(tl.minimum(last_key + left - start + 1, q_len), begin)
            per_split = tl.cdiv(tl.cdiv(end - begin, row_splits), BLOCK_M) * BLOCK_M
            begin = begin + (i_split % row_splits).to(tl.int32) * per_split
            end = tl.minimum(begin + per_split, end)

            p_k_head, p_v_head = p_k + k_first * k_row + i_kv_head * k_head, p_v + k_first * v_row + i_kv_head * v_head
            b_k = load_tile(p_k_head, o_key, k_row, o_d, k_len, dim, WHOLE)  # [N,D]
            b_v = load_tile(p_v_head, o_key, v_row, o_dv, k_len, dim_v, WHOLE)  # [N,D_v]
            b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
            b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
            first_head = i_split // row_splits * heads_per_split
            for i_own in range(first_head, tl.minimum(first_head + heads_per_split, group_size)):
                i_head = i_kv_head * group_size + i_own
                p_q_head, p_do_head = (
                    p_q + q_first * q_row + i_head * q_head,
                    p_do + q_first * do_row + i_head * do_head,
                )
                p_stats_head = p_stats + (i_head * num_rows + q_first) * 4
                for i_row in range(begin, end, BLOCK_M):
                    o_row = i_row + o_m
                    o_token = start + o_row
                    b_q = load_tile(p_q_head, o_row, q_row, o_d, q_len, dim, WHOLE)  # [M,D]
                    b_do = load_tile(p_do_head, o_row, do_row, o_dv, q_len, dim_v, WHOLE)  # [M,D_v]
                    b_lse, b_delta, b_gate = load_statistics(p_stats_head + o_row.to(tl.int64) * 4, o_row < q_len)
                    b_seen = (o_token[None, :] >= o_from[:, None]) & (o_token[None, :] <= o_until[:, None])  # [N,M]
                    b_dk, b_dv, _ = add_dkdv(
                        b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_gate, b_seen, log2_scale
                    )
            o_out = ((i_split * num_keys + k_first + o_key) * num_kv_heads + i_kv_head)[:, None]
            exists = (o_key < k_len)[:, None]
            b_dk *= log2_scale * LN_2
            tl.store(p_dk + o_out * dim + o_d[None, :], b_dk, mask=exists & (o_d < dim)[None, :])
            tl.store(p_dv + o_out * dim_v + o_dv[None, :], b_dv, mask=exists & (o_dv < dim_v)[None, :])


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, statistics: Tensor, dq: Tensor, pack: Pack,
    interval: Interval, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dq `[rows,H,D]`; return dk and dv, fp32 `[keys,H_kv,D]`, 0 where no row sees a key.

    Args:
        do: gradient of the gated sum, `[rows,H,D_v]`.
        statistics: of rows, fp32 `[H,rows,4]`, contiguous (attention.py).
    """
    rows, heads, dim = q.shape
    keys, kv_heads, dim_v = v.shape
    group = heads // kv_heads
    shared: dict[str, Any] = {
        **strided("q", q), **strided("k", k), **strided("v", v), **strided("do", do), "p_stats": statistics,
        "p_docs": pack.docs,
        "log2_scale": scale * math.log2(math.e), "num_rows": rows, "group_size": group, **interval.arguments,
        "dim": dim, "dim_v": dim_v,
    }  # fmt: skip
    constants = {
        "KEY_COLUMN": (E_ROW if interval.entries else K_ROW).value, "BLOCK_D": block_of(dim),
        "BLOCK_DV": block_of(dim_v), "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
    }  # fmt: skip
    chosen = dq_tiles(q.dtype, dim, dim_v, q.device)
    tiles = pack.row_tiles(chosen.block_m)
    work = tiles.shape[0] * heads
    if work > 0:
        own = {**strided("dq", dq), "p_tiles": tiles, "num_work": work, "num_heads": heads}
        blocks = {"BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n}
        launch(dq_kernel, (work,), shared | own, constants | blocks, **chosen.options)

    chosen = dkdv_tiles(q.dtype, dim, dim_v, q.device)
    tiles = pack.entry_tiles(chosen.block_n) if interval.entries else pack.key_tiles(chosen.block_n)
    heads_per_split, row_splits = split(tiles.shape[0] * kv_heads, group, pack.most_rows, chosen.block_m, q.device)
    splits = -(-group // heads_per_split) * row_splits
    new = torch.empty if pack.all_keys and not interval.entries else torch.zeros
    dk, dv = (new((splits, keys, kv_heads, x), dtype=torch.float32, device=q.device) for x in (dim, dim_v))
    work = tiles.shape[0] * kv_heads * splits
    if work > 0:
        own = {
            "p_dk": dk, "p_dv": dv, "p_tiles": tiles, "num_work": work, "num_keys": keys, "num_kv_heads": kv_heads,
            "row_splits": row_splits, "heads_per_split": heads_per_split,
        }  # fmt: skip
        blocks = {"BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n}
        launch(dkdv_kernel, (work,), shared | own, constants | blocks, **chosen.options)
    return (dk[0], dv[0]) if splits == 1 else (dk.sum(0), dv.sum(0))


PROGRAMS = 8
"""Programs per multiprocessor that `split` aims at."""


def split(tiles: int, group: int, rows: int, block_m: int, device: torch.device) -> tuple[int, int]:
    """Heads per split, and splits of the rows, by shapes and device alone."""
    wanted = PROGRAMS * gpu_cores(device) // max(tiles, 1)
    heads_per_split = max(1, group // max(wanted, 1))
    row_splits = max(1, min(wanted * heads_per_split // group, rows // (16 * block_m)))
    return heads_per_split, row_splits
