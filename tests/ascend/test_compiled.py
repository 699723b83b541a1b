"""Neighborhood attention and attention residual in Triton, compiled for GPUs that are not there, and executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kernels import device
from ascend_kernels.launch import recording
from nsa import attention_residual, neighborhood_attention
from tests.ascend import compiled
from tests.ascend.lowered import description
from tests.support import cases

CAPABILITIES = (80, 89, 120)
WINDOWS: dict[str, dict[str, Any]] = {
    "one pass": {"kernel_size": 7, "dilation": 2},
    "moved inside": {"kernel_size": 12, "boundary": "shift"},
    "wide": {"kernel_size": 60, "causal": True},
    "band": {"kernel_size": 5, "algorithm": "band"},
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach().double(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("window", "dtype", "capability"),
    cases.some(
        [("one pass", torch.bfloat16, 89), ("wide", torch.float16, 120)],
        WINDOWS,
        [torch.bfloat16, torch.float16, torch.float32],
        CAPABILITIES,
    ),
)
def test_neighborhood_attention(window: str, dtype: torch.dtype, capability: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, h, 32, dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    do = torch.randn(q.shape, dtype=dtype)
    with compiled.executing(capability):
        out = neighborhood_attention(q, k, v, **WINDOWS[window], backend="triton")
        gradients = torch.autograd.grad(out, (q, k, v), do)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options = {name: value for name, value in WINDOWS[window].items() if name != "algorithm"}
    expected = neighborhood_attention(*exact, **options, backend="reference")
    budget = 4 * torch.finfo(dtype).eps
    assert relative(out, expected) < budget
    for got, wanted in zip(gradients, torch.autograd.grad(expected, exact, do.double()), strict=True):
        assert relative(got, wanted) < budget


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("blocks", "dim", "capability"), cases.some([(3, 40, 80), (5, 2100, 120)], [3, 33], [40, 2100], CAPABILITIES)
)
def test_attention_residual(blocks: int, dim: int, capability: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(blocks, 1, 5, dim, dtype=torch.bfloat16, requires_grad=True)
    w_query, w_norm = (torch.randn(dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    do = torch.randn(1, 5, dim, dtype=torch.bfloat16)
    with compiled.executing(capability):
        out = attention_residual(x, w_query, w_norm, backend="triton")
        gradients = torch.autograd.grad(out, (x, w_query, w_norm), do)
    exact = [t.detach().double().requires_grad_() for t in (x, w_query, w_norm)]
    expected = attention_residual(*exact, backend="reference")
    assert relative(out, expected) < 2**-7
    for got, wanted in zip(gradients, torch.autograd.grad(expected, exact, do.double()), strict=True):
        assert relative(got, wanted) < 2**-6


SPILLS = {torch.bfloat16: 160, torch.float32: 3600}
"""Most bytes of registers that a thread stores to memory; kernels in fp32 multiply without tensor cores."""


@pytest.mark.full
@pytest.mark.parametrize("capability", compiled.CLASSES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", SPILLS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
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
