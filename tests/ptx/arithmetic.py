"""Instructions of each thread alone on registers: arithmetic, logic, comparison, selection, conversion, moves.

Integers wrap. fma rounds once from the exact product and a sum in fp64; ex2, lg2, rcp, rsqrt, sqrt and tanh are
NumPy's, `.approx` or not. Subnormal numbers are kept, with `.ftz` too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import chain, repeat
from typing import Any

import numpy as np

from tests.ptx.decode import Run, opcode
from tests.ptx.listing import Instruction, Listing, names
from tests.ptx.registers import Threads
from tests.ptx.values import TYPES, bf16_bits, bf16_numbers, numbers, rounded_to_bf16

Function = Callable[..., Any]
"""Takes arrays of the operands."""
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
FLOAT = BINARY | {"min": np.fmin, "max": np.fmax, "div": np.divide}
UNARY: dict[str, Function] = {
    "neg": np.negative,
    "abs": np.absolute,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
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
COMPARE_FLOATS: dict[str, Function] = COMPARE | {
    "ne": lambda x, y: (x < y) | (x > y),
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
    # What holds with NaN, too: the opposite of what does not
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
}
COUNT: dict[str, Callable[[int, int], int]] = {
    "popc": lambda i, size: bin(i).count("1"),
    "clz": lambda i, size: size - i.bit_length(),
    "bfind": lambda i, size: (i.bit_length() - 1) & 0xFFFFFFFF,
    "brev": lambda i, size: int(f"{i:0{size}b}"[::-1], 2),
}
"""Of a number of `size` bits."""
ROUND: dict[str, Function] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


Specification = tuple[Any, ...]
"""A function, the type of the result, and those of the operands, of which the last is all others' as well."""


def counted(what: str, size: str) -> Specification:
    def function(x: Any) -> Any:
        return np.array([COUNT[what](i, int(size)) for i in x.tolist()], TYPES[f"u{size}"])

    return function, f"u{size}" if what == "brev" else "u32", f"u{size}"


def funnel_shift(way: str, how: str) -> Specification:
    def function(low: Any, high: Any, by: Any) -> Any:
        both = high.astype("u8") << np.uint64(32) | low
        by = (by & np.uint32(31) if how == "wrap" else np.minimum(by, np.uint32(32))).astype("u8")
        return (both << by) >> np.uint64(32) if way == "l" else both >> by & np.uint64(0xFFFFFFFF)

    return function, "u32", "u32"


def extract(letter: str, bits: str) -> Specification:
    size, kind = int(bits), TYPES[letter + bits]

    def function(x: Any, start: Any, length: Any) -> Any:
        start = np.minimum(start & np.uint32(255), size - (letter == "s")).astype(kind)
        length = np.minimum(length & np.uint32(255), np.uint32(size))
        up = (size - length).astype(kind)
        part = np.right_shift(x, start)
        if letter == "u":
            return np.where(length == size, part, part & ~(~np.array(0, kind) << length.astype(kind)))
        return np.where(length == 0, 0, np.right_shift(np.left_shift(part, up), up))

    return function, letter + bits, letter + bits, "u32"


def permute(low: Any, high: Any, how: Any) -> Any:
    parts = np.stack([low, high], 1).view("u1")
    chosen = (how[:, None] >> np.arange(0, 16, 4, dtype="u4")) & np.uint32(15)
    picked = np.take_along_axis(parts, (chosen & 7).astype("i8"), 1)
    return np.where(chosen & 8, np.where(picked & 0x80, 255, 0), picked).astype("u1").view("u4")[:, 0]


def any_logic(x: Any, y: Any, z: Any, table: Any) -> Any:
    total = np.zeros_like(x)
    for i in range(8):
        if table[0] >> i & 1:
            total |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
    return total


def multiply(part: str, letter: str, bits: str) -> Specification:
    """And add, if there is a third operand."""
    size, narrow, wide = int(bits), letter + bits, f"{letter}{2 * int(bits)}"
    kind, product_kind = TYPES[narrow], TYPES.get(wide, object)

    def function(x: Any, y: Any, *z: Any) -> Any:
        product = np.multiply(x.astype(product_kind), y.astype(product_kind))
        if part == "hi" and size == 64:
            product = (product >> size & (1 << 64) - 1).astype("u8").view(kind)
        elif part == "hi":
            product = np.right_shift(product, np.array(size, product_kind)).astype(kind)
        return sum(z, product)

    return (function, narrow, narrow) if part == "hi" else (function, wide, narrow, narrow, wide)


def divide(x: Any, y: Any) -> Any:
    """Towards zero."""
    return np.floor_divide(x - np.fmod(x, y), y)


# Floating point


def fused(x: Any, y: Any, z: Any) -> Any:
    product = x.astype("f8")
    product *= y
    product += z
    return product


def mixed_fma(kind: str) -> Specification:
    """The factors are of 16 bits."""
    return lambda x, y, z: fused(numbers(x, kind), numbers(y, kind), z), "f32", "b16", "b16", "f32"


def mixed(what: str, kind: str) -> Specification:
    return lambda x, y: FLOAT[what](numbers(x, kind), y), "f32", "b16", "f32"


def bf16_pairs(what: str) -> Specification:
    """Rounded twice, as if once: fp32 has more than twice the bits of bf16 (Figueroa, SIGNUM 30, 1995)."""
    return lambda x, y: bf16_bits(FLOAT[what](bf16_numbers(x), bf16_numbers(y))), "b16x2", "b16x2"


def sum_rounded_down(x: Any, y: Any) -> Any:
    """In fp32, towards minus infinity."""
    x, y = x.astype("f8"), y.astype("f8")
    total = x + y
    rest = total - x
    lost = (x - (total - rest)) + (y - rest)  # what fp64 does not hold (Knuth's TwoSum)
    rounded = total.astype("f4")
    above = (rounded > total) | ((rounded == total) & (lost < 0))
    return np.where(above, np.nextafter(rounded, np.float32(-np.inf)), rounded)


# Conversions


def two_bf16(high: Any, low: Any) -> Any:
    """The first operand becomes the upper half."""
    upper, lower = rounded_to_bf16(high), rounded_to_bf16(low)
    upper &= np.uint32(0xFFFF0000)
    lower >>= np.uint32(16)
    upper |= lower
    return upper


def two_f16(high: Any, low: Any) -> Any:
    return np.stack([low, high], 1).astype("f2").view("u4")[:, 0]


def to_integer(how: str, to: str) -> Specification:
    """Beyond the type: its nearest number; 0 of NaN."""
    limits = np.iinfo(TYPES[to])

    def function(x: Any) -> Any:
        whole = ROUND[how](np.nan_to_num(x, nan=0.0).astype("f8"))
        inside = np.clip(whole, float(limits.min), float(limits.max)).astype(TYPES[to])
        return np.where(whole >= float(limits.max), np.array(limits.max, TYPES[to]), inside)

    return function, to, "f32"


def same(x: Any) -> Any:
    return x


def select(size: str) -> Specification:
    return lambda x, y, chosen: np.where(chosen, x, y), f"b{size}", f"b{size}", f"b{size}", "pred"


ELEMENTWISE: dict[str, Callable[..., Specification]] = {
    r"(add|sub|mul\.lo|min|max)\.([su](?:16|32|64))": lambda what, kind: (BINARY[what], kind, kind),
    r"(min|max)\.relu\.s32": lambda what: (lambda x, y: np.maximum(BINARY[what](x, y), 0), "s32", "s32"),
    r"(and|or|xor)\.(b16|b32|b64|pred)": lambda what, kind: (BINARY[what], kind, kind),
    # By more than the type has bits, all of them leave
    r"(shl|shr)\.([bsu](?:16|32|64))": lambda what, kind: (BINARY[what], kind, kind, "u32"),
    r"shf\.([lr])\.(wrap|clamp)\.b32": funnel_shift,
    r"(neg|abs|not)\.([bs](?:16|32|64))": lambda what, kind: (UNARY[what], kind, kind),
    r"not\.pred": lambda: (np.logical_not, "pred", "pred"),
    r"(popc|clz|bfind|brev)\.[bu](32|64)": counted,
    r"bfe\.([su])(32|64)": extract,
    r"prmt\.b32": lambda: (permute, "u32", "u32"),
    r"lop3\.b32": lambda: (any_logic, "u32", "u32"),
    r"mad\.lo\.([su](?:16|32|64))": lambda kind: (lambda x, y, z: x * y + z, kind, kind),
    r"(?:mul|mad)\.(hi)\.([su])(16|32|64)": multiply,
    r"(?:mul|mad)\.(wide)\.([su])(16|32)": multiply,
    r"div\.([su](?:16|32|64))": lambda kind: (divide, kind, kind),
    r"rem\.([su](?:16|32|64))": lambda kind: (np.fmod, kind, kind),
    # Floating point; the least or greatest of two or three numbers is NaN only if all are
    r"(add|sub|mul)(?:\.rn)?(?:\.ftz)?\.(f32|f32x2)": lambda what, kind: (FLOAT[what], kind, kind),
    r"(min|max)(?:\.ftz)?\.f32": lambda what: (FLOAT[what], "f32", "f32"),
    r"(neg|abs)(?:\.ftz)?\.f32": lambda what: (UNARY[what], "f32", "f32"),
    r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)(?:\.approx|\.rn)(?:\.ftz)?\.f32": lambda what: (UNARY[what], "f32", "f32"),
    r"(div)(?:\.rn|\.approx|\.full)(?:\.ftz)?\.f32": lambda what: (FLOAT[what], "f32", "f32"),
    r"fma\.rn(?:\.ftz)?\.(f32|f32x2)": lambda kind: (fused, kind, kind),
    r"fma\.rn\.f32\.(bf16|f16)": mixed_fma,
    r"(add|sub)(?:\.rn)?\.f32\.(bf16|f16)": mixed,
    r"(add|sub)(?:\.rn)?\.bf16x2": bf16_pairs,
    r"add\.rm(?:\.ftz)?\.f32x2": lambda: (sum_rounded_down, "f32x2", "f32x2"),
    # Comparison and selection
    r"setp\.(\w+)\.([bsu](?:16|32|64))": lambda what, kind: (COMPARE[what], "pred", kind),
    r"setp\.(\w+)(?:\.ftz)?\.f32": lambda what: (COMPARE_FLOATS[what], "pred", "f32"),
    r"selp\.[bsuf](16|32|64)": select,
    # Conversions
    r"cvt\.rn\.bf16x2\.f32": lambda: (two_bf16, "u32", "f32"),
    r"cvt\.rn\.f16x2\.f32": lambda: (two_f16, "u32", "f32"),
    r"cvt\.rn\.bf16\.f32": lambda: (bf16_bits, "b16", "f32"),
    r"cvt\.f32\.bf16": lambda: (bf16_numbers, "f32", "b16"),
    r"cvt\.rn\.f16\.f32": lambda: (same, "f16", "f32"),
    r"cvt\.f32\.f16": lambda: (same, "f32", "f16"),
    r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.f32\.f32": lambda how: (ROUND[how], "f32", "f32"),
    r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.([su](?:32|64))\.f32": to_integer,
    r"cvt\.rn\.f32\.([su](?:16|32|64))": lambda source: (same, "f32", source),
    r"cvt\.([su](?:8|16|32|64))\.([su](?:8|16|32|64))": lambda to, source: (lambda x: x.astype(TYPES[to]), to, source),
}
"""By pattern, of whose groups the specification is made. A ufunc writes its results in place."""


def elementwise(program: Listing, of: Instruction, function: Function, to: str, *sources: str) -> Run:
    pairs, kind = to.endswith("x2"), TYPES[to]
    target = program.key(of.operands[0], kind) if pairs else program.result(of.operands[0], kind)
    keys = [
        program.key(x, TYPES[of_x])
        for x, of_x in zip(of.operands[1:], chain(sources, repeat(sources[-1])), strict=False)
    ]
    in_place = isinstance(function, np.ufunc)
    if in_place and len(keys) > function.nin:  # type: ignore[attr-defined]
        return elementwise(program, of, lambda *x: reduce(function, x), to, *sources)

    a, b, c, d = (*keys, 0, 0, 0)[:4]  # for no operand
    ways: dict[tuple[int, bool], Callable[[Any, Any], object]] = {
        (1, True): lambda v, where: function(v[a], v[target], where=where, casting="unsafe"),
        (2, True): lambda v, where: function(v[a], v[b], v[target], where=where, casting="unsafe"),
        (1, False): lambda v, where: np.copyto(v[target], function(v[a]), "unsafe", where),
        (2, False): lambda v, where: np.copyto(v[target], function(v[a], v[b]), "unsafe", where),
        (3, False): lambda v, where: np.copyto(v[target], function(v[a], v[b], v[c]), "unsafe", where),
        (4, False): lambda v, where: np.copyto(v[target], function(v[a], v[b], v[c], v[d]), "unsafe", where),
    }
    way = ways[len(keys), in_place]

    def run(threads: Threads) -> None:
        way(threads.views, threads.where_pairs if pairs else threads.where)

    return run


def register(pattern: str, specify: Callable[..., Specification]) -> None:
    @opcode(pattern)
    def decode(program: Listing, of: Instruction, *groups: str) -> Run:
        return elementwise(program, of, *specify(*groups))


for _pattern, _specify in ELEMENTWISE.items():
    register(_pattern, _specify)


@opcode(r"mov\.(?:[bsuf](16|32|64)|pred)")
def move(program: Listing, of: Instruction, size: str | None) -> Run:
    """To or from braces: packs or unpacks; the first of the parts is the lowest."""
    if "{" not in of.operands[0] + of.operands[1]:
        kind = f"b{size}" if size else "pred"
        return elementwise(program, of, same, kind, kind)
    unpacks = of.operands[0][0] == "{"
    parts, whole = names(of.operands[not unpacks]), of.operands[unpacks]
    bits = f"u{int(size or 0) // 8 // len(parts)}"
    of_whole = [program.key(whole, f"{bits}:{i}") for i in range(len(parts))]
    copies = [(program.key(part, bits), at) for part, at in zip(parts, of_whole, strict=True) if part != "_"]
    copies = copies if unpacks else [(at, part) for part, at in copies]

    def run(threads: Threads) -> None:
        v = threads.views
        for to, x in copies:
            np.copyto(v[to], v[x], where=threads.where)

    return run
