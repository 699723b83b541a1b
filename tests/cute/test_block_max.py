"""Selection by the best score of a block's keys on NVIDIA GPUs: interpreted on a CPU, and on a GPU, against loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa import top_blocks_by_max
from tests.ptx import Order, Schedule
from tests.support import cases
from tests.support.indexer_cases import Case
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


CASES = {
    "one token": Case(1, 70, heads=1),
    "two row tiles": Case(300, heads=4, k=3, dim=128, size=128),
    "many blocks": Case(3, 2300, heads=1),
    "more than a chunk of 128": Case(2, 4400, heads=1, k=3, size=128),
    "equal scores in parts": Case(2, 6200, heads=2, k=3, whole=True),
    "whole numbers": Case(260, heads=4, k=2, whole=True),
    "own keys, fp16": Case(70, heads=2, shared=False, batch=2, local=2, dtype=torch.float16),
    "long lists": Case(4, 2500, heads=2, k=37, local=0),
    "documents": Case((70, 0, 1, 130, 5), heads=3, k=2, behind=3),
    "documents across tiles": Case((33, 200, 40), heads=16, size=128, dim=128),
    "documents that continue": Case((70, 0, 2, 130), (200, 90, 2, 131), heads=1, behind=3),
    "starts in documents": Case((2, 30), (200, 150), (170, 0), heads=16, size=128, dim=128),
    "starts": Case(3, 300, (0, 290), batch=2, k=3, dtype=torch.float16),
}
HERE = [
    ("sm_90", "documents that continue"),
    ("sm_90", "many blocks"),
    ("sm_100", "whole numbers"),
]
"""Of them "many blocks" in two parts. It and documents take the kernels in which races are looked for."""


@pytest.mark.interpreted
@pytest.mark.parametrize("late", [True, *cases.rest(False)])
@pytest.mark.parametrize(("arch", "case"), cases.some(HERE, GPUS, CASES))
def test_interpreted(arch: str, case: str, late: bool) -> None:
    with interpreted_gpu(arch, Schedule(late=late)):
        CASES[case].check(backend="cute")


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90", *cases.rest("sm_100")])
def test_barriers_put_shared_memory_in_order(arch: str) -> None:
    """Six steps of keys, of two documents: stages are used twice, and lists merged within a document and at its end."""
    with interpreted_gpu(arch, Schedule(observer=Order)):
        Case((500, 130), heads=1, size=64).check(backend="cute")
        Case(1, 2300, heads=1).check(backend="cute")  # in two parts


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    CASES[case].check("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("change", [{}, {"size": 128, "k": 16, "dim": 128}, {"k": 64}], ids=str)
def test_long_on_a_gpu(change: dict[str, Any]) -> None:
    replace(Case(500, 20000, heads=4), **change).check("cuda")
    replace(Case((1000, 1, 0, 700), heads=4, behind=9), **change).check("cuda")


@pytest.mark.cuda
def test_the_same_bits_each_time() -> None:
    q_idx, k_idx = (torch.randn(1, 9000, heads, 128, device="cuda").bfloat16() for heads in (4, 1))
    first, *others = (top_blocks_by_max(q_idx, k_idx, block_size=128, k=16) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
