"""The state of one CTA, which of its threads can go on, and groups of asynchronous operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tests.ptx.decode import Flow
from tests.ptx.registers import LANES, MOST_SETS, Registers, Threads

if TYPE_CHECKING:
    from tests.ptx.mbarrier import Barrier
    from tests.ptx.program import Cluster

State = TypeVar("State")
TENSOR_LANES, TENSOR_COLUMNS = 128, 512
NAN = 0x7FFFFFFF
"""In fp32, and twice in fp16 and bf16."""
REGISTER_FILE = 1 << 16


class NamedBarrier:
    def __init__(self) -> None:
        self.expected = self.arrived = 0
        self.warps: set[int] = set()
        self.waiting = 0
        self.resume: list[tuple[int, int]] = []
        """Where threads go on that wait, and which."""


class Waiting(NamedTuple):
    """Why threads do not go on, for the message about a deadlock."""

    at: int
    bits: int
    what: object
    """Described when the message is made."""


class Cta:
    """One of a cluster; kept from one cluster to the next, for its views of registers."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        program = cluster.program
        self.cluster, self.program, self.rank = cluster, program, rank
        self.observer = cluster.observer
        self.registers = Registers(program.keys, program.kind, program.threads)
        self.everyone = (1 << program.threads) - 1
        self._sets: dict[int, Threads] = {}
        self.pc = 0

    def reset(self, special: dict[str, Any], shared_bytes: int, ahead: int) -> None:
        """As another CTA of the grid. Args: values of special registers; bits of the threads that go ahead."""
        self.registers.reset(special)
        self.shared = np.full(shared_bytes, 0xFF, "u1")
        self.tensor = np.empty((TENSOR_LANES, TENSOR_COLUMNS), "u4")
        self.allocated: dict[int, int] = {}
        """Columns of TMEM from each first one on."""
        self.may_allocate = True
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.ahead = ahead
        self.ready: tuple[dict[int, int], dict[int, int]] = {}, {}
        """Program counters, and bits of the threads there: those that go ahead, and the others."""
        self.stop = 0
        """The program counter at which threads that run meet others, or must let others run."""
        self.blocked: dict[int, Waiting] = {}
        self.ended = 0
        self.state: dict[str, Any] = {}
        """Of copies and products that have been started, by the module that starts them."""
        warps = self.program.threads // LANES
        most = REGISTER_FILE // self.program.threads // 8 * 8
        self.register_limits = [min(most, 255)] * warps
        self.waiting_for_registers: list[tuple[int, int]] = []
        self.add(0, self.everyone)

    # Sets of threads

    def threads(self, bits: int) -> Threads | None:
        if bits == 0:
            return None
        if bits not in self._sets:
            if len(self._sets) > MOST_SETS:
                self._sets.clear()
            self._sets[bits] = Threads(self, bits)
        return self._sets[bits]

    # Scheduling

    def add(self, at: int, bits: int) -> None:
        """Lets threads go on from an instruction."""
        for of, some in zip(self.ready, (bits & self.ahead, bits & ~self.ahead), strict=True):
            if some:
                of[at] = of.get(at, 0) | some
        if bits & self.ahead and not self.running_ahead:
            self.stop = -1
        elif bits & (self.ahead if self.running_ahead else ~self.ahead):
            self.stop = min(self.stop, at)

    running_ahead = False

    def next(self) -> Flow | None:
        """The threads to run: of those that go ahead, or else of all, those furthest behind."""
        for of in self.ready:
            if of:
                at = min(of)
                self.running_ahead = of is self.ready[0]
                bits = of.pop(at)
                self.stop = min(of, default=1 << 40)
                return Flow(at, self.threads(bits))
        return None

    def block(self, at: int, threads: Threads, what: object) -> None:
        self.blocked[threads.bits] = Waiting(at, threads.bits, what)

    def unblock(self, at: int, bits: int) -> None:
        """Args: `at`, where threads go on that have waited."""
        for key in [key for key in self.blocked if key & bits]:
            del self.blocked[key]
        self.add(at, bits)

    def exit(self, threads: Threads) -> None:
        self.ended |= threads.bits

    def end(self) -> None:
        """Raises RuntimeError for what a CTA must not leave behind."""
        if self.allocated:
            raise RuntimeError(f"{self}: returns without tcgen05.dealloc of columns {self.allocated}")
        if not self.registers_fit():
            raise RuntimeError(f"{self}: more registers than the file has")

    def registers_fit(self) -> bool:
        return sum(self.register_limits) * LANES <= REGISTER_FILE

    def state_of(self, name: str, make: Callable[[], State]) -> State:
        """What a family of instructions keeps for this CTA."""
        if name not in self.state:
            self.state[name] = make()
        state: State = self.state[name]
        return state

    def __repr__(self) -> str:
        place = tuple(int(self.registers.special[f"%ctaid.{x}"]) for x in "xyz")
        return f"CTA {place}"

    # Named barriers

    def arrive(self, at: int, threads: Threads, number: int, expected: int, wait: bool) -> None:
        """bar.sync (`wait`) and bar.arrive. Args: `at`, where threads go on; `expected`, how many threads arrive."""
        barrier = self.named.setdefault(number, NamedBarrier())
        if barrier.arrived and barrier.expected != expected:
            raise RuntimeError(f"{self}: barrier {number} of {barrier.expected} threads and of {expected}")
        barrier.expected = expected
        barrier.arrived += threads.count
        self.observer.arrives_at(threads, number)
        if wait:
            barrier.waiting |= threads.bits
            barrier.resume.append((at, threads.bits))
            self.block(at - 1, threads, f"barrier {number} with {expected} threads")
        if barrier.arrived > expected:
            raise RuntimeError(f"{self}: more threads arrive at barrier {number} than the {expected} that it counts")
        if barrier.arrived == expected:
            released = self.named.pop(number)
            of = self.threads(released.waiting)
            self.observer.releases(self, number, of.warps if of else [])
            for resume, bits in released.resume:
                self.unblock(resume, bits)


class Groups:
    """Operations that were started and, in groups, committed, until they are waited for."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.groups: list[list[Any]] = []

    def commit(self) -> None:
        self.groups.append(self.started)
        self.started = []

    def wait(self, most: int) -> list[Any]:
        """Leaves `most` groups, and returns what the others hold."""
        ended = max(0, len(self.groups) - most)
        done = [x for group in self.groups[:ended] for x in group]
        del self.groups[:ended]
        return done


def groups_of(threads: Threads, kind: str) -> list[Groups]:
    """Operations of a kind that each of the threads has started."""
    groups = threads.cta.state_of(kind, lambda: defaultdict(Groups))
    return [groups[thread] for thread in threads.numbers.tolist()]
