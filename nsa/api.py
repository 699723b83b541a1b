"""The public functions: validate, route, run. `nsa`, `nsa_forward` and `nsa_forward_aux` take the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from nsa import autograd, ops
from nsa.common.autocast import autocast_dtype, autocast_off, cast_inputs
from nsa.common.derivatives import refuse_changes, refuse_transforms
from nsa.config import OPTION_NAMES, NSAConfig, NSAOptions, check_options
from nsa.inputs import TENSOR_NAMES, NSAAux, NSAInputs
from nsa.reference import pooled, pooled_entries

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class NSAKeywords(NSAOptions, total=False):
    """All keywords of a call, for type checkers (tests hold it and `_run` together)."""

    w_k_compress: Tensor | None
    w_v_compress: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gate_proj_weight: Tensor | None
    gates: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    deterministic: bool
    recompute: bool
    config: NSAConfig | None
    backend: str | None


def _run(
    want_aux: bool,
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    w_k_compress: Tensor | None = None,
    w_v_compress: Tensor | None = None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    gates: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = False,
    recompute: bool = False,
    config: NSAConfig | None = None,
    backend: str | None = None,
    **options: Unpack[NSAOptions],
) -> tuple[Tensor, NSAAux | None]:
    """Resolve the options, check everything, and hand the call to the backend that takes it."""
    check_options(config, options, NSAKeywords.__annotations__)
    config = config or NSAConfig(**options)
    inputs = NSAInputs(
        q,
        k,
        v,
        w_k_compress=w_k_compress,
        w_v_compress=w_v_compress,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        k_slc=k_slc,
        v_slc=v_slc,
        k_win=k_win,
        v_win=v_win,
        gate_proj_weight=gate_proj_weight,
        gates=gates,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )
    flags: dict[str, Any] = {"deterministic": deterministic, "recompute": recompute, "backend": backend}
    needs_grad = isinstance(q, Tensor) and inputs.needs_grad(config)
    call = ops.resolve(inputs, config, **flags, needs_grad=needs_grad)
    with autocast_off(q.device.type):
        if call.impl.training is not None and config.compress != "mean":
            inputs, config = pooled(inputs, config)
        if call.impl.training is not None and needs_grad:
            return autograd.train(call._replace(inputs=inputs, config=config)), None
        out, aux = call.impl.load()(inputs, config, aux=want_aux)
        out = refuse_changes(out, *inputs.tensors().values())
    return out, NSAAux(*aux) if want_aux else None


def _cast(
    q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]:
    """The arguments as autocast has them."""
    if not isinstance(q, Tensor) or autocast_dtype(q.device.type) is None:
        return q, k, v, keywords
    names = [name for name in TENSOR_NAMES[3:] if name in keywords]
    given = {"q": q, "k": k, "v": v, **{name: keywords[name] for name in names}}
    cast = cast_inputs(given, stay_fp32=("gates", "gate_proj_weight"))
    return cast["q"], cast["k"], cast["v"], {**keywords, **{name: cast[name] for name in names}}


def _recordable(q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords for an operator, which calls nothing: what a callable `compress` does is recorded in front of it."""
    config = keywords.get("config")
    compress = config.compress if isinstance(config, NSAConfig) else keywords.get("compress", "mean")
    if isinstance(compress, str):
        return keywords
    options = {name: value for name, value in keywords.items() if name in OPTION_NAMES}
    check_options(config, options)
    config = config or NSAConfig(**options)
    inputs = NSAInputs(q, k, v, **{name: value for name, value in keywords.items() if name in TENSOR_NAMES})
    inputs.check(config)
    with autocast_off(q.device.type):
        k_cmp, v_cmp = pooled_entries(inputs, config)
    options = {name: getattr(config, name) for name in OPTION_NAMES}
    given = {"k_cmp": k_cmp, "v_cmp": v_cmp, "w_k_compress": None, "w_v_compress": None}
    return {**keywords, **options, "compress": "mean", "config": None, **given}


def _with_signature(function: F) -> F:
    """Show the keywords of `_run` and the options of NSAConfig, with their defaults, in help() and in editors."""
    own = inspect.signature(function)
    run = inspect.signature(_run).parameters
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(NSAConfig).parameters.values()
    ]
    rest = [p for p in run.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [p for p in run.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*positional, *options, *rest])  # type: ignore[attr-defined]
    return function


@_with_signature
def nsa(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> Tensor:
    """Native Sparse Attention (arXiv 2502.11089), differentiable.

    Each query attends to compressed blocks of the past, to the tokens of a few selected blocks and to a sliding
    window; gates weigh the three outputs. See NSAConfig for what each option means and docs/semantics.md for the
    exact definition. Under torch.autocast tensors are cast as those of scaled_dot_product_attention.

    Args:
        q: `[B,N,H,D]`; bf16 or fp16 on a GPU, on the CPU also fp32 and fp64. Packed: `[T,H,D]` with `cu_seqlens`.
        k: `[B,N,H_kv,D]`, q's dtype; H a multiple of H_kv. Packed: `[T,H_kv,D]`.
        v: `[B,N,H_kv,D_v]`. Packed: `[T,H_kv,D_v]`.
        compress_block_size ... debug: the fields of NSAConfig, or all of them in one `config`.
        w_k_compress, w_v_compress: `[H_kv,D,D]` and `[H_kv,D_v,D_v]`, applied to each pooled block (x @ w).
        k_cmp, v_cmp: ready compressed entries `[B,N_cmp,H_kv,D]` and `[...,D_v]`, instead of pooling k and v.
            Packed: document after document, `[entries,H_kv,...]`.
        k_slc, v_slc, k_win, v_win: keys and values of the selected and the window branch. Default: k, v.
        gate_proj_weight: `[H,3,D]`; gates are sigmoid(q . w). q's dtype or fp32.
        gates: `[B,N,H,3]` (compressed, selected, window), used as they are. q's dtype or fp32. With neither: 1/3 each.
        cu_seqlens: int32 `[B+1]`, bounds of packed documents, on q's device. Rows past the last bound give 0.
        max_seqlen: longest document, a hint that never changes the result.
        deterministic: refuse any backend whose backward is not bitwise repeatable.
        recompute: keep less for backward and compute it again. The reference always does.
        backend: "reference", ...; None reads NSA_KERNELS_BACKEND, then takes the first that can run.

    Returns:
        `[B,N,H,D_v]` in q's dtype; packed `[T,H,D_v]`. Rows that see no key in a branch get 0 from it.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before anything is computed.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and their kin, which are not supported.
    """
    refuse_transforms("nsa")
    q, k, v, given = _cast(q, k, v, keywords)
    if torch.compiler.is_compiling():
        return ops.call_saving(q, k, v, **_recordable(q, k, v, given))
    return _run(False, q, k, v, **given)[0]


@_with_signature
def nsa_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> Tensor:
    """`nsa` without a graph: same arguments, same result, nothing kept for backward."""
    refuse_transforms("nsa")
    q, k, v, given = _cast(q, k, v, keywords)
    if torch.compiler.is_compiling():
        return ops.call_forward(q, k, v, **_recordable(q, k, v, given))
    with torch.no_grad():
        return _run(False, q, k, v, **given)[0]


@_with_signature
def nsa_forward_aux(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> tuple[Tensor, NSAAux]:
    """`nsa_forward` with everything computed on the way: `(out, NSAAux)`."""
    refuse_transforms("nsa")
    q, k, v, given = _cast(q, k, v, keywords)
    with torch.no_grad():
        out, aux = _run(True, q, k, v, **given)
    return out, cast("NSAAux", aux)
