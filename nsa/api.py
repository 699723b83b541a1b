"""NSA: the public functions check their arguments, find a backend and run it.

`nsa`, `nsa_forward` and `nsa_forward_aux` take the same arguments, which are documented once: options at NSAConfig, all
others at `nsa`. `_with_shared_arguments` completes each function's signature and docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from nsa import ops
from nsa.autograd import run_with_backward
from nsa.common.autocast import autocast_dtype, autocast_off, cast_inputs
from nsa.common.derivatives import (
    guard_inplace_changes,
    needs_grad,
    refuse_forward_mode,
    refuse_transforms,
    without_second_derivatives,
)
from nsa.common.operators import runs_as_operator
from nsa.config import DEFAULT_CONFIG, OPTION_NAMES, NSAConfig, NSAOptions, check_options
from nsa.inputs import TENSOR_NAMES, NSAAux, NSAInputs
from nsa.reference import compressed_entries, with_compressed_entries
from nsa.validate import resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class NSAKeywords(NSAOptions, total=False):
    """All keywords of a call, for type checkers (a test compares it with `_run`)."""

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
    cu_seqlens_k: Tensor | None
    q_start: int | Tensor | None
    q_sum: Tensor | None
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
    cu_seqlens_k: Tensor | None = None,
    q_start: int | Tensor | None = None,
    q_sum: Tensor | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = False,
    recompute: bool = False,
    config: NSAConfig | None = None,
    backend: str | None = None,
    **options: Unpack[NSAOptions],
) -> tuple[Tensor, NSAAux | None]:
    """Resolve the options, check everything, and hand the call to the backend that takes it."""
    check_options(config, options, NSAKeywords.__annotations__)
    config = config or (NSAConfig(**options) if options else DEFAULT_CONFIG)
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
        cu_seqlens_k=cu_seqlens_k,
        q_start=q_start,
        q_sum=q_sum,
        max_seqlen=max_seqlen,
    )
    refuse_forward_mode("nsa", *vars(inputs).values())
    flags: dict[str, Any] = {"deterministic": deterministic, "recompute": recompute, "backend": backend}
    needs_grad = isinstance(q, Tensor) and inputs.needs_grad(config)
    call = resolve(inputs, config, **flags, needs_grad=needs_grad)
    inputs = call.inputs
    with autocast_off(q.device.type):
        if call.impl.training is not None and config.compress != "mean":
            inputs, config = with_compressed_entries(inputs, config)
        if call.impl.training is not None and needs_grad:
            return run_with_backward(call._replace(inputs=inputs, config=config)), None
        given = inputs.map(partial(without_second_derivatives, "nsa")) if needs_grad else inputs
        out, aux = call.impl.load()(given, config, aux=want_aux)
        out = guard_inplace_changes(out, *inputs.tensors().values())
    return out, NSAAux(*aux) if want_aux else None


def cast_arguments(
    q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]:
    """The arguments, cast as autocast casts those of attention."""
    if not isinstance(q, Tensor) or autocast_dtype(q.device.type) is None:
        return q, k, v, keywords
    names = [name for name in TENSOR_NAMES[3:] if name in keywords]
    tensors = {"q": q, "k": k, "v": v, **{name: keywords[name] for name in names}}
    cast = cast_inputs(tensors, stay_fp32=("gates", "gate_proj_weight", "q_sum"))
    return cast["q"], cast["k"], cast["v"], {**keywords, **{name: cast[name] for name in names}}


def _for_operator(
    q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]:
    """The arguments as an operator takes them.

    An integer q_start cuts the keys here. A callable `compress` runs here and becomes k_cmp and v_cmp.
    """
    config = keywords.get("config")
    compress = config.compress if isinstance(config, NSAConfig) else keywords.get("compress", "mean")
    start = keywords.get("q_start")
    if isinstance(compress, str) and (start is None or isinstance(start, Tensor)):
        return q, k, v, keywords
    options = {name: value for name, value in keywords.items() if name in OPTION_NAMES}
    check_options(config, options)
    config = config or NSAConfig(**options)
    inputs = NSAInputs(q, k, v, **{name: value for name, value in keywords.items() if name in TENSOR_NAMES})
    inputs.check(config)
    inputs = inputs.narrow(config)
    changed = {name: getattr(inputs, name) for name in TENSOR_NAMES[3:]}
    if not isinstance(compress, str):
        with autocast_off(q.device.type):
            k_cmp, v_cmp = compressed_entries(inputs, config)
        # By `update`: Dynamo of torch 2.6 does not know `|` of dictionaries
        changed.update({"k_cmp": k_cmp, "v_cmp": v_cmp, "w_k_compress": None, "w_v_compress": None})
        changed.update({name: getattr(config, name) for name in OPTION_NAMES})
        changed.update({"compress": "mean", "config": None})
    return inputs.q, inputs.k, inputs.v, {**keywords, **changed}


def _with_shared_arguments(function: F) -> F:
    """Complete the signature and the docstring for help(), editors and documentation.

    The signature gets the keywords of `_run` and the options of NSAConfig with their defaults. In the docstring's Args,
    the options go between `v` and `w_k_compress`; a docstring without Args takes those of `nsa`.
    """
    own = inspect.signature(function)
    run = inspect.signature(_run).parameters
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(NSAConfig).parameters.values()
    ]
    keywords = [p for p in run.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [p for p in run.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*positional, *options, *keywords])  # type: ignore[attr-defined]
    if function.__doc__ and NSAConfig.__doc__:  # None under python -OO
        doc = inspect.cleandoc(function.__doc__)
        if "Args:\n" in doc:
            first_keyword = "    w_k_compress:"
            doc = doc.replace(first_keyword, f"{_args_section(NSAConfig.__doc__)}\n{first_keyword}", 1)
        else:
            doc = doc.replace("Returns:\n", f"Args:\n{_args_section(str(nsa.__doc__))}\n\nReturns:\n", 1)
        function.__doc__ = doc
    return function


def _args_section(doc: str) -> str:
    """The lines of a docstring's Args section below its heading."""
    return inspect.cleandoc(doc).partition("Args:\n")[2].partition("\n\n")[0]


@_with_shared_arguments
def nsa(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> Tensor:
    """Native Sparse Attention (arXiv 2502.11089), differentiable.

    Each query attends to compressed blocks of the past, to the tokens of a few selected blocks and to a sliding
    window; gates weigh the three outputs (equation 5 of the paper; the exact definition is in docs/semantics.md).
    The options are keywords, or all in one `config`. The defaults, `NSAConfig.per_tile()`, select once per 256 tokens
    and look ahead inside such a tile; `config=NSAConfig.paper()` is autoregressive.

    Under torch.autocast tensors are cast as those of scaled_dot_product_attention.

    Args:
        q: queries `[B,N,H,D]`; bf16 or fp16 on a GPU, on the CPU also fp32 and fp64. Packed: `[T,H,D]` with
            `cu_seqlens`.
        k: keys `[B,N,H_kv,D]`, in q's dtype; H a multiple of H_kv. Packed: `[T,H_kv,D]`. More tokens than queries where
            the queries continue a sequence (`q_start`).
        v: values `[B,N,H_kv,D_v]`, in q's dtype. Packed: `[T,H_kv,D_v]`.
        w_k_compress: projection `[H_kv,D,D]` of each pooled key (x @ w). Default: None, which means none.
        w_v_compress: projection `[H_kv,D_v,D_v]` of each pooled value. Default: None, which means none.
        k_cmp: compressed keys `[B,N_cmp,H_kv,D]`, instead of pooling k; with `v_cmp`. Packed: document after document,
            `[entries,H_kv,D]`. Default: None.
        v_cmp: compressed values `[B,N_cmp,H_kv,D_v]`, instead of pooling v; with `k_cmp`. Default: None.
        k_slc: keys of the selected branch, of k's shape; with `v_slc`. Default: None, which means k.
        v_slc: values of the selected branch, of v's shape; with `k_slc`. Default: None, which means v.
        k_win: keys of the window branch, of k's shape; with `v_win`. Default: None, which means k.
        v_win: values of the window branch, of v's shape; with `k_win`. Default: None, which means v.
        gate_proj_weight: `[H,3,D]` in q's dtype or fp32; gates are sigmoid(q . w). Default: None.
        gates: `[B,N,H,3]` (compressed, selected, window) in q's dtype or fp32, used as they are. Packed: `[T,H,3]`.
            Default: None; without gates and `gate_proj_weight` each branch weighs 1/3.
        cu_seqlens: bounds of packed documents, int32 `[B+1]` on q's device. Rows past the last bound give 0.
            Default: None.
        cu_seqlens_k: bounds of the documents' keys, int32 `[B+1]`, where documents have more keys than queries; q is
            then `[T_q,...]`, k and v `[T_k,...]`. Default: None, which means `cu_seqlens`.
        q_start: the token that the first query is, 0 to N_k - N_q: out holds rows q_start ... q_start + N_q - 1 of the
            call with as many queries as keys, and keys behind the last query do not exist. An integer, or int32 `[B]`
            on q's device, one for each sequence or document. Needs `causal=True`. Default: None, which means N_k - N_q.
        q_sum: the sum of the queries of q_start's tile before q_start, `[B,H,D]` fp32 (fp64 with fp64 inputs); not
            differentiated. Needed where q_start is no multiple of `q_tile_size`. Default: None.
        max_seqlen: keys of the longest document, a hint that never changes the result. Default: None.
        deterministic: refuse a backend whose backward is not bitwise repeatable. Default: False.
        recompute: save less for backward and compute it again. The reference always does. Default: False.
        config: all options as one NSAConfig, in place of options as keywords. Default: None.
        backend: "cute" or "reference". Default: None, which reads NSA_KERNELS_BACKEND and then takes the first backend
            that can run.

    Returns:
        `[B,N,H,D_v]` in q's dtype; packed `[T,H,D_v]`. A row that sees no key in a branch gets 0 from it.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors.

    Example:
        >>> import torch
        >>> from nsa import NSAConfig, nsa
        >>> q = torch.randn(1, 256, 4, 32, requires_grad=True)
        >>> k, v = torch.randn(2, 1, 256, 2, 32)
        >>> out = nsa(q, k, v, config=NSAConfig.paper(window_size=64))
        >>> out.sum().backward()
        >>> out.shape, q.grad.shape
        (torch.Size([1, 256, 4, 32]), torch.Size([1, 256, 4, 32]))
        >>> chunk = nsa(q[:, 100:150], k, v, q_start=100, config=NSAConfig.paper(window_size=64))  # of these tokens
        >>> bool(torch.allclose(chunk, out[:, 100:150], atol=1e-5))
        True
    """
    refuse_transforms("nsa")
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    if runs_as_operator(q):
        q, k, v, cast_keywords = _for_operator(q, k, v, cast_keywords)
        given = (x for x in cast_keywords.values() if isinstance(x, Tensor))
        run = ops.call_saving if needs_grad(q, k, v, *given) else ops.call_forward
        return run(q, k, v, **cast_keywords)
    return _run(False, q, k, v, **cast_keywords)[0]


@_with_shared_arguments
def nsa_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> Tensor:
    """`nsa` without a graph: same arguments, same result, nothing saved for backward.

    Returns:
        `[B,N,H,D_v]` in q's dtype; packed `[T,H,D_v]`. A row that sees no key in a branch gets 0 from it.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors.

    Example:
        >>> import torch
        >>> from nsa import NSAConfig, nsa_forward
        >>> q, k, v = torch.randn(100, 4, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32)
        >>> bounds = torch.tensor([0, 30, 100], dtype=torch.int32)  # two packed documents
        >>> nsa_forward(q, k, v, cu_seqlens=bounds, config=NSAConfig.paper()).shape
        torch.Size([100, 4, 32])
    """
    refuse_transforms("nsa")
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    if runs_as_operator(q):
        q, k, v, cast_keywords = _for_operator(q, k, v, cast_keywords)
        return ops.call_forward(q, k, v, **cast_keywords)
    with torch.no_grad():
        return _run(False, q, k, v, **cast_keywords)[0]


@_with_shared_arguments
def nsa_forward_aux(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[NSAKeywords]) -> tuple[Tensor, NSAAux]:
    """`nsa_forward` with intermediate results: outputs of the branches, log-sum-exps, compressed entries, selections.

    Returns:
        out as of `nsa_forward`, and NSAAux.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: when no backend can run the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors; for fake
            tensors; in selective checkpointing.

    Example:
        >>> import torch
        >>> from nsa import NSAConfig, nsa_forward_aux
        >>> q, k, v = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32), torch.randn(1, 256, 2, 32)
        >>> out, aux = nsa_forward_aux(q, k, v, config=NSAConfig.paper(num_selected_blocks=3))
        >>> aux.indices.shape, aux.indices[0, 0, 200].tolist()  # blocks that token 200 selects: all forced here
        (torch.Size([1, 2, 256, 3]), [0, 2, 3])
    """
    refuse_transforms("nsa")
    if runs_as_operator(q) and not torch.compiler.is_compiling():
        raise RuntimeError(
            "nsa_forward_aux takes neither fake tensors nor selective checkpointing, as operators do: call nsa_forward"
        )
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    with torch.no_grad():
        out, aux = _run(True, q, k, v, **cast_keywords)
    return out, cast("NSAAux", aux)
