"""NeighborhoodAttention: the function between projections, its dropout; the layer around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch import neighborhood_attention
from nsa import NeighborhoodAttention, NeighborhoodAttentionLayer, llama_rope, rotary_table

WIDTH, HEADS, KV_HEADS = 32, 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "truncate": {"kernel_size": 5},
    "shift": {"kernel_size": 6, "dilation": 2, "boundary": "shift", "softmax_scale": 0.4},
    "causal": {"kernel_size": 4, "dilation": 3, "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_is_the_function_between_projections(options: dict[str, Any]) -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, **options)
    x = torch.randn(2, 30, WIDTH)
    q, k, v = (
        project(x).unflatten(-1, (heads, -1))
        for project, heads in ((layer.q_proj, HEADS), (layer.k_proj, KV_HEADS), (layer.v_proj, KV_HEADS))
    )
    expected = layer.o_proj(neighborhood_attention(q, k, v, **options).flatten(-2))
    torch.testing.assert_close(layer(x), expected)


def test_dropout_zeroes_outputs_in_training_only() -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(1, 100, WIDTH)
    kept = layer.eval()(x)
    assert torch.equal(kept, layer(x))
    dropped = layer.train()(x)
    zero = dropped == 0
    assert 0.4 < zero.double().mean() < 0.6
    torch.testing.assert_close(dropped[~zero], 2 * kept[~zero])


# The layer: norm in front, residual connection around


def test_layer_names_weights_as_liger_does() -> None:
    """But for o_proj, which Liger calls out_proj."""
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, bias=True)
    projections = [f"attention.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")]
    assert set(layer.state_dict()) == {*projections, "layer_norm.weight", "layer_norm.bias"}
    other = NeighborhoodAttentionLayer(WIDTH, HEADS, bias=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 20, WIDTH)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)], ids=str
)
def test_layer_keeps_the_dtype_under_autocast(dtype: torch.dtype, weights: torch.dtype) -> None:
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, dtype=weights)
    x = torch.randn(2, 20, WIDTH, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.abs().sum() > 0, name


def test_layer_passes_its_options_on() -> None:
    options: dict[str, Any] = {"kernel_size": 4, "dilation": 3, "causal": True, "softmax_scale": 0.4, "head_dim": 6}
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, KV_HEADS, rope=llama_rope, dropout=0.5, norm_eps=0.1, **options)
    x, table = torch.randn(2, 30, WIDTH), rotary_table(torch.arange(30), 6)
    kept = layer.eval()(x, table)
    torch.testing.assert_close(kept, x + layer.attention(nn.functional.layer_norm(x, (WIDTH,), eps=0.1), table))
    assert (layer.attention.num_kv_heads, layer.attention.window.causal) == (KV_HEADS, True)
    dropped = layer.train()(x, table) == x
    assert 0.4 < dropped.double().mean() < 0.6
