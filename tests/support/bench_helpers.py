"""What tests of the benchmarks share: the documented rows, and results that are wrong in one element."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parents[2] / "docs"


def documented_fields(script: str) -> set[str]:
    """The fields of a row of a benchmark, as docs/results_files.md lists them."""
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    match = re.search(rf"A row of `{script}`:\n`(.*?)`", page, re.DOTALL)
    assert match is not None
    return set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", match[1])))


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
