"""README's picture shows what bench/results hold."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib as mpl
import pytest

from bench import picture

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def svg(theme: str) -> str:
    return picture.picture(theme).read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", picture.PALETTES)
def test_the_files_are_what_is_drawn(theme: str) -> None:
    if f"Matplotlib v{mpl.__version__}," not in svg(theme):
        pytest.skip("drawn by another version of matplotlib")
    assert picture.draw(theme) == svg(theme), "draw it again: python -m bench.picture"


@pytest.mark.parametrize("theme", picture.PALETTES)
@pytest.mark.parametrize(("panel", "title"), list(enumerate(picture.RESULTS)))
def test_points_and_factors_are_the_recorded_ones(panel: int, title: str, theme: str) -> None:
    rows = json.loads((RESULTS / f"{picture.RESULTS[title]}.json").read_text(encoding="utf-8"))["rows"]
    default = {row["n"]: row for row in rows if row["num_cmp"] is None and row["mode"] == "eager"}
    shown = sorted(n for n in default if n <= 1 << 20)
    assert (shown[0], shown[-1]) == (8 << 10, 1 << 20)
    groups = {group.get("id", ""): group for group in ElementTree.fromstring(svg(theme)).iter(f"{SVG}g")}
    axes = groups[f"axes_{panel + 1}"]
    labels = {text.text: float(text.get("x", "")) for text in axes.iter(f"{SVG}text")}
    # Heights are an affine map of log(ms), places one of log(tokens); the axes' own marks give both
    heights = [float(line.get("d", "").split()[2]) for tick in ticks(axes) for line in tick.iter(f"{SVG}path")]
    first, last, low, high = labels["8K"], labels["1M"], max(heights), min(heights)
    assert [text for text in labels if text in picture.TICKS] == list(picture.TICKS)
    for kind, key in (("nsa", "ms_p50"), ("dense", "dense_ms")):
        circles = list(groups[f"{kind} {title}"].iter(f"{SVG}use"))
        assert len(circles) == len(shown)
        for circle, tokens in zip(circles, shown, strict=True):
            ms = 10 ** (4 * (float(circle.get("y", "")) - low) / (high - low))
            assert ms == pytest.approx(default[tokens][key], rel=0.01)
            octaves = 7 * (float(circle.get("x", "")) - first) / (last - first)
            assert octaves == pytest.approx(math.log2(tokens) - 13, abs=0.01)
    longest = default[1 << 20]
    about = "~" if longest["dense_extrapolated"] else ""
    assert f"{about}{longest['dense_ms'] / longest['ms_p50']:.0f}{picture.TIMES}" in labels
    (dotted,) = groups[f"dense {title} dotted"].iter(f"{SVG}path")
    ends = sum(default[n]["dense_extrapolated"] for n in shown)
    assert dotted.get("d", "").count("L") == ends


def ticks(axes: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in axes.iter(f"{SVG}g") if group.get("id", "").startswith("ytick")]


def test_the_readme_says_the_factor_of_the_picture() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    (factor,) = re.findall(r"at 1M NSA is (\d+) times faster", readme)
    for name in picture.RESULTS.values():
        last = picture.points(name)[-1]
        assert round(last["dense_ms"] / last["ms_p50"]) == int(factor)
