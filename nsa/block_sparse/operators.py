"""Block-sparse attention: its checks, its calls, and their operators (see nsa/common/operators.py).

q_start of an operator is a tensor; the caller slices the keys for an integer one.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import dispatch
from dispatch.registry import short_name
from nsa.common.checks import check_integer, check_tensor
from nsa.common.derivatives import needs_grad
from nsa.common.operators import ResolvedCall, register_backward, register_forward
from nsa.common.resolve import find_impl
from nsa.config import LARGEST_OPTION, NSAConfig
from nsa.inputs import NSAInputs

INDEX_DTYPES = (torch.int32, torch.int64)
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? q_start, "
    "SymInt block_size, bool causal, float? softmax_scale, bool debug, str? backend, bool backward"
)
FORWARD = "nsa_kernels::block_sparse_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::block_sparse_attention_backward",
    f"(Tensor do, Tensor out, Tensor saved, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)


# Checks


def check_indices(inputs: NSAInputs, block_indices: Tensor) -> None:
    """Raise TypeError or ValueError unless block_indices has the type, device and shape for these checked inputs."""
    check_tensor("block_indices", block_indices)
    if block_indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"block_indices must be int32 or int64, got {short_name(block_indices.dtype)}")
    if block_indices.device != inputs.q.device:
        raise ValueError(f"block_indices must be on q's device {inputs.q.device}, got {block_indices.device}")
    lead = [] if inputs.packed else [inputs.q.shape[0]]
    wanted = [*lead, inputs.k.shape[-2], inputs.q.shape[-3]]
    if list(block_indices.shape[:-1]) != wanted:
        sizes = ", ".join(map(str, wanted))
        layout = "[H_kv,T,k]" if inputs.packed else "[B,H_kv,N_q,k]"
        raise ValueError(f"block_indices must be {layout} = [{sizes}, k], got shape {list(block_indices.shape)}")


def check_values(inputs: NSAInputs, block_indices: Tensor, block_size: int) -> None:
    """Raise unless all blocks exist and those of a token are distinct. Reads values, which synchronizes with the
    device.
    """
    for name, rows, keys in _documents(inputs):
        own = block_indices[..., rows, :]
        blocks = math.ceil(keys / block_size)
        wrong = (own < -1) | (own >= blocks)
        if bool(wrong.any()):
            got = int(own[wrong][0])
            raise ValueError(
                f"block_indices must be from 0 to {blocks - 1}, blocks of {block_size} of the {keys} keys{name}, or -1 "
                f"(debug=True), got {got}"
            )
        ordered = own.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(twice.any()):
            got = int(ordered[..., 1:][twice][0])
            raise ValueError(f"block_indices of a token must differ (debug=True), got block {got} twice{name}")


def _documents(inputs: NSAInputs) -> list[tuple[str, slice, int]]:
    """Name in messages, rows and number of keys of each document."""
    if inputs.cu_seqlens is None or inputs.key_bounds is None:
        return [("", slice(None), inputs.k.shape[-3])]
    bounds = zip(pairwise(inputs.cu_seqlens.tolist()), pairwise(inputs.key_bounds.tolist()), strict=True)
    return [(f" of document {b}", slice(*rows), stop - start) for b, (rows, (start, stop)) in enumerate(bounds)]


# Calls


class BlockSparseCall(ResolvedCall):
    """q, k, v, block_indices, cu_seqlens, cu_seqlens_k and q_start; block_size, causal and softmax_scale."""

    op = "block_sparse_attention"


def resolve(
    inputs: NSAInputs,
    block_indices: Tensor,
    block_size: int,
    causal: bool,
    softmax_scale: float | None,
    debug: bool,
    backend: str | None,
    backward: bool | None = None,
) -> BlockSparseCall:
    """Check all arguments and find a backend; `backward` is None if q, k and v say whether they need gradients."""
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
