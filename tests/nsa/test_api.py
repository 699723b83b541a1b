"""The public functions and NSAConfig: presets, equivalent ways to call, signatures, graphs."""

from __future__ import annotations

import typing
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.config import NSAOptions
from nsa.inputs import NSAInputs
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


def test_parameters_of_compress_learn() -> None:
    """Also when nothing else does; and the dispatcher knows that backward may follow."""
    pool = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(8 * 16, 16))
    q, k, v = make_qkv(40, dtype=torch.float32)
    config = replace(SMALL["seed"], compress=pool)
    assert NSAInputs(q, k, v).needs_grad(config)
    nsa(q, k, v, config=config).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pool.parameters())
    pool.requires_grad_(False)
    assert not NSAInputs(q, k, v).needs_grad(config)
    assert NSAInputs(q, k, v).needs_grad(replace(config, compress=(pool, lambda blocks: blocks[..., 0, :])))


def test_typed_dictionaries_match() -> None:
    assert set(typing.get_type_hints(NSAOptions)) == {field.name for field in fields(NSAConfig)}
