"""Launches of FlashAttention-4 on Blackwell from which instructions are left out (tests/support/ptx/mutations.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support import fa4_model as model
from tests.support.interpreted_gpu import interpreted_gpu
from tests.support.ptx.mutations import Case, recorded


def listed(lists: model.Lists) -> list[Tensor]:
    return [lists.mask_count, lists.mask_index, lists.full_count, lists.full_index]


def forward() -> Callable[[], object]:
    """One tile of rows, ten blocks of keys: every stage is used again."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.lists.query_to_kv import BlockLists

    rows, keys, dim = 256, 1280, 64
    q, k, v = (torch.randn(1, tokens, 1, dim).bfloat16() for tokens in (rows, keys, keys))
    every = torch.arange(keys // 128).int()[None, None, None]
    bounds = {"num_keys": keys, "rows_from": keys - rows, "rows_to": keys}
    lists = model.chosen_lists(every, 1, model.Keys(), size=128, width=128, rows=256, **bounds)
    some = BlockLists(*map(Tensor.contiguous, listed(lists)), lists.rows, lists.width)
    return lambda: fa4.selected(q, k, v, some, causal=True, scale=dim**-0.5, lse=True)


def backward() -> Callable[[], object]:
    """One block of keys, four tiles of rows of one of two query heads."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.fa4.launch import Gradients
    from cute_kernels.lists.query_to_kv import BlockLists

    rows, keys, heads, dim = 512, 128, 2, 128
    q, do = torch.randn(2, 1, rows, heads, dim).bfloat16().unbind()
    k, v = torch.randn(2, 1, keys, 1, dim).bfloat16().unbind()
    scores = torch.einsum("mhd,nd->hmn", q[0].double(), k[0, :, 0].double()) * dim**-0.5
    scores = scores.masked_fill(torch.arange(keys) > torch.arange(rows)[:, None], -math.inf)
    o = torch.einsum("hmn,nd->mhd", scores.softmax(-1), v[0, :, 0].double()).bfloat16()[None]
    lse = scores.logsumexp(-1).float()[None]
    every = torch.arange(2).int().expand(1, 1, rows // 256, 2)
    bits = model.tile_bits(every, size=64, num_keys=keys)
    sizes = {"size": 64, "width": 128, "rows": 256, "num_keys": keys, "num_rows": rows, "blocks": range(1)}
    lists = model.transposed_lists(bits, heads, model.Keys(), **sizes)
    some = BlockLists(*map(Tensor.contiguous, listed(lists)), lists.rows, lists.width, lists.bits, lists.bit_keys)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    gradients = Gradients(q, k, v, o, do, lse, dq, dk, dv)
    return lambda: fa4.selected_backward(gradients, some, causal=True, scale=dim**-0.5)


def fa4_case(make_call: Callable[[], Callable[[], object]]) -> Case:
    """The launch of the longest kernel, of its first CTA."""
    torch.manual_seed(0)
    with interpreted_gpu("sm_100"), recorded() as launches:
        make_call()()
    return max(launches, key=lambda case: len(case.program.instructions)).of_one_cta()
