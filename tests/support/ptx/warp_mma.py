"""mma.sync: a warp's product, from and to registers. Sums are in a fixed order: `values.product`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx.decode import Run, opcode
from tests.support.ptx.listing import Instruction, names
from tests.support.ptx.registers import LANES
from tests.support.ptx.values import numbers, product

if TYPE_CHECKING:
    from tests.support.ptx.program import Program
    from tests.support.ptx.registers import Threads

ROW, COLUMN = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2
"""i and 2 j of lane 4 i + j: where it has two of 8 x 8 numbers of a matrix in registers."""


def of_lanes(x: Any) -> list[Any]:
    """(warp, row, column) as registers: a lane holds two numbers of rows i and i + 8 in columns 2 j of each 8."""
    places = [(8 * r, c + 8 * n) for n in range(x.shape[2] // 8) for r in range(2) for c in range(2)]
    return [x[:, ROW + row, COLUMN + column].flatten() for row, column in places]


def pairs(register: Any, kind: str) -> Any:
    """The two numbers in a register of each thread: (warp, lane, number)."""
    return numbers(np.ascontiguousarray(register).view("u2"), kind).reshape(-1, LANES, 2)


def left_operand(registers: list[Any], kind: str) -> Any:
    """(warp, row, k), of registers as `of_lanes` lays them out, in pairs."""
    left = np.zeros((len(registers[0]) // LANES, 16, 16), "f4")
    for i, register in enumerate(registers):
        of = pairs(register, kind)
        for c in range(2):
            left[:, ROW + 8 * (i % 2), COLUMN + c + 8 * (i // 2)] = of[..., c]
    return left


@opcode(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(?:bf16|f16)\.f32")
def multiply(program: Program, of: Instruction, kind: str) -> Run:
    sums, before = ([program.key(x, "f4") for x in names(of.operands[i])] for i in (0, 3))
    left, right = ([program.key(x, "u4") for x in names(of.operands[i])] for i in (1, 2))

    def run(threads: Threads) -> None:
        warps = len(threads.whole_warps("mma.sync"))
        columns = np.zeros((warps, 16, 8), "f4")
        for i, key in enumerate(right):
            given = pairs(threads.take(key), kind)
            for c in range(2):
                columns[:, COLUMN + c + 8 * i, ROW] = given[..., c]
        rows = left_operand([threads.take(key) for key in left], kind)
        totals = [threads.take(key) + own for key, own in zip(before, of_lanes(product(rows, columns)), strict=True)]
        for key, total in zip(sums, totals, strict=True):
            threads.put(key, total)

    return run
