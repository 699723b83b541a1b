"""Neighborhood attention: its checks, its calls, and their operators (see nsa/common/operators.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import dispatch
from dispatch.registry import short_name
from nsa.common.checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_integer,
    check_tensor,
    is_finite,
    is_number,
    warn_of_heads_first,
)
from nsa.common.derivatives import determinism_is_asked_for, needs_grad
from nsa.common.operators import ResolvedCall, register_backward, register_forward
from nsa.common.resolve import find_impl

BOUNDARIES = ("truncate", "shift")
ALGORITHMS = ("auto", "flash", "band", "dense")
PATHS = ("auto", "sparse", "dense")
LARGEST_OPTION = 2**63 - 1
"""Largest integer option, as PyTorch operators use int64. Windows and dilations beyond N tokens change nothing."""

_OPTIONS = (
    "int kernel_size, int dilation, float? softmax_scale, str boundary, bool causal, str algorithm, str? backend, "
    "bool backward"
)
FORWARD = "nsa_kernels::neighborhood_attention", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::neighborhood_attention_backward",
    f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor saved, {_OPTIONS}, bool deterministic) -> "
    "(Tensor, Tensor, Tensor)",
)


# Checks


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
    """Number of tokens up to the last query, for checked q and k; later keys are ignored. Checks `q_start`, too."""
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
        check_tensor(name, tensor)
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


# Calls


class NeighborhoodCall(ResolvedCall):
    """q, k and v; the options of a Window, `deterministic`, and those of the backend."""

    op = "neighborhood_attention"

    @property
    def forward_options(self) -> dict[str, Any]:
        return {name: option for name, option in self.options.items() if name != "deterministic"}

    def forward(self) -> Tensor:
        options = self.forward_options
        if "algorithm" in options:
            options["keep"] = False
        out: Tensor = self.impl.load()(*self.tensors, **options)[0]
        return out


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    algorithm: str,
    backend: str | None,
    band: bool = False,
    backward: bool | None = None,
    deterministic: bool | None = None,
) -> NeighborhoodCall:
    """Check all arguments and find a backend that supports the call.

    Args:
        band: True if probabilities are also returned.
        backward: True if gradients are needed. Default: None, which means if a tensor requires them.
        deterministic: True if gradients must be bitwise repeatable. Default: None, which means PyTorch's flag.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_tensors(q, k, v)
    keys_until(q, k, window.causal, None)
    options = dict(vars(window))
    deterministic = determinism_is_asked_for() if deterministic is None else deterministic
    facts = {**options, "algorithm": algorithm, "band": band, "deterministic": deterministic, **sizes(q, k)}
    backward = needs_grad(q, k, v) if backward is None else backward
    impl = find_impl(dispatch.Call("neighborhood_attention", q.device, q.dtype, backward, options=facts), backend)
    if impl.training is None:
        options["return_band"] = band
    else:
        options |= {"backend": impl.backend, "deterministic": deterministic}
        if band or algorithm in ("band", "dense"):
            options["algorithm"] = "band" if band else algorithm
    return NeighborhoodCall(impl, backward, (q, k, v), options)


def sizes(q: Tensor, k: Tensor) -> dict[str, object]:
    """Options of dispatch.Call: `shape` `[B,N_k,H,D]`, and `first_token`, the token index of the first query."""
    return {"shape": (q.shape[0], k.shape[1], *q.shape[2:]), "first_token": k.shape[1] - q.shape[1]}


def _resolve(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> NeighborhoodCall:
    window = Window(**{name: options.pop(name) for name in Window.__match_args__})
    return resolve(q, k, v, window, **options)


register_forward(*FORWARD, _resolve)
register_backward("neighborhood_attention", FORWARD, BACKWARD, _resolve, ("q", "k", "v"))
