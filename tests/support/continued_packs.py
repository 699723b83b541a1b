"""Packs, and sequences of one length, whose queries may continue them from starts that only the device knows.

A call is bit for bit what one call for each document is, with an integer `q_start`; interpreted and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from nsa import NSAAux, NSAConfig, reference
from nsa.inputs import ENTRY_NAMES, KEY_NAMES, QUERY_NAMES, NSAInputs
from tests.support.cute_cases import SLACK, gradients
from tests.support.documents import documents
from tests.support.gpu_calls import WEIGHTS, Case
from tests.support.helpers import assert_within_budget

TAIL = 3
"""Queries and keys behind the last document, which hold NaN."""

Run = Callable[[NSAInputs, NSAConfig], tuple[Tensor, NSAAux]]


@dataclass(frozen=True)
class Pack:
    documents: tuple[tuple[int, int, int], ...]
    """Start, queries, and keys behind the last query."""
    config: NSAConfig
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    v_dim: int = 64
    tensors: tuple[str, ...] = ("gate_proj_weight",)
    """Optional inputs to give."""
    sequences: bool = False
    """As sequences of one length, in place of packed documents; all have as many queries, and as many keys."""
    device: str = "cpu"

    @property
    def continues(self) -> bool:
        """False for plain packed documents, whose queries and keys are the same tokens."""
        return self.sequences or any(start > 0 or later > 0 for start, _, later in self.documents)

    def place(self, i: int) -> tuple[int, int]:
        """Where a document begins in `tokens_of`: sequence and row."""
        return (i, 0) if self.sequences else (0, sum(map(sum, self.documents[:i])))

    def whole(self, i: int) -> NSAInputs:
        """A document's tokens up to its last query, as an ordinary call."""
        b, first = self.place(i)
        there = slice(first, first + sum(self.documents[i][:2]))
        tensors = tokens_of(self).tensors().items()
        return NSAInputs(**{n: x[b : b + 1, there] if n in QUERY_NAMES + KEY_NAMES else x for n, x in tensors})

    @property
    def inputs(self) -> NSAInputs:
        def queries(x: Tensor) -> Tensor:
            places = [(*self.place(i), start, count) for i, (start, count, _) in enumerate(self.documents)]
            parts = [x[b, first + start : first + start + count] for b, first, start, count in places]
            return torch.stack(parts) if self.sequences else padded(torch.cat(parts))

        def keys(x: Tensor) -> Tensor:
            return x if self.sequences else padded(x[0])

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_full((TAIL, *x.shape[1:]), math.nan)])

        cut = dict.fromkeys(QUERY_NAMES, queries) | dict.fromkeys(KEY_NAMES, keys)
        given: dict[str, Any] = {name: cut.get(name, torch.clone)(x) for name, x in tokens_of(self).tensors().items()}
        starts, counts, later = zip(*self.documents, strict=True)
        if self.sequences or any(later):  # else queries end with the keys
            given["q_start"] = self._int32(starts)
        if self.continues and not self.config.token_mode:
            given["q_sum"] = torch.cat([self._sums(i) for i in range(len(starts))])
        if not self.sequences:
            given["cu_seqlens"] = self._int32([0, *counts]).cumsum(0).int()
            if self.continues:
                given["cu_seqlens_k"] = self._int32([0, *map(sum, self.documents)]).cumsum(0).int()
        return NSAInputs(**given)

    def _sums(self, i: int) -> Tensor:
        """q_sum of a document."""
        (b, first), start, size = self.place(i), self.documents[i][0], self.config.q_tile_size
        return tokens_of(self).q[b : b + 1, first + start // size * size : first + start].float().sum(1)

    def _int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@lru_cache(maxsize=1)
def tokens_of(pack: Pack) -> NSAInputs:
    """Tensors of all tokens, each with a query; packed documents one behind the other, as one sequence."""
    lengths = [sum(document) for document in pack.documents]
    tokens, batch = (lengths[0], len(lengths)) if pack.sequences else (sum(lengths), 1)
    sizes = {"heads": pack.heads, "kv_heads": pack.kv_heads, "dim": pack.dim, "v_dim": pack.v_dim}
    return Case(pack.config, tokens, batch=batch, tensors=pack.tensors, **sizes).inputs(pack.device)


def assert_each_as_alone(pack: Pack, run: Run) -> tuple[Tensor, NSAAux]:
    """Bit for bit all results; those that belong to no document hold 0, indices -1, LSE -inf."""
    inputs, config = pack.inputs, pack.config
    out, aux = run(inputs, config)
    results = {"out": out, **{name: x for name, x in aux._asdict().items() if x is not None}}
    assert aux.indices.shape[-2] == inputs.num_tiles(config)
    assert aux.k_cmp.shape[-3] == inputs.num_entries(config)
    rest = {name: x.clone() for name, x in results.items()}
    fills = {name: -math.inf if name.startswith("lse") else -1 if name.endswith("indices") else 0 for name in rest}
    for document in documents(inputs, config, empty=True):
        for name in ENTRY_NAMES:  # also those of documents without queries
            document.part(name, rest[name]).fill_(0)
        if document.inputs.q.shape[1] == 0:
            continue
        alone_out, alone = run(document.inputs, config)
        expected = {"out": alone_out, **{name: x for name, x in alone._asdict().items() if x is not None}}
        assert results.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(document.part(name, results[name]), x), f"{name} of rows {document.rows}"
            document.part(name, rest[name]).fill_(fills[name])
    for name, x in rest.items():
        assert bool((x == fills[name]).all()), f"{name} of no document"
    return out, aux


def assert_gradients(pack: Pack, aux: NSAAux, do: Tensor, got: dict[str, Tensor]) -> None:
    """Each document's shares are those of its whole call, of rows from the start on, in fp64."""
    rest = {name: x.clone() for name, x in got.items()}
    weights: dict[str, list[Tensor]] = {}
    with_queries = [i for i, (_, count, _) in enumerate(pack.documents) if count > 0]
    for i, document in zip(with_queries, documents(pack.inputs, pack.config), strict=True):
        whole, first = pack.whole(i), pack.documents[i][0]
        own = document.part("out", do)
        wanted = torch.cat([own.new_zeros((1, first, *own.shape[2:])), own], 1)
        selected = reference.nsa(whole.map(Tensor.double), pack.config)[1]._asdict()
        fixed: dict[str, Any] = {}
        for name in ("indices", "cmp_indices"):
            if (blocks := selected[name]) is not None:
                chosen = document.part(name, getattr(aux, name))
                blocks[:, :, blocks.shape[2] - chosen.shape[2] :] = chosen[..., : blocks.shape[3]]
                fixed[name] = blocks.long()

        def exact(x: NSAInputs, fixed: dict[str, Any] = fixed) -> Tensor:
            return reference.nsa(x, pack.config, **fixed)[0]

        def low(x: NSAInputs, fixed: dict[str, Any] = fixed) -> Tensor:
            return oracles.nsa(x, pack.config, **fixed)[0]

        expected = gradients(exact, whole.map(Tensor.double), wanted.double())
        naive = gradients(low, whole, wanted)
        for name, (theirs, rounded) in {name: (expected[name], naive[name].double()) for name in expected}.items():
            if name in WEIGHTS:
                sums = weights.get(name, [torch.zeros_like(theirs)] * 2)
                weights[name] = [sums[0] + theirs, sums[1] + rounded]
                continue
            skipped = first if name in QUERY_NAMES else 0
            mine = document.part(name, got[name])
            assert_within_budget(mine, theirs[:, skipped:], rounded[:, skipped:], f"gradient of {name}", slack=SLACK)
            document.part(name, rest[name]).fill_(0)
    for name, x in rest.items():
        if name in weights:
            assert_within_budget(x, *weights[name], f"gradient of {name}", slack=SLACK)
        else:
            assert not x.any(), f"gradient of {name} of what no document has"


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
