"""top_blocks_by_max and indexer_kl_loss: selections against loops, gradients against autograd over all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import indexer_kl_loss, reference, top_blocks_by_max
from tests.support.indexer_cases import block_scores, select
from tests.support.live_memory import PeakBytes


def make(
    tokens: int, keys: int | None = None, heads: int = 2, shared: bool = True, *, batch: int = 1
) -> tuple[Tensor, ...]:
    """q_idx and k_idx of small integers: scores are exact, and many are equal."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, heads, 4), (batch, keys or tokens, 1 if shared else heads, 4))
    return tuple(torch.randint(-2, 3, shape, generator=generator).double() for shape in shapes)


CASES: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (make(150), {"block_size": 16, "k": 4}),
    "own keys, two local": (make(150, heads=3, shared=False), {"block_size": 7, "k": 3, "local": 2}),
    "nothing forced": (make(60, batch=2), {"block_size": 8, "k": 2, "local": 0}),
    "local alone": (make(60), {"block_size": 8, "k": 2, "local": 2}),
    "more than blocks": (make(40), {"block_size": 16, "k": 9}),
    "one block": (make(5), {"block_size": 128, "k": 2}),
    "continues": (make(9, 130), {"block_size": 16, "k": 3}),
    "starts inside": (make(9, 130), {"block_size": 16, "k": 3, "q_start": 77}),
    "starts": (make(9, 130, batch=2), {"block_size": 16, "k": 3, "q_start": (30, 121)}),
    "no tokens": (make(0), {"block_size": 16, "k": 3}),
}


def expected(q_idx: Tensor, k_idx: Tensor, *, start: int, block_size: int, k: int, local: int = 1) -> Tensor:
    scores = block_scores(q_idx, k_idx[: start + q_idx.shape[0]], size=block_size, start=start)
    return select(scores, size=block_size, start=start, k=k, local=local).int()


@pytest.mark.parametrize("case", CASES)
def test_selects_as_loops_do(case: str) -> None:
    (q_idx, k_idx), options = CASES[case]
    start = options.get("q_start", k_idx.shape[1] - q_idx.shape[1])
    starts = start if isinstance(start, tuple) else (start,) * q_idx.shape[0]
    given = {**options, "q_start": torch.tensor(start).int()} if isinstance(start, tuple) else options
    got = top_blocks_by_max(q_idx, k_idx, **given)
    plain = {name: value for name, value in options.items() if name != "q_start"}
    for b, first in enumerate(starts):
        assert torch.equal(got[b], expected(q_idx[b], k_idx[b], start=first, **plain))


@pytest.mark.parametrize("continues", [False, True])
def test_documents_are_sequences(continues: bool) -> None:
    lengths, keys = (40, 0, 1, 30), (70, 5, 20, 30) if continues else (40, 0, 1, 30)
    bounds, key_bounds = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, keys))
    q_idx, k_idx = (x[0] for x in make(sum(lengths) + 3, sum(keys) + 3))
    got = top_blocks_by_max(
        q_idx, k_idx, block_size=16, k=2, cu_seqlens=bounds, cu_seqlens_k=key_bounds if continues else None
    )
    for i in range(len(lengths)):
        rows, own = slice(bounds[i], bounds[i + 1]), slice(key_bounds[i], key_bounds[i + 1])
        want = expected(q_idx[rows], k_idx[own], start=keys[i] - lengths[i], block_size=16, k=2)
        assert torch.equal(got[:, rows], want)
    assert bool((got[:, sum(lengths) :] == -1).all())


def test_chunks_change_nothing_and_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q_idx, k_idx = (torch.randn(1, 1024, heads, 4) for heads in (2, 1))
    whole = top_blocks_by_max(q_idx, k_idx, block_size=64, k=4)
    monkeypatch.setattr(reference, "CHUNK_BYTES", {"cpu": 1 << 17})
    with PeakBytes() as memory:
        assert torch.equal(top_blocks_by_max(q_idx, k_idx, block_size=64, k=4), whole)
    assert memory.peak < 1 << 20  # fp32 scores of all pairs: 8 MB


def test_scores_that_are_not_numbers_do_not_count() -> None:
    q_idx, k_idx = make(64)
    k_idx[:, 3], k_idx[:, 20] = torch.nan, -torch.inf
    q_idx[:, 60] = torch.nan
    got = top_blocks_by_max(q_idx, k_idx, block_size=16, k=4)
    assert got[0, :, 60].tolist() == [[3, -1, -1, -1]] * 2
    without = k_idx.clone()
    without[:, 3] = 0  # the score of a key that is nothing may be less than another's
    assert bool((got[0, :, 63] == torch.tensor([0, 1, 2, 3])).all())


# The loss


def all_pairs_loss(q_idx: Tensor, k_idx: Tensor, q: Tensor, k: Tensor, indices: Tensor, size: int) -> Tensor:
    """As the docstring says, from logits of all pairs and a loop over tokens, heads and blocks."""
    group, first, losses = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1], []
    for b, head, row in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist():
        end = first + row + 1
        blocks = [j for j in indices[b, head, row].tolist() if j >= 0 and j * size < end]
        if not blocks:
            continue
        spans = [slice(j * size, min((j + 1) * size, end)) for j in blocks]
        keys = torch.cat([torch.arange(end)[span] for span in spans])
        logits = q[b, row, head * group : (head + 1) * group] @ k[b, keys, head].mT * q.shape[3] ** -0.5
        mass = torch.split(logits.softmax(-1).mean(0), [len(torch.arange(end)[span]) for span in spans])
        target = torch.stack([part.sum() for part in mass]).detach()
        keys_idx = k_idx[b, :, head if k_idx.shape[2] > 1 else 0]
        best = torch.stack([(keys_idx[span] @ q_idx[b, row, head]).max() for span in spans])
        losses.append(torch.nn.functional.kl_div((best * 0.7).log_softmax(-1), target, reduction="sum"))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("shared", [True, False])
def test_loss_and_its_gradients_are_those_of_all_pairs(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    q_idx = torch.randn(2, 40, 2, 5, dtype=torch.float64, requires_grad=True)
    k_idx = torch.randn(2, 50, 1 if shared else 2, 5, dtype=torch.float64, requires_grad=True)
    q, k = torch.randn(2, 40, 6, 3, dtype=torch.float64), torch.randn(2, 50, 2, 3, dtype=torch.float64)
    indices = top_blocks_by_max(q_idx, k_idx, block_size=8, k=4, local=2).long().flip(-1)
    indices[:, :, 5] = -1
    monkeypatch.setattr(reference, "CHUNK_BYTES", {"cpu": 1 << 16})
    loss = indexer_kl_loss(q_idx, k_idx, q, k, indices, block_size=8, index_scale=0.7)
    exact = all_pairs_loss(q_idx, k_idx, q, k, indices, 8)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(x, (q_idx, k_idx)) for x in (loss, exact)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_of_rounded_inputs_is_exact_to_fp32(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    q_idx, k_idx, q, k = (torch.randn(2, 40, heads, 16, dtype=dtype) for heads in (2, 1, 8, 2))
    indices = top_blocks_by_max(q_idx.double(), k_idx.double(), block_size=16, k=2)
    exact = [x.double().requires_grad_(i < 2) for i, x in enumerate((q_idx, k_idx, q, k))]
    expected = all_pairs_loss(*exact, indices, 16)
    mine = [x.to(device).requires_grad_(i < 2) for i, x in enumerate((q_idx, k_idx, q, k))]
    loss = indexer_kl_loss(*mine, indices.to(device), block_size=16, index_scale=0.7)
    assert (loss.dtype, loss.device.type) == (torch.float32, device)
    # Logits of up to 8 have errors of a few 2^-20, and so have logarithms of probabilities
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=0, atol=2**-17)
    gradients = torch.autograd.grad(loss, mine[:2])
    for got, want in zip(gradients, torch.autograd.grad(expected, exact[:2]), strict=True):
        tolerance = (2**-16 + torch.finfo(dtype).eps) * float(want.abs().max())
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=tolerance)


def test_loss_of_documents_is_their_mean_by_tokens() -> None:
    q_idx, k_idx, q, k = (torch.randn(1, 47, heads, 4).double() for heads in (2, 1, 4, 2))
    bounds = torch.tensor([0, 20, 20, 44]).int()
    packed = [x[0] for x in (q_idx, k_idx, q, k)]
    indices = top_blocks_by_max(*packed[:2], block_size=8, k=2, cu_seqlens=bounds)
    got = indexer_kl_loss(*packed, indices, block_size=8, cu_seqlens=bounds)
    parts = []
    for first, stop in ((0, 20), (20, 44)):
        own = [x[:, first:stop] for x in (q_idx, k_idx, q, k)]
        parts.append(indexer_kl_loss(*own, indices[None, :, first:stop], block_size=8) * (stop - first))
    torch.testing.assert_close(got, sum(parts) / 44)


def test_loss_of_starts_of_their_own_is_the_mean_of_calls_with_integers() -> None:
    starts = [0, 13, 30]
    q_idx, q = (torch.randn(3, 20, heads, 4, dtype=torch.float64, requires_grad=heads == 2) for heads in (2, 4))
    k_idx, k = (torch.randn(3, 50, heads, 4, dtype=torch.float64, requires_grad=heads == 1) for heads in (1, 2))
    where = torch.tensor(starts).int()
    indices = top_blocks_by_max(q_idx, k_idx, block_size=8, k=3, q_start=where)
    got = indexer_kl_loss(q_idx, k_idx, q, k, indices, block_size=8, q_start=where)
    parts = []
    for b, start in enumerate(starts):
        own = [x[b : b + 1] for x in (q_idx, k_idx, q, k, indices)]
        parts.append(indexer_kl_loss(*own, block_size=8, q_start=start))
    torch.testing.assert_close(got, sum(parts) / 3)
    gradients = (torch.autograd.grad(x, (q_idx, k_idx)) for x in (got, sum(parts) / 3))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_loss_under_autocast_is_in_fp32() -> None:
    q_idx, k_idx, q, k = (torch.randn(2, 40, heads, 16) for heads in (2, 1, 4, 2))
    indices = top_blocks_by_max(q_idx, k_idx, block_size=8, k=3)
    mixed, results = (q_idx.bfloat16(), k_idx, q, k.half()), []
    for given, enabled in ((mixed, True), ([x.float() for x in mixed], False)):
        leaves = [x.clone().requires_grad_(i < 2) for i, x in enumerate(given)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = indexer_kl_loss(*leaves, indices, block_size=8)
        results.append((loss, *torch.autograd.grad(loss, leaves[:2])))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected.to(got.dtype))
    assert loss.dtype == results[0][0].dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_of_equal_scores_gets_the_gradient(device: str) -> None:
    q_idx, k_idx = (torch.ones(1, tokens, 1, 2, device=device, requires_grad=True) for tokens in (1, 32))
    q, k = torch.randn(1, 1, 2, 4, device=device), torch.randn(1, 32, 1, 4, device=device)
    indices = torch.tensor([0, 1], device=device).expand(1, 1, 1, 2)
    loss = indexer_kl_loss(q_idx, k_idx, q, k, indices, block_size=16)
    (dk,) = torch.autograd.grad(loss, k_idx)
    assert dk[0, :, 0, 0].nonzero().flatten().tolist() == [0, 16]


def test_loss_without_blocks_is_zero() -> None:
    q_idx, k_idx = torch.randn(1, 6, 2, 4, requires_grad=True), torch.randn(1, 6, 1, 4, requires_grad=True)
    q, k, nothing = torch.randn(1, 6, 4, 4), torch.randn(1, 6, 2, 4), torch.full((1, 2, 6, 3), -1)
    loss = indexer_kl_loss(q_idx, k_idx, q, k, nothing, block_size=8)
    assert loss.item() == 0
    assert all(bool((x == 0).all()) for x in torch.autograd.grad(loss, (q_idx, k_idx)))
    assert indexer_kl_loss(q_idx, k_idx, q, k, nothing[..., :0], block_size=8).item() == 0
    empty = [x[:, :0] for x in (q_idx, k_idx, q, k)]
    assert indexer_kl_loss(*empty, nothing[:, :, :0], block_size=8).item() == 0
