"""Llama's rotary embeddings: a `rope` hook for the attention layers, and its tables."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.common.checks import check_integer, check_tensor, is_finite


def llama_rope(x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys as Llama does: the `rope` hook of NSAttention and NeighborhoodAttention.

    Feature i of a head is rotated with feature i + D/2, by the angle of the token.

    Args:
        x: `[...,N,heads,D]`, D even.
        position_embeddings: cos and sin, `[N,D]` or `[B,N,D]`, as returned by `rotary_table` or LlamaRotaryEmbedding of
            transformers; rounded to x's dtype.

    Returns:
        The rotated tensor, with x's shape and dtype.

    Raises:
        ValueError: for cos or sin of another D or N.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, NSAttention, llama_rope, rotary_table
        >>> layer = NSAttention(hidden_size=64, num_heads=4, config=NSAConfig.paper(), rope=llama_rope)
        >>> layer(torch.randn(1, 100, 64), rotary_table(torch.arange(100), head_dim=16)).shape
        torch.Size([1, 100, 64])
    """
    for name, table in zip(("cos", "sin"), position_embeddings, strict=True):
        if table.shape[-2:] != (x.shape[-3], x.shape[-1]):
            wanted = f"[N,D] = {[x.shape[-3], x.shape[-1]]}, or [B,N,D]"
            raise ValueError(f"{name} of position_embeddings must have the shape {wanted}, got {list(table.shape)}")
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in position_embeddings)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_table(positions: Tensor, head_dim: int, *, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions, for `llama_rope`.

    The angle of feature i, and of i + D/2, is position / theta^(2i/D).

    Args:
        positions: positions of the tokens, `[N]` or `[B,N]`: `torch.arange(N)`, `cache.table.positions(N)`,
            `ContextParallel.positions`, or counted from the start of each packed document.
        head_dim: D, even.
        theta: base of the frequencies, greater than 0. Default: 10000.0.

    Returns:
        cos and sin, `[N,D]` or `[B,N,D]` each, in fp32 on the device of the positions.

    Raises:
        TypeError: for positions that are not a tensor, and for a head_dim that is not an integer.
        ValueError: for an odd head_dim, and for a theta that is not greater than 0.

    Examples:
        >>> import torch
        >>> from nsa import rotary_table
        >>> cos, sin = rotary_table(torch.arange(100), head_dim=16)
        >>> cos.shape, float(sin[0].abs().max())
        (torch.Size([100, 16]), 0.0)
    """
    check_tensor("positions", positions)
    check_integer("head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    if not is_finite(theta) or theta <= 0:
        raise ValueError(f"theta must be finite and greater than 0, got {theta}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
