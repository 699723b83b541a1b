"""What the documents say is so: README's code runs, links lead somewhere, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_example_code_runs(page: Path) -> None:
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_set_up_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE))
    assert named == {"demo", "train-demo", "needle-demo", "residual-demo", "test"}
    assert {*named, "lint", "test-gpu", "clean"} <= set(targets)
