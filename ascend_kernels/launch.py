"""The one door through which these kernels are launched, so that what a public call launches can be recorded.

Tests hand the recorded launches to other compilers, which then run the same kernel objects on the same arguments as
the op itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One launch of a `@triton.jit` kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Tensors and numbers by parameter name."""
    constants: dict[str, Any]
    """The `tl.constexpr` parameters."""
    options: dict[str, Any]
    """What the compiler takes beside them, such as num_warps."""


@dataclass(frozen=True, eq=False)
class _Recorder:
    launches: list[Launch]
    run: bool | Callable[[Launch], None]


_recorders: list[_Recorder] = []
"""Of the process, not of a thread: autograd runs backward on a device in a thread of its own."""


@contextmanager
def recording(*, run: bool | Callable[[Launch], None]) -> Iterator[list[Launch]]:
    """Collect the launches of the block, in order.

    Args:
        run: also run them. Without, outputs stay uninitialised, and CPU tensors are taken by kernels for a device: for
            tests only, since launches of all threads are held back. A function runs each launch in the device's place.
    """
    recorder = _Recorder([], run)
    _recorders.append(recorder)
    try:
        yield recorder.launches
    finally:
        _recorders.remove(recorder)


def only_recording() -> bool:
    """Whether launches are recorded and not run on a device."""
    return any(recorder.run is not True for recorder in _recorders)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any], **options: Any
) -> None:
    """Record the launch for every `recording` around it, then run it on the device of its tensors, or as they ask."""
    for recorder in _recorders:
        recorder.launches.append(Launch(kernel, grid, dict(arguments), dict(constants), options))
    if only_recording():
        for recorder in _recorders:
            if callable(recorder.run):
                recorder.run(recorder.launches[-1])
        return
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    if device.type == "cpu":
        kernel[grid](**arguments, **constants, **options)
        return
    with torch.get_device_module(device).device(device):  # Triton launches on the current device
        kernel[grid](**arguments, **constants, **options)
