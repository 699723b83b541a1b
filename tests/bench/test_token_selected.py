"""bench/bench_token_selected.py: wrong results are seen, choices are read, rows are written as they come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import oracles
from tests.support import cases
from tests.support.attention_gradients import Branch, gradients

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by PyTorch in place of the kernels."""
    from bench import bench_token_selected as bench

    def visible(q: Tensor, indices: Tensor, size: int) -> Tensor:
        token = torch.arange(q.shape[1])
        chosen = (indices[..., None, :] == (token // size)[:, None]).any(-1) & (token <= token[:, None])
        return chosen.repeat_interleave(q.shape[2] // indices.shape[1], 1)

    def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, size: int, scale: float, **_: Any) -> Any:
        exact = q.double(), k.double(), v.double()
        o, lse = oracles.attention(*exact, visible(q, indices, size), scale, torch.float64)
        return o.to(q.dtype), lse.float()

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        into: Any,
        **how: Any,
    ) -> None:
        branch = Branch(visible(q, indices, how["size"]), lse, delta)
        for to, gradient in zip(into, gradients(q, k, v, do, [branch], how["scale"], low=False), strict=True):
            to.copy_(gradient)

    monkeypatch.setattr("cute_kernels.attend.kv_outer.kv_outer_forward", forward)
    monkeypatch.setattr("cute_kernels.attend.query_outer.query_outer_forward", forward)
    monkeypatch.setattr("cute_kernels.attend.kv_outer_backward.kv_outer_backward", backward)
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "SLOTS", 3)


@pytest.mark.parametrize("choice", ["random", *cases.rest("local", "text")])
def test_sees_wrong_results(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import bench_token_selected as bench

    monkeypatch.setattr(bench, "CHUNK", 128)
    problem = bench.make_problem(300, 4, 2, choice)
    chosen = problem.indices[0, :, 280]
    assert (chosen.diff(dim=1) > 0).all()
    assert choice == "random" or chosen.tolist() == [[0, 3, 4]] * 2
    assert bench.errors(problem) == []
    q = problem.q.clone()
    q[:, :, 0] *= 1.5  # not what o and lse were made from
    assert {text.partition(" of head")[0] for text in bench.errors(replace(problem, q=q))} == {"o"}
    backward = problem.backward()
    monkeypatch.setattr(bench.Problem, "backward", lambda _: [1.1 * x for x in backward])
    query_outer = [1.1 * x for x in problem.query_outer()]
    monkeypatch.setattr(bench.Problem, "query_outer", lambda _: query_outer)
    found = {text.partition(" of head")[0] for text in bench.errors(problem)}
    assert found == {"o, query-outer", "dq", "dk", "dv"}


def test_reads_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of a model with one key/value head serve two; what is no choice is refused."""
    from bench import bench_token_selected as bench

    saved = bench.choose(200, 1, "local", torch.Generator())
    torch.save(saved, tmp_path / "chosen.pt")
    read = bench.load_indices(tmp_path / "chosen.pt")
    problem = bench.make_problem(200, 4, 2, "file", read)
    assert torch.equal(problem.indices, saved.expand(1, 2, 200, 3))
    assert bench.errors(problem) == []
    late, twice = saved.clone(), saved.clone()
    late[0, 0, 0, 2], twice[0, 0, 150, 1] = 1, 0
    for wrong, reason in (
        (saved.long(), "an int32 tensor, got torch.int64"),
        (saved[..., :2], "got \\[1, 1, 200, 2\\]"),
        (late, "up to each token's own"),
        (twice, "ascending"),
    ):
        torch.save(wrong, tmp_path / "chosen.pt")
        with pytest.raises(ValueError, match=reason):
            bench.load_indices(tmp_path / "chosen.pt")


@pytest.mark.parametrize("wrong", [False, True])
def test_writes_as_it_goes(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each choice and stage, and why fla has none; no rows once a result is wrong."""
    from bench import bench_token_selected as bench
    from bench import results_file

    def lists(indices: Tensor, **how: Any) -> Any:
        assert set(how) == {"size", "min_rows", "token_bytes", "max_bytes", "packed"}
        yield indices

    for name, value in {"HEADS": ((4, 2),), "CHOICES": ("random", "text"), "BAR_TOKENS": 80}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "BARS", {(4, 2): {"forward": 1e9, "both": 0.0}})
    monkeypatch.setattr("cute_kernels.lists.worklist.worklist_chunks", lists)
    monkeypatch.setattr(bench, "capture", lambda call, _: SimpleNamespace(replay=call))
    monkeypatch.setattr(bench, "measure", lambda *_, **__: SimpleNamespace(ms_p50=2.0))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "environment", lambda _: {"device": "NVIDIA H200"})
    saved = bench.choose(100, 1, "local", torch.Generator())
    torch.save(saved, tmp_path / "chosen.pt")
    options = ["--seqlens", "80", "--choices", "random", "text", "--indices", str(tmp_path / "chosen.pt"), "--bars"]
    options += ["--out", str(tmp_path / "run")]
    right, written = bench.errors, []
    monkeypatch.setattr(bench, "errors", lambda problem: ["o"] * (wrong and len(written) == 1) or right(problem))
    monkeypatch.setattr(results_file, "write_json", lambda _, content: written.append(dict(content)))
    if wrong:
        with pytest.raises(SystemExit, match="80   4/2 text    o"):
            bench.main(options)
        assert [(content["gate"], len(content["rows"])) for content in written] == [("unfinished", 5), ("red", 0)]
        return
    bench.main(options)
    assert [len(content["rows"]) for content in written] == [5, 10, 15, 15]
    assert [content["gate"] for content in written] == ["unfinished"] * 3 + ["green"]
    rows = written[-1]["rows"]
    stages = ["lists", "forward", "tiles", "backward", "both"]
    choices = [(80, "random"), (80, "text"), (100, "file")]
    assert [(row["n"], row["choice"], row["stage"]) for row in rows] == [(*one, of) for one in choices for of in stages]
    assert {(row["ms"], row["fla_ms"]) for row in rows} == {(2.0, None)}
    assert len(written[-1]["missing"]) == 6
    assert all("takes groups of 16" in reason for reason in written[-1]["missing"])
    assert [bar["verdict"] for bar in written[-1]["bars"]] == ["pass", "FAIL"]
