"""How a call finds its implementation: rows (Impl), the facts of a call (Call), and the rule (resolve, explain).

`backend=` takes precedence over the environment variable NSA_KERNELS_BACKEND, and both over the first row that can run.
A named backend never falls back to another; when no row can run, BackendError gives the reason of every row.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from dispatch.device import package_advice, package_problem

ENVIRONMENT_VARIABLE = "NSA_KERNELS_BACKEND"


class BackendError(RuntimeError):
    """No implementation can run a call. The message lists every row of the op with its reason.

    Example:
        >>> import torch
        >>> import dispatch
        >>> try:
        ...     dispatch.resolve(dispatch.Call("nsa", "cpu", torch.float32), backend="cute")
        ... except dispatch.BackendError as error:
        ...     print(str(error).splitlines()[1])
          cute: runs on CUDA devices, got cpu
    """


@dataclass(frozen=True)
class Impl:
    """One row of the table: an implementation of an op.

    Args:
        op: the op's name, a key of `dispatch.OPS`.
        backend: its name for users. Several rows may have the same: a backend can come first for some calls and later
            for others.
        target: the function, as "module:attribute", imported on first use.
        check: a predicate on a Call, as "module:attribute", in a module that needs torch alone. It returns the reason
            why the row cannot run the call, or None.
        packages: modules of dispatch.device.PACKAGES that it needs. Default: none.
        training: module with the functions that the op's autograd calls (see the op's autograd.py). Default: None, for
            an implementation that is differentiable itself.

    Example:
        >>> import torch
        >>> import dispatch
        >>> impl = dispatch.resolve(dispatch.Call("nsa", "cpu", torch.float32))
        >>> impl.backend, impl.target
        ('reference', 'nsa.reference:nsa')
    """

    op: str
    backend: str
    target: str
    check: str
    packages: tuple[str, ...] = ()
    training: str | None = None

    def load_training(self) -> Any:
        """The module named by `training`, or None."""
        return None if self.training is None else importlib.import_module(self.training)

    def load(self) -> Callable[..., Any]:
        """The implementation. Raises whatever its import raises."""
        implementation: Callable[..., Any] = _attribute(self.target)
        return implementation

    def refusal(self, call: Call) -> str | None:
        """The reason why this row cannot run the call, or None."""
        reason: str | None = _attribute(self.check)(call)
        if reason is not None:
            return reason
        for module in self.packages:
            reason = package_problem(module, call.device_type)
            if reason is not None:
                return reason
        try:
            self.load()
        except (Exception, SystemExit) as error:  # whatever a broken dependency raises at import is the reason
            module = self.target.partition(":")[0]
            return f"importing {module} failed: {type(error).__name__}: {error}{package_advice(self.packages)}"
        return None


@dataclass(frozen=True)
class Call:
    """The facts by which a backend is chosen; none of them needs tensor values.

    Args:
        op: the op's name, a key of `dispatch.OPS`.
        device: of the tensors; a string where torch may not know the type, such as "npu" without torch_npu.
        dtype: of the tensors.
        backward: whether gradients are needed. Default: False.
        named: whether the user asked for this backend by name; set by `explain` and `resolve`. Default: False.
        options: what the op adds, such as sizes and flags. A row's check ignores what it does not know. Default: none.

    Example:
        >>> import torch
        >>> import dispatch
        >>> dispatch.Call("nsa", torch.device("cuda", 0), torch.bfloat16).device_type
        'cuda'
    """

    op: str
    device: torch.device | str
    dtype: torch.dtype
    backward: bool = False
    named: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def device_type(self) -> str:
        return str(self.device).partition(":")[0]


@dataclass(frozen=True)
class Verdict:
    """A row, and whether it can run a call.

    Args:
        impl: the row.
        reason: why it cannot run the call; None: it can.

    Example:
        >>> import torch
        >>> import dispatch
        >>> [verdict.reason is None for verdict in dispatch.explain(dispatch.Call("nsa", "cpu", torch.float32))]
        [False, True]
    """

    impl: Impl
    reason: str | None


def explain(call: Call, backend: str | None = None, rows: Sequence[Impl] | None = None) -> list[Verdict]:
    """Whether each row of an op can run a call, and the reason where it cannot.

    Args:
        call: the op and the facts of the call.
        backend: as users name it; rows of other backends are refused as not asked for. Default: None, which reads
            NSA_KERNELS_BACKEND.
        rows: rows to choose from, best first. Default: None, which means the table of this package.

    Returns:
        A Verdict for each row of the op, best first.

    Raises:
        TypeError: for a backend that is no string.
        ValueError: for an unknown op or backend.

    Example:
        >>> import torch
        >>> import dispatch
        >>> for verdict in dispatch.explain(dispatch.Call("nsa", "cpu", torch.float32)):
        ...     print(verdict.impl.backend, verdict.reason)
        cute runs on CUDA devices, got cpu
        reference None
    """
    candidates = _rows_of(call.op, rows)
    name, source = _requested(backend, candidates)
    verdicts = []
    for impl in candidates:
        if name is not None and impl.backend != name:
            verdicts.append(Verdict(impl, f"not asked for: {source} names {name!r}"))
        else:
            verdicts.append(Verdict(impl, impl.refusal(replace(call, named=name is not None))))
    return verdicts


def resolve(call: Call, backend: str | None = None, rows: Sequence[Impl] | None = None) -> Impl:
    """The row that runs a call: the first that can, of the named backend if there is one.

    Args:
        call: the op and the facts of the call.
        backend: as users name it. Default: None, which reads NSA_KERNELS_BACKEND.
        rows: rows to choose from, best first. Default: None, which means the table of this package.

    Returns:
        The row; `load()` gives its function.

    Raises:
        TypeError: for a backend that is no string.
        ValueError: for an unknown op or backend.
        BackendError: when no row can run the call, with the reason of each.

    Example:
        >>> import torch
        >>> import dispatch
        >>> dispatch.resolve(dispatch.Call("attention_residual", "cpu", torch.float32)).backend
        'reference'
    """
    candidates = _rows_of(call.op, rows)
    name, _ = _requested(backend, candidates)
    call = replace(call, named=True) if name is not None else call
    for impl in candidates:
        if name in (None, impl.backend) and impl.refusal(call) is None:
            return impl
    listing = "\n".join(f"  {v.impl.backend}: {v.reason}" for v in explain(call, backend, rows))
    raise BackendError(f"no backend can run {call.op} on {call.device} in {short_name(call.dtype)}:\n{listing}")


def _rows_of(op: str, rows: Sequence[Impl] | None) -> list[Impl]:
    if rows is None:
        from dispatch.table import ROWS  # the table names Impl, so it imports this module first

        rows = ROWS
    found = [impl for impl in rows if impl.op == op]
    if not found:
        raise ValueError(f"op must be one of {', '.join(sorted({impl.op for impl in rows}))}, got {op!r}")
    return found


def _requested(backend: str | None, candidates: Sequence[Impl]) -> tuple[str | None, str]:
    """The backend asked for by name, or None, and which argument or variable names it."""
    source = "backend"
    if backend is None:
        backend, source = os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE
    if backend is None:
        return None, source
    if not isinstance(backend, str):
        raise TypeError(f"{source} must be a string or None, got {backend!r}")
    known = list(dict.fromkeys(impl.backend for impl in candidates))
    if backend not in known:
        raise ValueError(f"{source} must be one of {', '.join(known)} for {candidates[0].op}, got {backend!r}")
    return backend, source


@cache
def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def short_name(dtype_or_layout: torch.dtype | torch.layout) -> str:
    """Its name in messages: bfloat16 for torch.bfloat16."""
    return str(dtype_or_layout).removeprefix("torch.")
