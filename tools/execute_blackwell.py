#!/usr/bin/env python3
"""Executes every kernel that a Blackwell GPU runs, instruction by instruction on a CPU -> OUT (docs/blackwell.md).

    cases of tests/support/blackwell_cases.py, each in one of some processes: errors against fp64, findings of races
    deletions of tests/support/ptx/mutations.py: the instructions that order a kernel, one left out at a time

The exit status is 1 if a result is beyond its budget, a case raised, a finding is not understood, or a kernel of ours
was not executed. Needs no GPU, and the packages of the `cuda` and `dev` extras.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import RESULTS, command_line, environment, relative, write_json

OUT = RESULTS / "blackwell-executed.json"


def run_case(index: int) -> dict[str, Any]:
    """A row of the table, in this process."""
    from tests.support import blackwell_cases as blackwell

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
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
    }


def rows_of(indices: Sequence[int], jobs: int, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """As they are done; what raised is a problem."""
    from tests.support import blackwell_cases as blackwell

    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(run_case, index): index for index in indices}
        for future in as_completed(futures):
            index = futures[future]
            try:
                yield index, future.result()
            except Exception as problem:
                case, schedule, _ = blackwell.table()[index]
                problems.append(f"{case.name}, {schedule}: {type(problem).__name__}: {problem}")


def problems_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    from tests.support import blackwell_cases as blackwell

    for row in rows:
        name = f"{row['case']}, {row['schedule']}"
        if not row["error"] <= row["budget"]:
            yield f"{name}: the error of {row['result']} is {row['error']:.3e}, its budget {row['budget']:.3e}"
        yield from (f"{name}: {found}" for found in blackwell.unknown(row["findings"]))


def main(argv: Sequence[str] | None = None) -> int:
    from tests.support import blackwell_cases as blackwell

    parser = argparse.ArgumentParser(description="Execute every kernel of Blackwell on a CPU.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON file (default: {relative(OUT)})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--match", default="", help="only cases whose name holds this, which misses kernels")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    args = parser.parse_args(argv)
    table = blackwell.table()
    indices = [i for i, (case, _, _) in enumerate(table) if args.match in case.name]
    if not indices:
        parser.error(f"--match {args.match!r} fits none of {len(table)} cases")
    if args.list:
        print(*(f"{table[i][0].name}, {table[i][1]}" for i in indices), sep="\n")
        return 0
    rows, problems = {}, []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("cases", total=len(indices))
        for index, row in rows_of(indices, args.jobs, problems):
            rows[index] = row
            progress.update(task, completed=len(rows) + len(problems), description=row["case"][:40])
    ordered = [rows[i] for i in sorted(rows)]
    problems += problems_of(ordered)
    if not args.match:
        missing = blackwell.missing(form for row in ordered for form in row["forms"])
        problems += [f"{form} was not executed" for form in missing]
    facts = {**environment(torch.device("cpu")), "device": "interpreted"}
    write_json(args.out, {**facts, "command": command_line(argv), "cases": ordered})
    print(*(problems or [f"{len(ordered)} cases, each within its budget"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
