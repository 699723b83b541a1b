"""Chunks that alternate between two side streams, so that one starts while another leaves SMs idle.

At the end of a launch only its longest CTAs run. Also, MMA leaves memory idle, and combining partials leaves tensor
cores idle.

The streams are created through CUDA directly: a PyTorch stream could be one that another thread captures, or its
current one.

- Calls that are not captured share STREAMS streams per device, whatever thread and stream they come from. One call may
  wait for launches of another; results are the same.
- A capture makes streams that wait for it part of its graph until it ends, so that even after `with` another caller's
  launch there would fail and break the capture. These streams therefore belong to the capturing stream, whose next
  calls reuse them, and go to another capture once CUDA reports that they are no longer captured.
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
"""Number of chunks that run, and hold their memory, at a time."""


class SideStreams:
    """Side streams for independent chunks. After `with`, the current stream waits for all of them.

    Inside, the current device is that of the streams. Part of a CUDA graph if the current stream is being captured. No
    effect on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> SideStreams:
        launch(open_, self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait even after an exception: memory that is then freed may be in use."""
        launch(join, 0)
        launch(close)

    def begin(self) -> None:
        """Call before a chunk allocates: the memory of an earlier chunk is then free."""
        launch(join, STREAMS - 1)

    @contextmanager
    def run(self, *held: Any) -> Iterator[None]:
        """Run launches on a side stream, after earlier launches of the current stream.

        Memory allocated inside must not be used after `with`: it belongs to the side stream, and its next user may have
        another current stream and so not wait for this one. Callers allocate their results beforehand.

        Args:
            held: all tensors that are used inside and that the caller may drop.
        """
        launch(fork)
        try:
            yield
        finally:
            launch(back)
            if _OPEN.regions:
                _OPEN.regions[-1].held.append(held)


# Steps of SideStreams, which a recording repeats. They act on the region that this thread opened last.


class _Region:
    def __init__(self, device: torch.device) -> None:
        self.guard = made_current(device)
        self.guard.__enter__()
        self.chunks = 0
        self.ends: deque[torch.cuda.Event] = deque()
        self.held: deque[Any] = deque()
        """Tensors held by chunks whose end is awaited."""
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
    """Make the next side stream the current one, after it waits for earlier launches."""
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
    """Wait for all chunks except the last `left` ones."""
    region = _OPEN.regions[-1]
    while len(region.ends) > left:
        region.current.wait_event(region.ends.popleft())
    while len(region.held) > left:
        region.held.popleft()


def close() -> None:
    _OPEN.regions.pop().guard.__exit__(None, None, None)


def close_all() -> None:
    """After an exception: restore this thread's current stream, and make it wait for the side streams."""
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
    """Current stream of the last capture that used them."""


_LENDING = threading.Lock()
_SHARED: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams of calls that are not captured."""
_LENT: dict[torch.device, list[_Lent]] = {}
"""Streams of captures: as many sets as captures ran at once."""


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
            elif lent.to == current:  # same capture: no stream leaves a capture before it ends
                return lent.streams
        lent = free[0] if free else _Lent(new_streams(device, STREAMS), current)
        if not free:
            known.append(lent)
        lent.to = current
        for stream in lent.streams:  # joins the capture before another thread looks, and is joined back as required
            stream.wait_stream(current)
            current.wait_stream(stream)
        return lent.streams
