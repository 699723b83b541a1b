"""Compiling without launching: what calls need is put on disk (runtime/disk_cache.py), and no GPU is needed.

Several processes may do the same calls at once. Each compiles the kernels that are not there and that no other one is
compiling, so it does not matter which of them begins with what: when all have ended, everything is compiled.
"""

from __future__ import annotations

import fcntl
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import cutlass.utils
import torch
from cutlass.utils import hardware_info
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.fa4 import kept, launch
from cute_kernels.runtime import disk_cache, jit
from cute_kernels.runtime.device import compute_capability

SMS_VARIABLE = "FLASH_ATTENTION_NUM_SMS"
"""Environment variable of FlashAttention-4: multiprocessors of the GPU that is compiled for."""


class Hardware:
    """In place of cutlass.utils.HardwareInfo, which asks a GPU's driver."""

    def __init__(self, device_id: int = 0) -> None:
        self.sms = int(os.environ[SMS_VARIABLE])

    def get_device_multiprocessor_count(self) -> int:
        return self.sms

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return self.sms // cluster_size


def nothing(*_: Any) -> None:
    """In place of every kernel."""


@contextmanager
def compiling_only(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Calls of forward.py and backward.py with meta tensors compile their kernels inside, and launch nothing.

    CUTE_DSL_ARCH, FLASH_ATTENTION_ARCH and SMS_VARIABLE name the GPU, and did before anything was imported.

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
            (launch, "_recording", partial(_recording, launch._recording)),
            (torch.Tensor, "is_cuda", True),
            *((module, "HardwareInfo", Hardware) for module in (cutlass.utils, hardware_info)),
            *((module, "has_warpgroups", _has_warpgroups) for module in _modules_with("has_warpgroups")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def _recording(record: Callable[..., Any], *functions: Any) -> Iterator[Any]:
    """In place of launch.py's: FlashAttention-4, which is imported now, asks for no GPU."""
    from flash_attn.cute import cute_dsl_utils, interface, tile_scheduler, utils

    with ExitStack() as stack:
        for owner, name, value in (
            (interface, "is_fake_mode", lambda: True),
            (tile_scheduler, "HardwareInfo", Hardware),
            *((module, "from_dlpack", _from_gpu(module.from_dlpack)) for module in (cute_dsl_utils, utils)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(record(*functions))


def _has_warpgroups(_: torch.device) -> bool:
    return compute_capability(0)[0] == 9


def _modules_with(name: str) -> list[Any]:
    """Of cute_kernels."""
    return [module for path, module in sys.modules.items() if path.startswith("cute_kernels.") and name in vars(module)]


def _from_gpu(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """CuTe DSL's view of a tensor like a meta tensor on a GPU."""

    def view(x: torch.Tensor, **how: Any) -> Any:
        with FakeTensorMode():
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return from_dlpack(like, **how)

    return view
