"""What calls on meta tensors would compile for a Hopper GPU: nothing is compiled, and nothing runs.

    jit.compiled_once functions -> what they are called with
    launch.py                -> the keys that FlashAttention-4's interface looks up, by its own code

Whether a kernel has to be waited for depends on these alone, so lengths can be tried by the thousand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability

Keys = set[Hashable]


class LookedUp:
    """In place of one of FlashAttention-4's caches of compiled kernels: has every kernel, and none does anything."""

    def __init__(self, name: str, keys: Keys) -> None:
        self.name, self.keys = name, keys

    def __contains__(self, key: Hashable) -> bool:
        self.keys.add((self.name, key))
        return True

    def __getitem__(self, key: Hashable) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def noted_keys() -> Iterator[Keys]:
    """All that is asked for meanwhile."""
    from flash_attn.cute import interface

    import cute_kernels.backward  # noqa: F401  imports all modules of NSA's
    from cute_kernels.fa4 import launch
    from cute_kernels.runtime import jit

    keys: Keys = set()
    with pytest.MonkeyPatch.context() as patch:
        for function in (f for f in jit.REMEMBERING if f.__module__.startswith("cute_kernels.")):  # not those of tests
            patch.setattr(sys.modules[function.__module__], function.__name__, noting(function, keys))
        for function in list(vars(interface).values()):
            if hasattr(function, "compile_cache"):
                patch.setattr(function, "compile_cache", LookedUp(function.__name__, keys))
        patch.setattr(interface, "_get_device_arch", lambda: 90)
        patch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
        patch.setattr(launch, "_FORWARD", {})
        patch.setattr(launch, "_BACKWARD", {})
        patch.setenv(TARGET_VARIABLE, "sm_90a")
        compute_capability.cache_clear()
        for name, module in list(sys.modules.items()):
            if name.startswith("cute_kernels.") and hasattr(module, "has_warpgroups"):
                patch.setattr(module, "has_warpgroups", lambda _: True)
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # there is none
        patch.setattr(torch.Tensor, "is_cuda", True)  # as FlashAttention-4 wants it, also of meta tensors
        yield keys
    compute_capability.cache_clear()


def noting(function: Callable[..., Any], keys: Keys) -> Callable[..., Any]:
    from cute_kernels.runtime.jit import Kernel

    def get(*arguments: Any, **options: Any) -> Kernel:
        keys.add((function.__module__, function.__name__, arguments, *sorted(options.items())))
        return Kernel(None, lambda *_: None)

    return get
