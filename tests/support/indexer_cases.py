"""What tests of the indexer share: scores and selections from loops, and a check of selections up to near ties."""

from __future__ import annotations

import torch
from torch import Tensor


def block_scores(q_idx: Tensor, k_idx: Tensor, *, size: int, start: int) -> Tensor:
    """fp64 `[H_i,N_q,blocks]` of a sequence `[N_q,H_i,D_i]`, `[N,heads,D_i]`: -inf for blocks without a visible key."""
    heads = q_idx.shape[1]
    keys = k_idx.double().expand(-1, heads, -1)
    blocks = -(-k_idx.shape[0] // size)
    scores = torch.full((heads, q_idx.shape[0], blocks), -torch.inf, dtype=torch.float64)
    for token in range(q_idx.shape[0]):
        logits = torch.einsum("hd,nhd->hn", q_idx[token].double(), keys[: start + token + 1])
        for block in range((start + token) // size + 1):
            scores[:, token, block] = logits[:, block * size : (block + 1) * size].amax(-1)
    return scores


def select(scores: Tensor, *, size: int, start: int, k: int, local: int) -> Tensor:
    """int `[H_i,N_q,k]` from scores `[H_i,N_q,blocks]`: Python's sort, which keeps the order of what is equal."""
    heads, tokens, blocks = scores.shape
    indices = torch.full((heads, tokens, k), -1)
    for head in range(heads):
        for token in range(tokens):
            own, score = (start + token) // size, scores[head, token].tolist()
            forced = [b for b in range(blocks) if own - local < b <= own]
            others = sorted(
                (b for b in range(blocks) if b not in forced and score[b] > -torch.inf), key=lambda b: -score[b]
            )
            chosen = sorted((forced + others)[:k])
            indices[head, token, : len(chosen)] = torch.tensor(chosen, dtype=torch.long)
    return indices


def assert_selects(
    got: Tensor, q_idx: Tensor, k_idx: Tensor, *, size: int, start: int, k: int, local: int, error: float
) -> None:
    """Each token's blocks are the exact ones, but where scores differ by no more than twice the error of each."""
    scores = block_scores(q_idx, k_idx, size=size, start=start)
    expected = select(scores, size=size, start=start, k=k, local=local)
    assert got.shape == expected.shape
    norms = q_idx.double().norm(dim=-1).T[..., None] * max(k_idx.double().norm(dim=-1).flatten().tolist(), default=0.0)
    for head, token in (got.long().cpu() != expected).any(-1).nonzero().tolist():
        own, right = (set(x[head, token].tolist()) - {-1} for x in (got, expected))
        assert len(own) == len(right), (head, token, own, right)
        assert got[head, token].tolist() == [*sorted(own), *[-1] * (k - len(own))]
        row, allowed = scores[head, token], 2 * error * norms[head, token].item()
        worst = max((row[b].item() for b in right - own), default=0.0) - min(
            (row[b].item() for b in own - right), default=0.0
        )
        assert worst <= allowed, (head, token, own, right, worst, allowed)
