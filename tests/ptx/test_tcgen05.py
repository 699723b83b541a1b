"""Tensor memory and products of tcgen05 on the machine (tests/ptx/), against the PTX ISA and fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ptx.assembly import run, wait

LATE = pytest.mark.parametrize("late", [True, False])
COLUMNS = 128
ALLOC = "@%p14 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r10+16], {columns};"
START = f"""
    setp.eq.s32 %p15, %r0, 0;
    add.s32 %r10, %r2, 196608;
    shr.u32 %r11, %r0, 5;
    setp.eq.s32 %p14, %r11, 0;
    @%p15 mbarrier.init.shared.b64 [%r10], 1;
    @%p15 mbarrier.init.shared.b64 [%r10+8], 1;
    {ALLOC}
    @%p14 tcgen05.relinquish_alloc_permit.cta_group::{{group}}.sync.aligned;
    bar.sync 0;
    ld.shared.b32 %r12, [%r10+16];
    and.b32 %r13, %r11, 3;
    shl.b32 %r13, %r13, 21;
    add.s32 %r13, %r13, %r12;
"""
"""%p15: the first thread, %p14: the first warp; %r10: two mbarriers; %r12: TMEM, %r13: its lanes of a quarter."""
REGISTERS = "{" + ", ".join(f"%r{32 + i}" for i in range(16)) + "}"
END = """
    bar.sync 0;
    @%p14 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r12, {columns};
"""


def whole(body: str, group: int = 1, columns: int = COLUMNS) -> str:
    return START.format(group=group, columns=columns) + body + END.format(group=group, columns=columns)


def read_columns(count: int) -> str:
    """All of a thread's lane, to its row of the result."""
    text = ""
    for c in range(0, count, 16):
        text += f"""
            add.s32 %r14, %r13, {c};
            tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r14];
            tcgen05.wait::ld.sync.aligned;
        """
        text += "".join(f"st.global.b32 [%rd2+{4 * (c + i)}], %r{32 + i};" for i in range(16))
    return text


# Between registers and TMEM


@LATE
@pytest.mark.parametrize("waits", [True, False])
def test_a_lane_of_tmem_for_each_thread(late: bool, waits: bool) -> None:
    """128 threads write what tells thread and column, and read it: NaN where a late write was not waited for."""
    body = "".join(f"mad.lo.s32 %r{32 + c}, %r0, 100, {c};" for c in range(16))
    body += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r13], {REGISTERS};"
    body += "tcgen05.wait::st.sync.aligned;" if waits else ""
    got = run(whole(body + read_columns(32)), threads=128, columns=32, late=late)
    written = torch.arange(128)[:, None] * 100 + torch.arange(16)
    nan = torch.full((128, 16), 0x7FFFFFFF)
    assert torch.equal(got, torch.cat([written if waits or not late else nan, nan], 1).int())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r13+120];", "are allocated"),
        (f"@%p15 tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r13];", "take part"),
        (ALLOC.format(group=1, columns=32), "permit"),
        ("@%p14 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 64;", "dealloc of 64 columns"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 128;", "takes one"),
        ("ret;", "returns without tcgen05.dealloc"),
        (f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r12];", "not their quarter"),
        *((ALLOC.format(group=1, columns=n), f"alloc of {n} columns") for n in (16, 48, 1024)),
    ],
)
def test_wrong_use_of_tmem(body: str, message: str) -> None:
    with pytest.raises((RuntimeError, MemoryError), match=message):
        run(whole(body), threads=128)


# Products


SWIZZLES = {16: 0, 32: 6, 64: 4, 128: 2}
"""Codes of the descriptor, by bytes of a row of the pattern; 16: none."""


def image(x: Tensor, swizzle: int, transposed: bool) -> tuple[Tensor, int, int]:
    """Shared memory that holds `[rows, 16]`, in 2 bytes, and the leading and the stride offset of its descriptor.

    Cores of 8 rows of 16 bytes, as the canonical layouts of the PTX ISA put them; rows of k if transposed.
    """
    rows, width = x.shape[0], swizzle // 2
    y = x.T if transposed else x
    long, across = y.shape[1], y.shape[0]
    chunks = -(-long // width)
    group = 8 * swizzle  # bytes of 8 rows of the pattern
    memory = torch.full((chunks * across * swizzle // 2,), float("nan")).to(x.dtype)
    for i in range(across):
        for j in range(0, long, 8):
            row, chunk = i % 8, j % width // 8
            place = (j // width * (across // 8) + i // 8) * group + row * swizzle
            place += (chunk ^ row * swizzle // 128 % (swizzle // 16)) * 16
            memory[place // 2 : place // 2 + 8] = y[i, j : j + 8]
    along, over = across // 8 * group, group
    assert rows % 8 == 0
    # Without a pattern and with k along a row, leading is from core to core in k; transposed, stride is
    return (memory, along, over) if swizzle > 16 or not transposed else (memory, over, along)


def descriptor(at: int, leading: int, stride: int, swizzle: int) -> int:
    return at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | SWIZZLES[swizzle] << 61


def shape(rows: int, columns: int, dtype: torch.dtype, transposed: tuple[bool, bool] = (False, False)) -> int:
    kind = int(dtype == torch.bfloat16)
    flags = transposed[0] << 15 | transposed[1] << 16
    return 1 << 4 | kind << 7 | kind << 10 | flags | columns // 8 << 17 | rows // 16 << 24


RIGHT_AT = 65536
LOAD = """
    ld.param.b64 %rd10, [kernel_param_1]; ld.param.b64 %rd11, [kernel_param_2];
    add.s64 %rd10, %rd10, {left_of_cta}; add.s64 %rd11, %rd11, {right_of_cta};
    add.s32 %r15, %r2, 65536;
    @%p15 mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r10], {bytes};
    @%p15 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd10], {left}, [%r10];
    @%p15 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%rd11], {right}, [%r10];
"""


def load(left: Tensor, right: Tensor) -> str:
    """Of one CTA."""
    sizes = [x.numel() * 2 for x in (left, right)]
    return LOAD.format(left_of_cta=0, right_of_cta=0, bytes=sum(sizes), left=sizes[0], right=sizes[1]) + wait(0)


def product(group: int, left: str, right: int, of: int, add: int = 0, to: int = 0, who: str = "%p15") -> str:
    return f"""
        mov.b64 %rd13, {right}; mov.b32 %r16, {of}; add.s32 %r17, %r12, {to}; setp.ne.b32 %p1, {add}, 0;
        @{who} tcgen05.mma.cta_group::{group}.kind::f16 [%r17], {left}, %rd13, %r16, %p1;
    """


COMMIT = "@%p15 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10+8];" + wait(0, "+8")


def numbers(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    left, right = torch.randn(rows, 16).to(dtype), torch.randn(columns, 16).to(dtype)
    return left, right, left.double() @ right.double().T


def close(got: Tensor, exact: Tensor) -> None:
    """Rounded to fp32 once: half of its last bit."""
    error = (got.view(torch.float32).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-24 + 1e-30).all())


CASES = [(swizzle, transposed) for swizzle in SWIZZLES for transposed in ((False, False), (False, True), (True, False))]


@LATE
@pytest.mark.parametrize(("swizzle", "transposed"), CASES)
def test_products_of_all_layouts(swizzle: int, transposed: tuple[bool, bool], late: bool) -> None:
    """128 x 64, of bf16 and fp16."""
    dtype = torch.bfloat16 if swizzle in (16, 128) else torch.float16
    left, right, exact = numbers(128, 64, dtype)
    (a, *of_a), (b, *of_b) = (image(x, swizzle, t) for x, t in zip((left, right), transposed, strict=True))
    body = load(a, b) + f"mov.b64 %rd12, {descriptor(0, *of_a, swizzle)};"
    body += product(1, "%rd12", descriptor(RIGHT_AT, *of_b, swizzle), shape(128, 64, dtype, transposed))
    got = run(whole(body + COMMIT + read_columns(64)), a, b, threads=128, columns=64, late=late)
    close(got, exact)


def operands(rows: int) -> tuple[Any, Any, str, Any, Tensor]:
    """bf16 tiles swizzled by 32 bytes: a, b, what loads them and names a in %rd12, the descriptor of b, a bᵀ."""
    left, right, exact = numbers(rows, 32, torch.bfloat16)
    a, *of_a = image(left, 32, False)
    b, *of_b = image(right, 32, False)
    body = load(a, b) + f"mov.b64 %rd12, {descriptor(0, *of_a, 32)};"
    return a, b, body, descriptor(RIGHT_AT, *of_b, 32), exact


@LATE
def test_products_end_late_or_at_once(late: bool) -> None:
    """Without a wait, TMEM is NaN still where products are late."""
    a, b, body, right_descriptor, exact = operands(128)
    body += product(1, "%rd12", right_descriptor, shape(128, 32, torch.bfloat16))
    got = run(whole(body + "bar.sync 0;" + read_columns(32)), a, b, threads=128, columns=32, late=late)
    if late:
        assert bool((got == 0x7FFFFFFF).all())
    else:
        close(got, exact)


def test_64_rows_lie_in_half_of_each_quarter() -> None:
    """Layout F: rows 16 w to 16 w + 15 in the first lanes of quarter w."""
    a, b, body, right_descriptor, exact = operands(64)
    body += product(1, "%rd12", right_descriptor, shape(64, 32, torch.bfloat16))
    got = run(whole(body + COMMIT + read_columns(32)), a, b, threads=128, columns=32).view(4, 2, 16, 32)
    close(got[:, 0].reshape(64, 32), exact)
    assert bool((got[:, 1] == 0x7FFFFFFF).all())


@LATE
@pytest.mark.parametrize("rows", [256, 128])
def test_pairs_of_ctas_multiply_together(rows: int, late: bool) -> None:
    """Each CTA has half of the rows of both operands. Of 256 rows, it gets sums of 128 in its lanes (layout A);
    of 128, lanes from 64 on have the second half of the columns (layout B). One commit tells both CTAs.
    """
    columns = 64
    left, right, exact = numbers(rows, columns, torch.bfloat16)
    halves = [image(x, 32, False) for part in (left, right) for x in part.chunk(2)]
    a, b = torch.stack([halves[0][0], halves[1][0]]), torch.stack([halves[2][0], halves[3][0]])
    bytes_a, bytes_b = (x[0].numel() * 2 for x in (a, b))
    body = f"cvt.u64.u32 %rd20, %r1; mul.lo.s64 %rd21, %rd20, {bytes_a}; mul.lo.s64 %rd22, %rd20, {bytes_b};"
    body += LOAD.format(left_of_cta="%rd21", right_of_cta="%rd22", bytes=bytes_a + bytes_b, left=bytes_a, right=bytes_b)
    body += wait(0) + "barrier.cluster.arrive; barrier.cluster.wait; setp.eq.s32 %p2, %r3, 0; mov.b16 %rs0, 3;"
    body += f"mov.b64 %rd12, {descriptor(0, *halves[0][1:], 32)};"
    right_at = descriptor(RIGHT_AT, *halves[2][1:], 32)
    body += product(2, "%rd12", right_at, shape(rows, columns, torch.bfloat16), who="%p2")
    body += """
        @%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10+8], %rs0;
    """ + wait(0, "+8")
    body += read_columns(64) + "barrier.cluster.arrive; barrier.cluster.wait;"
    got = run(whole(body, 2), a, b, threads=128, columns=64, cluster=2, late=late)
    if rows == 256:
        close(got, exact)
        return
    got = got.view(2, 2, 64, 64)  # CTA, half of the columns, row
    assert bool((got[..., 32:] == 0x7FFFFFFF).all())
    close(got[..., :32].permute(0, 2, 1, 3).reshape(128, 64), exact)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"of": shape(128, 32, torch.bfloat16) | 1 << 13}, "an instruction descriptor"),
        ({"of": shape(256, 32, torch.bfloat16)}, "an instruction descriptor"),
        ({"right": descriptor(RIGHT_AT, 256, 256, 32) | 1 << 61}, "a matrix descriptor"),
        ({"right": 0}, "a matrix descriptor"),
        ({"who": "%p14"}, "takes one"),
        ({"to": 100}, "are allocated"),
    ],
)
def test_products_that_are_refused(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"right": descriptor(RIGHT_AT, 256, 256, 32), "of": shape(128, 32, torch.bfloat16)}
    body = f"mov.b64 %rd12, {descriptor(0, 256, 256, 32)};" + product(1, "%rd12", **(given | changed))  # type: ignore[arg-type]
    with pytest.raises((RuntimeError, NotImplementedError, MemoryError), match=message):
        run(whole(body), threads=128)
