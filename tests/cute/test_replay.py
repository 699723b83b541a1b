"""Calls that come again (runtime/replay.py, runtime/graphs.py): the same results as without, whatever the call does.

On a CPU with stand-ins for graphs, which hold addresses only, as CUDA's do.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import backward, forward
from cute_kernels.runtime import graphs, recorder, replay
from cute_kernels.runtime.launches import launch
from cute_kernels.runtime.replay import Recording, replayed
from nsa import NSAConfig, nsa
from nsa.inputs import NSAInputs
from tests.support.helpers import in_threads, make_qkv
from tests.support.interpreted_gpu import interpreted_gpu

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

CUDA = pytest.mark.cuda
HAS_OTHER_THREADS = graphs._has_other_threads


@pytest.fixture(autouse=True)
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with CPU tensors are replayed too."""
    monkeypatch.setattr(replay, "DEVICES", {"cpu", "cuda"})


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And become graphs."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    monkeypatch.setattr(graphs, "Graph", FakeGraph)
    monkeypatch.setattr(graphs, "_has_other_threads", lambda: False)  # which other tests may have left
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(FakeGraph, "launched", 0)
    yield
    graphs.forget()


def recordings() -> list[Recording]:
    return [known for known in replay._KNOWN.values() if isinstance(known, Recording)]


# Programs of launches, operators and views


def scale(x: Tensor, out: Tensor, factor: float) -> None:
    """A kernel: as many elements of x as out has, over and over."""
    numbers = torch.arange(out.numel()) % x.numel()
    out.copy_(x.flatten()[numbers].reshape(out.shape) * factor)


def scale_listed(tensors: tuple[Tensor, list[Tensor]], factor: float) -> None:
    x, (out,) = tensors
    scale(x, out, factor)


def drawn_program(seed: int, *, computes: bool = True) -> Callable[[list[Tensor]], dict[str, Tensor | None]]:
    """A call that makes new tensors, views and sums of others at random, and forgets some.

    Args:
        computes: PyTorch computes into new memory, as no graph can.
    """

    def program(tensors: list[Tensor]) -> dict[str, Tensor | None]:
        draw, known = random.Random(seed), [*tensors]
        for _ in range(30):
            x = draw.choice(known)
            rows = x.shape[0]
            match draw.randrange(8 if computes else 6):
                case 0:
                    known.append(torch.empty((draw.randint(1, rows), 4)))
                    launch(scale, x, known[-1], 0.5)
                case 1:
                    known.append(torch.zeros((rows, 4)))
                    known[-1][: rows // 2] = x[: rows // 2, :1]
                case 2:
                    known.append(x[draw.randrange(rows) :, -2:])
                case 3:
                    both = torch.empty((2, rows, 4))
                    first, second = both.unbind(0)
                    launch(scale_listed, (x, [first]), 2.0)
                    launch(scale, first, second, -1.0)
                    known.append(second)
                case 4:
                    x.add_(1.0)
                case 5 if len(known) > len(tensors) + 2:
                    known.pop(draw.randrange(len(tensors), len(known)))
                case 6:
                    known.append(x.cumsum(0))
                case 7:
                    known.append(torch.empty_like(x).copy_(x).transpose(0, 1).contiguous().T)
        return {"a": known[-1], "none": None, "b": known[-2], "given": tensors[0], "empty": tensors[0].new_empty(0)}

    return program


@pytest.mark.parametrize("seed", range(40))
def test_drawn_programs(seed: int) -> None:
    """Inputs that a program changes are changed alike; what an earlier call returned stays as it was."""
    program = drawn_program(seed)
    earlier: list[tuple[Tensor, Tensor]] = []
    for call in range(5):
        tensors = [torch.randn(7, 4) for _ in range(3)]
        copies = [x.clone() for x in tensors]
        expected = program(copies)
        got = replayed(tensors, "program", lambda given=tensors: program(given))
        assert got.keys() == expected.keys()
        assert got["none"] is None
        for name in ("a", "b", "given"):
            assert torch.equal(got[name], expected[name]), (call, name)
        assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))
        assert all(torch.equal(x, y) for x, y in earlier)
        earlier += [(got[name], got[name].clone()) for name in ("a", "b") if not any(got[name] is x for x in tensors)]
    assert len(recordings()) == 1


def test_temporaries_share_memory_and_none_is_kept() -> None:
    def chain(x: Tensor) -> dict[str, Any]:
        for _ in range(10):
            new = torch.empty_like(x)
            launch(scale, x, new, 2.0)
            x = new
        return {"out": x}

    x = torch.randn(1000, 4)
    for _ in range(3):
        got = replayed([x], "chain", lambda: chain(x))
        assert torch.equal(got["out"], x * 1024)
    (recording,) = recordings()
    sizes = sorted(allocate.args[0] for _, allocate in recording._allocations)
    assert sizes == [(1000, 4), (2 * 32 * recorder.ALIGNMENT,)]  # out; one workspace, of 16000 bytes twice
    assert not [x for step in recording._steps for x in step.arguments if isinstance(x, Tensor)]


ELSEWHERE = torch.ones(4, 4)
NOT_REPLAYED: dict[str, Callable[[Tensor, Tensor], None]] = {
    "value": lambda x, out: launch(scale, x, out, x.sum().item()),
    "elsewhere": lambda x, out: launch(scale, ELSEWHERE, out, 1.0),
    "hidden": lambda x, out: launch(lambda held, x, out: scale(x, out, 1.0), {"x": ELSEWHERE}, x, out),
    "large": lambda x, out: launch(scale, x, out, 1.0),
    "another device": lambda x, out: launch(lambda x, out, _: scale(x, out, 1.0), x, out, x.to("meta")),
}


@pytest.mark.parametrize("reason", NOT_REPLAYED)
def test_what_is_not_replayed(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    if reason == "large":
        monkeypatch.setattr(replay, "LARGEST", 15)

    def body(x: Tensor) -> dict[str, Any]:
        calls.append(reason)
        out = torch.empty_like(x)
        NOT_REPLAYED[reason](x, out)
        return {"out": out}

    for _ in range(5):
        x = torch.randn(4, 4)
        replayed([x], reason, lambda given=x: body(given))
    assert len(calls) == 5
    assert not recordings()


def test_what_tells_calls_apart() -> None:
    calls = []

    def body(x: Tensor, y: Tensor) -> dict[str, Any]:
        calls.append(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        launch(scale, x + y, out, 1.0)
        return {"out": out}

    def call(x: Tensor, y: Tensor, option: int = 0) -> None:
        for _ in range(3):
            assert torch.equal(replayed([x, y, None], option, lambda: body(x, y))["out"], x + y)
        assert len(calls) == 2, "two calls run, the third does not"
        calls.clear()

    x, y = torch.randn(2, 8, 8)
    call(x, y)
    call(x, y, option=1)
    call(x, x)
    call(x.T, y)
    call(x[:4], y[:4])
    call(x[4:], y[4:])
    call(x.double(), y.double())
    whole = torch.randn(8, 9)
    call(whole[:, 1:], y)
    call(torch.randn(8, 9)[:, :8], y)
    assert len(recordings()) == 9


def test_tensors_of_one_memory_are_told_from_those_of_two() -> None:
    """A recording makes views of a memory, so which of the given tensors share one is part of the key."""

    def call(x: Tensor, y: Tensor) -> None:
        def body() -> dict[str, Any]:
            out = torch.empty_like(y)
            launch(scale, y[:, 1:], out, 2.0)
            return {"out": out.add_(x)}

        for _ in range(3):
            expected = torch.empty_like(y)
            scale(y[:, 1:], expected, 2.0)
            assert torch.equal(replayed([x, y], "views", body)["out"], expected + x)

    one, two, three = torch.randn(3, 2, 4, 4)
    call(one[0], one[1])
    call(two.clone()[0], three.clone()[1])  # the same sizes, strides and offsets
    assert len(recordings()) == 2


def test_recordings_are_bounded_and_what_comes_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 3)
    x, ran = torch.ones(3), []

    def body() -> dict[str, Any]:
        ran.append("usual")
        return {"out": x + 1}

    for other in range(9):
        replayed([x], "usual", body)
        for _ in range(2):
            replayed([x], other, lambda: {"out": x + 2})
    assert ran == ["usual"] * 2
    assert len(replay._KNOWN) == len(recordings()) == 3


def test_an_error_is_not_recorded() -> None:
    x = torch.ones(3)

    def fails() -> dict[str, Any]:
        raise KeyError("once")

    replayed([x], 0, lambda: {"out": x + 1})
    with pytest.raises(KeyError, match="once"):
        replayed([x], 0, fails)
    assert not recordings()
    for _ in range(3):
        assert replayed([x], 0, lambda: {"out": x + 1})["out"].tolist() == [2, 2, 2]
    assert recordings()


# Graphs


class OnlyViews(TorchDispatchMode):
    """Calls that are allowed while a graph is captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ in ("as_strided", "detach", "view"), function
        return function(*args, **(kwargs or {}))


def without_tensors(x: Any) -> Any:
    """An argument, with addresses in place of tensors."""
    if isinstance(x, Tensor):
        return x.data_ptr(), x.dtype, x.shape, x.stride()
    return [without_tensors(part) for part in x] if isinstance(x, (list, tuple)) else x


def from_memory(x: Any) -> Any:
    match x:
        case (int(address), torch.dtype() as dtype, size, stride):
            elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
            if elements == 0:
                return torch.empty(size, dtype=dtype)
            memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
            return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)
        case list():
            return [from_memory(part) for part in x]
    return x


class FakeGraph:
    """Launches on a CPU."""

    launched = 0

    def __init__(self, device: torch.device, launches: Any) -> None:
        with OnlyViews():
            self.nodes = [(function, without_tensors(arguments)) for function, arguments in launches]

    def launch(self) -> None:
        FakeGraph.launched += 1
        for function, arguments in self.nodes:
            function(*from_memory(arguments))


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


@pytest.mark.usefixtures("graphs_on_cpu")
def test_the_second_call_at_its_addresses_becomes_a_graph() -> None:
    call = Calls()
    assert [call(key) for key in "abacba"] == ["plain", "plain", "graph", "plain", "graph", "graph"]


@pytest.mark.usefixtures("graphs_on_cpu")
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


@pytest.mark.usefixtures("graphs_on_cpu")
def test_what_was_not_launched_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 3)
    call = Calls()
    assert [call(key) for key in "abcd" * 3] == ["plain"] * 12, "more in turn than are remembered"
    assert [call(key) for key in "xxyzxwxv"] == ["plain", "graph", "plain", "plain", "graph", "plain", "graph", "plain"]
    assert len(graphs._KNOWN) == 3


@pytest.mark.usefixtures("graphs_on_cpu")
def test_a_callers_graph_gets_launches_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Calls()
    for _ in range(2):
        call("a")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert [call("a"), call("b"), call("b")] == ["plain"] * 3
    assert [call("a"), call("b")] == ["graph", "plain"]


@pytest.mark.usefixtures("graphs_on_cpu")
def test_an_error_reaches_the_caller_each_time() -> None:
    call = Calls()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            call("a", fails=True)


@pytest.mark.usefixtures("graphs_on_cpu")
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


@pytest.mark.usefixtures("graphs_on_cpu")
@pytest.mark.parametrize("seed", range(20))
def test_drawn_programs_as_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, and inputs that a call changes, wherever tensors lie: each in one of a few places."""
    draw, program = random.Random(seed), drawn_program(seed, computes=False)
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
        expected, numbers = program(copies), itertools.count()
        got = replayed(tensors, "program", lambda: program(tensors))  # noqa: B023
        assert all(torch.equal(got[name], expected[name]) for name in ("a", "b", "given"))
        assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))
    assert FakeGraph.launched > 10


@pytest.mark.usefixtures("graphs_on_cpu")
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


@pytest.mark.usefixtures("graphs_on_cpu")
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


# NSA, interpreted


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.cuda_extra
@pytest.mark.parametrize("as_graphs", [False, True])
def test_nsa_interpreted(as_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a replayed forward and backward, with kernels interpreted, are those of calls that run as they are."""
    launched = []

    def launch_as_graph(key: Any, device: torch.device, launches: Callable[[], Any]) -> None:
        launched.append(key)
        FakeGraph(device, launches()).launch()

    if as_graphs:
        monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
        monkeypatch.setattr(graphs, "launch", launch_as_graph)
    # Entries as of prompts in test_decode.py: kernels that both take are compiled once
    pools = {"compress_block_size": 16, "compress_stride": 8}
    config = NSAConfig(**pools, select_block_size=64, num_selected_blocks=2, window_size=50)

    def step(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        weight = torch.randn(2, 3, 64) * 0.1
        inputs = NSAInputs(*make_qkv(70, 2, 1, 64, dtype=torch.bfloat16), gate_proj_weight=weight.bfloat16())
        do = torch.randn_like(inputs.q)
        out, saved = forward.nsa_saving(inputs, config, recompute=False)
        gradients = backward.nsa_backward(inputs, config, saved, do)
        alone, _ = forward.nsa(inputs, config, aux=False)
        return [out, alone, *gradients.values()]

    with interpreted_gpu("sm_90"):
        for seed in range(3):
            got = step(seed)
        assert len(recordings()) == 3
        monkeypatch.setattr(replay, "DEVICES", set())
        expected = step(2)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert len(launched) == (3 if as_graphs else 0)


# NSA on a GPU


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
    leaves = make_qkv(2048, 8, 2, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do = torch.randn_like(leaves[0])

    def step() -> None:
        torch.autograd.grad(nsa(*leaves), leaves, do)

    for _ in range(4):
        step()
    gc.collect()  # tensors of earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        step()
    assert any(isinstance(graph, graphs.Graph) for graph in graphs._KNOWN.values())
    assert torch.cuda.memory_allocated() == before
