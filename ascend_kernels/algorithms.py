"""Which kernels a call of neighborhood attention runs, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascend_kernels import band_attention
from ascend_kernels import neighborhood_attention as flash_attention


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, algorithm: str = "flash", keep: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Forward of checked inputs.

    Args:
        algorithm: "flash" or "band".
        keep: whether `backward` will be called, or the band is what the caller wants. "flash" keeps its LSE anyway.

    Returns:
        out, and what `backward` takes: LSE or the band; None for the band without `keep`.
    """
    if algorithm == "band":
        return band_attention.forward(q, k, v, return_band=keep, **options)
    return flash_attention.forward(q, k, v, **options)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Tensor, *, algorithm: str = "flash", **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from what `forward` took and gave, by the same algorithm."""
    if algorithm == "band":
        return band_attention.backward(do, q, k, v, kept, **options)
    return flash_attention.backward(do, q, k, v, out, kept, **options)
