"""tools/sanitize.py without a GPU: what it reads from compute-sanitizer, and that its cases reach every kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_classes import our_kernels
from tools import sanitize as tool

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "sanitize.py"


GATE = "kernel_cutlass_kernel_cute_kernelsgateGatedSum_object_at__tensorptrbf16_gmem_align16_o_64i64_div81_0"
LISTS = "kernel_cutlass_kernel_cute_kernelstransposed_listsTileBits_object_at__tensorptri32gmemo3i64i64i641_0"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16_0"
MEMCHECK = f"""\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at {GATE}+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f6510c00001 is out of bounds
=========     and is 2 bytes after the nearest allocation at 0x7f6510c00000 of size 4 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at {GATE}+0x160
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f6510c00005 is out of bounds
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
RACECHECK = f"""\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {LISTS}+0x90
=========     and Read access at {LISTS}+0x100 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def brief(log: tool.Log) -> list[tuple[str, bool, str]]:
    return [(finding.kernel, finding.ours, finding.what) for finding in log.findings]


def test_findings_have_their_kernels() -> None:
    log = tool.parse(MEMCHECK)
    assert brief(log) == [
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


def test_races() -> None:
    assert brief(tool.parse(RACECHECK)) == [("TileBits", True, "Error: Race reported between Write access")]


# Coverage


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What each case launches, in a process of its own, where no module of kernels was imported before."""
    folder = tmp_path_factory.mktemp("dry")
    environ = {**tool.kept_apart(None), "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, str(TOOL), "--child", "dry", "--results", str(folder / "results")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cases = map(json.loads, (folder / "results").read_text(encoding="utf-8").splitlines())
    return {case["case"]: set(case["launched"]) for case in cases}


@pytest.mark.full
@pytest.mark.cuda_extra
def test_cases_launch_every_kernel(launched: dict[str, set[str]]) -> None:
    assert list(launched) == list(tool.CASES)
    assert set().union(*launched.values()) == tool.every_form()


@pytest.mark.full
@pytest.mark.cuda_extra
def test_a_case_that_is_dropped_is_missed(launched: dict[str, set[str]]) -> None:
    outcome = tool.Outcome(launched=set().union(*(of for case, of in launched.items() if case != "tiles, many heads")))
    assert tool.missing(outcome) == ["attend.selected_backward.CombineSelectedDKV"]
    assert not tool.passes(outcome)


def test_forms_of_the_sources(tmp_path: Path) -> None:
    source = "class One:\n @compiled_once\n def compile(dim: int, packed: bool, *, near: bool = False): ...\n"
    source += "class Two:\n @compiled_once\n def compile(dim: int): ...\n @lru_cache\n def none(packed: bool): ...\n"
    (tmp_path / "cute_kernels").mkdir()
    (tmp_path / "cute_kernels" / "some.py").write_text(source, encoding="utf-8")
    flags = [f"some.One {flag}={value}" for flag in ("near", "packed") for value in (False, True)]
    assert sorted(tool.every_form(tmp_path)) == [*flags, "some.Two"]


# The outcome of a tool


def outcome_of(tmp_path: Path, text: str, *, error: str = "", done: bool = True) -> tool.Outcome:
    """Of one child that launched everything."""
    results, outcome = tmp_path / "results.json", tool.Outcome()
    line = {"case": "tiles", "seconds": 1.0, "launched": sorted(tool.every_form()), "error": error}
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
