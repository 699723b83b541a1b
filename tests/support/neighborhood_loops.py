"""A second oracle of neighborhood attention, in Python loops over lists: written from the definition's offsets, not
from windows' starts, so that it shares no arithmetic with ascend_kernels/neighborhood/reference.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keys_of(i: int, num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> list[int | None]:
    """The keys of query i by slot; None where a slot has no key."""
    if causal:
        offsets = list(range(-(kernel_size - 1), 1))
    elif kernel_size % 2:
        offsets = list(range(-(kernel_size // 2), kernel_size // 2 + 1))
    else:
        offsets = list(range(-kernel_size // 2, kernel_size // 2))
    keys = [i + offset * dilation for offset in offsets]
    if boundary == "shift" and not causal:
        members = range(i % dilation, num_tokens, dilation)
        if kernel_size >= len(members):
            found = list(members)
        else:
            while keys[0] < 0:
                keys = [key + dilation for key in keys]
            while keys[-1] >= num_tokens:
                keys = [key - dilation for key in keys]
            found = keys
        return [*found, *[None] * (kernel_size - len(found))]
    return [key if 0 <= key < num_tokens else None for key in keys]


def slots_of(num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> Tensor:
    """The keys of all queries by slot, int64 `[N,kernel_size]`; N where a slot has no key."""
    window = num_tokens, kernel_size, dilation, boundary, causal
    keys = [num_tokens if key is None else key for i in range(num_tokens) for key in keys_of(i, *window)]
    return torch.tensor(keys, dtype=torch.int64).reshape(num_tokens, kernel_size)


def pairs_of(band: Tensor, kernel_size: int, dilation: int, boundary: str, causal: bool) -> Tensor:
    """The band `[B,H,N,kernel_size]` as `[B,H,N,N]`, 0 where there is no key."""
    tokens = band.shape[2]
    slots = slots_of(tokens, kernel_size, dilation, boundary, causal).to(band.device)
    pairs = band.new_zeros(*band.shape[:3], tokens + 1)  # the last column is that of slots without a key
    return pairs.scatter_(-1, slots.expand_as(band), band)[..., :tokens]


Vector = list[float]
PerHead = list[list[list[Vector]]]
"""[batch][token][head] vectors, as Tensor.tolist() gives them."""


def attend(
    q: PerHead,
    k: PerHead,
    v: PerHead,
    kernel_size: int,
    dilation: int,
    boundary: str,
    causal: bool,
    scale: float,
) -> tuple[PerHead, list[list[list[Vector]]], list[list[Vector]]]:
    """out [B][N][H][D], band [B][H][N][k], lse [B][H][N]."""
    heads = len(q[0][0])
    group = heads // len(k[0][0])
    num_tokens = len(q[0])
    outs, bands, lses = [], [], []
    for qb, kb, vb in zip(q, k, v, strict=True):
        out: list[list[Vector]] = [[] for _ in range(num_tokens)]
        band: list[list[Vector]] = [[] for _ in range(heads)]
        lse: list[Vector] = [[] for _ in range(heads)]
        for h in range(heads):
            for i in range(num_tokens):
                slots = keys_of(i, num_tokens, kernel_size, dilation, boundary, causal)
                scores = {
                    j: scale * sum(a * b for a, b in zip(qb[i][h], kb[j][h // group], strict=True))
                    for j in slots
                    if j is not None
                }
                top = max(scores.values())
                total = sum(math.exp(score - top) for score in scores.values())
                p = {j: math.exp(score - top) / total for j, score in scores.items()}
                dim = len(vb[0][0])
                out[i].append([sum(p[j] * vb[j][h // group][d] for j in p) for d in range(dim)])
                band[h].append([0.0 if j is None else p[j] for j in slots])
                lse[h].append(top + math.log(total))
        outs.append(out)
        bands.append(band)
        lses.append(lse)
    return outs, bands, lses
