"""Scores of tokens (token_blocks.py) by mma.sync: the kernel's source, run lane by lane on a CPU (tests/lanes.py)."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import cutlass
import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.best_blocks import Blocks
from cute_kernels.block_lists import Keys
from cute_kernels.documents import DOCUMENT, ENTRY, LENGTH, ROW, TILE, TOKEN
from cute_kernels.token_blocks import LOG2_E, THREADS, TokenScores
from tests import token_blocks_model as model
from tests.lanes import WARP, Cta, Memory, Mma, Shared, plain

SPEC = Blocks(32, 16, 64, 16, init=1, local=2)
SMALL = Blocks(2, 1, 4, 7)
"""A step covers 252 tokens."""
DIM, KV_HEADS, SCALE = 64, 2, 0.125


def token_kernel(dim: int, group: int, spec: Blocks) -> Any:
    kernel = plain(TokenScores)(dim, cutlass.BFloat16, group, spec, Keys(spec.length, spec.stride))
    kernel.blocks, kernel.keys = plain(Blocks)(*astuple(spec)), plain(Keys)(spec.length, spec.stride)
    return kernel


@pytest.mark.parametrize(
    "spec",
    [SPEC, Blocks(64, 64, 64, 40), Blocks(96, 32, 32, 5, init=1), Blocks(48, 16, 80, 9, local=1)],
    ids=lambda spec: str(astuple(spec)),
)
@pytest.mark.parametrize("blocks", [1, 100])
def test_a_step_is_pooled(spec: Blocks, blocks: int) -> None:
    """One token's, to as many blocks as there are, against a sum over entries."""
    kernel = token_kernel(128, 16, spec)
    entries = np.random.default_rng(0).random(kernel.tiling.entries).astype(np.float32)
    columns = -(-len(entries) // kernel.ratio) + len(kernel.weights)
    places = np.full((kernel.ratio, columns), np.nan, np.float32)
    for i, entry in enumerate(entries):
        places[i % kernel.ratio, i // kernel.ratio] = entry
    first_block = blocks // 2
    out = Shared(np.full((blocks,), np.nan, np.float32))
    out.shape = out.values.shape  # type: ignore[attr-defined]
    WARP.run(kernel._pool, Shared(places), out, first_block)
    expected = np.full(blocks, np.nan)
    for block in range(first_block, min(first_block + kernel.per_step, blocks)):
        first = (block - first_block) * kernel.ratio
        expected[block] = np.dot(entries[first : first + len(kernel.weights)].astype(np.float64), kernel.weights)
    np.testing.assert_allclose(out.values, expected, rtol=len(kernel.weights) * 2.0**-24)


def run_cta(kernel: Any, item: int, tensors: list[Memory], tables: list[Memory | None], *numbers: int) -> None:
    """Args: q, k, lse and scores; bounds and tiles; tokens, first token, T."""
    tiling, q, k = kernel.tiling, *tensors[:2]
    layout_q = tiling.rows, DIM, tiling.tokens * kernel.group // tiling.rows
    columns = tiling.entries // kernel.ratio + 2
    layouts = layout_q, (tiling.entries, DIM), (tiling.rows, kernel.ratio, columns)
    token_warps = tiling.rows // 8
    mma = Mma(tiling.math_warps // token_warps, token_warps)
    cta = Cta(THREADS, item, -(-q.shape[1] // tiling.tokens) * q.shape[0] * k.shape[2])
    cta.run(kernel.kernel, *tensors, *tables, SCALE * LOG2_E, *numbers, mma, *layouts)


def normal_tensors(batch: int, group: int, rows: int, entries: int) -> list[np.ndarray[Any, Any]]:
    """q, k and lse."""
    generator = np.random.default_rng(2)
    q, k = (generator.normal(size=(batch, n, h * KV_HEADS, DIM)) for n, h in ((rows, group), (entries, 1)))
    return [q, k, generator.normal(size=(batch, group * KV_HEADS, rows)) + 5]


def check_scores(got: np.ndarray[Any, Any], expected: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> None:
    """Written are the same, and the error is that of fp32 which token_blocks.py gives."""
    largest = SCALE * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    ulps = (DIM / 8 + 4) * largest + 4 * lse.abs().max() + q.shape[2] // KV_HEADS + 8
    np.testing.assert_allclose(got, expected.numpy(), rtol=float(ulps) * 2**-23)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "tokens", "items"), [(3, 600, (0, 3)), (64, 260, (0,))])
def test_the_whole_kernel(group: int, tokens: int, items: tuple[int, ...]) -> None:
    """The last tile, of the last head of the last sequence and of the first: steps, parts, heads, loads, sums."""
    batch, start, rows = 2, 5, tokens - 5
    kernel = token_kernel(DIM, group, SMALL)
    arrays = normal_tensors(batch, group, rows, tokens - 1)
    scores = np.full((batch, KV_HEADS, rows, -(-tokens // SMALL.size)), np.nan, np.float32)
    tensors = [*(Memory(x.astype(np.float32)) for x in arrays), Memory(scores)]
    q, k, lse = map(torch.from_numpy, arrays)
    expected = model.token_scores(q, k, lse, SMALL, SCALE, tokens=64, entries=256, start=start)
    first = (rows - 1) // kernel.tiling.tokens * kernel.tiling.tokens
    for item in items:
        run_cta(kernel, item, tensors, [None, None], tokens, start, 0)
        at = (-1, -1) if item == 0 else (0, 0)
        check_scores(scores[at][first:], expected[at][first:], q, k, lse)
    assert np.isnan(scores[:, :, :first]).all()


@pytest.mark.slow
def test_the_whole_kernel_for_documents() -> None:
    """A long document and what follows it: an empty one, a short one, unused rows. Tiles of 64, entries from 128 on."""
    lengths, tile, used, rows = (300, 0, 60), 64, 6, 8 * 64
    kernel = token_kernel(DIM, 1, SMALL)
    arrays = normal_tensors(1, 1, rows, 512)
    scores = np.full((1, KV_HEADS, rows, rows // SMALL.size), np.nan, np.float32)
    firsts = {TOKEN: (0, 300, 300, 360), TILE: (0, 5, 5, 6), ROW: (0, 320, 320, 384), ENTRY: (0, 384, 384, 512)}
    bounds = np.full((6, 4), -9)
    for name, numbers in {**firsts, LENGTH: (*lengths, 0)}.items():
        bounds[name] = numbers
    tiles = np.full((2, rows // tile), -9)
    tiles[DOCUMENT] = [0] * 5 + [2] + [-1] * 2
    tensors = [*(Memory(x.astype(np.float32)) for x in arrays), Memory(scores)]
    q, k, lse = map(torch.from_numpy, arrays)
    for item in (0, 2 * (8 - used), 2 * (8 - used) + 2):  # unused; the short document's; the long one's last
        run_cta(kernel, item, tensors, [Memory(bounds), Memory(tiles)], -9, 0, tile)
    for row, entry, length, first in ((0, 0, 300, 256), (320, 384, 60, 0)):
        at = slice(row, row + length)
        own = q[:, at], k[:, entry : entry + length - 1], lse[:, :, at]
        expected = model.token_scores(*own, SMALL, SCALE, tokens=64, entries=256)[0, 1, first:]
        got = scores[0, 1, row + first : row + length]
        check_scores(got[:, : expected.shape[1]], expected, *own)
        assert (np.nan_to_num(got[:, expected.shape[1] :]) == 0).all(), "a block behind the document's end"
    assert np.isnan(scores[0, 1, :256]).all()
    assert np.isnan(scores[0, 1, 300:320]).all()
    assert np.isnan(scores[0, 1, 380:]).all()
