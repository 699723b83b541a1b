"""Views of tensors by key/value head, with its G query heads adjacent (pack_gqa); bounds of KV blocks."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.pool.documents import KEY, LENGTH, ROW, START, TILE, TOKEN, document_at


def group_heads(mX: cute.Tensor, group: int) -> cute.Tensor:
    """[B, N, H, D] as [B, N, H_kv, G, D]."""
    batches, tokens, heads, dim = mX.layout.shape
    batch_stride, token_stride, head_stride, dim_stride = mX.layout.stride
    layout = cute.make_layout(
        (batches, tokens, heads // group, group, dim),
        stride=(batch_stride, token_stride, head_stride * group, head_stride, dim_stride),
    )
    return cute.make_tensor(mX.iterator, layout)


def group_heads_first(mX: cute.Tensor | None, group: int) -> cute.Tensor | None:
    """[B, N, H, D] as [B, H_kv, N, G, D]; None stays None."""
    if mX is None:
        return None
    grouped = group_heads(mX, group)
    return cute.make_tensor(grouped.iterator, cute.select(grouped.layout, mode=[0, 2, 1, 3, 4]))


def group_lse_heads(mLse: cute.Tensor, group: int) -> cute.Tensor:
    """[B, H, N] as [B, H_kv, N, G]."""
    batches, heads, tokens = mLse.layout.shape
    batch_stride, head_stride, token_stride = mLse.layout.stride
    layout = cute.make_layout(
        (batches, heads // group, tokens, group), stride=(batch_stride, head_stride * group, token_stride, head_stride)
    )
    return cute.make_tensor(mLse.iterator, layout)


@cute.jit
def block_bounds(
    block: Int32, size: cutlass.Constexpr[int], num_keys: Int32, mBounds: cute.Tensor | None
) -> tuple[Int32, Int32]:
    """First key of a KV block, and exclusive end of its sequence.

    Args:
        size: l', tokens per block.
        num_keys: N; not read with mBounds.
        mBounds: PackedBlocks.bounds; the block counts over all documents.
    """
    first, end = block * size, num_keys
    if const_expr(mBounds is not None):
        document = document_at(mBounds[KEY, None], first, 1, 1, 0)
        start = mBounds[TOKEN, document]
        first, end = start + first - mBounds[KEY, document], start + mBounds[LENGTH, document]
    return first, end


class TokenBlock(NamedTuple):
    """Block of l' tokens that holds queries. Tokens and keys are counted from the first of its sequence or document."""

    block: Int32
    first_key: Int32
    """Index of token 0 among the keys passed to the kernel."""
    first_row: Int32
    """Row of token 0 among the queries passed to the kernel; negative if these begin later."""
    start: Int32
    """First token of the sequence that is one of these queries."""
    end: Int32
    """Exclusive end of these queries."""


def most_token_blocks(num_rows: Int32, size: int, first_token: Int32, mBounds: cute.Tensor | None) -> Int32:
    """Number of blocks of `size` tokens that hold queries; an upper bound for documents."""
    if const_expr(mBounds is not None):
        return (num_rows + (mBounds.shape[1] - 1) * 2 * (size - 1)) // size
    return cute.ceil_div(first_token % size + num_rows, size)


@cute.jit
def token_block(
    index: Int32, size: cutlass.Constexpr[int], num_rows: Int32, first_token: Int32, mBounds: cute.Tensor | None
) -> TokenBlock:
    """The index-th block that holds queries, counted along the sequence or over consecutive documents.

    Args:
        size: l'.
        num_rows: number of queries.
        first_token: token index of the first query; with mBounds its row in the pack.
        mBounds: PackedBlocks.bounds.
    """
    block, first_key, first_row = index + first_token // size, Int32(0), -first_token
    start, end = first_token, first_token + num_rows
    if const_expr(mBounds is not None):
        place = index + _blocks_before(first_token, size, mBounds)
        document = document_at(mBounds[TILE, None], place, 1, 1, 0)
        block = place - mBounds[TILE, document] + mBounds[START, document] // size
        first_key, first_row = mBounds[TOKEN, document], mBounds[ROW, document] - first_token
        start = cutlass.max(mBounds[START, document], -first_row)
        end = cutlass.min(mBounds[LENGTH, document], num_rows - first_row)
    return TokenBlock(block, first_key, first_row, start, end)


@cute.jit
def _blocks_before(row: Int32, size: cutlass.Constexpr[int], mBounds: cute.Tensor) -> Int32:
    """Number of blocks of documents that hold only queries of earlier rows."""
    document, later = Int32(0), Int32(mBounds.shape[1] - 1)
    while later - document > 1:
        middle = (document + later) // 2
        if mBounds[ROW, middle] + mBounds[START, middle] <= row:
            document = middle
        else:
            later = middle
    before = (row - mBounds[ROW, document]) // size - mBounds[START, document] // size
    return cutlass.min(mBounds[TILE, document] + cutlass.max(before, 0), mBounds[TILE, document + 1])
