"""FlashAttention-4's compilers on a machine without a GPU: what stands in for the driver's answers and for tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.fa4.launch import recording

SMS_VARIABLE = "FLASH_ATTENTION_NUM_SMS"
"""Environment variable of FlashAttention-4: multiprocessors of the GPU that is compiled for."""


class HardwareInfo:
    """In place of cutlass.utils.HardwareInfo, which asks a GPU's driver."""

    def __init__(self, device_id: int = 0) -> None:
        self.sms = int(os.environ[SMS_VARIABLE])

    def get_device_multiprocessor_count(self) -> int:
        return self.sms

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return self.sms // cluster_size


@contextmanager
def recording_without_gpu(*functions: Any) -> Iterator[list[Any]]:
    """As `launch.recording`; FlashAttention-4, which is imported now, asks for no GPU inside."""
    from flash_attn.cute import cute_dsl_utils, interface, tile_scheduler, utils

    with ExitStack() as stack:
        for owner, name, value in (
            (interface, "is_fake_mode", lambda: True),
            (tile_scheduler, "HardwareInfo", HardwareInfo),
            *((module, "from_dlpack", _from_gpu(module.from_dlpack)) for module in (cute_dsl_utils, utils)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(recording(*functions))


def _from_gpu(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """CuTe DSL's view of a tensor like a meta tensor on a GPU."""

    def view(x: torch.Tensor, **how: Any) -> Any:
        with FakeTensorMode():
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return from_dlpack(like, **how)

    return view
