"""README's picture: time of dense attention and of NSA by length, forward and training, for light and dark pages.

`python -m bench.picture` draws docs/speed-light.svg and docs/speed-dark.svg from the recorded results. Tests compare.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {"Forward": "e2e-h200", "Forward + backward": "e2e-h200-backward"}
"""Panels, and the results that they show: NSA's default options, called without a graph, up to LONGEST tokens."""
LONGEST = 2**20
LENGTHS = {"8K": 2**13, "32K": 2**15, "128K": 2**17, "1M": 2**20}
TICKS = {"1 ms": 1.0, "10 ms": 10.0, "100 ms": 100.0, "1 s": 1e3, "10 s": 1e4}
LIMITS = 0.16, 2e4  # Milliseconds at the bottom and at the top
NOTE = "Time of a call by tokens; one H200, bf16. Dense: FlashAttention-4, extrapolated where dotted."
TIMES = "\N{MULTIPLICATION SIGN}"

PALETTES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "dense": "#818b98", "nsa": "#0969da"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d", "dense": "#9198a1", "nsa": "#4493f8"},
}
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def points(name: str) -> list[dict[str, Any]]:
    """Rows of a panel by length."""
    rows = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    which = {"num_cmp": None, "mode": "eager", "backend": rows[0]["backend"]}
    shown = [row for row in rows if which.items() <= row.items() and row["n"] <= LONGEST]
    return sorted(shown, key=lambda row: row["n"])


def time_text(ms: float) -> str:
    """A time in two digits: 77 ms, 3.4 s."""
    value, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def draw_panel(axes: Any, title: str, rows: Sequence[dict[str, Any]], colors: dict[str, str]) -> None:
    axes.set_title(title, loc="left", size=18, weight="bold", pad=12)
    axes.set(xscale="log", yscale="log", ylim=LIMITS)
    axes.set_xticks(list(LENGTHS.values()), list(LENGTHS))
    axes.set_yticks(list(TICKS.values()), list(TICKS))
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=colors["faint"])
    axes.grid(axis="y", color=colors["grid"], linewidth=0.75)
    axes.spines[:].set_visible(False)

    lengths, last = [row["n"] for row in rows], rows[-1]
    first_beyond = next((i for i, row in enumerate(rows) if row["dense_extrapolated"]), len(rows))
    for kind, key, width, solid in (("dense", "dense_ms", 2.25, first_beyond), ("nsa", "ms_p50", 3.75, len(rows))):
        ms = [row[key] for row in rows]
        style = {"color": colors[kind], "linewidth": width, "clip_on": False}
        axes.plot(lengths[solid - 1 :], ms[solid - 1 :], ":", gid=f"{kind} {title} dotted", **style)
        axes.plot(lengths[:solid], ms[:solid], **style)
        axes.plot(lengths, ms, "o", markersize=8, gid=f"{kind} {title}", **style)

    about, middle = "~" * last["dense_extrapolated"], rows[len(rows) // 2]
    for words, row, key, place, how in (
        (f"{about}{time_text(last['dense_ms'])}", last, "dense_ms", (10, -5), {"color": colors["faint"], "size": 13.5}),
        (time_text(last["ms_p50"]), last, "ms_p50", (10, -5), {"color": colors["nsa"], "size": 13.5}),
        ("dense", middle, "dense_ms", (-10, 6), {"color": colors["faint"], "size": 15, "ha": "right"}),
        ("NSA", middle, "ms_p50", (10, -21), {"color": colors["nsa"], "size": 15}),
    ):
        axes.annotate(words, (row["n"], row[key]), place, textcoords="offset points", weight="bold", **how)
    between = last["n"], (last["dense_ms"] * last["ms_p50"]) ** 0.5
    for words, down, size in (
        (f"{about}{last['dense_ms'] / last['ms_p50']:.0f}{TIMES}", -3, 27),
        ("faster", -18, 13.5),
    ):
        how = {"color": colors["nsa"], "size": size, "weight": "bold"}
        axes.annotate(words, between, (10, down), textcoords="offset points", **how)


def draw(theme: str) -> str:
    from matplotlib import rc_context  # not for --help
    from matplotlib.figure import Figure

    colors = PALETTES[theme]
    rc = {"svg.fonttype": "none", "svg.hashsalt": "nsa", "font.family": "DejaVu Sans", "font.size": 12}
    with rc_context({**rc, "text.color": colors["text"]}):
        figure = Figure(figsize=(660 / 72, 330 / 72))
        panels = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.09, right=0.85, top=0.87, bottom=0.19, wspace=0.82)
        for axes, (title, name) in zip(panels, RESULTS.items(), strict=True):
            draw_panel(axes, title, points(name), colors)
        figure.text(0.09, 0.03, NOTE, size=12, color=colors["faint"])
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue().replace("'DejaVu Sans'", FONT)


def picture(theme: str) -> Path:
    return ROOT / "docs" / f"speed-{theme}.svg"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    for theme in PALETTES:
        picture(theme).write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
