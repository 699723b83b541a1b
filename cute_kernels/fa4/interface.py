"""The three attentions of NSA through FlashAttention-4, each returning (o, lse), and their backward.

What FA4 4.0.0b36 does with block lists, read in its source; interpreted kernels and tests on a GPU rely on it:

- The mainloop takes `mask` blocks first, then `full` blocks, each list from its end. Only the first block taken from
  each list is masked at the end of the keys, so lists ascend, and the block with the end of the keys is the last.
- With native causality, sm_90 masks every block; sm_100 masks every `mask` block and the first `full` block taken. So
  blocks that cross the diagonal go into `mask`, and blocks before it into `full`. A mask_mod turns it off.
- A mask_mod is applied to every `mask` block and to no `full` block.
- Both lists must be given, also when one is empty. A list need not be longer than what is read of it.
- With cu_seqlens and seqused, rows that are not used are not written.

Its backward takes, for each block of keys, a list of tiles of rows. What differs from the forward:

- Every block is masked at the end of the keys, and native causality in every listed tile, so the order is free.
- sm_100 does not skip rows after the last one: without a mask_mod it counts the last rows twice in dk and dv.
- Native causality counts from the last row and the last key that are passed, so a range of keys needs a mask_mod.

q `[B,M,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`, rows aligned (device.vectorizable); o `[B,M,H,D_v]` in their dtype,
lse `[B,H,M]` fp32, natural log; rows without keys give 0 and -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.fa4 import kernels
from cute_kernels.fa4.kernels import Form, Shape, Tiles
from cute_kernels.fa4.masks import Mask, all_keys, chosen_blocks, ended_entries
from cute_kernels.fa4.rules import packs_gqa

if TYPE_CHECKING:
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen


@dataclass(frozen=True)
class Gradients:
    """Tensors that a backward reads, and those it writes: dq, dk and dv, in the shapes of q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Gradients:
        return Gradients(**{name: function(tensor) for name, tensor in vars(self).items()})

    def to_one_dim(self) -> Gradients:
        """With zeros appended to the smaller of D and D_v, which change no gradient; the gradients are new tensors."""
        dim = max(self.q.shape[-1], self.v.shape[-1])

        def widen(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, [0, dim - x.shape[-1]]) if x.shape[-1] < dim else x

        values = {name: tensor if name == "lse" else widen(tensor) for name, tensor in vars(self).items()}
        return Gradients(**values)


WriteStatistics = Callable[[Tensor, Tensor], None]
"""Writes lse in base 2 and do . o, fp32 `[B,H,rows]` with the rows padded to whole tiles, in place of preprocess."""


def compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists | None,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    lse: bool = True,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over compressed entries: entry j is visible to row i iff j*stride + length-1 <= first_row + i.

    Args:
        lists: blocks of entries for each query tile; None: no causality, everything is visible.
        shifts: instead of `first_row` one number for each tile of rows, int32 `[tiles]` (Documents.shifts).
    """
    mask = Mask() if lists is None else ended_entries(q, lists, length, stride, first_row, shifts)
    return attend(q, k, v, mask, scale=scale, lse=lse)


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    causal: bool,
    scale: float,
    lse: bool = True,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over listed blocks of tokens: row i of M sees token j of N if listed and, causal, j <= i + N - M.

    Args:
        shifts: instead of N - M one number for each tile of rows, int32 `[tiles]` (Documents.key_shifts); causal.
    """
    mask = Mask(causal=causal, lists=lists) if shifts is None else ended_entries(q, lists, 1, 1, 0, shifts)
    return attend(q, k, v, mask, scale=scale, lse=lse)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    lse: bool = True,
    documents: Varlen | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of row i to keys i-left ... i+right, where the last query row is the last key row.

    Args:
        documents: in q, k and v, with B = 1. Keys are finite to the end of a document's last tile (`window_tile_n`).
            Rows of o and lse that belong to no document hold anything.
        into: without documents, o and lse to write instead of new tensors; rows contiguous, o's aligned like q's.
    """
    if documents is None:
        return attend(q, k, v, Mask(window=(left, right)), scale=scale, lse=lse, into=into)
    rows = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    o, sums = attend(*rows, Mask(window=(left, right), documents=documents), scale=scale, lse=lse)
    return o.unsqueeze(0), None if sums is None else sums.unsqueeze(0)


# Backward. `lse` may be shifted: P = exp(S - lse), so with lse - log(g) gradients are those of g * o.


def compressed_backward(
    gradients: Gradients,
    lists: BlockLists,
    *,
    length: int,
    stride: int,
    first_row: int,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """Backward of `compressed`. `lists`: tiles of rows for each block of entries (lists/kv_to_query.py)."""
    mask = ended_entries(gradients.q, lists, length, stride, first_row, shifts)
    differentiate(gradients, mask, scale=scale)


def dense_backward(
    gradients: Gradients,
    *,
    causal: bool,
    scale: float,
    deterministic: bool = False,
    statistics: WriteStatistics | None = None,
) -> None:
    """Backward of attention to every entry; causal: where row i of M sees entry j of K iff j <= i + K - M.

    Args:
        deterministic: add up in a fixed order, which FA4 cannot do with lists.
        statistics: of the rows, in place of what FA4 computes of o, do and lse; `deterministic` calls do without.
    """
    differentiate(gradients, Mask(causal=causal), scale=scale, deterministic=deterministic, statistics=statistics)


def selected_backward(
    gradients: Gradients,
    lists: BlockLists,
    *,
    causal: bool,
    first_row: int = 0,
    first_key: int = 0,
    first_token: int = 0,
    scale: float,
    shifts: Tensor | None = None,
) -> None:
    """Backward of `selected`. `lists`: tiles of rows for each block of keys (lists/kv_to_query.py).

    Args:
        first_row, first_key: in the sequence; the first row begins a tile.
        first_token: the token that row 0 of the sequence is, where queries continue one.
        shifts: see `selected`; for all tiles; a range of keys has all rows then.
    """
    shift = first_token + first_row - first_key
    if lists.bits is not None:
        group = gradients.q.shape[2] // lists.bits.shape[1]
        mask = chosen_blocks(lists, lists.bits, group, causal, (first_row // lists.rows, first_key, shift), shifts)
    elif shifts is not None:
        mask = ended_entries(gradients.q, lists, 1, 1, 0, shifts - first_key if first_key > 0 else shifts)
    elif causal:
        mask = ended_entries(gradients.q, lists, 1, 1, shift, None)
    else:
        mask = all_keys(lists)
    differentiate(gradients, mask, scale=scale)


def window_backward(
    gradients: Gradients,
    *,
    left: int,
    right: int,
    scale: float,
    documents: Varlen | None = None,
    deterministic: bool = False,
) -> None:
    """Backward of `window`. With documents, rows of the gradients that belong to none hold anything.

    Args:
        documents: each begins at a multiple of ONE_TILE in k. Keys that no row sees get zeros only where dk and dv
            held them before.
    """
    if documents is None:
        differentiate(gradients, Mask(window=(left, right)), scale=scale, deterministic=deterministic)
    else:
        squeezed = gradients.map(lambda x: x.squeeze(0))
        differentiate(squeezed, Mask(window=(left, right), documents=documents), scale=scale)


# Launches


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    lse: bool,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FA4's forward.

    Args:
        into: o, whose rows are aligned, and lse to write instead of new tensors.
    """
    *batch, rows, heads, _ = q.shape
    sums: Tensor | None
    if into is None:
        o = torch.empty((*batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device) if lse else None
    else:
        o, sums = into
    if q.numel() == 0 or k.numel() == 0:
        o.zero_()
        return o, sums if sums is None else sums.fill_(float("-inf"))
    # A caller's o and lse may have any strides, as those of a dilated neighborhood do
    window_tiles = into is None and mask.window != (None, None) and packs_gqa(q, k)
    packs = window_tiles and mask.documents is None
    form = Form.of(mask, q, k, v)
    shape = Shape.of(form, q, packs)
    table = _tile_table(
        form, mask, 0, kernels.forward_tile(form, window_tiles)[0] * (1 if shape is None else shape.stages)
    )
    options: tuple[Any, ...] = (mask.sparse(), mask.aux(), table, None)
    if shape is not None:
        options = (None, mask.sparse(), mask.aux(), *[None] * 4, table, None, None, rows)
    kernel = kernels.forward(form, sums is not None, packs, window_tiles, shape)
    kernel.run(q, k, v, o, sums, scale, *mask.bounds(), None, *mask.window, None, *options)
    return o, sums


def differentiate(
    given: Gradients,
    mask: Mask,
    *,
    scale: float,
    deterministic: bool = False,
    statistics: WriteStatistics | None = None,
) -> None:
    """FA4's backward. A KV head's dk and dv are added up in fp32 over its query heads, dq over the blocks of keys.

    Args:
        deterministic: add up in a fixed order; without block lists and documents.
        statistics: of the rows, where there are no documents.
    """
    if given.q.shape[-1] == given.v.shape[-1]:
        _differentiate(given, mask, scale, deterministic, statistics)
        return
    gradients = given.to_one_dim()  # FA4 wants equal dims where query heads share keys
    _differentiate(gradients, mask, scale, deterministic, statistics)
    for name in ("dq", "dk", "dv"):
        target, wide = getattr(given, name), getattr(gradients, name)
        if wide is not target:
            target.copy_(wide[..., : target.shape[-1]])


def _differentiate(
    given: Gradients, mask: Mask, scale: float, deterministic: bool, statistics: WriteStatistics | None
) -> None:
    q, k = given.q, given.k
    if q.numel() == 0 or k.numel() == 0:
        for x in (given.dq, given.dk, given.dv):
            x.zero_()
        return
    form = Form.of(mask, q, k, given.v, given.do)
    tiles, shared, plain = Tiles.of(form), form.group > 1, form.without_mask()
    first, first_key, seqused, seqused_k = mask.bounds()
    *batch, rows, heads, dim = q.shape
    *_, keys, kv_heads, _ = k.shape
    rows, keys = tiles.padded(rows, keys, 0 if first is None else len(first) - 1)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    delta, log2_lse = torch.empty((2, *batch, heads, rows), **fp32).unbind(0)
    dq = torch.empty((*batch, heads, rows * dim), **fp32)
    dk, dv = given.dk, given.dv
    if shared:
        dk, dv = torch.zeros((2, *batch, kv_heads, keys * dim), **fp32).unbind(0)
    semaphores: list[Tensor | None] = [None, None, None]
    if deterministic:
        zeros = partial(torch.zeros, dtype=torch.int32, device=q.device)
        semaphores[0] = zeros((*batch, heads, rows // tiles.rows, tiles.ctas))
        if shared:
            semaphores[1:] = (zeros((*batch, kv_heads, keys // tiles.keys, 2)) for _ in range(2))
    of_rows, of_keys = (_tile_table(form, mask, i, n) for i, n in enumerate((tiles.rows, tiles.ctas * tiles.keys)))
    nothing = (None, None, None)
    if statistics is not None:
        statistics(log2_lse, delta)
        dq.zero_()
    else:
        of_o = given.o, given.do, delta, given.lse, log2_lse, dq, first, seqused
        kernels.preprocess(plain, tiles.rows).run(*of_o, *nothing, 1.0, of_rows, None)
    options = *mask.bounds(), *mask.window, *semaphores, mask.aux(), mask.sparse(), of_keys
    kernels.backward(form, deterministic).run(q, k, given.v, given.do, log2_lse, delta, dq, dk, dv, scale, *options)
    kernels.round_sums(plain, tiles, False).run(dq, given.dq, scale, first, seqused, None, of_rows)
    if shared:
        if tiles.ctas > 1:
            of_keys = _tile_table(form, mask, 1, tiles.keys)
        for sums, out, factor in ((dk, given.dk, scale), (dv, given.dv, 1.0)):
            kernels.round_sums(plain, tiles, True).run(sums, out, factor, first_key, seqused_k, None, of_keys)


def _tile_table(form: Form, mask: Mask, of_keys: int, rows: int) -> Tensor | None:
    """Tiles of `rows` rows or keys before each document, where there are many documents."""
    if not form.many:
        return None
    first, used = mask.bounds()[of_keys::2]
    counts = torch.empty_like(first)
    kernels.count_tiles(rows).run(counts, None, first, used, None, None)
    return counts
