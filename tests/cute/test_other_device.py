"""Tensors on a GPU that is not the current one: every op has the bits that it has where that GPU is current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from nsa import (
    NSACache,
    attention_residual,
    block_sparse_attention,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_with_cache,
    top_blocks_by_max,
)
from nsa.neighborhood.backward_cache import _is_captured
from tests.support.block_sparse_cases import Case, make
from tests.support.hardware import DETERMINISTIC
from tests.support.helpers import LARGE, make_qkv

pytestmark = [pytest.mark.cuda, pytest.mark.cuda_extra]

OTHER = torch.device("cuda", 1)
RUNS = 6
"""The first one compiles, the second records, and later ones are replayed (runtime/replay.py), the last ones as graphs
where memory comes again (runtime/graphs.py)."""
BUSY_CYCLES = 50_000_000
"""Some 25 ms: what is launched on another stream than the tensors' meets memory that is not written yet."""

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that are written late on OTHER's current stream."""
    with torch.cuda.device(OTHER):
        torch.cuda._sleep(BUSY_CYCLES)
        return [x.clone() for x in tensors]


def check(run: Run, *tensors: Tensor) -> None:
    """Run first where another device is current, so that compiling and caching happen there."""
    assert all(x.device == OTHER for x in tensors)
    with torch.cuda.stream(torch.cuda.Stream(OTHER)), torch.cuda.device(0):  # OTHER has a current stream of its own
        elsewhere = [run(fresh(tensors)) for _ in range(RUNS)]
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(OTHER)
    with torch.cuda.device(OTHER):
        here = run(tensors)
    for results in elsewhere:
        for got, want in zip(results, here, strict=True):
            assert got.device == OTHER
            assert not got.isnan().any()
            assert torch.equal(got, want)


def with_gradients(function: Callable[..., Tensor]) -> Run:
    """out and all gradients; the last tensor is the gradient of out."""

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        *leaves, do = (x.detach() for x in tensors)
        out = function(*(x.requires_grad_() for x in leaves))
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    return run


def on_other(tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k, v of bf16."""
    return list(make_qkv(tokens, 8, 2, 64, dtype=torch.bfloat16, device=str(OTHER), seed=seed))


@DETERMINISTIC
@pytest.mark.parametrize("preset", LARGE)
def test_nsa(preset: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return nsa(q, k, v, gate_proj_weight=weight, config=LARGE[preset], deterministic=True)

    weight, do = on_other(3, seed=1)[0][0].transpose(0, 1) / 8, on_other(3000, seed=2)[0]
    check(with_gradients(call), *on_other(3000), weight.contiguous(), do)


@pytest.mark.parametrize("preset", LARGE)
def test_step_with_a_cache(preset: str) -> None:
    """After a prompt."""

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = {"heads": 8, "heads_kv": 2, "dim": 64, "dtype": torch.bfloat16}
        cache = NSACache.empty(LARGE[preset], 1, 600, **sizes, device=str(OTHER))
        chunks = [slice(0, 500), *(slice(i, i + 1) for i in range(500, 505))]
        return [nsa_with_cache(*(x[:, tokens] for x in tensors), cache) for tokens in chunks]

    check(call, *on_other(505))


def test_blocks() -> None:
    q, k, _ = on_other(700)
    check(lambda tensors: [top_blocks_by_max(*tensors, block_size=64, k=3)], q[:, :, :2], k[:, :, :1])
    made = make(Case(700, count=4, group=4, kv_heads=2, dim=64, dtype=torch.bfloat16), device=str(OTHER))
    attend = partial(block_sparse_attention, block_indices=made.block_indices, **made.keywords)
    check(with_gradients(attend), made.q, made.k, made.v, made.do)


def test_neighborhood_attention() -> None:
    for options in ({"kernel_size": 9}, {"kernel_size": 8, "dilation": 2, "causal": True}):
        attend = partial(neighborhood_attention, backend="triton", **options)
        check(with_gradients(attend), *on_other(2000), on_other(2000, seed=1)[0])
    check(lambda tensors: [neighborhood_attention(*tensors, kernel_size=65, backend="cute")], *on_other(2000))


def test_attention_residual() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 2, 300, 512), (512,), (512,), (2, 300, 512)
    tensors = (torch.randn(shape, generator=generator).to(OTHER, torch.bfloat16) for shape in shapes)
    check(with_gradients(attention_residual), *tensors)


@pytest.mark.parametrize("preset", LARGE)
def test_captured_and_replayed(preset: str) -> None:
    """A capture on OTHER's stream, while another device is current; so are its replays."""
    tensors = on_other(3000)
    with torch.cuda.device(OTHER):
        want = nsa_forward(*tensors, config=LARGE[preset])
    static = [torch.zeros_like(x) for x in tensors]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(OTHER)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(OTHER)), torch.cuda.device(0):
        out = nsa_forward(*static, config=LARGE[preset])
    for to, x in zip(static, tensors, strict=True):
        to.copy_(x)
    torch.cuda.synchronize(OTHER)
    graph.replay()
    torch.cuda.synchronize(OTHER)
    assert torch.equal(out, want)


def test_a_capture_is_seen_where_another_device_is_current() -> None:
    x = torch.zeros(3, device=OTHER)
    torch.cuda.synchronize(OTHER)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(OTHER)), torch.cuda.device(0):
        x.add_(1)
        assert _is_captured(OTHER)
        assert not _is_captured(torch.device("cuda", 0))
