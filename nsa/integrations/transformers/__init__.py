"""NSA in Hugging Face's transformers: `convert`, and attn_implementation="nsa", both registered by this import."""

from __future__ import annotations

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING, TOKENIZER_MAPPING_NAMES

from nsa.integrations.transformers.convert import convert
from nsa.integrations.transformers.guards import CHECKS
from nsa.integrations.transformers.interface import NAME, check_model, nsa_attention, nsa_mask
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
CHECKS[NAME] = check_model
for _dense, _config, _model, _causal_lm in (
    (LlamaConfig, NSALlamaConfig, NSALlamaModel, NSALlamaForCausalLM),
    (Qwen3Config, NSAQwen3Config, NSAQwen3Model, NSAQwen3ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    # Trainer (to shift labels), pipelines, servers and model cards recognise models by these lists of names
    MODEL_MAPPING_NAMES[_config.model_type] = _model.__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_config.model_type] = _causal_lm.__name__
    if _dense in TOKENIZER_MAPPING:  # for checkpoints that do not name their tokenizer class
        AutoTokenizer.register(_config, tokenizer_class=TOKENIZER_MAPPING[_dense], exist_ok=True)
        TOKENIZER_MAPPING_NAMES[_config.model_type] = TOKENIZER_MAPPING_NAMES[_dense.model_type]
