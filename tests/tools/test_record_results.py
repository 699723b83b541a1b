"""tools/record_results.py: which files it records, by what commands, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import record_results as tool

HERE, BEFORE = "a" * 12, "b" * 12
SCRIPT = """
import json, sys
name, status, made_at = sys.argv[1:4]
if made_at:
    command = "python " + " ".join(sys.argv)
    json.dump({"commit": made_at, "command": command}, open(sys.argv[-1] + ".json", "w"))
sys.exit(int(status))
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of HERE, with a benchmark."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "one.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(tool, "commit", lambda root: HERE)
    return tmp_path


def add(root: Path, name: str, made_at: str = BEFORE, status: int = 0, after: str = HERE, **facts: str) -> Path:
    """A file of results, and what its command will do."""
    path = root / "bench" / "results" / f"{name}.json"
    command = f"python bench/one.py {name} {status} '{after}' --out bench/results/{name}"
    path.write_text(json.dumps({"commit": made_at, "command": command, **facts}), encoding="utf-8")
    return path


def commit_of(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["commit"])


def test_files_of_other_commits_are_recorded_and_what_fails_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(root, "new", HERE, status=1)
    add(root, "stopped", HERE, gate="unfinished")
    add(root, "missed", status=1)
    add(root, "silent", after="")
    old = add(root, "old")
    assert tool.main(["new", "stopped", "missed", "silent", "old"], root) == 1
    assert commit_of(old) == HERE
    told = capsys.readouterr().out.splitlines()
    assert "new: is of this commit" in told
    assert any(line.startswith("stopped: recorded") for line in told)
    assert told[-2:] == ["missed: exit status 1", "silent: did not write the file"]
    assert tool.main(["new", "stopped", "old"], root) == 0


def test_a_command_is_stopped_when_its_time_is_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "bench" / "one.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    add(root, "long")
    add(root, "next")
    assert tool.main(["long", "next", "--seconds=1"], root) == 1
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == "long: stopped: the time is over; the same command continues"
    assert second == "next: not begun: the time is over"


COMMAND = '{"commit": "c", "command": "python bench/one.py --out bench/results/one"}'


@pytest.mark.parametrize(
    ("content", "state", "message"),
    [
        (None, HERE, "names no commit and command"),
        ('{"commit": "c", "command": null}', HERE, "does not write it"),
        (COMMAND.replace('/one"', '/other"'), HERE, "does not write it"),
        (COMMAND, f"{HERE}+changes", f"here it is {HERE}+changes"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    state: str,
    message: str,
) -> None:
    good = add(root, "good")
    monkeypatch.setattr(tool, "commit", lambda root: state)
    if content is not None:
        (root / "bench" / "results" / "one.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        tool.main(["good", "one"], root)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert commit_of(good) == BEFORE, "nothing ran"


def test_commands_of_this_checkout() -> None:
    """Scripts of recorded results are still there."""
    for name in ("e2e-h200", "paper-h200", "decode-h200", "needle-h200", "train-context-parallel4-h200"):
        script = next(word for word in tool.read(name).command[1:] if not word.startswith("-"))
        assert (tool.ROOT / script).exists()
