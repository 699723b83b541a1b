"""Block-sparse attention, and choices of blocks, on NVIDIA GPUs: interpreted on a CPU against fp64, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dispatch
from cute_kernels import block_sparse, support
from nsa import NSAConfig, block_sparse_attention, top_blocks_by_max
from nsa.inputs import NSAInputs
from tests.ptx import Order, Schedule
from tests.support import cases, kv_outer_cases
from tests.support.block_sparse_cases import Case, make
from tests.support.hardware import EITHER
from tests.support.indexer_cases import Case as Choice
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

BF16 = Case(150, count=2, group=2, kv_heads=1, dim=64, dtype=torch.bfloat16, indices=torch.int32)

CASES = {
    "blocks of 64": BF16,
    "blocks of 128, int64": replace(BF16, queries=200, size=128, dim=128, indices=torch.int64),
    "one token continues": replace(
        BF16, queries=1, keys=131, count=3, group=16, dim=128, size=128, batch=2, kv_heads=2
    ),
    "starts inside": replace(BF16, queries=20, keys=170, start=101, v_dim=128),
    "documents": replace(BF16, queries=(70, 0, 1, 40), behind=3, group=3, dtype=torch.float16),
    "documents that continue": replace(BF16, queries=(70, 0, 3, 1), keys=(150, 30, 3, 131), behind=3),
    "starts in documents": replace(BF16, queries=(40, 2), keys=(170, 90), start=(101, 0), behind=2, size=128),
    "starts": replace(BF16, queries=9, keys=170, start=(3, 161), batch=2, kv_heads=2, dtype=torch.float16),
    "not causal": replace(BF16, causal=False, batch=2, kv_heads=2),
    "documents, not causal": replace(BF16, queries=(70, 0, 1, 130), behind=3, causal=False),
    "starts, group of 64": replace(BF16, queries=5, keys=140, start=(100, 0), batch=2, group=64),
    "group of 64": replace(BF16, queries=70, group=64, size=128),
    "logits in the hundreds": replace(BF16, logits=100.0, dtype=torch.float16),
    "group of 1": replace(BF16, queries=70, group=1, kv_heads=2, count=5),
}
HERE = [("sm_90", True, "blocks of 128, int64"), ("sm_90", True, "documents that continue")]


@pytest.mark.interpreted
@pytest.mark.parametrize(("arch", "late", "case"), cases.some(HERE, GPUS, (True, False), CASES))
def test_interpreted(arch: str, late: bool, case: str) -> None:
    with interpreted_gpu(arch, Schedule(late=late)):
        make(CASES[case]).check(backend="cute")


@pytest.mark.interpreted
def test_keys_behind_the_last_query_are_not_read() -> None:
    made = make(replace(BF16, queries=2, keys=70, start=(3, 60), batch=2))
    with interpreted_gpu("sm_90"):
        expected = made.gradients(backend="cute")
        for x in (made.k, made.v):
            x[0, 5:], x[1, 62:] = torch.nan, torch.inf
        for one, other in zip(made.gradients(backend="cute"), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90", *cases.rest("sm_100")])
def test_barriers_put_shared_memory_in_order(arch: str) -> None:
    with interpreted_gpu(arch, Schedule(observer=Order)):
        make(replace(BF16, queries=90, size=128, dim=128)).check(backend="cute")


# Which calls are taken


def ask(*, case: Case = BF16, op: str = "block_sparse_attention", **options: Any) -> str | None:
    """The reason for a refusal on Hopper."""
    made = make(case)
    where = {name: made.keywords.get(name) for name in ("cu_seqlens", "cu_seqlens_k", "q_start")}
    inputs = NSAInputs(made.q, made.k, made.v, **where).narrow(NSAConfig.paper())
    facts = {"inputs": inputs, "block_size": case.size, "causal": case.causal, "softmax_scale": 0.125}
    facts |= {"slots": case.count, "k": 16, **options}
    check = support.check_block_sparse_attention if op == "block_sparse_attention" else support.check_top_blocks_by_max
    return check(dispatch.Call(op, "cuda:0", made.q.dtype, options=facts))


REFUSED = {
    "size": (
        {"block_size": 32},
        {},
        "takes block_size 64, 128, 192, 256, got 32",
        "takes block_size 64 or 128, got 32",
    ),
    "group": (
        {},
        {"group": 129, "queries": 2},
        "attends to given blocks with at most 64 heads a group, got 129",
        "takes at most 128 heads that share keys, got 129",
    ),
    "dim": ({}, {"dim": 32}, "takes head dims 64 and 128, got D=32", "takes head dims 64 and 128, got D=32"),
    "dtype": ({}, {"dtype": torch.float32}, "takes bfloat16 and float16, got float32", None),
    "heads": (
        {},
        {"group": 64, "kv_heads": 8, "queries": 2},
        "takes tokens of q and of do that lie fewer than 2^15 elements apart, got 32768",
        None,
    ),
    "many blocks": ({"k": 65}, {}, None, "chooses at most 64 blocks per token, got k=65"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_give_reasons(case: str) -> None:
    options, changes, attention, selection = REFUSED[case]
    changed = replace(BF16, **changes)
    if attention is not None:
        assert ask(case=changed, **options) == attention
    if selection is not None:
        assert ask(case=changed, op="top_blocks_by_max", **options) == selection


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", CASES)
def test_takes(case: str) -> None:
    assert ask(case=CASES[case]) is None


# On a GPU


LARGE = replace(BF16, queries=2000, count=16, group=16, dim=128, size=128)


@EITHER
@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, kernels: str) -> None:
    make(CASES[case], device="cuda").check()


@EITHER
@pytest.mark.cuda
@pytest.mark.parametrize(
    "changes",
    [{}, {"size": 64}, {"size": 64, "dim": 64, "dtype": torch.float16}, {"size": 256, "count": 5}, {"group": 1}],
    ids=str,
)
def test_long_on_a_gpu(changes: dict[str, Any], kernels: str) -> None:
    make(replace(LARGE, **changes), device="cuda").check()


def test_blocks_far_behind_the_last_key_stay_there() -> None:
    """Indices of 64 bits, of which 32 would be those of other blocks."""
    far = torch.tensor([0, 1, 2**32, 2**40 + 3, -(2**63), -1])
    q, k, v = (torch.zeros(1, 6, heads, 8) for heads in (2, 1, 1))
    options: dict[str, Any] = {"block_size": 64, "causal": True, "softmax_scale": 1.0}
    (*_, indices), _ = block_sparse._prepare(q, k, v, far.expand(1, 1, 6, 6), None, None, None, **options)
    assert indices[0, 0, 0].tolist() == [0, 1, 2**31 - 1, 2**31 - 1, -1, -1]


@EITHER
@pytest.mark.cuda
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_no_queries_give_no_gradients(batch: int, queries: int, starts: bool, kernels: str) -> None:
    q, k, v = (
        torch.randn(batch, n, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n, heads in ((queries, 4), (9, 2), (9, 2))
    )
    blocks = torch.zeros(batch, 2, queries, 3, dtype=torch.int32, device="cuda")
    q_start = torch.zeros(batch, dtype=torch.int32, device="cuda") if starts else None
    out = block_sparse_attention(q, k, v, blocks, block_size=64, q_start=q_start)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))


@pytest.mark.cuda
def test_the_same_bits_each_time_and_in_a_graph() -> None:
    made = make(LARGE, device="cuda")
    first, second = made.gradients(), made.gradients()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.run()
    graph.replay()
    assert torch.equal(captured, first[0])


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 3, 16, 64])
def test_without_wgmma(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs other than Hopper's."""
    for module in ("kv_outer", "kv_outer_backward", "forced", "query_outer"):
        monkeypatch.setattr(f"cute_kernels.attend.{module}.has_warpgroups", lambda _: False)
    for inputs in (
        kv_outer_cases.make(517, group, 2, 128, count=5),
        kv_outer_cases.make([300, 1, 216], group, 1, 64, 128, count=5, size=128),
    ):
        inputs.check()
        inputs.check_forward(query_outer=True)
    kv_outer_cases.make([300, 1, 216], group, 1, 128, count=5, forced=(1, 2)).check()
    kv_outer_cases.make(517, group, 2, 128, count=14, forced=(1, 2)).check_gated("projected")


@pytest.mark.cuda
def test_query_outer_for_some_tokens_repeats_the_whole() -> None:
    """From any token that begins a tile the same bits; and the same bits each time."""
    from cute_kernels.attend.query_outer import query_outer_forward

    inputs = kv_outer_cases.make(1000, 16, 2, 128, count=8)
    whole = inputs.forward(query_outer=True)
    for start, stop in ((0, 1000), (8, 704), (640, 1000)):
        tensors = inputs.q[:, start:stop], inputs.k[:, :stop], inputs.v[:, :stop], inputs.indices[:, :, start:stop]
        o, lse = query_outer_forward(*tensors, size=inputs.size, scale=inputs.scale, first_token=start)
        assert torch.equal(o, whole[0][:, start:stop])
        assert torch.equal(lse, whole[1][..., start:stop])


# Choices of blocks by the best score of a block's keys, against loops


CHOICES = {
    "one token": Choice(1, 70, heads=1),
    "two row tiles": Choice(300, heads=4, k=3, dim=128, size=128),
    "many blocks": Choice(3, 2300, heads=1),
    "more than a chunk of 128": Choice(2, 4400, heads=1, k=3, size=128),
    "equal scores in parts": Choice(2, 6200, heads=2, k=3, whole=True),
    "whole numbers": Choice(260, heads=4, k=2, whole=True),
    "own keys, fp16": Choice(70, heads=2, shared=False, batch=2, local=2, dtype=torch.float16),
    "long lists": Choice(4, 2500, heads=2, k=37, local=0),
    "documents": Choice((70, 0, 1, 130, 5), heads=3, k=2, behind=3),
    "documents across tiles": Choice((33, 200, 40), heads=16, size=128, dim=128),
    "documents that continue": Choice((70, 0, 2, 130), (200, 90, 2, 131), heads=1, behind=3),
    "starts in documents": Choice((2, 30), (200, 150), (170, 0), heads=16, size=128, dim=128),
    "starts": Choice(3, 300, (0, 290), batch=2, k=3, dtype=torch.float16),
}
CHOICES_HERE = [("sm_90", "documents that continue"), ("sm_90", "many blocks"), ("sm_100", "whole numbers")]
"""Cases for ordinary runs: "many blocks" runs in two parts; the kernels of both are checked for races."""


@pytest.mark.interpreted
@pytest.mark.parametrize("late", [True, *cases.rest(False)])
@pytest.mark.parametrize(("arch", "case"), cases.some(CHOICES_HERE, GPUS, CHOICES))
def test_choices_interpreted(arch: str, case: str, late: bool) -> None:
    with interpreted_gpu(arch, Schedule(late=late)):
        CHOICES[case].check(backend="cute")


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_90", *cases.rest("sm_100")])
def test_barriers_put_lists_in_order(arch: str) -> None:
    """Six steps of keys, of two documents: stages are used twice, and lists merged within a document and at its end."""
    with interpreted_gpu(arch, Schedule(observer=Order)):
        Choice((500, 130), heads=1, size=64).check(backend="cute")
        Choice(1, 2300, heads=1).check(backend="cute")  # in two parts


@EITHER
@pytest.mark.cuda
@pytest.mark.parametrize("case", CHOICES)
def test_choices_on_a_gpu(case: str, kernels: str) -> None:
    CHOICES[case].check("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("change", [{}, {"size": 128, "k": 16, "dim": 128}, {"k": 64}], ids=str)
def test_long_choices_on_a_gpu(change: dict[str, Any]) -> None:
    replace(Choice(500, 20000, heads=4), **change).check("cuda")
    replace(Choice((1000, 1, 0, 700), heads=4, behind=9), **change).check("cuda")


@pytest.mark.cuda
def test_the_same_choices_each_time() -> None:
    q_idx, k_idx = (torch.randn(1, 9000, heads, 128, device="cuda").bfloat16() for heads in (4, 1))
    first, *others = (top_blocks_by_max(q_idx, k_idx, block_size=128, k=16) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
