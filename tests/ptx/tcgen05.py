"""tcgen05: tensor memory (TMEM) and the products of the fifth-generation tensor cores.

TMEM is NaN where nothing was written since it was allocated. A warp reaches the lanes of its quarter. Products are
started by one thread, for one CTA or for a pair, and end in order; each is summed in fp64 from its 16-bit factors and
rounded to fp32 once, after the sums before it were added: what hardware rounds between is not defined, and BLAS cannot
change but the last bit. What tcgen05.st writes is there after tcgen05.wait::st (`late`), or at once; tcgen05.ld reads
at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.ptx.cta import NAN, TENSOR_COLUMNS, TENSOR_LANES, Cta
from tests.ptx.decode import action, unsupported
from tests.ptx.listing import Instruction, names
from tests.ptx.matrices import K, Layout, layout_of, places
from tests.ptx.mbarrier import barrier_of, current
from tests.ptx.memory import OFFSET, RANK_BIT, check_aligned, offset_in_own
from tests.ptx.observer import Operation, Region
from tests.ptx.registers import LANES, Threads
from tests.ptx.values import numbers

SWIZZLES = {0: 16, 2: 128, 4: 64, 6: 32}
LEAST_COLUMNS = 32
QUARTERS = 4
KINDS = {0: "f16", 1: "bf16"}
"""Of factors, in instruction descriptors."""
COLLECTOR = r"(?:\.collector::a::(?:discard|fill|use|lastuse))?"


# Allocation


@action(r"tcgen05\.alloc\.cta_group::[12]\.sync\.aligned\.shared(?:::cta)?\.b32")
def allocate(threads: Threads, of: Instruction) -> None:
    """One warp, with cta_group::2 of each CTA of the pair. The first column of the space goes to shared memory."""
    cta = threads.cta
    one_warp(threads, of)
    columns = threads.agree(of.operands[1], "u4", "columns")
    where = offset_in_own(cta, int(threads.addresses(of.operands[0])[0]), 4)
    check_aligned(where, 4)
    if columns < LEAST_COLUMNS or columns > TENSOR_COLUMNS or columns & columns - 1:
        raise RuntimeError(f"tcgen05.alloc of {columns} columns: a power of two from {LEAST_COLUMNS} on")
    if not cta.may_allocate:
        raise RuntimeError("tcgen05.alloc after the permit to allocate was given back")
    starts = range(0, TENSOR_COLUMNS, columns)
    free = [x for x in starts if all(x + columns <= a or a + n <= x for a, n in cta.allocated.items())]
    if not free:
        raise RuntimeError(f"tcgen05.alloc of {columns} columns beside {cta.allocated}: it would wait for ever")
    cta.allocated[free[0]] = columns
    cta.tensor[:, free[0] : free[0] + columns] = NAN
    cta.shared[where : where + 4].view("u4")[0] = free[0]
    cta.observer.shared(threads.some(threads.lanes == 0), "write", np.array([where]), 4)
    cta.observer.owns_tensor_memory(threads, free[0], columns)


@action(r"tcgen05\.dealloc\.cta_group::[12]\.sync\.aligned\.b32")
def deallocate(threads: Threads, of: Instruction) -> None:
    cta = threads.cta
    one_warp(threads, of)
    start = threads.agree(of.operands[0], "u4", "an address in TMEM")
    columns = threads.agree(of.operands[1], "u4", "columns")
    if cta.allocated.get(start) != columns:
        raise RuntimeError(f"tcgen05.dealloc of {columns} columns from {start}, where {cta.allocated} are allocated")
    del cta.allocated[start]
    cta.observer.owns_tensor_memory(threads, start, columns)


@action(r"tcgen05\.relinquish_alloc_permit\.cta_group::[12]\.sync\.aligned")
def give_back(threads: Threads, of: Instruction) -> None:
    one_warp(threads, of)
    threads.cta.may_allocate = False


def one_warp(threads: Threads, of: Instruction) -> None:
    if len(threads.whole_warps(of.name)) != 1:
        raise RuntimeError(f"{of.name} by warps {threads.warps}: it takes one")


def check_allocated(cta: Cta, column: int, count: int) -> None:
    if not any(a <= column and column + count <= a + n for a, n in cta.allocated.items()):
        raise MemoryError(f"columns {column} to {column + count} of TMEM, where {cta.allocated} are allocated")


# Between registers and TMEM


class Write(NamedTuple):
    """A tcgen05.st under way."""

    threads: Threads
    lanes: Any
    column: int
    data: Any
    """(thread, column)."""


@action(r"tcgen05\.(ld|st)\.sync\.aligned\.32x32b\.x(\d+)\.b32")
def access(threads: Threads, of: Instruction, what: str, many: str) -> None:
    """Each thread one lane, that many columns. The address names the first lane of the warp's quarter."""
    values, where = of.operands if what == "ld" else of.operands[::-1]
    keys = threads.cta.program.keys_of(values, "u4")
    if len(keys) != int(many):
        raise unsupported(of, "the number of registers")
    threads.whole_warps(of.name)
    at = threads.addresses(where)
    first, columns = at >> 16, at & 0xFFFF
    if (first != threads.warp_of % QUARTERS * LANES).any():
        lanes = sorted({*first.tolist()})
        raise RuntimeError(f"{of.name} of lanes {lanes} by warps {threads.warps}: not their quarter")
    for column in sorted({*columns.tolist()}):
        chosen = columns == column
        some = threads if chosen.all() else threads.some(chosen)
        (load if what == "ld" else store)(some, column, keys)


def load(threads: Threads, column: int, keys: list[int]) -> None:
    cta, lanes = threads.cta, threads.numbers % TENSOR_LANES
    check_allocated(cta, column, len(keys))
    cta.observer.tensor_memory(threads, "read", column, len(keys))
    data = np.ascontiguousarray(cta.tensor[lanes, column : column + len(keys)].T)
    for key, value in zip(keys, data, strict=True):
        threads.put(key, value)


def store(threads: Threads, column: int, keys: list[int]) -> None:
    cta, lanes = threads.cta, threads.numbers % TENSOR_LANES
    check_allocated(cta, column, len(keys))
    write = Write(threads, lanes, column, np.stack([threads.take(key) for key in keys], 1))
    cta.observer.tensor_memory(threads, "write", column, len(keys))
    if cta.cluster.late:
        writes_of(cta).append(write)
    else:
        put(cta, write)


def writes_of(cta: Cta) -> list[Write]:
    return cta.state_of("tcgen05.st", list)


def put(cta: Cta, of: Write) -> None:
    cta.tensor[of.lanes, of.column : of.column + of.data.shape[1]] = of.data


@action(r"tcgen05\.wait::(ld|st)\.sync\.aligned")
def wait(threads: Threads, of: Instruction, what: str) -> None:
    cta = threads.cta
    threads.whole_warps(of.name)
    if what == "st":
        end_writes(cta, threads.bits)
    cta.observer.waits_tensor_memory(threads, what)


def end_writes(cta: Cta, bits: int) -> None:
    """Of these threads."""
    writes = writes_of(cta)
    for i, of in enumerate(writes):
        some = cta.threads(of.threads.bits & bits)
        if some is None:
            continue
        chosen = np.isin(of.threads.numbers, some.numbers)
        put(cta, of._replace(lanes=of.lanes[chosen], data=of.data[chosen]))
        rest = cta.threads(of.threads.bits & ~bits)
        writes[i] = of._replace(threads=rest, lanes=of.lanes[~chosen], data=of.data[~chosen]) if rest else None
    writes[:] = [of for of in writes if of is not None]


@action(r"tcgen05\.fence::(before|after)_thread_sync")
def fence(threads: Threads, of: Instruction, when: str) -> None:
    threads.cta.observer.fences(threads, of.name)


# Products


class Shape(NamedTuple):
    """What an instruction descriptor says (PTX ISA, kind::f16)."""

    rows: int
    columns: int
    kind: str
    right_kind: str
    transposed: tuple[bool, bool]
    """Whether k is not what is contiguous, left and right."""

    @classmethod
    def of(cls, descriptor: int, pair: bool) -> Shape:
        rows, columns = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
        others = descriptor & ~(31 << 24 | 63 << 17 | 0b11 << 15 | 0b111 << 10 | 0b111 << 7)
        if others != 1 << 4 or rows not in ((256, 128) if pair else (128, 64)):
            raise NotImplementedError(f"an instruction descriptor {descriptor:#x}: {rows} x {columns}")
        if columns % 16 or not 16 <= columns <= 256:
            raise NotImplementedError(f"an instruction descriptor {descriptor:#x}: {columns} columns")
        left, right = (KINDS[descriptor >> at & 7] for at in (7, 10))
        return cls(rows, columns, left, right, (bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)))


def layout(descriptor: int) -> Layout:
    swizzle = descriptor >> 61
    # Version 1, no base offset, leading as a byte offset
    if descriptor >> 46 & 0x7FFF != 1 or swizzle not in SWIZZLES:
        raise NotImplementedError(f"a matrix descriptor of tcgen05 {descriptor:#x}")
    return layout_of(descriptor, SWIZZLES[swizzle])


class Sums(NamedTuple):
    """Where a product puts what belongs to one CTA (PTX ISA, data path layouts A, B, D and F)."""

    lanes: Any
    """Of each row of what is stored."""
    columns: int
    halves: bool
    """Whether lanes from 64 on hold the second half of the columns of rows that lanes 0 to 63 have."""

    @classmethod
    def of(cls, rows: int, columns: int, pair: bool) -> Sums:
        """Args: of the CTA."""
        row = np.arange(TENSOR_LANES)
        if rows == TENSOR_LANES:
            return cls(row, columns, False)
        if pair:
            return cls(row, columns // 2, True)
        return cls(row[:rows] // 16 * LANES + row[:rows] % 16, columns, False)

    def stored(self, total: Any) -> Any:
        """Args: (row, column)."""
        return np.concatenate(np.split(total, 2, axis=1)) if self.halves else total


class Factor(NamedTuple):
    """The left or right operand of one CTA: places in shared memory, or lanes and the first column of TMEM."""

    cta: Cta
    kind: str
    shared: Any
    lanes: Any = None
    column: int = 0

    def values(self) -> Any:
        """(row, k), fp64."""
        if self.shared is None:
            words = self.cta.tensor[self.lanes, self.column : self.column + K // 2]
            return numbers(np.ascontiguousarray(words).view("u2"), self.kind).astype("f8")
        return numbers(self.cta.shared.view("u2")[self.shared // 2], self.kind).astype("f8")

    @property
    def region(self) -> Region:
        if self.shared is None:
            words = self.lanes[:, None] * TENSOR_COLUMNS + np.arange(self.column, self.column + K // 2)
            return Region(self.cta, "tensor", words, 4)
        return Region(self.cta, "shared", self.shared, 2)


@action(r"tcgen05\.mma\.cta_group::([12])\.kind::f16" + COLLECTOR)
def multiply(threads: Threads, of: Instruction, group: str) -> None:
    threads.one(of.name)
    cta, pair = threads.cta, group == "2"
    to, left, right, described, *left_out, adds = of.operands
    if len(left_out) > 1 or (left_out and left_out[0][0] != "{"):
        raise unsupported(of, "the number of operands")
    if any(threads.value(x, "u4")[0] for operand in left_out for x in names(operand)):
        raise NotImplementedError("tcgen05.mma that leaves lanes out")

    def number(operand: str, kind: str) -> int:
        return int(threads.value(operand, kind)[0])

    shape, add = Shape.of(number(described, "u4"), pair), bool(number(adds, "?"))
    ctas = pair_of(cta) if pair else [cta]
    rows, columns = shape.rows // len(ctas), shape.columns // len(ctas)
    sums = Sums.of(rows, shape.columns, pair)
    first, column = divmod(int(threads.addresses(to)[0]), 1 << 16)
    if first:
        raise NotImplementedError(f"tcgen05.mma into lanes from {first} on")
    right_at = places(layout(number(right, "u8")), columns, shape.transposed[1])
    rights = [Factor(each, shape.right_kind, right_at) for each in ctas]
    if left[0] == "[":
        at = int(threads.addresses(left)[0])
        if at >> 16 or shape.transposed[0] or sums.halves:
            raise NotImplementedError("tcgen05.mma of a left operand in TMEM, but rows of k from lane 0 on")
        lefts = [Factor(each, shape.kind, None, sums.lanes, at) for each in ctas]
    else:
        left_at = places(layout(number(left, "u8")), rows, shape.transposed[0])
        lefts = [Factor(each, shape.kind, left_at) for each in ctas]
    for each in ctas:
        check_allocated(each, column, sums.columns)
    written = sums.lanes[:, None] * TENSOR_COLUMNS + np.arange(column, column + sums.columns)
    writes = [Region(each, "tensor", written, 4) for each in ctas]
    reads = [factor.region for factor in (*lefts, *rights)] + (writes if add else [])
    cta.observer.starts(threads, Operation("tcgen05.mma", reads, writes))

    def end() -> None:
        factors = np.concatenate([factor.values() for factor in rights])
        for each, own in zip(ctas, lefts, strict=True):
            target = each.tensor.view("f4")[:, column : column + sums.columns]
            total = sums.stored(own.values() @ factors.T)
            before = target[sums.lanes] if add else 0
            target[sums.lanes] = before + total

    cta.cluster.later(end)


def pair_of(cta: Cta) -> list[Cta]:
    """The CTA pair, even rank first."""
    ctas = cta.cluster.ctas
    if len(ctas) % 2:
        raise RuntimeError(f"cta_group::2 in a cluster of {len(ctas)}")
    return ctas[cta.rank & ~1 : (cta.rank & ~1) + 2]


@action(r"tcgen05\.commit\.cta_group::[12]\.mbarrier::arrive::one\.shared::cluster(\.multicast::cluster)?\.b64")
def commit(threads: Threads, of: Instruction, multicast: str | None) -> None:
    """One arrival, when all products that the thread has started have ended; multicast to several CTAs."""
    threads.one(of.name)
    cta, at = threads.cta, int(threads.addresses(of.operands[0])[0])
    places_of = [at]
    if multicast:
        mask = int(threads.value(of.operands[1], "u2")[0])
        places_of = [rank << RANK_BIT | at & OFFSET for rank in range(16) if mask >> rank & 1]
    barriers = [barrier_of(cta, place, True) for place in places_of]
    cta.observer.commits(threads, [x.place for x in barriers])

    def end() -> None:
        for barrier in map(current, barriers):
            cta.observer.committed(barrier.place)
            barrier.arrive()

    cta.cluster.later(end)
