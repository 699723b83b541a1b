"""Compile the CUDA kernels of NSA calls ahead of time, in several processes, into the cache that later calls read.

`warm_up` starts worker.py and counts its events; `python -m nsa.warm_up` shows them as a progress bar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from dispatch.registry import short_name
from nsa.common.checks import check_integer
from nsa.config import NSAConfig, check_options

TARGETS = {(9, 0): ("sm_90a", "sm_90"), (10, 0): ("sm_100a", "sm_100")}
"""Architecture names of CuTe DSL and of FlashAttention-4, by compute capability."""

CACHE_VARIABLE = "NSA_KERNELS_JIT_CACHE"
DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128)
MAX_PROCESSES = 16
"""More are not faster: the slowest kernels dominate."""


def warm_up(
    config: NSAConfig | None = None,
    shapes: Sequence[Sequence[int]] = ((1, 8192, 8, 2, 128),),
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    backward: bool = True,
    processes: int | None = None,
    target: tuple[tuple[int, int], int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile the kernels of `nsa` calls on an NVIDIA GPU, and cache them on disk for this and later processes.

    Otherwise the first call compiles them sequentially. Kernels depend on options, heads, head dims and dtype, and on N
    only if a sequence is shorter than a tile or two. Calls with `cu_seqlens`, `q_start`, separate keys for a branch,
    and `nsa_with_cache` have additional kernels, which are compiled on first use.

    Args:
        config: options of the calls. Default: `NSAConfig()`. No kernels are compiled for a callable `compress`.
        shapes: shapes of the calls, each (B, N, H, H_kv, D) or (B, N, H, H_kv, D, D_v).
        dtype: dtype of the calls, bfloat16 or float16.
        gated: True if the calls have `gate_proj_weight`.
        backward: compile forward and backward of training; False: inference only.
        processes: number of processes. Default: one per core, up to 16.
        target: compute capability and number of multiprocessors of the GPU, such as ((9, 0), 132) for an H100 or H200,
            if this machine has none. Default: those of the current CUDA device.
        progress: callback with the number of kernels on disk and the number known to be needed.

    Returns:
        Number of kernels that the calls need.

    Raises:
        TypeError: naming an argument of the wrong type.
        ValueError: for unsupported shapes, dtype, number of processes or target; if the cache is disabled.
        RuntimeError: without a GPU or target, and if a process fails, with its output.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, warm_up
        >>> warm_up(NSAConfig.paper(), [(1, 8192, 64, 4, 128)], dtype=torch.float32)
        Traceback (most recent call last):
            ...
        ValueError: dtype must be bfloat16 or float16, got float32
    """
    check_options(config, {})
    if not isinstance(shapes, (list, tuple)) or not all(isinstance(shape, (list, tuple)) for shape in shapes):
        raise TypeError(f"shapes must be a list of (B, N, H, H_kv, D), got {shapes!r}")
    if processes is not None:
        check_integer("processes", processes, 1)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be bfloat16 or float16, got {short_name(dtype)}")
    if os.environ.get(CACHE_VARIABLE) == "0":
        raise ValueError(f"{CACHE_VARIABLE} is 0, so kernels are not cached: unset it, or set it to a folder")
    calls = [_call(shape, gated) for shape in shapes]
    own = config or NSAConfig()
    if own.compress != "mean":
        for call in calls:
            _give_entries(call, own)
        own = replace(own, compress="mean")
    job = {
        "config": asdict(own),
        "dtype": short_name(dtype),
        "backward": backward,
        "processes": processes or min(os.cpu_count() or 1, MAX_PROCESSES),
        "calls": calls,
    }
    return _run(job, {**os.environ, **_environment(target)}, progress)


def _call(shape: Sequence[int], gated: bool) -> dict[str, list[int]]:
    """Shapes of the tensors of a call, by name."""
    if len(shape) not in (5, 6) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"each of shapes must be (B, N, H, H_kv, D) or (B, N, H, H_kv, D, D_v), got {tuple(shape)}")
    batch, tokens, heads, kv_heads, dim, *rest = shape
    if heads % kv_heads:
        raise ValueError(f"H in shapes must be a multiple of H_kv, got {heads} and {kv_heads}")
    for name, size in zip(("D", "D_v"), (dim, *rest), strict=False):
        if size not in DIMS:
            raise ValueError(f"{name} in shapes must be {' or '.join(map(str, DIMS))}, got {size}")
    call = {
        "q": [batch, tokens, heads, dim],
        "k": [batch, tokens, kv_heads, dim],
        "v": [batch, tokens, kv_heads, rest[0] if rest else dim],
    }
    return {**call, "gate_proj_weight": [heads, 3, dim]} if gated else call


def _give_entries(call: dict[str, list[int]], config: NSAConfig) -> None:
    """Add k_cmp and v_cmp, for backends that compress by means only."""
    for name in ("k", "v"):
        batch, tokens, *rest = call[name]
        call[f"{name}_cmp"] = [batch, config.num_compressed(tokens), *rest]


def _environment(target: tuple[tuple[int, int], int] | None) -> dict[str, str]:
    """Environment variables that describe the GPU to the compilers."""
    if target is None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is available: pass target=((9, 0), 132)")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        target = (properties.major, properties.minor), properties.multi_processor_count
    try:
        capability, multiprocessors = target
    except (TypeError, ValueError):
        raise TypeError(f"target must be like ((9, 0), 132), got {target!r}") from None
    if capability not in TARGETS:
        raise ValueError(f"target must have compute capability 9.0 or 10.0, got {capability}")
    cute, fa4 = TARGETS[capability]
    return {"CUTE_DSL_ARCH": cute, "FLASH_ATTENTION_ARCH": fa4, "FLASH_ATTENTION_NUM_SMS": str(multiprocessors)}


def _run(job: dict[str, object], environment: dict[str, str], progress: Callable[[int, int], None] | None) -> int:
    asked: set[str] = set()
    there: set[str] = set()
    command = [sys.executable, "-m", "nsa.warm_up.worker", json.dumps(job)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
            for line in worker.stdout or ():
                event, _, key = line.strip().partition(" ")
                (there if event == "there" else asked).add(key)
                if progress is not None:
                    progress(len(there), len(asked))
        if worker.returncode != 0 or asked != there:
            errors.seek(0)
            raise RuntimeError(
                f"{len(asked - there)} of {len(asked)} kernels were not compiled:\n{errors.read()[-4000:]}"
            )
    return len(there)
