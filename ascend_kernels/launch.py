"""The one door through which these kernels are launched, so that what a public call launches can be recorded.

Tests hand the recorded launches to other compilers, which then run the same kernel objects on the same arguments as
the op itself does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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


_LAUNCHING = threading.RLock()
"""Triton compiles and loads at a kernel's first launch: a second thread may start what is not loaded yet, and Triton's
interpreter puts its own functions in place of the language's for all threads."""


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
) -> Any:
    """Record the launch for every `recording` around it, then run it on the device of its tensors, or as they ask.

    One launch at a time: those of other threads wait.

    Returns:
        What Triton ran, for `Repeat`; None where it did not.
    """
    with _LAUNCHING:
        for recorder in _recorders:
            recorder.launches.append(Launch(kernel, grid, dict(arguments), dict(constants), options))
        if only_recording():
            for recorder in _recorders:
                if callable(recorder.run):
                    recorder.run(recorder.launches[-1])
            return None
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        if device.type == "cpu":
            return kernel[grid](**arguments, **constants, **options)
        with torch.get_device_module(device).device(device):  # Triton launches on the current device
            return kernel[grid](**arguments, **constants, **options)


class Repeat:
    """A launch on a GPU that is made again, with addresses in the place of tensors.

    Looking at what it is given is most of the host's time of a Triton launch. Here nobody looks: dtypes, numbers and
    constants are those of the first launch, and every address is a multiple of ALIGNMENT where the first one's was.
    The kernel's parameters are, in this order: pointers, numbers, further pointers, constants. Pointers begin with p_.
    """

    ALIGNMENT = 16
    """Bytes: what Triton makes builds of their own for."""

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        """Of what `launch` was given, and returned."""
        self._run = compiled[(*grid, 1, 1)[:3]]
        self._numbers = tuple(value for name, value in arguments.items() if not name.startswith("p_"))
        self._constants = tuple(constants.values())

    def __call__(self, addresses: Iterable[int], further: Iterable[int | None] = ()) -> None:
        self._run(*addresses, *self._numbers, *further, *self._constants)

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether nobody records, and the device is the one that Triton launches on."""
        return not _recorders and device.type == "cuda" and device.index == torch.cuda.current_device()
