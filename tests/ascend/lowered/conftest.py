"""Tests marked `ascend` need the toolchain of `make test-ascend`; without it they skip and say so."""

from __future__ import annotations

import pytest

from tests.ascend.lowered import toolchain


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = toolchain.missing()
    for item in items:
        if reason and item.get_closest_marker("ascend"):
            item.add_marker(pytest.mark.skip(reason=reason))
