"""Tiny models of MiniMax-M3 of transformers with random weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(modeling.MiniMaxM3VLForCausalLM.forward).parameters else "past_key_values"
)
"""transformers 5.24 has given the argument, and the field of results, another name."""


def minimax_model(
    implementation: str, *, dtype: torch.dtype = torch.float64, weights: torch.dtype | None = None, **changes: Any
) -> Any:
    """A dense layer, two sparse ones, in eval mode; always the same weights, so large that logits and choices differ.

    In fp64 results differ by what transformers rounds to fp32 alone.

    Args:
        weights: what these are rounded to before they become `dtype`. Default: None, which means not.
    """
    given: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 24,
        "dense_intermediate_size": 24,
        "shared_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "bos_token_id": 1,
        "eos_token_id": None,
        "experts_implementation": "eager",
        "pad_token_id": 0,
    }
    config = MiniMaxM3VLTextConfig(**given | changes)
    model = modeling.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation=implementation).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model.to(weights or dtype).to(dtype)


def text(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(7))
