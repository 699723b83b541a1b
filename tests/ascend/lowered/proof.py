"""The interface of the proofs: checks of launches that are recorded from public ops.

    with executing() as launches:
        out = op(...)                   # launches run from their Linalg
    with recording(run=False) as launches:
        out = op(...)                   # outputs stay as allocated: NaN, for torch.empty in tests
    execute(launches)                   # out now holds what they computed, unless the op copied it
    lower(launch).linalg                # for gates.py
    compile_ptx(launch).ptx             # upstream's code for an NVIDIA architecture

Lowered kernels and PTX are kept under .cache/ascend.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from ascend_kernels.launch import Launch, recording
from tests.ascend.lowered import children, execution, native, toolchain
from tests.ascend.lowered.children import ProofError
from tests.ascend.lowered.description import describe, key_of
from tests.ascend.lowered.execution import MemoryFault
from tests.ascend.lowered.gates import assert_grid

__all__ = ["Lowered", "MemoryFault", "ProofError", "Ptx", "compile_ptx", "execute", "executing", "lower"]

ARCH = "Ascend910B4"
CHILD_SOURCE = children.SCRIPT.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Lowered:
    linalg: str
    parameters: tuple[str, ...]
    """Run-time parameters that are left after specialisation, in order."""


@dataclass(frozen=True)
class Ptx:
    ptx: str
    shared_bytes: int
    signature: dict[str, str]
    """Kinds of the parameters, in order."""


def name_of(launch: Launch) -> str:
    """Kernel and launch, as errors show them."""
    shown = {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else value
        for name, value in launch.arguments.items()
    }
    values = ", ".join(f"{name}={value}" for name, value in {**shown, **launch.constants}.items())
    return f"{launch.kernel.fn.__name__}{list(launch.grid)}({values})"


def lower(launch: Launch) -> Lowered:
    """By triton-ascend, with the signature and constants of the launch; from the cache where it was done before.

    Raises:
        ProofError: triton-ascend refuses the kernel.
    """
    key = key_of(launch, ARCH, toolchain.version(), CHILD_SOURCE)
    path = toolchain.CACHE / "lowered" / f"{key}.json"
    if not path.exists():
        request = {**describe(launch), "arch": ARCH}
        answer = children.lowered_by(children.triton_ascend(), name_of(launch), request)
        toolchain.write_atomically(path, json.dumps(answer).encode())
    return read_lowered(path)


@functools.cache
def read_lowered(path: Path) -> Lowered:
    answer = json.loads(path.read_text(encoding="utf-8"))
    return Lowered(answer["linalg"], tuple(answer["parameters"]))


def execute(launches: Sequence[Launch]) -> None:
    """Run the lowered kernels in order on the CPU, under guard pages; tensors of the launches get the results.

    One child process runs them, until one fails.

    Raises:
        MemoryFault: an access outside the tensors. ProofError: any other failure. AssertionError: a grid too large.
    """
    with closing(children.guarded()) as child:
        for index, launch in enumerate(launches):
            execute_one(launch, index, child)


@contextmanager
def executing() -> Iterator[list[Launch]]:
    """`execute` for the launches of the block, each when it is made: host code between them sees their results."""
    numbers = itertools.count()
    with (
        closing(children.guarded()) as child,
        recording(run=lambda launch: execute_one(launch, next(numbers), child)) as launches,
    ):
        yield launches


def execute_one(launch: Launch, index: int, child: children.Child) -> None:
    what = f"launch {index}, {name_of(launch)}"
    assert_grid(launch.grid, what)
    lowered = lower(launch)
    binary = native.build(lowered.linalg, launch.kernel.fn.__name__)
    execution.run(launch, binary, lowered.parameters, what, child)


def compile_ptx(launch: Launch, capability: int = 90) -> Ptx:
    """Upstream Triton's PTX for an NVIDIA architecture, and the shared memory that it asks for."""
    key = key_of(launch, str(capability), triton.__version__, CHILD_SOURCE)
    path = toolchain.CACHE / "ptx" / f"{key}.json"
    if not path.exists():
        request = {**describe(launch), "capability": capability}
        toolchain.write_atomically(path, json.dumps(children.upstream().ask("ptx", name_of(launch), request)).encode())
    return Ptx(**json.loads(path.read_text(encoding="utf-8")))
