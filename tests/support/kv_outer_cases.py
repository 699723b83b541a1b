"""Inputs of attention per token, their fp64 oracle, and checks of the KV-outer and query-outer kernels against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import oracles
from cute_kernels.plan import forced_in_one_pass
from tests.support.attention_gradients import Branch, check_gradients, gated_branch, gradients
from tests.support.helpers import SUM_ERROR, assert_within_budget

BF16, FP16 = torch.bfloat16, torch.float16


def random_indices(
    shape: tuple[int, int],
    lengths: list[int],
    blocks: int,
    count: int,
    *,
    size: int,
    seed: int = 0,
    forced: tuple[int, int] = (0, 0),
) -> Tensor:
    """Some blocks of each token of documents of these lengths (`drawn_blocks`). Args: blocks: the most looked at."""
    begun = torch.cat([torch.arange(n) // size + 1 for n in lengths])
    return drawn_blocks(shape, begun, blocks, count, seed=seed, forced=forced)


def drawn_blocks(
    shape: tuple[int, int], begun: Tensor, blocks: int, count: int, *, seed: int = 0, forced: tuple[int, int] = (0, 0)
) -> Tensor:
    """Some of the blocks that have begun, the first and the last one often among them: ascending, then -1.

    Args:
        begun: how many have, for each row.
        forced: blocks at the beginning and at the end that are there wherever they exist.
    """
    generator = torch.Generator().manual_seed(seed)
    begun, block = begun[:, None], torch.arange(blocks)
    scores = torch.rand((*shape, len(begun), blocks), generator=generator)
    scores = scores + 0.7 * (block == begun - 1) + 0.7 * (block == 0)
    scores = scores + 3 * ((block < forced[0]) | (block >= begun - forced[1]))
    order = scores.masked_fill(block >= begun, -1).argsort(-1, descending=True)[..., :count]
    chosen = torch.full((*shape, len(begun), count), blocks)
    chosen[..., : order.shape[-1]] = order.where(order < begun, blocks)
    chosen = chosen.sort(-1).values
    return torch.where(chosen < blocks, chosen, -1).int()


def blocks_of_tiles(
    shape: tuple[int, int],
    tiles: int,
    blocks: int,
    count: int,
    *,
    tile: int,
    size: int,
    causal: bool,
    length: int = 1,
    stride: int = 1,
) -> Tensor:
    """Some of the blocks that begin before a tile's end."""
    begun = torch.full((tiles,), blocks)
    if causal:
        seen = (torch.arange(1, tiles + 1) * tile - length) // stride + 1
        begun = (-(-seen // size)).clamp(0, blocks)
    return drawn_blocks(shape, begun, blocks, count)


GATES = {"projected": None, "projected fp32": torch.float32, "given": None, "given fp32": torch.float32, "thirds": None}
"""Where gates come from, and of which type, if not that of q."""


@dataclass(frozen=True)
class Inputs:
    """Of forward and backward. `visible` is bool `[B,H_kv,N,N]`: the keys that each token sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    indices: Tensor
    visible: Tensor
    size: int
    scale: float
    packed: Any
    """documents.PackedBlocks of packed documents, which lie where they lie; None: sequences."""
    shift: Tensor
    """What lse is lowered by for the backward, `[B,H,N]`."""
    forced: tuple[int, int] = (0, 0)
    """First and local blocks that all of indices hold."""

    def attend(self, *, low: bool) -> tuple[Tensor, Tensor]:
        """o and lse in fp64; with `low` in fp32 with P and o rounded."""
        dtype = self.q.dtype if low else torch.float64
        q, k, v = (x.to(oracles.wide(dtype)) for x in (self.q, self.k, self.v))
        return oracles.attention(q, k, v, self._visible_to_heads(), self.scale, dtype)

    def _visible_to_heads(self) -> Tensor:
        """bool `[B,H,N,N]`."""
        return self.visible.repeat_interleave(self.q.shape[2] // self.visible.shape[1], 1)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """lse and delta as the backward is given them."""
        o, lse = self.attend(low=False)
        delta = (o * self.do.double()).sum(-1).transpose(1, 2)
        lse, delta = ((lse - self.shift).float(), delta.float())
        return lse, delta.clone(memory_format=torch.contiguous_format)

    def forward(self, *, query_outer: bool = False, gating: Any = None, first: int = 0) -> tuple[Tensor, Tensor]:
        """o and lse of the queries from `first` on."""
        from cute_kernels.attend.kv_outer import kv_outer_forward
        from cute_kernels.attend.query_outer import query_outer_forward

        how: dict[str, Any] = {"size": self.size, "scale": self.scale, "packed": self.packed, "first_token": first}
        tensors = self.q[:, first:], self.k, self.v, self.indices[:, :, first:]
        if query_outer:
            return query_outer_forward(*tensors, **how)
        how["init"], how["local"] = forced_in_one_pass(*self.forced, self.size)
        return kv_outer_forward(*tensors, gating=gating, **how)

    def backward(
        self, lse: Tensor | None = None, delta: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Args: others: what else dq is to hold."""
        from cute_kernels.attend.kv_outer_backward import kv_outer_backward

        how: dict[str, Any] = {"size": self.size, "scale": self.scale, "packed": self.packed, **others}
        if lse is None or delta is None:
            lse, delta = self.statistics()
        into = torch.empty_like(self.q), torch.empty_like(self.k), torch.empty_like(self.v)
        kv_outer_backward(self.q, self.k, self.v, self.indices, self.do, lse, delta, into=into, **how)
        return into

    def _terms(self, branches: int, w_dtype: torch.dtype | None) -> tuple[Any, Tensor, list[Tensor]]:
        """Terms that dq is to hold beside the selected branch's, a place for it amid NaN, and the terms in fp64."""
        from cute_kernels.gate.sums import QueryTerms

        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.q.device, dtype)

        batch, tokens, heads, dim = self.q.shape
        others = [normal(*self.q.shape, dtype=self.q.dtype) for _ in range(branches)]
        logits = normal(batch, tokens, heads, 4, dtype=torch.float32)[..., 1:]
        weight = None if w_dtype is None else normal(heads, 3, dim, dtype=w_dtype)
        exact = [x.double() for x in others]
        if weight is not None:
            exact.append(torch.einsum("bthg,hgd->bthd", logits.double(), weight.double()))
        around = torch.full((batch, tokens + 2, heads, dim), math.nan, dtype=self.q.dtype, device=self.q.device)
        if others:  # the first term and the result, in one place
            others[0] = around[:, 1:-1].copy_(others[0])
        return QueryTerms((*others,), logits, weight), around, exact

    def _with_terms(self, around: Tensor, keys: Sequence[Tensor], **how: Any) -> Tensor:
        """dq, in its place; dk and dv must be those that there are without other terms."""
        from cute_kernels.attend.kv_outer_backward import kv_outer_backward

        results = around[:, 1:-1], torch.empty_like(self.k), torch.empty_like(self.v)
        inputs = self.q, self.k, self.v, self.indices, self.do, *self.statistics()
        kv_outer_backward(*inputs, size=self.size, scale=self.scale, packed=self.packed, into=results, **how)
        assert all(torch.equal(got, expected) for got, expected in zip(results[1:], keys, strict=True))
        assert around[:, [0, -1]].isnan().all()
        return results[0]

    def check_terms(self, *, branches: int, w_dtype: torch.dtype | None) -> None:
        """dq that holds other branches and the logits' term: the fp32 sum rounded once, whatever else is there."""
        terms, around, exact = self._terms(branches, w_dtype)
        alone, *keys = self.backward()
        dq = self._with_terms(around, keys, terms=terms)
        expected = sum(exact, alone.double())
        # Both results are rounded to half a unit in the last place; sums of n + 5 terms in fp32 in between
        magnitude = sum((x.abs() for x in exact), alone.double().abs())
        unit, fp32 = (torch.finfo(dtype).eps / 2 for dtype in (self.q.dtype, torch.float32))
        budget = (
            1.01 * unit * (alone.double().abs() + expected.abs()) + 2 * (self.indices.shape[3] + 5) * fp32 * magnitude
        )
        assert ((dq.double() - expected).abs() <= budget).all()
        if not exact:
            assert torch.equal(dq, alone)

    def check_window(self, left: int, *, w_dtype: torch.dtype | None, has_cmp: bool) -> None:
        """dq with the window's and local blocks' in it, the compressed branch's and the logits' term, against fp64."""
        from cute_kernels.attend.window_dq_combine import WindowQueries

        row = torch.arange(self.q.shape[1], device=self.q.device)[:, None]
        seen = ((row >= row.T) & (row - left <= row.T)).expand(self.q.shape[0], self.q.shape[2], -1, -1)
        tensors = self.q, self.k, self.v, self.do
        window = gated_branch(*tensors, seen, torch.Generator(self.q.device).manual_seed(4))
        window.lse[:, :, 5::7] = window.delta[:, :, 5::7] = math.inf  # as with a gate of 0
        terms, around, exact = self._terms(int(has_cmp), w_dtype)
        _, *keys = self.backward(local=self.forced[1])
        queries = WindowQueries(window.lse, window.delta, left)
        dq = self._with_terms(around, keys, terms=terms, window=queries, local=self.forced[1])
        branches = [Branch(self._visible_to_heads(), *self.statistics()), window]
        oracle, naive = (sum(exact, gradients(*tensors, branches, self.scale, low=low)[0]) for low in (False, True))
        assert_within_budget(dq, oracle, naive.to(dq.dtype), "dq", slack=1e-4)

    def other_after(self, token: int) -> Inputs:
        """The same with other queries, keys and values behind a token."""
        changed = {}
        for name in ("q", "k", "v"):
            x = getattr(self, name).clone()
            x[:, token + 1 :] = 3 * torch.randn_like(x[:, token + 1 :])
            changed[name] = x
        return replace(self, **changed)

    def assert_attends(self, o: Tensor, lse: Tensor, name: str = "o", first: int = 0) -> Tensor:
        """Rows from `first` on that see keys, against fp64. Returns which do, bool `[B,H,rows]`."""
        rows = slice(first, first + o.shape[1])
        (oracle, expected), (naive, low) = (self.attend(low=low) for low in (False, True))
        there = expected[..., rows].isfinite()
        assert_within_budget(*(x.transpose(1, 2)[there] for x in (o, oracle[:, rows], naive[:, rows])), name)
        sums = (x[there] for x in (lse, expected[..., rows], low[..., rows]))
        assert_within_budget(*sums, f"lse of {name}", slack=SUM_ERROR)
        return there

    def check_forward(self, *, query_outer: bool = False) -> None:
        o, lse = self.forward(query_outer=query_outer)
        there = self.assert_attends(o, lse)
        assert (lse[~there] == -math.inf).all()
        assert not o.transpose(1, 2)[~there].any()

    def check_gated(self, gates: str) -> None:
        check_gated(self.q, gates, lambda gating: self.forward(gating=gating))

    def attend_forced(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Of some rows, o and lse of the forced blocks alone; NaN where nothing was written."""
        from cute_kernels.attend.forced import forced_forward

        q = self.q[:, rows]
        o = torch.full((*q.shape[:3], self.v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
        lse = torch.full_like(self.shift[:, :, rows], math.nan)
        how = {"first_token": rows.start, **dict(zip(("init", "local"), self.forced, strict=True))}
        k, v = (x if self.packed is not None else x[:, : rows.stop] for x in (self.k, self.v))
        forced_forward(q, k, v, o, lse, size=self.size, scale=self.scale, packed=self.packed, **how)
        return o, lse

    def check_forced(self, first: int = 0, stop: int | None = None) -> None:
        """Of indices that hold the forced blocks alone. Args: the rows."""
        o, lse = self.attend_forced(slice(first, self.q.shape[1] if stop is None else stop))
        there = self.assert_attends(o, lse, first=first)
        assert o.transpose(1, 2)[~there].isnan().all()
        assert lse[~there].isnan().all()

    def check(self) -> None:
        self.check_forward()
        branches = [Branch(self._visible_to_heads(), *self.statistics())]
        check_gradients(self.backward(), self.q, self.k, self.v, self.do, branches, self.scale)


def make(
    tokens: int | list[int],
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    *,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    count: int | None = 4,
    size: int = 64,
    indices: Tensor | None = None,
    behind: int = 0,
    forced: tuple[int, int] = (0, 0),
    device: str = "cuda",
) -> Inputs:
    """Normal inputs.

    Args:
        tokens: of each batch; or of documents, with `behind` more behind the last one.
        forced: blocks that all tokens choose; 0 more are chosen with `count` None.
    """
    lengths = [tokens] if isinstance(tokens, int) else tokens
    packed, n = not isinstance(tokens, int), sum(lengths) + behind
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    v_dim, heads = v_dim or dim, group * kv_heads
    q, do = normal(batch, n, heads, dim), normal(batch, n, heads, v_dim)
    k, v = normal(batch, n, kv_heads, dim), normal(batch, n, kv_heads, v_dim)
    blocks = max(1, -(-max(lengths, default=0) // size))
    if indices is None:
        count = sum(forced) if count is None else count
        indices = random_indices((batch, kv_heads), lengths, blocks, count, size=size, forced=forced)
        rest = torch.zeros((batch, kv_heads, behind, count), dtype=torch.int32)  # chosen by tokens of no document
        indices = torch.cat([indices, rest], 2)
    visible = torch.zeros((batch, kv_heads, n, n), dtype=torch.bool)
    start = 0
    for length in lengths:
        here, position = slice(start, start + length), torch.arange(length)
        mine = indices[:, :, here].long()
        chosen = torch.zeros((batch, kv_heads, length, blocks + 1), dtype=torch.bool)
        chosen.scatter_(3, mine.where((mine >= 0) & (mine < blocks), blocks), True)
        keys = chosen[..., :blocks].repeat_interleave(size, 3)[..., :length]
        visible[:, :, here, here] = keys & (position <= position[:, None])
        start += length
    blocks = None
    if packed:
        from cute_kernels.pool import documents

        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        pack = documents.Packed(cu_seqlens)
        bounds = documents.bounds_of(pack, tile=size, step=size, length=size, stride=size)
        bounds[documents.ROW] = bounds[documents.TOKEN]  # queries and keys lie side by side
        positions = torch.arange(n, dtype=torch.int32, device=device)
        positions[sum(lengths) :] = -1
        blocks = documents.PackedBlocks(bounds, positions, documents.sizes(n, len(lengths), size, 1)[0])
    shift = 2 * torch.rand((batch, heads, n), generator=generator).to(device)
    tensors = q, k, v, do, indices.to(device), visible.to(device)
    return Inputs(*tensors, size, dim**-0.5, blocks, shift, forced)


def check_gated(q: Tensor, gates: str, run: Callable[[Any], tuple[Tensor, ...]]) -> None:
    """What the selected branch writes beside its results: bitwise what gating its o gives.

    Args:
        gates: of GATES.
        run: gives o, lse and, if it attends to the window itself, o and lse of the window. Is given a Gating or None.
    """
    from cute_kernels.gate.forward import Gating, gated_sum

    generator = torch.Generator().manual_seed(2)
    batch, tokens, heads, dim = q.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(q.device, GATES[gates] or q.dtype)

    # Rows of some later queries' chunk, amid what must not be touched
    o_cmp, o_win = (normal(batch, tokens, heads, dim).to(q.dtype) for _ in range(2))
    around = torch.full((batch, tokens + 2, heads, dim), math.nan, dtype=q.dtype, device=q.device)
    out, kept = around[:, 1:-1], around.clone()
    weight = normal(heads, 3, dim) if gates.startswith("projected") else None
    given = normal(batch, tokens, heads, 4)[..., 1:] if gates.startswith("given") else None
    o, *others = run(None)
    attends = len(others) > 1
    used = gated_sum(
        o_cmp, o, others[1] if attends else o_win, kept[:, 1:-1], q=q, gate_proj_weight=weight, gates=given
    )
    for keeps in (False, True):
        around.fill_(math.nan)
        o_slc, gates_used = (torch.full_like(o, math.nan) if keeps else None), given
        if weight is not None:
            gates_used = torch.full_like(used, math.nan) if keeps else None
        got, *got_others = run(Gating(o_cmp, None if attends else o_win, out, weight, gates_used, o_slc))
        assert out.isfinite().all()
        assert torch.equal(around.nan_to_num(9e3), kept.nan_to_num(9e3))
        assert all(torch.equal(x, y) for x, y in zip(got_others, others, strict=True))
        assert got is o_slc
        if keeps:
            assert torch.equal(got, o)
            assert weight is None or torch.equal(gates_used, used)


def small_chunks(patch: pytest.MonkeyPatch, tokens: int = 32, chunk_bytes: int = 1, rows: int = 1) -> None:
    """Chunks of few tokens and heads, and work tiles of few rows."""
    from cute_kernels.attend import kv_outer, kv_outer_backward
    from cute_kernels.lists import worklist

    patch.setattr(worklist, "CHUNK_ALIGNMENT", tokens)
    for module in (kv_outer, kv_outer_backward):
        patch.setattr(module, "PARTIAL_BYTES", chunk_bytes)
        patch.setattr(module, "MIN_TILE_ROWS", rows)


@dataclass(frozen=True)
class WindowCase:
    """A call of attend/window_combine.py, of tokens of a sequence, or of documents."""

    tokens: int | list[int]
    group: int = 16
    kv_heads: int = 1
    dim: int = 64
    window: int = 200
    forced: tuple[int, int] = (1, 2)
    beside: int = 2
    """Slots for blocks that are not forced."""
    first: int = 0
    """Of the queries."""
    behind: int = 0
    """Rows of no document."""
    size: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: str) -> Inputs:
        options: dict[str, Any] = {"size": self.size, "batch": self.batch, "dtype": self.dtype, "behind": self.behind}
        count = sum(self.forced) + self.beside
        return make(
            self.tokens, self.group, self.kv_heads, self.dim, count=count, forced=self.forced, device=device, **options
        )

    def in_window(self, inputs: Inputs) -> Inputs:
        """The same, where each token sees its window."""
        lengths = [self.tokens] if isinstance(self.tokens, int) else self.tokens
        near = torch.zeros_like(inputs.visible)
        start = 0
        for length in lengths:
            here, position = slice(start, start + length), torch.arange(length)
            distance = position[:, None] - position
            near[:, :, here, here] = ((distance >= 0) & (distance < self.window)).to(near.device)
            start += length
        return replace(inputs, visible=near)

    def run(self, inputs: Inputs, gating: Any = None) -> tuple[Tensor, ...]:
        """o, lse, o_win and lse_win; NaN where nothing was written."""
        from cute_kernels.attend.kv_outer import kv_outer_forward
        from cute_kernels.attend.window_combine import WindowBranch

        q = inputs.q[:, self.first :]
        sums = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=q.device)
        window = WindowBranch(self.window - 1, torch.full_like(q, math.nan), sums)
        how: dict[str, Any] = {"size": self.size, "scale": inputs.scale, "packed": inputs.packed, "gating": gating}
        how |= {"first_token": self.first, "init": self.forced[0], "local": self.forced[1], "window": window}
        o, lse = kv_outer_forward(q, inputs.k, inputs.v, inputs.indices[:, :, self.first :], **how)
        assert window.o is not None
        return o, lse, window.o, sums

    def check(self, device: str) -> None:
        inputs = self.inputs(device)
        o, lse, o_win, lse_win = self.run(inputs)
        selected = inputs.assert_attends(o, lse, first=self.first)
        assert not o.transpose(1, 2)[~selected].any()
        assert (lse[~selected] == -math.inf).all()
        self.in_window(inputs).assert_attends(o_win, lse_win, "o_win", self.first)
        assert not lse.isnan().any()
        assert lse_win.isnan().any() == (self.behind > 0), "rows of no query are left alone"

    def check_gated(self, gates: str, device: str) -> None:
        inputs = self.inputs(device)
        check_gated(inputs.q[:, self.first :], gates, lambda gating: self.run(inputs, gating))
