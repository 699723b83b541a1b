"""The example that writes text: both ways give the same bytes, and a difference is seen."""

from __future__ import annotations

import shlex

import pytest
import torch

from examples import generate as example
from examples.shared.byte_models import Corpus
from examples.shared.nsa_variants import make_model, resolve

TINY = shlex.split(
    "--device=cpu --layers=2 --width=32 --heads=2 --kv-heads=1 --context=64 --block-size=8 --k=4 "
    "--w=8 --steps=6 --batch=4 --eval-every=6 --eval-windows=4 --lr=0.01 --prompt=70 --length=20"
)


def test_trains_and_writes_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(TINY) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "nsa, step 6: validation loss" in told
    assert "Both generated the same 20 bytes after a prompt of 70." in told


@torch.no_grad()
def test_the_cached_model_gives_the_logits_of_the_whole(corpus: Corpus) -> None:
    """Not only the likeliest byte, which an untrained model may repeat forever."""
    args = example.parse(TINY)
    resolve(args)
    model = make_model("nsa", args)
    model.initialise(0)
    text = corpus.validation[:100].long()[None]
    table = example.PageTable.empty(1, 100)
    caches = [block.attention.new_cache(table) for block in model.blocks]  # type: ignore[operator, union-attr]
    parts, start = [], 0
    for count in (50, 1, 1, 8, 40):
        parts.append(model.continued(text[:, start : start + count], text[:, :start], caches))
        start += count
    torch.testing.assert_close(torch.cat(parts, 1), model(text), rtol=1e-4, atol=1e-4)


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(_model: object, _prompt: object, length: int) -> object:
        return (torch.tensor([[256 - 1 - i % 2]]) for i in range(length))

    monkeypatch.setitem(example.WAYS, "uncached", wrong)
    for dtype, status in (("fp32", 1), ("bf16", 0)):
        assert example.main([*TINY, f"--dtype={dtype}"]) == status
        told = " ".join(capsys.readouterr().out.split())
        assert "The texts differ: byte 0" in told
        assert ("rounding" in told) == (status == 0)
