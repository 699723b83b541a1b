"""Queries that continue a sequence: chunks against the whole; test_reference.py compares them with loops."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa.reference as reference
from nsa import NSAConfig, nsa
from nsa.inputs import KEY_NAMES, NSAInputs
from tests.support.helpers import SMALL, make_qkv
from tests.support.reference_cases import cases

CAUSAL_BATCHES = cases(packed=False, batches=(1, 2, 3)).filter(lambda case: case[1].causal)


@settings(max_examples=25)
@given(CAUSAL_BATCHES, st.data())
def test_gradients_of_chunks_add_up(case: tuple[NSAInputs, NSAConfig], data: st.DataObject) -> None:
    """dq is the chunks' own, every other gradient the sum of their shares."""
    whole, config = case
    assume(whole.q.shape[1] > 0)
    config = replace(config, compress="mean") if whole.k_cmp is not None else config
    tokens, size = whole.q.shape[1], config.q_tile_size
    inner = data.draw(st.lists(st.integers(0, tokens // size), max_size=3))
    bounds = [0, *sorted(size * tile for tile in inner), tokens]
    leaves = whole.map(lambda tensor: tensor.clone().requires_grad_())
    named = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
    do = torch.randn(*whole.q.shape[:-1], whole.v.shape[-1], dtype=torch.float64)

    def gradients(start: int, stop: int, **first: int) -> dict[str, Tensor]:
        """Of queries start ... stop-1 with all keys."""
        gates = None if leaves.gates is None else leaves.gates[:, start:stop]
        out, _ = reference.nsa(replace(leaves, q=leaves.q[:, start:stop], gates=gates, **first), config, aux=False)
        found = torch.autograd.grad(out, list(named.values()), do[:, start:stop], materialize_grads=True)
        return dict(zip(named, found, strict=True))

    expected = gradients(0, tokens)
    shares = [gradients(a, b, q_start=a) for a, b in pairwise(bounds)]
    for name in named:
        total = sum(share[name] for share in shares)
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    for (a, b), share in zip(pairwise(bounds), shares, strict=True):
        for name in KEY_NAMES:
            assert name not in share or not share[name][:, b:].any(), f"{name} behind the last query"
        outside = torch.cat([share["q"][:, :a], share["q"][:, b:]], 1)
        assert not outside.any()


@pytest.mark.parametrize("name", SMALL)
def test_as_many_queries_as_keys_is_the_same_call(name: str) -> None:
    config, qkv = SMALL[name], make_qkv(75)
    out = nsa(*qkv, config=config)
    sums = {} if config.token_mode else {"q_sum": torch.full((1, 4, 16), math.nan, dtype=torch.float64)}
    assert torch.equal(nsa(*qkv, config=config, q_start=0, **sums), out)  # a sum of no queries is not read
    longer = [torch.cat([x, torch.full_like(x, math.nan)], 1) for x in qkv[1:]]
    assert torch.equal(nsa(qkv[0], *longer, config=config, q_start=0), out)


@pytest.mark.parametrize("name", SMALL)
def test_the_default_aligns_the_last_query_with_the_last_key(name: str) -> None:
    config, (q, k, v) = SMALL[name], make_qkv(80)
    for rows in (0, 16, 32):
        out = nsa(q[:, 80 - rows :], k, v, config=config)
        for start in (80 - rows, torch.tensor([80 - rows], dtype=torch.int32)):
            assert torch.equal(out, nsa(q[:, 80 - rows :], k, v, config=config, q_start=start))


def test_autocast_leaves_the_sum_in_fp32() -> None:
    q, k, v = make_qkv(40, dtype=torch.float32)
    q_sum = q[:, 16:20].sum(1)
    with torch.autocast("cpu", torch.bfloat16):
        out = nsa(q[:, 20:], k, v, q_sum=q_sum, config=SMALL["seed"])
    low = [x.bfloat16() for x in (q[:, 20:], k, v)]
    assert torch.equal(out, nsa(*low, q_sum=q_sum, config=SMALL["seed"]))


def test_q_sum_is_not_differentiated() -> None:
    q, k, v = make_qkv(40, dtype=torch.float32, requires_grad=True)
    q_sum = q[:, 16:20].sum(1)
    out = nsa(q[:, 20:], k, v, q_sum=q_sum, config=SMALL["seed"])
    dk, d_sum = torch.autograd.grad(out.sum(), (k, q_sum), allow_unused=True)
    assert dk.any()
    assert d_sum is None


def test_a_tensor_of_starts_takes_more_blocks_than_there_are() -> None:
    """Without memory for them."""
    q, k, v = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8)
    start = torch.tensor([16], dtype=torch.int32)
    for name, config in SMALL.items():
        got, expected = (
            nsa(q[:, 16:], k, v, q_start=start, config=replace(config, num_selected_blocks=count))
            for count in (2**31 - 1, 20)
        )
        assert torch.equal(got, expected), name
