"""What slots have of rows, added up by the warp that has the rows in an accumulator (warp_rows.py).

    o = (exp(lse) acc + sum_s exp(lse_s) o_s) / (exp(lse) + sum_s exp(lse_s))        s over slots that visited a block

A quad has a row: its four lanes share the slots' lse's, QUAD slots at a time, and each loads of o_s the 16-byte pieces
whose numbers it has in the accumulator. All pieces of QUAD slots are under way before one is waited for, and so is
which of the next slots count. An online softmax, slots in their order: the same bits each time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from cute_kernels.jit import VECTOR
from cute_kernels.warp import LOG2_E
from cute_kernels.warp_tiles import QUAD, read_once


class Slots(NamedTuple):
    """Of some tokens of a batch and key/value head."""

    gBlocks: cute.Tensor
    """int32 [T, n]: what a slot visited, -1: nothing."""
    gO: cute.Tensor
    """16 bits [T n, G, D_v], not read where nothing was visited."""
    gLse: cute.Tensor
    """fp32 [T n, G], natural log; there it counts nothing."""


class Row(NamedTuple):
    """Whose numbers a quad has."""

    token: Int32
    head: Int32
    exists: Boolean


@cute.jit
def row_of_quad(place: Int32, first_row: Int32, num_rows: Int32, group: cutlass.Constexpr[int], number: Int32) -> Row:
    """Args: `place`: in lane i, the token of row i. `number`: of the row in its warp, which begins with `first_row`."""
    row = first_row + number
    return Row(cute.arch.shuffle_sync(place, number), row % group, row < num_rows)


class Slot(NamedTuple):
    """What a lane has loaded of one."""

    block: Int32
    lse: Float32


@cute.jit
def load_slot(slots: Slots, row: Row, first: Int32) -> Slot:
    """Of the slots from `first` on, the one with this lane's number in its quad, or the last one where there is none.

    Nothing here waits for the loads.
    """
    count = slots.gBlocks.shape[1]
    slot = cutlass.min(first + cute.arch.lane_idx() % QUAD, count - 1)
    return Slot(slots.gBlocks[row.token, slot], slots.gLse[row.token * count + slot, row.head])


@cute.jit
def add_slots_of_row(
    rO: cute.Tensor,  # fp32 (c, n): a row of an accumulator (warp_tiles.numbers), columns as of load_for_quads
    lse: Float32,  # of what it has
    slots: Slots,
    row: Row,
    first_vector: Int32,  # of the row's vectors, the first one in rO
    loaded: Slot,  # of the first slots
) -> Float32:
    """rO becomes that of all slots too, and the lse of all is returned."""
    vectors = const_expr(cute.size(rO, mode=[1]) // QUAD)
    lane = cute.arch.lane_idx()
    mine, count = lane % QUAD, slots.gBlocks.shape[1]
    rPart = cute.make_rmem_tensor((VECTOR, vectors, QUAD), slots.gO.element_type)
    rLse = cute.make_rmem_tensor(QUAD, Float32)
    once = read_once(slots.gO.element_type)  # so that the queries of visits, which are read again, stay in L2
    top, total = lse, Float32(1.0) if lse > -Float32.inf else Float32(0.0)
    block, lse_of_slot = loaded
    for first in cutlass.range(0, count, QUAD, unroll=1):
        rPart.fill(0.0)
        my_lse = lse_of_slot if row.exists & (first + mine < count) & (block >= 0) else -Float32.inf
        for i in range_constexpr(QUAD):
            rLse[i] = cute.arch.shuffle_sync(my_lse, lane - mine + i)
        block, lse_of_slot = load_slot(slots, row, first + QUAD)
        for i in range_constexpr(QUAD):
            if rLse[i] != -Float32.inf:
                gPart = slots.gO[row.token * count + first + i, row.head, None]
                for j in range_constexpr(vectors):
                    piece = cute.local_tile(gPart, (VECTOR,), (first_vector + j * QUAD + mine,))
                    cute.copy(once, piece, rPart[None, j, i])
        new_top = cute.arch.fmax(top, cute.arch.warp_reduction_max(my_lse, threads_in_group=QUAD))
        base = Float32(0.0) if new_top == -Float32.inf else new_top
        scale = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
        top, total = new_top, total * scale
        for n in range_constexpr(vectors * QUAD):
            for c in range_constexpr(2):
                rO[c, n] = rO[c, n] * scale
        for i in range_constexpr(QUAD):
            weight = cute.math.exp2((rLse[i] - base) * LOG2_E, fastmath=True)
            total += weight
            for n in range_constexpr(vectors * QUAD):
                for c in range_constexpr(2):
                    rO[c, n] = cute.math.fma(weight, rPart[n % QUAD * 2 + c, n // QUAD, i].to(Float32), rO[c, n])
    share = Float32(0.0) if total == 0.0 else 1.0 / total
    for n in range_constexpr(vectors * QUAD):
        for c in range_constexpr(2):
            rO[c, n] = rO[c, n] * share
    return top + cute.math.log(total)
