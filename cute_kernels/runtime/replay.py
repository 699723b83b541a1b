"""Replay of a call's launches, so that Python decides about a call once for all calls alike.

At everyday lengths the host takes longer than the GPU: plans, grids, lists' sizes, allocations and views. All of that
follows from options and from tensors' sizes, strides and dtypes, never from values. So `replayed` runs

    the first call of a key     as it is: kernels are compiled
    the second                  as it is, and records launches, PyTorch operators, allocations and views
    later ones                  from the recording: one workspace, views of it, the same launches in the same order

A recording has numbers and kernels, no tensors:

- A new tensor that the call returns is allocated as in the call. Others are ranges of one workspace, which share memory
  where the last use of one is before the first use of the other. Launches on a side stream (streams.py) use their
  memory until the call's stream waits for them.
- A view is made where it is first used, once for all that use it.
- An operator that computes (cumsum, sum, copy_) is called again.
- Launches that come again at the same addresses become a CUDA graph (graphs.py), unless an operator allocates.

Not recorded, and run as they are each time:

- calls that read a value or use a tensor from elsewhere
- calls of more than LARGEST elements, where the GPU takes longer than the host
"""

from __future__ import annotations

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime import graphs, streams
from cute_kernels.runtime.cuda_runtime import Launches
from cute_kernels.runtime.launches import THREAD, told
from cute_kernels.runtime.recorder import Event, Memory, Recorder, View, rebuilt, views_in

DEVICES = {"cuda"}
"""Types of devices whose calls are replayed."""

LARGEST = 1 << 29
"""Elements of all tensors that a replayed call is given."""

MOST = 256
"""Keys that are remembered; beyond, what did not come for longest is forgotten."""

Results = dict[str, Any]
"""Tensors or None, by name."""


def replayed(values: Sequence[Any], options: Hashable, body: Callable[[], Results]) -> Results:
    """`body()`, or the same from its recording.

    Args:
        values: all tensors that body reads, on one device, the first of them first; None and numbers among them.
        options: everything else that body depends on.
        body: launches kernels and calls PyTorch's operators, and returns tensors by name; reads no values of tensors.
    """
    device = values[0].device
    if device.type not in DEVICES or THREAD.listener is not None:
        return body()
    tensors: list[Tensor] = []
    storages: list[Any] = []  # addresses
    facts: list[Any] = []
    for x in values:
        if x is not None and isinstance(x, Tensor):
            address, offset, dtype = x.data_ptr(), x.storage_offset(), x.dtype
            tensors.append(x)
            storages.append(address - offset * dtype.itemsize)
            # All of a tensor that a call may depend on; addresses count by the alignment that kernels need
            facts.append((x.shape, x.stride(), offset, dtype, address % 16))
        else:
            facts.append(x)
    shared = None if len(set(storages)) == len(storages) else tuple(map(storages.index, storages))
    key = (device, options, shared, *facts)
    with _LOCK:
        known = _KNOWN.get(key)
        if known is not None:
            _KNOWN.move_to_end(key)
    if isinstance(known, Recording):
        return known(tensors)
    if known is None:
        _remember(key, sum(x.numel() for x in tensors) <= LARGEST)
    if not known:
        return body()
    recorder = Recorder(tensors)
    with recorder, told(recorder):
        results = body()
    returned = recorder.finish(results)
    _remember(key, returned is not None and Recording(recorder.memories, recorder.events, returned))
    return results


_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_KNOWN: OrderedDict[Any, Recording | bool] = OrderedDict()
"""By key, the latest last: a recording; True, run once; or False, not to be recorded."""


def _remember(key: Any, known: Recording | bool) -> None:
    with _LOCK:
        _KNOWN[key] = known
        while len(_KNOWN) > MOST:
            _KNOWN.popitem(last=False)


def forget() -> None:
    """All recordings, for tests."""
    with _LOCK:
        _KNOWN.clear()


# From a recording's events to its steps

WORKSPACE = -1
"""In place of the number of a memory."""


class _Place(int):
    """Where a tensor is, among those of a call."""


class _Step(NamedTuple):
    """A launch or an operator; or an allocation or a view, which make a tensor."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """With places instead of tensors."""
    filled: list[int]
    """Indices of arguments that are tensors or contain them."""
    result: _Place | None
    """Place of a new tensor, or None."""

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...], result: _Place | None) -> _Step:
        filled = [
            i for i, x in enumerate(arguments) if isinstance(x, (_Place, tuple, list)) and _filled(x, None) is not x
        ]
        return cls(function, arguments, filled, result)


class Recording:
    """A call's steps. It is called with the tensors of `replayed`."""

    def __init__(self, memories: list[Memory], events: list[Event], returned: dict[str, View | None]) -> None:
        self._device, self._count = memories[0].device, 0
        self._own: dict[int, tuple[_Place, View]] = {}
        """By memory: its own tensor, given, allocated or computed."""
        self._made: dict[Any, _Place] = {}
        """Views that earlier steps have made."""
        escaping = {view.memory for view in returned.values() if view is not None}
        self._offsets, size = _lay_out([x for x in memories if x.kind == "new" and x.number not in escaping])
        for memory in memories:
            if memory.kind == "given":
                self._add(memory.base)
        allocated = [x.base for x in memories if x.kind == "new" and x.number in escaping]
        allocated += [View(WORKSPACE, torch.uint8, (size,), (1,), 0)] if size > 0 else []
        self._allocations = [
            (self._add(x), partial(torch.empty_strided, x.size, x.stride, dtype=x.dtype, device=self._device))
            for x in allocated
        ]
        self._steps: list[_Step] = []
        for event in events:
            arguments = self._placed(event.arguments, self._steps)
            result = None if event.result is None else self._add(memories[event.result].base)
            self._steps.append(_Step.of(event.function, arguments, result))
        self._made.clear()  # a graph makes no views
        self._views: list[_Step] = []
        self._results = {name: self._placed(view, self._views) for name, view in returned.items()}
        self._addressed: list[_Place] | None = None
        """Tensors whose addresses launches depend on; None: these never become a graph."""
        if len(events) >= graphs.FEWEST and not any(event.allocates for event in events):
            used = {view.memory for event in events for view in views_in(event.arguments)}
            used = (used & self._own.keys()) | ({WORKSPACE} if size > 0 else set())
            self._addressed = [self._own[x][0] for x in sorted(used)]

    def __call__(self, tensors: list[Tensor]) -> Results:
        made: list[Any] = [*tensors, *[None] * (self._count - len(tensors))]
        for place, allocate in self._allocations:
            made[place] = allocate()
        try:
            if self._addressed is not None and self._device.type in graphs.DEVICES:
                key = (self, *[made[place].data_ptr() for place in self._addressed])
                graphs.launch(key, self._device, partial(_launches, self._steps, made))
            else:
                for function, arguments in _launches(self._steps, made):
                    function(*arguments)
        except BaseException:
            streams.close_all()
            raise
        for _ in _launches(self._views, made):
            pass
        return {name: x if x is None else made[x] for name, x in self._results.items()}

    def _add(self, base: View) -> _Place:
        """A tensor with a memory of its own."""
        self._own[base.memory] = self._next(), base
        return self._own[base.memory][0]

    def _next(self) -> _Place:
        self._count += 1
        return _Place(self._count - 1)

    def _placed(self, x: Any, steps: list[_Step]) -> Any:
        """An argument with places in place of views, which these steps make where none did.

        New memories are ranges of the workspace.
        """
        if isinstance(x, (tuple, list)) and not isinstance(x, View):
            return rebuilt(x, [self._placed(part, steps) for part in x])
        if not isinstance(x, View):
            return x
        begin = self._offsets.get(x.memory)
        if begin is not None:
            x = x._replace(memory=WORKSPACE, offset=begin // x.dtype.itemsize + x.offset)
        place, own = self._own[x.memory]
        if x == own:
            return place
        if x.dtype != own.dtype:
            place = self._view((x.memory, x.dtype), Tensor.view, (place, x.dtype), steps)
        return self._view(x, Tensor.as_strided, (place, *x[2:]), steps)

    def _view(self, key: Any, function: Callable[..., Any], arguments: tuple[Any, ...], steps: list[_Step]) -> _Place:
        if key not in self._made:
            self._made[key] = self._next()
            steps.append(_Step.of(function, arguments, self._made[key]))
        return self._made[key]


def _launches(steps: list[_Step], made: list[Any]) -> Launches:
    """Launches and operators without a result, with their arguments; what has a result is run meanwhile."""
    for function, arguments, filled, result in steps:
        given = list(arguments)
        for i in filled:
            x = arguments[i]
            given[i] = made[x] if type(x) is _Place else _filled(x, made)
        if result is None:
            yield function, tuple(given)
        else:
            made[result] = function(*given)


def _filled(x: Any, made: list[Any] | None) -> Any:
    """An argument with tensors in place of places; itself if there are none."""
    if isinstance(x, _Place):
        return None if made is None else made[x]
    if not isinstance(x, (tuple, list)):
        return x
    parts = [_filled(part, made) for part in x]
    return x if all(map(operator.is_, parts, x)) else rebuilt(x, parts)


def _lay_out(memories: list[Memory]) -> tuple[dict[int, int], int]:
    """Offsets in the workspace of memories that are used, by number; bytes of all."""
    offsets, size = {}, 0
    placed: list[tuple[int, int, int, int]] = []  # first use, last use, begin, end
    for memory in sorted((memory for memory in memories if memory.uses), key=lambda memory: -memory.size):
        first, last, begin = min(memory.uses), max(memory.uses), 0
        meanwhile = (other for other in placed if other[0] <= last and first <= other[1])
        for _, _, other_begin, other_end in sorted(meanwhile, key=operator.itemgetter(2)):
            if begin + memory.size <= other_begin:
                break
            begin = max(begin, other_end)
        offsets[memory.number] = begin
        placed.append((first, last, begin, begin + memory.size))
        size = max(size, begin + memory.size)
    return offsets, size
