"""Tensors of a layer's cache: its pages, and the lengths of its sequences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Memory of a layer, and the block table of its sequences (decode/pages.py)."""

    k: Tensor
    """`[pages,page_size,H_kv,D]`, of all branches, or of the selected one if `k_win` is given."""
    v: Tensor
    """`[pages,page_size,H_kv,D_v]`"""
    k_cmp: Tensor
    """`[pages,page_size/d,H_kv,D]`: entry j in the page of its last token e, in slot e % page_size // d."""
    v_cmp: Tensor
    """`[pages,page_size/d,H_kv,D_v]`"""
    block_table: Tensor
    """int32 `[B,pages per sequence]`; read for existing tokens, including new ones."""
    k_win: Tensor | None = None
    """Keys of the window, like k, if it has keys and values of its own."""
    v_win: Tensor | None = None

    @property
    def window(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the window."""
        return (self.k, self.v) if self.k_win is None or self.v_win is None else (self.k_win, self.v_win)


class LengthTensors(NamedTuple):
    """int32 `[B]` on the device."""

    cached: Tensor
    """Number of tokens of each sequence before the new ones."""
    new: Tensor
    """0 to N_q: number of new tokens, the first rows of each sequence."""
    overflowed: Tensor
    """bool `[B]`: sequences whose rows become NaN. They have no new tokens."""
