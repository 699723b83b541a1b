"""The end-to-end benchmark and that of the paper: files, gates, peers, bars, and the demo on a CPU."""

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

from bench import bench_paper as paper
from bench import bench_sparse_attn_e2e as e2e
from bench import bench_varlen as varlen
from bench import nsa_check, passes, peers, turns
from bench.bars import Bar
from bench.common import choose_dense
from bench.inputs import Sizes, make_problem
from bench.nsa_check import Variant
from bench.passes import Candidate, Unavailable
from bench.roofline import Peaks, backward_work, dense_floor_ms, nsa_floor_ms
from bench.timing import GIB
from bench.turns import FEWEST, MOST, Spread, take_turns, verdict
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support.bench_helpers import DOCS, has_picture, run, verdicts

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--heads", "2", "--dim", "16", "--seconds", "1e-9"]
SCRIPT = "bench_sparse_attn_e2e.py"


def make(n: int, *, dtype: torch.dtype = torch.float32, backward: bool = False) -> NSAInputs:
    return make_problem("random", Sizes(1, n, 2, 1, 16), device=CPU, dtype=dtype, requires_grad=backward)


@pytest.mark.parametrize(
    "options",
    [
        ["--seqlens", "64,300", "--input", "text", "--preset", "paper", "--batch", "2", "--kv-heads", "2"],
        ["--seqlens", "300", "--backward", "--recompute", "--dtype", "bf16"],
        ["--seqlens", "300", "--backward", "--num-cmp", "2", "--block-sizes", "4"],
    ],
    ids=["forward of the paper's on text", "backward in bf16", "backward of some"],
)
def test_writes_what_it_promises(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, given = nsa_check.nsa, set()
    monkeypatch.setattr(nsa_check, "nsa", lambda **how: given.add(how["recompute"]) or right(**how))
    content = run(e2e.main, tmp_path / "run", *SMALL, *options, script=SCRIPT)
    assert given == ({"--recompute" in options} if "--backward" in options else set())
    for row in content["rows"]:
        assert row["recompute"] == ("--recompute" in options)
        if row["pass"] == "fwd+bwd":
            assert 0 < row["gradient_error"] <= row["gradient_budget"] < 5
            assert row["peak_gib"] >= 2 * row["n"] * 3 * 16 * (2 if row["dtype"] == "bf16" else 4) / GIB
        else:
            assert (row["gradient_error"], row["gradient_budget"]) == (None, None)
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["ms_p50"])
        assert (row["dense"], row["dense_extrapolated"], row["mode"]) == ("PyTorch SDPA", False, "eager")
        assert (row["floor_ms"], row["share_of_floor"]) == (None, None)
    assert has_picture(tmp_path / "run")
    shown = capsys.readouterr().out
    assert shown.startswith("Sparse (NSA) against dense attention")
    assert "NSA is faster at" in shown


# The gate


class Larger(torch.autograd.Function):
    """A tensor whose gradient is a hundredth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.01


def far_off(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(**given: Any) -> Any:
        out, aux = right(**given)
        return out + 0.01, aux

    return wrong


def wrong_gradient(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda right: lambda **given: right(**{**given, name: Larger.apply(given[name])})


def next_number(right: Callable[..., Any]) -> Callable[..., Any]:
    """One unit of rounding in one of the sampled rows."""

    def other(**given: Any) -> Tensor:
        out: Tensor = right(**given)
        changed = out.detach().clone()
        changed[0, -1, 0, 0] = torch.nextafter(changed[0, -1, 0, 0], out.new_tensor(9.0))
        return out + (changed - out.detach())

    return other


@pytest.mark.parametrize(
    ("name", "wrong", "options", "message"),
    [
        ("nsa_forward_aux", far_off, ["--seqlens=64"], "N=64 reference l=64 num_cmp=none: error 1.0"),
        ("nsa", wrong_gradient("k"), ["--seqlens=600", "--backward"], "of the gradient of k is above the budget"),
        ("nsa", wrong_gradient("gate_proj_weight"), ["--seqlens=600", "--backward"], "of gate_proj_weight is above"),
        ("nsa_forward", next_number, ["--seqlens=64"], "another result than the checked one"),
        ("nsa", next_number, ["--seqlens=64", "--backward"], "another result than the checked one"),
    ],
)
def test_no_speed_on_a_red_gate(
    name: str, wrong: Any, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong result, gradient, or timed call that is not the checked one: nothing is timed, the status is 1."""
    monkeypatch.setattr(nsa_check, name, wrong(getattr(nsa_check, name)))
    monkeypatch.setattr(e2e, "measure", lambda *_, **__: pytest.fail("timed a wrong result"))
    red = run(e2e.main, tmp_path / "run", *SMALL, *options, status=1)["red"]
    assert message in red[0]
    assert len(red) == (2 if name == "nsa_forward_aux" else 1), "the timed call is right, and so another one"


@pytest.mark.parametrize("value", [0.015, float("nan")])
def test_late_rows_are_held_against_their_own_size(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One budget for all rows, which the first ones make 0.03 here, would let half of a late row's values pass."""
    inputs, variant = make(2000, dtype=torch.bfloat16), Variant(NSAConfig.paper(), "reference", ("eager",))
    right = nsa_check.nsa_forward_aux

    def wrong(**given: Any) -> Any:
        out, aux = right(**given)
        out[0, -1, 0, 0] += value
        return out, aux

    assert nsa_check.sampled_error(inputs, variant).worst.within
    monkeypatch.setattr(nsa_check, "nsa_forward_aux", wrong)
    assert not nsa_check.sampled_error(inputs, variant).worst.within


@pytest.mark.parametrize(("row", "value"), [(300, 1.0), (-1, float("nan"))])
def test_every_row_of_dq_is_checked(row: int, value: float) -> None:
    """Also those of tiles that are not sampled, whose gradient is zero."""
    inputs, variant = make(1500, backward=True), Variant(NSAConfig(), "reference", ("eager",), backward=True)
    sample, wrong = nsa_check.check(inputs, variant)
    assert (wrong, 300 in sample.positions.tolist()) == ([], False)
    inputs.q.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([row % 1500]), value))
    (message,) = nsa_check.check(inputs, variant)[1]
    assert "of the gradient of q is above the budget" in message


def test_a_wrong_graph_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that leaves a row unwritten. Graphs stand in here for themselves: a replay calls again."""

    def fake_capture(call: Any, *, missing: int) -> types.SimpleNamespace:
        out = call()

        def replay() -> None:
            out[:, missing:] = call()[:, missing:]

        return types.SimpleNamespace(out=out, replay=replay, peak_gib=0.25)

    inputs, variant = make(64), Variant(NSAConfig(), "reference", ("graph",))
    sample, wrong = nsa_check.check(inputs, variant)
    assert wrong == []
    call = e2e.nsa_call(inputs, variant)
    found = []
    for missing in (0, 1):
        monkeypatch.setattr(e2e, "capture", lambda call, _, missing=missing: fake_capture(call, missing=missing))
        found.append(e2e.measure_mode("graph", call, sample, CPU, 0))
    assert found[0] is not None
    assert (found[0].repeats, found[0].peak_gib, found[1]) == (3, 0.25, None)
    monkeypatch.setattr(e2e, "measure_mode", lambda *_: None)
    red = run(e2e.main, tmp_path / "run", *SMALL, "--seqlens", "64", status=1)["red"]
    assert red == ["N=64 reference l=64 num_cmp=none: the replayed graph gives another result than the checked call"]


# Rows


def test_a_row_for_each_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, lengths = choose_dense(CPU, torch.float32), []

    def counting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths.append(q.shape[1])
        return dense.attention(q, k, v)

    monkeypatch.setattr(e2e, "choose_dense", lambda *_: replace(dense, attention=counting))
    options = ["--num-cmp", "none,2,none", "--block-sizes", "16,32"]
    sizes = ["--seqlens", "384,256,128", "--peak-tflops", "0.5", "--no-dense-above", "256"]
    rows = run(e2e.main, tmp_path / "run", *SMALL, *sizes, *options)["rows"]
    combinations = [(n, l, c) for n in (128, 256, 384) for l in (16, 32) for c in (None, 2)]  # noqa: E741
    assert [(row["n"], row["l"], row["num_cmp"]) for row in rows] == combinations
    assert lengths == 4 * [128] + 4 * [256], "dense attention is measured once for each length, and extrapolated"
    for row in rows:
        assert row["l_select"] == row["l"]
        long = row["n"] == 384
        assert (row["dense_extrapolated"], row["dense_peak_gib"] is None) == (long, long)
        assert row["dense_ms"] == pytest.approx(rows[4]["dense_ms"] * 2.25) if long else row["dense_ms"] > 0
        own = {"compress_block_size": row["l"], "num_cmp_selected_blocks": row["num_cmp"]}
        floor = nsa_floor_ms(Sizes(1, row["n"], 2, 1, 16), NSAConfig(**own), Peaks(0.5, 4.8), itemsize=4)
        assert row["floor_ms"] == floor
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_p50"])


def test_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 where it is installed and takes the dtype; stood in for by attention that marks its results."""
    sdpa, gpu = choose_dense(CPU, torch.bfloat16), torch.device("cuda")
    monkeypatch.setattr("bench.common.rules", lambda _: True)

    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Tensor, None]:
        assert causal
        return sdpa.attention(q, k, v) + 1, None

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    flash = choose_dense(gpu, torch.bfloat16)
    assert flash.name == choose_dense(gpu, torch.float16).name == "FlashAttention-4"
    assert choose_dense(gpu, torch.float32).name == sdpa.name == "PyTorch SDPA"
    problem = make_problem("random", Sizes(2, 9, 4, 2, 8), device=CPU, dtype=torch.float64)
    ours, theirs = (dense.attention(problem.q, problem.k, problem.v) for dense in (flash, sdpa))
    assert torch.equal(ours, theirs + 1)
    q, k, v = problem.q, problem.k.repeat_interleave(2, dim=2), problem.v.repeat_interleave(2, dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(theirs, torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v))
    with monkeypatch.context() as other_card:
        other_card.setattr("bench.common.rules", lambda _: None)
        assert choose_dense(gpu, torch.bfloat16).name == "PyTorch SDPA"
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert choose_dense(gpu, torch.bfloat16).name == "PyTorch SDPA"


# The paper's


def weigh(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Stands in for a peer."""
    return q + (k + v).mean((1, 2), keepdim=True) * torch.stack(gates).sum(0)[..., None]


def test_paper_writes_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "make_peer", lambda *_: Candidate("fla", weigh, graphs=False))
    fields = ("fla_ms", "fla_gib")
    options = ["--kv-heads", "1", "--seqlens", "40,70", "--bars"]
    content = run(paper.main, tmp_path / "run", *SMALL, *options, script=SCRIPT, also=fields)
    assert content["missing"] == []
    order = [(n, direction) for n in (40, 70) for direction in ("fwd", "fwd+bwd")]
    assert [(row["n"], row["pass"]) for row in content["rows"]] == order
    for row in content["rows"]:
        assert (row["preset"], row["l"], row["stride"], row["q_tile"], row["mode"]) == ("paper", 32, 16, 1, "eager")
        assert (row["gradient_error"] is None) == (row["pass"] == "fwd")
        assert min(row["fla_ms"], row["dense_ms"]) > 0
    assert {bar["verdict"] for bar in content["bars"]} == {"not measured"}, "of other sizes"
    assert has_picture(tmp_path / "run")
    shown = capsys.readouterr().out
    assert "fwd+bwd eager   NSA" in shown
    assert "0 of 26 bars are reached" in shown


def test_rows_of_each_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands in for them."""
    asked: list[str] = []

    def stand_in(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda backend, **given: asked.append(backend) or right(**given, backend="reference")

    for name in ("nsa", "nsa_forward", "nsa_forward_aux"):
        monkeypatch.setattr(nsa_check, name, stand_in(getattr(nsa_check, name)))
    monkeypatch.setattr("bench.common.choose_backend", lambda _, named: (named, ""))
    options = ["--kv-heads", "1", "--seqlens", "40", "--peers", "--backends", "cute", "triton"]
    rows = run(paper.main, tmp_path / "run", *SMALL, *options)["rows"]
    assert [row["backend"] for row in rows] == ["cute", "triton"] * 2
    assert {asked.count(name) for name in ("cute", "triton")} == {len(asked) / 2}
    assert has_picture(tmp_path / "run")


def test_peers_get_gates_and_need_only_be_finite() -> None:
    problem = make_problem("random", Sizes(1, 9, 4, 2, 8), device=CPU, dtype=torch.float32, requires_grad=True)
    task = peers.nsa_task(problem)
    assert problem.gate_proj_weight is not None
    expected = torch.einsum("bnhd,hgd->bnhg", problem.q, problem.gate_proj_weight).sigmoid()
    for branch, gate in enumerate(task.leaves[3:]):
        torch.testing.assert_close(gate, expected[..., branch])
    assert not any(leaf.requires_grad for leaf in task.leaves)
    candidate, plan = Candidate("peer", weigh, graphs=False), passes.Plan(("fwd+bwd",), seconds=0.0)
    assert isinstance(passes.measure_pass(candidate, "fwd+bwd", task, plan), passes.Measured)
    q = task.leaves[0].clone()
    q[0, -1, -1, -1] = float("inf")
    assert task.truth.worst({"out": task.leaves[0]}).within
    assert not task.truth.worst({"out": task.leaves[0], "dq": q}).within


def test_fla_is_called_as_it_is_meant_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: FlashAttention-4's window is handed in, and the options arrive."""
    given: dict[str, Any] = {}

    def parallel_nsa(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **how: Any) -> Tensor:
        given.update(how, gates=[*map(float, gates)])
        return module.flash_attn_func(q, k, v, causal=True, window_size=(how["window_size"] - 1, 0))

    def fa4(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, None]:
        given["window"] = how
        return 2 * q, None

    module = types.SimpleNamespace(parallel_nsa=parallel_nsa, flash_attn_func=None)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", types.SimpleNamespace(parallel=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=fa4))
    task = peers.nsa_task(make(9))
    attention = peers.NSA["fla"].make(NSAConfig.paper(), task).call
    q, k, v, *gates = (torch.full((1,), float(i)) for i in range(1, 7))
    assert attention(q, k, v, *gates) == 2 * q
    window = {"causal": True, "window_size": (511, 0)}
    options = {"block_counts": 16, "block_size": 64, "window_size": 512, "scale": None}
    assert given == {**options, "gates": [4, 5, 6], "window": window}
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    with pytest.raises(Unavailable, match=r"not installed: pip install fla-core==0\.6\.0"):
        peers.NSA["fla"].make(NSAConfig.paper(), task)


def row_of(n: int, direction: str, ms: float, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"b": 1, "h": 64, "h_kv": 4, "d": 128, "dtype": "bf16", "l": 32, "stride": 16}
    values |= {"l_select": 64, "k": 16, "w": 512, "q_tile": 1, "mode": "queued", "inputs": "random"}
    return {**values, "backend": "cute", "fla_ms": 60.0, "n": n, "pass": direction, "ms_p50": ms, **changes}


def test_bars_are_the_issues() -> None:
    rows = [row_of(64 << 10, "fwd", 25.0), row_of(64 << 10, "fwd+bwd", 70.0, peak_gib=11.0)]
    others = [row_of(64 << 10, "fwd", 1.0, **how) for how in ({"mode": "eager"}, {"h_kv": 8}, {"backend": "triton"})]
    bars: dict[str, Bar] = {bar.what: bar for bar in paper.find_bars([*others, *rows])}
    assert bars["64K fwd"].as_json() == {"bar": "64K fwd", "wanted": "<= 27 ms", "reached": "25 ms", "verdict": "pass"}
    measured = {what: said for what, said in verdicts(bars.values()).items() if said != "not measured"}
    assert measured == {
        "64K fwd": "pass",
        "64K fwd, stretch": "FAIL",
        "64K fwd, fla takes as long or longer": "pass",
        "64K fwd+bwd": "pass",
        "64K fwd+bwd, stretch": "pass",
        "64K fwd+bwd, fla takes as long or longer": "FAIL",
        "64K fwd+bwd, peak memory": "pass",
        "64K fwd+bwd, peak memory, stretch": "FAIL",
    }


# The demo on a CPU

DEMO = ["--demo", "--device", "cpu", "--dim", "16", "--seconds", "1e-9"]


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


def test_verdict() -> None:
    """A sentence for each outcome, with a list of places."""
    dense, nsa, even, noisy = (
        Spread(*x) for x in ((0.48, 0.5, 0.52), (1.9, 2.0, 2.1), (0.9, 1.0, 1.1), (0.2, 2.0, 3.0))
    )
    found = enumerate([nsa, dense, nsa, even, nsa, even, noisy])
    assert verdict([(str(i), ratio) for i, ratio in found]) == (
        "Dense attention is faster at 1 (2.0 times). NSA is faster at 0 (2.0 times), 2 (2.0 times), 4 (2.0 times). "
        "Neither is clearly faster at 3, 5. Too noisy to tell, so run it again when less else runs: 6."
    )


def test_demo_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "results_files.md").read_text(encoding="utf-8")
    match = re.search(r"a row also has `(.*?)`", page, re.DOTALL)
    assert match is not None
    more = set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", match[1])))
    options = ["--seqlens", "64,128", "--num-cmp", "none,1"]
    content = run(e2e.main, tmp_path / "run", *DEMO, *options, script=SCRIPT, also=more)
    assert content["device"].endswith(", 1 thread")
    for row in content["rows"]:
        assert (row["mode"], row["turns"], row["h"], row["inputs"]) == ("turns", FEWEST, 1, "text")
        assert 0 < row["speedup_p20"] <= row["speedup"] <= row["speedup_p80"]
        assert row["faster"] == Spread(row["speedup_p20"], row["speedup"], row["speedup_p80"]).faster
    assert [(row["n"], row["num_cmp"]) for row in content["rows"]] == [(n, c) for n in (64, 128) for c in (None, 1)]
    assert "N = 128 with reference l=64 num_cmp=1" in content["verdict"]
    shown = " ".join(capsys.readouterr().out.split())
    assert content["verdict"] in shown


@pytest.mark.parametrize("noisy", [[True, False], [True, True]])
def test_noisy_rows_are_marked_and_not_drawn(
    noisy: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steady, load = [[20.0] * FEWEST, [10.0] * FEWEST], [[20.0] * FEWEST, [10.0, 10.0, 95.0, 10.0, 95.0]]
    answers = iter([load if one else steady for one in noisy])
    drawn: list[Any] = []
    right = e2e.plot_lengths

    def plot_lengths(path: Path, points: Any, title: str) -> None:
        drawn.extend(points)
        right(path, drawn, title)

    monkeypatch.setattr(e2e, "take_turns", lambda *_: next(answers))
    monkeypatch.setattr(e2e, "plot_lengths", plot_lengths)
    rows = run(e2e.main, tmp_path / "run", *DEMO, "--seqlens", "64,128")["rows"]
    assert [row["faster"] for row in rows] == ["too noisy" if one else "NSA" for one in noisy]
    speedups = [value for panel, *_, value in drawn if panel == "dense time / NSA time"]
    assert speedups == [None if one else 2.0 for one in noisy]
    shown = capsys.readouterr().out
    assert "faster: too noisy" in shown
    assert ("NSA is faster at" in shown) == (not all(noisy))
    assert "Too noisy to tell, so run it again when less else runs: N = 64" in " ".join(shown.split())


# The roofline


def test_floor_by_hand() -> None:
    """At 1 TFLOP/s and 1 TB/s a thousand million FLOPs or bytes take one millisecond."""
    peaks = Peaks(1, 1)
    sizes = Sizes(batch=2, tokens=4096, heads=4, kv_heads=2, dim=32)
    assert dense_floor_ms(sizes, peaks) == pytest.approx(2 * 4096 * 2048 * 4 * 32 * 4 / 1e9)

    # 64 entries, of which a row sees 32 on average; 16 tiles. Selected: 256 keys, but for the first 256 rows, which see
    # 128 on average: (256*128 + 3840*256) / 4096 = 248. Window of 128: (128*64 + 3968*128) / 4096 = 126.
    config = NSAConfig(num_selected_blocks=4, window_size=128)
    flops = 4096 * (32 + 248 + 126) * 4 * 32 * 4 + 3 * 2 * 16 * 32 * 32 * 4
    values = 4096 * 32 * (4 + 2 + 2 + 3 * 4 + 4 + 3 * 4 + 4)  # q, k, v; three outputs; q, three outputs; out
    assert nsa_floor_ms(sizes, config, peaks) == pytest.approx(2 * (flops + values * 2) / 1e9)
    assert nsa_floor_ms(sizes, config, Peaks(2, 1e9)) == pytest.approx(2 * flops / 2e9)
    assert nsa_floor_ms(sizes, config, Peaks(1e9, 4), itemsize=4) == pytest.approx(2 * values * 4 / 4e9)

    # Backward: five products instead of two; q, three outputs, do, k, v and the gradients of q, k, v.
    more = 4096 * (32 + 248 + 126) * 10 * 32 * 4
    traffic = 4096 * 32 * (4 + 3 * 4 + 4 + 2 + 2 + 4 + 2 + 2)
    both = nsa_floor_ms(sizes, config, peaks, backward=True)
    assert both == pytest.approx(2 * (flops + more + (values + traffic) * 2) / 1e9)
    assert dense_floor_ms(sizes, peaks, backward=True) == pytest.approx(3.5 * dense_floor_ms(sizes, peaks))

    # Two blocks of 8 entries: 16 of them, but 8 on average in the first quarter of the rows.
    some = replace(config, num_cmp_selected_blocks=2, n_block_size=8)
    fewer = 2 * 4096 * (32 - (8 + 3 * 16) / 4) * 4 * 32 * 4 / 1e9
    assert nsa_floor_ms(sizes, config, peaks) - nsa_floor_ms(sizes, some, peaks) == pytest.approx(fewer)
    every = replace(config, num_cmp_selected_blocks=16)
    assert nsa_floor_ms(sizes, every, peaks) == nsa_floor_ms(sizes, config, peaks)


# Packed documents, and memory


@pytest.mark.parametrize("backward", [False, True])
def test_ways_to_run_documents_agree(backward: bool) -> None:
    """On the CPU, where the reference runs each; wrong results are found."""
    lengths = [40, 1, 25]
    sizes = Sizes(1, sum(lengths), 4, 2, 8)
    problem = make_problem("random", sizes, device=CPU, dtype=torch.float32)
    config = NSAConfig(compress_block_size=4, num_selected_blocks=3, window_size=8, q_tile_size=16)
    ways = varlen.make_ways(problem, lengths, backward)
    (whole,), (padded,), alone = (varlen.call_all(ways[name], config) for name in ("packed", "padded", "one by one"))
    assert padded["out"].shape == (3, 40, 4, 8)
    torch.testing.assert_close(padded["out"][0, :32], whole["out"][:32])  # whole tiles do not see the padding
    assert set(whole) == set(padded) == {"out", *(("q", "k", "v", "gate_proj_weight") if backward else ())}
    assert varlen.compare(whole, alone, lengths) == ""
    for name, tensor in whole.items():
        changed = tensor.clone()
        changed[0] += 1e-2 * tensor.abs().max()
        wrong = varlen.compare({**whole, name: changed}, alone, lengths)
        assert ("document 0" in wrong) == (name != "gate_proj_weight")
        assert (f"gradient of {name}" in wrong) == (name != "out")


# On a GPU


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # FlashAttention-4 warns while it compiles
@pytest.mark.parametrize("kind", ["random", "sink"])
def test_on_a_gpu_graphs_and_the_baseline(kind: str, tmp_path: Path) -> None:
    options = ["--device", "cuda", "--heads", "4", "--dim", "64", "--seqlens", "2048", "--num-cmp", "none,1"]
    files = ["--input", kind, "--seconds", "1e-9"]
    rows = run(e2e.main, tmp_path / "run", *options, *files)["rows"]
    assert [(row["num_cmp"], row["mode"]) for row in rows] == [
        (count, mode) for count in (None, 1) for mode in ("eager", "graph")
    ]
    assert {(row["backend"], row["dense"]) for row in rows} == {("cute", "FlashAttention-4")}
    out = 2048 * 4 * 64 * 2 / 2**30
    assert all(row["peak_gib"] > out for row in rows)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "preset", [["--num-cmp", "none,4", "--block-sizes", "32", "--select-size", "64"], ["--preset", "paper"]]
)
def test_on_a_gpu_heads_are_checked_in_turn(preset: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of long sequences are: the timed call of all heads gives the same bits."""
    monkeypatch.setattr(nsa_check, "CHECKED_BYTES", 1)
    sizes = ["--device", "cuda", "--heads", "32", "--kv-heads", "2", "--dim", "128", "--seqlens", "8K,20000"]
    run(e2e.main, tmp_path / "run", *sizes, *preset, "--seconds", "1e-9")


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_on_a_gpu_forward_and_backward(tmp_path: Path) -> None:
    sizes = ["--device", "cuda", "--heads", "4", "--dim", "64", "--seqlens", "2500"]
    options = [*sizes, "--backward", "--backend", "cute"]
    for more in ([], ["--recompute", "--num-cmp", "1", "--block-sizes", "16", "--select-size", "64"]):
        (row,) = run(e2e.main, tmp_path / "run", *options, *more, "--seconds", "1e-9")["rows"]
        assert (row["pass"], row["mode"], row["dense"]) == ("fwd+bwd", "eager", "FlashAttention-4")
        assert 0 < row["gradient_error"] <= row["gradient_budget"]
        # q, out, do, dq, and k, v and their gradients of one head instead of four
        assert row["peak_gib"] > 2500 * 64 * 2 * (4 * 4 + 4 * 1) / GIB


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("num_cmp", [None, 2])
def test_on_a_gpu_stages_of_the_backward(num_cmp: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs in a graph, for all heads at once and for one after the other."""
    from bench import bench_nsa_stages
    from cute_kernels import backward

    config = NSAConfig(
        compress_block_size=16, select_block_size=64, num_selected_blocks=4, num_cmp_selected_blocks=num_cmp
    )
    sizes = Sizes(1, 8000, 8, 2, 128)
    names = [*backward_work(sizes, config), "forward, saving", "backward", "all"]
    if torch.cuda.get_device_capability()[0] != 9:
        names = [name for name in names if "split" not in name]
    for most in (backward.TEMPORARY_BYTES, 1):
        monkeypatch.setattr(backward, "TEMPORARY_BYTES", most)
        stages = bench_nsa_stages.backward_stages(sizes, config, Peaks(900.0, 4.0))
        rows = [bench_nsa_stages.row_of(sizes, config, stage) for stage in stages]
        assert [row["stage"] for row in rows] == names
        assert all(row["floor_ms"] > 0 and 0 < row["share"] < 1.5 for row in rows)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_on_a_gpu_the_paper(tmp_path: Path) -> None:
    """Both passes and modes; a peer is there or its reason is."""
    sizes = ["--device", "cuda", "--heads", "32", "--kv-heads", "2", "--seqlens", "2048", "--seconds", "1e-9"]
    content = run(paper.main, tmp_path / "run", *sizes)
    rows = content["rows"]
    modes = {"fwd": ["queued", "eager", "graph"], "fwd+bwd": ["queued", "eager"]}
    assert [(row["pass"], row["mode"]) for row in rows] == [(of, mode) for of in modes for mode in modes[of]]
    assert {(row["backend"], row["dense"]) for row in rows} == {("cute", "FlashAttention-4")}
    assert all((row["fla_ms"] is None) == bool(content["missing"]) for row in rows)
