"""The paper's NSA beside dense attention and its peers: forward, and forward + backward, in one process.

NSA and dense attention are checked and timed as in bench_sparse_attn_e2e.py, with NSAConfig.paper() and 64 query heads
over 4, D = 128: errors against fp64 come first; if one is above its budget, nothing more is timed and the status is 1.
Dense attention and peers (bench/peers.py) are timed once for each length and pass, as eager calls; on CUDA without the
time to start them on an idle GPU, as in NSA's mode "queued". --backends gives rows of each backend.

Writes OUT.json (schema: docs/results_files.md) after every length and pass; at the end OUT.png. The same command goes
on where it was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import bench_sparse_attn_e2e as e2e
from bench.bars import Bar, figure
from bench.common import DTYPES, parse_args
from bench.inputs import make_problem
from bench.passes import Plan, measure_peer, release
from bench.peers import NSA, make_peer, nsa_task
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Results, Row, run
from bench.show import PASS_TITLES, Point, plot_lengths

PASSES = ("fwd", "fwd+bwd")
SIZES: dict[str, Any] = {"heads": 64, "kv_heads": 4, "dim": 128, "seqlens": [8 << 10, 32 << 10, 64 << 10, 128 << 10]}
CPU_SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 1, "dim": 64, "seqlens": [256, 1024]}
LINE = "{n:>8} {pass:<8}{mode:<7} NSA ({backend}) {ms_p50:ms} ms  {share_of_floor:percent} of the floor"
LINE += "  {peak_gib:.2f} GiB  dense {dense_ms:ms} ms  {dense_peak_gib:.2f} GiB"
LINE += "".join(f"  {name} {{{name}_ms:ms}} ms  {{{name}_gib:.2f}} GiB" for name in NSA)


MS_BARS: dict[int, dict[str, tuple[float, float]]] = {
    8 << 10: {"fwd": (2.4, 2.0), "fwd+bwd": (7, 6.5)},
    32 << 10: {"fwd": (11, 9), "fwd+bwd": (33, 30)},
    64 << 10: {"fwd": (27, 23), "fwd+bwd": (82, 75)},
    128 << 10: {"fwd": (78, 66), "fwd+bwd": (225, 215)},
}
"""By length and pass: the milliseconds that are wanted, and those that would be fine."""
GIB_BARS = (12.7, 10.7)
"""GiB of forward + backward at 64K: of the fastest peer (SFNSA), and of the one that holds least (fla)."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts = environment(torch.device(args.device))
    jobs = [e2e.make_job(argparse.Namespace(**{**vars(args), "backward": both}), facts) for both in (False, True)]
    beside = ", ".join([jobs[0].dense.name, *args.peers])
    print(f"NSA of the paper beside {beside}, {args.dtype}, on {facts['device']}")
    each = [(n, direction, job) for n in args.seqlens for direction, job in zip(PASSES, jobs, strict=True)]
    parts = [(f"N={n} {direction}", partial(measure, job, n, direction)) for n, direction, job in each]
    return run(args, facts, lambda _: parts, LINE, bars=find_bars, plot=plot)


def measure(job: e2e.Job, n: int, direction: str) -> list[Row | str]:
    rows = list(job.sweep(n, []))
    peers, missing = time_peers(job, n, direction)
    return [*(row | peers for row in rows), *missing]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = e2e.make_parser(__doc__, preset="paper", seconds=0.3, out=str(LOCAL_RESULTS / "paper"))
    parser.add_argument("--peers", nargs="*", choices=NSA, default=list(NSA), help="default: %(default)s")
    parser.add_argument("--bars", action="store_true", help="hold the figures against what they have to reach")
    args = parse_args(parser, argv)
    for name, size in (CPU_SIZES if args.device == "cpu" else SIZES).items():
        setattr(args, name, getattr(args, name) or size)
    e2e.resolve(parser, args)
    if len(args.configs) > 1:
        parser.error(f"takes one combination of options, got {len(args.configs)}")
    args.modes = args.modes or (["queued", "eager", "graph"] if args.device == "cuda" else ["eager"])
    return args


def time_peers(job: e2e.Job, n: int, direction: str) -> tuple[Row, list[str]]:
    """Fields of each peer, None if it did not run, with memory as e2e's rows count it; and why some did not run."""
    args, (config,) = job.args, job.args.configs
    release(job.device)
    inputs = make_problem(args.input, e2e.sizes_of(args, n), device=job.device, dtype=DTYPES[args.dtype])
    task, plan = nsa_task(inputs), Plan((direction,), seconds=args.seconds, host="queued" not in args.modes)
    fields: Row = {f"{name}_{what}": None for name in NSA for what in ("ms", "gib")}
    missing = []
    for name in args.peers:
        measured = measure_peer(partial(make_peer, NSA[name], config), task, plan)[1][direction]
        if isinstance(measured, str):
            missing.append(f"{name} did not run: {measured} (N={n} {direction})")
        else:
            timing = e2e.everything(measured.timing, task.leaves, args.backward)
            fields |= {f"{name}_ms": timing.ms_p50, f"{name}_gib": timing.peak_gib}
    return fields, missing


# Bars, and presentation

OF_BARS: Row = {"b": 1, "h": 64, "h_kv": 4, "d": 128, "dtype": "bf16", "l": 32, "stride": 16, "l_select": 64, "k": 16}
OF_BARS |= {"w": 512, "q_tile": 1, "mode": "queued", "inputs": "random", "backend": "cute"}
"""Sizes and options that the bars are for."""


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for n, of_length in MS_BARS.items():
        for direction, wanted in of_length.items():
            where, what = {**OF_BARS, "n": n, "pass": direction}, f"{n >> 10}K {direction}"
            for stretch, ms in zip(("", ", stretch"), wanted, strict=True):
                yield Bar(f"{what}{stretch}", figure(rows, where, "ms_p50"), ms, at_least=False, unit=" ms")
            for name in NSA:
                times = figure(rows, where, f"{name}_ms", "ms_p50")
                yield Bar(f"{what}, {name} takes as long or longer", times, 1, at_least=True, unit="x")
    peak = figure(rows, {**OF_BARS, "n": 64 << 10, "pass": "fwd+bwd"}, "peak_gib")
    for stretch, gib in zip(("", ", stretch"), GIB_BARS, strict=True):
        yield Bar(f"64K fwd+bwd, peak memory{stretch}", peak, gib, at_least=False, unit=" GiB")


def plot(results: Results, path: Path) -> None:
    """A panel for each pass: times by N of NSA's backends, of several modes the first, dense attention, peers, bars."""

    def points() -> Iterator[Point]:
        for row in results.rows:
            shown = {row["dense"]: row["dense_ms"], **{name: row[f"{name}_ms"] for name in NSA}}
            shown |= {f"NSA ({row['backend']})": row["ms_p50"], "floor at peak rates": row["floor_ms"]}
            if OF_BARS.items() <= row.items() and row["n"] in MS_BARS:
                shown["bar"] = MS_BARS[row["n"]][row["pass"]][0]
            for label, ms in shown.items():
                yield f"ms per call, {PASS_TITLES[row['pass']]}", label, row["n"], ms

    plot_lengths(path, points(), f"NSA of the paper on {results.head['device']}")


if __name__ == "__main__":
    sys.exit(main())
