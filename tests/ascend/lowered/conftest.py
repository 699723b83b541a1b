"""Tests marked `ascend` need the toolchain of `make test-ascend`; without it they skip and say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ascend_kernels import device
from tests.ascend.lowered import toolchain

CORES = 3


@pytest.fixture(autouse=True)
def _few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """NPUs with so few cores that programs loop over tiles of work."""
    few = {name: replace(listed, cores=CORES) for name, listed in device.DEVICES.items()}
    monkeypatch.setattr(device, "DEVICES", few)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = toolchain.missing()
    for item in items:
        if reason and item.get_closest_marker("ascend"):
            item.add_marker(pytest.mark.skip(reason=reason))
