"""Neighborhood attention's launches, captured from the public op: lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gates
import proof
import pytest
import torch
from torch import Tensor

from ascend_kernels import tiling
from ascend_kernels.device import DEVICES
from ascend_kernels.launch import Launch, recording
from dispatch import neighborhood_attention
from tests import neighborhood_cases
from tests.helpers import make_qkv

MATMULS = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4}
COPIES = {
    "forward_kernel": {"load": 3, "store": 2},
    "dq_kernel": {"load": 6, "store": 2},
    "dkdv_kernel": {"load": 6, "store": 2},
}
MLIR_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def executed(*qkv: Tensor, **options: Any) -> Tensor:
    """The public op, whose launches run from their Linalg, forward and backward."""
    return proof.executed(partial(neighborhood_attention, **options), *qkv, gate=gate)


def gate(launches: Sequence[Launch]) -> None:
    assert [one.kernel.fn.__name__ for one in launches] in (["forward_kernel"], ["dq_kernel", "dkdv_kernel"])
    for one in launches:
        name = one.kernel.fn.__name__
        linalg = proof.lower(one).linalg
        gates.assert_no_single_element_loops(linalg, name)
        gates.assert_matmul_inputs(linalg, MLIR_NAMES[one.arguments["p_q"].dtype], name)
        assert gates.count(linalg, "linalg.matmul") == MATMULS[name]
        assert gates.count_block_copies(linalg) == COPIES[name]
        plan = plan_of(one)
        gates.assert_plan_is_honest(plan, linalg, name)
        for device in DEVICES:
            gates.assert_plan(plan, device, name)


def plan_of(one: Launch) -> tiling.Plan:
    """What the planner counts for the tiles and the grid that were launched."""
    tiles = tiles_of(one)
    kernel, itemsize = one.kernel.fn.__name__.removesuffix("_kernel"), one.arguments["p_q"].element_size()
    return tiling.Plan(tiles, one.grid, tiling.live_bytes(kernel, tiles, itemsize), one.options)


def tiles_of(one: Launch) -> tiling.Tiles:
    return tiling.Tiles(*(one.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D", "ONE_PASS")))


@pytest.fixture(autouse=True)
def _executed_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighborhood_cases, "neighborhood_attention", executed)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.ascend
@pytest.mark.parametrize("tier", tiling.TIERS)
@pytest.mark.parametrize("block_d", tiling.BLOCKS_D)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_specialisation(dtype: torch.dtype, block_d: int, tier: int) -> None:
    """All (dtype, D, tier), which is what `specialisations` is made of."""
    with recording(run=True) as launches:
        neighborhood_cases.check("ascend", 150, heads=2, dim=block_d, dtype=dtype, kernel_size=tier, boundary="shift")
    assert len(launches) == 3
    known = set(tiling.specialisations())
    for one in launches:
        assert (one.kernel.fn.__name__.removesuffix("_kernel"), dtype, tiles_of(one)) in known


CASES: dict[str, dict[str, Any]] = {
    "the seed's failure": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 63, "dim": 128, "boundary": "shift"},
    "dilated, grouped, even": {"tokens": 301, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "one token": {"tokens": 1, "dim": 64},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, dtype: torch.dtype) -> None:
    neighborhood_cases.check("ascend", dtype=dtype, **CASES[case])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(500, dim=dim, dtype=dtype, requires_grad=True)
    with recording(run=False) as launches:
        out = neighborhood_attention(q, k, v, kernel_size=9, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert len(launches) == 3
    for one in launches:
        assert proof.compile_ptx(one).shared_bytes <= 227 << 10
