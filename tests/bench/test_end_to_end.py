"""The end-to-end benchmark: its files, its gate, its command line; and the inputs it is fed."""

from __future__ import annotations

import csv
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_sparse_attn_e2e as e2e
from bench import bench_varlen as varlen
from bench.common import choose_dense
from bench.inputs import Sizes, make_problem
from bench.roofline import Peaks, backward_work, dense_floor_ms, nsa_floor_ms
from bench.timing import GIB, measure, peak_memory
from nsa import NSAConfig
from tests.support.bench_helpers import documented_fields

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--heads", "2", "--dim", "16", "--seconds", "1e-9"]


@pytest.mark.parametrize(
    "options",
    [
        ["--seqlens", "64,300", "--input", "text", "--preset", "paper", "--batch", "2", "--kv-heads", "2"],
        ["--seqlens", "300", "--backward", "--recompute", "--dtype", "bf16"],
        ["--seqlens", "300", "--backward", "--ungated", "--num-cmp", "2", "--block-sizes", "4", "--k", "3"],
    ],
    ids=["forward of the paper's on text", "backward in bf16", "backward of some, ungated"],
)
def test_writes_what_it_promises(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert e2e.main([*SMALL, *options, "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["gate"] == "green"
    assert {"device", "versions", "commit"} <= set(content)
    for row in content["rows"]:
        assert set(row) == documented_fields("bench_sparse_attn_e2e.py")
        assert 0 <= row["error"] <= row["error_budget"] < 0.1
        assert row["recompute"] == ("--recompute" in options)
        if row["pass"] == "fwd+bwd":
            assert 0 < row["gradient_error"] <= row["gradient_budget"] < 5
            assert row["peak_gib"] >= 2 * row["n"] * 3 * 16 * (2 if row["dtype"] == "bf16" else 4) / GIB
        else:
            assert (row["gradient_error"], row["gradient_budget"]) == (None, None)
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["ms_p50"])
        assert (row["dense"], row["dense_extrapolated"], row["mode"]) == ("PyTorch SDPA", False, "eager")
        assert (row["floor_ms"], row["share_of_floor"]) == (None, None)
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
    assert content["red"][0].startswith("N=64 l=64 num_cmp=none: error 1.0")
    assert not (tmp_path / "run.csv").exists()


@pytest.mark.parametrize("value", [0.015, float("nan")])
def test_late_rows_are_held_against_their_own_size(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One budget for all rows, which the first ones make 0.03 here, would let half of a late row's values pass."""
    problem = make_problem("random", Sizes(1, 2000, 2, 1, 16), device=CPU, dtype=torch.bfloat16)
    variant = e2e.Variant(NSAConfig.paper(), "reference", ("eager",))
    right = e2e.nsa_forward_aux

    def wrong(*args: Any, **keywords: Any) -> Any:
        out, aux = right(*args, **keywords)
        out[0, -1, 0, 0] += value
        return out, aux

    sample = e2e.sampled_error(problem, variant)
    assert sample.error <= sample.budget
    monkeypatch.setattr(e2e, "nsa_forward_aux", wrong)
    sample = e2e.sampled_error(problem, variant)
    assert not sample.error <= sample.budget


@pytest.mark.parametrize("name", ["k", "gate_proj_weight"])
def test_no_speed_on_a_wrong_gradient(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is right, and one gradient by a hundredth too large."""
    right = e2e.nsa

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
        tensors = {"q": q, "k": k, "v": v, "gate_proj_weight": keywords.pop("gate_proj_weight")}
        tensors[name] = Larger.apply(tensors[name])
        return right(**tensors, **keywords)

    monkeypatch.setattr(e2e, "nsa", wrong)
    monkeypatch.setattr(e2e, "measure", lambda *_, **__: pytest.fail("timed a wrong result"))
    assert e2e.main([*SMALL, "--seqlens", "600", "--backward", "--out", str(tmp_path / "run")]) == 1
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["rows"] == []
    (red,) = content["red"]
    assert f"of the gradient of {name} is above the budget" in red


class Larger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


@pytest.mark.parametrize(("row", "value"), [(300, 1.0), (-1, float("nan"))])
def test_every_row_of_dq_is_checked(row: int, value: float) -> None:
    """Also those of tiles that are not sampled, whose gradient is zero."""
    problem = make_problem("random", Sizes(1, 1500, 2, 1, 16), device=CPU, dtype=torch.float32, requires_grad=True)
    variant = e2e.Variant(NSAConfig(), "reference", ("eager",), backward=True)
    sample, wrong = e2e.check(problem, variant)
    assert wrong == []
    assert (300 in sample.positions.tolist()) is False
    problem.q.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([row % 1500]), value))
    _, wrong = e2e.check(problem, variant)
    assert len(wrong) == 1
    assert "of the gradient of q is above the budget" in wrong[0]


def test_recompute_reaches_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, given = e2e.nsa, []

    def recording(*args: Any, **keywords: Any) -> torch.Tensor:
        given.append(keywords["recompute"])
        return right(*args, **keywords)

    monkeypatch.setattr(e2e, "nsa", recording)
    for options in ([], ["--recompute"]):
        assert e2e.main([*SMALL, "--seqlens", "64", "--backward", *options, "--out", str(tmp_path / "run")]) == 0
        assert set(given) == {bool(options)}
        given.clear()


@pytest.mark.parametrize("backward", [[], ["--backward"]])
def test_the_timed_call_must_be_the_checked_one(
    backward: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit of rounding in one of the sampled rows is enough."""
    timed = "nsa" if backward else "nsa_forward"
    right = getattr(e2e, timed)

    def other(*args: Any, **keywords: Any) -> torch.Tensor:
        out = right(*args, **keywords)
        other = out.detach().clone()
        other[0, -1, 0, 0] = torch.nextafter(other[0, -1, 0, 0], out.new_tensor(9.0))
        return out + (other - out.detach())

    monkeypatch.setattr(e2e, timed, other)
    monkeypatch.setattr(e2e, "measure", lambda *_, **__: pytest.fail("timed another call"))
    assert e2e.main([*SMALL, "--seqlens", "64", *backward, "--out", str(tmp_path / "run")]) == 1
    red = json.loads((tmp_path / "run.json").read_text())["red"]
    assert len(red) == 1
    assert "the timed call gives another result than the checked one" in red[0]


def test_a_row_for_each_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = choose_dense(CPU, torch.float32)
    lengths: list[int] = []

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths.append(q.shape[1])
        return dense.attention(q, k, v)

    monkeypatch.setattr(e2e, "choose_dense", lambda *_: replace(dense, attention=counting))
    options = ["--num-cmp", "none,2,none", "--block-sizes", "16,32", "--k", "3", "--w", "40", "--q-tile", "128"]
    sizes = ["--seqlens", "256,128", "--peak-tflops", "0.5"]
    assert e2e.main([*SMALL, *sizes, *options, "--out", str(tmp_path / "run")]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    combinations = [(n, l, c) for n in (128, 256) for l in (16, 32) for c in (None, 2)]  # noqa: E741
    assert [(row["n"], row["l"], row["num_cmp"]) for row in rows] == combinations
    assert lengths == 4 * [128] + 4 * [256], "dense attention is measured once for each length"
    for row in rows:
        assert (row["l_select"], row["k"], row["w"], row["q_tile"]) == (row["l"], 3, 40, 128)
        assert row["dense_ms"] == next(other["dense_ms"] for other in rows if other["n"] == row["n"])
        config = NSAConfig(
            compress_block_size=row["l"],
            num_cmp_selected_blocks=row["num_cmp"],
            num_selected_blocks=3,
            window_size=40,
            q_tile_size=128,
        )
        assert row["floor_ms"] == nsa_floor_ms(Sizes(1, row["n"], 2, 1, 16), config, Peaks(0.5, 4.8), itemsize=4)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_p50"])


def test_long_dense_attention_is_extrapolated_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = choose_dense(CPU, torch.float32)

    def short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.shape[1] <= 128
        return dense.attention(q, k, v)

    monkeypatch.setattr(e2e, "choose_dense", lambda *_: replace(dense, attention=short))
    options = ["--seqlens", "64,128,256,384", "--no-dense-above", "200"]
    assert e2e.main([*SMALL, *options, "--out", str(tmp_path / "run")]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["dense_extrapolated"] for row in rows] == [False, False, True, True]
    assert rows[2]["dense_ms"] == pytest.approx(4 * rows[1]["dense_ms"])
    assert rows[3]["dense_ms"] == pytest.approx(9 * rows[1]["dense_ms"])
    assert [row["dense_peak_gib"] is None for row in rows] == [False, False, True, True]
    assert "~ is not measured" in capsys.readouterr().out


def test_a_wrong_graph_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that leaves a row unwritten. Graphs stand in here for themselves: a replay calls again."""

    def fake_capture(call: Any, device: torch.device, *, missing: int) -> types.SimpleNamespace:
        out = call()

        def replay() -> None:
            out[:, missing:] = call()[:, missing:]

        return types.SimpleNamespace(out=out, replay=replay, peak_gib=0.25)

    sizes = Sizes(1, 64, 2, 1, 16)
    problem = make_problem("random", sizes, device=CPU, dtype=torch.float32)
    variant = e2e.Variant(NSAConfig(), "reference", ("graph",))
    sample, wrong = e2e.check(problem, variant)
    assert wrong == []
    call = e2e.nsa_call(problem, variant)
    monkeypatch.setattr(e2e, "capture", lambda *args: fake_capture(*args, missing=0))
    timing = e2e.measure_mode("graph", call, sample, CPU, 0)
    assert timing is not None
    assert (timing.repeats, timing.peak_gib) == (3, 0.25)
    monkeypatch.setattr(e2e, "capture", lambda *args: fake_capture(*args, missing=1))
    assert e2e.measure_mode("graph", call, sample, CPU, 0) is None
    monkeypatch.setattr(e2e, "measure_mode", lambda *_: None)
    assert e2e.main([*SMALL, "--seqlens", "64", "--out", str(tmp_path / "run")]) == 1
    red = json.loads((tmp_path / "run.json").read_text())["red"]
    assert red == ["N=64 l=64 num_cmp=none: the replayed graph gives another result than the checked call"]


def test_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 where it is installed and takes the dtype; stood in for by attention that marks its results."""
    sdpa = choose_dense(CPU, torch.bfloat16)
    assert sdpa.name == "PyTorch SDPA"

    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[torch.Tensor, None]:
        assert causal
        return sdpa.attention(q, k, v) + 1, None

    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    gpu = torch.device("cuda")
    flash = choose_dense(gpu, torch.bfloat16)
    assert flash.name == choose_dense(gpu, torch.float16).name == "FlashAttention-4"
    assert choose_dense(gpu, torch.float32).name == choose_dense(CPU, torch.bfloat16).name == "PyTorch SDPA"
    problem = make_problem("random", Sizes(1, 8, 4, 2, 8), device=CPU, dtype=torch.float32)
    ours, theirs = (dense.attention(problem.q, problem.k, problem.v) for dense in (flash, sdpa))
    assert torch.equal(ours, theirs + 1)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert choose_dense(gpu, torch.bfloat16).name == "PyTorch SDPA"


def test_the_baseline_is_causal_attention_with_shared_keys() -> None:
    problem = make_problem("random", Sizes(2, 9, 4, 2, 8), device=CPU, dtype=torch.float64)
    q, k, v = problem.q, problem.k.repeat_interleave(2, dim=2), problem.v.repeat_interleave(2, dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v)
    got = choose_dense(CPU, torch.float64).attention(problem.q, problem.k, problem.v)
    torch.testing.assert_close(got, expected)


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


# On a GPU, and packed documents


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # FlashAttention-4 warns while it compiles
@pytest.mark.parametrize("kind", ["random", "sink"])
def test_on_a_gpu_graphs_and_the_baseline(kind: str, tmp_path: Path) -> None:
    options = ["--device", "cuda", "--heads", "4", "--dim", "64", "--seqlens", "2048", "--num-cmp", "none,1"]
    files = ["--input", kind, "--seconds", "1e-9", "--out", str(tmp_path / "run")]
    assert e2e.main([*options, *files]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
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
    monkeypatch.setattr(e2e, "CHECKED_BYTES", 1)
    sizes = ["--device", "cuda", "--heads", "32", "--kv-heads", "2", "--dim", "128", "--seqlens", "8K,20000"]
    assert e2e.main([*sizes, *preset, "--seconds", "1e-9", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["gate"] == "green"


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_on_a_gpu_forward_and_backward(tmp_path: Path) -> None:
    sizes = ["--device", "cuda", "--heads", "4", "--dim", "64", "--seqlens", "2500"]
    options = [*sizes, "--backward", "--backend", "cute"]
    files = ["--seconds", "1e-9", "--out", str(tmp_path / "run")]
    for more in ([], ["--recompute", "--num-cmp", "1", "--block-sizes", "16", "--select-size", "64"]):
        assert e2e.main([*options, *more, *files]) == 0
        (row,) = json.loads((tmp_path / "run.json").read_text())["rows"]
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
        rows = bench_nsa_stages.backward_stages(sizes, config, 4.0, 900.0)
        assert [row["stage"] for row in rows] == names
        assert all(row["floor_ms"] > 0 and 0 < row["share"] < 1.5 for row in rows)


@pytest.mark.parametrize("backward", [False, True])
def test_ways_to_run_documents_agree(backward: bool) -> None:
    """On the CPU, where the reference runs each; wrong results are found."""
    lengths = [40, 1, 25]
    sizes = Sizes(1, sum(lengths), 4, 2, 8)
    problem = make_problem("random", sizes, device=CPU, dtype=torch.float32, requires_grad=backward)
    config = NSAConfig(compress_block_size=4, num_selected_blocks=3, window_size=8, q_tile_size=16)
    packed, padded, one_by_one = varlen.make_ways(problem, lengths, config, backward)
    assert [way.name for way in (packed, padded, one_by_one)] == ["packed", "padded", "one by one"]
    (whole,), (behind,), alone = packed.call(), padded.call(), one_by_one.call()
    assert behind["out"].shape == (3, 40, 4, 8)
    torch.testing.assert_close(behind["out"][0, :32], whole["out"][:32])  # whole tiles do not see the padding
    assert set(whole) == set(behind) == {"out", *(("q", "k", "v", "gate_proj_weight") if backward else ())}
    assert varlen.compare([whole], alone, lengths) is None
    for name, tensor in whole.items():
        changed = tensor.clone()
        changed[0] += 1e-2 * tensor.abs().max()
        wrong = varlen.compare([{**whole, name: changed}], alone, lengths)
        assert wrong is not None
        assert ("0 to 40" in wrong) == (name != "gate_proj_weight")


def test_peak_memory_sees_temporaries() -> None:
    def call() -> torch.Tensor:
        return (torch.ones(64, 2**20) + 1).sum()  # two tensors of 256 MiB at once

    peak = peak_memory(call, CPU)
    assert peak is not None
    assert 0.45 < peak < 0.6
    assert measure(call, CPU, seconds=0).repeats == 3
