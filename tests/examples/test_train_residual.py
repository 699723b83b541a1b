"""The example that trains with attention over layers: what its variants are, and what a run leaves behind."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples import train_residual as example
from examples.shared import byte_models

TINY = shlex.split(
    "--device=cpu --layers=2 --width=32 --heads=2 --kv-heads=1 --context=32 --steps=8 --batch=4 "
    "--eval-every=4 --eval-windows=6 --lr=0.01"
)


def trainer(variant: str, corpus: byte_models.Corpus, *options: str) -> byte_models.TextTrainer:
    args = example.parse([*TINY, *options])
    args.mixing_backend = example.resolve(args)
    assert args.mixing_backend == "reference"
    return byte_models.TextTrainer(variant, example.make_model(variant, args), args, corpus)


def test_writes_what_it_promises(written: Callable[..., dict[str, Any]]) -> None:
    content = written(example, TINY)
    assert (content["backend"], [row["variant"] for row in content["summary"]]) == ("reference", ["sum", "attention"])
    parameters = content["model"]["parameters"]
    assert parameters["attention"] - parameters["sum"] == (2 * 2 + 1) * 2 * 32
    assert "With attention residual the final validation loss is" in content["verdict"]


def test_a_row_has_the_mean_since_the_one_before(corpus: byte_models.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("sum", corpus)
    monkeypatch.setattr(made, "step", float)
    assert [row["train_loss"] for row in made.train()["rows"]] == [None, 1.5, 5.5]


def test_variants_start_as_one_model(corpus: byte_models.Corpus) -> None:
    """Queries of zeros give means, which layers normalise to what they make of sums; then the two part."""
    plain, attending = (trainer(variant, corpus) for variant in example.VARIANTS)
    assert torch.equal(plain.starts, attending.starts)
    own = {name for name, _ in attending.model.named_parameters() if name.startswith("mixtures.")}
    shared = plain.model.state_dict()
    assert attending.model.state_dict().keys() - own == shared.keys()
    for name, value in shared.items():
        assert torch.equal(attending.model.state_dict()[name], value), name
    tokens = plain.validation[:2, :-1]
    with torch.no_grad():
        torch.testing.assert_close(attending.model(tokens), plain.model(tokens), rtol=1e-3, atol=1e-3)
    before = attending.evaluate()
    assert plain.evaluate() == pytest.approx(before, rel=1e-4)
    for each in (plain, attending):
        for step in range(4):
            each.step(step)
    assert plain.evaluate() != pytest.approx(attending.evaluate(), rel=1e-4)


def test_the_verdict() -> None:
    plain = {"variant": "sum", "steps": 10, "final_val_loss": 2.0}
    attending = {"variant": "attention", "steps": 10, "final_val_loss": 1.9}
    text = example.verdict([plain, attending])
    assert "is 5.0% below that with sums. One seed each" in text
    assert "5.0% above" in example.verdict([plain, {**attending, "final_val_loss": 2.1}])
    assert "alone says nothing" in example.verdict([attending])
