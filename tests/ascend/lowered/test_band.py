"""The band: launches of the public functions, lowered by triton-ascend, executed under guard pages, gated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import band as band_attention
from tests.ascend.lowered import proof
from tests.ascend.lowered.neighborhood_gates import DTYPES, executed, executing
from tests.ascend.lowered.neighborhood_launches import BAND
from tests.support import band_cases, cases, neighborhood_cases
from tests.support.helpers import make_qkv


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(BAND, DTYPES), ids=str)
def test_cases(case: str, dtype: torch.dtype) -> None:
    band_cases.check(executed, "ascend", dtype=dtype, **BAND[case])


ALGORITHM_CASES: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64, "heads": 1},
    "as pairs": {"tokens": 150, "kernel_size": 6, "dilation": 3, "boundary": "shift", "dim": 40},
}


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(ALGORITHM_CASES, DTYPES), ids=str)
def test_differentiable_op(case: str, dtype: torch.dtype) -> None:
    """`algorithm="band"`: the backward takes the band beyond 2048 tokens, and pairs up to them."""
    with executing() as launches:
        neighborhood_cases.check("ascend", dtype=dtype, algorithm="band", **ALGORITHM_CASES[case])
    backward = "ds_kernel" if case == "2304 tokens" else "dense_ds_kernel"
    assert backward in [one.kernel.fn.__name__ for one in launches]


@pytest.mark.parametrize(("dtype", "dim"), cases.product(DTYPES[::-1], [64, 256]), ids=str)
def test_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(1500, dim=dim, dtype=dtype)
    window = {"dilation": 1, "boundary": "shift", "causal": False, "backend": "triton"}
    with recording(run=False) as launches:
        _, band = band_attention.forward(q, k, v, kernel_size=9, softmax_scale=None, **window)
        for fused in (True, False):
            band_attention.backward(q, q, k, v, band, kernel_size=9, softmax_scale=None, fused=fused, **window)
        band_attention.expand_band(band, **window)
    assert {one.kernel for one in launches} == set(band_attention.KERNELS.values())
    proof.assert_compiles(launches)
