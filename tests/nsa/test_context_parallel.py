"""Context and tensor parallelism on gloo: sequences or heads divided among processes, against one process."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.distributed import ContextParallel
from nsa.distributed.layout import Layout
from tests.support import cases as parameters
from tests.support import context_cases as cases
from tests.support import fsdp_cases
from tests.support import headwise_cases as headwise
from tests.support.helpers import SMALL, make_qkv
from tests.support.ranks import Ranks

SIZES = (2, 3, 4)


Run = Callable[..., None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(*SIZES) as processes:
        yield processes


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    """Ranks with a GPU each, in groups of all SIZES for which there are GPUs."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip("needs two GPUs")
    with Ranks(*(SIZES if gpus >= max(SIZES) else SIZES[:1]), seconds=300, backend="nccl") as processes:
        yield processes


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=[pytest.mark.cuda, pytest.mark.cuda_extra])])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a case on the first ranks; over NCCL, in fp64, by the reference."""
    processes = request.getfixturevalue("ranks" if request.param == "gloo" else "nccl")

    def run_case(size: int, case: Callable[..., Any], *arguments: Any) -> None:
        if size not in processes.sizes:
            pytest.skip(f"needs {size} GPUs")
        processes.run(size, *([cases.by_reference] if request.param == "nccl" else []), case, *arguments)

    return run_case


@pytest.fixture
def alone() -> Iterator[cases.MakeCP]:
    """ContextParallel of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield partial(ContextParallel, dist.group.WORLD)
    dist.destroy_process_group()


def assert_all_raise(outcomes: list[tuple[str, Any]], start: str, *words: str) -> None:
    """Every rank, with a message that begins so and holds these words."""
    for rank, (kind, message) in enumerate(outcomes):
        assert kind == "raised", (rank, message)
        assert message.startswith(start), (rank, message)
        for word in words:
            assert word.format(device="cpu", rank=rank) in message, (rank, message)


# A group of one


def test_alone(alone: cases.MakeCP) -> None:
    cases.equals_whole(alone, SMALL["seed"], (0, 50), ["plain", "learned"], "zigzag")
    cases.packs_equal_whole(alone, SMALL["paper"], [20, 0, 33], 3, ["plain"], "contiguous")


def test_a_default_device_is_not_that_of_the_host(alone: cases.MakeCP) -> None:
    cp, x = alone(tile=16), torch.randn(1, 40, 4, 8)
    expected = cp.nsa(x, x, x, config=SMALL["seed"])
    with torch.device("meta"):
        assert torch.equal(cp.nsa(x, x, x, config=SMALL["seed"]), expected)
        assert torch.equal(cp.unshard(x), x)
        assert cp.positions(40).device.type == "cpu"


def test_destroying_the_group_ends_it() -> None:
    """Whoever still has the object: threads of a group that lived on could abort the process at its end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cp = ContextParallel(dist.group.WORLD, tile=16)  # type: ignore[arg-type]
    q = torch.randn((1, 5, 2, 4), requires_grad=True)
    cp.nsa(q, q, q, config=SMALL["seed"]).sum().backward()
    group, late = weakref.ref(cp.group), (cp.nsa(q, q, q, config=SMALL["seed"]), cp.unshard(q))
    dist.destroy_process_group()
    assert group() is None
    for call in (lambda: cp.nsa(q, q, q, config=SMALL["seed"]), *(out.sum().backward for out in late)):
        with pytest.raises(RuntimeError, match="group of this ContextParallel has been destroyed: create"):
            call()


def test_bounds_made_under_inference_mode(alone: cases.MakeCP) -> None:
    """They have no version counter, and are read again after a change."""
    cp, x = alone(), torch.arange(9)
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
        assert cp.positions(9, cu_seqlens=cu_seqlens).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
        cu_seqlens[1] = 3
    assert cp.positions(9, cu_seqlens=cu_seqlens).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert torch.equal(cp.shard(x, 0, cu_seqlens=cu_seqlens), x)


def bounded(*bounds: int, dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    return {"cu_seqlens": torch.tensor(bounds, dtype=dtype)}


X, QKV = torch.zeros(9), make_qkv(9, batch=None)
LEADING = "x must be [B,N,...], or packed [T,...] with cu_seqlens, unless dim is given, got shape [9]"
WRONG_VALUES: list[tuple[Callable[[cases.MakeCP], Any], str]] = [
    (lambda make: make(layout="striped"), "layout must be one of zigzag, contiguous, got 'striped'"),
    (lambda make: make(tile=0), "tile must be at least 1, got 0"),
    (lambda make: make().shard(X, 0, cu_seqlens=torch.tensor([[0]]).int()), "cu_seqlens must have the shape"),
    (lambda make: make().nsa(*QKV, **bounded(1, 5)), "cu_seqlens must start at 0, got 1"),
    (lambda make: make().nsa(*QKV, **bounded(0, 12)), "cu_seqlens must end at most at T=9, got 12"),
    (lambda make: make().shard(torch.zeros(2, 2), 3), "dim must be at most 1, got 3"),
    (lambda make: make().unshard(X.sum(), 0), "x must have a dimension of tokens, got shape []"),
    (lambda make: make().shard(X), LEADING),
    (lambda make: make().unshard(X), LEADING),
    (lambda make: make().shard_labels(X), "input_ids must be [B,N,...], or packed [T,...]"),
    (lambda make: make().shard_labels(X[None].byte()), "ignore_index must be at least 0, got -100"),
]
WRONG_TYPES: list[tuple[Callable[[cases.MakeCP], Any], str]] = [
    (lambda make: make(kv_heads_per_pass=1.5), "kv_heads_per_pass must be an integer, got 1.5"),
    (lambda _: ContextParallel("cp"), "mesh must be a DeviceMesh or a process group, got str"),  # type: ignore[arg-type]
    (lambda make: make().shard(X, 0, **bounded(0, 5, dtype=torch.int64)), "cu_seqlens must be an int32 tensor"),
    (lambda make: make().shard([1, 2]), "x must be a torch.Tensor, got list"),
    (lambda make: make().shard(X.to_sparse(), 0), "x must be a dense tensor, got the layout spars"),
    (lambda make: make().shard_labels(X[None]), "input_ids must have one of the dtypes int64"),
    (lambda make: make().sum(1.0), "x must be a torch.Tensor, got float"),
    (lambda make: make().sum(torch.tensor(True)), "x must be numbers, got bool"),
]
REFUSED = [*((*row, ValueError) for row in WRONG_VALUES), *((*row, TypeError) for row in WRONG_TYPES)]


@pytest.mark.parametrize(("call", "message", "error"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_refusals(alone: cases.MakeCP, call: Callable[..., Any], message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(alone)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_sums_keep_their_dtype(alone: cases.MakeCP, dtype: torch.dtype) -> None:
    x = torch.tensor([3, 5], dtype=dtype)
    torch.testing.assert_close(alone().sum(x), x, rtol=0.0, atol=0.0)


def test_positions_and_labels_of_documents(alone: cases.MakeCP) -> None:
    """Of tokens 10, 11, ... in documents of 3, 0 and 2 tokens and two rows behind them."""
    cp, cu_seqlens = alone(tile=1), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert cp.positions(7, cu_seqlens=cu_seqlens).tolist() == [0, 1, 2, 0, 1, 0, 1]
    labels = cp.shard_labels(torch.arange(10, 17), cu_seqlens=cu_seqlens)
    assert labels.tolist() == [11, 12, -100, 14, -100, -100, -100]
    assert cp.shard_labels(torch.arange(3)[None]).tolist() == [[1, 2, -100]]
    assert cp.shard_labels(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0)


# Several, against one process


ONE_PROCESS: dict[str, tuple[Any, ...]] = {
    "token mode divided anywhere": (4, cases.equals_whole, SMALL["paper"], (61,), ["plain", "learned"], "zigzag", 1),
    "data parallelism and sharded parameters": (4, cases.fsdp_equals_whole, SMALL["seed"], 70),
    "DTensors": (2, cases.takes_dtensors, SMALL["seed"]),
    "a cache of a layer sharded by heads": (2, headwise.continues_with_a_cache),
    "backwards in the order of all": (2, cases.backwards_agree),
}
"""Number of ranks, case and arguments."""
ON_GLOO: dict[str, tuple[Any, ...]] = {
    "tokens in the first dim of packs": (2, cases.divides_along_tokens, True),
    "tokens in the second dim": (2, cases.divides_along_tokens, False),
    "sums rounded once and alike in every run, per tile": (3, cases.rounds_once, SMALL["seed"], 300),
    "sums rounded once and alike in every run, per token": (3, cases.rounds_once, SMALL["paper"], 300),
    "a model under autocast": (2, cases.model_equals_whole, SMALL["paper"], 70, "autocast"),
    "DTensors and tensor parallelism over heads": (4, cases.takes_dtensors, SMALL["seed"], True),
    "heads and sequences divided": (4, headwise.with_divided_sequences),
    "sharded parameters start": (2, fsdp_cases.starts_as_whole),
    "sharded parameters train": (2, fsdp_cases.trains_as_whole, torch.float32, SMALL),
    "sharded parameters train in bf16": (2, fsdp_cases.trains_as_whole, torch.bfloat16, SMALL),
    "a function that compresses learns": (3, cases.learns_as_alone, "zigzag"),
    "no entries": (2, cases.weights_have_gradients_without_entries, {"compress": "linear"}, 60, 1),
    "no tokens": (2, cases.weights_have_gradients_without_entries, {"compress_proj": True}, 200, 256),
    "labels of int8": (2, cases.losses_add_up, torch.int8),
    "labels of uint8": (2, cases.losses_add_up, torch.uint8),
}


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_as_on_one_process(run: Run, case: str) -> None:
    run(*ONE_PROCESS[case])


@pytest.mark.parametrize("case", ON_GLOO)
def test_as_on_one_process_on_gloo(ranks: Ranks, case: str) -> None:
    ranks.run(*ON_GLOO[case])


@pytest.mark.parametrize(
    ("preset", "layout", "size", "lengths"),
    [
        ("seed", "zigzag", 2, (0, 131)),
        ("paper", "contiguous", 2, (0, 1, 50, 131)),
        ("paper", "zigzag", 3, (1, 50)),
        ("seed", "contiguous", 3, (1, 50)),
        ("seed", "zigzag", 4, (3, 131)),
        *parameters.rest(("seed", "contiguous", 2, (0, 131)), ("paper", "zigzag", 2, (0, 131))),
    ],
)
def test_rows_and_gradients_of_one_process(run: Run, preset: str, layout: str, size: int, lengths: Any) -> None:
    """Lengths of no tokens, of fewer tokens than ranks, and that end inside a tile."""
    run(size, cases.equals_whole, SMALL[preset], lengths, ["plain"], layout)


@pytest.mark.parametrize(("preset", "size"), [("paper", 3), ("seed, sparse compressed", 2)])
def test_every_argument(run: Run, preset: str, size: int) -> None:
    config = replace(SMALL[preset], num_init_blocks=1, softmax_scale=0.3)
    run(size, cases.equals_whole, config, (133,), cases.OPTIONS[1:], "zigzag")


@pytest.mark.parametrize(
    ("preset", "layout", "lengths"),
    [
        ("seed", "zigzag", [70, 0, 1, 90]),
        ("paper", "contiguous", [70, 0, 1, 90]),
        ("paper", "zigzag", [5, 0, 70, 1, 33, 16]),
        ("seed", "contiguous", [3]),
        *parameters.rest(("seed", "contiguous", []), ("seed", "contiguous", [5, 0, 70, 1, 33, 16])),
    ],
)
def test_packs(run: Run, preset: str, layout: str, lengths: list[int]) -> None:
    run(3 if len(lengths) == 6 else 2, cases.packs_equal_whole, SMALL[preset], lengths, 3, cases.OPTIONS, layout)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_neighborhood_attention(run: Run, layout: str) -> None:
    run(3 if layout == "zigzag" else 2, cases.neighborhood_equals_whole, (2, 41), layout)


@pytest.mark.parametrize("how", ["plain", "checkpointing", "eager", *parameters.rest("aot_eager")])
def test_models(run: Run, how: str) -> None:
    run(2, cases.model_equals_whole, SMALL["paper"], 70, how)


# Heads divided among ranks


@pytest.mark.parametrize(("how", "sequence"), parameters.product([*headwise.LAYERS, "neighborhood"], [False, True]))
def test_layers_sharded_by_heads(run: Run, how: str, sequence: bool) -> None:
    run(2, headwise.sharded_equals_whole, how, sequence)


@pytest.mark.parametrize("how", parameters.rest(*headwise.LAYERS))
def test_compiled_layers_sharded_by_heads(ranks: Ranks, how: str) -> None:
    ranks.run(2, headwise.sharded_equals_whole, how, True, "aot_eager")


@pytest.mark.parametrize("change", headwise.WRONG)
def test_layers_that_cannot_be_sharded(ranks: Ranks, change: str) -> None:
    assert_all_raise(ranks.outcomes(2, headwise.shards_what_it_cannot, change), headwise.WRONG[change])


# Refusals: on every rank, and the next call works


@pytest.mark.parametrize("change", cases.WRONG_CALLS)
def test_a_rank_that_differs_is_named_on_all(ranks: Ranks, change: str) -> None:
    _, error, words = cases.WRONG_CALLS[change]
    one, wrong, other = ranks.outcomes(3, cases.call_with, change, 1)
    assert_all_raise([one, wrong, other], error, *words)
    assert_all_raise([one, other], error, *([] if change == "rows" else ["rank 1"]))
    ranks.run(3, cases.works)


@pytest.mark.parametrize("change", cases.WRONG_LOSSES)
def test_a_wrong_loss_is_refused_on_all(ranks: Ranks, change: str) -> None:
    _, error, words = cases.WRONG_LOSSES[change]
    wrong, other = ranks.outcomes(2, cases.loss_with, change)
    assert_all_raise([wrong, other], error, *words)
    assert "on rank 0" in other[1]
    ranks.run(2, cases.losses_add_up, torch.int64)


@pytest.mark.parametrize(
    ("kind", "words"), [("shape", "compress must map blocks of k "), ("sizes", "compress is LinearCompression(")]
)
def test_a_wrong_compress_is_refused_on_all(ranks: Ranks, kind: str, words: str) -> None:
    """Also on the ranks that have no entries."""
    *others, last = ranks.outcomes(3, cases.compresses_wrongly, kind)
    assert_all_raise([last], f"ValueError: {words}")
    assert_all_raise(others, f"ValueError: ContextParallel.nsa's compress on rank 2: {words}")
    ranks.run(3, cases.works)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [("backend", "BackendError", ["runs on CUDA devices"]), ("causal", "ValueError", ["causal must be True"])],
)
def test_what_no_rank_can_run(ranks: Ranks, change: str, error: str, words: list[str]) -> None:
    assert_all_raise(ranks.outcomes(2, cases.call_with, change, -1), error, *words)


def test_a_start_that_a_backend_refuses_is_refused_on_all_ranks(ranks: Ranks) -> None:
    """Rank 1 of 2 begins at token 50 of 100, and rank 0 at token 0."""
    assert_all_raise(ranks.outcomes(2, cases.is_refused_on_a_rank, 50), "BackendError: refused, got q_start=50")
    ranks.run(2, cases.is_refused_on_a_rank, 40)


@pytest.mark.parametrize(
    ("where", "failed"), [((), "gather"), (("add_shares", 0), "exchange")], ids=["forward", "backward"]
)
def test_a_rank_that_ends_ends_all(where: tuple[Any, ...], failed: str) -> None:
    with Ranks(3, seconds=5) as three:
        began = time.monotonic()
        *others, last = three.outcomes(3, cases.ends_in_the_middle, 2, *where)
    assert last[0] == "ended"
    assert_all_raise(others, "RuntimeError", failed + " failed on rank {rank} of 3")
    assert all("2" in message.partition("no failure reported by rank")[2] for _, message in others), others
    assert time.monotonic() - began < 30


def test_a_rank_that_is_late_ends_all() -> None:
    with Ranks(2, seconds=2) as two:
        outcomes = two.outcomes(2, cases.stays_away, 3.0)
    words = "agreement on ContextParallel.nsa, call 1 failed on rank 0 of 2", "no failure reported by rank 1"
    assert_all_raise(outcomes[:1], "RuntimeError", *words)


@pytest.mark.parametrize(("op", "how"), cases.DIFFERENT_BACKWARDS)
def test_backwards_in_another_order_are_refused_on_all(ranks: Ranks, op: str, how: str) -> None:
    assert_all_raise(
        ranks.outcomes(3, cases.backwards_differ, op, how, 1),
        "RuntimeError: context parallelism: ranks must run the same calls and backwards in the same order, got ",
        "backward of ContextParallel.",
        " on rank 1 and ",
    )
    ranks.run(3, cases.works)


def test_a_rank_that_goes_on_elsewhere_ends_all(ranks: Ranks) -> None:
    """Its collective meets no message of theirs: each ends with the group's timeout."""
    *others, last = ranks.outcomes(max(SIZES), cases.goes_on_elsewhere, 1.0)
    assert last[0] == "raised"
    words = "agreement on backward of ContextParallel.nsa, call 1 failed on rank", "no failure reported by rank 3"
    assert_all_raise(others, "RuntimeError", *words)


def test_all_ranks_make_it(ranks: Ranks) -> None:
    *others, _ = ranks.outcomes(max(SIZES), cases.makes_none, 1.0)
    words = "all ranks of the group must create a ContextParallel, and within 0:00:01 one did not"
    assert_all_raise(others, "RuntimeError", words)


def test_the_timeout_is_that_of_the_group(alone: cases.MakeCP) -> None:
    group = dist.new_group([0], timeout=timedelta(seconds=11))
    assert ContextParallel(group)._comm.checks.gloo.options._timeout == timedelta(seconds=11)


# Which rank holds what


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = draw(st.lists(st.integers(0, 40), max_size=5))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    kind = draw(st.sampled_from(["zigzag", "contiguous"]))
    return Layout(
        bounds[-1] + draw(st.integers(0, 9)), tuple(bounds), draw(st.integers(1, 6)), kind, draw(st.integers(1, 9))
    )


@given(layouts())
def test_every_token_is_held_once_and_ranks_begin_at_tiles(layout: Layout) -> None:
    held = [token for own in layout.ranges for start, stop in own for token in range(start, stop)]
    assert sorted(held) == list(range(layout.tokens))
    assert sum(layout.lengths) == layout.tokens
    for own in layout.ranges:
        for start, stop in own:
            pieces = layout.pieces((start, stop))
            tokens = [p.first + token for p in pieces for token in range(p.start, p.stop)]
            assert tokens == list(range(start, min(stop, layout.bounds[-1])))
            assert all(piece.start % layout.tile == 0 for piece in pieces)
            assert all(layout.bounds[p.document] == p.first and p.start < p.stop for p in pieces)


def test_zigzag_balances_causal_work() -> None:
    """Pairs of query and key on each rank, of 100,000 tokens on 8 ranks: within a tile of each other."""
    layout = Layout(100_000, (0, 100_000), 8, "zigzag", 256)
    work = [sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in own) for own in layout.ranges]
    assert max(work) - min(work) <= 2 * 256 * 100_000
