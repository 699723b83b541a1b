"""2^x from FMAs (exponential.py): where its coefficients come from, and its PTX, interpreted on a CPU, against fp64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import jit
from cute_kernels.exponential import COEFFICIENTS, exp2_by_fma
from tests.test_token_selected_ptx import argument, program

THREADS = 128


def smallest_relative_error(degree: int) -> tuple[Any, float]:
    """Coefficients c1 ... of 1 + c1 f + ..., nearest to 2^f for f in [-1/2, 1/2]: Lawson's weighted least squares."""
    f = np.cos(np.linspace(0, np.pi, 2001)) / 2
    powers = np.stack([f**i for i in range(1, degree + 1)], 1) / 2.0 ** f[:, None]
    weights, error = np.ones_like(f), np.ones_like(f)
    for _ in range(1000):
        weights = weights * np.abs(error)
        weights /= weights.sum()
        roots = np.sqrt(weights)
        coefficients, *_ = np.linalg.lstsq(powers * roots[:, None], (1 - 2.0**-f) * roots, rcond=None)
        error = powers @ coefficients - (1 - 2.0**-f)
    return coefficients, float(np.abs(error).max())


def test_coefficients_have_the_smallest_error() -> None:
    expected, error = smallest_relative_error(len(COEFFICIENTS))
    assert error < 2**-23.3
    np.testing.assert_allclose(COEFFICIENTS, expected, rtol=2e-6)


@cute.kernel
def each(mX: cute.Tensor, mY: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    mY[cta * THREADS + thread] = exp2_by_fma(mX[cta * THREADS + thread])


@cute.jit
def all_of_them(mX: cute.Tensor, mY: cute.Tensor, stream: Any):
    each(mX, mY).launch(grid=[mX.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cache
def compiled() -> jit.Kernel:
    return jit.compile_kernel(all_of_them, jit.fake(torch.float32, None), jit.fake(torch.float32, None))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}")

    def computed(x: Tensor) -> Tensor:
        y = torch.full_like(x, torch.nan)
        program(compiled).run([argument(x), argument(y)], (len(x) // THREADS, 1, 1), [x, y], True)
        return y

    generator = torch.Generator().manual_seed(0)
    one = torch.linspace(-0.5, 0.5, 1 << 14)  # every f
    x = torch.cat([one, one - 1, one * 64, one * 251, torch.empty(1 << 13).uniform_(-20, 1, generator=generator)])
    error = (computed(x).double() / x.double().exp2() - 1).abs().max()
    assert error < 2**-22.4
    whole = torch.arange(-126.0, 128.0).repeat(THREADS)
    assert torch.equal(computed(whole), whole.exp2())
    low = torch.tensor([-torch.inf, -1e30, -128.0, -127.0]).repeat(32)
    assert torch.equal(computed(low), torch.zeros(128))
    almost = torch.linspace(-127, -126, 1 << 12)
    assert bool((computed(almost).double() - almost.double().exp2()).abs().max() <= 2.0**-127)
