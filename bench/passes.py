"""An op's passes beside its peers', in one process: what the benchmarks of single ops share.

For each case: the error of what is timed against fp64, then times and peak memory, then the same of every peer. An
error above its budget is a red gate: nothing more is timed. A peer that is missing, runs out of memory or computes
something else is left out, and the reason is kept.

On CUDA, what is checked and timed is a CUDA graph, without the time to start it; elsewhere a call as Python makes it.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bench.gradient_check import GradientError
from bench.results_file import Row, WrongResult
from bench.timing import GIB, Timing, capture, measure, peak_memory, time_calls

PASSES = {"forward": "fwd", "backward": "bwd", "full": "fwd+bwd"}
MODES = (*PASSES, "memory")
PEER_SLACK = 4
"""A peer may be off by so many budgets: it computes the same thing, if not as exactly."""
WALL_TURNS, WALL_SECONDS, WALL_MS = 25, 0.02, 2.0
"""Turns of each candidate for calls as Python makes them, seconds of each, and the longest such calls."""
PEER_SECONDS = 1 / 3
"""Share of a measurement's seconds that a peer gets: most slow calls are theirs."""

Shape = TypeVar("Shape")


class Unavailable(Exception):
    """A peer cannot run a problem here, for the reason given."""


def package(name: str, otherwise: str) -> Any:
    """A module of a peer; raises Unavailable with the text `otherwise`."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken package can raise anything
        raise Unavailable(f"{otherwise} ({error})") from error


def require_cuda(device: torch.device) -> None:
    """Raise Unavailable for other devices."""
    if device.type != "cuda":
        raise Unavailable(f"runs on CUDA devices, got {device.type}")


@dataclass(frozen=True)
class Candidate:
    """An implementation of one problem, differentiable: `call(*leaves)` gives its output."""

    name: str
    call: Callable[..., Tensor]
    head_major: bool = False
    """Accepts and returns `[B,H,N,D]` instead of `[B,N,H,D]`."""
    graphs: bool = True
    """Runs in CUDA graphs."""


class Truth(Protocol):
    """Exact results, and budgets of errors in the dtype."""

    def worst(self, results: dict[str, Tensor], slack: int = 1) -> GradientError:
        """Error of the result that takes most of `slack` budgets; NaN if a result has one anywhere."""


@dataclass(frozen=True)
class SampledTruth:
    """Exact results by name, of some rows, and the budgets of their errors."""

    exact: dict[str, Tensor]
    budgets: dict[str, float]
    sample: Callable[[str, Tensor], Tensor]
    """The rows of a result that `exact` has."""

    def worst(self, results: dict[str, Tensor], slack: int = 1) -> GradientError:
        errors = []
        for name, result in results.items():
            error = (self.sample(name, result) - self.exact[name]).abs().amax().item()
            error = error if bool(result.isfinite().all()) else float("nan")
            errors.append(GradientError(name, error, slack * self.budgets[name]))
        return max(errors, key=lambda found: found.share)


@dataclass(frozen=True)
class Task:
    """Tensors of one problem: what candidates are called with, the output's gradient, and what is right."""

    leaves: tuple[Tensor, ...]
    do: Tensor
    gradients: tuple[str, ...]
    """Names of the leaves' gradients, as `truth` knows them; the output is "out"."""
    truth: Truth


@dataclass(frozen=True)
class Case:
    """A shape's tensors, our candidates, the default first, and the peers that they are compared with."""

    make: Callable[[], Task]
    ours: tuple[Candidate, ...]
    peers: Mapping[str, Callable[[Task], Candidate]]


@dataclass(frozen=True)
class Plan:
    """Measurements of every candidate."""

    passes: tuple[str, ...]
    timed: bool
    memory: bool
    seconds: float
    wall: bool = False
    """Besides graphs, also calls as Python makes them."""
    calls: int = 1
    """Consecutive calls in a graph, which share the time to start it (3 us on an H200)."""
    host: bool = True
    """True if the time of an eager call includes what the host takes to start it on an idle GPU."""

    @classmethod
    def of(cls, modes: Sequence[str], seconds: float, *, wall: bool = False, calls: int = 1) -> Plan:
        """Memory alone is that of the forward and of both passes."""
        passes = tuple(PASSES[mode] for mode in PASSES if mode in modes)
        return cls(passes or ("fwd", "fwd+bwd"), bool(passes), "memory" in modes, seconds, wall, calls)


@dataclass(frozen=True)
class Measured:
    """One pass of one candidate. What was not asked for or is not known is None."""

    mode: str
    error: GradientError
    timing: Timing | None
    wall: Timing | None
    """Time of a call as Python makes it, from an idle device to its end; for an eager pass it is `timing`."""
    peak_gib: float | None
    """Memory of everything alive, inputs and outputs included; "bwd" has that of both passes."""


# Comparing


Missing = tuple[str, str, str]
"""A peer, why it did not run, and of which shape and pass."""


def compare(
    shape: Shape,
    case: Case,
    plan: Plan,
    make_row: Callable[[Shape, str, str, bool, Measured, dict[str, Measured | None]], Row],
    update: Callable[[str], None],
) -> tuple[list[Row], list[Missing]]:
    """Rows of a shape, and the peers that did not run.

    Args:
        make_row: arguments: shape, pass, backend, True if that is the default, measurements of it and of each peer.
        update: called with what is measured next.

    Raises:
        WrongResult: with every error above its budget; after the first one nothing is timed.
    """
    update(f"{shape}: fp64")
    task = case.make()
    measured: dict[tuple[str, str], Measured] = {}
    red: list[str] = []
    for candidate, direction in product(case.ours, plan.passes):
        update(f"{shape} {direction}: {candidate.name}")
        one = measure_pass(candidate, direction, task, plan, timed=not red)
        measured[candidate.name, direction] = one
        if not one.error.within:
            red.append(f"{shape} {direction} {candidate.name}: {_above(one.error)}")
    if red:
        raise WrongResult(*red)
    of_name = {candidate.name: candidate for candidate in case.ours}
    missing: list[Missing] = []
    for name, make_peer in case.peers.items():
        peer = find_peer(make_peer, task)
        if isinstance(peer, Candidate):
            of_name[name] = peer
        for direction in plan.passes:
            update(f"{shape} {direction}: {name}")
            of_peer = measure_peer(peer, direction, task, plan)
            if isinstance(of_peer, Measured):
                measured[name, direction] = of_peer
            else:
                missing.append((name, of_peer, f"{shape} {direction}"))
    for direction in plan.passes:
        take_turns(of_name, direction, task, measured)
    rows = []
    for candidate, direction in product(case.ours, plan.passes):
        of_peers = {peer: measured.get((peer, direction)) for peer in case.peers}
        name, default = candidate.name, candidate is case.ours[0]
        rows.append(make_row(shape, direction, name, default, measured[name, direction], of_peers))
    return rows, missing


def tell_missing(missing: Sequence[Missing], most: int) -> list[str]:
    """Why peers did not run, and where: a line for each reason. Args: `most`, how many passes of shapes there are."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, reason, where in missing:
        places.setdefault((name, reason), []).append(where)
    return [
        f"{name} did not run: {reason} ({'everywhere' if len(where) == most else '; '.join(where)})"
        for (name, reason), where in places.items()
    ]


def take_turns(
    candidates: Mapping[str, Candidate], direction: str, task: Task, measured: dict[tuple[str, str], Measured]
) -> None:
    """Time the short calls from Python again, of all candidates in turn, and keep the fastest turn of each.

    A host may be half as fast for seconds, which must not be those of one candidate.
    """
    calls: dict[str, tuple[Callable[[], Any], Any]] = {}
    for name, candidate in candidates.items():
        found = measured.get((name, direction))
        if found is None or found.wall is None or found.wall is found.timing or found.wall.ms_p50 > WALL_MS:
            continue
        calls[name] = Passes(candidate, task).eager(direction)
        calls[name][0]()
    for _ in range(WALL_TURNS):
        for name, (call, _keep) in calls.items():
            found = measured[name, direction]
            again = time_calls(call, task.do.device, seconds=WALL_SECONDS)
            if found.wall is None or again.ms_p50 < found.wall.ms_p50:
                measured[name, direction] = replace(found, wall=again)
    calls.clear()
    release(task.do.device)


def find_peer(make_peer: Callable[[Task], Candidate], task: Task) -> Candidate | str:
    """A peer for a problem, or why there is none: whatever it raises must not end the benchmark."""
    try:
        return make_peer(task)
    except Unavailable as reason:
        return str(reason)
    except Exception as error:
        return _first_line(error)


def measure_peer(candidate: Candidate | str, direction: str, task: Task, plan: Plan) -> Measured | str:
    """A peer's pass, or why there is none."""
    if isinstance(candidate, str):
        return candidate
    try:
        shorter = replace(plan, seconds=plan.seconds * PEER_SECONDS)
        measured = measure_pass(candidate, direction, task, shorter, slack=PEER_SLACK)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        return _first_line(error)
    return measured if measured.error.within else _above(measured.error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _above(error: GradientError) -> str:
    return f"error {error.error:.2e} of {error.name} is above the budget {error.budget:.2e}"


# Measuring


def measure_pass(
    candidate: Candidate, direction: str, task: Task, plan: Plan, *, slack: int = 1, timed: bool = True
) -> Measured:
    """Run once, check, and if right measure one pass.

    Args:
        slack: budgets that the error may have.
        timed: False checks only.
    """
    device = task.do.device
    release(device)
    passes = Passes(candidate, task)
    graph = takes_graphs(candidate, device)
    call, keep = passes.captured(direction, plan.calls) if graph else passes.eager(direction)
    results = call()
    if graph:
        for tensor in results:
            tensor.fill_(float("nan"))
        call()
    names = ("out",) if direction == "fwd" else task.gradients
    error = task.truth.worst(dict(zip(names, passes.token_major(results), strict=True)), slack)
    del results
    timing = wall = peak_gib = None
    if timed and error.within:
        if plan.timed:
            timing = measure(call, device, seconds=plan.seconds, host=plan.host and not graph)
            timing = timing.per(plan.calls) if graph else timing
        del call, keep
        release(device)
        if plan.timed and plan.wall:
            wall = timing
            if graph:
                wall = measure_wall(passes, direction, plan.seconds)
        if plan.memory:
            peak_gib = peak_memory(passes.forward if direction == "fwd" else passes.full, device)
            peak_gib = None if peak_gib is None else peak_gib + passes.held(direction) / GIB
    return Measured("graph" if graph else "eager", error, timing, wall, peak_gib)


def measure_wall(passes: Passes, direction: str, seconds: float) -> Timing:
    """Time of a pass as Python calls it."""
    device = passes.do.device
    call, _keep = passes.eager(direction)
    timing = measure(call, device, seconds=seconds)
    del call, _keep
    release(device)
    return timing


def takes_graphs(candidate: Candidate, device: torch.device) -> bool:
    """The reference does not: its tables of keys come from the host."""
    return device.type == "cuda" and candidate.graphs and candidate.name != "reference"


def release(device: torch.device) -> None:
    """Give back what graphs and failed calls held on a GPU.

    What is left, most of it compilers', is nothing that later collections have to look at.
    """
    if device.type == "cuda":
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()


class Passes:
    """Forward and backward of a candidate on its own tensors."""

    def __init__(self, candidate: Candidate, task: Task) -> None:
        self.candidate = candidate
        given = [tensor.detach() for tensor in (*task.leaves, task.do)]
        if candidate.head_major:
            given = [tensor.transpose(1, 2).contiguous() for tensor in given]
        *leaves, self.do = given
        self.leaves = [tensor.detach().requires_grad_() for tensor in leaves]

    def forward(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (self.candidate.call(*self.leaves),)

    def full(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._differentiable(), self.leaves, self.do)

    def _differentiable(self) -> Tensor:
        return self.candidate.call(*self.leaves)

    def eager(self, direction: str) -> tuple[Callable[[], tuple[Tensor, ...]], Any]:
        """A call of the pass, and what must live as long."""
        if direction != "bwd":
            return (self.forward if direction == "fwd" else self.full), None
        out = self._differentiable()
        return lambda: torch.autograd.grad(out, self.leaves, self.do, retain_graph=True), out

    def captured(self, direction: str, calls: int) -> tuple[Callable[[], tuple[Tensor, ...]], Any]:
        """So many calls of it as a CUDA graph. That of the backward reads what one of the forward left."""
        device = self.do.device
        (self.forward if direction == "fwd" else self.full)()  # so that nothing is left to compile
        if direction == "bwd":
            before = capture(self._differentiable, device)

            def call() -> tuple[Tensor, ...]:
                return torch.autograd.grad(before.out, self.leaves, self.do, retain_graph=True)
        else:
            before, call = None, self.forward if direction == "fwd" else self.full

        def several() -> tuple[Tensor, ...]:
            for _ in range(calls - 1):
                call()
            return call()

        graph = capture(several, device)
        if before is not None:
            before.replay()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            results: tuple[Tensor, ...] = graph.out
            return results

        return replay, before

    def token_major(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        return [result.transpose(1, 2) if self.candidate.head_major else result for result in results]

    def held(self, direction: str) -> int:
        """Bytes of what a call is given."""
        return sum(tensor.nbytes for tensor in (*self.leaves, *([] if direction == "fwd" else [self.do])))
