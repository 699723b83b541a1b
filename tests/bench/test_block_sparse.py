"""bench_block_sparse.py and bench_token_selected.py on a CPU: rows as documented, wrong results, choices, bars."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_block_sparse as bench
from bench import bench_token_selected as token
from bench import oracles, selected_branch
from tests.support import cases
from tests.support.attention_gradients import Branch, gradients
from tests.support.bench_helpers import run, verdicts

SMALL = ["--device", "cpu", "--seqlens", "100", "--heads", "2", "--kv-heads", "1", "--dim", "16", "--blocks", "16"]
SMALL += ["--count", "3", "--seconds", "0.001"]
PASSES = ("fwd", "fwd+bwd")


def test_rows_and_bars(tmp_path: Path) -> None:
    options = ["--ops", "block_sparse", "top_blocks", "--bars", "--peak-tflops", "1", "--peak-tbs", "1"]
    content = run(bench.main, tmp_path / "run-0.5", *SMALL, *options, script="bench_block_sparse.py")
    names = [*(("block_sparse", direction) for direction in PASSES), ("top_blocks", "fwd")]
    assert [(row["op"], row["pass"]) for row in content["rows"]] == names
    for row in content["rows"]:
        sparse = row["op"] == "block_sparse"
        assert [row[f"{name}_ms"] is not None for name in bench.PEERS] == [sparse, sparse, not sparse]
        assert row["floor_ms"] > 0
    assert content["missing"] == []
    assert {bar["verdict"] for bar in content["bars"]} == {"not measured"}
    # Two products forward, of 16 numbers, two heads and 48 keys but for the first 48 rows' half
    keys = 48 - 48 * 48 / 200
    assert content["rows"][0]["floor_ms"] == pytest.approx(100 * keys * 2 * 16 * 2 * 2 / 1e9)


def test_blocks_are_drawn_as_they_must_be() -> None:
    blocks = selected_branch.draw_blocks((2, 2, 70), 16, 7, torch.Generator().manual_seed(0), bench.own_first)
    assert blocks.shape == (2, 2, 70, 7)
    own = torch.arange(70) // 16
    assert bool((blocks == own[:, None]).any(-1).all())
    assert bool((blocks <= own[:, None]).all())
    assert bool(((blocks >= 0).sum(-1) == own + 1).all())
    ordered = blocks.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


def wrong_gradient(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Right results, and dk of the first key 1.5 times what it is."""

    def changed(q: Tensor, k: Tensor, v: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
        scale = torch.ones_like(k)
        scale[:, 0] = 1.5
        return real(q, k.detach() + (k - k.detach()) * scale, v, *arguments, **options)

    return changed


def wrong_result(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(*arguments: Tensor, **options: Any) -> Tensor:
        out = real(*arguments, **options)
        step = torch.zeros_like(out)
        step[0, -1, 0, 0] = 0.01
        return out + step

    return changed


def wrong_blocks(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The last token's worst choice in place of its best."""

    def changed(q: Tensor, keys: Tensor, **options: Any) -> Tensor:
        out, other = real(q, keys, **options), real(-q, keys, **options)
        out[0, 0, -1] = other[0, 0, -1]
        return out

    return changed


WRONG = [
    ("block_sparse", "block_sparse_attention", wrong_result),
    ("block_sparse", "block_sparse_attention", wrong_gradient),
    ("top_blocks", "top_blocks_by_max", wrong_blocks),
]


@pytest.mark.parametrize(("op", "name", "make"), WRONG)
def test_wrong_results_make_it_red(
    op: str, name: str, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, name, make(getattr(bench, name)))
    assert len(run(bench.main, tmp_path / "run", *SMALL, "--ops", op, "--no-peers", status=1)["red"]) == 1


@pytest.mark.parametrize("make", [wrong_result, wrong_gradient])
def test_a_masked_peer_with_wrong_results_has_no_time(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "masked_attention", make(bench.masked_attention))
    content = run(bench.main, tmp_path / "run", *SMALL, "--ops", "block_sparse")
    wrong = [row["pass"] for row in content["rows"] if row["mask_ms"] is None]
    assert wrong == [*PASSES][0 if make is wrong_result else 1 :]
    reasons = [reason for reason in content["missing"] if reason.startswith("mask did not run: error ")]
    assert len(reasons) == len(wrong)


def test_a_layer_of_minimax_m3(tmp_path: Path) -> None:
    """Beside transformers' own, or told why not."""
    content = run(bench.main, tmp_path / "run", *SMALL, "--ops", "m3_layer", "--peak-tflops", "1")
    if importlib.util.find_spec("transformers") is None:
        why = "did not run: No module named 'transformers'"
        assert content["missing"] == [f"m3_layer N=100 block=16 {direction} {why}" for direction in PASSES]
        return
    assert [row["pass"] for row in content["rows"]] == [*PASSES]
    for row in content["rows"]:
        assert 0 < row["error"] <= row["error_budget"]
        assert min(row["mask_ms"], row["pairs_ms"], row["floor_ms"]) > 0


def test_bars_are_of_the_sizes_that_they_name() -> None:
    row = {"op": "block_sparse", "pass": "fwd", "b": 1, "n": 64 << 10, "h": 64, "h_kv": 4, "d": 128, "k": 16}
    row |= {"block": 128, "dtype": "bf16", "mode": "queued"}
    rows = [
        row | {"ms_p50": 22.0},
        row | {"ms_p50": 66.0, "pass": "fwd+bwd"},
        row | {"ms_p50": 1.0, "op": "top_blocks", "block": 64},
    ]
    assert [*verdicts(bench.find_bars(rows)).values()] == ["pass", "FAIL", "not measured"]


# The selected branch alone


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by PyTorch in place of the kernels."""

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
    monkeypatch.setattr(token, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(token, "SLOTS", 3)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("choice", ["random", *cases.rest("local", "text")])
def test_sees_wrong_results(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_branch, "DRAWN", 1280)
    branch = token.make_branch(300, 4, 2, choice)
    chosen = branch.blocks[0, :, 280]
    assert (chosen.diff(dim=1) > 0).all()
    assert choice == "random" or chosen.tolist() == [[0, 3, 4]] * 2
    assert token.errors(branch) == []
    backward, query_outer = selected_branch.Branch.backward, selected_branch.Branch.query_outer
    wrong = {
        "out": ("saved", (1.1 * branch.saved[0], *branch.saved[1:])),
        "dq": ("backward", lambda do: (1.1 * backward(branch, do)[0], *backward(branch, do)[1:])),
        "dk": ("backward", lambda do: (backward(branch, do)[0], 1.1 * branch.k, backward(branch, do)[2])),
        "dv": ("backward", lambda do: (*backward(branch, do)[:2], branch.v)),
        "query-outer": ("query_outer", lambda: [1.1 * x for x in query_outer(branch)]),
    }
    for name, (what, value) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setitem(vars(branch), what, value)
            assert any(name in text for text in token.errors(branch)), name


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.filterwarnings("default")
def test_reads_choices(tmp_path: Path) -> None:
    """Choices of a model with one key/value head serve two; what is no choice is refused."""
    saved = selected_branch.draw_blocks((1, 1, 200), token.SIZE, 3, torch.Generator(), token.near)
    torch.save(saved, tmp_path / "chosen.pt")
    branch = token.make_branch(200, 4, 2, "file", token.load_indices(tmp_path / "chosen.pt"))
    assert torch.equal(branch.blocks, saved.expand(1, 2, 200, 3))
    assert token.errors(branch) == []
    late = saved.clone()
    late[0, 0, 0, 2] = 1
    for wrong, reason in (
        (saved.long(), "int32 .* got torch.int64"),
        (saved[..., :2], "got torch.int32 \\[1, 1, 200, 2\\]"),
        (late, "up to each token's own"),
    ):
        torch.save(wrong, tmp_path / "chosen.pt")
        with pytest.raises(ValueError, match=reason):
            token.load_indices(tmp_path / "chosen.pt")


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.filterwarnings("default")
def test_a_row_for_each_choice_and_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And why fla has none; no rows once a result is wrong."""

    def lists(indices: Tensor, **how: Any) -> Any:
        assert set(how) == {"size", "min_rows", "token_bytes", "max_bytes", "packed"}
        yield indices

    def graph_ms(call: Callable[[], Any], *_: Any, **__: Any) -> float:
        call()
        return 2.0

    for name, value in {
        "HEADS": ((4, 2),),
        "CHOICES": ("random", "text"),
        "BAR_TOKENS": 80,
        "BARS": {(4, 2): {"forward": 1e9, "both": 0.0}},
        "graph_ms": graph_ms,
        "copy_bandwidth": lambda: 4.0,
        "gpu_facts": lambda *_: {"device": "NVIDIA H200", "versions": {}, "commit": "", "peak_tflops": 989},
    }.items():
        monkeypatch.setattr(token, name, value)
    monkeypatch.setattr("cute_kernels.lists.worklist.worklist_chunks", lists)
    torch.save(
        selected_branch.draw_blocks((1, 1, 100), token.SIZE, 3, torch.Generator(), token.near), tmp_path / "chosen.pt"
    )
    options = ["--seqlens", "80", "--indices", str(tmp_path / "chosen.pt"), "--bars"]
    rows = (content := run(token.main, tmp_path / "run", *options))["rows"]
    stages = ["lists", "forward", "tiles", "backward", "both"]
    choices = [(80, "random"), (80, "text"), (100, "file")]
    assert [(row["n"], row["choice"], row["stage"]) for row in rows] == [(*one, of) for one in choices for of in stages]
    assert {(row["ms"], row["fla_ms"]) for row in rows} == {(2.0, None)}
    assert len(content["missing"]) == 6
    assert all("takes groups of 16" in reason for reason in content["missing"])
    assert [bar["verdict"] for bar in content["bars"]] == ["pass", "FAIL"]
    found = iter([[], ["o"]])
    monkeypatch.setattr(token, "errors", lambda branch: next(found))
    red = run(token.main, tmp_path / "red", *options, status=1)["red"]
    assert red == ["      80   4/2 text    o"]
