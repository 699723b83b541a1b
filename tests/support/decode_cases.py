"""A step of decoding with paged keys: its inputs, the definition in fp64, and one check, interpreted and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_kernels import decoding
from cute_kernels.decode.cache import LengthTensors, Pages
from cute_kernels.decode.tile_sums import keep_sums, sum_queries
from cute_kernels.mma.warp import LOG2_E
from cute_kernels.prefill import append_tokens, prefill
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support.helpers import assert_within_budget

SMALL_BLOCKS = NSAConfig.paper(compress_block_size=8, compress_stride=4, num_selected_blocks=4, window_size=70)
"""A tile of entries holds 4 select blocks, and each select block 16 entries."""

WRITTEN_PAGES = 3
"""Pages that no sequence has."""


class NearTieError(AssertionError):
    """The definition does not say which blocks a kernel takes."""


@dataclass(frozen=True)
class Case:
    cached: tuple[int, ...]
    """Tokens of the sequences before the step."""
    config: NSAConfig = SMALL_BLOCKS
    queries: int = 1
    new: tuple[int, ...] | None = None
    """New tokens of the sequences; None: all queries."""
    overflowed: tuple[int, ...] = ()
    """Sequences that have no room; their `new` is 0."""
    group: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    gating: str = "gates"
    """"gates", "projected" or "thirds"."""
    capacity: int | None = None
    """Tokens that a row of the block table has room for; None: just enough."""
    seed: int = 0
    size: float = 1.0
    """Standard deviation of queries."""
    tuning: decoding.Tuning = decoding.DEFAULT
    prefilled: bool = False
    """By prefill.py; then no choice is noted, and the seed is the first that leaves no choice to rounding."""


@dataclass
class Step:
    """A case's tensors."""

    case: Case
    device: str
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    """All tokens of each sequence, the new ones at the end, `[tokens,H_kv,D]`."""
    v: list[Tensor] = field(init=False)
    pages: Pages = field(init=False)
    lengths: LengthTensors = field(init=False)
    gates: dict[str, Tensor] = field(init=False)
    tile_sums: Tensor | None = field(init=False)
    """As of NSACache: NaN but for the sum that each sequence goes on from."""
    choice: tuple[Tensor, Tensor, int] = field(init=False)
    """Of `_noting`."""

    def __post_init__(self) -> None:
        case = self.case
        generator = torch.Generator().manual_seed(case.seed)

        def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        batch, heads, v_dim = len(case.cached), case.group * case.kv_heads, case.v_dim or case.dim
        new = case.new or (case.queries,) * batch
        self.q = normal(batch, case.queries, heads, case.dim) * case.size
        for row, count in enumerate(new):
            self.q[row, count:] = torch.nan
        tokens = [a + b for a, b in zip(case.cached, new, strict=True)]
        self.k = [normal(n, case.kv_heads, case.dim) for n in tokens]
        self.v = [normal(n, case.kv_heads, v_dim) for n in tokens]
        per_sequence = -(-max(case.capacity or 1, *tokens) // case.page_size)
        held = [-(-n // case.page_size) for n in tokens]
        free = torch.randperm(sum(held) + WRITTEN_PAGES, generator=generator).tolist()
        table = torch.full((batch, per_sequence), -1, dtype=torch.int32)
        for row, count in enumerate(held):
            table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        slots = case.page_size // case.config.stride
        shapes = [(case.page_size, case.dim), (case.page_size, v_dim), (slots, case.dim), (slots, v_dim)]
        memory = [
            torch.full((sum(held) + WRITTEN_PAGES, rows, case.kv_heads, width), torch.nan, dtype=case.dtype)
            for rows, width in shapes
        ]
        self.pages = Pages(*[x.to(self.device) for x in memory], table.to(self.device))
        for row, cached in enumerate(case.cached):
            self._write(row, range(cached))
        flags = torch.zeros(batch, dtype=torch.bool)
        flags[[*case.overflowed]] = True
        lengths = [torch.tensor(x, dtype=torch.int32) for x in (case.cached, new)]
        self.lengths = LengthTensors(*[x.to(self.device) for x in (*lengths, flags)])
        given = {
            "gates": {"gates": normal(batch, case.queries, heads, 4, dtype=torch.float32)[..., 1:]},
            "projected": {"gate_proj_weight": normal(heads, 3, case.dim) * case.dim**-0.5},
            "thirds": {},
        }
        self.gates = given[case.gating]
        self.tile_sums, tile = None, case.config.q_tile_size
        if tile > 1:
            slots = min(tile, per_sequence * case.page_size)
            self.tile_sums = torch.full((batch, slots, heads, case.dim), torch.nan, device=self.device)
            for row, cached in enumerate(case.cached):
                if cached % tile > 0:
                    own = normal(heads, case.dim, dtype=torch.float32) * (cached % tile) ** 0.5 * case.size
                    self.tile_sums[row, cached % tile - 1] = own

    def _write(self, row: int, tokens: range) -> None:
        """These tokens, and the entries that they complete, into the pages."""
        length, stride, size = self.case.config.compress_block_size, self.case.config.stride, self.case.page_size
        at = torch.arange(tokens.start, tokens.stop)
        last = at[(at + 1 >= length) & ((at + 1 - length) % stride == 0)]
        table = self.pages.block_table[row].cpu().long()
        blocks = last[:, None] - torch.arange(length - 1, -1, -1)
        for x, rows, entries in ((self.k, self.pages.k, self.pages.k_cmp), (self.v, self.pages.v, self.pages.v_cmp)):
            rows[table[at // size], at % size] = x[row][at]
            entries[table[last // size], last % size // stride] = x[row][blocks].double().mean(1).to(x[row].dtype)

    def run(self) -> Tensor:
        """out, after a check that the pages hold the new tokens and entries, and nothing else has changed."""
        new = [
            torch.full_like(self.q[..., :1, :1], torch.nan).expand(-1, -1, *x[0].shape[1:]).clone()
            for x in (self.k, self.v)
        ]
        for to, x in zip(new, (self.k, self.v), strict=True):
            for row, count in enumerate(self.lengths.new.tolist()):
                to[row, :count] = x[row][len(x[row]) - count :]
        if self.case.prefilled:
            append_tokens(*new, self.pages, self.lengths, self.case.config)
            inputs = NSAInputs(self.q, *new, **self.gates)
            out = prefill(inputs, self.case.config, self.pages, self.lengths)
        else:
            with mock.patch.object(decoding, "plan", self._noting(decoding.plan)):
                how = {**self.gates, "tuning": self.case.tuning}
                if self.tile_sums is not None:
                    tile = self.case.config.q_tile_size
                    how["rows"], sums = sum_queries(self.q, self.tile_sums, self.lengths, tile)
                    self._check_sums(sums)
                out = decoding.decode(self.q, *new, self.pages, self.lengths, self.case.config, **how)
        got = self.pages
        self.pages = Pages(*[x.clone() for x in got[:5]])
        for row, (cached, count) in enumerate(zip(self.case.cached, self.lengths.new.tolist(), strict=True)):
            self._write(row, range(cached, cached + count))
        for name, a, b in zip(Pages._fields[:2], got, self.pages, strict=False):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"{name} holds something else"
        for name, a, b in zip(Pages._fields[2:4], got[2:4], self.pages[2:4], strict=True):
            assert torch.equal(a.isnan(), b.isnan()), f"{name} has other entries"
            error = (a.double() - b.double()).nan_to_num().abs()
            assert bool((error <= torch.finfo(a.dtype).eps * b.double().nan_to_num().abs()).all()), name
        self.pages = got
        return out

    def mean(self, row: int, query: int, heads: slice) -> Tensor:
        """The mean query of a token's tile up to it in tile mode, in token mode the query: fp64 `[heads,D]`."""
        tile, cached = self.case.config.q_tile_size, self.case.cached[row]
        token = cached + query
        first = max(0, token // tile * tile - cached)  # of the step's tokens, that are in the tile
        total = self.q[row, first : query + 1, heads].double().sum(0)
        if self.tile_sums is not None and cached > token // tile * tile:
            total += self.tile_sums[row, cached % tile - 1, heads].double()
        return total / (token % tile + 1)

    def _check_sums(self, sums: Tensor) -> None:
        """keep_sums writes those of the new tokens into the cache, of one tile at most, and nothing else."""
        assert self.tile_sums is not None
        tile, heads, kept = self.case.config.q_tile_size, slice(None), self.tile_sums.clone()
        keep_sums(sums, kept, self.lengths, tile)
        wanted = self.tile_sums.clone()
        for row, (cached, new) in enumerate(zip(self.case.cached, self.lengths.new.tolist(), strict=True)):
            for query in range(new):
                inside = (cached + query) % tile
                wanted[row, inside] = self.mean(row, query, heads) * (inside + 1)
        # fp32 sums of up to N_q numbers and one that was kept
        torch.testing.assert_close(kept, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)

    def _noting(self, plan: Any) -> Any:
        """Plans of which the results of ChooseBlocks are kept: scores and blocks `[B,H_kv*N_q,parts,k]`, and blocks of
        a part.
        """

        def noting(*call: Any) -> Any:
            made = plan(*call)

            def choose(*arguments: Any) -> None:
                made.choose(*arguments)
                self.choice = arguments[-4].cpu(), arguments[-3].cpu(), arguments[-1]

            return replace(made, choose=choose)

        return noting

    def check_choice(self) -> None:
        """Each token's blocks are those of the definition, best first, and scores are within their bound."""
        count = self.case.config.num_selected_blocks
        values, indices, size = self.choice
        for row, (cached, new) in enumerate(zip(self.case.cached, self.lengths.new.tolist(), strict=True)):
            k_cmp, _ = self.entries(row)
            for query, selector in itertools.product(range(new), range(self.selectors)):
                token = cached + query
                blocks, scores, bound = self.selected(row, query, selector, k_cmp)
                parts = max(1, -(-(max(scores, default=0) + 1) // size))
                item = selector * self.case.queries + query
                found = [
                    (value, block)
                    for value, block in zip(
                        values[row, item, :parts].flatten().tolist(),
                        indices[row, item, :parts].flatten().tolist(),
                        strict=True,
                    )
                    if block >= 0
                ]
                best = sorted(found, key=lambda one: (-one[0], one[1]))[:count]
                assert {block for _, block in best} == {*blocks}, f"sequence {row}, token {token}, group {selector}"
                for value, block in best:
                    if value < math.inf:
                        assert abs(value - scores[block]) <= bound(scores[block]), f"score of block {block}"

    @property
    def selectors(self) -> int:
        """Groups of heads that select together."""
        return self.case.kv_heads * (1 if self.case.config.shares_heads else self.case.group)

    def selected(
        self, row: int, query: int, selector: int, entries: Tensor
    ) -> tuple[list[int], dict[int, float], Callable[[float], float]]:
        """Of a group of heads that select together, as `selected`. Args: entries `[n,H_kv,D]`."""
        heads = self.case.group * self.case.kv_heads // self.selectors
        q = self.mean(row, query, slice(selector * heads, (selector + 1) * heads))
        keys = entries[:, selector * heads // self.case.group]
        return selected(self.case.config, self.case.cached[row] + query, q, keys)

    def entries(self, row: int) -> tuple[Tensor, Tensor]:
        """As they lie in the pages, `[entries,H_kv,·]`."""
        config, size = self.case.config, self.case.page_size
        last = torch.arange(config.num_compressed(len(self.k[row]))) * config.stride + config.compress_block_size - 1
        pages = self.pages.block_table[row].cpu()[last // size]
        slots = last % size // config.stride
        k, v = (x[pages, slots] for x in (self.pages.k_cmp, self.pages.v_cmp))
        return k, v

    def gates_of(self, row: int, query: int, head: int) -> Tensor:
        if "gates" in self.gates:
            return self.gates["gates"][row, query, head].double()
        if "gate_proj_weight" in self.gates:
            logits = self.gates["gate_proj_weight"][head].double() @ self.q[row, query, head].double()
            return torch.sigmoid(logits)
        return torch.full((3,), 1 / 3, dtype=torch.float64, device=self.q.device)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`[D]`, `[n,D]`, `[n,D_v]` -> `[D_v]` in fp64; probabilities are rounded to `dtype`. 0 without keys."""
    if len(k) == 0:
        return q.new_zeros(v.shape[1], dtype=torch.float64)
    p = torch.softmax(scale * (k.double() @ q.double()), 0).to(dtype).double()
    return p @ v.double()


def selected(
    config: NSAConfig, token: int, q: Tensor, keys: Tensor
) -> tuple[list[int], dict[int, float], Callable[[float], float]]:
    """The blocks of a token by the definition, all scores, and the bound of decode/choose.py for a score's error.

    Args: q, in tile mode mean queries, `[heads,D]`; keys `[entries,D]`.

    No block that is left out may score within the kernels' error of one that is taken, unless both tie exactly: the
    same entries in the same proportions.
    """
    length, stride, size = config.compress_block_size, config.stride, config.select_size
    last = token // size
    forced = {
        *range(min(config.num_init_blocks, last + 1)),
        *range(max(0, last - config.num_local_blocks + 1), last + 1),
    }
    forced = {*sorted(forced)[: config.num_selected_blocks]}
    visible = config.num_compressed(token + 1)
    logits = config.scale(q.shape[1]) * keys[:visible].double() @ q.double().T  # [entries,G]
    p = (torch.softmax(logits, 0) if config.token_mode else logits * LOG2_E).sum(1).tolist()
    scores = {}
    for block in range(last + 1 + length // size + 1):
        near = range(max(0, (block * size - length) // stride), min(visible, (block + 1) * size // stride + 1))
        overlaps = [(j, min(j * stride + length, (block + 1) * size) - max(j * stride, block * size)) for j in near]
        overlaps = [(j, n) for j, n in overlaps if n > 0]
        if overlaps and block not in forced:
            covered = length if config.token_mode else sum(n for _, n in overlaps)
            scores[block] = sum(p[j] * n for j, n in overlaps) / covered
    largest = lse = 0.0
    if visible:
        norms = config.scale(q.shape[1]) * q.double().norm(dim=1).max() * keys[:visible].double().norm(dim=1).max()
        largest, lse = float(norms), float(logits.logsumexp(0).abs().max())
    sums = len(q) + size / stride + length / stride + 16
    products = (q.shape[1] / 8 + 8) * largest

    def bound(score: float) -> float:
        if config.token_mode:
            return 2**-23 * (products + 8 * lse + sums) * score
        return 2**-23 * len(q) * LOG2_E * (products + sums * largest)

    best = sorted(scores, key=lambda block: (-scores[block], block))
    room = config.num_selected_blocks - len(forced)
    if 0 < room < len(best):
        taken, left = scores[best[room - 1]], scores[best[room]]
        if taken != left and taken - left <= max(1e-4 * abs(taken), 2 * bound(taken)):
            raise NearTieError(f"a near tie of token {token}: take another seed")
    return sorted(forced) + best[:room], scores, bound


def without_near_ties(case: Case) -> Case:
    """With the first seed that leaves no choice to rounding."""
    return next(one for one in (replace(case, seed=seed) for seed in itertools.count()) if not _near_tie(one))


def _near_tie(case: Case) -> bool:
    step = Step(case, "cpu")
    for row, (cached, new) in enumerate(zip(case.cached, step.lengths.new.tolist(), strict=True)):
        step._write(row, range(cached, cached + new))
        keys, _ = step.entries(row)
        queries = itertools.product(range(new), range(step.selectors))
        if any(is_near_tie(partial(step.selected, row, *query, keys)) for query in queries):
            return True
    return False


def is_near_tie(choose: Callable[[], object]) -> bool:
    """True if rounding may change what a call of `selected` chooses."""
    try:
        choose()
    except NearTieError:
        return True
    return False


def expected(step: Step, dtype: torch.dtype) -> Tensor:
    """out by the definition, for the entries that lie in the pages. Args: `dtype`: of probabilities."""
    case, config = step.case, step.case.config
    scale = config.scale(case.dim)
    out = torch.zeros(*step.q.shape[:3], case.v_dim or case.dim, dtype=torch.float64, device=step.q.device)
    for row, (cached, new) in enumerate(zip(case.cached, step.lengths.new.tolist(), strict=True)):
        if row in case.overflowed:
            out[row] = torch.nan
        k, v = step.k[row], step.v[row]
        k_cmp, v_cmp = step.entries(row)
        for query in range(new):
            token = cached + query
            visible = config.num_compressed(token + 1)
            window = slice(max(0, token + 1 - config.window_size), token + 1)
            for kv_head in range(case.kv_heads):
                heads = slice(kv_head * case.group, (kv_head + 1) * case.group)
                together = case.group * case.kv_heads // step.selectors
                for head in range(heads.start, heads.stop):
                    if head % together == 0:
                        blocks, _, _ = step.selected(row, query, head // together, k_cmp)
                    keys = [t for b in blocks for t in range(b * config.select_size, (b + 1) * config.select_size)]
                    keys = [t for t in keys if t <= token]
                    parts = (
                        (k_cmp[:visible, kv_head], v_cmp[:visible, kv_head]),
                        (k[keys, kv_head], v[keys, kv_head]),
                        (k[window, kv_head], v[window, kv_head]),
                    )
                    q, gates = step.q[row, query, head], step.gates_of(row, query, head)
                    out[row, query, head] = sum(
                        g * attention(q, *kv, scale, dtype) for g, kv in zip(gates, parts, strict=True)
                    )
    return out


def check(case: Case, device: str = "cpu") -> None:
    """Run a step, and hold it against the definition."""
    step = Step(without_near_ties(case) if case.prefilled else case, device)
    out = step.run()
    if not case.prefilled:
        step.check_choice()
    oracle = expected(step, torch.float64)
    naive = expected(step, case.dtype).to(case.dtype)
    is_nan = torch.zeros_like(out, dtype=torch.bool)
    is_nan[[*case.overflowed]] = True
    assert torch.equal(out.isnan(), is_nan), "NaN elsewhere than in overflowed sequences"
    assert out.dtype == case.dtype
    for row, count in enumerate(step.lengths.new.tolist()):
        assert row in case.overflowed or not out[row, count:].any(), "rows behind the new tokens"
    assert_within_budget(*(x.masked_fill(is_nan, 0) for x in (out, oracle, naive)), "out")
