"""Context parallelism of NSA: each rank's share of a sequence, timed alone on one device, or all ranks under torchrun.

    python bench/bench_context_parallel.py --bars                   one GPU: balance and scaling
    torchrun --nproc-per-node 8 bench/bench_context_parallel.py     a GPU for each rank: what a call takes

Alone, one rank after the other runs what nsa/distributed does for its tokens, with the keys of all ranks there already:
messages are neither sent nor added up. `shares` says how far the slowest rank is above the mean and how much longer all
shares take than the undivided call; with --bars also what both have to reach on an H200. Under torchrun the ranks call
together, and times have the communication in them.

Before a case is timed its rows are held against the undivided call (together: of at most 16K tokens), on CUDA bit for
bit, and the sum of all ranks' shares of dk against its dk; where they differ, nothing is reported and the status is 1.

Writes OUT.json after every case (schema: docs/results_files.md). The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from bench.bars import Bar, bars_field
from bench.common import DTYPES, PRESETS, above_zero, positive, preset_name
from bench.inputs import Sizes, make_problem
from bench.pass_report import ms_text, show_bars
from bench.report import LOCAL_RESULTS, command_line, environment, relative
from bench.results_file import ResultRow, open_results
from bench.timing import measure, peak_memory
from nsa import NSAConfig, nsa
from nsa.distributed import ContextParallel
from nsa.distributed.attention import Plan, attend, attend_backward, heads_per_pass
from nsa.distributed.layout import Layout, Range, make_layout

SIZES, CPU_SIZES = ("per_tile:1M:8/2", "paper:256K:64/4"), ("per_tile:600:2/1", "paper:300:2/1")
RANKS, CPU_RANKS = (2, 4, 8, 16), (2, 3)
CHECKED = 16 << 10
"""Tokens of the check under torchrun, where no rank may hold the whole."""
BALANCE_BAR, SCALING_BAR = 1.05, 1.08
"""The slowest rank over the mean, with zigzag; all shares over the undivided call."""
BAR_SIZES = {"per_tile": 1 << 20, "paper": 256 << 10}
PASSES = ("fwd", "fwd+bwd")


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
    direction: str
    ms: float
    peak_gib: float | None
    tokens: int
    command: str


@dataclass(frozen=True)
class Share:
    """What the rows of a case say together."""

    preset: str
    n: int
    ranks: int
    layout: str
    direction: str
    slowest_over_mean: float
    sum_over_single: float | None

    def as_json(self) -> dict[str, Any]:
        return {("pass" if name == "direction" else name): value for name, value in vars(self).items()}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_together(args) if args.together else run_alone(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--sizes", nargs="+", help=f"preset:N:heads; default: {' '.join(SIZES)} (CPU: {' '.join(CPU_SIZES)})")
    add("--ranks", nargs="+", type=positive, help="R, alone; default: 2 4 8 16 (CPU: 2 3)")
    add("--layouts", nargs="+", choices=["zigzag", "contiguous"], default=["zigzag"], help="default: zigzag")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--dim", type=positive, help="D; default: 128 (CPU: 16)")
    add("--dtype", choices=DTYPES, help="default: bf16 (CPU: fp32)")
    add("--kv-heads-per-pass", type=positive, help="default: that of ContextParallel")
    add("--seconds", type=above_zero, default=0.5, help="of each timing alone; default: %(default)s")
    add("--repeats", type=positive, default=5, help="of each timing under torchrun; default: %(default)s")
    add("--bars", action="store_true", help="hold balance and scaling against what they have to reach")
    add("--out", help=f"results, without suffix; default: {LOCAL_RESULTS / 'context-parallel'}, torchrun: -together")
    args = parser.parse_args(argv)
    args.together = "LOCAL_RANK" in os.environ
    on_cpu = args.device == "cpu"
    args.dim, args.dtype = args.dim or (16 if on_cpu else 128), args.dtype or ("fp32" if on_cpu else "bf16")
    args.out = args.out or str(LOCAL_RESULTS / f"context-parallel{'-together' if args.together else ''}")
    if args.together and (args.ranks or args.bars):
        parser.error("--ranks and --bars are for shares alone: torchrun says how many ranks there are")
    ranks = [int(os.environ["WORLD_SIZE"])] if args.together else args.ranks or (CPU_RANKS if on_cpu else RANKS)
    args.cases = []
    try:
        for size, count, layout in product(args.sizes or (CPU_SIZES if on_cpu else SIZES), ranks, args.layouts):
            preset, n, heads = size.split(":")
            h, h_kv = map(positive, heads.split("/"))
            preset = preset_name(preset)
            if preset not in PRESETS or h % h_kv:
                raise ValueError(size)
            args.cases.append(Case(preset, positive(n), h, h_kv, count, layout))
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"--sizes must be such as {SIZES[0]}, got {args.sizes}")
    args.command = command_line(argv)
    return args


def config_of(case: Case, device: torch.device) -> NSAConfig:
    """The preset; on a CPU with tiles that a short sequence has some of."""
    small = device.type == "cpu" and case.preset == "per_tile"
    return PRESETS[case.preset](q_tile_size=64) if small else PRESETS[case.preset]()


def tile_of(config: NSAConfig, device: torch.device) -> int:
    """Where ranks begin: ContextParallel's default, on a CPU less."""
    return max(config.q_tile_size, 16 if device.type == "cpu" else 256)


def make_tensors(case: Case, args: argparse.Namespace, device: torch.device, n: int | None = None) -> dict[str, Any]:
    sizes = Sizes(1, n or case.n, case.heads, case.kv_heads, args.dim)
    problem = make_problem("random", sizes, device=device, dtype=DTYPES[args.dtype])
    gate = problem.gate_proj_weight
    if gate is None:
        raise RuntimeError("the problem has no gates")
    return {"q": problem.q, "k": problem.k, "v": problem.v, "gate_proj_weight": gate}


def row(
    case: Case, args: argparse.Namespace, rank: int, direction: str, ms: float, peak_gib: float | None, tokens: int
) -> Row:
    mode = "together" if args.together else "alone"
    sizes = (case.preset, case.n, case.heads, case.kv_heads, args.dim, args.dtype)
    return Row(*sizes, case.ranks, rank, case.layout, mode, direction, ms, peak_gib, tokens, args.command)


# Shares alone


class Alone:
    """The Comm of a rank whose keys of all ranks are there already, and whose shares go nowhere."""

    def __init__(self, rank: int, size: int, tensors: Mapping[str, Tensor], per_pass: int) -> None:
        self.rank, self.size, self.per_pass, self.passes = rank, size, per_pass, 0
        self.tensors = tensors
        self.kept: list[Tensor] | None = None
        """Shares of dk and dv, pass after pass; None: nobody asks for them."""

    def start_gather(self, rows: Tensor, held: Sequence[list[Range]]) -> Callable[[], list[Tensor]]:
        """Keys and values of the next heads, laid out as a gather leaves them."""
        heads = rows.shape[-2]
        first = self.passes * self.per_pass % self.tensors["k"].shape[-2]
        self.passes += 1
        own = [self.tensors[name][..., first : first + heads, :] for name in ("k", "v")]
        return lambda: [torch.cat(own, -1).movedim(-3, 0)]

    def add_shares(self, shares: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]) -> Tensor:
        """Those of the rank's own rows."""
        if self.kept is not None:
            self.kept.append(shares)
        return torch.cat([shares[:0], *(shares[a:b] for a, b in held[self.rank])])


def run_alone(args: argparse.Namespace) -> int:
    device, out = torch.device(args.device), Path(args.out)
    facts = environment(device)
    with open_results(out, {**facts, "command": args.command}) as results:
        undivided = list(dict.fromkeys(case._replace(ranks=1, layout="contiguous") for case in args.cases))
        for case in [*undivided, *args.cases]:
            if case.name in results.parts:
                continue
            found = time_shares(case, args, device)
            if isinstance(found, str):
                results.fail([found], shares=[])
                print("Wrong results, so no times are reported:", found, sep="\n  ")
                return 1
            results.add(case.name, [one.as_json() for one in found])
            print(*map(line, found), sep="\n", flush=True)
        shares = find_shares([Row.of_json(one) for one in results.rows])
        bars = find_bars(shares) if args.bars else None
        results.finish(shares=[share.as_json() for share in shares], **bars_field(bars))
    for share in shares:
        scaling = "" if share.sum_over_single is None else f", all over the undivided call {share.sum_over_single:.3f}"
        name = f"{share.preset} N={share.n} R={share.ranks} {share.layout} {share.direction}"
        print(f"{name:<44}slowest over mean {share.slowest_over_mean:.3f}{scaling}")
    if bars is not None:
        show_bars(bars)
    print(relative(out.with_suffix(".json")))
    return 0


def time_shares(case: Case, args: argparse.Namespace, device: torch.device) -> list[Row] | str:
    """Rows of all ranks, or what is wrong with their results."""
    config, tensors = config_of(case, device), make_tensors(case, args, device)
    layout = make_layout(case.n, None, case.ranks, case.layout, tile_of(config, device))
    generator = torch.Generator(device).manual_seed(1)
    do = torch.randn(tensors["q"].shape, generator=generator, device=device).to(tensors["q"].dtype)
    whole = Whole(config, layout, tensors, do, "reference" if device.type == "cpu" else None)
    if case.ranks > 1 and (wrong := check_shares(case, args, whole)):
        return f"{case.name}: {wrong}"
    rows = []
    for direction in args.passes:
        for rank in range(case.ranks):
            share = whole if case.ranks == 1 else ShareOf(case, args, whole, rank)
            call: Callable[[], Any] = share.forward if direction == "fwd" else share.both
            timing = measure(call, device, seconds=args.seconds)
            rows.append(row(case, args, rank, direction, timing.ms_p50, timing.peak_gib, layout.lengths[rank]))
    return rows


class Whole(NamedTuple):
    """A call that is not divided."""

    config: NSAConfig
    layout: Layout
    tensors: Mapping[str, Any]
    do: Tensor
    backend: str | None

    @torch.no_grad()
    def forward(self) -> Tensor:
        return nsa(**self.tensors, config=self.config, backend=self.backend)

    def both(self) -> tuple[Tensor, ...]:
        """out and the gradients of q, k, v."""
        leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        out = nsa(**leaves, config=self.config, backend=self.backend)
        return out.detach(), *torch.autograd.grad(out, [leaves[name] for name in "qkv"], self.do)


class ShareOf:
    """A rank's part in a call."""

    def __init__(self, case: Case, args: argparse.Namespace, whole: Whole, rank: int) -> None:
        ranges = whole.layout.ranges[rank]
        self.case, self.whole, self.rank = case, whole, rank
        self.own = {n: x if n == "gate_proj_weight" else take(x, ranges) for n, x in whole.tensors.items()}
        self.do = take(whole.do, ranges)
        row_bytes = 2 * args.dim * (self.do.dtype.itemsize + 4)
        self.per_pass = args.kv_heads_per_pass or heads_per_pass(case.kv_heads, case.n, row_bytes)

    def plan(self) -> Plan:
        comm: Any = Alone(self.rank, self.case.ranks, self.whole.tensors, self.per_pass)
        flags = {"deterministic": False, "recompute": False, "backend": self.whole.backend, "max_seqlen": None}
        sizes = (self.case.kv_heads, self.case.heads // self.case.kv_heads, self.per_pass)
        return Plan(comm, self.whole.layout, self.whole.config, False, *sizes, tuple(flags.items()))

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


def take(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, a:b] for a, b in ranges)], 1)


def check_shares(case: Case, args: argparse.Namespace, whole: Whole) -> str:
    """What is wrong with rows or gradients of the ranks; "" if nothing."""
    expected, dq, *dkv = whole.both()
    totals: list[Tensor] = []
    for rank, ranges in enumerate(whole.layout.ranges):
        shares: list[Tensor] = []
        out, gradients = ShareOf(case, args, whole, rank).both(shares)
        totals = [a + b for a, b in zip(totals, shares, strict=True)] if totals else shares
        for name, got, want in (("out", out, expected), ("dq", gradients["q"], dq)):
            if wrong := difference(got, take(want, ranges), exact=name == "out" and whole.do.is_cuda):
                return f"{name} of rank {rank}: {wrong}"
    for i, (name, want) in enumerate(zip(("dk", "dv"), dkv, strict=True)):
        got = torch.cat(totals[i::2], -2).movedim(0, -3).to(want.dtype)
        if wrong := difference(got, want, exact=False):
            return f"{name} of all ranks: {wrong}"
    return ""


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


def find_shares(rows: Sequence[Row]) -> list[Share]:
    """Balance and scaling of each case and pass."""
    shares = []
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    for one in rows:
        by_case.setdefault((one.preset, one.n, one.h, one.h_kv, one.ranks, one.layout, one.direction), []).append(one)
    for (preset, n, h, h_kv, ranks, layout, direction), own in by_case.items():
        if ranks == 1:
            continue
        times = [one.ms for one in own]
        single = by_case.get((preset, n, h, h_kv, 1, "contiguous", direction))
        total = None if single is None else sum(times) / single[0].ms
        shares.append(Share(preset, n, ranks, layout, direction, max(times) / statistics.mean(times), total))
    return shares


def find_bars(shares: Sequence[Share]) -> list[Bar]:
    bars = []
    for preset, ranks, direction in product(BAR_SIZES, RANKS, PASSES):
        key = (preset, BAR_SIZES[preset], ranks, "zigzag", direction)
        own = next((s for s in shares if (s.preset, s.n, s.ranks, s.layout, s.direction) == key), None)
        name = f"{preset} {BAR_SIZES[preset] >> 10}K, {ranks} ranks, {direction}"
        balance = None if own is None else own.slowest_over_mean
        total = None if own is None else own.sum_over_single
        bars.append(Bar(f"{name}, slowest over mean", balance, BALANCE_BAR, at_least=False, unit="x"))
        bars.append(Bar(f"{name}, all over undivided", total, SCALING_BAR, at_least=False, unit="x"))
    return bars


def line(one: Row) -> str:
    name = Case(one.preset, one.n, one.h, one.h_kv, one.ranks, one.layout).name
    return f"{name:<44}rank {one.rank:<3} {one.direction:<8}{ms_text(one.ms)} ms  {one.tokens} tokens"


# All ranks together


def run_together(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if dist.get_rank() > 0:
            return together(args, device, None)
        with open_results(Path(args.out), {**environment(device), "command": args.command}) as results:
            return together(args, device, results)
    finally:
        dist.destroy_process_group()


def together(args: argparse.Namespace, device: torch.device, results: Any) -> int:
    """Args: results: of rank 0, else None."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    done = [list(results.parts) if results is not None else None]
    dist.broadcast_object_list(done, src=0)
    for case in args.cases:
        if case.name in (done[0] or []):
            continue
        config = config_of(case, device)
        cp = ContextParallel(group, case.layout, tile_of(config, device), kv_heads_per_pass=args.kv_heads_per_pass)
        red = check_together(case, args, config, cp, device)
        found = [] if red else time_together(case, args, config, cp, device)
        if red:
            if results is not None:
                results.fail([f"{case.name}: {red}"])
                print("Wrong results, so no times are reported:", red, sep="\n  ")
            return 1
        if results is not None:
            results.add(case.name, [one.as_json() for one in found])
            print(*map(line, found), sep="\n", flush=True)
    if results is not None:
        results.finish()
        print(relative(results.path))
    return 0


def check_together(
    case: Case, args: argparse.Namespace, config: NSAConfig, cp: ContextParallel, device: torch.device
) -> str:
    """What is wrong with a short sequence's rows on any rank; "" if nothing, on all ranks alike."""
    tensors = make_tensors(case, args, device, min(case.n, CHECKED))
    own: dict[str, Any] = {n: x if n == "gate_proj_weight" else cp.shard(x) for n, x in tensors.items()}
    with torch.no_grad():
        wrong = difference(
            cp.nsa(**own, config=config), cp.shard(nsa(**tensors, config=config)), exact=device.type == "cuda"
        )
    told: list[str] = [""] * cp.size
    dist.all_gather_object(told, wrong)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")


def time_together(
    case: Case, args: argparse.Namespace, config: NSAConfig, cp: ContextParallel, device: torch.device
) -> list[Row]:
    """Rows of all ranks: medians of calls that begin together."""
    layout = make_layout(case.n, None, cp.size, cp.layout, cp.tile)
    tokens = layout.lengths[cp.rank]
    tensors = make_tensors(case, args, device, max(tokens, 1))
    own: dict[str, Any] = {
        n: x if n == "gate_proj_weight" else x[:, :tokens].requires_grad_() for n, x in tensors.items()
    }
    do = torch.randn_like(own["q"])

    def forward() -> None:
        with torch.no_grad():
            cp.nsa(**own, config=config)

    def both() -> None:
        torch.autograd.grad(cp.nsa(**own, config=config), [own[name] for name in "qkv"], do)

    rows = []
    for direction in args.passes:
        call = forward if direction == "fwd" else both
        peak_gib = peak_memory(call, device)
        times = []
        for _ in range(args.repeats):
            cp.sum(do.new_zeros(1))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - begin) * 1e3)
        told: list[Any] = [None] * cp.size
        dist.all_gather_object(told, (statistics.median(times), peak_gib, tokens))
        rows += [row(case, args, rank, direction, *figures) for rank, figures in enumerate(told)]
    return rows


if __name__ == "__main__":
    sys.exit(main())
