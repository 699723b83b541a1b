"""Block-sparse attention on NVIDIA GPUs: the selected branch of token mode as an op, for blocks that are given.

    forward     KV-outer (attend/kv_outer.py), or query-outer where a key/value head has many query heads
    backward    delta (attend/row_dots.py), then attend/kv_outer_backward.py

These kernels take blocks in any order and -1 anywhere. int64 indices are cast; nothing is sorted. Packed documents are
read where they lie. Everything is asynchronous; no device value is read; bitwise the same each time.

Floor, 64K tokens, 64 heads over 4, D = 128, 16 blocks of 128 a token: forward 4.4 TFLOP, 7.3 ms at 600 TFLOP/s, and at
the same time 34 GB of partials, 8.2 ms at 4.2 TB/s. Backward 11 TFLOP, 12 ms at 900 TFLOP/s, and at the same time 69 GB
of dQ partials, two for each block, 16 ms. With blocks of 64: half the products, the same partials forward, half of them
backward. Beside inputs and results: partials of two chunks, 1 GB, and in backward fp32 dK and dV of two streams.

Limits: those of attend/; causal; starts that the host knows (support.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.attend.kv_outer import kv_outer_forward
from cute_kernels.attend.kv_outer_backward import kv_outer_backward
from cute_kernels.attend.query_outer import query_outer_forward, takes_query_outer
from cute_kernels.attend.row_dots import row_dots
from cute_kernels.pool.documents import blocks_in_place
from cute_kernels.runtime.device import vectorizable


def forward(
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
) -> tuple[Tensor, Tensor]:
    """out `[B,N_q,H,D_v]`, packed `[T,H,D_v]`, and lse fp32 `[B,H,N_q]`, packed `[1,H,T]`, for checked arguments.

    Args:
        q, k, v, block_indices, cu_seqlens, block_size: as of nsa.block_sparse_attention; queries are the last tokens.
        cu_seqlens_k, q_start, causal: None, None and True, all that support.py lets through.
        softmax_scale: a number greater than 0.
    """
    del cu_seqlens_k, q_start, causal
    tensors = _unpack(q, k, v, block_indices, cu_seqlens)
    options = _options(q, k, cu_seqlens, block_size, softmax_scale)
    query_outer = takes_query_outer(q.shape[-2] // k.shape[-2], block_indices.shape[-1])
    out, lse = (query_outer_forward if query_outer else kv_outer_forward)(*tensors, **options)
    return out if cu_seqlens is None else out[0], lse


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
    *,
    block_size: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous. Args: gradient of out; as of `forward`; its results."""
    del cu_seqlens_k, q_start, causal
    tensors = _unpack(q, k, v, block_indices, cu_seqlens)
    do, out = (vectorizable(x if cu_seqlens is None else x[None]) for x in (do, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])
    options = _options(q, k, cu_seqlens, block_size, softmax_scale)
    kv_outer_backward(*tensors, do, lse, row_dots(do, out), into=(dq, dk, dv), **options)
    return (dq, dk, dv) if cu_seqlens is None else (dq[0], dk[0], dv[0])


def kept_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An empty tensor like the lse of `forward`, without running anything (sizes may be symbols)."""
    *batch, tokens, heads, _ = q.shape
    like: Tensor = q.new_empty((*(batch or [1]), heads, tokens), dtype=torch.float32)
    return like


def _unpack(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and indices as the kernels read them: packed ones as one sequence, rows aligned, int32."""
    indices = block_indices.to(torch.int32)
    if cu_seqlens is not None:
        q, k, v, indices = (x[None] for x in (q, k, v, indices))
    return vectorizable(q), vectorizable(k), vectorizable(v), indices


def _options(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, size: int, scale: float) -> dict[str, Any]:
    """What the kernels of attend/ are told besides."""
    if cu_seqlens is None:
        return {"size": size, "scale": scale, "first_token": k.shape[1] - q.shape[1]}
    return {"size": size, "scale": scale, "packed": blocks_in_place(cu_seqlens, q.shape[-3], size)}
