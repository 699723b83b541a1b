"""Neighborhood attention as PyTorch operators with autograd, for torch.compile(fullgraph=True).

    nsa_kernels::neighborhood_attention             out, and what backward wants to know; differentiable
    nsa_kernels::neighborhood_attention_backward    dq, dk, dv

Dynamo cannot trace validation and dispatch, and need not: a compiled graph calls the operators, which do what
nsa/neighborhood/api.py does eagerly. A backend's training module says with `kept_like` what its forward keeps;
one without such a module is run again in backward.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import differentiate, refuse_double_backward
from nsa.neighborhood.validate import Window, resolve

FORWARD, BACKWARD = "nsa_kernels::neighborhood_attention", "nsa_kernels::neighborhood_attention_backward"
_OPTIONS = "int kernel_size, int dilation, float? softmax_scale, str boundary, bool causal, str algorithm, str? backend"
SCHEMAS = {
    FORWARD: f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor kept, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor)",
}


def call_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """neighborhood_attention by its operator; `options` in the order of the schema."""
    out: Tensor = torch.ops.nsa_kernels.neighborhood_attention(q, k, v, *options)[0]
    return out


def _resolved(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[dispatch.Impl, dict[str, Any]]:
    """The backend, and the keywords that it takes."""
    *given, algorithm, backend = options
    window = Window(*given)
    impl = resolve(q, k, v, window, algorithm, backend, band=False)
    keywords = asdict(window)
    if impl.training is None:
        keywords["return_band"] = False
    else:
        keywords["backend"] = impl.backend
        if algorithm in ("band", "dense"):
            keywords["algorithm"] = algorithm
    return impl, keywords


@torch.no_grad()
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    impl, keywords = _resolved(q, k, v, *options)
    with autocast_off(q.device.type):
        out, kept, *_ = impl.load()(q, k, v, **keywords)
    return out, q.new_empty(0) if impl.training is None else kept


def _forward_like(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    impl, keywords = _resolved(q, k, v, *options)
    module = impl.load_training()
    return q.new_empty(q.shape), q.new_empty(0) if module is None else module.kept_like(q, k, v, **keywords)


@torch.no_grad()
def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    impl, keywords = _resolved(q, k, v, *options)
    module = impl.load_training()
    with autocast_off(do.device.type):
        if module is None:
            run = impl.load()
            dq, dk, dv = differentiate(lambda *qkv: run(*qkv, **keywords)[0], (q, k, v), do)
        else:
            dq, dk, dv = module.backward(do, q, k, v, out, kept, **keywords)
    return dq, dk, dv


def _backward_like(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    out, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, kept)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = (None, None, None)
    if do is not None:
        gradients = torch.ops.nsa_kernels.neighborhood_attention_backward(do, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * len(ctx.options))


def _refuse_double_backward(*_: Any) -> None:
    refuse_double_backward("neighborhood_attention")


for _name, _implementation, _like in ((FORWARD, _forward, _forward_like), (BACKWARD, _backward, _backward_like)):
    torch.library.define(_name, SCHEMAS[_name])
    torch.library.impl(_name, "default", _implementation)
    torch.library.register_fake(_name, _like)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup)
torch.library.register_autograd(BACKWARD, _refuse_double_backward)
