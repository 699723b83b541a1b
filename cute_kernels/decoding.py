"""A step of decoding on NVIDIA GPUs: append, score, choose, attend to blocks, combine (decode/), in five launches.

    nsa_with_cache   the function of the dispatcher's row: a cache and an open step of it
    decode           the same from tensors: pages, block table, lengths

Nothing is read on the host, and grids follow from shapes alone, so a step is captured once in a CUDA graph and replayed
while sequences grow. Temporary memory comes from PyTorch's allocator in each call: layers, which run one after the
other, then share it, and calls on two streams do not.

More than MAX_DECODE_QUERIES new tokens are steps of so many.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.decode import append, blocks, choose, combine, score
from cute_kernels.decode.splits import MIN_TILES
from cute_kernels.limits import MAX_DECODE_QUERIES
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.runtime.device import multiprocessors, vectorizable
from cute_kernels.runtime.jit import CUTE_DTYPES
from cute_kernels.select.topk import Blocks


class Pages(NamedTuple):
    """A layer's memory, and where sequences lie in it (decode/pages.py)."""

    k: Tensor
    """`[pages,page_size,H_kv,D]`"""
    v: Tensor
    """`[pages,page_size,H_kv,D_v]`"""
    k_cmp: Tensor
    """`[pages,page_size/d,H_kv,D]`: entry j in the page of its last token e, in slot e % page_size // d."""
    v_cmp: Tensor
    """`[pages,page_size/d,H_kv,D_v]`"""
    block_table: Tensor
    """int32 `[B,pages of a sequence]`; read for tokens that exist, the new ones among them."""


class Lengths(NamedTuple):
    """int32 `[B]` on the device."""

    cached: Tensor
    """Tokens of a sequence in front of the new ones."""
    new: Tensor
    """0 to N_q: the first rows of a sequence are its new tokens."""
    overflowed: Tensor
    """bool `[B]`: sequences whose rows become NaN. They have no new tokens."""


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
    k: Tensor,
    v: Tensor,
    pages: Pages,
    lengths: Lengths,
    config: Any,
    *,
    gates: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
) -> Tensor:
    """Append new tokens of each sequence, and attend: out `[B,N_q,H,D_v]` in q's dtype.

    Args:
        q, k, v: `[B,N_q,H,D]`, `[B,N_q,H_kv,D]`, `[B,N_q,H_kv,D_v]`, bf16 or fp16; N_q at most MAX_DECODE_QUERIES.
        pages: in their dtype; what support.check_decoding says of them.
        config: an nsa.NSAConfig in token mode.
        gates, gate_proj_weight: `[B,N_q,H,3]` or `[H,3,D]`; neither: 1/3 each.
    """
    batch, queries, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
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
    q, k, v = vectorizable(q), vectorizable(k), vectorizable(v)
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

    appending = append.compiled(how[0], q.dtype, page_size, select.length, select.stride)
    appending.run(k, v, *pages[:4], table, *known)
    score.compiled(*how, page_size).run(q, pages.k_cmp, pages.v_cmp, table, *known, cmp_o, cmp_lse, scores, scale, ctas)
    choose.compiled(*how, page_size).run(*known, cmp_lse, scores, values, indices, ctas, choice.blocks)
    blocks.compiled(*how, window, page_size).run(
        q,
        pages.k,
        pages.v,
        table,
        *known,
        values,
        indices,
        block_o,
        block_lse,
        scale,
        parts.selected,
        *parts[2:],
        choice.blocks,
    )
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


def nsa_with_cache(inputs: Any, config: Any, cache: Any, step: Any) -> Tensor:
    """Args: nsa.inputs.NSAInputs, nsa.NSAConfig, nsa.NSACache and its table's open step; checked. Returns out."""
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.gates
    table, memory = cache.table, cache.pages
    weight = None if inputs.gate_proj_weight is None else vectorizable(inputs.gate_proj_weight)
    pages = Pages(memory["k"], memory["v"], memory["k_cmp"], memory["v_cmp"], table.block_table)
    outs = []
    for first in range(0, q.shape[1], MAX_DECODE_QUERIES):
        rows = slice(first, first + MAX_DECODE_QUERIES)
        lengths = Lengths(table.seqlens, step.counts, table.overflowed)
        if q.shape[1] > MAX_DECODE_QUERIES:
            new = (step.counts - first).clamp(0, MAX_DECODE_QUERIES)
            lengths = Lengths(table.seqlens + first, new, table.overflowed)
        given = None if gates is None else gates[:, rows]
        outs.append(
            decode(q[:, rows], k[:, rows], v[:, rows], pages, lengths, config, gates=given, gate_proj_weight=weight)
        )
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
