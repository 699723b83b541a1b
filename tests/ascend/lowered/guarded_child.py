"""Runs lowered kernels over their grids, each twice, with PROT_NONE pages around its tensors. Standard library only.

    a line of stdin: a request (execution.py)  ->  regions written beside their inputs, and a line of stdout

In the first placement each region ends where a guard page begins, in the second it begins where one ends. A program
that leaves its tensors dies of SIGSEGV; the request's `progress` file then holds which program of which placement, the
address of the access, and those of the regions.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import sys
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
SLACK = 0xA5
SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
SCRATCH_BYTES = 1 << 16

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Memory between two guard pages, filled from a file."""

    def __init__(self, content: bytes, *, at_end: bool) -> None:
        self.size = len(content)
        inner = max(PAGE, -(-self.size // PAGE) * PAGE)
        # Python's mmap has no PROT_NONE: 0 is its value on every Linux.
        whole = libc.mmap(None, inner + 2 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if whole is None or whole == ctypes.c_void_p(-1).value:
            raise MemoryError(f"mmap of {inner} bytes failed")
        self.mapped = whole, inner + 2 * PAGE
        start = whole + PAGE
        if libc.mprotect(start, inner, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"mprotect of {inner} bytes failed")
        ctypes.memset(start, SLACK, inner)
        slack = inner - self.size
        self.address = start + (slack if at_end else 0)
        self.slack = (start if at_end else start + self.size, slack)
        ctypes.memmove(self.address, content, self.size)

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def slack_is_untouched(self) -> bool:
        return ctypes.string_at(*self.slack) == bytes([SLACK]) * self.slack[1]

    def unmap(self) -> None:
        libc.munmap(*self.mapped)


def pack(kinds: list[str], values: list[Any]) -> list[Any]:
    """C arguments: a memref is two pointers, an offset, a size and a stride."""
    packed: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == "memref":
            address, elements = value
            pointer = ctypes.c_void_p(address)
            packed += [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]
        else:
            scalar = SCALARS[kind](value)
            if isinstance(value, int) and scalar.value != value:
                raise OverflowError(f"{value} is no {kind}")
            packed.append(scalar)
    return packed


def run(request: dict[str, Any], progress: Any) -> dict[str, Any]:
    library = ctypes.CDLL(request["library"])
    function = getattr(library, request["function"])
    function.restype = None
    library.note_faults_at(ctypes.byref(progress, 3 * 8))
    grid = [*request["grid"], 1, 1][:3]
    results: list[list[bytes]] = []
    for placement in (1, 2):
        at_end = placement == 1
        regions = [Region(Path(path).read_bytes(), at_end=at_end) for path in request["regions"]]
        progress[4:] = [placement, *(region.address for region in regions)]
        lock, workspace = (Region(bytes(SCRATCH_BYTES), at_end=at_end) for _ in range(2))
        values = [
            (regions[value["region"]].address + value["offset"], value["elements"])
            if "region" in value
            else value["value"]
            for value in request["arguments"]
        ]
        scratch = [(lock.address, SCRATCH_BYTES), (workspace.address, SCRATCH_BYTES)]
        packed = pack(request["kinds"], [*scratch, *values, *grid, 0, 0, 0])
        x_argument, y_argument, z_argument = packed[-3:]
        for z, y, x in itertools.product(*(range(size) for size in reversed(grid))):
            x_argument.value, y_argument.value, z_argument.value = x, y, z
            progress[:3] = [x, y, z]
            function(*packed)
            library.end_program()
        for index, region in enumerate(regions):
            if not region.slack_is_untouched():
                return {"outside": "written outside its tensors", "region": index}
        results.append([region.content() for region in regions])
        for region in (*regions, lock, workspace):
            region.unmap()
    for index, (first, second) in enumerate(zip(*results, strict=True)):
        if first != second:
            return {"outside": "results depend on memory outside the tensors", "region": index}
        Path(request["regions"][index] + ".out").write_bytes(first)
    return {}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        size = (5 + len(request["regions"])) * 8
        with open(request["progress"], "r+b") as file:
            shared = mmap.mmap(file.fileno(), size)
        answer = run(request, (ctypes.c_int64 * (size // 8)).from_buffer(shared))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
