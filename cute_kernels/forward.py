"""NSA's forward on NVIDIA GPUs: pool, score and choose, attend three times, gate.

`nsa(inputs, config)` takes the fields of the public call (nsa.tensors.NSAInputs, nsa.config.NSAConfig; nothing here
imports them) and returns what the reference returns. Everything is asynchronous; no device value is read.

Long sequences are processed in chunks of queries (`chunk_rows`), so that what one call needs beyond its inputs and
output does not grow with the square of anything, nor much with N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels import fa4
from cute_kernels.block_lists import BlockLists, Keys, chosen_lists, prefix_lists
from cute_kernels.compress import block_means, tile_means
from cute_kernels.gate import gated_sum
from cute_kernels.score import Blocks, top_blocks

CHUNK_BYTES = 8 << 30
"""Outputs of the three branches that may exist at once."""


def nsa(inputs: Any, config: Any, *, aux: bool = True) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
    """All of NSA's forward for checked, fixed-length inputs.

    Args:
        aux: also return what NSAAux holds, in its order (then queries are not chunked).

    Returns:
        out `[B,N,H,D_v]`, and the fields of NSAAux or None.
    """
    plan = _Plan.of(inputs, config)
    q = inputs.q
    batch, tokens, heads, _ = q.shape
    out = q.new_empty((batch, tokens, heads, inputs.v.shape[-1]))
    k_cmp, v_cmp = _compress(inputs, config)
    if aux:
        branches, indices, cmp_indices = _branches(inputs, plan, k_cmp, v_cmp, 0, tokens)
        _, gates = _gate(inputs, branches, slice(None), out, keep=True)
        if gates is None:
            gates = q.new_full((1, 1, 1, 1), 1.0 / 3.0, dtype=torch.float32).expand(batch, tokens, heads, 3)
        (o_cmp, lse_cmp), (o_slc, lse_slc), (o_win, lse_win) = branches
        return out, (o_cmp, o_slc, o_win, lse_cmp, lse_slc, lse_win, k_cmp, v_cmp, gates, indices, cmp_indices)
    rows = chunk_rows(batch, tokens, heads, inputs.v.shape[-1], plan.tile)
    for first in range(0, tokens, rows):
        some = slice(first, min(first + rows, tokens))
        branches, _, _ = _branches(inputs, plan, k_cmp, v_cmp, some.start, some.stop)
        _gate(inputs, branches, some, out[:, some], keep=False)
    return out, None


def chunk_rows(batch: int, tokens: int, heads: int, v_dim: int, tile: int) -> int:
    """How many query rows to process at once: all, or a multiple of the tile so that three outputs fit CHUNK_BYTES."""
    per_row = 3 * batch * heads * v_dim * 2
    if tokens * per_row <= CHUNK_BYTES:
        return max(tokens, 1)
    unit = math.lcm(tile, 256)
    return max(CHUNK_BYTES // per_row // unit, 1) * unit


@dataclass(frozen=True)
class _Plan:
    """The choices that follow from options, sizes and the device."""

    config: Any
    rules: fa4.Rules
    scale: float
    select: Blocks
    choose: Blocks | None
    """Blocks of compressed entries, where the compressed branch does not attend to all."""

    @property
    def tile(self) -> int:
        tile: int = self.config.q_tile_size
        return tile

    @staticmethod
    def of(inputs: Any, config: Any) -> _Plan:
        length, stride = config.compress_block_size, config.stride
        select = Blocks(
            length,
            stride,
            config.select_size,
            config.num_selected_blocks,
            init=config.num_init_blocks,
            local=config.num_local_blocks,
        )
        choose = None
        count = config.num_cmp_selected_blocks
        entries = inputs.k_cmp.shape[1] if inputs.k_cmp is not None else config.num_compressed(inputs.q.shape[1])
        if count is not None and count < -(-entries // config.n_block_size):
            choose = Blocks(1, 1, config.n_block_size, count, newest=config.causal)
        return _Plan(config, fa4.rules(inputs.q.device), config.scale(inputs.q.shape[-1]), select, choose)


# Steps, in the order of docs/semantics.md


def _compress(inputs: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Compressed keys and values `[B,entries,H_kv,D]`."""
    if inputs.k_cmp is not None:
        return inputs.k_cmp, inputs.v_cmp
    length, stride = config.compress_block_size, config.stride
    dtype = inputs.q.dtype
    weights = (inputs.w_k_compress, inputs.w_v_compress)
    if config.compress == "mean":
        exact = torch.float32 if any(w is not None for w in weights) else dtype  # rounded once, at the end
        pooled = block_means(inputs.k, inputs.v, length, stride, exact)
    else:
        pools = config.compress if isinstance(config.compress, tuple) else (config.compress,) * 2
        pooled = tuple(
            pool(x.unfold(1, length, stride).transpose(-1, -2)) for pool, x in zip(pools, (inputs.k, inputs.v), strict=True)
        )
    projected = (
        x if w is None else torch.einsum("bnhd,hde->bnhe", x.float(), w.float())
        for x, w in zip(pooled, weights, strict=True)
    )
    k_cmp, v_cmp = (x.to(dtype) for x in projected)
    return k_cmp, v_cmp


def _branches(
    inputs: Any, plan: _Plan, k_cmp: Tensor, v_cmp: Tensor, start: int, stop: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor | None]:
    """(o, lse) of the three branches for query rows start ... stop-1, and the selections."""
    q = inputs.q[:, start:stop]
    indices, cmp_indices = _select(inputs, plan, q, k_cmp, start, stop)
    return (
        [
            _compressed(plan, q, k_cmp, v_cmp, cmp_indices, start, stop, inputs.q.shape[1]),
            _selected(inputs, plan, q, indices, start, stop),
            _window(inputs, plan, q, start, stop),
        ],
        indices,
        cmp_indices,
    )


def _select(
    inputs: Any, plan: _Plan, q: Tensor, k_cmp: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor | None]:
    config = plan.config
    means = tile_means(q, plan.tile)
    where = {
        "length": config.compress_block_size,
        "stride": config.stride,
        "tile": plan.tile,
        "causal": config.causal,
        "tokens": inputs.q.shape[1] if not config.causal else stop,
        "first_tile": start // plan.tile,
    }
    cmp_indices = None
    if plan.choose is not None:
        cmp_indices = top_blocks(means, k_cmp, plan.choose, **where)
    if config.shares_heads:
        means = means.unflatten(2, (k_cmp.shape[2], -1)).sum(3)
    return top_blocks(means, k_cmp, plan.select, **where), cmp_indices


def _compressed(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, start: int, stop: int, tokens: int
) -> tuple[Tensor, Tensor]:
    config = plan.config
    keys = Keys(config.compress_block_size, config.stride, config.causal)
    entries = k.shape[1]
    lists: BlockLists | None = None
    if indices is not None:
        lists = chosen_lists(
            indices,
            q.shape[2],
            keys,
            size=config.n_block_size,
            width=plan.rules.width(config.n_block_size),
            rows=plan.tile,
            num_keys=entries,
            num_rows=stop,
            first_tile=start // plan.tile,
        )
    elif config.causal:
        entries = min(entries, config.num_compressed(stop))  # what the last row sees
        lists = prefix_lists(
            keys,
            q.shape[0],
            q.shape[2],
            width=plan.rules.widths[0],
            rows=plan.rules.rows,
            num_keys=entries,
            num_rows=stop,
            device=q.device,
            first_row=start,
        )
    if entries == 0:
        return _nothing(q, v)
    length, stride = (keys.length, keys.stride) if config.causal else (1, 0)
    return fa4.compressed(
        q, k[:, :entries], v[:, :entries], lists, length=length, stride=stride, first_row=start, scale=plan.scale
    )


def _selected(
    inputs: Any, plan: _Plan, q: Tensor, indices: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    config = plan.config
    k, v = (inputs.k, inputs.v) if inputs.k_slc is None else (inputs.k_slc, inputs.v_slc)
    if config.causal:
        k, v = k[:, :stop], v[:, :stop]
    if config.num_selected_blocks == 0 or k.shape[1] == 0:
        return _nothing(q, v)
    lists = chosen_lists(
        indices,
        q.shape[2],
        Keys(causal=config.causal),
        size=config.select_size,
        width=plan.rules.width(config.select_size),
        rows=plan.tile,
        num_keys=k.shape[1],
        num_rows=stop,
        first_tile=start // plan.tile,
    )
    return fa4.selected(q, k, v, lists, size=config.select_size, causal=config.causal, scale=plan.scale)


def _window(inputs: Any, plan: _Plan, q: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    config = plan.config
    k, v = (inputs.k, inputs.v) if inputs.k_win is None else (inputs.k_win, inputs.v_win)
    tokens, size = k.shape[1], config.window_size
    if size == 0:
        return _nothing(q, v)
    before, behind = (size - 1, 0) if config.causal else (size // 2, size // 2)
    first, last = max(0, start - before) // 128 * 128, min(tokens, stop + behind)
    extra = last - stop  # keys behind the last query
    return fa4.window(
        q, k[:, first:last], v[:, first:last], left=before + extra, right=behind - extra, scale=plan.scale
    )


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A branch without keys."""
    batch, rows, heads, _ = q.shape
    o = q.new_zeros((batch, rows, heads, v.shape[-1]))
    return o, torch.full((batch, heads, rows), -math.inf, dtype=torch.float32, device=q.device)


def _gate(
    inputs: Any, branches: list[tuple[Tensor, Tensor]], rows: slice, out: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    return gated_sum(
        *(o for o, _ in branches),
        q=inputs.q[:, rows],
        gate_proj_weight=inputs.gate_proj_weight,
        gates=None if inputs.gates is None else inputs.gates[:, rows],
        out=out,
        keep_gates=keep,
    )
