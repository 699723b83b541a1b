"""Block-sparse attention on the meta device: shapes and dtypes, the same for every backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.common.meta import empty_result

FORWARD = "nsa.block_sparse.meta:block_sparse_attention"


def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """out, as a backend without a training module returns it."""
    return empty_result((*q.shape[:-1], v.shape[-1]), q.dtype, q, k, v), None
