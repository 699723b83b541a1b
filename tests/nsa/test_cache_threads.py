"""A cache belongs to one thread at a time: another one is refused by name, and what the first one does is right."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NeighborhoodAttention, NSACache, neighborhood_attention, nsa_with_cache
from nsa.neighborhood import module
from tests.support.helpers import SMALL
from tests.support.threads import MESSAGE, while_running


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def refuse_in_another_thread(*functions: Callable[[], Any]) -> None:
    for function in functions:
        with pytest.raises(RuntimeError, match=MESSAGE):
            in_another_thread(function)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, count, 4, 16), torch.randn(1, count, 2, 16), torch.randn(1, count, 2, 16)


def empty_cache(**options: Any) -> NSACache:
    sizes: Any = {"heads": 4, "heads_kv": 2, "dim": 16}
    return NSACache.empty(SMALL["seed"], 1, 200, **sizes, **options)


def test_an_open_step_is_its_thread_s() -> None:
    cache, given = empty_cache(), tokens(3)
    table, row = cache.table, torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        with table.step(3):
            pass

    with table.step(3):
        refuse_in_another_thread(
            step,
            lambda: nsa_with_cache(*given, cache),
            lambda: table.reorder(row),
            lambda: table.truncate(1),
            lambda: table.grow(300),
            lambda: cache.load_state_dict(cache.state_dict()),
            lambda: copy.deepcopy(cache),
            lambda: NSACache(SMALL["seed"], table, heads=4, heads_kv=2, dim=16),
        )
        out = nsa_with_cache(*given, cache)
    assert cache.seqlens.tolist() == [3]
    assert torch.equal(out, nsa_with_cache(*given, empty_cache()))
    in_another_thread(lambda: nsa_with_cache(*given, copy.deepcopy(cache)))  # in turns, and a copy is free
    in_another_thread(lambda: nsa_with_cache(*given, cache))
    assert cache.seqlens.tolist() == [6]


def test_a_step_that_raises_frees_its_cache() -> None:
    cache = empty_cache()
    with pytest.raises(ValueError, match="counts must be from 0 to 2"):
        nsa_with_cache(*tokens(2), cache, counts=torch.tensor([3], dtype=torch.int32))
    in_another_thread(lambda: nsa_with_cache(*tokens(2), cache))
    assert cache.seqlens.tolist() == [2]


def test_a_rolling_cache_is_one_thread_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = NeighborhoodAttention(32, 4, kernel_size=5, causal=True)
    cache, x = layer.new_cache(1), torch.randn(1, 9, 32)
    entered, go_on = threading.Event(), threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Tensor:
        entered.set()
        assert go_on.wait(30)
        return neighborhood_attention(*args, **kwargs)

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x, cache=cache)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(module, "neighborhood_attention", wait)
        with while_running(run, entered, go_on) as first, pytest.raises(RuntimeError, match=MESSAGE):
            run()
    torch.testing.assert_close(first.result(), layer(x))  # another thread may sum in another order
    run()
    assert int(cache.length) == 18
