"""Compiles for nsa.warm_up: `python -m nsa.warm_up.worker JSON`.

It imports everything once and forks, so that no process imports for itself. Each line of the output is an event of a
kernel: "asked NAME" or "there NAME".
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nsa.config import NSAConfig
from nsa.inputs import NSAInputs

KERNELS: list[Any] = []
"""jit.Kernel of all calls, which forked processes share."""


def kernels_of(job: dict[str, Any]) -> list[Any]:
    """The kernels that the calls of a job launch, each once, found with tensors that have no data."""
    forward, backward = (importlib.import_module(f"cute_kernels.{name}") for name in ("forward", "backward"))
    launches = importlib.import_module("cute_kernels.runtime.launches")
    kernel_type = importlib.import_module("cute_kernels.runtime.jit").Kernel
    config, dtype = NSAConfig(**job["config"]), getattr(torch, job["dtype"])

    def call(shapes: dict[str, list[int]]) -> None:
        made: dict[str, Any] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        inputs = NSAInputs(**made)
        if not job["backward"]:
            forward.nsa(inputs, config, aux=False)
            return
        out, saved = forward.nsa_saving(inputs, config, recompute=False)
        backward.nsa_backward(inputs, config, saved, torch.empty_like(out))

    found: dict[Any, None] = {}
    with torch.no_grad():
        for shapes in job["calls"]:
            for launch in launches.launches_of(lambda: call(shapes)):  # noqa: B023  called at once
                if isinstance(launch.kernel, kernel_type):
                    found[launch.kernel] = None
    return [*found]


def tell(event: str, kernel: Any) -> None:
    os.write(1, f"{event} {kernel.name}\n".encode())  # one write: lines of other processes come between


@contextmanager
def kept() -> Iterator[None]:
    """Ignore deprecations of what compiles; raise if its results cannot be kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "compiled kernels are not kept")
        yield


@kept()
def compile_kernel(number: int) -> None:
    _ = KERNELS[number].compiled
    tell("there", KERNELS[number])


def main() -> int:
    job = json.loads(sys.argv[1])
    KERNELS[:] = kernels_of(job)
    for kernel in KERNELS:
        tell("asked", kernel)
    with kept():
        importlib.import_module("cute_kernels.fa4.kernels").check_import()  # noted: later processes need not import it
    with multiprocessing.get_context("fork").Pool(min(job["processes"], max(len(KERNELS), 1))) as pool:
        for _ in pool.imap_unordered(compile_kernel, range(len(KERNELS))):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
