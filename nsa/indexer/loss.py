"""The loss that trains an indexer: KL divergence of its distribution over the selected blocks from the attention's.

In eager PyTorch, on any device. Tokens are processed in chunks whose keys are gathered, and each chunk is recomputed in
backward, so temporaries need the memory of one chunk.
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

from nsa.block_sparse.operators import check_indices
from nsa.common.autocast import CASTABLE, autocast_dtype, autocast_off
from nsa.common.checks import check_integer, is_finite, is_number
from nsa.common.derivatives import guard_inplace_changes, needs_grad, refuse_transforms
from nsa.config import LARGEST_OPTION
from nsa.indexer.operators import TOKEN_MODE, check_index_tensors
from nsa.inputs import NSAInputs
from nsa.reference import Keys, chunk_bytes


def indexer_kl_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    q_start: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    index_scale: float | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """KL(attention || indexer) over the selected blocks, differentiable in q_idx and k_idx.

    Selecting blocks gives an indexer no gradient; this loss does. For a token and key/value head, over the selected
    blocks b that hold a key visible to the token, with keys j up to the token:

        t_b = mean over the G query heads of sum_{j in b} P_h[j], P_h = softmax(softmax_scale * q_h . k) over all keys
        of the selected blocks, the weights of `block_sparse_attention`. Treated as constant: q and k get no gradient.
        p_b = softmax over b of index_scale * max_{j in b} q_idx . k_idx, also for the local blocks loss = sum_b t_b
        (log t_b - log p_b)

    averaged over all tokens and heads that have such a block; 0 if there is none. Among equal scores in a block, the
    first key gets the whole gradient. Arithmetic is in fp32 (fp64 for fp64 inputs), also under torch.autocast, where
    inputs may differ in dtype.

    Args:
        q_idx: `[B,N_q,H_kv,D_i]`, packed `[T,H_kv,D_i]`: one indexer head per key/value head.
        k_idx: `[B,N_k,1,D_i]` or `[B,N_k,H_kv,D_i]` in q_idx's dtype, packed without B.
        q: queries of the attention, as in `block_sparse_attention`.
        k: keys of the attention, as in `block_sparse_attention`.
        block_indices: selected blocks, as returned by `top_blocks_by_max`.
        block_size: tokens per block.
        q_start: token index of the first query, if there are more keys, or int32 `[B]` on q's device, one per sequence;
            not with `cu_seqlens`. Default: None, which means N_k - N_q.
        cu_seqlens: int32 `[B+1]`, bounds of packed documents, read on the host. Default: None.
        index_scale: factor of the indexer's scores. Default: None, which means 1/sqrt(D_i).
        softmax_scale: factor of the attention's logits. Default: None, which means 1/sqrt(D).

    Returns:
        A scalar in fp32 (fp64).

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from nsa import indexer_kl_loss, top_blocks_by_max
        >>> q_idx, k_idx = torch.randn(1, 256, 2, 32, requires_grad=True), torch.randn(1, 256, 1, 32)
        >>> q, k = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 2, 64)
        >>> blocks = top_blocks_by_max(q_idx, k_idx, block_size=64, k=3)
        >>> loss = indexer_kl_loss(q_idx, k_idx, q, k, blocks, block_size=64)
        >>> loss.backward()
        >>> loss.shape, q_idx.grad.shape
        (torch.Size([]), torch.Size([1, 256, 2, 32]))
    """
    refuse_transforms("indexer_kl_loss")
    check_integer("block_size", block_size, 1, LARGEST_OPTION)
    if cu_seqlens is not None and q_start is not None:
        raise ValueError("q_start must be None with cu_seqlens: documents have as many queries as keys here")
    q_idx, k_idx, q, k = _outside_autocast(q_idx, k_idx, q, k)
    attention = NSAInputs(q, k, k, cu_seqlens=cu_seqlens, q_start=q_start)
    attention.check(TOKEN_MODE)
    check_indices(attention, block_indices)
    check_index_tensors(q_idx, k_idx, packed=cu_seqlens is not None)
    for name, mine, theirs in (("q_idx", q_idx, q), ("k_idx", k_idx, k)):
        if mine.shape[:-2] != theirs.shape[:-2] or mine.device != theirs.device:
            wanted = f"{name[0]}'s tokens {list(theirs.shape[:-2])} on {theirs.device}"
            raise ValueError(f"{name} must have {wanted}, got shape {list(mine.shape)} on {mine.device}")
    if q_idx.shape[-2] != k.shape[-2]:
        raise ValueError(f"q_idx must have a head for each of k's {k.shape[-2]}, got shape {list(q_idx.shape)}")
    scales = _scale("index_scale", index_scale, q_idx), _scale("softmax_scale", softmax_scale, q)
    stop = attention.narrow(TOKEN_MODE).k.shape[-3]
    k_idx, k = (x[..., :stop, :, :] for x in (k_idx, k))
    tensors = q_idx, k_idx, q.detach(), k.detach()
    starts = q_start if isinstance(q_start, Tensor) else None
    options: Any = {"starts": starts, "size": block_size, "scales": scales}
    with autocast_off(q.device.type):
        parts = [_sum(*own, **options) for own in _sequences(*tensors, block_indices, cu_seqlens)]
        nothing = q_idx[..., :0].sum() + k_idx[..., :0].sum()  # keeps the result in the autograd graph
        total = torch.stack([_exact(nothing), *(loss for loss, _ in parts)]).sum()
        count = sum((count for _, count in parts), start=total.new_zeros(()))
        return guard_inplace_changes(total / count.clamp(min=1), *tensors)


def _outside_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast inputs as autocast does for a loss: to fp32, except fp64 and values that later checks reject."""
    devices = {x.device.type for x in tensors if isinstance(x, Tensor)}
    castable = all(isinstance(x, Tensor) and x.dtype in CASTABLE for x in tensors)
    if not castable or all(autocast_dtype(device) is None for device in devices):
        return tensors
    return tuple(x.float() for x in tensors)


def _scale(name: str, scale: float | None, x: Tensor) -> float:
    if scale is None:
        return float(x.shape[-1] ** -0.5)
    if not is_number(scale):
        raise TypeError(f"{name} must be a number or None, got {scale!r}")
    if not (is_finite(scale) and scale > 0):
        raise ValueError(f"{name} must be finite and greater than 0, got {scale}")
    return float(scale)


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
