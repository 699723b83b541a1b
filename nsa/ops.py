"""NSA as PyTorch operators with autograd, for torch.compile(fullgraph=True). Eager training goes by nsa/autograd.py.

    nsa_kernels::forward    nsa_forward
    nsa_kernels::saving     out, and what backward wants to know; differentiable
    nsa_kernels::backward   gradients of `DIFFERENTIABLE`

Dynamo cannot trace validation and dispatch, and need not: a compiled graph calls the operators, whose implementations
are the eager path. They take the fields of NSAConfig one by one, `compress` as "mean" only.

A backend trains through the module that its row names (dispatch.Impl.training): `nsa_saving`, `nsa_saved_like` and
`nsa_backward`. One without such a module is differentiable itself, and is run again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dispatch
from nsa import meta, rerun
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import refuse_double_backward
from nsa.config import OPTION_NAMES, NSAConfig, check_options
from nsa.inputs import TENSOR_NAMES, NSAInputs

FORWARD, SAVING, BACKWARD = (f"nsa_kernels::{name}" for name in ("forward", "saving", "backward"))

DIFFERENTIABLE = tuple(name for name in TENSOR_NAMES if name != "cu_seqlens")
"""Tensors with gradients; those of backward come in this order, empty ones for tensors that are not given."""

_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
_KEYWORDS = (
    "SymInt compress_block_size, SymInt? compress_stride, SymInt? select_block_size, SymInt num_selected_blocks, "
    "SymInt window_size, SymInt q_tile_size, bool share_heads_in_group, SymInt num_init_blocks, "
    "SymInt num_local_blocks, SymInt? num_cmp_selected_blocks, SymInt n_block_size, str compress, bool causal, "
    "float? softmax_scale, bool debug, SymInt? max_seqlen, bool deterministic, bool recompute, str? backend"
)
SCHEMAS = {
    FORWARD: f"({_TENSORS}, *, {_KEYWORDS}) -> Tensor",
    SAVING: f"({_TENSORS}, *, {_KEYWORDS}) -> (Tensor, Tensor[])",
    BACKWARD: f"(Tensor do, Tensor[] saved, {_TENSORS}, *, {_KEYWORDS}) -> Tensor[]",
}

DEFAULTS = NSAConfig()
REST = {"max_seqlen": None, "deterministic": False, "recompute": False, "backend": None}


class Resolved(NamedTuple):
    """A checked call and who runs it."""

    inputs: NSAInputs
    config: NSAConfig
    deterministic: bool
    recompute: bool
    impl: dispatch.Impl

    @property
    def training(self) -> Any:
        return self.impl.load_training() or rerun.Rerun(self.impl)


def resolve(
    inputs: NSAInputs,
    config: NSAConfig,
    *,
    deterministic: bool,
    recompute: bool,
    backend: str | None,
    needs_grad: bool,
) -> Resolved:
    """Check everything and find the backend that takes the call."""
    for name, flag in (("deterministic", deterministic), ("recompute", recompute)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    inputs.check(config)
    call = dispatch.Call(
        "nsa",
        inputs.q.device,
        inputs.q.dtype,
        backward=needs_grad,
        options={"inputs": inputs, "config": config, "deterministic": deterministic, "recompute": recompute},
    )
    return Resolved(inputs, config, deterministic, recompute, meta.resolve(call, backend))


# The operators


def _resolved(tensors: Sequence[Tensor | None], keywords: dict[str, Any], *, needs_grad: bool) -> Resolved:
    options = {name: keywords[name] for name in OPTION_NAMES}
    given: dict[str, Any] = dict(zip(TENSOR_NAMES, tensors, strict=True))
    inputs = NSAInputs(**given, max_seqlen=keywords["max_seqlen"])
    rest = {name: keywords[name] for name in REST if name != "max_seqlen"}
    return resolve(inputs, NSAConfig(**options), **rest, needs_grad=needs_grad)


@torch.no_grad()
def _forward(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    call = _resolved(tensors, keywords, needs_grad=False)
    with autocast_off(call.inputs.q.device.type):
        out: Tensor = call.impl.load()(call.inputs, call.config, aux=False)[0]
    return out


def _forward_like(*tensors: Tensor | None, **_: Any) -> Tensor:
    q, _k, v = tensors[:3]
    if q is None or v is None:
        raise TypeError("q and v must be tensors")
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.no_grad()
def _saving(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, list[Tensor]]:
    call = _resolved(tensors, keywords, needs_grad=True)
    with autocast_off(call.inputs.q.device.type):
        out, saved = call.training.nsa_saving(call.inputs, call.config, recompute=call.recompute)
    return out, saved


def _saving_like(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, list[Tensor]]:
    call = _resolved(tensors, keywords, needs_grad=True)
    return _forward_like(*tensors), call.training.nsa_saved_like(call.inputs, call.config, recompute=call.recompute)


@torch.no_grad()
def _backward(do: Tensor, saved: list[Tensor], *tensors: Tensor | None, **keywords: Any) -> list[Tensor]:
    call = _resolved(tensors, keywords, needs_grad=True)
    run = call.training.nsa_backward
    with autocast_off(do.device.type):
        gradients = run(call.inputs, call.config, saved, do, deterministic=call.deterministic)
    return [gradients[name] if name in gradients else do.new_empty(0) for name in DIFFERENTIABLE]


def _backward_like(do: Tensor, _saved: list[Tensor], *tensors: Tensor | None, **_: Any) -> list[Tensor]:
    given = dict(zip(TENSOR_NAMES, tensors, strict=True))
    return [do.new_empty(0) if (x := given[name]) is None else x.new_empty(x.shape) for name in DIFFERENTIABLE]


# Their autograd


def _setup(ctx: Any, inputs: Sequence[Any], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.present = [tensor is not None for tensor in inputs]
    ctx.keywords = keyword_only_inputs
    ctx.save_for_backward(*[tensor for tensor in inputs if tensor is not None], *saved)


def _differentiate(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * len(TENSOR_NAMES)
    kept = list(ctx.saved_tensors)
    tensors = [kept.pop(0) if present else None for present in ctx.present]
    gradients = torch.ops.nsa_kernels.backward(do, kept, *tensors, **ctx.keywords)
    by_name = dict(zip(DIFFERENTIABLE, gradients, strict=True))
    needed = zip(TENSOR_NAMES, tensors, ctx.needs_input_grad, strict=True)
    return tuple(by_name[name] if needs and tensor is not None else None for name, tensor, needs in needed)


def _refuse_double_backward(*_: Any, **__: Any) -> None:
    refuse_double_backward("nsa")


for _name, _implementation, _like in (
    (FORWARD, _forward, _forward_like),
    (SAVING, _saving, _saving_like),
    (BACKWARD, _backward, _backward_like),
):
    torch.library.define(_name, SCHEMAS[_name])
    torch.library.impl(_name, "default", _implementation)
    torch.library.register_fake(_name, _like)
torch.library.register_autograd(SAVING, _differentiate, setup_context=_setup)
torch.library.register_autograd(BACKWARD, _refuse_double_backward)


# How the public functions call them


def call_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """nsa_forward, by its operator, which no gradient passes."""
    tensors = [None if x is None else x.detach() for x in _arguments(q, k, v, keywords)]
    out: Tensor = torch.ops.nsa_kernels.forward(*tensors, **_options(keywords))
    return out


def call_saving(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """nsa, by its operator."""
    out: Tensor = torch.ops.nsa_kernels.saving(*_arguments(q, k, v, keywords), **_options(keywords))[0]
    return out


def _arguments(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> list[Tensor | None]:
    return [q, k, v, *(keywords.get(name) for name in TENSOR_NAMES[3:])]


def _options(keywords: dict[str, Any]) -> dict[str, Any]:
    config = keywords.get("config")
    rest = {name: keywords.get(name, default) for name, default in REST.items()}
    given = {name: value for name, value in keywords.items() if name not in ("config", *REST, *TENSOR_NAMES)}
    check_options(config, given, (*TENSOR_NAMES, *REST, "config"))
    return {**{name: given.get(name, getattr(config or DEFAULTS, name)) for name in OPTION_NAMES}, **rest}
