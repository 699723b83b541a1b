"""Launches from which instructions that order are left out, one at a time (tests/ptx/mutations.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ptx.mutations import Case, recorded
from tests.support.interpreted_gpu import interpreted_gpu
from tests.support.interpreted_kernels import interpret_kernels
from tests.support.kv_outer_cases import WindowCase, make

if TYPE_CHECKING:
    from cute_kernels.fa4.interface import Gradients

GROUPS = ("FlashAttention-4, sm_100a", "wgmma", "mma")
"""FlashAttention-4's forward and backward; and ours per token, by what multiplies on sm_90a."""


def named_cases(group: str) -> dict[str, Case]:
    """Those of one of GROUPS."""
    if group == GROUPS[0]:
        return {
            "FlashAttentionForwardSm100, D 64, bf16": fa4_case(forward),
            "FlashAttentionBackwardSm100, D 128, bf16": fa4_case(backward),
            "FlashAttentionBackwardSm100, pairs of CTAs, D 128, bf16": fa4_case(paired_backward),
        }
    return {f"{name}, {group}, sm_90a": case for name, case in per_token_cases(group == "wgmma").items()}


DIM = 128
"""Of the backward's cases."""


def forward() -> Callable[[], object]:
    """One tile of rows, ten blocks of keys: every stage is used again."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.lists.query_to_kv import Keys, chosen_lists

    rows, keys, dim = 256, 1280, 64
    q, k, v = (torch.randn(1, tokens, 1, dim).bfloat16() for tokens in (rows, keys, keys))
    every = torch.arange(keys // 128).int()[None, None, None]
    bounds = {"num_keys": keys, "rows_from": keys - rows, "rows_to": keys, "entries": False}
    lists = chosen_lists(every, 1, Keys(), size=128, width=128, rows=256, **bounds)
    return lambda: fa4.selected(q, k, v, lists, causal=True, scale=dim**-0.5, lse=True)


def backward() -> Callable[[], object]:
    """One block of keys, four tiles of rows of one of two query heads."""
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.lists.kv_to_query import tile_bits, transposed_lists
    from cute_kernels.lists.query_to_kv import Keys

    rows, keys, heads = 512, 128, 2
    gradients = after_forward(rows, keys, heads, causal=True)
    every = torch.arange(2).int().expand(1, 1, rows // 256, 2)
    bits = tile_bits(every.contiguous(), size=64, num_keys=keys, entries=False)
    sizes = {"size": 64, "width": 128, "rows": 256, "num_keys": keys, "num_rows": rows, "blocks": range(1)}
    lists = transposed_lists(bits, heads, Keys(), **sizes)
    return lambda: fa4.selected_backward(gradients, lists, causal=True, scale=DIM**-0.5)


def paired_backward() -> Callable[[], object]:
    """Two blocks of keys, one for each CTA of a pair, without lists."""
    from cute_kernels.fa4 import interface as fa4

    gradients = after_forward(384, 256, 2, causal=False)
    return lambda: fa4.dense_backward(gradients, causal=False, scale=DIM**-0.5)


def after_forward(rows: int, keys: int, heads: int, *, causal: bool) -> Gradients:
    """What a backward is given of query heads of one key/value head."""
    from cute_kernels.fa4.interface import Gradients

    q, do = torch.randn(2, 1, rows, heads, DIM).bfloat16().unbind()
    k, v = torch.randn(2, 1, keys, 1, DIM).bfloat16().unbind()
    scores = torch.einsum("mhd,nd->hmn", q[0].double(), k[0, :, 0].double()) * DIM**-0.5
    if causal:
        scores = scores.masked_fill(torch.arange(keys) > torch.arange(rows)[:, None], -math.inf)
    o = torch.einsum("hmn,nd->mhd", scores.softmax(-1), v[0, :, 0].double()).bfloat16()[None]
    lse = scores.logsumexp(-1).float()[None]
    return Gradients(q, k, v, o, do, lse, *(torch.full_like(x, math.nan) for x in (q, k, v)))


def fa4_case(make_call: Callable[[], Callable[[], object]]) -> Case:
    """The launch of the longest kernel, of its first CTA."""
    torch.manual_seed(0)
    with interpreted_gpu("sm_100"), recorded() as launches:
        make_call()()
    return max(launches, key=lambda case: len(case.program.instructions)).of_one_cta()


def per_token_cases(warpgroups: bool) -> dict[str, Case]:
    """By the names of kernels, forward and backward."""
    from cute_kernels.attend import combine, kv_outer, kv_outer_backward
    from cute_kernels.lists import worklist

    with pytest.MonkeyPatch.context() as patch, recorded() as launches:
        for module in (kv_outer, kv_outer_backward):
            patch.setattr(module, "has_warpgroups", lambda _: warpgroups)
        interpret_kernels(patch, (worklist, combine, kv_outer, kv_outer_backward))
        make(90, 3, 1, 64, count=2, device="cpu").check()
    named = [(re.search(r"KVOuter[A-Za-z]+", case.program.name), case) for case in launches]
    found = {name[0]: case for name, case in named if name}
    if len(found) != 2:
        raise ValueError(f"kernels {[*found]}")
    return found


def window_combine_case() -> Case:
    """Of attend/window_combine.py: several steps of a CTA, every stage is used again."""
    from cute_kernels.attend import kv_outer, window_combine
    from cute_kernels.gate import forward as gate
    from cute_kernels.lists import worklist

    with pytest.MonkeyPatch.context() as patch, recorded() as launches:
        patch.setattr(kv_outer, "has_warpgroups", lambda _: True)
        interpret_kernels(patch, (worklist, kv_outer, window_combine, gate))
        WindowCase(290, window=190, beside=5).check_gated("projected", "cpu")
    return [case for case in launches if "WindowCombine" in case.program.name][-1]
