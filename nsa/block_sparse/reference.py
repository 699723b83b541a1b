"""Block-sparse attention in eager PyTorch: defines what every option means; kernels are tested against it.

Any dtype from bf16 to fp64, any device, any block size; differentiable by autograd (only once for D = D_v on a CPU).
Sums run in fp32 (fp64 for fp64 inputs). The keys of selected blocks are gathered for a chunk of tokens at a time, and
each chunk is recomputed in backward, so temporaries need the memory of one chunk. Packed documents, and sequences whose
starts are a tensor, run in a loop, which reads these tensors on the host.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from nsa.common.derivatives import needs_grad, without_second_derivatives
from nsa.reference import NOWHERE, Keys, attend, chunk_bytes, is_fused, mask_of
from nsa.reference import check as check  # the same conditions


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, None]:
    """out `[B,N_q,H,D_v]` (packed `[T,H,D_v]`) in q's dtype, for checked arguments."""
    dtype = q.dtype
    if is_fused(k, v):
        q, k, v = (without_second_derivatives("block_sparse_attention", x) for x in (q, k, v))
    sums = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(sums) for x in (q, k, v))
    block_indices = block_indices.long()
    attend_sequence = partial(_sequence, size=block_size, causal=causal, scale=softmax_scale)
    if cu_seqlens is None:
        if q_start is None:
            return attend_sequence(q, k, v, block_indices).to(dtype), None
        stops = [start + q.shape[1] for start in q_start.tolist()]
        parts = [
            attend_sequence(q[b : b + 1], k[b : b + 1, :stop], v[b : b + 1, :stop], block_indices[b : b + 1])
            for b, stop in enumerate(stops)
        ]
        return torch.cat([*parts, _no_rows(q[:0], k, v)]).to(dtype), None
    bounds = cu_seqlens.tolist()
    key_bounds = bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
    starts = [None] * (len(bounds) - 1) if q_start is None else q_start.tolist()
    parts = []
    for (first, stop), (first_key, stop_key), start in zip(pairwise(bounds), pairwise(key_bounds), starts, strict=True):
        keys = slice(first_key, stop_key if start is None else first_key + start + stop - first)
        one = q[None, first:stop], k[None, keys], v[None, keys], block_indices[None, :, first:stop]
        parts.append(attend_sequence(*one)[0])
    out = torch.cat([*parts, _no_rows(q[:0], k, v)])
    return pad(out, [0, 0, 0, 0, 0, q.shape[0] - out.shape[0]]).to(dtype), None


def _no_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out for no queries, which keeps an empty result in the autograd graph."""
    return (q[..., :1] + k[:0].sum() + v[:0].sum()).expand(*q.shape[:-1], v.shape[-1])


def _sequence(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, size: int, causal: bool, scale: float) -> Tensor:
    """Attention for sequences of equal length whose queries come last; indices int64 `[B,H_kv,N_q,k]`."""
    batch, num_queries, heads, dim = q.shape
    num_keys, kv_heads, v_dim = v.shape[1:]
    size = min(size, max(num_keys, 1))  # a short sequence's only block is no longer than itself
    blocks = -(-num_keys // size)
    indices = torch.where((indices >= 0) & (indices < blocks), indices, -1)
    keys = Keys.from_tokens(k, v)
    rows = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    q_rows = q.transpose(1, 2)[:, :, :, None]  # each token is a tile of one row, as `attend` expects
    # About three live copies of the logits, in addition to the gathered keys and values
    per_token = batch * indices.shape[-1] * size * (3 * heads + kv_heads * (dim + v_dim)) * q.dtype.itemsize
    step = max(1, chunk_bytes(q.device) // max(1, per_token))
    run = partial(checkpoint, _rows, use_reentrant=False, preserve_rng_state=False) if needs_grad(q, k, v) else _rows
    chunks = zip(q_rows.split(step, 2), rows.split(step), indices.split(step, 2), strict=True)
    outputs = [run(*chunk, keys, size, causal, scale) for chunk in chunks]
    return torch.cat(outputs, 2)[:, :, :, 0].transpose(1, 2).contiguous()  # contiguous, as in the operator's fake


def _rows(q: Tensor, rows: Tensor, indices: Tensor, keys: Keys, size: int, causal: bool, scale: float) -> Tensor:
    """Attention for tokens `rows` `[n]`: q `[B,H,n,1,D]`, indices `[B,H_kv,n,k]`, result `[B,H,n,1,D_v]`."""
    positions = indices[..., None] * size + torch.arange(size, device=rows.device)
    positions = torch.where((indices >= 0)[..., None] & (positions < keys.count), positions, NOWHERE).flatten(-2)
    mask = mask_of(positions, rows[:, None], q.dtype, causal=causal)
    return attend(q, keys.gather(positions), mask, scale)[0]
