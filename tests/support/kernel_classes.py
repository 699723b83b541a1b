"""The classes of cute_kernels that hold a kernel, as its sources define them: what must be compiled and launched."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HOPPER_MODULES = (
    "compressed_backward",
    "selected_backward",
    "selected_worklist",
    "window_backward",
    "window_combine",
    "window_dq_combine",
)
"""Of kernels with WGMMA, which sm_100 does not run."""


def our_kernels(arch: str = "sm_90a") -> set[str]:
    """Classes with a kernel for the architecture, as the sources of cute_kernels define them."""
    return {
        node.name
        for path in (ROOT / "cute_kernels").rglob("*.py")
        if arch == "sm_90a" or path.stem not in HOPPER_MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(getattr(member, "name", "") == "kernel" for member in node.body)
    }
