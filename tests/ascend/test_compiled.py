"""Neighborhood attention and attention residual in Triton, compiled for GPUs that are not there, and executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kernels import device
from ascend_kernels.launch import recording
from nsa import neighborhood_attention
from tests.ascend import compiled
from tests.ascend.lowered import description
from tests.support import cases, neighborhood_cases, residual_cases
from tests.support.neighborhood_cases import LARGE_LOGITS

CAPABILITIES = (80, 89, 120)
WINDOWS: dict[str, dict[str, Any]] = {
    "one pass": {"kernel_size": 7, "dilation": 2},
    "moved inside": {"kernel_size": 12, "boundary": "shift"},
    "wide": {"kernel_size": 60, "causal": True},
    "band": {"kernel_size": 5, "algorithm": "band"},
}
NEIGHBORHOODS: dict[str, dict[str, Any]] = {
    **WINDOWS,
    "one pass of dkdv": {"kernel_size": 33, "causal": True, "dim": 64},
    "two passes, in one tensor": {"kernel_size": 34, "dilation": 2, "packed": True},
    "logits in the hundreds": {"tokens": 40, **LARGE_LOGITS["of groups"]},
}


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "dtype", "capability"),
    cases.some(
        [
            ("moved inside", torch.bfloat16, 89),
            ("wide", torch.float16, 120),
            ("band", torch.float16, 120),
            ("two passes, in one tensor", torch.float16, 80),
            ("logits in the hundreds", torch.float16, 89),
        ],
        NEIGHBORHOODS,
        [torch.bfloat16, torch.float16, torch.float32],
        CAPABILITIES,
    ),
)
def test_neighborhood_attention(case: str, dtype: torch.dtype, capability: int) -> None:
    with compiled.executing(capability):
        neighborhood_cases.check("triton", dtype=dtype, **{"tokens": 70, **NEIGHBORHOODS[case]})


RESIDUALS: dict[str, dict[str, Any]] = {
    "rows": {"dim": 40, "blocks": 3},
    "a list": {"dim": 40, "blocks": 5, "layout": "list", "norm": False},
    "equal blocks, read twice": {"dim": 40, "blocks": 33, "spread": 0.0, "logits": 100.0},
    "long rows": {"dim": 2100, "blocks": 5},
}


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "capability"), cases.some([("a list", 80), ("long rows", 120)], RESIDUALS, CAPABILITIES)
)
def test_attention_residual(case: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs stride over several tokens."""
    monkeypatch.setattr(device, "GPU_CORES", 1)
    run = residual_cases.through_the_public_op
    with compiled.executing(capability):
        residual_cases.check("triton", 5, run=run, dtype=torch.bfloat16, **RESIDUALS[case])


SPILLS = {torch.bfloat16: 160, torch.float32: 3600}
"""Most bytes of registers that a thread stores to memory; kernels in fp32 multiply without tensor cores."""


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "dim", "capability"),
    cases.some(
        [(2, torch.bfloat16, 128, 90), (4, torch.float32, 64, 90)], [4, 2], SPILLS, [64, 128, 256], compiled.CLASSES
    ),
)
def test_shared_memory_and_spills_of_neighborhoods(
    kv_heads: int, dtype: torch.dtype, dim: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "memory_class", lambda _: compiled.CLASSES[capability])
    q, k, v = (torch.zeros(1, 512, h, dim, dtype=dtype, requires_grad=True) for h in (4, kv_heads, kv_heads))
    with recording(run=False) as launches:
        for window in WINDOWS.values():
            out = neighborhood_attention(q, k, v, **window, backend="triton")
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    for launch in {description.key_of(launch): launch for launch in launches}.values():
        ptx = compiled.compile_ptx(launch, capability)
        compiled.check_shared(launch, ptx, capability)
        spilled = compiled.spilled_bytes(ptx, capability)
        assert spilled <= SPILLS[dtype], f"{launch.kernel.fn.__name__}: {spilled}"
