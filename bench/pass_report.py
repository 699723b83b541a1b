"""Benchmark of one op's passes (bench/passes.py): options, rows, a picture, files (schema: docs/results_files.md)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import dispatch
from bench.bars import Bar, figure, ratio
from bench.common import DTYPES, able_backends, add_device, make_parser, parse_args
from bench.oracles import Error
from bench.passes import Candidate, Measured, Plan, Task, measure_pass, measure_peer
from bench.peers import Peer, make_peer
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.show import PASS_TITLES, saved_figure
from bench.timing import GIB, copy_bandwidth

UNITS = {"gib": 1, "mib": 1024}  # Units of memory in rows, in a GiB

S = TypeVar("S")


@dataclass(frozen=True)
class OpBenchmark(Generic[S]):
    """Benchmark of an op beside its peers, by shapes.

    `form` is a shape on the command line, such as "L,B,T,D"; `sets` are some by name, "tiny" for CPUs, the others for
    GPUs. `read` makes a shape from its text (and raises ValueError or TypeError); `sizes` are fields of rows that tell
    the shape. `facts` are options of dispatch.Call, `call` is our op by some backend, of the task's leaves.
    `moved` are bytes that a pass reads and writes at least; `unit`, one of UNITS, is memory's. `wall` and `calls` are
    Plan's. `floor_tbs` are TB/s of the floor by a part of the device's name; others are measured.
    """

    description: str | None
    op: str
    form: str
    out: str
    sets: Mapping[str, str]
    read: Callable[[str], S]
    sizes: Callable[[S], Row]
    facts: Callable[[S], dict[str, Any]]
    task: Callable[[S, torch.device, torch.dtype], Task]
    call: Callable[[S, str], Callable[..., Tensor]]
    moved: Callable[[S, str, int], int]
    peers: Mapping[str, Peer]
    unit: str
    wall: bool = False
    calls: int = 1
    floor_tbs: Mapping[str, float] = field(default_factory=dict)
    bars: Callable[[Sequence[Row]], Iterable[Bar]] | None = None

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        """Arguments with defaults of the device, each shape once, and `command`."""
        shared = "dtype", "backend", "seconds", "peak-tbs", *(["bars"] if self.bars else []), "out"
        parser = make_parser(self.description, *shared, out=str(LOCAL_RESULTS / self.out))
        add_device(parser)
        usual = [name for name in self.sets if name != "tiny"]
        names = f"problems, or sets of them: {', '.join(self.sets)}; default: {' '.join(usual)}, on a CPU tiny"
        parser.add_argument("--shapes", nargs="+", type=self._shapes, metavar=self.form, help=names)
        args = parse_args(parser, argv)
        on_cpu = args.device == "cpu"
        args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
        chosen = args.shapes or map(self._shapes, ["tiny"] if on_cpu else usual)
        args.shapes = list(dict.fromkeys(shape for some in chosen for shape in some))
        return args

    def _shapes(self, text: str) -> list[S]:
        """Argument type: a shape, or a name of `sets`."""
        try:
            return [self.read(shape) for shape in self.sets.get(text, text).split()]
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"must be {', '.join(self.sets)} or {self.form}, got {text!r}") from error

    def main(self, argv: list[str] | None = None) -> int:
        args = self.parse(argv)
        device, dtype = torch.device(args.device), DTYPES[args.dtype]
        calls = (dispatch.Call(self.op, device, dtype, backward=True, options=self.facts(x)) for x in args.shapes)
        try:
            backends = dict(zip(args.shapes, (able_backends(call, args.backend) for call in calls), strict=True))
        except (ValueError, dispatch.BackendError) as refusal:
            raise SystemExit(str(refusal)) from refusal
        shape = " ".join(f"{name}={{{name}}}" for name in self.sizes(args.shapes[0]))
        peers = "".join(f"  {name} {{{name}_ms:ms}}" for name in self.peers)
        line = f"{shape} {{pass}}: {{backend}} {{ms_p50:ms}} ms  {{share_of_floor:percent}} of the floor{peers}"
        parts = partial(self.parts, args, backends)
        return run(args, environment(device), parts, line, bars=self.bars, plot=self.plot)

    def parts(
        self, args: argparse.Namespace, backends: Mapping[S, list[str]], results: Results
    ) -> Iterator[Measurement]:
        """A part for each shape."""
        device, dtype = torch.device(args.device), DTYPES[args.dtype]
        plan = Plan(PASS_TITLES, args.seconds, memory=True, wall=self.wall, calls=self.calls)
        known = (tbs for part, tbs in self.floor_tbs.items() if part in results.head["device"])
        given = args.peak_tbs or next(known, None)
        tbs = results.fact("floor_tbs", lambda: given or (copy_bandwidth() if device.type == "cuda" else None))

        def measure(shape: S, names: list[str]) -> Iterator[Row | str]:
            task = self.task(shape, device, dtype)
            ours: dict[tuple[str, str], Measured] = {}
            for name, direction in product(names, PASS_TITLES):
                one = measure_pass(Candidate(name, self.call(shape, name)), direction, task, plan)
                if isinstance(one, Error):
                    raise WrongResult(f"{shape} {direction} {name}: {one}")
                ours[name, direction] = one
            makers = {name: partial(make_peer, peer, shape) for name, peer in self.peers.items()}
            peers = {name: measure_peer(maker, task, plan)[1] for name, maker in makers.items()}
            missing = ((name, one) for name, of in peers.items() for one in of.values() if isinstance(one, str))
            yield from dict.fromkeys(f"{name} did not run: {why} ({shape})" for name, why in missing)
            for (name, direction), own in ours.items():
                floor = None if tbs is None else self.moved(shape, direction, dtype.itemsize) / tbs / 1e9
                row: Row = {"op": self.op, "pass": direction, "backend": name, "default": name == names[0]}
                row |= {"mode": own.mode, "dtype": args.dtype, **self.sizes(shape), **own.timing.fields}
                row |= {"floor_ms": floor, "share_of_floor": ratio(floor, own.timing.ms_p50)}
                row |= {"error": own.error.error, "error_budget": own.error.budget, "command": args.command}
                # Inputs and out, and in a backward their gradients
                held = sum(x.nbytes for x in (*task.leaves, task.do)) * (1 if direction == "fwd" else 2)
                row |= {f"floor_{self.unit}": held / GIB * UNITS[self.unit], **self.figures("", own)}
                for peer, of in peers.items():
                    row |= self.figures(f"{peer}_", of[direction])
                yield row

        for shape, names in backends.items():
            yield str(shape), partial(measure, shape, names)

    def figures(self, name: str, measured: Measured | str) -> Row:
        """Time and memory of a candidate; ours, without a name, has its time beside percentiles."""
        ran = measured if isinstance(measured, Measured) else None
        gib = None if ran is None or ran.peak_gib is None else ran.peak_gib * UNITS[self.unit]
        row: Row = {f"{name or 'peak_'}{self.unit}": gib}
        row |= {f"{name}ms": ran and ran.timing.ms_p50} if name else {}
        return row | ({f"{name}wall_ms": ran and ran.wall and ran.wall.ms_p50} if self.wall else {})

    def plot(self, results: Results, path: Path) -> None:
        """A panel for each pass, bars of every implementation by shape: share of the byte floor, if known, or ms."""
        tbs, parts = results.facts["floor_tbs"], [part.rows for part in results.parts.values()]
        names = [*dict.fromkeys(row["backend"] for row in results.rows), *self.peers]
        width = 0.84 / len(names)
        with saved_figure(path, len(PASS_TITLES), 1, (max(8, 2 * len(parts)), 9)) as (drawn, panels):
            for axes, direction in zip(panels[:, 0], PASS_TITLES, strict=True):
                floors = [figure(rows, {"pass": direction}, "floor_ms") for rows in parts]
                for i, name in enumerate(names):
                    where, of = ({}, f"{name}_ms") if name in self.peers else ({"backend": name}, "ms_p50")
                    ms = [figure(rows, {**where, "pass": direction}, of) for rows in parts]
                    heights = ms if tbs is None else [ratio(*pair) for pair in zip(floors, ms, strict=True)]
                    places = [place + (i + 0.5) * width - 0.42 for place in range(len(parts))]
                    axes.bar(places, [x or math.nan for x in heights], width, label=name)
                axes.set(title=PASS_TITLES[direction], ylabel="ms" if tbs is None else "share of the byte floor")
                axes.set_xticks(range(len(parts)), list(results.parts))
                axes.grid(axis="y", alpha=0.3)
            panels[0, 0].legend(fontsize="small")
            floor = "" if tbs is None else f"; floor at {tbs:.2f} TB/s"
            drawn.suptitle(f"{self.op} ({self.form}) on {results.head['device']}{floor}")
