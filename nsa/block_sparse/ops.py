"""Block-sparse attention as PyTorch operators with autograd, for torch.compile (see nsa/common/operators.py).

nsa_kernels::block_sparse_attention             out and the tensor saved for backward; differentiable
nsa_kernels::block_sparse_attention_backward    dq, dk, dv

q_start is a tensor; the caller slices the keys for an integer one. `backward` is True if gradients are needed, because
tensors inside an operator do not require any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.block_sparse.autograd import Gradients, gradients
from nsa.block_sparse.validate import ResolvedCall, resolve
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import needs_grad
from nsa.common.operators import register_double_backward_error, register_operator
from nsa.inputs import NSAInputs

FORWARD, BACKWARD = "nsa_kernels::block_sparse_attention", "nsa_kernels::block_sparse_attention_backward"
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? cu_seqlens, Tensor? cu_seqlens_k, "
_ARGUMENTS = (
    f"{_TENSORS}Tensor? q_start, SymInt block_size, bool causal, float? softmax_scale, bool debug, str? backend, "
    "bool backward"
)
SCHEMAS = {
    FORWARD: f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor do, Tensor out, Tensor saved, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
}
NUM_TENSORS = 7


def call_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Call block_sparse_attention's operator; arguments in the order of the schema, without `backward`."""
    out: Tensor = torch.ops.nsa_kernels.block_sparse_attention(q, k, v, *arguments, needs_grad(q, k, v))[0]
    return out


def _resolve(*arguments: Any) -> ResolvedCall:
    q, k, v, block_indices, cu_seqlens, cu_seqlens_k, q_start, *options = arguments
    inputs = NSAInputs(q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, q_start=q_start)
    names = ("block_size", "causal", "softmax_scale", "debug", "backend", "backward")
    return resolve(inputs, block_indices, **dict(zip(names, options, strict=True)))


@torch.no_grad()
def _forward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = _resolve(q, *arguments)
    with autocast_off(q.device.type):
        out, saved = call.impl.load()(*call.tensors, **call.options)
    return out, q.new_empty(0) if saved is None else saved


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = _resolve(q, k, v, *arguments)
    training = call.impl.load_training()
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(0) if training is None else training.kept_like(q, k, v)


@torch.no_grad()
def _backward(do: Tensor, out: Tensor, saved: Tensor, *arguments: Any) -> Gradients:
    with autocast_off(do.device.type):
        return gradients(_resolve(*arguments), do, out, saved)


def _backward_fake(do: Tensor, _out: Tensor, _saved: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, saved, *inputs[:NUM_TENSORS])
    ctx.options = inputs[NUM_TENSORS:]


def _differentiate(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    results: tuple[Tensor | None, ...] = (None, None, None)
    if do is not None:
        results = torch.ops.nsa_kernels.block_sparse_attention_backward(do, *ctx.saved_tensors, *ctx.options)
    return (*results, *[None] * (NUM_TENSORS - 3 + len(ctx.options)))


register_operator(FORWARD, SCHEMAS[FORWARD], _forward, _forward_fake)
register_operator(BACKWARD, SCHEMAS[BACKWARD], _backward, _backward_fake)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save)
register_double_backward_error(BACKWARD, "block_sparse_attention")
