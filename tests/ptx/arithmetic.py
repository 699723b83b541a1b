"""Instructions of each thread alone on registers: arithmetic, logic, comparison, selection, conversion, moves.

Integers wrap. fma rounds once from the exact product and a sum in fp64; ex2, lg2, rcp, rsqrt, sqrt and tanh are
NumPy's, `.approx` or not. Subnormal numbers are kept, with `.ftz` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.decode import Run, opcode, unsupported
from tests.ptx.listing import Instruction, names
from tests.ptx.values import TYPES, bf16_bits, bf16_numbers, numbers, rounded_to_bf16

if TYPE_CHECKING:
    from tests.ptx.program import Program
    from tests.ptx.registers import Threads

Function = Callable[..., Any]
"""A ufunc: it takes an output and `where`."""
BINARY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "shl": np.left_shift,
    "shr": np.right_shift,
}
FLOAT = BINARY | {"min": np.fmin, "max": np.fmax}
UNARY: dict[str, Function] = {
    "neg": np.negative,
    "abs": np.absolute,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}
COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
UNORDERED = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
"""Comparisons that hold with NaN, too: the opposites of what does not hold then."""


def unary(program: Program, of: Instruction, function: Function, kind: str) -> Run:
    to, x = (program.key(operand, kind) for operand in of.operands)

    def run(threads: Threads) -> None:
        v = threads.views
        function(v[x], v[to], where=threads.where)

    return run


def binary(program: Program, of: Instruction, function: Function, kind: str, second: str = "") -> Run:
    to, x, y = (program.key(operand, a) for operand, a in zip(of.operands, (kind, kind, second or kind), strict=True))

    def run(threads: Threads) -> None:
        v = threads.views
        function(v[x], v[y], v[to], where=threads.where, casting="unsafe")

    return run


def given(program: Program, of: Instruction, to: str, sources: list[str], function: Function) -> Run:
    """Any function, whose result is converted to the type `to`. Args: `sources`, types of the operands."""
    target = program.result(of.operands[0], to)
    keys = [program.key(x, kind) for x, kind in zip(of.operands[1:], sources, strict=True)]

    def run(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[target], function(*[v[key] for key in keys]), casting="unsafe", where=threads.where)

    def run_of_three(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[target], function(v[x], v[y], v[z]), casting="unsafe", where=threads.where)

    if len(keys) == 3:  # fma, which is most of all
        x, y, z = keys
        return run_of_three
    return run


@opcode(r"(add|sub|mul\.lo|min|max)\.([su](?:16|32|64))")
def integers(program: Program, of: Instruction, what: str, kind: str) -> Run:
    return binary(program, of, BINARY[what], TYPES[kind])


@opcode(r"(min|max)\.relu\.s32")
def integers_from_zero(program: Program, of: Instruction, what: str) -> Run:
    return given(program, of, "i4", ["i4", "i4"], lambda x, y: np.maximum(BINARY[what](x, y), 0))


@opcode(r"(and|or|xor)\.(b16|b32|b64|pred)")
def logic(program: Program, of: Instruction, what: str, kind: str) -> Run:
    return binary(program, of, BINARY[what], TYPES[kind])


@opcode(r"(shl|shr)\.([bsu](?:16|32|64))")
def shift(program: Program, of: Instruction, what: str, kind: str) -> Run:
    """By more than the type has bits, all of them leave."""
    return binary(program, of, BINARY[what], TYPES[kind], "u4")


@opcode(r"shf\.([lr])\.(wrap|clamp)\.b32")
def funnel_shift(program: Program, of: Instruction, way: str, how: str) -> Run:
    def function(low: Any, high: Any, by: Any) -> Any:
        both = high.astype("u8") << np.uint64(32) | low
        by = (by & np.uint32(31) if how == "wrap" else np.minimum(by, np.uint32(32))).astype("u8")
        return (both << by) >> np.uint64(32) if way == "l" else both >> by & np.uint64(0xFFFFFFFF)

    return given(program, of, "u4", ["u4", "u4", "u4"], function)


@opcode(r"(neg|abs|not)\.([bs](?:16|32|64)|pred)")
def one_integer(program: Program, of: Instruction, what: str, kind: str) -> Run:
    return unary(program, of, np.logical_not if kind == "pred" else UNARY[what], TYPES[kind])


@opcode(r"(popc|clz|bfind|brev)\.(?:b|u)(32|64)")
def count_bits(program: Program, of: Instruction, what: str, bits: str) -> Run:
    size = int(bits)

    def function(x: Any) -> Any:
        each: dict[str, Callable[[int], int]] = {
            "popc": lambda i: bin(i).count("1"),
            "clz": lambda i: size - i.bit_length(),
            "bfind": lambda i: (i.bit_length() - 1) & 0xFFFFFFFF,
            "brev": lambda i: int(f"{i:0{size}b}"[::-1], 2),
        }
        return np.array([each[what](i) for i in x.tolist()], f"u{size // 8}")

    return given(program, of, f"u{size // 8}" if what == "brev" else "u4", [f"u{size // 8}"], function)


@opcode(r"bfe\.([su])(32|64)")
def extract(program: Program, of: Instruction, letter: str, bits: str) -> Run:
    kind, size = TYPES[letter + bits], int(bits)

    def function(x: Any, start: Any, length: Any) -> Any:
        start = np.minimum(start & np.uint32(255), size - (letter == "s")).astype(kind)
        length = np.minimum(length & np.uint32(255), np.uint32(size))
        up = (size - length).astype(kind)
        part = np.right_shift(x, start)
        if letter == "u":
            return np.where(length == size, part, part & ~(~np.array(0, kind) << length.astype(kind)))
        return np.where(length == 0, 0, np.right_shift(np.left_shift(part, up), up))

    return given(program, of, kind, [kind, "u4", "u4"], function)


@opcode(r"prmt\.b32")
def permute(program: Program, of: Instruction) -> Run:
    def function(low: Any, high: Any, how: Any) -> Any:
        parts = np.stack([low, high], 1).view("u1")
        chosen = (how[:, None] >> np.arange(0, 16, 4, dtype="u4")) & np.uint32(15)
        picked = np.take_along_axis(parts, (chosen & 7).astype("i8"), 1)
        return np.where(chosen & 8, np.where(picked & 0x80, 255, 0), picked).astype("u1").view("u4")[:, 0]

    return given(program, of, "u4", ["u4", "u4", "u4"], function)


@opcode(r"lop3\.b32")
def any_logic(program: Program, of: Instruction) -> Run:
    table = int(of.operands.pop(), 0)

    def function(x: Any, y: Any, z: Any) -> Any:
        total = np.zeros_like(x)
        for i in range(8):
            if table >> i & 1:
                total |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return total

    return given(program, of, "u4", ["u4", "u4", "u4"], function)


@opcode(r"(mul|mad)\.(wide|hi|lo)\.([su])(16|32|64)")
def multiply(program: Program, of: Instruction, what: str, part: str, letter: str, bits: str) -> Run:
    kind, size = TYPES[letter + bits], int(bits)
    if part == "lo":
        return given(program, of, kind, [kind] * 3, lambda x, y, z: x * y + z)
    if size == 64:

        def upper(x: Any, y: Any, *z: Any) -> Any:
            of_all = np.asarray(x, object) * np.asarray(y, object) >> 64
            return sum(z, (of_all & (1 << 64) - 1).astype("u8").view(kind))

        return given(program, of, kind, [kind] * len(of.operands[1:]), upper)
    wide = TYPES[f"{letter}{2 * size}"]

    def function(x: Any, y: Any, *z: Any) -> Any:
        of_all = np.multiply(x, y, dtype=wide)
        return sum(z, of_all if part == "wide" else np.right_shift(of_all, np.array(size, wide)).astype(kind))

    added = [wide if part == "wide" else kind] * (what == "mad")
    return given(program, of, wide if part == "wide" else kind, [kind, kind, *added], function)


@opcode(r"(div|rem)\.([su])(16|32|64)")
def divide(program: Program, of: Instruction, what: str, letter: str, bits: str) -> Run:
    """Towards zero."""
    kind = TYPES[letter + bits]

    def function(x: Any, y: Any) -> Any:
        rest = np.fmod(x, y)
        return rest if what == "rem" else np.floor_divide(x - rest, y)

    return given(program, of, kind, [kind, kind], function)


# Floating point


@opcode(r"(add|sub|mul)(?:\.rn)?(?:\.ftz)?\.f32")
def floats(program: Program, of: Instruction, what: str) -> Run:
    return binary(program, of, FLOAT[what], "f4")


@opcode(r"(min|max)(?:\.ftz)?\.f32")
def extreme(program: Program, of: Instruction, what: str) -> Run:
    """Of two numbers or, on sm_100, three; NaN only if all are."""
    if len(of.operands) == 3:
        return binary(program, of, FLOAT[what], "f4")
    to, x, y, z = (program.key(operand, "f4") for operand in of.operands)
    function = FLOAT[what]

    def run(threads: Threads) -> None:
        v = threads.views
        function(function(v[x], v[y]), v[z], v[to], where=threads.where)

    return run


@opcode(r"(neg|abs)(?:\.ftz)?\.f32")
def sign(program: Program, of: Instruction, what: str) -> Run:
    return unary(program, of, UNARY[what], "f4")


@opcode(r"(ex2|lg2|rcp|sqrt|tanh|sin|cos)(?:\.approx|\.rn)(?:\.ftz)?\.f32")
def special(program: Program, of: Instruction, what: str) -> Run:
    return unary(program, of, UNARY[what], "f4")


@opcode(r"rsqrt\.approx(?:\.ftz)?\.f32")
def reciprocal_root(program: Program, of: Instruction) -> Run:
    return given(program, of, "f4", ["f4"], lambda x: 1 / np.sqrt(x))


@opcode(r"div(?:\.rn|\.approx|\.full)(?:\.ftz)?\.f32")
def quotient(program: Program, of: Instruction) -> Run:
    return binary(program, of, np.divide, "f4")


def fused(x: Any, y: Any, z: Any) -> Any:
    product = np.multiply(x, y, dtype="f8")
    product += z
    return product


@opcode(r"fma\.rn(?:\.ftz)?\.f32")
def fma(program: Program, of: Instruction) -> Run:
    return given(program, of, "f4", ["f4", "f4", "f4"], fused)


@opcode(r"fma\.rn\.f32\.(bf16|f16)")
def mixed_fma(program: Program, of: Instruction, kind: str) -> Run:
    """The factors are of 16 bits."""
    return given(program, of, "f4", ["u2", "u2", "f4"], lambda x, y, z: fused(numbers(x, kind), numbers(y, kind), z))


@opcode(r"(add|sub)(?:\.rn)?\.bf16x2")
def bf16_pairs(program: Program, of: Instruction, what: str) -> Run:
    def function(x: Any, y: Any) -> Any:
        left, right = (bf16_numbers(v).astype("f8") for v in (x, y))
        exact = FLOAT[what](left, right)
        single = exact.astype("f4")
        single = np.where(np.abs(single) > np.abs(exact), np.nextafter(single, np.float32(0)), single)
        odd = single.view("u4") | (single != exact)  # to odd, so that what follows rounds as if once
        return bf16_bits(odd.view("f4"))

    to, *keys = (program.key(operand, "u2x2") for operand in of.operands)

    def run(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[to], function(*[v[key] for key in keys]), where=threads.where_pairs)

    return run


def sum_rounded_down(x: Any, y: Any) -> Any:
    """In fp32, towards minus infinity."""
    x, y = x.astype("f8"), y.astype("f8")
    total = x + y
    rest = total - x
    lost = (x - (total - rest)) + (y - rest)  # what fp64 does not hold (Knuth's TwoSum)
    rounded = total.astype("f4")
    above = (rounded > total) | ((rounded == total) & (lost < 0))
    return np.where(above, np.nextafter(rounded, np.float32(-np.inf)), rounded)


PAIRS: dict[str, Function] = {
    "add": np.add,
    "add.rn": np.add,
    "sub": np.subtract,
    "sub.rn": np.subtract,
    "mul": np.multiply,
    "mul.rn": np.multiply,
    "fma.rn": fused,
    "add.rm": sum_rounded_down,
}


@opcode(r"(add|sub|mul|fma)((?:\.rn|\.rm)?)(?:\.ftz)?\.f32x2")
def pairs(program: Program, of: Instruction, what: str, rounding: str) -> Run:
    if what + rounding not in PAIRS:
        raise unsupported(of, "rounding")
    function = PAIRS[what + rounding]
    to, *keys = (program.key(operand, "f4x2") for operand in of.operands)

    def run(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[to], function(*[v[key] for key in keys]), casting="same_kind", where=threads.where_pairs)

    def run_ufunc(threads: Threads) -> None:
        v = threads.views
        function(v[keys[0]], v[keys[1]], v[to], where=threads.where_pairs)

    return run_ufunc if isinstance(function, np.ufunc) else run


# Comparison and selection


@opcode(r"setp\.(\w+)(?:\.ftz)?\.(?:([bsu](?:16|32|64))|(f32))")
def compare(program: Program, of: Instruction, what: str, integer: str | None, single: str | None) -> Run:
    kind = TYPES[integer or "f32"]
    to = program.key(of.operands[0], "?")
    x, y = (program.key(operand, kind) for operand in of.operands[1:])
    if what in UNORDERED or what == "equ":
        opposite = COMPARE.get(UNORDERED.get(what, ""))

        def unordered(threads: Threads) -> None:
            v = threads.views
            wrong = opposite(v[x], v[y]) if opposite else (v[x] < v[y]) | (v[x] > v[y])
            np.logical_not(wrong, v[to], where=threads.where)

        return unordered
    if single and what in ("ne", "num", "nan"):  # `neu` is NumPy's !=

        def ordered(threads: Threads) -> None:
            v = threads.views
            nan = np.isnan(v[x]) | np.isnan(v[y])
            found = nan if what == "nan" else ~nan if what == "num" else ~nan & (v[x] != v[y])
            np.copyto(v[to], found, where=threads.where)

        return ordered
    function = COMPARE["ne" if what == "neu" else what]

    def run(threads: Threads) -> None:
        v = threads.views
        function(v[x], v[y], v[to], where=threads.where)

    return run


@opcode(r"selp\.([bsuf](?:16|32|64))")
def select(program: Program, of: Instruction, kind: str) -> Run:
    bits = f"u{np.dtype(TYPES[kind]).itemsize}"
    to, x, y = (program.key(operand, bits) for operand in of.operands[:3])
    chosen = program.key(of.operands[3], "?")

    def run(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[to], np.where(v[chosen], v[x], v[y]), where=threads.where)

    return run


# Moves and conversions


@opcode(r"mov\.([bsuf](?:16|32|64)|pred)")
def move(program: Program, of: Instruction, kind: str) -> Run:
    bits = "?" if kind == "pred" else f"u{np.dtype(TYPES[kind]).itemsize}"
    if "{" in of.operands[0] + of.operands[1]:
        return pack(program, of, int(bits[1]))
    to, x = (program.key(operand, bits) for operand in of.operands)

    def run(threads: Threads) -> None:
        v = threads.views
        np.copyto(v[to], v[x], where=threads.where)

    return run


def pack(program: Program, of: Instruction, size: int) -> Run:
    """Or unpack: the first of the parts is the lowest."""
    unpacks = of.operands[0][0] == "{"
    parts, whole = names(of.operands[not unpacks]), of.operands[unpacks]
    bits = f"u{size // len(parts)}"
    of_whole = [program.key(whole, f"{bits}:{i}") for i in range(len(parts))]
    copies = [(program.key(part, bits), at) for part, at in zip(parts, of_whole, strict=True) if part != "_"]
    copies = copies if unpacks else [(at, part) for part, at in copies]

    def run(threads: Threads) -> None:
        v = threads.views
        for to, x in copies:
            np.copyto(v[to], v[x], where=threads.where)

    return run


@opcode(r"cvt\.rn\.(bf16x2|f16x2)\.f32")
def convert_two(program: Program, of: Instruction, kind: str) -> Run:
    """The first operand becomes the upper half."""

    def bf16(high: Any, low: Any) -> Any:
        upper, lower = rounded_to_bf16(high), rounded_to_bf16(low)
        upper &= np.uint32(0xFFFF0000)
        lower >>= np.uint32(16)
        upper |= lower
        return upper

    def f16(high: Any, low: Any) -> Any:
        return np.stack([low, high], 1).astype("f2").view("u4")[:, 0]

    return given(program, of, "u4", ["f4", "f4"], bf16 if kind == "bf16x2" else f16)


@opcode(r"cvt(\.rn)?\.(f32|bf16|f16)\.(f32|bf16|f16)")
def convert_floats(program: Program, of: Instruction, rounds: str | None, to: str, source: str) -> Run:
    def function(x: Any) -> Any:
        single = bf16_numbers(x) if source == "bf16" else x
        return bf16_bits(single) if to == "bf16" else single

    if (to == "f32") == bool(rounds):
        raise unsupported(of, "rounding")
    kinds = {"f32": "f4", "bf16": "u2", "f16": "f2"}
    return given(program, of, kinds[to], [kinds[source]], function)


ROUND: dict[str, Function] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@opcode(r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.([su](?:32|64)|f32)\.f32")
def round_float(program: Program, of: Instruction, how: str, to: str) -> Run:
    if to == "f32":
        return given(program, of, "f4", ["f4"], ROUND[how])
    limits = np.iinfo(TYPES[to])

    def function(x: Any) -> Any:
        """Beyond the type: its nearest number; 0 of NaN."""
        whole = ROUND[how](np.nan_to_num(x, nan=0.0).astype("f8"))
        inside = np.clip(whole, float(limits.min), float(limits.max)).astype(TYPES[to])
        return np.where(whole >= float(limits.max), np.array(limits.max, TYPES[to]), inside)

    return given(program, of, TYPES[to], ["f4"], function)


@opcode(r"cvt\.rn\.f32\.([su](?:16|32|64))")
def integer_to_float(program: Program, of: Instruction, source: str) -> Run:
    return given(program, of, "f4", [TYPES[source]], lambda x: x.astype("f4"))


@opcode(r"cvt\.([su](?:8|16|32|64))\.([su](?:8|16|32|64))")
def convert_integers(program: Program, of: Instruction, to: str, source: str) -> Run:
    return given(program, of, TYPES[to], [TYPES[source]], lambda x: x.astype(TYPES[to]))
