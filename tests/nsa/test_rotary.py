"""Llama's rotary embeddings: against complex numbers in fp64, and bit for bit those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NeighborhoodAttention, NSAConfig, NSAttention, llama_rope, rotary_table


def rotated(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """x `[N,heads,D]`: features i and i + D/2 as a complex number, turned by position / theta^(2i/D)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turns = [[complex(0, p / theta ** (2 * i / (2 * half))) for i in range(half)] for p in positions]
    turned = pairs * torch.tensor(turns, dtype=torch.complex128).exp()[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotates_pairs_of_features(theta: float) -> None:
    x, positions = torch.randn(7, 3, 16), [0, 1, 2, 5, 100, 4095, 3]
    table = rotary_table(torch.tensor(positions), 16, theta=theta)
    # The angle in fp32 is off by an ulp of itself
    tolerance = 4 * 4096 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(llama_rope(x, table).double(), rotated(x, positions, theta), rtol=0, atol=tolerance)


@pytest.mark.hf_extra
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    positions = torch.arange(50)[None]
    q, k = torch.randn(2, 1, 50, 4, 16, dtype=dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    mine = rotary_table(positions, 16, theta=10000.0)
    assert torch.equal(mine[0].to(dtype), cos)
    assert torch.equal(mine[1].to(dtype), sin)
    for x, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        assert torch.equal(llama_rope(x, mine), theirs)


@pytest.mark.parametrize("layer", [NSAttention, NeighborhoodAttention])
def test_is_a_hook_of_the_layers(layer: Any) -> None:
    options = {"config": NSAConfig.paper()} if layer is NSAttention else {"kernel_size": 5}
    made = layer(32, 4, rope=llama_rope, **options)
    x, table = torch.randn(1, 20, 32), rotary_table(torch.arange(20), 8)
    torch._dynamo.reset()
    whole = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(x, table), made(x, table))
    with pytest.raises(ValueError, match=r"cos of position_embeddings must have the shape \[N,D\] = \[20, 8\]"):
        made(x, rotary_table(torch.arange(21), 8))
