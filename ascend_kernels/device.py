"""Device properties for planning: an NPU's on-chip memories and limits, the number of cores, bytes of memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import torch

KIB = 1024
UB_VARIABLE = "NSA_KERNELS_UB_BYTES"
MIN_UB = 192 * KIB
"""Smallest UB for which every specialisation exists."""
MAX_GRID = 65535
"""Maximum product of a grid's dimensions (an NPU's coreDim)."""
VECTOR_CORES = 2
"""Vector cores per AI core."""


@dataclass(frozen=True)
class Device:
    """On-chip memories in bytes, and AI cores (one cube unit each): inferred from public documents, not measured."""

    name: str
    ub: int
    l1: int
    l0a: int
    l0b: int
    l0c: int
    cores: int


DEVICES = {
    "A2": Device("A2", 192 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, 20),
    "A3": Device("A3", 192 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, 24),
    "950": Device("950", 256 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 256 * KIB, 28),
}
ARCHITECTURES = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend910_95": "950", "Ascend950": "950"}
"""NPU by the prefix of Triton-Ascend's target name."""

GPU_CORES = 132
"""Number of multiprocessors assumed without a GPU: that of an H200."""


def npu_of(device: torch.device) -> Device:
    """The NPU that holds tensors; an A2 for CPU tensors, which simulators use.

    Memory sizes are those listed for its architecture, with the UB size from NSA_KERNELS_UB_BYTES if set; the number of
    cores comes from the driver.

    Raises:
        ValueError: if the UB is smaller than MIN_UB, or the architecture is not listed and its UB size is not given.
    """
    given = os.environ.get(UB_VARIABLE)
    if device.type != "npu":
        found = DEVICES["A2"]
    else:
        from triton.runtime import driver

        arch = str(driver.active.get_current_target().arch)
        name = next((name for prefix, name in ARCHITECTURES.items() if arch.startswith(prefix)), None)
        if name is None and not given:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{arch} is not among the listed NPUs ({known}): set {UB_VARIABLE} to the bytes of its UB")
        properties = driver.active.utils.get_device_properties(device.index or 0)
        found = replace(DEVICES[name or "A2"], cores=properties["num_aicore"])
    ub = int(given) if given else found.ub
    if ub < MIN_UB:
        raise ValueError(f"the UB must have at least {MIN_UB} bytes, got {ub}")
    return replace(found, ub=ub)


def gpu_cores(device: torch.device) -> int:
    """Number of multiprocessors of the GPU that holds tensors; GPU_CORES for CPU tensors."""
    if device.type != "cuda":
        return GPU_CORES
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def memory_class(device: torch.device) -> str:
    """Shared memory that a program may use on a GPU: S, 99 KiB (compute capability 8.6, 8.9 and 12.x, and CPU tensors);
    M, 163 KiB (8.0); L, 227 KiB (9.0 and 10.x).

    TRITON_OVERRIDE_ARCH, for which Triton compiles in place of the GPU's own capability, counts, too: with sm80, an
    H100 runs the code of an A100.
    """
    if device.type != "cuda":
        return "S"
    other = os.environ.get("TRITON_OVERRIDE_ARCH")
    major, minor = divmod(int(other[2:]), 10) if other else torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return "L"
    return "M" if (major, minor) == (8, 0) else "S"


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory; 0 for CPU tensors, which simulators use, so that the smallest limits apply."""
    if device.type == "cpu":
        return 0
    memory: int = torch.get_device_module(device).get_device_properties(device).total_memory
    return memory
