"""NSA: the public functions, which check their arguments, find a backend and run it.

`nsa`, `nsa_forward` and `nsa_forward_aux` have the same arguments. Signatures are written out, with the defaults of
NSAConfig, and tests compare them; arguments are documented at `nsa`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nsa import operators
from nsa.common.autocast import autocast_dtype, autocast_off, cast_inputs
from nsa.common.derivatives import needs_grad, refuse_forward_mode, refuse_transforms, without_second_derivatives
from nsa.common.keywords import signature_of
from nsa.common.operators import run, runs_as_operator
from nsa.config import DEFAULT_CONFIG, OPTION_NAMES, Compress, NSAConfig, check_options
from nsa.inputs import TENSOR_NAMES, NSAAux, NSAInputs
from nsa.operators import NSACall, resolve
from nsa.reference import compressed_entries, with_compressed_entries


def _resolve(q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]) -> NSACall:
    """Resolve the options, check all arguments, and find a backend that supports the call."""
    config, options = keywords.get("config"), operators.options_of(keywords)
    config = config or (NSAConfig(**options) if options else DEFAULT_CONFIG)
    given = {name: keywords[name] for name in (*TENSOR_NAMES[3:], "max_seqlen") if name in keywords}
    inputs = NSAInputs(q, k, v, **given)
    refuse_forward_mode("nsa", *vars(inputs).values())
    flags = {name: keywords.get(name, default) for name, default in operators.FLAG_DEFAULTS.items()}
    needs_grad = isinstance(q, Tensor) and inputs.needs_grad(config)
    call = resolve(inputs, config, **flags, needs_grad=needs_grad)
    if config.compress != "mean" and (call.impl.training is not None or q.device.type == "meta"):
        with autocast_off(q.device.type):
            inputs, config = with_compressed_entries(call.inputs, config)
        call = NSACall.of(call.impl, needs_grad, inputs, {**call.options, "config": config})
    if needs_grad and call.impl.training is None:
        inputs = call.inputs.map(partial(without_second_derivatives, "nsa"))
        call = NSACall.of(call.impl, needs_grad, inputs, call.options)
    return call


def cast_arguments(
    q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]:
    """Cast the arguments as autocast casts those of scaled_dot_product_attention."""
    if not isinstance(q, Tensor) or autocast_dtype(q.device.type) is None:
        return q, k, v, keywords
    names = [name for name in TENSOR_NAMES[3:] if name in keywords]
    tensors = {"q": q, "k": k, "v": v, **{name: keywords[name] for name in names}}
    cast = cast_inputs(tensors, stay_fp32=("gates", "gate_proj_weight", "q_sum"))
    return cast["q"], cast["k"], cast["v"], {**keywords, **{name: cast[name] for name in names}}


def _for_operator(
    q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]:
    """Convert the arguments for an operator.

    An integer q_start slices the keys, a callable `compress` becomes k_cmp and v_cmp.
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


def _nsa(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    refuse_transforms("nsa")
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    if runs_as_operator(q):
        q, k, v, cast_keywords = _for_operator(q, k, v, cast_keywords)
        given = (x for x in cast_keywords.values() if isinstance(x, Tensor))
        operator = operators.call_saving if needs_grad(q, k, v, *given) else operators.call_forward
        return operator(q, k, v, **cast_keywords)
    return run(_resolve(q, k, v, cast_keywords))


def _nsa_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    refuse_transforms("nsa")
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    if runs_as_operator(q):
        q, k, v, cast_keywords = _for_operator(q, k, v, cast_keywords)
        return operators.call_forward(q, k, v, **cast_keywords)
    with torch.no_grad():
        return run(_resolve(q, k, v, cast_keywords))


def _nsa_forward_aux(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, NSAAux]:
    if torch.compiler.is_dynamo_compiling():
        from nsa.common.outside_graphs import call_as_is

        return cast("tuple[Tensor, NSAAux]", call_as_is(_nsa_forward_aux, q, k, v, **keywords))
    refuse_transforms("nsa")
    if runs_as_operator(q):
        raise RuntimeError(
            "nsa_forward_aux supports neither fake tensors nor selective checkpointing: call nsa_forward"
        )
    q, k, v, cast_keywords = cast_arguments(q, k, v, keywords)
    with torch.no_grad():
        call = _resolve(q, k, v, cast_keywords)
        if q.device.type == "meta":
            return call.empty()[0], operators.empty_aux(call.inputs, call.options["config"])
        with autocast_off(q.device.type):
            out, aux = call.impl.load()(call.inputs, call.options["config"], aux=True)
    return out, NSAAux(*aux)


@signature_of(_nsa)
def nsa(  # type: ignore[empty-body]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compress_block_size: int = 64,
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    q_tile_size: int = 256,
    share_heads_in_group: bool = False,
    num_init_blocks: int = 0,
    num_local_blocks: int = 0,
    num_cmp_selected_blocks: int | None = None,
    n_block_size: int = 128,
    compress: Compress = "mean",
    causal: bool = True,
    softmax_scale: float | None = None,
    debug: bool = False,
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
) -> Tensor:
    """Native Sparse Attention (arXiv 2502.11089), differentiable.

    Each query attends to compressed blocks of the past, to the tokens of a few selected blocks and to a sliding
    window; gates weigh the three outputs (equation 5 of the paper; the exact definition is in docs/semantics.md).
    Pass options as keywords or as one `config`, not both. The defaults, `NSAConfig.per_tile()`, select once per tile of
    256 tokens and look ahead within the tile; `config=NSAConfig.paper()` is autoregressive.

    Under torch.autocast, tensors are cast like those of scaled_dot_product_attention.

    Args:
        q: queries `[B,N,H,D]`; bf16 or fp16 on a GPU, on the CPU also fp32 and fp64. Packed: `[T,H,D]` with
            `cu_seqlens`.
        k: keys `[B,N,H_kv,D]`, in q's dtype; H a multiple of H_kv. Packed: `[T,H_kv,D]`. More tokens than queries if
            the queries continue a sequence (`q_start`).
        v: values `[B,N,H_kv,D_v]`, in q's dtype. Packed: `[T,H_kv,D_v]`.
        compress_block_size: l, tokens pooled into one compressed entry. Default: 64.
        compress_stride: d, tokens from one compressed block to the next, d <= l. Default: None, which means l.
        select_block_size: l', tokens of one selectable block. Default: None, which means l.
        num_selected_blocks: blocks that each query tile selects, forced ones included. 0: the selected branch has no
            keys. Default: 16.
        window_size: w, keys of the sliding window, the token itself included. With `causal=False` the window is
            |i - j| <= w // 2. 0: the window branch has no keys. Default: 512.
        q_tile_size: T, consecutive queries that share a selection. 1 is the paper's selection per token. Default: 256.
        share_heads_in_group: select once for all query heads of a key/value head. Implied by `q_tile_size=1`.
            Default: False.
        num_init_blocks: blocks at the start of the document that are always selected. Default: 0.
        num_local_blocks: blocks ending with that of the tile's last token that are always selected (with
            `causal=False`: as many around the tile). Default: 0.
        num_cmp_selected_blocks: c, blocks of `n_block_size` compressed entries that each query tile and head attends to
            in the compressed branch. Needs `q_tile_size > 1`. Default: None, which means all visible entries.
        n_block_size: compressed entries in one such block. Default: 128.
        compress: "mean", or a callable (or a pair of them, for keys and for values) from blocks `[...,l,D]` to entries
            `[...,D]`, such as LinearCompression. Default: "mean".
        causal: no output depends on later tokens (in tile mode: on tokens after its tile). Default: True.
        softmax_scale: factor of the logits, in scoring and in all branches. Default: None, which means 1/sqrt(D).
        debug: also check values of the input tensors (finite, `cu_seqlens` consistent), which waits for the device.
            Default: False.
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
        cu_seqlens_k: bounds of the documents' keys, int32 `[B+1]`, if documents have more keys than queries; q is then
            `[T_q,...]`, k and v `[T_k,...]`. Default: None, which means `cu_seqlens`.
        q_start: token index of the first query, 0 to N_k - N_q: out holds rows q_start to q_start + N_q - 1 of the call
            with as many queries as keys; keys after the last query are ignored. An integer, or int32 `[B]` on q's
            device, one per sequence or document. Requires `causal=True`. Default: None, which means N_k - N_q.
        q_sum: sum of the queries before q_start in its tile, `[B,H,D]` fp32 (fp64 with fp64 inputs); not
            differentiated. Required if q_start is not a multiple of `q_tile_size`. Default: None.
        max_seqlen: keys of the longest document, a hint that never changes the result. Default: None.
        deterministic: use only a backend whose backward is bitwise repeatable, or raise. Default: False.
        recompute: save less for backward and recompute it. The reference always does. Default: False.
        config: all options as one NSAConfig; other options must not be passed then. Default: None, which means the
            keywords.
        backend: "cute", "triton" or "reference". Default: None, which means NSA_KERNELS_BACKEND if set, else the first
            backend that supports the call.

    Returns:
        `[B,N,H,D_v]` in q's dtype; packed `[T,H,D_v]`. A branch in which a row has no keys contributes 0.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors.

    Examples:
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


@signature_of(_nsa_forward)
def nsa_forward(  # type: ignore[empty-body]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compress_block_size: int = 64,
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    q_tile_size: int = 256,
    share_heads_in_group: bool = False,
    num_init_blocks: int = 0,
    num_local_blocks: int = 0,
    num_cmp_selected_blocks: int | None = None,
    n_block_size: int = 128,
    compress: Compress = "mean",
    causal: bool = True,
    softmax_scale: float | None = None,
    debug: bool = False,
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
) -> Tensor:
    """`nsa` without an autograd graph: same arguments and result, nothing saved for backward.

    Arguments are those of `nsa`.

    Returns:
        `[B,N,H,D_v]` in q's dtype; packed `[T,H,D_v]`. A branch in which a row has no keys contributes 0.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, nsa_forward
        >>> q, k, v = torch.randn(100, 4, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32)
        >>> bounds = torch.tensor([0, 30, 100], dtype=torch.int32)  # two packed documents
        >>> nsa_forward(q, k, v, cu_seqlens=bounds, config=NSAConfig.paper()).shape
        torch.Size([100, 4, 32])
    """


@signature_of(_nsa_forward_aux)
def nsa_forward_aux(  # type: ignore[empty-body]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compress_block_size: int = 64,
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    q_tile_size: int = 256,
    share_heads_in_group: bool = False,
    num_init_blocks: int = 0,
    num_local_blocks: int = 0,
    num_cmp_selected_blocks: int | None = None,
    n_block_size: int = 128,
    compress: Compress = "mean",
    causal: bool = True,
    softmax_scale: float | None = None,
    debug: bool = False,
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
) -> tuple[Tensor, NSAAux]:
    """`nsa_forward` with intermediate results: outputs of the branches, log-sum-exps, compressed entries, selections.

    Arguments are those of `nsa`. Under torch.compile the call is a graph break and runs eagerly.

    Returns:
        out as returned by `nsa_forward`, and NSAAux.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is computed.
        ValueError: naming an argument of the wrong shape, device or value, before anything is computed.
        dispatch.BackendError: if no backend supports the call, with the reason of each.
        RuntimeError: inside torch.func.grad, torch.vmap and other transforms of torch.func; for dual tensors; for fake
            tensors; in selective checkpointing.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, nsa_forward_aux
        >>> q, k, v = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32), torch.randn(1, 256, 2, 32)
        >>> out, aux = nsa_forward_aux(q, k, v, config=NSAConfig.paper(num_selected_blocks=3))
        >>> aux.indices.shape, aux.indices[0, 0, 200].tolist()  # blocks that token 200 selects: all forced here
        (torch.Size([1, 2, 256, 3]), [0, 2, 3])
    """
