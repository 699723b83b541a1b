"""Training of attention residual: backward, and the autograd.Function of eager training.

A backend trains through the module in its table row (dispatch.Impl.training): `forward`, `backward` and `kept_like`,
which describes the tensor that forward saves. A backend without one is differentiable itself; the operators rerun it in
backward (nsa/residual/ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward, recompute_gradients
from nsa.residual.validate import Blocks, as_blocks, block_tensors


def gradients(
    impl: dispatch.Impl,
    do: Tensor,
    blocks: Blocks,
    w_query: Tensor,
    w_norm: Tensor | None,
    saved: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the blocks as `[L,B,N,D]`, of w_query, and of w_norm if it is given.

    Args:
        do: gradient of out, `[B,N,D]`.
        saved: from the backend's forward.
    """
    training = impl.load_training()
    if training is not None:
        dblocks, dw_query, dw_norm = training.backward(do, blocks, w_query, w_norm, saved, backend=impl.backend)
        return dblocks, dw_query, dw_norm
    function, tensors, stacked = impl.load(), block_tensors(blocks), isinstance(blocks, Tensor)
    weights = [w_query] if w_norm is None else [w_query, w_norm]

    def forward(*inputs: Tensor) -> Tensor:
        leaves, (w_query, *norm) = inputs[: len(tensors)], inputs[len(tensors) :]
        out: Tensor = function(as_blocks(leaves, stacked), w_query, norm[0] if norm else None, eps=eps)[0]
        return out

    results = recompute_gradients(forward, [*tensors, *weights], do)
    dtensors, (dw_query, *dnorm) = results[: len(tensors)], results[len(tensors) :]
    dblocks = dtensors[0] if stacked else torch.stack(dtensors)
    return dblocks, dw_query, dnorm[0] if dnorm else None


def run_with_backward(
    blocks: Blocks, w_query: Tensor, w_norm: Tensor | None, impl: dispatch.Impl, eps: float
) -> Tensor:
    """Run a backend that has a training module; the result is differentiable."""
    stacked = isinstance(blocks, Tensor)
    out: Tensor = AttentionResidualFunction.apply(impl, eps, stacked, w_query, w_norm, *block_tensors(blocks))
    return out


class AttentionResidualFunction(torch.autograd.Function):
    """One eager call. Blocks are separate arguments so that autograd tracks them."""

    @staticmethod
    def forward(
        ctx: Any,
        impl: dispatch.Impl,
        eps: float,
        stacked: bool,
        w_query: Tensor,
        w_norm: Tensor | None,
        *blocks: Tensor,
    ) -> Tensor:
        out: Tensor
        out, saved = impl.load()(as_blocks(blocks, stacked), w_query, w_norm, eps=eps, backend=impl.backend)
        ctx.set_materialize_grads(False)
        ctx.impl, ctx.eps, ctx.stacked = impl, eps, stacked
        ctx.save_for_backward(saved, w_query, w_norm, *blocks)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, w_query, w_norm, *blocks = ctx.saved_tensors
        if do is None:
            return (None,) * (5 + len(blocks))
        sources = [do, w_query, *blocks] if w_norm is None else [do, w_query, w_norm, *blocks]
        with torch.no_grad(), autocast_off(do.device.type):
            given = as_blocks(blocks, ctx.stacked)
            dblocks, dw_query, dw_norm = gradients(ctx.impl, do, given, w_query, w_norm, saved, ctx.eps)
        results = [dw_query, dw_norm, *([dblocks] if ctx.stacked else dblocks.unbind(0))]
        return (None, None, None, *forbid_double_backward("attention_residual", results, *sources))
