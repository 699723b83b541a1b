"""Argument checks of nsa_with_cache, before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dispatch.registry import short_name
from nsa.config import NSAConfig, check_options
from nsa.decoding.cache import NSACache
from nsa.inputs import NSAInputs

TENSOR_NAMES = (
    *("q", "k", "v", "w_k_compress", "w_v_compress", "k_slc", "v_slc", "k_win", "v_win", "gate_proj_weight", "gates"),
)
"""Tensor arguments of a call."""

LAYOUT_OPTIONS = ("compress_block_size", "stride", "q_tile_size", "causal")
"""Options that define the contents of a cache; the others may change between calls."""


def check_cache(cache: NSACache, config: NSAConfig | None) -> NSAConfig:
    """Return the options of the call.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was expected.
    """
    if not isinstance(cache, NSACache):
        raise TypeError(f"cache must be an NSACache, got {type(cache).__name__}")
    check_options(config, {})
    if config is None:
        return cache.config
    for name in LAYOUT_OPTIONS:
        own, given = getattr(cache.config, name), getattr(config, name)
        if own != given:
            name = "compress_stride" if name == "stride" else name
            raise ValueError(f"{name} must be {own}, which the cache was made for, got {given}")
    return config


def _has_gradients(inputs: NSAInputs, config: NSAConfig) -> bool:
    """True if a tensor or a parameter of `compress` requires a gradient; plain functions can't be inspected."""
    pools = config.pools
    learned = [p for pool in pools if isinstance(pool, nn.Module) for p in pool.parameters()]
    return any(tensor.requires_grad for tensor in (*inputs.tensors().values(), *learned))


def check_order(inputs: NSAInputs, cache: NSACache, config: NSAConfig) -> None:
    """Raise if a gradient is needed, or if the call is out of place in the table's step.

    Raises:
        ValueError: naming the argument, its value and what was expected.
        RuntimeError: if a gradient is needed; outside of a step of several layers; twice in one.
    """
    if torch.is_grad_enabled() and _has_gradients(inputs, config):
        raise RuntimeError("nsa_with_cache does not support gradients: call it under torch.no_grad()")
    _check_step(inputs.q, cache)


def check_shapes(inputs: NSAInputs, cache: NSACache, config: NSAConfig) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the tensors fit the options and the cache."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)) and q.shape[1] != k.shape[1]:  # else: more keys
        raise ValueError(f"k must have q's N_q={q.shape[1]} new tokens, got shape {list(k.shape)}")
    inputs.check(config)
    if q.device != cache.table.device:
        raise ValueError(f"q must be on the cache's device {cache.table.device}, got {q.device}")
    if q.dtype != cache.dtype:
        raise TypeError(f"q must be {short_name(cache.dtype)}, as the cache is, got {short_name(q.dtype)}")
    if q.shape[0] != cache.table.batch or q.shape[1] == 0:
        raise ValueError(f"q must have B={cache.table.batch} sequences and N_q >= 1 tokens, got shape {list(q.shape)}")
    if tuple(k.shape[2:]) != (cache.heads_kv, cache.dim):
        raise ValueError(f"k must have the cache's [H_kv,D] = {[cache.heads_kv, cache.dim]}, got shape {list(k.shape)}")
    if v.shape[3] != cache.dim_v:
        raise ValueError(f"v must have the cache's D_v={cache.dim_v}, got shape {list(v.shape)}")
    if cache.tile_sums is not None and q.shape[2] != cache.heads:
        raise ValueError(f"q must have the cache's H={cache.heads} heads, got shape {list(q.shape)}")
    for name in ("k_slc", "v_slc", "k_win", "v_win"):
        if (getattr(inputs, name) is None) is cache.separate_kv:
            given = "missing" if cache.separate_kv else "given"
            raise ValueError(
                f"{name} goes with separate_kv=True of the cache: {given}, separate_kv={cache.separate_kv}"
            )


def _check_step(q: Tensor, cache: NSACache) -> None:
    """Raise if the call is out of place in the table's step."""
    table = cache.table
    if table.open is None and table.num_layers > 1:
        raise RuntimeError(
            f"{table.num_layers} caches share this table and must be called inside one step: "
            f"`with table.step({q.shape[1]}):`"
        )
    if table.open is not None:
        if table.open.num_tokens != q.shape[1]:
            raise ValueError(f"q must have the step's N_q={table.open.num_tokens} tokens, got shape {list(q.shape)}")
        if any(other is cache for other in table.open.done):
            raise RuntimeError("this cache was already called in the open step: a step must call each layer once")
