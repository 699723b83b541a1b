"""The cache of gradients gives what a computation would give, whatever happens to memory and tensors in between."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from dispatch import neighborhood_attention_backward
from nsa.neighborhood import backward_cache
from nsa.neighborhood.api import BackwardCache
from tests.support import backward_cases


def ask(cache: BackwardCache, runs: list[object], *inputs: Tensor, options: object = None) -> Tensor:
    """Twice the first tensor; what is computed is noted in `runs`."""

    def compute() -> tuple[Tensor, ...]:
        runs.append(options)
        return tuple(tensor.detach() * 2 for tensor in inputs)

    return cache.gradients(inputs, options, compute)[0]


def test_an_unchanged_call_is_not_computed_again() -> None:
    cache, runs, x, y = BackwardCache(), list[object](), torch.ones(3), torch.ones(3)
    first = ask(cache, runs, x, y)
    assert ask(cache, runs, x, y) is first
    assert len(runs) == 1
    ask(cache, runs, y, x)
    ask(cache, runs, x, y, options="others")
    ask(cache, runs, x.view(3), y)  # another object: it may not stay what it is
    assert len(runs) == 4


@pytest.mark.parametrize("own", [True, False], ids=["the tensor", "a view of it"])
def test_changes_in_place_are_seen(own: bool) -> None:
    cache, runs, x = BackwardCache(), list[object](), torch.ones(4)
    for expected in (2, 4, 6):
        assert ask(cache, runs, x).eq(expected).all()
        (x if own else x.detach()[:]).add_(1)
    assert len(cache) == 1


def test_memory_that_is_exchanged_is_seen() -> None:
    cache, runs, x = BackwardCache(), list[object](), torch.ones(4)
    ask(cache, runs, x)
    for value in range(20):  # memory given up for the one before may come back
        x.data = torch.full((4,), float(value))
        assert ask(cache, runs, x).eq(2 * value).all()
    x.resize_(2)
    assert ask(cache, runs, x).shape == (2,)


def test_changed_gradients_are_computed_again() -> None:
    cache, runs, x = BackwardCache(), list[object](), torch.ones(4)
    ask(cache, runs, x).zero_()
    assert ask(cache, runs, x).eq(2).all()


def test_inputs_are_held_while_they_are_compared_with() -> None:
    cache, x = BackwardCache(capacity=1), torch.ones(4)
    held = weakref.ref(x)
    ask(cache, [], x)
    del x
    gc.collect()
    assert held() is not None
    ask(cache, [], torch.ones(4))
    assert held() is None
    cache.clear()
    assert len(cache) == 0


def test_the_least_recently_used_goes() -> None:
    cache, runs = BackwardCache(capacity=2), list[object]()
    a, b, c = (torch.full((1,), float(value)) for value in range(3))
    for x in (a, b, a, c):  # b goes, though a came first
        ask(cache, runs, x)
    assert len(runs) == 3
    ask(cache, runs, a)
    assert len(runs) == 3
    ask(cache, runs, b)
    assert len(runs) == 4


def test_a_captured_call_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that holds no backward would replay gradients of old values, and what it computes is not there yet."""
    cache, runs, x = BackwardCache(), list[object](), torch.ones(3)
    monkeypatch.setattr(backward_cache, "_is_captured", lambda device: True)
    ask(cache, runs, x)
    assert len(cache) == 0
    monkeypatch.setattr(backward_cache, "_is_captured", lambda device: False)
    ask(cache, runs, x)
    monkeypatch.setattr(backward_cache, "_is_captured", lambda device: True)
    ask(cache, runs, x)
    assert len(runs) == 3


def test_inference_tensors_are_not_kept() -> None:
    cache, runs = BackwardCache(), list[object]()
    with torch.inference_mode():
        x = torch.ones(2)
        ask(cache, runs, x)
        x.add_(1)
        assert ask(cache, runs, x).eq(4).all()
    y = torch.ones(2)
    with torch.inference_mode():
        ask(cache, runs, y)
    assert len(cache) == 0


# Streams


class Stream:
    """Stands in for one of a device's: what it was told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"{self.name}'s"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_other_streams_wait_and_keep_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    a, b = Stream("a", log), Stream("b", log)
    current = a
    monkeypatch.setattr(backward_cache, "STREAM_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(backward_cache, "_current_stream", lambda device: current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: log.append(f"{stream.name} holds {len(self)}"))
    cache, x = BackwardCache(), torch.ones(3)

    def compute() -> tuple[Tensor, ...]:
        log.append("compute")
        return x * 2, torch.ones(5)

    def call() -> list[str]:
        log.clear()
        cache.gradients((x,), None, compute)
        return list(log)

    assert call() == ["compute", "event on a"]
    assert call() == []  # streams keep their order
    current = b
    assert call() == call() == ["b waits for a's", "b holds 3", "b holds 5"]
    x.add_(1)
    assert call() == ["compute", "event on b"]
    assert call() == []
    current = a
    assert call() == ["a waits for b's", "a holds 3", "a holds 5"]


def test_the_public_function() -> None:
    """As a training loop has it: the same tensors twice, changed ones after an optimizer's step."""
    (do, q, k, v, attn), window = backward_cases.make(20)
    cache, run = BackwardCache(), neighborhood_attention_backward
    first, again = (run(do, q, k, v, attn, **window, cache=cache) for _ in range(2))
    assert all(a is b for a, b in zip(first, again, strict=True))
    for tensor in (None, do, q, k, v, attn):
        if tensor is None:
            window["softmax_scale"] = 0.1
        else:
            tensor.mul_(1.5)
        cached, expected = run(do, q, k, v, attn, **window, cache=cache), run(do, q, k, v, attn, **window)
        assert all(map(torch.equal, cached, expected))
