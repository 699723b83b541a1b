"""Decoding with paged keys on a GPU: against fp64, against the whole call, as a graph, in far pages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.decode.pages import Paging
from cute_kernels.pool.compress import block_means
from nsa import NSACache, NSAConfig, PageTable, nsa_forward, nsa_forward_aux, nsa_with_cache
from tests.support import cases
from tests.support.decode_cases import Case, NearTieError, check, selected, without_near_ties
from tests.support.decode_cases import Step as DecodeStep

pytestmark = pytest.mark.cuda

PAPER = NSAConfig.paper()
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dim", "group", "queries", "dtype"),
    cases.product([64, 128], [1, 4, 16], [1, 4], [BF16, torch.float16], cover=2),
    ids=str,
)
def test_step(dim: int, group: int, queries: int, dtype: torch.dtype) -> None:
    """The empty sequence, bounds of blocks and pages, and one 1000 times longer than another."""
    cached = (0, 1, 15, 16, 30, 31, 63, 64, 5000)
    check(without_near_ties(Case(cached, PAPER, queries, group=group, kv_heads=2, dim=dim, dtype=dtype)), "cuda")


TILES = NSAConfig(num_selected_blocks=4, window_size=100)


TILE_MODE = {
    "default": TILES,
    "overlapping, small tiles": replace(
        TILES, q_tile_size=3, compress_block_size=32, compress_stride=16, select_block_size=64
    ),
    "shared": replace(TILES, share_heads_in_group=True, num_local_blocks=1, q_tile_size=5),
}


@pytest.mark.parametrize(
    ("name", "dim", "group", "queries"), cases.product(TILE_MODE, [64, 128], [1, 4, 16], [1, 8], cover=2)
)
def test_step_in_tile_mode(name: str, dim: int, group: int, queries: int) -> None:
    """Steps that begin, cross and end at bounds of tiles, blocks and pages."""
    config = TILE_MODE[name]
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
    """Thousands of steps across bounds of pages and blocks. Steps differ where their selection is a near tie alone."""
    torch.manual_seed(0)
    tokens, first = 4300, 1100
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
    differ = (error > 2**-7 * largest).nonzero().flatten() + first
    assert len(differ) <= (tokens - first) // 200
    entries, _ = block_means(k, v, 32, 16, BF16)
    for i in differ.tolist():
        groups = ((q[0, i, 16 * h : 16 * (h + 1)], entries[0, :, h]) for h in range(2))
        assert any(is_near_tie(PAPER, i, *group) for group in groups), f"step {i}"


@torch.no_grad()
def test_token_by_token_in_tile_mode_is_the_call_on_each_prefix() -> None:
    """Thousands of single steps over tiles' bounds, and the selection of `nsa` with q_sum. Near ties alone differ."""
    torch.manual_seed(0)
    config = replace(TILES, q_tile_size=256)
    tokens, first = 3400, 1200
    q, k, v = new(1, tokens)
    cache = make_cache(1, tokens, config)
    for part in (slice(1024), slice(1024, first)):  # a step for each token, whatever the chunk
        nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, backend="cute")
    differ = []
    for i in range(first, tokens):
        of = slice(i, i + 1)
        out = nsa_with_cache(q[:, of], k[:, of], v[:, of], cache, backend="cute")
        q_sum = q[:, i // 256 * 256 : i].float().sum(1)
        keys = (x[:, : i + 1] for x in (k, v))
        expected = nsa_forward(q[:, of], *keys, q_start=i, q_sum=q_sum, config=config, backend="cute")
        error = (out - expected).abs().amax(-1).flatten()
        differ += [(i, h) for h in (error > 2**-7 * expected.abs().max()).nonzero().flatten().tolist()]
    assert len(differ) <= (tokens - first) * 32 // 200
    entries, _ = block_means(k, v, 64, 64, BF16)
    for i, h in differ:
        mean = q[0, i // 256 * 256 : i + 1, h].double().mean(0, keepdim=True)
        assert is_near_tie(config, i, mean, entries[0, :, h // 16]), f"step {i}, head {h}"


def is_near_tie(config: NSAConfig, token: int, q: torch.Tensor, entries: torch.Tensor) -> bool:
    """Whether rounding may choose other blocks.

    Args: q of heads that select together, in tile mode their means, `[heads,D]`; entries `[n,D]`.
    """
    step = SimpleNamespace(case=SimpleNamespace(config=config))
    try:
        selected(step, 0, token, q, entries)
    except NearTieError:
        return True
    return False


@torch.no_grad()
@pytest.mark.parametrize("config", [PAPER, TILES], ids=["token", "tile"])
def test_beams_truncation_and_growth(config: NSAConfig) -> None:
    """The last step of each beam against one that was given its whole text. Beams share pages, diverge inside one."""
    torch.manual_seed(0)
    q, k, v = new(1, 4000)
    cache, used = make_cache(3, 400, config), 0
    texts: list[list[int]] = [[], [], []]

    def step(count: int) -> torch.Tensor:
        nonlocal used
        places = [[*range(used + count * b, used + count * (b + 1))] for b in range(3)]
        used += 3 * count
        for text, more in zip(texts, places, strict=True):
            text.extend(more)
        at = torch.tensor(places, device="cuda")
        return nsa_with_cache(q[0][at], k[0][at], v[0][at], cache, backend="cute")

    step(333)
    for rows in ([0, 0, 1], [2, 1, 1], [1, 1, 1]):
        cache.reorder(torch.tensor(rows, device="cuda"))
        texts = [[*texts[row]] for row in rows]
        step(1)
        step(3)
    cache.truncate(torch.tensor([343, 341, 345], dtype=torch.int32, device="cuda"))
    texts = [text[:n] for text, n in zip(texts, (343, 341, 345), strict=True)]
    cache.table.grow(700)
    step(60)
    out = step(1)
    cache.check()
    for b, text in enumerate(texts):
        alone, at = make_cache(1, 700, config), torch.tensor(text, device="cuda")
        nsa_with_cache(q[:, at[:-1]], k[:, at[:-1]], v[:, at[:-1]], alone, backend="cute")
        expected = nsa_with_cache(q[:, at[-1:]], k[:, at[-1:]], v[:, at[-1:]], alone, backend="cute")
        if config.token_mode:
            assert torch.equal(out[b], expected[0])
        else:  # sums of a tile's queries were rounded in other steps
            torch.testing.assert_close(out[b], expected[0], rtol=0, atol=2**-7 * float(expected.abs().max()))


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
    """The other one has the bits that it has where both have room; of the full one's pages nothing changes."""
    cache, roomy = make_cache(2, 128), make_cache(2, 256)
    counts, prompt, given = torch.tensor([128, 5], dtype=torch.int32, device="cuda"), new(2, 128), new(2, 1)
    for one in (cache, roomy):
        nsa_with_cache(*prompt, one, counts=counts, backend="cute")
    pages = cache.table.block_table[0].long()
    before = {name: x[pages].clone() for name, x in cache.pages.items()}
    out = nsa_with_cache(*given, cache, backend="cute")
    assert out[0].isnan().all()
    assert torch.equal(out[1], nsa_with_cache(*given, roomy, backend="cute")[1])
    assert cache.seqlens.tolist() == [128, 6]
    for name, x in before.items():
        torch.testing.assert_close(cache.pages[name][pages], x, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError):
        cache.check()


@torch.no_grad()
def test_counts_that_are_none_are_refused_with_debug() -> None:
    cache = make_cache(2, 64)
    counts = torch.tensor([3, 1], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"counts must be from 0 to 2, got \[3, 1\]"):
        nsa_with_cache(*new(2, 2), cache, counts=counts, config=replace(PAPER, debug=True), backend="cute")
    assert cache.seqlens.tolist() == [0, 0]


@torch.no_grad()
def test_two_streams() -> None:
    """Forty steps on each of two streams, begun without a wait, against the same ones in a row."""
    caches, steps = [make_cache(1, 2100) for _ in range(2)], [[new(1, 1) for _ in range(40)] for _ in range(2)]
    prompts = [new(1, 2000) for _ in range(2)]
    for cache, prompt in zip(caches, prompts, strict=True):
        nsa_with_cache(*prompt, cache, backend="cute")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    beside: list[list[torch.Tensor]] = [[], []]
    for stream in streams:  # neither begins before both have work
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
    for given in zip(*steps, strict=True):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                beside[i].append(nsa_with_cache(*given[i], caches[i], backend="cute"))
    torch.cuda.synchronize()
    for i, cache in enumerate(caches):
        cache.truncate(2000)
        for given_then, out in zip(steps[i], beside[i], strict=True):
            assert torch.equal(nsa_with_cache(*given_then, cache, backend="cute"), out)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [4, 64])
def test_gates_of_any_strides(tokens: int) -> None:
    torch.manual_seed(0)
    q, k, v = new(2, tokens)
    gates = torch.rand(2, tokens, 3, q.shape[2], device="cuda").transpose(2, 3)
    outs = []
    for each in (gates, gates.contiguous()):
        cache = NSACache.empty(PAPER, 2, 200, heads_kv=k.shape[2], dim=k.shape[3], dtype=BF16, device="cuda")
        outs.append(nsa_with_cache(q, k, v, cache, gates=each, backend="cute"))
    assert torch.equal(*outs)


@torch.no_grad()
@pytest.mark.parametrize("config", [PAPER, TILES], ids=["token", "tile"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_no_sequences(tokens: int, config: NSAConfig) -> None:
    q, k, v = (x[:0] for x in new(1, tokens))
    cache = NSACache.empty(config, 0, 200, heads=32, heads_kv=2, dim=128, dtype=BF16, device="cuda")
    assert nsa_with_cache(q, k, v, cache, backend="cute").shape == q.shape


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
