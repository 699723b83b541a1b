"""Every CuTe kernel compiles for every architecture, without a GPU: tools/compile_all.py and what it finds."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import cases
from tests.support.helpers import run_child
from tests.support.kernel_classes import every_form, our_kernels
from tools import compile_all as tool

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "compile_all.py"


def fa4_kernels() -> set[str]:
    """Functions of cute_kernels.fa4.kernels that compile a kernel."""
    tree = ast.parse((ROOT / "cute_kernels" / "fa4/kernels.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f"fa4.{node.name}" for node in functions if "compiled_once" in map(ast.unparse, node.decorator_list)}


def case(variant: str = "plain", cubin: bytes = b"") -> tool.Case:
    return tool.Case("Kernel", 64, None, torch.float16, variant, lambda: cubin)


@pytest.fixture(autouse=True)
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins of these tests are no ELF files."""
    monkeypatch.setattr(tool, "disassembled", lambda _: "")


FOUND = """
import json
import torch
from tests.support import kernel_calls
from tools import compile_all, sanitize

kernel_calls.DIMS, kernel_calls.DTYPES = (64,), (kernel_calls.VARIED[64],)
kernels, launched = kernel_calls.kernels(), sanitize.Launched(dry=True)
for kernel in kernels:
    launched.launch(kernel, ())
cases = [compile_all.case_of(kernel)[:-1] for kernel in kernels]
print(json.dumps({"names": [x[0] for x in cases], "same": len(cases) - len({*cases}), "forms": [*launched.forms]}))
"""
"""For calls with one D and dtype: names of kernels, how many cases cannot be told apart, and forms by sanitize.py."""


@pytest.mark.cuda_extra
@pytest.mark.parametrize("arch", ["sm_90a", *cases.rest("sm_100a")])
def test_every_kernel_is_in_the_matrix(arch: str, tmp_path: Path) -> None:
    """And with each flag on and off, of which some are for one architecture."""
    found = json.loads(run_child(FOUND, tool.child_environment(arch, str(tmp_path))))
    assert set(found["names"]) == our_kernels(arch) | fa4_kernels()
    assert found["same"] == 0
    without = {form for form in every_form() if form.endswith((" warpgroups=False", " use_wgmma=False"))}
    if arch == "sm_90a":
        assert every_form() ^ {*found["forms"]} == without
    else:
        assert without <= {*found["forms"]}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cuda_extra
@pytest.mark.parametrize("arch", tool.TARGETS)
def test_every_kernel_has_a_cubin(arch: str) -> None:
    """Tests that interpret kernels, most of them for sm_90a, compile cubins beside, and fail where that fails."""
    command = [sys.executable, str(TOOL), "--arch", arch, "--matrix", "pairwise"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(f"{arch} ")]
    sizes: dict[str, list[int]] = {}
    for _, kernel, _, _, _, size, *_ in rows:
        sizes.setdefault(kernel, []).append(int(size))
    assert set(sizes) == our_kernels(arch) | fa4_kernels()
    assert all(min(of_kernel) > 0 for of_kernel in sizes.values())


@pytest.mark.parametrize(
    ("cubin", "error"),
    [
        (b"\x7fELF -O 3 -arch sm_90a ", ""),
        (b"", "the cubin is empty"),
        (b"\x7fELF -O 3 -arch sm_90 ", "the cubin is for sm_90, not for sm_90a"),
        (b"\x7fELF -O 3 -arch sm_100a ", "the cubin is for sm_100a, not for sm_90a"),
        (b"\x7fELF".ljust(48, b"\0") + b"\x5a\x0d\x5a\0", ""),  # by CUDA 12's ptxas
        (b"\x7fELF".ljust(48, b"\0") + b"\x5a\x05\x5a\0", "the cubin is for sm_90, not for sm_90a"),
    ],
)
def test_cubin_must_be_for_the_architecture(cubin: bytes, error: str) -> None:
    result = tool.try_case("sm_90a", case(cubin=cubin))
    assert (result.error, result.cubin) == (error, len(cubin))
    assert result.sha256 == hashlib.sha256(cubin).hexdigest()[:12]
    assert result.line.split()[6] == result.sha256


WRITTEN = """
        /*0040*/                   ULEA UR8, UR9, 0x400, 0x18 ;
        /*0050*/                   S2UR UR9, SR_CgaCtaId ;
        /*0060*/              @!P0 R2UR.OR P1, UR10, R4 ;
        /*0070*/                   ULDC.64 UR6, c[0x0][0x2c0] ;
        /*0080*/                   UIADD3 UR4, UP0, UR6, UR7, URZ ;
        /*0090*/              @UP0 UMOV UR5, UR10 ;
        /*00a0*/                   UISETP.GT.AND UP0, UPT, UR8, UR9, UPT ;
"""


@pytest.mark.parametrize(
    ("line", "unwritten"),
    [
        ("LDGSTS.E.BYPASS.LTC128B.128 [R123+UR4+0x800], desc[UR5][R26.64] ;", set()),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R123+UR0+0x800], desc[UR1][R32.64] ;", {"UR0", "UR1"}),
        ("@P5 LDGSTS.E.LTC128B.128 [R124], desc[UR14][R4.64] ;", {"UR14"}),
        ("IMAD R2, R8, UR7, R6 ;", set()),
        ("IMAD R2, R8, UR11, R6 ;", {"UR11"}),
        ("UIADD3 UR4, UR4, UR12, URZ ;", {"UR12"}),
        ("UIMAD.WIDE.U32 UR12, UR4, UR5, URZ ;", set()),
        ("UTMALDG.2D [UR12], [UR4] ;", {"UR12"}),
        ("HGMMA.64x192x16.F32.BF16 R24, R128, gdesc[UR12], R24 ;", set()),
        ("EXIT ;", set()),
    ],
)
def test_code_reads_registers_that_it_writes(line: str, unwritten: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"{WRITTEN}        /*10b0*/              {line}"
    assert tool.unwritten_registers(code) == unwritten
    monkeypatch.setattr(tool, "disassembled", lambda _: code)
    error = f"its code reads {', '.join(sorted(unwritten))}, which nothing writes" if unwritten else ""
    assert tool.try_case("sm_90a", case(cubin=b"-arch sm_90a ")).error == error


def test_failures_are_listed_and_logs_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = str(tmp_path / "log")

    def run(option: str, *cases: tool.Case, status: int = 0) -> str:
        def compile_for(arch: str, matrix: str, kernels: None, share: int, shares: int) -> list[tool.Result]:
            assert shares == 3
            return [tool.try_case(arch, each) for each in cases[share::shares]]

        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        monkeypatch.setattr(tool, "compile_for", compile_for)
        assert tool.main(["--arch", "sm_90a", option, log]) == status
        return capsys.readouterr().out

    def compiled(**cubins: bytes) -> list[tool.Case]:
        return [case(variant, cubin=b"-arch sm_90a " + cubin) for variant, cubin in cubins.items()]

    def break_down() -> bytes:
        raise ValueError("no such layout")

    for text in (run("--log", case()._replace(compile=break_down), status=1), Path(log).read_text(encoding="utf-8")):
        assert "FAILED" in text
        assert "sm_90a: 0 of 1 compiled" in text
        assert text.endswith("ValueError: no such layout\n")
    assert "against" not in run("--log", *compiled(a=b"1", b=b"1", gone=b"1"))
    *_, counts, changed = run("--against", *compiled(a=b"1", b=b"2", c=b"3")).splitlines()
    assert counts == "against the earlier log: 1 the same, 1 other code, 1 new"
    assert (changed.split()[0], changed.split()[-1]) == ("sm_90a", "b")
