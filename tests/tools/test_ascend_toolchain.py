"""tools/ascend_toolchain.py without network: what it says where it cannot work, and what it does when all is there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool with an empty cache, on a machine that has every program and disk enough."""
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("ascend_toolchain")
    monkeypatch.setattr(tool, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(tool, "free_disk_gb", lambda _: 100.0)
    monkeypatch.setattr(tool, "is_usable", lambda _: True)
    return tool


def test_each_absence_is_explained(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda _: None)
    monkeypatch.setattr(tool, "free_disk_gb", lambda _: 1.0)
    monkeypatch.setattr(tool.sys, "version_info", (3, 13, 1))
    assert tool.main([]) == 1
    shown = capsys.readouterr().err
    for reason in (
        "No Python 3.11 or 3.10",
        "No apt-get, apt-cache, dpkg",
        "No C compiler `cc`",
        "Too little disk: 1.0 GB",
    ):
        assert reason in shown
    assert not tool.CACHE.exists(), "checked before any work"


def test_stamp(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A second call does nothing, unless something else is wanted; an interrupted one leaves no stamp."""
    done: list[str] = []
    monkeypatch.setattr(tool, "set_up_triton", lambda: done.append("triton"))
    monkeypatch.setattr(tool, "set_up_mlir", lambda: done.append("mlir") or {"llvm-19": "1:19.1.7"})
    assert tool.main([]) == tool.main([]) == 0
    assert done == ["triton", "mlir"]
    assert "up to date" in capsys.readouterr().out
    assert json.loads((tool.CACHE / tool.STAMP_NAME).read_text())["packages"] == {"llvm-19": "1:19.1.7"}

    def fail() -> None:
        raise tool.SetUpError("no network")

    monkeypatch.setattr(tool, "TRITON_ASCEND", "triton-ascend==9.9")
    monkeypatch.setattr(tool, "set_up_mlir", fail)
    assert tool.main([]) == 1
    assert "Ascend toolchain: no network" in capsys.readouterr().err
    assert not (tool.CACHE / tool.STAMP_NAME).exists()
