"""NSAConfig: every option that changes the result of NSA, validated once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor, nn

from nsa.common.checks import check_bool, check_integer, is_finite, is_number
from nsa.common.keywords import PACK, unknown_keywords
from nsa.common.replace import replace

if TYPE_CHECKING:
    from typing_extensions import Unpack

BlockPooling = Callable[[Tensor], Tensor]
"""Maps blocks `[..., l, D]` to one entry each, `[..., D]`."""

Compress = str | BlockPooling | tuple[BlockPooling, BlockPooling]

LARGEST_OPTION = 2**31 - 1
"""Largest integer option: kernels use int32, and a window or block of this size covers any document."""


class NSAOptions(TypedDict, total=False):
    """NSAConfig's fields as keywords, for type checkers (tests hold the two together)."""

    compress_block_size: int
    compress_stride: int | None
    select_block_size: int | None
    num_selected_blocks: int
    window_size: int
    q_tile_size: int
    share_heads_in_group: bool
    num_init_blocks: int
    num_local_blocks: int
    num_cmp_selected_blocks: int | None
    n_block_size: int
    compress: Compress
    causal: bool
    softmax_scale: float | None
    debug: bool


@dataclass(frozen=True)
class NSAConfig:
    """The options of NSA that change its result. Immutable and hashable, so a whole model can share one object.

    Two presets: `NSAConfig.paper()` selects per token and is autoregressive; `NSAConfig.per_tile()`, the defaults,
    selects once per tile of 256 tokens and looks ahead within the tile.

    Lengths are in tokens and counted from the start of each document; integers are at most 2^31 - 1. The exact
    definition is in docs/semantics.md.

    Args:
        compress_block_size: l, tokens pooled into one compressed entry. Default: 64.
        compress_stride: d, tokens from one compressed block to the next, d <= l. Default: None, which means l.
        select_block_size: l', tokens of one selectable block. Default: None, which means l.
        num_selected_blocks: blocks that each query tile selects, forced ones included. 0: the selected branch has no
            keys. Default: 16.
        window_size: w, keys of the sliding window, the token itself included. With `causal=False` the window is
            |i - j| <= w // 2. 0: the window branch has no keys. Default: 512.
        q_tile_size: T, consecutive queries that share a selection. 1 is the paper's selection per token. Default: 256.
        share_heads_in_group: select once for all query heads of a key/value head. Implied by `q_tile_size=1`.
            Default: False.
        num_init_blocks: blocks at the start of the document that are always selected. Default: 0.
        num_local_blocks: blocks ending with that of the tile's last token that are always selected (with
            `causal=False`: as many around the tile). Default: 0.
        num_cmp_selected_blocks: c, blocks of `n_block_size` compressed entries that each query tile and head attends to
            in the compressed branch. Needs `q_tile_size > 1`. Default: None, which means all visible entries.
        n_block_size: compressed entries in one such block. Default: 128.
        compress: "mean", or a callable (or a pair of them, for keys and for values) from blocks `[...,l,D]` to entries
            `[...,D]`, such as LinearCompression. Default: "mean".
        causal: no output depends on later tokens (in tile mode: on tokens after its tile). Default: True.
        softmax_scale: factor of the logits, in scoring and in all branches. Default: None, which means 1/sqrt(D).
        debug: also check values of the input tensors (finite, `cu_seqlens` consistent), which waits for the device.
            Default: False.

    Raises:
        TypeError: naming an option of the wrong type, and its value.
        ValueError: naming an option out of range or in conflict with another, and its value.

    Examples:
        >>> from nsa import NSAConfig
        >>> config = NSAConfig.paper(window_size=256)
        >>> config.compress_block_size, config.stride, config.q_tile_size
        (32, 16, 1)
        >>> NSAConfig() == NSAConfig.per_tile()
        True
    """

    compress_block_size: int = 64
    compress_stride: int | None = None
    select_block_size: int | None = None
    num_selected_blocks: int = 16
    window_size: int = 512
    q_tile_size: int = 256
    share_heads_in_group: bool = False
    num_init_blocks: int = 0
    num_local_blocks: int = 0
    num_cmp_selected_blocks: int | None = None
    n_block_size: int = 128
    compress: Compress = "mean"
    causal: bool = True
    softmax_scale: float | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("compress_block_size", "q_tile_size", "n_block_size"):
            self._integer(name, 1)
        for name in ("num_selected_blocks", "window_size", "num_init_blocks", "num_local_blocks"):
            self._integer(name, 0)
        for name in ("compress_stride", "select_block_size", "num_cmp_selected_blocks"):
            if getattr(self, name) is not None:
                self._integer(name, 1)
        for name in ("share_heads_in_group", "causal", "debug"):
            check_bool(name, getattr(self, name))
        self._check_scale()
        self._check_compress()
        self._check_relations()

    @classmethod
    def per_tile(cls, **changes: Unpack[NSAOptions]) -> NSAConfig:
        """Selection per tile of 256 tokens and per query head, with l = d = l' = 64: the defaults.

        Use it for encoders, for prefill, and if speed matters more than autoregression. All queries of a tile select
        its blocks together, so the selection of a token depends on later tokens of its tile, and the model is not
        autoregressive token by token. Train models that generate with `paper()`.

        Args:
            changes: options that differ from the preset, by name.

        Returns:
            The preset with the changes.

        Raises:
            TypeError: for an option of the wrong type.
            ValueError: for an option out of range.

        Examples:
            >>> NSAConfig.per_tile(num_local_blocks=1).q_tile_size
            256
        """
        check_options(None, changes)
        return replace(cls(), **changes)

    @classmethod
    def seed(cls, **changes: Unpack[NSAOptions]) -> NSAConfig:
        """Former name of `per_tile`."""
        return cls.per_tile(**changes)

    @classmethod
    def paper(cls, **changes: Unpack[NSAOptions]) -> NSAConfig:
        """Selection per token, shared in the group, with overlapping compression (arXiv 2502.11089, section 4.1).

        Use it for language models: no output depends on a later token, in training or generation. l = 32, d = 16, l' =
        64; of the 16 selected blocks 1 initial and 2 local ones are forced; w = 512.

        Args:
            changes: options that differ from the preset, by name.

        Returns:
            The preset with the changes.

        Raises:
            TypeError: for an option of the wrong type.
            ValueError: for an option out of range.

        Examples:
            >>> NSAConfig.paper().token_mode
            True
        """
        check_options(None, changes)
        paper = cls(
            compress_block_size=32,
            compress_stride=16,
            select_block_size=64,
            q_tile_size=1,
            share_heads_in_group=True,
            num_init_blocks=1,
            num_local_blocks=2,
        )
        return replace(paper, **changes)

    @property
    def stride(self) -> int:
        """d with its default resolved."""
        return self.compress_block_size if self.compress_stride is None else self.compress_stride

    @property
    def select_size(self) -> int:
        """l' with its default resolved."""
        return self.compress_block_size if self.select_block_size is None else self.select_block_size

    @property
    def token_mode(self) -> bool:
        """True if selection is per token, by softmax importance; otherwise it is per tile, by mean logits."""
        return self.q_tile_size == 1

    @property
    def shares_heads(self) -> bool:
        """True if all query heads of a key/value head share a selection."""
        return self.share_heads_in_group or self.token_mode

    @property
    def pools(self) -> tuple[str | BlockPooling, str | BlockPooling]:
        """The compression of k, and that of v."""
        return self.compress if isinstance(self.compress, tuple) else (self.compress, self.compress)

    @property
    def compress_may_learn(self) -> bool:
        """True if `compress` has parameters that need gradients, or is a plain function that may use some."""
        return any(
            any(p.requires_grad for p in pool.parameters()) if isinstance(pool, nn.Module) else callable(pool)
            for pool in self.pools
        )

    def scale(self, head_dim: int) -> float:
        """softmax_scale with its default resolved."""
        return 1.0 / math.sqrt(max(head_dim, 1)) if self.softmax_scale is None else self.softmax_scale

    def num_compressed(self, num_tokens: int) -> int:
        """Number of compressed entries of a document; a ragged tail is not compressed."""
        return max(0, (num_tokens - self.compress_block_size) // self.stride + 1)

    def _integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        try:
            number = value if isinstance(value, bool) else operator.index(value)
        except TypeError:  # a float, or a tensor of another type or size than one integer
            number = value
        check_integer(name, number, least, LARGEST_OPTION)
        object.__setattr__(self, name, number)

    def _check_scale(self) -> None:
        scale: Any = self.softmax_scale
        if scale is None:
            return
        if not is_number(scale):
            raise TypeError(f"softmax_scale must be a number or None, got {scale!r}")
        if not (is_finite(scale) and scale > 0):
            raise ValueError(f"softmax_scale must be finite and greater than 0, got {scale}")
        object.__setattr__(self, "softmax_scale", float(scale))  # PyTorch does not accept integers beyond int64

    def _check_compress(self) -> None:
        compress: Any = self.compress
        if isinstance(compress, str):
            if compress != "mean":
                raise ValueError(f"compress must be 'mean' or a callable, got {compress!r}")
        elif isinstance(compress, tuple):
            if len(compress) != 2 or not all(callable(c) for c in compress):
                raise TypeError(f"compress as a tuple must be two callables, for K and for V, got {compress!r}")
        elif not callable(compress):
            raise TypeError(f"compress must be 'mean', a callable or a tuple of two callables, got {compress!r}")

    def _check_relations(self) -> None:
        if self.stride > self.compress_block_size:
            raise ValueError(
                f"compress_stride must be at most compress_block_size={self.compress_block_size}, "
                f"got {self.compress_stride}: tokens between blocks would be dropped"
            )
        forced = self.num_init_blocks + self.num_local_blocks
        if forced > self.num_selected_blocks:
            raise ValueError(
                f"num_init_blocks + num_local_blocks must fit in num_selected_blocks={self.num_selected_blocks}, "
                f"got {self.num_init_blocks} + {self.num_local_blocks}"
            )
        if self.num_cmp_selected_blocks is not None:
            if self.token_mode:
                raise ValueError(
                    f"num_cmp_selected_blocks needs q_tile_size > 1, got num_cmp_selected_blocks="
                    f"{self.num_cmp_selected_blocks} with q_tile_size=1"
                )
            fewest = self._forced_cmp_blocks()
            if self.num_cmp_selected_blocks < fewest:
                options = (
                    f"n_block_size={self.n_block_size}, q_tile_size={self.q_tile_size}, causal=True, "
                    f"compress_block_size={self.compress_block_size}, compress_stride={self.stride}"
                )
                raise ValueError(
                    f"num_cmp_selected_blocks must be at least {fewest}, the blocks of compressed entries that can "
                    f"become visible inside one tile ({options}), got {self.num_cmp_selected_blocks}"
                )

    def _forced_cmp_blocks(self) -> int:
        """Maximum, over all tiles, of the number of blocks of compressed entries that become visible inside a tile."""
        if not self.causal:
            return 0
        stride, tile, span = self.stride, self.q_tile_size, self.stride * self.n_block_size
        # With y = t*tile - length + stride, tile t completes entries of the blocks y // span ... (y + tile - stride) //
        # span. Modulo span, y has every value that is stride - length modulo `step`; the largest overlaps most blocks.
        step = math.gcd(tile, span)
        latest = span - step + (stride - self.compress_block_size) % step
        return (latest + tile - stride) // span + 1


DEFAULT_CONFIG = NSAConfig()

OPTION_NAMES = tuple(field.name for field in fields(NSAConfig))
"""A tuple, because Dynamo of torch 2.6 and 2.7 cannot guard a set."""


def check_options(config: NSAConfig | None, options: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Raise TypeError unless all options are fields of NSAConfig, or there are none and a config replaces them.

    Args:
        others: other valid keywords of the call, as candidates for a misspelled name.
    """
    unknown = sorted(name for name in options if name not in OPTION_NAMES)
    if unknown:
        raise unknown_keywords(unknown, (*OPTION_NAMES, *others), PACK)
    if config is None:
        return
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig or None, got {type(config).__name__}")
    if options:
        raise TypeError(
            f"pass options as one config or as keywords, not both: got config and {', '.join(sorted(options))}"
        )
