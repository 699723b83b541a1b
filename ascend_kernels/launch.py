"""The one way to launch a kernel: it can be recorded, so that proofs get the launches of the public op, not copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that it was called with; tensors are the caller's own, not copies."""

    kernel: Any
    """The `@triton.jit` function."""
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float]
    """By parameter name."""
    constants: dict[str, Any]
    """`tl.constexpr` parameters by name."""
    options: dict[str, Any]
    """`num_warps` and the like."""


class _Recorder(NamedTuple):
    launches: list[Launch]
    run: bool


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Tensor | int | float],
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """Run `kernel[grid](**arguments, **constants, **options)`, and record it inside `recording`."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.launches.append(Launch(kernel, tuple(grid), dict(arguments), dict(constants), dict(options)))
        if not recorder.run:
            return
    kernel[tuple(grid)](**arguments, **constants, **options)


@contextmanager
def recording(*, run: bool) -> Iterator[list[Launch]]:
    """Collect the launches made inside. `run=False` launches nothing: outputs stay as they were allocated."""
    launches: list[Launch] = []
    token = _recorder.set(_Recorder(launches, run))
    try:
        yield launches
    finally:
        _recorder.reset(token)
