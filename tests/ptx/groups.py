"""Groups of asynchronous operations."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.ptx.registers import Threads


class Groups:
    """What was started and, in groups, committed, until it is waited for."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.groups: list[list[Any]] = []

    def commit(self) -> None:
        self.groups.append(self.started)
        self.started = []

    def wait(self, most: int) -> list[Any]:
        """Leaves `most` groups, and returns what the others hold."""
        ended = max(0, len(self.groups) - most)
        done = [x for group in self.groups[:ended] for x in group]
        del self.groups[:ended]
        return done


def groups_of(threads: Threads, kind: str) -> list[Groups]:
    """What each of the threads has started of a kind."""
    groups = threads.cta.state_of(kind, lambda: defaultdict(Groups))
    return [groups[thread] for thread in threads.numbers.tolist()]
