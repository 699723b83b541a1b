"""Requirements of all Triton kernels on machine and dtype, checked by the dispatcher.

Each op's support.py adds its limits on shapes. Needs only torch.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ascend_kernels.launch import only_recording

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def gpu_refusal(call: Any) -> str | None:
    """Reason why upstream Triton cannot run a call (dispatch.Call) of any shape on a GPU here, or None."""
    return _machine_refusal(call, "cuda", "CUDA devices")


def npu_refusal(call: Any) -> str | None:
    """Reason why triton-ascend cannot run a call (dispatch.Call) of any shape on an NPU here, or None."""
    return _machine_refusal(call, "npu", "Ascend NPUs")


def check_reference(call: Any) -> str | None:
    """Reason why the dispatcher must not choose a PyTorch reference for a call (dispatch.Call), or None.

    A reference has one algorithm and accepts any name, since all give the same result.
    """
    if call.device_type == "cpu" or call.named:
        return None
    return f"runs on {call.device_type} only when named: backend='reference' (eager PyTorch, slow)"


def _machine_refusal(call: Any, device_type: str, devices: str) -> str | None:
    if call.device_type != device_type and not (call.device_type == "cpu" and call.named and _takes_cpu_tensors()):
        simulated = ", and on the CPU when named, with TRITON_INTERPRET=1" if call.device_type == "cpu" else ""
        return f"runs on {devices}{simulated}, got {call.device_type}"
    if call.device_type == "cuda" and not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    if call.device_type == "npu" and not (hasattr(torch, "npu") and torch.npu.is_available()):
        return 'no Ascend NPU is visible (torch_npu must be imported; pip install "nsa-kernels[npu]")'
    if call.dtype not in DTYPES:
        return f"supports float16, bfloat16 and float32, got {str(call.dtype).removeprefix('torch.')}"
    return None


def _takes_cpu_tensors() -> bool:
    """True for Triton's interpreter, which runs kernels on CPU tensors, and for a recording that runs nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1" or only_recording()
