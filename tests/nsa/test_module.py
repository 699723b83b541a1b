"""NSAttention in the places it is made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import (
    AttentionResidual,
    NeighborhoodAttention,
    NSAttention,
    llama_rope,
    neighborhood_attention,
    nsa,
    nsa_forward_aux,
    rotary_table,
)
from nsa.common.layers import NOT_SUPPORTED
from tests.support.helpers import SMALL

WIDTH, HEADS, KV_HEADS = 32, 4, 2


def test_aux_is_that_of_the_function_between_projections() -> None:
    """test_fla_weights.py compares the layer itself with another definition."""
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=SMALL["seed"], gate="x")
    x = torch.randn(2, 40, WIDTH)
    q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    out, aux = layer.forward_aux(x)
    torch.testing.assert_close(out, layer(x))
    assert not out.requires_grad
    assert torch.equal(aux.indices, nsa_forward_aux(q, k, v, config=SMALL["seed"])[1].indices)


@pytest.mark.parametrize(
    "build",
    [
        lambda device: NSAttention(WIDTH, HEADS, KV_HEADS, gate="q", compress_proj=True, device=device),
        lambda device: AttentionResidual(WIDTH, device=device),
    ],
    ids=["nsa", "residual"],
)
def test_begins_on_the_meta_device(build: Callable[[str], nn.Module]) -> None:
    """As FSDP and large models do it: without memory, then `to_empty`, then `reset_parameters` of every module."""
    layer, other = build("meta").to_empty(device="cpu"), build("cpu")
    for parameter in layer.parameters(recurse=False):
        nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters(recurse=False):
        assert torch.equal(parameter, other.get_parameter(name)), name


# Arguments of other libraries' layers

LAYERS = {"nsa": NSAttention, "neighborhood": NeighborhoodAttention}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
@pytest.mark.parametrize("kind", LAYERS)
def test_refuses_what_it_would_ignore(kind: str, name: str) -> None:
    layer = LAYERS[kind](WIDTH, HEADS)
    values = (kind != "nsa",) if name == "is_causal" else (True, 0.5, torch.ones(1, 8), ())
    for forward in (layer, layer.forward_aux) if kind == "nsa" else (layer,):
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} is not supported: .*; got "):
                forward(torch.ones(1, 8, WIDTH), **{name: value})


@pytest.mark.parametrize("kind", LAYERS)
def test_takes_arguments_that_ask_for_nothing(kind: str) -> None:
    layer = LAYERS[kind](WIDTH, HEADS)
    nothing = dict.fromkeys(NOT_SUPPORTED)
    flags = dict.fromkeys(("use_cache", "output_attentions", "need_weights"), False)
    flags |= {"is_causal": kind == "nsa", "dropout": 0.0}
    x = torch.randn(1, 8, WIDTH)
    assert torch.equal(layer(x, **nothing | flags), layer(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention_musk'"):
        layer(x, attention_musk=None)


WITH_ALL = partial(NSAttention, v_head_dim=6, compress_proj=True, separate_kv=True, bias=True)


@pytest.mark.parametrize(
    ("make", "target", "op"),
    [
        *((partial(WITH_ALL, config=SMALL[name]), "nsa.module.nsa", nsa) for name in SMALL),
        (partial(WITH_ALL, config=SMALL["paper"], gate="q"), "nsa.module.nsa", nsa),
        (partial(NSAttention, config=SMALL["seed"], gate=None), "nsa.module.nsa", nsa),
        (NeighborhoodAttention, "nsa.neighborhood.module.neighborhood_attention", neighborhood_attention),
    ],
    ids=[*SMALL, "gates of q", "no gates", "neighborhood"],
)
def test_under_autocast_only_the_projections_lose_precision(make: Any, target: str, op: Any) -> None:
    """Weights and gradients are fp32; the op gives what it gives outside, for the same q, k, v of 16 bits."""
    layer = make(WIDTH, HEADS, KV_HEADS, rope=llama_rope)
    received: dict[str, Any] = {}

    def record(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        received.update(keywords, q=q, k=k, v=v)
        received["out"] = op(q, k, v, **keywords)
        return received["out"]

    x = torch.randn(2, 50, WIDTH, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(target, record)
        out = layer(x, rotary_table(torch.arange(50), layer.head_dim))
    assert out.dtype == received["q"].dtype == torch.bfloat16
    expected = received.pop("out")
    assert torch.equal(op(**received), expected)
    out.float().square().sum().backward()
    for name, parameter in [("x", x), *layer.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().sum() > 0, name
