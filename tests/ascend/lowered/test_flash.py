"""Neighborhood attention's launches, captured from the public op: lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from tests.ascend.lowered import proof
from tests.ascend.lowered.neighborhood_gates import DTYPES, executing
from tests.ascend.lowered.neighborhood_launches import FLASH, widest
from tests.support import cases, neighborhood_cases
from tests.support.helpers import make_qkv

KERNELS = ["forward_kernel", "dq_kernel", "dkdv_kernel"]


def check(**case: Any) -> None:
    """The public op, forward and backward."""
    with executing() as launches:
        neighborhood_cases.check("ascend", **case)
    assert [one.kernel.fn.__name__ for one in launches] == KERNELS


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("dtype", "block_d", "tier"), cases.product(DTYPES, tiling.BLOCKS_D, tiling.TIERS, cover=2), ids=str
)
def test_every_specialisation(dtype: torch.dtype, block_d: int, tier: int) -> None:
    """All (dtype, D, tier), by which `specialisations` lists the flash kernels; any two of the three in every run."""
    check(dtype=dtype, **widest(block_d, tier))


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(FLASH, DTYPES), ids=str)
def test_cases(case: str, dtype: torch.dtype) -> None:
    check(dtype=dtype, **FLASH[case])


SHORT = [(7, "truncate"), (2, "shift"), (7, "causal")]
"""In every run, of k = 1, 2, 3, 4 and 7."""


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("kernel_size", "window"), cases.some(SHORT, [1, 2, 3, 4, 7], neighborhood_cases.WINDOWS), ids=str
)
def test_every_short_length(kernel_size: int, window: str) -> None:
    """N = 1 ... 70 with every such window, dtypes and dilations in turn; few builds, for sizes are run-time values."""
    boundary = neighborhood_cases.WINDOWS[window]
    with proof.executing() as launches:
        for tokens in range(1, 71):
            kind = {"dtype": DTYPES[(tokens + kernel_size) % 3], "heads": 1 + (tokens % 5 == 0)}
            size = {"kernel_size": kernel_size, "dilation": 1 + tokens // 3 % 2}
            neighborhood_cases.check("ascend", tokens, **kind, **size, **boundary)
    assert [one.kernel.fn.__name__ for one in launches] == KERNELS * 70


@pytest.mark.parametrize(("dtype", "dim"), cases.product(DTYPES[::-1], [64, 128, 256]), ids=str)
def test_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(500, dim=dim, dtype=dtype, requires_grad=True)
    with recording(run=False) as launches:
        out = neighborhood_attention(q, k, v, kernel_size=9, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert len(launches) == 3
    proof.assert_compiles(launches)
