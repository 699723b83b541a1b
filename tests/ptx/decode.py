"""From an instruction to a function of the threads that run it; each family of instructions registers its own.

A pattern is of the whole name with all modifiers, so that what is not understood raises NotImplementedError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from tests.ptx.listing import Instruction, Listing
from tests.ptx.registers import Threads


class Flow(NamedTuple):
    """Where threads go on that do not all go on with the next instruction; without threads, others do."""

    at: int
    threads: Threads | None


Run = Callable[[Threads], "Flow | None"]
Decoder = Callable[..., Run]
"""Takes the kernel, the instruction, and the groups of the pattern."""
DECODERS: list[tuple[re.Pattern[str], Decoder]] = []


def opcode(pattern: str) -> Callable[[Decoder], Decoder]:
    def register(decoder: Decoder) -> Decoder:
        DECODERS.append((re.compile(pattern), decoder))
        return decoder

    return register


def action(pattern: str) -> Callable[[Callable[..., Flow | None]], Callable[..., Flow | None]]:
    """For a function of the threads, the instruction and the groups: of what is rare, nothing is decoded ahead."""

    def register(act: Callable[..., Flow | None]) -> Callable[..., Flow | None]:
        opcode(pattern)(lambda program, of, *groups: lambda threads: act(threads, of, *groups))
        return act

    return register


@lru_cache(4096)
def find(name: str) -> tuple[Decoder, tuple[Any, ...]]:
    for pattern, decoder in DECODERS:
        if found := pattern.fullmatch(name):
            return decoder, found.groups()
    raise NotImplementedError(f"PTX instruction {name}")


def decode(program: Listing, of: Instruction) -> Run:
    decoder, groups = find(of.name)
    run = decoder(program, of, *groups)
    if not of.predicate:
        return run
    predicate, negated = program.key(of.predicate, "?"), of.negated

    def predicated(threads: Threads) -> Flow | None:
        yes, no = threads.split(predicate)
        if negated:
            yes, no = no, yes
        if yes is None:
            return None
        flow = run(yes)
        if no is None or flow is None:
            return flow
        if flow.threads is not None:
            threads.cta.add(flow.at, flow.threads.bits)
        return Flow(threads.cta.pc + 1, no)

    return predicated


def unsupported(of: Instruction, what: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: {of.text}")
