"""Scores by which blocks are selected, for a chunk of rows at a time, in fp32.

    token_scores    p summed over the heads of a group: what each token's attention gives to each compressed entry
    tile_scores     logits of the mean query of each selection tile with each compressed entry
    block_scores    best logit of each block's keys, for an indexer

A chunk's scores `[heads,rows,entries]` are read by topk.py at once and then overwritten by the next chunk's, so that
they stay in the L2 cache and memory is bounded. The log-sum-exp of the compressed branch comes from its forward.

Floor: 2 D FLOP and one exponential per pair of a row and an entry that it sees; 4 bytes written per pair and group.
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
from ascend_kernels.nsa.attention import LOG2_E, load_tile
from ascend_kernels.nsa.layout import (
    E_LEN,
    E_ROW,
    K_ROW,
    Q_LEN,
    Q_ROW,
    START,
    T_ROW,
    Pack,
    field,
    row_field,
    strided,
    visible_until,
)
from ascend_kernels.nsa.tiling import Tiles, block_of, score_tiles, token_score_tiles

SIZES = (
    "first_tile", "num_work", "num_rows", "num_heads", "group_size", "first", "step", "tile", "score_row", "score_head",
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def token_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_lse, p_scores, score_row, score_head, p_docs, p_tiles,
    log2_scale, first_tile, num_work, num_rows, num_heads, group_size, first, step, dim,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of one key/value head per program, with the GROUP query heads of each next to each other.

    Scores are transposed, so that the sum over a group is one over neighboring columns, mostly within a thread.
    """
    o_r, o_t, o_n, o_d = (
        tl.arange(0, TOKENS * GROUP), tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    )  # fmt: skip
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_own, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * (first_tile + i_own))
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * (first_tile + i_own) + 1)
            q_first, q_len = row_field(p_docs, i_doc, Q_ROW), field(p_docs, i_doc, Q_LEN)
            k_first, k_len = row_field(p_docs, i_doc, E_ROW), field(p_docs, i_doc, E_LEN)
            start = field(p_docs, i_doc, START)
            o_row, o_head = i_row + o_r // GROUP, o_r % GROUP
            exists = (o_head < group_size) & (o_row < q_len)
            o_head = i_head * group_size + o_head
            p_q_rows = p_q + (q_first + o_row) * q_row + o_head * q_head
            if WHOLE:
                in_q = exists[:, None]
            else:
                in_q = exists[:, None] & (o_d < dim)[None, :]
            b_q = tl.load(p_q_rows[:, None] + o_d[None, :], mask=in_q, other=0.0)  # [TOKENS GROUP,D]
            b_lse = tl.load(p_lse + o_head * num_rows + q_first + o_row, mask=exists, other=float("inf")) * LOG2_E
            b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)  # rows that see no entry
            o_end = visible_until(start + i_row + o_t, first, step, k_len)
            end = visible_until(start + tl.minimum(i_row + TOKENS, q_len) - 1, first, step, k_len)
            p_out = p_scores + i_head * score_head + (i_own * TOKENS + o_t).to(tl.int64)[None, :] * score_row
            for i_key in range(0, end, BLOCK_N):
                o_key = i_key + o_n
                b_k = load_tile(p_k + k_first * k_row + i_head * k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # [N,TOKENS GROUP]
                b_p = tl.exp2(b_s * log2_scale - b_lse[None, :])
                b_p = tl.sum(tl.reshape(b_p, [BLOCK_N, TOKENS, GROUP]), 2)  # [N,TOKENS]
                tl.store(p_out + o_key[:, None], b_p, mask=o_key[:, None] < o_end[None, :])


@triton.jit(do_not_specialize=SIZES)
def tile_kernel(
    p_q, p_k, k_row, k_head, p_scores, score_row, score_head, p_docs, p_tiles,
    first_tile, num_work, num_heads, group_size, first, step, tile, dim,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """TOKENS mean queries of one selecting head per program. p_q: fp32 `[tiles,S,D]`; group_size: S / H_kv."""
    o_t, o_n, o_d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_own, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * (first_tile + i_own))
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * (first_tile + i_own) + 1)
            k_first, k_len = row_field(p_docs, i_doc, E_ROW), field(p_docs, i_doc, E_LEN)
            q_len, start = field(p_docs, i_doc, Q_LEN), field(p_docs, i_doc, START)
            o_tile = i_row // tile + o_t
            o_end = visible_until(start + tl.minimum((o_tile + 1) * tile, q_len) - 1, first, step, k_len)
            end = visible_until(start + tl.minimum(i_row + TOKENS * tile, q_len) - 1, first, step, k_len)
            p_rows = p_q + (row_field(p_docs, i_doc, T_ROW) * num_heads + i_head) * dim
            b_q = load_tile(p_rows, o_tile, num_heads * dim, o_d, tl.cdiv(q_len, tile), dim, WHOLE)  # [TOKENS,D]
            p_out = p_scores + i_head * score_head + (i_own * TOKENS + o_t).to(tl.int64)[:, None] * score_row
            p_k_head = p_k + k_first * k_row + (i_head // group_size) * k_head
            for i_key in range(0, end, BLOCK_N):
                o_key = i_key + o_n
                b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE).to(tl.float32)  # [N,D]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [TOKENS,N]
                tl.store(p_out + o_key[None, :], b_s, mask=o_key[None, :] < o_end[:, None])


@triton.jit(do_not_specialize=(*SIZES, "size"))
def block_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_scores, score_row, score_head, p_docs, p_tiles,
    first_tile, num_work, num_heads, group_size, size, dim,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of one indexer head per program; a step reads the keys of one block, at most BLOCK_N."""
    o_t, o_n, o_d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_own, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * (first_tile + i_own))
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * (first_tile + i_own) + 1)
            q_first, q_len = row_field(p_docs, i_doc, Q_ROW), field(p_docs, i_doc, Q_LEN)
            k_first, start = row_field(p_docs, i_doc, K_ROW), field(p_docs, i_doc, START)
            o_row = i_row + o_t
            b_q = load_tile(p_q + q_first * q_row + i_head * q_head, o_row, q_row, o_d, q_len, dim, WHOLE)  # [TOKENS,D]
            end = start + tl.minimum(i_row + TOKENS, q_len)
            p_out = p_scores + i_head * score_head + (i_own * TOKENS + o_t).to(tl.int64) * score_row
            p_k_head = p_k + k_first * k_row + (i_head // group_size) * k_head
            for i_block in range(0, tl.cdiv(end, size)):
                b_best = tl.full([TOKENS], float("-inf"), dtype=tl.float32)
                for i_key in range(0, size, BLOCK_N):
                    o_key = i_block * size + i_key + o_n
                    b_k = load_tile(p_k_head, o_key, k_row, o_d, end, dim, WHOLE)  # [N,D]
                    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [TOKENS,N]
                    seen = (o_key[None, :] <= (start + o_row)[:, None]) & (i_key + o_n < size)[None, :]
                    b_best = tl.maximum(b_best, tl.max(tl.where(seen & (b_s == b_s), b_s, float("-inf")), 1))
                tl.store(p_out + i_block, b_best, mask=i_block * size <= start + o_row)


@dataclass(frozen=True)
class Scores:
    """A kernel that scores the rows of work tiles, with all arguments but the chunk.

    Args:
        heads: heads that select.
        rows: selecting rows per work tile.
        tiles: work tiles, from Pack.row_tiles.
    """

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    chosen: Tiles
    heads: int
    tiles: Tensor

    @property
    def rows(self) -> int:
        return self.chosen.block_m

    def write(self, scores: Tensor, first_tile: int) -> None:
        """Scores of the work tiles from `first_tile` on into `scores` `[heads,rows,entries]`."""
        work = scores.shape[1] // self.rows * self.heads
        chunk = {
            "p_scores": scores, "score_row": scores.stride(1), "score_head": scores.stride(0), "p_tiles": self.tiles,
            "first_tile": first_tile, "num_work": work, "num_heads": self.heads,
        }  # fmt: skip
        launch(self.kernel, (work,), {**self.arguments, **chunk}, self.constants, **self.chosen.options)


def _constants(chosen: Tiles, dim: int) -> dict[str, Any]:
    block_d = block_of(dim)
    return {"TOKENS": chosen.block_m, "BLOCK_N": chosen.block_n, "BLOCK_D": block_d, "WHOLE": block_d == dim}


def token_scores(
    q: Tensor, k_cmp: Tensor, lse: Tensor, pack: Pack, *, length: int, stride: int, scale: float
) -> Scores:
    """Scores of query tokens. Args: lse: of the compressed branch, `[H,rows]`."""
    heads, dim = k_cmp.shape[1:]
    group = q.shape[1] // heads
    chosen = token_score_tiles(q.dtype, dim, group, q.device)
    arguments = {
        **strided("q", q), **strided("k", k_cmp), "p_lse": lse, "p_docs": pack.docs,
        "log2_scale": scale * math.log2(math.e), "num_rows": q.shape[0], "group_size": group,
        "first": length - 1, "step": stride, "dim": dim,
    }  # fmt: skip
    constants = {**_constants(chosen, dim), "GROUP": block_of(group, 1)}
    return Scores(token_kernel, arguments, constants, chosen, heads, pack.row_tiles(chosen.block_m))


def tile_scores(means: Tensor, k_cmp: Tensor, pack: Pack, *, first: int, stride: int) -> Scores:
    """Scores of selection tiles.

    Args:
        means: mean queries fp32 `[tiles,S,D]`.
        first: token that sees the first entry.
    """
    heads, dim = means.shape[1:]
    chosen = score_tiles(torch.float32, dim)
    arguments = {
        "p_q": means, **strided("k", k_cmp), "p_docs": pack.docs, "group_size": heads // k_cmp.shape[1],
        "first": first, "step": stride, "tile": pack.tile, "dim": dim,
    }  # fmt: skip
    return Scores(tile_kernel, arguments, _constants(chosen, dim), chosen, heads, pack.row_tiles(16 * pack.tile))


def block_scores(q_idx: Tensor, k_idx: Tensor, pack: Pack, size: int) -> Scores:
    """Scores of an indexer's tokens. Args: q_idx: `[rows,H_i,D_i]`. k_idx: `[keys,1 or H_i,D_i]`."""
    heads, dim = q_idx.shape[1:]
    chosen = score_tiles(q_idx.dtype, dim)
    arguments = {
        **strided("q", q_idx), **strided("k", k_idx), "p_docs": pack.docs, "group_size": heads // k_idx.shape[1],
        "size": size, "dim": dim,
    }  # fmt: skip
    return Scores(block_kernel, arguments, _constants(chosen, dim), chosen, heads, pack.row_tiles(chosen.block_m))
