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
import mmap
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
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
from bench.inputs import KINDS, Sizes, make_problem
from bench.report import LOCAL_RESULTS, command_line, environment, write_json
from bench.results_file import differences, held
from bench.show import console, print_table, say
from bench.timing import proc_bytes
from nsa import NSAConfig, nsa, nsa_forward
from nsa.inputs import NSAInputs

CONFIG_OPTIONS = [field.name for field in fields(NSAConfig) if field.type in ("int", "int | None")]
"""Options of NSAConfig that can be given one by one, on top of the preset."""
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SAMPLED_TOKENS = 256
EXACT_HEAP = "MALLOC_MMAP_THRESHOLD_=131072"
"""Has glibc give every tensor of 128 KiB or more pages of its own. Otherwise it keeps freed pieces that it often cannot
use again, and the peak of one length was seen to vary threefold between runs. Takes up to twice the time."""

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


# What is probed


@dataclass(frozen=True)
class Settings:
    """Everything that decides whether a length fits, but for the machine and the code.

    `options` are changes to the preset, `backend` is NSA's, `dense` the name of the baseline of --op dense, and
    `memory_limit` in bytes; None: half of what was available at the first trial (CPU), or the device's memory.
    """

    op: str
    device: str
    dtype: str
    backward: bool
    recompute: bool
    batch: int
    heads: int
    kv_heads: int
    dim: int
    input: str
    preset: str | None
    options: dict[str, int]
    backend: str | None
    dense: str | None
    memory_limit: int | None

    @property
    def direction(self) -> str:
        return "fwd+bwd" if self.backward else "fwd"

    @property
    def where(self) -> tuple[torch.device, torch.dtype]:
        return torch.device(self.device), DTYPES[self.dtype]

    @property
    def config(self) -> NSAConfig:
        return PRESETS[self.preset or "per_tile"](**self.options)

    def sizes(self, tokens: int) -> Sizes:
        return Sizes(self.batch, tokens, self.heads, self.kv_heads, self.dim)


def main(argv: list[str] | None = None) -> int:
    arguments, settings, backend_note = parse(argv)
    if arguments.trial is not None:
        end_with_the_probe()
        print(json.dumps(asdict(run_trial(settings, arguments.trial))))
        return 0

    out = Path(arguments.out)
    with held(out, lambda: f"{out} keeps the trials so far; the same command goes on from there."):
        run_probe(arguments, settings, backend_note, sys.argv[1:] if argv is None else argv)
    return 0


def run_probe(arguments: argparse.Namespace, settings: Settings, backend_note: str, argv: list[str]) -> None:
    """Search, with the --out file in hand."""
    facts = environment(torch.device(settings.device))
    state, start_note = open_state(Path(arguments.out), facts, settings, restart=arguments.restart)
    announce(settings, state.memory_limit, facts["device"], [backend_note, start_note])
    command = trial_command(argv, settings, state.memory_limit)
    probe = partial(probe_length, state=state, command=command, timeout=arguments.timeout)
    bracket = search(probe, arguments.start, arguments.granularity, arguments.max_seqlen)
    state.save(bracket)
    show(state, bracket, arguments.granularity)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Settings, str]:
    """The arguments, the settings they amount to, and a note when the backend is not one that dispatch would pick."""
    parser = common.make_parser(__doc__, *common.SIZES, "backend")
    parser.allow_abbrev = False
    common.add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--op", choices=("nsa", "dense"), default="nsa", help="dense: causal FlashAttention-4 or PyTorch SDPA")
    add("--backward", action="store_true", help="probe forward + backward")
    add("--recompute", action="store_true", help="with --backward: keep less and compute it again, as in nsa")
    add(
        "--preset", type=common.preset_name, choices=PRESETS, help="NSAConfig.per_tile() or .paper(); default: per_tile"
    )
    for option in CONFIG_OPTIONS:
        add(f"--{option.replace('_', '-')}", type=int, metavar="N", help="as in NSAConfig; default: the preset's")
    text = "default: %(default)s; making the text's embeddings takes memory too, which on a CPU counts"
    add("--input", choices=KINDS, default="random", help=text)
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--start", **number, default=1024, help="first length to try; default: %(default)s")
    add("--granularity", **number, default=1024, help="tokens between fits and fails; default: %(default)s")
    add("--max-seqlen", **number, help="longest length to try; default: no end")
    timeout = "for one trial; a longer one ends the search; default: %(default)g"
    add("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help=timeout)
    limit = "CPU only, such as 2GiB; default: half of what is available"
    add("--memory-limit", type=memory_size, metavar="SIZE", help=limit)
    add("--out", metavar="FILE", help="results; default: bench/results/local/probe-<device>-<op>-<fwd|fwd+bwd>.json")
    add("--restart", action="store_true", help="ignore the trials in the --out file")
    add("--trial", type=positive, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    on_cpu = arguments.device == "cpu"
    if on_cpu and not Path("/proc/self/status").exists():
        parser.error("--device cpu measures memory through Linux's /proc/self/status, which is missing here")
    if not on_cpu and arguments.memory_limit is not None:
        parser.error("--memory-limit is for --device cpu; on a GPU the device's memory is the limit")
    options = {name: getattr(arguments, name) for name in CONFIG_OPTIONS if getattr(arguments, name) is not None}
    if arguments.op == "dense" and (options or arguments.preset or arguments.backend):
        parser.error("--preset, --backend and the options of NSAConfig go with --op nsa, got --op dense")
    if arguments.recompute and not (arguments.backward and arguments.op == "nsa"):
        parser.error("--recompute goes with --op nsa and --backward")
    common.resolve_sizes(parser, arguments)
    arguments.options, arguments.dense = options, None
    arguments.preset = (arguments.preset or "per_tile") if arguments.op == "nsa" else None
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    arguments.out = arguments.out or LOCAL_RESULTS / f"probe-{settings.device}-{settings.op}-{settings.direction}.json"
    if settings.op == "dense":
        return arguments, replace(settings, dense=choose_dense(*settings.where).name), ""
    try:
        backend, note = backend_for(settings)
    except (TypeError, ValueError, dispatch.BackendError) as error:
        parser.error(str(error))
    return arguments, replace(settings, backend=backend), note


def memory_size(text: str) -> int:
    """Bytes of a size such as 512MiB or 1.5GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in UNITS or int(float(match[1]) * UNITS[match[2]]) == 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 in {', '.join(UNITS)}, such as 2GiB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def backend_for(settings: Settings) -> tuple[str, str]:
    """The backend to probe, and a note when that is the reference for want of a kernel. Raises what refuses it."""
    device, dtype = settings.where
    passes = {"backward": settings.backward, "recompute": settings.recompute}
    call = common.nsa_facts(settings.sizes(1), settings.config, device, dtype, **passes)
    return common.choose_backend(call, settings.backend)


# Trials, and the file that keeps them


@dataclass(frozen=True)
class Trial:
    """Outcome of one length.

    `seconds` are the op's alone, in a process that runs it for the first time. `peak_gib` is of everything: inputs,
    out, with --backward do and gradients, temporaries (on a CPU also library code that was read from disk); None if
    the process did not report it. `reason` is the message of a failure.
    """

    n: int
    fits: bool
    seconds: float
    peak_gib: float | None
    why: Failure | None = None
    reason: str | None = None


@dataclass
class State:
    """The trials of one --out file, for one combination of settings, machine and code."""

    path: Path
    facts: dict[str, Any]
    settings: Settings
    memory_limit: int | None
    trials: dict[int, Trial]

    def save(self, bracket: Bracket | None = None) -> None:
        content = {
            **self.facts,
            "command": command_line(),
            "settings": asdict(self.settings),
            "memory_limit_bytes": self.memory_limit,
            "trials": [asdict(self.trials[tokens]) for tokens in sorted(self.trials)],
            "bracket": None if bracket is None else asdict(bracket),
        }
        write_json(self.path, content)


def open_state(path: Path, facts: dict[str, Any], settings: Settings, *, restart: bool) -> tuple[State, str]:
    """The state to go on from, and a note on the one in the file. Raises SystemExit for a file of something else."""
    limit = settings.memory_limit
    if settings.device == "cpu" and limit is None:
        limit = proc_bytes("/proc/meminfo", "MemAvailable") // 2
    fresh = State(path, facts, settings, limit, {})
    if restart or not path.exists():
        return fresh, ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before = {**content["settings"], **{name: content[name] for name in facts}}
        trials = {trial["n"]: Trial(**trial) for trial in content["trials"]}
        limit = content["memory_limit_bytes"]
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(
            f"{path} holds no state of this probe; name another --out, or overwrite with --restart"
        ) from error
    if changes := differences({**asdict(settings), **facts}, before):
        return fresh, f"Starting anew, since the trials in {path} differ: {'; '.join(changes)}"
    return State(path, facts, settings, limit, trials), f"Going on from the {len(trials)} trials in {path}"


def trial_command(argv: list[str], settings: Settings, memory_limit: int | None) -> list[str]:
    """The same call of this script, and what its arguments left open."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    if settings.backend is not None:
        command += ["--backend", settings.backend]
    if memory_limit is not None:
        command = ["env", EXACT_HEAP, *command, "--memory-limit", f"{memory_limit}B"]
    return command


def probe_length(tokens: int, *, state: State, command: list[str], timeout: float) -> Failure | None:
    """Why this many tokens fail, or None: from the state, or by a trial that is then recorded."""
    trial = state.trials.get(tokens)
    known = trial is not None and (trial.why != "timeout" or trial.seconds >= timeout)
    if trial is None or not known:
        with console.status(f"N={tokens:,} ..."):
            trial = start_trial(tokens, command, timeout)
        state.trials[tokens] = trial
        state.save()
    say(f"  N={tokens:,} {outcome(trial)}{' (recorded)' if known else ''}")
    return trial.why


def start_trial(tokens: int, command: list[str], timeout: float) -> Trial:
    """Run one trial in a process of its own. Raises SystemExit if it fails for more than memory or time."""
    command = [*command, "--trial", str(tokens)]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Trial(tokens, False, timeout, None, "timeout", f"no result after {timeout:g} s")
    if done.returncode == -signal.SIGKILL:
        reason = "killed by SIGKILL, as the system does when memory runs out"
        return Trial(tokens, False, time.perf_counter() - started, None, "oom", reason)
    if done.returncode != 0:
        raise SystemExit(
            f"The trial of N={tokens} ended with status {done.returncode}, and not for want of memory:\n"
            f"{done.stderr.strip()}\nTo repeat it: {shlex.join(command)}"
        )
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


# One trial, inside its own process


def end_with_the_probe() -> None:
    """Have Linux kill this trial with the probe: one that goes on would take memory from those of the next probe."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_trial(settings: Settings, tokens: int) -> Trial:
    device = torch.device(settings.device)
    if settings.backward:
        importlib.import_module("torch._dynamo")  # else torch.utils.checkpoint would, and it takes 100 MB
    # torch's worker threads, whose stacks are no part of the op; for fewer elements some would not start
    torch.zeros(torch.get_num_threads() * 32_768).add_(1)
    limit = nullcontext() if settings.memory_limit is None else limited_memory(settings.memory_limit)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    resident = proc_bytes("/proc/self/status", "VmRSS") if device.type == "cpu" else 0
    results: dict[str, Tensor] = {}
    reason = None
    with limit:
        started = time.perf_counter()
        try:
            problem = make_inputs(settings, tokens)
            wait()
            started = time.perf_counter()
            results = run_op(settings, problem)
            wait()
        except Exception as error:
            if not is_out_of_memory(error, device):
                raise
            reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        seconds = time.perf_counter() - started
    if device.type == "cpu":
        peak = proc_bytes("/proc/self/status", "VmHWM") - resident
    else:
        peak = torch.cuda.max_memory_allocated()
    for name, tensor in results.items():
        check_finite(name, tensor)
    return Trial(tokens, reason is None, seconds, peak / 2**30, None if reason is None else "oom", reason)


def make_inputs(settings: Settings, tokens: int) -> NSAInputs:
    how = {"requires_grad": settings.backward, "gated": settings.op == "nsa", "portable": False}
    device, dtype = settings.where
    return make_problem(settings.input, settings.sizes(tokens), device=device, dtype=dtype, **how)


def run_op(settings: Settings, inputs: NSAInputs) -> dict[str, Tensor]:
    """The output, and with --backward the gradients."""
    leaves = inputs.tensors()
    if settings.op == "dense":
        with torch.set_grad_enabled(settings.backward):
            out = choose_dense(inputs.q.device, inputs.q.dtype).attention(*leaves.values())
    else:
        attention = partial(nsa, recompute=settings.recompute) if settings.backward else nsa_forward
        given: dict[str, Any] = {**leaves, "config": settings.config, "backend": settings.backend}
        out = attention(**given)
    if not settings.backward:
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
    """Let this process take at most `extra` bytes more than it holds now; RuntimeError if that cannot be enforced.

    RLIMIT_DATA counts what a process can write to. Where the system does not enforce it: RLIMIT_AS, all addresses.
    """
    for kind, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (proc_bytes("/proc/self/status", field) + extra, hard))
        try:
            if not can_map(extra + 2**20):
                yield
                return
        finally:
            resource.setrlimit(kind, (soft, hard))
    raise RuntimeError("this system enforces neither RLIMIT_DATA nor RLIMIT_AS, so --memory-limit means nothing")


def can_map(size: int) -> bool:
    """True if the system grants this many bytes of private memory (none of it is touched)."""
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


# Presentation


def announce(settings: Settings, memory_limit: int | None, device: str, notes: list[str]) -> None:
    what = f"preset {settings.preset}, backend {settings.backend}" if settings.op == "nsa" else str(settings.dense)
    parts = [f"B={settings.batch} H={settings.heads} H_kv={settings.kv_heads} D={settings.dim} {settings.dtype}"]
    parts += [f"{settings.input} input", what, *(f"{name}={value}" for name, value in settings.options.items())]
    if memory_limit is not None:
        parts.append(f"memory limit {memory_limit / 2**20:,.0f} MiB")
    passes = f"forward{' + backward' * settings.backward}{', recomputing' * settings.recompute}"
    say(f"Longest sequence for {settings.op} {passes} on {device}: {'; '.join(parts)}", style="bold")
    for note in filter(None, notes):
        say(note, style="yellow")


def outcome(trial: Trial) -> str:
    memory = "" if trial.peak_gib is None else f", {trial.peak_gib:.2f} GiB"
    words = {None: "fits", "oom": "is out of memory", "timeout": "is out of time"}
    return f"{words[trial.why]}: {trial.seconds:.1f} s{memory}"


def show(state: State, bracket: Bracket, granularity: int) -> None:
    columns = {"N": "{n:,}", "fits": "{fits}", "why": "{why}", "seconds": "{seconds:.2f}", "peak GiB": "{peak_gib:.3f}"}
    print_table("", columns, [asdict(state.trials[tokens]) for tokens in sorted(state.trials)])
    say("One cold run each; memory of everything: inputs, results and temporaries.")
    found = "nothing fits" if bracket.fits is None else f"fits N={bracket.fits:,}"
    if bracket.fails is None:
        end = "which is --max-seqlen"
    elif bracket.why == "timeout":
        end = f"stopped by time at N'={bracket.fails:,} (a longer --timeout goes on from there)"
    else:
        end = f"does not fit N'={bracket.fails:,} (granularity {granularity:,})"
    say(f"{found}, {end}", style="bold")
    say(f"everything: {state.path}")


if __name__ == "__main__":
    sys.exit(main())
