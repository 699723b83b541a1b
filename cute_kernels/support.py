"""Checks whether the kernels support a call, before anything is launched. Needs torch alone, not CuTe DSL.

    check                           NSA
    check_with_cache                NSA with a cache
    check_block_sparse_attention    attention to blocks that are given
    check_top_blocks_by_max         selection by the best score of a block's keys
    check_neighborhood_attention    neighborhood attention

All return None, or the reason for the refusal in words that follow the backend's name.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.fa4 import rules as fa4
from cute_kernels.limits import (
    DECODE_KEYS,
    INDEXER_BLOCKS,
    MAX_DECODE_QUERIES,
    MAX_GRID,
    MAX_INDEXER_BLOCKS,
    MAX_INDEXER_GROUP,
    MAX_TILE,
    MAX_TOKEN_GROUP,
    MIN_PREFILL_QUERIES,
    TOKEN_SELECT_SIZES,
)
from cute_kernels.plan import refusal
from cute_kernels.refusals import (
    SELECTS,
    is_pack,
    pack_sizes,
    refusal_of_documents,
    refusal_of_grid,
    refusal_of_heads,
    refusal_of_rows,
    refusal_of_scale,
    refusal_of_selection,
    refusal_of_token_mode,
    tile_rows,
)
from cute_kernels.runtime.device import compute_capability, has_warpgroups, vectorized

CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities that the kernels were compiled for, as sm_90a and sm_100a (tools/compile_all.py)."""


def check(call: Any) -> str | None:
    """Why the kernels cannot run the call (dispatch.Call), or None."""
    inputs, config = call.options.get("inputs"), call.options.get("config")
    problem = _machine_problem(call, given=inputs is not None and inputs.q.is_cuda)
    if problem:
        return problem
    if inputs is None or config is None:
        return None
    return refusal(inputs, config, training=call.backward, deterministic=bool(call.options.get("deterministic")))


def check_with_cache(call: Any) -> str | None:
    """Why the kernels of decode/ cannot run this call of nsa_with_cache (dispatch.Call), or None."""
    inputs, config, cache = (call.options.get(name) for name in ("inputs", "config", "cache"))
    problem = _machine_problem(call, given=inputs is not None and inputs.q.is_cuda)
    if problem or inputs is None or config is None or cache is None:
        return problem
    if config.num_selected_blocks == 0:
        return "decodes with at least one selected block, got num_selected_blocks=0"
    if config.num_cmp_selected_blocks is not None:
        return f"decodes with num_cmp_selected_blocks=None only, got {config.num_cmp_selected_blocks}"
    reason = (
        fa4.refusal(inputs.q.dtype, cache.dim, cache.dim_v)
        or refusal_of_scale(config.scale(cache.dim))
        or refusal_of_token_mode(inputs, config, 0, SELECTS if config.token_mode else "decodes")
        or _refusal_of_cache(config, cache, cache.heads_kv if config.shares_heads else inputs.q.shape[2])
    )
    rules = fa4.rules(torch.device(call.device))
    if reason is not None or rules is None or inputs.q.shape[1] < MIN_PREFILL_QUERIES or not config.token_mode:
        return reason
    batch, queries = inputs.q.shape[:2]
    return refusal_of_selection(inputs, config) or refusal_of_rows(
        batch * queries, batch * cache.table.capacity, batch, config.stride, tile_rows(config, rules)
    )


def _refusal_of_cache(config: Any, cache: Any, selectors: int) -> str | None:
    """Further limits of the kernels of decode/. Scores of a tile of entries reach the next tile's blocks at most.

    Args: `selectors`, groups of heads that select together.
    """
    length, stride, size = config.compress_block_size, config.stride, config.select_size
    ratio, page_size = size // stride, cache.table.page_size
    if ratio > DECODE_KEYS or length // stride > DECODE_KEYS // ratio * ratio:
        return (
            f"decodes with at most {DECODE_KEYS} compressed blocks that begin in a select block, and as many over a "
            f"token, got compress_block_size={length}, stride={stride}, l'={size}"
        )
    if page_size % stride:
        return f"decodes with a page_size that compress_stride divides, got {page_size} and {stride}"
    if max(cache.table.batch, selectors * MAX_DECODE_QUERIES) > MAX_GRID:
        most = MAX_GRID // MAX_DECODE_QUERIES
        return (
            f"decodes up to {MAX_GRID} sequences and {most} groups of heads that select together, got "
            f"B={cache.table.batch} and {selectors}"
        )
    for name, pages in (*cache.pages.items(), ("tile_sums", cache.tile_sums)):
        if pages is not None and not vectorized(pages):
            return f"needs rows of pages {name!r} at multiples of 16 bytes, got strides {pages.stride()}"
    for name, numbers in (("block_table", cache.table.block_table), ("seqlens", cache.table.seqlens)):
        if numbers.stride(-1) != 1:
            return f"needs numbers of a row of {name} side by side, got strides {numbers.stride()}"
    return None


def check_block_sparse_attention(call: Any) -> str | None:
    """Why the kernels of attend/ cannot attend to the blocks of this call (dispatch.Call), or None."""
    inputs = call.options.get("inputs")
    problem = _machine_problem(call, given=inputs is not None and inputs.q.is_cuda)
    if problem or inputs is None:
        return problem
    q, size, slots = inputs.q, call.options["block_size"], call.options["slots"]
    if size not in TOKEN_SELECT_SIZES:
        return f"takes block_size {', '.join(map(str, TOKEN_SELECT_SIZES))}, got {size}"
    if inputs.group_size > MAX_TOKEN_GROUP:
        return f"attends to given blocks with at most {MAX_TOKEN_GROUP} heads a group, got {inputs.group_size}"
    as_pack = is_pack(inputs) or (len(q) > 0 and not call.options["causal"])
    reason = refusal_of_grid(1 if as_pack else q.shape[0], q.shape[-2])
    if reason is not None:
        return reason
    queries, tokens, _ = pack_sizes(inputs) if as_pack else (q.shape[1], inputs.k.shape[1], 0)
    rows = max(tokens, queries * max(slots, q.shape[-2]))
    if rows >= 1 << 31:
        return f"takes fewer than 2^31 keys, and blocks and heads of all tokens, got {rows}"
    apart = max(q.stride(-3), q.shape[-2] * inputs.v.shape[-1])
    if apart >= 1 << 15:
        return f"takes tokens of q and of do that lie fewer than 2^15 elements apart, got {apart}"
    reason = fa4.refusal(q.dtype, q.shape[-1], inputs.v.shape[-1]) or refusal_of_scale(call.options["softmax_scale"])
    reason = reason or refusal_of_heads(inputs)
    return reason if reason or not as_pack else refusal_of_documents(inputs, size, size)


def check_top_blocks_by_max(call: Any) -> str | None:
    """Why select/block_max.py cannot select the blocks of this call (dispatch.Call), or None."""
    inputs = call.options.get("inputs")
    problem = _machine_problem(call, given=inputs is not None and inputs.q.is_cuda)
    if problem or inputs is None:
        return problem
    q, size, count = inputs.q, call.options["block_size"], call.options["k"]
    if size not in INDEXER_BLOCKS:
        return f"takes block_size {' or '.join(map(str, INDEXER_BLOCKS))}, got {size}"
    if count > MAX_INDEXER_BLOCKS:
        return f"chooses at most {MAX_INDEXER_BLOCKS} blocks per token, got k={count}"
    if inputs.group_size > MAX_INDEXER_GROUP:
        return f"takes at most {MAX_INDEXER_GROUP} heads that share keys, got {inputs.group_size}"
    as_pack = is_pack(inputs)
    sequences = 1 if as_pack else q.shape[0]
    if max(sequences, inputs.k.shape[-2]) > MAX_GRID:
        return f"takes up to {MAX_GRID} sequences and heads, got B={sequences}, {inputs.k.shape[-2]} heads of k_idx"
    queries, tokens, _ = pack_sizes(inputs) if as_pack else (q.shape[1], inputs.k.shape[1], 0)
    rows = max(tokens, queries * q.shape[-2])
    if rows >= 1 << 31:
        return f"takes fewer than 2^31 keys, and heads of all tokens, got {rows}"
    reason = fa4.refusal(q.dtype, q.shape[-1], q.shape[-1])
    return reason if reason or not as_pack else refusal_of_documents(inputs, size, size)


def check_neighborhood_attention(call: Any) -> str | None:
    """Why FlashAttention-4's sliding window cannot compute this neighborhood attention (dispatch.Call), or None."""
    problem = _machine_problem(call)
    if problem:
        return problem
    if call.backward and call.options.get("deterministic") and not has_warpgroups(torch.device(call.device)):
        return (
            "takes torch.use_deterministic_algorithms(True) in backward only on Hopper, "
            "FlashAttention-4's deterministic backward was never compiled for Blackwell"
        )
    options = call.options
    shape = options.get("shape")
    dim = fa4.DIMS[0] if shape is None else shape[3]
    reason = fa4.refusal(call.dtype, dim, dim)
    if reason:
        return reason
    if options.get("band"):
        return "never has the band: its softmax is fused with both products"
    algorithm = options.get("algorithm", "auto")
    if algorithm not in ("auto", "flash"):
        return f"has algorithm 'flash' only, got {algorithm!r}"
    if options.get("boundary") == "shift" and not options.get("causal"):
        return "takes boundary='truncate' only, its window slides past the ends and cannot move inside, got 'shift'"
    return None if shape is None else _refusal_of_sizes(shape, options.get("dilation", 1), call.backward)


def _refusal_of_sizes(shape: tuple[int, ...], dilation: int, backward: bool) -> str | None:
    """FlashAttention-4's grids, and its 32-bit numbers of keys and of the elements in a head's fp32 sums."""
    batch, num_tokens, heads, dim = shape
    reason = refusal_of_grid(batch, heads)
    if reason is not None:
        return reason
    if num_tokens >= 1 << 30:
        return f"takes N below {1 << 30}, got {num_tokens}"
    rows = -(-num_tokens // max(1, min(dilation, num_tokens)))
    if backward and (rows + MAX_TILE) * dim >= 1 << 31:
        return f"takes fewer than 2^31 elements of one head and residue class in backward, got {rows} rows of {dim}"
    return None


def _machine_problem(call: Any, *, given: bool = False) -> str | None:
    """Why none of these kernels runs on the call's device, or None.

    Args:
        given: the call has a CUDA tensor, so there is a GPU, or a test's substitute for one.
    """
    if call.device_type != "cuda":
        return f"runs on CUDA devices, got {call.device_type}"
    if not given and not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    capability = compute_capability(torch.device(call.device).index or 0)
    if capability not in CAPABILITIES:
        known, own = " or ".join(map(_version, CAPABILITIES)), _version(capability)
        return f"needs compute capability {known}, this device has {own}, which the kernels were never compiled for"
    return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
