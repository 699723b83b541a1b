"""Neighborhood attention: the public functions, which check their arguments, find a backend and run it."""

from __future__ import annotations

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off, cast_inputs
from nsa.common.checks import check_choice
from nsa.common.derivatives import needs_grad, refuse_transforms
from nsa.common.keywords import ONE_BY_ONE, explain_keywords
from nsa.common.operators import run, runs_as_operator
from nsa.common.resolve import find_impl
from nsa.neighborhood.backward_cache import BackwardCache
from nsa.neighborhood.operators import PATHS, Window, check_backward_tensors, check_tensors, keys_until, resolve, sizes


@explain_keywords(ONE_BY_ONE)
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
    q_start: int | None = None,
    algorithm: str = "auto",
    backend: str | None = None,
) -> Tensor:
    """1-D neighborhood attention, differentiable: each token attends to the `kernel_size` tokens around it.

    The operation is NATTEN's (arXiv 2204.07143, section 3) in one dimension; docs/neighborhood_attention.md has the
    exact definition. Under torch.autocast, q, k and v are cast like those of scaled_dot_product_attention.

    Args:
        q: `[B,N,H,D]`; fp16, bf16 or fp32; on the CPU also fp64.
        k: `[B,N,H_kv,D]`, q's dtype; H a multiple of H_kv.
        v: as k.
        kernel_size: keys of a window, at least 1. Offsets are -(k//2) ... k//2 for an odd one and -k/2 ... k/2 - 1
            for an even one, times `dilation`. Default: 7.
        dilation: distance between neighbors in tokens, at least 1. Default: 1.
        softmax_scale: factor of the logits. Default: None, which means 1/sqrt(D).
        boundary: "truncate" drops neighbors before the first or after the last token; "shift" moves the window inside,
            so that every query has min(kernel_size, tokens of its residue class modulo dilation) keys, as in NATTEN.
            Default: "truncate".
        causal: keys i - (kernel_size - 1) * dilation ... i, truncated at the start whatever the boundary.
            Default: False.
        q_start: token index of the first query, 0 to N_k - N_q, if there are more keys `[B,N_k,H_kv,D]` than queries:
            out holds the rows of these tokens, and keys after the last query are ignored. Requires `causal=True`.
            Default: None, which means N_k - N_q.
        algorithm: "flash" recomputes probabilities in backward, in memory that is linear in the inputs. "band" saves
            probabilities `[B,H,N,kernel_size]` in fp32 for backward, and without gradients works in chunks of batch
            elements; its backward is `neighborhood_attention_backward` with path "auto". "dense" is "band" with path
            "dense" in backward. The reference has one algorithm and accepts any name. Default: "auto", which is
            "flash".
        backend: "cute", "triton", "ascend" or "reference"; "cute" is FlashAttention-4: 16-bit types, D of 64 or 128, no
            shifted windows. Default: None, which means NSA_KERNELS_BACKEND if set, else the first that supports the
            call.

    Returns:
        `[B,N,H,D]` in q's dtype.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed;
            algorithm="dense" beyond the limits of its backward, if gradients are needed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from nsa import neighborhood_attention
        >>> q, k, v = (torch.randn(1, 20, 4, 16) for _ in range(3))
        >>> neighborhood_attention(q, k, v, kernel_size=5).shape
        torch.Size([1, 20, 4, 16])
    """
    refuse_transforms("neighborhood_attention")
    q, k, v = cast_inputs({"q": q, "k": k, "v": v}).values()
    if runs_as_operator(q):
        k, v = _until_last_query(q, k, v, causal, q_start)
        options = kernel_size, dilation, softmax_scale, boundary, causal, algorithm, backend
        out: Tensor = torch.ops.nsa_kernels.neighborhood_attention(q, k, v, *options, needs_grad(q, k, v))[0]
        return out
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    k, v = _until_last_query(q, k, v, causal, q_start)
    return run(resolve(q, k, v, window, algorithm=algorithm, backend=backend))


def _until_last_query(q: Tensor, k: Tensor, v: Tensor, causal: bool, q_start: int | None) -> tuple[Tensor, Tensor]:
    """Return k and v without the tokens after the last query; with a q_start, check all these arguments."""
    if q_start is None:
        return k, v
    check_tensors(q, k, v)
    stop = keys_until(q, k, causal, q_start)
    return (k, v) if stop == k.shape[1] else (k[:, :stop], v[:, :stop])


@explain_keywords(ONE_BY_ONE)
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
    q_start: int | None = None,
    algorithm: str = "auto",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`neighborhood_attention` without an autograd graph, and its probabilities.

    Args:
        q: `[B,N,H,D]`; fp16, bf16 or fp32; on the CPU also fp64.
        k: `[B,N,H_kv,D]`, q's dtype; H a multiple of H_kv.
        v: as k.
        kernel_size: keys of a window, at least 1. Offsets are -(k//2) ... k//2 for an odd one and -k/2 ... k/2 - 1
            for an even one, times `dilation`. Default: 7.
        dilation: distance between neighbors in tokens, at least 1. Default: 1.
        softmax_scale: factor of the logits. Default: None, which means 1/sqrt(D).
        boundary: "truncate" drops neighbors before the first or after the last token; "shift" moves the window inside,
            so that every query has min(kernel_size, tokens of its residue class modulo dilation) keys, as in NATTEN.
            Default: "truncate".
        causal: keys i - (kernel_size - 1) * dilation ... i, truncated at the start whatever the boundary.
            Default: False.
        q_start: token index of the first query, 0 to N_k - N_q, if there are more keys `[B,N_k,H_kv,D]` than queries:
            out holds the rows of these tokens, and keys after the last query are ignored. Requires `causal=True`.
            Default: None, which means N_k - N_q.
        algorithm: checked but otherwise ignored: probabilities are those of "band". Default: "auto".
        backend: as in `neighborhood_attention`. Default: None.

    Returns:
        out `[B,N,H,D]` in q's dtype, and the band of probabilities `[B,H,N,kernel_size]` in fp32 (fp64 for fp64
        inputs). Slot s of a row is the key s * dilation after the window's start, or 0 if there is no such key. With
        "shift", slot 0 is the start of the shifted window.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from dispatch import neighborhood_attention_forward
        >>> q, k, v = (torch.randn(1, 20, 4, 16) for _ in range(3))
        >>> out, band = neighborhood_attention_forward(q, k, v, kernel_size=5)
        >>> band.shape, bool((band.sum(-1) - 1).abs().max() < 1e-5)
        (torch.Size([1, 4, 20, 5]), True)
    """
    refuse_transforms("neighborhood_attention")
    q, k, v = cast_inputs({"q": q, "k": k, "v": v}).values()
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    with torch.no_grad(), autocast_off(q.device.type if isinstance(q, Tensor) else "cpu"):
        k, v = _until_last_query(q, k, v, causal, q_start)
        call = resolve(q, k, v, window, algorithm=algorithm, backend=backend, band=True, deterministic=False)
        if q.device.type == "meta":
            band_shape = q.shape[0], q.shape[2], q.shape[1], kernel_size
            return call.empty()[0], q.new_empty(band_shape, dtype=torch.promote_types(q.dtype, torch.float32))
        out, band, *_ = call.impl.load()(q, k, v, **call.forward_options)
    return out, band


@explain_keywords(ONE_BY_ONE)
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
    q_start: int | None = None,
    path: str = "auto",
    cache: BackwardCache | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `neighborhood_attention` from its probabilities, without an autograd graph.

    Args:
        do: gradient of out, `[B,N,H,D]` in q's dtype.
        q: as in the forward, `[B,N,H,D]`.
        k: as in the forward, `[B,N,H_kv,D]`.
        v: as k.
        attn: probabilities in any floating dtype, cast to fp32 (fp64 for fp64 inputs): the band `[B,H,N,kernel_size]`
            of `neighborhood_attention_forward`, or those of all pairs `[B,H,N,N_k]`, with keys up to the last query,
            which must be 0 outside of the windows. If kernel_size == N_k it is interpreted as a band; to pass all
            pairs, use a larger kernel_size, since their zeros mark the keys outside of windows.
        kernel_size: keys of a window, at least 1. Offsets are -(k//2) ... k//2 for an odd one and -k/2 ... k/2 - 1
            for an even one, times `dilation`. Default: 7.
        dilation: distance between neighbors in tokens, at least 1. Default: 1.
        softmax_scale: factor of the logits. Default: None, which means 1/sqrt(D).
        boundary: "truncate" drops neighbors before the first or after the last token; "shift" moves the window inside,
            so that every query has min(kernel_size, tokens of its residue class modulo dilation) keys, as in NATTEN.
            Default: "truncate".
        causal: keys i - (kernel_size - 1) * dilation ... i, truncated at the start whatever the boundary.
            Default: False.
        q_start: token index of the first query, 0 to N_k - N_q, if there are more keys `[B,N_k,H_kv,D]` than queries:
            out holds the rows of these tokens, and keys after the last query are ignored. Requires `causal=True`.
            Default: None, which means N_k - N_q.
        path: "dense" multiplies matrices of all pairs, for N <= 2048 and if one key head with its query heads fits a
            workspace of max(512 MiB, 18 % of the device's memory) and a grid of 65535 programs. "sparse" works on the
            band. Both process as many heads and batch elements at a time as fit that workspace. The reference has one
            path and accepts any name. Default: "auto", which is dense within these limits and sparse beyond.
        cache: a BackwardCache that returns the gradients of an unchanged call without recomputing them. Default: None.
        backend: "triton", "ascend" or "reference". Default: None, as in `neighborhood_attention`.

    Returns:
        dq, dk, dv in q's dtype, with the shapes of q, k, v.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed;
            path="dense" beyond its limits.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func.

    Examples:
        >>> import torch
        >>> from dispatch import neighborhood_attention_backward, neighborhood_attention_forward
        >>> q, k, v = (torch.randn(1, 20, 4, 16) for _ in range(3))
        >>> out, band = neighborhood_attention_forward(q, k, v, kernel_size=5)
        >>> dq, dk, dv = neighborhood_attention_backward(torch.ones_like(out), q, k, v, band, kernel_size=5)
        >>> dq.shape
        torch.Size([1, 20, 4, 16])
    """
    refuse_transforms("neighborhood_attention_backward")
    window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
    check_choice("path", path, PATHS)
    if cache is not None and not isinstance(cache, BackwardCache):
        raise TypeError(f"cache must be a BackwardCache or None, got {type(cache).__name__}")
    check_tensors(q, k, v)
    given, num_keys, stop = (do, q, k, v, attn), k.shape[1], keys_until(q, k, causal, q_start)
    check_backward_tensors(do, attn, q, stop, kernel_size)
    k, v = (x if stop == num_keys else x[:, :stop] for x in (k, v))
    options = {**vars(window), "path": path, "band": True, **sizes(q, k)}
    call = dispatch.Call("neighborhood_attention_backward", q.device, q.dtype, backward=True, options=options)
    impl = find_impl(call, backend)
    backend_keyword = {} if impl.backend == "reference" else {"backend": impl.backend}

    def compute() -> tuple[Tensor, ...]:
        with torch.no_grad(), autocast_off(q.device.type):
            if q.device.type == "meta":
                dq, *dkv = (x.new_empty(x.shape) for x in (q, k, v))
            else:
                dq, *dkv = impl.load()(do, q, k, v, attn, **vars(window), path=path, **backend_keyword)
            behind = [0, 0, 0, 0, 0, num_keys - stop]
            return (dq, *(x if stop == num_keys else torch.nn.functional.pad(x, behind) for x in dkv))

    if cache is None:
        dq, dk, dv = compute()
    else:
        dq, dk, dv = cache.gradients(given, (window, q_start, path, impl.backend), compute)
    return dq, dk, dv
