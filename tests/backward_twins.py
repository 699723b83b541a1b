"""PyTorch twins of the kernels that NSA's backward is made of, so that its steps can be run and checked on a CPU.

`install` puts them where cute_kernels.backward and documents.py call kernels; everything between the calls is real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, documents, fa4, forward
from cute_kernels.block_lists import WORD, BlockLists, Keys
from cute_kernels.documents import DOCUMENT, ENTRY, LENGTH, PUBLIC_ENTRY, ROW, SHIFT, TILE, TOKEN, UNIT, Documents
from cute_kernels.gate_backward import GateResults
from nsa import NSAConfig, reference
from nsa.tensors import NSAInputs


def install(patch: pytest.MonkeyPatch, rules: fa4.Rules) -> None:
    patch.setattr(fa4, "rules", lambda _: rules)
    for name in ("phases_backward", "compressed_backward", "selected_backward", "window_backward"):
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
    patch.setattr(backward, "block_means", block_means)
    patch.setattr(forward, "lay_out", lay_out)
    patch.setattr(documents, "_align_rows", align_rows)


# Attention


def differentiate(gradients: fa4.Gradients, visible: Tensor, scale: float) -> None:
    """For pairs visible `[B or 1,H or 1,rows,keys]`."""
    g = gradients
    group = g.q.shape[2] // g.k.shape[2]
    q, do, o = (x.transpose(1, 2) for x in (g.q, g.do, g.o))
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (g.k, g.v))
    p = torch.exp(q @ k.mT * scale - g.lse[..., None]).masked_fill(~visible, 0.0)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    for target, x in ((g.dq, ds @ k * scale), (g.dk, ds.mT @ q * scale), (g.dv, p.mT @ do)):
        x = x.transpose(1, 2)
        target.copy_(x if target is g.dq else x.unflatten(2, (-1, group)).sum(3))


def phases_backward(gradients: fa4.Gradients, *, scale: float, deterministic: bool = False) -> None:
    row, key = (torch.arange(x.shape[1]) for x in (gradients.q, gradients.k))
    differentiate(gradients, (key <= row[:, None] + len(key) - len(row))[None, None], scale)


def listed(lists: BlockLists, rows: int, keys: int, seen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Pairs of transposed lists; `seen` refines those of `mask`."""
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    batch, heads, blocks = lists.mask_count.shape
    visible = torch.zeros((batch, heads, rows, keys), dtype=torch.bool)
    mask = seen(row, key)
    for kind in ("mask", "full"):
        counts, indices = getattr(lists, f"{kind}_count"), getattr(lists, f"{kind}_index")
        for b, h, block in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks))).tolist():
            there = slice(block * lists.width, (block + 1) * lists.width)
            for tile in indices[b, h, block, : counts[b, h, block]].tolist():
                here = slice(tile * lists.rows, (tile + 1) * lists.rows)
                assert not visible[b, h, here, there].any(), "listed twice"
                inside = mask[min(b, len(mask) - 1), min(h, mask.shape[1] - 1)] if mask.dim() == 4 else mask
                visible[b, h, here, there] = inside[here, there] if kind == "mask" else True
    return visible


def compressed_backward(
    gradients: fa4.Gradients,
    lists: BlockLists | None,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    shifts: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    rows, keys = gradients.q.shape[1], gradients.k.shape[1]
    if lists is None:
        differentiate(gradients, torch.ones((1, 1, rows, keys), dtype=torch.bool), scale)
        return
    shift = torch.full((rows,), first_row)
    if shifts is not None:
        shift = shifts.repeat_interleave(rows // len(shifts))
    visible = listed(lists, rows, keys, lambda row, key: key * stride + length - 1 <= row + shift[:, None])
    differentiate(gradients, visible, scale)


def selected_backward(
    gradients: fa4.Gradients,
    lists: BlockLists,
    *,
    causal: bool,
    first_row: int = 0,
    first_key: int = 0,
    scale: float,
) -> None:
    rows, keys, heads = gradients.q.shape[1], gradients.k.shape[1], gradients.q.shape[2]

    def seen(row: Tensor, key: Tensor) -> Tensor:
        inside = (key + first_key <= row + first_row) if causal else torch.ones((rows, keys), dtype=torch.bool)
        if lists.bits is None:
            return inside
        tile, unit = (row + first_row) // lists.rows, (key + first_key) // lists.unit
        bits = lists.bits.repeat_interleave(heads // lists.bits.shape[1], 1)
        return inside & ((bits[:, :, unit, tile // WORD] >> tile % WORD) & 1 == 1)

    differentiate(gradients, listed(lists, rows, keys, seen), scale)


def window_backward(
    gradients: fa4.Gradients,
    *,
    left: int,
    right: int,
    scale: float,
    documents: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
) -> None:
    row = torch.arange(gradients.q.shape[1])[:, None]
    key = torch.arange(gradients.k.shape[1])
    visible = (key >= row - left) & (key <= row + right)
    if documents is not None:
        first, used = documents
        document = torch.searchsorted(first[1:].contiguous(), key, right=True)
        used_up = key - first[:-1][document.clamp(max=len(used) - 1)] >= used[document.clamp(max=len(used) - 1)]
        document = torch.where(used_up, -1, document)
        visible &= (document[:, None] == document) & (document >= 0)
    differentiate(gradients, visible[None, None], scale)


# Lists


def tile_bits(
    indices: Tensor, *, size: int, num_keys: int, entries: bool, documents: Documents | None = None
) -> Tensor:
    batch, heads, tiles, _ = indices.shape
    bits = torch.zeros((batch, heads, -(-num_keys // size), max(2, -(-tiles // WORD))), dtype=torch.int32)
    for b, h, tile in torch.cartesian_prod(*map(torch.arange, (batch, heads, tiles))).tolist():
        for block in indices[b, h, tile][indices[b, h, tile] >= 0].tolist():
            if documents is not None:
                first = documents.bounds[ENTRY if entries else ROW, documents.tiles[DOCUMENT, tile]]
                block += int(first) // size
            bits[b, h, block, tile // WORD] |= torch.tensor(1 << tile % WORD, dtype=torch.int64).int()
    return bits


def lists_of(tiles_of: Callable[[int, int, int], tuple[list[int], list[int]]], *shape: int) -> list[Tensor]:
    batch, heads, blocks = shape
    found = [[[tiles_of(b, h, n) for n in range(blocks)] for h in range(heads)] for b in range(batch)]
    tensors = []
    for kind in (0, 1):
        rows = [block[kind] for of_batch in found for of_head in of_batch for block in of_head]
        places = max([1, *map(len, rows)])
        tensors.append(torch.tensor([len(row) for row in rows], dtype=torch.int32).view(shape))
        padded = [[*row, *[1 << 30] * (places - len(row))] for row in rows]
        tensors.append(torch.tensor(padded, dtype=torch.int32).view(*shape, places))
    return tensors


def split(tiles: list[int], seen: Callable[[int], int], block: int, width: int, rows: int, end: int) -> Any:
    """(mask, full): `seen` says how many keys a row sees."""
    some = [t for t in tiles if seen(min((t + 1) * rows, end) - 1) > block * width]
    full = [t for t in some if seen(t * rows) >= (block + 1) * width]
    return [t for t in some if t not in full], full


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
    first_tile: int = 0,
    documents: Documents | None = None,
) -> BlockLists:
    group = heads // bits.shape[1]

    def seen(row: int) -> int:
        if not keys.causal:
            return num_keys
        shift = 0 if documents is None else int(documents.shifts[row // rows])
        return 1 << 30 if (count := (row + shift + 1 - keys.length) // keys.stride + 1) >= num_keys else count

    def tiles_of(b: int, h: int, n: int) -> tuple[list[int], list[int]]:
        block = blocks[n]
        chosen = range(block * width // size, min(((block + 1) * width - 1) // size + 1, bits.shape[2]))
        words = bits[b, h // group, chosen.start : chosen.stop]
        tiles = [t for t in range(-(-num_rows // rows)) if bool(((words[:, t // WORD] >> t % WORD) & 1).any())]
        mask, full = split(tiles, seen, block, width, rows, num_rows)
        if size % width:
            mask, full = sorted(mask + full), []
        return [t - first_tile for t in mask], [t - first_tile for t in full]

    made = lists_of(tiles_of, bits.shape[0], heads, len(blocks))
    exact = size % width == 0
    return BlockLists(*made, rows, width, None if exact else bits, 0 if exact else size)


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
    documents: Documents | None = None,
) -> BlockLists:
    def tiles_of(_: int, __: int, n: int) -> tuple[list[int], list[int]]:
        first, end, shift = 0, num_rows, 0
        if documents is not None:
            firsts = documents.bounds[ENTRY]
            document = int((firsts[:-1] <= n * width).nonzero()[-1])
            first = int(documents.bounds[ROW, document])
            end = first + int(documents.bounds[LENGTH, document])
            shift = int(firsts[document]) * keys.stride - first

        def seen(row: int) -> int:
            return (row + shift + 1 - keys.length) // keys.stride + 1

        tiles = list(range(first // rows, -(-end // rows)))
        mask, full = split(tiles, seen, n, width, rows, end)
        return mask, full

    return BlockLists(*lists_of(tiles_of, batch, heads, -(-num_keys // width)), rows, width)


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
    dots, weighted = [], [torch.zeros_like(o) for o in outputs]
    to = torch.arange(do.shape[1]) if rows is None else rows
    used = to >= 0
    assert bool((to < aligned).all())
    for b, (o, old) in enumerate(zip(outputs, lses, strict=True)):
        of_tokens = o[:, to.clamp(min=0)].masked_fill(~used[None, :, None, None], 0.0)
        dots.append((do * of_tokens).sum(-1))
        shifted = old[..., to[used]] - (0 if given else torch.log(g[..., b]).transpose(1, 2)[..., used])
        lse[b][..., to[used]] = shifted
        weighted[b][:, to[used]] = (do * g[..., b : b + 1])[:, used]
    delta = torch.stack(dots, -1)
    logits = delta * g * (1 - g) if projected else None
    weight = None if logits is None else torch.einsum("bnhg,bnhd->hgd", logits, q)
    d_gates = delta if given else None
    return GateResults(lse, delta[..., 1], weighted if given else None, logits, d_gates, weight)


def by_token(x: Tensor, documents: Documents | None) -> Tensor:
    return x if documents is None else documents.by_token(x, 1, 0.0)


def query_gradients(
    dq: Tensor,
    parts: Sequence[Tensor],
    *,
    logits: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    documents: Documents | None = None,
) -> None:
    total = sum((by_token(part, documents) for part in parts), torch.zeros_like(dq))
    if logits is not None and gate_proj_weight is not None:
        total = total + torch.einsum("bnhg,hgd->bnhd", logits, gate_proj_weight)
    dq.copy_(total)


def key_gradients(
    dk: Tensor,
    dv: Tensor,
    k_parts: Sequence[Tensor],
    v_parts: Sequence[Tensor],
    *,
    entries: tuple[Tensor, Tensor] | None,
    keys: Keys,
    documents: Documents | None = None,
) -> None:
    for i, (target, parts) in enumerate(((dk, k_parts), (dv, v_parts))):
        total = sum((by_token(part, documents) for part in parts), torch.zeros_like(target))
        if entries is not None:
            for j in range(entries[i].shape[1]):
                first, entry, length = j * keys.stride, j, target.shape[1]
                if documents is not None:
                    document = int((documents.bounds[ENTRY, :-1] <= j).nonzero()[-1])
                    inside = (j - int(documents.bounds[ENTRY, document])) * keys.stride
                    first = int(documents.bounds[TOKEN, document]) + inside
                    length = int(documents.bounds[TOKEN, document] + documents.bounds[LENGTH, document])
                if first + keys.length <= length:
                    total[:, first : first + keys.length] += entries[i][:, entry : entry + 1] / keys.length
        target.copy_(total)


def block_means(
    k: Tensor, v: Tensor, length: int, stride: int, dtype: torch.dtype, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    if documents is None:
        k_mean, v_mean = (x.unfold(1, length, stride).mean(-1) for x in (k, v))
        return k_mean, v_mean
    pooled = [x.new_zeros((1, documents.num_entries, *x.shape[2:])) for x in (k, v)]
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
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, tile: int, length: int, stride: int
) -> tuple[Documents, tuple[Tensor, Tensor, Tensor]]:
    tokens, docs = q.shape[1], len(cu_seqlens) - 1
    num_tiles, num_entries = documents.sizes(tokens, docs, tile, stride)
    bounds, tiles = torch.zeros((6, docs + 1), dtype=torch.int32), torch.zeros((2, num_tiles), dtype=torch.int32)
    tiles[DOCUMENT] = -1
    rows = torch.full((tokens,), -1, dtype=torch.int32)
    for i in range(docs + 1):
        bounds[TOKEN, i] = cu_seqlens[i]
        if i == docs:
            break
        count = int(cu_seqlens[i + 1] - cu_seqlens[i])
        entries = 0 if count < length else (count - length) // stride + 1
        used = -(-count // tile)
        bounds[LENGTH, i] = count
        for name, more in (
            (TILE, used),
            (ROW, used * tile),
            (ENTRY, -(-entries // UNIT) * UNIT),
            (PUBLIC_ENTRY, entries),
        ):
            bounds[name, i + 1] = bounds[name, i] + more
        tiles[DOCUMENT, bounds[TILE, i] : bounds[TILE, i] + used] = i
        tiles[SHIFT, bounds[TILE, i] : bounds[TILE, i] + used] = bounds[ENTRY, i] * stride - bounds[ROW, i]
        rows[cu_seqlens[i] : cu_seqlens[i + 1]] = torch.arange(count, dtype=torch.int32) + bounds[ROW, i]
    made = Documents(tile, stride, bounds, tiles, rows, num_entries, tokens // stride)
    aligned = align_rows(made, k, v, q)
    return made, (aligned[2], aligned[0], aligned[1])


def align_rows(made: Documents, k: Tensor, v: Tensor | None = None, q: Tensor | None = None) -> list[Tensor]:
    aligned = []
    for x in (k, v, q):
        if x is not None:
            target = x.new_zeros((1, made.num_tiles * made.tile, *x.shape[2:]))
            target[:, made.rows[made.rows >= 0]] = x[:, made.rows >= 0]
            aligned.append(target)
    return aligned


# What the forward keeps


def saved(inputs: NSAInputs, config: NSAConfig, indices: Tensor) -> backward.Saved:
    """Of a fixed-length call with these selections, from the reference."""
    _, aux = reference.nsa(inputs, config, indices=indices)
    gates = aux.gates if inputs.gate_proj_weight is not None else None
    cmp_indices = aux.cmp_indices
    given = inputs.k_cmp is not None
    return backward.Saved(
        None if given else aux.k_cmp,
        None if given else aux.v_cmp,
        indices,
        cmp_indices,
        gates,
        aux.o_cmp,
        aux.o_slc,
        aux.o_win,
        aux.lse_cmp,
        aux.lse_slc,
        aux.lse_win,
    )
