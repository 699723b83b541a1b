"""Context parallelism of NSA: each rank's share of a sequence, timed alone on one device, or all ranks under torchrun.

    python bench/bench_context_parallel.py --bars                       one GPU: balance and scaling
    torchrun --nproc-per-node 2 bench/bench_context_parallel.py --bars  a GPU for each rank: speed-up, messages, links

Alone, one rank after the other runs what nsa/distributed does for its tokens, with the keys of all ranks there already:
messages are neither sent nor added up. Before a case is timed its rows are held against the undivided call (together:
of at most `--checked` tokens), and gradients but for roundings; where they differ, nothing is reported and the status
is 1. Writes OUT.json (schema: docs/results_files.md) after every case. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.common import add_device, head_counts, make_parser, parse_args, positive, preset_name
from bench.context_shares import PASSES, RANKS, Case, config_of, run_alone, tile_of
from bench.context_together import BARS, run_together
from bench.report import LOCAL_RESULTS
from nsa.distributed.layout import make_layout

SIZES, CPU_SIZES = ("per_tile:1M:8/2", "paper:256K:64/4"), ("per_tile:600:2/1", "paper:300:2/1")
CPU_RANKS = (2, 3)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_together(args) if args.together else run_alone(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dtype", "seconds", "bars", seconds=0.5)
    add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--sizes", nargs="+", help=f"preset:N:heads; default: {' '.join(SIZES)} (CPU: {' '.join(CPU_SIZES)})")
    add("--ranks", nargs="+", type=positive, help="R, alone; default: 2 4 8 16 (CPU: 2 3)")
    add("--layouts", nargs="+", choices=["zigzag", "contiguous"], default=["zigzag"], help="default: zigzag")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--kv-heads-per-pass", type=positive, help="default: that of ContextParallel")
    add("--dim", type=positive, help="D; default: 128 (CPU: 16)")
    add("--out", help=f"results, without suffix; default: {LOCAL_RESULTS / 'context-parallel'}, torchrun: -together")
    add("--repeats", type=positive, default=5, help="of each timing under torchrun; default: %(default)s")
    add("--checked", type=positive, default=16 << 10, help="most tokens of the check under torchrun; default: 16K")
    args = parse_args(parser, argv)
    args.together = "LOCAL_RANK" in os.environ
    on_cpu = args.device == "cpu"
    args.dim, args.dtype = args.dim or (16 if on_cpu else 128), args.dtype or ("fp32" if on_cpu else "bf16")
    args.out = args.out or str(LOCAL_RESULTS / f"context-parallel{'-together' if args.together else ''}")
    if args.together and args.ranks:
        parser.error("--ranks is for shares alone: torchrun says how many ranks there are")
    ranks = [int(os.environ["WORLD_SIZE"])] if args.together else args.ranks or (CPU_RANKS if on_cpu else RANKS)
    if args.together and args.bars and ranks[0] not in BARS:
        parser.error(f"--bars under torchrun are for {' and '.join(map(str, BARS))} ranks, got {ranks[0]}")
    device, args.cases = torch.device(args.device), []
    try:
        for size, count, layout in product(args.sizes or (CPU_SIZES if on_cpu else SIZES), ranks, args.layouts):
            preset, n, heads = size.split(":")
            case = Case(preset_name(preset), positive(n), *head_counts(heads), count, layout)
            lengths = make_layout(case.n, None, case.ranks, layout, tile_of(config_of(case, device), device)).lengths
            if 0 in lengths:
                parser.error(f"--sizes must give every rank tokens, got {lengths} for {case.name}")
            args.cases.append(case)
    except (KeyError, ValueError, argparse.ArgumentTypeError):
        parser.error(f"--sizes must be such as {SIZES[0]}, got {args.sizes}")
    return args


if __name__ == "__main__":
    sys.exit(main())
