"""Every kernel of the package as a B200 would run it: cases for the machine of tests/ptx, held against fp64.

    Attention       one branch of NSA through FlashAttention-4, forward and backward
    Whole           all of NSA, forward and backward: FlashAttention-4's kernels and ours
    Neighborhood    neighborhood attention, forward and backward
    Decoding        a step over paged keys, and a prefill

Each runs forward.py, backward.py, neighborhood.py or decoding.py on CPU tensors (interpreted_gpu), from memory filled
with NaN, with the race checker. Truth is attention over masks that are written here by definition, bench/oracles.py, or
decode_cases.py; the budget is the house's: twice the error of the same math with 16-bit operands, and one rounding.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import oracles
from cute_kernels import backward, forward, neighborhood
from cute_kernels.call import prepare
from cute_kernels.fa4.interface import Gradients
from nsa import NSAAux, NSAConfig
from nsa.inputs import NSAInputs
from tests.ptx import Launched, Order, Schedule
from tests.support import block_sparse_cases, decode_cases, indexer_cases
from tests.support.cases import covering
from tests.support.documents import documents
from tests.support.gpu_calls import CASES, MANY, TILES, TOKENS
from tests.support.gpu_calls import Case as Call
from tests.support.helpers import error_budget, lse_error
from tests.support.interpreted_gpu import interpreted_gpu
from tests.support.kernel_classes import HOPPER_ONLY, every_form, forms_of
from tests.support.kv_outer_cases import blocks_of_tiles
from tests.support.poison import poison
from tools.sanitize import FA4, OURS

BF16, FP16 = torch.bfloat16, torch.float16
SLACK = 1e-4
"""Of a gradient: dS of a row with one key is nothing but the difference of two sums in fp32."""
SCHEDULES = {"late": Schedule(late=True), "early": Schedule(late=False)}
"""When asynchronous operations end: as late as they may, or at once."""


class Result(NamedTuple):
    name: str
    error: float
    budget: float


@dataclass
class Execution:
    """What a case did."""

    results: list[Result] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    """Names of classes, each once, in order."""
    forms: list[str] = field(default_factory=list)
    """Of our kernels: functions that compile them, with their flags."""
    findings: list[str] = field(default_factory=list)
    """Of the race checker: kernel and text."""
    seconds: float = 0.0
    """CPU time, kernels' compilation included where PTX_CACHE did not have them."""

    @property
    def beyond_budgets(self) -> list[Result]:
        """Results that are wrong; it raises if there are none at all."""
        if not self.results:
            raise ValueError("nothing was compared")
        return [of for of in self.results if not of.error <= of.budget]

    @property
    def worst(self) -> Result:
        """The result that takes most of its budget."""
        return max(self.results, key=lambda of: of.error / of.budget if of.budget else float(of.error > 0))

    def compare(self, name: str, got: Tensor, exact: Tensor, low: Tensor, slack: float = 0.0) -> None:
        if got.shape != exact.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
        difference = (got.double() - exact).abs()
        error = float(difference.max()) if got.numel() else 0.0
        self.results.append(Result(name, error, error_budget(exact, low, got.dtype) + slack))

    def compare_sums(self, name: str, got: Tensor, exact: Tensor, low: Tensor) -> None:
        """lse, -inf in the same rows."""
        empty = exact.isinf()
        if not torch.equal(got.isinf(), empty):
            self.results.append(Result(f"{name}, empty rows", float((got.isinf() != empty).sum()), 0.0))
        filled = [x.double().masked_fill(empty, 0) for x in (got, exact, low)]
        error, theirs = (float((x - filled[1]).abs().max()) if x.numel() else 0.0 for x in (filled[0], filled[2]))
        self.results.append(Result(name, error, 2 * theirs + lse_error(100)))


def described(
    form: str, dim: int, group: int, rows: int, keys: int, v_dim: int | None = None, dtype: torch.dtype = BF16
) -> dict[str, Any]:
    """Facts of a case, as the record has them."""
    sizes = {"d": dim, "d_v": dim if v_dim is None else v_dim, "dtype": _name(dtype), "group": group}
    return {"form": form, **sizes, "rows": rows, "keys": keys}


# One branch through FlashAttention-4


@dataclass(frozen=True)
class Form:
    """Which keys of a branch are seen, and how its kernels are told."""

    branch: str
    config: NSAConfig
    tokens: tuple[int, int] = (300, 257)
    """Two lengths to run."""
    batch: int = 1
    mixed: bool = False
    """D_v is the other of 64 and 128."""
    empty_tiles: bool = False
    """Selected: one tile has no block."""


FORMS: dict[str, Form] = {
    "compressed, causal by lists, backward by phases": Form(
        "compressed", NSAConfig(compress_block_size=4, compress_stride=2), (531, 290)
    ),
    "compressed, causal by lists both ways": Form(
        "compressed", NSAConfig(compress_block_size=5, compress_stride=2), (300, 271)
    ),
    "compressed, not causal": Form(
        "compressed", NSAConfig(compress_block_size=2, compress_stride=1, causal=False), (300, 258)
    ),
    "compressed, chosen blocks": Form(
        "compressed",
        NSAConfig(compress_block_size=1, num_cmp_selected_blocks=2, n_block_size=128, select_block_size=64),
        (531, 300),
    ),
    "selected, blocks of 64": Form("selected", NSAConfig(select_block_size=64), empty_tiles=True),
    "selected, blocks of 128": Form("selected", NSAConfig(select_block_size=128), empty_tiles=True),
    "selected, not causal": Form("selected", NSAConfig(select_block_size=64, causal=False)),
    "selected, D and D_v": Form("selected", NSAConfig(select_block_size=64), mixed=True),
    "window": Form("window", NSAConfig(window_size=100), batch=2),
    "window, not causal": Form("window", NSAConfig(window_size=100, causal=False)),
    "window, one tile": Form("window", NSAConfig(window_size=30), (1, 77)),
    "window, D and D_v": Form("window", NSAConfig(window_size=150), mixed=True),
}


@dataclass(frozen=True)
class Attention:
    """Forward and backward of one branch."""

    form: str
    dim: int = 128
    dtype: torch.dtype = BF16
    group: int = 1
    length: int = 0
    """Index into the form's lengths."""

    @property
    def name(self) -> str:
        return f"{self.form} | D={self.dim} {_name(self.dtype)} G={self.group} N={self.facts['rows']}"

    @property
    def facts(self) -> dict[str, Any]:
        form = FORMS[self.form]
        rows = form.tokens[self.length]
        keys = form.config.num_compressed(rows) if form.branch == "compressed" else rows
        v_dim = 192 - self.dim if form.mixed else self.dim
        return described(self.form, self.dim, self.group, rows, keys, v_dim, self.dtype)

    def run(self, execution: Execution) -> None:
        form, facts = FORMS[self.form], self.facts
        config, rows, keys = form.config, facts["rows"], facts["keys"]
        q, k, v = self._normal(rows, self.group), self._normal(keys), self._normal(keys, dim=facts["d_v"])
        do = self._normal(rows, self.group, facts["d_v"], seed=1)
        call = prepare(NSAInputs(q, self._normal(rows), self._normal(rows, dim=facts["d_v"])), config)
        indices, visible = self._selection(rows, keys)
        if form.branch == "compressed":
            branch = forward.attend_compressed(call, q, k, v, indices, 0, True)
        elif form.branch == "selected":
            branch = forward.attend_selected(call, q, k, v, indices, 0, True, holds_forced=False)
        else:
            branch = forward.attend_window(call, q, k, v, 0, True)
        given = Gradients(q, k, v, branch.o, do, branch.lse, *(torch.empty_like(x) for x in (q, k, v)))
        delta = (branch.o.float() * do.float()).sum(-1).transpose(1, 2).contiguous()
        got = {"dq": given.dq, "dk": given.dk, "dv": given.dv}
        if form.branch == "compressed":
            dk, dv = backward.backward_compressed(call, given, indices, delta)
            got["dk"], got["dv"] = dk.to(self.dtype), dv.to(self.dtype)
        elif form.branch == "selected":
            backward.backward_selected(call, given, indices, delta)
        else:
            backward.backward_window(call, given, delta)
        self._check(execution, {"o": branch.o, "lse": branch.lse, **got}, (q, k, v), do, visible, call.scale)

    def _normal(self, rows: int, heads: int = 1, dim: int | None = None, seed: int = 0) -> Tensor:
        shape = (FORMS[self.form].batch, rows, heads, dim or self.dim)
        generator = torch.Generator().manual_seed(seed * 1000 + sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)

    def _selection(self, rows: int, keys: int) -> tuple[Tensor | None, Tensor]:
        """Blocks that tiles select, `[B,H,tiles,k]`, drawn; and which keys each row sees, by definition."""
        form = FORMS[self.form]
        config = form.config
        row, key = torch.arange(rows)[:, None], torch.arange(keys)
        if form.branch == "window":
            if config.causal:
                return None, (key <= row) & (row - key < config.window_size)
            return None, (row - key).abs() <= config.window_size // 2
        length, stride, size = 1, 1, config.select_size
        if form.branch == "compressed":
            length, stride, size = config.compress_block_size, config.stride, config.n_block_size
        ends = key * stride + length - 1
        seen = ends <= row if config.causal else torch.ones((rows, keys), dtype=torch.bool)
        if form.branch == "compressed" and config.num_cmp_selected_blocks is None:
            return None, seen
        tile = torch.arange(rows) // config.q_tile_size
        tiles, blocks = int(tile[-1]) + 1, -(-keys // size)
        of_tiles: dict[str, Any] = {"tile": config.q_tile_size, "size": size, "causal": config.causal}
        of_tiles |= {"length": length, "stride": stride}
        indices = blocks_of_tiles((form.batch, self.group), tiles, blocks, min(2, blocks), **of_tiles)
        if form.empty_tiles:
            indices[:, 0, -1] = -1
        chosen = (indices[..., None, :] == (key // size)[:, None]).any(-1)  # [B,H,tiles,keys]
        return indices, seen & chosen[:, :, tile]

    def _check(
        self,
        execution: Execution,
        got: Mapping[str, Tensor],
        qkv: Sequence[Tensor],
        do: Tensor,
        visible: Tensor,
        scale: float,
    ) -> None:
        expected = []
        for dtype in (torch.float64, self.dtype):
            leaves = [x.to(oracles.wide(dtype)).requires_grad_() for x in qkv]
            o, lse = oracles.attention(*leaves, visible, scale, dtype)
            gradients = torch.autograd.grad(o, leaves, do.to(o.dtype))
            expected.append([o.detach(), lse, *(x.to(dtype) for x in gradients)])
        for (name, x), exact, low in zip(got.items(), *expected, strict=True):
            if name == "lse":
                execution.compare_sums(name, x, exact, low)
            else:
                execution.compare(name, x, exact, low, SLACK if name[0] == "d" else 0.0)


# All of NSA

SELECTED = NSAConfig.paper(compress_block_size=256, compress_stride=64, num_selected_blocks=6, window_size=0)
"""Below 256 tokens nothing but the selected branch, with its forced blocks."""
ENTRIES = NSAConfig(
    compress_block_size=4,
    compress_stride=1,
    select_block_size=64,
    num_selected_blocks=3,
    num_cmp_selected_blocks=3,
    n_block_size=128,
)
LENGTHS = (0, 131, 1, 64)
OWN_KEYS = ("k_slc", "v_slc", "k_win", "v_win")
"""So that dk and dv of each branch are told apart."""
PRESET = "paper preset"

CALLS: dict[str, Call] = {
    PRESET: Call(NSAConfig.paper(), 200, heads=4, kv_heads=1, dim=128, v_dim=128, tensors=("gate_proj_weight",)),
    "tiles": Call(TILES, tensors=("gate_proj_weight", *OWN_KEYS)),
    "tiles, batch, overlapping blocks": CASES["tiles, batch"],
    "tiles, chosen entries, learned compression": Call(
        ENTRIES, tokens=393, tensors=("w_k_compress", "w_v_compress"), recompute=True
    ),
    "tiles, D_v": Call(TILES, v_dim=128, tensors=("gate_proj_weight",)),
    "tiles, not causal, shared selection": CASES["tiles, not causal"],
    "tiles, documents": Call(TILES, documents=LENGTHS, tensors=("gate_proj_weight", *OWN_KEYS)),
    "tiles, documents, chosen entries": Call(ENTRIES, documents=LENGTHS, tensors=("gates",)),
    "tiles, one token": Call(TILES, 1, heads=2, kv_heads=1),
    "tokens": Call(TOKENS, 201, tensors=("gate_proj_weight",), **MANY),
    "tokens, own keys": Call(TOKENS, 193, tensors=("gates", *OWN_KEYS), dim=128, v_dim=128),
    "tokens, nothing forced": replace(CASES["tokens, nothing forced"], tokens=577),
    "tokens, nothing forced, batch": CASES["tokens, nothing forced, batch"],
    "tokens, documents": replace(CASES["tokens, documents"], documents=LENGTHS),
    "tokens, 64 heads": Call(SELECTED, 130, heads=64, kv_heads=1),
    "tokens, D_v": Call(TOKENS, 130, v_dim=128),
    "tokens, query-outer": Call(TOKENS, 130),
    "tokens, query-outer, documents": Call(TOKENS, documents=(70, 0, 61)),
}


QUERY_OUTER = ("tokens, query-outer", "tokens, query-outer, documents")
"""Forward alone, with the kernel that groups of 64 heads take (attend/query_outer.py)."""


@dataclass(frozen=True)
class Whole:
    """Forward, once for training and once for its result alone, and backward."""

    name: str

    @property
    def facts(self) -> dict[str, Any]:
        call = CALLS[self.name]
        rows, group = sum(call.documents) if call.documents else call.tokens, call.heads // call.kv_heads
        return described(self.name, call.dim, group, rows, rows, call.v_dim, call.dtype)

    def run(self, execution: Execution) -> None:
        call = CALLS[self.name]
        inputs, config = call.inputs("cpu"), call.config
        if self.name in QUERY_OUTER:
            out, aux = forward.nsa(inputs, config, query_outer=True)
            check_nsa(execution, inputs, config, None, {"out": out}, _selections(aux))
            return
        shape = (*inputs.q.shape[:-1], call.v_dim)
        do = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(call.dtype)
        out, saved = forward.nsa_saving(inputs, config, recompute=call.recompute)
        gradients = backward.nsa_backward(inputs, config, saved, do)
        if call.documents:
            alone, aux = forward.nsa(inputs, config)
            selections = _selections(aux)
        else:
            alone, _ = forward.nsa(inputs, config, aux=False)
            selections = forward.Saved.from_list(saved, inputs, config)[2:4]
        if not torch.equal(out.nan_to_num(), alone.nan_to_num()):
            execution.results.append(Result("out for training is another", 1.0, 0.0))
        check_nsa(execution, inputs, config, do, {"out": out, **gradients}, selections)


def check_nsa(
    execution: Execution,
    inputs: NSAInputs,
    config: NSAConfig,
    do: Tensor | None,
    got: Mapping[str, Tensor],
    selections: tuple[Tensor, Tensor | None],
) -> None:
    """out, and with `do` gradients under the names of inputs, for the blocks that the kernels chose."""
    expected = []
    for dtype in (torch.float64, inputs.q.dtype):
        leaves = inputs.map(lambda x, dtype=dtype: x.to(dtype).requires_grad_())
        parts = []
        for document in documents(leaves, config):
            fixed = [None if x is None else document.part("indices", x).long() for x in selections]
            parts.append(oracles.nsa(document.inputs, config, indices=fixed[0], cmp_indices=fixed[1])[0])
        out = torch.cat(parts) if inputs.cu_seqlens is None else torch.cat(parts, 1)[0]
        names = [name for name in leaves.tensors() if name in got]
        expected.append({"out": out.detach()})
        if do is not None:
            rows = do if inputs.cu_seqlens is None else do[: out.shape[0]]
            of = torch.autograd.grad(out, [getattr(leaves, name) for name in names], rows.to(out.dtype))
            expected[-1].update(zip(names, of, strict=True))
    exact, low = expected
    if missing := set(got) ^ set(exact):
        raise ValueError(f"results that only one side has: {missing}")
    for name, x in got.items():
        rows = len(exact["out"]) if inputs.cu_seqlens is not None and x.shape[0] == inputs.q.shape[0] else None
        slack = 0.0 if name == "out" else SLACK
        execution.compare(
            "out" if name == "out" else f"gradient of {name}", x[:rows], exact[name][:rows], low[name][:rows], slack
        )


def _selections(aux: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    named = NSAAux(*aux)
    return named.indices, named.cmp_indices


# Neighborhood attention


DILATED = "neighborhood, dilation 2"
WINDOWS: dict[str, dict[str, Any]] = {
    DILATED: {"kernel_size": 101, "dilation": 2, "causal": False},
    "neighborhood, causal": {"kernel_size": 130, "dilation": 1, "causal": True},
}


@dataclass(frozen=True)
class Neighborhood:
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        return described(self.name, 64, 1, 333, 333)

    def run(self, execution: Execution) -> None:
        options = WINDOWS[self.name]
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn((1, 333, 2, 64), generator=generator).bfloat16() for _ in range(4))
        window = {"softmax_scale": None, "boundary": "truncate", "backend": "cute", **options}
        out, lse = neighborhood.forward(q, k, v, **window)
        gradients = neighborhood.backward(do, q, k, v, out, lse, **window)
        expected = []
        for dtype in (torch.float64, q.dtype):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            o, _ = oracles.neighborhood_attention(*leaves, boundary="truncate", **options)
            expected.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))])
        for name, x, exact, low in zip(("out", "dq", "dk", "dv"), (out, *gradients), *expected, strict=True):
            execution.compare(name, x, exact, low, 0.0 if name == "out" else SLACK)


# Decoding


@dataclass(frozen=True)
class Decoding:
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        case = DECODED[self.name]
        return described(self.name, 64, 4, case.queries, case.cached[0] + case.queries)

    def run(self, execution: Execution) -> None:
        case = DECODED[self.name]
        step = decode_cases.Step(case, "cpu")
        out = step.run()
        if not case.prefilled:
            step.check_choice()
        exact, low = (decode_cases.expected(step, dtype) for dtype in (torch.float64, case.dtype))
        execution.compare("out", out, exact, low.to(case.dtype))


DECODING = "decoding, four queries"
DECODED = {
    "decoding, tile mode": decode_cases.Case(
        (700, 62), NSAConfig(num_selected_blocks=3, window_size=70, q_tile_size=3), queries=3, group=4, kv_heads=1
    ),
    DECODING: decode_cases.Case((1100, 62), queries=4, kv_heads=1),
    "prefill": decode_cases.Case((150, 20), queries=20, kv_heads=1, prefilled=True),
}


# Blocks that are given, and an indexer's choice of blocks


@dataclass(frozen=True)
class GivenBlocks:
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        case = GIVEN[self.name]
        rows, keys = (sum(piece[i] for piece in case.pieces) for i in (0, 1))
        return described(self.name, case.dim, case.group, rows, keys)

    def run(self, execution: Execution) -> None:
        made = block_sparse_cases.make(GIVEN[self.name])
        got, exact, low = made.gradients(backend="cute"), made.expected(low=False), made.expected(low=True)
        for name, x, *expected in zip(("out", "dq", "dk", "dv"), got, exact, low, strict=True):
            execution.compare(name, x, *expected, 0.0 if name == "out" else SLACK)


GIVEN = {
    "given blocks": block_sparse_cases.Case(150, count=3, dim=64, dtype=BF16, size=128),
    "given blocks, documents": block_sparse_cases.Case((70, 0, 1, 40), count=2, dim=64, dtype=BF16, behind=3),
}


@dataclass(frozen=True)
class Indexer:
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        case = INDEXED[self.name]
        rows, keys = (x if isinstance(x, int) else sum(x) for x in (case.queries, case.keys or case.queries))
        return described(self.name, case.dim, case.heads, rows, keys, v_dim=0)

    def run(self, execution: Execution) -> None:
        """Raises if another block is chosen, but for near ties."""
        INDEXED[self.name].check(backend="cute")
        execution.results.append(Result("blocks", 0.0, 0.0))


INDEXED = {
    "choice of blocks": indexer_cases.Case(130, k=3),
    "choice of blocks, parts": indexer_cases.Case(3, 2300, k=3),
    "choice of blocks, documents": indexer_cases.Case((70, 0, 1, 90), k=3),
}

Case = Attention | Whole | Neighborhood | Decoding | GivenBlocks | Indexer


# The table


AXES: tuple[Sequence[Any], ...] = (
    [*FORMS],
    (128, 64),  # D
    (BF16, FP16),
    (1, 4),  # G
    (0, 1),  # which length
    [*SCHEDULES],
)


HERE: dict[str, tuple[Any, ...]] = {
    "compressed, causal by lists, backward by phases": (128, BF16, 1, 0, "late"),
    "compressed, causal by lists both ways": (64, FP16, 4, 1, "early"),
    "compressed, not causal": (128, BF16, 1, 1, "early"),
    "compressed, chosen blocks": (64, FP16, 4, 0, "late"),
    "selected, blocks of 64": (128, BF16, 1, 1, "early"),
    "selected, blocks of 128": (64, FP16, 4, 0, "late"),
    "selected, D and D_v": (64, BF16, 4, 1, "early"),
    "window": (128, BF16, 1, 0, "late"),
    "window, not causal": (128, BF16, 1, 0, "late"),
    "window, one tile": (128, BF16, 1, 0, "late"),
}
"""The rows that CI executes, by form. A kernel takes seconds to compile, so rows take those of others where they can,
or of a whole call through dispatch. Left out are two forms whose every part another one has: selected blocks without
causality, and windows with another D_v."""


def table() -> list[tuple[Case, str, bool]]:
    """Cases, the schedules that they run by, and whether they are of the part that CI executes.

    Of branches, every three values of axes come together, and each value but two forms comes in that part. It has no
    whole calls: there a call goes through dispatch.
    """
    pairs, triples = (covering([len(axis) for axis in AXES], cover) for cover in (2, 3))
    rows: list[tuple[Case, str, bool]] = []
    for places in sorted(pairs | triples):
        form, *values, schedule = (axis[i] for axis, i in zip(AXES, places, strict=True))
        rows.append((Attention(form, *values), schedule, HERE.get(form) == (*values, schedule)))
    others = (Whole, CALLS), (Neighborhood, WINDOWS), (Decoding, DECODED), (GivenBlocks, GIVEN), (Indexer, INDEXED)
    for kind, names in others:
        for name, schedule in itertools.product(names, SCHEDULES):
            rows.append((kind(name), schedule, name in (DILATED, DECODING) and schedule == "late"))
    return rows


def missing(executed: Iterable[str]) -> list[str]:
    """Forms of our kernels, of those that an sm_100 GPU runs, that are not among the executed."""
    return sorted(form for form in every_form() - {*executed} if not HOPPER_ONLY.match(form))


# Findings that are understood


STORES = (
    r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta\.tile\.bulk_group"
    r"|cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32"
)
COMMIT = r"tcgen05\.commit\.cta_group::2\.mbarrier::arrive::one\.shared::cluster\.multicast::cluster\.b64"
KNOWN = {
    # Warp 4, the first of `compute_warp_ids`, stores dK and dV in the epilogue; warps 0 to 3 add to dQ
    "last stage": re.compile(
        rf"FlashAttentionBackwardSm100: the CTA ends during \[(\d+: (?:{STORES})\b.*)\] where bulk stores of warp 4 "
        r"reads and \[\1\] where bulk stores of warp 4 is not waited for: shared memory"
    ),
    # mbarriers of the peer, by their places in SharedStorage: in the forward that Q's stage is empty; in the backward
    # that S is full, that dS is empty, and that the transposed K is
    "pair": re.compile(
        r"FlashAttention(?:ForwardSm100(?=.* 1:0x10 )|BackwardSm100(?=.* 1:0x(?:40|68|148) )): the CTA ends during "
        rf"\[(\d+: {COMMIT} .*)\] where (mbarrier 1:0x\w+) arrives and \[\1\] where \2 is not waited for: "
        r"mbarrier \(1, \d+\)"
    ),
}
"""Each known finding, in unchanged kernels, by a name that docs/blackwell.md explains."""


def known(finding: str) -> str | None:
    """The name of a finding that is understood."""
    return next((name for name, pattern in KNOWN.items() if pattern.fullmatch(finding)), None)


def unknown(findings: Iterable[str]) -> list[str]:
    return [found for found in findings if known(found) is None]


# Running them


def execute(case: Case, schedule: str, arch: str = "sm_100") -> Execution:
    """Run a case as on a GPU and compare its results; what the race checker finds is collected."""
    execution = Execution()
    launched: list[Launched] = []
    how = SCHEDULES[schedule]._replace(observer=lambda: Order(keep_going=True), launched=launched.append)
    start = time.process_time()
    with poisoned(), interpreted_gpu(arch, how):
        case.run(execution)
    execution.seconds = time.process_time() - start
    execution.kernels = list(dict.fromkeys(kernel_class(of.kernel) for of in launched))
    execution.forms = list(dict.fromkeys(form for of in launched if of.asked for form in forms_of(*of.asked)))
    execution.findings = list(
        dict.fromkeys(f"{kernel_class(of.kernel)}: {found}" for of in launched for found in of.observer.findings)
    )
    return execution


def kernel_class(kernel: str) -> str:
    """The class that a kernel's name in PTX holds."""
    found = OURS.search(kernel) or FA4.search(kernel)
    if found is None:
        raise ValueError(f"a kernel of nobody's: {kernel}")
    return found[1]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    poison(True)
    try:
        yield
    finally:
        poison(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
