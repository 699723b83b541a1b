"""Record files of bench/results again, each by the command that it names, all from one commit.

    python tools/record_results.py e2e-h200 stages-h200 --seconds 500

Files that this commit has finished are skipped, so the same command continues after the time is over, or after an
interruption. A benchmark that misses a bar, or whose gate is red, is named at the end, and the exit status is 1 then.
`python -m bench.tables` renders the tables of the docs.
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
    """Run the command of a file; returns what is wrong with it, "" if nothing."""
    if seconds is not None and seconds <= 0:
        return "not begun: the time is over"
    print(f"{file.name}: {shlex.join(file.command)}", flush=True)
    launcher = [sys.executable, *(["-m", "torch.distributed.run"] if file.command[0] == "torchrun" else [])]
    # A shell's background job ignores interrupts, and so would the child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*launcher, *file.command[1:]], cwd=root) as child:
        try:
            status = child.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            child.kill()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return "stopped: the time is over; the same command continues"
    if status:
        return f"exit status {status}"
    return "" if read(file.name, root).commit == commit(root) else "did not write the file"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Record files of bench/results again, by the commands that they name.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="files without .json, in the order to run")
    parser.add_argument("--seconds", type=float, help="of all together (default: as long as they take)")
    args = parser.parse_args(argv)
    if not args.names:
        parser.error("give the NAME of a file")
    try:
        files = [read(name, root) for name in args.names]
    except ValueError as error:
        parser.error(str(error))
    here = commit(root)
    if here == "unknown" or "+" in here:
        parser.error(f"results name the commit of their sources, and here it is {here}: commit, or run make stamp")

    began, wrong = time.monotonic(), {}
    for file in files:
        start = time.monotonic()
        if file.commit == here:
            print(f"{file.name}: is of this commit")
        elif problem := record(file, None if args.seconds is None else args.seconds - (start - began), root):
            wrong[file.name] = problem
        else:
            print(f"{file.name}: recorded, {time.monotonic() - start:.0f} s", flush=True)
    for name, problem in wrong.items():
        print(f"{name}: {problem}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
