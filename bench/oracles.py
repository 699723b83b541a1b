"""Truth and yardstick of errors: the definitions over all pairs of queries and keys, sharing no code with any backend.

    fp64 inputs     truth
    other inputs    what their dtype costs at least. Scores, softmax and sums are fp32. Rounded to 16 bits are what
                    tensor cores multiply, p and ds, and results: outputs of attention and, once each, gradients.

All are differentiable. docs/ has the definitions: semantics.md, neighborhood_attention.md, attention_residual.md;
arXiv 2307.08691, section 3.1, has the backward of attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.inputs import NSAInputs


def wide(dtype: torch.dtype) -> torch.dtype:
    """dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def budget(error: float, largest: float, dtype: torch.dtype, terms: int) -> float:
    """The error that a result in `dtype` may have, by that of the yardstick and the largest number of the truth.

    Args: `terms`: D, of sums in fp32 that may be taken in another order than the yardstick's.
    """
    return 2 * error + (torch.finfo(dtype).eps + terms * torch.finfo(torch.float32).eps) * largest


@dataclass(frozen=True)
class Error:
    """The largest deviation of one result from the truth, and what may be expected of its dtype."""

    name: str
    error: float
    budget: float

    @property
    def within(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error over the budget; infinite for NaN, or for an error without a budget."""
        if math.isnan(self.error) or self.budget <= 0:
            return 0.0 if self.within else math.inf
        return self.error / self.budget

    def __str__(self) -> str:
        return f"error {self.error:.2e}{self.name and f' of {self.name}'} is above the budget {self.budget:.2e}"


def worst(errors: Iterable[Error]) -> Error:
    """The error that takes most of its budget."""
    return max(errors, key=lambda found: found.share)


def deviation(x: Tensor, right: Tensor) -> float:
    """Largest deviation; NaN if there is one anywhere."""
    return float((x.double() - right).abs().max())


def compare(name: str, x: Tensor, right: Tensor, yardstick: Tensor, terms: int) -> Error:
    """Error of a result in its dtype, to which the yardstick is rounded. Args: `terms`: as in `budget`."""
    own = deviation(yardstick.to(x.dtype), right)
    return Error(name, deviation(x, right), budget(own, float(right.abs().max()), x.dtype, terms))


# Attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys, one key/value head at a time.

    Args:
        q: `[B,M,H,D]`. k: `[B,N,H_kv,D]`. v: `[B,N,H_kv,D_v]`. All in `wide(dtype)`.
        visible: bool, broadcasts to `[B,H,M,N]`.
        dtype: of the inputs that are computed with: what is rounded is rounded to it.

    Returns:
        o `[B,M,H,D_v]`, 0 in rows without keys, and lse `[B,H,M]`, there -inf, which has no gradient.
    """
    kv_heads, heads = k.shape[2], q.shape[2]
    group = heads // kv_heads
    visible = visible.expand(q.shape[0], heads, q.shape[1], k.shape[1])
    outs, lses = [], []
    for head in range(kv_heads):
        some = slice(head * group, (head + 1) * group)
        of_head = (q[:, :, some].transpose(1, 2), k[:, None, :, head], v[:, None, :, head])
        o, lse = _Attention.apply(*of_head, visible[:, some], scale, dtype)
        outs.append(o.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 1)


class _Attention(torch.autograd.Function):
    """q `[B,G,M,D]`, k and v `[B,1,N,D]`, visible `[B,G,M,N]`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        logits = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
        lse = logits.logsumexp(-1)
        o = rounded(rounded(_probabilities(logits), dtype) @ v, dtype)
        ctx.save_for_backward(q, k, v, visible, o)
        ctx.scale, ctx.dtype = scale, dtype
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, visible, o = ctx.saved_tensors
        p = _probabilities((q @ k.mT * ctx.scale).masked_fill(~visible, -math.inf))
        delta = (do * o).sum(-1, keepdim=True)
        return (*head_gradients(do, q, k, v, p, delta, ctx.scale, ctx.dtype), None, None, None)


def head_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, delta: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; k and v `[...,1,N,D]` of a key/value head, the rest `[...,G,M,...]` of its group."""
    ds = rounded(p * (do @ v.mT - delta), dtype)
    dk, dv = ((x.mT @ y).sum(-3, keepdim=True) for x, y in ((ds, q), (rounded(p, dtype), do)))
    return ds @ k * scale, dk * scale, dv


def _probabilities(logits: Tensor) -> Tensor:
    """Their softmax, 0 in rows without keys; not exp(logits - lse), which in fp32 is off by lse's rounding."""
    return logits.softmax(-1).masked_fill(logits == -math.inf, 0.0)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in its own dtype, rounded to another one."""
    return x.to(dtype).to(x.dtype)


# Neighborhood attention


MOST_PAIRS = 1 << 28  # Most pairs of queries and keys whose scores exist at once: 2 GiB in fp64


def neighbors(queries: Tensor, num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> Tensor:
    """Mask of the keys that some queries `[M]` attend to, bool `[M,N]`."""
    kernel_size = min(kernel_size, 2 * num_tokens + 2 - kernel_size % 2)  # nothing is farther away
    query, key = queries[:, None], torch.arange(num_tokens, device=queries.device)
    steps = torch.div(key - query, dilation, rounding_mode="floor")  # within a residue class
    before = kernel_size - 1 if causal else kernel_size // 2
    if boundary == "shift" and not causal:
        # As many keys as there were room for, the nearest on the side that has them
        last = (num_tokens - 1 - query) // dilation  # rows of the class after each query
        missing_before = (before - query // dilation).clamp(min=0)
        missing_behind = (kernel_size - 1 - before - last).clamp(min=0)
        first = -(before + missing_behind - missing_before)
        near = (steps >= first) & (steps < first + kernel_size)
        near = near | (query // dilation + last + 1 <= kernel_size)
    else:
        near = (steps >= -before) & (steps < kernel_size - before)
    return near & ((key - query) % dilation == 0)


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    softmax_scale: float | None = None,
    boundary: str = "truncate",
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """out `[B,N,H,D]` in q's dtype, and lse `[B,H,N]`; arguments as those of `dispatch.neighborhood_attention`."""
    batch, num_tokens, heads, dim = q.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    exact = wide(q.dtype)
    keys = k.to(exact), v.to(exact)
    per_query = batch * heads // k.shape[2] * num_tokens
    outs, lses = [], []
    for queries in torch.arange(num_tokens, device=q.device).split(max(1, MOST_PAIRS // max(per_query, 1))):
        visible = neighbors(queries, num_tokens, kernel_size, dilation, boundary, causal)
        o, lse = attention(q[:, queries].to(exact), *keys, visible, scale, q.dtype)
        outs.append(o)
        lses.append(lse)
    return torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 2)


def gradients_from_probabilities(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in q's dtype; p `[B,H,N,N]`, 0 where there is no key, is taken as it is."""
    kv_heads, exact = k.shape[2], wide(q.dtype)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    do_, q_ = (x.to(exact).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4) for x in (do, q))
    k_, v_ = (x.to(exact).transpose(1, 2)[:, :, None] for x in (k, v))
    p_ = p.to(exact).unflatten(1, (kv_heads, -1))
    delta = (p_ * (do_ @ v_.mT)).sum(-1, keepdim=True)
    gradients = head_gradients(do_, q_, k_, v_, p_, delta, scale, q.dtype)
    dq, dk, dv = (x.flatten(1, 2).transpose(1, 2).to(q.dtype) for x in gradients)
    return dq, dk, dv


# Attention residual


def attention_residual(blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, eps: float) -> Tensor:
    """out `[B,N,D]` in the blocks' dtype, of blocks `[L,B,N,D]` or L tensors `[B,N,D]`."""
    dtype = blocks[0].dtype
    exact = wide(dtype)
    x = blocks.to(exact) if isinstance(blocks, Tensor) else torch.stack([block.to(exact) for block in blocks])
    keys = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if w_norm is not None:
        keys = keys * w_norm.to(exact)
    alpha = (keys @ w_query.to(exact)).softmax(0)
    return torch.einsum("lbn,lbnd->bnd", alpha, x).to(dtype)


# NSA


def nsa(
    inputs: NSAInputs,
    config: NSAConfig,
    *,
    indices: Tensor,
    cmp_indices: Tensor | None = None,
    tiles: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """NSA of fixed-length inputs with these selections, for all query tiles or for some.

    Args:
        indices, cmp_indices: as in NSAAux, of `tiles` only where they are given.

    Returns:
        out `[B,rows,H,D_v]` in q's dtype, and o_cmp, o_slc, o_win, lse_cmp, lse_slc, lse_win, k_cmp, v_cmp.
    """
    dtype, device = inputs.q.dtype, inputs.q.device
    x = inputs.map(lambda tensor: tensor.to(wide(dtype)))
    batch, num_tokens, heads, dim = x.q.shape
    if tiles is None:
        tiles = torch.arange(-(-num_tokens // config.q_tile_size), device=device)
    rows = (tiles[:, None] * config.q_tile_size + torch.arange(config.q_tile_size, device=device)).flatten()
    tile_of_row = torch.arange(len(tiles), device=device).repeat_interleave(config.q_tile_size)[rows < num_tokens]
    rows = rows[rows < num_tokens]
    query, key = rows[:, None], torch.arange(num_tokens, device=device)

    def of_rows(chosen: Tensor, size: int, length: int) -> Tensor:
        """Entries of the chosen blocks of `size`, `[B,H,rows,length]`."""
        blocks = -(-length // size)
        listed = torch.where(chosen >= 0, chosen.long(), blocks)
        seen = torch.zeros((*chosen.shape[:-1], blocks + 1), dtype=torch.bool, device=device).scatter_(-1, listed, True)
        entries = torch.arange(length, device=device)
        return seen[:, :, tile_of_row][..., entries // size].repeat_interleave(heads // chosen.shape[1], 1)

    k_cmp, v_cmp = (_entries(x, config, name, dtype) for name in "kv")
    ends = torch.arange(k_cmp.shape[1], device=device) * config.stride + config.compress_block_size - 1
    past = key <= query if config.causal else torch.ones_like(key <= query)
    seen = {
        "cmp": ends <= query if config.causal else torch.ones((len(rows), len(ends)), dtype=torch.bool, device=device),
        "slc": past & of_rows(indices, config.select_size, num_tokens),
        "win": past & (query - key < config.window_size)
        if config.causal
        else ((query - key).abs() <= config.window_size // 2) & (config.window_size > 0),
    }
    if cmp_indices is not None:
        seen["cmp"] = seen["cmp"] & of_rows(cmp_indices, config.n_block_size, len(ends))
    keys = {
        "cmp": (k_cmp, v_cmp),
        "slc": (x.k, x.v) if x.k_slc is None or x.v_slc is None else (x.k_slc, x.v_slc),
        "win": (x.k, x.v) if x.k_win is None or x.v_win is None else (x.k_win, x.v_win),
    }
    q, scale = x.q[:, rows], config.scale(dim)
    if x.gates is not None:
        gates = x.gates[:, rows]
    elif x.gate_proj_weight is not None:
        gates = torch.einsum("bnhd,hgd->bnhg", q, x.gate_proj_weight).sigmoid()
    else:
        gates = q.new_full((batch, len(rows), heads, 3), 1 / 3)
    found = {"k_cmp": k_cmp.to(dtype), "v_cmp": v_cmp.to(dtype)}
    out = q.new_zeros(())
    for branch, name in enumerate(seen):
        o, found[f"lse_{name}"] = attention(q, *keys[name], seen[name], scale, dtype)
        found[f"o_{name}"] = o.to(dtype)
        out = out + gates[..., branch, None] * o
    return out.to(dtype), found


def _entries(inputs: NSAInputs, config: NSAConfig, name: str, dtype: torch.dtype) -> Tensor:
    """K_cmp or V_cmp `[B,N_cmp,H_kv,D]`, rounded to `dtype`."""
    given: Tensor | None = getattr(inputs, f"{name}_cmp")
    if given is not None:
        return given
    x: Tensor = getattr(inputs, name)
    device, length = x.device, config.compress_block_size
    starts = torch.arange(config.num_compressed(x.shape[1]), device=device) * config.stride
    blocks = x[:, starts[:, None] + torch.arange(length, device=device)].transpose(2, 3)  # [B,N_cmp,H_kv,l,D]
    how = config.compress["kv".index(name)] if isinstance(config.compress, tuple) else config.compress
    if len(starts) == 0:  # no block is complete: nothing is pooled, and a callable not called
        return x.new_empty(x.shape[0], 0, *x.shape[2:])
    entries = how(blocks.to(dtype)).to(x.dtype) if callable(how) else blocks.sum(-2) / length
    weight: Tensor | None = getattr(inputs, f"w_{name}_compress")
    if weight is not None:
        entries = torch.einsum("bnhd,hde->bnhe", entries, weight)
    return entries + (rounded(entries, dtype) - entries).detach()  # the gradient of rounding is 1
