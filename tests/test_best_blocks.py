"""Lists of best blocks: the source of the device functions, run lane by lane on a CPU (tests/lanes.py)."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import cutlass
import numpy as np
import pytest
import torch

from cute_kernels.best_blocks import HIGH, INIT, LIMIT, LOW, BestBlocks, Blocks
from cute_kernels.block_lists import Keys
from cute_kernels.score import TopBlocks
from nsa import NSAConfig, reference
from tests.lanes import LANES, WARP, Shared, plain

SPEC = Blocks(32, 16, 64, 16, init=1, local=2)
COUNTS = (1, 16, 33)


def best_blocks(spec: Blocks, tile: int = 1) -> Any:
    return plain(BestBlocks)(plain(Blocks)(*astuple(spec)), plain(Keys)(spec.length, spec.stride), tile)


def lists(best: Any, forced: tuple[int, int, int] = (0, 0, 0)) -> tuple[Shared, Shared, Shared]:
    """A row that sees everything, and its new list: scores, blocks, row."""
    row = Shared(np.array([1 << 20, *forced]))
    scores, index = Shared(np.full(best.places, np.nan, np.float32)), Shared(np.full(best.places, -9))
    WARP.run(best.begin_list, scores, index, row)
    return scores, index, row


def written(best: Any, index: Shared) -> list[int]:
    """What write_list makes of it."""
    out = Shared(np.full(best.blocks.count, -9))
    WARP.run(best.write_list, index, out)
    return [int(block) for block in out.values]


def expected_list(scores: np.ndarray[Any, Any], forced: set[int], count: int) -> list[int]:
    free = [block for block in range(len(scores)) if block not in forced and not math.isnan(scores[block])]
    chosen = sorted(forced | set(sorted(free, key=lambda b: (-scores[b], b))[: count - len(forced)]))
    return chosen + [-1] * (count - len(chosen))


@pytest.mark.parametrize("order", ["random", "ties", "rising", "falling", "few", "with NaN"])
@pytest.mark.parametrize("count", COUNTS)
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
        scores[3:] = np.nan  # no lane's
    elif order == "with NaN":
        scores[::7] = np.nan
    best = best_blocks(replace(SPEC, count=count, init=0, local=0))
    sBest, sIndex, _ = lists(best)
    threshold = -np.inf
    for first in range(0, len(scores), LANES):
        own = scores[first : first + LANES]
        candidates = sum(1 << lane for lane in range(LANES) if own[lane] > threshold)
        if candidates:
            blocks = list(range(first, first + LANES))
            got = WARP.run(best.merge, sBest, sIndex, each=(list(own), blocks, [candidates] * LANES))
            assert len(set(got)) == 1
            threshold = got[0]
    assert written(best, sIndex) == expected_list(scores, set(), count)
    assert bool((sBest.values[1:count] <= sBest.values[: count - 1]).all())


@pytest.mark.parametrize(("init", "local"), [(0, 0), (1, 2), (3, 1), (0, 5)])
@pytest.mark.parametrize("tile", [1, 48, 256])
def test_forced_blocks_are_the_reference(init: int, local: int, tile: int) -> None:
    tokens = 700
    spec = replace(SPEC, init=init, local=local)
    best = best_blocks(spec, tile)
    entries = (tokens - spec.length) // spec.stride + 1
    config = NSAConfig(num_init_blocks=init, num_local_blocks=local, q_tile_size=tile)
    blocks = torch.arange(-(-tokens // spec.size))
    for number in {0, 1, 30, 31, 32, 63, 64, 128, 200, 699} if tile == 1 else range(-(-tokens // tile)):
        rows = torch.arange(number * tile, (number + 1) * tile)[None]
        row = Shared(np.full(4, -9))
        threshold = best_row(best, row, number, tokens, entries)
        expected = reference._forced_blocks(blocks, rows, tokens, config)[0].nonzero().flatten().tolist()
        _, index, _ = lists(best, tuple(int(row.values[i]) for i in (INIT, LOW, HIGH)))
        assert written(best, index) == [*expected, *[-1] * (spec.count - len(expected))]
        assert threshold == -np.inf
        last = min((number + 1) * tile, tokens) - 1
        assert row.values[LIMIT] == max(0, (last - spec.length + 1) // spec.stride + 1)


def best_row(best: Any, row: Shared, tile: int, tokens: int, entries: int) -> Any:
    """begin_row, by one lane."""

    def begin(lane: int) -> Any:
        return best.begin_row(row, tile, tokens, entries, False) if lane == 0 else None

    return WARP.run(begin, each=(list(range(LANES)),))[0]


@pytest.mark.parametrize("spec", [SPEC, Blocks(64, 64, 64, 40), Blocks(20, 7, 64, 9, init=2)], ids=str)
def test_tile_scores_are_pooled_and_merged(spec: Blocks) -> None:
    """A row of score.py, with means in place of importances; scores that round nowhere."""
    kernel = plain(TopBlocks)(64, cutlass.BFloat16, spec, Keys(spec.length, spec.stride), 256)
    kernel.best, kernel.blocks = best_blocks(spec, 256), plain(Blocks)(*astuple(spec))
    tokens, tile = 9000, 30
    sRow = Shared(np.full(4, -9))
    threshold = best_row(kernel.best, sRow, tile, tokens, 1 << 20)
    limit = int(sRow.values[LIMIT])
    sBest, sIndex = Shared(np.zeros(kernel.best.places, np.float32)), Shared(np.zeros(kernel.best.places, int))
    WARP.run(kernel.best.begin_list, sBest, sIndex, sRow)
    logits = np.random.default_rng(1).integers(-8, 8, 4096).astype(np.float32)
    blocks = ((tile + 1) * 256 - 1) // spec.size + 1
    for first_block in range(0, blocks, kernel.per_step):
        first = max(0, -((spec.length - 1 - first_block * spec.size) // spec.stride))
        entries = Shared(logits[first : first + kernel.entries])
        (threshold,) = set(WARP.run(kernel._insert, entries, sBest, sIndex, threshold, sRow, first_block))
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
    init, low, high = (int(sRow.values[i]) for i in (INIT, LOW, HIGH))
    forced = {*range(init), *range(low, high)}
    assert written(kernel.best, sIndex) == expected_list(scores, forced, spec.count)
