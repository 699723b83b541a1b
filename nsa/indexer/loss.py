"""The loss that trains an indexer in eager PyTorch: defines what it means; kernels are tested against it.

Any dtype from bf16 to fp64, any device, any block size; differentiable itself. Tokens are processed in chunks whose
keys are gathered, and each chunk is recomputed in backward, so temporaries need the memory of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from nsa.common.derivatives import needs_grad
from nsa.reference import Keys, chunk_bytes
from nsa.reference import check as check  # the same conditions


def indexer_kl_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    index_scale: float,
    softmax_scale: float,
) -> tuple[Tensor, None]:
    """The loss, for checked arguments of nsa.indexer_kl_loss. Args: q_start: int32 `[B]` or None."""
    tensors = q_idx, k_idx, q.detach(), k.detach(), block_indices
    options: Any = {"starts": q_start, "size": block_size, "scales": (index_scale, softmax_scale)}
    parts = [_sum(*own, **options) for own in _sequences(*tensors, cu_seqlens)]
    nothing = q_idx[..., :0].sum() + k_idx[..., :0].sum()  # keeps the result in the autograd graph
    total = torch.stack([_exact(nothing), *(loss for loss, _ in parts)]).sum()
    count = sum((count for _, count in parts), start=total.new_zeros(()))
    return total / count.clamp(min=1), None


def _exact(x: Tensor) -> Tensor:
    """Cast x to the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sequences(
    q_idx: Tensor, k_idx: Tensor, q: Tensor, k: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of all sequences of equal length, or of each document, with a leading batch dimension."""
    if cu_seqlens is None:
        yield q_idx, k_idx, q, k, block_indices
        return
    for first, stop in pairwise(cu_seqlens.tolist()):
        yield (*(x[None, first:stop] for x in (q_idx, k_idx, q, k)), block_indices[None, :, first:stop])


def _sum(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    *,
    starts: Tensor | None,
    size: int,
    scales: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all tokens and heads of sequences, and the number of losses.

    Args:
        starts: token index `[B]` of each sequence's first query; None: its queries are its last tokens.
    """
    batch, num_queries, heads, dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    size = min(size, max(num_keys, 1))
    indices = pad(indices.long(), [0, int(indices.shape[-1] == 0)], value=-1)  # at least one slot
    indices = torch.where((indices >= 0) & (indices * size < num_keys), indices, -1)
    keys = Keys(_exact(k).transpose(1, 2), _exact(k_idx).expand(-1, -1, kv_heads, -1).transpose(1, 2), moderate=True)
    first = num_keys - num_queries if starts is None else starts.long()[:, None]
    rows = (first + torch.arange(num_queries, device=q.device)).expand(batch, -1)
    index_rows, q_rows = _exact(q_idx).transpose(1, 2), _exact(q).unflatten(2, (kv_heads, -1)).movedim(1, 2)
    per_token = batch * indices.shape[-1] * size * (3 * heads + kv_heads * (dim + q_idx.shape[-1] + 3))
    step = max(1, chunk_bytes(q.device) // max(1, per_token * keys.k.dtype.itemsize))
    recompute = needs_grad(q_idx, k_idx)
    run = partial(checkpoint, _rows, use_reentrant=False, preserve_rng_state=False) if recompute else _rows
    chunks = zip(
        index_rows.split(step, 2), q_rows.split(step, 2), rows.split(step, 1), indices.split(step, 2), strict=True
    )
    losses = [run(*chunk, keys, size, scales) for chunk in chunks]
    total, count = (torch.stack(parts).sum() for parts in zip(*losses, strict=True))
    return total, count


def _rows(
    q_idx: Tensor, q: Tensor, rows: Tensor, indices: Tensor, keys: Keys, size: int, scales: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Losses of tokens `rows` `[B,n]`: q_idx `[B,H_kv,n,D_i]`, q `[B,H_kv,n,G,D]`, indices `[B,H_kv,n,k]`."""
    places = torch.arange(size, device=rows.device)
    positions = indices[..., None] * size + places
    visible = (indices >= 0)[..., None] & (positions < keys.count) & (positions <= rows[:, None, :, None, None])
    chosen = visible.any(-1)
    gathered = keys.gather(positions.flatten(-2))

    logits = (q @ gathered.k.mT * scales[1]).masked_fill(~visible.flatten(-2)[..., None, :], -math.inf)
    top = logits.amax(-1, keepdim=True)
    weights = (logits - torch.where(top == -math.inf, 0.0, top)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    target = weights.mean(-2).unflatten(-1, visible.shape[-2:]).sum(-1)

    scores = (gathered.v @ q_idx[..., None])[..., 0].unflatten(-1, visible.shape[-2:]).masked_fill(~visible, -math.inf)
    best = scores.detach().amax(-1, keepdim=True)
    first = torch.where(scores.detach() == best, places, size - 1).amin(-1, keepdim=True)
    scores = (scores.gather(-1, first)[..., 0] * scales[0]).masked_fill(~chosen, -math.inf)
    has_blocks = chosen.any(-1)
    log_p = torch.log_softmax(scores.masked_fill(~has_blocks[..., None], 0.0), -1).masked_fill(~chosen, 0.0)
    log_t = torch.where(target > 0, target, 1.0).log()
    return (target * (log_t - log_p)).sum(), has_blocks.sum()
