"""The run of a benchmark: parts that the file of results lacks are measured, then bars, table and picture follow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.bars import Bar
from bench.common import with_ending
from bench.report import relative
from bench.results_file import Measurement, Results, Row, open_results
from bench.show import say, show_bars


def missing_field(results: Results) -> dict[str, Any]:
    """The field with what did not run."""
    return {"missing": results.missing}


def run(
    args: argparse.Namespace,
    head: dict[str, Any],
    parts: Callable[[Results], Iterable[Measurement]],
    line: Callable[[Row], str] | None,
    *,
    reason: Callable[[Any], str] = str,
    fields: Callable[[Results], dict[str, Any]] = missing_field,
    bars: Callable[[list[Row]], Iterable[Bar]] | None = None,
    plot: Callable[[Results, Path], None] | None = None,
    show: Callable[[dict[str, Any]], None] | None = None,
    csv: bool = False,
    gate: str = "green",
    checked: bool = True,
) -> int:
    """Measure and write OUT.json (schema: docs/results_files.md) after every part; returns the status of the script.

    Args:
        args: with `out`, `command` and, if there are any, `bars`.
        head: fields that all rows share besides the command.
        parts: what is measured, given the results so far.
        line, reason: a row, and why something did not run, for readers.
        fields: of the file, besides rows and bars, once all parts are done.
        bars: what the rows have to reach, which counts if `args.bars`.
        plot: draws OUT.png. show: prints the fields of the file, once it is written, before bars.
        csv: also write OUT.csv.
        gate, checked: of the file, if nothing was checked.
    """
    out = Path(args.out)
    with open_results(out, {**head, "command": args.command}) as results:
        if not results.measure(parts(results), line, reason):
            return 1
        more = fields(results)
        reached = list(bars(results.rows)) if bars and args.bars else None
        if reached is not None:
            more["bars"] = [bar.as_json() for bar in reached]
        if plot:
            plot(results, with_ending(out, ".png"))
        results.finish(gate, red=checked, csv=csv, **more)
    if show:
        show({**results.facts, **more, "rows": results.rows})
    if reached is not None:
        show_bars(reached)
    written = (with_ending(out, ending) for ending in (".png", ".csv", ".json"))
    say("   ".join(str(relative(path)) for path in written if path.exists()))
    return 0
