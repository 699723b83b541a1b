"""Block-sparse attention: the public function, which checks its arguments, finds a backend and runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.block_sparse.operators import resolve
from nsa.common.autocast import cast_inputs
from nsa.common.checks import check_bool
from nsa.common.derivatives import needs_grad, refuse_forward_mode, refuse_transforms
from nsa.common.keywords import PACK, explain_keywords
from nsa.common.operators import run, runs_as_operator
from nsa.config import NSAConfig
from nsa.inputs import NSAInputs


@explain_keywords(PACK)
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    causal: bool = True,
    q_start: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    debug: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Attention of each token to the blocks of keys in `block_indices`, differentiable in q, k and v.

    The selected branch of NSA (arXiv 2502.11089) and the sparse attention of MiniMax-M3 as an op of its own: block b
    holds keys b * block_size to (b + 1) * block_size - 1 of its sequence, and query head h attends to the blocks of
    key/value head h // G. docs/block_sparse_attention.md has the exact definition.

    Args:
        q: `[B,N_q,H,D]`, packed `[T,H,D]`; fp16, bf16, fp32 or fp64.
        k: `[B,N_k,H_kv,D]` in q's dtype, packed `[T_k,H_kv,D]`; H a multiple of H_kv.
        v: `[B,N_k,H_kv,D_v]` in q's dtype, packed `[T_k,H_kv,D_v]`.
        block_indices: int32 or int64 `[B,H_kv,N_q,k]`, packed `[H_kv,T,k]`: k distinct blocks per token and key/value
            head, in any order, counted from the first key of the sequence or document. -1 means no block and may be
            anywhere in a row. Blocks that begin after the last key, or after the token with `causal`, contribute no
            keys. The result is undefined if a block occurs twice. Not differentiated.
        block_size: tokens per block; kernels support 64, 128, 192 and 256.
        causal: attend only to keys up to the token itself. Default: True.
        q_start: token index of the first query, if there are more keys than queries: an integer, or int32 `[B]` on q's
            device, one per sequence or document. Keys after the last query are ignored. Default: None, which means N_k
            - N_q.
        cu_seqlens: int32 `[B+1]`, bounds of packed documents. Rows after the last one are 0. Default: None.
        cu_seqlens_k: int32 `[B+1]`, bounds of their keys. Default: None, which means `cu_seqlens`.
        softmax_scale: factor of the logits, greater than 0. Default: None, which means 1/sqrt(D).
        debug: also check values, which synchronizes with the device: inputs are finite, `cu_seqlens` and `q_start`
            consistent, blocks in range and distinct. Default: False.
        backend: "cute", "triton" or "reference". Default: None, which means NSA_KERNELS_BACKEND if set, else the first
            that supports the call.

    Returns:
        `[B,N_q,H,D_v]` in q's dtype, packed `[T,H,D_v]`. Rows without keys are 0.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors.

    Examples:
        >>> import torch
        >>> from nsa import block_sparse_attention
        >>> q, k, v = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32), torch.randn(1, 256, 2, 32)
        >>> blocks = torch.tensor([0, -1]).expand(1, 2, 256, 2)
        >>> block_sparse_attention(q, k, v, blocks, block_size=64).shape
        torch.Size([1, 256, 4, 32])
    """
    refuse_transforms("block_sparse_attention")
    refuse_forward_mode("block_sparse_attention", q, k, v)
    check_bool("causal", causal)
    check_bool("debug", debug)
    q, k, v = cast_inputs({"q": q, "k": k, "v": v}).values()
    inputs = NSAInputs(q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, q_start=q_start)
    if runs_as_operator(q):
        if q_start is not None and not isinstance(q_start, Tensor):
            config = NSAConfig.paper(causal=causal)
            inputs.check(config)
            inputs = inputs.narrow(config)
        tensors = inputs.q, inputs.k, inputs.v, block_indices, inputs.cu_seqlens, inputs.cu_seqlens_k, inputs.q_start
        options = block_size, causal, softmax_scale, debug, backend, needs_grad(*tensors[:3])
        out: Tensor = torch.ops.nsa_kernels.block_sparse_attention(*tensors, *options)[0]
        return out
    return run(resolve(inputs, block_indices, block_size, causal, softmax_scale, debug, backend))
