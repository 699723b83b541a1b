"""Files of benchmarks: facts on the machine, and JSON (schema: docs/results_files.md)."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from bench.commit import ROOT, commit
from bench.roofline import choose_peaks
from dispatch.device import describe_device

RESULTS = ROOT / "bench" / "results"
LOCAL_RESULTS = RESULTS / "local"  # Default folder of results; not under version control


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit, as every results file begins."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for distribution in ("nsa-kernels", "flash-attn-4", "nvidia-cutlass-dsl", "triton", "fla-core", "transformers"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {"device": describe_device(device.type), "versions": versions, "commit": commit()}


def gpu_facts(parser: ArgumentParser, tflops: float | None) -> dict[str, Any]:
    """`environment` and `peak_tflops` of an NVIDIA GPU; an error of the parser where there is none or no peak known."""
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = environment(torch.device("cuda"))
    peaks = choose_peaks(facts["device"], tflops, None)
    if peaks is None:
        parser.error(f"--peak-tflops: not known of {facts['device']}")
    return {**facts, "peak_tflops": peaks.tflops}


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command that reproduces this run from the checkout's root. Args: `argv`: None: those of this process."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("NSA_KERNELS_") and name != "NSA_KERNELS_JIT_CACHE"  # changes no result
    ]
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]
    return shlex.join([*variables, *launcher, str(shown), *(sys.argv[1:] if argv is None else argv)])


def relative(path: Path) -> Path:
    """A path as a reader in the checkout's root would give it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that becomes `path` once it is written: readers never see half, no two writers share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial-{uuid4().hex[:8]}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
