"""What slots have of rows, and NSA's other branches, added by the warp that has the rows in an accumulator.

    o = sum_s exp(lse_s - lse) o_s        s over what the warp has (warp_rows.py) and the slots that visited a block
    out = g_cmp o_cmp + g_slc o + g_win o_win

A quad has a row, and each of its lanes the 16-byte pieces of it whose numbers it has in the accumulator. So neither the
warp's own o nor o goes to memory, and q is read once: gates come of the rows in shared memory.

Bit for bit what CombinePartials (kv_outer.py) and GatedSum (forward.py) make of o in memory: o is rounded as if it had
been written, BATCH slots at a time share one base of an online softmax, and lanes add up a logit in the same order.
LOADS pieces of a lane are under way together.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.gate.forward import gate_of_logit, partial_dot, weighted_sum
from cute_kernels.mma.mma_sync import QUAD, as_vectors, vector_strides
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.runtime.jit import VECTOR

BATCH = 8
"""Slots whose weights have one base."""

LOADS = 16
"""Of 16 bytes, of a lane at a time."""


class CombineInputs(NamedTuple):
    """What is added to rows of the tokens of a CTA, of one batch and key/value head."""

    gBlocks: cute.Tensor
    """int32 [T, n]: what a slot visited, -1: nothing."""
    gParts: cute.Tensor
    """Slots' o, 16 bits [T n, G, D], not read where nothing was visited."""
    gPartLse: cute.Tensor
    """fp32 [T n, G], likewise."""
    gWeight: cute.Tensor | None
    """[G, 3, D], by which gates are projected."""
    gGates: cute.Tensor | None
    """[T, G, 3]: with gWeight where to write gates, if anywhere; without it given ones, else 1/3 each."""
    gCmp: cute.Tensor
    """16 bits [T, G, D]."""
    gWin: cute.Tensor
    """Likewise."""
    gSlc: cute.Tensor | None
    """Likewise, where to write o, if anywhere."""


class Row(NamedTuple):
    """Whose numbers a quad has."""

    token: Int32
    head: Int32
    there: Boolean
    """Whether there is such a row; else token and head are those of one that is there."""


@cute.jit
def load_blocks(rest: CombineInputs, row: Row, start: Int32) -> cute.Tensor:
    """int32 [BATCH / QUAD]: in lane j of a quad the blocks of slots start + j, start + QUAD + j ...; -1 behind them."""
    rBlocks = cute.make_rmem_tensor(BATCH // QUAD, Int32)
    rBlocks.fill(-1)
    for k in range_constexpr(BATCH // QUAD):
        slot = start + k * QUAD + cute.arch.lane_idx() % QUAD
        if row.there & (slot < rest.gBlocks.shape[1]):
            rBlocks[k] = rest.gBlocks[row.token, slot]
    return rBlocks


@cute.jit
def of_slot(rX: cute.Tensor, i: cutlass.Constexpr[int]) -> cutlass.Numeric:
    """Slot i's of a batch, of what a quad's lanes have in the order of `load_blocks`."""
    lane = cute.arch.lane_idx()
    return cute.arch.shuffle_sync(rX[i // QUAD], lane - lane % QUAD + i % QUAD)


@cute.jit
def load_part(mVectors: cute.Tensor, first: Int32, block: Int32, rPart: cute.Tensor):
    """A lane's pieces [VECTOR, pieces] of a slot's o, the first one at a vector's number; zeros if block is negative.

    So little depends on the block that no branch is taken, behind which loads would wait for others.
    """
    rPart.fill(0.0)
    if block >= 0:
        piece = cute.domain_offset((0, Int64(first)), mVectors)
        for t in range_constexpr(cute.size(rPart, mode=[1])):
            cute.autovec_copy(piece[None, t * QUAD], rPart[None, t])


@cute.jit
def load_pieces(gRow: cute.Tensor, first_vector: Int32, rPieces: cute.Tensor):
    """A lane's pieces [VECTOR, pieces] of a row."""
    for t in range_constexpr(cute.size(rPieces, mode=[1])):
        vector = first_vector + t * QUAD + cute.arch.lane_idx() % QUAD
        cute.autovec_copy(cute.local_tile(gRow, (VECTOR,), (vector,)), rPieces[None, t])


@cute.jit
def store_pieces(rPieces: cute.Tensor, gRow: cute.Tensor, first_vector: Int32):
    """A lane's pieces [VECTOR, pieces] of a row."""
    for t in range_constexpr(cute.size(rPieces, mode=[1])):
        vector = first_vector + t * QUAD + cute.arch.lane_idx() % QUAD
        cute.autovec_copy(rPieces[None, t], cute.local_tile(gRow, (VECTOR,), (vector,)))


@cute.jit
def add_slots_of_row(
    rHeld: cute.Tensor,  # 16 bits [VECTOR, pieces]: a lane's pieces of what the warp has, rounded
    lse: Float32,  # of that
    rest: CombineInputs,
    row: Row,
    first_vector: Int32,  # of the row's vectors, the first one in the accumulator
    rBlocks: cute.Tensor,  # of `load_blocks`, of the first slots
) -> Float32:
    """rHeld becomes o; returns its lse. All lanes of a warp take part."""
    pieces = const_expr(cute.size(rHeld, mode=[1]))
    depth = const_expr(min(BATCH, LOADS // pieces))
    count = rest.gBlocks.shape[1]
    of_place, of_head = vector_strides(rest.gParts)
    mVectors = as_vectors(rest.gParts)
    mine = row.token * count * of_place + row.head * of_head + first_vector + cute.arch.lane_idx() % QUAD
    rPart = cute.make_rmem_tensor((VECTOR, pieces, depth), rHeld.element_type)
    rSum = cute.make_rmem_tensor((VECTOR, pieces), Float32)
    rMine = cute.make_rmem_tensor(BATCH // QUAD, Int32)
    rMine.store(rBlocks.load())
    rWeights = cute.make_rmem_tensor(BATCH // QUAD, Float32)
    rSum.store(rHeld.load().to(Float32))
    top, total = lse, Float32(1.0) if lse > -Float32.inf else Float32(0.0)
    for start in cutlass.range(0, count, BATCH, unroll=1):
        rWeights.fill(-Float32.inf)
        for k in range_constexpr(BATCH // QUAD):
            if rMine[k] >= 0:
                slot = start + k * QUAD + cute.arch.lane_idx() % QUAD
                rWeights[k] = rest.gPartLse[row.token * count + slot, row.head]
        rNext = load_blocks(rest, row, start + BATCH)
        for first in range_constexpr(0, BATCH, depth):
            for i in range_constexpr(depth):
                block = of_slot(rMine, first + i)
                load_part(mVectors, mine + (start + first + i) * of_place, block, rPart[None, None, i])
            if const_expr(first == 0):  # of the whole batch, while loads are under way
                new_top = rWeights[0]
                for k in range_constexpr(1, BATCH // QUAD):
                    new_top = cute.arch.fmax(new_top, rWeights[k])
                new_top = cute.arch.fmax(top, cute.arch.warp_reduction_max(new_top, threads_in_group=QUAD))
                base = Float32(0.0) if new_top == -Float32.inf else new_top
                scale = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
                for k in range_constexpr(BATCH // QUAD):
                    rWeights[k] = cute.math.exp2((rWeights[k] - base) * LOG2_E, fastmath=True)
                top, total = new_top, total * scale
                for t in range_constexpr(pieces):
                    for j in range_constexpr(VECTOR):
                        rSum[j, t] = rSum[j, t] * scale
            for i in range_constexpr(depth):
                weight = of_slot(rWeights, first + i)
                total += weight
                for t in range_constexpr(pieces):
                    for j in range_constexpr(VECTOR):
                        rSum[j, t] = cute.math.fma(weight, rPart[j, t, i].to(Float32), rSum[j, t])
        for k in range_constexpr(BATCH // QUAD):
            rMine[k] = rNext[k]
    rSum.store(rSum.load() * (Float32(0.0) if total == 0.0 else 1.0 / total))
    rHeld.store(rSum.load().to(rHeld.element_type))
    return top + cute.math.log(total)


@cute.jit
def gates_of_quads(rest: CombineInputs, row: Row, sRow: cute.Tensor) -> cute.Tensor:
    """The three gates of a row, in all lanes of its quad; projected ones are written where `rest` wants them.

    All lanes of a warp take part. Args: `sRow`: its query.
    """
    rGates = cute.make_rmem_tensor(3, Float32)
    rGates.fill(1.0 / 3.0)
    if const_expr(rest.gWeight is not None):
        pieces = const_expr(cute.size(sRow) // VECTOR // QUAD)
        rQ = cute.make_rmem_tensor((VECTOR, 1), sRow.element_type)
        rWeight = cute.make_rmem_tensor((VECTOR, 1), rest.gWeight.element_type)
        rLogits = cute.make_rmem_tensor((pieces, 3), Float32)
        for t in range_constexpr(pieces):
            load_pieces(sRow, t * QUAD, rQ)
            for b in range_constexpr(3):
                load_pieces(rest.gWeight[row.head, b, None], t * QUAD, rWeight)
                rLogits[t, b] = partial_dot(rQ[None, 0], rWeight[None, 0])
        for b in range_constexpr(3):
            for half in range_constexpr(pieces.bit_length() - 1):  # as lanes far apart, before near ones
                left = const_expr(pieces >> half + 1)
                for t in range_constexpr(left):
                    rLogits[t, b] = rLogits[t, b] + rLogits[t + left, b]
            rGates[b] = gate_of_logit(cute.arch.warp_reduction_sum(rLogits[0, b], threads_in_group=QUAD))
        if const_expr(rest.gGates is not None):
            if row.there & (cute.arch.lane_idx() % QUAD == 0):
                cute.autovec_copy(rGates, rest.gGates[row.token, row.head, None])
    elif const_expr(rest.gGates is not None):
        for b in range_constexpr(3):
            rGates[b] = rest.gGates[row.token, row.head, b].to(Float32)
    return rGates


@cute.jit
def finish_row(
    rRow: cute.Tensor,  # 16 bits (c, n): a row of an accumulator (warp_tiles.numbers), columns as of load_for_quads
    lse: Float32,
    rGates: cute.Tensor,
    rest: CombineInputs,
    row: Row,
    first_vector: Int32,
    rBlocks: cute.Tensor,
) -> Float32:
    """rRow becomes out; returns the lse of o. Args: as of `add_slots_of_row`; `rGates`: of `gates_of_quads`."""
    pieces = const_expr(cute.size(rRow, mode=[1]) // QUAD)
    rO = cute.make_rmem_tensor((VECTOR, 3, pieces), rRow.element_type)
    load_pieces(rest.gCmp[row.token, row.head, None], first_vector, rO[None, 0, None])
    load_pieces(rest.gWin[row.token, row.head, None], first_vector, rO[None, 2, None])
    rHeld = cute.make_rmem_tensor((VECTOR, pieces), rRow.element_type)
    for t in range_constexpr(pieces):
        for j in range_constexpr(VECTOR):
            rHeld[j, t] = rRow[j % 2, t * QUAD + j // 2]
    of_all = add_slots_of_row(rHeld, lse, rest, row, first_vector, rBlocks)
    if const_expr(rest.gSlc is not None):
        if row.there:
            store_pieces(rHeld, rest.gSlc[row.token, row.head, None], first_vector)
    for t in range_constexpr(pieces):
        rO[None, 1, t].store(rHeld[None, t].load())
        rOut = weighted_sum(rO[None, None, t], rGates)
        for j in range_constexpr(VECTOR):
            rRow[j % 2, t * QUAD + j // 2] = rOut[j]
    return of_all
