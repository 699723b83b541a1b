"""Dense attention against NSA, end to end, over sequence lengths and options.

For each N and each combination of options: the error of the whole op against fp64 on sampled rows, with --backward also
of the gradients that these rows give; then time, peak memory and speed-up, with times beside what the device's peak
rates allow. Errors come first: where one is above its budget, or a timed call gives another result than the checked
one, there are no times and the script ends with status 1 (a red gate). Dense attention is timed once for each N, always
eagerly.

Mode "graph" times replays of a CUDA graph of the whole call, "eager" the call as Python makes it. The peak memory of a
graph is that of its capture. Memory is counted beyond the inputs for the forward; with --backward it is everything
alive: inputs, out, do, gradients and temporaries.

Writes OUT.json (schema: docs/results_files.md) after every row; at the end OUT.csv and OUT.png. The same command goes
on where it was stopped or killed. `--demo` picks sizes for this machine; on a CPU dense attention and NSA then take
turns on one thread (bench/turns.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import oracles
from bench.common import (
    DTYPES,
    PRESETS,
    Dense,
    above_zero,
    add_sizes,
    choose_backend,
    choose_dense,
    nsa_facts,
    positive,
    preset_name,
    resolve_sizes,
    with_ending,
)
from bench.extras import needed
from bench.gradient_check import GradientError, Tiles, gradient_errors, in_fp64, low_precision, sampled_do
from bench.inputs import KINDS, Problem, Sizes, make_problem
from bench.passes import release
from bench.report import LOCAL_RESULTS, command_line, environment, relative, replacing, write_csv
from bench.results_file import ResultRow, Results, open_results
from bench.roofline import Peaks, choose_peaks, dense_floor_ms, nsa_floor_ms
from bench.timing import Timing, capture, measure, peak_memory
from bench.turns import FEWEST, NOISY, Spread, one_thread, take_turns, verdict
from dispatch.device import describe_device, device_types
from nsa import NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import NSAInputs

with needed("rich"):
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

SAMPLED_ROWS = 256
CHECKED_BYTES = 48 << 30
"""What a checked call and its three branches may give; heads of longer sequences are checked in turn."""
MODES = ("eager", "queued", "graph")
"""From an idle GPU; as an eager call while the GPU works on something else, as in a training step; as a CUDA graph."""
TABLE_WIDTH = 120
"""Columns that the table may take where the terminal has fewer, or where there is none."""
console = Console()


@dataclass(frozen=True)
class Row(ResultRow):
    """One line of the results; times in ms, memory in GiB: beyond the inputs, forward + backward all of it."""

    op: str
    preset: str
    backend: str
    mode: str
    b: int
    n: int
    h: int
    h_kv: int
    d: int
    dtype: str
    l: int  # noqa: E741 (the paper's name, and the schema's)
    stride: int
    l_select: int
    k: int
    w: int
    q_tile: int
    num_cmp: int | None
    gated: bool
    recompute: bool
    inputs: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    peak_gib: float | None
    error: float
    error_budget: float
    gradient_error: float | None
    gradient_budget: float | None
    dense: str
    dense_ms: float
    dense_extrapolated: bool
    dense_peak_gib: float | None
    speedup: float
    floor_ms: float | None
    share_of_floor: float | None
    command: str

    direction: str

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.b, self.n, self.h, self.h_kv, self.d)

    @property
    def backward(self) -> bool:
        return self.direction == "fwd+bwd"

    @property
    def line(self) -> tuple[int, int | None, str]:
        """What rows of one line in the plot have in common."""
        return (self.l, self.num_cmp, self.mode)

    @property
    def name(self) -> str:
        """Tells it from the other rows of a run."""
        return row_name(self.n, self.l, self.num_cmp, self.mode)


def row_name(n: int, block_size: int, num_cmp: int | None, mode: str) -> str:
    return f"N={n} l={block_size} num_cmp={_none(num_cmp)} {mode}"


@dataclass(frozen=True)
class TurnsRow(Row):
    """One of the demo on a CPU: `speedup` is the median over turns. Times are CPU time of one thread."""

    turns: int
    speedup_p20: float
    speedup_p80: float
    faster: str

    @property
    def ratio(self) -> Spread:
        return Spread(self.speedup_p20, self.speedup, self.speedup_p80)

    def place(self, *, options: bool) -> str:
        """Args: `options`, whether to name them, as where there are several."""
        return f"N = {self.n:,}" + (f" with l={self.l} num_cmp={_none(self.num_cmp)}" if options else "")


@dataclass(frozen=True)
class Variant:
    """One combination of options, the backend that runs it, and how it is timed."""

    config: NSAConfig
    backend: str
    modes: tuple[str, ...]
    backward: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        return f"l={self.config.compress_block_size} num_cmp={_none(self.config.num_cmp_selected_blocks)}"

    def row_name(self, n: int, mode: str) -> str:
        return row_name(n, self.config.compress_block_size, self.config.num_cmp_selected_blocks, mode)


@dataclass(frozen=True)
class Sample:
    """The checked call: its worst row's error, and its rows at some positions, for other calls to be compared with."""

    error: float
    budget: float
    positions: Tensor
    rows: Tensor
    tiles: Tiles
    gradient: GradientError | None = None
    """The one that takes most of its budget."""

    def same(self, out: Tensor) -> bool:
        return torch.equal(out[:, self.positions], self.rows)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with one_thread() if args.turns else nullcontext():
        return benchmark(args)


def benchmark(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    try:
        variants, notes = choose_variants(args, device)
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    dense = choose_dense(device, DTYPES[args.dtype])
    facts = environment(device)
    peaks = choose_peaks(facts["device"], args.peak_tflops, args.peak_tbs)
    console.print(
        f"[bold]Sparse (NSA) against dense attention[/bold] ({dense.name}) on {args.input} input: "
        f"{'forward + backward' if args.backward else 'forward'}, {args.dtype}, H={args.heads} H_kv={args.kv_heads} "
        f"D={args.dim}, on {describe_device(device.type)}",
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, style="yellow", markup=False)
    if args.turns:
        return demonstrate(args, variants, dense, facts)
    rows: list[Row] = []
    red: list[str] = []
    out = Path(args.out)
    with open_results(out, {**facts, "command": args.command}) as results:

        def keep(row: Row) -> None:
            rows.append(row)
            results.add(row.name, [row.as_json()])

        def refuse(reason: str) -> None:
            red.append(reason)
            results.fail(red)

        rows += map(Row.of_json, results.rows)
        run(args, variants, dense, peaks, device, keep=keep, refuse=refuse, before=list(rows))
        if red:
            console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
            return 1
        write_csv(with_ending(out, ".csv"), results.rows)
        plot(rows, with_ending(out, ".png"), facts["device"], peaks)
        results.finish()
    show(rows, out)
    return 0


def choose_variants(args: argparse.Namespace, device: torch.device) -> tuple[list[Variant], list[str]]:
    """Every combination of options with its backend, and what to say of them.

    Raises:
        TypeError, ValueError, dispatch.BackendError: for one that cannot run as it was asked for.
    """
    variants: list[Variant] = []
    notes: dict[str, None] = {}
    sizes = Sizes(args.batch, 1, args.heads, args.kv_heads, args.dim)
    for config in args.configs:
        call = nsa_facts(sizes, config, device, DTYPES[args.dtype], backward=args.backward, recompute=args.recompute)
        backend, note = choose_backend(call, args.backend)
        modes = modes_of(args)
        if backend == "reference" and "graph" in modes:
            reason = "the reference reads values on the host, which a CUDA graph cannot hold"
            if args.modes:
                raise ValueError(f"--modes graph: {reason}")
            modes = [mode for mode in modes if mode != "graph"]
            note = "\n".join(filter(None, (note, f"Mode {', '.join(modes)} only: {reason}")))
        if note:
            notes[note] = None
        variants.append(Variant(config, backend, tuple(modes), args.backward, args.recompute))
    return variants, list(notes)


@dataclass(frozen=True)
class DenseTime:
    """What dense attention took, at one length."""

    n: int
    ms: float
    peak_gib: float | None


def run(
    args: argparse.Namespace,
    variants: list[Variant],
    dense: Dense,
    peaks: Peaks | None,
    device: torch.device,
    *,
    keep: Callable[[Row], None],
    refuse: Callable[[str], None],
    before: Sequence[Row] = (),
) -> None:
    """A row for each length, combination of options and mode; after a wrong result no more, only checks.

    Args:
        keep: given each row as soon as it is measured.
        refuse: given what is wrong with a result, as soon as that is seen.
        before: rows that were measured earlier: they are neither measured nor given to `keep` again.
    """
    known = {row.name for row in before}
    measured = [DenseTime(row.n, row.dense_ms, row.dense_peak_gib) for row in before if not row.dense_extrapolated]
    longest = measured[-1] if measured else None  # lengths ascend
    red = False
    with Progress(console=console, transient=True) as progress:
        steps = progress.add_task("starting", total=len(args.seqlens) * (1 + sum(1 + len(v.modes) for v in variants)))
        for n in args.seqlens:
            sizes = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)
            every = [(variant, mode) for variant in variants for mode in variant.modes]
            left = [(variant, mode) for variant, mode in every if variant.row_name(n, mode) not in known]
            progress.advance(steps, len(every) - len(left))
            if not left:
                progress.advance(steps, 1 + len(variants))
                continue
            release(device)
            problem = make_problem(
                args.input,
                sizes,
                device=device,
                dtype=DTYPES[args.dtype],
                gated=not args.ungated,
                requires_grad=args.backward,
            )
            samples: dict[Variant, Sample] = {}
            for variant in variants:
                progress.update(steps, description=f"N={n} {variant}: error against fp64")
                samples[variant], wrong = check(problem, variant)
                for reason in wrong:
                    red = True
                    refuse(f"N={n} {variant}: {reason}")
                progress.advance(steps)
            if red:
                continue
            extrapolated = longest is not None and args.no_dense_above is not None and n > args.no_dense_above
            if longest is None or not (extrapolated or longest.n == n):
                progress.update(steps, description=f"N={n}: {dense.name}")
                timing = measure(
                    dense_call(problem, dense, args.backward), device, seconds=args.seconds, host=not is_queued(args)
                )
                timing = everything(timing, leaves(problem)[:3]) if args.backward else timing
                longest = DenseTime(n, timing.ms_p50, timing.peak_gib)
            dense_ms = longest.ms * (n / longest.n) ** 2
            progress.advance(steps)
            for variant, mode in left:
                progress.update(steps, description=f"N={n} {variant}: NSA, {mode}")
                sample = samples[variant]
                nsa_timing = measure_mode(mode, nsa_call(problem, variant), sample, device, args.seconds)
                progress.advance(steps)
                if nsa_timing is None:
                    red = True
                    refuse(f"N={n} {variant}: the replayed graph gives another result than the checked call")
                    break
                timing = everything(nsa_timing, leaves(problem)) if args.backward else nsa_timing
                floor = None
                if peaks is not None:
                    floor = nsa_floor_ms(sizes, variant.config, peaks, problem.q.itemsize, backward=args.backward)
                keep(
                    Row(
                        **named(args, sizes, variant, mode),
                        **time_and_error(timing, sample),
                        dense=dense.name,
                        dense_ms=dense_ms,
                        dense_extrapolated=extrapolated,
                        dense_peak_gib=None if extrapolated else longest.peak_gib,
                        speedup=dense_ms / timing.ms_p50,
                        floor_ms=floor,
                        share_of_floor=None if floor is None else floor / timing.ms_p50,
                    )
                )


def demonstrate(args: argparse.Namespace, variants: list[Variant], dense: Dense, facts: dict[str, Any]) -> int:
    """The demo on a CPU, with one thread."""
    out = Path(args.out)
    with open_results(out, {**facts, "command": args.command}) as results:
        if red := run_turns(args, variants, dense, results):
            results.fail(red)
            console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
            return 1
        rows = [TurnsRow.of_json(row) for row in results.rows]
        options = {(row.l, row.num_cmp) for row in rows}
        said = verdict([(row.place(options=len(options) > 1), row.ratio) for row in rows])
        write_csv(with_ending(out, ".csv"), results.rows)
        drawn: list[Row] = [row for row in rows if row.faster != NOISY]
        if drawn:
            plot(drawn, with_ending(out, ".png"), facts["device"], None)
        results.finish(verdict=said)
    show_turns(rows, said, out, plotted=bool(drawn))
    return 0


def run_turns(args: argparse.Namespace, variants: list[Variant], dense: Dense, results: Results) -> list[str]:
    """A row for each length and combination of options; returns what is wrong, after which nothing is timed."""
    red: list[str] = []
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    with Progress(console=console, transient=True) as progress:
        steps = progress.add_task("starting", total=len(args.seqlens) * (len(variants) + FEWEST + 1))
        for n in args.seqlens:
            if f"N={n}" in results.parts:
                progress.advance(steps, len(variants) + FEWEST + 1)
                continue
            progress.update(steps, description=f"N={n}: error against fp64")
            sizes = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)
            problem = make_problem(
                args.input, sizes, device=device, dtype=dtype, gated=not args.ungated, requires_grad=args.backward
            )
            samples = []
            for variant in variants:
                sample, wrong = check(problem, variant)
                samples.append(sample)
                red += [f"N={n} {variant}: {reason}" for reason in wrong]
                progress.advance(steps)
            if red:
                continue
            progress.update(steps, description=f"N={n}: memory")
            calls = [dense_call(problem, dense, args.backward), *(nsa_call(problem, variant) for variant in variants)]
            peaks = [peak_memory(call, device) for call in calls]  # and these calls warm up
            progress.advance(steps)
            progress.update(steps, description=f"N={n}: dense attention and NSA in turn")
            times = take_turns(calls, args.seconds, lambda: progress.advance(steps))
            spreads = [Spread.of(own) for own in times]
            timings = [
                Timing(of.p20, of.p50, of.p80, peak, len(own))
                for of, peak, own in zip(spreads, peaks, times, strict=True)
            ]
            if args.backward:
                inputs = leaves(problem)
                timings = [everything(timings[0], inputs[:3]), *(everything(timing, inputs) for timing in timings[1:])]
            rows = []
            for i, (variant, sample) in enumerate(zip(variants, samples, strict=True), 1):
                ratios = [theirs / ours for theirs, ours in zip(times[0], times[i], strict=True)]
                row = named(args, sizes, variant, "turns")
                rows.append(turns_row(row, sample, dense.name, timings[0], timings[i], Spread.of(ratios)))
            results.add(f"N={n}", [row.as_json() for row in rows])
    return red


def turns_row(row: dict[str, Any], sample: Sample, dense: str, theirs: Timing, ours: Timing, ratio: Spread) -> TurnsRow:
    """Args: `row`, what it says about what was run; `ratio`, of dense attention's time to NSA's."""
    return TurnsRow(
        **row,
        **time_and_error(ours, sample),
        dense=dense,
        dense_ms=theirs.ms_p50,
        dense_extrapolated=False,
        dense_peak_gib=theirs.peak_gib,
        speedup=ratio.p50,
        floor_ms=None,
        share_of_floor=None,
        turns=ours.repeats,
        speedup_p20=ratio.p20,
        speedup_p80=ratio.p80,
        faster=ratio.faster,
    )


def time_and_error(timing: Timing, sample: Sample) -> dict[str, Any]:
    """What a row says of the op's time, memory and errors."""
    gradient = sample.gradient
    return {
        "ms_p20": timing.ms_p20,
        "ms_p50": timing.ms_p50,
        "ms_p80": timing.ms_p80,
        "peak_gib": timing.peak_gib,
        "error": sample.error,
        "error_budget": sample.budget,
        "gradient_error": None if gradient is None else gradient.error,
        "gradient_budget": None if gradient is None else gradient.budget,
    }


def named(args: argparse.Namespace, sizes: Sizes, variant: Variant, mode: str) -> dict[str, Any]:
    """What a row says about what was run."""
    config = variant.config
    return {
        "op": "nsa",
        "preset": args.preset,
        "direction": "fwd+bwd" if args.backward else "fwd",
        "backend": variant.backend,
        "mode": mode,
        "b": sizes.batch,
        "n": sizes.tokens,
        "h": sizes.heads,
        "h_kv": sizes.kv_heads,
        "d": sizes.dim,
        "dtype": args.dtype,
        "l": config.compress_block_size,
        "stride": config.stride,
        "l_select": config.select_size,
        "k": config.num_selected_blocks,
        "w": config.window_size,
        "q_tile": config.q_tile_size,
        "num_cmp": config.num_cmp_selected_blocks,
        "gated": not args.ungated,
        "recompute": args.recompute,
        "inputs": args.input,
        "command": args.command,
    }


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--demo", action="store_true", help="real text and sizes that take about a minute on this machine")
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--seqlens", type=_list(positive), metavar="N,N,...", help="tokens per sequence, such as 4096,8192 or 4K,8K,1M")
    add_sizes(parser)
    add("--input", choices=KINDS, help="default: random; the demo: text")
    add(
        "--backward",
        action="store_true",
        help="check and time forward + backward; peak memory is then of everything alive: inputs, out, do, gradients "
        "and temporaries",
    )
    add("--recompute", action="store_true", help="with --backward: keep less and compute it again, as in nsa")
    add("--ungated", action="store_true", help="weigh the branches by 1/3 instead of learned gates")
    add(
        "--modes",
        type=_list(_mode),
        metavar="MODE,...",
        help="eager: from an idle GPU, with the time that the host takes to start; queued: without it, then dense "
        "attention too; graph; default: eager, on CUDA forward eager,graph",
    )
    options = parser.add_argument_group("options of NSA (see NSAConfig); lists make a row for each combination")
    add = options.add_argument
    add("--preset", type=preset_name, choices=PRESETS, default="per_tile", help="of NSAConfig; default: %(default)s")
    add("--block-sizes", type=_list(positive), metavar="L,...", help="compress_block_size; l' follows")
    add("--select-size", type=positive, metavar="L'", help="select_block_size")
    add("--num-cmp", type=_list(_count_or_none), metavar="C,...", help="num_cmp_selected_blocks, such as none,16")
    add("--k", type=int, help="num_selected_blocks")
    add("--w", type=int, help="window_size")
    add("--q-tile", type=positive, metavar="T", help="q_tile_size")
    add = parser.add_argument
    add("--backend", help="as in nsa_forward; default: the first that can run")
    repeat = "about how long to repeat each measurement; default: 1, the demo on a CPU: 2"
    add("--seconds", type=above_zero, help=repeat)
    add("--no-dense-above", type=positive, metavar="N", help="from there on, extrapolate dense attention's time by N^2")
    add("--peak-tflops", type=above_zero, help="of the device, for the roofline; default: known of H100 and H200")
    add("--peak-tbs", type=above_zero, help="TB/s of its memory; default: likewise, else 4.8")
    add("--out", default=str(LOCAL_RESULTS / "e2e"), help="results, without suffix; default: %(default)s")
    args = parser.parse_args(argv)
    args.usual_modes = ["eager", "graph"]
    args.command = command_line(argv)
    args.turns = args.demo and args.device == "cpu"
    if args.turns:
        args.heads = args.heads or 1
        args.seqlens = args.seqlens or [4096, 8192, 24576, 32768]  # not 16384, where neither is clearly ahead
    if args.seconds is None:
        args.seconds = 2.0 if args.turns else 1.0
    resolve_sizes(parser, args)
    args.input = args.input or ("text" if args.demo else "random")
    cpu_lengths, gpu_lengths = [1024, 2048, 4096, 8192, 16384, 32768], [8192, 32768, 131072]
    args.seqlens = sorted(set(args.seqlens or (cpu_lengths if args.device == "cpu" else gpu_lengths)))
    if args.no_dense_above is not None and args.no_dense_above < args.seqlens[0]:
        parser.error(
            f"--no-dense-above must leave a length to measure, at least {args.seqlens[0]}, got {args.no_dense_above}"
        )
    for option, given in (("--modes", args.modes), ("--no-dense-above", args.no_dense_above)):
        if args.turns and given is not None:
            parser.error(f"{option} is not for --demo on a CPU, where dense attention and NSA take turns")
    if args.recompute and not args.backward:
        parser.error("--recompute goes with --backward")
    for mode in args.modes or ():
        if mode != "eager" and args.device != "cuda":
            parser.error(f"--modes {mode} needs --device cuda, got {args.device}")
        if mode == "graph" and args.backward:
            parser.error("--modes graph is for the forward pass, got --backward")
    try:
        args.configs = make_configs(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def make_configs(args: argparse.Namespace) -> list[NSAConfig]:
    """Every combination of the lists of options, on top of the preset.

    Raises:
        TypeError, ValueError: for one that NSAConfig refuses.
    """
    given = {"num_selected_blocks": args.k, "window_size": args.w, "q_tile_size": args.q_tile}
    config = PRESETS[args.preset](**{name: value for name, value in given.items() if value is not None})
    sizes = [{}] if args.block_sizes is None else [{"compress_block_size": l} for l in args.block_sizes]  # noqa: E741
    if args.block_sizes is not None or args.select_size is not None:
        sizes = [{**size, "select_block_size": args.select_size} for size in sizes]
    chosen = [{}] if args.num_cmp is None else [{"num_cmp_selected_blocks": count} for count in args.num_cmp]
    return [replace(config, **size, **count) for size, count in product(sizes, chosen)]


def _list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Argument type: items with commas between them; what comes twice counts once."""

    def parse_list(text: str) -> list[Any]:
        return list(dict.fromkeys(item(part.strip()) for part in text.split(",")))

    return parse_list


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(MODES)}, got {text!r}")
    return text


def _count_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else positive(text)


# What is checked and timed


def leaves(problem: Problem) -> list[Tensor]:
    """What gradients are for, q first."""
    tensors = (problem.q, problem.k, problem.v, problem.gate_proj_weight)
    return [tensor for tensor in tensors if tensor is not None]


def forward_call(problem: Problem, variant: Variant) -> Callable[[], Tensor]:
    given: dict[str, Any] = {
        "gate_proj_weight": problem.gate_proj_weight,
        "config": variant.config,
        "backend": variant.backend,
    }
    if variant.backward:
        return lambda: nsa(problem.q, problem.k, problem.v, **given, recompute=variant.recompute)
    return lambda: nsa_forward(problem.q, problem.k, problem.v, **given)


def nsa_call(problem: Problem, variant: Variant) -> Callable[[], Any]:
    forward = forward_call(problem, variant)
    if not variant.backward:
        return forward
    grad = torch.randn_like(problem.q)
    return lambda: torch.autograd.grad(forward(), leaves(problem), grad)


def dense_call(problem: Problem, dense: Dense, backward: bool) -> Callable[[], Any]:
    q, k, v = problem.q, problem.k, problem.v

    def forward() -> Tensor:
        with torch.no_grad():
            return dense.attention(q, k, v)

    if not backward:
        return forward
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(dense.attention(q, k, v), (q, k, v), grad)


def modes_of(args: argparse.Namespace) -> list[str]:
    """Those that were asked for, or the usual ones; graphs are for the forward."""
    modes = args.modes or (args.usual_modes if args.device == "cuda" else ["eager"])
    return [mode for mode in modes if mode != "graph" or not args.backward] or ["eager"]


def is_queued(args: argparse.Namespace) -> bool:
    """Whether what NSA is compared with is timed without the host: once for all modes, as NSA is where it is so."""
    return "queued" in modes_of(args)


def everything(timing: Timing, given: Sequence[Tensor]) -> Timing:
    """With all that is alive in forward + backward: also the inputs, and do, which is like the first of them."""
    return timing.holding([given[0], *given])


def measure_mode(
    mode: str, call: Callable[[], Any], sample: Sample, device: torch.device, seconds: float
) -> Timing | None:
    """Times of a checked call; None when a replay of its graph gives another result."""
    if mode != "graph":
        return measure(call, device, seconds=seconds, host=mode == "eager")
    release(device)  # a graph has memory of its own
    captured = capture(call, device)
    captured.out.fill_(math.nan)
    captured.replay()
    if not sample.same(captured.out):
        return None
    return replace(measure(captured.replay, device, seconds=seconds), peak_gib=captured.peak_gib)


def check(problem: Problem, variant: Variant) -> tuple[Sample, list[str]]:
    """The checked call, and what is wrong with it or with the one to be timed."""
    sample = sampled_error(problem, variant)
    wrong = []
    if not sample.error <= sample.budget:
        wrong.append(f"error {sample.error:.2e} is above the budget {sample.budget:.2e}")
    out = forward_call(problem, variant)()
    if not sample.same(out.detach()):
        wrong.append("the timed call gives another result than the checked one, which also returns NSAAux")
    if not variant.backward:
        return sample, wrong
    do = sampled_do(out.detach(), sample.positions)
    inputs = plain_inputs(problem)
    gradients = dict(zip(inputs.tensors(), torch.autograd.grad(out, leaves(problem), do), strict=True))
    del out  # and what it keeps for backward
    errors = gradient_errors(gradients, inputs, variant.config, sample.tiles, sample.positions, do)
    wrong += [
        f"error {found.error:.2e} of the gradient of {found.name} is above the budget {found.budget:.2e}"
        for found in errors
        if not found.within
    ]
    return replace(sample, gradient=max(errors, key=lambda found: found.share)), wrong


def plain_inputs(problem: Problem) -> NSAInputs:
    """The inputs, needing no gradients."""
    return NSAInputs(problem.q, problem.k, problem.v, gate_proj_weight=problem.gate_proj_weight).map(Tensor.detach)


def sampled_error(problem: Problem, variant: Variant) -> Sample:
    """Error of the whole op against fp64, and what may be expected of the dtype.

    Of at least SAMPLED_ROWS rows, that of the row which takes most of its own budget: the first rows see few keys, so
    their values are many times larger than those of late rows, of which one budget for all would hide what is wrong.
    Budget: that of bench/oracles.py for `gradient_check.low_precision`. The oracle attends to the blocks that the op
    under test chose.
    """
    config, inputs = variant.config, plain_inputs(problem)
    num_tiles = -(-inputs.q.shape[1] // config.q_tile_size)
    wanted = min(num_tiles, max(4, math.ceil(SAMPLED_ROWS / config.q_tile_size)))
    numbers = torch.linspace(0, num_tiles - 1, wanted, device=inputs.q.device).round().long()
    heads = inputs.q.shape[2]
    parts = [checked_heads(inputs, variant, numbers, some) for some in together(inputs)]
    positions, tiles = parts[0].positions, join_heads([part.tiles for part in parts])
    rows, low = (torch.cat(found, 2) for found in ([part.rows for part in parts], [part.low for part in parts]))
    oracle = torch.cat([exact_head(inputs, config, tiles, head) for head in range(heads)], 2)
    errors, low_errors, largest = (
        x.abs().amax((0, 2, 3)) for x in (rows.double() - oracle, low.double() - oracle, oracle)
    )
    budgets = [
        oracles.budget(*row, rows.dtype, inputs.q.shape[-1])
        for row in zip(low_errors.tolist(), largest.tolist(), strict=True)
    ]
    pairs = zip(errors.tolist(), budgets, strict=True)
    worst = max((GradientError("out", *pair) for pair in pairs), key=lambda found: found.share)
    return Sample(worst.error, worst.budget, positions, rows, tiles)


@dataclass(frozen=True)
class Checked:
    """The checked call for some heads: its rows at some positions, and `low_precision` there."""

    positions: Tensor
    rows: Tensor
    low: Tensor
    tiles: Tiles


def together(inputs: NSAInputs) -> list[range]:
    """Key/value heads that are checked in one call: all, unless four outputs are more than CHECKED_BYTES."""
    heads = inputs.k.shape[2]
    count = max(1, min(heads, CHECKED_BYTES // (4 * inputs.q.nbytes // heads)))
    return [range(first, min(first + count, heads)) for first in range(0, heads, count)]


def checked_heads(inputs: NSAInputs, variant: Variant, numbers: Tensor, heads: range) -> Checked:
    """Args: `numbers`, of tiles. `heads`, for keys and values."""
    group = inputs.q.shape[2] // inputs.k.shape[2]
    some = of_heads(inputs, range(heads.start * group, heads.stop * group), heads)
    out, aux = nsa_forward_aux(
        some.q, some.k, some.v, gate_proj_weight=some.gate_proj_weight, config=variant.config, backend=variant.backend
    )
    chosen, cmp_chosen = aux.indices, aux.cmp_indices
    tiles = Tiles(numbers, chosen[:, :, numbers], None if cmp_chosen is None else cmp_chosen[:, :, numbers])
    del aux  # its outputs would lack to what follows on long sequences
    size, tokens = variant.config.q_tile_size, out.shape[1]
    positions = (numbers[:, None] * size + torch.arange(size, device=out.device)).flatten()
    positions = positions[positions < tokens]
    return Checked(positions, out[:, positions], low_precision(some, variant.config, tiles), tiles)


def exact_head(inputs: NSAInputs, config: NSAConfig, tiles: Tiles, head: int) -> Tensor:
    """Rows of one query head in fp64: one at a time, so that the copies fit beside the inputs at any N that runs."""
    heads = inputs.q.shape[2]
    of_keys = head * inputs.k.shape[2] // heads
    one = of_heads(inputs, range(head, head + 1), range(of_keys, of_keys + 1))
    return in_fp64(one, config, tiles.of_query_head(head, heads))


def of_heads(inputs: NSAInputs, heads: range, kv_heads: range) -> NSAInputs:
    """Of the same sequences; nothing is copied."""
    weight = inputs.gate_proj_weight
    return replace(
        inputs,
        q=inputs.q[:, :, heads.start : heads.stop],
        k=inputs.k[:, :, kv_heads.start : kv_heads.stop],
        v=inputs.v[:, :, kv_heads.start : kv_heads.stop],
        gate_proj_weight=None if weight is None else weight[heads.start : heads.stop],
    )


def join_heads(parts: Sequence[Tiles]) -> Tiles:
    """Of the same tiles, for some heads each."""
    chosen = [part.cmp_indices for part in parts if part.cmp_indices is not None]
    indices = torch.cat([part.indices for part in parts], 1)
    return Tiles(parts[0].numbers, indices, torch.cat(chosen, 1) if chosen else None)


# What is shown


def _none(value: int | None) -> str:
    return "none" if value is None else str(value)


def _ms(value: float) -> str:
    return f"{value:,.{3 if value < 1 else 2 if value < 10 else 1}f}"


def show(rows: list[Row], out: Path) -> None:
    backward = rows[0].backward
    memory_of = "of everything alive" if backward else "beyond the inputs"
    table = Table(
        title=f"median time per call; dense: {rows[0].dense}; peak memory {memory_of}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    varying = [name for name in ("l", "num_cmp", "mode") if len({getattr(row, name) for row in rows}) > 1]
    floors = rows[0].share_of_floor is not None
    for heading in ("N", *varying, "dense ms", "NSA ms", "speed-up", *(["of floor"] if floors else [])):
        table.add_column(heading, justify="right")
    of_gradients = ("grad error", "grad budget") if backward else ()
    for heading in ("dense GiB", "NSA GiB", "error", "budget", *of_gradients):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = ["?" if gib is None else f"{gib:.2f}" for gib in (row.dense_peak_gib, row.peak_gib)]
        speed = f"[{'green' if row.speedup > 1 else 'red'}]{row.speedup:.2f}x[/]"
        share = [] if row.share_of_floor is None else [f"{row.share_of_floor:.0%}"]
        pairs = (row.error, row.error_budget, row.gradient_error, row.gradient_budget)
        errors = [f"{number:.1e}" for number in pairs if number is not None]
        dense_ms = f"{'~' if row.dense_extrapolated else ''}{_ms(row.dense_ms)}"
        options = [str(value) if (value := getattr(row, name)) is not None else "none" for name in varying]
        table.add_row(f"{row.n:,}", *options, dense_ms, _ms(row.ms_p50), speed, *share, *memory, *errors)
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    best = max(rows, key=lambda row: row.speedup)
    faster = sorted({row.n for row in rows if row.speedup > 1})
    in_which_rows = " in at least one row each" if varying else ""
    crossover = f"at N = {', '.join(f'{n:,}' for n in faster)}{in_which_rows}" if faster else "at none of these N"
    console.print(
        f"What this says: {costs(best)} NSA is faster {crossover}; best: {best.speedup:.2f}x at N = {best.n:,}. "
        f"Errors are the largest against fp64 on {SAMPLED_ROWS} rows or more (all, if N is smaller)"
        f"{', and of the gradients they give' if backward else ''}; each is within its budget, so the times count."
    )
    if any(row.dense_extrapolated for row in rows):
        console.print("~ is not measured: the time at the largest measured N, times the square of the ratio of N.")
    shown = [relative(with_ending(out, suffix)) for suffix in (".png", ".csv", ".json")]
    console.print(f"Plot: {shown[0]}   table: {shown[1]}   everything: {shown[2]}", soft_wrap=True)


def costs(row: Row) -> str:
    """What NSA saves, as a sentence."""
    entries = f"N/{row.stride}" if row.num_cmp is None else f"{row.num_cmp} blocks of"
    return (
        f"dense attention's time grows with N squared; NSA ({row.backend} backend) reads per query {entries} "
        f"compressed entries, {row.k} selected blocks of {row.l_select} and a window of {row.w}."
    )


def show_turns(rows: Sequence[TurnsRow], said: str, out: Path, *, plotted: bool) -> None:
    memory_of = "of everything alive" if rows[0].backward else "beyond the inputs"
    table = Table(
        title=f"median CPU time of one thread; dense: {rows[0].dense}; peak memory {memory_of}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    varying = [name for name in ("l", "num_cmp") if len({getattr(row, name) for row in rows}) > 1]
    of_gradients = ("grad error", "grad budget") if rows[0].backward else ()
    figures = ("turns", "dense ms", "NSA ms", "speed-up", "20 to 80 %", "faster", "dense GiB", "NSA GiB")
    for heading in ("N", *varying, *figures, "error", "budget", *of_gradients):
        table.add_column(heading, justify="right", no_wrap=True)
    colors = {"NSA": "green", "dense": "red"}
    for row in rows:
        options = [str(value) if (value := getattr(row, name)) is not None else "none" for name in varying]
        speed = f"{'?' if row.faster == NOISY else ''}{row.speedup:.2f}x"
        spread = f"{row.speedup_p20:.2f} to {row.speedup_p80:.2f}"
        memory = ["?" if gib is None else f"{gib:.2f}" for gib in (row.dense_peak_gib, row.peak_gib)]
        faster = f"[{colors.get(row.faster, 'yellow')}]{row.faster}[/]"
        pairs = (row.error, row.error_budget, row.gradient_error, row.gradient_budget)
        errors = [f"{number:.1e}" for number in pairs if number is not None]
        times = [_ms(row.dense_ms), _ms(row.ms_p50)]
        table.add_row(f"{row.n:,}", *options, str(row.turns), *times, speed, spread, faster, *memory, *errors)
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    console.print(
        f"What this says: {costs(rows[-1])} {said} Speed-ups are medians over turns, in each of which both ran, with "
        f"their 20th and 80th percentile. Errors are the largest against fp64 on {SAMPLED_ROWS} rows or more (all, if "
        f"N is smaller){', and of the gradients they give' if rows[0].backward else ''}; each is within its budget."
    )
    suffixes = [*([".png"] if plotted else []), ".csv", ".json"]
    console.print("Files:", *(str(relative(with_ending(out, suffix))) for suffix in suffixes), soft_wrap=True)


def plot(rows: list[Row], path: Path, device: str, peaks: Peaks | None) -> None:
    """Times and speed-ups by N: a line for each block size, number of compressed blocks and mode."""
    with needed("matplotlib"):
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

    lengths = sorted({row.n for row in rows})
    figure, (times, speed) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    dense = sorted({(row.n, row.dense_ms, row.dense_extrapolated) for row in rows})
    times.loglog([n for n, *_ in dense], [ms for _, ms, _ in dense], "-", color="tab:gray")
    for extrapolated, face in ((False, "tab:gray"), (True, "white")):
        points = [(n, ms) for n, ms, how in dense if how == extrapolated]
        if points:
            label = f"{rows[0].dense}, extrapolated by N²" if extrapolated else rows[0].dense
            times.loglog(*zip(*points, strict=True), "o", color="tab:gray", markerfacecolor=face, label=label)
    styles = {
        "eager": {"marker": "o", "markerfacecolor": "white", "linewidth": 1},
        "queued": {"marker": "o", "linewidth": 1},
        "graph": {"marker": "s", "linewidth": 2},
        "turns": {"marker": "o", "linewidth": 2},
    }
    options = list(dict.fromkeys((row.l, row.num_cmp) for row in rows))
    speeds = [row.speedup for row in rows]
    for line in dict.fromkeys(row.line for row in rows):
        length, count, mode = line
        own = [row for row in rows if row.line == line]
        color = f"C{options.index((length, count))}"
        label = f"NSA ({own[0].backend}) l={length} num_cmp={_none(count)}, {mode}"
        drawn = {**styles[mode], "linestyle": "-", "color": color, "label": label}
        times.loglog([row.n for row in own], [row.ms_p50 for row in own], **drawn)
        speed.loglog([row.n for row in own], [row.speedup for row in own], **drawn)
    if peaks is not None:
        for option in options:
            own = list({row.n: row for row in rows if (row.l, row.num_cmp) == option}.values())
            bounds = [
                dense_floor_ms(row.sizes, peaks, backward=row.backward) / row.floor_ms for row in own if row.floor_ms
            ]
            label = f"roofline l={option[0]} num_cmp={_none(option[1])}"
            color = f"C{options.index(option)}"
            speed.loglog([row.n for row in own], bounds, "--", color=color, label=label)
            speeds += bounds
    speed.axhline(1, color="tab:gray", linewidth=1)
    ticks = [m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5)]
    low, high = min(1.0, *speeds) / 2, max(1.0, *speeds) * 2
    ticks = [tick for tick in ticks if low <= tick <= high]
    speed.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    at_peak = "" if peaks is None else f"\nroofline: {peaks.tflops:g} TFLOP/s, {peaks.tbs:g} TB/s"
    times.set(xlabel="tokens N", ylabel="ms per call", title=f"{rows[0].direction}, {rows[0].inputs} input")
    speed.set(xlabel="tokens N", ylabel="dense time / NSA time", title=f"speed-up on {device}{at_peak}")
    for axes in (times, speed):
        axes.set_xticks(lengths, [_short(n) for n in lengths], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with replacing(path) as written:
        figure.savefig(written, dpi=150)
    plt.close(figure)


def _short(n: int) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if n % size == 0:
            return f"{n // size}{unit}"
    return str(n)


if __name__ == "__main__":
    sys.exit(main())
