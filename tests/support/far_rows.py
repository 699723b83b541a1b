"""Tensors whose rows lie so far apart that their offsets pass 2^31 elements, many of them in 10 GiB.

Memory is a grid of lines of LINE bytes. A row of a tensor begins in a line, at a place in it that is this tensor's
alone; the next row begins so many lines further that the last one is more than 2^31 elements behind the first. So
kernels see addresses and strides of tensors with billions of elements, while only a few rows are computed and checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

FAR = 1 << 31
"""Elements."""
LINE = 1 << 19
MOST_ROWS = 4096
"""Of a tensor; one with more is left compact."""
MOST_BYTES = 128 << 10
"""Of a row, likewise."""
LINES = 4 * FAR // LINE + MOST_ROWS
ALIGNMENT = 128
FA4_CALLS = "cute_kernels.fa4.interface"
"""The module that allocates for FlashAttention-4, whose outputs are moved."""


def span(x: Tensor) -> int:
    """Elements from the first to the last one of a tensor."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def far_apart(tensors: Sequence[Tensor], dim: int) -> tuple[Tensor, ...]:
    """The same values in one memory, whose last index of `dim` is more than 2^31 elements behind the first one.

    Nothing else of it is written, so on a CPU it takes few pages.
    """
    block = 2 * max(x.numel() for x in tensors) + LINE
    storage = torch.UntypedStorage(
        (FAR + block * (len(tensors) + 1)) * tensors[0].element_size(), device=tensors[0].device
    )
    views = []
    for i, x in enumerate(tensors):
        strides = list(x.contiguous().stride())
        strides[dim] = (FAR // (x.shape[dim] - 1) // ALIGNMENT + 1) * ALIGNMENT
        views.append(torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, i * block, x.shape, strides).copy_(x))
        assert span(views[-1]) > FAR
    return tuple(views)


class FarMemory:
    """A grid of lines, and which parts of all lines are given away."""

    def __init__(self, device: str) -> None:
        self.bytes = torch.empty(LINES * LINE, dtype=torch.uint8, device=device)
        self.used = 0

    def clear(self) -> None:
        """Everything is free, and on a GPU NaN (-1 as integers)."""
        self.used = 0
        if self.bytes.is_cuda:
            self.bytes.fill_(0xFF)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor whose longest dimension but the last is that of its rows; None where it cannot be far."""
        if len(shape) < 2 or max(shape[:-1]) < 2 or 0 in shape:
            return None
        rows = max(range(len(shape) - 1), key=lambda i: shape[i])
        of_row = [size for i, size in enumerate(shape) if i != rows]
        row = torch.empty(of_row, dtype=dtype, device="meta")
        row_bytes = row.numel() * row.element_size()
        if shape[rows] > MOST_ROWS or row_bytes > MOST_BYTES:
            return None
        lines = -(-FAR * row.element_size() // (LINE * (shape[rows] - 1)))
        start, self.used = self.used, self.used + -(-row_bytes // ALIGNMENT) * ALIGNMENT
        if self.used > LINE:
            raise MemoryError("lines are full: make them longer")
        strides = list(row.stride())
        strides.insert(rows, lines * LINE // row.element_size())
        x = self.bytes.view(dtype).as_strided(shape, strides, start // row.element_size())
        return x if span(x) > FAR else None

    def put(self, x: Tensor) -> Tensor:
        """The same values with far rows, where they can be."""
        far = self.empty(*x.shape, dtype=x.dtype)
        return x if far is None else far.copy_(x)

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """What our modules of kernels allocate has far rows, where it can."""
        from cute_kernels.fa4 import interface as fa4

        attend = fa4.attend

        def attend_far(*arguments: Any, **options: Any) -> tuple[Tensor | None, ...]:
            return tuple(None if x is None else self.put(x) for x in attend(*arguments, **options))

        users = [
            module
            for name, module in sys.modules.items()
            if name.startswith("cute_kernels.") and name != FA4_CALLS and getattr(module, "torch", None) is torch
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fa4, "attend", attend_far)
            for module in users:
                patch.setattr(module, "torch", FarTorch(self))
            yield


class FarTorch:
    """torch, as modules of kernels use it, but for where its tensors lie."""

    def __init__(self, memory: FarMemory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        far = self._memory.empty(*sizes, dtype=dtype)
        return torch.empty(sizes, dtype=dtype, device=device) if far is None else far

    def full(self, shape: Any, value: float, *, dtype: torch.dtype, device: Any) -> Tensor:
        return self.empty(shape, dtype=dtype, device=device).fill_(value)

    def zeros(self, shape: Any, *, dtype: torch.dtype, device: Any) -> Tensor:
        return self.full(shape, 0, dtype=dtype, device=device)

    def empty_like(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def zeros_like(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)
