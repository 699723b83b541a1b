"""Races between warps in shared memory, found while a kernel runs: vector clocks of warps.

Found are accesses by two warps, one of them a write, that no barrier puts in order, and WGMMA of what was written
without a proxy fence. Not found: races inside of a warp or in global memory, and a missing wgmma.fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx.observer import Observer, Operation

if TYPE_CHECKING:
    from tests.support.ptx.cta import Cta
    from tests.support.ptx.registers import Threads

SHARED_BYTES = 227 << 10


class Order:
    """What barriers put in order, and the last accesses of each 2 bytes of shared memory: vector clocks of warps."""

    def __init__(self, warps: int) -> None:
        self.warps = np.arange(warps)
        self.clock = np.eye(warps, dtype="i4")
        """[w, v]: up to which of its steps between barriers warp v is before warp w."""
        self.arrived: dict[int, Any] = {}
        self.read = np.zeros((warps, SHARED_BYTES // 2), "i4")
        """When each warp read last."""
        self.written, self.fenced = np.zeros((2, SHARED_BYTES // 2), "i4")
        """When it was written, and when that was made known to WGMMA, -1: not yet."""
        self.writer = np.zeros(SHARED_BYTES // 2, "i4")

    def arrive(self, number: int, warps: Any) -> None:
        before = self.clock[warps].max(0)
        self.arrived[number] = np.maximum(before, self.arrived.get(number, before))
        self.clock[warps, warps] += 1

    def release(self, number: int, waiting: Any) -> None:
        self.clock[waiting] = np.maximum(self.clock[waiting], self.arrived.pop(number))

    def _expect(self, warp: Any, other: Any, when: Any, what: str) -> None:
        wrong = (warp != other) & (when > self.clock[warp, other])
        if wrong.any():
            one, two = (np.broadcast_to(x, wrong.shape)[wrong][0] for x in (warp, other))
            raise RuntimeError(f"no barrier between warp {two} and warp {one}, which {what}")

    def reads(self, warp: Any, place: Any) -> None:
        """Args: the warp of each thread, and which pairs of bytes it reads."""
        warp = warp[:, None]
        self._expect(warp, self.writer[place], self.written[place], "reads what the other wrote")
        self.read[warp, place] = self.clock[warp, warp]

    def writes(self, warp: Any, place: Any) -> None:
        warp, others = warp[:, None], self.warps[:, None, None]
        self._expect(warp, self.writer[place], self.written[place], "overwrites what the other wrote")
        self._expect(warp, others, self.read[others, place], "overwrites what the other read")
        self.writer[place], self.written[place], self.fenced[place] = warp, self.clock[warp, warp], -1

    def fence(self, warps: Any) -> None:
        """What these warps wrote is for WGMMA, too."""
        of = np.isin(self.writer, warps) & (self.fenced < 0)
        self.fenced[of] = self.clock[self.writer[of], self.writer[of]]

    def multiplies(self, warps: Any, place: Any) -> None:
        if (self.fenced[place] < 0).any():
            raise RuntimeError("WGMMA reads what was written without a proxy fence")
        place = np.broadcast_to(place.flatten(), (len(warps), place.size))
        self._expect(warps[:, None], self.writer[place], self.fenced[place], "multiplies what the other made known")
        self.reads(warps, place)


class RaceObserver(Observer):
    """Tells `Order` of each CTA's accesses and barriers."""

    def begin(self, ctas: list[Cta]) -> None:
        if len(ctas) > 1:
            raise NotImplementedError("races in a cluster")
        self.order = Order(len(ctas[0].register_limits))

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        where = (places[:, None] + np.arange(0, size, 2)) // 2
        (self.order.reads if kind == "read" else self.order.writes)(threads.warp_of, where)

    def starts(self, threads: Threads, operation: Operation) -> None:
        self._multiplies(operation, np.array(threads.warps))

    def ends(self, operation: Operation) -> None:
        if operation.kind == "wgmma":
            first = operation.warp
            self._multiplies(operation, np.arange(first, first + 4))

    def _multiplies(self, operation: Operation, warps: Any) -> None:
        if operation.kind != "wgmma":
            raise NotImplementedError(f"races with {operation.kind}")
        for region in operation.reads:
            self.order.multiplies(warps, region.places // 2)

    def arrives_at(self, threads: Threads, number: int) -> None:
        self.order.arrive(number, np.array(threads.warps))

    def releases(self, cta: Cta, number: int, warps: list[int]) -> None:
        self.order.release(number, np.array(warps, int))

    def fences(self, threads: Threads, kind: str) -> None:
        if kind.startswith("fence.proxy.async"):
            self.order.fence(np.array(threads.warps))
