"""Argument checks for neighborhood attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import (
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_integer,
    check_tensor,
    is_finite,
    is_number,
    warn_of_heads_first,
)

BOUNDARIES = ("truncate", "shift")
LARGEST_OPTION = 2**63 - 1
"""Largest integer option, as PyTorch operators use int64. Windows and dilations beyond N tokens change nothing."""
ALGORITHMS = ("auto", "flash", "band", "dense")
PATHS = ("auto", "sparse", "dense")


@dataclass(frozen=True)
class Window:
    """The options of `neighborhood_attention` that change the result, checked."""

    kernel_size: int
    dilation: int
    softmax_scale: float | None
    boundary: str
    causal: bool

    def __post_init__(self) -> None:
        for name in ("kernel_size", "dilation"):
            check_integer(name, getattr(self, name), 1, LARGEST_OPTION)
        scale = self.softmax_scale
        if scale is not None and not is_number(scale):
            raise TypeError(f"softmax_scale must be a number or None, got {scale!r}")
        if scale is not None and not is_finite(scale):
            raise ValueError(f"softmax_scale must be finite, got {scale}")
        if scale is not None:
            object.__setattr__(self, "softmax_scale", float(scale))
        check_choice("boundary", self.boundary, BOUNDARIES)
        check_bool("causal", self.causal)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the tensors are as `neighborhood_attention` says."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have the layout [B,N,heads,D], got shape {list(tensor.shape)}")
    check_dtype("q", q)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{name} must be {short_name(q.dtype)} (q is {short_name(q.dtype)}), got {short_name(tensor.dtype)}"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    batch, num_tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    if dim == 0 or heads == 0:
        raise ValueError(f"q must have at least one head and D >= 1, got shape {list(q.shape)}")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q must have a multiple of k's H_kv={kv_heads} heads (at least one), got H={heads}")
    for name, tensor, tokens in (("k", k, max(num_tokens, k.shape[1])), ("v", v, k.shape[1])):
        wanted = [batch, tokens, kv_heads, dim]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} must have the shape {wanted}, got {list(tensor.shape)}")
    warn_of_heads_first(q, k)


def keys_until(q: Tensor, k: Tensor, causal: bool, q_start: int | None) -> int:
    """Number of tokens up to the last query, for checked q and k; later keys are ignored.

    Raises:
        TypeError, ValueError: for a `q_start` that is not an integer, is out of range, or is given with causal=False.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    if q_start is None:
        if num_keys != num_queries and not causal:
            raise ValueError(f"causal=False needs as many queries as keys, got N_q={num_queries}, N_k={num_keys}")
        return num_keys
    check_integer("q_start", q_start, 0)
    if not causal:
        raise ValueError(f"q_start goes with causal=True, got causal=False and q_start={q_start}")
    if q_start > num_keys - num_queries:
        most = f"N_k - N_q = {num_keys} - {num_queries} = {num_keys - num_queries}"
        raise ValueError(f"q_start must be from 0 to {most}, got {q_start}")
    return q_start + num_queries


def check_backward_tensors(do: Tensor, attn: Tensor, q: Tensor, num_keys: int, kernel_size: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless do and attn fit a checked q."""
    for name, tensor in (("do", do), ("attn", attn)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    if do.dtype != q.dtype:
        raise TypeError(f"do must be {short_name(q.dtype)} (q is {short_name(q.dtype)}), got {short_name(do.dtype)}")
    if do.shape != q.shape:
        raise ValueError(f"do must have q's shape {list(q.shape)}, got {list(do.shape)}")
    check_dtype("attn", attn)
    batch, num_tokens, heads, _ = q.shape
    band, dense = [batch, heads, num_tokens, kernel_size], [batch, heads, num_tokens, num_keys]
    if list(attn.shape) not in (band, dense):
        raise ValueError(f"attn must be a band {band} or of all pairs {dense}, got shape {list(attn.shape)}")
