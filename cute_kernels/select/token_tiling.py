"""Work tiles of select/token.py and their shared memory: the sizes that fit, for the kernel and for support.py.

Imports neither CuTe DSL nor PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

from cute_kernels.limits import MAX_TOKEN_ENTRIES
from cute_kernels.mma.smem import CTA_SMEM_BYTES

MMA_WARPS = 8

KEY_TILE = MAX_TOKEN_ENTRIES
"""Compressed keys per mainloop step."""

LIST_UNIT = 32
"""List slots are padded to a multiple of this: lanes of a warp."""


class Tiling(NamedTuple):
    """Sizes of a work tile."""

    tokens: int
    """Tokens per work tile."""
    token_warps: int
    """MMA warps along the tokens of a subtile, 8 tokens each; they repeat along the entries."""

    @property
    def entry_warps(self) -> int:
        return MMA_WARPS // self.token_warps

    @property
    def subtile(self) -> int:
        """Tokens multiplied and selected for together."""
        return 8 * self.token_warps

    @property
    def num_subtiles(self) -> int:
        return self.tokens // self.subtile


TILINGS = (Tiling(64, 2), Tiling(32, 2), Tiling(16, 2), Tiling(8, 1))


def smem_bytes(tiling: Tiling, dim: int, group: int, count: int, ratio: int) -> int:
    """Shared memory of a CTA in bytes. Args: count: k. ratio: l'/d."""
    scores = tiling.subtile * score_layout(ratio)[1] * 4
    slots = -(-count // LIST_UNIT) * LIST_UNIT
    per_token = group * (2 * dim + 4) + slots * 8 + 4 * 4
    return tiling.tokens * per_token + KEY_TILE * dim * 2 + scores + 1024  # alignment


def choose_tiling(dim: int, group: int, count: int, ratio: int) -> Tiling | None:
    """Tiling with the most tokens that fits in shared memory, since every work tile reads the keys again.

    Args: dim: D. group: G. count: k. ratio: l'/d.
    """
    fitting = (tiling for tiling in TILINGS if smem_bytes(tiling, dim, group, count, ratio) <= CTA_SMEM_BYTES)
    return next(fitting, None)


def score_layout(ratio: int) -> tuple[int, int]:
    """Strides of a token's scores in shared memory: between the entries of a block, and between tokens.

    Entry r b + i, with `ratio` r = l'/d entries per block, is stored at column b of row i: lanes that pool consecutive
    blocks read consecutive words. Both strides are padded against bank conflicts: an MMA warp writes 8 entries of 4
    pairs of tokens at once.
    """
    columns = -(-KEY_TILE // ratio)
    columns += (max(1, 8 // ratio) - columns) % 8
    return columns, ratio * columns + (4 - ratio * columns) % 16
