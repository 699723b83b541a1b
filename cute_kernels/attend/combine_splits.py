"""dK and dV of a KV block that was split into work tiles: their fp32 partials are added up in order, by as many CTAs.

What selected_backward.py and kv_outer_backward.py share. The CTA of split i of n adds up the i-th of n chunks of the
block's numbers, so that all have about the same work. The order is that of the splits: bitwise the same each time.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from cute_kernels.runtime.jit import FLOATS

THREADS = 256

BATCH = 4
"""Partials that a thread loads together."""


def chunk_start(index: Int32, splits: Int32, vectors: int) -> Int32:
    """The first of a block's vectors that split `index` adds up."""
    return index * vectors // splits


@cute.jit
def add_partials(
    rSum: cute.Tensor,  # fp32 [FLOATS]
    partial_row: Callable[[Int32, int], cute.Tensor],
    column: Int32,  # of the vector in its row
    splits: Int32,
):
    """Add a vector of each split of a block to rSum.

    Args: partial_row: (start, i) -> the row, fp32 [columns], in the partial of split start + i of the block.
    """
    rPartial = cute.make_rmem_tensor((FLOATS, BATCH), Float32)
    for start in cutlass.range(0, splits, BATCH, unroll=1):
        for i in range_constexpr(BATCH):
            rPartial[None, i].fill(0.0)
            if start + i < splits:
                gPartial = cute.local_tile(partial_row(start, i), (FLOATS,), (column,))
                cute.autovec_copy(gPartial, rPartial[None, i])
        for i in range_constexpr(BATCH):
            rSum.store(rSum.load() + rPartial[None, i].load())
