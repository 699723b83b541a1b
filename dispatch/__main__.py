"""`python -m dispatch`: the backend that runs each op on each device here; with --all, the reason for every refusal."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import torch

from dispatch.device import DEVICE_TYPES, absence, describe_device, package_states
from dispatch.impl import Call
from dispatch.registry import Verdict, explain
from dispatch.table import ROWS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dispatch", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="devices, packages, and every backend with the reason for every refusal"
    )
    show_all = parser.parse_args(argv).all
    print(f"nsa-kernels dispatch on Python {platform.python_version()}, torch {torch.__version__}\n")
    packages = package_states()  # first, because importing torch_npu registers its devices
    if show_all:
        print("devices")
        for device_type in DEVICE_TYPES:
            missing = absence(device_type)
            print(f"  {device_type:<6}{describe_device(device_type) if missing is None else f'none: {missing}'}")

        print("\npackages")
        for package in packages:
            print(f"  {package.module:<17}{package.problem or package.version}  [{package.purpose}]")
        print()

    print("ops on tensors of each device")
    for op in dict.fromkeys(impl.op for impl in ROWS):
        for device_type in DEVICE_TYPES:
            dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
            try:
                verdicts = explain(Call(op, device_type, dtype))
            except ValueError as problem:  # NSA_KERNELS_BACKEND is set to a backend that this op does not have
                print(f"  {op:<33}{device_type:<6}none: {problem}")
                continue
            if not show_all or absence(device_type) is not None:
                print(f"  {op:<33}{device_type:<6}{summary(device_type, verdicts)}")
                continue
            for verdict in verdicts:
                state = "runs" if verdict.reason is None else f"no: {verdict.reason}"
                print(f"  {op:<33}{device_type:<6}{verdict.impl.label:<29}{state}")
    if not show_all:
        print("\n--all shows every backend with the reason for every refusal")


def summary(device_type: str, verdicts: Sequence[Verdict]) -> str:
    """The backend that would run, or why none can: the missing device, or the reason of every row."""
    missing = absence(device_type)
    if missing is not None:
        return f"none: {missing}"
    backend = next((verdict.impl.backend for verdict in verdicts if verdict.reason is None), None)
    reasons = dict.fromkeys(f"{verdict.impl.label}: {verdict.reason}" for verdict in verdicts)
    return backend or f"none: {'; '.join(reasons)}"


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as with `| head`; the interpreter would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
