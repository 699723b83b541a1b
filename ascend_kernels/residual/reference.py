"""Attention residual (arXiv 2603.15031) in eager PyTorch: the definition, and the oracle of the kernels.

A layer attends to the outputs x_1 ... x_L of the blocks before it, token by token, with one learned query:

    rstd_i  = 1 / sqrt(mean(x_i^2) + eps)
    score_i = sum over D of w_query * w_norm * x_i * rstd_i        w_query . RMSNorm(x_i), without a scale
    alpha   = softmax of score over the L blocks
    out = sum over i of alpha_i * x_i of the unnormalised blocks

Any dtype from bf16 to fp64, any device, differentiable by autograd. Sums, also those of gradients, run in fp32 (fp64
for fp64 inputs): each input is cast once at the start, so its gradient is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_residual(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention residual of checked inputs.

    Args:
        blocks: `[L,B,N,D]`, or L tensors `[B,N,D]`.
        w_query: `[D]`. w_norm: `[D]`, or None for ones.

    Returns:
        out `[B,N,D]` in the blocks' dtype; alpha and rstd `[L,B,N]` in fp32 (fp64 for fp64 inputs).
    """
    given_dtype = blocks.dtype if isinstance(blocks, Tensor) else blocks[0].dtype
    dtype = torch.float64 if given_dtype == torch.float64 else torch.float32
    rows = blocks.to(dtype).unbind(0) if isinstance(blocks, Tensor) else [block.to(dtype) for block in blocks]
    weight = w_query.to(dtype) if w_norm is None else w_query.to(dtype) * w_norm.to(dtype)
    rstd = torch.stack([(row.square().mean(-1) + eps).rsqrt() for row in rows])
    scores = torch.stack([(row * weight).sum(-1) for row in rows]) * rstd
    alpha = scores.softmax(0)
    out = torch.zeros((), dtype=dtype, device=weight.device)
    for alpha_i, row in zip(alpha, rows, strict=True):
        out = out + alpha_i[..., None] * row
    return out.to(given_dtype), alpha, rstd
