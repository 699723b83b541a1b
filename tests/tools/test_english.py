"""tools/check_english.py: it counts both habits wherever prose is, and fails above a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_english import check

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


def test_both_habits_are_found_and_more_than_the_limit_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a.py", SOURCE), ("a.md", PAGE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert check(tmp_path, {"a.py": (2, 5), "a.md": (0, 2), ".": (2, 7)})
    assert "What SIZE is." not in capsys.readouterr().out
    for limit in ((1, 7), (2, 6)):
        assert not check(tmp_path, {".": limit})
        assert "a.py: Of a module: it lies behind another., What SIZE is., lies, behind" in capsys.readouterr().out
