"""Compiling without launching: what calls need is put on disk (runtime/disk_cache.py), and no GPU is needed.

Several processes may do the same calls at once. Each compiles the kernels that are not there and that no other one is
compiling, so it does not matter which of them begins with what: when all have ended, everything is compiled.
"""

from __future__ import annotations

import fcntl
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import cutlass.utils
import torch
from cutlass.utils import hardware_info

from cute_kernels.fa4 import kept, launch
from cute_kernels.fa4.without_gpu import HardwareInfo, recording_without_gpu
from cute_kernels.runtime import disk_cache, jit
from cute_kernels.runtime.device import compute_capability


def nothing(*_: Any) -> None:
    """In place of every kernel."""


@contextmanager
def compiling_only(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Calls of forward.py and backward.py with meta tensors compile their kernels inside, and launch nothing.

    CUTE_DSL_ARCH, FLASH_ATTENTION_ARCH and FLASH_ATTENTION_NUM_SMS name the GPU, and did before anything was imported.

    Args:
        tell: called with "asked" and the key of each kernel that is needed, and "there" where it is on disk.
    """
    kept.check_import()  # and note it, as dispatch does before a call

    class Entry(disk_cache.Entry):
        operation = fcntl.LOCK_EX | fcntl.LOCK_NB

        def __enter__(self) -> disk_cache.Entry:
            tell("asked", self.key)
            entry = super().__enter__()
            if self.found not in (None, nothing):
                tell("there", self.key)
            return entry

        def keep(self, compiled: Any) -> Any:
            super().keep(compiled)
            tell("there", self.key)
            return compiled

        def _tell(self, problem: OSError) -> None:
            if not isinstance(problem, BlockingIOError):
                raise problem
            self.found = nothing  # another process compiles it

    with ExitStack() as stack:
        for owner, name, value in (
            (disk_cache, "Entry", Entry),
            (jit, "positional", lambda _: nothing),
            (jit, "SLOW", math.inf),
            (kept, "positional", lambda _: nothing),
            (launch, "positional", lambda _: nothing),
            (launch, "recording", recording_without_gpu),
            (torch.Tensor, "is_cuda", True),
            *((module, "HardwareInfo", HardwareInfo) for module in (cutlass.utils, hardware_info)),
            *((module, "has_warpgroups", _has_warpgroups) for module in _modules_with("has_warpgroups")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _has_warpgroups(_: torch.device) -> bool:
    return compute_capability(0)[0] == 9


def _modules_with(name: str) -> list[Any]:
    """Of cute_kernels."""
    return [module for path, module in sys.modules.items() if path.startswith("cute_kernels.") and name in vars(module)]
