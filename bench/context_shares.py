"""What a benchmark of context parallelism measures: cases, a rank's share without messages, rows, and what they say."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import DTYPES, PRESETS
from bench.inputs import Sizes, make_problem
from bench.pass_report import ms_text
from bench.results_file import ResultRow
from nsa import NSAConfig, nsa
from nsa.distributed.attention import Plan, attend, attend_backward, heads_per_pass
from nsa.distributed.comm import received_rows
from nsa.distributed.layout import Layout, Range

PASSES = ("fwd", "fwd+bwd")

# Limits of `cute`, which is not imported on a CPU
STREAMS = 2
"""Chunks of the selected branch that run at a time in token mode."""
PARTIAL_BYTES = {"fwd": 520 << 20, "fwd+bwd": 512 << 20}
"""Partial results of such a chunk; backward's are also those of a tile-mode call, and of phases of entries."""
TEMPORARY_BYTES = 1 << 30
"""What heads that backward takes at a time need, if they are more than one."""


class Case(NamedTuple):
    preset: str
    n: int
    heads: int
    kv_heads: int
    ranks: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.preset} {self.heads}/{self.kv_heads} N={self.n} R={self.ranks} {self.layout}"

    @property
    def undivided(self) -> Case:
        return self._replace(ranks=1, layout="contiguous")


@dataclass(frozen=True)
class Row(ResultRow):
    """One line of the results. `rank` of `ranks`; of one rank it is the undivided call."""

    preset: str
    n: int
    h: int
    h_kv: int
    d: int
    dtype: str
    ranks: int
    rank: int
    layout: str
    mode: str
    """"alone": keys of all ranks are there already; "messages": they are sent, and nothing is computed; "together"."""
    direction: str
    ms: float
    peak_gib: float | None
    tokens: int
    command: str

    @property
    def case(self) -> Case:
        return Case(self.preset, self.n, self.h, self.h_kv, self.ranks, self.layout)

    def line(self) -> str:
        time = f"rank {self.rank:<3} {self.mode:<9} {self.direction:<8}{ms_text(self.ms)} ms"
        return f"{self.case.name:<44}{time}  {self.tokens} tokens"


def row(
    case: Case,
    args: argparse.Namespace,
    rank: int,
    mode: str,
    direction: str,
    ms: float,
    peak_gib: float | None,
    tokens: int,
) -> Row:
    sizes = (case.preset, case.n, case.heads, case.kv_heads, args.dim, args.dtype)
    return Row(*sizes, case.ranks, rank, case.layout, mode, direction, ms, peak_gib, tokens, args.command)


@dataclass(frozen=True)
class Share:
    """What the rows of a case say together. None: it was not measured."""

    preset: str
    n: int
    ranks: int
    layout: str
    direction: str
    slowest_over_mean: float
    """Alone."""
    sum_over_single: float | None
    """Alone, over the undivided call."""
    speedup: float | None
    """The undivided call over all ranks together."""
    messages_ms: float | None
    not_hidden_ms: float | None
    """All ranks together over the slowest alone."""
    peak_gib: float | None
    """Of the rank that takes most, together."""
    bound_gib: float | None
    """What it may take (`bound_gib`)."""

    def as_json(self) -> dict[str, Any]:
        return {("pass" if name == "direction" else name): value for name, value in vars(self).items()}

    def line(self) -> str:
        texts = [f"slowest over mean {self.slowest_over_mean:.3f}"]
        others = {
            "all over undivided": self.sum_over_single,
            "speed-up": self.speedup,
            "messages, ms": self.messages_ms,
            "not hidden, ms": self.not_hidden_ms,
            "peak GiB": self.peak_gib,
            "bound GiB": self.bound_gib,
        }
        texts += [f"{name} {value:.3f}" for name, value in others.items() if value is not None]
        name = f"{self.preset} N={self.n} R={self.ranks} {self.layout} {self.direction}"
        return f"{name:<44}{', '.join(texts)}"


def find_shares(rows: Sequence[Row], kv_heads_per_pass: int | None = None) -> list[Share]:
    """Of each case and pass. Args: kv_heads_per_pass: None: as ContextParallel chooses."""
    shares = []
    found: dict[tuple[Case, str], dict[str, list[Row]]] = {}
    for one in rows:
        found.setdefault((one.case, one.direction), {}).setdefault(one.mode, []).append(one)
    for (case, direction), modes in found.items():
        if case.ranks == 1:
            continue
        alone_rows = modes["alone"]
        alone = [one.ms for one in alone_rows]
        single = found.get((case.undivided, direction), {}).get("alone", [None])[0]
        slowest = {mode: max(one.ms for one in own) for mode, own in modes.items()}
        together = slowest.get("together")
        peaks = [one.peak_gib for one in modes.get("together", []) if one.peak_gib is not None]
        bound = max(bound_gib(one, kv_heads_per_pass) for one in alone_rows) if peaks else None
        shares.append(
            Share(
                case.preset,
                case.n,
                case.ranks,
                case.layout,
                direction,
                slowest_over_mean=max(alone) / statistics.mean(alone),
                sum_over_single=None if single is None else sum(alone) / single.ms,
                speedup=None if single is None or together is None else single.ms / together,
                messages_ms=slowest.get("messages"),
                not_hidden_ms=None if together is None else together - slowest["alone"],
                peak_gib=max(peaks, default=None),
                bound_gib=bound,
            )
        )
    return shares


def bound_gib(one: Row, kv_heads_per_pass: int | None = None) -> float:
    """GiB beside inputs that a call of `cute` takes at most on the rank of a row: the tensors that live at a time.

    docs/distributed.md has them in words (Memory). A part is taken to have all of the rank's tokens, as where its two
    chunks meet.
    """
    config, size, wide = PRESETS[one.preset](), DTYPES[one.dtype].itemsize, torch.float32.itemsize
    group, token_mode = one.h // one.h_kv, config.token_mode
    per_pass = kv_heads_per_pass or heads_per_pass(one.h_kv, one.n, 2 * one.d * (size + wide))
    # Of a key/value head: its keys and values, the same in fp32, and what is like q of its query heads
    keys = one.n * 2 * one.d * size
    sums, entries = keys * wide / size, keys / config.stride
    queries, stats = one.tokens * group * one.d * size, one.tokens * group * 3 * wide
    chosen = one.tokens * config.num_selected_blocks * 4 * (1 if token_mode else group / config.q_tile_size)
    partials = PARTIAL_BYTES[one.direction] * (STREAMS if token_mode else 1)

    messages = keys + keys * (1 + 1 / one.ranks)  # gathered, and under way with the rank's own
    if one.direction == "fwd":
        branches = queries * (2 if token_mode else 3)  # token mode writes the selected one into the gated sum
        part = queries + branches + 2 * stats + entries + chosen  # the sum; lse and gates
        return (one.h_kv * queries + per_pass * (messages + part) + (partials if token_mode else 0)) / 2**30

    kept = 3 * queries + 2 * stats + 2 * entries + chosen  # branches, lse and gates, entries of two parts
    own = 2 * queries + keys / one.ranks  # out and dq, dk and dv
    part = queries + sums * (1 + 1 / (2 * one.ranks))  # dq; fp32 dk and dv, and those of the other part
    half = one.tokens // 2 * group * one.d * (3 * size + wide) + keys / size * (2 * size + wide)
    heads = max(1, min(per_pass, TEMPORARY_BYTES // int(half)))  # of a part of half the tokens, which takes more
    compressed = heads * (queries * wide / size + 2 * sums / config.stride) + PARTIAL_BYTES[one.direction]
    selected = heads * (queries + keys + (STREAMS * sums if token_mode else 0)) + partials
    window = heads * 2 * (queries + keys)  # beside what the selected one left to add up
    at_work = heads * 3 * stats + max(compressed, selected, window)  # lse, delta and gradients of gates
    return (one.h_kv * (own + kept) + per_pass * (messages + part) + at_work) / 2**30


# Calls


def config_of(case: Case, device: torch.device) -> NSAConfig:
    """The preset; on a CPU with tiles that a short sequence has some of."""
    small = device.type == "cpu" and case.preset == "per_tile"
    return PRESETS[case.preset](q_tile_size=64) if small else PRESETS[case.preset]()


def tile_of(config: NSAConfig, device: torch.device) -> int:
    """Where ranks begin: ContextParallel's default, on a CPU less."""
    return max(config.q_tile_size, 16 if device.type == "cpu" else 256)


def backend_of(device: torch.device) -> str | None:
    return "reference" if device.type == "cpu" else None


def make_tensors(case: Case, args: argparse.Namespace, device: torch.device, n: int | None = None) -> dict[str, Tensor]:
    sizes = Sizes(1, n or case.n, case.heads, case.kv_heads, args.dim)
    problem = make_problem("random", sizes, device=device, dtype=DTYPES[args.dtype])
    gate = problem.gate_proj_weight
    if gate is None:
        raise RuntimeError("the problem has no gates")
    return {"q": problem.q, "k": problem.k, "v": problem.v, "gate_proj_weight": gate}


def make_do(q: Tensor) -> Tensor:
    """The gradient of out."""
    generator = torch.Generator(q.device).manual_seed(1)
    return torch.randn(q.shape, generator=generator, device=q.device).to(q.dtype)


class Whole(NamedTuple):
    """A call that is not divided, or all ranks' with `run` of ContextParallel."""

    config: NSAConfig
    tensors: Mapping[str, Any]
    do: Tensor
    run: Callable[..., Tensor] = nsa

    @property
    def options(self) -> dict[str, Any]:
        return {"config": self.config, "backend": backend_of(self.do.device)}

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.run(**self.tensors, **self.options)

    def both(self, *, deterministic: bool = False) -> tuple[Tensor, ...]:
        """out and the gradients of q, k, v."""
        leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        out = self.run(**leaves, **self.options, deterministic=deterministic)
        return out.detach(), *torch.autograd.grad(out, [leaves[name] for name in "qkv"], self.do)


class Alone:
    """The Comm of a rank whose keys of all ranks are there already, and whose shares go nowhere.

    Args:
        received: of each pass, in order, what its gather receives (`received_keys`).
    """

    def __init__(self, rank: int, layout: Layout, received: Sequence[Tensor]) -> None:
        self.rank, self.size, self.layout, self.received = rank, layout.ranks, layout, iter(received)
        self.kept: list[Tensor] | None = None
        """Shares of dk and dv, pass after pass; None: nobody asks for them."""

    def start_gather(self, rows: Tensor, held: Sequence[list[Range]]) -> Callable[[], list[Tensor]]:
        """Keys and values of the next heads, in the pieces that Comm.start_gather has."""
        buffer = next(self.received)
        return lambda: [buffer[a:b] for a, b in received_rows(held, max(self.layout.lengths))]

    def add_shares(self, shares: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]) -> Tensor:
        """Those of the rank's own rows."""
        ((first, last),) = wanted[self.rank]
        if self.kept is not None:
            whole = shares.new_zeros((self.layout.tokens, *shares.shape[1:]))
            whole[first:last] = shares
            self.kept.append(whole)
        return torch.cat([shares[:0], *(shares[a - first : b - first] for a, b in held[self.rank])])


class ShareOf:
    """A rank's part in a call, as ContextParallel runs it.

    Args:
        own: the rank's rows, and weights. do: likewise.
        received: of Alone, for passes of `kv_heads_per_pass`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: NSAConfig,
        layout: Layout,
        rank: int,
        own: Mapping[str, Tensor],
        do: Tensor,
        received: Sequence[Tensor],
    ) -> None:
        self.config, self.layout, self.rank, self.own, self.do, self.received = config, layout, rank, own, do, received
        self.kv_heads, self.group = own["k"].shape[-2], own["q"].shape[-2] // own["k"].shape[-2]
        self.per_pass = kv_heads_per_pass(args, layout, own["k"])

    def plan(self, comm: Any = None) -> Plan:
        """Args: comm: default: Alone."""
        comm = comm or Alone(self.rank, self.layout, self.received)
        backend = backend_of(self.do.device)
        flags = {"deterministic": False, "recompute": False, "backend": backend, "max_seqlen": None}
        sizes = (self.kv_heads, self.group, self.per_pass)
        return Plan(comm, self.layout, self.config, False, *sizes, tuple(flags.items()))

    @torch.no_grad()
    def forward(self) -> Tensor:
        return attend(self.plan(), self.own, saving=False)[0]

    @torch.no_grad()
    def both(self, kept: list[Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """out and gradients. Args: kept: takes the shares of dk and dv."""
        out, saved = attend(self.plan(), self.own, saving=True)
        plan: Any = self.plan()
        plan.comm.kept = kept
        return out, attend_backward(plan, self.own, saved, self.do)


def kv_heads_per_pass(args: argparse.Namespace, layout: Layout, k: Tensor) -> int:
    """As ContextParallel chooses for a sequence of such keys, unless told otherwise."""
    row_bytes = 2 * args.dim * (k.dtype.itemsize + torch.float32.itemsize)
    return args.kv_heads_per_pass or heads_per_pass(k.shape[-2], layout.tokens, row_bytes)


def received_keys(layout: Layout, k: Tensor, v: Tensor, per_pass: int) -> list[Tensor]:
    """Of each pass what a gather receives: keys beside values, `[R * most tokens of a rank,B,heads,2 D]`, by ranks.

    Args:
        k, v: of the whole sequence, `[B,N,H_kv,D]`.
        per_pass: key/value heads.
    """
    most = max(layout.lengths)
    received = []
    for heads in torch.arange(k.shape[-2]).split(per_pass):
        rows = torch.cat([x[..., heads[0] : heads[-1] + 1, :].movedim(-3, 0) for x in (k, v)], -1)
        buffer, row = rows.new_zeros((layout.ranks * most, *rows.shape[1:])), 0
        for start, stop in received_rows(layout.ranges, most):
            buffer[start:stop] = rows[row : row + stop - start]
            row += stop - start
        received.append(buffer)
    return received


def take(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, a:b] for a, b in ranges)], 1)


def difference(got: Tensor, want: Tensor, *, exact: bool) -> str:
    """How two results differ; "" if they agree.

    Exactly, or but for roundings: sums of another order and of three branches, each rounded to the dtype, are within
    four of them of the largest value.
    """
    if exact:
        return "" if torch.equal(got, want) else f"{int((got != want).sum())} of {got.numel()} values differ"
    error = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    eps = max(torch.finfo(want.dtype).eps, 2**-18)  # fp32: sums of some thousand terms
    budget = 4 * eps * float(want.double().abs().max()) if want.numel() else 0.0
    return "" if error <= budget else f"error {error:.2e} is above the budget {budget:.2e}"
