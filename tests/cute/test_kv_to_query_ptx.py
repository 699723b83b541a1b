"""The kernels of kv_to_query.py, whose lists the backward reads, against the definition: interpreted, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.interpreted_kernels import interpret_kernels

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROWS, WIDTH = 8, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from cute_kernels.lists import kv_to_query

    if request.param == "cpu":
        interpret_kernels(monkeypatch, [kv_to_query])
    return str(request.param)


def assert_lists(
    got: Any,
    wanted: Callable[[int, int, int, int], bool],
    *,
    keys: Any,
    width: int,
    num_keys: int,
    positions: range,
    blocks: range,
    first_tile: int = 0,
) -> None:
    """Ascending tiles with a pair of a wanted key and a row that sees it: `full` if all are, of those that exist.

    Args:
        wanted: whether tile t of batch b and head h chose key j, given (b, h, t, j).
        positions: where rows stand among the tokens of the keys.
        first_tile: is listed as 0.
    """
    numbers = [x.cpu() for x in got.tensors]
    tiles = -(-len(positions) // ROWS)
    assert numbers[0].shape[2] == len(blocks)
    for place in torch.cartesian_prod(*map(torch.arange, numbers[0].shape)).tolist():
        b, h, at = place
        start = blocks[at] * width
        members = range(start, min(start + width, num_keys))
        listed: tuple[list[int], list[int]] = [], []
        for tile in range(tiles):
            chosen = [wanted(b, h, tile, j) for j in members]
            ends = [j * keys.stride + keys.length - 1 if keys.causal else -math.inf for j in members]
            of_tile = positions[tile * ROWS : (tile + 1) * ROWS]
            if any(chosen) and min(ends) <= of_tile[-1]:
                listed[all(chosen) and max(ends) <= of_tile[0]].append(tile - first_tile)
        if got.bits is not None:  # which the attention reads instead
            listed = sorted(listed[0] + listed[1]), []
        for (count, index), expected in zip((numbers[:2], numbers[2:]), listed, strict=True):
            assert index[b, h, at, : int(count[b, h, at])].tolist() == expected, place


@pytest.mark.parametrize(
    ("compression", "rows"),
    cases.product([(6, 3), (4, 4), (9, 2)], [(0, 41), (8, 40), (13, 1), (24, 300), (40, 256), (7, 257)]),
)
def test_tiles_that_see_entries(compression: tuple[int, int], rows: tuple[int, int], device: str) -> None:
    """Every word of tiles whole, ragged, and none of a word behind the last tile."""
    from cute_kernels.lists import kv_to_query, query_to_kv

    (length, stride), (first_row, num_rows) = compression, rows
    entries = max(0, (first_row + num_rows - length) // stride + 1)
    sizes: dict[str, Any] = {"width": WIDTH, "rows": ROWS, "num_keys": entries, "num_rows": num_rows}
    keys = query_to_kv.Keys(length, stride)
    where = {"device": torch.device(device), "first_row": first_row}
    got = kv_to_query.transposed_prefix_lists(2, 3, keys, **sizes, **where)
    where = {"positions": range(first_row, first_row + num_rows), "blocks": range(-(-entries // WIDTH))}
    assert_lists(got, lambda *_: True, keys=keys, width=WIDTH, num_keys=entries, **where)


def chosen_blocks(tiles: int, blocks: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(blocks)
    order = torch.rand(1, 1, tiles, blocks, generator=generator).argsort(-1)[..., :count].sort(-1).values.int()
    return torch.nn.functional.pad(order, [0, count - order.shape[-1]], value=-1)


@pytest.mark.parametrize(
    ("size", "rows", "sees"),
    cases.product(
        [2 * WIDTH, WIDTH, WIDTH // 2], [(0, 43), (16, 300), (32, 256)], [(1, True), (1, False), (5, True)], cover=2
    ),
)
def test_tiles_that_chose_blocks(size: int, rows: tuple[int, int], sees: tuple[int, bool], device: str) -> None:
    """Listed blocks that are a part of a chosen one, one, and several; of tokens and of entries; ranges of blocks."""
    from cute_kernels.lists import kv_to_query, query_to_kv

    (first_row, num_rows), (length, causal) = rows, sees
    keys = query_to_kv.Keys(length, 1 if length == 1 else 3, causal)
    num_keys = (first_row + num_rows - length) // keys.stride + 1
    indices = chosen_blocks(-(-num_rows // ROWS), -(-num_keys // size), 3)
    bits = kv_to_query.tile_bits(indices.to(device), size=size, num_keys=num_keys, entries=length > 1)
    for b, s, block in torch.cartesian_prod(*map(torch.arange, bits.shape[:3])).tolist():
        tiles = [t for t in range(indices.shape[2]) if block in indices[b, s, t]]
        words = bits[b, s, block].tolist()
        assert [t for t in range(32 * len(words)) if words[t // 32] >> t % 32 & 1] == tiles

    def wanted(b: int, h: int, tile: int, key: int) -> bool:
        return key // size in chosen[b][h // 2][tile]

    chosen = indices.tolist()
    sizes: dict[str, Any] = {"size": size, "rows": ROWS, "num_keys": num_keys, "num_rows": num_rows}
    every = -(-num_keys // WIDTH)
    for blocks in (range(every), range(min(first_row // WIDTH + 2, every), every)):
        ends = blocks.start * WIDTH * keys.stride + length - 1
        first_tile = max(0, ends - first_row) // ROWS if causal else 0
        where = {"blocks": blocks, "first_tile": first_tile}
        got = kv_to_query.transposed_lists(bits, 2, keys, width=WIDTH, first_row=first_row, **sizes, **where)
        assert (got.bits is None) == (size % WIDTH == 0)
        positions = range(first_row, first_row + num_rows)
        assert_lists(got, wanted, keys=keys, width=WIDTH, num_keys=num_keys, positions=positions, **where)
