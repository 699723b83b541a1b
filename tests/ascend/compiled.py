"""Triton's machine code without a GPU: launches of a call, compiled for a compute capability and run in tests/ptx.

sm_80, sm_89 and sm_120 have mma.sync and cp.async, which the machine executes. Every access is checked, shared memory
starts as NaN, and what no barrier or wait orders raises.
"""

from __future__ import annotations

import functools
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import triton
from torch import Tensor

import tests.ptx.launch as machine
from ascend_kernels.launch import Launch, recording
from tests.ascend.lowered.proof import Ptx, compile_ptx
from tests.ptx.order import Order
from tests.ptx.program import Program

SHARED_LIMITS = {"S": 99 << 10, "M": 163 << 10, "L": 227 << 10}
"""Bytes of shared memory that a block may use, by class of GPUs."""

CLASSES = {80: "M", 86: "S", 89: "S", 90: "L", 100: "L", 103: "L", 120: "S"}
"""ascend_kernels.device.memory_class of each."""

FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f", "u1": "<?"}


@contextmanager
def executing(capability: int) -> Iterator[list[Launch]]:
    """Context that executes each launch inside it, on CPU tensors, and collects the launches."""
    with recording(run=lambda launch: execute(launch, capability)) as launches:
        yield launches


def execute(launch: Launch, capability: int) -> None:
    """Run one launch; its tensors get the results."""
    ptx = compile_ptx(launch, capability)
    check_shared(launch, ptx, capability)
    program = program_of(ptx.ptx)
    values = [launch.arguments[name] for name in ptx.signature]
    arguments = [packed(value, kind) for value, kind in zip(values, ptx.signature.values(), strict=True)]
    arguments += [bytes(8)] * (len(program.parameter_sizes) - len(arguments))  # scratch memory, which is not used
    grid = (*launch.grid, 1, 1)[:3]
    run = machine.Launch(program.name, arguments, grid, program.block, (1, 1, 1), ptx.shared_bytes, [])
    order = Order(keep_going=True)
    program.launch(run, [x for x in values if isinstance(x, Tensor)], observer=order)
    # Triton lets all warps that hold a value store it, by one instruction
    found = [x for x in order.findings if x.first != x.second or "reads" in x.text]
    assert not found, f"{launch.kernel.fn.__name__}: {found[0]}"


def check_shared(launch: Launch, ptx: Ptx, capability: int) -> None:
    limit = SHARED_LIMITS[CLASSES[capability]]
    assert ptx.shared_bytes <= limit, f"{launch.kernel.fn.__name__}: {ptx.shared_bytes} bytes of shared memory"


def spilled_bytes(ptx: Ptx, capability: int) -> int:
    """Bytes of registers that a thread stores to local memory, as Triton's assembler reports."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = tools / ("ptxas-blackwell" if capability >= 90 and (tools / "ptxas-blackwell").exists() else "ptxas")
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx.ptx, encoding="utf-8")
        command = [tool, "-v", f"--gpu-name={target}", source, "-o", Path(folder, "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", report)
    assert found, report
    return int(found[1])


@functools.lru_cache(maxsize=64)
def program_of(ptx: str) -> Program:
    return Program(ptx)


def packed(value: object, kind: str) -> bytes:
    """A parameter's bytes."""
    if isinstance(value, Tensor):
        return struct.pack("<Q", value.data_ptr())
    return struct.pack(FORMATS[kind], value)
