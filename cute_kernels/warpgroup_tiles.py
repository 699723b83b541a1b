"""Tiles in shared memory, and products of them by warpgroups (WGMMA), on Hopper.

A warpgroup multiplies UNIT rows; each of its warps has 16 of them, whose numbers lie in its lanes as those of
warp_tiles.py do.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

UNIT = 64
"""Rows of one tile of a left operand: what a warpgroup multiplies at once."""

GROUP = 128
"""Threads of a warpgroup."""

ALIGNMENT = 1024
"""Of tiles in shared memory, in bytes."""


def tiles(dtype: Any, rows: int, dim: int, count: int) -> Any:
    """Layout of `count` tiles of rows x dim in 16 bits, as TMA writes and WGMMA reads them (also transposed)."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, dim, count), (0, 1, 2))


def transposed(several: cute.Tensor) -> cute.Tensor:
    """Tiles of rows x columns as columns x rows."""
    rows, columns, count = (cute.size(several, mode=[i]) for i in range(3))
    return cute.composition(several, cute.make_ordered_layout((columns, rows, count), order=(1, 0, 2)))


def group_mma(dtype: Any, columns: int, left: Any, right: Any) -> cute.TiledMma:
    """UNIT x `columns` by one warpgroup: left operand (K-major) from `left`, right operand of major mode `right`."""
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, right, Float32, (1, 1, 1), (UNIT, columns), left
    )


def of_group(acc: cute.Tensor) -> cute.Tensor:
    """A warp's accumulator of 16 rows (warp_tiles.accumulator) as a warpgroup's of UNIT rows."""
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, cute.size(acc, mode=[2])), 1, 1)))


@cute.jit
def start_product(
    mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, add: cutlass.Constexpr[bool]
):
    """Start acc = left right, or acc += left right, as one group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, add)
    for k in range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(atom, acc, left[None, None, k], right[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
