"""NSA's forward on NVIDIA GPUs: pool, select, attend three times, gate.

    nsa          the forward, for inference and for tests
    nsa_saving   the forward of training: out, and what backward.py needs
    attend       one chunk of query rows: selections and the three branches
    gate         the same chunk: weigh and add the branches into out

Long sequences are processed in chunks of query rows (call.chunks), so that what a call needs beyond inputs, compressed
keys and output stays bounded. In token mode the selected branch's epilogue can weigh and add all three branches, which
saves the gate's launch and memory traffic (`fused_gating`).

Packed documents take the same steps, all at once: attention reads copies of q, k and v in which each document begins
with a new tile (pool/documents.py), and the gate puts the rows back.

Everything is asynchronous; no device value is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cute_kernels.attend.kv_outer import kv_outer_forward
from cute_kernels.attend.query_outer import query_outer_forward
from cute_kernels.attend.window_combine import WindowBranch
from cute_kernels.call import (
    Call,
    Results,
    branch_kv,
    chunks,
    prepare,
    replay_of,
    selected_lists,
    token_mode_options,
    whole_tiles,
    window_reach,
)
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.gate.forward import Gating, gated_sum
from cute_kernels.lists.query_to_kv import BlockLists, prefix_lists
from cute_kernels.plan import selects_entries
from cute_kernels.pool.compress import tile_means
from cute_kernels.pool.documents import DOCUMENT, LENGTH, PUBLIC_ENTRY, START, TILE, Documents, query_tiles, sizes
from cute_kernels.refusals import pack_sizes, runs_as_pack, tile_rows
from cute_kernels.select.tile import tile_topk
from cute_kernels.select.token import token_topk
from cute_kernels.select.topk import Blocks

BRANCH_NAMES = ("cmp", "slc", "win")


class Branch(NamedTuple):
    """Output `[B,rows,H,D_v]` and log-sum-exp `[B,H,rows]` fp32 of a branch.

    lse is None unless asked for. Without it o is None, too, where the kernel that computed it has gated it at once.
    """

    o: Tensor | None
    lse: Tensor | None


class BranchOutputs(NamedTuple):
    """The branches of a chunk of query rows, and what was selected for them."""

    cmp: Branch
    slc: Branch
    win: Branch
    indices: Tensor
    cmp_indices: Tensor | None
    gating: Gating | None = None
    """Not None: the selected branch's kernel has written `Call.out`. Its gates are None where they are 1/3 each, or
    where projected ones were not requested."""

    @property
    def outputs(self) -> list[Tensor]:
        """o of each branch that has one."""
        return [branch.o for branch in (self.cmp, self.slc, self.win) if branch.o is not None]

    @property
    def lses(self) -> list[Tensor]:
        """lse of each branch that has one."""
        return [branch.lse for branch in (self.cmp, self.slc, self.win) if branch.lse is not None]


# Inference


def nsa(
    inputs: Any,
    config: Any,
    *,
    indices: Tensor | None = None,
    cmp_indices: Tensor | None = None,
    aux: bool = True,
    query_outer: bool | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
    """The whole forward for checked inputs.

    Args:
        inputs, config: nsa.inputs.NSAInputs and nsa.config.NSAConfig.
        indices, cmp_indices: use these selections, as in NSAAux, instead of computing them (with `aux` only).
        aux: also return the fields of NSAAux, in its order. Query rows are not chunked then.
        query_outer: see `plan.plan`.

    Returns:
        out `[B,N,H,D_v]`, packed `[T,H,D_v]`, and the fields of NSAAux or None.
    """
    if not aux:
        return _without_aux(inputs, config, query_outer), None
    call = prepare(inputs, config, query_outer=query_outer)
    parts, first_tile = [], 0
    for start, stop in whole_tiles(call):
        tiles = slice(first_tile, first_tile := first_tile + _num_tiles(call, start, stop))
        selections = _tiles_of(indices, tiles), _tiles_of(cmp_indices, tiles)
        branches = attend(
            call, start, stop, lse=True, selections=selections, holds_forced=indices is None, fuse_gate=True
        )
        parts.append((branches, gate(call, branches, start, stop)))
    branches, gates = parts[0] if len(parts) == 1 else _concatenate_parts(parts)
    return call.result, _aux(call, branches, gates)


def _without_aux(inputs: Any, config: Any, query_outer: bool | None) -> Tensor:
    def run() -> Results:
        call = prepare(inputs, config, query_outer=query_outer)
        for start, stop in chunks(call):
            branches = attend(call, start, stop, lse=False, fuse_gate=True)
            gate(call, branches, start, stop)
            del branches  # frees its memory before the next chunk
        return {"out": call.result}

    out: Tensor = replay_of(run, inputs, config, query_outer)["out"]
    return out


def _num_tiles(call: Call, start: int, stop: int) -> int:
    """Number of tiles of query rows start ... stop-1, the first of which begins the rows or a tile."""
    return -(-(stop - start) // (1 if call.config.token_mode else call.plan.tile))


def _tiles_of(indices: Tensor | None, tiles: slice) -> Tensor | None:
    whole = indices is None or tiles == slice(0, indices.shape[2])
    return indices if whole or indices is None else indices[:, :, tiles]


def _concatenate_parts(parts: Sequence[tuple[BranchOutputs, Tensor | None]]) -> tuple[BranchOutputs, Tensor | None]:
    """Results of ranges of query rows as those of all, where nothing is gated in an epilogue."""
    every, gates = zip(*parts, strict=True)
    cmp, slc, win = (
        Branch(_concatenate([part.o for part in of_branch], 1), _concatenate([part.lse for part in of_branch], 2))
        for of_branch in zip(*((one.cmp, one.slc, one.win) for one in every), strict=True)
    )
    indices = torch.cat([one.indices for one in every], 2)
    cmp_indices = _concatenate([one.cmp_indices for one in every], 2)
    return BranchOutputs(cmp, slc, win, indices, cmp_indices), _concatenate(gates, 1)


def _concatenate(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < 2:
        return present[0] if present else None
    return torch.cat(present, dim)


# Training


class Saved(NamedTuple):
    """Tensors for backward, beside inputs and options; for autograd a list of those that are there."""

    k_cmp: Tensor | None
    """None where the caller gave them."""
    v_cmp: Tensor | None
    indices: Tensor
    cmp_indices: Tensor | None
    """None where the compressed branch attends to all entries."""
    gates: Tensor | None
    """None where they are not projected."""
    o_cmp: Tensor | None = None
    """None, as all that follow, if they are to be computed again."""
    o_slc: Tensor | None = None
    o_win: Tensor | None = None
    lse_cmp: Tensor | None = None
    lse_slc: Tensor | None = None
    lse_win: Tensor | None = None

    def to_list(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor], inputs: Any, config: Any) -> Saved:
        """Args: inputs, config: of the call that saved them."""
        as_pack = runs_as_pack(inputs, config, training=True)
        absent = set() if inputs.k_cmp is None else {"k_cmp", "v_cmp"}
        absent |= set() if selects_entries(inputs, config, as_pack=as_pack) else {"cmp_indices"}
        absent |= {"gates"} if inputs.gate_proj_weight is None else set()
        names = [name for name in cls._fields if name not in absent]
        fields: dict[str, Any] = dict.fromkeys(absent) | dict(zip(names, tensors, strict=False))
        return cls(**fields)

    def branch_outputs(self, heads: slice, select_heads: slice) -> BranchOutputs | None:
        """Branches of a range of query heads, or None if they must be recomputed."""
        pairs = (self.o_cmp, self.lse_cmp), (self.o_slc, self.lse_slc), (self.o_win, self.lse_win)
        branches = [Branch(o[:, :, heads], lse[:, heads]) for o, lse in pairs if o is not None and lse is not None]
        if len(branches) < len(pairs):
            return None
        cmp, slc, win = branches
        return BranchOutputs(cmp, slc, win, *self.selections(heads, select_heads))

    def selections(self, heads: slice, select_heads: slice) -> tuple[Tensor, Tensor | None]:
        """indices and cmp_indices. Args: query heads, and those heads of `indices` that select for them."""
        cmp_indices = None if self.cmp_indices is None else self.cmp_indices[:, heads]
        return self.indices[:, select_heads], cmp_indices


def nsa_saving(inputs: Any, config: Any, *, recompute: bool) -> tuple[Tensor, list[Tensor]]:
    """The forward for checked inputs: out, and the list of tensors that `nsa_backward` takes.

    Args:
        recompute: save the selections, but not the branches' outputs, which backward computes again.
    """

    def run() -> Results:
        call = prepare(inputs, config, training=True)
        saved: dict[str, Tensor | None] = {}
        if recompute and call.num_rows > 0:
            saved["indices"], saved["cmp_indices"], gates = _forward_in_chunks(call)
        else:
            branches = attend(call, 0, call.num_rows, lse=True, fuse_gate=True)
            gates = gate(call, branches, 0, call.num_rows)
            saved["indices"], saved["cmp_indices"] = branches.indices, branches.cmp_indices
            for name in () if recompute else BRANCH_NAMES:
                saved[f"o_{name}"], saved[f"lse_{name}"] = getattr(branches, name)
        saved["k_cmp"], saved["v_cmp"] = (None, None) if inputs.k_cmp is not None else call.compressed
        saved["gates"] = None if inputs.gate_proj_weight is None else gates
        return {"out": call.result, **saved}

    saved = replay_of(run, inputs, config, recompute)
    return saved.pop("out"), Saved(**saved).to_list()


def nsa_saved_like(inputs: Any, config: Any, *, recompute: bool) -> list[Tensor]:
    """Empty tensors like those that `nsa_saving` saves, without running anything (sizes may be symbols)."""
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, kv_heads, v_dim = q.shape[-2], k.shape[-2], v.shape[-1]
    tile, packed = tile_rows(config, fa4_rules.rules(q.device)), runs_as_pack(inputs, config, training=True)
    batch, queries = (1, math.prod(q.shape[:-2])) if packed else q.shape[:2]
    if not packed:
        rows, tiles, entries = queries, -(-queries // tile), config.num_compressed(k.shape[1])
    else:
        queries, tokens, docs = pack_sizes(inputs)
        tiles = query_tiles(queries, docs, tile, config.q_tile_size, continues=inputs.continues)
        rows, (_, entries) = tiles * tile, sizes(tokens, docs, tile, config.stride)

    def like(*shape: Any, dtype: torch.dtype = q.dtype) -> Tensor:
        empty: Tensor = q.new_empty(shape, dtype=dtype)
        return empty

    select_heads = kv_heads if config.shares_heads else heads
    count = config.num_cmp_selected_blocks
    gates = None
    if inputs.gate_proj_weight is not None:
        gates = like(batch, queries, heads, 3, dtype=torch.float32)
    outputs: dict[str, Tensor] = {}
    if not recompute:
        for name in BRANCH_NAMES:
            outputs[f"o_{name}"] = like(batch, rows, heads, v_dim)
            outputs[f"lse_{name}"] = like(batch, heads, rows, dtype=torch.float32)
    given = inputs.k_cmp is not None
    saved = Saved(
        None if given else like(batch, entries, kv_heads, q.shape[-1]),
        None if given else like(batch, entries, kv_heads, v_dim),
        like(batch, select_heads, rows if config.token_mode else tiles, config.num_selected_blocks, dtype=torch.int32),
        like(batch, heads, tiles, count, dtype=torch.int32)
        if selects_entries(inputs, config, as_pack=packed)
        else None,
        gates,
    )
    return saved._replace(**outputs).to_list()


def _forward_in_chunks(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The forward, of which only selections and gates are kept: indices, cmp_indices, gates."""
    kept = []
    for start, stop in chunks(call):
        branches = attend(call, start, stop, lse=False, fuse_gate=True, keep_gates=True)
        kept.append((branches.indices, branches.cmp_indices, gate(call, branches, start, stop)))
        del branches  # frees its memory before the next chunk
    indices, cmp_indices, gates = zip(*kept, strict=True)
    return torch.cat(indices, 2), _concatenate(cmp_indices, 2), _concatenate(gates, 1)


# A chunk of query rows: select, attend three times


def attend(
    call: Call,
    start: int,
    stop: int,
    *,
    lse: bool,
    selections: tuple[Tensor | None, Tensor | None] = (None, None),
    holds_forced: bool = True,
    fuse_gate: bool = False,
    keep_gates: bool = False,
) -> BranchOutputs:
    """Selections and branches of query rows start ... stop-1.

    Args:
        lse: return each branch's log-sum-exp too.
        selections: indices and cmp_indices to use; None: compute them.
        holds_forced: `indices` hold the forced blocks, as all do that are computed here.
        fuse_gate: where the selected branch can, it also weighs the branches and adds them into `call.out`
            (`BranchOutputs.gating`).
        keep_gates: a fused gate writes projected gates to memory; with `lse` it always does.
    """
    inputs, plan = call.attended, call.plan
    q = inputs.q if stop - start == call.num_rows else inputs.q[:, start:stop]
    first = plan.first_row + start
    indices, cmp_indices = selections
    win = None
    if plan.window == "fa4" or not holds_forced:
        # First, because it needs nothing that is computed here: the GPU is busy while the host launches the rest
        win = attend_window(call, q, *branch_kv(inputs, "win"), first, lse)
    k_cmp, v_cmp = call.compressed
    if indices is None and not call.config.token_mode:
        q_sum = None if call.documents is None and first % plan.tile == 0 else inputs.q_sum
        indices, cmp_indices = select(call, q, k_cmp, first, plan.first_row + call.num_rows, q_sum)
    cmp = attend_compressed(call, q, k_cmp, v_cmp, cmp_indices, first, lse or indices is None)
    if indices is None:  # token mode selects by the compressed branch's probabilities, for which it needs its lse
        indices = token_topk(q, k_cmp, cast("Tensor", cmp.lse), call.config, start=first, documents=call.documents)
    gating = None
    if fuse_gate and plan.gate == "combine":
        gating = fused_gating(call, start, stop, cmp, win, keep_slc=lse, keep_gates=lse or keep_gates)
    window = None
    if win is None:
        win, window = new_window(call, q, lse=lse, keep=lse or gating is None)
    slc = attend_selected(
        call, q, *branch_kv(inputs, "slc"), indices, first, lse, holds_forced=holds_forced, gating=gating, window=window
    )
    return BranchOutputs(cmp, slc, win, indices, cmp_indices, gating)


def select(
    call: Call, q: Tensor, k_cmp: Tensor, start: int, tokens: int, q_sum: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Tile mode: indices of each tile of q, whose first row is token `start` of `tokens`; and cmp_indices or None.

    Args:
        q_sum: of the queries that q's only tile, or a document's first one, had before them, `[B,H,D]` fp32.
    """
    means = tile_means(q, call.plan.tile, call.documents)
    if q_sum is not None and call.documents is not None:
        _add_earlier_queries(means[0], q_sum, call.documents)
    elif q_sum is not None:
        before, rows = start % call.plan.tile, q.shape[1]
        means = (means * rows + q_sum[:, None]) / (before + rows)

    def top(mean_q: Tensor, blocks: Blocks) -> Tensor:
        return tile_topk(
            mean_q,
            k_cmp,
            blocks,
            keys=call.entry,
            tile=call.plan.tile,
            tokens=tokens,
            start=start,
            documents=call.documents,
        )

    cmp_indices = None if call.select_cmp is None else top(means, call.select_cmp)
    if call.config.shares_heads:
        means = means.unflatten(2, (k_cmp.shape[2], -1)).sum(3)
    return top(means, call.select), cmp_indices


def _add_earlier_queries(means: Tensor, q_sum: Tensor, documents: Documents) -> None:
    """Add to the mean `[tiles,H,D]` of each document's first tile what its earlier queries add, sums `[B,H,D]`."""
    if len(means) == 0:
        return
    start, length = documents.bounds[START, :-1], documents.bounds[LENGTH, :-1]
    inside = start % documents.tile
    rows = (length - start + inside).clamp(max=documents.tile)
    share = q_sum.float() / rows[:, None, None]
    earlier = torch.where(((inside > 0) & (length > start))[:, None, None], share, 0.0)
    means.index_add_(0, documents.bounds[TILE, :-1].clamp(max=len(means) - 1), earlier)  # a tile has one that is not 0


def attend_compressed(
    call: Call, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, start: int, lse: bool
) -> Branch:
    """Attention to compressed entries: to those in blocks `indices`, or None: to all visible ones."""
    documents = call.documents
    if call.config.causal and indices is None and documents is None:
        entries = min(k.shape[1], call.config.num_compressed(start + q.shape[1]))  # what the last row sees
        k, v = (k[:, :entries], v[:, :entries]) if entries < k.shape[1] else (k, v)
    if q.shape[1] == 0 or (k.shape[1] if documents is None else documents.most_entries) == 0:
        return _no_keys(q, v)
    lists = entry_lists(call, q, k, indices, start)
    length, stride = (call.entry.length, call.entry.stride) if call.config.causal else (1, 0)
    shifts = None if documents is None else documents.shifts
    return Branch(
        *fa4.compressed(
            q, k, v, lists, length=length, stride=stride, first_row=start, scale=call.scale, lse=lse, shifts=shifts
        )
    )


def entry_lists(call: Call, q: Tensor, k: Tensor, indices: Tensor | None, start: int) -> BlockLists | None:
    """Blocks of compressed entries for each query tile: the selected ones, or all visible ones; None: all entries."""
    if indices is not None:
        return selected_lists(call, q, k, indices, start, entries=True)
    if not call.config.causal:
        return None
    where: dict[str, Any] = {"rows_from": start, "rows_to": start + q.shape[1], "documents": call.documents}
    entries = k.shape[1] if call.documents is None else call.documents.most_entries
    width, rows = call.plan.rules.widths[0], call.plan.rules.rows
    return prefix_lists(
        q.shape[0], q.shape[2], call.entry, width=width, rows=rows, num_keys=entries, device=q.device, **where
    )


def attend_selected(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    start: int,
    lse: bool,
    *,
    holds_forced: bool,
    gating: Gating | None = None,
    window: WindowBranch | None = None,
) -> Branch:
    """Attention to the selected blocks of tokens.

    Args:
        holds_forced: `indices` hold the forced blocks, which need not be true of a caller's.
        gating: also weigh and add the branches into its out (`fused_gating`).
        window: also attend to the window.
    """
    stop, causal = start + q.shape[1], call.config.causal
    if causal and call.documents is None and stop < k.shape[1]:
        k, v = k[:, :stop], v[:, :stop]
    if indices.numel() == 0:
        return _no_keys(q, v)
    if call.plan.selected == "query_outer":
        return Branch(*query_outer_forward(q, k, v, indices, first_token=start, **token_mode_options(call)))
    if call.plan.selected == "kv_outer":
        init, local = call.plan.forced if holds_forced else (0, 0)
        options = token_mode_options(call) | {"init": init, "local": local, "gating": gating, "window": window}
        return Branch(*kv_outer_forward(q, k, v, indices, first_token=start, **options))
    lists = selected_lists(call, q, k, indices, start)
    shifts = None if call.documents is None else call.documents.key_shifts
    return Branch(*fa4.selected(q, k, v, lists, causal=causal, scale=call.scale, lse=lse, shifts=shifts))


def attend_window(call: Call, q: Tensor, k: Tensor, v: Tensor, start: int, lse: bool) -> Branch:
    """Attention to the sliding window."""
    stop, tokens, size = start + q.shape[1], k.shape[1], call.config.window_size
    if size == 0 or q.shape[1] == 0:
        return _no_keys(q, v)
    left, right = window_reach(size, call.config.causal, tokens)
    if call.documents is not None:
        varlen, k, v = call.documents.realign_kv(fa4_rules.window_tile_n(q, k, v), k, v)
        return Branch(*fa4.window(q, k, v, left=left, right=right, scale=call.scale, lse=lse, documents=varlen))
    # Whole tiles of keys, so that the same tiles meet the same rows however queries are chunked
    first, last = (
        max(0, start - left) // fa4_rules.WINDOW_ALIGNMENT * fa4_rules.WINDOW_ALIGNMENT,
        min(tokens, stop + right),
    )
    extra = last - stop  # keys after the last query
    if last - first < tokens:
        k, v = k[:, first:last], v[:, first:last]
    return Branch(*fa4.window(q, k, v, left=left + extra, right=right - extra, scale=call.scale, lse=lse))


def new_window(call: Call, q: Tensor, *, lse: bool, keep: bool) -> tuple[Branch, WindowBranch]:
    """The window branch of query rows, for `attend_selected` to fill in. Args: lse: see `attend`. keep: with its o."""
    batch, rows, heads, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if keep else None
    sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device) if lse else None
    return Branch(o, sums), WindowBranch(call.config.window_size - 1, o, sums)


def _no_keys(q: Tensor, v: Tensor) -> Branch:
    """A branch that has no keys: zeros, and -inf."""
    batch, rows, heads, _ = q.shape
    o = q.new_zeros((batch, rows, heads, v.shape[-1]))
    return Branch(o, torch.full((batch, heads, rows), -math.inf, dtype=torch.float32, device=q.device))


# The same chunk: gate


def fused_gating(
    call: Call, start: int, stop: int, cmp: Branch, win: Branch | None, *, keep_slc: bool, keep_gates: bool
) -> Gating:
    """Tensors with which the selected branch's last kernel gates query rows start ... stop-1 into `call.out`.

    Args:
        win: None: that kernel attends to the window too.
        keep_slc: write the selected branch's own o too. keep_gates: write projected gates too.
    """
    q, gates, out = _rows_to_gate(call, start, stop)
    weight = call.inputs.gate_proj_weight
    if weight is not None and keep_gates:
        gates = torch.empty((*q.shape[:-1], 3), dtype=torch.float32, device=q.device)
    o_win, o_slc = None if win is None else win.o, torch.empty_like(out) if keep_slc else None
    return Gating(cast("Tensor", cmp.o), o_win, out, weight, gates, o_slc)


def gate(call: Call, branches: BranchOutputs, start: int, stop: int) -> Tensor | None:
    """Weigh and add the branches of query rows start ... stop-1 into `call.out`, unless `attend` has done so.

    Returns:
        gates `[B,rows,H,3]`, or None where they are 1/3 each, or were not kept.
    """
    if branches.gating is not None:
        return branches.gating.gates
    (q, gates, out), documents = _rows_to_gate(call, start, stop), call.documents
    o_cmp, o_slc, o_win = branches.outputs
    return gated_sum(
        o_cmp,
        o_slc,
        o_win,
        out,
        q=q,
        gate_proj_weight=call.inputs.gate_proj_weight,
        gates=gates,
        rows=None if documents is None else documents.rows,
    )


def _rows_to_gate(call: Call, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """q, given gates and out of query rows start ... stop-1; of packed documents all tokens, as they were given."""
    q, gates, out = call.inputs.q, call.inputs.gates, call.out
    if stop - start < q.shape[1]:
        q, out = q[:, start:stop], out[:, start:stop]
        gates = None if gates is None else gates[:, start:stop]
    return q, gates, out


# The fields of NSAAux


def _aux(call: Call, branches: BranchOutputs, gates: Tensor | None) -> tuple[Tensor | None, ...]:
    """The fields of NSAAux, in its order; of packed documents without B, in the order of the tokens."""
    q, config, documents = call.inputs.q, call.config, call.documents
    if gates is None:
        gates = torch.full((1, 1, 1, 1), 1.0 / 3.0, device=q.device).expand(*q.shape[:3], 3)
    indices, cmp_indices = branches.indices, branches.cmp_indices
    if documents is None:
        if cmp_indices is None and config.num_cmp_selected_blocks is not None:
            cmp_indices = _all_entry_blocks(config, q, call.k_cmp, indices.shape[2])
        return (*branches.outputs, *branches.lses, call.k_cmp, call.v_cmp, gates, indices, cmp_indices)
    fields = (
        *(documents.to_tokens(x[0], 0, 0.0) for x in branches.outputs),
        *(documents.to_tokens(x[0], 1, -math.inf) for x in branches.lses),
        documents.compact_entries(call.k_cmp[0]),
        documents.compact_entries(call.v_cmp[0]),
        documents.fill_tail(gates[0], 0, 0.0),
        documents.to_tokens(indices[0], 1, -1) if config.token_mode else indices[0],
        None if cmp_indices is None else _complete_entry_blocks(documents, cmp_indices[0], config.n_block_size),
    )
    return fields if call.sequences is None else _of_sequences(fields, call, documents, call.sequences)


def _of_sequences(
    fields: tuple[Tensor | None, ...], call: Call, documents: Documents, batch: int
) -> tuple[Tensor | None, ...]:
    """The fields of NSAAux of B sequences of one length, from those of their pack."""
    *outputs, k_cmp, v_cmp, gates, indices, cmp_indices = fields
    entries = call.config.num_compressed(len(documents.key_rows) // batch)

    def by_row(x: Tensor, dim: int) -> Tensor:
        rows: Tensor = x.unflatten(dim, (batch, x.shape[dim] // batch))
        return rows.movedim(dim, 0)

    def by_tile(x: Tensor) -> Tensor:
        tile, first = documents.tile, documents.bounds[TILE]
        most = (len(documents.rows) // batch + 2 * (tile - 1)) // tile
        tiles = first[:-1, None] + torch.arange(most, dtype=torch.int32, device=x.device)
        found = x[:, tiles.clamp(max=max(x.shape[1] - 1, 0))].transpose(0, 1)  # [B,S,most,k]
        return torch.where((tiles < first[1:, None])[:, None, :, None], found, -1)

    select = partial(by_row, dim=1) if call.config.token_mode else by_tile
    return (
        *(by_row(x, 0) for x in outputs[:3] if x is not None),
        *(by_row(x, 1) for x in outputs[3:] if x is not None),
        *(x[: batch * entries].unflatten(0, (batch, entries)) for x in (k_cmp, v_cmp) if x is not None),
        None if gates is None else by_row(gates, 0),
        None if indices is None else select(indices),
        None if cmp_indices is None else select(cmp_indices),
    )


def _all_entry_blocks(config: Any, q: Tensor, k_cmp: Tensor, tiles: int) -> Tensor:
    """cmp_indices where no more blocks exist than may be selected, so that no selection was made: all blocks."""
    count = config.num_cmp_selected_blocks
    slots = torch.arange(count, dtype=torch.int32, device=q.device)
    blocks = -(-k_cmp.shape[1] // config.n_block_size)
    return torch.where(slots < blocks, slots, -1).expand(q.shape[0], q.shape[2], tiles, count)


def _complete_entry_blocks(documents: Documents, indices: Tensor, width: int) -> Tensor:
    """cmp_indices `[H,tiles,c]` of packed documents, with all blocks of a document that has no more than c.

    The kernel leaves out blocks in which it scored nothing. Attention is the same: no token sees their entries.
    """
    count, document = indices.shape[-1], documents.tiles[DOCUMENT]
    entries = documents.bounds[PUBLIC_ENTRY].diff()[document.clamp(min=0)]
    blocks = ((entries + width - 1) // width)[:, None]
    slots = torch.arange(count, dtype=torch.int32, device=indices.device)
    fit = (document >= 0)[:, None] & (blocks <= count)
    return torch.where(fit, torch.where(slots < blocks, slots, -1), indices)
