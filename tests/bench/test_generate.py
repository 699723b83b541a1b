"""bench_generate.py on a CPU: all models make steps with the inputs of `generate`, and what cannot run is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import bench_generate
from tests.support.bench_helpers import assert_documented, run

pytestmark = pytest.mark.hf_extra

TINY = ["--layers=1", "--hidden=16", "--heads=2", "--kv-heads=1", "--head-dim=8", "--dtype=fp32", "--device=cpu"]


def test_all_models_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_generate.time_step

    def failing(model: Any, mode: str, b: int, *others: Any) -> Any:
        if b == 3:
            raise RuntimeError("out of memory\nand more")
        return real(model, mode, b, *others)

    monkeypatch.setattr(bench_generate, "time_step", failing)
    monkeypatch.setattr(bench_generate, "STEPS", 12)
    content = run(bench_generate.main, tmp_path / "generate", *TINY, "--n=40", "--batch=2,3", "--bars")
    assert {bar["verdict"] for bar in content.pop("bars")} == {"not measured"}
    assert_documented("bench/bench_generate.py", content)
    models = [("dense", False), ("dense", True), ("dense_unmasked", False), ("nsa", False), ("nsa", True)]
    assert [(row["model"], row["padded"]) for row in content["rows"]] == models
    assert {(row["b"], row["n"]) for row in content["rows"]} == {(2, 40)}
    assert all(row["ms_p50"] > 0 for row in content["rows"])
    assert content["missing"] == [
        f"{name}, eager, N=40, B=3{', padded' if padded else ''}: out of memory" for name, padded in models
    ]


def test_bars_are_of_the_fastest_modes_and_dense_models() -> None:
    def row(model: str, mode: str, b: int, ms: float, padded: bool = False) -> dict[str, Any]:
        return {"model": model, "mode": mode, "b": b, "n": 64 << 10, "padded": padded, "ms_p50": ms}

    rows = [row("dense", "eager", 1, 3.0), row("dense", "graph", 1, 2.5), row("nsa", "eager", 1, 4.0)]
    rows += [row("dense_unmasked", "graph", 1, 2.0), row("nsa", "compiled", 1, 1.6)]
    rows += [row("dense", "graph", 16, 2.0), row("nsa", "graph", 16, 2.5)]
    rows += [row("dense", "graph", 16, 6.0, padded=True), row("nsa", "graph", 16, 3.0, padded=True)]
    found = [(bar.reached, bar.verdict) for bar in bench_generate.find_bars(rows)]
    assert found == [(1.25, "pass"), (0.8, "FAIL"), (2.0, "pass")]
    assert [bar.verdict for bar in bench_generate.find_bars(rows[:3])] == ["FAIL", "not measured", "not measured"]
