"""One check of attention residual's kernels against fp64, shared by all ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from dispatch import attention_residual
from nsa.residual.operators import Blocks, block_tensors
from tests.support.helpers import assert_within_budget

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """The tensors of a call, and the gradient of its result."""

    blocks: Blocks
    w_query: Tensor
    w_norm: Tensor | None
    do: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """What has a gradient: the blocks, or each of them, and the weights."""
        weights = [self.w_query] if self.w_norm is None else [self.w_query, self.w_norm]
        return [*block_tensors(self.blocks), *weights]

    def inputs(self, leaves: tuple[Tensor, ...] | list[Tensor]) -> tuple[Blocks, Tensor, Tensor | None]:
        """What the op takes, of other leaves."""
        blocks: Blocks = leaves[0] if isinstance(self.blocks, Tensor) else leaves[: len(self.blocks)]
        if self.w_norm is None:
            return blocks, leaves[-1], None
        return blocks, leaves[-2], leaves[-1]


def make(
    tokens: int,
    dim: int,
    blocks: int,
    *,
    batch: int = 1,
    layout: str = "stacked",
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    logits: float = 1.5,
    spread: float | None = None,
    device: str = "cpu",
    requires_grad: bool = True,
) -> Case:
    """A call with drawn blocks, weights and gradient.

    Args:
        logits: standard deviation of the scores. The default leaves no block all of the softmax, and none nothing.
        spread: blocks are one tensor plus `spread` times tensors of their own, 0: all equal. None: blocks are
            independent and their sizes differ.
        layout: "stacked"; "token-major", stacked but `[N,B,L,D]` in memory; "list" of tensors of their own; "slices",
            a list of views of one tensor with gaps of NaN; "strided", stacked with every second feature of a tensor.
    """
    generator = torch.Generator(device).manual_seed(tokens * 65537 + dim)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(requires_grad)

    stacked = draw(blocks, batch, tokens, dim)
    if spread is None:
        for i, block in enumerate(stacked):
            block.mul_((i + 1) ** 0.5)
    else:
        stacked = stacked[:1] + spread * stacked
    given: Blocks
    if layout == "stacked":
        given = leaf(stacked)
    elif layout == "token-major":
        given = leaf(stacked.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    elif layout == "strided":
        given = leaf(torch.stack([stacked, torch.full_like(stacked, torch.nan)], -1).flatten(-2)[..., ::2])
    elif layout == "list":
        given = [leaf(block.clone()) for block in stacked]
    elif layout == "slices":
        padded = torch.full((blocks, batch, tokens + 3, dim), torch.nan, dtype=dtype, device=device)
        padded[:, :, :tokens] = stacked
        given = [leaf(block) for block in padded[:, :, :tokens]]
    else:
        raise ValueError(f"there is no layout {layout!r}")
    w_query = leaf(draw(dim, dtype=weight_dtype or dtype) * (logits / dim**0.5))
    w_norm = leaf(1 + draw(dim, dtype=weight_dtype or dtype) / 2) if norm else None
    return Case(given, w_query, w_norm, draw(batch, tokens, dim))


LARGE_SCORES: dict[str, dict[str, Any]] = {
    "equal blocks": {"dim": 64, "blocks": 3, "spread": 0.0, "logits": 100.0},
    "equal blocks, read twice": {"dim": 40, "blocks": 35, "spread": 0.0, "logits": 100.0},
    "equal blocks, tiled": {"dim": 9000, "blocks": 3, "spread": 0.0, "logits": 100.0},
    "similar blocks": {"dim": 1000, "blocks": 8, "spread": 0.3, "logits": 100.0},
    "similar blocks, read twice": {"dim": 1000, "blocks": 20, "spread": 0.1, "logits": 100.0},
    "blocks of their own": {"dim": 40, "blocks": 9, "logits": 100.0},
}
"""Calls whose scores are in the hundreds. Where blocks are similar, dp - delta is far smaller than dp or delta."""


def differentiated(function: Callable[..., Tensor], case: Case) -> tuple[Tensor, ...]:
    """The result, and gradients of all leaves."""
    out = function(*case.inputs(case.leaves))
    return (out.detach(), *torch.autograd.grad(out, case.leaves, case.do.to(out.dtype)))


def check(
    backend: str, tokens: int, dim: int, blocks: int, run: Callable[[Case, str], tuple[Tensor, ...]], **options: Any
) -> None:
    """The result and all gradients within the budget of helpers.py; `options` as of `make`."""
    case = make(tokens, dim, blocks, **options)
    got = run(case, backend)
    wanted = [case.do, *case.leaves]
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in wanted]
    double = Case(
        case.blocks.double() if isinstance(case.blocks, Tensor) else [block.double() for block in case.blocks],
        case.w_query.double(),
        None if case.w_norm is None else case.w_norm.double(),
        case.do.double(),
    )
    exact, low = differentiated(oracle, double), differentiated(oracle, case)
    scale = max(result.abs().max().item() for result in exact) if tokens else 0.0
    names = ["output", *[f"gradient {i} of {len(case.leaves)}" for i in range(len(case.leaves))]]
    for name, mine, truth, theirs in zip(names, got, exact, low, strict=True):
        # Sums in fp32, in another order than PyTorch's: a random walk of roundings, of terms as large as any result
        terms = blocks * (case.do.numel() if truth.dim() == 1 else dim)
        slack = terms**0.5 * torch.finfo(torch.float32).eps * scale
        assert_within_budget(mine, truth, theirs, f"{name} of N={tokens} D={dim} L={blocks} {options}", slack=slack)


def oracle(blocks: Blocks, w_query: Tensor, w_norm: Tensor | None) -> Tensor:
    """The definition's result; see bench/oracles.py."""
    return oracles.attention_residual(blocks, w_query, w_norm, EPS)


def through_the_public_op(case: Case, backend: str) -> tuple[Tensor, ...]:
    return differentiated(lambda *inputs: attention_residual(*inputs, EPS, backend=backend), case)
