"""An op's passes beside its peers', in one process: what the benchmarks of single ops share.

For each case: the error of what is timed against fp64, then times and peak memory, then the same of every peer. An
error above its budget is a red gate: nothing more is timed. A peer that is missing, runs out of memory or computes
something else is left out, and the reason is kept.

On CUDA, what is checked and timed is a CUDA graph, without the time to start it; elsewhere a call as Python makes it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.oracles import Error, worst
from bench.timing import GIB, Timing, capture, measure, peak_memory
from dispatch.device import first_line

PASSES = {"forward": "fwd", "backward": "bwd", "full": "fwd+bwd"}
PEER_SLACK = 4  # A peer may be off by so many budgets: it computes the same thing, if not as exactly


class Unavailable(Exception):
    """A peer cannot run a problem here, for the reason given."""


@dataclass(frozen=True)
class Candidate:
    """An implementation of one problem, differentiable: `call(*leaves)` gives its output."""

    name: str
    call: Callable[..., Tensor]
    head_major: bool = False  # Accepts and returns `[B,H,N,D]` instead of `[B,N,H,D]`
    graphs: bool = True  # Runs in CUDA graphs


@dataclass(frozen=True)
class Truth:
    """Exact results by name, of some rows, and the budgets of their errors. Without any, results need to be finite."""

    exact: dict[str, Tensor]
    budgets: dict[str, float]
    sample: Callable[[str, Tensor], Tensor]  # The rows of a result that `exact` has

    def worst(self, results: dict[str, Tensor], slack: int = 1) -> Error:
        """Error of the result that takes most of `slack` budgets; NaN if a result has one anywhere."""
        errors = []
        for name, result in results.items():
            error = (self.sample(name, result) - self.exact[name]).abs().amax().item() if self.exact else 0.0
            budget = slack * self.budgets[name] if self.exact else 0.0
            errors.append(Error(name, error if bool(result.isfinite().all()) else float("nan"), budget))
        return worst(errors)


FINITE = Truth({}, {}, lambda _, result: result)
"""Truth for peers that compute something else: any finite result is as good as another."""


@dataclass(frozen=True)
class Task:
    """Tensors of one problem: what candidates are called with, the output's gradient, and what is right."""

    leaves: tuple[Tensor, ...]
    do: Tensor
    gradients: tuple[str, ...]  # Names of the leaves' gradients, as `truth` knows them; the output is "out"
    truth: Truth


@dataclass(frozen=True)
class Plan:
    """Measurements of every candidate."""

    passes: Collection[str]
    seconds: float = 0.3
    memory: bool = False
    wall: bool = False  # Besides graphs, also calls as Python makes them
    calls: int = 1  # Consecutive calls in a graph, which share the time to start it (3 us on an H200)
    host: bool = True  # True if the time of an eager call includes what the host takes to start it on an idle GPU


@dataclass(frozen=True)
class Measured:
    """One right pass of one candidate. What was not asked for or is not known is None."""

    mode: str
    error: Error
    timing: Timing
    wall: Timing | None
    """Time of a call as Python makes it, from an idle device to its end; for an eager pass it is `timing`."""
    peak_gib: float | None  # Memory of everything alive, inputs and outputs included; "bwd" has that of both passes


def p50(timing: Timing | None) -> float | None:
    return None if timing is None else timing.ms_p50


# Measuring


def measure_peer(
    make_peer: Callable[[Task], Candidate], task: Task, plan: Plan
) -> tuple[Candidate | None, dict[str, Measured | str]]:
    """A peer for a problem, and its passes, or why there is none: what it raises must not end the benchmark."""
    try:
        peer = make_peer(task)
    except Exception as error:
        return None, dict.fromkeys(plan.passes, _reason(error))
    found: dict[str, Measured | str] = {}
    for direction in plan.passes:
        try:
            measured = measure_pass(peer, direction, task, plan, slack=PEER_SLACK)
            found[direction] = str(measured) if isinstance(measured, Error) else measured
        except Exception as error:
            found[direction] = _reason(error)
    return peer, found


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {first_line(error)}"


def measure_pass(candidate: Candidate, direction: str, task: Task, plan: Plan, *, slack: int = 1) -> Measured | Error:
    """Run once, check, and measure one pass; returns the error if it is above its budget.

    Args: `slack`: budgets that the error may have.
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
    by_token = (result.transpose(1, 2) if candidate.head_major else result for result in results)
    error = task.truth.worst(dict(zip(names, by_token, strict=True)), slack)
    del results, by_token
    if not error.within:
        return error
    timing = measure(call, device, seconds=plan.seconds, host=plan.host and not graph)
    timing = wall = timing.per(plan.calls) if graph else timing
    del call, keep
    release(device)
    if plan.wall and graph:
        call, keep = passes.eager(direction)
        wall = measure(call, device, seconds=plan.seconds)
        del call, keep
        release(device)
    peak_gib = None
    if plan.memory:
        peak_gib = peak_memory(passes.forward if direction == "fwd" else passes.full, device)
        given = [*passes.leaves, *([] if direction == "fwd" else [passes.do])]
        peak_gib = None if peak_gib is None else peak_gib + sum(tensor.nbytes for tensor in given) / GIB
    return Measured("graph" if graph else "eager", error, timing, wall if plan.wall else None, peak_gib)


def takes_graphs(candidate: Candidate, device: torch.device) -> bool:
    """The reference does not: its tables of keys come from the host."""
    return device.type == "cuda" and candidate.graphs and candidate.name != "reference"


def release(device: torch.device) -> None:
    """Give back what graphs and failed calls held on a GPU; what is left is nothing for later collections."""
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
