"""IR of CuTe DSL: types, operations, and what of a module a launch needs.

Types carry all that is static. `template` tells a type's value with Dynamic leaves, the '?' of the IR; `dynamic` takes
these from a value, and raises where the value differs from what is static.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

FIXED = re.compile(r"!cute\.(layout|composed_layout|shape|stride|int_tuple|arith_tuple_iter|coord|tile|swizzle)<")
"""Types whose value is known where nothing of them is dynamic."""
MAKE = ("layout", "composed_layout", "ordered_layout", "identity_layout", "view", "tiled_mma", "tiled_copy")
TELL_RESULTS = ("cute.static", *(f"cute.make_{name}" for name in MAKE))
"""Operations that are written with the type of their result alone."""
LEAF = re.compile(r"\?(?:\{([^}]*)\})?|(-?\d+)((?:@\d+)*)|_")


# Types and values


class Dynamic(NamedTuple):
    """A leaf of a type that is known at run time: '?', '?{i64 div=8}'."""

    bits: int = 32
    divisor: int = 1


class Basis(NamedTuple):
    """A leaf of strides that leads to coordinates: 16@1@0 is 16 along mode 1 of mode 0."""

    factor: int
    modes: tuple[int, ...]


class Layout(NamedTuple):
    shape: Any
    """An int, or a tuple of such."""
    stride: Any


class Composed(NamedTuple):
    """A layout whose offsets are swizzled, as the IR writes that: S<3,4,3> o 0."""

    swizzle: str
    layout: Layout


class View(NamedTuple):
    """A tensor in memory."""

    address: int
    layout: Layout


class Coordinates(NamedTuple):
    """A tensor of coordinates."""

    first: Any
    layout: Layout


class Atom(NamedTuple):
    """What a kernel is given of an instruction."""

    operands: tuple[Any, ...]
    types: tuple[str, ...]


@lru_cache(1 << 14)
def split(text: str, by: str) -> tuple[str, ...]:
    """Parts between separators outside of all brackets and quotes."""
    parts: list[str] = []
    depth, start, at, quoted = 0, 0, 0, False
    while at < len(text):
        if text[at] == '"':
            quoted = not quoted
        elif quoted:
            pass
        elif text.startswith(by, at) and depth == 0:
            parts.append(text[start:at].strip())
            at += len(by)
            start = at
            continue
        elif text.startswith("->", at):
            at += 1
        elif text[at] in "(<[{":
            depth += 1
        elif text[at] in ")>]}":
            depth -= 1
        at += 1
    return (*parts, text[start:].strip()) if text[start:].strip() or parts else ()


@lru_cache(4096)
def tuple_of(text: str) -> Any:
    """What a type says of a tuple: ints, Basis, Dynamic, None for '_', and tuples of these."""
    text = text.strip()
    if text[0] == "(":
        return tuple(map(tuple_of, split(text[1:-1], ",")))
    match = LEAF.fullmatch(text)
    if match is None:
        raise NotImplementedError(f"{text!r} in a type")
    if text == "_":
        return None
    if text[0] == "?":
        facts = (match[1] or "").split()
        bits = next((int(fact[1:]) for fact in facts if re.fullmatch(r"i\d+", fact)), 32)
        divisor = next((int(fact.removeprefix("div=")) for fact in facts if fact.startswith("div=")), 1)
        return Dynamic(bits, divisor)
    return Basis(int(match[2]), tuple(map(int, match[3][1:].split("@")))) if match[3] else int(match[2])


def layout_of(text: str) -> Layout:
    shape, stride = split(text, ":")
    return Layout(tuple_of(shape), tuple_of(stride))


def tile_of(text: str) -> Any:
    """A layout, None for '_', or a tuple of these."""
    if text[0] == "[":
        return tuple(map(tile_of, split(text[1:-1], ";")))
    return None if text == "_" else layout_of(text)


def quoted(type_: str) -> list[str]:
    return re.findall(r'"([^"]*)"', type_)


@lru_cache(1 << 14)
def template(type_: str) -> Any:
    """The value that a type tells, with Dynamic leaves."""
    kind = type_.partition("<")[0]
    if kind in ("!cute.shape", "!cute.stride", "!cute.int_tuple", "!cute.coord", "!cute.arith_tuple_iter"):
        return tuple_of(quoted(type_)[0])
    if kind == "!cute.layout":
        return layout_of(quoted(type_)[0])
    if kind == "!cute.tile":
        return tile_of(quoted(type_)[0])
    if kind == "!cute.memref":
        return View(Dynamic(64), layout_of(quoted(type_)[-1]))  # type: ignore[arg-type]
    if kind == "!cute.coord_tensor":
        first, layout = quoted(type_)
        return Coordinates(tuple_of(first), layout_of(layout))
    if kind in ("!cute.i32", "!cute.i64"):
        divisor = re.search(r"divby (\d+)", type_)
        return Dynamic(int(kind[-2:]), int(divisor[1]) if divisor else 1)
    if re.fullmatch(r"i\d+", kind):
        return Dynamic(int(kind[1:]))
    if kind == "!cute.composed_layout":
        swizzle, _, layout = quoted(type_)[0].rpartition(" o ")
        if "?" in swizzle:
            raise NotImplementedError(f"a value of type {type_}")
        return Composed(swizzle, layout_of(layout))
    if kind == "!cute.swizzle":
        return quoted(type_)[0]
    raise NotImplementedError(f"a value of type {type_}")


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple) and not isinstance(x, (Dynamic, Basis)):
        for part in x:
            yield from leaves(part)
    else:
        yield x


def fill(pattern: Any, numbers: Iterator[int]) -> Any:
    """With numbers for Dynamic leaves."""
    if isinstance(pattern, Dynamic):
        return next(numbers)
    if isinstance(pattern, tuple) and not isinstance(pattern, Basis):
        parts = [fill(part, numbers) for part in pattern]
        return type(pattern)(*parts) if hasattr(pattern, "_fields") else tuple(parts)
    return pattern


def dynamic(pattern: Any, value: Any) -> Iterator[tuple[int, Dynamic]]:
    """What is dynamic of a value, in order. Raises ValueError where the value is not of its type."""
    if isinstance(pattern, Dynamic):
        if isinstance(value, tuple) or value % pattern.divisor:
            raise ValueError(f"{value} is not a multiple of {pattern.divisor}")
        if not -(1 << pattern.bits - 1) <= value < 1 << max(pattern.bits - 1, 1):
            raise ValueError(f"{value} does not fit {pattern.bits} bits")
        yield value, pattern
    elif isinstance(pattern, tuple) and not isinstance(pattern, Basis):
        if not isinstance(value, tuple) or len(pattern) != len(value):
            raise ValueError(f"{value} is not {pattern}")
        for part, of in zip(pattern, value, strict=True):
            yield from dynamic(part, of)
    elif pattern != value:
        raise ValueError(f"{value} where {pattern} is compiled in")


# Operations


@dataclass
class Operation:
    results: list[str]
    name: str
    text: str
    """Behind the name, up to the types."""
    operands: list[str]
    types: str
    regions: list[Any]
    """Lists of operations."""

    @cached_property
    def result_types(self) -> tuple[str, ...]:
        """As far as the IR says them."""
        parts = split(self.types, "->" if "->" in self.types else " to ")
        if len(parts) < 2 and self.name not in TELL_RESULTS:
            return ()
        result = parts[-1]
        return split(result[1:-1], ",") if result[0] == "(" else (result,)

    @cached_property
    def operand_types(self) -> tuple[str, ...]:
        operands = split(self.types, "->")[0]
        return tuple(
            x for part in split(operands, ",") for x in (split(part[1:-1], ",") if part[:1] == "(" else [part])
        )

    @cached_property
    def has_fixed_results(self) -> bool:
        """Whether results of the `cute` dialect are what their types say."""
        types = self.result_types
        are_fixed = bool(types) and all(FIXED.match(of) and "?" not in of for of in types)
        return self.name.startswith("cute.") and are_fixed


def parse(lines: Iterator[str]) -> list[Operation]:
    """Operations of a function's body, or of a region: up to its closing brace."""
    operations: list[Operation] = []
    for line in lines:
        line = line.strip()
        if not line:
            continue
        if line == "}":
            return operations
        if line == "} else {":
            operations.append(Operation([], "else", "", [], "", []))
            return operations
        opens = line.endswith("{")
        operation = _operation(line[:-1] if opens else line)
        while opens:
            region = parse(lines)
            opens = bool(region) and region[-1].name == "else"
            operation.regions.append(region[:-1] if opens else region)
        operations.append(operation)
    return operations


def _operation(line: str) -> Operation:
    match = re.fullmatch(r"(?:([%\w, :]+?) = )?([a-z_]+(?:\.[\w.]+)?)(.*)", line)
    if match is None:
        raise NotImplementedError(f"a line of IR: {line}")
    results, name, rest = match.groups()
    text, *types = split(rest, " : ")
    found = []
    for result in split(results or "", ","):
        of, _, count = result.partition(":")
        found += [f"{of}#{i}" for i in range(int(count))] if count else [of]
    operands = [] if name == "scf.for" else re.findall(r"%[\w#]+", re.sub(r'"[^"]*"', "", text))
    return Operation(found, name, text, operands, " : ".join(types), [])


def inside(operation: Any) -> Iterator[Any]:
    """All operations of an operation's regions."""
    for region in operation.operation.regions:
        for block in region.blocks:
            for one in block.operations:
                yield one.operation
                yield from inside(one)


def host_part(module: Any) -> str:
    """What launches need of a module that CuTe DSL traced: the host function, canonical, with its types; of kernels
    their names and their allocations of shared memory. Without their bodies it is no valid module.
    """
    from cutlass._mlir import ir
    from cutlass._mlir.passmanager import PassManager

    kernels: list[str] = []
    with module.context, ir.Location.unknown():
        host = ir.Module.create()
        for operation in module.body.operations:
            if operation.operation.name != "gpu.module":
                host.body.append(operation.operation.clone())
                continue
            for kernel in operation.operation.regions[0].blocks[0].operations:
                kernels.append(f"cuda.kernel @{kernel.operation.attributes['sym_name'].value}()")
                allocations = (one for one in inside(kernel) if one.name == "cute.memref.alloca")
                kernels += [str(one) for one in allocations if ", smem," in str(one.result.type)]
        passes = PassManager.parse("builtin.module(canonicalize,cse)")
        passes.enable_verifier(False)
        passes.run(host.operation)
        text = host.operation.get_asm(enable_debug_info=False, assume_verified=True)
    start = text.rindex("  func.func @cutlass_")
    return "\n".join([*(line for line in text[:start].splitlines() if line.startswith("!")), *kernels, text[start:]])


class Module:
    """IR of a host function and of the kernels that it launches."""

    def __init__(self, ir: str) -> None:
        self.aliases = dict(re.findall(r"^(![\w]+) = (.*)$", ir, re.MULTILINE))
        start = ir.rindex("func.func @cutlass_")
        head, _, body = ir[start:].partition(" {\n")
        signature = head[head.index("(") + 1 : head.rindex(") -> i32")]
        self.arguments = [
            (name.strip(), self.resolved(of)) for name, of in (split(x, ": ") for x in split(signature, ","))
        ]
        self.operations = parse(iter(self.resolved(body).splitlines()))
        self.kernels = {
            kernel.partition("(")[0]: kernel for kernel in re.split(r"^ *cuda\.kernel @", ir[:start], flags=re.M)[1:]
        }

    def resolved(self, text: str) -> str:
        return re.sub(r"!\w+\b(?!\.)", lambda found: self.aliases.get(found[0], found[0]), text)

    def shared_bytes(self, kernel: str) -> int:
        """What a kernel's allocations of shared memory take: one partition after the other, as its PTX has them."""
        found = []
        for facts, of in re.findall(r"cute\.memref\.alloca\(\) {smem(.*?)} : (!.*)", self.kernels[kernel]):
            partition = re.match(r"\.partition_id = (\d+) ", facts)
            size = re.fullmatch(r'!cute\.memref<i8, smem, align<(\d+)>, "(\d+):1">', self.resolved(of))
            if partition is None or size is None:
                raise NotImplementedError(f"an allocation of shared memory: {facts} {self.resolved(of)}")
            found.append((int(partition[1]), int(size[1]), int(size[2])))
        total, last = 0, 0
        for partition_, alignment, size_ in sorted(found, key=lambda one: one[0]):
            if partition_ == last and total % alignment:
                raise NotImplementedError(f"shared memory aligned to {alignment} bytes behind {total}")
            total += -total % alignment + size_
            last = partition_
        return total
