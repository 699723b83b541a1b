"""What the lanes of a warp do together: shuffles, votes, elections; and where threads go: branches and barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.decode import Flow, Run, action, opcode, unsupported
from tests.ptx.listing import Instruction, Listing
from tests.ptx.registers import LANES, Threads
from tests.ptx.values import TYPES


def over_all(threads: Threads, values: Any, missing: Any = 0) -> Any:
    """Values of threads that run, in an array over the lanes of their warps: (warp, lane)."""
    first, end = threads.warps[0], threads.warps[-1] + 1
    everywhere = np.full((end - first) * LANES, missing, values.dtype)
    everywhere[threads.numbers - first * LANES] = values
    return everywhere.reshape(-1, LANES)


def check_members(threads: Threads, of: Instruction, operand: str) -> None:
    """All lanes must take part: a mask of some would wait for them."""
    if operand not in ("-1", "0xffffffff", "4294967295"):
        raise unsupported(of, f"a mask of lanes {operand}")


@opcode(r"shfl\.sync\.(idx|bfly|up|down)\.b32")
def shuffle(program: Listing, of: Instruction, how: str) -> Run:
    to, _, in_range = of.operands[0].partition("|")
    target, x = program.key(to, "u4"), program.key(of.operands[1], "u4")
    by, clamp = (program.key(operand, "i4") for operand in of.operands[2:4])
    found = program.key(in_range, "?") if in_range else None

    def run(threads: Threads) -> None:
        lane, offset, bound = threads.lanes, threads.take(by) & 31, threads.take(clamp)
        segment = bound >> 8 & 31
        last = (lane & segment) | (bound & 31 & ~segment)
        source = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset}.get(how)
        if source is None:
            source = (lane & segment) | (offset & ~segment)
        inside = source >= last if how == "up" else source <= last
        source = np.where(inside, source, lane)
        first = threads.warps[0]
        place = (threads.warp_of - first) * LANES + source
        if threads.count < LANES * len(threads.warps):
            takes_part = over_all(threads, np.ones(threads.count, np.bool_))
            if not takes_part.reshape(-1)[place].all():
                raise RuntimeError("a shuffle from a lane that does not take part")
        threads.put(target, over_all(threads, threads.take(x)).reshape(-1)[place])
        if found is not None:
            threads.put(found, inside)

    return run


@action(r"vote\.sync\.(ballot|any|all|uni)\.(?:b32|pred)")
def vote(threads: Threads, of: Instruction, how: str) -> None:
    to, given = of.operands[:2]
    lanes = over_all(threads, threads.value(given.lstrip("!"), "?") ^ (given[0] == "!"))
    held, count = lanes.sum(1), over_all(threads, np.ones(threads.count, "i8")).sum(1)
    found = {"any": held > 0, "all": held == count, "uni": (held == 0) | (held == count)}.get(how)
    if found is None:
        found = (lanes.astype("u4") << np.arange(LANES, dtype="u4")).sum(1, dtype="u4")
    threads.set(to, "u4" if how == "ballot" else "?", found[threads.warp_of - threads.warps[0]])


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


@action(r"redux\.sync\.(add|min|max)\.([su]32)")
def reduce(threads: Threads, of: Instruction, how: str, kind: str) -> None:
    threads.whole_warps("redux.sync")
    lanes = over_all(threads, threads.value(of.operands[1], TYPES[kind]))
    found = REDUCTIONS[how].reduce(lanes, 1, dtype=lanes.dtype)
    threads.set(of.operands[0], TYPES[kind], found[threads.warp_of - threads.warps[0]])


@action(r"elect\.sync")
def elect(threads: Threads, of: Instruction) -> None:
    """The first lane."""
    check_members(threads, of, of.operands[1])
    threads.whole_warps("elect.sync")
    lane, _, predicate = of.operands[0].partition("|")
    threads.set(predicate, "?", threads.lanes == 0)
    if lane != "_":
        threads.set(lane, "u4", 0)


# Where threads go


@opcode(r"bra(?:\.uni)?")
def branch(program: Listing, of: Instruction) -> Run:
    target = program.labels[of.operands[0]]
    return lambda threads: Flow(target, threads)


@action(r"(?:ret|exit)")
def leave(threads: Threads, of: Instruction) -> Flow:
    threads.cta.exit(threads)
    threads.cta.cluster.check_arrivals()
    return Flow(0, None)


@action(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def barrier(threads: Threads, of: Instruction, what: str) -> Flow | None:
    cta, several = threads.cta, len(of.operands) > 1
    numbers = threads.value(of.operands[0], "u4")
    counts = threads.value(of.operands[1], "u4") if several else np.full(threads.count, cta.program.threads)
    for which in sorted({*zip(numbers.tolist(), counts.tolist(), strict=True)}):
        chosen = (numbers == which[0]) & (counts == which[1])
        some = threads if chosen.all() else threads.some(chosen)
        cta.arrive(cta.pc + 1, some, *which, wait=what == "sync")
    return Flow(0, None) if what == "sync" else None


@action(r"bar\.warp\.sync")
def sync_warp(threads: Threads, of: Instruction) -> None:
    """Threads with one program counter run together: lanes that come later do not meet here."""
    check_members(threads, of, of.operands[0])
    threads.cta.observer.syncs_warps(threads)


@action(r"barrier\.cluster\.arrive(?:\.relaxed|\.release)?(?:\.aligned)?")
def arrive_at_cluster(threads: Threads, of: Instruction) -> None:
    threads.cta.observer.arrives_at_cluster(threads)
    threads.cta.cluster.arrive(threads)


@action(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
def wait_for_cluster(threads: Threads, of: Instruction) -> Flow | None:
    cta = threads.cta
    early = cta.cluster.waiting_for(threads)
    if early is not None:
        cta.block(cta.pc, early, "barrier.cluster")
    rest = cta.threads(threads.bits & ~(early.bits if early else 0))
    if rest is not None:
        cta.observer.waits_for_cluster(rest)
    return Flow(cta.pc + 1, rest) if early is not None else None


@action(
    r"fence\.(?:proxy\.async(?:\.global|\.shared::c(?:ta|luster))?|mbarrier_init\.release\.cluster"
    r"|acq_rel\.(?:cta|cluster|gpu)|sc\.gpu)|membar\.(?:cta|gl)"
)
def fence(threads: Threads, of: Instruction) -> None:
    """Execution is in order: fences are for the observer alone."""
    threads.cta.observer.fences(threads, of.name)


@action(r"griddepcontrol\.(?:wait|launch_dependents)")
def dependent_grids(threads: Threads, of: Instruction) -> None:
    """Launches run one after the other."""


@action(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def set_registers(threads: Threads, of: Instruction, what: str) -> Flow | None:
    """Waits, as the GPU does, until the register file of the SM has them."""
    count = int(of.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise unsupported(of, "a count of registers")
    cta = threads.cta
    before = list(cta.register_limits)
    for warp in threads.whole_warps(of.name):
        if (count - cta.register_limits[warp]) * (1 if what == "inc" else -1) < 0:
            raise RuntimeError(f"{of.text} of warp {warp}, which has {cta.register_limits[warp]}")
        cta.register_limits[warp] = count
    if what == "inc" and not cta.registers_fit():
        cta.register_limits = before
        cta.waiting_for_registers.append((cta.pc, threads.bits))
        cta.block(cta.pc, threads, f"{count} registers")
        return Flow(0, None)
    if what == "dec":
        for at, bits in cta.waiting_for_registers:
            cta.unblock(at, bits)
        cta.waiting_for_registers = []
    return None
