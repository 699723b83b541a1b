"""The example that converts a Llama: each choice of gates is converted and trained, and the file has what came."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from examples import convert_llama as example
from tests.support.bench_helpers import assert_documented

pytestmark = pytest.mark.hf_extra

TINY = shlex.split("--steps=12 --more=3 --context=32 --width=16 --layers=1 --batch=4 --windows=4")


def test_converts_and_recovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([*TINY, f"--out={tmp_path / 'run-0.5'}"]) == 0
    content = json.loads((tmp_path / "run-0.5.json").read_text())
    assert_documented("examples/convert_llama.py", content, ("rows",))
    rows = {row["start"]: row for row in content["rows"]}
    assert rows.keys() == example.STARTS.keys()
    assert rows["near dense, the default"]["gates"] == [0.05, 0.9, 0.05]
    assert content["dense_loss"] < 5.55  # of even chances
    shown = " ".join(capsys.readouterr().out.split())
    for row in rows.values():
        assert row["trained_loss"] < row["converted_loss"]
        for step, loss in ((0, "converted_loss"), (3, "trained_loss")):
            assert f"{row['start']}, step {step}: validation loss {row[loss]:.4f}" in shown
