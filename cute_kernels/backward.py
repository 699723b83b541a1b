"""NSA's backward on NVIDIA GPUs.

    nsa_saving     the forward, and what backward wants to know of it
    nsa_backward   gates -> the three attentions -> pooling -> sums, for some key/value heads at a time

The heads of a pass follow from `TEMPORARY_BYTES`: outputs, fp32 sums and parts of the gradients exist for those only.
Gates weigh gradients through a shifted log-sum-exp (gate/backward.py). With `recompute` the branches' outputs are not
kept but computed again, from the selections that were kept.

Everything is asynchronous; no device value is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.attend import selected_backward as split
from cute_kernels.attend import window_backward as split_window
from cute_kernels.attend.kv_outer_backward import kv_outer_backward
from cute_kernels.fa4 import interface as fa4
from cute_kernels.forward import (
    Branch,
    BranchOutputs,
    Call,
    Plan,
    attend,
    chunks,
    gate,
    keys_of,
    prepare,
    token_blocks_of,
    token_lists,
    window_reach,
)
from cute_kernels.gate.backward import GateResults, gate_gradients
from cute_kernels.gate.sums import key_gradients, query_gradients
from cute_kernels.lists.kv_to_query import list_bytes, tile_bits, transposed_lists, transposed_prefix_lists
from cute_kernels.lists.query_to_kv import BlockLists
from cute_kernels.mma.wgmma import TILE
from cute_kernels.pool.compress import block_means
from cute_kernels.pool.documents import sizes
from cute_kernels.runtime.device import vectorizable
from cute_kernels.support import can_split, tile_rows

TEMPORARY_BYTES = 1 << 30
"""What the heads of a pass may need beside inputs, outputs and gradients, if they are more than one."""

LIST_BYTES = 1 << 30
"""What block lists may need at a time."""

PHASE_BYTES = 512 << 20
"""What the gradients of compressed entries may need, one for each phase, if there is more than one phase."""

PHASES_FROM = 16 << 10
"""Tokens from which phases pay off although each sequence of a batch is a call of its own."""


DIFFERENTIABLE = (
    "q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp",
    "w_k_compress", "w_v_compress", "gate_proj_weight", "gates",
)  # fmt: skip


BRANCHES = ("cmp", "slc", "win")

SPLIT = True
"""Whether the selected branch and the window take selected_backward.py and window_backward.py wherever they can.

They take less time than FlashAttention-4's (docs/performance.md). False leaves those for comparisons."""


class Saved(NamedTuple):
    """What backward needs beside inputs and options. As a list for autograd, with empty tensors in place of None."""

    k_cmp: Tensor | None
    """None where they are inputs."""
    v_cmp: Tensor | None
    indices: Tensor
    cmp_indices: Tensor | None
    gates: Tensor | None
    """Projected ones."""
    o_cmp: Tensor | None = None
    o_slc: Tensor | None = None
    o_win: Tensor | None = None
    lse_cmp: Tensor | None = None
    lse_slc: Tensor | None = None
    lse_win: Tensor | None = None

    def to_list(self) -> list[Tensor]:
        return [self.indices.new_empty(0) if tensor is None else tensor for tensor in self]

    @classmethod
    def of_list(cls, tensors: Sequence[Tensor]) -> Saved:
        return cls(*(None if tensor.dim() == 1 and tensor.numel() == 0 else tensor for tensor in tensors))  # type: ignore[arg-type]

    def part(self, heads: slice, select_heads: slice) -> BranchOutputs | None:
        """Of some query heads; None where it must be computed again."""
        pairs = (self.o_cmp, self.lse_cmp), (self.o_slc, self.lse_slc), (self.o_win, self.lse_win)
        branches = [Branch(o[:, :, heads], lse[:, heads]) for o, lse in pairs if o is not None and lse is not None]
        if len(branches) < len(pairs):
            return None
        cmp, slc, win = branches
        return BranchOutputs(cmp, slc, win, *self.selections(heads, select_heads))

    def selections(self, heads: slice, select_heads: slice) -> tuple[Tensor, Tensor | None]:
        chosen = None if self.cmp_indices is None else self.cmp_indices[:, heads]
        return self.indices[:, select_heads], chosen


def nsa_saving(inputs: Any, config: Any, *, recompute: bool) -> tuple[Tensor, list[Tensor]]:
    """The forward for checked inputs: out, and what `nsa_backward` takes.

    Args:
        recompute: keep the selections, not the branches' outputs.
    """
    call = prepare(inputs, config)
    projected = inputs.gate_proj_weight is not None
    kept: dict[str, Tensor | None] = {}
    if recompute and call.num_rows > 0:
        chosen = []
        for start, stop in chunks(call):
            part = attend(call, start, stop, lse=False, gating=True, gates=True)
            chosen.append((part.indices, part.cmp_indices, gate(call, part, start, stop)))
            del part  # before the next one is made
        indices = torch.cat([of_part for of_part, _, _ in chosen], 2)
        cmp_indices = _joined([of_part for _, of_part, _ in chosen], 2)
        all_gates = _joined([of_part for _, _, of_part in chosen], 1)
    else:
        part = attend(call, 0, call.num_rows, lse=True, gating=True)
        all_gates = gate(call, part, 0, call.num_rows)
        indices, cmp_indices = part.indices, part.cmp_indices
        for branch in () if recompute else BRANCHES:
            kept[f"o_{branch}"], kept[f"lse_{branch}"] = getattr(part, branch)
    k_cmp, v_cmp = (None, None) if inputs.k_cmp is not None else (call.k_cmp, call.v_cmp)
    saved = Saved(k_cmp, v_cmp, indices, cmp_indices, all_gates if projected else None, **kept)
    return call.result, saved.to_list()


def nsa_saved_like(inputs: Any, config: Any, *, recompute: bool) -> list[Tensor]:
    """Empty tensors like those that `nsa_saving` keeps, without running anything (sizes may be symbols)."""
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, kv_heads, v_dim = q.shape[-2], k.shape[-2], v.shape[-1]
    tile = tile_rows(config, fa4.rules(q.device))
    if inputs.cu_seqlens is None:
        batch, rows = q.shape[:2]
        tiles, entries = -(-rows // tile), config.num_compressed(rows)
    else:
        tiles, entries = sizes(q.shape[0], inputs.cu_seqlens.shape[0] - 1, tile, config.stride)
        batch, rows = 1, tiles * tile
    if inputs.k_cmp is not None and inputs.cu_seqlens is None:
        entries = inputs.k_cmp.shape[1]

    def like(*shape: Any, dtype: torch.dtype = q.dtype) -> Tensor:
        empty: Tensor = q.new_empty(shape, dtype=dtype)
        return empty

    select_heads = kv_heads if config.shares_heads else heads
    count, width = config.num_cmp_selected_blocks, config.n_block_size
    some = count is not None and (inputs.cu_seqlens is not None or count * width < entries)
    gates = None
    if inputs.gate_proj_weight is not None:
        gates = like(batch, q.shape[-3], heads, 3, dtype=torch.float32)
    kept: dict[str, Tensor] = {}
    if not recompute:
        for branch in BRANCHES:
            kept[f"o_{branch}"] = like(batch, rows, heads, v_dim)
            kept[f"lse_{branch}"] = like(batch, heads, rows, dtype=torch.float32)
    given = inputs.k_cmp is not None
    saved = Saved(
        None if given else like(batch, entries, kv_heads, q.shape[-1]),
        None if given else like(batch, entries, kv_heads, v_dim),
        like(batch, select_heads, rows if config.token_mode else tiles, config.num_selected_blocks, dtype=torch.int32),
        like(batch, heads, tiles, count, dtype=torch.int32) if some else None,
        gates,
    )
    return saved._replace(**kept).to_list()


def _joined(tensors: list[Tensor | None], dim: int) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < 2:
        return present[0] if present else None
    return torch.cat(present, dim)


def nsa_backward(
    inputs: Any, config: Any, saved: Sequence[Tensor], do: Tensor, *, deterministic: bool = False
) -> dict[str, Tensor]:
    """Gradients of all inputs that have one, by name, in the inputs' shapes and dtypes.

    Args:
        saved: from `nsa_saving`.
        do: gradient of out, `[B,N,H,D_v]`, packed `[T,H,D_v]`.
        deterministic: bitwise repeatable, for what support.py lets through.
    """
    kept = Saved.of_list(saved)
    compressed = None if kept.k_cmp is None or kept.v_cmp is None else (kept.k_cmp, kept.v_cmp)
    call = prepare(inputs, config, compressed)
    packed = call.plan.documents is not None
    do = vectorizable(do.unsqueeze(0) if packed else do)
    results = _Results(call)
    if call.inputs.q.numel() > 0:
        for heads in passes(call):
            _differentiate(call, kept, do, heads, results, deterministic)
        results.finish()
    return {
        name: tensor.squeeze(0) if packed and tensor.dim() == 4 else tensor
        for name, tensor in results.gradients.items()
    }


def passes(call: Call) -> Iterator[slice]:
    """Key/value heads to process at once."""
    batch, rows, heads, dim = call.attended.q.shape
    kv_heads, v_dim = call.inputs.k.shape[2], call.inputs.v.shape[-1]
    # Of q three parts and an fp32 sum, of k and v two parts and an fp32 sum
    per_head = batch * rows * (heads // kv_heads * dim * (3 * 2 + 4) + (dim + v_dim) * (2 * 2 + 4))
    count = max(1, min(kv_heads, TEMPORARY_BYTES // max(per_head, 1)))
    for start in range(0, kv_heads, count):
        yield slice(start, min(start + count, kv_heads))


class _Results:
    """Gradients of a call, filled in by passes over its heads."""

    def __init__(self, call: Call) -> None:
        inputs, self.documents = call.inputs, call.plan.documents
        self.gradients: dict[str, Tensor] = {}
        for name in DIFFERENTIABLE:
            tensor = getattr(inputs, name)
            if tensor is not None:
                # Zeros stay where there is nothing to differentiate: no tokens, no entries
                new = torch.zeros if tensor.dim() == 3 or inputs.q.numel() == 0 else torch.empty
                self.gradients[name] = new(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        # Not zeros_like: gradients are contiguous, as operators promise, also where k_cmp that was given is not
        self.entries = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (call.k_cmp, call.v_cmp)]
        """Gradients of the compressed keys and values, fp32."""

    def finish(self) -> None:
        """Round the gradients of compressed keys and values that were given."""
        for name, entries in zip(("k_cmp", "v_cmp"), self.entries, strict=True):
            if name not in self.gradients:
                continue
            if self.documents is None:
                self.gradients[name] = entries.to(self.gradients[name].dtype)
            else:
                packed = self.documents.without_gaps(entries[0])
                count = min(len(packed), len(self.gradients[name]))  # those behind all entries have none
                self.gradients[name][:count] = packed[:count]


def _differentiate(
    call: Call, saved: Saved, do: Tensor, kv_heads: slice, results: _Results, deterministic: bool
) -> None:
    """Everything that belongs to some key/value heads."""
    documents, config = call.plan.documents, call.plan.config
    heads = call.query_heads(kv_heads)
    select_heads = kv_heads if config.shares_heads else heads
    some = call.of_heads(kv_heads)
    part = saved.part(heads, select_heads)
    if part is None:
        part = attend(some, 0, call.num_rows, lse=True, given=saved.selections(heads, select_heads))
    do = do[:, :, heads]
    projected = saved.gates is not None
    gates = saved.gates[:, :, heads] if saved.gates is not None else some.inputs.gates
    outputs = part.outputs
    rows = None if documents is None else documents.rows
    gated = gate_gradients(do, outputs, part.lses, q=some.inputs.q, gates=gates, projected=projected, rows=rows)
    indices, cmp_indices = part.indices, part.cmp_indices
    del part
    dos = gated.do or [do if documents is None else documents.align_one(do)] * 3
    gradients = results.gradients
    if gated.gates is not None:
        gradients["gates"][:, :, heads] = gated.gates
    if gated.gate_proj_weight is not None:
        gradients["gate_proj_weight"][heads] = gated.gate_proj_weight

    dq = gradients["q"][:, :, heads]
    q_parts: list[Tensor] = []

    def gradients_of(branch: int, k: Tensor, v: Tensor) -> fa4.Gradients:
        """What a branch reads and writes; the first branch writes into dq itself where rows lie alike.

        Only the result holds o and do of the branch then, so that they go with it if they were made for this pass.
        """
        q = some.attended.q
        o, weighted = outputs[branch], dos[branch]
        outputs[branch] = dos[branch] = q.new_empty(0)
        into = dq if not q_parts and documents is None else torch.empty_like(q)
        q_parts.append(into)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        return fa4.Gradients(q, k, v, o, weighted, gated.lse[branch], into, dk, dv)

    if (some.k_cmp.shape[1] if documents is None else documents.most_entries) > 0:
        cmp = gradients_of(0, some.k_cmp, some.v_cmp)
        for total, x in zip(
            results.entries, compressed_backward(call.plan, cmp, cmp_indices, deterministic), strict=True
        ):
            total[:, :, kv_heads] = x
        del cmp
    whole: dict[str, tuple[Tensor, Tensor]] = {}
    near = None
    if indices.numel() > 0:
        slc = gradients_of(1, *keys_of(some.attended, "slc"))
        near = near_of(some, gated)
        selected_backward(call.plan, slc, indices, gated.delta[1], deterministic, near=near)
        whole["slc"] = slc.dk, slc.dv
        del slc
    if config.window_size > 0:
        win = gradients_of(2, *keys_of(some.attended, "win"))
        window_backward(call.plan, win, gated.delta[2], deterministic, near=near)
        whole["win"] = win.dk, win.dv
        del win
    query_gradients(
        dq,
        q_parts,
        logits=gated.logits,
        gate_proj_weight=some.inputs.gate_proj_weight,
        documents=documents,
    )
    _add_keys(some, whole, kv_heads, results)


def near_of(some: Call, gated: GateResults) -> split_window.LocalSelected | None:
    """What the window's backward is to do of the selected branch; None: nothing.

    That needs the same keys, and the same do: given gates weigh it for each branch.
    """
    inputs, config = some.attended, some.plan.config
    (k, _), (k_win, _) = keys_of(inputs, "slc"), keys_of(inputs, "win")
    size, local = config.select_size, config.num_local_blocks
    inside = config.token_mode and 0 < local * size <= config.window_size
    if not (inside and _splits_window(some.plan, inputs.q, inputs.v) and k is k_win and gated.do is None):
        return None
    return split_window.LocalSelected(gated.lse[1], gated.delta[1], size, local)


def _splits_window(plan: Plan, q: Tensor, v: Tensor) -> bool:
    """Whether attend/window_backward.py takes the window."""
    dims = q.shape[-1], v.shape[-1]
    return SPLIT and plan.config.causal and plan.documents is None and can_split(plan.rules, *dims)


def _add_keys(some: Call, whole: dict[str, tuple[Tensor, Tensor]], kv_heads: slice, results: _Results) -> None:
    """Gradients of k and v, and of keys that branches had of their own, from dk and dv of the branches `whole`."""
    documents, keys = some.plan.documents, some.plan.entry

    def add_up(names: tuple[str, str], parts: list[tuple[Tensor, Tensor]], entries: list[Tensor] | None) -> None:
        dk, dv = (results.gradients[name][:, :, kv_heads] for name in names)
        key_gradients(
            dk,
            dv,
            [part[0] for part in parts],
            [part[1] for part in parts],
            entries=None if entries is None else (entries[0], entries[1]),
            keys=keys,
            documents=documents,
        )

    shared = []
    for branch in ("slc", "win"):
        parts = [whole[branch]] if branch in whole else []
        names = f"k_{branch}", f"v_{branch}"
        if names[0] in results.gradients:
            add_up(names, parts, None)
        else:
            shared += parts
    entries = None
    if some.inputs.k_cmp is None and results.entries[0].shape[1] > 0:
        entries = _before_projection(some, [x[:, :, kv_heads] for x in results.entries], kv_heads, results)
    add_up(("k", "v"), shared, entries)


def _before_projection(some: Call, entries: list[Tensor], kv_heads: slice, results: _Results) -> list[Tensor]:
    """Gradients of what pooling gave, from those of the compressed keys and values; and the projections' gradients."""
    inputs, config = some.inputs, some.plan.config
    weights = {"w_k_compress": inputs.w_k_compress, "w_v_compress": inputs.w_v_compress}
    if all(weight is None for weight in weights.values()):
        return entries
    length, stride = config.compress_block_size, config.stride
    pooled = block_means(inputs.k, inputs.v, length, stride, torch.float32, some.plan.documents)
    for i, (name, weight) in enumerate(weights.items()):
        if weight is not None:
            results.gradients[name][kv_heads] = torch.einsum("bnhd,bnhe->hde", pooled[i], entries[i])
            entries[i] = torch.einsum("bnhe,hde->bnhd", entries[i], weight[kv_heads].float()).contiguous()
    return entries


# The branches. Each fills in dq, dk and dv of its `Gradients`.


def compressed_backward(
    plan: Plan, gradients: fa4.Gradients, indices: Tensor | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Returns dk and dv in fp32."""
    q, k = gradients.q, gradients.k
    documents, keys = plan.documents, plan.entry
    batch, num_rows = q.shape[:2]
    if indices is None and keys.causal and documents is None and keys.length % keys.stride == 0:
        if batch == 1 or num_rows >= PHASES_FROM or deterministic:
            return _compressed_by_phases(plan, gradients, deterministic)
    length, stride = (keys.length, keys.stride) if keys.causal else (1, 0)
    how: dict[str, Any] = {"length": length, "stride": stride, "first_row": 0, "scale": plan.scale}
    if documents is not None:
        how["shifts"] = documents.shifts
    if indices is not None:
        size = plan.config.n_block_size
        bits = tile_bits(indices, size=size, num_keys=k.shape[1], entries=True, documents=documents)
        for piece, lists in pieces(plan, gradients, bits, size=size, width=size, entries=True):
            fa4.compressed_backward(piece.gradients, lists, **how)
    elif not keys.causal:
        fa4.dense_backward(gradients, causal=False, scale=plan.scale, deterministic=deterministic)
    else:
        lists = transposed_prefix_lists(
            batch,
            q.shape[2],
            keys,
            width=plan.rules.widths[0],
            rows=plan.rules.rows,
            num_keys=k.shape[1],
            num_rows=num_rows,
            device=q.device,
            documents=documents,
        )
        fa4.compressed_backward(gradients, lists, **how)
    return gradients.dk.float(), gradients.dv.float()


def _compressed_by_phases(plan: Plan, given: fa4.Gradients, deterministic: bool) -> tuple[Tensor, Tensor]:
    """Rows i = m*d + p of one phase p see entries causally: j <= m - l/d, for the last phase j <= m - l/d + 1.

    So d phases are a batch of dense causal attentions, much faster than lists: the few blocks of entries become many.
    Rows that see nothing are left out. Then there are as many rows as entries: FA4 compiles kernels of their own for
    one tile of rows and for one tile of keys, and a few lengths alone would have the one without the other.
    The rows behind the last whole period see every entry.
    """
    keys, entries = plan.entry, given.k.shape[1]
    period = keys.stride
    whole = given.q.shape[1] // period * period
    per_phase = entries * given.k.shape[2] * (given.k.shape[-1] + given.v.shape[-1]) * (2 + 4)
    most = max(1, PHASE_BYTES // max(per_phase, 1))
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (given.k, given.v))

    def differentiate(gradients: fa4.Gradients, b: int, seen: int, *, causal: bool) -> None:
        fa4.dense_backward(gradients, causal=causal, scale=plan.scale, deterministic=deterministic)
        dk[b, :seen] += gradients.dk.sum(0, dtype=torch.float32)
        dv[b, :seen] += gradients.dv.sum(0, dtype=torch.float32)

    def of_keys(b: int, seen: int, copies: int) -> dict[str, Tensor]:
        k, v = (x[b : b + 1, :seen].expand(copies, -1, -1, -1) for x in (given.k, given.v))
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        return {"k": k, "v": v, "dk": dk, "dv": dv}

    def by_phase(x: Tensor, b: int) -> Tensor:
        *_, heads, dim = x.shape
        return x[b, :whole].view(-1, period, heads, dim).transpose(0, 1)

    for b in range(given.q.shape[0]):
        rows = {name: by_phase(getattr(given, name), b) for name in ("q", "o", "do", "dq")}
        lse = given.lse[b, :, :whole].unflatten(1, (-1, period)).permute(2, 0, 1)
        given.dq[b, : keys.length - 1] = 0
        ranges = [(p, min(p + most, period - 1), entries - 1) for p in range(0, period - 1, most)]
        for start, stop, seen in [*ranges, (period - 1, period, entries)]:
            first = whole // period - seen
            phases = {name: x[start:stop, first:] for name, x in rows.items()}
            of_rows = lse[start:stop, :, first:].contiguous()
            gradients = fa4.Gradients(**phases, lse=of_rows, **of_keys(b, seen, stop - start))
            differentiate(gradients, b, seen, causal=True)
        if whole < given.q.shape[1]:
            tail = {name: getattr(given, name)[b : b + 1, whole:] for name in ("q", "o", "do", "dq")}
            gradients = fa4.Gradients(**tail, lse=given.lse[b : b + 1, :, whole:], **of_keys(b, entries, 1))
            differentiate(gradients, b, entries, causal=False)
    return dk, dv


def selected_backward(
    plan: Plan,
    gradients: fa4.Gradients,
    indices: Tensor,
    delta: Tensor,
    deterministic: bool,
    *,
    near: split_window.LocalSelected | None = None,
) -> None:
    """Args: `delta`, do . o, fp32 `[B,H,N]`; `near`, what the window's backward does instead, in token mode."""
    if plan.config.token_mode:
        inputs = gradients.q, gradients.k, gradients.v, indices, gradients.do, gradients.lse, delta
        into = gradients.dq, gradients.dk, gradients.dv
        local = 0 if near is None else near.local
        kv_outer_backward(*inputs, local=local, into=into, **token_blocks_of(plan))
        return
    size, causal, k = plan.config.select_size, plan.config.causal, gradients.k
    bits = tile_bits(indices, size=size, num_keys=k.shape[1], entries=False, documents=plan.documents)
    if deterministic or (SPLIT and can_split(plan.rules, gradients.q.shape[-1], gradients.v.shape[-1])):
        split.selected_backward(
            gradients.q,
            k,
            gradients.v,
            gradients.do,
            gradients.lse,
            delta,
            token_lists(plan, gradients.q, k, indices, 0, width=TILE),
            bits,
            size=size,
            causal=causal,
            scale=plan.scale,
            dq=gradients.dq,
            dk=gradients.dk,
            dv=gradients.dv,
        )
        return
    width = plan.rules.width(size)
    for piece, lists in pieces(plan, gradients, bits, size=size, width=width, entries=False):
        where = {"first_row": piece.first_row, "first_key": piece.first_key}
        fa4.selected_backward(piece.gradients, lists, causal=causal, scale=plan.scale, **where)


class Piece(NamedTuple):
    """What one call of a backward with lists handles."""

    gradients: fa4.Gradients
    first_row: int
    first_key: int


def pieces(
    plan: Plan, gradients: fa4.Gradients, bits: Tensor, *, size: int, width: int, entries: bool
) -> Iterator[tuple[Piece, BlockLists]]:
    """Parts of a backward whose lists fit LIST_BYTES: everything, or one key/value head and some blocks of keys.

    Between pieces, the sums of dq are kept in fp32.

    Args:
        entries: keys are compressed entries, not tokens; only tokens are divided by blocks, where one head is too much.
    """
    q, k = gradients.q, gradients.k
    batch, num_rows, heads, _ = q.shape
    num_keys, kv_heads = k.shape[1:3]
    tiles, blocks = -(-num_rows // plan.tile), -(-num_keys // width)
    keys, documents = (plan.entry, plan.documents) if entries else (plan.token, None)

    def lists(of: Tensor, query_heads: int, some: range, first_tile: int = 0) -> BlockLists:
        return transposed_lists(
            of,
            query_heads,
            keys,
            size=size,
            width=width,
            rows=plan.tile,
            num_keys=num_keys,
            num_rows=num_rows,
            blocks=some,
            first_tile=first_tile,
            documents=documents,
        )

    if list_bytes(batch * heads, blocks, tiles) <= LIST_BYTES:
        yield Piece(gradients, 0, 0), lists(bits, heads, range(blocks))
        return
    group, select_group = heads // kv_heads, bits.shape[1] // kv_heads
    most = blocks if entries else max(1, LIST_BYTES // list_bytes(group, 1, tiles))
    for b in range(batch):
        for h in range(kv_heads):
            of_rows = (slice(b, b + 1), slice(None), slice(h * group, (h + 1) * group))
            of_keys = (slice(b, b + 1), slice(None), slice(h, h + 1))
            mine = bits[b : b + 1, h * select_group : (h + 1) * select_group]
            one = replace(
                gradients,
                **{name: getattr(gradients, name)[of_rows] for name in ("q", "o", "do", "dq")},
                **{name: getattr(gradients, name)[of_keys] for name in ("k", "v", "dk", "dv")},
                lse=gradients.lse[of_rows[0], of_rows[2]],
            )
            if most >= blocks:
                yield Piece(one, 0, 0), lists(mine, group, range(blocks))
                continue
            total = torch.zeros_like(one.dq, dtype=torch.float32)
            for start in range(0, blocks, most):
                some = range(start, min(start + most, blocks))
                first_key = start * width
                # With causality rows before the first key see nothing
                first_tile = first_key // plan.tile if keys.causal else 0
                first_row = first_tile * plan.tile
                slices = slice(first_key, min(some.stop * width, num_keys))
                dq = torch.empty_like(one.dq[:, first_row:])
                piece = replace(
                    one,
                    **{name: getattr(one, name)[:, first_row:] for name in ("q", "o", "do")},
                    **{name: getattr(one, name)[:, slices] for name in ("k", "v", "dk", "dv")},
                    lse=one.lse[..., first_row:],
                    dq=dq,
                )
                yield Piece(piece, first_row, first_key), lists(mine, group, some, first_tile)
                total[:, first_row:] += dq
            one.dq.copy_(total)


def window_backward(
    plan: Plan,
    gradients: fa4.Gradients,
    delta: Tensor,
    deterministic: bool,
    *,
    near: split_window.LocalSelected | None = None,
) -> None:
    """Args: `delta`, do . o, fp32 `[B,H,N]`; `near`, what of the selected branch is done here."""
    given = gradients
    before, behind = window_reach(plan.config.window_size, plan.config.causal, given.k.shape[1])
    if _splits_window(plan, given.q, given.v):
        split_window.window_backward(
            given.q,
            given.k,
            given.v,
            given.do,
            given.lse,
            delta,
            left=before,
            scale=plan.scale,
            into=(given.dq, given.dk, given.dv),
            local_selected=near,
        )
        return
    documents = None if plan.documents is None else plan.documents.packed
    fa4.window_backward(
        gradients, left=before, right=behind, scale=plan.scale, documents=documents, deterministic=deterministic
    )
