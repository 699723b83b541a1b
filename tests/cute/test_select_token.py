"""Selection per token (select/token.py) against the reference: interpreted as the compiler's PTX, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.pool import documents
from cute_kernels.pool.documents import DOCUMENT, ENTRY, ROW, TILE, Packed
from cute_kernels.select.token import MMA_THREADS, THREADS, overlap_weights, token_topk
from cute_kernels.select.token_tiling import choose_tiling
from cute_kernels.select.topk import Blocks
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.ptx import Schedule
from tests.support import cases
from tests.support.helpers import make_qkv
from tests.support.interpreted_kernels import interpret_kernels
from tests.support.select_cases import check_chosen, compressed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SIZES = {
    "paper": (8, 4, 16),
    "plain": (8, 8, 8),
    "two entries a block": (8, 8, 16),
    "l = l'": (8, 4, 8),
    "l > l'": (24, 4, 8),
    "odd ratio": (12, 4, 20),
}
"""l, d and l'."""


def chosen_among_equals(tokens: int, config: NSAConfig) -> Tensor:
    """`[tokens, k]` where q = 0: all probabilities are 1, so the tokens in visible entries count, then the index."""
    chosen = torch.full((tokens, config.num_selected_blocks), -1)
    length, stride, size = config.compress_block_size, config.stride, config.select_size
    for token in range(tokens):
        counts: dict[int, int] = {}
        for entry in range(config.num_compressed(token + 1)):
            for at in range(entry * stride, entry * stride + length):
                counts[at // size] = counts.get(at // size, 0) + 1
        best = sorted(sorted(counts, key=lambda b: (-counts[b], b))[: config.num_selected_blocks])
        chosen[token, : len(best)] = torch.tensor(best)
    return chosen


@pytest.mark.parametrize("name", SIZES)
def test_overlap_weights_are_those_of_every_block(name: str) -> None:
    blocks = Blocks(*SIZES[name], 5)
    for block in (0, 1, 7):
        expected = {}
        for entry in range(200):
            tokens = range(entry * blocks.stride, entry * blocks.stride + blocks.length)
            overlap = sum(block * blocks.size <= t < (block + 1) * blocks.size for t in tokens)
            if overlap:
                expected[entry] = overlap / blocks.length
        first = block * blocks.size // blocks.stride - blocks.length // blocks.stride + 1
        got = {first + i: weight for i, weight in enumerate(overlap_weights(blocks)) if first + i >= 0}
        assert got == pytest.approx(expected)


# Interpreted

CONFIG = NSAConfig.paper(
    compress_block_size=2, compress_stride=1, select_block_size=4, num_selected_blocks=5, window_size=0
)
"""A step covers 252 tokens."""


HOW = ["wgmma, late", "mma.sync, early", "wgmma, early"]


@pytest.fixture
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """token_topk interpreted, by at most `ctas` CTAs. Parameter: what multiplies, and when copies arrive."""
    instruction, _, copies = request.param.partition(", ")
    from cute_kernels.select import token

    late = copies == "late"
    # Select warps go ahead and overwrite as early as they can, or load as late as they can for the MMA warps
    schedule = Schedule(late, slice(MMA_THREADS) if late else slice(MMA_THREADS, THREADS))
    interpret_kernels(monkeypatch, [token, documents], schedule=schedule)
    monkeypatch.setattr(token, "has_warpgroups", lambda _: instruction == "wgmma")

    def by_ctas(*arguments: Any, ctas: int, **keywords: Any) -> Tensor:
        monkeypatch.setattr(token, "multiprocessors", lambda _: ctas)
        return token.token_topk(*arguments, **keywords)

    return by_ctas


class Case(NamedTuple):
    group: int
    dim: int
    tokens: int
    start: int
    batch: int = 1
    kv_heads: int = 1
    ctas: int = 1
    dtype: torch.dtype = torch.bfloat16


CASES = [
    # Work tiles of 64 tokens in 4 subtiles: two steps, then one, with other heads and sequences; many steps
    Case(1, 64, 100, 186, batch=2, kv_heads=2, ctas=3),
    Case(1, 64, 60, 700),
    Case(3, 128, 40, 300, dtype=torch.float16),
    # Of 32 tokens in 2 subtiles, of 16 and of 8 in one: two steps
    Case(16, 128, 40, 280),
    Case(32, 128, 20, 300),
    Case(64, 128, 17, 300),
]
HERE = [(HOW[0], CASES[0]), (HOW[2], CASES[1]), (HOW[1], CASES[2])]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("choose", "case"),
    cases.some(HERE, HOW, CASES),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
    indirect=["choose"],
)
def test_interpreted(choose: Callable[..., Tensor], case: Case) -> None:
    """Few and many steps, subtiles, work tiles and CTAs, one and two key heads, every tiling."""
    group, dim, tokens, start, batch, kv_heads, ctas, dtype = case
    qkv = make_qkv(start + tokens, group * kv_heads, kv_heads, dim, batch=batch, dtype=dtype)
    inputs = NSAInputs(*qkv)
    k_cmp, lse, expected = compressed(inputs, CONFIG)
    rows = slice(start, None)
    got = choose(inputs.q[:, rows], k_cmp, lse[:, :, rows].float(), CONFIG, start=start, ctas=ctas)
    full = torch.cat([expected[:, :, :start].int(), got], 2)
    assert check_chosen(full, expected, inputs, CONFIG, k_cmp, lse) <= 0.05 * got[..., 0].numel()


PACKS = [
    (1, 64, (266, 20, 20), 3),  # work tiles are skipped before others and between them
    (32, 128, (42, 5, 5), 6),  # and behind others; two CTAs have no others
]
"""G, D, lengths, CTAs."""


@pytest.mark.interpreted
@pytest.mark.parametrize(("choose", "pack"), cases.some([(HOW[0], PACKS[0])], HOW, PACKS), indirect=["choose"])
def test_interpreted_documents(choose: Callable[..., Tensor], pack: tuple[int, int, tuple[int, ...], int]) -> None:
    """Each as if it were alone. The second half of its last tile is no token's; nor is the last tile of all.

    Work tiles go backwards, so those of a short document, whose tokens see less, come before those of the long one.
    """
    group, dim, lengths, ctas = pack
    tiling = choose_tiling(dim, group, CONFIG.num_selected_blocks, CONFIG.select_size // CONFIG.stride)
    assert tiling is not None
    tile = 2 * tiling.tokens
    first = torch.tensor([0, *lengths]).cumsum(0).int()
    sizes = {"length": CONFIG.compress_block_size, "stride": CONFIG.stride}
    bounds = documents.bounds_of(Packed(first), tile=tile, step=1, **sizes)
    tiles = torch.full((3, int(bounds[TILE, -1]) + 1), -1, dtype=torch.int32)
    q = torch.empty((1, tiles.shape[1] * tile, group, dim), dtype=torch.bfloat16)
    k_cmp, lse = q.new_empty((1, int(bounds[ENTRY, -1]), 1, dim)), torch.empty((1, group, q.shape[1]))
    alone = []
    for i, n in enumerate(lengths):
        inputs = NSAInputs(*make_qkv(n, group, 1, dim, dtype=torch.bfloat16, seed=i))
        own_k_cmp, own_lse, expected = compressed(inputs, CONFIG)
        tiles[DOCUMENT, bounds[TILE, i] : bounds[TILE, i + 1]] = i
        row, entry = (int(bounds[name, i]) for name in (ROW, ENTRY))
        q[:, row : row + n], lse[:, :, row : row + n] = inputs.q, own_lse
        k_cmp[:, entry : entry + own_k_cmp.shape[1]] = own_k_cmp
        alone.append((slice(row, row + n), expected, inputs, own_k_cmp, own_lse))
    pack_of = SimpleNamespace(bounds=bounds, tiles=tiles, tile=tile)
    got = choose(q, k_cmp, lse, CONFIG, documents=pack_of, ctas=ctas)
    for rows, expected, inputs, own_k_cmp, own_lse in alone:
        different = check_chosen(got[:, :, rows], expected, inputs, CONFIG, own_k_cmp, own_lse)
        assert different <= 0.05 * expected[..., 0].numel()
        got[:, :, rows] = -1
    assert bool((got == -1).all())


# On a GPU

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=16)

GPU_CASES: dict[str, dict[str, Any]] = {
    "48 blocks": {"num_selected_blocks": 48},
    "blocks of one entry, many": {"compress_block_size": 16, "compress_stride": None, "select_block_size": 16},
    "l > l'": {"compress_block_size": 96, "compress_stride": 32, "select_block_size": 32},
    "odd ratio": {"compress_block_size": 48, "compress_stride": 16, "select_block_size": 80},
}
BF16, FP16 = torch.bfloat16, torch.float16


def on_gpu(tokens: int, heads: int = 16, kv_heads: int = 1, dim: int = 128, **keywords: Any) -> NSAInputs:
    return NSAInputs(*make_qkv(tokens, heads, kv_heads, dim, **{"dtype": BF16, "device": "cuda", **keywords}))


def chosen(inputs: NSAInputs, config: NSAConfig, k_cmp: Tensor, lse: Tensor, **keywords: Any) -> Tensor:
    return token_topk(inputs.q, k_cmp, lse.float(), config, **keywords)


def check_kernel(inputs: NSAInputs, config: NSAConfig = PAPER, *, most: float = 0.01) -> None:
    """Args: `most`, share of rows that may have near ties; random scores hardly ever do."""
    k_cmp, lse, expected = compressed(inputs, config)
    got = chosen(inputs, config, k_cmp, lse)
    assert check_chosen(got, expected, inputs, config, k_cmp, lse) <= most * expected[..., 0].numel()


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 3, 17, 48, 64])
@pytest.mark.parametrize("warpgroups", [True, False])
def test_groups(group: int, warpgroups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, with WGMMA, are those of whole calls."""
    if not warpgroups:
        monkeypatch.setattr("cute_kernels.select.token.has_warpgroups", lambda _: False)
    check_kernel(on_gpu(1500, 2 * group, 2, batch=2))
    check_kernel(on_gpu(9000, 2 * group, 2, 64))  # entries of several steps


@pytest.mark.cuda
@pytest.mark.parametrize("name", GPU_CASES)
def test_options(name: str) -> None:
    check_kernel(on_gpu(4500, 8, 2), replace(PAPER, **GPU_CASES[name]))


@pytest.mark.cuda
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_every_order_of_scores(sign: int) -> None:
    """Steps that replace the whole list, and steps that replace nothing; rounded keys tie often."""
    inputs = on_gpu(9000, 4, 1)
    slope = (1 + sign * torch.arange(9000, device="cuda") / 9000)[:, None, None]
    k = (torch.ones_like(inputs.k) * slope).to(BF16)
    check_kernel(replace(inputs, q=inputs.q.abs(), k=k), replace(PAPER, num_init_blocks=0, num_local_blocks=0), most=1)


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 16, 64])
def test_ties_go_to_the_lower_block(group: int) -> None:
    config = replace(PAPER, num_init_blocks=0, num_local_blocks=0)
    inputs = on_gpu(2000, group, 1)
    k_cmp = inputs.k[:, : config.num_compressed(2000)]
    got = token_topk(torch.zeros_like(inputs.q), k_cmp, torch.zeros(1, group, 2000, device="cuda"), config)
    assert torch.equal(got[0, 0].cpu().long(), chosen_among_equals(2000, config))


@pytest.mark.cuda
def test_later_tokens_and_other_pieces_change_no_bit() -> None:
    """Whatever later queries, entries and lse hold, NaN included; nor does another launch, or one of some queries."""
    inputs = on_gpu(5000, 16, 2)
    k_cmp, lse, _ = compressed(inputs, PAPER)
    expected = chosen(inputs, PAPER, k_cmp, lse)
    for at in (0, 30, 31, 32, 1000, 1023, 1024, 4095, 4998):
        later = slice(at + 1, None)
        q, keys, other = inputs.q.clone(), k_cmp.clone(), lse.clone()
        q[:, later] = torch.nan
        keys[:, PAPER.num_compressed(at + 1) :] = torch.nan
        other[:, :, later] = torch.nan
        got = chosen(replace(inputs, q=q), PAPER, keys, other)
        assert torch.equal(got[:, :, : at + 1], expected[:, :, : at + 1]), f"perturbed after {at}"
    for start, stop in ((0, 5000), (0, 1), (1, 700), (700, 701), (704, 5000)):
        piece = replace(inputs, q=inputs.q[:, start:stop])
        got = chosen(piece, PAPER, k_cmp, lse[:, :, start:stop], start=start)
        assert torch.equal(got, expected[:, :, start:stop])
