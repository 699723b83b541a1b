"""bench/bench_context_parallel.py on a CPU: shares alone, ranks together, a wrong result, going on, bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench import bench_context_parallel as bench
from bench.bench_context_parallel import Row
from tests.support.bench_helpers import documented_fields

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--sizes", "per_tile:140:2/1", "paper:40:2/1", "--dim", "4"]
ALONE = [*SMALL, "--ranks", "2", "--seconds", "0.001"]


def test_fields_are_documented() -> None:
    names = {"pass" if field.name == "direction" else field.name for field in fields(Row)}
    assert names == documented_fields("bench_context_parallel.py")


def test_shares_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "alone"
    assert bench.main([*ALONE, "--out", str(out)]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert content["gate"] == "green"
    assert len(content["rows"]) == 2 * 2 * (1 + 2)
    for preset, n in (("per_tile", 140), ("paper", 40)):
        for direction in bench.PASSES:
            own = [r for r in content["rows"] if (r["preset"], r["pass"]) == (preset, direction)]
            assert [(r["ranks"], r["rank"]) for r in own] == [(1, 0), (2, 0), (2, 1)]
            assert sum(r["tokens"] for r in own[1:]) == n
            share = next(s for s in content["shares"] if (s["preset"], s["pass"]) == (preset, direction))
            times = [r["ms"] for r in own]
            assert share["slowest_over_mean"] == pytest.approx(max(times[1:]) / (sum(times[1:]) / 2))
            assert share["sum_over_single"] == pytest.approx(sum(times[1:]) / times[0])

    # Where it was stopped after the undivided calls, these are not timed again
    rows = [r for r in content["rows"] if r["ranks"] == 1]
    parts = [{"part": name, "rows": 2, "missing": []} for name in dict.fromkeys(_name(r) for r in rows)]
    unfinished = {name: x for name, x in content.items() if name not in ("shares", "rows", "gate", "red")}
    unfinished |= {"gate": "unfinished", "red": [], "parts": parts, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(unfinished))
    timed = []
    real = bench.time_shares
    monkeypatch.setattr(bench, "time_shares", lambda case, *others: timed.append(case.ranks) or real(case, *others))
    assert bench.main([*ALONE, "--out", str(out)]) == 0
    assert timed == [2, 2]
    assert json.loads(out.with_suffix(".json").read_text())["rows"][: len(rows)] == rows


def _name(row: dict[str, object]) -> str:
    return bench.Case(*(row[name] for name in ("preset", "n", "h", "h_kv", "ranks", "layout"))).name  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["out", "dk"])
def test_one_wrong_value_makes_it_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    forward, backward = bench.attend, bench.Alone.add_shares

    def attend(*arguments, **how):  # type: ignore[no-untyped-def]
        out, saved = forward(*arguments, **how)
        if wrong == "out":
            out[0, -1, 0, 0] += 0.1
        return out, saved

    def add_shares(self, shares, *others):  # type: ignore[no-untyped-def]
        if wrong == "dk":
            shares[-1, 0, 0, 0] += 0.1
        return backward(self, shares, *others)

    monkeypatch.setattr(bench, "attend", attend)
    monkeypatch.setattr(bench.Alone, "add_shares", add_shares)
    out = tmp_path / "alone"
    assert bench.main([*ALONE, "--sizes", "paper:40:2/1", "--out", str(out)]) == 1
    content = json.loads(out.with_suffix(".json").read_text())
    assert (content["gate"], content["rows"]) == ("red", [])
    assert f"{wrong} of " in content["red"][0]


@pytest.mark.full
def test_ranks_together(tmp_path: Path) -> None:
    """As torchrun starts them."""
    out = tmp_path / "together"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "bench" / "bench_context_parallel.py"), *SMALL, "--repeats", "1", "--out", str(out)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*launch, *script], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.with_suffix(".json").read_text())
    assert content["gate"] == "green"
    assert {r["mode"] for r in content["rows"]} == {"together"}
    assert [r["rank"] for r in content["rows"]] == [0, 1] * 4
    assert all(r["ms"] > 0 for r in content["rows"])


def test_bars() -> None:
    row = Row("per_tile", 1 << 20, 8, 2, 128, "bf16", 1, 0, "contiguous", "alone", "fwd", 100.0, None, 1 << 20, "")
    divided = [replace(row, ranks=2, rank=rank, layout="zigzag", ms=ms) for rank, ms in enumerate((52.0, 58.0))]
    verdicts = {bar.what: bar.verdict for bar in bench.find_bars(bench.find_shares([row, *divided]))}
    assert verdicts["per_tile 1024K, 2 ranks, fwd, slowest over mean"] == "FAIL"  # 58 over 55
    assert verdicts["per_tile 1024K, 2 ranks, fwd, all over undivided"] == "FAIL"  # 110 over 100
    assert verdicts["paper 256K, 2 ranks, fwd, slowest over mean"] == "not measured"
    even = [replace(one, ms=53.0) for one in divided]
    verdicts = {bar.what: bar.verdict for bar in bench.find_bars(bench.find_shares([row, *even]))}
    assert verdicts["per_tile 1024K, 2 ranks, fwd, all over undivided"] == "pass"
