"""The split backward of the compressed branch (attend/compressed_backward.py) against fp64, on GPUs and interpreted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.attention_gradients import Branch, check_gradients, gated_branch, normal_inputs
from tests.support.hardware import ATOMIC_FREE
from tests.support.interpreted_kernels import interpret

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]
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
        how: dict[str, Any] = {name: getattr(self, name) for name in ("length", "stride", "scale", "first_token")}
        tensors = self.q, self.k, self.v, self.do, self.branch.lse, self.branch.delta
        return [dq, *compressed_backward(*tensors, dq=dq, **how)]

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
    entries = (first_token + rows - length) // stride + 1
    tensors = normal_inputs(rows, entries, heads, kv_heads, dim, batch=batch, dtype=dtype, generator=generator)
    token = first_token + torch.arange(rows, device=device)[:, None]
    visible = torch.arange(entries, device=device) * stride + length - 1 <= token
    return Inputs(*tensors, gated_branch(*tensors, visible, generator), length, stride, first_token)


# Interpreted


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one entry": (70, {"length": 64, "stride": 64, "heads": 1, "kv_heads": 1}),
    "overlapping, D 64": (150, {"length": 32, "stride": 16, "dim": 64, "kv_heads": 1}),
    "two tiles of entries": (331, {"length": 4, "stride": 2, "dim": 64, "heads": 2, "kv_heads": 1}),
    "no phases, batch": (100, {"length": 7, "stride": 5, "dim": 64, "heads": 2, "batch": 2}),
    "last rows": (70, {"length": 32, "stride": 16, "dim": 64, "heads": 2, "first_token": 333}),
    "one row": (1, {"length": 8, "stride": 8, "heads": 8, "kv_heads": 1, "first_token": 1030}),
}


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("interpreted", "case"),
    [*cases.product(["late"], CASES), ("early", "two tiles of entries")],
    indirect=["interpreted"],
)
@pytest.mark.usefixtures("interpreted")
def test_interpreted(case: str) -> None:
    rows, options = CASES[case]
    make(rows, device="cpu", **options).check()


@pytest.mark.interpreted
@pytest.mark.parametrize("interpreted", ["late, races"], indirect=True)
@pytest.mark.usefixtures("interpreted")
def test_barriers_put_shared_memory_in_order() -> None:
    """The first entries have five tiles of rows in two splits, of four heads, so stages are used again; the last ones
    have one tile, so none in the second split.
    """
    from cute_kernels.attend.compressed_backward import num_splits

    inputs = make(300, 4, 1, 64, length=4, stride=2, device="cpu")
    assert num_splits(1, 300, inputs.k.shape[1], 1, 4) == 2
    inputs.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_row_statistics(arch: str) -> None:
    """What FlashAttention-4's backward reads where its preprocess does not run, of phases: rows are far apart."""
    from cute_kernels.attend import row_statistics

    batch, heads, rows, padded = 2, 3, 300, 384
    lse, delta = torch.randn((2, batch, heads, rows, 16))[..., 5].unbind(0)
    lse[0, 1, 7], lse[1, 2, 299] = -math.inf, math.inf
    delta[~lse.isfinite()] = math.nan
    results = torch.full((2, batch, heads, padded), math.nan)
    interpret(row_statistics.RowStatistics.compile, arch=arch)(lse[..., None], delta[..., None], *results)
    log2_lse, out = results
    expected = torch.where(lse == -math.inf, 0.0, lse * math.log2(math.e))
    assert torch.allclose(log2_lse[..., :rows], expected, rtol=2**-23)
    assert torch.equal(out[..., :rows], torch.where(lse.isfinite(), delta, 0.0))
    assert (log2_lse[..., rows:] == math.inf).all()
    assert not out[..., rows:].any()


@pytest.mark.interpreted
@pytest.mark.parametrize("interpreted", ["late"], indirect=True)
@pytest.mark.usefixtures("interpreted")
def test_causality() -> None:
    """Entries do not move a bit of dq of rows that do not see them, nor do rows of dk and dv of unseen entries."""
    inputs = make(331, 2, 1, 64, length=4, stride=2, device="cpu")
    dq, dk, dv = inputs.run()
    entry, later = 101, slice(101, None)
    row = entry * inputs.stride + inputs.length - 1  # the first one that sees it
    other = replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
    other.k[:, later], other.v[:, later] = other.v[:, later], other.k[:, later].clone()
    got = other.run()
    assert torch.equal(got[0][:, :row], dq[:, :row])
    assert not torch.equal(got[0][:, row], dq[:, row])
    other = replace(inputs, q=inputs.q.clone(), do=inputs.do.clone())
    other.q[:, :row], other.do[:, :row] = other.do[:, :row], other.q[:, :row].clone()
    for x, y in zip(other.run()[1:], (dk, dv), strict=True):
        assert torch.equal(x[:, later], y[:, later])
        assert not torch.equal(x[:, entry - 1], y[:, entry - 1])


# On a GPU


ON_GPU: list[tuple[int, dict[str, Any]]] = [
    *((rows, {}) for rows in (32, 63, 64, 65, 127, 129, 1000, 2063, 5000)),
    *(
        (2100, {"length": length, "stride": stride})
        for length, stride in ((1, 1), (4, 4), (32, 32), (64, 64), (64, 16), (48, 20))
    ),
    *(
        (rows, {"first_token": first, "batch": 2})
        for rows, first in ((1, 31), (1, 4000), (70, 333), (1000, 1), (2000, 2048))
    ),
    *(
        (1500, {"heads": max(group, 2), "kv_heads": max(group, 2) // group, "dim": dim, "dtype": dtype, "batch": 2})
        for group, dim, dtype in itertools.product((1, 4, 8, 16), (64, 128), (BF16, FP16))
    ),
]


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize(("rows", "options"), ON_GPU, ids=str)
def test_on_a_gpu(rows: int, options: dict[str, Any]) -> None:
    make(rows, **options).check()
