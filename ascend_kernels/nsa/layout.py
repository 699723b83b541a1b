"""Every call as a pack of documents: small int32 tables on the device that tell kernels where rows are.

    docs     `[B,8]`, a row per document (or sequence): the columns below
    tiles    `[bound,2]`: document and first row of each work tile; -1 for tiles past the last document

Sequences of one length are documents whose bounds follow from shapes; the bounds of packed documents stay on the
device. Tables have room for as many tiles as the shapes allow, so nothing waits for the device. Tensors `[B,N,heads,D]`
are flattened to rows `[B*N,heads,D]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field as field_of
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch

# Columns of `docs`. Lengths of keys and entries end with the document's last query if the call is causal.
Q_ROW = tl.constexpr(0)
Q_LEN = tl.constexpr(1)
K_ROW = tl.constexpr(2)
K_LEN = tl.constexpr(3)
E_ROW = tl.constexpr(4)
E_LEN = tl.constexpr(5)
START = tl.constexpr(6)
"""Token index of the document's first query."""
T_ROW = tl.constexpr(7)
"""First selection tile of the document."""
COLUMNS = tl.constexpr(8)

DOCS = 1024
"""Documents whose lengths a program adds at a time."""


@triton.jit
def field(p_docs, i_doc, COLUMN: tl.constexpr):
    """One number of a document."""
    return tl.load(p_docs + i_doc * COLUMNS + COLUMN)


@triton.jit
def row_field(p_docs, i_doc, COLUMN: tl.constexpr):
    """The first row of a document, in int64 for offsets."""
    return field(p_docs, i_doc, COLUMN).to(tl.int64)


@triton.jit
def rows_in_documents(p_docs, num_docs):
    """Number of query rows up to the end of the last document."""
    end = tl.cast(0, tl.int64)
    if num_docs > 0:
        end = row_field(p_docs, num_docs - 1, Q_ROW) + field(p_docs, num_docs - 1, Q_LEN)
    return end


@triton.jit
def visible_until(o_tokens, first, step, limit):
    """Number of leading keys that each token sees: those j with j * step + first <= token, at most `limit`.

    Triton's // rounds towards 0, so tokens before `first` are excluded before the division.
    """
    return tl.minimum(tl.where(o_tokens >= first, (o_tokens - first) // step + 1, 0), limit)


@triton.jit
def num_entries(num_tokens, length, stride):
    """Number of compressed entries of a document."""
    return tl.where(num_tokens >= length, (num_tokens - length) // stride + 1, 0)


@triton.jit
def bounds_of(p_bounds, i_doc, num_tokens, EQUAL: tl.constexpr):
    """Row of a document's first token, and number of its tokens."""
    if EQUAL:
        first, length = i_doc * num_tokens, num_tokens + 0 * i_doc
    else:
        first = tl.load(p_bounds + i_doc)
        length = tl.load(p_bounds + i_doc + 1) - first
    return first, length


@triton.jit(do_not_specialize=("num_docs", "num_queries", "num_keys", "length", "stride", "tile"))
def docs_kernel(
    p_bounds, p_key_bounds, p_starts, p_docs, num_docs, num_queries, num_keys, length, stride, tile,
    EQUAL: tl.constexpr, STARTS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One document per program. Entries and tiles of the documents before it are counted first."""
    i_doc = tl.program_id(0)
    entries_before, tiles_before = 0, 0
    for i_first in range(0, i_doc, BLOCK):
        o_docs = i_first + tl.arange(0, BLOCK)
        before = o_docs < i_doc
        o_docs = tl.where(before, o_docs, 0)
        _, o_q_len = bounds_of(p_bounds, o_docs, num_queries, EQUAL)
        _, o_k_len = bounds_of(p_key_bounds, o_docs, num_keys, EQUAL)
        entries_before += tl.sum(tl.where(before, num_entries(o_k_len, length, stride), 0), 0)
        tiles_before += tl.sum(tl.where(before, tl.cdiv(o_q_len, tile), 0), 0)
    q_row, q_len = bounds_of(p_bounds, i_doc, num_queries, EQUAL)
    k_row, k_len = bounds_of(p_key_bounds, i_doc, num_keys, EQUAL)
    if STARTS:
        start = tl.load(p_starts + i_doc)
    else:
        start = k_len - q_len
    if CAUSAL:
        k_len = start + q_len
    p_doc = p_docs + i_doc * COLUMNS
    tl.store(p_doc + Q_ROW, q_row)
    tl.store(p_doc + Q_LEN, q_len)
    tl.store(p_doc + K_ROW, k_row)
    tl.store(p_doc + K_LEN, k_len)
    tl.store(p_doc + E_ROW, entries_before)
    tl.store(p_doc + E_LEN, num_entries(k_len, length, stride))
    tl.store(p_doc + START, start)
    tl.store(p_doc + T_ROW, tiles_before)


@triton.jit(do_not_specialize=("num_docs", "rows_per_tile", "num_tiles"))
def tiles_kernel(p_docs, p_tiles, num_docs, rows_per_tile, num_tiles, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    """Work tiles of one document per program; the last program also marks the tiles past all documents."""
    i_doc = tl.program_id(0)
    first = 0
    for i_first in range(0, i_doc, BLOCK):
        o_docs = i_first + tl.arange(0, BLOCK)
        o_len = tl.load(p_docs + o_docs * COLUMNS + COLUMN, mask=o_docs < i_doc, other=0)
        first += tl.sum(tl.cdiv(o_len, rows_per_tile), 0)
    count = tl.cdiv(field(p_docs, i_doc, COLUMN), rows_per_tile)
    for i_tile in range(0, count, BLOCK):
        o_tile = i_tile + tl.arange(0, BLOCK)
        p_tile = p_tiles + 2 * (first + o_tile)
        tl.store(p_tile, i_doc + 0 * o_tile, mask=o_tile < count)
        tl.store(p_tile + 1, o_tile * rows_per_tile, mask=o_tile < count)
    if i_doc == num_docs - 1:
        for i_tile in range(first + count, num_tiles, BLOCK):
            o_tile = i_tile + tl.arange(0, BLOCK)
            tl.store(p_tiles + 2 * o_tile, -1 + 0 * o_tile, mask=o_tile < num_tiles)


@dataclass(frozen=True)
class Pack:
    """Documents of a call.

    Args:
        docs: int32 `[B,8]`.
        num_rows, num_keys: rows of q and of k in memory.
        num_entries: bound on the compressed entries of all documents.
        most_rows, most_keys, most_entries: bounds on those of one document.
        equal: True if all documents have the same length.
        all_keys: True if every key is one of a document's, and not after its last query if the call is causal.
        tile: T, query rows that share a selection.
    """

    docs: Tensor
    num_rows: int
    num_keys: int
    num_entries: int
    most_rows: int
    most_keys: int
    most_entries: int
    equal: bool
    all_keys: bool
    tile: int
    _tables: dict[tuple[int, int], Tensor] = field_of(default_factory=dict)
    """Work tiles by column of `docs` and size: kernels of a call share them."""

    @property
    def num_docs(self) -> int:
        return int(self.docs.shape[0])

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
        """A tensor for results of each row; filled where rows may be in no document."""
        if self.equal:
            return torch.empty(shape, dtype=dtype, device=self.docs.device)
        return torch.full(shape, fill, dtype=dtype, device=self.docs.device)

    def row_tiles(self, rows: int) -> Tensor:
        """Work tiles of so many query rows."""
        return self._tiles(1, rows, self.num_rows, self.most_rows)

    def key_tiles(self, keys: int) -> Tensor:
        """Work tiles of so many keys."""
        return self._tiles(3, keys, self.num_keys, self.most_keys)

    def entry_tiles(self, entries: int) -> Tensor:
        """Work tiles of so many compressed entries."""
        return self._tiles(5, entries, self.num_entries, self.most_entries)

    @property
    def rows(self) -> Tensor:
        """Document, and row inside of it, of each query row."""
        return self.row_tiles(1)

    @cached_property
    def num_tiles(self) -> int:
        """Bound on the selection tiles of all documents."""
        return self._bound(self.tile, self.num_rows, self.most_rows)

    def _bound(self, size: int, total: int, most: int) -> int:
        if self.equal:
            return self.num_docs * -(-most // size)
        return (total + self.num_docs * (size - 1)) // size if self.num_docs > 0 else 0

    def _tiles(self, column: int, size: int, total: int, most: int) -> Tensor:
        if (column, size) in self._tables:
            return self._tables[column, size]
        bound = self._bound(size, total, most)
        tiles = torch.empty((bound, 2), dtype=torch.int32, device=self.docs.device)
        if bound > 0:
            sizes = {"num_docs": self.num_docs, "rows_per_tile": size, "num_tiles": bound}
            launch(
                tiles_kernel,
                (self.num_docs,),
                {"p_docs": self.docs, "p_tiles": tiles, **sizes},
                {"COLUMN": column, "BLOCK": DOCS},
            )
        self._tables[column, size] = tiles
        return tiles


def pack_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_start: Tensor | None = None,
    *,
    length: int,
    stride: int,
    tile: int,
    causal: bool,
) -> Pack:
    """Documents of q and k.

    Args:
        cu_seqlens, cu_seqlens_k, q_start: as in nsa.inputs.NSAInputs after `narrow`.
        length, stride, tile: l, d and T, for the places of entries and of selection tiles.
        causal: keys after a document's last query are not seen.
    """
    equal = cu_seqlens is None
    num_rows, num_keys = (math.prod(x.shape[:-2]) for x in (q, k))
    most_rows, most_keys = (q.shape[1], k.shape[1]) if equal else (num_rows, num_keys)
    num_docs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    docs = torch.empty((num_docs, COLUMNS.value), dtype=torch.int32, device=q.device)
    if num_docs > 0:
        key_bounds = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        given = {"p_bounds": cu_seqlens, "p_key_bounds": key_bounds, "p_starts": q_start}
        tensors = {name: docs if x is None else x.contiguous() for name, x in given.items()}  # docs: not read
        sizes = {
            "num_docs": num_docs, "num_queries": most_rows, "num_keys": most_keys, "length": length, "stride": stride,
            "tile": tile,
        }  # fmt: skip
        constants = {"EQUAL": equal, "STARTS": q_start is not None, "CAUSAL": causal, "BLOCK": DOCS}
        launch(docs_kernel, (num_docs,), {**tensors, "p_docs": docs, **sizes}, constants)
    most_entries = max(0, (most_keys - length) // stride + 1)
    num_entries = num_docs * most_entries if equal else num_keys // stride
    all_keys = equal and q_start is None
    return Pack(docs, num_rows, num_keys, num_entries, most_rows, most_keys, most_entries, equal, all_keys, tile)


def rows_of(x: Tensor) -> Tensor:
    """`[B,N,heads,D]` or `[T,heads,D]` as rows `[rows,heads,D]` with contiguous features; a copy where views cannot."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[2:])


def strided(name: str, rows: Tensor) -> dict[str, Any]:
    """Arguments for rows `[rows,heads,D]`: pointer, and strides of rows and heads."""
    return {f"p_{name}": rows, f"{name}_row": rows.stride(0), f"{name}_head": rows.stride(1)}
