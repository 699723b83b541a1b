"""Side streams of a call, and their waits, with stand-ins for CUDA's streams and events."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cute_kernels.runtime import replay
from cute_kernels.runtime import streams as side_streams
from cute_kernels.runtime.launches import launch
from cute_kernels.runtime.replay import Recording, replayed
from cute_kernels.runtime.streams import STREAMS, SideStreams

DEVICE = torch.device("cuda:1")

# Which streams


class Stream:
    """As CUDA has it: who waits for a stream that is captured becomes part of the capture, unless that cannot be."""

    capture: object = None

    def wait_stream(self, stream: Stream) -> None:
        assert stream.capture is self.capture or self.capture is None, "cudaErrorStreamCaptureIsolation"
        self.capture = stream.capture


def test_calls_share_streams_and_captures_have_their_own_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Stream]] = []

    def new_streams(*_: object) -> list[Stream]:
        made.append([Stream() for _ in range(STREAMS)])
        return made[-1]

    def used(stream: Stream) -> int:
        """Number of the streams that a call on this one gets."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.capture is not None)
        return made.index(side_streams._streams(DEVICE, stream))  # type: ignore[arg-type]

    monkeypatch.setattr(side_streams, "new_streams", new_streams)
    monkeypatch.setattr(side_streams, "is_captured", lambda stream: stream.capture is not None)
    monkeypatch.setattr(side_streams, "_SHARED", {})
    monkeypatch.setattr(side_streams, "_LENT", {})
    first, second, third, plain, other = (Stream() for _ in range(5))
    first.capture, second.capture = "first", "second"
    assert [used(x) for x in (first, plain, first, second, other)] == [0, 1, 0, 2, 1]
    for stream in (second, *made[2]):  # this capture ends
        stream.capture = None
    third.capture = "third"
    assert [used(x) for x in (third, first, second, plain)] == [2, 0, 1, 1]
    for stream in (first, *made[0]):
        stream.capture = None
    first.capture = "another"
    assert [used(x) for x in (first, third)] == [0, 2]


# Who waits for whom


class LateStream:
    """A stream whose launches run when `Late.run` chooses."""

    def __init__(self) -> None:
        self.after: set[int] = set()
        """Launches that the next one follows."""

    def record_event(self) -> set[int]:
        return self.after.copy()

    def wait_event(self, event: set[int]) -> None:
        self.after |= event

    def wait_stream(self, stream: LateStream) -> None:
        self.after |= stream.after


class Late:
    """Launches in any order that streams and events allow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = self.main = LateStream()
        self.sides = [LateStream() for _ in range(STREAMS)]
        self.launches: list[tuple[set[int], Callable[[], Any]]] = []
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(side_streams, "_streams", lambda *_: self.sides)

    def launch(self, run: Callable[[], Any]) -> None:
        self.launches.append((self.current.after, run))
        self.current.after = {len(self.launches) - 1}

    def run(self, draw: random.Random) -> None:
        """Run all: those of a stream that is drawn for each call as late, or as early, as is allowed."""
        done: set[int] = set()
        preferred: Any = draw.choice([min, max, draw.choice])
        while len(done) < len(self.launches):
            ready = [i for i, (after, _) in enumerate(self.launches) if i not in done and after <= done]
            chosen = preferred(ready)
            self.launches[chosen][1]()
            done.add(chosen)
        self.launches.clear()
        for stream in (self.main, *self.sides):
            stream.after = set()


def test_an_exception_leaves_the_current_stream_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)

    def two_chunks() -> None:
        with SideStreams(DEVICE) as side:
            for number in range(2):
                side.begin()
                with side.run():
                    late.launch(lambda: None)
                    if number == 1:
                        raise ValueError("in a chunk")

    with pytest.raises(ValueError, match="in a chunk"):
        two_chunks()
    assert late.current is late.main
    assert late.main.after == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_memory_of_recorded_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes memory that a chunk on a side stream may still read or write."""
    monkeypatch.setattr(replay, "DEVICES", {"cpu"})
    replay.forget()
    late, draw = Late(monkeypatch), random.Random(seed)
    rows = [draw.randint(1, 600) for _ in range(draw.randint(1, 6))]

    def scale(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        late.launch(partial(torch.mul, x, factor, out=out))

    def chunks(x: torch.Tensor, out: torch.Tensor) -> dict[str, torch.Tensor]:
        before = torch.empty_like(x)
        launch(scale, x, before, 2.0)
        with SideStreams(DEVICE) as side:
            for part, written in zip(before.split(rows), out.split(rows), strict=True):
                side.begin()
                lists = torch.empty_like(part)
                launch(scale, part, lists, 3.0)
                with side.run(lists):
                    inside = torch.empty_like(part)
                    launch(scale, lists, inside, 5.0)
                    launch(scale, inside, written, 7.0)
        after = torch.empty_like(x)
        launch(scale, out, after, 11.0)
        result = torch.empty_like(x)
        launch(scale, after, result, 13.0)
        return {"result": result}

    for _ in range(8):
        x = torch.randn(sum(rows))
        out = torch.empty_like(x)
        got = replayed([x, out], "chunks", partial(chunks, x, out))["result"]
        late.run(draw)
        torch.testing.assert_close(got, x * 2 * 3 * 5 * 7 * 11 * 13)
    assert [known for known in replay._KNOWN.values() if isinstance(known, Recording)]
