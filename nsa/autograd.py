"""Training of NSA: forward that saves tensors for backward, backward, and both as an autograd.Function.

A backend trains through the module that its row names (dispatch.Impl.training): `nsa_saving`, `nsa_saved_like` and
`nsa_backward`. A backend without one, such as the reference, is differentiable itself: it saves nothing, and backward
runs it again under autograd.

Eager training takes the Function: autograd of an operator with as many arguments as nsa_kernels::saving has costs
0.4 ms of host time a call. torch.compile records the operators (nsa/ops.py). Both call the functions here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward, recompute_gradients
from nsa.inputs import TENSOR_NAMES, NSAInputs
from nsa.validate import ResolvedCall


def forward_saving(call: ResolvedCall) -> tuple[Tensor, list[Tensor]]:
    """out, and what backward needs beside the inputs."""
    training = call.impl.load_training()
    if training is None:
        return call.impl.load()(call.inputs, call.config, aux=False)[0], []
    out, saved = training.nsa_saving(call.inputs, call.config, recompute=call.recompute)
    return out, saved


def saved_like(call: ResolvedCall) -> list[Tensor]:
    """Empty tensors of the shapes and dtypes of what `forward_saving` saves."""
    training = call.impl.load_training()
    if training is None:
        return []
    empty: list[Tensor] = training.nsa_saved_like(call.inputs, call.config, recompute=call.recompute)
    return empty


def gradients(call: ResolvedCall, saved: list[Tensor], do: Tensor) -> dict[str, Tensor]:
    """Gradients of the call's floating-point tensors, by name.

    Args:
        saved: from `forward_saving`.
        do: gradient of out.
    """
    training = call.impl.load_training()
    if training is None:
        return _recomputed_gradients(call, do)
    by_name: dict[str, Tensor] = training.nsa_backward(
        call.inputs, call.config, saved, do, deterministic=call.deterministic
    )
    return by_name


def _recomputed_gradients(call: ResolvedCall, do: Tensor) -> dict[str, Tensor]:
    function = call.impl.load()
    names = [name for name, tensor in call.inputs.tensors().items() if tensor.is_floating_point()]

    def forward(*tensors: Tensor) -> Tensor:
        changed: dict[str, Any] = dict(zip(names, tensors, strict=True))
        out: Tensor = function(replace(call.inputs, **changed), call.config, aux=False)[0]
        return out

    tensors = [getattr(call.inputs, name) for name in names]
    return dict(zip(names, recompute_gradients(forward, tensors, do), strict=True))


def run_with_backward(call: ResolvedCall) -> Tensor:
    """Differentiable out of a backend with a training module."""
    out: Tensor = NSAFunction.apply(call, *(getattr(call.inputs, name) for name in TENSOR_NAMES))
    return out


class NSAFunction(torch.autograd.Function):
    """One eager call. The tensors are arguments of their own, so that autograd knows them."""

    @staticmethod
    def forward(ctx: Any, call: ResolvedCall, *tensors: Tensor | None) -> Tensor:
        out, saved = forward_saving(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        # Without the inputs: ctx must not keep tensors that autograd frees after backward
        ctx.max_seqlen, (_, *ctx.call) = call.inputs.max_seqlen, call
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * (1 + len(TENSOR_NAMES))
        kept = ctx.saved_tensors  # once: torch.utils.checkpoint frees what it recomputed as it is read
        tensors: dict[str, Any] = dict(zip(TENSOR_NAMES, kept, strict=False))
        inputs = NSAInputs(**tensors, max_seqlen=ctx.max_seqlen)
        with torch.no_grad(), autocast_off(do.device.type):
            by_name = gradients(ResolvedCall(inputs, *ctx.call), kept[len(TENSOR_NAMES) :], do)
        _, *needed = ctx.needs_input_grad
        results = [by_name.get(name) if needs else None for name, needs in zip(TENSOR_NAMES, needed, strict=True)]
        return (None, *forbid_double_backward("nsa", results, do, *inputs.tensors().values()))
