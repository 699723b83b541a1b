"""bench_generate.py on a CPU: both models make steps, and what cannot run is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import bench_generate
from tests.support.bench_helpers import assert_documented

pytestmark = pytest.mark.hf_extra

TINY = ["--layers=1", "--hidden=16", "--heads=2", "--kv-heads=1", "--head-dim=8", "--dtype=fp32", "--device=cpu"]


def test_both_models_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_generate.time_step

    def failing(model: Any, mode: str, b: int, n: int, device: Any) -> Any:
        if b == 3:
            raise RuntimeError("out of memory\nand more")
        return real(model, mode, b, n, device)

    monkeypatch.setattr(bench_generate, "time_step", failing)
    monkeypatch.setattr(bench_generate, "STEPS", 12)
    out = tmp_path / "generate"
    assert bench_generate.main([*TINY, "--n=40", "--batch=2,3", f"--out={out}"]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert_documented("bench/bench_generate.py", content, {"rows": bench_generate.Row})
    assert [(row["model"], row["b"], row["n"]) for row in content["rows"]] == [("dense", 2, 40), ("nsa", 2, 40)]
    assert all(row["ms_p50"] > 0 for row in content["rows"])
    assert content["missing"] == [f"{name}, eager, N=40, B=3: out of memory" for name in ("dense", "nsa")]


def test_a_step_appends_a_token() -> None:
    args = bench_generate.parse(TINY)
    model = bench_generate.make_models(args)["nsa"]
    with bench_generate.torch.no_grad():
        step = bench_generate.stepper(model, "graph", 2, 40, bench_generate.torch.device("cpu"))
        assert step().shape == (2, 1, 32_000)
        assert not bench_generate.torch.equal(step(), step())
