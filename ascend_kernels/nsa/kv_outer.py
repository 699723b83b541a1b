"""Attention to selected blocks, KV-outer: a program keeps the keys of one block, and the rows that selected it pass by.

Token mode: forward and backward. For each pair, a token and a slot of its list, the heads of the token are rows;
UNITS pairs are gathered at a time. The forward leaves o in 16 bits and lse of each pair, and `combine` merges the pairs
of a token in the order of its slots. The backward sums dk and dv of a work tile in registers, and leaves dq of each
pair. Chunks of tokens and one key/value head at a time bound the memory of these partial results.

Tile mode: dk and dv alone; T rows of a head, BLOCK_M at a time, for each pair.

dk and dv of the work tiles of a block are added in order, so results repeat bit for bit.

Floor: forward 4 D, backward 10 D FLOP per row and selected key; partial o, and dq in the backward, written and read
once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.attention import LN_2, add_dkdv, add_keys, last_keys, load_statistics, load_tile
from ascend_kernels.nsa.layout import K_LEN, K_ROW, Q_LEN, Q_ROW, START, T_ROW, Pack, field, row_field, strided
from ascend_kernels.nsa.lists import block_base, block_lists, visible_blocks
from ascend_kernels.nsa.selected import statistics_arguments
from ascend_kernels.nsa.tiling import block_of, gpu_options, head_warps, kv_outer_backward_tiles, kv_outer_tiles

PARTIAL_BYTES = 1152 << 20
"""Partial results of a chunk of tokens of one key/value head."""

UNROLL = tl.constexpr(4)
"""Iterations of loops over partial results, whose loads then overlap."""

SIZES = (
    "chunk_pair", "first_list", "num_lists", "group_size", "slots", "size", "num_rows", "num_heads", "pair_head",
    "work_head", "part_head", "stats_row", "stats_head",
)  # fmt: skip


@triton.jit
def work_tile(p_work, p_pairs, p_tiles, p_docs, slots, num_lists, size):
    """Document and first key of the program's block, and its pairs."""
    i_work = tl.program_id(0)
    i_block, i_first = tl.load(p_work + 3 * i_work), tl.load(p_work + 3 * i_work + 1)
    count = tl.load(p_work + 3 * i_work + 2)
    i_list = tl.load(p_pairs + i_first) // slots % num_lists
    i_doc = tl.maximum(tl.load(p_tiles + 2 * i_list), 0)
    return i_doc, (i_block - block_base(p_docs, i_doc, size)) * size, p_pairs + i_first, count


@triton.jit
def pairs_from(p_own, i_pair, count, o_u):
    """Pairs from `i_pair` on; past the end, the last one again, so that every pair is one of the document."""
    return tl.load(p_own + tl.minimum(i_pair + o_u, count - 1))


@triton.jit
def load_rows(p_rows, o_dim, dim, WHOLE: tl.constexpr):
    """Rows at any addresses, `[rows,D]`. WHOLE: BLOCK_D is D."""
    if WHOLE:
        return tl.load(p_rows[:, None] + o_dim[None, :])
    return tl.load(p_rows[:, None] + o_dim[None, :], mask=(o_dim < dim)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_pairs, p_work, p_docs, p_tiles, p_o, p_lse,
    log2_scale, chunk_pair, group_size, slots, num_lists, size, pair_head, work_head, part_head, dim, dim_v,
    CAUSAL: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr, WHOLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """o `[heads,pairs of the chunk,G,D_v]` and base-2 lse of each pair. WHOLE_BLOCK: BLOCK_N keys hold a block."""
    i_head = tl.program_id(1).to(tl.int64)
    o_r, o_n, o_d, o_dv = (
        tl.arange(0, UNITS * GROUP),
        tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_DV),
    )
    o_u, o_g = o_r // GROUP, o_r % GROUP
    o_head = tl.minimum(o_g, group_size - 1)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        k_len, start = field(p_docs, i_doc, K_LEN), field(p_docs, i_doc, START)
        k_first, q_first = row_field(p_docs, i_doc, K_ROW), row_field(p_docs, i_doc, Q_ROW)
        list_first = field(p_docs, i_doc, T_ROW)
        end = tl.minimum(i_key + size, k_len)
        p_k_head, p_v_head = p_k + k_first * k_row + i_head * k_head, p_v + k_first * v_row + i_head * v_head
        if WHOLE_BLOCK:
            b_k = load_tile(p_k_head, i_key + o_n, k_row, o_d, end, dim, WHOLE)  # [N,D]
            b_v = load_tile(p_v_head, i_key + o_n, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
        p_q_heads = p_q + q_first * q_row + (i_head * group_size + o_head) * q_head  # [UNITS GROUP]
        o_part = (i_head * part_head + o_g) * dim_v
        o_next = pairs_from(p_own, 0, count, o_u)
        for i_pair in range(0, count, UNITS):
            o_pair = o_next
            o_next = pairs_from(p_own, i_pair + UNITS, count, o_u)  # before it is needed: q's addresses depend on it
            o_token = o_pair // slots - list_first
            o_last = last_keys(start + o_token, end, CAUSAL)
            b_q = load_rows(p_q_heads + o_token.to(tl.int64) * q_row, o_d, dim, WHOLE)  # [UNITS GROUP,D]
            if WHOLE_BLOCK:
                o_key = i_key + o_n
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [UNITS GROUP,N]
                b_s = tl.where(o_key[None, :] <= o_last[:, None], b_s, float("-inf"))
                b_max = tl.max(b_s, 1)
                b_p = tl.exp2(b_s * log2_scale - (b_max * log2_scale)[:, None])
                b_sum = tl.sum(b_p, 1)
                b_p *= (1.0 / b_sum)[:, None]
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")  # [UNITS GROUP,D_v]
            else:
                b_o = tl.zeros([UNITS * GROUP, BLOCK_DV], dtype=tl.float32)
                b_max = tl.full([UNITS * GROUP], float("-inf"), dtype=tl.float32)
                b_sum = tl.zeros([UNITS * GROUP], dtype=tl.float32)
                for i_own in range(0, size, BLOCK_N):
                    o_key = i_key + i_own + o_n
                    b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)
                    b_v = load_tile(p_v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)
                    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                    b_s = tl.where(o_key[None, :] <= o_last[:, None], b_s, float("-inf"))
                    b_o, b_max, b_sum = add_keys(b_o, b_max, b_sum, b_s, b_v, log2_scale)
                b_o *= (1.0 / b_sum)[:, None]
            exists = (i_pair + o_u < count) & (o_g < group_size)
            o_own_pair = (o_pair - chunk_pair).to(tl.int64)
            p_o_rows = p_o + (o_part + o_own_pair * (group_size * dim_v))[:, None] + o_dv[None, :]
            tl.store(p_o_rows, b_o.to(p_o.dtype.element_ty), mask=exists[:, None] & (o_dv < dim_v)[None, :])
            p_lse_rows = p_lse + i_head * part_head + o_g + o_own_pair * group_size
            tl.store(p_lse_rows, b_max * log2_scale + tl.log2(b_sum), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    p_part, p_part_lse, p_index, p_docs, p_tiles, p_o, p_lse, first_list, num_lists, group_size, slots, size,
    num_rows, num_heads, part_head, dim_v,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o and natural lse of one token's heads, from the partial results of its slots."""
    o_g, o_dv = tl.arange(0, GROUP), tl.arange(0, BLOCK_DV)
    i_own, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_list = first_list + i_own
    i_doc = tl.load(p_tiles + 2 * i_list)
    if i_doc >= 0:
        i_row = tl.load(p_tiles + 2 * i_list + 1)
        i_token = field(p_docs, i_doc, START) + i_row
        num_blocks = visible_blocks(p_docs, i_doc, i_token, size, CAUSAL)
        b_o = tl.zeros([GROUP, BLOCK_DV], dtype=tl.float32)
        b_max = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([GROUP], dtype=tl.float32)
        for i_slot in tl.range(0, slots, loop_unroll_factor=UNROLL):
            i_block = tl.load(p_index + (i_head * num_lists + i_list) * slots + i_slot)
            exists = o_g < tl.where((i_block >= 0) & (i_block < num_blocks), group_size, 0)
            o_part = i_head * part_head + (i_own.to(tl.int64) * slots + i_slot) * group_size + o_g
            b_lse = tl.load(p_part_lse + o_part, mask=exists, other=float("-inf"))
            in_part = exists[:, None] & (o_dv < dim_v)[None, :]
            b_part = tl.load(p_part + (o_part * dim_v)[:, None] + o_dv[None, :], mask=in_part, other=0.0).to(tl.float32)
            b_new = tl.maximum(b_max, b_lse)
            b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_keep, b_weight = tl.exp2(b_max - b_finite), tl.exp2(b_lse - b_finite)
            b_o = b_o * b_keep[:, None] + b_part * b_weight[:, None]  # [GROUP,D_v]
            b_sum = b_sum * b_keep + b_weight
            b_max = b_new
        b_div = tl.where(b_sum > 0.0, b_sum, 1.0)
        i_out = row_field(p_docs, i_doc, Q_ROW) + i_row
        o_head = i_head * group_size + o_g
        p_o_rows = p_o + ((i_out * num_heads + o_head) * dim_v)[:, None] + o_dv[None, :]
        in_group = o_g < group_size
        b_o = (b_o * (1.0 / b_div)[:, None]).to(p_o.dtype.element_ty)
        tl.store(p_o_rows, b_o, mask=in_group[:, None] & (o_dv < dim_v)[None, :])
        tl.store(p_lse + o_head * num_rows + i_out, (b_max + tl.log2(b_sum)) * LN_2, mask=in_group)


def forward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, pack: Pack, *, size: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """o and lse as selected.forward, for token mode and given blocks. Arguments as there."""
    rows, heads, dim = q.shape
    kv_heads, dim_v = v.shape[1:]
    _, lists, slots = index.shape
    group = heads // kv_heads
    o = pack.empty((rows, heads, dim_v), q.dtype, 0.0)
    lse = pack.empty((heads, rows), torch.float32, -math.inf)
    if 0 in (lists, slots, k.shape[0]):
        return o.zero_(), lse.fill_(-math.inf)
    chosen = kv_outer_tiles(q.dtype, dim, dim_v, group, size, q.device)
    chunk, together = chunk_of(lists, kv_heads, slots * group * (dim_v * q.element_size() + 4))
    found = block_lists(index, pack, kv_heads, size=size, causal=causal, chunk=chunk)
    part = torch.empty((together, chunk * slots * group, dim_v), dtype=q.dtype, device=q.device)
    part_lse = torch.empty(part.shape[:2], dtype=torch.float32, device=q.device)
    sizes: dict[str, Any] = {"num_lists": lists, "group_size": group, "slots": slots, "size": size, "dim_v": dim_v}
    sizes |= {"part_head": part.shape[1], "p_docs": pack.docs, "p_tiles": pack.rows}
    for head in range(0, kv_heads, together):
        kv, own = slice(head, head + together), slice(head * group, (head + together) * group)
        for i_chunk in range(found.work.shape[1]):
            work, first = found.work[kv, i_chunk], i_chunk * chunk
            arguments = {
                **strided("q", q[:, own]), **strided("k", k[:, kv]), **strided("v", v[:, kv]),
                "p_pairs": found.pairs[kv], "p_work": work, "p_o": part, "p_lse": part_lse,
                "log2_scale": scale * math.log2(math.e), "chunk_pair": first * slots, **sizes,
                "pair_head": found.pairs.stride(0), "work_head": work.stride(0), "dim": dim,
            }  # fmt: skip
            constants = {
                "CAUSAL": causal, "UNITS": chosen.block_m, "GROUP": block_of(group, 1), "BLOCK_N": chosen.block_n,
                "BLOCK_D": block_of(dim), "BLOCK_DV": block_of(dim_v),
                "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v, "WHOLE_BLOCK": size <= chosen.block_n,
            }  # fmt: skip
            launch(forward_kernel, (work.shape[1], work.shape[0]), arguments, constants, **chosen.options)
            arguments = {
                "p_part": part, "p_part_lse": part_lse, "p_index": index[kv], "p_o": o[:, own], "p_lse": lse[own],
                "first_list": first, **sizes, "num_rows": rows, "num_heads": heads,
            }  # fmt: skip
            constants = {"CAUSAL": causal, "GROUP": block_of(group, 1), "BLOCK_DV": block_of(dim_v)}
            grid = min(chunk, lists - first), work.shape[0]
            launch(combine_kernel, grid, arguments, constants, **gpu_options(num_warps=head_warps(group, dim_v)))
    return o, lse


def chunk_of(lists: int, kv_heads: int, bytes_per_list: int) -> tuple[int, int]:
    """Lists of a chunk, and key/value heads that are computed together, so that partial results are bounded."""
    per_head = lists * bytes_per_list
    if per_head <= PARTIAL_BYTES:
        return lists, max(1, min(kv_heads, PARTIAL_BYTES // per_head))
    return max(1, PARTIAL_BYTES // bytes_per_list), 1


# Backward


@triton.jit(do_not_specialize=SIZES)
def token_backward_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_do, do_row, do_head,
    p_stats, stats_row, stats_head,
    p_pairs, p_work, p_docs, p_tiles, p_dq, p_dk, p_dv,
    log2_scale, chunk_pair, group_size, slots, num_lists, size, pair_head, work_head, part_head, dim, dim_v,
    CAUSAL: tl.constexpr, DQ: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dk and dv of a work tile, fp32 `[heads,work tiles,size,D]`; with DQ also dq of each pair.

    A program keeps BLOCK_N keys of a block; the third axis of the grid has the tiles of a block.
    """
    o_r, o_n, o_d, o_dv = (
        tl.arange(0, UNITS * GROUP),
        tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_DV),
    )
    o_u, o_g = o_r // GROUP, o_r % GROUP
    i_head = tl.program_id(1).to(tl.int64)
    o_head = i_head * group_size + tl.minimum(o_g, group_size - 1)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        k_len, start = field(p_docs, i_doc, K_LEN), field(p_docs, i_doc, START)
        k_first, q_first = row_field(p_docs, i_doc, K_ROW), row_field(p_docs, i_doc, Q_ROW)
        list_first = field(p_docs, i_doc, T_ROW)
        o_own = tl.program_id(2) * BLOCK_N + o_n  # keys within the block
        o_key = i_key + o_own
        end = tl.minimum(i_key + size, k_len)
        b_k = load_tile(p_k + k_first * k_row + i_head * k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
        b_v = load_tile(p_v + k_first * v_row + i_head * v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
        b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
        p_q_heads = p_q + q_first * q_row + o_head * q_head
        p_do_heads = p_do + q_first * do_row + o_head * do_head
        p_stats_heads = p_stats + (q_first * stats_row + o_head * stats_head) * 4
        o_part = ((tl.program_id(2).to(tl.int64) * tl.num_programs(1) + i_head) * part_head + o_g) * dim
        o_next = pairs_from(p_own, 0, count, o_u)
        for i_pair in range(0, count, UNITS):
            o_pair = o_next
            o_next = pairs_from(p_own, i_pair + UNITS, count, o_u)
            o_token = o_pair // slots - list_first
            b_q = load_rows(p_q_heads + o_token.to(tl.int64) * q_row, o_d, dim, WHOLE)  # [UNITS GROUP,D]
            b_do = load_rows(p_do_heads + o_token.to(tl.int64) * do_row, o_dv, dim_v, WHOLE)  # [UNITS GROUP,D_v]
            exists = (i_pair + o_u < count) & (o_g < group_size)
            b_lse, b_delta, b_gate = load_statistics(p_stats_heads + o_token.to(tl.int64) * stats_row * 4, exists)
            o_last = last_keys(start + o_token, end, CAUSAL)
            b_seen = o_key[:, None] <= o_last[None, :]  # [N,UNITS GROUP]
            b_dk, b_dv, b_ds = add_dkdv(b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_gate, b_seen, log2_scale)
            if DQ:
                b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision="ieee") * (log2_scale * LN_2)
                o_out = o_part + (o_pair - chunk_pair).to(tl.int64) * (group_size * dim)
                p_dq_rows = p_dq + o_out[:, None] + o_d[None, :]
                tl.store(p_dq_rows, b_dq.to(p_dq.dtype.element_ty), mask=exists[:, None] & (o_d < dim)[None, :])
        store_partials(p_dk, p_dv, b_dk, b_dv, i_head, o_own, o_d, o_dv, log2_scale, size, dim, dim_v)


@triton.jit
def store_partials(p_dk, p_dv, b_dk, b_dv, i_head, o_own, o_d, o_dv, log2_scale, size, dim, dim_v):
    """dk and dv of the program's work tile, fp32 `[heads,work tiles,size,D]`."""
    o_out = ((i_head * tl.num_programs(0) + tl.program_id(0)) * size + o_own)[:, None]
    in_block = (o_own < size)[:, None]
    b_dk *= log2_scale * LN_2
    tl.store(p_dk + o_out * dim + o_d[None, :], b_dk, mask=in_block & (o_d < dim)[None, :])
    tl.store(p_dv + o_out * dim_v + o_dv[None, :], b_dv, mask=in_block & (o_dv < dim_v)[None, :])


@triton.jit(do_not_specialize=(*SIZES, "tile", "heads_per_pair"))
def tile_backward_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_do, do_row, do_head,
    p_stats, stats_row, stats_head,
    p_pairs, p_work, p_docs, p_tiles, p_dk, p_dv,
    log2_scale, group_size, slots, num_lists, size, pair_head, work_head, tile, heads_per_pair, dim, dim_v,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As token_backward_kernel, without dq: the rows of a pair are those of a selection tile, BLOCK_M at a time.

    heads_per_pair: G if the heads of a group share their lists, else 1.
    """
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i_head = tl.program_id(1).to(tl.int64)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        q_len, k_len = field(p_docs, i_doc, Q_LEN), field(p_docs, i_doc, K_LEN)
        k_first, q_first = row_field(p_docs, i_doc, K_ROW), row_field(p_docs, i_doc, Q_ROW)
        start, list_first = field(p_docs, i_doc, START), field(p_docs, i_doc, T_ROW)
        o_own = tl.program_id(2) * BLOCK_N + o_n
        o_key = i_key + o_own
        end = tl.minimum(i_key + size, k_len)
        b_k = load_tile(p_k + k_first * k_row + i_head * k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
        b_v = load_tile(p_v + k_first * v_row + i_head * v_head, o_key, v_row, o_dv, end, dim_v, WHOLE)  # [N,D_v]
        b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
        steps = tl.cdiv(tile, BLOCK_M)
        for i_step in range(0, count * heads_per_pair * steps):
            i_pair = tl.load(p_own + i_step // (heads_per_pair * steps))
            i_own_head = i_step // steps % heads_per_pair + i_pair // (num_lists * slots)
            i_tile = (i_pair // slots % num_lists).to(tl.int32) - list_first
            i_row = i_tile * tile + i_step % steps * BLOCK_M
            end_row = tl.minimum(i_tile * tile + tile, q_len)
            i_q_head = i_head * group_size + i_own_head
            o_row = i_row + o_m
            p_q_head, p_do_head = (
                p_q + q_first * q_row + i_q_head * q_head,
                p_do + q_first * do_row + i_q_head * do_head,
            )
            b_q = load_tile(p_q_head, o_row, q_row, o_d, end_row, dim, WHOLE)  # [M,D]
            b_do = load_tile(p_do_head, o_row, do_row, o_dv, end_row, dim_v, WHOLE)  # [M,D_v]
            p_stats_head = p_stats + (i_q_head * stats_head + q_first * stats_row) * 4
            b_lse, b_delta, b_gate = load_statistics(p_stats_head + o_row.to(tl.int64) * stats_row * 4, o_row < end_row)
            o_last = last_keys(start + o_row, end, CAUSAL)
            b_seen = o_key[:, None] <= o_last[None, :]  # [N,M]
            b_dk, b_dv, _ = add_dkdv(b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_gate, b_seen, log2_scale)
        store_partials(p_dk, p_dv, b_dk, b_dv, i_head, o_own, o_d, o_dv, log2_scale, size, dim, dim_v)


@triton.jit(do_not_specialize=("end_head", "num_work", "size", "num_kv_heads", "head"))
def sum_kernel(
    p_part, p_ends, end_head, p_sum, p_docs, p_tiles, num_work, size, num_kv_heads, head, dim,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a block's work tiles, in order, to its keys in p_sum, fp32 `[keys,H_kv,D]`."""
    o_n, o_d = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    i_head = tl.program_id(1).to(tl.int64)
    i_doc = tl.load(p_tiles + 2 * tl.program_id(0))
    if i_doc >= 0:
        i_key = tl.load(p_tiles + 2 * tl.program_id(0) + 1)
        i_block = block_base(p_docs, i_doc, size) + i_key // size
        p_end = p_ends + i_head * end_head + i_block
        first = 0
        if i_block > 0:
            first = tl.load(p_end - 1)
        last = tl.load(p_end)
        if last > first:
            exists = (o_n < size) & (i_key + o_n < field(p_docs, i_doc, K_LEN))
            mask = exists[:, None] & (o_d < dim)[None, :]
            o_out = ((row_field(p_docs, i_doc, K_ROW) + i_key + o_n) * num_kv_heads + head + i_head)[:, None] * dim
            b_sum = tl.load(p_sum + o_out + o_d[None, :], mask=mask, other=0.0)  # [N,D]
            for i_work in tl.range(first, last, loop_unroll_factor=UNROLL):
                o_part = ((i_head * num_work + i_work) * size + o_n)[:, None] * dim
                b_sum += tl.load(p_part + o_part + o_d[None, :], mask=mask, other=0.0)
            tl.store(p_sum + o_out + o_d[None, :], b_sum, mask=mask)


def add_work_tiles(part: Tensor, ends: Tensor, total: Tensor, head: int, pack: Pack) -> None:
    """Add partial sums of work tiles, in order, to the keys of key/value heads from `head` on.

    Args:
        part: fp32 `[heads,work tiles,size,D]`. ends: of BlockLists, for one chunk and these heads.
        total: fp32 `[keys,H_kv,D]`.
    """
    num_work, size, dim = part.shape[1:]
    blocks = pack.key_tiles(size)
    arguments = {
        "p_part": part, "p_ends": ends, "end_head": ends.stride(0), "p_sum": total, "p_docs": pack.docs,
        "p_tiles": blocks, "num_work": num_work, "size": size, "num_kv_heads": total.shape[1], "head": head,
        "dim": dim,
    }  # fmt: skip
    constants = {"BLOCK_N": 16, "BLOCK_D": block_of(dim)}
    launch(sum_kernel, (len(blocks), len(ends), -(-size // 16)), arguments, constants, **gpu_options(num_warps=4))


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    p_part, p_index, p_docs, p_tiles, p_dq, dq_row, dq_head,
    first_list, num_lists, group_size, slots, size, parts, part_head, dim,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of one token's heads: the sum over its slots, and over the `parts` tiles of a block, in order."""
    o_g, o_d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    i_own, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_list = first_list + i_own
    i_doc = tl.load(p_tiles + 2 * i_list)
    if i_doc >= 0:
        i_row = tl.load(p_tiles + 2 * i_list + 1)
        num_blocks = visible_blocks(p_docs, i_doc, field(p_docs, i_doc, START) + i_row, size, CAUSAL)
        b_dq = tl.zeros([GROUP, BLOCK_D], dtype=tl.float32)
        for i_slot in tl.range(0, slots, loop_unroll_factor=UNROLL):
            i_block = tl.load(p_index + (i_head * num_lists + i_list) * slots + i_slot)
            exists = o_g < tl.where((i_block >= 0) & (i_block < num_blocks), group_size, 0)
            for i_part in range(0, parts):
                o_part = (i_part * tl.num_programs(1) + i_head) * part_head
                o_part = o_part + (i_own.to(tl.int64) * slots + i_slot) * group_size + o_g
                mask = exists[:, None] & (o_d < dim)[None, :]
                b_dq += tl.load(p_part + (o_part * dim)[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        i_out = row_field(p_docs, i_doc, Q_ROW) + i_row
        p_rows = p_dq + i_out * dq_row + (i_head * group_size + o_g)[:, None] * dq_head + o_d[None, :]
        tl.store(p_rows, b_dq.to(p_dq.dtype.element_ty), mask=(o_g < group_size)[:, None] & (o_d < dim)[None, :])


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, statistics: Tensor, index: Tensor, dq: Tensor | None,
    pack: Pack, *, size: int, scale: float, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv, fp32 `[keys,H_kv,D]`; dq too into `dq` `[rows,H,D]`, if given, in token mode.

    Args: those of interval_backward.backward and selected.forward.
    """
    heads, dim = q.shape[1:]
    keys, kv_heads, dim_v = v.shape
    selects, lists, slots = index.shape
    group = heads // kv_heads
    dk, dv = (torch.zeros((keys, kv_heads, x), dtype=torch.float32, device=q.device) for x in (dim, dim_v))
    if 0 in (lists, slots, keys):
        if dq is not None:
            dq.zero_()
        return dk, dv
    token = pack.tile == 1
    chosen = kv_outer_backward_tiles(q.dtype, dim, dim_v, group if token else pack.tile, size, q.device, token=token)
    parts = -(-size // chosen.block_n)
    chunk, together = lists, kv_heads
    if dq is not None:
        chunk, together = chunk_of(lists, kv_heads, parts * slots * group * dim * q.element_size())
    found = block_lists(index, pack, kv_heads, size=size, causal=causal, chunk=chunk)
    num_work = found.work.shape[2]
    part_dk, part_dv = (
        torch.empty((together, num_work, size, x), dtype=torch.float32, device=q.device) for x in (dim, dim_v)
    )
    part_dq = q.new_empty((parts, together, chunk * slots * group, dim) if dq is not None else 0)
    sizes = {"group_size": group, "slots": slots, "num_lists": lists, "size": size}
    constants = {
        "CAUSAL": causal, "BLOCK_N": chosen.block_n, "BLOCK_D": block_of(dim), "BLOCK_DV": block_of(dim_v),
        "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
    }  # fmt: skip
    tiles = pack.row_tiles(pack.tile)
    for head in range(0, kv_heads, together):
        kv, own = slice(head, head + together), slice(head * group, (head + together) * group)
        count = min(together, kv_heads - head)
        for i_chunk in range(found.work.shape[1]):
            work, first = found.work[kv, i_chunk], i_chunk * chunk
            arguments = {
                **strided("q", q[:, own]), **strided("k", k[:, kv]), **strided("v", v[:, kv]),
                **strided("do", do[:, own]), **statistics_arguments(statistics[own]),
                "p_pairs": found.pairs[kv], "p_work": work, "p_docs": pack.docs, "p_tiles": tiles,
                "p_dk": part_dk, "p_dv": part_dv, "log2_scale": scale * math.log2(math.e), **sizes,
                "pair_head": found.pairs.stride(0), "work_head": work.stride(0), "dim": dim, "dim_v": dim_v,
            }  # fmt: skip
            grid = num_work, count, parts
            if token:
                more = {"p_dq": part_dq, "chunk_pair": first * slots, "part_head": chunk * slots * group}
                units = {"DQ": dq is not None, "UNITS": chosen.block_m, "GROUP": block_of(group, 1)}
                launch(token_backward_kernel, grid, arguments | more, constants | units, **chosen.options)
            else:
                more = {"tile": pack.tile, "heads_per_pair": group if selects == kv_heads else 1}
                rows_at_once = {"BLOCK_M": chosen.block_m}
                launch(tile_backward_kernel, grid, arguments | more, constants | rows_at_once, **chosen.options)
            ends = found.ends[kv, i_chunk]
            for part, total in ((part_dk, dk), (part_dv, dv)):
                add_work_tiles(part, ends, total, head, pack)
            if dq is not None:
                arguments = {
                    "p_part": part_dq, "p_index": index[kv], "p_docs": pack.docs, "p_tiles": tiles,
                    **strided("dq", dq[:, own]), "first_list": first, **sizes, "parts": parts,
                    "part_head": chunk * slots * group, "dim": dim,
                }  # fmt: skip
                units = {"CAUSAL": causal, "GROUP": block_of(group, 1), "BLOCK_D": block_of(dim)}
                options = gpu_options(num_warps=head_warps(group, dim))
                launch(dq_kernel, (min(chunk, lists - first), count), arguments, units, **options)
    return dk, dv
