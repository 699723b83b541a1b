"""Training of NSA: a forward that saves tensors for backward, the backward, and both as an autograd.Function.

A backend trains through the module in its table row (dispatch.Impl.training): `nsa_saving`, `nsa_saved_like` and
`nsa_backward`. A backend without one, such as the reference, is differentiable itself: it saves nothing, and backward
reruns it under autograd.

Eager training uses the Function, because autograd of an operator with as many arguments as nsa_kernels::saving costs
0.4 ms of host time per call. torch.compile traces the operators (nsa/ops.py). Both call the functions below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward, recompute_gradients
from nsa.inputs import QUERY_NAMES, NSAInputs
from nsa.validate import ResolvedCall


def forward_saving(call: ResolvedCall) -> tuple[Tensor, list[Tensor]]:
    """Return out, and the tensors that backward needs in addition to the inputs."""
    training = call.impl.load_training()
    if training is None:
        return call.impl.load()(call.inputs, call.config, aux=False)[0], []
    out, saved = training.nsa_saving(call.inputs, call.config, recompute=call.recompute)
    return out, saved


def saved_like(call: ResolvedCall) -> list[Tensor]:
    """Empty tensors with the shapes and dtypes of those that `forward_saving` saves."""
    training = call.impl.load_training()
    if training is None:
        return []
    empty: list[Tensor] = training.nsa_saved_like(call.inputs, call.config, recompute=call.recompute)
    return empty


def gradients(
    call: ResolvedCall, saved: list[Tensor], do: Tensor, share_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Gradients of the call's floating-point tensors, by name.

    Args:
        saved: from `forward_saving`.
        do: gradient of out.
        share_dtype: dtype of all gradients except those of q and gates. If queries continue a sequence these gradients
            are partial sums, and fp32 lets the caller round once after summing. Default: None, which means the tensors'
            own.
    """
    training = call.impl.load_training()
    if training is None:
        return _recomputed_gradients(call, do, share_dtype)
    by_name: dict[str, Tensor] = training.nsa_backward(
        call.inputs, call.config, saved, do, deterministic=call.deterministic, share_dtype=share_dtype
    )
    return by_name


def _recomputed_gradients(call: ResolvedCall, do: Tensor, share_dtype: torch.dtype | None) -> dict[str, Tensor]:
    function = call.impl.load()
    names = [name for name, tensor in call.inputs.tensors().items() if tensor.is_floating_point()]

    def forward(*tensors: Tensor) -> Tensor:
        changed: dict[str, Any] = dict(zip(names, tensors, strict=True))
        out: Tensor = function(replace(call.inputs, **changed), call.config, aux=False)[0]
        return out

    tensors = [getattr(call.inputs, name) for name in names]
    if share_dtype is not None:  # the reference casts them anyway
        tensors = [x if n in QUERY_NAMES else x.to(share_dtype) for n, x in zip(names, tensors, strict=True)]
    return dict(zip(names, recompute_gradients(forward, tensors, do), strict=True))


def run_with_backward(call: ResolvedCall) -> Tensor:
    """Run a backend that has a training module; the result is differentiable."""
    given = call.inputs.tensors()
    out: Tensor = NSAFunction.apply(call, tuple(given), *given.values())
    return out


class NSAFunction(torch.autograd.Function):
    """One eager call. Tensors are separate arguments so that autograd tracks them; `names` identifies them. Absent
    tensors are left out, because each argument costs host time in apply and in backward.
    """

    @staticmethod
    def forward(ctx: Any, call: ResolvedCall, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        out, saved = forward_saving(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        # Without the inputs: ctx must not hold tensors that autograd frees after backward
        ctx.names, ctx.max_seqlen, (_, *ctx.call) = names, call.inputs.max_seqlen, call
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        names = ctx.names
        if do is None:
            return (None,) * (2 + len(names))
        kept = ctx.saved_tensors  # read once: torch.utils.checkpoint frees recomputed tensors when they are read
        tensors, saved = kept[: len(names)], kept[len(names) :]
        given: dict[str, Any] = dict(zip(names, tensors, strict=True))
        inputs = NSAInputs(**given, max_seqlen=ctx.max_seqlen)
        with torch.no_grad(), autocast_off(do.device.type):
            by_name = gradients(ResolvedCall(inputs, *ctx.call), saved, do)
        needed = ctx.needs_input_grad[2:]
        results = [by_name.get(name) if needs else None for name, needs in zip(names, needed, strict=True)]
        return (None, None, *forbid_double_backward("nsa", results, do, *tensors))
