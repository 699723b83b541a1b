"""The device that kernels run on or are compiled for, and alignment of tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16
"""Bytes per vectorized memory access of a thread."""

TARGET_VARIABLE = "CUTE_DSL_ARCH"
"""Environment variable of CuTe DSL: architecture to compile for (sm_90a, sm_100a) if there is no GPU."""

SMS_VARIABLE = "FLASH_ATTENTION_NUM_SMS"
"""Environment variable of FlashAttention-4: number of multiprocessors of the GPU to compile for."""


@lru_cache
def compute_capability(index: int) -> tuple[int, int]:
    """(9, 0), (10, 0), ...: of the CUDA device, or of the target named by TARGET_VARIABLE."""
    target = os.environ.get(TARGET_VARIABLE)
    if target:
        number = int("".join(c for c in target if c.isdigit()))
        return number // 10, number % 10
    return torch.cuda.get_device_capability(index)


def has_warpgroups(device: torch.device) -> bool:
    """True if a GPU, or the target that meta tensors represent, has WGMMA: only Hopper does."""
    return device.type != "cpu" and compute_capability(device.index or 0)[0] == 9


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a CUDA device is the current one; no effect for other devices and for fake tensors."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_initialized() else nullcontext()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the CUDA device; of the GPU that other tensors stand for, as SMS_VARIABLE says."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return int(os.environ.get(SMS_VARIABLE) or 1)


def positional(compiled: Any) -> Callable[..., None]:
    """The function inside CuTe DSL's wrapper for keyword arguments, which costs the host a microsecond per call."""
    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    inner: Callable[..., None] | None = None if unwrap is None else unwrap()
    return compiled if inner is None else inner


def vectorized(tensor: Tensor) -> bool:
    """True if every row (the last dimension) is contiguous and starts at a multiple of VECTOR_BYTES."""
    step = VECTOR_BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    return last == 1 and math.gcd(*strides) % step == 0 and tensor.data_ptr() % VECTOR_BYTES == 0


def vectorizable(tensor: Tensor) -> Tensor:
    """The tensor itself if it is `vectorized`, otherwise a contiguous copy."""
    return tensor if vectorized(tensor) else tensor.clone(memory_format=torch.contiguous_format)
