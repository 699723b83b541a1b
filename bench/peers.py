"""Peers of our ops, for benchmarks: each as it is meant to be used.

Neighborhood attention with truncated windows: FlashAttention-4's sliding window (with dilation C, `[B,N,H,D]` is read
as `[B,N/C,C*H,D]`, without a copy: rows of one residue class become a sequence of their own, and classes heads);
flex_attention, compiled, with the block mask of the neighborhood; liger-kernel's generic (not Ascend's) op, which holds
`[B,H,N,N]`.

Attention residual: liger-kernel's generic op; the formula under torch.compile, for any T; the formula in PyTorch, which
keeps a copy of all blocks for every step of it. All take the blocks as one tensor, so a list is stacked first.

The paper's NSA: fla-core's parallel_nsa, in Triton. It compresses blocks as long as the selected ones, without overlap,
so with l' = 64 and d = 16 it attends to a quarter of the compressed entries, and takes gates instead of projecting
them: its results need only be finite. Its window is flash-attn's function, replaced here by FlashAttention-4's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.inputs import Neighborhood, Residual
from bench.passes import FINITE, Candidate, Task, Unavailable
from nsa import NSAConfig
from nsa.inputs import NSAInputs

LIGER = "not installed: pip install liger-kernel==0.8.5"


class Peer(NamedTuple):
    """Another implementation of an op."""

    make: Callable[[Any, Task], Candidate]  # From a problem; raises Unavailable if it cannot run
    anywhere: bool = False  # Runs on other devices than CUDA's, too


def make_peer(peer: Peer, problem: Any, task: Task) -> Candidate:
    """Raises Unavailable if it cannot run."""
    device = task.do.device
    if device.type != "cuda" and not peer.anywhere:
        raise Unavailable(f"runs on CUDA devices, got {device.type}")
    return peer.make(problem, task)


def package(name: str, otherwise: str) -> Any:
    """A module of a peer; raises Unavailable with the text `otherwise`."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken package can raise anything
        raise Unavailable(f"{otherwise} ({error})") from error


# Neighborhood attention

LIGER_TOKENS = 46340


def _fa4(problem: Neighborhood, task: Task) -> Candidate:
    fa4 = package("flash_attn.cute", 'cannot be imported: pip install "nsa-kernels[cuda]"').flash_attn_func
    if task.do.dtype == torch.float32:
        raise Unavailable("takes 16-bit tensors, got float32")
    n, dilation = problem.tokens, problem.dilation
    if n % dilation:
        raise Unavailable(f"residue classes of {n} tokens differ in length with dilation {dilation}")
    window = {"window_size": (problem.left, problem.right)}
    return Candidate(
        "fa4", lambda *qkv: fa4(*(residue_classes(x, dilation) for x in qkv), **window)[0].view(qkv[0].shape)
    )


def residue_classes(tensor: Tensor, dilation: int) -> Tensor:
    """`[B,N,H,D]`, contiguous, as `[B,N/C,C*H,D]` with C = dilation: head c*H+h is head h of the tokens c modulo C."""
    batch, tokens, heads, dim = tensor.shape
    return tensor.view(batch, tokens // dilation, dilation * heads, dim)


def _flex(problem: Neighborhood, task: Task) -> Candidate:
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left, right, dilation = problem.left * problem.dilation, problem.right * problem.dilation, problem.dilation

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        distance = key - row
        return (distance >= -left) & (distance <= right) & (distance % dilation == 0)

    torch.compiler.reset()  # each problem compiles for itself, and compilations of one function are limited
    functorch_config.donated_buffer = False  # so that backward may be repeated
    # Eagerly it would hold all pairs, 69 billion of 256K tokens
    mask = torch.compile(create_block_mask)(visible, None, None, problem.tokens, problem.tokens, task.do.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return Candidate("flex", lambda q, k, v: compiled(q, k, v, block_mask=mask), head_major=True)


def _liger_neighborhood(problem: Neighborhood, task: Task) -> Candidate:
    module = package("liger_kernel.ops.fused_neighborhood_attention", LIGER)
    function = module.LigerFusedNeighborhoodAttentionFunction
    if problem.kernel_size % 2 == 0:
        raise Unavailable(f"takes odd windows, got {problem.kernel_size}")
    if problem.tokens > LIGER_TOKENS:
        raise Unavailable(f"addresses [N,N] with 32 bits, N <= {LIGER_TOKENS}: at 65536 it ended the process")
    options = problem.kernel_size, problem.dilation
    return Candidate("liger", lambda *qkv: function.apply(*qkv, *options), head_major=True)


NEIGHBORHOOD = {"fa4": Peer(_fa4), "flex": Peer(_flex), "liger": Peer(_liger_neighborhood)}

# Attention residual

EPS = 1e-6
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def formula(blocks: Tensor, w_query: Tensor, w_norm: Tensor) -> Tensor:
    """The definition of attention residual, in fp32 (fp64 for fp64); without einsum, which compilers do not fuse."""
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    values = blocks.to(dtype)
    keys = values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * w_norm.to(dtype)
    shares = (keys * w_query.to(dtype)).sum(-1).softmax(0)
    return (shares[..., None] * values).sum(0).to(blocks.dtype)


def _stacked(name: str, make: Callable[[], Formula], problem: Residual, task: Task) -> Candidate:
    attention = make()

    def call(*leaves: Tensor) -> Tensor:
        *blocks, w_query, w_norm = leaves
        return attention(torch.stack(blocks) if problem.listed else blocks[0], w_query, w_norm)

    return Candidate(name, call)


def _liger_residual() -> Formula:
    module = package("liger_kernel.ops.attn_res", LIGER)
    return lambda *tensors: module.LigerAttnResFunction.apply(*tensors, EPS)


@cache
def _compile() -> Formula:
    """Compiled once for each D and L; T is dynamic, so that a run does not compile for each of its shapes."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # so that backward may be repeated
    dynamo_config.recompile_limit = 64
    compiled: Formula = torch.compile(formula, dynamic=False)

    def attention(blocks: Tensor, w_query: Tensor, w_norm: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(blocks, 2)
        return compiled(blocks, w_query, w_norm)

    return attention


RESIDUAL = {
    "liger": Peer(partial(_stacked, "liger", _liger_residual)),
    "compile": Peer(partial(_stacked, "compile", _compile)),
    "eager": Peer(partial(_stacked, "eager", lambda: formula), anywhere=True),
}

# NSA

BRANCHES = ("cmp", "slc", "win")


def nsa_task(inputs: NSAInputs) -> Task:
    """q, k, v and the gates of the branches, computed already."""
    q, k, v, weight = (tensor.detach() for tensor in inputs.tensors().values())
    gates = torch.einsum("bnhd,hgd->gbnh", q, weight).sigmoid().contiguous()
    names = "dq", "dk", "dv", *(f"dg_{branch}" for branch in BRANCHES)
    return Task((q, k, v, *gates), torch.randn_like(q), names, FINITE)


def _fla_package() -> Any:
    return package("fla.ops.nsa", "not installed: pip install fla-core==0.6.0").parallel


def _fla(config: NSAConfig, task: Task) -> Candidate:
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
    return Candidate("fla", lambda *tensors: parallel.parallel_nsa(*tensors, **options), graphs=False)


def selected_peer(indices: Tensor, size: int, task: Task) -> Candidate:
    """fla's selected branch of q, k, v alone, for the blocks `[B,H_kv,N,n]` of `size` tokens. May raise Unavailable."""
    q, k, *_ = task.leaves
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    if group < 16 or group & (group - 1):
        raise Unavailable(f"takes groups of 16, 32, 64 ... heads, got {group}")
    function, of_tokens = _fla_package().ParallelNSAFunction, indices.transpose(1, 2).contiguous()
    options = (of_tokens, of_tokens.shape[-1], size, scale, None)
    return Candidate("fla", lambda q, k, v: function.apply(q, k, v, *options), graphs=False)


NSA = {"fla": Peer(_fla)}
