"""What must hold of a launch, of a plan and of lowered Linalg, beside right results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Protocol

from tests.ascend.lowered.liveness import live_bytes

MAX_GRID = 65535
"""coreDim: the product of the grid's dims."""

CAPACITY = {
    "A2": {"UB": 192 << 10, "L1": 512 << 10, "L0A": 64 << 10, "L0B": 64 << 10, "L0C": 128 << 10},
    "A3": {"UB": 192 << 10, "L1": 512 << 10, "L0A": 64 << 10, "L0B": 64 << 10, "L0C": 128 << 10},
    "950": {"UB": 256 << 10, "L1": 512 << 10, "L0A": 64 << 10, "L0B": 64 << 10, "L0C": 256 << 10},
}
"""Bytes of each on-chip memory. Vector tiles live in UB, operands and results of `tl.dot` in the others."""


class Plan(Protocol):
    """What a launch planner returns, as far as the gates look at it."""

    @property
    def grid(self) -> tuple[int, ...]: ...

    @property
    def live_bytes(self) -> Mapping[str, int]:
        """Bytes alive at once in each memory, by the names in `CAPACITY`; absent: unused."""


def assert_grid(grid: tuple[int, ...], what: str = "grid") -> None:
    programs = math.prod(grid)
    assert 1 <= programs <= MAX_GRID, f"{what}: {programs} programs {grid}, Ascend takes 1 to {MAX_GRID}"


def assert_plan(plan: Plan, device: str = "A2", what: str = "plan") -> None:
    """The grid can be launched, and every memory holds what the plan keeps alive in it."""
    assert_grid(plan.grid, what)
    capacity = CAPACITY[device]
    unknown = set(plan.live_bytes) - set(capacity)
    assert not unknown, f"{what}: no memory is called {sorted(unknown)}"
    for memory, live in plan.live_bytes.items():
        assert live <= capacity[memory], f"{what}: {live} bytes live in {memory}, {device} has {capacity[memory]}"


def assert_plan_is_honest(plan: Plan, linalg: str, what: str = "plan") -> None:
    """In each memory the plan counts what the lowered kernel keeps alive at once, or more."""
    for memory, alive in live_bytes(linalg).items():
        counted = plan.live_bytes.get(memory, 0)
        assert alive <= counted, f"{what}: the kernel keeps {alive} bytes alive in {memory}, the plan counts {counted}"


def assert_no_single_element_loops(linalg: str, what: str = "kernel") -> None:
    """Every access is a copy of a block: the adapter marks the loops that it made otherwise."""
    loops = count(linalg, "ExtractedLoadOrStore")
    assert loops == 0, f"{what}: {loops} loads or stores are loops over single elements (ExtractedLoadOrStore)"


def assert_matmul_inputs(linalg: str, dtype: str, what: str = "kernel") -> None:
    """There are matmuls, and all take operands of `dtype` ("bf16", "f16", "f32"), not of an upcast."""
    inputs = re.findall(
        r"linalg\.(?:batch_)?matmul\w*\b.*? ins\([^:]*: tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", linalg
    )
    assert inputs, f"{what}: no matmul"
    assert len(re.findall(r"\blinalg\.(?:batch_)?matmul\w*", linalg)) == len(inputs), (
        f"{what}: a matmul whose operands cannot be read"
    )
    assert {name for pair in inputs for name in pair} == {dtype}, f"{what}: matmul operands {inputs}, not {dtype}"


def count(linalg: str, operation: str) -> int:
    """How often an operation or attribute occurs; `linalg.matmul` counts no `linalg.matmul_transpose_b`."""
    return len(re.findall(rf"(?<![\w.]){re.escape(operation)}(?!\w)", linalg))


def count_block_copies(linalg: str) -> dict[str, int]:
    """Copies of whole blocks: "load" from global memory into a tile, "store" of a tile to it."""
    return {"load": count(linalg, "memref.copy"), "store": count(linalg, "bufferization.materialize_in_destination")}
