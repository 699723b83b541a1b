"""Kernels without one of the instructions that order them, and whether anything notices.

    recorded launch -> its candidates -> for each: the program without it -> run with `Order`, late and early -> Deletion

What is executed and not noticed must change nothing. Why, is told by what the instruction did in the unchanged kernel
(`Effects`), where that is one of:

    FIRST       a wait for the phase before an mbarrier's first: nobody has used its stage yet
    KNOWN       a wait for what its warps knew already
    WRITTEN     a proxy fence behind which its warps have written nothing
    COVERED     a fence of mbarrier.init that a later one of the same warp makes up for, before anyone knows of either
    LAST        a wait behind which its warps access nothing, nor hand on to who does
    UNHEARD     an arrival for which nobody waits who accesses anything then
    ALIGNED     bar.warp.sync where the warp has done nothing since it last was together

Others are for a reader to explain.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from tests.support.ptx.clocks import Finding
from tests.support.ptx.observer import Operation
from tests.support.ptx.order import Order
from tests.support.ptx.program import Code, Program, storages_of

if TYPE_CHECKING:
    from torch import Tensor

    from tests.support.ptx.cta import Cta
    from tests.support.ptx.launch import Launch
    from tests.support.ptx.observer import Observer
    from tests.support.ptx.registers import Threads

ORDERS = re.compile(
    r"mbarrier\.(try_wait|test_wait|arrive)\b.*|tcgen05\.(commit|wait|fence)\b.*|wgmma\.(fence|commit_group|wait_group)\b.*"
    r"|fence\..*|(bar|barrier)\..*|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)\b.*|griddepcontrol\..*"
)
"""Names of instructions that order others."""
FIRST = "nobody has used its stage before"
KNOWN = "what it waits for is known to its warps already"
WRITTEN = "its warps have written nothing since their last proxy fence"
COVERED = "a later fence of its warp makes the same mbarriers known, and nobody uses them before"
LAST = "behind it its warps access nothing, nor hand on to a warp that does"
UNHEARD = "nobody waits for it who accesses anything then"
ALIGNED = "its warp has done nothing since it last was together"
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

    def run(self, program: Program, observer: Observer | None, late: bool) -> str:
        """What is wrong with the results; nothing: empty."""
        for memory, before in zip(self._memory, self._before, strict=True):
            memory[...] = before
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


def candidates(program: Program) -> list[int]:
    return [at for at, of in enumerate(program.instructions) if ORDERS.fullmatch(of.name)]


def without(program: Program, at: int) -> Program:
    """A wait succeeds at once, and anything else does nothing."""
    of = program.instructions[at]
    mutant = copy.copy(program)
    mutant.code = Code(mutant)
    mutant.code.update(program.code)
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
    known = {key_of(x) for x in (*base.findings, *base.advice)}
    idle = base.idle()
    deletions = []
    for at in candidates(program) if chosen is None else chosen:
        text, executed = program.instructions[at].text, at in base.executed
        by = noticed(without(program, at), case, known) if executed else ""
        reason = "" if by or not executed else idle.get(at, "")
        deletions.append(Deletion(kernel, at, text, executed, bool(by), by, reason))
    return deletions


def noticed(mutant: Program, case: Case, known: set[tuple[str, int, int]]) -> str:
    """What notices that an instruction is missing; nothing: empty."""
    for late in (True, False):
        order = Order(keep_going=True)
        try:
            wrong = case.run(mutant, order, late)
            error = f"results: {wrong}" if wrong else ""
        except (RuntimeError, MemoryError) as raised:
            error = str(raised)
        races = [x for x in order.findings if key_of(x) not in known]
        advice = [x for x in order.advice if key_of(x) not in known]
        if races:
            return f"race: {races[0].text}"
        if error:
            return ("deadlock: " if "wait for each other" in error else "") + error.partition("\n")[0]
        if advice:
            return f"advice: {advice[0].text}"
    return ""


def key_of(finding: Finding) -> tuple[str, int, int]:
    return finding.kind, finding.first, finding.second


class Event(NamedTuple):
    warps: tuple[int, ...]
    kind: str
    """access, arrival, wait, or commit and wait of a group."""
    at: int
    what: Any = None
    """The mbarrier and phase, the named barrier and how often it was complete, or the group."""


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
        useful, seen = set(), set()
        for events in self._clusters:
            some, all_ = useful_of(events)
            useful |= some
            seen |= all_
        for at in seen - useful:
            kind = self.program.instructions[at].name
            reasons.setdefault(at, UNHEARD if "arrive" in kind or "commit" in kind else LAST)
        return reasons

    def watches(self, program: Program) -> set[int]:
        self._candidates = {*candidates(program)}
        return super().watches(program) | self._candidates

    def uses(self, threads: Threads) -> None:
        if threads.cta.pc in self._candidates:
            self.executed.add(threads.cta.pc)
        else:
            super().uses(threads)

    def begin(self, ctas: list[Cta]) -> None:
        super().begin(ctas)
        self._clusters.append([])
        self._wrote.clear()
        self._apart.clear()
        self._phases: dict[Any, int] = {}
        self._groups_done: dict[tuple[str, int], int] = {}

    def _event(self, threads: Threads, kind: str, what: Any = None) -> None:
        self._clusters[-1].append(Event(tuple(self._warps(threads)), kind, threads.cta.pc, what))

    def _tell(self, at: int, why: str) -> None:
        """Args: why nothing was done this time; empty: something was."""
        self._did[at] = why and self._did.get(at, why)

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        super().shared(threads, kind, places, size)
        self._event(threads, "access")
        self._apart.update(self._warps(threads))
        if kind != "read":
            self._wrote.update(self._warps(threads))

    def tensor_memory(self, threads: Threads, kind: str, column: int, count: int) -> None:
        super().tensor_memory(threads, kind, column, count)
        self._event(threads, "access")
        self._apart.update(self._warps(threads))

    def owns_tensor_memory(self, threads: Threads, column: int, count: int) -> None:
        super().owns_tensor_memory(threads, column, count)
        self._event(threads, "access")

    def starts(self, threads: Threads, operation: Operation) -> None:
        super().starts(threads, operation)
        self._event(threads, "access")

    def waits_tensor_memory(self, threads: Threads, kind: str) -> None:
        super().waits_tensor_memory(threads, kind)
        self._apart.difference_update(self._warps(threads))

    def syncs_warps(self, threads: Threads) -> None:
        super().syncs_warps(threads)
        warps = {*self._warps(threads)}
        self._tell(threads.cta.pc, ALIGNED if self._apart.isdisjoint(warps) else "")
        self._apart -= warps

    def arrives(self, threads: Threads, barrier: tuple[Cta, int], phase: int) -> None:
        super().arrives(threads, barrier, phase)
        self._event(threads, "arrival", (self._key(barrier), phase))

    def commits(self, threads: Threads, barriers: list[tuple[Cta, int]]) -> None:
        super().commits(threads, barriers)
        for barrier in barriers:  # in order, and one completes a phase
            key = self._key(barrier)
            self._event(threads, "arrival", (key, self._phases.get(key, 0)))
            self._phases[key] = self._phases.get(key, 0) + 1

    def waits(self, threads: Threads, barrier: tuple[Cta, int], phase: int) -> None:
        warps = [*self._warps(threads)]
        before = self.clocks.clock[warps]
        super().waits(threads, barrier, phase)
        same = (before == self.clocks.clock[warps]).all()
        self._tell(threads.cta.pc, FIRST if phase < 0 else KNOWN if same else "")
        self._event(threads, "wait", (self._key(barrier), phase))

    def arrives_at(self, threads: Threads, number: int) -> None:
        super().arrives_at(threads, number)
        key = threads.cta.rank, number
        self._event(threads, "arrival", (key, self._phases.get(key, 0)))

    def releases(self, cta: Cta, number: int, warps: list[int]) -> None:
        before = self.clocks.clock.copy()
        super().releases(cta, number, warps)
        key = cta.rank, number
        numbers = tuple(cta.rank * self.warps + warp for warp in warps)
        self._clusters[-1].append(Event(numbers, "wait", -1, (key, self._phases.get(key, 0))))
        self._phases[key] = self._phases.get(key, 0) + 1
        del before

    def commits_group(self, threads: Threads, kind: str) -> None:
        super().commits_group(threads, kind)
        for warp in self._warps(threads):
            key = kind, warp
            self._groups_done[key] = self._groups_done.get(key, 0) + 1
        self._event(threads, "arrival", (("group", kind, threads.cta.rank, *threads.warps), self._group(threads, kind)))

    def waits_group(self, threads: Threads, kind: str, most: int, reads: bool) -> None:
        super().waits_group(threads, kind, most, reads)
        last = self._group(threads, kind) - most
        self._event(threads, "wait", (("group", kind, threads.cta.rank, *threads.warps), last))

    def _group(self, threads: Threads, kind: str) -> int:
        return max(self._groups_done.get((kind, warp), 0) for warp in self._warps(threads))

    def fences(self, threads: Threads, kind: str) -> None:
        super().fences(threads, kind)
        warps = {*self._warps(threads)}
        if kind.startswith("fence.proxy.async"):
            self._tell(threads.cta.pc, WRITTEN if self._wrote.isdisjoint(warps) else "")
            self._wrote -= warps


def useful_of(events: list[Event]) -> tuple[set[int], set[int]]:
    """Instructions of arrivals and waits that order something; and all of them. Walks back from the end."""
    useful, seen = set(), set()
    needs: set[int] = set()
    """Warps that access something later, or hand on to who does."""
    heard: dict[Any, int] = {}
    """Of a barrier, the last phase that somebody waits for who needs it."""
    for event in reversed(events):
        if event.kind == "access":
            needs.update(event.warps)
            continue
        key, phase = event.what
        if event.kind == "wait" and not needs.isdisjoint(event.warps):
            heard[key] = max(phase, heard.get(key, phase))
            useful.add(event.at)
        elif event.kind == "arrival" and phase <= heard.get(key, -1):
            needs.update(event.warps)
            useful.add(event.at)
        seen.add(event.at)
    return useful, seen - {-1}
