"""Calls that launch every variant of every kernel, ours and FlashAttention-4's, with tensors on the meta device.

    calls      calls with given D, G and dtype
    kernels    what the calls of all sizes launch, for the GPU that cute_kernels.runtime.device.TARGET_VARIABLE names

A call that the kernels do not support raises ValueError.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.limits import TOKEN_SELECT_SIZES
from cute_kernels.plan import refusal
from cute_kernels.runtime.device import has_warpgroups
from nsa import NSAConfig
from nsa.inputs import NSAInputs

DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
GROUPS = (1, 4, 8)
"""G, query heads of a key/value head."""
TOKEN_GROUPS = (1, 3, 4, 8, 16, 32, 64)
"""G in token mode, whose kernels differ more between groups."""
VARIED = {64: torch.float16, 128: torch.bfloat16}
"""D and dtype of the calls listed below, each of which varies one option."""
FEW, MANY = 4, 16
"""G of these calls. In token mode, forced blocks and the window are a launch each with FEW, and one with MANY."""

PAPER = NSAConfig.paper()
TILES = replace(PAPER, q_tile_size=256, share_heads_in_group=False)

Call = dict[str, Any]
"""Keyword arguments of `nsa`; the default is a training step with projected gates."""
BOTH: Call = {"inference": True}
DOCUMENTS: Call = {"documents": 8}
OTHER_V: Call = {"other_v_dim": True}
OWN: Call = {"tensors": ("k_win", "v_win")}
ENTRIES: Call = {"num_cmp_selected_blocks": 16, "tokens": 1 << 16}
GATES: list[Call] = [
    {**BOTH, "gates": name, "fp32": fp32} for name in ("gate_proj_weight", "gates", None) for fp32 in (False, True)
]
FORCED: list[Call] = [
    {"num_init_blocks": 2},
    {"num_local_blocks": 0},
    {"select_block_size": 128, "num_local_blocks": 1, "fp32": True},
    {"select_block_size": 256, "num_init_blocks": 0, "num_local_blocks": 1},
]
EITHER_MODE: list[Call] = [
    *GATES,
    *({**DOCUMENTS, **gates} for gates in GATES),
    *({**DOCUMENTS, **more} for more in (OTHER_V, OWN, {"starts": True}, {"documents": 300})),
    OTHER_V,
    {**OTHER_V, "batch": 2},
    OWN,
    {"tensors": ("k_slc", "v_slc")},
    {"first": 512},
    {"first": 500},
    {"starts": True},
    *({"tokens": 31, "gates": name} for name in ("gate_proj_weight", "gates", None)),
    {"tensors": ("w_k_compress", "w_v_compress")},
    {"share_dtype": torch.float32},
    {"compress_block_size": 64, "compress_stride": 64},
]
TOKEN_MODE: dict[int, list[Call]] = {
    FEW: [
        *EITHER_MODE,
        *({"select_block_size": size, **more} for size in TOKEN_SELECT_SIZES[1:] for more in ({}, DOCUMENTS)),
        *({"num_init_blocks": 0, "num_local_blocks": 0, **gates} for gates in GATES),
        *({**forced, **more} for forced in FORCED for more in ({}, OTHER_V)),
        {"num_selected_blocks": 48},
        {"num_selected_blocks": 48, "first": 512},
    ],
    MANY: [*GATES, *FORCED, OWN, {"first": 512}, {**DOCUMENTS, "starts": True}, {"num_selected_blocks": 32}],
}
TILE_MODE: list[Call] = [
    *EITHER_MODE,
    *({"select_block_size": 128, **more} for more in ({}, DOCUMENTS, {"first": 512}, {"causal": False})),
    *({**ENTRIES, **more} for more in (OTHER_V, {**DOCUMENTS, **OTHER_V})),
    {"causal": False, **OTHER_V},
    {"share_heads_in_group": True},
    *({"atomic_free": False, **more} for more in (ENTRIES, {"causal": False}, {"select_block_size": 128})),
]
HOPPER_TILE_MODE: list[Call] = [
    *({**ENTRIES, "n_block_size": 64, **more} for more in ({}, DOCUMENTS)),
    {"deterministic": True, "tokens": 1 << 17},
]


def calls(dim: int, group: int, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Calls with these sizes, all of which the kernels support."""
    how: dict[str, Any] = {"dim": dim, "group": group, "dtype": dtype}
    varied, hopper = VARIED[dim] == dtype, has_warpgroups(torch.device("meta"))
    token, tile, sparse = [BOTH, {**BOTH, **DOCUMENTS}], [], [{}, DOCUMENTS]
    if group in GROUPS:
        tile += [{**BOTH, **of, **more} for of in ({}, ENTRIES) for more in ({}, DOCUMENTS)]
        tile += [{**BOTH, "causal": False}, {"atomic_free": False}]
    if varied:
        token += TOKEN_MODE.get(group, [])
        tile += TILE_MODE if group == FEW else []
        tile += HOPPER_TILE_MODE if group == FEW and hopper else []
    if varied and group in (FEW, max(TOKEN_GROUPS)):
        sparse += [{**more, "size": size} for more in sparse for size in TOKEN_SELECT_SIZES[1:]]
        sparse += [OTHER_V, {"causal": False}]
    yield from (partial(nsa, PAPER, **how, **call) for call in token)
    yield from (partial(nsa, TILES, **how, **call) for call in tile)
    yield from (partial(block_sparse, **how, **call) for call in sparse)
    if group in GROUPS:
        yield partial(neighborhoods, **how)
        yield partial(top_blocks, 128, 16, 1, **how)
        yield partial(top_blocks, 64, 16, 1, documents=8, **how)
        yield partial(top_blocks, 128, 16, 1, rows=64, tokens=1 << 17, **how)
    if group == FEW:
        yield partial(top_blocks, 64, 4, 2, **how)
        yield partial(top_blocks, 128, 64, 0, **how)
        yield partial(top_blocks, 128, 64, 0, rows=64, tokens=1 << 17, **how)
    if group in (1, FEW, MANY):
        for queries, gates in itertools.product((1, 4), ("gate_proj_weight", "gates", None)):
            yield partial(decode, PAPER, queries, gates=gates, **how)
        yield partial(decode, NSAConfig.per_tile(), 1, gates="gates", **how)
        yield partial(decode, PAPER, 1, batch=256, **how)
        yield partial(decode, PAPER, 100, **how)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_of(
    rows: tuple[int, ...], keys: tuple[int, ...], group: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """q, k and v with two key/value heads."""
    shapes = (*rows, 2 * group, dims[0]), (*keys, 2, dims[0]), (*keys, 2, dims[1])
    return [empty(*shape, dtype=dtype) for shape in shapes]


def gating(q: Tensor, name: str | None, fp32: bool) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "gate_proj_weight": (q.shape[-2], 3, q.shape[-1]),
        "gates": (*q.shape[:-1], 3),
    }
    return {} if name is None else {name: empty(*shapes[name], dtype=torch.float32 if fp32 else q.dtype)}


def inputs_of(
    *,
    dim: int,
    group: int,
    dtype: torch.dtype,
    tokens: int = 4096,
    first: int = 0,
    batch: int = 1,
    documents: int = 0,
    starts: bool = False,
    tensors: tuple[str, ...] = (),
    gates: str | None = "gate_proj_weight",
    fp32: bool = False,
    other_v_dim: bool = False,
) -> NSAInputs:
    """Tensors of a call of NSA.

    Args:
        first: token of the first query. starts: it is known on the device alone.
        tensors: optional ones to give. gates: name of one more, fp32 or in `dtype`.
    """
    lead, v_dim = () if documents else (batch,), 192 - dim if other_v_dim else dim
    q, k, v = heads_of((*lead, tokens - first), (*lead, tokens), group, (dim, v_dim), dtype)
    shapes = {"k": k.shape, "v": v.shape, "w_k_compress": (2, dim, dim), "w_v_compress": (2, v_dim, v_dim)}
    more: dict[str, Any] = {name: empty(*(shapes.get(name) or shapes[name[0]]), dtype=dtype) for name in tensors}
    if documents:
        more |= {"cu_seqlens": empty(documents + 1), "max_seqlen": tokens}
    if starts:
        more |= {"q_start": empty(documents or batch)} | ({"cu_seqlens_k": empty(documents + 1)} if documents else {})
    return NSAInputs(q, k, v, **gating(q, gates, fp32), **more)


def nsa(
    config: NSAConfig,
    *,
    inference: bool = False,
    deterministic: bool = False,
    share_dtype: torch.dtype | None = None,
    atomic_free: bool = True,
    **options: Any,
) -> None:
    """A step of training.

    Args:
        inference: do that as well. options: changes of the configuration; others are those of `inputs_of`.
    """
    from cute_kernels import backward, forward

    changes = {name: options.pop(name) for name in [*options] if hasattr(config, name)}
    inputs, config = inputs_of(**options), replace(config, **changes)
    refused = refusal(inputs, config, training=True, deterministic=deterministic)
    if refused is not None:
        raise ValueError(refused)
    if inference:
        forward.nsa(inputs, config, aux=False)
    out, saved = forward.nsa_saving(inputs, config, recompute=False)
    how: dict[str, Any] = {"deterministic": deterministic, "share_dtype": share_dtype, "atomic_free": atomic_free}
    backward.nsa_backward(inputs, config, saved, torch.empty_like(out), **how)


def block_sparse(
    *,
    dim: int,
    group: int,
    dtype: torch.dtype,
    size: int = 64,
    documents: int = 0,
    causal: bool = True,
    other_v_dim: bool = False,
) -> None:
    """Block-sparse attention and its backward."""
    from cute_kernels import block_sparse as sparse

    rows, heads = ((4096,), (2,)) if documents else ((1, 4096), (1, 2))
    tensors = heads_of(rows, rows, group, (dim, 192 - dim if other_v_dim else dim), dtype)
    bounds = empty(documents + 1) if documents else None
    given = *tensors, empty(*heads, 4096, 16), bounds, None, None
    how: dict[str, Any] = {"block_size": size, "causal": causal, "softmax_scale": 0.125}
    out, lse = sparse.forward(*given, **how)
    sparse.backward(torch.empty_like(out), *given, out, lse, **how)


def top_blocks(
    size: int,
    count: int,
    local: int,
    *,
    dim: int,
    group: int,
    dtype: torch.dtype,
    documents: int = 0,
    rows: int = 4096,
    tokens: int = 4096,
) -> None:
    """Blocks by an indexer's maxima."""
    from cute_kernels.select.block_max import top_blocks_by_max

    lead, bounds = ((), empty(documents + 1)) if documents else ((1,), None)
    q, k = empty(*lead, rows, group, dim, dtype=dtype), empty(*lead, tokens, 1, dim, dtype=dtype)
    top_blocks_by_max(q, k, bounds, None, None, block_size=size, k=count, local=local)


def neighborhoods(*, dim: int, group: int, dtype: torch.dtype) -> None:
    """Neighborhood attention and its backward, with classes of two lengths."""
    from cute_kernels import neighborhood

    q, k, v = heads_of((1, 4096), (1, 4096), group, (dim, dim), dtype)
    window: dict[str, Any] = {"kernel_size": 64, "dilation": 3, "softmax_scale": None, "boundary": "truncate"}
    out, lse = neighborhood.forward(q, k, v, causal=False, backend="cute", **window)
    neighborhood.backward(torch.empty_like(out), q, k, v, out, lse, causal=False, backend="cute", **window)


def decode(
    config: NSAConfig,
    queries: int,
    *,
    dim: int,
    group: int,
    dtype: torch.dtype,
    gates: str | None = "gate_proj_weight",
    batch: int = 2,
) -> None:
    """A step of decoding, or of prefill, over pages of 64 tokens."""
    from cute_kernels import decoding, limits, prefill
    from cute_kernels.decode.cache import LengthTensors, Pages
    from cute_kernels.decode.tile_sums import keep_sums, sum_queries

    q, k, v = heads_of((batch, queries), (batch, queries), group, (dim, dim), dtype)
    memory = (empty(64, slots, 2, dim, dtype=dtype) for slots in (64, 64, *[64 // config.stride] * 2))
    pages = Pages(*memory, empty(batch, 32))
    lengths = LengthTensors(empty(batch), empty(batch), empty(batch, dtype=torch.bool))
    given = gating(q, gates, fp32=gates == "gates")
    if queries >= limits.MIN_PREFILL_QUERIES:
        prefill.append_tokens(k, v, pages, lengths, config)
        prefill.prefill(NSAInputs(q, k, v, **given), config, pages, lengths)
        return
    rows = None
    if not config.token_mode:
        kept = empty(batch, config.q_tile_size, 2 * group, dim, dtype=torch.float32)
        rows, sums = sum_queries(q, kept, lengths, config.q_tile_size)
        keep_sums(sums, kept, lengths, config.q_tile_size)
    decoding.decode(q, k, v, pages, lengths, config, rows=rows, **given)


def kernels() -> list[Any]:
    """The `jit.Kernel` of all calls, each once."""
    from cute_kernels.runtime.jit import Kernel
    from cute_kernels.runtime.launches import launches_of

    sizes = itertools.product(DIMS, TOKEN_GROUPS, DTYPES)
    launched = (launch.kernel for each in sizes for call in calls(*each) for launch in launches_of(call))
    return list(dict.fromkeys(kernel for kernel in launched if isinstance(kernel, Kernel)))
