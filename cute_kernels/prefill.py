"""Prefill of a prompt's chunk on NVIDIA GPUs: append it to its pages, gather these, and run the steps of a whole call.

    append_tokens    write new tokens and their entries to pages
    prefill          attention of many new tokens of each sequence, out `[B,N_q,H,D_v]`

forward.py sees the sequences as packed documents that continue, whose lengths are known only on the device: the pages
of each are gathered once, as aligned keys, and the cache's entries are its k_cmp and v_cmp. If the window is a launch
of its own, its keys are gathered separately, since it reaches few of them. Selections and rows are bitwise equal to
those of the whole call.

Nothing is read on the host: sizes follow from the capacity of the block table, and bytes moved from lengths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from cute_kernels.call import Call, window_reach
from cute_kernels.decode import append
from cute_kernels.decode.cache import LengthTensors, Pages
from cute_kernels.decode.gather import gather_pages
from cute_kernels.decode.pages import Paging
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.forward import attend, gate
from cute_kernels.plan import plan
from cute_kernels.pool.documents import ENTRY, KEY, LENGTH, ROW, START, Documents, Packed, Varlen, lay_out_queries
from cute_kernels.refusals import tile_rows
from cute_kernels.runtime.device import vectorizable


def append_tokens(k: Tensor, v: Tensor, pages: Pages, lengths: LengthTensors, config: Any) -> None:
    """Write new tokens `[B,N_q,H_kv,...]` to pages, and the means of the blocks that they complete."""
    length, stride, page_size = config.compress_block_size, config.stride, pages.k.shape[1]
    run = append.AppendPages.compile((k.shape[-1], v.shape[-1]), k.dtype, page_size, length, stride).run
    run(vectorizable(k), vectorizable(v), *pages[:5], *lengths[:2])


def prefill(inputs: Any, config: Any, pages: Pages, lengths: LengthTensors) -> Tensor:
    """Attention of new tokens of each sequence, which are already in pages: out `[B,N_q,H,D_v]` in q's dtype.

    Args:
        inputs: nsa.inputs.NSAInputs of the new tokens, as supported by support.check_with_cache.
        config: an nsa.NSAConfig in token mode.
    """
    q = vectorizable(inputs.q)
    (batch, queries, *_), (length, stride) = q.shape, (config.compress_block_size, config.stride)
    page_size, table = pages.k.shape[1], pages.block_table
    capacity = table.shape[1] * page_size

    packed = Packed.of_sequences(q, capacity, lengths.cached, lengths.new)
    rules, q = cast("fa4_rules.Rules", fa4_rules.rules(q.device)), q.flatten(0, 1)[None]
    sizes = {"tile": tile_rows(config, rules), "step": 1, "length": length, "stride": stride}
    documents, aligned_q = lay_out_queries(q, packed, batch * capacity, **sizes)
    documents = replace(documents, most_entries=config.num_compressed(capacity))

    exists = documents.bounds[LENGTH] > documents.bounds[START]
    tokens = torch.where(exists, documents.bounds[LENGTH], 0)
    nothing = torch.zeros_like(tokens)
    entries = torch.nn.functional.pad(documents.entry_counts, [0, 1]) * exists
    lag = Paging.of_entries(page_size, length, stride).lag
    keys = gather_pages(
        pages.k, pages.v, table, torch.stack([documents.bounds[KEY], nothing, tokens]), documents.num_keys
    )
    compressed = gather_pages(
        pages.k_cmp,
        pages.v_cmp,
        table,
        torch.stack([documents.bounds[ENTRY], nothing, entries]),
        documents.num_entries,
        lag=lag,
    )
    gates = inputs.gates
    inputs = replace(inputs, q=q, k=keys[0], v=keys[1], gates=None if gates is None else gates.flatten(0, 1)[None])
    if inputs.gate_proj_weight is not None:
        inputs = replace(inputs, gate_proj_weight=vectorizable(inputs.gate_proj_weight))
    attended = replace(inputs, q=aligned_q, k_slc=keys[0], v_slc=keys[1], k_win=keys[0], v_win=keys[1])
    planned = plan(inputs, config, as_pack=True)
    if config.window_size > 0 and planned.window == "fa4":
        documents, (k_win, v_win) = _lay_out_window(documents, q, queries, tokens, config, pages)
        attended = replace(attended, k_win=k_win, v_win=v_win)
    call = Call(inputs, attended, config, planned, documents, compressed, batch)
    gate(call, attend(call, 0, call.num_rows, lse=False), 0, call.num_rows)
    return call.result.masked_fill(lengths.overflowed[:, None, None, None], torch.nan)


def _lay_out_window(
    documents: Documents, q: Tensor, queries: int, tokens: Tensor, config: Any, pages: Pages
) -> tuple[Documents, tuple[Tensor, Tensor]]:
    """Gather the keys and values that windows of new tokens reach, starting at whole tiles of keys; and their layout.

    Args:
        queries: N_q.
        tokens: int32 `[B+1]`, number of tokens of each sequence, 0 if it has no new ones.
    """
    bounds, batch, table = documents.bounds, documents.packed.num_documents, pages.block_table
    capacity = table.shape[1] * pages.k.shape[1]
    size = fa4_rules.window_tile_n(q, *pages.window)
    left, _ = window_reach(config.window_size, True, capacity)
    source = (bounds[START] - left).clamp(min=0) // size * size
    counts = (tokens - source).clamp(min=0)
    tiles = -(-counts // size)
    first = (tiles.cumsum(0, dtype=torch.int32) - tiles) * size
    most = -(-min(capacity, queries + left + size) // size) * size
    places = torch.stack([first, source, counts])
    window = gather_pages(*pages.window, table, places, batch * most)
    rows = (tokens - bounds[START]).clamp(min=0)[:-1]
    varlen = Varlen(bounds[ROW] + bounds[START], first, rows, counts[:-1])
    return replace(documents, window=varlen), window
