"""What tests of nsa_with_cache share: poisoned caches, calls in chunks, and rows recomputed without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import NSACache, NSAConfig, nsa_with_cache
from nsa.inputs import NSAInputs
from tests.support.loop_oracle import nsa_document

KEY_NAMES = ("k", "v", "k_slc", "v_slc", "k_win", "v_win")
BY_TOKEN = ("q", "gates", *KEY_NAMES)


def cache_for(inputs: NSAInputs, config: NSAConfig, max_tokens: int, **options: Any) -> NSACache:
    """A cache for calls like this one; all of its memory is NaN."""
    cache = NSACache.empty(
        config,
        inputs.q.shape[0],
        max_tokens,
        heads=inputs.q.shape[2],
        heads_kv=inputs.k.shape[2],
        dim=inputs.k.shape[3],
        dim_v=inputs.v.shape[3],
        separate_kv=inputs.k_slc is not None,
        dtype=inputs.q.dtype,
        **options,
    )
    poison(cache)
    return cache


def poison(cache: NSACache) -> None:
    """NaN in all pages that no sequence holds; in a new cache, everywhere."""
    uses = cache.table.page_uses
    assert uses is not None
    for pages in cache.pages.values():
        pages[uses == 0] = torch.nan
    if cache.tile_sums is not None and not cache.seqlens.any():
        cache.tile_sums.fill_(torch.nan)


def tokens_of(inputs: NSAInputs, start: int, stop: int) -> dict[str, Tensor]:
    """Tokens of a call, as nsa_with_cache takes them."""
    cut = {n: t[:, start:stop] if n in BY_TOKEN else t for n, t in inputs.tensors().items()}
    return cut


def append(cache: NSACache, inputs: NSAInputs, chunks: Iterable[int], start: int = 0, **options: Any) -> Tensor:
    """The rows of one call after the other, of so many tokens each."""
    outs = []
    for count in chunks:
        outs.append(nsa_with_cache(cache=cache, **tokens_of(inputs, start, start + count), **options))
        start += count
    return torch.cat(outs, 1)


def looped_rows(inputs: NSAInputs, config: NSAConfig, rows: Iterable[int]) -> Tensor:
    """Rows of sequence 0 by the loops, `[rows,H,D_v]`: of the whole, in tile mode the last of each prefix."""
    own = {n: t[0] if n in BY_TOKEN else t for n, t in inputs.tensors().items()}
    if config.token_mode:
        return nsa_document(config=config, **own).out[list(rows)]
    cut = ({n: t[: row + 1] if n in BY_TOKEN else t for n, t in own.items()} for row in rows)
    return torch.stack([nsa_document(config=config, **prefix).out[-1] for prefix in cut])


def sequence(inputs: NSAInputs, b: int) -> NSAInputs:
    """One sequence of a batch."""
    own: dict[str, Any] = {n: t[b : b + 1] for n, t in inputs.tensors().items() if n in BY_TOKEN}
    return replace(inputs, **own)


def snapshot(cache: NSACache) -> dict[str, Tensor]:
    """All of a cache's memory as bytes, so that NaN equals itself."""
    return {name: tensor.clone().view(torch.uint8) for name, tensor in cache.state_dict().items()}


def assert_unchanged(cache: NSACache, before: dict[str, Tensor]) -> None:
    for name, tensor in snapshot(cache).items():
        assert torch.equal(tensor, before[name]), name
