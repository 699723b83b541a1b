"""Processes that stand for the ranks of context parallelism: started once for many cases, on gloo or NCCL.

With gloo ranks compute on the CPU, or all on one GPU; with NCCL each has a GPU of its own. A case is a function
`(cp_of, *arguments)` that runs on each of the first R processes at once; `cp_of(**options)` makes its ContextParallel.
What the first one returns is the result; what any raises is raised here.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nsa.distributed import ContextParallel
from tests.support.poison import poison

SECONDS = 60
"""Timeout of a collective; a case has twice that and START_SECONDS."""

START_SECONDS = 240
"""In which processes start, import torch and find each other, on a machine that does much else."""

WATCHDOG_SECONDS = 60
"""In which NCCL's watchdog ends a process whose collective is too late: it writes down first what all were doing."""


class Ranks:
    """Processes with ranks 0 ... count - 1.

    Args:
        sizes: of the groups that cases run on; each holds the first ranks.
        seconds: after which a collective fails.
        backend: "gloo"; or "nccl", where rank r has GPU r.
    """

    def __init__(self, *sizes: int, seconds: float = SECONDS, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports torch once for all
        self.sizes, self.seconds, self.backend = sizes, seconds, backend
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(max(sizes)):
            ours, theirs = context.Pipe()
            store = str(Path(self.folder.name) / "store")
            arguments = (theirs, store, rank, sizes, seconds, backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(START_SECONDS), f"rank {rank} did not start"
            assert pipe.recv() == "ready"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def outcomes(self, size: int, case: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        """For each rank ("returned", result), ("raised", its error's type name and message) or ("ended", None)."""
        for pipe in self.pipes[:size]:
            pipe.send((size, case, arguments))
        found: dict[int, tuple[str, Any]] = {}
        while len(found) < size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:size]) if rank not in found}
            ready = wait(
                list(waiting), timeout=2 * self.seconds + START_SECONDS + WATCHDOG_SECONDS * (self.backend == "nccl")
            )
            assert ready, f"ranks {sorted(waiting.values())} neither returned nor raised"
            for pipe in ready:
                try:
                    found[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                except EOFError:
                    found[waiting[pipe]] = "ended", None  # type: ignore[index]
        return [found[rank] for rank in range(size)]

    def run(self, size: int, case: Callable[..., Any], *arguments: Any) -> Any:
        """The result of rank 0, when all ranks have returned."""
        found = self.outcomes(size, case, *arguments)
        for rank, (kind, value) in enumerate(found):
            assert kind == "returned", f"rank {rank} {kind}: {value}"
        return found[0][1]


def _serve(pipe: Connection, store: str, rank: int, sizes: tuple[int, ...], seconds: float, backend: str) -> None:
    """Run cases until the pipe is closed."""
    torch.set_num_threads(1)
    poison(True)
    start, timeout = timedelta(seconds=START_SECONDS), timedelta(seconds=seconds)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name means
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=dist.FileStore(store, max(sizes)), rank=rank, world_size=max(sizes), timeout=start
    )
    dist.barrier()  # from here on all are as far
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in sizes}
    pipe.send("ready")
    while True:
        try:
            size, case, arguments = pipe.recv()
        except (EOFError, OSError):
            return

        def cp_of(**options: Any) -> ContextParallel:
            return ContextParallel(groups[size], **options)  # noqa: B023

        try:
            pipe.send(("returned", case(cp_of, *arguments)))
        except Exception as error:
            text = "".join(traceback.format_exception(error)) if isinstance(error, AssertionError) else str(error)
            pipe.send(("raised", f"{type(error).__name__}: {text}"))
