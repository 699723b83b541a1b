"""The band: launches of the public functions, lowered by triton-ascend, executed under guard pages, gated."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import band as band_attention
from tests.ascend.lowered import proof
from tests.ascend.lowered.neighborhood_gates import DTYPES, executed, executing
from tests.support import band_cases, neighborhood_cases
from tests.support.helpers import make_qkv

CASES: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 33, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 150, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "moved, dilated": {"tokens": 151, "kernel_size": 40, "dilation": 2, "boundary": "shift", "dim": 32},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "widest features": {"tokens": 50, "kernel_size": 9, "boundary": "shift", "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "fewer tokens than keys, truncated, features padded": {"tokens": 5, "kernel_size": 64, "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "one key": {"tokens": 40, "kernel_size": 1, "dim": 16},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "layout": "head-major", "batch": 2},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, dtype: torch.dtype) -> None:
    band_cases.check(executed, "ascend", dtype=dtype, **CASES[case])


def launches() -> list[Launch]:
    """The launches that `test_cases` executes, only recorded."""
    with recording(run=False) as found:
        for dtype, case in product(DTYPES, CASES.values()):
            band_cases.results(lambda function: function(), "ascend", *band_cases.make(dtype=dtype, **case))
    return found


ALGORITHM_CASES: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64, "heads": 1},
    "as pairs": {"tokens": 150, "kernel_size": 6, "dilation": 3, "boundary": "shift", "dim": 40},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ALGORITHM_CASES)
def test_differentiable_op(case: str, dtype: torch.dtype) -> None:
    """`algorithm="band"`: the backward takes the band beyond 2048 tokens, and pairs up to them."""
    with executing() as launches:
        neighborhood_cases.check("ascend", dtype=dtype, algorithm="band", **ALGORITHM_CASES[case])
    backward = "ds_kernel" if case == "2304 tokens" else "dense_ds_kernel"
    assert backward in [one.kernel.fn.__name__ for one in launches]


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
    assert {one.kernel for one in launches} == set(band_attention.KERNELS.values())
    for one in launches:
        assert proof.compile_ptx(one).shared_bytes <= 227 << 10
