"""Context parallelism of NSA: each rank's share of a sequence, timed alone on one device, or all ranks under torchrun.

    python bench/bench_context_parallel.py --bars                       one GPU: balance and scaling
    torchrun --nproc-per-node 2 bench/bench_context_parallel.py --bars  a GPU for each rank: speed-up, messages, links

Alone, one rank after the other runs what nsa/distributed does for its tokens, with the keys of all ranks there already:
messages are neither sent nor added up. Before a case is timed its rows are held against the undivided call (together:
of at most `--checked` tokens), and gradients but for roundings; where they differ, nothing is reported and the status
is 1. Writes OUT.json (schema: docs/results_files.md) after every case. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from bench.bars import Bar, figure, ratio
from bench.common import DTYPES, PRESETS, add_device, head_counts, make_parser, parse_args, positive, preset_name
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.show import row_line
from bench.timing import measure, milliseconds, peak_memory
from nsa import NSAConfig, nsa
from nsa.distributed import ContextParallel
from nsa.distributed.attention import Plan, attend, attend_backward, gathered_keys, heads_per_pass
from nsa.distributed.comm import all_gather, received_rows
from nsa.distributed.layout import Layout, Range, make_layout

SIZES, CPU_SIZES = ("per_tile:1M:8/2", "paper:256K:64/4"), ("per_tile:600:2/1", "paper:300:2/1")
RANKS, CPU_RANKS = (2, 4, 8, 16), (2, 3)
PASSES = ("fwd", "fwd+bwd")
BALANCE_BAR, SCALING_BAR = 1.05, 1.08  # The slowest rank over the mean, with zigzag; all shares over the undivided call
BAR_SIZES = {"per_tile": 1 << 20, "paper": 256 << 10}  # Tokens of the cases that bars are for
LINE = "{preset} {h}/{h_kv} N={n} R={ranks} {layout}  rank {rank:<3} {mode:<9} {pass:<8}{ms:ms} ms  {tokens} tokens"
SHARE = "{preset} N={n} R={ranks} {layout} {pass}  slowest over mean {slowest_over_mean:.3f}"
SHARE += "  all over undivided {sum_over_single:.3f}  speed-up {speedup:.3f}  messages {messages_ms:.3f} ms"
SHARE += "  not hidden {not_hidden_ms:.3f} ms  peak {peak_gib:.3f} GiB  bound {bound_gib:.3f} GiB"
SPEEDUP_BARS = {2: 1.85, 4: 3.5}  # The speed-up of forward and backward by the number of ranks, with zigzag
LINK_BYTES, CPU_LINK_BYTES = tuple(1 << n for n in (16, 18, 20, 22, 24, 26, 28, 30)), (1 << 12, 1 << 16, 1 << 20)
"""Bytes of a collective on all ranks together."""
LINK_CALLS = 10  # Consecutive calls of a timing, so that ranks' different starts count little

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


def time_shares(case: Case, args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Rows of all ranks. Raises WrongResult."""
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
    return rows


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


# Ranks together, under torchrun: the undivided call is timed on rank 0 while others wait; then each rank's share with
# the keys of all ranks there already, the messages without any computation, and all ranks' call


def run_together(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return Together(args, device).run()
    finally:
        dist.destroy_process_group()


class Together:
    """The job of a rank; that of rank 0 also writes the results."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group")
        self.args, self.device, self.group = args, device, group
        self.all = ContextParallel(group)  # to start at one time

    def run(self) -> int:
        if dist.get_rank() == 0:
            hooks = report(self.args, partial(find_bars_together, dist.get_world_size()), show_links)
            return run(self.args, environment(self.device), self.parts, LINE, **hooks)
        try:
            for _, measured in self.parts(None):
                measured()
        except WrongResult:
            return 1
        return 0

    def parts(self, results: Results | None) -> Iterator[Measurement]:
        """A part for each case that is not done yet. Args: `results`: of rank 0, else None."""
        done: list[Any] = [list(results.parts) if results is not None else None]
        dist.broadcast_object_list(done, src=0)
        links = self.links()
        if results is not None:
            results.fact("links", lambda: links)
        for case in [*dict.fromkeys(case.undivided for case in self.args.cases), *self.args.cases]:
            if case.name not in done[0]:
                yield case.name, partial(self.measure, case)

    def measure(self, case: Case) -> list[Row]:
        """Rows of all ranks. Raises WrongResult on all of them."""
        if case.ranks == 1:
            return self.time_undivided(case)
        if red := self.check(case):
            raise WrongResult(f"{case.name}: {red}")
        return self.time(case)

    # Checks

    def check(self, case: Case) -> str:
        """Description of the first wrong rows of at most `--checked` tokens on any rank, or ""."""
        config, cp = self.parallel(case)
        tensors = make_tensors(case, self.args, self.device, min(case.n, self.args.checked))
        do = make_do(tensors["q"])
        own = {n: x if n == "gate_proj_weight" else cp.shard(x) for n, x in tensors.items()}
        divided = Whole(config, own, cp.shard(do), cp.nsa)
        got, again = (divided.both(deterministic=True) for _ in range(2))
        wrong = ""
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, again, Whole(config, tensors, do).both(), strict=True):
            if not torch.equal(x, y):
                wrong = wrong or f"{name} differs from run to run"
            found = difference(x, cp.shard(z), exact=name == "out" and self.device.type == "cuda")
            wrong = wrong or (f"{name}: {found}" if found else "")
        told = self.tell(wrong)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    # Times

    def time_undivided(self, case: Case) -> list[Row]:
        """On rank 0, while others wait."""
        rows = []
        if dist.get_rank() == 0:
            tensors = make_tensors(case, self.args, self.device)
            whole = Whole(config_of(case, self.device), tensors, make_do(tensors["q"]))
            for direction in self.args.passes:
                call: Callable[[], Any] = whole.forward if direction == "fwd" else whole.both
                timing = measure(call, self.device, seconds=self.args.seconds)
                rows.append(make_row(case, self.args, 0, "alone", direction, timing.ms_p50, timing.peak_gib, case.n))
        self.start()
        return rows

    def time(self, case: Case) -> list[Row]:
        """Rows of all ranks: medians of calls that begin together."""
        config, cp = self.parallel(case)
        layout = make_layout(case.n, None, cp.size, cp.layout, cp.tile)
        tokens = layout.lengths[cp.rank]
        tensors = make_tensors(case, self.args, self.device, max(tokens, 1))
        own = {name: x if name == "gate_proj_weight" else x[:, :tokens] for name, x in tensors.items()}
        divided = Whole(config, own, make_do(own["q"]), cp.nsa)
        # Keys of all ranks, alone: the same ones in each pass, so that they take the memory of one
        per_pass = kv_heads_per_pass(self.args, layout, own["k"])
        most = cp.size * max(layout.lengths)
        keys = torch.randn(most, 1, per_pass, 2 * self.args.dim, device=self.device).to(own["k"].dtype)
        heads_left = range(case.h_kv, 0, -per_pass)
        received = [keys[:, :, :heads] for heads in heads_left]
        share = ShareOf(self.args, config, layout, cp.rank, own, divided.do, received)
        rows = []
        for direction in self.args.passes:
            backward = direction == "fwd+bwd"
            calls: dict[str, Callable[[], Any]] = {
                "alone": share.both if backward else share.forward,
                "messages": partial(send_all, share.plan(cp._comm), own, backward=backward),
                "together": divided.both if backward else divided.forward,
            }
            for mode, call in calls.items():
                peak_gib = peak_memory(call, self.device)  # and compiles
                times = [self.milliseconds(call) for _ in range(self.args.repeats)]
                for rank, figures in enumerate(self.tell((statistics.median(times), peak_gib, tokens))):
                    rows.append(make_row(case, self.args, rank, mode, direction, *figures))
        return rows

    def parallel(self, case: Case) -> tuple[Any, ContextParallel]:
        config, heads = config_of(case, self.device), self.args.kv_heads_per_pass
        tile = tile_of(config, self.device)
        return config, ContextParallel(self.group, case.layout, tile, kv_heads_per_pass=heads)

    def links(self) -> list[dict[str, Any]]:
        """Times of both collectives by their bytes, and the constants of the model that fit them best."""
        found, size = [], dist.get_world_size()
        for name in ("all_gather", "all_to_all"):
            times = []
            for count in CPU_LINK_BYTES if self.device.type == "cpu" else LINK_BYTES:
                sent = torch.zeros(count // size * size, dtype=torch.uint8, device=self.device)
                if name == "all_gather":
                    call = partial(all_gather, torch.empty_like(sent), sent[: count // size])
                else:
                    call = partial(dist.all_to_all_single, torch.empty_like(sent), sent)
                call()
                ms = [self.milliseconds(partial(repeat, call), host=False) for _ in range(self.args.repeats)]
                slowest = max(self.tell(statistics.median(ms))) / LINK_CALLS
                times.append({"bytes": sent.nbytes, "ms": slowest})
            alpha_us, beta_gbs = fit_link([(one["bytes"], one["ms"]) for one in times], size)
            constants = {"ranks": size, "alpha_us": alpha_us, "beta_gbs": beta_gbs}
            found.append({"collective": name, **constants, "times": times})
        return found

    def milliseconds(self, call: Callable[[], Any], *, host: bool = True) -> float:
        """Time of a call that begins on all ranks together."""
        self.start()
        return milliseconds(call, self.device, host)

    def start(self) -> None:
        """Wait for all ranks, on the host, and then for the device."""
        self.all.sum(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tell(self, figure: Any) -> list[Any]:
        """The figures of all ranks."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, figure)
        return told


@torch.no_grad()
def send_all(plan: Plan, own: dict[str, Tensor], *, backward: bool) -> None:
    """The messages of a call, and the copies that put what was received in order."""
    for _ in gathered_keys(plan, own):
        pass
    if not backward:
        return
    for _, keys in gathered_keys(plan, own):
        for name, x in keys.items():
            shares = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            everyone = [[(0, plan.total(name))]] * plan.comm.size
            plan.comm.add_shares(shares.movedim(-3, 0), plan.held(name), everyone)


def repeat(call: Callable[[], Any]) -> None:
    for _ in range(LINK_CALLS):
        call()


def fit_link(times: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """alpha in microseconds and beta in GB/s of (R - 1) alpha + V (R - 1) / (R beta), by least squares of the relative
    errors. Args: times: V in bytes, and milliseconds.
    """
    terms = torch.tensor([[(ranks - 1) / 1e3, v * (ranks - 1) / ranks / 1e6] for v, _ in times], dtype=torch.float64)
    ms = torch.tensor([[ms] for _, ms in times], dtype=torch.float64)
    alpha, inverse_beta = torch.linalg.lstsq(terms / ms, torch.ones_like(ms)).solution.flatten().tolist()
    return alpha, 1 / inverse_beta


def show_links(content: dict[str, Any]) -> None:
    for link in content["links"]:
        print("{collective}, {ranks} ranks: alpha {alpha_us:.1f} us, beta {beta_gbs:.0f} GB/s".format(**link))


def find_bars_together(ranks: int, rows: Sequence[Row]) -> Iterator[Bar]:
    for preset, n in BAR_SIZES.items():
        where = {"preset": preset, "n": n, "ranks": ranks, "layout": "zigzag"}
        name, both = f"{preset} {n >> 10}K, {ranks} ranks", PASSES[-1]
        speedup = figure(rows, {**where, "pass": both}, "speedup")
        yield Bar(f"{name}, {both}, speed-up", speedup, SPEEDUP_BARS[ranks], at_least=True, unit="x")
        for direction in PASSES:
            memory = figure(rows, {**where, "pass": direction}, "peak_gib", "bound_gib")
            yield Bar(f"{name}, {direction}, peak over bound", memory, 1.0, at_least=False, unit="x")


# The command line


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_together(args) if args.together else run_alone(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dtype", "seconds", "bars", seconds=0.5)
    add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--sizes", nargs="+", help=f"preset:N:heads; default: {' '.join(SIZES)} (CPU: {' '.join(CPU_SIZES)})")
    add("--ranks", nargs="+", type=positive, help="R, alone; default: 2 4 8 16 (CPU: 2 3)")
    add("--layouts", nargs="+", choices=["zigzag", "contiguous"], default=["zigzag"], help="default: zigzag")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--kv-heads-per-pass", type=positive, help="default: that of ContextParallel")
    add("--dim", type=positive, help="D; default: 128 (CPU: 16)")
    add("--out", help=f"results, without suffix; default: {LOCAL_RESULTS / 'context-parallel'}, torchrun: -together")
    add("--repeats", type=positive, default=5, help="of each timing under torchrun; default: %(default)s")
    add("--checked", type=positive, default=16 << 10, help="most tokens of the check under torchrun; default: 16K")
    args = parse_args(parser, argv)
    args.together = "LOCAL_RANK" in os.environ
    on_cpu = args.device == "cpu"
    args.dim, args.dtype = args.dim or (16 if on_cpu else 128), args.dtype or ("fp32" if on_cpu else "bf16")
    args.out = args.out or str(LOCAL_RESULTS / f"context-parallel{'-together' if args.together else ''}")
    if args.together and args.ranks:
        parser.error("--ranks is for shares alone: torchrun says how many ranks there are")
    ranks = [int(os.environ["WORLD_SIZE"])] if args.together else args.ranks or (CPU_RANKS if on_cpu else RANKS)
    if args.together and args.bars and ranks[0] not in SPEEDUP_BARS:
        parser.error(f"--bars under torchrun are for {' and '.join(map(str, SPEEDUP_BARS))} ranks, got {ranks[0]}")
    device, args.cases = torch.device(args.device), []
    try:
        for size, count, layout in product(args.sizes or (CPU_SIZES if on_cpu else SIZES), ranks, args.layouts):
            preset, n, heads = size.split(":")
            case = Case(preset_name(preset), positive(n), *head_counts(heads), count, layout)
            lengths = make_layout(case.n, None, case.ranks, layout, tile_of(config_of(case, device), device)).lengths
            if 0 in lengths:
                parser.error(f"--sizes must give every rank tokens, got {lengths} for {case.name}")
            args.cases.append(case)
    except (KeyError, ValueError, argparse.ArgumentTypeError):
        parser.error(f"--sizes must be such as {SIZES[0]}, got {args.sizes}")
    return args


if __name__ == "__main__":
    sys.exit(main())
