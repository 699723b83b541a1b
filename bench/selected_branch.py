"""Attention of each token to blocks of its own: kernels of token mode's selected branch, and errors against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from bench.oracles import Error

CHECKED = 64  # Rows that are held against fp64, half of them the last ones
DRAWN = 1 << 23  # Scores of blocks that are drawn at a time
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Branch:
    """Kernels of the branch, called as cute_kernels/forward.py and backward.py do, for the blocks `[B,H_kv,N,n]`.

    They are imported where they are called: the command line needs no CuTe DSL.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    blocks: Tensor
    size: int

    @property
    def how(self) -> dict[str, Any]:
        return {"size": self.size, "scale": self.q.shape[-1] ** -0.5}

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.blocks

    def forward(self) -> tuple[Tensor, Tensor]:
        from cute_kernels.attend.kv_outer import kv_outer_forward

        return kv_outer_forward(*self.given, **self.how)

    def query_outer(self) -> tuple[Tensor, Tensor]:
        from cute_kernels.attend.query_outer import query_outer_forward

        return query_outer_forward(*self.given, **self.how)

    @cached_property
    def saved(self) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self.forward()
        return out, lse, self.delta(out, self.do)

    @staticmethod
    def delta(out: Tensor, do: Tensor) -> Tensor:
        return (out.float() * do.float()).sum(-1).transpose(1, 2).contiguous()

    def backward(self, do: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of this do, or of another."""
        from cute_kernels.attend.kv_outer_backward import kv_outer_backward

        out, lse, delta = self.saved
        into = torch.empty_like(self.q), torch.empty_like(self.k), torch.empty_like(self.v)
        if do is not None:
            delta = self.delta(out, do)
        kv_outer_backward(*self.given, self.do if do is None else do, lse, delta, into=into, **self.how)
        return into


def draw_blocks(
    shape: tuple[int, int, int], size: int, count: int, generator: torch.Generator, weigh: Callable[..., Tensor]
) -> Tensor:
    """int32 `[B,H_kv,N,count]`, ascending, then -1: the best of random scores of the blocks up to each token's own.

    Args: `weigh`: scores from uniform noise, the tokens' own blocks and all blocks.
    """
    (batch, kv_heads, n), device = shape, generator.device
    blocks = -(-n // size)
    block, parts = torch.arange(blocks, device=device), []
    for own in (torch.arange(n, device=device)[:, None] // size).split(max(1, DRAWN // (batch * kv_heads * blocks))):
        scores = torch.rand((batch, kv_heads, len(own), blocks), generator=generator, device=device)
        best = weigh(scores, own, block).masked_fill(block > own, -math.inf).topk(min(count, blocks), -1)
        order = best.indices.masked_fill(best.values == -math.inf, blocks).sort(-1).values
        parts.append(order.where(order < blocks, -1).int())
    return torch.nn.functional.pad(torch.cat(parts, 2), [0, max(0, count - blocks)], value=-1)


def checked_rows(n: int, device: torch.device) -> Tensor:
    """Rows that are checked, ascending: the last ones, and some of the others."""
    last = min(CHECKED // 2, n)
    drawn = torch.randperm(n - last, generator=torch.Generator().manual_seed(1))[: CHECKED - last].sort().values
    return torch.cat([drawn, torch.arange(n - last, n)]).to(device)


def visible_keys(blocks: Tensor, rows: Tensor, size: int, n: int) -> Tensor:
    """Keys up to the rows in their blocks `[1,H_kv,M,k]`, bool `[1,H_kv,M,N]`."""
    keys = torch.arange(n, device=rows.device)
    return (keys // size == blocks[..., None]).any(-2) & (keys <= rows[:, None])


def errors(
    attend: Callable[[Tensor], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    do: Tensor,
    blocks: Tensor,
    size: int,
    kv_head: int = 0,
) -> list[Error]:
    """Errors of rows of a key/value head's group, and of the gradients of a do that is 0 elsewhere.

    Args: `attend`: gives out, and perhaps dq, dk and dv, for a do. `tensors`: q, k, v.
    """
    (q, k, v), dtype = (x.detach() for x in tensors), do.dtype
    group, rows, (n, dim) = q.shape[2] // k.shape[2], checked_rows(q.shape[1], q.device), q.shape[1::2]
    heads, head = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    some = torch.zeros_like(do)
    some[:1, rows, heads] = do[:1, rows, heads]
    got = [x.detach() for x in attend(some)]
    mine = [*(x[:1, rows, heads] for x in got[:2]), *(x[:1, :, head] for x in got[2:])]
    visible = visible_keys(blocks[:1, head, rows], rows, size, n)
    both = []
    for of in (torch.float64, dtype):
        leaves = [x.to(oracles.wide(of)).requires_grad_() for x in (q[:1, rows, heads], k[:1, :, head], v[:1, :, head])]
        out, _ = oracles.attention(leaves[0], leaves[1], leaves[2], visible, dim**-0.5, of)
        of_rows = some[:1, rows, heads].to(out.dtype)
        both.append([out.detach(), *(torch.autograd.grad(out, leaves, of_rows) if len(got) > 1 else ())])
    exact, yardstick = both
    each = zip(NAMES, mine, exact, yardstick, strict=False)
    return [oracles.compare(name, x, right, near, dim) for name, x, right, near in each]
