"""Sums of partials (gate/partials.py, attend/selected_backward.py), on GPUs and as the compiler's PTX, interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted_kernels import interpret

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


@pytest.mark.parametrize("interpreted", ["late"], indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("interpreted")
def test_interpreted(shape: tuple[int, ...]) -> None:
    check(shape, "cpu")


@pytest.mark.blas
def test_partials_of_split_blocks() -> None:
    """selected_backward.CombineSelectedDKV: two blocks of 128 keys, of which the second one has ten.

    Its second key tile has no partials, and none are read. There is memory for two work tiles more than there are.
    """
    from cute_kernels.attend import selected_backward
    from cute_kernels.lists.worklist import BLOCK

    splits, num_keys, dim, scale = (3, 2), 138, 64, 0.5
    counts = torch.tensor([[9, 6], splits, [0, 0]], dtype=torch.int32)
    cum_counts = counts.cumsum(1, dtype=torch.int32)
    work_tiles = torch.empty((3, sum(splits) + 2), dtype=torch.int32)
    work_tiles[BLOCK, : sum(splits)] = torch.tensor([0, 0, 0, 1, 1])
    partials = torch.empty((work_tiles.shape[1], 2, 2, 64, dim))
    written = [partials[:3], partials[3:5, :1]]
    for x in written:
        x.normal_()
    gradients = [torch.empty((1, num_keys, 1, dim), dtype=torch.bfloat16) for _ in range(2)]
    combine = interpret(selected_backward.CombineSelectedDKV.compile, dim, torch.bfloat16, 128)
    combine(counts, cum_counts, work_tiles, partials, *gradients, scale)
    totals = torch.cat([x.sum(0).transpose(0, 1).flatten(1, 2) for x in written], 1)[:, :num_keys]
    for got, total, factor in zip(gradients, totals, (scale, 1.0), strict=True):
        # Sums in another order may round to the next number
        torch.testing.assert_close(got[0, :, 0], (total * factor).to(got.dtype), rtol=2**-8, atol=1e-6)
