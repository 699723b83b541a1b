"""Neighborhood attention with truncated windows by others, for benchmarks: each as it is meant to be used.

- fa4: FlashAttention-4's sliding window. With dilation C, `[B,N,H,D]` is read as `[B,N/C,C*H,D]`, without a copy: rows
  of one residue class become a sequence of their own, and classes heads.
- flex: torch.nn.attention.flex_attention, compiled, with the block mask of the neighborhood.
- liger: liger-kernel's generic (not Ascend's) neighborhood attention, which holds `[B,H,N,N]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.inputs import Neighborhood
from bench.passes import Candidate, Unavailable

FLEX_BLOCK = 128
LIGER_TOKENS = 46340


def make_peer(name: str, problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    """One of PEERS for a problem.

    Raises:
        Unavailable: when it cannot run.
    """
    if device.type != "cuda":
        raise Unavailable(f"runs on CUDA devices, got {device.type}")
    return PEERS[name](problem, device, dtype)


def _fa4(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # a broken package can raise anything
        raise Unavailable(f'cannot be imported: pip install "nsa-kernels[cuda]" ({error})') from error
    if dtype == torch.float32:
        raise Unavailable("takes 16-bit tensors, got float32")
    if problem.tokens % problem.dilation:
        raise Unavailable(
            f"residue classes of {problem.tokens} tokens differ in length with dilation {problem.dilation}"
        )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_class = (residue_classes(tensor, problem.dilation) for tensor in (q, k, v))
        out: Tensor = flash_attn_func(*by_class, window_size=(problem.left, problem.right))[0]
        return out.view(q.shape)

    return Candidate("fa4", attention)


def residue_classes(tensor: Tensor, dilation: int) -> Tensor:
    """`[B,N,H,D]`, contiguous, as `[B,N/C,C*H,D]` with C = dilation: head c*H+h is head h of the tokens c modulo C."""
    batch, tokens, heads, dim = tensor.shape
    return tensor.view(batch, tokens // dilation, dilation * heads, dim)


def _flex(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    torch.compiler.reset()  # each problem compiles anew, and compilations of one function are limited
    functorch_config.donated_buffer = False  # so that backward may be repeated
    compiled, mask = torch.compile(flex_attention, dynamic=False), block_mask(problem, device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask)
        return out

    return Candidate("flex", attention, head_major=True)


def block_mask(problem: Neighborhood, device: torch.device) -> BlockMask:
    """The neighborhood as flex_attention takes it.

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
    """Of a row of blocks how many are set, int32 `[1,1,rows]`, and which, those first, int32 `[1,1,rows,columns]`."""
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], which.int()[None, None].contiguous()


def _liger(problem: Neighborhood, device: torch.device, dtype: torch.dtype) -> Candidate:
    try:
        from liger_kernel.ops.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionFunction as Function
    except ImportError as error:
        raise Unavailable(f"not installed: pip install liger-kernel==0.8.5 ({error})") from error
    if problem.kernel_size % 2 == 0:
        raise Unavailable(f"takes odd windows, got {problem.kernel_size}")
    if problem.tokens > LIGER_TOKENS:
        raise Unavailable(f"addresses [N,N] with 32 bits, N <= {LIGER_TOKENS}: at 65536 it ended the process")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = Function.apply(q, k, v, problem.kernel_size, problem.dilation)
        return out

    return Candidate("liger", attention, head_major=True)


PEERS: dict[str, Callable[[Neighborhood, torch.device, torch.dtype], Candidate]] = {
    "fa4": _fa4,
    "flex": _flex,
    "liger": _liger,
}
