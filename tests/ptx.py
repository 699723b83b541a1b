"""An interpreter of the PTX that CuTe kernels of warps compile to, so that they run where no GPU is.

    one CTA after the other; of its threads, in NumPy, those with the lowest program counter run together

Threads that diverge so meet again as on a GPU, and wait for each other at barriers. cp.async arrives as late as it may,
when its group is waited for, or at once (`late=False`): a kernel must bear both. So does WGMMA, for CTAs of one
warpgroup and tiles with a swizzle of 128 bytes. Found are: accesses outside of the tensors that a kernel was given,
misaligned ones, two lanes that write one address together, shuffles from lanes that do not take part. Not found: races
of warps, which run in step here, missing fences, and what ptxas makes of all this.

Integers wrap; ex2, lg2 and rcp are NumPy's. Registers hold what an instruction last wrote, at first 0xAB in each byte;
shared memory begins as 0xFF, NaN in every type.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

LANES = 32
GROUP = 128
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
COMPARE |= {"ge": np.greater_equal, "neu": np.not_equal}
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


def tensor_argument(x: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """How CuTe DSL passes a tensor: its address, and what is dynamic of its shape (32 bits) and strides (64 bits)."""
    head = struct.pack(f"<Q{len(shape)}i", x.data_ptr(), *shape)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def bf16_bits(x: Any) -> Any:
    bits = np.ascontiguousarray(x, "f4").view("u4").astype("u8")
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")
    return np.where(np.isnan(x), np.array(0x7FFF, "u2"), rounded)


def bf16_numbers(bits: Any) -> Any:
    return (bits.astype("u4") << 16).view("f4")


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
        self.parameters = re.findall(r"\.param.*?\s(\w+_param_\d+)", head)
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.rindex("}")])
        for statement in body.split(";"):
            text = " ".join(statement.split()).lstrip("{} ")  # scopes of inline assembly, which only name a predicate p
            while label := re.match(r"(\$\w+):\s*", text):
                self.labels[label[1]] = len(self.instructions)
                text = text[label.end() :]
            if text and not text.startswith("."):
                predicate, name, rest = re.fullmatch(r"(@!?%p\d+ )?(\S+)\s*(.*)", text).groups()  # type: ignore[union-attr]
                of = Instruction((predicate or "").strip(), tuple(name.split(".")), operands_of(rest))
                self.instructions.append(of)
        self.half = any(i.name[0] in ("mma", "wgmma") and "f16" in i.name for i in self.instructions)

    def run(
        self,
        arguments: Sequence[bytes],
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        late: bool = True,
    ) -> None:
        """Args: of the kernel, as bytes; and every tensor that it may read or write."""
        memory = {x.data_ptr(): x.untyped_storage() for x in tensors if x is not None and x.numel() > 0}
        storages = [
            Storage(s.data_ptr(), np.ctypeslib.as_array((ctypes.c_uint8 * s.nbytes()).from_address(s.data_ptr())))
            for s in memory.values()
        ]
        for place in np.ndindex(*grid[::-1]):
            Cta(self, dict(zip(self.parameters, arguments, strict=True)), place[::-1], storages, late).run()


class Cta:
    """The state of one CTA."""

    def __init__(
        self, program: Program, arguments: dict[str, bytes], place: tuple[int, ...], storages: list[Storage], late: bool
    ) -> None:
        self.program, self.arguments, self.place, self.storages, self.late = program, arguments, place, storages, late
        self.count = program.threads
        self.thread = np.arange(self.count)
        self.lane = self.thread % LANES
        self.registers: dict[str, Any] = {}
        self.shared = np.full(SHARED_BYTES, 0xFF, "u1")
        self.active = np.ones(self.count, np.bool_)
        self.started: list[list[tuple[int, Any]]] = [[] for _ in range(self.count)]
        self.groups: list[list[list[tuple[int, Any]]]] = [[] for _ in range(self.count)]
        self.products: list[Callable[[], None]] = []
        self.product_groups: list[list[Callable[[], None]]] = []

    def run(self) -> None:
        counter, waiting = np.zeros(self.count, np.int64), np.zeros(self.count, np.bool_)
        while True:
            running = (counter < DONE) & ~waiting
            if not running.any():
                if not waiting.any():
                    return
                waiting[:] = False
                continue
            at = counter[running].min()
            active = running & (counter == at)
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
                waiting[active] = name[1] == "sync"
            else:
                with np.errstate(all="ignore"):
                    self.step(name, operands)

    # Registers: `get` and `put` are of the active threads

    def register(self, name: str) -> Any:
        if name not in self.registers:
            kind = {"%p": np.bool_, "p": np.bool_, "%r": "u4"}.get(
                name.rstrip("0123456789"), "u8" if name[2:3] == "d" else "u2"
            )
            fill = False if kind is np.bool_ else 0xABABABABABABABAB & (1 << 8 * np.dtype(kind).itemsize) - 1
            self.registers[name] = np.full(self.count, fill, kind)
        return self.registers[name]

    def get(self, operand: str, kind: Any) -> Any:
        of, count = np.dtype(kind), int(self.active.sum())
        bits = f"u{of.itemsize}"
        if operand.startswith("%ctaid"):
            return np.full(count, self.place["xyz".index(operand[-1])], of)
        if operand in ("%tid.x", "%laneid"):
            return (self.thread if operand == "%tid.x" else self.lane)[self.active].astype(of)
        if operand[0] == "%":
            value = self.register(operand)[self.active]
            return value if value.dtype == np.bool_ else value.astype(bits).view(of)
        if operand.startswith("0f"):
            number = int(operand[2:], 16)
        else:
            number = 0 if operand.startswith("__dynamic_shmem__") else int(operand, 0)
        return np.full(count, number & (1 << 8 * of.itemsize) - 1, bits).view(of)

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
        return (self.get(base, kind) + np.array(int(offset or 0)).astype(kind)).astype("i8")  # wraps

    def place_of(self, address: Any, count: int, shared: bool) -> tuple[Any, Any]:
        """The memory, and where in it `count` bytes of each active thread lie."""
        if (address % count).any():
            raise MemoryError(f"misaligned access to {count} bytes")
        for start, memory in [Storage(0, self.shared)] if shared else self.storages:
            if ((address >= start) & (address + count <= start + len(memory))).all():
                return memory, (address - start)[:, None] + np.arange(count)
        raise MemoryError(f"access to {count} bytes outside of {'shared memory' if shared else 'one tensor'}")

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
        if load:
            data = memory[place].view(kind)
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
                self.groups[thread].append(self.started[thread])
                self.started[thread] = []
        elif "wait_group" in name:
            for thread in threads:
                while len(self.groups[thread]) > int(operands[0]):
                    for to, data in self.groups[thread].pop(0):
                        self.shared[to : to + len(data)] = data
        else:
            _, to = self.place_of(self.address(operands[0], "u4"), 16, True)
            memory, place = self.place_of(self.address(operands[1], "u8"), 16, False)
            if not self.late:
                self.shared[to] = memory[place]
            for thread, start, data in zip(threads, to[:, 0], memory[place], strict=True):
                self.started[thread].append((start, data))

    def matrices(self, name: tuple[str, ...], operands: list[str]) -> None:
        """ldmatrix and stmatrix: four times 8 rows of 8 numbers, whose addresses 32 lanes have."""
        load = name[0] == "ldmatrix"
        registers = [self.register(x) for x in names(operands[0 if load else 1])]
        _, place = self.place_of(self.address(operands[1 if load else 0], "u4"), 16, True)
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

    def multiply(self, operands: list[str]) -> None:
        """mma.m16n8k16: lane 4 i + j holds two numbers of rows i and i + 8 in columns 2 j of each 8 (PTX ISA)."""
        warps = self.whole_warps()
        row, column = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2

        def halves(register: str) -> Any:
            bits = np.ascontiguousarray(self.register(register).reshape(-1, LANES)[warps]).view("u2")
            numbers = bits.view("f2").astype("f4") if self.program.half else bf16_numbers(bits)
            return numbers.reshape(len(warps), LANES, 2)

        left, right, acc = (np.zeros((len(warps), *shape), "f4") for shape in ((16, 16), (16, 8), (16, 8)))
        for c in range(2):
            for i, register in enumerate(names(operands[1])):
                left[:, row + 8 * (i % 2), column + c + 8 * (i // 2)] = halves(register)[..., c]
            for i, register in enumerate(names(operands[2])):
                right[:, column + c + 8 * i, row] = halves(register)[..., c]
        for i, operand in enumerate(names(operands[3])):
            acc[:, row + 8 * (i // 2), column + i % 2] = self.get(operand, "f4").reshape(-1, LANES)
        acc = acc + left @ right
        for i, register in enumerate(names(operands[0])):
            self.put(register, acc[:, row + 8 * (i // 2), column + i % 2].flatten())

    def products_of_warpgroups(self, name: tuple[str, ...], operands: list[str]) -> None:
        """wgmma."""
        if not self.active.all() or self.count != GROUP:
            raise RuntimeError("WGMMA needs one whole warpgroup")
        if name[1] == "mma_async":
            product = partial(self.multiply_tiles, int(name[4].partition("n")[2].partition("k")[0]), operands)
            add = bool(self.register("p")[0])
            given = [None if x[0] == "{" else int(self.get(x, "u8")[0]) for x in operands[1:3]]
            self.products.append(partial(product, given, add))
            if not self.late:
                self.products.pop()()
        elif name[1] == "commit_group":
            self.product_groups.append(self.products)
            self.products = []
        elif name[1] == "wait_group":
            while len(self.product_groups) > int(operands[0]):
                for run in self.product_groups.pop(0):
                    run()

    def tile(self, descriptor: int, rows: int, is_transposed: bool) -> Any:
        """rows x 16 numbers that a descriptor of shared memory tells of (PTX ISA, 128-byte swizzle)."""
        start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        if descriptor >> 62 != 1:
            raise RuntimeError("not a swizzle of 128 bytes")
        row, k = np.arange(rows)[:, None], np.arange(16)
        if is_transposed:
            place = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
        else:
            place = start + row // 8 * stride + row % 8 * 128 + k * 2
        place = place ^ (place >> 7 & 7) << 4
        return self.numbers(self.shared.view("u2")[place // 2])

    def numbers(self, bits: Any) -> Any:
        return bits.view("f2").astype("f4") if self.program.half else bf16_numbers(bits)

    def multiply_tiles(self, columns: int, operands: list[str], given: list[int | None], add: bool) -> None:
        """Lane 4 i + j of warp w holds two numbers of rows 16 w + i and 16 w + i + 8 in columns 2 j of each 8."""
        row, column = self.thread // LANES * 16 + self.lane // 4, self.lane % 4 * 2
        flags = [int(x) for x in operands[6:]]
        if given[0] is None:
            left = np.zeros((64, 16), "f4")
            for i, register in enumerate(names(operands[1])):
                pairs = self.numbers(np.ascontiguousarray(self.register(register)).view("u2").reshape(-1, 2))
                for c in range(2):
                    left[row + 8 * (i % 2), column + c + 8 * (i // 2)] = pairs[:, c]
        else:
            left = self.tile(given[0], 64, flags[0] == 1)
        assert given[1] is not None
        product = left @ self.tile(given[1], columns, flags[-1] == 1).T
        for i, name in enumerate(names(operands[0])):
            register = self.register(name)
            values = product[row + 8 * (i // 2 % 2), column + i % 2 + 8 * (i // 4)]
            register[:] = np.ascontiguousarray(register.view("f4") + values if add else values).view("u4")

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
        elif what == "wgmma":
            self.products_of_warpgroups(name, operands)
        elif what == "fence":
            pass
        elif what == "atom" or what == "red":
            memory, place = self.place_of(self.address(operands[-2], "u8"), 4, False)
            for where, bits in zip(place, self.get(operands[-1], "u4"), strict=True):
                memory[where] = (memory[where].view("u4") | bits).view("u1")
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
        x = [self.get(operand, kind) for operand in operands[1:]]
        if name[1] in ("wide", "hi"):
            wide = "i8" if kind[0] == "i" else "u8"
            product = x[0].astype(wide) * x[1].astype(wide)
            if name[1] == "hi":
                return (product >> np.array(32, wide)).astype(kind)
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
