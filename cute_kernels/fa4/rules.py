"""Calls that FlashAttention-4's block-sparse kernels support, and the tiles of block lists. Needs torch alone."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.limits import MAX_LIST_WIDTH
from cute_kernels.runtime.device import compute_capability

NARROW = 64
"""Width of listed blocks for which sm_90's backward and sm_100's forward need smaller tiles than usual."""

ONE_TILE = 128
"""Rows or keys of the largest tile."""

WINDOW_TILE = (128, 96)
"""tile_m and tile_n of sm_90's forward for windows with pack_gqa and D = D_v = 128: 8 tokens of 16 heads with a window
of 512 meet 6.4 tiles of 96 keys, 614 keys; 128 tokens of one head meet 6 tiles of 128, 767 keys. Packed documents have
tiles of one head, but the same tiles of keys, so each gets the same bits as alone."""

WINDOW_ALIGNMENT = math.lcm(WINDOW_TILE[1], ONE_TILE)
"""If the keys passed begin at a multiple of this, a window's rows meet the same tiles of keys as without a slice."""

STRATEGY_VARIABLE = "NSA_KERNELS_FA4_STRATEGY"
"""Environment variable: with value sm_100 a Hopper GPU takes Blackwell's tiles and lists, for tests."""

DIMS = (64, 128)
"""Supported values of D and D_v, also mixed. Other values were not checked: FA4 reads out of bounds at D=32, D_v=96."""


@dataclass(frozen=True)
class Rules:
    """Tile sizes that FA4's block lists must have on an architecture."""

    rows: int
    """Query tiles are multiples of this."""
    widths: tuple[int, ...]
    """Keys of a block that the forward lists, widest first. The narrowest divides every selected block."""
    backward_widths: tuple[int, ...]
    """The same of the backward."""

    def width(self, size: int) -> int:
        """The forward's blocks for selected blocks of `size` keys: the widest that divide it."""
        return next(width for width in self.widths if size % width == 0)

    def backward_width(self, size: int) -> int:
        """The backward's blocks: the widest that divide `size`, else the narrowest, refined by bits."""
        return next((width for width in self.backward_widths if size % width == 0), self.backward_widths[-1])


RULES = {
    9: Rules(rows=128, widths=(MAX_LIST_WIDTH, NARROW), backward_widths=(MAX_LIST_WIDTH, NARROW)),
    10: Rules(rows=256, widths=(MAX_LIST_WIDTH, NARROW), backward_widths=(MAX_LIST_WIDTH,)),
}
"""By major compute capability."""


def rules(device: torch.device) -> Rules | None:
    """The device's rules, or None if FA4 has no block sparsity there."""
    major, _ = compute_capability(device.index or 0)
    if major == 9 and os.environ.get(STRATEGY_VARIABLE) == "sm_100":
        major = 10
    return RULES.get(major)


def refusal(dtype: torch.dtype, dim: int, v_dim: int) -> str | None:
    """Why FA4's block-sparse forward cannot take such inputs, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {str(dtype).removeprefix('torch.')}"
    for name, size in (("D", dim), ("D_v", v_dim)):
        if size not in DIMS:
            return f"takes head dims {' and '.join(map(str, DIMS))}, got {name}={size}"
    return None


def packs_gqa(q: Tensor, k: Tensor) -> bool:
    """True if a tile can hold the query heads of a key/value head (pack_gqa), of fewer tokens then."""
    group = q.shape[-2] // k.shape[-2]
    return group > 1 and ONE_TILE % group == 0


def window_tile_n(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Keys of a window's tile. Tiles end at its multiples, counted from the first key of a sequence."""
    on_hopper = compute_capability(q.device.index or 0)[0] == 9
    narrower = on_hopper and packs_gqa(q, k) and q.shape[-1] == v.shape[-1] == 128
    return WINDOW_TILE[1] if narrower else ONE_TILE
