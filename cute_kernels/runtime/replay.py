"""Replay of a call's launches: what Python decides about a call, it decides once for all calls alike.

At everyday lengths the host takes longer than the GPU: plans, grids, lists' sizes, allocations and views. All of that
follows from options and from tensors' sizes, strides and dtypes, never from values. So `replayed` runs

    the first call of a key     as it is: kernels are compiled, FlashAttention-4's are found (fa4/launch.py)
    the second                  as it is, and records its launches, PyTorch operators, allocations and views
    later ones                  from the recording: one workspace, views of it, the same launches in the same order

A recording has numbers and kernels, no tensors:

- A new tensor that the call returns is allocated as in the call. Others are ranges of one workspace. Ranges share
  memory where the last use of one is before the first use of the other; all is one stream's work, in order.
- New tensors of zeros lie at the workspace's beginning, and one fill writes all of them.
- A view is made where it is first used, once for all that use it.
- An operator that computes (cumsum, sum, copy_) is called again.
- Launches that come again at the same addresses become a CUDA graph (graphs.py), unless an operator allocates.

Not recorded, and run as they are each time: calls during which something calls `refuse` (side streams,
FlashAttention-4's interface), calls that read a value or use a tensor from elsewhere, and those of more than LARGEST
elements: there the GPU takes longer than the host, and recording holds all that the call allocates until it ends.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import graphs
from cute_kernels.runtime.cuda_runtime import Launches

DEVICES = {"cuda"}
"""Types of devices whose calls are replayed."""

LARGEST = 1 << 28
"""Elements of all tensors that a replayed call is given."""

MOST = 256
"""Keys that are remembered; beyond, what did not come for longest is forgotten."""

ALIGNMENT = 512
"""Bytes; of ranges of a workspace, as of PyTorch's allocations."""

NEW = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ZEROS = {"zeros", "zeros_like", "new_zeros"}
"""Operators by name: their results are new, and not computed."""
INTO_GIVEN = {"add_", "copy_", "cumsum", "fill_", "zero_"}
"""Operators by name that allocate nothing where they are given what they write: cumsum of several rows, along them."""

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Results = dict[str, Any]
"""Tensors or None, by name."""
Step = tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]], int]
"""A function, what finds its arguments among the values, and where its result goes."""


def replayed(values: Sequence[Any], options: Hashable, body: Callable[[], Results]) -> Results:
    """`body()`, or the same from its recording.

    Args:
        values: all tensors that body reads, on one device, the first of them first; None and numbers among them.
        options: everything else that body depends on.
        body: launches kernels and calls PyTorch's operators, and returns tensors by name; reads no values of tensors.
    """
    device = values[0].device
    if device.type not in DEVICES or _recorder() is not None:
        return body()
    tensors, facts = [], []
    for x in values:
        if x is not None and isinstance(x, Tensor):
            tensors.append(x)
            facts.append(_facts(x))
        else:
            facts.append(x)
    key = (device, options, _shared(tensors), *facts)
    with _LOCK:
        known = _KNOWN.get(key)
        if known is not None:
            _KNOWN.move_to_end(key)
    if isinstance(known, Recording):
        return known(tensors)
    if known is None:
        _remember(key, _Seen(worth=sum(x.numel() for x in tensors) <= LARGEST))
        return body()
    if not known.worth:
        return body()
    with _Recorder(tensors) as recorder:
        results = body()
    recording = recorder.finish(results)
    _remember(key, recording or _Seen(worth=False))
    return results


def launch(run: Callable[..., None], *arguments: Any) -> None:
    """`run(*arguments)`: launches a kernel. Every launch of a call that may be replayed goes through here."""
    recorder = _recorder()
    if recorder is None:
        run(*arguments)
    else:
        recorder.launch(run, arguments)


def refuse() -> None:
    """The call that runs in this thread is not to be replayed."""
    if (recorder := _recorder()) is not None:
        recorder.refused = True


def forget() -> None:
    """All recordings, for tests."""
    with _LOCK:
        _KNOWN.clear()


# What is known of calls


class _Seen(NamedTuple):
    """A call that was run."""

    worth: bool
    """Recording."""


_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_KNOWN: OrderedDict[Any, Recording | _Seen] = OrderedDict()
"""What came last is the last."""
_THREAD = threading.local()


def _recorder() -> _Recorder | None:
    """Of this thread."""
    found: _Recorder | None = getattr(_THREAD, "recorder", None)
    return found


def _remember(key: Any, known: Recording | _Seen) -> None:
    with _LOCK:
        _KNOWN[key] = known
        while len(_KNOWN) > MOST:
            _KNOWN.popitem(last=False)


def _facts(x: Tensor) -> Any:
    """Of a tensor, all that a call may depend on; addresses count by the alignment that kernels need."""
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.data_ptr() % 16


def _shared(tensors: list[Tensor]) -> Any:
    """Which tensors are the same one."""
    ids = [id(x) for x in tensors]
    return None if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


# Recording


class _Memory(NamedTuple):
    """What holds tensors: one of the call's, or new."""

    number: int
    base: Tensor
    """The tensor as it was given, allocated or computed."""
    kind: str
    """"given", "new", "zeros" or "computed"."""


class _View(NamedTuple):
    """A tensor of a recording."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Event(NamedTuple):
    """A launch, or an operator that computes."""

    function: Callable[..., Any]
    arguments: Any
    """Each tensor as a _View."""
    allocates: bool
    result: int | None = None
    """Memory of an operator's new tensor."""


class _Recorder(TorchDispatchMode):
    """Notes what its thread launches, and PyTorch's operators."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.refused = False
        self.memories: list[_Memory] = []
        self.events: list[_Event] = []
        self._launching = False
        """A kernel, which may call PyTorch where it is interpreted (tests/support)."""
        self._memory_of: dict[int, int] = {}
        self._kept: list[Tensor] = []
        """All tensors, so that none gets the id of another."""
        for x in tensors:
            self._add(x, "given")

    def __enter__(self) -> _Recorder:
        _THREAD.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _THREAD.recorder = None

    def _run(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._launching:
            return result
        name = function.overloadpacket.__name__
        if name in NEW or name in ZEROS:
            self._add(result, "new" if name in NEW else "zeros")
        elif function._schema.is_mutable:
            self._note_operator(function, args, kwargs, allocates=name not in INTO_GIVEN)
        elif isinstance(result, (list, tuple)):
            self._note_result(function, args, kwargs, *result)
        else:
            self._note_result(function, args, kwargs, result)
        return result

    def _note_result(self, function: Any, args: Any, kwargs: Any, *results: Any) -> None:
        """Of an operator that gives views, or computes a new tensor."""
        for x in results:
            source = next((s for s in args if isinstance(s, Tensor) and _share_memory(s, x)), None)
            if source is not None and id(source) in self._memory_of:
                self._kept.append(x)
                self._memory_of.setdefault(id(x), self._memory_of[id(source)])
            elif source is None and isinstance(x, Tensor) and len(results) == 1:
                self._note_operator(function, args, kwargs, allocates=True, result=len(self.memories))
                self._add(x, "computed")
            else:  # a value was read, or several were computed
                self.refused = True

    def _note_operator(self, function: Any, args: Any, kwargs: Any, **event: Any) -> None:
        if kwargs:
            function, args = partial(_call_with_keywords, function, tuple(kwargs)), (*args, *kwargs.values())
        self.note(function, args, **event)

    def launch(self, run: Callable[..., None], arguments: Sequence[Any]) -> None:
        self.note(run, arguments, allocates=False)
        self._launching = True
        run(*arguments)
        self._launching = False

    def note(
        self, function: Callable[..., Any], arguments: Sequence[Any], *, allocates: bool, result: int | None = None
    ) -> None:
        self.events.append(_Event(function, self._described(tuple(arguments)), allocates, result))

    def _add(self, x: Tensor, kind: str) -> None:
        self._kept.append(x)
        self._memory_of.setdefault(id(x), len(self.memories))
        self.memories.append(_Memory(len(self.memories), x, kind))

    def _described(self, x: Any) -> Any:
        """An argument without tensors."""
        if isinstance(x, Tensor):
            if id(x) in self._memory_of:
                memory = self._memory_of[id(x)]
                return _View(memory, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))
            self.refused = True  # from elsewhere
        elif isinstance(x, (tuple, list)):
            parts = [self._described(part) for part in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        elif not isinstance(x, CONSTANTS) and not type(x).__module__.startswith("cutlass"):
            self.refused = True  # may hold a tensor
        return None if isinstance(x, Tensor) else x

    def finish(self, results: Results) -> Recording | None:
        """The recording of a call that has ended; None: it is not to be replayed."""
        returned = {name: self._described(x) for name, x in results.items()}
        devices = {memory.base.device for memory in self.memories}
        return None if self.refused or len(devices) > 1 else Recording(_Builder(self.memories, self.events, returned))


# Not in the class statement: there PyTorch wraps it in torch._dynamo.disable, whose import takes seconds of a process
# that compiles nothing. Compiled code calls our operators where Dynamo is off anyway.
_Recorder.__torch_dispatch__ = _Recorder._run  # type: ignore[assignment]


# From a recording's events to its steps


class Recording:
    """A call's steps. It is called with the tensors of `replayed`."""

    def __init__(self, built: _Builder) -> None:
        self._constants, self._num_tensors, self._device = built.values, built.num_tensors, built.device
        self._first, self._steps, self._results = built.first, built.steps, built.results
        self._ignored, self._addressed = built.ignored, built.addressed

    def __call__(self, tensors: list[Tensor]) -> Results:
        values = self._constants.copy()
        values[: self._num_tensors] = tensors
        for function, arguments, result in self._first:
            values[result] = function(*arguments(values))
        launches = partial(self._launches, values)
        if self._addressed is not None and self._device.type in graphs.DEVICES:
            graphs.launch((self, *[values[i].data_ptr() for i in self._addressed]), self._device, launches)
        else:
            for launch, given in launches():
                launch(*given)
        return {name: values[i] for name, i in self._results.items()}

    def _launches(self, values: list[Any]) -> Launches:
        """Steps whose results nobody takes, with their arguments. The others are run meanwhile."""
        for function, arguments, result in self._steps:
            if result == self._ignored:
                yield function, arguments(values)
            else:
                values[result] = function(*arguments(values))


class _Builder:
    """Lays out the workspace, and makes steps of events."""

    def __init__(self, memories: list[_Memory], events: list[_Event], returned: dict[str, _View | None]) -> None:
        self.memories, self.events = memories, events
        self.device = memories[0].base.device
        self.num_tensors = sum(memory.kind == "given" for memory in memories)
        self.values: list[Any] = [None] * self.num_tensors
        self.ignored = self._new()
        self.first: list[Step] = []
        """Allocations, and views of them that are returned."""
        self.steps: list[Step] = []
        self.found: dict[Any, int] = {}
        """Where a value is, by what it is."""
        escaping = {view.memory for view in returned.values() if view is not None}
        self.inside = [m for m in memories if m.kind in ("new", "zeros") and m.number not in escaping]
        self.offsets: dict[int, int] = {}
        """Bytes from the workspace's beginning, by memory."""
        self.addressed: list[int] | None = None
        """Where tensors are whose addresses launches depend on; None: these never become a graph."""
        self._build(returned)

    def _build(self, returned: dict[str, _View | None]) -> None:
        zeros, size = self._lay_out()
        if size > 0:
            self.found["workspace"] = self._step(_allocation((size,), (1,), torch.uint8, self.device))
        computed = {memory.number for memory in self.memories if memory.kind == "computed"}
        views = {name: None if view is None or view.memory in computed else view for name, view in returned.items()}
        self.results = {name: self._value(view) for name, view in views.items()}
        self.first, self.steps = self.steps, []
        fills = [memory.number for memory in self.memories if memory.kind == "zeros" and memory.number in self.found]
        if zeros > 0:
            fill = _View(-1, torch.float32, (zeros // torch.float32.itemsize,), (1,), 0)
            self._step(Tensor.zero_, self._range(fill), result=self.ignored)
        for number in fills:
            self._step(Tensor.zero_, self.found[number], result=self.ignored)
        for event in self.events:
            arguments = [self._value(x) for x in event.arguments]
            if event.result is None:
                self._step(event.function, *arguments, result=self.ignored)
            else:
                self.found[event.result] = self._step(event.function, *arguments)
        self.results |= {name: self._value(view) for name, view in returned.items() if views[name] is not view}
        if len(self.events) >= graphs.FEWEST and not any(event.allocates for event in self.events):
            used = {view.memory for event in self.events for view in _views(event.arguments)}
            bases = [self.found[x] for x in used if x in self.found]
            self.addressed = sorted({*bases, *([self.found["workspace"]] if size > 0 else [])})

    # Workspace

    def _lay_out(self) -> tuple[int, int]:
        """Offsets of all memories of the workspace: zeros first. Returns bytes of zeros and of all."""
        uses: dict[int, list[int]] = {}
        for i, event in enumerate(self.events):
            for view in _views(event.arguments):
                uses.setdefault(view.memory, []).append(i)
        zeros = 0
        for memory in self.inside:
            if memory.kind == "zeros":
                self.offsets[memory.number], zeros = zeros, zeros + _bytes(memory.base)
        size = zeros
        placed: list[tuple[int, int, int, int]] = []  # first use, last use, begin, end
        for memory in sorted(self.inside, key=lambda memory: -_bytes(memory.base)):
            if memory.kind == "new" and memory.number in uses:
                first, last = uses[memory.number][0], uses[memory.number][-1]
                begin = zeros
                for _, _, other_begin, other_end in sorted(
                    (p for p in placed if p[0] <= last and first <= p[1]), key=operator.itemgetter(2)
                ):
                    if begin + _bytes(memory.base) <= other_begin:
                        break
                    begin = max(begin, other_end)
                self.offsets[memory.number] = begin
                placed.append((first, last, begin, begin + _bytes(memory.base)))
                size = max(size, begin + _bytes(memory.base))
        return zeros, size

    # Values: each is made once, before what uses it first

    def _value(self, x: Any) -> int:
        if isinstance(x, _View):
            return self._range(x) if x.memory in self.offsets else self._view(x)
        if isinstance(x, (tuple, list)) and any(True for _ in _views(x)):
            parts = tuple(self._value(part) for part in x)
            make = partial(_make, type(x))
            return self._once((type(x), parts), make, *parts)
        return self._constant(x)

    def _constant(self, x: Any) -> int:
        key = ("constant", id(x))
        if key not in self.found:
            self.found[key] = self._new(x)
        return self.found[key]

    def _range(self, view: _View) -> int:
        """A view of the workspace."""
        begin = self.offsets.get(view.memory, 0)
        typed = self._as_dtype(self.found["workspace"], view.dtype)
        return self._strided(typed, view.size, view.stride, begin // view.dtype.itemsize + view.offset)

    def _view(self, view: _View) -> int:
        """A tensor that is given, computed or returned, or a view of it."""
        memory = self.memories[view.memory]
        base = memory.base
        if view.memory not in self.found:
            if memory.kind == "given":
                self.found[view.memory] = view.memory
            else:
                self.found[view.memory] = self._step(
                    _allocation(tuple(base.shape), base.stride(), base.dtype, base.device)
                )
        where = self.found[view.memory]
        if (view.size, view.stride, view.offset) == (tuple(base.shape), base.stride(), base.storage_offset()):
            return where
        if view.dtype != base.dtype:
            where = self._as_dtype(where, view.dtype)
        return self._strided(where, view.size, view.stride, view.offset)

    def _as_dtype(self, where: int, dtype: torch.dtype) -> int:
        return self._once((where, dtype), Tensor.view, where, self._constant(dtype))

    def _strided(self, where: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int:
        how = (self._constant(x) for x in (size, stride, offset))
        return self._once((where, size, stride, offset), Tensor.as_strided, where, *how)

    # Steps

    def _once(self, key: Any, function: Callable[..., Any], *arguments: int) -> int:
        if key not in self.found:
            self.found[key] = self._step(function, *arguments)
        return self.found[key]

    def _step(self, function: Callable[..., Any], *arguments: int, result: int | None = None) -> int:
        result = self._new() if result is None else result
        self.steps.append((function, _taking(arguments), result))
        return result

    def _new(self, value: Any = None) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _views(x: Any) -> Iterator[_View]:
    """In nested tuples and lists."""
    if isinstance(x, _View):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _views(part)


def _share_memory(x: Any, y: Any) -> bool:
    return isinstance(y, Tensor) and x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _bytes(x: Tensor) -> int:
    """Of a range of the workspace for a tensor's memory."""
    return max(-(-x.untyped_storage().nbytes() // ALIGNMENT), 1) * ALIGNMENT


def _taking(arguments: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes these values, as a tuple."""
    if len(arguments) > 1:
        return operator.itemgetter(*arguments)
    if not arguments:
        return lambda values: ()
    (only,) = arguments
    return lambda values: (values[only],)


def _call_with_keywords(function: Callable[..., Any], names: tuple[str, ...], *arguments: Any) -> Any:
    """Args: names: of the last arguments."""
    first = len(arguments) - len(names)
    return function(*arguments[:first], **dict(zip(names, arguments[first:], strict=True)))


def _make(kind: type, *parts: Any) -> Any:
    """A tuple, a named tuple or a list."""
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _allocation(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What allocates a tensor."""
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
