"""cute_kernels/select/token.py and select/topk.py in PyTorch: the same steps, chunks of lanes and lists, in any dtype.

What is not there is poisoned: rows of a step without an entry hold NaN, and each slot of a list must be written by
exactly one lane.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.select.token import overlap_weights
from cute_kernels.select.topk import Blocks

LANES = 32


def token_topk(
    q: Tensor, k_cmp: Tensor, lse: Tensor, blocks: Blocks, scale: float, *, tokens: int, entries: int, start: int = 0
) -> Tensor:
    """Selected blocks `[B,H_kv,N,k]` of q `[B,N,H,D]`, k_cmp `[B,E,H_kv,D]`, lse `[B,H,N]`.

    Args:
        tokens, entries: of a work tile, and of a step.
    """
    batch, rows, heads, _ = q.shape
    kv_heads = k_cmp.shape[2]
    indices = torch.full((batch, kv_heads, rows, blocks.count), -1)
    for b in range(batch):
        for h in range(kv_heads):
            group = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads)
            for first in range(0, rows, tokens):
                tile = slice(first, min(first + tokens, rows))
                arguments = q[b, tile, group], k_cmp[b, :, h], lse[b, group, tile]
                indices[b, h, tile] = _work_tile(*arguments, blocks, scale, entries, start + first)
    return indices


def _work_tile(
    q: Tensor, k_cmp: Tensor, lse: Tensor, blocks: Blocks, scale: float, entries: int, first_token: int
) -> Tensor:
    weights = overlap_weights(blocks)
    ratio = blocks.size // blocks.stride
    before, per_step = len(weights) - ratio, blocks.per_step(entries)
    positions = [first_token + i for i in range(len(q))]
    limits = [max(0, min(len(k_cmp), (i + 1 - blocks.length) // blocks.stride + 1)) for i in positions]
    lists = [TokenList(blocks, i) for i in positions]
    # Blocks that no token sees change nothing, so the steps of the last token are enough
    seen = 0 if limits[-1] == 0 else ((limits[-1] - 1) * blocks.stride + blocks.length - 1) // blocks.size + 1
    for step in range(-(-seen // per_step)):
        first_entry = step * per_step * ratio - before
        keys = k_cmp.new_full((entries, k_cmp.shape[1]), math.nan)
        there = [j for j in range(entries) if 0 <= first_entry + j < len(k_cmp)]
        keys[there] = k_cmp[[first_entry + j for j in there]]
        total = keys.new_zeros((entries, len(q)))
        for head in range(q.shape[1]):
            total += torch.exp2(((keys @ q[:, head].T) * scale - lse[head]) / math.log(2))
        numbers = first_entry + torch.arange(entries)[:, None]
        scores = torch.where((numbers >= 0) & (numbers < torch.tensor(limits)), total, 0.0)
        for chunk in range(0, per_step, LANES):
            offsets = range(chunk, min(chunk + LANES, per_step))
            pooled = sum(w * scores[[o * ratio + i for o in offsets]] for i, w in enumerate(weights))
            assert isinstance(pooled, Tensor)
            for i, row in enumerate(lists):
                row.merge(pooled[:, i], step * per_step + chunk, limits[i])
    return torch.stack([row.selected() for row in lists])


class TokenList:
    """The list of one token."""

    def __init__(self, blocks: Blocks, token: int) -> None:
        self.blocks = blocks
        last = token // blocks.size
        self.init = min(blocks.init, last + 1)
        self.low = max(last - blocks.local + 1, self.init)
        self.forced = [*range(self.init), *range(self.low, last + 1 if blocks.local else self.low)]
        empty = blocks.count - len(self.forced)
        self.values = torch.tensor([math.inf] * len(self.forced) + [-math.inf] * empty, dtype=torch.float64)
        self.indices = torch.tensor(self.forced + [-1] * empty)

    def merge(self, scores: Tensor, first_block: int, limit: int) -> None:
        """The blocks of a chunk, one in each lane."""
        numbers = first_block + torch.arange(len(scores))
        first_entries = ((numbers * self.blocks.size - self.blocks.length) // self.blocks.stride + 1).clamp(min=0)
        free = torch.tensor([b not in self.forced for b in numbers.tolist()])
        candidates = (first_entries < limit) & free & (scores > self.values[-1])
        score, number = scores[candidates].double(), numbers[candidates]
        earlier = torch.arange(len(score)) < torch.arange(len(score))[:, None]
        better = (score > score[:, None]) | ((score == score[:, None]) & earlier)
        to = (self.values >= score[:, None]).sum(1) + better.sum(1)
        back = torch.arange(self.blocks.count) + (score[:, None] > self.values).sum(0)
        slots = torch.cat([to, back])
        kept = slots < self.blocks.count
        assert slots[kept].sort().values.equal(torch.arange(self.blocks.count)), "a slot without a writer, or with two"
        values, indices = torch.cat([score, self.values]), torch.cat([number, self.indices])
        self.values[slots[kept]], self.indices[slots[kept]] = values[kept], indices[kept]

    def selected(self) -> Tensor:
        chosen = self.indices[self.indices >= 0].sort().values
        return torch.cat([chosen, chosen.new_full((self.blocks.count - len(chosen),), -1)])
