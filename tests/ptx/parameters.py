"""Kernels' parameters, as CuTe DSL lays them out: what is dynamic of a value, in structs as C has them.

memref         its address, sizes, strides
coord_tensor   sizes
TMA atom       the driver's 128 bytes, for which launch.py has a stand-in
MMA atom       its operands
divisor        what a fast division needs
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.ptx.ir import Atom, Composed, Coordinates, Layout, View, dynamic, template
from tests.ptx.launch import TensorMap, blob


class Packed(NamedTuple):
    """Bytes as a struct of C has them."""

    data: bytes
    alignment: int


def structure(parts: Iterable[Packed]) -> Packed:
    data, alignment = b"", 1
    for part in parts:
        data += bytes(-len(data) % part.alignment) + part.data
        alignment = max(alignment, part.alignment)
    return Packed(data + bytes(-len(data) % alignment), alignment)


def integer(value: int, bits: int) -> Packed:
    size = max(1, bits // 8)
    return Packed((value & (1 << 8 * size) - 1).to_bytes(size, "little"), size)


def integers(pattern: Any, value: Any) -> Packed:
    return structure(integer(number, of.bits) for number, of in dynamic(pattern, value))


def divisor(number: int) -> Packed:
    """What n // number needs: (t + (n - t >> s1)) >> s2 for the upper half t of the product n m.

    Granlund and Montgomery, Division by invariant integers using multiplication (PLDI 1994), figure 4.1.
    """
    if not 1 <= number < 1 << 31:
        raise ValueError(f"a fast division by {number}")
    bits = (number - 1).bit_length()
    multiplier = (1 << 32) * ((1 << bits) - number) // number + 1
    return Packed(struct.pack("<iIBBxx", number, multiplier, min(bits, 1), max(bits - 1, 0)), 4)


def packed(type_: str, value: Any, maps: list[TensorMap]) -> Packed | None:
    """A kernel's parameter; None: nothing of it is left at run time."""
    if isinstance(value, TensorMap):
        maps.append(value)
        return Packed(blob(len(maps) - 1), 64)
    if isinstance(value, Atom):
        parts = [packed(t, x, maps) for t, x in zip(value.types, value.operands, strict=True)]
        return structure(part for part in parts if part is not None) if parts else None
    if type_.startswith("!cute.fast_divmod_divisor<32>"):
        return divisor(value)
    if type_ == "f32":
        return Packed(struct.pack("<f", value), 4)
    if vector := re.fullmatch(r"vector<(\d+)x(i\d+)>", type_):
        bits = int(vector[2][1:])
        data = b"".join(integer(number, bits).data for number in value)
        return Packed(data, len(data))
    pattern = template(type_)
    if isinstance(pattern, Composed):
        pattern, value = pattern.layout, value.layout
    if isinstance(pattern, View):
        shape, stride = (integers(*x) for x in zip(pattern.layout, value.layout, strict=True))
        return structure([integer(value.address, 64), structure([shape, stride])])
    if isinstance(pattern, Coordinates):
        parts_ = [
            integers(pattern.first, value.first),
            *(integers(*x) for x in zip(pattern.layout, value.layout, strict=True)),
        ]
        whole = structure(parts_)
    elif isinstance(pattern, Layout):
        whole = structure(integers(*x) for x in zip(pattern, value, strict=True))
    else:
        whole = integers(pattern, value)
    return whole if whole.data else None
