"""Loads, stores and atomics of threads; cp.async, ldmatrix and stmatrix.

Global memory is the tensors that a launch was given, shared memory that of the CTA. A copy by cp.async arrives when its
group is waited for (`late`), or at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.cta import Cta, groups_of
from tests.ptx.decode import Run, action, opcode, unsupported
from tests.ptx.listing import Instruction, Listing, names
from tests.ptx.observer import Operation, Region
from tests.ptx.registers import LANES, Threads
from tests.ptx.values import TYPES

UNWRITTEN = np.array([0x7FFFFFFF, 0x7FC00000, 0x7FC07FC0, 0x7E007E00], "u4")
"""What `torch.empty` holds in tests, as words: the largest int32, NaN in fp32, NaN twice in bf16 and in fp16."""
RANK_BIT = 24
"""From here on, an address in shared memory holds the rank of its CTA in the cluster."""
OFFSET = (1 << RANK_BIT) - 1


class Storage(NamedTuple):
    """A tensor's memory."""

    start: int
    memory: Any


def check_written(data: Any) -> None:
    """Args: the bytes of each thread that were read, found by whole words."""
    if data.shape[1] % 4 == 0 and (np.ascontiguousarray(data).view("u4")[..., None] == UNWRITTEN).any():
        raise MemoryError("a read of memory that nobody wrote")


def offset_in_own(cta: Cta, address: Any, size: int) -> Any:
    """Where `size` bytes lie in the CTA's own shared memory. Args: shared::cta addresses, an array or a number."""
    offset = address - (cta.rank << RANK_BIT)
    return checked_offset(cta, offset, size)


def checked_offset(cta: Cta, offset: Any, size: int) -> Any:
    low, high = (offset, offset) if isinstance(offset, int) else (int(offset.min()), int(offset.max()))
    if low < 0 or high + size > len(cta.shared):
        raise MemoryError(f"access to {size} bytes outside of shared memory, at {low:#x} to {high:#x}")
    return offset


def cta_of(cta: Cta, address: int, size: int) -> tuple[Cta, int]:
    """The CTA to which a shared::cluster address belongs, and the offset in it."""
    rank, offset = address >> RANK_BIT, address & OFFSET
    ctas = cta.cluster.ctas
    if rank >= len(ctas):
        raise MemoryError(f"shared memory of CTA {rank} in a cluster of {len(ctas)}")
    return ctas[rank], checked_offset(ctas[rank], offset, size)


def check_aligned(address: Any, size: int) -> None:
    """Args: an array of addresses, or one; a power of two."""
    wrong = address & size - 1
    if wrong.any() if isinstance(wrong, np.ndarray) else wrong:
        raise MemoryError(f"misaligned access to {size} bytes")


def in_tensors(cta: Cta, address: Any, size: int) -> tuple[Any, Any]:
    """The memory, and where in it `size` bytes of each address lie."""
    low, high = int(address.min()), int(address.max())
    for start, memory in cta.cluster.storages:
        if start <= low and high + size <= start + len(memory):
            return memory, address - start
    raise MemoryError(f"access to {size} bytes outside of one tensor, at {low:#x} to {high:#x}")


def words(memory: Any, size: int) -> Any:
    """Memory as rows of `size` bytes, without a rest."""
    return memory[: len(memory) // size * size].reshape(-1, size)


@action(r"ld\.param(?:\.v\d)?\.(\w+)")
def load_parameter(threads: Threads, of: Instruction, kind: str) -> None:
    program, dtype = threads.cta.program, np.dtype(TYPES[kind])
    name, _, offset = of.operands[1][1:-1].partition("+")
    parameter = threads.cta.cluster.arguments[program.parameters.index(name)]
    targets = names(of.operands[0])
    values = np.frombuffer(parameter, dtype, len(targets), int(offset or 0))
    for target, value in zip(targets, values, strict=True):
        threads.put(program.result(target, TYPES[kind]), value)


@opcode(
    r"(ld|st)\.(?:relaxed\.\w+\.|volatile\.|weak\.)?(global|shared|shared::cta)"
    r"(?:\.nc|\.c[agsv]|\.wb|\.wt|\.lu|\.L1::\w+|\.L2::\w+)*(?:\.v\d)?\.(\w+)"
)
def access(program: Listing, of: Instruction, what: str, space: str, kind: str) -> Run:
    load, shared = what == "ld", space != "global"
    values, where = of.operands if load else of.operands[::-1]
    size = np.dtype(TYPES[kind]).itemsize
    keys = [(program.result if load else program.key)(x, TYPES[kind]) for x in names(values)]
    address, count = program.address(where), size * len(names(values))

    def places(threads: Threads) -> tuple[Any, Any]:
        at = address.of(threads)
        check_aligned(at, count)
        if not shared:
            return in_tensors(threads.cta, at, count)
        offset = offset_in_own(threads.cta, at, count)
        threads.cta.observer.shared(threads, "read" if load else "write", offset, count)
        return threads.cta.shared, offset

    def run_load(threads: Threads) -> None:
        memory, place = places(threads)
        data = words(memory, count)[place // count]
        if not shared:
            check_written(data)
        data = data.view(TYPES[kind])
        for i, key in enumerate(keys):
            threads.put(key, data[:, i])

    def run_store(threads: Threads) -> None:
        memory, place = places(threads)
        data = np.stack([threads.take(key) for key in keys], 1).view("u1")
        check_different(place, data)
        words(memory, count)[place // count] = data

    return run_load if load else run_store


def check_different(place: Any, data: Any) -> None:
    """Of two threads that write one address, nobody knows which one does it last."""
    if (place[1:] > place[:-1]).all():
        return
    _, first, of = np.unique(place, return_index=True, return_inverse=True)
    if len(first) < len(place) and (data != data[first][of]).any():
        raise MemoryError("two threads write one address")


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


@action(
    r"(atom|red)(?:\.(?:relaxed|acq_rel|acquire|release))?(?:\.(?:cta|gpu|sys|cluster))?"
    r"\.(global|shared|shared::cta)\.(add|min|max|and|or|xor|exch|cas)\.(\w+)"
)
def atomic(threads: Threads, of: Instruction, what: str, space: str, operation: str, kind: str) -> None:
    target, where, *given = of.operands if what == "atom" else ("_", *of.operands)
    at, size = threads.addresses(where), np.dtype(TYPES[kind]).itemsize
    check_aligned(at, size)
    if space == "global":
        memory, place = in_tensors(threads.cta, at, size)
    else:
        memory, place = threads.cta.shared, offset_in_own(threads.cta, at, size)
        threads.cta.observer.shared(threads, "atomic", place, size)
    numbers = memory[: len(memory) // size * size].view(TYPES[kind])
    values = [threads.value(x, TYPES[kind]) for x in given]
    before = np.empty(threads.count, TYPES[kind])
    for i, index in enumerate((place // size).tolist()):  # one after the other, in order of threads
        before[i] = old = numbers[index]
        if operation == "cas":
            numbers[index] = values[1][i] if old == values[0][i] else old
        else:
            numbers[index] = ATOMIC[operation](old, values[0][i])
    if target != "_":
        threads.put(threads.cta.program.result(target, TYPES[kind]), before)


@action(r"prefetch(?:u)?\.(?:global\.L[12]|tensormap|L1)")
def prefetch(threads: Threads, of: Instruction) -> None: ...


@action(r"cvta(?:\.to)?\.(?:global|param|shared|shared::cluster)\.u64")
def convert_address(threads: Threads, of: Instruction) -> None:
    """Generic addresses are those of each space, which do not overlap."""
    threads.set(of.operands[0], "u8", threads.value(of.operands[1], "u8"))


@action(r"mapa\.shared::cluster\.u32")
def map_address(threads: Threads, of: Instruction) -> None:
    own, other = (threads.value(x, "u4") for x in of.operands[1:])
    if other.max() >= len(threads.cta.cluster.ctas):
        raise MemoryError(f"mapa to CTA {other.max()} in a cluster of {len(threads.cta.cluster.ctas)}")
    threads.set(of.operands[0], "u4", own & np.uint32(OFFSET) | other << np.uint32(RANK_BIT))


@action(r"createpolicy\.fractional\.L2::evict_(?:first|last)\.b64")
def create_policy(threads: Threads, of: Instruction) -> None:
    """Hints change no values."""
    threads.set(of.operands[0], "u8", 0)


# cp.async


@opcode(r"cp\.async\.(?:ca|cg)\.shared\.global(?:\.L2::\w+)*")
def copy(program: Listing, of: Instruction) -> Run:
    """With a size of the source, 0 or the whole, that many bytes are read, and zeros take the place of the others."""
    to, source = (program.address(x) for x in of.operands[:2])
    sizes = of.operands[2:-1] if "cache_hint" in of.name else of.operands[2:]
    size = int(sizes[0], 0)
    if size not in (16, 8, 4) or (len(sizes) > 1 and sizes[1][0] != "%" and int(sizes[1], 0) != size):
        raise unsupported(of, "cp.async of parts")
    read = program.key(sizes[1], "u4") if len(sizes) > 1 and sizes[1][0] == "%" else None

    def run(threads: Threads) -> None:
        cta = threads.cta
        at = to.of(threads)
        check_aligned(at, size)
        place = offset_in_own(cta, at, size)
        cta.observer.starts(threads, Operation("cp.async", [], [Region(cta, "shared", place, size)]))
        address = source.of(threads)
        data = np.zeros((len(address), size), np.uint8)
        reads = slice(None) if read is None else threads.take(read) > 0
        if read is None or reads.any():
            check_aligned(address[reads], size)
            memory, where = in_tensors(cta, address[reads], size)
            data[reads] = words(memory, size)[where // size]
            check_written(data[reads])
        if not cta.cluster.late:
            words(cta.shared, size)[place // size] = data
        for copies, start, row in zip(groups_of(threads, "cp.async"), place.tolist(), data, strict=True):
            copies.started.append((start, row))

    return run


@action(r"cp\.async\.commit_group")
def commit_copies(threads: Threads, of: Instruction) -> None:
    for copies in groups_of(threads, "cp.async"):
        copies.commit()
    threads.cta.observer.commits_group(threads, "cp.async")


@action(r"cp\.async\.(?:wait_group|wait_all)")
def wait_for_copies(threads: Threads, of: Instruction) -> None:
    most = int(of.operands[0]) if of.operands else 0
    cta = threads.cta
    for copies in groups_of(threads, "cp.async"):
        if not of.operands:
            copies.commit()
        for to, data in copies.wait(most):
            if cta.cluster.late:
                cta.shared[to : to + len(data)] = data
    cta.observer.waits_group(threads, "cp.async", most)


# ldmatrix and stmatrix


@opcode(r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def matrices(program: Listing, of: Instruction, what: str, many: str, transposed: str | None) -> Run:
    """8 rows of 8 numbers each, whose addresses the first 8, 16 or 32 lanes have."""
    load, count = what == "ldmatrix", int(many)
    values, where = of.operands if load else of.operands[::-1]
    keys, address = [program.key(x, "u4") for x in names(values)], program.address(where)

    def run(threads: Threads) -> None:
        cta, warps = threads.cta, len(threads.whole_warps(what))
        at = address.of(threads).reshape(warps, LANES)[:, : 8 * count]
        check_aligned(at, 16)
        place = offset_in_own(cta, at, 16)
        cta.observer.shared(rows_of(threads, 8 * count), "read" if load else "write", place.flatten(), 16)
        rows = words(cta.shared, 16)
        if load:
            data = rows[place // 16].view("u2").reshape(warps, count, 8, 8)
            data = np.ascontiguousarray(data.swapaxes(2, 3) if transposed else data).view("u4")
            for i, key in enumerate(keys):
                threads.put(key, data[:, i].reshape(-1))
        else:
            data = np.stack([threads.take(key).reshape(warps, LANES) for key in keys], 1)
            data = np.ascontiguousarray(data).view("u2").reshape(warps, count, 8, 8)
            data = np.ascontiguousarray(data.swapaxes(2, 3) if transposed else data)
            rows[place // 16] = data.view("u1").reshape(warps, 8 * count, 16)

    return run


def rows_of(threads: Threads, lanes: int) -> Threads:
    """The first lanes of each warp, which have the addresses."""
    if lanes == LANES:
        return threads
    bits = sum(((1 << lanes) - 1) << LANES * warp for warp in threads.warps)
    return threads.cta.threads(bits)  # type: ignore[return-value]
