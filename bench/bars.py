"""Bars: what a figure of a benchmark has to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """One of them. `reached` is None where it was not measured, which is no pass."""

    what: str
    reached: float | None
    wanted: float
    at_least: bool
    """Else at most."""
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.reached is None:
            return "not measured"
        return "pass" if (self.reached >= self.wanted if self.at_least else self.reached <= self.wanted) else "FAIL"

    def as_json(self) -> dict[str, Any]:
        sign = ">=" if self.at_least else "<="
        return {
            "bar": self.what,
            "wanted": f"{sign} {_figure(self.wanted)}{self.unit}",
            "reached": None if self.reached is None else f"{_figure(self.reached)}{self.unit}",
            "verdict": self.verdict,
        }


def _figure(value: float) -> str:
    """Four digits, more where a larger number has them: 0.07123, 72.08, 4609."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def show_bars(bars: Sequence[Bar], console: Console) -> None:
    colors = {"pass": "green", "FAIL": "bold red", "not measured": "yellow"}
    table = Table(title="bars", box=SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (("bar", "left"), ("wanted", "right"), ("reached", "right"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for bar in bars:
        cells = bar.as_json()
        verdict = f"[{colors[bar.verdict]}]{bar.verdict}[/]"
        table.add_row(cells["bar"], cells["wanted"], cells["reached"] or "-", verdict)
    console.print(table)
    passed = sum(bar.verdict == "pass" for bar in bars)
    console.print(f"{passed} of {len(bars)} bars are reached.")
