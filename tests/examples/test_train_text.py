"""The training example: its text, that each variant is what it says, and what a run leaves behind."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import train_text as example
from examples.shared.byte_models import SEPARATOR, Corpus, load_corpus
from examples.shared.nsa_variants import VARIANTS, make_config, resolve
from nsa import NSAConfig
from tests.support.cases import product
from tests.support.train_text_losses import train

TINY = shlex.split(
    "--device=cpu --layers=1 --width=32 --heads=2 --kv-heads=1 --context=64 --block-size=8 --k=3 "
    "--w=8 --q-tile=16 --steps=8 --batch=4 --eval-every=4 --eval-windows=6 --cuts=3 --lr=0.01"
)
PRESETS = {"per_tile": [], "paper": ["--preset=paper", "--q-tile=1", "--k=4"]}
NSA_VARIANTS = [name for name in VARIANTS if name != "dense"]


def trainer(variant: str, corpus: Corpus, *options: str) -> example.Trainer:
    args = example.parse([*TINY, "--variants", variant, *options])
    resolve(args)
    return example.Trainer(variant, args, corpus)


# A run


def test_writes_what_it_promises(written: Callable[..., dict[str, Any]]) -> None:
    content = written(example, TINY)
    assert [row["variant"] for row in content["summary"]] == list(content["variants"]) == list(VARIANTS)
    assert content["variants"]["nsa"]["backend"] == "reference"
    assert content["data"]["validation"]["files"] > 10
    for summary in content["summary"]:
        own = [row for row in content["rows"] if row["variant"] == summary["variant"]]
        assert (own[-1]["tokens"], own[0]["train_loss"]) == (8 * 4 * 64, None)
        assert own[-1]["val_loss"] < own[1]["val_loss"] < own[0]["val_loss"]
        assert own[-1]["train_loss"] < own[1]["train_loss"]
        assert summary["bits_per_byte"] == pytest.approx(summary["final_val_loss"] / math.log(2))
        ratio = summary["final_val_loss"] / content["summary"][0]["final_val_loss"]
        assert summary["relative_to_dense"] == pytest.approx(ratio)
        assert (summary["lookahead"] is None) == (summary["variant"] in ("dense", "window", "no-selected"))


def test_saves_what_layers_select(tmp_path: Path, corpus: Corpus) -> None:
    """As bench_token_selected.py reads it: of every layer and key/value head, for each token, ascending, then -1."""
    saved = tmp_path / "new" / "chosen.pt"
    options = [*PRESETS["paper"], "--layers=2", "--kv-heads=2", "--save-indices", str(saved)]
    trainer("nsa", corpus, *options).run()
    indices = torch.load(saved, weights_only=True)
    assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (1, 2 * 2, 64, 4))
    own = torch.arange(64)[:, None] // 8
    assert ((indices >= -1) & (indices <= own)).all()
    assert (indices.where(indices >= 0, 64 + torch.arange(4)).diff(dim=-1) > 0).all()
    assert not torch.equal(indices[:, :2], indices[:, 2:])


def test_variants_share_weights_and_batches(corpus: Corpus) -> None:
    made = {variant: trainer(variant, corpus) for variant in VARIANTS}
    nsa = made["nsa"].model.state_dict()
    gates = {name for name in nsa if "gate_proj" in name}
    for variant, other in made.items():
        assert torch.equal(other.starts, made["nsa"].starts)
        assert torch.equal(other.validation, made["nsa"].validation)
        state = other.model.state_dict()
        assert nsa.keys() - state.keys() == (gates if variant == "dense" else set())
        for name, value in state.items():
            assert torch.equal(value, nsa[name]), name


def test_checkpointing_changes_no_loss(corpus: Corpus) -> None:
    kept, recomputed = (trainer("nsa", corpus, *options) for options in ([], ["--checkpointing"]))
    assert [kept.step(i) for i in range(3)] == pytest.approx([recomputed.step(i) for i in range(3)], rel=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("preset", PRESETS)
def test_a_graph_trains_as_its_calls_do(preset: str, corpus: Corpus) -> None:
    """On other batches than the captured one, with weights that change; sums with atomics differ in their order."""
    sizes = shlex.split("--device=cuda --width=256 --context=1024 --block-size=64 --w=64 --q-tile=256")
    sizes += PRESETS[preset]
    called, graphed = (trainer("nsa", corpus, *sizes, *options) for options in ([], ["--cuda-graph"]))
    assert [called.step(i) for i in range(5)] == pytest.approx([graphed.step(i) for i in range(5)], rel=1e-2)
    assert called.graph is None
    assert graphed.graph is not None


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


@pytest.mark.parametrize(("variant", "preset"), product(NSA_VARIANTS, PRESETS))
def test_only_a_variants_branches_contribute(
    variant: str, preset: str, corpus: Corpus, contributions: dict[str, float]
) -> None:
    trainer(variant, corpus, *PRESETS[preset]).evaluate()
    assert {branch for branch, size in contributions.items() if size > 0} == set(VARIANTS[variant])


@torch.no_grad()
def test_reach(corpus: Corpus) -> None:
    """Each layer of the window carries 7 positions further, the embedding 3; dense attention and NSA reach the end."""
    models = {name: trainer(name, corpus, "--layers=2").model for name in ("dense", "window", "nsa", "no-selected")}
    tokens = corpus.validation[:64].long()[None]
    for position in (0, 20):
        changed = tokens.clone()
        changed[:, position] ^= 1
        differs = {name: (model(changed) != model(tokens)).any(-1).any(0) for name, model in models.items()}
        seen = {name: rows.nonzero().flatten().tolist() for name, rows in differs.items()}
        assert seen["dense"] == list(range(position, 64))
        assert seen["window"] == list(range(position, position + 2 * 7 + 3 + 1))
        assert seen["no-selected"][0] == position, "without selection by tile nothing looks ahead"
        assert seen["nsa"][-1] == seen["no-selected"][-1] == 63


def test_lookahead_is_that_of_a_tile(corpus: Corpus) -> None:
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


def test_defaults_fit_the_device_and_are_the_papers_on_a_gpu() -> None:
    sizes = {name: on_gpus for name, (_, on_gpus) in example.PAPER.items()}
    defaults = {"preset": "paper", "init_blocks": None, "local_blocks": None, **sizes}
    args = argparse.Namespace(**defaults)
    assert make_config(argparse.ArgumentParser(), args) == NSAConfig.paper()
    on_a_cpu = example.parse(["--device=cpu", "--preset=paper"])
    assert (on_a_cpu.steps, on_a_cpu.width, on_a_cpu.k, on_a_cpu.lr, on_a_cpu.dtype) == (120, 96, 5, 4e-3, "fp32")


def test_learned_compression_begins_as_the_mean_and_trains(corpus: Corpus) -> None:
    mean, learned = (trainer("nsa", corpus, *PRESETS["paper"], f"--compress={how}") for how in ("mean", "linear"))
    assert learned.evaluate() == pytest.approx(mean.evaluate(), rel=1e-5)
    state = learned.model.state_dict()
    before = {name: value.clone() for name, value in state.items() if ".compress." in name}
    assert len(before) == 4, "of keys and values: weights and places"
    learned.step(0)
    assert all(not torch.equal(state[name], value) for name, value in before.items())


# The text


def test_the_split_is_by_file_and_without_leaks(corpus: Corpus) -> None:
    assert corpus.facts() == load_corpus().facts()
    assert not set(corpus.training_files) & set(corpus.validation_files)
    assert 0.02 < len(corpus.validation_files) / len(corpus.training_files) < 0.1
    trained = set(bytes(corpus.training.numpy()).split(SEPARATOR))
    held_out = bytes(corpus.validation.numpy()).split(SEPARATOR)
    assert held_out.pop() == b""
    assert len(held_out) == len(corpus.validation_files)
    assert not trained & set(held_out)


# What is concluded, and bad arguments


def test_the_verdict() -> None:
    nsa = {"variant": "nsa", "final_val_loss": 1.05, "lookahead": 0.0105, "lookahead_error": 0.0021}
    others = [{"variant": name, "final_val_loss": loss} for name, loss in (("dense", 1.0), ("window", 1.1))]
    assert example.verdict([*others, nsa]) == (
        "NSA's final validation loss is 5.0% above that of dense attention. "
        "NSA's final validation loss is 4.5% below that of the window-only control. "
        "Cutting off the text after the predicted byte, which selection per tile looks at, changes NSA's loss by "
        "+1.0% ± 0.2%. One seed each: small differences may be noise."
    )
    assert "So short a run" in example.verdict([nsa], short=True)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    monkeypatch.setattr(example.common, "load_corpus", lambda: replace(corpus, validation=corpus.validation[:64]))
    with pytest.raises(SystemExit, match="--context must be less than the 64 bytes of text here, got 64"):
        example.main(TINY)


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
    assert one.shape == (2, 64)
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


def test_losses_are_compared_with_those_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousandth more is no rounding; in bf16, where rounding may be as much, nothing is said."""
    options = [*TINY, "--variants=nsa", "--steps=4", "--eval-every=4", "--eval-windows=2"]
    assert example.main([*options, "--out", str(tmp_path / "one")]) == 0
    beside = ["--beside", str(tmp_path / "one.json"), "--out", str(tmp_path / "other")]
    with pytest.raises(SystemExit, match=r"--beside must name a run with the same training, got .*'steps': 4"):
        example.main([*options, "--steps=2", *beside])
    with pytest.raises(SystemExit, match=r"--beside must name results of this example, got .*none\.json"):
        example.main([*options, "--beside", str(tmp_path / "none.json")])
    assert example.main([*options, *beside]) == 0  # the same bits
    losses = example.Trainer.losses
    monkeypatch.setattr(example.Trainer, "losses", lambda self, windows: losses(self, windows) * 1.001)
    assert example.main([*options, *beside]) == 1
    assert "a loss is rounding: NOT equal" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "other.json").read_text())["beside"][0]["equal"] is False
    assert example.rounding_tolerance(example.parse([*TINY, "--dtype=bf16"])) is None
