"""A step of decoding on NVIDIA GPUs: append, score, choose, attend to blocks, combine (decode/), in five launches.

    nsa_with_cache   the function of the dispatcher's row: a cache and an open step of it
    decode           attention of new tokens from tensors: pages, block table, lengths

Nothing is read on the host, and grids follow from shapes alone, so a step is captured once in a CUDA graph and replayed
while sequences grow. Temporary memory comes from PyTorch's allocator in each call: layers, which run one after the
other, then share it, and calls on two streams do not.

Entries that are no means, and keys and values of single branches, are appended by PyTorch (NSACache.append).
More than MAX_DECODE_QUERIES new tokens are steps of so many; from MIN_PREFILL_QUERIES on, a prefill (prefill.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.decode import blocks, choose, combine, score
from cute_kernels.decode.cache import Lengths, Pages
from cute_kernels.decode.splits import MIN_TILES
from cute_kernels.limits import MAX_DECODE_QUERIES, MIN_PREFILL_QUERIES
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.prefill import append_tokens, prefill
from cute_kernels.runtime.device import multiprocessors, vectorizable
from cute_kernels.runtime.jit import CUTE_DTYPES
from cute_kernels.select.topk import Blocks


class Sizes(NamedTuple):
    """What shapes of temporary memory follow from."""

    rows: int
    """Query rows of a partial of the compressed branch."""
    row_groups: int
    """Partials' heads of a key/value head."""
    tiles: score.ScoreTiles
    ctas_per_sm: int
    block_rows: int
    """Query rows of a partial of the others."""
    block_ctas_per_sm: int


@lru_cache
def sizes(
    dims: tuple[int, int], dtype: torch.dtype, group: int, queries: int, select: Blocks, window: int, page_size: int
) -> Sizes:
    """Of the kernels that are compiled for these."""
    scores = score.ScoreEntries(*dims, CUTE_DTYPES[dtype], group, queries, select, page_size)
    attends = blocks.AttendBlocks(*dims, CUTE_DTYPES[dtype], group, queries, select, window, page_size)
    return Sizes(scores.rows, scores.row_groups, scores.tiles, scores.ctas_per_sm, attends.rows, attends.ctas_per_sm)


def decode(
    q: Tensor,
    pages: Pages,
    lengths: Lengths,
    config: Any,
    *,
    gates: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens of each sequence, which pages hold already: out `[B,N_q,H,D_v]` in q's dtype.

    Args:
        q: `[B,N_q,H,D]`, bf16 or fp16; N_q at most MAX_DECODE_QUERIES.
        pages: in its dtype; what support.check_with_cache says of them.
        config: an nsa.NSAConfig in token mode.
        gates, gate_proj_weight: `[B,N_q,H,3]` or `[H,3,D]`; neither: 1/3 each.
    """
    batch, queries, heads, dim = q.shape
    kv_heads, v_dim = pages.v.shape[2:]
    group, page_size, capacity = heads // kv_heads, pages.k.shape[1], pages.block_table.shape[1] * pages.k.shape[1]
    select = Blocks(
        config.compress_block_size,
        config.stride,
        config.select_size,
        config.num_selected_blocks,
        init=config.num_init_blocks,
        local=config.num_local_blocks,
    )
    window = min(config.window_size, capacity)
    how = (dim, v_dim), q.dtype, group, queries, select
    of = sizes(*how, window, page_size)
    q = vectorizable(q)
    out = torch.empty((batch, queries, heads, v_dim), dtype=q.dtype, device=q.device)
    entries = max(0, (capacity - select.length) // select.stride + 1)
    items, tiles, sms = kv_heads * queries, -(-entries // of.tiles.entries), multiprocessors(q.device)
    places = batch * kv_heads * of.row_groups
    ctas = max(1, min(sms * of.ctas_per_sm, -(-places * tiles // MIN_TILES)))
    parts = blocks.Parts.of(select, window, capacity, batch * items, sms * of.block_ctas_per_sm)
    choice = choose.ChoiceParts.of(-(-capacity // select.size))

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    cmp_o, cmp_lse = fp32(ctas + places, of.rows, v_dim), fp32(ctas + places, of.rows)
    scores = fp32(batch, kv_heads, max(1, tiles), of.tiles.slots, queries * group)
    values = fp32(batch, items, choice.lists, select.count)
    indices = torch.empty_like(values, dtype=torch.int32)
    block_o = fp32(batch, items, parts.both, of.block_rows, v_dim)
    block_lse = fp32(batch, items, parts.both, of.block_rows)
    scale = config.scale(dim) * LOG2_E
    table, known = pages.block_table, lengths[:2]
    weights = gate_proj_weight, None if gate_proj_weight is not None else gates
    gate_dtypes = [None if x is None else x.dtype for x in weights]

    score.compiled(*how, page_size).run(q, pages.k_cmp, pages.v_cmp, table, *known, cmp_o, cmp_lse, scores, scale, ctas)
    choose.compiled(*how, page_size).run(*known, cmp_lse, scores, values, indices, ctas, choice.blocks)
    attend_blocks = blocks.compiled(*how, window, page_size).run

    def attend(k: Tensor, v: Tensor, of_branches: slice, selected: int) -> None:
        """Args: parts of partials, the first `selected` of which are of selected blocks, the others of the window."""
        partials = block_o[:, :, of_branches], block_lse[:, :, of_branches]
        if partials[1].numel() == 0:
            return
        attend_blocks(q, k, v, table, *known, values, indices, *partials, scale, selected, *parts[2:], choice.blocks)

    if pages.k_win is None:
        attend(pages.k, pages.v, slice(None), parts.selected)
    else:
        attend(pages.k, pages.v, slice(parts.selected), parts.selected)
        attend(*pages.window, slice(parts.selected, None), 0)
    combine.compiled(*how, page_size, *gate_dtypes).run(
        *known,
        lengths.overflowed.view(torch.int8),
        cmp_o,
        cmp_lse,
        block_o,
        block_lse,
        None if gate_proj_weight is None else q,
        *weights,
        out,
        ctas,
        parts.selected,
    )
    return out


def pools_means(inputs: Any, config: Any) -> bool:
    """Whether entries are means, which a kernel pools."""
    return config.compress == "mean" and (inputs.w_k_compress, inputs.w_v_compress) == (None, None)


def nsa_with_cache(inputs: Any, config: Any, cache: Any, step: Any) -> Tensor:
    """Args: nsa.inputs.NSAInputs, nsa.NSAConfig, nsa.NSACache and its table's open step; checked. Returns out."""
    q, gates, table = inputs.q, inputs.gates, cache.table
    weight = None if inputs.gate_proj_weight is None else vectorizable(inputs.gate_proj_weight)
    names = ("k_slc", "v_slc") if cache.separate_kv else ("k", "v")
    own = {name: cache.pages[name] for name in ("k_win", "v_win")} if cache.separate_kv else {}
    k, v, k_cmp, v_cmp = (cache.pages[name] for name in (*names, "k_cmp", "v_cmp"))
    pages = Pages(k, v, k_cmp, v_cmp, table.block_table, **own)
    lengths = Lengths(table.seqlens, step.counts, table.overflowed)
    if pools_means(inputs, config) and not cache.separate_kv:
        append_tokens(inputs.k, inputs.v, pages, lengths, config)
    else:
        cache.append(inputs, config, step)
    if q.shape[1] >= MIN_PREFILL_QUERIES:
        return prefill(inputs, config, pages, lengths)
    outs = []
    for first in range(0, q.shape[1], MAX_DECODE_QUERIES):
        rows = slice(first, first + MAX_DECODE_QUERIES)
        if q.shape[1] > MAX_DECODE_QUERIES:
            new = (step.counts - first).clamp(0, MAX_DECODE_QUERIES)
            lengths = Lengths(table.seqlens + first, new, table.overflowed)
        given = None if gates is None else gates[:, rows]
        outs.append(decode(q[:, rows], pages, lengths, config, gates=given, gate_proj_weight=weight))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
