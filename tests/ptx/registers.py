"""Registers of a CTA's threads, and sets of threads that run together.

A register is an array over all threads. An instruction sees it through a view of its threads, of the type that it
takes; views are made once and kept, for there are few sets of threads and many steps. Of a set with gaps the view spans
all from the first to the last thread, and `mask` tells which of them it has.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.ptx.cta import Cta

LANES = 32
GROUP = 4 * LANES
"""Threads of a warpgroup."""
PARAMETERS = 1 << 60
"""Where the generic address space of this machine has the kernel's parameters, 64 KiB apart."""
MOST_SETS = 4096
BLOCK = 64
"""Registers that are allocated, and reset, together."""


def bits_of_literal(text: str) -> int:
    return int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0)


class Made(dict[int, Any]):
    """Values that are made when they are first asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __missing__(self, key: int) -> Any:
        self[key] = self.make(key)
        return self[key]


class Registers:
    """Those of one CTA. Keys are numbers of `Program.key`: pairs of an operand and the type it is seen as."""

    def __init__(self, keys: list[tuple[str, str]], kinds: Any, threads: int) -> None:
        self.keys, self.kinds, self.threads = keys, kinds, threads
        self.bits: dict[str, Any] = {}
        self._blocks: list[Any] = []
        """Of registers of one kind."""
        self._free: dict[str, list[Any]] = {}
        self.constants: dict[tuple[str, str], Any] = {}
        self.special: dict[str, Any] = {}
        """Of %tid.x and the like: a number, or one for each thread."""
        self._whole = Made(self._seen_as)
        """Of all threads, by key."""
        self._views: dict[tuple[int, int], Made] = {}

    def reset(self, special: dict[str, Any]) -> None:
        """For another CTA: 0xAB in each byte that nothing has written, no predicate holds."""
        self.special = special
        for block in self._blocks:
            self._clear(block)
        for (operand, _), constant in self.constants.items():
            if operand in special:
                constant[:] = special[operand]

    def views(self, start: int, end: int) -> Made:
        """By key, what the threads from one to another have."""
        if (start, end) not in self._views:
            if len(self._views) > MOST_SETS:
                self._views.clear()
            self._views[start, end] = Made(lambda key: self._whole[key][start:end])
        return self._views[start, end]

    def _seen_as(self, key: int) -> Any:
        operand, kind = self.keys[key]
        if operand in self.special:
            return self._constant(operand, kind, self.special[operand])
        if operand[0] == "%" or "@" in operand:
            return self._seen(self.register(operand), kind)
        return self._constant(operand, kind, bits_of_literal(operand))

    def register(self, name: str) -> Any:
        if name not in self.bits:
            kind = self.kinds(name)
            free = self._free.setdefault(kind, [])
            if not free:
                block = np.empty((BLOCK, self.threads), kind)
                self._clear(block)
                self._blocks.append(block)
                free.extend(block)
            self.bits[name] = free.pop()
        return self.bits[name]

    @staticmethod
    def _clear(block: Any) -> None:
        block.view("u1")[:] = 0 if block.dtype == np.bool_ else 0xAB

    def _constant(self, operand: str, kind: str, value: Any) -> Any:
        pair, base = kind.endswith("x2"), kind.removesuffix("x2")
        of = np.dtype(base)
        if base == "?":
            return np.full(self.threads, bool(value))
        size = of.itemsize * (1 + pair)
        if (operand, f"u{size}") not in self.constants:
            whole = value & (1 << 8 * size) - 1 if isinstance(value, int) else value
            self.constants[operand, f"u{size}"] = np.full(self.threads, whole, f"u{size}")
        return self._seen(self.constants[operand, f"u{size}"], kind)

    @staticmethod
    def _seen(register: Any, kind: str) -> Any:
        """As another type of as many bytes, as pairs (`f4x2`), or a part, 0 being the lowest (`u4:1`)."""
        base, _, part = kind.partition(":")
        pairs = base.removesuffix("x2")
        if register.dtype == np.bool_ or pairs == "?":
            if register.dtype != np.dtype(base):
                raise TypeError(f"a predicate as {kind}, or a number as a predicate")
            return register
        seen = register.view(pairs)
        if pairs != base:
            return seen.reshape(-1, 2)
        count = len(seen) // len(register)
        return seen[int(part or 0) :: count] if count > 1 else seen


class Threads:
    """Threads of one CTA, as bits of a number; they share a program counter."""

    def __init__(self, cta: Cta, bits: int) -> None:
        self.cta, self.bits = cta, bits
        self.first, end = (bits & -bits).bit_length() - 1, bits.bit_length()
        self.count = bits.bit_count() if hasattr(bits, "bit_count") else bin(bits).count("1")
        size = end - self.first
        self.mask: Any = None
        """Over the span, where it has gaps."""
        if self.count < size:
            self.first, end = self.first // LANES * LANES, -(-end // LANES) * LANES
            size = end - self.first
            raw = (bits >> self.first).to_bytes(-(-size // 8), "little")
            self.mask = np.unpackbits(np.frombuffer(raw, "u1"), bitorder="little")[:size].view(np.bool_)
        self.where = True if self.mask is None else self.mask
        """For NumPy."""
        self.where_pairs = True if self.mask is None else self.mask[:, None]
        self.span = slice(self.first, end)
        self.views = cta.registers.views(self.first, end)
        numbers = np.arange(self.first, end)
        self.numbers = numbers if self.mask is None else numbers[self.mask]
        self.lanes = self.numbers % LANES
        self.warp_of = self.numbers // LANES
        """Of each thread."""
        warps, starts = np.unique(self.warp_of, return_index=True)
        self.warps: list[int] = warps.tolist()
        self.by_warp = [slice(*ends) for ends in pairwise([*starts.tolist(), self.count])]
        """Which of these threads are of each warp."""
        self._splits: dict[bytes, tuple[Threads | None, Threads | None]] = {}

    def take(self, key: int) -> Any:
        """The values of these threads alone, not to be written to."""
        values = self.views[key]
        return values if self.mask is None else values[self.mask]

    def put(self, key: int, values: Any) -> None:
        if self.mask is None:
            self.views[key][...] = values
        else:
            self.views[key][self.mask] = values

    def split(self, predicate: int) -> tuple[Threads | None, Threads | None]:
        """Those for which a predicate holds, and the others."""
        raw = self.views[predicate].tobytes()
        if raw not in self._splits:
            if len(self._splits) > MOST_SETS:
                self._splits.clear()
            packed = np.packbits(np.frombuffer(raw, "u1"), bitorder="little").tobytes()
            chosen = int.from_bytes(packed, "little") << self.first & self.bits
            self._splits[raw] = self.cta.threads(chosen), self.cta.threads(self.bits & ~chosen)
        return self._splits[raw]

    def some(self, chosen: Any) -> Threads:
        """Args: a boolean for each of these threads, in order, some of them true."""
        bits = sum(1 << thread for thread in self.numbers[chosen].tolist())
        return self.cta.threads(bits)  # type: ignore[return-value]

    def each(self) -> list[Threads]:
        """One by one."""
        return [self.cta.threads(1 << thread) for thread in self.numbers.tolist()]  # type: ignore[misc]

    def one(self, what: str) -> int:
        """The thread that alone starts something."""
        if self.count != 1:
            raise RuntimeError(f"{what} by {self.count} threads, of warps {self.warps}: it takes one thread")
        return self.first

    def value(self, operand: str, kind: str) -> Any:
        """Those of an operand that is not decoded ahead."""
        return self.take(self.cta.program.key(operand, kind))

    def set(self, operand: str, kind: str, values: Any) -> None:
        self.put(self.cta.program.key(operand, kind), values)

    def addresses(self, operand: str) -> Any:
        """As `Address.of`."""
        return self.cta.program.address(operand).of(self)

    def agree(self, operand: str, kind: str, what: str) -> int:
        """The value that all of these threads have."""
        values = self.value(operand, kind)
        if values.tobytes() != values[:1].tobytes() * len(values):
            raise RuntimeError(f"threads do not agree about {what}: {sorted({*values.tolist()})}")
        return int(values[0])

    def whole_warps(self, what: str) -> list[int]:
        if self.count != LANES * len(self.warps):
            raise RuntimeError(
                f"{what}: only some lanes of a warp take part, {self.count} threads of warps {self.warps}"
            )
        return self.warps
