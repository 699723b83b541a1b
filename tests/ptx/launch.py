"""A launch of a kernel: its arguments as bytes, and its sizes."""

from __future__ import annotations

from typing import NamedTuple

from tests.ptx.tensor_map import TensorMap

Dim3 = tuple[int, int, int]


class Launch(NamedTuple):
    kernel: str
    arguments: list[bytes]
    """Those of the kernel, in order; a tensor map is `tensor_map.blob` of its number in `tensor_maps`."""
    grid: Dim3
    """CTAs."""
    block: Dim3
    """Threads of a CTA."""
    cluster: Dim3
    """CTAs."""
    shared_bytes: int
    """Of dynamic shared memory."""
    tensor_maps: list[TensorMap]
