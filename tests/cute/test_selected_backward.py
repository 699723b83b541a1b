"""The split backward of the selected branch (attend/selected_backward.py) against fp64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.attention_gradients import Branch, check_gradients, gated_branch, normal_inputs
from tests.support.hardware import ATOMIC_FREE
from tests.support.kv_outer_cases import drawn_blocks

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles
BF16, FP16 = torch.bfloat16, torch.float16


def random_indices(
    shape: tuple[int, int],
    tiles: int,
    blocks: int,
    count: int,
    *,
    tile: int,
    size: int,
    causal: bool,
    length: int = 1,
    stride: int = 1,
) -> Tensor:
    """Some of the blocks that begin before a tile's end."""
    begun = torch.full((tiles,), blocks)
    if causal:
        seen = (torch.arange(1, tiles + 1) * tile - length) // stride + 1
        begun = (-(-seen // size)).clamp(0, blocks)
    return drawn_blocks(shape, begun, blocks, count)


def tiles_of_blocks(indices: Tensor, blocks: int) -> Tensor:
    """Whether tile t selected block b: bool `[B,S,tiles,blocks]`."""
    chosen = torch.zeros((*indices.shape[:3], blocks + 1), dtype=torch.bool, device=indices.device)
    return chosen.scatter_(3, indices.long().where(indices >= 0, blocks), True)[..., :blocks]


@dataclass(frozen=True)
class Inputs:
    """What attention's backward takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    branch: Branch
    indices: Tensor
    scale: float
    tile: int
    size: int
    causal: bool
    length: int
    """Tokens of a key: 1, or l of compressed entries; `stride` from one key to the next."""
    stride: int

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        from cute_kernels.attend.selected_backward import selected_backward
        from cute_kernels.lists.kv_to_query import tile_bits
        from cute_kernels.lists.query_to_kv import Keys, chosen_lists
        from cute_kernels.mma.wgmma import TILE

        rows, num_keys = self.q.shape[1], self.k.shape[1]
        keys = Keys(self.length, self.stride, self.causal)
        of_keys: dict[str, Any] = {"size": self.size, "num_keys": num_keys, "entries": self.length > 1}
        of_rows = {"width": TILE, "rows": self.tile, "rows_from": 0, "rows_to": rows}
        lists = chosen_lists(self.indices, self.q.shape[2], keys, **of_rows, **of_keys)
        bits = tile_bits(self.indices, **of_keys)
        tensors = self.q, self.k, self.v, self.do, self.branch.lse, self.branch.delta
        into = torch.empty_like(self.q), torch.empty_like(self.k), torch.empty_like(self.v)
        selected_backward(*tensors, lists, bits, size=self.size, keys=keys, scale=self.scale, into=into)
        return into

    def check(self) -> tuple[Tensor, Tensor, Tensor]:
        got = self.run()
        check_gradients(got, self.q, self.k, self.v, self.do, [self.branch], self.scale)
        return got


def make(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    *,
    keys: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    count: int = 4,
    tile: int = 256,
    size: int = 64,
    causal: bool = True,
    shared: bool = False,
    indices: Tensor | None = None,
    length: int = 1,
    stride: int = 1,
    device: str = "cuda",
) -> Inputs:
    """Normal inputs; lse shifted as by the logarithm of a gate, delta as of an unshifted one."""
    keys = max(0, tokens - length) // stride + 1 if keys is None else keys
    generator = torch.Generator(device).manual_seed(1)
    tensors = normal_inputs(tokens, keys, heads, kv_heads, dim, batch=batch, dtype=dtype, generator=generator)
    tiles, blocks = -(-tokens // tile), -(-keys // size)
    if indices is None:
        shape = batch, kv_heads if shared else heads
        indices = random_indices(
            shape, tiles, blocks, count, tile=tile, size=size, causal=causal, length=length, stride=stride
        )
    indices = indices.to(device)
    visible = tiles_of_blocks(indices, blocks).repeat_interleave(heads // indices.shape[1], 1)
    visible = visible.repeat_interleave(tile, 2)[:, :, :tokens].repeat_interleave(size, 3)[..., :keys]
    if causal:
        last = torch.arange(keys, device=device) * stride + length - 1
        visible &= last <= torch.arange(tokens, device=device)[:, None]
    branch = gated_branch(*tensors, visible, generator)
    return Inputs(*tensors, branch, indices, dim**-0.5, tile, size, causal, length, stride)


# ---------------------------------------------------------------- gradients


ON_GPU: list[tuple[int, dict[str, Any]]] = [
    *(
        (tokens, {"causal": causal})
        for tokens in (1, 63, 64, 65, 255, 256, 257, 1000, 4096)
        for causal in (True, False)
    ),
    *(
        (1000, {"heads": max(group, 2), "kv_heads": max(group, 2) // group, "dim": dim, "dtype": dtype, "batch": 2})
        for group, dim, dtype in itertools.product((1, 2, 4, 8), (64, 128), (BF16, FP16))
    ),
    *(
        (1100, {"heads": 8, "dim": 64, "size": size, "shared": shared, "causal": causal})
        for size, shared, causal in itertools.product((64, 128, 192), (False, True), (True, False))
    ),
    *((1500, {"tile": tile}) for tile in (128, 256, 384, 1024)),
    *((500, {"keys": keys, "causal": False, "count": 8}) for keys in (65, 777, 3000)),
    *(
        (tokens, {"heads": 8, "size": size, "causal": causal, "length": length, "stride": stride, "count": 3})
        for tokens, (length, stride), size, causal in (
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


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize(("tokens", "options"), ON_GPU, ids=str)
def test_on_a_gpu(tokens: int, options: dict[str, Any]) -> None:
    make(tokens, **options).check()


INTERPRETED: dict[str, dict[str, Any]] = {
    "tokens": {"size": 64},
    "tokens, blocks of 128": {"size": 128},
    "entries": {"size": 64, "length": 4, "stride": 2},
    "entries, blocks of 128": {"size": 128, "length": 7, "stride": 3},
    "split blocks": {"size": 128, "length": 2, "stride": 1, "count": 1, "heads": 4, "shared": True},
}


HERE = [("late, races", case) for case in INTERPRETED if case != "entries, blocks of 128"] + [
    ("early, races", "tokens")
]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("interpreted", "case"),
    cases.some(HERE, ["late, races", "early, races"], INTERPRETED),
    indirect=["interpreted"],
)
@pytest.mark.usefixtures("interpreted")
def test_interpreted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 rows, blocks that need a mask and such that need none, a last block that is cut; no races."""
    from cute_kernels.attend import selected_backward

    monkeypatch.setattr(selected_backward, "MIN_QUERY_TILES", 2)
    how = {"heads": 2, "count": 2, **INTERPRETED[case]}
    make(300, kv_heads=1, dim=64, tile=128, device="cpu", **how).check()


@pytest.mark.cuda
@ATOMIC_FREE
def test_rows_without_keys_and_keys_without_rows() -> None:
    chosen = torch.full((1, 4, 6, 2), -1, dtype=torch.int32)
    chosen[:, :, 1, 0] = 5  # rows 256 ... 319 of the tile see none of it
    chosen[:, 1, 2, 0] = 3
    chosen[:, :, 5] = torch.tensor([0, 22])
    inputs = make(1480, indices=chosen)
    branch = inputs.branch
    empty = ~branch.visible.any(-1)
    assert torch.equal(empty, branch.lse == -math.inf)
    dq, dk, dv = inputs.check()
    assert not dq.transpose(1, 2)[empty].any()
    for x in (dk, dv):
        assert not x[:, 64 * 8 : 64 * 22].any()
    # What a row without keys has in place of lse and delta does not matter
    other = replace(branch, lse=branch.lse.masked_fill(empty, math.inf), delta=branch.delta.masked_fill(empty, 3.0))
    for got, expected in zip(replace(inputs, branch=other).run(), (dq, dk, dv), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_sink_is_split(size: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.attend import selected_backward as module

    tiles = -(-3000 // 256)
    indices = random_indices((2, 2 if shared else 8), tiles, -(-3000 // size), 4, tile=256, size=size, causal=True)
    indices[..., 0] = 0
    inputs = make(3000, 8, 2, batch=2, size=size, indices=indices)
    whole = inputs.check()
    for length in (1, 3, 8):
        monkeypatch.setattr(module, "MIN_QUERY_TILES", length)
        split = inputs.check()
        assert torch.equal(split[0], whole[0])
        for x, again in zip(split, inputs.run(), strict=True):
            assert torch.equal(x, again)


# ---------------------------------------------------------------- worklist


@pytest.mark.cuda_extra
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
