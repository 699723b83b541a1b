"""Attention residual as PyTorch operators with autograd, for torch.compile(fullgraph=True).

    nsa_kernels::attention_residual             out, and what backward wants to know; differentiable
    nsa_kernels::attention_residual_backward    gradients of the blocks, as `[L,B,N,D]`, of w_query and of w_norm

As nsa/neighborhood/ops.py: a compiled graph calls the operators, which do what nsa/residual/api.py does eagerly.
They take blocks as a list, of one tensor when it is `stacked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.derivatives import differentiate, refuse_double_backward
from nsa.residual.validate import Blocks, members, resolve

FORWARD, BACKWARD = "nsa_kernels::attention_residual", "nsa_kernels::attention_residual_backward"
_INPUTS = "Tensor[] blocks, Tensor w_query, Tensor? w_norm"
_OPTIONS = "bool stacked, float eps, str? backend"
SCHEMAS = {
    FORWARD: f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor do, Tensor kept, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
}


def call_forward(blocks: Blocks, w_query: Tensor, w_norm: Tensor | None, eps: float, backend: str | None) -> Tensor:
    """attention_residual by its operator."""
    stacked = isinstance(blocks, Tensor)
    inputs = (members(blocks), w_query, w_norm)
    out: Tensor = torch.ops.nsa_kernels.attention_residual(*inputs, stacked, eps, backend)[0]
    return out


def _given(blocks: Sequence[Tensor], stacked: bool) -> Blocks:
    return blocks[0] if stacked else list(blocks)


@torch.no_grad()
def _forward(
    blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, eps: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    given = _given(blocks, stacked)
    impl = resolve(given, w_query, w_norm, eps, backend)
    with autocast_off(w_query.device.type):
        if impl.training is None:
            return impl.load()(given, w_query, w_norm, eps=eps)[0], w_query.new_empty(0)
        out, kept = impl.load()(given, w_query, w_norm, eps=eps, backend=impl.backend)
    return out.contiguous(), kept


def _forward_like(
    blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, eps: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    given = _given(blocks, stacked)
    module = resolve(given, w_query, w_norm, eps, backend).load_training()
    out = blocks[0].new_empty(blocks[0].shape[-3:])
    return out, w_query.new_empty(0) if module is None else module.kept_like(given)


@torch.no_grad()
def _backward(
    do: Tensor,
    kept: Tensor,
    blocks: Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    stacked: bool,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    given = _given(blocks, stacked)
    impl = resolve(given, w_query, w_norm, eps, backend)
    module = impl.load_training()
    with autocast_off(do.device.type):
        if module is not None:
            dblocks, dw_query, dw_norm = module.backward(do, given, w_query, w_norm, kept, backend=impl.backend)
            return dblocks.contiguous(), dw_query, do.new_empty(0) if dw_norm is None else dw_norm
        run = impl.load()
        weights = [w_query] if w_norm is None else [w_query, w_norm]

        def rerun(*tensors: Tensor) -> Tensor:
            leaves, (w_query, *rest) = tensors[: len(blocks)], tensors[len(blocks) :]
            out: Tensor = run(_given(leaves, stacked), w_query, rest[0] if rest else None, eps=eps)[0]
            return out

        gradients = differentiate(rerun, [*blocks, *weights], do)
    of_blocks, of_weights = gradients[: len(blocks)], gradients[len(blocks) :]
    dblocks = of_blocks[0] if stacked else torch.stack(of_blocks)
    return dblocks, of_weights[0], do.new_empty(0) if w_norm is None else of_weights[1]


def _backward_like(
    do: Tensor, _kept: Tensor, blocks: Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, stacked: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = blocks[0].shape if stacked else (len(blocks), *blocks[0].shape)
    dw_norm = do.new_empty(0) if w_norm is None else w_norm.new_empty(w_norm.shape)
    return blocks[0].new_empty(shape), w_query.new_empty(w_query.shape), dw_norm


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    blocks, w_query, w_norm, *options = inputs
    _, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(kept, w_query, w_norm, *blocks)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor | None, _: None) -> tuple[Any, ...]:
    kept, w_query, w_norm, *blocks = ctx.saved_tensors
    if do is None:
        return ([None] * len(blocks), *[None] * (2 + len(ctx.options)))
    run = torch.ops.nsa_kernels.attention_residual_backward
    dblocks, dw_query, dw_norm = run(do, kept, blocks, w_query, w_norm, *ctx.options)
    stacked = ctx.options[0]
    of_blocks = [dblocks] if stacked else list(dblocks.unbind(0))
    return (of_blocks, dw_query, None if w_norm is None else dw_norm, *[None] * len(ctx.options))


def _refuse_double_backward(*_: Any) -> None:
    refuse_double_backward("attention_residual")


for _name, _implementation, _like in ((FORWARD, _forward, _forward_like), (BACKWARD, _backward, _backward_like)):
    torch.library.define(_name, SCHEMAS[_name])
    torch.library.impl(_name, "default", _implementation)
    torch.library.register_fake(_name, _like)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup)
torch.library.register_autograd(BACKWARD, _refuse_double_backward)
