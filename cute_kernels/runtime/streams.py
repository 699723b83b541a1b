"""Chunks on two side streams alternately, so that one starts while another leaves multiprocessors idle.

At the end of a launch only its longest CTAs run. And MMA leaves memory idle, while combining partials leaves tensor
cores idle.

The streams are created by CUDA itself: one of PyTorch's could be one on which another thread captures, or its current
one.

- Calls that are not captured share STREAMS streams of their device, whichever thread and stream they come from. One may
  wait for what another has launched; results are the same.
- A capture makes streams that wait for it part of its graph until it ends, so even after `with` anybody else's launch
  there would break the capture, and fail. So these streams belong to the capturing stream, whose next calls take them
  again, and go to another capture once CUDA says that they are no longer captured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.runtime.cuda_runtime import is_captured, new_streams
from cute_kernels.runtime.device import made_current
from cute_kernels.runtime.launches import launch

STREAMS = 2
"""So many chunks run, and hold their memory, at a time."""


class SideStreams:
    """For chunks that do not depend on each other. After `with`, the current stream waits for all of them.

    Inside, the current device is that of the streams. Part of a CUDA graph where the current stream is being captured.
    On a CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> SideStreams:
        launch(open_, self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        """Waits also after an exception: memory that is freed then may be in use."""
        launch(join, 0)
        launch(close)

    def begin(self) -> None:
        """To be called before a chunk allocates: an earlier chunk's memory is free then."""
        launch(join, STREAMS - 1)

    @contextmanager
    def run(self, *held: Any) -> Iterator[None]:
        """What is launched inside waits for what was launched on the current stream before.

        Memory that is allocated inside must not be used after `with`: it is the side stream's, and its next user may
        have another current stream and so not wait for this one. A caller allocates its results before.

        Args:
            held: all tensors that are used inside and that a caller may drop.
        """
        launch(fork)
        try:
            yield
        finally:
            launch(back)
            if _OPEN.regions:
                _OPEN.regions[-1].held.append(held)


# Steps of the above, which a recording repeats. They act on this thread's region that was opened last.


class _Region:
    def __init__(self, device: torch.device) -> None:
        self.guard = made_current(device)
        self.guard.__enter__()
        self.chunks = 0
        self.ends: deque[torch.cuda.Event] = deque()
        self.held: deque[Any] = deque()
        """Of chunks whose end is awaited."""
        self.streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self.current = torch.cuda.current_stream(device)
            try:
                self.streams = _streams(device, self.current)
            except BaseException:
                self.guard.__exit__(None, None, None)
                raise


class _Open(threading.local):
    def __init__(self) -> None:
        self.regions: list[_Region] = []


_OPEN = _Open()


def open_(device: torch.device) -> None:
    _OPEN.regions.append(_Region(device))


def fork() -> None:
    """Make the next side stream the current one, once it waits for what was launched."""
    region = _OPEN.regions[-1]
    if region.streams:
        stream = region.streams[region.chunks % STREAMS]
        region.chunks += 1
        stream.wait_stream(region.current)
        torch.cuda.set_stream(stream)  # `with torch.cuda.stream` queries device and stream for each chunk


def back() -> None:
    """Return to the call's stream."""
    region = _OPEN.regions[-1]
    if region.streams:
        region.ends.append(region.streams[(region.chunks - 1) % STREAMS].record_event())
        torch.cuda.set_stream(region.current)


def join(left: int) -> None:
    """Wait for all chunks but the last `left` ones."""
    region = _OPEN.regions[-1]
    while len(region.ends) > left:
        region.current.wait_event(region.ends.popleft())
    while len(region.held) > left:
        region.held.popleft()


def close() -> None:
    _OPEN.regions.pop().guard.__exit__(None, None, None)


def close_all() -> None:
    """After an exception: make this thread's current stream what it was, waiting for side streams."""
    while _OPEN.regions:
        region = _OPEN.regions[-1]
        if region.streams:
            torch.cuda.set_stream(region.current)
            for stream in region.streams:
                region.current.wait_stream(stream)
        close()


@dataclass
class _Lent:
    """Streams of a capture."""

    streams: list[torch.cuda.Stream]
    to: torch.cuda.Stream
    """The current stream of the capture that has them or had them last."""


_LENDING = threading.Lock()
_SHARED: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Of calls that are not captured."""
_LENT: dict[torch.device, list[_Lent]] = {}
"""Of captures: as many as ran at once."""


def _streams(device: torch.device, current: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """Side streams of a call on the current device and stream."""
    if torch.cuda.is_current_stream_capturing():
        return _streams_of_capture(device, current)
    found = _SHARED.get(device)
    if found is None:
        with _LENDING:
            found = _SHARED.get(device) or _SHARED.setdefault(device, new_streams(device, STREAMS))
    return found


def _streams_of_capture(device: torch.device, current: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    with _LENDING:
        known = _LENT.setdefault(device, [])
        free = []
        for lent in known:
            if not any(map(is_captured, lent.streams)):
                free.append(lent)
            elif lent.to == current:  # one capture: no stream leaves a capture before it ends
                return lent.streams
        lent = free[0] if free else _Lent(new_streams(device, STREAMS), current)
        if not free:
            known.append(lent)
        lent.to = current
        for stream in lent.streams:  # part of the capture before another thread looks, and joined as it must be
            stream.wait_stream(current)
            current.wait_stream(stream)
        return lent.streams
