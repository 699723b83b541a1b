"""Masks of FlashAttention-4's kernels: the keys that a row sees, and mask_mods for `mask` blocks.

FA4 compiles a kernel for each mask_mod and for its constants; runtime values are scalars and tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from cute_kernels.runtime.compiling import once

if TYPE_CHECKING:
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen


class MaskMod(NamedTuple):
    """A mask_mod, by what makes it: making one imports FA4, so it is made where a kernel is compiled."""

    make: Callable[..., Any]
    constants: tuple[Any, ...] = ()
    """Arguments of `make`, which are compiled in."""

    def __repr__(self) -> str:
        """The same in every process: keys of kernels on disk hold it."""
        return f"{self.make.__module__}.{self.make.__qualname__}{self.constants!r}"


class Aux(NamedTuple):
    """Inputs of a mask_mod: FA4's AuxData, as kernels take it."""

    tensors: list[Tensor] | None
    scalars: tuple[Any, ...] | None


class Mask(NamedTuple):
    """Keys that a row sees."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    """Keys left and right of a row's own."""
    lists: BlockLists | None = None
    mask_mod: MaskMod | None = None
    scalars: tuple[int, ...] = ()
    """For the mask_mod."""
    tensors: list[Tensor] | None = None
    """For the mask_mod."""
    documents: Varlen | None = None

    def bounds(self) -> tuple[Any, ...]:
        """cu_seqlens and seqused, each of queries and of keys."""
        return (None,) * 4 if self.documents is None else tuple(self.documents)

    def aux(self) -> Aux:
        return Aux(self.tensors, _scalars(self.scalars))

    def sparse(self) -> tuple[Any, ...] | None:
        return None if self.lists is None else (*self.lists.tensors, None, None, None, None)


@lru_cache(256)
def _scalars(values: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Runtime numbers as kernels take them."""
    from cutlass import Int32

    return tuple(map(Int32, values)) or None


def ended_entries(
    q: Tensor, lists: BlockLists, length: int, stride: int, first_row: int, shifts: Tensor | None
) -> Mask:
    """Entry j is visible to row i iff its block has ended: j*stride + length-1 <= first_row + i.

    Args:
        shifts: instead of `first_row` one number for each tile of rows, int32 `[tiles]`.
    """
    if shifts is None:
        return Mask(lists=lists, mask_mod=MaskMod(_ended, (length, stride)), scalars=(first_row,))
    rows = q.shape[1] // max(shifts.shape[0], 1)
    return Mask(lists=lists, mask_mod=MaskMod(_ended_in_tile, (length, stride, rows)), tensors=[shifts])


def chosen_blocks(
    lists: BlockLists, bits: Tensor, group: int, causal: bool, scalars: tuple[int, int, int], shifts: Tensor | None
) -> Mask:
    """Token j is visible to row i iff the bit of its block is set for the row's tile and, with causality, j <= i.

    Args:
        bits: from kv_to_query.tile_bits.
        group: query heads that share their bits.
        scalars: the first tile, the first key, and the first row minus the first key.
        shifts: what to add to the rows of each tile before that, int32 `[tiles]`.
    """
    mask_mod = MaskMod(_chosen, (lists.bit_keys, lists.rows, group, causal, shifts is not None))
    tensors = [bits] if shifts is None else [bits, shifts]
    return Mask(lists=lists, mask_mod=mask_mod, scalars=scalars, tensors=tensors)


def all_keys(lists: BlockLists) -> Mask:
    """Every key of a listed block is visible."""
    return Mask(lists=lists, mask_mod=MaskMod(_anything))


@once
def _anything() -> Any:
    from cutlass import cute

    @cute.jit
    def anything(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        return row >= 0

    return anything


@once
def _ended(length: int, stride: int) -> Any:
    from cutlass import cute

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        return entry * stride + (length - 1) <= row + scalars[0]

    return ended


@once
def _ended_in_tile(length: int, stride: int, rows: int) -> Any:
    from cutlass import Int32, cute
    from flash_attn.cute import utils

    @cute.jit
    def ended(batch, head, row, entry, seqlen_info, tensors):  # type: ignore[no-untyped-def]
        shift = utils.scalar_to_ssa(tensors[0][row[0] // rows], Int32)
        return entry * stride + (length - 1) <= row + shift

    return ended


@once
def _chosen(bit_keys: int, rows: int, group: int, causal: bool, shifted: bool) -> Any:
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def chosen(batch, head, row, token, seqlen_info, tensors, scalars):  # type: ignore[no-untyped-def]
        tile = row[0] // rows + scalars[0]
        word = tensors[0][batch[0], head[0] // group, (token[0] + scalars[1]) // bit_keys, tile // 32]
        inside = utils.scalar_to_ssa((word >> (tile % 32)) & 1, cutlass.Int32) == 1
        if cutlass.const_expr(shifted):
            inside = inside & (token <= row + utils.scalar_to_ssa(tensors[1][tile] + scalars[2], cutlass.Int32))
        elif cutlass.const_expr(causal):
            inside = inside & (token <= row + scalars[2])
        return inside

    return chosen
