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
    CAUSAL: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sort keys of one list of blocks per program."""
    o_slot = tl.arange(0, SLOTS)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_list = i_work % num_lists
        i_doc = tl.load(p_tiles + 2 * i_list)
        p_list = tl.cast(i_work, tl.int64) * slots + o_slot
        b_key = tl.zeros([SLOTS], dtype=tl.int32) + unseen
        if i_doc >= 0:
            i_row = tl.load(p_tiles + 2 * i_list + 1)
            last = field(p_docs, i_doc, START) + tl.minimum(i_row + tile, field(p_docs, i_doc, Q_LEN)) - 1
            b_block = tl.load(p_index + p_list, mask=o_slot < slots, other=-1)
            seen = (b_block >= 0) & (b_block < visible_blocks(p_docs, i_doc, last, size, CAUSAL))
            first_key = i_list // chunk * num_blocks + block_base(p_docs, i_doc, size)
            b_key = tl.where(seen, first_key + b_block, b_key)
        tl.store(p_keys + p_list, b_key, mask=o_slot < slots)


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
        (work,),
        {
            "p_index": index, "p_keys": keys, "p_docs": pack.docs, "p_tiles": pack.row_tiles(pack.tile),
            "num_work": work, "num_lists": num_lists, "num_blocks": num_blocks, "chunk": chunk, "tile": pack.tile,
            "size": size, "slots": slots, "unseen": UNSEEN,
        },
        {"CAUSAL": causal, "SLOTS": block_of(slots, 1)},
        **gpu_options(num_warps=1),
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
