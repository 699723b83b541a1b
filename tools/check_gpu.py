"""Check the Triton kernels on this machine's NVIDIA GPU, for owners of cards on which they were never run.

Times NSA beside dense attention and fla, runs the tests that need a GPU, and writes both to
bench/results/local/check-CARD.json (schema: docs/results_files.md); docs/usage.md says where to send it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # and what follows needs the path above

from bench.report import LOCAL_RESULTS, environment, relative, write_json  # noqa: E402
from bench.results_file import read_results  # noqa: E402
from dispatch.device import absence  # noqa: E402

TIMES = ["bench/bench_paper.py", "--backend", "triton", "--seqlens", "8K,32K"]
TESTS = ["-m", "pytest", "-m", "cuda", "tests/ascend", "tests/nsa"]


def main(argv: list[str] | None = None, folder: Path = LOCAL_RESULTS) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    if reason := absence("cuda"):
        mend = "if the driver is too old for this build, TORCH_INDEX names an index of builds for its CUDA version"
        sys.exit(f"This check needs an NVIDIA GPU that PyTorch {torch.__version__} can use: {reason} ({mend})")
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    out, report = (folder / f"check-{card}.{ending}" for ending in ("json", "xml"))
    out.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
    statuses = {}
    for name, command in (("times", [*TIMES, "--out", str(out)]), ("tests", [*TESTS, f"--junitxml={report}"])):
        statuses[name] = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    found = {**environment(torch.device("cuda")), **read_results(out)}
    write_json(out, {**found, "statuses": statuses, "tests": outcomes(report) if report.exists() else None})
    print(f"{relative(out)} holds times and outcomes of tests; docs/usage.md says where to send it.")
    return int(any(statuses.values()))


def outcomes(report: Path) -> dict[str, Any]:
    """Number of tests that passed in pytest's report, numbers of skips by reason, and messages of failures by test."""
    passed, skipped, failed = 0, Counter[str](), {}
    for case in ElementTree.parse(report).iter("testcase"):
        messages = {child.tag: child.get("message", "") for child in case}
        if "skipped" in messages:
            skipped[messages["skipped"]] += 1
        elif "failure" in messages or "error" in messages:
            failed[f"{case.get('classname')}::{case.get('name')}"] = "\n".join(messages.values())
        else:
            passed += 1
    return {"passed": passed, "skipped": dict(skipped), "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
