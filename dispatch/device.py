"""Properties of this machine: devices, and the state of the packages that backends need.

Kernel languages are imported only by `package_states`, for diagnosis, and by `package_problem`, for a call that could
use them. FlashAttention-4 is not imported even then if it is known to be importable.
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

NPU_PYTHON_BEFORE = (3, 12)
"""triton-ascend 3.2 has wheels for Python 3.9 to 3.11."""


@dataclass(frozen=True)
class Package:
    """A package that some backend needs."""

    module: str
    requirement: str
    """Distribution name and version, as in pyproject.toml."""
    purpose: str
    extra: str | None
    """Extra of nsa-kernels that installs it."""
    reinstall: str = "--force-reinstall"
    """Options of `pip install` that repair it."""
    check: str | None = None
    """A function, as "module:attribute", that raises the package's import errors but may avoid importing it."""
    version: str | None = None
    """Installed version."""
    problem: str | None = None
    """Reason why it is not usable here, or None."""

    @property
    def distribution(self) -> str:
        """Name for pip."""
        return re.split(r"[\[<=>]", self.requirement)[0]

    @property
    def needs(self) -> str:
        """Compatible versions: "==4.8.1" or ">=3.2,<=3.9"."""
        return re.split(r"(?=[<=>]=)", self.requirement, maxsplit=1)[1]


TRITON_TESTED = "3.9.0"
"""Newest version with which the kernels were tested; the oldest is that of triton-ascend and of torch 2.6."""

CUDA_EXTRA = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda"
"""Extra of nsa-kernels for the CUDA version of torch."""
CUTE_DSL = "nvidia-cutlass-dsl" if CUDA_EXTRA == "cuda12" else "nvidia-cutlass-dsl[cu13]"

# Kernels use internals of CuTe DSL and FlashAttention-4, which change: only tested versions fit (docs/usage.md).
PACKAGES = (
    Package("cutlass.cute", f"{CUTE_DSL}>=4.6.2,<=4.8.1", "CuTe DSL kernels on NVIDIA", CUDA_EXTRA),
    Package(
        "flash_attn.cute",
        "flash-attn-4==4.0.0b36",
        "FlashAttention-4 on NVIDIA",
        CUDA_EXTRA,
        reinstall="--force-reinstall --no-deps",  # otherwise pip would replace torch
        check="cute_kernels.fa4.kernels:check_import",  # which takes seconds
    ),
    Package("triton", "triton>=3.2", "Triton kernels (on an NPU: triton-ascend)", None),
    Package("torch_npu", "torch-npu==2.7.1.*", "PyTorch on Ascend NPUs", "npu"),
)
TRITON_ASCEND = Package("triton", "triton-ascend==3.2.0", "Triton kernels on an NPU", "npu")


def package_states() -> list[Package]:
    """PACKAGES with version and problem filled in, importing each one whose version fits."""
    return [_state(replace(package, check=None)) for package in PACKAGES]


@cache
def package_problem(module: str, device_type: str) -> str | None:
    """Reason why a package in PACKAGES is unusable on a device type, with the command that repairs it, or None.

    Cached per process, so repairs take effect in the next process.
    """
    listed = next(package for package in PACKAGES if package.module == module)
    state = _state(TRITON_ASCEND if module == "triton" and device_type == "npu" else listed)
    return None if state.problem is None else f"needs {state.distribution}, {state.problem}"


def package_advice(modules: Sequence[str]) -> str:
    """Installed versions of packages and the commands that repair them, for errors that mention neither."""
    states = [_installed(package) for package in PACKAGES if package.module in modules]
    return "".join(f"; {state.distribution} is {state.version}: {_reinstall_line(state)}" for state in states)


def _installed(package: Package) -> Package:
    """The package with its installed version; triton-ascend in place of a missing triton."""
    version = version_of(package.distribution)
    if package.distribution == "triton" and version is None and version_of("triton-ascend") is not None:
        return _installed(TRITON_ASCEND)
    return replace(package, version=version)


def _state(package: Package) -> Package:
    state = _installed(package)
    return replace(state, problem=_misfit(state) or _import_problem(state))


def _misfit(state: Package) -> str | None:
    """Reason why its version does not fit, or None, without importing it."""
    if state.version is None:  # upstream triton has the same module name as triton-ascend
        return f"not installed: {_install_line(state)}" if state.distribution == "triton-ascend" else None
    if not fits(state.version, state.needs):
        return f"{state.version} is installed, not {state.needs}: {_exact_line(state)}"
    return None


def _import_problem(state: Package) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations in packages, which would be errors under python -W error
            module, _, check = (state.check if state.check and state.version else state.module).partition(":")
            imported = importlib.import_module(module)
        if check:  # may issue warnings of its own
            getattr(imported, check)()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == state.module.partition(".")[0]:
            return f"not installed: {_install_line(state)}"
        return f"broken: {error}: {_exact_line(state)}"  # which installs its dependencies
    except (Exception, SystemExit) as error:  # a broken package can raise anything
        return f"broken: {type(error).__name__}: {first_line(error)}: {_reinstall_line(state)}"
    return triton_clash() if state.module == "triton" else None


def fits(version: str, needs: str) -> bool:
    """True if a version meets every clause of ">=4.6.2,<=4.8.1" and the like, its suffix (+cpu, .post1) left out."""
    plain = re.split(r"\+|\.post", version)[0]
    return all(_meets(plain, clause[:2], clause[2:]) for clause in needs.split(","))


def _meets(version: str, comparison: str, required: str) -> bool:
    if comparison == "==":  # exact text: 4.0.0b36 is not 4.0.0
        return version == required.removesuffix(".*")
    release, bound = _release(version), _release(required)
    return release >= bound if comparison == ">=" else release <= bound


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def triton_clash() -> str | None:
    """Reason if both upstream triton and triton-ascend, which overwrite each other, are installed; else None."""
    if version_of("triton") is None or version_of("triton-ascend") is None:
        return None
    on_npu = device_types()[0] == "npu"
    other, kept = ("triton", "triton-ascend") if on_npu else ("triton-ascend", "triton")
    return (
        "triton and triton-ascend are installed over each other: "
        f"pip uninstall triton triton-ascend, then pip install {kept} (without {other}) for this machine"
    )


DEVICE_TYPES = ("cuda", "npu", "cpu")
"""Device types with implementations, the fastest first."""


def device_types() -> list[str]:
    """Device types that this process can use, the fastest first; "cpu" is always last."""
    return [device_type for device_type in DEVICE_TYPES if absence(device_type) is None]


def absence(device_type: str) -> str | None:
    """Reason why this process cannot use a device type, or None."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU is visible"
    if device_type == "npu":
        npu = getattr(torch, "npu", None)  # set by importing torch_npu
        if npu is None:
            return "torch_npu is not imported"
        return None if npu.is_available() else "no Ascend NPU is visible"
    return None


def describe_device(device_type: str) -> str:
    """Name of a device for display, in one line."""
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    if device_type == "npu":
        return str(torch.get_device_module("npu").get_device_name())
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def _processor() -> str:
    """The processor's name from /proc/cpuinfo, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _install_line(package: Package) -> str:
    if package.extra is None:
        return _exact_line(package)
    return f'pip install "nsa-kernels[{package.extra}]"{_python_limit(package)}'


def _exact_line(package: Package) -> str:
    return f'pip install "{_exactly(package)}"{_python_limit(package)}'


def _reinstall_line(package: Package) -> str:
    return f'pip install {package.reinstall} "{_exactly(package)}"'


def _exactly(package: Package) -> str:
    return f"triton=={_triton_of_torch()}" if package.distribution == "triton" else package.requirement


def _python_limit(package: Package) -> str:
    if package.extra == "npu" and sys.version_info[:2] >= NPU_PYTHON_BEFORE:
        return f", on Python 3.9 to 3.11 (this is {platform.python_version()})"
    return ""


def _triton_of_torch() -> str:
    """The version of triton that torch requires, as its CUDA builds do; else TRITON_TESTED."""
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        required = []
    matches = (re.match(r"triton==([\w.]+)", line) for line in required)
    return next((match[1] for match in matches if match), TRITON_TESTED)


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """First line of an error's message."""
    return (str(error).splitlines() or [""])[0]
