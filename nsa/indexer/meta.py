"""Selection by an indexer on the meta device: shape and dtype, the same for every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORWARD = "nsa.indexer.meta:top_blocks_by_max"


def top_blocks_by_max(q_idx: Tensor, k_idx: Tensor, *_: Any, k: int, **__: Any) -> Tensor:
    """Indices, as a backend returns them."""
    *batch, tokens, heads, _dim = q_idx.shape
    return q_idx.new_empty((*batch, heads, tokens, k), dtype=torch.int32)
