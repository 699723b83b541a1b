"""Names of CuTe DSL that are in different places in the versions that this package supports (pyproject.toml)."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("cutlass.memory"):
    from cutlass.memory import SmemAllocator
else:  # before 4.8
    from cutlass.utils import SmemAllocator

__all__ = ["SmemAllocator"]
