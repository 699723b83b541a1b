"""The one way to launch: a call's launches can be recorded (replay.py), or be listed without being run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol


class Launch(NamedTuple):
    kernel: Any
    """A `jit.Kernel`, or a function that orders streams."""
    arguments: tuple[Any, ...]


class Listener(Protocol):
    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """Called in place of a launch."""

    def compile_ahead(self, kernel: Any) -> None:
        """Called in place of compiling a kernel that this call does not launch."""


class _Thread(threading.local):
    listener: Listener | None = None
    """Is told of this thread's launches."""


THREAD = _Thread()


def launch(kernel: Any, *arguments: Any) -> None:
    """Launch a kernel, or order streams. All that a call launches goes through here, or through `jit.Kernel.run`."""
    if THREAD.listener is None:
        start_of(kernel)(*arguments)
    else:
        THREAD.listener.launch(kernel, arguments)


def start_of(kernel: Any) -> Callable[..., None]:
    """Function that launches a kernel without telling a listener."""
    start: Callable[..., None] = getattr(kernel, "start", kernel)
    return start


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tell `listener` of this thread's launches, in place of launching."""
    before, THREAD.listener = THREAD.listener, listener
    try:
        yield
    finally:
        THREAD.listener = before


class _List:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self.launches.append(Launch(kernel, arguments))

    def compile_ahead(self, kernel: Any) -> None:
        self.launches.append(Launch(kernel, ()))


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Launches of a call, in order, and kernels that it compiles ahead. Nothing is compiled or launched.

    Its tensors may be on the meta device; they stand for those of the GPU that device.TARGET_VARIABLE names.
    """
    found = _List()
    with told(found):
        call()
    return found.launches
