"""Results on the meta device: differentiable tensors with shapes and dtypes but no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def empty_result(shape: Sequence[int], dtype: torch.dtype, *sources: Tensor) -> Tensor:
    """An empty meta tensor, differentiable any number of times with respect to the sources."""
    result: Tensor = _EmptyResult.apply(shape, dtype, *sources)
    return result


class _EmptyResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return torch.empty(shape, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        sources, (_shape, _dtype, *needed) = ctx.saved_tensors, ctx.needs_input_grad
        gradients = (
            empty_result(source.shape, source.dtype, do, *sources) if needs else None
            for source, needs in zip(sources, needed, strict=True)
        )
        return (None, None, *gradients)
