"""Impl, a row of the table of implementations, and Call, the properties of a call that its check reads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from dispatch.device import package_advice, package_problem


@dataclass(frozen=True)
class Impl:
    """One row of the table: an implementation of an op.

    Args:
        op: the op's name, a key of `dispatch.OPS`.
        backend: name of the backend. Several rows may share it: a backend can come first for some calls and later for
            others.
        target: the function, as "module:attribute", imported on first use.
        check: a function of a Call, as "module:attribute", in a module that needs only torch. It returns the reason why
            the row does not support the call, or None.
        packages: required modules in dispatch.device.PACKAGES. Default: none.
        training: module with the functions called by the op's autograd (see docs/architecture.md). Default: None, for
            an implementation that is differentiable itself.
        calls: description of the calls that the row is for, if the op has another row of this backend. Default: "",
            which means all.

    Examples:
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
    calls: str = ""

    @property
    def label(self) -> str:
        """Name of the row for display."""
        return f"{self.backend} ({self.calls})" if self.calls else self.backend

    def load_training(self) -> Any:
        """The module named by `training`, or None."""
        return None if self.training is None else importlib.import_module(self.training)

    def load(self) -> Callable[..., Any]:
        """Import and return the implementation. Raises whatever its import raises."""
        implementation: Callable[..., Any] = _attribute(self.target)
        return implementation

    def supports(self, call: Call) -> bool:
        """Check the call alone.

        Args:
            call: the op and properties of the call.

        Returns:
            True if the row supports the call where its packages are installed.
        """
        return _attribute(self.check)(call) is None

    def refusal(self, call: Call) -> str | None:
        """Reason why this row does not support the call, or None."""
        reason: str | None = _attribute(self.check)(call)
        if reason is not None:
            return reason
        for module in self.packages:
            reason = package_problem(module, call.device_type)
            if reason is not None:
                return reason
        try:
            self.load()
        except (Exception, SystemExit) as error:  # any error of a broken dependency at import is the reason
            module = self.target.partition(":")[0]
            return f"importing {module} failed: {type(error).__name__}: {error}{package_advice(self.packages)}"
        return None


@dataclass(frozen=True)
class Call:
    """The properties of a call that determine the backend; none of them needs tensor values.

    Args:
        op: the op's name, a key of `dispatch.OPS`.
        device: device of the tensors; a string if torch may not know the type, such as "npu" without torch_npu.
        dtype: dtype of the tensors.
        backward: True if gradients are needed. Default: False.
        named: True if the user requested the backend by name; set by `explain` and `resolve`. Default: False.
        options: op-specific properties, such as sizes and flags. Checks ignore unknown ones. Default: none.

    Examples:
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


@cache
def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
