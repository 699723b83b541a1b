"""Who waits for whom on side streams, with stand-ins for CUDA's streams and events."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.runtime import replay
from cute_kernels.runtime import streams as side_streams
from cute_kernels.runtime.launches import launch
from cute_kernels.runtime.replay import Recording, replayed
from cute_kernels.runtime.streams import STREAMS, SideStreams

DEVICE = torch.device("cuda:1")


class Streams:
    """What was launched and waited for, what is captured, and the current stream of each thread and the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.local = threading.local()
        self.main = Stream(self, "main")
        self.device = 0
        self.made = itertools.count()
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device", self.guard)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "set_stream", self.set_stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.capture is not None)
        patch.setattr(side_streams, "new_streams", lambda device, _: [self.new() for _ in range(STREAMS)])
        patch.setattr(side_streams, "is_captured", lambda stream: stream.capture is not None)
        patch.setattr(side_streams, "_SHARED", {})
        patch.setattr(side_streams, "_LENT", {})

    @property
    def current(self) -> Stream:
        return getattr(self.local, "current", self.main)

    def new(self) -> Stream:
        return Stream(self, f"side {next(self.made)}")

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def set_stream(self, stream: Stream) -> None:
        self.local.current = stream

    def launch(self, name: str) -> None:
        self.log.append(f"{self.current.name}: {name}")

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        """On a stream that is current meanwhile; ends for all streams that have become part of it."""
        before = self.current
        stream.capture = Capture([stream])
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            for part in stream.capture.streams:
                part.capture = None


class Capture:
    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams


class Event(NamedTuple):
    after: str
    capture: Capture | None


class Stream:
    """As CUDA has it: who waits for a captured event becomes part of the capture, unless that cannot be."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name
        self.capture: Capture | None = None

    def record_event(self) -> Event:
        return Event((self.streams.log or [""])[-1].partition(": ")[2], self.capture)

    def wait_event(self, event: Event) -> None:
        if event.capture is not self.capture:
            assert self.capture is None, "cudaErrorStreamCaptureIsolation"
            assert event.capture is not None
            self.capture = event.capture
            event.capture.streams.append(self)
        self.streams.log.append(f"{self.name} waits for {event.after}")

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def three_chunks(streams: Streams, fails: bool = False) -> None:
    with SideStreams(DEVICE) as side:
        assert streams.device == 1
        for number in range(3):
            side.begin()
            streams.launch(f"lists {number}")
            with side.run(object()):
                streams.launch(f"chunk {number}")
                if fails and number == 1:
                    raise ValueError("in a chunk")
            assert streams.current is streams.main


def test_each_waits_for_what_it_reads(streams: Streams) -> None:
    three_chunks(streams)
    assert streams.log == [
        "main: lists 0",
        "side 0 waits for lists 0",
        "side 0: chunk 0",
        "main: lists 1",
        "side 1 waits for lists 1",
        "side 1: chunk 1",
        "main waits for chunk 0",  # whose memory the third chunk may take
        "main: lists 2",
        "side 0 waits for lists 2",
        "side 0: chunk 2",
        "main waits for chunk 1",
        "main waits for chunk 2",
    ]
    assert streams.current is streams.main
    assert streams.device == 0


def test_an_exception_leaves_the_current_stream_waiting(streams: Streams) -> None:
    with pytest.raises(ValueError, match="in a chunk"):
        three_chunks(streams, fails=True)
    assert streams.log[-2:] == ["main waits for chunk 0", "main waits for chunk 1"]
    assert streams.current is streams.main
    assert streams.device == 0


# Which streams


def used(streams: Streams) -> set[str]:
    """Names of those that a call of two chunks runs on."""
    names = set()
    with SideStreams(DEVICE) as side:
        for _ in range(STREAMS):
            side.begin()
            with side.run():
                names.add(streams.current.name)
    return names


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_calls_of_all_threads_and_streams_share_them(streams: Streams) -> None:
    expected = {"side 0", "side 1"}
    assert used(streams) == expected
    for _ in range(100):
        assert in_thread(lambda: used(streams)) == expected
    streams.set_stream(Stream(streams, "another"))
    assert used(streams) == expected


def test_a_capture_has_its_own_until_it_ends(streams: Streams) -> None:
    capturing = Stream(streams, "capturing")
    with streams.capture(capturing):
        assert used(streams) == {"side 0", "side 1"}
        assert in_thread(lambda: used(streams)) == {"side 2", "side 3"}  # not captured
        assert used(streams) == {"side 0", "side 1"}  # of the same graph

        def capture_too() -> set[str]:
            with streams.capture(Stream(streams, "another")):
                return used(streams)

        assert in_thread(capture_too) == {"side 4", "side 5"}
    assert used(streams) == {"side 2", "side 3"}
    with streams.capture(capturing):
        assert used(streams) == {"side 0", "side 1"}


def test_a_capture_s_are_taken_before_its_first_pass(streams: Streams) -> None:
    """Also while its thread has not yet come to launch anything on them."""
    with streams.capture(Stream(streams, "capturing")), SideStreams(DEVICE):

        def capture_too() -> set[str]:
            with streams.capture(Stream(streams, "another")):
                return used(streams)

        assert in_thread(capture_too) == {"side 2", "side 3"}


# Recorded calls


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
