"""Neighborhood attention beside its peers, in one process: FlashAttention-4's window, flex_attention, Liger's op.

For each shape, backend and pass: the error of what is timed against fp64 on sampled rows, then GPU time and peak memory
beside the byte floor, then the same for every peer (bench/neighborhood_peers.py). A backend's error above its budget is
a red gate: no times at all, and status 1. A peer that is missing, runs out of memory or computes something else has
null, and the reason is printed. Windows are truncated at the borders, as all peers do it.

On CUDA, what is checked and timed is a CUDA graph, without the time to start it; elsewhere a call as Python makes it.
Mode "memory" adds the peak of everything alive, inputs and outputs included; backward has that of both passes.

Writes OUT.json (schema: docs/results_files.md) after every shape; at the end OUT.csv and OUT.png. The same command goes
on where it was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import oracles
from bench.common import DTYPES, able_backends
from bench.inputs import Neighborhood, Problem, make_problem
from bench.neighborhood_peers import PEERS, make_peer
from bench.pass_report import Look, add_options, add_shapes, benchmark, parse_options, pass_fields
from bench.passes import Candidate, Case, Measured, Plan, SampledTruth, Task
from bench.results_file import Row
from bench.roofline import neighborhood_bytes
from bench.timing import GIB
from dispatch import neighborhood_attention
from nsa.neighborhood.operators import ALGORITHMS

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


LOOK = Look(
    "Neighborhood attention",
    "B,H,S,D,k,dilation",
    lambda row: Neighborhood(row["b"], row["h"], row["s"], row["d"], row["k"], row["dilation"]),
    {
        "GiB": lambda row: "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
        "least": lambda row: "" if row["peak_gib"] is None else f"{row['floor_gib']:.2f}",
    },
    {
        "fa4": ("FlashAttention-4 window", "#8da0cb"),
        "flex": ("flex_attention", "#a6d854"),
        "liger": ("Liger, generic", "#fc8d62"),
    },
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
    return 0 if benchmark(args, LOOK, cases, plan, partial(make_row, args)) else 1


def choose_backends(
    shape: Neighborhood, device: torch.device, dtype: torch.dtype, algorithm: str, named: str | None
) -> list[str]:
    """Backends of `able_backends` that run forward and backward."""
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
    return {
        **pass_fields("neighborhood_attention", args, direction, backend, default, measured, peers, moved, tbs),
        "algorithm": args.algorithm,
        "b": shape.batch,
        "h": shape.heads,
        "s": shape.tokens,
        "d": shape.dim,
        "k": shape.kernel_size,
        "dilation": shape.dilation,
        "peak_gib": measured.peak_gib,
        "floor_gib": held / GIB,
        **{f"{name}_gib": None if peer is None else peer.peak_gib for name, peer in peers.items()},
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out="neighborhood")
    add_shapes(parser, SHAPES, "B,H,S,D,k[,dilation]", "liger long", Neighborhood.read)
    add = parser.add_argument
    add("--backend", help="as in neighborhood_attention; default: every one that can run")
    add("--algorithm", choices=ALGORITHMS, default="auto", help="as in neighborhood_attention; default: %(default)s")
    return parse_options(parser, argv, [SHAPES["tiny"]], [SHAPES["liger"], SHAPES["long"]])


def window(shape: Neighborhood) -> dict[str, Any]:
    """Keywords of neighborhood_attention."""
    return {"kernel_size": shape.kernel_size, "dilation": shape.dilation}


# Truth


def make_truth(shape: Neighborhood, problem: Problem, do: Tensor) -> SampledTruth:
    """Results in fp64 on SEGMENTS runs of rows.

    A run's gradients follow from the tokens within two windows of it: keys depend on queries a window away, and these
    on keys another window away. So bench/oracles.py runs on such a part of the sequence, which begins with residue
    class 0. Budget: that of bench/oracles.py in the inputs' own dtype.
    """
    tensors = [tensor.detach() for tensor in (problem.q, problem.k, problem.v)]
    tokens, reach = shape.tokens, 2 * (shape.kernel_size - 1) * shape.dilation
    firsts = torch.linspace(0, max(0, tokens - SEGMENT_ROWS), SEGMENTS).long().unique().tolist()
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for first in firsts:
        begin = max(0, first - reach) // shape.dilation * shape.dilation
        inputs = [tensor[:, begin : first + SEGMENT_ROWS + reach] for tensor in (*tensors, do)]
        inner = slice(first - begin, first - begin + SEGMENT_ROWS)
        both = (_results(shape, [tensor.double() for tensor in inputs]), _results(shape, inputs))
        exact, naive = ({name: x[:, inner] for name, x in results.items()} for results in both)
        found.append((exact, naive))
    exact, naive = (
        {name: torch.cat([run[i][name] for run in found], 1) for name in ("out", *GRADIENTS)} for i in (0, 1)
    )
    budgets = {
        name: oracles.budget(
            (naive[name] - right).abs().amax().item(), right.abs().amax().item(), do.dtype, do.shape[-1]
        )
        for name, right in exact.items()
    }
    rows = torch.cat([torch.arange(first, min(first + SEGMENT_ROWS, tokens)) for first in firsts]).to(do.device)
    return SampledTruth(exact, budgets, lambda _, x: x[:, rows])


def _results(shape: Neighborhood, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output and gradients for q, k, v and do."""
    *leaves, do = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    out, _ = oracles.neighborhood_attention(*leaves, **window(shape))
    return {"out": out.detach(), **dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, do), strict=True))}


if __name__ == "__main__":
    sys.exit(main())
