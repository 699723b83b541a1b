"""Draw docs/neighborhoods.svg: which keys each query sees at the borders, taken from the reference's own definition."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ascend_kernels.neighborhood.reference import window_starts

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "neighborhoods.svg"
TOKENS = 10
PANELS = [  # title, kernel_size, dilation, boundary, causal
    ('boundary="truncate"', 5, 1, "truncate", False),
    ('boundary="shift"', 5, 1, "shift", False),
    ('"shift", dilation=2', 3, 2, "shift", False),
    ("causal=True", 3, 1, "truncate", True),
]
CELL, MARGIN, TOP, EDGE = 18, 2, 58, 14
"""Pixels of a cell, cells for dropped neighbors on either side, pixels for titles, pixels between panels."""
SIDE = TOKENS * CELL
PANEL = SIDE + 2 * MARGIN * CELL + EDGE
STYLE = """
text { font-family: sans-serif; font-size: 11px; fill: #24292f }
.title { font-size: 14px; font-weight: bold }
.middle { text-anchor: middle }
.grid { stroke: #d0d7de; fill: none }
.own { fill: #1b4f72 }
.seen { fill: #85c1e9 }
.moved { fill: #e67e22 }
.dropped { fill: none; stroke: #c0392b; stroke-dasharray: 3 2 }
"""
LEGEND = {  # by class: position, meaning
    "own": (0, "the query's own key"),
    "seen": (158, "a neighbor"),
    "moved": (262, "a neighbor because the window was moved inside"),
    "dropped": (582, "dropped: there is no such token"),
}


def cells(kernel_size: int, dilation: int, boundary: str, causal: bool) -> list[tuple[int, int, str]]:
    """(query, key, one of LEGEND) for every slot of every window."""
    found = []
    starts = window_starts(TOKENS, kernel_size, dilation, boundary, causal).tolist()
    unmoved = window_starts(TOKENS, kernel_size, dilation, "truncate", causal).tolist()
    for query, (start, centred) in enumerate(zip(starts, unmoved, strict=True)):
        for key in range(start, start + kernel_size * dilation, dilation):
            if not 0 <= key < TOKENS:
                kind = "dropped"
            elif key in range(centred, centred + kernel_size * dilation, dilation):
                kind = "own" if key == query else "seen"
            else:
                kind = "moved"
            found.append((query, key, kind))
    return found


def draw() -> str:
    width, height = PANEL * len(PANELS) + EDGE, TOP + SIDE + 42
    grid = "".join(f"M0 {at}h{SIDE}M{at} 0v{SIDE}" for at in range(0, SIDE + 1, CELL))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
        f'<text x="{-TOP - SIDE // 2}" y="23" class="middle" transform="rotate(-90)">← queries</text>',
    ]
    for i, (title, kernel_size, *window) in enumerate(PANELS):
        squares = cells(kernel_size, *window)
        lines += [
            f'<g transform="translate({EDGE + i * PANEL + MARGIN * CELL} {TOP})">',
            f'<text x="{SIDE // 2}" y="-38" class="title middle">{title}</text>',
            f'<text x="{SIDE // 2}" y="-22" class="middle">kernel_size={kernel_size}</text>',
            f'<text x="{SIDE // 2}" y="-6" class="middle">keys →</text>',
            f'<path class="grid" d="{grid}"/>',
            *(_square(key * CELL + 2, query * CELL + 2, CELL - 4, kind) for query, key, kind in squares),
            "</g>",
        ]
    for kind, (at, meaning) in LEGEND.items():
        x, y = EDGE + MARGIN * CELL + at, height - 24
        lines += [_square(x, y, 12, kind), f'<text x="{x + 18}" y="{y + 10}">{meaning}</text>']
    return "\n".join([*lines, "</svg>", ""])


def _square(x: int, y: int, size: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="2" class="{kind}"/>'


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
