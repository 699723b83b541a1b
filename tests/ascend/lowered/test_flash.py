"""Neighborhood attention's launches, captured from the public op: lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from tests.ascend.lowered import proof
from tests.ascend.lowered.neighborhood_gates import DTYPES, executing
from tests.support import neighborhood_cases
from tests.support.helpers import make_qkv

FLASH = ["forward_kernel", "dq_kernel", "dkdv_kernel"]


def check(**case: Any) -> None:
    """The public op, forward and backward."""
    with executing() as launches:
        neighborhood_cases.check("ascend", **case)
    assert [one.kernel.fn.__name__ for one in launches] == FLASH


@pytest.mark.ascend
@pytest.mark.parametrize("tier", tiling.TIERS)
@pytest.mark.parametrize("block_d", tiling.BLOCKS_D)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_specialisation(dtype: torch.dtype, block_d: int, tier: int) -> None:
    """All (dtype, D, tier), by which `specialisations` lists the flash kernels."""
    check(dtype=dtype, **widest(block_d, tier))


def widest(block_d: int, tier: int) -> dict[str, Any]:
    """The largest head dim and window that tiles are chosen for together."""
    return {"tokens": 150, "dim": block_d, "kernel_size": tier, "boundary": "shift"}


CASES: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 63, "dim": 128, "boundary": "shift"},
    "dilated, grouped, even": {"tokens": 301, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2},
}


@pytest.mark.ascend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, dtype: torch.dtype) -> None:
    check(dtype=dtype, **CASES[case])


@pytest.mark.ascend
@pytest.mark.parametrize("window", neighborhood_cases.WINDOWS)
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 7])
def test_every_short_length(kernel_size: int, window: str) -> None:
    """N = 1 ... 70 with every such window, dtypes and dilations in turn; few builds, for sizes are run-time values."""
    boundary = neighborhood_cases.WINDOWS[window]
    with proof.executing() as launches:
        for tokens in range(1, 71):
            kind = {"dtype": DTYPES[(tokens + kernel_size) % 3], "heads": 1 + (tokens % 5 == 0)}
            size = {"kernel_size": kernel_size, "dilation": 1 + tokens // 3 % 2}
            neighborhood_cases.check("ascend", tokens, **kind, **size, **boundary)
    assert [one.kernel.fn.__name__ for one in launches] == FLASH * 70


def launches() -> list[Launch]:
    """The launches that the tests above execute, only recorded."""
    cases = [widest(block_d, tier) for block_d in tiling.BLOCKS_D for tier in tiling.TIERS]
    with recording(run=False) as found:
        for dtype, case in product(DTYPES, [*cases, *CASES.values()]):
            inputs, do, options = neighborhood_cases.make(dtype=dtype, **case)
            neighborhood_cases.results("ascend", inputs, do, **options)
    return found


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
