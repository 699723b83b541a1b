"""PyTorch twins of the kernels of attention per token, with their arguments, so that what calls them runs on a CPU.

`install` puts them in place of the compiled kernels; worklists, chunks, slices and buffers between the calls are real.
They round where the kernels round: P and dS, partials of o and dQ, results. Else they compute in fp64: the order in
which BLAS sums depends on the CPU and on where a row lies, and may change the last bit of an fp32 sum; of fp64 sums
rounded to fp32 it changes about one in 2^28.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.attend import combine, forced, kv_outer, kv_outer_backward, query_outer
from cute_kernels.gate import forward as gate
from cute_kernels.lists import worklist
from cute_kernels.lists.worklist import BLOCK, COUNT, FIRST, ROWS, SPLITS, WHOLE
from cute_kernels.pool import documents
from cute_kernels.pool.documents import KEY, LENGTH, TOKEN
from tests.support import backward_twins


class Twin(NamedTuple):
    """In place of jit.Kernel."""

    run: Any


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "_bounds", lambda *how: Twin(lambda *x: add_up(how, *x)))
    patch.setattr(worklist, "_mark", lambda size, _, *forced: Twin(lambda *x: mark(size, *x, *forced)))
    patch.setattr(worklist, "_count", lambda: Twin(count))
    patch.setattr(worklist, "_list", lambda: Twin(list_rows))
    patch.setattr(worklist, "_cut", lambda: Twin(cut_tiles))
    patch.setattr(kv_outer, "_compiled", lambda *how: Twin(lambda *x: kv_outer_forward_twin(how, *x)))
    patch.setattr(kv_outer_backward, "_compiled", lambda *how: Twin(lambda *x: kv_outer_backward_twin(how, *x)))
    patch.setattr(query_outer, "_compiled", lambda *how: Twin(lambda *x: query_outer_twin(how, *x)))
    patch.setattr(forced, "_forced", lambda *how: Twin(lambda *x: attend_forced(how, *x)))
    patch.setattr(combine, "_combine", combine_twin)
    patch.setattr(combine, "_combine_and_gate", lambda *_: Twin(partial(combine_and_gate, combine_partials)))
    patch.setattr(combine, "_combine_query_gradients", lambda *how: Twin(partial(combine_query_gradients, how[3])))
    patch.setattr(forced, "_forced_combine_and_gate", lambda *how: Twin(lambda *x: forced_combine_and_gate(how, *x)))
    patch.setattr(gate, "_compiled", lambda *_: Twin(gated_sum))
    patch.setattr(kv_outer_backward, "_combine_dkv", lambda _, size, packed: Twin(lambda *x: combine_dkv(size, *x)))


def add_up(how: tuple[Any, ...], *packed_and_bounds: Any) -> None:
    tile, step, length, stride = how[:4]
    *given, bounds = packed_and_bounds
    packed = documents.Packed(*given)
    bounds.copy_(backward_twins.bounds_of(packed, tile=tile, step=step, length=length, stride=stride))


# Worklist


def mark(
    size: int,
    indices: Tensor,
    slot_blocks: Tensor,
    bits: Tensor,
    bounds: Tensor | None,
    positions: Tensor | None,
    first_token: int,
    init: int = 0,
    local: int = 0,
) -> None:
    tokens = indices.shape[2]
    position = torch.arange(first_token, first_token + tokens)
    before, length = torch.zeros_like(position), torch.full_like(position, first_token + tokens)
    if bounds is not None and positions is not None:
        position = positions[position].long()
        document = (torch.searchsorted(bounds[TOKEN, :-1].long().contiguous(), position, right=True) - 1).clamp(min=0)
        position = position - bounds[TOKEN, document]
        before, length = bounds[KEY, document] // size, bounds[LENGTH, document]
    position, before, length = (x[:, None] for x in (position, before, length))
    is_selected = (indices >= init) & (indices <= position.div(size, rounding_mode="floor") - local)
    is_selected &= position < length
    slot_blocks.copy_(torch.where(is_selected, before + indices, -1))
    for b, h, token, slot in is_selected.nonzero().tolist():
        word = bits[b, h, slot_blocks[b, h, token, slot], token // 32 : token // 32 + 1]
        word |= (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)


def popcount(x: Tensor) -> Tensor:
    return ((x.long()[..., None] >> torch.arange(32)) & 1).sum(-1)


def count(bits: Tensor, before: Tensor, counts: Tensor, min_rows: int) -> None:
    ones = popcount(bits)
    before.copy_(ones.cumsum(-1) - ones)
    rows = ones.sum(-1)
    counts[:, :, ROWS] = rows
    counts[:, :, SPLITS] = torch.where(rows // min_rows > 1, rows // min_rows, 0)
    counts[:, :, WHOLE] = rows // min_rows <= 1


def list_rows(
    slot_blocks: Tensor, bits: Tensor, before: Tensor, counts: Tensor, cum_counts: Tensor, query_rows: Tensor
) -> None:
    slots = slot_blocks.shape[3]
    for b, h, token, slot in (slot_blocks >= 0).nonzero().tolist():
        block = b, h, slot_blocks[b, h, token, slot]
        lower = popcount(bits[block][token // 32] & ((1 << token % 32) - 1))
        first = cum_counts[b, h, ROWS, block[2]] - counts[b, h, ROWS, block[2]]
        query_rows[b, h, first + before[block][token // 32] + lower] = token * slots + slot


def cut_tiles(counts: Tensor, cum_counts: Tensor, work_tiles: Tensor) -> None:
    for b, h, block in torch.ones(*counts.shape[:2], counts.shape[3]).nonzero().tolist():
        rows, tiles, _ = counts[b, h, :, block].tolist()
        first, first_tile = int(cum_counts[b, h, ROWS, block]) - rows, int(cum_counts[b, h, SPLITS, block]) - tiles
        if tiles == 0:
            tiles, first_tile = 1, int(cum_counts[b, h, SPLITS, -1] + cum_counts[b, h, WHOLE, block]) - 1
        for i in range(tiles):
            n = rows // tiles + (i < rows % tiles)
            work_tiles[b, h, :, first_tile + i] = torch.tensor([block, first, n])
            first += n


# Attention


class WorkTile(NamedTuple):
    """What one CTA has."""

    b: int
    h: int
    index: int
    is_split: bool
    query_rows: Tensor
    tokens: Tensor
    """Rows of q."""
    positions: Tensor
    """Of these tokens."""
    first_key: int
    end: int
    """Of the block, or of its document."""


def block_bounds(block: int, size: int, keys: int, bounds: Tensor | None) -> tuple[int, int]:
    first, end = block * size, keys
    if bounds is not None:
        document = int(torch.searchsorted(bounds[KEY, :-1].contiguous(), first, right=True)) - 1
        start = int(bounds[TOKEN, document])
        first, end = start + first - int(bounds[KEY, document]), start + int(bounds[LENGTH, document])
    return first, max(first, min(end, first + size))


def tiles_of_ctas(
    how: tuple[Any, ...],
    keys: int,
    query_rows: Tensor,
    work_tiles: Tensor,
    cum_counts: Tensor,
    bounds: Tensor | None,
    positions: Tensor | None,
    first: int,
) -> list[WorkTile]:
    slots, size = how[3:5]
    made = []
    for b in range(work_tiles.shape[0]):
        for h in range(work_tiles.shape[1]):
            splits = int(cum_counts[b, h, SPLITS, -1])
            for index in range(splits + int(cum_counts[b, h, WHOLE, -1])):
                start, n = int(work_tiles[b, h, FIRST, index]), int(work_tiles[b, h, COUNT, index])
                rows = query_rows[b, h, start : start + n].long()
                span = block_bounds(int(work_tiles[b, h, BLOCK, index]), size, keys, bounds)
                at = first + rows // slots
                at = at if positions is None else positions[at].long()
                made.append(WorkTile(b, h, index, index < splits, rows, rows // slots, at, *span))
    return made


def kv_outer_forward_twin(
    how: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_rows: Tensor,
    work_tiles: Tensor,
    cum_counts: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    positions: Tensor | None,
    first_token: int,
    scale: float,
) -> None:
    group = how[2]
    for x in tiles_of_ctas(how, k.shape[1], query_rows, work_tiles, cum_counts, bounds, positions, first_token):
        keys = torch.arange(x.first_key, x.end)
        rows = q[x.b, x.tokens, x.h * group : (x.h + 1) * group].double()
        logits = rows @ k[x.b, keys, x.h].double().T * scale
        logits = logits.masked_fill((keys > x.positions[:, None])[:, None], -math.inf)
        lse[x.b, x.h, x.query_rows] = logits.logsumexp(-1).float()
        p = logits.softmax(-1).to(q.dtype).double()
        o[x.b, x.h, x.query_rows] = (p @ v[x.b, keys, x.h].double()).to(q.dtype)


def query_outer_twin(
    how: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    positions: Tensor | None,
    first_token: int,
    scale: float,
) -> None:
    group, size = how[2], how[4]
    batch, kv_heads, tokens, _ = indices.shape
    blocks = torch.empty_like(indices)
    most = -(-k.shape[1] // size) + (0 if bounds is None else bounds.shape[1])
    bits = torch.zeros((batch, kv_heads, most, -(-tokens // 32)), dtype=torch.int32)
    mark(size, indices, blocks, bits, bounds, positions, first_token)
    visible = torch.zeros((batch, kv_heads, tokens, k.shape[1]), dtype=torch.bool)
    for b, h, token, slot in (blocks >= 0).nonzero().tolist():
        first, end = block_bounds(int(blocks[b, h, token, slot]), size, k.shape[1], bounds)
        at = first_token + token if positions is None else int(positions[token])
        visible[b, h, token, first : min(first + size, end, at + 1)] = True
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale
    logits = logits.masked_fill(~visible.repeat_interleave(group, 1), -math.inf)
    lse.copy_(logits.logsumexp(-1))
    p = (logits - lse[..., None].nan_to_num(0, 0, 0)).exp().to(q.dtype).double()
    o.copy_(torch.einsum("bhij,bjhd->bihd", p, values))


def attend_forced(
    how: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    first_token: int,
    scale: float,
) -> None:
    """Row by row; tokens of no document are left as they are."""
    _, _, group, size, init, local = how[:6]
    for token in range(q.shape[1]):
        position, start = first_token + token, 0
        if bounds is not None:
            document = int(torch.searchsorted(bounds[TOKEN, :-1].contiguous(), token, right=True)) - 1
            start = int(bounds[TOKEN, document])
            position -= start
            if position >= bounds[LENGTH, document]:
                continue
        own = position // size
        forced = sorted({*range(min(init, own + 1)), *range(max(own - local + 1, 0), own + 1)})
        keys = torch.cat([torch.arange(block * size, (block + 1) * size) for block in forced])
        keys = start + keys[keys <= position]
        for b, h in itertools.product(range(k.shape[0]), range(k.shape[2])):
            heads = slice(h * group, (h + 1) * group)
            logits = q[b, token, heads].double() @ k[b, keys, h].double().T * scale
            lse[b, heads, token] = logits.logsumexp(-1)
            p = logits.softmax(-1).to(q.dtype).double()
            o[b, token, heads] = (p @ v[b, keys, h].double()).to(o.dtype)


def combine_twin(*_: Any, weighted: bool, partials_per_slot: int, accumulate: bool) -> Twin:
    twin = accumulate_partials if accumulate else combine_partials
    return Twin(partial(twin, partials_per_slot))


def accumulate_partials(
    per_slot: int, slot_blocks: Tensor, partials: Tensor, lse_partial: Tensor, x: Tensor, lse: Tensor
) -> None:
    """What x and lse hold as one slot more, of a block that is not read."""
    _, heads, tokens, slots = slot_blocks.shape
    group = partials.shape[3]

    def with_slot(slots_x: Tensor, rows_x: Tensor) -> Tensor:
        rows = rows_x.unflatten(2, (heads, group)).transpose(1, 2).unsqueeze(3)
        return torch.cat([rows, slots_x.unflatten(2, (tokens, slots))], 3).flatten(2, 3)

    holds = (lse[:, ::group] > -math.inf)[..., None]
    with_held = torch.cat([holds.int() - 1, slot_blocks], 3)
    values = with_slot(partials, x.masked_fill((lse == -math.inf).transpose(1, 2)[..., None], 0))
    combine_partials(per_slot, with_held, values, with_slot(lse_partial, lse.transpose(1, 2)), x, lse)


def combine_partials(
    per_slot: int, slot_blocks: Tensor, partials: Tensor, lse_partial: Tensor | None, x: Tensor, lse: Tensor | None
) -> None:
    batch, heads, tokens, slots = slot_blocks.shape
    group = partials.shape[3]
    present = (slot_blocks >= 0)[..., None]
    values = partials.unflatten(2, (tokens, slots, per_slot)).float().masked_fill(~present[..., None, None], 0).sum(4)
    if lse_partial is None or lse is None:
        total = values.sum(3)
    else:
        lses = lse_partial.unflatten(2, (tokens, slots)).masked_fill(~present, -math.inf)
        sums = lses.logsumexp(3)
        lse.copy_(sums.transpose(2, 3).reshape(batch, heads * group, tokens))
        weights = (lses - sums[:, :, :, None]).exp().masked_fill(~present, 0)
        total = (weights[..., None] * values).sum(3)
    x.copy_(total.transpose(1, 2).reshape(batch, tokens, heads * group, -1).to(x.dtype))


def combine_query_gradients(
    per_slot: int, slot_blocks: Tensor, partials: Tensor, dq: Tensor, *terms_and_gates: Tensor | None
) -> None:
    *terms, logits, weight = terms_and_gates
    selected = torch.empty(dq.shape)
    combine_partials(per_slot, slot_blocks, partials, None, selected, None)
    total = sum((x.double() for x in terms if x is not None), selected.double())
    if logits is not None and weight is not None:
        total = total + torch.einsum("bthg,hgd->bthd", logits.double(), weight.double())
    dq.copy_(total)


def forced_combine_and_gate(
    how: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_blocks: Tensor,
    partials: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    *rest: Any,
) -> None:
    *rest, first_token, scale = rest
    dim, _, *options = how[:6]
    attend_forced((dim, dim, *options), q, k, v, out, lse, None, first_token, scale)
    combine_and_gate(accumulate_partials, slot_blocks, partials, lse_partial, out, lse, q, weight, *rest)


def combine_and_gate(
    add: Callable[..., None],
    slot_blocks: Tensor,
    partials: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor | None,
    weight: Tensor | None,
    gates: Tensor | None,
    o_cmp: Tensor,
    o_win: Tensor,
    o_slc: Tensor | None,
) -> None:
    add(1, slot_blocks, partials, lse_partial, out, lse)
    if o_slc is not None:
        o_slc.copy_(out)
    if weight is not None and gates is None:
        gates = torch.empty((*out.shape[:3], 3))
    gated_sum(q, weight, gates, None, o_cmp, out, o_win, out)


def gated_sum(
    q: Tensor | None,
    weight: Tensor | None,
    gates: Tensor | None,
    rows: Tensor | None,
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    out: Tensor,
) -> None:
    """Of sequences; packs are not gated here."""
    assert rows is None
    if q is not None and weight is not None and gates is not None:
        gates.copy_(torch.einsum("bthd,hcd->bthc", q.double(), weight.double()).sigmoid())
    of = torch.full((1, 1, 1, 3), 1 / 3) if gates is None else gates.float()
    out.copy_(sum(o.float() * g[..., None] for o, g in zip((o_cmp, o_slc, o_win), of.unbind(-1), strict=True)))


def kv_outer_backward_twin(
    how: tuple[Any, ...],
    q: Tensor,
    do: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    query_rows: Tensor,
    work_tiles: Tensor,
    cum_counts: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dk_parts: Tensor,
    dv_parts: Tensor,
    bounds: Tensor | None,
    positions: Tensor | None,
    first_token: int,
    scale: float,
) -> None:
    group, size = how[2], how[4]
    key_tiles = size // 64
    for x in tiles_of_ctas(how, k.shape[1], query_rows, work_tiles, cum_counts, bounds, positions, first_token):
        heads = slice(x.h * group, (x.h + 1) * group)
        sees, gives = (y[x.b, x.tokens, heads].double() for y in (q, do))
        row_lse, row_delta = (y[x.b, heads, x.tokens].T[..., None] for y in (lse, delta))
        for key_tile in range(key_tiles):
            first = x.first_key + key_tile * 64
            keys = torch.arange(first, max(first, min(first + 64, x.end)))
            some_k, some_v = (y[x.b, keys, x.h].double() for y in (k, v))
            seen = (keys <= x.positions[:, None])[:, None] & row_lse.isfinite()
            p = (sees @ some_k.T * scale - row_lse).masked_fill(~seen, -math.inf).exp()
            ds = (p * (gives @ some_v.T - row_delta)).masked_fill(~seen, 0).to(q.dtype).double()
            p = p.to(q.dtype).double()
            dq[x.b, x.h, x.query_rows * key_tiles + key_tile] = (ds @ some_k * scale).to(q.dtype)
            for y, y_parts, part in (
                (dk, dk_parts, (torch.einsum("tgk,tgd->kd", ds, sees) * scale).float()),
                (dv, dv_parts, torch.einsum("tgk,tgd->kd", p, gives).float()),
            ):
                if x.is_split:
                    y_parts[x.b, x.h, x.index, key_tile * 64 : key_tile * 64 + len(keys)] = part
                else:
                    y[x.b, keys, x.h] += part


def combine_dkv(
    size: int, counts: Tensor, cum_counts: Tensor, work_tiles: Tensor, parts: Tensor, y: Tensor, bounds: Tensor | None
) -> None:
    for b in range(parts.shape[0]):
        for h in range(parts.shape[1]):
            for index in range(int(cum_counts[b, h, SPLITS, -1])):
                first, end = block_bounds(int(work_tiles[b, h, BLOCK, index]), size, y.shape[1], bounds)
                y[b, first:end, h] += parts[b, h, index, : end - first]
