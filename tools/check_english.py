#!/usr/bin/env python3
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
from collections.abc import Iterator, Sequence
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
    runs: dict[int, str] = {}
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            first = next(reversed(runs)) if last == line - 1 else line
            runs[first] = f"{runs.get(first, '')} {text}"
            last = line
    return list(runs.values())


def count(path: Path) -> tuple[int, int]:
    """Number of openings and of words in a Python file or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return 0, len(WORD.findall(" ".join(NOT_PROSE.sub("", text).split())))
    documented = list(docstrings(ast.parse(text)))
    prose = [" ".join(each.split()) for each in [*documented, *comments(text)]]
    return sum(OPENING.match(each) is not None for each in documented), sum(len(WORD.findall(each)) for each in prose)


def check(root: Path, limits: dict[str, tuple[int, int]], show_all: bool = False) -> bool:
    """Print each folder's counts, and its files' if it exceeds its limit or with `show_all`; True if none does."""
    passed = True
    for name, (openings_limit, words_limit) in limits.items():
        place = root / name
        files = [place] if place.is_file() else sorted({*place.rglob("*.py"), *place.rglob("*.md")})
        counts = {file: count(file) for file in files}
        openings, words = (sum(each[i] for each in counts.values()) for i in range(2))
        within = openings <= openings_limit and words <= words_limit
        passed = passed and within
        print(f"{name}: {openings} openings (at most {openings_limit}), {words} words (at most {words_limit})")
        for file, (of_file, in_file) in counts.items():
            if (show_all or not within) and (of_file or in_file):
                print(f"  {file.relative_to(root).as_posix()}: {of_file} openings, {in_file} words")
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="show the counts of every file")
    args = parser.parse_args(argv)
    return 0 if check(ROOT, LIMITS, args.files) else 1


if __name__ == "__main__":
    sys.exit(main())
