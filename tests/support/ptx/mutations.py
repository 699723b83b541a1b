"""Kernels without one of the instructions that order them, and whether anything notices.

    candidates -> for each: the program without it -> run with `Order`, operations late and early -> Deletion

A deletion that is executed and not found must be one that changes nothing. Some are recognised here, by what the
instruction did in the unchanged kernel (`Effects`): a wait for what its warp knew already, or for the phase before the
first; a proxy fence behind which nothing was written. The others' reasons are for a reader to find.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.ptx.clocks import Finding
from tests.support.ptx.observer import Observer
from tests.support.ptx.order import Order, RaceError
from tests.support.ptx.program import Code, Program

if TYPE_CHECKING:
    from tests.support.ptx.cta import Cta
    from tests.support.ptx.registers import Threads

ORDERS = re.compile(
    r"mbarrier\.(try_wait|test_wait|arrive)\b.*|tcgen05\.(commit|wait|fence)\b.*|wgmma\.(fence|commit_group|wait_group)\b.*"
    r"|fence\..*|(bar|barrier)\..*|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)\b.*|griddepcontrol\..*"
)
"""Names of instructions that order others."""
FIRST_PHASE = "it waits for nothing: its stage has not been used before"
KNOWN = "what it tells is known to its warps already"
NOTHING_WRITTEN = "its warps have written nothing since their last proxy fence"

Case = Callable[[Program, "Observer | None", bool], "str | None"]
"""Launches a kernel, with an observer and operations late or early. Returns what is wrong with its results."""


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


class Effects(Order):
    """Also remembers which candidates were executed, and which of them did something."""

    def __init__(self) -> None:
        super().__init__(keep_going=True)
        self.executed: set[int] = set()
        self.idle: dict[int, str] = {}
        """Candidates that never did anything, and why."""
        self._candidates: set[int] = set()
        self._wrote: set[int] = set()
        """Warps, since their last proxy fence."""

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
        self._wrote.clear()

    def shared(self, threads: Threads, kind: str, places: Any, size: int) -> None:
        super().shared(threads, kind, places, size)
        if kind != "read":
            self._wrote.update(self._warps(threads))

    def waits(self, threads: Threads, barrier: tuple[Cta, int], phase: int) -> None:
        warps = [*self._warps(threads)]
        before = self.clocks.clock[warps]
        super().waits(threads, barrier, phase)
        same = (before == self.clocks.clock[warps]).all()
        self._did(threads.cta.pc, not same, FIRST_PHASE if phase < 0 else KNOWN)

    def fences(self, threads: Threads, kind: str) -> None:
        super().fences(threads, kind)
        if kind.startswith("fence.proxy.async"):
            warps = {*self._warps(threads)}
            self._did(threads.cta.pc, not self._wrote.isdisjoint(warps), NOTHING_WRITTEN)
            self._wrote -= warps

    def _did(self, at: int, something: bool, otherwise: str) -> None:
        if something:
            self.idle[at] = ""
        else:
            self.idle.setdefault(at, otherwise)


def delete_each(kernel: str, program: Program, case: Case, chosen: list[int] | None = None) -> list[Deletion]:
    """Args: `chosen` of the candidates, None: all.

    Raises RaceError if the unchanged kernel has findings other than those of its end, ValueError if it is wrong.
    """
    base = Effects()
    if wrong := case(program, base, True):
        raise ValueError(f"{kernel} as it is: {wrong}")
    known = {key_of(x) for x in (*base.findings, *base.advice)}
    deletions = []
    for at in candidates(program) if chosen is None else chosen:
        text, executed = program.instructions[at].text, at in base.executed
        by = noticed(without(program, at), case, known) if executed else ""
        reason = "" if by or not executed else base.idle.get(at, "")
        deletions.append(Deletion(kernel, at, text, executed, bool(by), by, reason))
    return deletions


def noticed(mutant: Program, case: Case, known: set[tuple[str, int, int]]) -> str:
    """What notices that an instruction is missing; nothing: empty."""
    for late in (True, False):
        order = Order(keep_going=True)
        try:
            wrong = case(mutant, order, late)
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


__all__ = ["Case", "Deletion", "Effects", "RaceError", "candidates", "delete_each", "noticed", "without"]
