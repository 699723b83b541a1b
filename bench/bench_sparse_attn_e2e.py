"""Dense attention against NSA, end to end, over sequence lengths, options and backends.

For each N and each combination: the error of the whole op against fp64 on sampled rows, with --backward also of the
gradients that these rows give; then time, peak memory and speed-up, beside what the device's peak rates allow. Where an
error is above its budget, or a timed call gives another result than the checked one, there are no times and the script
ends with status 1 (a red gate). Dense attention is timed once for each N, always eagerly.

Writes OUT.json (schema and modes: docs/results_files.md) after every row; at the end OUT.csv and OUT.png. The same
command goes on where it was stopped or killed. `--demo` picks sizes for this machine; on a CPU dense attention and NSA
then take turns on one thread (bench/turns.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from bench.nsa_check import SAMPLED_ROWS, Sample, Variant, check, none_text
from bench.passes import release
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Part, Results, Row, WrongResult, run
from bench.roofline import Peaks, choose_peaks, dense_floor_ms, nsa_floor_ms
from bench.show import Cell, console, ms_text, plot_lengths, print_table
from bench.timing import Timing, capture, measure, peak_memory, percentiles
from bench.turns import NOISY, Spread, one_thread, take_turns, verdict
from dispatch.device import describe_device
from nsa import NSAConfig
from nsa.inputs import NSAInputs

MODES = ("eager", "queued", "graph")
"""From an idle GPU; as an eager call while the GPU works on something else, as in a training step; as a CUDA graph."""


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
    dense, facts = choose_dense(device, DTYPES[args.dtype], args.sdpa), environment(device)
    peaks = choose_peaks(facts["device"], args.peak_tflops, args.peak_tbs)
    console.print(
        f"[bold]Sparse (NSA) against dense attention[/bold] ({dense.name}) on {args.input} input: "
        f"{'forward + backward' if args.backward else 'forward'}, {args.dtype}, H={args.heads} H_kv={args.kv_heads} "
        f"D={args.dim}, on {describe_device(device.type)}",
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, style="yellow", markup=False)

    def said(results: Results) -> dict[str, Any]:
        if not args.turns:
            return {}
        several = len(set(map(options_of, results.rows))) > 1
        places = [f"N = {row['n']:,}" + f" with {options_of(row)}" * several for row in results.rows]
        spreads = [Spread(row["speedup_p20"], row["speedup"], row["speedup_p80"]) for row in results.rows]
        return {"verdict": verdict(list(zip(places, spreads, strict=True)))}

    def draw(results: Results, path: Path) -> None:
        if drawn := [row for row in results.rows if row.get("faster") != NOISY]:
            plot(drawn, path, facts["device"], None if args.turns else peaks)

    job = Job(args, variants, dense, peaks)
    parts = job.turns if args.turns else job.sweep
    return run(args, facts, lambda results: parts(results.parts), None, fields=said, plot=draw, show=show, csv=True)


def choose_variants(args: argparse.Namespace, device: torch.device) -> tuple[list[Variant], list[str]]:
    """Every combination of options and backend, and what to say of them. Raises what refuses one."""
    variants: list[Variant] = []
    notes: dict[str, None] = {}
    sizes = Sizes(args.batch, 1, args.heads, args.kv_heads, args.dim)
    for config, named in product(args.configs, dict.fromkeys(args.backends or [None])):
        passes = {"backward": args.backward, "recompute": args.recompute}
        call = common.nsa_facts(sizes, config, device, DTYPES[args.dtype], **passes)
        backend, note = common.choose_backend(call, named)
        modes = modes_of(args)
        if backend == "reference" and "graph" in modes:
            reason = "the reference reads values on the host, which a CUDA graph cannot hold"
            if args.modes:
                raise ValueError(f"--modes graph: {reason}")
            modes.remove("graph")
            note = "\n".join(filter(None, (note, f"Mode {', '.join(modes)} only: {reason}")))
        notes |= {note: None} if note else {}
        variants.append(Variant(config, backend, tuple(modes), args.backward, args.recompute))
    return variants, list(notes)


@dataclass(frozen=True)
class Job:
    args: argparse.Namespace
    variants: list[Variant]
    dense: Dense
    peaks: Peaks | None

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    def check(self, n: int, update: Callable[[str], None]) -> tuple[NSAInputs, dict[Variant, Sample]]:
        """Inputs of a length, and the checked call of each variant. Raises WrongResult."""
        args = self.args
        release(self.device)
        sizes = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)
        options: dict[str, Any] = {"gated": not args.ungated, "requires_grad": args.backward}
        inputs = make_problem(args.input, sizes, device=self.device, dtype=DTYPES[args.dtype], **options)
        samples, red = {}, []
        for variant in self.variants:
            update(f"N={n} {variant}: error against fp64")
            samples[variant], wrong = check(inputs, variant)
            red += [f"N={n} {variant}: {reason}" for reason in wrong]
        if red:
            raise WrongResult(*red)
        return inputs, samples

    def sweep(self, done: Mapping[str, Part]) -> Iterator[Measurement]:
        """A part for each length, combination of options and mode that is not done. Raises WrongResult."""
        rows = [row for part in done.values() for row in part.rows if not row["dense_extrapolated"]]
        timed = {row["n"]: (row["dense_ms"], row["dense_peak_gib"]) for row in rows}
        with console.status("") as status:
            for n in self.args.seqlens:
                every = [(variant, mode) for variant in self.variants for mode in variant.modes]
                if left := [(variant, mode) for variant, mode in every if variant.part(n, mode) not in done]:
                    inputs, samples = self.check(n, status.update)
                    status.update(f"N={n}: {self.dense.name}")
                    dense = self.time_dense(inputs, timed)
                    for variant, mode in left:
                        status.update(f"N={n} {variant}: NSA, {mode}")
                        given = inputs, variant, samples[variant], mode, dense
                        yield variant.part(n, mode), partial(self.measure, *given)
                        del given
                    del inputs, samples  # before those of the next length are made

    def time_dense(self, inputs: NSAInputs, timed: dict[int, tuple[float, float | None]]) -> Row:
        """Fields of dense attention. Args: `timed`: milliseconds and GiB by length so far, and then of this one."""
        args, n = self.args, inputs.q.shape[1]
        if extrapolated := bool(timed) and args.no_dense_above is not None and n > args.no_dense_above:
            longest = max(timed)
            ms, gib = timed[longest][0] * (n / longest) ** 2, None
        else:
            if n not in timed:
                call = dense_call(inputs, self.dense, args.backward)
                timing = measure(call, self.device, seconds=args.seconds, host=not is_queued(args))
                timing = everything(timing, leaves(inputs)[:3], args.backward)
                timed[n] = timing.ms_p50, timing.peak_gib
            ms, gib = timed[n]
        return dense_fields(self.dense, ms, gib, extrapolated)

    def measure(self, inputs: NSAInputs, variant: Variant, sample: Sample, mode: str, dense: Row) -> Iterator[Row]:
        """The row of a mode. Raises WrongResult."""
        n = inputs.q.shape[1]
        timing = measure_mode(mode, nsa_call(inputs, variant), sample, self.device, self.args.seconds)
        if timing is None:
            raise WrongResult(f"N={n} {variant}: the replayed graph gives another result than the checked call")
        row = self.row(n, variant, sample, mode, everything(timing, leaves(inputs), self.args.backward), dense)
        if self.peaks is not None:
            itemsize, backward = inputs.q.itemsize, self.args.backward
            floor = nsa_floor_ms(sizes_of(row), variant.config, self.peaks, itemsize, backward=backward)
            row |= {"floor_ms": floor, "share_of_floor": floor / timing.ms_p50}
        yield row

    def turns(self, done: Mapping[str, Part]) -> Iterator[Measurement]:
        """The demo on a CPU: a part for each length, with a row for each combination of options."""
        with console.status("") as status:
            for n in self.args.seqlens:
                if f"N={n}" not in done:
                    checked = self.check(n, status.update)
                    status.update(f"N={n}: dense attention and NSA in turn")
                    yield f"N={n}", partial(self.turns_of, n, *checked)

    def turns_of(self, n: int, inputs: NSAInputs, samples: Mapping[Variant, Sample]) -> Iterator[Row]:
        """Rows of a length; `speedup` is the median over turns. Times are CPU time of one thread."""
        backward = self.args.backward
        calls = [dense_call(inputs, self.dense, backward), *(nsa_call(inputs, variant) for variant in samples)]
        peaks = [peak_memory(call, self.device) for call in calls]  # and these calls warm up
        times = take_turns(calls, self.args.seconds)
        given = [leaves(inputs)[:3], *(leaves(inputs) for _ in samples)]
        timings = [
            everything(Timing(*percentiles(own), peak, len(own)), some, backward)
            for own, peak, some in zip(times, peaks, given, strict=True)
        ]
        dense = dense_fields(self.dense, timings[0].ms_p50, timings[0].peak_gib, False)
        for (variant, sample), own, timing in zip(samples.items(), times[1:], timings[1:], strict=True):
            ratio = Spread.of([dense_ms / ms for dense_ms, ms in zip(times[0], own, strict=True)])
            row = self.row(n, variant, sample, "turns", timing, dense) | {"speedup": ratio.p50, "turns": timing.repeats}
            yield {**row, "speedup_p20": ratio.p20, "speedup_p80": ratio.p80, "faster": ratio.faster}

    def row(self, n: int, variant: Variant, sample: Sample, mode: str, timing: Timing, dense: Row) -> Row:
        """Times in ms, memory in GiB: beyond the inputs, for forward + backward all of it. There is no floor yet."""
        args, config, gradient = self.args, variant.config, sample.gradient
        row = {"op": "nsa", "preset": args.preset, "backend": variant.backend, "mode": mode, "b": args.batch, "n": n}
        row |= {"h": args.heads, "h_kv": args.kv_heads, "d": args.dim, "dtype": args.dtype}
        row |= {"l": config.compress_block_size, "stride": config.stride, "l_select": config.select_size}
        row |= {"k": config.num_selected_blocks, "w": config.window_size, "q_tile": config.q_tile_size}
        row |= {"num_cmp": config.num_cmp_selected_blocks, "gated": not args.ungated, "recompute": args.recompute}
        row |= {"inputs": args.input, **timing.fields, "peak_gib": timing.peak_gib}
        row |= {"error": sample.worst.error, "error_budget": sample.worst.budget}
        row |= {"gradient_error": gradient and gradient.error, "gradient_budget": gradient and gradient.budget}
        row |= {**dense, "speedup": dense["dense_ms"] / timing.ms_p50, "floor_ms": None, "share_of_floor": None}
        row |= {"command": args.command}
        return {**row, "pass": "fwd+bwd" if args.backward else "fwd"}


def sizes_of(row: Row) -> Sizes:
    return Sizes(row["b"], row["n"], row["h"], row["h_kv"], row["d"])


def options_of(row: Row) -> str:
    """The line of a plot that a row belongs to, but for its mode."""
    return f"{row['backend']} l={row['l']} num_cmp={none_text(row['num_cmp'])}"


def dense_fields(dense: Dense, ms: float, gib: float | None, extrapolated: bool) -> Row:
    return {"dense": dense.name, "dense_ms": ms, "dense_extrapolated": extrapolated, "dense_peak_gib": gib}


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    shared = (*common.SIZES, "peak-tflops", "peak-tbs", "out")
    parser = common.make_parser(__doc__, *shared, out=str(LOCAL_RESULTS / "e2e"))
    common.add_device(parser)
    add = parser.add_argument
    add("--demo", action="store_true", help="real text and sizes that take about a minute on this machine")
    lengths = "tokens per sequence, such as 4096,8192 or 4K,8K,1M"
    add("--seqlens", type=comma_list(positive), metavar="N,N,...", help=lengths)
    backends = "rows of each; default: the one that runs unasked"
    add("--backends", "--backend", nargs="+", metavar="BACKEND", help=backends)
    add("--input", choices=KINDS, help="default: random; the demo: text")
    add("--seconds", type=above_zero, help="of each timing; default: 1, the demo on a CPU: 2")
    add("--backward", action="store_true", help="check and time forward + backward; peak memory is of everything alive")
    add("--recompute", action="store_true", help="with --backward: keep less and compute it again, as in nsa")
    add("--ungated", action="store_true", help="weigh the branches by 1/3 instead of learned gates")
    modes = "see above; queued: then dense attention too; default: eager, on CUDA forward eager,graph"
    add("--modes", type=comma_list(str), metavar="MODE,...", help=modes)
    add("--sdpa", choices=SDPA_BACKENDS, help="dense attention is this one of PyTorch's")
    add("--no-dense-above", type=positive, metavar="N", help="from there on, extrapolate dense attention's time by N^2")
    options = parser.add_argument_group("options of NSA (see NSAConfig); lists make a row for each combination")
    add = options.add_argument
    preset = "of NSAConfig; default: %(default)s"
    add("--preset", type=common.preset_name, choices=PRESETS, default="per_tile", help=preset)
    add("--block-sizes", type=comma_list(positive), metavar="L,...", help="compress_block_size; l' follows")
    add("--select-size", type=positive, metavar="L'", help="select_block_size")
    add("--num-cmp", type=comma_list(_count_or_none), metavar="C,...", help="num_cmp_selected_blocks, such as none,16")
    add("--k", type=int, help="num_selected_blocks")
    add("--w", type=int, help="window_size")
    add("--q-tile", type=positive, metavar="T", help="q_tile_size")
    args = common.parse_args(parser, argv)
    args.usual_modes = ["eager", "graph"]
    args.turns = args.demo and args.device == "cpu"
    if args.turns:
        args.heads = args.heads or 1
        args.seqlens = args.seqlens or [4096, 8192, 24576, 32768]  # not 16384, where neither is clearly ahead
    if args.seconds is None:
        args.seconds = 2.0 if args.turns else 1.0
    common.resolve_sizes(parser, args)
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
        if mode not in MODES:
            parser.error(f"--modes must be among {', '.join(MODES)}, got {mode!r}")
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
    """Every combination of the lists of options, on top of the preset. Raises what refuses one."""
    given = {"num_selected_blocks": args.k, "window_size": args.w, "q_tile_size": args.q_tile}
    config = PRESETS[args.preset](**{name: value for name, value in given.items() if value is not None})
    sizes = [{}] if args.block_sizes is None else [{"compress_block_size": l} for l in args.block_sizes]  # noqa: E741
    if args.block_sizes is not None or args.select_size is not None:
        sizes = [{**size, "select_block_size": args.select_size} for size in sizes]
    chosen = [{}] if args.num_cmp is None else [{"num_cmp_selected_blocks": count} for count in args.num_cmp]
    return [replace(config, **size, **count) for size, count in product(sizes, chosen)]


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
    q, k, v = inputs.q, inputs.k, inputs.v

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


def show(content: dict[str, Any]) -> None:
    rows: list[Row] = content["rows"]
    backward, turned = rows[0]["pass"] == "fwd+bwd", "turns" in rows[0]
    varying = [name for name in ("backend", "l", "num_cmp", "mode") if len({row[name] for row in rows}) > 1]

    def color(row: Row) -> str:
        if turned:
            return {"NSA": "green", "dense": "red"}.get(row["faster"], "yellow")
        return "green" if row["speedup"] > 1 else "red"

    columns: dict[str, Cell] = {
        "N": "{n:,}",
        **{name: partial(lambda name, row: none_text(row[name]), name) for name in varying},
        "turns": "{turns}",
        "dense ms": lambda row: "~" * row["dense_extrapolated"] + ms_text(row["dense_ms"]),
        "NSA ms": "{ms_p50:ms}",
        "speed-up": lambda row: f"[{color(row)}]{'?' * (row.get('faster') == NOISY)}{row['speedup']:.2f}x[/]",
        "20 to 80 %": "{speedup_p20:.2f} to {speedup_p80:.2f}",
        "faster": lambda row: f"[{color(row)}]{row['faster']}[/]" if turned else "",
        "of floor": "{share_of_floor:percent}",
        "dense GiB": "{dense_peak_gib:.2f}",
        "NSA GiB": "{peak_gib:.2f}",
        "error": "{error:.1e}",
        "budget": "{error_budget:.1e}",
        "grad error": "{gradient_error:.1e}",
        "grad budget": "{gradient_budget:.1e}",
    }
    what = "CPU time of one thread" if turned else "time per call"
    memory_of = "of everything alive" if backward else "beyond the inputs"
    print_table(f"median {what}; dense: {rows[0]['dense']}; peak memory {memory_of}", columns, rows)
    errors = (
        f"Errors are the largest against fp64 on {SAMPLED_ROWS} rows or more (all, if N is smaller)"
        f"{', and of the gradients they give' if backward else ''}; each is within its budget, so the times count."
    )
    if turned:
        said = "Speed-ups are medians over turns, in each of which both ran, with their 20th and 80th percentile."
        said = f"{content['verdict']} {said}"
    else:
        best = max(rows, key=lambda row: row["speedup"])
        faster = sorted({row["n"] for row in rows if row["speedup"] > 1})
        in_which_rows = " in at least one row each" if varying else ""
        crossover = f"at N = {', '.join(f'{n:,}' for n in faster)}{in_which_rows}" if faster else "at none of these N"
        said = f"NSA is faster {crossover}; best: {best['speedup']:.2f}x at N = {best['n']:,}."
    row, backends = rows[-1], " and ".join(dict.fromkeys(row["backend"] for row in rows))
    entries = f"N/{row['stride']}" if row["num_cmp"] is None else f"{row['num_cmp']} blocks of"
    costs = (
        f"dense attention's time grows with N squared; NSA ({backends} backend) reads per query {entries} compressed "
        f"entries, {row['k']} selected blocks of {row['l_select']} and a window of {row['w']}."
    )
    console.print(f"What this says: {costs} {said} {errors}")
    if any(row["dense_extrapolated"] for row in rows):
        console.print("~ is not measured: the time at the largest measured N, times the square of the ratio of N.")


def plot(rows: Sequence[Row], path: Path, device: str, peaks: Peaks | None) -> None:
    """Times and speed-ups by N: a line for each backend, block size, number of compressed blocks and mode."""
    times: dict[str, dict[int, float | None]] = {}
    speeds: dict[str, dict[int, float | None]] = {}
    for row in rows:
        dense, name, n = f"{'extrapolated ' * row['dense_extrapolated']}{row['dense']}", options_of(row), row["n"]
        times.setdefault(dense, {})[n] = row["dense_ms"]
        times.setdefault(f"NSA, {name}, {row['mode']}", {})[n] = row["ms_p50"]
        speeds.setdefault(f"NSA, {name}, {row['mode']}", {})[n] = row["speedup"]
        if peaks is not None:
            floor = dense_floor_ms(sizes_of(row), peaks, backward=row["pass"] == "fwd+bwd")
            speeds.setdefault(f"roofline, {name}", {})[n] = floor / row["floor_ms"]
    at_peak = "" if peaks is None else f"; roofline: {peaks.tflops:g} TFLOP/s, {peaks.tbs:g} TB/s"
    panels = {"ms per call": times, "dense time / NSA time": speeds}
    plot_lengths(path, panels, f"{rows[0]['pass']}, {rows[0]['inputs']} input, on {device}{at_peak}")


if __name__ == "__main__":
    sys.exit(main())
