"""Context parallelism on GPUs against one process: ranks that share a GPU, over gloo, and with a GPU each, over NCCL.

Over NCCL the cases of tests/nsa/test_context_parallel.py run too, in fp64 by the reference: what is sent is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import context_cases as cases
from tests.support import fsdp_cases
from tests.support.hardware import DETERMINISTIC
from tests.support.helpers import LARGE
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.cuda, pytest.mark.cuda_extra]

SIZES = (2, 3, 4)
BOUNDS = {2: 3000, 3: 5000, 4: 700}
"""Tokens by the number of ranks: chunks that end inside tiles, and fewer tiles than chunks."""


def start(backend: str, seconds: float = 300) -> Ranks:
    """Ranks in groups of all SIZES for which there are GPUs."""
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < 2:
        pytest.skip("needs two GPUs")
    return Ranks(*(SIZES if backend == "gloo" or gpus >= max(SIZES) else SIZES[:1]), seconds=seconds, backend=backend)


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with start(request.param) as processes:
        yield processes


@pytest.fixture(scope="module")
def sharing() -> Iterator[Ranks]:
    """Groups that share a GPU over gloo, of sizes that no host may have GPUs for."""
    with Ranks(1, 3, 8, seconds=300) as processes:
        yield processes


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    with start("nccl") as processes:
        yield processes


# Kernels


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("preset", LARGE)
def test_rows_are_those_of_one_process_bit_for_bit(ranks: Ranks, preset: str, layout: str) -> None:
    for size in ranks.sizes:
        ranks.run(size, cases.bits_on_gpu, LARGE[preset], BOUNDS[size], layout)


@pytest.mark.parametrize("preset", LARGE)
def test_packs_across_ranks(ranks: Ranks, preset: str) -> None:
    ranks.run(2, cases.bits_on_gpu, LARGE[preset], 3000, "zigzag", [900, 0, 1, 1800, 200])


@pytest.mark.parametrize(
    ("size", "tokens", "how"),
    [
        (1, 3000, ("zigzag",)),
        (8, 5000, ("zigzag",)),
        (8, 7, ("zigzag",)),
        (3, 3000, ("contiguous", [700, 0, 1, 2000, 200])),  # a document on ranks 0 to 2
    ],
)
@pytest.mark.parametrize("preset", LARGE)
def test_groups_that_share_a_gpu(sharing: Ranks, preset: str, size: int, tokens: int, how: tuple[Any, ...]) -> None:
    sharing.run(size, cases.bits_on_gpu, LARGE[preset], tokens, *how)


@DETERMINISTIC
@pytest.mark.parametrize("preset", LARGE)
def test_the_same_bits_in_every_run_and_recomputed(ranks: Ranks, preset: str) -> None:
    ranks.run(2, cases.repeats_on_gpu, LARGE[preset], 3000)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_neighborhood_attention(ranks: Ranks, layout: str) -> None:
    ranks.run(2, cases.neighborhood_on_gpu, 2000, layout)


def test_sharded_parameters_train_as_whole_ones(nccl: Ranks) -> None:
    """Each rank has a sequence."""
    nccl.run(2, fsdp_cases.starts_as_whole)
    nccl.run(2, fsdp_cases.trains_as_whole, torch.bfloat16, LARGE, 256, 700)


# Refusals over NCCL; tests/nsa/test_context_parallel.py has what it sends


@pytest.mark.parametrize("change", cases.DIFFERENCES)
def test_a_rank_that_differs_is_named_on_all(nccl: Ranks, change: str) -> None:
    error, words = cases.DIFFERENCES[change]
    for rank, (kind, message) in enumerate(nccl.outcomes(2, cases.call_with, change, 1)):
        assert kind == "raised", (rank, message)
        assert message.startswith(error), (rank, message)
        for word in words:
            assert word.format(device="cuda") in message, (rank, message)
    nccl.run(2, cases.by_reference, cases.works)


@pytest.mark.parametrize(("op", "how"), cases.DIFFERENT_BACKWARDS)
def test_backwards_in_another_order_are_refused_on_all(nccl: Ranks, op: str, how: str) -> None:
    for kind, message in nccl.outcomes(2, cases.by_reference, cases.backwards_differ, op, how, 1):
        assert kind == "raised"
        assert message.startswith("RuntimeError: context parallelism: ranks must run the same calls"), message
    nccl.run(2, cases.by_reference, cases.works)


def test_a_rank_that_goes_on_elsewhere_ends_all() -> None:
    """Its partner says so; NCCL's watchdog may end a process whose collective is alone."""
    with start("nccl") as ranks:
        *others, last = ranks.outcomes(max(ranks.sizes), cases.by_reference, cases.goes_on_elsewhere, 10.0)
    for kind, message in others:
        assert kind == "raised"
        assert "agreement on backward of ContextParallel.nsa, call 1 failed on rank" in message, message
    assert last[0] in ("ended", "raised"), last


def test_a_rank_that_ends_ends_all() -> None:
    """Its partner waits for its keys on the GPU: the watchdog of NCCL ends the process, unless a check raises first."""
    began = time.monotonic()
    with start("nccl", seconds=10) as two:
        first, last = two.outcomes(2, cases.by_reference, cases.ends_in_the_middle, 1)
    assert last[0] == "ended"
    assert first[0] in ("ended", "raised"), first
    assert time.monotonic() - began < 120
