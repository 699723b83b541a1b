"""Shared by tests of selection: lists of given scores, the oracle's selection, selected blocks up to near ties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa import NSAConfig, reference
from nsa.inputs import NSAInputs


def expected_list(scores: np.ndarray[Any, Any], forced: set[int], count: int) -> list[int]:
    """The forced blocks, then those of the highest scores, of equal ones the lower; ascending, padded with -1.

    Args:
        scores: NaN where a block has none.
    """
    free = [block for block in range(len(scores)) if block not in forced and not math.isnan(scores[block])]
    chosen = sorted(forced | set(sorted(free, key=lambda b: (-scores[b], b))[: count - len(forced)]))
    return chosen + [-1] * (count - len(chosen))


def compressed(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded compressed keys, fp64 lse of attention to them, and the oracle's selection by them."""
    k_cmp = reference.with_compressed_entries(inputs, config)[0].k_cmp
    assert k_cmp is not None
    exact = replace(inputs.map(Tensor.double), k_cmp=k_cmp.double(), v_cmp=k_cmp.double())
    _, aux = reference.nsa(exact, config)
    return k_cmp, aux.lse_cmp, aux.indices


def probabilities(q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, token: int) -> tuple[Tensor, Tensor]:
    """fp64 scores `[blocks]` of a token (q `[G,D]`, k_cmp `[entries,D]`, lse `[G]`), and the bound of their errors."""
    visible, size = config.num_compressed(token + 1), config.select_size
    keys, scale = k_cmp[:visible].double(), config.scale(q.shape[-1])
    p = torch.exp(scale * q.double() @ keys.T - lse[:, None]).sum(0)
    starts = torch.arange(visible, device=q.device) * config.stride
    begins = torch.arange(token // size + 1, device=q.device)[:, None] * size
    overlap = (starts + config.compress_block_size).minimum(begins + size) - starts.maximum(begins)
    scores = (overlap.clamp(min=0).double() / config.compress_block_size) @ p
    largest = scale * q.double().norm(dim=-1).max() * keys.norm(dim=-1).max()
    ulps = (q.shape[1] / 8 + 4) * largest + 4 * lse.abs().max() + q.shape[0] + 8
    return scores, 2**-23 * ulps


def check_chosen(
    got: Tensor, expected: Tensor, inputs: NSAInputs, config: NSAConfig, k_cmp: Tensor, lse: Tensor
) -> int:
    """Sets equal the oracle's but for near ties, as select/token.py says. Returns how many differ.

    Probabilities below the smallest normal fp32 number are 0 in kernels, so blocks that have no others are tied.
    """
    entries = -(-(config.select_size + config.compress_block_size) // config.stride)
    underflow = entries * inputs.group_size * torch.finfo(torch.float32).smallest_normal
    assert got.shape == expected.shape
    assert torch.equal((got >= 0).sum(-1), (expected >= 0).sum(-1)), "another number of blocks"
    assert bool(((got[..., 1:] > got[..., :-1]) | (got[..., 1:] == -1)).all()), "not ascending"
    different = (got != expected).any(-1).nonzero().tolist()
    for b, h, i in different:
        group = slice(h * inputs.group_size, (h + 1) * inputs.group_size)
        scores, bound = probabilities(inputs.q[b, i, group], k_cmp[b, :, h], lse[b, group, i], config, i)
        ours, theirs = (set(x[b, h, i].tolist()) for x in (got, expected))
        taken, left = scores[[*(ours - theirs)]].min(), scores[[*(theirs - ours)]].max()
        assert left - taken <= 2 * bound * left + underflow, f"token {i}: took {ours - theirs} for {theirs - ours}"
    return len(different)
