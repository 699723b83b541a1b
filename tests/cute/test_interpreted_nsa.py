"""NSA as on NVIDIA GPUs, step by step on a CPU: Python, lists, launches, PTX; forward and backward against fp64.

Every kernel that a call takes runs interpreted (tests/support/interpreted_gpu.py), FlashAttention-4's among them.
Branches by themselves, and a whole call through dispatch, are in test_blackwell.py; packed documents that continue in
test_continued_packs.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bench import oracles
from cute_kernels import backward, forward
from cute_kernels.gate.sums import key_gradients
from cute_kernels.lists.query_to_kv import Keys
from nsa import NSAAux, NSAConfig, reference
from nsa.inputs import NSAInputs
from tests.ptx import Schedule
from tests.support.cute_cases import SLACK, assert_agrees_with_oracle, gradients
from tests.support.helpers import assert_within_budget, make_qkv
from tests.support.interpreted_gpu import GPUS, interpreted_gpu
from tools.sanitize import Case as Call

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


class Case(NamedTuple):
    tokens: int
    config: NSAConfig
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    logits: float = 1.0
    """Their standard deviation."""

    @property
    def inputs(self) -> NSAInputs:
        weight = torch.randn(self.heads, 3, self.dim) * self.dim**-0.5
        q, k, v = make_qkv(self.tokens, self.heads, self.kv_heads, self.dim, dtype=torch.bfloat16)
        return NSAInputs(q * self.logits, k, v, gate_proj_weight=(weight / self.logits).bfloat16())


CASES = {
    # Every token selects: blocks of 64 tokens by overlapping entries of 16, some forced
    "tokens": Case(
        250, NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=30)
    ),
    # The window, which local blocks lie in, is the last kernel's on sm_90
    "tokens, wide window": Case(
        250,
        NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=130),
        heads=8,
    ),
    # Tiles of 256 select 2 of 5 blocks
    "tiles": Case(300, NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=2, window_size=50)),
}
CASES |= {f"{name}, logits in the hundreds": CASES[name]._replace(logits=100.0) for name in ("tokens", "tiles")}


@pytest.mark.full
@pytest.mark.parametrize(("case", "late", "arch"), [*itertools.product(CASES, [True, False], GPUS)])
def test_forward_and_backward(arch: str, case: str, late: bool) -> None:
    """Of the same selections."""
    inputs, config = CASES[case].inputs, CASES[case].config
    do = torch.randn_like(inputs.q)
    with interpreted_gpu(arch, Schedule(late=late)):
        out, given = forward.nsa(inputs, config)
        saved_out, saved = forward.nsa_saving(inputs, config, recompute=False)
        got = backward.nsa_backward(inputs, config, saved, do)
    assert given is not None
    aux = NSAAux(*given)
    assert_agrees_with_oracle(inputs, config, out, aux, capability=GPUS[arch].capability)
    assert torch.equal(out, saved_out)
    assert_gradients(got, inputs, config, aux, do)


def assert_gradients(got: dict[str, Tensor], inputs: NSAInputs, config: NSAConfig, aux: NSAAux, do: Tensor) -> None:
    """Each within the budget of helpers.py."""
    fixed: dict[str, Any] = {"indices": aux.indices.long()}
    fixed["cmp_indices"] = None if aux.cmp_indices is None else aux.cmp_indices.long()
    doubled = inputs.map(Tensor.double)
    expected = gradients(lambda leaves: reference.nsa(leaves, config, **fixed)[0], doubled, do.double())
    naive = gradients(lambda leaves: oracles.nsa(leaves, config, **fixed)[0], inputs, do)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert_within_budget(gradient, expected[name], naive[name], f"gradient of {name}", slack=SLACK)


SMALL = NSAConfig(
    compress_block_size=16, compress_stride=8, select_block_size=64, num_selected_blocks=2, window_size=50
)
PIECES: dict[str, Any] = {"call.CHUNK_BYTES": 1, "backward.TEMPORARY_BYTES": 1}
"""Limits with which the forward takes a tile of queries at a time, and the backward a key/value head."""
PROJECTED = ("gate_proj_weight", "w_k_compress", "w_v_compress")
OWN = ("gates", "k_cmp", "v_cmp", "k_slc", "v_slc")
PAPER = NSAConfig.paper(num_selected_blocks=4, window_size=130)
STEPS: dict[str, tuple[str, Call, dict[str, Any]]] = {
    "last queries": ("sm_90", Call(SMALL, tokens=530, first=256, tensors=PROJECTED), PIECES),
    "own keys and entries": ("sm_90", Call(SMALL, tokens=140, tensors=OWN), PIECES),
    "lists for each block of keys": (
        "sm_100",
        Call(NSAConfig.per_tile(), tokens=300, heads=1, kv_heads=1, dim=128, v_dim=128, strategy="sm_100"),
        {"backward.LIST_BYTES": 1},
    ),
    "tokens, last queries": ("sm_90", Call(PAPER, 250, first=100, heads=16, kv_heads=1), PIECES),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between kernels: chunks of queries and heads, ranges of keys, later queries, sums of gradients."""
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
