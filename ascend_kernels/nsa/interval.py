"""Attention in which each row sees one interval of keys: the compressed branch and the window.

Row t (token index in its document) sees the keys j with t - left <= j, and j * step + first <= t:

    window        first = 0,      step = 1, left = w - 1        (not causal: first = -(w // 2), left = w // 2)
    dense         a window as long as the sequence
    compressed    first = l - 1,  step = d, left unbounded      (not causal: first far below 0)

    s = scale * q k^T    o = softmax(s) v    lse = log(sum(exp(s)))

`forward` keeps a tile of BLOCK_M rows of one head and goes through its keys, BLOCK_N at a time, with an online softmax.
Tiles of keys begin at multiples of BLOCK_N, and keys that a row does not see multiply its sums by 1 and add 0, so the
bits of a row do not depend on its place in a tile. Keys in the middle, which all rows of the tile see, are not masked.

Floor: 4 D FLOP per pair of a row and a key that it sees; q, k, v read and o written once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.attention import add_keys, finish, load_tile
from ascend_kernels.nsa.layout import E_ROW, K_ROW, Q_LEN, Q_ROW, START, Pack, field, row_field, strided, visible_until
from ascend_kernels.nsa.tiling import block_of, interval_tiles

FAR = 1 << 29
"""More than any number of tokens."""

SIZES = ("num_work", "num_rows", "num_heads", "group_size", "first", "step", "left")


@dataclass(frozen=True)
class Interval:
    """Keys that a token sees."""

    first: int
    step: int
    left: int
    entries: bool = False
    """True if keys are compressed entries."""

    @classmethod
    def window(cls, size: int, causal: bool) -> Interval:
        size = min(size, FAR)
        return cls(0, 1, size - 1) if causal or size == 0 else cls(-(size // 2), 1, size // 2)

    @classmethod
    def compressed(cls, length: int, stride: int, causal: bool) -> Interval:
        return cls(length - 1 if causal else -FAR, stride, FAR, entries=True)

    @property
    def arguments(self) -> dict[str, int]:
        return {"first": self.first, "step": self.step, "left": self.left}


@triton.jit
def visible_keys(o_token, first_token, last_token, first, step, left, k_len, BLOCK_N: tl.constexpr):
    """Half-open ranges of keys: those that each token sees, and those that any sees, from a multiple of BLOCK_N on."""
    begin = tl.maximum(first_token - left, 0) // BLOCK_N * BLOCK_N
    end = visible_until(last_token, first, step, k_len)
    return o_token - left, visible_until(o_token, first, step, k_len), begin, end


@triton.jit
def attend(
    b_o, b_max, b_sum, b_q, p_k, k_row, p_v, v_row, o_begin, o_end, first_key, stop_key, end_key,
    log2_scale, o_n, o_d, o_dv, dim, dim_v, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Steps over the keys first_key ... stop_key - 1, of which those below end_key exist."""
    for i_key in range(first_key, stop_key, BLOCK_N):
        o_key = i_key + o_n
        b_k = load_tile(p_k, o_key, k_row, o_d, end_key, dim, WHOLE)  # [N,D]
        b_v = load_tile(p_v, o_key, v_row, o_dv, end_key, dim_v, WHOLE)  # [N,D_v]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [M,N]
        if MASKED:
            seen = (o_key[None, :] >= o_begin[:, None]) & (o_key[None, :] < o_end[:, None])
            b_s = tl.where(seen, b_s, float("-inf"))
        b_o, b_max, b_sum = add_keys(b_o, b_max, b_sum, b_s, b_v, log2_scale)
    return b_o, b_max, b_sum


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_q, q_row, q_head, p_k, k_row, k_head, p_v, v_row, v_head, p_o, p_lse, p_docs, p_tiles,
    log2_scale, num_work, num_rows, num_heads, group_size, first, step, left, dim, dim_v,
    KEY_COLUMN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """KEY_COLUMN: column of the documents' first keys, followed by that of their number."""
    o_m, o_n, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_tile = (num_work - 1 - i_work) // num_heads  # the last tiles have the most keys, so they come first
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
            # Keys that all rows see, in whole tiles
            middle = tl.cdiv(tl.maximum(last_token - left, 0), BLOCK_N) * BLOCK_N
            middle_end = visible_until(start + i_row, first, step, k_len) // BLOCK_N * BLOCK_N
            middle = tl.minimum(middle, end)
            middle_end = tl.maximum(middle_end, middle)

            b_q = load_tile(p_q + q_first * q_row + i_head * q_head, o_row, q_row, o_d, q_len, dim, WHOLE)  # [M,D]
            b_o = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
            b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            b_o, b_max, b_sum = attend(
                b_o, b_max, b_sum, b_q, p_k_head, k_row, p_v_head, v_row, o_begin, o_end, begin, middle, end,
                log2_scale, o_n, o_d, o_dv, dim, dim_v, BLOCK_N, WHOLE, MASKED=True,
            )  # fmt: skip
            b_o, b_max, b_sum = attend(
                b_o, b_max, b_sum, b_q, p_k_head, k_row, p_v_head, v_row, o_begin, o_end, middle, middle_end, end,
                log2_scale, o_n, o_d, o_dv, dim, dim_v, BLOCK_N, WHOLE, MASKED=False,
            )  # fmt: skip
            b_o, b_max, b_sum = attend(
                b_o, b_max, b_sum, b_q, p_k_head, k_row, p_v_head, v_row, o_begin, o_end, middle_end, end, end,
                log2_scale, o_n, o_d, o_dv, dim, dim_v, BLOCK_N, WHOLE, MASKED=True,
            )  # fmt: skip
            b_o, b_lse = finish(b_o, b_max, b_sum, log2_scale)
            in_rows = o_row < q_len
            p_o_rows = p_o + ((q_first + o_row)[:, None] * num_heads + i_head) * dim_v + o_dv[None, :]
            tl.store(p_o_rows, b_o.to(p_o.dtype.element_ty), mask=in_rows[:, None] & (o_dv < dim_v)[None, :])
            tl.store(p_lse + i_head * num_rows + q_first + o_row, b_lse, mask=in_rows)


def forward(q: Tensor, k: Tensor, v: Tensor, pack: Pack, interval: Interval, scale: float) -> tuple[Tensor, Tensor]:
    """o `[rows,H,D_v]` and natural lse fp32 `[H,rows]`; 0 and -inf in rows of no document.

    Args:
        q: `[rows,H,D]`. k, v: `[keys,H_kv,D]`, `[keys,H_kv,D_v]`, or compressed entries.
    """
    rows, heads, dim = q.shape
    dim_v = v.shape[-1]
    chosen = interval_tiles(q.dtype, dim, dim_v, q.device)
    tiles = pack.row_tiles(chosen.block_m)
    o = pack.empty((rows, heads, dim_v), q.dtype, 0.0)
    lse = pack.empty((heads, rows), torch.float32, -math.inf)
    work = tiles.shape[0] * heads
    if work > 0:
        launch(
            forward_kernel,
            (work,),
            {
                **strided("q", q), **strided("k", k), **strided("v", v), "p_o": o, "p_lse": lse,
                "p_docs": pack.docs, "p_tiles": tiles,
                "log2_scale": scale * math.log2(math.e), "num_work": work, "num_rows": rows, "num_heads": heads,
                "group_size": heads // k.shape[1], **interval.arguments, "dim": dim, "dim_v": dim_v,
            },
            {
                "KEY_COLUMN": (E_ROW if interval.entries else K_ROW).value, "BLOCK_M": chosen.block_m,
                "BLOCK_N": chosen.block_n, "BLOCK_D": block_of(dim), "BLOCK_DV": block_of(dim_v),
                "WHOLE": block_of(dim) == dim and block_of(dim_v) == dim_v,
            },
            **chosen.options,
        )  # fmt: skip
    return o, lse
