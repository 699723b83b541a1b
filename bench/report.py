"""What a benchmark leaves behind: facts on the machine, and JSON and CSV files (schema: docs/architecture.md)."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dispatch.device import describe_device

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
LOCAL_RESULTS = RESULTS / "local"
"""Where scripts write unless told otherwise; not under version control."""


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit, as every results file begins."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for distribution in ("nsa-kernels", "flash-attn-4", "nvidia-cutlass-dsl", "triton", "fla-core"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {"device": describe_device(device.type), "versions": versions, "commit": commit()}


def commit() -> str:
    """The checkout's commit, with "+changes" when files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def command_line() -> str:
    """The command that reproduces this run from the checkout's root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return " ".join(["python", str(shown), *sys.argv[1:]])


def relative(path: Path) -> Path:
    """A path as a reader in the checkout's root would give it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write all or nothing: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
