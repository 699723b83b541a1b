"""constraints.txt: what pip is given for `make` fits pyproject.toml, and leaves nothing open but what torch decides."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.installed import required_distributions

ROOT = Path(__file__).resolve().parents[2]
BY_TORCH = re.compile(r"torch|triton|sympy|cuda-.*|nvidia-(?!cutlass).*")
"""torch, and what some build of torch names a version of."""
BY_EXTRA = {"torch-npu", "triton-ascend"}
"""Pinned in pyproject.toml, and installed by no `make` on a machine without an NPU."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def requirements(file: str) -> list[Requirement]:
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == "pyproject.toml":
        section = text.partition("[project.optional-dependencies]")[2].partition("[tool.")[0]
        return [Requirement(line) for line in re.findall(r'"([^"]+)"', re.sub(r"#.*", "", section))]
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


def pins(python: str) -> dict[str, str]:
    """Version by name, of what constraints.txt says for a Python."""
    found: dict[str, str] = {}
    for line in requirements("constraints.txt"):
        (pin,) = line.specifier
        assert pin.operator == "==", f"{line} is no version"
        assert not BY_TORCH.fullmatch(line.name), f"{line} is for torch to decide"
        if line.marker is None or line.marker.evaluate({"python_version": python}):
            assert found.setdefault(canonicalize_name(line.name), pin.version) == pin.version, f"{line} is there twice"
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_fit_pyproject(python: str) -> None:
    pinned = pins(python)
    for wanted in requirements("pyproject.toml"):
        name = canonicalize_name(wanted.name)
        if BY_TORCH.fullmatch(name) or name in BY_EXTRA:
            assert name not in pinned
        else:
            assert wanted.specifier.contains(pinned[name], prereleases=True), f"{wanted}, but {name}=={pinned[name]}"


def test_constraints_cover_what_is_installed() -> None:
    pinned = pins("{}.{}".format(*sys.version_info[:2]))
    found = required_distributions()
    assert {"numpy", "pytest", "rich", "pillow"} <= found.keys()
    assert [name for name in found if name not in pinned and not BY_TORCH.fullmatch(name)] == []
