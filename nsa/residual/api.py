"""Attention residual: the public function. Validate, route, differentiate; backends compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off, promote_blocks
from nsa.common.derivatives import forbid_double_backward, refuse_changes, refuse_transforms
from nsa.residual.ops import call_forward
from nsa.residual.validate import members, needs_grad, resolve


def attention_residual(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> Tensor:
    """Attention of each token to what the blocks before gave for it (arXiv 2603.15031), differentiable.

    The score of block i is `sum over D of w_query * w_norm * x_i / sqrt(mean(x_i^2) + eps)`; out is the sum of the
    blocks, weighted by the softmax of their scores. Under torch.autocast a list of blocks of several dtypes is taken in
    fp32, as torch.stack takes it.

    Args:
        blocks: `[L,B,N,D]`, or a list of L tensors `[B,N,D]` of the same strides, which are read where they are; fp16,
            bf16 or fp32, on the CPU also fp64.
        w_query: `[D]`, in the blocks' dtype or fp32. w_norm: likewise; None means ones.
        eps: added to the mean square, at least 0; with 0, features that are all 0 give NaN.
        backend: "triton", "ascend" or "reference"; None reads NSA_KERNELS_BACKEND, then takes the first that can run.

    Returns:
        `[B,N,D]` in the blocks' dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before anything is computed.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and their kin, which are not supported.
    """
    refuse_transforms("attention_residual")
    blocks, w_query, w_norm = promote_blocks(blocks, w_query, w_norm)
    if torch.compiler.is_compiling():
        return call_forward(blocks, w_query, w_norm, eps, backend)
    impl = resolve(blocks, w_query, w_norm, eps, backend)
    given, eps = members(blocks), float(eps)
    out: Tensor
    with autocast_off(w_query.device.type):
        if impl.training is None:
            out = impl.load()(blocks, w_query, w_norm, eps=eps)[0]
            out = refuse_changes(out, *given, w_query, *([] if w_norm is None else [w_norm]))
        elif needs_grad(*given, w_query, w_norm):
            out = _Trained.apply(impl, eps, isinstance(blocks, Tensor), w_query, w_norm, *given)
        else:
            out = impl.load()(blocks, w_query, w_norm, eps=eps, backend=impl.backend)[0]
    return out


class _Trained(torch.autograd.Function):
    """A backend with a backward of its own: `forward` and `backward` of the module that its row names."""

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
        out, kept = impl.load()(blocks[0] if stacked else blocks, w_query, w_norm, eps=eps, backend=impl.backend)
        ctx.set_materialize_grads(False)
        ctx.impl, ctx.stacked = impl, stacked
        ctx.save_for_backward(kept, w_query, w_norm, *blocks)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, w_query, w_norm, *blocks = ctx.saved_tensors
        if do is None:
            return (None,) * (5 + len(blocks))
        sources = [do, w_query, *blocks] if w_norm is None else [do, w_query, w_norm, *blocks]
        with torch.no_grad(), autocast_off(do.device.type):
            given = blocks[0] if ctx.stacked else blocks
            dblocks, *dweights = ctx.impl.load_training().backward(
                do, given, w_query, w_norm, kept, backend=ctx.impl.backend
            )
            gradients = [*dweights, *([dblocks] if ctx.stacked else dblocks.unbind(0))]
        return (None, None, None, *forbid_double_backward("attention_residual", gradients, *sources))
