"""Facts about this machine: devices, and the state of the packages that backends need.

Nothing here imports a kernel language unless `package_states` is asked by a diagnosis, or `package_problem` for a call
that could use it.
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
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
    needs: str
    """Versions, as pyproject.toml gives them: "==4.8.1" or ">=3.2"."""
    version: str | None = None
    problem: str | None = None


TRITON_TESTED = "3.9.0"
"""The newest that the kernels were tested with. The oldest is that of triton-ascend and of torch 2.6."""

PACKAGES = (
    Package("cutlass.cute", "nvidia-cutlass-dsl", "CuTe DSL kernels on NVIDIA", INSTALL_CUDA, "==4.8.1"),
    Package("flash_attn.cute", "flash-attn-4", "FlashAttention-4 on NVIDIA", INSTALL_CUDA, "==4.0.0b36"),
    Package("triton", "triton", "Triton kernels (on an NPU: triton-ascend)", "", ">=3.2"),
    Package("torch_npu", "torch-npu", "PyTorch on Ascend NPUs", INSTALL_NPU, "==2.7.1"),
)
TRITON_ASCEND = Package("triton", "triton-ascend", "Triton kernels on an NPU", INSTALL_NPU, "==3.2.0")


def package_states() -> list[Package]:
    """PACKAGES with version and problem filled in, by importing each one."""
    return [_state(package) for package in PACKAGES]


@cache
def package_problem(module: str, device_type: str) -> str | None:
    """Why a package of PACKAGES is of no use to calls on a type of device, with the way to mend it, or None."""
    listed = next(package for package in PACKAGES if package.module == module)
    state = _state(TRITON_ASCEND if module == "triton" and device_type == "npu" else listed)
    return None if state.problem is None else f"needs {state.distribution}, {state.problem}"


def package_advice(modules: Sequence[str]) -> str:
    """What is installed of PACKAGES, and what would mend it, for a failure that says neither."""
    states = [_installed(package) for package in PACKAGES if package.module in modules]
    return "".join(f"; {state.distribution} is {state.version}: {_mend_line(state)}" for state in states)


def _installed(package: Package) -> Package:
    """The package with its version; triton-ascend in place of a triton that is not there."""
    version = version_of(package.distribution)
    if package.distribution == "triton" and version is None and version_of("triton-ascend") is not None:
        return _installed(TRITON_ASCEND)
    return replace(package, version=version)


def _state(package: Package) -> Package:
    state = _installed(package)
    raised: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages deprecate in each other, an error under python -W error
            importlib.import_module(package.module)
    except (Exception, SystemExit) as error:  # a broken package can raise anything; that is its state
        raised = error
    return replace(state, problem=_problem(state, raised))


def _problem(state: Package, raised: BaseException | None) -> str | None:
    missing = raised.name or "" if isinstance(raised, ModuleNotFoundError) else None
    top = state.module.partition(".")[0]
    foreign = state.distribution == "triton-ascend" and state.version is None  # upstream's triton has the same name
    if foreign or (missing is not None and missing.partition(".")[0] == top):
        return f"not installed: {_install_line(state)}"
    if state.version is not None and not fits(state.version, state.needs):
        return f"{state.version} is installed, not {state.needs}: {_install_line(state)}"
    if missing is not None:
        return f"broken: {raised}: {_install_line(state)}"
    if raised is not None:
        return f"broken: {type(raised).__name__}: {first_line(raised)}: {_mend_line(state)}"
    return triton_clash() if state.module == "triton" else None


def fits(version: str, needs: str) -> bool:
    """Whether a version is "==" or ">=" another one; what builds add to it (+cpu, .post1) does not matter."""
    wanted, plain = needs[2:], re.split(r"\+|\.post", version)[0]
    if needs.startswith("=="):
        return plain == wanted
    return _numbers(plain) >= _numbers(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def triton_clash() -> str | None:
    """Upstream triton and triton-ascend install into one folder; whichever came last is broken by the other."""
    if version_of("triton") is None or version_of("triton-ascend") is None:
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
    return f'pip install "triton=={_triton_of_torch()}"' if package.distribution == "triton" else package.install


def _mend_line(package: Package) -> str:
    version = f"=={_triton_of_torch()}" if package.distribution == "triton" else package.needs
    return f'pip install --force-reinstall "{package.distribution}{version}"'


def _triton_of_torch() -> str:
    """The triton that this torch names, as builds for CUDA do; else TRITON_TESTED."""
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        required = []
    named = (re.match(r"triton==([\w.]+)", line) for line in required)
    return next((match[1] for match in named if match), TRITON_TESTED)


def version_of(distribution: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Of its message."""
    return (str(error).splitlines() or [""])[0]
