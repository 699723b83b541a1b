"""Attention residual beside its peers, in one process: Liger's op, the formula compiled and in eager PyTorch.

For each shape, backend and pass: the error of what is timed against fp64, then time and peak memory beside the byte
floor, then the same for every peer (bench/peers.py). A backend's error above its budget is a red gate: no times at all,
and status 1. On CUDA a CUDA graph of ten calls is checked and timed: starting it takes a seventh of the shortest of
them; `wall_ms` is a call as Python makes it. A shape that ends with ",list" gives the blocks as tensors of their own.

Writes OUT.json (schema: docs/results_files.md) after every shape; at the end OUT.png. The same command
resumes where it was stopped or killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench import oracles
from bench.bars import Bar, figure
from bench.inputs import Residual
from bench.pass_report import OpBenchmark
from bench.passes import Task, Truth
from bench.peers import EPS, RESIDUAL
from bench.results_file import Row
from bench.roofline import residual_bytes
from dispatch import attention_residual

SAMPLED = 256  # Tokens whose results are compared with fp64, evenly spread, the first and the last among them
CHUNK_NUMBERS = 1 << 24  # Numbers of the blocks that the oracle handles at a time
SHAPES = {
    "tiny": "4,2,60,48 3,1,37,123,list",
    # Liger's benchmark (8 blocks, batch 1, D = 4096), then longer, narrower and wider
    "stacked": "8,1,1024,4096 8,1,2048,4096 8,1,4096,4096 8,1,8192,4096 8,1,65536,4096"
    " 8,1,4096,1024 8,1,8192,1024 8,1,4096,8192 8,1,8192,8192",
    "lists": "8,1,1024,4096,list 8,1,8192,4096,list",
}


def sizes(shape: Residual) -> Row:
    row = {"l": shape.blocks, "b": shape.batch, "t": shape.tokens, "d": shape.dim}
    return {**row, "inputs": "list" if shape.listed else "stacked"}


def facts(shape: Residual) -> dict[str, Any]:
    of_block = shape.batch, shape.tokens, shape.dim
    return {"blocks": shape.blocks, "stacked": not shape.listed, "shape": of_block}


def call(shape: Residual, backend: str) -> Callable[..., Tensor]:
    def ours(*leaves: Tensor) -> Tensor:
        *blocks, w_query, w_norm = leaves
        given = blocks if shape.listed else blocks[0]
        out: Tensor = attention_residual(given, w_query, w_norm, EPS, backend=backend)
        return out

    return ours


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


def make_truth(shape: Residual, leaves: Sequence[Tensor], do: Tensor) -> Truth:
    """Results in fp64, a chunk of tokens at a time; budgets of bench/oracles.py in the inputs' own dtype."""
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
    return Truth(exact, budgets, lambda name, x: x if name in sums else x.flatten(-3, -2)[..., rows, :])


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
MEMORY_BARS = {"fwd": 72.1, "fwd+bwd": 147.0}  # MiB at T = 1024, D = 4096


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Bars of the default backend on an H200: 8 blocks in one tensor, batch 1, bf16."""
    found = []

    def hold(what: str, tokens: int, dim: int, direction: str, wanted: float, unit: str, *fields: str) -> None:
        where = {"default": True, "l": 8, "b": 1, "inputs": "stacked", "dtype": "bf16"}
        reached = figure(rows, {**where, "t": tokens, "d": dim, "pass": direction}, *fields)
        reached = None if reached is None else reached * (100 if unit == " %" else 1)
        found.append(Bar(f"T={tokens} D={dim} {direction}: {what}", reached, wanted, what != "peak memory", unit))

    for dim, lengths in WIDTHS.items():
        for tokens in lengths:
            hold("of the floor", tokens, dim, "fwd", 80, " %", "share_of_floor")
            hold("of the floor", tokens, dim, "fwd+bwd", 65, " %", "share_of_floor")
            if tokens >= 8192:
                hold("times as fast as eager", tokens, dim, "fwd+bwd", 20, "x", "eager_ms", "ms_p50")
    for direction, least in MEMORY_BARS.items():
        hold("times as fast as Liger", 1024, 4096, direction, 1, "x", "liger_ms", "ms_p50")
        hold("times as fast as Liger, from Python", 1024, 4096, direction, 1, "x", "liger_wall_ms", "wall_ms")
        hold("peak memory", 1024, 4096, direction, least, " MiB", "peak_mib")
        # Linear in T: what does not grow with T only makes longer problems cheaper.
        per_thousand = found[-1].reached or least
        for thousands in (2, 4, 8):
            hold("peak memory", 1024 * thousands, 4096, direction, thousands * per_thousand, " MiB", "peak_mib")
    return found


BENCHMARK = OpBenchmark(
    __doc__,
    op="attention_residual",
    form="L,B,T,D[,list]",
    out="attnres",
    sets=SHAPES,
    read=Residual.read,
    sizes=sizes,
    facts=facts,
    task=make_task,
    call=call,
    moved=residual_bytes,
    peers=RESIDUAL,
    unit="mib",
    wall=True,
    calls=10,
    floor_tbs={"H200": 4.24},  # when the bars were set
    bars=bars,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
