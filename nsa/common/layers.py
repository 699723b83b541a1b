"""Code shared by the attention layers: sizes, the rotary hook, checks of inputs and of unsupported arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dispatch.registry import short_name
from nsa.common.autocast import CASTABLE, autocast_dtype
from nsa.common.checks import check_sizes
from nsa.common.keywords import FOREIGN, advice

RotaryHook = Callable[[Tensor, Any], Tensor]
"""Rotates queries or keys `[...,heads,D]` by `position_embeddings`; the result has the same shape and dtype."""


def head_sizes(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, v_head_dim: int | None = None
) -> tuple[int, int]:
    """H_kv and D of a layer, with defaults resolved.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    check_sizes(**{name: dim for name, dim in dims.items() if dim is not None})
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim is None:
        if hidden_size % num_heads != 0:
            raise ValueError(
                f"head_dim must be given: hidden_size={hidden_size} is not a multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    return num_kv_heads, head_dim


def check_rope(rope: RotaryHook | None) -> None:
    """Raise TypeError unless the rotary hook is None or callable."""
    if rope is not None and not callable(rope):
        raise TypeError(f"rope must be a callable (tensor, position_embeddings) -> tensor or None, got {rope!r}")


def check_context_parallel(context_parallel: object, op: str) -> None:
    """Raise TypeError unless it is None or has the op as a method, as nsa.distributed.ContextParallel has.

    The class itself is not imported, because DTensor is slow to import.
    """
    if context_parallel is not None and not callable(getattr(context_parallel, op, None)):
        got = type(context_parallel).__name__
        raise TypeError(f"context_parallel must be a nsa.distributed.ContextParallel or None, got {got}")


def apply_rope(rope: RotaryHook | None, tensor: Tensor, position_embeddings: Any) -> Tensor:
    """Rotate queries or keys `[...,heads,D]` by the hook if there is one.

    Raises:
        TypeError, ValueError: if the hook changes shape or dtype, or position_embeddings are passed without a hook.
    """
    if rope is None:
        if position_embeddings is not None:
            raise TypeError("position_embeddings would be ignored: this layer was built without a rope hook")
        return tensor
    result: Any = rope(tensor, position_embeddings)
    if not isinstance(result, Tensor):
        raise TypeError(f"rope must return a torch.Tensor, got {type(result).__name__}")
    if result.dtype != tensor.dtype:
        raise TypeError(f"rope must keep the dtype {tensor.dtype} of queries and keys, got {result.dtype}")
    if result.shape != tensor.shape:
        raise ValueError(f"rope must keep the shape {list(tensor.shape)}, got {list(result.shape)}")
    return result


def split_heads(name: str, projected: Tensor, heads: int, dim: int) -> Tensor:
    """View a projection `[...,heads*dim]` as `[...,heads,dim]`.

    Args:
        name: name of the projection.

    Raises:
        ValueError: for another width, as when projections were sharded without adjusting the layer.
    """
    width = projected.shape[-1]
    if width != heads * dim:
        raise ValueError(
            f"{name} must give {heads} heads of {dim}, {heads * dim} in all, got {width}: with tensor parallelism, "
            "num_heads and num_kv_heads are this rank's, as nsa.distributed.HeadwiseParallel sets them"
        )
    split: Tensor = projected.unflatten(-1, (heads, dim))
    return split


_NO_CACHE, _NO_CROSS, _POSITIONS = (
    "pass keys and values of earlier tokens as cache",
    "this is self-attention",
    "rotary embeddings are passed as position_embeddings and applied by the rope hook",
)
NOT_SUPPORTED = {
    **FOREIGN,
    "past_key_values": _NO_CACHE,
    "past_key_value": _NO_CACHE,
    "layer_past": _NO_CACHE,
    "cache_position": _NO_CACHE,
    "use_cache": _NO_CACHE,
    "key": _NO_CROSS,
    "value": _NO_CROSS,
    "encoder_hidden_states": _NO_CROSS,
    "position_ids": _POSITIONS,
}
"""Arguments of PyTorch's and Hugging Face's attention layers that these layers do not support, with the reason."""

OPTIONAL_FLAGS = ("use_cache", "need_weights", "output_attentions", "dropout", "dropout_p")
"""Names in NOT_SUPPORTED that are accepted as False or 0."""


def refuse_unsupported(arguments: Mapping[str, Any], *, causal: bool, instead_of_mask: str) -> None:
    """Raise for additional arguments of an attention layer's forward that would change the result.

    None, a flag that is False, and an `is_causal` equal to the layer's own are accepted.

    Args:
        instead_of_mask: advice in the error for an attention mask: how to separate documents.

    Raises:
        TypeError: for an unknown argument.
        ValueError: for an unsupported one, with the reason.
    """
    for name, value in arguments.items():
        if name == "is_causal":
            reason, accepted = f"this layer was made with causal={causal}", value is causal
        elif name in NOT_SUPPORTED:
            reason = advice(name, instead_of_mask) if name in FOREIGN else NOT_SUPPORTED[name]
            accepted = name in OPTIONAL_FLAGS and isinstance(value, (bool, int, float)) and value == 0
        else:
            raise TypeError(f"forward got an unexpected keyword argument {name!r}")
        if value is None or accepted:
            continue
        got = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise ValueError(f"{name} is not supported: {reason}; got {got}")


def weight_properties(project: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Output dtype and device of a projection, from its weight; quantized layers of torch.ao return fp32.

    Raises:
        TypeError: for a replaced projection without a weight.
    """
    weight: Any = getattr(project, "weight", None)
    if isinstance(weight, Tensor):
        return weight.dtype, weight.device
    if not callable(weight):
        raise TypeError(f"projections must have a weight that defines dtype and device, got {type(project).__name__}")
    return torch.float32, weight().device


def check_input(hidden_states: Tensor, hidden_size: int, project: nn.Module, *, packed: bool | None) -> None:
    """Raise unless a layer can project its input.

    Args:
        project: the layer's first projection. Dtype and device are checked only if it is a plain nn.Linear without
            hooks: replaced projections (adapters, quantized weights, offloading) may accept others.
        packed: True if the call has `cu_seqlens`; None if the layer does not support them.

    Raises:
        TypeError, ValueError: naming `hidden_states`, what was expected and what came.
    """
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}")
    if hidden_states.dim() != (2 if packed else 3):
        layout = "[B,N,hidden_size]" if packed is None else "[B,N,hidden_size] (or [T,...] with cu_seqlens)"
        layout = "[T,hidden_size] with cu_seqlens" if packed else layout
        raise ValueError(f"hidden_states must have the layout {layout}, got shape {list(hidden_states.shape)}")
    if hidden_states.shape[-1] != hidden_size:
        raise ValueError(f"hidden_states must have hidden_size={hidden_size}, got shape {list(hidden_states.shape)}")
    if torch.compiler.is_compiling() or type(project) is not nn.Linear:
        return
    if "forward" in vars(project) or project._forward_pre_hooks:
        return
    weight, dtype = project.weight, hidden_states.dtype
    if hidden_states.device != weight.device:
        raise ValueError(f"hidden_states must be on {weight.device}, as the weights are, got {hidden_states.device}")
    if dtype == weight.dtype:
        return
    if autocast_dtype(hidden_states.device.type) is None:
        raise TypeError(
            f"hidden_states must be {short_name(weight.dtype)}, as the weights are, got {short_name(dtype)}"
        )
    if dtype not in CASTABLE or weight.dtype not in CASTABLE:
        wanted = " or ".join(map(short_name, CASTABLE if weight.dtype in CASTABLE else (weight.dtype,)))
        raise TypeError(f"hidden_states must be {wanted} under autocast, got {short_name(dtype)}")
