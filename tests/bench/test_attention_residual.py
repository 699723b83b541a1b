"""The benchmark of attention residual: its files, its gate, its peers, and the bars it holds figures against."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_kernels.device import DEVICES
from ascend_kernels.residual import reference
from ascend_kernels.residual.tiling import Plan, ascend_plan, gpu_plan
from bench import bench_attention_residual as bench
from bench import residual_peers
from bench.inputs import Residual
from bench.passes import Task
from bench.residual_peers import EPS, PEERS, formula, make_peer
from bench.roofline import residual_bytes, residual_held
from tests.support.bench_helpers import DOCS, Changed, documented_fields

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--seconds", "1e-9"]
STACKED, LISTED = Residual(3, 2, 33, 16), Residual(5, 1, 20, 24, listed=True)


def test_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU the reference beside eager PyTorch, blocks in one tensor and as a list; other peers say why not."""
    options = ["--shapes", str(STACKED), str(LISTED), "--peak-tbs", "0.01", "--bars", "--out", str(tmp_path / "run")]
    assert bench.main([*SMALL, *options]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["gate"], content["red"], content["floor_tbs"]) == ("green", [], 0.01)
    rows = content["rows"]
    assert [(row["inputs"], row["pass"]) for row in rows] == [
        (inputs, direction) for inputs in ("stacked", "list") for direction in ("fwd", "bwd", "fwd+bwd")
    ]
    for row in rows:
        assert set(row) == documented_fields("bench_attention_residual.py")
        assert (row["op"], row["backend"], row["default"]) == ("attention_residual", "reference", True)
        assert (row["mode"], row["dtype"]) == ("eager", "fp32")
        assert 0 < row["error"] <= row["error_budget"] < 1e-4
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["wall_ms"] == row["ms_p50"], "a call as Python makes it is what was timed"
        shape = Residual(*(row[name] for name in "lbtd"), listed=row["inputs"] == "list")
        assert row["floor_ms"] == pytest.approx(residual_bytes(shape, row["pass"], 4) / 1e7)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_p50"])
        assert row["peak_mib"] > 0.5 * row["floor_mib"] > 0, "what a call is given counts"
        assert row["eager_ms"] > 0
        assert row["eager_wall_ms"] == row["eager_ms"]
        assert all(row[f"{peer}_{what}"] is None for peer in ("liger", "compile") for what in ("ms", "wall_ms", "mib"))
    assert content["missing"] == [
        f"{peer} did not run: runs on CUDA devices, got cpu (everywhere)" for peer in ("liger", "compile")
    ]
    assert {bar["verdict"] for bar in content["bars"]} == {"not measured"}
    assert (tmp_path / "run.csv").read_text().startswith("op,pass,backend")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert str(LISTED) in shown
    assert re.search(
        rf"^{LISTED} fwd\+bwd: reference \S+ ms \(\d+% of the floor\), liger -, compile -, eager \S+$", shown, re.M
    )
    assert f"0 of {len(content['bars'])} bars are reached, {len(content['bars'])} not measured." in shown


# The gate


@pytest.mark.parametrize(("place", "value"), [("out", float("nan")), ("dblocks[4]", 1e-2), ("dw_norm", 1e-2)])
def test_no_times_on_a_red_gate(place: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(blocks: list[Tensor], w_query: Tensor, w_norm: Tensor, *options: Any, **named: Any) -> Tensor:
        leaves = [*blocks, w_query, w_norm]
        for i, name in enumerate(bench.gradient_names(LISTED)):
            if name == place:
                leaves[i] = Changed.apply(leaves[i], 0.0, value)
        out = bench.dispatch.attention_residual(leaves[:-2], *leaves[-2:], *options, **named)
        return Changed.apply(out, value, 0.0) if place == "out" else out

    monkeypatch.setattr(bench, "attention_residual", changed)
    monkeypatch.setattr(bench, "make_peer", lambda *_: pytest.fail("a peer of a wrong backend"))
    modes = ["--modes", "forward" if place == "out" else "backward"]
    assert bench.main([*SMALL, *modes, "--shapes", str(LISTED), "--out", str(tmp_path / "run")]) == 1
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["gate"], content["rows"]) == ("red", [])
    assert re.search(rf"reference: error \S+ of {re.escape(place)} is above the budget", content["red"][0])
    assert not (tmp_path / "run.csv").exists()


@pytest.mark.parametrize("shape", [STACKED, LISTED], ids=str)
def test_truth_in_pieces_is_the_whole(shape: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tokens and sampled rows, against fp64 on everything at once."""
    monkeypatch.setattr(bench, "CHUNK_NUMBERS", 7 * shape.blocks * shape.dim)
    monkeypatch.setattr(bench, "SAMPLED", 10)
    task = bench.make_task(shape, CPU, torch.float32)
    leaves = [leaf.double().requires_grad_() for leaf in task.leaves]
    blocks = leaves[:-2] if shape.listed else leaves[0]
    out = reference.attention_residual(blocks, *leaves[-2:], eps=EPS)[0]
    results = dict(zip(task.gradients, torch.autograd.grad(out, leaves, task.do.double()), strict=True))
    results["out"] = out.detach()
    tokens = torch.arange(shape.batch * shape.tokens).view(shape.batch, -1, 1)
    rows = task.truth.sample("out", tokens)[:, 0]
    assert (len(rows), rows[0], rows[-1]) == (10, 0, tokens[-1, -1])
    for name, result in results.items():
        assert task.truth.worst({name: result}).error < 1e-12, name
        # sampled or not, one that is not finite is found; one that is off is found in sampled rows
        wrong = result.clone()
        wrong.view(-1)[shape.dim + 1 if result.dim() > 1 else 1] = float("nan")
        assert not task.truth.worst({**results, name: wrong}).within
        off = result.clone()
        off.view(-1)[-1] += 0.1
        assert task.truth.worst({**results, name: off}).name == name
        assert not task.truth.worst({**results, name: off}).within


# Peers


def task_of(shape: Residual) -> Task:
    return bench.make_task(shape, CPU, torch.float64)


def expected(shape: Residual, task: Task) -> Tensor:
    *blocks, w_query, w_norm = task.leaves
    given = blocks if shape.listed else blocks[0]
    return reference.attention_residual(given, w_query, w_norm, eps=EPS)[0]


@pytest.mark.parametrize(("name", "shape"), [("liger", STACKED), ("liger", LISTED), ("eager", LISTED)], ids=str)
def test_peers_are_asked_for_the_same(name: str, shape: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's function takes one tensor, both weights and eps by position; here the formula stands in for it."""

    class LigerAttnResFunction:
        @staticmethod
        def apply(stacked: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
            assert stacked.shape == (shape.blocks, shape.batch, shape.tokens, shape.dim)
            assert eps == EPS
            return formula(stacked, w_query, w_norm)

    module = types.ModuleType("liger_kernel.ops.attn_res")
    module.LigerAttnResFunction = LigerAttnResFunction  # type: ignore[attr-defined]
    for package in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.attn_res", module)
    task = task_of(shape)
    monkeypatch.setattr(residual_peers, "PEERS", {"eager": PEERS[name]})  # which runs on a CPU
    torch.testing.assert_close(make_peer("eager", shape, task).call(*task.leaves), expected(shape, task))


# Floors and bars


def test_byte_floor_by_hand() -> None:
    tensor = 4096 * 4096 * 2
    shape = Residual(8, 1, 4096, 4096)
    assert [residual_bytes(shape, way) for way in ("fwd", "bwd", "fwd+bwd")] == [9 * tensor, 17 * tensor, 26 * tensor]
    assert [residual_held(shape, way) for way in ("fwd", "bwd", "fwd+bwd")] == [9 * tensor, 18 * tensor, 18 * tensor]
    assert residual_bytes(shape, "fwd", itemsize=4) == 18 * tensor


def rows_at_the_bars(tmp_path: Path) -> list[dict[str, Any]]:
    """A row for each shape and pass that just reaches every bar."""
    options = ["--shapes", str(STACKED), "--modes", "memory", "--out", str(tmp_path / "run")]
    assert bench.main([*SMALL, *options]) == 0
    stored, _ = json.loads((tmp_path / "run.json").read_text())["rows"]
    rows = []
    for shape in bench.SHAPES["stacked"]:
        for direction, share, memory in (("fwd", 0.8, 72.1), ("fwd+bwd", 0.65, 147.0)):
            sizes = {"l": shape.blocks, "b": shape.batch, "t": shape.tokens, "d": shape.dim, "dtype": "bf16"}
            times = {"ms_p50": 1.0, "wall_ms": 2.0, "liger_ms": 1.0, "liger_wall_ms": 2.0, "eager_ms": 20.0}
            peak = memory * shape.tokens / 1024
            rows.append({**stored, "pass": direction, "share_of_floor": share, "peak_mib": peak, **sizes, **times})
    return rows


def test_every_bar_is_about_its_figure(tmp_path: Path) -> None:
    """All pass at the bar; whatever is made worse fails the bars on it and no other."""
    rows = rows_at_the_bars(tmp_path)
    assert {bar.verdict for bar in bench.bars(rows)} == {"pass"}
    worse = {
        "share_of_floor": (0.64, "of the floor", 14),
        "eager_ms": (19.9, "times as fast as eager", 4),
        "liger_ms": (0.99, "times as fast as Liger", 2),
        "liger_wall_ms": (1.99, "from Python", 2),
    }
    for name, (value, words, count) in worse.items():
        failed = [bar for bar in bench.bars([{**row, name: value} for row in rows]) if bar.verdict == "FAIL"]
        assert len(failed) == count, name
        assert all(words in bar.what for bar in failed)
    grown = [{**row, "peak_mib": row["peak_mib"] + row["t"] ** 2 / 1e6} for row in rows]
    failed = [bar.what for bar in bench.bars(grown) if bar.verdict == "FAIL"]
    assert len(failed) == 8
    assert all("peak memory" in what for what in failed)
    for other in ({"dtype": "fp16"}, {"inputs": "list"}, {"default": False}, {"l": 4}):
        assert {bar.verdict for bar in bench.bars([{**row, **other} for row in rows])} == {"not measured"}


# The documented thresholds

DIMS = sorted({size + more for size in (2**power for power in range(1, 16)) for more in (0, 1)})
"""Around every power of two, where plans change."""


def longest(plan: Callable[[int], Plan], holds: Callable[[Plan], bool]) -> int:
    """The largest D up to which a plan has a property; it has it for all below."""
    held = [holds(plan(dim)) for dim in DIMS]
    assert held == sorted(held, reverse=True)
    return DIMS[sum(held) - 1]


def test_the_documented_thresholds_are_those_of_the_plans() -> None:
    """docs/attention_residual.md says where rows are whole, and where a token is one tile in backward."""
    page = (DOCS / "attention_residual.md").read_text(encoding="utf-8")
    common: dict[str, Any] = {"dtype": torch.float32, "tokens": 4096}

    def whole(plan: Plan) -> bool:
        return not plan.tiled

    def one_tile(plan: Plan) -> bool:
        return plan.one_tile and not plan.tiled

    def of_gpu(backward: bool, blocks: int) -> Callable[[int], Plan]:
        return lambda dim: gpu_plan(backward=backward, dim=dim, blocks=blocks, cores=132, **common)

    def of_npu(name: str, backward: bool, blocks: int, listed: bool = False) -> Callable[[int], Plan]:
        options = {"backward": backward, "blocks": blocks, "listed": listed, "device": DEVICES[name], **common}
        return lambda dim: ascend_plan(dim=dim, **options)

    for names, ub in (("A2, A3", 192), ("950", 256)):
        for name in names.split(", "):
            assert DEVICES[name].ub == ub * 1024
            forward, backward = (longest(of_npu(name, way, 8), whole) for way in (False, True))
            assert f"| {names} | {ub} KiB | D ≤ {forward} | D ≤ {backward} |" in page
            tiles = [longest(of_npu(name, True, blocks), one_tile) for blocks in (8, 4, 1)]
            sentence = "L ≤ 8 up to D = {}, L ≤ 4 up to D = {}; a single block up to D = {}"
            assert f"| NPU, blocks in one tensor | {sentence.format(*tiles)} |" in page
            for blocks, listed in ((9, False), (2, True)):
                assert not any(one_tile(of_npu(name, True, blocks, listed)(dim)) for dim in DIMS)
            assert longest(of_npu(name, True, 1, listed=True), one_tile) == tiles[-1]
    forward, backward = (longest(of_gpu(way, 8), whole) for way in (False, True))
    assert f"| NVIDIA GPU | registers | D ≤ {forward} | D ≤ {backward} |" in page
    counts = (64, 32, 16, 8, 4)
    tiles = [f"L ≤ {blocks} up to D = {longest(of_gpu(True, blocks), one_tile)}" for blocks in counts]
    assert f"| NVIDIA GPU | {', '.join(tiles)} |" in page
    twice = [(of_gpu(True, 20)(dim), dim) for dim in DIMS if dim <= backward]
    most = max(2 * plan.programs * dim for plan, dim in twice if not one_tile(plan))
    assert f"take at most {most / 1e6:.1f} MB for each of the L blocks in 16 bits" in " ".join(page.split())


# On a GPU


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # compilers of peers warn
def test_on_a_gpu_graphs_walls_and_peers(tmp_path: Path) -> None:
    """Every pass as a graph and from Python, beside every peer that is installed; memory is near inputs and outputs."""
    shapes = ["--shapes", "8,1,1024,1024", "3,2,500,1000,list"]
    assert bench.main(["--device", "cuda", *shapes, "--seconds", "1e-9", "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert len({(row["d"], row["pass"]) for row in content["rows"]}) == 6, "forward, backward and both"
    for row in content["rows"]:
        assert (row["mode"], row["dtype"]) == ("graph", "bf16")
        assert row["backend"] != "reference"
        assert row["wall_ms"] > 0.5 * row["ms_p50"] > 0
        assert 0.99 * row["floor_mib"] <= row["peak_mib"] <= 1.5 * row["floor_mib"]
        for peer in PEERS:
            if row[f"{peer}_ms"] is None:
                assert any(line.startswith(f"{peer} did not run") for line in content["missing"])
    assert not any(line.startswith(("compile", "eager")) for line in content["missing"]), content["missing"]
