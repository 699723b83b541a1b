"""Combine in the epilogue: a warp adds partials, and NSA's other branches, to rows held in its accumulator.

    o = sum_s exp(lse_s - lse) o_s        s over the warp's own attention (warp_rows.py) and the slots with a partial
    out = g_cmp o_cmp + g_slc o + g_win o_win

A quad (four lanes) holds a row; each lane holds the row's 16-byte vectors that belong to its part of the accumulator.
Neither the warp's own o nor the combined o goes through memory, and q is read once: gates are projected from the rows
in shared memory.

Bitwise equal to CombinePartials (combine.py) followed by GatedSum (gate/forward.py) on o in memory: o is rounded as if
it had been written, SLOT_BATCH slots at a time share one maximum of an online softmax, and lanes reduce a logit in the
same order. A lane keeps MAX_LOADS vectors in flight.
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

SLOT_BATCH = 8
"""Slots that are loaded together and rescaled by one maximum."""

MAX_LOADS = 16
"""Maximum number of 16-byte vectors that a lane has in flight."""


class CombineInputs(NamedTuple):
    """Terms added to the rows of a CTA's tokens, for one batch and key/value head."""

    gSlotBlocks: cute.Tensor
    """int32 [T, n], Worklist.slot_blocks: KV block of each slot; -1 if the slot is empty and has no partial."""
    gOPartial: cute.Tensor
    """16 bits [T n, G, D], read only where the slot has a partial."""
    gLsePartial: cute.Tensor
    """fp32 [T n, G], read only where the slot has a partial."""
    gWeight: cute.Tensor | None
    """[G, 3, D]: weights that project q to gate logits."""
    gGates: cute.Tensor | None
    """[T, G, 3]: with gWeight, output for the gates (None: discard). Without it, given gates (None: 1/3 each)."""
    gCmp: cute.Tensor
    """16 bits [T, G, D]: o of the compressed branch."""
    gWin: cute.Tensor
    """16 bits [T, G, D]: o of the window branch."""
    gSlc: cute.Tensor | None
    """16 bits [T, G, D]: output for the combined o of the selected branch (None: discard)."""


class Row(NamedTuple):
    """Row held by a quad."""

    token: Int32
    head: Int32
    is_valid: Boolean
    """False past the last row; token and head are then those of an existing row."""


@cute.jit
def load_slot_blocks(combine: CombineInputs, row: Row, start: Int32) -> cute.Tensor:
    """int32 [SLOT_BATCH / QUAD]: lane j of a quad gets the blocks of slots start + j, start + QUAD + j ..., or -1."""
    rBlocks = cute.make_rmem_tensor(SLOT_BATCH // QUAD, Int32)
    rBlocks.fill(-1)
    for k in range_constexpr(SLOT_BATCH // QUAD):
        slot = start + k * QUAD + cute.arch.lane_idx() % QUAD
        if row.is_valid & (slot < combine.gSlotBlocks.shape[1]):
            rBlocks[k] = combine.gSlotBlocks[row.token, slot]
    return rBlocks


@cute.jit
def broadcast_slot(rX: cute.Tensor, i: cutlass.Constexpr[int]) -> cutlass.Numeric:
    """Broadcast the value of slot i of a batch to the quad. Args: `rX`: distributed like `load_slot_blocks`' result."""
    lane = cute.arch.lane_idx()
    return cute.arch.shuffle_sync(rX[i // QUAD], lane - lane % QUAD + i % QUAD)


@cute.jit
def load_partial(mVectors: cute.Tensor, first: Int32, block: Int32, rPartial: cute.Tensor):
    """Load a lane's vectors [VECTOR, vectors] of a slot's o_partial, starting at index `first`; zeros if block < 0.

    Predicated, not branched, so that loads overlap.
    """
    rPartial.fill(0.0)
    if block >= 0:
        vectors = cute.domain_offset((0, Int64(first)), mVectors)
        for t in range_constexpr(cute.size(rPartial, mode=[1])):
            cute.autovec_copy(vectors[None, t * QUAD], rPartial[None, t])


@cute.jit
def load_vectors(gRow: cute.Tensor, first_vector: Int32, rVectors: cute.Tensor):
    """Load a lane's vectors [VECTOR, vectors] of a row."""
    for t in range_constexpr(cute.size(rVectors, mode=[1])):
        vector = first_vector + t * QUAD + cute.arch.lane_idx() % QUAD
        cute.autovec_copy(cute.local_tile(gRow, (VECTOR,), (vector,)), rVectors[None, t])


@cute.jit
def store_vectors(rVectors: cute.Tensor, gRow: cute.Tensor, first_vector: Int32):
    """Store a lane's vectors [VECTOR, vectors] of a row."""
    for t in range_constexpr(cute.size(rVectors, mode=[1])):
        vector = first_vector + t * QUAD + cute.arch.lane_idx() % QUAD
        cute.autovec_copy(rVectors[None, t], cute.local_tile(gRow, (VECTOR,), (vector,)))


@cute.jit
def combine_row(
    rO: cute.Tensor,  # 16 bits [VECTOR, vectors]: a lane's part of the warp's own o, rounded
    lse: Float32,  # lse of the warp's own o
    combine: CombineInputs,
    row: Row,
    first_vector: Int32,  # index in the row of the accumulator's first columns
    rBlocks: cute.Tensor,  # from `load_slot_blocks`, for the first slots
) -> Float32:
    """Replace rO by the combined o; return its lse. All lanes of a warp must call this."""
    vectors = const_expr(cute.size(rO, mode=[1]))
    depth = const_expr(min(SLOT_BATCH, MAX_LOADS // vectors))  # slots in flight
    num_slots = combine.gSlotBlocks.shape[1]
    slot_stride, head_stride = vector_strides(combine.gOPartial)
    mVectors = as_vectors(combine.gOPartial)  # (VECTOR, vector)
    my_vector = (
        row.token * num_slots * slot_stride + row.head * head_stride + first_vector + cute.arch.lane_idx() % QUAD
    )
    # A lane's part of the row: 16 bits (VECTOR, vectors, slot in flight)
    rPartial = cute.make_rmem_tensor((VECTOR, vectors, depth), rO.element_type)
    rSum = cute.make_rmem_tensor((VECTOR, vectors), Float32)
    rSlotBlocks = cute.make_rmem_tensor(SLOT_BATCH // QUAD, Int32)  # int32: as load_slot_blocks
    rSlotBlocks.store(rBlocks.load())
    rWeights = cute.make_rmem_tensor(SLOT_BATCH // QUAD, Float32)  # fp32: as load_slot_blocks
    rSum.store(rO.load().to(Float32))
    row_max, row_sum = lse, Float32(1.0) if lse > -Float32.inf else Float32(0.0)
    for start in cutlass.range(0, num_slots, SLOT_BATCH, unroll=1):
        rWeights.fill(-Float32.inf)
        for k in range_constexpr(SLOT_BATCH // QUAD):
            if rSlotBlocks[k] >= 0:
                slot = start + k * QUAD + cute.arch.lane_idx() % QUAD
                rWeights[k] = combine.gLsePartial[row.token * num_slots + slot, row.head]
        rNextBlocks = load_slot_blocks(combine, row, start + SLOT_BATCH)
        for first in range_constexpr(0, SLOT_BATCH, depth):
            for i in range_constexpr(depth):
                block = broadcast_slot(rSlotBlocks, first + i)
                load_partial(mVectors, my_vector + (start + first + i) * slot_stride, block, rPartial[None, None, i])
            if const_expr(first == 0):  # for the whole batch, while loads are in flight
                new_max = rWeights[0]
                for k in range_constexpr(1, SLOT_BATCH // QUAD):
                    new_max = cute.arch.fmax(new_max, rWeights[k])
                new_max = cute.arch.fmax(row_max, cute.arch.warp_reduction_max(new_max, threads_in_group=QUAD))
                base = Float32(0.0) if new_max == -Float32.inf else new_max
                scale = cute.math.exp2((row_max - base) * LOG2_E, fastmath=True)
                for k in range_constexpr(SLOT_BATCH // QUAD):
                    rWeights[k] = cute.math.exp2((rWeights[k] - base) * LOG2_E, fastmath=True)
                row_max, row_sum = new_max, row_sum * scale
                for t in range_constexpr(vectors):
                    for j in range_constexpr(VECTOR):
                        rSum[j, t] = rSum[j, t] * scale
            for i in range_constexpr(depth):
                weight = broadcast_slot(rWeights, first + i)
                row_sum += weight
                for t in range_constexpr(vectors):
                    for j in range_constexpr(VECTOR):
                        rSum[j, t] = cute.math.fma(weight, rPartial[j, t, i].to(Float32), rSum[j, t])
        for k in range_constexpr(SLOT_BATCH // QUAD):
            rSlotBlocks[k] = rNextBlocks[k]
    rSum.store(rSum.load() * (Float32(0.0) if row_sum == 0.0 else 1.0 / row_sum))
    rO.store(rSum.load().to(rO.element_type))
    return row_max + cute.math.log(row_sum)


@cute.jit
def quad_gates(gWeight: cute.Tensor | None, gGates: cute.Tensor | None, row: Row, sQ: cute.Tensor) -> cute.Tensor:
    """The three gates of a row, in all lanes of its quad. All lanes of a warp must call this.

    Args: gWeight, gGates: see CombineInputs. sQ: the row's query.
    """
    rGates = cute.make_rmem_tensor(3, Float32)  # fp32 (branch)
    rGates.fill(1.0 / 3.0)
    if const_expr(gWeight is not None):
        vectors = const_expr(cute.size(sQ) // VECTOR // QUAD)
        rQ = cute.make_rmem_tensor((VECTOR, 1), sQ.element_type)  # 16 bits: one vector of the query
        rWeight = cute.make_rmem_tensor((VECTOR, 1), gWeight.element_type)
        rLogits = cute.make_rmem_tensor((vectors, 3), Float32)  # fp32 (vector, branch)
        for t in range_constexpr(vectors):
            load_vectors(sQ, t * QUAD, rQ)
            for b in range_constexpr(3):
                load_vectors(gWeight[row.head, b, None], t * QUAD, rWeight)
                rLogits[t, b] = partial_dot(rQ[None, 0], rWeight[None, 0])
        for b in range_constexpr(3):
            for half in range_constexpr(vectors.bit_length() - 1):  # same order as lanes: distant ones before near ones
                left = const_expr(vectors >> half + 1)
                for t in range_constexpr(left):
                    rLogits[t, b] = rLogits[t, b] + rLogits[t + left, b]
            rGates[b] = gate_of_logit(cute.arch.warp_reduction_sum(rLogits[0, b], threads_in_group=QUAD))
        if const_expr(gGates is not None):
            if row.is_valid & (cute.arch.lane_idx() % QUAD == 0):
                cute.autovec_copy(rGates, gGates[row.token, row.head, None])
    elif const_expr(gGates is not None):
        for b in range_constexpr(3):
            rGates[b] = gGates[row.token, row.head, b].to(Float32)
    return rGates


@cute.jit
def combine_and_gate_row(
    rRow: cute.Tensor,  # 16 bits (c, n): accumulator row (mma_sync.acc_mn_view), columns as permuted by `load_permuted`
    lse: Float32,
    rGates: cute.Tensor,
    combine: CombineInputs,
    row: Row,
    first_vector: Int32,
    rBlocks: cute.Tensor,
) -> Float32:
    """Replace rRow by out; return the lse of the selected branch.

    Args: see `combine_row`; `rGates`: from `quad_gates`.
    """
    vectors = const_expr(cute.size(rRow, mode=[1]) // QUAD)
    rBranches = cute.make_rmem_tensor((VECTOR, 3, vectors), rRow.element_type)  # 16 bits (VECTOR, branch, vectors)
    load_vectors(combine.gCmp[row.token, row.head, None], first_vector, rBranches[None, 0, None])
    load_vectors(combine.gWin[row.token, row.head, None], first_vector, rBranches[None, 2, None])
    rO = cute.make_rmem_tensor((VECTOR, vectors), rRow.element_type)
    for t in range_constexpr(vectors):
        for j in range_constexpr(VECTOR):
            rO[j, t] = rRow[j % 2, t * QUAD + j // 2]
    combined_lse = combine_row(rO, lse, combine, row, first_vector, rBlocks)
    if const_expr(combine.gSlc is not None):
        if row.is_valid:
            store_vectors(rO, combine.gSlc[row.token, row.head, None], first_vector)
    for t in range_constexpr(vectors):
        rBranches[None, 1, t].store(rO[None, t].load())
        rOut = weighted_sum(rBranches[None, None, t], rGates)  # 16 bits (VECTOR)
        for j in range_constexpr(VECTOR):
            rRow[j % 2, t * QUAD + j // 2] = rOut[j]
    return combined_lse
