"""Files of benchmarks: tried before anything is measured, written as rows are made, gone on with."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import bench_generate as generate
from bench import bench_neighborhood_attention as neighborhood
from bench import bench_sparse_attn_e2e as e2e
from bench import pass_report
from bench import probe_max_seqlen as probe
from bench.common import with_ending
from bench.oracles import Error
from bench.report import replacing, write_json
from bench.results_file import hold, open_results, replaced_results
from tests.support.bench_helpers import run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--heads", "2", "--dim", "16", "--seconds", "1e-9"]
FACTS = {"device": "a machine", "versions": {"torch": "2"}, "commit": "abc"}
HEAD = {**FACTS, "command": "python bench.py"}


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Interrupted


def stop_at(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The call, interrupted when it is made for the `count`th time."""
    made = 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal made
        made += 1
        if made == count:
            raise KeyboardInterrupt
        return call(*arguments, **keywords)

    return interrupted


def test_end_to_end_goes_on_with_the_next_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in its third length: dense attention's times stay, and the third is extrapolated from them."""
    options = [*SMALL, "--seqlens", "64,128,256", "--num-cmp", "none,2,1", "--no-dense-above", "128"]
    out, right, calls = tmp_path / "run-0.5", e2e.measure_mode, []
    monkeypatch.setattr(e2e, "measure_mode", stop_at(right, 8))
    with pytest.raises(SystemExit, match="130"):
        e2e.main([*options, "--out", str(out)])
    before = read(with_ending(out, ".json"))
    assert (before["gate"], len(before["parts"])) == ("unfinished", 2)
    monkeypatch.setattr(e2e, "measure_mode", lambda *given: calls.append(None) or right(*given))
    after = run(e2e.main, out, *options)
    rows = after["rows"]
    first = [row for part in before["parts"].values() for row in part["rows"]]
    assert (rows[:6], len(calls), "parts" in after) == (first, 3, False)
    assert [(row["n"], row["num_cmp"]) for row in rows] == [(n, c) for n in (64, 128, 256) for c in (None, 2, 1)]
    assert len({(row["n"], row["dense_ms"]) for row in rows}) == 3
    assert rows[-1]["dense_ms"] == pytest.approx(4 * rows[3]["dense_ms"])
    assert names(tmp_path) == {"run-0.5.json", "run-0.5.png"}


def test_the_floor_stays_that_of_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bandwidth that is measured again would be another one."""
    measured = iter([4.0, 5.0])
    with open_results(tmp_path / "run", HEAD) as results:
        assert results.fact("floor_tbs", lambda: next(measured)) == 4.0
        results.add("a", [{"n": 1}])
    with open_results(tmp_path / "run", HEAD) as results:
        assert results.fact("floor_tbs", lambda: next(measured)) == 4.0
        results.finish(bars=[])
    finished = {"gate": "green", "red": [], "bars": [], "rows": [{"n": 1}]}
    assert read(tmp_path / "run.json") == {**HEAD, "floor_tbs": 4.0, **finished}


# What is gone on with, and what not


def test_parts_are_measured_once_up_to_a_wrong_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop of all benchmarks of parts; a wrong part empties the file, and what follows is not measured."""

    def measured(wrong: str, *, stop: str = "") -> list[str]:
        seen: list[str] = []

        def measure(name: str) -> list[dict[str, Any] | str]:
            if name == stop:
                raise KeyboardInterrupt
            seen.append(name)
            hold(name, Error("", 2.0 if name == wrong else float("nan") if wrong == "nan" else 1.0, 1.0))
            return [{"name": name}, f"{name} lacks"]

        with open_results(tmp_path / "run", HEAD) as results:
            parts = [(name, functools.partial(measure, name)) for name in "abc"]
            if results.measure(parts, "row {name}"):
                results.finish(missing=results.missing)
        return seen

    with pytest.raises(SystemExit, match="130"):
        measured("", stop="b")
    assert measured("") == ["b", "c"]
    assert read(tmp_path / "run.json")["rows"] == [{"name": name} for name in "abc"]
    assert read(tmp_path / "run.json")["missing"] == [f"{name} lacks" for name in "abc"]
    assert "row a\na lacks\n" in capsys.readouterr().out
    assert measured("b") == ["a", "b"]
    red = "b: error 2.00e+00 is above the budget 1.00e+00"
    assert read(tmp_path / "run.json") == {**HEAD, "gate": "red", "red": [red], "missing": [], "rows": []}
    assert "no times are reported" in capsys.readouterr().out
    assert measured("nan") == ["a"]


def write_some(out: Path, head: dict[str, Any], *parts: str) -> None:
    with open_results(out, head) as results:
        for part in parts:
            results.add(part, [{"part": part}], [f"{part} lacks"])


@pytest.mark.parametrize("name", ["device", "versions", "commit", "command"])
def test_what_differs_is_not_mixed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_some(tmp_path / "run", HEAD, "a", "b")
    assert capsys.readouterr().out == ""
    other = {**HEAD, name: "another"}
    with open_results(tmp_path / "run", other) as results:
        assert results.parts == {}
        assert list(read(tmp_path / "run.json")["parts"]) == ["a", "b"], "there until others are made"
        results.add("c", [{"part": "c"}])
    said = capsys.readouterr().out
    assert said.startswith("Starting anew, since the unfinished results in ")
    assert f"{name} is 'another', was {HEAD[name]!r}" in said
    assert list(read(tmp_path / "run.json")["parts"]) == ["c"]
    write_some(tmp_path / "run", other, "d")
    assert capsys.readouterr().out.startswith("Going on from the 1 rows in ")
    assert read(tmp_path / "run.json")["parts"] == {
        "c": {"rows": [{"part": "c"}], "missing": []},
        "d": {"rows": [{"part": "d"}], "missing": ["d lacks"]},
    }


@pytest.mark.parametrize(("out", "name"), [("run", "run"), ("run.json", "run"), ("run-0.5", "run-0.5")])
def test_finished_results_are_made_anew(out: str, name: str, tmp_path: Path) -> None:
    """Their plot goes when the first other rows come."""
    (tmp_path / f"{name}.png").touch()
    write_json(tmp_path / f"{name}.json", {**HEAD, "gate": "green", "rows": [{"n": 1}]})
    with open_results(tmp_path / out, HEAD) as results:
        assert results.rows == []
        assert names(tmp_path) == {f"{name}.json", f"{name}.png"}
        results.add("a", [{"n": 2}])
        assert names(tmp_path) == {f"{name}.json"}
    assert list(read(tmp_path / f"{name}.json")["parts"]) == ["a"]


@pytest.mark.parametrize("content", ["not JSON", '{"name": "package"}'])
def test_a_file_of_something_else_is_not_overwritten(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    refused = pytest.raises(SystemExit, match="holds no results of this project; name another --out")
    with refused:
        e2e.main([*SMALL, "--seqlens", "64", "--out", str(tmp_path / "run")])
    with refused, replaced_results(tmp_path / "run"):
        raise AssertionError("it is another's")
    assert (tmp_path / "run.json").read_text() == content


# Files that cannot be written


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (e2e, [*SMALL, "--seqlens", "64"]),
        (neighborhood, ["--device", "cpu", "--shapes", "tiny"]),
        (generate, ["--device", "cpu"]),
        (probe, ["--device", "cpu", "--heads", "2", "--dim", "16", "--memory-limit", "1"]),
    ],
)
def test_files_that_cannot_be_written_are_refused_at_once(
    module: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = (e2e, "make_problem"), (pass_report, "measure_pass"), (generate, "make_models"), (probe, "start_trial")
    for measures, name in measuring:
        monkeypatch.setattr(measures, name, lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--out: .*file/run.* cannot be written"):
        module.main([*options, "--out", str(tmp_path / "file" / "run")])
    assert names(tmp_path) == {"file"}


def test_files_come_by_rename(tmp_path: Path) -> None:
    """A reader sees the old file or the new one; a failed writer leaves the old one, and nothing else."""
    path = tmp_path / "run.png"
    path.write_text("old")

    def fail(partial: Path) -> None:
        partial.touch()
        raise ValueError("failed")

    with replacing(path) as one, replacing(path) as two:
        assert one != two
        assert {one.suffix, two.suffix} == {".png"}, "by which savefig knows the format"
        one.write_text("new")
        two.write_text("newer")
        assert path.read_text() == "old"
    assert path.read_text() == "new", "what ended last"
    with pytest.raises(ValueError, match="failed"), replacing(path) as partial:
        fail(partial)
    assert path.read_text() == "new"
    assert names(tmp_path) == {"run.png"}
