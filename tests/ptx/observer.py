"""What a checker of a run is told: every access, and every event that puts accesses in order.

Each event is reported where it happens in the order of execution, when the threads that cause it are at `cta.pc`. An
asynchronous operation starts with its instruction; it reads and writes at any time from there until it ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.ptx.cta import Cta
from tests.ptx.listing import Listing
from tests.ptx.registers import Threads


class Region(NamedTuple):
    """What an asynchronous operation reads or writes."""

    cta: Cta
    space: str
    """shared: `places` are bytes from the start of the CTA's shared memory, one for every `size` bytes;
    tensor: `places` are 512 lane + column of the CTA's TMEM, of 4 bytes."""
    places: Any
    size: int


Place = tuple[int, int]
"""Of an mbarrier: the rank of its CTA, and the byte of shared memory."""


class Operation(NamedTuple):
    """An asynchronous operation: a copy, a reduction, or a product."""

    kind: str
    """cp.async, wgmma, tcgen05.mma, load, or store (of TMA)."""
    reads: list[Region]
    writes: list[Region]
    barrier: Place | None = None
    """The mbarrier to which it reports its bytes."""


class Observer:
    """Does nothing with any event."""

    def watches(self, program: Listing) -> set[int]:
        """Instructions before which `uses` is called."""
        return set()

    def uses(self, threads: Threads) -> None: ...

    def begin(self, ctas: list[Cta]) -> None:
        """The CTAs of a cluster start."""

    def end(self, ctas: list[Cta]) -> None:
        """All threads of a cluster have returned, and all operations have ended."""

    # Accesses of threads

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        """Args: read, write or atomic; of each thread, the first of `size` bytes in its CTA's shared memory."""

    def tensor_memory(self, threads: Threads, kind: str, column: int, count: int) -> None:
        """tcgen05.ld (read) or st (write): `count` columns of the quarter of lanes of each whole warp."""

    def owns_tensor_memory(self, threads: Threads, column: int, count: int) -> None:
        """tcgen05.alloc or dealloc: nobody else may access these columns before the one, or after the other."""

    # Asynchronous operations

    def starts(self, threads: Threads, operation: Operation) -> None: ...

    def commits(self, threads: Threads, barriers: list[Place]) -> None:
        """tcgen05.commit: these mbarriers will be told of all products that the thread has started."""

    def commits_group(self, threads: Threads, kind: str) -> None:
        """Args: cp.async, bulk or wgmma: what each thread has started since the last group is one."""

    def waits_group(self, threads: Threads, kind: str, most: int) -> None:
        """All but the last `most` groups have ended, or stores of TMA have read."""

    def waits_tensor_memory(self, threads: Threads, kind: str) -> None:
        """tcgen05.wait: ld or st."""

    # mbarriers; phases count from 0

    def initializes(self, threads: Threads, barrier: Place) -> None: ...

    def arrives(self, threads: Threads, barrier: Place, phase: int) -> None:
        """By threads."""

    def committed(self, barrier: Place) -> None:
        """By tcgen05.commit: all products have ended that the thread had started before it."""

    def completes(self, at: int) -> None:
        """The operation that an instruction has started reports its bytes to its mbarrier."""

    def finishes_phase(self, barrier: Place) -> None: ...

    def waits(self, threads: Threads, barrier: Place, phase: int) -> None:
        """With success: the threads know that this phase is over."""

    # Barriers of threads

    def arrives_at(self, threads: Threads, number: int) -> None:
        """bar.sync, bar.arrive."""

    def releases(self, cta: Cta, number: int, warps: list[int]) -> None:
        """Those of the warps that arrived which wait."""

    def arrives_at_cluster(self, threads: Threads) -> None: ...

    def releases_cluster(self, ctas: list[Cta]) -> None:
        """All threads of all CTAs have arrived."""

    def waits_for_cluster(self, threads: Threads) -> None: ...

    def syncs_warps(self, threads: Threads) -> None:
        """bar.warp.sync."""

    # Fences

    def fences(self, threads: Threads, kind: str) -> None:
        """The instruction's name: fence.proxy.async, fence.mbarrier_init, wgmma.fence, tcgen05.fence, ..."""
