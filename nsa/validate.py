"""Argument checks of NSA, and the choice of a backend.

Checks that read no values depend only on options and on tensors' sizes, dtypes and devices. On a GPU, where host time
matters, calls equal to an accepted one in these are not checked again.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dispatch
from dispatch.registry import ENVIRONMENT_VARIABLE
from nsa import meta
from nsa.common.checks import check_bool
from nsa.common.resolve import resolve as resolve_call
from nsa.config import NSAConfig
from nsa.inputs import NSAInputs

DEVICES = {"cuda"}
"""Device types for which accepted calls are cached."""

MOST = 256
"""Maximum number of cached calls; the cache is cleared when it is full."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor types with storage and without overridden behavior."""

READ = ("cu_seqlens", "cu_seqlens_k", "q_start", "q_sum")
"""Inputs whose values may be read, or which change the kind of call."""

_ACCEPTED: dict[Any, dispatch.Impl] = {}


class ResolvedCall(NamedTuple):
    """Checked arguments, with an integer q_start already applied, and the implementation that runs them."""

    inputs: NSAInputs
    config: NSAConfig
    deterministic: bool
    recompute: bool
    impl: dispatch.Impl


def resolve(
    inputs: NSAInputs,
    config: NSAConfig,
    *,
    deterministic: bool,
    recompute: bool,
    backend: str | None,
    needs_grad: bool,
) -> ResolvedCall:
    """Check all arguments and find a backend that supports the call.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: if no backend supports the call.
    """
    check_bool("deterministic", deterministic)
    check_bool("recompute", recompute)
    facts = _facts(inputs, config, deterministic, recompute, backend, needs_grad)
    accepted = _ACCEPTED.get(facts)
    if accepted is not None:
        return ResolvedCall(inputs, config, deterministic, recompute, accepted)
    inputs.check(config)
    inputs = inputs.narrow(config)
    call = dispatch.Call(
        "nsa",
        inputs.q.device,
        inputs.q.dtype,
        backward=needs_grad,
        options={"inputs": inputs, "config": config, "deterministic": deterministic, "recompute": recompute},
    )
    impl = resolve_call(call, backend, meta=meta.FORWARD)
    if facts is not None:
        if len(_ACCEPTED) >= MOST:
            _ACCEPTED.clear()
        _ACCEPTED[facts] = impl
    return ResolvedCall(inputs, config, deterministic, recompute, impl)


def forget() -> None:
    """Clear the cache of accepted calls, for tests."""
    _ACCEPTED.clear()


def _facts(inputs: NSAInputs, config: NSAConfig, *flags: object) -> Any:
    """Key of all inputs of the checks and the choice of a backend; None if these depend on values, or for unusual
    calls.

    `narrow` does not change a call that has a key.
    """
    backend, q = flags[2], inputs.q
    if not (backend is None or isinstance(backend, str)) or config.debug or config.compress != "mean":
        return None
    if type(q) not in PLAIN or q.device.type not in DEVICES:
        return None
    facts = [config, flags, os.environ.get(ENVIRONMENT_VARIABLE)]
    for name, x in vars(inputs).items():
        if x is not None:
            if type(x) not in PLAIN or name in READ or x.is_nested or x.layout is not torch.strided:
                return None
            facts += (name, x.shape, x.dtype, x.device)
    return tuple(facts)
