"""Choice of kernels for a call of neighborhood attention, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_kernels.neighborhood import backward as attention_backward
from ascend_kernels.neighborhood import band, flash


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, algorithm: str = "flash", keep: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Forward of checked inputs.

    Args:
        algorithm: "flash", "band" or "dense", which is the band with another backward.
        keep: True if the caller needs the band, for `backward` or itself. "flash" returns its statistics in any case.
        options: kernel_size, dilation, softmax_scale, boundary, causal, backend.

    Returns:
        out, and the input of `backward`: statistics of rows, or the band; None instead of the band without `keep`.

    Raises:
        ValueError: for algorithm "dense" if its backward would exceed its limits.
    """
    if algorithm == "dense" and keep:
        refusal = attention_backward.dense_refusal(q, k, backend=options["backend"])
        if refusal is not None:
            raise ValueError(f"algorithm='dense' {refusal}")
    if algorithm != "flash":
        return band.forward(q, k, v, return_band=keep, **options)
    return flash.forward(q, k, v, **options)


def kept_like(q: Tensor, k: Tensor, v: Tensor, *, algorithm: str = "flash", **options: Any) -> Tensor:
    """An uninitialised tensor like the second result of `forward`."""
    if algorithm != "flash":
        batch, num_tokens, heads, _ = q.shape
        return q.new_empty((batch, heads, num_tokens, options["kernel_size"]), dtype=torch.float32)
    return flash.kept_like(q, k, v, **options)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: Tensor,
    *,
    algorithm: str = "flash",
    deterministic: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the inputs and results of `forward`; for "band" by either path of neighborhood/backward.py.

    Args:
        deterministic: ignored, since all kernels sum in a fixed order.
    """
    if algorithm != "flash":
        path = "dense" if algorithm == "dense" else "auto"
        return attention_backward.backward(do, q, k, v, kept, **options, path=path)
    return flash.backward(do, q, k, v, out, kept, **options)
