"""Training of block-sparse attention: backward, and the autograd.Function of eager training.

A backend trains through the module in its table row (dispatch.Impl.training): `forward`, `backward` and `kept_like`,
which describes the tensor that forward saves. A backend without one is differentiable itself; the operators rerun it in
backward (nsa/block_sparse/ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.block_sparse.validate import ResolvedCall
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward, recompute_gradients

Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(call: ResolvedCall, do: Tensor, out: Tensor, saved: Tensor) -> Gradients:
    """dq, dk, dv.

    Args:
        do: gradient of out.
        out, saved: from the backend's forward.
    """
    q, k, v, *others = call.tensors
    training = call.impl.load_training()
    if training is None:
        forward = call.impl.load()
        dq, dk, dv = recompute_gradients(lambda *qkv: forward(*qkv, *others, **call.options)[0], (q, k, v), do)
    else:
        dq, dk, dv = training.backward(do, q, k, v, *others, out, saved, **call.options)
    return dq, dk, dv


def run_with_backward(call: ResolvedCall) -> Tensor:
    """Run a backend that has a training module; the result is differentiable."""
    out: Tensor = BlockSparseAttentionFunction.apply(call.impl, call.options, *call.tensors)
    return out


class BlockSparseAttentionFunction(torch.autograd.Function):
    """One eager call."""

    @staticmethod
    def forward(ctx: Any, impl: dispatch.Impl, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        out: Tensor
        out, saved = impl.load()(*tensors, **options)
        ctx.impl, ctx.options = impl, options
        ctx.save_for_backward(*tensors, out, saved)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, saved = ctx.saved_tensors
        call = ResolvedCall(ctx.impl, tuple(tensors), ctx.options)
        with torch.no_grad(), autocast_off(do.device.type):
            results = gradients(call, do, out, saved)
        once = forbid_double_backward("block_sparse_attention", [*results], do, *tensors[:3])
        return (None, None, *once, None, None, None, None)
