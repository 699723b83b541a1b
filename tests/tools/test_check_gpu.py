"""tools/check_gpu.py, with a stand-in for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import bench_paper
from tests.support.bench_helpers import assert_documented
from tools import check_gpu as tool

TIMES = """
import json, sys
from pathlib import Path
rows, out = json.loads(sys.argv[1]), Path(sys.argv[-1])
if rows:
    facts = {"device": "card", "versions": {}, "commit": "c", "command": "python", "gate": "green", "red": []}
    out.write_text(json.dumps({**facts, "missing": [], "rows": rows}))
sys.exit(not rows)
"""
TESTS = """
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="needs two GPUs")
@pytest.mark.parametrize("i", [0, 1])
def test_left(i): pass
"""


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU that PyTorch 2.* can use: "):
        tool.main([], tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("rows", [[{"n": 8192}], []], ids=["timed", "not timed"])
def test_one_file_holds_times_and_outcomes(
    rows: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-PCIE-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    (tmp_path / "times.py").write_text(TIMES)
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(tool, "TIMES", [str(tmp_path / "times.py"), json.dumps(rows)])
    plain = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    monkeypatch.setattr(tool, "TESTS", ["-m", "pytest", *plain, str(tmp_path)])
    path = tmp_path / "check-nvidia-a100-pcie-40gb.json"
    path.write_text("{}")  # of an earlier run
    assert tool.main([], tmp_path) == 1
    content = json.loads(path.read_text())
    assert content["tests"]["passed"] == 1
    assert content["tests"]["skipped"] == {"needs two GPUs": 2}
    assert content["tests"]["failed"] == {"test_some::test_wrong": "assert 1 == 2"}
    assert content["statuses"] == {"times": int(not rows), "tests": 1}
    if rows:
        assert content["rows"] == rows
        assert_documented("tools/check_gpu.py", content, [])


def test_the_benchmark_takes_these_options() -> None:
    assert tool.TIMES[0] == "bench/bench_paper.py"
    assert bench_paper.parse(tool.TIMES[1:]).seqlens == [8 << 10, 32 << 10]
