"""Tiny models of MiniMax-M3 of transformers with random weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    MiniMaxM3VLVisionConfig,
)

CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(modeling.MiniMaxM3VLForCausalLM.forward).parameters else "past_key_values"
)
"""transformers 5.24 has given the argument, and the field of results, another name."""
IMAGE_TOKEN, PIXELS_OF_A_PATCH = 50, 24
"""24: two frames of three channels, 2 x 2."""


def text_config(**changes: Any) -> MiniMaxM3VLTextConfig:
    """A dense layer and two sparse ones."""
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
    return MiniMaxM3VLTextConfig(**given | changes)


def minimax_model(
    implementation: str, *, dtype: torch.dtype = torch.float64, weights: torch.dtype | None = None, **changes: Any
) -> Any:
    """A dense layer, two sparse ones, in eval mode; always the same weights, so large that logits and choices differ.

    In fp64 results differ by what transformers rounds to fp32 alone.

    Args:
        weights: what these are rounded to before they become `dtype`. Default: None, which means not.
    """
    model = modeling.MiniMaxM3VLForCausalLM._from_config(text_config(**changes), attn_implementation=implementation)
    return with_large_weights(model).to(weights or dtype).to(dtype)


def minimax_vl_model(implementation: str) -> Any:
    """The same in fp64 behind a vision tower of one layer, which makes a token of four patches."""
    tower = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MiniMaxM3VLConfig(
        text_config=text_config(vocab_size=52),
        vision_config=MiniMaxM3VLVisionConfig(**tower, patch_size=2, image_size=8),
        image_token_index=IMAGE_TOKEN,
        video_token_index=IMAGE_TOKEN + 1,
        projector_hidden_size=16,
        experts_implementation="eager",
    )
    whole = modeling.MiniMaxM3SparseForConditionalGeneration
    return with_large_weights(whole._from_config(config, attn_implementation=implementation))


def with_large_weights(model: Any) -> Any:
    """In fp64 and eval mode."""
    with torch.no_grad():
        for name, weight in model.double().eval().named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model


def text(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(7))
