"""Attention of each token to its own blocks of keys, KV-outer and query-outer, on a GPU; worklists.

Shapes are held against fp64 in test_block_sparse.py and test_nsa.py, and interpreted in test_kv_outer_ptx.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.interpreted_kernels import interpret_kernels
from tests.support.kv_outer_cases import make, random_indices

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles

CUDA = pytest.mark.cuda


# ---------------------------------------------------------------- worklists


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels of worklists run, on a CPU interpreted."""
    from cute_kernels.lists import worklist

    if request.param == "cpu":
        interpret_kernels(monkeypatch, [worklist])
    return str(request.param)


@pytest.mark.parametrize("forced", [(1, 2), *cases.rest(((0, 2),), ((2, 0),))])
def test_forced_blocks_are_left_out(forced: tuple[int, int], device: str) -> None:
    """The worklist holds what is not forced, and all of it."""
    from cute_kernels.lists.worklist import build_worklist

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
    from cute_kernels.lists.worklist import build_worklist

    blocks = -(-tokens // 64)
    indices = random_indices((2, 3), [tokens], blocks, 7, size=64)
    check_worklist(build_worklist(indices.to(device), size=64, blocks=blocks, min_rows=min_rows), indices, min_rows)


@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("bitmap_bytes", [1, 500, 1 << 20])
def test_chunks_hold_every_slot_once(bitmap_bytes: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worklists of one head at a time, of some, and of all; and partials of as many."""
    from cute_kernels.lists import worklist

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


# ---------------------------------------------------------------- kernels


@CUDA
@pytest.mark.parametrize("group", [1, 3, 16, 64])
def test_without_wgmma(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs other than Hopper's."""
    for module in ("kv_outer", "kv_outer_backward", "forced", "query_outer"):
        monkeypatch.setattr(f"cute_kernels.attend.{module}.has_warpgroups", lambda _: False)
    make(517, group, 2, 128, count=5).check_both()
    make([300, 1, 216], group, 1, 64, 128, count=5, size=128).check_both()
    make([300, 1, 216], group, 1, 128, count=5, forced=(1, 2)).check()
    make(517, group, 2, 128, count=14, forced=(1, 2)).check_gated("projected")


@CUDA
def test_query_outer_for_some_tokens_repeats_the_whole() -> None:
    """From any token that begins a tile the same bits; and the same bits each time."""
    from cute_kernels.attend.query_outer import query_outer_forward

    inputs = make(1000, 16, 2, 128, count=8)
    whole = inputs.forward(query_outer=True)
    for start, stop in ((0, 1000), (8, 704), (640, 1000)):
        tensors = inputs.q[:, start:stop], inputs.k[:, :stop], inputs.v[:, :stop], inputs.indices[:, :, start:stop]
        o, lse = query_outer_forward(*tensors, size=inputs.size, scale=inputs.scale, first_token=start)
        assert torch.equal(o, whole[0][:, start:stop])
        assert torch.equal(lse, whole[1][..., start:stop])
