"""Make .venv and install nsa-kernels into it; `make demo` and `make test` begin with it.

    preflight (problems, and what to do about them) -> .venv -> torch -> this package with its extras -> stamp

Does nothing if the stamp in .venv fits. Standard library only, and free of syntax newer than Python 3.8, so that an old
Python gets a message instead of a SyntaxError.

Environment:
    TORCH_INDEX    address of a package index for the torch step alone, such as one that has CPU-only builds
    TORCH_VERSION  another torch, as `2.9.1` or as `>=2.8,<2.10`
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
STAMP_NAME = ".nsa-bootstrap.json"
CONSTRAINTS = "constraints.txt"
PIP_LINES_SHOWN = 25
PIP_ADVICE = """What to try before running make again:
    network  Behind a proxy, set HTTPS_PROXY. pip's own settings (`pip config list`) are used as they are.
    torch    TORCH_INDEX=<address of a package index> takes torch, and only torch, from there
             (a CPU-only build is smaller by several GB); TORCH_VERSION=<version> takes another version.
    Python   A very new Python may have no torch build yet: make PYTHON=<an older one, from 3.10>.
    disk     pip also fills TMPDIR and its cache (PIP_NO_CACHE_DIR=1: no cache)."""


class SetUpError(Exception):
    """A failed set-up; the message says why and what to do."""


class Device(NamedTuple):
    label: str
    torch: str
    extras: tuple[str, ...]
    disk_gb: int


# Without a GPU torch is pinned: the newest build of a plain index may bring several GB of CUDA libraries.
CPU = Device("CPU only", "torch==2.13.0", (), 4)
GPU = Device("NVIDIA GPU", "torch>=2.6", ("cuda",), 12)
# The torch of the `npu` extra: torch_npu pairs with exactly one version.
NPU = Device("Ascend NPU", "torch==2.7.1", ("npu",), 3)
NPU_NODE = Path("/dev/davinci0")


def find_device() -> Device:
    with suppress(OSError, subprocess.SubprocessError):
        if "GPU" in output_of(["nvidia-smi", "-L"]):
            return GPU
    return NPU if NPU_NODE.exists() or shutil.which("npu-smi") else CPU


def output_of(command: Sequence[str]) -> str:
    """Output of a command; raises OSError if it cannot start, SubprocessError if it fails or does not end."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def torch_requirement(device: Device) -> str:
    version = os.environ.get("TORCH_VERSION", "").strip()
    exact = "==" if version[:1].isdigit() else ""
    return f"torch{exact}{version}" if version else device.torch


def preflight(venv: Path, device: Device, *, make_venv: bool, install_torch: bool) -> list[str]:
    """Reasons why the set-up cannot begin, one message each."""
    problems = []
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if make_venv and missing:
        problems.append(
            f"{sys.executable} lacks the standard module {' and '.join(missing)}.\n"
            "    On Debian or Ubuntu: apt install python3-venv. Without root: a Python from conda or uv, given as\n"
            "    make PYTHON=path/to/python."
        )
    ours = (venv / "pyvenv.cfg").exists() or (venv.is_dir() and not any(venv.iterdir()))
    if make_venv and os.path.lexists(venv) and not ours:
        problems.append(f"{venv} is in the way and is not a virtual environment.\n    Move it elsewhere.")
    free_gb = free_disk_gb(venv)
    if install_torch and free_gb < device.disk_gb:
        problems.append(
            f"Too little disk: {free_gb:.1f} GB free for {venv}, the set-up ({device.label}) needs about "
            f"{device.disk_gb} GB.\n    Free some, or make .venv a symbolic link to a folder on a larger disk."
        )
    return problems


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise SetUpError("\n".join(["cannot begin.", *(f"  - {problem}" for problem in problems)]))


def free_disk_gb(path: Path) -> float:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free / 1e9


def read_stamp(path: Path) -> dict[str, Any]:
    """Facts that a set-up wrote when it was done; empty without a valid file."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(path: Path, stamp: dict[str, Any]) -> None:
    path.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def reason_to_remake(venv: Path, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Reason why the .venv that is there cannot be used, or ""."""
    probe = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        python = output_of([str(venv_python(venv)), "-I", "-c", probe]).strip()
    except (OSError, subprocess.SubprocessError):
        return "its Python is gone, is broken or has no pip"
    made_for = {**found, "python": python}
    for key in ("python", "checkout", "device"):
        if made_for.get(key, wanted[key]) != wanted[key]:
            return f"it was made for another {key}: {made_for[key]}"
    return ""


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def pip_install(venv: Path, *arguments: str) -> list[str]:
    """Command; without bytecode, since Python compiles what is imported: few of torch's modules are."""
    options = ["--no-input", "--progress-bar", "off", "--no-compile"]
    return [str(venv_python(venv)), "-I", "-m", "pip", "install", *options, *arguments]


def torch_index(*otherwise: str) -> list[str]:
    """Options of pip for the torch step: the index of TORCH_INDEX, or others if it names none."""
    index = os.environ.get("TORCH_INDEX", "").strip()
    return ["--index-url", index] if index else [*otherwise]


def run_step(title: str, command: Sequence[str], root: Path, advice: str) -> None:
    print(f"  {title} ... ", end="", flush=True)
    start = time.monotonic()
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}
    step = subprocess.run(command, cwd=root, env=environ, check=False, **pipes, **text)
    if step.returncode == 0:
        print(f"{time.monotonic() - start:.0f} s", flush=True)
        return
    print("failed", flush=True)
    shown_command = re.sub(r"//[^/@\s]+@", "//****@", shlex.join(command).replace(f"{root}{os.sep}", ""))
    last_lines = "\n".join(f"    {line}" for line in step.stdout.splitlines()[-PIP_LINES_SHOWN:])
    raise SetUpError(
        f"this command failed (exit status {step.returncode}):\n\n    {shown_command}\n\n"
        f"Its last lines:\n\n{last_lines}\n\n{advice}"
    )


def set_up(root: Path, venv: Path, extras: Sequence[str], *, need_gpu: bool = False) -> None:
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = "{}.{}".format(*OLDEST_PYTHON)
        raise SetUpError(
            "Python too old: found {}.{}.{}".format(*sys.version_info[:3]) + f", need >= {oldest}.\n"
            f"    Name a newer one: make PYTHON=python{oldest} (your system's packages, conda and uv all offer one)."
        )
    found = read_stamp(venv / STAMP_NAME)
    device = find_device()
    if need_gpu and device is not GPU:
        raise SetUpError("this needs an NVIDIA GPU, and `nvidia-smi -L` lists none here.")
    if device is CPU and found.get("device") == GPU.label:
        device = GPU  # works without one too: a cluster's login node keeps it
    torch = torch_requirement(device)
    wanted = {
        "checkout": str(root),
        "device": device.label,
        "pyproject": hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest(),
        "constraints": hashlib.sha256((root / CONSTRAINTS).read_bytes()).hexdigest(),
        "torch": torch,
        "python": "{}.{}".format(*sys.version_info[:2]),
        "extras": sorted({*extras, *device.extras}),
    }
    have_venv = os.path.lexists(venv)
    remake = reason_to_remake(venv, found, wanted) if have_venv else ""
    make_venv = not have_venv or bool(remake)
    same = not make_venv and all(found.get(key) == value for key, value in wanted.items() if key != "extras")
    if same and set(wanted["extras"]) <= set(found["extras"]):
        print(f"{venv.name} is up to date ({device.label}; {', '.join(found['extras']) or 'no extras'})")
        return
    refuse(preflight(venv, device, make_venv=make_venv, install_torch=make_venv or "torch" not in found))
    print(f"Setting up {venv.name}: Python {wanted['python']}, {device.label} (this takes minutes, once)", flush=True)
    if make_venv:
        # Resolved, because venv refuses a symbolic link; --clear keeps the folder that the link points to.
        make_command = [sys.executable, "-m", "venv", "--clear", str(venv.resolve())]
        title = f"{venv.name} (made again: {remake})" if remake else venv.name
        run_step(title, make_command, root, "Is the folder writable?")
    # Until pip is done, the stamp only says what .venv was made for.
    write_stamp(venv / STAMP_NAME, {key: wanted[key] for key in ("checkout", "device")})
    # torch comes first, so that it never arrives as another package's dependency, and is named again in the second
    # step, so that no extra replaces it. An index of torch's own has not every version that CONSTRAINTS names.
    pinned, all_extras = ["--constraint", CONSTRAINTS], ",".join(wanted["extras"])
    run_step(torch, pip_install(venv, *torch_index(*pinned), torch), root, PIP_ADVICE)
    package = ["-e", f".[{all_extras}]" if all_extras else ".", torch]
    run_step(f"nsa-kernels [{all_extras}]", pip_install(venv, *pinned, *package), root, PIP_ADVICE)
    kept_extras = found["extras"] if same else ()
    write_stamp(venv / STAMP_NAME, {**wanted, "extras": sorted({*wanted["extras"], *kept_extras})})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment and install nsa-kernels into it.")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, such as dev,bench (default: none)")
    parser.add_argument("--venv", default=".venv", help="folder, relative to the checkout (default: .venv)")
    parser.add_argument("--gpu", action="store_true", help="refuse to begin without an NVIDIA GPU")
    args = parser.parse_args(argv)
    extras = list(filter(None, args.extras.split(",")))
    return status_of("Set-up", lambda: set_up(ROOT, ROOT / args.venv, extras, need_gpu=args.gpu))


def status_of(name: str, set_up: Callable[[], None]) -> int:
    """Exit status of a set-up, whose failure is printed."""
    try:
        set_up()
        return 0
    except SetUpError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; the next call continues from here.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
