"""Neighborhood attention in eager PyTorch: what every option means, and the oracle that the kernels are held against.

Rows of one residue class modulo `dilation` attend to each other and to no other row. In a class of S rows, row t (token
t * dilation + r) attends to the rows start(t) ... start(t) + kernel_size - 1 that exist, with

    left     = kernel_size - 1 if causal, else kernel_size // 2
    start(t) = t - left                                       truncate, and causal with either boundary
    start(t) = min(max(t - left, 0), max(S - kernel_size, 0)) shift

so an odd window is centred, an even one has its extra key on the left (offsets -k/2 ... k/2 - 1), "truncate" drops what
lies outside the class (Liger), and "shift" moves the window inside (NATTEN), to min(kernel_size, S) keys.

    p(i, j) = softmax over the window of softmax_scale * q_i . k_j,    out_i = sum_j p(i, j) v_j

Any dtype from bf16 to fp64, any device, differentiable by autograd. Keys are gathered in chunks of rows, and each chunk
is recomputed in backward, so memory is a few copies of the inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20
"""Rough size of the gathered keys and values of one chunk of rows."""


def check(call: Any) -> str | None:
    """Why the dispatcher must not pick the reference for this call (dispatch.Call), or None.

    It has one algorithm and takes any name of one: they all compute the same.
    """
    if call.device_type == "cpu" or call.named:
        return None
    return f"runs on {call.device_type} only when named: backend='reference' (correct everywhere, fast nowhere)"


def window_starts(num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> Tensor:
    """Token of each row's slot 0, int64 `[N]`; negative where a truncated window starts before its class."""
    token = torch.arange(num_tokens)
    residue, row = token % dilation, token // dilation
    start = row - (kernel_size - 1 if causal else kernel_size // 2)
    if boundary == "shift" and not causal:
        class_size = (num_tokens - residue + dilation - 1) // dilation
        start = start.clamp(min=0).minimum((class_size - kernel_size).clamp(min=0))
    return start * dilation + residue


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    softmax_scale: float | None = None,
    boundary: str = "truncate",
    causal: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Neighborhood attention of checked inputs.

    Args:
        q: `[B,N,H,D]`. k, v: `[B,N,H_kv,D]`, H a multiple of H_kv.
        compute_dtype: dtype of all arithmetic, instead of fp32 (fp64 for fp64 inputs). The inputs' own low precision
            gives the "same math in low-precision PyTorch" of the error budget.

    Returns:
        out `[B,N,H,D]` in q's dtype; the band `[B,H,N,kernel_size]`, fp32 (fp64 for fp64 inputs): the probability of
        slot s, the key s * dilation after the window's start, 0 where there is none; and LSE `[B,H,N]` likewise.
    """
    batch, num_tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    result_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dtype = compute_dtype or result_dtype
    dilation = min(dilation, max(num_tokens, 1))  # from there on every row is its own class

    starts = window_starts(num_tokens, kernel_size, dilation, boundary, causal).to(q.device)
    slots = torch.arange(kernel_size, device=q.device) * dilation

    def rows(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of one chunk, q `[B,n,H,D]`, with their windows' starts `[n]`."""
        keys = start[:, None] + slots  # [n, kernel_size]
        exists = (keys >= 0) & (keys < num_tokens)
        keys = keys.clamp(0, max(num_tokens - 1, 0))
        grouped = q.to(dtype).unflatten(2, (kv_heads, heads // kv_heads))
        scores = torch.einsum("bnhgd,bnshd->bhgns", grouped, k[:, keys].to(dtype)) * scale
        scores = scores.masked_fill(~exists, -math.inf)
        p = scores.softmax(-1)
        out = torch.einsum("bhgns,bnshd->bnhgd", p, v[:, keys].to(dtype).masked_fill(~exists[..., None, None], 0))
        return out.flatten(2, 3), p.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    per_row = 2 * max(1, batch * kernel_size * kv_heads * dim) * dtype.itemsize
    size = max(1, CHUNK_BYTES // per_row)
    parts = []
    for first in range(0, max(num_tokens, 1), size):
        chunk = (q[:, first : first + size], k, v, starts[first : first + size])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            parts.append(checkpoint(rows, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(rows(*chunk))
    outs, bands, lses = zip(*parts, strict=True)
    out, band, lse = torch.cat(outs, 1), torch.cat(bands, 2), torch.cat(lses, 2)
    return out.to(q.dtype), band.to(result_dtype), lse.to(result_dtype)
