"""Count two habits that keep our prose from reading as English, and fail where a folder has more than its limit.

Openings: docstrings that begin with Of, That, What, Whether, Which or How. Each docstring should stand alone: a noun
phrase ("Number of ..."), an imperative, or "True if ...".
Words: behind, as of, likewise, nobody, somebody, lie/lies/lay/lying, in docstrings, comments and pages, outside code
blocks and rendered tables.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPENING = re.compile(r"(Of|That|What|Whether|Which|How)\b")
WORD = re.compile(r"\b(behind|as of|likewise|nobody|somebody|lie|lies|lay|lying)\b", re.IGNORECASE)
NOT_PROSE = re.compile(r"<!-- table: .*?<!-- end -->|^```.*?^```", re.DOTALL | re.MULTILINE)
LIMITS = {
    "nsa": (0, 0),
    "dispatch": (0, 0),
    "ascend_kernels": (0, 0),
    "cute_kernels": (0, 0),
    "examples": (0, 0),
    "README.md": (0, 0),
    "docs": (0, 6),  # all in architecture.md, which is to be rewritten
}
"""Most openings and words allowed, by folder or page."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and the strings that document an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def comments(source: str) -> list[str]:
    """Comments of a source; consecutive lines are one, since a line may end between two words."""
    runs: list[str] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            runs.append(f"{runs.pop()} {text}" if last == line - 1 else text)
            last = line
    return runs


def habits(path: Path) -> tuple[list[str], list[str]]:
    """Openings and words in a Python file or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [], WORD.findall(" ".join(NOT_PROSE.sub("", text).split()))
    documented = [" ".join(each.split()) for each in docstrings(ast.parse(text))]
    prose = " | ".join([*documented, *comments(text)])
    return [each[:40] for each in documented if OPENING.match(each)], WORD.findall(prose)


def check(root: Path, limits: dict[str, tuple[int, int]]) -> bool:
    """Print each folder's counts, and what was found if there is more than its limit; True if there is not."""
    passed = True
    for name, limit in limits.items():
        place = root / name
        files = [place] if place.is_file() else sorted({*place.rglob("*.py"), *place.rglob("*.md")})
        found = {file.relative_to(root): habits(file) for file in files}
        openings, words = (sum(map(len, each)) for each in zip(*found.values(), strict=True))
        print(f"{name}: {openings} openings (at most {limit[0]}), {words} words (at most {limit[1]})")
        if openings > limit[0] or words > limit[1]:
            passed = False
            print(*(f"  {file}: {', '.join([*a, *b])}" for file, (a, b) in found.items() if a or b), sep="\n")
    return passed


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    return int(not check(ROOT, LIMITS))


if __name__ == "__main__":
    sys.exit(main())
