"""Errors of NSA and of its gradients on sampled query tiles, at any N.

`do` is zero outside the sampled tiles, so dq, dk, dv and the gates' gradient follow from those tiles alone, and fp64
autograd of the reference on them is exact: keys that no sampled row sees and rows outside have zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from bench.oracles import Error
from nsa import NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import NSAInputs
from nsa.reference import nsa_tiles

SAMPLED_ROWS = 256
CHECKED_BYTES = 48 << 30
"""Most bytes that a checked call and its three branches return; heads of longer sequences are checked in turn."""
MOST_PAIRS = 1 << 30  # Most pairs of sampled queries and keys, in all heads: a mask of 1 GiB


@dataclass(frozen=True)
class Variant:
    """One combination of options, the backend that runs it, and how it is timed."""

    config: NSAConfig
    backend: str
    modes: tuple[str, ...]
    backward: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        config = self.config
        return f"{self.backend} l={config.compress_block_size} num_cmp={config.num_cmp_selected_blocks or 'none'}"

    def call(self, inputs: NSAInputs) -> Callable[[], Tensor]:
        given: dict[str, Any] = {**inputs.tensors(), "config": self.config, "backend": self.backend}
        return partial(nsa, **given, recompute=self.recompute) if self.backward else partial(nsa_forward, **given)


@dataclass(frozen=True)
class Tiles:
    """Sampled query tiles, and the blocks that the op under test chose for them."""

    numbers: Tensor  # int64 `[n]`, ascending
    indices: Tensor
    cmp_indices: Tensor | None

    def of_heads(self, heads: range, count: int) -> Tiles:
        """Tiles of some of `count` heads. Consecutive heads may share their blocks."""

        def narrow(chosen: Tensor) -> Tensor:
            start, stop = (end * chosen.shape[1] // count for end in (heads.start, heads.stop))
            return chosen[:, start : max(start + 1, stop)]

        return Tiles(self.numbers, narrow(self.indices), None if self.cmp_indices is None else narrow(self.cmp_indices))


@dataclass(frozen=True)
class Sample:
    """The checked call: its worst row's error, and its rows at some positions, for other calls to be compared with."""

    worst: Error
    positions: Tensor
    rows: Tensor
    tiles: Tiles
    gradient: Error | None = None  # The one that takes most of its budget

    def same(self, out: Tensor) -> bool:
        return torch.equal(out[:, self.positions], self.rows)


def check(inputs: NSAInputs, variant: Variant) -> tuple[Sample, list[str]]:
    """The checked call, and what is wrong with it or with the one to be timed."""
    plain = inputs.map(Tensor.detach)
    sample = sampled_error(plain, variant)
    wrong = [] if sample.worst.within else [str(sample.worst)]
    out = variant.call(inputs)()
    if not sample.same(out.detach()):
        wrong.append("the timed call gives another result than the checked one, which also returns NSAAux")
    if not variant.backward:
        return sample, wrong
    do, generator = torch.zeros_like(out), torch.Generator(out.device).manual_seed(0)
    do[:, sample.positions] = do[:, sample.positions].normal_(generator=generator)
    leaves = inputs.tensors()
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), do), strict=True))
    del out  # and what it keeps for backward
    errors = gradient_errors(gradients, plain, variant.config, sample.tiles, sample.positions, do)
    wrong += [str(found) for found in errors if not found.within]
    return replace(sample, gradient=oracles.worst(errors)), wrong


# The forward


def sampled_error(inputs: NSAInputs, variant: Variant) -> Sample:
    """Error of the whole op against fp64, and what may be expected of the dtype.

    Of at least SAMPLED_ROWS rows, that of the row which takes most of its own budget: the first rows see few keys, so
    their values are many times larger than those of late rows, of which one budget for all would hide what is wrong.
    Budget: that of bench/oracles.py for `low_precision`. The oracle attends to the blocks that the op under test chose.
    """
    size, num_tokens, heads = variant.config.q_tile_size, *inputs.q.shape[1:3]
    num_tiles = -(-num_tokens // size)
    wanted = min(num_tiles, max(4, math.ceil(SAMPLED_ROWS / size)))
    numbers = torch.linspace(0, num_tiles - 1, wanted, device=inputs.q.device).round().long()
    positions = (numbers[:, None] * size + torch.arange(size, device=numbers.device)).flatten()
    positions = positions[positions < num_tokens]
    chosen, outs, lows = [], [], []
    for some in (of_heads(inputs, group) for group in together(inputs)):
        given: dict[str, Any] = some.tensors()
        out, aux = nsa_forward_aux(**given, config=variant.config, backend=variant.backend)
        cmp_indices = None if aux.cmp_indices is None else aux.cmp_indices[:, :, numbers]
        chosen.append(Tiles(numbers, aux.indices[:, :, numbers], cmp_indices))
        outs.append(out[:, positions])
        del out, aux  # long sequences need their memory for what follows
        lows.append(low_precision(some, variant.config, chosen[-1]))
    rows, low, indices = torch.cat(outs, 2), torch.cat(lows, 2), torch.cat([part.indices for part in chosen], 1)
    compressed = [part.cmp_indices for part in chosen if part.cmp_indices is not None]
    tiles = Tiles(numbers, indices, torch.cat(compressed, 1) if compressed else None)
    # One head at a time, so that the copies in fp64 fit beside the inputs at any N that runs
    single = [range(head, head + 1) for head in range(heads)]
    exact = torch.cat([in_fp64(of_heads(inputs, one), variant.config, tiles.of_heads(one, heads)) for one in single], 2)
    figures = [x.abs().amax((0, 2, 3)).tolist() for x in (rows.double() - exact, low.double() - exact, exact)]
    errors = (
        Error("", error, oracles.budget(low_error, largest, rows.dtype, inputs.q.shape[-1]))
        for error, low_error, largest in zip(*figures, strict=True)
    )
    return Sample(oracles.worst(errors), positions, rows, tiles)


def together(inputs: NSAInputs) -> list[range]:
    """Query heads that are checked in one call: all, unless four outputs are more than CHECKED_BYTES."""
    kv_heads, group = inputs.k.shape[2], inputs.group_size
    count = max(1, min(kv_heads, CHECKED_BYTES // (4 * inputs.q.nbytes // kv_heads)))
    return [range(first * group, min(first + count, kv_heads) * group) for first in range(0, kv_heads, count)]


# Gradients


def gradient_errors(
    gradients: dict[str, Tensor], inputs: NSAInputs, config: NSAConfig, tiles: Tiles, positions: Tensor, do: Tensor
) -> list[Error]:
    """Errors of the gradients that a call returned for `do`, which is zero but at `positions`, the rows of the tiles.

    Budget: that of bench/oracles.py for `low_precision`. One key/value head at a time, so that fp64 copies of long
    sequences fit.
    """
    kv_heads, group = inputs.k.shape[2], inputs.group_size
    found: dict[str, list[Tensor]] = {name: [] for name in gradients}
    outside = gradients["q"].index_fill(1, positions, 0).abs().amax().double()
    for head in range(kv_heads):
        heads = range(head * group, (head + 1) * group)
        one, chosen = of_heads(inputs, heads), tiles.of_heads(heads, kv_heads * group)
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
    for name, of_each in found.items():
        error, low_error, largest = torch.stack(of_each).amax(0)
        if name == "q":
            error = torch.maximum(error, outside)
        budget = oracles.budget(low_error.item(), largest.item(), inputs.q.dtype, inputs.q.shape[-1])
        results.append(Error(f"the gradient of {name}", error.item(), budget))
    return results


def _heads(tensor: Tensor, head: int, kv_heads: int, dim: int = 2) -> Tensor:
    """The heads of one key/value head."""
    count = tensor.shape[dim] // kv_heads
    return tensor.narrow(dim, head * count, count)


def _differentiate(
    inputs: NSAInputs,
    config: NSAConfig,
    tiles: Tiles,
    positions: Tensor,
    do: Tensor,
    run: Callable[[NSAInputs, NSAConfig, Tiles], Tensor],
) -> dict[str, Tensor]:
    """Autograd of `run` on some tiles; of q only the tiles' rows."""
    leaves = inputs.map(lambda tensor: tensor.detach().requires_grad_())
    out = run(leaves, config, tiles)
    wanted = leaves.tensors()
    found = torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True)
    gradients = dict(zip(wanted, found, strict=True))
    return {**gradients, "q": gradients["q"][:, positions]}


# Rows of tiles


def of_heads(inputs: NSAInputs, heads: range) -> NSAInputs:
    """Some query heads of the same sequences, with their keys; nothing is copied."""
    weight, group = inputs.gate_proj_weight, inputs.group_size
    some, of_keys = slice(heads.start, heads.stop), slice(heads.start // group, -(-heads.stop // group))
    return replace(
        inputs,
        q=inputs.q[:, :, some],
        k=inputs.k[:, :, of_keys],
        v=inputs.v[:, :, of_keys],
        gate_proj_weight=None if weight is None else weight[some],
    )


def in_fp64(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """Rows of the tiles by the reference, which gathers keys: exact at any length."""
    chosen = {"indices": tiles.indices, "cmp_indices": tiles.cmp_indices}
    return nsa_tiles(inputs.map(Tensor.double), config, tiles.numbers, **chosen)[0]


def low_precision(inputs: NSAInputs, config: NSAConfig, tiles: Tiles) -> Tensor:
    """Rows of the tiles in the inputs' dtype, by math that shares no code with what is checked.

    All pairs of queries and keys, while they fit. Beyond, on GPUs, kernels are held to the reference, which sums in
    fp32 and rounds once.
    """
    batch, num_tokens, heads, _ = inputs.q.shape
    pairs = batch * heads * len(tiles.numbers) * config.q_tile_size * num_tokens
    chosen: dict[str, Any] = {"indices": tiles.indices, "cmp_indices": tiles.cmp_indices}
    if pairs <= MOST_PAIRS:
        return oracles.nsa(inputs, config, tiles=tiles.numbers, **chosen)[0]
    return nsa_tiles(inputs, config, tiles.numbers, **chosen)[0]
