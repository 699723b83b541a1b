"""Queries that continue a sequence on an NVIDIA GPU: chunks against the whole, bit for bit, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import dispatch
from dispatch import neighborhood_attention
from nsa import NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.causality import BRANCHES, LSES
from tests.support.cute_cases import SOME, on_gpu
from tests.support.gpu_calls import Case
from tests.support.hardware import with_kernels
from tests.support.helpers import make_qkv

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

TOKENS = 3000
PAPER = NSAConfig.paper(num_selected_blocks=5, window_size=200)
TOKEN_MODE = {
    "paper": PAPER,
    "nothing forced": replace(PAPER, num_init_blocks=0, num_local_blocks=0),
    "no window": replace(PAPER, window_size=0),
    "blocks of 128": replace(PAPER, select_block_size=128),
}
TILE_MODE = {
    "plain": SOME,
    "shared in the group": replace(SOME, share_heads_in_group=True, num_local_blocks=1),
    "overlapping": replace(SOME, compress_block_size=32, compress_stride=16, select_block_size=64),
    "sparse compressed": replace(
        SOME, num_cmp_selected_blocks=4, compress_block_size=4, select_block_size=64, n_block_size=128
    ),
    "wide blocks": replace(SOME, select_block_size=192),
}
ANY_CUT = (0, 1, 77, 128, 1000, 1001, 2047, 2900, TOKENS)
CUT_AT_TILES = (0, 256, 1024, 2816, TOKENS)
PROJECTED = ("gate_proj_weight",)
OWN = ("gates", "k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp")
CASES = {
    **{f"token mode, {name}": (config, ANY_CUT, PROJECTED) for name, config in TOKEN_MODE.items()},
    **{f"tile mode, {name}": (config, CUT_AT_TILES, PROJECTED) for name, config in TILE_MODE.items()},
    "token mode, own tensors": (PAPER, ANY_CUT, OWN),
    "tile mode, own tensors": (SOME, CUT_AT_TILES, OWN),
}


def chunk(inputs: NSAInputs, start: int, stop: int) -> NSAInputs:
    """Queries start ... stop-1 with all keys."""
    gates = None if inputs.gates is None else inputs.gates[:, start:stop]
    return replace(inputs, q=inputs.q[:, start:stop], gates=gates, q_start=start)


def call(function: Any, inputs: NSAInputs, config: NSAConfig, **keywords: Any) -> Any:
    return function(**inputs.tensors(), q_start=inputs.q_start, config=config, **keywords)


@with_kernels("name heads", CASES, [(8, 2, 128), (16, 1, 64), (4, 4, 128)])
def test_rows_are_those_of_the_whole(name: str, heads: tuple[int, int, int]) -> None:
    """Token mode for any cut, tile mode for cuts at tiles; a row alone among them. With and without aux."""
    config, cuts, tensors = CASES[name]
    sizes = dict(zip(("heads", "kv_heads", "dim", "v_dim"), (*heads, heads[2]), strict=True))
    inputs = Case(config, TOKENS, batch=2, tensors=tensors, **sizes).inputs("cuda")
    whole_out, whole_aux = call(nsa_forward_aux, inputs, config)
    for start, stop in pairwise(cuts):
        one = chunk(inputs, start, stop)
        out, aux = call(nsa_forward_aux, one, config)
        assert torch.equal(out, whole_out[:, start:stop]), "out"
        for part in BRANCHES:
            assert torch.equal(getattr(aux, part), getattr(whole_aux, part)[:, start:stop]), part
        for part in LSES:
            assert torch.equal(getattr(aux, part), getattr(whole_aux, part)[..., start:stop]), part
        for part in ("k_cmp", "v_cmp"):  # the entries that are over by then
            over = getattr(whole_aux, part)[:, : config.num_compressed(stop)]
            assert torch.equal(getattr(aux, part), over), part
        tiles = slice(start // config.q_tile_size, -(-stop // config.q_tile_size))
        assert torch.equal(aux.indices, whole_aux.indices[:, :, tiles]), "indices"
        assert torch.equal(call(nsa_forward, one, config), out)
        assert torch.equal(call(nsa, one.map(lambda x: x.detach().requires_grad_()), config).detach(), out)


@with_kernels(
    "at name",
    [(100, 2900), (300, 310), (2815, 2816), (2817, 3000)],
    ["plain", "shared in the group", "sparse compressed"],
)
def test_inside_a_tile_with_its_sum(at: tuple[int, int], name: str) -> None:
    """Rows of the call on the prefix, bit for bit: where the same blocks are selected, and for given selections.

    The mean of the open tile is another sum, so that near ties may be decided otherwise.
    """
    start, stop = at
    config, (q, k, v) = TILE_MODE[name], on_gpu(TOKENS)
    size = config.q_tile_size
    q_sum = q[:, start // size * size : start].float().sum(1)
    prefix = NSAInputs(*(x[:, :stop] for x in (q, k, v)))
    whole, whole_aux = call(nsa_forward_aux, prefix, config)
    out, aux = nsa_forward_aux(q[:, start:stop], k, v, q_start=start, q_sum=q_sum, config=config)
    tiles = slice(start // size, -(-stop // size))
    same = (aux.indices == whole_aux.indices[:, :, tiles]).all(-1)
    if aux.cmp_indices is not None and whole_aux.cmp_indices is not None:
        assert torch.equal(aux.cmp_indices, whole_aux.cmp_indices[:, :, tiles]), "another block of entries"
    group = q.shape[2] // same.shape[1]
    of_row = torch.arange(start, stop, device="cuda") // size - start // size
    rows = same.repeat_interleave(group, 1)[:, :, of_row].mT
    assert torch.equal(out[rows], whole[:, start:stop][rows])
    assert torch.equal(same[:, :, 1:], torch.ones_like(same[:, :, 1:])), "only the open tile's mean is another sum"
    fixed = {"indices": whole_aux.indices[:, :, tiles], "cmp_indices": None}
    if whole_aux.cmp_indices is not None:
        fixed["cmp_indices"] = whole_aux.cmp_indices[:, :, tiles]
    run = dispatch.resolve(dispatch.Call("nsa", q.device, q.dtype), "cute").load()
    inputs = NSAInputs(q[:, start:stop], k[:, :stop], v[:, :stop], q_sum=q_sum)
    assert torch.equal(run(inputs, config, **fixed)[0], whole[:, start:stop])


@pytest.mark.parametrize("config", [PAPER, SOME], ids=["token", "tile"])
def test_few_queries(config: NSAConfig) -> None:
    """None, one, and those of a sequence shorter than a block."""
    for tokens in (1, 20, 64, 513):
        inputs = NSAInputs(*on_gpu(tokens, batch=2))
        whole = call(nsa_forward, inputs, config)
        starts = range(0, tokens, config.q_tile_size)
        for start in (0, starts[-1]):
            assert torch.equal(call(nsa_forward, chunk(inputs, start, tokens), config), whole[:, start:])
        if config.token_mode:
            assert torch.equal(call(nsa_forward, chunk(inputs, tokens - 1, tokens), config), whole[:, -1:])
        out, aux = call(nsa_forward_aux, chunk(inputs, tokens, tokens), config)
        assert out.shape == (2, 0, 8, 128)
        assert aux.indices.shape[2] == 0
        leaves = chunk(inputs, tokens, tokens).map(lambda x: x.detach().requires_grad_())
        shares = torch.autograd.grad(call(nsa, leaves, config).sum(), (leaves.q, leaves.k, leaves.v))
        assert not any(share.any() for share in shares)


# Neighborhood attention


@pytest.mark.parametrize(
    ("kernel_size", "dilation", "heads"),
    cases.product([1, 64, 129, 4000], [1, 3, 700], [(8, 2), (4, 4)], cover=2),
    ids=str,
)
def test_neighborhoods(kernel_size: int, dilation: int, heads: tuple[int, int]) -> None:
    """Rows bit for bit for any cut; gradients are held against the reference in test_neighborhood.py."""
    q, k, v = make_qkv(TOKENS, *heads, 128, batch=2, dtype=torch.bfloat16, device="cuda")
    window: dict[str, Any] = {"kernel_size": kernel_size, "dilation": dilation, "causal": True, "backend": "cute"}
    whole = neighborhood_attention(q, k, v, **window)
    for start, stop in pairwise((0, 1, 100, 1500, 1501, 2200, TOKENS)):
        out = neighborhood_attention(q[:, start:stop], k, v, q_start=start, **window)
        assert torch.equal(out, whole[:, start:stop])
