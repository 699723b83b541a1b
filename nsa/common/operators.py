"""Registration of PyTorch operators, and the conditions for a call to run as one.

torch.compile(fullgraph=True) treats an operator as opaque: Dynamo cannot trace validation and dispatch, and need not,
since the implementation is the eager path. Each op registers a forward with autograd and a backward whose own
derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nsa.common.derivatives import raise_double_backward

F = TypeVar("F", bound=Callable[..., Any])


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


def register_double_backward_error(name: str, op: str) -> None:
    """Make the derivative of a backward operator raise."""

    def differentiate(*_: Any, **__: Any) -> None:
        raise_double_backward(op)

    torch.library.register_autograd(name, differentiate)
