"""mbarriers: pending arrivals, transactions, phases, and who waits for them (PTX ISA, mbarrier)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.ptx.cta import Cta
from tests.ptx.decode import Flow, action, unsupported
from tests.ptx.listing import Instruction
from tests.ptx.memory import check_aligned, cta_of, offset_in_own
from tests.ptx.registers import Threads

MOST_ARRIVALS, MOST_BYTES = (1 << 20) - 1, (1 << 20) - 1


class Barrier:
    """One mbarrier. A phase ends when no arrival is pending and as many bytes have come as were expected."""

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        self.cta, self.offset, self.count = cta, offset, count
        self.place = cta.rank, offset
        self.pending, self.bytes, self.phase = count, 0, 0
        """Arrivals and bytes that this phase waits for, and its number."""
        self.waiting: list[tuple[int, int]] = []
        """Where threads try again, and which."""

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise RuntimeError(f"{self}: {count} arrive where {self.pending} are pending")
        self.pending -= count
        self._finish()

    def expect(self, count: int) -> None:
        self.bytes += count
        self._check()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._check()
        self._finish()

    def _check(self) -> None:
        if abs(self.bytes) > MOST_BYTES:
            raise RuntimeError(f"{self}: {self.bytes} bytes, more than an mbarrier counts")

    def _finish(self) -> None:
        if self.pending or self.bytes:
            return
        self.cta.observer.finishes_phase(self.place)
        self.phase += 1
        self.pending = self.count
        waiting, self.waiting = self.waiting, []
        for at, bits in waiting:
            self.cta.unblock(at, bits)

    def is_over(self, parity: int) -> bool:
        """True if the phase of this parity, the one before the present one, is over."""
        return self.phase & 1 != parity & 1

    def __repr__(self) -> str:
        state = f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes} bytes pending"
        return f"mbarrier {self.offset:#x} of {self.cta} ({state})"


class Phase(NamedTuple):
    """What threads wait for."""

    barrier: Barrier
    number: int

    def __str__(self) -> str:
        return f"the end of phase {self.number} of {self.barrier}"


def barrier_at(cta: Cta, offset: int) -> Barrier:
    check_aligned(offset, 8)
    if offset not in cta.barriers:
        raise RuntimeError(f"no mbarrier at {offset:#x} of {cta}")
    return cta.barriers[offset]


def barrier_of(cta: Cta, address: int, remote: bool) -> Barrier:
    """Args: `remote`, whether it is a shared::cluster address, which other CTAs of the cluster may own."""
    owner, offset = cta_of(cta, address, 8) if remote else (cta, offset_in_own(cta, address, 8))
    return barrier_at(owner, offset)


def current(barrier: Barrier) -> Barrier:
    """The mbarrier that is at its place now."""
    return barrier_at(barrier.cta, barrier.offset)


def by_address(threads: Threads, operand: str) -> list[tuple[int, Any]]:
    """The addresses that threads have, and for each of them which threads, as booleans."""
    addresses = threads.addresses(operand)
    return [(where, addresses == where) for where in np.unique(addresses).tolist()]


@action(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def initialize(threads: Threads, of: Instruction) -> None:
    cta, counts = threads.cta, threads.value(of.operands[1], "u4")
    for where, by in by_address(threads, of.operands[0]):
        offset, arrivals = offset_in_own(cta, where, 8), int(counts[by][0])
        check_aligned(offset, 8)
        if not 1 <= arrivals <= MOST_ARRIVALS:
            raise RuntimeError(f"an mbarrier of {arrivals} arrivals")
        if offset in cta.barriers and cta.barriers[offset].waiting:
            raise RuntimeError(f"threads wait for {cta.barriers[offset]}, which is initialized again")
        cta.barriers[offset] = Barrier(cta, offset, arrivals)
        cta.observer.initializes(threads.some(by), (cta.rank, offset))


@action(
    r"mbarrier\.arrive(?:\.(?:release|relaxed)\.(?:cta|cluster))?(\.expect_tx)?\.(shared|shared::cta|shared::cluster)\.b64"
)
def arrive(threads: Threads, of: Instruction, expects: str | None, space: str) -> None:
    """Each thread by itself, once or by a count; the state that it returns has no use here, so `_` or never read."""
    given = threads.value(of.operands[2], "u4") if len(of.operands) > 2 else None
    if expects and given is None:
        raise unsupported(of, "no bytes to expect")
    for where, by in by_address(threads, of.operands[1]):
        barrier = barrier_of(threads.cta, where, space == "shared::cluster")
        threads.cta.observer.arrives(threads.some(by), barrier.place, barrier.phase)
        count = int(by.sum())
        total = count if given is None else int(given[by].sum())
        if expects:
            barrier.expect(total)
        barrier.arrive(count if expects else total)


@action(r"mbarrier\.(try_wait|test_wait)\.parity(?:\.(?:acquire|relaxed)\.(?:cta|cluster))?\.shared(?:::cta)?\.b64")
def wait(threads: Threads, of: Instruction, what: str) -> Flow | None:
    """test_wait looks once. try_wait suspends its threads until the phase is over: when it gives up is not defined."""
    cta = threads.cta
    addresses, parities = threads.addresses(of.operands[1]), threads.value(of.operands[2], "u4")
    waiting = 0
    for at, which in sorted({*zip(addresses.tolist(), parities.tolist(), strict=True)}):
        chosen = (addresses == at) & (parities == which)
        some = threads if chosen.all() else threads.some(chosen)
        barrier = barrier_of(cta, at, False)
        over = barrier.is_over(which)
        if over:
            cta.observer.waits(some, barrier.place, barrier.phase - 1)
        if over or what == "test_wait":
            some.set(of.operands[0], "?", over)
            continue
        waiting |= some.bits
        cta.block(cta.pc, some, Phase(barrier, barrier.phase))
        barrier.waiting.append((cta.pc, some.bits))
    return Flow(cta.pc + 1, cta.threads(threads.bits & ~waiting)) if waiting else None
