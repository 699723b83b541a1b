"""Argument checks for block-sparse attention, and the choice of a backend."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dispatch
from dispatch.registry import short_name
from nsa.block_sparse import meta
from nsa.common.checks import check_dense, check_integer
from nsa.common.derivatives import needs_grad
from nsa.common.resolve import resolve as resolve_call
from nsa.config import NSAConfig
from nsa.inputs import NSAInputs

MAX_BLOCK = 2**31 - 1
"""Largest block size, as in NSAConfig; a block is cut at the end of the sequence."""

INDEX_DTYPES = (torch.int32, torch.int64)


class ResolvedCall(NamedTuple):
    """Checked arguments, with an integer q_start already applied, and the implementation that runs them."""

    impl: dispatch.Impl
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
    """q, k, v, block_indices, cu_seqlens, cu_seqlens_k, q_start."""
    options: dict[str, Any]
    """Keyword arguments of a backend: block_size, causal, softmax_scale."""


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
) -> ResolvedCall:
    """Check all arguments and find a backend that supports the call.

    Args:
        backward: True if gradients are needed. Default: None, which means if a tensor requires them.

    Raises:
        TypeError, ValueError: naming the argument and its value.
        dispatch.BackendError: if no backend supports the call.
    """
    check_integer("block_size", block_size, 1, MAX_BLOCK)
    # q, k, v, documents and starts follow the rules of token mode
    config = NSAConfig.paper(causal=causal, softmax_scale=softmax_scale, debug=debug)
    inputs.check(config)
    check_indices(inputs, block_indices)
    if debug and inputs.q.device.type != "meta":
        _check_values(inputs, block_indices, block_size)
    inputs = inputs.narrow(config)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"block_size": block_size, "causal": causal, "softmax_scale": config.scale(q.shape[-1])}
    facts = {"inputs": inputs, "slots": block_indices.shape[-1], **options}
    backward = needs_grad(q, k, v) if backward is None else backward
    call = dispatch.Call("block_sparse_attention", q.device, q.dtype, backward=backward, options=facts)
    impl = resolve_call(call, backend, meta=meta.FORWARD)
    start = inputs.q_start if isinstance(inputs.q_start, Tensor) else None
    return ResolvedCall(impl, (q, k, v, block_indices, inputs.cu_seqlens, inputs.cu_seqlens_k, start), options)


def check_indices(inputs: NSAInputs, block_indices: Tensor) -> None:
    """Raise TypeError or ValueError unless block_indices has the type, device and shape for these checked inputs."""
    if not isinstance(block_indices, Tensor):
        raise TypeError(f"block_indices must be a torch.Tensor, got {type(block_indices).__name__}")
    check_dense("block_indices", block_indices)
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


def _check_values(inputs: NSAInputs, block_indices: Tensor, block_size: int) -> None:
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
