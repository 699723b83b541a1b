"""The longest sequence whose NSA forward (or forward + backward) fits one device.

Lengths double from --start until one does not fit; then a binary search narrows the gap to --granularity tokens.
Each trial runs once, cold, in its own process, so that a failure cannot spoil the next one. On a GPU a trial fails when
the device's memory runs out. On a CPU a trial may take --memory-limit beyond what its interpreter holds after the
imports; it is a resource limit of the trial's own process, so nothing else on the machine is in danger.

Every trial goes to the --out file at once: the same command goes on where it was stopped or killed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench import common
from bench.common import DTYPES, PRESETS, above_zero, choose_dense, positive
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, command_line, environment, write_json
from bench.results_file import Row, differences, held, read_results
from bench.show import console, row_line, say
from bench.timing import proc_bytes, resident
from nsa import NSAConfig, nsa, nsa_forward
from nsa.inputs import NSAInputs

CONFIG_OPTIONS = [field.name for field in fields(NSAConfig) if field.type in ("int", "int | None")]
"""Options of NSAConfig that can be given one by one, on top of the preset."""
SETTINGS = "op device dtype backward recompute batch heads kv_heads dim preset options backend dense memory_limit"
"""Arguments that decide whether a length fits, but for the machine and the code. `options` are changes to the preset,
`dense` is the name of the baseline of --op dense."""
SAMPLED_TOKENS = 256
EXACT_HEAP = "MALLOC_MMAP_THRESHOLD_=131072"
"""Has glibc give every tensor of 128 KiB or more pages of its own. Otherwise it keeps freed pieces that it often cannot
use again, and the peak of one length was seen to vary threefold between runs. Takes up to twice the time."""
LINE = "  N={n:,}  fits: {fits}  {seconds:.1f} s  {peak_gib:.2f} GiB  {reason}"

# The search

Failure = Literal["oom", "timeout"]


@dataclass(frozen=True)
class Bracket:
    """Bounds of the longest length: at least `fits` (None: nothing tried fits), below `fails` (None: no end found)."""

    fits: int | None
    fails: int | None
    why: Failure | Literal["max-seqlen"]  # Why `fails` fails, or that the search reached its maximum


def search(try_length: Callable[[int], Failure | None], start: int, granularity: int, maximum: int | None) -> Bracket:
    """Double from `start` to the first length that fails, then halve the gap until it is at most `granularity`.

    Args: `try_length`: why this many tokens fail, or None when they fit. A timeout ends the search.
    """
    fits, length = 0, start if maximum is None else min(start, maximum)
    while (why := try_length(length)) is None:
        fits = length
        if length == maximum:
            return Bracket(fits, None, "max-seqlen")
        length = 2 * length if maximum is None else min(2 * length, maximum)
    fails = length
    while why == "oom" and fails - fits > granularity:
        length = fits + ((fails - fits) // granularity + 1) // 2 * granularity
        failure = try_length(length)
        if failure is None:
            fits = length
        else:
            fails, why = length, failure
    return Bracket(fits or None, fails, why)


# The command line


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.trial is not None:
        end_with_the_probe()
        print(json.dumps(run_trial(args, args.trial)))
        return 0
    with held(args.out, lambda: f"{args.out} keeps the trials so far; the same command goes on from there."):
        probe(args, sys.argv[1:] if argv is None else argv)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, and what they amount to: `options`, `dense`, the backend to probe and a `note` about it."""
    parser = common.make_parser(__doc__, *common.SIZES, "backend")
    parser.allow_abbrev = False
    common.add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--op", choices=("nsa", "dense"), default="nsa", help="dense: causal FlashAttention-4 or PyTorch SDPA")
    add("--backward", action="store_true", help="probe forward + backward")
    add("--recompute", action="store_true", help="with --backward: keep less and compute it again, as in nsa")
    add("--preset", type=common.preset_name, choices=PRESETS, help="default: per_tile")
    for option in CONFIG_OPTIONS:
        add(f"--{option.replace('_', '-')}", type=int, metavar="N", help="as in NSAConfig; default: the preset's")
    add("--start", type=positive, default=1024, help="first length to try; default: %(default)s")
    add("--granularity", type=positive, default=1024, help="tokens between fits and fails; default: %(default)s")
    add("--max-seqlen", type=positive, help="longest length to try; default: no end")
    timeout = "for one trial; a longer one ends the search; default: %(default)g"
    add("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help=timeout)
    add("--memory-limit", type=above_zero, metavar="GIB", help="CPU only; default: half of what is available")
    add("--out", metavar="FILE", help="results; default: bench/results/local/probe-<device>-<op>-<fwd|fwd+bwd>.json")
    add("--trial", type=positive, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.memory_limit is not None and args.device != "cpu":
        parser.error("--memory-limit is for --device cpu; on a GPU the device's memory is the limit")
    if args.recompute and not (args.backward and args.op == "nsa"):
        parser.error("--recompute goes with --op nsa and --backward")
    common.resolve_sizes(parser, args)
    args.options = {name: getattr(args, name) for name in CONFIG_OPTIONS if getattr(args, name) is not None}
    direction = "fwd+bwd" if args.backward else "fwd"
    args.out = Path(args.out or LOCAL_RESULTS / f"probe-{args.device}-{args.op}-{direction}.json")
    args.dense, args.note = None, ""
    if args.op == "dense":
        if args.options or args.backend or args.preset:
            parser.error("--backend, --preset and the options of NSAConfig go with --op nsa, got --op dense")
        args.dense = choose_dense(*where(args)).name
        return args
    args.preset = args.preset or "per_tile"
    try:
        args.backend, args.note = backend_for(args)
    except (TypeError, ValueError, dispatch.BackendError) as error:
        parser.error(str(error))
    return args


def where(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    return torch.device(args.device), DTYPES[args.dtype]


def config_of(args: argparse.Namespace) -> NSAConfig:
    return PRESETS[args.preset](**args.options)


def sizes_of(args: argparse.Namespace, tokens: int) -> Sizes:
    return Sizes(args.batch, tokens, args.heads, args.kv_heads, args.dim)


def backend_for(args: argparse.Namespace) -> tuple[str, str]:
    """The backend to probe, and a note when that is the reference for want of a kernel. Raises what refuses it."""
    passes = {"backward": args.backward, "recompute": args.recompute}
    return common.choose_backend(
        common.nsa_facts(sizes_of(args, 1), config_of(args), *where(args), **passes), args.backend
    )


# Trials, and the file that keeps them


def probe(args: argparse.Namespace, argv: list[str]) -> None:
    """Search, with all trials in the --out file. Raises SystemExit for a file of something else."""
    facts, settings = environment(torch.device(args.device)), {name: getattr(args, name) for name in SETTINGS.split()}
    passes = f"forward{' + backward' * args.backward}{', recomputing' * args.recompute}"
    say(f"Longest sequence for {args.op} {passes} on {facts['device']}: {settings}")
    if args.note:
        say(args.note)
    before = read_results(args.out)
    if before and (changes := differences({**settings, **facts}, {**before.get("settings", {}), **before})):
        say(f"Starting anew, since the trials in {args.out} differ: {'; '.join(changes)}")
        before = {}
    trials: dict[int, Row] = {trial["n"]: trial for trial in before.get("trials", [])}
    if trials:
        say(f"Going on from the {len(trials)} trials in {args.out}")

    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    command += [] if args.backend is None else ["--backend", args.backend]
    limit = args.memory_limit
    if args.device == "cpu":
        limit = limit or before.get("memory_limit_gib") or proc_bytes("/proc/meminfo", "MemAvailable") / 2**31
        command = ["env", EXACT_HEAP, *command, "--memory-limit", str(limit)]

    def save(bracket: Bracket | None = None) -> None:
        content = {**facts, "command": command_line(argv), "settings": settings, "memory_limit_gib": limit}
        content |= {"trials": [trials[tokens] for tokens in sorted(trials)]}
        write_json(args.out, {**content, "bracket": None if bracket is None else asdict(bracket)})

    def try_length(tokens: int) -> Failure | None:
        trial = trials.get(tokens)
        if trial is None or (trial["why"] == "timeout" and trial["seconds"] < args.timeout):
            with console.status(f"N={tokens:,} ..."):
                trials[tokens] = start_trial(tokens, command, args.timeout)
            save()
        say(row_line(LINE, trials[tokens]))
        why: Failure | None = trials[tokens]["why"]
        return why

    bracket = search(try_length, args.start, args.granularity, args.max_seqlen)
    save(bracket)
    say("One cold run each; memory of everything: inputs, results and temporaries.")
    found = "nothing fits" if bracket.fits is None else f"fits N={bracket.fits:,}"
    ends = {"max-seqlen": "which is --max-seqlen", "oom": f"does not fit N'={{:,}} (granularity {args.granularity:,})"}
    ends["timeout"] = "stopped by time at N'={:,} (a longer --timeout goes on from there)"
    say(f"{found}, {ends[bracket.why].format(bracket.fails)}: {args.out}", style="bold")


def trial_row(
    tokens: int, seconds: float, peak_gib: float | None, why: Failure | None = None, reason: str | None = None
) -> Row:
    """Outcome of one length.

    Args:
        seconds: of the op alone, in a process that runs it for the first time.
        peak_gib: of everything: inputs, out, with --backward do and gradients, temporaries (on a CPU also library code
            that was read from disk); None if the process did not report it.
        reason: the message of a failure.
    """
    return {"n": tokens, "fits": why is None, "seconds": seconds, "peak_gib": peak_gib, "why": why, "reason": reason}


def start_trial(tokens: int, command: list[str], timeout: float) -> Row:
    """Run one trial in a process of its own. Raises SystemExit if it fails for more than memory or time."""
    command = [*command, "--trial", str(tokens)]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return trial_row(tokens, timeout, None, "timeout", f"no result after {timeout:g} s")
    if done.returncode == -signal.SIGKILL:
        reason = "killed by SIGKILL, as the system does when memory runs out"
        return trial_row(tokens, time.perf_counter() - started, None, "oom", reason)
    if done.returncode != 0:
        raise SystemExit(
            f"The trial of N={tokens} ended with status {done.returncode}, and not for want of memory:\n"
            f"{done.stderr.strip()}\nTo repeat it: {shlex.join(command)}"
        )
    trial: Row = json.loads(done.stdout.splitlines()[-1])
    return trial


# One trial, inside its own process


def end_with_the_probe() -> None:
    """Have Linux kill this trial with the probe: one that goes on would take memory from those of the next probe."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_trial(args: argparse.Namespace, tokens: int) -> Row:
    device, on_cpu = torch.device(args.device), args.device == "cpu"
    if args.backward:
        importlib.import_module("torch._dynamo")  # else torch.utils.checkpoint would, and it takes 100 MB
    # torch's worker threads, whose stacks are no part of the op; for fewer elements some would not start
    torch.zeros(torch.get_num_threads() * 32_768).add_(1)
    limit = nullcontext() if args.memory_limit is None else limited_memory(int(args.memory_limit * 2**30))
    wait = (lambda: None) if on_cpu else torch.cuda.synchronize
    before = resident("VmRSS") if on_cpu else 0
    results: dict[str, Tensor] = {}
    reason = None
    with limit:
        started = time.perf_counter()
        try:
            problem = make_inputs(args, tokens)
            wait()
            started = time.perf_counter()
            results = run_op(args, problem)
            wait()
        except Exception as error:
            if not is_out_of_memory(error, device):
                raise
            reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        seconds = time.perf_counter() - started
    peak = resident("VmHWM") - before if on_cpu else torch.cuda.max_memory_allocated()
    for name, tensor in results.items():
        check_finite(name, tensor)
    return trial_row(tokens, seconds, peak / 2**30, None if reason is None else "oom", reason)


def make_inputs(args: argparse.Namespace, tokens: int) -> NSAInputs:
    how = {"requires_grad": args.backward, "gated": args.op == "nsa", "portable": False}
    device, dtype = where(args)
    return make_problem("random", sizes_of(args, tokens), device=device, dtype=dtype, **how)


def run_op(args: argparse.Namespace, inputs: NSAInputs) -> dict[str, Tensor]:
    """The output, and with --backward the gradients."""
    leaves = inputs.tensors()
    if args.op == "dense":
        with torch.set_grad_enabled(args.backward):
            out = choose_dense(inputs.q.device, inputs.q.dtype).attention(*leaves.values())
    else:
        attention = partial(nsa, recompute=args.recompute) if args.backward else nsa_forward
        given: dict[str, Any] = {**leaves, "config": config_of(args), "backend": args.backend}
        out = attention(**given)
    if not args.backward:
        return {"the output": out}
    gradients = torch.autograd.grad(out, tuple(leaves.values()), torch.randn_like(out))
    named = zip(leaves, gradients, strict=True)
    return {"the output": out, **{f"the gradient of {name}": gradient for name, gradient in named}}


def check_finite(name: str, tensor: Tensor) -> None:
    sample = tensor[:, :: max(1, tensor.shape[1] // SAMPLED_TOKENS)]
    if not torch.isfinite(sample).all():
        raise FloatingPointError(f"{name} holds NaN or inf")


# Memory


CUDA_TEXTS = "CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"
CPU_TEXTS = r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|^could not create a primitive$"
"""Messages of PyTorch and its libraries. The last one of CUDA is CuTe DSL's, which has errors of its own; the last one
of the CPU is oneDNN's, whole: what oneDNN cannot do at all fails before, creating "a primitive descriptor"."""


def is_out_of_memory(error: Exception, device: torch.device) -> bool:
    if device.type == "cuda":
        return isinstance(error, torch.OutOfMemoryError) or re.search(CUDA_TEXTS, str(error)) is not None
    by_text = isinstance(error, RuntimeError) and re.search(CPU_TEXTS, str(error)) is not None
    return isinstance(error, MemoryError) or by_text


@contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Let this process map at most `extra` bytes more than it does now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (proc_bytes("/proc/self/status", "VmSize") + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
