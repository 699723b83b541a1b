"""Neighborhood attention beside its peers, in one process: FlashAttention-4's window, flex_attention, Liger's op.

For each shape, backend and pass: the error of what is timed against fp64 on sampled rows, then GPU time and peak memory
beside the byte floor, then the same for every peer (bench/neighborhood_peers.py). A backend's error above its budget is
a red gate: no times at all, and status 1. A peer that is missing, runs out of memory or computes something else has
null, and the reason is told. Windows are truncated at the borders, as all peers do it.

On CUDA, what is checked and timed is a CUDA graph, without the time to start it; elsewhere a call as Python makes it.
Mode "memory" adds the peak of everything alive, inputs and outputs included; backward has that of both passes.

Writes OUT.json (schema: docs/results_files.md) after every shape; at the end OUT.csv and OUT.png. The same command goes
on where it was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import oracles
from bench.common import DTYPES, able_backends
from bench.gradient_check import GradientError
from bench.inputs import Neighborhood, Problem, make_problem
from bench.neighborhood_peers import PEERS, make_peer
from bench.pass_report import Look, PassRow, add_options, benchmark, parse_options, pass_fields
from bench.passes import Candidate, Case, Measured, Plan, Task
from bench.roofline import neighborhood_bytes
from bench.timing import GIB
from dispatch import neighborhood_attention
from nsa.neighborhood.validate import ALGORITHMS

SHAPES = {
    "tiny": [Neighborhood(1, 2, 256, 32, 7), Neighborhood(2, 2, 301, 16, 8, 3)],
    # Liger's benchmark, without its projections; it takes as many tokens as fit its [B,H,N,N]
    "liger": [
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
GRADIENTS = ("dq", "dk", "dv")
SEGMENTS, SEGMENT_ROWS = 4, 96
"""Rows whose results are compared with fp64: runs at both ends and between."""


@dataclass(frozen=True, kw_only=True)
class Row(PassRow):
    """One line of the results; memory in GiB."""

    peers: ClassVar[tuple[str, ...]] = tuple(PEERS)

    algorithm: str
    b: int
    h: int
    s: int
    d: int
    k: int
    dilation: int
    peak_gib: float | None
    floor_gib: float
    flex_ms: float | None
    liger_ms: float | None
    fa4_ms: float | None
    flex_gib: float | None
    liger_gib: float | None
    fa4_gib: float | None

    @property
    def shape(self) -> Neighborhood:
        return Neighborhood(self.b, self.h, self.s, self.d, self.k, self.dilation)


LOOK = Look(
    op="Neighborhood attention",
    shape_heading="B,H,S,D,k,dilation",
    columns={
        "GiB": lambda row: "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
        "least": lambda row: "" if row.peak_gib is None else f"{row.floor_gib:.2f}",
    },
    peer_labels={"fa4": "FlashAttention-4 window", "flex": "flex_attention", "liger": "Liger, generic"},
    peer_colors={"fa4": "#8da0cb", "flex": "#a6d854", "liger": "#fc8d62"},
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    try:
        backends = {shape: choose_backends(shape, device, dtype, args.algorithm, args.backend) for shape in args.shapes}
    except (ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    cases = {shape: make_case(shape, names, args.algorithm, device, dtype) for shape, names in backends.items()}
    plan = Plan.of(args.modes, args.seconds)
    return 0 if benchmark(args, LOOK, Row, cases, plan, partial(make_row, args)) else 1


def choose_backends(
    shape: Neighborhood, device: torch.device, dtype: torch.dtype, algorithm: str, named: str | None
) -> list[str]:
    """As `able_backends`, of forward and backward."""
    options = {
        **{"kernel_size": shape.kernel_size, "dilation": shape.dilation, "softmax_scale": None},
        **{"boundary": "truncate", "causal": False, "algorithm": algorithm, "band": False},
        "shape": (shape.batch, shape.tokens, shape.heads, shape.dim),
    }
    call = dispatch.Call("neighborhood_attention", device, dtype, backward=True, options=options)
    return able_backends(call, named)


def make_case(
    shape: Neighborhood, backends: list[str], algorithm: str, device: torch.device, dtype: torch.dtype
) -> Case:
    def make() -> Task:
        problem = make_problem("random", shape.sizes, device=device, dtype=dtype, gated=False)
        return make_task(shape, problem, torch.randn_like(problem.q))

    options = {"algorithm": algorithm, **window(shape)}
    return Case(
        make,
        tuple(Candidate(name, partial(neighborhood_attention, backend=name, **options)) for name in backends),
        {name: partial(find, name, shape) for name in PEERS},
    )


def find(name: str, shape: Neighborhood, task: Task) -> Candidate:
    return make_peer(name, shape, task.do.device, task.do.dtype)


def make_task(shape: Neighborhood, problem: Problem, do: Tensor) -> Task:
    return Task((problem.q, problem.k, problem.v), do, GRADIENTS, make_truth(shape, problem, do))


def make_row(
    args: argparse.Namespace,
    tbs: float | None,
    shape: Neighborhood,
    direction: str,
    backend: str,
    default: bool,
    measured: Measured,
    peers: dict[str, Measured | None],
) -> Row:
    itemsize = DTYPES[args.dtype].itemsize
    moved = neighborhood_bytes(shape, direction, itemsize)
    held = neighborhood_bytes(shape, "fwd" if direction == "fwd" else "bwd", itemsize)
    given = pass_fields(direction, backend, default, measured, peers, floor_bytes=moved, tbs=tbs, command=args.command)
    given |= {f"{name}_gib": None if peer is None else peer.peak_gib for name, peer in peers.items()}
    return Row(
        op="neighborhood_attention",
        algorithm=args.algorithm,
        dtype=args.dtype,
        b=shape.batch,
        h=shape.heads,
        s=shape.tokens,
        d=shape.dim,
        k=shape.kernel_size,
        dilation=shape.dilation,
        peak_gib=measured.peak_gib,
        floor_gib=held / GIB,
        **given,
    )


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(parser, out="neighborhood")
    add(
        "--shapes",
        nargs="+",
        type=_shapes,
        metavar="B,H,S,D,k[,dilation]",
        help=f"problems, or sets of them: {', '.join(SHAPES)}; default: liger long, on a CPU tiny",
    )
    add("--backend", help="as in neighborhood_attention; default: every one that can run")
    add("--algorithm", choices=ALGORITHMS, default="auto", help="as in neighborhood_attention; default: %(default)s")
    return parse_options(parser, argv, [SHAPES["tiny"]], [SHAPES["liger"], SHAPES["long"]])


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
    """Results in fp64 on SEGMENTS runs of rows.

    A run's gradients follow from the tokens within two windows of it: keys depend on queries a window away, and these
    on keys another window away. So bench/oracles.py runs on such a part of the sequence, which begins with residue
    class 0. Budget: as it says, of its error in the inputs' own dtype.
    """
    tensors = [tensor.detach() for tensor in (problem.q, problem.k, problem.v)]
    tokens, reach = shape.tokens, 2 * (shape.kernel_size - 1) * shape.dilation
    firsts = torch.linspace(0, max(0, tokens - SEGMENT_ROWS), SEGMENTS).long().unique().tolist()
    runs = [slice(first, min(first + SEGMENT_ROWS, tokens)) for first in firsts]
    exact: dict[str, list[Tensor]] = {name: [] for name in ("out", *GRADIENTS)}
    errors, largest = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
    for run in runs:
        begin = max(0, run.start - reach) // shape.dilation * shape.dilation
        part = slice(begin, min(run.stop + reach, tokens))
        inner = slice(run.start - begin, run.stop - begin)
        inputs = [tensor[:, part] for tensor in (*tensors, do)]
        oracle, naive = _results(shape, [tensor.double() for tensor in inputs]), _results(shape, inputs)
        for name, right in oracle.items():
            exact[name].append(right[:, inner])
            error = (naive[name][:, inner] - right[:, inner]).abs().amax().item()
            errors[name] = max(errors[name], error)
            largest[name] = max(largest[name], right[:, inner].abs().amax().item())
    budgets = {name: oracles.budget(errors[name], largest[name], do.dtype, do.shape[-1]) for name in exact}
    return Truth(runs, exact, budgets)


def _results(shape: Neighborhood, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Of q, k, v and do."""
    *leaves, do = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    out, _ = oracles.neighborhood_attention(*leaves, **window(shape))
    return {"out": out.detach(), **dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, do), strict=True))}


if __name__ == "__main__":
    sys.exit(main())
