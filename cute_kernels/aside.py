"""A second stream for what ends a pass, so that the next pass begins beside it.

Passes that multiply leave memory idle, what adds up their results leaves the multiplying units idle, and both leave
multiprocessors idle towards their end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

PASSES = 2
"""Whose memory may be in use at a time."""


class Aside:
    """Ends passes on a stream of its own, for whoever waits for it on the current stream: everyone after `with`.

    Part of a CUDA graph where the current stream is being captured. On a CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: deque[tuple[torch.cuda.Event, Any]] = deque()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits after an exception too: memory that is freed then may be in use."""
        self._wait(0)

    def begin(self) -> None:
        """Before a pass takes memory: that of the last but one is free then."""
        self._wait(PASSES - 1)

    @contextmanager
    def end(self, *held: Any) -> Iterator[None]:
        """What is launched inside waits for what was launched before, and lets nothing wait but other ends.

        Args:
            held: all memory that is used inside and that a caller may drop.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                self._ends.append((stream.record_event(), held))

    def _wait(self, left: int) -> None:
        while len(self._ends) > left:
            event, _ = self._ends.popleft()
            torch.cuda.current_stream(self._device).wait_event(event)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Before others: what it runs is short, and frees memory."""
    return torch.cuda.Stream(device, priority=-1)
