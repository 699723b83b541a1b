"""Decoding with paged keys on a GPU: against fp64, against the whole call, as a graph, in far pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.decode.pages import Paging
from cute_kernels.pool.compress import block_means
from nsa import NSACache, NSAConfig, PageTable, nsa_forward, nsa_forward_aux, nsa_with_cache
from tests.support.decode_cases import Case, check, without_near_ties
from tests.support.decode_cases import Step as DecodeStep

pytestmark = pytest.mark.cuda

PAPER = NSAConfig.paper()
BF16 = torch.bfloat16


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_step(dim: int, group: int, queries: int, dtype: torch.dtype) -> None:
    """The empty sequence, bounds of blocks and pages, and one 1000 times longer than another."""
    cached = (0, 1, 15, 16, 30, 31, 63, 64, 5000)
    check(without_near_ties(Case(cached, PAPER, queries, group=group, kv_heads=2, dim=dim, dtype=dtype)), "cuda")


TILES = NSAConfig(num_selected_blocks=4, window_size=100)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize(
    "config",
    [
        TILES,
        replace(TILES, q_tile_size=3, compress_block_size=32, compress_stride=16, select_block_size=64),
        replace(TILES, share_heads_in_group=True, num_local_blocks=1, q_tile_size=5),
    ],
    ids=["default", "overlapping, small tiles", "shared"],
)
def test_step_in_tile_mode(config: NSAConfig, dim: int, group: int, queries: int) -> None:
    """Steps that begin, cross and end at bounds of tiles, blocks and pages."""
    cached = (0, 1, 63, 64, 250, 255, 256, 3000)
    check(without_near_ties(Case(cached, config, queries, group=group, kv_heads=2, dim=dim)), "cuda")


def test_long_sequence() -> None:
    """Every CTA has entries, and blocks are chosen in parts."""
    config = NSAConfig.paper(compress_block_size=64, compress_stride=64, num_selected_blocks=8)
    check(Case((200_000, 300), config, group=4, kv_heads=1, dim=64, page_size=256), "cuda")


def test_bits_do_not_depend_on_the_run() -> None:
    case = Case((3000, 100), PAPER, group=16, kv_heads=1, dim=128)
    outs = [DecodeStep(case, "cuda").run() for _ in range(3)]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_entries_have_the_bits_of_the_whole_call() -> None:
    case = Case((2010,), PAPER, queries=8, kv_heads=2, dim=128)
    step = DecodeStep(case, "cuda")
    before = step.pages.k_cmp.clone(), step.pages.v_cmp.clone()
    step.run()
    pooled = block_means(step.k[0][None], step.v[0][None], 32, 16, BF16)
    for was, now, whole in zip(before, step.pages[2:4], pooled, strict=True):
        entry = whole.shape[1] - 1  # the only one that the step completes
        page, slot = divmod(entry + Paging.of_entries(64, 32, 16).lag, 4)
        at = step.pages.block_table[0, page], slot
        assert was[at].isnan().all()
        assert torch.equal(now[at], whole[0, entry])


def make_cache(batch: int, tokens: int, config: NSAConfig = PAPER) -> NSACache:
    return NSACache.empty(config, batch, tokens, heads=32, heads_kv=2, dim=128, dtype=BF16, device="cuda")


def new(batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(batch, tokens, heads, 128, device="cuda", dtype=BF16) for heads in (32, 2, 2))
    return q, k, v


@torch.no_grad()
def test_token_by_token_is_the_whole_call() -> None:
    """Hundreds of steps across bounds of pages and blocks. Steps whose selection is a near tie may differ."""
    torch.manual_seed(0)
    tokens, first = 1500, 1100
    q, k, v = new(1, tokens)
    whole, _ = nsa_forward_aux(q, k, v, config=PAPER)
    cache = make_cache(1, tokens)
    nsa_with_cache(q[:, :first], k[:, :first], v[:, :first], cache, backend="cute")
    steps = [
        nsa_with_cache(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], cache, backend="cute")
        for i in range(first, tokens)
    ]
    error = (torch.cat(steps, 1).float() - whole[:, first:].float()).abs().amax((0, 2, 3))
    largest = whole[:, first:].float().abs().max()
    # Each is rounded once, after branches that the whole call rounds first: 2^-7 of the largest in all
    near_ties = int((error > 2**-7 * largest).sum())
    assert near_ties <= 2, f"{near_ties} of {tokens - first} steps differ"


@torch.no_grad()
def test_token_by_token_in_tile_mode_is_the_call_on_each_prefix() -> None:
    """Single steps over a tile's bound, and the selection of `nsa` with q_sum. Near ties may differ."""
    torch.manual_seed(0)
    config = replace(TILES, q_tile_size=256)
    tokens, first = 1400, 1200
    q, k, v = new(1, tokens)
    cache = make_cache(1, tokens, config)
    for part in (slice(1024), slice(1024, first)):  # a step for each token, whatever the chunk
        nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, backend="cute")
    differ = 0
    for i in range(first, tokens):
        of = slice(i, i + 1)
        out = nsa_with_cache(q[:, of], k[:, of], v[:, of], cache, backend="cute")
        q_sum = q[:, i // 256 * 256 : i].float().sum(1)
        keys = (x[:, : i + 1] for x in (k, v))
        expected = nsa_forward(q[:, of], *keys, q_start=i, q_sum=q_sum, config=config, backend="cute")
        differ += bool((out - expected).abs().max() > 2**-7 * expected.abs().max())
    assert differ <= 2, f"{differ} of {tokens - first} steps differ"


@torch.no_grad()
@pytest.mark.parametrize("config", [PAPER, TILES], ids=["token", "tile"])
def test_graph_over_growing_lengths(config: NSAConfig) -> None:
    """One graph of the step, its table included, against eager calls of a second cache; lengths differ 1000 times."""
    torch.manual_seed(0)
    caches = [make_cache(2, 3000, config) for _ in range(2)]
    prompt, counts = new(2, 2600), torch.tensor([2600, 2], dtype=torch.int32, device="cuda")
    for cache in caches:
        nsa_with_cache(*prompt, cache, counts=counts, backend="cute")
    given = new(2, 1)
    warm = make_cache(2, 3000, config)
    nsa_with_cache(*given, warm, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa_with_cache(*given, caches[0], backend="cute")
    assert caches[0].seqlens.tolist() == [2600, 2], "capturing runs nothing"
    for _ in range(200):
        for to, x in zip(given, new(2, 1), strict=True):
            to.copy_(x)
        graph.replay()
        assert torch.equal(out, nsa_with_cache(*given, caches[1], backend="cute"))
    assert caches[0].seqlens.tolist() == [2800, 202]


@torch.no_grad()
def test_overflow_of_one_sequence() -> None:
    cache = make_cache(2, 128)
    counts = torch.tensor([128, 5], dtype=torch.int32, device="cuda")
    nsa_with_cache(*new(2, 128), cache, counts=counts, backend="cute")
    out = nsa_with_cache(*new(2, 1), cache, backend="cute")
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert cache.seqlens.tolist() == [128, 6]
    with pytest.raises(RuntimeError):
        cache.check()


@torch.no_grad()
def test_two_streams() -> None:
    caches, steps = [make_cache(1, 2100) for _ in range(2)], [new(1, 1) for _ in range(2)]
    prompts = [new(1, 2000) for _ in range(2)]
    for cache, prompt in zip(caches, prompts, strict=True):
        nsa_with_cache(*prompt, cache, backend="cute")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    beside = []
    for stream, cache, given in zip(streams, caches, steps, strict=True):
        with torch.cuda.stream(stream):
            beside.append(nsa_with_cache(*given, cache, backend="cute"))
    torch.cuda.synchronize()
    for cache, given, out in zip(caches, steps, beside, strict=True):
        cache.truncate(2000)
        assert torch.equal(nsa_with_cache(*given, cache, backend="cute"), out)


@torch.no_grad()
def test_pages_beyond_two_billion_elements() -> None:
    """The same sequence in the first and in the last pages of a pool."""
    torch.manual_seed(0)
    tokens, size, width = 1000, 64, 2 * 128
    held = -(-(tokens + 1) // size)
    pages = (1 << 31) // (size * width) + 2 * held
    prompt, given, outs = new(1, tokens), new(1, 1), []
    for first in (0, pages - held):
        table = PageTable(
            torch.arange(first, first + held, dtype=torch.int32, device="cuda")[None],
            torch.zeros(1, dtype=torch.int32, device="cuda"),
            page_size=size,
            num_pages=pages,
        )
        cache = NSACache(PAPER, table, heads_kv=2, dim=128, dtype=BF16)
        nsa_with_cache(*prompt, cache, backend="cute")
        table.seqlens += tokens
        outs.append(nsa_with_cache(*given, cache, backend="cute"))
        del cache
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


def test_a_million_tokens() -> None:
    """1M cached tokens beside 1000."""
    config = replace(PAPER, window_size=64, num_selected_blocks=4)
    check(Case((1 << 20, 1000), config, group=2, kv_heads=1, dim=64), "cuda")
