"""NSA's backward on NVIDIA GPUs: gates, the three attentions, pooling, sums.

    nsa_backward   gradients of all inputs, from what `forward.nsa_saving` saved, by chunks of key/value heads:
                   _backward_of_heads   gates -> compressed, selected, window -> dq
                   _sum_keys            -> pooling -> dk, dv

How many heads a chunk has follows from TEMPORARY_BYTES: outputs, fp32 sums and the branches' gradients exist for those
only. Gates weigh gradients through a shifted log-sum-exp (gate/backward.py). With `recompute` the branches' outputs
were not saved but are computed again, from the selections that were.

Everything is asynchronous; no device value is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.attend.compressed_backward import compressed_backward
from cute_kernels.attend.kv_outer_backward import kv_outer_backward
from cute_kernels.attend.row_statistics import row_statistics
from cute_kernels.attend.selected_backward import selected_backward
from cute_kernels.attend.window_backward import LocalSelected, window_backward
from cute_kernels.attend.window_dq_combine import WindowQueries
from cute_kernels.call import (
    Call,
    branch_kv,
    prepare,
    replay_of,
    selected_lists,
    token_mode_options,
    window_reach,
)
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4.interface import Gradients
from cute_kernels.forward import Saved, attend
from cute_kernels.forward import nsa_saved_like as nsa_saved_like  # dispatch trains through this module
from cute_kernels.forward import nsa_saving as nsa_saving
from cute_kernels.gate.backward import GateResults, gate_gradients
from cute_kernels.gate.sums import QueryTerms, key_gradients, query_gradients
from cute_kernels.limits import MAX_GRID
from cute_kernels.lists.kv_to_query import list_bytes, tile_bits, transposed_lists, transposed_prefix_lists
from cute_kernels.lists.query_to_kv import BlockLists, Keys
from cute_kernels.mma.wgmma import TILE
from cute_kernels.pool.compress import block_means
from cute_kernels.runtime.device import vectorizable

TEMPORARY_BYTES = 1 << 30
"""Limit of the temporary memory of a chunk of several heads, beside inputs, outputs and gradients."""

LIST_BYTES = 1 << 30
"""Limit of the memory of block lists at a time."""

PHASE_BYTES = 512 << 20
"""Limit of the memory of the gradients of compressed entries, one for each phase, if there are several phases."""

DIFFERENTIABLE = (
    "q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp",
    "w_k_compress", "w_v_compress", "gate_proj_weight", "gates",
)  # fmt: skip


def nsa_backward(
    inputs: Any,
    config: Any,
    saved: Sequence[Tensor],
    do: Tensor,
    *,
    deterministic: bool = False,
    share_dtype: torch.dtype | None = None,
    atomic_free: bool = True,
) -> dict[str, Tensor]:
    """Gradients of all inputs that have one, by name, in the inputs' shapes and dtypes.

    Args:
        saved: from `nsa_saving`.
        do: gradient of out, `[B,N,H,D_v]`, packed `[T,H,D_v]`.
        deterministic: bitwise repeatable, for what support.py lets through.
        share_dtype: fp32 for the gradients of all tensors but q and gates, in place of their own dtype.
        atomic_free: False: take FlashAttention-4's backward for every branch, for comparisons. It has no effect on
            the selected branch of `deterministic` calls.
    """

    def run() -> dict[str, Tensor]:
        kept = Saved.from_list(saved, inputs, config)
        saved_cmp = None if kept.k_cmp is None or kept.v_cmp is None else (kept.k_cmp, kept.v_cmp)
        choices = {"deterministic": deterministic, "atomic_free": atomic_free}
        call = prepare(inputs, config, saved_cmp, training=True, **choices)
        rows = vectorizable(do.reshape(*call.inputs.q.shape[:3], do.shape[-1]))
        results = _Results(call, share_dtype)
        if call.inputs.q.numel() > 0:
            for kv_heads in head_chunks(call):
                _backward_of_heads(call, kept, rows, kv_heads, results)
            results.finish()
        return {name: tensor.view(getattr(inputs, name).shape) for name, tensor in results.gradients.items()}

    return replay_of(run, inputs, config, deterministic, share_dtype, atomic_free, more=[*saved, do])


def head_chunks(call: Call) -> Iterator[slice]:
    """Ranges of key/value heads to process one after the other."""
    batch, rows, heads, dim = call.attended.q.shape
    kv_heads, v_dim = call.inputs.k.shape[2], call.inputs.v.shape[-1]
    keys = call.attended.k_slc.shape[1] if call.documents is not None else rows + call.plan.first_row
    # Of q the gradients of three branches and an fp32 sum, of k and v those of two branches and an fp32 sum
    per_head = batch * (rows * heads // kv_heads * dim * (3 * 2 + 4) + keys * (dim + v_dim) * (2 * 2 + 4))
    count = max(1, min(kv_heads, TEMPORARY_BYTES // max(per_head, 1)))
    for start in range(0, kv_heads, count):
        yield slice(start, min(start + count, kv_heads))


class _Results:
    """Gradients of a call, filled in by chunks of heads."""

    def __init__(self, call: Call, share_dtype: torch.dtype | None) -> None:
        inputs, self.documents = call.inputs, call.documents
        self.gradients: dict[str, Tensor] = {}
        for name in DIFFERENTIABLE:
            tensor = getattr(inputs, name)
            if tensor is not None:
                # Zeros stay where there is nothing to differentiate: no tokens, no entries
                needs_entries = tensor.dim() == 3 and name != "gate_proj_weight"
                new = torch.zeros if needs_entries or inputs.q.numel() == 0 else torch.empty
                dtype = tensor.dtype if name in ("q", "gates") else share_dtype or tensor.dtype
                self.gradients[name] = new(tensor.shape, dtype=dtype, device=tensor.device)
        self.shapes = call.k_cmp.shape, call.v_cmp.shape
        self.entries: list[Tensor] = []
        """Gradients of the compressed keys and values, fp32."""

    def add_entries(self, kv_heads: slice, parts: tuple[Tensor, Tensor] | None) -> None:
        """Gradients of the entries of a chunk of heads; None: there are no entries."""
        # Gradients are contiguous, as operators promise, also where k_cmp that was given is not
        if parts and all(x.shape == whole and x.is_contiguous() for x, whole in zip(parts, self.shapes, strict=True)):
            self.entries = [*parts]  # of all heads
            return
        device = self.gradients["q"].device
        self.entries = self.entries or [torch.zeros(x, dtype=torch.float32, device=device) for x in self.shapes]
        for entries, part in zip(self.entries, parts or (), strict=False):
            entries[:, :, kv_heads] = part

    def finish(self) -> None:
        """Round the gradients of compressed keys and values that the caller gave."""
        for name, entries in zip(("k_cmp", "v_cmp"), self.entries, strict=True):
            if name not in self.gradients:
                continue
            if self.documents is None:
                self.gradients[name] = entries.to(self.gradients[name].dtype)
            else:
                packed = self.documents.compact_entries(entries[0])
                count = min(len(packed), len(self.gradients[name]))  # those after all entries have none
                self.gradients[name][:count] = packed[:count]


def _backward_of_heads(call: Call, saved: Saved, do: Tensor, kv_heads: slice, results: _Results) -> None:
    """All gradients of a chunk of key/value heads and their query heads."""
    documents, config = call.documents, call.config
    heads = call.query_heads(kv_heads)
    select_heads = kv_heads if config.shares_heads else heads
    chunk = call.slice_heads(kv_heads)
    branches = saved.branch_outputs(heads, select_heads)
    if branches is None:
        branches = attend(chunk, 0, call.num_rows, lse=True, selections=saved.selections(heads, select_heads))

    # Gates
    do = do[:, :, heads]
    projected = saved.gates is not None
    gates = saved.gates[:, :, heads] if saved.gates is not None else chunk.inputs.gates
    outputs = branches.outputs
    rows = None if documents is None else documents.rows
    gated = gate_gradients(do, outputs, branches.lses, q=chunk.inputs.q, gates=gates, projected=projected, rows=rows)
    indices, cmp_indices = branches.indices, branches.cmp_indices
    del branches  # `outputs` alone holds the outputs, so that each is freed with its branch
    dos = gated.do or [do if documents is None else documents.align_queries(do)] * 3
    gradients = results.gradients
    if gated.gates is not None:
        gradients["gates"][:, :, heads] = gated.gates
    if gated.gate_proj_weight is not None:
        gradients["gate_proj_weight"][heads] = gated.gate_proj_weight

    # The three attentions
    dq = gradients["q"][:, :, heads]
    dq_parts: list[Tensor] = []

    def branch_gradients(branch: int, k: Tensor, v: Tensor, part: Tensor | None = None) -> Gradients:
        """Tensors that the backward of a branch reads and writes.

        Afterwards only the result holds the branch's o and do. They are freed with it if they were made for this chunk.

        Args:
            part: where it writes dq. None: a part of its own, for the first branch dq itself, where nothing is packed.
        """
        q = chunk.attended.q
        o, weighted_do = outputs[branch], dos[branch]
        outputs[branch] = dos[branch] = q.new_empty(0)
        if part is None:
            part = dq if not dq_parts and documents is None else torch.empty_like(q)
            dq_parts.append(part)
        if branch == 0 and call.plan.compressed_backward == "split":  # its dk and dv are fp32, and its own
            dk = dv = q.new_empty(0)
        else:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
        if branch == 2 and documents is not None and documents.packed.continues:
            for x in (dk, dv):  # FlashAttention-4's window does not write the gradients of keys that no row sees
                x.zero_()
        return Gradients(q, k, v, o, weighted_do, gated.lse[branch], part, dk, dv)

    if (chunk.k_cmp.shape[1] if documents is None else documents.most_entries) > 0:
        cmp = branch_gradients(0, chunk.k_cmp, chunk.v_cmp)
        results.add_entries(kv_heads, backward_compressed(call, cmp, cmp_indices, gated.delta[0]))
        del cmp
    else:
        results.add_entries(kv_heads, None)
    dkv: dict[str, tuple[Tensor, Tensor]] = {}
    selects, windows = indices.numel() > 0, config.window_size > 0
    local, window_queries = local_selected(chunk, gated), None
    if call.plan.window_dq == "combine":
        left, _ = window_reach(config.window_size, config.causal, chunk.attended.k.shape[1])
        window_queries = WindowQueries(gated.lse[2], gated.delta[2], left)
    logits_term = QueryTerms((), gated.logits, chunk.inputs.gate_proj_weight)
    sums_queries = selects and config.token_mode and documents is None

    def differentiate_selected() -> None:
        others = logits_term._replace(branches=tuple(dq_parts)) if sums_queries else None
        slc = branch_gradients(1, *branch_kv(chunk.attended, "slc"), dq if sums_queries else None)
        terms: dict[str, Any] = {"local": local, "terms": others, "window": window_queries}
        backward_selected(call, slc, indices, gated.delta[1], **terms)
        dkv["slc"] = slc.dk, slc.dv

    def differentiate_window() -> None:
        k_win, v_win = branch_kv(chunk.attended, "win")
        first_key = first_key_of_windows(call, k_win.shape[1], local)
        if first_key > 0:
            k_win, v_win = k_win[:, first_key:], v_win[:, first_key:]
        win = branch_gradients(2, k_win, v_win, None if window_queries is None else dq)
        where: dict[str, Any] = {"first_key": first_key, "local": local, "keys_alone": window_queries is not None}
        backward_window(call, win, gated.delta[2], **where)
        dkv["win"] = win.dk, win.dv

    if windows and sums_queries:  # first, where the selected branch adds its dq
        differentiate_window()
    if selects:
        differentiate_selected()
    if windows and not sums_queries:
        differentiate_window()

    # Sums
    if not sums_queries:
        query_gradients(dq, logits_term._replace(branches=tuple(dq_parts)), documents=documents)
    _sum_keys(chunk, dkv, kv_heads, results)


# The branches. Each fills in dq, dk and dv of its `Gradients`.


def backward_compressed(
    call: Call, gradients: Gradients, indices: Tensor | None, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of attention to compressed entries.

    Args:
        indices: blocks of entries that were selected; None: all.
        delta: do . o, fp32 `[B,H,N]`.

    Returns:
        dk and dv in fp32.
    """
    q, k = gradients.q, gradients.k
    documents, keys = call.documents, call.entry
    batch, num_rows = q.shape[:2]
    how = call.plan.compressed_backward
    if how == "split":
        return compressed_backward(
            q,
            k,
            gradients.v,
            gradients.do,
            gradients.lse,
            delta,
            length=keys.length,
            stride=keys.stride,
            scale=call.scale,
            dq=gradients.dq,
            first_token=call.plan.first_row,
        )
    if how == "phases":
        return _compressed_by_phases(call, gradients, delta)
    length, stride = (keys.length, keys.stride) if keys.causal else (1, 0)
    options: dict[str, Any] = {"length": length, "stride": stride, "first_row": call.plan.first_row}
    options |= {"scale": call.scale, "shifts": None if documents is None else documents.shifts}
    if indices is not None:
        size = call.config.n_block_size
        bits = tile_bits(indices, size=size, num_keys=k.shape[1], entries=True, documents=documents)
        if how == "blocks":
            _selected_without_atomics(call, gradients, indices, bits, delta, size=size, entries=True)
        else:
            for part in list_chunks(call, gradients, bits, size=size, width=size, entries=True):
                fa4.compressed_backward(part.gradients, part.lists, **options)
    elif not keys.causal:
        fa4.dense_backward(gradients, causal=False, scale=call.scale, deterministic=call.plan.deterministic)
    else:
        lists = transposed_prefix_lists(
            batch,
            q.shape[2],
            keys,
            width=call.plan.rules.backward_widths[0],
            rows=call.plan.rules.rows,
            num_keys=k.shape[1],
            num_rows=num_rows,
            device=q.device,
            first_row=call.plan.first_row,
            documents=documents,
        )
        fa4.compressed_backward(gradients, lists, **options)
    return gradients.dk.float(), gradients.dv.float()


def _compressed_by_phases(call: Call, gradients: Gradients, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The same without lists: d phases as a batch of dense causal attentions, which is much faster.

    Rows i = m*d + p of one phase p see entries causally: j <= m - l/d, for the last phase j <= m - l/d + 1. Rows that
    see nothing are left out. Then there are as many rows as entries: FA4 compiles separate kernels for one tile of rows
    and for one tile of keys, and otherwise a few lengths would have one without the other. Rows that continue a
    sequence begin with a period, and are fewer. Rows after the last whole period see every entry.
    """
    keys, entries = call.entry, gradients.k.shape[1]
    period = keys.stride
    whole = gradients.q.shape[1] // period * period
    periods = (call.plan.first_row + whole) // period
    per_phase = entries * gradients.k.shape[2] * (gradients.k.shape[-1] + gradients.v.shape[-1]) * (2 + 4)
    most = max(1, min(MAX_GRID, PHASE_BYTES // max(per_phase, 1)))
    shapes = gradients.k.shape, gradients.v.shape
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": gradients.q.device}
    if shapes[0] == shapes[1]:  # one launch for both
        dk, dv = torch.zeros((2, *shapes[0]), **fp32).unbind(0)
    else:
        dk, dv = (torch.zeros(shape, **fp32) for shape in shapes)

    def accumulate(part: Gradients, row_dots: Tensor, b: int, seen: int, *, causal: bool) -> None:
        statistics = None if call.plan.deterministic else partial(row_statistics, part.lse, row_dots)
        options: dict[str, Any] = {"deterministic": call.plan.deterministic, "statistics": statistics}
        fa4.dense_backward(part, causal=causal, scale=call.scale, **options)
        for total, phases in ((dk, part.dk), (dv, part.dv)):
            # Not +=, which copies the sum to where it is
            total[b, :seen].add_(phases[0] if len(phases) == 1 else phases.sum(0, dtype=torch.float32))

    def key_tensors(b: int, seen: int, copies: int) -> dict[str, Tensor]:
        k, v = (x[b : b + 1, :seen].expand(copies, -1, -1, -1) for x in (gradients.k, gradients.v))
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        return {"k": k, "v": v, "dk": dk, "dv": dv}

    def by_phase(x: Tensor, b: int) -> Tensor:
        *_, heads, dim = x.shape
        return x[b, :whole].view(-1, period, heads, dim).transpose(0, 1)

    for b in range(gradients.q.shape[0]):
        rows = {name: by_phase(getattr(gradients, name), b) for name in ("q", "o", "do", "dq")}
        lse, row_dots = (x[b, :, :whole].unflatten(1, (-1, period)).permute(2, 0, 1) for x in (gradients.lse, delta))
        gradients.dq[b, : max(0, keys.length - 1 - call.plan.first_row)].zero_()
        ranges = [(p, min(p + most, period - 1), entries - 1) for p in range(0, period - 1, most)]
        for start, stop, seen in [*ranges, (period - 1, period, entries)] if whole > 0 else []:
            first = max(0, periods - seen - call.plan.first_row // period)
            phases = {name: x[start:stop, first:] for name, x in rows.items()}
            phase_lse = lse[start:stop, :, first:].contiguous()
            part = Gradients(**phases, lse=phase_lse, **key_tensors(b, seen, stop - start))
            accumulate(part, row_dots[start:stop, :, first:], b, seen, causal=True)
        if whole < gradients.q.shape[1]:
            tail = {name: getattr(gradients, name)[b : b + 1, whole:] for name in ("q", "o", "do", "dq")}
            part = Gradients(**tail, lse=gradients.lse[b : b + 1, :, whole:], **key_tensors(b, entries, 1))
            accumulate(part, delta[b : b + 1, :, whole:], b, entries, causal=False)
    return dk, dv


def backward_selected(
    call: Call,
    gradients: Gradients,
    indices: Tensor,
    delta: Tensor,
    *,
    local: LocalSelected | None = None,
    terms: QueryTerms | None = None,
    window: WindowQueries | None = None,
) -> None:
    """Backward of attention to selected blocks.

    Args:
        delta: do . o, fp32 `[B,H,N]`.
        local: in token mode, the local blocks that `backward_window` does instead.
        terms: in token mode, what else dq is to hold.
        window: dq is to hold the window's, too.
    """
    q, k, v = gradients.q, gradients.k, gradients.v
    if call.plan.selected_backward == "kv_outer":
        kv_outer_backward(
            q,
            k,
            v,
            indices,
            gradients.do,
            gradients.lse,
            delta,
            into=(gradients.dq, gradients.dk, gradients.dv),
            local=0 if local is None else local.local,
            first_token=call.plan.first_row,
            terms=terms,
            window=window,
            **token_mode_options(call),
        )
        return
    size = call.config.select_size
    bits = tile_bits(indices, size=size, num_keys=k.shape[1], entries=False, documents=call.documents)
    if call.plan.selected_backward == "split":
        _selected_without_atomics(call, gradients, indices, bits, delta, size=size, entries=False)
        return
    _, shifts = _visibility(call, entries=False)
    for part in list_chunks(
        call, gradients, bits, size=size, width=call.plan.rules.backward_width(size), entries=False
    ):
        where = {"first_row": part.first_row, "first_key": part.first_key, "first_token": call.plan.first_row}
        fa4.selected_backward(
            part.gradients, part.lists, causal=call.config.causal, scale=call.scale, shifts=shifts, **where
        )


def _selected_without_atomics(
    call: Call, gradients: Gradients, indices: Tensor, bits: Tensor, delta: Tensor, *, size: int, entries: bool
) -> None:
    """Backward of attention to selected blocks of tokens or of compressed entries, in a fixed order.

    Args:
        bits: from `tile_bits`.
        size: keys of a block.
    """
    q, k = gradients.q, gradients.k
    keys, shifts = _visibility(call, entries=entries)
    selected_backward(
        q,
        k,
        gradients.v,
        gradients.do,
        gradients.lse,
        delta,
        selected_lists(call, q, k, indices, call.plan.first_row, entries=entries, width=TILE),
        bits,
        size=size,
        keys=keys,
        scale=call.scale,
        into=(gradients.dq, gradients.dk, gradients.dv),
        first_token=call.plan.first_row,
        shifts=shifts,
    )


def _visibility(call: Call, *, entries: bool) -> tuple[Keys, Tensor | None]:
    """Keys that a row sees, entries or tokens, and what packed documents add to the rows of each tile before that."""
    keys = call.entry if entries else call.token
    if call.documents is None:
        return keys, None
    return keys, call.documents.shifts if entries else call.documents.key_shifts


def backward_window(
    call: Call,
    gradients: Gradients,
    delta: Tensor,
    *,
    first_key: int = 0,
    local: LocalSelected | None = None,
    keys_alone: bool = False,
) -> None:
    """Backward of attention to the sliding window.

    Args:
        gradients: keys are those from `first_key` on.
        delta: do . o, fp32 `[B,H,N]`.
        first_key: from `first_key_of_windows`.
        local: local blocks of the selected branch, whose gradients are added here.
        keys_alone: leave dq to `backward_selected`.
    """
    left, right = window_reach(call.config.window_size, call.config.causal, first_key + gradients.k.shape[1])
    if call.plan.window_backward == "split":
        window_backward(
            gradients.q,
            gradients.k,
            gradients.v,
            gradients.do,
            gradients.lse,
            delta,
            left=left,
            scale=call.scale,
            into=(None if keys_alone else gradients.dq, gradients.dk, gradients.dv),
            first_token=call.plan.first_row - first_key,
            local_selected=local,
        )
        return
    documents = None if call.documents is None else call.documents.varlen
    fa4.window_backward(
        gradients, left=left, right=right, scale=call.scale, documents=documents, deterministic=call.plan.deterministic
    )


def first_key_of_windows(call: Call, keys: int, local: LocalSelected | None) -> int:
    """A key before which none is in the window of a row, nor in one of its local blocks: these begin at tiles."""
    left, _ = window_reach(call.config.window_size, call.config.causal, keys)
    first_key = max(0, call.plan.first_row - left)
    if call.plan.window_backward == "split":
        tile = TILE if local is None else local.size
        first_key = first_key // tile * tile
    return first_key


def local_selected(call: Call, gated: GateResults) -> LocalSelected | None:
    """Token mode: the local blocks of the selected branch, if the window's backward takes them along."""
    if not call.plan.local_with_window:
        return None
    return LocalSelected(gated.lse[1], gated.delta[1], call.config.select_size, call.config.num_local_blocks)


class ListChunk(NamedTuple):
    """One call of a backward over block lists."""

    gradients: Gradients
    lists: BlockLists
    first_row: int = 0
    first_key: int = 0


def list_chunks(
    call: Call, gradients: Gradients, bits: Tensor, *, size: int, width: int, entries: bool
) -> Iterator[ListChunk]:
    """The calls of a backward whose lists fit LIST_BYTES: one call, or one for each key/value head and range of blocks.

    Between the ranges of a head, dq is summed in fp32.

    Args:
        bits: from `tile_bits`.
        size, width: keys of a selected and of a listed block.
        entries: keys are compressed entries, not tokens; only tokens are divided by blocks, where one head is too much.
    """
    q, k = gradients.q, gradients.k
    batch, num_rows, heads, _ = q.shape
    num_keys, kv_heads = k.shape[1:3]
    tiles, blocks = -(-num_rows // call.plan.tile), -(-num_keys // width)
    keys, shifts = _visibility(call, entries=entries)

    def lists(bits: Tensor, q_heads: int, block_range: range, first_tile: int = 0) -> BlockLists:
        return transposed_lists(
            bits,
            q_heads,
            keys,
            size=size,
            width=width,
            rows=call.plan.tile,
            num_keys=num_keys,
            num_rows=num_rows,
            blocks=block_range,
            first_tile=first_tile,
            first_row=call.plan.first_row,
            shifts=shifts,
        )

    if list_bytes(batch * heads, blocks, tiles) <= LIST_BYTES:
        yield ListChunk(gradients, lists(bits, heads, range(blocks)))
        return
    group, select_group = heads // kv_heads, bits.shape[1] // kv_heads
    most = blocks if entries else max(1, LIST_BYTES // list_bytes(group, 1, tiles))
    for b in range(batch):
        for h in range(kv_heads):
            q_slice = (slice(b, b + 1), slice(None), slice(h * group, (h + 1) * group))
            k_slice = (slice(b, b + 1), slice(None), slice(h, h + 1))
            head_bits = bits[b : b + 1, h * select_group : (h + 1) * select_group]
            head = replace(
                gradients,
                **{name: getattr(gradients, name)[q_slice] for name in ("q", "o", "do", "dq")},
                **{name: getattr(gradients, name)[k_slice] for name in ("k", "v", "dk", "dv")},
                lse=gradients.lse[q_slice[0], q_slice[2]],
            )
            if most >= blocks:
                yield ListChunk(head, lists(head_bits, group, range(blocks)))
                continue
            total = torch.zeros_like(head.dq, dtype=torch.float32)
            for start in range(0, blocks, most):
                block_range = range(start, min(start + most, blocks))
                first_key = start * width
                # With causality rows before the first key see nothing
                in_order = keys.causal and shifts is None
                first_tile = max(0, first_key - call.plan.first_row) // call.plan.tile if in_order else 0
                first_row = first_tile * call.plan.tile
                key_slice = slice(first_key, min(block_range.stop * width, num_keys))
                dq = torch.empty_like(head.dq[:, first_row:])
                part = replace(
                    head,
                    **{name: getattr(head, name)[:, first_row:] for name in ("q", "o", "do")},
                    **{name: getattr(head, name)[:, key_slice] for name in ("k", "v", "dk", "dv")},
                    lse=head.lse[..., first_row:],
                    dq=dq,
                )
                yield ListChunk(part, lists(head_bits, group, block_range, first_tile), first_row, first_key)
                total[:, first_row:] += dq
            head.dq.copy_(total)


# Sums over the branches, and pooling


def _sum_keys(chunk: Call, dkv: dict[str, tuple[Tensor, Tensor]], kv_heads: slice, results: _Results) -> None:
    """Gradients of k and v, and of keys that a branch had of its own. Args: `dkv`, dk and dv of each branch."""
    documents, keys = chunk.documents, chunk.entry

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
        parts = [dkv[branch]] if branch in dkv else []
        names = f"k_{branch}", f"v_{branch}"
        if names[0] in results.gradients:
            add_up(names, parts, None)
        else:
            shared += parts
    entries = None
    if chunk.inputs.k_cmp is None and results.entries[0].shape[1] > 0:
        entries = _backward_projection(chunk, [x[:, :, kv_heads] for x in results.entries], kv_heads, results)
    add_up(("k", "v"), shared, entries)


def _backward_projection(chunk: Call, entries: list[Tensor], kv_heads: slice, results: _Results) -> list[Tensor]:
    """Gradients of the pooled keys and values, and of the projections, from those of the compressed ones."""
    inputs, config = chunk.inputs, chunk.config
    weights = {"w_k_compress": inputs.w_k_compress, "w_v_compress": inputs.w_v_compress}
    if all(weight is None for weight in weights.values()):
        return entries
    length, stride = config.compress_block_size, config.stride
    pooled = block_means(inputs.k, inputs.v, length, stride, torch.float32, chunk.documents)
    for i, (name, weight) in enumerate(weights.items()):
        if weight is not None:
            results.gradients[name][kv_heads] = torch.einsum("bnhd,bnhe->hde", pooled[i], entries[i])
            entries[i] = torch.einsum("bnhe,hde->bnhd", entries[i], weight[kv_heads].float()).contiguous()
    return entries
