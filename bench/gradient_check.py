"""The error of gradients on sampled query tiles, at any N.

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
"""Of sampled queries and keys, in all heads: a mask of 1 GiB."""


@dataclass(frozen=True)
class Tiles:
    """Sampled query tiles, and the blocks that the op under test chose for them."""

    numbers: Tensor
    """int64 `[n]`, ascending."""
    indices: Tensor
    cmp_indices: Tensor | None

    def of_head(self, head: int, kv_heads: int) -> Tiles:
        """For one key/value head and its query heads."""

        def narrow(chosen: Tensor) -> Tensor:
            return _heads(chosen, head, kv_heads, dim=1)

        return Tiles(self.numbers, narrow(self.indices), None if self.cmp_indices is None else narrow(self.cmp_indices))

    def of_query_head(self, head: int, heads: int) -> Tiles:
        """For one of `heads` query heads, some of which may share what is chosen."""

        def narrow(chosen: Tensor) -> Tensor:
            return chosen.narrow(1, head * chosen.shape[1] // heads, 1)

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
        """Of the budget; NaN, or an error without a budget, is the worst."""
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
    """Errors of the gradients that a call gave for `do`.

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
        one, chosen = _of_head(inputs, head), tiles.of_head(head, kv_heads)
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


def _heads(tensor: Tensor, head: int, kv_heads: int, dim: int = 2) -> Tensor:
    """Those that belong to one key/value head."""
    count = tensor.shape[dim] // kv_heads
    return tensor.narrow(dim, head * count, count)


def _of_head(inputs: NSAInputs, head: int) -> NSAInputs:
    kv_heads, weight = inputs.k.shape[2], inputs.gate_proj_weight
    q, k, v = (_heads(tensor, head, kv_heads) for tensor in (inputs.q, inputs.k, inputs.v))
    weight = None if weight is None else _heads(weight, head, kv_heads, dim=0)
    return replace(inputs, q=q, k=k, v=v, gate_proj_weight=weight)


def in_fp64(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """The tiles' rows by the reference, which gathers keys: exact at any length."""
    out, _ = nsa_tiles(
        inputs.map(Tensor.double), config, tiles.numbers, indices=tiles.indices, cmp_indices=tiles.cmp_indices
    )
    return out


def low_precision(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """The tiles' rows in the inputs' dtype, by math that shares no code with what is checked.

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
