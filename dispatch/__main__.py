"""`python -m dispatch`: what runs on this machine, what does not, and why."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence

import torch

from dispatch.device import DEVICE_TYPES, absence, describe_device, package_states
from dispatch.registry import Call, explain
from dispatch.table import ROWS


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m dispatch", description=__doc__).parse_args(argv)
    print(f"nsa-kernels dispatch on Python {platform.python_version()}, torch {torch.__version__}\n")
    packages = package_states()  # first: importing torch_npu is what makes its devices known
    print("devices")
    for device_type in DEVICE_TYPES:
        missing = absence(device_type)
        print(f"  {device_type:<6}{describe_device(device_type) if missing is None else f'none: {missing}'}")

    print("\npackages")
    for package in packages:
        print(f"  {package.module:<17}{package.problem or package.version}  [{package.purpose}]")

    print("\nops on tensors of each device")
    for op in dict.fromkeys(impl.op for impl in ROWS):
        for device_type in DEVICE_TYPES:
            dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
            for verdict in explain(Call(op, device_type, dtype)):
                state = "runs" if verdict.reason is None else f"no: {verdict.reason}"
                print(f"  {op:<33}{device_type:<6}{verdict.impl.backend:<11}{state}")


if __name__ == "__main__":
    main()
