"""Sum the fp32 partials of dK and dV of a KV block that was split into work tiles, in order, by one CTA per split.

Shared by selected_backward.py and kv_outer_backward.py. The CTA of split i of n sums the i-th of n chunks of the
block's elements, which balances the work. Splits are added in a fixed order: bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from cute_kernels.runtime.jit import FLOATS

THREADS = 256

BATCH = 4
"""Number of partials that a thread loads together."""


def chunk_start(index: Int32, splits: Int32, vectors: int) -> Int32:
    """Index of the first vector of a block that split `index` sums."""
    return index * vectors // splits


@cute.jit
def add_partials(
    rSum: cute.Tensor,  # fp32 [FLOATS]
    partial_row: Callable[[Int32, int], cute.Tensor],
    column: Int32,  # index of the vector in its row
    splits: Int32,
):
    """Add one vector of each split of a block to rSum.

    Args: partial_row: maps (start, i) to the row, fp32 [columns], in the partial of split start + i of the block.
    """
    rPartial = cute.make_rmem_tensor((FLOATS, BATCH), Float32)
    for start in cutlass.range(0, splits, BATCH, unroll=1):
        for i in range_constexpr(BATCH):
            rPartial[None, i].fill(0.0)
            if start + i < splits:
                gPartial = cute.local_tile(partial_row(start, i), (FLOATS,), (column,))  # fp32 [FLOATS]
                cute.autovec_copy(gPartial, rPartial[None, i])
        for i in range_constexpr(BATCH):
            rSum.store(rSum.load() + rPartial[None, i].load())
