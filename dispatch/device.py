"""Facts about this machine: devices, and the state of the packages that backends need.

Nothing here imports a kernel language unless `package_states` is asked to try, which only a diagnosis does.
"""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

INSTALL_CUDA = 'pip install "nsa-kernels[cuda]"'
INSTALL_NPU = 'pip install "nsa-kernels[npu]"'
NPU_PYTHON_BEFORE = (3, 12)
"""triton-ascend 3.2 has wheels for Python 3.9 to 3.11."""


@dataclass(frozen=True)
class Package:
    """A package some backend needs, and why it is not usable here (None: it is)."""

    module: str
    distribution: str
    purpose: str
    install: str
    version: str | None = None
    problem: str | None = None


PACKAGES = (
    Package("cutlass", "nvidia-cutlass-dsl", "CuTe DSL kernels on NVIDIA", INSTALL_CUDA),
    Package("flash_attn.cute", "flash-attn-4", "FlashAttention-4 on NVIDIA", INSTALL_CUDA),
    Package("triton", "triton", "Triton kernels (on an NPU: triton-ascend)", "pip install triton"),
    Package("torch_npu", "torch-npu", "PyTorch on Ascend NPUs", INSTALL_NPU),
)


def package_states() -> list[Package]:
    """PACKAGES with version and problem filled in, by importing each one."""
    return [_try_import(package) for package in PACKAGES]


def _try_import(package: Package) -> Package:
    version = _version(package.distribution)
    if package.module == "triton" and version is None:
        version = _version("triton-ascend")
    problem: str | None
    try:
        importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        itself = (error.name or "").partition(".")[0] == package.module.partition(".")[0]
        problem = f"not installed: {_install_line(package)}" if itself else f"broken: {error}"
    except Exception as error:  # a broken package can raise anything; that is its state
        problem = f"broken: {type(error).__name__}: {_first_line(error)}"
    else:
        problem = triton_clash() if package.module == "triton" else None
    return replace(package, version=version, problem=problem)


def triton_clash() -> str | None:
    """Upstream triton and triton-ascend install into one folder; whichever came last is broken by the other."""
    if _version("triton") is None or _version("triton-ascend") is None:
        return None
    on_npu = device_types()[0] == "npu"
    surplus, kept = ("triton", "triton-ascend") if on_npu else ("triton-ascend", "triton")
    return (
        "triton and triton-ascend are installed over each other: "
        f"pip uninstall triton triton-ascend, then pip install {kept} (without {surplus}) for this machine"
    )


DEVICE_TYPES = ("cuda", "npu", "cpu")
"""Device types that ops are written for, the fastest first."""


def device_types() -> list[str]:
    """Device types this process can use, the fastest first; "cpu" is always the last."""
    return [device_type for device_type in DEVICE_TYPES if absence(device_type) is None]


def absence(device_type: str) -> str | None:
    """Why this process cannot use a device type, or None when it can."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU is visible"
    if device_type == "npu":
        npu = getattr(torch, "npu", None)  # there once torch_npu is imported
        if npu is None:
            return "torch_npu is not imported"
        return None if npu.is_available() else "no Ascend NPU is visible"
    return None


def describe_device(device_type: str) -> str:
    """One line on a device for people."""
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    if device_type == "npu":
        return str(torch.get_device_module("npu").get_device_name())
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _install_line(package: Package) -> str:
    if package.install == INSTALL_NPU and sys.version_info[:2] >= NPU_PYTHON_BEFORE:
        return f"{package.install}, on Python 3.9 to 3.11 (this is {platform.python_version()})"
    return package.install


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
