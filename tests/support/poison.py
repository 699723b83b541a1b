"""Uninitialised memory that holds NaN, in tests and in processes that they start."""

from __future__ import annotations

import sys
from functools import cache

import torch

has_gpu = cache(torch.cuda.is_available)


def poison(on: bool) -> None:
    """Has PyTorch fill what `torch.empty` gives, as it does where algorithms are deterministic, with a warning at most.

    torch.use_deterministic_algorithms imports Inductor, to tell it not to measure on a GPU, which takes two seconds.
    """
    if has_gpu() or "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(on, warn_only=on)
    else:
        torch._C._set_deterministic_algorithms(on, warn_only=on)
    torch.utils.deterministic.fill_uninitialized_memory = True
