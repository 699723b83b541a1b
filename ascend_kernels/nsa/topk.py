"""Selection: the k best blocks of each row, by scores of compressed entries or of blocks (docs/semantics.md 3 and 4).

A row's blocks are scored BLOCK at a time from the chunk's scores (scores.py): the entries that overlap a block, in
their order, weighted by tokens of overlap. Those that beat the k-th best block so far are taken one after the other,
the lower of equal ones first, at most k, and merged into the list of the best. Forced blocks score +inf. Lists are
written in ascending order, padded with -1. Reductions and comparisons only: no sort, gather, atomics.

Floor: scores are read once; k maxima over the blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa.layout import E_LEN, K_LEN, Q_LEN, START, T_ROW, Pack, field, visible_until
from ascend_kernels.nsa.scores import Scores
from ascend_kernels.nsa.tiling import block_of, gpu_options

WORKSPACE_BYTES = 256 << 20
"""Scores of a chunk of rows."""

BLOCK = 256
"""Blocks of a row that are compared at a time."""

NONE = tl.constexpr(1 << 30)
"""Sorts after every block."""

SIZES = (
    "first_tile", "num_work", "num_heads", "num_tiles", "tile", "first", "length", "stride", "size", "width",
    "num_init", "num_local", "count", "score_row", "score_head",
)  # fmt: skip


@triton.jit
def best_of(b_score, o_block, o_slot, count, least, SLOTS: tl.constexpr):
    """At most `count` of the scores above `least`, descending, and their blocks; -inf and -1 after the last."""
    b_top = tl.full([SLOTS], float("-inf"), dtype=tl.float32)
    b_block = tl.full([SLOTS], -1, dtype=tl.int32)
    for i in range(0, tl.minimum(count, tl.sum((b_score > least).to(tl.int32), 0))):
        top = tl.max(b_score, 0)
        at = tl.min(tl.where(b_score == top, o_block, NONE), 0)
        b_top = tl.where(o_slot == i, top, b_top)
        b_block = tl.where(o_slot == i, at, b_block)
        b_score = tl.where(o_block == at, float("-inf"), b_score)
    return b_top, b_block


@triton.jit
def merged(b_top, b_block, b_more, b_more_block, o_slot):
    """The best of two descending lists; of equal scores those of the first, whose blocks are lower."""
    o_rank = o_slot + tl.sum((b_more[None, :] > b_top[:, None]).to(tl.int32), 1)
    o_more_rank = o_slot + tl.sum((b_top[None, :] >= b_more[:, None]).to(tl.int32), 1)
    is_at = o_rank[:, None] == o_slot[None, :]  # [SLOTS of a list, SLOTS of the result]
    more_is_at = o_more_rank[:, None] == o_slot[None, :]
    b_merged = tl.sum(tl.where(is_at, b_top[:, None], 0.0) + tl.where(more_is_at, b_more[:, None], 0.0), 0)
    b_blocks = tl.sum(tl.where(is_at, b_block[:, None], 0) + tl.where(more_is_at, b_more_block[:, None], 0), 0)
    return b_merged, b_blocks


@triton.jit
def ascending(b_block, o_slot):
    """Blocks in ascending order, -1 last."""
    b_key = tl.where(b_block < 0, NONE + o_slot, b_block)
    o_rank = tl.sum((b_key[None, :] < b_key[:, None]).to(tl.int32), 1)
    return tl.sum(tl.where(o_rank[:, None] == o_slot[None, :], b_block[:, None], 0), 0)


@triton.jit(do_not_specialize=SIZES)
def topk_kernel(
    p_scores, score_row, score_head, p_index, p_docs, p_tiles,
    first_tile, num_work, num_heads, num_tiles, tile, first, length, stride, size, width, num_init, num_local, count,
    TOKENS: tl.constexpr, MEAN: tl.constexpr, CAUSAL: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One selecting row of one head per program.

    Entry j covers the tokens j * stride ... j * stride + length - 1, and is scored if token j * stride + first <= e
    exists, with e the row's last token. MEAN: divide by the overlap with scored entries. ENTRIES: scores are those of
    compressed entries, else of blocks (length = stride = size).
    """
    o_slot = tl.arange(0, SLOTS)
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_own, i_head = i_work // num_heads, (i_work % num_heads).to(tl.int64)
        p_tile = p_tiles + 2 * (first_tile + i_own // TOKENS)
        i_doc = tl.load(p_tile)
        if i_doc >= 0:
            i_row = tl.load(p_tile + 1) + i_own % TOKENS * tile
            q_len, k_len = field(p_docs, i_doc, Q_LEN), field(p_docs, i_doc, K_LEN)
            if i_row < q_len:
                start = field(p_docs, i_doc, START)
                last = start + tl.minimum(i_row + tile, q_len) - 1  # e
                if ENTRIES:
                    scored = visible_until(last, first, stride, field(p_docs, i_doc, E_LEN))
                else:
                    scored = visible_until(last, first, stride, tl.cdiv(k_len, size))
                own = last // size
                local = own + 1 - num_local
                num_blocks = own + 1
                if not CAUSAL:
                    local = ((start + i_row) // size + own + 1 - num_local) >> 1
                    num_blocks = tl.cdiv(k_len, size)
                p_row = p_scores + i_head * score_head + i_own.to(tl.int64) * score_row
                b_top = tl.full([SLOTS], float("-inf"), dtype=tl.float32)
                b_block = tl.full([SLOTS], -1, dtype=tl.int32)
                for i_block in range(0, num_blocks, BLOCK):
                    o_block = i_block + tl.arange(0, BLOCK)
                    o_first = (o_block * size - length) // stride + 1  # first entry that overlaps the block
                    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
                    b_weight = tl.zeros([BLOCK], dtype=tl.float32)
                    for i in range(0, width):
                        begin = (i + 1) * stride - length  # of the entry, counted from the block's first token
                        if ENTRIES:
                            overlap = (tl.minimum(begin + length, size) - tl.maximum(begin, 0)).to(tl.float32)
                        else:
                            overlap = 1.0
                        o_entry = o_first + i
                        is_scored = (o_entry >= 0) & (o_entry < scored)
                        b_sum += tl.load(p_row + o_entry, mask=is_scored, other=0.0) * overlap
                        b_weight += tl.where(is_scored, overlap, 0.0)
                    b_score = b_sum / tl.where(b_weight > 0.0, b_weight, 1.0) if MEAN else b_sum
                    b_score = tl.where((b_weight > 0.0) & (b_score == b_score), b_score, float("-inf"))
                    forced = (o_block < num_init) | ((o_block >= local) & (o_block < local + num_local))
                    b_score = tl.where(forced, float("inf"), b_score)
                    b_score = tl.where(o_block < num_blocks, b_score, float("-inf"))
                    least = tl.min(tl.where(o_slot < count, b_top, float("inf")), 0)  # of the best so far
                    b_more, b_more_block = best_of(b_score, o_block, o_slot, count, least, SLOTS)
                    b_top, b_block = merged(b_top, b_block, b_more, b_more_block, o_slot)
                b_block = ascending(tl.where(o_slot < count, b_block, -1), o_slot)
                i_out = i_head * num_tiles + field(p_docs, i_doc, T_ROW) + i_row // tile
                tl.store(p_index + i_out * count + o_slot, b_block, mask=o_slot < count)


def top_blocks(
    scores: Scores, pack: Pack, *, size: int, count: int, num_init: int, num_local: int, causal: bool, mean: bool,
    length: int = 0, stride: int = 0,
) -> Tensor:  # fmt: skip
    """Selected blocks, int32 `[S,tiles,k]`, ascending, padded with -1.

    Args:
        size: tokens of a block. count: k.
        length, stride: l and d, if scores are those of compressed entries.
        mean: divide by the overlap with scored entries, as tile mode does.
    """
    entries = length > 0
    if entries:
        first = length - 1 if causal else -(1 << 29)
    else:
        first, length, stride = 0, size, size
    index = pack.empty((scores.heads, pack.num_tiles, count), torch.int32, -1)
    tiles = scores.tiles.shape[0]
    if index.numel() == 0 or tiles == 0:
        return index
    columns = max(pack.most_entries if entries else -(-pack.most_keys // size), 1)
    per_tile = scores.heads * scores.rows * columns * 4
    step = min(tiles, max(1, WORKSPACE_BYTES // per_tile))
    workspace = torch.empty((scores.heads, step * scores.rows, columns), dtype=torch.float32, device=index.device)
    for first_tile in range(0, tiles, step):
        chunk = workspace[:, : (min(first_tile + step, tiles) - first_tile) * scores.rows]
        scores.write(chunk, first_tile)
        work = chunk.shape[1] * scores.heads
        launch(
            topk_kernel,
            (work,),
            {
                "p_scores": chunk, "score_row": chunk.stride(1), "score_head": chunk.stride(0), "p_index": index,
                "p_docs": pack.docs, "p_tiles": scores.tiles, "first_tile": first_tile, "num_work": work,
                "num_heads": scores.heads, "num_tiles": pack.num_tiles, "tile": pack.tile, "first": first,
                "length": length, "stride": stride, "size": size, "width": size // stride + length // stride - 1,
                "num_init": num_init, "num_local": num_local, "count": count,
            },
            {
                "TOKENS": scores.rows, "MEAN": mean, "CAUSAL": causal, "ENTRIES": entries, "BLOCK": BLOCK,
                "SLOTS": block_of(count, 1),
            },
            **gpu_options(num_warps=1),
        )  # fmt: skip
    return index
