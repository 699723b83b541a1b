"""Numbers and their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

TYPES: dict[str, str] = {"pred": "?", "f32": "f4", "f64": "f8", "f16": "f2", "f32x2": "f4x2", "b16x2": "u2x2"}
TYPES |= {
    f"{kind}{bits}": f"{letter}{bits // 8}"
    for bits in (8, 16, 32, 64)
    for kind, letter in zip("sub", "iuu", strict=True)
}
"""NumPy's types of PTX's."""


def bf16_bits(x: Any) -> Any:
    """Rounded to nearest even, as uint16. Args: fp32, contiguous or not."""
    return (rounded_to_bf16(x) >> np.uint32(16)).astype("u2")


def rounded_to_bf16(x: Any) -> Any:
    """As bits of fp32, of which the upper half is right."""
    bits = np.ascontiguousarray(x, "f4").view("u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    np.copyto(rounded, np.uint32(0x7FFF0000), where=x != x)
    return rounded


def bf16_numbers(bits: Any) -> Any:
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def numbers(bits: Any, kind: str) -> Any:
    """Args: 16 bits each; bf16 or f16. As fp32."""
    return bf16_numbers(bits) if kind == "bf16" else np.ascontiguousarray(bits).view("f2").astype("f4")


def product(left: Any, right: Any) -> Any:
    """`[..., i, k]` times `[..., k, j]`, summed in order of k: the same bits on every CPU, wherever a row lies."""
    total = left[..., :, 0, None] * right[..., None, 0, :]
    term = np.empty_like(total)
    for k in range(1, left.shape[-1]):
        total += np.multiply(left[..., :, k, None], right[..., None, k, :], out=term)
    return total
