"""Attention residual: forward and backward, by the kernels of whole_rows.py or, for longer rows, of tiled.py.

Each call plans tiles and grid (tiling.py), describes the blocks to the kernels (rows.py), and launches. On a GPU, a
call equal to an earlier one in shapes and options repeats its launches with new addresses, since the host time of
Triton's launches would otherwise exceed the kernels' time for small inputs (`RepeatedCall`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor

from ascend_kernels.device import gpu_cores, npu_of
from ascend_kernels.launch import RepeatedLaunch, accepted_by, launch
from ascend_kernels.layout import is_readable, padded_dim, readable, readable_copy
from ascend_kernels.residual import tiled, tiling, whole_rows
from ascend_kernels.residual.rows import MAX_POINTERS, OFFSETS, POINTERS, STACKED, TABLE, WIDE, table_kernel

KERNELS = {
    "forward": whole_rows.forward_kernel,
    "backward": whole_rows.backward_kernel,
    "weights": whole_rows.weights_kernel,
    "scores": tiled.scores_kernel,
    "mix": tiled.mix_kernel,
    "products": tiled.products_kernel,
    "gradients": tiled.gradients_kernel,
}
POINTER_NAMES = tuple(f"p_{i}" for i in range(MAX_POINTERS))


def forward(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    *,
    eps: float,
    backend: str,
    **overrides: int,
) -> tuple[Tensor, Tensor]:
    """Forward of checked inputs.

    Args:
        blocks: `[L,B,N,D]`, or L tensors `[B,N,D]` with equal strides. w_query, w_norm: `[D]`.
        backend: "triton" or "ascend", whose tiles and grid to use.
        overrides: overrides of `tiling.gpu_plan`, to try other tiles.

    Returns:
        out `[B,N,D]`, and one fp32 tensor for `backward`: scores and rstd `[T,L]`.
    """
    first = _first_block(blocks)
    call = RepeatedCall.lookup(blocks, w_query, w_norm, "forward", eps, *overrides.items())
    if call is not None and call.launches:
        out, kept = first.new_empty(first.shape[-3:]), kept_like(blocks)
        (repeat,) = call.launches
        repeat((*call.inputs, out.data_ptr(), *_score_addresses(kept, blocks)), call.more_inputs)
        return out, kept
    *lead, dim = first.shape[-3:]
    padded = padded_dim(dim, backend)
    out = first.new_empty((*lead, padded))
    kept = kept_like(blocks)
    if out.numel():
        arguments, constants = _block_arguments(blocks, w_query, w_norm, backend)
        plan = _plan(blocks, padded, backend, backward=False, **overrides)
        arguments |= {**_score_pointers(kept, blocks), "p_out": out, "eps": float(eps)}
        names = ("scores", "mix") if plan.tiled else ("forward",)
        launches = [_launch(name, plan, plan.grid, arguments, constants) for name in names]
        if call is not None and not plan.tiled:
            call.store(launches)
    return (out if padded == dim else out[..., :dim]), kept


def kept_like(blocks: Tensor | Sequence[Tensor]) -> Tensor:
    """An uninitialised tensor like the second result of `forward`."""
    return _first_block(blocks).new_empty(2 * _aligned_rows(blocks), dtype=torch.float32)


def backward(
    do: Tensor,
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    kept: Tensor,
    *,
    backend: str,
    **overrides: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients from the inputs and results of `forward`. Bitwise repeatable on one device.

    Args:
        do: gradient of out, `[B,N,D]`. The others: as `forward` took and returned them.

    Returns:
        dV `[L,B,N,D]`, for lists too; dw_query; dw_norm or None.
    """
    first = _first_block(blocks)
    call = RepeatedCall.lookup(blocks, w_query, w_norm, "backward", do.dtype, do.stride(), *overrides.items())
    if call is not None and call.launches and do.data_ptr() % RepeatedLaunch.ALIGNMENT == 0:
        return _repeat_backward(call, do, blocks, w_query, w_norm, kept)
    *lead, dim = first.shape[-3:]
    padded = padded_dim(dim, backend)
    dblocks = first.new_empty((len(blocks), *lead, padded))
    if dblocks.numel() == 0:
        return dblocks[..., :dim], torch.zeros_like(w_query), None if w_norm is None else torch.zeros_like(w_norm)
    tokens = dblocks[0].numel() // padded
    arguments, constants = _block_arguments(blocks, w_query, w_norm, backend)
    plan = _plan(blocks, padded, backend, backward=True, **overrides)
    given_do, do = do, readable(do, backend)
    constants["FLAT"] &= _is_flat(do)
    arguments |= {
        **_score_pointers(kept, blocks),
        "p_do": do,
        "do_batch_stride": do.stride(0),
        "do_token_stride": do.stride(1),
        "p_dblocks": dblocks,
        "dblock_stride": dblocks.stride(0),
    }
    if plan.tiled:
        num_dim_tiles = -(-padded // plan.block_d)
        num_splits = max(1, plan.programs // num_dim_tiles)
        partials = kept.new_empty((num_splits, padded))
        arguments |= {"p_dp": kept.new_empty(tokens * len(blocks)), "p_delta": kept.new_empty(tokens)}
        _launch("products", plan, plan.grid, arguments, constants)
        _launch("gradients", plan, (num_dim_tiles * num_splits,), arguments | {"p_partials": partials}, constants)
    else:
        partials = kept.new_empty((plan.programs, padded))
        gradients = _launch("backward", plan, plan.grid, arguments | {"p_partials": partials}, constants)
    dw_query, dw_norm, weights = _weight_gradients(partials, arguments, w_query, w_norm, backend)
    if call is not None and not plan.tiled and do is given_do and do.data_ptr() % RepeatedLaunch.ALIGNMENT == 0:
        call.store([gradients, weights], partials.shape[0])
    return (dblocks if padded == dim else dblocks[..., :dim]), dw_query, dw_norm


def _weight_gradients(
    partials: Tensor, arguments: dict[str, Any], w_query: Tensor, w_norm: Tensor | None, backend: str
) -> tuple[Tensor, Tensor | None, RepeatedLaunch | None]:
    """dw_query and dw_norm from the partial sums of t, and their launch."""
    weights = [w_query] if w_norm is None else [w_query, w_norm]
    dim = partials.shape[1]
    results = [partials.new_empty(dim, dtype=weight.dtype) for weight in weights]
    block_p, plan = tiling.weights_plan(dim, npu_of(partials.device) if backend == "ascend" else None)
    arguments = arguments | {
        "p_partials": partials,
        "num_partials": partials.shape[0],
        "p_dw_query": results[0],
        "p_dw_norm": results[-1],
    }
    repeat = _launch("weights", plan, plan.grid, arguments, {"BLOCK_P": block_p})
    dw_query, *dw_norm = (result[: w_query.shape[0]] for result in results)
    return dw_query, dw_norm[0] if dw_norm else None, repeat


def _plan(
    blocks: Tensor | Sequence[Tensor], dim: int, backend: str, *, backward: bool, **overrides: int
) -> tiling.Plan:
    first = _first_block(blocks)
    tokens = first.shape[-3] * first.shape[-2]
    shape = {"dim": dim, "blocks": len(blocks), "tokens": tokens}
    if backend == "ascend":
        listed = not isinstance(blocks, Tensor)
        npu = npu_of(first.device)
        return tiling.ascend_plan(backward=backward, dtype=first.dtype, **shape, listed=listed, device=npu)
    return tiling.gpu_plan(backward=backward, dtype=first.dtype, **shape, cores=gpu_cores(first.device), **overrides)


def _launch(
    name: str, plan: tiling.Plan, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
) -> RepeatedLaunch | None:
    """Launch a kernel with the arguments and constants for which it has parameters."""
    kernel = KERNELS[name]
    dim_tiles = -(-arguments["dim"] // plan.block_d)
    device = arguments["p_w_query"].device
    arguments = accepted_by(kernel, {**arguments, "num_work": arguments["num_tokens"] * dim_tiles})
    plan_constants = {
        "BLOCK_D": plan.block_d,
        "ROWS": plan.rows,
        "ONE_TILE": plan.one_tile,
        "STAGES": plan.stages,
    }
    constants = accepted_by(kernel, {**constants, **plan_constants})
    compiled = launch(kernel, grid, arguments, constants, **plan.options)
    if compiled is None or not RepeatedLaunch.possible(device):
        return None
    return RepeatedLaunch(compiled, grid, arguments, constants)


# Blocks and scores as arguments of kernels


def _first_block(blocks: Tensor | Sequence[Tensor]) -> Tensor:
    return blocks if isinstance(blocks, Tensor) else blocks[0]


def _block_arguments(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, backend: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of every kernel for blocks and weights, and the constants that define how blocks are addressed."""
    first = _first_block(blocks)
    on_npu = backend == "ascend"
    weights = [weight for weight in (w_query, w_norm) if weight is not None]
    weights = [readable(weight.float() if on_npu else weight, backend) for weight in weights]
    constants: dict[str, Any] = {"ADDRESS": STACKED.value, "VECTOR": 1, "BRANCHES": on_npu, "FLAT": False}
    pointers: dict[str, Any] = dict.fromkeys(POINTER_NAMES)
    table, listed = weights[0], []
    if isinstance(blocks, Tensor):
        rows = readable(blocks, backend)
        pointers["p_0"], block_stride = rows, rows.stride(0)
    else:
        listed = list(blocks)
        if not all(is_readable(block, backend) for block in blocks):  # copy all, so that strides stay equal
            listed = [readable_copy(block, backend) for block in blocks]
        rows, block_stride = listed[0], 0
        if len(listed) <= MAX_POINTERS:
            constants["ADDRESS"] = POINTERS.value
            addresses = [block.data_ptr() for block in listed]
            constants["VECTOR"] = 1 if on_npu else _elements_per_vector(addresses, rows.element_size())
            pointers = {name: listed[i] if i < len(listed) else rows for i, name in enumerate(pointers)}
        else:
            pointers["p_0"], table, constants["VECTOR"] = _offset_table(listed, on_npu)
            constants["ADDRESS"] = TABLE.value
    arguments = {
        **pointers,
        "listed": listed,  # not a kernel parameter: keeps copies alive until the launch
        "p_table": table,
        "p_w_query": weights[0],
        "p_w_norm": weights[-1],
        "num_tokens": first.shape[-3] * first.shape[-2],
        "num_blocks": len(blocks),
        "tokens_per_batch": first.shape[-2],
        "dim": rows.shape[-1],
        "norm_dim": 0 if w_norm is None else rows.shape[-1],
        "inverse_dim": 1.0 / first.shape[-1],
        "block_stride": block_stride,
        "batch_stride": rows.stride(-3),
        "token_stride": rows.stride(-2),
    }
    constants["FLAT"] = not on_npu and _is_flat(rows)
    return arguments, constants


def _is_flat(tensor: Tensor) -> bool:
    """True if tokens of `[...,B,N,D]` have one stride across all batch elements."""
    return tensor.shape[-3] == 1 or tensor.stride(-3) == tensor.shape[-2] * tensor.stride(-2)


def _elements_per_vector(addresses: list[int], itemsize: int) -> int:
    """Elements in 16 bytes if all addresses, or distances of addresses, are multiples of 16 bytes; else 1."""
    return 16 // itemsize if all(address % 16 == 0 for address in addresses) else 1


def _offset_table(listed: list[Tensor], on_npu: bool) -> tuple[Tensor, Tensor, int]:
    """The tensor at the lowest address, the table of all tensors' offsets from it in vectors, and elements per
    vector.
    """
    base = min(listed, key=Tensor.data_ptr)
    itemsize = base.element_size()
    distances = [block.data_ptr() - base.data_ptr() for block in listed]
    vector = 1 if on_npu else _elements_per_vector(distances, itemsize)
    offsets = [distance // itemsize for distance in distances]
    table = torch.empty(len(listed), dtype=torch.int64, device=base.device)
    for start in range(0, len(listed), MAX_POINTERS):
        chunk = [offset // vector for offset in offsets[start : start + MAX_POINTERS]]
        padded = [WIDE.value + offset for offset in chunk + [0] * (MAX_POINTERS - len(chunk))]
        arguments = {"p_table": table[start:], "num_offsets": len(chunk), **dict(zip(OFFSETS, padded, strict=True))}
        launch(table_kernel, (1,), arguments, {})
    if len({block.untyped_storage().data_ptr() for block in listed}) == 1:  # cover the storage that all share
        base = base.as_strided((max(offsets) + _extent(base),), (1,))
    return base, table, vector


def _extent(tensor: Tensor) -> int:
    """Number of elements from the first to the last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _aligned_rows(blocks: Tensor | Sequence[Tensor]) -> int:
    """T L rounded up to a multiple of 4, so that rstd starts at a multiple of 16 bytes after the scores."""
    rows = len(blocks) * math.prod(_first_block(blocks).shape[-3:-1])  # torch.Size.numel has no symbols
    return -(-rows // 4) * 4


def _score_pointers(kept: Tensor, blocks: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
    return {"p_scores": kept, "p_rstd": kept[_aligned_rows(blocks) :]}


def _score_addresses(kept: Tensor, blocks: Tensor | Sequence[Tensor]) -> tuple[int, int]:
    """Addresses of `_score_pointers`."""
    return kept.data_ptr(), kept.data_ptr() + kept.element_size() * _aligned_rows(blocks)


# Repeated calls on a GPU


class RepeatedCall:
    """A call on a GPU whose tensors are read in place, and the launches of an equal earlier call, if any.

    Calls that copy tensors or write an offset table are not repeated.
    """

    cache: ClassVar[dict[Any, tuple[int, list[RepeatedLaunch]]]] = {}
    MAX_CACHED = 1024
    """Maximum number of cached calls: models make few, but lengths of batches may differ."""

    def __init__(self, key: Any, inputs: tuple[int, ...], more_inputs: tuple[int | None, ...]) -> None:
        self.key = key
        self.inputs = inputs
        """Addresses of the first block, of an unused table, and of the weights."""
        self.more_inputs = more_inputs
        """Addresses of the other blocks."""
        self.num_partials, self.launches = self.cache.get(key, (0, []))

    @classmethod
    def lookup(
        cls, blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, *options: Any
    ) -> RepeatedCall | None:
        """Look up the call by everything on which its launches depend; None if launches cannot be repeated."""
        first = _first_block(blocks)
        if not RepeatedLaunch.possible(first.device):
            return None
        query = w_query.data_ptr()
        norm = query if w_norm is None else w_norm.data_ptr()
        more_inputs: tuple[int | None, ...]
        if isinstance(blocks, Tensor):
            count, more_inputs, address_bits = 0, _NO_MORE_BLOCKS, first.data_ptr() | query | norm
        elif len(blocks) <= MAX_POINTERS:
            count, addresses = len(blocks), [block.data_ptr() for block in blocks]
            more_inputs = (*addresses[1:], *[addresses[0]] * (MAX_POINTERS - count))
            address_bits = reduce(or_, addresses, query | norm)
        else:
            return None
        strides = first.stride()
        contiguous_features = strides[-1] == 1 and (w_query.stride(0) == 1 or w_query.numel() == 1)
        if address_bits % RepeatedLaunch.ALIGNMENT or not contiguous_features:
            return None
        if w_norm is not None and w_norm.stride() != w_query.stride():
            return None
        dtypes = first.dtype, w_query.dtype, None if w_norm is None else w_norm.dtype
        key = (*options, count, first.shape, strides, dtypes, first.device)
        return cls(key, (first.data_ptr(), query, query, norm), more_inputs)

    def store(self, launches: list[RepeatedLaunch | None], num_partials: int = 0) -> None:
        """Cache the call's launches, unless one of them cannot be repeated."""
        repeatable = [repeat for repeat in launches if repeat is not None]
        if len(repeatable) == len(launches):
            if len(self.cache) >= self.MAX_CACHED:
                self.cache.clear()
            self.cache[self.key] = num_partials, repeatable


_NO_MORE_BLOCKS = (None,) * (MAX_POINTERS - 1)


def _repeat_backward(
    call: RepeatedCall,
    do: Tensor,
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `backward` by the launches of an earlier call."""
    first = _first_block(blocks)
    dblocks = first.new_empty((len(blocks), *first.shape[-3:]))
    partials = kept.new_empty((call.num_partials, first.shape[-1]))
    dw_query = torch.empty_like(w_query)
    dw_norm = None if w_norm is None else torch.empty_like(w_norm)
    gradients, weights = call.launches
    scores = _score_addresses(kept, blocks)
    gradients((*call.inputs, do.data_ptr(), *scores, dblocks.data_ptr(), partials.data_ptr()), call.more_inputs)
    dw_addresses = dw_query.data_ptr(), dw_query.data_ptr() if dw_norm is None else dw_norm.data_ptr()
    weights((partials.data_ptr(), *call.inputs[2:], *dw_addresses))
    return dblocks, dw_query, dw_norm
