"""convert: turns a dense Llama or Qwen3, or its config, into an NSA model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from nsa.config import NSAConfig, check_options
from nsa.integrations.transformers.interface import NAME
from nsa.integrations.transformers.modeling import ATTENTIONS, CONFIGS, MODELS, become_nsa
from nsa.integrations.transformers.options import check_gate_init, check_gates, options_dict

SPARSE_CONFIG = (
    "its sparse_config describes InfLLM-v2, one softmax over initial, local and best blocks, chosen by the maximum of "
    "pooled scores, and dense below dense_len: NSA weighs three softmaxes and sums scores, so its weights do not "
    "transfer (docs/huggingface.md)"
)


def convert(
    model: Any,
    config: NSAConfig | None = None,
    *,
    gates: Literal["hidden", "query", "learned"] = "hidden",
    gate_init: Sequence[float] | None = None,
) -> Any:
    """Convert a dense LlamaForCausalLM, LlamaModel, Qwen3ForCausalLM or Qwen3Model, or its config, to NSA.

    A model is changed in place: attention layers get gates and new classes, and all weights stay as they are. For a
    config, a new config is returned, for AutoModelForCausalLM.from_config or to load a dense checkpoint. Both contain
    the options, so save_pretrained and from_pretrained need only this import.

    Args:
        model: the model, on any device and in any dtype, or the config. It must have no hooks or wrappers: convert
            first, then dispatch to devices, add adapters, or compile.
        config: options of NSA. Default: None, which means `NSAConfig.paper()`, suited to generation.
        gates: where the weights of the three branches come from. "hidden": sigmoid(bias + linear(hidden states)), as in
            the paper. "query": sigmoid(bias + q·w) of the rotated queries. "learned": sigmoid(bias), one per head.
            Default: "hidden".
        gate_init: initial gates of the compressed, selected and window branch, each between 0 and 1. Default: None,
            which means (0.05, 0.9, 0.05), close to dense attention.

    Returns:
        The model, or the new config.

    Raises:
        TypeError: for another model, config, or attention layer.
        ValueError: naming an unsupported feature: dropout, sliding windows, NSA options that a config cannot hold,
            hooks.

    After an error the model is unchanged.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from nsa.integrations.transformers import convert
        >>> dense = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> model = AutoModelForCausalLM.from_config(convert(dense))
        >>> type(model).__name__, model.config.model_type
        ('NSALlamaForCausalLM', 'nsa_llama')
    """
    check_options(config, {})
    fields = {
        "nsa_config": options_dict(NSAConfig.paper() if config is None else config),
        "nsa_gates": check_gates(gates),
        "nsa_gate_init": check_gate_init(gate_init),
    }
    if type(model) in CONFIGS:
        return _config(model, fields)
    if type(model) not in MODELS:
        reason = SPARSE_CONFIG if hasattr(getattr(model, "config", model), "sparse_config") else ""
        wanted = ", ".join(kind.__name__ for kind in (*MODELS, *CONFIGS))
        raise TypeError(f"model must be one of {wanted}, got {type(model).__name__}{reason and ': ' + reason}")
    hooked = [name for name, module in model.named_modules() if "forward" in vars(module)]
    if hooked:
        raise ValueError(
            f"model must have no hooks of accelerate or wrapped forwards, got one at {hooked[0] or 'its root'}: "
            "convert it before it is dispatched"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn") and type(module) not in ATTENTIONS:
            wanted = " or ".join(kind.__name__ for kind in ATTENTIONS)
            raise TypeError(f"{name} of model must be {wanted}, got {type(module).__name__}")
    become_nsa(model, _config(model.config, fields))
    return model


def _config(dense: Any, fields: dict[str, Any]) -> Any:
    """Convert a dense config to an NSA config with all of its fields."""
    if dense.attention_dropout:
        raise ValueError(f"attention_dropout must be 0 with NSA, got {dense.attention_dropout}")
    kinds = set(getattr(dense, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"layer_types must all be 'full_attention', got {', '.join(sorted(kinds))}")
    given = copy.deepcopy(dense.to_dict())
    for name in ("model_type", "architectures", "transformers_version"):
        given.pop(name, None)
    converted = CONFIGS[type(dense)](**given, **fields)
    converted._attn_implementation = NAME
    return converted
