"""An LRU cache of gradients, for backward calls that are repeated with unchanged tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.common.checks import check_integer

Gradients = tuple[Tensor, ...]

STREAM_DEVICE_TYPES = ("cuda", "npu")
"""Device types whose work is queued on streams."""


class BackwardCache:
    """LRU cache of gradients of the last `capacity` different calls of `neighborhood_attention_backward`.

    Two calls are equal if their tensors are the same unchanged objects and their options are equal. The cache holds the
    tensors and their storages, so that ids and addresses are not reused, and compares PyTorch's version counters, also
    of the gradients it returned: changed ones are recomputed. Changes that PyTorch does not count are not noticed:
    writes through `Tensor.data`, by steps of PyTorch's fused optimizers, by the replay of a CUDA graph, and by other
    libraries. Inference tensors have no counters, so their gradients are not cached; nor are those of calls captured in
    a CUDA graph.

    Calls may come from different streams: a stream that gets another stream's gradients waits for them on the device,
    and their memory is not reused before it has finished with them. Do not share a cache between threads.

    Memory: inputs and gradients of up to `capacity` calls, until they are replaced or `clear` is called.

    Args:
        capacity: maximum number of calls to keep, at least 1. Default: 4.

    Raises:
        TypeError, ValueError: naming a capacity that is not an integer of at least 1.

    Examples:
        >>> import torch
        >>> from nsa.neighborhood import BackwardCache, neighborhood_attention_backward, neighborhood_attention_forward
        >>> q, k, v, do = (torch.randn(1, 20, 4, 16) for _ in range(4))
        >>> _, band = neighborhood_attention_forward(q, k, v)
        >>> cache = BackwardCache()
        >>> first = neighborhood_attention_backward(do, q, k, v, band, cache=cache)
        >>> again = neighborhood_attention_backward(do, q, k, v, band, cache=cache)
        >>> first[0] is again[0], len(cache)
        (True, 1)
    """

    def __init__(self, capacity: int = 4) -> None:
        check_integer("capacity", capacity, 1)
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Release all tensors."""
        self._entries.clear()

    def gradients(self, inputs: tuple[Tensor, ...], options: Hashable, compute: Callable[[], Gradients]) -> Gradients:
        """Return the cached gradients of an unchanged call with these inputs and options, else cache those of
        `compute()`.

        Args:
            options: everything besides `inputs` on which the gradients depend.
        """
        if any(tensor.is_inference() for tensor in inputs):
            return compute()
        # A captured graph must contain the backward, not a cached result
        if _is_captured(inputs[0].device):
            return compute()
        key = (tuple(id(tensor) for tensor in inputs), options)  # entries hold the tensors, so ids stay unique
        found = self._entries.get(key)
        if found is not None and found.inputs.is_unchanged() and found.gradients.is_unchanged():
            self._entries.move_to_end(key)
            for producer in found.producers:
                producer.hand_over(found.gradients.tensors)
            return found.gradients.tensors
        self._entries.pop(key, None)  # free its memory before computing
        snapshot = _Snapshot(inputs)
        result = compute()
        if any(tensor.is_inference() for tensor in result):
            return result
        devices = {tensor.device for tensor in result if tensor.device.type in STREAM_DEVICE_TYPES}
        self._entries[key] = _Entry(snapshot, _Snapshot(result), [_Producer(device) for device in devices])
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
        return result


class _Snapshot:
    """Tensors, held with their storages, and their state, to detect later changes."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._states = self._now()

    def is_unchanged(self) -> bool:
        return self._states == self._now()

    def _now(self) -> list[tuple[object, ...]]:
        """Version counter, storage, address, dtype, shape and strides of each tensor."""
        return [
            (x._version, x.untyped_storage()._cdata, x.data_ptr(), x.dtype, x.shape, x.stride()) for x in self.tensors
        ]


class _Producer:
    """The stream that computes gradients on a device, and an event recorded after them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _current_stream(device)
        self._event = self._stream.record_event()

    def hand_over(self, tensors: Gradients) -> None:
        """Make the device's current stream wait for the tensors, and their memory wait for that stream."""
        reader = _current_stream(self._device)
        if reader == self._stream:
            return
        reader.wait_event(self._event)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(reader)


def _is_captured(device: torch.device) -> bool:
    """True if the current stream of a device, which need not be the current device, is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


class _Entry(NamedTuple):
    inputs: _Snapshot
    gradients: _Snapshot
    producers: list[_Producer]
    """One producer per device with streams."""
