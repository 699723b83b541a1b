"""Gradients of attention from the statistics of its rows, and the check of a backward against them in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.helpers import assert_within_budget


@dataclass(frozen=True)
class Branch:
    """What the rows of a branch see, bool `[B,H,N,N_k]` or broadcast to it, and their statistics, fp32 `[B,H,N]`."""

    visible: Tensor
    lse: Tensor
    """Rows where it is not finite have no gradients."""
    delta: Tensor


def gated_branch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    visible: Tensor,
    generator: torch.Generator,
    *,
    among: Tensor | None = None,
) -> Branch:
    """A branch with the statistics of a softmax scaled by 1 / sqrt(D); lse is shifted as by the logarithm of a gate.

    Rows without keys have an lse of -inf and a delta of NaN.

    Args:
        among: what the softmax is taken over, if more than is `visible`.
    """
    among, group = visible if among is None else among, q.shape[2] // k.shape[2]
    scores, dp = (
        torch.einsum("bihd,bjhd->bhij", x.float(), y.float().repeat_interleave(group, 2)) for x, y in ((q, k), (do, v))
    )
    scores = (scores * q.shape[-1] ** -0.5).masked_fill(~among, -math.inf)
    lse = scores.logsumexp(-1)
    delta = ((scores - lse[..., None]).exp() * dp).sum(-1)
    return Branch(visible, lse - 2 * torch.rand(lse.shape, generator=generator, device=lse.device), delta)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, branches: Sequence[Branch], scale: float, *, low: bool
) -> list[Tensor]:
    """dq, dk and dv of all branches in fp64; with `low` in fp32 with P, dS and the results rounded as kernels do.

    Args:
        q, do: `[B,N,H,D]`, `[B,N,H,D_v]`. k, v: `[B,N_k,H_kv,D]`, `[B,N_k,H_kv,D_v]`.
    """
    rounded_to, dtype, group = q.dtype, torch.float32 if low else torch.float64, q.shape[2] // k.shape[2]

    def rounded(x: Tensor) -> Tensor:
        return x.to(rounded_to).to(dtype) if low else x

    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    dp = torch.einsum("bihd,bjhd->bhij", do, v)
    p, ds = torch.zeros_like(scores), torch.zeros_like(scores)
    for branch in branches:
        seen = branch.visible & branch.lse.isfinite()[..., None]
        lse, delta = (x.to(dtype)[..., None] for x in (branch.lse, branch.delta))
        p_branch = (scores - lse).masked_fill(~seen, -math.inf).exp()
        p += p_branch
        ds += (p_branch * (dp - delta)).masked_fill(~seen, 0)
    dq = torch.einsum("bhij,bjhd->bihd", rounded(ds), k) * scale
    dk = torch.einsum("bhij,bihd->bjhd", rounded(ds), q) * scale
    dv = torch.einsum("bhij,bihd->bjhd", rounded(p), do)
    return [rounded(x) for x in (dq, *(x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv)))]


def check_gradients(
    got: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, branches: Sequence[Branch], scale: float
) -> None:
    """Args: `got`: dq, dk and dv; the others as of `gradients`."""
    exact, naive = (gradients(q, k, v, do, branches, scale, low=low) for low in (False, True))
    for name, *compared in zip(("dq", "dk", "dv"), got, exact, naive, strict=True):
        # dS of a row with one key is nothing but the difference of two sums in fp32
        assert_within_budget(*compared, name, slack=1e-4)
