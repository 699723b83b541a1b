"""An interpreter of the PTX that CuTe kernels of warps compile to, so that they run where no GPU is.

    one CTA after the other; of its threads, in NumPy, those with the lowest program counter run together

Threads that diverge so meet again as on a GPU, and wait for each other at barriers. Where warps have different parts,
some may go ahead of all others as far as barriers let them (`ahead`). cp.async arrives as late as it may, when its
group is waited for, and WGMMA reads at once; or cp.async arrives at once, and WGMMA reads as late as it may
(`late=False`): a kernel must bear all of these. Sums of WGMMA are NaN until they are waited for. Found are: accesses
outside of the tensors that a kernel was given, misaligned ones, two lanes that write one address together, shuffles
from lanes that do not take part, and reads of memory that nobody wrote, by the NaN that `torch.empty` holds in tests.
With `races` also: accesses of shared memory by two warps, one of them a write, that no barrier puts in order, and WGMMA
of what was written without a proxy fence. Not found: races inside of a warp or in global memory, a missing wgmma.fence,
and what ptxas makes of all this.

WGMMA takes 16-bit operands, the left one from registers or shared memory, with a swizzle of 128 bytes there.

Products are summed without BLAS, whose order depends on the CPU and on where a row lies: `product`. Integers wrap;
ex2, lg2 and rcp are NumPy's. Registers hold what an instruction last wrote, at first 0xAB in each byte; shared memory
begins as 0xFF, NaN in every type.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

PTX_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "ptx"
"""Compiled PTX, shared by test processes and by later runs; `make clean` removes it."""
ARCH = "sm_90a"
LANES = 32
GROUP = 4 * LANES
"""Threads of a warpgroup."""
ROW, COLUMN = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2
"""i and 2 j of lane 4 i + j: where it has two of 8 x 8 numbers of a matrix in registers."""
NAN = 0x7FFFFFFF
UNWRITTEN = np.array([0x7FFFFFFF, 0x7FC00000, 0x7FC07FC0, 0x7E007E00], "u4")
"""What `torch.empty` holds in tests, as words: the largest int32, NaN in fp32, NaN twice in bf16 and in fp16."""
SHARED_BYTES = 227 << 10
DONE = 1 << 40
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{
        f"{kind}{bits}": f"{letter}{bits // 8}"
        for bits in (8, 16, 32, 64)
        for kind, letter in zip("sub", "iuu", strict=True)
    },
    "f32": "f4",
}
COMPARE = {"gt": np.greater, "lt": np.less, "eq": np.equal, "ne": np.not_equal, "le": np.less_equal}
COMPARE |= {"ge": np.greater_equal, "neu": np.not_equal, "equ": lambda x, y: ~((x < y) | (x > y))}
COMPARE |= {"leu": lambda x, y: ~(x > y), "geu": lambda x, y: ~(x < y)}  # true of NaN too
BINARY: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "xor": np.bitwise_xor}
BINARY |= {"and": np.bitwise_and, "or": np.bitwise_or, "min": np.minimum, "max": np.maximum}
UNARY: dict[str, Callable[..., Any]] = {"neg": np.negative, "abs": np.abs, "not": np.invert, "ex2": np.exp2}
UNARY |= {
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "popc": lambda x: np.array([bin(i).count("1") for i in x.tolist()], "u4"),
}


class Instruction(NamedTuple):
    predicate: str
    name: tuple[str, ...]
    operands: list[str]


class Storage(NamedTuple):
    start: int
    memory: Any


class Queue:
    """What was started and, in groups, committed, until it is waited for."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.groups: list[list[Any]] = []

    def commit(self) -> None:
        self.groups.append(self.started)
        self.started = []

    def wait(self, most: int) -> list[Any]:
        """Leaves `most` groups, and returns what the others hold."""
        ended = max(0, len(self.groups) - most)
        done = [x for group in self.groups[:ended] for x in group]
        del self.groups[:ended]
        return done


class Product(NamedTuple):
    """A WGMMA of one warpgroup."""

    sums: list[str]
    left: list[str] | int
    """Registers, or the descriptor of a tile."""
    right: int
    transposed: tuple[bool, bool]
    """Whether k is not what is contiguous, left and right."""
    add: bool


class Warpgroup:
    """The products that a warpgroup has not waited for."""

    def __init__(self, number: int) -> None:
        self.threads = slice(number * GROUP, (number + 1) * GROUP)
        self.products = Queue()
        self.sums: dict[str, Any] = {}
        """Behind the NaN of registers."""


class Order:
    """What barriers put in order, and the last accesses of each 2 bytes of shared memory: vector clocks of warps."""

    def __init__(self, warps: int) -> None:
        self.warps = np.arange(warps)
        self.clock = np.eye(warps, dtype="i4")
        """[w, v]: up to which of its steps between barriers warp v is before warp w."""
        self.arrived: dict[int, Any] = {}
        self.read = np.zeros((warps, SHARED_BYTES // 2), "i4")
        """When each warp read last."""
        self.written, self.fenced = np.zeros((2, SHARED_BYTES // 2), "i4")
        """When it was written, and when that was made known to WGMMA, -1: not yet."""
        self.writer = np.zeros(SHARED_BYTES // 2, "i4")

    def arrive(self, number: int, warps: Any) -> None:
        before = self.clock[warps].max(0)
        self.arrived[number] = np.maximum(before, self.arrived.get(number, before))
        self.clock[warps, warps] += 1

    def release(self, number: int, waiting: Any) -> None:
        self.clock[waiting] = np.maximum(self.clock[waiting], self.arrived.pop(number))

    def _expect(self, warp: Any, other: Any, when: Any, what: str) -> None:
        wrong = (warp != other) & (when > self.clock[warp, other])
        if wrong.any():
            one, two = (np.broadcast_to(x, wrong.shape)[wrong][0] for x in (warp, other))
            raise RuntimeError(f"no barrier between warp {two} and warp {one}, which {what}")

    def reads(self, warp: Any, place: Any) -> None:
        """Args: the warp of each thread, and which pairs of bytes it reads."""
        warp = warp[:, None]
        self._expect(warp, self.writer[place], self.written[place], "reads what the other wrote")
        self.read[warp, place] = self.clock[warp, warp]

    def writes(self, warp: Any, place: Any) -> None:
        warp, others = warp[:, None], self.warps[:, None, None]
        self._expect(warp, self.writer[place], self.written[place], "overwrites what the other wrote")
        self._expect(warp, others, self.read[others, place], "overwrites what the other read")
        self.writer[place], self.written[place], self.fenced[place] = warp, self.clock[warp, warp], -1

    def fence(self, warps: Any) -> None:
        """What these warps wrote is for WGMMA, too."""
        of = np.isin(self.writer, warps) & (self.fenced < 0)
        self.fenced[of] = self.clock[self.writer[of], self.writer[of]]

    def multiplies(self, warps: Any, place: Any) -> None:
        if (self.fenced[place] < 0).any():
            raise RuntimeError("WGMMA reads what was written without a proxy fence")
        place = np.broadcast_to(place.flatten(), (len(warps), place.size))
        self._expect(warps[:, None], self.writer[place], self.fenced[place], "multiplies what the other made known")
        self.reads(warps, place)


def tensor_argument(x: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """How CuTe DSL passes a tensor: its address, and what is dynamic of its shape (32 bits) and strides (64 bits)."""
    head = struct.pack(f"<Q{len(shape)}i", x.data_ptr(), *shape)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def argument(x: Tensor | int | float, static: tuple[int, ...] = ()) -> bytes:
    """Args: `static`, dimensions whose size was known to the compiler; the last stride always is."""
    if isinstance(x, Tensor):
        return tensor_argument(x, [n for i, n in enumerate(x.shape) if i not in static], x.stride()[:-1])
    return struct.pack("<i" if isinstance(x, int) else "<f", x)


def check_written(data: Any) -> None:
    """Args: the bytes of each thread that were read, found by whole words."""
    if data.shape[1] % 4 == 0 and (np.ascontiguousarray(data).view("u4")[..., None] == UNWRITTEN).any():
        raise MemoryError("a read of memory that nobody wrote")


def bf16_bits(x: Any) -> Any:
    bits = np.ascontiguousarray(x, "f4").view("u4").astype("u8")
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")
    return np.where(np.isnan(x), np.array(0x7FFF, "u2"), rounded)


def bf16_numbers(bits: Any) -> Any:
    return (bits.astype("u4") << 16).view("f4")


@lru_cache(4096)
def tile_places(descriptor: int, rows: int, is_transposed: bool) -> Any:
    """Where rows x 16 numbers lie in shared memory, in 2 bytes (PTX ISA, matrix descriptors)."""
    if descriptor >> 46 != 1 << 16:
        raise NotImplementedError(f"not a plain swizzle of 128 bytes: {descriptor:#x}")
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    row, k = np.arange(rows)[:, None], np.arange(16)
    if is_transposed:
        place = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
    else:
        place = start + row // 8 * stride + row % 8 * 128 + k * 2
    return (place ^ (place >> 7 & 7) << 4) // 2


def of_lanes(x: Any) -> list[Any]:
    """(warp, row, column) as registers: a lane holds two numbers of rows i and i + 8 in columns 2 j of each 8."""
    places = [(8 * r, c + 8 * n) for n in range(x.shape[2] // 8) for r in range(2) for c in range(2)]
    return [x[:, ROW + row, COLUMN + column].flatten() for row, column in places]


def product(left: Any, right: Any) -> Any:
    """`[..., i, k]` times `[..., k, j]`, summed in order of k: the same bits on every CPU, wherever a row lies."""
    total = left[..., :, 0, None] * right[..., None, 0, :]
    for k in range(1, left.shape[-1]):
        total += left[..., :, k, None] * right[..., None, k, :]
    return total


def operands_of(text: str) -> list[str]:
    """Parts between commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text)]


def names(operand: str) -> list[str]:
    return [part.strip() for part in operand[1:-1].split(",")] if operand[0] == "{" else [operand]


class Program:
    """A kernel's instructions."""

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx.partition(".reqntid")
        self.threads = int(body.split(",")[0])
        # But for flags of WGMMA, bytes that no kernel reads
        self.parameters = re.findall(r"\.param.*?\s(\w+_param_\d+)\b(?!\[1\])", head)
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.rindex("}")])
        for statement in body.split(";"):
            text = " ".join(statement.split())
            while text[:2] in ("{ ", "} "):  # the scope of inline PTX
                text = text[2:]
            while label := re.match(r"(\$\w+):\s*", text):
                self.labels[label[1]] = len(self.instructions)
                text = text[label.end() :]
            if text and not text.startswith("."):
                predicate, name, rest = re.fullmatch(r"(@!?%?p\d* )?(\S+)\s*(.*)", text).groups()  # type: ignore[union-attr]
                of = Instruction((predicate or "").strip(), tuple(name.split(".")), operands_of(rest))
                self.instructions.append(of)
        self.half = any("mma" in i.name[0] and "f16" in i.name for i in self.instructions)

    def run(
        self,
        arguments: Sequence[bytes],
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        late: bool = True,
        ahead: slice = slice(0),
        races: bool = False,
    ) -> None:
        """Args: of the kernel, as bytes; all tensors it may use; when copies arrive; who goes ahead; look for races."""
        memory = {x.data_ptr(): x.untyped_storage() for x in tensors if x is not None and x.numel() > 0}
        storages = [
            Storage(s.data_ptr(), np.ctypeslib.as_array((ctypes.c_uint8 * s.nbytes()).from_address(s.data_ptr())))
            for s in memory.values()
        ]
        for place in np.ndindex(*grid[::-1]):
            given = dict(zip(self.parameters, arguments, strict=True))
            Cta(self, given, place[::-1], grid, storages, late, races).run(ahead)


@cache
def program(compiled: Any, *how: Any, **named: Any) -> Program:
    """What a `compiled_once` function compiles for ARCH; from PTX_CACHE where the sources have not changed since."""
    from cute_kernels.runtime import disk_cache

    asked = f"{compiled.__module__}.{compiled.__qualname__} {how!r} {sorted(named.items())!r}"
    path = PTX_CACHE / f"{disk_cache.key_of(asked, arch=ARCH)}.ptx"
    if not path.exists():
        PTX_CACHE.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that want the same kernel, one compiles it
            if not path.exists():
                new = path.with_suffix(".new")
                new.write_text(_compile(lambda: compiled.__wrapped__(*how, **named)))
                new.replace(path)
    return Program(path.read_text())


def _compile(compiled: Callable[[], Any]) -> str:
    from cute_kernels.runtime import jit

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as dump:
        patch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch {ARCH} --keep-ptx --dump-dir {dump}")
        return str(compiled().compiled.__ptx__)


class Cta:
    """The state of one CTA."""

    def __init__(
        self,
        program: Program,
        arguments: dict[str, bytes],
        place: tuple[int, ...],
        grid: tuple[int, ...],
        storages: list[Storage],
        late: bool,
        races: bool,
    ) -> None:
        self.program, self.arguments, self.storages, self.late = program, arguments, storages, late
        axes = zip("xyz", place, grid, strict=True)
        self.special = {f"%{name}.{x}": n for x, at, of in axes for name, n in (("ctaid", at), ("nctaid", of))}
        self.count = program.threads
        self.thread = np.arange(self.count)
        self.lane = self.thread % LANES
        self.registers: dict[str, Any] = {}
        self.shared = np.full(SHARED_BYTES, 0xFF, "u1")
        self.active = np.ones(self.count, np.bool_)
        self.copies = [Queue() for _ in range(self.count)]
        self.warpgroups = [Warpgroup(number) for number in range(self.count // GROUP)]
        self.order = Order(self.count // LANES) if races else None

    def run(self, ahead: slice) -> None:
        with np.errstate(all="ignore"):
            self._run(ahead)

    def _run(self, ahead: slice) -> None:
        counter = np.zeros(self.count, np.int64)  # of a thread that waits, DONE
        waiting, resume = np.zeros(self.count, np.bool_), np.zeros(self.count, np.int64)
        barrier = np.zeros(self.count, np.int64)  # that a thread waits for
        arrived: dict[int, int] = {}
        first = counter[ahead]
        while True:
            at = int(first.min(initial=DONE)) if len(first) else DONE
            if at == DONE:
                at = int(counter.min())
            if at == DONE:
                if not waiting.any():
                    return
                raise RuntimeError(f"threads wait for each other at barriers {sorted({*barrier[waiting].tolist()})}")
            active = counter == at
            counter[active] = at + 1
            predicate, name, operands = self.program.instructions[at]
            if predicate:
                value = self.register(predicate.lstrip("@!"))
                active = active & (~value if predicate[1] == "!" else value)
                if not active.any():
                    continue
            self.active = active
            if name[0] == "bra":
                counter[active] = self.program.labels[operands[0]]
            elif name[0] == "ret":
                counter[active] = DONE
            elif name[0] == "bar":
                if name[1] == "warp":
                    continue
                numbers = self.get(operands[0], "i4")
                expected = int(operands[1]) if len(operands) > 1 else self.count
                if name[1] == "sync":
                    waiting |= active
                    barrier[active], resume[active], counter[active] = numbers, at + 1, DONE
                for number in {*numbers.tolist()}:
                    arrived[number] = arrived.get(number, 0) + int((numbers == number).sum())
                    if self.order:
                        self.order.arrive(number, np.unique(self.thread[active][numbers == number] // LANES))
                    if arrived[number] > expected:
                        raise RuntimeError(f"more threads arrive at barrier {number} than it counts")
                    if arrived[number] == expected:
                        released = waiting & (barrier == number)
                        waiting[released] = False
                        counter[released] = resume[released]
                        arrived[number] = 0
                        if self.order:
                            self.order.release(number, np.unique(self.thread[released] // LANES))
            else:
                self.step(name, operands)

    # Registers: `get` and `put` are of the active threads

    def register(self, name: str) -> Any:
        if name not in self.registers:
            kind = {"p": np.bool_, "%p": np.bool_, "%r": "u4"}.get(name.rstrip("0123456789"))
            kind = kind or ("u8" if name[2] == "d" else "u2")
            fill = False if kind is np.bool_ else 0xABABABABABABABAB & (1 << 8 * np.dtype(kind).itemsize) - 1
            self.registers[name] = np.full(self.count, fill, kind)
        return self.registers[name]

    def get(self, operand: str, kind: Any) -> Any:
        of = np.dtype(kind)
        bits = f"u{of.itemsize}"
        if operand in ("%tid.x", "%laneid"):
            return (self.thread if operand == "%tid.x" else self.lane)[self.active].astype(of)
        if operand[0] in "%p" and operand not in self.special:
            value = self.register(operand)[self.active]
            return value if value.dtype == np.bool_ else value.astype(bits).view(of)
        if operand in self.special:
            number = self.special[operand]
        elif operand.startswith("0f"):
            number = int(operand[2:], 16)
        else:
            number = 0 if operand.startswith("__dynamic_shmem__") else int(operand, 0)
        return np.full(int(self.active.sum()), number & (1 << 8 * of.itemsize) - 1, bits).view(of)

    def put(self, name: str, value: Any) -> None:
        register = self.register(name)
        if register.dtype != np.bool_:
            value = np.ascontiguousarray(value)
            signed = value.astype("i8") if value.dtype.kind == "i" else value.view(f"u{value.dtype.itemsize}")
            value = signed.astype(register.dtype)
        register[self.active] = value

    # Memory

    def address(self, operand: str, kind: str) -> Any:
        base, _, offset = operand[1:-1].partition("+")
        return self.get(base, kind).astype("i8") + int(offset or 0)

    def place_of(self, address: Any, count: int, shared: bool) -> tuple[Any, Any]:
        """The memory, and where in it `count` bytes of each active thread lie."""
        if (address % count).any():
            raise MemoryError(f"misaligned access to {count} bytes")
        for start, memory in [Storage(0, self.shared)] if shared else self.storages:
            if ((address >= start) & (address + count <= start + len(memory))).all():
                return memory, (address - start)[:, None] + np.arange(count)
        raise MemoryError(f"access to {count} bytes outside of {'shared memory' if shared else 'one tensor'}")

    def touch(self, place: Any, load: bool) -> None:
        """Args: bytes of shared memory that each active thread reads (`load`) or writes."""
        if self.order:
            warps = self.thread[self.active] // LANES
            (self.order.reads if load else self.order.writes)(warps, place[:, ::2] // 2)

    def access(self, name: tuple[str, ...], operands: list[str]) -> None:
        kind, load, shared = np.dtype(TYPES[name[-1]]), name[0] == "ld", name[1] == "shared"
        if name[1] == "param":
            parameter, _, offset = operands[1][1:-1].partition("+")
            data = np.frombuffer(self.arguments[parameter], "u1")[int(offset or 0) :]
            for i, target in enumerate(names(operands[0])):
                value = data[i * kind.itemsize : (i + 1) * kind.itemsize].view(kind)
                self.put(target, np.repeat(value, int(self.active.sum())))
            return
        values, where = (operands[0], operands[1]) if load else (operands[1], operands[0])
        parts = names(values)
        address = self.address(where, "u4" if shared else "u8")
        memory, place = self.place_of(address, kind.itemsize * len(parts), shared)
        if shared:
            self.touch(place, load)
        if load:
            data = memory[place]
            if not shared:
                check_written(data)
            data = data.view(kind)
            for i, target in enumerate(parts):
                self.put(target, data[:, i])
            return
        if len(np.unique(address)) < len(address):
            raise MemoryError("two threads write one address")
        memory[place] = np.stack([self.get(part, kind) for part in parts], 1).view("u1")

    def copy(self, name: tuple[str, ...], operands: list[str]) -> None:
        """cp.async."""
        threads = np.nonzero(self.active)[0]
        if "commit_group" in name:
            for thread in threads:
                self.copies[thread].commit()
        elif "wait_group" in name:
            for thread in threads:
                for to, data in self.copies[thread].wait(int(operands[0])):
                    self.shared[to : to + len(data)] = data
                    if self.order:
                        self.order.writes(
                            self.thread[thread : thread + 1] // LANES, (to + np.arange(0, len(data), 2))[None] // 2
                        )
        else:
            _, to = self.place_of(self.address(operands[0], "u4"), 16, True)
            self.touch(to, False)
            memory, place = self.place_of(self.address(operands[1], "u8"), 16, False)
            check_written(memory[place])
            if not self.late:
                self.shared[to] = memory[place]
            for thread, start, data in zip(threads, to[:, 0], memory[place], strict=True):
                self.copies[thread].started.append((start, data))

    def matrices(self, name: tuple[str, ...], operands: list[str]) -> None:
        """ldmatrix and stmatrix: four times 8 rows of 8 numbers, whose addresses 32 lanes have."""
        load = name[0] == "ldmatrix"
        registers = [self.register(x) for x in names(operands[0 if load else 1])]
        _, place = self.place_of(self.address(operands[1 if load else 0], "u4"), 16, True)
        self.touch(place, load)
        for first in self.whole_warps() * LANES:
            lanes = slice(first, first + LANES)
            rows = place[np.searchsorted(np.nonzero(self.active)[0], first) :][:LANES]
            if load:
                data = self.shared[rows].view("u2").reshape(4, 8, 8)
                data = np.ascontiguousarray(data.transpose(0, 2, 1) if "trans" in name else data).view("u4")
                for register, matrix in zip(registers, data.reshape(4, LANES), strict=True):
                    register[lanes] = matrix
            else:
                self.shared[rows] = np.stack([x[lanes] for x in registers]).view("u1").reshape(LANES, 16)

    def whole_warps(self) -> Any:
        active = self.active.reshape(-1, LANES)
        if (active.any(1) != active.all(1)).any():
            raise RuntimeError("only some lanes of a warp take part")
        return np.nonzero(active.any(1))[0]

    def numbers(self, bits: Any) -> Any:
        return bits.view("f2").astype("f4") if self.program.half else bf16_numbers(bits)

    def pairs(self, register: str, threads: Any) -> Any:
        """The two numbers in a register: (warp, lane, number)."""
        bits = np.ascontiguousarray(self.register(register)[threads]).view("u2")
        return self.numbers(bits).reshape(-1, LANES, 2)

    def left_operand(self, registers: list[str], threads: Any) -> Any:
        """(warp, row, k), of registers as `of_lanes` lays them out, in pairs."""
        left = np.zeros((self.lane[threads].size // LANES, 16, 16), "f4")
        for i, register in enumerate(registers):
            pairs = self.pairs(register, threads)
            for c in range(2):
                left[:, ROW + 8 * (i % 2), COLUMN + c + 8 * (i // 2)] = pairs[..., c]
        return left

    def multiply(self, operands: list[str]) -> None:
        """mma.m16n8k16."""
        warps = self.whole_warps()
        left = self.left_operand(names(operands[1]), self.active)
        right = np.zeros((len(warps), 16, 8), "f4")
        for i, register in enumerate(names(operands[2])):
            pairs = self.pairs(register, self.active)
            for c in range(2):
                right[:, COLUMN + c + 8 * i, ROW] = pairs[..., c]
        before = [self.get(operand, "f4") for operand in names(operands[3])]
        for register, sums, own in zip(names(operands[0]), before, of_lanes(product(left, right)), strict=True):
            self.put(register, sums + own)

    def multiply_together(self, name: tuple[str, ...], operands: list[str]) -> None:
        """wgmma."""
        for number in {*(self.whole_warps() // (GROUP // LANES)).tolist()}:
            of = self.warpgroups[number]
            if not self.active[of.threads].all():
                raise RuntimeError("only some warps of a warpgroup take part")
            if name[1] == "mma_async":
                self.start_product(of, operands)
            elif name[1] == "commit_group":
                of.products.commit()
            elif name[1] == "wait_group":
                self.end_products(of, int(operands[0]))

    def start_product(self, of: Warpgroup, operands: list[str]) -> None:
        def same(register: str) -> int:
            first, *others = {*self.register(register)[of.threads].tolist()}
            if others:
                raise RuntimeError(f"threads of a warpgroup do not agree about {register}")
            return int(first)

        if operands[4:6] != ["1", "1"]:
            raise NotImplementedError(f"wgmma with factors {operands[4:6]}")
        left = names(operands[1]) if operands[1][0] == "{" else same(operands[1])
        transposed = operands[6] == "1" and isinstance(left, int), operands[-1] == "1"
        started = Product(names(operands[0]), left, same(operands[2]), transposed, bool(same(operands[3])))
        for x in started.sums:
            register = self.register(x)
            of.sums.setdefault(x, register[of.threads].copy().view("f4"))
            register[of.threads] = NAN
        of.products.started.append(started)
        self.touch_operands(of, started)
        if self.late:
            self.add_product(of, started)

    def touch_operands(self, of: Warpgroup, started: Product) -> None:
        if self.order:
            warps = np.unique(self.thread[of.threads] // LANES)
            if isinstance(started.left, int):
                self.order.multiplies(warps, tile_places(started.left, 64, started.transposed[0]))
            self.order.multiplies(warps, tile_places(started.right, 2 * len(started.sums), started.transposed[1]))

    def add_product(self, of: Warpgroup, started: Product) -> None:
        if isinstance(started.left, int):
            left = self.tile(started.left, 64, started.transposed[0]).reshape(4, 16, 16)
        else:
            left = self.left_operand(started.left, of.threads)
        right = self.tile(started.right, 2 * len(started.sums), started.transposed[1])
        for x, own in zip(started.sums, of_lanes(product(left, right.T)), strict=True):
            of.sums[x] = of.sums[x] + own if started.add else own

    def end_products(self, of: Warpgroup, most: int) -> None:
        for ended in of.products.wait(most):
            self.touch_operands(of, ended)
            if not self.late:
                self.add_product(of, ended)
        groups = [*of.products.groups, of.products.started]
        waiting = {x for group in groups for started in group for x in started.sums}
        for x in of.sums.keys() - waiting:
            self.register(x)[of.threads] = of.sums.pop(x).view("u4")

    def tile(self, descriptor: int, rows: int, is_transposed: bool) -> Any:
        return self.numbers(self.shared.view("u2")[tile_places(descriptor, rows, is_transposed)])

    # Arithmetic

    def step(self, name: tuple[str, ...], operands: list[str]) -> None:
        what, to, kind = name[0], operands[0] if operands else "", TYPES.get(name[-1])
        if what in ("ld", "st"):
            self.access(name, operands)
        elif what == "cp":
            self.copy(name, operands)
        elif what in ("ldmatrix", "stmatrix"):
            self.matrices(name, operands)
        elif what == "mma":
            self.multiply(operands)
        elif what == "atom" or what == "red":
            memory, place = self.place_of(self.address(operands[-2], "u8"), 4, False)
            for where, bits in zip(place, self.get(operands[-1], "u4"), strict=True):
                memory[where] = (memory[where].view("u4") | bits).view("u1")
        elif what == "fence":
            if self.order and name[1:3] == ("proxy", "async"):
                self.order.fence(self.whole_warps())
        elif what == "setmaxnreg":
            pass
        elif what == "wgmma":
            self.multiply_together(name, operands)
        elif what == "vote":
            self.vote(operands)
        elif what == "shfl":
            self.shuffle(name, operands)
        elif what == "cvt":
            self.convert(name, operands)
        elif what == "mov" and "{" in "".join(operands):
            self.pack(operands, np.dtype(kind).itemsize)
        elif name[-1] == "f32x2":
            x = [np.ascontiguousarray(self.get(x, "u8")).view("f4") for x in operands[1:]]
            y = x[0] * x[1] + x[2] if what == "fma" else BINARY[what](*x)
            self.put(to, np.ascontiguousarray(y).view("u8"))
        elif what == "setp":
            x, y = (self.get(x, TYPES[name[2]]) for x in operands[1:3])
            self.put(to, COMPARE[name[1]](x, y))
        elif what == "selp":
            chosen = self.register(operands[3])[self.active]
            self.put(to, np.where(chosen, self.get(operands[1], kind), self.get(operands[2], kind)))
        else:
            self.put(to, self.value(what, name, operands, kind))

    def value(self, what: str, name: tuple[str, ...], operands: list[str], kind: Any) -> Any:
        if what in ("shl", "shr"):
            x, by = self.get(operands[1], kind), self.get(operands[2], "u4").astype(kind)
            return x << by if what == "shl" else x >> by
        if name[:3] == ("shf", "l", "wrap"):
            low, high, by = (self.get(operand, "u4").astype("u8") for operand in operands[1:])
            return (high << 32 | low) << by % 32 >> 32
        x = [self.get(operand, kind) for operand in operands[1:]]
        if name[1] == "hi":
            product = np.asarray(x[0], object) * np.asarray(x[1], object)
            return (product >> 8 * np.dtype(kind).itemsize).astype(kind)
        if name[1] == "wide":
            wide = "i8" if kind[0] == "i" else "u8"
            product = x[0].astype(wide) * x[1].astype(wide)
            return product + self.get(operands[3], wide) if what == "mad" else product
        if what == "mov":
            return x[0]
        if what == "mad":
            return x[0] * x[1] + x[2]
        if what == "fma":
            return (x[0].astype("f8") * x[1] + x[2]).astype("f4")
        if what in ("div", "rem"):
            return x[0] / x[1] if kind == "f4" else (x[0] / x[1] if what == "div" else np.fmod(*x)).astype(kind)
        if kind == "f4" and what in ("min", "max"):
            return (np.fmin if what == "min" else np.fmax)(*x)
        return UNARY[what](x[0]) if what in UNARY else BINARY[what](*x)

    def convert(self, name: tuple[str, ...], operands: list[str]) -> None:
        target, source = name[-2], name[-1]
        if target in ("bf16x2", "f16x2"):
            high, low = (self.get(x, "f4") for x in operands[1:])
            to = bf16_bits if target == "bf16x2" else lambda x: x.astype("f2").view("u2")
            self.put(operands[0], to(high).astype("u4") << 16 | to(low))
        elif source in ("bf16", "f16"):
            bits = self.get(operands[1], "u2")
            self.put(operands[0], bf16_numbers(bits) if source == "bf16" else bits.view("f2").astype("f4"))
        elif target in ("bf16", "f16"):
            x = self.get(operands[1], "f4")
            self.put(operands[0], bf16_bits(x) if target == "bf16" else x.astype("f2").view("u2"))
        else:
            self.put(operands[0], self.get(operands[1], TYPES[source]).astype(TYPES[target]))

    def pack(self, operands: list[str], size: int) -> None:
        bits, part = 4 * size, f"u{size // 2}"
        if operands[0][0] == "{":
            whole = self.get(operands[1], f"u{size}")
            for i, target in enumerate(names(operands[0])):
                if target != "_":
                    self.put(target, (whole >> np.array(bits * i, whole.dtype)).astype(part))
        else:
            low, high = (self.get(x, part).astype(f"u{size}") for x in names(operands[1]))
            self.put(operands[0], low | high << np.array(bits, low.dtype))

    def shuffle(self, name: tuple[str, ...], operands: list[str]) -> None:
        by, lane = self.get(operands[2], "i4"), self.lane[self.active]
        source = {"bfly": lane ^ by, "idx": by % LANES, "up": np.where(lane >= by, lane - by, lane)}[name[2]]
        threads = self.thread[self.active] // LANES * LANES + source
        if not self.active[threads].all():
            raise RuntimeError("a shuffle from a lane that does not take part")
        everywhere = np.zeros(self.count, "u4")
        everywhere[self.active] = self.get(operands[1], "u4")
        self.put(operands[0].partition("|")[0], everywhere[threads])

    def vote(self, operands: list[str]) -> None:
        """The ballot."""
        pred = np.zeros(self.count, "u4")
        pred[self.active] = self.get(operands[1], np.bool_)
        ballots = (pred.reshape(-1, LANES) << np.arange(LANES, dtype="u4")).sum(1, dtype="u4")
        self.put(operands[0], ballots[self.thread[self.active] // LANES])
