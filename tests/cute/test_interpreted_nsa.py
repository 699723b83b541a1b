"""NSA as on NVIDIA GPUs, step by step on a CPU: Python, lists, launches, PTX; forward and backward against fp64.

Every kernel that a call takes runs interpreted (tests/support/interpreted_gpu.py), FlashAttention-4's among them.
Branches by themselves, and a whole call through dispatch, are in test_blackwell.py; packed documents that continue in
test_continued_packs.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import backward, forward
from cute_kernels.gate.sums import key_gradients
from cute_kernels.lists.query_to_kv import Keys
from nsa import NSAConfig
from tests.support import blackwell_cases as blackwell
from tests.support.gpu_calls import Case as Call
from tests.support.interpreted_gpu import interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


SMALL = NSAConfig(
    compress_block_size=16, compress_stride=8, select_block_size=64, num_selected_blocks=2, window_size=50
)
PIECES: dict[str, Any] = {"call.CHUNK_BYTES": 1, "backward.TEMPORARY_BYTES": 1}
"""Limits with which the forward takes a tile of queries at a time, and the backward a key/value head."""
PROJECTED = ("gate_proj_weight", "w_k_compress", "w_v_compress")
OWN = ("gates", "k_cmp", "v_cmp", "k_slc", "v_slc")
PAPER = NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=130)
STEPS: dict[str, tuple[str, Call, dict[str, Any]]] = {
    "last queries": ("sm_90", Call(SMALL, tokens=530, first=256, tensors=PROJECTED), PIECES),
    "own keys and entries": ("sm_90", Call(SMALL, tokens=140, tensors=OWN), PIECES),
    "lists for each block of keys": (
        "sm_100",
        Call(NSAConfig.per_tile(), tokens=300, heads=1, kv_heads=1, dim=128, v_dim=128, strategy="sm_100"),
        {"backward.LIST_BYTES": 1},
    ),
    "tokens, last queries": ("sm_90", Call(PAPER, 250, first=128, tensors=("gate_proj_weight",)), PIECES),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between kernels: chunks of queries and heads, ranges of keys, later queries, sums of gradients."""
    arch, call, limits = STEPS[name]
    for limit, value in limits.items():
        monkeypatch.setattr(f"cute_kernels.{limit}", value)
    inputs = call.inputs("cpu")
    do = torch.randn(*inputs.q.shape[:-1], call.v_dim).bfloat16()
    with interpreted_gpu(arch):
        out, saved = forward.nsa_saving(inputs, call.config, recompute=False)
        gradients = backward.nsa_backward(inputs, call.config, saved, do)
    kept = forward.Saved.from_list(saved, inputs, call.config)
    call.check(inputs, do, {"out": out, **gradients}, kept.indices, kept.cmp_indices)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "schedule"), [*zip(blackwell.CALLS, itertools.cycle(blackwell.SCHEDULES), strict=False)]
)
def test_whole_calls_on_hopper(name: str, schedule: str) -> None:
    """Those of the table of Blackwell, for which test_blackwell.py has them, within budgets and without races."""
    execution = blackwell.execute(blackwell.Whole(name), schedule, "sm_90")
    assert not execution.beyond_budgets
    assert not execution.findings


@pytest.mark.interpreted
def test_queries_from_inside_a_tile() -> None:
    """With the sum of the tile's earlier queries, whose rows are left out, a tile selects what it selects with them."""
    inputs = Call(SMALL, tokens=300).inputs("cpu")
    later = replace(inputs, q=inputs.q[:, 200:], q_sum=inputs.q[:, :200].float().sum(1))
    with interpreted_gpu("sm_90"):
        expected, _ = forward.nsa(inputs, SMALL, aux=False)
        got, _ = forward.nsa(later, SMALL, aux=False)
    assert torch.equal(got, expected[:, 200:])


@pytest.mark.parametrize("first_key", [0, 37, 69], ids="window from {}".format)
@pytest.mark.parametrize("entries", [True, False])
def test_shares_of_key_gradients_stay_fp32(entries: bool, first_key: int) -> None:
    """Where chunks of queries add theirs up: the sum of two bf16 terms and of the entries' means, not rounded.

    Term 1 is a window's, of the keys from first_key on.
    """
    tokens, keys = 70, Keys(16, 8)
    terms = [torch.randn(1, tokens - i % 2 * first_key, 2, 64).bfloat16() for i in range(4)]
    pooled = tuple(torch.randn(1, 7, 2, 64) for _ in range(2)) if entries else None
    dk, dv = (torch.empty(1, tokens, 2, 64) for _ in range(2))
    with interpreted_gpu("sm_90"):
        key_gradients(dk, dv, terms[:2], terms[2:], entries=pooled, keys=keys)
    for i, got in enumerate((dk, dv)):
        want = terms[2 * i].double()
        want[:, first_key:] += terms[2 * i + 1].double()
        for entry in range(7 if pooled is not None else 0):
            want[:, entry * 8 : entry * 8 + 16] += pooled[i][:, entry : entry + 1].double() / 16  # type: ignore[index]
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2**-20)  # four roundings of sums below 2^3
