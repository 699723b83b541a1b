"""NSA in Hugging Face's transformers: `convert`, and attn_implementation="nsa", both registered by this import."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoModelForCausalLM

from nsa.integrations.transformers.convert import convert
from nsa.integrations.transformers.interface import NAME, nsa_attention, nsa_mask
from nsa.integrations.transformers.modeling import (
    NSALlamaConfig,
    NSALlamaForCausalLM,
    NSALlamaModel,
    NSAQwen3Config,
    NSAQwen3ForCausalLM,
    NSAQwen3Model,
)

__all__ = [
    "NSALlamaConfig",
    "NSALlamaForCausalLM",
    "NSALlamaModel",
    "NSAQwen3Config",
    "NSAQwen3ForCausalLM",
    "NSAQwen3Model",
    "convert",
]

AttentionInterface.register(NAME, nsa_attention)
AttentionMaskInterface.register(NAME, nsa_mask)
for _config, _model, _causal_lm in (
    (NSALlamaConfig, NSALlamaModel, NSALlamaForCausalLM),
    (NSAQwen3Config, NSAQwen3Model, NSAQwen3ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
