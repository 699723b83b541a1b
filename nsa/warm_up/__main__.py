"""python -m nsa.warm_up: compile the CUDA kernels of NSA ahead of time, with a progress bar."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from nsa.config import NSAConfig
from nsa.warm_up import warm_up

PRESETS = {"per_tile": NSAConfig.per_tile, "paper": NSAConfig.paper}


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa.warm_up", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="per_tile", help="options of the calls (default: %(default)s)")
    add(
        "--shape",
        type=sizes,
        action="append",
        metavar="B,N,H,H_kv,D[,D_v]",
        help="shape of a call; may be given several times (default: 1,8192,8,2,128)",
    )
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("--ungated", action="store_true", help="calls without gate_proj_weight")
    add("--forward", action="store_true", help="compile kernels of inference only")
    add("--processes", type=int, help="number of processes (default: one per core, up to 16)")
    add(
        "--target",
        metavar="sm_90,132",
        help="architecture and multiprocessors of the GPU, if it is not in this machine",
    )
    args = parser.parse_args(argv)
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        parser.error('needs rich for its progress bar: pip install "nsa-kernels[bench]", or call nsa.warm_up')
    target = None
    if args.target is not None:
        arch, _, sms = args.target.partition(",")
        digits = "".join(c for c in arch if c.isdigit())
        if not (len(digits) > 1 and sms.isdigit() and int(sms) > 0):
            parser.error(f"--target takes an architecture and a number, as sm_90,132, got {args.target!r}")
        target = (int(digits[:-1]), int(digits[-1])), int(sms)
    elif not torch.cuda.is_available():
        parser.error("no CUDA device is available: pass --target sm_90,132")
    begin = time.monotonic()
    columns = TextColumn("kernels on disk"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=None)
        try:
            count = warm_up(
                PRESETS[args.preset](),
                args.shape or [(1, 8192, 8, 2, 128)],
                dtype=getattr(torch, args.dtype),
                gated=not args.ungated,
                backward=not args.forward,
                processes=args.processes,
                target=target,
                progress=lambda there, asked: bar.update(task, completed=there, total=asked),
            )
        except (ValueError, RuntimeError) as problem:
            bar.stop()
            parser.error(str(problem))
    sys.stdout.write(f"{count} kernels are on disk, after {time.monotonic() - begin:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
