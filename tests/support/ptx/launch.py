"""A kernel launch: what the driver is asked for."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.ptx.tensor_map import TensorMap

SCALARS = {"8": 1, "16": 2, "32": 4, "64": 8}
"""Bytes of a PTX type by its bits."""


class Parameter(NamedTuple):
    """Of a kernel, as its PTX declares it."""

    name: str
    size: int
    """Bytes."""


class Launch(NamedTuple):
    kernel: str
    arguments: list[bytes]
    grid: tuple[int, int, int]
    """CTAs."""
    block: tuple[int, int, int]
    """Threads."""
    cluster: tuple[int, int, int]
    """CTAs."""
    shared_bytes: int
    """Of dynamic shared memory."""
    tensor_maps: list[TensorMap]
    """What `tensor_map.handle` numbers among the arguments."""

    def check(self, ptx: str) -> None:
        """Raises ValueError unless the PTX's kernel takes such arguments and threads."""
        declared = parameters_of(ptx, self.kernel)
        sizes, given = [parameter.size for parameter in declared], [len(x) for x in self.arguments]
        if sizes != given:
            raise ValueError(f"{self.kernel} takes parameters of {sizes} bytes, the host gives {given}")
        threads = re.search(r"\.reqntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", _head_and_rest(ptx, self.kernel)[1])
        if threads and tuple(int(n or 1) for n in threads.groups()) != self.block:
            raise ValueError(f"{self.kernel} takes {threads[0]}, the host gives {self.block}")
        if any(of % by for of, by in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"a grid of {self.grid} is not made of clusters of {self.cluster}")


def parameters_of(ptx: str, kernel: str) -> list[Parameter]:
    head, _ = _head_and_rest(ptx, kernel)
    found = []
    for declared in filter(None, (part.strip() for part in head.split(","))):
        match = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(?:\.ptr\s[^%]*?)?(\w+)(?:\[(\d+)\])?", declared)
        if match is None:
            raise NotImplementedError(f"a parameter declared as {declared!r}")
        bits, name, count = match.groups()
        found.append(Parameter(name, SCALARS[bits] * int(count or 1)))
    return found


def _head_and_rest(ptx: str, kernel: str) -> tuple[str, str]:
    """Between the parentheses of an entry, and what follows up to its body."""
    match = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(([^)]*)\)([^{{]*)\{{", ptx)
    if match is None:
        raise ValueError(f"the PTX has no kernel {kernel}: {re.findall(r'.entry (.*)[(]', ptx)}")
    return match[1], match[2]
