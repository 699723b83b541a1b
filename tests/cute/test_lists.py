"""The kernels of lists, of keys for rows and of rows for keys, against their definitions: interpreted, and on a GPU.

Tiles of few rows and blocks of few keys, so that every length ends and begins somewhere else in them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.lists import kv_to_query, query_to_kv, worklist
from cute_kernels.lists.query_to_kv import Keys, chosen_lists, prefix_lists
from cute_kernels.lists.worklist import build_worklist
from cute_kernels.pool.documents import DOCUMENT, ENTRY, ENTRY_ALIGNMENT, KEY, LENGTH, NUM_BOUNDS, ROW
from tests.support import cases
from tests.support.interpreted_kernels import interpret_kernels
from tests.support.kv_outer_cases import random_indices

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROWS, WIDTH = 8, 4
UNWRITTEN = torch.iinfo(torch.int32).max
"""What `torch.empty` holds in tests."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        interpret_kernels(monkeypatch, [kv_to_query, query_to_kv, worklist])
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
        return Keys(*self)


def status(rows: range, members: range, wanted: Callable[[int], bool], sees: Sees) -> str:
    """Kind of a tile of rows and a block of keys: "full" if all see all, and all are wanted; "mask" if any; else ""."""
    seen = [sees(i, j) for i in rows for j in members]
    if not any(seen) or not any(map(wanted, members)):
        return ""
    return "full" if all(seen) and all(map(wanted, members)) else "mask"


def expected_lists(
    rows: range, keys: range, wanted: Callable[[int], bool], sees: Sees, width: int
) -> tuple[list[int], list[int]]:
    """Masked blocks and full blocks of a tile; a block that is cut off is masked."""
    found: dict[str, list[int]] = {"mask": [], "full": [], "": []}
    for block in range(-(-len(keys) // width)):
        members = range(block * width, min((block + 1) * width, len(keys)))
        of = status(rows, members, wanted, sees)
        found["mask" if of and len(members) < width else of].append(block)
    return found["mask"], found["full"]


def on_cpu(lists: Any) -> Any:
    return replace(lists, **{name: x.cpu() for name, x in vars(lists).items() if isinstance(x, Tensor)})


def listed(count: Tensor, index: Tensor, place: tuple[int, int, int]) -> list[int]:
    """The list; what lies behind it was not written."""
    n = int(count[place])
    assert bool((index[place][n:] == UNWRITTEN).all())
    numbers: list[int] = index[place][:n].tolist()
    return numbers


def both(lists: Any, place: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """Masked and full blocks."""
    return listed(lists.mask_count, lists.mask_index, place), listed(lists.full_count, lists.full_index, place)


def choices(draw: random.Random, blocks: int, count: int) -> list[int]:
    chosen = sorted(draw.sample(range(blocks), draw.randint(0, min(blocks, count))))
    return chosen + [-1] * (count - len(chosen))


def check_chosen(
    sees: Sees, size: int, lengths: Iterator[tuple[int, int, int]], device: str, *, heads: int, select_heads: int
) -> None:
    """Args: `lengths`, of keys, and rows from where to where."""
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
            expected = expected_lists(rows, range(num_keys), lambda j, of=of: j // size in of, sees, WIDTH)
            assert both(got, (b, h, t)) == expected, (num_keys, rows_from, rows_to)


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

    def expected(
        self, place: int, count: int, wanted: Callable[[int], bool], *, entries: bool
    ) -> tuple[list[int], list[int]]:
        """Masked and full blocks of these rows, numbered from where the document's tokens, or its entries, begin."""
        document, rows = self.rows(place, count)
        if len(rows) == 0:
            return [], []
        length = self.lengths[document]
        num_keys, whole, start = (self.sees.entries(length), WIDTH, ENTRY) if entries else (length, self.tile, ROW)
        before, keys = int(self.documents.bounds[start, document]) // WIDTH, range(-(-num_keys // whole) * whole)
        mask, full = expected_lists(rows, keys, wanted, self.sees, WIDTH)
        return [before + block for block in mask], [before + block for block in full]


LENGTHS = (13, 0, 1, 8, 30, 16, 3)


@pytest.mark.parametrize(
    ("sees", "size", "entries"),
    [*((Sees(), size, False) for size in (4, 8, 12)), (Sees(5, 3), WIDTH, True), (Sees(1, 1), WIDTH, True)],
)
def test_chosen_blocks_of_documents(sees: Sees, size: int, entries: bool, device: str) -> None:
    tile = 3 * ROWS  # a multiple of each size and of WIDTH, as in pool/documents.py
    pack, draw = Pack(LENGTHS, tile, sees), random.Random(size)
    num_keys = [sees.entries(n) for n in LENGTHS] if entries else LENGTHS
    of_tiles = pack.documents.tiles[DOCUMENT].tolist()
    rows = len(of_tiles) * tile
    chosen = [choices(draw, -(-num_keys[d] // size), 4) if d >= 0 else [-1] * 4 for d in of_tiles]
    indices = torch.tensor(chosen, dtype=torch.int32, device=device)[None, None]
    how: dict[str, Any] = {"num_keys": max(num_keys) if entries else rows, "rows_from": 0, "rows_to": rows}
    how |= {"size": size, "width": WIDTH, "rows": tile, "entries": entries, "documents": pack.on(device)}
    got = on_cpu(chosen_lists(indices, 2, sees.keys, **how))
    for h, t in itertools.product(range(2), range(len(of_tiles))):
        wanted = pack.expected(t * tile, tile, partial(lambda t, j: j // size in chosen[t], t), entries=entries)
        assert both(got, (0, h, t)) == wanted


@pytest.mark.parametrize("sees", [Sees(5, 3), Sees(1, 1)], ids=str)
def test_visible_entries_of_documents(sees: Sees, device: str) -> None:
    pack = Pack(LENGTHS, 2 * ROWS, sees)
    rows = pack.documents.tiles.shape[1] * pack.tile
    sizes: dict[str, Any] = {"num_keys": max(map(sees.entries, LENGTHS)), "rows_from": 0, "rows_to": rows}
    sizes |= {"width": WIDTH, "rows": ROWS, "documents": pack.on(device)}
    got = on_cpu(prefix_lists(1, 2, sees.keys, device=torch.device(device), **sizes))
    for t in range(rows // ROWS):
        assert both(got, (0, 1, t)) == pack.expected(t * ROWS, ROWS, lambda _: True, entries=True)


# Tiles of rows for each block of keys, which the backward reads


def assert_lists(
    got: Any,
    wanted: Callable[[int, int, int, int], bool],
    *,
    sees: Sees,
    num_keys: int,
    positions: range,
    blocks: range,
    first_tile: int = 0,
) -> None:
    """Ascending tiles of each block of keys, by their status.

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
        members = range(blocks[at] * WIDTH, min((blocks[at] + 1) * WIDTH, num_keys))
        of_tiles = [
            status(positions[t * ROWS : (t + 1) * ROWS], members, partial(wanted, b, h, t), sees) for t in range(tiles)
        ]
        listed = [[t - first_tile for t in range(tiles) if of_tiles[t] == kind] for kind in ("mask", "full")]
        if got.bits is not None:  # which the attention reads instead
            listed = [sorted(listed[0] + listed[1]), []]
        for (count, index), expected in zip((numbers[:2], numbers[2:]), listed, strict=True):
            assert index[b, h, at, : int(count[b, h, at])].tolist() == expected, place


@pytest.mark.parametrize(
    ("compression", "rows"),
    cases.product([(6, 3), (4, 4), (9, 2)], [(0, 41), (8, 40), (13, 1), (24, 300), (40, 256), (7, 257)]),
)
def test_tiles_that_see_entries(compression: tuple[int, int], rows: tuple[int, int], device: str) -> None:
    """Every word of tiles whole, ragged, and none of a word past the last tile."""
    sees, (first_row, num_rows) = Sees(*compression), rows
    entries = sees.entries(first_row + num_rows)
    sizes: dict[str, Any] = {"width": WIDTH, "rows": ROWS, "num_keys": entries, "num_rows": num_rows}
    where = {"device": torch.device(device), "first_row": first_row}
    got = kv_to_query.transposed_prefix_lists(2, 3, sees.keys, **sizes, **where)
    where = {"positions": range(first_row, first_row + num_rows), "blocks": range(-(-entries // WIDTH))}
    assert_lists(got, lambda *_: True, sees=sees, num_keys=entries, **where)


def chosen_blocks(tiles: int, blocks: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(blocks)
    order = torch.rand(1, 1, tiles, blocks, generator=generator).argsort(-1)[..., :count].sort(-1).values.int()
    return torch.nn.functional.pad(order, [0, count - order.shape[-1]], value=-1)


@pytest.mark.parametrize(
    ("size", "rows", "sees"),
    cases.product(
        [2 * WIDTH, WIDTH, WIDTH // 2],
        [(0, 43), (16, 300), (32, 256)],
        [Sees(), Sees(causal=False), Sees(5, 3)],
        cover=2,
    ),
)
def test_tiles_that_chose_blocks(size: int, rows: tuple[int, int], sees: Sees, device: str) -> None:
    """Listed blocks that are a part of a chosen one, one, and several; of tokens and of entries; ranges of blocks."""
    first_row, num_rows = rows
    num_keys = sees.entries(first_row + num_rows)
    indices = chosen_blocks(-(-num_rows // ROWS), -(-num_keys // size), 3)
    bits = kv_to_query.tile_bits(indices.to(device), size=size, num_keys=num_keys, entries=sees.length > 1)
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
        ends = blocks.start * WIDTH * sees.stride + sees.length - 1
        first_tile = max(0, ends - first_row) // ROWS if sees.causal else 0
        where = {"blocks": blocks, "first_tile": first_tile}
        got = kv_to_query.transposed_lists(bits, 2, sees.keys, width=WIDTH, first_row=first_row, **sizes, **where)
        assert (got.bits is None) == (size % WIDTH == 0)
        positions = range(first_row, first_row + num_rows)
        assert_lists(got, wanted, sees=sees, num_keys=num_keys, positions=positions, **where)


# Worklists: query rows of each block of keys, per token


@pytest.mark.parametrize("forced", [(1, 2), *cases.rest(((0, 2),), ((2, 0),))])
def test_forced_blocks_are_left_out(forced: tuple[int, int], device: str) -> None:
    """The worklist holds what is not forced, and all of it."""
    (init, local), blocks = forced, 7
    indices = random_indices((2, 2), [400], blocks, 5, size=64, forced=forced)
    own = torch.arange(400)[:, None] // 64
    rest = indices.where((indices >= init) & (indices <= own - local), -1)
    assert (rest != indices).any()
    assert (rest >= 0).any()
    how: dict[str, Any] = {"size": 64, "blocks": blocks, "min_rows": 20, "init": init, "local": local}
    check_worklist(build_worklist(indices.to(device), **how), rest, 20)


@pytest.mark.parametrize(
    ("tokens", "min_rows"), [(1, 1), (100, 3), (500, 32), *cases.rest((5000, 32), (5000, 1 << 20))]
)
def test_worklist(tokens: int, min_rows: int, device: str) -> None:
    blocks = -(-tokens // 64)
    indices = random_indices((2, 3), [tokens], blocks, 7, size=64)
    check_worklist(build_worklist(indices.to(device), size=64, blocks=blocks, min_rows=min_rows), indices, min_rows)


@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("bitmap_bytes", [1, 500, 1 << 20])
def test_chunks_hold_every_slot_once(bitmap_bytes: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worklists of one head at a time, of some, and of all; and partials of as many."""
    made = []

    def build(indices: Tensor, *, first_token: int, **how: Any) -> Any:
        assert how["blocks"] == -(-(first_token + indices.shape[2]) // 64)
        made.append(indices[..., 0].numel())
        return worklist.Worklist(*[indices] * 5, worklist.WorklistSizes(0, 0, 0, 0), first_token)

    for name, value in {"BITMAP_BYTES": bitmap_bytes, "CHUNK_ALIGNMENT": 64, "build_worklist": build}.items():
        monkeypatch.setattr(worklist, name, value)
    indices, found = torch.arange(2 * 3 * 150).int().view(2, 3, 150, 1), []
    for chunk, batches, heads in worklist.worklist_chunks(
        indices, size=64, min_rows=1, token_bytes=1, max_bytes=max_bytes, first_token=20
    ):
        assert torch.equal(chunk.slot_blocks, indices[batches, heads, chunk.tokens(20)])
        assert chunk.slot_blocks.numel() <= max(64, max_bytes)
        found.append(chunk.slot_blocks.flatten())
    assert torch.equal(torch.cat(found).sort().values, indices.flatten())
    assert max(made) <= max(64, bitmap_bytes)
    assert (len(made) == 1) == (bitmap_bytes > 1000 and max_bytes > 200)


def check_worklist(worklist: Any, indices: Tensor, min_rows: int) -> None:
    """Each block has its query rows, tokens ascending, in adjacent work tiles, those of split blocks first."""
    assert torch.equal(worklist.slot_blocks.cpu(), indices.cpu())
    slots = indices.shape[3]
    for b in range(indices.shape[0]):
        for h in range(indices.shape[1]):
            _, splits, whole = worklist.cum_counts[b, h, :, -1].tolist()
            found: dict[int, list[int]] = {}
            tiles = worklist.work_tiles[b, h, :, : splits + whole].T.tolist()
            for i, (block, first, count) in enumerate(tiles):
                found.setdefault(block, []).extend(worklist.query_rows[b, h, first : first + count].tolist())
                assert count < 2 * min_rows
                assert count >= min_rows or i >= splits
            assert sorted(found) == list(range(worklist.counts.shape[3]))
            for block, query_rows in found.items():
                chosen = (indices[b, h].cpu() == block).flatten().nonzero().flatten().tolist()
                assert query_rows == chosen
                tokens = [slot_idx // slots for slot_idx in query_rows]
                assert tokens == sorted(set(tokens))
