"""Tells `Clocks` of what a machine runs: an observer that finds races, in shared memory and TMEM of each cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.ptx.clocks import ADVICE, COLUMNS, LANES, SHARED_CELL, Clocks, Finding, Key
from tests.ptx.cta import Cta
from tests.ptx.listing import Listing, names
from tests.ptx.observer import Observer, Operation, Place, Region
from tests.ptx.registers import Threads

WARPS_OF_GROUP = 4
LANES_OF_WARP = 32
QUARTER = LANES // 4
"""Of the lanes of TMEM, that a warp reaches."""
TEXT = 120
"""Most characters of an instruction in a message."""
FENCES = {
    "fence.proxy.async": Clocks.fence_proxy,
    "fence.mbarrier_init": Clocks.fence_init,
    "wgmma.fence": Clocks.fence_registers,
    "tcgen05.fence::before": Clocks.fence_tmem_before,
    "tcgen05.fence::after": Clocks.fence_tmem_after,
}
IN_REGISTERS = ("tcgen05.ld.", "wgmma.mma_async.")
"""What writes registers after the instruction has been executed."""


class RaceError(RuntimeError):
    """Two accesses that nothing puts in order, or another finding."""


class Order(Observer):
    """Raises RaceError for the first finding; `keep_going`: collects them, in the order in which they were found.

    `advice` holds what is none, but relies on more than the PTX ISA says: see `clocks`.
    """

    def __init__(self, keep_going: bool = False, known: Collection[Key] = ()) -> None:
        """Args: keys of findings, and of advice, to be left out."""
        self.keep_going = keep_going
        self.findings: list[Finding] = []
        self.advice: list[Finding] = []
        self._known = {*known}
        self._watched: dict[int, list[str]] = {}

    def watches(self, program: Listing) -> set[int]:
        """Instructions that use registers which tcgen05.ld or wgmma use."""
        late = {
            register
            for of in program.instructions
            if of.name.startswith(IN_REGISTERS)
            for operand in of.operands[:2]
            if operand[0] != "["
            for register in names(operand)
        }
        for at, of in enumerate(program.instructions):
            used = [x for operand in of.operands for x in names(operand.strip("[]").partition("+")[0].strip())]
            if not of.name.startswith(IN_REGISTERS) and (used := [x for x in used if x in late]):
                self._watched[at] = used
        return {*self._watched}

    def begin(self, ctas: list[Cta]) -> None:
        self.program = ctas[0].cluster.program
        self.warps = self.program.threads // 32
        self.clocks = Clocks(len(ctas) * self.warps, len(ctas), self._text, self._found)

    def end(self, ctas: list[Cta]) -> None:
        self.clocks.finish()

    def _text(self, point: int) -> str:
        text = self.program.instructions[point].text
        return f"{point}: {text if len(text) <= TEXT else text[: TEXT - 3] + '...'}"

    def _found(self, finding: Finding) -> None:
        if finding.key not in self._known:
            self._known.add(finding.key)
            (self.advice if finding.kind in ADVICE else self.findings).append(finding)
            if finding.kind not in ADVICE and not self.keep_going:
                raise RaceError(finding.text)

    # Who, and where

    def _warps(self, threads: Threads) -> Iterator[int]:
        """Numbered through the cluster; the clocks are told where they are."""
        self.clocks.point = threads.cta.pc
        return (threads.cta.rank * self.warps + warp for warp in threads.warps)

    def _each(self, threads: Threads, tell: Callable[..., object], *what: Any) -> None:
        for warp in self._warps(threads):
            tell(warp, *what)

    def _owners(self, threads: Threads, kind: str) -> list[tuple[int, list[int]]]:
        """Who has groups of a kind: warpgroups, or warps; and their warps."""
        warps, size = [*self._warps(threads)], WARPS_OF_GROUP if kind == "wgmma" else 1
        return [(of, [warp for warp in warps if warp // size == of]) for of in sorted({x // size for x in warps})]

    def _cells_of_warps(self, threads: Threads, places: Any, size: int) -> Iterator[tuple[int, Any, Any]]:
        """Of each warp: the cells that its threads access, and which lane does."""
        cells = shared_cells(places, size)
        lanes = np.repeat(threads.lanes, cells.shape[1]).reshape(cells.shape)
        for warp, own in zip(self._warps(threads), threads.by_warp, strict=True):
            yield warp, cells[own].reshape(-1), lanes[own].reshape(-1)

    @staticmethod
    def _cells(region: Region) -> Any:
        if region.space == "tensor":
            return region.places
        return shared_cells(region.places, region.size)

    # Accesses of threads

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        clocks, cta = self.clocks, threads.cta.rank
        access = {"read": clocks.reads, "write": clocks.writes, "atomic": clocks.adds}[kind]
        for warp, cells, lanes in self._cells_of_warps(threads, places, size):
            access(warp, cells, cta, lanes)

    def tensor_memory(self, threads: Threads, kind: str, column: int, count: int) -> None:
        of = self.program.instructions[threads.cta.pc]
        for warp, own in zip(self._warps(threads), threads.warps, strict=True):
            lanes = own % WARPS_OF_GROUP * QUARTER + np.arange(QUARTER)
            cells = lanes[:, None] * COLUMNS + np.arange(column, column + count)
            if kind == "read":
                self.clocks.load_tmem(warp, cells, names(of.operands[0]), threads.cta.rank)
            else:
                self.clocks.store_tmem(warp, cells, threads.cta.rank)

    def owns_tensor_memory(self, threads: Threads, column: int, count: int) -> None:
        cells = np.arange(LANES)[:, None] * COLUMNS + np.arange(column, column + count)
        rank, name = threads.cta.rank, self.program.instructions[threads.cta.pc].name
        pair = rank // 2 if name.startswith("tcgen05.alloc.cta_group::2") else None
        self._each(threads, self.clocks.own_tmem, cells, rank, pair)

    def uses(self, threads: Threads) -> None:
        self._each(threads, self.clocks.use, self._watched[threads.cta.pc])

    # Asynchronous operations

    def starts(self, threads: Threads, operation: Operation) -> None:
        clocks, kind = self.clocks, operation.kind
        if kind == "wgmma":
            registers = self._registers(threads.cta.pc)
            for group, warps in self._owners(threads, kind):
                for warp in warps:
                    clocks.multiply_registers(warp, registers)
                for region in operation.reads:
                    clocks.multiply(group, warps, self._cells(region), region.cta.rank)
            return
        if kind == "cp.async":
            for region in operation.writes:
                for warp, cells, lanes in self._cells_of_warps(threads, region.places, region.size):
                    clocks.copy(warp, cells, region.cta.rank, lanes)
            return
        for warp in self._warps(threads):
            if kind == "tcgen05.mma":
                self._multiply(warp, operation)
            elif kind == "load":
                for regions, writing in ((operation.reads, False), (operation.writes, True)):
                    for region in regions:
                        clocks.bulk_load(warp, operation.barrier, self._cells(region), region.cta.rank, writing)
            elif kind == "store":
                for region in operation.reads:
                    clocks.bulk_store(warp, self._cells(region), region.cta.rank)
            else:
                raise NotImplementedError(f"races with {kind}")

    def _registers(self, at: int) -> list[str]:
        """Of a product: sums, and a left operand that is there."""
        of = self.program.instructions[at]
        return [x for operand in of.operands[:2] if operand[0] == "{" for x in names(operand)]

    def _multiply(self, warp: int, operation: Operation) -> None:
        result = operation.writes[0]
        accumulator = int(result.places.flat[0]), result.places.shape
        factors = [x for x in operation.reads if not any(x is of for of in operation.writes)]
        parts = [(self.clocks.shared if x.space == "shared" else self.clocks.tmem, x) for x in factors]
        reads = [(memory[x.cta.rank], self._cells(x)) for memory, x in parts]
        writes = [(self.clocks.tmem[x.cta.rank], self._cells(x)) for x in operation.writes]
        self.clocks.mma(warp, reads, writes, accumulator)

    def commits(self, threads: Threads, barriers: list[Place]) -> None:
        self._each(threads, self.clocks.commit_mma, barriers)

    def commits_group(self, threads: Threads, kind: str) -> None:
        if kind == "cp.async":
            threads.whole_warps("cp.async.commit_group")  # whose lanes have as many groups
        for of, _ in self._owners(threads, kind):
            self.clocks.commit_group(kind, of)

    def waits_group(self, threads: Threads, kind: str, most: int) -> None:
        for of, warps in self._owners(threads, kind):
            self.clocks.wait_group(kind, of, warps, most)

    def waits_tensor_memory(self, threads: Threads, kind: str) -> None:
        self._each(threads, self.clocks.wait_tmem, kind)

    # mbarriers

    def _is_relaxed(self, threads: Threads) -> bool:
        return ".relaxed" in self.program.instructions[threads.cta.pc].name

    def initializes(self, threads: Threads, barrier: Place) -> None:
        self._each(threads, self.clocks.init, barrier)

    def arrives(self, threads: Threads, barrier: Place, phase: int) -> None:
        for warp, own in zip(self._warps(threads), threads.by_warp, strict=True):
            by_all = own.stop - own.start == LANES_OF_WARP
            self.clocks.arrive_at(warp, barrier, self._is_relaxed(threads), by_all)

    def committed(self, barrier: Place) -> None:
        self.clocks.arrive_committed(barrier)

    def completes(self, at: int) -> None:
        self.clocks.point = at

    def finishes_phase(self, barrier: Place) -> None:
        self.clocks.complete(barrier)

    def waits(self, threads: Threads, barrier: Place, phase: int) -> None:
        self._each(threads, self.clocks.wait_for, barrier, self._is_relaxed(threads))

    # Barriers of threads

    def syncs_warps(self, threads: Threads) -> None:
        self.clocks.sync(self._warps(threads))

    def arrives_at(self, threads: Threads, number: int) -> None:
        self.clocks.arrive((threads.cta.rank, number), self._warps(threads))
        self.clocks.sync(self._warps(threads))

    def releases(self, cta: Cta, number: int, warps: list[int]) -> None:
        self.clocks.release((cta.rank, number), [cta.rank * self.warps + warp for warp in warps])

    def arrives_at_cluster(self, threads: Threads) -> None:
        self.clocks.arrive("cluster", self._warps(threads))

    def releases_cluster(self, ctas: list[Cta]) -> None:
        self.clocks.meet("cluster")

    def waits_for_cluster(self, threads: Threads) -> None:
        self.clocks.learn("cluster", self._warps(threads))

    # Fences

    def fences(self, threads: Threads, kind: str) -> None:
        """Of memory (fence.acq_rel and the like): nothing, for barriers release and acquire as well."""
        for start, fence in FENCES.items():
            if kind.startswith(start):
                self._each(threads, partial(fence, self.clocks))


def shared_cells(places: Any, size: int) -> Any:
    """(place, cell). Args: first bytes, and how many from each."""
    return places.reshape(-1, 1) // SHARED_CELL + np.arange(max(1, size // SHARED_CELL))
