"""Kernels in Triton's interpreter, on CPU tensors: offsets past 2^31, tables of pointers, and how often memory is read.

test_launch.py runs this file in a process of its own, since TRITON_INTERPRET must be set before triton is imported.
lowered/ and test_compiled.py execute kernels as devices get them, and hold everything else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from dispatch import attention_residual
from tests.support import cases, neighborhood_cases
from tests.support.residual_cases import EPS, check, make, through_the_public_op

ALGORITHMS = ("flash", "band", "dense")


@pytest.mark.parametrize(("algorithm", "far"), cases.some(zip(ALGORITHMS, range(3), strict=True), ALGORITHMS, range(3)))
def test_offsets_beyond_int32(algorithm: str, far: int) -> None:
    """Args: `far`, the dimension with a large stride: sequences, tokens or heads."""
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 2, "dtype": torch.float16}
    sizes |= {"kernel_size": 5, "dilation": 2, "boundary": "shift"}
    neighborhood_cases.check("triton", 9, **sizes, algorithm=algorithm, far=far)


@pytest.mark.parametrize(("backend", "dim"), [("triton", 48), ("ascend", 2064)])
def test_tables_of_pointers(backend: str, dim: int) -> None:
    """17 blocks with memory of their own."""
    check(backend, 2, dim, 17, through_the_public_op, layout="list")


class Traffic:
    """Addresses that kernels load from, and store to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[tuple[Any, Any]] = []
        self.stores: list[tuple[Any, Any]] = []
        for name, accesses in (("create_masked_load", self.loads), ("create_masked_store", self.stores)):
            monkeypatch.setattr(InterpreterBuilder, name, self._noting(getattr(InterpreterBuilder, name), accesses))

    @staticmethod
    def _noting(access: Any, accesses: list[tuple[Any, Any]]) -> Any:
        def noted(builder: Any, ptrs: Any, *rest: Any) -> Any:
            mask = next(x for x in rest if x.data.dtype == bool)
            accesses.append((ptrs.data, mask.data))
            return access(builder, ptrs, *rest)

        return noted

    @staticmethod
    def of(tensor: torch.Tensor, accesses: list[tuple[Any, Any]]) -> float:
        """Times that the elements of a tensor are accessed, on average."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return sum(int((mask & (ptrs >= start) & (ptrs < end)).sum()) for ptrs, mask in accesses) / tensor.numel()


@pytest.mark.parametrize(
    ("backend", "dim", "blocks", "readings"),
    [
        ("ascend", 32, 5, (1, 1, 1)),  # a token is one tile
        ("ascend", 32, 9, (1, 2, 1)),
        ("ascend", 2064, 3, (2, 2, 2)),
        *cases.rest(
            ("triton", 8192, 5, (1, 2, 1)),  # the second time from the L2
            ("ascend", 1040, 5, (1, 2, 1)),
            ("triton", 4096, 5, (1, 1, 1)),
        ),
    ],
)
def test_traffic(
    backend: str, dim: int, blocks: int, readings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V is read, forward and backward, and do, as often as residual/tiling.py says; results are written once."""
    case = make(5, dim, blocks)
    traffic = Traffic(monkeypatch)
    out = attention_residual(case.blocks, case.w_query, case.w_norm, EPS, backend=backend)
    assert isinstance(case.blocks, torch.Tensor)
    forward, backward, of_do = readings
    assert traffic.of(case.blocks, traffic.loads) == forward
    assert traffic.of(out, traffic.stores) == 1
    traffic.loads.clear()
    dblocks, *_ = torch.autograd.grad(out, case.leaves, case.do)
    assert traffic.of(case.blocks, traffic.loads) == backward
    assert traffic.of(case.do, traffic.loads) == of_do
    assert traffic.of(dblocks, traffic.stores) == 1
