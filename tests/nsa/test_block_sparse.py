"""Block-sparse attention's reference and its public function, against attention over all pairs in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import block_sparse_attention, reference
from nsa.block_sparse import reference as block_sparse_reference
from tests.support.block_sparse_cases import Case, make
from tests.support.cases import product
from tests.support.helpers import STRIDES
from tests.support.live_memory import PeakBytes

CASES = {
    "blocks of 64": Case(150, batch=2),
    "one token": Case(1, count=1),
    "nothing": Case(0),
    "no blocks": Case(70, count=0),
    "more slots than blocks": Case(150, count=40),
    "blocks of 7": Case(90, size=7, count=4, group=3, kv_heads=1, v_dim=5),
    "one block": Case(20, size=128),
    "not causal": Case(150, causal=False),
    "continues": Case(9, 170),
    "starts inside": Case(9, 170, start=70),
    "starts": Case(9, 170, start=(3, 161), batch=2),
    "documents": Case((70, 0, 1, 66), behind=3),
    "documents that continue": Case((3, 0, 5), (130, 10, 70)),
    "starts in documents": Case((3, 0, 5), (130, 10, 70), start=(60, 2, 0)),
    "group of 64": Case(70, group=64, kv_heads=1, dim=4),
    "bf16": Case(150, dtype=torch.bfloat16, indices=torch.int32),
    "logits in the hundreds": Case(150, dtype=torch.float32, logits=100.0),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_attention_over_all_pairs(case: str) -> None:
    make(CASES[case]).check()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(Case(90, size=7, count=4))
    whole = made.gradients()
    monkeypatch.setattr(reference, "CHUNK_BYTES", {"cpu": 1})
    for one, other in zip(made.gradients(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_memory_does_not_grow_with_all_pairs() -> None:
    """4096 tokens: fp32 logits of all pairs of two heads would take 134 MB."""
    made = make(Case(4096, size=16, count=2, group=2, kv_heads=1, dtype=torch.float32))
    with PeakBytes() as memory:
        made.gradients()
    assert memory.peak < 3 * reference.CHUNK_BYTES["cpu"]


def test_what_is_not_seen_reaches_nothing() -> None:
    made = make(Case(150))
    expected = made.run()
    k, v, seen_by = made.k.clone(), made.v.clone(), (made.block_indices == 1).any(-1)  # [1,H_kv,N]
    k[:, 100], v[:, 100] = torch.nan, torch.inf
    got = block_sparse_attention(made.q, k, v, made.block_indices, **made.keywords)
    reached = (seen_by & (torch.arange(150) >= 100)).repeat_interleave(2, 1).transpose(1, 2)
    assert bool(got[reached].isnan().all())
    assert torch.equal(got[~reached], expected[~reached])


@pytest.mark.parametrize(("strides", "dtype"), product(STRIDES, [torch.float32, torch.bfloat16]))
def test_features_lie_anywhere(strides: str, dtype: torch.dtype) -> None:
    made = make(Case(150))
    laid = [STRIDES[strides](x.to(dtype)) for x in (made.q, made.k, made.v)]
    assert all(x.stride(-1) != 1 for x in laid)
    results = []
    for leaves in (laid, [x.contiguous() for x in laid]):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = block_sparse_attention(*leaves, made.block_indices, **made.keywords)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


DOCUMENTS = [[[0]] * 70 + [[2]] * 66] * 2
VALUES: dict[str, tuple[Case, Any, str]] = {
    "past the last": (Case(150), [3], "from 0 to 2, blocks of 64 of the 150 keys, or -1 .debug=True., got 3"),
    "below -1": (Case(150), [-2], "got -2"),
    "twice": (Case(150), [1, -1, 1], "must differ .debug=True., got block 1 twice"),
    "of a document": (Case((70, 66)), DOCUMENTS, "of the 66 keys of document 1, or -1"),
}


@pytest.mark.parametrize("case", VALUES)
def test_debug_reads_blocks(case: str) -> None:
    sizes, blocks, message = VALUES[case]
    made = make(sizes)
    right, wrong = (torch.tensor(x).expand(*made.block_indices.shape[:-1], -1) for x in ([-1, 1, 0], blocks))
    block_sparse_attention(made.q, made.k, made.v, right, debug=True, **made.keywords)
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(made.q, made.k, made.v, wrong, debug=True, **made.keywords)


def test_results_are_in_the_graph_and_may_be_changed_in_place() -> None:
    """Also those of no documents and of no sequences."""
    q, k, v = (torch.randn(3, 2, 8, requires_grad=True) for _ in range(3))
    blocks = torch.zeros(2, 3, 1, dtype=torch.int32)
    for bounds in ([0, 3], [0]):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        out = block_sparse_attention(q, k, v, blocks, block_size=2, cu_seqlens=cu_seqlens)
        out *= 2
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert any(bool(x.any()) for x in gradients) == (len(bounds) > 1)
    none = block_sparse_attention(
        q[None, :0].expand(0, -1, -1, -1),
        k[None].expand(0, -1, -1, -1),
        v[None].expand(0, -1, -1, -1),
        blocks[None, :, :0].expand(0, -1, -1, -1),
        block_size=2,
        q_start=torch.zeros(0, dtype=torch.int32),
    )
    assert none.requires_grad
    none.sum().backward()


def test_second_derivatives_are_those_of_autograd() -> None:
    """The reference is differentiable itself, as often as PyTorch's operators are: its fused one, for D = D_v, once."""
    same = make(Case(9, size=4, count=2, group=1, kv_heads=1, dim=2, v_dim=2))
    leaves = [x.detach().requires_grad_() for x in (same.q, same.k, same.v)]
    out = block_sparse_attention(*leaves, same.block_indices, block_size=4)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    again = block_sparse_attention(*leaves, same.block_indices, block_size=4)
    assert all(map(torch.equal, first, torch.autograd.grad(again.square().sum(), leaves)))
    for leaf in leaves:
        with pytest.raises(RuntimeError, match=r"^block_sparse_attention has no second derivative on this backend"):
            torch.autograd.grad(sum(x.sum() for x in first), leaf, retain_graph=True)

    made = make(Case(9, size=4, count=2, group=1, kv_heads=1, dim=2, v_dim=3))
    q = made.q.detach().requires_grad_()

    def function(q: Tensor) -> Tensor:
        return block_sparse_attention(q, made.k, made.v, made.block_indices, block_size=4)

    assert torch.autograd.gradgradcheck(function, (q,))
    assert block_sparse_reference.check is reference.check
