"""The training example: its text, that each variant is what it says, and what a run leaves behind."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa.module
from examples import train_text as example
from examples.shared import byte_models
from examples.shared.nsa_variants import BRANCHES, make_config
from nsa import LinearCompression, NSAConfig, nsa_forward_aux
from tests.support.bench_helpers import assert_documented
from tests.support.train_text_losses import train

SIZES = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "kv-heads": 1,
    "context": 64,
    "block-size": 8,
    "k": 3,
    "w": 8,
    "q-tile": 16,
    "steps": 12,
    "batch": 4,
    "eval-every": 4,
    "eval-windows": 6,
    "cuts": 3,
    "lr": 0.01,
}
TINY = ["--device=cpu", *(f"--{name}={value}" for name, value in SIZES.items())]
PRESETS = {"per_tile": [], "paper": ["--preset=paper", "--q-tile=1", "--k=4"]}
NSA_VARIANTS = [name for name in example.VARIANTS if name != "dense"]


@pytest.fixture(scope="module")
def corpus() -> example.Corpus:
    return example.load_corpus(Path(sysconfig.get_path("stdlib")))


def trainer(variant: str, corpus: example.Corpus, *options: str) -> example.Trainer:
    args = example.parse([*TINY, "--variants", variant, *options])
    assert example.resolve(args) == []
    return example.Trainer(variant, args, corpus)


def run(trainer: example.Trainer) -> tuple[list[example.Row], example.Summary]:
    return trainer.run(lambda *_: None)


# A run


def test_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([*TINY, "--out", str(tmp_path / "run-0.5")]) == 0
    content = json.loads((tmp_path / "run-0.5.json").read_text())
    assert_documented("examples/train_text.py", content, {"rows": example.Row, "summary": example.Summary})

    assert [row["variant"] for row in content["summary"]] == list(content["variants"]) == list(example.VARIANTS)
    assert content["variants"]["nsa"]["backend"] == "reference"
    assert content["data"]["validation"]["files"] > 10
    for summary in content["summary"]:
        own = [row for row in content["rows"] if row["variant"] == summary["variant"]]
        assert [row["step"] for row in own] == [0, 4, 8, 12]
        assert own[-1]["tokens"] == 12 * 4 * 64
        assert own[0]["train_loss"] is None
        assert own[-1]["val_loss"] == summary["final_val_loss"] < own[1]["val_loss"] < own[0]["val_loss"]
        assert own[-1]["train_loss"] < own[1]["train_loss"]
        assert summary["bits_per_byte"] == pytest.approx(summary["final_val_loss"] / math.log(2))
        ratio = summary["final_val_loss"] / content["summary"][0]["final_val_loss"]
        assert summary["relative_to_dense"] == pytest.approx(ratio)
        assert summary["tokens_per_s"] > 0
        assert (summary["lookahead"] is None) == (summary["variant"] in ("dense", "window", "no-selected"))
    assert (tmp_path / "run-0.5.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "What this says: NSA's final validation loss is" in " ".join(shown.split())
    assert " ".join(content["verdict"].split()) in " ".join(shown.split())


def test_saves_what_layers_select(tmp_path: Path, corpus: example.Corpus) -> None:
    """As bench_token_selected.py reads it: of every layer and key/value head, for each token, ascending, then -1."""
    saved = tmp_path / "new" / "chosen.pt"
    options = [*PRESETS["paper"], "--layers=2", "--kv-heads=2", "--save-indices", str(saved)]
    run(trainer("nsa", corpus, *options))
    indices = torch.load(saved, weights_only=True)
    assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (1, 2 * 2, 64, 4))
    own = torch.arange(64)[:, None] // 8
    assert ((indices >= -1) & (indices <= own)).all()
    assert (indices.where(indices >= 0, 64 + torch.arange(4)).diff(dim=-1) > 0).all()
    assert not torch.equal(indices[:, :2], indices[:, 2:])


def test_a_seed_fixes_all_numbers(corpus: example.Corpus) -> None:
    first, second, other = (run(trainer("nsa", corpus, "--seed", seed))[0] for seed in ("1", "1", "2"))
    assert first == second
    assert first[-1] != other[-1]


def test_variants_share_weights_and_batches(corpus: example.Corpus) -> None:
    made = {variant: trainer(variant, corpus) for variant in example.VARIANTS}
    nsa = made["nsa"].model.state_dict()
    gates = {name for name in nsa if "gate_proj" in name}
    for variant, other in made.items():
        assert torch.equal(other.starts, made["nsa"].starts)
        assert torch.equal(other.validation, made["nsa"].validation)
        state = other.model.state_dict()
        assert nsa.keys() - state.keys() == (gates if variant == "dense" else set())
        for name, value in state.items():
            assert torch.equal(value, nsa[name]), name


def test_checkpointing_changes_no_loss(corpus: example.Corpus) -> None:
    kept, recomputed = (trainer("nsa", corpus, *options) for options in ([], ["--checkpointing"]))
    assert [kept.step(i) for i in range(3)] == pytest.approx([recomputed.step(i) for i in range(3)], rel=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("preset", [[], ["--preset=paper", "--q-tile=1", "--k=4"]], ids=["per tile", "paper"])
def test_a_graph_trains_as_its_calls_do(preset: list[str], corpus: example.Corpus) -> None:
    """On other batches than the captured one, with weights that change; sums with atomics differ in their order."""
    sizes = ["--device=cuda", "--width=256", "--context=1024", "--block-size=64", "--w=64", "--q-tile=256", *preset]
    called, graphed = (trainer("nsa", corpus, *sizes, *options) for options in ([], ["--cuda-graph"]))
    assert [called.step(i) for i in range(5)] == pytest.approx([graphed.step(i) for i in range(5)], rel=1e-2)
    assert called.graph is None
    assert graphed.graph is not None


@pytest.mark.parametrize("variant", ["dense", "nsa"])
def test_trains_in_mixed_precision(variant: str, corpus: example.Corpus) -> None:
    """fp32 weights and moments, bf16 in between: close to fp32, and not equal to it."""
    full, mixed = (trainer(variant, corpus, "--dtype", dtype) for dtype in ("fp32", "bf16"))
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    losses = [[each.step(i) for i in range(6)] for each in (full, mixed)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


def test_compiles_what_lies_around_attention(corpus: example.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    made = trainer("nsa", corpus, "--layers", "2", "--compile")
    assert compiled == [block.feed_forward for block in made.model.blocks]


def test_a_time_limit_ends_a_variant_and_its_comparison(corpus: example.Corpus) -> None:
    rows, summary = run(trainer("nsa", corpus, "--minutes", "1e-9"))
    assert [row.step for row in rows] == [0, 1]
    assert (summary.steps, summary.tokens_per_s) == (1, None)
    dense = run(trainer("dense", corpus))[1]
    related = example.relate([summary, dense])
    assert [s.relative_to_dense for s in related] == [None, 1]
    assert "NSA and dense attention did 1 and 12 steps, so they are not compared." in example.verdict(related)


def test_a_diverged_run_keeps_the_variants_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = example.Trainer.losses

    def losses(self: example.Trainer, windows: Tensor) -> Tensor:
        return right(self, windows) * (math.nan if self.variant == "nsa" else 1)

    monkeypatch.setattr(example.Trainer, "losses", losses)
    with pytest.raises(SystemExit, match="nsa: the loss is nan at step 0: a smaller --lr may help"):
        example.main([*TINY, "--variants", "window,nsa", "--out", str(tmp_path / "run")])
    content = json.loads((tmp_path / "run.json").read_text())
    assert [summary["variant"] for summary in content["summary"]] == ["window"]
    assert content["verdict"].startswith("NSA itself was not trained")
    assert (tmp_path / "run.png").exists()


# What the variants are


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", NSA_VARIANTS)
def test_only_a_variants_branches_contribute(
    variant: str, preset: str, corpus: example.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions: dict[str, float] = {}

    def record(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        out, aux = nsa_forward_aux(q, k, v, **keywords)
        outputs = dict(zip(BRANCHES, (aux.o_cmp, aux.o_slc, aux.o_win), strict=True))
        for index, (branch, output) in enumerate(outputs.items()):
            contributions[branch] = (aux.gates[..., index, None] * output).abs().sum().item()
        return out

    monkeypatch.setattr(nsa.module, "nsa", record)
    trainer(variant, corpus, *PRESETS[preset]).evaluate()
    assert {branch for branch, size in contributions.items() if size > 0} == set(example.VARIANTS[variant])


def test_a_closed_gate_gets_no_gradient(corpus: example.Corpus) -> None:
    made = trainer("no-compressed", corpus)
    made.step(0)
    gate = made.model.blocks[0].attention.gate_proj
    gradient = gate.bias.grad.unflatten(0, (-1, 3))
    assert (gradient[:, 0] == 0).all()
    assert (gradient[:, 1:] != 0).all()


def rows_that_see(model: Callable[[Tensor], Tensor], tokens: Tensor, position: int) -> list[int]:
    """Rows whose logits depend on the byte at `position`."""
    changed = tokens.clone()
    changed[:, position] ^= 1
    with torch.no_grad():
        differs = (model(changed) != model(tokens)).any(-1).any(0)
    return differs.nonzero().flatten().tolist()


@pytest.mark.parametrize("layers", [1, 2])
def test_reach(layers: int, corpus: example.Corpus) -> None:
    """Each layer of the window carries 7 positions further, the embedding 3; dense attention and NSA reach the end."""
    made = {name: trainer(name, corpus, "--layers", str(layers)) for name in ("dense", "window", "nsa", "no-selected")}
    tokens = made["nsa"].validation[:, :-1]
    for position in (0, 20):
        seen = {name: rows_that_see(each.model, tokens, position) for name, each in made.items()}
        assert seen["dense"] == list(range(position, 64))
        assert seen["window"] == list(range(position, position + layers * 7 + 3 + 1))
        assert seen["no-selected"][0] == position, "without selection by tile nothing looks ahead"
        assert seen["nsa"][-1] == seen["no-selected"][-1] == 63


def test_lookahead_is_that_of_a_tile(corpus: example.Corpus) -> None:
    """Nothing lies behind the last byte of a tile in its tile; behind others, what selection gains from is cut off."""
    made = trainer("nsa", corpus)
    ends, _ = made.lookahead([15, 31, 63])
    assert ends == pytest.approx(0, abs=1e-6)
    inside, error = made.lookahead([32, 33, 34, 48, 49, 50])
    assert abs(inside) > 1e-5
    assert 0 < error < 1
    assert not trainer("nsa", corpus, "--q-tile", "1").looks_ahead()
    assert not trainer("nsa", corpus, *PRESETS["paper"]).looks_ahead()


# The presets


def test_the_papers_preset_is_the_papers_on_a_gpu() -> None:
    defaults = {"preset": "paper", "init_blocks": None, "local_blocks": None, **example.DEFAULTS["paper"]["cuda"]}
    args = argparse.Namespace(**defaults)
    assert make_config(argparse.ArgumentParser(), args) == NSAConfig.paper()


def test_presets_shape_what_the_options_size() -> None:
    paper = example.parse(["--device=cpu", "--preset=paper"]).config
    assert paper.token_mode
    assert (paper.compress_block_size, paper.stride, paper.select_size) == (8, 4, 16)
    assert (paper.num_init_blocks, paper.num_local_blocks) == (1, 2)
    sized = example.parse(["--device=cpu", "--preset=paper", "--block-size=32", "--k=6", "--w=24", "--local-blocks=1"])
    expected = {"compress_block_size": 16, "compress_stride": 8, "select_block_size": 32, "num_selected_blocks": 6}
    assert sized.config == NSAConfig.paper(**expected, window_size=24, num_local_blocks=1)
    per_tile = example.parse(["--device=cpu", "--block-size=32"]).config
    assert (per_tile.compress_block_size, per_tile.stride, per_tile.select_size) == (32, 32, 32)
    assert per_tile.num_local_blocks == 1
    assert not per_tile.token_mode


def test_the_former_name_of_a_preset_is_accepted() -> None:
    former = example.parse(["--device=cpu", "--preset=seed"])
    assert former.preset == "per_tile"
    assert former.config == example.parse(["--device=cpu", "--preset=per_tile"]).config


def test_a_results_file_names_preset_and_compression(corpus: example.Corpus) -> None:
    made = trainer("nsa", corpus, *PRESETS["paper"], "--compress=linear")
    facts = example.facts(made.args, corpus)
    assert facts["preset"] == facts["variants"]["nsa"]["preset"] == "paper"
    config = facts["variants"]["nsa"]["config"]
    assert (config["compress"], config["compress_stride"], config["q_tile_size"]) == ("linear", 2, 1)
    json.dumps(facts)


@pytest.mark.parametrize("preset", PRESETS)
def test_learned_compression_begins_as_the_mean_and_trains(preset: str, corpus: example.Corpus) -> None:
    options = [*PRESETS[preset], "--compress"]
    mean, learned = (trainer("nsa", corpus, *options, compress) for compress in ("mean", "linear"))
    assert learned.evaluate() == pytest.approx(mean.evaluate(), rel=1e-5)
    before = {name: value.clone() for name, value in learned.model.state_dict().items() if ".compress." in name}
    assert len(before) == 4, "of keys and values: weights and places"
    rows, _ = run(learned)
    assert rows[-1].val_loss < rows[0].val_loss
    assert all(not torch.equal(learned.model.state_dict()[name], value) for name, value in before.items())
    assert not any(isinstance(module, LinearCompression) for module in mean.model.modules())


# The text


def test_the_split_is_by_file_and_without_leaks(corpus: example.Corpus) -> None:
    again = example.load_corpus(Path(sysconfig.get_path("stdlib")))
    assert corpus.facts() == again.facts()
    assert not set(corpus.training_files) & set(corpus.validation_files)
    assert 0.02 < len(corpus.validation_files) / len(corpus.training_files) < 0.1
    trained = set(bytes(corpus.training.numpy()).split(byte_models.SEPARATOR))
    held_out = bytes(corpus.validation.numpy()).split(byte_models.SEPARATOR)
    assert held_out.pop() == b""
    assert len(held_out) == len(corpus.validation_files)
    assert not trained & set(held_out)


def test_which_files_count(tmp_path: Path) -> None:
    held_out = [name for name in (f"{i}.py" for i in range(200)) if zlib.crc32(name.encode()) % 20 == 0]
    texts = {"a/one.py": "one", "a/same.py": "one", "empty.py": "\n", "site-packages/other.py": "other", "x.txt": "x"}
    for name, text in {**texts, held_out[0]: "two\0", held_out[1]: "one\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = example.load_corpus(tmp_path)
    kept = {**dict.fromkeys(corpus.training_files, "training"), **dict.fromkeys(corpus.validation_files, "validation")}
    assert kept == {held_out[0]: "validation", held_out[1]: "validation"}
    assert bytes(corpus.validation.numpy()) == b"".join(
        {held_out[0]: b"two\n\0", held_out[1]: b"one\n\0"}[name] for name in corpus.validation_files
    )


def test_windows_lie_in_their_text(corpus: example.Corpus) -> None:
    small = replace(corpus, training=torch.arange(101).byte(), validation=torch.arange(35).byte())
    starts = byte_models.training_starts(small, steps=500, batch=2, context=64, seed=0)
    assert (starts.min(), starts.max()) == (0, 36)
    windows = byte_models.windows_at(small.training, starts[0], 65)
    assert torch.equal(windows, starts[0][:, None] + torch.arange(65))
    assert byte_models.validation_starts(small, windows=5, context=10).tolist() == [0, 11, 22]
    assert byte_models.validation_starts(small, windows=2, context=10).tolist() == [0, 17]


# What is concluded, and bad arguments


def summary(variant: str, loss: float, **facts: Any) -> example.Summary:
    empty = dict.fromkeys(("relative_to_dense", "lookahead", "lookahead_error", "tokens_per_s", "peak_gib"))
    return example.Summary(variant, final_val_loss=loss, bits_per_byte=loss, **{"steps": 10, **empty, **facts})


@pytest.mark.parametrize(
    ("losses", "sentences"),
    [
        ((1.0, 1.015, 1.1), ["1.5% above that of dense attention: within 2%.", "It is 7.7% below", ": better."]),
        ((1.0, 1.05, 1.04), ["5.0% above that of dense attention: not within 2%.", "1.0% above", ": not better."]),
        ((1.0, 0.95, 1.1), ["5.0% below that of dense attention: better than 2%."]),
    ],
)
def test_the_verdict(losses: tuple[float, ...], sentences: list[str]) -> None:
    dense, nsa, window = losses
    found = [
        summary("dense", dense),
        summary("window", window),
        summary("nsa", nsa, lookahead=0.01 * nsa, lookahead_error=0.002 * nsa),
    ]
    text = example.verdict(found)
    for sentence in [*sentences, "changes NSA's loss by +1.0% ± 0.2%.", "One seed each"]:
        assert sentence in text
    assert "So short a run" not in text


@pytest.mark.parametrize(("steps", "short"), [("120", True), ("1000", False)])
def test_a_short_run_says_that_it_is_one(steps: str, short: bool) -> None:
    """The CPU's models have 0.3 M parameters; its 120 steps read 2 KiB each."""
    args = example.parse(["--device", "cpu", "--steps", steps])
    example.resolve(args)
    assert example.is_short(args) == short
    text = example.verdict([summary("nsa", 1.0), summary("dense", 1.0)], short=short)
    assert ("shows that the variants train, not yet what attention over distance is worth" in text) == short


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "nsa,sparse"], "must be among dense, nsa, window, no-compressed, no-selected, no-window"),
        (["--width", "34", "--heads", "4"], "--width must be a multiple of 2 * --heads, got 34 and 4"),
        (["--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 2 and 3"),
        (["--preset=paper", "--block-size=6"], "--block-size must be a multiple of 4 with --preset paper, got 6"),
        (["--k", "8"], "--context must hold more than --k blocks of --block-size, or nothing is left to select"),
        (["--k", "1"], "num_init_blocks + num_local_blocks must fit in num_selected_blocks=1"),
        (["--steps", "0"], "must be a positive integer such as 4096 or 4K, got '0'"),
        (["--cuts", "65"], "--cuts must be at most --context, got 65 and 64"),
        (["--lr", "nan"], "--lr must be greater than 0, got nan"),
        (["--variants=dense", "--save-indices=x"], "--save-indices needs variant nsa, got ['dense']"),
        (["--minutes", "0"], "--minutes must be greater than 0, got 0.0"),
        (["--cuda-graph"], "--cuda-graph needs a CUDA device, got cpu"),
        (["--out=/dev/null/x"], "--out must name a file that can be written: "),
        (["--save-indices=/dev/null/x"], "--save-indices must name a file that can be written: "),
    ],
)
def test_bad_command_lines(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        example.main([*TINY, *options])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, corpus: example.Corpus) -> None:
    with pytest.raises(SystemExit, match="cute: runs on CUDA devices, got cpu"):
        example.main([*TINY, "--backend", "cute"])
    monkeypatch.setattr(example, "load_corpus", lambda _: replace(corpus, validation=corpus.validation[:64]))
    with pytest.raises(SystemExit, match="--context must be less than the 64 bytes of text here, got 64"):
        example.main(TINY)


def test_only_the_same_run_goes_beside(tmp_path: Path, corpus: example.Corpus) -> None:
    assert example.main([*TINY, "--variants=nsa", "--steps=1", "--out", str(tmp_path / "one")]) == 0
    with pytest.raises(SystemExit, match=r"--beside must name a run with the same training, got .*'steps': 1"):
        example.main([*TINY, "--variants=nsa", "--steps=2", "--beside", str(tmp_path / "one.json")])
    with pytest.raises(SystemExit, match=r"--beside must name results of this example, got .*none\.json"):
        example.main([*TINY, "--beside", str(tmp_path / "none.json")])


# Sequences divided among processes


def test_divided_sequences_have_the_losses_of_whole_ones(tmp_path: Path) -> None:
    """As torchrun starts it: every held-out byte's loss after 3 updates, and those of training, but for rounding."""
    options = [*TINY, "--variants=nsa", "--checkpointing", "--steps=3", "--eval-every=2", "--eval-windows=2"]
    losses = [tmp_path / f"{name}.pt" for name in ("whole", "divided")]
    assert train(str(losses[0]), [*options, "--out", str(tmp_path / "whole")]) == 0
    tolerance = example.rounding_tolerance(example.parse(options))
    assert tolerance is not None
    options += ["--beside", str(tmp_path / "whole.json"), "--context-parallel=2", "--out", str(tmp_path / "divided")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", train.__module__, str(losses[1]), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of a loss is rounding: equal") == 1  # one process shows, and both divide
    one, other = (torch.load(file, weights_only=True) for file in losses)
    assert one.shape == (2, SIZES["context"])
    torch.testing.assert_close(other, one, rtol=0, atol=tolerance * float(one.mean()))

    whole, divided = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "divided"))
    assert (whole["training"]["context_parallel"], divided["training"]["context_parallel"]) == (None, 2)
    (beside,) = divided["beside"]
    assert beside["rows"] == whole["rows"]
    assert (beside["context_parallel"], beside["tolerance"], beside["equal"]) == (None, tolerance, True)
    for name, difference in beside["differences"].items():
        pairs = [(a[name], b[name]) for a, b in zip(whole["rows"], divided["rows"], strict=True) if a[name] is not None]
        assert difference == max(abs(a - b) for a, b in pairs)
    assert divided["summary"][0]["lookahead"] == pytest.approx(whole["summary"][0]["lookahead"], abs=1e-4)


def test_losses_beyond_rounding_end_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousandth more is no rounding; in bf16, where rounding may be as much, nothing is said."""
    options = [*TINY, "--variants=nsa", "--steps=4", "--eval-every=4", "--eval-windows=2"]
    assert example.main([*options, "--out", str(tmp_path / "one")]) == 0
    beside = ["--beside", str(tmp_path / "one.json"), "--out", str(tmp_path / "other")]
    assert example.main([*options, *beside]) == 0  # the same bits
    losses = example.Trainer.losses
    monkeypatch.setattr(example.Trainer, "losses", lambda self, windows: losses(self, windows) * 1.001)
    assert example.main([*options, *beside]) == 1
    assert "a loss is rounding: NOT equal" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "other.json").read_text())["beside"][0]["equal"] is False
    assert example.rounding_tolerance(example.parse([*TINY, "--dtype=bf16"])) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context-parallel=2"], "must be the number of processes that torchrun starts, 1 here, got 2"),
        (["--context-parallel=1", "--variants=dense,nsa"], "not of dense attention"),
        (["--context-parallel=1", "--minutes=1"], "--minutes does not go with --context-parallel"),
    ],
)
def test_what_cannot_be_divided(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        example.parse([*TINY, *options])
    assert message in " ".join(capsys.readouterr().err.split())
