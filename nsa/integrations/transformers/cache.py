"""Caches of converted models: layers of transformers' Cache over NSACaches that share one PageTable.

A fresh DynamicCache or StaticCache, from `generate` or a user, is taken over: its layers become CacheLayers. A step
of the table is one forward of the model, opened there.

A static cache that holds a prompt takes steps of one token in torch.compile, too, as one graph: what changes from step
to step is on the device, at one place.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin

from nsa.common.autocast import autocast_dtype, autocast_off
from nsa.common.derivatives import to_be_changed
from nsa.common.one_thread import OneThread, in_one_thread
from nsa.config import NSAConfig
from nsa.decoding.api import nsa_with_cache
from nsa.decoding.cache import NSACache
from nsa.decoding.table import PageTable
from nsa.inputs import NSAInputs
from nsa.integrations.transformers.interface import attend

PAGE_SIZE = 64
ROOM = 256
"""Tokens for which a dynamic cache has room beside the prompt; then it grows by half."""


@dataclass(frozen=True)
class CachedStep:
    """New columns of a batch in a forward of the model."""

    mask: Tensor | None
    """Padding among all columns up to the new ones, bool; None: there is none."""
    real: Tensor | None
    """Which new columns are tokens, bool `[B,N_q]`; None: all."""
    first: bool
    """The sequences were empty before."""


class CachedSequences:
    """The pages of all layers for a batch of sequences, and how many columns of input these have had.

    Columns count padding, as transformers does; the table's lengths do not.

    Args:
        config: options of NSA.
        max_tokens: most columns, of a static cache. Default: None, which means that it grows.
    """

    def __init__(self, config: NSAConfig, max_tokens: int | None = None) -> None:
        self.config, self.max_tokens = config, max_tokens
        self._columns: int | None = 0
        """None: compiled steps have counted on the device alone."""
        self._device_columns: Tensor | None = None
        """Those of a static cache, 0-d, from the first step on."""
        self._skipped: Tensor | None = None
        """Sequences in which a step of one token left its token out, bool `[B]`, from the first step on."""
        self.begun = False
        """There have been steps since the last reset."""
        self.ends_padded = False
        """Some sequences end in padding, so that nothing can follow."""
        self._table: PageTable | None = None
        self.caches: dict[int, NSACache] = {}
        self._step: CachedStep | None = None
        self.thread = OneThread()
        """Entered by steps, and by whatever changes the sequences."""

    @property
    def table(self) -> PageTable:
        """The table, which is there from the first step on."""
        if self._table is None:
            raise RuntimeError("this cache is empty: a step makes its table")
        return self._table

    @property
    def is_empty(self) -> bool:
        return self._table is None

    @property
    def columns(self) -> int:
        """On the host, which reads them from the device after compiled steps."""
        if self._columns is None:
            self._columns = int(self._device_columns)  # type: ignore[arg-type]
        return self._columns

    @property
    def length(self) -> int | Tensor:
        """Columns without reading them: 0-d on the device in torch.compile and after compiled steps."""
        known = not torch.compiler.is_compiling() and self._columns is not None
        return self.columns if known or self._device_columns is None else self._device_columns

    @contextmanager
    def step(self, batch: int, tokens: int, device: torch.device, mask: Tensor | None) -> Iterator[None]:
        """A forward of the model with new columns, in which each layer calls `attend` once.

        Args:
            mask: bool, True for tokens, which has been checked; `[B, columns + N_q]`, compiled `[B,max_tokens]`. None:
                there is no padding.

        Raises:
            ValueError: naming what does not fit the cache.
            RuntimeError: while another thread uses the cache.
        """
        with self.thread.alone():
            compiling = torch.compiler.is_compiling()
            if self.ends_padded:
                raise ValueError("attention_mask padded the cached texts to the right, so nothing can follow: pad left")
            if not compiling:
                if (
                    not self.begun and not self.is_empty and self.table.batch != batch
                ):  # reset, or its first step raised
                    self._table = self._skipped = self._device_columns = None
                    self.caches = {}
                self._make_room(self.columns + tokens, batch, device)
            if self.table.batch != batch:
                raise ValueError(f"input_ids must have the {self.table.batch} rows of the cache, got {batch}")
            if mask is not None and not compiling and (tokens > 1 or mask.device.type == "cpu"):
                self._check_earlier_columns(mask[:, :-tokens])
            if mask is None:
                real = None
            elif compiling:
                real = mask.index_select(1, self._device_columns.reshape(1).clamp(max=mask.shape[1] - 1))  # type: ignore[union-attr]
            else:
                real = mask[:, -tokens:]
                if tokens > 1 and bool(real.all()):
                    real = None
            counts = None if real is None else real.sum(1).to(torch.int32)
            self._step = CachedStep(mask, real, first=not self.begun)
            try:
                with self.table.step(tokens, counts):
                    yield
            finally:
                self._step = None
            self._columns = None if compiling else self.columns + tokens
            if self._device_columns is not None:
                self._device_columns += tokens
            if not self.begun:
                self._fix_places()
            self.begun = True
            if real is not None:
                left_out = (self.table.seqlens > 0) & ~real[
                    :, -1
                ]  # a text that has not begun is padded on its left so far
                if tokens > 1:
                    self.ends_padded = bool(left_out.any())
                else:
                    self._skipped |= left_out  # type: ignore[operator]

    def _check_earlier_columns(self, mask: Tensor) -> None:
        """Raise where a mask says other than it did when these columns came."""
        real = mask.sum(1)
        if bool((real != self.table.seqlens).any()):
            raise ValueError(
                f"attention_mask must have the cached texts' {self.table.seqlens.tolist()} tokens in its first "
                f"{mask.shape[1]} columns, as when they came, got {real.tolist()}"
            )

    def positions(self) -> Tensor:
        """Of the open step's new columns among each sequence's tokens, `[B,N_q]`: padding does not count."""
        real: Tensor | None = self._step.real  # type: ignore[union-attr]
        if real is None:
            return self.table.open.positions  # type: ignore[union-attr]
        return (self.table.seqlens.long()[:, None] + real.cumsum(1) - 1).clamp(min=0)

    def _make_room(self, total: int, batch: int, device: torch.device) -> None:
        if self.max_tokens is not None and total > self.max_tokens:
            raise ValueError(f"the static cache holds max_cache_len={self.max_tokens} tokens, got {total}")
        if self._table is None:
            self._table = PageTable.empty(batch, self.max_tokens or total + ROOM, page_size=PAGE_SIZE, device=device)
            with to_be_changed():
                self._skipped = torch.zeros(batch, dtype=torch.bool, device=device)
                if self.max_tokens is not None:
                    self._device_columns = torch.zeros((), dtype=torch.int64, device=device)
        if total > self._table.capacity:
            self._table.grow(max(total, self._table.capacity * 3 // 2))

    def _fix_places(self) -> None:
        """Let compiled steps know that a static cache's tensors stay where they are, as CUDA graphs need them to."""
        if self._device_columns is not None:
            for tensors in (cache.state_dict() for cache in self.caches.values()):
                for tensor in (self._device_columns, self._skipped, *tensors.values()):
                    torch._dynamo.mark_static_address(tensor)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """Append and attend, in a layer: out `[B,N_q,H,D_v]`.

        The prompt of empty sequences goes through `nsa` in token mode, whose rows are the same.
        """
        if self._step is None:
            raise RuntimeError("a cache is advanced by the converted model's forward, not by its layers")
        mask, real = self._step.mask, self._step.real
        cache = self._cache_of(layer, q, k, v)
        if self._step.first and self.config.token_mode and q.shape[1] > 1:
            out = attend(q, k, v, gates, self.config, None if real is None else mask, None)
            self._append(cache, *(_first_rows(x, real) for x in (k, v)))
            return out
        q, k, v, gates = (_first_rows(x, real) for x in (q, k, v, gates))
        return _rows_back(nsa_with_cache(q, k, v, cache, gates=gates), real)

    def _append(self, cache: NSACache, k: Tensor, v: Tensor) -> None:
        """Write new tokens without attending: what nsa_with_cache begins with, in PyTorch on any device."""
        step: Any = cache.table.open
        with torch.no_grad(), autocast_off(k.device.type):
            k, v = k.to(cache.dtype), v.to(cache.dtype)
            cache.append(NSAInputs(k[:, :0], k, v), self.config, step)
        step.done.append(cache)

    def _cache_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> NSACache:
        dtype = k.dtype if k.dtype == torch.float64 else autocast_dtype(k.device.type) or k.dtype
        if layer not in self.caches or (self._step.first and self.caches[layer].dtype != dtype):  # type: ignore[union-attr]
            if torch.is_grad_enabled() and k.requires_grad:
                raise RuntimeError("a cache has no gradient, and one is needed: call the model under torch.no_grad()")
            self.caches[layer] = NSACache(
                self.config,
                self.table,
                heads=q.shape[2],
                heads_kv=k.shape[2],
                dim=k.shape[3],
                dim_v=v.shape[3],
                dtype=dtype,
            )
        return self.caches[layer]

    # Between steps

    @in_one_thread
    def reorder(self, rows: Tensor) -> None:
        """Sequence b becomes what sequence rows[b] is; full pages are shared."""
        if self._skipped is not None:
            rows = rows.to(self.table.device)
            self.table.reorder(rows)
            self._skipped.copy_(self._skipped[rows])

    @in_one_thread
    def crop(self, columns: int) -> None:
        """Forget the last columns."""
        if self.is_empty or columns == 0:
            return
        if self.ends_padded or bool(self._skipped.any()):  # type: ignore[union-attr]
            raise ValueError("crop counts columns from the end, and in some sequences padding is among the last")
        self.table.truncate((self.table.seqlens - columns).clamp(min=0))
        self._set_columns(max(0, self.columns - columns))

    @in_one_thread
    def reset(self) -> None:
        """Forget all sequences; memory stays."""
        if self._skipped is not None:
            self.table.reset()
            self._skipped.zero_()
        self._set_columns(0)
        self.begun = self.ends_padded = False

    def _set_columns(self, columns: int) -> None:
        self._columns = columns
        if self._device_columns is not None:
            self._device_columns.fill_(columns)

    @in_one_thread
    def select(self, rows: Tensor) -> None:
        """Become a batch of other rows, copies of these: sequence b is what rows[b] was."""
        if not self.is_empty:
            with to_be_changed():
                self._select(rows.to(self.table.device).long())

    def _select(self, rows: Tensor) -> None:
        old = self.table
        self._skipped = self._skipped[rows]  # type: ignore[index]
        new = PageTable.empty(len(rows), old.capacity, page_size=old.page_size, device=old.device)
        source = old.block_table[rows]
        held = source >= 0
        pages = torch.arange(new.num_pages, dtype=torch.int32, device=old.device).reshape(source.shape)
        new.block_table.copy_(torch.where(held, pages, -1))
        new.seqlens.copy_(old.seqlens[rows])
        new.overflowed.copy_(old.overflowed[rows])
        new.page_uses.copy_(held.flatten())  # type: ignore[union-attr]
        taken = source.clamp(min=0).flatten().long()
        self._table, caches, self.caches = new, self.caches, {}
        for layer, cache in caches.items():
            sizes: Any = {name: getattr(cache, name) for name in ("heads", "heads_kv", "dim", "dim_v", "dtype")}
            copied = {name: x[taken] for name, x in cache.pages.items()}
            if cache.tile_sums is not None:
                copied["tile_sums"] = cache.tile_sums[rows]
            self.caches[layer] = NSACache(self.config, new, **sizes, pages=copied)
            if cache.sums_begin is not None:
                self.caches[layer].sums_begin.copy_(cache.sums_begin[rows])  # type: ignore[union-attr]
        self._fix_places()

    @in_one_thread
    def __deepcopy__(self, memo: dict[int, Any]) -> CachedSequences:
        made = copy.copy(self)
        made.caches, made.thread = dict(self.caches), OneThread()
        memo[id(self)] = made
        if self._device_columns is not None:
            with to_be_changed():
                made._device_columns = self._device_columns.clone()
        if not self.is_empty:
            made.select(torch.arange(self.table.batch))
        return made


def _first_rows(x: Tensor, real: Tensor | None) -> Tensor:
    """`[B,N_q,...]` with each sequence's real rows first."""
    if real is None or real.shape[1] == 1:
        return x
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def _rows_back(x: Tensor, real: Tensor | None) -> Tensor:
    """The inverse of `_first_rows`."""
    if real is None or real.shape[1] == 1:
        return x
    order = torch.argsort(torch.argsort((~real).to(torch.uint8), dim=1, stable=True), dim=1)
    return x[torch.arange(len(x), device=x.device)[:, None], order]


class CacheLayer(CacheLayerMixin):
    """One layer of a Cache, in the terms of transformers. What concerns all layers is done by the first.

    Args:
        sequences: shared by the layers of a model.
        index: the layer's.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, sequences: CachedSequences, index: int) -> None:
        super().__init__()
        self.sequences, self.index = sequences, index

    @property
    def is_compileable(self) -> bool:
        """For `generate`, which then compiles steps on a GPU."""
        return self.sequences.max_tokens is not None

    @property
    def is_croppable(self) -> bool:
        """In tile mode rows depend on the tile's queries, of which only the open one's are kept."""
        return self.sequences.config.token_mode

    @property
    def batch_size(self) -> int:
        return -1 if self.sequences.is_empty else self.sequences.table.batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """Append and attend: see CachedSequences.attend."""
        return self.sequences.attend(self.index, q, k, v, gates)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: a step allocates pages."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: keys lie in pages, and no attention of another kind may read them.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this cache holds pages for NSA: only a converted model's attention appends to it")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sequences.max_tokens or self.sequences.columns + query_length, 0

    def get_seq_length(self) -> int | Tensor:
        return self.sequences.length

    def get_max_length(self) -> int:
        return -1 if self.sequences.max_tokens is None else self.sequences.max_tokens

    def offload(self) -> None:
        raise NotImplementedError("pages of NSA's cache stay on their device: no offloading")

    prefetch = offload

    def reset(self) -> None:
        if self.index == 0:
            self.sequences.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.index == 0:
            self.sequences.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens.

        Raises:
            ValueError: for a positive number, which once meant a length.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be -n, to forget n tokens, got {tokens_to_remove}")
        if self.index == 0:
            self.sequences.crop(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0 and not self.sequences.is_empty:
            self.sequences.select(torch.arange(self.sequences.table.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.index == 0 and not self.sequences.is_empty:
            rows = torch.arange(self.sequences.table.batch, device=indices.device)
            self.sequences.select(rows[indices])


def takes_compiled_steps(cache: Any) -> bool:
    """Whether steps of one token may run in torch.compile: with a static cache that holds a prompt."""
    layer = cache.layers[0] if isinstance(cache, StaticCache) else None
    return isinstance(layer, CacheLayer) and layer.sequences.begun


def take_over(cache: Any, config: NSAConfig, layers: int) -> CachedSequences:
    """The sequences of a cache whose layers are CacheLayers, or become ones if it is fresh.

    Raises:
        ValueError: for a cache of another kind, with other options, or with tokens in it.
    """
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        kind = f"an offloaded {type(cache).__name__}" if getattr(cache, "offloading", False) else type(cache).__name__
        raise ValueError(f"cache must be a DynamicCache or a StaticCache that is not offloaded, got {kind}")
    if not _own_layers(cache):
        with _TAKING_OVER:
            if not _own_layers(cache):
                _make_own(cache, config, layers)
    own = _own_layers(cache)
    if own[0].sequences.config != config or len(own) != layers:
        raise ValueError("cache was filled by a model with other options of NSA or another number of layers")
    return own[0].sequences


_TAKING_OVER = threading.Lock()
"""Two threads that begin with one fresh cache take it over once; then its sequences belong to one of them at a time."""


def _own_layers(cache: Any) -> list[CacheLayer]:
    return [layer for layer in cache.layers if isinstance(layer, CacheLayer)]


def _make_own(cache: Any, config: NSAConfig, layers: int) -> None:
    if int(cache.get_seq_length()) != 0:
        raise ValueError(f"cache holds {int(cache.get_seq_length())} tokens of another attention: begin with a new one")
    max_tokens = cache.layers[0].max_cache_len if type(cache) is StaticCache else None
    sequences = CachedSequences(config, max_tokens)
    cache.layers = [CacheLayer(sequences, index) for index in range(layers)]
    cache.layer_class_to_replicate = None
