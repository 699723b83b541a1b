"""tools/execute_blackwell.py: what it writes is what docs/results_files.md says, and what fails a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.report import RESULTS
from tests.support import blackwell_cases as blackwell
from tests.support.bench_helpers import DOCS, documented_fields
from tests.support.deletion_cases import GROUPS
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


class Broken(RuntimeError):
    pass


def test_a_case_that_raises_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(tasks: list[tool.Task], jobs: int) -> Any:
        for task in tasks:
            yield task, Broken("no such opcode") if task is tasks[0] else CASE

    monkeypatch.setattr(tool, "run_all", run_all)
    assert tool.main(["--match", "neighborhood", "--out", str(tmp_path / "out.json")]) == 1
    assert "Broken: no such opcode" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["cases"]) == 3


def test_kernels_that_were_not_executed_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tool, "run_all", lambda tasks, _: ((task, CASE) for task in tasks if task.function is tool.run_case)
    )
    assert tool.main(["--out", str(tmp_path / "out.json")]) == 1
    told = capsys.readouterr().out
    assert all(f"{form} was not executed" in told for form in blackwell.missing([]))


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list", "--match", "paper"]) == 0
    assert capsys.readouterr().out.splitlines() == ["paper preset, late", "paper preset, early"]
    assert tool.main(["--list", "--match", "deletions"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"deletions, {group}" for group in GROUPS]
    with pytest.raises(SystemExit):
        tool.main(["--match", "nothing like it"])
    wrong = f"--match 'nothing like it' fits none of {len(blackwell.table())} cases, nor deletions"
    assert wrong in capsys.readouterr().err
