"""Neighborhood attention: the public functions. Validate, route, differentiate; backends compute."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa import meta
from nsa.common.autocast import autocast_off, cast_inputs
from nsa.common.derivatives import forbid_double_backward, refuse_changes, refuse_transforms
from nsa.neighborhood.cache import BackwardCache
from nsa.neighborhood.ops import call_forward
from nsa.neighborhood.validate import (
    PATHS,
    Window,
    check_backward_tensors,
    check_choice,
    check_tensors,
    needs_grad,
    resolve,
)


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

    Under torch.autocast q, k and v are cast as those of scaled_dot_product_attention.

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
        RuntimeError: inside torch.func.grad, torch.vmap and their kin, which are not supported.
    """
    refuse_transforms("neighborhood_attention")
    q, k, v = cast_inputs({"q": q, "k": k, "v": v}).values()
    if torch.compiler.is_compiling():
        return call_forward(q, k, v, kernel_size, dilation, softmax_scale, boundary, causal, algorithm, backend)
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    impl = resolve(q, k, v, window, algorithm, backend, band=False)
    with autocast_off(q.device.type):
        if impl.training is None:
            out: Tensor = impl.load()(q, k, v, **asdict(window), return_band=False)[0]
            return refuse_changes(out, q, k, v)
        options = {**asdict(window), "backend": impl.backend}
        if algorithm in ("band", "dense"):
            options["algorithm"] = algorithm
            if not needs_grad(q, k, v):
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
    refuse_transforms("neighborhood_attention")
    q, k, v = cast_inputs({"q": q, "k": k, "v": v}).values()
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    with torch.no_grad(), autocast_off(q.device.type if isinstance(q, Tensor) else "cpu"):
        impl = resolve(q, k, v, window, algorithm, backend, band=True)
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
        RuntimeError: inside torch.func.grad, torch.vmap and their kin, which are not supported.
    """
    refuse_transforms("neighborhood_attention_backward")
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    check_choice("path", path, PATHS)
    if cache is not None and not isinstance(cache, BackwardCache):
        raise TypeError(f"cache must be a BackwardCache or None, got {type(cache).__name__}")
    check_tensors(q, k, v)
    check_backward_tensors(do, attn, q, kernel_size)
    options = {**asdict(window), "path": path, "band": True, "shape": tuple(q.shape)}
    call = dispatch.Call("neighborhood_attention_backward", q.device, q.dtype, backward=True, options=options)
    impl = meta.resolve(call, backend)
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
        return (*forbid_double_backward("neighborhood_attention", gradients, do, *inputs), None, None)
