"""Context parallelism of NSA: each rank's share of a sequence, timed alone on one device, or all ranks under torchrun.

    python bench/bench_context_parallel.py --bars                       one GPU: balance and scaling
    torchrun --nproc-per-node 2 bench/bench_context_parallel.py --bars  a GPU for each rank: speed-up, messages, links

Alone, one rank after the other runs what nsa/distributed does for its tokens, with the keys of all ranks there already:
messages are neither sent nor added up. `shares` says how far the slowest rank is above the mean and how much longer all
shares take than the undivided call; with --bars also what both have to reach on an H200. Under torchrun the ranks call
together (bench/context_together.py), and `shares` says besides how much faster they are than one GPU, what messages
take, and how much of it is not hidden.

Before a case is timed its rows are held against the undivided call (together: of at most `--checked` tokens), on CUDA
bit for bit, and gradients but for roundings (alone: the sum of all ranks' shares of dk; together: with the same bits in
two deterministic runs); where they differ, nothing is reported and the status is 1.

Writes OUT.json after every case (schema: docs/results_files.md). The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.bars import Bar, figure
from bench.common import PRESETS, add_device, make_parser, positive, preset_name
from bench.context_shares import (
    BAR_SIZES,
    PASSES,
    Case,
    ShareOf,
    Whole,
    config_of,
    difference,
    kv_heads_per_pass,
    line,
    make_do,
    make_row,
    make_tensors,
    received_keys,
    report,
    take,
    tile_of,
)
from bench.context_together import BARS, run_together
from bench.driver import run
from bench.report import LOCAL_RESULTS, command_line, environment
from bench.results_file import Row, WrongResult
from bench.timing import measure
from nsa.distributed.layout import Layout, make_layout

SIZES, CPU_SIZES = ("per_tile:1M:8/2", "paper:256K:64/4"), ("per_tile:600:2/1", "paper:300:2/1")
RANKS, CPU_RANKS = (2, 4, 8, 16), (2, 3)
BALANCE_BAR, SCALING_BAR = 1.05, 1.08
"""The slowest rank over the mean, with zigzag; all shares over the undivided call."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_together(args) if args.together else run_alone(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dim", "dtype", "seconds", "bars", "out", dim=None, seconds=0.5)
    add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--sizes", nargs="+", help=f"preset:N:heads; default: {' '.join(SIZES)} (CPU: {' '.join(CPU_SIZES)})")
    add("--ranks", nargs="+", type=positive, help="R, alone; default: 2 4 8 16 (CPU: 2 3)")
    add("--layouts", nargs="+", choices=["zigzag", "contiguous"], default=["zigzag"], help="default: zigzag")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--kv-heads-per-pass", type=positive, help="default: that of ContextParallel")
    add("--repeats", type=positive, default=5, help="of each timing under torchrun; default: %(default)s")
    add("--checked", type=positive, default=16 << 10, help="most tokens of the check under torchrun; default: 16K")
    args = parser.parse_args(argv)
    args.together = "LOCAL_RANK" in os.environ
    on_cpu = args.device == "cpu"
    args.dim, args.dtype = args.dim or (16 if on_cpu else 128), args.dtype or ("fp32" if on_cpu else "bf16")
    args.out = args.out or str(LOCAL_RESULTS / f"context-parallel{'-together' if args.together else ''}")
    if args.together and args.ranks:
        parser.error("--ranks is for shares alone: torchrun says how many ranks there are")
    ranks = [int(os.environ["WORLD_SIZE"])] if args.together else args.ranks or (CPU_RANKS if on_cpu else RANKS)
    if args.together and args.bars and ranks[0] not in BARS:
        parser.error(f"--bars under torchrun are for {' and '.join(map(str, BARS))} ranks, got {ranks[0]}")
    args.cases = []
    try:
        for size, count, layout in product(args.sizes or (CPU_SIZES if on_cpu else SIZES), ranks, args.layouts):
            preset, n, heads = size.split(":")
            h, h_kv = map(positive, heads.split("/"))
            preset = preset_name(preset)
            if preset not in PRESETS or h % h_kv:
                raise ValueError(size)
            args.cases.append(Case(preset, positive(n), h, h_kv, count, layout))
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"--sizes must be such as {SIZES[0]}, got {args.sizes}")
    device = torch.device(args.device)
    for case in args.cases:
        layout = make_layout(case.n, None, case.ranks, case.layout, tile_of(config_of(case, device), device))
        if 0 in layout.lengths:
            parser.error(f"--sizes must give every rank tokens, got {layout.lengths} for {case.name}")
    args.command = command_line(argv)
    return args


# Shares alone


def run_alone(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    cases = [*dict.fromkeys(case.undivided for case in args.cases), *args.cases]
    parts = [(case.name, partial(time_shares, case, args, device)) for case in cases]
    return run(args, environment(device), lambda _: parts, line, **report(args, find_bars))


def time_shares(case: Case, args: argparse.Namespace, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows of all ranks, and what did not run: nothing. Raises WrongResult."""
    config, tensors = config_of(case, device), make_tensors(case, args, device)
    whole = Whole(config, tensors, make_do(tensors["q"]))
    layout = make_layout(case.n, None, case.ranks, case.layout, tile_of(config, device))
    shares = [] if case.ranks == 1 else divide(args, whole, layout)
    if shares and (wrong := check_shares(whole, layout, shares)):
        raise WrongResult(f"{case.name}: {wrong}")
    rows = []
    timed: Sequence[Whole | ShareOf] = shares or [whole]
    for direction, (rank, share) in product(args.passes, enumerate(timed)):
        call: Callable[[], Any] = share.forward if direction == "fwd" else share.both
        timing, tokens = measure(call, device, seconds=args.seconds), layout.lengths[rank]
        rows.append(make_row(case, args, rank, "alone", direction, timing.ms_p50, timing.peak_gib, tokens))
    return rows, []


def divide(args: argparse.Namespace, whole: Whole, layout: Layout) -> list[ShareOf]:
    """The shares of all ranks."""
    k, v = whole.tensors["k"], whole.tensors["v"]
    shares, received = [], received_keys(layout, k, v, kv_heads_per_pass(args, layout, k))
    for rank, ranges in enumerate(layout.ranges):
        own = {n: x if n == "gate_proj_weight" else take(x, ranges) for n, x in whole.tensors.items()}
        shares.append(ShareOf(args, whole.config, layout, rank, own, take(whole.do, ranges), received))
    return shares


def check_shares(whole: Whole, layout: Layout, shares: Sequence[ShareOf]) -> str:
    """Description of the first wrong rows or gradients of the ranks; "" if there are none."""
    expected, dq, *dkv = whole.both()
    totals: list[Tensor] = []
    for rank, (ranges, share) in enumerate(zip(layout.ranges, shares, strict=True)):
        kept: list[Tensor] = []
        out, gradients = share.both(kept)
        totals = [a + b for a, b in zip(totals, kept, strict=True)] if totals else kept
        for name, got, want in (("out", out, expected), ("dq", gradients["q"], dq)):
            if wrong := difference(got, take(want, ranges), exact=name == "out" and whole.do.is_cuda):
                return f"{name} of rank {rank}: {wrong}"
    for i, (name, want) in enumerate(zip(("dk", "dv"), dkv, strict=True)):
        got = torch.cat(totals[i::2], -2).movedim(0, -3).to(want.dtype)
        if wrong := difference(got, want, exact=False):
            return f"{name} of all ranks: {wrong}"
    return ""


def find_bars(shares: Sequence[Row]) -> Iterator[Bar]:
    for preset, ranks, direction in product(BAR_SIZES, RANKS, PASSES):
        where = {"preset": preset, "n": BAR_SIZES[preset], "ranks": ranks, "layout": "zigzag", "pass": direction}
        name = f"{preset} {BAR_SIZES[preset] >> 10}K, {ranks} ranks, {direction}"
        balance, total = (figure(shares, where, field) for field in ("slowest_over_mean", "sum_over_single"))
        yield Bar(f"{name}, slowest over mean", balance, BALANCE_BAR, at_least=False, unit="x")
        yield Bar(f"{name}, all over undivided", total, SCALING_BAR, at_least=False, unit="x")


if __name__ == "__main__":
    sys.exit(main())
