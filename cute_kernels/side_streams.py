"""Passes on two streams in turn, so that one begins where another leaves multiprocessors idle.

A launch ends with its longest CTAs, most multiprocessors idle: visits of a pass so lost 22 % of their time. And
passes that multiply leave memory idle, what adds up their results leaves the multiplying units idle.

The lists that a pass reads take a chain of small kernels. They are made a pass ahead, on a stream whose CTAs come
first: behind those of two passes each kernel of the chain would wait until all of these are placed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch

Lists = TypeVar("Lists")

STREAMS = 2
"""Beside the current one. So many passes are under way, and have their memory, at a time."""


class SideStreams:
    """For passes that do not depend on each other. After `with`, the current stream has waited for all of them.

    Inside, the current device is that of the streams. Part of a CUDA graph where the current stream is being captured.
    On a CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._passes = 0
        self._ends: deque[tuple[torch.cuda.Event, Any]] = deque()
        self._made: torch.cuda.Event | None = None

    def __enter__(self) -> SideStreams:
        self._guard.__enter__()
        if self._device.type == "cuda":
            self._current = torch.cuda.current_stream(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        """Waits after an exception too: memory that is freed then may be in use."""
        self._wait(0)
        if self._made is not None:
            self._current.wait_stream(_first_stream(self._device))
        self._guard.__exit__(*error)

    def ahead(self, passes: Iterable[Lists]) -> Iterator[Lists]:
        """The lists of passes, those of the next one made before a pass is launched, on a stream that comes first.

        Their memory is that stream's, and may be dropped like what is taken inside of `run`.
        """
        if self._device.type != "cuda":
            yield from passes
            return
        stream, iterator = _first_stream(self._device), iter(passes)
        stream.wait_stream(self._current)

        def make() -> tuple[Lists, torch.cuda.Event] | None:
            torch.cuda.set_stream(stream)
            try:
                for lists in iterator:
                    return lists, stream.record_event()
                return None
            finally:
                torch.cuda.set_stream(self._current)

        following = make()
        while following is not None:
            lists, self._made = following
            following = make()
            yield lists

    def begin(self) -> None:
        """Before a pass takes memory: that of an earlier pass is free then."""
        self._wait(STREAMS - 1)

    @contextmanager
    def run(self, *held: Any) -> Iterator[None]:
        """What is launched inside waits for what was launched on the current stream before.

        Memory that is taken inside is the stream's: it may be dropped at any time behind `with`, since whoever takes it
        next has waited for the current stream.

        Args:
            held: all memory that is used inside and that a caller may drop.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = _streams(self._device)[self._passes % STREAMS]
        self._passes += 1
        stream.wait_stream(self._current)
        if self._made is not None:
            stream.wait_event(self._made)
        torch.cuda.set_stream(stream)  # `with torch.cuda.stream` asks for device and stream anew in each pass
        try:
            yield
        finally:
            self._ends.append((stream.record_event(), held))
            torch.cuda.set_stream(self._current)

    def _wait(self, left: int) -> None:
        while len(self._ends) > left:
            event, _ = self._ends.popleft()
            self._current.wait_event(event)
            if self._made is not None:
                _first_stream(self._device).wait_event(event)


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


@lru_cache
def _first_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
