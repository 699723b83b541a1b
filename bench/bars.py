"""Bars: the figures that a benchmark has to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A bound on one figure. `reached` is None if it was not measured, which does not pass."""

    what: str
    reached: float | None
    wanted: float
    at_least: bool  # True: a lower bound. False: an upper bound
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.reached is None:
            return "not measured"
        return "pass" if (self.reached >= self.wanted if self.at_least else self.reached <= self.wanted) else "FAIL"

    def as_json(self) -> dict[str, Any]:
        """Figures rounded for readers; the verdict is of the figures themselves."""
        wanted = f"{'>=' if self.at_least else '<='} {self.wanted:,.4g}{self.unit}"
        reached = None if self.reached is None else f"{self.reached:,.4g}{self.unit}"
        return {"bar": self.what, "wanted": wanted, "reached": reached, "verdict": self.verdict}


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None if one of them was not measured."""
    return None if a is None or b is None else a / b


def figure(rows: Sequence[dict[str, Any]], where: dict[str, Any], field: str, per: str | None = None) -> float | None:
    """A field of the first row with the fields `where`, over another field if given; None if it was not measured."""
    row = next((row for row in rows if where.items() <= row.items()), {})
    return row.get(field) if per is None else ratio(row.get(field), row.get(per))
