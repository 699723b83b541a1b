"""Peers of the paper's NSA, for benchmarks: each as it is meant to be used.

- fla: fla-core's parallel_nsa, in Triton. It compresses blocks as long as the selected ones, without overlap, so with
  l' = 64 and d = 16 it attends to a quarter of the compressed entries; it takes gates instead of projecting them. Its
  window is flash-attn's function, replaced here by FlashAttention-4's. Its selected branch alone, for blocks that were
  chosen before, is `selected_peer`.

None of them computes what NSA here computes to the last entry, so their results need only be finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gradient_check import GradientError
from bench.inputs import Problem
from bench.passes import Candidate, Task, Unavailable, package, require_cuda
from nsa import NSAConfig

BRANCHES = ("cmp", "slc", "win")
Attention = Callable[..., Tensor]
"""Arguments: q, k, v and three gates `[B,N,H]`."""


@dataclass(frozen=True)
class Finite:
    """Truth for peers that compute something else: any finite result is as good as another."""

    def worst(self, results: dict[str, Tensor], slack: int = 1) -> GradientError:
        for name, result in results.items():
            if not bool(result.isfinite().all()):
                return GradientError(name, float("nan"), 0.0)
        return GradientError("results", 0.0, 0.0)


def selected_peer(indices: Tensor, size: int, task: Task) -> Candidate:
    """fla's selected branch alone: of q, k, v, for the blocks `[B,H_kv,N,n]` of `size` tokens that each token chose.

    Raises:
        Unavailable: if it cannot run.
    """
    q, k, *_ = task.leaves
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    if group < 16 or group & (group - 1):
        raise Unavailable(f"takes groups of 16, 32, 64 ... heads, got {group}")
    function, of_tokens = _fla_package().ParallelNSAFunction, indices.transpose(1, 2).contiguous()
    options = (of_tokens, of_tokens.shape[-1], size, scale, None)
    return Candidate("fla", lambda q, k, v: function.apply(q, k, v, *options), graphs=False)


def make_task(problem: Problem) -> Task:
    """q, k, v and the gates of the branches, computed already: 1/3 each if the problem has no weights for them."""
    q, k, v = (tensor.detach() for tensor in (problem.q, problem.k, problem.v))
    if problem.gate_proj_weight is None:
        gates = q.new_full((3, *q.shape[:3]), 1 / 3)
    else:
        gates = torch.sigmoid(torch.einsum("bnhd,hgd->gbnh", q, problem.gate_proj_weight.detach())).contiguous()
    names = "dq", "dk", "dv", *(f"dg_{branch}" for branch in BRANCHES)
    return Task((q, k, v, *gates), torch.randn_like(q), names, Finite())


def make_peer(name: str, config: NSAConfig, task: Task) -> Candidate:
    """One of PEERS for a problem.

    Raises:
        Unavailable: if it cannot run.
    """
    require_cuda(task.do.device)
    return Candidate(name, PEERS[name](config), graphs=False)


def _fla_package() -> Any:
    return package("fla.ops.nsa", "not installed: pip install fla-core==0.6.0").parallel


def _fla(config: NSAConfig) -> Attention:
    parallel = _fla_package()
    if parallel.flash_attn_func is None:
        fa4 = package("flash_attn.cute", 'has no window: pip install "nsa-kernels[cuda]"').flash_attn_func
        parallel.flash_attn_func = lambda *qkv, **options: fa4(*qkv, **options)[0]  # the other one is the log-sum-exp
    options: dict[str, Any] = {
        "block_counts": config.num_selected_blocks,
        "block_size": config.select_size,
        "window_size": config.window_size,
        "scale": config.softmax_scale,
    }
    return lambda *tensors: parallel.parallel_nsa(*tensors, **options)


PEERS: dict[str, Callable[[NSAConfig], Attention]] = {"fla": _fla}
COMPUTES = {"fla": "other results: blocks of l' compressed without overlap, gates ready made"}
"""Differences of a peer's task."""
