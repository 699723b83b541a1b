"""Choice of an implementation, and the calls that were accepted: calls equal to one of them are not checked again.

Checks that read no values depend only on options and on tensors' sizes, dtypes and devices. Each op says on which: the
`properties` of a call, or None for a call that must be checked each time.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

import dispatch
from dispatch.registry import ENVIRONMENT_VARIABLE

DEVICES = {"cuda"}
"""Device types whose host time matters so much that accepted calls are remembered."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor types with storage and without overridden behavior."""

MOST = 4096
"""Maximum number of accepted calls; all are forgotten when there are more."""

_ACCEPTED: dict[Hashable, dispatch.Impl] = {}


def is_remembered(x: Tensor, backend: object) -> bool:
    """True if calls with this first tensor and `backend` are remembered: not while sizes may be symbols."""
    if torch.compiler.is_compiling() or not (backend is None or isinstance(backend, str)):
        return False
    return type(x) in PLAIN and x.device.type in DEVICES


def properties_of(tensors: Iterable[Any], *options: Hashable) -> Hashable:
    """Properties of a call with these tensors, some None; None for unusual tensors."""
    properties: list[Hashable] = [*options]
    for x in tensors:
        if x is None:
            properties += (None,)
        elif type(x) in PLAIN and not x.is_nested and x.layout is torch.strided:
            properties += (x.shape, x.dtype, x.device)
        else:
            return None
    return tuple(properties)


def accepted(properties: Hashable) -> dispatch.Impl | None:
    """The implementation of an accepted call with these properties, or None."""
    return None if properties is None else _ACCEPTED.get((os.environ.get(ENVIRONMENT_VARIABLE), properties))


def find_impl(call: dispatch.Call, backend: str | None, properties: Hashable = None) -> dispatch.Impl:
    """`dispatch.resolve` of a checked call, which is accepted with these properties.

    On the meta device the op's last row: results have the same shapes for every backend.

    Raises:
        ValueError: for an unknown backend.
        dispatch.BackendError: if no backend supports the call.
    """
    if call.device_type == "meta":
        return dispatch.explain(call, backend)[-1].impl  # raises for an unknown name
    impl = dispatch.resolve(call, backend)
    if properties is not None:
        if len(_ACCEPTED) >= MOST:
            _ACCEPTED.clear()
        _ACCEPTED[os.environ.get(ENVIRONMENT_VARIABLE), properties] = impl
    return impl
