"""Arguments of FlashAttention-4's kernels for sm_100, as the interpreted host side lays them out (tests/ptx/host.py).

The expected bytes were first laid out by hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ptx import Interpreted, Launch, Program, TensorMap, launches_of
from tests.ptx.host import flat
from tests.ptx.parameters import divisor
from tests.ptx.tensor_map import blob
from tests.support.interpreted_gpu import interpreted_gpu


class Asked:
    """Launches that nobody runs, and what the compiled functions were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Tensor], Launch]] = []

    def launch(self, interpreted: Interpreted, *arguments: Any) -> None:
        artefacts = interpreted.artefacts
        for one in launches_of(artefacts.ir, arguments):
            Program(artefacts.ptx).check(one)
            self.calls.append(([x for x in flat(arguments) if isinstance(x, Tensor)], one))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    of = Asked()
    monkeypatch.setattr(Interpreted, "__call__", lambda interpreted, *x: of.launch(interpreted, *x))
    with interpreted_gpu("sm_100"):
        yield of


def int32(*numbers: int) -> list[bytes]:
    return [struct.pack("<i", n) for n in numbers]


def sizes(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def tensor(x: Tensor) -> bytes:
    head = struct.pack(f"<Q{x.dim()}i", x.data_ptr(), *x.shape)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{x.dim() - 1}q", *x.stride()[:-1])


def rows_first(x: Tensor) -> bytes:
    """[B, H, M] as [M, H, B]."""
    return struct.pack("<Qiii4xqq", x.data_ptr(), *reversed(x.shape), x.stride(1), x.stride(0))


def tensor_map(x: Tensor, rows: int) -> TensorMap:
    """[B, M, H, D] in boxes of rows, D first."""
    order = 3, 1, 2, 0
    strides = tuple(2 * x.stride(dim) for dim in order)
    return TensorMap(x.data_ptr(), 2, "bf16", tuple(x.shape[dim] for dim in order), strides, (64, rows, 1, 1), 128)


BATCH, ROWS, HEADS, KV_HEADS, DIM, SCALE = 1, 600, 4, 1, 128, 0.1
LOG2E = torch.tensor(SCALE) * torch.tensor(math.log2(math.e))


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def qkv() -> tuple[Tensor, ...]:
    return tuple(some(BATCH, ROWS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))


def lists_of(*shape: int) -> tuple[Tensor, ...]:
    count, index = torch.zeros(shape[:-1], dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    return count, index, count.clone(), index.clone()


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.cuda_extra
@pytest.mark.filterwarnings("default")
def test_flash_attention_4_forward(asked: Asked) -> None:
    """Causal, with lists of 64-wide blocks."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.lists.query_to_kv import BlockLists

    q, k, v = qkv()
    lists = lists_of(BATCH, HEADS, 3, 5)
    o, lse = fa4.selected(q, k, v, BlockLists(*lists, 256, 64), causal=True, scale=SCALE)
    assert lse is not None
    ((_, got),) = asked.calls
    tiles = 3
    in_l2 = 1 << int(math.log2((50 << 20) // (ROWS * 2 * DIM * 2)))  # heads whose keys and values L2 holds
    rest = max(HEADS * BATCH % in_l2, 1)
    assert got.arguments == [
        sizes(ROWS, DIM, HEADS, BATCH),
        sizes(ROWS, DIM, KV_HEADS, BATCH),
        sizes(DIM, ROWS, KV_HEADS, BATCH),
        sizes(ROWS, DIM, HEADS, BATCH),
        rows_first(lse),
        *map(blob, range(4)),
        struct.pack("<f", LOG2E),
        *map(tensor, lists),
        bytes(32),
        bytes(32),
        *int32(tiles * HEADS * BATCH, 1, tiles, HEADS, BATCH, in_l2),
        *(divisor(HEADS).data, *int32(HEADS)),
        *(divisor(in_l2).data, *int32(in_l2)),
        *(divisor(in_l2 * tiles).data, *int32(in_l2 * tiles)),
        *(divisor(rest).data, *int32(rest, HEADS * BATCH // in_l2)),
        *(divisor(1).data, *int32(1, 1)),
    ]
    assert got.tensor_maps == [tensor_map(x, rows) for x, rows in ((q, 128), (k, 64), (v, 64), (o, 128))]
    assert (got.grid, got.block, got.cluster) == ((tiles * HEADS * BATCH, 1, 1), (512, 1, 1), (1, 1, 1))


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.cuda_extra
@pytest.mark.filterwarnings("default")
def test_flash_attention_4_backward(asked: Asked) -> None:
    """With lists of 128-wide blocks, and bits."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.lists.query_to_kv import BlockLists

    q, k, v = qkv()
    lists, bits = lists_of(BATCH, HEADS, 5, 3), torch.zeros((BATCH, HEADS, 10, 2), dtype=torch.int32)
    more = some(BATCH, ROWS, HEADS, DIM), some(BATCH, ROWS, HEADS, DIM), some(BATCH, HEADS, ROWS, dtype=torch.float32)
    gradients = fa4.Gradients(q, k, v, *more, *qkv())
    fa4.selected_backward(gradients, BlockLists(*lists, 256, 128, bits, 64), causal=True, scale=SCALE)
    _, (tensors, got), *after = asked.calls
    assert len(after) == 3
    *_, do, lse, delta, dq, dk, dv = tensors[:9]
    blocks = 5
    assert got.arguments == [
        sizes(ROWS, DIM, HEADS, BATCH),
        *[sizes(ROWS, DIM, KV_HEADS, BATCH)] * 2,
        *map(rows_first, (lse, delta)),
        sizes(DIM, ROWS, HEADS, BATCH),
        *map(rows_first, (dv, dk, dq, dv, dk)),
        *map(blob, range(4)),
        *[bytes(32)] * 5,
        struct.pack("<f", SCALE),
        struct.pack("<f", LOG2E),
        *int32(blocks, HEADS, BATCH),
        *(divisor(1).data, *int32(1)),
        tensor(bits),
        *int32(0, 0, 0),
        *(divisor(ROWS).data, *int32(ROWS)) * 2,
        *map(tensor, lists),
    ]
    assert got.tensor_maps == [tensor_map(x, 128) for x in (q, k, v, do)]
    assert (got.grid, got.block, got.cluster) == ((blocks, HEADS, BATCH), (512, 1, 1), (1, 1, 1))
