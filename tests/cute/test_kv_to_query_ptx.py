"""Lists for the backward of queries that continue a sequence (kv_to_query.py), as the compiler's PTX, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import fa4_model as model
from tests.support.interpreted_kernels import interpret_kernels

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROWS, WIDTH = 8, 4


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.lists import kv_to_query

    interpret_kernels(monkeypatch, [kv_to_query])


def assert_same(got: Any, expected: model.Lists) -> None:
    for kind in ("mask", "full"):
        count = getattr(expected, f"{kind}_count")
        assert torch.equal(getattr(got, f"{kind}_count"), count)
        places = torch.arange(max(int(count.max()), 1)) < count[..., None]
        mine, theirs = (getattr(x, f"{kind}_index")[..., : places.shape[-1]] for x in (got, expected))
        assert torch.equal(mine[places[..., : mine.shape[-1]]], theirs[places])


@pytest.mark.parametrize(("first_row", "num_rows"), [(8, 40), (13, 1), (24, 300), (40, 256), (7, 257)])
def test_tiles_that_see_entries(first_row: int, num_rows: int, interpreted: None) -> None:
    """Every word of tiles whole, ragged, and none of a word behind the last tile."""
    from cute_kernels.lists import kv_to_query, query_to_kv

    length, stride = 6, 3
    entries = max(0, (first_row + num_rows - length) // stride + 1)
    sizes: dict[str, Any] = {"width": WIDTH, "rows": ROWS, "num_keys": entries, "num_rows": num_rows}
    sizes["first_row"] = first_row
    keys = query_to_kv.Keys(length, stride)
    got = kv_to_query.transposed_prefix_lists(2, 3, keys, device=torch.device("cpu"), **sizes)
    assert_same(got, model.transposed_prefix_lists(2, 3, model.Keys(length, stride), **sizes))


@pytest.mark.parametrize(("first_row", "num_rows"), [(8, 40), (16, 300), (32, 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_that_chose_tokens(causal: bool, first_row: int, num_rows: int, interpreted: None) -> None:
    from cute_kernels.lists import kv_to_query, query_to_kv

    tokens, size = first_row + num_rows, 2 * WIDTH
    blocks, tiles = -(-tokens // size), -(-num_rows // ROWS)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(2, 2, tiles, blocks, generator=generator).argsort(-1)[..., :3].sort(-1).values.int()
    bits = model.tile_bits(chosen, size=size, num_keys=tokens)
    sizes: dict[str, Any] = {"size": size, "width": WIDTH, "rows": ROWS, "num_keys": tokens, "num_rows": num_rows}
    for listed in (range(-(-tokens // WIDTH)), range(first_row // WIDTH + 2, -(-tokens // WIDTH))):
        skipped = max(0, listed.start * WIDTH - first_row) // ROWS if causal else 0
        where = {**sizes, "blocks": listed, "first_tile": skipped}
        got = kv_to_query.transposed_lists(bits, 4, query_to_kv.Keys(causal=causal), **where, first_row=first_row)
        positions = first_row + torch.arange(num_rows)
        assert_same(got, model.transposed_lists(bits, 4, model.Keys(causal=causal), **where, positions=positions))
