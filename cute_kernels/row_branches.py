"""The gated sum of all branches, by the warp that has rows of the selected one in an accumulator (warp_rows.py).

    out = g_cmp o_cmp + g_slc o_slc + g_win o_win

A quad has a row, and loads of o_cmp and o_win the 16-byte pieces whose numbers it has in the accumulator. o_slc is
rounded first, as if it had been written: bit for bit what GatedSum (gate.py) gives.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.gate import weigh
from cute_kernels.jit import VECTOR
from cute_kernels.row_slots import Row
from cute_kernels.warp_tiles import QUAD


class Others(NamedTuple):
    """Of some tokens of a batch and key/value head."""

    gCmp: cute.Tensor
    """16 bits [T, G, D_v]."""
    gWin: cute.Tensor
    """Likewise."""
    gGates: cute.Tensor | None
    """[T, G, 3]; None: 1/3 each."""


class Loaded(NamedTuple):
    """What a lane has of a row: (number, vector) of either branch, and the gates of all."""

    rCmp: cute.Tensor
    rWin: cute.Tensor
    rGates: cute.Tensor


@cute.jit
def load_branches(
    others: Others,
    row: Row,
    first_vector: Int32,  # of the row's vectors, the first one in the accumulator
    vectors: cutlass.Constexpr[int],  # of a lane
) -> Loaded:
    """Of the row, or of its token's one of that head where it does not exist. Nothing here waits for the loads."""
    rCmp, rWin = (cute.make_rmem_tensor((VECTOR, vectors), others.gCmp.element_type) for _ in range(2))
    rGates = cute.make_rmem_tensor(3, Float32)
    rGates.fill(1.0 / 3.0)
    for gX, rX in ((others.gCmp, rCmp), (others.gWin, rWin)):
        for j in range_constexpr(vectors):
            vector = first_vector + j * QUAD + cute.arch.lane_idx() % QUAD
            cute.autovec_copy(cute.local_tile(gX[row.token, row.head, None], (VECTOR,), (vector,)), rX[None, j])
    gGates = others.gGates
    if const_expr(gGates is not None):
        for b in range_constexpr(3):
            rGates[b] = gGates[row.token, row.head, b].to(Float32)
    return Loaded(rCmp, rWin, rGates)


@cute.jit
def add_branches(
    rO: cute.Tensor,  # fp32 (c, n): a row of an accumulator (warp_tiles.numbers), columns as of load_for_quads
    loaded: Loaded,
):
    """rO becomes the gated sum."""
    rCmp, rWin, rGates = loaded
    for n in range_constexpr(cute.size(rO, mode=[1])):
        for c in range_constexpr(2):
            at = n % QUAD * 2 + c, n // QUAD
            rO[c, n] = weigh((rCmp[at], rO[c, n].to(rCmp.element_type), rWin[at]), rGates)
