"""README's picture: time of dense attention and of NSA by length, forward and training, for light and dark pages.

`python -m bench.picture` draws docs/speed-light.svg and docs/speed-dark.svg from the recorded results. Tests compare.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tables import ROOT, rows_of

RESULTS = {"Forward": "e2e-h200", "Forward + backward": "e2e-h200-backward"}
"""Panels, and the results that they show: NSA's default options, called without a graph, up to LONGEST tokens."""
LONGEST = 2**20
LENGTHS = {"8K": 2**13, "32K": 2**15, "128K": 2**17, "1M": LONGEST}
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
    rows = [row for row in rows_of(name) if (row["num_cmp"], row["mode"]) == (None, "eager") and row["n"] <= LONGEST]
    return sorted(rows, key=lambda row: row["n"])


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

    measured, last, middle = [row for row in rows if not row["dense_extrapolated"]], rows[-1], rows[len(rows) // 2]
    for kind, key, width, solid in (("dense", "dense_ms", 2.25, len(measured)), ("nsa", "ms_p50", 3.75, len(rows))):
        style = {"color": colors[kind], "linewidth": width, "clip_on": False, "markersize": 8}
        for line, some in ((":o", rows[solid - 1 :]), ("-o", rows[:solid])):
            axes.plot([row["n"] for row in some], [row[key] for row in some], line, **style)
    about, dense, nsa = "~" * last["dense_extrapolated"], last["dense_ms"], last["ms_p50"]
    for words, n, ms, place, color, size in (
        (f"{about}{time_text(dense)}", last["n"], dense, (10, -5), "faint", 13.5),
        (time_text(nsa), last["n"], nsa, (10, -5), "nsa", 13.5),
        ("dense", middle["n"], middle["dense_ms"], (-55, 6), "faint", 15),
        ("NSA", middle["n"], middle["ms_p50"], (10, -21), "nsa", 15),
        (f"{about}{dense / nsa:.0f}{TIMES}", last["n"], (dense * nsa) ** 0.5, (10, -3), "nsa", 27),
        ("faster", last["n"], (dense * nsa) ** 0.5, (10, -18), "nsa", 13.5),
    ):
        how = {"color": colors[color], "size": size, "weight": "bold"}
        axes.annotate(words, (n, ms), place, textcoords="offset points", **how)


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
