"""A checked call of NSA and the backend that takes it."""

from __future__ import annotations

from typing import NamedTuple

import dispatch
from nsa import meta
from nsa.common.checks import check_bool
from nsa.common.resolve import resolve as resolve_call
from nsa.config import NSAConfig
from nsa.inputs import NSAInputs


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
    return ResolvedCall(inputs, config, deterministic, recompute, impl)
