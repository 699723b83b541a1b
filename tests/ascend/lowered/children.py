"""Child processes that answer requests; one that dies fails its request, not the test run.

Those that hold a Triton live as long as the test run, so that it stays warm; those that execute kernels, under guard
pages, as long as one `proof.execute`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.ascend.lowered import toolchain

SCRIPT = Path(__file__).with_name("triton_child.py")
GUARDED_SCRIPT = Path(__file__).with_name("guarded_child.py")
LINES_SHOWN = 30
LOWERING_ATTEMPTS = 3
SECONDS = 300
"""To wait for an answer."""
FAULTS = (-signal.SIGSEGV, -signal.SIGBUS)


class ProofError(Exception):
    """A kernel could not be lowered, compiled or executed; the message names it and the launch."""


class Crash(ProofError):
    """The child died of SIGSEGV or SIGBUS while it held the request."""

    def __init__(self, story: str, status: int) -> None:
        super().__init__(story)
        self.status = status


class Child:
    """A process started on the first request and again after a death. It answers each line of JSON with another."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.command = command
        self.environment = {**os.environ, "PYTHONPATH": str(toolchain.ROOT), **environment}
        self.process: subprocess.Popen[str] | None = None
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the child
        atexit.register(self.close)

    def ask(self, task: str, what: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of one request; `what` names the kernel and the launch in errors."""
        if self.process is None:
            self.log.truncate(0)
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child has no pipes")
        try:
            stdin.write(json.dumps({"task": task, **request}) + "\n")
            stdin.flush()
            answered = bool(select.select([stdout], [], [], SECONDS)[0])
            line = stdout.readline() if answered else ""
        except BrokenPipeError:
            answered, line = True, ""
        if not line:
            status = self.stop()
            cause = how_it_ended(status) if answered else f"no answer in {SECONDS} s"
            self.log.seek(0)
            last_lines = "\n".join(self.log.read().splitlines()[-LINES_SHOWN:])
            story = f"{task} {what}: {cause}\n{last_lines}"
            raise Crash(story, status) if answered and status in FAULTS else ProofError(story)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProofError(f"{task} {what}: {answer['error']}")
        return answer

    def stop(self) -> int:
        """End the process; returns its exit status, as `subprocess` has it."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that it never read
                    pipe.close()
        try:
            status = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return status

    def close(self) -> None:
        self.stop()
        self.log.close()
        atexit.unregister(self.close)


def how_it_ended(status: int) -> str:
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def lowered_by(child: Child, what: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to "lower". triton-ascend sometimes dies of SIGSEGV for no fault of the kernel: then, and only then,
    the request goes to a new child, LOWERING_ATTEMPTS times in all, with a warning each time.
    """
    for attempt in range(1, LOWERING_ATTEMPTS):
        try:
            return child.ask("lower", what, request)
        except Crash as crash:
            if crash.status != -signal.SIGSEGV:
                raise
            warnings.warn(
                f"triton-ascend crashed, attempt {attempt} of {LOWERING_ATTEMPTS}: {crash}",
                RuntimeWarning,
                stacklevel=2,
            )
    return child.ask("lower", what, request)


@functools.cache
def triton_ascend() -> Child:
    return Child(str(toolchain.ASCEND_PYTHON), str(SCRIPT), TRITON_DISABLE_LINE_INFO="1")


@functools.cache
def upstream() -> Child:
    """Debug sections are not the code of a kernel."""
    return Child(sys.executable, str(SCRIPT), TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1")


def guarded() -> Child:
    return Child(sys.executable, "-I", str(GUARDED_SCRIPT))
