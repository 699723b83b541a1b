"""Whether the Triton kernels take a call, asked by the dispatcher before anything is launched. Needs torch alone."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ascend_kernels.launch import only_recording
from ascend_kernels.neighborhood.tiling import DTYPES, MAX_DIM, MAX_TOKENS


def check_gpu(call: Any) -> str | None:
    """Why upstream Triton cannot run the call (dispatch.Call) on a GPU, or None."""
    return _check(call, "cuda", "CUDA devices")


NARROW = 96
"""Keys of the widest windows that our kernels are faster at than FlashAttention-4, on an H200."""


def check_narrow_gpu(call: Any) -> str | None:
    """As `check_gpu`; wide windows are left to rows that follow, unless Triton is what the user named."""
    kernel_size = call.options.get("kernel_size", 1)
    if kernel_size > NARROW and not call.named:
        return f"first choice up to kernel_size {NARROW}, got {kernel_size}"
    return check_gpu(call)


def check_npu(call: Any) -> str | None:
    """Why triton-ascend cannot run the call (dispatch.Call) on an NPU, or None."""
    return _check(call, "npu", "Ascend NPUs")


def machine_refusal(call: Any, device_type: str, devices: str) -> str | None:
    """Why no kernel in Triton can run the call here, whatever its shape, or None."""
    if call.device_type != device_type and not (call.device_type == "cpu" and call.named and _takes_cpu_tensors()):
        simulated = ", and on the CPU when named, with TRITON_INTERPRET=1" if call.device_type == "cpu" else ""
        return f"runs on {devices}{simulated}, got {call.device_type}"
    if call.device_type == "cuda" and not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    if call.device_type == "npu" and not (hasattr(torch, "npu") and torch.npu.is_available()):
        return 'no Ascend NPU is visible (torch_npu must be imported; pip install "nsa-kernels[npu]")'
    if call.dtype not in DTYPES:
        return f"takes float16, bfloat16 and float32, got {str(call.dtype).removeprefix('torch.')}"
    return None


def _check(call: Any, device_type: str, devices: str) -> str | None:
    refusal = machine_refusal(call, device_type, devices)
    if refusal is not None:
        return refusal
    kernel_size = call.options.get("kernel_size", 1)
    has_band = call.options.get("band") or call.options.get("algorithm") in ("band", "dense")
    if has_band and kernel_size > MAX_TOKENS:
        return f"has bands of up to {MAX_TOKENS} slots, got kernel_size {kernel_size}"
    shape = call.options.get("shape")
    if shape is not None and shape[3] > MAX_DIM:
        return f"takes D up to {MAX_DIM}, got {shape[3]}"
    if shape is not None and shape[1] > MAX_TOKENS:
        return f"takes N up to {MAX_TOKENS}, got {shape[1]}"
    if shape is not None and math.prod(shape[:3]) > MAX_TOKENS:  # programs stride over fewer than 2^30 tiles, in int32
        return f"takes up to {MAX_TOKENS} tokens of all heads and sequences, got {math.prod(shape[:3])}"
    return None


def _takes_cpu_tensors() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; a recording without runs touches no data."""
    return os.environ.get("TRITON_INTERPRET") == "1" or only_recording()
