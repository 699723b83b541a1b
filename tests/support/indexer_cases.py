"""Shared by tests of the indexer: scores and selections from loops, calls, and a check of them up to near ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa import top_blocks_by_max


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


@dataclass(frozen=True)
class Case:
    """Of q_idx `[batch,queries,heads,dim]` and as many keys, or more; or of documents of so many tokens, and keys.

    Args:
        starts: q_start as a tensor. behind: rows behind the last document.
    """

    queries: int | tuple[int, ...]
    keys: int | tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    heads: int = 2
    shared: bool = True
    dim: int = 64
    size: int = 64
    k: int = 2
    local: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    behind: int = 0
    whole: bool = False
    """Small integers: scores are exact, and many are equal."""

    def check(self, device: str = "cpu", **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        queries, keys = (torch.tensor(x) for x in (self.queries, self.queries if self.keys is None else self.keys))
        packed, heads = queries.dim() == 1, (self.heads, 1 if self.shared else self.heads)
        lead = () if packed else (self.batch,)
        shapes = [
            (*lead, int(n.sum()) + self.behind, of, self.dim) for n, of in zip((queries, keys), heads, strict=True)
        ]
        if self.whole:
            made = [torch.randint(-1, 2, shape, generator=generator) for shape in shapes]
        else:
            made = [torch.randn(shape, generator=generator) for shape in shapes]
        q_idx, k_idx = (x.to(device, self.dtype) for x in made)
        options |= {"block_size": self.size, "k": self.k, "local": self.local}
        if self.starts is not None:
            options["q_start"] = torch.tensor(self.starts, dtype=torch.int32, device=device)
        if packed:
            bounds = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (queries, keys)]
            options["cu_seqlens"] = bounds[0].to(device)
            if self.keys is not None:
                options["cu_seqlens_k"] = bounds[1].to(device)
        got, q_idx, k_idx = top_blocks_by_max(q_idx, k_idx, **options).cpu(), q_idx.cpu(), k_idx.cpu()
        where: dict[str, Any] = {"size": self.size, "k": self.k, "local": self.local}
        where["error"] = 0.0 if self.whole else 2**-23 * (self.dim / 8 + 4)
        if packed:
            rows, of_keys = [*queries.tolist(), self.behind], [*keys.tolist(), self.behind]
            *parts, (behind, _, _) = zip(got.split(rows, 1), q_idx.split(rows), k_idx.split(of_keys), strict=True)
            assert bool((behind == -1).all())
        else:
            parts = list(zip(got, q_idx, k_idx, strict=True))
        for i, (own, q, k) in enumerate(parts):
            start = len(k) - len(q) if self.starts is None else self.starts[i]
            assert_selects(own, q, k[: start + len(q)], start=start, **where)
