"""What PyTorch does not offer of CUDA's runtime: streams that nobody else gets, and graphs that hold no memory.

torch.cuda.Stream hands out 32 streams in turn to the whole program. torch.cuda.CUDAGraph has a memory pool and sets the
state of random number generators with each launch.
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
"""The stream on which graphs of a device are captured, one at a time."""


class Graph:
    """Launches that are captured, not run; to be launched at once, again and again.

    It holds addresses, no tensors. Nothing may be allocated while `launches` is walked through.
    """

    def __init__(self, device: torch.device, launches: Launches) -> None:
        """Args: device: the current one."""
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
        """On the current stream of its device, which is the current one."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)  # current_stream() takes 8 us of an H200's host
        _result(self._launch(self._executable, stream))


def new_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Of the current device, for as long as the process lives."""
    with _relaxed():
        return [_new_stream(device) for _ in range(count)]


def is_captured(stream: torch.cuda.Stream) -> bool:
    """Whether somebody captures what is launched on the stream."""
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
    """Whatever captures forbid meanwhile, the call's own and other threads'."""
    from cuda.bindings import runtime

    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = _result(runtime.cudaThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _result(runtime.cudaThreadExchangeStreamCaptureMode(before))


def _result(answer: tuple[Any, ...]) -> Any:
    """What a CUDA function returned beside its error."""
    error, *values = answer
    if error != 0:
        raise RuntimeError(f"CUDA answers {error.name}")
    return values[0] if values else None
