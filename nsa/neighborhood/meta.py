"""Neighborhood attention on the meta device: shapes and dtypes, the same for every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.common.meta import empty_result

FORWARD = "nsa.neighborhood.meta:neighborhood_attention"
BACKWARD = "nsa.neighborhood.meta:neighborhood_attention_backward"


def neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int, **_: Any
) -> tuple[Tensor, Tensor, None]:
    """Return out and the band, as backends without a training module do."""
    batch, tokens, heads, _dim = q.shape
    sums = torch.promote_types(q.dtype, torch.float32)
    band = q.new_empty((batch, heads, tokens, kernel_size), dtype=sums)
    return empty_result(q.shape, q.dtype, q, k, v), band, None


def neighborhood_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, as backends do."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
