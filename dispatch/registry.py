"""How a call finds its implementation: the rule (resolve, explain) over the rows of table.py.

`backend=` goes before the environment variable NSA_KERNELS_BACKEND, which goes before the first row that can run.
A named backend never falls back to another; when nothing can run, BackendError says why for every row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dispatch.impl import Call, Impl
from dispatch.table import ROWS

ENVIRONMENT_VARIABLE = "NSA_KERNELS_BACKEND"


class BackendError(RuntimeError):
    """No implementation can run a call. The message lists every row with its reason."""


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
    rows = ROWS if rows is None else rows
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


def short_name(of_torch: torch.dtype | torch.layout) -> str:
    """As messages write it: bfloat16 for torch.bfloat16."""
    return str(of_torch).removeprefix("torch.")
