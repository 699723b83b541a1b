"""Bytes of CPU tensors that a block of code keeps alive at once: PyTorch counts them for GPUs only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages that PyTorch's operators made within the block and that lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if id_of(tensor) not in given:  # no view of an argument, nor the argument itself
                storage = tensor.untyped_storage()
                self._made[id_of(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
