"""Selection by an indexer: its calls, and their operator (see nsa/common/operators.py).

nsa_kernels::top_blocks_by_max selected blocks; q_start is a tensor, the caller slices the keys for an integer one
"""

from __future__ import annotations

import torch
from torch import Tensor

import dispatch
from nsa.common.checks import check_integer
from nsa.common.operators import ResolvedCall, register_forward
from nsa.common.resolve import find_impl
from nsa.config import LARGEST_OPTION
from nsa.indexer.validate import check_index_tensors, narrow

FORWARD = (
    "nsa_kernels::top_blocks_by_max",
    "(Tensor q_idx, Tensor k_idx, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? q_start, SymInt block_size, "
    "SymInt k, SymInt local, str? backend) -> Tensor",
)


class IndexerCall(ResolvedCall):
    """q_idx, k_idx, cu_seqlens, cu_seqlens_k and q_start; block_size, k and local."""

    op = "top_blocks_by_max"

    def forward(self) -> Tensor:
        indices: Tensor = self.impl.load()(*self.tensors, **self.options)
        return indices

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        *batch, tokens, heads, _dim = self.tensors[0].shape
        return self.tensors[0].new_empty((*batch, heads, tokens, self.options["k"]), dtype=torch.int32), []


def resolve(
    q_idx: Tensor,
    k_idx: Tensor,
    *,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: int | Tensor | None,
    block_size: int,
    k: int,
    local: int,
    backend: str | None,
) -> IndexerCall:
    """Check all arguments and find a backend that supports the call.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: if no backend supports the call.
    """
    check_integer("block_size", block_size, 1, LARGEST_OPTION)
    check_integer("k", k, 1, LARGEST_OPTION)
    check_integer("local", local, 0, k)
    check_index_tensors(q_idx, k_idx, packed=cu_seqlens is not None, own_bounds=cu_seqlens_k is not None)
    inputs = narrow(q_idx, k_idx, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, q_start=q_start)
    options = {"block_size": block_size, "k": k, "local": local}
    call = dispatch.Call("top_blocks_by_max", q_idx.device, q_idx.dtype, options={"inputs": inputs, **options})
    start = inputs.q_start if isinstance(inputs.q_start, Tensor) else None
    tensors = inputs.q, inputs.k, inputs.cu_seqlens, inputs.cu_seqlens_k, start
    return IndexerCall(find_impl(call, backend), False, tensors, options)


register_forward(*FORWARD, resolve)
