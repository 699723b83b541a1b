"""Neighborhood attention beside its peers, in one process: FlashAttention-4's window, flex_attention, Liger's op.

For each shape, backend and pass: the error of what is timed against fp64 on sampled rows, then GPU time and peak memory
beside the byte floor, then the same for every peer (bench/neighborhood_peers.py). A backend's error above its budget is
a red gate: no times at all, and status 1. A peer that is missing, runs out of memory or computes something else has
null, and the reason is told. Windows are truncated at the borders, as all peers do it.

On CUDA, what is checked and timed is a CUDA graph, without the time to start it; elsewhere a call as Python makes it.
Mode "memory" adds the peak of everything alive, inputs and outputs included; backward has that of both passes.

Writes OUT.json (schema: docs/architecture.md), OUT.csv and OUT.png.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from ascend_kernels import reference
from bench.common import DTYPES
from bench.gradient_check import GradientError
from bench.inputs import Neighborhood, Problem, make_problem
from bench.neighborhood_peers import PEERS, Candidate, Unavailable, make_peer
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_csv, write_json
from bench.roofline import neighborhood_bytes
from bench.timing import GIB, Timing, capture, copy_bandwidth, measure, peak_memory
from dispatch import neighborhood_attention
from dispatch.device import describe_device, device_types

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "nsa-kernels[bench]"') from error

SHAPES = {
    "tiny": [Neighborhood(1, 2, 256, 32, 7), Neighborhood(2, 2, 301, 16, 8, 3)],
    # Liger's benchmark, without its projections; it takes as many tokens as fit its [B,H,N,N]
    "seed": [
        Neighborhood(2, 8, 2048, 64, 7),
        Neighborhood(4, 12, 2048, 64, 7),
        Neighborhood(2, 16, 2048, 64, 9),
        Neighborhood(2, 8, 2048, 64, 7, 2),
    ],
    "long": [
        Neighborhood(2, 16, 4096, 64, 7),
        Neighborhood(4, 32, 8192, 128, 9),
        Neighborhood(1, 8, 65536, 128, 63),
        Neighborhood(1, 8, 262144, 128, 15, 8),
    ],
}
PASSES = {"forward": "fwd", "backward": "bwd", "full": "fwd+bwd"}
MODES = (*PASSES, "memory")
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("dq", "dk", "dv")}
"""What a pass is checked by."""
SEGMENTS, SEGMENT_ROWS = 4, 96
"""Rows whose results are compared with fp64: runs at both ends and between."""
PEER_SLACK = 4
"""A peer may be off by so many budgets: it computes the same thing, if not as exactly."""
TABLE_WIDTH = 140
console = Console()


@dataclass(frozen=True)
class Row:
    """One line of the results; times in ms, memory in GiB. A peer's fields are None where it did not run."""

    op: str
    backend: str
    default: bool
    algorithm: str
    mode: str
    b: int
    h: int
    s: int
    d: int
    k: int
    dilation: int
    dtype: str
    ms_p20: float | None
    ms_p50: float | None
    ms_p80: float | None
    floor_ms: float | None
    share_of_floor: float | None
    peak_gib: float | None
    floor_gib: float
    error: float
    error_budget: float
    flex_ms: float | None
    liger_ms: float | None
    fa4_ms: float | None
    flex_gib: float | None
    liger_gib: float | None
    fa4_gib: float | None
    command: str

    # "pass" is the schema's name for the direction, and a Python keyword.
    direction: str

    @property
    def shape(self) -> Neighborhood:
        return Neighborhood(self.b, self.h, self.s, self.d, self.k, self.dilation)

    def peer_ms(self, name: str) -> float | None:
        ms: float | None = getattr(self, f"{name}_ms")
        return ms

    def as_json(self) -> dict[str, Any]:
        return {("pass" if name == "direction" else name): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Measured:
    """One pass of one candidate. `timing` and `peak_gib` are None where not asked for or not known."""

    mode: str
    error: GradientError
    timing: Timing | None
    peak_gib: float | None


@dataclass(frozen=True)
class Plan:
    """What is measured of every candidate."""

    passes: tuple[str, ...]
    timed: bool
    memory: bool
    seconds: float

    @classmethod
    def of(cls, modes: Sequence[str], seconds: float) -> Plan:
        """Memory alone is that of the forward and of both passes."""
        passes = tuple(PASSES[mode] for mode in PASSES if mode in modes)
        return cls(passes or ("fwd", "fwd+bwd"), bool(passes), "memory" in modes, seconds)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, dtype, plan = torch.device(args.device), DTYPES[args.dtype], Plan.of(args.modes, args.seconds)
    try:
        backends = {shape: choose_backends(shape, device, dtype, args.algorithm, args.backend) for shape in args.shapes}
    except (ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    facts = environment(device)
    console.print(
        f"[bold]Neighborhood attention and its peers[/bold]: {', '.join(args.modes)}, {args.dtype}, "
        f"on {describe_device(device.type)}",
        soft_wrap=True,
    )
    tbs = args.peak_tbs or (copy_bandwidth() if device.type == "cuda" else None)
    out = Path(args.out)
    content = {**facts, "floor_tbs": tbs, "gate": "unfinished", "red": [], "missing": [], "rows": []}

    def save(rows: list[Row]) -> None:
        """After every shape: a peer that breaks the process's CUDA context must not take the others' results along."""
        content["rows"] = [row.as_json() for row in rows]
        write_json(out.with_suffix(".json"), content)

    rows, red, missing = run(args, backends, plan, device, tbs, save)
    for reason in missing:
        console.print(reason, style="yellow", markup=False, soft_wrap=True)
    content |= {"gate": "red" if red else "green", "red": red, "missing": missing}
    save([] if red else rows)
    if red:
        console.print("[bold red]Wrong results, so no times are reported:[/bold red]", *red, sep="\n  ")
        return 1
    write_csv(out.with_suffix(".csv"), content["rows"])
    if plan.timed:
        plot(rows, out.with_suffix(".png"), content["device"], tbs)
    show(rows, out, plan)
    return 0


def choose_backends(
    shape: Neighborhood, device: torch.device, dtype: torch.dtype, algorithm: str, named: str | None
) -> list[str]:
    """Every backend that runs forward and backward of the shape unasked, the default first; or the named one.

    The reference counts only where there is nothing else.

    Raises:
        ValueError, dispatch.BackendError: when there is none.
    """
    options = {
        **{"kernel_size": shape.kernel_size, "dilation": shape.dilation, "softmax_scale": None},
        **{"boundary": "truncate", "causal": False, "algorithm": algorithm, "band": False},
        "shape": (shape.batch, shape.tokens, shape.heads, shape.dim),
    }
    call = dispatch.Call("neighborhood_attention", device, dtype, backward=True, options=options)
    first = dispatch.resolve(call, named).backend
    able = [verdict.impl.backend for verdict in dispatch.explain(call, named) if verdict.reason is None]
    return list(dict.fromkeys([first, *(backend for backend in able if backend != "reference")]))


def run(
    args: argparse.Namespace,
    backends: dict[Neighborhood, list[str]],
    plan: Plan,
    device: torch.device,
    tbs: float | None,
    save: Callable[[list[Row]], None],
) -> tuple[list[Row], list[str], list[str]]:
    """A row for each shape, backend and pass; what is wrong, after which nothing is timed; which peers did not run."""
    rows: list[Row] = []
    red: list[str] = []
    absent: dict[tuple[str, str], list[str]] = {}
    dtype = DTYPES[args.dtype]
    with Progress(console=console, transient=True) as progress:
        total = sum(1 + len(plan.passes) * (len(names) + len(PEERS)) for names in backends.values())
        steps = progress.add_task("starting", total=total)
        for shape, names in backends.items():
            progress.update(steps, description=f"{shape}: fp64")
            problem = make_problem("random", shape.sizes, device=device, dtype=dtype, gated=False, requires_grad=True)
            do = torch.randn_like(problem.q)
            truth = make_truth(shape, problem, do)
            progress.advance(steps)

            ours: dict[tuple[str, str], Measured] = {}
            for name in names:
                call = partial(neighborhood_attention, backend=name, algorithm=args.algorithm, **window(shape))
                for direction in plan.passes:
                    progress.update(steps, description=f"{shape} {direction}: {name}")
                    measured = measure_pass(Candidate(name, call), direction, problem, do, truth, plan, timed=not red)
                    ours[name, direction] = measured
                    if not measured.error.within:
                        red.append(f"{shape} {direction} {name}: {_above(measured.error)}")
                    progress.advance(steps)
            if red:
                continue
            peers: dict[tuple[str, str], Measured] = {}
            for name in PEERS:
                candidate = find_peer(name, shape, do)
                for direction in plan.passes:
                    progress.update(steps, description=f"{shape} {direction}: {name}")
                    found = measure_peer(candidate, direction, problem, do, truth, plan)
                    if isinstance(found, Measured):
                        peers[name, direction] = found
                    else:
                        absent.setdefault((name, found), []).append(f"{shape} {direction}")
                    progress.advance(steps)
            for (name, direction), measured in ours.items():
                of_peers = {peer: peers.get((peer, direction)) for peer in PEERS}
                default = name == names[0]
                rows.append(make_row(args, shape, direction, name, default, measured, of_peers, tbs, dtype.itemsize))
            save(rows)
    every = len(backends) * len(plan.passes)
    missing = [
        f"{name} did not run: {reason} ({'everywhere' if len(where) == every else '; '.join(where)})"
        for (name, reason), where in absent.items()
    ]
    return rows, red, missing


def make_row(
    args: argparse.Namespace,
    shape: Neighborhood,
    direction: str,
    backend: str,
    default: bool,
    measured: Measured,
    peers: dict[str, Measured | None],
    tbs: float | None,
    itemsize: int,
) -> Row:
    def ms(measured: Measured | None) -> float | None:
        return None if measured is None or measured.timing is None else measured.timing.ms_p50

    floor = None if tbs is None else neighborhood_bytes(shape, direction, itemsize) / tbs / 1e9
    took, timing = ms(measured), measured.timing
    held = neighborhood_bytes(shape, "fwd" if direction == "fwd" else "bwd", itemsize)
    given: dict[str, Any] = {f"{name}_ms": ms(peer) for name, peer in peers.items()}
    given |= {f"{name}_gib": None if peer is None else peer.peak_gib for name, peer in peers.items()}
    return Row(
        op="neighborhood_attention",
        direction=direction,
        backend=backend,
        default=default,
        algorithm=args.algorithm,
        mode=measured.mode,
        b=shape.batch,
        h=shape.heads,
        s=shape.tokens,
        d=shape.dim,
        k=shape.kernel_size,
        dilation=shape.dilation,
        dtype=args.dtype,
        ms_p20=None if timing is None else timing.ms_p20,
        ms_p50=took,
        ms_p80=None if timing is None else timing.ms_p80,
        floor_ms=floor,
        share_of_floor=None if floor is None or took is None else floor / took,
        peak_gib=measured.peak_gib,
        floor_gib=held / GIB,
        error=measured.error.error,
        error_budget=measured.error.budget,
        command=command_line(),
        **given,
    )


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add(
        "--shapes",
        nargs="+",
        type=_shapes,
        metavar="B,H,S,D,k[,dilation]",
        help=f"problems, or sets of them: {', '.join(SHAPES)}; default: seed long, on a CPU tiny",
    )
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: %(default)s")
    add("--dtype", choices=DTYPES, help="default: fp32 on a CPU, else bf16")
    add("--backend", help="as in neighborhood_attention; default: every one that can run")
    add("--algorithm", default="auto", help="as in neighborhood_attention; default: %(default)s")
    add("--seconds", type=float, default=0.3, help="about how long to repeat each measurement; default: %(default)s")
    add("--peak-tbs", type=float, help="TB/s for the floor; default: what a copy reaches on this GPU")
    add("--out", default=str(LOCAL_RESULTS / "neighborhood"), help="results, without suffix; default: %(default)s")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
    chosen = args.shapes or [SHAPES[name] for name in (("tiny",) if on_cpu else ("seed", "long"))]
    args.shapes = list(dict.fromkeys(shape for some in chosen for shape in some))
    return args


def _shapes(text: str) -> list[Neighborhood]:
    """Argument type: the name of a set, or numbers with commas between them."""
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split(",")
    if not (len(numbers) in (5, 6) and all(number.isdigit() and int(number) > 0 for number in numbers)):
        raise argparse.ArgumentTypeError(f"must be {', '.join(SHAPES)} or B,H,S,D,k[,dilation], got {text!r}")
    return [Neighborhood(*map(int, numbers))]


def window(shape: Neighborhood) -> dict[str, Any]:
    """As keywords of neighborhood_attention."""
    return {"kernel_size": shape.kernel_size, "dilation": shape.dilation}


# What is right


@dataclass(frozen=True)
class Truth:
    """fp64 results on some runs of rows, and what may be expected of the dtype there."""

    runs: list[slice]
    exact: dict[str, list[Tensor]]
    """"out", "dq", "dk", "dv": rows of each run."""
    budgets: dict[str, float]

    def worst(self, results: dict[str, Tensor], slack: int = 1) -> GradientError:
        """Of results `[B,N,H,D]`, the one that takes most of its budget; NaN where a result has one anywhere."""
        errors = []
        for name, result in results.items():
            largest = torch.stack(
                [(result[:, run] - right).abs().amax() for run, right in zip(self.runs, self.exact[name], strict=True)]
            ).amax()
            error = largest.item() if bool(result.isfinite().all()) else float("nan")
            errors.append(GradientError(name, error, slack * self.budgets[name]))
        return max(errors, key=lambda found: found.share)


def make_truth(shape: Neighborhood, problem: Problem, do: Tensor) -> Truth:
    """Results of the reference in fp64 on SEGMENTS runs of rows.

    A run's gradients follow from the tokens within two windows of it: keys depend on queries a window away, and these
    on keys another window away. So the reference runs on such a piece of the sequence, which begins with residue class
    0. Budget: twice the error of the same math done in the inputs' own dtype, plus one unit of rounding of the largest
    value.
    """
    tensors = [tensor.detach() for tensor in (problem.q, problem.k, problem.v)]
    tokens, reach = shape.tokens, 2 * (shape.kernel_size - 1) * shape.dilation
    firsts = torch.linspace(0, max(0, tokens - SEGMENT_ROWS), SEGMENTS).long().unique().tolist()
    runs = [slice(first, min(first + SEGMENT_ROWS, tokens)) for first in firsts]
    exact: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    errors, largest = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
    for run in runs:
        begin = max(0, run.start - reach) // shape.dilation * shape.dilation
        piece = slice(begin, min(run.stop + reach, tokens))
        inner = slice(run.start - begin, run.stop - begin)
        some = [tensor[:, piece] for tensor in (*tensors, do)]
        oracle = _results(shape, [tensor.double() for tensor in some], torch.float64)
        naive = _results(shape, some, do.dtype)
        for name, right in oracle.items():
            exact[name].append(right[:, inner])
            error = (naive[name][:, inner] - right[:, inner]).abs().amax().item()
            errors[name] = max(errors[name], error)
            largest[name] = max(largest[name], right[:, inner].abs().amax().item())
    eps = torch.finfo(do.dtype).eps
    return Truth(runs, exact, {name: 2 * errors[name] + eps * largest[name] for name in exact})


def _results(shape: Neighborhood, tensors: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the reference computing in `dtype`; args: q, k, v, do."""
    *leaves, do = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    out = reference.neighborhood_attention(*leaves, **window(shape), return_band=False, compute_dtype=dtype)[0]
    return {"out": out.detach(), **dict(zip(RESULTS["bwd"], torch.autograd.grad(out, leaves, do), strict=True))}


# What is measured


def find_peer(name: str, shape: Neighborhood, do: Tensor) -> Candidate | str:
    """A peer for a shape, or why there is none: whatever it raises must not end the benchmark."""
    try:
        return make_peer(name, shape, do.device, do.dtype)
    except Unavailable as reason:
        return str(reason)
    except Exception as error:
        return _first_line(error)


def measure_peer(
    candidate: Candidate | str, direction: str, problem: Problem, do: Tensor, truth: Truth, plan: Plan
) -> Measured | str:
    """A peer's pass, or why there is none, likewise."""
    if isinstance(candidate, str):
        return candidate
    try:
        measured = measure_pass(candidate, direction, problem, do, truth, plan, slack=PEER_SLACK)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        return _first_line(error)
    return measured if measured.error.within else _above(measured.error)


def measure_pass(
    candidate: Candidate,
    direction: str,
    problem: Problem,
    do: Tensor,
    truth: Truth,
    plan: Plan,
    *,
    slack: int = 1,
    timed: bool = True,
) -> Measured:
    """Run once, check, and if right measure one pass.

    Args:
        slack: budgets that the error may have.
        timed: False checks only.
    """
    device = do.device
    release(device)
    passes = Passes(candidate, problem, do)
    graph = takes_graphs(candidate, device)
    call, keep = passes.captured(direction) if graph else passes.eager(direction)
    results = call()
    if graph:
        for tensor in results:
            tensor.fill_(float("nan"))
        call()
    error = truth.worst(dict(zip(RESULTS[direction], passes.token_major(results), strict=True)), slack)
    del results
    timing = peak_gib = None
    if timed and error.within:
        if plan.timed:
            timing = measure(call, device, seconds=plan.seconds, host=not graph)
        del call, keep
        if plan.memory:
            release(device)
            peak_gib = peak_memory(passes.forward if direction == "fwd" else passes.full, device)
            peak_gib = None if peak_gib is None else peak_gib + passes.held(direction) / GIB
    return Measured("graph" if graph else "eager", error, timing, peak_gib)


def takes_graphs(candidate: Candidate, device: torch.device) -> bool:
    """The reference does not: its tables of keys come from the host."""
    return device.type == "cuda" and candidate.name != "reference"


def release(device: torch.device) -> None:
    """Give back what graphs and failed calls held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Passes:
    """Forward and backward of a candidate on its own tensors."""

    def __init__(self, candidate: Candidate, problem: Problem, do: Tensor) -> None:
        self.candidate = candidate
        given = [tensor.detach() for tensor in (problem.q, problem.k, problem.v, do)]
        if candidate.head_major:
            given = [tensor.transpose(1, 2).contiguous() for tensor in given]
        *leaves, self.do = given
        self.leaves = [tensor.detach().requires_grad_() for tensor in leaves]

    def forward(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (self.candidate.attention(*self.leaves),)

    def full(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._differentiable(), self.leaves, self.do)

    def _differentiable(self) -> Tensor:
        return self.candidate.attention(*self.leaves)

    def eager(self, direction: str) -> tuple[Callable[[], tuple[Tensor, ...]], Any]:
        """A call of the pass, and what must live as long."""
        if direction != "bwd":
            return (self.forward if direction == "fwd" else self.full), None
        out = self._differentiable()
        return lambda: torch.autograd.grad(out, self.leaves, self.do, retain_graph=True), out

    def captured(self, direction: str) -> tuple[Callable[[], tuple[Tensor, ...]], Any]:
        """The same as a CUDA graph. That of the backward reads what one of the forward left."""
        device = self.do.device
        (self.forward if direction == "fwd" else self.full)()  # so that nothing is left to compile
        if direction != "bwd":
            graph, before = capture(self.forward if direction == "fwd" else self.full, device), None
        else:
            before = capture(self._differentiable, device)
            graph = capture(lambda: torch.autograd.grad(before.out, self.leaves, self.do), device)
            before.replay()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            results: tuple[Tensor, ...] = graph.out
            return results

        return replay, before

    def token_major(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        return [result.transpose(1, 2) if self.candidate.head_major else result for result in results]

    def held(self, direction: str) -> int:
        """Bytes of what a call is given."""
        return sum(tensor.nbytes for tensor in (*self.leaves, *([] if direction == "fwd" else [self.do])))


# What is shown


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _above(error: GradientError) -> str:
    return f"error {error.error:.2e} of {error.name} is above the budget {error.budget:.2e}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{3 if value < 1 else 2 if value < 10 else 1}f}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show(rows: list[Row], out: Path, plan: Plan) -> None:
    peers = [name for name in PEERS if any(row.peer_ms(name) is not None for row in rows)]
    table = Table(title="median time per call, and how much longer peers take", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("B,H,S,D,k,dilation", no_wrap=True)
    table.add_column("pass")
    table.add_column("backend")
    floors = any(row.share_of_floor is not None for row in rows)
    headings = [*(["ms"] if plan.timed else []), *(["of floor"] if floors else []), *(f"{name} ms" for name in peers)]
    headings += ["GiB", "least"] if plan.memory else []
    for heading in (*headings, "error"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row.shape), row.direction, row.backend]
        if plan.timed:
            cells.append(f"[bold]{_ms(row.ms_p50)}[/]")
        if floors:
            cells.append("-" if row.share_of_floor is None else f"{row.share_of_floor:.0%}")
        cells += [_ms(row.peer_ms(name)) + _ratio(row, name) for name in peers]
        if plan.memory:
            cells += [_gib(row.peak_gib), _gib(row.floor_gib)]
        table.add_row(*cells, f"{row.error:.1e}")
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    pairs = [(row, row.peer_ms(name)) for row in rows if row.default for name in peers]
    measured = [(row.ms_p50, peer) for row, peer in pairs if row.ms_p50 is not None and peer is not None]
    if measured:
        slower = sum(ms > peer for ms, peer in measured)
        verdict = f"slower than a peer in {slower} of {len(measured)} cases" if slower else "never slower than a peer"
        console.print(f"The default backend is {verdict}.")
    console.print("Errors are the largest against fp64 on sampled rows, each within its budget, so the figures count.")
    suffixes = (".png", ".csv", ".json") if plan.timed else (".csv", ".json")
    console.print(*(str(relative(out.with_suffix(suffix))) for suffix in suffixes), sep="   ", soft_wrap=True)


def _ratio(row: Row, name: str) -> str:
    peer = row.peer_ms(name)
    if peer is None or row.ms_p50 is None:
        return ""
    return f" [{'green' if peer >= row.ms_p50 else 'red'}]{peer / row.ms_p50:.1f}x[/]"


COLORS = {"fa4": "#8da0cb", "flex": "#a6d854", "liger": "#fc8d62"}
OWN_COLORS = ("#1b4f72", "#2e86c1", "#76448a")
LABELS = {"fa4": "FlashAttention-4 window", "flex": "flex_attention", "liger": "Liger, generic"}


def plot(rows: list[Row], path: Path, device: str, tbs: float | None) -> None:
    """A panel for each pass, bars of every implementation by shape: the share of the byte floor, if known, else ms."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    passes = list(dict.fromkeys(row.direction for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    peers = [name for name in PEERS if any(row.peer_ms(name) is not None for row in rows)]
    colors = dict(zip(backends, OWN_COLORS, strict=False)) | COLORS
    names, width = [*backends, *peers], 0.84 / (len(backends) + len(peers))
    size = (max(8, 2 * len(shapes)), 2.9 * len(passes) + 0.6)
    figure, panels = plt.subplots(len(passes), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, direction in zip(panels[:, 0], passes, strict=True):
        own = {(row.shape, row.backend): row for row in rows if row.direction == direction}
        any_of = {shape: row for (shape, _), row in own.items()}
        for i, name in enumerate(names):
            bars: list[tuple[float, float]] = []
            for place, shape in enumerate(shapes):
                mine, row, x = own.get((shape, name)), any_of[shape], place - 0.42 + width * (i + 0.5)
                ms = row.peer_ms(name) if name in peers else None if mine is None else mine.ms_p50
                height = 0.0 if ms is None else ms if row.floor_ms is None else 100 * row.floor_ms / ms
                bars.append((x, height))
                text = "x" if ms is None else _ms(ms)
                axes.annotate(text, (x, height), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=7)
            label = LABELS.get(name, f"ours: {name}")
            axes.bar(*zip(*bars, strict=True), width * 0.94, color=colors[name], label=label)
        if tbs is not None:
            axes.axhline(100, color="black", linestyle="--", linewidth=1)
        title = {"fwd": "forward", "bwd": "backward"}.get(direction, "forward + backward")
        axes.set(ylabel="ms" if tbs is None else "% of the byte floor", title=title)
        axes.margins(y=0.12)
        axes.set_xticks(range(len(shapes)), [_tick(shape) for shape in shapes], fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False
    )
    lines = [f"Neighborhood attention on {device}, {rows[0].dtype}; numbers are ms{', x did not run' if peers else ''}"]
    if tbs is not None:
        lines.append(f"floor: every input read once, every result written once, at {tbs:.2f} TB/s")
    figure.suptitle("\n".join(lines), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _tick(shape: Neighborhood) -> str:
    tokens = f"{shape.tokens // 1024}K" if shape.tokens % 1024 == 0 else str(shape.tokens)
    dilated = "" if shape.dilation == 1 else f" dilation={shape.dilation}"
    return f"B={shape.batch} H={shape.heads} S={tokens}\nD={shape.dim} k={shape.kernel_size}{dilated}"


if __name__ == "__main__":
    sys.exit(main())
