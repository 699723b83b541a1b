"""What `make test` leaves to `make test-full`, and that every process names the tests alike."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cases

ROOT = Path(__file__).resolve().parents[2]
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


def test_chosen_combinations_leave_the_others_to_full() -> None:
    every = cases.some([("b", 3), ("a", 1)], AXES[0], AXES[1])
    assert every[:2] == [("b", 3), ("a", 1)]
    assert [[mark.name for mark in case.marks] for case in every[2:]] == [["full"]] * 10
    assert sorted([*every[:2], *(case.values for case in every[2:])]) == [*itertools.product(*AXES[:2])]


@pytest.mark.full
def test_full_cases_run_only_where_asked_for(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("--full")


def test_a_name_that_holds_an_address_is_refused(tmp_path: Path) -> None:
    """In one process too: workers of pytest-xdist would refuse all tests, and say nothing of the parameter."""
    lines = (
        "import pytest",
        "@pytest.mark.parametrize('value', [object(), object()], ids=str)",
        "def test_bad(value): pass",
        "@pytest.mark.parametrize('value', [object(), len], ids=['object', 'len'])",
        "def test_good(value): pass",
    )
    (tmp_path / "test_names.py").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["--continue-on-collection-errors", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"test_bad\[<object object at 0x\w+>\] holds an address, as 1 more here do", done.stdout)
