"""Tiles that a lowered kernel keeps alive at once, read off its Linalg: a lower bound for what a planner must count.

A tile is a value of tensor type, alive from its definition to its last use, throughout a loop that it enters from
outside; a result may take the place of operands that end with it. Filled and broadcast tiles count nothing: they can be
made anew, or be an operand of an instruction. Vector operations work in the UB. Operands of a matrix product lie in L1,
from the first product that reads them to the last; a transposed one is the tile itself.

It is what the planner counts, tile by tile, and no more than that: a compiler that takes tiles apart may need less,
one that buffers twice needs more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 8}
TENSOR = re.compile(r"(?:tensor|memref)<((?:\d+x)*)(\w+)>")
NAME = re.compile(r"%\w+(?:#\d+)?")
FREE = ("tensor.empty", "linalg.fill", "linalg.broadcast")
LOADED = "bufferization.to_tensor"


@dataclass
class Tile:
    size: int
    made_by: str
    defined: int
    """Line of its definition; a loop's results are defined by the last line of the loop."""
    cube_uses: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    """All others."""


@dataclass
class Scope:
    tiles: dict[str, Tile] = field(default_factory=dict)
    start: int | None = None
    """Line of the loop that this is the body of."""
    results: dict[str, int] = field(default_factory=dict)
    """The loop's, and their bytes."""


def live_bytes(linalg: str) -> dict[str, int]:
    """The most bytes alive at once in UB and in L1."""
    tiles, loops = parsed(linalg)
    lines = linalg.count("\n") + 2
    return {
        memory: max(
            sum(size for size, first, end in found if first <= line < end)
            for found in [list(spans(tiles, loops, memory))]
            for line in range(lines)
        )
        for memory in ("UB", "L1")
    }


def spans(tiles: list[Tile], loops: list[tuple[int, int]], memory: str) -> Iterator[tuple[int, int, int]]:
    """Bytes, first line after which a tile is alive, and the line that ends it."""
    for tile in tiles:
        uses = tile.cube_uses if memory == "L1" else tile.uses
        computed = tile.made_by not in (LOADED, "linalg.transpose") and memory == "UB"
        if not (uses or computed):
            continue
        first, end = tile.defined, tile.defined + 1
        if uses:
            first = tile.defined if computed else min(uses) - 1
            end = max(uses)
            for start, last in loops:
                if tile.defined < start:
                    if start <= min(uses) <= last and not computed:
                        first = min(first, start)
                    if start < max(uses) <= last:
                        end = max(end, last)
        yield tile.size, first, end


def parsed(linalg: str) -> tuple[list[Tile], list[tuple[int, int]]]:
    """All tiles, and first and last line of each loop. Sibling regions use names again."""
    tiles: list[Tile] = []
    loops: list[tuple[int, int]] = []
    scopes = [Scope()]

    def define(name: str, size: int, made_by: str, line: int) -> None:
        scopes[-1].tiles[name] = Tile(size, made_by, line)
        tiles.append(scopes[-1].tiles[name])

    for line, text in enumerate(linalg.splitlines()):
        if re.match(r"\s*}", text):
            scope = scopes.pop()
            if scope.start is not None:
                loops.append((scope.start, line))
                for name, size in scope.results.items():
                    define(name, size, "scf.for", line)
        head = re.match(r"\s*(%\w+)(?::\d+)? = ([\w.]+)", text)
        operation = head[2] if head else (text.split() or [""])[0]
        matmul = re.search(r"matmul.* ins\((%[\w#]+), (%[\w#]+) :", text)
        for name in dict.fromkeys(NAME.findall(text[head.end() :] if head else text)):
            tile = next((scope.tiles[name] for scope in reversed(scopes) if name in scope.tiles), None)
            if tile is None:
                continue
            if matmul and name in matmul.groups():
                tile.cube_uses.append(line)
            elif not (operation == "linalg.transpose" and tile.made_by == LOADED):
                tile.uses.append(line)
        carried = re.search(r"iter_args\((.*?)\) -> \((.*?)\)", text)
        if head and not carried and (operation == LOADED or " tensor<" in text) and operation not in FREE:
            shape, dtype = TENSOR.findall(text)[-1]
            define(head[1], bytes_of(shape, "i1" if operation.startswith("arith.cmp") else dtype), operation, line)
        if text.rstrip().endswith("{"):
            scopes.append(Scope(start=line if "scf.for" in text else None))
            if carried and head:
                arguments = re.findall(r"(%\w+) =", carried[1])
                types = re.findall(r"\w+(?:<[^>]*>)?", carried[2])
                for index, (argument, kind) in enumerate(zip(arguments, types, strict=True)):
                    found = TENSOR.match(kind)
                    if found:
                        size = bytes_of(*found.groups())
                        define(argument, size, "scf.for", line)
                        scopes[-1].results[f"{head[1]}#{index}" if len(types) > 1 else head[1]] = size
    return tiles, loops


def bytes_of(shape: str, dtype: str) -> int:
    return math.prod(int(size) for size in shape.split("x") if size) * BITS[dtype] // 8
