"""Benchmark of one op's passes (bench/passes.py): options, rows, a table, files (schema: docs/results_files.md)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import dispatch
from bench.bars import Bar, ratio
from bench.common import DTYPES, able_backends, add_device, make_parser, parse_args
from bench.passes import PASSES, Candidate, Measured, Plan, Task, compare, p50
from bench.peers import Peer, make_peer
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, run
from bench.show import PASS_TITLES, Cell, console, ms_text, print_table, saved_figure, say
from bench.timing import GIB, copy_bandwidth

OWN_COLORS = ("#1b4f72", "#2e86c1", "#76448a")
UNITS = {"gib": 1, "mib": 1024}  # Units of memory in rows, in a GiB
Missing = tuple[str, str, str]  # A peer, why it did not run, and of which shape and pass

S = TypeVar("S")


@dataclass(frozen=True)
class OpBenchmark(Generic[S]):
    """Benchmark of an op beside its peers, by shapes.

    `form` is a shape on the command line, such as "L,B,T,D"; `sets` are shapes by name, "tiny" for CPUs, the others for
    GPUs. `read` makes a shape from its text (and raises ValueError or TypeError), `shape` from a row, whose fields that
    tell shape and options are `sizes`. `facts` are options of dispatch.Call, `call` is our op by some backend, of the
    task's leaves. `moved` are bytes that a pass reads and writes at least, `held` those of its inputs and outputs;
    `unit`, one of UNITS, is memory's. `options` are further ones of the command line, with their arguments; `wall` and
    `calls` are Plan's. `floor_tbs` are TB/s of the floor by a part of the device's name; others are measured.
    """

    description: str | None
    op: str
    title: str
    form: str
    out: str
    sets: Mapping[str, list[S]]
    read: Callable[[str], S]
    shape: Callable[[Row], S]
    sizes: Callable[[S, argparse.Namespace], Row]
    facts: Callable[[S, argparse.Namespace], dict[str, Any]]
    task: Callable[[S, torch.device, torch.dtype], Task]
    call: Callable[[S, argparse.Namespace, str], Callable[..., Tensor]]
    moved: Callable[[S, str, int], int]
    held: Callable[[S, str, int], int]
    peers: Mapping[str, Peer]
    unit: str
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    wall: bool = False
    calls: int = 1
    floor_tbs: Mapping[str, float] = field(default_factory=dict)
    bars: Callable[[Sequence[Row]], Iterable[Bar]] | None = None

    # The command line

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        """Arguments with defaults of the device, each shape once, and `command`."""
        shared = "dtype", "backend", "seconds", "peak-tbs", *(["bars"] if self.bars else []), "out"
        parser = make_parser(self.description, *shared, out=str(LOCAL_RESULTS / self.out))
        add_device(parser)
        modes = [*PASSES, "memory"]
        parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default: %(default)s")
        usual = [name for name in self.sets if name != "tiny"]
        names = f"problems, or sets of them: {', '.join(self.sets)}; default: {' '.join(usual)}, on a CPU tiny"
        parser.add_argument("--shapes", nargs="+", type=self._shapes, metavar=self.form, help=names)
        for name, how in self.options.items():
            parser.add_argument(name, **how)
        args = parse_args(parser, argv)
        on_cpu = args.device == "cpu"
        args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
        chosen = args.shapes or [self.sets[name] for name in (["tiny"] if on_cpu else usual)]
        args.shapes = list(dict.fromkeys(shape for some in chosen for shape in some))
        return args

    def _shapes(self, text: str) -> list[S]:
        """Argument type: a shape, or a name of `sets`."""
        try:
            return self.sets[text] if text in self.sets else [self.read(text)]
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"must be {', '.join(self.sets)} or {self.form}, got {text!r}") from error

    # A run

    def main(self, argv: list[str] | None = None) -> int:
        args = self.parse(argv)
        device, dtype = torch.device(args.device), DTYPES[args.dtype]
        calls = (dispatch.Call(self.op, device, dtype, backward=True, options=self.facts(x, args)) for x in args.shapes)
        try:
            backends = dict(zip(args.shapes, (able_backends(call, args.backend) for call in calls), strict=True))
        except (ValueError, dispatch.BackendError) as refusal:
            raise SystemExit(str(refusal)) from refusal
        facts = environment(device)
        passes = tuple(PASSES[mode] for mode in PASSES if mode in args.modes)
        plan = Plan(
            passes or ("fwd", "fwd+bwd"), bool(passes), "memory" in args.modes, args.seconds, self.wall, self.calls
        )
        say(f"{self.title} and its peers: {', '.join(args.modes)}, {args.dtype}, on {facts['device']}", "bold")

        shape = " ".join(f"{name}={{{name}}}" for name in self.sizes(args.shapes[0], args))
        peers = "".join(f"  {name} {{{name}_ms:ms}}" for name in self.peers)
        line = f"{shape} {{pass}}: {{backend}} {{ms_p50:ms}} ms  {{share_of_floor:percent}} of the floor{peers}"
        return run(
            args,
            facts,
            partial(self.parts, args, backends, plan),
            line,
            reason="{0[0]} did not run: {0[1]} ({0[2]})".format,
            fields=lambda results: {"missing": tell_missing(results.missing, len(backends) * len(plan.passes))},
            bars=self.bars,
            plot=self.plot if plan.timed else None,
            show=self.show,
            csv=True,
        )

    def parts(
        self, args: argparse.Namespace, backends: Mapping[S, list[str]], plan: Plan, results: Results
    ) -> Iterator[Measurement]:
        """A part for each shape."""
        device, dtype = torch.device(args.device), DTYPES[args.dtype]
        known = (tbs for part, tbs in self.floor_tbs.items() if part in results.head["device"])
        given = args.peak_tbs or next(known, None)
        tbs = results.fact("floor_tbs", lambda: given or (copy_bandwidth() if device.type == "cuda" else None))

        def measure(shape: S, names: list[str]) -> Iterator[Row | Missing]:
            ours = [Candidate(name, self.call(shape, args, name)) for name in names]
            peers = {name: partial(make_peer, peer, shape) for name, peer in self.peers.items()}
            make = partial(self.task, shape, device, dtype)
            measured = compare(str(shape), make, ours, peers, plan, status.update)
            for name, direction in product(self.peers, plan.passes):
                if isinstance(why := measured[name, direction], str):
                    yield name, why, f"{shape} {direction}"
            found = {key: one for key, one in measured.items() if isinstance(one, Measured)}
            for name, direction in product(names, plan.passes):
                row: Row = {"op": self.op, "pass": direction, "backend": name, "default": name == names[0]}
                row |= self.figures(shape, args, (name, direction), found)
                floor = None if tbs is None else self.moved(shape, direction, dtype.itemsize) / tbs / 1e9
                yield {**row, "floor_ms": floor, "share_of_floor": ratio(floor, row["ms_p50"])}

        with console.status("") as status:
            for shape, names in backends.items():
                yield str(shape), partial(measure, shape, names)

    def figures(
        self, shape: S, args: argparse.Namespace, which: tuple[str, str], found: Mapping[tuple[str, str], Measured]
    ) -> Row:
        """Fields of a row besides the op's and the floor's. Args: `which`: the backend and the pass."""
        own, direction = found[which], which[1]
        peers = {peer: found.get((peer, direction)) for peer in self.peers}
        held = self.held(shape, direction, DTYPES[args.dtype].itemsize)
        times = own.timing.fields if own.timing else dict.fromkeys(("ms_p20", "ms_p50", "ms_p80"))

        def memory(measured: Measured | None) -> float | None:
            return None if measured is None or measured.peak_gib is None else measured.peak_gib * UNITS[self.unit]

        row = {"mode": own.mode, "dtype": args.dtype, **times}
        row |= {"error": own.error.error, "error_budget": own.error.budget, "command": args.command}
        row |= {f"{name}_ms": None if peer is None else p50(peer.timing) for name, peer in peers.items()}
        row |= self.sizes(shape, args)
        row |= {"wall_ms": p50(own.wall)} if self.wall else {}
        row |= {f"peak_{self.unit}": memory(own), f"floor_{self.unit}": held / GIB * UNITS[self.unit]}
        if self.wall:
            row |= {f"{name}_wall_ms": None if peer is None else p50(peer.wall) for name, peer in peers.items()}
        return row | {f"{name}_{self.unit}": memory(peer) for name, peer in peers.items()}

    # Presentation

    def present(self, rows: Sequence[Row]) -> list[str]:
        """Names of the peers that ran anywhere."""
        return [name for name in self.peers if any(row[f"{name}_ms"] is not None for row in rows)]

    def show(self, content: dict[str, Any]) -> None:
        rows: list[Row] = content["rows"]
        for reason in content["missing"]:
            say(reason, "yellow")
        peers, digits = self.present(rows), 1 if self.unit == "mib" else 2

        def beside(name: str, row: Row) -> str:
            times = ratio(row[f"{name}_ms"], row["ms_p50"])
            color = "" if times is None else f" [{'green' if times >= 1 else 'red'}]{times:.1f}x[/]"
            return ms_text(row[f"{name}_ms"]) + color

        columns: dict[str, Cell] = {
            self.form: lambda row: str(self.shape(row)),
            "pass": "{pass}",
            "backend": "{backend}",
            "ms": "[bold]{ms_p50:ms}[/]",
            "of floor": "{share_of_floor:percent}",
            **{f"{name} ms": partial(beside, name) for name in peers},
            "from Python": "{wall_ms:ms}",
            {"gib": "GiB", "mib": "MiB"}[self.unit]: f"{{peak_{self.unit}:,.{digits}f}}",
            "least": f"{{floor_{self.unit}:,.{digits}f}}",
            "error": "{error:.1e}",
        }
        title = "median time per call, and how much longer peers take"
        print_table(title, columns, rows, left=list(columns)[:3])
        pairs = [ratio(row["ms_p50"], row[f"{name}_ms"]) for row in rows if row["default"] for name in peers]
        if measured := [pair for pair in pairs if pair is not None]:
            slower = sum(pair > 1 for pair in measured)
            verdict = (
                f"slower than a peer in {slower} of {len(measured)} cases" if slower else "never slower than a peer"
            )
            console.print(f"The default backend is {verdict}.")
        errors = "Errors are the largest against fp64 on sampled rows, each within its budget, so the figures count."
        console.print(errors)

    def plot(self, results: Results, path: Path) -> None:
        """A panel for each pass, bars of every implementation by shape: share of the byte floor, if known, or ms."""
        rows, tbs = results.rows, results.facts["floor_tbs"]
        shapes = list(dict.fromkeys(map(self.shape, rows)))
        passes, backends = (list(dict.fromkeys(row[field] for row in rows)) for field in ("pass", "backend"))
        drawn = {name: (f"ours: {name}", color) for name, color in zip(backends, OWN_COLORS, strict=False)}
        drawn |= {name: (self.peers[name].label, self.peers[name].color) for name in self.present(rows)}
        width = 0.84 / len(drawn)
        size = (max(8, 2 * len(shapes)), 2.9 * len(passes) + 0.6)
        with saved_figure(path, len(passes), 1, size) as (figure, panels):
            for axes, direction in zip(panels[:, 0], passes, strict=True):
                own = {(self.shape(row), row["backend"]): row for row in rows if row["pass"] == direction}
                any_of = {shape: row for (shape, _), row in own.items()}
                for i, (name, (label, color)) in enumerate(drawn.items()):
                    places, times, heights = [place - 0.42 + width * (i + 0.5) for place in range(len(shapes))], [], []
                    for shape in shapes:
                        row = any_of[shape]
                        ms = row[f"{name}_ms"] if name in self.peers else own.get((shape, name), {}).get("ms_p50")
                        times.append("x" if ms is None else ms_text(ms))
                        heights.append(0.0 if ms is None else ms if tbs is None else 100 * row["floor_ms"] / ms)
                    bars = axes.bar(places, heights, width * 0.94, color=color, label=label)
                    axes.bar_label(bars, times, padding=1, fontsize=7)
                if tbs is not None:
                    axes.axhline(100, color="black", linestyle="--", linewidth=1)
                axes.set(
                    xlabel=self.form,
                    ylabel="ms" if tbs is None else "% of the byte floor",
                    title=PASS_TITLES[direction],
                )
                axes.margins(y=0.12)
                axes.set_xticks(range(len(shapes)), list(map(str, shapes)), fontsize=8)
                axes.grid(axis="y", alpha=0.3)
                axes.set_axisbelow(True)
                axes.spines[["top", "right"]].set_visible(False)
            shown = panels[0, 0].get_legend_handles_labels()
            figure.legend(*shown, loc="outside lower center", ncols=len(drawn), frameon=False)
            crosses = ", x did not run" * (len(drawn) > len(backends))
            lines = [f"{self.title} on {results.head['device']}, {rows[0]['dtype']}; numbers are ms{crosses}"]
            if tbs is not None:
                lines.append(f"floor: every input read once, every result written once, at {tbs:.2f} TB/s")
            figure.suptitle("\n".join(lines), fontsize=10)


def tell_missing(missing: Iterable[Missing], most: int) -> list[str]:
    """Why peers did not run, and where: a line for each reason. Args: `most`, how many passes of shapes there are."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, reason, where in missing:
        places.setdefault((name, reason), []).append(where)
    return [
        f"{name} did not run: {reason} ({'everywhere' if len(where) == most else '; '.join(where)})"
        for (name, reason), where in places.items()
    ]
