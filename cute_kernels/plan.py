"""Preparation of a call: aligned inputs, the plan that follows from its options, and chunks of query rows.

    prepare     inputs and options -> Call: tensors that kernels can read, and their Plan
    chunks      ranges of query rows, so that temporary memory stays bounded
    replay_of   a whole forward or backward, replayed where one like it was recorded (runtime/replay.py)

forward.py and backward.py both start from a `Call`. Inputs and options are nsa.inputs.NSAInputs and
nsa.config.NSAConfig; only their fields are read here, they are not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.call_facts import has_atomic_free_backward, runs_as_pack, tile_rows
from cute_kernels.fa4 import rules as fa4
from cute_kernels.lists.query_to_kv import BlockLists, Keys, chosen_lists
from cute_kernels.pool.compress import compress_kv
from cute_kernels.pool.documents import Documents, Packed, lay_out
from cute_kernels.runtime.device import vectorizable
from cute_kernels.runtime.replay import Results as Results
from cute_kernels.runtime.replay import replayed
from cute_kernels.select.topk import Blocks

CHUNK_BYTES = 8 << 30
"""The outputs of the three branches of one chunk of query rows take at most this."""

SPLIT_PAIRS = 1 << 31
"""Pairs of a query row of a head and a compressed entry up to which backward takes attend/compressed_backward.py where
it can: its seven products, without phases, are then faster than FlashAttention-4's five."""

ALIGNED = ("q", "k", "v", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gate_proj_weight")
"""Inputs whose rows kernels read as vectors."""

ENTRIES = ("k_cmp", "v_cmp")

PER_TOKEN = ("q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "gates")
"""Inputs `[B,N,heads,...]`, with cu_seqlens `[T,heads,...]`."""


@dataclass(frozen=True)
class Plan:
    """Choices that follow from options, sizes and the device."""

    config: Any
    """nsa.config.NSAConfig."""
    rules: fa4.Rules
    scale: float
    """Softmax scale."""
    tile: int
    """Query rows that select together; in token mode, rows of a tile of packed documents."""
    select: Blocks
    """Blocks of tokens, for the selected branch."""
    select_cmp: Blocks | None
    """Blocks of compressed entries, for the compressed branch; None: it attends to all entries."""
    entry: Keys
    """Compressed entries that a row sees."""
    token: Keys
    """Tokens that a row sees."""
    atomic_free: bool
    """True if backward runs attend/selected_backward.py, of tokens and of entries, and attend/window_backward.py where
    it can, which are faster than FlashAttention-4's kernels and add up in a fixed order."""
    split_compressed: bool
    """True if backward runs attend/compressed_backward.py for all entries: on Hopper with D = D_v, causal, no pack, up
    to SPLIT_PAIRS. Everything else takes FlashAttention-4, by phases or by lists."""
    query_outer: bool | None
    """Token mode: True or False in place of the rule by which the selected branch takes attend/query_outer.py."""
    documents: Documents | None = None
    """Place of each document of a pack in the aligned rows."""
    first_row: int = 0
    """The token that row 0 is, where queries continue sequences that are no pack."""


@dataclass(frozen=True)
class Call:
    """A call's tensors and its plan. What is computed on first use leaves the window to be launched before it."""

    inputs: Any
    """nsa.inputs.NSAInputs, rows aligned; packed inputs as one sequence `[1,T,...]`."""
    attended: Any
    """The inputs as attention reads them: the same, or packed ones in the aligned rows of `plan.documents`."""
    plan: Plan
    saved_cmp: tuple[Tensor, Tensor] | None = None
    """k_cmp and v_cmp that an earlier call computed."""
    sequences: int | None = None
    """B, where the documents of a pack are sequences of one length (`runs_as_pack`)."""

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """k_cmp and v_cmp `[B,entries,H_kv,D]`, shared by all chunks."""
        return self.saved_cmp or compress_kv(self.inputs, self.plan.config, self.plan.documents)

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
        if self.plan.documents is None:
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
        return Call(inputs, attended, self.plan, saved_cmp, self.sequences)


def prepare(
    inputs: Any,
    config: Any,
    saved_cmp: tuple[Tensor, Tensor] | None = None,
    *,
    training: bool = False,
    atomic_free: bool = True,
    query_outer: bool | None = None,
) -> Call:
    """Align the inputs, place packed documents, and plan.

    Args:
        saved_cmp: k_cmp and v_cmp that were computed before.
        training: for a forward that saves, and for its backward (`runs_as_pack`).
        atomic_free: False: backward takes FlashAttention-4's kernels for every branch, for comparisons.
        query_outer: token mode, whether the selected branch runs query-outer; None: by shape (takes_query_outer).
    """
    inputs, rules = _align(inputs), fa4.rules(inputs.q.device)
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    if not runs_as_pack(inputs, config, training=training):
        entries, first = config.num_compressed(inputs.k.shape[1]), inputs.first_token
        few = inputs.q.shape[:3].numel() * entries <= SPLIT_PAIRS
        plan = _plan(config, rules, dims, entries, few, atomic_free, query_outer)
        return Call(inputs, inputs, replace(plan, first_row=first) if first else plan, saved_cmp)
    sequences = None if inputs.packed else inputs.q.shape[0]
    inputs, attended, documents = _unpack(inputs if inputs.packed else _pack(inputs), config, rules)
    plan = plan_pack(config, rules, dims, documents, atomic_free=atomic_free, query_outer=query_outer)
    return Call(inputs, attended, plan, saved_cmp, sequences)


def plan_pack(
    config: Any,
    rules: Any,
    dims: tuple[int, int],
    documents: Documents,
    *,
    atomic_free: bool = True,
    query_outer: bool | None = None,
) -> Plan:
    """The plan of packed documents. Args: D and D_v; places of the documents; see `prepare`."""
    return replace(_plan(config, rules, dims, None, False, atomic_free, query_outer), documents=documents)


def selects_entries(config: Any, entries: int | None) -> bool:
    """True if the compressed branch attends to selected blocks of entries: it has more of them than it may select.

    Args:
        entries: compressed entries, None: each document has its own number, so blocks are always selected.
    """
    count = config.num_cmp_selected_blocks
    return count is not None and (entries is None or count * config.n_block_size < entries)


def replay_of(
    run: Callable[[], Results], inputs: Any, config: Any, *options: Hashable, more: Sequence[Tensor | None] = ()
) -> Results:
    """Results of `run`, a local function of the caller's, or of its recording.

    Args:
        inputs, config, options, more: all that it depends on; `more` are tensors.
    """
    rules = fa4.rules(inputs.q.device)
    return replayed([*vars(inputs).values(), *more], (run.__qualname__, config, rules, *options), run)


@lru_cache(256)
def _plan(
    config: Any,
    rules: fa4.Rules,
    dims: tuple[int, int],
    entries: int | None,
    few_pairs: bool,
    atomic_free: bool,
    query_outer: bool | None,
) -> Plan:
    """Args: `dims`, D and D_v; `entries`, compressed entries, None: each document has its own number; `few_pairs`, at
    most SPLIT_PAIRS of them with queries.
    """
    length, stride = config.compress_block_size, config.stride
    atomic_free = atomic_free and has_atomic_free_backward(rules, *dims)
    selects = selects_entries(config, entries)
    return Plan(
        config=config,
        rules=rules,
        scale=config.scale(dims[0]),
        tile=tile_rows(config, rules),
        select=Blocks.of(config),
        select_cmp=Blocks(1, 1, config.n_block_size, config.num_cmp_selected_blocks, newest=config.causal)
        if selects
        else None,
        entry=Keys(length, stride, config.causal),
        token=Keys(causal=config.causal),
        atomic_free=atomic_free,
        split_compressed=atomic_free and config.causal and few_pairs and not selects,
        query_outer=query_outer,
    )


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


def _unpack(inputs: Any, config: Any, rules: Any) -> tuple[Any, Any, Documents]:
    """Packed inputs as one sequence `[1,T,...]`; what attention reads, in aligned rows; where the documents are."""
    packed = Packed(inputs.cu_seqlens, inputs.cu_seqlens_k, inputs.q_start)
    changed = {name: tensor[None] for name in PER_TOKEN if (tensor := getattr(inputs, name)) is not None}
    inputs = replace(inputs, **changed, cu_seqlens=None, cu_seqlens_k=None, q_start=None, max_seqlen=None)
    slc, win = branch_kv(inputs, "slc"), branch_kv(inputs, "win")
    documents, (q, *aligned_slc) = lay_out(
        inputs.q,
        *slc,
        packed,
        tile=tile_rows(config, rules),
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
    if call.plan.documents is None:
        rows = chunk_rows(batch, tokens, heads, call.inputs.v.shape[-1], call.plan.tile)
    for first, end in whole_tiles(call):
        for start in range(first, end, rows):
            yield start, min(start + rows, end)


def whole_tiles(call: Call) -> list[tuple[int, int]]:
    """All query rows, but apart those of a tile that began before them: lists and means are of tiles that begin."""
    open_rows = -call.plan.first_row % call.plan.tile
    if call.plan.config.token_mode or not 0 < open_rows < call.num_rows:
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
    plan: Plan, q: Tensor, k: Tensor, indices: Tensor, start: int, *, entries: bool = False, width: int | None = None
) -> BlockLists:
    """Tile mode: the selected blocks of each query tile, as lists of blocks of `width` keys.

    Args:
        indices: int32 `[B,S,tiles,k]`, of the rows of q, which begin with row `start`.
        entries: the blocks consist of compressed entries, not of tokens.
        width: None: the widest blocks that FlashAttention-4 takes and that need no refinement.
    """
    config = plan.config
    size = config.n_block_size if entries else config.select_size
    return chosen_lists(
        indices,
        q.shape[2],
        plan.entry if entries else plan.token,
        size=size,
        width=width or (size if entries else plan.rules.width(size)),
        rows=plan.tile,
        num_keys=k.shape[1],
        rows_from=start,
        rows_to=start + q.shape[1],
        entries=entries,
        documents=plan.documents,
    )


def token_mode_options(plan: Plan) -> dict[str, Any]:
    """Token mode: what the kernels of the selected branch are told of its blocks."""
    size, documents = plan.config.select_size, plan.documents
    packed = None if documents is None else documents.blocks(size)
    return {"size": size, "scale": plan.scale, "packed": packed}
