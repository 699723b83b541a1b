"""Fixtures that several tests of cute_kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels.runtime import replay
from tests.support.hardware import STRATEGIES


@pytest.fixture(autouse=True)
def _memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that test on one GPU share its memory; what each one's allocator keeps adds up."""
    yield
    if request.node.get_closest_marker("cuda") and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_recordings() -> Iterator[None]:
    """A test patches what recordings of others would not see."""
    replay.forget()
    yield
    replay.forget()


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles and lists of an architecture; Blackwell's run on Hopper, too."""
    monkeypatch.setenv("NSA_KERNELS_FA4_STRATEGY", request.param)
    return str(request.param)
