"""The band's launches, captured from its launchers: lowered by triton-ascend, executed under guard pages, gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gates
import proof
import pytest
import torch

from ascend_kernels import band_attention, tiling
from ascend_kernels.launch import Launch, recording
from tests.band_cases import check
from tests.helpers import make_qkv

COPIES = {
    "scores_kernel": {"load": 2, "store": 1},
    "ds_kernel": {"load": 3, "store": 1},
    "rows_kernel": {"load": 2, "store": 1},
    "columns_kernel": {"load": 2, "store": 1},
    "gradients_kernel": {"load": 6, "store": 3},
    "expand_kernel": {"load": 1, "store": 1},
}
MATMULS = {
    "scores_kernel": 1,
    "ds_kernel": 1,
    "rows_kernel": 1,
    "columns_kernel": 1,
    "gradients_kernel": 3,
    "expand_kernel": 0,
}
MLIR_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def executed(dtype: torch.dtype) -> Callable[[Callable[[], Any]], Any]:
    """How band_cases.check is to run a launcher: its launches from their gated Linalg."""

    def run(function: Callable[[], Any]) -> Any:
        with recording(run=False) as launches:
            result = function()
        for one in launches:
            gate(one, dtype)
        proof.execute(launches)
        return result

    return run


def gate(launch: Launch, dtype: torch.dtype) -> None:
    name = launch.kernel.fn.__name__
    linalg = proof.lower(launch).linalg
    gates.assert_no_single_element_loops(linalg, name)
    if MATMULS[name]:
        gates.assert_matmul_inputs(linalg, MLIR_NAMES[dtype], name)
    assert gates.count(linalg, "linalg.matmul") == MATMULS[name]
    assert gates.count_block_copies(linalg) == COPIES[name]
    gates.assert_plan_is_honest(plan_of(launch, dtype), linalg, name)


def plan_of(launch: Launch, dtype: torch.dtype) -> tiling.Plan:
    """What the planner counted for the launch, which must be one of the specialisations."""
    kernel = "band_" + launch.kernel.fn.__name__.removesuffix("_kernel")
    of = torch.float32 if kernel == "band_expand" else dtype
    block_m, block_n = launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]
    tiles = tiling.Tiles(block_m, block_n, launch.constants.get("BLOCK_D", tiling.MIN_BLOCK_D))
    assert (kernel, of, tiles) in set(tiling.specialisations())
    plan = tiling.Plan(tiles, launch.grid, tiling.live_bytes(kernel, tiles, of.itemsize), {})
    gates.assert_plan(plan)
    return plan


CASES: dict[str, dict[str, Any]] = {
    "the seed's failure": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 33, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 150, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "moved, dilated": {"tokens": 151, "kernel_size": 40, "dilation": 2, "boundary": "shift", "dim": 32},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "widest features": {"tokens": 50, "kernel_size": 9, "boundary": "shift", "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "fewer tokens than keys, truncated": {"tokens": 5, "kernel_size": 64, "dim": 64},
    "one token": {"tokens": 1, "dim": 64},
    "one key": {"tokens": 40, "kernel_size": 1, "dim": 16},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "layout": "head-major", "batch": 2},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, dtype: torch.dtype) -> None:
    """Both lengths of `tiling.BAND_LENGTHS` are among them, so every specialisation is."""
    check(executed(dtype), "ascend", dtype=dtype, **CASES[case])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(1500, dim=dim, dtype=dtype)
    window = {"dilation": 1, "boundary": "shift", "causal": False, "backend": "triton"}
    with recording(run=False) as launches:
        _, band = band_attention.forward(q, k, v, kernel_size=9, softmax_scale=None, **window)
        for fused in (True, False):
            band_attention.backward(q, q, k, v, band, kernel_size=9, softmax_scale=None, fused=fused, **window)
        band_attention.expand_band(band, **window)
    assert {one.kernel.fn.__name__ for one in launches} == set(COPIES)
    for one in launches:
        assert proof.compile_ptx(one).shared_bytes <= 227 << 10
