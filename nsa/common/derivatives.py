"""Derivatives inside of operators, and how results are differentiated where autograd does not know by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def forbid_double_backward(op: str, gradients: list[Tensor | None], *sources: Tensor) -> list[Tensor | None]:
    """What a backward returns: under create_graph=True, gradients that refuse to be differentiated.

    PyTorch's once_differentiable does so only where `do` requires a gradient; otherwise it lets them pass as constants.

    Args:
        sources: `do` and the inputs that the gradients depend on.
    """
    if torch.is_grad_enabled():
        return list(_Constant.apply(op, gradients, *sources))
    return gradients


def differentiate(function: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    """Gradients of `function(*inputs)`, contiguous, by running it again under autograd; for the inside of operators.

    An operator runs below autograd, and so does all that its thread does meanwhile: another one differentiates.
    """
    stream = torch.cuda.stream(torch.cuda.current_stream(do.device)) if do.is_cuda else nullcontext()

    def run() -> list[Tensor]:
        with stream:
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            gradients = torch.autograd.grad(function(*leaves), leaves, do, materialize_grads=True)
        return [gradient.contiguous() for gradient in gradients]

    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(run).result()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`, in its own; its gradient passes as it is."""
    result: Tensor = x if x.dtype == dtype else _Rounded.apply(x, dtype)
    return result


def refuse_changes(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, whose backward raises PyTorch's error where an input was changed in place meanwhile.

    For results whose backward reads the inputs again without autograd's knowledge, as torch.utils.checkpoint's does.
    """
    result: Tensor = _Unchanged.apply(out, *(tensor.detach() for tensor in inputs)) if out.requires_grad else out
    return result


def refuse_double_backward(op: str) -> None:
    """Raise what a second derivative gets."""
    raise RuntimeError(f"{op} has no second derivative on this backend: call backward() without create_graph")


def refuse_transforms(op: str) -> None:
    """Raise inside torch.func's transforms, whose tensors have no memory that a kernel could read.

    Raises:
        RuntimeError: naming the transform and what to do instead.
    """
    if not torch._C._are_functorch_transforms_active():
        return
    kinds = torch._C._functorch.TransformType
    names_and_advice = {
        kinds.Vmap: ("torch.vmap", "its tensors have a batch dimension B, make yours a part of it"),
        kinds.Grad: ("torch.func.grad, vjp or jacrev", "call backward() or torch.autograd.grad"),
        kinds.Jvp: ("torch.func.jvp or jacfwd", "there are derivatives by backward() and torch.autograd.grad alone"),
    }
    innermost = torch._C._functorch.peek_interpreter_stack().key()
    if innermost in names_and_advice:
        name, advice = names_and_advice[innermost]
        raise RuntimeError(f"{op} does not support {name}: {advice}")


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, gradients: list[Tensor | None], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        refuse_double_backward(ctx.op)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        return (do, *(None for _ in ctx.saved_tensors))  # asked for, they are compared with what was saved
