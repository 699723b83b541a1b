"""Peers of attention residual, for benchmarks: each as it is meant to be used.

- liger: liger-kernel's generic (not Ascend's) op.
- compile: the formula under torch.compile, for any T.
- eager: the formula in PyTorch, which keeps a copy of all blocks for every step of it.

All of them take the blocks as one tensor, so a list is stacked first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from bench.inputs import Residual
from bench.passes import Candidate, Task, package, require_cuda

EPS = 1e-6
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def formula(blocks: Tensor, w_query: Tensor, w_norm: Tensor) -> Tensor:
    """The definition of attention residual; blocks `[L,B,N,D]`, arithmetic in fp32 (fp64 for fp64 inputs).

    Without einsum, whose matrix products compilers do not fuse with the rest.
    """
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    values = blocks.to(dtype)
    keys = values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * w_norm.to(dtype)
    shares = (keys * w_query.to(dtype)).sum(-1).softmax(0)
    return (shares[..., None] * values).sum(0).to(blocks.dtype)


def make_peer(name: str, problem: Residual, task: Task) -> Candidate:
    """One of PEERS for a problem.

    Raises:
        Unavailable: if it cannot run.
    """
    if name != "eager":
        require_cuda(task.do.device)
    attention = PEERS[name]()

    def call(*leaves: Tensor) -> Tensor:
        *blocks, w_query, w_norm = leaves
        return attention(torch.stack(blocks) if problem.listed else blocks[0], w_query, w_norm)

    return Candidate(name, call)


def _liger() -> Formula:
    module = package("liger_kernel.ops.attn_res", "not installed: pip install liger-kernel==0.8.5")
    return lambda *tensors: module.LigerAttnResFunction.apply(*tensors, EPS)


@cache
def _compile() -> Formula:
    """Compiled once for each D and L; T is dynamic, so that a run does not compile for each of its shapes."""
    functorch_config.donated_buffer = False  # so that backward may be repeated
    dynamo_config.recompile_limit = 64
    compiled: Formula = torch.compile(formula, dynamic=False)

    def attention(blocks: Tensor, w_query: Tensor, w_norm: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(blocks, 2)
        return compiled(blocks, w_query, w_norm)

    return attention


PEERS: dict[str, Callable[[], Formula]] = {"liger": _liger, "compile": _compile, "eager": lambda: formula}
