"""Recording of a call: its launches, PyTorch operators, allocations and views, as numbers and kernels without tensors.

Recorder   notes what its thread does
Memory     that holds tensors: given to the call, or new; and which events use it
Event      a launch, or an operator that computes
View       a tensor: its memory, dtype, sizes, strides and offset
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import streams
from cute_kernels.runtime.launches import start_of

ALIGNMENT = 512
"""Alignment in bytes of ranges of a workspace, as PyTorch aligns allocations."""

NEW = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ZEROS = {"zeros", "zeros_like", "new_zeros"}
"""Operators by name: their results are new, and not computed."""
INTO_GIVEN = {"add", "add_", "copy_", "cumsum", "fill_", "zero_"}
"""Operators by name that allocate nothing where they are given what they write: cumsum of several rows, along them."""

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class View(NamedTuple):
    """A tensor of a recording."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, memory: int, x: Tensor) -> View:
        return cls(memory, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))


@dataclass
class Memory:
    """Memory that holds tensors: given to the call, or new."""

    kind: str
    """"given", "new" or "computed"."""
    base: View
    """The tensor as it was given, allocated or computed."""
    device: torch.device
    size: int
    """Bytes of a range of the workspace."""
    storage: StorageWeakRef
    """Keeps the storage's identity from being reused, and not its memory."""
    uses: list[int] = field(default_factory=list)
    """Events that use it: where each begins, and the last one before which it has ended."""

    @classmethod
    def of(cls, number: int, x: Tensor, kind: str) -> Memory:
        storage = x.untyped_storage()
        size = max(-(-storage.nbytes() // ALIGNMENT), 1) * ALIGNMENT
        return cls(kind, View.of(number, x), x.device, size, StorageWeakRef(storage))

    @property
    def number(self) -> int:
        return self.base.memory


@dataclass
class Event:
    """A launch, or an operator that computes."""

    function: Callable[..., Any]
    arguments: Any
    """Each tensor as a View."""
    allocates: bool
    result: int | None
    """Memory of an operator's new tensor."""
    ends: int
    """The event before which it has ended."""


class Recorder(TorchDispatchMode):
    """Notes what its thread launches, and PyTorch's operators."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.refused = False
        self.memories: list[Memory] = []
        self.events: list[Event] = []
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
        self.events.append(Event(function, self._described(tuple(args)), allocates, result, number + 1))

    def _add(self, x: Tensor, kind: str) -> None:
        for key in (_storage(x), (_storage(x), x.dtype)):
            self._memory_of.setdefault(key, len(self.memories))
        self.memories.append(Memory.of(len(self.memories), x, kind))

    def _described(self, x: Any) -> Any:
        """An argument without tensors."""
        if isinstance(x, Tensor) and _storage(x) in self._memory_of:
            return View.of(self._memory_of.get((_storage(x), x.dtype), self._memory_of[_storage(x)]), x)
        if isinstance(x, (tuple, list)):
            return rebuilt(x, [self._described(part) for part in x])
        if not isinstance(x, CONSTANTS) and not type(x).__module__.startswith("cutlass"):
            self.refused = True  # a tensor from elsewhere, or what may hold one
        return None if isinstance(x, Tensor) else x

    def finish(self, results: dict[str, Any]) -> dict[str, View | None] | None:
        """The results of a call that has ended, and the uses of all memories; None: it is not to be replayed."""
        returned = {name: self._described(x) for name, x in results.items()}
        for number, event in enumerate(self.events):
            for view in views_in(event.arguments):
                self.memories[view.memory].uses += number, event.ends - 1
        devices = {memory.device for memory in self.memories}
        return None if self.refused or len(devices) > 1 else returned


# Not in the class statement: there PyTorch wraps it in torch._dynamo.disable, whose import takes seconds of a process
# that compiles nothing. Compiled code calls our operators where Dynamo is off anyway.
Recorder.__torch_dispatch__ = Recorder._run  # type: ignore[assignment]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def views_in(x: Any) -> Iterator[View]:
    """In nested tuples and lists."""
    if isinstance(x, View):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from views_in(part)


def _call_with_keywords(function: Callable[..., Any], names: tuple[str, ...], *arguments: Any) -> Any:
    """Args: names: of the last arguments."""
    first = len(arguments) - len(names)
    return function(*arguments[:first], **dict(zip(names, arguments[first:], strict=True)))


def rebuilt(x: Any, parts: list[Any]) -> Any:
    """A tuple, a named tuple or a list."""
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
