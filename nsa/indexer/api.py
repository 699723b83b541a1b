"""Selection by an indexer, and its loss: public functions, which check arguments, find a backend and run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import CASTABLE, autocast_dtype, cast_inputs
from nsa.common.derivatives import needs_grad, refuse_transforms
from nsa.common.operators import run, runs_as_operator
from nsa.indexer.operators import check_index_tensors, narrow, narrow_loss, resolve, resolve_loss


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
    backend: str | None = None,
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
        cu_seqlens: int32 `[B+1]`, bounds of packed documents, which `reference` reads on the host. Default: None.
        index_scale: factor of the indexer's scores. Default: None, which means 1/sqrt(D_i).
        softmax_scale: factor of the attention's logits. Default: None, which means 1/sqrt(D).
        backend: "triton" or "reference". Default: None, which means NSA_KERNELS_BACKEND if set, else the first that
            supports the call.

    Returns:
        A scalar in fp32 (fp64).

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
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
    q_idx, k_idx, q, k = (*of_one_dtype(q_idx, k_idx), *of_one_dtype(q, k))
    q, k = (x.detach() if isinstance(x, Tensor) else x for x in (q, k))
    options = block_size, index_scale, softmax_scale, backend
    if runs_as_operator(q_idx):
        if q_start is not None and not isinstance(q_start, Tensor):
            attention, k_idx = narrow_loss(q_idx, k_idx, q, k, cu_seqlens, q_start)
            q, k, q_start = attention.q, attention.k, None
        tensors = q_idx, k_idx, q, k, block_indices, cu_seqlens, q_start
        loss: Tensor = torch.ops.nsa_kernels.indexer_kl_loss(*tensors, *options, needs_grad(q_idx, k_idx))[0]
        return loss
    return run(resolve_loss(q_idx, k_idx, q, k, block_indices, cu_seqlens, q_start, *options))


def of_one_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Under torch.autocast, cast tensors of several dtypes to fp32, as autocast does for a loss; else as they are.

    Those of one dtype need no cast, since all arithmetic on them is in fp32.
    """
    castable = all(isinstance(x, Tensor) and x.dtype in CASTABLE for x in tensors)
    if not castable or all(autocast_dtype(x.device.type) is None for x in tensors):
        return tensors
    return tensors if len({x.dtype for x in tensors}) == 1 else tuple(x.float() for x in tensors)
