"""Error of NSA's gradients on sampled query tiles, at any N.

With a `do` that is zero outside the sampled tiles, dq, dk, dv and the gates' gradient follow from those tiles alone, so
fp64 autograd of the reference on them is the whole truth: keys that no sampled row sees and rows outside have zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench import oracles
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from nsa.reference import nsa_tiles

MOST_PAIRS = 1 << 30
"""Most pairs of sampled queries and keys, in all heads: a mask of 1 GiB."""


@dataclass(frozen=True)
class Tiles:
    """Sampled query tiles, and the blocks that the op under test chose for them."""

    numbers: Tensor
    """int64 `[n]`, ascending."""
    indices: Tensor
    cmp_indices: Tensor | None

    def of_heads(self, heads: range, count: int) -> Tiles:
        """Tiles of some of `count` heads. Consecutive heads may share their blocks."""

        def narrow(chosen: Tensor) -> Tensor:
            start, stop = (end * chosen.shape[1] // count for end in (heads.start, heads.stop))
            return chosen[:, start : max(start + 1, stop)]

        return Tiles(self.numbers, narrow(self.indices), None if self.cmp_indices is None else narrow(self.cmp_indices))


Rows = Callable[[NSAInputs, NSAConfig, Tiles], Tensor]


@dataclass(frozen=True)
class GradientError:
    """The largest deviation of one tensor's gradient from fp64, and what may be expected of the dtype."""

    name: str
    error: float
    budget: float

    @property
    def within(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error over the budget; infinite for NaN, or for an error without a budget."""
        if not self.within:
            return self.error / self.budget if self.error > self.budget > 0 else float("inf")
        return self.error / self.budget if self.budget > 0 else 0.0


def sampled_do(like: Tensor, positions: Tensor) -> Tensor:
    """Normal in the rows at `positions` of `[B,N,H,D_v]`, the same each time; zero elsewhere."""
    generator = torch.Generator(like.device).manual_seed(0)
    do = torch.zeros_like(like)
    shape = like[:, positions].shape
    do[:, positions] = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
    return do


def gradient_errors(
    gradients: dict[str, Tensor], inputs: NSAInputs, config: NSAConfig, tiles: Tiles, positions: Tensor, do: Tensor
) -> list[GradientError]:
    """Errors of the gradients that a call returned for `do`.

    Budget: that of bench/oracles.py for `low_precision`. One key/value head at a time, so that fp64 copies of long
    sequences fit.

    Args:
        gradients: of q, k, v and, if given, gate_proj_weight.
        inputs: fixed-length ones, that need no gradients.
        positions: rows of the tiles; `do` is zero in all others.
    """
    kv_heads = inputs.k.shape[2]
    found: dict[str, list[Tensor]] = {name: [] for name in gradients}
    outside = gradients["q"].index_fill(1, positions, 0).abs().amax().double()
    for head in range(kv_heads):
        one, chosen = _of_head(inputs, head), tiles.of_heads(range(head, head + 1), kv_heads)
        rows = _heads(do[:, positions], head, kv_heads)
        exact = _differentiate(one.map(Tensor.double), config, chosen, positions, rows.double(), in_fp64)
        low = _differentiate(one, config, chosen, positions, rows, low_precision)
        for name, right in exact.items():
            got = _heads(gradients[name], head, kv_heads, dim=0 if name == "gate_proj_weight" else 2)
            if name == "q":
                got = got[:, positions]
            errors = [(x.double() - right).abs().amax() for x in (got, low[name])]
            found[name].append(torch.stack([*errors, right.abs().amax()]))
    results = []
    for name, of_heads in found.items():
        error, low_error, largest = torch.stack(of_heads).amax(0)
        if name == "q":
            error = torch.maximum(error, outside)
        budget = oracles.budget(low_error.item(), largest.item(), inputs.q.dtype, inputs.q.shape[-1])
        results.append(GradientError(name, error.item(), budget))
    return results


def of_heads(inputs: NSAInputs, heads: range, kv_heads: range) -> NSAInputs:
    """Some heads of the same sequences; nothing is copied."""
    weight = inputs.gate_proj_weight
    return replace(
        inputs,
        q=inputs.q[:, :, heads.start : heads.stop],
        k=inputs.k[:, :, kv_heads.start : kv_heads.stop],
        v=inputs.v[:, :, kv_heads.start : kv_heads.stop],
        gate_proj_weight=None if weight is None else weight[heads.start : heads.stop],
    )


def _heads(tensor: Tensor, head: int, kv_heads: int, dim: int = 2) -> Tensor:
    """The heads of one key/value head."""
    count = tensor.shape[dim] // kv_heads
    return tensor.narrow(dim, head * count, count)


def _of_head(inputs: NSAInputs, head: int) -> NSAInputs:
    group = inputs.q.shape[2] // inputs.k.shape[2]
    return of_heads(inputs, range(head * group, (head + 1) * group), range(head, head + 1))


def in_fp64(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """Rows of the tiles by the reference, which gathers keys: exact at any length."""
    out, _ = nsa_tiles(
        inputs.map(Tensor.double), config, tiles.numbers, indices=tiles.indices, cmp_indices=tiles.cmp_indices
    )
    return out


def low_precision(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """Rows of the tiles in the inputs' dtype, by math that shares no code with what is checked.

    All pairs of queries and keys, while they fit. Beyond, on GPUs, kernels are held to the reference, which sums in
    fp32 and rounds once.
    """
    batch, num_tokens, heads, _ = inputs.q.shape
    pairs = batch * heads * len(tiles.numbers) * config.q_tile_size * num_tokens
    if pairs <= MOST_PAIRS:
        return oracles.nsa(inputs, config, tiles=tiles.numbers, indices=tiles.indices, cmp_indices=tiles.cmp_indices)[0]
    return nsa_tiles(inputs, config, tiles.numbers, indices=tiles.indices, cmp_indices=tiles.cmp_indices)[0]


def _differentiate(
    inputs: NSAInputs, config: NSAConfig, tiles: Tiles, positions: Tensor, do: Tensor, run: Rows
) -> dict[str, Tensor]:
    """Autograd of `run` on some tiles; of q only the tiles' rows."""
    leaves = inputs.map(lambda tensor: tensor.detach().requires_grad_())
    out = run(leaves, config, tiles)
    wanted = leaves.tensors()
    gradients = dict(
        zip(wanted, torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True), strict=True)
    )
    return {**gradients, "q": gradients["q"][:, positions]}
