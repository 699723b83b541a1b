"""Execute every kernel that a Blackwell GPU runs, instruction by instruction on a CPU -> OUT (docs/blackwell.md).

    cases of tests/support/blackwell_cases.py, several processes at once: errors against fp64, findings of races
    deletions of tests/ptx/mutations.py: the instructions that order a kernel, one left out at a time

The rows of a case are written as soon as it is done, with their commit: --resume continues an interrupted run, and
--match runs some again ("deletions": only those). The exit status is 1 if a result is beyond its budget, a case raised,
a finding is unknown, or a kernel of ours was not executed. Needs the extras `cuda` and `dev`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.progress import track

from bench.commit import commit
from bench.report import RESULTS, command_line, environment, relative, write_json

OUT = RESULTS / "blackwell-executed.json"
BAR = 0.85  # Share of deletions, if executed and not seen to change nothing, that must be found
MOST = 240  # Characters of an instruction, and of what noticed a deletion
Row = dict[str, Any]


def all_tasks() -> dict[str, Callable[[], list[Row]]]:
    """Functions that return rows, by name of a case or of a group of deletions."""
    from tests.support import blackwell_cases as blackwell  # late, since it imports compilers
    from tests.support import deletion_cases

    table = enumerate(blackwell.table())
    cases = {f"{case.name}, {schedule}": partial(run_case, i) for i, (case, schedule, _) in table}
    return cases | {f"deletions, {group}": partial(run_deletions, group) for group in deletion_cases.GROUPS}


def run_case(index: int) -> list[Row]:
    from tests.support import blackwell_cases as blackwell

    case, schedule, _ = blackwell.table()[index]
    execution = blackwell.execute(case, schedule)
    worst = execution.worst
    row = {
        "case": case.name,
        "schedule": schedule,
        "kernels": execution.kernels,
        "forms": execution.forms,
        **case.facts,
        "result": worst.name,
        "error": worst.error,
        "budget": worst.budget,
        "seconds": round(execution.seconds, 2),
        "findings": execution.findings,
        "commit": commit(),
    }
    return [row]


def run_deletions(group: str) -> list[Row]:
    from tests.ptx.mutations import delete_each
    from tests.support import deletion_cases

    found = [of for named in deletion_cases.named_cases(group).items() for of in delete_each(*named)]
    rows = [{"group": group, **of._asdict(), "by": of.by[:MOST], "commit": commit()} for of in found]
    for row in rows:
        row["instruction"] = f"{row.pop('at')}: {row['instruction']}"[:MOST]
    return rows


def read_rows(out: Path) -> dict[str, list[Row]]:
    """Rows that OUT holds, by the names of tasks."""
    rows: dict[str, list[Row]] = {}
    content = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for row in itertools.chain(*(content.get(name, []) for name in ("cases", "deletions"))):
        name = f"{row['case']}, {row['schedule']}" if "case" in row else f"deletions, {row['group']}"
        rows.setdefault(name, []).append(row)
    return rows


def keep_reasons(rows: list[Row], earlier: list[Row]) -> None:
    """Give deletions that nothing noticed the reasons that were written by hand into earlier rows."""
    reasons = {(row["kernel"], row["instruction"]): row["reason"] for row in earlier if not row.get("found", True)}
    for row in rows:
        if not row.get("found", True):
            row["reason"] = row["reason"] or reasons.get((row["kernel"], row["instruction"]), "")


def listed(rows: dict[str, list[Row]], tasks: Iterable[str]) -> dict[str, list[Row]]:
    """Rows of these tasks, in their order: cases, and deletions."""
    every = [row for name in tasks for row in rows.get(name, [])]
    return {"cases": [row for row in every if "case" in row], "deletions": [row for row in every if "case" not in row]}


def problems_of(cases: Sequence[Row], deletions: Sequence[Row], *, whole: bool = False) -> Iterator[str]:
    """Problems of rows. Args: `whole`: True if every form of a kernel must be among them."""
    from tests.support import blackwell_cases as blackwell

    for row in cases:
        name = f"{row['case']}, {row['schedule']}"
        if not row["error"] <= row["budget"]:
            yield f"{name}: the error of {row['result']} is {row['error']:.3e}, its budget {row['budget']:.3e}"
        yield from (f"{name}: {found}" for found in blackwell.unknown(row["findings"]))
    for kernel in dict.fromkeys(row["kernel"] for row in deletions):
        found = [row["found"] for row in deletions if row["kernel"] == kernel and row["executed"] and not row["reason"]]
        if sum(found) < BAR * len(found):
            yield f"{kernel}: {sum(found)} of {len(found)} deletions were found"
    if whole:
        yield from (f"{form} was not executed" for form in blackwell.missing(f for row in cases for f in row["forms"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute every kernel of Blackwell on a CPU.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON file (default: {relative(OUT)})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--match", default="", help="only cases and deletions whose name holds this")
    parser.add_argument("--resume", action="store_true", help="run only what OUT does not hold")
    args = parser.parse_args(argv)
    tasks = all_tasks()
    rows, chosen = read_rows(args.out), [name for name in tasks if args.match in name]
    if not chosen:
        parser.error(f"--match {args.match!r} fits none of {len(tasks)} cases and deletions")
    if args.resume:
        chosen = [name for name in chosen if name not in rows]
    problems = []
    os.environ["PYTHONWARNINGS"] = "ignore"
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), torch.set_num_threads, (1,))
    facts = {**environment(torch.device("cpu")), "device": "interpreted", "command": command_line(argv)}
    with pool:
        futures = {pool.submit(tasks[name]): name for name in chosen}
        for future in track(as_completed(futures), "cases", total=len(futures)):
            name = futures[future]
            if error := future.exception():
                problems.append(f"{name}: {type(error).__name__}: {error}")
            else:
                keep_reasons(future.result(), rows.get(name, []))
                rows[name] = future.result()
                write_json(args.out, {**facts, **listed(rows, tasks)})
    cases, deletions = listed(rows, tasks).values()
    problems += problems_of(cases, deletions, whole=not args.match)
    print(*(problems or [f"{len(cases)} cases, each within its budget"]), sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
