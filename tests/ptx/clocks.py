"""Happens-before: finds accesses of shared memory and TMEM that nothing puts in order, whatever the schedule was.

    who acts     warps; and behind them what they start and do not wait for: copies, products, loads of TMEM
    clocks       [agent, other]: up to which of its times the other is before what the agent does next
    barriers     hand clocks on: from who arrives, or commits, to who waits for the phase that this completes
    cells        2 bytes of shared memory, or a lane and column of TMEM: who wrote last, and who has read since

A finding is two accesses of one cell, one of them a write, where the earlier is not in the clock of the later, with the
program points of both. A wait that is left out so is found in any schedule in which both accesses are executed.

Each agent has one number in every clock, its time; agents are not only threads:
    warp                 counts what it hands on, at arrivals and fences; its own accesses are in order
    mbarrier             phases: a copy (cp.async.bulk ... mbarrier) is done with the phase that it completes
    tensor pipe of a warp    tcgen05.mma in order; tcgen05.commit hands on how far it is, at an mbarrier
    groups of a warp     of cp.async and of cp.async.bulk stores: done when wait_group says so, for wgmma a warpgroup
    loads, stores        of TMEM by a warp (tcgen05.ld, .st), until tcgen05.wait::ld or ::st

Rules, by section of the PTX ISA (9.x):
    "Memory Consistency Model": release and acquire at barriers hand on all that the thread knows, so a clock is enough.
    "Async proxy", "membar / fence": what threads wrote reaches copies and products (wgmma, tcgen05.mma) only through
        fence.proxy.async. The writer must execute it before it hands on: stricter than "along the causality path", and
        what CUTLASS does. The end of a copy or product needs no fence, it has one.
    "membar / fence": mbarrier.init reaches other agents through fence.mbarrier_init or fence.proxy.async of who did it.
    "Pipelined tcgen05 Instructions": of asynchronous ones, products of one shape into one accumulator are in order.
    "Non-pipelined instructions": others need tcgen05.wait::ld and ::st before the thread hands on or goes on, and
        tcgen05.commit with an mbarrier.
    "Specialized Inter-thread Synchronization": tcgen05.fence is needed where arrival or wait are relaxed only.
    "Phase of the mbarrier object": who waits by parity must have done so before the next phase completes.
    "bar.warp.sync": it, or a barrier of threads, is between accesses of one cell by two lanes of a warp.
    "cp.async.bulk.wait_group", "mapa": a CTA may not end before bulk stores have read its shared memory, before copies
        have written it, and before other CTAs have arrived at its mbarriers.

Advice, apart from findings, is what the ISA's text does not promise, and kernels of CUTLASS and FlashAttention-4 do:
    registers    TMEM is written again after tcgen05.ld of it whose registers were all used, without tcgen05.wait::ld
                 ("Register dependencies, same thread": use waits for the value, and promises nothing about memory)
    pipeline     products into different accumulators, in order in one warp's pipe
    reuse        a copy overwrites what threads have read, with a barrier but without a proxy fence between
    lanes        one lane arrives at an mbarrier, or starts a copy or product, for what others of its warp did to shared
                 memory since the last bar.warp.sync or barrier of threads ("elect.sync" and what is .sync.aligned wait
                 for the lanes, and promise nothing about memory)

Of lanes no more is looked at: not whether the one that arrives is the one that accessed alone, nor which one waits.
Races in global memory are not found, nor what ptxas makes of the instructions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

SHARED_CELL = 2
"""Bytes."""
SHARED_CELLS = (228 << 10) // SHARED_CELL
LANES, COLUMNS = 128, 512
"""Of TMEM; a cell is lane * COLUMNS + column."""
AGENTS = 512
"""Most of them in one launch of a cluster."""
ORDERED, FENCED, CONSUMED, TOGETHER = ROWS = range(4)
"""Rows of a clock: what is before; of that, what threads wrote and made known to the async proxy; what is before if
registers of tcgen05.ld, once used, tell that it has read; and what is before if one lane hands on only what its warp
had done when its lanes last were together."""

GROUPS = {"cp.async": "copies of warp", "bulk": "bulk stores of warp", "wgmma": "products of warpgroup"}
TMEM = {"mma": "tensor pipe of warp", "ld": "TMEM loads of warp", "st": "TMEM stores of warp"}
"""Agents, by kind of instruction."""

RACE = "nothing orders"
PROXY = "no proxy fence between"
INIT = "no fence of mbarrier.init between"
PHASE = "the phase may pass by"
END = "the CTA ends during"
LANES_RACE = "no bar.warp.sync between"
REGISTER_FENCE = "no wgmma.fence between"
REGISTERS = "registers alone order"
PIPELINE = "the tensor pipe alone orders"
REUSE = "no proxy fence, but a barrier, between"
ELECTED = "one lane alone hands on between"
ADVICE = {REGISTERS, PIPELINE, REUSE, ELECTED}
ATOMIC = "adds atomically"


class Access(NamedTuple):
    agent: int
    time: int
    point: int
    """Index of the instruction."""
    writes: bool
    is_generic: bool
    """By threads, not by the async proxy; of TMEM: never."""
    detail: Hashable = None
    """Of a product in the tensor pipe: where it adds up, and its shape; of what is no plain access: a verb."""
    of_lanes: bool = False
    """By more than one lane of a warp."""


Key = tuple[str, int, int]
"""A kind of finding, and between which program points."""


class Finding(NamedTuple):
    """The first of its kind between two instructions."""

    kind: str
    first: int
    second: int
    """Program points."""
    text: str

    @property
    def key(self) -> Key:
        return self.kind, self.first, self.second

    def __str__(self) -> str:
        return self.text


class Memory:
    """One address space: for each cell, numbers of the last write and of the reads since."""

    def __init__(self, cells: int, name: str, place: Callable[[int], str]) -> None:
        self.name, self.place = name, place
        self.writes, self.reads = np.zeros((2, cells), "i4")
        self.lanes = np.zeros((2, cells), "i8")
        """Stamps: which lane read last, and which wrote last; 0: none."""


def distinct(numbers: Any) -> list[int]:
    """In order."""
    raw = numbers.tobytes()
    if raw == raw[: numbers.itemsize] * len(numbers):
        return [int(numbers[0])]
    return sorted({*numbers.tolist()})


SEVERAL = 32
"""In place of a lane."""
PENDING = 1 << 30
"""The epoch of a copy that is not waited for."""
LANE_BITS, WARP_BIT = 6, 40
LANE_MASK = (1 << LANE_BITS) - 1
"""A stamp holds a warp, its epoch, and a lane, from the highest bit on."""


def stamp_of(warp: int, epoch: int) -> int:
    """Of lane 0."""
    return warp << WARP_BIT | epoch << LANE_BITS


def since(stamps: Any, warp: int, epoch: int) -> Any:
    """Those that a warp made in an epoch or later."""
    first = stamp_of(warp, epoch)
    return (stamps - first).view("u8") < stamp_of(warp + 1, 0) - first


class Unused(NamedTuple):
    """A tcgen05.ld, and those of its registers that its warp has not used."""

    time: int
    registers: set[str]


class Groups:
    """Groups that a warp, or warpgroup, commits and waits for in order."""

    def __init__(self, agent: int) -> None:
        self.agent, self.committed, self.last = agent, 0, 0
        self.pending: deque[tuple[int, Memory, Any]] = deque()
        """Of cp.async: the group, and what it writes, which only the lane that waits knows to be written."""
        self.last_read: Access | None = None
        """Of shared memory, to be waited for before the CTA ends."""


Cells = Sequence[tuple[Memory, Any]]


class Mbarrier:
    def __init__(self, agent: int, init: Access, phase: int) -> None:
        self.agent, self.init = agent, init
        self.is_fenced = self.is_relaxed = False
        self.phase = phase
        """How many are complete."""
        self.arriving, self.completed = np.zeros((2, len(ROWS), AGENTS), "i4")
        """Clocks: of arrivals in this phase, and at the end of the one before."""
        self.commits: deque[Any] = deque()
        """Clocks of tcgen05.commit that have not arrived, and program points."""
        self.last: dict[int, tuple[int, Access]] = {}
        """By program point, of what the CTA must not end before: its phase, and the last time."""
        self.waits: dict[int, tuple[int, int]] = {}
        """Of a warp: the phases that it last knew to be complete, and when by its time."""
        self.waited_at: dict[int, int] = {}


class Clocks:
    """Of the CTAs of one cluster. Warps are numbered through all of them; times of what happened before all are 0.

    `point` is the program point of the events that follow, and `describe` tells what is there. `found` is called with
    each finding, or advice, that is the first of its kind between two program points.
    """

    def __init__(
        self,
        warps: int,
        ctas: int = 1,
        describe: Callable[[int], str] = str,
        found: Callable[[Finding], None] = lambda finding: None,
    ) -> None:
        self.warps, self.describe, self.found, self.point = warps, describe, found, -1
        self.findings: dict[Key, Finding] = {}
        """Advice too."""
        self.names: list[str] = []
        self._agents: dict[tuple[str, Hashable], int] = {}
        self._of_tmem = np.zeros(AGENTS, np.bool_)
        for warp in range(warps):
            self._agent("warp", warp)
        self.clock = np.zeros((warps, len(ROWS), AGENTS), "i4")
        self.clock[:, ORDERED, :warps] = self.clock[:, CONSUMED, :warps] = np.eye(warps, dtype="i4")
        self.shared = [
            Memory(SHARED_CELLS, f"shared memory of CTA {cta}", lambda cell: f"byte {cell * SHARED_CELL:#x}")
            for cta in range(ctas)
        ]
        self.tmem = [
            Memory(LANES * COLUMNS, f"TMEM of CTA {cta}", lambda x: f"lane {x // COLUMNS}, column {x % COLUMNS}")
            for cta in range(ctas)
        ]
        self._writes: list[Access | None] = [None]
        self._reads: list[tuple[Access, ...]] = [()]
        """By their numbers in memories: the last read of each agent since the write."""
        self._numbers: dict[tuple[Access, ...], int] = {(): 0}
        self._named: dict[Hashable, Any] = {}
        """Clocks of who has arrived at barriers of threads, and of who had when all had."""
        self._met: dict[Hashable, Any] = {}
        self._mbarriers: dict[Hashable, Mbarrier] = {}
        self._groups: dict[int, Groups] = {}
        self._unused: dict[int, deque[Unused]] = {}
        self._epochs = [1] * warps
        """One more than the number of times that the lanes of a warp were put in order: no stamp is 0."""
        self._touched: dict[int, dict[str, int] | None] = {}
        """By a warp since its last wgmma.fence, None: there was none; registers, and where."""
        self._published, self._awaited = np.zeros((2, warps, len(ROWS), AGENTS), "i4")
        """Of TMEM: by tcgen05.fence::before_thread_sync, and what ::after_thread_sync will take."""

    # Findings

    def finish(self) -> None:
        """All threads have returned."""
        for key, barrier in self._mbarriers.items():
            known = self.clock[self._of_cta(key), ORDERED].max(0)
            for phase, last in barrier.last.values():
                if known[barrier.agent] <= phase and known[last.agent] < last.time:
                    self._unfinished(last, f"mbarrier {key}")
        for groups in self._groups.values():
            last = groups.last_read
            if last is not None and self.clock[:, ORDERED, groups.agent].max() < last.time:
                self._unfinished(last, "shared memory")

    def _unfinished(self, access: Access, place: str) -> None:
        self._found(END, access, access._replace(detail="is not waited for"), place)

    def _found(self, kind: str, first: Access, second: Access, place: str) -> None:
        if (kind, first.point, second.point) not in self.findings:
            text = f"{kind} {self._shown(first)} and {self._shown(second)}: {place}"
            finding = Finding(kind, first.point, second.point, text)
            self.findings[finding.key] = finding
            self.found(finding)

    def _shown(self, access: Access) -> str:
        verb = access.detail if isinstance(access.detail, str) else "writes" if access.writes else "reads"
        return f"[{self.describe(access.point)}] where {self.names[access.agent]} {verb}"

    # Clocks

    def _agent(self, what: str, of: Hashable) -> int:
        key = what, of
        if key not in self._agents:
            if len(self.names) == AGENTS:
                raise NotImplementedError(f"more than {AGENTS} agents")
            self._agents[key] = len(self.names)
            self.names.append(f"{what} {of}")
            if what in TMEM.values():
                self._of_tmem[self._agents[key]] = True
        return self._agents[key]

    def _now(self, warp: int) -> int:
        return int(self.clock[warp, ORDERED, warp])

    def _tick(self, warp: int) -> None:
        """What the warp does next is not in what it has handed on."""
        self.clock[warp, [ORDERED, CONSUMED], warp] += 1

    def _learns(self, warp: int, agent: int, time: int, rows: Sequence[int] = (ORDERED, CONSUMED)) -> None:
        for row in rows:
            self.clock[warp, row, agent] = max(time, self.clock[warp, row, agent])

    def _hand_on(self, warp: int, to: Any, by_all: bool = False) -> None:
        """Args: whether each lane of the warp does."""
        np.maximum(to, self.clock[warp], out=to)
        if by_all:
            to[TOGETHER, warp] = self._now(warp)
        self._tick(warp)

    # Accesses

    def _access(self, memory: Memory, cells: Any, access: Access, clock: Any) -> None:
        cells = np.asarray(cells).reshape(-1)
        if not cells.size:
            return
        reads, writes = memory.reads.take(cells), memory.writes.take(cells)
        if access.writes:
            for number in distinct(reads):
                for before in self._reads[number]:
                    self._compare(before, access, clock, memory, cells, reads, number)
        for number in distinct(writes):
            if before := self._writes[number]:
                self._compare(before, access, clock, memory, cells, writes, number)
        if access.writes:
            memory.writes[cells] = len(self._writes)
            memory.reads[cells] = 0
            self._writes.append(access)
            return
        old = distinct(reads)
        new = [self._with_read(number, access) for number in old]
        memory.reads[cells] = new[0] if len(new) == 1 else np.array(new, "i4")[np.searchsorted(old, reads)]

    def _compare(
        self, before: Access, access: Access, clock: Any, memory: Memory, cells: Any, numbers: Any, number: int
    ) -> None:
        """Args: `numbers`, of the cells' earlier accesses, among which `before` has this one."""
        if kind := self._missing(before, access, clock):
            place = memory.place(int(cells[np.argmax(numbers == number)]))
            self._found(kind, before, access, f"{memory.name}, {place}")

    def _missing(self, before: Access, access: Access, clock: Any) -> str | None:
        agent, time, is_own = before.agent, before.time, before.agent == access.agent
        if (is_own and before.is_generic and access.is_generic) or before.detail == access.detail == ATOMIC:
            return None
        if clock[ORDERED, agent] < time:
            if is_own and before.detail is not None:
                return None if before.detail == access.detail else PIPELINE
            return REGISTERS if clock[CONSUMED, agent] >= time else RACE
        if before.is_generic and not access.is_generic and clock[FENCED, agent] < time:
            return PROXY if before.writes else REUSE
        if before.of_lanes and not is_own and clock[TOGETHER, agent] < time:
            return ELECTED
        return None

    def _with_read(self, number: int, access: Access) -> int:
        """The number of these reads and one more, which takes the place of the agent's earlier one."""
        reads = (*(x for x in self._reads[number] if x.agent != access.agent), access)
        if reads not in self._numbers:
            self._numbers[reads] = len(self._reads)
            self._reads.append(reads)
        return self._numbers[reads]

    def _generic(self, warp: int, writes: bool) -> Access:
        return Access(warp, self._now(warp), self.point, writes, True)

    def reads(self, warp: int, cells: Any, cta: int = 0, lanes: Any = None) -> None:
        """Args: shared memory, in cells, and which lane accesses each; None: lanes do not matter."""
        self._access_by_threads(warp, cells, cta, lanes, False)

    def writes(self, warp: int, cells: Any, cta: int = 0, lanes: Any = None) -> None:
        self._access_by_threads(warp, cells, cta, lanes, True)

    def _access_by_threads(self, warp: int, cells: Any, cta: int, lanes: Any, writes: bool) -> None:
        access = self._generic(warp, writes)
        if lanes is not None:
            access = access._replace(of_lanes=bool(lanes[0] != lanes[-1]))
            self._compare_lanes(warp, self.shared[cta], cells, access, lanes)
        self._access(self.shared[cta], cells, access, self.clock[warp])

    def _compare_lanes(self, warp: int, memory: Memory, cells: Any, access: Access, lanes: Any) -> None:
        """Between lanes of one warp, bar.warp.sync or a barrier orders accesses."""
        epoch = self._epochs[warp]
        by_others = [since(x, warp, epoch) & (x & LANE_MASK != lanes) for x in memory.lanes.take(cells, 1)]
        for writes in (True, False) if access.writes else (True,):
            if by_others[writes].any():
                place = int(np.argmax(by_others[writes]))
                self._found_between_lanes(warp, memory, int(cells[place]), int(lanes[place]), access, writes)
        stamps = memory.lanes[int(access.writes)]
        own = stamp_of(warp, epoch if access.is_generic and access.agent == warp else PENDING)
        stamps[cells] = made = own + lanes
        several = (stamps.take(cells) != made) | by_others[access.writes]
        if several.any():
            stamps[cells[several]] = own + SEVERAL

    def _found_between_lanes(
        self, warp: int, memory: Memory, cell: int, lane: int, access: Access, writes: bool
    ) -> None:
        if writes:
            first = self._writes[memory.writes[cell]]
        else:
            first = next((x for x in self._reads[memory.reads[cell]] if x.agent == warp), None)
        if first is not None:
            where = f"{memory.name}, {memory.place(cell)}, of lane {lane}"
            self._found(LANES_RACE, first, access, where)

    def sync(self, warps: Iterable[int]) -> None:
        """bar.warp.sync, or a barrier of all threads of these warps."""
        for warp in warps:
            self._epochs[warp] += 1
            self.clock[warp, TOGETHER, warp] = self._now(warp)
            self._tick(warp)

    def adds(self, warp: int, cells: Any, cta: int = 0, lanes: Any = None) -> None:
        """atom, red: in any order with each other, of whatever lanes."""
        self._access(self.shared[cta], cells, self._generic(warp, True)._replace(detail=ATOMIC), self.clock[warp])

    # Proxies

    def fence_proxy(self, warp: int) -> None:
        """fence.proxy.async: what the warp wrote, itself or by cp.async that it has waited for."""
        for what in ("warp", GROUPS["cp.async"]):
            if (agent := self._agents.get((what, warp))) is not None:
                self._learns(warp, agent, int(self.clock[warp, ORDERED, agent]), [FENCED])
        self.fence_init(warp)
        self._tick(warp)

    def fence_init(self, warp: int) -> None:
        """fence.mbarrier_init."""
        for barrier in self._mbarriers.values():
            barrier.is_fenced |= barrier.init.agent == warp

    # Barriers of threads: named ones, those of CTA and cluster

    def arrive(self, barrier: Hashable, warps: Iterable[int]) -> None:
        """Args: a name of the barrier, unique in the cluster."""
        to = self._named.setdefault(barrier, np.zeros((len(ROWS), AGENTS), "i4"))
        for warp in warps:
            self._hand_on(warp, to, True)

    def release(self, barrier: Hashable, warps: Iterable[int]) -> None:
        """All have arrived: these have waited."""
        self.meet(barrier)
        self.learn(barrier, warps)

    def meet(self, barrier: Hashable) -> None:
        """All have arrived, and later ones belong to the next time."""
        self._met[barrier] = self._named.pop(barrier)

    def learn(self, barrier: Hashable, warps: Iterable[int]) -> None:
        for warp in warps:
            np.maximum(self.clock[warp], self._met[barrier], out=self.clock[warp])

    # mbarriers: `key` is the CTA and the address

    def init(self, warp: int, key: Hashable) -> None:
        name = f"{key[0]}:{key[1]:#x}" if isinstance(key, tuple) else str(key)
        init = self._generic(warp, True)._replace(detail="initializes")
        phase = self._mbarriers[key].phase if key in self._mbarriers else 0  # times go on
        self._mbarriers[key] = Mbarrier(self._agent("mbarrier", name), init, phase)

    def _mbarrier(self, warp: int, key: Hashable, is_generic: bool = True) -> Mbarrier:
        barrier = self._mbarriers[key]
        init, use = barrier.init, Access(warp, 0, self.point, False, True, "uses it")
        if init.agent != warp and self.clock[warp, ORDERED, init.agent] < init.time:
            self._found(RACE, init, use, f"mbarrier {key}")
        elif not (is_generic or barrier.is_fenced):
            self._found(INIT, init, use, f"mbarrier {key}")
        return barrier

    def arrive_at(self, warp: int, key: Hashable, relaxed: bool = False, by_all: bool = True) -> None:
        """Args: whether each lane of the warp arrives."""
        barrier = self._mbarrier(warp, key)
        if relaxed:
            barrier.is_relaxed = True
            np.maximum(barrier.arriving, self._published[warp], out=barrier.arriving)
        else:
            self._reach(key, self._generic(warp, True)._replace(detail="arrives"), warp)
            self._hand_on(warp, barrier.arriving, by_all)

    def _of_cta(self, key: Hashable) -> slice:
        """The warps of an mbarrier's CTA."""
        count = self.warps // len(self.shared)
        rank = key[0] if isinstance(key, tuple) else 0
        return slice(rank * count, (rank + 1) * count)

    def _reach(self, key: Hashable, access: Access, warp: int) -> None:
        """An arrival, or bytes, from another CTA must be there before the CTA ends."""
        own = self._of_cta(key)
        if not own.start <= warp < own.stop:
            barrier = self._mbarriers[key]
            barrier.last[access.point] = barrier.phase, access

    def complete(self, key: Hashable) -> None:
        """All arrivals of the phase, and all bytes that it expects, are there."""
        barrier = self._mbarriers[key]
        np.maximum(barrier.completed, barrier.arriving, out=barrier.completed)
        barrier.arriving[:] = 0
        if not barrier.is_relaxed:
            for warp, (phases, time) in barrier.waits.items():
                if phases <= barrier.phase and barrier.completed[ORDERED, warp] < time:
                    waited = Access(warp, time, barrier.waited_at[warp], False, True, "waits")
                    ended = Access(barrier.agent, barrier.phase, self.point, True, False, "completes the next phase")
                    self._found(PHASE, waited, ended, f"mbarrier {key}")
        barrier.phase += 1
        barrier.completed[:, barrier.agent] = barrier.phase

    def wait_for(self, warp: int, key: Hashable, relaxed: bool = False) -> None:
        """With success: the phase before the current one is complete, or there was none."""
        barrier = self._mbarrier(warp, key)
        if relaxed:
            barrier.is_relaxed = True
            known = np.where(self._of_tmem, barrier.completed, 0)
            np.maximum(self._awaited[warp], known, out=self._awaited[warp])
        else:
            np.maximum(self.clock[warp], barrier.completed, out=self.clock[warp])
        barrier.waits[warp] = barrier.phase, self._now(warp)
        barrier.waited_at[warp] = self.point

    # Copies

    def _of(self, what: str, of: Hashable) -> Groups:
        agent = self._agent(what, of)
        return self._groups.setdefault(agent, Groups(agent))

    def _start(self, groups: Groups, memory: Memory, cells: Any, clock: Any, writes: bool, is_generic: bool) -> None:
        groups.last = groups.committed + 1
        self._access(memory, cells, Access(groups.agent, groups.last, self.point, writes, is_generic), clock)

    def _wait(self, groups: Groups, warps: Iterable[int], most: int) -> None:
        for warp in warps:
            self._learns(warp, groups.agent, groups.committed - most)

    def copy(self, warp: int, cells: Any, cta: int = 0, lanes: Any = None) -> None:
        """cp.async: the generic proxy writes shared memory. Args: as those of `writes`."""
        groups, memory = self._of(GROUPS["cp.async"], warp), self.shared[cta]
        if lanes is not None:
            access = Access(groups.agent, groups.committed + 1, self.point, True, True)
            self._compare_lanes(warp, memory, cells, access, lanes)
            groups.pending.append((groups.committed + 1, memory, cells))
        self._start(groups, memory, cells, self.clock[warp], True, True)

    def commit_group(self, kind: str, of: int) -> None:
        """Args: one of GROUPS, and a warp or, of wgmma, a warpgroup."""
        self._of(GROUPS[kind], of).committed += 1

    def wait_group(self, kind: str, of: int, warps: Iterable[int], most: int) -> None:
        """Of the warpgroup, or the warp itself. Bulk stores have read shared memory then, and it may be written."""
        groups = self._of(GROUPS[kind], of)
        self._wait(groups, warps, most)
        while groups.pending and groups.pending[0][0] <= groups.committed - most:
            _, memory, cells = groups.pending.popleft()
            stamps = memory.lanes[1].take(cells)
            ended = np.where(since(stamps, of, PENDING), stamps - (PENDING - self._epochs[of] << LANE_BITS), stamps)
            memory.lanes[1][cells] = ended

    def bulk_load(self, warp: int, key: Hashable, cells: Any, cta: int = 0, writes: bool = True) -> None:
        """cp.async.bulk into shared memory, or out of it into another CTA's: completes bytes of an mbarrier's phase."""
        barrier = self._mbarrier(warp, key, False)
        access = Access(barrier.agent, barrier.phase + 1, self.point, writes, False)
        self._access(self.shared[cta], cells, access, self.clock[warp])
        barrier.last[self.point] = barrier.phase, access
        self._hand_on(warp, barrier.arriving)

    def bulk_store(self, warp: int, cells: Any, cta: int = 0) -> None:
        """cp.async.bulk, or cp.reduce.async.bulk, out of shared memory, in a bulk group."""
        groups = self._of(GROUPS["bulk"], warp)
        self._start(groups, self.shared[cta], cells, self.clock[warp], False, False)
        groups.last_read = Access(groups.agent, groups.last, self.point, False, False)

    # Products of warpgroups

    def multiply(self, group: Hashable, warps: Sequence[int], cells: Any, cta: int = 0) -> None:
        """wgmma: reads shared memory, ordered behind what all its warps know."""
        clock = self.clock[warps].min(0)
        self._start(self._of(GROUPS["wgmma"], group), self.shared[cta], cells, clock, False, False)

    # Tensor memory

    def mma(self, warp: int, reads: Cells, writes: Cells, accumulator: Hashable) -> None:
        """tcgen05.mma: the memories that it reads and writes, and which cells. Args: `accumulator` has a shape, too."""
        access = self._start_in_order(TMEM["mma"], warp, False)._replace(detail=accumulator)
        for memory, cells in reads:
            self._access(memory, cells, access, self.clock[warp])
        for memory, cells in writes:
            self._access(memory, cells, access._replace(writes=True), self.clock[warp])

    def commit_mma(self, warp: int, keys: Iterable[Hashable]) -> None:
        """tcgen05.commit: `arrive_committed` follows at each, when all products of the warp so far are done."""
        pipe = self._of(TMEM["mma"], warp)
        clock = self.clock[warp].copy()
        clock[[ORDERED, CONSUMED], pipe.agent] = pipe.last
        for key in keys:
            barrier = self._mbarrier(warp, key, False)
            barrier.commits.append((clock, self.point))
            self._reach(key, Access(barrier.agent, barrier.phase + 1, self.point, True, False, "arrives"), warp)
        self._tick(warp)

    def arrive_committed(self, key: Hashable) -> None:
        barrier = self._mbarriers[key]
        clock, self.point = barrier.commits.popleft()
        np.maximum(barrier.arriving, clock, out=barrier.arriving)

    def load_tmem(self, warp: int, cells: Any, registers: Sequence[str] = (), cta: int = 0) -> None:
        """tcgen05.ld."""
        self.use(warp, registers)
        access = self._start_in_order(TMEM["ld"], warp, False)
        self._access(self.tmem[cta], cells, access, self.clock[warp])
        self._unused.setdefault(warp, deque()).append(Unused(access.time, {*registers}))

    def store_tmem(self, warp: int, cells: Any, cta: int = 0) -> None:
        """tcgen05.st."""
        self._access(self.tmem[cta], cells, self._start_in_order(TMEM["st"], warp, True), self.clock[warp])

    def _start_in_order(self, what: str, warp: int, writes: bool) -> Access:
        """What tcgen05.commit or .wait waits for: all until then."""
        groups = self._of(what, warp)
        groups.committed = groups.last = groups.last + 1
        return Access(groups.agent, groups.last, self.point, writes, False)

    def wait_tmem(self, warp: int, kind: str) -> None:
        """Args: ld or st."""
        self._wait(self._of(TMEM[kind], warp), [warp], 0)

    def own_tmem(self, warp: int, cells: Any, cta: int = 0, pair: Hashable = None) -> None:
        """tcgen05.alloc or .dealloc: all others' accesses are behind the one, and before the other.

        Args: `pair`, of alloc.cta_group::2, which returns when both CTAs have executed it.
        """
        if pair is not None:
            agent = self._agent("allocation of pair", pair)
            self._learns(warp, agent, 1)
            access = Access(agent, 1, self.point, True, False, "allocates")
            self._access(self.tmem[cta], cells, access, self.clock[warp])
            return
        access = Access(warp, self._now(warp), self.point, True, True)
        self._access(self.tmem[cta], cells, access._replace(is_generic=False), self.clock[warp])

    def fence_tmem_before(self, warp: int) -> None:
        """tcgen05.fence::before_thread_sync: relaxed arrivals from here on hand on what is done in TMEM."""
        self._published[warp] = np.where(self._of_tmem, self.clock[warp], 0)

    def fence_tmem_after(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync: what is done next in TMEM is behind relaxed waits."""
        np.maximum(self.clock[warp], self._awaited[warp], out=self.clock[warp])

    # Registers

    def use(self, warp: int, registers: Iterable[str]) -> None:
        """The warp reads or writes registers that tcgen05.ld or wgmma use as well."""
        loads = self._unused.get(warp)
        if loads:
            for load in loads:
                load.registers.difference_update(registers)
            while loads and not loads[0].registers:
                self._learns(warp, self._agent(TMEM["ld"], warp), loads.popleft().time, [CONSUMED])
        touched = self._touched.setdefault(warp, None)
        if touched is not None:
            touched.update(dict.fromkeys(registers, self.point))

    def fence_registers(self, warp: int) -> None:
        """wgmma.fence."""
        self._touched[warp] = {}

    def multiply_registers(self, warp: int, registers: Iterable[str]) -> None:
        """wgmma adds up in registers, or reads them."""
        touched = self._touched.get(warp)
        use = Access(warp, 0, self.point, True, False, "multiplies")
        if touched is None:
            self._found(REGISTER_FENCE, use._replace(detail="starts without"), use, "all registers")
        elif touched:
            for register in registers:
                if register in touched:
                    self._found(REGISTER_FENCE, Access(warp, 0, touched[register], True, True, "uses"), use, register)
