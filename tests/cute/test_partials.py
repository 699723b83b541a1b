"""Sums of partials (gate/partials.py), on GPUs and as the compiler's PTX, interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.support.far_rows import far_apart
from tests.support.interpreted_kernels import interpret_kernels

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

SHAPES = [(2, 4), (1, 12), (3, 2, 132), (8, 128), (9, 3, 128), (41, 2, 5, 20)]


def check(shape: tuple[int, ...], device: str) -> None:
    """Against fp64; bits do not depend on what lies around."""
    from cute_kernels.gate.partials import sum_partials

    torch.manual_seed(0)
    partials = torch.randn(shape, device=device)
    got = sum_partials(partials)
    exact, size = partials.double().sum(0), partials.double().abs().sum(0)
    assert got.dtype == torch.float32
    assert bool(((got - exact).abs() <= len(partials) * 2**-24 * size).all())
    assert torch.equal(sum_partials(partials.clone()), got)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 8, 3, 128), (300, 2, 1, 511, 2, 128)])
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    check(shape, "cuda")


@pytest.mark.cuda
def test_partials_behind_two_billion_elements() -> None:
    from cute_kernels.gate.partials import sum_partials

    torch.manual_seed(0)
    partials = torch.randn(3, 260, device="cuda")
    assert torch.equal(sum_partials(*far_apart((partials,), 0)), sum_partials(partials))


@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.gate import partials

    interpret_kernels(monkeypatch, [partials])
    check(shape, "cpu")
