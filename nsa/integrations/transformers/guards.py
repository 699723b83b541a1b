"""Guards for our attention functions in transformers: masks, keywords, and models that never call them.

transformers accepts a registered `attn_implementation` for every model, even if its layers never call the function.
This module has a mask that no other attention can use, the keywords that an attention function may ignore, and a check
of models when a name is set on them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Masks


class CausalMask(Tensor):
    """Mask of attn_implementation="nsa", which only `nsa_attention` can read.

    To transformers it is a bool tensor `[B,1,N_q,N_k]` without storage. Checkpointing, accelerate and FSDP may detach
    it and move it between devices; every other operation raises, so a model's own attention code cannot use it.
    """

    padding: Tensor | None
    """bool `[B,N_k]`, True for real tokens; None if there is no padding."""
    packed: bool
    """True if position_ids contain packed documents."""
    unsupported: str | None
    """Error to raise when attention uses the mask; None if NSA supports it."""

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device | str,
        padding: Tensor | None,
        *,
        packed: bool = False,
        unsupported: str | None = None,
    ) -> CausalMask:
        mask: CausalMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        mask.padding, mask.packed, mask.unsupported = padding, packed, unsupported
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mask, kwargs = args[0] if args else None, kwargs or {}
        if func not in COPIES or not isinstance(mask, cls) or kwargs.get("dtype", torch.bool) != torch.bool:
            raise ValueError(
                f"attn_implementation='nsa' needs a model whose layers call transformers' attention interface: "
                f"attention of this model's own called {func} on the mask, which nsa_attention alone can read"
            )
        padding = None if mask.padding is None else func(mask.padding, *args[1:], **kwargs)
        device = kwargs.get("device") or mask.device
        return cls(tuple(mask.shape), device, padding, packed=mask.packed, unsupported=mask.unsupported)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CausalMask({list(self.shape)}, padding={self.padding is not None}, packed={self.packed})"


COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}
"""Operations that return the same mask, possibly on another device."""


# Keywords


UNSUPPORTED = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "sliding_window": "a sliding window of the model's own",
    "position_bias": "a bias of positions",
    "head_mask": "a mask of heads",
    "scaling": "a scale beside that of nsa_config",
    "dropout": "dropout of attention weights",
    "block_indices": "attention to the blocks that an indexer has chosen",
    "indices": "attention to the tokens that an indexer has chosen",
}
"""Keywords of attention functions that change the result, with the feature they request."""

NEUTRAL = {"is_causal": True, "is_cross_attention": False, "output_attentions": False}
"""Keywords with a value, besides None, that requests no change."""

WITHOUT_EFFECT = frozenset(
    {"labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits", "use_cache"}
)
"""Keywords that no attention function reads; Trainer, `generate` and callers pass them through a model's forward."""


def check_keywords(implementation: str, given: Mapping[str, Any], honoured: Container[str] = ()) -> None:
    """Raise for keywords that an attention function would ignore.

    Args:
        implementation: name of the attention function.
        given: keywords by name; None means not given.
        honoured: names of keywords that the function reads.

    Raises:
        ValueError: naming the keyword and its value.
    """
    for name, value in given.items():
        if value is None or name in honoured or name in WITHOUT_EFFECT or value is NEUTRAL.get(name):
            continue
        if name in NEUTRAL:
            raise ValueError(
                f"{name} must be {NEUTRAL[name]} with attn_implementation={implementation!r}, got {value!r}"
            )
        asked = f"asks for {UNSUPPORTED[name]}, which" if name in UNSUPPORTED else "is a keyword that"
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} {asked} attn_implementation={implementation!r} does not support: got {got}")


# Models


CHECKS: dict[str, Callable[[Any], None]] = {}
"""Checks by attn_implementation: functions that raise for models that cannot run it, called when the name is set."""


def calls_attention_functions(model: Any) -> bool:
    """True if, according to transformers, layers of the model's class call its attention interface."""
    return bool(model._supports_attention_backend or model._can_set_attn_implementation())


def _check_models_of_names() -> None:
    """Make models run CHECKS when they are built and in `set_attn_implementation`.

    transformers has no hook for this: it accepts a registered name for every class, and `set_attn_implementation` only
    logs a line for classes with their own attention code. So two methods of PreTrainedModel are wrapped.
    """
    adjust, set_names = PreTrainedModel._check_and_adjust_attn_implementation, PreTrainedModel.set_attn_implementation

    @wraps(adjust)
    def checked_adjust(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation in CHECKS:
            CHECKS[attn_implementation](self)
        return adjust(self, attn_implementation, *args, **kwargs)

    @wraps(set_names)
    def checked_set(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        names = {id(config): name for config, name in _names_by_config(self.config, attn_implementation)}
        for model in self.modules():
            if not isinstance(model, PreTrainedModel):
                continue
            name = names.get(id(model.config), names[id(self.config)])
            if name in CHECKS:
                CHECKS[name](model)
        return set_names(self, attn_implementation, *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = checked_adjust
    PreTrainedModel.set_attn_implementation = checked_set


def _names_by_config(config: Any, names: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the configs of a model and its parts, each with its name out of one name or a dict by part."""
    by_part = isinstance(names, dict)
    yield config, names.get("") if by_part else names
    for part in config.sub_configs:
        if (config_of_part := getattr(config, part)) is not None:
            yield from _names_by_config(config_of_part, names.get(part) if by_part else names)


_check_models_of_names()
