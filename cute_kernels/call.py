"""A call of NSA: inputs that kernels can read, what follows from its options, and chunks of query rows.

    prepare     inputs and options -> Call, with its Plan (plan.py)
    chunks      ranges of query rows, so that temporary memory stays bounded
    replay_of   a whole forward or backward, replayed where one like it was recorded (runtime/replay.py)

forward.py and backward.py both start from a `Call`. Inputs and options are nsa.inputs.NSAInputs and
nsa.config.NSAConfig; only their fields are read here, they are not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cute_kernels.fa4 import rules as fa4
from cute_kernels.lists.query_to_kv import BlockLists, Keys, chosen_lists
from cute_kernels.plan import Plan, plan
from cute_kernels.pool.compress import compress_kv
from cute_kernels.pool.documents import Documents, Packed, lay_out
from cute_kernels.runtime.device import vectorizable
from cute_kernels.runtime.replay import Results as Results
from cute_kernels.runtime.replay import replayed
from cute_kernels.select.topk import Blocks

CHUNK_BYTES = 8 << 30
"""The outputs of the three branches of one chunk of query rows take at most this."""

ALIGNED = ("q", "k", "v", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gate_proj_weight")
"""Inputs whose rows kernels read as vectors."""

ENTRIES = ("k_cmp", "v_cmp")

PER_TOKEN = ("q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "gates")
"""Inputs `[B,N,heads,...]`, with cu_seqlens `[T,heads,...]`."""


@dataclass(frozen=True)
class Call:
    """Tensors and options of a call. What is computed on first use leaves the window to be launched before it."""

    inputs: Any
    """nsa.inputs.NSAInputs, rows aligned; packed inputs as one sequence `[1,T,...]`."""
    attended: Any
    """The inputs as attention reads them: the same, or packed ones in the aligned rows of `documents`."""
    config: Any
    """nsa.config.NSAConfig."""
    plan: Plan
    documents: Documents | None = None
    """Place of each document of a pack in the aligned rows."""
    saved_cmp: tuple[Tensor, Tensor] | None = None
    """k_cmp and v_cmp that an earlier call computed."""
    sequences: int | None = None
    """B, where the documents of a pack are sequences of one length (`runs_as_pack`)."""

    @cached_property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.config.scale(self.inputs.q.shape[-1]))

    @cached_property
    def select(self) -> Blocks:
        """Blocks of tokens, for the selected branch."""
        return Blocks.of(self.config)

    @cached_property
    def select_cmp(self) -> Blocks | None:
        """Blocks of compressed entries, for the compressed branch; None: it attends to all entries."""
        config = self.config
        if not self.plan.selects_entries:
            return None
        return Blocks(1, 1, config.n_block_size, config.num_cmp_selected_blocks, newest=config.causal)

    @cached_property
    def entry(self) -> Keys:
        """Compressed entries that a row sees."""
        return Keys(self.config.compress_block_size, self.config.stride, self.config.causal)

    @cached_property
    def token(self) -> Keys:
        """Tokens that a row sees."""
        return Keys(causal=self.config.causal)

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """k_cmp and v_cmp `[B,entries,H_kv,D]`, shared by all chunks."""
        return self.saved_cmp or compress_kv(self.inputs, self.config, self.documents)

    @property
    def k_cmp(self) -> Tensor:
        return self.compressed[0]

    @property
    def v_cmp(self) -> Tensor:
        return self.compressed[1]

    @cached_property
    def out(self) -> Tensor:
        """`[B,N,H,D_v]`, uninitialised; the gate writes it, chunk by chunk."""
        q = self.inputs.q
        return torch.empty((*q.shape[:3], self.inputs.v.shape[-1]), dtype=q.dtype, device=q.device)

    @property
    def result(self) -> Tensor:
        """`out` as the caller gets it: packed `[T,H,D_v]`."""
        if self.documents is None:
            return self.out
        if self.sequences is None:
            return self.out[0]
        rows = self.out.shape[1] // self.sequences
        return self.out.view(self.sequences, rows, *self.out.shape[2:])

    @property
    def num_rows(self) -> int:
        """Query rows of a sequence, as attention reads them."""
        return int(self.attended.q.shape[1])

    def query_heads(self, kv_heads: slice) -> slice:
        """The query heads of a range of key/value heads."""
        group = self.inputs.q.shape[2] // self.inputs.k.shape[2]
        return slice(kv_heads.start * group, kv_heads.stop * group)

    def slice_heads(self, kv_heads: slice) -> Call:
        """The same call for a range of key/value heads and their query heads."""
        if kv_heads == slice(0, self.inputs.k.shape[2]):
            return self
        q_heads = self.query_heads(kv_heads)

        def narrow(inputs: Any) -> Any:
            changed = {}
            for name in PER_TOKEN:
                if (tensor := getattr(inputs, name)) is not None:
                    changed[name] = tensor[:, :, q_heads if name in ("q", "gates") else kv_heads]
            weight = inputs.gate_proj_weight
            return replace(inputs, **changed, gate_proj_weight=None if weight is None else weight[q_heads])

        inputs = narrow(self.inputs)
        attended = inputs if self.attended is self.inputs else narrow(self.attended)
        k_cmp, v_cmp = self.compressed
        saved_cmp = k_cmp[:, :, kv_heads], v_cmp[:, :, kv_heads]
        return replace(self, inputs=inputs, attended=attended, saved_cmp=saved_cmp)


def prepare(inputs: Any, config: Any, saved_cmp: tuple[Tensor, Tensor] | None = None, **choices: Any) -> Call:
    """Plan a call that was accepted (support.py), align its inputs, and place packed documents.

    Args:
        saved_cmp: k_cmp and v_cmp that were computed before.
        choices: see `plan.plan`.
    """
    planned = plan(inputs, config, **choices)
    inputs = _align(inputs)
    if not planned.as_pack:
        return Call(inputs, inputs, config, planned, saved_cmp=saved_cmp)
    sequences = None if inputs.packed else inputs.q.shape[0]
    inputs, attended, documents = _unpack(inputs if inputs.packed else _pack(inputs), config, planned.tile)
    return Call(inputs, attended, config, planned, documents, saved_cmp, sequences)


def replay_of(
    run: Callable[[], Results], inputs: Any, config: Any, *options: Hashable, more: Sequence[Tensor | None] = ()
) -> Results:
    """Results of `run`, a local function of the caller's, or of its recording.

    Args:
        inputs, config, options, more: all that it depends on; `more` are tensors.
    """
    rules = fa4.rules(inputs.q.device)
    return replayed([*vars(inputs).values(), *more], (run.__qualname__, config, rules, *options), run)


def _align(inputs: Any) -> Any:
    """The inputs with every row contiguous and aligned, copied where it was not."""
    changed = {}
    if inputs.gates is not None and inputs.gates.stride(-1) != 1:
        changed["gates"] = inputs.gates.contiguous()
    for name in ALIGNED:
        tensor = getattr(inputs, name)
        if tensor is not None and (aligned := vectorizable(tensor)) is not tensor:
            changed[name] = aligned
    return replace(inputs, **changed) if changed else inputs


def _pack(inputs: Any) -> Any:
    """Sequences of one length as packed documents."""
    changed = {
        name: tensor.flatten(0, 1) for name in (*PER_TOKEN, *ENTRIES) if (tensor := getattr(inputs, name)) is not None
    }
    packed = Packed.of_sequences(inputs.q, inputs.k.shape[1])
    return replace(inputs, **changed, cu_seqlens=packed.cu_seqlens, cu_seqlens_k=packed.cu_seqlens_k)


def _unpack(inputs: Any, config: Any, tile: int) -> tuple[Any, Any, Documents]:
    """Packed inputs as one sequence `[1,T,...]`; what attention reads, in aligned rows; where the documents are."""
    packed = Packed(inputs.cu_seqlens, inputs.cu_seqlens_k, inputs.q_start)
    changed = {name: tensor[None] for name in PER_TOKEN if (tensor := getattr(inputs, name)) is not None}
    inputs = replace(inputs, **changed, cu_seqlens=None, cu_seqlens_k=None, q_start=None, max_seqlen=None)
    slc, win = branch_kv(inputs, "slc"), branch_kv(inputs, "win")
    documents, (q, *aligned_slc) = lay_out(
        inputs.q,
        *slc,
        packed,
        tile=tile,
        step=config.q_tile_size,
        length=config.compress_block_size,
        stride=config.stride,
    )
    shared = win[0] is slc[0] and win[1] is slc[1]
    aligned_win = aligned_slc if shared else documents.align(*win)
    attended = replace(
        inputs, q=q, k_slc=aligned_slc[0], v_slc=aligned_slc[1], k_win=aligned_win[0], v_win=aligned_win[1]
    )
    return inputs, attended, documents


def chunks(call: Call) -> Iterator[tuple[int, int]]:
    """Ranges of query rows, half-open, to process one after the other."""
    batch, tokens, heads, _ = call.inputs.q.shape
    rows = max(call.num_rows, 1)
    if call.documents is None:
        rows = chunk_rows(batch, tokens, heads, call.inputs.v.shape[-1], call.plan.tile)
    for first, end in whole_tiles(call):
        for start in range(first, end, rows):
            yield start, min(start + rows, end)


def whole_tiles(call: Call) -> list[tuple[int, int]]:
    """All query rows, but apart those of a tile that began before them: lists and means are of tiles that begin."""
    open_rows = -call.plan.first_row % call.plan.tile
    if call.config.token_mode or not 0 < open_rows < call.num_rows:
        return [(0, call.num_rows)]
    return [(0, open_rows), (open_rows, call.num_rows)]


def chunk_rows(batch: int, tokens: int, heads: int, v_dim: int, tile: int) -> int:
    """Query rows of a chunk: all, or a multiple of the tile for which three outputs fit CHUNK_BYTES."""
    per_row = 3 * batch * heads * v_dim * 2
    if tokens * per_row <= CHUNK_BYTES:
        return max(tokens, 1)
    multiple = math.lcm(tile, 256)
    return max(CHUNK_BYTES // per_row // multiple, 1) * multiple


# What both directions tell the branches' kernels


def branch_kv(inputs: Any, branch: str) -> tuple[Tensor, Tensor]:
    """Keys and values of branch "slc" or "win": its own, or the shared ones."""
    own = getattr(inputs, f"k_{branch}"), getattr(inputs, f"v_{branch}")
    return (inputs.k, inputs.v) if own[0] is None else own


def window_reach(size: int, causal: bool, tokens: int) -> tuple[int, int]:
    """Number of keys left and right of a query in its window of `size` >= 1, at most the number of tokens.

    FlashAttention-4 adds both to rows in int32, where a window of 2^31 - 1 would wrap around.
    """
    left, right = (size - 1, 0) if causal else (size // 2, size // 2)
    return min(left, tokens), min(right, tokens)


def selected_lists(
    call: Call, q: Tensor, k: Tensor, indices: Tensor, start: int, *, entries: bool = False, width: int | None = None
) -> BlockLists:
    """Tile mode: the selected blocks of each query tile, as lists of blocks of `width` keys.

    Args:
        indices: int32 `[B,S,tiles,k]`, of the rows of q, which begin with row `start`.
        entries: the blocks consist of compressed entries, not of tokens.
        width: None: the widest blocks that FlashAttention-4 takes and that need no refinement.
    """
    size = call.config.n_block_size if entries else call.config.select_size
    return chosen_lists(
        indices,
        q.shape[2],
        call.entry if entries else call.token,
        size=size,
        width=width or (size if entries else call.plan.rules.width(size)),
        rows=call.plan.tile,
        num_keys=k.shape[1],
        rows_from=start,
        rows_to=start + q.shape[1],
        entries=entries,
        documents=call.documents,
    )


def token_mode_options(call: Call) -> dict[str, Any]:
    """Token mode: what the kernels of the selected branch are told of its blocks."""
    size, documents = call.config.select_size, call.documents
    packed = None if documents is None else documents.blocks(size)
    return {"size": size, "scale": call.scale, "packed": packed}
