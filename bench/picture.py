"""Draws README's picture: time of dense attention and of NSA by length, forward and training, for light and dark pages.

`python -m bench.picture` writes docs/speed-light.svg and docs/speed-dark.svg from the recorded results; a test holds
the files against what this module draws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {("Forward", ""): "e2e-h200", ("Training", "forward + backward"): "e2e-h200-backward"}
"""Panels, and the results that they show: NSA's default options, called without a graph, up to LONGEST tokens."""
LONGEST = 2**20

PALETTES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "dense": "#818b98", "nsa": "#0969da"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d", "dense": "#9198a1", "nsa": "#4493f8"},
}
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

WIDTH, HEIGHT, PANEL = 880, 440, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 314, 60, 352
"""Pixels of the first panel's axes."""
TICKS = {"1 ms": 1.0, "10 ms": 10.0, "100 ms": 100.0, "1 s": 1e3, "10 s": 1e4}
LOW, HIGH = 0.16, 2e4
"""Milliseconds at the bottom and at the top."""
LENGTHS = {"8K": 2**13, "32K": 2**15, "128K": 2**17, "1M": 2**20}


TIMES = "\N{MULTIPLICATION SIGN}"


class Point(NamedTuple):
    tokens: int
    nsa_ms: float
    dense_ms: float
    extrapolated: bool
    """True if dense attention was not measured at this length, but follows from a shorter one by N²."""


def points(name: str) -> list[Point]:
    """Times of a panel, from bench/results, by length."""
    rows = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return [
        Point(row["n"], row["ms_p50"], row["dense_ms"], row["dense_extrapolated"])
        for row in sorted(rows, key=lambda row: row["n"])
        if row["num_cmp"] is None and row["mode"] == "eager" and row["n"] <= LONGEST
    ]


def time_text(ms: float) -> str:
    """A time in two digits: 77 ms, 3.4 s."""
    value, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def x_of(tokens: int) -> float:
    shortest = min(LENGTHS.values())
    return LEFT + (RIGHT - LEFT) * math.log(tokens / shortest) / math.log(LONGEST / shortest)


def y_of(ms: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(ms / LOW) / math.log(HIGH / LOW)


def text(x: float, y: float, words: str, size: int, color: str, anchor: str = "start", weight: int = 400) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


def line(ends: Sequence[tuple[float, float]], color: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'


def panel(title: tuple[str, str], shown: Sequence[Point], colors: dict[str, str]) -> Iterator[str]:
    yield text(LEFT, 32, title[0], 24, colors["text"], weight=600)
    if title[1]:
        yield text(RIGHT + 110, 32, title[1], 17, colors["faint"], "end")
    for words, ms in TICKS.items():
        yield line([(LEFT, y_of(ms)), (RIGHT, y_of(ms))], colors["grid"], 1)
        yield text(LEFT - 10, y_of(ms) + 5, words, 16, colors["faint"], "end")
    for words, tokens in LENGTHS.items():
        yield text(x_of(tokens), BOTTOM + 26, words, 16, colors["faint"], "middle")
    measured = [(x_of(p.tokens), y_of(p.dense_ms)) for p in shown if not p.extrapolated]
    beyond = [(x_of(p.tokens), y_of(p.dense_ms)) for p in shown if p.extrapolated]
    yield line(measured, colors["dense"], 3)
    if beyond:
        yield line([measured[-1], *beyond], colors["dense"], 3, "3 6")
    yield line([(x_of(p.tokens), y_of(p.nsa_ms)) for p in shown], colors["nsa"], 5)
    for kind, p, ms in [("dense", p, p.dense_ms) for p in shown] + [("nsa", p, p.nsa_ms) for p in shown]:
        radius = 4 if kind == "dense" and p.extrapolated else 6
        place = f'cx="{x_of(p.tokens):.2f}" cy="{y_of(ms):.2f}"'
        yield f'<circle class="{kind}" {place} r="{radius}" fill="{colors[kind]}"/>'
    last, x = shown[-1], RIGHT + 14
    about = "~" if last.extrapolated else ""
    top, bottom = y_of(last.dense_ms), y_of(last.nsa_ms)
    yield text(x, top + 6, f"{about}{time_text(last.dense_ms)}", 18, colors["faint"], weight=600)
    yield text(x, bottom + 6, time_text(last.nsa_ms), 18, colors["nsa"], weight=600)
    yield text(
        x, (top + bottom) / 2 + 4, f"{about}{last.dense_ms / last.nsa_ms:.0f}{TIMES}", 36, colors["nsa"], weight=700
    )
    yield text(x, (top + bottom) / 2 + 24, "faster", 18, colors["nsa"])
    third = shown[len(shown) // 2]
    yield text(x_of(third.tokens) - 14, y_of(third.dense_ms) - 8, "dense", 20, colors["faint"], "end", 600)
    yield text(x_of(third.tokens) + 14, y_of(third.nsa_ms) + 28, "NSA", 20, colors["nsa"], weight=700)


def draw(theme: str) -> str:
    """The picture as SVG."""
    colors = PALETTES[theme]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">']
    for i, (title, name) in enumerate(RESULTS.items()):
        lines += [f'<g transform="translate({i * PANEL} 0)">', *panel(title, points(name), colors), "</g>"]
    note = "Time of a call by tokens; one H200, bf16. Dense: FlashAttention-4, extrapolated where dotted."
    lines.append(text(LEFT, HEIGHT - 16, note, 16, colors["faint"]))
    return "\n".join([*lines, "</svg>", ""])


def picture(theme: str) -> Path:
    return ROOT / "docs" / f"speed-{theme}.svg"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    for theme in PALETTES:
        picture(theme).write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
