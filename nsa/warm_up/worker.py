"""The processes that compile for nsa.warm_up: `python -m nsa.warm_up.worker JSON`.

It imports everything once and forks, so that no process imports for itself. Each line of the output is an event of a
kernel: "asked KEY" or "there KEY".
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import warnings
from typing import Any

import torch

from nsa.config import NSAConfig
from nsa.inputs import NSAInputs


def tell(event: str, key: str) -> None:
    os.write(1, f"{event} {key}\n".encode())  # one write: lines of other processes come between


def run(job: dict[str, Any]) -> None:
    """Every call of the job, with tensors that have no data."""
    forward, backward = (importlib.import_module(f"cute_kernels.{name}") for name in ("forward", "backward"))
    warm_up = importlib.import_module("cute_kernels.warm_up")
    config, dtype = NSAConfig(**job["config"]), getattr(torch, job["dtype"])
    with warnings.catch_warnings(), warm_up.compiling_only(tell), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations of what compiles
        for shapes in job["calls"]:
            made: dict[str, Any] = {
                name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
            }
            inputs = NSAInputs(**made)
            if not job["backward"]:
                forward.nsa(inputs, config, aux=False)
                continue
            out, saved = forward.nsa_saving(inputs, config, recompute=False)
            backward.nsa_backward(inputs, config, saved, torch.empty_like(out))


def main() -> int:
    job = json.loads(sys.argv[1])
    for name in ("cute_kernels.backward", "cute_kernels.warm_up"):
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=run, args=(job,)) for _ in range(job["processes"])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 1 if any(worker.exitcode for worker in workers) else 0


if __name__ == "__main__":
    sys.exit(main())
