"""Kernels of CuTe DSL, compiled without a GPU and run interpreted: their host side by host.py, their PTX by program.py.

    compiling     inside, cute.compile returns what `handle` makes of a kernel's artefacts
    Interpreted   takes the place of a compiled function: torch tensors on the CPU, launched in the interpreter
    kept          keeps artefacts in PTX_CACHE, so that later processes need not compile again

CuTe DSL writes the PTX itself, by its options. Of the IR that it traces, launches need the host's part alone.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.ptx.host import flat, launches_of
from tests.ptx.ir import host_part
from tests.ptx.observer import Observer
from tests.ptx.program import Program

PTX_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "ptx"
"""Compiled PTX and IR, shared by test processes and by later runs; `make clean` removes it."""


class Artefacts(NamedTuple):
    ptx: str
    ir: str
    """Of the host, and of shared memory."""


class Schedule(NamedTuple):
    """How launches run, as `Program.launch` says."""

    late: bool = True
    ahead: slice = slice(0)
    observer: Callable[[], Observer] = Observer
    """Of each launch its own."""
    launched: Callable[[Launched], None] = lambda _: None
    """Is told of each launch when it has run."""


LATE = Schedule()


class Asked(NamedTuple):
    """The call that made a compiled kernel."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


class Launched(NamedTuple):
    kernel: str
    """As its PTX names it."""
    asked: Asked | None
    """As given to its `Interpreted`."""
    observer: Observer


class Interpreted(NamedTuple):
    """In place of a compiled function."""

    artefacts: Artefacts
    schedule: Schedule = LATE
    asked: Asked | None = None

    def __call__(self, *arguments: Any) -> None:
        """Args: as the compiled function takes them, tensors on the CPU, without a stream."""
        (ptx, ir), (late, ahead, observer, launched), asked = self
        tensors = [x for x in flat(arguments) if isinstance(x, Tensor)]
        for launch in launches_of(ir, arguments):
            watching = observer()
            program(ptx).launch(launch, tensors, late, ahead, watching)
            launched(Launched(launch.kernel, asked, watching))


@lru_cache(256)
def program(ptx: str) -> Program:
    return Program(ptx)


@contextmanager
def compiling(arch: str, handle: Callable[[Callable[[], Artefacts]], Any]) -> Iterator[None]:
    """Inside, cute.compile compiles for an architecture.

    Args:
        handle: is given a function that compiles, and returns what cute.compile is to return.
    """
    import cutlass.cute as cute
    from cutlass.cutlass_dsl import CuTeDSL

    real = getattr(cute.compile, "__wrapped__", cute.compile)

    @wraps(real)
    def compile_(*arguments: Any, options: str = "", **named: Any) -> Any:
        return handle(lambda: _compile(real, arch, *arguments, options=options, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "compile", compile_)
        # As CUTE_DSL_ARCH sets it, which is read when CuTe DSL is imported
        patch.setattr(CuTeDSL._get_dsl().envar, "arch", arch)
        yield


def _compile(compile_: Callable[..., Any], arch: str, *arguments: Any, options: str, **named: Any) -> Artefacts:
    traced: list[str] = []
    with tempfile.TemporaryDirectory() as dump:
        # The cubin is thrown away: ptxas need not optimize it. Nobody calls the host's part, by TVM FFI or otherwise:
        # without an engine for it, a fifth of the time.
        options = options.replace("--enable-tvm-ffi", "")
        options = f"{options} --gpu-arch {arch} --keep-ptx --dump-dir {dump} --ptxas-options -O0"
        # Not --keep-ir, which prints and parses kernels anew: a tenth of the time
        hook = {"trace_finalize_hooks": lambda _, module, name: traced.append(host_part(module))}
        made = compile_(*arguments, options=options, no_jit_engine=True, **hook, **named)
        return Artefacts(made.__ptx__, traced.pop())


@lru_cache(1024)
def _loaded(path: Path) -> Artefacts:
    return Artefacts(path.read_text(), path.with_suffix(".mlir").read_text())


def kept(key: str, make: Callable[[], Artefacts]) -> Artefacts:
    """What PTX_CACHE has under a key, else what `make` makes; of processes that want it, one makes it."""
    path = PTX_CACHE / f"{key}.ptx"
    if not path.exists():
        PTX_CACHE.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                made = make()
                path.with_suffix(".mlir").write_text(made.ir)
                new = path.with_suffix(".new")
                new.write_text(made.ptx)
                new.replace(path)
    return _loaded(path)
