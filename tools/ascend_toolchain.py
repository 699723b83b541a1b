"""Set up the tools that prove the Ascend kernels in .cache/ascend, without root; `make test-ascend` begins with it.

    venv   triton-ascend, whose package is named `triton`, so that it needs an environment apart from upstream Triton's
    mlir   MLIR and LLVM 19: Debian packages, downloaded by apt and unpacked, not installed

Does nothing if the stamp of an earlier call fits. Standard library only. TORCH_INDEX as in tools/bootstrap.py.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bootstrap import (
    CONSTRAINTS,
    PIP_ADVICE,
    ROOT,
    SetUpError,
    free_disk_gb,
    pip_install,
    read_stamp,
    refuse,
    run_step,
    status_of,
    torch_index,
    venv_python,
    write_stamp,
)

CACHE = ROOT / ".cache" / "ascend"
STAMP_NAME = "toolchain.json"
DISK_GB = 3.0
PYTHONS = ("3.11", "3.10")  # triton-ascend has wheels for these; nsa-kernels begins with 3.10

TORCH = "torch==2.13.0"
TRITON_ASCEND = "triton-ascend==3.2.0"
SMALL_PACKAGES = ("pybind11", "numpy<2.4", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock")
"""pybind11 and numpy for triton-ascend, which does not say so; the rest for torch, as far as importing it needs."""

DEBIAN_PACKAGES = ("mlir-19-tools", "llvm-19")
LIBRARIES = re.compile(r"lib(mlir-19|llvm19|xml2|icu|z3|edit|bsd|md|tinfo|ffi|zstd|lzma)[\w.-]*")
"""Dependencies that are unpacked too; the C and C++ libraries are the system's."""
LLVM_TOOLS = ("mlir-opt", "mlir-translate", "opt", "llc")


def find_python() -> str:
    """A Python that triton-ascend has wheels for, this one if possible, or ""."""
    # Version managers leave commands on PATH that do not start, or cannot make environments
    check = f"import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] not in {PYTHONS})"
    for python in (sys.executable, *(shutil.which(f"python{version}") for version in PYTHONS)):
        if python and run([python, "-c", check]).returncode == 0:
            return python
    return ""


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def preflight() -> list[str]:
    """Reasons why the set-up cannot begin, one message each."""
    problems = []
    if not find_python():
        problems.append(
            f"No Python {' or '.join(PYTHONS)}: triton-ascend has no wheels for other versions.\n"
            "    Name one: make PYTHON=python3.11 test-ascend (your system's packages, conda and uv all offer one)."
        )
    if missing := [name for name in ("apt-get", "apt-cache", "dpkg", "cc") if shutil.which(name) is None]:
        problems.append(
            f"No {', '.join(missing)}: needs a C compiler, and packages of Debian 12, Ubuntu 24.04 or newer.\n"
            "    For cc: apt install gcc. On other systems, run it in a container of one of these."
        )
    free_gb = free_disk_gb(CACHE)
    if free_gb < DISK_GB:
        problems.append(f"Too little disk: {free_gb:.1f} GB free for {CACHE}, the set-up needs about {DISK_GB:.0f} GB.")
    return problems


def set_up_triton() -> None:
    venv = CACHE / "venv"
    advice = f"{PIP_ADVICE}\nHere torch is {TORCH}, and must be a CPU-only build."
    check = "import torch, triton, triton.backends.ascend, numpy, pybind11"
    for title, command in (
        ("venv", [find_python(), "-m", "venv", "--clear", str(venv)]),
        (TORCH, pip_install(venv, "--no-deps", *torch_index(), TORCH)),
        (TRITON_ASCEND, pip_install(venv, "--no-deps", TRITON_ASCEND)),
        ("what they need", pip_install(venv, "--constraint", CONSTRAINTS, *SMALL_PACKAGES)),
        ("import", [str(venv_python(venv)), "-I", "-c", check]),
    ):
        run_step(title, command, ROOT, advice)


def set_up_mlir() -> dict[str, str]:
    """Returns the unpacked packages' versions. Runs apt as any user may: with its caches in a folder of ours."""
    mlir = CACHE / "mlir"
    advice = "Is there a network? Behind a proxy, set http_proxy for apt."
    shutil.rmtree(mlir, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        for each in ("cache/archives/partial", "lists/partial", "downloads"):
            (folder / each).mkdir(parents=True)
        options = ["-o", f"Dir::Cache={folder / 'cache'}"]
        if run(["apt-cache", *options, "show", *DEBIAN_PACKAGES]).returncode != 0:
            print("  package lists (the system's have no MLIR 19)", flush=True)
            options += ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", "Acquire::Languages=none"]
            # A source that fails does not matter if others have the packages
            errors = run(["apt-get", *options, "update"]).stderr
            if run(["apt-cache", *options, "show", *DEBIAN_PACKAGES]).returncode != 0:
                raise SetUpError(
                    f"no package source offers {' and '.join(DEBIAN_PACKAGES)}. Debian 12 and Ubuntu 24.04 do.\n"
                    f"{errors[-2000:]}\n{advice}"
                )
        no = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        listed = run(["apt-cache", *options, "depends", "--recurse", *no, *DEBIAN_PACKAGES]).stdout
        packages = sorted({*DEBIAN_PACKAGES, *filter(LIBRARIES.fullmatch, listed.splitlines())})
        # -q=2: apt warns of its own sandbox for every file that root downloads.
        download = ["apt-get", "-q=2", *options, "download", *packages]
        run_step(f"{len(packages)} Debian packages", download, folder / "downloads", advice)
        files = sorted((folder / "downloads").glob("*.deb"))
        unpack = 'for file in downloads/*.deb; do dpkg -x "$file" "$0"; done'
        run_step("unpack", ["sh", "-ec", unpack, str(mlir)], folder, "Is the disk full?")
        # Files are named PACKAGE_VERSION_ARCHITECTURE.deb, with %3a for the colon of an epoch
        versions = dict(file.name.replace("%3a", ":").split("_")[:2] for file in files)
    for path in (mlir / "usr/lib/llvm-19/bin").iterdir():  # half of the packages' size
        if path.name not in LLVM_TOOLS:
            path.unlink()
    libraries = ":".join([str(mlir / "usr/lib/llvm-19/lib"), *map(str, (mlir / "usr/lib").glob("*-linux-gnu"))])
    for name in LLVM_TOOLS:
        tool = str(mlir / "usr/lib/llvm-19/bin" / name)
        run_step(name, ["env", f"LD_LIBRARY_PATH={libraries}", tool, "--version"], ROOT, "Report it with these lines.")
    return versions


def set_up() -> None:
    found = read_stamp(CACHE / STAMP_NAME)
    wanted = {"python": [TORCH, TRITON_ASCEND, *SMALL_PACKAGES], "debian": list(DEBIAN_PACKAGES)}
    if {key: found.get(key) for key in wanted} == wanted:
        print("The Ascend toolchain is up to date (.cache/ascend)")
        return
    refuse(preflight())
    print("Setting up the Ascend toolchain in .cache/ascend (a minute or more, once)", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / STAMP_NAME).unlink(missing_ok=True)
    set_up_triton()
    write_stamp(CACHE / STAMP_NAME, {**wanted, "packages": set_up_mlir()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    return status_of("Ascend toolchain", set_up)


if __name__ == "__main__":
    sys.exit(main())
