"""Compile every CuTe kernel of ours and every FlashAttention-4 kernel that we call, without a GPU.

    a process per core, each for an architecture -> its share of the kernels that the calls of
    tests/support/kernel_calls.py launch -> a line each: size of the cubin, hash of its machine code, seconds

A case fails unless its cubin exists, is for the architecture, and reads no uniform register that nothing writes, which
some versions of ptxas do. Failures are repeated at the end; the exit status is 1 then. Hashes are of instructions and
constants alone, without the names of modules and classes. `--against LOG` compares them with those of an earlier log:
code that is the same after a change of the sources needs no GPU. Needs the extras `cuda` and `dev` (nvdisasm).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import itertools
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from cute_kernels.runtime.device import SMS_VARIABLE
from tests.support import kernel_calls

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4")
TARGETS = {"sm_90a": 132, "sm_100a": 148}  # Multiprocessors, which grids are chosen for, by architecture


class Case(NamedTuple):
    """A kernel and what it is compiled for; None: the kernel does not depend on it."""

    kernel: str  # Name of the class, or of the function in cute_kernels.fa4.kernels
    dim: int | None
    group: int | None  # G, query heads of a key/value head
    dtype: torch.dtype | None
    variant: str  # Further arguments that are compiled in; those that are None, False, 0 or empty are left out
    compile: Callable[[], bytes]  # Returns the cubin


class Result(NamedTuple):
    arch: str
    kernel: str
    dim: str
    group: str
    dtype: str
    variant: str
    cubin: int  # Bytes
    sha256: str  # First digits of the hash of the cubin's machine code (`code_of`)
    seconds: float
    error: str = ""

    @property
    def line(self) -> str:
        size = "FAILED" if self.error else str(self.cubin)
        return LINE.format(*self[:5], size, self.sha256, f"{self.seconds:.1f}", self.variant)


LINE = "{:8} {:21} {:>4} {:>4} {:9} {:>8} {:12} {:>6}  {}"
HEADER = LINE.format("arch", "kernel", "D", "G", "dtype", "bytes", "sha256", "s", "variant")


def case_of(kernel: Any) -> Case:
    """The case of a `jit.Kernel`, by the names of what its function compiles with."""
    build = kernel.build
    bound = inspect.signature(build).bind(*kernel.arguments, **kernel.keywords)
    bound.apply_defaults()
    values = dict(bound.arguments)
    if form := values.pop("form", None):  # of FlashAttention-4's kernels
        values |= vars(form)
        del values["arch"]
    dim, dtype, group = (values.pop(name, None) for name in ("dim", "dtype", "group"))
    if dim is None:
        dim = (values.get("dims") or (values.get("q_dim"),))[0]
    variant = ",".join(filter(None, (shown(key, value, dim, dtype) for key, value in values.items())))
    of_fa4 = build.__module__ == "cute_kernels.fa4.kernels"
    name = f"fa4.{build.__name__}" if of_fa4 else build.__qualname__.removesuffix(".compile")
    return Case(name, dim, group, dtype, variant or "-", lambda: kernel.compiled.__cubin__ or b"")


def shown(name: str, value: Any, dim: int | None, dtype: torch.dtype | None) -> str:
    """An argument, or nothing if it is None, False, 0 or empty. Of True, of dtype and of dim its name alone."""
    if value is True or (value == dtype and dtype) or ("dim" in name and value in (dim, (dim, dim))):
        return name
    if is_dataclass(value):
        return f"{name}({','.join(filter(None, (shown(*item, dim, dtype) for item in vars(value).items())))})"
    text = re.sub(r"\s|torch\.|cute_kernels\.fa4\.masks\._", "", str(value))
    if not value or set(re.findall(r"\w+", text)) <= {"False"}:
        return ""
    return f"{name}={text}".replace("True", "1").replace("False", "0")


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Few cases with every value of every kernel, and every pair of (D, G, dtype) of each source."""
    remaining = {case: covers(case) for case in cases}
    chosen = []
    while any(remaining.values()):
        chosen.append(max(remaining, key=lambda case: len(remaining[case])))
        covered = remaining.pop(chosen[-1])
        for goals in remaining.values():
            goals -= covered
    return chosen


def covers(case: Case) -> set[Hashable]:
    sizes = [("dim", case.dim), ("group", case.group), ("dtype", case.dtype)]
    values = {(case.kernel, *value) for value in [*sizes, ("variant", case.variant)]}
    source = case.kernel.partition(".")[0]  # FlashAttention-4's kernels share one
    return values | {(source, *pair) for pair in itertools.combinations(sizes, 2)}


def try_case(arch: str, case: Case) -> Result:
    start = time.monotonic()
    cubin, error = b"", ""
    try:
        cubin = case.compile()
        error = cubin_problem(arch, cubin)
    except Exception as exception:
        traceback.print_exc()
        error = f"{type(exception).__name__}: {exception}"
    sizes = (case.dim, case.group, case.dtype)
    dim, group, dtype = ("-" if size is None else str(size).removeprefix("torch.") for size in sizes)
    what = (arch, case.kernel, dim, group, dtype, case.variant)
    digest = hashlib.sha256(code_of(cubin)).hexdigest()
    return Result(*what, len(cubin), digest[:12], time.monotonic() - start, error)


def code_of(cubin: bytes) -> bytes:
    """Instructions and constants of a cubin, a 64-bit ELF file: sections .text.KERNEL and .nv.constant*, in order."""
    if not cubin.startswith(b"\x7fELF\x02"):
        return cubin
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found = []
    for name_at, _, _, _, offset, length in headers:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)]
        if name.startswith((b".text.", b".nv.constant")):
            found.append(name[: name.index(b".", 1)] + cubin[offset : offset + length])
    return b"".join(found)


def cubin_problem(arch: str, cubin: bytes) -> str:
    if not cubin:
        return "the cubin is empty"
    if arch_of(cubin) != arch:
        return f"the cubin is for {arch_of(cubin)}, not for {arch}"
    unwritten = sorted(unwritten_registers(disassembled(cubin)))
    return f"its code reads {', '.join(unwritten)}, which nothing writes" if unwritten else ""


def disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten_registers(code: str) -> set[str]:
    """Uniform registers that instructions of a disassembly name as operands and none names as its result.

    A result is a bare register in front of all operands but predicates. Of operands of several registers, the first;
    of wgmma's descriptors none, whose first two are not read where A is in registers.
    """
    written, read = set(), set()
    for operation, operands in INSTRUCTION.findall(code):
        result = RESULT.match(operands)
        if result:
            bits = 64 if ".WIDE" in operation else max([32, *map(int, re.findall(r"\.(64|128|256)\b", operation))])
            written |= {f"UR{int(result[1]) + i}" for i in range(bits // 32)}
            operands = operands[result.end() :]
        read |= {*re.findall(r"(?<!gdesc\[)\bUR\d+", operands)}
    return read - written


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
RESULT = re.compile(r"(?:!?U?P[\dT],\s*)*UR(\d+)(?:,|\s*$)")


def arch_of(cubin: bytes) -> str:
    """Architecture that a cubin was assembled for."""
    if options := re.search(rb"-arch (sm_\w+) ", cubin):
        return options[1].decode()
    # CUDA 12 writes no options for sm_90a; its ELF flags are the number, and 0x800 for an "a"
    (flags,) = struct.unpack_from("<I", cubin.ljust(64, b"\0"), 48)
    return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"


def compile_here(arch: str, matrix: str, kernels: Sequence[str] | None, share: int, shares: int) -> None:
    """The child's part: a line of JSON for each case of its share, and nothing else where the parent reads."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no result
    cases = (case for case in map(case_of, kernel_calls.kernels()) if kernels is None or case.kernel in kernels)
    for case in itertools.islice(pairwise(cases) if matrix == "pairwise" else cases, share, None, shares):
        print(json.dumps(try_case(arch, case)), file=lines, flush=True)


def child_environment(arch: str, dump: str) -> dict[str, str]:
    """Variables that must be set before the compilers are imported."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("NSA_KERNELS_")},
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": dump,
        "FLASH_ATTENTION_ARCH": arch.removesuffix("a"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "NSA_KERNELS_JIT_CACHE": "0",
        SMS_VARIABLE: str(TARGETS[arch]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def compile_for(arch: str, matrix: str, kernels: Sequence[str] | None, share: int, shares: int) -> list[Result]:
    """Runs a child of an architecture and prints its results as they come."""
    results: list[Result] = []
    command = [sys.executable, __file__, "--share", f"{share}/{shares}", "--arch", arch, "--matrix", matrix]
    if kernels is not None:
        command += ["--kernels", ",".join(kernels)]
    with tempfile.TemporaryDirectory() as dump:
        environ = child_environment(arch, dump)
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                results.append(Result(*json.loads(line)))
                print(f"{results[-1].line}\n", end="", flush=True)  # one write: the other child's lines come between
    if child.returncode != 0 or not (results or kernels or share):
        error = f"its process ended with exit status {child.returncode} after {len(results)} cases"
        results.append(Result(arch, "-", "-", "-", "-", "-", 0, "-", 0.0, error))
    return results


def summary(results: Sequence[Result]) -> list[str]:
    lines = []
    for arch in dict.fromkeys(result.arch for result in results):
        mine = [result for result in results if result.arch == arch]
        good = sum(not result.error for result in mine)
        lines.append(f"{arch}: {good} of {len(mine)} compiled, {sum(result.seconds for result in mine):.0f} s")
    for result in results:
        if result.error:
            lines += ["", result.line, *(f"    {line}" for line in result.error.splitlines())]
    return lines


def comparison(results: Iterable[Result], log: str) -> list[str]:
    """What became of the machine code in an earlier log, also compiled for a part of its cases."""
    before = {result[:6]: result.sha256 for result in results_of(log)}
    kinds: dict[str, list[Result]] = {"the same": [], "other code": [], "new": []}
    for result in results:
        old = before.get(result[:6])
        kinds["new" if old is None else "the same" if old == result.sha256 else "other code"].append(result)
    counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in kinds.items())
    return [f"against the earlier log: {counts}", *(result.line for result in kinds["other code"])]


def results_of(log: str) -> list[Result]:
    results = []
    for line in log.splitlines():
        fields = line.split()
        if len(fields) == len(HEADER.split()) and fields[0] in TARGETS:
            *what, size, sha256, seconds, variant = fields
            cubin, error = (0, "as the log says") if size == "FAILED" else (int(size), "")
            results.append(Result(*what, variant, cubin, sha256, float(seconds), error))
    return results


def replaced(old: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """The old results with the new ones in place of those of their kernels, those of further kernels at the end."""
    of_kernel: dict[tuple[str, ...], list[Result]] = {}
    for result in new:
        of_kernel.setdefault(result[:2], []).append(result)
    results: list[Result] = []
    kernels = {*of_kernel}
    for result in old:  # the first line of a kernel gives way to all its new ones
        results += of_kernel.pop(result[:2], []) if result[:2] in kernels else [result]
    return [*results, *itertools.chain(*of_kernel.values())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every CuTe kernel without a GPU.")
    parser.add_argument("--arch", choices=TARGETS, help="default: both")
    parser.add_argument("--matrix", choices=("full", "pairwise"), default="full", help="pairwise: about a third")
    parser.add_argument("--kernels", help="names by commas: these alone; with --log the others' lines stay as they are")
    parser.add_argument("--log", type=Path, help="also write the table, with versions, to this file")
    parser.add_argument("--against", type=Path, metavar="LOG", help="list kernels whose code differs from this log's")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    archs = [args.arch] if args.arch else [*TARGETS]
    kernels = args.kernels.split(",") if args.kernels else None
    if args.share:
        compile_here(args.arch, args.matrix, kernels, *map(int, args.share.split("/")))
        return 0

    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])
    title = f"{versions}; matrix: {args.matrix}"
    log = args.log.read_text(encoding="utf-8") if args.log and kernels else None
    if log is not None and (log.partition("\n")[0] != title or "FAILED" in log):
        parser.error(f"--kernels changes a log without failures, of {title}")
    earlier = args.against.read_text(encoding="utf-8") if args.against else None
    print(versions, HEADER, sep="\n", flush=True)
    shares = max(1, (os.cpu_count() or 1) // len(archs))
    with ThreadPoolExecutor(shares * len(archs)) as pool:
        parts = [
            [pool.submit(compile_for, arch, args.matrix, kernels, share, shares) for share in range(shares)]
            for arch in archs
        ]
        turns = [turn for part in parts for turn in itertools.zip_longest(*(child.result() for child in part))]
    results = [result for turn in turns for result in turn if result is not None]
    if missing := sorted(set(kernels or ()) - {result.kernel for result in results}):
        parser.error(f"--kernels: no kernel is called {', '.join(missing)}")
    end = summary(results)
    if earlier is not None:
        end += ["", *comparison(results, earlier)]
    print("", *end, sep="\n")
    failed = any(result.error for result in results)
    if log is not None:
        results = replaced(results_of(log), results)
        end = summary(results)
    if args.log and (log is None or not failed):
        table = [title, "", HEADER, *(result.line for result in results), "", *end]
        args.log.write_text("\n".join(table) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
