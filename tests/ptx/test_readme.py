"""README.md: its example runs, and its map names every module."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from tests.ptx.order import RaceError

README = Path(__file__).with_name("README.md")
BARRIER = "cute.arch.sync_threads()"


@pytest.mark.interpreted
@pytest.mark.cuda_extra
@pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported
def test_the_example_needs_its_barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (said,) = re.findall(r"^RaceError: (.*); \.\.\.$", text, re.MULTILINE)
    (tmp_path / "reverse_racing.py").write_text(code, encoding="utf-8")
    (tmp_path / "reverse_ordered.py").write_text(code.replace(f"# {BARRIER}", BARRIER), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RaceError, match=re.escape(said)):
        importlib.import_module("reverse_racing")
    ran = importlib.import_module("reverse_ordered")
    assert torch.equal(ran.y, ran.x.flip(0))


def test_the_map_names_every_module() -> None:
    _, _, text = README.read_text(encoding="utf-8").partition("## Map")
    named = re.findall(r"`(\w+\.py)`", text)
    modules = {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}
    assert modules == {*named} - {"__init__.py"}
