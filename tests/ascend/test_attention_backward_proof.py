"""The dense backward's launches, captured from the public function: lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from typing import Any

import gates
import proof
import pytest
import torch

from ascend_kernels import dense_attention, tiling
from ascend_kernels.launch import Launch, recording
from dispatch import neighborhood_attention_backward
from tests import backward_cases

MATMULS = {"dense_dv_kernel": 1, "dense_ds_kernel": 2, "dense_dqdk_kernel": 2}
COPIES = {
    "dense_dv_kernel": {"load": 2, "store": 1},
    "dense_ds_kernel": {"load": 6, "store": 1},
    "dense_dqdk_kernel": {"load": 4, "store": 2},
}
MLIR_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def launches_of(inputs: tuple[torch.Tensor, ...], window: dict[str, Any], persistent: bool | None) -> Any:
    """Gradients not computed yet, and what computes them."""
    with recording(run=False) as launches:
        if persistent is None:
            gradients = neighborhood_attention_backward(*inputs, **window, path="dense", backend="ascend")
        else:
            gradients = dense_attention.backward(*inputs, **window, backend="ascend", persistent=persistent)
    return gradients, launches


def gate(launches: list[Launch], dtype: torch.dtype) -> None:
    """Block copies and matrix products of the inputs' dtype only, with tiles from the list."""
    known = set(tiling.specialisations())
    for one in launches:
        name = one.kernel.fn.__name__
        if name not in MATMULS:
            continue  # the expansion of a band
        linalg = proof.lower(one).linalg
        gates.assert_no_single_element_loops(linalg, name)
        gates.assert_matmul_inputs(linalg, MLIR_NAMES[dtype], name)
        assert gates.count(linalg, "linalg.matmul") == MATMULS[name]
        assert gates.count_block_copies(linalg) == COPIES[name]
        tiles = tiling.Tiles(*(one.constants[block] for block in ("BLOCK_M", "BLOCK_N", "BLOCK_D")))
        kernel = name.removesuffix("_kernel")
        assert (kernel, dtype, tiles) in known
        plan = tiling.Plan(tiles, one.grid, tiling.live_bytes(kernel, tiles, dtype.itemsize), one.options)
        gates.assert_plan(plan, what=name)
        gates.assert_plan_is_honest(plan, linalg, name)


CASES: dict[str, dict[str, Any]] = {
    "a band": {"tokens": 150, "dim": 64, "kernel_size": 16, "boundary": "shift"},
    "all pairs": {"tokens": 150, "dim": 128, "kernel_size": 9, "dense": True},
    "the longest": {"tokens": 2048, "dim": 64, "kernel_size": 63, "heads": 1, "dense": True},
    "dilated, grouped, even": {"tokens": 201, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "one token": {"tokens": 1, "dim": 64},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2, "dense": True},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, dtype: torch.dtype) -> None:
    """These are all specialisations: tiles depend on the dtype alone."""
    inputs, window = backward_cases.make(dtype=dtype, **CASES[case])
    gradients, launches = launches_of(inputs, window, None)
    gate(launches, dtype)
    proof.execute(launches)
    backward_cases.assert_gradients(gradients, inputs, window, case)


@pytest.mark.ascend
def test_plain_and_persistent_give_the_same_bits() -> None:
    inputs, window = backward_cases.make(150, dim=80, heads=8, kv_heads=4, batch=2, dtype=torch.bfloat16, dense=True)
    results = []
    for persistent in (False, True):
        gradients, launches = launches_of(inputs, window, persistent)
        assert [one.grid for one in launches] == ([(20,)] * 3 if persistent else [(48,), (48,), (48,)])
        proof.execute(launches)
        results.append(gradients)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_for_sm_90(dtype: torch.dtype) -> None:
    inputs, window = backward_cases.make(200, dim=128, dtype=dtype, dense=True)
    with recording(run=False) as launches:
        neighborhood_attention_backward(*inputs, **window, path="dense", backend="triton")
    assert len(launches) == 3
    for one in launches:
        assert proof.compile_ptx(one).shared_bytes <= 227 << 10
