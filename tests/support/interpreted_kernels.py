"""Kernels of cute_kernels in the PTX interpreter (tests/ptx/).

interpret           one kernel: what a `compiled_once` function compiles, for torch tensors on a CPU
interpret_kernels   all kernels that modules of cute_kernels compile
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache, partial, reduce
from types import ModuleType
from typing import Any

import pytest

from tests.ptx.compiled import LATE, Artefacts, Asked, Interpreted, Schedule, compiling, kept


def interpret(
    compiled: Callable[..., Any], *how: Any, arch: str = "sm_90a", schedule: Schedule = LATE, **named: Any
) -> Interpreted:
    """What a `compiled_once` function compiles for these arguments and an architecture."""
    from cute_kernels.runtime import disk_cache, jit

    build = getattr(compiled, "build", compiled)
    kernel = jit.Kernel(build, how, named)

    def make() -> Artefacts:
        made: Artefacts = build(*how, **named)
        return made

    with compiling(arch, lambda make: make()):  # the key holds the target: one with `interpreted_gpu` and without
        artefacts = kept(disk_cache.key_of(kernel.name, interpreted=True), make)
    bound = inspect.signature(build).bind(*how, **named)
    bound.apply_defaults()
    return Interpreted(artefacts, schedule, Asked(build, bound.arguments))


def interpret_kernels(
    patch: pytest.MonkeyPatch, modules: Collection[ModuleType], arch: str = "sm_90a", schedule: Schedule = LATE
) -> None:
    """Replaces the `compiled_once` functions of modules of cute_kernels and of their classes."""
    from cute_kernels.runtime import jit

    def interpreted(compiled: Any) -> Any:
        @cache
        def get(*how: Any, **named: Any) -> jit.Kernel:
            kernel = jit.Kernel(compiled.build, how, named)
            made = cache(partial(interpret, compiled, *how, arch=arch, schedule=schedule, **named))
            kernel.start = lambda *arguments: made()(*arguments)  # compiled where it is launched first
            return kernel

        return get

    for compiled in jit.REMEMBERING:
        module = inspect.getmodule(compiled)
        if module in modules:
            *owner, name = compiled.__qualname__.split(".")
            patch.setattr(reduce(getattr, owner, module), name, interpreted(compiled))
