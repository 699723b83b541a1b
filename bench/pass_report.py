"""What a benchmark of passes (bench/passes.py) shows and leaves behind: rows, a table, bars, files.

The schema of the files is in docs/results_files.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from bench.bars import Bar, bars_field
from bench.common import DTYPES, above_zero, with_ending
from bench.extras import needed
from bench.passes import MODES, Case, Measured, Missing, Plan, compare, tell_missing
from bench.report import LOCAL_RESULTS, command_line, environment, relative, replacing, write_csv
from bench.results_file import ResultRow, open_results
from bench.timing import copy_bandwidth
from dispatch.device import device_types

with needed("rich"):
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

TABLE_WIDTH = 140
OWN_COLORS = ("#1b4f72", "#2e86c1", "#76448a")
PASS_TITLES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
console = Console()


class Shape(Protocol):
    """Sizes of one problem; `str` of it is what the command line takes."""

    def label(self) -> str:
        """Short lines, for the axis of a plot."""


@dataclass(frozen=True, kw_only=True)
class PassRow(ResultRow):
    """What a line of every such benchmark has; times in ms. A peer's fields are None where it did not run."""

    peers: ClassVar[tuple[str, ...]]
    """Names of the peers; `NAME_ms` is a field of the row for each."""

    op: str
    direction: str
    backend: str
    default: bool
    mode: str
    dtype: str
    ms_p20: float | None
    ms_p50: float | None
    ms_p80: float | None
    floor_ms: float | None
    share_of_floor: float | None
    error: float
    error_budget: float
    command: str

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    def peer_ms(self, name: str) -> float | None:
        ms: float | None = getattr(self, f"{name}_ms")
        return ms


def pass_fields(
    direction: str,
    backend: str,
    default: bool,
    measured: Measured,
    peers: Mapping[str, Measured | None],
    *,
    floor_bytes: int,
    tbs: float | None,
    command: str,
) -> dict[str, Any]:
    """What was measured as keywords of PassRow, and `NAME_ms` of the peers.

    Args:
        floor_bytes: what the pass must read and write at least. tbs: at which TB/s; None: there is no floor.
    """
    timing, took = measured.timing, p50(measured.timing)
    floor = None if tbs is None else floor_bytes / tbs / 1e9
    return {
        "direction": direction,
        "backend": backend,
        "default": default,
        "mode": measured.mode,
        "ms_p20": None if timing is None else timing.ms_p20,
        "ms_p50": took,
        "ms_p80": None if timing is None else timing.ms_p80,
        "floor_ms": floor,
        "share_of_floor": None if floor is None or took is None else floor / took,
        "error": measured.error.error,
        "error_budget": measured.error.budget,
        "command": command,
        **{f"{name}_ms": None if peer is None else p50(peer.timing) for name, peer in peers.items()},
    }


def p50(timing: Any) -> float | None:
    return None if timing is None else timing.ms_p50


# The command line


def add_options(parser: argparse.ArgumentParser, *, out: str) -> None:
    """What every such benchmark is asked: `parse_options` fills in what is not given."""
    add = parser.add_argument
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: %(default)s")
    add("--dtype", choices=DTYPES, help="default: fp32 on a CPU, else bf16")
    repeat = "about how long to repeat each measurement; default: %(default)s"
    add("--seconds", type=above_zero, default=0.3, help=repeat)
    add("--peak-tbs", type=above_zero, help="TB/s for the floor; default: what a copy reaches on this GPU")
    add("--out", default=str(LOCAL_RESULTS / out), help="results, without suffix; default: %(default)s")


def parse_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, on_cpu: Sequence[Any], elsewhere: Sequence[Any]
) -> argparse.Namespace:
    """Arguments, and what depends on the device; `shapes`: lists of shapes made one, each shape once; `command`."""
    args = parser.parse_args(argv)
    args.command = command_line(argv)
    cpu = args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if cpu else "bf16")
    chosen = args.shapes or (on_cpu if cpu else elsewhere)
    args.shapes = list(dict.fromkeys(shape for some in chosen for shape in some))
    return args


# A run


SomeShape = TypeVar("SomeShape", bound=Shape)
SomeRow = TypeVar("SomeRow", bound=PassRow)


@dataclass(frozen=True)
class Look:
    """How results are presented."""

    op: str
    shape_heading: str
    columns: Mapping[str, Callable[[Any], str]]
    """Of a row, beside times: heading and cell. None of them is there where all cells are empty."""
    peer_labels: Mapping[str, str]
    peer_colors: Mapping[str, str]


def benchmark(
    args: argparse.Namespace,
    look: Look,
    kind: type[SomeRow],
    cases: Mapping[SomeShape, Case],
    plan: Plan,
    make_row: Callable[[float | None, SomeShape, str, str, bool, Measured, dict[str, Measured | None]], SomeRow],
    bars: Callable[[Sequence[SomeRow]], list[Bar]] | None = None,
) -> bool:
    """Compare and present; files are written after every shape, and hold no rows where a result is wrong.

    Args:
        kind: of rows. make_row: of the floor's TB/s, then as in `compare`.
        bars: what the rows have to reach, which is shown and becomes a part of the file.

    Returns:
        Whether all results are right.
    """
    device, out = torch.device(args.device), Path(args.out)
    facts = environment(device)
    console.print(
        f"[bold]{look.op} and its peers[/bold]: {', '.join(args.modes)}, {args.dtype}, on {facts['device']}",
        soft_wrap=True,
    )
    with open_results(out, {**facts, "command": args.command}) as results:
        tbs = results.fact("floor_tbs", lambda: args.peak_tbs or (copy_bandwidth() if device.type == "cuda" else None))
        red: list[str] = []

        def keep(shape: SomeShape, rows: list[SomeRow], missing: list[Missing]) -> None:
            results.add(str(shape), [row.as_json() for row in rows], missing)
            for row in rows:
                console.print(line(row), style="dim", markup=False, highlight=False, soft_wrap=True)

        def refuse(reason: str) -> None:
            red.append(reason)
            results.fail(red, missing=[], **bars_field([] if bars else None))

        left = {shape: case for shape, case in cases.items() if str(shape) not in results.parts}
        with Progress(console=console, transient=True) as progress:
            compare(left, plan, partial(make_row, tbs), keep=keep, refuse=refuse, progress=progress)
        if red:
            console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
            return False
        missing = tell_missing(results.missing, len(cases) * len(plan.passes))
        for reason in missing:
            console.print(reason, style="yellow", markup=False, soft_wrap=True)
        rows = [kind.of_json(row) for row in results.rows]
        reached = bars(rows) if bars else []
        write_csv(with_ending(out, ".csv"), results.rows)
        if plan.timed:
            plot(rows, with_ending(out, ".png"), look, facts["device"], tbs)
        results.finish(missing=missing, **bars_field(reached if bars else None))
    show(rows, out, look, plan)
    if bars:
        show_bars(reached)
    return True


# What is shown


def ms_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{3 if value < 1 else 2 if value < 10 else 1}f}"


def line(row: PassRow) -> str:
    """A row as it is told when its shape is done, for runs that do not come to their end."""
    share = "" if row.share_of_floor is None else f" ({row.share_of_floor:.0%} of the floor)"
    peers = "".join(f", {name} {ms_text(row.peer_ms(name))}" for name in row.peers)
    return f"{row.shape} {row.direction}: {row.backend} {ms_text(row.ms_p50)} ms{share}{peers}"


def present_peers(rows: Sequence[PassRow]) -> list[str]:
    """Those that ran anywhere."""
    return [name for name in rows[0].peers if any(row.peer_ms(name) is not None for row in rows)]


def show(rows: Sequence[PassRow], out: Path, look: Look, plan: Plan) -> None:
    peers = present_peers(rows)
    floors = any(row.share_of_floor is not None for row in rows)
    columns = {name: cell for name, cell in look.columns.items() if any(cell(row) for row in rows)}
    table = Table(title="median time per call, and how much longer peers take", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(look.shape_heading, no_wrap=True)
    table.add_column("pass")
    table.add_column("backend")
    headings = [*(["ms"] if plan.timed else []), *(["of floor"] if floors else []), *(f"{name} ms" for name in peers)]
    for heading in (*headings, *columns, "error"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row.shape), row.direction, row.backend]
        if plan.timed:
            cells.append(f"[bold]{ms_text(row.ms_p50)}[/]")
        if floors:
            cells.append("-" if row.share_of_floor is None else f"{row.share_of_floor:.0%}")
        cells += [ms_text(row.peer_ms(name)) + _ratio(row, name) for name in peers]
        cells += [cell(row) for cell in columns.values()]
        table.add_row(*cells, f"{row.error:.1e}")
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    pairs = [(row.ms_p50, row.peer_ms(name)) for row in rows if row.default for name in peers]
    measured = [(ms, peer) for ms, peer in pairs if ms is not None and peer is not None]
    if measured:
        slower = sum(ms > peer for ms, peer in measured)
        verdict = f"slower than a peer in {slower} of {len(measured)} cases" if slower else "never slower than a peer"
        console.print(f"The default backend is {verdict}.")
    console.print("Errors are the largest against fp64 on sampled rows, each within its budget, so the figures count.")
    suffixes = (".png", ".csv", ".json") if plan.timed else (".csv", ".json")
    console.print(*(str(relative(with_ending(out, suffix))) for suffix in suffixes), sep="   ", soft_wrap=True)


def show_bars(bars: Sequence[Bar]) -> None:
    colors = {"pass": "green", "FAIL": "bold red", "not measured": "yellow"}
    table = Table(title="bars", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("bar", no_wrap=True)
    table.add_column("wanted", justify="right", no_wrap=True)
    table.add_column("reached", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for bar in bars:
        shown, verdict = bar.as_json(), f"[{colors[bar.verdict]}]{bar.verdict}[/]"
        table.add_row(bar.what, shown["wanted"], shown["reached"] or "-", verdict)
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    counts = Counter(bar.verdict for bar in bars)
    missing = f", {counts['not measured']} not measured" if counts["not measured"] else ""
    console.print(f"{counts['pass']} of {len(bars)} bars are reached{missing}.")


def _ratio(row: PassRow, name: str) -> str:
    peer = row.peer_ms(name)
    if peer is None or row.ms_p50 is None:
        return ""
    return f" [{'green' if peer >= row.ms_p50 else 'red'}]{peer / row.ms_p50:.1f}x[/]"


def plot(rows: Sequence[PassRow], path: Path, look: Look, device: str, tbs: float | None) -> None:
    """A panel for each pass, bars of every implementation by shape: the share of the byte floor, if known, else ms."""
    with needed("matplotlib"):
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    passes = list(dict.fromkeys(row.direction for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    peers = present_peers(rows)
    colors = {**dict(zip(backends, OWN_COLORS, strict=False)), **look.peer_colors}
    labels = {**{name: f"ours: {name}" for name in backends}, **look.peer_labels}
    names, width = [*backends, *peers], 0.84 / (len(backends) + len(peers))
    size = (max(8, 2 * len(shapes)), 2.9 * len(passes) + 0.6)
    figure, panels = plt.subplots(len(passes), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, direction in zip(panels[:, 0], passes, strict=True):
        own = {(row.shape, row.backend): row for row in rows if row.direction == direction}
        any_of = {shape: row for (shape, _), row in own.items()}
        for i, name in enumerate(names):
            bars: list[tuple[float, float]] = []
            for place, shape in enumerate(shapes):
                mine, row, x = own.get((shape, name)), any_of[shape], place - 0.42 + width * (i + 0.5)
                ms = row.peer_ms(name) if name in peers else None if mine is None else mine.ms_p50
                height = 0.0 if ms is None else ms if row.floor_ms is None else 100 * row.floor_ms / ms
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
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False
    )
    lines = [f"{look.op} on {device}, {rows[0].dtype}; numbers are ms{', x did not run' if peers else ''}"]
    if tbs is not None:
        lines.append(f"floor: every input read once, every result written once, at {tbs:.2f} TB/s")
    figure.suptitle("\n".join(lines), fontsize=10)
    with replacing(path) as written:
        figure.savefig(written, dpi=150)
    plt.close(figure)
