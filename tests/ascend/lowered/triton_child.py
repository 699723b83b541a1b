"""A child process that holds one Triton, triton-ascend or upstream. Started by children.py.

Each line of stdin is a request in JSON, each line of stdout its answer. Kernels come from their own source file.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class StandIn:
    """What Triton looks at in a tensor when it compiles."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype = getattr(torch, dtype)
        self.address = 1 << 20 if aligned else (1 << 20) + 8

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 1 << 40


class StandInDriver:
    """What the JIT asks of a driver before it compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def import_kernel(request: dict[str, Any]) -> Any:
    root = str(Path(request["file"]).parents[request["module"].count(".")])
    if root not in sys.path:
        sys.path.insert(0, root)
    found: Any = importlib.import_module(request["module"])
    for name in request["kernel"].split("."):
        found = getattr(found, name)
    return found


def warm_up(request: dict[str, Any], target: Any) -> Any:
    """Let the kernel's JIT specialise and compile for a device that is not there."""
    import triton.language as tl
    from triton.runtime import driver

    from tests.ascend.lowered.description import sources

    kernel = import_kernel(request)
    if list(sources(kernel)) != request["sources"]:
        raise RuntimeError(f"{request['file']} has another {request['kernel']} than was launched")
    driver.set_active(StandInDriver(target))
    if target.backend == "cuda":
        kernel.device_caches.clear()  # kept by device, and so for another capability
    arguments = {
        name: StandIn(**value) if "dtype" in value else value["value"] for name, value in request["arguments"].items()
    }
    constants = {
        name: tl.dtype(value["tl.dtype"]) if isinstance(value, dict) else value
        for name, value in request["constants"].items()
    }
    return kernel.run(grid=(1,), warmup=True, **arguments, **constants, **request["options"])


def lower(request: dict[str, Any]) -> dict[str, Any]:
    """TTIR and Linalg by triton-ascend, and the names of the run-time parameters that are left, in order."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction

    target = GPUTarget("npu", request["arch"], 0)
    captured: list[dict[str, Any]] = []

    def stop_before_compiling(**keywords: Any) -> bool:
        captured.append(keywords["compile"])
        return True

    JITFunction.cache_hook = stop_before_compiling
    start = time.monotonic()
    warm_up(request, target)
    signature, constants = captured[0]["signature"], captured[0]["constants"]
    backend = make_backend(target)
    options = backend.parse_options(request["options"])
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(import_kernel(request), signature, constants, captured[0]["configs"][0])
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "proof", "target": target, **options.__dict__}
    module = ascend.make_ttir(module, metadata, options)
    ttir = str(module)
    try:
        linalg = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        if error.returncode == -signal.SIGSEGV:  # a part of the compiler: its crash is this process's
            os.write(2, error.stderr)
            os.kill(os.getpid(), signal.SIGSEGV)
        raise RuntimeError(f"triton-adapter-opt refused the kernel: {error.stderr.decode()}") from error
    parameters = [name for name in signature if name not in constants]
    return {"ttir": ttir, "linalg": linalg, "parameters": parameters, "seconds": time.monotonic() - start}


def compile_ptx(request: dict[str, Any]) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget

    compiled = warm_up(request, GPUTarget("cuda", request["capability"], 32))
    signature = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    return {"ptx": compiled.asm["ptx"], "shared_bytes": compiled.metadata.shared, "signature": signature}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"lower": lower, "ptx": compile_ptx}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Triton prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = TASKS[request["task"]](request)
        except Exception:  # every failure is the answer to its request
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
