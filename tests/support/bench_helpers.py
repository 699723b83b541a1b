"""Helpers for tests of benchmarks and examples: documented fields, and results that are wrong in one element."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import with_ending

DOCS = Path(__file__).resolve().parents[2] / "docs"


def documented_fields(script: str) -> set[str]:
    """The fields of a row of a benchmark, as docs/results_files.md lists them."""
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    match = re.search(rf"A row of `{script}`:\n`(.*?)`", page, re.DOTALL)
    assert match is not None
    return set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", match[1])))


def assert_documented(script: str, content: Mapping[str, Any], lists: Iterable[str] = ("rows",)) -> None:
    """Check that a script's file has the fields that docs/results_files.md lists, and so have the rows of its lists."""
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    match = re.search(rf"`{script}` writes\s+`{{(.*?)}}`", page, re.DOTALL)
    assert match is not None
    listed = {name: re.findall(r"\w+", names) for name, names in re.findall(r"(\w+): \[(.*?)\]", match[1], re.DOTALL)}
    assert set(content) == set(re.findall(r"\w+", re.sub(r"\[.*?\]", "", match[1], flags=re.DOTALL)))
    assert listed == {name: list(content[name][0]) for name in lists}


def run(
    main: Callable[[list[str]], int],
    out: Path,
    *options: str,
    status: int = 0,
    script: str = "",
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """Results of a benchmark that ends with a status: green or unchecked with right rows if that is 0, else red.

    Args:
        script: whose fields rows have in docs/results_files.md. also: fields beside them.
    """
    assert main([*options, "--out", str(out)]) == status
    content: dict[str, Any] = json.loads(with_ending(out, ".json").read_text())
    rows = content["rows"]
    if status:
        assert (content["gate"], rows, with_ending(out, ".png").exists()) == ("red", [], False)
        assert content["red"]
        return content
    assert {"device", "versions", "commit", "command"} <= set(content)
    assert content["gate"] in ("green", "unchecked")
    for row in rows if script else ():
        assert set(row) == documented_fields(script) | set(also)
        if "error" in row:
            assert 0 <= row["error"] <= row["error_budget"] < 0.1
            assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
    return content


def has_picture(out: Path) -> bool:
    return with_ending(out, ".png").read_bytes().startswith(b"\x89PNG")


def verdicts(bars: Iterable[Any]) -> dict[str, str]:
    return {bar.what: bar.verdict for bar in bars}


class Changed(torch.autograd.Function):
    """A tensor as it is, but its value, or its gradient, changed in the last element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_change = backward
        return _with(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _with(gradient, ctx.backward_change), None, None


def _with(x: Tensor, change: float) -> Tensor:
    changed = x.clone()
    changed[(-1,) * x.dim()] += change
    return changed
