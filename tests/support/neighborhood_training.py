"""A tiny model trained with neighborhood attention, and with plain PyTorch in its place, from the same weights.

Steps are small enough for rounding errors not to grow, so losses of one step compare like outputs of one call.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import NeighborhoodAttention
from nsa.neighborhood import module
from tests.support.helpers import error_budget

VOCABULARY, WIDTH, HEADS, KV_HEADS, TOKENS = 8, 32, 2, 1, 24
STEPS = 80
"""Enough for every window to learn what the model can."""

WINDOWS: dict[str, dict[str, Any]] = {
    "odd": {"kernel_size": 7},
    "even, dilated": {"kernel_size": 6, "dilation": 2},
    "causal, dilated": {"kernel_size": 4, "dilation": 2, "causal": True},
}


def eager(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int, dilation: int, boundary: str, causal: bool, **_: Any
) -> Tensor:
    """Truncated neighborhood attention as a masked softmax over all pairs of tokens."""
    token = torch.arange(q.shape[1], device=q.device)
    distance = token - token[:, None]
    left = kernel_size - 1 if causal else kernel_size // 2
    right = kernel_size - 1 - left
    seen = (distance % dilation == 0) & (distance >= -left * dilation) & (distance <= right * dilation)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype), v)


class Model(nn.Module):
    """Predicts a token from its neighborhood."""

    def __init__(self, head_dim: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers = nn.ModuleList(
            NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, head_dim=head_dim, bias=True, **options) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, (WIDTH,)))
        logits: Tensor = self.head(x)
        return logits


def losses(
    backend: str,
    *,
    steps: int = STEPS,
    batch: int = 4,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    seed: int | None = None,
    **window: Any,
) -> Tensor:
    """Losses `[steps]` in fp64 of learning to copy a token's neighbor two places before.

    Args:
        backend: of the op, or "eager" for `eager` instead of it.
        dtype: of the parameters; 16 bits: fp32 parameters under autocast.
        seed: of a change of the first weights by half a unit in their last place of `dtype`; None: no change.
    """
    torch.manual_seed(0)
    half = dtype.itemsize == 2
    model = Model(head_dim, backend=None if backend == "eager" else backend, **window)
    model = model.to(device, torch.float32 if half else dtype)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                change = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + change * torch.finfo(dtype).eps / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    curve = []
    with pytest.MonkeyPatch.context() as patch:
        if backend == "eager":
            patch.setattr(module, "neighborhood_attention", eager)
        for _ in range(steps):
            text = torch.randint(VOCABULARY, (batch, TOKENS)).to(device)
            with torch.autocast(device, dtype, enabled=half):
                logits = model(text)
            # The first two tokens have no such neighbor
            loss = nn.functional.cross_entropy(logits[:, 2:].flatten(0, 1).double(), text[:, :-2].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


def assert_same_curve(backend: str, **options: Any) -> Tensor:
    """Losses with a backend, which are those of plain PyTorch in fp64 within the budget of helpers.py.

    PyTorch's own error is the larger one of two runs, so that it is not small by luck.
    """
    exact = losses("eager", **{**options, "dtype": torch.float64})
    dtype = options.get("dtype", torch.float32)
    runs = [losses("eager", seed=seed, **options) for seed in (None, 1)]
    budget = max(error_budget(exact, run, dtype) for run in runs)
    curve = losses(backend, **options)
    error = (curve - exact).abs().max().item()
    assert error <= budget, f"losses of {backend} are {error:.3e} off, more than {budget:.3e}"
    other = losses("eager", **{**options, "dtype": torch.float64, "kernel_size": options["kernel_size"] + 1})
    assert (other - exact).abs().max() > 5 * budget, "the budget would not tell another window"
    return curve
