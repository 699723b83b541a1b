"""Programs of `compiled_once` functions, compiled once for all test processes and later runs."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.ptx.program import Program

PTX_CACHE = Path(__file__).resolve().parents[3] / ".cache" / "ptx"
"""Compiled PTX; `make clean` removes it."""
ARCH = "sm_90a"


@cache
def program(compiled: Any, *how: Any, **named: Any) -> Program:
    """What a `compiled_once` function compiles for ARCH; from PTX_CACHE where the sources have not changed since."""
    from cute_kernels.runtime import disk_cache

    asked = f"{compiled.__module__}.{compiled.__qualname__} {how!r} {sorted(named.items())!r}"
    path = PTX_CACHE / f"{disk_cache.key_of(asked, arch=ARCH)}.ptx"
    if not path.exists():
        PTX_CACHE.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that want the same kernel, one compiles it
            if not path.exists():
                new = path.with_suffix(".new")
                new.write_text(_compile(lambda: compiled.__wrapped__(*how, **named)))
                new.replace(path)
    return Program(path.read_text())


def _compile(compiled: Callable[[], Any]) -> str:
    from cute_kernels.runtime import jit

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as dump:
        patch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch {ARCH} --keep-ptx --dump-dir {dump}")
        return str(compiled().compiled.__ptx__)
