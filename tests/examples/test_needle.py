"""The needle example: only far tokens hold an answer, a closed branch is silent, and what a run leaves behind."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import needle as example
from examples.shared.nsa_variants import BRANCHES, ablated, resolve

TINY = shlex.split(
    "--device=cpu --layers=2 --width=32 --heads=2 --kv-heads=1 --context=160 --block-size=8 --k=4 "
    "--w=8 --steps=6 --batch=4 --eval-every=3 --eval-windows=6 --needles=8 --questions=4 --lr=0.01"
)


def trainer(variant: str, *options: str) -> example.Trainer:
    args = example.parse([*TINY, "--variants", variant, *options])
    resolve(args)
    return example.Trainer(variant, args)


# The task


@pytest.mark.parametrize("task", [example.Task(160, 8, 8, 4), example.Task(4096, 64, 256, 32).shorter(8)], ids=str)
def test_a_needle_lies_once_and_far(task: example.Task) -> None:
    windows, distances = task.draw(5, torch.Generator().manual_seed(3))
    assert windows.shape == (5, task.context + 1)
    assert distances.shape == (5, task.questions)
    gap = task.quiz - example.FAR * task.window
    digits = set(b"0123456789")
    for window, distances_of in zip(windows.tolist(), distances.tolist(), strict=True):
        text = bytes(window)
        assert set(text[gap : task.quiz]) <= digits, "nothing but filler for four windows"
        assert len(re.findall(rb"[a-p]{4}[A-P]{4}", text[: task.quiz])) == task.needles
        assert len(re.findall(rb"[a-p]{4}[A-P]{4}", text[task.quiz :])) == task.questions
        for question, distance in enumerate(distances_of):
            answer = task.quiz + question * example.NEEDLE + example.CODE
            assert task.answers[question].tolist() == list(range(answer, answer + example.CODE))
            key, value = text[answer - example.CODE : answer], text[answer : answer + example.CODE]
            assert text[answer - distance - example.CODE : answer - distance + example.CODE] == key + value
            assert distance >= example.FAR * task.window
            assert text[:answer].count(key) == 2, "once as a needle, once as the question"
            assert text[:answer].count(value) == 1
            assert text[:answer].count(key[1:] + value[:1]) == 1, "the last letters of a key tell it"


def test_contexts_grow_to_the_whole() -> None:
    """A quarter of 160 bytes has no place for needles."""
    made = trainer("dense")
    batches = [made.batch(step) for step in range(6)]
    assert [list(batch.shape) for batch in batches] == [[8, 81]] * 3 + [[4, 161]] * 3
    assert [made.losses(batch).shape[1] for batch in batches] == [2 * example.CODE] * 3 + [4 * example.CODE] * 3
    for batch in batches:
        assert all(ord("A") <= letter <= ord("P") for letter in batch[:, made.answers(batch)].flatten())
    task = example.Task(4096, 64, 256, 32)
    assert [task.shorter(factor).context for factor in example.SHORTER] == [512, 1024, 2048, 4096]
    assert all(task.shorter(factor).problem() is None for factor in example.SHORTER)


def test_an_answer_is_right_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("dense")

    def logits(windows: Tensor) -> Tensor:
        """The next byte, but for the second question's third letter."""
        told = windows[:, 1:].clone()
        told[:, made.task.answers[1, 2] - 1] += 1
        return torch.nn.functional.one_hot(told, 256).float()

    monkeypatch.setattr(made, "logits", logits)
    assert made.right().tolist() == [[True, False, True, True]] * 6
    accuracy, ranges = made.judge("name")
    assert accuracy == 0.75
    assert sum(each["questions"] * each["accuracy"] for each in ranges) == pytest.approx(18)
    for each in ranges:
        inside = (made.distances >= 8 * each["nearest"]) & (made.distances < 8 * each["farthest"])
        assert each["questions"] == inside.sum()


# What the variants reach


def test_a_closed_branch_is_silent(contributions: dict[str, float]) -> None:
    made = trainer("nsa")
    made.step(0)
    weights = {name: value.clone() for name, value in made.model.state_dict().items()}
    open_loss = made.evaluate()
    assert all(size > 0 for size in contributions.values())
    for branch in BRANCHES:
        contributions.update(dict.fromkeys(BRANCHES, 0.0))
        with ablated(made.model, branch):
            closed_loss = made.evaluate()
        assert {name for name, size in contributions.items() if size == 0} == {branch}
        assert closed_loss != open_loss
    assert made.evaluate() == open_loss
    assert all(torch.equal(value, weights[name]) for name, value in made.model.state_dict().items())


# A run


def test_writes_what_it_promises(written: Callable[..., dict[str, Any]]) -> None:
    content = written(example, TINY, "accuracy")
    names = ["dense", "nsa", "nsa-closed", "no-selected", "window"]
    assert [summary["variant"] for summary in content["summary"]] == names
    assert list(content["variants"]) == example.CHOSEN
    assert content["variants"]["nsa"]["config"]["q_tile_size"] == 1
    for summary in content["summary"]:
        own = [each for each in content["accuracy"] if each["variant"] == summary["variant"]]
        assert sum(each["questions"] for each in own) == 6 * 4
        assert all(each["nearest"] >= example.FAR for each in own)


def test_the_verdict() -> None:
    shares = {"nsa": 0.97, "nsa-closed": 0.01, "window": 0.5}
    assert example.verdict([{"variant": name, "accuracy": share} for name, share in shares.items()]) == (
        "Answers right: nsa 97.0%, the same NSA with its selected branch closed 1.0%, window 50.0%. One seed each."
    )
