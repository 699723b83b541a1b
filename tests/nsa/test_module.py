"""NSAttention in the places it is made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import AttentionResidual, NeighborhoodAttention, NSAConfig, NSAttention, nsa, nsa_forward_aux
from tests.support.helpers import SMALL
from tests.support.layer_cases import check_autocast
from tests.support.rotary import rotary_table, rotate

WIDTH, HEADS, KV_HEADS = 32, 4, 2


@pytest.mark.parametrize("gate", ["x", "q", None])
@pytest.mark.parametrize("separate_kv", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_learns(name: str, gate: Any, separate_kv: bool) -> None:
    layer = NSAttention(
        WIDTH,
        HEADS,
        KV_HEADS,
        v_head_dim=6,
        config=SMALL[name],
        gate=gate,
        separate_kv=separate_kv,
        compress_proj=True,
        bias=True,
        rope=rotate,
    )
    x = torch.randn(2, 50, WIDTH, requires_grad=True)
    out = layer(x, rotary_table(50, layer.head_dim))
    assert out.shape == x.shape
    out.square().sum().backward()
    for parameter_name, parameter in [("x", x), *layer.named_parameters()]:
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_is_the_function_between_projections() -> None:
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=SMALL["seed"], gate="x")
    x = torch.randn(2, 40, WIDTH)
    q, k, v = (
        project(x).unflatten(-1, (heads, -1))
        for project, heads in ((layer.q_proj, HEADS), (layer.k_proj, KV_HEADS), (layer.v_proj, KV_HEADS))
    )
    gates = torch.sigmoid(layer.gate_proj(x)).unflatten(-1, (HEADS, 3))
    expected = layer.o_proj(nsa(q, k, v, gates=gates, config=SMALL["seed"]).flatten(-2))
    torch.testing.assert_close(layer(x), expected)
    out, aux = layer.forward_aux(x)
    torch.testing.assert_close(out, expected)
    assert not out.requires_grad
    assert torch.equal(aux.indices, nsa_forward_aux(q, k, v, config=SMALL["seed"])[1].indices)


def test_packed_documents_equal_documents_alone() -> None:
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=SMALL["paper"])
    x = torch.randn(60, WIDTH)
    packed = layer(x, cu_seqlens=torch.tensor([0, 25, 60], dtype=torch.int32), max_seqlen=35)
    for rows in (slice(0, 25), slice(25, 60)):
        torch.testing.assert_close(packed[rows], layer(x[None, rows])[0])


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


class LlamaBlock(nn.Module):
    """A decoder block as Llama has it; `self_attn` is what gets replaced."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states=normed, position_embeddings=position_embeddings)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_fits_a_llama_block_and_loads_its_weights() -> None:
    attention = NSAttention(WIDTH, HEADS, KV_HEADS, config=SMALL["seed"], rope=rotate)
    head = WIDTH // HEADS
    llama = {
        "q_proj.weight": torch.randn(WIDTH, WIDTH),
        "k_proj.weight": torch.randn(KV_HEADS * head, WIDTH),
        "v_proj.weight": torch.randn(KV_HEADS * head, WIDTH),
        "o_proj.weight": torch.randn(WIDTH, WIDTH),
    }
    result = attention.load_state_dict(llama, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) == {"gate_proj.weight", "gate_proj.bias"}
    block = LlamaBlock(attention)
    assert block(torch.randn(1, 40, WIDTH), rotary_table(40, head)).shape == (1, 40, WIDTH)


# Arguments of other libraries' layers

MASK = torch.ones(1, 8, dtype=torch.bool)
HUGGING_FACE = {
    "attention_mask": MASK,
    "past_key_values": [(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))],
    "past_key_value": object(),
    "layer_past": (),
    "use_cache": True,
    "cache_position": torch.arange(8),
    "position_ids": torch.arange(8)[None],
    "output_attentions": True,
    "scaling": 0.5,
    "dropout": 0.1,
    "encoder_hidden_states": torch.zeros(1, 8, WIDTH),
}
MULTIHEAD = {
    "key": torch.zeros(1, 8, WIDTH),
    "value": torch.zeros(1, 8, WIDTH),
    "attn_mask": MASK,
    "key_padding_mask": MASK,
    "need_weights": True,
    "is_causal": True,
    "dropout_p": 0.1,
    "enable_gqa": True,
}
LAYERS = {"nsa": NSAttention, "neighborhood": NeighborhoodAttention}


def forwards(layer: nn.Module) -> list[Callable[..., Any]]:
    return [layer, layer.forward_aux] if isinstance(layer, NSAttention) else [layer]


@pytest.mark.parametrize("name", [*HUGGING_FACE, *MULTIHEAD])
@pytest.mark.parametrize("kind", LAYERS)
def test_refuses_what_it_would_ignore(kind: str, name: str) -> None:
    layer = LAYERS[kind](WIDTH, HEADS)
    own = layer.config.causal if isinstance(layer, NSAttention) else layer.window.causal
    value = not own if name == "is_causal" else {**HUGGING_FACE, **MULTIHEAD}[name]
    for forward in forwards(layer):
        with pytest.raises(ValueError, match=f"^{name} is not supported: .*; got "):
            forward(torch.ones(1, 8, WIDTH), **{name: value})


@pytest.mark.parametrize("kind", LAYERS)
def test_says_what_to_do_instead_of_masking(kind: str) -> None:
    advice = {"nsa": "pack documents with cu_seqlens", "neighborhood": "each document in a separate call"}[kind]
    with pytest.raises(ValueError, match=f"there is no attention mask, .*{advice} .*; got Tensor"):
        LAYERS[kind](WIDTH, HEADS)(torch.ones(1, 8, WIDTH), attention_mask=MASK)


@pytest.mark.parametrize("kind", LAYERS)
def test_takes_arguments_that_ask_for_nothing(kind: str) -> None:
    layer = LAYERS[kind](WIDTH, HEADS)
    own = layer.config.causal if isinstance(layer, NSAttention) else layer.window.causal
    nothing = dict.fromkeys([*HUGGING_FACE, *MULTIHEAD])
    flags = {"use_cache": False, "output_attentions": False, "need_weights": False, "is_causal": own, "dropout": 0.0}
    x = torch.randn(1, 8, WIDTH)
    assert torch.equal(layer(x, **nothing | flags), layer(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention_musk'"):
        layer(x, attention_musk=None)
    torch._dynamo.reset()
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, **nothing | flags), layer(x))


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_pages_recommend_no_subclass_that_drops_arguments(page: str) -> None:
    assert "**_" not in (Path(__file__).resolve().parents[2] / page).read_text(encoding="utf-8")


def test_learns_to_copy_over_a_distance() -> None:
    """A task that a window of 4 cannot do: repeat the token seen 24 places before."""
    torch.manual_seed(0)
    config = NSAConfig.paper(
        compress_block_size=4, compress_stride=2, select_block_size=4, num_selected_blocks=8, window_size=4
    )
    vocabulary, distance, tokens = 8, 24, 48
    embed = nn.Embedding(vocabulary, WIDTH)
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=config, rope=rotate)
    head = nn.Linear(WIDTH, vocabulary)
    parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    table = rotary_table(tokens, layer.head_dim)
    losses = []
    for _ in range(60):
        half = torch.randint(vocabulary, (16, distance))
        text = torch.cat([half, half], dim=1)
        logits = head(layer(embed(text), table))[:, distance:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, :distance].roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("gate", ["x", "q", None])
@pytest.mark.parametrize("name", SMALL)
def test_under_autocast_only_the_projections_lose_precision(name: str, gate: Any) -> None:
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=SMALL[name], gate=gate, compress_proj=True, separate_kv=True)
    check_autocast(layer, WIDTH, "nsa.module.nsa", nsa)


def test_dtype_and_representation() -> None:
    layer = NSAttention(WIDTH, HEADS, config=NSAConfig.paper(), dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(1, 8, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert "num_heads=4, num_kv_heads=4, gate='x'" in repr(layer)


def test_backend_reaches_the_dispatcher() -> None:
    with pytest.raises(ValueError, match="backend must be one of cute, reference for nsa, got 'cudnn'"):
        NSAttention(WIDTH, HEADS, backend="cudnn")(torch.randn(1, 8, WIDTH))
