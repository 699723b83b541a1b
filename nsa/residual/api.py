"""Attention residual: the public function, which checks its arguments, finds a backend and runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.common.autocast import promote_blocks
from nsa.common.derivatives import needs_grad, refuse_transforms
from nsa.common.operators import run, runs_as_operator
from nsa.residual.operators import block_tensors, resolve, with_two_leading_dims


def attention_residual(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> Tensor:
    """Attention of each token over its outputs of earlier blocks (arXiv 2603.15031), differentiable.

    The score of block i is `sum over D of w_query * w_norm * x_i / sqrt(mean(x_i^2) + eps)`; out is the sum of the
    blocks, weighted by the softmax of their scores over i. Under torch.autocast, a list of blocks of several dtypes is
    promoted to fp32, as in torch.stack.

    Args:
        blocks: `[L,B,N,D]`, or a list of L tensors `[B,N,D]` with equal strides, which are not copied. Any leading
            dimensions, or none, may replace B and N. fp16, bf16 or fp32; on the CPU also fp64.
        w_query: the learned query `[D]`, in the blocks' dtype or fp32.
        w_norm: weight of the RMSNorm of the keys, `[D]`, in the blocks' dtype or fp32. Default: None, which means ones.
        eps: added to the mean square, at least 0. With 0, a token whose features are all 0 gives NaN. Default: 1e-6.
        backend: "triton", "ascend" or "reference". Default: None, which means NSA_KERNELS_BACKEND if set, else the
            first backend that supports the call.

    Returns:
        `[B,N,D]`, or the blocks' other leading dimensions, in their dtype.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from nsa import attention_residual
        >>> outputs = [torch.randn(1, 10, 32) for _ in range(4)]
        >>> attention_residual(outputs, w_query=torch.zeros(32)).shape
        torch.Size([1, 10, 32])
    """
    refuse_transforms("attention_residual")
    blocks, w_query, w_norm = promote_blocks(blocks, w_query, w_norm)
    blocks, shape = with_two_leading_dims(blocks)
    if shape is not None:
        return attention_residual(blocks, w_query, w_norm, eps, backend=backend).reshape(shape)
    if runs_as_operator(w_query):
        tensors = block_tensors(blocks)
        options = isinstance(blocks, Tensor), eps, backend, needs_grad(*tensors, w_query, w_norm)
        out: Tensor = torch.ops.nsa_kernels.attention_residual(tensors, w_query, w_norm, *options)[0]
        return out
    return run(resolve(blocks, w_query, w_norm, eps, backend))
