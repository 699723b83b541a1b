"""Dense attention against NSA, end to end, over a list of sequence lengths.

For each N: the error of the whole op against fp64 on sampled rows; then time, peak memory and speed-up. Errors come
first: where one is above its budget nothing is timed and the script ends with status 1 (a red gate).

Writes OUT.json (schema: docs/architecture.md), OUT.csv and OUT.png. `--demo` picks sizes for this machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench.common import DTYPES, PRESETS, add_sizes, choose_backend, dense_attention, positive, resolve_sizes
from bench.inputs import KINDS, Problem, Sizes, make_problem
from bench.report import LOCAL_RESULTS, ROOT, command_line, environment, write_csv, write_json
from bench.timing import Timing, measure
from dispatch.device import describe_device, device_types
from nsa import NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.reference import nsa_tiles
from nsa.tensors import NSAInputs

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "nsa-kernels[bench]"') from error

SAMPLED_ROWS = 256
console = Console()


@dataclass(frozen=True)
class Row:
    """One line of the results; times in ms, memory in GiB beyond the inputs."""

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
    l_select: int
    k: int
    w: int
    q_tile: int
    num_cmp: int | None
    gated: bool
    inputs: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    peak_gib: float | None
    error: float
    error_budget: float
    dense_ms: float
    dense_peak_gib: float | None
    speedup: float
    command: str

    # "pass" is the schema's name for the direction, and a Python keyword.
    direction: str

    def as_json(self) -> dict[str, Any]:
        return {("pass" if name == "direction" else name): value for name, value in asdict(self).items()}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    config, device = PRESETS[args.preset](), torch.device(args.device)
    call = dispatch.Call("nsa", device, DTYPES[args.dtype], backward=args.backward, options={"config": config})
    try:
        backend, backend_note = choose_backend(call, args.backend)
    except (ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    console.print(
        f"[bold]Sparse (NSA) against dense attention[/bold] on {args.input} input: "
        f"{'forward + backward' if args.backward else 'forward'}, {args.dtype}, {args.heads} heads of {args.dim} "
        f"({args.kv_heads} for keys), on {describe_device(device.type)}",
        soft_wrap=True,
    )
    if backend_note:
        console.print(f"[yellow]{backend_note}[/yellow]")
    rows, red = run(args, config, backend, device)

    out = Path(args.out)
    content = {**environment(device), "gate": "red" if red else "green", "red": red, "rows": []}
    if red:
        write_json(out.with_suffix(".json"), content)
        console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
        return 1
    content["rows"] = [row.as_json() for row in rows]
    write_json(out.with_suffix(".json"), content)
    write_csv(out.with_suffix(".csv"), content["rows"])
    plot(rows, out.with_suffix(".png"), content["device"])
    show(rows, out)
    return 0


def run(args: argparse.Namespace, config: NSAConfig, backend: str, device: torch.device) -> tuple[list[Row], list[str]]:
    """A row for each length, and what to say of each length whose error is above its budget."""
    rows: list[Row] = []
    red: list[str] = []
    with Progress(console=console, transient=True) as progress:
        steps = progress.add_task("starting", total=3 * len(args.seqlens))
        for n in args.seqlens:
            sizes = Sizes(args.batch, n, args.heads, args.kv_heads, args.dim)
            problem = make_problem(
                args.input,
                sizes,
                device=device,
                dtype=DTYPES[args.dtype],
                gated=not args.ungated,
                requires_grad=args.backward,
            )
            progress.update(steps, description=f"N={n}: error against fp64")
            error, budget = sampled_error(problem, config, backend)
            progress.advance(steps)
            if not error <= budget:
                red.append(f"N={n}: error {error:.2e} is above the budget {budget:.2e}")
                progress.advance(steps, 2)
                continue
            progress.update(steps, description=f"N={n}: NSA")
            sparse = measure(nsa_call(problem, config, backend, args.backward), device, seconds=args.seconds)
            progress.advance(steps)
            progress.update(steps, description=f"N={n}: dense attention")
            dense = measure(dense_call(problem, args.backward), device, seconds=args.seconds)
            progress.advance(steps)
            rows.append(make_row(args, config, sizes, backend, sparse, dense, error, budget))
    return rows, red


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--demo", action="store_true", help="real text and sizes that take about a minute on this machine")
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--preset", choices=PRESETS, default="seed", help="NSAConfig.seed() or .paper(); default: %(default)s")
    add("--seqlens", type=_lengths, metavar="N,N,...", help="tokens per sequence, such as 4096,8192 or 4K,8K,1M")
    add_sizes(parser)
    add("--input", choices=KINDS, help="default: random; the demo: text")
    add("--backward", action="store_true", help="time forward + backward")
    add("--ungated", action="store_true", help="weigh the branches by 1/3 instead of learned gates")
    add("--backend", help="as in nsa_forward; default: the first that can run")
    add("--seconds", type=float, default=1.0, help="about how long to repeat each measurement; default: %(default)s")
    add("--out", default=str(LOCAL_RESULTS / "e2e"), help="results, without suffix; default: %(default)s")
    args = parser.parse_args(argv)
    resolve_sizes(parser, args)
    args.input = args.input or ("text" if args.demo else "random")
    cpu_lengths, gpu_lengths = [1024, 2048, 4096, 8192, 16384, 32768], [8192, 32768, 131072]
    args.seqlens = args.seqlens or (cpu_lengths if args.device == "cpu" else gpu_lengths)
    return args


def _lengths(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


# What is timed


def nsa_call(problem: Problem, config: NSAConfig, backend: str, backward: bool) -> Callable[[], Any]:
    keywords: dict[str, Any] = {"gate_proj_weight": problem.gate_proj_weight, "config": config, "backend": backend}
    if not backward:
        return lambda: nsa_forward(problem.q, problem.k, problem.v, **keywords)
    leaves = [t for t in (problem.q, problem.k, problem.v, problem.gate_proj_weight) if t is not None]
    grad = torch.randn_like(problem.q)
    return lambda: torch.autograd.grad(nsa(problem.q, problem.k, problem.v, **keywords), leaves, grad)


def dense_call(problem: Problem, backward: bool) -> Callable[[], Any]:
    q, k, v = problem.q, problem.k, problem.v

    def forward() -> Tensor:
        with torch.no_grad():
            return dense_attention(q, k, v)

    if not backward:
        return forward
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(dense_attention(q, k, v), (q, k, v), grad)


def sampled_error(problem: Problem, config: NSAConfig, backend: str) -> tuple[float, float]:
    """Largest error of the whole op on at least SAMPLED_ROWS rows against fp64, and what may be expected of the dtype.

    The oracle attends to the blocks that the op under test chose. Budget: twice the error of the same math done by
    PyTorch in the op's own dtype, plus one unit of rounding of the largest value.
    """
    inputs = NSAInputs(problem.q, problem.k, problem.v, gate_proj_weight=problem.gate_proj_weight).map(Tensor.detach)
    out, aux = nsa_forward_aux(
        inputs.q, inputs.k, inputs.v, gate_proj_weight=inputs.gate_proj_weight, config=config, backend=backend
    )
    num_tiles = aux.indices.shape[2]
    wanted = min(num_tiles, max(4, math.ceil(SAMPLED_ROWS / config.q_tile_size)))
    tiles = torch.linspace(0, num_tiles - 1, wanted, device=out.device).round().long()
    indices = aux.indices[:, :, tiles]
    cmp_indices = None if aux.cmp_indices is None else aux.cmp_indices[:, :, tiles]
    oracle, positions = nsa_tiles(inputs.map(Tensor.double), config, tiles, indices=indices, cmp_indices=cmp_indices)
    naive, _ = nsa_tiles(inputs, config, tiles, indices=indices, cmp_indices=cmp_indices, compute_dtype=out.dtype)
    error = (out[:, positions].double() - oracle).abs().max().item()
    naive_error = (naive.double() - oracle).abs().max().item()
    return error, 2 * naive_error + torch.finfo(out.dtype).eps * oracle.abs().max().item()


# What is shown


def make_row(
    args: argparse.Namespace,
    config: NSAConfig,
    sizes: Sizes,
    backend: str,
    sparse: Timing,
    dense: Timing,
    error: float,
    budget: float,
) -> Row:
    return Row(
        op="nsa",
        preset=args.preset,
        direction="fwd+bwd" if args.backward else "fwd",
        backend=backend,
        mode="eager",
        b=sizes.batch,
        n=sizes.tokens,
        h=sizes.heads,
        h_kv=sizes.kv_heads,
        d=sizes.dim,
        dtype=args.dtype,
        l=config.compress_block_size,
        l_select=config.select_size,
        k=config.num_selected_blocks,
        w=config.window_size,
        q_tile=config.q_tile_size,
        num_cmp=config.num_cmp_selected_blocks,
        gated=not args.ungated,
        inputs=args.input,
        ms_p20=sparse.ms_p20,
        ms_p50=sparse.ms_p50,
        ms_p80=sparse.ms_p80,
        peak_gib=sparse.peak_gib,
        error=error,
        error_budget=budget,
        dense_ms=dense.ms_p50,
        dense_peak_gib=dense.peak_gib,
        speedup=dense.ms_p50 / sparse.ms_p50,
        command=command_line(),
    )


def show(rows: list[Row], out: Path) -> None:
    table = Table(title="median time per call; peak memory beyond the inputs", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("N", "dense ms", "NSA ms", "speed-up", "dense GiB", "NSA GiB", "error", "budget"):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = ["?" if gib is None else f"{gib:.2f}" for gib in (row.dense_peak_gib, row.peak_gib)]
        speed = f"[{'green' if row.speedup > 1 else 'red'}]{row.speedup:.2f}x[/]"
        errors = (f"{row.error:.1e}", f"{row.error_budget:.1e}")
        table.add_row(f"{row.n:,}", f"{row.dense_ms:,.1f}", f"{row.ms_p50:,.1f}", speed, *memory, *errors)
    console.print(table)
    best = max(rows, key=lambda row: row.speedup)
    ahead = [row.n for row in rows if row.speedup > 1]
    crossover = f"at N = {', '.join(f'{n:,}' for n in ahead)}" if ahead else "at none of these N"
    console.print(
        f"What this says: dense attention's time grows with N squared; NSA ({best.backend} backend) reads per query "
        f"N/{best.l} compressed entries, {best.k} selected blocks of {best.l_select} and a window of {best.w}. "
        f"NSA is faster {crossover}; best: {best.speedup:.2f}x at N = {best.n:,}. Errors are the largest against fp64 "
        f"on {SAMPLED_ROWS} rows or more (all, if N is smaller); each is within its budget, so the times count."
    )
    shown = [_relative(out.with_suffix(suffix)) for suffix in (".png", ".csv", ".json")]
    console.print(f"Plot: {shown[0]}   table: {shown[1]}   everything: {shown[2]}", soft_wrap=True)


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def plot(rows: list[Row], path: Path, device: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lengths = [row.n for row in rows]
    figure, (times, speed) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    times.loglog(lengths, [row.dense_ms for row in rows], "o-", color="tab:gray", label="dense")
    times.loglog(lengths, [row.ms_p50 for row in rows], "o-", color="tab:blue", label=f"NSA ({rows[0].backend})")
    times.set(xlabel="tokens N", ylabel="ms per call", title=f"{rows[0].direction}, {rows[0].inputs} input")
    times.legend()
    speed.loglog(lengths, [row.speedup for row in rows], "o-", color="tab:blue")
    speed.axhline(1, color="tab:gray", linestyle="--", linewidth=1)
    ticks = [m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5)]
    low, high = min(1.0, *(row.speedup for row in rows)) / 2, max(1.0, *(row.speedup for row in rows)) * 2
    ticks = [tick for tick in ticks if low <= tick <= high]
    speed.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    speed.set(xlabel="tokens N", ylabel="dense time / NSA time", title=f"speed-up on {device}")
    for axes in (times, speed):
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
