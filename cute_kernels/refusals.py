"""Limits that several ops share: why the kernels of NSA refuse a call, and what they call a pack. Needs torch alone.

Each function of a limit returns None, or the reason in words that follow the backend's name.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from cute_kernels.limits import (
    MAX_GRID,
    MAX_LIST_WIDTH,
    MAX_SCALE,
    MAX_TOKEN_BLOCKS,
    MAX_TOKEN_ENTRIES,
    MAX_TOKEN_GROUP,
    MIN_SCALE,
    TOKEN_SELECT_SIZES,
)
from cute_kernels.select.token_tiling import choose_tiling


def tile_rows(config: Any, rules: Any) -> int:
    """Query rows of a tile: those that select together, in token mode of attention. Documents begin at multiples."""
    return int(rules.rows if config.token_mode else config.q_tile_size)


def runs_as_pack(inputs: Any, config: Any, *, training: bool) -> bool:
    """True if a call of NSA runs the steps of packed documents.

    So do, beside what `is_pack`, sequences that continue a tile, to be trained: documents begin inside a tile, while
    lists of rows without documents are of tiles that begin.
    """
    return is_pack(inputs) or (training and bool(inputs.q.numel() > 0) and continues_tile(inputs, config))


def is_pack(inputs: Any) -> bool:
    """True for packed documents, and for sequences of one length whose starts only the device knows."""
    return bool(inputs.packed or (isinstance(inputs.q_start, Tensor) and inputs.q.shape[0] > 0))


def pack_sizes(inputs: Any) -> tuple[int, int, int]:
    """Queries, tokens and documents of what runs as a pack."""
    docs = inputs.cu_seqlens.shape[0] - 1 if inputs.packed else inputs.q.shape[0]
    return math.prod(inputs.q.shape[:-2]), math.prod(inputs.k.shape[:-2]), docs


def continues_tile(inputs: Any, config: Any) -> bool:
    """True if the first query, which the host knows, is not the first of its tile."""
    return not config.token_mode and bool(inputs.first_token % config.q_tile_size != 0)


# Limits


def refusal_of_grid(sequences: int, heads: int) -> str | None:
    """Both are dims of grids."""
    if max(sequences, heads) > MAX_GRID:
        return f"takes up to {MAX_GRID} sequences and heads, got B={sequences}, H={heads}"
    return None


def refusal_of_scale(scale: float) -> str | None:
    """Kernels multiply by softmax_scale and log2(e) in fp32."""
    if not MIN_SCALE <= scale <= MAX_SCALE:
        return f"takes softmax_scale from {MIN_SCALE:.3g} to {MAX_SCALE:.3g}, got {scale:.3g}"
    return None


def refusal_of_heads(inputs: Any) -> str | None:
    """Token mode counts vectors of the q of a group with 32 bits."""
    apart = (inputs.group_size - 1) * inputs.q.stride(-2)
    if apart >= 1 << 34:
        return f"takes heads of a group that lie fewer than 2^34 elements apart in q, got {apart}"
    return None


def refusal_of_documents(inputs: Any, stride: int, tile: int) -> str | None:
    """Args: `stride`, tokens between entries; `tile`, documents begin at multiples of so many rows."""
    queries, tokens, docs = pack_sizes(inputs)
    if docs == 0:
        return "takes at least one document, got cu_seqlens of shape [1]"
    return refusal_of_rows(queries, tokens, docs, stride, tile)


def refusal_of_rows(queries: int, tokens: int, docs: int, stride: int, tile: int) -> str | None:
    """Refusal of a pack whose aligned rows exceed 32 bits. Args: see `pack_sizes` and `refusal_of_documents`."""
    rows = max(queries, tokens) + 2 * docs * tile
    covered = tokens + (docs + 1) * MAX_LIST_WIDTH * stride
    if max(rows, covered) >= 1 << 31:
        return f"lays documents out in fewer than 2^31 rows, got {tokens} tokens in {docs} documents"
    return None


SELECTS = "selects per token (q_tile_size=1)"


def refusal_of_token_mode(inputs: Any, config: Any, rows: int, does: str = SELECTS) -> str | None:
    """Limits of select/token.py and the kernels of attend/, and of those of decode/ in tile mode.

    Args: `rows`, of an attention tile; `does`, what the call does.
    """
    length, stride, size = config.compress_block_size, config.stride, config.select_size
    if not config.causal:
        return f"{does} with causal=True only, got causal=False"
    if size not in TOKEN_SELECT_SIZES:
        wanted = ", ".join(map(str, TOKEN_SELECT_SIZES))
        return f"{does} with select_block_size {wanted}, got {size}"
    if length % stride or size % stride:
        return (
            f"{does} with a compress_stride that divides compress_block_size and "
            f"select_block_size, got {stride}, {length} and {size}"
        )
    if size // stride + length // stride - 1 > MAX_TOKEN_ENTRIES:
        return (
            f"takes at most {MAX_TOKEN_ENTRIES} compressed blocks over one select block (q_tile_size=1), got "
            f"compress_block_size={length}, stride={stride}, l'={size}"
        )
    if config.num_selected_blocks > MAX_TOKEN_BLOCKS:
        return f"chooses at most {MAX_TOKEN_BLOCKS} blocks per token, got {config.num_selected_blocks}"
    if inputs.group_size > MAX_TOKEN_GROUP:
        return f"{does} for at most {MAX_TOKEN_GROUP} heads a group, got {inputs.group_size}"
    packed = runs_as_pack(inputs, config, training=False)
    return refusal_of_documents(inputs, config.stride, rows) if packed else None


def refusal_of_selection(inputs: Any, config: Any) -> str | None:
    """Shared memory of select/token.py."""
    dim, count, ratio = inputs.q.shape[-1], config.num_selected_blocks, config.select_size // config.stride
    if choose_tiling(dim, inputs.group_size, count, ratio) is not None:
        return None
    return (
        f"has no room in shared memory to choose {count} blocks of {ratio} compressed ones per token "
        f"(num_selected_blocks, l'/d), with D={dim} and {inputs.group_size} heads a group"
    )
