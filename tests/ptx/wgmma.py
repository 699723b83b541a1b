"""WGMMA: products of a warpgroup, whose sums are NaN until they are waited for.

Its operands are of 16 bits, the left one from registers or shared memory. It reads at once (`late`), or else when it is
waited for: the opposite of copies, so that products meet what copies have yet to bring, or have brought already. Sums
are in a fixed order: `values.product`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.ptx.cta import NAN, Cta, Groups
from tests.ptx.decode import action, unsupported
from tests.ptx.listing import Instruction
from tests.ptx.matrices import Layout, layout_of, places
from tests.ptx.observer import Operation, Region
from tests.ptx.registers import GROUP, LANES, Threads
from tests.ptx.values import numbers, product
from tests.ptx.warp_mma import left_operand, of_lanes

SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


class Product(NamedTuple):
    sums: list[int]
    left: Any
    """Keys of registers, or the places of a tile."""
    right: Any
    kind: str
    add: bool


class Warpgroup:
    """The products that a warpgroup has not waited for."""

    def __init__(self) -> None:
        self.products = Groups()
        self.sums: dict[int, Any] = {}
        """Behind the NaN of registers."""


def warpgroups(threads: Threads) -> list[tuple[Threads, Warpgroup]]:
    """Those that take part."""
    cta = threads.cta
    found = []
    for number in sorted({warp * LANES // GROUP for warp in threads.whole_warps("wgmma")}):
        bits = ((1 << GROUP) - 1) << number * GROUP
        if threads.bits & bits != bits:
            raise RuntimeError("only some warps of a warpgroup take part")
        of = cta.threads(bits)
        if of is not None:
            found.append((of, cta.state_of(f"wgmma {number}", Warpgroup)))
    return found


def layout(descriptor: int) -> Layout:
    if descriptor >> 46 & 0xFFFF:
        raise NotImplementedError(f"a matrix descriptor of WGMMA {descriptor:#x}")
    return layout_of(descriptor, SWIZZLES[descriptor >> 62])


@action(r"wgmma\.fence\.sync\.aligned")
def fence(threads: Threads, of: Instruction) -> None:
    threads.cta.observer.fences(threads, "wgmma.fence")


@action(r"wgmma\.commit_group\.sync\.aligned")
def commit(threads: Threads, of: Instruction) -> None:
    for _, group in warpgroups(threads):
        group.products.commit()
    threads.cta.observer.commits_group(threads, "wgmma")


@action(r"wgmma\.wait_group\.sync\.aligned")
def wait(threads: Threads, of: Instruction) -> None:
    most = int(of.operands[0])
    cta = threads.cta
    for each, group in warpgroups(threads):
        for ended in group.products.wait(most):
            if not cta.cluster.late:
                add_product(each, group, ended)
        unfinished = [*group.products.groups, group.products.started]
        waiting = {x for products in unfinished for started in products for x in started.sums}
        for x in group.sums.keys() - waiting:
            each.put(x, group.sums.pop(x))
    cta.observer.waits_group(threads, "wgmma", most)


@action(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(?:bf16|f16)")
def multiply(threads: Threads, of: Instruction, columns: str, kind: str) -> None:
    keys_of = threads.cta.program.keys_of
    sums, in_registers = keys_of(of.operands[0], "f4"), of.operands[1][0] == "{"
    flags = of.operands[4:]
    if flags[:2] != ["1", "1"] or len(sums) != int(columns) // 2:
        raise unsupported(of, "wgmma with factors")
    for each, group in warpgroups(threads):
        cta = each.cta
        right = places(layout(each.agree(of.operands[2], "u8", "a descriptor")), int(columns), flags[-1] == "1")
        reads = [right]
        if in_registers:
            left: Any = keys_of(of.operands[1], "u4")
        else:
            left = places(layout(each.agree(of.operands[1], "u8", "a descriptor")), 64, flags[2] == "1")
            reads.append(left)
        started = Product(sums, left, right, kind, bool(each.agree(of.operands[3], "?", "the sums")))
        for x in sums:
            if x not in group.sums:
                group.sums[x] = each.take(x).copy()
            each.views[x].view("u4")[:] = NAN
        group.products.started.append(started)
        cta.observer.starts(each, Operation("wgmma", [Region(cta, "shared", x, 2) for x in reads], []))
        if cta.cluster.late:
            add_product(each, group, started)


def tile_of(cta: Cta, where: Any, kind: str) -> Any:
    return numbers(cta.shared.view("u2")[where // 2], kind)


def add_product(threads: Threads, group: Warpgroup, of: Product) -> None:
    if isinstance(of.left, list):
        left = left_operand([threads.take(key) for key in of.left], of.kind)
    else:
        left = tile_of(threads.cta, of.left, of.kind).reshape(4, 16, 16)
    right = tile_of(threads.cta, of.right, of.kind)
    for x, own in zip(of.sums, of_lanes(product(left, right.T)), strict=True):
        group.sums[x] = group.sums[x] + own if of.add else own
