"""A kernel as it runs: its instructions, decoded when they are first reached, and launches of it, cluster by cluster.

The CTAs of a cluster run together, with the asynchronous operations that they have started. A CTA runs until all of its
threads wait or have returned; then another does. When none can go on, the oldest operation that is still under way ends
(`late`), or else they wait for each other: a RuntimeError. With `late=False` operations end where they start.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

# Families of instructions register what they decode
from tests.ptx import arithmetic, bulk, mbarrier, memory, tcgen05, warp_mma, warps, wgmma  # noqa: F401
from tests.ptx.cta import Cta
from tests.ptx.decode import Flow, Run, decode
from tests.ptx.launch import Launch
from tests.ptx.listing import Listing
from tests.ptx.memory import RANK_BIT, Storage
from tests.ptx.observer import Observer
from tests.ptx.registers import LANES, PARAMETERS, Made, Threads

SHARED_BYTES = 227 << 10


class Program(Listing):
    """A kernel."""

    def __init__(self, ptx: str) -> None:
        super().__init__(ptx)
        self.code = Made(self._decode)
        """By index, what runs an instruction."""

    def _decode(self, at: int) -> Run:
        if at >= len(self.instructions):
            raise RuntimeError("threads run past the last instruction")
        return decode(self, self.instructions[at])

    def launch(
        self,
        launch: Launch,
        tensors: Sequence[Tensor | None],
        late: bool = True,
        ahead: slice = slice(0),
        observer: Observer | None = None,
    ) -> None:
        """Args: all tensors that the kernel may use; when operations end; the threads of a CTA that go ahead."""
        self.check(launch)
        clusters = [n // of for n, of in zip(launch.grid, launch.cluster, strict=True)]
        cluster = Cluster(self, launch, storages_of(tensors), late, ahead, observer or Observer())
        for place in np.ndindex(*clusters[::-1]):
            cluster.run(place[::-1])

    def check(self, launch: Launch) -> None:
        """Raises ValueError for a launch that is not this kernel's, or that a driver refuses."""
        if launch.kernel != self.name:
            raise ValueError(f"a launch of {launch.kernel}, not of {self.name}")
        if launch.block != self.block:
            raise ValueError(f"a block of {launch.block} threads, the kernel requires {self.block}")
        sizes = [len(argument) for argument in launch.arguments]
        if sizes != self.parameter_sizes:
            raise ValueError(f"arguments of {sizes} bytes, the kernel's parameters have {self.parameter_sizes}")
        if not 0 <= launch.shared_bytes <= SHARED_BYTES:
            raise ValueError(f"shared_bytes is {launch.shared_bytes}, at most {SHARED_BYTES}")
        if min(launch.grid) < 1 or any(n % of for n, of in zip(launch.grid, launch.cluster, strict=True)):
            raise ValueError(f"a grid of {launch.grid} in clusters of {launch.cluster}")
        for tensor_map in launch.tensor_maps:
            tensor_map.check()


def storages_of(tensors: Sequence[Tensor | None]) -> list[Storage]:
    """The memory of tensors, each once."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x is not None and x.numel() > 0}
    return [
        Storage(start, np.ctypeslib.as_array((ctypes.c_uint8 * s.nbytes()).from_address(start)))
        for start, s in found.items()
    ]


class Cluster:
    """One of a launch; kept from one to the next."""

    def __init__(
        self, program: Program, launch: Launch, storages: list[Storage], late: bool, ahead: slice, observer: Observer
    ) -> None:
        self.program, self.launch, self.storages = program, launch, storages
        self.late, self.observer = late, observer
        self.watched = observer.watches(program)
        self.arguments, self.tensor_maps = launch.arguments, launch.tensor_maps
        self.ahead = sum(1 << thread for thread in range(program.threads)[ahead])
        x, y, z = launch.cluster
        self.ctas = [Cta(self, rank) for rank in range(x * y * z)]

    def run(self, place: tuple[int, ...]) -> None:
        """Args: which cluster of the grid, x first."""
        self.under_way: deque[Callable[[], None]] = deque()
        self.at_end: list[Callable[[], None]] = []
        """Operations without a wait, which may end this late."""
        self.arrived = [0 for _ in self.ctas]
        """Bits of the threads of each CTA that have arrived at barrier.cluster."""
        self.to_wait = [0 for _ in self.ctas]
        """Bits of those that have arrived and have not waited since."""
        for cta in self.ctas:
            cta.reset(self._special(place, cta.rank), self.launch.shared_bytes, self.ahead)
        self.observer.begin(self.ctas)
        with np.errstate(all="ignore"):
            while self._go_on():
                pass
        for end in self.at_end:
            end()
        for cta in self.ctas:
            cta.end()
        self.observer.end(self.ctas)

    def later(self, end: Callable[[], None]) -> None:
        """Ends an operation when it must, or at once."""
        if self.late:
            self.under_way.append(end)
        else:
            end()

    def _go_on(self) -> bool:
        ran = False
        for cta in self.ctas:
            while (flow := cta.next()) is not None:
                ran = True
                self._step(cta, flow)
        if not ran and self.under_way:
            self.under_way.popleft()()
            ran = True
        if not ran and not all(cta.ended == cta.everyone for cta in self.ctas):
            raise RuntimeError(self._deadlock())
        return ran

    def _step(self, cta: Cta, flow: Flow) -> None:
        at, threads = flow
        code, watched = self.program.code, self.watched
        try:
            while threads is not None:
                cta.pc = at
                if at in watched:
                    self.observer.uses(threads)
                turn = code[at](threads)
                if turn is None:
                    at += 1
                else:
                    at, threads = turn
                if at >= cta.stop and threads is not None:
                    cta.add(at, threads.bits)
                    return
        except (RuntimeError, MemoryError, NotImplementedError) as error:
            where = f"{cta}, warps {threads.warps if threads else []}, instruction {at}"
            raise type(error)(f"{error}; {where}: {self.program.instructions[at].text}") from error

    def _deadlock(self) -> str:
        lines = []
        for cta in self.ctas:
            for waiting in cta.blocked.values():
                of = Threads(cta, waiting.bits)
                text = self.program.instructions[waiting.at].text
                lines.append(f"  {cta}, warps {of.warps}, instruction {waiting.at} ({text}): {waiting.what}")
        return "\n".join(["threads wait for each other", *sorted(lines)])

    def _special(self, place: tuple[int, ...], rank: int) -> dict[str, Any]:
        """Special registers of a CTA, and the addresses of symbols."""
        threads = np.arange(self.program.threads)
        (x, y, _), (cx, cy, cz) = self.launch.block, self.launch.cluster
        in_cluster = rank % cx, rank // cx % cy, rank // (cx * cy)
        inside = threads % x, threads // x % y, threads // (x * y)
        values: dict[str, Any] = {"%laneid": threads % LANES, "%warpid": threads // LANES}
        values |= {"%cluster_ctarank": rank, "%cluster_nctarank": cx * cy * cz}
        for i, axis in enumerate("xyz"):
            values |= {f"%tid.{axis}": inside[i], f"%ntid.{axis}": self.launch.block[i]}
            values |= {f"%ctaid.{axis}": place[i] * self.launch.cluster[i] + in_cluster[i]}
            values |= {f"%nctaid.{axis}": self.launch.grid[i], f"%clusterid.{axis}": place[i]}
            values |= {f"%nclusterid.{axis}": self.launch.grid[i] // self.launch.cluster[i]}
            values |= {f"%cluster_ctaid.{axis}": in_cluster[i], f"%cluster_nctaid.{axis}": self.launch.cluster[i]}
        values |= dict.fromkeys(self.program.symbols, rank << RANK_BIT)
        return values | {name: PARAMETERS + (i << 16) for i, name in enumerate(self.program.parameters)}

    # barrier.cluster

    def arrive(self, threads: Threads) -> None:
        rank = threads.cta.rank
        if self.arrived[rank] & threads.bits:
            raise RuntimeError("threads arrive at barrier.cluster again before they have waited")
        self.arrived[rank] |= threads.bits
        self.to_wait[rank] |= threads.bits
        self.check_arrivals()

    def check_arrivals(self) -> None:
        """Threads that have returned count as arrived."""
        if all(self.arrived[cta.rank] | cta.ended == cta.everyone for cta in self.ctas) and any(self.arrived):
            self.observer.releases_cluster(self.ctas)
            self.arrived = [0 for _ in self.ctas]
            for cta in self.ctas:
                for waiting in [x for x in cta.blocked.values() if x.what == "barrier.cluster"]:
                    cta.unblock(waiting.at, waiting.bits)

    def waiting_for(self, threads: Threads) -> Threads | None:
        """Those of the threads whose arrival others have yet to join; the others have waited."""
        rank = threads.cta.rank
        if threads.bits & ~self.to_wait[rank]:
            raise RuntimeError("threads wait at barrier.cluster where they have not arrived")
        early = self.arrived[rank] & threads.bits
        self.to_wait[rank] &= ~threads.bits | early
        return threads.cta.threads(early)
