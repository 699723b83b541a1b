"""Marks of tests that need a Hopper GPU: what Blackwell's rules refuse, or its kernels do otherwise.

Arguments of the mark `sm_90` are the reason in words, or options of a call that cute_kernels.support refuses on sm_100.
On a Hopper GPU with NSA_KERNELS_FA4_STRATEGY=sm_100 these tests are skipped, too, so `make test-gpu` shows there
whether one lacks its mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from cute_kernels.fa4 import rules as fa4
from tests.support import cases

STRATEGIES = ("sm_90", "sm_100")
"""Values of NSA_KERNELS_FA4_STRATEGY, for the fixture `strategy`."""
DETERMINISTIC = pytest.mark.sm_90(deterministic=True)
ATOMIC_FREE = pytest.mark.sm_90("gradients without atomics")
"""Tests of their kernels, or of their bits without `deterministic`."""
NEIGHBORHOOD = pytest.mark.sm_90("deterministic gradients of neighborhood attention")
WINDOW_COMBINE = pytest.mark.sm_90("window, forced blocks, combine and gate in one kernel")


def with_strategies(names: str, *axes: Iterable[Any]) -> Callable[[Any], Any]:
    """Parameters of a test, every two values of which come together, with the strategy as one more."""
    values = cases.product(*axes, STRATEGIES, cover=min(2, len(axes) + 1))
    mark = pytest.mark.parametrize((*names.split(), "strategy"), values, indirect=["strategy"], ids=str)
    return lambda test: pytest.mark.usefixtures("strategy")(mark(test))


def without_sm_90(marks: list[pytest.Mark]) -> str | None:
    """Why a test with these marks `sm_90` may skip on this machine's GPU, or None: it must run."""
    if not marks or not torch.cuda.is_available() or fa4.rules(torch.device("cuda")) is fa4.RULES[9]:
        return None
    asked = [*marks[0].args, *(f"{name}={value}" for name, value in marks[0].kwargs.items())]
    return f"needs sm_90, this GPU has other tiles and kernels: {', '.join(asked)}"
