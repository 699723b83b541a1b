"""Attention residual as PyTorch operators with autograd, for torch.compile (see nsa/common/operators.py).

    nsa_kernels::attention_residual             out and the tensor saved for backward; differentiable
    nsa_kernels::attention_residual_backward    gradients of the blocks as `[L,B,N,D]`, of w_query and of w_norm

Blocks are a list; with `stacked`, a list of one tensor `[L,B,N,D]`. `backward` is True if gradients are needed, because
tensors inside an operator do not require any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.derivatives import needs_grad
from nsa.common.operators import register_double_backward_error, register_operator
from nsa.residual.autograd import gradients
from nsa.residual.validate import Blocks, as_blocks, block_tensors, resolve

FORWARD, BACKWARD = "nsa_kernels::attention_residual", "nsa_kernels::attention_residual_backward"
_INPUTS = "Tensor[] blocks, Tensor w_query, Tensor? w_norm"
_OPTIONS = "bool stacked, float eps, str? backend, bool backward"
SCHEMAS = {
    FORWARD: f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor do, Tensor saved, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
}


def call_forward(blocks: Blocks, w_query: Tensor, w_norm: Tensor | None, eps: float, backend: str | None) -> Tensor:
    """Call the operator of `attention_residual`."""
    stacked = isinstance(blocks, Tensor)
    inputs = (block_tensors(blocks), w_query, w_norm)
    backward = needs_grad(*inputs[0], w_query, w_norm)
    out: Tensor = torch.ops.nsa_kernels.attention_residual(*inputs, stacked, eps, backend, backward)[0]
    return out


@torch.no_grad()
def _forward(
    blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, eps: float, *options: Any
) -> tuple[Tensor, Tensor]:
    given = as_blocks(blocks, stacked)
    impl = resolve(given, w_query, w_norm, eps, *options)
    with autocast_off(w_query.device.type):
        if impl.training is None:
            return impl.load()(given, w_query, w_norm, eps=eps)[0].contiguous(), w_query.new_empty(0)
        out, saved = impl.load()(given, w_query, w_norm, eps=eps, backend=impl.backend)
    return out.contiguous(), saved


def _forward_fake(
    blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, eps: float, *options: Any
) -> tuple[Tensor, Tensor]:
    given = as_blocks(blocks, stacked)
    training = resolve(given, w_query, w_norm, eps, *options).load_training()
    out = blocks[0].new_empty(blocks[0].shape[-3:])
    return out, w_query.new_empty(0) if training is None else training.kept_like(given)


@torch.no_grad()
def _backward(
    do: Tensor,
    saved: Tensor,
    blocks: Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    stacked: bool,
    eps: float,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    given = as_blocks(blocks, stacked)
    impl = resolve(given, w_query, w_norm, eps, *options)
    with autocast_off(do.device.type):
        dblocks, dw_query, dw_norm = gradients(impl, do, given, w_query, w_norm, saved, eps)
    return dblocks.contiguous(), dw_query, do.new_empty(0) if dw_norm is None else dw_norm


def _backward_fake(
    do: Tensor, _saved: Tensor, blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = blocks[0].shape if stacked else (len(blocks), *blocks[0].shape)
    dw_norm = do.new_empty(0) if w_norm is None else w_norm.new_empty(w_norm.shape)
    return blocks[0].new_empty(shape), w_query.new_empty(w_query.shape), dw_norm


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    blocks, w_query, w_norm, *options = inputs
    _, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(saved, w_query, w_norm, *blocks)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor | None, _: None) -> tuple[Any, ...]:
    saved, w_query, w_norm, *blocks = ctx.saved_tensors
    if do is None:
        return ([None] * len(blocks), *[None] * (2 + len(ctx.options)))
    run = torch.ops.nsa_kernels.attention_residual_backward
    dblocks, dw_query, dw_norm = run(do, saved, blocks, w_query, w_norm, *ctx.options)
    stacked = ctx.options[0]
    dtensors = [dblocks] if stacked else list(dblocks.unbind(0))
    return (dtensors, dw_query, None if w_norm is None else dw_norm, *[None] * len(ctx.options))


register_operator(FORWARD, SCHEMAS[FORWARD], _forward, _forward_fake)
register_operator(BACKWARD, SCHEMAS[BACKWARD], _backward, _backward_fake)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save)
register_double_backward_error(BACKWARD, "attention_residual")
