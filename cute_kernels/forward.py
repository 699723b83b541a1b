"""NSA's forward on NVIDIA GPUs: pool, score and choose, attend three times, gate.

`nsa(inputs, config)` reads the fields of nsa.inputs.NSAInputs and nsa.config.NSAConfig (nothing here imports them) and
returns what the reference returns. Everything is asynchronous; no device value is read.

Long sequences are processed in chunks of queries (`chunk_rows`), so that what a call needs beyond inputs, compressed
keys and output stays bounded.

In token mode the selected branch gates while it adds up wherever it can (`BranchOutputs.gating`).

Packed documents take the same steps, all at once: attention reads copies of q, k and v in which each document begins
with a new tile (pool/documents.py), and the gate puts the rows back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cute_kernels.attend.kv_outer import kv_outer_forward, takes_gating
from cute_kernels.attend.query_outer import query_outer_forward, takes_tiles
from cute_kernels.fa4 import interface as fa4
from cute_kernels.gate.forward import Gating, gated_sum
from cute_kernels.lists.query_to_kv import BlockLists, Keys, chosen_lists, prefix_lists
from cute_kernels.pool.compress import block_means, tile_means
from cute_kernels.pool.documents import DOCUMENT, PUBLIC_ENTRY, Documents, lay_out
from cute_kernels.runtime.device import vectorizable
from cute_kernels.select.tile import tile_topk
from cute_kernels.select.token import token_topk
from cute_kernels.select.topk import Blocks
from cute_kernels.support import tile_rows

CHUNK_BYTES = 8 << 30
"""Outputs of the three branches that may exist at once."""

ALIGNED = ("q", "k", "v", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gate_proj_weight")
"""Inputs whose rows kernels read as vectors."""

PER_TOKEN = ("q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "gates")
"""Inputs `[B,N,heads,...]`: packed with cu_seqlens, divided with the heads."""


class Branch(NamedTuple):
    """Output `[B,rows,H,D_v]` and log-sum-exp `[B,H,rows]` of a branch; lse is None unless asked for."""

    o: Tensor
    lse: Tensor | None


class BranchOutputs(NamedTuple):
    """What belongs to some of the query rows."""

    cmp: Branch
    slc: Branch
    win: Branch
    indices: Tensor
    cmp_indices: Tensor | None
    gating: Gating | None = None
    """How the branches were weighed and added, if they were; slc.o is of `Call.out` then, where lse was not asked for.

    Its gates are None where they are 1/3 each, or nobody asked for them."""

    @property
    def outputs(self) -> list[Tensor]:
        """Of the branches, in order."""
        return [branch.o for branch in (self.cmp, self.slc, self.win)]

    @property
    def lses(self) -> list[Tensor]:
        """Of the branches, in order; where they were asked for."""
        return [branch.lse for branch in (self.cmp, self.slc, self.win) if branch.lse is not None]


def nsa(
    inputs: Any,
    config: Any,
    *,
    indices: Tensor | None = None,
    cmp_indices: Tensor | None = None,
    aux: bool = True,
) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
    """All of NSA's forward for checked inputs.

    Args:
        indices, cmp_indices: use these selections, as in NSAAux, instead of computing them (with `aux` only).
        aux: also return what NSAAux holds, in its order (then queries are not chunked; packed ones never are).

    Returns:
        out `[B,N,H,D_v]`, packed `[T,H,D_v]`, and the fields of NSAAux or None.
    """
    call = prepare(inputs, config)
    q, documents = call.inputs.q, call.plan.documents
    if aux:
        given = indices, cmp_indices
        part = attend(call, 0, call.num_rows, lse=True, given=given, forced=indices is None, gating=True)
        gates = gate(call, part, 0, call.num_rows)
        if gates is None:
            gates = torch.full((1, 1, 1, 1), 1.0 / 3.0, device=q.device).expand(*q.shape[:3], 3)
        if documents is not None:
            return call.result, _packed_aux(documents, part, call.k_cmp, call.v_cmp, gates, config)
        outputs, lses = zip(part.cmp, part.slc, part.win, strict=True)
        selected = part.indices, _all_if_none(part.cmp_indices, config, q, call.k_cmp)
        return call.result, (*outputs, *lses, call.k_cmp, call.v_cmp, gates, *selected)
    for start, stop in chunks(call):
        part = attend(call, start, stop, lse=False, gating=True)
        gate(call, part, start, stop)
        del part  # before the next one is made
    return call.result, None


@dataclass(frozen=True)
class Call:
    """What every step of a call needs. What is made on first use leaves the window to be launched before it."""

    inputs: Any
    """Aligned; packed ones as one sequence `[1,T,...]`."""
    attended: Any
    """What attention reads: the inputs, or packed ones in aligned rows."""
    plan: Plan
    given: tuple[Tensor, Tensor] | None = None
    """k_cmp and v_cmp that were computed before."""

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """k_cmp and v_cmp, for all chunks of queries."""
        return self.given or compress(self.inputs, self.plan.config, self.plan.documents)

    @property
    def k_cmp(self) -> Tensor:
        return self.compressed[0]

    @property
    def v_cmp(self) -> Tensor:
        return self.compressed[1]

    @cached_property
    def out(self) -> Tensor:
        """`[B,N,H,D_v]`, filled in by `gate`, or by `attend` with `gating`."""
        q = self.inputs.q
        return torch.empty((*q.shape[:3], self.inputs.v.shape[-1]), dtype=q.dtype, device=q.device)

    @property
    def result(self) -> Tensor:
        """`out` as a caller gets it, packed `[T,H,D_v]`."""
        return self.out if self.plan.documents is None else self.out[0]

    @property
    def num_rows(self) -> int:
        return int(self.attended.q.shape[1])

    def query_heads(self, heads: slice) -> slice:
        """The query heads of some key/value heads."""
        group = self.inputs.q.shape[2] // self.inputs.k.shape[2]
        return slice(heads.start * group, heads.stop * group)

    def of_heads(self, heads: slice) -> Call:
        """For some key/value heads and their query heads."""
        of_queries = self.query_heads(heads)

        def narrow(inputs: Any) -> Any:
            changed = {}
            for name in PER_TOKEN:
                if (tensor := getattr(inputs, name)) is not None:
                    changed[name] = tensor[:, :, of_queries if name in ("q", "gates") else heads]
            weight = inputs.gate_proj_weight
            return replace(inputs, **changed, gate_proj_weight=None if weight is None else weight[of_queries])

        inputs = narrow(self.inputs)
        attended = inputs if self.attended is self.inputs else narrow(self.attended)
        k_cmp, v_cmp = self.compressed
        return Call(inputs, attended, self.plan, (k_cmp[:, :, heads], v_cmp[:, :, heads]))


def prepare(inputs: Any, config: Any, compressed: tuple[Tensor, Tensor] | None = None) -> Call:
    """Align, lay packed documents out, plan. Args: `compressed`, k_cmp and v_cmp that were computed before."""
    inputs, rules = _aligned(inputs), fa4.rules(inputs.q.device)
    dim = inputs.q.shape[-1]
    if inputs.cu_seqlens is None:
        plan = _plan(config, rules, dim, config.num_compressed(inputs.q.shape[1]))
        return Call(inputs, inputs, plan, compressed)
    inputs, attended, documents = _unpack(inputs, config, rules)
    plan = _plan(config, rules, dim, None)
    return Call(inputs, attended, replace(plan, documents=documents), compressed)


def chunks(call: Call) -> Iterator[tuple[int, int]]:
    """Ranges of query rows to process at once."""
    batch, tokens, heads, _ = call.inputs.q.shape
    rows = max(call.num_rows, 1)
    if call.plan.documents is None:
        rows = chunk_rows(batch, tokens, heads, call.inputs.v.shape[-1], call.plan.tile)
    for start in range(0, call.num_rows, rows):
        yield start, min(start + rows, call.num_rows)


def chunk_rows(batch: int, tokens: int, heads: int, v_dim: int, tile: int) -> int:
    """How many query rows to process at once: all, or a multiple of the tile so that three outputs fit CHUNK_BYTES."""
    per_row = 3 * batch * heads * v_dim * 2
    if tokens * per_row <= CHUNK_BYTES:
        return max(tokens, 1)
    unit = math.lcm(tile, 256)
    return max(CHUNK_BYTES // per_row // unit, 1) * unit


@dataclass(frozen=True)
class Plan:
    """What follows from options, sizes and the device."""

    config: Any
    rules: fa4.Rules
    scale: float
    tile: int
    """Rows that select together, or in token mode that are attended together."""
    select: Blocks
    choose: Blocks | None
    """Blocks of compressed entries to choose; None: the compressed branch attends to all."""
    entry: Keys
    token: Keys
    documents: Documents | None = None


@lru_cache(256)
def _plan(config: Any, rules: fa4.Rules, dim: int, entries: int | None) -> Plan:
    """The plan for `entries` compressed entries, None: for each document its own number."""
    length, stride = config.compress_block_size, config.stride
    count, width = config.num_cmp_selected_blocks, config.n_block_size
    some = count is not None and (entries is None or count * width < entries)
    return Plan(
        config=config,
        rules=rules,
        scale=config.scale(dim),
        tile=tile_rows(config, rules),
        select=Blocks(
            length,
            stride,
            config.select_size,
            config.num_selected_blocks,
            init=config.num_init_blocks,
            local=config.num_local_blocks,
        ),
        choose=Blocks(1, 1, width, count, newest=config.causal) if some else None,
        entry=Keys(length, stride, config.causal),
        token=Keys(causal=config.causal),
    )


def _aligned(inputs: Any) -> Any:
    """The inputs with every row contiguous and aligned, copied where it was not."""
    changed = {}
    if inputs.gates is not None and inputs.gates.stride(-1) != 1:
        changed["gates"] = inputs.gates.contiguous()
    for name in ALIGNED:
        tensor = getattr(inputs, name)
        if tensor is not None and (aligned := vectorizable(tensor)) is not tensor:
            changed[name] = aligned
    return replace(inputs, **changed) if changed else inputs


def _unpack(inputs: Any, config: Any, rules: Any) -> tuple[Any, Any, Documents]:
    """Packed inputs as one sequence `[1,T,...]`; what attention reads, in aligned rows; where the documents are."""
    cu_seqlens = inputs.cu_seqlens
    changed = {name: tensor[None] for name in PER_TOKEN if (tensor := getattr(inputs, name)) is not None}
    inputs = replace(inputs, **changed, cu_seqlens=None, max_seqlen=None)
    slc, win = keys_of(inputs, "slc"), keys_of(inputs, "win")
    documents, (q, *aligned) = lay_out(
        inputs.q,
        *slc,
        cu_seqlens,
        tile=tile_rows(config, rules),
        length=config.compress_block_size,
        stride=config.stride,
    )
    own = aligned if win[0] is slc[0] and win[1] is slc[1] else documents.align(*win)
    attended = replace(inputs, q=q, k_slc=aligned[0], v_slc=aligned[1], k_win=own[0], v_win=own[1])
    return inputs, attended, documents


def _packed_aux(
    documents: Documents, part: BranchOutputs, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor, config: Any
) -> tuple[Tensor | None, ...]:
    """The fields of NSAAux without B, rows and entries lying as the documents are packed."""
    branches = part.cmp, part.slc, part.win
    return (
        *(documents.by_token(branch.o[0], 0, 0.0) for branch in branches),
        *(None if branch.lse is None else documents.by_token(branch.lse[0], 1, -math.inf) for branch in branches),
        documents.without_gaps(k_cmp[0]),
        documents.without_gaps(v_cmp[0]),
        documents.fill_rest(gates[0], 0, 0.0),
        documents.by_token(part.indices[0], 1, -1) if config.token_mode else part.indices[0],
        None if part.cmp_indices is None else _all_if_they_fit(documents, part.cmp_indices[0], config.n_block_size),
    )


def _all_if_they_fit(documents: Documents, indices: Tensor, width: int) -> Tensor:
    """NSAAux.cmp_indices `[H,tiles,c]` of packed documents: all blocks of a document that has no more than c.

    The kernel leaves out those that nothing was scored in; attention is the same, since no token sees their entries.
    """
    count, document = indices.shape[-1], documents.tiles[DOCUMENT]
    entries = documents.bounds[PUBLIC_ENTRY].diff()[document.clamp(min=0)]
    blocks = ((entries + width - 1) // width)[:, None]
    places = torch.arange(count, dtype=torch.int32, device=indices.device)
    fit = (document >= 0)[:, None] & (blocks <= count)
    return torch.where(fit, torch.where(places < blocks, places, -1), indices)


# Steps, in the order of docs/semantics.md


def compress(inputs: Any, config: Any, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
    """Compressed keys and values `[B,entries,H_kv,D]`, of documents aligned ones."""
    if inputs.k_cmp is not None:
        if documents is None:
            return inputs.k_cmp, inputs.v_cmp
        return documents.with_gaps(inputs.k_cmp)[None], documents.with_gaps(inputs.v_cmp)[None]
    length, stride, dtype = config.compress_block_size, config.stride, inputs.q.dtype
    weights = (inputs.w_k_compress, inputs.w_v_compress)
    if weights == (None, None):
        return block_means(inputs.k, inputs.v, length, stride, dtype, documents)
    # Rounded once, behind the projection
    pooled = block_means(inputs.k, inputs.v, length, stride, torch.float32, documents)
    k_cmp, v_cmp = (
        (x if w is None else torch.einsum("bnhd,hde->bnhe", x, w.float())).to(dtype).contiguous()
        for x, w in zip(pooled, weights, strict=True)
    )
    return k_cmp, v_cmp


def attend(
    call: Call,
    start: int,
    stop: int,
    *,
    lse: bool,
    given: tuple[Tensor | None, Tensor | None] = (None, None),
    forced: bool = True,
    gating: bool = False,
    gates: bool = False,
) -> BranchOutputs:
    """Selections and branches of query rows start ... stop-1.

    Args:
        given: selections to use. forced: they hold the forced blocks, as all that are made here do.
        gating: where the selected branch can, it weighs and adds all of them into `call.out` (`BranchOutputs.gating`); its own o
            is kept with `lse` only, and projected gates with `lse` or `gates`.
    """
    inputs, plan = call.attended, call.plan
    tokens = inputs.q.shape[1]
    q = inputs.q if stop - start == tokens else inputs.q[:, start:stop]
    # First, for it needs nothing that is made here: the GPU has work while the host launches the rest
    win = attend_window(plan, q, *keys_of(inputs, "win"), start, lse)
    k_cmp, v_cmp = call.compressed
    indices, cmp_indices = given
    if indices is None and not plan.config.token_mode:
        indices, cmp_indices = select(plan, q, k_cmp, start, tokens)
    cmp = attend_compressed(plan, q, k_cmp, v_cmp, cmp_indices, start, lse or indices is None)
    if indices is None:  # from its probabilities, which lse brings back
        indices = token_topk(q, k_cmp, cast("Tensor", cmp.lse), plan.config, start=start, documents=plan.documents)
    k, v = keys_of(inputs, "slc")
    branches = None
    if gating and can_gate(plan, q, k, v, indices):
        _, used, out = rows_to_gate(call, start, stop)
        if inputs.gate_proj_weight is not None and (lse or gates):
            used = torch.empty((*q.shape[:-1], 3), dtype=torch.float32, device=q.device)
        o = torch.empty_like(out) if lse else None
        branches = Gating(cmp.o, win.o, out, inputs.gate_proj_weight, used, o)
    slc = attend_selected(plan, q, k, v, indices, start, lse, forced=forced, gating=branches)
    return BranchOutputs(cmp, slc, win, indices, cmp_indices, branches)


def keys_of(inputs: Any, branch: str) -> tuple[Tensor, Tensor]:
    """Keys and values of a branch: its own, or the shared ones."""
    own = getattr(inputs, f"k_{branch}"), getattr(inputs, f"v_{branch}")
    return (inputs.k, inputs.v) if own[0] is None else own


def select(plan: Plan, q: Tensor, k_cmp: Tensor, start: int, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Selected blocks of each tile, and blocks of compressed entries."""
    means = tile_means(q, plan.tile, plan.documents)

    def choose(mean_q: Tensor, blocks: Blocks) -> Tensor:
        return tile_topk(
            mean_q, k_cmp, blocks, keys=plan.entry, tile=plan.tile, tokens=tokens, start=start, documents=plan.documents
        )

    cmp_indices = None if plan.choose is None else choose(means, plan.choose)
    if plan.config.shares_heads:
        means = means.unflatten(2, (k_cmp.shape[2], -1)).sum(3)
    return choose(means, plan.select), cmp_indices


def attend_compressed(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, start: int, lse: bool
) -> Branch:
    documents = plan.documents
    if plan.config.causal and indices is None and documents is None:
        entries = min(k.shape[1], plan.config.num_compressed(start + q.shape[1]))  # what the last row sees
        k, v = (k[:, :entries], v[:, :entries]) if entries < k.shape[1] else (k, v)
    if (k.shape[1] if documents is None else documents.most_entries) == 0:
        return _nothing(q, v)
    lists = entry_lists(plan, q, k, indices, start)
    length, stride = (plan.entry.length, plan.entry.stride) if plan.config.causal else (1, 0)
    shifts = None if documents is None else documents.shifts
    return Branch(
        *fa4.compressed(
            q, k, v, lists, length=length, stride=stride, first_row=start, scale=plan.scale, lse=lse, shifts=shifts
        )
    )


def entry_lists(plan: Plan, q: Tensor, k: Tensor, indices: Tensor | None, start: int) -> BlockLists | None:
    """Blocks of compressed entries for each query tile: the chosen ones, or all that are visible; None: all."""
    where: dict[str, Any] = {"rows_from": start, "rows_to": start + q.shape[1], "documents": plan.documents}
    if indices is not None:
        size, rows = plan.config.n_block_size, plan.tile
        return chosen_lists(
            indices,
            q.shape[2],
            plan.entry,
            size=size,
            width=size,
            rows=rows,
            num_keys=k.shape[1],
            entries=True,
            **where,
        )
    if not plan.config.causal:
        return None
    entries = k.shape[1] if plan.documents is None else plan.documents.most_entries
    width, rows = plan.rules.widths[0], plan.rules.rows
    return prefix_lists(
        q.shape[0], q.shape[2], plan.entry, width=width, rows=rows, num_keys=entries, device=q.device, **where
    )


def can_gate(plan: Plan, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> bool:
    """Whether `attend_selected` takes a `gating`."""
    slots = indices.shape[3]
    if not plan.config.token_mode or takes_tiles(q.shape[2] // k.shape[2], slots):
        return False
    return takes_gating((q.shape[3], v.shape[3]), slots, plan.documents is not None)


def attend_selected(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    start: int,
    lse: bool,
    *,
    forced: bool,
    gating: Gating | None = None,
) -> Branch:
    """Attention to the chosen blocks.

    Args:
        forced: indices hold the forced blocks, which need not be true of a caller's.
        gating: write its out too; None where one cannot (`can_gate`).
    """
    stop, causal = start + q.shape[1], plan.config.causal
    if causal and stop < k.shape[1]:
        k, v = k[:, :stop], v[:, :stop]
    if indices.numel() == 0:
        return _nothing(q, v)
    if plan.config.token_mode:
        how = token_blocks_of(plan)
        if takes_tiles(q.shape[2] // k.shape[2], indices.shape[3]):
            return Branch(*query_outer_forward(q, k, v, indices, first_token=start, **how))
        if forced:
            how |= {"init": plan.config.num_init_blocks, "local": plan.config.num_local_blocks}
        return Branch(*kv_outer_forward(q, k, v, indices, first_token=start, gating=gating, **how))
    lists = token_lists(plan, q, k, indices, start)
    return Branch(*fa4.selected(q, k, v, lists, causal=causal, first_row=start, scale=plan.scale, lse=lse))


def token_blocks_of(plan: Plan) -> dict[str, Any]:
    """What attention per token is told of the blocks."""
    size, documents = plan.config.select_size, plan.documents
    bounds = None if documents is None else documents.bounds_of_blocks(size)
    return {"size": size, "scale": plan.scale, "bounds": bounds}


def token_lists(
    plan: Plan, q: Tensor, k: Tensor, indices: Tensor, start: int, *, width: int | None = None
) -> BlockLists:
    """Blocks of tokens that were chosen for each query tile, `width` wide or as wide as is exact."""
    size = plan.config.select_size
    return chosen_lists(
        indices,
        q.shape[2],
        plan.token,
        size=size,
        width=width or plan.rules.width(size),
        rows=plan.tile,
        num_keys=k.shape[1],
        rows_from=start,
        rows_to=start + q.shape[1],
        entries=False,
        documents=plan.documents,
    )


def attend_window(plan: Plan, q: Tensor, k: Tensor, v: Tensor, start: int, lse: bool) -> Branch:
    stop, tokens, size = start + q.shape[1], k.shape[1], plan.config.window_size
    if size == 0:
        return _nothing(q, v)
    before, behind = window_reach(size, plan.config.causal, tokens)
    if plan.documents is not None:
        packed, k, v = plan.documents.spread(fa4.keys_of_window_tile(q, k, v), k, v)
        return Branch(*fa4.window(q, k, v, left=before, right=behind, scale=plan.scale, lse=lse, documents=packed))
    # Whole blocks of keys, so that the same blocks meet the same rows however queries are chunked
    first, last = max(0, start - before) // fa4.WINDOW_UNIT * fa4.WINDOW_UNIT, min(tokens, stop + behind)
    extra = last - stop  # keys behind the last query
    if last - first < tokens:
        k, v = k[:, first:last], v[:, first:last]
    return Branch(*fa4.window(q, k, v, left=before + extra, right=behind - extra, scale=plan.scale, lse=lse))


def window_reach(size: int, causal: bool, tokens: int) -> tuple[int, int]:
    """How many keys before and behind a query are in its window of `size` >= 1, no more than there are tokens.

    FlashAttention-4 adds both to rows in int32, where a window of 2^31 - 1 would wrap around.
    """
    before, behind = (size - 1, 0) if causal else (size // 2, size // 2)
    return min(before, tokens), min(behind, tokens)


def _nothing(q: Tensor, v: Tensor) -> Branch:
    """A branch without keys."""
    batch, rows, heads, _ = q.shape
    o = q.new_zeros((batch, rows, heads, v.shape[-1]))
    return Branch(o, torch.full((batch, heads, rows), -math.inf, dtype=torch.float32, device=q.device))


def gate(call: Call, part: BranchOutputs, start: int, stop: int) -> Tensor | None:
    """Weigh and add the branches of some rows, into `call.out`, unless `attend` did; the gates, as of `BranchOutputs.gating`."""
    if part.gating is not None:
        return part.gating.gates
    (q, gates, out), documents = rows_to_gate(call, start, stop), call.plan.documents
    return gated_sum(
        part.cmp.o,
        part.slc.o,
        part.win.o,
        out,
        q=q,
        gate_proj_weight=call.inputs.gate_proj_weight,
        gates=gates,
        rows=None if documents is None else documents.rows,
    )


def rows_to_gate(call: Call, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """q, given gates and out of some rows."""
    q, gates, out = call.inputs.q, call.inputs.gates, call.out
    if stop - start < q.shape[1]:
        q, out = q[:, start:stop], out[:, start:stop]
        gates = None if gates is None else gates[:, start:stop]
    return q, gates, out


def _all_if_none(indices: Tensor | None, config: Any, q: Tensor, k_cmp: Tensor) -> Tensor | None:
    """NSAAux.cmp_indices: where a choice was asked for but all blocks fit, all of them."""
    count = config.num_cmp_selected_blocks
    if indices is not None or count is None:
        return indices
    places = torch.arange(count, dtype=torch.int32, device=q.device)
    blocks = -(-k_cmp.shape[1] // config.n_block_size)
    tiles = -(-q.shape[1] // config.q_tile_size)
    return torch.where(places < blocks, places, -1).expand(q.shape[0], q.shape[2], tiles, count)
