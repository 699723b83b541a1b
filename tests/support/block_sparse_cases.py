"""Calls of block-sparse attention, and their results and gradients over all pairs of queries and keys in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from nsa import block_sparse_attention
from tests.support.helpers import assert_within_budget, make_qkv

Pieces = list[tuple[int, int, int]]
"""Of each document: queries, keys, the token that its first query is."""


@dataclass(frozen=True)
class Case:
    """A batch of sequences of `queries` and `keys` tokens, or documents of such lengths where these are tuples.

    Args:
        count: k, blocks of a token. size: tokens of a block.
        start: q_start as an integer, or one for each sequence or document, given as a tensor.
        behind: rows behind the last document.
        logits: standard deviation of the logits.
    """

    queries: int | tuple[int, ...]
    keys: int | tuple[int, ...] | None = None
    count: int = 3
    size: int = 64
    batch: int = 1
    group: int = 2
    kv_heads: int = 2
    dim: int = 16
    v_dim: int | None = None
    causal: bool = True
    start: int | tuple[int, ...] | None = None
    behind: int = 0
    logits: float = 1.0
    dtype: torch.dtype = torch.float64
    indices: torch.dtype = torch.int64

    @property
    def packed(self) -> bool:
        return isinstance(self.queries, tuple)

    @property
    def pieces(self) -> Pieces:
        """Of each sequence or document."""
        keys = self.queries if self.keys is None else self.keys
        queries = self.queries if isinstance(self.queries, tuple) else (self.queries,) * self.batch
        lengths = keys if isinstance(keys, tuple) else (keys,) * self.batch
        starts = self.start if isinstance(self.start, tuple) else (self.start,) * len(queries)
        return [
            (num_q, num_k, num_k - num_q if start is None else start)
            for num_q, num_k, start in zip(queries, lengths, starts, strict=True)
        ]


@dataclass(frozen=True)
class Made:
    """Tensors of a case; leaves if they are to be differentiated."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    do: Tensor

    def run(self, **options: Any) -> Tensor:
        return block_sparse_attention(self.q, self.k, self.v, self.block_indices, **self.keywords, **options)

    @property
    def keywords(self) -> dict[str, Any]:
        case, device = self.case, self.q.device
        start: Any = case.start
        if isinstance(start, tuple):
            start = torch.tensor(start, dtype=torch.int32, device=device)
        keywords = {"block_size": case.size, "causal": case.causal, "q_start": start}
        if case.packed:
            keywords["cu_seqlens"] = bounds([num_q for num_q, _, _ in case.pieces], device)
            if case.keys is not None:
                keywords["cu_seqlens_k"] = bounds([num_k for _, num_k, _ in case.pieces], device)
        return keywords

    def gradients(self, **options: Any) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = block_sparse_attention(*leaves, self.block_indices, **self.keywords, **options)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.do))

    def expected(self, *, low: bool) -> tuple[Tensor, ...]:
        """The same over all pairs: in fp64, or `low`: with the roundings of the inputs' dtype (bench/oracles.py)."""
        case, dtype = self.case, self.q.dtype if low else torch.float64
        leaves = [x.detach().to(oracles.wide(dtype)).requires_grad_() for x in (self.q, self.k, self.v)]
        out = torch.zeros((*self.q.shape[:-1], self.v.shape[-1]), dtype=leaves[0].dtype, device=self.q.device)
        row = key = 0
        for b, (num_q, num_k, start) in enumerate(case.pieces):
            at: Any = (slice(row, row + num_q),) if case.packed else (b,)
            at_k: Any = (slice(key, key + num_k),) if case.packed else (b,)
            own = self.block_indices[:, at[0]] if case.packed else self.block_indices[b]
            visible = seen(own, num_k, start, case).repeat_interleave(case.group, 0)[None]
            q, k, v = leaves[0][at][None], leaves[1][at_k][None], leaves[2][at_k][None]
            o, _ = oracles.attention(q, k, v, visible, self.q.shape[-1] ** -0.5, dtype)
            out = out.index_put((torch.arange(row, row + num_q, device=q.device),), o[0]) if case.packed else out
            out = out if case.packed else out.index_put((torch.tensor([b], device=q.device),), o)
            row, key = row + num_q, key + num_k
        return (out.detach(), *torch.autograd.grad(out, leaves, self.do.to(out.dtype)))

    def check(self, **options: Any) -> None:
        """Output and gradients against fp64: within the budget of helpers.py, in fp64 but for the order of sums."""
        got, exact = self.gradients(**options), self.expected(low=False)
        low = exact if self.q.dtype == torch.float64 else self.expected(low=True)
        for name, mine, theirs, yardstick in zip(("out", "dq", "dk", "dv"), got, exact, low, strict=True):
            assert mine.dtype == self.q.dtype
            if self.q.dtype == torch.float64:
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            else:
                # dq of a row with one key is the difference of two fp32 sums of D terms, which are up to 32 here
                slack = 32 * self.q.shape[-1] * torch.finfo(torch.float32).eps
                assert_within_budget(mine, theirs, yardstick, name, slack=slack)


def bounds(lengths: list[int], device: torch.device | str) -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def seen(block_indices: Tensor, num_keys: int, start: int, case: Case) -> Tensor:
    """The keys that the tokens of a sequence see, bool `[H_kv,N_q,N_k]`: a loop over its tokens and their blocks."""
    kv_heads, num_queries, _ = block_indices.shape
    visible = torch.zeros((kv_heads, num_queries, num_keys), dtype=torch.bool)
    for head, of_head in enumerate(block_indices.tolist()):
        for token, blocks in enumerate(of_head):
            end = start + token + 1 if case.causal else num_keys
            for block in blocks:
                if block >= 0:
                    visible[head, token, block * case.size : min((block + 1) * case.size, end)] = True
    return visible.to(block_indices.device)


def make(case: Case, *, device: str = "cpu", seed: int = 0) -> Made:
    """Different blocks in random order with -1 among them, some behind the token and some behind the last key."""
    pieces, generator = case.pieces, torch.Generator().manual_seed(seed)
    rows, keys = (sum(piece[i] for piece in pieces) + case.behind for i in range(2))
    how: dict[str, Any] = {"dtype": case.dtype, "device": device, "batch": None if case.packed else case.batch}
    heads = case.group * case.kv_heads
    num_q, num_k = (rows, keys) if case.packed else pieces[0][:2]
    q = make_qkv(num_q, heads, case.kv_heads, case.dim, case.v_dim, seed=seed, **how)[0] * case.logits
    _, k, v = make_qkv(num_k, heads, case.kv_heads, case.dim, case.v_dim, seed=seed + 1, **how)
    lead = () if case.packed else (case.batch,)
    blocks = -(-max((piece[1] for piece in pieces), default=1) // case.size) + 2
    scores = torch.rand((*lead, case.kv_heads, num_q, max(blocks, case.count)), generator=generator)
    chosen = scores.argsort(-1)[..., : case.count]
    gaps = torch.rand(chosen.shape, generator=generator) < 0.2
    chosen = chosen.masked_fill(gaps, -1).to(device, case.indices)
    do = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator, dtype=torch.float64).to(device, case.dtype)
    return Made(case, q, k, v, chosen, do)
