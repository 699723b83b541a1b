"""A row of the table (Impl) and the facts of a call that it may look at (Call)."""

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


@cache
def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
