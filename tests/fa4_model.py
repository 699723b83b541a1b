"""FA4's block lists in PyTorch: which (row, key) pairs a forward with given lists lets into the softmax, and how often.

This is what FlashAttention-4 4.0.0b36 does, read from block_sparse_utils.py, mask.py and flash_fwd_sm{90,100}.py, not
what it should do: blocks that are listed twice count twice, and keys behind the last one, where no mask takes them out,
are rows of zeros (TMA fills what it reads out of bounds). Lists are built here too, by definition rather than in the
way of cute_kernels.block_lists. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor], Tensor]
"""Which of keys `[n]` each of rows `[m, 1]` may see, bool `[m, n]`."""

WORD = 32


@dataclass(frozen=True)
class Lists:
    """As cute_kernels.block_lists.BlockLists."""

    mask_count: Tensor
    mask_index: Tensor
    full_count: Tensor
    full_index: Tensor
    rows: int
    width: int
    bits: Tensor | None = None
    unit: int = 0

    @staticmethod
    def of(lists: Any) -> Lists:
        """A copy of BlockLists on the CPU."""
        values: dict[str, Any] = {field.name: getattr(lists, field.name) for field in fields(Lists)}
        return Lists(**{name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()})

    @staticmethod
    def planted(masks: list[list[int]], fulls: list[list[int]], *, rows: int, width: int) -> Lists:
        """Any lists of one batch and head, one of either kind for each tile."""
        return Lists(*_padded(masks, 1, 1, len(masks)), *_padded(fulls, 1, 1, len(fulls)), rows, width)

    def listed(self, kind: str, batch: int, head: int, tile: int) -> list[int]:
        """Blocks of "mask" or "full" in the order of the list."""
        count, index = getattr(self, f"{kind}_count"), getattr(self, f"{kind}_index")
        blocks: list[int] = index[batch, head, tile, : int(count[batch, head, tile])].tolist()
        return blocks


@dataclass(frozen=True)
class Keys:
    """As cute_kernels.block_lists.Keys."""

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
    """What cute_kernels.block_lists.chosen_lists gives."""
    batch, select_heads, tiles, _ = indices.shape
    position = torch.arange(-(-num_keys // width) * width)
    masks: list[list[int]] = []
    fulls: list[list[int]] = []
    unit = math.gcd(size, width)
    units = torch.zeros(batch, select_heads, tiles, max(1, -(-num_keys // (unit * WORD))) * WORD, dtype=torch.int64)
    for b, head, tile in torch.cartesian_prod(*map(torch.arange, (batch, heads, tiles))).tolist():
        first = rows_from + tile * rows
        visible = keys.visible(torch.arange(first, min(first + rows, rows_to)), position) & (position < num_keys)
        select_head = head // (heads // select_heads)
        chosen = torch.isin(position // size, indices[b, select_head, tile])
        units[b, select_head, tile, : -(-num_keys // unit)] = chosen[:num_keys:unit].long()
        touched, complete = chosen.view(-1, width).any(-1), chosen.view(-1, width).all(-1)
        seen = visible.any(0).view(-1, width).any(-1)
        seen_by_all = visible.all(0).view(-1, width).all(-1)
        full = complete & seen_by_all
        fulls.append(full.nonzero()[:, 0].tolist())
        masks.append((touched & seen & ~full).nonzero()[:, 0].tolist())
    bits = (units.unflatten(-1, (-1, WORD)) << torch.arange(WORD)).sum(-1).int()  # bit 31 is the sign
    listed = (*_padded(masks, batch, heads, tiles), *_padded(fulls, batch, heads, tiles))
    return Lists(*listed, rows, width, bits if size % width else None, unit)


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
    """What cute_kernels.block_lists.prefix_lists gives: everything is chosen."""
    tiles = -(-(rows_to - rows_from) // rows)
    every = torch.arange(-(-num_keys // width)).expand(batch, 1, tiles, -1)
    return chosen_lists(
        every, heads, keys, size=width, width=width, rows=rows, num_keys=num_keys, rows_from=rows_from, rows_to=rows_to
    )


def _padded(lists: list[list[int]], *shape: int) -> tuple[Tensor, Tensor]:
    """Counts `[B,H,tiles]` and blocks `[B,H,tiles,K]`, int32; places behind the count hold what must not be read."""
    places = max([1, *map(len, lists)])
    index = torch.tensor([[*blocks, *[-(1 << 20)] * (places - len(blocks))] for blocks in lists], dtype=torch.int32)
    count = torch.tensor([len(blocks) for blocks in lists], dtype=torch.int32)
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
            for visit, block in enumerate(reversed(lists.listed(kind, batch, head, tile))):
                first = visit == 0
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


def _check(arch: str, lists: Lists, num_rows: int) -> None:
    if arch not in ("sm_90", "sm_100"):
        raise ValueError(f"arch must be sm_90 or sm_100, got {arch!r}")
    unit = 128 if arch == "sm_90" else 256
    if lists.rows <= 0 or lists.rows % unit:
        raise ValueError(f"query tiles must be multiples of {unit} rows on {arch}, got {lists.rows}")
    if arch == "sm_90" and (not 0 < lists.width <= 128 or lists.width % 16):
        raise ValueError(f"blocks must have 128 keys or a smaller multiple of 16 on {arch}, got {lists.width}")
    if arch == "sm_100" and (lists.width <= 0 or lists.width % 128):
        raise ValueError(f"blocks must have a multiple of 128 keys on {arch}, got {lists.width}")
    tiles = -(-num_rows // lists.rows)
    if lists.mask_count.shape[2] != tiles or lists.full_count.shape[2] != tiles:
        raise ValueError(
            f"lists must be for the {tiles} tiles of {num_rows} rows, got {lists.mask_count.shape[2]} and "
            f"{lists.full_count.shape[2]}"
        )


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
            count = pairs(b, head)
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


# Twins of cute_kernels.fa4's attentions over lists


def selected(
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    *,
    causal: bool,
    first_row: int,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What cute_kernels.fa4.selected gives."""
    sizes: dict[str, Any] = {"num_rows": q.shape[1], "num_keys": k.shape[1]}

    def pairs(batch: int, head: int) -> Tensor:
        if lists.bits is None:
            return visible_pairs(arch, lists, batch, head, causal=causal, **sizes)
        words = lists.bits[batch, head // (q.shape[2] // lists.bits.shape[1])]  # [tiles, words]

        def chosen(row: Tensor, token: Tensor) -> Tensor:
            bit = token // lists.unit
            inside = ((words[row // lists.rows, bit // WORD] >> (bit % WORD)) & 1) == 1
            return inside & (token <= row + first_row) if causal else inside

        return visible_pairs(arch, lists, batch, head, mask_mod=chosen, **sizes)

    return attend(q, k, v, pairs, scale, dtype)


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
    """What cute_kernels.fa4.compressed gives with lists."""

    def ended(row: Tensor, entry: Tensor) -> Tensor:
        return entry * stride + (length - 1) <= row + first_row

    def pairs(batch: int, head: int) -> Tensor:
        return visible_pairs(arch, lists, batch, head, num_rows=q.shape[1], num_keys=k.shape[1], mask_mod=ended)

    return attend(q, k, v, pairs, scale, dtype)
