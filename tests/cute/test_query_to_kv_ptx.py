"""The kernels of query_to_kv.py against the definition: as the compiler's PTX, interpreted on a CPU, and on a GPU.

Tiles of few rows and blocks of few keys, so that every length ends and begins somewhere else in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.pool.documents import DOCUMENT, ENTRY, ENTRY_ALIGNMENT, KEY, LENGTH, NUM_BOUNDS, ROW
from tests.support.interpreted_kernels import interpret_kernels

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROWS, WIDTH = 8, 4
UNWRITTEN = torch.iinfo(torch.int32).max
"""What `torch.empty` holds in tests."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from cute_kernels.lists import query_to_kv

    if request.param == "cpu":
        interpret_kernels(monkeypatch, [query_to_kv])
    return str(request.param)


class Sees(NamedTuple):
    """Row i sees key j iff j d + l - 1 <= i, and each key without causality."""

    length: int = 1
    stride: int = 1
    causal: bool = True

    def __call__(self, row: int, key: int) -> bool:
        return not self.causal or key * self.stride + self.length - 1 <= row

    def entries(self, tokens: int) -> int:
        return len([j for j in range(tokens) if j * self.stride + self.length <= tokens])

    @property
    def keys(self) -> Any:
        from cute_kernels.lists.query_to_kv import Keys

        return Keys(*self)


def expected_lists(
    rows: range, keys: range, wanted: Callable[[int], bool], sees: Sees, width: int
) -> tuple[list[int], list[int]]:
    """Masked blocks and full blocks: each holds a wanted key and one that a row sees; full ones hold nothing else."""
    mask, full = [], []
    for block in range(-(-len(keys) // width)):
        members = range(block * width, (block + 1) * width)
        if not any(wanted(j) for j in members if j in keys):
            continue
        seen = [sees(i, j) for i in rows for j in members if j in keys]
        if len(seen) == len(rows) * width and all(seen) and all(map(wanted, members)):
            full.append(block)
        elif any(seen):
            mask.append(block)
    return mask, full


def on_cpu(lists: Any) -> Any:
    return replace(lists, **{name: x.cpu() for name, x in vars(lists).items() if isinstance(x, Tensor)})


def listed(count: Tensor, index: Tensor, place: tuple[int, int, int]) -> list[int]:
    """The list; what lies behind it was not written."""
    n = int(count[place])
    assert bool((index[place][n:] == UNWRITTEN).all())
    numbers: list[int] = index[place][:n].tolist()
    return numbers


def choices(draw: random.Random, blocks: int, count: int) -> list[int]:
    chosen = sorted(draw.sample(range(blocks), draw.randint(0, min(blocks, count))))
    return chosen + [-1] * (count - len(chosen))


def check_chosen(
    sees: Sees, size: int, lengths: Iterator[tuple[int, int, int]], device: str, *, heads: int, select_heads: int
) -> None:
    """Args: `lengths`, of keys, and rows from where to where."""
    from cute_kernels.lists.query_to_kv import chosen_lists

    draw = random.Random(f"{sees} {size}")
    for num_keys, rows_from, rows_to in lengths:
        tiles, blocks, count = -(-(rows_to - rows_from) // ROWS), -(-num_keys // size), draw.randint(1, 5)
        chosen = [[[choices(draw, blocks, count) for _ in range(tiles)] for _ in range(select_heads)] for _ in range(2)]
        indices = torch.tensor(chosen, dtype=torch.int32).view(2, select_heads, tiles, count)
        how: dict[str, Any] = {"num_keys": num_keys, "rows_from": rows_from, "rows_to": rows_to, "entries": False}
        got = on_cpu(chosen_lists(indices.to(device), heads, sees.keys, size=size, width=WIDTH, rows=ROWS, **how))
        for b, h, t in torch.ones(2, heads, tiles).nonzero().tolist():
            of = set(chosen[b][h * select_heads // heads][t])
            first = rows_from + t * ROWS
            rows = range(first, min(first + ROWS, rows_to))
            mask, full = expected_lists(rows, range(num_keys), lambda j, of=of: j // size in of, sees, WIDTH)
            assert listed(got.mask_count, got.mask_index, (b, h, t)) == mask, (num_keys, rows_from, rows_to)
            assert listed(got.full_count, got.full_index, (b, h, t)) == full, (num_keys, rows_from, rows_to)


def of_tokens(most: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """All rows, and some tiles of them."""
    for tokens in range(1, most + 1):
        yield tokens, 0, tokens
    yield (2 * ROWS if causal else most), ROWS, 2 * ROWS
    yield most, 2 * ROWS, most


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [4, 8, 12], ids=lambda size: f"blocks of {size}")
def test_chosen_blocks_of_tokens(size: int, causal: bool, device: str) -> None:
    """Listed blocks that are a chosen one, and parts of one."""
    check_chosen(Sees(causal=causal), size, of_tokens(35, causal), device, heads=4, select_heads=2)


def test_chosen_blocks_of_more_ctas(device: str) -> None:
    """More tiles than a CTA has threads."""
    check_chosen(Sees(), 8, iter([(150, 0, 150), (150, 40, 75)]), device, heads=8, select_heads=8)


@pytest.mark.parametrize("sees", [Sees(5, 3), Sees(4, 4), Sees(9, 2), Sees(5, 3, causal=False)], ids=str)
def test_chosen_blocks_of_entries(sees: Sees, device: str) -> None:
    lengths = [(sees.entries(n), 0, n) for n in range(sees.length, 60)] + [(sees.entries(60), 3 * ROWS, 60)]
    check_chosen(sees, WIDTH, iter(lengths), device, heads=2, select_heads=2)


@pytest.mark.parametrize("sees", [Sees(5, 3), Sees(4, 4), Sees(9, 2), Sees(1, 1)], ids=str)
def test_visible_entries(sees: Sees, device: str) -> None:
    from cute_kernels.lists.query_to_kv import prefix_lists

    for tokens in range(sees.length, 60):
        entries = sees.entries(tokens)
        for rows_from in {0, ROWS, tokens // ROWS * ROWS}:
            if rows_from >= tokens:
                continue
            how = {"num_keys": entries, "rows_from": rows_from, "rows_to": tokens}
            got = on_cpu(prefix_lists(2, 3, sees.keys, width=WIDTH, rows=ROWS, device=torch.device(device), **how))
            for t in range(-(-(tokens - rows_from) // ROWS)):
                rows = range(rows_from + t * ROWS, min(rows_from + (t + 1) * ROWS, tokens))
                mask, full = expected_lists(rows, range(entries), lambda _: True, sees, WIDTH)
                assert listed(got.mask_count, got.mask_index, (1, 2, t)) == mask, how
                assert got.full_index[1, 2, t][: int(got.full_count[1, 2, t])].tolist() == full, how


class Pack(NamedTuple):
    """Documents in tiles of `tile` rows; the last tile is no document's."""

    lengths: tuple[int, ...]
    tile: int
    sees: Sees

    @property
    def documents(self) -> Any:
        bounds = torch.full((NUM_BOUNDS, len(self.lengths) + 1), UNWRITTEN, dtype=torch.int32)
        bounds[LENGTH] = torch.tensor([*self.lengths, 0])
        entries = [-(-self.sees.entries(n) // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT for n in self.lengths]
        bounds[ENTRY] = torch.tensor([0, *entries]).cumsum(0)
        tiles = [-(-n // self.tile) for n in self.lengths]
        bounds[ROW] = bounds[KEY] = torch.tensor([0, *tiles]).cumsum(0) * self.tile
        of_tile = [i for i, n in enumerate(tiles) for _ in range(n)] + [-1]
        table = torch.tensor([of_tile, *[[UNWRITTEN] * len(of_tile)] * 2]).int()
        return SimpleNamespace(bounds=bounds, tiles=table, tile=self.tile)

    def on(self, device: str) -> Any:
        of = self.documents
        return SimpleNamespace(bounds=of.bounds.to(device), tiles=of.tiles.to(device), tile=of.tile)

    def rows(self, place: int, count: int) -> tuple[int, range]:
        """Of `count` aligned rows from `place` on: their document, -1 for none, and which of its tokens they are."""
        documents = self.documents
        document = int(documents.tiles[DOCUMENT, place // self.tile])
        if document < 0:
            return -1, range(0)
        first = place - int(documents.bounds[ROW, document])
        return document, range(first, min(first + count, self.lengths[document]))


LENGTHS = (13, 0, 1, 8, 30, 16, 3)


@pytest.mark.parametrize("size", [4, 8, 12], ids=lambda size: f"blocks of {size}")
def test_chosen_blocks_of_documents(size: int, device: str) -> None:
    from cute_kernels.lists.query_to_kv import chosen_lists

    tile = 3 * ROWS  # a multiple of each size and of WIDTH, as in pool/documents.py
    pack, draw = Pack(LENGTHS, tile, Sees()), random.Random(size)
    documents = pack.documents
    tiles = documents.tiles.shape[1]
    of_tiles = [pack.rows(t * tile, tile) for t in range(tiles)]
    chosen = [choices(draw, -(-pack.lengths[d] // size), 4) if d >= 0 else [-1] * 4 for d, _ in of_tiles]
    indices = torch.tensor(chosen, dtype=torch.int32)[None, None]
    how: dict[str, Any] = {"num_keys": tiles * tile, "rows_from": 0, "rows_to": tiles * tile, "entries": False}
    how["documents"] = pack.on(device)
    got = on_cpu(chosen_lists(indices.to(device), 2, Sees().keys, size=size, width=WIDTH, rows=tile, **how))
    for t, (document, rows) in enumerate(of_tiles):
        base = int(documents.bounds[ROW, document]) if document >= 0 else 0
        keys = range(-(-pack.lengths[document] // tile) * tile) if document >= 0 else range(0)
        lists = expected_lists(rows, keys, lambda j, t=t: j // size in chosen[t], Sees(), WIDTH)
        mask, full = ([base // WIDTH + block for block in blocks] for blocks in lists)
        for h in range(2):
            assert listed(got.mask_count, got.mask_index, (0, h, t)) == mask
            assert listed(got.full_count, got.full_index, (0, h, t)) == full


@pytest.mark.parametrize("sees", [Sees(5, 3), Sees(1, 1)], ids=str)
def test_entries_of_documents(sees: Sees, device: str) -> None:
    """Chosen blocks and all visible ones; both are numbered from where a document's entries begin."""
    from cute_kernels.lists.query_to_kv import chosen_lists, prefix_lists

    tile = 2 * ROWS
    pack, draw = Pack(LENGTHS, tile, sees), random.Random(1)
    documents = pack.documents
    tiles, most = documents.tiles.shape[1], max(map(sees.entries, LENGTHS))
    sizes: dict[str, Any] = {"num_keys": most, "rows_from": 0, "rows_to": tiles * tile, "documents": pack.on(device)}
    every = on_cpu(prefix_lists(1, 2, sees.keys, width=WIDTH, rows=ROWS, device=torch.device(device), **sizes))
    of_tiles = [pack.rows(t * tile, tile) for t in range(tiles)]
    chosen = [choices(draw, -(-sees.entries(LENGTHS[d]) // WIDTH), 4) if d >= 0 else [-1] * 4 for d, _ in of_tiles]
    indices = torch.tensor(chosen, dtype=torch.int32)[None, None]
    how: dict[str, Any] = {"size": WIDTH, "width": WIDTH, "rows": tile, "entries": True, **sizes}
    some = on_cpu(chosen_lists(indices.to(device), 1, sees.keys, **how))

    def expected(place: int, count: int, wanted: Callable[[int], bool]) -> list[list[int]]:
        document, rows = pack.rows(place, count)
        if document < 0 or len(rows) == 0:
            return [[], []]
        before = int(documents.bounds[ENTRY, document]) // WIDTH
        keys = range(-(-sees.entries(LENGTHS[document]) // WIDTH) * WIDTH)
        return [[before + block for block in blocks] for blocks in expected_lists(rows, keys, wanted, sees, WIDTH)]

    for t in range(2 * tiles):
        mask, full = expected(t * ROWS, ROWS, lambda _: True)
        assert listed(every.mask_count, every.mask_index, (0, 1, t)) == mask
        assert listed(every.full_count, every.full_index, (0, 1, t)) == full
    for t in range(tiles):
        mask, full = expected(t * tile, tile, partial(lambda t, j: j // WIDTH in chosen[t], t))
        assert listed(some.mask_count, some.mask_index, (0, 0, t)) == mask
        assert listed(some.full_count, some.full_index, (0, 0, t)) == full
