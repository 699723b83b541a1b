"""Benchmarks of neighborhood attention and attention residual: files, gates, peers, bars, and figures of pages."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dispatch
from ascend_kernels.device import DEVICES
from ascend_kernels.neighborhood import reference as neighborhood_reference
from ascend_kernels.residual import reference as residual_reference
from ascend_kernels.residual.tiling import Plan as ResidualPlan
from ascend_kernels.residual.tiling import ascend_plan, gpu_plan
from bench import bench_attention_residual as residual
from bench import bench_neighborhood_attention as neighborhood
from bench import pass_report, passes
from bench.inputs import Neighborhood, Residual, make_problem
from bench.oracles import Error
from bench.passes import Candidate, Measured, Plan, Task, Unavailable
from bench.peers import EPS, NEIGHBORHOOD, RESIDUAL, Peer, formula, make_peer, residue_classes
from bench.roofline import neighborhood_bytes, residual_bytes
from bench.timing import GIB
from tests.support.bench_helpers import DOCS, Changed, has_picture, run
from tools import draw_windows

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--seconds", "1e-9"]
NEAR = Neighborhood(2, 2, 150, 16, 8, 3)
STACKED, LISTED = Residual(3, 2, 33, 16), Residual(5, 1, 20, 24, listed=True)
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")


@pytest.mark.parametrize(
    ("module", "shapes", "absent"),
    [
        (neighborhood, (NEAR, Neighborhood(1, 1, 500, 8, 5)), tuple(NEIGHBORHOOD)),
        (residual, (STACKED, LISTED), ("liger", "compile")),
    ],
    ids=["neighborhood", "residual"],
)
def test_writes_what_it_promises(
    module: Any,
    shapes: tuple[Any, Any],
    absent: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the CPU: the reference, for even windows, dilation, one and several segments, blocks in a tensor or a list."""
    options = ["--shapes", *map(str, shapes), "--peak-tbs", "0.01", *(["--bars"] if module is residual else [])]
    script = Path(str(module.__file__)).name
    content = run(module.main, tmp_path / "run", *SMALL, *options, script=script)
    assert (content["red"], content["floor_tbs"]) == ([], 0.01)
    assert [row["pass"] for row in content["rows"]] == [*DIRECTIONS, *DIRECTIONS]
    for i, row in enumerate(content["rows"]):
        shape, direction = shapes[i // 3], row["pass"]
        assert (row["backend"], row["default"], row["mode"], row["dtype"]) == ("reference", True, "eager", "fp32")
        assert 0 < row["error"] <= row["error_budget"] < 1e-4
        moved = {neighborhood: neighborhood_bytes, residual: residual_bytes}[module](shape, direction, 4)
        assert row["floor_ms"] == pytest.approx(moved / 1e7)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_p50"])
        if module is neighborhood:
            tensors = 4 if direction == "fwd" else 8
            assert row["floor_gib"] * GIB == tensors * 4 * shape.batch * shape.heads * shape.tokens * shape.dim
        else:
            assert row["wall_ms"] == row["ms_p50"], "a call as Python makes it is what was timed"
            assert (row["eager_ms"] > 0, row["eager_wall_ms"]) == (True, row["eager_ms"])
            assert row["peak_mib"] > 0.5 * row["floor_mib"] > 0, "what a call is given counts"
        assert {value for field, value in row.items() if field.partition("_")[0] in absent} == {None}
    assert content["missing"] == [
        f"{peer} did not run: runs on CUDA devices, got cpu ({x})" for x in shapes for peer in absent
    ]
    assert {bar["verdict"] for bar in content.get("bars", ())} <= {"not measured"}
    assert has_picture(tmp_path / "run")
    shown = capsys.readouterr().out
    beside = "  eager \\S+" if module is residual else ""
    assert re.search(rf"^\w+=.* fwd\+bwd: reference \S+ ms  \d+ % of the floor{beside}$", shown, re.M)


# The gate


@pytest.mark.parametrize(
    ("module", "shape", "place", "value"),
    [
        (neighborhood, Neighborhood(1, 1, 40, 8, 5), "out", float("nan")),
        (neighborhood, Neighborhood(1, 1, 40, 8, 5), "dk", 1e-3),
        (neighborhood, Neighborhood(1, 1, 40, 8, 5), "dv", float("nan")),
        (residual, LISTED, "out", float("nan")),
        (residual, LISTED, "dblocks[4]", 1e-2),
        (residual, LISTED, "dw_norm", 1e-2),
    ],
)
def test_no_times_on_a_red_gate(
    module: Any, shape: Any, place: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last element of a result is off."""
    op = "neighborhood_attention" if module is neighborhood else "attention_residual"
    names = ["dq", "dk", "dv"] if module is neighborhood else residual.gradient_names(LISTED)

    def changed(*tensors: Any, **options: Any) -> Tensor:
        leaves, more = (tensors, ()) if module is neighborhood else ((*tensors[0], *tensors[1:3]), tensors[3:])
        leaves = tuple(
            Changed.apply(x, 0.0, value) if name == place else x for name, x in zip(names, leaves, strict=True)
        )
        given = leaves if module is neighborhood else (list(leaves[:-2]), *leaves[-2:], *more)
        out = getattr(dispatch, op)(*given, **options)
        return Changed.apply(out, value, 0.0) if place == "out" else out

    monkeypatch.setattr(module, op, changed)
    monkeypatch.setattr(pass_report, "make_peer", lambda *_: pytest.fail("a peer of a wrong backend"))
    content = run(module.main, tmp_path / "run", *SMALL, "--shapes", str(shape), status=1)
    assert re.search(rf"{shape} \w+ reference: error \S+ of {re.escape(place)} is above the budget", content["red"][0])


def test_truth_of_neighborhoods_is_the_whole_sequence_in_pieces() -> None:
    """Runs at both ends and between, from pieces of the sequence, against fp64 on all of it; NaN anywhere is found."""
    for shape in (Neighborhood(1, 2, 1501, 8, 6, 3), Neighborhood(1, 1, 700, 8, 63), Neighborhood(1, 1, 40, 8, 5)):
        inputs = make_problem("random", shape.sizes, device=CPU, dtype=torch.float32, gated=False)
        do = torch.randn_like(inputs.q)
        truth = neighborhood.make_truth(shape, inputs, do)
        whole = neighborhood._results(shape, [tensor.double() for tensor in (inputs.q, inputs.k, inputs.v, do)])
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


@pytest.mark.parametrize("shape", [STACKED, LISTED], ids=str)
def test_truth_of_residuals_in_pieces_is_the_whole(shape: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tokens and sampled rows, against fp64 on everything at once."""
    monkeypatch.setattr(residual, "CHUNK_NUMBERS", 7 * shape.blocks * shape.dim)
    monkeypatch.setattr(residual, "SAMPLED", 10)
    task = residual.make_task(shape, CPU, torch.float32)
    leaves = [leaf.double().requires_grad_() for leaf in task.leaves]
    out = expected_residual(shape, leaves)
    results = dict(zip(task.gradients, torch.autograd.grad(out, leaves, task.do.double()), strict=True))
    results["out"] = out.detach()
    tokens = torch.arange(shape.batch * shape.tokens).view(shape.batch, -1, 1)
    rows = task.truth.sample("out", tokens)[:, 0]
    assert (len(rows), rows[0], rows[-1]) == (10, 0, tokens[-1, -1])
    for name, result in results.items():
        assert task.truth.worst({name: result}).error < 1e-12, name
        # sampled or not, one that is not finite is found; one that is off is found in sampled rows
        wrong, off = result.clone(), result.clone()
        wrong.view(-1)[shape.dim + 1 if result.dim() > 1 else 1] = float("nan")
        assert not task.truth.worst({**results, name: wrong}).within
        off.view(-1)[-1] += 0.1
        assert task.truth.worst({**results, name: off}).name == name
        assert not task.truth.worst({**results, name: off}).within


def expected_residual(shape: Residual, leaves: Any) -> Tensor:
    *blocks, w_query, w_norm = leaves
    return residual_reference.attention_residual(blocks if shape.listed else blocks[0], w_query, w_norm, eps=EPS)[0]


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


def near(q: Tensor, k: Tensor, v: Tensor, kernel_size: int = NEAR.kernel_size, dilation: int = NEAR.dilation) -> Tensor:
    return neighborhood_reference.neighborhood_attention(q, k, v, kernel_size=kernel_size, dilation=dilation)[0]


def head_major(q: Tensor, k: Tensor, v: Tensor, *window: int) -> Tensor:
    return near(*(tensor.transpose(1, 2) for tensor in (q, k, v)), *window).transpose(1, 2)


@pytest.mark.parametrize(("direction", "by_head"), [("fwd", False), ("bwd", True), ("fwd+bwd", False)])
def test_what_a_graph_replays_is_checked(direction: str, by_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call passes, and fails when a replay leaves a row of its results as it was: NaN."""
    inputs = make_problem("random", NEAR.sizes, device=CPU, dtype=torch.float32, gated=False)
    task = neighborhood.make_task(NEAR, inputs, torch.randn_like(inputs.q))
    plan = Plan(DIRECTIONS, memory=True, seconds=0, wall=True)
    monkeypatch.setattr(passes, "takes_graphs", lambda *_: True)
    candidate = Candidate("a kernel", head_major if by_head else near, by_head)
    for unwritten in (False, True):
        monkeypatch.setattr(passes, "capture", lambda *of, unwritten=unwritten: fake_capture(*of, unwritten=unwritten))
        measured = passes.measure_pass(candidate, direction, task, plan)
        if unwritten:
            assert isinstance(measured, Error)
            assert not measured.within
        else:
            assert isinstance(measured, Measured)
            assert measured.mode == "graph"
            assert measured.wall not in (None, measured.timing), "also a call as Python makes it"


# Peers


def test_peers_that_fail_are_null(tmp_path: Path) -> None:
    """One runs, one runs out of memory, one is wrong."""

    def out_of_memory(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 53 GiB")

    calls = {"fa4": near, "flex": lambda *qkv: head_major(*qkv) * 1.01, "liger": out_of_memory}
    peers = {
        name: peer._replace(make=lambda *_, name=name: Candidate(name, calls[name], name != "fa4"), anywhere=True)
        for name, peer in NEIGHBORHOOD.items()
    }
    content = run(replace(neighborhood.BENCHMARK, peers=peers).main, tmp_path / "run", *SMALL, "--shapes", str(NEAR))
    for row in content["rows"]:
        assert (row["fa4_ms"] > 0, row["fa4_gib"] > 0) == (True, True)
        assert (row["flex_ms"], row["flex_gib"], row["liger_ms"], row["liger_gib"]) == (None,) * 4
    assert f"liger did not run: out of memory ({NEAR})" in content["missing"]
    assert any(re.match("flex did not run: error .* of out is above the budget", line) for line in content["missing"])


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Put a module with some attributes in place of a package that may be absent."""
    parents = name.split(".")
    for i in range(1, len(parents)):
        monkeypatch.setitem(sys.modules, ".".join(parents[:i]), types.ModuleType(parents[i - 1]))
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def peer_result(name: str, shape: Neighborhood, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A peer's output for random inputs, token by token, and the reference's."""
    inputs = make_problem("random", shape.sizes, device=CPU, dtype=dtype, gated=False)
    qkv = (inputs.q, inputs.k, inputs.v)
    given = inputs.q.bfloat16() if name == "fa4" else inputs.q
    candidate = NEIGHBORHOOD[name].make(shape, Task(qkv, given, (), None))  # type: ignore[arg-type]
    assert candidate.head_major == (name != "fa4")
    turned = [x.transpose(1, 2) for x in qkv] if candidate.head_major else qkv
    got = candidate.call(*turned)
    return got.transpose(1, 2) if candidate.head_major else got, near(*qkv, shape.kernel_size, shape.dilation)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_are_asked_for_the_same_neighborhood(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's window over residue classes and Liger's function, stood in for; flex eagerly."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int]) -> tuple[Tensor, None]:
        left, right = window_size
        assert left - right == (left + right) % 2, "an even window has its extra key on the left"
        return near(q, k, v, left + right + 1, 1), None

    install(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func)
    function = types.SimpleNamespace(apply=head_major)
    liger = "liger_kernel.ops.fused_neighborhood_attention"
    install(monkeypatch, liger, LigerFusedNeighborhoodAttentionFunction=function)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name, shape, dtype in (
        ("fa4", Neighborhood(2, 3, 60, 8, 7, 4), torch.float64),
        ("fa4", Neighborhood(2, 3, 60, 8, 6, 5), torch.float64),
        ("fa4", Neighborhood(1, 1, 7, 8, 3), torch.float64),
        ("liger", Neighborhood(2, 3, 60, 8, 7, 4), torch.float64),
        ("flex", Neighborhood(2, 2, 300, 16, 7, 3), torch.float32),
        ("flex", Neighborhood(1, 1, 140, 16, 8), torch.float32),
    ):
        torch.testing.assert_close(*peer_result(name, shape, dtype))
    tensor = torch.empty(2, 60, 3, 8)
    assert residue_classes(tensor, 4).data_ptr() == tensor.data_ptr()
    for name, shape, dtype, reason in (
        ("fa4", Neighborhood(2, 2, 150, 16, 7, 4), torch.bfloat16, "150 tokens differ in length with dilation 4"),
        ("fa4", NEAR, torch.float32, "takes 16-bit tensors, got float32"),
        ("liger", NEAR, torch.float64, "takes odd windows, got 8"),
    ):
        with pytest.raises(Unavailable, match=reason):
            NEIGHBORHOOD[name].make(shape, Task((), torch.empty(0, dtype=dtype), (), None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape"), [("liger", STACKED), ("liger", LISTED), ("eager", LISTED)], ids=str)
def test_peers_are_asked_for_the_same_residual(name: str, shape: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's function takes one tensor, both weights and eps by position; here the formula stands in for it."""

    def apply(stacked: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
        assert stacked.shape == (shape.blocks, shape.batch, shape.tokens, shape.dim)
        assert eps == EPS
        return formula(stacked, w_query, w_norm)

    install(monkeypatch, "liger_kernel.ops.attn_res", LigerAttnResFunction=types.SimpleNamespace(apply=apply))
    task = residual.make_task(shape, CPU, torch.float64)
    candidate = make_peer(RESIDUAL[name]._replace(anywhere=True), shape, task)
    torch.testing.assert_close(candidate.call(*task.leaves), expected_residual(shape, task.leaves))


# Floors, bars and documented figures


def test_byte_floor_by_hand() -> None:
    tensor, shape = 4096 * 4096 * 2, Residual(8, 1, 4096, 4096)
    assert [residual_bytes(shape, way) for way in DIRECTIONS] == [9 * tensor, 17 * tensor, 26 * tensor]
    assert residual_bytes(shape, "fwd", itemsize=4) == 18 * tensor


def test_every_bar_is_about_its_figure() -> None:
    """All pass at the bar; whatever is made worse fails the bars on it and no other."""
    stored = {"default": True, "inputs": "stacked", "dtype": "bf16", "ms_p50": 1.0, "wall_ms": 2.0}
    stored |= {"liger_ms": 1.0, "liger_wall_ms": 2.0, "eager_ms": 20.0}
    rows: list[dict[str, Any]] = []
    for shape in map(Residual.read, residual.SHAPES["stacked"].split()):
        for direction, share, memory in (("fwd", 0.8, 72.1), ("fwd+bwd", 0.65, 147.0)):
            sizes = {"l": shape.blocks, "b": shape.batch, "t": shape.tokens, "d": shape.dim, "pass": direction}
            rows.append({**stored, **sizes, "share_of_floor": share, "peak_mib": memory * shape.tokens / 1024})
    assert {bar.verdict for bar in residual.bars(rows)} == {"pass"}
    for name, value, words, count in (
        ("share_of_floor", lambda row: 0.64, "of the floor", 14),
        ("eager_ms", lambda row: 19.9, "times as fast as eager", 4),
        ("liger_ms", lambda row: 0.99, "times as fast as Liger", 2),
        ("liger_wall_ms", lambda row: 1.99, "from Python", 2),
        ("peak_mib", lambda row: row["peak_mib"] + row["t"] ** 2 / 1e6, "peak memory", 8),
    ):
        failed = [bar for bar in residual.bars([{**row, name: value(row)} for row in rows]) if bar.verdict == "FAIL"]
        assert len(failed) == count, name
        assert all(words in bar.what for bar in failed)
    for other in ({"dtype": "fp16"}, {"inputs": "list"}, {"default": False}, {"l": 4}):
        assert {bar.verdict for bar in residual.bars([{**row, **other} for row in rows])} == {"not measured"}


def test_the_picture_is_the_definition() -> None:
    """The file is what the tool draws, and the tool draws the windows of the reference."""
    assert draw_windows.PICTURE.read_text(encoding="utf-8") == draw_windows.draw()
    truncated, shifted = (draw_windows.cells(5, 1, boundary, False) for boundary in ("truncate", "shift"))
    kinds = {(query, key): kind for query, key, kind in truncated if query == 0}
    assert kinds == {(0, -2): "dropped", (0, -1): "dropped", (0, 0): "own", (0, 1): "seen", (0, 2): "seen"}
    kinds = {(query, key): kind for query, key, kind in shifted if query == 9}
    assert kinds == {(9, 5): "moved", (9, 6): "moved", (9, 7): "seen", (9, 8): "seen", (9, 9): "own"}


DIMS = sorted({size + more for size in (2**power for power in range(1, 16)) for more in (0, 1)})
"""Around every power of two, where plans change."""


def longest(plan: Callable[[int], ResidualPlan], holds: Callable[[ResidualPlan], bool]) -> int:
    """The largest D up to which a plan has a property; it has it for all below."""
    held = [holds(plan(dim)) for dim in DIMS]
    assert held == sorted(held, reverse=True)
    return DIMS[sum(held) - 1]


def test_the_documented_thresholds_are_those_of_the_plans() -> None:
    """docs/attention_residual.md says where rows are whole, and where a token is one tile in backward."""
    page = (DOCS / "attention_residual.md").read_text(encoding="utf-8")
    common: dict[str, Any] = {"dtype": torch.float32, "tokens": 4096}

    def of_gpu(backward: bool, blocks: int) -> Callable[[int], ResidualPlan]:
        return lambda dim: gpu_plan(backward=backward, dim=dim, blocks=blocks, cores=132, **common)

    def of_npu(name: str, backward: bool, blocks: int) -> Callable[[int], ResidualPlan]:
        options = {"backward": backward, "blocks": blocks, "listed": False, "device": DEVICES[name], **common}
        return lambda dim: ascend_plan(dim=dim, **options)

    def whole(plan: Callable[[int], ResidualPlan]) -> int:
        return longest(plan, lambda of: not of.tiled)

    def one_tile(plan: Callable[[int], ResidualPlan]) -> int:
        return longest(plan, lambda of: of.one_tile and not of.tiled)

    for names, ub in (("A2, A3", 192), ("950", 256)):
        for name in names.split(", "):
            assert DEVICES[name].ub == ub * 1024
            forward, backward = (whole(of_npu(name, way, 8)) for way in (False, True))
            assert f"| {names} | {ub} KiB | D ≤ {forward} | D ≤ {backward} |" in page
            tiles = [one_tile(of_npu(name, True, blocks)) for blocks in (8, 4, 1)]
            sentence = "L ≤ 8 up to D = {}, L ≤ 4 up to D = {}; a single block up to D = {}"
            assert f"| NPU, blocks in one tensor | {sentence.format(*tiles)} |" in page
    forward, backward = (whole(of_gpu(way, 8)) for way in (False, True))
    assert f"| NVIDIA GPU | registers | D ≤ {forward} | D ≤ {backward} |" in page
    tiles = [f"L ≤ {blocks} up to D = {one_tile(of_gpu(True, blocks))}" for blocks in (64, 32, 16, 8, 4)]
    assert f"| NVIDIA GPU | {', '.join(tiles)} |" in page


# On a GPU


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # compilers of peers warn
@pytest.mark.parametrize(
    ("module", "shapes", "peers"),
    [
        (neighborhood, ("1,4,8192,64,7", "1,4,8192,64,8,4"), NEIGHBORHOOD),
        (residual, ("8,1,1024,1024", "3,2,500,1000,list"), RESIDUAL),
    ],
)
def test_on_a_gpu_graphs_and_peers(module: Any, shapes: list[str], peers: dict[str, Peer], tmp_path: Path) -> None:
    """Every pass as a graph, beside every peer that is installed; memory is near inputs and outputs."""
    content = run(module.main, tmp_path / "run", "--device", "cuda", "--seconds", "1e-9", "--shapes", *shapes)
    assert len({(row["d"], row.get("k"), row["pass"]) for row in content["rows"]}) == 6
    for row in content["rows"]:
        assert (row["mode"], row["dtype"], row["backend"] == "reference") == ("graph", "bf16", False)
        if module is neighborhood:
            assert 0 < row["share_of_floor"] < 3, "caches of a GPU hold these tensors"
            assert row["peak_gib"] >= 0.99 * row["floor_gib"]
        else:
            assert row["wall_ms"] > 0.5 * row["ms_p50"] > 0
            assert 0.99 * row["floor_mib"] <= row["peak_mib"] <= 1.5 * row["floor_mib"]
        for peer in peers:
            if row[f"{peer}_ms"] is None:
                assert any(line.startswith(f"{peer} did not run") for line in content["missing"])
    assert not any(line.startswith(("flex", "compile", "eager")) for line in content["missing"]), content["missing"]
