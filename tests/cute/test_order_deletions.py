"""Kernels without one of the instructions that order them: does the checker of races notice (tests/support/ptx/order.py)?

FlashAttention-4's on Blackwell, as NSA's selected branch launches them, and kernels per token on Hopper. Every
instruction that orders is left out alone (mutations.py). Of those that are executed and are not known to change nothing,
85 % must be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support import fa4_model as model
from tests.support.interpreted_gpu import interpreted_gpu
from tests.support.kv_outer_cases import make
from tests.support.ptx import Schedule, interpret_kernels
from tests.support.ptx.clocks import END
from tests.support.ptx.mutations import Case, Deletion, Effects, candidates, delete_each, recorded

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

NOTICED = 0.85
SOME = 24
"""Of the instructions that are executed; with `full`, all."""


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


def noticed_of(deletions: list[Deletion]) -> list[bool]:
    return [x.found for x in deletions if x.executed and not x.reason]


@pytest.mark.parametrize("most", [SOME, *cases.rest(1 << 20)])
@pytest.mark.parametrize(("make_call", "ends"), [(forward, 0), (backward, 1)], ids=["forward", "backward"])
def test_deletions_from_fa4_are_noticed(make_call: Callable[[], Callable[[], object]], ends: int, most: int) -> None:
    """As it is, the backward has one finding: it does not wait until the last addition to dK has read shared memory."""
    case, base = fa4_case(make_call), Effects()
    assert not case.run(case.program, base, True)
    assert [x.kind for x in base.findings] == [END] * ends
    assert all("cp.reduce.async.bulk" in case.program.instructions[x.first].name for x in base.findings)
    executed = [at for at in candidates(case.program) if at in base.executed]
    chosen = executed[:: max(1, len(executed) // most)]
    noticed = noticed_of(delete_each(make_call.__name__, case, chosen))
    assert len(noticed) >= len(chosen) // 2
    assert sum(noticed) >= NOTICED * len(noticed)


@pytest.mark.parametrize("warpgroups", [True, False], ids=["wgmma", "mma"])
def test_deletions_from_kernels_per_token_are_noticed(warpgroups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.attend import combine, kv_outer, kv_outer_backward
    from cute_kernels.lists import worklist

    for module in (kv_outer, kv_outer_backward):
        monkeypatch.setattr(module, "has_warpgroups", lambda _: warpgroups)
    interpret_kernels(monkeypatch, (worklist, combine, kv_outer, kv_outer_backward), schedule=Schedule())
    with recorded() as launches:
        make(90, 3, 1, 64, count=2, device="cpu").check()
    chosen = {case.program.name: case for case in launches if "KVOuter" in case.program.name}
    assert len(chosen) == 2
    for name, case in chosen.items():
        noticed = noticed_of(delete_each(name, case))
        assert noticed
        assert all(noticed), name
