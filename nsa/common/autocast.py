"""torch.autocast for all ops: inputs are cast like those of PyTorch's own ops, and backends run with autocast off."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CASTABLE = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that autocast casts; it leaves fp64 alone."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on a device type, or None if autocast is off."""
    if device_type == "meta":  # has no autocast
        return None
    # Dynamo of torch 2.6 to 2.11 cannot trace is_autocast_available; compiled code is on a device with autocast
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if known and torch.is_autocast_enabled(device_type) else None


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Context without autocast for a backend's call: autocast would run in 16 bits what docs/semantics.md defines in
    fp32.
    """
    traced = torch.compiler.is_compiling()  # Dynamo of torch 2.11 cannot trace the queries below
    if traced or (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def cast_inputs(tensors: Mapping[str, Any], stay_fp32: Container[str] = ()) -> Mapping[str, Any]:
    """Cast the inputs of attention as autocast does for scaled_dot_product_attention: all to its dtype.

    They are unchanged without autocast, or if one of them is fp64.

    Args:
        tensors: inputs by name, including `q`. Other dtypes and non-tensors are unchanged; later checks reject them.
        stay_fp32: names of tensors that may stay fp32 with any dtype of q.
    """
    q = tensors["q"]
    dtype = autocast_dtype(q.device.type) if isinstance(q, Tensor) else None
    if dtype is None or any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tensors.values()):
        return tensors

    def cast(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in CASTABLE or (x.dtype == torch.float32 and name in stay_fp32):
            return x
        return x.to(dtype)

    return {name: cast(name, x) for name, x in tensors.items()}


def promote_blocks(blocks: Any, *weights: Any) -> tuple[Any, ...]:
    """Promote blocks as autocast does for torch.stack: to fp32 if a list has several dtypes.

    Weights with another dtype than the blocks become fp32. Without autocast nothing changes.

    Args:
        blocks: a tensor or a list of tensors. Other dtypes and values are unchanged; later checks reject them.

    Returns:
        The blocks, then the weights.
    """
    listed = blocks if isinstance(blocks, (list, tuple)) else [blocks]
    if not listed or not isinstance(listed[0], Tensor) or autocast_dtype(listed[0].device.type) is None:
        return (blocks, *weights)
    for x in (*listed, *(w for w in weights if w is not None)):
        if not isinstance(x, Tensor) or x.dtype not in CASTABLE:
            return (blocks, *weights)
    dtype = listed[0].dtype
    if any(x.dtype != dtype for x in listed):
        dtype = torch.float32
        blocks = [
            x.float().contiguous() for x in listed
        ]  # blocks must have equal strides; .float() alone would keep those of a view
    return (blocks, *(w if w is None or w.dtype == dtype else w.float() for w in weights))
