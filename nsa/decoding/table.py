"""PageTable: pages and lengths of a batch of sequences, shared by all layers of a model.

Lengths, pages, free pages and overflow flags are on the device; a step reads none of them on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import check_integer, check_sizes, is_readable, refuse_shallow_copy
from nsa.common.derivatives import as_to_be_changed, to_be_changed
from nsa.common.one_thread import OneThread, in_one_thread


class Layer(Protocol):
    """Interface of the caches that use a table."""

    def copy_pages(self, source: Tensor, target: Tensor, wanted: Tensor) -> None: ...

    def take_rows(self, rows: Tensor) -> None: ...

    def check_truncation(self, lengths: Tensor) -> None: ...

    def cut(self, lengths: Tensor) -> None: ...

    def grown(self, pages: int, capacity: int) -> Callable[[], None]: ...


class PageTable:
    """Pages and lengths of a batch of sequences, shared by the caches of all layers (see docs/decoding.md).

    Pages are allocated, and lengths advance, once per step. With one layer, `nsa_with_cache` is a step by itself; with
    more, wrap the calls of all layers in `with table.step(N_q):`.

    Args:
        block_table: int32 `[B,pages_per_sequence]`: the page of each `page_size` tokens of a sequence, or -1. Read and,
            unless `page_uses` is None, written in place.
        seqlens: int32 `[B]`, tokens of each sequence, on the same device. Read and written like `block_table`.
        page_size: tokens of a page.
        num_pages: pages of every layer.
        page_uses: int32 `[num_pages]`, number of sequences that hold each page; 0 if it is free. A sequence may hold
            pages ahead of its tokens, which no other holds; steps write these first. Default: None, for an engine that
            allocates pages and advances seqlens itself; steps then do neither.

    Raises:
        TypeError: naming an argument of the wrong type or dtype.
        ValueError: naming an argument of the wrong shape, device or value.

    Examples:
        >>> from nsa import PageTable
        >>> table = PageTable.empty(batch=2, max_tokens=1000, page_size=64)
        >>> table.num_pages, table.block_table.shape, table.seqlens
        (32, torch.Size([2, 16]), tensor([0, 0], dtype=torch.int32))
    """

    def __init__(
        self,
        block_table: Tensor,
        seqlens: Tensor,
        *,
        page_size: int,
        num_pages: int,
        page_uses: Tensor | None = None,
    ) -> None:
        check_sizes(page_size=page_size)
        for name, tensor, dims in (
            ("block_table", block_table, 2),
            ("seqlens", seqlens, 1),
            ("page_uses", page_uses, 1),
        ):
            if name == "page_uses" and tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {short_name(tensor.dtype)}")
            if tensor.dim() != dims:
                raise ValueError(f"{name} must have {dims} dims, got shape {list(tensor.shape)}")
            if tensor.device.type == "meta":
                raise ValueError(f"{name} must be on a device with values, since steps read them, got meta")
            if tensor.device != block_table.device:
                raise ValueError(f"{name} must be on block_table's device {block_table.device}, got {tensor.device}")
        if seqlens.shape[0] != block_table.shape[0]:
            wanted = f"block_table's B={block_table.shape[0]}"
            raise ValueError(f"seqlens must have the shape [B] with {wanted}, got {list(seqlens.shape)}")
        if page_uses is not None and page_uses.shape[0] != num_pages:
            raise ValueError(f"page_uses must have num_pages={num_pages} entries, got {page_uses.shape[0]}")
        check_integer("num_pages", num_pages, min(1, seqlens.shape[0]))
        if block_table.shape[1] == 0:
            raise ValueError(f"block_table must have pages_per_sequence >= 1, got shape {list(block_table.shape)}")
        self.block_table, self.seqlens, self.page_uses = block_table, seqlens, page_uses
        self.page_size, self.num_pages = page_size, num_pages
        with to_be_changed():
            self.overflowed = torch.zeros(seqlens.shape[0], dtype=torch.bool, device=seqlens.device)
        """Sequences that had no room for their tokens, bool `[B]`; sticky, see `check`."""
        self.open: Step | None = None
        """The step in progress."""
        self.thread = OneThread()
        """Entered by steps, by calls of layers, and by changes of the table."""
        self._layers: list[weakref.ref[Any]] = []
        self._is_new = False
        """True if the host knows that there are no tokens."""

    @classmethod
    def empty(
        cls,
        batch: int,
        max_tokens: int | None = None,
        *,
        pages: int | None = None,
        page_size: int = 64,
        device: torch.device | str | None = None,
    ) -> PageTable:
        """Create a table of empty sequences that allocates pages itself.

        Args:
            batch: B, sequences.
            max_tokens: maximum number of tokens of a sequence, rounded up to whole pages. Default: None, which means as
                many as all pages hold.
            pages: pages that the sequences share. Default: None, which means enough for `batch` sequences of
                `max_tokens`.
            page_size: tokens of a page. Kernels require a multiple of `compress_stride` and prefer one of
                `select_block_size`, too. Default: 64.
            device: device of all tensors. Default: None, which means the CPU.

        Returns:
            The table.

        Raises:
            TypeError: naming an argument of the wrong type.
            ValueError: naming an argument out of range.
        """
        check_sizes(page_size=page_size)
        if device is not None and torch.device(device).type == "meta":
            raise ValueError("device must have values, since steps read them, got meta")
        check_integer("batch", batch, 0)
        if max_tokens is None and pages is None:
            raise ValueError("max_tokens or pages must be given, got neither")
        if pages is not None:
            check_integer("pages", pages, 1)
        max_tokens = page_size * (pages or 1) if max_tokens is None else max_tokens
        check_integer("max_tokens", max_tokens, 1)
        columns = -(-max_tokens // page_size)
        count = batch * columns if pages is None else pages
        with to_be_changed():
            block_table = torch.full((batch, columns), -1, dtype=torch.int32, device=device)
            seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
            page_uses = torch.zeros(count, dtype=torch.int32, device=device)
        table = cls(block_table, seqlens, page_size=page_size, num_pages=count, page_uses=page_uses)
        table._is_new = True
        return table

    @property
    def batch(self) -> int:
        """B, number of sequences."""
        return self.block_table.shape[0]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.block_table.shape[1] * self.page_size

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.block_table.device

    def positions(self, num_tokens: int) -> Tensor:
        """Positions of the next tokens of each sequence, for rotary embeddings.

        Args:
            num_tokens: N_q, new tokens of each sequence.

        Returns:
            int64 `[B,N_q]`, counted from the first token of each sequence.

        Raises:
            TypeError, ValueError: unless num_tokens is an integer of at least 0.
        """
        check_integer("num_tokens", num_tokens, 0)
        return self.seqlens.long()[:, None] + torch.arange(num_tokens, device=self.device)

    def rows(self, positions: Tensor) -> Tensor:
        """Rows of tokens `[B,...]` in pages with the first two dims flattened: int64, -1 without a page."""
        columns = positions // self.page_size
        inside = (positions >= 0) & (columns < self.block_table.shape[1])
        columns = columns.clamp(0, self.block_table.shape[1] - 1)
        pages = self.block_table.long().gather(1, columns.flatten(1)).reshape(positions.shape)
        inside &= (pages >= 0) & (pages < self.num_pages)
        return torch.where(inside, pages * self.page_size + positions % self.page_size, -1)

    # Steps

    @contextmanager
    def step(self, num_tokens: int, counts: Tensor | None = None, *, debug: bool = False) -> Iterator[Step]:
        """Context of a step of all layers: allocates pages on entry and advances lengths on exit.

        A sequence without room overflows: nothing of it is written, its rows are NaN, its length does not change, and
        its flag stays set until `truncate`. An exception undoes the step.

        Each cache of the table must be called once, because its next results would otherwise read unwritten memory: a
        step that leaves one out raises RuntimeError at its end. An engine that advances seqlens must ensure this
        itself.

        Args:
            num_tokens: N_q, new tokens of each sequence.
            counts: int32 `[B]` on the device: number of real tokens among them, 0 to N_q, clamped on a GPU. Default:
                None, which means all.
            debug: raise on overflow, which synchronizes with the device. Default: False.

        Returns:
            A context manager, to be entered around the calls of all layers.

        Raises:
            RuntimeError: inside another step; while another thread uses the table; at its end, if caches were left out.
            TypeError, ValueError: naming an argument, its value and what was expected.
        """
        with self.thread.alone():
            if self.open is not None:
                raise RuntimeError("a step of this table is open: end it before starting another")
            check_integer("num_tokens", num_tokens, 1)
            if counts is not None:
                self._check_counts(counts, num_tokens, debug=debug)
            before = self.overflowed.clone()
            wanted = torch.full_like(self.seqlens, num_tokens) if counts is None else counts.clamp(0, num_tokens)
            give_back = self._reserve(wanted, num_tokens)
            try:
                wanted = torch.where(self.overflowed, 0, wanted)
                new = torch.arange(num_tokens, device=self.device) < wanted[:, None]
                self.open = Step(num_tokens, self.positions(num_tokens), new, wanted)
                yield self.open
                if self.page_uses is not None and len(self.open.done) != self.num_layers:
                    called = f"{len(self.open.done)} of {self.num_layers} caches of this table called"
                    raise RuntimeError(f"a step must call each layer once, got {called}")
                for commit in self.open.commits:
                    commit()
            except BaseException:
                self.overflowed.copy_(before)
                give_back()
                raise
            else:
                if self.page_uses is not None:
                    self.seqlens += wanted
                    self._is_new = False
            finally:
                self.open = None

    def _check_counts(self, counts: Tensor, num_tokens: int, *, debug: bool) -> None:
        self._check_by_sequence("counts", counts, torch.int32)
        if is_readable(counts, wait=debug) and ((counts < 0) | (counts > num_tokens)).any():
            raise ValueError(f"counts must be from 0 to {num_tokens}, got {counts.tolist()}")

    def _check_by_sequence(self, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        """Raise unless a tensor is `[B]` on the device, of one of the dtypes."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(short_name, dtypes))
            raise TypeError(f"{name} must be {wanted}, got {short_name(tensor.dtype)}")
        if tensor.shape != (self.batch,) or tensor.device != self.device:
            where = f"the shape [B] = [{self.batch}] on {self.device}"
            raise ValueError(f"{name} must have {where}, got {list(tensor.shape)} on {tensor.device}")

    def _reserve(self, wanted: Tensor, num_tokens: int) -> Callable[[], None]:
        """Allocate pages for `wanted` more tokens of each sequence, at most num_tokens; flag sequences without room.

        Returns a function that frees these pages again.
        """
        size, columns = self.page_size, self.block_table.shape[1]
        after = self.seqlens.long() + wanted
        full = (wanted > 0) & (after > self.capacity)
        if self.page_uses is None:  # the engine has or has not allocated them
            absent = (self.block_table < 0) | (self.block_table >= self.num_pages)
            needed = torch.arange(columns, device=self.device) * size < after[:, None]
            self.overflowed |= full | ((wanted > 0) & (absent & needed).any(1))
            return lambda: None
        most = min(columns, (num_tokens - 1) // size + 2)  # pages that num_tokens tokens can touch
        touched = (self.seqlens.long() // size)[:, None] + torch.arange(most, device=self.device)
        inside = touched * size < after[:, None]
        touched = touched.clamp(max=columns - 1)
        missing = inside & (self.block_table.gather(1, touched) < 0) & ~(full | self.overflowed)[:, None]
        pages, granted = self._free_pages(missing)
        held = missing & granted[:, None]
        flags = full | ~granted
        # A clamped column may occur twice; only the first can be missing and is written
        taken = torch.where(held, pages, -1).to(torch.int32)
        # Allocate everything before writing: an error leaves all three unchanged
        self._count(pages, held, 1)
        self.overflowed |= flags
        self.block_table.scatter_reduce_(1, touched, taken, "amax", include_self=True)

        def give_back() -> None:
            emptied = torch.where(held, -1, self.num_pages).to(torch.int32)
            self.block_table.scatter_reduce_(1, touched, emptied, "amin", include_self=True)
            self._count(pages, held, -1)

        return give_back

    def _count(self, pages: Tensor, held: Tensor, by: int) -> None:
        """Add `by` to the uses of held pages."""
        self._uses.index_add_(0, pages.flatten(), held.flatten().to(torch.int32), alpha=by)

    def _free_pages(self, missing: Tensor) -> tuple[Tensor, Tensor]:
        """A free page for each True of `[B,n]`, and a mask of sequences that got all of theirs.

        Sequences are served in order; after the first that gets too few, sequences that need pages get none.
        """
        free = self._uses == 0
        order = torch.argsort(free, descending=True, stable=True)  # free pages first, by number
        needs = missing.sum(1)
        granted = (needs == 0) | (needs.cumsum(0) <= free.sum())
        number = (missing.flatten().cumsum(0) - 1).clamp(0, self.num_pages - 1).reshape(missing.shape)
        return order[number], granted

    # Sharing, cutting and clearing sequences

    @in_one_thread
    def reorder(self, rows: Tensor) -> None:
        """Replace sequence b by sequence rows[b] in all layers: for beams, or copies of a shared prefix.

        Full pages are shared, the page that a sequence writes next is copied, and reserved pages without tokens are
        freed. A sequence without a free page for its copy overflows and becomes empty.

        Args:
            rows: int32 or int64 `[B]` on the device.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
            RuntimeError: inside a step, or if an engine allocates pages.
        """
        self._change("reorder")
        self._check_by_sequence("rows", rows, torch.int32, torch.int64)
        if is_readable(rows) and ((rows < 0) | (rows >= self.batch)).any():
            raise ValueError(f"rows must be from 0 to {self.batch - 1}, got {rows.tolist()}")
        for tensor in (self.block_table, self.seqlens, self.overflowed):
            tensor.copy_(tensor[rows.long()])
        self._each(lambda layer: layer.take_rows(rows.long()))
        self._cut(self.seqlens)
        self._own_open_pages()

    @in_one_thread
    def truncate(self, lengths: int | Tensor) -> None:
        """Cut sequences to at most these lengths in all layers, free the pages after them and clear overflow flags.

        A sequence that is cut inside a shared page gets a copy of it, as in `reorder`.

        In tile mode, a length inside a tile must be in the open tile, whose queries the cache keeps; checking this
        reads the lengths on the host.

        Args:
            lengths: one for all sequences, or int32 or int64 `[B]` on the device. Shorter sequences and their flags do
                not change.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
            RuntimeError: inside a step, or if an engine allocates pages.
        """
        self._change("truncate")
        if isinstance(lengths, Tensor):
            self._check_by_sequence("lengths", lengths, torch.int32, torch.int64)
            if is_readable(lengths) and (lengths < 0).any():
                raise ValueError(f"lengths must be at least 0, got {lengths.tolist()}")
            cut = torch.minimum(lengths.clamp(min=0), self.seqlens).to(torch.int32)
        else:
            check_integer("lengths", lengths, 0)
            lengths = min(lengths, torch.iinfo(torch.int32).max)
            cut = self.seqlens.clamp(max=lengths)
        self._each(lambda layer: layer.check_truncation(cut))
        self.overflowed &= self.seqlens < lengths
        self._cut(cut)
        self._own_open_pages()

    def reset(self) -> None:
        """Clear all sequences: `truncate(0)`."""
        self.truncate(0)

    @in_one_thread
    def grow(self, max_tokens: int | None = None, *, pages: int | None = None) -> None:
        """Make room for longer sequences or more pages in all layers. Reallocates tensors, so capture CUDA graphs
        again.

        Args:
            max_tokens: maximum number of tokens of a sequence, at least the current one. Default: None, the current
                one.
            pages: pages of each layer, at least the current number. Default: None, which means enough for sequences of
                `max_tokens`, and at least the current number.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
            RuntimeError: inside a step, or if an engine allocates pages.
        """
        self._change("grow")
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, self.capacity)
        columns = self.block_table.shape[1] if max_tokens is None else -(-max_tokens // self.page_size)
        if pages is None:
            pages = max(self.num_pages, self.batch * columns)
        check_integer("pages", pages, self.num_pages)
        # Allocate everything before changing anything: memory may not suffice
        grown = longer(self.block_table, 1, columns, -1), longer(self._uses, 0, pages, 0)
        changes: list[Callable[[], None]] = []
        self._each(lambda layer: changes.append(layer.grown(pages, columns * self.page_size)))
        self.block_table, self.page_uses = grown
        self.num_pages = pages
        for change in changes:
            change()

    def check(self) -> None:
        """Raise if a sequence has overflowed; synchronizes with the device.

        Raises:
            RuntimeError: naming the sequences and the capacity.
        """
        rows = self.overflowed.nonzero().flatten().tolist()
        if rows:
            lengths = self.seqlens[self.overflowed].tolist()
            free = "" if self.page_uses is None else f", {int((self.page_uses == 0).sum())} of them free"
            raise RuntimeError(
                f"the cache has overflowed: sequences {rows} of {lengths} tokens had no room for their next ones "
                f"(at most {self.capacity} tokens a sequence; {self.num_pages} pages of {self.page_size}{free}). "
                "Their outputs since then are NaN; grow() it or truncate() it to valid lengths, and continue from there"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the table's tensors, to save them.

        Returns:
            Tensors by name; not copies.
        """
        names = ("block_table", "seqlens", "overflowed", "page_uses")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a saved table into this one.

        Args:
            state: the `state_dict` of a table of the same sizes.

        Raises:
            TypeError: naming a value that is not a tensor, before anything is copied.
            ValueError: naming a tensor that is missing, unknown, or of another shape or dtype, before anything is
                copied.
            RuntimeError: inside a step.
        """
        self.load(self.state_dict(), state)

    # Copies

    @in_one_thread
    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle: the tensors. Caches that are copied together join the copy themselves."""
        self._check_closed("a copy")
        return {**vars(self), "_layers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(as_to_be_changed(state))

    __copy__ = refuse_shallow_copy

    # Shared with the caches

    @in_one_thread
    def load(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy tensors by name into this table's or a cache's: see `load_state_dict`."""
        self._check_closed("load_state_dict")
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping of names to tensors, got {type(state).__name__}")
        if own.keys() != state.keys():
            raise ValueError(f"state must have the tensors {sorted(own)}, got {sorted(map(str, state))}")
        for name, tensor in own.items():
            given = state[name]
            if not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                wanted = f"{short_name(tensor.dtype)} {list(tensor.shape)}"
                raise ValueError(f"{name} must be {wanted}, got {short_name(given.dtype)} {list(given.shape)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._is_new = False

    def check_new_layer(self) -> None:
        """Raise if sequences have tokens that a new cache lacks; synchronizes with the device after the first step.

        An engine's lengths are not read, because it manages its own pages.
        """
        if self._is_new or self.page_uses is None or not is_readable(self.seqlens, wait=True):
            return
        if bool((self.seqlens > 0).any()):
            raise ValueError(
                "table must be empty for a cache that joins it without pages of its tokens, got "
                f"{self.seqlens.tolist()} tokens: make caches before the first step, reset the table, or give all pages"
            )

    @in_one_thread
    def add_layer(self, layer: Layer) -> None:
        """Register a cache for reorder, truncate and grow; it is referenced weakly."""
        self._layers.append(weakref.ref(layer))

    @property
    def num_layers(self) -> int:
        """Number of caches that use this table."""
        return sum(layer() is not None for layer in self._layers)

    def _each(self, change: Callable[[Any], None]) -> None:
        self._layers = [layer for layer in self._layers if layer() is not None]
        for layer in self._layers:
            change(layer())

    def _check_closed(self, what: str) -> None:
        if self.open is not None:
            raise RuntimeError(f"{what} must happen between steps, and a step of this table is open")

    def _change(self, what: str) -> None:
        self._check_closed(what)
        if self.page_uses is None:
            raise RuntimeError(
                f"{what} must be done by the engine: this table was made without page_uses, so it allocates nothing"
            )

    @property
    def _uses(self) -> Tensor:
        if self.page_uses is None:
            raise RuntimeError("this table was made without page_uses, so it allocates nothing")
        return self.page_uses

    def _cut(self, lengths: Tensor) -> None:
        """Shorten sequences, free the pages after them, and update the uses of the others."""
        self._each(lambda layer: layer.cut(lengths))
        self.seqlens.copy_(lengths)
        first_token = torch.arange(self.block_table.shape[1], device=self.device) * self.page_size
        self.block_table.masked_fill_(first_token >= lengths[:, None], -1)
        held = self.block_table.flatten()
        self._uses.zero_().index_add_(0, held.clamp(min=0).long(), (held >= 0).to(torch.int32))

    def _own_open_pages(self) -> None:
        """Copy the page that a sequence writes next if others hold it, too.

        A sequence without a free page is emptied and flagged, because others may overwrite the shared page.
        """
        column = (self.seqlens.long() // self.page_size).clamp(max=self.block_table.shape[1] - 1)[:, None]
        inside = self.seqlens % self.page_size > 0
        page = self.block_table.gather(1, column)[:, 0]
        inside &= page >= 0
        same = (page[:, None] == page) & inside[:, None] & inside
        first = ~same.tril(-1).any(1)
        only_open = same.sum(1) == self._uses[page.clamp(min=0).long()]  # no sequence holds it as a full page
        copied = inside & ~(first & only_open)
        pages, granted = self._free_pages(copied[:, None])
        lost = copied & ~granted
        copied &= granted
        self._count(pages, copied, 1)
        self._each(lambda layer: layer.copy_pages(page.clamp(min=0).long(), pages[:, 0], copied))
        self.block_table.scatter_(1, column, torch.where(copied, pages[:, 0].to(torch.int32), page)[:, None])
        self.overflowed |= lost
        self._cut(torch.where(lost, 0, self.seqlens))


@dataclass(frozen=True)
class Step:
    """A step in progress: tensors on the device for all layers."""

    num_tokens: int
    """N_q."""
    positions: Tensor
    """Token positions of q's rows, int64 `[B,N_q]`."""
    new: Tensor
    """Rows that are written, bool `[B,N_q]`: real tokens of sequences that have not overflowed."""
    counts: Tensor
    """Number of rows that are written, int32 `[B]`."""
    done: list[Layer] = field(default_factory=list)
    """Caches that were called in this step."""
    commits: list[Callable[[], None]] = field(default_factory=list)
    """Writes that cannot be undone if the step fails, deferred to its end."""
    kept: dict[Hashable, Any] = field(default_factory=dict)
    """Temporary memory that a backend reuses from layer to layer."""


def longer(x: Tensor, dim: int, length: int, fill: float) -> Tensor:
    """Pad x at the end of `dim`."""
    shape = [*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]]
    with to_be_changed():
        return torch.cat([x, x.new_full(shape, fill)], dim)
