"""NSA of a rank's queries over all keys: gather keys and values, attend range by range, return shares of gradients.

    attend            forward, by passes of key/value heads:  gather -> NSA with q_start for each range of tokens
    attend_backward   backward, by the same passes:           gather again -> gradients -> sum of shares over ranks
    ShardedNSA        both as an autograd.Function

While a pass is computed, the keys of the next one are gathered. Gradients of keys, values and given entries are fp32
(fp64 for fp64) in every range, are summed over ranges and then over ranks, and are rounded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dispatch.registry import ENVIRONMENT_VARIABLE
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward
from nsa.config import NSAConfig
from nsa.distributed.comm import Comm
from nsa.distributed.layout import Layout, Piece, Range
from nsa.inputs import ENTRY_NAMES, KEY_NAMES, QUERY_NAMES, NSAInputs
from nsa.operators import NSACall, resolve

PASS_BYTES = 1 << 30
"""Limit for the gathered keys of a pass and their shares of gradients, if it has more than one key/value head."""

QUERY_HEADS = ("q", "gates", "gate_proj_weight")
"""Tensors with q's heads; all others have k's."""

WEIGHT_NAMES = ("w_k_compress", "w_v_compress", "gate_proj_weight")
"""Tensors replicated on every rank. Their gradients are the rank's share."""

WORD = torch.complex128
"""Widest dtype that PyTorch can copy."""

CHECKED_CALLS = 1024
"""Maximum number of calls cached as checked."""

NAMES = ("q", *KEY_NAMES, *ENTRY_NAMES, *WEIGHT_NAMES, "gates")
"""Tensor arguments of ShardedNSA, in order."""


@dataclass(frozen=True)
class RowRange:
    """A range of a rank's tokens: the query rows of one call of NSA."""

    rows: slice
    """Rows of the shard."""
    keys: slice
    """Tokens of the sequence, or of the documents that overlap the range, up to the last query."""
    entries: slice
    """Compressed entries of these tokens."""
    documents: Mapping[str, Any]
    """q_start, and for packs cu_seqlens and cu_seqlens_k."""

    def key_rows(self, name: str) -> slice:
        """Rows of a gathered tensor that the call reads."""
        return self.entries if name in ENTRY_NAMES else self.keys


def make_row_ranges(
    layout: Layout, rank: int, config: NSAConfig, packed: bool, device: torch.device
) -> tuple[RowRange, ...]:
    """The calls of a rank. Rows after the last document are in none."""
    ranges = []
    row = 0
    for start, stop in layout.ranges[rank]:
        pieces = layout.pieces((start, stop))
        rows = slice(row, row := row + stop - start)
        if not pieces:
            continue
        keys, entries = (slice(*seen) for seen in rows_seen(layout, config, pieces))
        if not packed:
            ranges.append(RowRange(rows, keys, entries, {"q_start": pieces[0].start}))
            continue
        queries, bounds = [0], [0]
        for piece in pieces:
            queries.append(queries[-1] + piece.stop - piece.start)
            bounds.append(bounds[-1] + piece.stop)
        # Documents between the first and the last are complete, so their keys are contiguous
        tensors = [
            torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, bounds, [p.start for p in pieces])
        ]
        ranges.append(
            RowRange(rows, keys, entries, dict(zip(("cu_seqlens", "cu_seqlens_k", "q_start"), tensors, strict=True)))
        )
    return tuple(ranges)


own_row_ranges = lru_cache(256)(make_row_ranges)
"""Cached for the layers of a model and their backwards, with tensors of documents on the device."""


def rows_seen(layout: Layout, config: NSAConfig, pieces: Sequence[Piece]) -> tuple[Range, Range]:
    """Ranges of keys and of entries visible to queries, which are given as consecutive pieces of documents."""
    first, last, before = pieces[0], pieces[-1], layout.first_entries(config)
    entries = before[first.document], before[last.document] + config.num_compressed(last.stop)
    return (first.first, last.first + last.stop), entries


@lru_cache(256)
def seen_by_ranks(layout: Layout, config: NSAConfig, entries: bool) -> list[list[Range]]:
    """Keys, or entries, visible to the queries of each rank, as one range, or none for a rank without any."""
    ranges = []
    for own in layout.ranges:
        seen = [rows_seen(layout, config, pieces)[entries] for tokens in own if (pieces := layout.pieces(tokens))]
        ranges.append([_hull(seen)] if seen else [])
    return ranges


@dataclass(frozen=True)
class Plan:
    """Execution plan of a call, equal on all ranks except for their ranges of rows."""

    comm: Comm
    layout: Layout
    config: NSAConfig
    packed: bool
    kv_heads: int
    group_size: int
    per_pass: int
    """Key/value heads per pass."""
    flags: tuple[tuple[str, Any], ...]
    """deterministic, recompute, backend and max_seqlen."""

    @property
    def passes(self) -> list[slice]:
        """Ranges of key/value heads."""
        starts = range(0, self.kv_heads, self.per_pass)
        return [slice(start, min(start + self.per_pass, self.kv_heads)) for start in starts]

    def heads_of(self, name: str, kv_heads: slice) -> slice:
        """The heads of a tensor that belong to the given key/value heads."""
        group = self.group_size if name in QUERY_HEADS else 1
        return slice(kv_heads.start * group, kv_heads.stop * group)

    def row_ranges(self, device: torch.device) -> tuple[RowRange, ...]:
        return own_row_ranges(self.layout, self.comm.rank, self.config, self.packed, device)

    def zero_unused(self, x: Tensor) -> Tensor:
        """Zero the rows of x that are in no range: this rank's tokens after the last document."""
        used = max((row_range.rows.stop for row_range in self.row_ranges(x.device)), default=0)
        x[..., used:, :, :] = 0
        return x

    def held(self, name: str) -> list[list[Range]]:
        """Rows of a gathered tensor held by each rank."""
        return self.layout.entries(self.config) if name in ENTRY_NAMES else self.layout.ranges

    def seen(self, name: str) -> list[list[Range]]:
        """Rows of a gathered tensor visible to the queries of each rank."""
        return seen_by_ranks(self.layout, self.config, name in ENTRY_NAMES)

    def total(self, name: str) -> int:
        """Number of rows of a gathered tensor on all ranks."""
        return self.layout.first_entries(self.config)[-1] if name in ENTRY_NAMES else self.layout.tokens

    def call(
        self,
        tensors: Mapping[str, Tensor],
        keys: Mapping[str, Tensor],
        heads: slice,
        row_range: RowRange,
        *,
        needs_grad: bool,
    ) -> NSACall:
        """The checked call of a range, for some heads.

        Args:
            tensors: this rank's tensors by name.
            keys: gathered keys, values and entries of these heads.
        """
        own: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if name in QUERY_NAMES:
                own[name] = tensor[..., row_range.rows, self.heads_of(name, heads), :]
            elif name in WEIGHT_NAMES:
                own[name] = tensor[self.heads_of(name, heads)]
        for name, tensor in keys.items():
            own[name] = tensor[..., row_range.key_rows(name), :, :]
        flags = dict(self.flags)
        inputs = NSAInputs(**own, **row_range.documents, max_seqlen=flags.pop("max_seqlen"))
        return resolve(inputs, self.config, **flags, needs_grad=needs_grad)


def heads_per_pass(kv_heads: int, rows: int, row_bytes: int) -> int:
    """Number of key/value heads per pass.

    Args:
        rows: number of rows on all ranks, times the batch size.
        row_bytes: bytes per row and head in gathered keys and shares.
    """
    return max(1, min(kv_heads, PASS_BYTES // max(1, rows * row_bytes)))


# Passes


def gathered_keys(plan: Plan, tensors: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield the heads of each pass and their keys, values and entries of all ranks, while gathering those of the next
    pass.

    Lists are emptied as they are read, so that no reference keeps keys or receive buffers alive.
    """
    under_way = [start_gathers(plan, tensors, plan.passes[0])]
    for heads, following in zip_longest(plan.passes, plan.passes[1:]):
        arrived = [under_way.pop()()]  # before the next pass's keys are allocated
        if following is not None:
            under_way.append(start_gathers(plan, tensors, following))
        yield heads, arrived.pop()


def start_gathers(plan: Plan, tensors: Mapping[str, Tensor], heads: slice) -> Callable[[], dict[str, Tensor]]:
    """Start gathering some heads of keys and values in one message, and of entries in another."""
    waiting = []
    for group in (KEY_NAMES, ENTRY_NAMES):
        names = [name for name in group if name in tensors]
        if not names:
            continue
        rows = [tensors[name][..., heads, :].movedim(-3, 0) for name in names]
        dims = [x.shape[-1] for x in rows]
        message = rows[0].new_empty((*rows[0].shape[:-1], sum(dims)))
        for part, x in zip(message.split(dims, -1), rows, strict=True):
            copy_rows(part, x)
        waiting.append((names, dims, plan.comm.start_gather(message, plan.held(names[0]))))

    def finish() -> dict[str, Tensor]:
        keys: dict[str, Tensor] = {}
        for names, dims, wait in waiting:
            pieces = wait()
            # Copy whole rows, at memory bandwidth; keys and values are views of them
            rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            keys.update(zip(names, rows.movedim(0, -3).split(dims, -1), strict=True))
        return keys

    return finish


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copy between strided tensors of one dtype, 16 bytes at a time if the rows of both are made of such words."""
    if _consists_of_words(target) and _consists_of_words(source):
        target, source = target.view(WORD), source.view(WORD)
    target.copy_(source)


def _consists_of_words(x: Tensor) -> bool:
    counts = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    places = (x.data_ptr(), *(count * x.element_size() for count in counts))
    return x.stride(-1) == 1 and all(place % WORD.itemsize == 0 for place in places)


def attend(plan: Plan, tensors: Mapping[str, Tensor], *, saving: bool) -> tuple[Tensor, list[list[Tensor]]]:
    """Return out of this rank's queries and, with `saving`, the tensors for backward of each pass and range."""
    q, v = tensors["q"], tensors["v"]
    out = plan.zero_unused(q.new_empty((*q.shape[:-1], v.shape[-1])))
    saved = []
    for heads, keys in gathered_keys(plan, tensors):
        for row_range in plan.row_ranges(q.device):
            result, kept = _attend_range(plan.call(tensors, keys, heads, row_range, needs_grad=saving), saving)
            copy_rows(out[..., row_range.rows, plan.heads_of("q", heads), :], result)
            del result  # free it before the next range
            saved.append(kept)
        del keys
    return out, saved


def _attend_range(call: NSACall, saving: bool) -> tuple[Tensor, list[Tensor]]:
    return call.saving() if saving else (call.forward(), [])


def attend_backward(
    plan: Plan, tensors: Mapping[str, Tensor], saved: list[list[Tensor]], do: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of this rank's tensors, by name."""
    wide = torch.promote_types(do.dtype, torch.float32)
    gradients = {}
    for name, x in tensors.items():
        if name in WEIGHT_NAMES:
            gradients[name] = torch.zeros(x.shape, dtype=wide, device=x.device)
        else:
            empty = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            gradients[name] = plan.zero_unused(empty) if name in QUERY_NAMES else empty
    remaining = iter(saved)
    for heads, keys in gathered_keys(plan, tensors):
        shares: dict[str, Share] = {}
        for row_range in plan.row_ranges(do.device):
            own_do = do[..., row_range.rows, plan.heads_of("q", heads), :]
            call = plan.call(tensors, keys, heads, row_range, needs_grad=True)
            found = call.gradients_by_name(own_do, next(remaining), share_dtype=wide)
            del call
            _add_gradients(plan, row_range, heads, found, gradients, shares)
        names = list(keys)
        del keys
        for name in names:
            own = gradients[name][..., heads, :].movedim(-3, 0)
            share = shares.pop(name).gradient.movedim(-3, 0) if name in shares else own[:0].to(wide)
            own.copy_(plan.comm.add_shares(share, plan.held(name), plan.seen(name)))
            del share  # free it before the next message
    return {name: gradient.to(tensors[name].dtype) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class Share:
    """A rank's gradient of some rows of a gathered tensor, in fp32 or fp64."""

    rows: Range
    gradient: Tensor
    """`[...,rows,heads,D]`."""

    def plus(self, other: Share) -> Share:
        """Return the sum, accumulated in place if one has all rows of the other."""
        rows = _hull([self.rows, other.rows])
        for total, added in ((self, other), (other, self)):
            if total.rows == rows:
                total.part(added.rows).add_(added.gradient)
                return total
        shape = (*self.gradient.shape[:-3], rows[1] - rows[0], *self.gradient.shape[-2:])
        total = Share(rows, self.gradient.new_zeros(shape))
        for added in (self, other):
            total.part(added.rows).add_(added.gradient)
        return total

    def part(self, rows: Range) -> Tensor:
        """The gradient of a subset of these rows."""
        return self.gradient[..., rows[0] - self.rows[0] : rows[1] - self.rows[0], :, :]


def _range_of(rows: slice) -> Range:
    return rows.start, rows.stop


def _hull(ranges: Sequence[Range]) -> Range:
    """The smallest range that contains all of these."""
    return min(start for start, _ in ranges), max(stop for _, stop in ranges)


def _add_gradients(
    plan: Plan,
    row_range: RowRange,
    heads: slice,
    found: dict[str, Tensor],
    gradients: Mapping[str, Tensor],
    shares: dict[str, Share],
) -> None:
    """Add the gradients of a range and some heads to the totals, freeing each as it is added."""
    for name in gradients:
        gradient = found.pop(name)
        if name in QUERY_NAMES:
            copy_rows(gradients[name][..., row_range.rows, plan.heads_of(name, heads), :], gradient)
        elif name in WEIGHT_NAMES:
            gradients[name][plan.heads_of(name, heads)] += gradient
        else:
            share = Share(_range_of(row_range.key_rows(name)), gradient)
            shares[name] = shares[name].plus(share) if name in shares else share
        del gradient


class ShardedNSA(torch.autograd.Function):
    """One call. Tensors are separate arguments so that autograd tracks them."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> Tensor:
        given = {name: x for name, x in zip(NAMES, tensors, strict=True) if x is not None}
        with autocast_off(given["q"].device.type):
            out, saved = attend(plan, given, saving=True)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.call, ctx.counts = plan, plan.comm.call, [len(kept) for kept in saved]
        ctx.save_for_backward(*tensors, *(x for kept in saved for x in kept))
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)  # read once, as checkpointing requires
        given = {name: x for name in NAMES if (x := next(kept)) is not None}
        if do is None:  # on this rank only: others may be waiting for its share
            q = given["q"]
            do = q.new_zeros((*q.shape[:-1], given["v"].shape[-1]))
        saved = [[next(kept) for _ in range(count)] for count in ctx.counts]
        ctx.plan.comm.agree_on_backward(ctx.call)
        with torch.no_grad(), autocast_off(do.device.type):
            by_name = attend_backward(ctx.plan, given, saved, do)
        needed = ctx.needs_input_grad[1:]
        results = [by_name.get(name) if needs else None for name, needs in zip(NAMES, needed, strict=True)]
        return (None, *forbid_double_backward("ContextParallel.nsa", results, do, *given.values()))


# Checks before any communication


def check_calls(plan: Plan, tensors: Mapping[str, Tensor], *, needs_grad: bool) -> None:
    """Check the calls of all ranks and find their backends, so that a call raises on every rank or on none.

    Args:
        tensors: this rank's tensors; those of other ranks differ in rows only.
    """
    facts = tuple((name, _without_rows(name, x), x.dtype, x.device) for name, x in tensors.items())
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    key = (plan.layout, plan.config, plan.packed, plan.per_pass, plan.flags, named, facts, needs_grad)
    if key in plan.comm.checked:
        return
    for rank in range(plan.comm.size):
        for heads in (plan.passes[0], plan.passes[-1]):  # all others have the size of the first
            own, keys = {}, {}
            for name, x in tensors.items():
                if name in QUERY_NAMES:
                    own[name] = _stand_in(x, plan.layout.lengths[rank], x.shape[-2])
                elif name in WEIGHT_NAMES:
                    own[name] = x
                else:
                    keys[name] = _stand_in(x, plan.total(name), heads.stop - heads.start)
            for row_range in make_row_ranges(plan.layout, rank, plan.config, plan.packed, tensors["q"].device):
                plan.call(own, keys, heads, row_range, needs_grad=needs_grad)
    if len(plan.comm.checked) >= CHECKED_CALLS:
        plan.comm.checked.clear()
    plan.comm.checked.add(key)


def _without_rows(name: str, x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) if name in WEIGHT_NAMES else (*x.shape[:-3], *x.shape[-2:])


def _stand_in(x: Tensor, rows: int, heads: int) -> Tensor:
    """Expanded zeros (one element of memory) like a tensor `[...,rows,heads,D]`, with other rows and heads."""
    return x.new_zeros(()).expand(*x.shape[:-3], rows, heads, x.shape[-1])
