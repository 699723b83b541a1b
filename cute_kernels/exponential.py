"""2^x on the FMA pipe, 128 a cycle, instead of the special function unit, from which a multiprocessor has 16 a cycle.

    2^x = 2^n p(f)      n = x rounded, f = x - n in [-1/2, 1/2],  p(f) = 1 + c1 f + ... + c5 f^5

Adding 1.5 2^23 rounds: the sum's low bits are n, and shifted by 23 they are added to p's exponent. 10 instructions
besides the FMA that makes x, one of them a maximum: x below -127 counts as -127, of which the result is exactly 0.

Errors: p is off by at most 2^-23.3 where it is exact (relatively), with its five roundings 2^-22.4; below -126 by
2^-127. The coefficients are those of Lawson's iteration for the smallest largest relative error
(tests/test_exponential.py computes them again), with the constant 1, so that 2^n is exact.

Limits: x below 127.5. NaN gives 0.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

COEFFICIENTS = (0.69314698, 0.24022242, 0.05550734, 0.009671513, 0.0013264727)
"""Of f, f^2, ..."""
ROUNDING = 1.5 * 2**23
LOWEST = -127.0
MANTISSA_BITS = 23


@cute.jit
def exp2_by_fma(x: Float32) -> Float32:
    x = cute.arch.fmax(x, LOWEST)
    shifted = x + ROUNDING
    f = x - (shifted - ROUNDING)
    p = Float32(COEFFICIENTS[-1])
    for c in range_constexpr(len(COEFFICIENTS) - 2, -1, -1):
        p = cute.math.fma(p, f, Float32(COEFFICIENTS[c]))
    p = cute.math.fma(p, f, Float32(1.0))
    return (p.bitcast(Int32) + (shifted.bitcast(Int32) << MANTISSA_BITS)).bitcast(Float32)
