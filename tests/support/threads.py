"""Calls in other threads that stop half way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MESSAGE = "^a cache belongs to one thread at a time, and another one is using it"
"""Of the error that another thread gets."""


@contextmanager
def while_running(function: Callable[[], Any], entered: threading.Event, go_on: threading.Event) -> Iterator[Any]:
    """A call in another thread that has come to `entered`, and ends after the block."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        try:
            while not entered.wait(0.1):
                assert not future.done(), future.exception()
            yield future
        finally:
            go_on.set()
        future.result(30)
