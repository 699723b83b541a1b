"""Limits of the Triton kernels of attention residual, checked by the dispatcher. Needs only torch."""

from __future__ import annotations

from typing import Any

from ascend_kernels.residual.tiling import MAX_BLOCKS, MAX_DIM, MAX_ROWS
from ascend_kernels.support import gpu_refusal, npu_refusal


def check_gpu(call: Any) -> str | None:
    """Reason why upstream Triton cannot run the call (dispatch.Call) on a GPU, or None."""
    return gpu_refusal(call) or _shape_refusal(call)


def check_npu(call: Any) -> str | None:
    """Reason why triton-ascend cannot run the call (dispatch.Call) on an NPU, or None."""
    return npu_refusal(call) or _shape_refusal(call)


def _shape_refusal(call: Any) -> str | None:
    blocks, shape = call.options.get("blocks", 1), call.options.get("shape", (1, 1, 1))
    if blocks > MAX_BLOCKS:
        return f"supports up to {MAX_BLOCKS} blocks, got {blocks}"
    if shape[2] > MAX_DIM:
        return f"supports D up to {MAX_DIM}, got {shape[2]}"
    rows = blocks * shape[0] * shape[1]
    if rows > MAX_ROWS:
        return f"supports up to {MAX_ROWS} rows of all blocks and sequences, got {rows}"
    return None
