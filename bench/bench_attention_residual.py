"""Attention residual beside its peers, in one process: Liger's op, the formula compiled and in eager PyTorch.

For each shape, backend and pass: the error of what is timed against fp64, then time and peak memory beside the byte
floor, then the same for every peer (bench/residual_peers.py). A backend's error above its budget is a red gate: no
times at all, and status 1. A peer that is missing, runs out of memory or computes something else has null, and the
reason is printed. A shape that ends with ",list" gives the blocks as tensors of their own, which peers have to stack.

On CUDA, what is checked and timed is a CUDA graph of CALLS calls, one after the other, divided by as many: starting a
graph takes a seventh of the shortest of them. Beside it stands the wall time of a call as Python makes it, from an idle
GPU to its end. Elsewhere the two are one. Mode "memory" adds the peak of everything alive, inputs and outputs included;
backward has that of both passes.

With --bars the figures are held against what they have to reach. Writes OUT.json (schema: docs/results_files.md) after
every shape; at the end OUT.csv and OUT.png. The same command resumes where it was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import oracles
from bench.bars import Bar, ratio
from bench.common import DTYPES, able_backends
from bench.inputs import Residual
from bench.pass_report import Look, add_options, add_shapes, benchmark, p50, parse_options, pass_fields
from bench.passes import Candidate, Case, Measured, Plan, SampledTruth, Task
from bench.residual_peers import EPS, PEERS, make_peer
from bench.results_file import Row
from bench.roofline import residual_bytes, residual_held
from bench.show import ms_text
from dispatch import attention_residual
from dispatch.device import describe_device

SHAPES = {
    "tiny": [Residual(4, 2, 60, 48), Residual(3, 1, 37, 123, listed=True)],
    # Liger's benchmark (8 blocks, batch 1, D = 4096), then longer, narrower and wider
    "stacked": [
        *(Residual(8, 1, tokens, 4096) for tokens in (1024, 2048, 4096, 8192, 65536)),
        *(Residual(8, 1, tokens, dim) for dim in (1024, 8192) for tokens in (4096, 8192)),
    ],
    "lists": [Residual(8, 1, tokens, 4096, listed=True) for tokens in (1024, 8192)],
}
CALLS = 10
"""Calls in a CUDA graph."""
SAMPLED = 256
"""Tokens whose results are compared with fp64, evenly spread, the first and the last among them."""
CHUNK_NUMBERS = 1 << 24
"""Numbers of the blocks that the oracle handles at a time."""
FLOOR_TBS = {"H200": 4.24}
"""TB/s of a copy, by a part of the device's name, when the bars were set; other devices are measured."""

LOOK = Look(
    "Attention residual",
    "L,B,T,D",
    lambda row: Residual(row["l"], row["b"], row["t"], row["d"], row["inputs"] == "list"),
    {
        "from Python": lambda row: "" if row["mode"] == "eager" or row["wall_ms"] is None else ms_text(row["wall_ms"]),
        "MiB": lambda row: "" if row["peak_mib"] is None else f"{row['peak_mib']:,.1f}",
        "least": lambda row: "" if row["peak_mib"] is None else f"{row['floor_mib']:,.1f}",
    },
    {
        "liger": ("Liger, generic", "#fc8d62"),
        "compile": ("torch.compile", "#a6d854"),
        "eager": ("PyTorch", "#8da0cb"),
    },
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    try:
        backends = {shape: choose_backends(shape, device, dtype, args.backend) for shape in args.shapes}
    except (ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    cases = {shape: make_case(shape, names, device, dtype) for shape, names in backends.items()}
    plan = Plan.of(args.modes, args.seconds, wall=True, calls=CALLS)
    return 0 if benchmark(args, LOOK, cases, plan, partial(make_row, args), bars if args.bars else None) else 1


def choose_backends(shape: Residual, device: torch.device, dtype: torch.dtype, named: str | None) -> list[str]:
    """Backends of `able_backends` for a shape."""
    options = {
        "blocks": shape.blocks,
        "stacked": not shape.listed,
        "shape": (shape.batch, shape.tokens, shape.dim),
    }
    return able_backends(dispatch.Call("attention_residual", device, dtype, backward=True, options=options), named)


def make_case(shape: Residual, backends: list[str], device: torch.device, dtype: torch.dtype) -> Case:
    def ours(backend: str, *leaves: Tensor) -> Tensor:
        *blocks, w_query, w_norm = leaves
        given = blocks if shape.listed else blocks[0]
        out: Tensor = attention_residual(given, w_query, w_norm, EPS, backend=backend)
        return out

    return Case(
        partial(make_task, shape, device, dtype),
        tuple(Candidate(name, partial(ours, name)) for name in backends),
        {name: partial(make_peer, name, shape) for name in PEERS},
    )


def make_row(
    args: argparse.Namespace,
    tbs: float | None,
    shape: Residual,
    direction: str,
    backend: str,
    default: bool,
    measured: Measured,
    peers: dict[str, Measured | None],
) -> Row:
    """Memory in MiB; `wall_ms` is the median of a call as Python makes it."""

    def mib(measured: Measured | None) -> float | None:
        return None if measured is None or measured.peak_gib is None else measured.peak_gib * 1024

    itemsize = DTYPES[args.dtype].itemsize
    moved = residual_bytes(shape, direction, itemsize)
    return {
        **pass_fields("attention_residual", args, direction, backend, default, measured, peers, moved, tbs),
        "l": shape.blocks,
        "b": shape.batch,
        "t": shape.tokens,
        "d": shape.dim,
        "inputs": "list" if shape.listed else "stacked",
        "wall_ms": p50(measured.wall),
        "peak_mib": mib(measured),
        "floor_mib": residual_held(shape, direction, itemsize) / 2**20,
        **{f"{name}_wall_ms": None if peer is None else p50(peer.wall) for name, peer in peers.items()},
        **{f"{name}_mib": mib(peer) for name, peer in peers.items()},
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out="attnres")
    add_shapes(parser, SHAPES, "L,B,T,D[,list]", "stacked lists", Residual.read)
    parser.add_argument("--backend", help="as in attention_residual; default: every one that can run")
    parser.add_argument(
        "--bars", action="store_true", help="hold the figures against the bars that were set for an H200"
    )
    args = parse_options(parser, argv, [SHAPES["tiny"]], [SHAPES["stacked"], SHAPES["lists"]])
    if args.peak_tbs is None and args.device != "cpu":
        name = describe_device(args.device)
        args.peak_tbs = next((tbs for part, tbs in FLOOR_TBS.items() if part in name), None)
    return args


# Truth


def gradient_names(shape: Residual) -> tuple[str, ...]:
    """Gradients of the leaves: the blocks as one tensor or each by its number, then the weights."""
    blocks = [f"dblocks[{i}]" for i in range(shape.blocks)] if shape.listed else ["dblocks"]
    return (*blocks, "dw_query", "dw_norm")


def make_task(shape: Residual, device: torch.device, dtype: torch.dtype) -> Task:
    """Blocks whose size grows with depth, as those of a pre-norm transformer do, and scores that vary by about 1."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    stacked = normal(shape.blocks, shape.batch, shape.tokens, shape.dim)
    for depth, block in enumerate(stacked, 1):
        block *= depth**0.5
    blocks = [block.clone() for block in stacked] if shape.listed else [stacked]
    leaves = (*blocks, normal(shape.dim) / shape.dim**0.5, 1 + normal(shape.dim) / 4)
    do = normal(shape.batch, shape.tokens, shape.dim)
    return Task(leaves, do, gradient_names(shape), make_truth(shape, leaves, do))


def make_truth(shape: Residual, leaves: Sequence[Tensor], do: Tensor) -> SampledTruth:
    """Results in fp64, a chunk of tokens at a time: only the weights' gradients sum over all of them.

    Budget: that of bench/oracles.py in the inputs' own dtype.
    """
    *blocks, w_query, w_norm = leaves
    do = do.flatten(0, 1)
    tokens, dim = do.shape
    rows = torch.linspace(0, tokens - 1, min(SAMPLED, tokens), device=do.device).long()
    size = max(1, CHUNK_NUMBERS // (shape.blocks * dim))
    sampled: dict[str, list[Tensor]] = {"out": [], "dblocks": []}
    sums = {name: torch.zeros(2, dim, dtype=torch.float64, device=do.device) for name in ("dw_query", "dw_norm")}
    for first in range(0, tokens, size):
        chunk = slice(first, first + size)
        some = [block.flatten(-3, -2)[..., chunk, :] for block in blocks]
        given = (torch.stack(some) if shape.listed else some[0], w_query, w_norm, do[chunk])
        both = [_results(given, torch.float64), _results(given, oracles.wide(do.dtype))]
        here = rows[(rows >= first) & (rows < first + size)] - first
        for name, chunks in sampled.items():
            chunks.append(torch.stack([results[name][..., here, :].double() for results in both]))
        for name, total in sums.items():
            total += torch.stack([results[name].double() for results in both])
    found = {name: torch.cat(chunks, -2) for name, chunks in sampled.items()} | sums
    exact: dict[str, Tensor] = {}
    budgets: dict[str, float] = {}
    for name, (right, low) in found.items():
        error = (low.to(do.dtype) - right).abs().amax().item()  # rounded after all sums
        parts = (
            {f"{name}[{i}]": x for i, x in enumerate(right)} if shape.listed and name == "dblocks" else {name: right}
        )
        exact |= parts
        budgets |= dict.fromkeys(parts, oracles.budget(error, right.abs().amax().item(), do.dtype, dim))
    return SampledTruth(exact, budgets, lambda name, x: x if name in sums else x.flatten(-3, -2)[..., rows, :])


def _results(given: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Results in `dtype`; args: blocks `[L,n,D]`, w_query, w_norm, do `[n,D]`."""
    *leaves, do = (tensor.detach().to(dtype) for tensor in given)
    leaves = [tensor.requires_grad_() for tensor in leaves]
    blocks, w_query, w_norm = leaves
    out = oracles.attention_residual(blocks[:, None], w_query, w_norm, EPS)[0]
    gradients = torch.autograd.grad(out, leaves, do)
    return {"out": out.detach(), **dict(zip(("dblocks", "dw_query", "dw_norm"), gradients, strict=True))}


# Bars

WIDTHS = {4096: (4096, 8192, 65536), 1024: (4096, 8192), 8192: (4096, 8192)}
"""Tokens at which each D is held against the floor."""
MEMORY_BARS = {"fwd": 72.1, "fwd+bwd": 147.0}
"""MiB at T = 1024, D = 4096."""


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Bars of the default backend on an H200: 8 blocks in one tensor, batch 1, bf16."""
    held = {
        (row["t"], row["d"], row["pass"]): row
        for row in rows
        if row["default"] and (row["l"], row["b"], row["inputs"], row["dtype"]) == (8, 1, "stacked", "bf16")
    }
    found = []

    def hold(what: str, tokens: int, dim: int, direction: str, wanted: float, unit: str) -> None:
        row = held.get((tokens, dim, direction), {}).get
        share = row("share_of_floor")
        reached = {
            "of the floor": None if share is None else 100 * share,
            "times as fast as eager": ratio(row("eager_ms"), row("ms_p50")),
            "times as fast as Liger": ratio(row("liger_ms"), row("ms_p50")),
            "times as fast as Liger, from Python": ratio(row("liger_wall_ms"), row("wall_ms")),
            "peak memory": row("peak_mib"),
        }[what]
        found.append(Bar(f"T={tokens} D={dim} {direction}: {what}", reached, wanted, what != "peak memory", unit))

    for dim, lengths in WIDTHS.items():
        for tokens in lengths:
            hold("of the floor", tokens, dim, "fwd", 80, " %")
            hold("of the floor", tokens, dim, "fwd+bwd", 65, " %")
            if tokens >= 8192:
                hold("times as fast as eager", tokens, dim, "fwd+bwd", 20, "x")
    for direction, least in MEMORY_BARS.items():
        hold("times as fast as Liger", 1024, 4096, direction, 1, "x")
        hold("times as fast as Liger, from Python", 1024, 4096, direction, 1, "x")
        hold("peak memory", 1024, 4096, direction, least, " MiB")
        # Linear in T: what does not grow with T only makes longer problems cheaper.
        per_thousand = found[-1].reached or least
        for thousands in (2, 4, 8):
            hold("peak memory", 1024 * thousands, 4096, direction, thousands * per_thousand, " MiB")
    return found


if __name__ == "__main__":
    sys.exit(main())
