"""CUDA graphs on a CPU: what was captured is known by addresses only, as to CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OnlyViews(TorchDispatchMode):
    """What may be called while a graph is captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ in ("as_strided", "detach", "view"), function
        return function(*args, **(kwargs or {}))


def without_tensors(x: Any) -> Any:
    """An argument, with addresses in place of tensors."""
    if isinstance(x, Tensor):
        return x.data_ptr(), x.dtype, x.shape, x.stride()
    return [without_tensors(part) for part in x] if isinstance(x, (list, tuple)) else x


def from_memory(x: Any) -> Any:
    match x:
        case (int(address), torch.dtype() as dtype, size, stride):
            elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
            if elements == 0:
                return torch.empty(size, dtype=dtype)
            memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
            return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)
        case list():
            return [from_memory(part) for part in x]
    return x


class FakeGraph:
    """Launches on a CPU."""

    launched = 0

    def __init__(self, device: torch.device, launches: Any) -> None:
        with OnlyViews():
            self.nodes = [(function, without_tensors(arguments)) for function, arguments in launches]

    def launch(self) -> None:
        FakeGraph.launched += 1
        for function, arguments in self.nodes:
            function(*from_memory(arguments))


def scale(x: Tensor, out: Tensor, factor: float) -> None:
    """A kernel: as many elements of x as out has, over and over."""
    numbers = torch.arange(out.numel()) % x.numel()
    out.copy_(x.flatten()[numbers].reshape(out.shape) * factor)
