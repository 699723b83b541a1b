"""PyTorch twins of the kernels of NSA, so that the steps of forward.py and backward.py run and are checked on a CPU.

`install` puts them where forward.py, backward.py and documents.py call kernels; everything between the calls is real.
Attention is masked attention in fp64, gradients are its gradients, and in place of block lists are the pairs that lists
of these arguments stand for (`Pairs`). Which blocks a tile or a token selects is computed from the scores of
nsa.reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, call, forward
from cute_kernels.attend.window_backward import LocalSelected
from cute_kernels.attend.window_dq_combine import WindowQueries
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.fa4.rules import Rules
from cute_kernels.gate.backward import GateResults
from cute_kernels.gate.forward import Gating
from cute_kernels.gate.sums import QueryTerms
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool import compress, documents
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
from cute_kernels.select.topk import Blocks
from nsa import NSAConfig, reference
from nsa.inputs import NSAAux, NSAInputs

TILE_KEYS = 64
"""Rows and keys of a tile of the kernels without atomics."""


def install(patch: pytest.MonkeyPatch, rules: Rules) -> None:
    """Twins in place of what a backward launches, on a GPU with these rules."""
    patch.setattr(fa4_rules, "rules", lambda _: rules)
    for name in ("compressed_backward", "selected_backward", "dense_backward", "window_backward"):
        patch.setattr(fa4, name, globals()[name])
    for name in (
        "block_means",
        "gate_gradients",
        "key_gradients",
        "kv_outer_backward",
        "query_gradients",
        "row_statistics",
        "tile_bits",
        "transposed_lists",
        "transposed_prefix_lists",
    ):
        patch.setattr(backward, name, globals()[name])
    patch.setattr(backward, "compressed_backward", atomic_free_compressed)
    patch.setattr(backward, "window_backward", atomic_free_window)
    patch.setattr(backward, "selected_backward", atomic_free_selected)
    patch.setattr(call, "chosen_lists", chosen_lists)
    patch.setattr(call, "lay_out", lay_out)
    patch.setattr(documents, "_align_rows", align_rows)
    patch.setattr(documents, "bounds_of", bounds_of)


def install_forward(patch: pytest.MonkeyPatch, rules: Rules, config: NSAConfig) -> None:
    """The same for a forward of sequences. Args: `config`: of the calls, for the selection of blocks by reference."""
    patch.setattr(fa4_rules, "rules", lambda _: rules)
    for name in ("compressed", "selected", "window"):
        patch.setattr(fa4, name, globals()[name])
    for name in ("gated_sum", "prefix_lists", "tile_means", "token_topk"):
        patch.setattr(forward, name, globals()[name])
    patch.setattr(forward, "tile_topk", partial(tile_topk, config))
    patch.setattr(forward, "kv_outer_forward", token_attention)
    patch.setattr(forward, "query_outer_forward", token_attention)
    patch.setattr(compress, "block_means", block_means)
    patch.setattr(call, "chosen_lists", chosen_lists)


# Attention over pairs


def attend(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, scale: float, lse: bool = True) -> tuple[Tensor, Any]:
    """o `[B,N,H,D_v]` and lse `[B,H,N]` over pairs that broadcast to `[B,H,N,keys]`; 0 and -inf without keys."""
    k, v = (x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * scale
    scores = scores.masked_fill(~pairs, -math.inf)
    o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), v)
    return o, scores.logsumexp(-1) if lse else None


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
    q, k, v, do = (x.double() for x in (q, k, v, do))
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


def differentiate(gradients: fa4.Gradients, pairs: Tensor, scale: float) -> None:
    of = gradients
    delta = (of.o.double() * of.do.double()).sum(-1).transpose(1, 2)
    add_pairs(of.q, of.k, of.v, of.do, [(pairs, of.lse, delta)], scale, (of.dq, of.dk, of.dv))


# Lists


class Pairs(NamedTuple):
    """In place of BlockLists."""

    chosen: Tensor
    """Keys in blocks that the row's tile chose, bool `[B,H,rows,keys]`."""
    seen: Tensor | None
    """Keys that the lists were built for each row to see, bool `[rows,keys]`; None: not checked."""
    rows: int
    width: int

    def among(self, seen: Tensor) -> Tensor:
        """The chosen pairs that attention, which masks by itself, sees."""
        assert self.seen is None or torch.equal(self.seen, seen), "lists and attention disagree on what rows see"
        return self.chosen & seen


def sees(row: Tensor, num_keys: int, length: int, stride: int, first_key: int = 0) -> Tensor:
    """Keys that have ended at tokens `row`, bool `[rows,keys]`."""
    return (first_key + torch.arange(num_keys)) * stride + length - 1 <= row[:, None]


def seen_by(row: Tensor, num_keys: int, keys: Keys) -> Tensor:
    return sees(row, num_keys, keys.length, keys.stride) | (not keys.causal)


def chosen_blocks(indices: Tensor, blocks: int) -> Tensor:
    """bool `[B,S,tiles,blocks]`."""
    chosen = torch.zeros((*indices.shape[:3], blocks + 1), dtype=torch.bool)
    return chosen.scatter_(3, indices.long().where(indices >= 0, blocks), True)[..., :blocks]


def by_pair(chosen: Tensor, heads: int, rows: int, size: int, num_rows: int, num_keys: int) -> Tensor:
    """The same for rows and keys, bool `[B,H,rows,keys]`."""
    pairs = chosen.repeat_interleave(rows, 2)[:, :, :num_rows].repeat_interleave(size, 3)[..., :num_keys]
    return pairs.repeat_interleave(heads // chosen.shape[1], 1)


def chosen_lists(
    indices: Tensor,
    heads: int,
    keys: Keys,
    *,
    size: int,
    width: int,
    rows: int,
    num_keys: int,
    rows_from: int,
    rows_to: int,
    entries: bool,
    documents: None,
) -> Pairs:
    assert entries == (keys.length > 1 or keys.stride > 1)
    row = torch.arange(rows_from, rows_to)
    chosen = by_pair(chosen_blocks(indices, -(-num_keys // size)), heads, rows, size, len(row), num_keys)
    return Pairs(chosen, seen_by(row, num_keys, keys), rows, width)


def prefix_lists(
    batch: int, heads: int, keys: Keys, *, num_keys: int, rows_from: int, rows_to: int, **sizes: Any
) -> Pairs:
    row = torch.arange(rows_from, rows_to)
    every = torch.ones((batch, heads, len(row), num_keys), dtype=torch.bool)
    return Pairs(every, seen_by(row, num_keys, keys), sizes["rows"], sizes["width"])


def tile_bits(
    indices: Tensor, *, size: int, num_keys: int, entries: bool, documents: Documents | None = None
) -> Tensor:
    """bool `[B,S,blocks,tiles]`; of documents, counted from the beginning of aligned buffers."""
    if documents is not None:
        first = documents.bounds[ENTRY if entries else KEY, documents.tiles[DOCUMENT]] // size
        indices = torch.where(indices < 0, indices, indices + first[:, None])
    return chosen_blocks(indices, -(-num_keys // size)).mT


def transposed_lists(
    bits: Tensor,
    heads: int,
    keys: Keys,
    *,
    size: int,
    width: int,
    rows: int,
    num_keys: int,
    num_rows: int,
    blocks: range,
    first_tile: int,
    first_row: int,
    shifts: Tensor | None,
) -> Pairs:
    """Those of a range of blocks of keys, and of the rows from `first_tile` on."""
    chosen = by_pair(bits.mT, heads, rows, size, num_rows, num_keys)
    seen = seen_by(first_row + torch.arange(num_rows), num_keys, keys)
    first, keys_of = first_tile * rows, slice(blocks.start * width, blocks.stop * width)
    chosen, seen = chosen[..., keys_of], seen[:, keys_of]
    assert not (chosen & seen)[:, :, :first].any(), "tiles before first_tile see a block"
    return Pairs(chosen[:, :, first:], seen[first:] if shifts is None else None, rows, width)


def transposed_prefix_lists(
    batch: int,
    heads: int,
    keys: Keys,
    *,
    num_keys: int,
    num_rows: int,
    first_row: int,
    documents: Documents | None,
    **sizes: Any,
) -> Pairs:
    if documents is None:
        return prefix_lists(
            batch, heads, keys, num_keys=num_keys, rows_from=first_row, rows_to=first_row + num_rows, **sizes
        )
    of_key = torch.searchsorted(documents.bounds[ENTRY, :-1].contiguous(), torch.arange(num_keys), right=True) - 1
    of_row = documents.tiles[DOCUMENT].repeat_interleave(documents.tile)
    return Pairs((of_row[:, None] == of_key).expand(batch, heads, -1, -1), None, sizes["rows"], sizes["width"])


# Selection


def tile_means(q: Tensor, tile: int, documents: None) -> Tensor:
    return torch.stack([part.mean(1) for part in q.split(tile, 1)], 1) if q.shape[1] else q


def tile_topk(
    config: NSAConfig, means: Tensor, k_cmp: Tensor, blocks: Blocks, *, tile: int, tokens: int, start: int, **_: Any
) -> Tensor:
    tiles = start // tile + torch.arange(means.shape[1])
    rows = tiles[:, None] * tile + torch.arange(tile)
    logits = means.transpose(1, 2) @ k_cmp.repeat_interleave(means.shape[2] // k_cmp.shape[2], 2).permute(0, 2, 3, 1)
    scored = reference.block_end(torch.arange(k_cmp.shape[1]), config) <= reference._last_token(rows, tokens)[:, None]
    scored |= not config.causal
    scores = logits * config.scale(means.shape[-1])
    if blocks.length != config.compress_block_size:  # of entries, not of tokens
        found = reference.select_cmp_blocks(scores, scored, rows, blocks.count, config)
    else:
        found = reference.select(scores, scored, rows, tokens, means.shape[2], config)
    return torch.nn.functional.pad(found, [0, blocks.count - found.shape[-1]], value=-1).int()


def token_topk(q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, *, start: int, documents: None) -> Tensor:
    rows, kv_heads = start + torch.arange(q.shape[1])[:, None], k_cmp.shape[2]
    tokens = start + q.shape[1]
    scores, scored = reference.score(q.transpose(1, 2), k_cmp.transpose(1, 2), rows, tokens, config)
    assert lse.shape == scores.shape[:3]
    found = reference.select(scores, scored, rows, tokens, kv_heads, config)
    return torch.nn.functional.pad(found, [0, config.num_selected_blocks - found.shape[-1]], value=-1).int()


# Attention


def compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Pairs | None,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    lse: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    seen = sees(first_row + torch.arange(q.shape[1]), k.shape[1], length, stride)
    return attend(q, k, v, seen if lists is None else lists.among(seen), scale, lse)


def selected(
    q: Tensor, k: Tensor, v: Tensor, lists: Pairs, *, causal: bool, scale: float, lse: bool, shifts: None
) -> tuple[Tensor, Tensor | None]:
    seen = sees(torch.arange(q.shape[1]) + k.shape[1] - q.shape[1], k.shape[1], 1, 1) | (not causal)
    return attend(q, k, v, lists.among(seen), scale, lse)


def window(
    q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    return attend(q, k, v, in_window(q, k, left, right), scale, lse)


def in_window(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    assert max(left, right) + max(q.shape[1], k.shape[1]) < 2**31, "FlashAttention-4 adds them in int32"
    row, key = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    return (key >= row - left) & (key <= row + right)


def compressed_backward(
    gradients: fa4.Gradients,
    lists: Pairs,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    rows, num_keys = gradients.q.shape[1], gradients.k.shape[1]
    shift = first_row if shifts is None else shifts.repeat_interleave(rows // len(shifts))
    differentiate(gradients, lists.among(sees(torch.arange(rows) + shift, num_keys, length, stride)), scale)


def selected_backward(
    gradients: fa4.Gradients,
    lists: Pairs,
    *,
    causal: bool,
    first_row: int,
    first_key: int,
    first_token: int,
    scale: float,
    shifts: Tensor | None,
) -> None:
    row = first_row + torch.arange(gradients.q.shape[1])
    row = row + (first_token if shifts is None else shifts.repeat_interleave(lists.rows)[row])
    seen = sees(row, gradients.k.shape[1], 1, 1, first_key) | (not causal)
    differentiate(gradients, lists.among(seen), scale)


def token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int,
    packed: None = None,
    init: int = 0,
    local: int = 0,
    gating: Gating | None = None,
    window: None = None,
) -> tuple[Tensor, Tensor]:
    """Token mode's selected branch, which reads no key behind the last token."""
    tokens = first_token + q.shape[1]
    assert k.shape[1] >= tokens
    row, blocks = torch.arange(first_token, tokens)[:, None], -(-tokens // size)
    chosen = chosen_blocks(indices.where(indices < blocks, -1), blocks)
    for forced in (torch.arange(blocks) < init, (row // size - torch.arange(blocks)).clamp(min=-1) < local):
        held = (forced & (torch.arange(blocks) <= row // size)).expand_as(chosen)
        assert bool(chosen[held].all()), "forced blocks are selected"
    pairs = by_pair(chosen, q.shape[2], 1, size, len(row), tokens) & (torch.arange(tokens) <= row)
    o, lse = attend(q, k[:, :tokens], v[:, :tokens], pairs, scale)
    if gating is None:
        return o, lse
    assert gating.out.shape == o.shape
    gated_sum(
        gating.o_cmp, o, gating.o_win, gating.out, q=q, gate_proj_weight=gating.gate_proj_weight, gates=gating.gates
    )
    if gating.o_slc is not None:
        gating.o_slc.copy_(o)
    return (gating.out if gating.o_slc is None else gating.o_slc), lse


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
    seen = in_window(gradients.q, gradients.k, left, right)
    assert bool(seen.any(0).all()), "FlashAttention-4 may not write dk and dv of a tile of keys that no row sees"
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
    tokens = first_token + q.shape[1]
    row, blocks = torch.arange(first_token, tokens)[:, None], -(-tokens // size)
    chosen = chosen_blocks(indices.where(indices <= row // size - local, -1), blocks)
    pairs = by_pair(chosen, q.shape[2], 1, size, len(row), tokens) & (torch.arange(tokens) <= row)
    own = torch.empty_like(into[0])
    add_pairs(q, k, v, do, [(pairs, lse, delta)], scale, (own, *into[1:]))
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
    lists: Pairs,
    bits: Tensor,
    *,
    size: int,
    keys: Keys,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    first_token: int,
    shifts: None,
) -> None:
    """dq by the lists, dk and dv by the bits."""
    assert lists.width == TILE_KEYS
    pairs = lists.among(seen_by(first_token + torch.arange(q.shape[1]), k.shape[1], keys))
    by_bits = by_pair(bits.mT, q.shape[2], lists.rows, size, q.shape[1], k.shape[1])
    assert torch.equal(lists.chosen, by_bits)
    add_pairs(q, k, v, do, [(pairs, lse, delta)], scale, into)


# Gates, sums, pooling


def gated_sum(
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    out: Tensor,
    *,
    q: Tensor,
    gate_proj_weight: Tensor | None,
    gates: Tensor | None,
    rows: None = None,
) -> Tensor | None:
    """Gates that were used, if there are any."""
    if gate_proj_weight is not None:
        projected = torch.einsum("bthd,hcd->bthc", q.double(), gate_proj_weight.double()).sigmoid()
        gates = projected.float() if gates is None else gates.copy_(projected)
    of = torch.full((1, 1, 1, 3), 1 / 3) if gates is None else gates
    out.copy_(sum(o * g[..., None] for o, g in zip((o_cmp, o_slc, o_win), of.unbind(-1), strict=True)))
    return gates


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
