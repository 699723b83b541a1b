"""Autograd code shared by all ops: recomputation in backward, and errors for unsupported derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

BACKWARD_ALONE = "use backward() or torch.autograd.grad"


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd records a function of these tensors. A loop, because `any` is slower on long lists of blocks."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def determinism_is_asked_for() -> bool:
    """True if `torch.use_deterministic_algorithms(True)` is on, without `warn_only`."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def forbid_double_backward(op: str, gradients: list[Tensor | None], *sources: Tensor) -> list[Tensor | None]:
    """Return the gradients of a backward; with create_graph=True, differentiating them raises RuntimeError.

    PyTorch's once_differentiable raises only if `do` requires a gradient, and otherwise returns constants.

    Args:
        op: its name in the error.
        sources: `do` and the inputs on which the gradients depend.
    """
    if torch.is_grad_enabled():
        return list(_OnceDifferentiable.apply(op, gradients, *sources))
    return gradients


def raise_double_backward(op: str) -> None:
    """Raise the error of a second derivative."""
    raise RuntimeError(f"{op} has no second derivative on this backend: call backward() without create_graph")


def without_second_derivatives(op: str, x: Tensor) -> Tensor:
    """Return x; differentiating its gradient raises RuntimeError. For PyTorch functions without a second derivative,
    such as fused attention.
    """
    result: Tensor = _WithoutSecondDerivatives.apply(op, x) if x.requires_grad else x
    return result


def recompute_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    """Contiguous gradients of `function(*inputs)`, computed by rerunning it under autograd.

    Runs in the calling thread: on a GPU that is autograd's only thread for the device, and a backward in another thread
    would wait for it.
    """
    with torch.inference_mode(False), torch.enable_grad(), _autograd_below_operators():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        gradients = torch.autograd.grad(function(*leaves), leaves, do, materialize_grads=True)
    return [gradient.contiguous() for gradient in gradients]


def _autograd_below_operators() -> AbstractContextManager[None]:
    """Let autograd record inside an operator of torch.library, where PyTorch excludes its dispatch keys."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard


def round_straight_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype` and returned in its own dtype; the gradient passes unrounded (straight-through)."""
    result: Tensor = x if x.dtype == dtype else _RoundStraightThrough.apply(x, dtype)
    return result


def guard_inplace_changes(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return `out`; its backward raises PyTorch's error if an input was changed in place since the forward.

    For backwards that read the inputs outside of autograd's own checks, as torch.utils.checkpoint does.
    """
    if not out.requires_grad:
        return out
    result: Tensor = _SaveForVersionCheck.apply(out, *(tensor.detach() for tensor in inputs if tensor is not None))
    return result


def to_be_changed() -> AbstractContextManager[Any]:
    """Context in which new tensors may later be written in any mode; inference tensors can be written only in that
    mode.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def as_to_be_changed(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object that is written in place, with inference tensors replaced by normal copies."""

    def changeable(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.is_inference() else x

    with to_be_changed():
        result: dict[str, Any] = tree_map(changeable, state)
    return result


def refuse_forward_mode(op: str, *tensors: object) -> None:
    """Raise RuntimeError for dual tensors of torch.autograd.forward_ad."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{op} does not support forward-mode derivatives: {BACKWARD_ALONE}")


def refuse_transforms(op: str) -> None:
    """Raise inside transforms of torch.func, whose tensors have no storage that a kernel could read.

    Raises:
        RuntimeError: naming the transform and what to do instead.
    """
    if not torch._C._are_functorch_transforms_active():
        return
    kinds = torch._C._functorch.TransformType
    names_and_advice = {
        kinds.Vmap: ("torch.vmap", "fold the mapped dimension into the batch dimension B"),
        kinds.Grad: ("torch.func.grad, vjp or jacrev", "call backward() or torch.autograd.grad"),
        kinds.Jvp: ("torch.func.jvp or jacfwd", BACKWARD_ALONE),
    }
    innermost = torch._C._functorch.peek_interpreter_stack().key()
    if innermost in names_and_advice:
        name, advice = names_and_advice[innermost]
        raise RuntimeError(f"{op} does not support {name}: {advice}")


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, gradients: list[Tensor | None], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise_double_backward(ctx.op)


class _WithoutSecondDerivatives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, x: Tensor) -> Tensor:
        ctx.op = op
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *forbid_double_backward(ctx.op, [dx], dx))


class _RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _SaveForVersionCheck(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out.detach()  # not a view to autograd, which forbids changing views of a Function in place

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        return (do, *(None for _ in ctx.saved_tensors))  # reading saved_tensors compares version counters
