"""A kernel's PTX as instructions: labels and registers of inner scopes get names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

KINDS = {"pred": "?", "b8": "u1", "u8": "u1", "s8": "u1", "f32": "u4", "f64": "u8"}
KINDS |= {f"{letter}{bits}": f"u{bits // 8}" for letter in "bus" for bits in (16, 32, 64)}
"""What a register holds, as a NumPy type: its bits."""
NAME = re.compile(r"(?<![\w%.$@])[A-Za-z_]\w*(?![\w.:])")
LABEL = re.compile(r"([$\w]+):(?!:)\s*")


class Instruction(NamedTuple):
    text: str
    predicate: str
    """A register, or nothing."""
    negated: bool
    name: str
    """With its modifiers."""
    operands: list[str]


class Address(NamedTuple):
    """`[register+offset]`."""

    key: int
    offset: int

    def of(self, threads: Any) -> Any:
        """Values of each thread, int64; not to be written to. A sum with a register of 32 bits wraps, as on a GPU."""
        address = threads.take(self.key)
        if address.dtype == "u4":
            return (address + np.uint32(self.offset & 0xFFFFFFFF)).astype("i8")
        return address.astype("i8") + self.offset if address.dtype != "i8" or self.offset else address


class Scope:
    """What a pair of braces declares."""

    def __init__(self, number: int, outer: Scope | None) -> None:
        self.number, self.outer = number, outer
        self.names: dict[str, str] = {}
        self.renames = False

    def declare(self, name: str) -> str:
        self.names[name] = name if name[0] in "%$" else f"{name}@{self.number}"
        self.renames |= self.names[name] != name
        return self.names[name]

    def find(self, name: str) -> str:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return name


PARAMETER = r"\.param (?:\.align \d+ )?\.(\w+) (?:\.ptr (?:\.\w+ )?(?:\.align \d+ )?)?(\w+)(?:\[(\d+)\])?"
"""Kind, name and, for bytes, number; a pointer may say what it points to."""


class Listing:
    """The one kernel of a PTX module."""

    def __init__(self, ptx: str) -> None:
        self.keys: list[tuple[str, str]] = []
        self._keys: dict[tuple[str, str], int] = {}
        self._in_braces: dict[tuple[str, str], list[int]] = {}
        self._addresses: dict[str, Address] = {}
        entries = re.findall(r"\.entry (\w+)\(", ptx)
        if len(entries) != 1:
            raise NotImplementedError(f"a module of {len(entries)} kernels: {entries}")
        (self.name,) = entries
        head, _, body = ptx.partition(".reqntid")
        block, _, _ = body.partition("\n")
        sizes = [*(int(x) for x in block.split(",")), 1, 1]
        self.block = sizes[0], sizes[1], sizes[2]
        self.threads = self.block[0] * self.block[1] * self.block[2]
        declared = re.findall(PARAMETER, head)
        self.parameters = [name for _, name, _ in declared]
        self.parameter_sizes = [int(count or 1) * int(KINDS[kind][1:]) for kind, _, count in declared]
        """Bytes."""
        self.symbols = re.findall(r"\.shared .*?(\w+)\[\]", head)
        """Dynamic shared memory."""
        self.kinds: dict[str, str] = {}
        """NumPy types of registers, and of the families %p, %r, %rd."""
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        branches: list[tuple[int, Scope]] = []
        for statement, scope in self._statements(body[body.index("{") + 1 : body.rindex("}")]):
            if statement.startswith(".reg"):
                self._declare(statement, scope)
            elif not statement.startswith("."):
                of = self._instruction(statement, scope)
                if of.name in ("bra", "bra.uni"):
                    branches.append((len(self.instructions), scope))
                self.instructions.append(of)
        for at, scope in branches:  # labels are declared behind branches, too
            of = self.instructions[at]
            self.instructions[at] = of._replace(operands=[scope.find(of.operands[0])])

    def kind(self, register: str) -> str:
        """Raises KeyError for what no .reg declares."""
        return self.kinds.get(register) or self.kinds[register.rstrip("0123456789")]

    def key(self, operand: str, kind: str) -> int:
        """The number by which threads find an operand, seen as a type (`Registers.keys`)."""
        found = self._keys.get((operand, kind))
        if found is None:
            found = self._keys[operand, kind] = len(self.keys)
            self.keys.append((operand, kind))
        return found

    def keys_of(self, operand: str, kind: str) -> list[int]:
        """Those of registers in braces."""
        found = self._in_braces.get((operand, kind))
        if found is None:
            found = self._in_braces[operand, kind] = [self.key(x, kind) for x in names(operand)]
        return found

    def result(self, register: str, kind: str) -> int:
        """The same for a target, which may be wider than what is written to it; that is extended by its sign."""
        own, of = np.dtype(self.kind(register)), np.dtype(kind)
        if own.itemsize > of.itemsize:
            kind = f"{'i' if of.kind == 'i' else 'u'}{own.itemsize}"
        return self.key(register, kind)

    def address(self, operand: str) -> Address:
        if operand not in self._addresses:
            base, _, offset = operand[1:-1].partition("+")
            base = base.strip()
            kind = self.kind(base).replace("u", "i") if base[0] == "%" or "@" in base else "i8"
            key = self.key(base, "u4" if kind == "i4" else "i8")
            self._addresses[operand] = Address(key, int(offset.strip() or "0", 0))
        return self._addresses[operand]

    def _statements(self, body: str) -> Iterator[tuple[str, Scope]]:
        scope, scopes, buffer = Scope(0, None), 0, ""
        for token in re.findall(r"[{};]|[^{};]+", re.sub(r"//[^\n]*", "", body)):
            if token in "{}" and not buffer.strip():
                scopes += token == "{"
                scope = Scope(scopes, scope) if token == "{" else scope.outer or scope
            elif token != ";":
                if not buffer.strip():
                    token = token.lstrip()
                    while label := LABEL.match(token):
                        self.labels[scope.declare(label[1])] = len(self.instructions)
                        token = token[label.end() :]
                buffer += token
            else:
                if buffer.strip():
                    yield " ".join(buffer.split()), scope
                buffer = ""

    def _declare(self, statement: str, scope: Scope) -> None:
        found = re.fullmatch(r"\.reg \.(\w+) (.*)", statement)
        if found is None:
            raise NotImplementedError(f"PTX: {statement}")
        for name in found[2].split(","):
            many = re.fullmatch(r"(.+?)<(\d+)>", name.strip())
            if many is None:
                self.kinds[scope.declare(name.strip())] = KINDS[found[1]]
            elif many[1][0] == "%":
                self.kinds[many[1]] = KINDS[found[1]]
            else:
                self.kinds |= {scope.declare(f"{many[1]}{i}"): KINDS[found[1]] for i in range(int(many[2]))}

    @staticmethod
    def _instruction(statement: str, scope: Scope) -> Instruction:
        found = re.fullmatch(r"(?:@(!?)(\S+) )?(\S+)\s*(.*)", statement)
        if found is None:
            raise NotImplementedError(f"PTX: {statement}")
        negated, predicate, name, rest = found.groups()
        if (scope.outer or scope.renames) and name not in ("bra", "bra.uni"):
            rest = NAME.sub(lambda found: scope.find(found[0]), rest)
        return Instruction(statement, scope.find(predicate or ""), negated == "!", name, operands_of(rest))


def operands_of(text: str) -> list[str]:
    """Parts between commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text)]


def names(operand: str) -> list[str]:
    return [part.strip() for part in operand[1:-1].split(",")] if operand[0] == "{" else [operand]
