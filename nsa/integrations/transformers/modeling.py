"""Llama and Qwen3 with NSA: configs and classes with their own model types.

They subclass transformers' classes and change attention, which has gates and appends to a paged cache, and the model's
forward, which finds the documents of a batch once and opens a cache's step around its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    StaticCache,
    initialization,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from nsa.common.layers import weight_properties
from nsa.config import NSAConfig
from nsa.integrations.transformers.cache import take_over, takes_compiled_steps
from nsa.integrations.transformers.gates import BranchGates
from nsa.integrations.transformers.interface import (
    NAME,
    attend,
    find_documents,
    given_documents,
    mask_of_static_cache,
    refuse,
)
from nsa.integrations.transformers.options import check_gate_init, check_gates, options_dict, options_of
from nsa.integrations.transformers.unpadding import PACK_ADVICE, positions_of_texts
from nsa.unpadding import Unpadding

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
"""Name of the cache argument in the installed transformers: `past_key_values` until 5.23."""


# Configs


class ConfigMixin:
    """The fields `nsa_config`, `nsa_gates` and `nsa_gate_init` of a model's config, checked and completed."""

    nsa_config: dict[str, Any] | None
    nsa_gates: str
    nsa_gate_init: list[float] | None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.nsa_config = options_dict(options_of(self))
        self.nsa_gates = check_gates(self.nsa_gates)
        self.nsa_gate_init = check_gate_init(self.nsa_gate_init)


@strict
class NSALlamaConfig(ConfigMixin, LlamaConfig):
    """LlamaConfig with the options of NSA.

    Attributes:
        nsa_config: options of NSAConfig by name. Default: None, which means those of `NSAConfig.paper()`.
        nsa_gates: where gates come from: "hidden", "query" or "learned". Default: "hidden".
        nsa_gate_init: initial gates of the three branches. Default: None, which means those of `convert`.
    """

    model_type = "nsa_llama"
    base_model_tp_plan = None  # gates span all heads

    nsa_config: dict[str, Any] | None = None
    nsa_gates: str = "hidden"
    nsa_gate_init: list[float] | None = None


@strict
class NSAQwen3Config(ConfigMixin, Qwen3Config):
    """Qwen3Config with the options of NSA, as in NSALlamaConfig. All layers must be "full_attention"."""

    model_type = "nsa_qwen3"
    base_model_tp_plan = None

    nsa_config: dict[str, Any] | None = None
    nsa_gates: str = "hidden"
    nsa_gate_init: list[float] | None = None


# Attention


class AttentionMixin:
    """forward of an attention layer that has q_proj, k_proj, v_proj, o_proj and, in Qwen3, q_norm and k_norm."""

    config: Any
    layer_idx: int
    head_dim: int
    training: bool
    attention_dropout: float
    rotate: Any
    """apply_rotary_pos_emb of the model."""

    gates: BranchGates

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        nsa_call: tuple[NSAConfig, Tensor | None, Unpadding | None] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """NSA of one layer; `nsa_call` holds options, mask and documents, found by the model's forward."""
        if attention_mask is not None:
            raise ValueError("attention_mask must be passed to the converted model's forward, not to its layers")
        dropout = self.attention_dropout if self.training else 0.0
        cache = kwargs.pop(CACHE_ARGUMENT, None)
        kwargs.pop("position_ids", None)  # read by the model's forward
        refuse(dropout=dropout, is_causal=True, others=kwargs)
        q, k, v = self._heads(hidden_states)
        q, k = self.rotate(q, k, *position_embeddings, unsqueeze_dim=2)
        gates = self.gates(hidden_states, q)
        if cache is None:
            out = attend(q, k, v, gates, *(nsa_call or (options_of(self.config), None, None)))
        else:
            out = cache.layers[self.layer_idx].attend(q, k, v, gates)
        return self.o_proj(out.flatten(-2)), None  # type: ignore[attr-defined]

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v `[B,N,heads,D]` before rotation."""
        me: Any = self
        heads = [project(hidden_states).unflatten(-1, (-1, me.head_dim)) for project in (me.q_proj, me.k_proj)]
        if hasattr(me, "q_norm"):
            heads = [norm(x) for norm, x in zip((me.q_norm, me.k_norm), heads, strict=True)]
        return heads[0], heads[1], me.v_proj(hidden_states).unflatten(-1, (-1, me.head_dim))


class NSALlamaAttention(AttentionMixin, modeling_llama.LlamaAttention):
    """LlamaAttention with NSA."""

    rotate = staticmethod(modeling_llama.apply_rotary_pos_emb)


class NSAQwen3Attention(AttentionMixin, modeling_qwen3.Qwen3Attention):
    """Qwen3Attention with NSA."""

    rotate = staticmethod(modeling_qwen3.apply_rotary_pos_emb)


# Models


class PreTrainedMixin:
    """Base of converted models: they are built as dense models and then converted; gates have an initialisation."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        become_nsa(self, config)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        if attn_implementation not in (None, NAME):
            raise ValueError(f"attn_implementation must be 'nsa' in a converted model, got {attn_implementation!r}")
        return NAME

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BranchGates):
            for name, value in module.initial_values().items():
                initialization.copy_(module.get_parameter(name), value)
        else:
            super()._init_weights(module)  # type: ignore[misc]


class ModelMixin(PreTrainedMixin):
    """forward of the model: documents are found once, and a cache's step is opened around the layers."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward of the dense model. The layers of an empty cache are replaced; without a cache, none is created if
        gradients are needed, in torch.compile, or for packed documents. Without position_ids, positions are those of
        tokens in their own texts, continuing a cache's.

        Raises:
            ValueError: for a mask that is neither padding on one side nor documents; for a cache that is not supported.
        """
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions must be False: NSA has no attention weights to return, got True")
        inputs = given_inputs(input_ids, inputs_embeds)
        batch, tokens = inputs.shape[:2]
        earlier = kwargs.pop("past_key_values", None)
        cache = self._checked_cache(earlier if cache is None else cache, use_cache, tokens)
        given = given_documents(kwargs, inputs.device)
        if cache is not None and torch.compiler.is_compiling():
            mask, documents = mask_of_static_cache(attention_mask, (batch, cache.get_max_length())), given
        else:
            cached = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
            most = cache.get_max_length() if isinstance(cache, StaticCache) else None
            shape = (batch, tokens, cached + tokens)
            mask, documents = find_documents(attention_mask, position_ids, given, shape, max_columns=most)
        if documents is not None and (cache is not None or use_cache):
            raise ValueError(f"a cache holds no packed documents: {PACK_ADVICE}")
        if cache is None and documents is None and self._may_cache():
            cache = DynamicCache() if use_cache is not False and (use_cache or self.config.use_cache) else None
        call: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        config = options_of(self.config)
        call |= kwargs | {"use_cache": cache is not None, CACHE_ARGUMENT: cache, "nsa_call": (config, mask, documents)}
        if cache is None:
            positions = positions_of_texts(mask, documents, tokens) if position_ids is None else position_ids
            return super().forward(position_ids=positions, **call)  # type: ignore[misc]
        sequences = take_over(cache, config, self.config.num_hidden_layers)
        with sequences.step(batch, tokens, inputs.device, mask):
            positions = sequences.positions() if position_ids is None else position_ids
            return super().forward(position_ids=positions, **call)  # type: ignore[misc]

    def _checked_cache(self, cache: Any, use_cache: bool | None, tokens: int) -> Any:
        """Return the cache of a call, or None; raises if a cache is not supported."""
        if cache is None and not use_cache:
            return None
        got = f"use_cache={use_cache}" if cache is None else type(cache).__name__
        if torch.is_grad_enabled():
            raise ValueError(
                f"a cache does not support gradients: call the model under torch.no_grad(), or without one; got {got}"
            )
        if torch.compiler.is_compiling() and not (tokens == 1 and takes_compiled_steps(cache)):
            raise ValueError(
                "in torch.compile a cache must be a StaticCache that holds a prompt, with one new token per sequence: "
                f"call the model with the prompt outside of torch.compile; got {got} and {tokens} tokens"
            )
        return cache

    def _may_cache(self) -> bool:
        return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def given_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return whichever of the two is given.

    Raises:
        ValueError: for neither, for both, and for wrong dimensions.
    """
    if input_ids is not None and inputs_embeds is not None:
        raise ValueError("input_ids or inputs_embeds must be given, got both")
    for name, given, dims in (("input_ids", input_ids, "[B,N]"), ("inputs_embeds", inputs_embeds, "[B,N,hidden_size]")):
        if given is None:
            continue
        if given.dim() != len(dims.split(",")):
            raise ValueError(f"{name} must be {dims}, got shape {list(given.shape)}")
        return given
    raise ValueError("input_ids or inputs_embeds must be given, got neither")


class CausalLMMixin(PreTrainedMixin):
    """generate() with paged caches."""

    model: Any

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return the callable that `generate` uses when it compiles: only steps of one token are compiled."""
        as_it_is: Any = self
        compiled = super().get_compiled_call(compile_config)  # type: ignore[misc]

        def call(**inputs: Any) -> Any:
            given = next(x for x in (inputs.get("input_ids"), inputs.get("inputs_embeds")) if x is not None)
            is_step = given.shape[1] == 1 and takes_compiled_steps(inputs.get(CACHE_ARGUMENT))
            return (compiled if is_step else as_it_is)(**inputs)

        return call


class NSALlamaModel(ModelMixin, LlamaModel):
    """LlamaModel with NSA."""

    config: NSALlamaConfig
    config_class = NSALlamaConfig


class NSALlamaForCausalLM(CausalLMMixin, LlamaForCausalLM):
    """LlamaForCausalLM with NSA."""

    config: NSALlamaConfig
    config_class = NSALlamaConfig


class NSAQwen3Model(ModelMixin, Qwen3Model):
    """Qwen3Model with NSA."""

    config: NSAQwen3Config
    config_class = NSAQwen3Config


class NSAQwen3ForCausalLM(CausalLMMixin, Qwen3ForCausalLM):
    """Qwen3ForCausalLM with NSA."""

    config: NSAQwen3Config
    config_class = NSAQwen3Config


CONFIGS: dict[type, type] = {LlamaConfig: NSALlamaConfig, Qwen3Config: NSAQwen3Config}
MODELS: dict[type, type] = {
    LlamaModel: NSALlamaModel,
    LlamaForCausalLM: NSALlamaForCausalLM,
    Qwen3Model: NSAQwen3Model,
    Qwen3ForCausalLM: NSAQwen3ForCausalLM,
}
ATTENTIONS: dict[type, type] = {
    modeling_llama.LlamaAttention: NSALlamaAttention,
    modeling_qwen3.Qwen3Attention: NSAQwen3Attention,
}


def become_nsa(model: Any, config: Any) -> None:
    """Change a dense model's modules to NSA's classes and config in place; weights, devices and dtypes stay.

    All gates are created before anything changes, so that an error leaves the model unchanged.
    """
    gates = {
        module: BranchGates(config).to(weight_properties(module.q_proj)[1], model.dtype)
        for module in model.modules()
        if type(module) in ATTENTIONS
    }
    for module in list(model.modules()):
        if module in gates:
            module.__class__ = ATTENTIONS[type(module)]
            module.gates = gates[module]
        elif type(module) in MODELS:
            module.__class__ = MODELS[type(module)]
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs  # for output_hidden_states, by class
        if hasattr(module, "config"):
            module.config = config
