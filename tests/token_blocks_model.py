"""cute_kernels/token_blocks.py and token_best.py in PyTorch: the same steps and the same order of blocks, in any dtype.

What is not there is poisoned: rows of a step that are no entries, and scores that are not written, are NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.best_blocks import Blocks
from cute_kernels.token_blocks import overlap_weights


def token_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, blocks: Blocks, scale: float, *, tokens: int, entries: int, start: int = 0
) -> Tensor:
    """Chosen blocks `[B,H_kv,N,k]`. Arguments are those of token_scores."""
    scores = token_scores(q, k_cmp, lse, blocks, scale, tokens=tokens, entries=entries, start=start)
    rows = [best(row, blocks, start + i % q.shape[1]) for i, row in enumerate(scores.flatten(0, 2))]
    return torch.tensor(rows).view(*scores.shape[:3], blocks.count)


def token_scores(
    q: Tensor, k_cmp: Tensor, lse: Tensor, blocks: Blocks, scale: float, *, tokens: int, entries: int, start: int = 0
) -> Tensor:
    """Scores `[B,H_kv,N,blocks]` of q `[B,N,H,D]`, k_cmp `[B,E,H_kv,D]`, lse `[B,H,N]`.

    Args:
        tokens, entries: of a CTA, and of a step.
    """
    batch, rows, heads, _ = q.shape
    kv_heads = k_cmp.shape[2]
    scores = q.new_full((batch, kv_heads, rows, -(-(start + rows) // blocks.size)), math.nan)
    for b in range(batch):
        for h in range(kv_heads):
            group = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads)
            for first in range(0, rows, tokens):
                cta = slice(first, min(first + tokens, rows))
                arguments = q[b, cta, group], k_cmp[b, :, h], lse[b, group, cta], scores[b, h, cta]
                _cta(*arguments, blocks, scale, entries, start + first)
    return scores


def _cta(
    q: Tensor, k_cmp: Tensor, lse: Tensor, out: Tensor, blocks: Blocks, scale: float, entries: int, first_token: int
) -> None:
    weights = overlap_weights(blocks)
    ratio = blocks.size // blocks.stride
    before, per_step = len(weights) - ratio, blocks.per_step(entries)
    limits = [visible(blocks, first_token + i, len(k_cmp)) for i in range(len(q))]
    # A step of blocks that no one sees yet would change nothing, so the last token's are enough
    for first_block in range(0, scored(blocks, limits[-1]), per_step):
        first_entry = first_block * ratio - before
        keys = k_cmp.new_full((entries, k_cmp.shape[1]), math.nan)
        there = [j for j in range(entries) if 0 <= first_entry + j < len(k_cmp)]
        keys[there] = k_cmp[[first_entry + j for j in there]]
        total = keys.new_zeros((entries, len(q)))
        for head in range(q.shape[1]):
            total += torch.exp2(((keys @ q[:, head].T) * scale - lse[head]) / math.log(2))
        numbers = first_entry + torch.arange(entries)[:, None]
        probabilities = torch.where((numbers >= 0) & (numbers < torch.tensor(limits)), total, 0.0)
        for block in range(first_block, min(first_block + per_step, out.shape[1])):
            first = (block - first_block) * ratio
            own = probabilities[first : first + len(weights)]
            out[:, block] = own.new_tensor(weights) @ own


def visible(blocks: Blocks, token: int, entries: int) -> int:
    return max(0, min(entries, (token + 1 - blocks.length) // blocks.stride + 1))


def scored(blocks: Blocks, entries: int) -> int:
    """Blocks 0 ... that overlap one of the first entries."""
    return 0 if entries == 0 else ((entries - 1) * blocks.stride + blocks.length - 1) // blocks.size + 1


def best(scores: Tensor, blocks: Blocks, token: int) -> list[int]:
    """Forced blocks, then the highest scores, the lower index first among equals; ascending, then -1."""
    own = token // blocks.size
    forced = {b for b in (*range(blocks.init), *range(own - blocks.local + 1, own + 1)) if 0 <= b <= own}
    seen = scores[: scored(blocks, visible(blocks, token, token + 1))].tolist()
    rest = [b for b in range(len(seen)) if b not in forced and seen[b] < math.inf]
    rest.sort(key=lambda b: (-seen[b], b))
    chosen = sorted((sorted(forced) + rest)[: blocks.count])
    return chosen + [-1] * (blocks.count - len(chosen))
