#!/usr/bin/env python3
"""Leaves out instructions that order FlashAttention-4's Blackwell kernels and our Hopper ones, and writes what noticed.

    python tools/delete_orders.py [FILE]      default: bench/results/blackwell-executed.json, its key `deletions`

Runs on a CPU, for about ten minutes. Reasons that a run cannot tell are kept from the file, by kernel and instruction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cute.test_order_deletions import backward, fa4_case, forward, per_token_cases  # noqa: E402
from tests.support.ptx.mutations import Case, Deletion, delete_each  # noqa: E402

MOST = 240
"""Characters of what noticed a deletion."""


def cases() -> dict[str, Case]:
    found = {
        "FlashAttentionForwardSm100, D 64, bf16": fa4_case(forward),
        "FlashAttentionBackwardSm100, D 128, bf16": fa4_case(backward),
    }
    for products, warpgroups in (("wgmma", True), ("mma", False)):
        for name, case in per_token_cases(warpgroups).items():
            found[f"{name}, {products}, sm_90a"] = case
    return found


def row(of: Deletion, reasons: dict[tuple[str, str], str]) -> dict[str, object]:
    instruction = f"{of.at}: {of.instruction}"[:MOST]
    by_hand = "" if of.found or not of.executed else reasons.get((of.kernel, instruction), "")
    return {
        "kernel": of.kernel,
        "instruction": instruction,
        "executed": of.executed,
        "found": of.found,
        "by": of.by[:MOST],
        "reason": of.reason or by_hand,
    }


def main(path: Path) -> None:
    whole = json.loads(path.read_text()) if path.exists() else {}
    reasons = {}
    for old in whole.get("deletions", []):
        reasons[old["kernel"], old["instruction"]] = old["reason"]
    rows = []
    for kernel, case in cases().items():
        deletions = delete_each(kernel, case)
        executed = [x for x in deletions if x.executed]
        found = sum(x.found for x in executed)
        idle = sum(bool(x.reason) for x in executed)
        print(f"{kernel}: {len(executed)} of {len(deletions)} executed, {found} noticed, {idle} have nothing to order")
        rows += [row(x, reasons) for x in deletions]
    path.write_text(json.dumps({**whole, "deletions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results" / "blackwell-executed.json")
