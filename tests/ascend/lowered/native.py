"""Linalg to a shared object, by MLIR and LLVM 19: mlir-opt, mlir-translate, opt, llc, cc."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.ascend.lowered import toolchain
from tests.ascend.lowered.children import ProofError

RUNTIME = Path(__file__).with_name("native.c")
PASSES = (
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-vector-to-llvm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


@dataclass(frozen=True)
class Native:
    library: Path
    function: str
    kinds: tuple[str, ...]
    """One of each parameter: "memref", or a scalar's type, such as "i32"."""


@functools.cache
def instructions() -> tuple[str, ...]:
    """F16C where the CPU has it: without, a conversion of fp16 is a call, and fp16 kernels take ten times as long."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return ("-mattr=+f16c",) if "f16c" in flags else ()


@functools.cache
def build(linalg: str, what: str) -> Native:
    """Compile, or take from the cache; `what` names the kernel in errors."""
    text = re.sub(r"^.*annotation\.mark.*\n", "", linalg, flags=re.MULTILINE)
    head = re.search(r"func\.func @(\w+)\((.*?)\) attributes", text)
    if head is None:
        raise ProofError(f"build {what}: no function in its Linalg")
    function, parameters = head.groups()
    types = re.findall(r"%arg\d+: (\w+)", parameters)
    content = "\0".join([text, RUNTIME.read_text(encoding="utf-8"), *PASSES, *instructions(), toolchain.version()])
    library = toolchain.CACHE / "native" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        toolchain.write_atomically(library, compile_library(text, what))
    return Native(library, function, tuple(types))


def compile_library(text: str, what: str) -> bytes:
    runtime = compiled_runtime()
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "kernel"
        source, lowered, llvm, bitcode, obj, library = (
            str(stem.with_suffix(suffix)) for suffix in (".mlir", ".llvm.mlir", ".ll", ".bc", ".o", ".so")
        )
        Path(source).write_text(text, encoding="utf-8")
        tool = toolchain.llvm_tool
        for command in (
            [tool("mlir-opt"), source, *PASSES, "-o", lowered],
            [tool("mlir-translate"), "--mlir-to-llvmir", lowered, "-o", llvm],
            [tool("opt"), "-O2", llvm, "-o", bitcode],
            [tool("llc"), "-O2", *instructions(), "-relocation-model=pic", "-filetype=obj", bitcode, "-o", obj],
            ["cc", "-shared", str(runtime), obj, "-lm", "-o", library],
        ):
            run(command, what)
        return Path(library).read_bytes()


@functools.cache
def compiled_runtime() -> Path:
    """The object of native.c, which every library holds."""
    content = "\0".join([RUNTIME.read_text(encoding="utf-8"), toolchain.version()])
    path = toolchain.CACHE / "native" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.o"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "runtime.o"
            run(["cc", "-O2", "-fPIC", "-c", str(RUNTIME), "-o", str(made)], RUNTIME.name)
            toolchain.write_atomically(path, made.read_bytes())
    return path


def run(command: list[str], what: str) -> None:
    environment = None if command[0] == "cc" else toolchain.llvm_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProofError(f"build {what}: {Path(command[0]).name} failed\n{done.stderr[:4000]}")
