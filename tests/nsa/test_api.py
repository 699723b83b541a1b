"""The public functions and NSAConfig: presets, equivalent ways to call, signatures, graphs."""

from __future__ import annotations

import typing
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.config import NSAOptions
from tests.support.helpers import SMALL, make_qkv


def test_presets() -> None:
    tile, paper = NSAConfig.per_tile(), NSAConfig.paper()
    assert tile == NSAConfig()
    assert NSAConfig.seed(window_size=8) == NSAConfig.per_tile(window_size=8)
    for config, expected in ((tile, (64, 64, 64, 256, False, 16, 512)), (paper, (32, 16, 64, 1, True, 16, 512))):
        sizes = config.compress_block_size, config.stride, config.select_size, config.q_tile_size
        assert (*sizes, config.shares_heads, config.num_selected_blocks, config.window_size) == expected
    assert (paper.num_init_blocks, paper.num_local_blocks) == (1, 2)
    assert NSAConfig.paper(window_size=64) == replace(paper, window_size=64)


def test_config_is_a_value() -> None:
    config = NSAConfig(compress_block_size=np.int64(32))  # any integer type, kept as int
    assert type(config.compress_block_size) is int
    assert hash(config) == hash(NSAConfig(compress_block_size=32))
    with pytest.raises(FrozenInstanceError):
        config.window_size = 1  # type: ignore[misc]
    assert NSAConfig(q_tile_size=1).shares_heads
    assert NSAConfig(softmax_scale=2).scale(64) == 2
    assert type(NSAConfig(softmax_scale=2**70).scale(64)) is float, "PyTorch takes no such integer"
    assert NSAConfig().scale(64) == 0.125


def test_forward_builds_no_graph_and_nsa_does() -> None:
    q, k, v = make_qkv(40, requires_grad=True)
    assert nsa(q, k, v, config=SMALL["seed"]).requires_grad
    assert not nsa_forward(q, k, v, config=SMALL["seed"]).requires_grad
    out, aux = nsa_forward_aux(q, k, v, config=SMALL["seed"])
    assert isinstance(aux, NSAAux)
    assert not any(t.requires_grad for t in (out, *aux) if t is not None)


@pytest.mark.parametrize("name", ["v_slc", "w_k_compress", "gate_proj_weight", "compress"])
def test_what_lies_beside_q_may_learn_alone(name: str) -> None:
    q, k, v = make_qkv(40, dtype=torch.float32)
    given: dict[str, Any] = {"k_slc": k.clone(), "v_slc": v.clone(), "gate_proj_weight": torch.randn(4, 3, 16)}
    if name == "compress":
        given["compress"] = pool = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(8 * 16, 16))
        leaves = list(pool.parameters())
    else:
        given["w_k_compress"] = torch.eye(16).repeat(2, 1, 1)
        leaves = [given[name].requires_grad_()]
    options = vars(SMALL["seed"]) | given
    gradients = torch.autograd.grad(nsa(q, k, v, **options).square().sum(), leaves)
    assert all(bool(x.any()) for x in gradients)
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert not nsa(q, k, v, **options).requires_grad


def test_typed_dictionaries_match() -> None:
    assert set(typing.get_type_hints(NSAOptions)) == {field.name for field in fields(NSAConfig)}
