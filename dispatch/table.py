"""The one list of implementations, best first for each op."""

from __future__ import annotations

from dispatch.registry import Impl

ROWS: tuple[Impl, ...] = (Impl("nsa", "reference", target="nsa.reference:nsa", check="nsa.reference:check"),)
