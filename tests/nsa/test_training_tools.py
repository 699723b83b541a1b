"""NSAttention among what training programs are made of: workers that load data, checkpointing, autocast, compiling."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nsa import NSAttention
from tests.support.cases import rest, some
from tests.support.helpers import LARGE, SMALL

# FlashAttention-4, CuTe DSL and torch.compile warn about themselves; Python does about fork in programs with threads.
pytestmark = pytest.mark.filterwarnings("default")

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
PRESETS = pytest.mark.parametrize("preset", LARGE)


def make_layer(device: str, preset: str, **options: Any) -> NSAttention:
    width, configs = (256, LARGE) if device == "cuda" else (32, SMALL)
    torch.manual_seed(1)
    return NSAttention(width, 4, 2, config=configs[preset], **options).to(device)


def make_hidden(device: str, tokens: int, batch: int = 1) -> Tensor:
    """fp32 `[B,N,width]`; on a GPU tokens are ten times as many."""
    width, times = (256, 10) if device == "cuda" else (32, 1)
    return torch.randn(batch, times * tokens, width).to(device)


def step(function: Callable[[Tensor], Tensor], layer: NSAttention, x: Tensor) -> list[Tensor]:
    """out and the gradients of x and of all parameters, under autocast."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16):
        out = function(leaf)
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16
    return [out.detach(), *(tensor.grad for tensor in (leaf, *layer.parameters()))]


def assert_same_step(got: list[Tensor], expected: list[Tensor], device: str) -> None:
    """Equal bits on a CPU; a GPU's backward adds up in any order, in fp32, so gradients there may round otherwise."""
    assert torch.equal(got[0], expected[0])
    for x, y in zip(got[1:], expected[1:], strict=True):
        allowed = float(y.abs().max()) * 2**-6 if device == "cuda" else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=allowed)


# Checkpointing, autocast, compiling


@DEVICES
@PRESETS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_under_autocast_changes_nothing(device: str, preset: str, reentrant: bool) -> None:
    layer, x = make_layer(device, preset), make_hidden(device, 50, 2)
    kept: Any = partial(checkpoint, layer, use_reentrant=reentrant)
    assert_same_step(step(kept, layer, x), step(layer, layer, x), device)


@DEVICES
@pytest.mark.parametrize(("preset", "compress"), some([("paper", "linear")], LARGE, ["linear", None]))
def test_compiles_once_for_all_lengths(device: str, preset: str, compress: str | None) -> None:
    """Forward and backward, under autocast: no graph is recorded for a second length."""
    layer = make_layer(device, preset, compress=compress)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (75, 90, 64, 200, 33):
        x = make_hidden(device, tokens)
        got, expected = (step(function, layer, x) for function in (compiled, layer))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=float(b.abs().max()) * 2**-6)
    assert counter.frame_count == 1


# Workers that load data


class Documents(Dataset[tuple[Any, ...]]):
    """Hidden states, bounds of documents, and what a layer makes of some tokens, in a worker that got the layer."""

    def __init__(self, layer: NSAttention) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(index)
        hidden = torch.randn(48 + index, self.layer.q_proj.in_features, generator=generator)
        with torch.no_grad():
            mixed = self.layer(hidden[None, :40])
        bounds = torch.tensor([0, 17, 17, 47, len(hidden)], dtype=torch.int32)
        return hidden, bounds, mixed, get_worker_info() is not None


@DEVICES
@pytest.mark.parametrize("method", ["spawn", *rest("fork", "forkserver")])
def test_workers_load_data(device: str, method: str) -> None:
    """While the program trains, which it did before they were started too: on a GPU, CUDA is up when they fork."""
    layer = make_layer(device, "paper")
    step(layer, layer, make_hidden(device, 50))
    documents = Documents(copy.deepcopy(layer).cpu())
    documents.layer.zero_grad()
    expected = [documents[index] for index in range(len(documents))]
    context = multiprocessing.get_context(method)
    loader: DataLoader[tuple[Any, ...]] = DataLoader(
        documents, batch_size=None, num_workers=1, multiprocessing_context=context, timeout=120
    )
    for (*got, in_worker), (*wanted, _) in zip(loader, expected, strict=True):
        assert in_worker
        torch.testing.assert_close(got, wanted)  # a worker has one thread
        results = step(partial(layer, cu_seqlens=got[1].to(device)), layer, got[0].to(device))
        assert all(torch.isfinite(result).all() for result in results)
