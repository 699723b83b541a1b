"""The paper's NSA beside dense attention and its peers: forward, and forward + backward, in one process.

NSA and dense attention are checked and timed as in bench_sparse_attn_e2e.py, with NSAConfig.paper() and 64 query heads
over 4, D = 128: errors against fp64 come first; if one is above its budget, nothing more is timed and the status is 1.
A peer (bench/nsa_peers.py) computes a little less than NSA here and need only return finite numbers; if it does not
run, it has null, and the reason is printed. Dense attention and peers are timed once for each length and pass, as eager
calls; on CUDA without the time to start them on an idle GPU, as in NSA's mode "queued" and unlike mode "eager".

Writes OUT.json after every length and pass (schema: docs/results_files.md); at the end OUT.csv and OUT.png. The same
command goes on where it was stopped or killed. With --bars also what the rows have to reach on one H200, and whether
they do: that of mode "queued".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import dispatch
from bench import bench_sparse_attn_e2e as e2e
from bench.bars import Bar, bars_field, ratio
from bench.common import DTYPES, choose_dense, with_ending
from bench.inputs import Sizes, make_problem
from bench.nsa_peers import COMPUTES, PEERS, make_peer, make_task
from bench.passes import Plan, find_peer, measure_peer, release
from bench.report import LOCAL_RESULTS, command_line, environment, relative
from bench.results_file import Row, WrongResult, open_results
from bench.roofline import choose_peaks
from bench.show import PASS_TITLES, draw_points, label_lengths, ms_text, saved_figure, show_bars
from bench.timing import Timing

PASSES = ("fwd", "fwd+bwd")
PAPER = ["--preset", "paper", "--seconds", "0.3", "--out", str(LOCAL_RESULTS / "paper")]
SIZES = ["--heads", "64", "--kv-heads", "4", "--dim", "128", "--seqlens", "8K,32K,64K,128K"]
CPU_SIZES = ["--heads", "4", "--kv-heads", "1", "--dim", "64", "--seqlens", "256,1K"]
USUAL_MODES = ["queued", "eager", "graph"]
"""On CUDA."""
NOT_TAKEN = ("--backward", "--recompute", "--no-dense-above", "--demo")
"""Options of bench_sparse_attn_e2e.py that a run of both passes and one length at a time has no use for."""

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
    device, out = torch.device(args.device), Path(args.out)
    runs = [run_of(args, n, direction) for n, direction in product(args.seqlens, args.passes)]
    try:
        variants = [e2e.choose_variants(run, device) for run in runs]
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    for note in dict.fromkeys(note for _, notes in variants for note in notes):
        print(note)
    dense, facts = choose_dense(device, DTYPES[args.dtype]), environment(device)
    peaks = choose_peaks(facts["device"], args.peak_tflops, args.peak_tbs)
    print(f"NSA of the paper beside {', '.join([dense.name, *args.peers])}, {args.dtype}, on {facts['device']}")

    def measure(run: argparse.Namespace, some: list[e2e.Variant]) -> tuple[list[Row], list[str]]:
        rows: list[Row] = []
        how: dict[str, Any] = {"keep": lambda _, row: rows.extend(row), "fail": lambda _: None, "before": {}}
        if red := e2e.run(run, some, dense, peaks, device, **how):
            raise WrongResult(*red)
        peers, missing = time_peers(run, device)
        return [row | peer_fields(peers) for row in rows], missing

    with open_results(out, {**facts, "command": args.command}) as results:
        parts = [
            (f"N={run.seqlens[0]} {PASSES[run.backward]}", partial(measure, run, some))
            for run, (some, _) in zip(runs, variants, strict=True)
        ]
        if not results.measure(parts, line):
            return 1
        bars = find_bars(results.rows) if args.bars else None
        plot(results.rows, with_ending(out, ".png"), facts["device"])
        results.finish(csv=True, missing=results.missing, **bars_field(bars))
    if bars is not None:
        show_bars(bars)
    print(*(relative(with_ending(out, suffix)) for suffix in (".png", ".csv", ".json")), sep="   ")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of this script; those of bench_sparse_attn_e2e.py follow the defaults of the paper."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Other options: those of bench_sparse_attn_e2e.py, except {', '.join(NOT_TAKEN)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: %(default)s")
    add("--bars", action="store_true", help="hold the figures against what they have to reach")
    own, others = parser.parse_known_args(argv)
    if refused := [option for option in others if option.startswith(NOT_TAKEN)]:
        parser.error(f"{refused[0]} is not taken here: --passes says what is run")
    sizes = CPU_SIZES if e2e.parse(others).device == "cpu" else SIZES
    args = e2e.parse([*PAPER, *sizes, *others])
    if len(args.configs) > 1:
        parser.error(f"takes one combination of options, got {len(args.configs)}")
    args.usual_modes, args.command = USUAL_MODES, command_line(argv)
    return argparse.Namespace(**vars(args), **vars(own))


def run_of(args: argparse.Namespace, n: int, direction: str) -> argparse.Namespace:
    """Options of bench_sparse_attn_e2e.py for one length and pass."""
    backward = direction == "fwd+bwd"
    return argparse.Namespace(**{**vars(args), "seqlens": [n], "backward": backward})


def time_peers(args: argparse.Namespace, device: torch.device) -> tuple[dict[str, Timing | None], list[str]]:
    """Times of each peer, with memory as e2e.Row counts it, and why some did not run."""
    (n,), (config, *_) = args.seqlens, args.configs
    sizes, direction = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim), PASSES[args.backward]
    release(device)
    problem = make_problem(args.input, sizes, device=device, dtype=DTYPES[args.dtype], gated=not args.ungated)
    task, host = make_task(problem), not e2e.is_queued(args)
    plan = Plan((direction,), timed=True, memory=False, seconds=args.seconds, host=host)
    found: dict[str, Timing | None] = dict.fromkeys(PEERS)
    missing = []
    for name in args.peers:
        measured = measure_peer(find_peer(partial(make_peer, name, config), task), direction, task, plan)
        if isinstance(measured, str):
            missing.append(f"{name} did not run: {measured} (N={n} {direction})")
        elif measured.timing is not None:
            found[name] = e2e.everything(measured.timing, task.leaves) if args.backward else measured.timing
    return found, missing


def peer_fields(peers: dict[str, Timing | None]) -> Row:
    """Fields of each peer; None if it did not run."""
    fields: Row = {}
    for name, timing in peers.items():
        fields[f"{name}_ms"] = None if timing is None else timing.ms_p50
        fields[f"{name}_gib"] = None if timing is None else timing.peak_gib
        fields[f"{name}_computes"] = None if timing is None else COMPUTES[name]
    return fields


# Bars, and presentation

OF_BARS = {"b": 1, "h": 64, "h_kv": 4, "d": 128, "dtype": "bf16", "l": 32, "stride": 16, "l_select": 64, "k": 16}
OF_BARS |= {"w": 512, "q_tile": 1, "mode": "queued", "gated": True, "inputs": "random"}
"""Sizes and options that the bars are for."""


def is_of_the_bars(row: Row) -> bool:
    return OF_BARS.items() <= row.items()


def find_bars(rows: Sequence[Row]) -> list[Bar]:
    measured = {(row["n"], row["pass"]): row for row in rows if is_of_the_bars(row)}
    bars = []
    for n, of_length in MS_BARS.items():
        for direction, wanted in of_length.items():
            row, what = measured.get((n, direction), {}).get, f"{n >> 10}K {direction}"
            for stretch, ms in zip(("", ", stretch"), wanted, strict=True):
                bars.append(Bar(f"{what}{stretch}", row("ms_p50"), ms, at_least=False, unit=" ms"))
            for name in PEERS:
                times = ratio(row(f"{name}_ms"), row("ms_p50"))
                bars.append(Bar(f"{what}, {name} takes as long or longer", times, 1, at_least=True, unit="x"))
    peak = measured.get((64 << 10, "fwd+bwd"), {}).get("peak_gib")
    for stretch, gib in zip(("", ", stretch"), GIB_BARS, strict=True):
        bars.append(Bar(f"64K fwd+bwd, peak memory{stretch}", peak, gib, at_least=False, unit=" GiB"))
    return bars


def line(row: Row) -> str:
    """A row for readers."""
    share = "" if row["share_of_floor"] is None else f" ({row['share_of_floor']:.0%} of the floor)"
    others = {"dense": (row["dense_ms"], row["dense_peak_gib"])}
    others |= {name: (row[f"{name}_ms"], row[f"{name}_gib"]) for name in PEERS}
    ours = f"{row['n']:>8} {row['pass']:<8}{row['mode']:<7} NSA {_cost(row['ms_p50'], row['peak_gib'])}{share}"
    return "  ".join([ours, *(f"{name} {_cost(*cost)}" for name, cost in others.items())])


def _cost(ms: float | None, gib: float | None) -> str:
    return f"{ms_text(ms)} ms" + ("" if gib is None else f" {gib:.2f} GiB")


def plot(rows: Sequence[Row], path: Path, device: str) -> None:
    """A panel for each pass: times by N of NSA, dense attention and peers, NSA's floor and bars."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    with saved_figure(path, 1, len(passes), (6 * len(passes), 5)) as (figure, panels):
        for axes, direction in zip(panels[0], passes, strict=True):
            first_of_each = {row["n"]: row for row in reversed(rows) if row["pass"] == direction}
            own = [first_of_each[n] for n in sorted(first_of_each)]
            shown = {"dense_ms": own[0]["dense"], **{f"{name}_ms": name for name in PEERS}}
            shown |= {"ms_p50": f"NSA ({own[0]['backend']})", "floor_ms": "NSA's floor at peak rates"}
            for field, label in shown.items():
                points = [(row["n"], row[field]) for row in own]
                draw_points(axes, points, "--" if field == "floor_ms" else "o-", label=label)
            bars = [
                (n, MS_BARS[n][direction][0])
                for n, row in first_of_each.items()
                if n in MS_BARS and is_of_the_bars(row)
            ]
            draw_points(axes, bars, "v", color="black", label="bar")
            label_lengths(axes, first_of_each, ylabel="ms per call", title=PASS_TITLES[direction])
        figure.suptitle(f"NSA of the paper, {rows[0]['h']} heads over {rows[0]['h_kv']} of {rows[0]['d']}, on {device}")


if __name__ == "__main__":
    sys.exit(main())
