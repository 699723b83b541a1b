"""mma.sync: a warp's product, from and to registers. Sums are in a fixed order: `values.product`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.decode import Run, opcode
from tests.ptx.listing import Instruction, Listing, names
from tests.ptx.registers import LANES, Threads
from tests.ptx.values import numbers, product


def of_lanes(x: Any) -> Any:
    """(warp, row, column) as registers, (register, thread).

    Of each 8 x 8 numbers, lane 4 i + j holds those of row i in columns 2 j and 2 j + 1; registers go through the two of
    a pair, then rows i and i + 8, then each 8 columns.
    """
    warps, _, columns = x.shape
    of = x.reshape(warps, 2, 8, columns // 8, 4, 2)
    return of.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, warps * LANES)


def pairs(registers: list[Any], kind: str) -> Any:
    """The two numbers in registers of each thread: (register, warp, i, j, number)."""
    return numbers(np.stack(registers).view("u2"), kind).reshape(len(registers), -1, 8, 4, 2)


def left_operand(registers: list[Any], kind: str) -> Any:
    """(warp, row, k), of registers as `of_lanes` lays them out, in pairs."""
    of = pairs(registers, kind).reshape(2, 2, -1, 8, 4, 2)
    return of.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)


def right_operand(registers: list[Any], kind: str) -> Any:
    """(warp, k, column): a lane has its pairs of one column."""
    return pairs(registers, kind).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)


@opcode(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(?:bf16|f16)\.f32")
def multiply(program: Listing, of: Instruction, kind: str) -> Run:
    sums, before = ([program.key(x, "f4") for x in names(of.operands[i])] for i in (0, 3))
    left, right = ([program.key(x, "u4") for x in names(of.operands[i])] for i in (1, 2))

    def run(threads: Threads) -> None:
        threads.whole_warps("mma.sync")
        rows = left_operand([threads.take(key) for key in left], kind)
        columns = right_operand([threads.take(key) for key in right], kind)
        totals = [threads.take(key) + own for key, own in zip(before, of_lanes(product(rows, columns)), strict=True)]
        for key, total in zip(sums, totals, strict=True):
            threads.put(key, total)

    return run
