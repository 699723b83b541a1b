"""Neighborhood attention: the public functions. Validate, route, differentiate; backends compute."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.backward_cache import BackwardCache
from nsa.derivatives import without_second
from nsa.ops import autocast_off

BOUNDARIES = ("truncate", "shift")
ALGORITHMS = ("auto", "flash", "band", "dense")
PATHS = ("auto", "sparse", "dense")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    softmax_scale: float | None = None,
    boundary: str = "truncate",
    causal: bool = False,
    algorithm: str = "auto",
    backend: str | None = None,
) -> Tensor:
    """1-D neighborhood attention, differentiable: each token attends to the `kernel_size` tokens around it.

    Args:
        q: `[B,N,H,D]`; fp16, bf16 or fp32, on the CPU also fp64.
        k, v: `[B,N,H_kv,D]`, q's dtype; H a multiple of H_kv.
        kernel_size: keys in a window, at least 1. Offsets are -(k//2) ... k//2 for an odd one and -k/2 ... k/2 - 1
            for an even one, times `dilation`.
        dilation: distance between neighbors, at least 1.
        softmax_scale: None means 1/sqrt(D).
        boundary: "truncate" drops neighbors before the first or after the last token; "shift" moves the window inside,
            so that every query has min(kernel_size, tokens of its residue class modulo dilation) keys, as in NATTEN.
        causal: keys i - (kernel_size - 1) * dilation ... i, truncated at the start whatever the boundary.
        algorithm: "flash" recomputes probabilities in backward, memory is that of the inputs; "band" computes
            `[B,H,N,kernel_size]` of them in fp32, keeps them for backward, and without gradients takes batch elements
            in chunks; its backward is that of `neighborhood_attention_backward` with path "auto", and that of "dense"
            with path "dense". "auto" is "flash". The reference has one algorithm and takes any name.
        backend: "cute", "triton", "ascend" or "reference"; None reads NSA_KERNELS_BACKEND, then takes the first that
            can run. "cute" is FlashAttention-4: 16-bit types, D of 64 or 128, no shifted windows.

    Returns:
        `[B,N,H,D]` in q's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before anything is computed; so
            algorithm="dense" beyond the limits of its backward, where there will be one.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
    """
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    impl = _resolve(q, k, v, window, algorithm, backend, band=False)
    with autocast_off(q.device.type):
        if impl.training is None:
            out: Tensor = impl.load()(q, k, v, **asdict(window), return_band=False)[0]
            return out
        options = {**asdict(window), "backend": impl.backend}
        if algorithm in ("band", "dense"):
            options["algorithm"] = algorithm
            if not _needs_grad(q, k, v):
                out = impl.load()(q, k, v, **options, keep=False)[0]
                return out
        result: Tensor = _Trained.apply(q, k, v, impl, options)
        return result


def neighborhood_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    softmax_scale: float | None = None,
    boundary: str = "truncate",
    causal: bool = False,
    algorithm: str = "auto",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`neighborhood_attention` without a graph, and its probabilities.

    Returns:
        out, and the band `[B,H,N,kernel_size]` in fp32 (fp64 for fp64 inputs): slot s is the key s * dilation after the
        window's start, and 0 where there is no such key. With "shift", slot 0 is the start of the moved window.
    """
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    with torch.no_grad(), autocast_off(q.device.type if isinstance(q, Tensor) else "cpu"):
        impl = _resolve(q, k, v, window, algorithm, backend, band=True)
        if impl.training is None:
            out, band, _ = impl.load()(q, k, v, **asdict(window))
        else:
            out, band = impl.load()(q, k, v, **asdict(window), backend=impl.backend, algorithm="band")
    return out, band


def neighborhood_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    softmax_scale: float | None = None,
    boundary: str = "truncate",
    causal: bool = False,
    path: str = "auto",
    cache: BackwardCache | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `neighborhood_attention` from its probabilities, without a graph.

    Args:
        do: the gradient of out, `[B,N,H,D]` in q's dtype.
        q, k, v, kernel_size, dilation, softmax_scale, boundary, causal, backend: as in the forward.
        attn: probabilities in any floating dtype, taken as fp32 (fp64 for fp64 inputs): the band
            `[B,H,N,kernel_size]` that `neighborhood_attention_forward` gives, or all pairs `[B,H,N,N]`, which must be
            0 outside of the windows. Where kernel_size == N it is taken for a band; all pairs can then be given with a
            larger kernel_size, since their zeros say which keys there were.
        path: "dense" multiplies matrices of all pairs, for N <= 2048 and while one key head with its query heads fits
            a workspace of max(512 MiB, 18 % of the device's memory) and a grid of 65535 programs; "sparse" works on
            the band; "auto" is dense within these limits, and sparse beyond. Both do as many heads and batch elements
            at a time as fit that workspace. The reference has one way and takes any name.
        cache: gives the gradients of an unchanged call again without computing them.

    Returns:
        dq, dk, dv in q's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before anything is computed; so
            path="dense" beyond its limits.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
    """
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    check_choice("path", path, PATHS)
    if cache is not None and not isinstance(cache, BackwardCache):
        raise TypeError(f"cache must be a BackwardCache or None, got {type(cache).__name__}")
    _check_tensors(q, k, v)
    _check_backward_tensors(do, attn, q, kernel_size)
    options = {**asdict(window), "path": path, "band": True, "shape": tuple(q.shape)}
    call = dispatch.Call("neighborhood_attention_backward", q.device, q.dtype, backward=True, options=options)
    impl = dispatch.resolve(call, backend)
    named = {} if impl.backend == "reference" else {"backend": impl.backend}

    def compute() -> tuple[Tensor, ...]:
        with torch.no_grad(), autocast_off(q.device.type):
            result: tuple[Tensor, ...] = impl.load()(do, q, k, v, attn, **asdict(window), path=path, **named)
            return result

    if cache is None:
        dq, dk, dv = compute()
    else:
        dq, dk, dv = cache.gradients((do, q, k, v, attn), (window, path, impl.backend), compute)
    return dq, dk, dv


@dataclass(frozen=True)
class Window:
    """The options that change the result, checked."""

    kernel_size: int
    dilation: int
    softmax_scale: float | None
    boundary: str
    causal: bool

    def __post_init__(self) -> None:
        for name in ("kernel_size", "dilation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        scale = self.softmax_scale
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real)):
            raise TypeError(f"softmax_scale must be a number or None, got {scale!r}")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"softmax_scale must be finite, got {scale}")
        check_choice("boundary", self.boundary, BOUNDARIES)
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have the layout [B,N,heads,D], got shape {list(tensor.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be bfloat16, float16, float32 or float64, got {_short(q.dtype)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must be {_short(q.dtype)} (q is {_short(q.dtype)}), got {_short(tensor.dtype)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    batch, num_tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    if dim == 0 or heads == 0:
        raise ValueError(f"q must have at least one head and D >= 1, got shape {list(q.shape)}")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q must have a multiple of k's H_kv={kv_heads} heads (at least one), got H={heads}")
    for name, tensor in (("k", k), ("v", v)):
        wanted = [batch, num_tokens, kv_heads, dim]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} must have the shape {wanted}, got {list(tensor.shape)}")


def _check_backward_tensors(do: Tensor, attn: Tensor, q: Tensor, kernel_size: int) -> None:
    for name, tensor in (("do", do), ("attn", attn)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    if do.dtype != q.dtype:
        raise TypeError(f"do must be {_short(q.dtype)} (q is {_short(q.dtype)}), got {_short(do.dtype)}")
    if do.shape != q.shape:
        raise ValueError(f"do must have q's shape {list(q.shape)}, got {list(do.shape)}")
    if attn.dtype not in DTYPES:
        raise TypeError(f"attn must be bfloat16, float16, float32 or float64, got {_short(attn.dtype)}")
    batch, num_tokens, heads, _ = q.shape
    band, dense = [batch, heads, num_tokens, kernel_size], [batch, heads, num_tokens, num_tokens]
    if list(attn.shape) not in (band, dense):
        raise ValueError(f"attn must be a band {band} or of all pairs {dense}, got shape {list(attn.shape)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _resolve(
    q: Tensor, k: Tensor, v: Tensor, window: Window, algorithm: str, backend: str | None, *, band: bool
) -> dispatch.Impl:
    """Check everything and find the backend that takes the call."""
    check_choice("algorithm", algorithm, ALGORITHMS)
    _check_tensors(q, k, v)
    options = {**asdict(window), "algorithm": algorithm, "band": band, "shape": tuple(q.shape)}
    call = dispatch.Call("neighborhood_attention", q.device, q.dtype, backward=_needs_grad(q, k, v), options=options)
    return dispatch.resolve(call, backend)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Trained(torch.autograd.Function):
    """A backend with a backward of its own: `forward` and `backward` of the module that its row names."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, impl: dispatch.Impl, options: dict[str, Any]) -> Tensor:
        out: Tensor
        out, kept = impl.load()(q, k, v, **options)
        ctx.impl, ctx.options = impl, options
        ctx.save_for_backward(q, k, v, out, kept)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:3]
        with torch.no_grad(), autocast_off(do.device.type):
            gradients = list(ctx.impl.load_training().backward(do, *ctx.saved_tensors, **ctx.options))
        return (*without_second("neighborhood_attention", gradients, do, *inputs), None, None)
