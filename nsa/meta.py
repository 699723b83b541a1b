"""Calls on the meta device: results and gradients of the right shapes and dtypes, without values.

These are the same for every backend, so that the name of one changes nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.config import NSAConfig
from nsa.inputs import NSAAux, NSAInputs
from nsa.reference import pooled

IMPLS = {
    op: dispatch.Impl(op, "meta", target=f"nsa.meta:{op}", check="")  # no row of the table, so nothing checks it
    for op in ("nsa", "neighborhood_attention", "neighborhood_attention_backward", "attention_residual")
}


def resolve(call: dispatch.Call, backend: str | None) -> dispatch.Impl:
    """dispatch.resolve, and for meta tensors this module."""
    if call.device_type != "meta":
        return dispatch.resolve(call, backend)
    dispatch.explain(call, backend)  # refuses a name that is not known
    return IMPLS[call.op]


def nsa(inputs: NSAInputs, config: NSAConfig, *, aux: bool) -> tuple[Tensor, NSAAux | None]:
    """As a backend's function."""
    if config.compress != "mean":
        inputs, config = pooled(inputs, config)
    q, v = inputs.q, inputs.v
    out = like((*q.shape[:-1], v.shape[-1]), q.dtype, *inputs.tensors().values())
    return out, _aux(inputs, config) if aux else None


def _aux(inputs: NSAInputs, config: NSAConfig) -> NSAAux:
    q, v, docs = inputs.q, inputs.v, 0 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    *batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    tiles = (tokens + (docs if inputs.packed else 1) * (config.q_tile_size - 1)) // config.q_tile_size
    entries = tokens // config.stride if inputs.packed else config.num_compressed(tokens)
    sums = torch.promote_types(q.dtype, torch.float32)
    gates = sums if inputs.gates is None else inputs.gates.dtype
    select_heads, count = kv_heads if config.shares_heads else heads, config.num_cmp_selected_blocks

    def empty(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return q.new_empty((*batch, *shape), dtype=dtype)

    return NSAAux(
        o_cmp=empty(tokens, heads, v_dim),
        o_slc=empty(tokens, heads, v_dim),
        o_win=empty(tokens, heads, v_dim),
        lse_cmp=empty(heads, tokens, dtype=sums),
        lse_slc=empty(heads, tokens, dtype=sums),
        lse_win=empty(heads, tokens, dtype=sums),
        k_cmp=empty(entries, kv_heads, dim),
        v_cmp=empty(entries, kv_heads, v_dim),
        gates=empty(tokens, heads, 3, dtype=gates),
        indices=empty(select_heads, tiles, config.num_selected_blocks, dtype=torch.int32),
        cmp_indices=None if count is None else empty(heads, tiles, count, dtype=torch.int32),
    )


def neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int, **_: Any
) -> tuple[Tensor, Tensor, None]:
    """As a backend's function that is differentiable itself."""
    batch, tokens, heads, _dim = q.shape
    sums = torch.promote_types(q.dtype, torch.float32)
    band = q.new_empty((batch, heads, tokens, kernel_size), dtype=sums)
    return like(q.shape, q.dtype, q, k, v), band, None


def neighborhood_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As a backend's function."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def attention_residual(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, *, eps: float
) -> tuple[Tensor]:
    """As a backend's function that is differentiable itself."""
    given = [blocks] if isinstance(blocks, Tensor) else list(blocks)
    weights = [w_query] if w_norm is None else [w_query, w_norm]
    return (like(given[0].shape[-3:], given[0].dtype, *given, *weights),)


def like(shape: Sequence[int], dtype: torch.dtype, *sources: Tensor) -> Tensor:
    """A meta tensor that is differentiable, any number of times, with respect to the sources."""
    result: Tensor = _Like.apply(shape, dtype, *sources)
    return result


class _Like(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return torch.empty(shape, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        sources, (_shape, _dtype, *needed) = ctx.saved_tensors, ctx.needs_input_grad
        of_each = zip(sources, needed, strict=True)
        return (None, None, *(like(x.shape, x.dtype, do, *sources) if needs else None for x, needs in of_each))
