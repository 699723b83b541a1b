"""nsa_with_cache: its checks, the choice of a backend, and its operator (see nsa/common/operators.py).

torch.compile traces the table's step, and the operator gets the step's tensors. If a later part of the compiled
function fails, writes of the call are not undone.
"""

from __future__ import annotations

from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

import dispatch
from dispatch.registry import short_name
from nsa.common.autocast import autocast_off
from nsa.common.operators import empty_out, register_operator
from nsa.common.resolve import accepted, find_impl, properties_of
from nsa.config import OPTION_NAMES, NSAConfig, check_options
from nsa.decoding.cache import NSACache, page_names
from nsa.decoding.table import PageTable, Step
from nsa.inputs import NSAInputs
from nsa.operators import OPTIONS

TENSOR_NAMES = (
    *("q", "k", "v", "w_k_compress", "w_v_compress", "k_slc", "v_slc", "k_win", "v_win", "gate_proj_weight", "gates"),
)
"""Tensor arguments of a call."""

LAYOUT_OPTIONS = ("compress_block_size", "stride", "q_tile_size", "causal")
"""Options that define the contents of a cache; the others may change between calls."""

WITH_CACHE = "nsa_kernels::with_cache"
_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
_STATE = (
    "Tensor(a!)[] pages, Tensor(b!)? tile_sums, Tensor block_table, Tensor seqlens, Tensor overflowed, "
    "Tensor positions, Tensor new, Tensor counts"
)
SCHEMA = f"({_TENSORS}, {_STATE}, *, SymInt page_size, {OPTIONS}, str? backend) -> Tensor"


# Checks


def check_cache(cache: NSACache, config: NSAConfig | None) -> NSAConfig:
    """Return the options of the call; raise TypeError or ValueError unless they fit the cache."""
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
    """Raise RuntimeError or ValueError if a gradient is needed, or if the call is out of place in the table's step."""
    if torch.is_grad_enabled() and _has_gradients(inputs, config):
        raise RuntimeError("nsa_with_cache does not support gradients: call it under torch.no_grad()")
    table = cache.table
    if table.open is None and table.num_layers > 1:
        raise RuntimeError(
            f"{table.num_layers} caches share this table and must be called inside one step: "
            f"`with table.step({inputs.q.shape[1]}):`"
        )
    if table.open is not None:
        if table.open.num_tokens != inputs.q.shape[1]:
            raise ValueError(
                f"q must have the step's N_q={table.open.num_tokens} tokens, got shape {list(inputs.q.shape)}"
            )
        if any(other is cache for other in table.open.done):
            raise RuntimeError("this cache was already called in the open step: a step must call each layer once")


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


# Calls

_tensors = attrgetter(*TENSOR_NAMES)


def resolve(
    inputs: NSAInputs, cache: NSACache, config: NSAConfig, backend: str | None, *, remembered: bool = True
) -> dispatch.Impl:
    """Check the tensors against options and cache, and find a backend that supports the call.

    Args:
        remembered: remember the call if it is accepted, on any device: a model makes the same call in each step.
    """
    properties = None
    if remembered and not config.debug and config.compress == "mean" and isinstance(backend, (str, NoneType)):
        sizes = cache.table.capacity, cache.table.num_pages
        properties = properties_of(_tensors(inputs), cache.identity, config, backend, *sizes)
    impl = accepted(properties)
    if impl is None:
        check_shapes(inputs, cache, config)
    check_order(inputs, cache, config)
    if impl is None:
        options = {"inputs": inputs, "config": config, "cache": cache}
        call = dispatch.Call("nsa_with_cache", inputs.q.device, inputs.q.dtype, options=options)
        impl = find_impl(call, backend, properties)
    return impl


def run_checked(impl: dispatch.Impl, inputs: NSAInputs, config: NSAConfig, cache: NSACache, step: Step) -> Tensor:
    """Call a backend inside a step.

    Modes are set here and not around the step, because a graph in which a call raises would not restore them.
    """
    with torch.no_grad(), autocast_off(inputs.q.device.type):
        if config.debug:
            cache.check()
        out: Tensor = impl.load()(inputs, config, cache, step)
    return out


def call_with_cache(inputs: NSAInputs, config: NSAConfig, cache: NSACache, step: Step, backend: str | None) -> Tensor:
    """Call the operator inside a step that is being traced.

    Raises:
        ValueError: for a callable `compress`.
    """
    if not isinstance(config.compress, str):
        raise ValueError(f"compress must be 'mean' for nsa_with_cache in torch.compile, got {config.compress!r}")
    table = cache.table
    out: Tensor = torch.ops.nsa_kernels.with_cache(
        *(getattr(inputs, name) for name in TENSOR_NAMES),
        list(cache.pages.values()),
        cache.tile_sums,
        *(table.block_table, table.seqlens, table.overflowed),
        *(step.positions, step.new, step.counts),
        page_size=table.page_size,
        backend=backend,
        **{name: getattr(config, name) for name in OPTION_NAMES},
    )
    return out


def _with_cache(*arguments: Any, page_size: int, backend: str | None, **options: Any) -> Tensor:
    count = len(TENSOR_NAMES)
    inputs = NSAInputs(**dict(zip(TENSOR_NAMES, arguments[:count], strict=True)))
    pages, tile_sums, block_table, seqlens, overflowed, *of_step = arguments[count:]
    config, names = NSAConfig(**options), page_names(separate_kv=len(pages) > len(page_names(separate_kv=False)))
    table = PageTable(block_table, seqlens, page_size=page_size, num_pages=pages[0].shape[0])
    table.overflowed = overflowed
    memory = dict(zip(names, pages, strict=True)) | ({} if tile_sums is None else {"tile_sums": tile_sums})
    heads_kv, dim = memory["k"].shape[2:]
    sizes = {"heads": inputs.q.shape[2], "heads_kv": heads_kv, "dim": dim, "dim_v": memory["v"].shape[3]}
    kind = {"separate_kv": "k_slc" in memory, "dtype": memory["k"].dtype}
    cache = NSACache(config, table, **sizes, **kind, pages=memory)
    table.open = step = Step(inputs.q.shape[1], *of_step)
    out = run_checked(resolve(inputs, cache, config, backend, remembered=False), inputs, config, cache, step)
    for commit in step.commits:
        commit()
    return out


register_operator(WITH_CACHE, SCHEMA, _with_cache, empty_out)
