"""What the kernels run on, or are compiled for."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

TARGET_VARIABLE = "CUTE_DSL_ARCH"
"""Names what to compile for (sm_90a, sm_100a) where there is no GPU."""


@lru_cache
def compute_capability(index: int) -> tuple[int, int]:
    """(9, 0), (10, 0), ...: of the CUDA device, or of what TARGET_VARIABLE names."""
    target = os.environ.get(TARGET_VARIABLE)
    if target:
        number = int("".join(c for c in target if c.isdigit()))
        return number // 10, number % 10
    return torch.cuda.get_device_capability(index)
