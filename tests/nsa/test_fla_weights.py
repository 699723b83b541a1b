"""Weights of fla's NSA layer load into NSAttention, which then computes what fla's naive functions do."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from nsa import NSAttention
from nsa.integrations.fla import fla_config, layer_from_fla

HEADS, DIM, WIDTH, BLOCK, COUNT, WINDOW, TOKENS = 16, 16, 32, 8, 4, 20, 107
"""fla wants groups of 16 at least; of 14 blocks 4 are selected, 3 of them forced; the last one is ragged."""


def fla_state(bias: bool = False) -> dict[str, Tensor]:
    sizes = {
        "q_proj": (HEADS * DIM, WIDTH),
        "k_proj": (DIM, WIDTH),
        "v_proj": (DIM, WIDTH),
        "g_proj": (HEADS * 3, WIDTH),
    }
    state = {f"{name}.weight": torch.randn(size) * 0.3 for name, size in sizes.items()}
    state["o_proj.weight"] = torch.randn(WIDTH, HEADS * DIM) * 0.1
    if bias:
        state |= {f"{name}.bias": torch.randn(sizes[name][0]) for name in ("q_proj", "k_proj", "v_proj")}
    return state


def by_definition(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> list[Tensor]:
    """Compressed and selected branch `[1,N,H,D]` by fla's definition, over all pairs, for one key/value head."""
    token, block = torch.arange(TOKENS), torch.arange(k_cmp.shape[1])
    logits = torch.einsum("bqhd,bkd->bhqk", q, k_cmp[:, :, 0]) * DIM**-0.5
    past = (block + 1) * BLOCK - 1 <= token[:, None]
    p = logits.masked_fill(~past, -torch.inf).softmax(-1).nan_to_num()
    own = token[:, None] // BLOCK
    forced = (block == 0) | (block == own) | (block == own - 1)
    scores = torch.where(forced, 2.0, p.mean(1)[0]).masked_fill(~(past | forced), -1.0)
    chosen = torch.zeros_like(past).scatter(1, scores.topk(COUNT).indices, True) & (past | forced)
    seen = chosen.repeat_interleave(BLOCK, 1)[:, :TOKENS] & (token <= token[:, None])
    weights = (torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return [
        torch.einsum("bhqk,bkd->bqhd", p, v_cmp[:, :, 0]),
        torch.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0]),
    ]


def by_fla(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> list[Tensor]:
    """The same by fla-core's naive functions, which run on a CPU; its pooling, and its window, are kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would use on a GPU
        from fla.ops.nsa import naive
    scale: Any = DIM**-0.5
    blocks = naive.naive_nsa_topk(q, k_cmp, COUNT, BLOCK, scale)
    compressed, _ = naive.naive_nsa_compression(q, k_cmp, v_cmp, BLOCK, scale)
    return [compressed, naive.naive_nsa_selection(q, k, v, blocks, BLOCK, scale)]


@pytest.mark.parametrize("oracle", [by_definition, *([by_fla] if find_spec("fla") else [])], ids=lambda f: f.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_computes_what_fla_does(bias: bool, oracle: Any) -> None:
    state = fla_state(bias)
    layer = layer_from_fla(state, fla_config(BLOCK, COUNT, WINDOW))
    assert isinstance(layer, NSAttention)
    x = torch.randn(1, TOKENS, WIDTH)
    q, k, v = (
        linear(x, state[f"{name}.weight"], state.get(f"{name}.bias")).unflatten(-1, (-1, DIM))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    last = torch.tensor([BLOCK] * (TOKENS // BLOCK) + [TOKENS % BLOCK])
    pooled = (
        pad(y, (0, 0, 0, 0, 0, -TOKENS % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2) / last[:, None, None] for y in (k, v)
    )
    compressed, selected = oracle(q, k, v, *pooled)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    logits = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * DIM**-0.5
    weights = logits.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf).softmax(-1)
    branches = [compressed, selected, torch.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])]
    gates = linear(x, state["g_proj.weight"]).unflatten(-1, (HEADS, 3)).sigmoid()
    out = sum(branch * gate[..., None] for branch, gate in zip(branches, gates.unbind(-1), strict=True))
    expected = linear(out.flatten(-2), state["o_proj.weight"])
    with torch.no_grad():
        # Sums of up to 256 fp32 numbers of size 1 in another order
        torch.testing.assert_close(layer(x), expected, atol=256 * 6e-8 * float(expected.abs().max()), rtol=0)


def test_sizes_come_from_the_weights_and_errors_name_them() -> None:
    state = fla_state()
    layer = layer_from_fla(state | {"rotary.inv_freq": torch.ones(8)})
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.hidden_size) == (HEADS, 1, DIM, WIDTH)
    assert layer.config == fla_config(64, 16, 512)
    assert (layer.config.num_init_blocks, layer.config.num_local_blocks, layer.config.token_mode) == (1, 2, True)
    assert fla_config(window_size=None).window_size == 0
    with pytest.raises(ValueError, match=r"three biases or none, got .*'q_proj.bias'"):
        layer_from_fla(state | {"q_proj.bias": torch.zeros(HEADS * DIM)})
    with pytest.raises(ValueError, match="three gates a head and heads of one size"):
        layer_from_fla(state | {"g_proj.weight": torch.zeros(47, WIDTH)})
    with pytest.raises(TypeError, match="block_counts must be an integer"):
        fla_config(block_counts=torch.ones(1, 4, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must fit in num_selected_blocks=2"):
        fla_config(block_counts=2)
