"""The loss of an indexer and its gradients in Triton, against the reference in fp64: executed on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_kernels import device
from ascend_kernels.nsa import kv_outer, lists
from nsa import indexer_kl_loss, top_blocks_by_max
from tests.ascend import compiled

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """`keys` of keys and `queries` of queries; `bounds` of documents, `starts` of sequences."""

    queries: int = 40
    keys: int = 40
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    """D and D_i."""
    size: int = 16
    k: int = 2
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
    """dtypes of q and k, and of q_idx and k_idx."""
    shared: bool = True
    bounds: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    logits: float = 1.0


CASES = {
    "plain": Case(),
    "own keys, continued, groups of 3": Case(30, 50, (6, 2), (16, 24), 32, dtypes=(FP16, FP16), shared=False),
    "starts, fp32": Case(24, 60, (2, 2), (24, 16), 48, dtypes=(FP32, FP32), starts=(10, 36)),
    "packed, two dtypes": Case(heads=(4, 1), k=3, dtypes=(BF16, FP32), bounds=(0, 5, 5, 30, 36)),
    "large logits, steps in a block": Case(70, 70, (2, 1), size=80, dtypes=(FP32, BF16), logits=100.0),
}
ON_GPUS = {
    "64 over 4": Case(900, 900, (64, 4), (128, 128), 64, 8),
    "blocks of 128, 20 of them": Case(3000, 3000, (8, 2), (128, 64), 128, 20),
    "one head a group, own keys": Case(700, 900, (4, 4), (64, 32), 64, 5, (FP16, FP16), shared=False),
    "256 features, blocks of 256": Case(600, 600, (2, 1), (256, 256), 256, 3),
    "fp32, packed": Case(500, 500, (6, 2), (64, 64), 64, 4, (FP32, FP32), bounds=(0, 130, 131, 480)),
}


def check(of: Case, place: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lead = () if of.bounds else (len(of.starts or (0, 0)),)
    (heads, kv_heads), (dim, index_dim) = of.heads, of.dims

    def normal(tokens: int, heads: int, dim: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*lead, tokens, heads, dim, generator=generator)).to(place, dtype)

    q, k = normal(of.queries, heads, dim, of.dtypes[0], of.logits), normal(of.keys, kv_heads, dim, of.dtypes[0])
    q_idx = normal(of.queries, kv_heads, index_dim, of.dtypes[1])
    k_idx = normal(of.keys, 1 if of.shared else kv_heads, index_dim, of.dtypes[1])
    where: dict[str, Any] = {"block_size": of.size}
    for name, values in (("cu_seqlens", of.bounds), ("q_start", of.starts)):
        if values is not None:
            where[name] = torch.tensor(values, dtype=torch.int32, device=place)
    if of.bounds:  # rows of no document are not read
        for x in (q, k, q_idx, k_idx):
            x[of.bounds[-1] :] = torch.nan
    blocks = top_blocks_by_max(q_idx.double(), k_idx.double(), k=of.k, **where, backend="reference").flip(-1)
    blocks[..., 7, :] = -1  # a token without any

    def run(backend: str, *given: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in given[:2]]
        loss = indexer_kl_loss(*leaves, *given[2:], blocks, index_scale=0.7, **where, backend=backend)
        return loss, *torch.autograd.grad(loss, leaves, torch.tensor(0.3).to(loss))

    given = q_idx, k_idx, q, k
    got = run("triton", *given)
    exact = run("reference", *(x.double().nan_to_num() for x in given))
    assert abs(got[0].double() - exact[0]) <= 2**-17 * (1 + of.logits)
    for name, own, wanted in zip(("q_idx", "k_idx"), got[1:], exact[1:], strict=True):
        error, largest = (own.double() - wanted).abs().max(), wanted.abs().max()
        assert own.dtype == of.dtypes[1]
        assert error <= (torch.finfo(own.dtype).eps / 2 + 2**-15 * of.logits) * largest, (
            f"{name}: {error / largest:.1e}"
        )
    if place != "cpu":
        assert all(map(torch.equal, got, run("triton", *given)))


@pytest.mark.interpreted
@pytest.mark.parametrize(("case", "capability"), [*zip(CASES, [80, 89, 120, 80, 89], strict=True)])
def test_on_a_cpu(case: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are so small that all work comes in chunks."""
    monkeypatch.setattr(device, "memory_class", lambda _: compiled.CLASSES[capability])
    monkeypatch.setattr(kv_outer, "PARTIAL_BYTES", 1 << 9)
    monkeypatch.setattr(lists, "PAIRS", 8)
    with compiled.executing(capability):
        check(CASES[case], "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("case", {**CASES, **ON_GPUS})
def test_on_a_gpu(case: str) -> None:
    check({**CASES, **ON_GPUS}[case], "cuda")


@pytest.mark.interpreted
def test_values_that_are_not_numbers() -> None:
    """They reach the loss, as in the reference; tokens that do not see them leave it alone."""
    q_idx, k_idx, q, k = (torch.randn(1, 40, heads, 16).half() for heads in (1, 1, 2, 1))
    blocks = torch.tensor([0, 1]).expand(1, 1, 40, 2)
    for x in (q_idx, k_idx, q, k):
        spoilt = [y.clone() if y is x else y for y in (q_idx, k_idx, q, k)]
        spoilt[[y is x for y in (q_idx, k_idx, q, k)].index(True)][:, 20] = -torch.nan  # not what unwritten memory has
        with compiled.executing(80):
            assert indexer_kl_loss(*spoilt, blocks, block_size=16, backend="triton").isnan()
            unseen = [y[:, :20] for y in spoilt]
            assert indexer_kl_loss(*unseen, blocks[:, :, :20], block_size=16, backend="triton").isfinite()


@pytest.mark.interpreted
def test_the_first_of_equal_scores_gets_the_gradient() -> None:
    """Also in blocks of two steps."""
    q_idx, k_idx = (torch.ones(1, tokens, 1, 16, dtype=torch.bfloat16, requires_grad=True) for tokens in (1, 160))
    q, k = torch.randn(1, 1, 2, 16).bfloat16(), torch.randn(1, 160, 1, 16).bfloat16()
    with compiled.executing(80):
        loss = indexer_kl_loss(q_idx, k_idx, q, k, torch.tensor([[[[0, 1]]]]), block_size=80, backend="triton")
        (dk,) = torch.autograd.grad(loss, k_idx)
    assert dk[0, :, 0, 0].nonzero().flatten().tolist() == [0, 80]


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "slots"), [(0, 2), (6, 0), (6, 2)])
def test_no_blocks(tokens: int, slots: int) -> None:
    q_idx, k_idx = (torch.randn(1, tokens, heads, 16, requires_grad=True) for heads in (2, 1))
    q, k = (torch.randn(1, tokens, heads, 16) for heads in (4, 2))
    with compiled.executing(80):
        nothing = torch.full((1, 2, tokens, slots), -1)
        loss = indexer_kl_loss(q_idx, k_idx, q, k, nothing, block_size=16, backend="triton")
        gradients = torch.autograd.grad(loss, (q_idx, k_idx))
    assert loss == 0
    assert not any(x.any() for x in gradients)
