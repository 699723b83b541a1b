"""Dense attention against NSA, end to end, over sequence lengths, options and backends.

For each N and each combination: the error of the whole op against fp64 on sampled rows, with --backward also of the
gradients that these rows give; then time, peak memory and speed-up, beside what the device's peak rates allow. Where an
error is above its budget, or a timed call gives another result than the checked one, there are no times and the script
ends with status 1 (a red gate). Dense attention is timed once for each N, always eagerly.

Writes OUT.json (schema and modes: docs/results_files.md) after every N; at the end OUT.png. The same command goes on
where it was stopped or killed. `--demo` picks sizes for this machine; on a CPU dense attention and NSA then take turns
on one thread (bench/turns.py), whatever --modes and --no-dense-above say.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import common
from bench.common import DTYPES, PRESETS, SDPA_BACKENDS, Dense, above_zero, choose_dense, comma_list, positive
from bench.inputs import KINDS, Sizes, make_problem
from bench.nsa_check import Sample, Variant, check
from bench.passes import release
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.roofline import Peaks, choose_peaks, nsa_floor_ms
from bench.show import Point, plot_lengths
from bench.timing import Timing, capture, measure, peak_memory, percentiles
from bench.turns import NOISY, Spread, one_thread, take_turns, verdict
from nsa import NSAConfig
from nsa.inputs import NSAInputs

MODES = ("eager", "queued", "graph")
"""From an idle GPU; as an eager call while the GPU works on something else, as in a training step; as a CUDA graph."""
CPU_LENGTHS, GPU_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768], [8192, 32768, 131072]
DEMO_LENGTHS = [4096, 8192, 24576, 32768]  # On a CPU; not 16384, where neither is clearly ahead
LINE = "N={n:,} {pass}, {mode}: NSA ({backend}) l={l}  num_cmp={num_cmp}  {ms_p50:ms} ms  {peak_gib:.2f} GiB"
LINE += "  {share_of_floor:percent} of the floor  dense {dense_ms:ms} ms  {dense_peak_gib:.2f} GiB"
LINE += "  speed-up {speedup:.2f}  ({speedup_p20:.2f} to {speedup_p80:.2f}, faster: {faster})"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with one_thread() if args.turns else nullcontext():
        return benchmark(args)


def benchmark(args: argparse.Namespace) -> int:
    facts = environment(torch.device(args.device))
    job = make_job(args, facts)
    print(
        f"Sparse (NSA) against dense attention ({job.dense.name}) on {args.input} input, {args.dtype}, H={args.heads} "
        f"H_kv={args.kv_heads} D={args.dim}, on {facts['device']}"
    )
    measure_length = job.turns if args.turns else job.sweep

    def parts(results: Results) -> Iterator[Measurement]:
        for n in args.seqlens:
            yield f"N={n}", partial(measure_length, n, results.rows)

    fields = turns_verdict if args.turns else lambda _: {}
    return run(args, facts, parts, LINE, fields=fields, plot=plot, show=show)


def make_job(args: argparse.Namespace, facts: dict[str, Any]) -> Job:
    """Every combination of options and backend; prints why the reference runs, if it does. May raise SystemExit."""
    device, dtype, variants = torch.device(args.device), DTYPES[args.dtype], []
    notes: set[str] = set()
    for config, named in product(args.configs, dict.fromkeys(args.backends or [None])):
        passes = {"backward": args.backward, "recompute": args.recompute}
        try:
            call = common.nsa_facts(sizes_of(args, 1), config, device, dtype, **passes)
            backend, note = common.choose_backend(call, named)
        except (TypeError, ValueError, dispatch.BackendError) as refusal:
            raise SystemExit(str(refusal)) from refusal
        # Graphs are of the forward, and cannot hold the reference, which reads values on the host
        able = [mode for mode in args.modes if mode != "graph" or not (args.backward or backend == "reference")]
        variants.append(Variant(config, backend, tuple(able or ["eager"]), args.backward, args.recompute))
        notes |= {note}
    for note in notes - {""}:
        print(note)
    peaks = choose_peaks(facts["device"], args.peak_tflops, args.peak_tbs)
    return Job(args, variants, choose_dense(device, dtype, args.sdpa), peaks)


@dataclass(frozen=True)
class Job:
    args: argparse.Namespace
    variants: list[Variant]
    dense: Dense
    peaks: Peaks | None

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    def check(self, n: int) -> tuple[NSAInputs, dict[Variant, Sample]]:
        """Inputs of a length, and the checked call of each variant. Raises WrongResult."""
        args = self.args
        release(self.device)
        kind: dict[str, Any] = {"device": self.device, "dtype": DTYPES[args.dtype]}
        inputs = make_problem(args.input, sizes_of(args, n), **kind, requires_grad=args.backward)
        samples, red = {}, []
        for variant in self.variants:
            samples[variant], wrong = check(inputs, variant)
            red += [f"N={n} {variant}: {reason}" for reason in wrong]
        if red:
            raise WrongResult(*red)
        return inputs, samples

    def sweep(self, n: int, before: Sequence[Row]) -> Iterator[Row]:
        """A row for each combination of options and mode. Raises WrongResult. Args: `before`: of shorter lengths."""
        args = self.args
        inputs, samples = self.check(n)
        dense = self.time_dense(inputs, before)
        for variant, mode in ((one, mode) for one in samples for mode in one.modes):
            timing = measure_mode(mode, nsa_call(inputs, variant), samples[variant], self.device, args.seconds)
            if timing is None:
                raise WrongResult(f"N={n} {variant}: the replayed graph gives another result than the checked call")
            timing = everything(timing, leaves(inputs), args.backward)
            yield self.row(n, variant, samples[variant], mode, timing, dense)

    def time_dense(self, inputs: NSAInputs, before: Sequence[Row]) -> Row:
        """Fields of dense attention: its time is queued if NSA's is in any mode, or extrapolated from `before`."""
        args, n = self.args, inputs.q.shape[1]
        measured = {row["n"]: row["dense_ms"] for row in before if not row["dense_extrapolated"]}
        if measured and args.no_dense_above is not None and n > args.no_dense_above:
            longest = max(measured)
            print(f"N={n:,}: dense attention's time is that of N={longest:,}, extrapolated by N^2")
            return dense_fields(self.dense, measured[longest] * (n / longest) ** 2, None, True)
        call = dense_call(inputs, self.dense, args.backward)
        timing = measure(call, self.device, seconds=args.seconds, host="queued" not in args.modes)
        timing = everything(timing, leaves(inputs)[:3], args.backward)
        return dense_fields(self.dense, timing.ms_p50, timing.peak_gib, False)

    def turns(self, n: int, _: Sequence[Row]) -> Iterator[Row]:
        """A row for each combination of options: the demo on a CPU.

        `speedup` is the median over turns. Times are CPU time of one thread.
        """
        backward = self.args.backward
        inputs, samples = self.check(n)
        calls = [dense_call(inputs, self.dense, backward), *(nsa_call(inputs, variant) for variant in samples)]
        peaks = [peak_memory(call, self.device) for call in calls]  # and these calls warm up
        times = take_turns(calls, self.args.seconds)
        timings = [Timing(*percentiles(own), peak, len(own)) for own, peak in zip(times, peaks, strict=True)]
        of_dense = everything(timings[0], leaves(inputs)[:3], backward)
        dense = dense_fields(self.dense, of_dense.ms_p50, of_dense.peak_gib, False)
        for (variant, sample), own, alone in zip(samples.items(), times[1:], timings[1:], strict=True):
            timing = everything(alone, leaves(inputs), backward)
            ratio = Spread.of([dense_ms / ms for dense_ms, ms in zip(times[0], own, strict=True)])
            row = self.row(n, variant, sample, "turns", timing, dense) | {"speedup": ratio.p50, "turns": timing.repeats}
            yield {**row, "speedup_p20": ratio.p20, "speedup_p80": ratio.p80, "faster": ratio.faster}

    def row(self, n: int, variant: Variant, sample: Sample, mode: str, timing: Timing, dense: Row) -> Row:
        """Times in ms, memory in GiB: beyond the inputs, for forward + backward all of it."""
        args, config, gradient = self.args, variant.config, sample.gradient
        size = {"itemsize": DTYPES[args.dtype].itemsize, "backward": args.backward}
        floor = self.peaks and nsa_floor_ms(sizes_of(args, n), config, self.peaks, **size)
        row = {"op": "nsa", "preset": args.preset, "backend": variant.backend, "mode": mode, "b": args.batch, "n": n}
        row |= {"h": args.heads, "h_kv": args.kv_heads, "d": args.dim, "dtype": args.dtype}
        row |= {"l": config.compress_block_size, "stride": config.stride, "l_select": config.select_size}
        row |= {"k": config.num_selected_blocks, "w": config.window_size, "q_tile": config.q_tile_size}
        row |= {"num_cmp": config.num_cmp_selected_blocks, "recompute": args.recompute}
        row |= {"inputs": args.input, **timing.fields, "peak_gib": timing.peak_gib}
        row |= {"error": sample.worst.error, "error_budget": sample.worst.budget}
        row |= {"gradient_error": gradient and gradient.error, "gradient_budget": gradient and gradient.budget}
        row |= {**dense, "speedup": dense["dense_ms"] / timing.ms_p50, "command": args.command}
        row |= {"floor_ms": floor, "share_of_floor": floor and floor / timing.ms_p50}
        return {**row, "pass": "fwd+bwd" if args.backward else "fwd"}


def sizes_of(args: argparse.Namespace, n: int) -> Sizes:
    return Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)


def dense_fields(dense: Dense, ms: float, gib: float | None, extrapolated: bool) -> Row:
    return {"dense": dense.name, "dense_ms": ms, "dense_extrapolated": extrapolated, "dense_peak_gib": gib}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, preset="per_tile", out=str(LOCAL_RESULTS / "e2e"))
    add = parser.add_argument
    add("--demo", action="store_true", help="real text and sizes that take about a minute on this machine")
    add("--backward", action="store_true", help="check and time forward + backward; peak memory is of everything alive")
    add("--recompute", action="store_true", help="with --backward: keep less and compute it again, as in nsa")
    add("--no-dense-above", type=positive, metavar="N", help="from there on, extrapolate dense attention's time by N^2")
    args = common.parse_args(parser, argv)
    on_cpu = args.device == "cpu"
    args.turns = args.demo and on_cpu
    args.heads = args.heads or (1 if args.turns else None)
    args.seconds = args.seconds or (2.0 if args.turns else 1.0)
    args.input = args.input or ("text" if args.demo else "random")
    args.seqlens = args.seqlens or (DEMO_LENGTHS if args.turns else CPU_LENGTHS if on_cpu else GPU_LENGTHS)
    if args.recompute and not args.backward:
        parser.error("--recompute goes with --backward")
    resolve(parser, args)
    args.modes = args.modes or (["eager", "graph"] if args.device == "cuda" else ["eager"])
    return args


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Options that bench_paper.py has, too."""
    parser = common.make_parser(description, *common.SIZES, "peak-tflops", "peak-tbs", "out")
    common.add_device(parser)
    add = parser.add_argument
    lengths = "tokens per sequence, such as 4096,8192 or 4K,8K,1M"
    add("--seqlens", type=comma_list(positive), metavar="N,N,...", help=lengths)
    backends = "rows of each; default: the one that runs unasked"
    add("--backends", "--backend", nargs="+", metavar="BACKEND", help=backends)
    add("--input", choices=KINDS, help="default: random; a demo: text")
    add("--seconds", type=above_zero, help="of each timing; default: 1, of the paper 0.3, of the demo on a CPU 2")
    modes = f"of {', '.join(MODES)}; queued: then dense attention too; default: eager,graph, of the paper all"
    add("--modes", type=comma_list(str), metavar="MODE,...", help=modes)
    add("--sdpa", choices=SDPA_BACKENDS, help="dense attention is this one of PyTorch's")
    add("--preset", choices=PRESETS, help="of NSAConfig; default: %(default)s")
    add("--block-sizes", type=comma_list(positive), metavar="L,...", help="compress_block_size; l' follows")
    add("--select-size", type=positive, metavar="L'", help="select_block_size")
    add("--num-cmp", type=comma_list(_count_or_none), metavar="C,...", help="num_cmp_selected_blocks, such as none,16")
    add("--k", type=positive, help="num_selected_blocks")
    add("--w", type=positive, help="window_size")
    parser.set_defaults(backward=False, recompute=False, no_dense_above=None, **defaults)
    return parser


def resolve(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Sizes, lengths in order and `configs`; ends the program for what does not go together."""
    common.resolve_sizes(parser, args)
    args.input, args.seqlens = args.input or "random", sorted(set(args.seqlens))
    able = MODES[: 1 if args.device != "cuda" else 2 if args.backward else 3]
    if wrong := set(args.modes or ()).difference(able):
        parser.error(f"--modes must be among {', '.join(able)} for this device and pass, got {', '.join(wrong)}")
    try:
        args.configs = make_configs(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def make_configs(args: argparse.Namespace) -> list[NSAConfig]:
    """Every combination of the lists of options, on top of the preset. Raises what refuses one."""
    select = {} if args.block_sizes is None and args.select_size is None else {"select_block_size": args.select_size}
    select |= {} if args.k is None else {"num_selected_blocks": args.k}
    select |= {} if args.w is None else {"window_size": args.w}
    sizes = [{**select, "compress_block_size": size} for size in args.block_sizes or ()] or [select]
    chosen = [{"num_cmp_selected_blocks": count} for count in args.num_cmp or ()] or [{}]
    return [PRESETS[args.preset](**size, **count) for size, count in product(sizes, chosen)]


def _count_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else positive(text)


# Calls


def leaves(inputs: NSAInputs) -> list[Tensor]:
    """Tensors that get gradients, q first."""
    return list(inputs.tensors().values())


def nsa_call(inputs: NSAInputs, variant: Variant) -> Callable[[], Any]:
    forward = variant.call(inputs)
    if not variant.backward:
        return forward
    grad = torch.randn_like(inputs.q)
    return lambda: torch.autograd.grad(forward(), leaves(inputs), grad)


def dense_call(inputs: NSAInputs, dense: Dense, backward: bool) -> Callable[[], Any]:
    qkv = inputs.q, inputs.k, inputs.v
    if not backward:
        return torch.no_grad()(partial(dense.attention, *qkv))
    grad = torch.randn_like(inputs.q)
    return lambda: torch.autograd.grad(dense.attention(*qkv), qkv, grad)


def everything(timing: Timing, given: Sequence[Tensor], backward: bool) -> Timing:
    """With all that is alive in forward + backward: also the inputs, and do, which is like the first of them."""
    return timing.holding([given[0], *given]) if backward else timing


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


# Presentation


def options_of(row: Row) -> str:
    return f"{row['backend']} l={row['l']} num_cmp={row['num_cmp'] or 'none'}"


def turns_verdict(results: Results) -> dict[str, str]:
    several = len(set(map(options_of, results.rows))) > 1
    places = [f"N = {row['n']:,}" + f" with {options_of(row)}" * several for row in results.rows]
    spreads = [Spread(row["speedup_p20"], row["speedup"], row["speedup_p80"]) for row in results.rows]
    return {"verdict": verdict(list(zip(places, spreads, strict=True)))}


def show(content: dict[str, Any]) -> None:
    faster = sorted({row["n"] for row in content["rows"] if row["speedup"] > 1})
    lengths = ", ".join(f"N = {n:,}" for n in faster) or "none of these N"
    print(content.get("verdict", f"NSA is faster at {lengths}."))


def plot(results: Results, path: Path) -> None:
    """Times and speed-ups by N, but for speed-ups that are noise."""

    def points() -> Iterator[Point]:
        for row in results.rows:
            dense, name = row["dense"], f"NSA, {options_of(row)}, {row['mode']}"
            yield (
                "ms per call",
                f"extrapolated {dense}" if row["dense_extrapolated"] else dense,
                row["n"],
                row["dense_ms"],
            )
            yield "ms per call", name, row["n"], row["ms_p50"]
            yield "dense time / NSA time", name, row["n"], None if row.get("faster") == NOISY else row["speedup"]

    row = results.rows[0]
    plot_lengths(path, points(), f"{row['pass']}, {row['inputs']} input, on {results.head['device']}")


if __name__ == "__main__":
    sys.exit(main())
