"""The happens-before checker (tests/ptx/clocks.py, order.py): each rule with what it asks for, and without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.ptx import assembly, clocks
from tests.ptx.clocks import (
    ELECTED,
    END,
    INIT,
    LANES_RACE,
    PHASE,
    PIPELINE,
    PROXY,
    RACE,
    REGISTER_FENCE,
    REGISTERS,
    REUSE,
    Clocks,
)
from tests.ptx.order import Order, RaceError

Step = Callable[[Clocks], None]
HERE = np.arange(64)
"""Cells that are accessed."""
FULL, EMPTY = (0, 0x10), (0, 0x18)
"""mbarriers."""


def run(*steps: Step | None, warps: int = 2, ctas: int = 1) -> list[tuple[str, int, int]]:
    """Kinds of findings, and between which of the steps. None: a step that is left out."""
    of = Clocks(warps, ctas)
    for point, step in enumerate(steps):
        if step is not None:
            of.point = point
            step(of)
    return [*of.findings]


def only(kind: str, first: int, second: int) -> list[tuple[str, int, int]]:
    return [(kind, first, second)]


def reads(warp: int) -> Step:
    return lambda of: of.reads(warp, HERE)


def writes(warp: int) -> Step:
    return lambda of: of.writes(warp, HERE)


def meets(of: Clocks) -> None:
    of.arrive(1, [0, 1])
    of.release(1, [0, 1])


def arrives(warp: int) -> Step:
    return lambda of: of.arrive(1, [warp])


def releases(warp: int) -> Step:
    return lambda of: of.release(1, [warp])


def fences(warp: int) -> Step:
    return lambda of: of.fence_proxy(warp)


def begins(*keys: tuple[int, int]) -> Step:
    """mbarriers that warp 0 has initialized, in all the ways that anyone may ask for."""

    def step(of: Clocks) -> None:
        for key in keys:
            of.init(0, key)
        of.fence_init(0)
        meets(of)

    return step


def arrives_at(warp: int, key: tuple[int, int], relaxed: bool = False) -> Step:
    return lambda of: of.arrive_at(warp, key, relaxed)


def completes(key: tuple[int, int]) -> Step:
    return lambda of: of.complete(key)


def waits(warp: int, key: tuple[int, int], relaxed: bool = False) -> Step:
    return lambda of: of.wait_for(warp, key, relaxed)


def loads(warp: int, key: tuple[int, int] = FULL) -> Step:
    return lambda of: of.bulk_load(warp, key, HERE)


def multiplies(warp: int, left: str = "shared", to: int = 0) -> Step:
    """tcgen05.mma: reads `HERE` of shared memory or TMEM, and writes other columns from `to` on."""

    def step(of: Clocks) -> None:
        memory = of.shared[0] if left == "shared" else of.tmem[0]
        of.mma(warp, [(memory, HERE)], [(of.tmem[0], np.arange(128 + to, 192 + to))], (to, (64, 1)))

    return step


def commits(warp: int, key: tuple[int, int] = FULL) -> Step:
    def step(of: Clocks) -> None:
        of.commit_mma(warp, [key])
        of.arrive_committed(key)
        of.complete(key)

    return step


RESULT = np.arange(128, 192)


def loads_result(warp: int, registers: tuple[str, ...] = ()) -> Step:
    return lambda of: of.load_tmem(warp, RESULT, registers)


# Threads


@pytest.mark.parametrize("first", [reads, writes])
@pytest.mark.parametrize("second", [reads, writes])
def test_accesses_need_a_barrier_between_them(first: Callable[[int], Step], second: Callable[[int], Step]) -> None:
    assert not run(first(0), meets, second(1))
    assert not run(first(0), second(0))  # a warp's own are in order
    assert run(first(0), None, second(1)) == ([] if first is second is reads else only(RACE, 0, 2))


def test_who_only_arrives_waits_for_nobody() -> None:
    assert not run(writes(0), arrives(0), arrives(1), releases(1), writes(1))
    assert run(writes(0), arrives(0), arrives(1), releases(1), writes(1), reads(0)) == only(RACE, 4, 5)


def test_what_is_written_behind_an_arrival_is_not_known() -> None:
    assert run(arrives(0), writes(0), arrives(1), releases(1), writes(1)) == only(RACE, 1, 4)


def test_order_is_handed_on() -> None:
    """From warp 0 to warp 1 at one barrier, and on to warp 2 at another."""

    def hands_on(barrier: int, one: int, other: int) -> Step:
        def step(of: Clocks) -> None:
            of.arrive(barrier, [one, other])
            of.release(barrier, [other])

        return step

    steps = [writes(0), hands_on(1, 0, 1), hands_on(2, 1, 2), writes(2)]
    assert not run(*steps, warps=3)
    for left_out in (1, 2):
        assert run(*[None if i == left_out else step for i, step in enumerate(steps)], warps=3) == only(RACE, 0, 3)


@pytest.mark.parametrize("between", ["nothing", "bar.warp.sync", "barrier"])
def test_lanes_of_a_warp_need_a_barrier_between_their_accesses(between: str) -> None:
    def access(writes: bool, *lanes: int) -> Step:
        cells, of = np.repeat(HERE, len(lanes)), np.tile(np.array(lanes), len(HERE))
        return lambda clocks: (clocks.writes if writes else clocks.reads)(0, cells, 0, of)

    def meets_here(of: Clocks) -> None:
        of.sync([0])
        if between == "barrier":
            meets(of)

    step = None if between == "nothing" else meets_here
    found = only(LANES_RACE, 0, 2) if step is None else []
    assert run(access(True, 1), step, access(False, 2)) == found
    assert run(access(True, 1), step, access(True, 2)) == found
    assert run(access(False, 1), step, access(True, 2)) == found
    assert run(access(False, 1, 2), step, access(True, 2)) == found
    assert not run(access(True, 1), step, access(False, 1), access(True, 1))
    assert not run(access(False, 1), step, access(False, 2))


def test_what_a_lane_has_copied_others_know_after_its_wait_and_a_barrier() -> None:
    def copies(of: Clocks) -> None:
        of.copy(0, HERE, 0, np.full(len(HERE), 1))
        of.commit_copies(0)

    def waits_for(of: Clocks) -> None:
        of.wait_copies(0, 0)

    def together(of: Clocks) -> None:
        of.sync([0])

    def reads_by(lane: int) -> Step:
        return lambda of: of.reads(0, HERE, 0, np.full(len(HERE), lane))

    assert not run(copies, waits_for, together, reads_by(2))
    assert not run(copies, waits_for, reads_by(1))
    assert run(copies, waits_for, None, reads_by(2)) == only(LANES_RACE, 0, 3)
    assert run(copies, together, waits_for, reads_by(2)) == only(LANES_RACE, 0, 3)
    assert run(reads_by(2), None, copies) == only(LANES_RACE, 0, 2)
    assert not run(reads_by(2), together, copies)


def test_atomics_are_in_any_order_with_each_other_alone() -> None:
    def adds(warp: int) -> Step:
        return lambda of: of.adds(warp, HERE)

    assert not run(adds(0), adds(1))
    assert run(adds(0), reads(1)) == only(RACE, 0, 1)
    assert run(writes(0), adds(1)) == only(RACE, 0, 1)


def test_cells_are_told_apart() -> None:
    def writes_cells(warp: int, *cells: int) -> Step:
        return lambda of: of.writes(warp, np.array(cells))

    assert not run(writes_cells(0, 1, 3), writes_cells(1, 2, 4))
    assert run(writes_cells(0, 1, 3), writes_cells(1, 2, 3)) == only(RACE, 0, 1)
    found = Clocks(2)
    found.writes(0, np.array([6, 7]))
    found.reads(1, np.array([4, 5, 7]))
    assert "shared memory of CTA 0, byte 0xe" in found.findings[RACE, -1, -1].text


# mbarriers


def test_an_mbarrier_is_used_after_it_was_made_known() -> None:
    def begins_here(of: Clocks) -> None:
        of.init(0, FULL)

    def fence(of: Clocks) -> None:
        of.fence_init(0)

    for fenced in (fence, fences(0)):
        assert not run(begins_here, fenced, meets, arrives_at(1, FULL), loads(1))
    assert run(begins_here, fence, None, arrives_at(1, FULL)) == only(RACE, 0, 3)
    assert run(begins_here, None, meets, arrives_at(1, FULL), loads(1)) == only(INIT, 0, 4)
    assert run(begins_here, None, meets, commits(1)) == only(INIT, 0, 3)


def test_a_wait_takes_what_all_arrivals_hand_on() -> None:
    steps = [begins(FULL), writes(0), arrives_at(0, FULL), completes(FULL), waits(1, FULL), reads(1)]
    assert not run(*steps)
    assert run(*steps[:4], None, steps[5]) == only(RACE, 1, 5)
    assert run(*steps[:2], None, *steps[3:]) == only(RACE, 1, 5)
    assert run(*steps[:3], None, *steps[4:]) == only(RACE, 1, 5)  # the phase before the first


def test_copies_of_one_phase_are_in_no_order() -> None:
    assert run(begins(FULL), loads(0), loads(0)) == only(RACE, 1, 2)


@pytest.mark.parametrize("released", [True, False])
def test_a_stage_is_overwritten_after_it_was_released(released: bool) -> None:
    """A ring of one stage: filled by warp 0, read by warp 1, filled again."""
    found = run(
        begins(FULL, EMPTY),
        arrives_at(0, FULL),
        loads(0),
        completes(FULL),
        waits(1, FULL),
        reads(1),
        fences(1),
        arrives_at(1, EMPTY),
        completes(EMPTY),
        waits(0, EMPTY) if released else None,
        arrives_at(0, FULL),
        loads(0),
    )
    assert found == ([] if released else [(RACE, 5, 11), (RACE, 2, 11)])


@pytest.mark.parametrize("released", [True, False])
def test_a_phase_may_not_pass_by_who_waits(released: bool) -> None:
    """Who waits for phase 0 must have done so before phase 1 completes, as both have its parity afterwards."""
    found = run(
        begins(FULL, EMPTY),
        arrives_at(0, FULL),
        completes(FULL),
        waits(1, FULL),
        arrives_at(1, EMPTY),
        completes(EMPTY),
        waits(0, EMPTY) if released else None,
        arrives_at(0, FULL),
        completes(FULL),
    )
    assert found == ([] if released else only(PHASE, 3, 8))


# The async proxy


@pytest.mark.parametrize("read", ["store", "product", "wgmma"])
@pytest.mark.parametrize("fenced", ["before the barrier", "by the reader", "behind the barrier", "never"])
def test_what_threads_wrote_needs_a_proxy_fence_of_the_writer(read: str, fenced: str) -> None:
    by_proxy: dict[str, Step] = {
        "store": lambda of: of.bulk_store(1, HERE),
        "product": multiplies(1),
        "wgmma": lambda of: of.multiply(0, [1], HERE),
    }
    found = run(
        writes(0),
        fences(0) if fenced == "before the barrier" else None,
        meets,
        {"by the reader": fences(1), "behind the barrier": fences(0)}.get(fenced),
        by_proxy[read],
    )
    assert found == ([] if fenced == "before the barrier" else only(PROXY, 0, 4))


def test_what_is_written_behind_a_fence_needs_another() -> None:
    assert run(fences(0), writes(0), meets, multiplies(1)) == only(PROXY, 1, 3)


def test_what_cp_async_wrote_needs_a_wait_and_then_a_fence() -> None:
    def copies(of: Clocks) -> None:
        of.copy(0, HERE)
        of.commit_copies(0)

    def waits_for(of: Clocks) -> None:
        of.wait_copies(0, 0)

    assert not run(copies, waits_for, fences(0), meets, multiplies(1))
    assert run(copies, waits_for, None, meets, multiplies(1)) == only(PROXY, 0, 4)
    assert run(copies, fences(0), waits_for, meets, multiplies(1)) == only(PROXY, 0, 4)


def test_reads_of_threads_before_a_copy_are_advice_without_a_fence() -> None:
    assert not run(begins(FULL), reads(1), fences(1), meets, loads(0))
    assert run(begins(FULL), reads(1), None, meets, loads(0)) == only(REUSE, 1, 4)
    assert REUSE in clocks.ADVICE
    assert run(begins(FULL), writes(1), None, meets, loads(0)) == only(PROXY, 1, 4)


def test_groups_of_cp_async_end_in_order() -> None:
    def copies(at: int) -> Step:
        def step(of: Clocks) -> None:
            of.copy(0, HERE + at)
            of.commit_copies(0)

        return step

    def waits_for_all_but(most: int) -> Step:
        return lambda of: of.wait_copies(0, most)

    assert not run(copies(0), copies(64), waits_for_all_but(1), reads(0))
    assert run(copies(64), copies(0), waits_for_all_but(1), reads(0)) == only(RACE, 1, 3)


def test_a_cta_ends_after_bulk_stores_have_read_shared_memory() -> None:
    steps: list[Step] = [lambda of: of.bulk_store(0, HERE), lambda of: of.commit_bulk(0), lambda of: of.wait_bulk(0, 0)]
    assert not run(*steps, Clocks.finish)
    for left_out in (1, 2):
        some = [None if i == left_out else step for i, step in enumerate(steps)]
        assert run(*some, Clocks.finish) == only(END, 0, 0)


# Warpgroups


def test_wgmma_reads_behind_what_all_its_warps_know() -> None:
    def some(*warps: int) -> Step:
        def step(of: Clocks) -> None:
            of.arrive(2, [0, *warps])
            of.release(2, warps)

        return step

    def multiplies_here(of: Clocks) -> None:
        of.multiply(0, [1, 2], HERE)

    assert not run(writes(0), fences(0), some(1, 2), multiplies_here, warps=3)
    assert run(writes(0), fences(0), some(1), multiplies_here, warps=3) == only(RACE, 0, 3)


# Tensor memory


def test_products_are_done_when_their_commit_has_arrived() -> None:
    steps = [begins(FULL), multiplies(0), commits(0), waits(1, FULL), loads_result(1)]
    assert not run(*steps)
    assert run(*steps[:3], None, steps[4]) == only(RACE, 1, 4)
    assert run(*steps[:2], None, *steps[3:]) == only(RACE, 1, 4)
    assert run(steps[0], steps[2], steps[1], *steps[3:]) == only(RACE, 2, 4)  # behind the commit
    assert run(*steps[:2], None, meets, loads_result(0)) == only(RACE, 1, 4)  # not in order for who started them


def test_operands_of_products_are_free_when_their_commit_has_arrived() -> None:
    steps = [begins(FULL), multiplies(0), commits(0), waits(1, FULL)]
    for overwrites in (writes(1), loads(1, EMPTY)):
        start = begins(FULL, EMPTY)
        assert not run(start, *steps[1:], overwrites)
        assert run(start, *steps[1:3], None, overwrites) == only(RACE, 1, 4)


def test_products_into_one_accumulator_are_in_order() -> None:
    assert not run(multiplies(0), multiplies(0))
    assert run(multiplies(0), multiplies(0, to=1)) == only(PIPELINE, 0, 1)
    assert PIPELINE in clocks.ADVICE
    assert run(multiplies(0), meets, multiplies(1)) == only(RACE, 0, 2)  # another warp's pipe


def stores_tmem(warp: int) -> Step:
    return lambda of: of.store_tmem(warp, HERE)


def waits_for_loads(of: Clocks) -> None:
    of.wait_loads(0)


@pytest.mark.parametrize("used", [("%r1", "%r2"), ("%r2",)])
def test_what_is_loaded_from_tmem_may_be_overwritten_after_a_wait(used: tuple[str, ...]) -> None:
    """Where all registers were used, advice."""

    def loads_here(of: Clocks) -> None:
        of.load_tmem(0, HERE, ("%r1", "%r2"))

    def uses(of: Clocks) -> None:
        of.use(0, used)

    for next_access in (stores_tmem(0), stores_tmem(1)):
        assert not run(loads_here, waits_for_loads, uses, meets, next_access)
        kind = REGISTERS if len(used) == 2 else RACE
        assert run(loads_here, None, uses, meets, next_access) == only(kind, 0, 4)
    assert REGISTERS in clocks.ADVICE


def test_tmem_is_used_after_it_was_allocated() -> None:
    def owns(of: Clocks) -> None:
        of.own_tmem(1, np.arange(512))

    assert not run(owns, meets, stores_tmem(0))
    assert run(owns, None, stores_tmem(0)) == only(RACE, 0, 2)


def test_relaxed_barriers_do_not_order_shared_memory() -> None:
    steps: list[Step] = [
        lambda of: of.fence_tmem_before(0),
        arrives_at(0, FULL, relaxed=True),
        completes(FULL),
        waits(1, FULL, relaxed=True),
        lambda of: of.fence_tmem_after(1),
    ]
    assert run(begins(FULL), writes(0), *steps, reads(1)) == only(RACE, 1, 7)


# CTAs


def test_ctas_of_a_cluster_have_memories_of_their_own() -> None:
    def of_clocks(meet: bool, cta: int) -> Iterator[tuple[str, int, int]]:
        of = Clocks(2, ctas=2)
        of.writes(0, HERE, cta=0)
        if meet:
            of.arrive("cluster", [0, 1])
            of.meet("cluster")
            of.learn("cluster", [1])
        of.reads(1, HERE, cta=cta)
        yield from of.findings

    assert not [*of_clocks(False, 1)]
    assert not [*of_clocks(True, 0)]
    assert [kind for kind, *_ in of_clocks(False, 0)] == [RACE]


@pytest.mark.parametrize("what", ["arrives", "commits", "loads"])
@pytest.mark.parametrize("waited", [True, False])
def test_a_cta_ends_after_what_reaches_it(what: str, waited: bool) -> None:
    """Warp 1 of CTA 1 arrives at an mbarrier of CTA 0, or the CTA's own copy does."""

    def step(of: Clocks) -> None:
        if what == "arrives":
            of.arrive_at(1, FULL)
        elif what == "commits":
            of.mma(1, [], [(of.tmem[1], RESULT)], 0)
            of.commit_mma(1, [FULL])
            of.arrive_committed(FULL)
        else:
            of.bulk_load(0, FULL, HERE)
        of.complete(FULL)

    steps = [begins(FULL), step, waits(0, FULL) if waited else None, Clocks.finish]
    assert run(*steps, ctas=2) == ([] if waited else only(END, 1, 1))


# Programs, of which one line is left out


BEGIN = """
mov.u32 %r1, %r0;
mov.u32 %r3, %r2;
shr.u32 %r2, %r1, 5;
setp.eq.u32 %p1, %r2, 0;
setp.eq.u32 %p2, %r1, 0;
setp.eq.u32 %p3, %r1, 32;
setp.eq.u32 %p4, %r2, 4;
setp.ne.u32 %p5, %r1, %r1;
shl.b32 %r4, %r1, 4;
add.u32 %r4, %r4, %r3;
ld.param.b64 %rd1, [kernel_param_1];
"""
"""p1: warp 0, p2: its first thread, p3: that of warp 1, p4: warp 4, p5: nobody; r4: a thread's 16 bytes from r3 on."""
TILE = 64 << 32 | 1 << 46
"""A descriptor of rows of 128 bytes at the start of shared memory, without the kind of swizzle."""


class Sample(NamedTuple):
    text: str
    """Lines end with a name of what is left out."""
    threads: int
    found: dict[str, tuple[str, str, str]]
    """What is found without a line: a kind, and instructions."""


SAMPLES = {
    "lanes": Sample(
        """
        st.shared.b32 [%r4], %r1;
        bar.warp.sync -1; // together
        ld.shared.b32 %r9, [%r3];
        """,
        32,
        {"together": (LANES_RACE, "st.shared", "ld.shared")},
    ),
    "barrier": Sample(
        """
        @%p1 st.shared.b32 [%r4], %r1;
        bar.sync 0; // barrier
        @!%p1 ld.shared.b32 %r9, [%r3];
        """,
        64,
        {"barrier": (RACE, "st.shared", "ld.shared")},
    ),
    "cp.async": Sample(
        """
        cp.async.cg.shared.global [%r4], [%rd1], 16, 16;
        cp.async.commit_group; // commit
        cp.async.wait_group 0; // wait
        bar.sync 0; // barrier
        @!%p1 ld.shared.b32 %r9, [%r3];
        """,
        64,
        dict.fromkeys(("commit", "wait", "barrier"), (RACE, "cp.async.cg", "ld.shared")),
    ),
    "a bulk load": Sample(
        """
        @%p2 mbarrier.init.shared.b64 [%r3+2048], 1;
        @%p2 fence.mbarrier_init.release.cluster; // known
        bar.sync 0; // barrier
        @%p3 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r3+2048], 64;
        @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 64, [%r3+2048];
        $AGAIN: mbarrier.try_wait.parity.shared.b64 %p6, [%r3+2048], 0; // done
        @!%p6 bra $AGAIN; // done
        ld.shared.b32 %r9, [%r3];
        """,
        64,
        {
            "known": (INIT, "mbarrier.init", "cp.async.bulk"),
            "barrier": (RACE, "mbarrier.init", "mbarrier.arrive.expect_tx"),
            "done": (RACE, "cp.async.bulk", "ld.shared"),
        },
    ),
    "a bulk store": Sample(
        """
        st.shared.b32 [%r4], %r1;
        fence.proxy.async.shared::cta; // visible
        bar.sync 0; // written
        @%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 1024;
        @%p2 cp.async.bulk.commit_group; // commit
        @%p2 cp.async.bulk.wait_group.read 0; // wait
        bar.sync 0; // read
        @%p3 st.shared.b32 [%r3], 1;
        """,
        64,
        {
            "visible": (PROXY, "st.shared.b32 [%r4]", "cp.async.bulk"),
            "written": (RACE, "st.shared.b32 [%r4]", "cp.async.bulk"),
            **dict.fromkeys(("commit", "wait", "read"), (RACE, "cp.async.bulk", "st.shared.b32 [%r3]")),
        },
    ),
    "TMEM": Sample(
        """
        @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
        bar.sync 0; // allocated
        ld.shared.b32 %r5, [%r3];
        @%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r1};
        @%p1 tcgen05.wait::st.sync.aligned; // stored
        bar.sync 0; // handed on
        @%p4 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r5];
        @%p4 tcgen05.wait::ld.sync.aligned; // loaded
        bar.sync 0; // freed
        @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
        """,
        160,
        {
            "allocated": (LANES_RACE, "tcgen05.alloc", "ld.shared"),  # before the warps are compared
            "stored": (RACE, "tcgen05.st", "tcgen05.ld"),
            "handed on": (RACE, "tcgen05.st", "tcgen05.ld"),
            "loaded": (RACE, "tcgen05.ld", "tcgen05.dealloc"),
            "freed": (RACE, "tcgen05.ld", "tcgen05.dealloc"),
        },
    ),
    "tcgen05.mma": Sample(
        f"""
        @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+16384], 32;
        @%p2 mbarrier.init.shared.b64 [%r3+16392], 1;
        st.shared.b32 [%r4], %r1;
        fence.proxy.async.shared::cta; // visible
        bar.sync 0; // written
        ld.shared.b32 %r5, [%r3+16384];
        mov.b64 %rd2, {TILE | 2 << 61};
        @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r5], %rd2, %rd2, {1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24}, %p5;
        @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+16392];
        $AGAIN: mbarrier.try_wait.parity.shared.b64 %p6, [%r3+16392], 0; // done
        @!%p6 bra $AGAIN; // done
        st.shared.b32 [%r4], %r2;
        @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
        """,
        64,
        {
            "visible": (PROXY, "st.shared", "tcgen05.mma"),
            "written": (LANES_RACE, "tcgen05.alloc", "ld.shared"),
            "done": (RACE, "tcgen05.mma", "st.shared.b32 [%r4], %r2"),
        },
    ),
    "wgmma": Sample(
        f"""
        st.shared.b32 [%r4], %r1;
        fence.proxy.async.shared::cta; // visible
        bar.sync 0; // written
        mov.b64 %rd2, {(TILE & ~(1 << 46)) | 1 << 62};
        mov.b32 %r6, 0;
        wgmma.fence.sync.aligned; // registers
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r6, %r7, %r8, %r9}}, %rd2, %rd2, %p5, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned; // commit
        wgmma.wait_group.sync.aligned 0; // wait
        st.shared.b32 [%r4], %r2;
        """,
        128,
        {
            "visible": (PROXY, "st.shared", "wgmma.mma_async"),
            "written": (RACE, "st.shared", "wgmma.mma_async"),
            "registers": (REGISTER_FENCE, "wgmma.mma_async", "wgmma.mma_async"),
            **dict.fromkeys(("commit", "wait"), (RACE, "wgmma.mma_async", "st.shared.b32 [%r4], %r2")),
        },
    ),
    "relaxed": Sample(
        """
        @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
        @%p2 mbarrier.init.shared.b64 [%r3+8], 1;
        bar.sync 0;
        ld.shared.b32 %r5, [%r3];
        @%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r1};
        @%p1 tcgen05.wait::st.sync.aligned;
        @%p1 tcgen05.fence::before_thread_sync; // before
        @%p2 mbarrier.arrive.relaxed.cluster.shared.b64 %rd2, [%r3+8];
        $AGAIN: mbarrier.try_wait.parity.relaxed.cluster.shared.b64 %p6, [%r3+8], 0;
        @!%p6 bra $AGAIN;
        tcgen05.fence::after_thread_sync; // after
        @%p4 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r5];
        @%p4 tcgen05.wait::ld.sync.aligned;
        bar.sync 0;
        @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
        """,
        160,
        dict.fromkeys(("before", "after"), (RACE, "tcgen05.st", "tcgen05.ld")),
    ),
}
LEFT_OUT = [(name, left_out) for name, sample in SAMPLES.items() for left_out in ("", *sample.found)]


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize(("name", "left_out"), LEFT_OUT)
def test_programs(name: str, left_out: str, late: bool) -> None:
    sample = SAMPLES[name]
    lines = [line for line in sample.text.splitlines() if not left_out or not line.endswith(f"// {left_out}")]
    body = "\n".join([BEGIN, *lines])
    memory = torch.arange(256, dtype=torch.int32)
    if not left_out:
        assembly.run(body, memory, threads=sample.threads, late=late, observer=Order())
        return
    kind, first, second = sample.found[left_out]
    with pytest.raises(RaceError) as raised:
        assembly.run(body, memory, threads=sample.threads, late=late, observer=Order())
    message = (
        re.escape(kind) + r" \[\d+: [^\[]*" + re.escape(first) + r".*\] where .* and \[\d+: .*" + re.escape(second)
    )
    assert re.match(message, str(raised.value))


@pytest.mark.parametrize("by_all", [True, False], ids=["all lanes", "one lane"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("stores", [1, 32])
def test_one_lane_that_arrives_hands_on_what_all_had_done_together(by_all: bool, together: bool, stores: int) -> None:
    """Advice where other lanes have written since."""
    body = f"""
        @%p2 mbarrier.init.shared.b64 [%r3+2048], {32 if by_all else 1};
        bar.sync 0;
        @{"%p1" if stores > 1 else "%p2"} st.shared.b32 [%r4], %r1;
        {"bar.warp.sync -1;" if together else ""}
        @{"%p1" if by_all else "%p2"} mbarrier.arrive.shared.b64 %rd2, [%r3+2048], 1;
        @%p1 ret;
        $AGAIN: mbarrier.try_wait.parity.shared.b64 %p6, [%r3+2048], 0;
        @!%p6 bra $AGAIN;
        ld.shared.b32 %r9, [%r3];
        """
    order = Order()
    assembly.run(BEGIN + body, torch.arange(256, dtype=torch.int32), threads=64, observer=order)
    wrong = stores > 1 and not by_all and not together
    assert ELECTED in clocks.ADVICE
    assert [found.kind for found in order.advice] == [ELECTED] * wrong
