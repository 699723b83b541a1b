"""NSA's backward in Triton: gates, the three attentions, pooling, sums.

Key/value heads are processed in chunks, so that what a chunk needs beyond inputs, results and gradients stays below
TEMPORARY_BYTES. Nothing is added by atomics: the same call on the same device gives the same bits. Everything is
asynchronous; no device value is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_kernels.nsa import gate, interval_backward, kv_outer, selected
from ascend_kernels.nsa.forward import (
    Branch,
    attend_compressed,
    attend_selected,
    attend_window,
    branch_kv,
    forward,
    prepare,
)
from ascend_kernels.nsa.interval import Interval
from ascend_kernels.nsa.layout import Pack, rows_of
from ascend_kernels.nsa.pool import add_unpooled, pooled
from ascend_kernels.nsa.tiling import attends_by_block

TEMPORARY_BYTES = 1 << 30
"""Memory of a chunk of several key/value heads."""


class Saved(NamedTuple):
    """Tensors for backward, besides inputs and options; for autograd, a list of those that are there."""

    indices: Tensor
    cmp: Branch | None
    """None, as the other branches, if they are computed again."""
    slc: Branch | None
    win: Branch | None
    entries: tuple[Tensor, Tensor] | None
    """k_cmp and v_cmp; None if the caller gave them."""

    def to_list(self) -> list[Tensor]:
        return [self.indices, *(x for pair in self[1:] if pair is not None for x in pair)]

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor], inputs: Any) -> Saved:
        indices, *rest = tensors
        entries = None
        if inputs.k_cmp is None:
            entries = rest[-2], rest[-1]
            rest = rest[:-2]
        cmp, slc, win = [Branch(*rest[i : i + 2]) for i in range(0, len(rest), 2)] or (None, None, None)
        return cls(indices, cmp, slc, win, entries)


def nsa_saving(inputs: Any, config: Any, *, recompute: bool) -> tuple[Tensor, list[Tensor]]:
    """The forward for checked inputs: out, and the tensors that `nsa_backward` needs.

    Args:
        recompute: save the selections, but not the branches' outputs, which backward computes again.
    """
    found = forward(inputs, config, prepare(inputs, config))
    cmp, slc, win = (None, None, None) if recompute else (found.cmp, found.slc, found.win)
    saved = Saved(found.indices, cmp, slc, win, (found.k_cmp, found.v_cmp) if inputs.k_cmp is None else None)
    return found.out.view(*inputs.q.shape[:-1], found.out.shape[-1]), saved.to_list()


def nsa_saved_like(inputs: Any, config: Any, *, recompute: bool) -> list[Tensor]:
    """Empty tensors like those that `nsa_saving` saves, without running anything (sizes may be symbols)."""
    q, k, v = inputs.q, inputs.k, inputs.v
    (heads, dim), (kv_heads, v_dim), rows = q.shape[-2:], v.shape[-2:], math.prod(q.shape[:-2])
    selects = kv_heads if config.shares_heads else heads
    if inputs.packed:
        docs, tile = inputs.cu_seqlens.shape[0] - 1, config.q_tile_size
        tiles, entries = (rows + docs * (tile - 1)) // tile, k.shape[0] // config.stride
    else:
        tiles = q.shape[0] * -(-q.shape[1] // config.q_tile_size)
        entries = k.shape[0] * config.num_compressed(k.shape[1])

    def like(*shape: Any, dtype: torch.dtype = q.dtype) -> Tensor:
        empty: Tensor = q.new_empty(shape, dtype=dtype)
        return empty

    branch = None if recompute else Branch(like(rows, heads, v_dim), like(heads, rows, dtype=torch.float32))
    indices = like(selects, tiles, config.num_selected_blocks, dtype=torch.int32)
    pooled = (like(entries, kv_heads, dim), like(entries, kv_heads, v_dim)) if inputs.k_cmp is None else None
    return Saved(indices, branch, branch, branch, pooled).to_list()


class _Gradients:
    """Gradients of all inputs, filled by chunks of key/value heads."""

    def __init__(self, inputs: Any, share_dtype: torch.dtype | None) -> None:
        self.inputs = inputs
        self.by_name: dict[str, Tensor] = {}
        for name, tensor in inputs.tensors().items():
            if tensor.is_floating_point() and name != "q_sum":
                dtype = tensor.dtype if name in ("q", "gates") else share_dtype or tensor.dtype
                self.by_name[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)

    def add(self, name: str, gradient: Tensor, kv_heads: slice) -> None:
        """Write the gradient of some heads of keys or values, rows `[rows,heads,D]` in fp32."""
        whole = self.by_name[name]
        whole.view(-1, *whole.shape[-2:])[: len(gradient), kv_heads] = gradient


def nsa_backward(
    inputs: Any,
    config: Any,
    saved: Sequence[Tensor],
    do: Tensor,
    *,
    deterministic: bool = False,
    share_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Gradients of all inputs that have one, by name, contiguous, in the inputs' shapes and dtypes.

    Args:
        saved: from `nsa_saving`.
        do: gradient of out, `[B,N,H,D_v]`, packed `[T,H,D_v]`.
        deterministic: has no effect, since the same call on the same device always gives the same bits.
        share_dtype: dtype of the gradients of all tensors but q and gates, in place of their own.
    """
    pack, kept = prepare(inputs, config), Saved.from_list(saved, inputs)
    results = _Gradients(inputs, share_dtype)
    if inputs.q.numel() > 0:
        for kv_heads in head_chunks(inputs):
            _backward_of_heads(inputs, config, pack, kept, rows_of(do), kv_heads, results)
    return results.by_name


def head_chunks(inputs: Any) -> Iterator[slice]:
    """Ranges of key/value heads to process one after the other."""
    heads, dim = inputs.q.shape[-2:]
    kv_heads, v_dim = inputs.v.shape[-2:]
    rows, keys = math.prod(inputs.q.shape[:-2]), math.prod(inputs.k.shape[:-2])
    # dq of three branches in 16 bits; dk and dv of two branches, and their splits, in fp32
    per_head = rows * heads // kv_heads * dim * 6 + keys * (dim + v_dim) * 16
    count = max(1, min(kv_heads, TEMPORARY_BYTES // max(per_head, 1)))
    for start in range(0, kv_heads, count):
        yield slice(start, min(start + count, kv_heads))


def _backward_of_heads(
    inputs: Any, config: Any, pack: Pack, saved: Saved, do: Tensor, kv_heads: slice, results: _Gradients
) -> None:
    """All gradients of a chunk of key/value heads and their query heads."""
    group = inputs.group_size
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    selects = kv_heads if config.shares_heads else heads
    indices = saved.indices[selects]
    q, do = rows_of(inputs.q)[:, heads], do[:, heads]
    entries = saved.entries or (rows_of(inputs.k_cmp), rows_of(inputs.v_cmp))
    k_cmp, v_cmp = (x[:, kv_heads] for x in entries)
    (k_slc, v_slc), (k_win, v_win) = (tuple(x[:, kv_heads] for x in branch_kv(inputs, name)) for name in ("slc", "win"))
    weight = None if inputs.gate_proj_weight is None else inputs.gate_proj_weight[heads].contiguous()
    gates = None if inputs.gates is None else rows_of(inputs.gates)[:, heads]
    if saved.cmp is None or saved.slc is None or saved.win is None:
        cmp = attend_compressed(q, k_cmp, v_cmp, config, pack)
        slc = attend_selected(q, k_slc, v_slc, indices, config, pack)
        win = attend_window(q, k_win, v_win, config, pack)
    else:
        cmp, slc, win = (Branch(x.o[:, heads], x.lse[heads]) for x in (saved.cmp, saved.slc, saved.win))
    of_gates = gate.backward(q, weight, gates, (cmp.o, slc.o, win.o), (cmp.lse, slc.lse, win.lse), do, pack)
    if of_gates.dgates is not None:
        results.by_name["gates"].view(-1, *inputs.gates.shape[-2:])[:, heads] = of_gates.dgates
    if of_gates.dweight is not None:
        results.by_name["gate_proj_weight"][heads] = of_gates.dweight

    scale, causal, size = config.scale(q.shape[-1]), config.causal, config.select_size
    dq_cmp, dq_slc, dq_win = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    rows_cmp, rows_slc, rows_win = of_gates.statistics
    interval = Interval.compressed(config.compress_block_size, config.stride, causal)
    dk_cmp, dv_cmp = interval_backward.backward(q, k_cmp, v_cmp, do, rows_cmp, dq_cmp, pack, interval, scale)
    how: dict[str, Any] = {"size": size, "scale": scale, "causal": causal}
    by_block = config.token_mode and attends_by_block(group, q.device)
    given = q, k_slc, v_slc, do, rows_slc, indices
    if not by_block:
        selected.dq(*given, dq_slc, pack, **how)
    dk_slc, dv_slc = kv_outer.backward(*given, dq_slc if by_block else None, pack, **how)
    interval = Interval.window(config.window_size, causal)
    dk_win, dv_win = interval_backward.backward(q, k_win, v_win, do, rows_win, dq_win, pack, interval, scale)
    dq = results.by_name["q"].view(-1, *inputs.q.shape[-2:])[:, heads]
    gate.sum_dq((dq_cmp, dq_slc, dq_win), of_gates.dlogits, weight, dq, pack)
    _add_key_gradients(
        inputs, config, pack, kv_heads, results, {"k": (dk_cmp, dk_slc, dk_win), "v": (dv_cmp, dv_slc, dv_win)}
    )


def _add_key_gradients(
    inputs: Any, config: Any, pack: Pack, kv_heads: slice, results: _Gradients, parts: dict[str, tuple[Tensor, ...]]
) -> None:
    """Gradients of keys and values, those of the branches that share a tensor summed in fp32."""
    for name, (entries, slc, win) in parts.items():
        total = None
        for branch, part in (("slc", slc), ("win", win)):
            if getattr(inputs, f"{name}_{branch}") is not None:
                results.add(f"{name}_{branch}", part, kv_heads)
            else:
                total = part if total is None else total.add_(part)
        if inputs.k_cmp is not None:
            results.add(f"{name}_cmp", entries, kv_heads)
        else:
            total = torch.zeros_like(slc) if total is None else total
            weight = getattr(inputs, f"w_{name}_compress")
            if weight is not None:
                weight = weight[kv_heads].float()
                means = pooled(rows_of(getattr(inputs, name))[:, kv_heads], config, pack, torch.float32)
                results.by_name[f"w_{name}_compress"][kv_heads] = torch.einsum("nhd,nhe->hde", means, entries)
                entries = torch.einsum("nhe,hde->nhd", entries, weight).contiguous()
            length, stride = config.compress_block_size, config.stride
            add_unpooled(entries, total, pack, length=length, stride=stride)
        if total is not None:
            results.add(name, total, kv_heads)
