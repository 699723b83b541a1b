"""Means of blocks of tokens: compressed keys and values, and the mean query of each selection tile.

    entry j of a document = mean of its tokens j d ... j d + l - 1
    mean of tile t        = mean of its queries t T ... (t + 1) T - 1, of a last tile those that exist

Sums are fp32, in the order of the tokens, rounded once. A program pools one block of one head, `[TOKENS,D]` at a time.
Floor: every token is read once, every mean written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.layout import E_LEN, E_ROW, K_LEN, K_ROW, Q_LEN, Q_ROW, T_ROW, Pack, field, row_field, rows_of
from ascend_kernels.nsa.tiling import block_of, gpu_options

TOKENS = 16
"""Tokens that a program adds at a time."""


@triton.jit(do_not_specialize=("num_work", "num_heads", "length", "stride"))
def mean_kernel(
    p_x, x_row, x_head, p_mean, p_docs, p_tiles, num_work, num_heads, length, stride, dim,
    TILES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """TILES: pool query tiles instead of entries; then a block may be ragged, and its mean has the rows that exist."""
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_block, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * i_block)
        if i_doc >= 0:
            i_own = tl.load(p_tiles + 2 * i_block + 1)  # block within its document, of tiles its first row
            if TILES:
                first = row_field(p_docs, i_doc, Q_ROW) + i_own
                count = tl.minimum(field(p_docs, i_doc, Q_LEN) - i_own, length)
                i_out = row_field(p_docs, i_doc, T_ROW) + i_own // stride
            else:
                first = row_field(p_docs, i_doc, K_ROW) + i_own * stride
                count = length
                i_out = row_field(p_docs, i_doc, E_ROW) + i_own
            p_first = p_x + first * x_row + i_head * x_head
            b_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
            for i_t in range(0, count, BLOCK):
                o_token = i_t + o_t
                mask = (o_token < count)[:, None] & (o_d < dim)[None, :]
                b_x = tl.load(p_first + o_token.to(tl.int64)[:, None] * x_row + o_d[None, :], mask=mask, other=0.0)
                b_sum += tl.sum(b_x.to(tl.float32), 0)  # [TOKENS,D]
            b_mean = (b_sum / count).to(p_mean.dtype.element_ty)
            tl.store(p_mean + (i_out * num_heads + i_head) * dim + o_d, b_mean, mask=o_d < dim)


def means(x: Tensor, pack: Pack, tiles: Tensor, out: Tensor, *, length: int, stride: int, of_tiles: bool) -> Tensor:
    """Means of blocks of rows `[rows,heads,D]` into `out` `[blocks,heads,D]`, which keeps what has no block."""
    heads, dim = x.shape[1:]
    work = tiles.shape[0] * heads
    if work > 0:
        launch(
            mean_kernel,
            (work,),
            {
                "p_x": x, "x_row": x.stride(0), "x_head": x.stride(1), "p_mean": out, "p_docs": pack.docs,
                "p_tiles": tiles, "num_work": work, "num_heads": heads, "length": length, "stride": stride, "dim": dim,
            },
            {"TILES": of_tiles, "BLOCK": TOKENS, "BLOCK_D": block_of(dim)},
            **gpu_options(num_warps=1),
        )  # fmt: skip
    return out


def pooled(x: Tensor, config: Any, pack: Pack, dtype: torch.dtype) -> Tensor:
    """Means of the blocks of keys or values `[keys,H_kv,D]`: `[entries,H_kv,D]`, 0 where a document has no entry."""
    out = torch.zeros((pack.num_entries, *x.shape[1:]), dtype=dtype, device=x.device)
    length, stride = config.compress_block_size, config.stride
    return means(x, pack, pack.entry_tiles(1), out, length=length, stride=stride, of_tiles=False)


def compressed(inputs: Any, config: Any, pack: Pack) -> tuple[Tensor, Tensor]:
    """k_cmp and v_cmp `[entries,H_kv,D]` in the inputs' dtype: given, or pooled and projected."""
    if inputs.k_cmp is not None:
        return rows_of(inputs.k_cmp), rows_of(inputs.v_cmp)
    found = []
    for x, weight in ((inputs.k, inputs.w_k_compress), (inputs.v, inputs.w_v_compress)):
        if weight is None:
            found.append(pooled(rows_of(x), config, pack, x.dtype))
        else:  # rounded once, after the projection
            exact = pooled(rows_of(x), config, pack, torch.float32)
            found.append(torch.einsum("nhd,hde->nhe", exact, weight.float()).to(x.dtype))
    return found[0], found[1]


def tile_means(q: Tensor, pack: Pack) -> Tensor:
    """Mean query of each selection tile, fp32 `[tiles,H,D]`. Args: q: `[rows,H,D]`."""
    out = torch.zeros((pack.num_tiles, *q.shape[1:]), dtype=torch.float32, device=q.device)
    tiles = pack.row_tiles(pack.tile)
    return means(q, pack, tiles, out, length=pack.tile, stride=pack.tile, of_tiles=True)


@triton.jit(do_not_specialize=("num_work", "num_heads", "length", "stride"))
def unpool_kernel(
    p_mean, p_x, p_docs, p_tiles, num_work, num_heads, length, stride, dim,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to BLOCK keys of a head what the gradients of the entries that cover them give: their sum / l."""
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_tile, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        i_doc = tl.load(p_tiles + 2 * i_tile)
        if i_doc >= 0:
            o_key = tl.load(p_tiles + 2 * i_tile + 1) + o_t
            k_len, e_len = field(p_docs, i_doc, K_LEN), field(p_docs, i_doc, E_LEN)
            o_first = tl.where(o_key >= length, (o_key - length) // stride + 1, 0)
            p_entries = p_mean + (row_field(p_docs, i_doc, E_ROW) * num_heads + i_head) * dim
            b_sum = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
            for i in range(0, tl.cdiv(length, stride)):
                o_entry = o_first + i
                covers = (o_entry * stride <= o_key) & (o_entry < e_len)
                mask = covers[:, None] & (o_d < dim)[None, :]
                o_row = o_entry.to(tl.int64)[:, None] * num_heads * dim
                b_sum += tl.load(p_entries + o_row + o_d[None, :], mask=mask, other=0.0)  # [BLOCK,D]
            p_keys = (
                p_x + ((row_field(p_docs, i_doc, K_ROW) + o_key)[:, None] * num_heads + i_head) * dim + o_d[None, :]
            )
            mask = (o_key < k_len)[:, None] & (o_d < dim)[None, :]
            tl.store(p_keys, tl.load(p_keys, mask=mask, other=0.0) + b_sum / length, mask=mask)


def add_unpooled(entries: Tensor, total: Tensor, pack: Pack, *, length: int, stride: int) -> None:
    """Add the gradients of pooled keys. Args: entries: fp32 `[entries,H_kv,D]`. total: fp32 `[keys,H_kv,D]`."""
    heads, dim = total.shape[1:]
    tiles = pack.key_tiles(TOKENS)
    work = tiles.shape[0] * heads
    if work > 0:
        launch(
            unpool_kernel,
            (work,),
            {
                "p_mean": entries, "p_x": total, "p_docs": pack.docs, "p_tiles": tiles, "num_work": work,
                "num_heads": heads, "length": length, "stride": stride, "dim": dim,
            },
            {"BLOCK": TOKENS, "BLOCK_D": block_of(dim)},
            **gpu_options(num_warps=4),
        )  # fmt: skip
