"""Fixtures that several tests of cute_kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_kernels.runtime import replay


@pytest.fixture(autouse=True)
def no_recordings() -> Iterator[None]:
    """A test patches what recordings of others would not see."""
    replay.forget()
    yield
    replay.forget()


@pytest.fixture(params=["sm_90", "sm_100"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles and lists of which architecture; Blackwell's run on Hopper too."""
    monkeypatch.setenv("NSA_KERNELS_FA4_STRATEGY", request.param)
    return str(request.param)
