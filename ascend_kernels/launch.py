"""Launching Triton kernels. Every launch goes through `launch`, so the launches of a public call can be recorded.

Tests pass recorded launches to other compilers, which then run the same kernel objects with the op's own arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def gpu_options(**options: int) -> dict[str, int]:
    """Compiler options for launches on a GPU with upstream Triton.

    Fuses multiplication and addition, on which bits depend; off by default from Triton 3.10 on.
    """
    return {"enable_fp_fusion": True, **options}


@dataclass(frozen=True)
class Launch:
    """One launch of a `@triton.jit` kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Tensors and scalars by parameter name."""
    constants: dict[str, Any]
    """The `tl.constexpr` parameters."""
    options: dict[str, Any]
    """Compiler options, such as num_warps."""


@dataclass(frozen=True, eq=False)
class _Recorder:
    launches: list[Launch]
    run: bool | Callable[[Launch], None]


_recorders: list[_Recorder] = []
"""Per process, not per thread, because autograd runs backward on a device in its own thread."""

_LAUNCH_LOCK = threading.RLock()
"""Triton compiles and loads a kernel at its first launch, and a second thread could launch it before it is loaded.
Triton's interpreter also patches the language's functions for all threads."""


@contextmanager
def recording(*, run: bool | Callable[[Launch], None]) -> Iterator[list[Launch]]:
    """Context that collects the launches inside it, in order.

    Args:
        run: True also runs them. With False, outputs stay uninitialised and kernels for a device accept CPU tensors;
            for tests only, because it suppresses the launches of all threads. A function is called for each launch
            instead of running it.
    """
    recorder = _Recorder([], run)
    _recorders.append(recorder)
    try:
        yield recorder.launches
    finally:
        _recorders.remove(recorder)


def only_recording() -> bool:
    """True if launches are recorded and not run on a device."""
    return any(recorder.run is not True for recorder in _recorders)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any], **options: Any
) -> Any:
    """Record the launch for every enclosing `recording`, then run it on the device of its tensors, or as the recordings
    request.

    One launch at a time: other threads wait.

    Returns:
        The compiled kernel, for `RepeatedLaunch`; None if Triton did not run.
    """
    with _LAUNCH_LOCK:
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
            if device.type != "cuda":
                return kernel[grid](**arguments, **constants, **options)
            key = (device.index, *specialization(kernel, arguments, constants, options))
            compiled = _COMPILED.get(key)
            if compiled is None:
                compiled = _COMPILED[key] = kernel[grid](**arguments, **constants, **options)
            else:
                values = {**arguments, **constants}
                compiled[(*grid, 1, 1)[:3]](*[values[name] for name in kernel.arg_names])
            return compiled


_COMPILED: dict[Any, Any] = {}
"""Compiled kernels by device and `specialization`, since Triton's own search takes longer than a launch."""


def specialization(
    kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Facts on which Triton's machine code depends: launches with equal ones run the same compiled kernel.

    These are constants, options, dtypes, whether addresses are multiples of 16, whether integers fit int32, and, of
    those for which Triton specializes, whether they are 1 or multiples of 16.
    """
    never = kernel.do_not_specialize
    facts: list[Any] = [kernel]
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            facts += name, value.dtype, value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            fits = -(2**31) <= value < 2**31
            facts += (name, fits) if name in never else (name, fits, value == 1, value % 16 == 0)
        else:
            facts.append(name)
    return (*facts, *constants.items(), *options.items())


def accepted_by(kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for which the kernel has parameters, in the order of the parameters."""
    return {name: values[name] for name in kernel.arg_names if name in values}


class RepeatedLaunch:
    """A launch on a GPU that can be repeated with other tensors, given by their addresses.

    Most of the host time of a Triton launch goes into inspecting its arguments. This launch inspects nothing: dtypes,
    scalars and constants are those of the first launch, and every address must be a multiple of ALIGNMENT if it was one
    in the first launch. The kernel's parameters must be, in this order: pointers, scalars, more pointers, constants.
    Names of pointers begin with p_.
    """

    ALIGNMENT = 16
    """Alignment in bytes for which Triton specialises kernels."""

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        """Create from the arguments and the result of `launch`."""
        self._run = compiled[(*grid, 1, 1)[:3]]
        self._scalars = tuple(value for name, value in arguments.items() if not name.startswith("p_"))
        self._constants = tuple(constants.values())

    def __call__(self, addresses: Iterable[int], more_addresses: Iterable[int | None] = ()) -> None:
        self._run(*addresses, *self._scalars, *more_addresses, *self._constants)

    @staticmethod
    def possible(device: torch.device) -> bool:
        """True if nothing is recorded, and Triton launches on this device."""
        return not _recorders and device.type == "cuda" and device.index == torch.cuda.current_device()
