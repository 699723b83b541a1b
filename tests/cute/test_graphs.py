"""CUDA graphs in place of recorded launches (runtime/graphs.py): which calls take them, and that results are the same.

On a CPU with stand-ins for graphs, which hold addresses only, as CUDA's do.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.runtime import graphs, replay
from cute_kernels.runtime.launches import launch
from cute_kernels.runtime.replay import replayed
from tests.support.fake_graphs import FakeGraph, scale
from tests.support.hardware import ATOMIC_FREE
from tests.support.helpers import in_threads

CUDA = pytest.mark.cuda


HAS_OTHER_THREADS = graphs._has_other_threads


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "DEVICES", {"cpu"})
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    monkeypatch.setattr(graphs, "Graph", FakeGraph)
    monkeypatch.setattr(graphs, "_has_other_threads", lambda: False)  # which other tests may have left
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(FakeGraph, "launched", 0)
    yield
    graphs.forget()


# Which calls become graphs


class Calls:
    """Calls at addresses; says how each was launched."""

    def __call__(self, key: object, *, fails: bool = False) -> str:
        def kernel(ran: list[str]) -> None:
            if fails:
                raise RuntimeError("no")
            ran.append("kernel")

        ran: list[str] = []
        before = FakeGraph.launched
        graphs.launch(key, torch.device("cpu"), lambda: iter([(kernel, (ran,))]))
        assert len(ran) < 2, "launched twice"
        return "graph" if FakeGraph.launched > before else "plain" if ran else "nothing"


@pytest.mark.usefixtures("on_cpu")
def test_the_second_call_at_its_addresses_becomes_a_graph() -> None:
    call = Calls()
    assert [call(key) for key in "abacba"] == ["plain", "plain", "graph", "plain", "graph", "graph"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("daemon", [False, True])
def test_nothing_is_captured_beside_a_thread_that_may_synchronize(
    daemon: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor by one, even a daemon. It is said once."""
    monkeypatch.setattr(graphs, "_has_other_threads", HAS_OTHER_THREADS)
    monkeypatch.setattr(graphs, "_TOLD", threading.Event())
    caplog.set_level("INFO", "nsa_kernels")
    call, called, ends, told = Calls(), threading.Event(), threading.Event(), list[str]()
    assert call("a") == "plain"

    def work() -> None:
        told.append(call("a"))
        called.set()
        ends.wait()

    thread = threading.Thread(target=work, name="mine", daemon=daemon)
    thread.start()
    called.wait()
    try:
        beside = call("b"), call("b")
    finally:
        ends.set()
        thread.join()
    assert beside == ("plain", "graph" if daemon else "plain")
    assert told == ["plain"]
    assert [record.getMessage().endswith("threads, as mine") for record in caplog.records] == [True]
    assert [call(key) for key in "ab"] == ["graph", "graph"]


@pytest.mark.usefixtures("on_cpu")
def test_what_was_not_launched_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 3)
    call = Calls()
    assert [call(key) for key in "abcd" * 3] == ["plain"] * 12, "more in turn than are remembered"
    assert [call(key) for key in "xxyzxwxv"] == ["plain", "graph", "plain", "plain", "graph", "plain", "graph", "plain"]
    assert len(graphs._KNOWN) == 3


@pytest.mark.usefixtures("on_cpu")
def test_a_callers_graph_gets_launches_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Calls()
    for _ in range(2):
        call("a")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert [call("a"), call("b"), call("b")] == ["plain"] * 3
    assert [call("a"), call("b")] == ["graph", "plain"]


@pytest.mark.usefixtures("on_cpu")
def test_an_error_reaches_the_caller_each_time() -> None:
    call = Calls()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            call("a", fails=True)


@pytest.mark.usefixtures("on_cpu")
def test_launches_that_cannot_be_captured_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    call, captures = Calls(), FakeGraph.__init__

    def refused(graph: FakeGraph, device: torch.device, launches: Any) -> None:
        captures(graph, device, launches)
        raise RuntimeError("CUDA answers cudaErrorMemoryAllocation")

    assert call("a") == "plain"
    monkeypatch.setattr(FakeGraph, "__init__", refused)
    with pytest.warns(RuntimeWarning, match="could not be captured: CUDA answers cudaErrorMemoryAllocation"):
        assert call("a") == "plain"
    assert call("a") == "plain", "without another attempt, or another warning"
    monkeypatch.setattr(FakeGraph, "__init__", captures)
    assert [call(key) for key in "abb"] == ["plain", "plain", "graph"]


# Recorded calls


def chain(tensors: list[Tensor], seed: int) -> dict[str, Tensor]:
    """Launches, views and what PyTorch writes into given memory, at random; nothing is computed into new memory."""
    draw, known = random.Random(seed), [*tensors]
    for _ in range(12):
        x = draw.choice(known)
        match draw.randrange(5):
            case 0:
                known.append(torch.empty((draw.randint(1, 7), 4)))
                launch(scale, x, known[-1], 0.5)
            case 1:
                known.append(torch.zeros((7, 4)))
                known[-1][:1] = x[:1, :1]
            case 2:
                known.append(x[draw.randrange(x.shape[0]) :, :])
            case 3:
                first, second = torch.empty((2, x.shape[0], 4)).unbind(0)
                launch(scale, x, first, 2.0)
                known.append(torch.cumsum(first, 1, out=second))
            case 4:
                x.add_(1.0)
    launch(scale, known[-1], last := torch.empty((3, 4)), -1.0)
    return {"a": known[-1], "b": last}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("seed", range(20))
def test_drawn_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, and inputs that a call changes, wherever tensors lie: each in one of a few places."""
    draw = random.Random(seed)

    empty_strided, places, numbers = torch.empty_strided, dict[int, list[Tensor]](), itertools.count()

    def one_of_two(*size: Any, **how: Any) -> Tensor:
        number = next(numbers)
        if number not in places:
            places[number] = [empty_strided(*size, **how) for _ in range(2)]
        return draw.choice(places[number]).detach()

    monkeypatch.setattr(torch, "empty_strided", one_of_two)  # as recordings allocate
    given = [torch.randn(7, 4) for _ in range(3)]
    for _ in range(100):
        tensors = draw.sample(given, 2)
        for x in tensors:
            x.normal_()
        copies = [x.clone() for x in tensors]
        expected, numbers = chain(copies, seed), itertools.count()
        got = replayed(tensors, "chain", lambda: chain(tensors, seed))  # noqa: B023
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))
    assert FakeGraph.launched > 10


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("why", ["allocates", "few"])
def test_what_never_is_a_graph(why: str) -> None:
    def body(x: Tensor) -> dict[str, Any]:
        out = torch.empty_like(x)
        for _ in range(graphs.FEWEST - 1):
            launch(scale, x, out, 2.0)
        if why == "allocates":
            out += x.sum(0)
        return {"out": out}

    x = torch.randn(4, 4)
    for _ in range(50):
        got = replayed([x], why, lambda: body(x))["out"]
        assert torch.equal(got, 2 * x + (x.sum(0) if why == "allocates" else 0))
    assert FakeGraph.launched == 0
    assert not graphs._KNOWN


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("captures", [False, True])
def test_threads(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if graphs were made beside others, as beside daemons."""
    monkeypatch.setattr(graphs, "_has_other_threads", lambda: not captures)
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((5, 4), float(number))

        def body() -> dict[str, Any]:
            steps = [torch.empty_like(x) for _ in range(3)]
            for given, out in zip([x, *steps], steps, strict=False):
                launch(scale, given, out, 3.0)
            return {"out": steps[-1]}

        for _ in range(200):
            if not torch.equal(replayed([x], "threads", body)["out"], x * 27):
                wrong.append(number)

    in_threads(4, work)
    assert not wrong


# NSA on a GPU


def training_step(batch: int = 1, tokens: int = 2048) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the projection of gates as leaves, and a gradient of out."""
    torch.manual_seed(0)
    shapes = (batch, tokens, 8, 128), (batch, tokens, 2, 128), (batch, tokens, 2, 128), (8, 3, 128)
    leaves = [(0.3 * torch.randn(shape, device="cuda")).bfloat16().requires_grad_() for shape in shapes]
    return leaves, torch.randn_like(leaves[0])


def step(leaves: list[Tensor], do: Tensor) -> list[Tensor]:
    from nsa import nsa

    q, k, v, weight = leaves
    out = nsa(q, k, v, gate_proj_weight=weight)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@CUDA
@ATOMIC_FREE
def test_bits_of_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs and launched one by one; also on another stream, inside a caller's graph, and of several layers."""
    graphs.forget()
    replay.forget()
    leaves, do = training_step()
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "DEVICES", set())
        expected = step(leaves, do)

    def check(got: list[Tensor]) -> None:
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))

    for _ in range(8):
        check(step(leaves, do))
    made = [graph for graph in graphs._KNOWN.values() if isinstance(graph, graphs.Graph)]
    assert len(made) >= 2, "forward and backward"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            got = step(leaves, do)
    torch.cuda.current_stream().wait_stream(side)
    check(got)
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        got = step(leaves, do)
    for x in got:
        x.zero_()
    capture.replay()
    check(got)
    for _ in range(4):  # calls whose memory lives at once
        layers = [step(leaves, do) for _ in range(3)]
        for got in layers:
            check(got)


@CUDA
def test_launches_that_cannot_be_captured_are_launched_on_a_gpu() -> None:
    x = torch.zeros(5, device="cuda")

    def add() -> None:
        torch.cuda.synchronize()  # refused during a capture, which it ends
        x.add_(1)

    def call() -> None:
        graphs.launch("synchronizes", x.device, lambda: iter([(add, ())]))

    call()
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        call()
    call()
    assert x.tolist() == [3.0] * 5
    graphs.forget()


@CUDA
def test_graphs_hold_no_tensors() -> None:
    graphs.forget()
    leaves, do = training_step()
    for _ in range(4):
        step(leaves, do)
    gc.collect()  # tensors of earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        step(leaves, do)
    assert any(isinstance(graph, graphs.Graph) for graph in graphs._KNOWN.values())
    assert torch.cuda.memory_allocated() == before
