"""tools/sanitize.py without a GPU: what it reads from compute-sanitizer, and that its cases reach every kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_calls import CASES
from tests.support.kernel_classes import every_form, our_kernels
from tools import sanitize as tool

TOOL = Path(tool.__file__)
GATE = "kernel_cutlass_kernel_cute_kernelsgateGatedSum_object_at__tensorptrbf16_gmem_align16_o_64i64_div81_0"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16_0"
MEMCHECK = f"""\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at {GATE}+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ write of size 4 bytes
=========     at {GATE}+0x160
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 16 bytes
=========     at {FA4}+0x2f0
=========     by thread (5,0,0) in block (0,0,0)
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float>>(int)+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 4 errors
"""


def test_findings_have_their_kernels() -> None:
    log = tool.parse(MEMCHECK)
    assert [(finding.kernel, finding.ours, finding.what) for finding in log.findings] == [
        ("GatedSum", True, "Invalid __global__ write of size 4 bytes"),
        ("GatedSum", True, "Invalid __global__ write of size 4 bytes"),
        ("FlashAttentionForwardSm90", False, "Invalid __global__ read of size 16 bytes"),
        (
            "void at::native::vectorized_elementwise_kernel",
            False,
            "Uninitialized __global__ memory read of size 4 bytes",
        ),
    ]
    assert (log.summaries, log.messages, log.untold) == (["ERROR SUMMARY: 4 errors"], [], 0)
    assert list(tool.listed(log.findings))[:2] == [
        "    2 x GatedSum: Invalid __global__ write of size 4 bytes; one of them:",
        "        Invalid __global__ write of size 4 bytes",
    ]


@pytest.mark.full
@pytest.mark.cuda_extra
def test_cases_launch_every_kernel(tmp_path: Path) -> None:
    """In a process of their own, where no module of kernels was imported before."""
    environ = {**tool.kept_apart(tmp_path / "cache"), "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, str(TOOL), "--child", "dry", "--results", str(tmp_path / "results")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launched = [json.loads(line) for line in (tmp_path / "results").read_text(encoding="utf-8").splitlines()]
    assert [case["case"] for case in launched] == [*CASES]
    assert {form for case in launched for form in case["launched"]} == every_form()


# The outcome of a tool


def outcome_of(tmp_path: Path, text: str, *, error: str = "", done: bool = True) -> tool.Outcome:
    """Of one child that launched everything."""
    results, outcome = tmp_path / "results.json", tool.Outcome()
    line = {"case": "tiles", "seconds": 1.0, "launched": sorted(every_form()), "error": error}
    results.write_text(json.dumps(line) + "\n" if done else "", encoding="utf-8")
    outcome.add(["tiles"], results, "what the child printed", tool.parse(text))
    return outcome


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "how", "problem"),
    [
        (CLEAN, {"error": "RuntimeError: launch failed"}, "tiles: RuntimeError: launch failed"),
        (CLEAN, {"done": False}, "tiles: the process ended before this was done"),
        ("========= COMPUTE-SANITIZER\n", {}, "tiles: the tool ended without a summary"),
        (CLEAN.replace("0 errors", "7 errors"), {}, "tiles: 7 findings were not printed"),
        (
            f"========= Warning: Detected overflow of barriers\n{CLEAN}",
            {},
            "tiles: Warning: Detected overflow of barriers",
        ),
    ],
)
def test_whatever_may_hide_a_finding_fails(tmp_path: Path, text: str, how: dict[str, object], problem: str) -> None:
    outcome = outcome_of(tmp_path, text, **how)  # type: ignore[arg-type]
    assert outcome.problems[0].splitlines()[0] == problem
    assert not tool.passes(outcome)


def test_planted_fault_must_be_found(tmp_path: Path) -> None:
    found = MEMCHECK.replace("gateGatedSum", "compressBlockMean")
    for text, problems in ((found, []), (MEMCHECK, ["the planted fault was not found"])):
        outcome = tool.Outcome()
        outcome.add([tool.PLANTED], tmp_path / "none", "", tool.parse(text))
        assert [problem.strip() for problem in outcome.problems] == problems
        assert outcome.findings(ours=True) == []
    assert tool.FAULTY in our_kernels()
