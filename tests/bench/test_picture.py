"""README's picture shows what bench/results hold."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import picture

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("theme", picture.PALETTES)
def test_the_files_are_what_is_drawn(theme: str) -> None:
    drawn = picture.draw(theme)
    assert picture.picture(theme).read_text(encoding="utf-8") == drawn, "draw it anew: python -m bench.picture"


@pytest.mark.parametrize("theme", picture.PALETTES)
@pytest.mark.parametrize(("panel", "name"), [(0, "e2e-h200"), (1, "e2e-h200-backward")])
def test_points_and_factors_are_the_recorded_ones(panel: int, name: str, theme: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    default = {row["n"]: row for row in rows if row["num_cmp"] is None and row["mode"] == "eager"}
    shown = sorted(n for n in default if n <= 1 << 20)
    assert (shown[0], shown[-1]) == (8 << 10, 1 << 20)
    group = ElementTree.fromstring(picture.picture(theme).read_text(encoding="utf-8")).findall(f"{SVG}g")[panel]
    # Heights are an affine map of log(ms), places one of log(tokens), both found from the axes' own labels
    labels = {text.text: (float(text.get("x", "")), float(text.get("y", "")) - 5) for text in group.iter(f"{SVG}text")}
    (_, low), (_, high) = labels["1 ms"], labels["10 s"]
    (first, _), (last, _) = labels["8K"], labels["1M"]
    for kind, key in (("nsa", "ms_p50"), ("dense", "dense_ms")):
        circles = [circle for circle in group.iter(f"{SVG}circle") if circle.get("class") == kind]
        assert len(circles) == len(shown)
        for circle, tokens in zip(circles, shown, strict=True):
            ms = 10 ** (4 * (float(circle.get("cy", "")) - low) / (high - low))
            assert ms == pytest.approx(default[tokens][key], rel=0.01)
            octaves = 7 * (float(circle.get("cx", "")) - first) / (last - first)
            assert octaves == pytest.approx(math.log2(tokens) - 13, abs=0.01)
    longest = default[1 << 20]
    about = "~" if longest["dense_extrapolated"] else ""
    assert f"{about}{longest['dense_ms'] / longest['ms_p50']:.0f}{picture.TIMES}" in labels
    dotted = [line for line in group.iter(f"{SVG}polyline") if line.get("stroke-dasharray")]
    assert bool(dotted) == any(default[n]["dense_extrapolated"] for n in shown)


def test_the_readme_says_the_factor_of_the_picture() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    (factor,) = re.findall(r"at 1M NSA is (\d+) times faster", readme)
    for name in picture.RESULTS.values():
        last = picture.points(name)[-1]
        assert round(last.dense_ms / last.nsa_ms) == int(factor)
