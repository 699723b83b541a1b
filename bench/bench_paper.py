"""The paper's NSA beside dense attention and its peers: forward, and forward + backward, in one process.

NSA and dense attention are checked and timed as in bench_sparse_attn_e2e.py, with NSAConfig.paper() and 64 query heads
over 4, D = 128: errors against fp64 come first, and where one is above its budget nothing more is timed and the status
is 1. A peer (bench/nsa_peers.py) computes a little less than NSA here and need only give finite numbers; where it does
not run it has null, and the reason is told. Dense attention and peers are timed once for each length and pass, as eager
calls; on CUDA without what a host takes to start them on an idle GPU, which NSA's mode "eager" has, "queued" has not.

Writes OUT.json after every length and pass (schema: docs/results_files.md); at the end OUT.csv and OUT.png. The same
command goes on where it was stopped or killed. With --bars also what the rows have to reach on one H200, and whether
they do: that of mode "queued".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import dispatch
from bench import bench_sparse_attn_e2e as e2e
from bench.bars import Bar, bars_field
from bench.common import DTYPES, choose_dense, with_ending
from bench.extras import needed
from bench.inputs import Sizes, make_problem
from bench.nsa_peers import COMPUTES, PEERS, make_peer, make_task
from bench.pass_report import PASS_TITLES, ms_text, show_bars
from bench.passes import Plan, find_peer, measure_peer, release
from bench.report import LOCAL_RESULTS, command_line, environment, relative, replacing, write_csv
from bench.results_file import open_results
from bench.roofline import choose_peaks
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
"""Of forward + backward at 64K: what the fastest peer (SFNSA) holds, and the one that holds least (fla)."""


@dataclass(frozen=True)
class Row(e2e.Row):
    """One line of the results; of a peer what it took, and null where it did not run."""

    fla_ms: float | None
    fla_gib: float | None
    fla_computes: str | None

    def peer_ms(self, name: str) -> float | None:
        ms: float | None = getattr(self, f"{name}_ms")
        return ms

    @property
    def is_of_the_bars(self) -> bool:
        """Has the sizes and options that the bars are for."""
        sizes = self.b, self.h, self.h_kv, self.d, self.dtype
        options = self.l, self.stride, self.l_select, self.k, self.w, self.q_tile
        plain = self.mode == "queued" and self.gated and self.inputs == "random"
        return plain and sizes == (1, 64, 4, 128, "bf16") and options == (32, 16, 64, 16, 512, 1)


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
    with open_results(out, {**facts, "command": args.command}) as results:
        for run, (some, _) in zip(runs, variants, strict=True):
            part = f"N={run.seqlens[0]} {PASSES[run.backward]}"
            if part in results.parts:
                continue
            rows: list[e2e.Row] = []
            red: list[str] = []
            e2e.run(run, some, dense, peaks, device, keep=rows.append, refuse=red.append)
            if red:
                results.fail(red, missing=[])
                print("Wrong results, so no times are reported:", *red, sep="\n  ")
                return 1
            peers, missing = time_peers(run, device)
            beside = [Row(**{**asdict(row), **peer_fields(peers)}) for row in rows]
            results.add(part, [row.as_json() for row in beside], missing)
            print(*map(line, beside), *missing, sep="\n", flush=True)
        every = [Row.of_json(row) for row in results.rows]
        bars = find_bars(every) if args.bars else []
        write_csv(with_ending(out, ".csv"), results.rows)
        plot(every, with_ending(out, ".png"), facts["device"])
        results.finish(missing=results.missing, **bars_field(bars if args.bars else None))
    if args.bars:
        show_bars(bars)
    print(*(relative(with_ending(out, suffix)) for suffix in (".png", ".csv", ".json")), sep="   ")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of its own, and those of bench_sparse_attn_e2e.py behind the paper's."""
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


def peer_fields(peers: dict[str, Timing | None]) -> dict[str, float | str | None]:
    fields: dict[str, float | str | None] = {}
    for name, timing in peers.items():
        fields[f"{name}_ms"] = None if timing is None else timing.ms_p50
        fields[f"{name}_gib"] = None if timing is None else timing.peak_gib
        fields[f"{name}_computes"] = None if timing is None else COMPUTES[name]
    return fields


# What has to be reached


def find_bars(rows: Sequence[Row]) -> list[Bar]:
    measured = {(row.n, row.direction): row for row in rows if row.is_of_the_bars}
    bars = []
    for n, of_length in MS_BARS.items():
        for direction, wanted in of_length.items():
            row, what = measured.get((n, direction)), f"{n >> 10}K {direction}"
            took = None if row is None else row.ms_p50
            bars += [
                Bar(f"{what}{stretch}", took, ms, at_least=False, unit=" ms")
                for stretch, ms in zip(("", ", stretch"), wanted, strict=True)
            ]
            for name in PEERS:
                peer = None if row is None else row.peer_ms(name)
                ratio = None if took is None or peer is None else peer / took
                bars.append(Bar(f"{what}, {name} takes as long or longer", ratio, 1, at_least=True, unit="x"))
    row = measured.get((64 << 10, "fwd+bwd"))
    for stretch, gib in zip(("", ", stretch"), GIB_BARS, strict=True):
        peak = None if row is None else row.peak_gib
        bars.append(Bar(f"64K fwd+bwd, peak memory{stretch}", peak, gib, at_least=False, unit=" GiB"))
    return bars


# What is shown


def line(row: Row) -> str:
    """A row for readers."""
    share = "" if row.share_of_floor is None else f" ({row.share_of_floor:.0%} of the floor)"
    others: dict[str, tuple[float | None, float | None]] = {"dense": (row.dense_ms, row.dense_peak_gib)}
    others |= {name: (row.peer_ms(name), getattr(row, f"{name}_gib")) for name in PEERS}
    ours = f"{row.n:>8} {row.direction:<8}{row.mode:<7} NSA {_cost(row.ms_p50, row.peak_gib)}{share}"
    return "  ".join([ours, *(f"{name} {_cost(*cost)}" for name, cost in others.items())])


def _cost(ms: float | None, gib: float | None) -> str:
    return f"{ms_text(ms)} ms" + ("" if gib is None else f" {gib:.2f} GiB")


def plot(rows: Sequence[Row], path: Path, device: str) -> None:
    """A panel for each pass: times by N of NSA, dense attention and peers, NSA's floor and bars."""
    with needed("matplotlib"):
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

    passes = list(dict.fromkeys(row.direction for row in rows))
    figure, panels = plt.subplots(1, len(passes), figsize=(6 * len(passes), 5), layout="constrained", squeeze=False)
    for axes, direction in zip(panels[0], passes, strict=True):
        first_of_each = {row.n: row for row in reversed(rows) if row.direction == direction}
        own = [first_of_each[n] for n in sorted(first_of_each)]
        lines: dict[str, list[float | None]] = {own[0].dense: [row.dense_ms for row in own]}
        lines |= {name: [row.peer_ms(name) for row in own] for name in PEERS}
        lines[f"NSA ({own[0].backend})"] = [row.ms_p50 for row in own]
        lines["NSA's floor at peak rates"] = [row.floor_ms for row in own]
        for label, times in lines.items():
            points = [(row.n, ms) for row, ms in zip(own, times, strict=True) if ms is not None]
            if points:
                axes.loglog(*zip(*points, strict=True), "--" if "floor" in label else "o-", label=label)
        wanted = [(row.n, MS_BARS[row.n][direction][0]) for row in own if row.is_of_the_bars and row.n in MS_BARS]
        if wanted:
            axes.loglog(*zip(*wanted, strict=True), "v", color="black", label="bar")
        axes.set(xlabel="tokens N", ylabel="ms per call", title=PASS_TITLES[direction])
        axes.set_xticks([row.n for row in own], [f"{row.n / 1024:g}K" for row in own])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"NSA of the paper, {rows[0].h} heads over {rows[0].h_kv} of {rows[0].d}, on {device}")
    with replacing(path) as written:
        figure.savefig(written, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
