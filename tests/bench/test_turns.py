"""The demo on a CPU: calls in turn, what their ratios say, and that it says no more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import bench_sparse_attn_e2e as e2e
from bench import turns
from bench.turns import FEWEST, MOST, Spread, take_turns, verdict
from tests.support.bench_helpers import DOCS, documented_fields

SMALL = ["--demo", "--device", "cpu", "--dim", "16", "--seconds", "1e-9"]


@pytest.mark.parametrize(("seconds", "expected"), [(0, FEWEST), (0.012 * 9.5, 10), (1e9, MOST)])
def test_every_second_turn_goes_the_other_way(seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of 4 and 8 ms by a clock of the test's own."""
    now, log = [0.0], []

    def call(name: str, ms: float) -> Callable[[], None]:
        def run() -> None:
            log.append(name)
            now[0] += ms / 1e3

        return run

    monkeypatch.setattr(turns.time, "thread_time", lambda: now[0])
    times = take_turns([call("a", 4), call("b", 8)], seconds)
    assert "".join(log) == ("abba" * expected)[: 2 * expected]
    assert times == [pytest.approx([4.0] * expected), pytest.approx([8.0] * expected)]


@pytest.mark.parametrize(
    ("spread", "faster", "times"),
    [
        (Spread(1.01, 1.1, 1.2), "NSA", 1.1),
        (Spread(1.6, 2.0, 2.4), "NSA", 2.0),
        (Spread(0.4, 0.45, 0.49), "dense", 1 / 0.45),
        (Spread(1.0, 1.1, 1.2), "neither", 1.1),
        (Spread(1.6, 2.0, 2.41), "too noisy", 2.0),
        (Spread(0.21, 0.9, 1.1), "too noisy", 1 / 0.9),
    ],
)
def test_what_a_spread_says(spread: Spread, faster: str, times: float) -> None:
    assert (spread.faster, spread.times) == (faster, pytest.approx(times))


DENSE, NSA, EVEN, NOISY = Spread(0.48, 0.5, 0.52), Spread(1.9, 2.0, 2.1), Spread(0.9, 1.0, 1.1), Spread(0.2, 2.0, 3.0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([DENSE, NSA], "Dense attention is faster at 0 (2.0 times). NSA is faster at 1 (2.0 times)."),
        ([NSA, NSA, NSA], "NSA is faster at 0 (2.0 times), 1 (2.0 times) and 2 (2.0 times)."),
        ([EVEN, EVEN], "At 0 and 1 neither is: it is the one in some turns and the other in others."),
        (
            [NSA, NOISY],
            "NSA is faster at 0 (2.0 times). Nothing is known of 1: the ratio varied by more than 1.5 times between "
            "turns (20th to 80th percentile). Run it again when less else runs.",
        ),
    ],
)
def test_verdicts(found: Sequence[Spread], said: str) -> None:
    assert verdict([(str(i), ratio) for i, ratio in enumerate(found)]) == said


def test_demo_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seqlens", "64,128", "--num-cmp", "none,1", "--out", str(tmp_path / "run")]
    assert e2e.main([*SMALL, *options]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["gate"] == "green"
    assert content["device"].endswith(", 1 thread")
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    match = re.search(r"a row also has `(.*?)`", page, re.DOTALL)
    assert match is not None
    more = set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", match[1])))
    for row in content["rows"]:
        assert set(row) == documented_fields("bench_sparse_attn_e2e.py") | more
        assert (row["mode"], row["turns"], row["h"], row["inputs"]) == ("turns", FEWEST, 1, "text")
        assert 0 < row["speedup_p20"] <= row["speedup"] <= row["speedup_p80"]
        assert 0 <= row["error"] <= row["error_budget"] < 0.1
        assert row["faster"] == Spread(row["speedup_p20"], row["speedup"], row["speedup_p80"]).faster
    assert [(row["n"], row["num_cmp"]) for row in content["rows"]] == [(n, c) for n in (64, 128) for c in (None, 1)]
    assert "N = 128 with l=64 num_cmp=1" in content["verdict"]
    shown = " ".join(capsys.readouterr().out.split())
    assert content["verdict"] in shown


@pytest.mark.parametrize("noisy", [[True, False], [True, True]])
def test_noisy_rows_are_marked_and_not_drawn(
    noisy: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steady, load = [[20.0] * FEWEST, [10.0] * FEWEST], [[20.0] * FEWEST, [10.0, 10.0, 95.0, 10.0, 95.0]]
    answers = iter([load if one else steady for one in noisy])
    drawn: list[int] = []
    right = e2e.plot

    def plot(rows: Any, *more: Any) -> None:
        drawn.extend(row["n"] for row in rows)
        right(rows, *more)

    monkeypatch.setattr(e2e, "take_turns", lambda *_: next(answers))
    monkeypatch.setattr(e2e, "plot", plot)
    assert e2e.main([*SMALL, "--seqlens", "64,128", "--out", str(tmp_path / "run")]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["faster"] for row in rows] == ["too noisy" if one else "NSA" for one in noisy]
    assert drawn == [n for n, one in zip((64, 128), noisy, strict=True) if not one]
    assert (tmp_path / "run.png").exists() == (not all(noisy))
    shown = capsys.readouterr().out
    assert "?2.00x" in shown
    assert ("NSA is faster at" in shown) == (not all(noisy))
    assert "Nothing is known of N = 64" in " ".join(shown.split())
