"""Report of a benchmark of passes (bench/passes.py): rows, a table, bars, files (schema: docs/results_files.md)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from bench.bars import Bar, bars_field, ratio
from bench.common import DTYPES, above_zero, with_ending
from bench.passes import MODES, Case, Measured, Plan, compare, tell_missing
from bench.report import LOCAL_RESULTS, command_line, environment, relative
from bench.results_file import Row, open_results
from bench.show import PASS_TITLES, console, ms_text, print_table, saved_figure, say, show_bars
from bench.timing import copy_bandwidth
from dispatch.device import device_types

OWN_COLORS = ("#1b4f72", "#2e86c1", "#76448a")


class Shape(Hashable, Protocol):
    """Sizes of one problem; `str` of it is an argument of the command line."""

    def label(self) -> str:
        """Short lines, for the axis of a plot."""


SomeShape = TypeVar("SomeShape", bound=Shape)


@dataclass(frozen=True)
class Look:
    """Presentation of an op's results."""

    op: str
    shape_heading: str
    shape: Callable[[Row], Shape]
    columns: Mapping[str, Callable[[Row], str]]
    """Heading and cell of columns besides times; one whose cells are all empty is left out."""
    peers: Mapping[str, tuple[str, str]]
    """Labels and colors of peers by name; `NAME_ms` is a field of rows, None if the peer did not run."""

    def present(self, rows: Sequence[Row]) -> list[str]:
        """Names of the peers that ran anywhere."""
        return [name for name in self.peers if any(row[f"{name}_ms"] is not None for row in rows)]

    def line(self, row: Row) -> str:
        """A row that is printed when its shape is done."""
        share = "" if row["share_of_floor"] is None else f" ({row['share_of_floor']:.0%} of the floor)"
        peers = "".join(f", {name} {ms_text(row[f'{name}_ms'])}" for name in self.peers)
        return f"{self.shape(row)} {row['pass']}: {row['backend']} {ms_text(row['ms_p50'])} ms{share}{peers}"


def pass_fields(
    op: str,
    args: argparse.Namespace,
    direction: str,
    backend: str,
    default: bool,
    measured: Measured,
    peers: Mapping[str, Measured | None],
    floor_bytes: int,
    tbs: float | None,
) -> Row:
    """Fields of every such benchmark, and `NAME_ms` of the peers.

    Args:
        floor_bytes: least number of bytes that the pass reads and writes. tbs: TB/s; None: there is no floor.
    """
    times = measured.timing.fields if measured.timing else dict.fromkeys(("ms_p20", "ms_p50", "ms_p80"))
    floor = None if tbs is None else floor_bytes / tbs / 1e9
    row = {"op": op, "pass": direction, "backend": backend, "default": default, "mode": measured.mode}
    row |= {"dtype": args.dtype, **times, "floor_ms": floor, "share_of_floor": ratio(floor, times["ms_p50"])}
    row |= {"error": measured.error.error, "error_budget": measured.error.budget, "command": args.command}
    return row | {f"{name}_ms": None if peer is None else p50(peer.timing) for name, peer in peers.items()}


def p50(timing: Any) -> float | None:
    return None if timing is None else timing.ms_p50


# The command line


def add_options(parser: argparse.ArgumentParser, *, out: str) -> None:
    """Add the options of every such benchmark; `parse_options` fills in defaults."""
    add = parser.add_argument
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: %(default)s")
    add("--dtype", choices=DTYPES, help="default: fp32 on a CPU, else bf16")
    repeat = "about how long to repeat each measurement; default: %(default)s"
    add("--seconds", type=above_zero, default=0.3, help=repeat)
    add("--peak-tbs", type=above_zero, help="TB/s for the floor; default: what a copy reaches on this GPU")
    add("--out", default=str(LOCAL_RESULTS / out), help="results, without suffix; default: %(default)s")


def add_shapes(
    parser: argparse.ArgumentParser, sets: Mapping[str, list[Any]], form: str, default: str, read: Callable[[str], Any]
) -> None:
    """Add --shapes: problems in `form`, such as "L,B,T,D", or names of sets.

    Args:
        read: a problem from its text; raises ValueError.
    """

    def shapes(text: str) -> list[Any]:
        try:
            return sets[text] if text in sets else [read(text)]
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"must be {', '.join(sets)} or {form}, got {text!r}") from error

    names = f"problems, or sets of them: {', '.join(sets)}; default: {default}, on a CPU tiny"
    parser.add_argument("--shapes", nargs="+", type=shapes, metavar=form, help=names)


def parse_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, on_cpu: Sequence[Any], elsewhere: Sequence[Any]
) -> argparse.Namespace:
    """Arguments with defaults of the device, each shape once, and `command`."""
    args = parser.parse_args(argv)
    args.command = command_line(argv)
    cpu = args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if cpu else "bf16")
    chosen = args.shapes or (on_cpu if cpu else elsewhere)
    args.shapes = list(dict.fromkeys(shape for some in chosen for shape in some))
    return args


# A run


def benchmark(
    args: argparse.Namespace,
    look: Look,
    cases: Mapping[SomeShape, Case],
    plan: Plan,
    make_row: Callable[[float | None, SomeShape, str, str, bool, Measured, dict[str, Measured | None]], Row],
    bars: Callable[[Sequence[Row]], list[Bar]] | None = None,
) -> bool:
    """Compare and present; files are written after every shape, and hold no rows if a result is wrong.

    Args:
        make_row: arguments are the floor's TB/s, then those in `compare`.
        bars: what the rows have to reach, which is shown and becomes a part of the file.

    Returns:
        True if all results are right.
    """
    device, out = torch.device(args.device), Path(args.out)
    facts = environment(device)
    say(f"{look.op} and its peers: {', '.join(args.modes)}, {args.dtype}, on {facts['device']}", "bold")
    with open_results(out, {**facts, "command": args.command}) as results:
        tbs = results.fact("floor_tbs", lambda: args.peak_tbs or (copy_bandwidth() if device.type == "cuda" else None))
        with console.status("") as status:
            parts = [
                (str(shape), partial(compare, shape, case, plan, partial(make_row, tbs), status.update))
                for shape, case in cases.items()
            ]
            if not results.measure(parts, look.line, "{0[0]} did not run: {0[1]} ({0[2]})".format):
                return False
        missing = tell_missing(results.missing, len(cases) * len(plan.passes))
        for reason in missing:
            say(reason, "yellow")
        rows, reached = results.rows, bars(results.rows) if bars else None
        if plan.timed:
            plot(rows, with_ending(out, ".png"), look, facts["device"], tbs)
        results.finish(csv=True, missing=missing, **bars_field(reached))
    show(rows, out, look, plan)
    if reached is not None:
        show_bars(reached)
    return True


# Presentation


def show(rows: Sequence[Row], out: Path, look: Look, plan: Plan) -> None:
    peers = look.present(rows)
    floors = any(row["share_of_floor"] is not None for row in rows)
    columns = {name: cell for name, cell in look.columns.items() if any(cell(row) for row in rows)}

    def cells(row: Row) -> list[str]:
        share = "-" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}"
        return [
            *(str(look.shape(row)), row["pass"], row["backend"]),
            *([f"[bold]{ms_text(row['ms_p50'])}[/]"] if plan.timed else []),
            *([share] if floors else []),
            *(ms_text(row[f"{name}_ms"]) + _times(row, name) for name in peers),
            *(cell(row) for cell in columns.values()),
            f"{row['error']:.1e}",
        ]

    headings = [*(["ms"] if plan.timed else []), *(["of floor"] if floors else []), *(f"{name} ms" for name in peers)]
    title, left = "median time per call, and how much longer peers take", [look.shape_heading, "pass", "backend"]
    print_table(title, left, [*headings, *columns, "error"], map(cells, rows))
    pairs = [ratio(row["ms_p50"], row[f"{name}_ms"]) for row in rows if row["default"] for name in peers]
    if measured := [pair for pair in pairs if pair is not None]:
        slower = sum(pair > 1 for pair in measured)
        verdict = f"slower than a peer in {slower} of {len(measured)} cases" if slower else "never slower than a peer"
        console.print(f"The default backend is {verdict}.")
    console.print("Errors are the largest against fp64 on sampled rows, each within its budget, so the figures count.")
    suffixes = (".png", ".csv", ".json") if plan.timed else (".csv", ".json")
    console.print(*(str(relative(with_ending(out, suffix))) for suffix in suffixes), sep="   ", soft_wrap=True)


def _times(row: Row, name: str) -> str:
    times = ratio(row[f"{name}_ms"], row["ms_p50"])
    return "" if times is None else f" [{'green' if times >= 1 else 'red'}]{times:.1f}x[/]"


def plot(rows: Sequence[Row], path: Path, look: Look, device: str, tbs: float | None) -> None:
    """A panel for each pass, bars of every implementation by shape: the share of the byte floor, if known, else ms."""
    shapes = list(dict.fromkeys(map(look.shape, rows)))
    passes, backends = (list(dict.fromkeys(row[field] for row in rows)) for field in ("pass", "backend"))
    peers = look.present(rows)
    colors = {
        **dict(zip(backends, OWN_COLORS, strict=False)),
        **{name: color for name, (_, color) in look.peers.items()},
    }
    labels = {
        **{name: f"ours: {name}" for name in backends},
        **{name: label for name, (label, _) in look.peers.items()},
    }
    names, width = [*backends, *peers], 0.84 / (len(backends) + len(peers))
    size = (max(8, 2 * len(shapes)), 2.9 * len(passes) + 0.6)
    with saved_figure(path, len(passes), 1, size) as (figure, panels):
        for axes, direction in zip(panels[:, 0], passes, strict=True):
            own = {(look.shape(row), row["backend"]): row for row in rows if row["pass"] == direction}
            any_of = {shape: row for (shape, _), row in own.items()}
            for i, name in enumerate(names):
                bars: list[tuple[float, float]] = []
                for place, shape in enumerate(shapes):
                    row, x = any_of[shape], place - 0.42 + width * (i + 0.5)
                    ms = row[f"{name}_ms"] if name in peers else own.get((shape, name), {}).get("ms_p50")
                    height = 0.0 if ms is None else ms if row["floor_ms"] is None else 100 * row["floor_ms"] / ms
                    bars.append((x, height))
                    text = "x" if ms is None else ms_text(ms)
                    axes.annotate(text, (x, height), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=7)
                axes.bar(*zip(*bars, strict=True), width * 0.94, color=colors[name], label=labels[name])
            if tbs is not None:
                axes.axhline(100, color="black", linestyle="--", linewidth=1)
            axes.set(ylabel="ms" if tbs is None else "% of the byte floor", title=PASS_TITLES[direction])
            axes.margins(y=0.12)
            axes.set_xticks(range(len(shapes)), [shape.label() for shape in shapes], fontsize=8)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        shown = panels[0, 0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=len(names), frameon=False)
        lines = [f"{look.op} on {device}, {rows[0]['dtype']}; numbers are ms{', x did not run' if peers else ''}"]
        if tbs is not None:
            lines.append(f"floor: every input read once, every result written once, at {tbs:.2f} TB/s")
        figure.suptitle("\n".join(lines), fontsize=10)
