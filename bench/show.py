"""Tables that benchmarks print, and figures that they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Formatter
from typing import Any

from bench.bars import Bar
from bench.extras import needed
from bench.report import replacing
from bench.tables import fill, tokens

with needed("rich"):
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 140  # Columns that a table may take if the terminal has fewer, or if there is none
COMPUTED = ("bar", "extrapolated", "floor")
PASS_TITLES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
console = Console()


def say(text: str, style: str = "") -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


Cell = str | Callable[[Any], str]
"""A cell of a row: a template for `row_line`, or a function."""


def print_table(title: str, columns: Mapping[str, Cell], rows: Sequence[Any], left: Sequence[str] = ()) -> None:
    """Print a row for each of `rows`, and no column whose cells are all empty. Args: `left`: headings aligned so."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    cells = {
        heading: [row_line(cell, row) if isinstance(cell, str) else cell(row) for row in rows]
        for heading, cell in columns.items()
    }
    shown = {heading: texts for heading, texts in cells.items() if any(texts)}
    for i, heading in enumerate(shown):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=i == 0)
    for texts in zip(*shown.values(), strict=True):
        table.add_row(*texts)
    Console(width=max(console.width, TABLE_WIDTH)).print(table)


def show_bars(bars: Sequence[Bar]) -> None:
    columns = {"bar": "{bar}", "verdict": "{verdict}", "wanted": "{wanted}", "reached": "{reached}"}
    print_table("bars", columns, [bar.as_json() for bar in bars], left=("bar", "verdict"))
    counts = Counter(bar.verdict for bar in bars)
    missing = f", {counts['not measured']} not measured" if counts["not measured"] else ""
    console.print(f"{counts['pass']} of {len(bars)} bars are reached{missing}.")


def row_line(template: str, row: Mapping[str, Any]) -> str:
    """A row for readers by a template as those of bench/tables.py, less parts (after "  ") that lack a field."""

    def there(part: str) -> bool:
        return all(row.get(name) is not None for _, name, _, _ in Formatter().parse(part) if name)

    return "  ".join(fill(part, row) for part in template.split("  ") if there(part))


# Figures


@contextmanager
def saved_figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure of `size` inches and its panels `[rows, columns]`, saved to `path` afterwards."""
    with needed("matplotlib"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(rows, columns, squeeze=False)
    with replacing(path) as written:
        figure.savefig(written, dpi=150)


Point = tuple[str, str, int, float | None]
"""Heading of a panel, label of a line in it, tokens, and a value, None if it was not measured."""


def plot_lengths(path: Path, points: Iterable[Point], title: str) -> None:
    """A panel for each heading, lines by tokens; of values at the same place the first. COMPUTED lines are dashed."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for heading, label, n, value in points:
        if value is not None:
            panels.setdefault(heading, {}).setdefault(label, {}).setdefault(n, value)
    with saved_figure(path, 1, len(panels), (6 * len(panels), 5)) as (figure, row):
        for axes, (heading, lines) in zip(row[0], panels.items(), strict=True):
            for label, values in lines.items():
                axes.loglog(
                    *zip(*sorted(values.items()), strict=True),
                    "x--" if label.startswith(COMPUTED) else "o-",
                    label=label,
                )
            lengths = sorted(set().union(*lines.values()))
            axes.set(xlabel="tokens N", title=heading)
            axes.set_xticks(lengths, [tokens(n) for n in lengths])
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.suptitle(title)
