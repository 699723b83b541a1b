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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import graphs, streams
from cute_kernels.runtime.cuda_runtime import Launches
from cute_kernels.runtime.launches import THREAD, start_of, told

DEVICES = {"cuda"}
"""Types of devices whose calls are replayed."""

LARGEST = 1 << 29
"""Elements of all tensors that a replayed call is given."""

MOST = 256
"""Keys that are remembered; beyond, what did not come for longest is forgotten."""

ALIGNMENT = 512
"""Alignment in bytes of ranges of a workspace, as PyTorch aligns allocations."""

NEW = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ZEROS = {"zeros", "zeros_like", "new_zeros"}
"""Operators by name: their results are new, and not computed."""
INTO_GIVEN = {"add", "add_", "copy_", "cumsum", "fill_", "zero_"}
"""Operators by name that allocate nothing where they are given what they write: cumsum of several rows, along them."""

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

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
    recorder = _Recorder(tensors)
    with recorder, told(recorder):
        results = body()
    _remember(key, recorder.finish(results) or False)
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


# Recording


class _View(NamedTuple):
    """A tensor of a recording."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, memory: int, x: Tensor) -> _View:
        return cls(memory, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))


@dataclass
class _Memory:
    """Memory that holds tensors: given to the call, or new."""

    kind: str
    """"given", "new" or "computed"."""
    base: _View
    """The tensor as it was given, allocated or computed."""
    device: torch.device
    size: int
    """Bytes of a range of the workspace."""
    storage: StorageWeakRef
    """Keeps the storage's identity from being reused, and not its memory."""
    uses: list[int] = field(default_factory=list)
    """Events that use it: where each begins, and the last one before which it has ended."""

    @classmethod
    def of(cls, number: int, x: Tensor, kind: str) -> _Memory:
        storage = x.untyped_storage()
        size = max(-(-storage.nbytes() // ALIGNMENT), 1) * ALIGNMENT
        return cls(kind, _View.of(number, x), x.device, size, StorageWeakRef(storage))

    @property
    def number(self) -> int:
        return self.base.memory


@dataclass
class _Event:
    """A launch, or an operator that computes."""

    function: Callable[..., Any]
    arguments: Any
    """Each tensor as a _View."""
    allocates: bool
    result: int | None
    """Memory of an operator's new tensor."""
    ends: int
    """The event before which it has ended."""


class _Recorder(TorchDispatchMode):
    """Notes what its thread launches, and PyTorch's operators."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.refused = False
        self.memories: list[_Memory] = []
        self.events: list[_Event] = []
        self._chunks: list[int] = []
        """The first event of each chunk on a side stream that the call's stream has not waited for, and of this."""
        self._launching = False
        """True while a kernel runs, which may call PyTorch where it is interpreted (tests/support)."""
        self._memory_of: dict[Any, int] = {}
        """By storage, and by storage and dtype: tensors of one storage may be given in several."""
        for x in tensors:
            self._add(x, "given")

    def _run(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._launching:
            return result
        name = function.overloadpacket.__name__
        results = result if isinstance(result, (list, tuple)) else [result]
        new = [x for x in results if not isinstance(x, Tensor) or _storage(x) not in self._memory_of]
        if name in NEW or name in ZEROS:
            self._add(result, "new")
            if name in ZEROS:
                self._note(Tensor.zero_, (result,))
        elif function._schema.is_mutable:
            self._note(function, args, kwargs, allocates=name not in INTO_GIVEN)
        elif len(new) == len(results) == 1 and isinstance(result, Tensor):
            self._note(function, args, kwargs, allocates=True, result=len(self.memories))
            self._add(result, "computed")
        elif new:  # a value was read, or several tensors were computed
            self.refused = True
        return result

    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self._note(start_of(kernel), arguments)
        if kernel is streams.fork:
            self._chunks.append(len(self.events) - 1)
        elif kernel is streams.join:
            self._wait(arguments[-1])
        self._launching = True
        start_of(kernel)(*arguments)
        self._launching = False

    def compile_ahead(self, kernel: Any) -> None:
        """The call before has done so."""

    def _wait(self, left: int) -> None:
        """The call's stream waits for all chunks but the last ones: only now their events have ended."""
        while len(self._chunks) > left:
            begin = self._chunks.pop(0)
            end = self._chunks[0] if self._chunks else len(self.events)
            for event in self.events[begin:end]:
                event.ends = len(self.events)

    def _note(
        self, function: Any, args: Any, kwargs: Any = None, *, allocates: bool = False, result: int | None = None
    ) -> None:
        if kwargs:
            function, args = partial(_call_with_keywords, function, tuple(kwargs)), (*args, *kwargs.values())
        number = len(self.events)
        self.events.append(_Event(function, self._described(tuple(args)), allocates, result, number + 1))

    def _add(self, x: Tensor, kind: str) -> None:
        for key in (_storage(x), (_storage(x), x.dtype)):
            self._memory_of.setdefault(key, len(self.memories))
        self.memories.append(_Memory.of(len(self.memories), x, kind))

    def _described(self, x: Any) -> Any:
        """An argument without tensors."""
        if isinstance(x, Tensor) and _storage(x) in self._memory_of:
            return _View.of(self._memory_of.get((_storage(x), x.dtype), self._memory_of[_storage(x)]), x)
        if isinstance(x, (tuple, list)):
            return _like(x, [self._described(part) for part in x])
        if not isinstance(x, CONSTANTS) and not type(x).__module__.startswith("cutlass"):
            self.refused = True  # a tensor from elsewhere, or what may hold one
        return None if isinstance(x, Tensor) else x

    def finish(self, results: Results) -> Recording | None:
        """The recording of a call that has ended; None: it is not to be replayed."""
        returned = {name: self._described(x) for name, x in results.items()}
        for number, event in enumerate(self.events):
            for view in _views(event.arguments):
                self.memories[view.memory].uses += number, event.ends - 1
        devices = {memory.device for memory in self.memories}
        return None if self.refused or len(devices) > 1 else Recording(self.memories, self.events, returned)


# Not in the class statement: there PyTorch wraps it in torch._dynamo.disable, whose import takes seconds of a process
# that compiles nothing. Compiled code calls our operators where Dynamo is off anyway.
_Recorder.__torch_dispatch__ = _Recorder._run  # type: ignore[assignment]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _views(x: Any) -> Iterator[_View]:
    """In nested tuples and lists."""
    if isinstance(x, _View):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _views(part)


def _call_with_keywords(function: Callable[..., Any], names: tuple[str, ...], *arguments: Any) -> Any:
    """Args: names: of the last arguments."""
    first = len(arguments) - len(names)
    return function(*arguments[:first], **dict(zip(names, arguments[first:], strict=True)))


# From a recording's events to its steps

WORKSPACE = -1
"""In place of the number of a memory."""


class _Place(int):
    """Where a tensor is, among those of a call."""


class _Step(NamedTuple):
    function: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, _Place]]
    """Arguments that are tensors: their index, and the place of the tensor."""
    nested: list[tuple[int, Any]]
    """Arguments that contain tensors: their index, and the argument with places instead of tensors."""
    result: _Place | None
    """Place of an operator's new tensor, or None."""


class Recording:
    """A call's steps. It is called with the tensors of `replayed`."""

    def __init__(self, memories: list[_Memory], events: list[_Event], returned: dict[str, _View | None]) -> None:
        self._device = memories[0].device
        escaping = {view.memory for view in returned.values() if view is not None}
        inside = [x for x in memories if x.kind == "new" and x.number not in escaping]
        self._offsets, size = _lay_out(inside)
        self._how: list[tuple[_Place, torch.dtype | None, Any] | None] = []
        """By place: a view's base, and its dtype or its sizes, strides and offset; None: no view."""
        self._places: dict[Any, _Place] = {}
        self._own: dict[int, tuple[_Place, torch.dtype]] = {}
        """By memory: the place of its own tensor."""
        self._allocations: list[tuple[_Place, Callable[[], Tensor]]] = []
        workspace = _View(WORKSPACE, torch.uint8, (size,), (1,), 0)
        allocated = {WORKSPACE} if size > 0 else set()
        allocated |= {x.number for x in memories if x.kind == "new" and x.number in escaping}
        for view in (*[x.base for x in memories if x.number not in self._offsets], workspace):
            place = self._place_of(view, None)
            self._own[view.memory] = place, view.dtype
            if view.memory in allocated:
                how: dict[str, Any] = {"dtype": view.dtype, "device": self._device}
                self._allocations.append((place, partial(torch.empty_strided, view.size, view.stride, **how)))
        self._steps = [self._step(event.function, event.arguments, event.result) for event in events]
        self._results = {name: self._placed(view) for name, view in returned.items()}
        self._views = [name for name, x in self._results.items() if x is not None and self._how[x] is not None]
        """Results that are views of others, or of what is given."""
        self._addressed: list[_Place] | None = None
        """Tensors whose addresses launches depend on; None: these never become a graph."""
        if len(events) >= graphs.FEWEST and not any(event.allocates for event in events):
            used = {view.memory for event in events for view in _views(event.arguments)}
            used = {x for x in used if x in self._own} | ({WORKSPACE} if size > 0 else set())
            self._addressed = [self._own[x][0] for x in sorted(used)]

    def __call__(self, tensors: list[Tensor]) -> Results:
        made: list[Any] = [*tensors, *[None] * (len(self._how) - len(tensors))]
        for place, allocate in self._allocations:
            made[place] = allocate()
        launches = partial(self._launches, made)
        try:
            if self._addressed is not None and self._device.type in graphs.DEVICES:
                graphs.launch((self, *[made[i].data_ptr() for i in self._addressed]), self._device, launches)
            else:
                for function, arguments in launches():
                    function(*arguments)
        except BaseException:
            streams.close_all()
            raise
        results = {name: x if x is None else made[x] for name, x in self._results.items()}
        for name in self._views:
            results[name] = self._make(self._results[name], made)
        return results

    def _launches(self, made: list[Any]) -> Launches:
        """Launches and operators without a result, with their arguments; operators with one are run meanwhile."""
        for function, arguments, tensors, nested, result in self._steps:
            arguments = arguments.copy()
            for i, place in tensors:
                x = made[place]
                arguments[i] = self._make(place, made) if x is None else x
            for i, x in nested:
                arguments[i] = self._filled(x, made)
            if result is None:
                yield function, tuple(arguments)
            else:
                made[result] = function(*arguments)

    def _make(self, place: _Place, made: list[Any]) -> Any:
        """The tensor of a place; a view is made where it is used first."""
        x, how = made[place], self._how[place]
        if x is None and how is not None:
            base, dtype, view = how
            x = made[base]
            x = self._make(base, made) if x is None else x
            made[place] = x = x.as_strided(*view) if dtype is None else x.view(dtype)
        return x

    def _filled(self, x: Any, made: list[Any]) -> Any:
        """An argument with tensors in place of places."""
        if isinstance(x, _Place):
            return self._make(x, made)
        return _like(x, [self._filled(part, made) for part in x]) if isinstance(x, (tuple, list)) else x

    def _step(self, function: Callable[..., Any], arguments: tuple[Any, ...], result: int | None) -> _Step:
        placed = [(i, self._placed(x)) for i, x in enumerate(arguments) if any(True for _ in _views(x))]
        tensors = [(i, x) for i, x in placed if isinstance(x, _Place)]
        nested = [(i, x) for i, x in placed if not isinstance(x, _Place)]
        return _Step(function, [*arguments], tensors, nested, None if result is None else self._own[result][0])

    def _placed(self, x: Any) -> Any:
        """An argument with places in place of views; new memories are ranges of the workspace."""
        if isinstance(x, _View):
            begin = self._offsets.get(x.memory)
            if begin is not None:
                x = x._replace(memory=WORKSPACE, offset=begin // x.dtype.itemsize + x.offset)
            base, dtype = self._own[x.memory]
            if x.dtype != dtype:
                base = self._place_of((x.memory, x.dtype), (base, x.dtype, None))
            return self._place_of(x, (base, None, x[2:]))
        return _like(x, [self._placed(part) for part in x]) if isinstance(x, (tuple, list)) else x

    def _place_of(self, key: Any, how: Any) -> _Place:
        if key not in self._places:
            self._places[key] = _Place(len(self._how))
            self._how.append(how)
        return self._places[key]


def _like(x: Any, parts: list[Any]) -> Any:
    """A tuple, a named tuple or a list."""
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


def _lay_out(memories: list[_Memory]) -> tuple[dict[int, int], int]:
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
