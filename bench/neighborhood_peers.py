"""Peers of neighborhood attention with truncated windows, for benchmarks: each as it is meant to be used.

- fa4: FlashAttention-4's sliding window. With dilation C, `[B,N,H,D]` is read as `[B,N/C,C*H,D]`, without a copy: rows
  of one residue class become a sequence of their own, and classes heads.
- flex: torch.nn.attention.flex_attention, compiled, with the block mask of the neighborhood.
- liger: liger-kernel's generic (not Ascend's) neighborhood attention, which holds `[B,H,N,N]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.inputs import Neighborhood
from bench.passes import Candidate, Unavailable, package, require_cuda

FLEX_BLOCK = 128
LIGER_TOKENS = 46340


def make_peer(name: str, problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    """One of PEERS for a problem.

    Raises:
        Unavailable: if it cannot run.
    """
    require_cuda(device)
    return PEERS[name](problem, device, dtype)


def _fa4(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    fa4 = package("flash_attn.cute", 'cannot be imported: pip install "nsa-kernels[cuda]"').flash_attn_func
    if dtype == torch.float32:
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


def _flex(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    torch.compiler.reset()  # each problem compiles anew, and compilations of one function are limited
    functorch_config.donated_buffer = False  # so that backward may be repeated
    compiled, mask = torch.compile(flex_attention, dynamic=False), block_mask(problem, device)
    return Candidate("flex", lambda q, k, v: compiled(q, k, v, block_mask=mask), head_major=True)


def block_mask(problem: Neighborhood, device: torch.device) -> BlockMask:
    """The neighborhood as a mask of flex_attention.

    `create_block_mask` would look at all pairs of tokens, 69 billion of 256K; blocks follow from the window directly.
    """
    tokens, dilation = problem.tokens, problem.dilation
    left, right = problem.left * dilation, problem.right * dilation

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        distance = key - row
        return (distance >= -left) & (distance <= right) & (distance % dilation == 0)

    first = torch.arange(0, tokens, FLEX_BLOCK, device=device)
    last = first + FLEX_BLOCK - 1
    rows_first, rows_last = first[:, None], last[:, None]
    any_visible = (first <= rows_last + right) & (last >= rows_first - left)
    all_visible = (first >= rows_last - left) & (last <= rows_first + right) & (last < tokens) & (rows_last < tokens)
    if dilation > 1:
        all_visible = torch.zeros_like(all_visible)
    return BlockMask.from_kv_blocks(
        *_listed(any_visible & ~all_visible),
        *_listed(all_visible),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks set in each row, int32 `[1,1,rows]`, and all blocks, those first, int32 `[1,1,rows,columns]`."""
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], which.int()[None, None].contiguous()


def _liger(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    name = "liger_kernel.ops.fused_neighborhood_attention"
    function = package(name, "not installed: pip install liger-kernel==0.8.5").LigerFusedNeighborhoodAttentionFunction
    if problem.kernel_size % 2 == 0:
        raise Unavailable(f"takes odd windows, got {problem.kernel_size}")
    if problem.tokens > LIGER_TOKENS:
        raise Unavailable(f"addresses [N,N] with 32 bits, N <= {LIGER_TOKENS}: at 65536 it ended the process")

    options = problem.kernel_size, problem.dilation
    return Candidate("liger", lambda *qkv: function.apply(*qkv, *options), head_major=True)


PEERS = {"fa4": _fa4, "flex": _flex, "liger": _liger}
