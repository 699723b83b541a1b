"""Argument checks shared by all ops: TypeError or ValueError, naming the argument and its value."""

from __future__ import annotations

import sys
import warnings
from numbers import Real
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dispatch.registry import short_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of the ops' inputs. Backends may support fewer; dispatch reports the reason."""
_NAMES = tuple(map(short_name, DTYPES))

MOST_KV_HEADS = 128
"""Number of key/value heads above which a tensor with few tokens is assumed to have heads first."""


def is_integer(value: object) -> TypeGuard[int]:
    """True for integers, also for torch.compile's symbols; False for bools."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True for real numbers, also for torch.compile's symbols; False for bools."""
    if isinstance(value, float):  # fast path: isinstance of Real is slower
        return True
    return isinstance(value, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def is_finite(number: float) -> bool:
    """True unless a number is NaN, infinite or, as integers may be, beyond the range of a float.

    By comparison, since math.isfinite cannot take torch.compile's symbols.
    """
    return bool(-sys.float_info.max <= number <= sys.float_info.max)


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless `value` is an int (no bool) from `least` to `most`."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_sizes(**sizes: Any) -> None:
    """Raise unless each size of a layer is an integer of at least 1."""
    for name, size in sizes.items():
        check_integer(name, size, 1)


def check_bool(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_eps(eps: object, name: str = "eps") -> None:
    """Raise unless the epsilon of a norm is a finite number of at least 0."""
    if not is_number(eps):
        raise TypeError(f"{name} must be a number, got {eps!r}")
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {eps}")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless a tensor has one of DTYPES."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be {', '.join(_NAMES[:-1])} or {_NAMES[-1]}, got {short_name(tensor.dtype)}")


def check_tensor(name: str, x: object) -> None:
    """Raise unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_dense(name, x)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise for sparse and nested tensors: they have no strides, and older nested tensors have no shape either."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.layout is torch.strided else short_name(tensor.layout)
        raise TypeError(f"{name} must be a dense tensor, got the layout {layout}")


def is_readable(tensor: Tensor, *, wait: bool = False) -> bool:
    """True if the host may read values: not of fake and meta tensors, nor while tracing.

    Args:
        wait: also True for tensors on a device, which synchronizes with it.
    """
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return False
    return wait or tensor.device.type == "cpu"


def warn_of_heads_first(q: Tensor, k: Tensor) -> None:
    """Warn if the shapes of q and k `[...,N,heads,D]` look like long sequences in the layout of PyTorch's SDPA.

    `[B,H,N,D]` would be read as N heads of H tokens; no model has so many key/value heads and so few keys.
    """
    tokens, heads = k.shape[-3:-1]
    if heads <= MOST_KV_HEADS or heads < 4 * tokens or k.shape != q.shape or torch.compiler.is_compiling():
        return
    warnings.warn(
        f"q and k of shape {list(k.shape)} are read as {tokens} tokens of {heads} heads: the layout is [B,N,heads,D], "
        "not [B,heads,N,D] as in torch.nn.functional.scaled_dot_product_attention; transpose(1, 2) converts between "
        "them",
        stacklevel=2,
    )


def refuse_shallow_copy(self: object) -> NoReturn:
    """`__copy__` of classes whose tensors are written in place."""
    raise TypeError(f"copy.copy of this {type(self).__name__} would share its memory: use copy.deepcopy")
