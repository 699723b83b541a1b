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
def meta_gpu(target: str = "sm_90a", sms: str = "132") -> Iterator[None]:
    """Meta tensors stand for those of a GPU of this architecture, with as many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TARGET_VARIABLE, target)
        patch.setenv(SMS_VARIABLE, sms)
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # there is none
        compute_capability.cache_clear()
        multiprocessors.cache_clear()
        yield
    compute_capability.cache_clear()
    multiprocessors.cache_clear()


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

    with meta_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.Kernel, "start", property(start))
        yield keys
