"""Kernels without one of the instructions that order them, and whether anything notices.

    recorded launch -> its candidates -> for each: the program without it -> run, late and early -> Deletion

What is executed and not noticed must change nothing. Why, is told by what the instruction did in the unchanged kernel
(`Effects`), where that is one of eight reasons, FIRST to UNTOUCHED. Others are for a reader to explain.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.ptx.clocks import COLUMNS, Key
from tests.ptx.cta import Cta
from tests.ptx.launch import Launch
from tests.ptx.listing import Listing
from tests.ptx.observer import Observer, Operation, Place
from tests.ptx.order import Order, RaceError
from tests.ptx.program import Program, storages_of
from tests.ptx.registers import Threads

ORDERS = re.compile(
    r"mbarrier\.(try_wait|test_wait|arrive)\b.*|tcgen05\.(commit|wait|fence)\b.*|wgmma\.(fence|commit_group|wait_group)\b.*"
    r"|fence\..*|(bar|barrier)\..*|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)\b.*|griddepcontrol\..*"
)
"""Names of instructions that order others."""
# Of a wait
FIRST = "nobody has used its stage before"
KNOWN = "what it waits for is known to its warps already"
LAST = "behind it its warps access nothing, nor hand on to a warp that does"
# Of an arrival
UNHEARD = "nobody waits for it who accesses anything then"
# Of a proxy fence
WRITTEN = "its warps have written nothing since their last proxy fence"
# Of a fence of mbarrier.init, a barrier of threads, tcgen05.wait::ld
COVERED = "the next one of the same warps orders as much, and nothing between them needs it"
# Of bar.warp.sync, and of wgmma.fence
ALIGNED = "its warp has done nothing since it last was together"
UNTOUCHED = "the registers of products behind it have not been used since another one"
CLOSE = 1e-3
"""Results differ by no more, of the largest, as additions in another order may."""


class Case:
    """A launch that can be repeated, of this program or of a changed one."""

    def __init__(self, program: Program, launch: Launch, tensors: Sequence[Tensor | None]) -> None:
        self.program, self.launch, self.tensors = program, launch, [x for x in tensors if x is not None]
        self._memory = [storage.memory for storage in storages_of(self.tensors)]
        self._before = [x.copy() for x in self._memory]
        self._results: list[Tensor] = []

    def keep_results(self) -> None:
        """As those that later runs must have."""
        self._results = [x.clone() for x in self.tensors]

    def of_one_cta(self) -> Case:
        """The same of the first CTA, or cluster, alone."""
        self._restore()
        case = Case(self.program, self.launch._replace(grid=self.launch.cluster), self.tensors)
        case.program.launch(case.launch, case.tensors)
        case.keep_results()
        return case

    def _restore(self) -> None:
        for memory, before in zip(self._memory, self._before, strict=True):
            memory[...] = before

    def run(self, program: Program, observer: Observer | None, late: bool) -> str:
        """What is wrong with the results; nothing: empty."""
        self._restore()
        program.launch(self.launch, self.tensors, late, observer=observer)
        for number, (got, expected) in enumerate(zip(self.tensors, self._results, strict=True)):
            if not is_close(got, expected):
                return f"results of tensor {number}"
        return ""


def is_close(got: Tensor, expected: Tensor) -> bool:
    if not got.is_floating_point():
        return bool((got == expected).all())
    finite = expected.isfinite()
    if not bool((finite == got.isfinite()).all()):
        return False
    x, y = got[finite].double(), expected[finite].double()
    return x.numel() == 0 or bool((x - y).abs().max() <= CLOSE * y.abs().max())


@contextmanager
def recorded() -> Iterator[list[Case]]:
    """Launches inside are run, and kept."""
    cases: list[Case] = []
    real = Program.launch

    def launch(program: Program, of: Launch, tensors: Sequence[Tensor | None], *how: Any, **named: Any) -> None:
        cases.append(Case(program, of, tensors))
        real(program, of, tensors, *how, **named)
        cases[-1].keep_results()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "launch", launch)
        yield cases


class Deletion(NamedTuple):
    kernel: str
    at: int
    """Index of the instruction."""
    instruction: str
    executed: bool
    found: bool = False
    by: str = ""
    """What noticed it: a race, advice, a deadlock, another error, or the results; and what that says."""
    reason: str = ""
    """Why it changes nothing, where nothing noticed it."""


def candidates(program: Listing) -> list[int]:
    return [at for at, of in enumerate(program.instructions) if ORDERS.fullmatch(of.name)]


def without(program: Program, at: int) -> Program:
    """A wait succeeds at once, and anything else does nothing."""
    of = program.instructions[at]
    mutant = copy.copy(program)
    mutant.code = copy.copy(program.code)
    if "_wait." in of.name:
        if of.predicate:
            raise NotImplementedError(f"a wait under a predicate: {of.text}")
        key = program.key(of.operands[0], "?")
        mutant.code[at] = lambda threads: threads.put(key, True)
    else:
        mutant.code[at] = lambda threads: None
    return mutant


def delete_each(kernel: str, case: Case, chosen: Sequence[int] | None = None) -> list[Deletion]:
    """Args: `chosen` of the candidates, None: all. Raises ValueError if the unchanged kernel is wrong."""
    program, base = case.program, Effects()
    if wrong := case.run(program, base, True):
        raise ValueError(f"{kernel} as it is: {wrong}")
    known = {finding.key for finding in (*base.findings, *base.advice)}
    idle = base.idle()
    deletions = []
    for at in candidates(program) if chosen is None else chosen:
        text, executed = program.instructions[at].text, at in base.executed
        by = noticed(without(program, at), case, known) if executed else ""
        reason = "" if by or not executed else idle.get(at, "")
        deletions.append(Deletion(kernel, at, text, executed, bool(by), by, reason))
    return deletions


def noticed(mutant: Program, case: Case, known: set[Key]) -> str:
    """What notices that an instruction is missing; nothing: empty."""
    for late in (True, False):
        order = Order(known=known)
        try:
            if wrong := case.run(mutant, order, late):
                return f"results: {wrong}"
        except RaceError as raised:
            return f"race: {raised}"
        except (RuntimeError, MemoryError) as raised:
            if order.findings:
                return f"race: {order.findings[0]}"
            error, _, _ = str(raised).partition("\n")
            return f"deadlock: {error}" if "wait for each other" in error else f"error: {error}"
        if order.advice:
            return f"advice: {order.advice[0]}"
    return ""


class Event(NamedTuple):
    warps: tuple[int, ...]
    kind: str
    """access, arrival, wait, release (of a barrier of threads); or, of what fences are for: init fence, use of
    mbarriers by the async proxy, register fence, use of registers, multiply."""
    at: int
    what: Any = None
    """Of arrival, wait and release: the barrier and its phase, or the warps' groups and which. Of registers: names."""


class Effects(Order):
    """Also remembers what candidates did in the kernel as it is."""

    def __init__(self) -> None:
        super().__init__(keep_going=True)
        self.executed: set[int] = set()
        self._candidates: set[int] = set()
        self._did: dict[int, str] = {}
        """Why a candidate did nothing whenever it was executed; empty: it did something."""
        self._clusters: list[list[Event]] = []
        self._wrote: set[int] = set()
        """Warps, since their last proxy fence."""
        self._apart: set[int] = set()
        """Warps, since they last were together."""

    def idle(self) -> dict[int, str]:
        """Candidates that need not be there for this launch, and why."""
        reasons = {at: why for at, why in self._did.items() if why}
        for analyse, why in ANALYSES.items():
            seen, useful = (set().union(*sets) for sets in zip(*map(analyse, self._clusters), strict=True))
            for at in seen - useful:
                arrives = re.search("arrive|commit", self.program.instructions[at].name)
                reasons.setdefault(at, why or (UNHEARD if arrives else LAST))
        return reasons

    def watches(self, program: Listing) -> set[int]:
        self._candidates = {*candidates(program)}
        return super().watches(program) | self._candidates

    def uses(self, threads: Threads) -> None:
        if threads.cta.pc in self._candidates:
            self.executed.add(threads.cta.pc)
        else:
            super().uses(threads)
            self._event(threads, "use of registers", self._watched[threads.cta.pc])

    def begin(self, ctas: list[Cta]) -> None:
        super().begin(ctas)
        self._clusters.append([])
        self._wrote.clear()
        self._apart.clear()
        self._phases: dict[Any, int] = {}
        """How many phases of barriers of threads, commits to an mbarrier, and groups of a warp there were."""

    def _event(self, threads: Threads, kind: str, what: Any = None) -> None:
        self._clusters[-1].append(Event(tuple(self._warps(threads)), kind, threads.cta.pc, what))

    def _count(self, key: Any) -> int:
        """Before this one."""
        count = self._phases.get(key, 0)
        self._phases[key] = count + 1
        return count

    @contextmanager
    def _learning(self, threads: Threads, otherwise: str = KNOWN) -> Iterator[None]:
        """Tells whether clocks of the threads' warps change inside."""
        warps = [*self._warps(threads)]
        before = self.clocks.clock[warps]
        yield
        self._tell(threads.cta.pc, otherwise if (before == self.clocks.clock[warps]).all() else "")

    def _tell(self, at: int, why: str) -> None:
        """Args: why nothing was done this time; empty: something was."""
        self._did[at] = why and self._did.get(at, why)

    def _accesses(self, threads: Threads) -> None:
        self._event(threads, "access")
        self._apart.update(self._warps(threads))

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        super().shared(threads, kind, places, size)
        self._accesses(threads)
        if kind != "read":
            self._wrote.update(self._warps(threads))

    def tensor_memory(self, threads: Threads, kind: str, column: int, count: int) -> None:
        super().tensor_memory(threads, kind, column, count)
        self._accesses(threads)
        self._event(threads, f"{kind} TMEM", (threads.cta.rank, range(column, column + count)))

    def owns_tensor_memory(self, threads: Threads, column: int, count: int) -> None:
        super().owns_tensor_memory(threads, column, count)
        self._event(threads, "access")
        self._event(threads, "write TMEM", (threads.cta.rank, range(column, column + count)))

    def starts(self, threads: Threads, operation: Operation) -> None:
        super().starts(threads, operation)
        self._event(threads, "access")
        for region in operation.writes:
            if region.space == "tensor":
                columns = region.places[0] % COLUMNS
                self._event(threads, "write TMEM", (region.cta.rank, range(columns[0], columns[-1] + 1)))
        if operation.kind == "cp.async":
            self._wrote.update(self._warps(threads))
        if operation.kind == "wgmma":
            self._event(threads, "multiply", self._registers(threads.cta.pc))
        if operation.barrier is not None:
            self._event(threads, "use of mbarriers")

    def waits_tensor_memory(self, threads: Threads, kind: str) -> None:
        with self._learning(threads):
            super().waits_tensor_memory(threads, kind)
        if kind == "ld":
            self._event(threads, "wait TMEM")
        self._apart.difference_update(self._warps(threads))

    def syncs_warps(self, threads: Threads) -> None:
        super().syncs_warps(threads)
        warps = {*self._warps(threads)}
        self._tell(threads.cta.pc, ALIGNED if self._apart.isdisjoint(warps) else "")
        self._apart -= warps

    def arrives(self, threads: Threads, barrier: Place, phase: int) -> None:
        super().arrives(threads, barrier, phase)
        self._event(threads, "arrival", (barrier, phase))

    def commits(self, threads: Threads, barriers: list[Place]) -> None:
        super().commits(threads, barriers)
        self._event(threads, "use of mbarriers")
        for barrier in barriers:  # in order; one completes a phase
            self._event(threads, "arrival", (barrier, self._count(barrier)))

    def waits(self, threads: Threads, barrier: Place, phase: int) -> None:
        with self._learning(threads, FIRST if phase < 0 else KNOWN):
            super().waits(threads, barrier, phase)
        self._event(threads, "wait", (barrier, phase))

    def arrives_at(self, threads: Threads, number: int) -> None:
        super().arrives_at(threads, number)
        key = threads.cta.rank, "threads", number
        self._event(threads, "arrival", (key, self._phases.get(key, 0)))
        if "sync" in self.program.instructions[threads.cta.pc].name:
            self._apart.difference_update(self._warps(threads))

    def releases(self, cta: Cta, number: int, warps: list[int]) -> None:
        super().releases(cta, number, warps)
        key = cta.rank, "threads", number
        numbers = tuple(cta.rank * self.warps + warp for warp in warps)
        self._clusters[-1].append(Event(numbers, "release", -1, (key, self._count(key))))

    def commits_group(self, threads: Threads, kind: str) -> None:
        super().commits_group(threads, kind)
        key = kind, *self._warps(threads)
        self._event(threads, "arrival", (key, self._count(key)))

    def waits_group(self, threads: Threads, kind: str, most: int) -> None:
        with self._learning(threads):
            super().waits_group(threads, kind, most)
        if kind == "cp.async":
            self._apart.update(self._warps(threads))
        key = kind, *self._warps(threads)
        self._event(threads, "wait", (key, self._phases.get(key, 0) - 1 - most))

    def fences(self, threads: Threads, kind: str) -> None:
        super().fences(threads, kind)
        warps = {*self._warps(threads)}
        if kind.startswith("fence.proxy.async"):
            self._tell(threads.cta.pc, WRITTEN if self._wrote.isdisjoint(warps) else "")
            self._wrote -= warps
        elif kind.startswith("fence.mbarrier_init"):
            self._event(threads, "init fence")
        elif kind == "wgmma.fence":
            self._event(threads, "register fence")


# Of the events of a cluster: instructions of a kind, and those of them that matter


def ordering(events: list[Event]) -> tuple[set[int], set[int]]:
    """Arrivals and waits matter if an access of who waits comes behind them, or of whom that one hands on to."""
    useful, seen = set(), set()
    needs: set[int] = set()
    """Warps that access something later, or hand on to who does; walking back from the end."""
    heard: dict[Any, int] = {}
    """Of a barrier, the last phase that somebody waits for who needs it."""
    for event in reversed(events):
        if event.kind == "access":
            needs.update(event.warps)
        elif event.kind in ("wait", "release", "arrival"):
            key, phase = event.what
            seen.add(event.at)
            if event.kind != "arrival" and not needs.isdisjoint(event.warps):
                heard[key] = max(phase, heard.get(key, phase))
                useful.add(event.at)
            elif event.kind == "arrival" and phase <= heard.get(key, -1):
                needs.update(event.warps)
                useful.add(event.at)
    return seen - {-1}, useful


def fencing_mbarriers(events: list[Event]) -> tuple[set[int], set[int]]:
    """A fence of mbarrier.init matters if it is the last of its warp before the async proxy uses any."""
    seen, useful = set(), set()
    last: dict[int, int] = {}
    for event in events:
        if event.kind == "init fence":
            seen.add(event.at)
            last.update(dict.fromkeys(event.warps, event.at))
        elif event.kind == "use of mbarriers":
            useful.update(last.values())
            last.clear()
    return seen, useful


def meeting(events: list[Event]) -> tuple[set[int], set[int]]:
    """A barrier of threads matters if its warps do anything else before they have met there again."""
    seen, useful = set(), set()
    arrived: dict[Any, set[int]] = {}
    met: dict[Any, tuple[set[int], set[int]]] = {}
    """The last time: warps that waited, and instructions."""
    for event in events:
        if event.kind == "arrival" and "threads" in event.what[0]:
            arrived.setdefault(event.what[0], set()).add(event.at)
        elif event.kind == "release":
            key, _ = event.what
            if key in met and not met[key][0] <= {*event.warps}:
                useful |= met[key][1]
            met[key] = {*event.warps}, arrived.pop(key)
            seen |= met[key][1]
        elif event.kind in ("access", "arrival", "wait"):
            for key in [key for key, (warps, _) in met.items() if not warps.isdisjoint(event.warps)]:
                useful |= met.pop(key)[1]
    return seen, useful


def waiting_for_tmem(events: list[Event]) -> tuple[set[int], set[int]]:
    """tcgen05.wait::ld matters if what was loaded is overwritten, or freed, before the warp's next one."""
    seen, useful = set(), set()
    loading: dict[int, list[tuple[int, range]]] = {}
    waited: dict[int, tuple[int, list[tuple[int, range]]]] = {}
    for event in events:
        if event.kind == "read TMEM":
            for warp in event.warps:
                loading.setdefault(warp, []).append(event.what)
        elif event.kind == "wait TMEM":
            seen.add(event.at)
            waited |= {warp: (event.at, loading.pop(warp, [])) for warp in event.warps}
        elif event.kind == "write TMEM":
            rank, columns = event.what
            for at, loaded in waited.values():
                if any(of == rank and max(x.start, columns.start) < min(x.stop, columns.stop) for of, x in loaded):
                    useful.add(at)
    return seen, useful


def fencing_registers(events: list[Event]) -> tuple[set[int], set[int]]:
    """wgmma.fence matters if it alone is between the use of a register and a product, or before the first product."""
    seen, useful = set(), set()
    fences: dict[tuple[int, str], list[int]] = {}
    """Of a warp and a register, since it was used; "first": since the kernel began."""
    for event in events:
        for warp in event.warps:
            if event.kind == "register fence":
                seen.add(event.at)
                fences.setdefault((warp, "first"), [])
                for key, since in fences.items():
                    if key[0] == warp:
                        since.append(event.at)
            elif event.kind == "use of registers":
                fences.update({(warp, register): [] for register in event.what})
            elif event.kind == "multiply":
                for register in ("first", *event.what):
                    since = fences.get((warp, register), [])
                    if len(since) == 1:
                        useful.add(since[0])
                    since[:] = [-1, -1]
    return seen, useful


ANALYSES = {
    ordering: "",
    fencing_mbarriers: COVERED,
    meeting: COVERED,
    waiting_for_tmem: COVERED,
    fencing_registers: UNTOUCHED,
}
"""And what is said of those that do not matter."""
