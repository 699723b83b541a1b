"""One step of decoding on NVIDIA GPUs: append, score, choose, attend to blocks, combine (decode/), in five launches.

    nsa_with_cache   entry point of the dispatcher: a cache and an open step of it
    decode           the same with tensors: pages, block table, lengths

Nothing is read on the host, and grids follow from shapes alone, so a step is captured once in a CUDA graph and replayed
while sequences grow. Temporary memory comes from PyTorch's allocator: the first layer of a step allocates it, and later
layers on the same stream reuse it. A captured call has its own, which belongs to its graph.

Entries that are not means, and keys and values of single branches, are appended by PyTorch (NSACache.append). More than
MAX_DECODE_QUERIES new tokens are processed in steps of that size; in token mode from MIN_PREFILL_QUERIES on, as a
prefill (prefill.py). In tile mode tile_sums.py runs first, and if heads select separately the window's parts are a
launch of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.decode import append, blocks, choose, combine, score
from cute_kernels.decode.blocks import Parts
from cute_kernels.decode.cache import LengthTensors, Pages
from cute_kernels.decode.tile_sums import keep_sums, sum_queries
from cute_kernels.limits import MAX_DECODE_QUERIES, MIN_PREFILL_QUERIES
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.prefill import append_tokens, prefill
from cute_kernels.runtime.device import multiprocessors, vectorizable
from cute_kernels.runtime.jit import CUTE_DTYPES
from cute_kernels.select.topk import Blocks

SEPARATE_PAGES = {"k": "k_slc", "v": "v_slc", "k_win": "k_win", "v_win": "v_win"}
"""Fields of `Pages` and their names in the cache, with separate_kv."""


class Tuning(NamedTuple):
    """Tuning knobs; never affect results."""

    score_ctas_per_sm: int = 2
    score_tiles: int = 2
    """Minimum tiles per CTA of score.py, for sequences as long as the capacity."""
    part_tiles: int | None = None
    """Tiles per part of blocks.py; None: Parts.of decides."""
    combine: combine.Shape | None = None
    """Shape of the combine's CTAs; None: by the number of heads."""


DEFAULT = Tuning()


class Workspace(NamedTuple):
    """Temporary memory of a call, in the layout of its kernels."""

    compressed: tuple[Tensor, Tensor]
    """Partials of score.py, and their lse."""
    attended: tuple[Tensor, Tensor]
    """Partials of blocks.py, and their lse."""
    apart: tuple[Tensor | None, Tensor | None]
    """Partials of the window, and their lse, if its parts are a launch of their own."""
    scores: Tensor
    """Scores of score.py."""
    listed: tuple[Tensor, Tensor]
    """Values and blocks of choose.py."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Kernels of a call, and constants of all calls with its shapes."""

    append: Callable[..., None]
    score: Callable[..., None]
    choose: Callable[..., None]
    blocks: Callable[..., None]
    window: Callable[..., None] | None
    """Kernel of the window's parts, if heads select separately: the heads of a group read the same window."""
    combine: Callable[..., None]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of temporary memory, 4 bytes per element: partials of score.py and blocks.py, scores, lse of both
    partials, values and blocks of choose.py. All up to the scores are whole vectors."""
    sizes: tuple[int, ...]
    """Numbers of elements of `shapes`."""
    window_shape: tuple[int, ...] | None
    """Shape of the lse of the window's partials."""
    scale: float
    """softmax_scale * log2(e)"""
    ctas: int
    """Number of CTAs of score.py."""
    parts: Parts
    choice_blocks: int
    """Blocks per part of choose.py."""

    def workspace(self, device: torch.device) -> Workspace:
        memory = torch.empty(sum(self.sizes), dtype=torch.float32, device=device).split_with_sizes(self.sizes)
        cmp_o, block_o, scores, cmp_lse, block_lse, values, indices = map(Tensor.view, memory, self.shapes)
        apart: tuple[Tensor | None, Tensor | None] = None, None
        if self.window_shape is not None:
            apart = block_o.new_empty((*self.window_shape, block_o.shape[-1])), block_lse.new_empty(self.window_shape)
        return Workspace((cmp_o, cmp_lse), (block_o, block_lse), apart, scores, (values, indices.view(torch.int32)))

    def shared_workspace(self, device: torch.device, kept: dict[Hashable, Any] | None) -> Workspace:
        """Workspace of an earlier call of the step on this stream, if any. A graph may outlive the step."""
        on_cuda = device.type == "cuda"
        if kept is None or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return self.workspace(device)
        key = self, torch._C._cuda_getCurrentRawStream(device.index) if on_cuda else None
        found = kept.get(key)
        if found is None:
            found = kept[key] = self.workspace(device)
        return found


@lru_cache
def plan(
    shape: tuple[int, ...],  # shape of q
    kv_heads: int,
    v_dim: int,
    dtype: torch.dtype,
    gate_dtypes: tuple[torch.dtype | None, torch.dtype | None],  # dtypes of gate_proj_weight and gates
    config: Any,
    page_size: int,
    columns: int,  # columns of the block table
    device: torch.device,
    tuning: Tuning = DEFAULT,
) -> Plan:
    """Kernels, grids and sizes of temporaries of a step, from shapes alone. Compiles missing kernels."""
    batch, queries, heads, dim = shape
    dims, group, capacity = (dim, v_dim), heads // kv_heads, columns * page_size
    select, terms = Blocks.of(config), 1 if config.token_mode else score.TERMS
    together = group if config.shares_heads else 1  # heads that select together
    apart = group // together
    window = min(config.window_size, capacity)
    how, attending = (dims, dtype, group, queries, select), (queries, select, window, page_size)
    element, per_sm = CUTE_DTYPES[dtype], tuning.score_ctas_per_sm
    of_score = score.ScoreEntries(*dims, element, group, queries, select, page_size, per_sm, terms)
    of_blocks = blocks.AttendBlocks(*dims, element, together, queries, select, window, page_size, apart)
    entries = max(0, (capacity - select.length) // select.stride + 1)
    items, tiles, sms = kv_heads * queries, -(-entries // of_score.tiles.entries), multiprocessors(device)
    places = batch * kv_heads * of_score.row_groups
    ctas = max(1, min(sms * of_score.ctas_per_sm, -(-places * tiles // tuning.score_tiles)))
    at_once = sms * of_blocks.ctas_per_sm
    parts = Parts.of(select, window, capacity, batch * items, at_once, tuning.part_tiles, apart)
    few = batch * queries * heads <= 2 * sms
    choice = choose.ChoiceParts.of(-(-capacity // select.size), select.count, batch * items * apart, sms)
    listed = batch, items * apart, choice.lists, select.count
    attended = batch, items * apart, parts.both if apart == 1 else parts.selected, together
    shapes = (
        (ctas + places, of_score.cta_rows, v_dim),
        (*attended, v_dim),
        (batch, kv_heads, max(1, tiles), of_score.tiles.slots, queries * group),
        (ctas + places, of_score.cta_rows),
        attended,
        listed,
        listed,
    )
    shape_of_combine = tuning.combine or (combine.FEW_HEADS if few else combine.MANY_HEADS)
    return Plan(
        append.AppendPages.compile(dims, dtype, page_size, select.length, select.stride).run,
        score.ScoreEntries.compile(*how, page_size, per_sm, terms).run,
        choose.ChooseBlocks.compile(*how, page_size, terms, together).run,
        blocks.AttendBlocks.compile(dims, dtype, together, *attending, apart).run,
        blocks.AttendBlocks.compile(dims, dtype, group, *attending).run if apart > 1 else None,
        combine.CombineBranches.compile(*how, page_size, *gate_dtypes, shape_of_combine, terms, together).run,
        shapes,
        tuple(map(math.prod, shapes)),
        (batch, items, parts.window, group) if apart > 1 else None,
        config.scale(dim) * LOG2_E,
        ctas,
        parts,
        choice.blocks,
    )


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    lengths: LengthTensors,
    config: Any,
    *,
    rows: Tensor | None = None,
    gates: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    appended: bool = False,
    kept: dict[Hashable, Any] | None = None,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """Append new tokens of each sequence, and attend: out `[B,N_q,H,D_v]` in q's dtype.

    Args:
        q, k, v: `[B,N_q,H,D]`, `[B,N_q,H_kv,D]`, `[B,N_q,H_kv,D_v]`, bf16 or fp16; N_q at most MAX_DECODE_QUERIES.
        pages: in the same dtype; as required by support.check_with_cache.
        config: an nsa.NSAConfig.
        rows: in tile mode, rows of `sum_queries`.
        gates, gate_proj_weight: `[B,N_q,H,3]` or `[H,3,D]`; if neither is given, 1/3 each.
        appended: pages already hold the new tokens. AppendPages then writes nothing, but the other kernels still start
            after it (decode/__init__.py).
        kept: state shared by calls of the same step. None: nothing is shared.
        tuning: affects speed only.
    """
    weight, gates = gate_proj_weight, None if gate_proj_weight is not None else gates
    gate_dtypes = None if weight is None else weight.dtype, None if gates is None else gates.dtype
    kv_heads, v_dim = v.shape[2:]
    layout = pages.k.shape[1], pages.block_table.shape[1]
    planned = plan(tuple(q.shape), kv_heads, v_dim, q.dtype, gate_dtypes, config, *layout, q.device, tuning)
    q, k, v = vectorizable(q), vectorizable(k), vectorizable(v)
    out = q.new_empty((*q.shape[:3], v_dim))
    compressed, attended, apart, scores, listed = planned.shared_workspace(q.device, kept)
    table, known = pages.block_table, lengths[:2]
    planned.append(k, v, *pages[:4], table, lengths.cached, torch.zeros_like(lengths.new) if appended else lengths.new)
    planned.score(
        q if rows is None else rows, *pages[2:4], table, *known, *compressed, scores, planned.scale, planned.ctas
    )
    planned.choose(*known, compressed[1], scores, *listed, planned.ctas, planned.choice_blocks)
    parts = planned.parts
    cut = parts.tiles, parts.window_tiles, planned.choice_blocks
    if pages.k_win is None and planned.window is None:
        planned.blocks(q, pages.k, pages.v, table, *known, *listed, *attended, planned.scale, parts.selected, *cut)
    else:  # two launches, selected and window, if keys and values or heads of a part differ
        selected: tuple[Any, ...] = attended
        window: tuple[Any, ...] = apart
        if planned.window is None:
            selected, window = (tuple(x[:, :, of_parts] for x in attended) for of_parts in parts.of_branches)
        if parts.selected > 0:
            planned.blocks(q, pages.k, pages.v, table, *known, *listed, *selected, planned.scale, parts.selected, *cut)
        if parts.window > 0:
            (planned.window or planned.blocks)(
                q, *pages.window, table, *known, *listed, *window, planned.scale, 0, *cut
            )
    of_gates = None if weight is None else q, weight, gates
    overflowed = lengths.overflowed.view(torch.int8)
    planned.combine(
        *known, overflowed, *compressed, *attended, *apart, *of_gates, out, planned.ctas, planned.parts.selected
    )
    return out


def pools_means(inputs: Any, config: Any) -> bool:
    """True if entries are means, which a kernel pools."""
    return config.compress == "mean" and (inputs.w_k_compress, inputs.w_v_compress) == (None, None)


def nsa_with_cache(inputs: Any, config: Any, cache: Any, step: Any) -> Tensor:
    """Run an open step. Args: nsa.inputs.NSAInputs, nsa.NSAConfig, nsa.NSACache, its table's open step; all checked."""
    q, k, v, gates, table, memory = inputs.q, inputs.k, inputs.v, inputs.gates, cache.table, cache.pages
    if len(q) == 0:
        nothing: Tensor = q.new_empty((*q.shape[:3], v.shape[-1]))
        return nothing
    if gates is not None and gates.stride(-1) != 1:
        gates = gates.contiguous()
        inputs = replace(inputs, gates=gates)
    weight = None if inputs.gate_proj_weight is None else vectorizable(inputs.gate_proj_weight)
    pages = Pages(memory["k"], memory["v"], memory["k_cmp"], memory["v_cmp"], table.block_table)
    lengths = LengthTensors(table.seqlens, step.counts, table.overflowed)
    appended = cache.separate_kv or not pools_means(inputs, config)
    if appended:
        cache.append(inputs, config, step)
    if cache.separate_kv:
        pages = pages._replace(**{x: memory[y] for x, y in SEPARATE_PAGES.items()})
    if config.token_mode and q.shape[1] >= MIN_PREFILL_QUERIES:
        if not appended:
            append_tokens(k, v, pages, lengths, config)
        return prefill(inputs, config, pages, lengths)
    rows = None
    if not config.token_mode:
        tile = config.q_tile_size
        rows, sums = sum_queries(q, cache.tile_sums, lengths, tile)
        step.commits.append(partial(keep_sums, sums, cache.tile_sums, lengths, tile))
    if q.shape[1] <= MAX_DECODE_QUERIES:
        how = {"rows": rows, "gates": gates, "gate_proj_weight": weight, "appended": appended, "kept": step.kept}
        return decode(q, k, v, pages, lengths, config, **how)
    outs = []
    for first in range(0, q.shape[1], MAX_DECODE_QUERIES):
        queries = slice(first, first + MAX_DECODE_QUERIES)
        new = (step.counts - first).clamp(0, MAX_DECODE_QUERIES)
        lengths = LengthTensors(table.seqlens + first, new, table.overflowed)
        parts = {
            "rows": None if rows is None else rows[:, queries],
            "gates": None if gates is None else gates[:, queries],
        }
        how = {**parts, "gate_proj_weight": weight, "appended": appended, "kept": step.kept}
        outs.append(decode(q[:, queries], k[:, queries], v[:, queries], pages, lengths, config, **how))
    return torch.cat(outs, 1)
