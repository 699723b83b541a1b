"""Inputs of millions of tokens, and single tiles of their result straight from the definition in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM = 8, 2, 128
TILE, BLOCK, WINDOW, CMP_BLOCK = 256, 64, 512, 128


def normal(generator: torch.Generator, rows: int, heads: int) -> Tensor:
    """bf16 `[1,rows,heads,DIM]`, filled in parts: one fp32 copy of it all would not fit."""
    tensor = torch.empty(1, rows, heads, DIM, device="cuda", dtype=torch.bfloat16)
    for part in tensor.flatten(0, 1).split(1 << 20):
        part.normal_(generator=generator)
    return tensor


def tile_in_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    weight: Tensor,
    *,
    start: int,
    blocks: Tensor,
    cmp_blocks: Tensor | None,
) -> Tensor:
    """One tile of one head, `[rows,DIM]`, for given selections; differentiable in what is fp64.

    Args:
        q: the tile's queries `[rows,DIM]`: TILE of them, or one that selects alone.
        k, v, k_cmp, v_cmp: of the key/value head, `[tokens,DIM]` and `[entries,DIM]`.
        weight: the head's gate projection `[3,DIM]`.
        start: first token of the tile.
        blocks, cmp_blocks: selected blocks of tokens, and of entries (None: all), padded with -1.
    """
    rows = torch.arange(start, start + len(q), device=q.device)
    q = q.double()

    def attend(keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        logits = (q @ keys[positions].double().T / math.sqrt(DIM)).masked_fill(~visible, -math.inf)
        return torch.softmax(logits, -1).nan_to_num() @ values[positions].double()

    def members(chosen: Tensor, size: int) -> Tensor:
        return (chosen[chosen >= 0][:, None] * size + torch.arange(size, device=q.device)).flatten()

    entries = torch.arange(len(k_cmp), device=q.device)
    if cmp_blocks is not None:
        entries = members(cmp_blocks, CMP_BLOCK)
        entries = entries[entries < len(k_cmp)]
    tokens = members(blocks, BLOCK)
    tokens = tokens[tokens < len(k)]
    near = torch.arange(max(0, start - WINDOW + 1), start + len(q), device=q.device)
    branches = (
        attend(k_cmp, v_cmp, entries, entries * BLOCK + BLOCK - 1 <= rows[:, None]),
        attend(k, v, tokens, tokens <= rows[:, None]),
        attend(k, v, near, (near <= rows[:, None]) & (near > rows[:, None] - WINDOW)),
    )
    gates = torch.sigmoid(q @ weight.double().T)
    return sum((gates[:, i, None] * branch for i, branch in enumerate(branches)), torch.zeros_like(q))
