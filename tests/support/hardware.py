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

import dispatch
from cute_kernels.fa4 import rules as fa4
from cute_kernels.runtime.device import compute_capability
from cute_kernels.support import CAPABILITIES
from tests.support import cases

STRATEGIES = ("sm_90", "sm_100")
"""Values of NSA_KERNELS_FA4_STRATEGY: tiles and lists of an architecture; Blackwell's run on Hopper, too."""
KERNELS = (*STRATEGIES, "triton")
"""Kernels that the fixture `kernels` chooses: those of `cute` by strategy, or Triton's."""
EITHER = pytest.mark.parametrize("kernels", ["sm_90", "triton"], indirect=True)
"""Kernels of Hopper, or Triton's, for a test that takes the fixture."""
DETERMINISTIC = pytest.mark.sm_90(deterministic=True)
ATOMIC_FREE = pytest.mark.sm_90("gradients without atomics")
"""Tests of their kernels, or of their bits without `deterministic`."""
NEIGHBORHOOD = pytest.mark.sm_90("deterministic gradients of neighborhood attention")
ENOUGH_GIB = 75
"""Memory of a GPU on which every test for one must run."""
WINDOW_COMBINE = pytest.mark.sm_90("window, forced blocks, combine and gate in one kernel")


def with_kernels(names: str, *axes: Iterable[Any]) -> Callable[[Any], Any]:
    """Parameters of a test, every two values of which come together, with the kernels as one more."""
    values = cases.product(*axes, KERNELS, cover=min(2, len(axes) + 1))
    mark = pytest.mark.parametrize((*names.split(), "kernels"), values, indirect=["kernels"], ids=str)
    return lambda test: pytest.mark.usefixtures("kernels")(mark(test))


def marked(names: Iterable[str]) -> list[Any]:
    """Names of cases, of which "cute" skips without its packages and on other GPUs than its own."""
    return [pytest.param(name, marks=pytest.mark.cuda_extra) if name == "cute" else name for name in names]


def without_sm_90(marks: list[pytest.Mark]) -> str | None:
    """Why a test with these marks `sm_90` may skip on this machine's GPU, or None: it must run."""
    if not marks or not torch.cuda.is_available() or fa4.rules(torch.device("cuda")) is fa4.RULES[9]:
        return None
    asked = [*marks[0].args, *(f"{name}={value}" for name, value in marks[0].kwargs.items())]
    return f"needs sm_90, this GPU has other tiles and kernels: {', '.join(asked)}"


def without_cute() -> str | None:
    """Why tests of the `cute` backend may skip on this machine's GPU, or None: they must run, or there is no GPU."""
    if not torch.cuda.is_available() or (own := compute_capability(0)) in CAPABILITIES:
        return None
    return f"needs a GPU of `cute`, this one has compute capability {'.'.join(map(str, own))}"


def refused(item: pytest.Item, error: BaseException) -> str | None:
    """Why Triton's kernels do not run this call of a test for several kernels, or None."""
    named = getattr(item, "callspec", None) and item.callspec.params.get("kernels")  # type: ignore[attr-defined]
    return str(error) if named == "triton" and isinstance(error, dispatch.BackendError) else None


def out_of_memory(error: BaseException) -> str | None:
    """Why a test that ended so counts as skipped, or None: GPUs with less memory than an H100 may run out of it."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"needs more memory than this GPU's {gib:.0f} GiB" if gib < ENOUGH_GIB else None
