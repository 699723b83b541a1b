"""Training of neighborhood attention: backward, and the autograd.Function of eager training.

A backend trains through the module in its table row (dispatch.Impl.training): `forward`, `backward` and `kept_like`,
which describes the tensor that forward saves. A backend without one is differentiable itself; the operators rerun it in
backward (nsa/neighborhood/ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward, recompute_gradients

Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(
    impl: dispatch.Impl,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensor,
    keywords: dict[str, Any],
    deterministic: bool,
) -> Gradients:
    """dq, dk, dv.

    Args:
        do: gradient of out, `[B,N,H,D]`.
        out, saved: from the backend's forward.
        keywords: keyword arguments of the backend's forward.
        deterministic: True if gradients must be bitwise repeatable, from PyTorch's flag in forward.
    """
    training = impl.load_training()
    if training is None:
        forward = impl.load()
        dq, dk, dv = recompute_gradients(lambda *qkv: forward(*qkv, **keywords)[0], (q, k, v), do)
    else:
        dq, dk, dv = training.backward(do, q, k, v, out, saved, **keywords, deterministic=deterministic)
    return dq, dk, dv


def run_with_backward(
    q: Tensor, k: Tensor, v: Tensor, impl: dispatch.Impl, keywords: dict[str, Any], deterministic: bool
) -> Tensor:
    """Run a backend that has a training module; the result is differentiable."""
    out: Tensor = NeighborhoodAttentionFunction.apply(q, k, v, impl, keywords, deterministic)
    return out


class NeighborhoodAttentionFunction(torch.autograd.Function):
    """One eager call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, impl: dispatch.Impl, keywords: dict[str, Any], deterministic: bool
    ) -> Tensor:
        out: Tensor
        out, saved = impl.load()(q, k, v, **keywords)
        ctx.options = impl, keywords, deterministic
        ctx.save_for_backward(q, k, v, out, saved)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, saved = ctx.saved_tensors
        with torch.no_grad(), autocast_off(do.device.type):
            impl, *options = ctx.options
            results = gradients(impl, do, q, k, v, out, saved, *options)
        return (*forbid_double_backward("neighborhood_attention", [*results], do, q, k, v), None, None, None)
