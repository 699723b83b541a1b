"""The end-to-end benchmark: its files, its gate, its command line; and the inputs it is fed."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_sparse_attn_e2e as e2e
from bench.common import choose_backend
from bench.inputs import Sizes, make_problem, standard_library_text
from bench.timing import measure, peak_memory
from dispatch import Call

CPU = torch.device("cpu")
ARCHITECTURE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
SMALL = ["--device", "cpu", "--heads", "2", "--dim", "16", "--seconds", "0"]


def documented_fields() -> set[str]:
    """The fields of a row, as docs/architecture.md lists them."""
    match = re.search(r"A row of `bench_sparse_attn_e2e.py`:\n`(.*?)`", ARCHITECTURE.read_text(), re.DOTALL)
    assert match is not None
    return set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", match[1])))


@pytest.mark.parametrize(
    "options",
    [
        ["--seqlens", "64,300", "--input", "text"],
        ["--seqlens", "300", "--backward", "--ungated", "--dtype", "bf16"],
        ["--seqlens", "100", "--preset", "paper", "--batch", "2", "--kv-heads", "2"],
    ],
    ids=["forward on text", "backward in bf16", "paper"],
)
def test_writes_what_it_promises(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert e2e.main([*SMALL, *options, "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["gate"] == "green"
    assert {"device", "versions", "commit"} <= set(content)
    for row in content["rows"]:
        assert set(row) == documented_fields()
        assert 0 <= row["error"] <= row["error_budget"] < 0.1
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["ms_p50"])
    with (tmp_path / "run.csv").open() as file:
        assert [int(row["n"]) for row in csv.DictReader(file)] == [row["n"] for row in content["rows"]]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert shown.startswith("Sparse (NSA) against dense attention")
    assert "What this says" in shown
    assert "Plot:" in shown


def test_no_speed_on_a_red_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel: its error is above the budget, nothing is timed, the status is 1."""
    right = e2e.nsa_forward_aux

    def wrong(*args: Any, **keywords: Any) -> Any:
        out, aux = right(*args, **keywords)
        return out + 0.01, aux

    monkeypatch.setattr(e2e, "nsa_forward_aux", wrong)
    monkeypatch.setattr(e2e, "measure", lambda *_, **__: pytest.fail("timed a wrong result"))
    assert e2e.main([*SMALL, "--seqlens", "64", "--out", str(tmp_path / "run")]) == 1
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["gate"] == "red"
    assert content["rows"] == []
    assert "N=64: error 1.0" in content["red"][0]
    assert not (tmp_path / "run.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlens", "4K,x"], "must be a positive integer such as 4096 or 4K, got 'x'"),
        (["--heads", "0"], "must be a positive integer such as 4096 or 4K, got '0'"),
        (["--heads", "4", "--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 4 and 3"),
        (["--preset", "large"], "invalid choice: 'large'"),
    ],
)
def test_bad_command_lines(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        e2e.main([*SMALL, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_lengths_have_suffixes() -> None:
    assert e2e.parse(["--seqlens", "100, 4k,1M"]).seqlens == [100, 4096, 2**20]


def test_backends() -> None:
    assert choose_backend(Call("nsa", CPU, torch.float32), None) == ("reference", "")
    on_meta = Call("nsa", "meta", torch.float32)
    backend, note = choose_backend(on_meta, None)
    assert backend == "reference"
    assert "runs on meta only when named" in note
    with pytest.raises(SystemExit, match="backend must be one of cute, reference"):
        e2e.main([*SMALL, "--seqlens", "64", "--backend", "cute"])


def test_text_is_real_and_inputs_are_repeatable() -> None:
    text = standard_library_text()
    assert len(text) > 1_000_000
    assert b"def " in text[:10_000]
    sizes = Sizes(batch=2, tokens=50, heads=4, kv_heads=2, dim=8)
    for kind in ("random", "text"):
        one, two = (make_problem(kind, sizes, device=CPU, dtype=torch.float32) for _ in range(2))
        for name, shape in {"q": (2, 50, 4, 8), "k": (2, 50, 2, 8), "v": (2, 50, 2, 8)}.items():
            assert getattr(one, name).shape == shape
            assert torch.equal(getattr(one, name), getattr(two, name))
            assert 0.5 < getattr(one, name).std() < 2
    longer = make_problem("text", Sizes(1, 100, 4, 2, 8), device=CPU, dtype=torch.float32)
    assert torch.allclose(longer.v[0, :50], one.v[0], atol=1e-5), "a longer text begins with the shorter one"
    with pytest.raises(ValueError, match="inputs must be one of random, text, got 'noise'"):
        make_problem("noise", sizes, device=CPU, dtype=torch.float32)


def test_peak_memory_sees_temporaries() -> None:
    def call() -> torch.Tensor:
        return (torch.ones(64, 2**20) + 1).sum()  # two tensors of 256 MiB at once

    peak = peak_memory(call, CPU)
    assert peak is not None
    assert 0.45 < peak < 0.6
    assert measure(call, CPU, seconds=0).repeats == 3
