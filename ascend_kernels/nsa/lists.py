"""Lists by block: which rows selected each block, for kernels that keep a block's keys (kv_outer.py).

A pair is a list of blocks and one of its slots: pair = list * k + slot, in tile mode of the G heads of a key/value head
one after the other. Pairs are sorted by chunk of lists and block, stably, so the pairs of a block are in ascending
order, and sums over them repeat bit for bit. Blocks with many pairs are cut into work tiles of at most PAIRS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.layout import K_LEN, K_ROW, Q_LEN, START, Pack, field
from ascend_kernels.nsa.tiling import block_of, gpu_options

PAIRS = 512
"""Maximum pairs of a work tile."""

LISTS = 16
"""Lists of a program that makes sort keys."""

UNSEEN = 2**31 - 1
"""Sort key of pairs without a block that the row sees."""


@triton.jit
def block_base(p_docs, i_doc, size):
    """First block of a document among those of all documents, each of which may have a ragged last block."""
    return (field(p_docs, i_doc, K_ROW) + i_doc * (size - 1)) // size


@triton.jit
def visible_blocks(p_docs, i_doc, last_token, size, CAUSAL: tl.constexpr):
    """Number of blocks of a document that have a key up to a token, or any key."""
    end = last_token + 1 if CAUSAL else field(p_docs, i_doc, K_LEN)
    return tl.cdiv(end, size)


@triton.jit(do_not_specialize=("num_work", "num_lists", "num_blocks", "chunk", "tile", "size", "slots"))
def keys_kernel(
    p_index, p_keys, p_docs, p_tiles, num_work, num_lists, num_blocks, chunk, tile, size, slots, unseen,
    CAUSAL: tl.constexpr, LISTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sort keys of LISTS lists of blocks per program. num_work: lists of all heads."""
    o_slot = tl.arange(0, SLOTS)
    for i_work in range(tl.program_id(0) * LISTS, num_work, tl.num_programs(0) * LISTS):
        o_work = i_work + tl.arange(0, LISTS)
        exists, o_list = o_work < num_work, o_work % num_lists
        b_doc = tl.load(p_tiles + 2 * o_list, mask=exists, other=-1)
        b_row = tl.load(p_tiles + 2 * o_list + 1, mask=b_doc >= 0, other=0)
        o_doc = tl.maximum(b_doc, 0)
        b_last = field(p_docs, o_doc, START) + tl.minimum(b_row + tile, field(p_docs, o_doc, Q_LEN)) - 1
        b_end = tl.where(b_doc >= 0, visible_blocks(p_docs, o_doc, b_last, size, CAUSAL), 0)
        b_first = o_list // chunk * num_blocks + block_base(p_docs, o_doc, size)  # key of the document's first block
        o_out = o_work.to(tl.int64)[:, None] * slots + o_slot[None, :]  # [LISTS,SLOTS]
        mask = exists[:, None] & (o_slot < slots)[None, :]
        b_block = tl.load(p_index + o_out, mask=mask, other=-1)
        seen = (b_block >= 0) & (b_block < b_end[:, None])
        tl.store(p_keys + o_out, tl.where(seen, b_first[:, None] + b_block, unseen), mask=mask)


@dataclass(frozen=True)
class BlockLists:
    """Pairs by block, for each key/value head.

    Args:
        pairs: int32 `[H_kv,n]`, sorted.
        work: int32 `[H_kv,chunks,W,3]`: block, first of the sorted pairs, and number of pairs of each work tile.
        ends: int32 `[H_kv,chunks,blocks]`: work tiles up to the end of each block.
        chunk: lists per chunk.
    """

    pairs: Tensor
    work: Tensor
    ends: Tensor
    chunk: int


def block_lists(index: Tensor, pack: Pack, kv_heads: int, *, size: int, causal: bool, chunk: int) -> BlockLists:
    """Sort the pairs of all lists.

    Args:
        index: int32 `[S,lists,k]`. size: tokens of a block. chunk: lists per chunk.
    """
    selects, num_lists, slots = index.shape
    num_blocks = (pack.num_keys + pack.num_docs * (size - 1)) // size
    num_chunks = max(1, -(-num_lists // chunk))
    keys = torch.empty_like(index)
    work = selects * num_lists
    launch(
        keys_kernel,
        (-(-work // LISTS),),
        {
            "p_index": index, "p_keys": keys, "p_docs": pack.docs, "p_tiles": pack.row_tiles(pack.tile),
            "num_work": work, "num_lists": num_lists, "num_blocks": num_blocks, "chunk": chunk, "tile": pack.tile,
            "size": size, "slots": slots, "unseen": UNSEEN,
        },
        {"CAUSAL": causal, "LISTS": LISTS, "SLOTS": block_of(slots, 1)},
        **gpu_options(num_warps=4),
    )  # fmt: skip
    by_head = keys.view(kv_heads, -1)
    found, pairs = torch.sort(by_head, dim=1, stable=True)
    blocks = torch.arange(num_chunks * num_blocks + 1, dtype=torch.int32, device=index.device)
    firsts = torch.searchsorted(found, blocks.expand(kv_heads, -1).contiguous(), out_int32=True)
    counts = firsts.diff().view(kv_heads, num_chunks, num_blocks)
    firsts = firsts[:, :-1].view_as(counts)
    tiles = (counts + PAIRS - 1) // PAIRS
    ends = tiles.cumsum(2, dtype=torch.int32)

    # The block of each work tile, and its share of the block's pairs
    most = min(chunk, num_lists) * by_head.shape[1] // num_lists // PAIRS + num_blocks
    tile = torch.arange(most, dtype=torch.int32, device=index.device)
    block = torch.searchsorted(ends, tile.expand(kv_heads, num_chunks, -1).contiguous(), right=True)
    exists = block < num_blocks
    block = block.clamp(max=num_blocks - 1)
    share = tile - (ends - tiles).gather(2, block)
    count = (counts.gather(2, block) - share * PAIRS).clamp(max=PAIRS)
    first = firsts.gather(2, block) + share * PAIRS
    table = torch.stack([block.int(), *(torch.where(exists, x, 0) for x in (first, count))], -1)
    return BlockLists(pairs.int(), table.contiguous(), ends, chunk)
