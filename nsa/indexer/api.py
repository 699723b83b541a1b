"""Selection by an indexer: the public function, which checks its arguments, finds a backend and runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.common.autocast import cast_inputs
from nsa.common.derivatives import refuse_transforms
from nsa.common.operators import run, runs_as_operator
from nsa.indexer.operators import check_index_tensors, narrow, resolve


def top_blocks_by_max(
    q_idx: Tensor,
    k_idx: Tensor,
    *,
    block_size: int,
    k: int,
    local: int = 1,
    q_start: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Select the k blocks whose best key scores highest, per token and indexer head, for `block_sparse_attention`.

    This is the selection of MiniMax-M3. The score of a block is the maximum of q_idx . k_idx over its keys up to the
    token itself, in fp32 (fp64 for fp64 inputs). NaN scores are ignored. docs/block_sparse_attention.md has the exact
    definition. Not differentiated: `indexer_kl_loss` trains an indexer.

    Args:
        q_idx: `[B,N_q,H_i,D_i]`, packed `[T,H_i,D_i]`; fp16, bf16, fp32 or fp64. MiniMax-M3 has as many indexer heads
            as key/value heads. Cast by torch.autocast like q and k.
        k_idx: `[B,N_k,1,D_i]`, one head for all, or `[B,N_k,H_i,D_i]`, in q_idx's dtype; packed `[T_k,heads,D_i]`.
        block_size: tokens per block; kernels support 64 and 128.
        k: number of blocks to select, at least 1; kernels support up to 64.
        local: number of blocks, ending with the token's own, that are always selected. They count towards k. Default:
            1.
        q_start: as in `block_sparse_attention`. Default: None, which means N_k - N_q.
        cu_seqlens: int32 `[B+1]`, bounds of packed documents. Default: None.
        cu_seqlens_k: int32 `[B+1]`, bounds of their keys. Default: None, which means `cu_seqlens`.
        backend: "cute", "triton" or "reference". Default: None, which means NSA_KERNELS_BACKEND if set, else the first
            that supports the call.

    Returns:
        int32 `[B,H_i,N_q,k]`, packed `[H_i,T,k]`: blocks counted from the first key of the sequence or document,
        ascending, padded with -1 if fewer than k have a score above -inf. Ties go to the lower block. Rows after the
        last document hold -1.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from nsa import top_blocks_by_max
        >>> q_idx, k_idx = torch.randn(1, 256, 2, 32), torch.randn(1, 256, 1, 32)
        >>> blocks = top_blocks_by_max(q_idx, k_idx, block_size=64, k=2)
        >>> blocks.shape, blocks[0, 0, 0].tolist()
        (torch.Size([1, 2, 256, 2]), [0, -1])
    """
    refuse_transforms("top_blocks_by_max")
    q_idx, k_idx = cast_inputs({"q": q_idx, "k": k_idx}).values()
    where = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "q_start": q_start}
    if runs_as_operator(q_idx):
        if q_start is not None and not isinstance(q_start, Tensor):
            check_index_tensors(q_idx, k_idx, packed=cu_seqlens is not None)
            k_idx = narrow(q_idx, k_idx, **where).k
            q_start = None
        tensors = q_idx.detach(), k_idx.detach(), cu_seqlens, cu_seqlens_k, q_start
        indices: Tensor = torch.ops.nsa_kernels.top_blocks_by_max(*tensors, block_size, k, local, backend)
        return indices
    with torch.no_grad():
        return run(resolve(q_idx, k_idx, block_size=block_size, k=k, local=local, backend=backend, **where))
