"""A launch of a kernel: its arguments as bytes, its sizes, and tensor maps, in the open what the driver encodes."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAP_BYTES = 128
MAGIC = 0x0070_616D_726F_736E
"""Marks the 128 bytes of a parameter as a stand-in, behind which comes the number of its map in the launch."""


class TensorMap(NamedTuple):
    """Dimensions go from the contiguous one outwards."""

    address: int
    item: int
    """Bytes of an element."""
    kind: str
    """Format of an element: bf16, f16, f32, ..."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes; the first is `item`."""
    box: tuple[int, ...]
    """Elements that one instruction copies."""
    swizzle: int
    """Bytes of a row of the pattern in shared memory: 0, 32, 64 or 128."""

    def check(self) -> None:
        """Raises ValueError for what cuTensorMapEncodeTiled refuses (CUDA driver API, Tensor Map Object Management)."""
        rank = len(self.sizes)
        if not 1 <= rank <= 5 or len(self.strides) != rank or len(self.box) != rank:
            raise ValueError(f"sizes {self.sizes}, strides {self.strides} and box {self.box} of a tensor map")
        if self.address % 16 or self.strides[0] != self.item or any(x % 16 for x in self.strides[1:]):
            raise ValueError(f"address {self.address:#x} or strides {self.strides}: not multiples of 16 bytes")
        if not all(1 <= x <= 1 << 32 for x in self.sizes) or not all(1 <= x <= 256 for x in self.box):
            raise ValueError(f"sizes {self.sizes} or box {self.box} of a tensor map")
        row = self.box[0] * self.item
        if self.swizzle not in (0, 32, 64, 128) or row % 16 or (self.swizzle and row > self.swizzle):
            raise ValueError(f"rows of {row} bytes with a swizzle of {self.swizzle}")


def blob(number: int) -> bytes:
    """The parameter that stands for the launch's map of this number."""
    return struct.pack("<QI", MAGIC, number).ljust(MAP_BYTES, b"\0")


def number_of(parameter: bytes) -> int:
    magic, number = struct.unpack_from("<QI", parameter)
    if len(parameter) != MAP_BYTES or magic != MAGIC:
        raise ValueError("a copy by TMA with a parameter that is no tensor map")
    return int(number)


Dim3 = tuple[int, int, int]


class Launch(NamedTuple):
    kernel: str
    arguments: list[bytes]
    """Those of the kernel, in order; a tensor map is `blob` of its number in `tensor_maps`."""
    grid: Dim3
    """CTAs."""
    block: Dim3
    """Threads of a CTA."""
    cluster: Dim3
    """CTAs."""
    shared_bytes: int
    """Of dynamic shared memory."""
    tensor_maps: list[TensorMap]
