"""Limits of NSA's Triton kernels, checked by the dispatcher before anything is launched. Needs only torch.

    check                           NSA
    check_block_sparse_attention    attention to blocks that are given
    check_top_blocks_by_max         selection by the best score of a block's keys
    check_indexer_kl_loss           the loss of such an indexer

All return None, or the reason for the refusal in words that follow the backend's name.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch

from ascend_kernels.nsa.tiling import MAX_DIM
from ascend_kernels.support import gpu_refusal

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MIN_CAPABILITY = (8, 0)
MAX_GROUP = 128
MAX_TOKENS = 1 << 29
"""Token indices, plus a window, fit int32."""
MAX_BLOCKS = 64
"""Blocks per list: choosing them takes as many passes over a row's scores."""
MAX_BLOCK_SIZE = 256
BLOCK_MULTIPLE = 16
MAX_INT = 2**31 - 1
MAX_GRID = 65535
"""Second and third dimension of a grid."""


def check(call: Any) -> str | None:
    """Reason why these kernels cannot run a call of `nsa` (dispatch.Call), or None."""
    inputs, config = call.options.get("inputs"), call.options.get("config")
    problem = _machine_refusal(call)
    if problem or inputs is None or config is None:
        return problem
    length, stride, size, tile = config.compress_block_size, config.stride, config.select_size, config.q_tile_size
    if config.num_cmp_selected_blocks is not None:
        return f"supports num_cmp_selected_blocks=None only, got {config.num_cmp_selected_blocks}"
    if inputs.q_sum is not None:
        return "supports queries that start with a tile only, got q_sum"
    if config.token_mode and not config.causal:
        return "supports selection per token with causal=True only"
    if length % stride or size % stride:
        return f"supports a compress_stride that divides l and l', got {stride}, {length} and {size}"
    if tile % BLOCK_MULTIPLE and not config.token_mode:
        return f"supports a q_tile_size of 1 or a multiple of {BLOCK_MULTIPLE}, got {tile}"
    return (
        _refusal_of_shapes(inputs, config.num_selected_blocks, "num_selected_blocks", tile)
        or _refusal_of_blocks(size, config.num_selected_blocks, "select_block_size", "num_selected_blocks")
    )  # fmt: skip


def check_block_sparse_attention(call: Any) -> str | None:
    """Reason why these kernels cannot attend to the blocks of a call (dispatch.Call), or None."""
    inputs = call.options.get("inputs")
    problem = _machine_refusal(call)
    if problem or inputs is None:
        return problem
    slots = call.options["slots"]
    return _refusal_of_shapes(inputs, slots, "k", 1) or _refusal_of_blocks(call.options["block_size"])


def check_top_blocks_by_max(call: Any) -> str | None:
    """Reason why these kernels cannot choose the blocks of a call (dispatch.Call), or None."""
    inputs = call.options.get("inputs")
    problem = _machine_refusal(call)
    if problem or inputs is None:
        return problem
    count = call.options["k"]
    return _refusal_of_shapes(inputs, count, "k", 1) or _refusal_of_blocks(call.options["block_size"], count)


def check_indexer_kl_loss(call: Any) -> str | None:
    """Reason why these kernels cannot compute the loss of a call (dispatch.Call), or None."""
    q_idx, problem = call.options.get("q_idx"), check_block_sparse_attention(call)
    if problem or q_idx is None:
        return problem
    if problem := _machine_refusal(replace(call, dtype=q_idx.dtype)):
        return f"{problem} (q_idx)"
    return f"supports D_i up to {MAX_DIM}, got {q_idx.shape[-1]}" if q_idx.shape[-1] > MAX_DIM else None


def _machine_refusal(call: Any) -> str | None:
    reason = gpu_refusal(call)
    if reason is not None:
        return reason
    if INTERPRETED and call.dtype == torch.bfloat16:  # which multiplies its bits
        return "supports float16 and float32 in Triton's interpreter, got bfloat16"
    if call.device_type == "cuda" and torch.version.hip is not None:
        return "runs on NVIDIA GPUs, this build of PyTorch is for AMD GPUs"
    if call.device_type == "cuda":
        found = torch.cuda.get_device_capability(torch.device(call.device))
        if found < MIN_CAPABILITY:
            wanted, own = ".".join(map(str, MIN_CAPABILITY)), ".".join(map(str, found))
            return f"needs compute capability {wanted} or newer, this device has {own}"
    return None


def _refusal_of_shapes(inputs: Any, slots: int, name: str, tile: int) -> str | None:
    (heads, dim), (kv_heads, v_dim) = inputs.q.shape[-2:], inputs.v.shape[-2:]
    if max(dim, v_dim) > MAX_DIM:
        return f"supports D and D_v up to {MAX_DIM}, got {dim} and {v_dim}"
    if heads // kv_heads > MAX_GROUP:
        return f"supports up to {MAX_GROUP} query heads per key/value head, got {heads // kv_heads}"
    if kv_heads > MAX_GRID:
        return f"supports up to {MAX_GRID} key/value heads, got {kv_heads}"
    rows, keys = math.prod(inputs.q.shape[:-2]), math.prod(inputs.k.shape[:-2])
    if max(rows, keys) > MAX_TOKENS:
        return f"supports up to {MAX_TOKENS} tokens of all sequences, got {max(rows, keys)}"
    lists = -(-rows // tile) * (1 if tile == 1 else heads // kv_heads)
    for what, count in (("heads of all tokens", rows * heads), (f"lists of {name} blocks", lists * slots)):
        if count > MAX_INT:
            return f"supports up to {MAX_INT} {what}, got {count}"
    return None


def _refusal_of_blocks(size: int, count: int = 0, size_name: str = "block_size", count_name: str = "k") -> str | None:
    if size % BLOCK_MULTIPLE or size > MAX_BLOCK_SIZE:
        return f"supports a {size_name} that is a multiple of {BLOCK_MULTIPLE} up to {MAX_BLOCK_SIZE}, got {size}"
    if count > MAX_BLOCKS:
        return f"supports {count_name} up to {MAX_BLOCKS}, got {count}"
    return None
