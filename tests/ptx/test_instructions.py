"""Instructions of the machine (tests/ptx/) that threads and warps run by themselves, against the PTX ISA."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch

from tests.ptx.assembly import run


def f32(x: float) -> int:
    """Its bits."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def f32_text(x: float) -> str:
    return f"0f{f32(x) & 0xFFFFFFFF:08X}"


ONE_RESULT = [
    ("shl.b32 %r9, 3, 32;", 0),
    ("shl.b32 %r9, 3, 31;", -(1 << 31)),
    ("shr.s32 %r9, -8, 40;", -1),
    ("shr.u32 %r9, -8, 28;", 15),
    ("shf.l.wrap.b32 %r9, 0x80000001, 7, 33;", 15),
    ("shf.r.clamp.b32 %r9, 1, 7, 40;", 7),
    ("mul.hi.s32 %r9, -3, 5;", -1),
    ("mul.hi.u32 %r9, -3, 5;", 4),
    ("mad.lo.s32 %r9, -3, 5, 100;", 85),
    ("div.s32 %r9, -7, 2;", -3),
    ("rem.s32 %r9, -7, 2;", -1),
    ("div.u32 %r9, -7, 2;", ((1 << 32) - 7) // 2),
    ("popc.b32 %r9, 0xf00f;", 8),
    ("clz.b32 %r9, 1;", 31),
    ("brev.b32 %r9, 2;", 1 << 30),
    ("bfind.u32 %r9, 0;", -1),
    ("bfe.u32 %r9, 0xabcd, 4, 8;", 0xBC),
    ("bfe.s32 %r9, 0xf0, 4, 4;", -1),
    ("bfe.s32 %r9, 0x70, 4, 0;", 0),
    ("prmt.b32 %r9, 0x33221100, 0x77665544, 0x7410;", 0x77441100),
    ("prmt.b32 %r9, 0x80, 0, 0x8000;", (0xFF000000 | 0x808080) - (1 << 32)),
    ("lop3.b32 %r9, 12, 10, 6, 0x96;", 12 ^ 10 ^ 6),
    ("lop3.b32 %r9, 12, 10, 6, 0xca;", (12 & 10) | (~12 & 6)),
    ("min.s32 %r9, -1, 1;", -1),
    ("min.u32 %r9, -1, 1;", 1),
    ("neg.s32 %r9, 5;", -5),
    # One number of three, NaN if there is no other
    (f"max.f32 %r9, {f32_text(1)}, 0f7FFFFFFF, {f32_text(2)};", f32(2)),
    (f"min.f32 %r9, 0f7FFFFFFF, {f32_text(3)};", f32(3)),
    # One rounding: the product alone would lose the one
    (f"fma.rn.f32 %r9, {f32_text(1 + 2**-12)}, {f32_text(1 + 2**-12)}, {f32_text(-1 - 2**-11)};", f32(2**-24)),
    (f"ex2.approx.ftz.f32 %r9, {f32_text(-3)};", f32(0.125)),
    (f"cvt.rni.s32.f32 %r9, {f32_text(2.5)};", 2),
    (f"cvt.rzi.s32.f32 %r9, {f32_text(-2.5)};", -2),
    (f"cvt.rmi.s32.f32 %r9, {f32_text(-2.5)};", -3),
    (f"cvt.rzi.s32.f32 %r9, {f32_text(3e9)};", (1 << 31) - 1),
    ("cvt.rn.f32.s32 %r9, -16777217;", f32(-16777216)),
    (f"cvt.rn.bf16x2.f32 %r9, {f32_text(1)}, {f32_text(1 + 2**-8)};", 0x3F803F80),
    (f"cvt.rn.bf16x2.f32 %r9, {f32_text(1 + 3 * 2**-8)}, {f32_text(-math.inf)};", 0x3F82FF80),
    (f"cvt.rn.f16x2.f32 %r9, {f32_text(1)}, {f32_text(-2)};", 0x3C00C000),
    ("mov.b16 %rs0, -2; cvt.s32.s16 %r9, %rs0;", -2),
    ("mov.b16 %rs0, -2; cvt.u32.u16 %r9, %rs0;", 0xFFFE),
    ("mov.b16 %rs0, 0x1ff; cvt.s32.s8 %r9, %rs0;", -1),
    ("mov.b64 %rd9, {3, 4}; mov.b64 {_, %r9}, %rd9;", 4),
    ("mov.b32 %r8, 0x20001; mov.b32 {%rs1, %rs2}, %r8; mov.b32 %r9, {%rs2, %rs1};", 0x10002),
    ("mul.wide.s32 %rd9, -1, 2; shr.s64 %rd9, %rd9, 33; cvt.u32.u64 %r9, %rd9;", -1),
    ("mul.wide.u32 %rd9, -1, 2; mov.b64 {_, %r9}, %rd9;", 1),
    ("mul.hi.u64 %rd9, -1, -1; mov.b64 {%r9, _}, %rd9;", -2),
    ("setp.neu.f32 %p0, 0f7FFFFFFF, 0f7FFFFFFF; selp.b32 %r9, 1, 0, %p0;", 1),
    ("setp.ne.f32 %p0, 0f7FFFFFFF, 0f7FFFFFFF; selp.b32 %r9, 1, 0, %p0;", 0),
    ("setp.ltu.f32 %p0, 0f7FFFFFFF, 0f00000000; selp.b32 %r9, 1, 0, %p0;", 1),
    ("setp.lt.s32 %p0, -1, 0; selp.b32 %r9, 1, 0, %p0;", 1),
    ("setp.lt.u32 %p0, -1, 0; selp.b32 %r9, 1, 0, %p0;", 0),
    # The second one is a tie of bf16
    ("mov.b32 %r4, 0x43803F80; mov.b32 %r5, 0x3B803F80; add.bf16x2 %r9, %r4, %r5;", 0x43804000),
    ("mov.b32 %r4, 0x43800000; mov.b32 %r5, 0x3F800000; add.bf16x2 %r9, %r4, %r5;", 0x43800000),
    (f"mov.b16 %rs0, 0x3F81; fma.rn.f32.bf16 %r9, %rs0, %rs0, {f32_text(-1)};", f32((1 + 2**-7) ** 2 - 1)),
    # Two lanes may write equal values; addresses of 32 bits wrap
    ("mov.b32 %r4, 7; st.shared.b32 [%r2], %r4; sub.s32 %r5, %r2, 1024; ld.shared.b32 %r9, [%r5+1024];", 7),
    ("mov.b32 %r9, 7; setp.eq.s32 %p0, 1, 2; @%p0 mov.b32 %r9, 8; @!%p0 add.s32 %r9, %r9, 2;", 9),
]


@pytest.mark.parametrize(("text", "expected"), ONE_RESULT)
def test_one_result(text: str, expected: int) -> None:
    got = run(f"{text} st.global.b32 [%rd2], %r9;")
    assert got.flatten().tolist() == [expected] * 32


@pytest.mark.parametrize(
    ("x", "y", "down"),
    [
        (1.0, 2.0**-30, 1.0),
        (1.0, -(2.0**-30), 1 - 2.0**-24),
        (1.0, -(2.0**-100), 1 - 2.0**-24),  # which fp64 does not hold
        (2.5, 3.0, 5.5),
        (-1.0, -(2.0**-60), -1 - 2.0**-23),
    ],
)
def test_sums_of_pairs_round_to_nearest_or_down(x: float, y: float, down: float) -> None:
    body = f"""
        mov.b64 %rd9, {{{f32_text(x)}, {f32_text(0)}}};
        mov.b64 %rd10, {{{f32_text(y)}, {f32_text(1)}}};
        add.rm.f32x2 %rd11, %rd9, %rd10;
        add.rn.f32x2 %rd12, %rd9, %rd10;
        st.global.v2.b64 [%rd2], {{%rd11, %rd12}};
    """
    got = run(body, columns=4)[0]
    nearest = torch.tensor(x + y).float()
    assert got.view(torch.float32).tolist() == [down, 1.0, nearest.item(), 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "add.cc.s32 %r9, 1, 2;",
        "fma.rz.f32 %r9, 0f0, 0f0, 0f0;",
        "add.rp.f32x2 %rd9, %rd9, %rd9;",
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r9}, %rd9, %rd9, 1;",
        "tcgen05.mma.cta_group::1.kind::tf32 [%r9], %rd9, %rd9, %r9, %p0;",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r0}], [%r2];",
        "fence.proxy.tensormap::generic.release.gpu;",
        "elect.sync _|%p0, 0xff;",
        "discombobulate.b32 %r9, 1;",
    ],
)
def test_what_is_not_known_raises(text: str) -> None:
    with pytest.raises(NotImplementedError, match=text.split()[0].split(";")[0].replace(".", r"\.")):
        run(text)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("shfl.sync.idx.b32 %r9, %r0, 5, 31, -1;", lambda i: 5),
        ("shfl.sync.idx.b32 %r9, %r0, 1, 0x1807, -1;", lambda i: i // 8 * 8 + 1),
        ("shfl.sync.bfly.b32 %r9, %r0, 3, 31, -1;", lambda i: i ^ 3),
        ("shfl.sync.up.b32 %r9, %r0, 4, 0, -1;", lambda i: i - 4 if i >= 4 else i),
        ("shfl.sync.down.b32 %r9, %r0, 4, 31, -1;", lambda i: i + 4 if i < 28 else i),
        ("elect.sync %r8|%p0, -1; selp.b32 %r9, 1, 0, %p0;", lambda i: i == 0),
    ],
)
def test_lanes_together(text: str, result: Callable[[int], int]) -> None:
    got = run(f"{text} st.global.b32 [%rd2], %r9;").flatten()
    assert got.tolist() == [result(i) for i in range(32)]


def test_atomics_of_one_address_are_added_up() -> None:
    x = torch.tensor([10, 0], dtype=torch.int32)
    body = """
        ld.param.b64 %rd5, [kernel_param_1];
        atom.global.add.u32 %r9, [%rd5], 2;
        red.global.or.b32 [%rd5+4], %r0;
        st.global.b32 [%rd2], %r9;
    """
    got = run(body, x).flatten()
    assert sorted(got.tolist()) == list(range(10, 74, 2))
    assert x.tolist() == [74, 31]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ld.shared.b32 %r9, [%r2+2];", "misaligned"),
        ("ld.shared.b32 %r9, [%r2+232448];", "outside of shared memory"),
        ("ld.global.b32 %r9, [%rd0+-4];", "outside of one tensor"),
        ("ld.global.b32 %r9, [%rd0+128];", "outside of one tensor"),
        ("ld.param.b64 %rd5, [kernel_param_1]; ld.global.b32 %r9, [%rd5];", "nobody wrote"),
        ("st.shared.b32 [%r2], %r0;", "two threads write one address"),
        ("setp.lt.s32 %p0, %r0, 5; @%p0 elect.sync _|%p1, -1;", "take part"),
        ("setp.lt.s32 %p0, %r0, 5; @%p0 shfl.sync.bfly.b32 %r9, %r0, 31, 31, -1;", "take part"),
    ],
)
def test_what_is_wrong_raises(text: str, message: str) -> None:
    with pytest.raises((MemoryError, RuntimeError), match=message):
        run(text, torch.full((1,), math.nan))


def test_registers_of_the_file_are_waited_for() -> None:
    """4 warpgroups of 128 registers: one may have more when others have given theirs away, whoever comes first."""
    body = """
        setp.lt.s32 %p0, %r0, 128;
        @%p0 setmaxnreg.inc.sync.aligned.u32 160;
        @!%p0 setmaxnreg.dec.sync.aligned.u32 {};
        st.global.b32 [%rd2], %r0;
    """
    assert run(body.format(112), threads=512).flatten().tolist() == list(range(512))
    with pytest.raises(RuntimeError, match=r"(?s)wait for each other.*160 registers"):
        run(body.format(120), threads=512)
