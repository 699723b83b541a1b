"""Inputs and error budgets that all tests share."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.inputs import NSAInputs

ROOT = Path(__file__).resolve().parents[2]


def make_qkv(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int | None = None,
    *,
    batch: int | None = 1,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v `[B,N,heads,D]`, or packed `[T,heads,D]` with `batch=None`; made on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    lead = (tokens,) if batch is None else (batch, tokens)
    shapes = ((*lead, heads, dim), (*lead, kv_heads, dim), (*lead, kv_heads, v_dim or dim))
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(requires_grad)
        for shape in shapes
    )
    return q, k, v


def make_inputs(tokens: int, **keywords: object) -> NSAInputs:
    return NSAInputs(*make_qkv(tokens, **keywords))  # type: ignore[arg-type]


LARGE = {
    "seed": NSAConfig.per_tile(num_selected_blocks=4, window_size=128),
    "paper": NSAConfig.paper(num_selected_blocks=4, window_size=128),
}
"""Configs that the kernels for GPUs take."""

SMALL = {
    "seed": NSAConfig.per_tile(compress_block_size=8, num_selected_blocks=3, window_size=12, q_tile_size=16),
    "paper": NSAConfig.paper(
        compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=12
    ),
    "seed, sparse compressed": NSAConfig.per_tile(
        compress_block_size=8,
        num_selected_blocks=3,
        window_size=12,
        q_tile_size=16,
        num_cmp_selected_blocks=3,
        n_block_size=2,
    ),
}
"""Both presets at sizes where a hundred tokens already make the selection select."""


def dynamically_quantized(model: Any) -> Any:
    """A copy whose nn.Linear are torch.ao's, with weights of int8 and inputs that are quantized by their range."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


def assert_within_budget(
    got: Tensor, oracle: Tensor, low_precision: Tensor, name: str = "output", *, slack: float = 0.0
) -> None:
    """err <= 2 * (error of bench/oracles.py in that dtype) + eps * max|oracle|, by the largest deviation.

    Args:
        got: the tensor under test. oracle: fp64.
        low_precision: of the same inputs, by math that shares no code with what is tested and rounds only what tensor
            cores multiply and results, each sum once.
        slack: added to the budget, for results that are exactly 0 but differences of fp32 sums.
    """
    assert not torch.isnan(got).any(), f"{name} holds NaN"
    error = (got.double() - oracle).abs().max().item() if got.numel() else 0.0
    allowed = error_budget(oracle, low_precision, got.dtype) + slack
    assert error <= allowed, f"{name}: error {error:.3e} is above the budget {allowed:.3e}"


def assert_rounded_once(got: Tensor, exact: Tensor, name: str) -> None:
    """The RMS error is that of rounding exact results to 16 bits, but for the sums in fp32 before, 2^-10 of it."""
    once, error = ((x.double() - exact).square().mean().sqrt().item() for x in (exact.to(got.dtype), got))
    assert error <= 1.01 * once, f"{name}: RMS error {error:.3e}, and {once:.3e} when it is rounded once"


def error_budget(oracle: Tensor, low_precision: Tensor, dtype: torch.dtype) -> float:
    if oracle.numel() == 0:
        return 0.0
    theirs = (low_precision.double() - oracle).abs().max().item()
    return 2 * theirs + torch.finfo(dtype).eps * oracle.abs().max().item()


SUM_ERROR = 1e-5
"""Error of a logarithm of a sum of exponentials below 16, whose ulp is 9.5e-7 in fp32: ten of them."""
EXP2_ERROR = 8.8e-5
"""Relative, of the cubic polynomial (flash_attn.cute.utils.POLY_EX2) from which FlashAttention-4's sm_100 forward takes
some powers of two. A sum of such powers is off by no more in relation, and its logarithm by log(1 + 8.8e-5)."""


def lse_error(capability: int, largest: float = 16.0) -> float:
    """Error allowed to lse besides twice that of plain PyTorch.

    Args: capability: of the GPU, 90 or 100. largest: magnitude of lse.
    """
    return SUM_ERROR * max(1.0, largest / 16) + (EXP2_ERROR if capability // 10 == 10 else 0.0)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "every second feature": lambda x: torch.stack([x, x.new_full(x.shape, torch.nan)], -1).flatten(-2)[..., ::2],
    "tokens last": lambda x: x.movedim(-3, -1).contiguous().movedim(-1, -3),
    "heads last": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "one feature expanded": lambda x: x[..., :1].expand(x.shape),
}
"""A tensor `[...,N,heads,D]` in memory where features do not lie side by side; the last one has other values."""


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """work(0) ... work(count - 1) at once, each in a thread of its own, until all have ended."""
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)


def run_child(code: str, environment: Mapping[str, str]) -> str:
    """What Python code prints in a process of its own, which must succeed."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout
