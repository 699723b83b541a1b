"""A checked call of NSA and the backend that takes it.

Where no value is read, what is checked follows from options and from tensors' sizes, dtypes and devices. On a GPU,
where the host's time counts, calls like one that was accepted are not checked again.
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
"""Types of devices for which accepted calls are remembered."""

MOST = 256
"""Accepted calls that are remembered; then all are forgotten."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that have memory and no rules of their own."""

READ = ("cu_seqlens", "cu_seqlens_k", "q_start", "q_sum")
"""Inputs of which values may be read, or which change what a call is."""

_ACCEPTED: dict[Any, dispatch.Impl] = {}


class ResolvedCall(NamedTuple):
    """Checked arguments, without an integer q_start, and the implementation that runs them."""

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
    """Check everything and find the backend that takes the call.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: when no backend can run the call.
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
    """All accepted calls, for tests."""
    _ACCEPTED.clear()


def _facts(inputs: NSAInputs, config: NSAConfig, *flags: object) -> Any:
    """All that checks and the choice of a backend depend on; None: they depend on more, or the call is odd.

    `narrow` changes nothing of a call that has facts.
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
