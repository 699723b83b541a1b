"""Block-sparse attention on NVIDIA GPUs: the selected branch of token mode as an op, for given blocks.

    forward     KV-outer (attend/kv_outer.py), or query-outer if a key/value head has many query heads
    backward    delta (attend/row_dots.py), then attend/kv_outer_backward.py

These kernels accept blocks in any order and -1 anywhere. int64 indices are cast; nothing is sorted. Packed documents
are read in place. Sequences whose starts are known only on the device, and all sequences without causality, are read as
documents in which each row sees keys up to one of its own (pool/documents.py). Everything is asynchronous, no device
value is read, and results are bitwise reproducible.

Floor, 64K tokens, 64 heads over 4, D = 128, 16 blocks of 128 per token: forward 4.4 TFLOP, 7.3 ms at 600 TFLOP/s, and
concurrently 34 GB of partials, 8.2 ms at 4.2 TB/s. Backward 11 TFLOP, 12 ms at 900 TFLOP/s, and concurrently 69 GB of
dQ partials, two for each block, 16 ms. With blocks of 64: half the products, the same partials in forward, half of them
in backward. Memory besides inputs and results: partials of two chunks, 1 GB, and in backward fp32 dK and dV of two
streams.

Limits: those of attend/ (support.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels.attend.kv_outer import kv_outer_forward
from cute_kernels.attend.kv_outer_backward import kv_outer_backward
from cute_kernels.attend.query_outer import query_outer_forward
from cute_kernels.attend.row_dots import row_dots
from cute_kernels.plan import per_token
from cute_kernels.pool.documents import Packed, blocks_in_place
from cute_kernels.runtime.device import vectorizable


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out `[B,N_q,H,D_v]`, packed `[T,H,D_v]`, and the fp32 lse in the kernels' layout, flat, for checked arguments.

    Args:
        q, k, v, block_indices, cu_seqlens, cu_seqlens_k: see nsa.block_sparse_attention.
        q_start: int32 `[B]`; None if queries are the last tokens.
        options: block_size, causal and softmax_scale, a number greater than 0.
    """
    tensors, how = _prepare(q, k, v, block_indices, cu_seqlens, cu_seqlens_k, q_start, **options)
    kernels = per_token(q.shape[-2] // k.shape[-2], block_indices.shape[-1])
    attend = query_outer_forward if kernels == "query_outer" else kv_outer_forward
    out, lse = attend(*tensors, **how)
    return out.view(*q.shape[:-1], v.shape[-1]), lse.flatten()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous. Args: do: gradient of out. The rest: arguments and results of `forward`."""
    tensors, how = _prepare(q, k, v, block_indices, cu_seqlens, cu_seqlens_k, q_start, **options)
    batch, tokens, heads, _ = tensors[0].shape
    do, out = (vectorizable(x.reshape(batch, tokens, heads, x.shape[-1])) for x in (do, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])
    kv_outer_backward(*tensors, do, lse.view(batch, heads, tokens), row_dots(do, out), into=(dq, dk, dv), **how)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def kept_like(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """An empty tensor like the lse of `forward`, without running anything (sizes may be symbols)."""
    like: Tensor = q.new_empty(math.prod(q.shape[:-1]), dtype=torch.float32)
    return like


def _prepare(
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
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k, v and indices as the kernels read them, with documents as one sequence; and their options."""
    indices = block_indices
    if indices.dtype != torch.int32:  # blocks past all keys must remain so
        indices = indices.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    how: dict[str, Any] = {"size": block_size, "scale": softmax_scale}
    packed = None
    if cu_seqlens is not None:
        packed = Packed(cu_seqlens, cu_seqlens_k, q_start)
    elif len(q) > 0 and not (causal and q_start is None):
        packed = Packed.of_sequences(q, k.shape[1], q_start)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        indices = indices.transpose(0, 1).flatten(1, 2)
    if packed is None:
        how["first_token"] = k.shape[1] - q.shape[1]
    else:
        how["packed"] = blocks_in_place(packed, len(q), len(k), block_size, causal=causal)
        q, k, v, indices = (x[None] for x in (q, k, v, indices))
    return (vectorizable(q), vectorizable(k), vectorizable(v), indices), how
