#!/usr/bin/env python3
"""Executes every kernel that a Blackwell GPU runs, instruction by instruction on a CPU -> OUT (docs/blackwell.md).

    cases of tests/support/blackwell_cases.py, each in one of some processes: errors against fp64, findings of races
    deletions of tests/ptx/mutations.py: the instructions that order a kernel, one left out at a time. Reasons
        why a deletion changes nothing that a run cannot tell are kept from OUT, by kernel and instruction

OUT is written whenever a case is done: its row takes the place of the earlier one, and holds the commit that was run.
So an interrupted run goes on with --resume, and --match runs some again: "deletions" all of those, and no case.

The exit status is 1 if a result is beyond its budget, a case raised, a finding is not understood, or a kernel of ours
was not executed. Needs no GPU, and the packages of the `cuda` and `dev` extras.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.commit import commit
from bench.report import RESULTS, command_line, environment, relative, write_json

OUT = RESULTS / "blackwell-executed.json"
BAR = 0.85  # Share of deletions, if executed and not seen to change nothing, that must be found
MOST = 240  # Characters of an instruction, and of what noticed a deletion


class Task(NamedTuple):
    name: str
    function: Callable[[Any], Any]
    argument: Any


def all_tasks() -> list[Task]:
    from tests.support import blackwell_cases as blackwell  # which imports compilers
    from tests.support import deletion_cases

    table = enumerate(blackwell.table())
    cases = [Task(f"{case.name}, {schedule}", run_case, i) for i, (case, schedule, _) in table]
    return cases + [Task(f"deletions, {group}", run_deletions, group) for group in deletion_cases.GROUPS]


def prepare_process() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run_case(index: int) -> dict[str, Any]:
    """A row of the table."""
    from tests.support import blackwell_cases as blackwell

    case, schedule, _ = blackwell.table()[index]
    execution = blackwell.execute(case, schedule)
    worst = execution.worst
    return {
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


def run_deletions(group: str) -> list[dict[str, Any]]:
    """Of the kernels of a group."""
    from tests.ptx.mutations import delete_each
    from tests.support import deletion_cases

    found = [of for named in deletion_cases.named_cases(group).items() for of in delete_each(*named)]
    rows = [{"group": group, **of._asdict(), "by": of.by[:MOST], "commit": commit()} for of in found]
    for row in rows:
        row["instruction"] = f"{row.pop('at')}: {row['instruction']}"[:MOST]
    return rows


class Record:
    """What OUT holds: rows by the names of tasks."""

    def __init__(self, out: Path) -> None:
        content = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"cases": [], "deletions": []}
        self.out = out
        self.cases = {f"{row['case']}, {row['schedule']}": row for row in content["cases"]}
        self.deletions: dict[str, list[dict[str, Any]]] = {}
        for row in content["deletions"]:
            self.deletions.setdefault(f"deletions, {row['group']}", []).append(row)

    def take(self, task: Task, result: Any) -> None:
        """Of deletions that nothing noticed, reasons that were written by hand are kept."""
        if task.function is run_case:
            self.cases[task.name] = result
            return
        earlier = self.deletions.get(task.name, [])
        reasons = {(row["kernel"], row["instruction"]): row["reason"] for row in earlier if not row["found"]}
        for row in result:
            if not row["found"]:
                row["reason"] = row["reason"] or reasons.get((row["kernel"], row["instruction"]), "")
        self.deletions[task.name] = result

    def rows(self, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Of these tasks, in their order: cases, and deletions."""
        cases = [self.cases[task.name] for task in tasks if task.name in self.cases]
        return cases, [row for task in tasks for row in self.deletions.get(task.name, [])]

    def write(self, tasks: Sequence[Task], command: str) -> None:
        cases, deletions = self.rows(tasks)
        facts = {**environment(torch.device("cpu")), "device": "interpreted", "command": command}
        write_json(self.out, {**facts, "cases": cases, "deletions": deletions})


def problems_of(cases: Sequence[dict[str, Any]], deletions: Sequence[dict[str, Any]]) -> Iterator[str]:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute every kernel of Blackwell on a CPU.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON file (default: {relative(OUT)})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--match", default="", help="only cases and deletions whose name holds this")
    parser.add_argument("--resume", action="store_true", help="run only what OUT does not hold")
    args = parser.parse_args(argv)
    tasks = all_tasks()
    chosen = [task for task in tasks if args.match in task.name]
    if not chosen:
        parser.error(f"--match {args.match!r} fits none of {len(tasks)} cases and deletions")
    record = Record(args.out)
    if args.resume:
        chosen = [task for task in chosen if task.name not in {*record.cases, *record.deletions}]
    problems = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), prepare_process)
    with pool, Progress(*columns) as progress:
        bar = progress.add_task("", total=len(chosen))
        futures = {pool.submit(task.function, task.argument): task for task in chosen}
        for future in as_completed(futures):
            task = futures[future]
            if error := future.exception():
                problems.append(f"{task.name}: {type(error).__name__}: {error}")
            else:
                record.take(task, future.result())
                record.write(tasks, command_line(argv))
            progress.update(bar, advance=1, description=task.name[:60])
    cases, deletions = record.rows(tasks)
    problems += problems_of(cases, deletions)
    if not args.match:
        from tests.support import blackwell_cases as blackwell

        problems += [f"{form} was not executed" for form in blackwell.missing(f for row in cases for f in row["forms"])]
    print(*(problems or [f"{len(cases)} cases, each within its budget"]), sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
