"""A prompt's chunk against pages: interpreted, the definition; on a GPU the bits of the whole call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa import NSACache, NSAConfig, nsa_forward, nsa_with_cache
from tests.ptx import Order, Schedule
from tests.support.cases import rest
from tests.support.cute_cases import gate_weight, on_gpu
from tests.support.decode_cases import Case, check, without_near_ties
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

CONFIG = NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=30)
# One that begins, one of one token, one without new tokens, one without room; pages in no order
RAGGED = Case(
    (70, 0, 130, 3, 7),
    CONFIG,
    queries=20,
    new=(20, 17, 1, 0, 0),
    overflowed=(4,),
    group=2,
    kv_heads=1,
    gating="projected",
    capacity=300,
)
CASES = {
    "ragged": RAGGED,
    "tiles of 96 keys": replace(
        RAGGED, queries=40, cached=(150, 20), new=(40, 9), overflowed=(), dim=128, gating="gates"
    ),
    "no window": replace(
        RAGGED, config=replace(CONFIG, window_size=0), queries=40, cached=(70, 0), new=(40, 9), overflowed=()
    ),
    "before the first entry": replace(RAGGED, cached=(3, 0), new=(11, 9), overflowed=(), page_size=16, capacity=16),
}

HERE = ("sm_90", "ragged")
"""What CI runs."""


@pytest.mark.interpreted
@pytest.mark.parametrize(("arch", "case"), [HERE, *rest(*[(a, c) for a in GPUS for c in CASES if (a, c) != HERE])])
def test_interpreted(arch: str, case: str) -> None:
    with interpreted_gpu(arch):
        check(without_near_ties(CASES[case]), prefilled=True)


@pytest.mark.parametrize("arch", [*rest(*GPUS)])
def test_races(arch: str) -> None:
    with interpreted_gpu(arch, Schedule(observer=Order)):
        check(without_near_ties(CASES["before the first entry"]), prefilled=True)


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(16, 1, 64), (8, 2, 128), (64, 4, 128)], ids=str)
@torch.no_grad()
def test_chunks_are_the_whole_call(heads: tuple[int, int, int]) -> None:
    """Bit for bit, chunks of any size, in a cache with more room; and steps after them go on."""
    config, tokens = NSAConfig.paper(), 9000
    q, k, v = on_gpu(tokens, *heads, batch=2)
    gates = {"gate_proj_weight": gate_weight(heads[0], heads[2])}
    expected = nsa_forward(q, k, v, config=config, backend="cute", **gates)
    cache = NSACache.empty(
        config, 2, max_tokens=20000, heads_kv=heads[1], dim=heads[2], dtype=torch.bfloat16, device="cuda"
    )
    first = 0
    for count in (4096, 64, 1000, 100, 3731, 9):
        part = slice(first, first + count)
        out = nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, backend="cute", **gates)
        if count >= 64:
            assert torch.equal(out, expected[:, part])
        first += count
    cache.check()


@pytest.mark.cuda
@torch.no_grad()
def test_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a chunk is replayed over growing lengths."""
    config, chunk = NSAConfig.paper(), 256
    q, k, v = on_gpu(8 * chunk)
    expected = nsa_forward(q, k, v, config=config, backend="cute")
    cache = NSACache.empty(config, 1, max_tokens=8 * chunk, heads_kv=2, dim=128, dtype=torch.bfloat16, device="cuda")
    new = [x[:, :chunk].clone() for x in (q, k, v)]
    nsa_with_cache(*new, cache, backend="cute")  # compiles
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa_with_cache(*new, cache, backend="cute")
    cache.reset()
    for i in range(8):
        part = slice(i * chunk, (i + 1) * chunk)
        for to, x in zip(new, (q, k, v), strict=True):
            to.copy_(x[:, part])
        graph.replay()
        assert torch.equal(out, expected[:, part]), f"chunk {i}"
