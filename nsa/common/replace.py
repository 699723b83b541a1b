"""`dataclasses.replace` for code that `torch.compile` may trace: Dynamo of torch 2.6 cannot follow the original."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def replace(instance: T, **changes: Any) -> T:
    """Copy a dataclass instance, all of whose fields are init parameters, with some fields changed."""
    own = {field.name: getattr(instance, field.name) for field in fields(instance)}  # type: ignore[arg-type]
    return type(instance)(**{**own, **changes})
