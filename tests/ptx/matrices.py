"""Where the numbers of a matrix lie in shared memory, by the descriptors of WGMMA and of tcgen05 (PTX ISA)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

K = 16
"""Numbers of 16 bits that one instruction multiplies for each sum."""


class Layout(NamedTuple):
    start: int
    leading: int
    stride: int
    """In bytes."""
    swizzle: int
    """Bytes of a row of the pattern, 16: none."""


def layout_of(descriptor: int, swizzle: int) -> Layout:
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return Layout(start, leading, stride, swizzle)


def swizzled(place: Any, swizzle: int) -> Any:
    """Bytes in shared memory: bits 4 to 6 of an address by exclusive or with bits 7 to 9, 1, 2 or 3 of them."""
    return place ^ (place >> 7 & max(swizzle // 16, 1) - 1) << 4


@lru_cache(4096)
def places(layout: Layout, rows: int, is_transposed: bool) -> Any:
    """Bytes at which rows x 16 numbers start. Args: whether k is not what is contiguous."""
    start, leading, stride, swizzle = layout
    row, k = np.arange(rows)[:, None], np.arange(K)
    width = swizzle // 2
    if swizzle == 16:
        across, along = (leading, stride) if not is_transposed else (stride, leading)
        if is_transposed:
            place = row // 8 * across + k // 8 * along + k % 8 * 16 + row % 8 * 2
        else:
            place = row // 8 * along + k // 8 * across + row % 8 * 16 + k % 8 * 2
    elif is_transposed:
        place = row // width * leading + k // 8 * stride + k % 8 * swizzle + row % width * 2
    else:
        place = row // 8 * stride + row % 8 * swizzle + k * 2
    return swizzled(start + place, swizzle)
