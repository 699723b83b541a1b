"""Execution of the ops: a checked call, run eagerly with autograd, or as a PyTorch operator with autograd and a fake.

An op turns its arguments into a ResolvedCall, whose methods say what is the op's own: results, gradients and their
shapes. This module does the rest: the autograd.Function of eager training, results on the meta device, autocast, errors
for second derivatives, and registration with torch.library.

torch.compile(fullgraph=True) treats an operator as opaque: Dynamo cannot trace validation and dispatch, and need not,
since the implementation is the eager path. Eager calls do not use the operators, because autograd of an operator with
as many arguments as nsa_kernels::saving costs 0.4 ms of host time per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import (
    determinism_is_asked_for,
    forbid_double_backward,
    guard_inplace_changes,
    needs_grad,
    raise_double_backward,
    recompute_gradients,
)

F = TypeVar("F", bound=Callable[..., Any])


# Calls


@dataclass
class ResolvedCall:
    """A checked call of an op, and the implementation that runs it.

    Here `implementation(q, k, v, *other tensors, **options) -> (out, saved, ...)`; ops override what differs. A backend
    trains through the module in its table row (dispatch.Impl.training). One without, such as a reference, is
    differentiable itself: it saves nothing, and is rerun in the backward of an operator.
    """

    impl: dispatch.Impl
    backward: bool
    """True if gradients are needed; an argument of operators, because tensors inside of one do not require any."""
    tensors: tuple[Any, ...]
    """The differentiable tensors, then the others."""
    options: dict[str, Any]

    op: ClassVar[str]
    """Name in errors."""
    saves_out: ClassVar[bool] = True
    """True if the backward reads out."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """The differentiable tensors."""
        return self.tensors[:3]

    @property
    def forward_options(self) -> dict[str, Any]:
        """The options of the implementation; its backward gets all."""
        return self.options

    def with_tensors(self) -> Callable[[tuple[Any, ...]], ResolvedCall]:
        """A function that makes this call with other tensors of the same kinds, and holds none of these."""
        kind, impl, options = type(self), self.impl, self.options
        return lambda tensors: kind(impl, True, tensors, options)

    def forward(self) -> Tensor:
        """out alone."""
        out: Tensor = self.impl.load()(*self.tensors, **self.forward_options)[0]
        return out

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        """out, and the tensors that `gradients` needs in addition to `tensors`."""
        out, saved, *_ = self.impl.load()(*self.tensors, **self.forward_options)
        return out, [] if self.impl.training is None else [saved]

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the differentiable arguments that are given; out is None unless `saves_out`."""
        training = self.impl.load_training()
        if training is None:
            return self.recomputed(self.sources, do)
        return [*training.backward(do, *self.tensors, out, *saved, **self.options)]

    def recomputed(self, sources: Sequence[Tensor], do: Tensor) -> list[Tensor]:
        """Gradients of the sources, given in any dtype, by rerunning a differentiable implementation."""
        make, others = self.with_tensors(), self.tensors[len(sources) :]
        return recompute_gradients(lambda *leaves: make((*leaves, *others)).forward(), sources, do)

    def by_tensor(self, gradients: list[Tensor]) -> Sequence[Tensor]:
        """Gradients of the sources; more than `gradients` if an argument is a list."""
        return gradients

    # Shapes and dtypes of results, for the meta device and for torch.compile, where sizes may be symbols

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        """Tensors like those of `saving`, made without running anything."""
        training = self.impl.load_training()
        saved = [] if training is None else [training.kept_like(*self.sources, **self.forward_options)]
        return empty_out(*self.tensors), saved

    def empty_gradients(self) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in self.sources]


def empty_out(q: Tensor, _k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """out of attention without values: `[...,H,D_v]` for q `[...,H,D]`, contiguous."""
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


# Eager calls


def run(call: ResolvedCall) -> Tensor:
    """Run a call eagerly; the result is differentiable, on the meta device too."""
    kind = call.tensors[0].device.type
    with autocast_off(kind):
        if kind == "meta":
            return depending_on(call.empty()[0], call.tensors)
        if call.impl.training is None:
            return guard_inplace_changes(call.forward(), *call.tensors)
        if not call.backward:
            return call.forward()
        out: Tensor = EagerFunction.apply(call, *call.tensors)
        return out


def depending_on(out: Tensor, tensors: Iterable[Tensor | None]) -> Tensor:
    """`out` of the meta device, differentiable any number of times with respect to the tensors."""
    sums = [x.sum() for x in tensors if x is not None and needs_grad(x)]
    return out + torch.stack(sums).sum().exp() if sums else out


class EagerFunction(torch.autograd.Function):
    """One eager call. Tensors are separate arguments so that autograd tracks them."""

    @staticmethod
    def forward(ctx: Any, call: ResolvedCall, *tensors: Tensor | None) -> Tensor:
        out, saved = call.saving()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out if call.saves_out else None, *saved)
        ctx.count, ctx.call = len(tensors), call.with_tensors()  # ctx must hold no tensor that autograd frees
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: torch.utils.checkpoint frees recomputed tensors when they are read
        count: int = ctx.count
        if do is None:
            return (None,) * (1 + count)
        tensors, out, saved = kept[:count], kept[count], kept[count + 1 :]
        call: ResolvedCall = ctx.call(tensors)
        with torch.no_grad(), autocast_off(do.device.type):
            gradients = call.by_tensor(call.gradients(do, out, saved))
        results = [x if needs else None for x, needs in zip(gradients, ctx.needs_input_grad[1:], strict=False)]
        results += [None] * (count - len(results))
        return (None, *forbid_double_backward(call.op, results, do, *tensors))


# Operators


def break_graph(function: F) -> F:
    """`torch.compiler.disable` with the function's type: a call is a graph break and runs eagerly."""
    return cast(F, torch.compiler.disable(function))


def runs_as_operator(x: object) -> bool:
    """True if a call on this tensor runs as one operator: in torch.compile; for fake tensors, which need its fake; and
    in selective checkpointing, whose policy must decide on the whole call and not on in-place writes inside it.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return True
    modes = [type(mode).__mro__ for mode in _get_current_dispatch_mode_stack()]
    return any(kind.__module__ == "torch.utils.checkpoint" for kinds in modes for kind in kinds)


def register_operator(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `name` ("nsa_kernels::...") for all devices.

    Args:
        schema: arguments and results, as for torch.library.define.
        fake: the same call on fake tensors, which returns results without values.
    """
    torch.library.define(name, schema)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)


def register_forward(
    name: str, schema: str, resolve: Callable[..., ResolvedCall], fake: Callable[..., Any] | None = None
) -> None:
    """Define the operator of the calls that `resolve` makes of the schema's arguments, given as keywords.

    Its results are out, or out and what backward needs: a list of tensors, or one, which is empty if nothing is saved.

    Args:
        fake: as in `register_operator`. Default: None, which checks the call, too.
    """
    parsed = torch._C.parse_schema(name + schema)
    names, (_, *saves) = [argument.name for argument in parsed.arguments], parsed.returns

    def call_of(arguments: Sequence[Any], keywords: dict[str, Any]) -> ResolvedCall:
        return resolve(**dict(zip(names, arguments, strict=False)), **keywords)

    def results(out: Tensor, saved: list[Tensor]) -> Any:
        if not saves:
            return out
        return out, saved if isinstance(saves[0].type, torch.ListType) else (saved or [out.new_empty(0)])[0]

    @torch.no_grad()
    def implementation(*arguments: Any, **keywords: Any) -> Any:
        call = call_of(arguments, keywords)
        with autocast_off(call.tensors[0].device.type):
            out, saved = call.saving() if saves else (call.forward(), [])
        return results(out.contiguous(), saved)

    def empty(*arguments: Any, **keywords: Any) -> Any:
        return results(*call_of(arguments, keywords).empty())

    register_operator(name, schema, implementation, fake or empty)


def register_backward(
    op: str,
    forward: tuple[str, str],
    backward: tuple[str, str],
    resolve: Callable[..., ResolvedCall],
    differentiable: Sequence[str],
) -> None:
    """Define the operator of an op's backward, and make it the derivative of its forward.

    Args:
        op: its name in the error of a second derivative.
        forward: name and schema of an operator of `register_forward`.
        backward: name and schema. Arguments are `do`, `saved`, and those of forward; also `out` if it is read, and
            `deterministic`, PyTorch's flag in forward, on which compiled graphs are guarded, if forward has none.
        resolve: makes the call of all arguments but `do`, `out` and `saved`.
        differentiable: the first arguments of forward. Each has a gradient among backward's results, which is empty for
            an absent tensor, and one tensor for a list.
    """
    parsed, own = (torch._C.parse_schema(name + schema) for name, schema in (forward, backward))
    names, own_names = ([argument.name for argument in schema.arguments] for schema in (parsed, own))
    others = sum(not argument.kwarg_only for argument in parsed.arguments) - len(differentiable)
    kind = list if isinstance(own.returns[0].type, torch.ListType) else tuple

    def given(arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Tensor, Any, list[Tensor], dict[str, Any]]:
        """do, out, saved, and the arguments of `resolve`."""
        rest = {**dict(zip(own_names, arguments, strict=False)), **keywords}
        do, out, saved = rest.pop("do"), rest.pop("out", None), rest.pop("saved")
        return do, out, saved if isinstance(saved, list) else [saved], rest

    def results(do: Tensor, gradients: list[Tensor], rest: dict[str, Any]) -> Any:
        remaining = iter(gradients)
        return kind(do.new_empty(0) if rest[name] is None else next(remaining) for name in differentiable)

    @torch.no_grad()
    def implementation(*arguments: Any, **keywords: Any) -> Any:
        do, out, saved, rest = given(arguments, keywords)
        with autocast_off(do.device.type):
            gradients = resolve(**rest).gradients(do, out, saved)
        return results(do, [x.contiguous() for x in gradients], rest)

    def fake(*arguments: Any, **keywords: Any) -> Any:
        do, _, _, rest = given(arguments, keywords)
        return results(do, resolve(**rest).empty_gradients(), rest)

    def save(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        out, saved = output
        ctx.mark_non_differentiable(*(saved if isinstance(saved, list) else [saved]))
        ctx.set_materialize_grads(False)
        values = {"deterministic": determinism_is_asked_for(), **dict(zip(names, inputs, strict=False))}
        values.update(keyword_only_inputs or {}, out=out, saved=saved)
        leaves, ctx.structure = tree_flatten({name: values[name] for name in own_names if name != "do"})
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves))
        ctx.no_tensors = [None if isinstance(x, Tensor) else x for x in leaves]

    def differentiate(ctx: Any, do: Tensor | None, *_: Any) -> Any:
        leaves = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.no_tensors, strict=True)]
        values = tree_unflatten(leaves, ctx.structure)
        gradients = [None] * len(differentiable) if do is None else packet(do=do, **values)

        def own(x: Any, gradient: Tensor | None) -> Any:
            if isinstance(x, list):
                return [None] * len(x) if gradient is None else by_member(gradient, x)
            return None if x is None else gradient

        found = (own(values[name], gradient) for name, gradient in zip(differentiable, gradients, strict=True))
        return (*found, *[None] * others)

    def refuse(*_: Any, **__: Any) -> None:
        raise_double_backward(op)

    register_operator(*backward, implementation, fake)
    packet = getattr(torch.ops.nsa_kernels, backward[0].partition("::")[2])
    torch.library.register_autograd(forward[0], differentiate, setup_context=save)
    torch.library.register_autograd(backward[0], refuse)


def by_member(gradient: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a list's tensors, from one tensor that stacks them unless a single tensor has their dimensions."""
    return [gradient] if gradient.dim() == tensors[0].dim() else list(gradient.unbind(0))
