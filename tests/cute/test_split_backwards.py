"""The split backwards of branches in tile mode (attend/*_backward.py), alone, against fp64; sums of their partials.

Interpreted, and on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.attention_gradients import Branch, check_gradients, gated_branch
from tests.support.hardware import ATOMIC_FREE
from tests.support.interpreted_gpu import interpreted
from tests.support.interpreted_kernels import interpret
from tests.support.kv_outer_cases import blocks_of_tiles

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

BF16, FP16 = torch.bfloat16, torch.float16
LATE, EARLY = "late, races", "early, races"


@dataclass(frozen=True)
class Given:
    """Arguments of a backward, and its call."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    branches: list[Branch]
    """Their lse are shifted as by the logarithms of gates; delta are those without."""
    backward: Callable[[Given], Sequence[Tensor]]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.do, self.branches[0].lse, self.branches[0].delta

    def nan_like(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.full_like(self.q, math.nan), torch.full_like(self.k, math.nan), torch.full_like(self.v, math.nan)

    def run(self) -> Sequence[Tensor]:
        """dq, dk, dv, in memory that held NaN."""
        return self.backward(self)

    def check(self) -> Sequence[Tensor]:
        got = self.run()
        check_gradients(got, self.q, self.k, self.v, self.do, self.branches, self.scale)
        return got


def normal(
    rows: int,
    keys: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    device: str = "cuda",
) -> tuple[list[Tensor], torch.Generator]:
    """q, k, v, do, and the generator that drew them."""
    generator = torch.Generator(device).manual_seed(1)
    shapes = (rows, heads), (keys, kv_heads), (keys, kv_heads), (rows, heads)
    drawn = (torch.randn(batch, *shape, dim, generator=generator, device=device) for shape in shapes)
    return [x.to(dtype) for x in drawn], generator


def groups(*sizes: int, rows: int, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """G of these sizes, with all D and dtypes."""
    return [
        (rows, {"heads": max(group, 2), "kv_heads": max(group, 2) // group, "dim": dim, "dtype": dtype, **options})
        for group, dim, dtype in itertools.product(sizes, (64, 128), (BF16, FP16))
    ]


# Compressed


def compressed(rows: int, *, length: int = 32, stride: int = 16, first_token: int = 0, **sizes: Any) -> Given:
    def run(given: Given) -> list[Tensor]:
        from cute_kernels.attend.compressed_backward import compressed_backward

        dq, *_ = given.nan_like()
        how: dict[str, Any] = {"length": length, "stride": stride, "first_token": first_token, "scale": given.scale}
        got = [dq, *compressed_backward(*given.tensors, dq=dq, **how)]
        assert [x.dtype for x in got] == [given.q.dtype, torch.float32, torch.float32]
        assert not dq.transpose(1, 2)[~given.branches[0].lse.isfinite()].any()
        return got

    entries = (first_token + rows - length) // stride + 1
    tensors, generator = normal(rows, entries, **sizes)
    token = first_token + torch.arange(rows, device=generator.device)[:, None]
    visible = torch.arange(entries, device=generator.device) * stride + length - 1 <= token
    return Given(*tensors, [gated_branch(*tensors, visible, generator)], run)


COMPRESSED: dict[str, tuple[int, dict[str, Any]]] = {
    "one entry": (70, {"length": 64, "stride": 64, "heads": 1, "kv_heads": 1}),
    "overlapping, D 64": (150, {"length": 32, "stride": 16, "dim": 64, "kv_heads": 1}),
    "two tiles of entries": (331, {"length": 4, "stride": 2, "dim": 64, "heads": 2, "kv_heads": 1}),
    "no phases, batch": (100, {"length": 7, "stride": 5, "dim": 64, "heads": 2, "batch": 2}),
    "last rows": (70, {"length": 32, "stride": 16, "dim": 64, "heads": 2, "first_token": 333}),
    "one row": (1, {"length": 8, "stride": 8, "heads": 8, "kv_heads": 1, "first_token": 1030}),
}
COMPRESSED_ON_GPU: list[tuple[int, dict[str, Any]]] = [
    *((rows, {}) for rows in (32, 63, 64, 65, 127, 129, 1000, 2063, 5000)),
    *(
        (2100, {"length": length, "stride": stride})
        for length, stride in ((1, 1), (4, 4), (32, 32), (64, 64), (64, 16), (48, 20))
    ),
    *(
        (rows, {"first_token": first, "batch": 2})
        for rows, first in ((1, 31), (1, 4000), (70, 333), (1000, 1), (2000, 2048))
    ),
    *groups(1, 4, 8, 16, rows=1500, batch=2),
]


@pytest.mark.interpreted
@interpreted([*cases.product(["late"], COMPRESSED), ("early", "two tiles of entries")], "case")
def test_compressed_interpreted(case: str) -> None:
    rows, options = COMPRESSED[case]
    compressed(rows, device="cpu", **options).check()


@pytest.mark.interpreted
@interpreted([LATE])
def test_barriers_put_shared_memory_in_order() -> None:
    """The first entries have five tiles of rows in two splits, of four heads, so stages are used again; the last ones
    have one tile, so none in the second split.
    """
    from cute_kernels.attend.compressed_backward import num_splits

    given = compressed(300, kv_heads=1, dim=64, length=4, stride=2, device="cpu")
    assert num_splits(1, 300, given.k.shape[1], 1, 4) == 2
    given.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_row_statistics(arch: str) -> None:
    """Inputs of FlashAttention-4's backward where its preprocess does not run, of phases: rows are far apart."""
    from cute_kernels.attend import row_statistics

    batch, heads, rows, padded = 2, 3, 300, 384
    lse, delta = torch.randn((2, batch, heads, rows, 16))[..., 5].unbind(0)
    lse[0, 1, 7], lse[1, 2, 299] = -math.inf, math.inf
    delta[~lse.isfinite()] = math.nan
    results = torch.full((2, batch, heads, padded), math.nan)
    interpret(row_statistics.RowStatistics.compile, arch=arch)(lse[..., None], delta[..., None], *results)
    log2_lse, out = results
    expected = torch.where(lse == -math.inf, 0.0, lse * math.log2(math.e))
    assert torch.allclose(log2_lse[..., :rows], expected, rtol=2**-23)
    assert torch.equal(out[..., :rows], torch.where(lse.isfinite(), delta, 0.0))
    assert (log2_lse[..., rows:] == math.inf).all()
    assert not out[..., rows:].any()


@pytest.mark.interpreted
@interpreted(["late"])
def test_causality() -> None:
    """Entries do not move a bit of dq of rows that do not see them, nor do rows of dk and dv of unseen entries."""
    length, stride, entry, later = 4, 2, 101, slice(101, None)
    given = compressed(331, heads=2, kv_heads=1, dim=64, length=length, stride=stride, device="cpu")
    dq, dk, dv = given.run()
    row = entry * stride + length - 1  # the first one that sees it
    other = replace(given, k=given.k.clone(), v=given.v.clone())
    other.k[:, later], other.v[:, later] = other.v[:, later], other.k[:, later].clone()
    got = other.run()
    assert torch.equal(got[0][:, :row], dq[:, :row])
    assert not torch.equal(got[0][:, row], dq[:, row])
    other = replace(given, q=given.q.clone(), do=given.do.clone())
    other.q[:, :row], other.do[:, :row] = other.do[:, :row], other.q[:, :row].clone()
    for x, y in zip(other.run()[1:], (dk, dv), strict=True):
        assert torch.equal(x[:, later], y[:, later])
        assert not torch.equal(x[:, entry - 1], y[:, entry - 1])


# Selected


def selected(
    rows: int,
    *,
    keys: int | None = None,
    count: int = 4,
    tile: int = 256,
    size: int = 64,
    causal: bool = True,
    shared: bool = False,
    indices: Tensor | None = None,
    length: int = 1,
    stride: int = 1,
    **sizes: Any,
) -> Given:
    """Args: length, stride: tokens of a key, 1 or l of compressed entries, and from one key to the next."""
    num_keys = max(0, rows - length) // stride + 1 if keys is None else keys
    tensors, generator = normal(rows, num_keys, **sizes)
    (batch, _, heads, _), kv_heads, device = tensors[0].shape, tensors[1].shape[2], generator.device
    tiles, blocks = -(-rows // tile), -(-num_keys // size)
    if indices is None:
        drawn: dict[str, Any] = {"tile": tile, "size": size, "causal": causal, "length": length, "stride": stride}
        indices = blocks_of_tiles((batch, kv_heads if shared else heads), tiles, blocks, count, **drawn)
    chosen = indices.to(device)
    of_tiles = torch.zeros((*chosen.shape[:3], blocks + 1), dtype=torch.bool, device=device)
    of_tiles.scatter_(3, chosen.long().where(chosen >= 0, blocks), True)
    visible = of_tiles[..., :blocks].repeat_interleave(heads // chosen.shape[1], 1)
    visible = visible.repeat_interleave(tile, 2)[:, :, :rows].repeat_interleave(size, 3)[..., :num_keys]
    if causal:
        last = torch.arange(num_keys, device=device) * stride + length - 1
        visible &= last <= torch.arange(rows, device=device)[:, None]

    def run(given: Given) -> Sequence[Tensor]:
        from cute_kernels.attend.selected_backward import selected_backward
        from cute_kernels.lists.kv_to_query import tile_bits
        from cute_kernels.lists.query_to_kv import Keys, chosen_lists
        from cute_kernels.mma.wgmma import TILE

        of_keys: dict[str, Any] = {"size": size, "num_keys": num_keys, "entries": length > 1}
        of_rows = {"width": TILE, "rows": tile, "rows_from": 0, "rows_to": rows}
        lists = chosen_lists(chosen, heads, Keys(length, stride, causal), **of_rows, **of_keys)
        how = {"size": size, "keys": Keys(length, stride, causal), "scale": given.scale, "into": given.nan_like()}
        selected_backward(*given.tensors, lists, tile_bits(chosen, **of_keys), **how)
        return how["into"]

    return Given(*tensors, [gated_branch(*tensors, visible, generator)], run)


SELECTED: dict[str, dict[str, Any]] = {
    "tokens": {"size": 64},
    "tokens, blocks of 128": {"size": 128},
    "entries": {"size": 64, "length": 4, "stride": 2},
    "entries, blocks of 128": {"size": 128, "length": 7, "stride": 3},
    "split blocks": {"size": 128, "length": 2, "stride": 1, "count": 1, "heads": 4, "shared": True},
}
HERE = [(LATE, case) for case in SELECTED if case != "entries, blocks of 128"] + [(EARLY, "tokens")]
SELECTED_ON_GPU: list[tuple[int, dict[str, Any]]] = [
    *((rows, {"causal": causal}) for rows in (1, 63, 64, 65, 255, 256, 257, 1000, 4096) for causal in (True, False)),
    *groups(1, 2, 4, 8, rows=1000, batch=2),
    *(
        (1100, {"heads": 8, "dim": 64, "size": size, "shared": shared, "causal": causal})
        for size, shared, causal in itertools.product((64, 128, 192), (False, True), (True, False))
    ),
    *((1500, {"tile": tile}) for tile in (128, 256, 384, 1024)),
    *((500, {"keys": keys, "causal": False, "count": 8}) for keys in (65, 777, 3000)),
    *(
        (rows, {"heads": 8, "size": size, "causal": causal, "length": length, "stride": stride, "count": 3})
        for rows, (length, stride), size, causal in (
            (33, (32, 16), 64, True),
            (33, (4, 4), 128, False),
            (1000, (7, 5), 64, False),
            (1000, (32, 16), 128, True),
            (5000, (4, 4), 64, True),
            (5000, (7, 5), 128, True),
            (5000, (32, 16), 64, False),
        )
    ),
]


@pytest.mark.interpreted
@interpreted(cases.some(HERE, [LATE, EARLY], SELECTED), "case")
def test_selected_interpreted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 rows, blocks that need a mask and such that need none, a last block that is cut; no races."""
    from cute_kernels.attend import selected_backward

    monkeypatch.setattr(selected_backward, "MIN_QUERY_TILES", 2)
    how = {"heads": 2, "kv_heads": 1, "dim": 64, "count": 2, **SELECTED[case]}
    selected(300, tile=128, device="cpu", **how).check()


@pytest.mark.cuda
@ATOMIC_FREE
def test_rows_without_keys_and_keys_without_rows() -> None:
    chosen = torch.full((1, 4, 6, 2), -1, dtype=torch.int32)
    chosen[:, :, 1, 0] = 5  # rows 256 ... 319 of the tile see none of it
    chosen[:, 1, 2, 0] = 3
    chosen[:, :, 5] = torch.tensor([0, 22])
    given = selected(1480, indices=chosen)
    (branch,) = given.branches
    empty = ~branch.visible.any(-1)
    assert torch.equal(empty, branch.lse == -math.inf)
    dq, dk, dv = given.check()
    assert not dq.transpose(1, 2)[empty].any()
    for x in (dk, dv):
        assert not x[:, 64 * 8 : 64 * 22].any()
    # What a row without keys has in place of lse and delta does not matter
    other = replace(branch, lse=branch.lse.masked_fill(empty, math.inf), delta=branch.delta.masked_fill(empty, 3.0))
    for got, expected in zip(replace(given, branches=[other]).run(), (dq, dk, dv), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_sink_is_split(size: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.attend import selected_backward as module

    tiles = -(-3000 // 256)
    indices = blocks_of_tiles((2, 2 if shared else 8), tiles, -(-3000 // size), 4, tile=256, size=size, causal=True)
    indices[..., 0] = 0
    given = selected(3000, heads=8, batch=2, size=size, indices=indices)
    whole = given.check()
    for length in (1, 3, 8):
        monkeypatch.setattr(module, "MIN_QUERY_TILES", length)
        split = given.check()
        assert torch.equal(split[0], whole[0])
        for x, again in zip(split, given.run(), strict=True):
            assert torch.equal(x, again)


@pytest.mark.parametrize("tokens", [1 << 12, 1 << 17, 1 << 20, 1 << 22, 1 << 24])
@pytest.mark.parametrize("dim", [64, 128])
def test_memory_is_bounded(tokens: int, dim: int) -> None:
    from cute_kernels.attend.selected_backward import MIN_QUERY_TILES, worklist_sizes

    heads, kv_heads, count, tile, size = 8, 2, 16, 256, 64
    tiles, blocks = tokens // tile, kv_heads * tokens // size
    partial_bytes = 2 * 64 * dim * 4
    sizes = worklist_sizes(heads * tiles * count, heads // kv_heads * tiles, blocks, partial_bytes)
    assert sizes.min_rows >= MIN_QUERY_TILES
    assert sizes.tiles == blocks + sizes.split_tiles
    lists = 4 * (6 * blocks + sizes.rows + 3 * sizes.tiles)
    assert sizes.split_tiles * partial_bytes + lists <= (600 << 20 if tokens <= 1 << 22 else 1 << 30)


# Window, and with it the local blocks of the selected branch


def window(rows: int, *, left: int = 511, local: tuple[int, int] | None = None, **sizes: Any) -> Given:
    """Args: local: l' and local blocks of the selected branch, which also sees the first key."""

    def run(given: Given) -> Sequence[Tensor]:
        from cute_kernels.attend.window_backward import LocalSelected, window_backward

        _, *others = given.branches
        blocks = None if local is None else LocalSelected(others[0].lse, others[0].delta, *local)
        into = given.nan_like()
        window_backward(*given.tensors, into=into, left=left, scale=given.scale, local_selected=blocks)
        return into

    tensors, generator = normal(rows, rows, **sizes)
    row = torch.arange(rows, device=generator.device)[:, None]
    key = row.T
    branches = [gated_branch(*tensors, (key <= row) & (key >= row - left), generator)]
    if local is not None:
        size, count = local
        pairs = (key <= row) & (key >= (row // size - count + 1) * size)
        branches.append(gated_branch(*tensors, pairs, generator, among=pairs | (key == 0)))
    return Given(*tensors, branches, run)


LOCAL_BLOCKS = [None, (64, 2)]
WINDOW_ON_GPU: list[tuple[int, dict[str, Any]]] = [
    *(
        (rows, {"local": local})
        for rows in (1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 2049)
        for local in LOCAL_BLOCKS
    ),
    *((1100, {"left": left, "local": local}) for left in (127, 128, 190, 191, 192, 4000) for local in LOCAL_BLOCKS),
    *((700, {"left": left}) for left in (0, 1, 62, 63, 64, 65)),
    *((1500, {"local": local}) for local in [(64, 1), (64, 8), (128, 1), (128, 3), (192, 2), (256, 2)]),
    # Callers pass no wider windows than the sequence; local blocks may be wider
    *((rows, {"left": rows - 1, "local": (64, 2)}) for rows in (1, 100, 128)),
    *(of for local in LOCAL_BLOCKS for of in groups(1, 2, 16, rows=900, left=255, local=local, batch=2)),
]


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize("local", LOCAL_BLOCKS, ids=str)
def test_rows_without_statistics(local: tuple[int, int] | None) -> None:
    given = window(600, local=local)
    branches = []
    for i, branch in enumerate(given.branches):
        lse, delta = branch.lse.clone(), branch.delta.clone()
        rows = slice(100 + 50 * i, 300)
        lse[..., rows], delta[..., rows] = math.inf if i else -math.inf, math.nan
        branches.append(replace(branch, lse=lse, delta=delta))
    dq, *_ = replace(given, branches=branches).check()
    assert not dq[:, 150:300].any()


# All on a GPU

ON_GPU = [
    *((compressed, *case) for case in COMPRESSED_ON_GPU),
    *((selected, *case) for case in SELECTED_ON_GPU),
    *((window, *case) for case in WINDOW_ON_GPU),
]


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize(("make", "rows", "options"), ON_GPU, ids=lambda x: getattr(x, "__name__", str(x)))
def test_on_a_gpu(make: Callable[..., Given], rows: int, options: dict[str, Any]) -> None:
    make(rows, **options).check()


# Sums of partials


SHAPES = [(2, 4), (1, 12), (3, 2, 132), (8, 128), (9, 3, 128), (41, 2, 5, 20)]


def check_sums(shape: tuple[int, ...], device: str) -> None:
    """Against fp64; bits do not depend on what lies around."""
    from cute_kernels.gate.partials import sum_partials

    torch.manual_seed(0)
    partials = torch.randn(shape, device=device)
    got = sum_partials(partials)
    exact, size = partials.double().sum(0), partials.double().abs().sum(0)
    assert got.dtype == torch.float32
    assert bool(((got - exact).abs() <= len(partials) * 2**-24 * size).all())
    assert torch.equal(sum_partials(partials.clone()), got)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 8, 3, 128), (300, 2, 1, 511, 2, 128)])
def test_sums_on_a_gpu(shape: tuple[int, ...]) -> None:
    check_sums(shape, "cuda")


@interpreted(["late"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_interpreted(shape: tuple[int, ...]) -> None:
    check_sums(shape, "cpu")


@pytest.mark.blas
def test_partials_of_split_blocks() -> None:
    """selected_backward.CombineSelectedDKV: two blocks of 128 keys, of which the second one has ten.

    Its second key tile has no partials, and none are read. There is memory for two work tiles more than there are.
    """
    from cute_kernels.attend import selected_backward
    from cute_kernels.lists.worklist import BLOCK

    splits, num_keys, dim, scale = (3, 2), 138, 64, 0.5
    counts = torch.tensor([[9, 6], splits, [0, 0]], dtype=torch.int32)
    cum_counts = counts.cumsum(1, dtype=torch.int32)
    work_tiles = torch.empty((3, sum(splits) + 2), dtype=torch.int32)
    work_tiles[BLOCK, : sum(splits)] = torch.tensor([0, 0, 0, 1, 1])
    partials = torch.empty((work_tiles.shape[1], 2, 2, 64, dim))
    written = [partials[:3], partials[3:5, :1]]
    for x in written:
        x.normal_()
    gradients = [torch.empty((1, num_keys, 1, dim), dtype=torch.bfloat16) for _ in range(2)]
    combine = interpret(selected_backward.CombineSelectedDKV.compile, dim, torch.bfloat16, 128)
    combine(counts, cum_counts, work_tiles, partials, *gradients, scale)
    totals = torch.cat([x.sum(0).transpose(0, 1).flatten(1, 2) for x in written], 1)[:, :num_keys]
    for got, total, factor in zip(gradients, totals, (scale, 1.0), strict=True):
        # Sums in another order may round to the next number
        torch.testing.assert_close(got[0, :, 0], (total * factor).to(got.dtype), rtol=2**-8, atol=1e-6)
