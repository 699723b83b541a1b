"""tools/sanitize.py without a GPU: what it reads from compute-sanitizer, and that its cases reach every kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.kernel_classes import every_form, our_kernels
from tools import sanitize as tool

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


def outcome_of(text: str, *, error: str = "", done: bool = True) -> tool.Outcome:
    """Outcome of one child that launched everything."""
    outcome = tool.Outcome()
    line = {"case": "tiles", "launched": sorted(every_form()), "error": error}
    outcome.add(["tiles"], [line] * done, "what the child printed", tool.parse(text))
    return outcome


def test_findings_have_their_kernels() -> None:
    outcome = outcome_of(MEMCHECK)
    of_torch = "void at::native::vectorized_elementwise_kernel"
    assert [kernel for kernel, _ in outcome.findings_of(ours=True)] == ["GatedSum", "GatedSum"]
    assert [kernel for kernel, _ in outcome.findings_of(ours=False)] == ["FlashAttentionForwardSm90", of_torch]
    assert outcome.problems == []
    assert not outcome.passes
    assert list(tool.listed(outcome.findings))[:2] == [
        "    2 x GatedSum; one of them:",
        "        Invalid __global__ write of size 4 bytes",
    ]


@pytest.mark.full
@pytest.mark.cuda_extra
def test_cases_launch_every_kernel() -> None:
    """In a process of its own, where no module of kernels was imported before."""
    done = subprocess.run([sys.executable, tool.__file__, "--dry"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(every_form())} forms, none missed\n"), done.stderr


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_a_run_without_findings_passes_if_every_form_was_launched() -> None:
    outcome = outcome_of(CLEAN)
    assert outcome.passes
    outcome.launched.pop()
    assert not outcome.passes


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
def test_whatever_may_hide_a_finding_fails(text: str, how: dict[str, object], problem: str) -> None:
    outcome = outcome_of(text, **how)  # type: ignore[arg-type]
    assert outcome.problems[0].splitlines()[0] == problem
    assert not outcome.passes


def test_planted_fault_must_be_found() -> None:
    found = MEMCHECK.replace("gateGatedSum", "compressBlockMean")
    for text, problems in ((found, []), (MEMCHECK, ["the planted fault was not found"])):
        outcome = tool.Outcome()
        outcome.add([tool.PLANTED], [], "", tool.parse(text))
        assert [problem.strip() for problem in outcome.failures] == problems
        assert outcome.findings == []
    assert tool.FAULTY in our_kernels()
