"""PyTorch twins of the kernels of NSA's backward, so that its steps can be run and checked on a CPU.

`install` puts them where cute_kernels.backward and documents.py call kernels; everything between the calls is real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, forward, plan
from cute_kernels.attend.window_backward import LocalSelected
from cute_kernels.attend.window_dq_combine import WindowQueries
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.fa4.rules import Rules
from cute_kernels.gate.backward import GateResults
from cute_kernels.gate.sums import QueryTerms
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool import documents
from cute_kernels.pool.documents import (
    DOCUMENT,
    ENTRY,
    ENTRY_ALIGNMENT,
    KEY,
    KEY_SHIFT,
    LENGTH,
    NUM_BOUNDS,
    PUBLIC_ENTRY,
    QUERY,
    ROW,
    SHIFT,
    START,
    TILE,
    TOKEN,
    Documents,
    Packed,
    Varlen,
)
from nsa import NSAConfig
from nsa.inputs import NSAAux, NSAInputs
from tests.support import fa4_model as model

TILE_KEYS = 64
"""Rows and keys of a tile of the kernels without atomics."""


def install(patch: pytest.MonkeyPatch, arch: str, rules: Rules) -> None:
    """Twins in place of what needs a GPU; attention over lists is that of `arch`, with lists by `rules`."""
    patch.setattr(fa4_rules, "rules", lambda _: rules)
    for name in ("compressed_backward", "selected_backward"):
        patch.setattr(fa4, name, partial(getattr(model, name), arch))
    for name in ("dense_backward", "window_backward"):
        patch.setattr(fa4, name, globals()[name])
    for name in (
        "gate_gradients",
        "query_gradients",
        "key_gradients",
        "tile_bits",
        "transposed_lists",
        "transposed_prefix_lists",
    ):
        patch.setattr(backward, name, globals()[name])
    patch.setattr(backward, "kv_outer_backward", kv_outer_backward)
    patch.setattr(backward, "row_statistics", row_statistics)
    patch.setattr(backward, "compressed_backward", atomic_free_compressed)
    patch.setattr(backward, "window_backward", atomic_free_window)
    patch.setattr(backward, "selected_backward", atomic_free_selected)
    patch.setattr(backward, "block_means", block_means)
    patch.setattr(plan, "lay_out", lay_out)
    patch.setattr(documents, "_align_rows", align_rows)
    patch.setattr(documents, "bounds_of", bounds_of)


# Attention


def differentiate(gradients: fa4.Gradients, visible: Tensor, scale: float) -> None:
    """For pairs visible `[rows,keys]` to every batch and head."""
    pairs = visible.int()
    model.attend_backward(gradients, lambda *_: (pairs, 0 * pairs), scale)


def dense_backward(
    gradients: fa4.Gradients,
    *,
    causal: bool,
    scale: float,
    deterministic: bool = False,
    statistics: fa4.WriteStatistics | None = None,
) -> None:
    if statistics is not None:
        log2_lse, delta = torch.empty((2, *gradients.lse.shape))
        statistics(log2_lse, delta)
        there = gradients.lse.isfinite()
        of_o = (gradients.o.double() * gradients.do.double()).sum(-1).transpose(1, 2)
        assert torch.allclose(delta[there].double(), of_o[there], atol=1e-4)
        assert torch.allclose(log2_lse[there] * math.log(2), gradients.lse[there].float(), atol=1e-5)
    row, key = (torch.arange(x.shape[1]) for x in (gradients.q, gradients.k))
    behind = len(key) - len(row) if causal else len(key)
    differentiate(gradients, key <= row[:, None] + behind, scale)


def row_statistics(lse: Tensor, delta: Tensor, log2_lse: Tensor, delta_out: Tensor) -> None:
    for out, x, padding in ((log2_lse, lse * math.log2(math.e), math.inf), (delta_out, delta, 0.0)):
        out.fill_(padding)
        out[..., : x.shape[-1]] = x


def window_backward(
    gradients: fa4.Gradients,
    *,
    left: int,
    right: int,
    scale: float,
    documents: Varlen | None = None,
    deterministic: bool = False,
) -> None:
    if documents is not None:
        # Other rows, and keys that no row sees, are neither read nor written
        for first, first_key, used, keys in zip(*(x.tolist() for x in documents), strict=False):
            there, seen = slice(first, first + used), slice(first_key + max(0, keys - used - left), first_key + keys)
            if used == 0:
                continue
            part = {
                name: x[:, seen if name in ("k", "v", "dk", "dv") else there] for name, x in vars(gradients).items()
            }
            part["lse"] = gradients.lse[..., there]
            window_backward(fa4.Gradients(**part), left=left, right=right, scale=scale)
        return
    row = torch.arange(gradients.q.shape[1])[:, None] + gradients.k.shape[1] - gradients.q.shape[1]
    key = torch.arange(gradients.k.shape[1])
    seen = (key >= row - left) & (key <= row + right)
    assert bool(seen.any(0).all()), "FlashAttention-4 may not write dk and dv of a tile of keys that no row sees"
    assert max(left, right) + max(len(row), len(key)) < 2**31, "FlashAttention-4 adds them in int32"
    differentiate(gradients, seen, scale)


# Token mode, where tokens number the keys and rows alike


def kv_outer_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    size: int,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    local: int,
    first_token: int = 0,
    packed: None = None,
    terms: QueryTerms | None = None,
    window: WindowQueries | None = None,
) -> None:
    tokens, group = first_token + q.shape[1], q.shape[2] // k.shape[2]
    row, blocks = torch.arange(first_token, tokens)[:, None], -(-tokens // size)
    kept = indices.long().where((indices >= 0) & (indices <= row // size - local), blocks)
    chosen = torch.zeros((*indices.shape[:3], blocks + 1), dtype=torch.bool).scatter_(3, kept, True)[..., :blocks]
    pairs = chosen.repeat_interleave(size, 3)[..., :tokens] & (torch.arange(tokens) <= row)
    own = torch.empty_like(into[0])
    add_pairs(q, k, v, do, [(pairs.repeat_interleave(group, 1), lse, delta)], scale, (own, *into[1:]))
    branches = [own, *(() if terms is None else terms.branches)]
    if window is not None:
        branches.append(torch.empty_like(own))
        options = {"left": window.left, "scale": scale, "first_token": first_token}
        in_window = LocalSelected(lse, delta, size, local)
        keys = (torch.empty_like(k), torch.empty_like(v))
        atomic_free_window(
            q, k, v, do, window.lse, window.delta, into=(branches[-1], *keys), local_selected=in_window, **options
        )
    query_gradients(into[0], (terms or QueryTerms(()))._replace(branches=tuple(branches)))


def atomic_free_compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    length: int,
    stride: int,
    scale: float,
    dq: Tensor,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    token, entry = first_token + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    add_pairs(q, k, v, do, [(entry * stride + length - 1 <= token, lse, delta)], scale, (dq, dk, dv))
    return dk.float(), dv.float()


def atomic_free_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    left: int,
    scale: float,
    into: tuple[Tensor | None, Tensor, Tensor],
    first_token: int = 0,
    local_selected: LocalSelected | None = None,
) -> None:
    assert first_token % TILE_KEYS == 0
    assert first_token == k.shape[1] - q.shape[1]
    row, key = torch.arange(first_token, k.shape[1])[:, None], torch.arange(k.shape[1])
    branches = [((key <= row) & (key >= row - left), lse, delta)]
    if local_selected is not None:
        local_lse, local_delta, size, local = local_selected
        pairs = (key <= row) & (key >= (row // size - local + 1) * size)
        branches.append((pairs, local_lse, local_delta))
    dq = torch.empty_like(q) if into[0] is None else into[0]
    add_pairs(q, k, v, do, branches, scale, (dq, *into[1:]))


def atomic_free_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: model.Lists,
    bits: Tensor,
    *,
    size: int,
    keys: Keys,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    first_token: int,
    shifts: Tensor | None,
) -> None:
    """dq by the lists, which say what needs no mask, dk and dv by the bits."""
    assert lists.width == TILE_KEYS
    (batch, rows, heads, _), num_keys = q.shape, k.shape[1]
    token, key = first_token + torch.arange(rows)[:, None], torch.arange(num_keys)
    if shifts is not None:
        token = token + shifts.repeat_interleave(lists.rows)[:rows, None]
    seen = (key * keys.stride + keys.length - 1 <= token) | (not keys.causal)
    by_list = torch.zeros((batch, heads, rows, num_keys), dtype=torch.bool)
    for b, h, tile in product(range(batch), range(heads), range(-(-rows // lists.rows))):
        part = slice(tile * lists.rows, (tile + 1) * lists.rows)
        for kind in ("mask", "full"):
            for block in lists.listed(kind, b, h, tile):
                of_block = slice(block * lists.width, (block + 1) * lists.width)
                by_list[b, h, part, of_block] = seen[part, of_block] | (kind == "full")
    words = bits[..., torch.arange(-(-rows // lists.rows)) // 32] >> torch.arange(-(-rows // lists.rows)) % 32
    chosen = (words & 1 == 1).mT.repeat_interleave(lists.rows, 2)[:, :, :rows]
    by_bits = chosen.repeat_interleave(size, 3)[..., :num_keys].repeat_interleave(heads // bits.shape[1], 1) & seen
    assert torch.equal(by_list, by_bits)
    add_pairs(q, k, v, do, [(by_bits, lse, delta)], scale, into)


def add_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    branches: Sequence[tuple[Tensor, Tensor, Tensor]],
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Gradients of branches with the same keys: for each its pairs, lse and delta."""
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) * scale
    dp = torch.einsum("bihd,bjhd->bhij", do, v_all)
    p, ds = torch.zeros_like(scores), torch.zeros_like(scores)
    for pairs, lse, delta in branches:
        p_branch = (scores - lse[..., None]).exp().masked_fill(~(pairs & lse.isfinite()[..., None]), 0.0)
        p += p_branch
        ds += p_branch * (dp - delta[..., None])
    dq, dk, dv = into
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k_all) * scale)
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (-1, group)).sum(3) * scale)
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, do).unflatten(2, (-1, group)).sum(3))


# Lists. What is of documents counts from the beginning of aligned buffers.


def tile_bits(
    indices: Tensor, *, size: int, num_keys: int, entries: bool, documents: Documents | None = None
) -> Tensor:
    if documents is not None:
        first = documents.bounds[ENTRY if entries else KEY, documents.tiles[DOCUMENT]] // size
        indices = torch.where(indices < 0, indices, indices + first[:, None])
    return model.tile_bits(indices, size=size, num_keys=num_keys)


def transposed_lists(
    bits: Tensor, heads: int, keys: Keys, *, rows: int, shifts: Tensor | None = None, **sizes: Any
) -> model.Lists:
    positions = sizes.pop("first_row", 0) + torch.arange(sizes["num_rows"])
    if shifts is not None:
        positions = torch.arange(sizes["num_rows"]) + shifts.repeat_interleave(rows)
    return model.transposed_lists(bits, heads, keys_of_model(keys), rows=rows, positions=positions, **sizes)


def transposed_prefix_lists(
    batch: int,
    heads: int,
    keys: Keys,
    *,
    width: int,
    rows: int,
    num_keys: int,
    num_rows: int,
    device: torch.device,
    first_row: int = 0,
    documents: Documents | None = None,
) -> model.Lists:
    sizes = {"width": width, "rows": rows, "num_keys": num_keys, "num_rows": num_rows}
    if documents is None:
        return model.transposed_prefix_lists(batch, heads, keys_of_model(keys), **sizes, first_row=first_row)
    # Every tile chooses the blocks of its document
    blocks = torch.arange(-(-num_keys // width))
    of_block = torch.searchsorted(documents.bounds[ENTRY, :-1].contiguous(), blocks * width, right=True) - 1
    of_tile = documents.tiles[DOCUMENT].repeat_interleave(documents.tile // rows)
    chosen = torch.where(of_tile[:, None] == of_block, blocks, -1).expand(batch, 1, -1, -1)
    bits = model.tile_bits(chosen, size=width, num_keys=num_keys)
    # Rows behind a document stand where its last one stands, tiles of such rows before everything
    end = (documents.bounds[ROW] + documents.bounds[LENGTH])[of_tile].repeat_interleave(rows)
    row = torch.arange(num_rows)
    last = torch.minimum(row, end - 1)
    positions = last + documents.shifts.repeat_interleave(documents.tile)
    unused = row // rows * rows >= end
    positions = positions.masked_fill(unused, -1)
    lists = range(len(blocks))
    return model.transposed_lists(
        bits, heads, keys_of_model(keys), size=width, blocks=lists, positions=positions, **sizes
    )


def keys_of_model(keys: Keys) -> model.Keys:
    return model.Keys(keys.length, keys.stride, keys.causal)


# Gates, sums, pooling


def gate_gradients(
    do: Tensor,
    outputs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    q: Tensor,
    gates: Tensor | None,
    projected: bool,
    rows: Tensor | None = None,
) -> GateResults:
    given = gates is not None and not projected
    g = torch.full((*do.shape[:3], 3), 1 / 3, dtype=do.dtype) if gates is None else gates.to(do.dtype)
    aligned = outputs[0].shape[1]
    lse = torch.full((3, *lses[0].shape), torch.inf, dtype=do.dtype)
    delta = torch.zeros_like(lse)
    dots, weighted = [], [torch.zeros_like(o) for o in outputs]
    to = torch.arange(do.shape[1]) if rows is None else rows
    used = to >= 0
    assert bool((to < aligned).all())
    for b, (o, old) in enumerate(zip(outputs, lses, strict=True)):
        of_tokens = o[:, to.clamp(min=0)].masked_fill(~used[None, :, None, None], 0.0)
        dots.append((do * of_tokens).sum(-1))
        shifted = old[..., to[used]] - (0 if given else torch.log(g[..., b]).transpose(1, 2)[..., used])
        lse[b][..., to[used]] = shifted
        of_do = dots[-1] * g[..., b] if given else dots[-1]
        delta[b][..., to[used]] = of_do.transpose(1, 2)[..., used]
        weighted[b][:, to[used]] = (do * g[..., b : b + 1])[:, used]
    d_gates = torch.stack(dots, -1)
    logits = d_gates * g * (1 - g) if projected else None
    weight = None if logits is None else torch.einsum("bnhg,bnhd->hgd", logits, q)
    return GateResults(lse, delta, weighted if given else None, logits, d_gates if given else None, weight)


def to_tokens(x: Tensor, documents: Documents | None) -> Tensor:
    return x if documents is None else documents.to_tokens(x, 1, 0.0)


def to_keys(x: Tensor, documents: Documents | None) -> Tensor:
    if documents is None:
        return x
    rows = documents.key_rows
    return x.index_select(1, rows.clamp(min=0)).masked_fill((rows < 0)[:, None, None], 0.0)


def query_gradients(dq: Tensor, terms: QueryTerms, *, documents: Documents | None = None) -> None:
    total = sum((to_tokens(term, documents) for term in terms.branches), torch.zeros_like(dq))
    if terms.logits is not None and terms.gate_proj_weight is not None:
        total = total + torch.einsum("bnhg,hgd->bnhd", terms.logits, terms.gate_proj_weight)
    dq.copy_(total)


def key_gradients(
    dk: Tensor,
    dv: Tensor,
    k_terms: Sequence[Tensor],
    v_terms: Sequence[Tensor],
    *,
    entries: tuple[Tensor, Tensor] | None,
    keys: Keys,
    documents: Documents | None = None,
) -> None:
    for i, (target, terms) in enumerate(((dk, k_terms), (dv, v_terms))):
        total = torch.zeros_like(target)
        for term in terms:
            of_keys = to_keys(term, documents)
            total[:, total.shape[1] - of_keys.shape[1] :] += of_keys
        if entries is not None:
            start, exists = places_of_entries(entries[i].shape[1], target.shape[1], keys, documents)
            tokens = (start[exists, None] + torch.arange(keys.length)).flatten()
            total.index_add_(
                1, tokens, (entries[i][:, exists] / keys.length).repeat_interleave(keys.length, 1).to(total)
            )
        target.copy_(total)


def places_of_entries(entries: int, tokens: int, keys: Keys, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """The first token of each entry, and whether there is such an entry."""
    entry = torch.arange(entries)
    if documents is None:
        return entry * keys.stride, entry * keys.stride + keys.length <= tokens
    first, token = documents.bounds[ENTRY, :-1].contiguous(), documents.bounds[TOKEN]
    document = torch.searchsorted(first, entry, right=True) - 1
    start = token[document] + (entry - first[document]) * keys.stride
    return start, start + keys.length <= (token + documents.bounds[LENGTH])[document]


def block_means(
    k: Tensor, v: Tensor, length: int, stride: int, dtype: torch.dtype, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    if documents is None:
        k_mean, v_mean = (x.unfold(1, length, stride).mean(-1).to(dtype) for x in (k, v))
        return k_mean, v_mean
    pooled = [x.new_zeros((1, documents.num_entries, *x.shape[2:]), dtype=dtype) for x in (k, v)]
    for i in range(documents.bounds.shape[1] - 1):
        first, count = int(documents.bounds[TOKEN, i]), int(documents.bounds[LENGTH, i])
        if count >= length:
            for target, x in zip(pooled, (k, v), strict=True):
                means = x[:, first : first + count].unfold(1, length, stride).mean(-1)
                start = int(documents.bounds[ENTRY, i])
                target[:, start : start + means.shape[1]] = means
    return pooled[0], pooled[1]


# Packed documents


def lay_out(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, tile: int, step: int, length: int, stride: int
) -> tuple[Documents, tuple[Tensor, Tensor, Tensor]]:
    queries, tokens, docs = q.shape[1], k.shape[1], packed.num_documents
    num_tiles = documents.query_tiles(queries, docs, tile, step, continues=packed.continues)
    key_tiles, num_entries = documents.sizes(tokens, docs, tile, stride)
    bounds = bounds_of(packed, tile=tile, step=step, length=length, stride=stride)
    tiles = torch.zeros((3, num_tiles), dtype=torch.int32)
    tiles[DOCUMENT] = -1
    rows, key_rows, positions = (torch.full((n,), -1, dtype=torch.int32) for n in (queries, tokens, num_tiles * tile))
    for i in range(docs):
        token, _, row, entry, _, count, key, query, start = bounds[:, i].tolist()
        mine = slice(int(bounds[TILE, i]), int(bounds[TILE, i + 1]))
        tiles[DOCUMENT, mine], tiles[SHIFT, mine], tiles[KEY_SHIFT, mine] = i, entry * stride - row, key - row
        each = torch.arange(count, dtype=torch.int32)
        rows[query : query + count - start] = row + each[start:]
        key_rows[token : token + count] = key + each
        positions[row + start : row + count] = key + each[start:]
    sizes = key_tiles * tile, num_entries, tokens // stride
    made = Documents(tile, length, stride, packed, bounds, tiles, rows, key_rows, positions, *sizes)
    aligned = align_rows(made, k, v, q)
    return made, (aligned[2], aligned[0], aligned[1])


def bounds_of(packed: Packed, *, tile: int, step: int, length: int, stride: int) -> Tensor:
    bounds = torch.zeros((NUM_BOUNDS, packed.num_documents + 1), dtype=torch.int32)
    of_keys = packed.cu_seqlens if packed.cu_seqlens_k is None else packed.cu_seqlens_k
    bounds[TOKEN], bounds[QUERY] = of_keys, packed.cu_seqlens
    for i in range(packed.num_documents):
        queries, keys = (int(x[i + 1] - x[i]) for x in (packed.cu_seqlens, of_keys))
        queries = queries if packed.counts is None else min(queries, int(packed.counts[i]))
        start = keys - queries if packed.start is None else int(packed.start[i])
        count, first = start + queries, start if queries == 0 else start // step * step
        entries, public = (max(0, (n - length) // stride + 1) for n in (count, keys))
        bounds[LENGTH, i], bounds[START, i] = count, start
        for name, more in (
            (TILE, -(-(count - first) // tile)),
            (ENTRY, -(-entries // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT),
            (PUBLIC_ENTRY, public),
            (KEY, -(-count // tile) * tile),
        ):
            bounds[name, i + 1] = bounds[name, i] + more
        bounds[ROW, i] = bounds[TILE, i] * tile - first
    bounds[ROW, -1] = bounds[TILE, -1] * tile
    return bounds


def align_rows(
    made: Documents, k: Tensor | None, v: Tensor | None, q: Tensor | None, *, record: bool = False
) -> list[Tensor]:
    assert not record
    aligned = []
    for x in (k, v):
        if x is not None:
            aligned.append(x.new_zeros((1, made.num_keys, *x.shape[2:])))
            for first, key, count in made.bounds[[TOKEN, KEY, LENGTH], :-1].T.tolist():
                aligned[-1][:, key : key + count] = x[:, first : first + count]
    if q is not None:
        aligned.append(q.new_zeros((1, made.num_tiles * made.tile, *q.shape[2:])))
        for query, row, start, count in made.bounds[[QUERY, ROW, START, LENGTH], :-1].T.tolist():
            aligned[-1][:, row + start : row + count] = q[:, query : query + count - start]
    return aligned


# What the forward keeps


def saved(inputs: NSAInputs, config: NSAConfig, aux: NSAAux) -> forward.Saved:
    """What the forward keeps, from what the reference returns."""
    outputs, lses = (aux.o_cmp, aux.o_slc, aux.o_win), (aux.lse_cmp, aux.lse_slc, aux.lse_win)
    k_cmp, v_cmp, gates, indices, cmp_indices = aux.k_cmp, aux.v_cmp, aux.gates, aux.indices, aux.cmp_indices
    if inputs.cu_seqlens is None:
        if cmp_indices is not None and cmp_indices.shape[-1] * config.n_block_size >= k_cmp.shape[1]:
            cmp_indices = None  # all blocks
    else:
        length, stride = config.compress_block_size, config.stride
        rows = (x[None] for x in (inputs.q, inputs.k, inputs.v))
        tile, packed = config.q_tile_size, Packed(inputs.cu_seqlens)
        made, _ = lay_out(*rows, packed, tile=tile, step=tile, length=length, stride=stride)
        # Only attention to the window leaves out rows that are not used
        unused = (3.0, 3.0, torch.nan)
        outputs = tuple(spread(x, made, 0, fill) for x, fill in zip(outputs, unused, strict=True))
        lses = tuple(spread(x, made, 1, fill) for x, fill in zip(lses, unused, strict=True))
        _, exists = places_of_entries(made.num_entries, len(inputs.q), Keys(length, stride), made)
        k_cmp, v_cmp = (align_entries(x, exists) for x in (k_cmp, v_cmp))
        gates, indices = gates[None], indices[None]
        cmp_indices = None if cmp_indices is None else cmp_indices[None]
    given = inputs.k_cmp is not None
    return forward.Saved(
        None if given else k_cmp,
        None if given else v_cmp,
        indices,
        cmp_indices,
        gates if inputs.gate_proj_weight is not None else None,
        *outputs,
        *lses,
    )


def spread(packed: Tensor, made: Documents, dim: int, fill: float) -> Tensor:
    """Rows along `dim` as aligned ones `[1,...]`."""
    shape = list(packed.shape)
    shape[dim] = made.num_tiles * made.tile
    used = made.rows >= 0
    places, values = made.rows[used].long(), packed.index_select(dim, used.nonzero()[:, 0])
    return packed.new_full(shape, fill).index_copy(dim, places, values)[None]


def align_entries(packed: Tensor, exists: Tensor) -> Tensor:
    """Entries without gaps as aligned ones `[1,...]`."""
    aligned = packed.new_zeros((len(exists), *packed.shape[1:]))
    aligned[exists] = packed[: int(exists.sum())]
    return aligned[None]
