"""Packs, and sequences of one length, whose queries may continue them from starts that only the device knows.

A call is bit for bit what one call for each document is, with an integer `q_start`; interpreted and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import oracles
from nsa import NSAAux, NSAConfig, reference
from nsa.inputs import NSAInputs
from tests.support.causality import BRANCHES, LSES
from tests.support.cute_cases import SLACK, gradients
from tests.support.helpers import assert_within_budget, make_qkv

TAIL = 3
"""Queries and keys behind the last document, which hold NaN."""

Run = Callable[[NSAInputs, NSAConfig], tuple[Tensor, NSAAux]]


class Document(NamedTuple):
    """A document by itself, and where it lies in the call's tensors."""

    whole: NSAInputs
    """Its tokens up to the last query, as an ordinary call."""
    inputs: NSAInputs
    """Its queries, with the keys up to the last one: N_k - N_q is the start."""
    row: int
    """The sequence, of a call without documents; else 0."""
    rows: slice
    keys: slice
    tiles: slice


@dataclass(frozen=True)
class Pack:
    documents: tuple[tuple[int, int, int], ...]
    """Start, queries, and keys behind the last query."""
    config: NSAConfig
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    sequences: bool = False
    """As sequences of one length, in place of packed documents; all have as many queries, and as many keys."""
    device: str = "cpu"

    @property
    def continues(self) -> bool:
        """False for plain packed documents, whose queries and keys are the same tokens."""
        return self.sequences or any(start > 0 or later > 0 for start, _, later in self.documents)

    def _tensors(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = sum(self.documents[i])
        q, k, v = make_qkv(tokens, self.heads, self.kv_heads, self.dim, batch=1, dtype=torch.bfloat16, seed=i)
        return q.to(self.device), k.to(self.device), v.to(self.device)

    @property
    def weight(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn((self.heads, 3, self.dim), generator=generator) * self.dim**-0.5
        return weight.to(self.device, torch.bfloat16)

    def _sums(self, q: Tensor, start: int) -> Tensor:
        """q_sum of a document."""
        return q[:, start // self.config.q_tile_size * self.config.q_tile_size : start].float().sum(1)

    def each(self) -> Iterator[Document]:
        """Documents that have queries."""
        row, key, tile, size = 0, 0, 0, self.config.q_tile_size
        for i, (start, count, later) in enumerate(self.documents):
            q, k, v = self._tensors(i)
            stop = start + count
            tiles = -(-stop // size) - start // size if count > 0 else 0
            whole = NSAInputs(q[:, :stop], k[:, :stop], v[:, :stop], gate_proj_weight=self.weight)
            inside = self._sums(q, start) if start % size else None
            where = slice(row, row + count), slice(key, key + stop), slice(tile, tile + tiles)
            if self.sequences:
                where = slice(count), slice(stop), slice(tiles)
            if count > 0:
                yield Document(whole, replace(whole, q=whole.q[:, start:], q_sum=inside), i, *where)
            row, key, tile = row + count, key + stop + later, tile + tiles

    @property
    def inputs(self) -> NSAInputs:
        parts = [self._tensors(i) for i in range(len(self.documents))]
        starts, counts, later = zip(*self.documents, strict=True)
        queries = [q[:, s : s + n] for (q, _, _), s, n in zip(parts, starts, counts, strict=True)]
        q, k, v = (torch.cat(x, 0 if self.sequences else 1) for x in (queries, *list(zip(*parts, strict=True))[1:]))
        given: dict[str, Any] = {"gate_proj_weight": self.weight, "q_start": self._int32(starts)}
        if self.continues and not self.config.token_mode:
            given["q_sum"] = torch.cat([self._sums(x, s) for (x, _, _), s in zip(parts, starts, strict=True)])
        if self.sequences:
            return NSAInputs(q, k, v, **given)
        q, k, v = (torch.cat([x[0], x.new_full((TAIL, *x.shape[2:]), torch.nan)]) for x in (q, k, v))
        tokens = [sum(document) for document in self.documents]
        bounds = {"cu_seqlens": self._int32([0, *counts])}
        if self.continues:
            bounds["cu_seqlens_k"] = self._int32([0, *tokens])
        if not any(later):
            del given["q_start"]  # queries end with the keys
        return NSAInputs(q, k, v, **given, **{name: x.cumsum(0).int() for name, x in bounds.items()})

    def _int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def part(x: Tensor, document: Document, sequences: bool, at: slice, dim: int = 0) -> Tensor:
    """What belongs to a document, with a batch dimension of 1."""
    if sequences:
        x = x[document.row]
    return x.movedim(dim, 0)[at].movedim(0, dim)[None]


def assert_each_as_alone(pack: Pack, run: Run) -> tuple[Tensor, NSAAux]:
    """Bit for bit: out, branches, their LSE, selections, entries; nothing behind the documents."""
    out, aux = run(pack.inputs, pack.config)
    config, entry = pack.config, 0
    for i, document in enumerate(pack.each()):
        where, of = f"document {i}", pack.sequences
        alone, alone_aux = run(document.inputs, config)
        indices = part(aux.indices, document, of, document.tiles, 1)
        assert torch.equal(indices, alone_aux.indices), f"{where}: another selection"
        assert torch.equal(part(out, document, of, document.rows), alone), where
        for name in BRANCHES:
            got = part(getattr(aux, name), document, of, document.rows)
            assert torch.equal(got, getattr(alone_aux, name)), f"{where}: {name}"
        for name in LSES:
            got = part(getattr(aux, name), document, of, document.rows, 1)
            assert torch.equal(got, getattr(alone_aux, name)), f"{where}: {name}"
        if of:
            entries = alone_aux.k_cmp.shape[1]
            assert torch.equal(aux.k_cmp[document.row : document.row + 1, :entries], alone_aux.k_cmp), where
            assert not aux.k_cmp[document.row, entries:].any(), f"{where}: entries behind the last query"
    if not pack.sequences:
        for start, count, later in pack.documents:
            own, all_of_them = config.num_compressed(start + count), config.num_compressed(start + count + later)
            assert bool(aux.k_cmp[entry : entry + own].any()) == (own > 0)
            assert not aux.k_cmp[entry + own : entry + all_of_them].any(), "entries behind the last query"
            entry += all_of_them
        assert not out[-TAIL:].any()
        assert not aux.k_cmp[entry:].any()
    return out, aux


def assert_gradients(pack: Pack, aux: NSAAux, do: Tensor, got: dict[str, Tensor]) -> None:
    """Each document's shares are those of its whole call, of rows from the start on, in fp64."""
    weight = torch.zeros(pack.weight.shape, dtype=torch.float64, device=pack.device)
    naive_weight = torch.zeros_like(weight)
    for document in pack.each():
        whole, of = document.whole, pack.sequences
        rows = whole.q.shape[1] - document.inputs.q.shape[1]
        own = part(do, document, of, document.rows)
        wanted = torch.cat([own.new_zeros((1, rows, *own.shape[2:])), own], 1)
        selected = reference.nsa(whole.map(Tensor.double), pack.config)[1]._asdict()
        fixed: dict[str, Any] = {}
        for name in ("indices", "cmp_indices"):
            if (blocks := selected[name]) is not None:
                chosen = part(getattr(aux, name), document, of, document.tiles, 1)
                blocks[:, :, blocks.shape[2] - chosen.shape[2] :] = chosen[..., : blocks.shape[3]]
                fixed[name] = blocks.long()

        def exact(x: NSAInputs, fixed: dict[str, Any] = fixed) -> Tensor:
            return reference.nsa(x, pack.config, **fixed)[0]

        def low(x: NSAInputs, fixed: dict[str, Any] = fixed) -> Tensor:
            return oracles.nsa(x, pack.config, **fixed)[0]

        expected = gradients(exact, whole.map(Tensor.double), wanted.double())
        naive = gradients(low, whole, wanted)
        for name, at in (("q", document.rows), ("k", document.keys), ("v", document.keys)):
            mine = part(got[name], document, of, at)
            theirs = [x[name][:, rows:] if name == "q" else x[name] for x in (expected, naive)]
            assert_within_budget(mine, *theirs, f"gradient of {name}", slack=SLACK)
            got[name].view(-1, *got[name].shape[-2:])  # contiguous
        weight += expected["gate_proj_weight"]
        naive_weight += naive["gate_proj_weight"].double()
    assert_within_budget(got["gate_proj_weight"], weight, naive_weight, "gradient of gate_proj_weight", slack=SLACK)
    for name in ("q", "k", "v"):
        rest = got[name].clone()
        for document in pack.each():
            at = document.rows if name == "q" else document.keys
            (rest[document.row] if pack.sequences else rest)[at] = 0
        assert not rest.any(), f"gradient of {name} of what no document has"


TOKEN = NSAConfig.paper(compress_block_size=16, compress_stride=8, num_selected_blocks=4, window_size=30)
TILE = NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=2, window_size=50)
PACKS = {
    # Starts anywhere, documents without queries or tokens, one query, keys behind the last query
    "token": Pack(((70, 20, 0), (130, 1, 5), (0, 0, 0)), TOKEN),
    "token, many": Pack(((70, 40, 0), (0, 30, 0), (130, 1, 5), (0, 0, 0), (64, 0, 0), (100, 33, 0)), TOKEN),
    "token, bottom right": Pack(((70, 40, 0), (0, 9, 0)), TOKEN, heads=4, kv_heads=2),
    "tile": Pack(((256, 44, 0), (0, 30, 3), (512, 1, 0), (60, 0, 0)), TILE),
    "inside a tile": Pack(((300, 44, 0), (0, 30, 3), (70, 20, 0)), TILE),
    "sequences": Pack(((70, 40, 0), (0, 40, 70), (30, 40, 40)), TOKEN, sequences=True),
    "sequences, inside a tile": Pack(((200, 90, 10), (10, 90, 200)), TILE, sequences=True),
}
