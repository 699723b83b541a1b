"""Caches of converted models: layers of transformers' Cache over NSACaches that share one PageTable.

The layers of an empty DynamicCache or StaticCache, from `generate` or a user, become CacheLayers. The model's forward
opens a step of the table.

A static cache that holds a prompt also supports steps of one token in torch.compile, as one graph: all state that
changes between steps is on the device at fixed addresses.
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
"""Number of tokens for which a dynamic cache has room after the prompt; then it grows by half."""


@dataclass(frozen=True)
class CachedStep:
    """New columns of a batch in a forward of the model."""

    mask: Tensor | None
    """Mask of all columns up to the new ones, bool; None without padding."""
    real: Tensor | None
    """True for new columns that are tokens, bool `[B,N_q]`; None: all."""
    first: bool
    """True if the sequences were empty before."""


class CachedSequences:
    """The pages of all layers for a batch of sequences, and the number of input columns so far.

    Columns count padding, as transformers does; the table's lengths do not.

    Args:
        config: options of NSA.
        max_tokens: maximum number of columns of a static cache. Default: None, for a cache that grows.
    """

    def __init__(self, config: NSAConfig, max_tokens: int | None = None) -> None:
        self.config, self.max_tokens = config, max_tokens
        self._columns: int | None = 0
        """None after compiled steps, which count on the device only."""
        self._device_columns: Tensor | None = None
        """Number of columns of a static cache, 0-d, from the first step on."""
        self._skipped: Tensor | None = None
        """Sequences in which a step of one token skipped its token, bool `[B]`, from the first step on."""
        self.begun = False
        """True if there were steps since the last reset."""
        self.ends_padded = False
        """True if some sequences end in padding, so that no token can follow."""
        self._table: PageTable | None = None
        self.caches: dict[int, NSACache] = {}
        self._step: CachedStep | None = None
        self.thread = OneThread()
        """Entered by steps, and by changes of the sequences."""

    @property
    def table(self) -> PageTable:
        """The table, which exists from the first step on."""
        if self._table is None:
            raise RuntimeError("this cache is empty: a step makes its table")
        return self._table

    @property
    def is_empty(self) -> bool:
        return self._table is None

    @property
    def columns(self) -> int:
        """Number of columns on the host; reads it from the device after compiled steps."""
        if self._columns is None:
            self._columns = int(self._device_columns)  # type: ignore[arg-type]
        return self._columns

    @property
    def length(self) -> int | Tensor:
        """Number of columns without reading the device: a 0-d tensor in torch.compile and after compiled steps."""
        known = not torch.compiler.is_compiling() and self._columns is not None
        return self.columns if known or self._device_columns is None else self._device_columns

    @contextmanager
    def step(self, batch: int, tokens: int, device: torch.device, mask: Tensor | None) -> Iterator[None]:
        """Context of a forward of the model with new columns, in which each layer calls `attend` once.

        Args:
            mask: checked bool mask, True for tokens; `[B, columns + N_q]`, compiled `[B,max_tokens]`. None without
                padding.

        Raises:
            ValueError: naming an argument that does not fit the cache.
            RuntimeError: while another thread uses the cache.
        """
        with self.thread.alone():
            compiling = torch.compiler.is_compiling()
            if self.ends_padded:
                raise ValueError("attention_mask padded the cached texts to the right, so nothing can follow: pad left")
            if not compiling:
                if (
                    not self.begun and not self.is_empty and self.table.batch != batch
                ):  # was reset, or its first step raised
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
                ]  # a text without tokens yet has only left padding so far
                if tokens > 1:
                    self.ends_padded = bool(left_out.any())
                else:
                    self._skipped |= left_out  # type: ignore[operator]

    def _check_earlier_columns(self, mask: Tensor) -> None:
        """Raise if a mask differs from earlier calls in cached columns."""
        real = mask.sum(1)
        if bool((real != self.table.seqlens).any()):
            raise ValueError(
                f"attention_mask must have the cached texts' {self.table.seqlens.tolist()} tokens in its first "
                f"{mask.shape[1]} columns, as in earlier calls, got {real.tolist()}"
            )

    def positions(self) -> Tensor:
        """Positions of the open step's new columns among each sequence's tokens, `[B,N_q]`, not counting padding."""
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
        """Mark a static cache's tensors as having fixed addresses, which CUDA graphs of compiled steps require."""
        if self._device_columns is not None:
            for tensors in (cache.state_dict() for cache in self.caches.values()):
                for tensor in (self._device_columns, self._skipped, *tensors.values()):
                    torch._dynamo.mark_static_address(tensor)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """Append and attend in one layer; returns out `[B,N_q,H,D_v]`.

        In token mode the prompt of empty sequences runs through `nsa`, whose rows are the same.
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
        """Write new tokens without attending, in PyTorch on any device: the first part of nsa_with_cache."""
        step: Any = cache.table.open
        with torch.no_grad(), autocast_off(k.device.type):
            k, v = k.to(cache.dtype), v.to(cache.dtype)
            cache.append(NSAInputs(k[:, :0], k, v), self.config, step)
        step.done.append(cache)

    def _cache_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> NSACache:
        dtype = k.dtype if k.dtype == torch.float64 else autocast_dtype(k.device.type) or k.dtype
        if layer not in self.caches or (self._step.first and self.caches[layer].dtype != dtype):  # type: ignore[union-attr]
            if torch.is_grad_enabled() and k.requires_grad:
                raise RuntimeError("a cache does not support gradients: call the model under torch.no_grad()")
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
        """Replace sequence b by sequence rows[b]; full pages are shared."""
        if self._skipped is not None:
            rows = rows.to(self.table.device)
            self.table.reorder(rows)
            self._skipped.copy_(self._skipped[rows])

    @in_one_thread
    def crop(self, columns: int) -> None:
        """Remove the last columns."""
        if self.is_empty or columns == 0:
            return
        if self.ends_padded or bool(self._skipped.any()):  # type: ignore[union-attr]
            raise ValueError("crop counts columns from the end, and in some sequences padding is among the last")
        self.table.truncate((self.table.seqlens - columns).clamp(min=0))
        self._set_columns(max(0, self.columns - columns))

    @in_one_thread
    def reset(self) -> None:
        """Clear all sequences; memory stays allocated."""
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
        """Become a batch of other rows, which are copies: sequence b was rows[b]."""
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
    """Reorder `[B,N_q,...]` so that each sequence's real rows come first."""
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
    """One layer of a transformers Cache. The first layer handles operations on all layers.

    Args:
        sequences: shared by the layers of a model.
        index: index of the layer.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, sequences: CachedSequences, index: int) -> None:
        super().__init__()
        self.sequences, self.index = sequences, index

    @property
    def is_compileable(self) -> bool:
        """True to let `generate` compile steps on a GPU."""
        return self.sequences.max_tokens is not None

    @property
    def is_croppable(self) -> bool:
        """False in tile mode, where rows depend on the tile's queries and only those of the open tile are kept."""
        return self.sequences.config.token_mode

    @property
    def batch_size(self) -> int:
        return -1 if self.sequences.is_empty else self.sequences.table.batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """Append and attend: see CachedSequences.attend."""
        return self.sequences.attend(self.index, q, k, v, gates)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a step allocates pages."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not supported: keys are in pages, which other attention functions cannot read.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this cache holds pages for NSA: only a converted model's attention can append to it")

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
        """Remove the last -tokens_to_remove tokens.

        Raises:
            ValueError: for a positive number, which formerly meant a length.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be -n, to remove n tokens, got {tokens_to_remove}")
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
    """True if steps of one token may run in torch.compile: with a static cache that holds a prompt."""
    layer = cache.layers[0] if isinstance(cache, StaticCache) else None
    return isinstance(layer, CacheLayer) and layer.sequences.begun


def take_over(cache: Any, config: NSAConfig, layers: int) -> CachedSequences:
    """Return the sequences of a cache whose layers are CacheLayers; layers of an empty cache are replaced by these.

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
"""Ensures that two threads that start with one empty cache replace its layers once; later steps have their own lock."""


def _own_layers(cache: Any) -> list[CacheLayer]:
    return [layer for layer in cache.layers if isinstance(layer, CacheLayer)]


def _make_own(cache: Any, config: NSAConfig, layers: int) -> None:
    if int(cache.get_seq_length()) != 0:
        raise ValueError(f"cache holds {int(cache.get_seq_length())} tokens of another attention: use a new one")
    max_tokens = cache.layers[0].max_cache_len if type(cache) is StaticCache else None
    sequences = CachedSequences(config, max_tokens)
    cache.layers = [CacheLayer(sequences, index) for index in range(layers)]
    cache.layer_class_to_replicate = None
