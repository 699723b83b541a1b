"""Calls that take turns on one CPU thread, timed by their CPU time, and what the ratios show.

For machines that others use too. Waiting for a core is no CPU time. With two threads it would be: each operation ends
where both do, so one that lost its core holds up the other. What load does to caches and clocks hits calls that follow
each other alike, so each turn gives a ratio, and their median and spread say what can be said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.timing import percentiles

FEWEST, MOST = 5, 100  # Turns
NOISE = 1.5  # A speed-up says nothing where its 80th percentile over turns is more than so many times its 20th
NSA, DENSE, NEITHER, NOISY = "NSA", "dense", "neither", "too noisy"  # Names of the faster one


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Spread:
    """20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    @property
    def faster(self) -> str:
        """The faster one, for a speed-up of NSA over dense attention, if that can be said."""
        if self.p80 > NOISE * self.p20:
            return NOISY
        if self.p20 > 1:
            return NSA
        return DENSE if self.p80 < 1 else NEITHER

    @property
    def times(self) -> float:
        return max(self.p50, 1 / self.p50)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*percentiles(values))


def take_turns(calls: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """CPU milliseconds of each warm call in each turn, every second turn the other way round.

    Args: `seconds`: of CPU time after which no more turns begin, once there are FEWEST.
    """
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    while len(times[0]) < FEWEST or (sum(map(sum, times)) < seconds * 1e3 and len(times[0]) < MOST):
        for i in order:
            begin = time.thread_time()
            calls[i]()
            times[i].append((time.thread_time() - begin) * 1e3)
        order.reverse()
    return times


SENTENCES = {
    DENSE: "Dense attention is faster at {}.",
    NSA: "NSA is faster at {}.",
    NEITHER: "Neither is clearly faster at {}.",
    NOISY: "Too noisy to tell, so run it again when less else runs: {}.",
}


def verdict(speedups: Sequence[tuple[str, Spread]]) -> str:
    """Summary of speed-ups of NSA over dense attention, each with where it was found: a sentence for each outcome."""
    places: dict[str, list[str]] = {faster: [] for faster in SENTENCES}
    for place, ratio in speedups:
        times = f" ({ratio.times:.1f} times)" if ratio.faster in (DENSE, NSA) else ""
        places[ratio.faster].append(place + times)
    return " ".join(SENTENCES[faster].format(", ".join(texts)) for faster, texts in places.items() if texts)
