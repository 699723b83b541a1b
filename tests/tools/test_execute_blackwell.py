"""tools/execute_blackwell.py: what it writes is what docs/results_files.md says, and what fails a run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench.report import RESULTS
from tests.support.bench_helpers import DOCS, documented_fields
from tools import execute_blackwell as tool

CASE: dict[str, Any] = {
    "case": "some",
    "schedule": "late",
    "result": "dq",
    "error": 1.0,
    "budget": 2.0,
    "findings": [],
    "forms": [],
}
DELETION = {"kernel": "K", "executed": True, "found": True, "reason": ""}


def fields_of_deletions() -> set[str]:
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"A deletion of `execute_blackwell.py`:\n`(.*?)`", page, re.DOTALL)
    return set(re.findall(r"\w+", found))


def test_record_is_what_its_page_says() -> None:
    record = json.loads((RESULTS / "blackwell-executed.json").read_text(encoding="utf-8"))
    assert set(record) == {"device", "versions", "commit", "command", "cases", "deletions"}
    assert record["device"] == "interpreted"
    assert all(set(row) == documented_fields("execute_blackwell.py") for row in record["cases"])
    assert all(set(row) == fields_of_deletions() for row in record["deletions"])
    assert not [*tool.problems_of(record["cases"], record["deletions"])]


@pytest.mark.parametrize(
    ("case", "deletions", "problem"),
    [
        ({}, [DELETION], ""),
        ({"error": 3.0}, [], "some, late: the error of dq is 3.000e+00, its budget 2.000e+00"),
        ({"error": float("nan")}, [], "some, late: the error of dq is nan"),
        ({"findings": ["K: nothing orders"]}, [], "some, late: K: nothing orders"),
        ({}, [DELETION, {**DELETION, "found": False}], "K: 1 of 2 deletions were found"),
        ({}, [DELETION, {**DELETION, "found": False, "reason": "known"}], ""),
        ({}, [DELETION, {**DELETION, "found": False, "executed": False}], ""),
    ],
)
def test_problems(case: dict[str, Any], deletions: list[dict[str, Any]], problem: str) -> None:
    problems = [*tool.problems_of([{**CASE, **case}], deletions)]
    assert len(problems) == (problem != "")
    assert all(text.startswith(problem) for text in problems)
