"""Selection by an indexer in eager PyTorch: defines what every option means; kernels are tested against it.

Any dtype from bf16 to fp64, any device, any block size. Scores are fp32 (fp64 for fp64 inputs). Queries are processed
in chunks, so memory is that of a chunk's scores. Packed documents, and sequences whose starts are a tensor, run in a
loop, which reads these tensors on the host.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.reference import check as check  # the same conditions
from nsa.reference import chunk_bytes


@torch.no_grad()
def top_blocks_by_max(
    q_idx: Tensor,
    k_idx: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    k: int,
    local: int,
) -> Tensor:
    """Selected blocks, int32 `[B,H_i,N_q,k]`, packed `[H_i,T,k]`, for checked arguments."""
    select = partial(_sequence, size=block_size, count=k, local=local)
    if cu_seqlens is None:
        if q_start is None:
            return select(q_idx, k_idx)
        stops = [start + q_idx.shape[1] for start in q_start.tolist()]
        parts = [select(q_idx[b : b + 1], k_idx[b : b + 1, :stop]) for b, stop in enumerate(stops)]
        return torch.cat([*parts, select(q_idx[:0], k_idx[:0])])
    bounds = cu_seqlens.tolist()
    key_bounds = bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
    starts = [None] * (len(bounds) - 1) if q_start is None else q_start.tolist()
    parts = []
    for (first, stop), (first_key, stop_key), start in zip(pairwise(bounds), pairwise(key_bounds), starts, strict=True):
        keys = slice(first_key, stop_key if start is None else first_key + start + stop - first)
        parts.append(select(q_idx[None, first:stop], k_idx[None, keys])[0])
    rows, heads = q_idx.shape[:2]
    indices = torch.cat([*parts, torch.empty((heads, 0, k), dtype=torch.int32, device=q_idx.device)], 1)
    return pad(indices, [0, 0, 0, rows - indices.shape[1]], value=-1)


def _sequence(q: Tensor, keys: Tensor, *, size: int, count: int, local: int) -> Tensor:
    """Selected blocks for sequences of equal length whose queries are their last tokens."""
    batch, num_queries, heads, _ = q.shape
    num_keys = keys.shape[1]
    size = min(size, max(num_keys, 1))  # a short sequence's only block is no longer than itself
    sums = torch.promote_types(q.dtype, torch.float32)
    q, keys = (x.to(sums).transpose(1, 2) for x in (q, keys))
    rows = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    step = max(1, chunk_bytes(q.device) // max(1, 3 * batch * heads * num_keys * q.dtype.itemsize))
    chunks = zip(q.split(step, 2), rows.split(step), strict=True)
    return torch.cat([_rows(of_chunk, keys, own, size, count, local) for of_chunk, own in chunks], 2)


def _rows(q: Tensor, keys: Tensor, rows: Tensor, size: int, count: int, local: int) -> Tensor:
    """Selected blocks for tokens `rows` `[n]`: q `[B,H_i,n,D_i]`, keys `[B,H_i or 1,N,D_i]`."""
    scores = block_scores(q @ keys.mT, rows, size)
    blocks = torch.arange(scores.shape[-1], device=q.device)
    own = rows[:, None] // size
    scores = scores.masked_fill((blocks <= own) & (blocks > own - local), math.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)  # stable: among equal scores the lower block comes first
    chosen = best.values[..., :count] > -math.inf
    ordered = torch.where(chosen, best.indices[..., :count], scores.shape[-1]).sort(-1).values
    ordered = torch.where(ordered < scores.shape[-1], ordered, -1).int()
    return pad(ordered, [0, count - ordered.shape[-1]], value=-1)


def block_scores(scores: Tensor, rows: Tensor, size: int) -> Tensor:
    """Maximum of scores `[...,n,N]` over each block's visible keys: `[...,n,blocks]`, -inf without any."""
    num_keys = scores.shape[-1]
    visible = torch.arange(num_keys, device=scores.device) <= rows[:, None]
    scores = scores.masked_fill(~visible | scores.isnan(), -math.inf)
    scores = pad(scores, [0, -num_keys % size], value=-math.inf)
    best: Tensor = scores.unflatten(-1, (-1, size)).amax(-1)
    return best
