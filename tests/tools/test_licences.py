"""tools/check_licences.py: what it lets pass, what it names, and what it says it did not check."""

from __future__ import annotations

import json
import subprocess
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.installed import required_distributions
from tools import check_licences as check


def package(name: str, **facts: str) -> Any:
    message = Message()
    for key, value in facts.items():
        message[key.replace("_", "-")] = value
    return SimpleNamespace(name=name, version="1.0", metadata=message)


PROPRIETARY = {"Classifier": "License :: Other/Proprietary License"}


@pytest.mark.parametrize(
    ("name", "facts", "problem"),
    [
        ("some", {"License_Expression": "Apache-2.0 OR BSD-2-Clause"}, None),
        ("some", {"License_Expression": "MIT AND (GPL-3.0-only OR MIT)"}, "GPL-3.0-only"),
        ("some", {"License_Expression": "AGPL-3.0-or-later"}, "AGPL-3.0-or-later"),
        ("some", {"Classifier": "License :: OSI Approved :: MIT License", "License": "see the file"}, None),
        ("some", {"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, "GNU General"),
        ("some", {"License": "BSD\nand the whole text of it"}, None),
        ("some", {"License": "ask us"}, "ask us"),
        ("some", {}, "no licence in its metadata"),
        ("nvidia-cutlass-dsl", PROPRIETARY, None),
        ("nvidia_cublas", PROPRIETARY, None),
        *((name, PROPRIETARY, "Other/Proprietary License") for name in ("not-nvidia-dsl", "cuda-toolkit-x", "quack")),
    ],
)
def test_statements(name: str, facts: dict[str, str], problem: str | None) -> None:
    problems = check.licence_problems([package(name, **facts)])
    assert len(problems) == (problem is not None)
    assert problem is None or f"{name} 1.0: {problem}" in problems[0]


def test_all_that_the_extras_bring_is_allowed() -> None:
    """`make lint` looks at .venv before the `cuda` extra is in it; here it is, where it can be installed."""
    found = required_distributions()
    assert {"numpy", "torch"} <= found.keys()
    assert check.licence_problems(found.values()) == []


CLEAN, BAD = ({"name": "rich", "version": "1.0", "vulns": vulns} for vulns in ([], [{"id": "PYSEC-1"}]))
SKIPPED = {"name": "torch", "skip_reason": "not on PyPI"}


@pytest.mark.parametrize(
    ("answer", "passes", "said"),
    [
        ([CLEAN, SKIPPED], True, "1 packages checked, 0 known vulnerabilities; not checked: torch"),
        ([CLEAN, BAD], False, "rich 1.0: PYSEC-1"),
        (None, True, "not checked, since pip-audit gave no list: "),
        (subprocess.TimeoutExpired("pip-audit", 120), True, "timed out after 120 seconds"),
    ],
)
def test_advisories(answer: Any, passes: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(answer, Exception):
            raise answer
        stdout = "" if answer is None else json.dumps({"dependencies": answer})
        return subprocess.CompletedProcess(command, 1, stdout=stdout)

    monkeypatch.setattr(check.subprocess, "run", run)
    safe, shown = check.advisories()
    assert safe is passes
    assert said in shown
