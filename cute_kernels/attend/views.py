"""Views of tensors by key/value head, its G query heads beside each other (pack_gqa); bounds of KV blocks."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.pool.documents import KEY, LENGTH, TOKEN, document_at


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
    """First key of a KV block, and the end of its sequence.

    Args:
        size: l', tokens of a block. num_keys: N; not read with mBounds.
        mBounds: PackedBlocks.bounds; the block counts over all documents.
    """
    first, end = block * size, num_keys
    if const_expr(mBounds is not None):
        document = document_at(mBounds[KEY, None], first, 1, 1, 0)
        start = mBounds[TOKEN, document]
        first, end = start + first - mBounds[KEY, document], start + mBounds[LENGTH, document]
    return first, end
