"""CUDA runtime features that PyTorch does not offer: private streams, and graphs that hold no memory.

torch.cuda.Stream hands out 32 streams in turn to the whole program. torch.cuda.CUDAGraph has a memory pool and sets the
state of random number generators at each launch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Launches = Iterable[tuple[Callable[..., object], tuple[object, ...]]]
"""Functions that launch, and their arguments, in order."""

_CAPTURING = threading.Lock()
_CAPTURES: dict[torch.device, torch.cuda.Stream] = {}
"""Stream on which graphs of a device are captured, one at a time."""


class Graph:
    """Captured launches, to be launched together, repeatedly.

    Holds addresses, not tensors. Nothing may be allocated while `launches` is iterated.
    """

    def __init__(self, device: torch.device, launches: Launches) -> None:
        """Capture without running. Args: device: the current one."""
        from cuda.bindings import runtime

        self._device = device
        with _CAPTURING, _relaxed():
            if device not in _CAPTURES:
                _CAPTURES[device] = _new_stream(device)
            stream = _CAPTURES[device]
            with torch.cuda.stream(stream):
                mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
                _result(runtime.cudaStreamBeginCapture(stream.cuda_stream, mode))
                try:
                    for function, arguments in launches:
                        function(*arguments)
                finally:
                    captured = _result(runtime.cudaStreamEndCapture(stream.cuda_stream))
            try:
                self._executable = _result(runtime.cudaGraphInstantiate(captured, 0))
            finally:
                _result(runtime.cudaGraphDestroy(captured))
        self._launch = runtime.cudaGraphLaunch
        weakref.finalize(self, runtime.cudaGraphExecDestroy, self._executable).atexit = False

    def launch(self) -> None:
        """Launch on the current stream of its device, which must be the current device."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)  # current_stream() takes 8 us on an H200's host
        _result(self._launch(self._executable, stream))


def new_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Create streams on the current device, for the lifetime of the process."""
    with _relaxed():
        return [_new_stream(device) for _ in range(count)]


def is_captured(stream: torch.cuda.Stream) -> bool:
    """True if the stream is being captured."""
    from cuda.bindings import runtime

    status = _result(runtime.cudaStreamIsCapturing(stream.cuda_stream))
    return bool(status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    from cuda.bindings import runtime

    _result(runtime.cudaSetDevice(device.index))  # these bindings may have a runtime of their own
    stream = _result(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
    return torch.cuda.ExternalStream(int(stream), device=device)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Allow calls that a capture in progress would forbid, in this thread or another."""
    from cuda.bindings import runtime

    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = _result(runtime.cudaThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _result(runtime.cudaThreadExchangeStreamCaptureMode(before))


def _result(answer: tuple[Any, ...]) -> Any:
    """Return a CUDA function's result, or raise its error."""
    error, *values = answer
    if error != 0:
        raise RuntimeError(f"CUDA answers {error.name}")
    return values[0] if values else None
