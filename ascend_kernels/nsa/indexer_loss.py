"""The loss that trains an indexer: KL divergence of its distribution over selected blocks from the attention's.

    forward     mass of each block in the attention, score of its best key; the loss, and the gradients of the scores
    backward    gradients of q_idx and k_idx

Kernels keep the keys of a block while the tokens that selected it pass by, as in kv_outer.py, and leave one number for
each pair of a token and a slot of its list. The rest is arithmetic on `[H_kv,rows,k]`. Nothing is added by atomics.

    mass    mean over the G heads of exp(lse of the block - lse of all selected blocks)
    score   max over the block's visible keys of q_idx . k_idx; among equal ones the first key counts

Floor: 2 D FLOP per query head and selected key, 2 D_i per indexer head and selected key, as many in the backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa import kv_outer
from ascend_kernels.nsa.attention import last_keys, load_tile
from ascend_kernels.nsa.block_sparse import lists_of, token_pack
from ascend_kernels.nsa.kv_outer import add_work_tiles, chunk_of, load_rows, pairs_from, work_tile
from ascend_kernels.nsa.layout import (
    K_LEN,
    K_ROW,
    Q_ROW,
    START,
    T_ROW,
    Pack,
    field,
    row_field,
    rows_of,
    strided,
)
from ascend_kernels.nsa.lists import BlockLists, block_lists, visible_blocks
from ascend_kernels.nsa.tiling import Tiles, block_of, gpu_options, indexer_tiles, lse_tiles

SLOTS = 16
"""Slots of a token that a program reads at a time."""

SIZES = (
    "chunk_pair", "first_list", "num_lists", "group_size", "slots", "size", "pair_head", "work_head", "part_head",
)  # fmt: skip


# Forward


@triton.jit
def add_lse(b_max, b_sum, b_q, b_k, o_key, o_last, log2_scale):
    """One step of an online log-sum-exp, in base 2, over a tile of keys."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * log2_scale  # [M,N]
    b_s = tl.where(o_key[None, :] <= o_last[:, None], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    return b_new, b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_s - b_new[:, None]), 1)


@triton.jit(do_not_specialize=SIZES)
def lse_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_pairs, p_work, p_docs, p_tiles, p_lse,
    log2_scale, chunk_pair, group_size, slots, num_lists, size, pair_head, work_head, part_head, dim,
    UNITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
    WHOLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Base-2 lse of each pair, `[heads,pairs of the chunk,G]`. WHOLE_BLOCK: BLOCK_N keys hold a block.

    The first key of a listed block is visible, so the maximum of the first step is a number.
    """
    o_r, o_n, o_d = tl.arange(0, UNITS * GROUP), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_u, o_g = o_r // GROUP, o_r % GROUP
    i_head = tl.program_id(1).to(tl.int64)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        start, list_first = field(p_docs, i_doc, START), field(p_docs, i_doc, T_ROW)
        k_first, q_first = row_field(p_docs, i_doc, K_ROW), row_field(p_docs, i_doc, Q_ROW)
        end = tl.minimum(i_key + size, field(p_docs, i_doc, K_LEN))
        p_k_head = p_k + k_first * k_row + i_head * k_head
        p_q_heads = p_q + q_first * q_row + (i_head * group_size + tl.minimum(o_g, group_size - 1)) * q_head
        b_k = load_tile(p_k_head, i_key + o_n, k_row, o_d, end, dim, WHOLE)  # [N,D]
        o_next = pairs_from(p_own, 0, count, o_u)
        for i_pair in range(0, count, UNITS):
            o_pair = o_next
            o_next = pairs_from(p_own, i_pair + UNITS, count, o_u)
            o_token = o_pair // slots - list_first
            o_last = last_keys(start + o_token, end, True)
            b_q = load_rows(p_q_heads + o_token.to(tl.int64) * q_row, o_d, dim, WHOLE)  # [UNITS GROUP,D]
            b_max = tl.full([UNITS * GROUP], float("-inf"), dtype=tl.float32)
            b_sum = tl.zeros([UNITS * GROUP], dtype=tl.float32)
            if WHOLE_BLOCK:
                b_max, b_sum = add_lse(b_max, b_sum, b_q, b_k, i_key + o_n, o_last, log2_scale)
            else:
                for i_own in range(0, size, BLOCK_N):
                    o_key = i_key + i_own + o_n
                    b_step = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)
                    b_max, b_sum = add_lse(b_max, b_sum, b_q, b_step, o_key, o_last, log2_scale)
            exists = (i_pair + o_u < count) & (o_g < group_size)
            o_out = i_head * part_head + (o_pair - chunk_pair).to(tl.int64) * group_size + o_g
            tl.store(p_lse + o_out, b_max + tl.log2(b_sum), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def mass_kernel(
    p_lse, p_index, p_docs, p_tiles, p_mass, first_list, num_lists, group_size, slots, size, part_head,
    GROUP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Mass of one token's blocks, fp32 `[H_kv,lists,k]`, from the lse of its pairs."""
    o_g, o_s = tl.arange(0, GROUP), tl.arange(0, SLOTS)
    i_own, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_list = first_list + i_own
    i_doc = tl.load(p_tiles + 2 * i_list)
    if i_doc >= 0:
        i_token = field(p_docs, i_doc, START) + tl.load(p_tiles + 2 * i_list + 1)
        num_blocks = visible_blocks(p_docs, i_doc, i_token, size, True)
        o_first = (i_head * num_lists + i_list) * slots
        p_part = p_lse + i_head * part_head + i_own.to(tl.int64) * slots * group_size
        b_max = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([GROUP], dtype=tl.float32)
        for i_slot in range(0, slots, SLOTS):
            o_slot = i_slot + o_s
            b_block = tl.load(p_index + o_first + o_slot, mask=o_slot < slots, other=-1)
            mask = ((b_block >= 0) & (b_block < num_blocks))[:, None] & (o_g < group_size)[None, :]  # [SLOTS,GROUP]
            o_part = o_slot[:, None] * group_size + o_g[None, :]
            b_lse = tl.load(p_part + o_part, mask=mask, other=float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_lse, 0))
            b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_max - b_finite) + tl.sum(tl.exp2(b_lse - b_finite[None, :]), 0)
            b_max = b_new
        b_finite = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_share = 1.0 / (tl.where(b_sum == 0.0, 1.0, b_sum) * group_size)  # [GROUP]
        for i_slot in range(0, slots, SLOTS):
            o_slot = i_slot + o_s
            b_block = tl.load(p_index + o_first + o_slot, mask=o_slot < slots, other=-1)
            exists = (b_block >= 0) & (b_block < num_blocks)
            mask = exists[:, None] & (o_g < group_size)[None, :]
            o_part = o_slot[:, None] * group_size + o_g[None, :]
            b_lse = tl.load(p_part + o_part, mask=mask, other=float("-inf"))
            b_mass = tl.sum(tl.exp2(b_lse - b_finite[None, :]) * b_share[None, :], 1)
            tl.store(p_mass + o_first + o_slot, b_mass, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def best_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_pairs, p_work, p_docs, p_tiles, p_score, p_key,
    slots, num_lists, size, pair_head, work_head, dim,
    UNITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Score of each pair, fp32 `[H_kv,lists,k]`, and the key that has it, counted from the document's first."""
    o_u, o_n, o_d = tl.arange(0, UNITS), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    i_head = tl.program_id(1).to(tl.int64)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        start, list_first = field(p_docs, i_doc, START), field(p_docs, i_doc, T_ROW)
        k_first, q_first = row_field(p_docs, i_doc, K_ROW), row_field(p_docs, i_doc, Q_ROW)
        end = tl.minimum(i_key + size, field(p_docs, i_doc, K_LEN))
        p_k_head = p_k + k_first * k_row + i_head * k_head
        for i_pair in range(0, count, UNITS):
            o_pair = pairs_from(p_own, i_pair, count, o_u)
            o_token = o_pair // slots - list_first
            o_last = last_keys(start + o_token, end, True)
            p_rows = p_q + q_first * q_row + i_head * q_head + o_token.to(tl.int64) * q_row
            b_q = load_rows(p_rows, o_d, dim, WHOLE)  # [UNITS,D]
            b_best = tl.full([UNITS], float("-inf"), dtype=tl.float32)
            b_at = tl.full([UNITS], 0, dtype=tl.int32)
            b_bad = tl.full([UNITS], 0, dtype=tl.int32)
            for i_own in range(0, size, BLOCK_N):
                o_key = i_key + i_own + o_n
                b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [UNITS,N]
                seen = o_key[None, :] <= o_last[:, None]
                b_bad = tl.maximum(b_bad, tl.max((seen & (b_s != b_s)).to(tl.int32), 1))
                b_s = tl.where(seen & (b_s == b_s), b_s, float("-inf"))
                b_top = tl.max(b_s, 1)
                b_first = tl.min(tl.where(b_s == b_top[:, None], i_own + o_n[None, :], size), 1)
                b_at = tl.where(b_top > b_best, b_first, b_at)
                b_best = tl.maximum(b_best, b_top)
            exists = i_pair + o_u < count
            o_out = i_head * num_lists * slots + o_pair
            tl.store(p_score + o_out, tl.where(b_bad > 0, float("nan"), b_best), mask=exists)
            tl.store(p_key + o_out, i_key + b_at, mask=exists)


@dataclass(frozen=True)
class Selection:
    """Selected blocks of a call, int32 `[H_kv,rows,k]`, and the same by block."""

    index: Tensor
    pack: Pack
    size: int
    found: BlockLists

    def arguments(self, heads: slice, i_chunk: int) -> dict[str, Any]:
        """Those of kernels that go through the lists of some key/value heads and a chunk of tokens."""
        work = self.found.work[heads, i_chunk]
        return {
            "p_pairs": self.found.pairs[heads], "p_work": work, "p_docs": self.pack.docs, "p_tiles": self.pack.rows,
            "slots": self.index.shape[2], "num_lists": self.index.shape[1], "size": self.size,
            "pair_head": self.found.pairs.stride(0), "work_head": work.stride(0),
        }  # fmt: skip


def select(index: Tensor, pack: Pack, size: int, chunk: int) -> Selection:
    """Sort selected blocks by block, for chunks of so many tokens."""
    found = block_lists(index, pack, index.shape[0], size=size, causal=True, chunk=chunk)
    return Selection(index, pack, size, found)


def masses(q: Tensor, k: Tensor, selection: Selection, together: int, scale: float) -> Tensor:
    """The attention's mass of each selected block, fp32 `[H_kv,rows,k]`.

    Args:
        q, k: `[rows,H,D]`, `[keys,H_kv,D]`.
        together: key/value heads whose pairs' lse are in memory at once.
    """
    index, pack, chunk = selection.index, selection.pack, selection.found.chunk
    (kv_heads, lists, slots), dim = index.shape, q.shape[2]
    group = q.shape[1] // kv_heads
    mass = torch.zeros(index.shape, dtype=torch.float32, device=q.device)
    part = torch.empty((together, chunk * slots * group), dtype=torch.float32, device=q.device)
    chosen = lse_tiles(q.dtype, dim, group, selection.size, q.device)
    whole_block = selection.size <= chosen.block_n
    for head in range(0, kv_heads, together):
        kv, own = slice(head, head + together), slice(head * group, (head + together) * group)
        count = min(together, kv_heads - head)
        for i_chunk in range(selection.found.work.shape[1]):
            first = i_chunk * chunk
            sizes = {"group_size": group, "part_head": part.shape[1]}
            arguments = {
                **strided("q", q[:, own]), **strided("k", k[:, kv]), **selection.arguments(kv, i_chunk), **sizes,
                "p_lse": part, "log2_scale": scale * math.log2(math.e), "chunk_pair": first * slots, "dim": dim,
            }  # fmt: skip
            constants = {**constants_of(chosen, dim), "GROUP": block_of(group, 1), "WHOLE_BLOCK": whole_block}
            launch(lse_kernel, (selection.found.work.shape[2], count), arguments, constants, **chosen.options)
            arguments = {
                "p_lse": part, "p_index": index[kv], "p_docs": pack.docs, "p_tiles": pack.rows, "p_mass": mass[kv],
                "first_list": first, "num_lists": lists, "slots": slots, "size": selection.size, **sizes,
            }  # fmt: skip
            constants = {"GROUP": block_of(group, 1), "SLOTS": min(SLOTS, block_of(slots, 1))}
            grid = min(chunk, lists - first), count
            launch(mass_kernel, grid, arguments, constants, **gpu_options(num_warps=1))
    return mass


def best_keys(q_idx: Tensor, k_idx: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """The indexer's unscaled score of each selected block, and the key that has it, counted from the document's first.

    fp32 and int32 `[H_kv,rows,k]`; 0 and -1 where there is no block.

    Args:
        q_idx, k_idx: `[rows,H_kv,D_i]`, `[keys,H_kv,D_i]`.
    """
    dim = q_idx.shape[2]
    score = torch.zeros(selection.index.shape, dtype=torch.float32, device=q_idx.device)
    key = torch.full_like(selection.index, -1)
    chosen = indexer_tiles(q_idx.dtype, dim, selection.size)
    heads, chunks, num_work = selection.found.work.shape[:3]
    for i_chunk in range(chunks):
        arguments = {
            **strided("q", q_idx), **strided("k", k_idx), **selection.arguments(slice(None), i_chunk),
            "p_score": score, "p_key": key, "dim": dim,
        }  # fmt: skip
        launch(best_kernel, (num_work, heads), arguments, constants_of(chosen, dim), **chosen.options)
    return score, key


def constants_of(chosen: Tiles, dim: int) -> dict[str, Any]:
    block_d = block_of(dim)
    return {"UNITS": chosen.block_m, "BLOCK_N": chosen.block_n, "BLOCK_D": block_d, "WHOLE": block_d == dim}


def forward(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    index_scale: float,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, fp32 `[]`; and for `backward` the keys of scores, int32, and their gradients, fp32, `[H_kv,rows,k]`.

    Args: see nsa.indexer_kl_loss; they have been checked, and q_start is int32 `[B]` or None.
    """
    pack, index = token_pack(q, k, cu_seqlens, None, q_start, block_size), lists_of(block_indices)
    if 0 in index.shape or k.numel() == 0:
        nothing = torch.zeros(index.shape, dtype=torch.float32, device=q.device)
        return nothing.sum(), torch.full_like(index, -1), nothing
    heads, lists, slots = index.shape
    chunk, together = chunk_of(lists, heads, slots * (q.shape[-2] // heads) * 4)
    selection = select(index, pack, block_size, chunk)
    mass = masses(rows_of(q), rows_of(k), selection, together, softmax_scale)
    score, key = best_keys(rows_of(q_idx), rows_of(k_idx).expand(-1, heads, -1), selection)
    chosen = key >= 0
    has_blocks = chosen.any(-1, keepdim=True)
    score = (score * index_scale).masked_fill(~chosen, -math.inf).masked_fill(~has_blocks, 0.0)
    log_p = torch.log_softmax(score, -1).masked_fill(~chosen, 0.0)
    loss = (mass * (torch.where(mass > 0, mass, 1.0).log() - log_p)).sum() / has_blocks.sum().clamp(min=1)
    dscore = (log_p.exp() * mass.sum(-1, keepdim=True) - mass).masked_fill(~chosen, 0.0)
    return loss, key, dscore


# Backward


@triton.jit(do_not_specialize=("num_lists", "slots"))
def dq_kernel(
    p_k, k_row, k_head, p_key, p_dscore, p_factor, p_docs, p_tiles, p_dq, dq_row, dq_head, num_lists, slots, dim,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq_idx of one token and head: its blocks' best keys, weighed by the gradients of their scores."""
    o_s, o_d = tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    i_list, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_doc = tl.load(p_tiles + 2 * i_list)
    if i_doc >= 0:
        i_row = tl.load(p_tiles + 2 * i_list + 1)
        p_k_head = p_k + row_field(p_docs, i_doc, K_ROW) * k_row + i_head * k_head
        o_first = (i_head * num_lists + i_list) * slots
        b_dq = tl.zeros([BLOCK_D], dtype=tl.float32)
        for i_slot in range(0, slots, SLOTS):
            o_slot = i_slot + o_s
            b_key = tl.load(p_key + o_first + o_slot, mask=o_slot < slots, other=-1)
            b_ds = tl.load(p_dscore + o_first + o_slot, mask=b_key >= 0, other=0.0)
            mask = (b_key >= 0)[:, None] & (o_d < dim)[None, :]
            b_k = tl.load(p_k_head + b_key.to(tl.int64)[:, None] * k_row + o_d[None, :], mask=mask, other=0.0)
            b_dq += tl.sum(b_k.to(tl.float32) * b_ds[:, None], 0)  # [SLOTS,D] -> [D]
        i_out = row_field(p_docs, i_doc, Q_ROW) + i_row
        b_dq *= tl.load(p_factor)
        tl.store(p_dq + i_out * dq_row + i_head * dq_head + o_d, b_dq.to(p_dq.dtype.element_ty), mask=o_d < dim)


@triton.jit(do_not_specialize=SIZES)
def dk_kernel(
    p_q, q_row, q_head, p_key, p_dscore, p_pairs, p_work, p_docs, p_tiles, p_dk,
    slots, num_lists, size, pair_head, work_head, dim,
    UNITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dk_idx of a work tile without the factor, fp32 `[heads,work tiles,size,D]`.

    A product with a matrix that has, for each pair, the gradient in the row of its key. EXACT: in fp32; else in two
    parts of 16 bits.
    """
    o_u, o_d = tl.arange(0, UNITS), tl.arange(0, BLOCK_D)
    o_own = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_head = tl.program_id(1).to(tl.int64)
    p_head_pairs, p_head_work = p_pairs + i_head * pair_head, p_work + i_head * work_head
    i_doc, i_key, p_own, count = work_tile(p_head_work, p_head_pairs, p_tiles, p_docs, slots, num_lists, size)
    if count > 0:
        list_first, q_first = field(p_docs, i_doc, T_ROW), row_field(p_docs, i_doc, Q_ROW)
        o_head = i_head * num_lists * slots
        b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        for i_pair in range(0, count, UNITS):
            o_pair = pairs_from(p_own, i_pair, count, o_u)
            o_token = (o_pair // slots - list_first).to(tl.int64)
            b_q = load_rows(p_q + q_first * q_row + i_head * q_head + o_token * q_row, o_d, dim, WHOLE)  # [UNITS,D]
            b_key = tl.load(p_key + o_head + o_pair) - i_key
            b_ds = tl.load(p_dscore + o_head + o_pair, mask=i_pair + o_u < count, other=0.0)
            b_ds = tl.where(o_own[:, None] == b_key[None, :], b_ds[None, :], 0.0)  # [N,UNITS]
            if EXACT:
                b_dk += tl.dot(b_ds, b_q, input_precision="ieee")
            else:
                b_high = b_ds.to(b_q.dtype)
                b_low = (b_ds - b_high.to(tl.float32)).to(b_q.dtype)
                b_dk += tl.dot(b_high, b_q) + tl.dot(b_low, b_q)
        o_out = ((i_head * tl.num_programs(0) + tl.program_id(0)) * size + o_own)[:, None] * dim + o_d[None, :]
        tl.store(p_dk + o_out, b_dk, mask=(o_own < size)[:, None] & (o_d < dim)[None, :])


def backward(
    do: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    key: Tensor,
    dscore: Tensor,
    *,
    block_size: int,
    index_scale: float,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """dq_idx and dk_idx. Args: do: gradient of the loss. The rest: arguments and results of `forward`."""
    pack, index = token_pack(q, k, cu_seqlens, None, q_start, block_size), lists_of(block_indices)
    q_rows, k_rows = rows_of(q_idx), rows_of(k_idx)
    (heads, lists, slots), dim = index.shape, q_idx.shape[-1]
    dq, dk = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_idx, k_idx))
    if 0 in (lists, slots, k_rows.shape[0]):
        return dq, dk
    factor = do.float() * index_scale / (key >= 0).any(-1).sum().clamp(min=1)
    saved = {"p_key": key, "p_dscore": dscore}
    arguments = {
        **strided("k", k_rows.expand(-1, heads, -1)), **saved, "p_factor": factor, "p_docs": pack.docs,
        "p_tiles": pack.rows, **strided("dq", rows_of(dq)), "num_lists": lists, "slots": slots, "dim": dim,
    }  # fmt: skip
    constants = {"SLOTS": min(SLOTS, block_of(slots, 1)), "BLOCK_D": block_of(dim)}
    launch(dq_kernel, (lists, heads), arguments, constants, **gpu_options(num_warps=1))

    selection = select(index, pack, block_size, lists)
    chosen, num_work = indexer_tiles(q_idx.dtype, dim, block_size), selection.found.work.shape[2]
    constants = {**constants_of(chosen, dim), "EXACT": q_idx.dtype == torch.float32}
    together = max(1, min(heads, kv_outer.PARTIAL_BYTES // (num_work * block_size * dim * 4)))
    part = torch.empty((together, num_work, block_size, dim), dtype=torch.float32, device=q.device)
    total = torch.zeros((k_rows.shape[0], heads, dim), dtype=torch.float32, device=q.device)
    for head in range(0, heads, together):
        own = slice(head, head + together)
        count = min(together, heads - head)
        arguments = {
            **strided("q", q_rows[:, own]), **{name: x[own] for name, x in saved.items()},
            **selection.arguments(own, 0), "p_dk": part, "dim": dim,
        }  # fmt: skip
        launch(dk_kernel, (num_work, count, -(-block_size // chosen.block_n)), arguments, constants, **chosen.options)
        add_work_tiles(part, selection.found.ends[own, 0], total, head, pack)
    if k_rows.shape[1] == 1:
        total = total.sum(1, keepdim=True)
    return dq, (total * factor).to(k_idx.dtype).view(k_idx.shape)


def kept_like(block_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors like the keys and gradients of `forward`, without running anything (sizes may be symbols)."""
    slots, heads = block_indices.shape[-1], block_indices.shape[-3]
    shape = heads, block_indices[..., 0].numel() // heads, slots
    return block_indices.new_empty(shape, dtype=torch.int32), block_indices.new_empty(shape, dtype=torch.float32)
