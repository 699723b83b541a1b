"""Neighborhood attention in eager PyTorch: the definition of every option, and the oracle of the kernels.

Rows of one residue class modulo `dilation` attend to each other and to no other row. In a class of S rows, row t (token
t * dilation + r) attends to the rows start(t) ... start(t) + kernel_size - 1 that exist, with

    left     = kernel_size - 1 if causal, else kernel_size // 2
    start(t) = t - left                                       truncate, and causal with either boundary
    start(t) = min(max(t - left, 0), max(S - kernel_size, 0)) shift

so an odd window is centred, an even one has its extra key on the left (offsets -k/2 ... k/2 - 1), "truncate" drops keys
outside the class (Liger), and "shift" moves the window inside (NATTEN), to min(kernel_size, S) keys.

    p(i, j) = softmax over the window of softmax_scale * q_i . k_j,    out_i = sum_j p(i, j) v_j

With fewer queries than keys (causal) they are the last tokens.

Any dtype from bf16 to fp64, any device, differentiable by autograd. Scores, softmax and sums, also those of gradients,
run in fp32 (fp64 for fp64 inputs): q, k and v are cast once, before keys are gathered, so gradients are rounded once.
Keys are gathered in chunks of rows, and each chunk is recomputed in backward, so memory is a few copies of the inputs.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20
"""Approximate size of the gathered keys and values of one chunk of rows."""


def window_starts(num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> Tensor:
    """Token of each row's slot 0, int64 `[N]`; negative if a truncated window starts before its class."""
    token = torch.arange(num_tokens, device="cpu")
    residue, row = token % dilation, token // dilation
    start = row - (kernel_size - 1 if causal else kernel_size // 2)
    if boundary == "shift" and not causal:
        class_size = (num_tokens - residue + dilation - 1) // dilation
        start = start.clamp(min=0).minimum((class_size - kernel_size).clamp(min=0))
    return start * dilation + residue


def band_of(
    attn: Tensor, kernel_size: int, dilation: int, boundary: str, causal: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The band `[B,H,N,kernel_size]` of a dense `[B,H,N,N_k]`, in `dtype`; 0 for slots without a key."""
    num_rows, num_tokens = attn.shape[-2:]
    dilation = min(dilation, max(num_tokens, 1))
    starts = window_starts(num_tokens, kernel_size, dilation, boundary, causal)[num_tokens - num_rows :]
    slots = torch.arange(kernel_size, device=attn.device) * dilation
    keys, exists = _keys(starts.to(attn.device), slots, num_tokens)
    return attn.gather(-1, keys.expand(*attn.shape[:-1], kernel_size)).to(dtype).masked_fill_(~exists, 0)


def reaching(kernel_size: int, num_tokens: int, dilation: int, boundary: str, causal: bool) -> int:
    """A kernel_size with the same keys, at most the given one, to limit temporaries."""
    class_size = -(-num_tokens // dilation)
    one_sided = causal or boundary == "shift"
    return min(kernel_size, max(class_size, 1) if one_sided else 2 * class_size + 2 - kernel_size % 2)


def _keys(starts: Tensor, slots: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Token of each slot of rows `[n, kernel_size]`, clamped into the sequence, and a mask of slots that have a key."""
    keys = starts[:, None] + slots
    exists = (keys >= 0) & (keys < num_tokens)
    return keys.clamp(0, max(num_tokens - 1, 0)), exists


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and softmax."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows_per_chunk(k: Tensor, kernel_size: int) -> int:
    """Number of rows whose gathered keys and values take about CHUNK_BYTES."""
    batch, _, kv_heads, dim = k.shape
    per_row = 2 * max(1, batch * kernel_size * kv_heads * dim) * k.dtype.itemsize
    return max(1, CHUNK_BYTES // per_row)


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
    return_band: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Neighborhood attention of checked inputs.

    Args:
        q: `[B,N,H,D]`. k, v: `[B,N_k,H_kv,D]`, H a multiple of H_kv.
        return_band: if False, only the band of one chunk of rows exists at a time.

    Returns:
        out `[B,N,H,D]` in q's dtype; the band `[B,H,N,kernel_size]`, fp32 (fp64 for fp64 inputs): the probability of
        slot s, the key s * dilation after the window's start, 0 if there is none; or None; and LSE `[B,H,N]` in the
        band's dtype.
    """
    heads, dim = q.shape[2:]
    num_tokens, kv_heads = k.shape[1:3]
    first = num_tokens - q.shape[1]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    given_dtype, dtype = q.dtype, _compute_dtype(q)
    dilation = min(dilation, max(num_tokens, 1))  # from there on every row is its own class

    if not return_band:
        kernel_size = reaching(kernel_size, num_tokens, dilation, boundary, causal)

    starts = window_starts(num_tokens, kernel_size, dilation, boundary, causal)[first:].to(q.device)
    slots = torch.arange(kernel_size, device=q.device) * dilation

    def attend(q: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        """out, LSE and, with return_band, the band of a chunk of rows q `[B,n,H,D]` whose windows have starts `[n]`."""
        keys, exists = _keys(start, slots, num_tokens)
        grouped = q.unflatten(2, (kv_heads, heads // kv_heads))
        gathered_k, gathered_v = (x[:, keys].masked_fill(~exists[..., None, None], 0) for x in (k, v))
        scores = torch.einsum("bnhgd,bnshd->bhgns", grouped, gathered_k) * scale
        scores = scores.masked_fill(~exists, -math.inf)
        p = scores.softmax(-1)
        out = torch.einsum("bhgns,bnshd->bnhgd", p, gathered_v)
        results = (out.flatten(2, 3).to(given_dtype), scores.logsumexp(-1).flatten(1, 2))
        return (*results, p.flatten(1, 2)) if return_band else results

    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    run = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False) if needs_grad else attend
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    size = _rows_per_chunk(k, kernel_size)
    chunks = [run(*chunk) for chunk in zip(q.split(size, 1), starts.split(size), strict=True)]
    outs, lses, *bands = zip(*chunks, strict=True)
    return torch.cat(outs, 1), torch.cat(bands[0], 2) if bands else None, torch.cat(lses, 2)


def neighborhood_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    path: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from probabilities, of checked inputs.

    Args:
        do, q: `[B,N,H,D]`. k, v: `[B,N_k,H_kv,D]`.
        attn: the band `[B,H,N,kernel_size]`, or probabilities of all pairs `[B,H,N,N_k]`.
        path: ignored: the reference has one.

    Returns:
        dq, dk, dv like q, k, v.
    """
    heads, dim = q.shape[2:]
    num_tokens, kv_heads = k.shape[1:3]
    first = num_tokens - q.shape[1]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    given_dtype, dtype = q.dtype, _compute_dtype(q)
    dilation = min(dilation, max(num_tokens, 1))
    if attn.shape[-1] != kernel_size:
        kernel_size = reaching(kernel_size, num_tokens, dilation, boundary, causal)
        attn = band_of(attn, kernel_size, dilation, boundary, causal, dtype=dtype)

    starts = window_starts(num_tokens, kernel_size, dilation, boundary, causal)[first:].to(q.device)
    slots = torch.arange(kernel_size, device=q.device) * dilation
    do, q, k, v = (tensor.to(dtype) for tensor in (do, q, k, v))
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    size = _rows_per_chunk(k, kernel_size)
    for start in range(0, q.shape[1], size):
        chunk = slice(start, start + size)
        keys, exists = _keys(starts[chunk], slots, num_tokens)
        p = attn[:, :, chunk].to(dtype).masked_fill(~exists, 0).unflatten(1, (kv_heads, heads // kv_heads))
        grouped_do, grouped_q = (x[:, chunk].unflatten(2, (kv_heads, heads // kv_heads)) for x in (do, q))
        gathered_k, gathered_v = (x[:, keys].masked_fill(~exists[..., None, None], 0) for x in (k, v))
        dp = torch.einsum("bnhgd,bnshd->bhgns", grouped_do, gathered_v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq[:, chunk] = (torch.einsum("bhgns,bnshd->bnhgd", ds, gathered_k) * scale).flatten(2, 3)
        for gradient, weights, rows in ((dk, ds * scale, grouped_q), (dv, p, grouped_do)):
            per_slot = torch.einsum("bhgns,bnhgd->bnshd", weights, rows)
            gradient.index_add_(1, keys.flatten(), per_slot.flatten(1, 2))
    return dq.to(given_dtype), dk.to(given_dtype), dv.to(given_dtype)
