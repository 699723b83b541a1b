"""`python -m dispatch`: what runs on this machine, what does not, and why."""

from __future__ import annotations

import platform

import torch

from dispatch.device import describe_device, device_types, package_states
from dispatch.registry import Call, explain
from dispatch.table import ROWS


def main() -> None:
    print(f"nsa-kernels dispatch on Python {platform.python_version()}, torch {torch.__version__}\n")
    devices = device_types()
    print("devices")
    for device in devices:
        print(f"  {device:<6}{describe_device(device)}")

    print("\npackages")
    for package in package_states():
        state = package.problem or f"{package.version or 'present'}"
        print(f"  {package.module:<17}{state}  [{package.purpose}]")

    print("\nops")
    for op in dict.fromkeys(impl.op for impl in ROWS):
        for device in devices:
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            for verdict in explain(Call(op, torch.device(device), dtype)):
                state = "runs" if verdict.reason is None else f"no: {verdict.reason}"
                print(f"  {op:<24}{device:<6}{verdict.impl.backend:<11}{state}")


if __name__ == "__main__":
    main()
