"""FA4's block lists in PyTorch: which (row, key) pairs attention with given lists computes, and how often.

This is what FlashAttention-4 4.0.0b36 does, not what it should do, read from its sources and held against its kernels
with lists that are wrong: for sm_90 on a GPU, for sm_100 interpreted (tests/cute/test_query_to_kv.py and
test_kv_to_query.py). Blocks that are listed twice count twice, and keys behind the last one, where no mask takes them
out, are rows of zeros (TMA fills what it reads out of bounds). Lists are built here too, by definition rather than in
the way of cute_kernels' kernels. Needs torch alone; lists stay on the CPU, attention runs where its inputs are.

The backward takes transposed lists: for each block of keys the query tiles that see it. As FA4 reads them

- a mask_mod sees every `mask` tile and no `full` one; native causality masks every listed tile, and where it is on
  FA4 ignores the mask_mod. It aligns the last query row with the last key, also where k is a slice of the keys.
- Keys behind the last one are masked in every tile, so the order of a list matters to the rounding alone.
- FA4 works on smaller tiles than the lists do. Those behind the last row are skipped on sm_90. On sm_100 the last tile
  with rows is read in their place, and only a mask_mod (with native causality off), whose branch also masks rows behind
  the last one, keeps it from counting once more in dk and dv, each row with every key of the block.
- Blocks without tiles get gradients of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cute_kernels.fa4.interface import Gradients

MaskMod = Callable[[Tensor, Tensor], Tensor]
"""Which of keys `[n]` each of rows `[m, 1]` may see, bool `[m, n]`."""

WORD = 32
NOT_READ = -(1 << 20)
"""In places of a list that FA4 must not read."""


@dataclass(frozen=True)
class Lists:
    """As cute_kernels.lists.query_to_kv.BlockLists: of key blocks for each query tile, or transposed."""

    mask_count: Tensor
    mask_index: Tensor
    full_count: Tensor
    full_index: Tensor
    rows: int
    width: int
    bits: Tensor | None = None
    bit_keys: int = 0

    @staticmethod
    def of(lists: Any) -> Lists:
        """A copy of BlockLists on the CPU."""
        values: dict[str, Any] = {field.name: getattr(lists, field.name) for field in fields(Lists)}
        return Lists(**{name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()})

    @staticmethod
    def planted(masks: list[list[int]], fulls: list[list[int]], *, rows: int, width: int) -> Lists:
        """Any lists of one batch and head, one of either kind for each tile; transposed, for each block."""
        return Lists(*_padded(masks, 1, 1, len(masks)), *_padded(fulls, 1, 1, len(fulls)), rows, width)

    def listed(self, kind: str, batch: int, head: int, place: int) -> list[int]:
        """Blocks of tile `place` (transposed: tiles of block `place`) in "mask" or "full", in the order of the list."""
        count, index = getattr(self, f"{kind}_count"), getattr(self, f"{kind}_index")
        listed: list[int] = index[batch, head, place, : int(count[batch, head, place])].tolist()
        return listed


@dataclass(frozen=True)
class Keys:
    """As cute_kernels.lists.query_to_kv.Keys."""

    length: int = 1
    stride: int = 1
    causal: bool = True

    def visible(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Whether rows `[m]` see keys `[n]`, bool `[m, n]`."""
        return (keys * self.stride + self.length - 1 <= rows[:, None]) | (not self.causal)


# Building lists


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
) -> Lists:
    """What cute_kernels.lists.query_to_kv.chosen_lists gives."""
    chosen = _chosen_blocks(indices, -(-num_keys // size))
    mask, full = _kinds(chosen, heads, keys, size, width, rows, num_keys, torch.arange(rows_from, rows_to))
    return Lists(*_listed(mask), *_listed(full), rows, width)


def prefix_lists(
    batch: int,
    heads: int,
    keys: Keys,
    *,
    width: int,
    rows: int,
    num_keys: int,
    rows_from: int,
    rows_to: int,
) -> Lists:
    """What cute_kernels.lists.query_to_kv.prefix_lists gives: everything is chosen."""
    row = torch.arange(rows_from, rows_to)
    every = _every(batch, row, rows, width, num_keys)
    mask, full = _kinds(every, heads, keys, width, width, rows, num_keys, row)
    return Lists(*_listed(mask), *_listed(full), rows, width)


def tile_bits(indices: Tensor, *, size: int, num_keys: int) -> Tensor:
    """What cute_kernels.lists.kv_to_query.tile_bits gives: which tiles chose each block, int32 `[B,S,blocks,words]`."""
    return _packed(_chosen_blocks(indices, -(-num_keys // size)).mT)


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
    positions: Tensor | None = None,
) -> Lists:
    """What cute_kernels.lists.kv_to_query.transposed_lists gives.

    Args:
        positions: where rows stand among the tokens of the keys, int64 `[num_rows]`; None: row i at i.
    """
    chosen = _unpacked(bits)[..., : -(-num_rows // rows)].mT
    row = torch.arange(num_rows) if positions is None else positions
    mask, full = _kinds(chosen, heads, keys, size, width, rows, num_keys, row, backward=True)
    exact = size % width == 0
    if not exact:
        mask, full = mask | full, torch.zeros_like(full)
    mask, full = (flags[..., blocks.start : blocks.stop].mT for flags in (mask, full))
    assert not (mask | full)[..., :first_tile].any(), "tiles before first_tile see a block"
    mask, full = mask[..., first_tile:], full[..., first_tile:]
    return Lists(*_listed(mask), *_listed(full), rows, width, None if exact else bits, 0 if exact else size)


def transposed_prefix_lists(
    batch: int, heads: int, keys: Keys, *, width: int, rows: int, num_keys: int, num_rows: int, first_row: int = 0
) -> Lists:
    """What cute_kernels.lists.kv_to_query.transposed_prefix_lists gives: everything is chosen."""
    row = first_row + torch.arange(num_rows)
    every = _every(batch, row, rows, width, num_keys)
    mask, full = _kinds(every, heads, keys, width, width, rows, num_keys, row, backward=True)
    return Lists(*_listed(mask.mT), *_listed(full.mT), rows, width)


def _every(batch: int, row: Tensor, rows: int, width: int, num_keys: int) -> Tensor:
    """Every tile of `rows` rows chose every block."""
    return torch.ones((batch, 1, -(-len(row) // rows), -(-num_keys // width)), dtype=torch.bool)


def _chosen_blocks(indices: Tensor, blocks: int) -> Tensor:
    """Which blocks were chosen, bool `[B,S,tiles,blocks]`, from indices `[B,S,tiles,k]` padded with -1."""
    chosen = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool)
    return chosen.scatter_(-1, torch.where(indices < 0, blocks, indices).long(), True)[..., :blocks]


def _kinds(
    chosen: Tensor,
    heads: int,
    keys: Keys,
    size: int,
    width: int,
    rows: int,
    num_keys: int,
    row: Tensor,
    *,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Which blocks of `width` keys are in `mask` and which in `full` of each tile, bool `[B,H,tiles,blocks]`.

    `chosen [B,S,tiles,n]` says which blocks of `size` keys the tiles chose, `row` where all rows stand. A block that
    ends behind the keys can be in `full` in the backward only, which masks the end of the keys everywhere.
    """
    position = torch.arange(-(-num_keys // width) * width)
    exists = position < num_keys
    wanted = torch.nn.functional.pad(chosen, [0, 1])[..., (position // size).clamp(max=chosen.shape[-1])]
    wanted = wanted.repeat_interleave(heads // chosen.shape[1], dim=1).unflatten(-1, (-1, width))
    seen, seen_by_all = [], []
    for first in range(0, len(row), rows):
        visible = keys.visible(row[first : first + rows], position)
        seen.append((visible & exists).any(0).view(-1, width).any(-1))
        by_all = visible | ~exists if backward else visible & exists
        seen_by_all.append(by_all.all(0).view(-1, width).all(-1))
    some = wanted.any(-1) & torch.stack(seen)
    full = some & wanted.all(-1) & torch.stack(seen_by_all)
    return some & ~full, full


def _packed(flags: Tensor) -> Tensor:
    """Bits of the last dim in words, int32 `[..., ceil(n/32)]`, of which FA4 wants two or more."""
    count = flags.shape[-1]
    flags = torch.nn.functional.pad(flags, [0, max(-count % WORD, 2 * WORD - count)]).long()
    return (flags.unflatten(-1, (-1, WORD)) << torch.arange(WORD)).sum(-1).int()  # bit 31 is the sign


def _unpacked(words: Tensor) -> Tensor:
    return ((words[..., None] >> torch.arange(WORD)) & 1).bool().flatten(-2)


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The ascending numbers of the last dim that are set in flags `[B,H,n,m]`, as counts and lists."""
    count = flags.sum(-1, dtype=torch.int32)
    places = max(1, int(count.max())) if count.numel() else 1
    set_first = flags.int().argsort(dim=-1, descending=True, stable=True)[..., :places]
    return count, torch.where(torch.arange(places) < count[..., None], set_first, NOT_READ).int()


def _padded(lists: list[list[int]], *shape: int) -> tuple[Tensor, Tensor]:
    """Counts `[B,H,n]` and lists `[B,H,n,K]`, int32."""
    places = max([1, *map(len, lists)])
    index = torch.tensor([[*listed, *[NOT_READ] * (places - len(listed))] for listed in lists], dtype=torch.int32)
    count = torch.tensor([len(listed) for listed in lists], dtype=torch.int32)
    return count.view(shape), index.view(*shape, places)


# Reading them


def visible_pairs(
    arch: str,
    lists: Lists,
    batch: int,
    head: int,
    *,
    num_rows: int,
    num_keys: int,
    causal: bool = False,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """How often each pair enters the softmax of one batch and head, int64 `[num_rows, columns]`.

    Columns at and behind `num_keys` are keys of zeros, as far as blocks are listed there. Causality is that of the
    last rows: row i sees key j iff j <= i + num_keys - num_rows; FA4 drops it where there is a mask_mod.

    Raises:
        ValueError: FA4 takes no such tiles or blocks on `arch`.
    """
    _check(arch, lists, num_rows)
    tiles = range(-(-num_rows // lists.rows))
    kinds = ("mask", "full")
    blocks = [block for kind in kinds for tile in tiles for block in lists.listed(kind, batch, head, tile)]
    if min(blocks, default=0) < 0:
        raise ValueError(f"listed blocks must not be negative, got {min(blocks)}")
    pairs = torch.zeros(num_rows, max(num_keys, (max(blocks, default=-1) + 1) * lists.width), dtype=torch.int64)
    for tile in tiles:
        here = slice(tile * lists.rows, min((tile + 1) * lists.rows, num_rows))
        row = torch.arange(here.start, here.stop)[:, None]
        for kind in kinds:
            for position, block in enumerate(reversed(lists.listed(kind, batch, head, tile))):
                first = position == 0
                there = slice(block * lists.width, (block + 1) * lists.width)
                key = torch.arange(there.start, there.stop)
                seen = torch.ones(len(row), len(key), dtype=torch.bool)
                if first:
                    seen &= key < num_keys
                    key = key.clamp(max=num_keys - 1)  # masked already; FA4 too keeps them from a mask_mod's tensors
                if mask_mod is not None:
                    if kind == "mask":
                        seen &= mask_mod(row, key)
                elif causal and (arch == "sm_90" or kind == "mask" or first):
                    seen &= key <= row + num_keys - num_rows
                pairs[here, there] += seen
    return pairs


def backward_pairs(
    arch: str,
    lists: Lists,
    batch: int,
    head: int,
    *,
    num_rows: int,
    num_keys: int,
    causal: bool = False,
    mask_mod: MaskMod | None = None,
) -> tuple[Tensor, Tensor]:
    """How often each pair enters the gradients of one batch and head, by transposed lists; int32 `[rows, keys]`.

    Causality is as in `visible_pairs`, but where it is on FA4 ignores the mask_mod.

    Returns:
        Counts for dq, dk and dv, and what comes on top of them in dk and dv.

    Raises:
        ValueError: FA4 takes no such tiles or blocks on `arch`.
    """
    _check_transposed(arch, lists, num_rows, num_keys)
    row, key = torch.arange(num_rows)[:, None], torch.arange(num_keys)
    masks, fulls = (_listings(lists, kind, batch, head, -(-num_rows // lists.rows)) for kind in ("mask", "full"))

    def by_pair(listings: Tensor) -> Tensor:
        return listings.repeat_interleave(lists.rows, 0)[:num_rows].repeat_interleave(lists.width, 1)[:, :num_keys]

    if causal:
        pairs = by_pair(masks + fulls) * (key <= row + num_keys - num_rows)
    elif mask_mod is not None:
        pairs = by_pair(masks) * mask_mod(row, key) + by_pair(fulls)
    else:
        pairs = by_pair(masks + fulls)
    again = torch.zeros_like(pairs)
    if arch == "sm_100" and (causal or mask_mod is None):
        last = (num_rows - 1) // BACKWARD_ROWS[arch] * BACKWARD_ROWS[arch]
        whole_tiles_behind = -num_rows % lists.rows // BACKWARD_ROWS[arch]
        again[last:] = by_pair(masks + fulls)[last:] * whole_tiles_behind
    return pairs, again


def _listings(lists: Lists, kind: str, batch: int, head: int, tiles: int) -> Tensor:
    """How often each block lists each tile, int32 `[tiles, blocks]`."""
    count, index = (getattr(lists, f"{kind}_{name}")[batch, head].long() for name in ("count", "index"))
    read = torch.arange(index.shape[1]) < count[:, None]
    wrong = index[read & ((index < 0) | (index >= tiles))]
    if len(wrong) > 0:
        raise ValueError(f"listed tiles must have rows, got tile {int(wrong[0])}")
    listings = torch.zeros((len(count), tiles + 1), dtype=torch.int32)
    listings.scatter_add_(1, torch.where(read, index, tiles), torch.ones_like(index, dtype=torch.int32))
    return listings[:, :tiles].T


BACKWARD_ROWS = {"sm_90": 64, "sm_100": 128}
"""Query rows that FA4's backward takes at once; on sm_90 twice as many with D = 64, which changes no pair."""


def _check(arch: str, lists: Lists, num_rows: int) -> None:
    _check_arch(arch)
    unit = 128 if arch == "sm_90" else 256
    if lists.rows <= 0 or lists.rows % unit:
        raise ValueError(f"query tiles must be multiples of {unit} rows on {arch}, got {lists.rows}")
    if arch == "sm_90" and (not 0 < lists.width <= 128 or lists.width % 16):
        raise ValueError(f"blocks must have 128 keys or a smaller multiple of 16 on {arch}, got {lists.width}")
    if arch == "sm_100" and (lists.width <= 0 or lists.width % 64):
        raise ValueError(f"blocks must have a multiple of 64 keys on {arch}, got {lists.width}")
    tiles = -(-num_rows // lists.rows)
    if lists.mask_count.shape[2] != tiles or lists.full_count.shape[2] != tiles:
        raise ValueError(
            f"lists must be for the {tiles} tiles of {num_rows} rows, got {lists.mask_count.shape[2]} and "
            f"{lists.full_count.shape[2]}"
        )


def _check_transposed(arch: str, lists: Lists, num_rows: int, num_keys: int) -> None:
    _check_arch(arch)
    if lists.rows <= 0 or lists.rows % BACKWARD_ROWS[arch]:
        raise ValueError(f"query tiles must be multiples of {BACKWARD_ROWS[arch]} rows on {arch}, got {lists.rows}")
    if arch == "sm_90" and lists.width not in (64, 128):
        raise ValueError(f"blocks must have 64 or 128 keys on {arch}, got {lists.width}")
    if arch == "sm_100" and (lists.width <= 0 or lists.width % 128):
        raise ValueError(f"blocks must have a multiple of 128 keys on {arch}, got {lists.width}")
    blocks, tiles = -(-num_keys // lists.width), -(-num_rows // lists.rows)
    if lists.mask_count.shape[2] != blocks or lists.full_count.shape[2] != blocks:
        raise ValueError(
            f"lists must be for the {blocks} blocks of {num_keys} keys, got {lists.mask_count.shape[2]} and "
            f"{lists.full_count.shape[2]}"
        )
    if max(lists.mask_index.shape[3], lists.full_index.shape[3]) > tiles:
        raise ValueError(f"lists must not have more places than there are tiles, {tiles}")


def _check_arch(arch: str) -> None:
    if arch not in ("sm_90", "sm_100"):
        raise ValueError(f"arch must be sm_90 or sm_100, got {arch!r}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Callable[[int, int], Tensor],
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in which each pair counts as often as `pairs(batch, head)` says.

    q `[B,M,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`, all computed in `dtype`; o `[B,M,H,D_v]` and lse `[B,H,M]`
    (natural log), 0 and -inf for rows without keys.
    """
    q, k, v = (x.to(dtype) for x in (q, k, v))
    batch, rows, heads, _ = q.shape
    o = q.new_zeros((batch, rows, heads, v.shape[-1]))
    lse = q.new_zeros((batch, heads, rows))
    for b in range(batch):
        for head in range(heads):
            count = pairs(b, head).to(q.device)
            behind = [0, 0, 0, count.shape[1] - k.shape[1]]
            keys, values = (torch.nn.functional.pad(x[b, :, head // (heads // k.shape[2])], behind) for x in (k, v))
            logits = torch.where(count > 0, q[b, :, head] @ keys.T * scale, -math.inf)
            top = logits.amax(-1, keepdim=True)
            top = torch.where(top == -math.inf, 0, top)
            weights = count.to(dtype) * torch.exp(logits - top)
            total = weights.sum(-1, keepdim=True)
            o[b, :, head] = weights / torch.where(total == 0, 1, total) @ values
            lse[b, head] = (top + torch.log(total))[:, 0]
    return o, lse


def attend_backward(gradients: Gradients, pairs: Callable[[int, int], tuple[Tensor, Tensor]], scale: float) -> None:
    """dq, dk and dv of `attend` by what it returned, each pair as often as `pairs(batch, head)` says.

    All computed in q's dtype; exponentials and sums over heads, if that is wider, in fp32. For rows with an lse of -inf
    FA4 takes 0.
    """
    q, k, v, do = gradients.q, gradients.k, gradients.v, gradients.do
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    lse = torch.where(gradients.lse == -math.inf, 0, gradients.lse).to(wide)
    delta = (gradients.o.to(wide) * do.to(wide)).sum(-1)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            count, again = (x.to(q.device) for x in pairs(b, head))
            at, kv = (b, slice(None), head), (b, slice(None), head // group)
            every = count + again
            logits = torch.where(every > 0, (q[at] @ k[kv].T * scale).to(wide), -math.inf)
            weights = torch.exp(logits - lse[b, head, :, None])
            steps = weights * ((do[at] @ v[kv].T).to(wide) - delta[at][:, None])
            dq[at] = (count * steps).to(dtype) @ k[kv] * scale
            dk[kv] += (every * steps).to(dtype).T @ q[at] * scale
            dv[kv] += (every * weights).to(dtype).T @ do[at]
    for target, x in ((gradients.dq, dq), (gradients.dk, dk), (gradients.dv, dv)):
        target.copy_(x)


# Twins of cute_kernels.fa4.interface's attentions over lists


def selected(
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    *,
    causal: bool,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What cute_kernels.fa4.interface.selected gives."""
    sizes: dict[str, Any] = {"num_rows": q.shape[1], "num_keys": k.shape[1]}
    return attend(q, k, v, lambda b, head: visible_pairs(arch, lists, b, head, causal=causal, **sizes), scale, dtype)


def selected_backward(
    arch: str,
    gradients: Gradients,
    lists: Lists,
    *,
    causal: bool,
    first_row: int = 0,
    first_key: int = 0,
    first_token: int = 0,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """What cute_kernels.fa4.interface.selected_backward does."""
    num_rows, num_keys, heads = gradients.q.shape[1], gradients.k.shape[1], gradients.q.shape[2]

    def pairs(batch: int, head: int) -> tuple[Tensor, Tensor]:
        words = None if lists.bits is None else lists.bits[batch, head // (heads // lists.bits.shape[1])]
        where = {"first_row": first_row, "first_key": first_key, "first_token": first_token}
        chosen = _chosen(lists, words, causal=causal, **where, shifts=shifts)
        return backward_pairs(arch, lists, batch, head, num_rows=num_rows, num_keys=num_keys, mask_mod=chosen)

    attend_backward(gradients, pairs, scale)


def _chosen(
    lists: Lists,
    words: Tensor | None,
    *,
    causal: bool,
    first_row: int,
    first_key: int,
    first_token: int,
    shifts: Tensor | None,
) -> MaskMod:
    """Whether the token's bit is set for the row's tile and, with causality, the token is not behind the row.

    Args:
        words: `[blocks, words]` of tile_bits, which count all rows and keys; None: every listed block was chosen whole.
    """

    def chosen(row: Tensor, key: Tensor) -> Tensor:
        row, key = row + first_row, key + first_key
        shift = first_token if shifts is None else shifts[row // lists.rows]
        inside = (key <= row + shift) | (not causal)
        if words is not None:
            tile = row // lists.rows
            inside = inside & ((words[key // lists.bit_keys, tile // WORD] >> (tile % WORD)) & 1 == 1)
        return inside

    return chosen


def compressed(
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What cute_kernels.fa4.interface.compressed gives with lists."""
    sizes: dict[str, Any] = {"num_rows": q.shape[1], "num_keys": k.shape[1]}

    def ended(row: Tensor, entry: Tensor) -> Tensor:
        return entry * stride + (length - 1) <= row + first_row

    return attend(q, k, v, lambda b, head: visible_pairs(arch, lists, b, head, mask_mod=ended, **sizes), scale, dtype)


def compressed_backward(
    arch: str,
    gradients: Gradients,
    lists: Lists,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """What cute_kernels.fa4.interface.compressed_backward does."""
    num_rows, num_keys = gradients.q.shape[1], gradients.k.shape[1]

    def ended(row: Tensor, entry: Tensor) -> Tensor:
        shift = first_row if shifts is None else shifts[row // (num_rows // len(shifts))]
        return entry * stride + (length - 1) <= row + shift

    def pairs(batch: int, head: int) -> tuple[Tensor, Tensor]:
        return backward_pairs(arch, lists, batch, head, num_rows=num_rows, num_keys=num_keys, mask_mod=ended)

    attend_backward(gradients, pairs, scale)
