"""Run every CUDA kernel of ours, forward and backward, under compute-sanitizer. Needs a Hopper GPU.

    cases of tests/support/gpu_calls.py without a tool: kernels are compiled, and results compared with fp64
    the same cases under each tool of compute-sanitizer -> findings by kernel -> OUT/sanitizer-TOOL.txt

Each tensor has a cudaMalloc of its own, so that an access past its end is past the end of an allocation. The exit
status is 1 if a tool found anything in a kernel of ours, or did not see every function of cute_kernels that compiles a
kernel with each of its flags on and off; or if memcheck or initcheck does not find a planted fault.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.report import RESULTS, environment
from cute_kernels.runtime.launches import THREAD, start_of
from tests.support.gpu_calls import CASES
from tests.support.kernel_classes import OTHERS, every_form, forms_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLAIN, DRY = "plain", "dry"  # Other ways to run a child: on the GPU as it is, and without one

COMMON_OPTIONS = (
    *("--target-processes", "application-only", "--launch-timeout", "300", "--check-exit-code", "no"),
    *("--destroy-on-device-error", "kernel", "--show-backtrace", "device", "--print-limit", "200"),
)
"""Thousands of findings, each printed, take minutes; what was not printed is counted, and makes a run fail."""
BARRIERS = ("--num-cuda-barriers", "64")
"""More than any kernel has; the tools undercount barriers that are not cuda::barrier in a source."""
ATTENTION = ("--kernel-name", "regex=cute_kernels|flash_attn")
"""Leaves torch's kernels out, whose writes initcheck follows from CUDA 13.5 on all the same."""
TOOL_OPTIONS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),  # padding: between two allocations
    "racecheck": (*BARRIERS, *ATTENTION),
    "initcheck": ATTENTION,
    "synccheck": (*BARRIERS, *ATTENTION),
}
NUMBERS = itertools.count()
FIRST_PORT, PORTS = 49152, 16
"""Processes of compute-sanitizer that run at once talk to their programs through ports of their own."""
TIME_LIMIT = 300  # Seconds of a child

PLANTED, FAULTY = "planted fault", "BlockMean"  # In place of a case's name, and the kernel of the fault


def plant_fault(tool: str) -> None:
    """Compute means of unwritten keys or, for memcheck, of keys whose memory ends halfway."""
    from cute_kernels.pool.compress import block_means

    k, v = (torch.empty((1, 128, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    if tool == "memcheck":
        k.untyped_storage().resize_(k.untyped_storage().nbytes() // 2)
    block_means(k, v, 64, 64, torch.bfloat16)


class Launched:
    """Listener that records the forms of the kernels of ours that are launched; with `dry` none of them runs."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.forms: set[str] = set()

    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        build = getattr(kernel, "build", None)
        if build is not None and not build.__module__.startswith(OTHERS):
            bound = inspect.signature(build).bind(*kernel.arguments, **kernel.keywords)
            bound.apply_defaults()
            self.forms |= forms_of(build, bound.arguments)
        if not self.dry:
            start_of(kernel)(*arguments)

    def compile_ahead(self, kernel: Any) -> None:
        pass


def run_here(how: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run each case; yields its name, the forms that it launched and, if it failed, the error."""
    launched, device = Launched(dry=how == DRY), "cpu" if how == DRY else "cuda"
    type(THREAD).listener = launched  # also of autograd's thread
    if how == DRY:
        leave_fa4_out()
    elif how == "initcheck":
        vouch_for_tensor_copies()
    for name in names:
        error = ""
        launched.forms.clear()
        try:
            if name == PLANTED:
                plant_fault(how)
            else:
                CASES[name].run(device, check=how == PLAIN)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        yield {"case": name, "launched": sorted(launched.forms), "error": error}


def leave_fa4_out() -> None:
    from cute_kernels.fa4 import interface as fa4

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return options.get("into") or (o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))

    def differentiate(given: fa4.Gradients, *_: Any, statistics: fa4.WriteStatistics | None = None, **__: Any) -> None:
        if statistics is not None:
            statistics(*torch.empty((2, *given.lse.shape), dtype=torch.float32, device=given.lse.device))

    fa4.attend, fa4.differentiate = attend, differentiate


def vouch_for_tensor_copies() -> None:
    """Multiply by 1 all that FlashAttention-4 and our backwards for Hopper write by bulk tensor copies (TMA).

    initcheck does not see these writes; so torch's kernels, which it leaves out, are the first to read them.
    """
    from cute_kernels import backward
    from cute_kernels.fa4 import interface as fa4

    def vouch(module: Any, name: str, results: Callable[..., Iterable[Tensor | None]]) -> None:
        function = getattr(module, name)

        def run(*arguments: Any, **options: Any) -> Any:
            returned = function(*arguments, **options)
            for x in results(returned, *arguments, **options):
                if x is not None:
                    x.mul_(1)
            return returned

        setattr(module, name, run)

    vouch(fa4, "attend", lambda returned, *_, **__: returned)
    vouch(fa4, "differentiate", lambda _, given, *__, **___: (given.dq, given.dk, given.dv))
    vouch(backward, "compressed_backward", lambda *_, dq, **__: (dq,))
    vouch(backward, "selected_backward", lambda returned, *_, **__: returned)
    vouch(backward, "window_backward", lambda *_, into, **__: into)


OURS = re.compile(r"cute_kernels[a-z0-9_]+?([A-Z]\w*?)_object")
FA4 = re.compile(r"flash_attncute[a-z0-9_]*?([A-Z]\w*?)_object")
PLACE = re.compile(r"(?:\bat|Frame:) ?(\S.*?)\+0x[0-9a-f]+")
RECORD = re.compile(r"^========= (?=\S)", re.MULTILINE)
COUNTED = re.compile(r"SUMMARY: ([\d,]+) (?:error|hazard)")


class Log(NamedTuple):
    """Log of a tool."""

    findings: list[tuple[str, str]]  # Each with its kernel: the name of our or FlashAttention-4's class, or a function
    messages: list[str]  # About the tool itself: it may have missed something
    summaries: list[str]


def parse(text: str) -> Log:
    log = Log([], [], [])
    for record in RECORD.split(text)[1:]:
        first, *more = filter(None, (line.strip("= ") for line in record.splitlines()))
        whole = "\n    ".join([first, *more])
        if "SUMMARY" in first:
            log.summaries.append(first)
        elif places := PLACE.findall(whole):
            found = OURS.search(whole) or FA4.search(whole)
            log.findings.append((found[1] if found else re.sub(r"\(.*|<.*", "", places[-1]), whole))
        elif first != "COMPUTE-SANITIZER":
            log.messages.append(whole)
    return log


@dataclass
class Outcome:
    """Results of all children that ran under one tool, or without one."""

    launched: set[str] = field(default_factory=set)
    findings: list[tuple[str, str]] = field(default_factory=list)
    summaries: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def findings_of(self, *, ours: bool) -> list[tuple[str, str]]:
        return [finding for finding in self.findings if (OURS.search(finding[1]) is not None) == ours]

    @property
    def missing(self) -> list[str]:
        return sorted(every_form() - self.launched)

    @property
    def problems(self) -> list[str]:
        return [*self.failures, *(f"not launched: {form}" for form in self.missing)]

    @property
    def passes(self) -> bool:
        return not self.problems and not self.findings_of(ours=True)

    def add(self, names: Sequence[str], results: Iterable[dict[str, Any]], output: str, log: Log | None) -> None:
        """Add a child: the cases that it was to run, its results, the end of its output, and the log of its tool."""
        child = ", ".join(names)
        if log is not None and child == PLANTED:
            if FAULTY not in dict(log.findings):
                self.failures.append(f"the {PLANTED} was not found\n{output}")
            return
        errors = dict.fromkeys(names, "the process ended before this was done")
        for one in results:
            errors[one["case"]] = one["error"]
            self.launched |= set(one["launched"])
        self.failures += [f"{name}: {error}\n{output}" for name, error in errors.items() if error]
        if log is not None:
            self.findings += log.findings
            self.summaries.update(log.summaries)
            self.failures += [f"{child}: {message}" for message in log.messages]
            if not log.summaries:
                self.failures.append(f"{child}: the tool ended without a summary")
            counted = [int(count.replace(",", "")) for text in log.summaries for count in COUNTED.findall(text)]
            if (unprinted := max(counted, default=0) - len(log.findings) - len(log.messages)) > 0:
                self.failures.append(f"{child}: {unprinted} findings were not printed")


def run_cases(how: str, shares: Sequence[Sequence[str]], folder: Path, tool: Sequence[str] = ()) -> Outcome:
    """Run one child for each share of the cases. Args: `tool`: compute-sanitizer and its options."""
    outcome, start = Outcome(), time.monotonic()
    environ = {
        **os.environ,
        "NSA_KERNELS_JIT_CACHE": str(folder / "ours"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "fa4"),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # an allocation for each tensor
        "OMP_NUM_THREADS": "1",
    }

    def run(names: Sequence[str]) -> tuple[list[dict[str, Any]], str, Log | None]:
        number = next(NUMBERS)
        results, log = folder / f"{number}.json", folder / f"{number}.log"
        own = ["--log-file", str(log), "--port", str(FIRST_PORT + number * PORTS)] if tool else []
        cases = [part for name in names for part in ("--case", name)]
        command = [*tool, *own, sys.executable, __file__, "--child", how, "--results", str(results), *cases]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(command, env=environ, timeout=TIME_LIMIT, check=False, **pipes)
            printed, ended = done.stdout, f"exit status {done.returncode}"
        except subprocess.TimeoutExpired as late:
            printed, ended = late.stdout or b"", f"stopped after {TIME_LIMIT} s"
        written, found = (file.read_text("utf-8", "replace") if file.exists() else "" for file in (results, log))
        output = printed[-2000:].decode(errors="replace") + ended
        return [*map(json.loads, written.splitlines())], output, parse(found) if tool else None

    with ThreadPoolExecutor(len(shares)) as pool:
        for names, child in zip(shares, pool.map(run, shares), strict=True):
            outcome.add(names, *child)
    outcome.seconds = time.monotonic() - start
    return outcome


def shared_out(names: Sequence[str], children: int) -> list[Sequence[str]]:
    count = max(1, min(children, len(names)))
    return [names[i::count] for i in range(count)]


def report(tool: str, outcome: Outcome, facts: Mapping[str, Any], options: Sequence[str], names: Sequence[str]) -> str:
    ours, others = (outcome.findings_of(ours=of_us) for of_us in (True, False))
    lines = [
        f"compute-sanitizer {tool} over every CUDA kernel of nsa-kernels, forward and backward (tools/sanitize.py).",
        "",
        f"device: {facts['device']}",
        f"versions: {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}",
        f"commit: {facts['commit']}",
        f"command: python tools/sanitize.py --tool {tool}",
        f"options: {' '.join(options)}",
        f"cases: {'; '.join(names)}",
        f"kernels of ours: {len(outcome.launched)} forms launched, {len(outcome.missing)} missed",
        f"findings in kernels of ours: {len(ours)}",
        *listed(ours),
        f"findings in kernels of others: {len(others)}",
        *listed(others),
        f"problems: {len(outcome.problems)}",
        *(f"    {line}" for problem in outcome.problems for line in problem.splitlines()),
        "summaries of its processes:",
        *(f"    {count} x {what}" for what, count in outcome.summaries.items()),
        f"seconds: {outcome.seconds:.0f}",
        "",
        "forms:",
        *(f"    {form}" for form in sorted(outcome.launched)),
    ]
    return "\n".join(lines) + "\n"


def listed(findings: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Each kernel with the number of its findings, and one of them whole."""
    for kernel, count in Counter(kernel for kernel, _ in findings).most_common():
        yield f"    {count} x {kernel}; one of them:"
        yield from (f"        {line[:400]}" for line in dict(findings)[kernel].splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every CUDA kernel under compute-sanitizer.")
    parser.add_argument("--tool", choices=TOOLS, help="default: all, at once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the reports (default: bench/results)")
    default = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    parser.add_argument("--sanitizer", default=default, help="compute-sanitizer (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=(*CASES, PLANTED), help="these alone: misses kernels")
    parser.add_argument("--dry", action="store_true", help="launch nothing, on a CPU, and name what would be missed")
    parser.add_argument("--child", choices=(PLAIN, DRY, *TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names, tools = list(args.case or CASES), [args.tool] if args.tool else TOOLS
    if args.child:
        with args.results.open("w", encoding="utf-8") as lines:
            for done in run_here(args.child, names):
                print(json.dumps(done), file=lines, flush=True)
        return 0
    if args.dry:
        os.environ["CUTE_DSL_ARCH"] = "sm_90a"
        outcome = Outcome()
        outcome.add(names, run_here(DRY, names), "", None)
        print(*outcome.problems or [f"{len(outcome.launched)} forms, none missed"], sep="\n")
        return int(not outcome.passes)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("needs a Hopper GPU")
    if shutil.which(args.sanitizer) is None:
        parser.error(f"--sanitizer must name compute-sanitizer, and there is no {args.sanitizer}")
    version = subprocess.run([args.sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    facts = environment(torch.device("cuda"))
    facts["versions"]["compute-sanitizer"] = version.partition("Version ")[2].strip()
    cores = os.cpu_count() or 1

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = run_cases(PLAIN, shared_out(names, cores), folder)
        print(f"plain: {plain.seconds:.0f} s, {len(plain.launched)} forms", *plain.problems, sep="\n", flush=True)

        def run_tool(tool: str) -> bool:
            shares = shared_out(names, cores // len(tools))
            if tool in ("memcheck", "initcheck"):
                shares.append([PLANTED])
            options = [*COMMON_OPTIONS, *TOOL_OPTIONS[tool]]
            outcome = run_cases(tool, shares, folder, [args.sanitizer, "--tool", tool, *options])
            text = report(tool, outcome, facts, options, names)
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"sanitizer-{tool}.txt").write_text(text, encoding="utf-8")
            verdict = "passes" if outcome.passes else "FAILS"
            print(f"{tool}: {verdict}", text.partition("forms:")[0][:2500], sep="\n", flush=True)
            return outcome.passes

        with ThreadPoolExecutor(len(tools)) as pool:
            passed = list(pool.map(run_tool, tools))
    return int(not all(passed) or bool(plain.problems))


if __name__ == "__main__":
    sys.exit(main())
