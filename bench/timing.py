"""Time and peak memory of one call, on whatever device it runs."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
BUSY_CYCLES = 2_000_000  # Cycles of the GPU's clock, about a millisecond: longer than a host takes to start a graph


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call (20th, 50th and 80th percentile) and the memory beyond what was in use before, in GiB.

    peak_gib is None where the platform cannot tell.
    """

    ms_p20: float
    ms_p50: float
    ms_p80: float
    peak_gib: float | None
    repeats: int

    @property
    def fields(self) -> dict[str, float]:
        return {"ms_p20": self.ms_p20, "ms_p50": self.ms_p50, "ms_p80": self.ms_p80}

    def per(self, calls: int) -> Timing:
        """Time of each call, if so many were timed together."""
        return replace(self, ms_p20=self.ms_p20 / calls, ms_p50=self.ms_p50 / calls, ms_p80=self.ms_p80 / calls)

    def holding(self, tensors: Sequence[Tensor]) -> Timing:
        """With the memory of tensors that were in use before."""
        if self.peak_gib is None:
            return self
        return replace(self, peak_gib=self.peak_gib + sum(tensor.nbytes for tensor in tensors) / GIB)


def measure(
    call: Callable[[], Any],
    device: torch.device,
    *,
    seconds: float = 2.0,
    most: int = 100,
    host: bool = True,
    warm: bool = False,
) -> Timing:
    """Run `call` once to warm up and to see its memory, then for about `seconds`, and at least three times.

    Args:
        host: False leaves out, on CUDA, the time the host takes to start the call: the GPU is kept busy meanwhile, for
            a millisecond. For replays of a graph, and for calls as they are made while the GPU works on earlier ones.
            A host that is slower than the GPU all the way still shows.
        warm: The call ran before and its memory does not matter.
    """
    peak_gib, times = None if warm else peak_memory(call, device), list[float]()
    while len(times) < 3 or (sum(times) < seconds * 1e3 and len(times) < most):
        times.append(milliseconds(call, device, host))
    return Timing(*percentiles(times), peak_gib, len(times))


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of a call. It holds its memory, `out` included, as long as it lives."""

    replay: Callable[[], None]
    out: Any  # Tensors that replays write
    peak_gib: float | None  # Memory that the call took at its peak while it was captured; replays take no more


def capture(call: Callable[[], Any], device: torch.device) -> Captured:
    """Capture a call that ran before, so that nothing is left to compile."""
    graph = torch.cuda.CUDAGraph()
    outs: list[Any] = []

    def record() -> None:
        with torch.cuda.graph(graph):
            outs.append(call())

    peak_gib = peak_memory(record, device)
    return Captured(graph.replay, outs[0], peak_gib)


def graph_ms(call: Callable[[], Any], device: torch.device, *, most: int) -> float:
    """Median GPU time of a warm call: of its graph's replays, so there is no host time in it."""
    ms = measure(capture(call, device).replay, device, seconds=0.5, most=most).ms_p50
    torch.cuda.empty_cache()  # graphs keep what they reserved
    return ms


def copy_bandwidth() -> float:
    """TB/s of a copy on the current CUDA device, read and written bytes counted; a graph's node would be slower."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * GIB / measure(lambda: target.copy_(source), source.device, seconds=0.1).ms_p50 / 1e9


def milliseconds(call: Callable[[], Any], device: torch.device, host: bool = True) -> float:
    """Time of one call. Args: host: as in `measure`."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not host:
            torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[1], deciles[4], deciles[7]


def peak_memory(call: Callable[[], Any], device: torch.device) -> float | None:
    """GiB that one call holds at its peak, its result included, beyond what was in use before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = _settled_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / GIB
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        call()
        return None
    # Give back what earlier calls freed, or reusing it would look free. Then let Linux count the peak from here.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before) / GIB


def _settled_memory(device: torch.device) -> int:
    """Bytes in use when no thread gives more back: autograd's may still free tensors after backward has returned."""
    now = torch.cuda.memory_allocated(device)
    before = now + 1
    while now < before:
        before = now
        time.sleep(0.01)
        now = torch.cuda.memory_allocated(device)
    return now


def proc_bytes(file: str, field: str) -> int:
    """A field of Linux's /proc/meminfo or /proc/self/status."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{file} has no line {field}, so memory cannot be measured here")
    return int(match[1]) * 1024


def resident(field: str) -> int:
    return proc_bytes("/proc/self/status", field)
