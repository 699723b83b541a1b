"""A launch as JSON: what a process with another Triton needs to compile the same kernel with the same specialisation.

Sizes do not appear. Triton specialises an int by whether it is 1, a multiple of 16 or needs 64 bits, and a pointer by
its alignment; one representative describes each class, so that launches of all shapes share their lowered kernel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from ascend_kernels.launch import Launch
from dispatch.registry import short_name

ALIGNMENT = 16


def describe(launch: Launch) -> dict[str, Any]:
    function = launch.kernel.fn
    unspecialised = {parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize}
    return {
        "file": str(Path(function.__globals__["__file__"]).resolve()),
        "module": function.__module__,
        "kernel": function.__qualname__,
        "sources": sources(launch.kernel),
        "arguments": {
            name: describe_argument(value, specialised=name not in unspecialised)
            for name, value in launch.arguments.items()
        },
        "constants": {name: describe_constant(name, value) for name, value in launch.constants.items()},
        "options": launch.options,
    }


@functools.cache
def sources(kernel: Any) -> tuple[str, ...]:
    """Of the kernel and all that it calls: what is imported elsewhere by its name must have the same."""
    found: list[str] = []
    waiting = [kernel]
    while waiting:
        one = waiting.pop()
        if one.src not in found:
            found.append(one.src)
            named = set(re.findall(r"\w+", one.src))
            its_globals = one.fn.__globals__.items()
            waiting += [value for name, value in its_globals if name in named and isinstance(value, type(kernel))]
    return tuple(sorted(found))


def describe_argument(value: Any, *, specialised: bool = True) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"dtype": short_name(value.dtype), "aligned": value.data_ptr() % ALIGNMENT == 0}
    if isinstance(value, bool) or value is None:
        return {"value": value}
    if isinstance(value, int):
        return {"value": representative(value, specialised=specialised)}
    if isinstance(value, float):
        return {"value": 0.5}
    raise TypeError(f"a kernel's argument is a Tensor, an int or a float, got {type(value).__name__}")


def representative(value: int, *, specialised: bool = True) -> int:
    """An int that Triton treats as it does `value`; `do_not_specialize` leaves only its width."""
    if specialised and value == 1:
        return 1
    wide = 0 if -(2**31) <= value < 2**31 else 2**40
    return wide + (ALIGNMENT if specialised and value % ALIGNMENT == 0 else ALIGNMENT + 1)


def describe_constant(name: str, value: Any) -> Any:
    if isinstance(value, tl.dtype):
        return {"tl.dtype": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"constant {name} must be None, a bool, int, float, str or tl.dtype, got {type(value).__name__}")


def key_of(launch: Launch, *more: str) -> str:
    """Hash of the kernel's source with all that it calls, of the described launch, and of `more`."""
    described = describe(launch)
    del described["file"]  # a checkout may move
    content = [json.dumps(described, sort_keys=True), launch.kernel.cache_key, *more]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:32]
