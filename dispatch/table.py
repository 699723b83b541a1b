"""The one list of implementations, best first for each op."""

from __future__ import annotations

from dispatch.registry import Impl

ROWS: tuple[Impl, ...] = (
    Impl(
        "nsa",
        "cute",
        target="cute_kernels.forward:nsa",
        check="cute_kernels.support:check",
        training="cute_kernels.backward",
    ),
    Impl("nsa", "reference", target="nsa.reference:nsa", check="nsa.reference:check"),
)
