"""NSA as PyTorch operators with autograd, for torch.compile(fullgraph=True) (see nsa/common/operators.py).

    nsa_kernels::forward    nsa_forward
    nsa_kernels::saving     out and the tensors saved for backward; differentiable
    nsa_kernels::backward   gradients of `DIFFERENTIABLE_NAMES`

Their arguments include the fields of NSAConfig; `compress` must be "mean", and a callable runs before the operator.
q_start is a tensor; the caller slices the keys for an integer one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa import autograd
from nsa.common.autocast import autocast_off
from nsa.common.operators import register_double_backward_error, register_operator
from nsa.config import DEFAULT_CONFIG, OPTION_NAMES, NSAConfig, check_options
from nsa.inputs import INTEGER_NAMES, TENSOR_NAMES, NSAInputs
from nsa.validate import ResolvedCall, resolve

FORWARD, SAVING, BACKWARD = (f"nsa_kernels::{name}" for name in ("forward", "saving", "backward"))

DIFFERENTIABLE_NAMES = tuple(name for name in TENSOR_NAMES if name not in (*INTEGER_NAMES, "q_sum"))
"""Tensors with gradients, in the order of backward's results; gradients of absent tensors are empty."""

_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
OPTIONS = (
    "SymInt compress_block_size, SymInt? compress_stride, SymInt? select_block_size, SymInt num_selected_blocks, "
    "SymInt window_size, SymInt q_tile_size, bool share_heads_in_group, SymInt num_init_blocks, "
    "SymInt num_local_blocks, SymInt? num_cmp_selected_blocks, SymInt n_block_size, str compress, bool causal, "
    "float? softmax_scale, bool debug"
)
"""Schema of NSAConfig's fields."""
_KEYWORDS = f"{OPTIONS}, SymInt? max_seqlen, bool deterministic, bool recompute, str? backend"
SCHEMAS = {
    FORWARD: f"({_TENSORS}, *, {_KEYWORDS}) -> Tensor",
    SAVING: f"({_TENSORS}, *, {_KEYWORDS}) -> (Tensor, Tensor[])",
    BACKWARD: f"(Tensor do, Tensor[] saved, {_TENSORS}, *, {_KEYWORDS}) -> Tensor[]",
}

CALL_DEFAULTS = {"max_seqlen": None, "deterministic": False, "recompute": False, "backend": None}
"""Keyword arguments that are neither tensors nor options of NSAConfig."""

CALL_KEYWORDS = (*TENSOR_NAMES[3:], *CALL_DEFAULTS, "config")
"""Keyword arguments that are not options of NSAConfig."""


def options_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Options of NSAConfig among the keyword arguments of a call.

    Raises:
        TypeError: for unknown keywords, and for options together with a config.
    """
    options = {name: value for name, value in keywords.items() if name not in CALL_KEYWORDS}
    check_options(keywords.get("config"), options, CALL_KEYWORDS)
    return options


def _resolve(tensors: Sequence[Tensor | None], keywords: dict[str, Any], *, needs_grad: bool) -> ResolvedCall:
    """The checked call for an operator's arguments."""
    by_name: dict[str, Any] = dict(zip(TENSOR_NAMES, tensors, strict=True))
    inputs = NSAInputs(**by_name, max_seqlen=keywords["max_seqlen"])
    config = NSAConfig(**{name: keywords[name] for name in OPTION_NAMES})
    flags = {name: keywords[name] for name in CALL_DEFAULTS if name != "max_seqlen"}
    return resolve(inputs, config, **flags, needs_grad=needs_grad)


@torch.no_grad()
def _forward(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    call = _resolve(tensors, keywords, needs_grad=False)
    with autocast_off(call.inputs.q.device.type):
        out: Tensor = call.impl.load()(call.inputs, call.config, aux=False)[0]
    return out


def _forward_fake(*tensors: Tensor | None, **_: Any) -> Tensor:
    q, _k, v = tensors[:3]
    if q is None or v is None:
        raise TypeError("q and v must be tensors")
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.no_grad()
def _saving(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, list[Tensor]]:
    call = _resolve(tensors, keywords, needs_grad=True)
    with autocast_off(call.inputs.q.device.type):
        return autograd.forward_saving(call)


def _saving_fake(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, list[Tensor]]:
    call = _resolve(tensors, keywords, needs_grad=True)
    return _forward_fake(*tensors), autograd.saved_like(call)


@torch.no_grad()
def _backward(do: Tensor, saved: list[Tensor], *tensors: Tensor | None, **keywords: Any) -> list[Tensor]:
    call = _resolve(tensors, keywords, needs_grad=True)
    with autocast_off(do.device.type):
        by_name = autograd.gradients(call, saved, do)
    return [by_name[name] if name in by_name else do.new_empty(0) for name in DIFFERENTIABLE_NAMES]


def _backward_fake(do: Tensor, _saved: list[Tensor], *tensors: Tensor | None, **_: Any) -> list[Tensor]:
    by_name = dict(zip(TENSOR_NAMES, tensors, strict=True))
    return [do.new_empty(0) if (x := by_name[name]) is None else x.new_empty(x.shape) for name in DIFFERENTIABLE_NAMES]


# Autograd of the operators


def _save(ctx: Any, inputs: Sequence[Any], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.present = [tensor is not None for tensor in inputs]
    ctx.keywords = keyword_only_inputs
    ctx.save_for_backward(*[tensor for tensor in inputs if tensor is not None], *saved)


def _differentiate(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * len(TENSOR_NAMES)
    saved = list(ctx.saved_tensors)
    tensors = [saved.pop(0) if present else None for present in ctx.present]
    gradients = torch.ops.nsa_kernels.backward(do, saved, *tensors, **ctx.keywords)
    by_name = dict(zip(DIFFERENTIABLE_NAMES, gradients, strict=True))
    needed = zip(TENSOR_NAMES, tensors, ctx.needs_input_grad, strict=True)
    return tuple(by_name.get(name) if needs and tensor is not None else None for name, tensor, needs in needed)


register_operator(FORWARD, SCHEMAS[FORWARD], _forward, _forward_fake)
register_operator(SAVING, SCHEMAS[SAVING], _saving, _saving_fake)
register_operator(BACKWARD, SCHEMAS[BACKWARD], _backward, _backward_fake)
torch.library.register_autograd(SAVING, _differentiate, setup_context=_save)
register_double_backward_error(BACKWARD, "nsa")


# Calls of the operators with the keywords of the public functions


def call_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Call the operator of `nsa_forward`, with detached inputs."""
    tensors = [None if x is None else x.detach() for x in operator_tensors(q, k, v, keywords)]
    out: Tensor = torch.ops.nsa_kernels.forward(*tensors, **operator_keywords(keywords))
    return out


def call_saving(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Call the operator of `nsa`."""
    tensors = operator_tensors(q, k, v, keywords)
    out: Tensor = torch.ops.nsa_kernels.saving(*tensors, **operator_keywords(keywords))[0]
    return out


def operator_tensors(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> list[Tensor | None]:
    """The tensors of a call in the order of the schema."""
    return [q, k, v, *(keywords.get(name) for name in TENSOR_NAMES[3:])]


def operator_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """All keyword arguments of the schema, with defaults for those not given."""
    options, config = options_of(keywords), keywords.get("config") or DEFAULT_CONFIG
    flags = {name: keywords.get(name, default) for name, default in CALL_DEFAULTS.items()}
    return {**{name: options.get(name, getattr(config, name)) for name in OPTION_NAMES}, **flags}
