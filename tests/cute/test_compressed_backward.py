"""The split backward of the compressed branch (attend/compressed_backward.py) against fp64, on GPUs and interpreted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.attention_gradients import Branch, check_gradients
from tests.support.ptx import Observer, Order, Schedule, interpret_kernels

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles
CUDA = pytest.mark.cuda
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Inputs:
    """What the backward takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    branch: Branch
    length: int
    stride: int
    first_token: int

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def run(self) -> list[Tensor]:
        """Into memory that holds NaN."""
        from cute_kernels.attend.compressed_backward import compressed_backward

        dq = torch.full_like(self.q, math.nan)
        dk, dv = compressed_backward(
            self.q,
            self.k,
            self.v,
            self.do,
            self.branch.lse,
            self.branch.delta,
            length=self.length,
            stride=self.stride,
            scale=self.scale,
            dq=dq,
            first_token=self.first_token,
        )
        return [dq, dk, dv]

    def check(self) -> list[Tensor]:
        got = self.run()
        assert [x.dtype for x in got] == [self.q.dtype, torch.float32, torch.float32]
        check_gradients(got, self.q, self.k, self.v, self.do, [self.branch], self.scale)
        assert not got[0].transpose(1, 2)[~self.branch.lse.isfinite()].any()
        return got


def make(
    rows: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    *,
    length: int = 32,
    stride: int = 16,
    first_token: int = 0,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    device: str = "cuda",
) -> Inputs:
    """Normal inputs; lse is shifted as by the logarithm of a gate, delta is as of an unshifted one."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    entries = (first_token + rows - length) // stride + 1
    q, do = (normal(batch, rows, heads, dim).to(dtype) for _ in range(2))
    k, v = (normal(batch, entries, kv_heads, dim).to(dtype) for _ in range(2))
    token = first_token + torch.arange(rows, device=device)[:, None]
    visible = torch.arange(entries, device=device) * stride + length - 1 <= token
    logits, dp = (
        torch.einsum("bihd,bjhd->bhij", x.float(), y.float().repeat_interleave(heads // kv_heads, 2))
        for x, y in ((q * dim**-0.5, k), (do, v))
    )
    logits = logits.masked_fill(~visible, -math.inf)
    lse = logits.logsumexp(-1)
    delta = ((logits - lse[..., None]).exp() * dp).sum(-1)  # NaN for rows without entries
    lse = lse - 2 * torch.rand(lse.shape, generator=generator, device=device)
    return Inputs(q, k, v, do, Branch(visible, lse, delta), length, stride, first_token)


# Interpreted


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run as the compiler's PTX, on a CPU. Parameter: when copies arrive, and whether races are looked for."""
    from cute_kernels.attend import compressed_backward

    copies, *races = request.param.split(", ")
    schedule = Schedule(late=copies == "late", observer=Order if races else Observer)
    interpret_kernels(monkeypatch, (compressed_backward,), schedule=schedule)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one entry": (70, {"length": 64, "stride": 64, "heads": 1, "kv_heads": 1}),
    "overlapping, D 64": (150, {"length": 32, "stride": 16, "dim": 64, "kv_heads": 1}),
    "two tiles of entries": (331, {"length": 4, "stride": 2, "dim": 64, "heads": 2, "kv_heads": 1}),
    "no phases, batch": (100, {"length": 7, "stride": 5, "dim": 64, "heads": 2, "batch": 2}),
    "last rows": (70, {"length": 32, "stride": 16, "dim": 64, "heads": 2, "first_token": 333}),
    "one row": (1, {"length": 8, "stride": 8, "heads": 8, "kv_heads": 1, "first_token": 1030, "dtype": FP16}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interpreted", "case"),
    [*cases.product(["late"], CASES), ("early", "two tiles of entries")],
    indirect=["interpreted"],
)
@pytest.mark.usefixtures("interpreted")
def test_interpreted(case: str) -> None:
    rows, options = CASES[case]
    make(rows, device="cpu", **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["late, races"], indirect=True)
@pytest.mark.usefixtures("interpreted")
def test_barriers_put_shared_memory_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split has six tiles of rows, so stages are used again; the second one has none of the last entries."""
    from cute_kernels.attend import compressed_backward

    monkeypatch.setattr(compressed_backward, "MIN_STEPS", 6)
    inputs = make(300, 2, 1, 64, length=4, stride=2, device="cpu")
    assert compressed_backward.num_splits(1, 300, inputs.k.shape[1], 1, 2) == 1
    inputs.check()
