"""The happens-before checker (tests/ptx/clocks.py, order.py): each rule with what it asks for, and without."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

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
    Key,
)
from tests.ptx.order import Order, RaceError

Step = Callable[[Clocks], object]
HERE, RESULT = np.arange(64), np.arange(128, 192)
"""Cells that are accessed."""
FULL, EMPTY = (0, 0x10), (0, 0x18)
"""mbarriers."""


def do(method: Callable[..., object], *arguments: Any, **named: Any) -> Step:
    return lambda of: method(of, *arguments, **named)


def all_of(*steps: Step) -> Step:
    return lambda of: [step(of) for step in steps]


def reads(warp: int, cells: Any = HERE, cta: int = 0) -> Step:
    return do(Clocks.reads, warp, cells, cta)


def writes(warp: int, cells: Any = HERE) -> Step:
    return do(Clocks.writes, warp, cells)


def by_lanes(method: Callable[..., object], *lanes: int) -> Step:
    """Each of the cells by each of these lanes of warp 0."""
    return do(method, 0, np.repeat(HERE, len(lanes)), 0, np.tile(np.array(lanes), len(HERE)))


def arrives(*warps: int, at: object = 1) -> Step:
    return do(Clocks.arrive, at, warps)


def releases(*warps: int, at: object = 1) -> Step:
    return do(Clocks.release, at, warps)


def fences(warp: int) -> Step:
    return do(Clocks.fence_proxy, warp)


def begins(*keys: tuple[int, int]) -> Step:
    """mbarriers that warp 0 has initialized, in all the ways that anyone may ask for."""
    return all_of(*(do(Clocks.init, 0, key) for key in keys), do(Clocks.fence_init, 0), meets)


def arrives_at(warp: int, key: tuple[int, int]) -> Step:
    return do(Clocks.arrive_at, warp, key)


def completes(key: tuple[int, int]) -> Step:
    return do(Clocks.complete, key)


def waits(warp: int, key: tuple[int, int]) -> Step:
    return do(Clocks.wait_for, warp, key)


def loads(warp: int, key: tuple[int, int] = FULL) -> Step:
    return do(Clocks.bulk_load, warp, key, HERE)


def copies(at: int = 0) -> Step:
    """A group of cp.async."""
    return all_of(do(Clocks.copy, 0, HERE + at), do(Clocks.commit_group, "cp.async", 0))


def multiplies(warp: int, to: int = 0) -> Step:
    """tcgen05.mma: reads `HERE` of shared memory, and writes other columns from `to` on."""
    return lambda of: of.mma(warp, [(of.shared[0], HERE)], [(of.tmem[0], RESULT + to)], (to, (64, 1)))


def commits(warp: int, key: tuple[int, int] = FULL) -> Step:
    return all_of(do(Clocks.commit_mma, warp, [key]), do(Clocks.arrive_committed, key), completes(key))


def ends(warp: int, key: tuple[int, int]) -> Step:
    """Of an mbarrier for which one warp arrives."""
    return all_of(arrives_at(warp, key), completes(key))


meets = all_of(arrives(0, 1), releases(0, 1))
fills = all_of(arrives_at(0, FULL), loads(0))
together = do(Clocks.sync, [0])
waits_for_copies = do(Clocks.wait_group, "cp.async", 0, [0], 0)
copies_by_lane_1 = all_of(by_lanes(Clocks.copy, 1), do(Clocks.commit_group, "cp.async", 0))
HANDS_ON_TMEM = all_of(
    do(Clocks.fence_tmem_before, 0),
    do(Clocks.arrive_at, 0, FULL, True),
    completes(FULL),
    do(Clocks.wait_for, 1, FULL, True),
    do(Clocks.fence_tmem_after, 1),
)
"""By a relaxed arrival and wait."""
BY_PROXY = {
    "store": do(Clocks.bulk_store, 1, HERE),
    "product": multiplies(1),
    "wgmma": do(Clocks.multiply, 0, [1], HERE),
}


class Rule(NamedTuple):
    steps: list[Step]
    """Nothing is wrong with them."""
    without: dict[int, Key | list[Key]]
    """What is found if one of them is left out: the kind, and between which of the steps."""
    warps: int = 2
    ctas: int = 1


RULES = {
    # Threads
    "writes, then reads": Rule([writes(0), meets, reads(1)], {1: (RACE, 0, 2)}),
    "writes, then writes": Rule([writes(0), meets, writes(1)], {1: (RACE, 0, 2)}),
    "reads, then writes": Rule([reads(0), meets, writes(1)], {1: (RACE, 0, 2)}),
    "reads are in any order": Rule([reads(0), reads(1)], {}),
    "a warp's own are in order": Rule([writes(0), reads(0), writes(0)], {}),
    "who only arrives has handed on": Rule([writes(0), arrives(0), arrives(1), releases(1), writes(1)], {}),
    "order is handed on": Rule(
        [writes(0), all_of(arrives(0, 1), releases(1)), all_of(arrives(1, 2, at=2), releases(2, at=2)), writes(2)],
        {1: (RACE, 0, 3), 2: (RACE, 0, 3)},
        warps=3,
    ),
    **{
        f"lanes {before.__name__} by {first}, {after.__name__} by 2": Rule(
            [by_lanes(before, *first), together, by_lanes(after, 2)], {1: (LANES_RACE, 0, 2)}
        )
        for before, first, after in [
            (Clocks.writes, (1,), Clocks.reads),
            (Clocks.writes, (1,), Clocks.writes),
            (Clocks.reads, (1,), Clocks.writes),
            (Clocks.reads, (1, 2), Clocks.writes),
        ]
    },
    "a barrier is between lanes as well": Rule(
        [by_lanes(Clocks.writes, 1), all_of(together, meets), by_lanes(Clocks.reads, 2)], {}
    ),
    "a lane's own are in order": Rule([by_lanes(of, 1) for of in (Clocks.writes, Clocks.reads, Clocks.writes)], {}),
    "lanes read in any order": Rule([by_lanes(Clocks.reads, 1), by_lanes(Clocks.reads, 2)], {}),
    "what a lane has copied others know after its wait and a barrier": Rule(
        [copies_by_lane_1, waits_for_copies, together, by_lanes(Clocks.reads, 2)], {2: (LANES_RACE, 0, 3)}
    ),
    "a lane knows its own copy after its wait": Rule(
        [copies_by_lane_1, waits_for_copies, by_lanes(Clocks.reads, 1)], {}
    ),
    "a lane copies what others have read": Rule(
        [by_lanes(Clocks.reads, 2), together, copies_by_lane_1], {1: (LANES_RACE, 0, 2)}
    ),
    "atomics are in any order": Rule([do(Clocks.adds, 0, HERE), do(Clocks.adds, 1, HERE)], {}),
    "cells are told apart": Rule([writes(0, np.array([1, 3])), writes(1, np.array([2, 4]))], {}),
    # mbarriers
    **{
        f"an mbarrier is used after it was made known, by {fence.__name__} before a {use}": Rule(
            [do(Clocks.init, 0, FULL), do(fence, 0), meets, step], {1: (INIT, 0, 3)}
        )
        for fence, (use, step) in product(
            (Clocks.fence_init, Clocks.fence_proxy), (("load", loads(1)), ("commit", commits(1)))
        )
    },
    "an mbarrier is used after it was initialized": Rule(
        [do(Clocks.init, 0, FULL), do(Clocks.fence_init, 0), meets, arrives_at(1, FULL)], {1: [], 2: (RACE, 0, 3)}
    ),
    "a wait takes what all arrivals hand on": Rule(
        [begins(FULL), writes(0), arrives_at(0, FULL), completes(FULL), waits(1, FULL), reads(1)],
        {2: (RACE, 1, 5), 3: (RACE, 1, 5), 4: (RACE, 1, 5)},  # 3: for the phase before the first
    ),
    "a stage is overwritten after it was released": Rule(  # a ring of one: filled by warp 0, read by warp 1
        [
            begins(FULL, EMPTY),
            fills,
            completes(FULL),
            waits(1, FULL),
            all_of(reads(1), fences(1)),
            ends(1, EMPTY),
            waits(0, EMPTY),
            fills,
        ],
        {6: [(RACE, 4, 7), (RACE, 1, 7)]},
    ),
    "a phase may not pass by who waits": Rule(  # both have its parity once the next one completes
        [begins(FULL, EMPTY), ends(0, FULL), waits(1, FULL), ends(1, EMPTY), waits(0, EMPTY), ends(0, FULL)],
        {4: (PHASE, 2, 5)},
    ),
    # The async proxy
    **{
        f"what threads wrote needs a proxy fence of the writer before a {name}": Rule(
            [writes(0), fences(0), meets, step], {1: (PROXY, 0, 3)}
        )
        for name, step in BY_PROXY.items()
    },
    "what cp.async wrote needs a wait and then a fence": Rule(
        [copies(), waits_for_copies, fences(0), meets, multiplies(1)], {2: (PROXY, 0, 4)}
    ),
    "reads of threads before a copy": Rule([begins(FULL), reads(1), fences(1), meets, loads(0)], {2: (REUSE, 1, 4)}),
    "writes of threads before a copy": Rule([begins(FULL), writes(1), fences(1), meets, loads(0)], {2: (PROXY, 1, 4)}),
    "groups of cp.async end in order": Rule(
        [copies(0), copies(64), do(Clocks.wait_group, "cp.async", 0, [0], 1), reads(0)], {}
    ),
    "a CTA ends after bulk stores have read shared memory": Rule(
        [
            do(Clocks.bulk_store, 0, HERE),
            do(Clocks.commit_group, "bulk", 0),
            do(Clocks.wait_group, "bulk", 0, [0], 0),
            Clocks.finish,
        ],
        {1: (END, 0, 0), 2: (END, 0, 0)},
    ),
    # Warpgroups
    "wgmma reads what all its warps know": Rule(
        [writes(0), fences(0), all_of(arrives(0, 1, 2), releases(1, 2)), do(Clocks.multiply, 0, [1, 2], HERE)],
        {},
        warps=3,
    ),
    # Tensor memory
    "products are done when their commit has arrived": Rule(
        [begins(FULL), multiplies(0), commits(0), waits(1, FULL), do(Clocks.load_tmem, 1, RESULT)],
        {2: (RACE, 1, 4), 3: (RACE, 1, 4)},
    ),
    **{
        f"operands of products are free when their commit has arrived, {i}": Rule(
            [begins(FULL, EMPTY), multiplies(0), commits(0), waits(1, FULL), overwrites], {3: (RACE, 1, 4)}
        )
        for i, overwrites in enumerate((writes(1), loads(1, EMPTY)))
    },
    "products into one accumulator are in order": Rule([multiplies(0), multiplies(0)], {}),
    **{
        f"what is loaded from TMEM by {len(used)} is overwritten by {warp}": Rule(
            [
                do(Clocks.load_tmem, 0, HERE, ("%r1", "%r2")),
                do(Clocks.wait_tmem, 0, "ld"),
                do(Clocks.use, 0, used),
                meets,
                do(Clocks.store_tmem, warp, HERE),
            ],
            {1: (REGISTERS if len(used) == 2 else RACE, 0, 4)},
        )
        for used, warp in product((("%r1", "%r2"), ("%r2",)), (0, 1))
    },
    "TMEM is used after it was allocated": Rule(
        [do(Clocks.own_tmem, 1, np.arange(512)), meets, do(Clocks.store_tmem, 0, HERE)], {1: (RACE, 0, 2)}
    ),
    # CTAs
    "CTAs of a cluster have memories of their own": Rule([writes(0), reads(1, cta=1)], {}, ctas=2),
    "a barrier of the cluster orders its CTAs": Rule(
        [
            writes(0),
            all_of(arrives(0, 1, at="cluster"), do(Clocks.meet, "cluster"), do(Clocks.learn, "cluster", [1])),
            reads(1, cta=0),
        ],
        {1: (RACE, 0, 2)},
        ctas=2,
    ),
    **{
        f"a CTA ends after what reaches it, {i}": Rule(  # by warp 1 of CTA 1, or the CTA's own copy
            [begins(FULL), all_of(step, completes(FULL)), waits(0, FULL), Clocks.finish], {2: (END, 1, 1)}, ctas=2
        )
        for i, step in enumerate(
            (
                do(Clocks.arrive_at, 1, FULL),
                all_of(
                    lambda of: of.mma(1, [], [(of.tmem[1], RESULT)], 0),
                    do(Clocks.commit_mma, 1, [FULL]),
                    do(Clocks.arrive_committed, FULL),
                ),
                loads(0),
            )
        )
    },
}

WRONG: list[tuple[list[Step], Key]] = [
    ([writes(0), arrives(0), arrives(1), releases(1), writes(1), reads(0)], (RACE, 4, 5)),  # who arrives does not wait
    ([arrives(0), writes(0), arrives(1), releases(1), writes(1)], (RACE, 1, 4)),  # written after the arrival
    ([copies_by_lane_1, together, waits_for_copies, by_lanes(Clocks.reads, 2)], (LANES_RACE, 0, 3)),
    ([do(Clocks.adds, 0, HERE), reads(1)], (RACE, 0, 1)),
    ([writes(0), do(Clocks.adds, 1, HERE)], (RACE, 0, 1)),
    ([writes(0, np.array([1, 3])), writes(1, np.array([2, 3]))], (RACE, 0, 1)),
    ([begins(FULL), loads(0), loads(0)], (RACE, 1, 2)),  # copies of one phase are in no order
    *(([writes(0), meets, fences(who), step], (PROXY, 0, 3)) for who in (0, 1) for step in BY_PROXY.values()),
    ([fences(0), writes(0), meets, multiplies(1)], (PROXY, 1, 3)),  # written after the fence
    ([copies(), fences(0), waits_for_copies, meets, multiplies(1)], (PROXY, 0, 4)),
    ([copies(64), copies(0), do(Clocks.wait_group, "cp.async", 0, [0], 1), reads(0)], (RACE, 1, 3)),
    ([writes(0), fences(0), all_of(arrives(0, 1), releases(1)), do(Clocks.multiply, 0, [1, 2], HERE)], (RACE, 0, 3)),
    (  # a product after the commit
        [begins(FULL), commits(0), multiplies(0), waits(1, FULL), do(Clocks.load_tmem, 1, RESULT)],
        (RACE, 2, 4),
    ),
    ([begins(FULL), multiplies(0), meets, do(Clocks.load_tmem, 0, RESULT)], (RACE, 1, 3)),  # nor for who started it
    ([multiplies(0), multiplies(0, to=1)], (PIPELINE, 0, 1)),
    ([multiplies(0), meets, multiplies(1)], (RACE, 0, 2)),  # another warp's pipe
    (  # relaxed barriers do not order shared memory
        [begins(FULL), writes(0), HANDS_ON_TMEM, reads(1)],
        (RACE, 1, 3),
    ),
]


def found_by(steps: list[Step], left_out: int | None = None, warps: int = 3, ctas: int = 1) -> list[Key]:
    of = Clocks(warps, ctas)
    for point, step in enumerate(steps):
        if point != left_out:
            of.point = point
            step(of)
    return [*of.findings]


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    rule = RULES[name]
    assert not found_by(rule.steps, None, rule.warps, rule.ctas)
    for left_out, found in rule.without.items():
        expected = found if isinstance(found, list) else [found]
        assert found_by(rule.steps, left_out, rule.warps, rule.ctas) == expected


@pytest.mark.parametrize(("steps", "found"), WRONG)
def test_steps_that_are_wrong(steps: list[Step], found: Key) -> None:
    assert found_by(steps) == [found]


def test_findings_name_the_place() -> None:
    found = Clocks(2)
    found.writes(0, np.array([6, 7]))
    found.reads(1, np.array([4, 5, 7]))
    assert "shared memory of CTA 0, byte 0xe" in found.findings[RACE, -1, -1].text


def test_what_relies_on_more_than_the_isa_says_is_advice() -> None:
    assert {ELECTED, PIPELINE, REGISTERS, REUSE} == clocks.ADVICE


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
