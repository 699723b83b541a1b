"""nsa_with_cache, which checks its arguments, finds a backend and runs it inside a step of the cache's table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from nsa.common.autocast import cast_inputs
from nsa.common.derivatives import refuse_transforms
from nsa.common.keywords import explain_keywords
from nsa.config import NSAConfig
from nsa.decoding.cache import NSACache
from nsa.decoding.operators import call_with_cache, check_cache, check_order, resolve, run_checked
from nsa.decoding.table import Step
from nsa.inputs import NSAInputs


@explain_keywords("counts says how many tokens of each sequence are real")
def nsa_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: NSACache,
    *,
    counts: Tensor | None = None,
    w_k_compress: Tensor | None = None,
    w_v_compress: Tensor | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    gates: Tensor | None = None,
    config: NSAConfig | None = None,
    backend: str | None = None,
) -> Tensor:
    """Append new tokens of each sequence to a cache, and attend: NSA's decoding and chunked prefill, without gradients.

    Row i of a sequence is the last row of `nsa` on its first seqlens + i + 1 tokens. In token mode it is also the row
    of any longer call. Nothing is read on the host. docs/decoding.md has details and costs.

    Under torch.autocast, tensors are cast like those of `nsa`.

    Args:
        q: queries of the new tokens `[B,N_q,H,D]`, N_q >= 1, in the cache's dtype.
        k: their keys `[B,N_q,H_kv,D]`.
        v: their values `[B,N_q,H_kv,D_v]`.
        cache: the cache to which the tokens are appended. Caches that share a table must be called inside `with
            table.step(N_q):`.
        counts: number of real tokens of each sequence, the first of its rows: int32 `[B]` on the device, 0 to N_q.
            Other rows are not written and return 0. Inside a step, pass it to the step. Default: None, which means all.
        w_k_compress: as in `nsa`, for the blocks that these tokens complete. Default: None.
        w_v_compress: as in `nsa`. Default: None.
        k_slc: keys of the selected branch `[B,N_q,H_kv,D]`, for a cache with `separate_kv=True`; with the next three.
            Default: None.
        v_slc: values of the selected branch. Default: None.
        k_win: keys of the window branch. Default: None.
        v_win: values of the window branch. Default: None.
        gate_proj_weight: `[H,3,D]`, as in `nsa`. Default: None.
        gates: `[B,N_q,H,3]`, as in `nsa`. Default: None.
        config: the options; those that define the cache's layout must equal the cache's. Default: None, the cache's.
        backend: "reference" or "cute". Default: None, which means NSA_KERNELS_BACKEND if set, else the first that
            supports the call.

    Returns:
        `[B,N_q,H,D_v]` in q's dtype. All rows of a sequence without room are NaN (`cache.check()` reports it), and
        nothing of it is written.

    Raises:
        TypeError: naming an argument of the wrong type or dtype, before anything is written.
        ValueError: naming an argument of the wrong shape, device or value, before anything is written.
        RuntimeError: if gradients are needed; outside of a step with several layers; twice in one step; while another
            thread uses the cache; with `debug=True` if a sequence has no room, which leaves the cache unchanged; in
            transforms of torch.func.
        dispatch.BackendError: if no backend supports the call, with the reason of each.

    Examples:
        >>> import torch
        >>> from nsa import NSACache, NSAConfig, nsa_with_cache
        >>> cache = NSACache.empty(NSAConfig.paper(), batch=2, max_tokens=500, heads_kv=1, dim=16)
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 1, 16), torch.randn(2, 8, 1, 16)
        >>> nsa_with_cache(q, k, v, cache, counts=torch.tensor([8, 3], dtype=torch.int32)).shape, cache.seqlens
        (torch.Size([2, 8, 4, 16]), tensor([8, 3], dtype=torch.int32))
    """
    refuse_transforms("nsa_with_cache")
    config = check_cache(cache, config)
    tensors = {"q": q, "k": k, "v": v, "w_k_compress": w_k_compress, "w_v_compress": w_v_compress}
    tensors |= {"k_slc": k_slc, "v_slc": v_slc, "k_win": k_win, "v_win": v_win}
    tensors |= {"gate_proj_weight": gate_proj_weight, "gates": gates}
    inputs = NSAInputs(**cast_inputs(tensors, stay_fp32=("gates", "gate_proj_weight")))
    run: Callable[..., Tensor]
    with cache.table.thread.alone():
        if torch.compiler.is_compiling():
            check_order(inputs, cache, config)
            run = partial(call_with_cache, backend=backend)
        else:
            run = partial(run_checked, resolve(inputs, cache, config, backend))
        table = cache.table
        if table.open is not None and counts is not None:
            raise ValueError("counts must be passed to table.step, got counts inside a step")
        own_step: AbstractContextManager[Step] = (
            nullcontext(table.open)
            if table.open is not None
            else table.step(inputs.q.shape[1], counts, debug=config.debug)
        )
        with own_step as step:
            out = run(inputs, config, cache, step)
            step.done.append(cache)
            return out
