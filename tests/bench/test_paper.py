"""The benchmark of the paper's NSA: its rows, its gate, its peers and its bars."""

from __future__ import annotations

import csv
import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_paper as paper
from bench import bench_sparse_attn_e2e as e2e
from bench import nsa_peers, passes, results_file
from bench.inputs import Sizes, make_problem
from bench.passes import Candidate, Task, Unavailable
from nsa import NSAConfig
from tests.support.bench_helpers import documented_fields

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--heads", "2", "--kv-heads", "1", "--dim", "16", "--seqlens", "40,70", "--seconds", "1e-9"]


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = paper.main([*SMALL, *options, "--out", str(folder / "run")])
    return status, json.loads((folder / "run.json").read_text())


def make_others(monkeypatch: pytest.MonkeyPatch, make: Callable[[str, NSAConfig, Task], Candidate]) -> None:
    monkeypatch.setattr(paper, "make_peer", make)


def weigh(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Stands in for a peer."""
    return q + (k + v).mean((1, 2), keepdim=True) * torch.stack(gates).sum(0)[..., None]


def test_writes_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[str]] = []
    right = results_file.write_json

    def recording(path: Path, content: dict[str, Any]) -> None:
        written.append([f"{row['n']} {row['pass']}" for row in content["rows"]])
        right(path, content)

    monkeypatch.setattr(results_file, "write_json", recording)
    make_others(monkeypatch, lambda name, *_: Candidate(name, weigh, graphs=False))
    status, content = run(tmp_path, "--bars")
    assert (status, content["gate"], content["missing"]) == (0, "green", [])
    order = [f"{n} {direction}" for n in (40, 70) for direction in ("fwd", "fwd+bwd")]
    assert written == [order[: i + 1] for i in range(4)] + [order], "after every length and pass"
    documented = documented_fields("bench_sparse_attn_e2e.py") | {"fla_ms", "fla_gib", "fla_computes"}
    for row in content["rows"]:
        assert set(row) == documented
        assert (row["preset"], row["l"], row["stride"], row["q_tile"], row["mode"]) == ("paper", 32, 16, 1, "eager")
        assert 0 <= row["error"] <= row["error_budget"]
        assert (row["gradient_error"] is None) == (row["pass"] == "fwd")
        assert row["fla_ms"] > 0
        assert row["fla_computes"].startswith("other results")
        assert row["dense_ms"] > 0
    assert {bar["verdict"] for bar in content["bars"]} == {"not measured"}, "of other sizes"
    with (tmp_path / "run.csv").open() as file:
        assert [f"{row['n']} {row['pass']}" for row in csv.DictReader(file)] == order
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "fwd+bwd eager   NSA" in shown
    assert "0 of 26 bars are reached" in shown


def test_a_wrong_gradient_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the forward was written: its times go, too."""
    right = e2e.nsa
    monkeypatch.setattr(e2e, "nsa", lambda q, *args, **keywords: right(q, *args, **keywords) + (q - q.detach()))
    status, content = run(tmp_path, "--seqlens", "40")
    assert (status, content["gate"], content["rows"]) == (1, "red", [])
    assert "of the gradient of q is above the budget" in content["red"][0]


def test_peers_get_gates_and_need_only_be_finite() -> None:
    problem = make_problem("random", Sizes(1, 9, 4, 2, 8), device=CPU, dtype=torch.float32, requires_grad=True)
    task = nsa_peers.make_task(problem)
    assert problem.gate_proj_weight is not None
    expected = torch.einsum("bnhd,hgd->bnhg", problem.q, problem.gate_proj_weight).sigmoid()
    for branch, gate in enumerate(task.leaves[3:]):
        torch.testing.assert_close(gate, expected[..., branch])
    assert not any(leaf.requires_grad for leaf in task.leaves)
    third = nsa_peers.make_task(replace(problem, gate_proj_weight=None)).leaves[-1]
    assert third.shape == (1, 9, 4)
    assert (third == 1 / 3).all()
    measured = passes.measure_pass(
        Candidate("peer", weigh, graphs=False), "fwd+bwd", task, passes.Plan(("fwd+bwd",), True, False, 0.0)
    )
    assert measured.timing is not None
    q = task.leaves[0].clone()
    q[0, -1, -1, -1] = float("inf")
    assert task.truth.worst({"out": task.leaves[0]}).within
    assert not task.truth.worst({"out": task.leaves[0], "dq": q}).within
    assert passes.takes_graphs(Candidate("peer", weigh), torch.device("cuda")) is True
    assert passes.takes_graphs(Candidate("peer", weigh, graphs=False), torch.device("cuda")) is False


def test_fla_is_called_as_it_is_meant_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: FlashAttention-4's window is handed in, and the options arrive."""
    given: dict[str, Any] = {}

    def parallel_nsa(
        q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor, **how: Any
    ) -> Tensor:
        given.update(how, gates=(g_cmp, g_slc, g_swa))
        return module.flash_attn_func(q, k, v, causal=True, window_size=(how["window_size"] - 1, 0))

    def fa4(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, None]:
        given["window"] = how
        return 2 * q, None

    module = types.SimpleNamespace(parallel_nsa=parallel_nsa, flash_attn_func=None)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", types.SimpleNamespace(parallel=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=fa4))
    attention = nsa_peers.PEERS["fla"](NSAConfig.paper())
    q, k, v, *gates = (torch.full((1,), float(i)) for i in range(1, 7))
    assert attention(q, k, v, *gates) == 2 * q
    assert [float(gate) for gate in given.pop("gates")] == [4, 5, 6]
    assert given.pop("window") == {"causal": True, "window_size": (511, 0)}
    assert given == {"block_counts": 16, "block_size": 64, "window_size": 512, "scale": None}

    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    with pytest.raises(Unavailable, match=r"not installed: pip install fla-core==0\.6\.0"):
        nsa_peers.PEERS["fla"](NSAConfig.paper())


def row_of(n: int, direction: str, ms: float, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"b": 1, "h": 64, "h_kv": 4, "d": 128, "dtype": "bf16", "l": 32, "stride": 16}
    values |= {"l_select": 64, "k": 16, "w": 512, "q_tile": 1, "mode": "queued", "gated": True, "inputs": "random"}
    return {**values, "fla_ms": 60.0, "n": n, "pass": direction, "ms_p50": ms, **changes}


def test_bars_are_the_issues() -> None:
    rows = [row_of(64 << 10, "fwd", 25.0), row_of(64 << 10, "fwd+bwd", 70.0, peak_gib=11.0)]
    others = [row_of(64 << 10, "fwd", 1.0, mode="eager"), row_of(64 << 10, "fwd", 1.0, h_kv=8)]
    bars = {bar.what: bar for bar in paper.find_bars([*rows, *others])}
    assert bars["64K fwd"].as_json() == {"bar": "64K fwd", "wanted": "<= 27 ms", "reached": "25 ms", "verdict": "pass"}
    verdicts = {what: bar.verdict for what, bar in bars.items() if bar.verdict != "not measured"}
    assert verdicts == {
        "64K fwd": "pass",
        "64K fwd, stretch": "FAIL",
        "64K fwd, fla takes as long or longer": "pass",
        "64K fwd+bwd": "pass",
        "64K fwd+bwd, stretch": "pass",
        "64K fwd+bwd, fla takes as long or longer": "FAIL",
        "64K fwd+bwd, peak memory": "pass",
        "64K fwd+bwd, peak memory, stretch": "FAIL",
    }
    wanted = {"8K fwd": 2.4, "8K fwd+bwd": 7, "32K fwd": 11, "32K fwd+bwd": 33, "64K fwd+bwd": 82, "128K fwd": 78}
    assert {what: bars[what].wanted for what in wanted} == wanted
    assert bars["128K fwd+bwd"].wanted == 225
    assert bars["128K fwd+bwd, stretch"].verdict == "not measured"


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_on_a_gpu(tmp_path: Path) -> None:
    """Both passes and modes; a peer is there or its reason is."""
    sizes = ["--device", "cuda", "--heads", "32", "--kv-heads", "2", "--seqlens", "2048", "--seconds", "1e-9"]
    assert paper.main([*sizes, "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    rows = content["rows"]
    modes = {"fwd": ["queued", "eager", "graph"], "fwd+bwd": ["queued", "eager"]}
    assert [(row["pass"], row["mode"]) for row in rows] == [(of, mode) for of in modes for mode in modes[of]]
    assert {(row["backend"], row["dense"]) for row in rows} == {("cute", "FlashAttention-4")}
    assert all((row["fla_ms"] is None) == bool(content["missing"]) for row in rows)
