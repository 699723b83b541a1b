"""Partials of split blocks (selected_backward.CombineSelectedDKV), as the compiler's PTX, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted_kernels import interpret

pytestmark = [pytest.mark.blas, pytest.mark.filterwarnings("default")]


def test_partials_are_added_up() -> None:
    """Two blocks of 128 keys, of which the second one has ten: its second key tile has no partials, and none are read.

    There is memory for two work tiles more than there are.
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
    combine = interpret(selected_backward._combine, dim, torch.bfloat16, 128)
    combine(counts, cum_counts, work_tiles, partials, *gradients, scale)
    totals = torch.cat([x.sum(0).transpose(0, 1).flatten(1, 2) for x in written], 1)[:, :num_keys]
    for got, total, factor in zip(gradients, totals, (scale, 1.0), strict=True):
        # Sums in another order may round to the next number
        torch.testing.assert_close(got[0, :, 0], (total * factor).to(got.dtype), rtol=2**-8, atol=1e-6)
