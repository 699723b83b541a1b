"""Attention residual: its calls, and their operators (see nsa/common/operators.py).

    nsa_kernels::attention_residual             out and the tensor saved for backward; differentiable
    nsa_kernels::attention_residual_backward    gradients of the blocks as `[L,B,N,D]`, of w_query and of w_norm

Blocks are a list; with `stacked`, a list of one tensor `[L,B,N,D]`. `backward` is True if gradients are needed, because
tensors inside an operator do not require any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass
class ResidualCall(ResolvedCall):
    """The blocks' tensors, w_query, and w_norm if it is given."""

    stacked: bool
    num_tensors: int
    """Number of tensors that hold the blocks."""
    eps: float

    op = "attention_residual"

    def with_tensors(self) -> Callable[[tuple[Any, ...]], ResolvedCall]:
        impl, options = self.impl, (self.stacked, self.num_tensors, self.eps)
        return lambda tensors: ResidualCall(impl, True, tensors, *options)

    def arguments(self) -> tuple[Any, Any, Any]:
        """blocks, w_query and w_norm."""
        blocks, (w_query, *w_norm) = self.tensors[: self.num_tensors], self.tensors[self.num_tensors :]
        return blocks[0] if self.stacked else blocks, w_query, w_norm[0] if w_norm else None

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        if self.impl.training is None:
            return self.impl.load()(*self.arguments(), eps=self.eps)[0], []
        out, saved = self.impl.load()(*self.arguments(), eps=self.eps, backend=self.impl.backend)
        return out, [saved]

    def forward(self) -> Tensor:
        return self.saving()[0]

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        blocks, training = self.arguments()[0], self.impl.load_training()
        first = blocks if self.stacked else blocks[0]
        return first.new_empty(first.shape[-3:]), [] if training is None else [training.kept_like(blocks)]

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        training = self.impl.load_training()
        if training is not None:
            found = training.backward(do, *self.arguments(), *saved, backend=self.impl.backend)
            return [x for x in found if x is not None]
        dtensors = self.recomputed(self.tensors, do)
        dblocks, dweights = dtensors[: self.num_tensors], dtensors[self.num_tensors :]
        return [dblocks[0] if self.stacked else torch.stack(dblocks), *dweights]

    def empty_gradients(self) -> list[Tensor]:
        blocks, *weights = self.arguments()
        dblocks = (
            blocks.new_empty(blocks.shape) if self.stacked else blocks[0].new_empty((len(blocks), *blocks[0].shape))
        )
        return [dblocks, *(x.new_empty(x.shape) for x in weights if x is not None)]

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
    return ResidualCall(impl, backward, given, stacked, len(tensors), float(eps))


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
