"""Tensor maps: what TMA copies boxes of.

A kernel is given 128 bytes that only the driver can make. In their place stand a word that no driver writes and the
map's number among those of its launch.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

BYTES = 128
MAGIC = int.from_bytes(b"TMA map:", "little")
MOST_DIMENSIONS = 5
MOST_OF_A_BOX = 256
"""Elements in one dimension."""
ALIGNMENT = 16
"""Of the address and of strides, in bytes."""


class TensorMap(NamedTuple):
    """Dimensions come with the contiguous one first."""

    address: int
    item: int
    """Bytes of an element."""
    kind: str
    """Of an element, as the IR names it: bf16, f16, f32, ..."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes."""
    box: tuple[int, ...]
    swizzle: int
    """Bytes within which 16-byte parts change places, 0: none."""

    def check(self) -> None:
        """Raises ValueError where the driver refuses to make such a map (cuTensorMapEncodeTiled)."""
        wrong = (
            not 1 <= len(self.sizes) <= MOST_DIMENSIONS
            or not len(self.sizes) == len(self.strides) == len(self.box)
            or self.address % ALIGNMENT
            or any(not 1 <= size <= 1 << 32 for size in self.sizes)
            or self.strides[0] != self.item
            or any(stride % ALIGNMENT or not 0 <= stride < 1 << 40 for stride in self.strides[1:])
            or any(not 1 <= size <= MOST_OF_A_BOX for size in self.box)
            or self.box[0] * self.item % ALIGNMENT
            or self.swizzle not in (0, 32, 64, 128)
            or (self.swizzle and self.box[0] * self.item > self.swizzle)
        )
        if wrong:
            raise ValueError(f"no tensor map can be made of {self}")


def handle(number: int) -> bytes:
    """What a kernel is given for the map of that number of its launch."""
    return struct.pack("<QQ", MAGIC, number).ljust(BYTES, b"\0")


def number_of(given: bytes) -> int:
    """Which of its launch's maps a kernel was given."""
    magic, number = struct.unpack_from("<QQ", given)
    if len(given) != BYTES or magic != MAGIC:
        raise ValueError(f"not a tensor map: {given!r}")
    return int(number)
