"""Neighborhood attention beside its peers, in one process: FlashAttention-4's window, flex_attention, Liger's op.

For each shape, backend and pass: the error of what is timed against fp64 on sampled rows, then GPU time and peak memory
beside the byte floor, then the same for every peer (bench/peers.py). A backend's error above its budget is a red gate:
no times at all, and status 1. Windows are truncated at the borders, as all peers do it. On CUDA a CUDA graph is checked
and timed, without the time to start it; elsewhere a call as Python makes it.

Writes OUT.json (schema: docs/results_files.md) after every shape; at the end OUT.png. The same command goes
on where it was stopped or killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench import oracles
from bench.inputs import Neighborhood, make_problem
from bench.pass_report import OpBenchmark
from bench.passes import Task, Truth
from bench.peers import NEIGHBORHOOD
from bench.results_file import Row
from bench.roofline import neighborhood_bytes
from dispatch import neighborhood_attention
from nsa.inputs import NSAInputs

GRADIENTS = ("dq", "dk", "dv")
SEGMENTS, SEGMENT_ROWS = 4, 96  # Rows whose results are compared with fp64: runs at both ends and between

SHAPES = {
    "tiny": "1,2,256,32,7 2,2,301,16,8,3",
    # Liger's benchmark, without its projections; it takes as many tokens as fit its [B,H,N,N]
    "liger": "2,8,2048,64,7 4,12,2048,64,7 2,16,2048,64,9 2,8,2048,64,7,2",
    "long": "2,16,4096,64,7 4,32,8192,128,9 1,8,65536,128,63 1,8,262144,128,15,8",
}


def window(shape: Neighborhood) -> dict[str, Any]:
    return {"kernel_size": shape.kernel_size, "dilation": shape.dilation}


def sizes(shape: Neighborhood) -> Row:
    row = {"b": shape.batch, "h": shape.heads, "s": shape.tokens, "d": shape.dim}
    return {**row, "k": shape.kernel_size, "dilation": shape.dilation}


def facts(shape: Neighborhood) -> dict[str, Any]:
    options = {"algorithm": "auto", "boundary": "truncate", "causal": False, "band": False}
    of_q = shape.batch, shape.tokens, shape.heads, shape.dim
    return {**window(shape), **options, "softmax_scale": None, "shape": of_q}


def call(shape: Neighborhood, backend: str) -> Callable[..., Tensor]:
    return partial(neighborhood_attention, backend=backend, **window(shape))


def random_task(shape: Neighborhood, device: torch.device, dtype: torch.dtype) -> Task:
    inputs = make_problem("random", shape.sizes, device=device, dtype=dtype, gated=False)
    return make_task(shape, inputs, torch.randn_like(inputs.q))


# Truth


def make_task(shape: Neighborhood, inputs: NSAInputs, do: Tensor) -> Task:
    return Task((inputs.q, inputs.k, inputs.v), do, GRADIENTS, make_truth(shape, inputs, do))


def make_truth(shape: Neighborhood, inputs: NSAInputs, do: Tensor) -> Truth:
    """Results in fp64 on SEGMENTS runs of rows.

    A run's gradients follow from the tokens within two windows of it: keys depend on queries a window away, and these
    on keys another window away. So bench/oracles.py runs on such a part of the sequence, which begins with residue
    class 0. Budget: that of bench/oracles.py in the inputs' own dtype.
    """
    tensors = [tensor.detach() for tensor in (inputs.q, inputs.k, inputs.v, do)]
    tokens, reach = shape.tokens, 2 * (shape.kernel_size - 1) * shape.dilation
    firsts = torch.linspace(0, max(0, tokens - SEGMENT_ROWS), SEGMENTS).long().unique().tolist()
    both: list[dict[str, list[Tensor]]] = [{name: [] for name in ("out", *GRADIENTS)} for _ in range(2)]
    for first in firsts:
        begin = max(0, first - reach) // shape.dilation * shape.dilation
        part = [tensor[:, begin : first + SEGMENT_ROWS + reach] for tensor in tensors]
        for runs, given in zip(both, ([tensor.double() for tensor in part], part), strict=True):
            for name, result in _results(shape, given).items():
                runs[name].append(result[:, first - begin : first - begin + SEGMENT_ROWS])
    exact, naive = ({name: torch.cat(parts, 1) for name, parts in runs.items()} for runs in both)
    budgets = {
        name: oracles.compare(name, naive[name], x, naive[name], do.shape[-1]).budget for name, x in exact.items()
    }
    rows = torch.cat([torch.arange(first, min(first + SEGMENT_ROWS, tokens)) for first in firsts]).to(do.device)
    return Truth(exact, budgets, lambda _, x: x[:, rows])


def _results(shape: Neighborhood, tensors: list[Tensor]) -> dict[str, Tensor]:
    *leaves, do = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    out, _ = oracles.neighborhood_attention(*leaves, **window(shape))
    return {"out": out.detach(), **dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, do), strict=True))}


BENCHMARK = OpBenchmark(
    __doc__,
    op="neighborhood_attention",
    form="B,H,S,D,k[,dilation]",
    out="neighborhood",
    sets=SHAPES,
    read=Neighborhood.read,
    sizes=sizes,
    facts=facts,
    task=random_task,
    call=call,
    moved=neighborhood_bytes,
    peers=NEIGHBORHOOD,
    unit="gib",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
