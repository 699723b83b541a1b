"""Rotary embeddings as Llama applies them, for tests of layers with a `rope` hook."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(tensor: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding as Llama does it, for `[...,N,heads,D]` and cos, sin `[N,D]`."""
    cos, sin = (t.unsqueeze(-2) for t in position_embeddings)
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_table(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions, `[tokens, dim]` each."""
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
