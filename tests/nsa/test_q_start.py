"""Queries that continue a sequence: chunks against the whole, and errors; test_reference.py compares with loops."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

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


# Errors

Q, K, V = make_qkv(40, dtype=torch.float32)
TILE = {"config": SMALL["seed"]}  # tiles of 16


def starts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "negative": ({"q_start": -1}, ValueError, ("q_start", "0 to N_k - N_q = 40 - 16 = 24", "-1")),
    "past the keys": ({"q_start": 25}, ValueError, ("q_start", "24", "25")),
    "no integer": ({"q_start": 1.0}, TypeError, ("q_start", "integer", "float")),
    "bool": ({"q_start": True}, TypeError, ("q_start", "integer", "bool")),
    "int64": ({"q_start": torch.tensor([16])}, TypeError, ("q_start", "int32", "int64")),
    "tensor of another shape": ({"q_start": starts(0, 16)}, ValueError, ("q_start", "[1]", "[2]")),
    "tensor past the keys": ({"q_start": starts(25)}, ValueError, ("q_start", "24", "25 at position 0")),
    "other device": ({"q_start": starts(0).to("meta")}, ValueError, ("q_start", "cpu", "meta")),
    "not causal": ({"q_start": 16, "causal": False}, ValueError, ("q_start", "causal=True", "q_start=16")),
    "not causal, more keys": ({"causal": False}, ValueError, ("causal=False", "N_k=40", "N_q=16")),
    "inside a tile": ({"q_start": 20, **TILE}, ValueError, ("q_sum", "tile 1 has tokens 16 to 31", "q_start=20")),
    "default inside a tile": (TILE, ValueError, ("q_sum", "tile 1", "q_start=24")),
    "tensor inside a tile": ({"q_start": starts(17), **TILE}, ValueError, ("q_sum", "tile 1", "17 at position 0")),
    "sum in token mode": (
        {"q_sum": torch.zeros(1, 4, 16), "config": SMALL["paper"]},
        ValueError,
        ("q_sum", "q_tile_size=1"),
    ),
    "sum of another shape": (
        {"q_sum": torch.zeros(1, 2, 16), **TILE},
        ValueError,
        ("q_sum", "[1, 4, 16]", "[1, 2, 16]"),
    ),
    "sum of another dtype": ({"q_sum": torch.zeros(1, 4, 16).double(), **TILE}, TypeError, ("q_sum", "float32")),
    "fewer keys": ({"k": K[:, :15], "v": V[:, :15]}, ValueError, ("k", "q's [B,N] = [1, 16]", "[1, 15, 2, 16]")),
    "v of another length": ({"v": V[:, :39]}, ValueError, ("v", "k's [B,N] = [1, 40]", "39")),
    "k_cmp of the queries": (
        {"k_cmp": K[:, :2], "v_cmp": V[:, :2], **TILE, "q_start": 16},
        ValueError,
        ("k_cmp", "[1, 5, 2, 16]", "[1, 2, 2, 16]"),
    ),
    "bounds of keys alone": ({"cu_seqlens_k": starts(0, 40)}, ValueError, ("cu_seqlens_k", "cu_seqlens")),
}


PACKED: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "integer": ({"q_start": 0}, ValueError, ("q_start", "int32 [B]", "got 0")),
    "keys of other documents": ({"cu_seqlens_k": starts(0, 40)}, ValueError, ("cu_seqlens_k", "[3]", "[2]")),
    "fewer keys": (
        {"cu_seqlens_k": starts(0, 5, 40)},
        ValueError,
        ("cu_seqlens_k", "5 keys for 6 queries", "position 0"),
    ),
    "past the keys": ({"cu_seqlens_k": starts(0, 10, 41)}, ValueError, ("cu_seqlens_k", "T=40", "41")),
    "falls": ({"cu_seqlens_k": starts(0, 30, 20)}, ValueError, ("cu_seqlens_k", "30 then 20")),
    "starts past": ({"q_start": starts(0, 21)}, ValueError, ("q_start", "30 - 10 = 20", "21 at position 1")),
    "inside a tile": ({"q_start": starts(0, 9), **TILE}, ValueError, ("q_sum", "tile 0", "q_start=9 at position 1")),
    "not causal": ({"causal": False}, ValueError, ("causal=True", "causal=False", "q_start=[2]")),
    "not causal, keys": ({"causal": False, "q_start": None}, ValueError, ("causal=False", "cu_seqlens_k")),
    "longest": ({"max_seqlen": 29}, ValueError, ("max_seqlen", "30", "29")),
    "without bounds of keys": ({"cu_seqlens_k": None}, ValueError, ("k", "q's [T] = [16]", "cu_seqlens_k", "40")),
}


ALL_ERRORS = {("sequences", name): x for name, x in ERRORS.items()} | {("packs", name): x for name, x in PACKED.items()}


@pytest.mark.parametrize("case", ALL_ERRORS, ids=", ".join)
def test_errors_name_argument_and_value(case: tuple[str, str]) -> None:
    changes, error, pieces = ALL_ERRORS[case]
    bounds = {"cu_seqlens": starts(0, 6, 16), "cu_seqlens_k": starts(0, 10, 40), "q_start": starts(0, 0)}
    packed, sequences = {"q": Q[0, :16], "k": K[0], "v": V[0], **bounds}, {"q": Q[:, :16], "k": K, "v": V}
    with pytest.raises(error) as caught:
        nsa(**(packed if case[0] == "packs" else sequences) | changes)
    for piece in pieces:
        assert piece in str(caught.value)


def test_q_sum_is_not_differentiated() -> None:
    q_sum = Q[:, 16:20].sum(1).requires_grad_()
    k = K.clone().requires_grad_()
    out = nsa(Q[:, 20:], k, V, q_sum=q_sum, **TILE)
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
