"""Parameters of tests: few that cover much for CI, and for `make test-full` all their product."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def product(*axes: Iterable[Any], cover: int = 1) -> list[Any]:
    """Every combination of one value of each axis. All but a few of them are marked `full`.

    Args:
        cover: of the combinations that are not, one has each value (1), or each pair of values of two axes (2).
    """
    values = [list(axis) for axis in axes]
    few = covering([len(axis) for axis in values], cover)
    every = {
        places: tuple(axis[i] for axis, i in zip(values, places, strict=True))
        for places in itertools.product(*(range(len(axis)) for axis in values))
    }
    return [every[places] if places in few else rest(every[places])[0] for places in every]


def covering(sizes: Sequence[int], cover: int) -> set[tuple[int, ...]]:
    """Of all combinations of one place of each axis, few of which one has any `cover` places of as many axes."""
    goals = {
        places: set(itertools.combinations(enumerate(places), cover))
        for places in itertools.product(*map(range, sizes))
    }
    missing: set[Any] = set().union(*goals.values())
    few: set[tuple[int, ...]] = set()
    used: Counter[tuple[int, int]] = Counter()
    while missing:
        # Of those that cover as much, the one whose values came least often
        best = max(goals, key=lambda places: (len(goals[places] & missing), -sum(used[at] for at in enumerate(places))))
        few.add(best)
        missing -= goals[best]
        used.update(enumerate(best))
    return few


def some(here: Iterable[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """These combinations, and marked `full` all others of one value of each axis."""
    here = [*here]
    return [*here, *rest(*(case for case in itertools.product(*axes) if case not in here))]


def rest(*cases: Any) -> list[Any]:
    """Cases that are left to `make test-full`. Args: each a value, or a tuple of values."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.full) for x in cases]
