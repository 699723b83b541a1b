"""Where `make test-ascend` put triton-ascend and MLIR (tools/ascend_toolchain.py), and why they cannot be used."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "ascend"
ASCEND_PYTHON = CACHE / "venv" / "bin" / "python"
MLIR = CACHE / "mlir"
STAMP = CACHE / "toolchain.json"


def missing() -> str:
    """Why kernels cannot be lowered and executed here; empty when they can."""
    if not STAMP.exists():
        return "the Ascend toolchain is not set up: run `make test-ascend`, or `python3 tools/ascend_toolchain.py`"
    if shutil.which("cc") is None:
        return "no C compiler `cc` on PATH, which links the lowered kernels"
    return ""


@functools.cache
def version() -> str:
    """What the results depend on: part of every key of the cache."""
    return json.dumps(json.loads(STAMP.read_text(encoding="utf-8")), sort_keys=True)


def llvm_tool(name: str) -> str:
    return str(MLIR / "usr" / "lib" / "llvm-19" / "bin" / name)


def llvm_environment() -> dict[str, str]:
    libraries = [str(MLIR / "usr" / "lib" / "llvm-19" / "lib"), *map(str, (MLIR / "usr" / "lib").glob("*-linux-gnu"))]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}


def write_atomically(path: Path, content: bytes) -> None:
    """Several test processes may make the same file; each replaces it by the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_bytes(content)
    own.replace(path)
