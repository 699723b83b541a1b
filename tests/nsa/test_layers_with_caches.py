"""NSAttention and NeighborhoodAttention with a cache: layers that generate as they were trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa import NeighborhoodAttention, NeighborhoodCache, NSAConfig, NSAttention, PageTable, llama_rope, rotary_table
from tests.support.cases import product
from tests.support.helpers import SMALL, dynamically_quantized

WIDTH, HEADS, KV_HEADS = 32, 4, 2
CHUNKS = (20, 1, 1, 8, 3, 1, 6)
KINDS: dict[str, dict[str, Any]] = {
    "gates of x": {"gate": "x"},
    "gates of q, projected entries": {"gate": "q", "compress_proj": True},
    "learned compression": {"gate": None, "compress": "linear"},
    "keys of each branch": {"separate_kv": True, "v_head_dim": 6},
}


@pytest.mark.parametrize(("name", "kind"), product(SMALL, KINDS))
@torch.no_grad()
def test_steps_are_the_rows_of_the_layer(name: str, kind: str) -> None:
    torch.manual_seed(0)
    config = SMALL[name]
    layer = NSAttention(WIDTH, HEADS, KV_HEADS, config=config, rope=llama_rope, dtype=torch.float64, **KINDS[kind])
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    cache = layer.new_cache(PageTable.empty(2, 40, page_size=16))
    start = 0
    for count in CHUNKS:
        embeddings = rotary_table(cache.table.positions(count), layer.head_dim)
        out = layer(x[:, start : start + count], embeddings, cache=cache)
        for row in range(start, start + count):
            prefix = rotary_table(torch.arange(row + 1), layer.head_dim)
            expected = layer(x[:, : row + 1], prefix)[:, -1]
            torch.testing.assert_close(out[:, row - start], expected, rtol=1e-10, atol=1e-10)
        start += count


def test_refuses_what_does_not_go_together() -> None:
    layer = NSAttention(WIDTH, HEADS, config=NSAConfig.paper())
    cache, x = layer.new_cache(PageTable.empty(1, 64)), torch.randn(1, 3, WIDTH)
    with pytest.raises(RuntimeError, match="nsa_with_cache does not support gradients"):
        layer(x, cache=cache)
    counts = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match="counts goes with cache"):
        layer(x, counts=counts)
    with pytest.raises(ValueError, match="cu_seqlens and max_seqlen do not go with cache"):
        layer(x[0], cu_seqlens=torch.tensor([0, 3], dtype=torch.int32), cache=cache)
    with torch.no_grad():
        layer(x, cache=cache, counts=counts)
    assert cache.seqlens.tolist() == [2]


# Neighborhood attention


@pytest.mark.parametrize(("kernel_size", "dilation"), [(1, 1), (5, 1), (4, 3), (100, 1)])
@torch.no_grad()
def test_windows_roll(kernel_size: int, dilation: int) -> None:
    options = {"kernel_size": kernel_size, "dilation": dilation, "causal": True}
    layer = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, rope=llama_rope, dtype=torch.float64, **options)  # type: ignore[arg-type]
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    whole = layer(x, rotary_table(torch.arange(40), layer.head_dim))
    cache = layer.new_cache(2)
    start, places = 0, set()
    for count in CHUNKS:
        out = layer(x[:, start : start + count], rotary_table(cache.positions(count), layer.head_dim), cache=cache)
        torch.testing.assert_close(out, whole[:, start : start + count], rtol=1e-12, atol=1e-12)
        start += count
        assert cache.k.shape[1] == cache.v.shape[1] == min(start, (kernel_size - 1) * dilation)
        if start > (kernel_size - 1) * dilation:
            places.add(cache.k.data_ptr())
    assert len(places) <= 1, "sizes stay, so memory does, too"
    assert int(cache.length) == 40
    before = cache.k.clone()
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.k, before[[1, 1]])


ROLLING = NeighborhoodAttention(WIDTH, HEADS, kernel_size=5, causal=True)
OTHER, NOT_CAUSAL = NeighborhoodAttention(WIDTH, HEADS, kernel_size=7, causal=True), NeighborhoodAttention(WIDTH, HEADS)
X = torch.randn(2, 3, WIDTH)
WRONG_VALUES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda cache: NOT_CAUSAL(X, cache=cache), "cache goes with causal=True"),
    (lambda _: NOT_CAUSAL.new_cache(2), "cache goes with causal=True"),
    (lambda cache: OTHER(X, cache=cache), "cache must have kernel_size=7, got 5"),
    (lambda cache: ROLLING(X[:1], cache=cache), r"k must have the cache's \[B,N,H_kv,D\] = \[2,N,4,8\]"),
    (lambda cache: cache.reorder(torch.tensor([0])), r"rows must be \[2\]"),
    (lambda cache: cache.reorder(torch.tensor([-1, 0])), "rows must be from 0 to 1"),
    (lambda cache: cache.reorder(torch.tensor([0, 2])), "rows must be from 0 to 1"),
    (lambda _: NeighborhoodCache(1, heads_kv=1, dim=8, kernel_size=0), "kernel_size must be at least 1"),
]
WRONG_TYPES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda _: ROLLING(X, cache=ROLLING.new_cache(2, torch.bfloat16)), "k must be bfloat16, as the cache is"),
    (lambda _: ROLLING(X, cache=object()), "cache must be a NeighborhoodCache"),
    (lambda cache: cache.reorder(torch.tensor([True, False])), "rows must be an int32 or int64 tensor, got bool"),
    (lambda cache: cache.reorder([1, 0]), "rows must be an int32 or int64 tensor, got list"),
]
REFUSED = [*((*row, ValueError) for row in WRONG_VALUES), *((*row, TypeError) for row in WRONG_TYPES)]


@pytest.mark.parametrize(("call", "message", "error"), REFUSED)
def test_a_rolling_cache_refuses(call: Callable[[Any], Any], message: str, error: type[Exception]) -> None:
    cache = ROLLING.new_cache(2)
    with torch.no_grad(), pytest.raises(error, match=message):
        call(cache)
    assert int(cache.length) == 0


@pytest.mark.parametrize("learns", [*"qkv"])
def test_a_rolling_cache_refuses_gradients(learns: str) -> None:
    layer = copy.deepcopy(ROLLING).requires_grad_(False)
    layer.get_submodule(f"{learns}_proj").requires_grad_(True)
    with pytest.raises(RuntimeError, match="a call with a cache does not support gradients"):
        layer(X, cache=layer.new_cache(2))


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_rolling_cache_and_its_copy_go_on_outside_inference_mode(made_inside: bool) -> None:
    x = torch.randn(2, 9, WIDTH)
    with torch.inference_mode(made_inside):
        cache = ROLLING.new_cache(2)
    with torch.inference_mode():
        ROLLING(x[:, :5], cache=cache)
        copied = copy.deepcopy(cache)
    with torch.no_grad():
        for each in (cache, copied):
            torch.testing.assert_close(ROLLING(x[:, 5:], cache=each), ROLLING(x)[:, 5:])


@torch.no_grad()
def test_dynamically_quantized_layers_have_caches() -> None:
    nsa_layer = dynamically_quantized(NSAttention(WIDTH, HEADS, config=SMALL["paper"]))
    band = dynamically_quantized(NeighborhoodAttention(WIDTH, HEADS, kernel_size=5, causal=True))
    x = torch.randn(1, 30, WIDTH)
    for layer, cache in ((nsa_layer, nsa_layer.new_cache(PageTable.empty(1, 64))), (band, band.new_cache(1))):
        expected = layer(x)
        torch.testing.assert_close(layer(x, cache=cache), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))
    nsa_layer.q_proj = torch.nn.Identity()
    with pytest.raises(TypeError, match="projections must have a weight that defines dtype and device, got Identity"):
        nsa_layer.new_cache(PageTable.empty(1, 64))
    assert nsa_layer.new_cache(PageTable.empty(1, 64), torch.float64).dtype == torch.float64
