#!/usr/bin/env python3
"""Records files of bench/results anew, each by the command that it names, all from one commit.

    python tools/record_results.py e2e-h200 stages-h200 --seconds 500

Without names: which files there are, and which commit has made each. Files that this commit has finished are left
as they are, so the same command goes on after the time is over, or an interruption. A benchmark that misses a bar, or
whose gate is red, is named at the end, and the exit status is 1 then. Tables of the docs follow by
`python -m bench.tables`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.commit import commit  # noqa: E402  # needs the path above

RESULTS = Path("bench") / "results"
GRACE = 20.0  # Seconds that a benchmark has to write what it has, once its time is over


class Recorded(NamedTuple):
    name: str
    commit: str  # With ", unfinished" if the command was stopped, and goes on from what is there
    command: list[str]


def read(name: str, root: Path = ROOT) -> Recorded:
    """Raises ValueError unless there is such a file, with a command of Python or torchrun that writes it."""
    path = root / RESULTS / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made_at, command = str(content["commit"]), shlex.split(content["command"] or "")
        made_at += ", unfinished" if content.get("gate") == "unfinished" else ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{RESULTS / name}.json names no commit and command: {error!r}") from error
    if command[:1] not in (["python"], ["torchrun"]) or not any(
        word.startswith((RESULTS / name).as_posix()) for word in command
    ):
        raise ValueError(f"the command of {RESULTS / name}.json does not write it: {shlex.join(command)}")
    return Recorded(name, made_at, command)


def record(file: Recorded, seconds: float | None, root: Path = ROOT) -> str:
    """Runs the command of a file; what is wrong with it, "" if nothing."""
    print(f"{file.name}: {shlex.join(file.command)}", flush=True)
    launcher = [sys.executable, *(["-m", "torch.distributed.run"] if file.command[0] == "torchrun" else [])]
    # A shell's background job ignores interrupts, and so would the child
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen([*launcher, *file.command[1:]], cwd=root, preexec_fn=heed)
    try:
        status = child.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if isinstance(stopped, KeyboardInterrupt):
            raise
        return "stopped: the time is over; the same command goes on"
    if status:
        return f"exit status {status}"
    return "" if read(file.name, root).commit == commit(root) else "did not write the file"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Record files of bench/results anew, by the commands that they name.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="files without .json, in the order to run")
    parser.add_argument("--seconds", type=float, help="of all together (default: as long as they take)")
    args = parser.parse_args(argv)
    if not args.names:
        for path in sorted((root / RESULTS).glob("*.json")):
            with suppress(ValueError):
                file = read(path.stem, root)
                print(f"{file.name:<28}{file.commit:<26}{shlex.join(file.command)}")
        return 0
    try:
        files = [read(name, root) for name in args.names]
    except ValueError as error:
        parser.error(str(error))
    here = commit(root)
    if here == "unknown" or "+" in here:
        parser.error(f"results name the commit of their sources, and here it is {here}: commit, or run make stamp")

    began, wrong = time.monotonic(), {}
    for file in files:
        if file.commit == here:
            print(f"{file.name}: is of this commit")
            continue
        left = None if args.seconds is None else args.seconds - (time.monotonic() - began)
        if left is not None and left <= 0:
            wrong[file.name] = "not begun: the time is over"
        else:
            start = time.monotonic()
            problem = record(file, left, root)
            print(f"{file.name}: {problem or 'recorded'}, {time.monotonic() - start:.0f} s", flush=True)
            if problem:
                wrong[file.name] = problem
    for name, problem in wrong.items():
        print(f"{name}: {problem}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
