"""What a long run needs of kernels on an NVIDIA GPU: equal bits, streams, processes, graphs, memory that comes back."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from cute_kernels.runtime import streams
from dispatch import attention_residual, neighborhood_attention
from nsa import NSAConfig, NSAttention, nsa, nsa_forward
from tests.support.cute_cases import gate_weight, like, on_gpu
from tests.support.hardware import ATOMIC_FREE, DETERMINISTIC
from tests.support.helpers import run_child

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

CONFIGS = {
    "tile": NSAConfig(num_selected_blocks=6, window_size=200),
    "token": NSAConfig.paper(num_selected_blocks=6, window_size=200),
}
MODES = pytest.mark.parametrize("mode", CONFIGS)
REPEATS = 200
TOKENS = 3001
MIB = 2**20


def training_step(mode: str, qkv: Sequence[Tensor], weight: Tensor | None = None) -> Callable[[], list[Tensor]]:
    """Returns out and every gradient."""
    weight = gate_weight() if weight is None else weight
    leaves = [x.detach().requires_grad_() for x in (*qkv, weight)]
    do = like(*qkv[0].shape)

    def step() -> list[Tensor]:
        q, k, v, w = leaves
        out = nsa(q, k, v, gate_proj_weight=w, config=CONFIGS[mode], deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    return step


def forward(mode: str, qkv: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    weight = gate_weight(qkv[0].shape[2])
    return lambda: [nsa_forward(*qkv, gate_proj_weight=weight, config=CONFIGS[mode])]


def assert_same(got: list[Tensor], expected: list[Tensor], where: str = "") -> None:
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(x, y), f"{where} result {i}"


# Equal bits


def steps_of(function: Callable[..., Tensor], *inputs: Tensor, gradients: bool) -> Callable[[], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> list[Tensor]:
        out = function(*leaves)
        return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if gradients else ())]

    return step


def windows(kernel_size: int) -> Callable[[], list[Tensor]]:
    attend = partial(neighborhood_attention, kernel_size=kernel_size, dilation=2)
    return steps_of(attend, *on_gpu(2000), gradients=kernel_size <= 96)


STEPS: dict[str, Callable[[], Callable[[], list[Tensor]]]] = {
    "forward per tile": lambda: forward("tile", on_gpu(TOKENS)),
    "forward per token": lambda: forward("token", on_gpu(TOKENS)),
    "training per tile": lambda: training_step("tile", on_gpu(TOKENS)),
    "training per token": lambda: training_step("token", on_gpu(TOKENS)),
    "narrow windows": lambda: windows(48),
    "wide windows": lambda: windows(256),
    "residual": lambda: steps_of(
        attention_residual, like(8, 2, 1000, 1024), like(1024, seed=8), like(1024, seed=9), gradients=True
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=DETERMINISTIC if name.startswith("training") else ()) for name in STEPS]
)
def test_repeats(what: str) -> None:
    step = STEPS[what]()
    first = step()
    for i in range(REPEATS):
        assert_same(step(), first, f"repeat {i}")


# Streams, threads, graphs


@DETERMINISTIC
@MODES
def test_threads_on_streams_of_their_own(mode: str) -> None:
    steps = [training_step(mode, on_gpu(900 + 100 * i, seed=i)) for i in range(4)]
    expected = [step() for step in steps]
    torch.cuda.synchronize()

    def work(i: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = steps[i % 4]()
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(work, range(40))):
            assert_same(results, expected[i % 4], f"call {i}")


@MODES
def test_a_thousand_replays(mode: str) -> None:
    static, weight = on_gpu(1000), gate_weight()
    inputs = [on_gpu(1000, seed=seed) for seed in range(5)]
    expected = [nsa_forward(*qkv, gate_proj_weight=weight, config=CONFIGS[mode]) for qkv in inputs]
    nsa_forward(*static, gate_proj_weight=weight, config=CONFIGS[mode])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa_forward(*static, gate_proj_weight=weight, config=CONFIGS[mode])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        for x, new in zip(static, inputs[i % 5], strict=True):
            x.copy_(new)
        graph.replay()
        wrong += (out != expected[i % 5]).any()
    assert int(wrong) == 0


@DETERMINISTIC
@MODES
def test_a_capture_beside_calls(mode: str) -> None:
    """One thread captures training steps and replays them while another one calls."""
    captured, called = (training_step(mode, on_gpu(tokens, seed=tokens)) for tokens in (1000, 1300))
    expected, expected_call = captured(), called()
    torch.cuda.synchronize()
    captures, calls, done = 10, 0, threading.Event()

    def call() -> None:
        nonlocal calls
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                assert_same(called(), expected_call, f"call {calls}")
                calls += 1

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        try:
            for i in range(captures):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    results = captured()
                for _ in range(3):
                    for x in results:
                        x.zero_()
                    graph.replay()
                    assert_same(results, expected, f"capture {i}")
        finally:
            done.set()
        calling.result()
    assert calls > captures


@ATOMIC_FREE
@pytest.mark.parametrize("options", [{}, {"num_cmp_selected_blocks": 2, "compress_block_size": 4}], ids=["all", "some"])
def test_layer_as_graphed_callables(options: dict[str, int]) -> None:
    """torch.cuda.make_graphed_callables captures forward and backward of a layer: outputs and gradients of plain calls.

    Bit for bit: two heads share keys, and all compressed entries that are seen are one block of keys or chosen blocks,
    so that a sum of FlashAttention-4's atomics has two terms at most, whose order does not matter.
    """
    torch.manual_seed(5)
    config = NSAConfig(num_selected_blocks=3, window_size=100, select_block_size=64, **options)
    layer = NSAttention(256, 4, 2, head_dim=64, config=config, device="cuda", dtype=torch.bfloat16)
    sample = like(1, 3000, 256).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (sample,))
    for seed in range(3):
        torch.manual_seed(seed)
        x, do = (torch.randn_like(sample).requires_grad_() for _ in range(2))
        results = []
        for call in (layer, graphed):
            out = call(x)
            gradients = torch.autograd.grad(out, (x, *call.parameters()), do)
            results.append([result.clone() for result in (out, *gradients)])  # a graph writes into the same memory
        assert_same(results[1], results[0])


@DETERMINISTIC
def test_short_lived_threads() -> None:
    """More of them than PyTorch has streams to hand out, each with one, around captures and replays of a graph."""
    step = training_step("token", on_gpu(1000))
    expected = step()
    torch.cuda.synchronize()

    def work() -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = step()
            torch.cuda.current_stream().synchronize()
        return results

    def threads() -> None:
        for i in range(40):
            with ThreadPoolExecutor(1) as pool:
                assert_same(pool.submit(work).result(), expected, f"thread {i}")

    threads()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            graphs.append((graph, step()))
        threads()
    for graph, results in graphs:
        graph.replay()
        assert_same(results, expected)
    handed_out = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    lent = [of_capture.streams for device in streams._LENT.values() for of_capture in device]
    ours = {stream.cuda_stream for streams in (*lent, *streams._SHARED.values()) for stream in streams}
    assert len(ours) >= 2 * streams.STREAMS
    assert not ours & handed_out


# Processes


def train_in_threads() -> None:
    """First calls of a process from several threads, forward in them and backward in autograd's."""
    steps = [training_step(mode, on_gpu(900 + 100 * i, seed=i)) for i in range(2) for mode in CONFIGS]
    start = threading.Barrier(len(steps))

    def work(step: Callable[[], list[Tensor]]) -> list[Tensor]:
        start.wait()
        return step()

    with ThreadPoolExecutor(len(steps)) as pool:
        cold = list(pool.map(work, steps))
    for got, step in zip(cold, steps, strict=True):
        assert_same(got, step())


@DETERMINISTIC
def test_first_calls_from_threads() -> None:
    """In a process that has compiled nothing. One that hangs says where."""
    call = (
        "import faulthandler; faulthandler.dump_traceback_later(270, exit=True); "
        "from tests.cute.test_reliability import train_in_threads; train_in_threads()"
    )
    environment = {**os.environ, "NSA_KERNELS_JIT_CACHE": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    run_child(call, environment)


# Memory


@pytest.fixture
def scarce() -> Iterator[Callable[[int], None]]:
    """Sets how many bytes may be allocated beside those that are."""
    total = torch.cuda.get_device_properties(0).total_memory

    def allow(extra: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved() + extra) / total, 1.0))

    yield allow
    torch.cuda.set_per_process_memory_fraction(1.0)


@MODES
@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=DETERMINISTIC)], ids=["forward", "training"])
def test_running_out_of_memory(mode: str, backward: bool, scarce: Callable[[int], None]) -> None:
    """Wherever an allocation fails, the error is PyTorch's, what the call took comes back, and the next call works."""
    qkv = on_gpu(16384, 16, 2)
    step = training_step(mode, qkv, gate_weight(16)) if backward else forward(mode, qkv)
    step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    needed = torch.cuda.max_memory_allocated() - before
    failures = 0
    for tenth in range(10):
        scarce(needed * tenth // 10)
        try:
            again = step()
        except torch.OutOfMemoryError:
            failures += 1
        else:
            del again
        gc.collect()
        torch.cuda.synchronize()
        held = before + sum(x.numel() * x.element_size() for x in results)
        assert comes_down_to(held + MIB), f"{torch.cuda.memory_allocated() - held} bytes more at {tenth} tenths"
    assert failures >= 3  # memory that the allocator holds already serves the larger limits
    scarce(torch.cuda.get_device_properties(0).total_memory)
    assert_same(step(), results)


def comes_down_to(limit: int) -> bool:
    """Whether no more bytes are allocated, within a second.

    The error of a backward holds its frames, and these tensors; autograd's own thread may let go of it a little later.
    """
    end = time.monotonic() + 1
    while torch.cuda.memory_allocated() > limit and time.monotonic() < end:
        time.sleep(0.01)
    return torch.cuda.memory_allocated() <= limit
