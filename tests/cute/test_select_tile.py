"""Blocks of a tile (select/tile.py), of one CTA and of several that share its entries, against their definition.

Queries and keys are small integers, so scores have no rounding errors, and many are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.select.tile import MAX_PARTS, tile_topk
from cute_kernels.select.topk import Blocks
from tests.support import cases
from tests.support.compile_keys import noted_keys
from tests.support.interpreted_gpu import GPUS, interpreted_gpu
from tests.support.select_cases import expected_list

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

TILE = 256


class Case(NamedTuple):
    blocks: Blocks
    keys: Keys
    tiles: int
    start: int = 0
    behind: int = 0
    """Tokens behind the last tile's."""
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1

    @property
    def tokens(self) -> int:
        return self.start + self.tiles * TILE + self.behind

    def tensors(self, device: str) -> tuple[Tensor, Tensor]:
        """Mean queries, and keys of entries: far greater from the first on that no tile sees."""
        generator = torch.Generator().manual_seed(0)
        entries = (self.tokens - self.keys.length) // self.keys.stride + 1
        q = torch.randint(-2, 3, (self.batch, self.tiles, self.heads, 64), generator=generator)
        k = torch.randint(-2, 3, (self.batch, entries, self.kv_heads, 64), generator=generator).bfloat16()
        if self.keys.causal:
            k[:, self.visible(self.tiles - 1, entries) :] *= 1000
        return q.float().to(device), k.to(device)

    def visible(self, tile: int, entries: int) -> int:
        """Entries that the last token of a tile sees."""
        last = min(self.start + (tile + 1) * TILE, self.tokens)
        ended = max(0, (last - self.keys.length) // self.keys.stride + 1)
        return min(entries, ended) if self.keys.causal else entries

    def select(self, device: str, parts: int | None) -> Tensor:
        how = {"keys": self.keys, "tile": TILE, "tokens": self.tokens, "start": self.start}
        return tile_topk(*self.tensors(device), self.blocks, parts=parts, **how).cpu()

    def expected(self) -> Tensor:
        q, k = self.tensors("cpu")
        out = torch.empty((self.batch, self.heads, self.tiles, self.blocks.count), dtype=torch.int32)
        for b, head, tile in torch.cartesian_prod(*(torch.arange(n) for n in out.shape[:3])).tolist():
            seen = self.visible(tile, k.shape[1])
            logits = k[b, :seen, head * self.kv_heads // self.heads].double() @ q[b, tile, head].double()
            out[b, head, tile] = torch.tensor(self.of_row(logits, self.start // TILE + tile))
        return out

    def of_row(self, logits: Tensor, tile: int) -> list[int]:
        """Of the logits of the entries that it sees."""
        first, end = self.blocks.stride * torch.arange(len(logits)), self.blocks.length
        size = self.blocks.size
        scores = np.full(int((len(logits) * self.blocks.stride + end) // size) + 1, np.nan)
        for block in range(len(scores)):
            overlap = (torch.minimum(first + end, torch.tensor((block + 1) * size))) - first.clamp(min=block * size)
            overlap = overlap.clamp(min=0).double()
            if overlap.sum() > 0:
                scores[block] = float((overlap * logits).sum() / overlap.sum())
        return expected_list(scores, self.forced(tile, len(logits)), self.blocks.count)

    def forced(self, tile: int, seen: int) -> set[int]:
        if self.blocks.newest:
            before = max(0, (tile * TILE - self.keys.length) // self.keys.stride + 1)
            return {entry // self.blocks.size for entry in range(before, seen)}
        own = (min((tile + 1) * TILE, self.tokens) - 1) // self.blocks.size
        return {*range(min(self.blocks.init, own + 1)), *range(max(0, own - self.blocks.local + 1), own + 1)}


OVERLAPPING = Blocks(32, 16, 64, 5, init=1, local=2)
CASES = {
    "an entry a block": Case(Blocks(64, 64, 64, 16, init=1, local=2), Keys(64, 64), tiles=3, start=20480),
    "overlapping entries": Case(OVERLAPPING, Keys(32, 16), tiles=9, start=4096, behind=77, heads=4, kv_heads=2),
    "from the first token on": Case(OVERLAPPING, Keys(32, 16), tiles=17, batch=2),
    "long lists": Case(Blocks(16, 16, 32, 40, local=3), Keys(16, 16), tiles=2, start=5120),
    "forced blocks alone": Case(Blocks(16, 16, 16, 4, init=2, local=2), Keys(16, 16), tiles=1, start=4096),
    "blocks of entries": Case(Blocks(1, 1, 64, 3, newest=True), Keys(32, 16), tiles=2, start=16384),
    "without causality": Case(replace(OVERLAPPING, local=0), Keys(32, 16, causal=False), tiles=2, behind=9000),
}
HERE = [
    ("sm_90", "an entry a block"),
    ("sm_90", "blocks of entries"),
    ("sm_90", "long lists"),
    ("sm_100", "overlapping entries"),
]
"""Interpreted in every run."""


def test_no_number_of_parts_waits_for_a_kernel_of_its_own() -> None:
    """A longer sequence than the first ones, of the same options, finds its kernels compiled."""
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 3, 2, 64), (1, 999, 1, 64)))
    with noted_keys() as keys:
        for parts in (1, 4):
            tile_topk(q.float(), k, OVERLAPPING, keys=Keys(32, 16), tile=TILE, tokens=16000, start=15232, parts=parts)
            if parts == 1:
                first = set(keys)
    assert len(first) == 2
    assert keys == first


@pytest.mark.parametrize("parts", [None, 3])
def test_no_blocks_take_no_kernel(parts: int | None) -> None:
    q, k = torch.ones(2, 3, 4, 64), torch.ones(2, 999, 2, 64, dtype=torch.bfloat16)
    none = replace(OVERLAPPING, count=0, init=0, local=0)
    with noted_keys() as keys:
        lists = tile_topk(q, k, none, keys=Keys(32, 16), tile=TILE, tokens=16000, start=15232, parts=parts)
    assert (lists.shape, lists.dtype) == ((2, 4, 3, 0), torch.int32)
    assert not keys


@pytest.mark.interpreted
@pytest.mark.parametrize(("arch", "name"), cases.some(HERE, GPUS, CASES))
def test_interpreted(arch: str, name: str) -> None:
    expected = CASES[name].expected()
    with interpreted_gpu(arch):
        for parts in (1, 3, 7, MAX_PARTS):
            assert torch.equal(CASES[name].select("cpu", parts), expected), f"{parts} parts"


def check_means_out_of_fp16s_range(device: str) -> None:
    """Means whose 24 bits fp16 holds in no three terms: below its smallest numbers, and sums of heads above 65504."""
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(64, generator=generator) for _ in range(3)])
    means = (1 + order * 2.0**-20) * torch.tensor([2.0**-14, 1.0, 2.0**22])[:, None]
    k = torch.eye(68, 64)[None, :, None].half()  # an entry a feature, and those of the tile itself
    keys = {"keys": Keys(64, 64), "tile": TILE, "tokens": 4096 + TILE, "start": 4096}
    lists = tile_topk(means[None, None].to(device), k.to(device), Blocks(64, 64, 64, 8), **keys)
    expected = order.topk(8).indices.sort().values
    assert torch.equal(lists[0, :, 0].cpu(), expected.int())


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90", *cases.rest("sm_100")])
def test_means_out_of_fp16s_range(arch: str) -> None:
    with interpreted_gpu(arch):
        check_means_out_of_fp16s_range("cpu")


@pytest.mark.cuda
def test_means_out_of_fp16s_range_on_a_gpu() -> None:
    check_means_out_of_fp16s_range("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    expected = CASES[name].expected()
    for parts in (None, 1, 2, 7, MAX_PARTS):
        assert torch.equal(CASES[name].select("cuda", parts), expected), f"{parts} parts"
