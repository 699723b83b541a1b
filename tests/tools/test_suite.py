"""What `make test` leaves to `make test-full`."""

from __future__ import annotations

import itertools

import pytest

from tests.support import cases

AXES = ("a", "b", "c", "d"), (1, 2, 3), (True, False)


@pytest.mark.parametrize(("cover", "most"), [(1, 4), (2, 12)])
def test_few_combinations_cover_all_values(cover: int, most: int) -> None:
    every = cases.product(*AXES, cover=cover)
    few = [case for case in every if type(case) is tuple]
    assert [case if case in few else case.values for case in every] == list(itertools.product(*AXES))
    assert len(few) <= most
    for axes in itertools.combinations(range(len(AXES)), cover):
        seen = {tuple(values[axis] for axis in axes) for values in few}
        assert seen == set(itertools.product(*(AXES[axis] for axis in axes)))


@pytest.mark.full
def test_full_cases_run_only_where_asked_for(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("--full")
