"""A layer's cache as tensors: its pages, and the lengths of its sequences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """A layer's memory, and where sequences lie in it (decode/pages.py)."""

    k: Tensor
    """`[pages,page_size,H_kv,D]`, of the selected branch and, but for `k_win`, of all."""
    v: Tensor
    """`[pages,page_size,H_kv,D_v]`"""
    k_cmp: Tensor
    """`[pages,page_size/d,H_kv,D]`: entry j in the page of its last token e, in slot e % page_size // d."""
    v_cmp: Tensor
    """`[pages,page_size/d,H_kv,D_v]`"""
    block_table: Tensor
    """int32 `[B,pages of a sequence]`; read for tokens that exist, the new ones among them."""
    k_win: Tensor | None = None
    """Of the window, like k, if it has keys and values of its own."""
    v_win: Tensor | None = None

    @property
    def window(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the window."""
        return (self.k, self.v) if self.k_win is None or self.v_win is None else (self.k_win, self.v_win)


class LengthTensors(NamedTuple):
    """int32 `[B]` on the device."""

    cached: Tensor
    """Tokens of a sequence in front of the new ones."""
    new: Tensor
    """0 to N_q: the first rows of a sequence are its new tokens."""
    overflowed: Tensor
    """bool `[B]`: sequences whose rows become NaN. They have no new tokens."""
