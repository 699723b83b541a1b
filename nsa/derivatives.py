"""First derivatives that have none of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def without_second(op: str, gradients: list[Tensor | None], *sources: Tensor) -> list[Tensor | None]:
    """What a backward returns: under create_graph=True, gradients that refuse to be differentiated.

    PyTorch's once_differentiable does so only where `do` requires a gradient; otherwise it lets them pass as constants.

    Args:
        sources: `do` and the inputs that the gradients depend on.
    """
    if torch.is_grad_enabled():
        return list(_Constant.apply(op, gradients, *sources))
    return gradients


def refuse_second(op: str) -> None:
    """Raise what a second derivative gets."""
    raise RuntimeError(f"{op} has no second derivative on this backend: call backward() without create_graph")


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, gradients: list[Tensor | None], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        refuse_second(ctx.op)
