"""Fixtures that several tests of cute_kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels.runtime import replay
from tests.ptx import Observer, Order, Schedule
from tests.support.gpu_calls import as_asked
from tests.support.hardware import KERNELS, STRATEGIES
from tests.support.interpreted_gpu import interpreted_gpu


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


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels of calls that name no backend."""
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "triton" if request.param == "triton" else "cute")
    if request.param in STRATEGIES:
        monkeypatch.setenv("NSA_KERNELS_FA4_STRATEGY", request.param)
    return str(request.param)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels run as the compiler's PTX, interpreted on a CPU, as on a Hopper GPU.

    Parameter: of these words some: "warps", without WGMMA; "late", else copies arrive at once; "races" are looked for.
    """
    words = request.param.split(", ")
    schedule = Schedule(late="late" in words, observer=Order if "races" in words else Observer)
    with interpreted_gpu("sm_90", schedule), as_asked(warpgroups="warps" not in words):
        yield
