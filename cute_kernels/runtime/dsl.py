"""Compatibility layer for the supported versions of CuTe DSL (pyproject.toml)."""

from __future__ import annotations

from importlib.util import find_spec

from cutlass import CUDA_VERSION

if find_spec("cutlass.memory"):
    from cutlass.memory import SmemAllocator
else:  # before 4.8
    from cutlass.utils import SmemAllocator

__all__ = ["ASSEMBLES_CACHE_POLICIES", "SmemAllocator"]

ASSEMBLES_CACHE_POLICIES = (CUDA_VERSION.major, CUDA_VERSION.minor) >= (13, 4)
"""True if CuTe DSL's ptxas assembles cp.async with a constant cache policy.

Those of CUDA 12.9 (CuTe DSL's libraries for CUDA 12, also in 4.8.1) and 13.3 (CuTe DSL before 4.8) put the copy's
shared address and its policy into two uniform registers, and have the copy read UR0 and UR1, which nothing wrote: on an
H100 an illegal instruction. Triton asks for 13.4 as well (github.com/triton-lang/triton/pull/11848).
"""
