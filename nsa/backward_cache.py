"""Gradients kept for calls that are made again with the same tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Gradients = tuple[Tensor, ...]


class BackwardCache:
    """The gradients of the last `capacity` different calls; the one used longest ago goes first.

    A call is the same when its tensors are the same objects, unchanged since, and its options are equal. The cache
    holds the tensors and their memory, so that neither can become another's while they are compared with; and it asks
    PyTorch's version counters, also those of the gradients it gave out: changed ones are computed again. What PyTorch
    does not count, it cannot see: values written through `Tensor.data`, by the replay of a CUDA graph, and by other
    libraries and kernels to a tensor's memory. Inference tensors have no counters, and their gradients are not kept;
    nor are those of calls that a CUDA graph captures.

    Memory: inputs and gradients of up to `capacity` calls, until they are replaced or `clear` is called. Not to be
    shared between threads.

    Args:
        capacity: calls to keep, at least 1.
    """

    def __init__(self, capacity: int = 4) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise TypeError(f"capacity must be an integer, got {capacity!r}")
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, tuple[_Snapshot, _Snapshot]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Let go of all tensors."""
        self._entries.clear()

    def gradients(self, inputs: tuple[Tensor, ...], options: Hashable, compute: Callable[[], Gradients]) -> Gradients:
        """What an unchanged call with these inputs and options computed, or else `compute()`, which is kept.

        Args:
            options: all that the gradients depend on beside `inputs`.
        """
        if any(tensor.is_inference() for tensor in inputs):
            return compute()
        if (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):  # the graph must hold the backward, not what it gave once
            return compute()
        key = (tuple(id(tensor) for tensor in inputs), options)  # entries hold them, so no other tensor has their ids
        found = self._entries.get(key)
        if found is not None and all(snapshot.is_unchanged() for snapshot in found):
            self._entries.move_to_end(key)
            return found[1].tensors
        self._entries.pop(key, None)  # before computing, which needs the memory
        taken = _Snapshot(inputs)
        result = compute()
        if any(tensor.is_inference() for tensor in result):
            return result
        self._entries[key] = (taken, _Snapshot(result))
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
        return result


class _Snapshot:
    """Tensors, held with their memory, and how to see that they have changed."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._states = self._now()

    def is_unchanged(self) -> bool:
        return self._states == self._now()

    def _now(self) -> list[tuple[object, ...]]:
        """PyTorch's count of changes in place, and which memory is looked at, and how."""
        return [
            (x._version, x.untyped_storage()._cdata, x.data_ptr(), x.dtype, x.shape, x.stride()) for x in self.tensors
        ]
