"""nsa_with_cache in eager PyTorch: defines a step; kernels are tested against it.

Any dtype from bf16 to fp64, any device, any page, block and tile size. Each query is a tile of one row, with the mean
query of its tile so far. All compressed entries are read, but only the selected and window keys and values. Nothing is
read on the host: lengths stay on the device, and shapes follow from the table's capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.decoding.append import append, write_rows
from nsa.decoding.cache import NSACache
from nsa.decoding.table import Step
from nsa.inputs import NSAInputs
from nsa.reference import (
    Keys,
    attend,
    attend_compressed,
    attend_selected,
    attend_window,
    block_end,
    branch_gates,
    in_sum_dtype,
    mask_of,
    score,
    select,
    select_cmp_blocks,
    tiles_per_chunk,
)


def check(call: Any) -> str | None:
    """Reason why the dispatcher must not choose the reference for this call, or None."""
    if call.device_type != "cpu" and not call.named:
        return f"runs on {call.device_type} only when named: backend='reference' (eager PyTorch, slow)"
    return None


def nsa_with_cache(inputs: NSAInputs, config: NSAConfig, cache: NSACache, step: Step) -> Tensor:
    """Append and attend, for checked inputs inside a step; returns out `[B,N_q,H,D_v]` in q's dtype."""
    exact, dtype = in_sum_dtype(inputs), inputs.q.dtype
    append(inputs, config, cache, step)
    means = _mean_queries(exact.q, config, cache, step)
    entries = _entries(config, cache, exact.q.dtype)
    gates = branch_gates(exact).to(exact.q.dtype)
    size = tiles_per_chunk(exact.q, exact.v, cache.table.capacity, 1, config)
    parts = (x.split(size, 1) for x in (exact.q, means, step.positions, gates))
    chunks = [_attend(q, m, at, g, entries, config, cache) for q, m, at, g in zip(*parts, strict=True)]
    out = torch.cat(chunks, 1)
    new, overflowed = step.new[..., None, None], cache.table.overflowed[:, None, None, None]
    return torch.where(overflowed, math.nan, torch.where(new, out, 0.0)).to(dtype)


def _mean_queries(q: Tensor, config: NSAConfig, cache: NSACache, step: Step) -> Tensor:
    """The mean query of each token's tile up to the token, `[B,N_q,H,D]`; tile mode keeps the sums."""
    if cache.tile_sums is None:
        return q
    tile, positions = config.q_tile_size, step.positions
    slots = cache.tile_sums.shape[1]
    inside = positions % tile
    before = (inside[:, 0] - 1).clamp(0, slots - 1)
    earlier = cache.tile_sums[torch.arange(len(q), device=q.device), before]
    sums = q.clone()
    sums[:, 0] += torch.where((inside[:, 0] > 0)[:, None, None], earlier, 0.0)
    shift = 1
    while shift < min(tile, step.num_tokens):  # sums of 2, 4, 8, ... queries, none across a tile's first token
        same = (inside[:, shift:] >= shift)[..., None, None]
        sums[:, shift:] = sums[:, shift:] + torch.where(same, sums[:, :-shift], 0.0)
        shift *= 2
    last = step.new & (positions >= positions[:, :1] + step.counts[:, None] - tile)  # later ones use the same slots
    rows = torch.arange(len(q), device=q.device)[:, None] * slots + inside
    target = cache.tile_sums.flatten(0, 1)
    step.commits.append(partial(write_rows, target, rows.flatten(), sums.flatten(0, 1), last.flatten()))
    return sums / (inside + 1)[..., None, None]


# Attend


@dataclass(frozen=True)
class PagedKeys:
    """Keys and values of a branch in pages, read through the block table."""

    k: Tensor
    """Pages `[pages,page_size,H_kv,D]`."""
    v: Tensor
    cache: NSACache
    dtype: torch.dtype

    @property
    def lead(self) -> tuple[int, int]:
        return self.cache.table.batch, self.cache.heads_kv

    @property
    def count(self) -> int:
        return self.cache.table.capacity

    def gather(self, positions: Tensor) -> Keys:
        """Gather tokens `[B,S,n,m]` as `[B,S,n,m,D]`; undefined for tokens that do not exist.

        Head s of S reads key/value head s // (S / H_kv).
        """
        kv_heads, select_heads = self.cache.heads_kv, positions.shape[1]
        heads = torch.arange(select_heads, device=positions.device) // (select_heads // kv_heads)
        rows = self.cache.table.rows(positions).clamp(min=0)
        k, v = (x.flatten(0, 1)[rows, heads[:, None, None]].to(self.dtype) for x in (self.k, self.v))
        return Keys(k, v, moderate=None)


def _entries(config: NSAConfig, cache: NSACache, dtype: torch.dtype) -> Keys:
    """All compressed entries that sequences can have, `[B,H_kv,entries,D]`; undefined for entries not yet written."""
    count = config.num_compressed(cache.table.capacity)
    entries = torch.arange(count, device=cache.table.device).expand(cache.table.batch, -1)
    rows = cache.entry_rows(entries).clamp(min=0)
    k, v = (cache.pages[name].flatten(0, 1)[rows].transpose(1, 2).to(dtype) for name in ("k_cmp", "v_cmp"))
    return Keys(k, v, moderate=None)


def _attend(
    q: Tensor, means: Tensor, positions: Tensor, gates: Tensor, entries: Keys, config: NSAConfig, cache: NSACache
) -> Tensor:
    """The gated sum of the three branches for some queries, `[B,n,H,D_v]`.

    Args:
        q, means: queries and mean queries `[B,n,H,D]`.
        positions: their tokens `[B,n]`.
        gates: `[B,n,H,3]`.
    """
    capacity, scale = cache.table.capacity, config.scale(q.shape[-1])
    rows = positions[:, None, :, None]  # [B,1,n,T=1]
    tile = torch.cat([rows - rows % config.q_tile_size, rows], -1)  # first token of its tile, and the query itself
    q, means = q.transpose(1, 2)[:, :, :, None], means.transpose(1, 2)

    scores, scored = score(means, entries.k, tile, capacity, config)
    indices = select(scores, scored, tile, capacity, cache.heads_kv, config)
    count = config.num_cmp_selected_blocks
    if count is None:
        ends = block_end(torch.arange(entries.count, device=q.device), config)
        mask = mask_of(ends, rows[:, :, None, :, 0], q.dtype)
        shared = Keys(entries.k[:, :, None], entries.v[:, :, None], entries.moderate)
        o_cmp = attend(q.transpose(2, 3), shared, mask, scale)[0].transpose(2, 3)
    else:
        cmp_indices = select_cmp_blocks(scores, scored, tile, count, config)
        o_cmp = attend_compressed(q, entries, rows, cmp_indices, scale, config)[0]
    pages = cache.pages
    selected, window = (
        PagedKeys(pages.get(f"k_{branch}", pages["k"]), pages.get(f"v_{branch}", pages["v"]), cache, q.dtype)
        for branch in ("slc", "win")
    )
    o_slc = attend_selected(q, selected, rows, indices, scale, config)[0]
    o_win = attend_window(q, window, rows, scale, config)[0]
    branches = torch.stack([o_cmp, o_slc, o_win], -1)[:, :, :, 0].transpose(1, 2)  # [B,n,H,D_v,3]
    return (branches * gates[..., None, :]).sum(-1)
