"""Block-sparse attention on NVIDIA GPUs: every kernel of a call interpreted on a CPU against fp64, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import cases
from tests.support.block_sparse_cases import Case, make
from tests.support.interpreted_gpu import GPUS, interpreted_gpu
from tests.support.ptx import Order, Schedule

BF16 = Case(150, count=2, group=2, kv_heads=1, dim=64, dtype=torch.bfloat16, indices=torch.int32)

CASES = {
    "blocks of 64": BF16,
    "blocks of 128, int64": replace(BF16, queries=200, size=128, dim=128, indices=torch.int64),
    "one token continues": replace(
        BF16, queries=1, keys=131, count=3, group=16, dim=128, size=128, batch=2, kv_heads=2
    ),
    "starts inside": replace(BF16, queries=20, keys=170, start=101, v_dim=128),
    "documents": replace(BF16, queries=(70, 0, 1, 40), behind=3, group=3, dtype=torch.float16),
    "group of 64": replace(BF16, queries=70, group=64, size=128),
    "group of 1": replace(BF16, queries=70, group=1, kv_heads=2, count=5),
}
HERE = [("sm_90", True, "blocks of 128, int64"), ("sm_90", True, "documents"), ("sm_100", True, "starts inside")]
OTHERS = [(arch, late, case) for arch in GPUS for late in (True, False) for case in CASES]


interpreted = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


def marked(*marks: Any) -> Any:
    """A test with all of these marks."""

    def mark(test: Any) -> Any:
        for one in marks:
            test = one(test)
        return test

    return mark


@marked(*interpreted)
@pytest.mark.parametrize(("arch", "late", "case"), [*HERE, *cases.rest(*(x for x in OTHERS if x not in HERE))])
def test_interpreted(arch: str, late: bool, case: str) -> None:
    with interpreted_gpu(arch, Schedule(late=late)):
        make(CASES[case]).check(backend="cute")


@marked(*interpreted)
@pytest.mark.parametrize("arch", ["sm_90", *cases.rest("sm_100")])
def test_barriers_put_shared_memory_in_order(arch: str) -> None:
    with interpreted_gpu(arch, Schedule(observer=Order)):
        make(replace(BF16, queries=90, size=128)).check(backend="cute")
