"""Who waits for whom on side streams, with stand-ins for CUDA's streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cute_kernels import side_streams
from cute_kernels.side_streams import STREAMS, SideStreams


class Streams:
    """What was launched and waited for, and the current stream and device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.main = self.current = Stream(self, "main")
        self.device = 0
        made = iter(range(STREAMS))
        patch.setattr(torch.cuda, "device", self.guard)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "set_stream", self.set_stream)
        patch.setattr(
            torch.cuda,
            "Stream",
            lambda device, priority=0: Stream(self, "first" if priority < 0 else f"side {next(made)}"),
        )
        forget_streams()

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def launch(self, name: str) -> None:
        self.current.last = name
        self.log.append(f"{self.current.name}: {name}")


def forget_streams() -> None:
    side_streams._streams.cache_clear()
    side_streams._first_stream.cache_clear()


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name, self.last = streams, name, ""

    def record_event(self) -> str:
        return self.last

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    yield Streams(monkeypatch)
    forget_streams()


def three_passes(streams: Streams, fails: bool = False) -> None:
    with SideStreams(torch.device("cuda:1")) as side:
        assert streams.device == 1
        for number in range(3):
            side.begin()
            streams.launch(f"lists {number}")
            with side.run(object()):
                streams.launch(f"pass {number}")
                if fails and number == 1:
                    raise ValueError("in a pass")
            assert streams.current is streams.main


def test_each_waits_for_what_it_reads(streams: Streams) -> None:
    three_passes(streams)
    assert streams.log == [
        "main: lists 0",
        "side 0 waits for lists 0",
        "side 0: pass 0",
        "main: lists 1",
        "side 1 waits for lists 1",
        "side 1: pass 1",
        "main waits for pass 0",  # whose memory the third pass may take
        "main: lists 2",
        "side 0 waits for lists 2",
        "side 0: pass 2",
        "main waits for pass 1",
        "main waits for pass 2",
    ]
    assert streams.current is streams.main
    assert streams.device == 0


def passes_with_lists(streams: Streams, fails: bool = False) -> None:
    def made() -> Iterator[int]:
        for number in range(4):
            if fails and number == 2:
                raise ValueError("in lists")
            streams.launch(f"lists {number}")
            yield number

    streams.launch("choices")
    with SideStreams(torch.device("cuda:1")) as side:
        for number in side.ahead(made()):
            side.begin()
            with side.run(object()):
                streams.launch(f"pass {number}")
            assert streams.current is streams.main


def test_lists_are_made_a_pass_ahead(streams: Streams) -> None:
    passes_with_lists(streams)
    assert streams.log == [
        "main: choices",
        "first waits for choices",
        "first: lists 0",
        "first: lists 1",
        "side 0 waits for choices",
        "side 0 waits for lists 0",  # not 1
        "side 0: pass 0",
        "first: lists 2",
        "side 1 waits for choices",
        "side 1 waits for lists 1",
        "side 1: pass 1",
        "first: lists 3",
        "main waits for pass 0",
        "first waits for pass 0",  # whose lists' memory the next ones may take
        "side 0 waits for choices",
        "side 0 waits for lists 2",
        "side 0: pass 2",
        "main waits for pass 1",
        "first waits for pass 1",
        "side 1 waits for choices",
        "side 1 waits for lists 3",
        "side 1: pass 3",
        "main waits for pass 2",
        "first waits for pass 2",
        "main waits for pass 3",
        "first waits for pass 3",
        "main waits for lists 3",
    ]


def test_an_exception_in_lists_leaves_the_current_stream_waiting(streams: Streams) -> None:
    with pytest.raises(ValueError, match="in lists"):
        passes_with_lists(streams, fails=True)
    assert streams.log[-3:] == ["main waits for pass 0", "first waits for pass 0", "main waits for lists 1"]
    assert streams.current is streams.main
    assert streams.device == 0


def test_an_exception_leaves_the_current_stream_waiting(streams: Streams) -> None:
    with pytest.raises(ValueError, match="in a pass"):
        three_passes(streams, fails=True)
    assert streams.log[-2:] == ["main waits for pass 0", "main waits for pass 1"]
    assert streams.current is streams.main
    assert streams.device == 0


def test_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("asked for CUDA")

    for name in ("device", "current_stream", "set_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    ran = []
    with SideStreams(torch.device("cpu")) as side:
        for number in side.ahead(range(2)):
            side.begin()
            with side.run():
                ran.append(number)
    assert ran == [0, 1]
