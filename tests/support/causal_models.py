"""Every causal and sequence-to-sequence model class of the installed transformers, built small with random weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from nsa.integrations.transformers.options import options_dict
from tests.support.hf_models import OPTIONS, VOCABULARY

PARAMETERS = 30_000_000
"""More than a small model has: it keeps sizes under names that are not in SIZES."""

SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (
            64,
            "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size word_embed_proj_dim emb_dim dim_model",
        ),
        (64, "decoder_hidden_size input_size hidden_size_per_layer_input"),
        (64, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim inner_dim dff"),
        (64, "feed_forward_size dim_ff mlp_hidden_size shared_intermediate_size intermediate_size_mlp expert_dim"),
        (64, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
        (64, "expert_ffn_hidden_size max_position_embeddings n_positions n_ctx max_seq_len max_seq_length"),
        (64, "max_target_positions"),
        (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers"),
        (2, "num_decoder_layers num_key_value_heads num_kv_heads multi_query_group_num attn_layer_period"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (4, "num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts mamba_dt_rank"),
        (2, "num_experts_per_tok moe_topk num_experts_per_token moe_k linear_num_key_heads index_n_heads"),
        (1, "n_group num_group topk_group first_k_dense_replace attn_layer_offset bos_token_id"),
        (16, "head_dim d_kv v_head_dim kv_channels qk_nope_head_dim kv_lora_rank q_lora_rank attention_head_dim"),
        (16, "mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim linear_head_dim"),
        (16, "index_head_dim"),
        (8, "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads mamba_d_state mamba_chunk_size chunk_size"),
        (8, "ssm_state_size state_size"),
        (128, "mamba_d_ssm"),
        (VOCABULARY, "vocab_size encoder_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size"),
        (VOCABULARY, "vocab_size_per_layer_input"),
        (0.0, "attention_dropout dropout hidden_dropout attention_probs_dropout_prob hidden_dropout_prob attn_pdrop"),
        (0.0, "resid_pdrop embd_pdrop activation_dropout layerdrop attn_dropout"),
        (0.2, "initializer_range init_std"),
    )
    for name in names.split()
} | {
    "is_decoder": True,
    "add_cross_attention": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
"""Fields of configs by name. Weights are large, so that attention is far from even."""

OF_ONE_CONFIG: dict[str, dict[str, Any]] = {
    "BigBirdConfig": {"attention_type": "original_full"},
    "Mamba2Config": {"num_heads": 8},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"attention_head_dim": 32},
    "Zamba2Config": {"attention_head_dim": 32},
}

TOO_SLOW = ("BltForCausalLM",)
"""Its patches take tens of seconds."""


class NotBuilt(Exception):
    """A class has no small configuration here."""


def class_names() -> list[str]:
    """Names of all classes that generate text from text."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    found = (names for mapping in mappings for names in mapping.values())
    return [*dict.fromkeys(name for names in found for name in ([names] if isinstance(names, str) else names))]


def class_of(name: str) -> Any:
    """The class; its module is imported without flash-linear-attention, whose kernels run on GPUs alone."""
    fla = sys.modules.pop("fla", None)
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        return getattr(transformers, name)
    finally:
        del sys.modules["fla"]
        if fla is not None:
            sys.modules["fla"] = fla


def dense_model(name: str, *, full_attention: bool = False) -> Any:
    """A small model with eager attention, in eval mode.

    Args:
        name: from `class_names`.
        full_attention: False: one layer of each type that the config has by default; True: none of them slides.

    Raises:
        NotBuilt: if there is none.
    """
    if name in TOO_SLOW:
        raise NotBuilt(f"{name} is too slow")
    try:
        model_class = class_of(name)
        config = small_config(model_class.config_class, full_attention=full_attention)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
        if size <= PARAMETERS:
            torch.manual_seed(0)
            return model_class(config).eval()
    except Exception as error:
        raise NotBuilt(f"{name}: {type(error).__name__}: {error}") from error
    raise NotBuilt(f"{name} has {size} parameters")


def small_config(config_class: Any, *, full_attention: bool) -> Any:
    """A config with the SIZES that it knows, but for one where all together are refused."""
    default = config_class()
    known = default.to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # multi-head latent attention: keys have all heads, and head_dim is what is rotated
        sizes |= {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": SIZES["qk_rope_head_dim"]}
    for name in ("layer_types", "layers_block_type"):
        if isinstance(known.get(name), list):
            kinds = list(dict.fromkeys(known[name]))
            if full_attention:
                kinds = [kind for kind in kinds if not slides(kind)] or ["full_attention"]
            sizes[name] = kinds * 2 if len(kinds) == 1 else kinds
            sizes["num_hidden_layers"] = len(sizes[name])
            if isinstance(known.get("mlp_layer_types"), list):
                sizes["mlp_layer_types"] = [*dict.fromkeys(known["mlp_layer_types"]), *known["mlp_layer_types"][-9:]]
                sizes["mlp_layer_types"] = sizes["mlp_layer_types"][: len(sizes[name])]
    if full_attention and "layer_types" not in known and known.get("sliding_window"):
        sizes["sliding_window"] = None
    for name, part in config_class.sub_configs.items():
        given = getattr(default, name, None)
        if given is not None:
            part_class = type(given) if part is AutoConfig else part
            sizes[name] = small_config(part_class, full_attention=full_attention).to_dict()
    sizes |= OF_ONE_CONFIG.get(config_class.__name__, {})
    for left_out in (None, *sizes):
        try:
            return config_class(**{name: value for name, value in sizes.items() if name != left_out})
        except Exception as error:
            refused = error
    raise refused


def slides(kind: str) -> bool:
    """True for types of layers whose attention does not see all tokens."""
    return "sliding" in kind or "chunked" in kind


def parts(config: Any) -> Iterator[Any]:
    """A config and those of its parts."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from parts(part)


def nsa_twin(model: Any) -> Any:
    """A model with the same weights and attn_implementation="nsa", whose NSA is dense for up to 32 tokens."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "nsa"
    for part in parts(config):
        part.nsa_config = options_dict(OPTIONS)
        part.nsa_gate_init = (1e-12, 1 - 1e-12, 1e-12)  # in fp32 (0, 1, 0), but for 1e-12
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin
