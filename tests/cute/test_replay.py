"""Replay of recorded calls (runtime/replay.py): the same results as without, whatever the call does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cute_kernels import backward, forward
from cute_kernels.runtime import graphs, recorder, replay
from cute_kernels.runtime.launches import launch
from cute_kernels.runtime.replay import Recording, replayed
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support.fake_graphs import FakeGraph, scale
from tests.support.helpers import in_threads, make_qkv
from tests.support.interpreted_gpu import interpreted_gpu

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with CPU tensors are replayed too."""
    monkeypatch.setattr(replay, "DEVICES", {"cpu"})


def recordings() -> list[Recording]:
    return [known for known in replay._KNOWN.values() if isinstance(known, Recording)]


# Programs of launches, operators and views


def scale_listed(tensors: tuple[Tensor, list[Tensor]], factor: float) -> None:
    x, (out,) = tensors
    scale(x, out, factor)


def drawn_program(seed: int) -> Callable[[list[Tensor]], dict[str, Tensor | None]]:
    """A call that makes new tensors, views and sums of others at random, and forgets some."""

    def program(tensors: list[Tensor]) -> dict[str, Tensor | None]:
        draw, known = random.Random(seed), [*tensors]
        for _ in range(30):
            x = draw.choice(known)
            rows = x.shape[0]
            match draw.randrange(8):
                case 0:
                    known.append(torch.empty((draw.randint(1, rows), 4)))
                    launch(scale, x, known[-1], 0.5)
                case 1:
                    known.append(torch.zeros((rows, 4)))
                    known[-1][: rows // 2] = x[: rows // 2, :1]
                case 2:
                    known.append(x[draw.randrange(rows) :, 1:3])
                case 3:
                    known.append(x.cumsum(0))
                case 4:
                    both = torch.empty((2, rows, 4))
                    first, second = both.unbind(0)
                    launch(scale_listed, (x, [first]), 2.0)
                    launch(scale, first, second, -1.0)
                    known.append(second)
                case 5:
                    known.append(torch.empty_like(x).copy_(x).transpose(0, 1).contiguous().T)
                case 6:
                    x.add_(1.0)
                case 7 if len(known) > len(tensors) + 2:
                    known.pop(draw.randrange(len(tensors), len(known)))
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


def test_recording_holds_no_memory() -> None:
    freed = []

    def chain(x: Tensor) -> dict[str, Any]:
        first, second = torch.empty_like(x), torch.empty_like(x)
        launch(scale, x, first, 2.0)
        launch(scale, first, second, 2.0)
        storage = StorageWeakRef(first.untyped_storage())
        del first
        freed.append(storage.expired())
        return {"out": second}

    x = torch.randn(10, 4)
    for _ in range(3):
        replayed([x], "chain", lambda: chain(x))
    assert freed == [True, True], "one call runs, one is recorded"


@pytest.mark.parametrize("reason", ["value", "elsewhere", "hidden", "large", "another device"])
def test_what_is_not_replayed(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, calls = torch.ones(4, 4), []
    if reason == "large":
        monkeypatch.setattr(replay, "LARGEST", 15)

    def body(x: Tensor) -> dict[str, Any]:
        calls.append(reason)
        out = torch.empty_like(x)
        match reason:
            case "value":
                launch(scale, x, out, x.sum().item())
            case "elsewhere":
                launch(scale, elsewhere, out, 1.0)
            case "another device":
                launch(lambda x, out, other: scale(x, out, 1.0), x, out, torch.empty(3, device="meta"))
            case "hidden":
                launch(lambda held, x, out: scale(x, out, 1.0), {"x": elsewhere}, x, out)
            case _:
                launch(scale, x, out, 1.0)
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


def test_threads() -> None:
    """First calls, recordings and replays at once, each thread with tensors of its own."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(60):
            x = torch.full((3 + i % 4, 4), float(number))

            def body(given: Tensor = x) -> dict[str, Any]:
                out = torch.empty_like(given)
                launch(scale, given, out, 3.0)
                return {"out": out + torch.zeros_like(out)}

            if not torch.equal(replayed([x], "threads", body)["out"], x * 3):
                wrong.append(number)

    in_threads(4, work)
    assert not wrong
    assert len(recordings()) == 4


# NSA


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
    # Entries as of test_prefill.py: kernels that both take are compiled once
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
