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

SIZES = {"cuda": ("per_tile:1M:8/2", "paper:256K:64/4"), "cpu": ("per_tile:900:2/1", "paper:900:2/1")}
RANKS = {"cuda": (2, 4, 8, 16), "cpu": (2, 3)}
PASSES = ("fwd", "fwd+bwd")
BALANCE_BAR, SCALING_BAR = 1.05, 1.08  # The slowest rank over the mean; all shares over the undivided call
SPEEDUP_BARS = {2: 1.85, 4: 3.5}  # The speed-up of forward and backward by the number of ranks
BAR_SIZES = {"per_tile": 1 << 20, "paper": 256 << 10}  # Tokens of the cases that bars are for
LINE = "{preset} {h}/{h_kv} N={n} R={ranks}  rank {rank:<3} {mode:<9} {pass:<8}{ms:ms} ms  {tokens} tokens"
SHARE = "{preset} N={n} R={ranks} {pass}  slowest over mean {slowest_over_mean:.3f}"
SHARE += "  all over undivided {sum_over_single:.3f}  speed-up {speedup:.3f}  messages {messages_ms:.3f} ms"
SHARE += "  not hidden {not_hidden_ms:.3f} ms  peak {peak_gib:.3f} GiB  bound {bound_gib:.3f} GiB"
LINK = "{collective}, {ranks} ranks: alpha {alpha_us:.1f} us  beta {beta_gbs:.0f} GB/s"
LINK_BYTES = {"cuda": [1 << n for n in range(16, 31, 2)], "cpu": [1 << n for n in (12, 16, 20)]}
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

    @property
    def layout(self) -> str:
        return "zigzag" if self.ranks > 1 else "contiguous"

    @property
    def name(self) -> str:
        return f"{self.preset} {self.h}/{self.h_kv} N={self.n} R={self.ranks}"

    @property
    def config(self) -> NSAConfig:
        return PRESETS[self.preset]()

    @property
    def sharded(self) -> Layout:
        """Ranks begin where those of ContextParallel do by default."""
        return make_layout(self.n, None, self.ranks, self.layout, 256)

    @property
    def undivided(self) -> Case:
        return self._replace(ranks=1)


def make_row(case: Case, args: argparse.Namespace, rank: int, mode: str, direction: str, *figures: Any) -> Row:
    """A row. Args: `figures`: milliseconds, GiB, and tokens of the rank.

    Mode "alone": keys of all ranks are there already; "messages": nothing is computed; "together".
    """
    row = {**case._asdict(), "layout": case.layout, "d": args.dim, "dtype": args.dtype, "rank": rank, "mode": mode}
    named = dict(zip(("ms", "peak_gib", "tokens"), figures, strict=True))
    return {**row, "pass": direction, **named, "command": args.command}


def case_of(row: Row) -> Case:
    return Case(*(row[name] for name in Case._fields))


def find_shares(rows: Sequence[Row]) -> list[Row]:
    """Figures that the rows of a case and pass give together; None if something was not measured.

    slowest_over_mean, and sum_over_single, over the undivided call: of shares alone. speedup: the undivided call over
    all ranks together. not_hidden_ms: all ranks together over the slowest alone. peak_gib: of the rank that takes
    most, together. bound_gib: upper bound of it.
    """
    shares: list[Row] = []
    by_key: dict[Any, list[Row]] = {}
    for row in rows:
        by_key.setdefault((case_of(row), row["pass"], row["mode"]), []).append(row)

    def most(field: str, *key: Any) -> float | None:
        return max((row[field] for row in by_key.get(key, []) if row[field] is not None), default=None)

    for case, direction in dict.fromkeys(key[:2] for key in by_key if key[0].ranks > 1):
        alone = by_key[case, direction, "alone"]
        times, single = [row["ms"] for row in alone], most("ms", case.undivided, direction, "alone")
        call, peak_gib = (most(field, case, direction, "together") for field in ("ms", "peak_gib"))
        share: Row = {"preset": case.preset, "n": case.n, "ranks": case.ranks, "layout": case.layout, "pass": direction}
        share |= {"slowest_over_mean": max(times) / statistics.mean(times)}
        share |= {"sum_over_single": ratio(sum(times), single), "speedup": ratio(single, call)}
        share |= {"messages_ms": most("ms", case, direction, "messages")}
        share |= {"not_hidden_ms": None if call is None else call - max(times), "peak_gib": peak_gib}
        shares.append({**share, "bound_gib": None if peak_gib is None else max(map(bound_gib, alone))})
    return shares


def fields(results: Results) -> dict[str, Any]:
    return {"shares": find_shares(results.rows)}


def show(content: dict[str, Any]) -> None:
    print(*(row_line(SHARE, share) for share in content["shares"]), sep="\n")
    print(*(row_line(LINK, link) for link in content.get("links", [])), sep="\n")


def bound_gib(row: Row) -> float:
    """GiB beside inputs that a call of `cute` takes at most on the rank of a row: the tensors that live at a time.

    docs/distributed.md has them in words (Memory). A part is taken to have all of the rank's tokens, as where its two
    chunks meet.
    """
    config, size, wide = PRESETS[row["preset"]](), DTYPES[row["dtype"]].itemsize, torch.float32.itemsize
    n, kv_heads, dim, ranks, tokens = (int(row[name]) for name in ("n", "h_kv", "d", "ranks", "tokens"))
    group, token_mode = row["h"] // kv_heads, config.token_mode
    per_pass = heads_per_pass(kv_heads, n, 2 * dim * (size + wide))
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

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.run(**self.tensors, config=self.config)

    def both(self, *, deterministic: bool = False) -> tuple[Tensor, ...]:
        """out and the gradients of q, k, v."""
        leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        out = self.run(**leaves, config=self.config, deterministic=deterministic)
        return out.detach(), *torch.autograd.grad(out, [leaves[name] for name in "qkv"], self.do)


class Alone:
    """The Comm of a rank whose keys of all ranks are there, those of each pass, and whose shares go nowhere.

    `kept`, if given, takes the shares of dk and dv, pass after pass.
    """

    def __init__(self, rank: int, layout: Layout, received: Iterable[Tensor], kept: list[Tensor] | None = None) -> None:
        self.rank, self.size, self.layout, self.received, self.kept = rank, layout.ranks, layout, iter(received), kept

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


class ShareOf(NamedTuple):
    """A rank's part in a call, as ContextParallel runs it: its rows and weights, and what Alone receives."""

    case: Case
    rank: int
    own: Mapping[str, Tensor]
    do: Tensor
    received: Sequence[Tensor]

    def plan(self, comm: Any = None, kept: list[Tensor] | None = None) -> Plan:
        """Args: comm: default: Alone."""
        layout, k = self.case.sharded, self.own["k"]
        comm = comm or Alone(self.rank, layout, self.received, kept)
        flags = ("deterministic", False), ("recompute", False), ("backend", None), ("max_seqlen", None)
        sizes = self.case.h_kv, self.case.h // self.case.h_kv, kv_heads_per_pass(layout, k)
        return Plan(comm, layout, self.case.config, False, *sizes, flags)

    @torch.no_grad()
    def forward(self) -> Tensor:
        return attend(self.plan(), self.own, saving=False)[0]

    @torch.no_grad()
    def both(self, kept: list[Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """out and gradients. Args: kept: as in Alone."""
        out, saved = attend(self.plan(), self.own, saving=True)
        return out, attend_backward(self.plan(kept=kept), self.own, saved, self.do)


def kv_heads_per_pass(layout: Layout, k: Tensor) -> int:
    """The number that ContextParallel chooses for a sequence of such keys."""
    return heads_per_pass(k.shape[-2], layout.tokens, 2 * k.shape[-1] * (k.dtype.itemsize + torch.float32.itemsize))


def received_keys(layout: Layout, k: Tensor, v: Tensor) -> list[Tensor]:
    """Rows that each pass gathers: keys beside values, `[R * most tokens of a rank,B,heads,2 D]`, by ranks."""
    rows, most = torch.cat([k, v], -1).movedim(-3, 0), max(layout.lengths)
    buffer, row = rows.new_zeros((layout.ranks * most, *rows.shape[1:])), 0
    for start, stop in received_rows(layout.ranges, most):
        buffer[start:stop] = rows[row : row + stop - start]
        row += stop - start
    return [one.contiguous() for one in buffer.split(kv_heads_per_pass(layout, k), -2)]


def take(tensors: Mapping[str, Tensor], shard: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A rank's tensors: its rows of those that have a row for each token, and all weights."""
    return {name: x if name == "gate_proj_weight" else shard(x) for name, x in tensors.items()}


def rows_of(ranges: Sequence[Range], x: Tensor) -> Tensor:
    return torch.cat([x[:, a:b] for a, b in ranges], 1)


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


def time_alone(args: argparse.Namespace, device: torch.device, case: Case, part: Whole | ShareOf) -> Iterator[Row]:
    rank = part.rank if isinstance(part, ShareOf) else 0
    calls: dict[str, Callable[[], Any]] = {"fwd": part.forward, "fwd+bwd": part.both}
    for direction, call in calls.items():
        timing = measure(call, device, seconds=args.seconds)
        figures = timing.ms_p50, timing.peak_gib, case.sharded.lengths[rank]
        yield make_row(case, args, rank, "alone", direction, *figures)


# Shares alone


def run_alone(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    parts = [(case.name, partial(time_shares, args, device, case)) for case in args.cases]
    return run(args, environment(device), lambda _: parts, LINE, fields=fields, bars=find_bars, show=show)


def time_shares(args: argparse.Namespace, device: torch.device, case: Case) -> Iterator[Row]:
    """Rows of all ranks, or of the undivided call. Raises WrongResult."""
    tensors, layout = make_tensors(case, args, device), case.sharded
    whole = Whole(case.config, tensors, make_do(tensors["q"]))
    if case.ranks == 1:
        yield from time_alone(args, device, case, whole)
        return
    received, shares = received_keys(layout, tensors["k"], tensors["v"]), []
    for rank, ranges in enumerate(layout.ranges):
        own, do = take(tensors, partial(rows_of, ranges)), rows_of(ranges, whole.do)
        shares.append(ShareOf(case, rank, own, do, received))
    if wrong := check_shares(whole, layout, shares):
        raise WrongResult(f"{case.name}: {wrong}")
    for share in shares:
        yield from time_alone(args, device, case, share)


def check_shares(whole: Whole, layout: Layout, shares: Sequence[ShareOf]) -> str:
    """Description of the first wrong rows or gradients of the ranks; "" if there are none."""
    expected, dq, *dkv = whole.both()
    totals: list[Tensor] = []
    for rank, (ranges, share) in enumerate(zip(layout.ranges, shares, strict=True)):
        kept: list[Tensor] = []
        out, gradients = share.both(kept)
        totals = [a + b for a, b in zip(totals, kept, strict=True)] if totals else kept
        for name, got, want in (("out", out, expected), ("dq", gradients["q"], dq)):
            if wrong := difference(got, rows_of(ranges, want), exact=name == "out" and whole.do.is_cuda):
                return f"{name} of rank {rank}: {wrong}"
    for i, (name, want) in enumerate(zip(("dk", "dv"), dkv, strict=True)):
        got = torch.cat(totals[i::2], -2).movedim(0, -3).to(want.dtype)
        if wrong := difference(got, want, exact=False):
            return f"{name} of all ranks: {wrong}"
    return ""


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    shares = find_shares(rows)
    for (preset, n), ranks, direction in product(BAR_SIZES.items(), RANKS["cuda"], PASSES):
        where = {"preset": preset, "n": n, "ranks": ranks, "pass": direction}
        name = f"{preset} {n >> 10}K, {ranks} ranks, {direction}"
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
        group: Any = dist.group.WORLD
        self.args, self.device, self.cp = args, device, ContextParallel(group)

    def run(self) -> int:
        if self.cp.rank == 0:
            bars = partial(find_bars_together, self.cp.size)
            return run(self.args, environment(self.device), self.parts, LINE, fields=fields, bars=bars, show=show)
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
        for case in self.args.cases:
            if case.name not in done[0]:
                yield case.name, partial(self.measure, case)

    def measure(self, case: Case) -> list[Row]:
        """Rows of all ranks. Raises WrongResult on all of them."""
        if case.ranks == 1:
            rows = list(time_shares(self.args, self.device, case)) if self.cp.rank == 0 else []
            self.start()
            return rows
        if red := self.check(case):
            raise WrongResult(f"{case.name}: {red}")
        return self.time(case)

    def check(self, case: Case) -> str:
        """Description of the first wrong rows of at most `--checked` tokens on any rank, or ""."""
        tensors = make_tensors(case, self.args, self.device, min(case.n, self.args.checked))
        do, cp = make_do(tensors["q"]), self.cp
        divided = Whole(case.config, take(tensors, cp.shard), cp.shard(do), cp.nsa)
        expected = Whole(case.config, tensors, do).both()
        got, again = (divided.both(deterministic=True) for _ in range(2))
        wrong = ""
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, again, expected, strict=True):
            found = difference(x, cp.shard(z), exact=name == "out" and self.device.type == "cuda")
            if not wrong and not torch.equal(x, y):
                wrong = f"{name} differs from run to run"
            wrong = wrong or (f"{name}: {found}" if found else "")
        return next((f"rank {rank}: {text}" for rank, text in enumerate(self.tell(wrong)) if text), "")

    def time(self, case: Case) -> list[Row]:
        """Rows of all ranks: medians of calls that begin together."""
        cp, layout = self.cp, case.sharded
        tokens = layout.lengths[cp.rank]
        own = make_tensors(case, self.args, self.device, tokens)
        divided = Whole(case.config, own, make_do(own["q"]), cp.nsa)
        # Keys of all ranks, alone: the same ones in each pass, so that they take the memory of one
        k, per_pass = own["k"], kv_heads_per_pass(layout, own["k"])
        keys = k.new_empty(cp.size * max(layout.lengths), 1, per_pass, 2 * self.args.dim).normal_()
        received = [keys[:, :, :heads] for heads in range(case.h_kv, 0, -per_pass)]
        share = ShareOf(case, cp.rank, own, divided.do, received)
        rows = []
        for direction in PASSES:
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

    def links(self) -> list[dict[str, Any]]:
        """Times of both collectives by their bytes, and the constants of the model that fit them best."""
        found, size = [], self.cp.size
        for name, send in (("all_gather", all_gather), ("all_to_all", dist.all_to_all_single)):
            times = []
            for count in LINK_BYTES[self.device.type]:
                sent = torch.zeros(count // size * size, dtype=torch.uint8, device=self.device)
                given = sent[: count // size] if send is all_gather else sent
                call = partial(repeat, partial(send, torch.empty_like(sent), given))
                call()
                ms = [self.milliseconds(call, host=False) for _ in range(self.args.repeats)]
                times.append({"bytes": sent.nbytes, "ms": max(self.tell(statistics.median(ms))) / LINK_CALLS})
            alpha_us, beta_gbs = fit_link([(one["bytes"], one["ms"]) for one in times], size)
            found.append(
                {"collective": name, "ranks": size, "alpha_us": alpha_us, "beta_gbs": beta_gbs, "times": times}
            )
        return found

    def milliseconds(self, call: Callable[[], Any], *, host: bool = True) -> float:
        """Time of a call that begins on all ranks together."""
        self.start()
        return milliseconds(call, self.device, host)

    def start(self) -> None:
        """Wait for all ranks, on the host, and then for the device."""
        self.cp.sum(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tell(self, figure: Any) -> list[Any]:
        """The figures of all ranks."""
        told: list[Any] = [None] * self.cp.size
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


def find_bars_together(ranks: int, rows: Sequence[Row]) -> Iterator[Bar]:
    shares = find_shares(rows)
    for preset, n in BAR_SIZES.items():
        where, name = {"preset": preset, "n": n, "ranks": ranks}, f"{preset} {n >> 10}K, {ranks} ranks"
        speedup = figure(shares, {**where, "pass": "fwd+bwd"}, "speedup")
        yield Bar(f"{name}, fwd+bwd, speed-up", speedup, SPEEDUP_BARS[ranks], at_least=True, unit="x")
        for direction in PASSES:
            memory = figure(shares, {**where, "pass": direction}, "peak_gib", "bound_gib")
            yield Bar(f"{name}, {direction}, peak over bound", memory, 1.0, at_least=False, unit="x")


# The command line


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_together(args) if args.together else run_alone(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "seconds", "bars", seconds=0.5)
    add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    text = f"preset:N:heads; default: {' '.join(SIZES['cuda'])}, on a CPU shorter ones"
    add("--sizes", nargs="+", type=undivided_case, help=text)
    add("--ranks", nargs="+", type=positive, help="R, alone; default: 2 4 8 16 (CPU: 2 3); torchrun: its processes")
    add("--dim", type=positive, help="D; default: 128 (CPU: 16)")
    add("--out", help=f"results, without suffix; default: {LOCAL_RESULTS / 'context-parallel'}, torchrun: -together")
    add("--repeats", type=positive, default=5, help="of each timing under torchrun; default: %(default)s")
    add("--checked", type=positive, default=16 << 10, help="most tokens of the check under torchrun; default: 16K")
    args = parse_args(parser, argv)
    args.together = "LOCAL_RANK" in os.environ
    args.dim, args.dtype = (args.dim or 16, "fp32") if args.device == "cpu" else (args.dim or 128, "bf16")
    args.out = args.out or str(LOCAL_RESULTS / f"context-parallel{'-together' * args.together}")
    if args.together and args.ranks:
        parser.error("--ranks is for ranks alone: under torchrun there are as many as processes")
    ranks = [int(os.environ["WORLD_SIZE"])] if args.together else args.ranks or RANKS[args.device]
    if args.together and args.bars and ranks[0] not in SPEEDUP_BARS:
        parser.error(f"--bars under torchrun are for {' and '.join(map(str, SPEEDUP_BARS))} ranks, got {ranks[0]}")
    undivided = args.sizes or [*map(undivided_case, SIZES[args.device])]
    args.cases = [*undivided, *(case._replace(ranks=count) for case, count in product(undivided, ranks))]
    for case in args.cases:
        if 0 in (tokens := case.sharded.lengths):
            parser.error(f"--sizes must give every rank tokens, got {tokens} for {case.name}")
    return args


def undivided_case(text: str) -> Case:
    """Argument type."""
    try:
        preset, n, heads = text.split(":")
        if preset_name(preset) not in PRESETS:
            raise ValueError(preset)
        return Case(preset_name(preset), positive(n), *head_counts(heads), 1)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be such as {SIZES['cuda'][0]}, got {text!r}") from error


if __name__ == "__main__":
    sys.exit(main())
