"""Block-sparse attention: its calls, and their operators (see nsa/common/operators.py).

nsa_kernels::block_sparse_attention             out and the tensor saved for backward; differentiable
nsa_kernels::block_sparse_attention_backward    dq, dk, dv

q_start is a tensor; the caller slices the keys for an integer one. `backward` is True if gradients are needed, because
tensors inside an operator do not require any.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import dispatch
from nsa.block_sparse.validate import check_indices, check_values
from nsa.common.checks import check_integer
from nsa.common.derivatives import needs_grad
from nsa.common.operators import AttentionCall, register_backward, register_forward
from nsa.common.resolve import find_impl
from nsa.config import LARGEST_OPTION, NSAConfig
from nsa.inputs import NSAInputs

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? q_start, "
    "SymInt block_size, bool causal, float? softmax_scale, bool debug, str? backend, bool backward"
)
FORWARD = "nsa_kernels::block_sparse_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::block_sparse_attention_backward",
    f"(Tensor do, Tensor out, Tensor saved, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)


class BlockSparseCall(AttentionCall):
    """q, k, v, block_indices, cu_seqlens, cu_seqlens_k and q_start; block_size, causal and softmax_scale."""

    op = "block_sparse_attention"

    def saved_like(self, training: Any) -> Tensor:
        like: Tensor = training.kept_like(*self.qkv)
        return like


def resolve(
    inputs: NSAInputs,
    block_indices: Tensor,
    *,
    block_size: int,
    causal: bool,
    softmax_scale: float | None,
    debug: bool,
    backend: str | None,
    backward: bool | None = None,
) -> BlockSparseCall:
    """Check all arguments and find a backend that supports the call.

    Args:
        backward: True if gradients are needed. Default: None, which means if a tensor requires them.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: if no backend supports the call.
    """
    check_integer("block_size", block_size, 1, LARGEST_OPTION)  # a block is cut at the end of the sequence
    # q, k, v, documents and starts follow the rules of token mode
    config = NSAConfig.paper(causal=causal, softmax_scale=softmax_scale, debug=debug)
    inputs.check(config)
    check_indices(inputs, block_indices)
    if debug and inputs.q.device.type != "meta":
        check_values(inputs, block_indices, block_size)
    inputs = inputs.narrow(config)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"block_size": block_size, "causal": causal, "softmax_scale": config.scale(q.shape[-1])}
    facts = {"inputs": inputs, "slots": block_indices.shape[-1], **options}
    backward = needs_grad(q, k, v) if backward is None else backward
    call = dispatch.Call("block_sparse_attention", q.device, q.dtype, backward=backward, options=facts)
    start = inputs.q_start if isinstance(inputs.q_start, Tensor) else None
    tensors = q, k, v, block_indices, inputs.cu_seqlens, inputs.cu_seqlens_k, start
    return BlockSparseCall(find_impl(call, backend), backward, tensors, options)


def _resolve(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, **others: Any) -> BlockSparseCall:
    where = {name: others.pop(name) for name in ("cu_seqlens", "cu_seqlens_k", "q_start")}
    return resolve(NSAInputs(q, k, v, **where), block_indices, **others)


register_forward(*FORWARD, _resolve)
register_backward("block_sparse_attention", FORWARD, BACKWARD, _resolve, ("q", "k", "v"))
