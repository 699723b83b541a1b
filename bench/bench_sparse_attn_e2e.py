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
from collections.abc import Callable, Mapping, Sequence
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
from bench.gradient_check import (
    GradientError,
    Tiles,
    gradient_errors,
    in_fp64,
    low_precision,
    of_heads,
    sampled_do,
)
from bench.inputs import KINDS, Problem, Sizes, make_problem
from bench.passes import release
from bench.report import LOCAL_RESULTS, command_line, environment, relative
from bench.results_file import Part, Results, Row, open_results
from bench.roofline import Peaks, choose_peaks, dense_floor_ms, nsa_floor_ms
from bench.show import console, draw_points, label_lengths, ms_text, print_table, saved_figure
from bench.timing import Timing, capture, measure, peak_memory
from bench.turns import NOISY, Spread, one_thread, take_turns, verdict
from dispatch.device import describe_device, device_types
from nsa import NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import NSAInputs

SAMPLED_ROWS = 256
CHECKED_BYTES = 48 << 30
"""Most bytes that a checked call and its three branches return; heads of longer sequences are checked in turn."""
MODES = ("eager", "queued", "graph")
"""From an idle GPU; as an eager call while the GPU works on something else, as in a training step; as a CUDA graph."""


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

    def part(self, n: int, mode: str) -> str:
        """Name of a row in the file of results."""
        return f"N={n} {self} {mode}"


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
    out = Path(args.out)
    with open_results(out, {**facts, "command": args.command}) as results:
        said = ""
        if args.turns:
            red = run_turns(args, variants, dense, results)
        else:
            how: dict[str, Any] = {"keep": results.add, "fail": results.fail, "before": dict(results.parts)}
            red = run(args, variants, dense, peaks, device, **how)
        if red:
            results.fail(red)
            console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
            return 1
        rows = results.rows
        if args.turns:
            several = len({options_of(row) for row in rows}) > 1
            said = verdict([(place(row, options=several), spread_of(row)) for row in rows])
        if drawn := [row for row in rows if row.get("faster") != NOISY]:
            plot(drawn, with_ending(out, ".png"), facts["device"], None if args.turns else peaks)
        more: dict[str, Any] = {"verdict": said} if args.turns else {}
        results.finish(csv=True, **more)
    show(rows, out, said, plotted=bool(drawn))
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


def run(
    args: argparse.Namespace,
    variants: list[Variant],
    dense: Dense,
    peaks: Peaks | None,
    device: torch.device,
    *,
    keep: Callable[[str, list[Row]], None],
    fail: Callable[[list[str]], None],
    before: Mapping[str, Part],
) -> list[str]:
    """Measure a row for each length, combination of options and mode.

    Args:
        keep: called with each row, and the name of its part, as soon as it is measured.
        fail: called with all wrong results so far as soon as there is one more.
        before: parts that were measured earlier, which are not measured again.

    Returns:
        Wrong results. After the first one nothing more is timed.
    """
    red: list[str] = []
    measured = [row for part in before.values() for row in part.rows if not row["dense_extrapolated"]]
    longest = (measured[-1]["n"], measured[-1]["dense_ms"], measured[-1]["dense_peak_gib"]) if measured else None

    def refuse(*reasons: str) -> None:
        red.extend(reasons)
        fail(red)

    with console.status("") as status:
        for n in args.seqlens:
            every = [(variant, mode) for variant in variants for mode in variant.modes]
            left = [(variant, mode) for variant, mode in every if variant.part(n, mode) not in before]
            if not left:
                continue
            problem = make_inputs(args, n, device)
            samples, wrong = check_all(problem, n, variants, status.update)
            if wrong:
                refuse(*wrong)
            if red:
                continue
            extrapolated = longest is not None and args.no_dense_above is not None and n > args.no_dense_above
            if longest is None or not (extrapolated or longest[0] == n):
                status.update(f"N={n}: {dense.name}")
                call = dense_call(problem, dense, args.backward)
                timing = measure(call, device, seconds=args.seconds, host=not is_queued(args))
                timing = everything(timing, leaves(problem)[:3]) if args.backward else timing
                longest = n, timing.ms_p50, timing.peak_gib
            dense_ms, dense_gib = longest[1] * (n / longest[0]) ** 2, None if extrapolated else longest[2]
            theirs = {"dense_ms": dense_ms, "dense_extrapolated": extrapolated, "dense_peak_gib": dense_gib}
            for variant, mode in left:
                status.update(f"N={n} {variant}: NSA, {mode}")
                sample = samples[variant]
                nsa_timing = measure_mode(mode, nsa_call(problem, variant), sample, device, args.seconds)
                if nsa_timing is None:
                    refuse(f"N={n} {variant}: the replayed graph gives another result than the checked call")
                    break
                timing = everything(nsa_timing, leaves(problem)) if args.backward else nsa_timing
                row = make_row(args, n, variant, mode, timing, sample, dense, theirs, dense_ms / timing.ms_p50)
                if peaks is not None:
                    sizes, itemsize = sizes_of(row), problem.q.itemsize
                    floor = nsa_floor_ms(sizes, variant.config, peaks, itemsize, backward=args.backward)
                    row |= {"floor_ms": floor, "share_of_floor": floor / timing.ms_p50}
                keep(variant.part(n, mode), [row])
    return red


def run_turns(args: argparse.Namespace, variants: list[Variant], dense: Dense, results: Results) -> list[str]:
    """The demo on a CPU: a row for each length and combination of options; `speedup` is the median over turns.

    Times are CPU time of one thread.

    Returns:
        Wrong results, after which nothing is timed.
    """
    red: list[str] = []
    device = torch.device(args.device)
    with console.status("") as status:
        for n in args.seqlens:
            if f"N={n}" in results.parts:
                continue
            problem = make_inputs(args, n, device)
            samples, wrong = check_all(problem, n, variants, status.update)
            red += wrong
            if red:
                continue
            status.update(f"N={n}: dense attention and NSA in turn")
            calls = [dense_call(problem, dense, args.backward), *(nsa_call(problem, variant) for variant in variants)]
            peaks = [peak_memory(call, device) for call in calls]  # and these calls warm up
            times = take_turns(calls, args.seconds)
            timings = []
            for i, (peak, own) in enumerate(zip(peaks, times, strict=True)):
                spread = Spread.of(own)
                timing = Timing(spread.p20, spread.p50, spread.p80, peak, len(own))
                given = leaves(problem)[: None if i else 3]
                timings.append(everything(timing, given) if args.backward else timing)
            theirs = {"dense_ms": timings[0].ms_p50, "dense_extrapolated": False, "dense_peak_gib": timings[0].peak_gib}
            rows = []
            for variant, own, timing in zip(variants, times[1:], timings[1:], strict=True):
                ratio = Spread.of([dense_ms / ms for dense_ms, ms in zip(times[0], own, strict=True)])
                row = make_row(args, n, variant, "turns", timing, samples[variant], dense, theirs, ratio.p50)
                row |= {"turns": timing.repeats, "speedup_p20": ratio.p20, "speedup_p80": ratio.p80}
                rows.append({**row, "faster": ratio.faster})
            results.add(f"N={n}", rows)
    return red


def check_all(
    problem: Problem, n: int, variants: list[Variant], update: Callable[[str], None]
) -> tuple[dict[Variant, Sample], list[str]]:
    """The checked call of each variant, and wrong results."""
    samples, red = {}, []
    for variant in variants:
        update(f"N={n} {variant}: error against fp64")
        samples[variant], wrong = check(problem, variant)
        red += [f"N={n} {variant}: {reason}" for reason in wrong]
    return samples, red


def make_inputs(args: argparse.Namespace, n: int, device: torch.device) -> Problem:
    release(device)
    sizes = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)
    options: dict[str, Any] = {"gated": not args.ungated, "requires_grad": args.backward}
    return make_problem(args.input, sizes, device=device, dtype=DTYPES[args.dtype], **options)


def make_row(
    args: argparse.Namespace,
    n: int,
    variant: Variant,
    mode: str,
    timing: Timing,
    sample: Sample,
    dense: Dense,
    dense_fields: Row,
    speedup: float,
) -> Row:
    """Times in ms, memory in GiB: beyond the inputs, for forward + backward all of it. There is no floor yet."""
    config, gradient = variant.config, sample.gradient
    row = {"op": "nsa", "preset": args.preset, "backend": variant.backend, "mode": mode, "b": args.batch, "n": n}
    row |= {"h": args.heads, "h_kv": args.kv_heads, "d": args.dim, "dtype": args.dtype}
    row |= {"l": config.compress_block_size, "stride": config.stride, "l_select": config.select_size}
    row |= {"k": config.num_selected_blocks, "w": config.window_size, "q_tile": config.q_tile_size}
    row |= {"num_cmp": config.num_cmp_selected_blocks, "gated": not args.ungated, "recompute": args.recompute}
    row |= {"inputs": args.input, **timing.fields, "peak_gib": timing.peak_gib}
    row |= {"error": sample.error, "error_budget": sample.budget}
    row |= {"gradient_error": gradient and gradient.error, "gradient_budget": gradient and gradient.budget}
    row |= {"dense": dense.name, **dense_fields, "speedup": speedup, "floor_ms": None, "share_of_floor": None}
    return {**row, "command": args.command, "pass": "fwd+bwd" if args.backward else "fwd"}


def sizes_of(row: Row) -> Sizes:
    return Sizes(row["b"], row["n"], row["h"], row["h_kv"], row["d"])


def options_of(row: Row) -> tuple[int, int | None]:
    return row["l"], row["num_cmp"]


def spread_of(row: Row) -> Spread:
    return Spread(row["speedup_p20"], row["speedup"], row["speedup_p80"])


def place(row: Row, *, options: bool) -> str:
    """Args: `options`: name them, as there are several."""
    return f"N = {row['n']:,}" + (f" with l={row['l']} num_cmp={_none(row['num_cmp'])}" if options else "")


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
    add("--peak-tbs", type=above_zero, help="TB/s of its memory; default: known of H100 and H200, else 4.8")
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


# Checks and calls


def leaves(problem: Problem) -> list[Tensor]:
    """Tensors that get gradients, q first."""
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
    """True if dense attention and peers, timed once for all modes, are timed without the host, as in mode "queued"."""
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
    return in_fp64(one, config, tiles.of_heads(range(head, head + 1), heads))


def join_heads(parts: Sequence[Tiles]) -> Tiles:
    """Join the heads of the same tiles."""
    chosen = [part.cmp_indices for part in parts if part.cmp_indices is not None]
    indices = torch.cat([part.indices for part in parts], 1)
    return Tiles(parts[0].numbers, indices, torch.cat(chosen, 1) if chosen else None)


# Presentation


def _none(value: int | None) -> str:
    return "none" if value is None else str(value)


def show(rows: list[Row], out: Path, said: str, *, plotted: bool) -> None:
    """Args: `said`: the verdict of the demo; "" for other runs."""
    backward = rows[0]["pass"] == "fwd+bwd"
    turns, floors = "turns" in rows[0], any(row["share_of_floor"] is not None for row in rows)
    varying = [name for name in ("l", "num_cmp", "mode") if len({row[name] for row in rows}) > 1]
    headings = ["N", *varying, *(["turns"] if turns else []), "dense ms", "NSA ms", "speed-up"]
    headings += [*(["20 to 80 %", "faster"] if turns else []), *(["of floor"] if floors else [])]
    headings += ["dense GiB", "NSA GiB", "error", "budget", *(("grad error", "grad budget") if backward else ())]
    what = "CPU time of one thread" if turns else "time per call"
    memory_of = "of everything alive" if backward else "beyond the inputs"
    title = f"median {what}; dense: {rows[0]['dense']}; peak memory {memory_of}"
    print_table(title, [], headings, (cells(row, varying) for row in rows))
    errors = (
        f"Errors are the largest against fp64 on {SAMPLED_ROWS} rows or more (all, if N is smaller)"
        f"{', and of the gradients they give' if backward else ''}; each is within its budget, so the times count."
    )
    if turns:
        said += " Speed-ups are medians over turns, in each of which both ran, with their 20th and 80th percentile."
    else:
        best = max(rows, key=lambda row: row["speedup"])
        faster = sorted({row["n"] for row in rows if row["speedup"] > 1})
        in_which_rows = " in at least one row each" if varying else ""
        crossover = f"at N = {', '.join(f'{n:,}' for n in faster)}{in_which_rows}" if faster else "at none of these N"
        said = f"NSA is faster {crossover}; best: {best['speedup']:.2f}x at N = {best['n']:,}."
    console.print(f"What this says: {costs(rows[-1])} {said} {errors}")
    if any(row["dense_extrapolated"] for row in rows):
        console.print("~ is not measured: the time at the largest measured N, times the square of the ratio of N.")
    table, everything = (relative(with_ending(out, suffix)) for suffix in (".csv", ".json"))
    picture = f"Plot: {relative(with_ending(out, '.png'))}   " if plotted else ""
    console.print(f"{picture}table: {table}   everything: {everything}", soft_wrap=True)


def cells(row: Row, varying: Sequence[str]) -> list[str]:
    turns = []
    marks = "~" * row["dense_extrapolated"], "?" * (row.get("faster") == NOISY)
    speed, color = f"{marks[1]}{row['speedup']:.2f}x", "green" if row["speedup"] > 1 else "red"
    if "turns" in row:
        color = {"NSA": "green", "dense": "red"}.get(row["faster"], "yellow")
        turns = [f"{row['speedup_p20']:.2f} to {row['speedup_p80']:.2f}", f"[{color}]{row['faster']}[/]"]
    pairs = (row["error"], row["error_budget"], row["gradient_error"], row["gradient_budget"])
    return [
        f"{row['n']:,}",
        *(_none(row[name]) for name in varying),
        *([str(row["turns"])] if turns else []),
        marks[0] + ms_text(row["dense_ms"]),
        ms_text(row["ms_p50"]),
        f"[{color}]{speed}[/]",
        *turns,
        *([] if row["share_of_floor"] is None else [f"{row['share_of_floor']:.0%}"]),
        *("?" if gib is None else f"{gib:.2f}" for gib in (row["dense_peak_gib"], row["peak_gib"])),
        *(f"{number:.1e}" for number in pairs if number is not None),
    ]


def costs(row: Row) -> str:
    """A sentence about what NSA saves."""
    entries = f"N/{row['stride']}" if row["num_cmp"] is None else f"{row['num_cmp']} blocks of"
    return (
        f"dense attention's time grows with N squared; NSA ({row['backend']} backend) reads per query {entries} "
        f"compressed entries, {row['k']} selected blocks of {row['l_select']} and a window of {row['w']}."
    )


def plot(rows: Sequence[Row], path: Path, device: str, peaks: Peaks | None) -> None:
    """Times and speed-ups by N: a line for each block size, number of compressed blocks and mode."""
    lengths, dense_name = [row["n"] for row in rows], rows[0]["dense"]
    dense = sorted({(row["n"], row["dense_ms"], row["dense_extrapolated"]) for row in rows})
    options = list(dict.fromkeys(map(options_of, rows)))
    speeds = [row["speedup"] for row in rows]
    styles = {
        "eager": {"marker": "o", "markerfacecolor": "white", "linewidth": 1},
        "queued": {"marker": "o", "linewidth": 1},
        "graph": {"marker": "s", "linewidth": 2},
        "turns": {"marker": "o", "linewidth": 2},
    }
    with saved_figure(path, 1, 2, (12, 5)) as (_, panels):
        times, speed = panels[0]
        draw_points(times, [(n, ms) for n, ms, _ in dense], "-", color="tab:gray")
        for extrapolated, face in ((False, "tab:gray"), (True, "white")):
            points = [(n, ms) for n, ms, how in dense if how == extrapolated]
            label = f"{dense_name}, extrapolated by N²" if extrapolated else dense_name
            draw_points(times, points, "o", color="tab:gray", markerfacecolor=face, label=label)
        for of_line in dict.fromkeys((options_of(row), row["mode"]) for row in rows):
            own = [row for row in rows if (options_of(row), row["mode"]) == of_line]
            (length, count), mode = of_line
            label = f"NSA ({own[0]['backend']}) l={length} num_cmp={_none(count)}, {mode}"
            drawn = {**styles[mode], "linestyle": "-", "color": f"C{options.index(of_line[0])}", "label": label}
            draw_points(times, [(row["n"], row["ms_p50"]) for row in own], **drawn)
            draw_points(speed, [(row["n"], row["speedup"]) for row in own], **drawn)
        for i, (length, count) in enumerate(options):
            if peaks is None:
                break
            own = [row for row in rows if options_of(row) == (length, count)]
            backward = rows[0]["pass"] == "fwd+bwd"
            floors = [(row, dense_floor_ms(sizes_of(row), peaks, backward=backward)) for row in own]
            bounds = {row["n"]: ms / row["floor_ms"] for row, ms in floors}
            label = f"roofline l={length} num_cmp={_none(count)}"
            draw_points(speed, bounds.items(), "--", color=f"C{i}", label=label)
            speeds += bounds.values()
        speed.axhline(1, color="tab:gray", linewidth=1)
        low, high = min(1.0, *speeds) / 2, max(1.0, *speeds) * 2
        ticks = [tick for e in range(-3, 4) for m in (1, 2, 5) if low <= (tick := m * 10.0**e) <= high]
        speed.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        at_peak = "" if peaks is None else f"\nroofline: {peaks.tflops:g} TFLOP/s, {peaks.tbs:g} TB/s"
        label_lengths(times, lengths, ylabel="ms per call", title=f"{rows[0]['pass']}, {rows[0]['inputs']} input")
        title = f"speed-up on {device}{at_peak}"
        label_lengths(speed, lengths, ylabel="dense time / NSA time", title=title)


if __name__ == "__main__":
    sys.exit(main())
