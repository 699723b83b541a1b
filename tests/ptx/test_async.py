"""mbarriers, TMA and clusters on the machine (tests/ptx/), with kernels of a few lines, against the PTX ISA."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ptx.assembly import Mapped, run, wait

LATE = pytest.mark.parametrize("late", [True, False])
BARRIER = """
    setp.eq.s32 %p15, %r0, 0;
    add.s32 %r10, %r2, 131072;
    @%p15 mbarrier.init.shared.b64 [%r10], {count};
    bar.sync 0;
"""
"""%p15: the first thread; %r10: an mbarrier."""


@pytest.mark.parametrize(("parity", "waits"), [(0, True), (1, False)])
def test_who_waits_for_what(parity: int, waits: bool) -> None:
    """A deadlock names CTA, warps, instruction, barrier and phase."""
    body = f"""
        {BARRIER.format(count=3)}
        setp.ge.s32 %p1, %r0, 32;
        @%p1 bar.sync 5, 96;
        @%p15 mbarrier.arrive.shared.b64 %rd5, [%r10], 2;
        @!%p15 bra $END;
        {wait(parity)}
        $END:
    """
    with pytest.raises(RuntimeError, match="wait for each other") as error:
        run(body, threads=64)
    assert re.search(r"warps \[1\], .* barrier 5 with 96 threads", str(error.value))
    waiting = r"CTA \(0, 0, 0\), warps \[0\], .*try_wait.* phase 0 of mbarrier 0x20000.* 1 of 3 arrivals"
    assert bool(re.search(waiting, str(error.value))) == waits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mbarrier.arrive.shared.b64 %rd5, [%r10];", "32 arrive where 31 are pending"),
        ("@%p15 mbarrier.arrive.shared.b64 %rd5, [%r10+8];", "no mbarrier"),
        ("@%p15 mbarrier.arrive.shared.b64 %rd5, [%r10+4];", "misaligned"),
        ("@%p15 mbarrier.init.shared.b64 [%r10], 0;", "of 0 arrivals"),
        (
            "mov.b64 %rd7, kernel_param_1; cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            " [%r2], [%rd7, {%r0, %r0}], [%r10];",
            "takes one",
        ),
        ("mov.b32 %r4, 1; mapa.shared::cluster.u32 %r5, %r2, %r4;", "mapa to CTA 1 in a cluster of 1"),
    ],
)
def test_what_is_wrong_raises(text: str, message: str) -> None:
    with pytest.raises((RuntimeError, MemoryError), match=message):
        run(BARRIER.format(count=31) + text, Mapped(torch.zeros(4, 8), (8, 4)))


# Copies of bytes in a row


ROW = """
    @%p15 mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r10], {expected};
    ld.param.b64 %rd6, [kernel_param_1];
    @%p15 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd6], 128, [%r10];
"""
READ = "shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r2; ld.shared.b32 %r9, [%r4]; st.global.b32 [%rd2], %r9;"


@LATE
@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_arrives_late_or_at_once(late: bool, waits: bool) -> None:
    """Without a wait, shared memory is NaN (-1) where copies are late."""
    x = torch.arange(32, dtype=torch.int32)
    body = BARRIER.format(count=1) + ROW.format(expected=128) + (wait(0) if waits else "") + READ
    expected = x if waits or not late else torch.full_like(x, -1)
    assert torch.equal(run(body, x, late=late).flatten(), expected)


@LATE
@pytest.mark.parametrize("expected", [112, 144])
def test_a_phase_waits_for_all_bytes_and_no_others(late: bool, expected: int) -> None:
    x = torch.arange(32, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"0 of 1 arrivals and {expected - 128} bytes pending"):
        run(BARRIER.format(count=1) + ROW.format(expected=expected) + wait(0), x, late=late)


@LATE
def test_additions_of_rows_read_when_they_are_waited_for(late: bool) -> None:
    """What is written between the start and the wait is added only by a late copy: a race that it shows."""
    x = torch.arange(32).float()
    body = f"""
        {BARRIER.format(count=1)}
        mov.b32 %r9, 0f3F800000;
        shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r2; st.shared.b32 [%r4], %r9;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        ld.param.b64 %rd6, [kernel_param_1];
        mov.b32 %r5, 128;
        @%p15 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd6], [%r2], %r5;
        mov.b32 %r9, 0f40000000;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 1;
        bar.sync 0;
        st.shared.b32 [%r4], %r9;
        cp.async.bulk.wait_group.read 0;
    """
    run(body, x, late=late)
    assert torch.equal(x, torch.arange(32) + (2.0 if late else 1.0))


# Boxes of tensors


def load(rank: int, corner: str, size: int) -> str:
    return f"""
        {BARRIER.format(count=1)}
        mov.b64 %rd7, kernel_param_1;
        cvta.param.u64 %rd7, %rd7;
        @%p15 mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r10], {size};
        mov.b64 %rd8, 0;
        {corner}
        @%p15 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint
            [%r2], [%rd7, {{{", ".join(f"%r{20 + i}" for i in range(rank))}}}], [%r10], %rd8;
        {wait(0)}
    """


@LATE
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_boxes_are_swizzled(swizzle: int, late: bool) -> None:
    """16 rows of 16-bit numbers that are their own places."""
    width = swizzle // 2
    x = torch.arange(20 * width, dtype=torch.int16).view(20, width).view(torch.bfloat16)
    size = 16 * swizzle
    words = size // 4 // 32
    body = (
        load(2, "mov.b32 %r20, 0; mov.b32 %r21, 3;", size) + f"mul.lo.s32 %r4, %r0, {4 * words}; add.s32 %r4, %r4, %r2;"
    )
    for i in range(words):
        body += f"ld.shared.b32 %r9, [%r4+{4 * i}]; st.global.b32 [%rd2+{4 * i}], %r9;"
    got = run(body, Mapped(x, (width, 16), swizzle), columns=words, late=late).flatten().view(torch.int16)
    got = got.view(16, swizzle // 16, 8)
    for row in range(16):
        for chunk in range(swizzle // 16):
            there = chunk ^ row * swizzle // 128 % (swizzle // 16)  # CUTLASS, Swizzle
            expected = x.view(torch.int16)[3 + row, 8 * chunk : 8 * chunk + 8]
            assert torch.equal(got[row, there], expected)


@pytest.mark.parametrize("corner", [(0, 0, 0), (4, -1, 1), (-4, 3, 2), (8, 0, 0), (0, 0, -2)])
def test_zeros_come_from_outside(corner: tuple[int, int, int]) -> None:
    """Boxes of 4 x 4 x 2 of fp32, with a part beyond the tensor, or all."""
    x = torch.arange(1, 1 + 3 * 5 * 8).float().view(3, 5, 8)
    at = "".join(f"mov.b32 %r{20 + i}, {c};" for i, c in enumerate(corner))
    got = run(load(3, at, 128) + READ, Mapped(x, (4, 4, 2))).view(torch.float32).view(2, 4, 4)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4)).tolist():
        where = [i + c for i, c in zip(place, corner[::-1], strict=True)]
        inside = all(0 <= i < n for i, n in zip(where, x.shape, strict=True))
        assert got[tuple(place)] == (x[tuple(where)] if inside else 0)


@pytest.mark.parametrize(
    ("mapped", "message"),
    [
        (Mapped(torch.zeros(4, 6), (4, 4)), "multiples of 16"),
        (Mapped(torch.zeros(4, 64), (64, 4), 128), "swizzle"),
        (Mapped(torch.zeros(4, 300), (260, 1)), "box"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(mapped: Mapped, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("", mapped)


# Clusters


def test_a_cta_reaches_the_other_ones_mbarrier_and_memory() -> None:
    """Each sends 128 bytes to its peer, which is told by its own mbarrier; addresses hold the rank."""
    body = f"""
        {BARRIER.format(count=2)}
        mul.lo.s32 %r9, %r1, 100; add.s32 %r9, %r9, %r0;
        shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r2; st.shared.b32 [%r4+1024], %r9;
        fence.proxy.async.shared::cta;
        @%p15 mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r10], 128;
        barrier.cluster.arrive.relaxed;
        barrier.cluster.wait;
        xor.b32 %r5, %r1, 1;
        mapa.shared::cluster.u32 %r6, %r10, %r5;
        mapa.shared::cluster.u32 %r7, %r2, %r5;
        add.s32 %r8, %r2, 1024;
        mov.b32 %r11, 128;
        @%p15 mbarrier.arrive.shared::cluster.b64 _, [%r6];
        @%p15 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r8], %r11, [%r6];
        {wait(0)}
        ld.shared.b32 %r9, [%r4];
        st.global.b32 [%rd2], %r9;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    got = run(body, cluster=2).flatten()
    assert got.tolist() == [*range(100, 132), *range(32)]


def test_a_cluster_waits_for_all_of_its_threads() -> None:
    body = "setp.eq.s32 %p0, %r1, 1; @%p0 bra $L1; barrier.cluster.arrive; barrier.cluster.wait; $L1: {}"
    assert run(body.format("ret;"), cluster=2).shape == (64, 1)  # who has returned has arrived
    with pytest.raises(RuntimeError, match=r"(?s)wait for each other.*CTA \(0, 0, 0\).*barrier.cluster"):
        run(body.format("@%p0 bar.sync 3, 64;"), cluster=2)
    with pytest.raises(RuntimeError, match=r"wait at barrier.cluster where they have not arrived"):
        run("barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.wait;", cluster=2)


def test_shared_memory_of_others_takes_cluster_addresses() -> None:
    body = "mov.b32 %r4, 1; mapa.shared::cluster.u32 %r5, %r2, %r4; ld.shared.b32 %r9, [%r5];"
    with pytest.raises(MemoryError, match="outside of shared memory"):
        run(body + "barrier.cluster.arrive; barrier.cluster.wait;", cluster=2)
