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
    assert bench_generate.main([*TINY, "--n=40", "--batch=2,3", "--bars", f"--out={out}"]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert {bar["verdict"] for bar in content.pop("bars")} == {"not measured"}
    assert_documented("bench/bench_generate.py", content, {"rows": bench_generate.Row})
    assert [(row["model"], row["b"], row["n"]) for row in content["rows"]] == [("dense", 2, 40), ("nsa", 2, 40)]
    assert all(row["ms_p50"] > 0 for row in content["rows"])
    assert content["missing"] == [f"{name}, eager, N=40, B=3: out of memory" for name in ("dense", "nsa")]


@pytest.mark.parametrize("name", bench_generate.MODELS)
def test_a_step_appends_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generate, "CHUNK", 16)
    args = bench_generate.parse(TINY)
    model = bench_generate.make_models(args)[name]
    for mode in ("eager", "graph"):
        with bench_generate.torch.no_grad():
            step = bench_generate.stepper(model, mode, 2, 40, bench_generate.torch.device("cpu"))
            assert step().shape == (2, 1, 32_000)
            assert not bench_generate.torch.equal(step(), step())


def test_bars_are_of_the_fastest_modes() -> None:
    def row(model: str, mode: str, b: int, ms: float) -> bench_generate.Row:
        return bench_generate.Row(model, mode, b, 64 << 10, ms, ms, ms)

    rows = [row("dense", "eager", 1, 3.0), row("dense", "graph", 1, 2.0), row("nsa", "eager", 1, 4.0)]
    rows += [row("nsa", "graph", 1, 1.6), row("dense", "graph", 16, 2.0), row("nsa", "graph", 16, 2.5)]
    assert [(bar.reached, bar.verdict) for bar in bench_generate.find_bars(rows)] == [(1.25, "pass"), (0.8, "FAIL")]
    assert {bar.verdict for bar in bench_generate.find_bars(rows[:3])} == {"FAIL", "not measured"}
