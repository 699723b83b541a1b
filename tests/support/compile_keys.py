"""Calls as on a Hopper GPU whose kernels are neither compiled nor launched.

Whether a kernel has to be waited for depends on its name alone, so lengths can be tried by the thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cute_kernels.runtime.device import SMS_VARIABLE, TARGET_VARIABLE, compute_capability, multiprocessors


@contextmanager
def noted_keys() -> Iterator[set[Any]]:
    """All kernels that are asked for meanwhile. Meta tensors stand for those of an H100."""
    import cute_kernels.backward  # noqa: F401  imports all modules of NSA's
    from cute_kernels.runtime import jit

    keys: set[jit.Kernel] = set()

    def nothing(*_: Any) -> None:
        """In place of a launch."""

    def start(kernel: jit.Kernel) -> Any:
        keys.add(kernel)
        return nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.Kernel, "start", property(start))
        patch.setenv(TARGET_VARIABLE, "sm_90a")
        patch.setenv(SMS_VARIABLE, "132")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # there is none
        compute_capability.cache_clear()
        multiprocessors.cache_clear()
        yield keys
    compute_capability.cache_clear()
    multiprocessors.cache_clear()
