"""Gradients kept for calls that are made again with the same tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor, ...]

WITH_STREAMS = ("cuda", "npu")
"""Types of devices whose work is queued on streams."""


class BackwardCache:
    """The gradients of the last `capacity` different calls; the one used longest ago goes first.

    A call is the same when its tensors are the same objects, unchanged since, and its options are equal. The cache
    holds the tensors and their memory, so that neither can become another's while they are compared with; and it asks
    PyTorch's version counters, also those of the gradients it gave out: changed ones are computed again. What PyTorch
    does not count, it cannot see: values written through `Tensor.data`, by the replay of a CUDA graph, and by other
    libraries and kernels to a tensor's memory. Inference tensors have no counters, and their gradients are not kept;
    nor are those of calls that a CUDA graph captures.

    Calls may be made on different streams: one that is given what another stream computes waits for it, on the device,
    and the gradients' memory is not reused before that call's stream is done with them. Not to be shared between
    threads.

    Memory: inputs and gradients of up to `capacity` calls, until they are replaced or `clear` is called.

    Args:
        capacity: calls to keep, at least 1.
    """

    def __init__(self, capacity: int = 4) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise TypeError(f"capacity must be an integer, got {capacity!r}")
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

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
        if found is not None and found.inputs.is_unchanged() and found.gradients.is_unchanged():
            self._entries.move_to_end(key)
            for computed in found.computed:
                computed.hand_out(found.gradients.tensors)
            return found.gradients.tensors
        self._entries.pop(key, None)  # before computing, which needs the memory
        taken = _Snapshot(inputs)
        result = compute()
        if any(tensor.is_inference() for tensor in result):
            return result
        devices = {tensor.device for tensor in result if tensor.device.type in WITH_STREAMS}
        self._entries[key] = _Entry(taken, _Snapshot(result), [_Computed(device) for device in devices])
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


class _Computed:
    """Where gradients are computed, and when they are: behind all that a device's current stream has been given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _current_stream(device)
        self._event = self._stream.record_event()

    def hand_out(self, tensors: Gradients) -> None:
        """To the device's current stream, which waits for them and may still read them when they are let go of."""
        reader = _current_stream(self._device)
        if reader == self._stream:
            return
        reader.wait_event(self._event)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(reader)


def _current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


class _Entry(NamedTuple):
    inputs: _Snapshot
    gradients: _Snapshot
    computed: list[_Computed]
    """Of each device with streams."""
