"""OneThread: a reentrant context that raises, instead of blocking, in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


class OneThread:
    """A reentrant context for one thread at a time; other threads that enter it meanwhile raise RuntimeError.

    Copies and pickles are new contexts.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def alone(self) -> AbstractContextManager[Any]:
        """The context, or a null context in torch.compile, which cannot trace locks."""
        return nullcontext() if torch.compiler.is_compiling() else self

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "a cache belongs to one thread at a time, and another one is using it: give each thread a cache of its "
                "own, or let them take turns"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OneThread], tuple[()]]:
        return OneThread, ()


def in_one_thread(method: F) -> F:
    """Run a method inside the context `self.thread`, a OneThread."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.thread.alone():
            return method(self, *args, **kwargs)

    return cast("F", alone)
