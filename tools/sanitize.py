#!/usr/bin/env python3
"""Runs every CUDA kernel of ours, forward and backward, under compute-sanitizer. Needs a Hopper GPU.

    cases of tests/support/gpu_calls.py, each in a plain process: kernels are compiled and kept on disk, results
        compared with fp64
    tool by tool, the same cases again under compute-sanitizer -> findings by kernel -> OUT/sanitizer-TOOL.txt

Each tensor has a cudaMalloc of its own, so that what is read or written behind a tensor is behind an allocation. The
exit status is 1 if a tool found anything in a kernel of ours, or did not see all of them: every function of
cute_kernels that compiles a kernel, with each of its flags on and off. What it found in kernels of others is listed.

So that a tool that sees nothing does not pass, one more process makes memcheck and initcheck a fault to find.

`--dry` launches nothing, needs no GPU, and says which kernels the cases would miss.
"""

from __future__ import annotations

import argparse
import inspect
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
from functools import partial, wraps
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
ATTENTION = ("--kernel-name", "regex=cute_kernels|flash_attn")  # Leaves torch's kernels out
TOOL_OPTIONS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),  # padding: behind it the next allocation begins
    "racecheck": (*BARRIERS, *ATTENTION),
    "initcheck": ATTENTION,
    "synccheck": (*BARRIERS, *ATTENTION),
}
TRACKING = "--initcheck-track-filtered-global-memory"
"""From CUDA 13.5 on initcheck knows by this option what kernels write that it leaves out."""
FIRST_PORT, PORTS = 49152, 16
"""Processes of compute-sanitizer that run at once talk to their programs through ports of their own."""
TIME_LIMIT = 300  # Seconds of a child


PLANTED, FAULTY = "planted fault", "BlockMean"
"""In place of a case's name, and the kernel that finds memory as it must not be."""


def plant_fault(tool: str) -> None:
    """Means of keys that nobody wrote, for memcheck of keys whose memory ends halfway."""
    from cute_kernels.pool.compress import block_means

    k, v = (torch.empty((1, 128, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    if tool == "memcheck":
        k.untyped_storage().resize_(k.untyped_storage().nbytes() // 2)
    block_means(k, v, 64, 64, torch.bfloat16)


class Launched:
    """Told of all launches: their forms."""

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


def run_here(how: str, names: Sequence[str], results: Path) -> int:
    """Writes a line of JSON for each case: its name, seconds, what it launched, and what went wrong."""
    launched, device = Launched(dry=how == DRY), "cpu" if how == DRY else "cuda"
    type(THREAD).listener = launched  # also of autograd's thread
    if how == DRY:
        leave_fa4_out()
    elif how == "initcheck":
        vouch_for_tensor_copies()
    failed = False
    with results.open("w", encoding="utf-8") as lines:
        for name in names:
            start, error = time.monotonic(), ""
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
                error, failed = f"{type(problem).__name__}: {problem}", True
            done = {"case": name, "seconds": time.monotonic() - start, "launched": sorted(launched.forms)}
            print(json.dumps({**done, "error": error}), file=lines, flush=True)
    return int(failed)


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
    """Multiply by 1 what was just written by bulk tensor copies (TMA), which initcheck does not see.

    What FlashAttention-4's kernels and our backwards for Hopper write would be uninitialised to whoever reads it. torch
    is that reader then, so what initcheck says of it counts for nothing, and what it says of our kernels counts.
    """
    from cute_kernels import backward
    from cute_kernels.fa4 import interface as fa4

    def vouch(module: Any, name: str, results: Callable[..., Iterable[Tensor | None]]) -> None:
        function = getattr(module, name)

        @wraps(function)
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
MORE = re.compile(r"^=========\s{2,}(?=\S)")


class Finding(NamedTuple):
    kernel: str  # Name of the class of our kernels and FlashAttention-4's, else of the function
    ours: bool
    what: str
    text: str


@dataclass
class Log:
    findings: list[Finding] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # About itself: it may have missed something
    summaries: list[str] = field(default_factory=list)

    @property
    def untold(self) -> int:
        """Findings that it counted but did not print."""
        counted = [int(n.replace(",", "")) for text in self.summaries for n in COUNTED.findall(text)]
        return max(0, max(counted, default=0) - len(self.findings) - len(self.messages))


def parse(text: str) -> Log:
    log = Log()
    for record in RECORD.split(text)[1:]:
        first, *more = record.splitlines()
        whole = "\n    ".join([first, *(MORE.sub("", line) for line in more if MORE.match(line))])
        if "SUMMARY" in first:
            log.summaries.append(first)
        elif places := PLACE.findall(whole):
            ours, fa4 = OURS.search(whole), FA4.search(whole)
            kernel = (ours or fa4 or [None, re.sub(r"\(.*|<.*", "", places[-1])])[1]
            what = re.split(r" at (?=\S+\+0x)| at .*\+0x| by threads", first)[0].rstrip(" .")
            log.findings.append(Finding(kernel, ours is not None, what, whole))
        elif first != "COMPUTE-SANITIZER":
            log.messages.append(whole)
    return log


@dataclass
class Outcome:
    logs: list[Log] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def findings(self, *, ours: bool) -> list[Finding]:
        return [finding for log in self.logs for finding in log.findings if finding.ours == ours]

    def add(self, names: Sequence[str], results: Path, output: str, log: Log | None) -> None:
        if log is not None and list(names) == [PLANTED]:
            if not any(finding.kernel == FAULTY for finding in log.findings):
                self.problems.append(f"the {PLANTED} was not found\n{output[-2000:]}")
            return
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        done = {one["case"]: one for one in map(json.loads, text.splitlines())}
        if undone := [name for name in names if name not in done]:
            self.problems.append(f"{', '.join(undone)}: the process ended before this was done\n{output[-2000:]}")
        for name, one in done.items():
            if one["error"]:
                self.problems.append(f"{name}: {one['error']}\n{output[-2000:]}")
            else:
                self.launched |= set(one["launched"])
        if log is not None:
            self.logs.append(log)
            self.problems += [f"{', '.join(names)}: {message}" for message in log.messages]
            if not log.summaries:
                self.problems.append(f"{', '.join(names)}: the tool ended without a summary")
            if log.untold:
                self.problems.append(f"{', '.join(names)}: {log.untold} findings were not printed")


def kept_apart(cache: Path) -> dict[str, str]:
    """Environment of the children: an allocation for each tensor, and compiled kernels in a folder."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        **os.environ,
        "NSA_KERNELS_JIT_CACHE": str(cache / "ours"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache / "fa4"),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_cases(
    how: str, shares: Sequence[Sequence[str]], prefix: Sequence[Sequence[str]], environ: Mapping[str, str], folder: Path
) -> Outcome:
    """One child for each share of the cases. Args: `prefix`: of each child's command."""
    outcome, start = Outcome(), time.monotonic()

    def run(number: int) -> tuple[Path, str, Log | None]:
        results, output, log = (folder / f"{how}-{number}.{kind}" for kind in ("json", "out", "log"))
        cases = [part for name in shares[number] for part in ("--case", name)]
        own = [sys.executable, __file__, "--child", how, "--results", str(results), *cases]
        front = [part.replace("LOG", str(log)) for part in prefix[number]]
        with output.open("w", encoding="utf-8") as file:
            try:
                options: Any = {"env": environ, "stdout": file, "stderr": file, "timeout": TIME_LIMIT, "check": False}
                print(f"exit status {subprocess.run([*front, *own], **options).returncode}", file=file)
            except subprocess.TimeoutExpired:
                print(f"stopped after {TIME_LIMIT} s", file=file)
        written = output.read_text(encoding="utf-8", errors="replace")
        found = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return results, written, parse(found) if front else None

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        for names, (results, output, log) in zip(shares, pool.map(run, range(len(shares))), strict=True):
            outcome.add(names, results, output, log)
    outcome.seconds = time.monotonic() - start
    return outcome


def shared_out(names: Sequence[str], children: int) -> list[list[str]]:
    count = max(1, min(children, len(names)))
    return [list(names[i::count]) for i in range(count)]


def missing(outcome: Outcome) -> list[str]:
    return sorted(every_form() - outcome.launched)


def report(tool: str, outcome: Outcome, facts: Mapping[str, Any], options: Sequence[str], names: Sequence[str]) -> str:
    ours, others, problems = outcome.findings(ours=True), outcome.findings(ours=False), all_problems(outcome)
    lines = [
        f"compute-sanitizer {tool} over every CUDA kernel of nsa-kernels, forward and backward (tools/sanitize.py).",
        "",
        f"device: {facts['device']}",
        f"versions: {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}",
        f"commit: {facts['commit']}",
        f"command: python tools/sanitize.py --tool {tool}",
        f"options: {' '.join(options)}",
        f"cases: {'; '.join(names)}",
        f"kernels of ours: {len(outcome.launched)} forms launched, {len(missing(outcome))} missed",
        f"findings in kernels of ours: {len(ours)}",
        *listed(ours),
        f"findings in kernels of others: {len(others)}",
        *listed(others),
        f"problems: {len(problems)}",
        *(f"    {line}" for problem in problems for line in problem.splitlines()),
        "summaries of its processes:",
        *(f"    {count} x {what}" for what, count in Counter(s for log in outcome.logs for s in log.summaries).items()),
        f"seconds: {outcome.seconds:.0f}",
        "",
        "forms:",
        *(f"    {form}" for form in sorted(outcome.launched)),
    ]
    return "\n".join(lines) + "\n"


def listed(findings: Sequence[Finding]) -> Iterator[str]:
    """Each kind with its number and one of them whole."""
    for (kernel, what), count in Counter((finding.kernel, finding.what) for finding in findings).most_common():
        yield f"    {count} x {kernel}: {what}; one of them:"
        one = next(finding for finding in findings if (finding.kernel, finding.what) == (kernel, what))
        yield from (f"        {line[:400]}" for line in one.text.splitlines())


def all_problems(outcome: Outcome) -> list[str]:
    return [*outcome.problems, *(f"not launched: {form}" for form in missing(outcome))]


def passes(outcome: Outcome) -> bool:
    return not outcome.findings(ours=True) and not all_problems(outcome)


def find_sanitizer() -> str | None:
    folders = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every CUDA kernel under compute-sanitizer.")
    parser.add_argument("--tool", default=",".join(TOOLS), help="some of %(default)s (default: all, at once)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the reports (default: bench/results)")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="compute-sanitizer (default: the one found)")
    shown = "processes at once (default: %(default)s)"
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help=shown)
    shown = "these alone, which misses kernels"
    parser.add_argument("--case", action="append", choices=(*CASES, PLANTED), help=shown)
    parser.add_argument("--dry", action="store_true", help="launch nothing, on a CPU, and name what would be missed")
    parser.add_argument("--child", choices=(PLAIN, DRY, *TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names, tools = list(args.case or CASES), args.tool.split(",")
    if unknown := sorted(set(tools) - set(TOOLS)):
        parser.error(f"--tool takes {', '.join(TOOLS)}, got {', '.join(unknown)}")
    if args.child:
        return run_here(args.child, names, args.results)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environ = kept_apart(folder / "cache")
        if args.dry:
            environ["CUTE_DSL_ARCH"] = "sm_90a"
            outcome = run_cases(DRY, [names], [[]], environ, folder)
            print(*all_problems(outcome) or [f"{len(outcome.launched)} forms, none missed"], sep="\n")
            return 0 if passes(outcome) else 1
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            parser.error("needs a Hopper GPU")
        if args.sanitizer is None:
            parser.error("compute-sanitizer was not found: --sanitizer names it")

        plain = run_cases(PLAIN, shared_out(names, args.jobs), [[]] * len(names), environ, folder)
        print(f"plain: {plain.seconds:.0f} s, {len(plain.launched)} forms", *all_problems(plain), sep="\n", flush=True)
        ask = partial(subprocess.run, capture_output=True, text=True, check=True)
        version, manual = (ask([args.sanitizer, of]).stdout for of in ("--version", "--help"))
        facts = environment(torch.device("cuda"))
        facts["versions"]["compute-sanitizer"] = version.partition("Version ")[2].strip()
        cases = shared_out(names, max(1, args.jobs // len(tools)))

        def run_tool(number: int) -> bool:
            tool = tools[number]
            shares = [*cases, [PLANTED]] if tool in ("memcheck", "initcheck") else cases
            seen = () if tool == "initcheck" and TRACKING not in manual else TOOL_OPTIONS[tool]
            options = [*COMMON_OPTIONS, *seen]
            first = FIRST_PORT + number * (len(cases) + 1) * PORTS
            prefix = [
                [args.sanitizer, "--tool", tool, "--log-file", "LOG", "--port", str(first + i * PORTS), *options]
                for i in range(len(shares))
            ]
            outcome = run_cases(tool, shares, prefix, environ, folder)
            args.out.mkdir(parents=True, exist_ok=True)
            text = report(tool, outcome, facts, options, names)
            (args.out / f"sanitizer-{tool}.txt").write_text(text, encoding="utf-8")
            verdict = "passes" if passes(outcome) else "FAILS"
            print(f"{tool}: {verdict}", text.partition("forms:")[0][:2500], sep="\n", flush=True)
            return passes(outcome)

        with ThreadPoolExecutor(len(tools)) as pool:
            passed = list(pool.map(run_tool, range(len(tools))))
        return 0 if all(passed) and not plain.problems else 1


if __name__ == "__main__":
    sys.exit(main())
