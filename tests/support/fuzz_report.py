"""A pytest plugin for `make fuzz`, `make fuzz-gpu`: writes what drawn calls did to FUZZ_OUT (docs/results_files.md)."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.report import environment, write_json

outcomes: dict[str, Counter[str]] = {}
devices: set[str] = set()
"""That tests name by the property `device`; none: a CPU."""
VARIABLES = ("FUZZ_EXAMPLES", "FUZZ_SECONDS", "FUZZ_OUT")
started = time.perf_counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == "outcomes" and isinstance(value, dict):
                outcomes[report.nodeid.partition("::")[2]] = Counter(value)
            elif name == "device":
                devices.add(str(value))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Only from the process that all workers report to, and only of runs without a finding."""
    path = os.environ.get("FUZZ_OUT")
    if not path or hasattr(session.config, "workerinput") or exitstatus != 0:
        return
    arguments = session.config.invocation_params.args
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    total = sum(outcomes.values(), Counter())
    content = {
        **environment(torch.device("cuda" if "cuda" in devices else "cpu")),
        "command": " ".join([*variables, "python -m pytest", *arguments]),
        "examples": sum(total.values()),
        "outcomes": dict(sorted(total.items())),
        "tests": {name: dict(sorted(counts.items())) for name, counts in sorted(outcomes.items())},
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(Path(path), content)
