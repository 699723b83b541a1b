"""NSACache: pages of keys, values and compressed entries of one layer, and sums of queries in tile mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import DTYPES, check_bool, check_sizes, is_readable, refuse_shallow_copy
from nsa.common.derivatives import as_to_be_changed, to_be_changed
from nsa.config import NSAConfig, check_options
from nsa.decoding.append import append, write_rows
from nsa.decoding.table import PageTable, Step, longer
from nsa.inputs import NSAInputs


def page_names(separate_kv: bool) -> tuple[str, ...]:
    """Names of a cache's paged tensors."""
    branches = ("", "_slc", "_win") if separate_kv else ("",)
    return (*(f"{x}{branch}" for branch in branches for x in "kv"), "k_cmp", "v_cmp")


class NSACache:
    """The keys and values of one attention layer, for `nsa_with_cache`. docs/decoding.md has the memory layout.

    Memory is not initialised; results never depend on unwritten memory.

    Args:
        config: the layer's options; `causal=True`.
        table: pages and lengths of the sequences, shared by all layers. Must be empty unless `pages` hold its tokens.
        heads_kv: H_kv, key/value heads.
        dim: D, of keys.
        dim_v: D_v, of values. Default: None, which means D.
        heads: H, query heads; required with `q_tile_size > 1`, which keeps sums of queries. Default: None.
        separate_kv: keep separate keys and values for the selected and the window branch. Default: False.
        dtype: of keys and values. Default: torch.float32.
        pages: existing memory, such as an inference engine's, by the names of `pages` below, in tile mode also
            "tile_sums"; the rest is allocated. Default: None.

    Raises:
        TypeError: naming an argument of the wrong type.
        ValueError: naming an argument out of range, pages of another shape, dtype, device or layout, or a table with
            tokens that no pages hold.

    Examples:
        >>> import torch
        >>> from nsa import NSACache, NSAConfig, nsa_with_cache
        >>> config = NSAConfig.paper()
        >>> cache = NSACache.empty(config, batch=1, max_tokens=1000, heads_kv=2, dim=32)
        >>> q, k, v = torch.randn(1, 300, 4, 32), torch.randn(1, 300, 2, 32), torch.randn(1, 300, 2, 32)
        >>> prompt = nsa_with_cache(q, k, v, cache)
        >>> token = nsa_with_cache(q[:, -1:], k[:, -1:], v[:, -1:], cache)
        >>> cache.seqlens, token.shape
        (tensor([301], dtype=torch.int32), torch.Size([1, 1, 4, 32]))
    """

    def __init__(
        self,
        config: NSAConfig,
        table: PageTable,
        *,
        heads_kv: int,
        dim: int,
        dim_v: int | None = None,
        heads: int | None = None,
        separate_kv: bool = False,
        dtype: torch.dtype = torch.float32,
        pages: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_options(config, {})
        if config is None:
            raise TypeError("config must be an NSAConfig, got None")
        if not config.causal:
            raise ValueError("causal must be True: a cache holds no later tokens, got causal=False")
        if not isinstance(table, PageTable):
            raise TypeError(f"table must be a PageTable, got {type(table).__name__}")
        dim_v = dim if dim_v is None else dim_v
        check_sizes(heads_kv=heads_kv, dim=dim, dim_v=dim_v)
        check_bool("separate_kv", separate_kv)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be {', '.join(map(short_name, DTYPES))}, got {dtype!r}")
        if not config.token_mode:
            if heads is None:
                raise ValueError(f"heads must be given with q_tile_size={config.q_tile_size}, got None")
            check_sizes(heads=heads)
            if heads % heads_kv:
                raise ValueError(f"heads must be a multiple of heads_kv={heads_kv}, got {heads}")
        self.config, self.table = config, table
        self.heads, self.heads_kv, self.dim, self.dim_v = heads, heads_kv, dim, dim_v
        self.separate_kv, self.dtype = separate_kv, dtype

        slots = -(-table.page_size // config.stride)
        names = page_names(separate_kv)
        given = {} if pages is None else dict(pages)
        known = names if config.token_mode else (*names, "tile_sums")
        if unknown := given.keys() - set(known):
            raise ValueError(f"pages must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
        if not given.keys() >= set(known):
            table.check_new_layer()
        self.pages: dict[str, Tensor] = {}
        """k, v `[pages,page_size,H_kv,D or D_v]`, with separate_kv also k_slc, v_slc, k_win, v_win; k_cmp, v_cmp
        `[pages,ceil(page_size/d),H_kv,D or D_v]`: entry j is in the page of its last token e, in slot e % page_size //
        d."""
        for name in names:
            rows = slots if name.endswith("_cmp") else table.page_size
            shape = (table.num_pages, rows, heads_kv, dim if name.startswith("k") else dim_v)
            self.pages[name] = self._memory(name, given.get(name), shape, dtype)
        self.tile_sums: Tensor | None = None
        """Tile mode: the sum of the queries of token i's tile up to i, in slot i % T: `[B,min(T, capacity),H,D]`, fp32
        (fp64 for fp64 keys)."""
        self.sums_begin: Tensor | None = None
        """Tile mode: `_kept_from` after the last cut, int32 `[B]`. Steps do not write it: the open tile follows from
        the lengths."""
        if heads is not None and not config.token_mode:
            sums = torch.promote_types(dtype, torch.float32)
            tile = min(config.q_tile_size, table.capacity)
            self.tile_sums = self._memory("tile_sums", given.get("tile_sums"), (table.batch, tile, heads, dim), sums)
            with to_be_changed():
                self.sums_begin = torch.zeros(table.batch, dtype=torch.int32, device=table.device)
        self.identity = object()
        """A property of accepted calls (nsa/common/resolve.py): they depend on this cache's memory."""
        table.add_layer(self)

    def _memory(self, name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The given memory, checked, or new memory."""
        device = self.table.device
        if given is None:
            with to_be_changed():
                return torch.empty(shape, dtype=dtype, device=device)
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} of pages must be a torch.Tensor, got {type(given).__name__}")
        if given.dtype != dtype:
            raise TypeError(f"{name} of pages must be {short_name(dtype)}, got {short_name(given.dtype)}")
        if given.shape != shape or given.device != device:
            wanted = f"{list(shape)} on {device}"
            raise ValueError(f"{name} of pages must be {wanted}, got {list(given.shape)} on {given.device}")
        distance = given.stride(1) if given.shape[1] > 1 else given.stride(0)
        if given.shape[0] > 1 and given.stride(0) != given.shape[1] * distance:
            wanted = "one stride between tokens, also across pages"
            raise ValueError(f"{name} of pages must have {wanted}, got strides {list(given.stride())}")
        return given

    @classmethod
    def empty(
        cls,
        config: NSAConfig,
        batch: int,
        max_tokens: int | None = None,
        *,
        heads_kv: int,
        dim: int,
        dim_v: int | None = None,
        heads: int | None = None,
        separate_kv: bool = False,
        pages: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> NSACache:
        """Create a cache of empty sequences with its own table, for one layer; `NSACache(config, cache.table, ...)`
        adds more.

        Args:
            config: as NSACache.
            batch: as PageTable.empty.
            max_tokens: as PageTable.empty. Default: None.
            heads_kv: as NSACache.
            dim: as NSACache.
            dim_v: as NSACache. Default: None.
            heads: as NSACache. Default: None.
            separate_kv: as NSACache. Default: False.
            pages: as PageTable.empty. Default: None.
            page_size: as PageTable.empty. Default: 64.
            dtype: as NSACache. Default: torch.float32.
            device: as PageTable.empty. Default: None.

        Returns:
            The cache.

        Raises:
            TypeError, ValueError: as NSACache and PageTable.empty.
        """
        table = PageTable.empty(batch, max_tokens, pages=pages, page_size=page_size, device=device)
        sizes = {"heads_kv": heads_kv, "dim": dim, "dim_v": dim_v, "heads": heads}
        return cls(config, table, **sizes, separate_kv=separate_kv, dtype=dtype)  # type: ignore[arg-type]

    @property
    def seqlens(self) -> Tensor:
        """Tokens of each sequence, int32 `[B]`, on the device."""
        return self.table.seqlens

    def entry_rows(self, entries: Tensor) -> Tensor:
        """Rows of compressed entries `[B,...]` in k_cmp and v_cmp with the first two dims flattened; -1 without a
        page.
        """
        last = entries * self.config.stride + self.config.compress_block_size - 1
        rows, size = self.table.rows(last), self.table.page_size
        slots = self.pages["k_cmp"].shape[1]
        return torch.where(rows >= 0, rows // size * slots + rows % size // self.config.stride, -1)

    def append(self, inputs: NSAInputs, config: NSAConfig, step: Step) -> None:
        """Write a step's new keys and values, and the entries that they complete, in PyTorch, for any pooling and
        branches.

        For backends whose kernels do not.
        """
        append(inputs, config, self, step)

    def check(self) -> None:
        """`PageTable.check`: raise RuntimeError if a sequence has overflowed; synchronizes with the device."""
        self.table.check()

    def reorder(self, rows: Tensor) -> None:
        """`PageTable.reorder`, which reorders all layers: sequence b becomes a copy of sequence rows[b].

        Args:
            rows: int32 or int64 `[B]` on the device.
        """
        self.table.reorder(rows)

    def truncate(self, lengths: int | Tensor) -> None:
        """`PageTable.truncate`, which cuts sequences to at most these lengths in all layers.

        Args:
            lengths: one for all sequences, or int32 or int64 `[B]` on the device.
        """
        self.table.truncate(lengths)

    def reset(self) -> None:
        """`PageTable.reset`: clear the sequences of all layers."""
        self.table.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the cache's tensors, to save them.

        Returns:
            Tensors by name, the table's prefixed by "table."; not copies.
        """
        kept = {"tile_sums": self.tile_sums, "sums_begin": self.sums_begin}
        own = self.pages | {name: tensor for name, tensor in kept.items() if tensor is not None}
        return own | {f"table.{name}": tensor for name, tensor in self.table.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a saved cache into this one, and into the shared table.

        Args:
            state: the `state_dict` of a cache of the same sizes and options.

        Raises:
            TypeError: naming a value that is not a tensor, before anything is copied.
            ValueError: naming a tensor that is missing, unknown, or of another shape or dtype, before anything is
                copied.
            RuntimeError: inside a step.
        """
        self.table.load(self.state_dict(), state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copy.deepcopy and pickle: caches of one table that are copied together share its copy."""
        vars(self).update(as_to_be_changed(state))
        self.table.add_layer(self)

    __copy__ = refuse_shallow_copy

    # Called by the table on its layers

    def copy_pages(self, source: Tensor, target: Tensor, wanted: Tensor) -> None:
        """Copy pages source[b] to target[b] `[B]` where wanted."""
        for pages in self.pages.values():
            write_rows(pages, target, pages[source], wanted)

    def take_rows(self, rows: Tensor) -> None:
        """Replace row b of per-sequence state by row rows[b]."""
        for kept in (self.tile_sums, self.sums_begin):
            if kept is not None:
                kept.copy_(kept[rows])

    def _kept_from(self, begin: Tensor) -> Tensor:
        """The length from which sums are kept, int32 `[B]`: from there on a sequence can be cut inside a tile."""
        tile = self.config.q_tile_size
        return torch.maximum((self.seqlens - 1).clamp(min=0) // tile * tile, begin)

    def check_truncation(self, lengths: Tensor) -> None:
        """Raise if a length is inside a tile whose queries are not kept; synchronizes with the device in tile mode."""
        if self.sums_begin is None or not is_readable(lengths, wait=True):
            return
        tile, first = self.config.q_tile_size, self._kept_from(self.sums_begin)
        lost = (lengths % tile > 0) & (lengths < first)
        if bool(lost.any()):
            row = int(lost.nonzero()[0])
            raise ValueError(
                f"lengths must be multiples of q_tile_size={tile}, or at least {int(first[row])} for sequence {row} of "
                f"{int(self.seqlens[row])} tokens, whose queries since then are kept, got {int(lengths[row])}"
            )

    def cut(self, lengths: Tensor) -> None:
        """Record which sums are kept, before sequences are cut to checked lengths."""
        if self.sums_begin is not None:
            self.sums_begin.copy_(torch.minimum(self._kept_from(self.sums_begin), lengths))

    def grown(self, pages: int, capacity: int) -> Callable[[], None]:
        """Allocate pages and sums for a growing table; the returned function installs them."""
        longer_pages = {name: longer(own, 0, pages, 0.0) for name, own in self.pages.items()}
        sums = self.tile_sums
        if sums is not None:
            sums = longer(sums, 1, min(self.config.q_tile_size, capacity), 0.0)

        def take() -> None:
            self.pages, self.tile_sums = longer_pages, sums

        return take
