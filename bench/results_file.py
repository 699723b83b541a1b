"""The file of a benchmark's results: tried before anything is measured, written part by part, resumed.

A part is what is measured together, such as one length. The file has every part that is done, and its `gate` is
"unfinished" until all are. The same command resumes such a file if device, versions and commit are the same, too;
otherwise it starts again, and says so. A wrong result removes the rows of all parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.bars import Bar
from bench.common import with_ending
from bench.oracles import Error
from bench.report import relative, write_json
from bench.show import row_line, say, show_bars

INTERRUPTED = 130  # Status of a script that Ctrl-C ended
Row = dict[str, Any]
Measurement = tuple[str, Callable[[], Iterable[Any]]]
"""The name of a part, and a function that gives its rows, and reasons why something did not run; or WrongResult."""


class WrongResult(Exception):
    """Results that are not what they must be, a text for each: nothing that was measured counts."""


def hold(what: str, error: Error) -> None:
    if not error.within:
        raise WrongResult(f"{what}: {error}")


@dataclass(frozen=True)
class Part:
    """Rows that were measured together."""

    rows: list[Row]
    missing: list[Any]  # Peers or cases that did not run, and why


@dataclass
class Results:
    """Results so far. Made by `open_results`."""

    path: Path
    head: dict[str, Any]
    """Fields that all rows share, known before they are measured. A file with others is not resumed."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields that all rows share, measured by the first of the runs that resume each other."""
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for part in self.parts.values() for row in part.rows]

    @property
    def missing(self) -> list[Any]:
        return [reason for part in self.parts.values() for reason in part.missing]

    def fact(self, name: str, measure: Callable[[], Any]) -> Any:
        """A figure that is measured once for all rows, such as a bandwidth. None is measured again."""
        if self.facts.get(name) is None:
            self.facts[name] = measure()
        return self.facts[name]

    def measure(self, parts: Iterable[Measurement], line: str | None) -> bool:
        """Measure and print the parts that the file lacks; returns False after a wrong result.

        Args: `line`: of a row, for `row_line`; None: nothing is printed.
        """
        try:
            for name, run in parts:
                if name not in self.parts:
                    found = list(run())
                    rows, missing = ([x for x in found if isinstance(x, dict) == is_row] for is_row in (True, False))
                    self.add(name, rows, missing)
                    if line is not None:
                        print(*(row_line(line, row) for row in rows), *missing, sep="\n", flush=True)
                del run  # with the tensors that it holds
        except WrongResult as wrong:
            self._write("red", red=list(wrong.args), missing=[], rows=[])
            print("Wrong results, so no times are reported:", *wrong.args, sep="\n  ")
            return False
        return True

    def add(self, name: str, rows: Sequence[Row], missing: Sequence[Any] = ()) -> None:
        self.parts[name] = Part(list(rows), list(missing))
        self._write("unfinished", parts={name: asdict(part) for name, part in self.parts.items()})

    def finish(self, *, checked: bool = True, **more: Any) -> None:
        """Record that all parts are done."""
        self._write("green" if checked else "unchecked", red=[], **more, rows=self.rows)

    def _write(self, gate: str, **fields: Any) -> None:
        if gate in ("unfinished", "red"):  # a plot that is there shows rows of before
            with_ending(self.path, ".png").unlink(missing_ok=True)
        write_json(self.path, {**self.head, **self.facts, "gate": gate, **fields})

    def kept(self) -> str:
        """A sentence about the rows that an interrupt leaves."""
        if not self.parts:
            return "No rows yet."
        return f"{relative(self.path)} keeps the {len(self.rows)} rows so far; the same command goes on from there."

    def go_on(self) -> str:
        """Take over the parts of the file; returns a note about it. Raises SystemExit for a file of something else."""
        content, where = read_results(self.path), relative(self.path)
        if content.get("gate") != "unfinished":
            return ""
        head = json.loads(json.dumps(self.head))
        if changes := differences(head, content):
            return f"Starting anew, since the unfinished results in {where} differ: {'; '.join(changes)}"
        self.parts = {name: Part(**part) for name, part in content["parts"].items()}
        self.facts = {name: value for name, value in content.items() if name not in (*head, "gate", "parts")}
        return f"Going on from the {len(self.rows)} rows in {where}"


def run(
    args: argparse.Namespace,
    head: dict[str, Any],
    parts: Callable[[Results], Iterable[Measurement]],
    line: str | None,
    *,
    fields: Callable[[Results], dict[str, Any]] = lambda results: {"missing": results.missing},
    bars: Callable[[list[Row]], Iterable[Bar]] | None = None,
    plot: Callable[[Results, Path], None] | None = None,
    show: Callable[[dict[str, Any]], None] | None = None,
    checked: bool = True,
) -> int:
    """Measure and write OUT.json (schema: docs/results_files.md) after every part; returns the status of the script.

    Args:
        parts: what is measured, given the results so far. line: as in `Results.measure`.
        fields: of the file, besides rows and bars, once all parts are done. bars: count if `args.bars`.
        plot: draws OUT.png. show: prints the fields of the file, once it is written, before bars.
        checked: False if nothing is.
    """
    out = Path(args.out)
    with open_results(out, {**head, "command": args.command}) as results:
        if not results.measure(parts(results), line):
            return 1
        more = fields(results)
        reached = list(bars(results.rows)) if bars and args.bars else None
        if reached is not None:
            more["bars"] = [bar.as_json() for bar in reached]
        if plot:
            plot(results, with_ending(out, ".png"))
        results.finish(checked=checked, **more)
    if show:
        show({**results.facts, **more, "rows": results.rows})
    if reached is not None:
        show_bars(reached)
    written = (with_ending(out, ending) for ending in (".png", ".json"))
    say("   ".join(str(relative(path)) for path in written if path.exists()))
    return 0


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Fields of `now` that are others in a file of before, for readers."""
    return [f"{name} is {now[name]!r}, was {before.get(name)!r}" for name in now if now[name] != before.get(name)]


def read_results(path: Path) -> dict[str, Any]:
    """Content of a results file; empty if there is none. Raises SystemExit for a file that holds something else."""
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"device", "versions", "commit"} <= set(content):
            raise ValueError("other fields")
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"{relative(path)} holds no results of this project; name another --out") from error
    return content


@contextmanager
def open_results(out: Path, head: dict[str, Any]) -> Iterator[Results]:
    """The results OUT.json, with OUT.png; prints what becomes of a file. May raise SystemExit."""
    results = Results(with_ending(out, ".json"), head)
    with held(results.path, results.kept):
        if note := results.go_on():
            print(note, flush=True)
        yield results


@contextmanager
def replaced_results(out: Path) -> Iterator[None]:
    """Try OUT.json for a script that replaces it. Raises SystemExit as `held`, and for a file of something else."""
    path = with_ending(out, ".json")
    with held(path, lambda: f"{relative(path)} has what was written before, if anything."):
        read_results(path)
        yield


@contextmanager
def held(path: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Raise SystemExit at once where no file can be written, and at an interrupt. Args: kept: what that leaves."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise SystemExit(f"--out: {relative(path)} cannot be written: {error}") from error
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept()}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
