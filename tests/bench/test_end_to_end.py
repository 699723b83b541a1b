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
from bench.common import choose_backend, choose_dense
from bench.inputs import SINK_TOKENS, Problem, Sizes, make_problem, standard_library_text
from bench.roofline import Peaks, Work, backward_work, choose_peaks, dense_floor_ms, nsa_floor_ms, score_flops
from bench.timing import GIB, measure, peak_memory
from dispatch import Call
from nsa import NSAConfig, nsa_forward_aux
from nsa.reference import nsa_tiles
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


SOME_BLOCKS = NSAConfig(compress_block_size=8, num_cmp_selected_blocks=2)


def sample_at_once(bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> e2e.Sample:
    """Of 600 tokens and 8 heads over 4, as they are checked together."""
    problem = make_problem("random", Sizes(1, 600, 8, 4, 16), device=CPU, dtype=torch.float32)
    monkeypatch.setattr(e2e, "CHECKED_BYTES", bytes_at_once)
    return e2e.sampled_error(problem, e2e.Variant(SOME_BLOCKS, "reference", ("eager",)))


def test_heads_of_long_sequences_are_checked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same blocks, positions and errors; one key/value head's outputs are 4 x 600 x 2 x 16 numbers."""
    of_a_head, calls = 4 * 600 * 2 * 16 * 4, []
    right = e2e.nsa_forward_aux

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> Any:
        calls.append((q.shape[2], k.shape[2]))
        return right(q, k, v, **keywords)

    monkeypatch.setattr(e2e, "nsa_forward_aux", counting)
    whole = sample_at_once(4 * of_a_head, monkeypatch)
    assert calls == [(8, 4)]
    for most, expected in ((4 * of_a_head - 1, [(6, 3), (2, 1)]), (2 * of_a_head, [(4, 2)] * 2), (1, [(2, 1)] * 4)):
        calls.clear()
        some = sample_at_once(most, monkeypatch)
        assert calls == expected
        assert torch.equal(some.positions, whole.positions)
        assert torch.equal(some.tiles.indices, whole.tiles.indices)
        assert some.tiles.cmp_indices is not None
        assert whole.tiles.cmp_indices is not None
        assert torch.equal(some.tiles.cmp_indices, whole.tiles.cmp_indices)
        torch.testing.assert_close(some.rows, whole.rows)
        assert 0 <= some.error <= some.budget


def test_every_head_is_held_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of one head at a time is that of all together; a wrong number in any head is seen."""
    problem = make_problem("random", Sizes(1, 600, 8, 4, 16), device=CPU, dtype=torch.float32)
    inputs, sample = e2e.plain_inputs(problem), sample_at_once(1 << 30, monkeypatch)
    one = [e2e.exact_head(inputs, SOME_BLOCKS, sample.tiles, head) for head in range(8)]
    chosen = {"indices": sample.tiles.indices, "cmp_indices": sample.tiles.cmp_indices}
    expected, positions = nsa_tiles(inputs.map(torch.Tensor.double), SOME_BLOCKS, sample.tiles.numbers, **chosen)
    assert torch.equal(positions, sample.positions)
    torch.testing.assert_close(torch.cat(one, 2), expected, rtol=0, atol=1e-12)
    right = e2e.nsa_forward_aux
    for head in (0, 7):

        def wrong(*args: Any, head: int = head, **keywords: Any) -> Any:
            out, aux = right(*args, **keywords)
            out[0, -1, head, 0] += 0.01
            return out, aux

        monkeypatch.setattr(e2e, "nsa_forward_aux", wrong)
        sample = sample_at_once(1 << 30, monkeypatch)
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


def test_options_on_top_of_a_preset() -> None:
    assert e2e.parse(["--seqlens", "1M,100, 4k"]).seqlens == [100, 4096, 2**20]

    def configs(*options: str) -> list[NSAConfig]:
        found: list[NSAConfig] = e2e.parse([*SMALL, *options]).configs
        return found

    assert configs() == configs("--preset", "seed") == [NSAConfig.per_tile()]
    assert configs("--preset", "paper", "--k", "3") == [NSAConfig.paper(num_selected_blocks=3)]
    assert configs("--preset", "paper", "--num-cmp", "none") == [NSAConfig.paper()]
    assert [c.select_size for c in configs("--block-sizes", "32,64", "--select-size", "128")] == [128, 128]
    assert [c.select_size for c in configs("--preset", "paper", "--block-sizes", "32,128")] == [32, 128]


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


def test_modes_by_device_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def modes(*options: str) -> tuple[tuple[str, ...], list[str]]:
        args = e2e.parse([*SMALL, "--dtype", "bf16", *options])
        (variant,), notes = e2e.choose_variants(args, torch.device(args.device))
        return variant.modes, notes

    monkeypatch.setattr(e2e, "device_types", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(e2e, "choose_backend", lambda *_: ("cute", ""))
    assert modes() == (("eager",), [])
    assert modes("--device", "cuda") == (("eager", "graph"), [])
    assert modes("--device", "cuda", "--backward") == (("eager",), [])
    assert modes("--device", "cuda", "--modes", "graph") == (("graph",), [])
    monkeypatch.setattr(e2e, "choose_backend", lambda *_: ("reference", "no kernel"))
    chosen, notes = modes("--device", "cuda")
    assert chosen == ("eager",)
    assert notes[0].startswith("no kernel\nMode eager only: the reference reads values on the host")
    with pytest.raises(ValueError, match="--modes graph: the reference reads values on the host"):
        modes("--device", "cuda", "--modes", "eager,graph")


def test_queued_leaves_the_host_out_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NSA's own calls where the mode says so, dense attention's in a run that has the mode."""
    seen: list[bool] = []

    def measured(call: Any, device: Any, *, seconds: float, host: bool = True) -> Any:
        seen.append(host)
        return measure(call, device, seconds=seconds, host=host)

    monkeypatch.setattr(e2e, "measure", measured)
    for usual, dense, own in ((["eager"], True, [True]), (["queued", "eager"], False, [False, True])):
        monkeypatch.setattr(e2e, "modes_of", lambda _, usual=usual: usual)
        seen.clear()
        assert e2e.main([*SMALL, "--seqlens", "64", "--out", str(tmp_path / "run")]) == 0
        assert seen == [dense, *own]
        assert [row["mode"] for row in json.loads((tmp_path / "run.json").read_text())["rows"]] == usual


def test_backends() -> None:
    assert choose_backend(Call("nsa", CPU, torch.float32), None) == ("reference", "")
    on_meta = Call("nsa", "meta", torch.float32)
    backend, note = choose_backend(on_meta, None)
    assert backend == "reference"
    assert "runs on meta only when named" in note


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


def test_floor_of_the_paper() -> None:
    """What 64K tokens cost at peak: compressed 4.4 ms, scores 2.2, selected 2.2, window 1.1; and bytes."""
    sizes, config = Sizes(1, 65536, 64, 4, 128), NSAConfig.paper()
    products = nsa_floor_ms(sizes, config, Peaks(989, 1e9))
    assert products == pytest.approx(4.4 + 2.2 + 2.2 + 1.1, rel=0.01)
    assert score_flops(sizes, config) == 2 * 65536 * (4095 / 2) * 128 * 64
    moved = 65536 * 128 * (9 * 64 + 2 * 4) * 2
    assert nsa_floor_ms(sizes, config, Peaks(989, 4.8)) == pytest.approx(products + moved / 4.8e9)


def test_work_of_the_backward_by_hand() -> None:
    """One head of one number and 2048 tokens; half of 32 entries visible, 192 keys selected, 64 in the window."""
    config = NSAConfig(num_selected_blocks=4, window_size=64)
    n = 2048
    compressed, selected, window = 16 * n, (256 - 16) * n, (64 - 1) * n
    work = backward_work(Sizes(1, n, 1, 1, 1), config)
    assert work == {
        "gate gradients": Work((5 * 2 + 13 * 4) * n),
        "selected, lists": Work((3 * 32 * 1 + 2 * 8 * 4) * 4),
        "compressed": Work((4 * 2 + 4) * n + 32 * (2 * 2 + 2 * 4), 5 * 2 * compressed),
        "selected, FA4": Work((4 * 2 + 4 + 4 * 2) * n, 5 * 2 * selected),
        "selected, split": Work((3 * 2 + 2 * 4 + 4 * 2) * n, 5 * 2 * selected),
        "split, dq": Work((3 * 2 + 2 * 4 + 2 * 2) * n, 3 * 2 * selected),
        "split, dk dv": Work((2 * 2 + 2 * 4 + 4 * 2) * n, 4 * 2 * selected),
        "window": Work((4 * 2 + 4 + 4 * 2) * n, 5 * 2 * window),
        "query sums": Work((4 * 2 + 3 * 4) * n),
        "key sums": Work(6 * 2 * n + 32 * 2 * 4),
    }
    token = backward_work(Sizes(1, n, 1, 1, 1), replace(config, q_tile_size=1))
    whole = work["selected, split"]
    assert token == {"selected": whole, **{name: part for name, part in work.items() if "," not in name}}
    assert [*token] == ["gate gradients", "compressed", "selected", "window", "query sums", "key sums"]
    larger = backward_work(Sizes(2, n, 4, 2, 8), config)
    assert larger["window"] == Work(2 * (8 * (4 * 2 * 4 + 4 * 2 * 2) + 4 * 4) * n, 2 * 4 * 8 * work["window"].flops)
    assert Work(3e9, 4e9).floor_ms(tbs=1, tflops=2) == 3
    assert Work(3e9, 8e9).floor_ms(tbs=1, tflops=2) == 4


def test_peaks_are_known_or_given() -> None:
    assert choose_peaks("NVIDIA H200 (sm_90)", None, None) == Peaks(989, 4.8)
    assert choose_peaks("NVIDIA H100 80GB HBM3 (sm_90)", None, 2.0) == Peaks(989, 2.0)
    assert choose_peaks("NVIDIA H200 (sm_90)", 500, None) == Peaks(500, 4.8)
    assert choose_peaks("NVIDIA B200 (sm_100)", None, None) is None
    assert choose_peaks("NVIDIA B200 (sm_100)", 2250, None) == Peaks(2250, 4.8)


# Inputs


def test_text_is_real_and_inputs_are_repeatable() -> None:
    text = standard_library_text()
    assert len(text) > 1_000_000
    assert b"def " in text[:10_000]
    sizes = Sizes(batch=2, tokens=50, heads=4, kv_heads=2, dim=8)
    for kind in ("random", "sink", "text"):
        one, two = (make_problem(kind, sizes, device=CPU, dtype=torch.float32) for _ in range(2))
        for name, shape in {"q": (2, 50, 4, 8), "k": (2, 50, 2, 8), "v": (2, 50, 2, 8)}.items():
            assert getattr(one, name).shape == shape
            assert torch.equal(getattr(one, name), getattr(two, name))
            assert 0.5 < getattr(one, name).std() < 2
    longer = make_problem("text", Sizes(1, 100, 4, 2, 8), device=CPU, dtype=torch.float32)
    assert torch.allclose(longer.v[0, :50], one.v[0], atol=1e-5), "a longer text begins with the shorter one"
    with pytest.raises(ValueError, match="inputs must be one of random, sink, text, got 'noise'"):
        make_problem("noise", sizes, device=CPU, dtype=torch.float32)


def first_blocks(problem: Problem, config: NSAConfig) -> torch.Tensor:
    """Share of (tile, head) whose lowest selected block is block 0."""
    _, aux = nsa_forward_aux(problem.q, problem.k, problem.v, config=config, backend="reference")
    return (aux.indices[..., 0] == 0).float().mean()


@pytest.mark.parametrize("options", [{}, {"num_cmp_selected_blocks": 1, "n_block_size": 4}])
def test_every_tile_selects_the_sink(options: dict[str, int]) -> None:
    sizes = Sizes(batch=2, tokens=2000, heads=4, kv_heads=2, dim=16)
    config = NSAConfig.per_tile(num_selected_blocks=2, q_tile_size=256, **options)
    sink = make_problem("sink", sizes, device=CPU, dtype=torch.float32)
    assert first_blocks(sink, config) == 1
    assert first_blocks(make_problem("random", sizes, device=CPU, dtype=torch.float32), config) < 0.9

    # The sink draws much of the attention, not all of it
    heads = torch.einsum("bhd,bnhd->bhn", sink.q[:, -1], sink.k.repeat_interleave(2, dim=2)) / 16**0.5
    share = heads.softmax(-1)[..., :SINK_TOKENS].sum(-1)
    assert 0.2 < share.min() <= share.max() < 0.9


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


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("heads", [(32, 2), (8, 4)])
def test_on_a_gpu_stages_of_token_mode(heads: tuple[int, int]) -> None:
    """Each runs in a graph, and reaches no more than the device can."""
    from bench import bench_nsa_stages

    sizes, config = Sizes(1, 3000, *heads, 128), NSAConfig.paper()
    rows = bench_nsa_stages.stages(sizes, config, 4.0, 900.0)
    names = ["compress", "compressed", "choose", "selected", "window", "gate", "all"]
    assert [row["stage"] for row in rows] == names
    assert all(row["floor_ms"] > 0 and 0 < row["share"] < 2 for row in rows)  # of small inputs much is in L2
    rows = bench_nsa_stages.backward_stages(sizes, config, 4.0, 900.0)
    assert [row["stage"] for row in rows] == [*backward_work(sizes, config), "forward, saving", "backward", "all"]
    assert {(row["h"], row["h_kv"]) for row in rows} == {heads}


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backward", [[], ["--backward"]])
def test_on_a_gpu_packed_documents(backward: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "LONGEST", 1024)
    varlen.main(["--tokens", "4K", *backward, "--out", str(tmp_path / "run")])
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["direction"] == ("fwd+bwd" if backward else "fwd")
    assert [row["name"] for row in content["rows"]] == ["packed", "padded", "one by one"]


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
