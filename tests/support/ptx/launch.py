"""A launch of a kernel: its arguments as bytes, and its sizes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tests.support.ptx.tensor_map import TensorMap

Dim3 = tuple[int, int, int]


class Launch(NamedTuple):
    arguments: list[bytes]
    """Those of the kernel, in order; a tensor map is `tensor_map.blob` of its number in `tensor_maps`."""
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    """Of dynamic shared memory."""
    tensor_maps: list[TensorMap]


def tensor_argument(x: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """How CuTe DSL passes a tensor: its address, and what is dynamic of its shape (32 bits) and strides (64 bits)."""
    head = struct.pack(f"<Q{len(shape)}i", x.data_ptr(), *shape)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def argument(x: Tensor | int | float, static: tuple[int, ...] = ()) -> bytes:
    """Args: `static`, dimensions whose size was known to the compiler; the last stride always is."""
    if isinstance(x, Tensor):
        return tensor_argument(x, [n for i, n in enumerate(x.shape) if i not in static], x.stride()[:-1])
    return struct.pack("<i" if isinstance(x, int) else "<f", x)
