"""nsa_with_cache: the choice of a backend, and its operator (see nsa/common/operators.py).

nsa_kernels::with_cache    out; writes pages and, in tile mode, sums of queries

torch.compile traces the table's step, and the operator gets the step's tensors. If a later part of the compiled
function fails, writes of the call are not undone.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.operators import empty_out, register_operator
from nsa.common.resolve import accepted, find_impl
from nsa.config import OPTION_NAMES, NSAConfig
from nsa.decoding.cache import NSACache, page_names
from nsa.decoding.table import PageTable, Step
from nsa.decoding.validate import TENSOR_NAMES, check_order, check_shapes
from nsa.inputs import NSAInputs
from nsa.operators import OPTIONS

WITH_CACHE = "nsa_kernels::with_cache"
_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
_STATE = (
    "Tensor(a!)[] pages, Tensor(b!)? tile_sums, Tensor block_table, Tensor seqlens, Tensor overflowed, "
    "Tensor positions, Tensor new, Tensor counts"
)
SCHEMA = f"({_TENSORS}, {_STATE}, *, SymInt page_size, {OPTIONS}, str? backend) -> Tensor"


_tensors = attrgetter(*TENSOR_NAMES)


def resolve(
    inputs: NSAInputs, cache: NSACache, config: NSAConfig, backend: str | None, *, remembered: bool = True
) -> dispatch.Impl:
    """Check the tensors against options and cache, and find a backend that supports the call.

    Args:
        remembered: remember the call if it is accepted, on any device: a model makes the same call in each step.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was expected.
        RuntimeError: if a gradient is needed.
        dispatch.BackendError: if no backend supports the call.
    """
    properties = _properties(inputs, cache, config, backend) if remembered else None
    impl = accepted(properties)
    if impl is None:
        check_shapes(inputs, cache, config)
    check_order(inputs, cache, config)
    if impl is None:
        options = {"inputs": inputs, "config": config, "cache": cache}
        call = dispatch.Call("nsa_with_cache", inputs.q.device, inputs.q.dtype, options=options)
        impl = find_impl(call, backend, properties)
    return impl


def _properties(inputs: NSAInputs, cache: NSACache, config: NSAConfig, backend: str | None) -> Hashable:
    """All that `check_shapes` and the dispatcher read; None if they depend on values, or for unusual tensors."""
    if not (backend is None or isinstance(backend, str)) or config.debug or config.compress != "mean":
        return None
    tensors: list[Hashable] = []
    for x in _tensors(inputs):
        if isinstance(x, Tensor) and not x.is_nested:
            tensors.append((x.shape, x.dtype, x.device, x.layout))
        elif x is None:
            tensors.append(None)
        else:
            return None
    return cache.identity, config, backend, cache.table.capacity, cache.table.num_pages, *tensors


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
    cache = NSACache(
        config,
        table,
        heads=inputs.q.shape[2],
        heads_kv=memory["k"].shape[2],
        dim=memory["k"].shape[3],
        dim_v=memory["v"].shape[3],
        separate_kv="k_slc" in memory,
        dtype=memory["k"].dtype,
        pages=memory,
    )
    table.open = step = Step(inputs.q.shape[1], *of_step)
    out = run_checked(resolve(inputs, cache, config, backend, remembered=False), inputs, config, cache, step)
    for commit in step.commits:
        commit()
    return out


register_operator(WITH_CACHE, SCHEMA, _with_cache, empty_out)
