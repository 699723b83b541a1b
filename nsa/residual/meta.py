"""Attention residual on the meta device: shapes and dtypes, the same for every backend."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa.common.meta import empty_result

FORWARD = "nsa.residual.meta:attention_residual"


def attention_residual(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, *, eps: float
) -> tuple[Tensor]:
    """Return out, as backends without a training module do."""
    sources = [blocks] if isinstance(blocks, Tensor) else list(blocks)
    weights = [w_query] if w_norm is None else [w_query, w_norm]
    return (empty_result(sources[0].shape[-3:], sources[0].dtype, *sources, *weights),)
