"""Tiny models of transformers with random weights, dense and converted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nsa import NSAConfig
from nsa.integrations.transformers import convert

VOCABULARY = 97
OPTIONS = NSAConfig.paper(
    compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=8
)
"""Of 40 tokens a token selects 32 at most, so that nothing is dense."""
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def dense_model(kind: str = "llama", **changes: Any) -> Any:
    """Two layers of 4 heads over 2, in eval mode; weights are large, so that attention and logits are far from even."""
    config, model = KINDS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}
    return model(config(**sizes | heads | tokens | changes)).eval()


def converted_model(kind: str = "llama", options: NSAConfig = OPTIONS, gates: Any = "hidden", **changes: Any) -> Any:
    """The same, converted; gates depend on what they can depend on."""
    model = convert(dense_model(kind, **changes), options, gates=gates, gate_init=(0.3, 0.6, 0.4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gates." in name and not name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def token_ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens))
