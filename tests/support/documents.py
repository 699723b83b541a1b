"""The documents, or sequences, of a call of NSA one by one, and what of its results belongs to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from nsa import NSAAux, NSAConfig
from nsa.inputs import ENTRY_NAMES, KEY_NAMES, QUERY_NAMES, NSAInputs


@dataclass(frozen=True)
class Document:
    """A call on a document by itself, with a batch of one, and where the document is in tensors of the whole call."""

    inputs: NSAInputs
    """Keys end with the last query, so that the first query is token N_k - N_q."""
    number: int
    """Index of the document, or sequence."""
    packed: bool
    rows: slice
    keys: slice
    tiles: slice
    entries: slice

    def part(self, name: str, x: Tensor) -> Tensor:
        """View of the document's part, with a batch of one, of an input, its gradient, or a field of NSAAux."""
        x = x[None] if self.packed else x[self.number : self.number + 1]
        if name.endswith("indices"):
            return x[:, :, self.tiles]
        if name.startswith("lse"):
            return x[:, :, self.rows]
        if name in KEY_NAMES:
            return x[:, self.keys]
        return x[:, self.entries if name in ENTRY_NAMES else self.rows]


def documents(inputs: NSAInputs, config: NSAConfig, *, empty: bool = False) -> Iterator[Document]:
    """Documents that have queries; with `empty` all."""
    packed, q_start = inputs.packed, inputs.q_start
    batch = inputs.q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    starts = q_start.tolist() if isinstance(q_start, Tensor) else [q_start] * batch
    rows, keys = slice(0, inputs.q.shape[1]), slice(0, inputs.k.shape[1])
    tile = entry = 0
    for b, start in enumerate(starts):
        if packed:
            rows, keys = (slice(*x[b : b + 2].tolist()) for x in (inputs.cu_seqlens, inputs.key_bounds))
        count, length = rows.stop - rows.start, keys.stop - keys.start
        first = length - count if start is None else start
        stop, size = first + count, config.q_tile_size
        tiles = -(-stop // size) - first // size if count > 0 else 0
        where = rows, slice(keys.start, keys.start + stop), slice(tile, tile + tiles)
        document = Document(inputs, b, packed, *where, slice(entry, entry + config.num_compressed(stop)))
        if count > 0 or empty:
            own = {
                n: document.part(n, x)
                for n, x in inputs.tensors().items()
                if n in QUERY_NAMES + KEY_NAMES + ENTRY_NAMES
            }
            own["q_sum"] = inputs.q_sum[b : b + 1] if inputs.q_sum is not None and first % size else None
            yield replace(document, inputs=replace(inputs, **own, cu_seqlens=None, cu_seqlens_k=None, q_start=None))
        if packed:
            tile, entry = tile + tiles, entry + config.num_compressed(length)


def of_document(aux: NSAAux, document: Document) -> NSAAux:
    """The document's part of all fields."""
    return NSAAux(**{name: None if x is None else document.part(name, x) for name, x in aux._asdict().items()})
