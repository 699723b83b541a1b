"""The copies of TMA: boxes of tensors, and bytes in a row; loads, stores, and additions of rows.

A load reports its bytes to an mbarrier. Stores and additions form groups of the thread that starts them; they read when
their group is waited for, or when the CTA has returned (`late`), or at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from tests.ptx.cta import Cta, groups_of
from tests.ptx.decode import action, unsupported
from tests.ptx.launch import TensorMap, number_of
from tests.ptx.listing import Instruction
from tests.ptx.matrices import swizzled
from tests.ptx.mbarrier import Barrier, barrier_of, current
from tests.ptx.memory import check_aligned, cta_of, in_tensors, offset_in_own, words
from tests.ptx.observer import Operation, Region
from tests.ptx.registers import PARAMETERS, Threads

CHUNK = 16
"""Bytes, of which all that TMA moves is made, and which swizzles leave together."""
SMALLEST_ALIGNMENT = 128


@action(r"cp\.async\.bulk\.commit_group")
def commit(threads: Threads, of: Instruction) -> None:
    for stores in groups_of(threads, "bulk"):
        stores.commit()
    threads.cta.observer.commits_group(threads, "bulk")


@action(r"cp\.async\.bulk\.wait_group(?:\.read)?")
def wait(threads: Threads, of: Instruction) -> None:
    most = int(of.operands[0])
    for stores in groups_of(threads, "bulk"):
        for end in stores.wait(most):
            end()
    threads.cta.observer.waits_group(threads, "bulk", most)


def start(threads: Threads, read: Region, move: Callable[[], None]) -> None:
    """A store or an addition, which ends once."""
    end = cache(move)
    threads.cta.observer.starts(threads, Operation("store", [read], []))
    for stores in groups_of(threads, "bulk"):
        stores.started.append(end)
    if threads.cta.cluster.late:
        threads.cta.cluster.at_end.append(end)
    else:
        end()


def put(part: Any, data: Any, adds: str | None) -> None:
    """Stores into memory, or adds to it in fp32."""
    if adds:
        numbers = part.view("f4")
        numbers += data.view("f4")
    else:
        part[...] = data


# Boxes of tensors


def box_chunks(shared: int, of: TensorMap) -> Any:
    """Where the 16-byte chunks of a box lie in shared memory, in chunks, in the box's order."""
    size = int(np.prod(of.box)) * of.item
    check_aligned(shared, SMALLEST_ALIGNMENT)
    return swizzled(shared + np.arange(0, size, CHUNK), of.swizzle) // CHUNK


def inside(of: TensorMap, corner: list[int]) -> tuple[tuple[slice, ...], tuple[int, ...], int] | None:
    """The part of a box inside of the tensor: its slices (outermost first), shape, and address of its first element."""
    low = [max(0, -c) for c in corner]
    high = [min(b, n - c) for b, n, c in zip(of.box, of.sizes, corner, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    first = of.address + sum((c + a) * s for c, a, s in zip(corner, low, of.strides, strict=True))
    slices = tuple(slice(a, b) for a, b in zip(low, high, strict=True))[::-1]
    return slices, tuple(b - a for a, b in zip(low, high, strict=True))[::-1], first


def tensor_part(cta: Cta, of: TensorMap, shape: tuple[int, ...], first: int) -> Any:
    """A view of the tensor."""
    last = first + sum((n - 1) * s for n, s in zip(shape[::-1], of.strides, strict=True))
    memory, start = in_tensors(cta, np.array([first]), last - first + of.item)
    return np.ndarray(shape, f"u{of.item}", memory.data, int(start[0]), of.strides[::-1])


def load_box(source: Cta, of: TensorMap, corner: list[int], target: Cta, chunks: Any) -> None:
    """Zeros come from outside of the tensor."""
    box = np.zeros(of.box[::-1], f"u{of.item}")
    if found := inside(of, corner):
        slices, shape, first = found
        box[slices] = tensor_part(source, of, shape, first)
    words(target.shared, CHUNK)[chunks] = box.view("u1").reshape(-1, CHUNK)


def store_box(cta: Cta, of: TensorMap, corner: list[int], chunks: Any) -> None:
    box = words(cta.shared, CHUNK)[chunks].view(f"u{of.item}").reshape(of.box[::-1])
    if found := inside(of, corner):
        slices, shape, first = found
        tensor_part(cta, of, shape, first)[...] = box[slices]


def tensor_map(cta: Cta, pointer: int, rank: str) -> TensorMap:
    """Args: the generic address of a parameter; dimensions that the map must have."""
    number, offset = divmod(pointer - PARAMETERS, 1 << 16)
    if offset or not 0 <= number < len(cta.cluster.arguments):
        raise MemoryError(f"a tensor map at {pointer:#x}, which is no parameter")
    found = cta.cluster.tensor_maps[number_of(cta.cluster.arguments[number])]
    if len(found.box) != int(rank):
        raise RuntimeError(f"a tensor map of {len(found.box)} dimensions where {rank} are asked for")
    return found


def place_of(threads: Threads, of: Instruction, operand: str, rank: str) -> list[Any]:
    """Pointer to the map, and the corner, of each thread."""
    found = re.fullmatch(r"\[(\S+?),\s*\{(.*)\}\]", operand)
    if found is None:
        raise unsupported(of, "an operand")
    corner = [threads.value(x.strip(), "i4") for x in found[2].split(",")]
    if len(corner) != int(rank):
        raise unsupported(of, "the number of coordinates")
    return [threads.value(found[1], "u8"), *corner]


@action(
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    r"(?:\.L2::cache_hint)?(?:\.cta_group::([12]))?"
)
def load_tensor(threads: Threads, of: Instruction, rank: str, space: str, group: str | None) -> None:
    """With cta_group::2, the mbarrier may be the other CTA's of the pair."""
    threads.one("a load by TMA")
    cta, remote = threads.cta, space == "cluster"
    pointer, *at = (int(x[0]) for x in place_of(threads, of, of.operands[1], rank))
    box = tensor_map(cta, pointer, rank)
    to, at_barrier = (int(threads.addresses(of.operands[i])[0]) for i in (0, 2))
    size = int(np.prod(box.box)) * box.item
    owner, offset = cta_of(cta, to, size) if remote else (cta, offset_in_own(cta, to, size))
    barrier = barrier_of(cta, at_barrier, remote)
    if owner is not barrier.cta and group != "2":
        raise RuntimeError("a load by TMA into one CTA that reports to another")
    chunks = box_chunks(offset, box)
    region = Region(owner, "shared", chunks * CHUNK, CHUNK)
    report_later(threads, [], region, barrier, size, partial(load_box, cta, box, at, owner, chunks))


def report_later(
    threads: Threads, reads: list[Region], writes: Region, barrier: Barrier, size: int, move: Callable[[], None]
) -> None:
    """Moves bytes, and tells an mbarrier."""
    cta, at = threads.cta, threads.cta.pc
    cta.observer.starts(threads, Operation("load", reads, [writes], barrier.place))

    def end() -> None:
        move()
        now = current(barrier)
        cta.observer.completes(at)
        now.complete(size)

    cta.cluster.later(end)


@action(r"cp\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta(?:\.tile)?\.bulk_group(?:\.L2::cache_hint)?")
def store_tensor(threads: Threads, of: Instruction, rank: str) -> None:
    """All lanes of a warp that name one box store it once."""
    cta = threads.cta
    for warp in threads.warps:
        own = threads if len(threads.warps) == 1 else threads.some(threads.warp_of == warp)
        columns = [*place_of(own, of, of.operands[0], rank), own.addresses(of.operands[1])]
        given = {*zip(*(x.tolist() for x in columns), strict=True)}
        if len(given) > 1:
            raise RuntimeError(f"several stores by TMA at once, by threads of warp {warp}")
        ((pointer, *at, shared),) = given
        box = tensor_map(cta, pointer, rank)
        chunks = box_chunks(offset_in_own(cta, shared, int(np.prod(box.box)) * box.item), box)
        read = Region(cta, "shared", chunks * CHUNK, CHUNK)
        start(own, read, partial(store_box, cta, box, at, chunks))


# Bytes in a row


def row(cta: Cta, first: int, count: int) -> Region:
    return Region(cta, "shared", np.arange(first, first + count, CHUNK), CHUNK)


def in_one_tensor(cta: Cta, address: int, count: int) -> Any:
    memory, places = in_tensors(cta, np.array([address]), count)
    return memory[int(places[0]) : int(places[0]) + count]


@action(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.(global|shared::cta)\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"
)
def load_row(threads: Threads, of: Instruction, source: str) -> None:
    """From global memory, or from this CTA to another of the cluster."""
    cta = threads.cta
    for one in threads.each():
        where, source_at, at_barrier = (int(one.addresses(of.operands[i])[0]) for i in (0, 1, 3))
        count = int(one.value(of.operands[2], "u4")[0])
        check_aligned(count | where | source_at, CHUNK)
        owner, offset = cta_of(cta, where, count)
        if source == "global":
            data, reads = in_one_tensor(cta, source_at, count), []
        else:
            first = offset_in_own(cta, source_at, count)
            data, reads = cta.shared[first : first + count], [row(cta, first, count)]
        barrier = barrier_of(cta, at_barrier, True)
        if barrier.cta is not owner:
            raise RuntimeError("a bulk copy into one CTA that reports to another")
        move = partial(put, owner.shared[offset : offset + count], data, None)
        report_later(one, reads, row(owner, offset, count), barrier, count, move)


@action(r"cp\.(?:(reduce)\.)?async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?(\.add\.f32)?")
def store_row(threads: Threads, of: Instruction, reduces: str | None, adds: str | None) -> None:
    if bool(reduces) != bool(adds):
        raise unsupported(of, "a reduction")
    if threads.count != len(threads.warps):
        raise RuntimeError(f"several threads of a warp start {of.name}: it takes one")
    cta = threads.cta
    for one in threads.each():
        target, source = (int(one.addresses(x)[0]) for x in of.operands[:2])
        count = int(one.value(of.operands[2], "u4")[0])
        check_aligned(count | target | source, CHUNK)
        part, offset = in_one_tensor(cta, target, count), offset_in_own(cta, source, count)
        start(one, row(cta, offset, count), partial(put, part, cta.shared[offset : offset + count], adds))
