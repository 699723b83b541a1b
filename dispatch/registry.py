"""How a call finds its implementation: rows (Impl), the facts of a call (Call), and the rule (resolve, explain).

`backend=` goes before the environment variable NSA_KERNELS_BACKEND, which goes before the first row that can run.
A named backend never falls back to another; when nothing can run, BackendError says why for every row.
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
    """No implementation can run a call. The message lists every row with its reason."""


@dataclass(frozen=True)
class Impl:
    """One row of the table: an implementation of an op. Strings are "module:attribute", imported on first use."""

    op: str
    backend: str
    """Its name for users. Rows may share one, as one backend may be best at some calls and still run others."""
    target: str
    check: str
    """Predicate on a Call, in a module that needs torch alone: the reason why the row cannot run it, or None."""
    packages: tuple[str, ...] = ()
    """Modules of dispatch.device.PACKAGES that it needs."""
    training: str | None = None
    """A module with what the op's autograd needs of this implementation; None: it is differentiable itself."""

    def load_training(self) -> Any:
        """The module named by `training`, or None."""
        return None if self.training is None else importlib.import_module(self.training)

    def load(self) -> Callable[..., Any]:
        """The implementation. Raises whatever importing it raises."""
        implementation: Callable[..., Any] = _attribute(self.target)
        return implementation

    def refusal(self, call: Call) -> str | None:
        """Why this row cannot run the call, or None."""
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
    """What a row may look at: facts that need no tensor values.

    `options` holds what the op adds, such as sizes and flags; a check reads what it knows and ignores the rest.
    """

    op: str
    device: torch.device | str
    """As a string where torch may not know the type, as "npu" without torch_npu."""
    dtype: torch.dtype
    backward: bool = False
    named: bool = False
    """The user asked for this backend by name."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def device_type(self) -> str:
        return str(self.device).partition(":")[0]


@dataclass(frozen=True)
class Verdict:
    """A row and why it cannot run a call; `reason` None means that it can."""

    impl: Impl
    reason: str | None


def explain(call: Call, backend: str | None = None, rows: Sequence[Impl] | None = None) -> list[Verdict]:
    """Every row of the op with its reason; rows other than a named backend's are refused as not asked for.

    Args:
        backend: as in a call; None reads NSA_KERNELS_BACKEND.
        rows: None for the table of this package.

    Raises:
        ValueError: for an unknown op or backend.
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
    """The row that runs the call.

    Raises:
        ValueError: for an unknown op or backend.
        BackendError: when no row can run it.
    """
    candidates = _rows_of(call.op, rows)
    name, _ = _requested(backend, candidates)
    asked = replace(call, named=True) if name is not None else call
    for impl in candidates:
        if name in (None, impl.backend) and impl.refusal(asked) is None:
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
    """The backend asked for by name, if any, and where."""
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


def short_name(of_torch: torch.dtype | torch.layout) -> str:
    """As messages write it: bfloat16 for torch.bfloat16."""
    return str(of_torch).removeprefix("torch.")
