"""The kernel of token.py, as the compiler's PTX, interpreted on a CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.pool import documents
from cute_kernels.pool.documents import DOCUMENT, ENTRY, ROW, TILE, Packed
from cute_kernels.select.token import MMA_THREADS, THREADS
from cute_kernels.select.token_tiling import choose_tiling
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.ptx import Schedule
from tests.support import cases
from tests.support.helpers import make_qkv
from tests.support.interpreted_kernels import interpret_kernels
from tests.support.select_cases import check_chosen, compressed

pytestmark = [pytest.mark.slow, pytest.mark.interpreted, pytest.mark.filterwarnings("default")]

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
