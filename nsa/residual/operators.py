"""Attention residual: its calls, and their operators (see nsa/common/operators.py).

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

import dispatch
from nsa.common.checks import check_eps
from nsa.common.derivatives import needs_grad
from nsa.common.operators import ResolvedCall, by_member, register_backward, register_forward
from nsa.common.resolve import accepted, find_impl, is_remembered
from nsa.residual.validate import Blocks, block_tensors, check_blocks, check_weight

_INPUTS = "Tensor[] blocks, Tensor w_query, Tensor? w_norm"
_OPTIONS = "bool stacked, float eps, str? backend, bool backward"
FORWARD = "nsa_kernels::attention_residual", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::attention_residual_backward",
    f"(Tensor do, Tensor saved, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


class ResidualCall(ResolvedCall):
    """The blocks' tensors, w_query, and w_norm if it is given; `num_tensors` hold the blocks, one if `stacked`."""

    op = "attention_residual"

    def arguments(self) -> tuple[Any, Tensor, Tensor | None]:
        """blocks, w_query and w_norm."""
        count, stacked = self.options["num_tensors"], self.options["stacked"]
        w_query, *w_norm = self.tensors[count:]
        return self.tensors[0] if stacked else self.tensors[:count], w_query, w_norm[0] if w_norm else None

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        eps = self.options["eps"]
        if self.impl.training is None:
            return self.impl.load()(*self.arguments(), eps=eps)[0], []
        out, saved = self.impl.load()(*self.arguments(), eps=eps, backend=self.impl.backend)
        return out, [saved]

    def forward(self) -> Tensor:
        return self.saving()[0]

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        first, training = self.tensors[0], self.impl.load_training()
        saved = [] if training is None else [training.kept_like(self.arguments()[0])]
        return first.new_empty(first.shape[-3:]), saved

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        training = self.impl.load_training()
        if training is not None:
            found = training.backward(do, *self.arguments(), *saved, backend=self.impl.backend)
            return [x for x in found if x is not None]
        count, dtensors = self.options["num_tensors"], self.recomputed(self.tensors, do)
        return [dtensors[0] if self.options["stacked"] else torch.stack(dtensors[:count]), *dtensors[count:]]

    def empty_gradients(self) -> list[Tensor]:
        (first, *_), count = self.tensors, self.options["num_tensors"]
        shape = first.shape if self.options["stacked"] else (count, *first.shape)
        return [first.new_empty(shape), *(x.new_empty(x.shape) for x in self.tensors[count:])]

    def by_tensor(self, gradients: list[Tensor]) -> list[Tensor]:
        dblocks, *dweights = gradients
        return [*by_member(dblocks, self.tensors), *dweights]


def resolve(
    blocks: Blocks,
    w_query: Tensor,
    w_norm: Tensor | None,
    *,
    eps: float,
    backend: str | None,
    backward: bool | None = None,
) -> ResidualCall:
    """Check all arguments and find a backend that supports the call.

    Args:
        backward: True if gradients are needed. Default: None, which means if a tensor requires them.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: if no backend supports the call.
    """
    first, num_blocks = check_blocks(blocks)
    check_eps(eps)
    check_weight("w_query", w_query, first)
    if w_norm is not None:
        check_weight("w_norm", w_norm, first)
    stacked, tensors = isinstance(blocks, Tensor), block_tensors(blocks)
    given = (*tensors, w_query) if w_norm is None else (*tensors, w_query, w_norm)
    if backward is None:
        backward = needs_grad(*given)
    properties = None
    if is_remembered(first, backend):
        shape = first.shape[-3:]
        properties = "attention_residual", first.device, first.dtype, backward, num_blocks, stacked, shape, backend
    impl = accepted(properties)
    if impl is None:
        options = {"blocks": num_blocks, "stacked": stacked, "shape": tuple(first.shape[-3:])}
        call = dispatch.Call("attention_residual", first.device, first.dtype, backward=backward, options=options)
        impl = find_impl(call, backend, properties)
    return ResidualCall(impl, backward, given, {"stacked": stacked, "num_tensors": len(tensors), "eps": float(eps)})


def call_operator(blocks: Blocks, w_query: Tensor, w_norm: Tensor | None, eps: float, backend: str | None) -> Tensor:
    """Call the operator of `attention_residual`."""
    tensors = block_tensors(blocks)
    options = isinstance(blocks, Tensor), eps, backend, needs_grad(*tensors, w_query, w_norm)
    out: Tensor = torch.ops.nsa_kernels.attention_residual(tensors, w_query, w_norm, *options)[0]
    return out


def _resolve(blocks: Sequence[Tensor], stacked: bool, **others: Any) -> ResidualCall:
    return resolve(blocks[0] if stacked else blocks, **others)


register_forward(*FORWARD, _resolve)
register_backward("attention_residual", FORWARD, BACKWARD, _resolve, ("blocks", "w_query", "w_norm"))
