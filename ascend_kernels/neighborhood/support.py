"""Limits of the Triton kernels of neighborhood attention, checked by the dispatcher. Needs only torch."""

from __future__ import annotations

import math
from typing import Any

from ascend_kernels.neighborhood.tiling import MAX_DIM, MAX_TOKENS
from ascend_kernels.support import gpu_refusal, npu_refusal

NARROW_WINDOW = 96
"""Largest window, in keys, for which these kernels are faster than FlashAttention-4 on an H200."""


def check_gpu(call: Any) -> str | None:
    """Reason why upstream Triton cannot run the call (dispatch.Call) on a GPU, or None."""
    return gpu_refusal(call) or _shape_refusal(call)


def check_narrow_gpu(call: Any) -> str | None:
    """`check_gpu`, but leave wide windows to later rows of the table, unless the user named Triton."""
    kernel_size = call.options.get("kernel_size", 1)
    if kernel_size > NARROW_WINDOW and not call.named:
        return f"first choice up to kernel_size {NARROW_WINDOW}, got {kernel_size}"
    return check_gpu(call)


def check_npu(call: Any) -> str | None:
    """Reason why triton-ascend cannot run the call (dispatch.Call) on an NPU, or None."""
    return npu_refusal(call) or _shape_refusal(call)


def _shape_refusal(call: Any) -> str | None:
    kernel_size = call.options.get("kernel_size", 1)
    has_band = call.options.get("band") or call.options.get("algorithm") in ("band", "dense")
    if has_band and kernel_size > MAX_TOKENS:
        return f"supports bands of up to {MAX_TOKENS} slots, got kernel_size {kernel_size}"
    shape, first_token = call.options.get("shape"), call.options.get("first_token", 0)
    if first_token > 0:
        return f"needs as many queries as keys (cute and reference do not), got q_start={first_token}"
    if shape is None:
        return None
    if shape[3] > MAX_DIM:
        return f"supports D up to {MAX_DIM}, got {shape[3]}"
    if shape[1] > MAX_TOKENS:
        return f"supports N up to {MAX_TOKENS}, got {shape[1]}"
    if math.prod(shape[:3]) > MAX_TOKENS:  # programs stride over fewer than 2^30 tiles, in int32
        return f"supports up to {MAX_TOKENS} tokens of all heads and sequences, got {math.prod(shape[:3])}"
    return None
