"""Lists of best blocks: the source of the device functions, run lane by lane on a CPU (tests/support/lanes.py)."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import cutlass
import numpy as np
import pytest
import torch

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool.documents import DOCUMENT, ENTRY, LENGTH, NUM_BOUNDS, ROW, TILE, TOKEN
from cute_kernels.select.tile import TileTopK
from cute_kernels.select.token import KEY_TILE, LOG2_E, THREADS, TokenTopK
from cute_kernels.select.topk import INIT_END, LOCAL_BEGIN, LOCAL_END, NUM_VISIBLE, Blocks, TopKList
from nsa import NSAConfig, reference
from tests.support import cases
from tests.support import select_token_model as model
from tests.support.lanes import LANES, WARP, Cta, Memory, Mma, Shared, plain
from tests.support.select_cases import expected_list

SPEC = Blocks(32, 16, 64, 16, init=1, local=2)
COUNTS = (1, 16, 33)


def make_topk(spec: Blocks, tile: int = 1) -> Any:
    return plain(TopKList)(plain(Blocks)(*astuple(spec)), plain(Keys)(spec.length, spec.stride), tile)


def new_list(topk: Any, forced: tuple[int, int, int] = (0, 0, 0)) -> tuple[Shared, Shared, Shared]:
    """A row that sees everything, and its new list: scores, blocks, row."""
    row = Shared(np.array([1 << 20, *forced]))
    return *init_list(topk, row), row


def init_list(topk: Any, row: Shared) -> tuple[Shared, Shared]:
    """TopKList.init_list: scores, blocks."""
    scores, index = Shared(np.full(topk.num_slots, np.nan, np.float32)), Shared(np.full(topk.num_slots, -9))
    WARP.run(topk.init_list, scores, index, row)
    return scores, index


def written(topk: Any, index: Shared) -> list[int]:
    """What store_indices writes."""
    out = Shared(np.full(topk.blocks.count, -9))
    WARP.run(topk.store_indices, index, out)
    return [int(block) for block in out.values]


@pytest.mark.parametrize(
    ("count", "order"), cases.product(COUNTS, ["random", "ties", "rising", "falling", "few", "with NaN"])
)
def test_merged_chunks_are_the_best_blocks(count: int, order: str) -> None:
    generator = np.random.default_rng(count)
    chunks = 1 if order == "few" else 4
    scores = generator.random(chunks * LANES).astype(np.float32)
    if order == "ties":
        scores = np.floor(scores * 6)
    elif order == "rising":
        scores.sort()
    elif order == "falling":
        scores = -np.sort(-scores)
    elif order == "few":
        scores[3:] = np.nan  # not candidates
    elif order == "with NaN":
        scores[::7] = np.nan
    topk = make_topk(replace(SPEC, count=count, init=0, local=0))
    sValues, sIndices, _ = new_list(topk)
    threshold = -np.inf
    for first in range(0, len(scores), LANES):
        own = scores[first : first + LANES]
        candidates = sum(1 << lane for lane in range(LANES) if own[lane] > threshold)
        if candidates:
            blocks = list(range(first, first + LANES))
            got = WARP.run(topk.merge, sValues, sIndices, each=(list(own), blocks, [candidates] * LANES))
            assert len(set(got)) == 1
            threshold = got[0]
    assert written(topk, sIndices) == expected_list(scores, set(), count)
    assert bool((sValues.values[1:count] <= sValues.values[: count - 1]).all())


@pytest.mark.parametrize(("tile", "forced"), cases.product([1, 48, 256], [(0, 0), (1, 2), (3, 1), (0, 5)]))
def test_forced_blocks_are_the_reference(tile: int, forced: tuple[int, int]) -> None:
    init, local = forced
    tokens = 700
    spec = replace(SPEC, init=init, local=local)
    topk = make_topk(spec, tile)
    entries = (tokens - spec.length) // spec.stride + 1
    config = NSAConfig(num_init_blocks=init, num_local_blocks=local, q_tile_size=tile)
    blocks = torch.arange(-(-tokens // spec.size))
    for number in {0, 1, 30, 31, 32, 63, 64, 128, 200, 699} if tile == 1 else range(-(-tokens // tile)):
        rows = torch.arange(number * tile, (number + 1) * tile)[None]
        row = Shared(np.full(4, -9))
        threshold = init_row(topk, row, number, tokens, entries)
        expected = reference._forced_blocks(blocks, rows, tokens, config)[0].nonzero().flatten().tolist()
        _, index, _ = new_list(topk, tuple(int(row.values[i]) for i in (INIT_END, LOCAL_BEGIN, LOCAL_END)))
        assert written(topk, index) == [*expected, *[-1] * (spec.count - len(expected))]
        assert threshold == -np.inf
        last = min((number + 1) * tile, tokens) - 1
        assert row.values[NUM_VISIBLE] == max(0, (last - spec.length + 1) // spec.stride + 1)


def init_row(topk: Any, row: Shared, tile: int, tokens: int, entries: int) -> Any:
    """TopKList.init_row, by one lane."""

    def begin(lane: int) -> Any:
        return topk.init_row(row, tile, tokens, entries, False) if lane == 0 else None

    return WARP.run(begin, each=(list(range(LANES)),))[0]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, count=3),
        Blocks(64, 64, 64, 40),
        Blocks(96, 32, 32, 5, init=1),
        Blocks(48, 16, 80, 9, local=1),
        replace(SPEC, count=100, init=0, local=0),  # more than there are: what no one sees stays out
    ],
    ids=lambda spec: str(astuple(spec)),
)
def test_token_scores_are_pooled_and_merged(spec: Blocks) -> None:
    """One token's steps, against tests/support/select_token_model.py in the same precision."""
    kernel = plain(TokenTopK)(128, cutlass.BFloat16, 16, spec, Keys(spec.length, spec.stride))
    kernel.topk, kernel.blocks = make_topk(spec), plain(Blocks)(*astuple(spec))
    token = 300 * spec.stride
    sRow = Shared(np.full(4, -9))
    init_row(kernel.topk, sRow, token, token + 1, 1 << 20)
    limit = int(sRow.values[NUM_VISIBLE])
    sValues, sIndices = init_list(kernel.topk, sRow)
    expected = model.TokenList(spec, token)
    generator = np.random.default_rng(0)
    probabilities = np.zeros(4096, np.float32)
    probabilities[:limit] = generator.random(limit)
    probabilities[:8] += 1  # forced blocks are among the best ones too
    probabilities[limit - 8 : limit] += 1
    steps = -(-(token // spec.size + 1) // kernel.blocks_per_step)
    assert steps > 1 or spec.stride == spec.size or spec.size < 64
    for step in range(steps):
        first = step * kernel.blocks_per_step * kernel.ratio - kernel.entries_before
        entries = np.array([probabilities[first + i] if first + i >= 0 else 0 for i in range(KEY_TILE)], np.float32)
        columns = -(-KEY_TILE // kernel.ratio) + len(kernel.weights)
        sScore = np.full((kernel.ratio, columns), np.nan, np.float32)
        for i in range(KEY_TILE):
            sScore[i % kernel.ratio, i // kernel.ratio] = entries[i]
        first_block = step * kernel.blocks_per_step
        scores = [np.full(kernel.score_chunks, np.nan, np.float32) for _ in range(LANES)]
        WARP.run(kernel.pool, Shared(sScore), each=(scores,))
        WARP.run(lambda rScore: kernel.merge(rScore, sValues, sIndices, sRow, first_block), each=(scores,))  # noqa: B023
        for chunk in range(0, kernel.blocks_per_step, LANES):
            offsets = range(chunk, min(chunk + LANES, kernel.blocks_per_step))
            pooled = torch.zeros(len(offsets))
            for i, weight in enumerate(kernel.weights):
                part = torch.from_numpy(entries[[o * kernel.ratio + i for o in offsets]]).double()
                pooled = (part * np.float32(weight) + pooled.double()).float()
            expected.merge(pooled, first_block + chunk, limit)
    assert written(kernel.topk, sIndices) == expected.selected().tolist()


@pytest.mark.parametrize("spec", [SPEC, Blocks(64, 64, 64, 40), Blocks(20, 7, 64, 9, init=2)], ids=str)
def test_tile_scores_are_pooled_and_merged(spec: Blocks) -> None:
    """A row of select/tile.py, pooled to means; scores without rounding errors."""
    kernel = plain(TileTopK)(64, cutlass.BFloat16, spec, Keys(spec.length, spec.stride), 256)
    kernel.topk, kernel.blocks = make_topk(spec, 256), plain(Blocks)(*astuple(spec))
    tokens, tile = 9000, 30
    sRow = Shared(np.full(4, -9))
    threshold = init_row(kernel.topk, sRow, tile, tokens, 1 << 20)
    limit = int(sRow.values[NUM_VISIBLE])
    sValues, sIndices = init_list(kernel.topk, sRow)
    logits = np.random.default_rng(1).integers(-8, 8, 4096).astype(np.float32)
    blocks = ((tile + 1) * 256 - 1) // spec.size + 1
    for first_block in range(0, blocks, kernel.blocks_per_step):
        first = max(0, -((spec.length - 1 - first_block * spec.size) // spec.stride))
        entries = Shared(logits[first : first + kernel.tile_n])
        (threshold,) = set(WARP.run(kernel.merge, entries, sValues, sIndices, threshold, sRow, first_block))
    scores = np.full(blocks, np.nan, np.float32)
    for block in range(blocks):
        total, weight = 0, 0
        for entry in range(limit):
            begin, end = (
                max(entry * spec.stride, block * spec.size),
                min(entry * spec.stride + spec.length, (block + 1) * spec.size),
            )
            total, weight = total + max(0, end - begin) * int(logits[entry]), weight + max(0, end - begin)
        scores[block] = np.float32(total) / np.float32(weight) if weight else np.nan
    init, low, high = (int(sRow.values[i]) for i in (INIT_END, LOCAL_BEGIN, LOCAL_END))
    forced = {*range(init), *range(low, high)}
    assert written(kernel.topk, sIndices) == expected_list(scores, forced, spec.count)


SMALL = Blocks(2, 1, 4, 7, init=1, local=2)
"""A step covers 252 tokens."""
DIM, KV_HEADS, SCALE = 64, 2, 0.125


def token_kernel(group: int) -> Any:
    kernel = plain(TokenTopK)(DIM, cutlass.BFloat16, group, SMALL, Keys(SMALL.length, SMALL.stride))
    kernel.topk, kernel.blocks = make_topk(SMALL), plain(Blocks)(*astuple(SMALL))
    kernel.keys = plain(Keys)(SMALL.length, SMALL.stride)
    return kernel


def run_cta(
    kernel: Any, cta: int, ctas: int, tensors: list[Memory], tables: list[Memory | None], *scalars: int
) -> None:
    """Args: index of the CTA, number of CTAs; q, k, lse and indices; bounds and tiles; tokens, first token, T."""
    tiling = kernel.tiling
    layout_q = tiling.subtile, DIM, tiling.num_subtiles * kernel.group
    layouts = layout_q, (KEY_TILE, DIM), (tiling.subtile, kernel.ratio, KEY_TILE // kernel.ratio + 2)
    mma = Mma(tiling.entry_warps, tiling.token_warps)
    Cta(THREADS, cta, ctas).run(kernel.kernel, *tensors, *tables, SCALE * LOG2_E, *scalars, mma, *layouts)


def num_work_tiles(kernel: Any, q: Memory, k: Memory) -> int:
    return -(-q.shape[1] // kernel.tiling.tokens) * q.shape[0] * k.shape[2]


def normal_tensors(batch: int, group: int, rows: int, entries: int) -> list[np.ndarray[Any, Any]]:
    """q, k and lse."""
    generator = np.random.default_rng(2)
    q, k = (generator.normal(size=(batch, n, h * KV_HEADS, DIM)) for n, h in ((rows, group), (entries, 1)))
    return [q, k, generator.normal(size=(batch, group * KV_HEADS, rows)) + 5]


@pytest.mark.full  # as PTX, it is interpreted in test_select_token_ptx.py
@pytest.mark.slow
@pytest.mark.parametrize(("group", "tokens", "tiles"), [(3, 600, (0, 3)), (64, 260, (0,))])
def test_the_whole_kernel(group: int, tokens: int, tiles: tuple[int, ...]) -> None:
    """The last tokens, of the last and of the first head and sequence: steps, subtiles, heads, loads, lists."""
    batch, start, rows = 2, 5, tokens - 5
    kernel = token_kernel(group)
    arrays = normal_tensors(batch, group, rows, tokens - 1)
    indices = np.full((batch, KV_HEADS, rows, SMALL.count), -9)
    tensors = [*(Memory(x.astype(np.float32)) for x in arrays), Memory(indices)]
    expected = model.token_topk(*map(torch.from_numpy, arrays), SMALL, SCALE, tokens=64, entries=KEY_TILE, start=start)
    first = (rows - 1) // kernel.tiling.tokens * kernel.tiling.tokens
    for tile in tiles:
        run_cta(kernel, tile, num_work_tiles(kernel, *tensors[:2]), tensors, [None, None], tokens, start, 0)
        at = (-1, -1) if tile == 0 else (0, 0)
        assert indices[at][first:].tolist() == expected[at][first:].tolist()
    assert (indices[:, :, :first] == -9).all()


@pytest.mark.full
@pytest.mark.slow
def test_the_whole_kernel_for_documents() -> None:
    """Four of them, one empty, and unused rows. Tiles of 128 rows, most of whose second halves have no tokens."""
    lengths, tile, rows = (60, 0, 150, 30), 128, 5 * 128
    kernel = token_kernel(1)
    arrays = normal_tensors(1, 1, rows, 512)
    indices = np.full((1, KV_HEADS, rows, SMALL.count), -1)
    firsts = {
        TOKEN: (0, 60, 60, 210, 240),
        TILE: (0, 1, 1, 3, 4),
        ROW: (0, 128, 128, 384, 512),
        ENTRY: (0, 128, 128, 384, 512),
    }
    bounds = np.full((NUM_BOUNDS, 5), -9)
    for name, numbers in {**firsts, LENGTH: (*lengths, 0)}.items():
        bounds[name] = numbers
    tiles = np.full((3, rows // tile), -9)
    tiles[DOCUMENT] = [0, 2, 2, 3, -1]
    tensors = [*(Memory(x.astype(np.float32)) for x in arrays), Memory(indices)]
    tables: list[Memory | None] = [Memory(bounds), Memory(tiles)]
    # The third of ten CTAs: an unused work tile, and one behind a document
    run_cta(kernel, 2, 10, tensors, tables, -9, -9, tile)
    assert (indices == -1).all()
    # The second of four: an unused work tile, the last document, a tile after the long document, its first tokens, and
    # again a tile after a document
    run_cta(kernel, 1, 4, tensors, tables, -9, -9, tile)
    expected = np.full_like(indices, -1)
    q, k, lse = map(torch.from_numpy, arrays)
    for row, entry, length in ((128, 128, 64), (384, 384, 30)):
        at = slice(row, row + length)
        own = q[:, at], k[:, entry : entry + length - 1], lse[:, :, at]
        expected[0, 1, at] = model.token_topk(*own, SMALL, SCALE, tokens=64, entries=KEY_TILE)[0, 1]
    assert indices.tolist() == expected.tolist()
