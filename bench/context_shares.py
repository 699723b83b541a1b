"""Cases and rows of the benchmark of context parallelism, and each rank's share alone, without messages."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.bars import Bar, figure, ratio
from bench.common import DTYPES, PRESETS
from bench.inputs import Sizes, make_problem
from bench.report import environment
from bench.results_file import Row, WrongResult, run
from bench.show import row_line
from bench.timing import measure
from nsa import NSAConfig, nsa
from nsa.distributed.attention import Plan, attend, attend_backward, heads_per_pass
from nsa.distributed.comm import received_rows
from nsa.distributed.layout import Layout, Range, make_layout

PASSES = ("fwd", "fwd+bwd")
RANKS = (2, 4, 8, 16)
BALANCE_BAR, SCALING_BAR = 1.05, 1.08  # The slowest rank over the mean, with zigzag; all shares over the undivided call
BAR_SIZES = {"per_tile": 1 << 20, "paper": 256 << 10}  # Tokens of the cases that bars are for
LINE = "{preset} {h}/{h_kv} N={n} R={ranks} {layout}  rank {rank:<3} {mode:<9} {pass:<8}{ms:ms} ms  {tokens} tokens"
SHARE = "{preset} N={n} R={ranks} {layout} {pass}  slowest over mean {slowest_over_mean:.3f}"
SHARE += "  all over undivided {sum_over_single:.3f}  speed-up {speedup:.3f}  messages {messages_ms:.3f} ms"
SHARE += "  not hidden {not_hidden_ms:.3f} ms  peak {peak_gib:.3f} GiB  bound {bound_gib:.3f} GiB"

# Limits of `cute`, which is not imported on a CPU
STREAMS = 2  # Chunks of the selected branch that run at a time in token mode
PARTIAL_BYTES = {"fwd": 520 << 20, "fwd+bwd": 512 << 20}
"""Partial results of such a chunk; backward's are also those of a tile-mode call, and of phases of entries."""
TEMPORARY_BYTES = 1 << 30
"""Most bytes of temporaries of the heads that backward handles together, if they are more than one."""


class Case(NamedTuple):
    """Fields of a row."""

    preset: str
    n: int
    h: int
    h_kv: int
    ranks: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.preset} {self.h}/{self.h_kv} N={self.n} R={self.ranks} {self.layout}"

    @property
    def undivided(self) -> Case:
        return self._replace(ranks=1, layout="contiguous")


def make_row(case: Case, args: argparse.Namespace, rank: int, mode: str, direction: str, *figures: Any) -> Row:
    """A row. Args: `figures`: milliseconds, GiB, and tokens of the rank.

    Mode "alone": keys of all ranks are there already; "messages": nothing is computed; "together".
    """
    row = {**case._asdict(), "d": args.dim, "dtype": args.dtype, "rank": rank, "mode": mode, "pass": direction}
    named = zip(("ms", "peak_gib", "tokens"), figures, strict=True)
    return {**row, **dict(named), "command": args.command}


def case_of(row: Row) -> Case:
    return Case(*(row[name] for name in Case._fields))


def report(
    args: argparse.Namespace,
    find_bars: Callable[[Sequence[Row]], Iterable[Bar]],
    show: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Keywords of `run` for files with shares: their fields, bars, and what is printed besides `show`."""
    shares = partial(find_shares, kv_heads_per_pass=args.kv_heads_per_pass)

    def show_all(content: dict[str, Any]) -> None:
        print(*(row_line(SHARE, share) for share in content["shares"]), sep="\n")
        show(content)

    fields = {"fields": lambda results: {"shares": shares(results.rows)}}
    return {**fields, "bars": lambda rows: find_bars(shares(rows)), "show": show_all}


def find_shares(rows: Sequence[Row], kv_heads_per_pass: int | None = None) -> list[Row]:
    """Figures that the rows of a case and pass give together; None if something was not measured.

    slowest_over_mean, and sum_over_single, over the undivided call: of shares alone. speedup: the undivided call over
    all ranks together. not_hidden_ms: all ranks together over the slowest alone. peak_gib: of the rank that takes
    most, together. bound_gib: upper bound of it.
    """
    shares: list[Row] = []
    for case, direction in dict.fromkeys((case_of(row), row["pass"]) for row in rows if row["ranks"] > 1):
        own = [row for row in rows if (case_of(row), row["pass"]) == (case, direction)]
        undivided = (row["ms"] for row in rows if (case_of(row), row["pass"]) == (case.undivided, direction))
        single, alone = next(undivided, None), [row for row in own if row["mode"] == "alone"]
        slowest = {mode: max(row["ms"] for row in own if row["mode"] == mode) for mode in {row["mode"] for row in own}}
        together, times = slowest.get("together"), [row["ms"] for row in alone]
        peaks = [row["peak_gib"] for row in own if row["mode"] == "together" and row["peak_gib"] is not None]
        share = {"preset": case.preset, "n": case.n, "ranks": case.ranks, "layout": case.layout, "pass": direction}
        share |= {
            "slowest_over_mean": max(times) / statistics.mean(times),
            "sum_over_single": ratio(sum(times), single),
        }
        share |= {"speedup": ratio(single, together), "messages_ms": slowest.get("messages")}
        share |= {"not_hidden_ms": None if together is None else together - slowest["alone"]}
        bound = max(bound_gib(row, kv_heads_per_pass) for row in alone) if peaks else None
        shares.append({**share, "peak_gib": max(peaks, default=None), "bound_gib": bound})
    return shares


def bound_gib(row: Row, kv_heads_per_pass: int | None = None) -> float:
    """GiB beside inputs that a call of `cute` takes at most on the rank of a row: the tensors that live at a time.

    docs/distributed.md has them in words (Memory). A part is taken to have all of the rank's tokens, as where its two
    chunks meet.
    """
    config, size, wide = PRESETS[row["preset"]](), DTYPES[row["dtype"]].itemsize, torch.float32.itemsize
    n, kv_heads, dim, ranks, tokens = (int(row[name]) for name in ("n", "h_kv", "d", "ranks", "tokens"))
    group, token_mode = row["h"] // kv_heads, config.token_mode
    per_pass = kv_heads_per_pass or heads_per_pass(kv_heads, n, 2 * dim * (size + wide))
    # Of a key/value head: its keys and values, the same in fp32, and what is like q of its query heads
    keys = n * 2 * dim * size
    sums, entries = keys * wide / size, keys / config.stride
    queries, stats = tokens * group * dim * size, tokens * group * 3 * wide
    chosen = tokens * config.num_selected_blocks * 4 * (1 if token_mode else group / config.q_tile_size)
    partials = PARTIAL_BYTES[row["pass"]] * (STREAMS if token_mode else 1)

    messages = keys + keys * (1 + 1 / ranks)  # gathered, and under way with the rank's own
    if row["pass"] == "fwd":
        branches = queries * (2 if token_mode else 3)  # token mode writes the selected one into the gated sum
        part = queries + branches + 2 * stats + entries + chosen  # the sum; lse and gates
        return float(kv_heads * queries + per_pass * (messages + part) + (partials if token_mode else 0)) / 2**30

    kept = 3 * queries + 2 * stats + 2 * entries + chosen  # branches, lse and gates, entries of two parts
    own = 2 * queries + keys / ranks  # out and dq, dk and dv
    part = queries + sums * (1 + 1 / (2 * ranks))  # dq; fp32 dk and dv, and those of the other part
    half = tokens // 2 * group * dim * (3 * size + wide) + keys / size * (2 * size + wide)
    heads = max(1, min(per_pass, TEMPORARY_BYTES // int(half)))  # of a part of half the tokens, which takes more
    compressed = heads * (queries * wide / size + 2 * sums / config.stride) + PARTIAL_BYTES[row["pass"]]
    selected = heads * (queries + keys + (STREAMS * sums if token_mode else 0)) + partials
    window = heads * 2 * (queries + keys)  # beside what the selected one left to add up
    at_work = heads * 3 * stats + max(compressed, selected, window)  # lse, delta and gradients of gates
    return float(kv_heads * (own + kept) + per_pass * (messages + part) + at_work) / 2**30


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
    sizes = Sizes(1, n or case.n, case.h, case.h_kv, args.dim)
    return make_problem("random", sizes, device=device, dtype=DTYPES[args.dtype]).tensors()


def make_do(q: Tensor) -> Tensor:
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
    """The Comm of a rank whose keys of all ranks are there (`received_keys`), and whose shares go nowhere."""

    def __init__(self, rank: int, layout: Layout, received: Sequence[Tensor]) -> None:
        self.rank, self.size, self.layout, self.received = rank, layout.ranks, layout, iter(received)
        self.kept: list[Tensor] | None = None
        """Shares of dk and dv, pass after pass; None: not kept."""

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


@dataclass(frozen=True)
class ShareOf:
    """A rank's part in a call, as ContextParallel runs it: its rows and weights, and what Alone receives."""

    args: argparse.Namespace
    config: NSAConfig
    layout: Layout
    rank: int
    own: Mapping[str, Tensor]
    do: Tensor
    received: Sequence[Tensor]

    def plan(self, comm: Any = None) -> Plan:
        """Args: comm: default: Alone."""
        comm = comm or Alone(self.rank, self.layout, self.received)
        backend = backend_of(self.do.device)
        flags = {"deterministic": False, "recompute": False, "backend": backend, "max_seqlen": None}
        kv_heads, per_pass = self.own["k"].shape[-2], kv_heads_per_pass(self.args, self.layout, self.own["k"])
        sizes = kv_heads, self.own["q"].shape[-2] // kv_heads, per_pass
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
    """The number that was asked for, or that ContextParallel chooses for a sequence of such keys."""
    row_bytes = 2 * args.dim * (k.dtype.itemsize + torch.float32.itemsize)
    return args.kv_heads_per_pass or heads_per_pass(k.shape[-2], layout.tokens, row_bytes)


def received_keys(layout: Layout, k: Tensor, v: Tensor, per_pass: int) -> list[Tensor]:
    """Rows that each pass gathers: keys beside values, `[R * most tokens of a rank,B,heads,2 D]`, by ranks."""
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
    """Description of how two results differ; "" if they agree.

    Exactly, or but for roundings: sums of another order and of three branches, each rounded to the dtype, are within
    four of them of the largest value.
    """
    if exact:
        return "" if torch.equal(got, want) else f"{int((got != want).sum())} of {got.numel()} values differ"
    error = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    eps = max(torch.finfo(want.dtype).eps, 2**-18)  # fp32: sums of some thousand terms
    budget = 4 * eps * float(want.double().abs().max()) if want.numel() else 0.0
    return "" if error <= budget else f"error {error:.2e} is above the budget {budget:.2e}"


# Shares alone


def run_alone(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    cases = [*dict.fromkeys(case.undivided for case in args.cases), *args.cases]
    parts = [(case.name, partial(time_shares, case, args, device)) for case in cases]
    return run(args, environment(device), lambda _: parts, LINE, **report(args, find_bars))


def time_shares(case: Case, args: argparse.Namespace, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows of all ranks, and what did not run: nothing. Raises WrongResult."""
    config, tensors = config_of(case, device), make_tensors(case, args, device)
    whole = Whole(config, tensors, make_do(tensors["q"]))
    layout = make_layout(case.n, None, case.ranks, case.layout, tile_of(config, device))
    shares = [] if case.ranks == 1 else divide(args, whole, layout)
    if shares and (wrong := check_shares(whole, layout, shares)):
        raise WrongResult(f"{case.name}: {wrong}")
    rows = []
    timed: Sequence[Whole | ShareOf] = shares or [whole]
    for direction, (rank, share) in product(args.passes, enumerate(timed)):
        call: Callable[[], Any] = share.forward if direction == "fwd" else share.both
        timing, tokens = measure(call, device, seconds=args.seconds), layout.lengths[rank]
        rows.append(make_row(case, args, rank, "alone", direction, timing.ms_p50, timing.peak_gib, tokens))
    return rows, []


def divide(args: argparse.Namespace, whole: Whole, layout: Layout) -> list[ShareOf]:
    k, v = whole.tensors["k"], whole.tensors["v"]
    shares, received = [], received_keys(layout, k, v, kv_heads_per_pass(args, layout, k))
    for rank, ranges in enumerate(layout.ranges):
        own = {n: x if n == "gate_proj_weight" else take(x, ranges) for n, x in whole.tensors.items()}
        shares.append(ShareOf(args, whole.config, layout, rank, own, take(whole.do, ranges), received))
    return shares


def check_shares(whole: Whole, layout: Layout, shares: Sequence[ShareOf]) -> str:
    """Description of the first wrong rows or gradients of the ranks; "" if there are none."""
    expected, dq, *dkv = whole.both()
    totals: list[Tensor] = []
    for rank, (ranges, share) in enumerate(zip(layout.ranges, shares, strict=True)):
        kept: list[Tensor] = []
        out, gradients = share.both(kept)
        totals = [a + b for a, b in zip(totals, kept, strict=True)] if totals else kept
        for name, got, want in (("out", out, expected), ("dq", gradients["q"], dq)):
            if wrong := difference(got, take(want, ranges), exact=name == "out" and whole.do.is_cuda):
                return f"{name} of rank {rank}: {wrong}"
    for i, (name, want) in enumerate(zip(("dk", "dv"), dkv, strict=True)):
        got = torch.cat(totals[i::2], -2).movedim(0, -3).to(want.dtype)
        if wrong := difference(got, want, exact=False):
            return f"{name} of all ranks: {wrong}"
    return ""


def find_bars(shares: Sequence[Row]) -> Iterator[Bar]:
    for preset, ranks, direction in product(BAR_SIZES, RANKS, PASSES):
        where = {"preset": preset, "n": BAR_SIZES[preset], "ranks": ranks, "layout": "zigzag", "pass": direction}
        name = f"{preset} {BAR_SIZES[preset] >> 10}K, {ranks} ranks, {direction}"
        balance, total = (figure(shares, where, field) for field in ("slowest_over_mean", "sum_over_single"))
        yield Bar(f"{name}, slowest over mean", balance, BALANCE_BAR, at_least=False, unit="x")
        yield Bar(f"{name}, all over undivided", total, SCALING_BAR, at_least=False, unit="x")
