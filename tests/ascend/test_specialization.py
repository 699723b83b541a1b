"""Launches that share a compiled kernel are those for which Triton would compile the same code."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ascend_kernels.launch import specialization


@triton.jit(do_not_specialize=("size",))
def kernel(p_x, stride, size, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Hopper:
    """Stands in for the driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_equal_specializations_are_equal_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", Hopper())
    memory = torch.zeros(64)
    integers = 0, 1, 3, 16, 2**31 - 1, 2**31, 2**40 + 1
    tensors = memory, memory[1:], memory[4:], memory.half(), memory.half()[1:]
    *_, bind = kernel.create_binder()
    found: dict[Any, set[str]] = {}
    for p_x, stride, size, scale in product(tensors, integers, integers, (0.5, 2.0)):
        arguments = {"p_x": p_x, "stride": stride, "size": size, "scale": scale}
        _, own, _ = bind(**arguments, BLOCK=1)
        found.setdefault(specialization(kernel, arguments, {"BLOCK": 1}, {}), set()).add(str(own))
    assert max(map(len, found.values())) == 1
    assert len(found) == len(set().union(*found.values()))


@pytest.mark.parametrize("changed", [{"BLOCK": 2}, {"num_warps": 8}], ids=str)
def test_constants_and_options_count(changed: dict[str, int]) -> None:
    arguments = {"p_x": torch.zeros(4), "stride": 1, "size": 1, "scale": 1.0}
    constants, options = {"BLOCK": 1}, {"num_warps": 4}
    other = {**constants, **{k: v for k, v in changed.items() if k in constants}}, {**options, **changed}
    assert specialization(kernel, arguments, constants, options) != specialization(kernel, arguments, *other)
