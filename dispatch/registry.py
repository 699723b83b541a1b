"""Choice of an implementation: `resolve` selects a row of the table, `explain` gives the reasons for all rows.

`backend=` takes precedence over the environment variable NSA_KERNELS_BACKEND, and both over the first row that supports
the call. A named backend never falls back to another; if no row supports the call, BackendError gives the reason of
every row. A call that a better row supports, but for packages that are missing or of another version, warns once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from dispatch.impl import Call, Impl
from dispatch.table import ROWS

ENVIRONMENT_VARIABLE = "NSA_KERNELS_BACKEND"


class BackendError(RuntimeError):
    """No implementation supports a call. The message lists every row of the op with its reason.

    Examples:
        >>> import torch
        >>> import dispatch
        >>> try:
        ...     dispatch.resolve(dispatch.Call("nsa", "cpu", torch.float32), backend="cute")
        ... except dispatch.BackendError as error:
        ...     print(str(error).splitlines()[1])
          cute: runs on CUDA devices, got cpu
    """


@dataclass(frozen=True)
class Verdict:
    """A row, and the reason why it does not support a call, if any.

    Args:
        impl: the row.
        reason: reason why it does not support the call, or None if it does.

    Examples:
        >>> import torch
        >>> import dispatch
        >>> [verdict.reason is None for verdict in dispatch.explain(dispatch.Call("nsa", "cpu", torch.float32))]
        [False, False, True]
    """

    impl: Impl
    reason: str | None


def explain(call: Call, backend: str | None = None, rows: Sequence[Impl] | None = None) -> list[Verdict]:
    """Check which rows of an op support a call, with the reason for each that does not.

    Args:
        call: the op and properties of the call.
        backend: name of a backend; rows of other backends are reported as not requested. Default: None, which reads
            NSA_KERNELS_BACKEND.
        rows: rows to choose from, best first. Default: None, which means the table of this package.

    Returns:
        A Verdict for each row of the op, best first.

    Raises:
        TypeError: for a backend that is not a string.
        ValueError: for an unknown op or backend.

    Examples:
        >>> import torch
        >>> import dispatch
        >>> for verdict in dispatch.explain(dispatch.Call("nsa", "cpu", torch.float32)):
        ...     print(verdict.impl.backend, verdict.reason)
        cute runs on CUDA devices, got cpu
        triton runs on CUDA devices, and on the CPU when named, with TRITON_INTERPRET=1, got cpu
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
    """Return the first row that supports a call, of the named backend if there is one.

    Args:
        call: the op and properties of the call.
        backend: name of a backend. Default: None, which reads NSA_KERNELS_BACKEND.
        rows: rows to choose from, best first. Default: None, which means the table of this package.

    Returns:
        The row; `load()` gives its function.

    Raises:
        TypeError: for a backend that is not a string.
        ValueError: for an unknown op or backend.
        BackendError: if no row supports the call, with the reason of each.

    Examples:
        >>> import torch
        >>> import dispatch
        >>> dispatch.resolve(dispatch.Call("attention_residual", "cpu", torch.float32)).backend
        'reference'
    """
    candidates = _rows_of(call.op, rows)
    name, _ = _requested(backend, candidates)
    call = replace(call, named=True) if name is not None else call
    for i, impl in enumerate(candidates):
        if name in (None, impl.backend) and impl.refusal(call) is None:
            if name is None:
                _warn_of_better(call, candidates[:i], impl)
            return impl
    listing = "\n".join(f"  {v.impl.label}: {v.reason}" for v in explain(call, backend, rows))
    raise BackendError(f"no backend can run {call.op} on {call.device} in {short_name(call.dtype)}:\n{listing}")


def _warn_of_better(call: Call, rows: Sequence[Impl], chosen: Impl) -> None:
    """Warn once if a better row than the chosen one lacks only its packages."""
    for impl in rows:
        if impl.backend != chosen.backend and impl.supports(call):
            _warn_once(f"{call.op} runs on {chosen.label}, not on {impl.label}: {impl.refusal(call)}")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _rows_of(op: str, rows: Sequence[Impl] | None) -> list[Impl]:
    rows = ROWS if rows is None else rows
    found = [impl for impl in rows if impl.op == op]
    if not found:
        raise ValueError(f"op must be one of {', '.join(sorted({impl.op for impl in rows}))}, got {op!r}")
    return found


def _requested(backend: str | None, candidates: Sequence[Impl]) -> tuple[str | None, str]:
    """The backend requested by name, or None, and the argument or variable that names it."""
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


def short_name(dtype_or_layout: torch.dtype | torch.layout) -> str:
    """Name in messages: bfloat16 for torch.bfloat16."""
    return str(dtype_or_layout).removeprefix("torch.")
