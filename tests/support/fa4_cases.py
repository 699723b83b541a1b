"""What the tests of FA4's block lists share: sizes, random selections, and lists on their way to and from the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.fa4 import rules as fa4
from tests.support.fa4_model import Lists
from tests.support.hardware import FA4
from tests.support.helpers import make_qkv
from tests.support.interpreted_gpu import interpreted_gpu

RULES = {"sm_90": fa4.RULES[9], "sm_100": fa4.RULES[10]}
ARCHS = pytest.mark.parametrize("arch", RULES)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
NOISY = pytest.mark.filterwarnings("default")
"""FA4 and CuTe DSL warn while they are imported and while they compile."""
TOKENS = [1, 63, 64, 65, 127, 128, 255, 256, 257, 300, 513, 1000]
TILES = [128, 256, 512]
COMPRESSIONS = [(32, 16), (64, 64), (20, 7), (128, 128), (4, 1), (16, 16), (8, 2)]


def executed_masked(mask: str, *others: str) -> pytest.MarkDecorator:
    """FA4 itself runs, on a GPU or interpreted (`gpu`): parameters `arch`, and `masked`, the name of a mask.

    A mask has a kernel of its own, which takes ten seconds to compile: others are interpreted in `make test-full`.
    """
    on_gpu = [pytest.param("sm_90", name, marks=[pytest.mark.cuda, FA4]) for name in (mask, *others)]
    here = pytest.param("sm_100", mask, marks=pytest.mark.slow)
    rest = [pytest.param("sm_100", name, marks=[pytest.mark.slow, pytest.mark.full]) for name in others]
    return pytest.mark.parametrize(("arch", "masked"), [*on_gpu, here, *rest])


def random_blocks(shape: tuple[int, ...], blocks: int, count: int, seed: int) -> Tensor:
    """Up to `count` of the first `blocks` blocks for each tile, ascending, padded with -1; int32 `[*shape, count]`.

    `shape` ends with the number of tiles. Half of the tiles hold the block at the same fraction of the keys as theirs
    of the rows, which lies on the diagonal or next to it.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((*shape, blocks), generator=generator)
    tiles = torch.arange(shape[-1])
    diagonal = (tiles * blocks // shape[-1])[:, None] == torch.arange(blocks)
    scores = scores + diagonal * torch.randint(0, 2, (*shape, 1), generator=generator)
    order = torch.argsort(scores, dim=-1, descending=True)[..., :count]
    kept = torch.randint(0, count + 1, (*shape, 1), generator=generator)
    order = torch.where(torch.arange(order.shape[-1]) < kept, order, blocks).sort(-1).values
    order = torch.nn.functional.pad(order, [0, count - order.shape[-1]], value=blocks)
    return torch.where(order < blocks, order, -1).int()


def chunk(tokens: int, tile: int, first: int, last: int) -> tuple[int, int]:
    """Rows from one tile to behind a later one, as queries are processed in chunks of tiles."""
    tiles = -(-tokens // tile)
    start = first % tiles
    stop = start + 1 + last % (tiles - start)
    return start * tile, min(stop * tile, tokens)


@contextmanager
def gpu(arch: str) -> Iterator[str]:
    """The device on which FA4's kernels for an architecture run: a Hopper GPU, or an interpreter of Blackwell's."""
    if arch == "sm_90":
        yield "cuda"
        return
    with interpreted_gpu(arch):
        yield "cpu"


def on_device(lists: Lists, device: str = "cuda") -> Any:
    """The BlockLists that FA4 is given."""
    from cute_kernels.lists.query_to_kv import BlockLists

    values: dict[str, Any] = vars(lists)
    return BlockLists(
        **{
            name: value.to(device).clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
    )


def low_precision_qkv(
    tokens: int, dim: int, *, heads: int = 4, kv_heads: int = 2, batch: int = 2, device: str = "cuda"
) -> list[Tensor]:
    """Quantised q, k, v."""
    return [x.bfloat16().to(device) for x in make_qkv(tokens, heads, kv_heads, dim, batch=batch, seed=tokens)]


def assert_same_lists(got: Any, twin: Lists) -> None:
    lists = Lists.of(got)
    assert (lists.rows, lists.width) == (twin.rows, twin.width)
    for kind in ("mask", "full"):
        count, expected = getattr(lists, f"{kind}_count"), getattr(twin, f"{kind}_count")
        assert count.dtype == torch.int32
        assert torch.equal(count, expected), kind
        for place in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
            assert lists.listed(kind, *place) == twin.listed(kind, *place), (kind, place)
    assert (lists.bits is None) == (twin.bits is None)
    if lists.bits is not None and twin.bits is not None:
        assert lists.bit_keys == twin.bit_keys
        assert torch.equal(lists.bits, twin.bits)


def chunks_of(tokens: int, tile: int) -> Iterator[tuple[int, int]]:
    """All rows, and some that start later or stop earlier."""
    yield 0, tokens
    if tokens > tile:
        yield tile, tokens
        yield 0, tile
