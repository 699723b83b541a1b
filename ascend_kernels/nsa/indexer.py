"""Blocks of each token by the best of their keys, for an indexer (docs/block_sparse_attention.md)."""

from __future__ import annotations

from torch import Tensor

from ascend_kernels.nsa.block_sparse import token_pack
from ascend_kernels.nsa.layout import rows_of
from ascend_kernels.nsa.scores import block_scores
from ascend_kernels.nsa.topk import top_blocks


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
    """Selected blocks, int32 `[B,H_i,N_q,k]`, packed `[H_i,T,k]`, for checked arguments.

    Args:
        q_idx, k_idx, cu_seqlens, cu_seqlens_k, block_size, k, local: see nsa.top_blocks_by_max.
        q_start: int32 `[B]`; None if queries are the last tokens.
    """
    pack = token_pack(q_idx, k_idx, cu_seqlens, cu_seqlens_k, q_start, block_size)
    scores = block_scores(rows_of(q_idx), rows_of(k_idx), pack, block_size)
    found = top_blocks(scores, pack, size=block_size, count=k, num_init=0, num_local=local, causal=True, mean=False)
    if cu_seqlens is not None:
        return found
    batch, tokens = q_idx.shape[:2]
    by_sequence: Tensor = found.unflatten(1, (batch, tokens)).transpose(0, 1).contiguous()
    return by_sequence
