"""Context parallelism with kernels: processes that share one GPU, over gloo, against one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import context_cases as cases
from tests.support.helpers import LARGE
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.cuda, pytest.mark.cuda_extra]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, 3, 4, seconds=300) as processes:
        yield processes


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("preset", LARGE)
def test_rows_are_those_of_one_process_bit_for_bit(ranks: Ranks, preset: str, layout: str) -> None:
    for size, tokens in ((2, 3000), (3, 5000), (4, 700)):
        ranks.run(size, cases.bits_on_gpu, LARGE[preset], tokens, layout)


@pytest.mark.parametrize("preset", LARGE)
def test_gradients_have_the_same_bits_in_every_run(ranks: Ranks, preset: str) -> None:
    ranks.run(2, cases.repeats_on_gpu, LARGE[preset], 3000)
