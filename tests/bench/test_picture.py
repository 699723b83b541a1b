"""README's picture shows what bench/results hold."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import pytest

from bench import picture

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@pytest.mark.parametrize("theme", picture.PALETTES)
def test_the_files_are_what_is_drawn(theme: str) -> None:
    drawn = picture.picture(theme).read_text(encoding="utf-8")
    if f"Matplotlib v{mpl.__version__}," not in drawn:
        pytest.skip("drawn by another version of matplotlib")
    assert picture.draw(theme) == drawn, "draw it again: python -m bench.picture"


def test_the_readme_says_the_factor_of_the_picture() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    (factor,) = re.findall(r"at 1M NSA is (\d+) times faster", readme)
    for name in picture.RESULTS.values():
        last = picture.points(name)[-1]
        assert round(last["dense_ms"] / last["ms_p50"]) == int(factor)
