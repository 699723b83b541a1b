"""Steps and prompts with paged keys, interpreted on a CPU and on a GPU: against fp64, the whole call, as a graph."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from cute_kernels import decoding
from cute_kernels.decode.combine import MANY_HEADS
from cute_kernels.pool.compress import block_means
from nsa import NSACache, NSAConfig, nsa_forward, nsa_with_cache
from nsa.decoding import reference
from nsa.inputs import NSAInputs
from tests.ptx import Order, Schedule
from tests.support import cases
from tests.support.cute_cases import gate_weight, on_gpu
from tests.support.decode_cases import SMALL_BLOCKS, Case, check, is_near_tie, selected, without_near_ties
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
CUDA = pytest.mark.cuda

PAPER = NSAConfig.paper(num_selected_blocks=4, window_size=100)
TIES = replace(
    SMALL_BLOCKS,
    compress_block_size=192,
    compress_stride=64,
    num_selected_blocks=1,
    num_init_blocks=0,
    num_local_blocks=0,
    window_size=0,
)
"""The first entry covers blocks 0 to 2 alone, the first two blocks 1 and 2."""

PLAIN = replace(SMALL_BLOCKS, compress_block_size=64, compress_stride=64)
TILES = NSAConfig(compress_block_size=32, select_block_size=64, num_selected_blocks=3, window_size=70, q_tile_size=3)

CASES = {
    # The empty sequence, one token, block bounds (l - 1, l), page bounds, and one 1000 times longer than another
    "ragged": Case((0, 1, 6, 7, 63, 64, 1300), kv_heads=1),
    "paper": Case((2100, 30, 31, 640), PAPER, group=16, kv_heads=1, dim=128),
    "four queries": Case((250, 0, 1021), queries=4, group=4, dim=128, gating="projected"),
    "fewer new": Case((100, 1100, 5), queries=4, new=(0, 3, 1), group=1, gating="thirds"),
    "overflow": Case((100, 320, 5), new=(1, 0, 1), overflowed=(1,), group=2),
    "D_v, fp16": Case((700, 90), group=3, dim=128, v_dim=64, dtype=torch.float16),
    "logits in the hundreds": Case((700, 90), group=4, dtype=torch.float16, size=100.0),
    "wide D_v": Case((700, 90), group=3, dim=64, v_dim=128),
    "row groups": Case((520, 60), queries=3, group=64, kv_heads=1),
    "eight queries": Case((1020,), queries=8, group=16, kv_heads=1, dim=128),
    "ties": Case((190, 254, 318, 200, 400), TIES, group=2),
    "forced alone": Case((900, 130), replace(SMALL_BLOCKS, num_selected_blocks=3), group=1),
    "nothing forced": Case((900, 130), replace(SMALL_BLOCKS, num_init_blocks=0, num_local_blocks=0), group=1),
    "no window": Case((400,), replace(SMALL_BLOCKS, window_size=0), group=8),
    "whole window": Case((400, 20), replace(SMALL_BLOCKS, window_size=(1 << 31) - 1), capacity=2000),
    "long entries": Case((1900, 600), replace(SMALL_BLOCKS, compress_block_size=192, compress_stride=64)),
    "plain blocks": Case((1900, 600), PLAIN),
    "l' 192": Case(
        (1500, 191, 192),
        replace(SMALL_BLOCKS, select_block_size=192, compress_block_size=24, compress_stride=12),
        page_size=96,
    ),
    "small pages": Case((1000, 5), page_size=4, kv_heads=1),
    "large pages": Case((1000, 5), page_size=320, capacity=4000),
    # Of eight tokens and four heads nearly all blocks of a tile are chosen by one, the first ones of a tile among them
    "many choices": Case((500, 760), queries=8, group=1, kv_heads=4),
    # 64 entries, a tile, overlap two blocks behind the tile's
    "behind the last tile": Case((4230, 0), replace(TIES, num_selected_blocks=80), group=1, kv_heads=1),
    "parts of the choice": Case((34000, 300), PLAIN, group=1, kv_heads=1),
    "many parts of the choice": Case((325_000, 300), PLAIN, group=4, kv_heads=1),
    "long lists in parts": Case((34000, 300), replace(PLAIN, num_selected_blocks=40), group=1),
    "tuned for batches": Case(
        (2100, 30),
        PAPER,
        group=16,
        kv_heads=1,
        dim=128,
        tuning=decoding.Tuning(score_ctas_per_sm=3, score_tiles=2, part_tiles=3, combine=MANY_HEADS),
    ),
    "many blocks": Case((3000,), replace(SMALL_BLOCKS, num_selected_blocks=40), group=1, kv_heads=1),
}
CASES |= {
    # Selection per head; tokens at bounds of tiles and blocks, and steps that cross them; means below fp16's numbers
    "tile mode": Case(
        (0, 5, 63, 250, 1015, 60),
        TILES,
        queries=4,
        new=(4, 3, 2, 4, 1, 4),
        group=2,
        kv_heads=1,
        dtype=torch.float16,
        size=2**-14,
    ),
    "tile mode, overlapping": Case((510, 0, 45), replace(TILES, compress_stride=16), queries=8, gating="projected"),
    "tile mode, shared": Case((510, 31), replace(TILES, share_heads_in_group=True, num_local_blocks=1), dim=128),
    "tile mode, default": Case((2100, 30), NSAConfig(num_selected_blocks=4), group=16, kv_heads=1, dim=128),
    "tile mode, logits in the hundreds": Case((510, 31), TILES, group=2, dtype=torch.float16, size=100.0),
    "tile mode, row groups": Case((700,), replace(TILES, window_size=0), queries=3, group=12, kv_heads=1),
}
PROMPTS = NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=30)
PREFILL = Case((70, 0), PROMPTS, 40, (40, 9), group=2, kv_heads=1, gating="projected", capacity=300, prefilled=True)
CASES |= {
    # One that begins, one of one token, one without new tokens, one without room; pages in no order
    "prefill": replace(PREFILL, cached=(70, 0, 130, 3, 7), queries=20, new=(20, 17, 1, 0, 0), overflowed=(4,)),
    "prefill, tiles of 96 keys": replace(PREFILL, cached=(150, 20), dim=128, gating="gates"),
    "prefill, no window": replace(PREFILL, config=replace(PROMPTS, window_size=0)),
    "prefill before the first entry": replace(PREFILL, cached=(3, 0), new=(11, 9), queries=20, page_size=16),
}


def last_of_block(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., -1, :]


HERE = [("sm_90", True, case) for case in ("ragged", "many parts of the choice", "tile mode", "prefill")]
"""Each case costs the compilation of four kernels and more."""


@pytest.mark.interpreted
@pytest.mark.parametrize(("arch", "late", "case"), cases.some(HERE, GPUS, (True, False), CASES))
def test_interpreted(arch: str, late: bool, case: str) -> None:
    with interpreted_gpu(arch, Schedule(late=late)):
        check(CASES[case])


ORDERED = ("ragged", "four queries", "row groups", "tile mode", "prefill before the first entry")
RACES = [*itertools.product(GPUS, ORDERED)]


@pytest.mark.interpreted
@pytest.mark.parametrize(("arch", "case"), [RACES[0], *cases.rest(*RACES[1:])])
def test_barriers_put_shared_memory_in_order(arch: str, case: str) -> None:
    with interpreted_gpu(arch, Schedule(observer=Order)):
        check(CASES[case])


@torch.no_grad()
@pytest.mark.interpreted
@pytest.mark.cuda_extra
@pytest.mark.parametrize("entries", ["means", "tile mode", *cases.rest("projected", "by a callable")])
@pytest.mark.parametrize("own", [False, *cases.rest(True)], ids=["one k and v", "own keys"])
@pytest.mark.parametrize("prefill", [False, *cases.rest(True)], ids=["steps", "steps and a prefill"])
def test_steps_of_a_cache_are_the_references(prefill: bool, own: bool, entries: str) -> None:
    """As the dispatcher's row calls it; more new tokens than a launch takes are several, or a prefill."""
    torch.manual_seed(0)
    changed = {"by a callable": replace(SMALL_BLOCKS, compress=last_of_block), "tile mode": TILES}
    config = changed.get(entries, SMALL_BLOCKS)
    weights = {"w_k_compress": torch.randn(1, 64, 64).bfloat16() / 8} if entries == "projected" else {}
    # As "ragged" and "tile mode" above, so that they share kernels
    heads, dtype = (2, torch.float16) if entries == "tile mode" else (4, torch.bfloat16)
    sizes = {"heads": heads, "heads_kv": 1, "dim": 64, "dtype": dtype, "separate_kv": own}
    caches = [NSACache.empty(config, 2, max_tokens=520, **sizes) for _ in range(2)]
    steps = [(300, (300, 70)), (9, (9, 5)), (1, None)]
    if entries == "tile mode":  # several are no other than with means
        steps[1:] = [(4, (4, 0)), (4, None)]
    if prefill:
        steps.insert(-1, (70, (3, 70)))
    for tokens, counts in steps:
        qkv = [torch.randn(2, tokens, n, 64).to(dtype) for n in (heads, 1, 1)]
        gates = torch.rand(2, tokens, 3, heads).transpose(2, 3)  # any strides
        inputs = NSAInputs(*qkv, gates=gates, **weights)
        if own:
            names = ("k_slc", "v_slc", "k_win", "v_win")
            inputs = replace(inputs, **{name: torch.randn(2, tokens, 1, 64).to(dtype) for name in names})
        new = None if counts is None else torch.tensor(counts, dtype=torch.int32)
        outs = []
        for run, cache in zip((reference.nsa_with_cache, decoding.nsa_with_cache), caches, strict=True):
            chosen = reference.nsa_with_cache if tokens == 300 else run
            with interpreted_gpu("sm_90"), cache.table.step(tokens, new) as step:
                outs.append(chosen(inputs, cache.config, cache, step))
                step.done.append(cache)
        # Both are rounded once, of sums in fp32: half a unit each, and probabilities that one of them rounds
        expected, got = (x.float() for x in outs)
        assert (got - expected).abs().max() <= 2**-6 * expected.abs().max()
    if entries == "tile mode":
        kept, wanted = (cache.tile_sums for cache in reversed(caches))
        torch.testing.assert_close(kept, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


# On a GPU


PRESET = NSAConfig.paper()
BF16 = torch.bfloat16


@CUDA
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    check(CASES[case], "cuda")


PER_TILE = NSAConfig(num_selected_blocks=4, window_size=100)
CONFIGS = {
    "token": PRESET,
    "tile": PER_TILE,
    "overlapping, small tiles": replace(
        PER_TILE, q_tile_size=3, compress_block_size=32, compress_stride=16, select_block_size=64
    ),
    "shared": replace(PER_TILE, share_heads_in_group=True, num_local_blocks=1, q_tile_size=5),
}


@CUDA
@pytest.mark.parametrize(
    ("name", "dim", "group", "queries", "dtype"),
    cases.product(CONFIGS, [64, 128], [1, 4, 16], [1, 8], [BF16, torch.float16], cover=2),
    ids=str,
)
def test_sizes(name: str, dim: int, group: int, queries: int, dtype: torch.dtype) -> None:
    """Steps that begin, cross and end at bounds of tiles, blocks and pages; the empty sequence, and a long one."""
    cached = (0, 1, 31, 63, 64, 255, 256, 3000)
    case = Case(cached, CONFIGS[name], queries, group=group, kv_heads=2, dim=dim, dtype=dtype)
    check(without_near_ties(case), "cuda")


def make_cache(batch: int, tokens: int, config: NSAConfig = PRESET) -> NSACache:
    return NSACache.empty(config, batch, tokens, heads=32, heads_kv=2, dim=128, dtype=BF16, device="cuda")


def new(batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(batch, tokens, heads, 128, device="cuda", dtype=BF16) for heads in (32, 2, 2))
    return q, k, v


@CUDA
@torch.no_grad()
@pytest.mark.parametrize("config", [PRESET, replace(PER_TILE, q_tile_size=256)], ids=["token", "tile"])
def test_token_by_token_is_the_call_on_each_prefix(config: NSAConfig) -> None:
    """Thousands of single steps over bounds of tiles, pages and blocks. Where they differ, the selection is a near tie.

    Each is rounded once, after branches that the whole call rounds first: 2^-7 of the largest in all.
    """
    torch.manual_seed(0)
    tokens, first = 3400, 1200
    q, k, v = new(1, tokens)
    cache = make_cache(1, tokens, config)
    for part in (slice(1024), slice(1024, first)):  # a step for each token, whatever the chunk
        nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, backend="cute")
    differ = []
    for i in range(first, tokens):
        of, tile = slice(i, i + 1), slice(i // 256 * 256, i)
        out = nsa_with_cache(q[:, of], k[:, of], v[:, of], cache, backend="cute")
        q_sum = None if config.token_mode else q[:, tile].float().sum(1)
        keys = (x[:, : i + 1] for x in (k, v))
        expected = nsa_forward(q[:, of], *keys, q_start=i, q_sum=q_sum, config=config, backend="cute")
        error = (out - expected).abs().amax(-1).flatten()
        differ += [(i, h) for h in (error > 2**-7 * expected.abs().max()).nonzero().flatten().tolist()]
    assert len(differ) <= (tokens - first) * 32 // 200
    entries, _ = block_means(k, v, config.compress_block_size, config.stride, BF16)
    for i, h in differ:
        group = q[0, i, h // 16 * 16 : h // 16 * 16 + 16]
        mean = q[0, i // 256 * 256 : i + 1, h].double().mean(0, keepdim=True)
        chooses = group if config.token_mode else mean
        assert is_near_tie(partial(selected, config, i, chooses, entries[0, :, h // 16])), f"step {i}, head {h}"


@CUDA
@torch.no_grad()
@pytest.mark.parametrize("config", [PRESET, PER_TILE], ids=["token", "tile"])
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


@CUDA
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


@CUDA
@torch.no_grad()
@pytest.mark.parametrize("config", [PRESET, PER_TILE], ids=["token", "tile"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_no_sequences(tokens: int, config: NSAConfig) -> None:
    q, k, v = (x[:0] for x in new(1, tokens))
    cache = NSACache.empty(config, 0, 200, heads=32, heads_kv=2, dim=128, dtype=BF16, device="cuda")
    assert nsa_with_cache(q, k, v, cache, backend="cute").shape == q.shape


@CUDA
def test_a_million_tokens() -> None:
    """1M cached tokens beside 1000."""
    config = replace(PRESET, window_size=64, num_selected_blocks=4)
    check(Case((1 << 20, 1000), config, group=2, kv_heads=1, dim=64), "cuda")


# A prompt's chunks


@CUDA
@pytest.mark.parametrize("heads", [(16, 1, 64), (8, 2, 128), (64, 4, 128)], ids=str)
@torch.no_grad()
def test_chunks_are_the_whole_call(heads: tuple[int, int, int]) -> None:
    """Bit for bit, chunks of any size, in a cache with more room; and steps after them go on."""
    config, tokens = NSAConfig.paper(), 9000
    q, k, v = on_gpu(tokens, *heads, batch=2)
    gates = {"gate_proj_weight": gate_weight(heads[0], heads[2])}
    expected = nsa_forward(q, k, v, config=config, backend="cute", **gates)
    cache = NSACache.empty(config, 2, max_tokens=20000, heads_kv=heads[1], dim=heads[2], dtype=BF16, device="cuda")
    first = 0
    for count in (4096, 64, 1000, 100, 3731, 9):
        part = slice(first, first + count)
        out = nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, backend="cute", **gates)
        if count >= 64:
            assert torch.equal(out, expected[:, part])
        first += count
    cache.check()


@CUDA
@torch.no_grad()
def test_captured_once() -> None:
    """A graph of a chunk is replayed over growing lengths."""
    config, chunk = NSAConfig.paper(), 256
    q, k, v = on_gpu(8 * chunk)
    expected = nsa_forward(q, k, v, config=config, backend="cute")
    cache = NSACache.empty(config, 1, max_tokens=8 * chunk, heads_kv=2, dim=128, dtype=BF16, device="cuda")
    given = [x[:, :chunk].clone() for x in (q, k, v)]
    nsa_with_cache(*given, cache, backend="cute")  # compiles
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa_with_cache(*given, cache, backend="cute")
    cache.reset()
    for i in range(8):
        part = slice(i * chunk, (i + 1) * chunk)
        for to, x in zip(given, (q, k, v), strict=True):
            to.copy_(x[:, part])
        graph.replay()
        assert torch.equal(out, expected[:, part]), f"chunk {i}"
