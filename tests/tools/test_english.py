"""tools/check_english.py: it counts both habits wherever prose is, and fails above a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_english import check, count

SOURCE = '''"""Of a module: it lies
    behind another."""

SIZE = 1
"""What SIZE is."""


def how_many() -> int:
    """Number of items. That is all."""
    return len("Whether behind")  # nobody
    # a comment as
    # of two lines; x = underlying; Likewise
'''
PAGE = "It is as\nof a call.\n\n```\nlies\n```\n\n<!-- table: x -->\n\nbehind\n\n<!-- end -->\n\nSomebody.\n"


@pytest.mark.parametrize(("name", "text", "counts"), [("a.py", SOURCE, (2, 5)), ("a.md", PAGE, (0, 2))])
def test_what_is_counted(tmp_path: Path, name: str, text: str, counts: tuple[int, int]) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert count(path) == counts


@pytest.mark.parametrize(("limit", "passes"), [((2, 5), True), ((1, 5), False), ((2, 4), False)], ids=str)
def test_more_than_the_limit_fails(tmp_path: Path, limit: tuple[int, int], passes: bool) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(SOURCE, encoding="utf-8")
    assert check(tmp_path, {"package": limit}) is passes
