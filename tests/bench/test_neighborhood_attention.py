"""The benchmark of neighborhood attention: its files, its gate, its peers; and the model of its work on an NPU."""

from __future__ import annotations

import csv
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

from ascend_kernels.neighborhood import reference
from ascend_kernels.neighborhood.tiling import ascend_tiles
from bench import bench_neighborhood_attention as bench
from bench import passes
from bench.inputs import Neighborhood, make_problem
from bench.neighborhood_peers import PEERS, residue_classes
from bench.passes import MODES, Candidate, Plan, Unavailable
from bench.roofline import AscendWork, neighborhood_bytes, neighborhood_table, neighborhood_work
from bench.timing import GIB
from tests.support.bench_helpers import DOCS, Changed, documented_fields
from tools import draw_windows

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--seconds", "1e-9"]
SHAPE = Neighborhood(2, 2, 150, 16, 8, 3)
ONE_SEGMENT = Neighborhood(1, 1, 40, 8, 5)


def test_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: the reference, no peers; an even window, dilation, several segments and a single one."""
    shapes = ["--shapes", str(SHAPE), "1,1,500,8,5", "--peak-tbs", "0.01"]
    assert bench.main([*SMALL, *shapes, "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["gate"], content["red"], content["floor_tbs"]) == ("green", [], 0.01)
    assert {"device", "versions", "commit"} <= set(content)
    rows = content["rows"]
    assert [(row["s"], row["pass"]) for row in rows] == [(s, p) for s in (150, 500) for p in ("fwd", "bwd", "fwd+bwd")]
    for row in rows:
        assert set(row) == documented_fields("bench_neighborhood_attention.py")
        assert (row["backend"], row["default"], row["mode"], row["dtype"]) == ("reference", True, "eager", "fp32")
        assert 0 < row["error"] <= row["error_budget"] < 1e-4
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        shape = Neighborhood(*(row[name] for name in ("b", "h", "s", "d", "k", "dilation")))
        assert row["floor_ms"] == pytest.approx(neighborhood_bytes(shape, row["pass"], 4) / 1e7)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_p50"])
        tensors = 4 if row["pass"] == "fwd" else 8
        assert row["floor_gib"] * GIB == tensors * 4 * shape.batch * shape.heads * shape.tokens * shape.dim
        assert all(row[f"{peer}_{what}"] is None for peer in PEERS for what in ("ms", "gib"))
    assert [line.partition(":")[0] for line in content["missing"]] == [f"{name} did not run" for name in PEERS]
    with (tmp_path / "run.csv").open() as file:
        assert [row["pass"] for row in csv.DictReader(file)] == [row["pass"] for row in rows]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "fa4 did not run: runs on CUDA devices, got cpu (everywhere)" in shown
    assert "2,2,150,16,8,3" in shown


# The gate


def changed(place: str, change: float) -> Callable[..., Tensor]:
    """Right but for `change` in the last token of "out", "dq", "dk" or "dv"."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        tensors = {"dq": q, "dk": k, "dv": v}
        if place in tensors:
            tensors[place] = Changed.apply(tensors[place], 0.0, change)
        out = bench.dispatch.neighborhood_attention(*tensors.values(), **options)
        return Changed.apply(out, change, 0.0) if place == "out" else out

    return attention


@pytest.mark.parametrize(("place", "value"), [("out", float("nan")), ("dq", 1e-3), ("dk", 1e-3), ("dv", float("nan"))])
def test_no_times_on_a_red_gate(
    place: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "neighborhood_attention", changed(place, value))
    monkeypatch.setattr(bench, "make_peer", lambda *_: pytest.fail("a peer of a wrong backend"))
    options = ["--shapes", "1,1,40,8,5", "--modes", "forward" if place == "out" else "backward"]
    assert bench.main([*SMALL, *options, "--out", str(tmp_path / "run")]) == 1
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["gate"], content["rows"]) == ("red", [])
    (red,) = content["red"]
    assert re.search(rf"1,1,40,8,5 \w+ reference: error \S+ of {place} is above the budget", red)
    assert not (tmp_path / "run.csv").exists()
    assert "no times are reported" in capsys.readouterr().out


def test_truth_is_the_whole_sequence_in_pieces() -> None:
    """Runs at both ends and between, from pieces of the sequence, against fp64 on all of it; NaN anywhere is found."""
    for shape in (Neighborhood(1, 2, 1501, 8, 6, 3), Neighborhood(1, 1, 700, 8, 63), ONE_SEGMENT):
        problem = make_problem("random", shape.sizes, device=CPU, dtype=torch.float32, gated=False)
        do = torch.randn_like(problem.q)
        truth = bench.make_truth(shape, problem, do)
        tensors = [tensor.double() for tensor in (problem.q, problem.k, problem.v, do)]
        whole = bench._results(shape, tensors)
        for name, exact in truth.exact.items():
            torch.testing.assert_close(exact, truth.sample(name, whole[name]), rtol=1e-12, atol=1e-12)
        rows = truth.sample("out", torch.arange(shape.tokens)[None])[0]
        assert (rows[0], rows[-1]) == (0, shape.tokens - 1)
        assert len(rows) == len(rows.unique()) == min(shape.tokens, 4 * 96)
        assert truth.worst(whole).error < 1e-12
        for name in whole:
            result = whole[name].clone()
            result[:, shape.tokens // 3] = float("nan")
            assert not truth.worst({**whole, name: result}).within


def fake_capture(call: Callable[[], Any], device: torch.device, *, unwritten: bool = False) -> types.SimpleNamespace:
    """A graph as the CPU can have it: replays write the captured results once more."""
    out = call()
    tensors = out if isinstance(out, tuple) else (out,)
    results = [tensor.detach().clone() for tensor in tensors]

    def replay() -> None:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor[:, unwritten:] = result[:, unwritten:]

    return types.SimpleNamespace(out=out, replay=replay, peak_gib=None)


@pytest.mark.parametrize(("direction", "head_major"), [("fwd", False), ("bwd", True), ("fwd+bwd", False)])
def test_what_a_graph_replays_is_checked(direction: str, head_major: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call passes, and fails when a replay leaves a row of its results as it was: NaN."""
    problem = make_problem("random", SHAPE.sizes, device=CPU, dtype=torch.float32, gated=False)
    do = torch.randn_like(problem.q)
    task, plan = bench.make_task(SHAPE, problem, do), Plan.of(MODES, 0, wall=True)
    monkeypatch.setattr(passes, "takes_graphs", lambda *_: True)
    monkeypatch.setattr(passes, "capture", fake_capture)
    candidate = Candidate("a kernel", head_major_reference if head_major else plain_reference, head_major)
    measured = passes.measure_pass(candidate, direction, task, plan)
    assert measured.mode == "graph"
    assert measured.error.within
    assert measured.timing is not None
    assert measured.wall not in (None, measured.timing), "beside replays also a call as Python makes it"
    monkeypatch.setattr(passes, "capture", lambda *args: fake_capture(*args, unwritten=True))
    measured = passes.measure_pass(candidate, direction, task, plan)
    assert not measured.error.within
    assert measured.timing is None


def plain_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.neighborhood_attention(q, k, v, kernel_size=SHAPE.kernel_size, dilation=SHAPE.dilation)[0]


def head_major_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain_reference(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


# Peers


def test_peers_that_fail_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One runs, one runs out of memory, one is wrong."""

    def out_of_memory(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 53 GiB")

    def fake(name: str, *_: Any) -> Candidate:
        if name == "fa4":
            return Candidate(name, plain_reference)
        wrong = lambda q, k, v: head_major_reference(q, k, v) * 1.01  # noqa: E731
        return Candidate(name, out_of_memory if name == "liger" else wrong, head_major=True)

    monkeypatch.setattr(bench, "make_peer", fake)
    assert bench.main([*SMALL, "--shapes", str(SHAPE), "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    for row in content["rows"]:
        assert row["fa4_ms"] > 0
        assert row["fa4_gib"] > 0
        assert (row["flex_ms"], row["flex_gib"], row["liger_ms"], row["liger_gib"]) == (None,) * 4
    assert "liger did not run: out of memory (everywhere)" in content["missing"]
    assert f"({SHAPE} bwd; {SHAPE} fwd+bwd)" in "".join(content["missing"]), "other reasons are of some passes"
    assert any(re.match("flex did not run: error .* of out is above the budget", line) for line in content["missing"])
    shown = capsys.readouterr().out
    assert "fa4 ms" in shown
    assert "liger ms" not in shown
    assert "slower than a peer" in shown


def of_reference(q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int) -> Tensor:
    return reference.neighborhood_attention(q, k, v, kernel_size=kernel_size, dilation=dilation)[0]


def test_fa4_is_asked_for_the_same_neighborhood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window over residue classes as heads, stood in for by the reference."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int]) -> tuple[Tensor, None]:
        left, right = window_size
        assert left - right == (left + right) % 2, "an even window has its extra key on the left"
        return of_reference(q, k, v, left + right + 1, 1), None

    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for shape in (Neighborhood(2, 3, 60, 8, 7, 4), Neighborhood(2, 3, 60, 8, 6, 5), Neighborhood(1, 1, 7, 8, 3)):
        problem = make_problem("random", shape.sizes, device=CPU, dtype=torch.float64, gated=False)
        qkv = (problem.q, problem.k, problem.v)
        candidate = PEERS["fa4"](shape, CPU, torch.bfloat16)
        assert not candidate.head_major
        expected = of_reference(*qkv, shape.kernel_size, shape.dilation)
        torch.testing.assert_close(candidate.call(*qkv), expected)
        assert residue_classes(problem.q, shape.dilation).data_ptr() == problem.q.data_ptr()
    with pytest.raises(Unavailable, match="residue classes of 150 tokens differ in length with dilation 4"):
        PEERS["fa4"](Neighborhood(2, 2, 150, 16, 7, 4), CPU, torch.bfloat16)
    with pytest.raises(Unavailable, match="takes 16-bit tensors, got float32"):
        PEERS["fa4"](SHAPE, CPU, torch.float32)


def test_liger_is_asked_for_the_same_neighborhood(monkeypatch: pytest.MonkeyPatch) -> None:
    class LigerFusedNeighborhoodAttentionFunction:
        @staticmethod
        def apply(q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int) -> Tensor:
            token_major = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return of_reference(*token_major, kernel_size, dilation).transpose(1, 2)

    module = types.ModuleType("liger_kernel.ops.fused_neighborhood_attention")
    module.LigerFusedNeighborhoodAttentionFunction = LigerFusedNeighborhoodAttentionFunction  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_neighborhood_attention", module)
    shape = Neighborhood(2, 3, 60, 8, 7, 4)
    problem = make_problem("random", shape.sizes, device=CPU, dtype=torch.float64, gated=False)
    candidate = PEERS["liger"](shape, CPU, torch.float64)
    qkv = (problem.q, problem.k, problem.v)
    got = candidate.call(*(tensor.transpose(1, 2) for tensor in qkv)).transpose(1, 2)
    torch.testing.assert_close(got, of_reference(*qkv, 7, 4))
    with pytest.raises(Unavailable, match="takes odd windows, got 8"):
        PEERS["liger"](SHAPE, CPU, torch.float64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_asked_for_the_same_neighborhood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, which needs no compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for shape in (Neighborhood(2, 2, 300, 16, 7, 3), Neighborhood(1, 1, 140, 16, 8)):
        problem = make_problem("random", shape.sizes, device=CPU, dtype=torch.float32, gated=False)
        qkv = (problem.q, problem.k, problem.v)
        candidate = PEERS["flex"](shape, CPU, torch.float32)
        got = candidate.call(*(tensor.transpose(1, 2) for tensor in qkv)).transpose(1, 2)
        torch.testing.assert_close(got, of_reference(*qkv, shape.kernel_size, shape.dilation))


# The model


def test_work_of_one_row_by_hand() -> None:
    """k = 7, D = 64: rows of 128 bytes, of 256 in fp32, bands of 28."""
    shape = Neighborhood(1, 1, 1, 64, 7)
    tiles = [ascend_tiles(kernel, torch.bfloat16, 64, 7) for kernel in ("forward", "dq", "dkdv")]
    assert {(tile.block_m, tile.block_n) for tile in tiles} == {(32, 64)}, "the figures below are for these"

    # Flash: 38 keys fit one step of 64, two of them for each of 32 rows
    assert neighborhood_work(shape, "flash", backward=False) == AscendWork(
        l1_bytes=128 + 2 * 2 * 128, ub_bytes=64 * (4 + 2) + 256 + 128 + 4, cube_flops=2 * 2 * 64 * 64, kept_bytes=4
    )
    dq = 2 * 128 + 64 * (4 + 4 + 2) + 256 + 128 + 4 + 4
    dkdv = 64 * (4 + 4 + 2 + 2) + 2 * 256 + 2 * 128 + 2 * (4 + 4)
    assert neighborhood_work(shape, "flash", backward=True) == AscendWork(
        l1_bytes=2 * (2 * 128 + 2 * 2 * 128), ub_bytes=dq + dkdv, cube_flops=(3 + 4) * 2 * 64 * 64, kept_bytes=8
    )

    # Band: written by tiles of 32 rows and 64 keys, multiplied by tiles of 64 rows, whose 70 keys take two of 64
    l1, ub, cube = 2 * 128, 128 * (4 + 2) + 2 * 256 + 128, 2 * 128 * 64
    assert neighborhood_work(shape, "band", backward=False) == AscendWork(
        l1_bytes=128 + 2 * 128 + l1, ub_bytes=64 * 4 + 28 + ub, cube_flops=2 * 64 * 64 + cube, kept_bytes=28
    )
    assert neighborhood_work(shape, "band", backward=True) == AscendWork(
        l1_bytes=128 + 2 * 128 + 3 * l1,
        ub_bytes=64 * 4 + 2 * 28 + 3 * ub,
        cube_flops=2 * 64 * 64 + 3 * cube,
        kept_bytes=2 * 28,
    )

    # Dense: a tile of 64 queries sees its own keys' tile and one on either side
    dv = 192 * (4 + 2) + 3 * 256 + 128
    ds = 2 * 192 * (4 + 4) + 192 * 2
    dqdk = 2 * (192 * (2 + 2) + 3 * 256 + 128)
    assert neighborhood_work(Neighborhood(1, 1, 1000, 64, 7), "dense", backward=True) == AscendWork(
        l1_bytes=1000 * (3 * 128 + 2 * (3 + 3) * 128 + 2 * 3 * 128),
        ub_bytes=1000 * (4 * 1000 + 2 * 64 * 4 + dv + ds + dqdk),
        cube_flops=1000 * 5 * 2 * 192 * 64,
        kept_bytes=1000 * (28 + 1000 * (4 + 2)),
    )
    with pytest.raises(ValueError, match="its forward is the band's"):
        neighborhood_work(shape, "dense", backward=False)


def test_the_documented_model_is_computed() -> None:
    page = (DOCS / "neighborhood_attention.md").read_text(encoding="utf-8")
    assert neighborhood_table([bench.SHAPES["liger"][1], *bench.SHAPES["long"]]) in page


def test_the_picture_is_the_definition() -> None:
    """The file is what the tool draws, and the tool draws the windows of the reference."""
    assert draw_windows.PICTURE.read_text(encoding="utf-8") == draw_windows.draw()
    truncated, shifted = (draw_windows.cells(5, 1, boundary, False) for boundary in ("truncate", "shift"))
    assert [cell for cell in truncated if cell[0] == 0] == [
        *((0, -2, "dropped"), (0, -1, "dropped"), (0, 0, "own"), (0, 1, "seen"), (0, 2, "seen"))
    ]
    assert [cell for cell in shifted if cell[0] == 9] == [
        *((9, 5, "moved"), (9, 6, "moved"), (9, 7, "seen"), (9, 8, "seen"), (9, 9, "own"))
    ]


# On a GPU


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # compilers of peers warn
def test_on_a_gpu_graphs_and_peers(tmp_path: Path) -> None:
    """Every pass as a graph, beside every peer that is installed; memory is near inputs and outputs."""
    shapes = ["--shapes", "1,4,8192,64,7", "1,4,8192,64,8,4"]
    assert bench.main(["--device", "cuda", *shapes, "--seconds", "1e-9", "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    rows = content["rows"]
    assert len({(row["k"], row["pass"]) for row in rows}) == 6
    for row in rows:
        assert (row["mode"], row["dtype"]) == ("graph", "bf16")
        assert row["backend"] != "reference"
        assert 0 < row["share_of_floor"] < 3, "caches of a GPU hold these tensors"
        assert row["peak_gib"] >= 0.99 * row["floor_gib"]
        for peer in PEERS:
            if row[f"{peer}_ms"] is None:
                assert any(line.startswith(f"{peer} did not run") for line in content["missing"])
    assert not any(line.startswith("flex did not run") for line in content["missing"]), content["missing"]
