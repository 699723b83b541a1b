"""All ranks of context parallelism together, under torchrun, for bench_context_parallel.py: times with messages.

For each case the undivided call is timed on rank 0 while others wait; then each rank's share with the keys of all ranks
there already, the messages without any computation, and all ranks' call.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench import context_shares as shares
from bench.bars import Bar, figure
from bench.context_shares import BAR_SIZES, PASSES, Case, ShareOf, Whole, make_row
from bench.report import environment
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.timing import measure, milliseconds, peak_memory
from nsa.distributed import ContextParallel
from nsa.distributed.attention import Plan, gathered_keys
from nsa.distributed.comm import all_gather
from nsa.distributed.layout import make_layout

BARS = {2: 1.85, 4: 3.5}  # The speed-up of forward and backward by the number of ranks, with zigzag
LINK_BYTES, CPU_LINK_BYTES = tuple(1 << n for n in (16, 18, 20, 22, 24, 26, 28, 30)), (1 << 12, 1 << 16, 1 << 20)
"""Bytes of a collective on all ranks together."""
LINK_CALLS = 10  # Consecutive calls of a timing, so that ranks' different starts count little


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
            hooks = shares.report(self.args, partial(find_bars, dist.get_world_size()), show_links)
            return run(self.args, environment(self.device), self.parts, shares.LINE, **hooks)
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

    def measure(self, case: Case) -> tuple[list[Row], list[str]]:
        """Rows of all ranks, and what did not run: nothing. Raises WrongResult on all of them."""
        if case.ranks == 1:
            return self.time_undivided(case), []
        if red := self.check(case):
            raise WrongResult(f"{case.name}: {red}")
        return self.time(case), []

    # Checks

    def check(self, case: Case) -> str:
        """Description of the first wrong rows of at most `--checked` tokens on any rank, or ""."""
        config, cp = self.parallel(case)
        tensors = shares.make_tensors(case, self.args, self.device, min(case.n, self.args.checked))
        do = shares.make_do(tensors["q"])
        own = {n: x if n == "gate_proj_weight" else cp.shard(x) for n, x in tensors.items()}
        divided = Whole(config, own, cp.shard(do), cp.nsa)
        got, again = (divided.both(deterministic=True) for _ in range(2))
        wrong = ""
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, again, Whole(config, tensors, do).both(), strict=True):
            if not torch.equal(x, y):
                wrong = wrong or f"{name} differs from run to run"
            found = shares.difference(x, cp.shard(z), exact=name == "out" and self.device.type == "cuda")
            wrong = wrong or (f"{name}: {found}" if found else "")
        told = self.tell(wrong)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    # Times

    def time_undivided(self, case: Case) -> list[Row]:
        """On rank 0, while others wait."""
        rows = []
        if dist.get_rank() == 0:
            tensors = shares.make_tensors(case, self.args, self.device)
            whole = Whole(shares.config_of(case, self.device), tensors, shares.make_do(tensors["q"]))
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
        tensors = shares.make_tensors(case, self.args, self.device, max(tokens, 1))
        own = {name: x if name == "gate_proj_weight" else x[:, :tokens] for name, x in tensors.items()}
        divided = Whole(config, own, shares.make_do(own["q"]), cp.nsa)
        # Keys of all ranks, alone: the same ones in each pass, so that they take the memory of one
        per_pass = shares.kv_heads_per_pass(self.args, layout, own["k"])
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
        config, heads = shares.config_of(case, self.device), self.args.kv_heads_per_pass
        tile = shares.tile_of(config, self.device)
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
def send_all(plan: Plan, own: dict[str, torch.Tensor], *, backward: bool) -> None:
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


def find_bars(ranks: int, rows: Sequence[Row]) -> Iterator[Bar]:
    for preset, n in BAR_SIZES.items():
        where = {"preset": preset, "n": n, "ranks": ranks, "layout": "zigzag"}
        name, both = f"{preset} {n >> 10}K, {ranks} ranks", PASSES[-1]
        speedup = figure(rows, {**where, "pass": both}, "speedup")
        yield Bar(f"{name}, {both}, speed-up", speedup, BARS[ranks], at_least=True, unit="x")
        for direction in PASSES:
            memory = figure(rows, {**where, "pass": direction}, "peak_gib", "bound_gib")
            yield Bar(f"{name}, {direction}, peak over bound", memory, 1.0, at_least=False, unit="x")
